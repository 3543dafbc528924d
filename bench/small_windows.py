"""How soon a data cluster executes the queries of the emergency example, from its start on.

Run with ``python -m bench.small_windows``; ``--help`` has the rest. A real ``dynamoth data-cluster`` has two log
servers with the queries, interests and records of ``examples/emergency``: places of all users each second, and five
reports. There are no brokers and no users: this is about executions alone. It is killed after half of the time, and
started again. Java is slow when it has just started, so executions are shown by their order in their process: how long
they took, and how long after their tick they ended. With ``--archive-hours``, the archive has the records of so many
hours before; the memory of the data cluster is shown, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.data_servers import DataCluster, DataServers
from dynamoth.data.datasets import read_dataset
from dynamoth.data.queries import read_query
from dynamoth_analytics.cluster.storage.archive import Archiver

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from emergency.reports import TYPES
from emergency.scenario import plan_users
from emergency.town import Town, build_town

DEFINITIONS = Path(__file__).parents[1] / "examples" / "emergency" / "emergency.toml"

REPORTS_PER_S = 5
TEXT = "x" * 300
ARCHIVE_S = 30
HOT_RECORDS = 1000
ORDERS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""The executions of each query that are shown."""


class Example:
    """Log servers with what the example has there."""

    def __init__(self, stack: ExitStack, users: int, seed: int) -> None:
        self.servers = DataServers(stack)
        self._random = random.Random(seed)
        self._town: Town = build_town(random.Random(f"{seed} town"))
        definitions = tomllib.loads(DEFINITIONS.read_text())
        self._datasets = {name: read_dataset(name, each) for name, each in definitions["datasets"].items()}
        self._queries = [read_query(name, each) for name, each in definitions["queries"].items()]
        self.servers.define(*self._datasets.values())
        plans = plan_users(self._town, users, 120, seed)
        self._subscriptions = [each for plan in plans for each in plan.subscriptions]
        self._places = {plan.name: self._random.choice(self._town.squares) for plan in plans}
        self._reports = 0

    def register(self) -> tuple[int, int]:
        """Register the queries, and what users subscribe to; return how many queries and interests there are."""
        self.servers.define(*self._queries)
        interests = sum(
            self.servers.register(query.name, [each.params for each in self._subscriptions if each.query == query.name])
            for query in self._queries
        )
        return len(self._queries), interests

    def fill_archive(self, folder: Path, hours: float) -> None:
        """Archive the records of some hours as they would have been, in a file of each partition each 30 s."""
        archiver = Archiver(self.servers.servers, folder / "data" / "archive", HOT_RECORDS)
        catalog = self.servers.servers.catalog()
        for _ in range(round(hours * 3600 / ARCHIVE_S)):
            self.store(ARCHIVE_S)
            archiver.archive(catalog)

    def store(self, seconds: int) -> None:
        """Store the records of some seconds."""
        now, choose = time.time(), self._random.choice
        places = [{"user": user, "lat": at.lat, "lon": at.lon, "at": now} for user, at in self._places.items()]
        self.servers.store(self._datasets["user_locations"], places * seconds)
        squares = [choose(self._town.squares) for _ in range(REPORTS_PER_S * seconds)]
        reports = [
            {"id": f"r{self._reports + number}", "type": choose(TYPES), "severity": 3, "lat": at.lat, "lon": at.lon}
            | {"at": now, "reporter": "somebody", "text": TEXT}
            for number, at in enumerate(squares)
        ]
        self.servers.store(self._datasets["reports"], reports)
        self._reports += len(squares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--users", type=int, default=400, metavar="N")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S")
    parser.add_argument("--archive-hours", type=float, default=0.0, metavar="H")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        example = Example(stack, arguments.users, arguments.seed)
        if arguments.archive_hours:
            example.fill_archive(folder, arguments.archive_hours)
            sys.stdout.write(f"the archive has {arguments.archive_hours:g} hours\n")
        queries, interests = example.register()
        sys.stdout.write(f"{queries} queries, {interests} interests\n")
        sys.stdout.flush()
        for title in ("first start", "started again after a kill"):
            _run(title, example, folder, arguments.seconds / 2)
    return 0


def _run(title: str, example: Example, folder: Path, seconds: float) -> None:
    """Run a data cluster for a while, kill it, and print what it has executed."""
    with ExitStack() as stack:
        began = time.time()
        cluster = DataCluster(stack, example.servers, folder)
        before = len(cluster.executions())
        end = due = time.monotonic()
        end += seconds
        memory: dict[str, float] = {}
        while due < end:
            example.store(1)
            due += 1.0
            cluster.wait(max(0.0, due - time.monotonic()))
            memory = {name: max(memory.get(name, 0.0), mib) for name, mib in cluster.resident_mib().items()}
        costs = (
            f"{name}: {memory[name]:.0f} MiB at most, {used:.0f} s of CPU" for name, used in cluster.cpu_s().items()
        )
        sys.stdout.write("; ".join(costs) + "\n")
        _show(title, cluster.executions()[before:], began)


def _show(title: str, executions: Sequence[Mapping[str, Any]], began: float) -> None:
    by_order: dict[int, list[Mapping[str, Any]]] = {}
    seen: dict[str, int] = {}
    for each in executions:
        seen[each["query"]] = order = seen.get(each["query"], 0) + 1
        by_order.setdefault(order, []).append(each)
    first_s = min((each["ended_ms"] / 1000 - began for each in executions), default=float("nan"))
    sys.stdout.write(f"{title}: {len(executions)} executions, the first one ended after {first_s:.1f} s\n")
    for order in ORDERS:
        if own := by_order.get(order):
            took = [each["seconds"] for each in own]
            late = [(each["ended_ms"] - each["end"]["tick_ms"]) / 1000 for each in own]
            ended = [each["ended_ms"] / 1000 - began for each in own]
            sys.stdout.write(
                f"  execution {order:3} of {len(own)} queries: median {statistics.median(took):6.2f} s, at most"
                f" {max(took):6.2f} s; ended {min(ended):5.1f} to {max(ended):5.1f} s after the start, and at most"
                f" {max(late):5.1f} s after its tick\n"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
