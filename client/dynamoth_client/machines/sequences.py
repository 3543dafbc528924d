"""Keeps the order of one channel's messages, drops duplicates and finds gaps, by the numbers in the envelopes.

Theory of operation
-------------------
Each (publisher, channel) is a stream of numbered messages. Message n is *due* if it was published after the
subscription was confirmed. The envelope of message n + 1 says how long before it message n was published, and a
heartbeat how long ago, so that no clocks are compared: ``previous_at`` is the latest time at which that may have been.
A stream is in one of two states:

========== ==================================== =====================================================================
state      what comes                           what is done
========== ==================================== =====================================================================
opening    FIRST                                opens: no earlier number is due
           ROUTE_CHANGED, predecessor due       held: the predecessor may be on its way by the old route
           one that follows those held          opens at the lowest number held, if it proves its predecessor not due
           another, lower than all held         opens: every earlier number was seen, or is not due
           heartbeat, its number due            held
           heartbeat, its number not due        opens behind it
           nothing for ``hold_s_max``           opens at the lowest number held, with a gap if its predecessor is due
open       the expected number                  delivered
           a lower number                       dropped: it was delivered, reported, or is not due
           a higher number, or its heartbeat    held; opens there if its predecessor is not due
           FIRST, higher                        the held ones and their gaps, then opens
           nothing for ``hold_s_max``           opens at the lowest number held, with a gap if its predecessor is due
========== ==================================== =====================================================================

A gap is reported in its place: behind what was delivered before the missing messages, before what follows them. No loss
is silent, as a stream passes a number only in one of these ways, and ``previous_at`` is never too early: it is when the
next message came, less the time that its publisher said, and a message comes after it was published. No gap is
needless, with one exception: ``previous_at`` is later than the truth by the time that the next message travelled. A
message published so shortly before the confirmation counts as due. Of the messages held, those that follow each other
bound the same moment; the one that travelled fastest decides. On a busy machine, one of the next messages usually
proves that nothing is missing.

Anybody who may publish on a channel can copy a publisher's id and forge numbers. Nobody can tell a forged message from
a true one, so for that publisher's messages there nothing is promised; but a loss that goes on shows. Numbers above
``NUMBER_MAX`` are refused. A jump of more than ``HELD_MAX`` numbers is held, whatever its flags say; if the publisher
goes on below it in the meantime, it is refused and reported as a gap of one. A message below the number where a stream
began, or went on behind a gap, is a late copy for ``LATE_S``, and always if an agent has forwarded it: an agent that
hangs, or that a flood delays, forwards what it has when it goes on. Otherwise somebody has probably moved the stream
ahead of its publisher: it is reported as a gap, at most once per ``LATE_S``. Who moves an open stream ahead again and
again does not put that off: the time counts from the first of such moves. A shorter loss stays silent, and so does one
by forged messages that continue a publisher's numbers: they take the places of the true ones, which are dropped as
copies.

Raw messages that a dispatcher numbered (RAW) have no order to keep, as others of the same publisher come without a
number: they are delivered as they come, each number once. Where a channel becomes plain, its publishers have sent
numbered messages before, and a message without a number does not say whose it is. So it comes behind all those that
wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from dynamoth.protocol.envelope import FIRST, FORWARDED, HEARTBEAT, QUIET_MS_MAX, RAW, ROUTE_CHANGED

HELD_MAX = 10_000
"""Messages of one stream that are held back at most; past it the oldest gap is given up at once."""

UNDER_WAY_S_MAX = QUIET_MS_MAX / 1000
"""A message that was published this long before the next one is not waited for: an envelope cannot say more, and none
is under way that long."""

NUMBER_MAX = 2**44
"""The largest accepted number. No publisher gets there: a million messages a second would take half a year."""

LATE_S = 20.0
"""How late a copy may come that its publisher has sent again: twice the longest time that a publish may take."""

STREAMS_MAX = 100_000
"""Publishers of one channel that are remembered at most; past it the one that was known first is forgotten, and its
held messages are released with their gaps. About 200 bytes each."""

DISPATCHERS_MAX = 64
"""Dispatchers whose raw messages are remembered per channel; each start of one counts."""


RAW_WINDOW = 1024
"""Numbers of raw messages that are remembered per dispatcher; one so much older than the newest is taken for a
duplicate."""


BEHIND_MAX = 1000
BEHIND_BYTES_MAX = 4 * 2**20
"""Messages without numbers on one channel that wait at most, and their bytes; past it the first is delivered."""

FOLLOWERS_MAX = 100
"""An opening stream that holds more messages does not look through them with each new one, as that would take ever
longer: they wait for ``hold_s_max``."""

HELD_ENTRY_BYTES = 200
"""About how many bytes a held message takes in addition to its payload."""

_LATE = "not arrived in time"
_TOO_LARGE = "too many bytes wait for it"
_TOO_MANY_PUBLISHERS = "too many publishers to remember"
_OVERTAKEN = "messages came long after later ones: they were under way for long, or somebody forges numbers"
_FAR_AHEAD = "a number far ahead of the expected one was refused"
SUSPICIONS = frozenset((_OVERTAKEN, _FAR_AHEAD))
"""Reasons of gaps that are hardly possible unless somebody forges numbers."""
_LONG_AGO = float("-inf")


@dataclass(slots=True)
class Gap:
    """Messages of ``publisher`` that were not delivered. ``count`` None means that nobody knows how many."""

    publisher: int
    count: int | None
    reason: str


Outcome = bytes | Gap
"""A message or a gap, in the order of delivery."""


class Held(NamedTuple):
    """A message that waits for an earlier one, or a heartbeat."""

    #: None for a heartbeat.
    payload: bytes | None
    at: float
    #: The latest time at which the previous message (of a heartbeat: its own) may have been published.
    previous_at: float
    #: The number that the stream expected when this arrived.
    expected: int = 0

    def size_bytes(self) -> int:
        """Return about how many bytes it takes."""
        return HELD_ENTRY_BYTES + (0 if self.payload is None else len(self.payload))


@dataclass(slots=True)
class Stream:
    """One publisher's messages on one channel."""

    #: The number to be delivered next; None while the stream is opening.
    next: int | None
    #: Number to the held message, which waits for an earlier one.
    held: dict[int, Held] = field(default_factory=dict[int, Held])
    #: Sum of the sizes of these.
    held_bytes: int = 0
    #: Heap of the numbers in ``held``, and of some that are not any more.
    _numbers: list[int] = field(default_factory=list[int])
    #: While opening: lower numbers were delivered to an earlier subscription of the same subscriber.
    floor: int = 0
    #: Every number from this one to ``next`` was delivered, or is a lost tail that was reported; and since when, or
    #: since when the stream has been moved ahead in silence, each time within ``LATE_S``.
    begun: int = 0
    _begun_at: float = 0.0
    #: When the subscription was confirmed, as of the latest message that was not simply the expected one.
    _due_since: float = 0.0
    #: Whether somebody has promised to call :meth:`expire` at ``waits_until``.
    watched: bool = False
    #: ``next`` at the latest sweep; a stream that has not moved between two sweeps is idle.
    swept_at: int | None = -1

    def arrive(
        self,
        publisher: int,
        sequence: int,
        flags: int,
        payload: bytes,
        now: float,
        previous_at: float,
        due_since: float,
    ) -> list[Outcome]:
        """Handle one message that is not simply the expected one; return the outcomes, in order."""
        if sequence > NUMBER_MAX:
            return []
        self._due_since = due_since
        if self.next is None:
            return self._arrive_opening(publisher, sequence, flags, Held(payload, now, previous_at))
        if flags & HEARTBEAT:
            if sequence >= self.next and sequence not in self.held:
                self._hold(sequence, Held(None, now, previous_at, self.next))
            return self._bounded(publisher, now)
        if sequence < self.next:
            return self._below(publisher, sequence, flags, now)
        if sequence == self.next:
            return self._deliver(sequence, payload)
        if sequence - self.next <= HELD_MAX:
            if flags & FIRST:
                return self._restart(publisher, sequence, payload, now)
            if previous_at < due_since and (not self.held or sequence <= self._lowest()):
                return self._open(sequence, payload, now)
        elif flags & FIRST:
            previous_at = _LONG_AGO
        self._hold(sequence, Held(payload, now, previous_at, self.next))
        return self._bounded(publisher, now)

    def expire(self, publisher: int, now: float, hold_s_max: float) -> list[Outcome]:
        """Release the messages that were held for ``hold_s_max`` seconds; return the outcomes, in order."""
        out: list[Outcome] = []
        while self.held and self.waits_until(hold_s_max) <= now:
            out += self._release(publisher, _LATE, now)
        return out

    def waits_until(self, hold_s_max: float) -> float:
        """Return when the oldest held message must be released. Only while something is held."""
        return self.held[self._lowest()].at + hold_s_max

    def give_up(self, publisher: int, reason: str, now: float) -> list[Outcome]:
        """Release the earliest held messages before their time; return the outcomes, in order."""
        return self._release(publisher, reason, now) if self.held else []

    def drop_held(self) -> None:
        """Forget the held messages: nobody waits for them."""
        self.held.clear()
        self.held_bytes = 0
        self._numbers.clear()
        self.watched = False

    def resume(self) -> None:
        """Open again for a new subscription. Messages that were delivered to the former one are not due to it."""
        self.floor = self.floor if self.next is None else self.next
        self.next = None
        self.drop_held()

    def _arrive_opening(self, publisher: int, sequence: int, flags: int, item: Held) -> list[Outcome]:
        if sequence < self.floor:
            return []
        due = item.previous_at >= self._due_since
        if flags & HEARTBEAT:
            if due:
                if sequence not in self.held:
                    self._hold(sequence, item._replace(payload=None))
                return self._bounded(publisher, item.at)
            if not self.held:
                self._go_on(sequence + 1, item.at)
            return []
        assert item.payload is not None, "only heartbeats have none"
        if flags & FIRST and self.held and self._lowest() < sequence:
            return self._restart(publisher, sequence, item.payload, item.at)
        due = due and sequence != self.floor and item.at - item.previous_at < UNDER_WAY_S_MAX
        if flags & FIRST or (not (flags & ROUTE_CHANGED and due) and (not self.held or sequence <= self._lowest())):
            return self._open(sequence, item.payload, item.at)
        self._hold(sequence, item)
        if len(self.held) <= FOLLOWERS_MAX and self._latest_before(self._lowest()) < self._due_since:
            return self._release(publisher, _LATE, item.at)  # without a gap
        return self._bounded(publisher, item.at)

    def _open(self, sequence: int, payload: bytes, now: float) -> list[Outcome]:
        self._go_on(sequence, now)
        return self._deliver(sequence, payload)

    def _go_on(self, sequence: int, now: float, *, is_reported: bool = False) -> None:
        """Expect this number next, and pass over those before it, of which a gap reports the missing ones or not."""
        if self.next is None or is_reported or now - self._begun_at > LATE_S:
            self._begun_at = now
        self.next = self.begun = sequence

    def _deliver(self, sequence: int, payload: bytes) -> list[Outcome]:
        if sequence in self.held:
            self._take(sequence)
        self.next = sequence + 1
        return [payload, *self._run()]

    def _below(self, publisher: int, sequence: int, flags: int, now: float) -> list[Outcome]:
        """Drop a copy; report a message that is too late to be one."""
        if flags & FORWARDED or not self.floor <= sequence < self.begun or now - self._begun_at <= LATE_S:
            return []
        self._begun_at = now
        return [Gap(publisher, None, _OVERTAKEN)]

    def _restart(self, publisher: int, sequence: int, payload: bytes, now: float) -> list[Outcome]:
        """Begin again where the publisher did; earlier held messages are released with their gaps."""
        out: list[Outcome] = []
        while self.held and self._lowest() < sequence:
            out += self._release(publisher, "the publisher began a new sequence", now)
        if self.next is not None and self.next > sequence:  # a copy of it was held
            return out
        return [*out, *self._open(sequence, payload, now)]

    def _release(self, publisher: int, reason: str, now: float) -> list[Outcome]:
        """Report the messages that are missing before the lowest held one as a gap, and go on with that."""
        lowest = self._lowest()
        if self.next is not None and self.held[lowest].expected < self.next < lowest - HELD_MAX:
            self._take(lowest)
            return [Gap(publisher, 1, _FAR_AHEAD)]
        is_heartbeat = self.held[lowest].payload is None
        count = None if self.next is None else lowest - self.next + is_heartbeat
        is_gap = self._latest_before(lowest) >= self._due_since
        if is_heartbeat:
            self._take(lowest)
        self._go_on(lowest + is_heartbeat, now, is_reported=is_gap)
        return [*([Gap(publisher, count, reason)] if is_gap else []), *self._run()]

    def _latest_before(self, lowest: int) -> float:
        """Return the latest time at which the message before the lowest one held may have been published.

        For a heartbeat, its own message. Each of the messages that follow the lowest one tells the time of its
        predecessor, and those between say how much earlier the one in question was.
        """
        latest = self.held[lowest].previous_at
        earlier_s = 0.0
        number = lowest
        while (item := self.held.get(number)) is not None and item.payload is not None:
            latest = min(latest, item.previous_at - earlier_s)
            earlier_s += item.at - item.previous_at
            number += 1
        return latest

    # Held messages.

    def _hold(self, sequence: int, item: Held) -> None:
        """Hold a message, unless it is held: the first copy says best when its predecessor was published."""
        known = self.held.get(sequence)
        if known is None:
            heappush(self._numbers, sequence)
        if known is None or known.payload is None:
            self.held[sequence] = item
            self.held_bytes += item.size_bytes() - (0 if known is None else known.size_bytes())

    def _take(self, number: int) -> Held:
        """Remove a held message and return it."""
        item = self.held.pop(number)
        self.held_bytes -= item.size_bytes()
        return item

    def _lowest(self) -> int:
        """Return the lowest number that is held. Only while something is."""
        while self._numbers[0] not in self.held:
            heappop(self._numbers)
        return self._numbers[0]

    def _bounded(self, publisher: int, now: float) -> list[Outcome]:
        return [] if len(self.held) <= HELD_MAX else self._release(publisher, "too many wait for it", now)

    def _run(self) -> list[Outcome]:
        """Release the held messages that are now in order."""
        out: list[Outcome] = []
        assert self.next is not None
        while self.held and (item := self.held.get(self.next)) is not None and item.payload is not None:
            self._take(self.next)
            out.append(item.payload)
            self.next += 1
        if not self.held:
            self._numbers.clear()
        return out


