"""Bounds the bytes of the messages that one subscriber holds back, over all of its channels and publishers.

A client may send messages, under many ids, that wait for others which never come. ``hold_s_max`` bounds how long they
wait, and ``HELD_MAX`` how many of one publisher; here their bytes are bounded. Past the bound the streams that have
been holding the longest are released first, with their gaps, as if their time was over. So messages of honest
publishers still wait as long as the bound allows.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar

from dynamoth_client.machines.sequences import Outcome, Sequences

HELD_BYTES_MAX = 64 * 2**20
"""Bytes of held messages per subscriber, about: 130,000 messages of 300 bytes, far more than half a second brings."""


class Holder(Protocol):
    """A channel of the subscriber."""

    sequences: Sequences


_Holder = TypeVar("_Holder", bound=Holder)


class HeldMessages(Generic[_Holder]):
    """Counts the held messages of one subscriber, and chooses which are released early."""

    def __init__(self, counters: Counter[str]) -> None:
        """Begin with nothing; ``counters`` are those of the machine."""
        self._counters = counters
        #: Channel and publisher of each stream that holds messages, with their bytes; the longest holding one first.
        self._streams: dict[tuple[int, int], tuple[_Holder, int, int]] = {}
        #: Sum of these bytes. A stream whose messages were dropped with its channel counts until it expires.
        self.size_bytes = 0

    def note(self, holder: _Holder, publisher: int) -> None:
        """Count the messages that a stream holds now. To be called whenever these may have changed."""
        key = id(holder), publisher
        known = self._streams.get(key)
        size = holder.sequences.held_bytes(publisher)
        if known is not None:
            self.size_bytes -= known[2]
        if size:
            self.size_bytes += size
            self._streams[key] = holder, publisher, size
        elif known is not None:
            del self._streams[key]

    def forget(self, holder: _Holder, publisher: int) -> None:
        """Count the messages of a stream no longer under a holder that has ended."""
        known = self._streams.pop((id(holder), publisher), None)
        if known is not None:
            self.size_bytes -= known[2]

    def over(self) -> tuple[_Holder, int] | None:
        """Return the channel and publisher that are to be released; None while the bound is kept."""
        if self.size_bytes <= HELD_BYTES_MAX:
            return None
        holder, publisher, _ = next(iter(self._streams.values()))
        return holder, publisher

    def release(self, holder: _Holder, publisher: int, now: float) -> list[Outcome]:
        """Release the earliest messages of a stream; return the outcomes, in order."""
        self._counters["held_bytes_exceeded"] += 1
        outcomes = holder.sequences.give_up(publisher, now)
        self.note(holder, publisher)
        return outcomes

    def check(self) -> None:
        """Assert what holds between events."""
        assert self.size_bytes == sum(size for _, _, size in self._streams.values()), f"{self.size_bytes} bytes held"
        assert self.size_bytes <= HELD_BYTES_MAX, f"{self.size_bytes} bytes held, which are too many"
