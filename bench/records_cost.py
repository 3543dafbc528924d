"""Measures what recording costs the balancer: the CPU time of its machine with messages to recorders, and without.

Run with ``python -m bench.records_cost``. It needs no server: the machine gets reports of a cluster whose load moves
around, so that it decides and installs plans all the time. Both ways take turns, and the fastest round of each counts.
Prints a line per figure, then one line of JSON; ends with 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from unittest.mock import patch

import dynamoth_balancer.machine
from dynamoth.machine.events import Send
from dynamoth.plan.plan import Plan
from dynamoth.protocol.reports import ChannelColumns, Report, pack_report
from dynamoth_analytics.replay.instant_cluster import InstantCluster, configured
from dynamoth_balancer.admin.records import Records
from dynamoth_balancer.decide.history import MadeDecision
from dynamoth_balancer.events import BalancerAction, BalancerEvent, Decided, PlanChanged
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions

RATIO_MAX = 1.05
"""Target. A smaller difference is within the noise of a machine that runs other processes, too."""

CAPACITY_BYTES_PER_S = 1_000_000
MEAN_RATIO = 0.4
HOT_FACTOR, COLD_FACTOR = 2.5, 0.5
HOT_SHARE = 4
"""The channels of every fourth server are hot, so its load ratio is 1 at first."""

HOT_S = 20.0
"""After this time, other channels are hot."""

SETTLE_S = 0.3


class NoRecords(Records):
    """Records nothing."""

    def begin_term(self, now: float) -> None: ...
    def end_term(self) -> None: ...
    def on_plan(self, change: PlanChanged, now: float) -> None: ...
    def on_pause(self, paused: bool, now: float) -> None: ...
    def on_decision(self, decided: Decided, now: float) -> None: ...
    def on_settled(self, channels: Iterable[bytes], now: float) -> None: ...
    def on_outcome(self, made: MadeDecision) -> None: ...
    def tick(self, now: float) -> None: ...
    def publish(self, servers: Iterable[str]) -> list[Send]:
        return []


@dataclass(frozen=True)
class Result:
    servers: int
    channels: int
    plans: int
    ms_per_s_without: float
    ms_per_s_with: float
    ratio: float


class TimedMachine(BalancerMachine):
    """A balancer machine that measures the CPU time of its own events."""

    used_s = 0.0

    def handle(self, event: BalancerEvent, now: float) -> list[BalancerAction]:
        began = time.process_time()
        try:
            return super().handle(event, now)
        finally:
            self.used_s += time.process_time() - began


class World:
    """A cluster whose agents report the channels that the plan puts at their servers."""

    def __init__(self, servers: int, channels: int) -> None:
        self._chance = random.Random(1)
        self._servers = [f"s{number}" for number in range(servers)]
        self._names = [b"game:room:%d" % number for number in range(channels)]
        self._mean_bytes = MEAN_RATIO * CAPACITY_BYTES_PER_S * servers / channels
        self._options = BalancerOptions()
        self.machine = TimedMachine(configured(self._servers), 1, self._options)
        self._begin = -self._options.wait_s - self._options.averaging_s
        self._cluster = InstantCluster(self.machine, self._servers, None, self._begin, SETTLE_S)
        homes = {name: self._plan.ring.home(name) for name in self._names}
        #: Channels with the same number are hot at the same time. At first, all channels of a server have the same.
        self._groups = {name: self._servers.index(home) % HOT_SHARE for name, home in homes.items()}

    @property
    def plans(self) -> int:
        """The version of the plan."""
        return self._plan.version

    @property
    def _plan(self) -> Plan:
        assert self.machine.plan is not None, "a balancer that leads has a plan"
        return self.machine.plan

    def run(self, seconds: int) -> None:
        """Let this time pass, with a report of each server per second."""
        for second in range(int(self._begin) + 1, seconds):
            for report in [*self._reports(second)]:
                self._cluster.report(report.server, report.incarnation, pack_report(report))
            self._cluster.run_until(second + 1.0)
            if second == 0:
                self.machine.used_s = 0.0

    def _reports(self, second: int) -> Iterator[Report]:
        plan = self._plan
        here: dict[str, list[bytes]] = {server: [] for server in self._servers}
        for name in self._names:
            here[plan.entry(name).client_route.assignment.servers[0]].append(name)
        for server, names in here.items():
            yield self._report(server, names, second)

    def _report(self, server: str, names: list[bytes], second: int) -> Report:
        hot = int(second / HOT_S) % HOT_SHARE
        factors = [HOT_FACTOR if self._groups[name] == hot else COLD_FACTOR for name in names]
        sizes = [round(self._mean_bytes * factor * self._chance.uniform(0.9, 1.1)) for factor in factors]
        ones, none = (1,) * len(names), (b"",) * len(names)
        columns = ChannelColumns(tuple(names), ones, ones, ones, ones, ones, tuple(sizes), none, none)
        return Report(
            server=server,
            incarnation=1,
            sequence=second - int(self._begin),
            interval_s=1.0,
            plan_version=self._plan.version,
            outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S,
            outgoing_bytes_per_s=float(sum(sizes)),
            columns=columns,
        )


def measure(servers: int, channels: int, seconds: int, rounds: int) -> Result:
    """Run both ways in turns."""
    used: dict[type[Records], list[float]] = {NoRecords: [], Records: []}
    plans = 0
    for _ in range(rounds):
        for kind, times in used.items():
            with patch.object(dynamoth_balancer.machine, "Records", kind):
                world = World(servers, channels)
                gc.collect()
                world.run(seconds)
            plans = world.plans
            times.append(world.machine.used_s * 1000 / seconds)
    without, with_ = (min(times) for times in used.values())
    return Result(servers, channels, plans, without, with_, with_ / without)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.records_cost", description=__doc__)
    parser.add_argument("--servers", type=int, default=20)
    parser.add_argument("--channels", type=int, default=2000)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    result = measure(arguments.servers, arguments.channels, arguments.seconds, arguments.rounds)
    sys.stdout.write(
        f"{result.servers} servers, {result.channels} channels, {result.plans} versions of the plan in"
        f" {arguments.seconds} s: {result.ms_per_s_without:.2f} ms of CPU per second without records,"
        f" {result.ms_per_s_with:.2f} ms with ({result.ratio:.3f}x)\n"
    )
    missed = result.ratio > RATIO_MAX
    if missed:
        sys.stdout.write(f"MISSED: more than {RATIO_MAX}x\n")
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
