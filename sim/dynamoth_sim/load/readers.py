"""An application that reads slowly: its messages wait in the client's own bounded queue.

The queue, and what becomes of messages while it is full (``when_full="block"``), are those of the real client. Only
their bounds are smaller, and the times shorter, as everything here is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from dynamoth_client.machines.subscriber.events import Deliver, GapDetected
from dynamoth_client.runtime.backpressure import MESSAGE_BYTES, Blocking
from dynamoth_client.runtime.queue import Dropped, MessageQueue, Notice
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.world import World

QUEUE_MAX = 4
SPILLED_MAX = 12
"""Bounds of the queue and of the spill: a burst of messages exceeds both."""

PAYLOAD_BYTES = 16
"""Counted size of a payload; real payloads here are smaller."""

PAUSE_S_MAX = 0.1
"""A tenth of the real client's ``PAUSE_S_MAX``."""


class SlowReader:
    """Reads one item each ``take_s``.

    Args:
        world: time.
        process: that of the subscriber; its connections are not read from while the queue says so.
        take_s: how long the application takes for an item.
        tell: is given each action as the application comes to it.

    """

    def __init__(self, world: World, process: Process, take_s: float, tell: Callable[[Any], None]) -> None:
        self._world = world
        self._process = process
        self._take_s = take_s
        self._tell = tell
        self._queue = MessageQueue(QUEUE_MAX)
        self._blocking = Blocking(
            self._queue,
            pause=process.pause_reading,
            resume=process.resume_reading,
            later=world.after,
            pause_s_max=PAUSE_S_MAX,
            spill_bytes_max=SPILLED_MAX * (MESSAGE_BYTES + PAYLOAD_BYTES),
        )
        self._queue.watch(self._blocking.on_full, self._make_room)
        #: What the notices in the queue stand for, in their order.
        self._actions: deque[Any] = deque()
        #: Whose messages have been skipped since the queue is full.
        self._skipped: set[Dropped] = set()
        self._is_over = False
        world.after(take_s, self._take)

    def put(self, action: Any) -> None:
        """Queue an action of the machine for the application."""
        if type(action) is not Deliver:
            self._put_notice(action)
        elif self._queue.is_full:
            self._note_skipped(self._blocking.put(action.messages))
        else:
            self._queue.extend(action.messages)

    def read_all(self) -> None:
        """Read everything that waits, and from now on everything at once."""
        self._is_over = True
        while self._process.alive and self._queue.items:
            self._read_one()

    def _put_notice(self, action: Any) -> None:
        self._actions.append(action)
        self._queue.put(Notice("action", None, 0))

    def _note_skipped(self, skipped: Counter[Dropped]) -> None:
        for subject in skipped:
            if subject not in self._skipped:
                self._skipped.add(subject)
                self._put_notice(GapDetected(subject[0], None, None, "the application reads too slowly"))

    def _make_room(self) -> None:
        self._skipped.clear()
        self._blocking.on_room()

    def _take(self) -> None:
        if self._is_over or not self._process.alive:
            return
        if self._queue.items and not self._process.paused:
            self._read_one()
        self._world.after(self._take_s, self._take)

    def _read_one(self) -> None:
        item = self._queue.items.popleft()
        self._queue.relieve()
        if isinstance(item, Notice):
            self._queue.has_read(item)
            self._tell(self._actions.popleft())
        else:
            assert isinstance(item, tuple), "channels only"
            self._tell(Deliver([item]))
