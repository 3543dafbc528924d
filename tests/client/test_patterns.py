"""Patterns on real servers: redis-py's behaviour, over all of them, while channels move and are split."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import GapInfo, PubSub, Redis, from_url
from tests.client.stored_cluster import StoredCluster, next_of

PUBLISHERS = 4


async def _confirmed(pubsub: PubSub, *patterns: str | bytes, **handlers: Any) -> None:
    await pubsub.psubscribe(*patterns, **handlers)
    for _ in range(len(patterns) + len(handlers)):
        assert (await next_of(pubsub))["type"] == "psubscribe"


def _pmessage(pattern: Any, channel: Any, data: Any) -> dict[str, Any]:
    return {"type": "pmessage", "pattern": pattern, "channel": channel, "data": data}


async def _use(client: Any, pubsub: Any) -> list[Any]:
    """Do all kinds of things; return what is to be seen of them."""
    seen: list[Any] = []
    await pubsub.subscribe("news.x", "news.?")
    await pubsub.psubscribe("news.?", "n*")
    await pubsub.psubscribe("n*")
    seen += [await next_of(pubsub) for _ in range(5)]
    seen.append((sorted(pubsub.channels), sorted(pubsub.patterns), pubsub.subscribed))
    seen.append(await client.publish("news.x", "both"))
    seen.append(sorted([await next_of(pubsub) for _ in range(3)], key=str))
    seen.append(await client.publish("nothing", "one"))
    seen.append(await next_of(pubsub))
    await pubsub.punsubscribe("never", "n*")
    seen += [await next_of(pubsub) for _ in range(2)]
    await pubsub.unsubscribe("news.x", "news.?")
    seen += [await next_of(pubsub) for _ in range(2)]
    seen.append((pubsub.subscribed, sorted(pubsub.patterns), sorted(pubsub.pending_unsubscribe_patterns)))
    waiting = pubsub.punsubscribe()
    seen.append(sorted(pubsub.pending_unsubscribe_patterns))
    await waiting
    seen.append([message async for message in pubsub.listen()])
    seen.append((pubsub.subscribed, pubsub.patterns, pubsub.pending_unsubscribe_patterns))
    await pubsub.punsubscribe()
    seen.append(await next_of(pubsub))
    return seen


async def test_patterns_are_as_redis_py_has_them(cluster: StoredCluster) -> None:
    plain: Any = redis.asyncio.Redis(port=cluster.servers["s1"].port)
    async with plain, plain.pubsub() as plain_pubsub:
        expected = await _use(plain, plain_pubsub)
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        assert await _use(client, pubsub) == expected


async def test_messages_of_all_servers_come(cluster: StoredCluster) -> None:
    channels = [cluster.channel_at(server, "everywhere") for server in cluster.servers]
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await _confirmed(pubsub, "everywhere-*")
        for channel in channels:
            assert await client.publish(channel, channel) == 1
            name = channel.encode()
            assert await next_of(pubsub) == _pmessage(b"everywhere-*", name, name)


async def test_everything_but_what_is_dynamoth_s_own(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub, client.pubsub() as other:
        await _confirmed(pubsub, "*")
        await other.subscribe("a")  # says so to the agents
        assert (await next_of(other))["type"] == "subscribe"
        for channel in ("_", "__dynamoth__", "__x", "a"):
            assert await client.publish(channel, "x") == 1 + (channel == "a")
            assert await next_of(pubsub) == _pmessage(b"*", channel.encode(), b"x")


async def test_handlers(cluster: StoredCluster) -> None:
    seen: list[tuple[str, Any]] = []

    def quick(message: dict[str, Any]) -> None:
        seen.append(("sync", message))

    async def slow(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        seen.append(("async", message))

    client = from_url(cluster.url, decode_responses=True)
    async with client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.psubscribe("none*", **{"quick*": quick, "slow*": slow})
        for _ in range(3):
            assert await pubsub.get_message(timeout=None) is None
        for channel in ("quick1", "slow1", "none1"):
            await client.publish(channel, "é")
            if channel != "none1":
                assert await pubsub.get_message(timeout=None) is None
        async for message in pubsub.listen():
            assert message == _pmessage("none*", "none1", "é")
            break
        assert seen == [("sync", _pmessage("quick*", "quick1", "é")), ("async", _pmessage("slow*", "slow1", "é"))]
        await pubsub.psubscribe("quick*")  # without its handler
        await client.publish("quick1", "x")
        assert await next_of(pubsub) == _pmessage("quick*", "quick1", "x")


async def test_messages_as_redis_sends_them(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.psubscribe("a*")
        assert await pubsub.parse_response() == [b"psubscribe", b"a*", 1]
        await client.publish("ab", "x")
        assert await pubsub.parse_response() == [b"pmessage", b"a*", b"ab", b"x"]


async def test_unsubscribing_without_any_pattern_opens_nothing(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.punsubscribe("a*", "b*")
        assert [(await next_of(pubsub))["data"] for _ in range(2)] == [0, 0]
        assert not await pubsub.get_message()


async def test_ping_is_answered_with_patterns_only(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await _confirmed(pubsub, "a*")
        await pubsub.ping("hello")
        assert (await next_of(pubsub))["data"] == b"hello"


async def test_a_lost_connection_shows_as_a_gap_of_the_pattern(cluster: StoredCluster) -> None:
    handled: list[GapInfo] = []
    channel = cluster.channel_at("s2", "gap")
    client = from_url(cluster.url, decode_responses=True)
    async with client, client.pubsub(on_gap=handled.append, gaps=True) as pubsub:
        await _confirmed(pubsub, "gap*")
        await cluster.kill_subscribers("s2")
        message = await next_of(pubsub)
        assert (message["type"], message["channel"]) == ("gap", "gap*")
        assert handled == [message["data"]]
        assert (handled[0].channel, handled[0].pattern, handled[0].publisher) == ("gap*", "gap*", None)
        await client.publish(channel, "back")
        assert await next_of(pubsub) == _pmessage("gap*", channel, "back")
        assert pubsub.gaps_detected == 1


async def test_a_pattern_that_the_servers_refuse_is_an_error_for_the_reader(cluster: StoredCluster) -> None:
    for server in cluster.servers:
        acl = ("resetchannels", "&__dynamoth__:*", "&allowed", "&allowed*", "&__dynamoth__:r:????????:allowed*")
        await cluster.ask(server, "ACL", "SETUSER", "default", *acl)
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe("allowed")
        assert (await next_of(pubsub))["type"] == "subscribe"
        await pubsub.psubscribe("forbidden*")
        with pytest.raises(redis.exceptions.NoPermissionError):
            await next_of(pubsub)
        assert not pubsub.patterns and pubsub.channels
        await client.publish("allowed", "x")
        assert (await next_of(pubsub))["data"] == b"x"
        await _confirmed(pubsub, "allowed*")  # Redis compares patterns with those of the rules literally


async def test_a_pubsub_that_is_closed_can_be_used_again(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await _confirmed(pubsub, "a*")
        await pubsub.aclose()
        assert not pubsub.subscribed and not pubsub.patterns
        assert await client.publish("ab", "x") == 0
        await _confirmed(pubsub, "a*")
        assert await client.publish("ab", "x") == 1


# Whole clusters: agents and a balancer.


async def _change(cluster: LocalCluster, command: str, **arguments: Any) -> None:
    """Change where a channel is, and return when that has settled."""
    await asyncio.to_thread(cluster.ask_balancer, command, arguments)


async def _publish(client: Redis, channel: str, name: int, stop: asyncio.Event) -> int:
    number = 0
    while not stop.is_set():
        await client.publish(channel, f"{name} {number}")
        number += 1
        await asyncio.sleep(0.002)
    return number


async def _read(pubsub: PubSub, pattern: bytes, channel: bytes) -> dict[int, list[int]]:
    """Return the numbers of the messages of each publisher, until each has said that it ends."""
    seen: dict[int, list[int]] = {name: [] for name in range(PUBLISHERS)}
    ends = 0
    async for message in pubsub.listen():
        assert (message["type"], message["pattern"], message["channel"]) == ("pmessage", pattern, channel), message
        if message["data"] == b"end":
            ends += 1
            if ends == PUBLISHERS:
                break
        else:
            name, number = message["data"].split()
            seen[int(name)].append(int(number))
    return seen


async def _published_while(cluster: LocalCluster, channel: str, changes: Callable[[Redis], Awaitable[None]]) -> None:
    """Check that subscribers to patterns get everything once and in order while a channel changes."""
    publishers = [from_url(cluster.url) for _ in range(PUBLISHERS)]
    async with from_url(cluster.url) as client:
        patterns = [f"{channel[:3]}*".encode(), b"*"]
        pubsubs = [client.pubsub(gaps=True) for _ in patterns]
        for pubsub, pattern in zip(pubsubs, patterns, strict=True):
            await _confirmed(pubsub, pattern)
        reads = [_read(pubsub, pattern, channel.encode()) for pubsub, pattern in zip(pubsubs, patterns, strict=True)]
        readers = [asyncio.create_task(read) for read in reads]
        stop = asyncio.Event()
        publishing = [asyncio.create_task(_publish(one, channel, name, stop)) for name, one in enumerate(publishers)]
        await changes(client)
        stop.set()
        counts = await asyncio.gather(*publishing)
        for one in publishers:
            await one.publish(channel, "end")
            assert (await one.plan(channel)).epoch > 0
        for seen in await asyncio.gather(*readers):
            assert seen == {name: list(range(count)) for name, count in enumerate(counts)}
        assert min(counts) > 10
        for pubsub in pubsubs:
            await pubsub.aclose()
        for one in publishers:
            await one.aclose()


@pytest.mark.parametrize("mode", ["all-publishers", "all-subscribers"])
async def test_moves_and_splits_lose_repeat_and_reorder_nothing(whole_cluster: LocalCluster, mode: str) -> None:
    channel = f"split {mode}"

    async def changes(client: Redis) -> None:
        for to in ("s1", "s2"):
            await _change(whole_cluster, "replicate", channel=channel.encode(), mode=mode, servers=["s1", "s2"])
            await _change(whole_cluster, "unreplicate", channel=channel.encode(), to="s2")
            await _change(whole_cluster, "move", channel=channel.encode(), to=to)

    await _published_while(whole_cluster, channel, changes)


async def test_plain_redis_clients_are_heard_once_wherever_they_publish(whole_cluster: LocalCluster) -> None:
    channel = "plain"
    async with from_url(whole_cluster.url) as client, client.pubsub() as pubsub:
        await _confirmed(pubsub, "pla*")
        for server in ("s1", "s2"):
            port = whole_cluster.redis[server].port
            client_of_one: Any = redis.asyncio.Redis(port=port, password=whole_cluster.password)
            async with client_of_one as plain:
                await plain.publish(channel, f"raw at {server}")
            assert await next_of(pubsub) == _pmessage(b"pla*", b"plain", f"raw at {server}".encode())
        await client.publish(channel, "last")
        assert (await next_of(pubsub))["data"] == b"last"
