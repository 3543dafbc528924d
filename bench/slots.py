"""Very many idle channels while servers come and go: is anything lost, doubled, reordered, and how long does it take?

Run with ``python -m bench.slots``; ``--help`` tells the rest. Three servers with agents and a balancer. Subscribers of
all channels wait, publishers make a trickle of load. A fourth server is added and takes its share of the slots; then
the first one is drained, taken out of the list and stopped for good. In the end new clients subscribe to every channel
and publish there (``bench.slots_clients``). Nothing fails, so nothing may be lost and no subscriber may see a gap.
Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.processors import resident_mib
from bench.slots_clients import Seen, Share, live
from bench.workers import Worker
from dynamoth.plan.plan import Phase, Plan
from dynamoth.plan.slots import SLOTS, slot_name
from dynamoth.protocol.stored_plan import READ_WHOLE, parse_whole
from dynamoth_cli.local.child import interrupted_by_signals
from dynamoth_cli.local.cluster import LocalCluster

SERVERS = 3
LEAVING = "s1"
SHARE_RATIO_MIN = 0.9
"""A server that was added has its share of the slots when it has this part of it."""
POLL_INTERVAL_S = 0.5
TIMEOUT_S = 900.0
"""A part of a run that takes longer hangs."""


@dataclass(frozen=True)
class Load:
    """The parameters of a run."""

    channels: int
    messages_per_s: float
    processes: int
    rest_s: float
    is_patient: bool = False


@dataclass
class Result:
    """What came out."""

    channels: int
    messages_per_s: float
    old: Seen = field(default_factory=Seen)
    new: Seen = field(default_factory=Seen)
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    slots: dict[str, int] = field(default_factory=dict[str, int])
    #: Of the trickle, by part of the run: p50, p99 and the largest.
    delays_ms: dict[str, tuple[float, float, float]] = field(default_factory=dict[str, tuple[float, float, float]])
    #: The largest process of each kind at the end of each part.
    resident_mib: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    @property
    def broken(self) -> int:
        """How many messages were lost, doubled or reordered, and how many gaps were reported."""
        both = self.old + self.new
        return both.lost + both.duplicated + both.reordered + both.gaps


class Run:
    """One run on a cluster that is up."""

    def __init__(self, load: Load, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._load = load
        self.result = Result(load.channels, load.messages_per_s)
        self._workers: list[Worker] = []

    def go(self) -> Result:
        """Do everything."""
        load, cluster = self._load, self._cluster
        each = load.channels // load.processes
        try:
            self._timed("subscribe", lambda: self._subscribe(each))
            self._timed("rest", lambda: time.sleep(load.rest_s))
            self._timed("add", self._add)
            self._timed("drain", self._drain)
            cluster.remove_server(LEAVING)
            cluster.wait_ready()
            self._timed("rest without it", lambda: time.sleep(load.rest_s))
            self._timed("new clients", self._finish)
        finally:
            for worker in self._workers:
                worker.stop()
        self.result.slots = dict(self._slots())
        return self.result

    def _timed(self, part: str, work: Callable[[], Any]) -> None:
        sys.stderr.write(f"{part} ...\n")
        began = time.monotonic()
        work()
        self.result.seconds[part] = time.monotonic() - began
        resident = {
            "agent": max(resident_mib(child.pid) for child in self._cluster.agents.values()),
            "balancer": resident_mib(self._cluster.balancer.pid),
        }
        if part not in ("subscribe", "new clients"):
            answers = [self._ask(worker, "phase") for worker in self._workers]
            delays = sorted(delay for their_delays, _ in answers for delay in their_delays)
            resident["clients"] = max(mib for _, mib in answers)
            if delays:
                at = [delays[int(len(delays) * share)] for share in (0.5, 0.99)]
                self.result.delays_ms[part] = at[0], at[1], delays[-1]
        self.result.resident_mib[part] = resident

    def _ask(self, worker: Worker, question: str) -> Any:
        worker.send(question)
        return worker.receive(TIMEOUT_S)

    def _subscribe(self, each: int) -> None:
        load = self._load
        rate = load.messages_per_s / load.processes
        shares = [Share(self._cluster.url, n, each, rate, load.is_patient) for n in range(load.processes)]
        self._workers += [Worker(live, share) for share in shares]
        confirmed = [worker.receive(TIMEOUT_S) for worker in self._workers]
        assert confirmed == [each] * load.processes, f"{confirmed} subscriptions are confirmed"

    def _add(self) -> None:
        new = self._cluster.add_server()
        self._cluster.wait_ready()
        least = SHARE_RATIO_MIN * SLOTS / (SERVERS + 1)
        self._until(lambda: self._slots()[new] >= least and self._is_settled(), f"{new} has its share of the slots")

    def _drain(self) -> None:
        self._cluster.ask_balancer("server", {"action": "drain", "server": LEAVING})

        def is_empty() -> bool:
            server = self._cluster.ask_balancer("status")["servers"][LEAVING]
            return (server["channels_left"], server["slots_left"]) == (0, 0) and self._is_settled()

        self._until(is_empty, f"{LEAVING} is empty")

    def _finish(self) -> None:
        for worker in self._workers:
            worker.send("finish")
        for worker in self._workers:
            old, new = worker.receive(TIMEOUT_S)
            self.result.old += old
            self.result.new += new

    def _plan(self) -> Plan:
        plan = parse_whole(self._cluster.ask("s2", READ_WHOLE)[0], None)
        assert plan is not None, "s2 stores the plan"
        return plan

    def _slots(self) -> Counter[str]:
        """Return how many slots each server has, or will have."""
        plan = self._plan()
        return Counter(plan.entry(slot_name(slot)).route.assignment.servers[0] for slot in range(SLOTS))

    def _is_settled(self) -> bool:
        return all(entry.phase is Phase.SETTLED for entry in self._plan().entries.values())

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {TIMEOUT_S:g} s: {what}")
            time.sleep(POLL_INTERVAL_S)


def grow_and_shrink(load: Load, settings: dict[str, Any] | None = None) -> Result:
    """Run the load on a cluster of three servers."""
    with LocalCluster(SERVERS, settings=settings or {}) as cluster:
        return Run(load, cluster).go()


def show(result: Result) -> None:
    """Print a result for people."""
    lines = [f"{result.channels:,} channels, {result.messages_per_s:g} messages/s; slots in the end: {result.slots}"]
    for part, seconds in result.seconds.items():
        delays = (
            "p50 {:.1f}, p99 {:.1f}, max {:.1f} ms".format(*result.delays_ms[part]) if part in result.delays_ms else ""
        )
        memory = ", ".join(f"{kind} {mib:.0f}" for kind, mib in result.resident_mib[part].items())
        lines.append(f"{part:>16}: {seconds:6.1f} s   MiB: {memory}   {delays}")
    lines += [f"{kind:>16}: {asdict(seen)}" for kind, seen in (("old subscribers", result.old), ("new", result.new))]
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.slots", description=__doc__)
    parser.add_argument("--channels", type=int, default=200_000)
    parser.add_argument("--messages-per-s", type=float, default=500.0, help="of all publishers (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of clients (default %(default)s)")
    parser.add_argument("--rest-s", type=float, default=20.0, help="length of the quiet parts (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args()
    load = Load(arguments.channels, arguments.messages_per_s, arguments.processes, arguments.rest_s)
    with interrupted_by_signals():
        result = grow_and_shrink(load)
    if arguments.json:
        sys.stdout.write(json.dumps({**asdict(result), "broken": result.broken}) + "\n")
    else:
        show(result)
    return int(result.broken > 0)


if __name__ == "__main__":
    sys.exit(main())
