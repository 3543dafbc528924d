"""A real Redis Cluster for comparison: masters only, each on a machine of its own with limited bandwidth."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.replication_network import PORT, READY_TIMEOUT_S, Network, NotPossible, redis_command
from dynamoth.errors import ClusterUnavailable
from dynamoth.machine.events import ErrorReply
from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import environment_without_settings
from dynamoth_link.errors import LinkError
from dynamoth_link.query import query

SLOTS = 16_384
POLL_INTERVAL_S = 0.1


def find_redis_7() -> Path:
    """Return the first ``redis-server`` on PATH that has sharded pub/sub. Raises NotPossible when there is none."""
    for folder in os.get_exec_path():
        program = Path(folder) / "redis-server"
        if os.access(program, os.X_OK):
            shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
            if (version := re.search(r"v=(\d+)", shown)) and int(version[1]) >= 7:
                return program
    raise NotPossible("needs redis-server 7 or later on PATH, for sharded pub/sub: apt-get install redis-server")


class ShardedCluster:
    """Redis servers in cluster mode, which share the slots evenly. As a context manager it is ready on entry.

    Raises (on entry):
        ClusterUnavailable: it does not become ready.
        NotPossible: no Redis 7 is installed; older ones have no sharded pub/sub.
    """

    def __init__(self, network: Network, servers: int) -> None:
        self._network = network
        self.server_ids = [f"s{index + 1}" for index in range(servers)]
        self._undo = ExitStack()
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    @property
    def url(self) -> str:
        """The URL for redis-py's cluster client."""
        return f"redis://{self._network.addresses[self.server_ids[0]]}:{PORT}"

    def ask(self, id_: str, *words: str) -> Any:
        """Send one command to a server. Raises ClusterUnavailable when it is refused."""
        url = f"redis://{self._network.addresses[id_]}:{PORT}"
        (reply,) = asyncio.run(query(url, tuple(word.encode() for word in words)))
        if isinstance(reply, ErrorReply):
            raise ClusterUnavailable(f"server {id_} refuses '{' '.join(words)}': {reply}")
        return reply

    @property
    def processes(self) -> dict[str, int]:
        """The ids of the processes, by name."""
        return {child.name: child.pid for child in self._children}

    def check(self) -> None:
        """Raise ChildEnded if a process has ended."""
        for child in self._children:
            if child.ended_by_itself:
                raise child.failure()

    def _start(self) -> None:
        program = find_redis_7()
        folder = Path(tempfile.mkdtemp(prefix="dynamoth-bench-"))
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        for id_ in self.server_ids:
            self._network.add(id_)
            (folder / id_).mkdir()
            options = {"cluster-enabled": "yes"}
            command = redis_command(self._network.addresses[id_], folder / id_, options, program)
            child = Child(
                f"server {id_}", self._network.inside(id_, command), environment=environment_without_settings()
            )
            self._undo.callback(child.stop)
            self._children.append(child)
            child.start()
        self._wait(self._silent)
        count = len(self.server_ids)
        bounds = [SLOTS * index // count for index in range(count + 1)]
        for index, id_ in enumerate(self.server_ids):
            self.ask(id_, "CLUSTER", "ADDSLOTSRANGE", str(bounds[index]), str(bounds[index + 1] - 1))
        for id_ in self.server_ids[1:]:
            self.ask(self.server_ids[0], "CLUSTER", "MEET", self._network.addresses[id_], str(PORT))
        self._wait(self._not_joined)

    def _wait(self, missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while problem := missing():
            self.check()
            if time.monotonic() > deadline:
                raise ClusterUnavailable(f"not ready after {READY_TIMEOUT_S:g} s: {problem}")
            time.sleep(POLL_INTERVAL_S)

    def _silent(self) -> str:
        for id_ in self.server_ids:
            try:
                self.ask(id_, "PING")
            except LinkError as error:
                return str(error)
        return ""

    def _not_joined(self) -> str:
        wanted = "cluster_state:ok", f"cluster_known_nodes:{len(self.server_ids)}", f"cluster_slots_ok:{SLOTS}"
        for id_ in self.server_ids:
            lines = self.ask(id_, "CLUSTER", "INFO").decode().split()
            if absent := [line for line in wanted if line not in lines]:
                return f"server {id_} does not say {', '.join(absent)}"
        return ""
