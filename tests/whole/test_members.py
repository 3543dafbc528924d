"""Servers come and go as an operator does it, by commands and without a restart, under load."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.plan.plan import single
from dynamoth.plan.slots import is_slot
from dynamoth.protocol.stored_plan import READ_WHOLE, parse_whole
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.main import main
from dynamoth_client import from_url
from tests.whole.harness import Traffic, channels_at, until

pytestmark = pytest.mark.usefixtures("patient_subscribers")

SETTINGS: dict[str, Any] = {
    "balancer.wait_s": 3.0,
    "balancer.averaging_s": 3.0,
    "balancer.lease_s": 3.0,
    "balancer.replicas_max": 1,
}


def slots_at(cluster: LocalCluster, server: str) -> int:
    """Return how many slots the stored plan has at a server."""
    plan = parse_whole(cluster.ask(server, READ_WHOLE)[0], None)
    assert plan is not None, "every server stores a plan"
    return sum(is_slot(name) and each.route.assignment == single(server) for name, each in plan.entries.items())


def test_a_server_is_added_and_two_of_the_first_leave_while_idle_subscribers_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    busy = [*channels_at("s1", 2, servers=3), *channels_at("s2", 2, servers=3), *channels_at("s3", 2, servers=3)]
    idle = [name for at in ("s1", "s2", "s3") for name in channels_at(at, 2, servers=3, prefix=b"idle-")]
    with LocalCluster(3, settings=SETTINGS) as cluster:
        first_url = cluster.url
        with from_url(first_url) as client, client.pubsub(gaps=True) as waiting, Traffic(cluster, busy) as traffic:
            waiting.subscribe(*idle)
            for _ in idle:
                until(lambda: (waiting.get_message(timeout=1.0) or {}).get("type") == "subscribe", "an idle subscriber")

            def type_(*words: str) -> int:
                return main(["server", *words, "--url", cluster.url])

            new = cluster.add_server()
            cluster.wait_ready()
            until(lambda: slots_at(cluster, new) > 0, f"{new} takes slots", every_s=0.5)
            for leaving in ("s1", "s2"):
                assert type_("drain", leaving) == 0
                until(lambda leaving=leaving: type_("remove", leaving) == 0, f"{leaving} is removed", every_s=0.5)  # type: ignore[misc]
                assert f"{leaving} is not in the plan any more" in capsys.readouterr().out
                cluster.agents.pop(leaving).stop()
                cluster.redis.pop(leaving).stop()
                traffic.flows()
            with from_url(first_url) as late, late.pubsub() as pubsub:
                pubsub.subscribe(*busy, *idle)
                for _ in (*busy, *idle):
                    until(lambda: (pubsub.get_message(timeout=1.0) or {}).get("type") == "subscribe", "a new client")
                for channel in idle:
                    assert late.publish(channel, b"at last") == 2, "one idle subscriber, and the new client"
            got: set[Any] = set()
            for _ in idle:
                message = until(lambda: waiting.get_message(timeout=1.0), "the message") or {}
                got.add((message["type"], message["channel"]))
            assert got == {("message", channel) for channel in idle}, "no gap events, and one message each"
            traffic.flows()
            assert traffic.finish().gaps == 0, traffic.gaps
