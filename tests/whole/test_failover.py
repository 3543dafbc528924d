"""A server dies, hangs, or is back: others serve its channels meanwhile, on real processes and real Redis (G5)."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import from_url
from tests.whole.harness import PATIENCE_S, Traffic, channels_at, logged, move, stored_entry, until

SERVED_S_MAX = 6.0
"""The usual time until a server counts as dead, and 3 s. A machine that is busy with other tests keeps it with a
shorter one."""
SHORTER = {"balancer.server_dead_s": 1.5}


async def _serve(url: str, channel: bytes) -> None:
    """Let new clients subscribe and publish."""
    async with asyncio.timeout(PATIENCE_S), from_url(url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        while (await pubsub.get_message(timeout=None) or {}).get("type") != "subscribe":
            pass
        await client.publish(channel, b"hello")
        while (await pubsub.get_message(timeout=None) or {}).get("data") != b"hello":
            pass


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hangs"])
def test_others_serve_the_channels_of_a_dead_server_until_it_is_back(hangs: bool) -> None:
    at_home, new = channels_at("s2", 2, servers=3)
    [moved] = channels_at("s1", 1, servers=3)
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
            assert took_s < SERVED_S_MAX, f"{took_s:.1f} s"
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
        move(cluster, at_home, "s2")
        traffic.flows()
        assert traffic.finish().lost == 0
