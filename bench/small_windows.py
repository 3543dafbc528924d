"""How soon a data cluster executes the queries of the emergency example, from its start on.

Run with ``python -m bench.small_windows``; ``--help`` tells the rest. A real ``dynamoth data-cluster`` has two log
servers with the queries, interests and records of ``examples/emergency``: places of all users each second, and five
reports. There are no brokers and no users: this is about executions alone. It is killed after half of the time, and
started again. Java is slow when it has just started, so executions are shown by their order in their process: how long
they took, and how long after their tick they ended. With ``--archive-hours``, the archive has the records of so many
hours before; the memory of the data cluster is shown, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, entry_of, put_command
from dynamoth.data.datasets import Dataset, read_dataset
from dynamoth.data.executions import begin_progress_command, executions_server
from dynamoth.data.queries import read_query
from dynamoth.data.records import append_records_command, partition_name, partition_of
from dynamoth.data.registrations import register_command
from dynamoth.edge.interests import query_interest
from dynamoth.edge.log import log_server
from dynamoth_analytics.cluster.archive import Archiver
from dynamoth_analytics.cluster.servers import LogServers, read_servers
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_cli.local.embedded import EmbeddedRedis

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from emergency.reports import TYPES
from emergency.scenario import plan_users
from emergency.town import Town, build_town

DEFINITIONS = Path(__file__).parents[1] / "examples" / "emergency" / "emergency.toml"

REPORTS_PER_S = 5
TEXT = "x" * 300
ARCHIVE_S = 30
HOT_RECORDS = 1000
RECORDS_AT_ONCE = 500
ORDERS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""The executions of each query that are shown."""


class Cluster:
    """Two log servers with what the example has there."""

    def __init__(self, stack: ExitStack, users: int, seed: int) -> None:
        redis = [stack.enter_context(EmbeddedRedis()) for _ in range(3)]
        self.logs = " ".join(f"l{number}=redis://127.0.0.1:{each.port}" for number, each in enumerate(redis[:2], 1))
        self.server_url = f"redis://127.0.0.1:{redis[2].port}"
        self._servers: LogServers = read_servers(self.logs)
        self._random = random.Random(seed)
        self._town: Town = build_town(random.Random(f"{seed} town"))
        definitions = tomllib.loads(DEFINITIONS.read_text())
        self._datasets = {name: read_dataset(name, each) for name, each in definitions["datasets"].items()}
        for name, dataset in self._datasets.items():
            self._put(DATASETS_KEY, name, entry_of(dataset))
        self.periods_s: dict[str, float] = {}
        for name, each in definitions["queries"].items():
            query = read_query(name, each)
            self.periods_s[name] = query.period_s
            begin = begin_progress_command(name, {"tick_ms": 0, "offsets": {}})
            self._servers.run(executions_server(name, self._servers.ids), begin)
            self._put(QUERIES_KEY, name, entry_of(query))
        plans = plan_users(self._town, users, 120, seed)
        subscriptions = [each for plan in plans for each in plan.subscriptions]
        interests = {
            (own.query, each.id): each for own in subscriptions for each in [query_interest(own.query, own.params)]
        }
        for (name, id_), interest in interests.items():
            command = register_command(name, [(id_, interest.params, 3600.0)])
            self._servers.run(log_server(id_, self._servers.ids), command)
        self.interests = len(interests)
        self._places = {plan.name: self._random.choice(self._town.squares) for plan in plans}
        self._reports = 0

    def fill_archive(self, folder: Path, hours: float) -> None:
        """Archive the records of some hours as they would have been, in a file of each partition each 30 s."""
        archiver, catalog = Archiver(self._servers, folder / "archive", HOT_RECORDS), self._servers.catalog()
        for _ in range(round(hours * 3600 / ARCHIVE_S)):
            self.store(ARCHIVE_S)
            archiver.archive(catalog)

    def store(self, seconds: int) -> None:
        """Store the records of some seconds."""
        now, choose = time.time(), self._random.choice
        self._append(
            "user_locations",
            [{"user": user, "lat": at.lat, "lon": at.lon, "at": now} for user, at in self._places.items()] * seconds,
        )
        places = [choose(self._town.squares) for _ in range(REPORTS_PER_S * seconds)]
        self._append(
            "reports",
            [
                {"id": f"r{self._reports + number}", "type": choose(TYPES), "severity": 3, "lat": at.lat, "lon": at.lon}
                | {"at": now, "reporter": "somebody", "text": TEXT}
                for number, at in enumerate(places)
            ],
        )
        self._reports += len(places)

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        dataset: Dataset = self._datasets[name]
        by_partition: dict[int, list[tuple[bytes, str]]] = {}
        for number, record in enumerate(records):
            value, place, id_ = dataset.normalize(json.dumps(record).encode(), time.time())
            by_partition.setdefault(partition_of(dataset, place, number), []).append((value, id_))
        for partition, own in by_partition.items():
            server = self._servers.server_of(partition_name(dataset.stream, partition))
            for begin in range(0, len(own), RECORDS_AT_ONCE):
                part, run_id = own[begin : begin + RECORDS_AT_ONCE], self._servers.run_id(server)
                self._servers.run(server, append_records_command(dataset, partition, part, run_id))

    def _put(self, key: bytes, name: str, entry: Any) -> None:
        for id_ in self._servers.ids:
            self._servers.run(id_, put_command(key, name, entry))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--users", type=int, default=400, metavar="N")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S")
    parser.add_argument("--archive-hours", type=float, default=0.0, metavar="H")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = Cluster(stack, arguments.users, arguments.seed)
        sys.stdout.write(f"{len(cluster.periods_s)} queries, {cluster.interests} interests\n")
        if arguments.archive_hours:
            cluster.fill_archive(folder / "data", arguments.archive_hours)
            sys.stdout.write(f"the archive has {arguments.archive_hours:g} hours\n")
        for title in ("first start", "started again after a kill"):
            before = len(list(_executions(folder)))
            began = time.time()
            _run(cluster, folder, arguments.seconds / 2)
            _show(title, list(_executions(folder))[before:], began)
    return 0


