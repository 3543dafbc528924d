"""The servers of the demo: a cluster, log servers, brokers with a coordinator, and the data cluster."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from dynamoth.data.progress import progress_key, query_server
from dynamoth.data.records import PartitionState, parse_state, partition_name, partition_server, state_command
from dynamoth.errors import DynamothError
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, keep_port

SERVERS = 3
LOGS = 2
HOST = "127.0.0.1"

READY_TIMEOUT_S = 300.0
"""Spark needs some seconds to start, and longer on a machine that is busy with everything else."""

COMMAND_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
STARTED = "has started"

SETTINGS = {
    "broker.data_cluster": True,
    "broker.capacity_bytes_per_s": 1_000_000,
    "broker.report_s": 1.0,
    "coordinator.report_s": 1.0,
    "coordinator.decide_s": 2.0,
    "coordinator.wait_s": 5.0,
    "coordinator.rest_s": 10.0,
    "coordinator.slow_half_life_s": 10.0,
    "coordinator.fast_half_life_s": 5.0,
    "data_cluster.archive_s": 10.0,
}
"""Short times, as a demo is short."""


class DemoFailed(DynamothError):
    """Raised when a process of the demo does not do what it has to in time."""

    code = "demo-failed"


class TooSlow(DemoFailed):
    """Raised when something takes too long: what else the machine does may be the cause."""


class Servers:
    """All servers. They end with ``stack``.

    Args:
        stack: of the demo.
        folder: of the demo's files.
        keys: the JSON Web Key Set of the brokers.
        brokers: how many.
        origin: of the page.

    """

    def __init__(self, stack: ExitStack, folder: Path, keys: Path, brokers: int, origin: str) -> None:
        self.folder = folder / "data-cluster"
        self._log_folder = folder / "logs"
        self._log_folder.mkdir()
        self._stack = stack
        self._keys = keys
        self._origin = origin
        redis_servers = [stack.enter_context(EmbeddedRedis()) for _ in range(LOGS)]
        self.logs = {f"l{number}": f"redis://{HOST}:{each.port}" for number, each in enumerate(redis_servers, 1)}
        self._connections: dict[str, Any] = {id_: redis.Redis.from_url(url) for id_, url in self.logs.items()}
        logs = " ".join(f"{id_}={url}" for id_, url in self.logs.items())
        settings = {**SETTINGS, "broker.logs": logs, "data_cluster.logs": logs, "data_cluster.folder": str(self.folder)}
        self.cluster = stack.enter_context(LocalCluster(SERVERS, settings=settings, on_line=self._note_line))
        self._ports = {f"b{number + 1}": (keep_port(stack), keep_port(stack)) for number in range(brokers)}
        self.brokers = {id_: self._broker(id_) for id_ in self._ports}
        self.coordinator = self._beside("coordinator", "coordinator")
        self.data_cluster = self._beside("data-cluster", "data-cluster")

    def _note_line(self, name: str, line: str) -> None:
        """Keep a line of a daemon's log: after the demo, with ``--keep``."""
        with (self._log_folder / f"{name.replace(' ', '-')}.log").open("a", encoding="utf-8") as file:
            file.write(line.rstrip("\n") + "\n")

    # Brokers.

    @property
    def broker_urls(self) -> list[str]:
        """Where users connect."""
        return [f"ws://{HOST}:{port}/connect" for port, _ in self._ports.values()]

    @property
    def post_urls(self) -> list[str]:
        """Where reports are posted."""
        return [f"http://{HOST}:{port}" for _, port in self._ports.values()]

    def _beside(self, name: str, *arguments: str) -> Child:
        child = self.cluster.beside(name, *arguments)
        self._stack.callback(child.stop)
        return child

    def _broker(self, id_: str) -> Child:
        port, sse_port = self._ports[id_]
        others = [f"ws://{HOST}:{port}/connect" for other, (port, _) in self._ports.items() if other != id_]
        return self._beside(
            f"broker {id_}",
            *("broker", "--id", id_, "--port", str(port), "--sse-port", str(sse_port)),
            *("--alternates", " ".join(others), "--token-keys-file", str(self._keys), "--origins", self._origin),
        )

    def start(self, definitions: Sequence[Path], shelters: Path) -> None:
        """Register datasets and queries, load the shelters, and start everything."""
        for file in definitions:
            self._command("query", "set", str(file))
        self._command("dataset", "load", "shelters", str(shelters))
        self.data_cluster.start()
        for child in (*self.brokers.values(), self.coordinator):
            child.start()
        for child in (*self.brokers.values(), self.data_cluster):
            wait_started(child)

    def restart_data_cluster(self) -> None:
        """Kill the data cluster, and start it again."""
        self.data_cluster.kill()
        self.data_cluster.start()

    def drain(self, broker: str) -> None:
        """Have a broker move its users and end, and start it again."""
        self.brokers[broker].stop(END_TIMEOUT_S)
        self.brokers[broker].start()
        wait_started(self.brokers[broker])

    def _command(self, *words: str) -> None:
        command = dynamoth_command(*words, "--config", str(self.cluster.config_file))
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise TooSlow(f"`dynamoth {' '.join(words)}` has not ended in {COMMAND_TIMEOUT_S:g} s") from None
        if done.returncode:
            raise DemoFailed(f"`dynamoth {' '.join(words)}` has failed: {done.stderr.strip() or done.stdout.strip()}")

    def check(self) -> None:
        """Raise ChildEnded if a process has ended that nobody asked to."""
        self.cluster.check()
        for child in (*self.brokers.values(), self.coordinator, self.data_cluster):
            if child.ended_by_itself:
                raise child.failure()

    # What the data cluster does.

    def is_executing(self, query: str) -> bool:
        """Tell whether an execution of a query has begun and not ended."""
        return not self._progress(query).get("done", True)

    def _progress(self, query: str) -> dict[str, Any]:
        """Return what is stored about the last execution of a query; empty before the first one."""
        server = query_server(query, [*self.logs])
        stored = self._connections[server].get(progress_key(query))
        progress: dict[str, Any] = {} if stored is None else json.loads(stored)
        return progress

    def tips(self, partitions: Mapping[str, int]) -> dict[str, int]:
        """Return the last offset of each partition of datasets, which have so many."""
        found: dict[str, int] = {}
        for dataset, count in partitions.items():
            for number in range(count):
                name = partition_name(dataset, number)
                found[name] = self._partition(name).offset
        return found

    def last_execution(self, query: str) -> int:
        """Return the number of the last execution of a query that is done; 0 before the first one."""
        progress = self._progress(query)
        return progress["execution"] - (not progress["done"]) if progress else 0

    def waiting(self, query: str, tips: Mapping[str, int]) -> int:
        """Return how many records up to these offsets no execution of a query has covered yet."""
        progress = self._progress(query)
        done = progress["end" if progress["done"] else "start"]["offsets"] if progress else {}
        return sum(self._partition(name).count(done.get(name, 0), tip) for name, tip in tips.items())

    def _partition(self, name: str) -> PartitionState:
        connection = self._connections[partition_server(name, [*self.logs])]
        return parse_state(connection.execute_command(*state_command(name)))


def wait_started(child: Child, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait until a daemon says that it has started. Raises ChildEnded, DemoFailed."""
    try:
        child.wait_for_line(STARTED, timeout_s)
    except TimeoutError as error:
        raise TooSlow(str(error)) from error


def application_environment(examples: Path) -> dict[str, str]:
    """Return the variables of the application's processes, which find it in ``examples``."""
    paths = [str(examples), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
