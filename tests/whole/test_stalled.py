"""A server that hangs holds nobody up for longer than a bound (G4)."""

from __future__ import annotations

import asyncio

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import from_url
from tests.whole.harness import PATIENCE_S, channels_at, move


def test_a_publisher_whose_old_server_hangs_finds_its_channel_before_that_is_known() -> None:
    """It asks another server when a message has had no answer for a second and a half; after ten it would give up."""
    late = {"health_check_interval": PATIENCE_S}  # without a PING it does not find out that the server hangs
    [channel] = channels_at("s1", 1)

    async def test(cluster: LocalCluster) -> None:
        async with (
            from_url(cluster.url, **late) as publisher,
            from_url(cluster.url) as client,
            client.pubsub() as pubsub,
        ):
            await publisher.publish(channel, b"before")
            await asyncio.to_thread(move, cluster, channel, "s2")
            await pubsub.subscribe(channel)
            cluster.redis["s1"].pause()
            assert await publisher.publish(channel, b"after") == 1
            messages = [await pubsub.get_message(timeout=PATIENCE_S) for _ in range(2)]
            assert [message["data"] for message in messages if message] == [1, b"after"]

    with LocalCluster(2) as cluster:
        try:
            asyncio.run(asyncio.wait_for(test(cluster), PATIENCE_S))
        finally:
            cluster.redis["s1"].resume()
