"""Delays the reads of a busy agent by some milliseconds, so that it reads in large pieces.

Theory of operation
-------------------
Each time an agent wakes up, others' data has displaced its own from the processor's caches, and Redis spends time on
waking it. With few messages at a time both cost more than the messages. So while there are many messages per second,
the agent stops reading for ``GATHER_S`` after each read.

Messages wait in the socket's buffer meanwhile. When a read nearly empties a full buffer, the agent is behind, and
reads on without a pause.

The price: at a busy server a notice to a publisher with an old route, and the copy of its message, leave up to
``GATHER_S`` later. While a channel is in transition here, many messages are forwarded, so the agent does not wait then.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dynamoth_link.link import Link
from dynamoth_link.resp import FEED_BYTES

GATHER_S = 0.010
"""How long messages wait. At 100,000 messages/s some 1,000 are then read at once. With half of it the agent needed 15%
more processor time per message."""

BUSY_MESSAGES_PER_S = 5_000.0
"""With fewer messages the agent does not wait: it has time for each."""

READS_JUDGED = 16
"""The number of reads over which the rate is measured."""

RECEIVE_BUFFER_BYTES = 1024 * 1024
"""The requested size; Linux gives as much as ``net.core.rmem_max`` allows."""


class Gathering:
    """Pauses a link between reads. Give :meth:`observed` to the driver as ``on_pushes``.

    Args:
        loop: the event loop of the link.
        name: the link's name; other links are left alone.
        find_link: returns it; None when there is none.
        may_wait: returns whether no message of the link is urgent.

    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        find_link: Callable[[], Link | None],
        may_wait: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._name = name
        self._find_link = find_link
        self._may_wait = may_wait
        #: Parts of at most ``FEED_BYTES`` that the present read has brought; 0 between reads.
        self._parts = 0
        #: A read of this many parts shows that the agent is behind.
        self._parts_max = 1
        self._is_busy = False
        #: Reads and messages since the rate was judged last, and when that was.
        self._reads = 0
        self._messages = 0
        self._judged_at = loop.time()

    def link_up(self) -> None:
        """Enlarge the buffer of a new connection's socket, and find out how much fits into it."""
        link = self._find_link()
        if link is None or link.fileno < 0:
            return
        with socket.socket(fileno=os.dup(link.fileno)) as same:
            with suppress(OSError):
                same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            # The kernel reports twice the room for data: the other half is for its own records.
            room = same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
        self._parts_max = max(1, room * 3 // 4 // FEED_BYTES)

    def observed(self, name: str, messages: list[list[Any]]) -> int:
        """Count the messages of a read; return 0, as the machine has to handle all of it."""
        if name == self._name:
            self._messages += len(messages)
            if not self._parts:
                self._loop.call_soon(self._read_ended)
            self._parts += 1
        return 0

    def _read_ended(self) -> None:
        parts, self._parts = self._parts, 0
        self._reads += 1
        if self._reads == READS_JUDGED:
            self._judge()
        if not self._is_busy or parts >= self._parts_max or not self._may_wait():
            return
        link = self._find_link()
        if link is not None:
            link.pause_reading()
            self._loop.call_later(GATHER_S, self._read_on)

    def _judge(self) -> None:
        now = self._loop.time()
        self._is_busy = self._messages > BUSY_MESSAGES_PER_S * (now - self._judged_at)
        self._reads = self._messages = 0
        self._judged_at = now

    def _read_on(self) -> None:
        link = self._find_link()
        if link is not None:
            link.resume_reading()
