"""Bounds the messages of a reader that is too slow, with ``when_full="block"``.

Theory of operation
-------------------
From the moment at which a queue is full until half of it has been read, it goes through these stages:

* *paused*: servers are not read from, for ``PAUSE_S_MAX``. Messages wait in the servers' buffers.
* *spilling*: servers are read from again, and messages are kept behind the full queue, ``SPILL_BYTES_MAX`` of them.
  Route notices, markers and acknowledgements come on the same connections, between the messages. So a channel whose
  reader has stopped can be moved, and its server drained, all the same.
* *skipping*: further messages are left out and counted. The reader gets a gap in their place.

Without the last two stages, one reader that has stopped keeps its channels in transition until Redis drops its
connection, which some servers are configured never to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from dynamoth_client.runtime.queue import Dropped, Failure, Item, Message, MessageQueue, Notice, subject_of

PAUSE_S_MAX = 1.0
"""How long servers are not read from. A channel with a blocked reader settles about this much later."""

SPILL_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of messages that are kept behind a full queue. As many as Redis keeps by default for a subscriber that does not
read, before it drops the connection (``client-output-buffer-limit pubsub``): it would have lost the rest as well."""

MESSAGE_BYTES = 200
"""About how many bytes a message takes in addition to its payload."""

ROOM_RATIO = 8
"""When their room seems to be used up, the spilled messages are counted again. There is room only if this part of it is
free, so that they are not counted for each message."""


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Cancel the call."""
        ...


class Blocking:
    """Keeps or skips the messages for a queue while that is full.

    Args:
        queue: gets the messages; the owner has it call ``on_full`` and ``on_room`` of this object.
        pause: stops reading from servers.
        resume: reads from servers again.
        later: makes a call after a number of seconds.
        pause_s_max: see ``PAUSE_S_MAX``.
        spill_bytes_max: see ``SPILL_BYTES_MAX``.

    """

    def __init__(
        self,
        queue: MessageQueue,
        *,
        pause: Callable[[], None],
        resume: Callable[[], None],
        later: Callable[[float, Callable[[], None]], Timer],
        pause_s_max: float = PAUSE_S_MAX,
        spill_bytes_max: int = SPILL_BYTES_MAX,
    ) -> None:
        self._queue = queue
        self._pause = pause
        self._resume = resume
        self._later = later
        self._pause_s_max = pause_s_max
        self._spill_bytes_max = spill_bytes_max
        #: Whether servers are not read from.
        self.is_paused = False
        self._is_skipping = False
        #: How many bytes may still be spilled before the spilled ones are counted again.
        self._room_bytes = 0
        self._timer: Timer | None = None

    def on_full(self) -> None:
        """Stop reading, for a while."""
        self._room_bytes = self._spill_bytes_max
        self.is_paused = True
        self._pause()
        self._timer = self._later(self._pause_s_max, self._read_on)

    def _read_on(self) -> None:
        self._timer = None
        self.is_paused = False
        self._resume()

    def on_room(self) -> None:
        """Go back to normal: half of the queue has been read."""
        self._is_skipping = False
        if self.is_paused:
            self.stop()
            self.is_paused = False
            self._resume()

    def stop(self) -> None:
        """End the pause without reading again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def put(self, messages: Iterable[Message]) -> Counter[Dropped]:
        """Keep messages behind the full queue; return how many were skipped, by subscription."""
        skipped: Counter[Dropped] = Counter()
        items = self._queue.items
        for message in messages:
            size = _size(message)
            if not self._is_skipping and size > self._room_bytes:
                self._count_spilled()
                self._is_skipping = size > self._room_bytes or self._room_bytes * ROOM_RATIO < self._spill_bytes_max
            if self._is_skipping:
                skipped[subject_of(message)] += 1
            else:
                self._room_bytes -= size
                items.append(message)
        self._queue.on_grown()
        return skipped

    def _count_spilled(self) -> None:
        """Count the spilled messages that were not read."""
        queue = self._queue
        spilled = list(queue.items)[queue.limit :]  # copied at once, as a thread may read meanwhile
        self._room_bytes = self._spill_bytes_max - sum(map(_size, spilled))


def _size(item: Item) -> int:
    if isinstance(item, tuple):
        return len(item[1]) + MESSAGE_BYTES
    return 0 if isinstance(item, (Notice, Failure)) else len(item.payload) + MESSAGE_BYTES