@dataclass(slots=True)
class _Rare:
    """State that few channels have at a time; a slot for each in every channel would take more memory."""

    #: Dispatcher to the latest numbers of its raw messages.
    raw: dict[int, dict[int, None]] = field(default_factory=dict[int, dict[int, None]])
    #: The streams that hold messages, the longest holding one first.
    holding: dict[int, Stream] = field(default_factory=dict[int, Stream])
    #: Messages without numbers that wait for these, and when they came.
    behind: deque[tuple[bytes, float]] = field(default_factory=deque[tuple[bytes, float]])
    #: Sum of the sizes of these.
    behind_bytes: int = 0


_NO_STREAMS: dict[int, Stream] = {}
"""The empty table of a channel without messages; never filled."""


class Sequences:
    """The streams of one channel, as one subscriber sees them. Memory: one ``Stream`` per live publisher."""

    __slots__ = ("_rare", "hold_s_max", "streams")

    def __init__(self, hold_s_max: float) -> None:
        """Begin without knowledge of any publisher."""
        self.hold_s_max = hold_s_max
        #: Publisher to stream. The subscriber's hot path looks in here itself.
        self.streams: dict[int, Stream] = _NO_STREAMS
        self._rare: _Rare | None = None

    def arrive(
        self,
        publisher: int,
        sequence: int,
        flags: int,
        payload: bytes,
        now: float,
        previous_at: float,
        due_since: float,
    ) -> list[Outcome]:
        """Handle one message; return the outcomes, in order.

        Args:
            publisher: whose it is.
            sequence: its number.
            flags: of its envelope.
            payload: its payload.
            now: when it came.
            previous_at: the latest time at which the publisher's previous message (of a heartbeat: the one of its
                number) may have been published.
            due_since: when the subscription was confirmed: earlier messages are not due.

        """
        if flags & RAW:
            return self.arrive_plain(payload, now) if self._is_new_raw(publisher, sequence) else []
        stream = self.streams.get(publisher)
        if stream is not None:
            outcomes = stream.arrive(publisher, sequence, flags, payload, now, previous_at, due_since)
            return self._with_those_behind(outcomes, publisher, stream, now)
        released: list[Outcome] = []
        if not self.streams:
            self.streams = {}
        elif len(self.streams) >= STREAMS_MAX:
            oldest = next(iter(self.streams))
            evicted = self.streams.pop(oldest)
            while evicted.held:
                released += evicted.give_up(oldest, _TOO_MANY_PUBLISHERS, now)
            released = self._with_those_behind(released, oldest, evicted, now)
        stream = self.streams[publisher] = Stream(None)
        released += stream.arrive(publisher, sequence, flags, payload, now, previous_at, due_since)
        return self._with_those_behind(released, publisher, stream, now)

    @property
    def holds(self) -> bool:
        """Whether messages of any publisher wait."""
        return self._rare is not None and bool(self._rare.holding)

    def arrive_plain(self, payload: bytes, now: float) -> list[Outcome]:
        """Handle a message without a number; return the outcomes, in order.

        Where a channel becomes plain, its publisher may have sent numbered messages before: if any wait, so does this.
        """
        rare = self._rare
        if rare is None or not rare.holding:
            return [payload]
        rare.behind.append((payload, now))
        rare.behind_bytes += len(payload)
        return self._next_behind(rare, now)

    def _with_those_behind(self, outcomes: list[Outcome], publisher: int, stream: Stream, now: float) -> list[Outcome]:
        """Add, where a stream may hold other messages than before, those without numbers that wait no longer."""
        rare = self._rare
        if stream.held:
            if rare is None:
                rare = self._rare = _Rare()
            rare.holding[publisher] = stream
        elif rare is None:
            return outcomes
        else:
            rare.holding.pop(publisher, None)
        released = [*outcomes, *self._next_behind(rare, now)] if rare.behind else outcomes
        if not (rare.holding or rare.behind or rare.raw):
            self._rare = None
        return released

    def _next_behind(self, rare: _Rare, now: float) -> list[Outcome]:
        """Release the plain messages that came before all held ones, or have waited as long as these may."""
        waiting = rare.behind
        first = next(iter(rare.holding.values()), None)
        held_since = now + 1.0 if first is None else next(iter(first.held.values())).at
        ready: list[Outcome] = []
        while waiting and (
            waiting[0][1] < held_since
            or now - waiting[0][1] >= self.hold_s_max
            or len(waiting) > BEHIND_MAX
            or rare.behind_bytes > BEHIND_BYTES_MAX
        ):
            payload, _ = waiting.popleft()
            rare.behind_bytes -= len(payload)
            ready.append(payload)
        return ready

    def resume(self) -> None:
        """Serve a new subscription to the same channel: messages that the former one got are not due to it."""
        if self._rare is not None:
            self._rare.holding.clear()
            self._rare.behind.clear()
            self._rare.behind_bytes = 0
        for stream in self.streams.values():
            stream.resume()

    def _is_new_raw(self, dispatcher: int, sequence: int) -> bool:
        if self._rare is None:
            self._rare = _Rare()
        raw = self._rare.raw
        seen = raw.get(dispatcher)
        if seen is None:
            if len(raw) >= DISPATCHERS_MAX:
                del raw[next(iter(raw))]
            seen = raw[dispatcher] = {}
        if sequence in seen or (len(seen) == RAW_WINDOW and sequence < next(iter(seen))):
            return False
        seen[sequence] = None
        if len(seen) > RAW_WINDOW:
            del seen[next(iter(seen))]
        return True

    def expire(self, publisher: int, now: float) -> list[Outcome]:
        """Release the messages that one stream has held for too long; return the outcomes, in order."""
        stream = self.streams.get(publisher)
        if stream is None:
            return []
        stream.watched = False
        return self._with_those_behind(stream.expire(publisher, now, self.hold_s_max), publisher, stream, now)

    def held_bytes(self, publisher: int) -> int:
        """Return about how many bytes the held messages of one stream take."""
        stream = self.streams.get(publisher)
        return 0 if stream is None else stream.held_bytes

    def give_up(self, publisher: int, now: float) -> list[Outcome]:
        """Release the earliest held messages of one stream, as too many bytes are held."""
        stream = self.streams.get(publisher)
        if stream is None:
            return []
        return self._with_those_behind(stream.give_up(publisher, _TOO_LARGE, now), publisher, stream, now)

    def drop_held(self, publisher: int) -> None:
        """Forget the held messages of one stream, of a subscription that has ended."""
        stream = self.streams.get(publisher)
        if stream is not None:
            stream.drop_held()
            if self._rare is not None:
                self._rare.holding.pop(publisher, None)

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

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        rare = self._rare
        if rare is None:
            return
        assert rare.holding or not rare.behind, "messages wait behind nothing"
        assert rare.behind_bytes == sum(len(payload) for payload, _ in rare.behind), f"{rare.behind_bytes} bytes wait"
        for publisher, stream in rare.holding.items():
            assert self.streams.get(publisher) is stream and stream.held, f"holds nothing: {stream}"
            first = stream.held.get(-1 if stream.next is None else stream.next)
            assert first is None or first.payload is None, f"holds the expected message: {stream}"
            assert stream.held_bytes == sum(item.size_bytes() for item in stream.held.values()), (
                f"wrong bytes: {stream}"
            )
            assert len(stream.held) <= HELD_MAX, f"{len(stream.held)} messages held"
