"""What a decision of the coordinator costs with a million users: time and memory, from reports to the moves.

Run with ``python -m bench.coordinator``. No server is needed: the reports and answers are made here, one broker at a
time, and only what they contain is kept. Prints a line per figure, then one line of JSON; ends with 1 when a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial

import msgpack

from dynamoth.edge.control import BrokerReport, Candidates
from dynamoth_broker.candidates import busiest, choose_candidates, user_load_class
from dynamoth_broker.coordinator.controller import Controller
from dynamoth_broker.coordinator.events import (
    Answered,
    AskCandidates,
    ControllerAction,
    Decision,
    DecisionRecorded,
    MoveUsers,
    Reported,
    Tick,
)
from dynamoth_broker.coordinator.placement import LeastLoadedPlacement
from dynamoth_broker.coordinator.settings import CoordinatorSettings

DECISION_S_MAX = 5.0
RSS_MIB_MAX = 1024.0
REPORT_BYTES_MAX = 65_536
"""For 1,000,000 users at 200 brokers."""

INTERESTS_PER_BROKER = 500
"""There is a region of so many interests for each broker; half of a user's interests are from one region."""

INTERESTS_PER_USER = 20
MEAN_RATIO = 0.5


@dataclass(frozen=True)
class World:
    """A cluster whose brokers can be made again from their numbers."""

    users: int
    brokers: int
    #: How unevenly the users are spread: the most loaded broker has this many times the users of the least loaded one.
    skew: float

    @property
    def interests(self) -> int:
        return INTERESTS_PER_BROKER * self.brokers

    def users_at(self, number: int) -> int:
        """Return how many users a broker has: in a straight line from the least to the most."""
        least = 2 * self.users / self.brokers / (1 + self.skew)
        return round(least * (1 + (self.skew - 1) * number / max(1, self.brokers - 1)))

    def broker(self, number: int) -> Broker:
        """Make a broker, the same each time."""
        rng = random.Random(number)
        users: list[tuple[str, tuple[str, ...]]] = []
        for user in range(self.users_at(number)):
            region = rng.randrange(self.brokers) * INTERESTS_PER_BROKER
            of_region = rng.choices(range(region, region + INTERESTS_PER_BROKER), k=INTERESTS_PER_USER // 2)
            of_all = rng.choices(range(self.interests), k=INTERESTS_PER_USER // 2)
            users.append((f"{number:05}-{user:016}", tuple({f"{each:022}": None for each in (*of_region, *of_all)})))
        return Broker(f"b{number:03}", self, users)


@dataclass
class Broker:
    """One broker with all its users."""

    id: str
    world: World
    users: list[tuple[str, tuple[str, ...]]]

    def __post_init__(self) -> None:
        self.counts = Counter(interest for _, theirs in self.users for interest in theirs)
        # Between 500 and 1,500 bytes/s, the same at every broker.
        self.rates = {interest: 500.0 + int(interest) * 7919 % 1001 for interest in self.counts}

    def report(self) -> BrokerReport:
        inbound = sum(self.rates.values())
        load = inbound + sum(self.rates[interest] * count for interest, count in self.counts.items())
        classes = Counter(user_load_class(sum(self.rates[each] for each in theirs)) for _, theirs in self.users)
        mean_load = (INTERESTS_PER_USER * 1000.0) * 1.9 * self.world.users / self.world.brokers
        return BrokerReport(
            broker=self.id,
            capacity_bytes_per_s=mean_load / MEAN_RATIO,
            load_bytes_per_s=load,
            inbound_bytes_per_s=inbound,
            users=len(self.users),
            interests=busiest(self.rates, self.counts),
            user_loads=tuple(classes[number] for number in range(max(classes) + 1)),
        )

    def answer(self, ask: AskCandidates) -> Candidates:
        return choose_candidates(self.id, self.users, self.rates, self.counts, (ask.load, ask.users_max))


@dataclass(frozen=True)
class Result:
    users: int
    brokers: int
    kind: str
    candidates: int
    moves: int
    cov_before: float
    cov_after: float
    #: All reports of one ``report_s``; a look that asks; all until the moves are known, as time and as CPU time.
    reports_s: float
    look_s: float
    decision_s: float
    decision_cpu_s: float
    report_bytes: int
    rss_mib: float


def measure(world: World, settings: CoordinatorSettings) -> Result:
    """Have a controller make one decision. Raises AssertionError: it made none."""
    controller = Controller(settings, LeastLoadedPlacement(), 0.0)
    reports_s, report_bytes = 0.0, 0
    for number in range(world.brokers):
        report = world.broker(number).report()
        report_bytes = max(report_bytes, len(msgpack.packb(asdict(report))))
        reports_s += _timed(partial(controller.handle, Reported(report), 1.0))[0]
    look_s, actions = _timed(partial(controller.handle, Tick(), 1.0))
    asks = [action for action in actions if isinstance(action, AskCandidates)]
    answers = [world.broker(int(ask.broker[1:])).answer(ask) for ask in asks]
    decision_s, made, cpu_s = 0.0, list[ControllerAction](), time.process_time()
    for ask, answer in zip(asks, answers, strict=True):
        spent_s, made = _timed(partial(controller.handle, Answered(ask.request, answer), 1.0))
        decision_s += spent_s
    cpu_s = time.process_time() - cpu_s
    [decision] = [action.decision for action in made if isinstance(action, DecisionRecorded)]
    assert any(isinstance(action, MoveUsers) for action in made), f"nobody is moved: {decision.plan.outcome}"
    candidates = sum(len(answer.users) for answer in answers)
    costs = (reports_s, look_s, look_s + decision_s, cpu_s, report_bytes)
    return _result(world, decision, candidates, costs)


def _result(world: World, decision: Decision, candidates: int, costs: tuple[float, float, float, float, int]) -> Result:
    plan = decision.plan
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kind, moves = decision.kind.value, len(plan.moves)
    return Result(world.users, world.brokers, kind, candidates, moves, plan.before.cov, plan.after.cov, *costs, rss_mib)


def _timed(call: partial[list[ControllerAction]]) -> tuple[float, list[ControllerAction]]:
    start = time.perf_counter()
    actions = call()
    return time.perf_counter() - start, actions


SETTINGS = CoordinatorSettings(looks=1, ratio_mean_min=0.1, moves_per_plan_max=5000, moves_in_max=5000)

CASES = {
    "relief": (3.0, SETTINGS),
    # A shuffle is due, and whatever it brings is worth it: what counts is its price.
    "shuffle": (
        12.0,
        CoordinatorSettings(looks=1, ratio_mean_min=0.1, shuffle_cov_min=0.3, move_cost_ratio=0.0, gain_ratio_min=0.0),
    ),
}
"""How unevenly users are spread, and the settings."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--brokers", type=int, default=200)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    missed = False
    for case in arguments.cases:
        skew, settings = CASES[case]
        result = measure(World(arguments.users, arguments.brokers, skew), settings)
        lines = [
            f"{case}: {result.users} users at {result.brokers} brokers, {result.candidates} candidates,"
            f" decided to {result.kind}: {result.moves} moves, cov {result.cov_before:.3f} to {result.cov_after:.3f}",
            f"  one report of each broker     {result.reports_s:8.4f} s (the largest has {result.report_bytes} bytes)",
            f"  the look that asks            {result.look_s:8.4f} s",
            f"  the decision as a whole       {result.decision_s:8.4f} s ({result.decision_cpu_s:.4f} s of CPU)",
            f"  peak memory of this process   {result.rss_mib:8.1f} MiB (with the largest broker's users)",
            json.dumps({"benchmark": "coordinator", **asdict(result)}),
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        missed |= result.decision_s > DECISION_S_MAX or result.rss_mib > RSS_MIB_MAX
        missed |= result.report_bytes > REPORT_BYTES_MAX
    if missed:
        sys.stderr.write(
            f"missed: {DECISION_S_MAX:g} s, {RSS_MIB_MAX:g} MiB and {REPORT_BYTES_MAX} bytes are the targets\n"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
