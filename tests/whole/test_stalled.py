"""A server that hangs holds nobody up for longer than a bound (G4)."""

from __future__ import annotations

import asyncio
import time

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import from_url
from dynamoth_link.options import LinkOptions
from tests.whole.harness import PATIENCE_S, channels_at, move

DETECTION_S = 5.0
"""In which a server that freezes is found by default: see the options of links."""


def test_a_publisher_whose_old_server_hangs_finds_its_channel_before_that_is_known() -> None:
    """It asks another server when a message has had no answer for a second and a half."""
    assert LinkOptions().ping_interval_s + LinkOptions().ping_timeout_s < DETECTION_S
    [channel] = channels_at("s1", 1)

    async def test(cluster: LocalCluster) -> float:
        async with from_url(cluster.url) as publisher, from_url(cluster.url) as client, client.pubsub() as pubsub:
            await publisher.publish(channel, b"before")
            await asyncio.to_thread(move, cluster, channel, "s2")
            await pubsub.subscribe(channel)
            cluster.redis["s1"].pause()
            began_at = time.monotonic()
            assert await publisher.publish(channel, b"after") == 1
            took_s = time.monotonic() - began_at
            messages = [await pubsub.get_message(timeout=PATIENCE_S) for _ in range(2)]
            assert [message["data"] for message in messages if message] == [1, b"after"]
            return took_s

    with LocalCluster(2) as cluster:
        try:
            took_s = asyncio.run(asyncio.wait_for(test(cluster), PATIENCE_S))
        finally:
            cluster.redis["s1"].resume()
    assert took_s < DETECTION_S - 1.0
