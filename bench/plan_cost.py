"""What a new plan costs: the time from the model of a large cluster to the bytes that the servers are sent.

Run with ``python -m bench.plan_cost``. No server is needed: everything but the network is measured, on one core. Prints
a line per figure, then one line of JSON; ends with 1 when the target is missed.

The cluster has one overloaded server in four, every channel is named in the plan already (so entries are looked up, and
copied), and the model is filled with reports as agents send them. A plan, that is: averages of all servers, proposals
for the overloaded ones, the plan's next version, the change as servers store it and as agents get it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from types import MappingProxyType

from dynamoth.plan.plan import Entry, Phase, Plan, Route, Server, single
from dynamoth.protocol.reports import ChannelColumns, Report
from dynamoth_balancer.decide.cluster import Cluster, decide
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.relieve import Relieve
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.options import BalancerOptions

PLAN_S_MAX = 0.5
"""For 100,000 channels on 100 servers."""

REPORTS_PER_SERVER = 10
CAPACITY_BYTES_PER_S = 125_000_000
OVERLOADED_RATIO, OTHER_RATIO = 0.95, 0.35
OVERLOADED_SHARE = 4
"""Every fourth server."""
VERSION = 7


@dataclass(frozen=True)
class Result:
    channels: int
    servers: int
    moves: int
    delta_bytes: int
    estimate_s: float
    propose_s: float
    install_s: float
    plan_s: float
    report_s: float


class Bench:
    """A cluster whose model is full."""

    def __init__(self, channels: int, servers: int) -> None:
        names = [f"s{number}" for number in range(servers)]
        self.options = BalancerOptions()
        self.channels = channels
        places = {b"game/tile/%07d" % number: names[number % servers] for number in range(channels)}
        entries = {channel: Entry(Route(VERSION, single(server)), Phase.SETTLED) for channel, server in places.items()}
        by_id = {name: Server(name, f"redis://{name}:6379") for name in names}
        self.plan = Plan(VERSION, by_id, tuple(names), MappingProxyType(entries))
        self.model = ClusterModel(names, self.options.averaging_s)
        by_server: dict[str, list[bytes]] = {name: [] for name in names}
        for channel, server in places.items():
            by_server[server].append(channel)
        reports = [_report(name, index, by_server[name]) for index, name in enumerate(names)]
        start = time.perf_counter()
        for second in range(REPORTS_PER_SERVER):
            for report in reports:
                self.model.report(report, float(second))
        self.report_s = (time.perf_counter() - start) / (REPORTS_PER_SERVER * servers)
        self.book = PlanBook(self.plan, {})

    def measure(self) -> Result:
        """Make one plan."""
        now = float(REPORTS_PER_SERVER - 1)
        plan = self.plan
        begun = time.perf_counter()
        loads = {name: load for name in plan.servers if (load := self.model.load(name, now)) is not None}
        estimated = time.perf_counter()

        def movable(channel: bytes, server: str) -> bool:
            entry = plan.entry(channel)
            return entry.phase is Phase.SETTLED and entry.route.assignment.servers[0] == server

        decision = decide((Relieve(),), Cluster(loads, self.model.channels, movable, self.options))
        proposed = time.perf_counter()
        assignments = {move.channel: single(move.target) for move in decision.moves}
        book = self.book
        book.plan = plan
        book.advance(plan.begin(assignments), assignments)
        change = book.change_from(plan.version)
        ended = time.perf_counter()
        assert change is not None and decision.moves
        return Result(
            self.channels,
            len(plan.servers),
            len(decision.moves),
            len(change.message),
            estimated - begun,
            proposed - estimated,
            ended - proposed,
            ended - begun,
            self.report_s,
        )


def _report(server: str, index: int, channels: list[bytes]) -> Report:
    """Return what the agent of a server measures: few channels are busy, many are not (Zipf)."""
    ratio = OVERLOADED_RATIO if index % OVERLOADED_SHARE == 0 else OTHER_RATIO
    shares = [1 / (rank + 5) for rank in range(len(channels))]
    bytes_per_s = ratio * CAPACITY_BYTES_PER_S / sum(shares)
    random.Random(index).shuffle(channels)
    zeros, nobody = (0,) * len(channels), (b"",) * len(channels)
    out = tuple(round(bytes_per_s * share) for share in shares)
    columns = ChannelColumns(tuple(channels), zeros, zeros, zeros, zeros, zeros, out, nobody, nobody)
    return Report(
        server=server,
        incarnation=1,
        sequence=1,
        interval_s=1.0,
        plan_version=VERSION,
        outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S,
        outgoing_bytes_per_s=float(sum(out)),
        columns=columns,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=100_000)
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench(arguments.channels, arguments.servers)
    gc.collect()
    results = [bench.measure() for _ in range(arguments.repeat)]
    middle = sorted(results, key=lambda result: result.plan_s)[len(results) // 2]
    lines = [
        f"{middle.channels} channels on {middle.servers} servers, {middle.moves} moved,"
        f" change of {middle.delta_bytes} bytes",
        f"  load ratios of all servers   {middle.estimate_s:8.4f} s",
        f"  proposals                    {middle.propose_s:8.4f} s",
        f"  next version and its change  {middle.install_s:8.4f} s",
        f"  a new plan                   {middle.plan_s:8.4f} s"
        f" (median of {len(results)}, worst {max(result.plan_s for result in results):.4f} s)",
        f"  taking one report            {bench.report_s:8.6f} s",
        json.dumps({"benchmark": "plan_cost", **asdict(middle)}),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    scale = max(1.0, arguments.channels / 100_000)
    if middle.plan_s > PLAN_S_MAX * scale:
        sys.stderr.write(f"missed: a new plan takes more than {PLAN_S_MAX * scale:g} s\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
