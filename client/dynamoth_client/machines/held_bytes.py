"""Releases the messages that one subscriber holds back: when their time is over, or when they take too many bytes.

A client may send messages, under many ids, that wait for others which never come. ``hold_s_max`` bounds how long they
wait, and ``HELD_MAX`` how many of one publisher; here their bytes are bounded, over all channels and publishers. Past
the bound the streams that have been holding the longest are released first, with their gaps, as if their time was over.
So messages of honest publishers still wait as long as the bound allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from dynamoth.machine.timers import Timers
from dynamoth_client.machines.sequences import Outcome, Sequences

HELD_BYTES_MAX = 64 * 2**20
"""Bytes of held messages per subscriber, about: 130,000 messages of 300 bytes, far more than half a second brings."""


class Holder(Protocol):
    """A channel of the subscriber."""

    sequences: Sequences

    @property
    def is_current(self) -> bool:
        """Whether the application still listens to it."""
        ...


_Holder = TypeVar("_Holder", bound=Holder)
_Action = TypeVar("_Action")


class HeldMessages(Generic[_Holder, _Action]):
    """The held messages of one subscriber."""

    def __init__(
        self,
        counters: Counter[str],
        timers: Timers[_Action],
        released: Callable[[_Holder, Sequence[Outcome]], list[_Action]],
        has_successor: Callable[[_Holder], bool] = lambda _: False,
    ) -> None:
        """Begin with nothing.

        Args:
            counters: those of the machine.
            timers: those of the machine.
            released: returns the actions for messages and gaps of a channel.
            has_successor: whether another holder uses the sequences of one that has ended.

        """
        self._counters = counters
        self._timers = timers
        self._released = released
        self._has_successor = has_successor
        #: Channel and publisher of each stream that holds messages, with their bytes; the longest holding one first.
        self._streams: dict[tuple[int, int], tuple[_Holder, int, int]] = {}
        #: Sum of the held bytes. A stream whose messages were dropped with its channel counts until it expires.
        self.size_bytes = 0

    def watch(self, holder: _Holder, publisher: int) -> None:
        """Count the messages that a stream holds now, and set the timer that releases them.

        To be called whenever they may have changed.
        """
        self._count(holder, publisher, holder.sequences.held_bytes(publisher))
        if (expiry := holder.sequences.watch(publisher)) is not None:
            self._timers.add(expiry, self._expire, holder, publisher)

    def relieve(self, now: float) -> list[_Action]:
        """Release held messages while too many bytes are held."""
        actions: list[_Action] = []
        while self.size_bytes > HELD_BYTES_MAX:
            holder, publisher, _ = next(iter(self._streams.values()))
            self._counters["held_bytes_exceeded"] += 1
            outcomes = holder.sequences.give_up(publisher, now)
            self._count(holder, publisher, holder.sequences.held_bytes(publisher))
            if holder.is_current:
                actions += self._released(holder, outcomes)
        return actions

    def _expire(self, holder: _Holder, publisher: int, now: float) -> list[_Action]:
        """Release the messages that one stream has held for too long."""
        if holder.is_current:
            outcomes = holder.sequences.expire(publisher, now)
            self.watch(holder, publisher)
            return self._released(holder, outcomes)
        if not self._has_successor(holder):
            holder.sequences.drop_held(publisher)
        self._count(holder, publisher, 0)
        return []

    def _count(self, holder: _Holder, publisher: int, size: int) -> None:
        key = id(holder), publisher
        known = self._streams.get(key)
        if known is not None:
            self.size_bytes -= known[2]
        if size:
            self.size_bytes += size
            self._streams[key] = holder, publisher, size
        elif known is not None:
            del self._streams[key]

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert self.size_bytes == sum(size for _, _, size in self._streams.values()), f"{self.size_bytes} bytes held"
        assert self.size_bytes <= HELD_BYTES_MAX, f"{self.size_bytes} bytes held, which are too many"
