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

from dynamoth.envelope import FIRST, HEARTBEAT, RAW, ROUTE_CHANGED

HELD_MAX = 10_000
"""Messages of one stream that are held back at most; past it the oldest gap is given up at once."""


RAW_WINDOW = 1024
"""Numbers of raw messages that are remembered per dispatcher; one so much older than the newest is taken for a
duplicate."""


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
    #: While opening: lower numbers were delivered to an earlier subscription of the same subscriber.
    floor: int = 0
    #: The number with which a stream began by time-out, so that an earlier one would be a loss; 0 for other streams.
    begun_in_doubt_at: int = 0
    #: While opening: the publisher has said that messages of this stream may not have been forwarded.
    warned: bool = False
    #: ``next`` at the latest sweep; a stream that has not moved between two sweeps is idle.
    swept_at: int | None = -1

    def arrive(
        self, publisher: int, sequence: int, flags: int, payload: bytes, now: float, owed: bool
    ) -> list[Outcome]:
        """Take one message that is not simply the expected one; return what is to be delivered now, in order."""
        if self.next is None:
            return self._arrive_opening(publisher, sequence, flags, payload, now, owed)
        if flags & HEARTBEAT:
            if sequence >= self.next:
                self.held.setdefault(sequence, (None, now))
            return []
        if sequence < self.next:
            return self._late(publisher, sequence)
        if flags & FIRST and sequence > self.next:
            return self._restart(publisher, sequence, payload)
        if sequence == self.next:
            self.next = sequence + 1
            self.held.pop(sequence, None)
            return [payload, *self._run()]
        if self.held.get(sequence, (None, 0.0))[0] is None:
            self.held[sequence] = (payload, now)
        return self._give_up_oldest(publisher, "too many messages wait for it") if len(self.held) > HELD_MAX else []

    def expire(self, publisher: int, now: float, hold_s_max: float) -> list[Outcome]:
        """Release what has been held for ``hold_s_max`` seconds; return what is to be delivered now, in order."""
        out: list[Outcome] = []
        while self.held and self.waits_until(hold_s_max) <= now:
            if self.next is None:
                self.next = self.begun_in_doubt_at = min(self.held)
                out += [Gap(publisher, None, _NOT_FORWARDED)] if self.warned else []
                out += self._run()
            else:
                out += self._give_up_oldest(publisher, "not arrived in time")
        return out

    def waits_until(self, hold_s_max: float) -> float:
        """Return when the oldest held message must be released. Only while something is held."""
        if self.next is None:
            return min(arrived for _, arrived in self.held.values()) + hold_s_max
        return self.held[min(self.held)][1] + hold_s_max

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
        earliest = not self.held or sequence < min(self.held)
        if flags & FIRST or (earliest and not (flags & ROUTE_CHANGED and owed)):
            for earlier in [number for number in self.held if number <= sequence]:
                del self.held[earlier]
            self.next = sequence + 1
            return [payload, *self._run()]
        self.held.setdefault(sequence, (payload, now))
        return []

    def _restart(self, publisher: int, sequence: int, payload: bytes) -> list[Outcome]:
        """Begin again where the publisher did; what was held from before is released with its gaps."""
        out: list[Outcome] = []
        while any(number < sequence for number in self.held):
            out += self._give_up_oldest(publisher, "the publisher began a new sequence")
        self.next = sequence + 1
        return [*out, payload, *self._run()]

    def _late(self, publisher: int, sequence: int) -> list[Outcome]:
        if sequence < self.begun_in_doubt_at:
            return [Gap(publisher, 1, "arrived too late to be delivered in order")]
        return []

    def _run(self) -> list[Outcome]:
        """Take the held messages that are now in order."""
        out: list[Outcome] = []
        assert self.next is not None
        while self.held and (item := self.held.pop(self.next, None)) is not None:
            if item[0] is None:
                self.held[self.next] = item
                break
            out.append(item[0])
            self.next += 1
        return out

    def _give_up_oldest(self, publisher: int, reason: str) -> list[Outcome]:
        assert self.next is not None
        lowest = min(self.held)
        heartbeat = self.held[lowest][0] is None
        count = lowest - self.next + heartbeat
        if heartbeat:
            del self.held[lowest]
        self.next = lowest + heartbeat
        return [Gap(publisher, count, reason), *self._run()]


class Sequences:
    """The streams of one channel, as one subscriber sees them. Memory: one ``Stream`` per live publisher."""

    __slots__ = ("_raw", "hold_s_max", "streams")

    def __init__(self, hold_s_max: float) -> None:
        """Begin without knowledge of any publisher."""
        self.hold_s_max = hold_s_max
        #: Publisher to stream. The subscriber's hot path looks in here itself.
        self.streams: dict[int, Stream] = {}
        #: Dispatcher to the latest numbers of its raw messages.
        self._raw: dict[int, dict[int, None]] = {}

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
            stream = self.streams[publisher] = Stream(None)
        return stream.arrive(publisher, sequence, flags, payload, now, owed)

    def resume(self) -> None:
        """Begin anew with a subscription to the same channel: what was delivered to the last one is not again."""
        for stream in self.streams.values():
            stream.floor = stream.floor if stream.next is None else stream.next
            stream.next = None
            stream.held.clear()
            stream.begun_in_doubt_at = 0
            stream.warned = False

    def _arrive_raw(self, dispatcher: int, sequence: int, payload: bytes) -> list[Outcome]:
        seen = self._raw.setdefault(dispatcher, {})
        if sequence in seen or (len(seen) == RAW_WINDOW and sequence < next(iter(seen))):
            return []
        seen[sequence] = None
        if len(seen) > RAW_WINDOW:
            del seen[next(iter(seen))]
        return [payload]

    def expire(self, publisher: int, now: float) -> list[Outcome]:
        """Release what one stream has held for too long; return what is to be delivered now, in order."""
        stream = self.streams.get(publisher)
        return [] if stream is None else stream.expire(publisher, now, self.hold_s_max)

    def waits_until(self, publisher: int) -> float | None:
        """Return when :meth:`expire` must be called for ``publisher``; None when it holds nothing."""
        stream = self.streams.get(publisher)
        return stream.waits_until(self.hold_s_max) if stream is not None and stream.held else None

    def forget_idle(self) -> None:
        """Forget the streams of which nothing was delivered since the previous call."""
        for publisher, stream in list(self.streams.items()):
            if stream.swept_at == stream.next and not stream.held:
                del self.streams[publisher]
            stream.swept_at = stream.next
