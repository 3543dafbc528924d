"""A rolling upgrade: agents, balancer and clients of an earlier version, from git, work beside those of this one.

The earlier version is a commit that every clone with the whole history has. An upgrade goes on in either order, and the
balancer goes back, while clients of both versions publish and listen, and channels and slots move.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from dynamoth_cli.local.cluster import LocalCluster, environment_without_settings
from tests.whole.harness import channels_at, move, until
from tests.whole.programs import How, Programs

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


def clients_of_both(url: str, channels: Sequence[bytes], earlier: str) -> Programs:
    """Return a program with the client of each version."""
    own = environment_without_settings()
    return Programs(url, channels, {"earlier": How({**own, "PYTHONPATH": earlier}), "present": How(own)})


def drain(cluster: LocalCluster, server: str) -> None:
    """Let all slots leave a server, and the channels that follow them."""
    cluster.ask_balancer("server", {"action": "drain", "server": server})
    until(lambda: cluster.ask_balancer("status")["servers"][server]["slots_left"] == 0, f"slots leave {server}", 0.1)


@pytest.mark.parametrize("first", ["agents", "balancer"])
def test_both_versions_work_together_while_a_cluster_is_upgraded(first: str, earlier: str) -> None:
    [channel], [in_slot] = channels_at("s1", 1, servers=3), channels_at("s3", 1, servers=3)
    with MixedCluster(3, earlier) as cluster, clients_of_both(cluster.url, [channel, in_slot], earlier) as clients:
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
