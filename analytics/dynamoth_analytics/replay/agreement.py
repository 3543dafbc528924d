"""Asks a replay at each recorded decision what it would decide: how true the replay is.

Theory of operation
-------------------
The machine gets the reports as they were recorded, and decides nothing itself: it carries out the recorded changes, and
each settles when it did in the recording. At the time of a recorded decision, and each ``decision_interval_s`` before
it, it is asked what it would decide. So it has the averages, waits and rests that the recorded balancer had, and one
difference does not lead to others.

A balancer records with each decision which reports it has heard since the one before, which changes have settled, and
when, by its own clock. A recorder hears the same later, by seconds on a busy machine. So the clock of the balancer
counts, moved to the recorder's time by the row that came with the least delay. Only events after the last decision have
the recorder's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dynamoth.errors import RequestRefused
from dynamoth.names import in_quotes
from dynamoth.plan.plan import Assignment
from dynamoth.protocol.reports import pack_report
from dynamoth_analytics.replay.instant_cluster import InstantCluster, configured
from dynamoth_analytics.replay.recorded import Moved, PlanStep, RecordedReport, RecordedWindow, initial_plan, moved
from dynamoth_analytics.replay.replay import TICK_S, lead_s
from dynamoth_balancer.decide.cluster import Decision
from dynamoth_balancer.decide.decider import is_replicated
from dynamoth_balancer.events import BalancerAction, InnerAction
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions

TOLERANCE_S = 5.0
"""A replayed decision that comes at most this much earlier than the recorded one may be the same."""

LATE_S_MAX = 5.0
"""A recorder hears a balancer at most this much later; on a machine that is slower, decisions differ."""

EARLY_S_MAX = 0.1
"""The delay of one message may be this much smaller than the least one that is known."""

BEGINS_S = 0.5
"""A replay needs less time to begin to lead."""

LOOK_MARGIN_S = 1e-5
"""A balancer looks this much later than ``decision_interval_s`` after its last look, at least."""

ReportKey = tuple[str, int, int]
"""Server, incarnation and sequence."""


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """A recorded decision with moves, and the reports that were new to it."""

    at: float
    moves: tuple[Moved, ...]
    reports: tuple[ReportKey, ...] = ()


@dataclass(frozen=True, slots=True)
class BalancerLog:
    """The decisions, pauses and observations of one balancer. Times are the recorder's."""

    decisions: tuple[RecordedDecision, ...] = ()
    pauses: tuple[tuple[float, bool], ...] = ()
    #: When it looked whether a decision was due, as far as known: when it had a decision or a finding.
    looks: tuple[float, ...] = ()
    #: When it heard reports, as far as known.
    heard: Mapping[ReportKey, float] = field(default_factory=dict[ReportKey, float])
    #: When changes of channels settled, as far as known.
    settled: tuple[tuple[float, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """A recorded decision that the replay does not make, or one that only the replay makes: then ``recorded`` is empty.

    ``cause`` is in words.
    """

    at: float
    recorded: tuple[Moved, ...]
    replayed: tuple[Moved, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many of the recorded decisions a replay makes."""

    recorded: int
    #: How many moves they have.
    moves: int
    differences: tuple[Difference, ...]
    #: Changes that no decision of this balancer explains, such as those of administrators. The replay follows them.
    followed: int

    @property
    def same(self) -> int:
        """How many recorded decisions the replay makes."""
        return self.recorded - sum(bool(each.recorded) for each in self.differences)


class _ChangesBegan(NamedTuple):
    """Recorded changes that began together."""

    assignments: Mapping[bytes, Assignment]
    #: Not by a decision of the balancer.
    followed: bool


class _Settled(NamedTuple):
    channel: bytes


class _Paused(NamedTuple):
    paused: bool


class _Look(NamedTuple):
    """The balancer looks whether a decision is due. ``decision``: the recorded one of this time."""

    decision: RecordedDecision | None


_Event = RecordedReport | _Paused | _Settled | _Look | _ChangesBegan

_ORDER = {RecordedReport: 0, _Paused: 1, _Settled: 2, _Look: 3, _ChangesBegan: 4}
"""Order of events with equal times."""


def agreement(
    window: RecordedWindow, log: BalancerLog, options: BalancerOptions, led_since: float | None = None
) -> Agreement:
    """Compare the decisions of a recorded balancer with those of a replay.

    Args:
        window: the recorded load, and all recorded changes.
        log: the decisions of the balancer.
        options: those of the balancer.
        led_since: when it began to lead; None: long before the window.

    Raises:
        ReplayError: a balancer with these settings does not lead.

    """
    return _Comparison(window, log, options, led_since).run()


class _ObedientMachine(BalancerMachine):
    """The balancer machine of production, except that it carries out the decisions of another balancer."""

    def _decide(self, installer: Installer, now: float) -> list[InnerAction]:
        return []

    def proposal(self, now: float) -> Decision | None:
        """Return the decision that it would make now; None where it is not time, or there is nothing to do."""
        installer = self.leadership.leading_installer()
        made = self._decider.look(installer, now)
        return None if made is None else made.decision

    def carry_out(self, assignments: Mapping[bytes, Assignment], now: float) -> list[BalancerAction]:
        """Begin changes. Raises RequestRefused."""
        return self._absorb(self._change(assignments, "recorded", now), now)

    def wait(self, now: float) -> None:
        """Wait as after a decision of its own."""
        self._decider.wait(now)

    def hold(self, channel: bytes, assignment: Assignment) -> None:
        """Leave a channel as an administrator has replicated it."""
        self._decider.hold(channel, assignment)


class _Comparison:
    """One replay that follows a recording, and the differences found so far."""

    def __init__(
        self, window: RecordedWindow, log: BalancerLog, options: BalancerOptions, led_since: float | None
    ) -> None:
        self._window = window
        self._options = options
        known = window.first + options.averaging_s if led_since is None else led_since
        self._events = _timeline(window, log, options.decision_interval_s, max(window.begin, known))
        self._machine = _ObedientMachine(configured(window.servers), 1, options)
        begin = window.first - lead_s(options)
        if led_since is not None:  # reports that were heard before count, too
            begin = max(begin, min(led_since, window.first) - BEGINS_S)
        plan = initial_plan(replace(window, begin=window.first), options)
        self._cluster = InstantCluster(self._machine, window.servers, plan, begin, math.inf)
        if window.paused_at(begin):
            self._cluster.pause(paused=True)
        self._reports = {(each.server, each.incarnation, each.sequence) for _, each in window.reports}
        #: Recorded changes that the machine has refused, and why.
        self._refused: dict[bytes, tuple[Assignment, str]] = {}
        #: Channels that have settled in the recording and not here.
        self._unsettled: set[bytes] = set()
        #: The first proposal since the latest recorded decision, and when.
        self._proposed: tuple[float, Decision] | None = None
        self._compared = self._moves = self._followed = 0
        self._differences: list[Difference] = []

    def run(self) -> Agreement:
        begin = self._cluster.now
        for at, event in self._events:
            if at < begin:
                continue  # before its balancer led
            if at >= self._window.end:
                break
            self._cluster.run_until(at, TICK_S)
            self._catch_up()
            self._handle(event)
        if self._proposed is not None:
            at, proposal = self._proposed
            cause = "the recorded balancer made no decision after it, or only after the recording"
            self._differences.append(Difference(at, (), tuple(moved(proposal.moves, at)), cause))
        return Agreement(self._compared, self._moves, tuple(self._differences), self._followed)

    def _handle(self, event: _Event) -> None:
        match event:
            case RecordedReport(_, report):
                self._cluster.report(report.server, report.incarnation, pack_report(report))
            case _ChangesBegan(assignments, followed):
                self._begin(assignments, followed)
            case _Settled(channel):
                self._unsettled.add(channel)
                self._catch_up()
            case _Paused(paused):
                self._cluster.pause(paused=paused)
            case _Look(decision):
                self._look(decision)

    def _begin(self, assignments: Mapping[bytes, Assignment], followed: bool) -> None:
        self._carry_out(assignments)
        if followed:
            self._followed += len(assignments) if self._cluster.now >= self._window.begin else 0
            for channel, assignment in assignments.items():
                if is_replicated(assignment):
                    self._machine.hold(channel, assignment)

    def _carry_out(self, assignments: Mapping[bytes, Assignment]) -> None:
        plan = self._machine.plan
        assert plan is not None, "a balancer that leads has a plan"
        for channel in assignments:
            self._refused.pop(channel, None)
        changes = {
            channel: place for channel, place in assignments.items() if plan.entry(channel).route.assignment != place
        }
        try:
            if changes:
                self._cluster.execute(self._machine.carry_out(changes, self._cluster.now))
        except RequestRefused as error:
            if len(changes) == 1:
                self._refused |= {channel: (place, str(error)) for channel, place in changes.items()}
                return
            for channel, place in changes.items():
                self._carry_out({channel: place})

    def _catch_up(self) -> None:
        """Repeat changes that were refused, and settle those that could not settle when they were recorded to."""
        for channel, (place, _) in [*self._refused.items()]:
            self._carry_out({channel: place})
        self._unsettled = {
            channel for channel in self._unsettled if channel in self._refused or not self._cluster.vacate(channel)
        }

    def _look(self, decision: RecordedDecision | None) -> None:
        now = self._cluster.now
        if self._proposed is None:
            proposal = self._machine.proposal(now)
            if proposal is not None and proposal.moves:
                self._proposed = now, proposal
        if decision is None:
            return
        if decision.at >= self._window.begin:
            self._compared += 1
            self._moves += len(decision.moves)
            replayed = [] if self._proposed is None else moved(self._proposed[1].moves, self._proposed[0])
            if not replayed or now - replayed[0].at > TOLERANCE_S or not _same(decision.moves, replayed):
                cause = self._cause(decision, replayed)
                self._differences.append(Difference(decision.at, decision.moves, tuple(replayed), cause))
        self._proposed = None
        self._machine.wait(now)

    def _cause(self, decision: RecordedDecision, replayed: Sequence[Moved]) -> str:
        """Return why the replay decides differently, as far as can be known."""
        lost = sum(key not in self._reports for key in decision.reports)
        if lost:
            return f"{lost} of {len(decision.reports)} reports that the balancer had heard are not in the recording"
        if self._refused:
            channel, (_, reason) = next(iter(self._refused.items()))
            return f"the replay could not follow the change of {in_quotes(channel)}: {reason}"
        ratios = self._ratios(decision)
        if not replayed:
            return f"the replay has no reason to decide, or waits: {ratios}"
        if (early_s := decision.at - replayed[0].at) > TOLERANCE_S:
            return f"the replay decides {early_s:.1f} s earlier"
        return f"{_first_difference(decision.moves, replayed)}; {ratios}"

    def _ratios(self, decision: RecordedDecision) -> str:
        """Return the load ratios of servers beside those that the decision had, in words."""
        before: dict[str, float] = {}
        for move in decision.moves:
            before = {server: ratios.before for server, ratios in move.ratios.items()} | before
        texts: list[str] = []
        for server, recorded in sorted(before.items()):
            here = self._machine.overview.load_ratio(server, self._cluster.now)
            texts.append(f"{server} {'unknown' if here is None else f'{here:.3f}'} instead of {recorded:.3f}")
        return f"load ratio of {', '.join(texts)}" if texts else "the recording has no load ratios of it"


def _same(moves: Sequence[Moved], others: Sequence[Moved]) -> bool:
    """Return whether two decisions move the same channels to the same places."""
    return {_places(move) for move in moves} == {_places(move) for move in others}


def _places(move: Moved) -> tuple[object, ...]:
    before, after = move.before, move.after
    return move.channel, before.mode, frozenset(before.servers), after.mode, frozenset(after.servers)


def _first_difference(recorded: Sequence[Moved], replayed: Sequence[Moved]) -> str:
    """Return the first move that two different decisions do not share, in words."""
    theirs, ours = {_places(move) for move in recorded}, {_places(move) for move in replayed}
    at_other = {move.channel: move for move in replayed}
    for move in recorded:
        if _places(move) not in ours:
            other = at_other.get(move.channel)
            name = in_quotes(move.channel)
            if other is None:
                return f"the replay leaves {name} where it is, {len(recorded)} moves became {len(replayed)}"
            return f"the replay chooses {_target(other)} for {name} instead of {_target(move)}"
    more = next(move for move in replayed if _places(move) not in theirs)
    return f"the replay moves {in_quotes(more.channel)} as well, {len(recorded)} moves became {len(replayed)}"


def _target(move: Moved) -> str:
    """Return where a move leads, with the predicted load ratios."""
    predicted = (
        f"{server} (predicted {move.ratios[server].after:.3f})" if server in move.ratios else server
        for server in move.after.servers
    )
    return ", ".join(predicted)


# Events by time.


def _timeline(
    window: RecordedWindow, log: BalancerLog, interval_s: float, looks_from: float
) -> list[tuple[float, _Event]]:
    events: list[tuple[float, _Event]] = [
        *_reports(window, log),
        *((at, _Paused(paused)) for at, paused in log.pauses),
        *_changes(window, log),
        *_looks(window, log, interval_s + LOOK_MARGIN_S, looks_from),
    ]
    return sorted(events, key=lambda event: (event[0], _ORDER[type(event[1])]))


def _reports(window: RecordedWindow, log: BalancerLog) -> list[tuple[float, RecordedReport]]:
    """Return the reports with the time when the balancer heard them; those of one server stay in order."""
    following: dict[str, float] = {}
    reports: list[tuple[float, RecordedReport]] = []
    for at, report in reversed(window.reports):
        server = report.server
        heard_at = log.heard.get((server, report.incarnation, report.sequence), at)
        heard_at = following[server] = min(heard_at, following.get(server, math.inf))
        reports.append((heard_at, RecordedReport(heard_at, report)))
    return reports[::-1]


def _changes(window: RecordedWindow, log: BalancerLog) -> Iterator[tuple[float, _ChangesBegan | _Settled]]:
    """Yield when changes began, at the times of their decisions, and when they settled."""
    decided: dict[tuple[bytes, Assignment], list[float]] = {}
    for decision in log.decisions:
        for move in decision.moves:
            decided.setdefault((move.channel, move.after), []).append(decision.at)
    settled: dict[bytes, list[float]] = {}
    for at, channel in log.settled:
        settled.setdefault(channel, []).append(at)
        yield at, _Settled(channel)
    begun: dict[tuple[float, bool], dict[bytes, Assignment]] = {}
    for step in _begins(window.steps):
        decided_at = _heard_as(step.at, decided.get((step.channel, step.after), ()))
        key = (step.at, True) if decided_at is None else (decided_at, False)
        begun.setdefault(key, {})[step.channel] = step.after
    yield from ((at, _ChangesBegan(assignments, followed)) for (at, followed), assignments in begun.items())
    for step in window.steps:
        if step.settled and _heard_as(step.at, settled.get(step.channel, ())) is None:
            yield step.at, _Settled(step.channel)


def _begins(steps: Sequence[PlanStep]) -> Iterator[PlanStep]:
    """Yield the first step of each change."""
    under_way: dict[bytes, Assignment] = {}
    for step in steps:
        if under_way.get(step.channel) != step.after:
            yield step
        under_way[step.channel] = step.after
        if step.settled:
            del under_way[step.channel]


def _heard_as(at: float, times: Sequence[float]) -> float | None:
    """Return which time of a balancer's clock a recorder heard of at ``at``; None for none of them."""
    return next((time for time in reversed(times) if -EARLY_S_MAX <= at - time <= LATE_S_MAX), None)


def _looks(
    window: RecordedWindow, log: BalancerLog, interval_s: float, looks_from: float
) -> Iterator[tuple[float, _Look]]:
    """Yield when the balancer looked whether a decision was due: at known times, and evenly between them."""
    decisions = {decision.at: decision for decision in log.decisions}
    looks = set(log.looks)
    known = sorted(looks.union(decisions))
    yield from ((at, _Look(decisions.get(at))) for at in known)
    times = [*known, window.end]
    for previous, at in zip([-math.inf, *known], times, strict=True):
        step_s = interval_s
        if at in looks and previous > -math.inf:
            step_s = (at - previous) / max(1, math.floor((at - previous) / interval_s))
        since = max(previous, looks_from)
        for number in range(1, math.ceil((at - since) / step_s)):
            yield at - number * step_s, _Look(None)
