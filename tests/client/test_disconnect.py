"""``pubsub.connection.disconnect()``, by which applications cut what they are subscribed over."""

from __future__ import annotations

import asyncio
from typing import Any

import dynamoth_client
from dynamoth_client.asyncio import PubSub, from_url
from tests.client.stored_cluster import StoredCluster, next_of, on_both_loops
from tests.client.sync_helpers import confirmed, until
from tests.client.sync_helpers import next_of as next_sync

pytestmark = on_both_loops


async def _acknowledged(pubsub: PubSub, count: int) -> list[tuple[str, bytes, int]]:
    messages = [await next_of(pubsub) for _ in range(count)]
    return [(message["type"], message["channel"], message["data"]) for message in messages]


async def test_everything_is_acknowledged_again_and_counted_anew(cluster: StoredCluster) -> None:
    one, two = cluster.channel_at("s1"), cluster.channel_at("s2")
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(one, two)
        await pubsub.psubscribe("x*")
        await pubsub.ssubscribe("s")
        expected = [("subscribe", one.encode(), 1), ("subscribe", two.encode(), 2), ("psubscribe", b"x*", 3)]
        expected.append(("ssubscribe", b"s", 1))
        assert await _acknowledged(pubsub, 4) == expected
        connection: Any = pubsub.connection
        for nowait in (False, True):
            assert connection.is_connected
            await connection.disconnect(nowait=nowait)
            assert not connection.is_connected
            again = await _acknowledged(pubsub, 4)
            assert connection.is_connected
            assert {(kind, name) for kind, name, _ in again} == {(kind, name) for kind, name, _ in expected}
            assert [count for kind, _, count in again if kind != "ssubscribe"] == [1, 2, 3]
            assert [count for kind, _, count in again if kind == "ssubscribe"] == [1]
            assert await client.spublish("s", "sharded") == 1
            assert await next_of(pubsub) == {
                "type": "smessage", "pattern": None, "channel": b"s", "data": b"sharded"
            }  # fmt: skip
            for channel in (one, two, "xyz"):
                assert await client.publish(channel, "x") == 1
                assert (await next_of(pubsub))["channel"] == channel.encode()
        await pubsub.unsubscribe(one)
        assert await _acknowledged(pubsub, 1) == [("unsubscribe", one.encode(), 2)]


async def test_what_may_be_missing_is_a_gap(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub(gaps=True) as pubsub:
        await pubsub.subscribe("c")
        await pubsub.psubscribe("c*")
        assert len(await _acknowledged(pubsub, 2)) == 2
        connection: Any = pubsub.connection
        await connection.disconnect()
        seen = [await next_of(pubsub) for _ in range(4)]
        assert [message["type"] for message in seen] == ["gap", "gap", "subscribe", "psubscribe"]
        for message in seen[:2]:
            assert "cut by the application" in message["data"].reason
        assert await client.publish("c", "after") == 2
        assert [(await next_of(pubsub))["data"] for _ in range(2)] == [b"after", b"after"]


async def test_a_subscription_that_is_not_confirmed_is_acknowledged_once(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe("a")
        assert await _acknowledged(pubsub, 1) == [("subscribe", b"a", 1)]
        confirmed = asyncio.ensure_future(pubsub.subscribe("b"))
        await asyncio.sleep(0)
        connection: Any = pubsub.connection
        await connection.disconnect()
        assert not confirmed.done()
        await pubsub.subscribe("c")
        await confirmed
        acknowledged = await _acknowledged(pubsub, 3)
        assert sorted(name for _, name, _ in acknowledged) == [b"a", b"b", b"c"]
        assert [count for _, _, count in acknowledged] == [1, 2, 3]
        assert await client.publish("b", "x") == 1
        assert (await next_of(pubsub))["data"] == b"x"
        await pubsub.unsubscribe()
        await connection.disconnect()
        ended = [message async for message in pubsub.listen()]
        assert [message["type"] for message in ended] == ["unsubscribe"] * 3
        await pubsub.aclose()
        await connection.disconnect()
        assert not connection.is_connected


async def test_no_connection_while_the_server_is_away(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        assert await _acknowledged(pubsub, 1) == [("subscribe", channel.encode(), 1)]
        connection: Any = pubsub.connection
        cluster.servers["s1"].pause()
        await connection.disconnect()
        assert await pubsub.get_message(timeout=0.1) is None
        assert not connection.is_connected
        cluster.servers["s1"].resume()
        assert await _acknowledged(pubsub, 1) == [("subscribe", channel.encode(), 1)]
        assert connection.is_connected


async def test_connect_gives_others_a_turn(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.connect()
        turns: list[None] = []
        asyncio.get_running_loop().call_soon(turns.append, None)
        await pubsub.connect()
        assert turns == [None]


def test_the_synchronous_client(cluster: StoredCluster) -> None:
    with dynamoth_client.from_url(cluster.url) as client, client.pubsub() as pubsub:
        before: Any = pubsub.connection
        confirmed(pubsub, "a", "b")
        connection: Any = pubsub.connection
        assert before is None
        assert connection.is_connected
        connection.disconnect()
        again = [next_sync(pubsub) for _ in range(2)]
        assert [(message["type"], message["data"]) for message in again] == [("subscribe", 1), ("subscribe", 2)]
        until(lambda: bool(connection.is_connected), "a connection is there again")
        assert client.publish("a", "x") == 1
        assert next_sync(pubsub)["data"] == b"x"
        client.close()
        connection.disconnect()
        assert not connection.is_connected
