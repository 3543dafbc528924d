"""Order, duplicates and gaps of one channel: what the numbers in the envelopes are for.

Theory of operation
-------------------
Each (publisher, channel) is a stream of numbered messages. A stream is

* ``open``: ``next`` is known. The expected number is delivered, a lower one is a duplicate, a higher one is held, as
  the copy of the missing one is probably on its way through a dispatcher;
* ``opening``: the first message that came says ROUTE_CHANGED, so that earlier ones may still be on their way by the
  old route, and the one before it is *owed*: the subscription was confirmed before that was published. Everything is
  held. The first message of which that is not true and that is lower than all held opens the stream.

What is held is released after ``hold_s_max``: an open stream then reports the missing numbers as a gap; an opening
one begins with what it has, and reports a gap should an earlier message come yet.

Raw messages that a dispatcher numbered (RAW) have no order to keep, as others of the same publisher come without a
number: they are delivered as they come, each number once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from dynamoth.envelope import FIRST, HEARTBEAT, RAW, ROUTE_CHANGED

HELD_MAX = 10_000
"""Messages of one stream that are held back at most; past it the oldest gap is given up at once."""

STREAMS_MAX = 100_000
"""Publishers of one channel that are remembered at most; past it the one that was known first is forgotten. About 200
bytes each."""

DISPATCHERS_MAX = 64
"""Dispatchers whose raw messages are remembered per channel; each start of one counts."""


RAW_WINDOW = 1024
"""Numbers of raw messages that are remembered per dispatcher; one so much older than the newest is taken for a
duplicate."""


_LATE = "not arrived in time"
_NOT_FORWARDED = "the publisher sent messages while a dispatcher was away"


@dataclass(slots=True)
class Gap:
    """Messages of ``publisher`` that were not delivered. ``count`` None means that nobody knows how many."""

    publisher: int
    count: int | None
    reason: str


Outcome = bytes | Gap
"""What comes out, in the order of delivery."""


@dataclass(slots=True)
class Stream:
    """One publisher's messages on one channel."""

    #: The number to be delivered next; None while the stream is opening.
    next: int | None
    #: Number to (payload, time of arrival), for messages that wait for an earlier one; payload None for a heartbeat.
    held: dict[int, tuple[bytes | None, float]] = field(default_factory=dict[int, tuple[bytes | None, float]])
    #: Heap of the numbers in ``held``, and of some that are not any more.
    _numbers: list[int] = field(default_factory=list[int])
    #: While opening: lower numbers were delivered to an earlier subscription of the same subscriber.
    floor: int = 0
    #: The number with which a stream began by time-out, so that an earlier one would be a loss; 0 for other streams.
    begun_in_doubt_at: int = 0
    #: While opening: the publisher has said that messages of this stream may not have been forwarded.
    warned: bool = False
    #: Whether somebody has promised to call :meth:`expire` at ``waits_until``.
    watched: bool = False
    #: ``next`` at the latest sweep; a stream that has not moved between two sweeps is idle.
    swept_at: int | None = -1

    def arrive(
        self, publisher: int, sequence: int, flags: int, payload: bytes, now: float, owed: bool
    ) -> list[Outcome]:
        """Take one message that is not simply the expected one; return what is to be delivered now, in order."""
        if self.next is None:
            return self._arrive_opening(publisher, sequence, flags, payload, now, owed)
        if flags & HEARTBEAT:
            if sequence >= self.next and sequence not in self.held:
                self._hold(sequence, None, now)
            return self._bounded(publisher)
        if sequence < self.next:
            return self._late(publisher, sequence)
        if flags & FIRST and sequence > self.next:
            return self._restart(publisher, sequence, payload)
        if sequence == self.next:
            self.held.pop(sequence, None)
            self.next = sequence + 1
            return [payload, *self._run()]
        if self.held.get(sequence, (None, 0.0))[0] is None:
            self._hold(sequence, payload, now)
        return self._bounded(publisher)

    def expire(self, publisher: int, now: float, hold_s_max: float) -> list[Outcome]:
        """Release what has been held for ``hold_s_max`` seconds; return what is to be delivered now, in order."""
        out: list[Outcome] = []
        while self.held and self.waits_until(hold_s_max) <= now:
            out += self._begin_in_doubt(publisher) if self.next is None else self._give_up(publisher, _LATE)
        return out

    def waits_until(self, hold_s_max: float) -> float:
        """Return when the oldest held message must be released. Only while something is held."""
        return self.held[self._lowest()][1] + hold_s_max

    def resume(self) -> None:
        """Be opening again: the subscription begins anew, and what was delivered already is not owed to it."""
        self.floor = self.floor if self.next is None else self.next
        self.next = None
        self.held.clear()
        self._numbers.clear()
        self.begun_in_doubt_at = 0
        self.warned = False
        self.watched = False

    def _arrive_opening(
        self, publisher: int, sequence: int, flags: int, payload: bytes, now: float, owed: bool
    ) -> list[Outcome]:
        if sequence < self.floor:
            return []
        if flags & HEARTBEAT:
            self.warned = owed
            if self.held:
                return []
            self.next = sequence + 1
            return [Gap(publisher, None, _NOT_FORWARDED)] if owed else []
        if flags & FIRST:
            return [*self._held_before(sequence), *self._open(sequence, payload)]
        if not (flags & ROUTE_CHANGED and owed) and (not self.held or sequence <= self._lowest()):
            return self._open(sequence, payload)
        if sequence not in self.held:
            self._hold(sequence, payload, now)
        return self._bounded(publisher)

    def _open(self, sequence: int, payload: bytes) -> list[Outcome]:
        self.held.pop(sequence, None)
        self.next = sequence + 1
        return [payload, *self._run()]

    def _restart(self, publisher: int, sequence: int, payload: bytes) -> list[Outcome]:
        """Begin again where the publisher did; what was held from before is released with its gaps."""
        out: list[Outcome] = []
        while self.held and self._lowest() < sequence:
            out += self._give_up(publisher, "the publisher began a new sequence")
        if self.next is not None and self.next > sequence:  # a copy of it was held
            return out
        return [*out, *self._open(sequence, payload)]

    def _begin_in_doubt(self, publisher: int) -> list[Outcome]:
        self.next = self.begun_in_doubt_at = self._lowest()
        warning: list[Outcome] = [Gap(publisher, None, _NOT_FORWARDED)] if self.warned else []
        return [*warning, *self._run()]

    def _late(self, publisher: int, sequence: int) -> list[Outcome]:
        if self.floor <= sequence < self.begun_in_doubt_at:
            return [Gap(publisher, 1, "arrived too late to be delivered in order")]
        return []

    # What is held.

    def _hold(self, sequence: int, payload: bytes | None, now: float) -> None:
        if sequence not in self.held:
            heappush(self._numbers, sequence)
        self.held[sequence] = payload, now

    def _lowest(self) -> int:
        """Return the lowest number that is held. Only while something is."""
        while self._numbers[0] not in self.held:
            heappop(self._numbers)
        return self._numbers[0]

    def _held_before(self, sequence: int) -> list[Outcome]:
        out: list[Outcome] = []
        while self.held and (lowest := self._lowest()) < sequence:
            payload = self.held.pop(lowest)[0]
            assert payload is not None, "no heartbeat is held while opening"
            out.append(payload)
        return out

    def _bounded(self, publisher: int) -> list[Outcome]:
        if len(self.held) <= HELD_MAX:
            return []
        return (
            self._begin_in_doubt(publisher) if self.next is None else self._give_up(publisher, "too many wait for it")
        )

    def _run(self) -> list[Outcome]:
        """Take the held messages that are now in order."""
        out: list[Outcome] = []
        assert self.next is not None
        while self.held and (item := self.held.get(self.next)) is not None and item[0] is not None:
            del self.held[self.next]
            out.append(item[0])
            self.next += 1
        if not self.held:
            self._numbers.clear()
        return out

    def _give_up(self, publisher: int, reason: str) -> list[Outcome]:
        """Report the numbers before the lowest held one as a gap, and go on with that."""
        assert self.next is not None
        lowest = self._lowest()
        heartbeat = self.held[lowest][0] is None
        count = lowest - self.next + heartbeat
        if heartbeat:
            del self.held[lowest]
        self.next = lowest + heartbeat
        return [Gap(publisher, count, reason), *self._run()]


