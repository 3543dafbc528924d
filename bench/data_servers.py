"""Log servers and a real ``dynamoth data-cluster`` for the benchmarks of executions: there are no brokers.

What brokers and publishers would store is stored by the same commands: definitions, interests and records.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.processors import cpu_s, family_cpu_s, resident_mib
from bench.servers import store_plan
from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, entry_of, put_command
from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import begin_progress_command, query_server
from dynamoth.data.queries import StandingQuery
from dynamoth.data.records import append_records_command, partition_name, partition_of
from dynamoth.data.registrations import REGISTRATIONS_PER_COMMAND_MAX, register_command
from dynamoth.edge.interests import query_interest
from dynamoth.edge.log import log_server
from dynamoth_analytics.cluster.servers import LogServers, read_servers
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_cli.local.embedded import EmbeddedRedis

KEEP_S = 86_400.0
RECORDS_PER_COMMAND = 500
JOURNAL_POLL_S = 0.1


class DataServers:
    """Log servers, and one server of the cluster, which has a plan. They end when ``stack`` is closed."""

    def __init__(self, stack: ExitStack, logs: int = 2) -> None:
        redis = [stack.enter_context(EmbeddedRedis()) for _ in range(logs + 1)]
        self.logs = " ".join(f"l{number}=redis://127.0.0.1:{each.port}" for number, each in enumerate(redis[1:], 1))
        self.cluster_url = f"redis://127.0.0.1:{redis[0].port}"
        self.servers: LogServers = read_servers(self.logs)
        store_plan(redis[0])

    def define(self, *definitions: Dataset | StandingQuery) -> None:
        """Register datasets and queries; a query is about the records that are stored from then on."""
        for each in definitions:
            if isinstance(each, StandingQuery):
                server, now = query_server(each.name, self.servers.ids), self.servers.tips(self._partitions())
                self.servers.run(server, begin_progress_command(each.name, {"tick_ms": 0, "offsets": now}))
            key = QUERIES_KEY if isinstance(each, StandingQuery) else DATASETS_KEY
            for id_ in self.servers.ids:
                self.servers.run(id_, put_command(key, each.name, entry_of(each)))

    def _partitions(self) -> dict[str, int]:
        datasets = self.servers.catalog().datasets.values()
        return {each.stream: each.partitions for each in datasets if each.kind != "static"}

    def register(self, query: str, parameters: Iterable[Mapping[str, Any]]) -> int:
        """Register interests, as brokers do; return how many different ones there are."""
        by_server: dict[str, dict[str, str]] = {id_: {} for id_ in self.servers.ids}
        for each in parameters:
            interest = query_interest(query, each)
            by_server[log_server(interest.id, self.servers.ids)][interest.id] = interest.params
        for id_, own in by_server.items():
            new = [(*each, KEEP_S) for each in own.items()]
            for begin in range(0, len(new), REGISTRATIONS_PER_COMMAND_MAX):
                part = new[begin : begin + REGISTRATIONS_PER_COMMAND_MAX]
                self.servers.run(id_, register_command(query, part))
        return sum(map(len, by_server.values()))

    def store(self, dataset: Dataset, records: Iterable[Mapping[str, Any]]) -> None:
        """Store records, as brokers and the data cluster do."""
        by_partition: dict[int, list[tuple[bytes, str]]] = {}
        for number, record in enumerate(records):
            value, place, id_ = dataset.normalize(json.dumps(record).encode(), time.time())
            partition = partition_of(dataset, place, number)
            waiting = by_partition.setdefault(partition, [])
            waiting.append((value, id_))
            if len(waiting) == RECORDS_PER_COMMAND:
                self._append(dataset, partition, by_partition.pop(partition))
        for partition, waiting in by_partition.items():
            self._append(dataset, partition, waiting)

    def _append(self, dataset: Dataset, partition: int, records: list[tuple[bytes, str]]) -> None:
        server = self.servers.server_of(partition_name(dataset.stream, partition))
        run_id = self.servers.run_id(server)
        self.servers.run(server, append_records_command(dataset, partition, records, run_id))


class DataCluster:
    """A ``dynamoth data-cluster``. It ends when ``stack`` is closed.

    Args:
        stack: ends it.
        servers: of which it is the data cluster.
        folder: in which it keeps its files, and its configuration.

    """

    def __init__(self, stack: ExitStack, servers: DataServers, folder: Path) -> None:
        self._folder = folder / "data"
        self.config_file = file = folder / "dynamoth.toml"
        values = {"logs": servers.logs, "folder": str(self._folder), "master": "local[2]"}
        lines = [f'{name} = "{value}"' for name, value in values.items()]
        server = f'[[cluster.servers]]\nid = "s1"\nurl = "{servers.cluster_url}"\n'
        file.write_text("\n".join([server, "[data_cluster]", "http_port = 0", *lines, ""]))
        command = dynamoth_command("data-cluster", "--config", str(file))
        self._child = Child("data-cluster", command, environment=environment_without_settings(), on_line=_show_errors)
        stack.callback(self._child.kill)
        self._child.start()

    @property
    def processes(self) -> dict[str, int]:
        """The process of the data cluster, and that of its Java once it has started."""
        pid = self._child.pid
        java = subprocess.run(["pgrep", "-P", str(pid), "java"], capture_output=True, text=True).stdout.split()
        return {"data cluster": pid, **({"Java": int(java[0])} if java else {})}

    def cpu_s(self) -> dict[str, float]:
        """Return how much processor time each process has used."""
        return {name: cpu_s(process) for name, process in self.processes.items()}

    def family_cpu_s(self) -> float:
        """Return how much processor time the data cluster and all that it has started have used."""
        return family_cpu_s(self._child.pid)

    def resident_mib(self) -> dict[str, float]:
        """Return how much memory each process has."""
        return {name: resident_mib(process) for name, process in self.processes.items()}

    def wait(self, seconds: float) -> None:
        """Wait for some seconds. Raises ChildEnded where it ends meanwhile."""
        if self._child.wait(seconds):
            raise self._child.failure()

    def pause(self) -> None:
        """Have it begin no execution."""
        os.kill(self._child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._child.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self._child.kill()

    def executions(self, query: str = "*") -> list[dict[str, Any]]:
        """Return what the journal says, in the order in which executions ended."""
        files = (self._folder / "executions").glob(f"*/{query}.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        found: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(found, key=lambda each: float(each["ended_ms"]))

    def next_executions(self, query: str) -> Iterator[dict[str, Any]]:
        """Yield the executions that end from now on. Raises ChildEnded where there cannot be more."""
        seen = len(self.executions(query))
        while True:
            new = self.executions(query)[seen:]
            yield from new
            seen += len(new)
            self.wait(JOURNAL_POLL_S)


def _show_errors(line: str) -> None:
    """Print what a daemon logs as an error: a benchmark that goes on nevertheless measures something else."""
    if any(f'"level": "{level}"' in line for level in ("error", "critical")):
        sys.stderr.write(f"data cluster: {line}\n")
