"""A rolling upgrade: agents, balancer and clients of an earlier version, from git, work beside those of this one.

The earlier version is a commit that every clone with the whole history has. An upgrade goes on in either order, and the
balancer goes back, while clients of both versions publish and listen, and channels and slots move.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from dynamoth_cli.local.child import Child
from dynamoth_cli.local.cluster import LocalCluster, environment_without_settings
from dynamoth_sim.audit import Audit, Totals
from tests.whole.harness import PUBLISH_S_MAX, channels_at, move, until

EARLIER = "77085033475b5a2a9d95a40d0a12c8b9ff6b29c9"
"""It has slots, terms of balancers and ``dynamoth server drain``; it does not have failover, folding, slots in reports,
or ``dynamoth server add``. A plan of versions without slots is refused (docs/operating.md, "Upgrading")."""

ROOT = Path(__file__).parents[2]
SOURCES = ("dynamoth", "link", "daemon", "client", "dispatcher", "lla", "agent", "balancer", "recorder", "sim", "cli")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH of the earlier version."""
    command = ["git", "archive", EARLIER, *SOURCES]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 0, (
        f"the earlier version, commit {EARLIER}, is not here: run this test in a git clone with the whole history"
        f" (git fetch --unshallow); git says: {done.stderr.decode().strip()}"
    )
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return os.pathsep.join(map(str, [folder, *(folder / name for name in SOURCES)]))


class MixedCluster(LocalCluster):
    """A cluster whose daemons are of the earlier version at first."""

    def __init__(self, servers: int, earlier: str) -> None:
        super().__init__(servers, settings={"balancer.load_ratio_high": 100.0})
        self._earlier = earlier
        self._is_earlier = True

    def _environment(self, role: str) -> dict[str, str]:
        environment = super()._environment(role)
        return {**environment, "PYTHONPATH": self._earlier} if self._is_earlier else environment

    def replace_agents(self) -> None:
        """Restart the agents in this version, one after the other."""
        self._is_earlier = False
        for id_, agent in self.agents.items():
            agent.stop()
            self.agents[id_] = self._agent(id_)
            self.agents[id_].start()
            self._wait_well()

    def replace_balancer(self, *, is_earlier: bool = False) -> None:
        """Restart the balancer in another version."""
        self._is_earlier = is_earlier
        self.balancer.stop()
        self._balancer = self._daemon("balancer", "balancer")
        self.balancer.start()
        self._wait_well()

    def _wait_well(self) -> None:
        """Wait as an operator does between two steps: until the status has no problem."""
        self.wait_ready()
        until(lambda: not self.ask_balancer("status")["problems"], "the cluster is well", 0.1)


class Clients:
    """Programs with the client of each version, each of which publishes and listens, and the judgement of all."""

    def __init__(self, url: str, channels: Sequence[bytes], earlier: str) -> None:
        self._names = [channel.decode() for channel in channels]
        self._events: dict[str, list[list[Any]]] = defaultdict(list)
        #: The latest numbers: published by (program, channel), and delivered by (program, publisher, channel).
        self._begun: dict[tuple[str, str], int] = {}
        self._latest: dict[tuple[str, str, str], int] = {}
        #: The programs that publish no more.
        self._stopped: set[str] = set()
        own = environment_without_settings()
        versions = {"earlier": {**own, "PYTHONPATH": earlier}, "present": own}
        program = [sys.executable, "-P", str(Path(__file__).with_name("audited_client.py")), url]
        self._programs = {
            name: Child(
                f"the {name} client",
                [*program, name, *self._names],
                environment=environment,
                on_line=lambda line, name=name: self._on_line(name, line),  # type: ignore[misc]
            )
            for name, environment in versions.items()
        }

    def __enter__(self) -> Self:
        for program in self._programs.values():
            program.start()
        self.flow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs.values():
            program.stop()

    def _on_line(self, name: str, line: str) -> None:
        if not line.startswith("["):
            return  # a log, which an error shows
        event = json.loads(line)
        self._events[name].append(event)
        kind, channel, _, *values = event
        if kind == "stopped":
            self._stopped.add(name)
        elif kind == "published":
            self._begun[name, channel] = values[0]
        elif kind == "delivered":
            self._latest[name, values[0], channel] = values[1]

    def _has_come(self, wanted: dict[tuple[str, str], int]) -> bool:
        for program in self._programs.values():
            if program.ended_by_itself:
                raise program.failure()
        return all(self._latest.get((name, *key), 0) >= wanted[key] for name in self._programs for key in wanted)

    def flow(self) -> None:
        """Wait until what each program publishes from now on comes to each."""
        keys = [(name, channel) for name in self._programs for channel in self._names]
        wanted = {key: self._begun.get(key, 0) + 1 for key in keys}
        until(lambda: self._has_come(wanted), "messages flow between both versions")

    def finish(self) -> Totals:
        """Stop publishing, wait for what is under way, and judge."""
        for program in self._programs.values():
            program.ask_to_end()
        until(lambda: self._stopped == self._programs.keys(), "publishers stop")
        until(lambda: self._has_come(self._begun), "the last messages come")
        audit = Audit(publish_s_max=PUBLISH_S_MAX)
        merged = sorted(self._all_events(), key=lambda event: event[1][2])
        for name, (kind, channel, at, *values) in merged:
            if kind == "gap":
                audit.gap(name, channel.encode(), None, None, at)
            elif kind == "confirmed":
                audit.confirmed(name, channel.encode(), at)
            elif kind != "stopped":
                getattr(audit, kind)(name, channel.encode(), *values, at)
        violations = audit.finish(merged[-1][1][2])
        assert not violations, "\n".join(map(str, violations[:10]))
        return audit.totals

    def _all_events(self) -> Iterator[tuple[str, list[Any]]]:
        return ((name, event) for name, events in self._events.items() for event in events)


def drain(cluster: LocalCluster, server: str) -> None:
    """Let all slots leave a server, and the channels that follow them."""
    cluster.ask_balancer("server", {"action": "drain", "server": server})
    until(lambda: cluster.ask_balancer("status")["servers"][server]["slots_left"] == 0, f"slots leave {server}", 0.1)


@pytest.mark.parametrize("first", ["agents", "balancer"])
def test_both_versions_work_together_while_a_cluster_is_upgraded(first: str, earlier: str) -> None:
    [channel], [in_slot] = channels_at("s1", 1, servers=3), channels_at("s3", 1, servers=3)
    with MixedCluster(3, earlier) as cluster, Clients(cluster.url, [channel, in_slot], earlier) as clients:
        move(cluster, channel, "s2")
        if first == "agents":
            cluster.replace_agents()
        else:
            cluster.replace_balancer()
        move(cluster, channel, "s1")
        drain(cluster, "s3")
        clients.flow()
        if first == "balancer":
            cluster.replace_balancer(is_earlier=True)
            move(cluster, channel, "s2")
            cluster.replace_agents()
        cluster.replace_balancer()
        for server in ("s1", "s2"):
            move(cluster, in_slot, server)
        clients.flow()
        totals = clients.finish()
        assert totals.lost == totals.duplicated == totals.reordered == totals.failed == 0
