"""Runs the production coordinator's controller on a recorded window of brokers' loads.

The controller gets each recorded report, changed by the moves of the replay (``world``), and a tick when it asks for
one. Its questions for candidates are answered at once. A move takes ``ReplayedWindow.move_s``, and all of them succeed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from dynamoth.edge.control import BrokerReport
from dynamoth_analytics.replay.brokers.world import World
from dynamoth_broker.coordinator.controller import Controller
from dynamoth_broker.coordinator.events import (
    Answered,
    AskCandidates,
    BrokerGone,
    ControllerEvent,
    DecisionRecorded,
    Kind,
    MoveEnded,
    MoveUsers,
    Refused,
    Reported,
    Tick,
)
from dynamoth_broker.coordinator.model import cov
from dynamoth_broker.coordinator.placement import LeastLoadedPlacement
from dynamoth_broker.coordinator.plan import Move
from dynamoth_broker.coordinator.settings import CoordinatorOptions

MOVE_S = 0.5
"""How long a move of a user takes where none was recorded."""

STEP_S_MAX = 5.0
"""A longer time between two reports counts as this: nothing is known of the rest."""


class RecordedReport(NamedTuple):
    """A report and when it came, in seconds."""

    at: float
    report: BrokerReport


@dataclass(frozen=True, slots=True)
class RecordedMigration:
    """A user whom the recorded coordinator has moved, and when the user was at the new broker."""

    at: float
    session: str
    source: str
    target: str
    interests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BrokerWindow:
    """A recorded window. Reports before ``begin`` make the averages with which it begins."""

    begin: float
    end: float
    #: By time.
    reports: Sequence[RecordedReport]
    migrations: Sequence[RecordedMigration] = ()
    #: When operators have paused decisions (True), and let the coordinator decide again; by time.
    pauses: Sequence[tuple[float, bool]] = ()
    move_s: float = MOVE_S


@dataclass(slots=True)
class Figures:
    """What happened in a window. Load ratios are those of the moment, not averages."""

    overload_s: float = 0.0
    ratio_max: float = 0.0
    moves: int = 0
    decisions: int = 0
    shuffles: int = 0
    #: The time that the means are over.
    seconds: float = 0.0
    _largest: float = 0.0
    _cov: float = 0.0
    _egress: float = 0.0

    def add(self, seconds: float, ratios: Sequence[float], egress: float, overload_ratio: float) -> None:
        """Add a time in which nothing changed. ``egress``: what Redis sends to brokers, in bytes/s."""
        largest = max(ratios, default=0.0)
        self.seconds += seconds
        self.overload_s += seconds * sum(ratio > overload_ratio for ratio in ratios)
        self.ratio_max = max(self.ratio_max, largest)
        self._largest += seconds * largest
        self._cov += seconds * cov([*ratios])
        self._egress += seconds * egress

    def _mean(self, total: float) -> float:
        return total / self.seconds if self.seconds else 0.0

    @property
    def ratio_max_mean(self) -> float:
        """The mean of the largest load ratio."""
        return self._mean(self._largest)

    @property
    def cov(self) -> float:
        """The mean cov of the load ratios."""
        return self._mean(self._cov)

    @property
    def redis_egress(self) -> float:
        """The mean of what Redis sends to brokers, in bytes/s."""
        return self._mean(self._egress)


def recorded_figures(window: BrokerWindow, options: CoordinatorOptions, overload_ratio: float) -> Figures | None:
    """Return what really happened in a window; None: it has no reports."""
    found = _Replay(window, options, overload_ratio, is_replayed=False).run()
    if found is not None:
        found.moves = sum(window.begin <= each.at < window.end for each in window.migrations)
    return found


def replay_brokers(window: BrokerWindow, options: CoordinatorOptions, overload_ratio: float) -> Figures | None:
    """Return what would have happened under other settings; None: the window has no reports.

    A coordinator in a dry run is replayed as one that moves users.

    Args:
        window: what was recorded.
        options: the settings.
        overload_ratio: a broker above this load ratio is overloaded.

    """
    return _Replay(window, replace(options, dry_run=False), overload_ratio, is_replayed=True).run()


@dataclass(slots=True)
class _Heard:
    """When a broker has reported last, and whether its load counts."""

    at: float
    ratio: float
    is_counted: bool
    inbound: float


class _Replay:
    """One window under one combination of settings."""

    def __init__(
        self, window: BrokerWindow, options: CoordinatorOptions, overload_ratio: float, *, is_replayed: bool
    ) -> None:
        self._window = window
        self._options = options
        self._overload_ratio = overload_ratio
        self._is_replayed = is_replayed
        self._world = World()
        begin = min(window.begin, window.reports[0].at) if window.reports else window.begin
        self._controller = Controller(options, LeastLoadedPlacement(), begin)
        self._controller.obey(True, frozenset())
        self._heard: dict[str, _Heard] = {}
        #: Moves that end, in the order of their times.
        self._ends: deque[tuple[float, Move]] = deque()
        self._figures = Figures()
        #: Until when figures are summed up.
        self._summed_at = window.begin

    def run(self) -> Figures | None:
        """Replay the window."""
        window = self._window
        if not any(each.at >= window.begin for each in window.reports):
            return None
        for at, event in self._recorded():
            if self._is_replayed:
                self._run_until(at)
            self._sum_up(at)
            if isinstance(event, BrokerReport):
                self._on_report(event, at)
            elif isinstance(event, RecordedMigration):
                if self._is_replayed:
                    self._world.put_back(event.session, event.source, event.target, event.interests)
            else:
                self._controller.obey(event, frozenset())
        return self._figures

    def _recorded(self) -> Iterator[tuple[float, BrokerReport | RecordedMigration | bool]]:
        """Yield what was recorded, in order; pauses from before the window count at its begin."""
        window = self._window
        paused = [is_paused for at, is_paused in window.pauses if at < window.begin][-1:] or [False]
        events: list[tuple[float, int, BrokerReport | RecordedMigration | bool]] = [
            (window.begin, 0, paused[0]),
            *((each.at, 2, each.report) for each in window.reports if each.at < window.end),
            *((each.at, 1, each) for each in window.migrations if window.begin <= each.at < window.end),
            *((at, 0, is_paused) for at, is_paused in window.pauses if window.begin <= at < window.end),
        ]
        events.sort(key=lambda event: event[:2])
        yield from ((at, event) for at, _, event in events)

    def _on_report(self, report: BrokerReport, now: float) -> None:
        present = self._world.report(report)
        if self._is_replayed:
            self._handle(Reported(present), now)
        self._note(report.broker, now)

    def _note(self, broker: str, at: float) -> None:
        present, options = self._world.present(broker), self._options
        load = present.load_bytes_per_s + options.connection_bytes_per_s * present.users
        ratio = max(load / present.capacity_bytes_per_s, present.other_ratio_max)
        self._heard[broker] = _Heard(at, ratio, not present.is_draining, present.inbound_bytes_per_s)

    def _sum_up(self, now: float) -> None:
        """Add the time since the last event; brokers that have been silent for long do not count."""
        elapsed_s, self._summed_at = now - self._summed_at, max(now, self._summed_at)
        if elapsed_s <= 0 or not self._heard:
            return
        for broker in [id_ for id_, heard in self._heard.items() if now - heard.at > self._options.forget_s]:
            del self._heard[broker]
            if self._is_replayed:
                self._handle(BrokerGone(broker), now)
        ratios = [heard.ratio for heard in self._heard.values() if heard.is_counted]
        egress = sum(heard.inbound for heard in self._heard.values())
        self._figures.add(min(elapsed_s, STEP_S_MAX), ratios, egress, self._overload_ratio)

    # The controller.

    def _run_until(self, at: float) -> None:
        """Give the controller the ticks that are due, and have moves end, in order."""
        while True:
            ended_at = self._ends[0][0] if self._ends else inf
            due_at = self._controller.deadline()
            if min(ended_at, due_at) > at:
                return
            if ended_at <= due_at:
                self._end_move(*self._ends.popleft())
            else:
                self._handle(Tick(), due_at)
                assert self._controller.deadline() > due_at, "the controller waits for a time that has passed"

    def _end_move(self, now: float, move: Move) -> None:
        self._sum_up(now)
        self._world.move(move.user, move.source, move.target, now)
        for broker in (move.source, move.target):
            if (heard := self._heard.get(broker)) is not None:
                self._note(broker, heard.at)
        self._figures.moves += 1
        self._handle(MoveEnded(move.user, True), now)

    def _handle(self, event: ControllerEvent, now: float) -> None:
        for action in self._controller.handle(event, now):
            match action:
                case AskCandidates():
                    self._handle(Answered(action.request, self._world.candidates(action, now)), now)
                case MoveUsers(_, moves):
                    self._ends.extend((now + self._window.move_s, move) for move in moves)
                case DecisionRecorded(decision) if not (decision.moved or decision.failed or decision.measured):
                    if decision.plan.moves:
                        self._figures.decisions += 1
                        self._figures.shuffles += decision.kind is Kind.SHUFFLE
                    else:
                        self._world.forget_offers()
                case DecisionRecorded(decision):
                    if decision.measured is None:
                        self._world.forget_offers()
                case Refused():
                    pass
