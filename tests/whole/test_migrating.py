"""The way of docs/migrating.md, from one Redis to a cluster, with a fleet of applications that never falls silent."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import redis.asyncio

from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import Phase
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.main import main
from dynamoth_client.asyncio import from_url
from tests.whole.fleet import App, Fleet
from tests.whole.harness import move, stored_entry, until

pytestmark = pytest.mark.usefixtures("patient_subscribers")

CHANNELS = ("news.sport", "news.weather", "chat.1")

PATTERN = "[a-z]*"
"""Of an application that listens to everything. A plain client that asks for ``*`` also gets what agents, balancer and
clients say to each other."""

SETTINGS: dict[str, Any] = {
    "cluster.compatibility": "*=s1",
    "balancer.wait_s": 1.0,
    "balancer.averaging_s": 2.0,
    "balancer.lease_s": 3.0,
    "agent.report_interval_s": 0.3,
}

PAYLOAD_BYTES = 300

CAPACITY_BYTES_PER_S = 250_000
"""Of each server. The fleet's traffic, 3 channels x 4 publishers x 20 messages/s x 4 listeners x 350 bytes, is too much
for one."""


def test_a_fleet_is_upgraded_in_any_order_and_then_spread(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = LocalCluster(1, settings=SETTINGS, outgoing_bytes_per_s_max=CAPACITY_BYTES_PER_S)
    server = cluster.redis["s1"]
    server.start()

    def plain(name: str, pattern: str = "") -> App:
        client: Any = redis.asyncio.Redis(port=server.port)
        return App(client, name, CHANNELS, pattern=pattern, payload_bytes=PAYLOAD_BYTES)

    def upgraded(old: App) -> App:
        name = old.name.replace("plain", "new")
        return App(from_url(cluster.url), name, CHANNELS, pattern=old.pattern, payload_bytes=PAYLOAD_BYTES)

    def rules(*arguments: str) -> dict[str, bool]:
        assert main(["plan", "compatibility", *arguments, "--json", "--url", cluster.url]) == 0
        shown = json.loads(capsys.readouterr().out)["rules"]
        return {rule["pattern"]: rule["plain"] for rule in shown}

    try:
        with Fleet() as fleet:
            # One Redis, and applications that know nothing else.
            old = [fleet.add(plain(f"plain{number}")) for number in range(3)]
            old.append(fleet.add(plain("plain-pattern", PATTERN)))
            fleet.flows()
            # An agent and a balancer beside it.
            with cluster:
                fleet.flows()
                assert rules("list") == {"*": True}
                # The applications, one after the other, in any order.
                random.Random(7).shuffle(old)
                new: list[App] = []
                for each in old:
                    new.append(fleet.replace(each, upgraded(each)))
                    until(
                        lambda: {app.receivers[channel] for app in new for channel in CHANNELS} == {len(old)},
                        "a client of Dynamoth counts each application once, and no agent (G7)",
                    )
                # More servers. What is plain stays where it is.
                cluster.add_server()
                cluster.wait_ready()
                fleet.flows()
                with pytest.raises(RequestRefused, match="compatibility lift"):
                    move(cluster, b"chat.1", "s2")
                # Plain is lifted, for some channels first.
                assert rules("lift", "news.*") == {"news.*": False, "*": True}
                until(lambda: _moved(cluster), "the balancer spreads the load", 0.5)
                assert _moved(cluster) <= {b"news.sport", b"news.weather"}, "chat.1 is plain"
                fleet.flows()
                assert rules("lift", "*") == {"news.*": False, "*": False}
                assert rules("remove", "news.*") == {"*": False}
                assert rules("remove", "*") == {}
                until(lambda: _moves(cluster, b"chat.1"), "chat.1 may be moved now", 0.5)
                fleet.flows()
                delivered = fleet.finish()
                assert delivered > 1000
    finally:
        server.stop()


def _moved(cluster: LocalCluster) -> set[bytes]:
    """Return the channels that have settled at s2."""
    entries = {name.encode(): stored_entry(cluster, "s1", name.encode()) for name in CHANNELS}
    return {
        name
        for name, entry in entries.items()
        if entry is not None and entry.phase is Phase.SETTLED and entry.route.assignment.servers == ("s2",)
    }


def _moves(cluster: LocalCluster, channel: bytes) -> bool:
    """Move a channel to s2, unless it is too early, or the balancer is moving it."""
    if channel in _moved(cluster):
        return True
    try:
        move(cluster, channel, "s2")
    except RequestRefused as error:
        if "try again" not in str(error) and "in transition" not in str(error):
            raise
        return False
    return True
