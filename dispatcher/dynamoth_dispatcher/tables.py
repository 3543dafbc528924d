"""Bounded tables of a dispatcher for messages that anybody may publish: a backlog, and the numbers of raw messages."""

from __future__ import annotations

from collections import Counter, deque

from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable


class Backlog:
    """Messages that wait for the first plan, oldest first; past its bounds the oldest are dropped.

    Args:
        messages_max: most messages.
        bytes_max: most bytes; one message is kept however large it is.

    """

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        #: Physical channel and data.
        self._messages: deque[tuple[bytes, bytes]] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._messages)

    def put(self, physical: bytes, data: bytes) -> int:
        """Add a message; return how many others were dropped."""
        self._messages.append((physical, data))
        self.size_bytes += _message_bytes(physical, data)
        dropped = 0
        while len(self) > self._messages_max or (self.size_bytes > self._bytes_max and len(self) > 1):
            self.take()
            dropped += 1
        return dropped

    def take(self) -> tuple[bytes, bytes]:
        """Remove the oldest message and return it."""
        physical, data = self._messages.popleft()
        self.size_bytes -= _message_bytes(physical, data)
        return physical, data


def _message_bytes(physical: bytes, data: bytes) -> int:
    return len(physical) + len(data) + ENTRY_BYTES


class RawNumbers:
    """The numbers of raw messages, by channel. An evicted channel continues above its latest number.

    Args:
        channels_max: most channels.
        bytes_max: approximate memory for them.
        counters: those of the dispatcher.

    """

    def __init__(self, channels_max: int, bytes_max: int, counters: Counter[str]) -> None:
        self._counters = counters
        self._latest: BoundedTable[bytes, int] = BoundedTable(
            channels_max, bytes_max, lambda channel, _: len(channel) + ENTRY_BYTES, self._forget
        )
        #: Every evicted channel ended at or below this number.
        self._floor = 0

    def next(self, channel: bytes) -> tuple[int, bool]:
        """Return the number of the next raw message of a channel, and whether the numbers begin with it."""
        latest = self._latest.get(channel)
        number = (self._floor if latest is None else latest) + 1
        self._latest.put(channel, number)
        return number, latest is None

    def _forget(self, channel: bytes, latest: int) -> None:
        self._floor = max(self._floor, latest)
        self._counters["raw_channels_evicted"] += 1
