"""A server is gone: every other one stores the plan, so its channels are found within a second (real servers)."""

from __future__ import annotations

import asyncio

from dynamoth_client.asyncio import from_url
from tests.client.conftest import ClusterFactory

SOON_S = 5.0
"""A client looks elsewhere within 0.6 s; the rest is for a machine that is busy. Otherwise it would fail after 10 s."""


async def test_a_client_that_knows_the_old_place_publishes_at_the_new_one(cluster_factory: ClusterFactory) -> None:
    cluster = cluster_factory(3)
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url) as client, from_url(cluster.url) as other:
        assert await client.publish(channel, "at home") == 0
        await asyncio.to_thread(cluster.put, {channel: "s2"})
        async with other.pubsub() as pubsub:
            await pubsub.subscribe(channel)
            await cluster.until_subscribed("s2", channel)
            await asyncio.to_thread(cluster.servers["s1"].stop)
            async with asyncio.timeout(SOON_S):
                assert await client.publish(channel, "found") == 1
            received = [await pubsub.get_message(timeout=SOON_S) for _ in range(2)]
            assert [(message or {})["data"] for message in received] == [1, b"found"]


async def test_a_new_client_uses_a_channel_whose_home_is_down(cluster_factory: ClusterFactory) -> None:
    cluster = cluster_factory(3)
    channel = cluster.channel_at("s1")
    cluster.put({channel: "s2"})
    cluster.servers["s1"].stop()
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        async with asyncio.timeout(SOON_S):
            await pubsub.subscribe(channel)
            confirmed = await pubsub.get_message(timeout=SOON_S)
            assert confirmed is not None
        async with from_url(cluster.url) as other, asyncio.timeout(SOON_S):
            assert await other.publish(channel, "found") == 1


async def test_the_first_publish_counts_the_receivers_of_the_right_place(cluster_factory: ClusterFactory) -> None:
    cluster = cluster_factory(2)
    channel = cluster.channel_at("s1")
    cluster.put({channel: "s2"})
    async with from_url(cluster.url) as client, from_url(cluster.url) as other, client.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        await pubsub.get_message(timeout=None)
        assert await asyncio.gather(*(other.publish(channel, number) for number in range(3))) == [1, 1, 1]
        received = [await pubsub.get_message(timeout=None) for _ in range(3)]
        assert [(message or {})["data"] for message in received] == [b"0", b"1", b"2"]