def _run(cluster: Cluster, folder: Path, seconds: float) -> None:
    """Run a data cluster for a while, and kill it."""
    file = folder / "dynamoth.toml"
    values = {"logs": cluster.logs, "folder": str(folder / "data"), "master": "local[2]"}
    lines = [f'{name} = "{value}"' for name, value in values.items()]
    servers = f'[[cluster.servers]]\nid = "s1"\nurl = "{cluster.server_url}"\n'
    file.write_text("\n".join([servers, "[data_cluster]", "http_port = 0", *lines, ""]))
    command = dynamoth_command("data-cluster", "--config", str(file))
    child = Child("data-cluster", command, environment=environment_without_settings())
    child.start()
    try:
        end = due = time.monotonic()
        end += seconds
        while due < end:
            cluster.store(1)
            due += 1.0
            if child.wait(max(0.0, due - time.monotonic())):
                raise child.failure()
        sys.stdout.write("; ".join(_costs(child.pid)) + "\n")
    finally:
        child.kill()


def _costs(pid: int) -> Iterator[str]:
    """Yield what the data cluster and its Java have used so far."""
    java = subprocess.run(["pgrep", "-P", str(pid), "java"], capture_output=True, text=True, check=True).stdout.split()[
        0
    ]
    for name, each in (("data cluster", str(pid)), ("Java", java)):
        status = Path(f"/proc/{each}/status").read_text()
        [kib] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        ticks = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:13]
        cpu_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        yield f"{name}: {int(kib) / 1024:.0f} MiB at most, {cpu_s:.0f} s of CPU"


def _executions(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the journal of executions, in the order of their writing."""
    lines = [
        line for file in (folder / "data" / "executions").rglob("*.jsonl") for line in file.read_text().splitlines()
    ]
    yield from sorted((json.loads(line) for line in lines), key=lambda each: float(each["ended_ms"]))


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
