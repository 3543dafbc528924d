"""Decides when users move between brokers, and which: relief for slight unevenness, a shuffle for an extreme one.

Theory of operation
-------------------
Every ``decide_s`` the controller looks at the averages of what brokers report. If a shuffle or relief was due at
``looks`` looks one after the other, it asks brokers for candidates, decides with those that answer, and has the users
moved batch by batch. When the last batch has settled it waits, until every broker has reported and ``wait_s`` has
passed, and looks again. So a decision never goes by loads from before the moves of another.

    ========  ===================================================  ====================================
    Stage     what it waits for                                    next
    ========  ===================================================  ====================================
    WATCHING  the next look                                        ASKING, when something is due
    ASKING    candidates, for ``ask_timeout_s`` at most            MOVING; WATCHING without a move
    MOVING    the users of a batch, ``batch_timeout_s`` at most    MOVING; WATCHING after the last batch
    ========  ===================================================  ====================================

A shuffle competes with relief: it is decided only if it brings more, with the cost of the moves of both.
A decision has one kind and one plan, and no user is in a plan twice (BAD, Algorithm 1, may write two targets).

Brokers whose reports are too old are suspect: no user is moved there, none from there, and their loads do not count.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from enum import Enum, auto

from dynamoth.edge.control import Candidates
from dynamoth_broker.coordinator.events import (
    Answered,
    AskCandidates,
    BrokerGone,
    ControllerAction,
    ControllerEvent,
    Decision,
    DecisionRecorded,
    Explanation,
    Kind,
    MoveEnded,
    MoveUsers,
    Refused,
    Reported,
    Tick,
)
from dynamoth_broker.coordinator.fleet import Fleet
from dynamoth_broker.coordinator.model import LoadModel, Standing, Summary
from dynamoth_broker.coordinator.placement import Newcomer, Placement, Reservations
from dynamoth_broker.coordinator.plan import Move, Plan
from dynamoth_broker.coordinator.relieve import Scheme, relieve
from dynamoth_broker.coordinator.reports import ANY_LOAD, users_for
from dynamoth_broker.coordinator.settings import CoordinatorSettings
from dynamoth_broker.coordinator.shuffle import shuffle

DECISIONS_MAX = 100
"""Bound of the latest decisions that are kept."""

SPARE_CANDIDATES = 64
"""A broker is asked for this many users more than have to leave: other sizes may fit where theirs do not."""

PLACEMENT_REFRESH_S = 1.0
"""The model that placements go by is at most this old. Reservations make up for what is newer."""


class Stage(Enum):
    """See the table above."""

    WATCHING = auto()
    ASKING = auto()
    MOVING = auto()


class Controller:
    """One coordinator's decisions. It is pure: events in, actions out; ``now`` never goes back.

    ``reservations`` are those of the placement; None for a placement without.
    """

    def __init__(
        self, settings: CoordinatorSettings, placement: Placement, now: float, reservations: Reservations | None = None
    ) -> None:
        self.settings = settings
        self.placement = placement
        self.reservations = reservations or Reservations()
        self.fleet = Fleet(settings)
        self.stage = Stage.WATCHING
        self.is_paused = False
        #: Users who stay where they are.
        self.pinned: frozenset[str] = frozenset()
        #: The latest decisions, the earliest first.
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_MAX)
        self._number = 0
        #: When users moved who still rest.
        self._moved_at: dict[str, float] = {}
        #: What was due at the latest look, and at how many looks one after the other something was.
        self._due: tuple[Kind, str] | None = None
        self._looks = 0
        self._look_at = now
        #: No look before it decides anything.
        self._wait_until = -math.inf
        #: When the latest plan settled: decisions need reports from after it.
        self._settled_at = -math.inf
        #: Whether the latest decision has moved users, and its effect has not been measured.
        self._is_unmeasured = False
        # While ASKING.
        self._request = 0
        self._asked: set[str] = set()
        self._answers: list[Candidates] = []
        # While MOVING.
        self._batches: deque[tuple[Move, ...]] = deque()
        #: Moves under way, by user; empty in other stages.
        self._in_flight: dict[str, Move] = {}
        #: Capacities by broker, that the ratios of these moves are of.
        self._capacities: dict[str, float] = {}
        #: When ASKING or the batch under way ends at the latest.
        self._ends_at = math.inf
        self._placement_model: tuple[float, LoadModel] | None = None

    def deadline(self) -> float:
        """Return when ``Tick`` is due."""
        return self._look_at if self.stage is Stage.WATCHING else self._ends_at

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerAction]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Reported():
                if not self.fleet.report(event.report, now):
                    return [Refused(f"the report of {event.report.broker} is implausible")]
                self.reservations.on_report(event.report.broker, now)
            case Answered():
                return self._on_answer(event, now)
            case MoveEnded():
                return self._on_move_ended(event, now)
            case BrokerGone():
                return self._on_broker_gone(event.broker, now)
            case Tick():
                return self._on_tick(now)
        return []

    def _on_broker_gone(self, broker: str, now: float) -> list[ControllerAction]:
        self.fleet.forget(broker)
        self.reservations.on_broker_gone(broker)
        self._placement_model = None
        if broker not in self._asked:
            return []
        self._asked.discard(broker)
        return [] if self._asked else self._decide(now)

    def obey(self, is_paused: bool, pinned: frozenset[str]) -> None:
        """Follow orders of operators: whether nothing is decided, and who stays. What has been decided goes on."""
        self.is_paused, self.pinned = is_paused, pinned

    def place(self, newcomer: Newcomer, now: float) -> str | None:
        """Return the broker of a newcomer; None while no broker admits users."""
        return self.placement.place(newcomer, self.placement_model(now), now)

    def placement_model(self, now: float, age_s_max: float = PLACEMENT_REFRESH_S) -> LoadModel:
        """Return the model that placements go by; less than ``age_s_max`` old, or new."""
        model = self._placement_model
        if model is None or not model[1].brokers or now - model[0] >= age_s_max:
            model = self._placement_model = now, self.fleet.for_placement(now)
        return model[1]

    # Looks.

    def _on_tick(self, now: float) -> list[ControllerAction]:
        if now < self.deadline():
            return []
        if self.stage is Stage.ASKING:
            return self._decide(now)
        if self.stage is Stage.MOVING:
            return self._give_up_batch(now)
        self._look_at = now + self.settings.decide_s
        return self._look(now)

    def _look(self, now: float) -> list[ControllerAction]:
        self._moved_at = {user: at for user, at in self._moved_at.items() if now - at < self.settings.rest_s}
        if self._obstacles(now):
            self._looks, self._due = 0, None
            return []
        model = self.fleet.for_moves(now)
        summary = model.summary()
        actions = self._measure(summary)
        due = self._what_is_due(summary)
        self._looks = 0 if due is None else self._looks + 1
        self._due = due
        if due is None or self._looks < self.settings.looks:
            return actions
        self._looks = 0
        return [*actions, *self._ask(due[0], model, summary, now)]

    def _obstacles(self, now: float) -> list[str]:
        """Return why nothing can be decided now, in words."""
        obstacles: list[str] = []
        if self.is_paused:
            obstacles.append("decisions are paused")
        if 2 * len(suspects := self.fleet.suspects(now)) > len(self.fleet):
            obstacles.append(f"most brokers have not reported lately: {', '.join(suspects[:5])}")
        if now < self._wait_until:
            obstacles.append(f"it waits after a plan (wait_s): {self._wait_until - now:.1f} s are left")
        if unheard := self.fleet.unheard_since(self._settled_at, now):
            obstacles.append(f"brokers have not reported since the latest plan settled: {', '.join(unheard[:5])}")
        return obstacles

    def _what_is_due(self, summary: Summary) -> tuple[Kind, str] | None:
        settings = self.settings
        figures = f"cov {summary.cov:.3f}, mean load ratio {summary.ratio_mean:.3f}, largest {summary.ratio_max:.3f}"
        if summary.cov > settings.shuffle_cov_min and summary.ratio_mean > settings.shuffle_ratio_mean_min:
            return Kind.SHUFFLE, f"{figures}: very uneven (shuffle_cov_min {settings.shuffle_cov_min:g})"
        if summary.cov > settings.cov_max and summary.ratio_mean > settings.ratio_mean_min:
            return Kind.RELIEVE, f"{figures}: uneven (cov_max {settings.cov_max:g})"
        if summary.ratio_max > settings.ratio_high:
            return Kind.RELIEVE, f"{figures}: a broker is overloaded (ratio_high {settings.ratio_high:g})"
        return None

    def _measure(self, summary: Summary) -> list[ControllerAction]:
        """Record what the latest plan has brought."""
        if not self._is_unmeasured:
            return []
        self._is_unmeasured = False
        return self._record(replace(self.decisions[-1], measured=summary))

    def _record(self, decision: Decision) -> list[ControllerAction]:
        if self.decisions and self.decisions[-1].number == decision.number:
            self.decisions.pop()
        self.decisions.append(decision)
        return [DecisionRecorded(decision)]

    # Candidates.

    def _ask(self, kind: Kind, model: LoadModel, summary: Summary, now: float) -> list[ControllerAction]:
        """Ask brokers for candidates: all for a shuffle, else those above the mean, in proportion to their excess."""
        counted = list(model.counted())
        excess = {broker.id: broker.load - summary.ratio_mean * broker.capacity for broker in counted}
        if kind is Kind.SHUFFLE:
            shares = {broker.id: (ANY_LOAD, broker.users) for broker in counted if broker.users}
        else:
            shares = {}
            for broker, load in excess.items():
                report = self.fleet.latest(broker)
                if load > 0 and report is not None and report.users:
                    # Without a histogram of user loads, anybody may be needed.
                    shares[broker] = load, (users_for(2 * load, report.user_loads) or report.users) + SPARE_CANDIDATES
        scale = min(1.0, self.settings.candidates_max / max(1, sum(users for _, users in shares.values())))
        self.stage, self._ends_at = Stage.ASKING, now + self.settings.ask_timeout_s
        self._request += 1
        self._answers, self._asked = [], set(shares)
        asks: list[ControllerAction] = [
            AskCandidates(self._request, broker, load, math.ceil(users * scale), self.settings.rest_s)
            for broker, (load, users) in sorted(shares.items())
        ]
        return asks or self._decide(now)

    def _on_answer(self, event: Answered, now: float) -> list[ControllerAction]:
        broker = event.candidates.broker
        if self.stage is not Stage.ASKING or event.request != self._request or broker not in self._asked:
            return []
        self._asked.discard(broker)
        self._answers.append(event.candidates)
        return [] if self._asked else self._decide(now)

    # Decisions.

    def _is_movable(self, user: str) -> bool:
        return user not in self.pinned and user not in self._moved_at

    def _decide(self, now: float) -> list[ControllerAction]:
        assert self._due is not None, "candidates were asked for though nothing is due"
        answers, self._answers, self._asked = sorted(self._answers, key=lambda answer: answer.broker), [], set()
        if self.is_paused:
            self._watch(now)
            return []
        model = self.fleet.for_moves(now, answers)
        self._capacities = {broker.id: broker.capacity for broker in model.brokers.values()}
        kind, plan = self._plan(self._due[0], model)
        self._number += 1
        decision = Decision(self._number, now, kind, self._due[1], plan, self.settings.dry_run)
        actions = self._record(decision)
        if not plan.moves or self.settings.dry_run:
            self._watch(now)
            return actions
        self.stage, self._batches = Stage.MOVING, deque(plan.batches)
        return [*actions, *self._next_batch(now)]

    def _plan(self, kind: Kind, model: LoadModel) -> tuple[Kind, Plan]:
        settings = self.settings
        if kind is Kind.SHUFFLE:
            shuffled = shuffle(model, settings.shuffle, self._is_movable)
            if shuffled.moves:
                users, worth = sum(broker.users for broker in model.brokers.values()), settings.shuffle.worth
                unbounded = replace(
                    settings.relief, moves_max=settings.shuffle_moves_max, moves_in_max=settings.shuffle_moves_max
                )
                # By load: it comes to nearly the same largest ratio, and takes a third of the time.
                relieved = relieve(model.copy(), Scheme.LOAD, unbounded, self._is_movable)
                if worth.net_gain(shuffled, users) > worth.net_gain(relieved, users):
                    return kind, shuffled
        return Kind.RELIEVE, relieve(model, settings.scheme, settings.relief, self._is_movable)

    # Moves.

    def _next_batch(self, now: float) -> list[ControllerAction]:
        """Send the next batch that has moves, without those whose brokers have become unfit."""
        while self._batches:
            batch = self._batches.popleft()
            fit = tuple(move for move in batch if self._is_fit(move, now))
            self._count(failed=len(batch) - len(fit))
            if fit:
                self._in_flight = {move.user: move for move in fit}
                self._ends_at = now + self.settings.batch_timeout_s
                return [MoveUsers(self._number, fit)]
        return self._settle(now)

    def _is_fit(self, move: Move, now: float) -> bool:
        return (
            move.user not in self.pinned
            and self.fleet.standing(move.source, now).is_counted
            and self.fleet.standing(move.target, now) is Standing.OPEN
        )

    def _on_move_ended(self, event: MoveEnded, now: float) -> list[ControllerAction]:
        move = self._in_flight.pop(event.user, None)
        if move is None:
            return []  # it comes after the time for it
        if event.moved:
            self._moved_at[event.user] = now
            weight = self.settings.connection_bytes_per_s  # reports show the number of users at once
            less, more = (change.after - change.before for change in (move.source_ratio, move.target_ratio))
            self.fleet.shift(move.source, less * self._capacities[move.source] + weight)
            self.fleet.shift(move.target, more * self._capacities[move.target] - weight)
        self._count(moved=int(event.moved), failed=int(not event.moved))
        return [] if self._in_flight else self._next_batch(now)

    def _give_up_batch(self, now: float) -> list[ControllerAction]:
        self._count(failed=len(self._in_flight))
        self._in_flight = {}
        return self._next_batch(now)

    def _count(self, moved: int = 0, failed: int = 0) -> None:
        """Count users of the present decision, which is recorded again when it has settled."""
        decision = self.decisions[-1]
        self.decisions[-1] = replace(decision, moved=decision.moved + moved, failed=decision.failed + failed)

    def _settle(self, now: float) -> list[ControllerAction]:
        self._settled_at, self._is_unmeasured = now, True
        self._watch(now)
        return self._record(self.decisions[-1])

    def _watch(self, now: float) -> None:
        self.stage, self._ends_at = Stage.WATCHING, math.inf
        self._wait_until = now + self.settings.wait_s
        self._look_at = now + self.settings.decide_s

    # For people.

    def explain(self, now: float) -> Explanation:
        """Return what the controller does now, and why. Nothing changes."""
        model = self.fleet.for_moves(now)
        summary = model.summary()
        due = self._what_is_due(summary)
        obstacles = self._obstacles(now) if self.stage is Stage.WATCHING else []
        return Explanation(
            stage=self.stage.name,
            loads=summary,
            brokers={broker.id: (broker.ratio, broker.standing.name) for broker in model.brokers.values()},
            due="" if due is None else due[1],
            looks=self._looks,
            obstacles=tuple(obstacles),
            suspects=tuple(self.fleet.suspects(now)),
            pinned=tuple(sorted(self.pinned)),
            in_flight=len(self._in_flight),
            latest=self.decisions[-1] if self.decisions else None,
        )

    def check(self) -> None:
        """Assert what always holds between two events."""
        assert (self.stage is Stage.MOVING) == bool(self._in_flight), "users are in flight while none should be"
        assert self.stage is Stage.ASKING or not self._asked, "brokers are asked while none should be"
        assert self.stage is not Stage.MOVING or self.decisions[-1].number == self._number