_NO_STREAMS: dict[int, Stream] = {}
"""Of a channel without messages: nothing is ever put in here."""


class Sequences:
    """The streams of one channel, as one subscriber sees them. Memory: one ``Stream`` per live publisher."""

    __slots__ = ("_raw", "hold_s_max", "streams")

    def __init__(self, hold_s_max: float) -> None:
        """Begin without knowledge of any publisher."""
        self.hold_s_max = hold_s_max
        #: Publisher to stream. The subscriber's hot path looks in here itself.
        self.streams: dict[int, Stream] = _NO_STREAMS
        #: Dispatcher to the latest numbers of its raw messages; None before the first of these.
        self._raw: dict[int, dict[int, None]] | None = None

    def arrive(
        self, publisher: int, sequence: int, flags: int, payload: bytes, now: float, owed: bool
    ) -> list[Outcome]:
        """Take one message; return what is to be delivered now, in order.

        ``owed``: the publisher's previous message (of a heartbeat: the one that it tells of) may have been published
        after the subscription was confirmed.
        """
        if flags & RAW:
            return self._arrive_raw(publisher, sequence, payload)
        stream = self.streams.get(publisher)
        if stream is None:
            if not self.streams:
                self.streams = {}
            elif len(self.streams) >= STREAMS_MAX:
                del self.streams[next(iter(self.streams))]
            stream = self.streams[publisher] = Stream(None)
        return stream.arrive(publisher, sequence, flags, payload, now, owed)

    def resume(self) -> None:
        """Begin anew with a subscription to the same channel: what was delivered to the last one is not again."""
        for stream in self.streams.values():
            stream.resume()

    def _arrive_raw(self, dispatcher: int, sequence: int, payload: bytes) -> list[Outcome]:
        if self._raw is None:
            self._raw = {}
        seen = self._raw.get(dispatcher)
        if seen is None:
            if len(self._raw) >= DISPATCHERS_MAX:
                del self._raw[next(iter(self._raw))]
            seen = self._raw[dispatcher] = {}
        if sequence in seen or (len(seen) == RAW_WINDOW and sequence < next(iter(seen))):
            return []
        seen[sequence] = None
        if len(seen) > RAW_WINDOW:
            del seen[next(iter(seen))]
        return [payload]

    def expire(self, publisher: int, now: float) -> list[Outcome]:
        """Release what one stream has held for too long; return what is to be delivered now, in order."""
        stream = self.streams.get(publisher)
        if stream is None:
            return []
        stream.watched = False
        return stream.expire(publisher, now, self.hold_s_max)

    def watch(self, publisher: int) -> float | None:
        """Return when :meth:`expire` is to be called for ``publisher``; None when it holds nothing, or is watched."""
        stream = self.streams.get(publisher)
        if stream is None or stream.watched or not stream.held:
            return None
        stream.watched = True
        return stream.waits_until(self.hold_s_max)

    def forget_idle(self) -> None:
        """Forget the streams of which nothing was delivered since the previous call."""
        for publisher, stream in list(self.streams.items()):
            if stream.swept_at == stream.next and not stream.held:
                del self.streams[publisher]
            stream.swept_at = stream.next
