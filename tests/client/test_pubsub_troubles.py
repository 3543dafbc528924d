"""PubSub where connections break and where the application is slow."""

from __future__ import annotations

import asyncio

import pytest
import redis.exceptions

from dynamoth_client.asyncio import GapInfo, from_url
from dynamoth_client.redis_py import settings
from tests.client.stored_cluster import StoredCluster, confirmed, next_of, on_both_loops

pytestmark = on_both_loops


async def test_when_no_server_can_be_reached_readers_get_an_error_and_go_on_afterwards(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url, socket_connect_timeout=1) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, channel)
        cluster.servers["s1"].kill()
        for _ in range(2):
            with pytest.raises(redis.exceptions.ConnectionError, match="connection refused: start the server"):
                await next_of(pubsub)
        cluster.servers["s1"].restart()
        await cluster.write(at=["s1"])
        while True:
            try:
                await cluster.until_subscribed("s1", channel)
                await client.publish(channel, "back")
                assert (await next_of(pubsub))["data"] == b"back"
            except redis.exceptions.ConnectionError:
                continue
            return


async def test_without_an_option_readers_wait_for_longer_than_a_connection_may_take(
    cluster: StoredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "UNREACHABLE_S", 0.5)
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "c")
        for server in cluster.servers.values():
            server.kill()
        with pytest.raises(redis.exceptions.ConnectionError, match="still trying"):
            await pubsub.get_message(timeout=4)  # a connection may take 5 s


async def test_unreachable_servers_are_one_item_in_a_queue_with_subscriptions(cluster: StoredCluster) -> None:
    async with from_url(cluster.url, socket_connect_timeout=0.5) as client:
        idle, busy = client.pubsub(), client.pubsub()
        for pubsub in (idle, busy):
            await confirmed(pubsub, "c")
        await idle.unsubscribe("c")
        assert (await next_of(idle))["type"] == "unsubscribe"
        for server in cluster.servers.values():
            server.kill()
        with pytest.raises(redis.exceptions.ConnectionError):
            await next_of(busy)
        assert await idle.get_message(timeout=1.2) is None
        assert len(busy._queue.items) == 1  # pyright: ignore[reportPrivateUsage]


async def test_subscribing_does_not_wait_for_a_slow_reader(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub(max_queue=4) as pubsub:
        await confirmed(pubsub, "c")
        await asyncio.gather(*(client.publish("c", f"{number}") for number in range(8)))
        while not pubsub._queue.is_full:  # noqa: ASYNC110  # pyright: ignore[reportPrivateUsage]  # messages come by themselves
            await asyncio.sleep(0)
        async with asyncio.timeout(20):  # without the remedy, this never returns
            await pubsub.subscribe("d")
        seen = [await next_of(pubsub) for _ in range(9)]
        assert [m["data"] for m in seen if m["type"] == "message"] == [b"%d" % n for n in range(8)]
        assert [m["channel"] for m in seen if m["type"] == "subscribe"] == [b"d"]


async def test_gaps_keep_their_places_in_a_full_queue(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url) as client, client.pubsub(max_queue=4, gaps=True) as pubsub:
        await confirmed(pubsub, channel)
        await asyncio.gather(*(client.publish(channel, f"{number}") for number in range(4)))
        feed = pubsub._feed  # pyright: ignore[reportPrivateUsage]
        assert feed is not None
        while not pubsub._queue.is_full:  # noqa: ASYNC110  # pyright: ignore[reportPrivateUsage]  # messages come by themselves
            await asyncio.sleep(0)
        for number in range(3):
            feed._note_gap(GapInfo(channel.encode(), 7, 1, f"gap {number}"))  # pyright: ignore[reportPrivateUsage]
            feed._put([(channel.encode(), b"behind gap %d" % number)])  # pyright: ignore[reportPrivateUsage]
        seen = [(await next_of(pubsub))["data"] for _ in range(10)]
        expected = [each for n in range(3) for each in (f"gap {n}", b"behind gap %d" % n)]
        assert [each.reason if isinstance(each, GapInfo) else each for each in seen[4:]] == expected


@pytest.mark.parametrize("pattern", [None, b"c*"])
async def test_gaps_are_one_where_as_many_wait_as_messages_may(cluster: StoredCluster, pattern: bytes | None) -> None:
    """Those of a channel, or those of all channels of a pattern."""
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url) as client, client.pubsub(max_queue=1, gaps=True) as pubsub:
        await confirmed(pubsub, channel)
        await client.publish(channel, "fills it")
        queue = pubsub._queue  # pyright: ignore[reportPrivateUsage]
        feed = pubsub._feed  # pyright: ignore[reportPrivateUsage]
        assert feed is not None
        while not queue.is_full:  # noqa: ASYNC110  # the message comes by itself
            await asyncio.sleep(0)
        for number in range(3):
            gap = GapInfo(channel.encode() if pattern is None else b"c%d" % number, 7, 1, f"gap {number}", pattern)
            feed._note_gap(gap)  # pyright: ignore[reportPrivateUsage]
        assert len(queue.items) == 2
        await next_of(pubsub)
        message = await next_of(pubsub)
        gap = message["data"]
        assert message["channel"] == gap.channel == (pattern or channel.encode())
        assert (gap.pattern, gap.publisher, gap.count) == (pattern, None, None)
        assert "gap 2" in gap.reason
        assert pubsub.gaps_detected == 3
