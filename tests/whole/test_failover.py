"""A server dies, hangs, or is back: others serve its channels meanwhile, on real processes and real Redis (G5)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis.exceptions

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import PubSub, from_url
from tests.whole.harness import (
    PATIENCE_S,
    Traffic,
    channels_at,
    logged,
    move,
    move_when_agents_are_heard,
    stored_entry,
    until,
)

SERVED_S_MAX = 6.0
"""The usual time until a server counts as dead, and 3 s. A machine that is busy with other tests keeps it with a
shorter one."""
SHORTER = {"balancer.server_dead_s": 1.5}

SLOWNESS_MAX = 20
"""A new client at a living server takes some 50 ms. A machine on which it takes longer gets this many times that."""


async def _next(pubsub: PubSub) -> dict[str, Any]:
    """Return the next message; an error only says that the client is still looking for a server."""
    try:
        return await pubsub.get_message(timeout=None) or {}
    except redis.exceptions.ConnectionError as error:
        assert "still trying" in str(error), error
        return {}


async def _serve(url: str, channel: bytes) -> None:
    """Let a new client subscribe and publish."""
    async with asyncio.timeout(PATIENCE_S), from_url(url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        while (await _next(pubsub)).get("type") != "subscribe":
            pass
        await client.publish(channel, b"hello")
        while (await _next(pubsub)).get("data") != b"hello":
            pass


def _served_after(url: str, channel: bytes) -> float:
    """Return how long it takes to serve a new client."""
    began_at = time.monotonic()
    asyncio.run(_serve(url, channel))
    return time.monotonic() - began_at


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hangs"])
def test_others_serve_the_channels_of_a_dead_server_until_it_is_back(hangs: bool) -> None:
    at_home, new = channels_at("s2", 2, servers=3)
    moved, living = channels_at("s1", 2, servers=3)
    channels = [at_home, moved]
    with (
        LocalCluster(3, settings=SHORTER) as cluster,
        Traffic(cluster, channels, losses_allowed=True, interval_s=0.05) as traffic,
    ):
        move(cluster, moved, "s2")
        traffic.flows()
        failed = cluster.redis["s2"]
        failed_at = time.monotonic()
        if hangs:
            failed.pause()
        else:
            failed.kill()
        try:
            until(lambda: logged(cluster.balancer, "a server is dead"), "the balancer notices")
            asyncio.run(_serve(cluster.url, new))
            took_s = time.monotonic() - failed_at
            usual_s = _served_after(cluster.url, living)
            assert took_s < SERVED_S_MAX + SLOWNESS_MAX * usual_s, f"{took_s:.1f} s, at a living server {usual_s:.2f} s"
            traffic.flows()
            for channel in channels:
                entry = stored_entry(cluster, "s1", channel)
                assert entry is None or "s2" not in entry.route.assignment.servers
            assert {channel for _, gap in traffic.gaps for channel in [gap.channel]} == set(channels)
        finally:
            if hangs:
                failed.resume()
            else:
                failed.start()
        cluster.wait_ready()
        traffic.flows()
        traffic.calm()
        traffic.flows()
        move_when_agents_are_heard(cluster, at_home, "s2")
        traffic.flows()
        assert traffic.finish().lost == 0
