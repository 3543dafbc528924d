"""Checks the guarantees (``docs/guarantees.md``) in the simulator, in tests on real servers, and in the demo.

Theory of operation
-------------------
Publishers number their messages themselves, inside of the payload, from 1 for each (publisher, channel); the numbers in
envelopes are not looked at. The audit records what applications see: when a publish begins and ends, when a
subscription is confirmed and ended, what is delivered, which gaps are reported. From the confirmation of a
subscription on, every message whose publish begins is *due* to it:

* G1: a number that is skipped was lost. G5: unless a gap event *covers* it: one on this subscription that names
  the publisher covers as many messages as it counts, one that names nobody, or counts nothing, covers every
  message that has begun. The caller says whether covered losses are allowed at all (``losses_allowed``), and from when
  on nothing fails any more (:meth:`Audit.calm`).
* G2: a number that was delivered before is a duplicate. G3: a lower number than the latest, not delivered before, is
  out of order.
* G4 and G6: a publish must end within ``publish_s_max``.
* truth: no gap event suspects a forger where there is none (``Audit.has_forger``).
* G7: the number of receivers that a publish returns is the number of subscriptions, where the caller knows that
  all is quiet.

Where publishers and subscribers are in different processes (``live=False``), nobody can tell what began before
what. Then auditors subscribe before the first publish, everything is due to them, :meth:`Audit.published_upto`
tells in the end how much there was, and a gap event covers what is missing before the next delivery: if it names
nobody, before the next one of each publisher, known or not yet.

A subscription to a pattern is one subscription to each channel that matches, known or not yet.

:meth:`Audit.finish` looks for what was not delivered in the end. Memory: one small record per (subscription,
publisher), and two numbers per (publisher, channel); so it does not grow with the length of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import astuple, dataclass, field

from dynamoth_client.machines.sequences import SUSPICIONS

HOLES_MAX = 1000
"""Ranges of missing messages that are remembered per (subscription, publisher); with more, they are judged at once."""

UNDER_WAY_S = 0.5
"""How long a message may be under way in a simulation where nothing fails: a stall, a pause and a spike together."""

VIOLATIONS_MAX = 100
"""Violations that are described; more are counted."""

_FOR_EVER = 2**63
"""A number that no publisher reaches."""

Publisher = Hashable
Subscriber = Hashable


@dataclass(slots=True)
class Violation:
    """One broken guarantee, and the message that shows it."""

    guarantee: str
    text: str
    at: float
    channel: bytes | None = None
    subscriber: Subscriber | None = None
    publisher: Publisher | None = None
    number: int | None = None
    #: What happened to the message, in words; filled in where a trace is kept.
    story: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        return "\n".join([f"{self.guarantee} at {self.at:.6f}: {self.text}", *self.story])


@dataclass(slots=True)
class _Stream:
    """The messages of one publisher on one channel."""

    begun: int = 0
    begun_at: float = float("-inf")
    #: Numbers whose publish has begun and not ended, with the time of its beginning.
    pending: dict[int, float] = field(default_factory=dict[int, float])
    #: Numbers that are due to nobody: their publish failed, or their publisher died.
    excused: set[int] = field(default_factory=set[int])
    #: From this number on no loss is allowed, covered or not.
    calm_from: int = _FOR_EVER
    #: When its publisher died last, and the latest number then.
    died_at: float = float("inf")
    died_after: int = 0


@dataclass(slots=True)
class _Hole:
    """Due messages ``first`` to ``last`` that were skipped and that no gap event covers (yet)."""

    first: int
    last: int


@dataclass(slots=True)
class _View:
    """The messages of one publisher that one subscription has seen."""

    subscriber: Subscriber
    channel: bytes
    publisher: Publisher
    #: The number that is due next; a lower one was delivered, or given up, or is due to nobody.
    next: int
    #: The highest number that was delivered; 0 before the first.
    latest: int = 0
    #: No message up to this number is missed: a gap event covers it.
    covered_to: int = 0
    holes: list[_Hole] = field(default_factory=list[_Hole])
    #: Ranges that a gap event covers; a late delivery from them is out of order, not a duplicate.
    skipped: list[_Hole] = field(default_factory=list[_Hole])
    #: A gap event named this publisher, and no missing message was found that it covers (yet).
    unused_gap: bool = False
    #: The publisher's latest message before the confirmation may have been under way then: nobody but the checker knows
    #: that it was not due.
    just_before: bool = False


@dataclass(slots=True)
class _Subscription:
    """One subscriber on one channel, from confirmation to end."""

    confirmed_at: float
    views: dict[Publisher, _View] = field(default_factory=dict[Publisher, _View])
    #: The application has asked for its end: messages are delivered or not.
    ending: bool = False
    #: No message up to this number is missed of a publisher that was never seen (``live=False``).
    unseen_covered_to: int = 0


@dataclass(slots=True)
class Totals:
    """Sums over a run."""

    published: int = 0
    failed: int = 0
    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    gaps: int = 0
    #: Gap events that named a publisher of which nothing was missing.
    needless_gaps: int = 0
    covered_losses: int = 0

    def __add__(self, other: Totals) -> Totals:
        """Return the sums over two runs."""
        return Totals(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))


class Audit:
    """Checks the guarantees while a run goes on.

    Args:
        losses_allowed: whether a loss that a gap event covers is in order (G5) or breaks G1. True where servers,
            links, dispatchers or clients fail.
        failures_allowed: whether a publish may fail; None: where losses are allowed.
        publish_s_max: bound of a publish, from its begin to its end.
        live: whether publishes are recorded at the moment at which they begin; see the module's text.
        ordered: False for publishers whose messages are only counted (raw ones, for which no guarantee but G1 holds);
            asked with the publisher.
        story: adds the story to a violation, where there is a trace.

    """

    def __init__(
        self,
        *,
        losses_allowed: bool = False,
        failures_allowed: bool | None = None,
        publish_s_max: float = float("inf"),
        live: bool = True,
        ordered: Callable[[Publisher], bool] = lambda publisher: True,
        story: Callable[[Violation], list[str]] | None = None,
    ) -> None:
        self._losses_allowed = losses_allowed
        self._failures_allowed = losses_allowed if failures_allowed is None else failures_allowed
        #: New streams are calm from this number on.
        self._calm_from = _FOR_EVER
        self._publish_s_max = publish_s_max
        self._live = live
        #: Whether somebody forges numbers, so that gaps may say so.
        self.has_forger = False
        self._ordered = ordered
        self._story = story
        #: Channel to publisher to stream.
        self._streams: dict[bytes, dict[Publisher, _Stream]] = {}
        self._open: dict[tuple[Subscriber, bytes], _Subscription] = {}
        #: The latest numbers that ended subscriptions had: a subscriber that comes back gets none up to them again.
        self._past: dict[tuple[Subscriber, bytes], dict[Publisher, int]] = {}
        #: Subscribers to one pattern, which tells what it matches, and since when.
        self._patterns: dict[Subscriber, tuple[Callable[[bytes], bool], float]] = {}
        self.violations: list[Violation] = []
        #: All violations, those that are not described included.
        self.violations_count = 0
        self.totals = Totals()

    # Publishing.

    def published(self, publisher: Publisher, channel: bytes, number: int, at: float) -> None:
        """A publish begins. Numbers count from 1 per publisher and channel."""
        stream = self._stream(publisher, channel)
        if stream.died_at < at:
            self._goes_on(publisher, channel, stream)
        assert number == stream.begun + 1, f"{publisher} numbers {number} after {stream.begun}"
        stream.begun = number
        stream.begun_at = at
        stream.pending[number] = at
        self.totals.published += 1

    def publish_ended(
        self, publisher: Publisher, channel: bytes, number: int, at: float, *, failed: bool = False
    ) -> None:
        """A publish has returned. ``failed``: with an error, so that nothing is promised for the message."""
        stream = self._stream(publisher, channel)
        began = stream.pending.pop(number)
        if failed:
            self.totals.failed += 1
            stream.excused.add(number)
            if not self._failures_allowed or number >= stream.calm_from:
                what = f"publish of {publisher}:{number} failed, though nothing else did"
                self._violation("G4", what, at, channel, publisher=publisher, number=number)
        if at - began > self._publish_s_max:
            what = f"publish of {publisher}:{number} took {at - began:.3f} s, more than {self._publish_s_max} s"
            self._violation("G4", what, at, channel, publisher=publisher, number=number)

    def published_upto(self, publisher: Publisher, channel: bytes, number: int) -> None:
        """Tell afterwards how many messages were published (``live=False``)."""
        stream = self._stream(publisher, channel)
        self.totals.published += number
        stream.begun = max(stream.begun, number)

    def publish_failed(self, publisher: Publisher, channel: bytes, number: int) -> None:
        """Tell afterwards that a publish failed, so that its message is due to nobody (``live=False``)."""
        self.totals.failed += 1
        self._stream(publisher, channel).excused.add(number)

    def calm(self) -> None:
        """From now on nothing fails any more: what is published from here on must be delivered."""
        for streams in self._streams.values():
            for stream in streams.values():
                stream.calm_from = stream.begun + 1
        self._calm_from = 1

    def _may_be_lost(self, stream: _Stream, number: int) -> bool:
        return self._losses_allowed and number < stream.calm_from

    def publisher_died(self, publisher: Publisher, at: float) -> None:
        """A publisher is gone: what it had not finished is due to nobody."""
        for streams in self._streams.values():
            stream = streams.get(publisher)
            if stream is not None:
                stream.excused.update(stream.pending)
                stream.pending.clear()
                stream.died_at, stream.died_after = at, stream.begun

    def _goes_on(self, publisher: Publisher, channel: bytes, stream: _Stream) -> None:
        """A publisher that had died publishes again: whoever has subscribed meanwhile has missed nothing before."""
        for key, subscription in self._open.items():
            if key[1] == channel:
                self._view(subscription, key, publisher)
        stream.died_at = float("inf")

    def receivers(self, publisher: Publisher, channel: bytes, number: int, at: float, returned: int, true: int) -> None:
        """Check G7, where the caller knows the ``true`` number of client subscribers."""
        if returned != true:
            what = f"publish of {publisher}:{number} returned {returned}, but {true} clients are subscribed"
            self._violation("G7", what, at, channel, publisher=publisher, number=number)

    def _stream(self, publisher: Publisher, channel: bytes) -> _Stream:
        streams = self._streams.get(channel)
        if streams is None:
            streams = self._streams[channel] = {}
            for subscriber, (matches, since) in self._patterns.items():
                if matches(channel):
                    self.confirmed(subscriber, channel, since)
        stream = streams.get(publisher)
        if stream is None:
            stream = streams[publisher] = _Stream(calm_from=self._calm_from)
        return stream

    # Subscribing.

    def confirmed(self, subscriber: Subscriber, channel: bytes, at: float) -> None:
        """A subscription is confirmed: what begins from now on is due. Harmless when it was before."""
        key = subscriber, channel
        if key in self._open:
            return
        subscription = self._open[key] = _Subscription(at)
        for publisher, stream in self._streams.get(channel, {}).items():
            if at - stream.died_at > UNDER_WAY_S:
                continue  # most, in a long run: its view is made if it is needed
            view = self._view(subscription, key, publisher)
            if self._live:
                view.next = stream.begun + 1
                view.just_before = at - stream.begun_at < UNDER_WAY_S

    def ending(self, subscriber: Subscriber, channel: bytes) -> None:
        """The application asks for the end of a subscription: what was not delivered yet is not due any more."""
        subscription = self._open.get((subscriber, channel))
        if subscription is not None:
            subscription.ending = True

    def ended(self, subscriber: Subscriber, channel: bytes, at: float) -> None:
        """A subscription has ended; nothing may be delivered any more."""
        subscription = self._open.pop((subscriber, channel), None)
        if subscription is None:
            return
        past = self._past.setdefault((subscriber, channel), {})
        for publisher, view in subscription.views.items():
            if self._ordered(publisher) or not subscription.ending:  # without order, what is skipped may yet come
                self._judge_holes(view, at)
            past[publisher] = max(past.get(publisher, 0), view.latest)

    def subscriber_died(self, subscriber: Subscriber, at: float) -> None:
        """A subscriber is gone, with its subscriptions."""
        self._patterns.pop(subscriber, None)
        for open_subscriber, channel in list(self._open):
            if open_subscriber == subscriber:
                self.ended(subscriber, channel, at)

    def is_open(self, subscriber: Subscriber, channel: bytes) -> bool:
        """Tell whether a subscription is confirmed and not ended."""
        return (subscriber, channel) in self._open

    def open_count(self, channel: bytes) -> int:
        """Return how many confirmed subscriptions the channel has, without those of patterns."""
        return sum(open_channel == channel and who not in self._patterns for who, open_channel in self._open)

    # Patterns. A subscriber has one pattern, and no channels by name.

    def pattern_confirmed(self, subscriber: Subscriber, matches: Callable[[bytes], bool], at: float) -> None:
        """A subscription to a pattern is confirmed; ``matches`` tells of a channel. Harmless when it was before."""
        if subscriber in self._patterns:
            return
        self._patterns[subscriber] = matches, at
        for channel in self._streams:
            if matches(channel):
                self.confirmed(subscriber, channel, at)

    def pattern_ending(self, subscriber: Subscriber) -> None:
        """The application asks for the end of a subscription to a pattern."""
        for channel in self._channels_of(subscriber):
            self.ending(subscriber, channel)

    def pattern_ended(self, subscriber: Subscriber, at: float) -> None:
        """A subscription to a pattern has ended; nothing may be delivered any more."""
        self.subscriber_died(subscriber, at)

    def pattern_gap(self, subscriber: Subscriber, at: float) -> None:
        """A gap event says that anything of any channel that matches may be missing."""
        for channel in self._channels_of(subscriber):
            self.gap(subscriber, channel, None, None, at)

    def is_open_pattern(self, subscriber: Subscriber) -> bool:
        """Tell whether a subscription to a pattern is confirmed and not ended."""
        return subscriber in self._patterns

    def pattern_count(self, channel: bytes) -> int:
        """Return how many confirmed subscriptions to patterns match the channel."""
        return sum(matches(channel) for matches, _ in self._patterns.values())

    def _channels_of(self, subscriber: Subscriber) -> list[bytes]:
        return [channel for open_subscriber, channel in self._open if open_subscriber == subscriber]

    def _view(self, subscription: _Subscription, key: tuple[Subscriber, bytes], publisher: Publisher) -> _View:
        """Return the view of a publisher that the subscription has not seen before.

        The first due number is the one that began first after the confirmation. As views are made for every publisher
        of the channel at the confirmation, a publisher without one began its first message later, or had died before.
        """
        view = subscription.views.get(publisher)
        if view is None:
            latest = self._past.get(key, {}).get(publisher, 0)
            stream = self._streams.get(key[1], {}).get(publisher)
            had_died = self._live and stream is not None and stream.died_at < subscription.confirmed_at
            first = stream.died_after + 1 if had_died and stream is not None else 1
            view = subscription.views[publisher] = _View(*key, publisher, first, latest, subscription.unseen_covered_to)
        return view

    # Delivery.

    def delivered(self, subscriber: Subscriber, channel: bytes, publisher: Publisher, number: int, at: float) -> None:
        """A message is delivered to the application."""
        self.totals.delivered += 1
        subscription = self._open.get((subscriber, channel))
        if not self._live and subscription is not None:
            view = subscription.views.get(publisher)
            if view is not None and number == view.next and not view.skipped and number > view.covered_to:
                view.next = number + 1  # the usual message, as the demo and the benchmarks have many
                view.latest = number
                return
        if subscription is None:
            what = f"{subscriber} gets {publisher}:{number} outside of a subscription"
            self._violation("confirmation", what, at, channel, subscriber, publisher, number)
            return
        stream = self._stream(publisher, channel)
        if not self._live:
            stream.begun = max(stream.begun, number)
        elif number > stream.begun:
            what = f"{subscriber} gets {publisher}:{number}, which was never published"
            self._violation("G2", what, at, channel, subscriber, publisher, number)
            return
        view = self._view(subscription, (subscriber, channel), publisher)
        if number <= view.latest or _within(view.skipped, number):
            self._late(view, number, at)
            return
        if number > view.next:
            self._skipped(view, _Hole(view.next, number - 1), at)
        view.next = max(view.next, number + 1)
        view.latest = number
        if not self._live:
            view.covered_to = min(view.covered_to, number)
        self._judge_gap(view, at)

    def _judge_gap(self, view: _View, at: float) -> None:
        """Count a gap event that named this publisher if the publisher's next message shows that nothing was missing.

        Where nothing failed, such an event is a violation; but for the time that a message is under way, as subscribers
        compare no clocks: it counts as due if it was published that shortly before the confirmation.
        """
        if not view.unused_gap:
            return
        view.unused_gap = False
        self.totals.needless_gaps += 1
        if not self._losses_allowed and not view.just_before:
            what = f"{view.subscriber} gets a gap event for messages of {view.publisher}, and missed none"
            self._violation_of(view, "gap", what, at)

    def _late(self, view: _View, number: int, at: float) -> None:
        was_missing = _take(view.holes, number) or _take(view.skipped, number)
        if not self._ordered(view.publisher):
            return
        message = f"{view.subscriber} gets {view.publisher}:{number}"
        if was_missing:
            self.totals.reordered += 1
            self._violation_of(view, "G3", f"{message} after {view.publisher}:{view.latest}", at, number)
        else:
            self.totals.duplicated += 1
            self._violation_of(view, "G2", f"{message} again (the latest was {view.latest})", at, number)

    def _skipped(self, view: _View, hole: _Hole, at: float) -> None:
        covered = _Hole(hole.first, min(hole.last, view.covered_to))
        if covered.first <= covered.last:
            self._cover(view, covered, at)
        open_hole = _Hole(max(hole.first, view.covered_to + 1), hole.last)
        if open_hole.first <= open_hole.last:
            view.holes.append(open_hole)
            if len(view.holes) > HOLES_MAX:
                self._judge_holes(view, at)

    def unreadable(self, subscriber: Subscriber, channel: bytes, at: float) -> None:
        """A plain Redis client gets bytes that are no message of an application."""
        what = f"{subscriber}, a plain client, gets what it cannot read"
        self._violation("plain", what, at, channel, subscriber)

    # Gaps.

    def gap(
        self,
        subscriber: Subscriber,
        channel: bytes,
        publisher: Publisher | None,
        count: int | None,
        at: float,
        reason: str = "",
    ) -> None:
        """The subscriber gets a gap event. None: of which publisher, or how many, is not known."""
        self.totals.gaps += 1
        if reason in SUSPICIONS and not self.has_forger:
            self._violation("truth", f"{subscriber} suspects a forger: {reason}", at, channel, subscriber)
        subscription = self._open.get((subscriber, channel))
        if subscription is None:
            return
        if publisher is None and not self._live:
            subscription.unseen_covered_to = _FOR_EVER
        streams = self._streams.get(channel, {})
        for name in list(streams) if publisher is None else [publisher]:
            begun = self._stream(name, channel).begun if self._live else _FOR_EVER
            view = self._view(subscription, (subscriber, channel), name)
            view.unused_gap = self._live and publisher is not None
            left = self._cover_holes(view, None if publisher is None else count, at)
            upto = begun if left is None else min(begun, max(view.next - 1, view.covered_to) + left)
            view.covered_to = max(view.covered_to, upto)

    def _cover_holes(self, view: _View, count: int | None, at: float) -> int | None:
        """Cover holes with a gap event, oldest first. Return how many messages more it may cover; None: any number."""
        while view.holes and (count is None or count > 0):
            hole = view.holes[0]
            size = hole.last - hole.first + 1
            taken = size if count is None else min(size, count)
            self._cover(view, _Hole(hole.first, hole.first + taken - 1), at)
            hole.first += taken
            if hole.first > hole.last:
                view.holes.pop(0)
            count = None if count is None else count - taken
        return count

    def _cover(self, view: _View, hole: _Hole, at: float) -> None:
        view.unused_gap = False
        view.skipped.append(hole)
        del view.skipped[:-HOLES_MAX]
        stream = self._stream(view.publisher, view.channel)
        lost = [number for number in range(hole.first, hole.last + 1) if number not in stream.excused]
        self.totals.covered_losses += len(lost)
        wrong = [number for number in lost if not self._may_be_lost(stream, number)]
        if wrong:
            first = f"{view.publisher}:{wrong[0]}{_more(wrong)}"
            what = f"{view.subscriber} gets a gap event for {first}, though nothing failed"
            self._violation_of(view, "G1", what, at, wrong[0])

    def _judge_holes(self, view: _View, at: float) -> None:
        """Report the messages that no gap event covers: they were lost silently."""
        holes, view.holes = view.holes, []
        stream = self._stream(view.publisher, view.channel)
        for hole in holes:
            numbers = range(hole.first, hole.last + 1)
            lost = [number for number in numbers if number not in stream.excused and number not in stream.pending]
            if not lost:
                continue
            self.totals.lost += len(lost)
            guarantee = "G5" if self._may_be_lost(stream, lost[0]) else "G1"
            what = f"{view.subscriber} never gets {view.publisher}:{lost[0]}{_more(lost)}, nor a gap event"
            self._violation_of(view, guarantee, what, at, lost[0])

    # The end.

    def finish(self, at: float) -> list[Violation]:
        """Look for what was never delivered to open subscriptions, and for publishes that never ended."""
        for (subscriber, channel), subscription in self._open.items():
            for publisher, stream in self._streams.get(channel, {}).items():
                view = self._view(subscription, (subscriber, channel), publisher)
                if stream.begun >= view.next and not subscription.ending:
                    self._skipped(view, _Hole(view.next, stream.begun), at)
                    view.next = stream.begun + 1
                self._judge_holes(view, at)
                self._judge_gap(view, at)
        for channel, streams in self._streams.items():
            for publisher, stream in streams.items():
                for number, began in stream.pending.items():
                    if at - began > self._publish_s_max:
                        what = f"publish of {publisher}:{number} has not ended in {at - began:.3f} s"
                        self._violation("G4", what, at, channel, publisher=publisher, number=number)
        return self.violations

    def records_count(self) -> int:
        """Return how much is remembered, in records of some ten bytes: what a long run must keep bounded."""
        views = [view for subscription in self._open.values() for view in subscription.views.values()]
        streams = [stream for channel in self._streams.values() for stream in channel.values()]
        kept = sum(1 + len(view.holes) + len(view.skipped) for view in views)
        return kept + sum(1 + len(stream.pending) + len(stream.excused) for stream in streams)

    def _violation_of(self, view: _View, guarantee: str, text: str, at: float, number: int | None = None) -> None:
        self._violation(guarantee, text, at, view.channel, view.subscriber, view.publisher, number)

    def _violation(
        self,
        guarantee: str,
        text: str,
        at: float,
        channel: bytes | None = None,
        subscriber: Subscriber | None = None,
        publisher: Publisher | None = None,
        number: int | None = None,
    ) -> None:
        self.violations_count += 1
        if len(self.violations) >= VIOLATIONS_MAX:
            return
        name = "" if channel is None else f" on {channel.decode(errors='replace')}"
        violation = Violation(guarantee, text + name, at, channel, subscriber, publisher, number)
        if self._story is not None:
            violation.story = self._story(violation)
        self.violations.append(violation)


def _more(numbers: list[int]) -> str:
    return f", nor {len(numbers) - 1} more until {numbers[-1]}" if len(numbers) > 1 else ""


def _within(holes: list[_Hole], number: int) -> bool:
    return any(hole.first <= number <= hole.last for hole in holes)


def _take(holes: list[_Hole], number: int) -> bool:
    """Remove one number from a list of ranges; tell whether it was there."""
    for index, hole in enumerate(holes):
        if hole.first <= number <= hole.last:
            holes[index : index + 1] = [
                part
                for part in (_Hole(hole.first, number - 1), _Hole(number + 1, hole.last))
                if part.first <= part.last
            ]
            return True
    return False
