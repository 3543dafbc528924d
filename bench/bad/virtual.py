"""Runs the simulated workload against the production controller, in virtual time (BAD, section 6.2).

Everything that decides is the coordinator's own code: placement, reports, model, relief, shuffle and controller. What
is made here is what surrounds it: users, rates, the brokers' reports and answers, and how long a move takes. The
published shuffle, to compare with, is ``dynamoth_sim.edge.published_balancing``.

Brokers report exact rates: result sets of the execution periods come one by one, and a moving average removes that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from typing import Any

from bench.bad.runs import Run
from bench.bad.simulated import END_S, RateChanged, SimWorkload, SimWorld, Subscribed
from bench.bad.town import Place
from dynamoth.edge.control import BrokerReport
from dynamoth_broker.candidates import busiest, choose_candidates, user_load_class
from dynamoth_broker.coordinator.controller import Controller
from dynamoth_broker.coordinator.events import (
    Answered,
    AskCandidates,
    ControllerEvent,
    DecisionRecorded,
    Kind,
    MoveEnded,
    MoveUsers,
    Reported,
    Tick,
)
from dynamoth_broker.coordinator.model import LoadModel, cov, mean
from dynamoth_broker.coordinator.placement import NearestPlacement, Newcomer, Reservations, distance_planar
from dynamoth_broker.coordinator.relieve import Scheme
from dynamoth_broker.coordinator.settings import CoordinatorSettings
from dynamoth_broker.rates import SAMPLE_USERS
from dynamoth_sim.edge.published_balancing import greedy_shuffle

CAPACITY_BYTES_PER_S = 2e9
"""Of each broker. The paper has none; this is twice what the most loaded one carries, so nobody is overloaded."""

REPORT_S = 10.0
"""T_report, and T_decide."""

ANSWER_S = 0.5
"""Time until candidates are answered."""

MOVES_PER_S = 100.0
MOVE_S = 1.0
"""A broker asks this many users to move per second, and each takes this long. The paper gives neither."""

NEVER = 1e9
"""A threshold that no cov reaches."""


@dataclass(frozen=True, kw_only=True)
class SimScheme:
    """What balances. ``settings`` None: nothing does."""

    name: str
    settings: CoordinatorSettings | None = None
    #: The published shuffle in place of the controller: gamma (a cov) and theta (a mean load, in bytes/s) begin it.
    #: Both are of loads, as the paper has no capacities.
    published_shuffle: tuple[float, float] | None = None
    #: Nothing balances before: an operator's pause while users log in. 0: none.
    begin_s: float = 0.0


def settings(*, cov_max: float, mean_min_bytes_per_s: float, **more: Any) -> CoordinatorSettings:
    """Return settings of a controller with alpha and beta; without a shuffle unless ``more`` says otherwise."""
    ratio = mean_min_bytes_per_s / more.pop("capacity", CAPACITY_BYTES_PER_S)
    given: dict[str, Any] = {
        "scheme": Scheme.LOAD,
        "cov_max": cov_max,
        "cov_target": cov_max,
        "ratio_mean_min": ratio,
        "shuffle_ratio_mean_min": ratio,
        "ratio_high": NEVER,
        "ratio_accept": NEVER,
        "shuffle_cov_min": NEVER,
        "connection_bytes_per_s": 0.0,
        "decide_s": REPORT_S,
        "report_s": 5.0,
        "looks": 1,
        "slow_half_life_s": 10.0,
        "candidates_max": 1_000_000,
    }
    return CoordinatorSettings(**(given | more))


@dataclass
class _Samples:
    times: list[float] = field(default_factory=list[float])
    loads: list[list[float]] = field(default_factory=list[list[float]])
    users: list[list[int]] = field(default_factory=list[list[int]])
    moves: list[int] = field(default_factory=list[int])
    egress: list[float] = field(default_factory=list[float])


class VirtualEdge:
    """Brokers, users and a coordinator of one run."""

    def __init__(
        self,
        workload: SimWorkload,
        seed: int,
        scheme: SimScheme,
        capacities: Sequence[float] | None = None,
        report_s: float = REPORT_S,
    ) -> None:
        self._workload, self._seed, self._scheme, self._report_s = workload, seed, scheme, report_s
        self.world = SimWorld(workload, seed)
        self._capacities = list(capacities or [CAPACITY_BYTES_PER_S] * workload.brokers)
        #: What is true: every user with all its interests.
        self.model = LoadModel()
        for number, (place, capacity) in enumerate(zip(self.world.brokers, self._capacities, strict=True)):
            self.model.add_broker(f"b{number:03}", capacity, location=place)
        for interest, rate in self.world.rates.items():
            self.model.set_rate(interest, rate)
        self._now = 0.0
        self._numbers = count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._moved = self._shuffles = self._shuffle_moves = 0
        self._shuffle_end = -1.0
        #: Decisions that were shuffles, by number.
        self._shuffling: set[int] = set()
        self._moved_at: dict[str, float] = {}
        self._samples = _Samples()
        self._place_users(self.world.homes)
        self.controller: Controller | None = None
        if scheme.settings is not None:
            placement = NearestPlacement(Reservations(), inf, distance_planar)
            self.controller = Controller(scheme.settings, placement, 0.0)
            self.controller.obey(is_paused=scheme.begin_s > 0, pinned=frozenset())
            self.after(scheme.begin_s, self._resume)

    def _resume(self) -> None:
        assert self.controller is not None
        self.controller.obey(is_paused=False, pinned=frozenset())

    def _place_users(self, homes: Sequence[Place]) -> None:
        """Log all users in, at the nearest brokers: nothing is loaded yet, so no bound counts."""
        if self._workload.is_subscribed_at_once:  # the placement, which ranks all brokers, would take minutes
            names = list(self.model.brokers)
            for number, (place, theirs) in enumerate(zip(homes, self.world.initial, strict=True)):
                self.model.attach(f"u{number:07}", names[self.world.nearest(place)], theirs)
            return
        placement = NearestPlacement(Reservations(), inf, distance_planar)
        for number, place in enumerate(homes):
            broker = placement.place(Newcomer(id=str(number), location=place), self.model, 0.0)
            assert broker is not None
            self.model.attach(f"u{number:07}", broker, ())

    # Time.

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call something later."""
        heappush(self._queue, (self._now + delay_s, next(self._numbers), call))

    def run(self, end_s: float = END_S, sample_s: float = REPORT_S) -> Run:
        """Run to the end, and return what was sampled."""
        for event in self.world.subscriptions:
            self._queue.append((event.at, next(self._numbers), partial(self._subscribe, event)))
        for change in self.world.changes:
            self._queue.append((change.at, next(self._numbers), partial(self._change, change)))
        self._queue.sort()
        self._report()
        self._sample(sample_s)
        while True:
            deadline = inf if self.controller is None else self.controller.deadline()
            at = min(self._queue[0][0], deadline)
            if at > end_s:
                return self._result()
            if deadline < self._queue[0][0]:
                self._now = deadline
                self._control(Tick())
                continue
            self._now, _, call = heappop(self._queue)
            call()

    def _result(self) -> Run:
        workload, samples = self._workload, self._samples
        is_even = len(set(self._capacities)) == 1
        return Run(
            world="simulation",
            workload=workload.interests + ("" if is_even else ", sizes"),
            placement="NR",
            scheme=self._scheme.name,
            seed=self._seed,
            times=samples.times,
            loads=samples.loads,
            users=samples.users,
            moves=samples.moves,
            egress=samples.egress,
            capacities=[] if is_even else self._capacities,
            shuffles=self._shuffles,
            shuffle_moves=self._shuffle_moves,
            shuffle_end=self._shuffle_end,
            more={
                "decisions": 0.0 if self.controller is None else float(len(self.controller.decisions)),
                "handle_s_max": self._handle_s_max,
            },
        )

    def _sample(self, sample_s: float) -> None:
        brokers = list(self.model.brokers.values())
        self._samples.times.append(self._now)
        self._samples.loads.append([broker.load for broker in brokers])
        self._samples.users.append([broker.users for broker in brokers])
        self._samples.moves.append(self._moved)
        self._samples.egress.append(sum(broker.inbound for broker in brokers))
        self.after(sample_s, partial(self._sample, sample_s))

    # Users and rates.

    def _subscribe(self, event: Subscribed) -> None:
        name = f"u{event.user:07}"
        user = self.model.users[name]
        self.model.detach(name)
        self.model.attach(name, user.broker, (*user.interests, event.interest))

    def _change(self, event: RateChanged) -> None:
        self.model.set_rate(event.interest, event.rate)

    # Brokers.

    def _report(self) -> None:
        self.after(self._report_s, self._report)
        if self._scheme.published_shuffle is not None and self._now >= self._scheme.begin_s:
            self._shuffle_as_published(*self._scheme.published_shuffle)
        if self.controller is None:
            return
        rates = self._rates()
        for broker in self.model.brokers.values():
            sample = list(islice(broker.known.values(), SAMPLE_USERS))
            classes = Counter(user_load_class(self.model.own_load(each.interests)) for each in sample)
            scale = broker.users / max(1, len(sample))
            report = BrokerReport(
                broker=broker.id,
                capacity_bytes_per_s=broker.capacity,
                load_bytes_per_s=max(0.0, broker.load),
                inbound_bytes_per_s=max(0.0, broker.inbound),
                users=broker.users,
                location=broker.location,
                interests=busiest(rates, broker.counts),
                user_loads=tuple(round(classes[number] * scale) for number in range(max(classes, default=0) + 1)),
                report_s=self._report_s,
            )
            self._control(Reported(report))

    #: The longest time that the controller took for one event, in seconds of CPU.
    _handle_s_max = 0.0

    def _rates(self) -> dict[str, float]:
        return {name: self.model.rate(name) for name in self.world.rates}

    def _control(self, event: ControllerEvent) -> None:
        assert self.controller is not None
        begin = time.process_time()
        actions = self.controller.handle(event, self._now)
        self._handle_s_max = max(self._handle_s_max, time.process_time() - begin)
        for action in actions:
            match action:
                case AskCandidates():
                    self.after(ANSWER_S, partial(self._answer, action))
                case MoveUsers(decision, moves):
                    self._start_moves(
                        [(move.user, move.source, move.target) for move in moves], decision in self._shuffling
                    )
                case DecisionRecorded(decision):
                    if decision.kind is Kind.SHUFFLE and decision.number not in self._shuffling:
                        self._shuffling.add(decision.number)
                        self._shuffles += 1
                case refused:
                    raise AssertionError(refused)

    def _answer(self, ask: AskCandidates) -> None:
        broker = self.model.brokers[ask.broker]
        users = [
            (user.id, user.interests)
            for user in broker.known.values()
            if self._now - self._moved_at.get(user.id, -inf) >= ask.rest_s
        ]
        candidates = choose_candidates(ask.broker, users, self._rates(), broker.counts, (ask.load, ask.users_max))
        self._control(Answered(ask.request, candidates))

    # Moves.

    def _start_moves(self, moves: Sequence[tuple[str, str, str]], is_shuffle: bool) -> None:
        started: Counter[str] = Counter()
        for user, source, target in moves:
            started[source] += 1
            taken_s = MOVE_S + started[source] / MOVES_PER_S
            self.after(taken_s, partial(self._end_move, user, target, is_shuffle))

    def _end_move(self, user: str, target: str, is_shuffle: bool) -> None:
        self.model.move(user, target)
        self._moved += 1
        self._moved_at[user] = self._now
        if is_shuffle:
            self._shuffle_moves += 1
            self._shuffle_end = self._now
        if self.controller is not None:
            self._control(MoveEnded(user, True))

    def _shuffle_as_published(self, gamma: float, theta: float) -> None:
        """Begin the published shuffle where it is due and none is under way."""
        loads = [broker.load for broker in self.model.brokers.values()]
        if cov(loads) <= gamma or mean(loads) <= theta or self._moved < self._shuffle_moves_planned:
            return
        targets = greedy_shuffle(self.model)
        moves = [
            (user, self.model.users[user].broker, target)
            for user, target in targets.items()
            if self.model.users[user].broker != target
        ]
        self._shuffles += 1
        self._shuffle_moves_planned = self._moved + len(moves)
        self._start_moves(moves, is_shuffle=True)

    #: How many users will have moved when the published shuffle under way has ended.
    _shuffle_moves_planned = 0


def ours(alpha: float, target: float, beta: float, gamma: float = NEVER) -> CoordinatorSettings:
    """Return our settings: relief begins at ``alpha`` and goes on to ``target``; a shuffle begins at ``gamma``."""
    more = {"shuffle_cov_min": gamma} if gamma < NEVER else {}
    made = settings(cov_max=alpha, mean_min_bytes_per_s=beta, scheme=Scheme.SIMILARITY, **more)
    return replace(made, cov_target=target)
