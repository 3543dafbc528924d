"""Servers come and go by load, as real processes: nothing is lost, and nothing is left running."""

from __future__ import annotations

import os
import signal
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client import Redis
from tests.processes import command_lines
from tests.whole.harness import Traffic, channels_at, logged, move, until

CAPACITY = 400_000
SETTINGS = {
    "agent.report_interval_s": 0.5,
    "balancer.averaging_s": 2.0,
    "balancer.wait_s": 2.0,
    "balancer.channel_rest_s": 3.0,
    "fleet.grow_delay_s": 1.0,
    "fleet.release_delay_s": 2.0,
    "fleet.retry_s": 0.5,
}
CHANNELS = [*channels_at("s1", 3), *channels_at("s2", 3)]


def servers_of(cluster: LocalCluster) -> list[str]:
    """Return the servers of the plan that the balancer has started."""
    page = cluster.ask_balancer("plan", {"limit": 1})
    return [id_ for id_ in page["servers"] if id_.startswith("auto-")]


def carries(cluster: LocalCluster, server: str) -> bool:
    """Return whether one of the channels is at a server."""
    pages = (cluster.ask_balancer("plan", {"channel": channel}) for channel in CHANNELS)
    return any(page["entries"][0]["servers"] == [server] for page in pages)


def processes(cluster: LocalCluster) -> dict[int, str]:
    """Return the processes of the servers that the balancer has started: other clusters may run here, too."""
    own = f"{cluster.fleet_folder}/auto-", f"s1=redis://127.0.0.1:{cluster.redis['s1'].port}"
    lines = command_lines("-e").items()
    return {pid: line for pid, line in lines if "auto-" in line and any(part in line for part in own)}


def fleet(cluster: LocalCluster) -> dict[str, Any]:
    return dict(cluster.ask_balancer("status")["fleet"])


def agent_of(cluster: LocalCluster, server: str) -> str:
    """Return how the agent of a server is, by the balancer."""
    return str(cluster.ask_balancer("status")["servers"][server]["agent"])


def test_a_standby_server_of_a_pool_joins_under_load_and_goes_back() -> None:
    with EmbeddedRedis() as standby:
        pool = {"fleet.provisioner": "pool", "fleet.pool": standby.url, "fleet.servers_max": 2}
        settings = {**SETTINGS, **pool, "cluster.outgoing_bytes_per_s_max": CAPACITY}
        with LocalCluster(1, outgoing_bytes_per_s_max=CAPACITY, settings=settings) as cluster:
            agent = cluster.standby_agent(standby.url)
            agent.start()
            try:
                with Traffic(cluster, CHANNELS[:4], payload_bytes=1500) as traffic:
                    [server] = until(lambda: servers_of(cluster), "the standby server is added", 0.2)
                    until(lambda: carries(cluster, server), f"{server} takes channels", 0.2)
                    traffic.flows()
                    assert traffic.finish().gaps == 0
                    until(lambda: not servers_of(cluster), f"{server} is released", 0.2)
                    until(lambda: not fleet(cluster)["servers"], "the balancer knows that", 0.2)
                    assert not traffic.gaps
                until(lambda: logged(agent, "the standby server has left the plan"), "its agent ends")
                assert agent.running, "it waits for the next time"
            finally:
                assert agent.stop() == 0, agent.lines


def test_a_server_is_started_under_load_takes_channels_and_is_freed_when_the_load_ends() -> None:
    with LocalCluster(2, outgoing_bytes_per_s_max=CAPACITY, settings=SETTINGS, servers_max=3) as cluster:
        assert fleet(cluster)["servers"] == {}
        with Traffic(cluster, CHANNELS, payload_bytes=1500) as traffic:
            [server] = until(lambda: servers_of(cluster), "a server is added under load", 0.2)
            assert len(processes(cluster)) == 2, processes(cluster)
            until(lambda: carries(cluster, server), f"{server} takes channels", 0.2)
            traffic.flows()
            totals = traffic.finish()
            assert (totals.gaps, totals.failed) == (0, 0)
            # Subscribers stay, and follow.
            until(lambda: not servers_of(cluster), f"{server} is released", 0.2)
            until(lambda: not processes(cluster), "its processes end", 0.2)
            until(lambda: not fleet(cluster)["servers"], "the balancer knows that", 0.2)
            assert not traffic.gaps
        status = cluster.ask_balancer("status")
        assert status["fleet"]["server_seconds"] > 0
        assert (status["counters"]["servers_started"], status["counters"]["servers_freed"]) == (1, 1)
        with Redis.from_url(cluster.url) as client:
            pubsub = client.pubsub()
            pubsub.subscribe(*CHANNELS)
            assert {channel: client.publish(channel, b"later") for channel in CHANNELS} == dict.fromkeys(CHANNELS, 1)
            pubsub.close()


def test_a_server_whose_agent_is_killed_gets_another_one_and_channels_move_there_again() -> None:
    settings = {**SETTINGS, "fleet.servers_min": 2, "fleet.release_delay_s": 100.0}
    channel = channels_at("s1", 1, servers=1)[0]

    def moves_to(server: str) -> bool:
        try:
            move(cluster, channel, server)
        except RequestRefused as refused:
            assert f"server {server} is new, and clients with patterns connect to it first" in str(refused)
            return False
        return True

    with LocalCluster(1, settings=settings, servers_max=2) as cluster:
        [server] = until(lambda: servers_of(cluster), "a server is added", 0.1)
        until(lambda: fleet(cluster)["servers"][server]["life"] == "active", f"{server} takes part", 0.1)
        before = processes(cluster)
        [killed] = [pid for pid, line in before.items() if f"--server {server}" in line]
        os.kill(killed, signal.SIGKILL)
        until(lambda: logged(cluster.balancer, "the provisioner is asked to start a server again"), "it is missed", 0.1)
        until(lambda: agent_of(cluster, server) == "alive", "another agent is heard", 0.1)
        after = processes(cluster)
        assert len(after) == len(before) == 2
        assert killed not in after and before.keys() - {killed} < after.keys(), "its redis-server has never ended"
        with Traffic(cluster, [channel], publishers=1, subscribers=1) as traffic:
            until(lambda: moves_to(server), f"a channel moves to {server}", 0.1)
            traffic.flows()
            totals = traffic.finish()
        assert (totals.gaps, totals.failed) == (0, 0)
        assert cluster.ask_balancer("status")["counters"]["agents_started_again"] == 1
