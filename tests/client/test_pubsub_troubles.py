"""PubSub where connections break and where the application is slow."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import redis.exceptions

from dynamoth_client.asyncio import GapInfo, from_url
from tests.client.stored_cluster import StoredCluster, confirmed, next_of, on_both_loops, run

pytestmark = on_both_loops


def _message(kind: str, channel: Any, data: Any) -> dict[str, Any]:
    return {"type": kind, "pattern": None, "channel": channel, "data": data}


def test_a_lost_connection_is_made_again_and_shows_as_a_gap(
    cluster: StoredCluster, caplog: pytest.LogCaptureFixture
) -> None:
    lost, other = cluster.channel_at("s1"), cluster.channel_at("s2")
    told: list[GapInfo] = []

    async def remember(gap: GapInfo) -> None:
        await asyncio.sleep(0)
        told.append(gap)

    async def test() -> None:
        async with from_url(cluster.url) as client:
            quiet, loud = client.pubsub(), client.pubsub(gaps=True, on_gap=remember)
            await confirmed(quiet, lost, other)
            await confirmed(loud, lost, other)
            await cluster.kill_subscribers("s1")
            message = await next_of(loud)
            gap = message["data"]
            assert message == _message("gap", lost.encode(), gap)
            assert gap == GapInfo(lost.encode(), None, None, gap.reason)
            assert "s1" in gap.reason
            assert told == [gap]
            assert loud.gaps_detected == 1
            await cluster.until_subscribed("s1", lost, 2)
            await client.publish(other, 1)
            await client.publish(lost, 2)
            for pubsub in (quiet, loud):
                assert sorted([(await next_of(pubsub))["data"] for _ in range(2)]) == [b"1", b"2"]
            assert quiet.gaps_detected == 1

    with caplog.at_level(logging.WARNING, logger="dynamoth_client"):
        run(test())
    (record,) = caplog.records
    assert lost in record.getMessage()


async def test_what_a_handler_of_gaps_returns_is_ignored(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    told: list[GapInfo] = []

    def count(gap: GapInfo) -> int:
        told.append(gap)
        return len(told)

    async with from_url(cluster.url) as client, client.pubsub(gaps=True, on_gap=count) as pubsub:
        await confirmed(pubsub, channel)
        await cluster.kill_subscribers("s1")
        assert (await next_of(pubsub))["type"] == "gap"
        assert len(told) == 1


async def test_when_no_server_can_be_reached_readers_are_told_and_go_on_afterwards(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url, socket_connect_timeout=0.2) as client, client.pubsub() as pubsub:
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


async def test_unreachable_servers_are_one_item_in_the_queue_and_none_where_nothing_is_subscribed(
    cluster: StoredCluster,
) -> None:
    async with from_url(cluster.url, socket_connect_timeout=0.05) as client:
        idle, busy = client.pubsub(), client.pubsub()
        for pubsub in (idle, busy):
            await confirmed(pubsub, "c")
        await idle.unsubscribe("c")
        assert (await next_of(idle))["type"] == "unsubscribe"
        for server in cluster.servers.values():
            server.kill()
        with pytest.raises(redis.exceptions.ConnectionError):
            await next_of(busy)
        assert await idle.get_message(timeout=0.3) is None
        assert len(busy._queue.items) == 1  # pyright: ignore[reportPrivateUsage]


async def test_a_reader_that_is_slow_stops_the_servers_and_loses_nothing(cluster: StoredCluster) -> None:
    count, size = 5000, 1000
    async with from_url(cluster.url) as client, client.pubsub(max_queue=100) as pubsub:
        await confirmed(pubsub, "c")
        for begin in range(0, count, 500):
            await asyncio.gather(
                *(client.publish("c", b"%d " % number + bytes(size)) for number in range(begin, begin + 500))
            )
        queue = pubsub._queue  # pyright: ignore[reportPrivateUsage]
        assert queue.is_full
        one_read = 256 * 1024 // size
        assert 100 <= len(queue.items) <= 100 + one_read
        for number in range(count):
            assert int((await next_of(pubsub))["data"].split()[0]) == number
        assert not queue.is_full


async def test_subscribing_waits_no_longer_than_for_a_connection(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url, socket_connect_timeout=0.3) as client, client.pubsub() as pubsub:
        await client.plan("any")
        cluster.servers["s1"].kill()
        await pubsub.subscribe(channel)
        assert pubsub.subscribed
        with pytest.raises(redis.exceptions.ConnectionError, match="no server of the subscribed channels"):
            await next_of(pubsub)


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


@pytest.mark.parametrize("pattern", [None, b"c*"])
async def test_gaps_are_one_in_a_full_queue(cluster: StoredCluster, pattern: bytes | None) -> None:
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
