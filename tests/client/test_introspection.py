"""What PUBSUB CHANNELS, NUMSUB and NUMPAT of the client tell of a whole cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from fnmatch import fnmatchcase
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions

from dynamoth.names import replica_channel, sharded_channel
from dynamoth.plan.plan import Assignment, Location, Mode, Route
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import PubSub, Redis, from_url
from dynamoth_client.runtime.introspection import merge_channels, merge_subscribers, physical_globs
from tests.client.conftest import ClusterFactory
from tests.client.stored_cluster import StoredCluster, confirmed, next_of
from tests.whole.harness import channels_at

SERVERS = ("s1", "s2", "s3")


async def _subscribed(client: Redis, *channels: bytes | str) -> PubSub:
    pubsub = client.pubsub()
    await confirmed(pubsub, *channels)
    return pubsub


@asynccontextmanager
async def _subscribers(cluster: LocalCluster, channel: bytes, count: int) -> AsyncGenerator[Redis]:
    """Give a client, while so many others, each with connections of its own, are subscribed to a channel."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            client = await stack.enter_async_context(from_url(cluster.url))
            await stack.enter_async_context(await _subscribed(client, channel))
        yield await stack.enter_async_context(from_url(cluster.url))


async def _until_numsub(client: Redis, channel: bytes, count: int) -> None:
    while await client.pubsub_numsub(channel) != [(channel, count)]:  # noqa: ASYNC110  # Redis tells nobody
        await asyncio.sleep(0.02)


async def test_every_server_is_asked(whole_cluster: LocalCluster) -> None:
    channels = [name for server in SERVERS for name in channels_at(server, 2, len(SERVERS))]
    async with from_url(whole_cluster.url) as client, await _subscribed(client, *channels):
        assert await client.pubsub_channels() == sorted(channels)
        assert await client.pubsub_channels(channels[3]) == [channels[3]]
        assert await client.pubsub_channels("no such*") == []
        wanted = [*channels, b"nobody is here", channels[0]]
        assert await client.pubsub_numsub(*wanted) == [(name, int(name in channels)) for name in wanted]
        assert await client.pubsub_numsub() == []
    async with from_url(whole_cluster.url, decode_responses=True) as client, await _subscribed(client, "dé"):
        assert await client.pubsub_channels("d*") == ["dé"]
        assert await client.pubsub_numsub("dé") == [("dé", 1)]


@pytest.mark.parametrize("mode", ["all-subscribers", "all-publishers"])
async def test_a_replicated_channel_is_one_and_so_is_each_subscriber(whole_cluster: LocalCluster, mode: str) -> None:
    channel = f"split:{mode}".encode()
    async with _subscribers(whole_cluster, channel, 4) as client:
        arguments = {"channel": channel, "mode": mode, "servers": list(SERVERS)}
        await asyncio.to_thread(whole_cluster.ask_balancer, "replicate", arguments)
        await _until_numsub(client, channel, 4)
        assert await client.pubsub_channels("split:*") == [channel]
        assert await client.pubsub_channels(mode) == [], "a part of a name that has a colon is no name"
        await asyncio.to_thread(whole_cluster.ask_balancer, "unreplicate", {"channel": channel})
        await _until_numsub(client, channel, 4)


async def test_patterns_are_counted_once_and_those_of_agents_not(whole_cluster: LocalCluster) -> None:
    async with from_url(whole_cluster.url) as client:
        assert await client.pubsub_numpat() == 0
        async with client.pubsub() as one, client.pubsub() as other:
            await one.psubscribe("a*", "*", "[^x]*")
            await other.psubscribe("a*", "d*")
            for pubsub, count in ((one, 3), (other, 2)):
                assert [(await next_of(pubsub))["type"] for _ in range(count)] == ["psubscribe"] * count
            assert await client.pubsub_numpat() == 4
            await other.punsubscribe()
            assert [(await next_of(other))["type"] for _ in range(2)] == ["punsubscribe"] * 2
            assert await client.pubsub_numpat() == 3
        plain: Any = redis.asyncio.Redis(port=whole_cluster.redis["s2"].port, password=whole_cluster.password)
        async with plain, plain.pubsub() as pubsub:
            await pubsub.psubscribe("a*", "b*", "c*")
            assert [(await next_of(pubsub))["type"] for _ in range(3)] == ["psubscribe"] * 3
            assert await client.pubsub_numpat() == 3


async def test_channels_of_one_server_show_too(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client:
        plain: Any = redis.asyncio.Redis(port=cluster.servers["s2"].port)
        async with plain, plain.pubsub() as pubsub:
            await pubsub.subscribe("__keyspace@0__:key", "__dynamoth__:balancer:to-agent")
            await cluster.until_subscribed("s2", "__dynamoth__:balancer:to-agent")
            assert await client.pubsub_channels() == [b"__keyspace@0__:key"]
            assert await client.pubsub_numsub("__keyspace@0__:key") == [(b"__keyspace@0__:key", 1)]


async def test_a_server_that_is_away_is_named(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client:
        assert await client.pubsub_channels() == []
        port = cluster.servers["s2"].port
        await asyncio.to_thread(cluster.servers["s2"].stop)
        for question in (client.pubsub_channels, client.pubsub_numpat, lambda: client.pubsub_numsub("a")):
            with pytest.raises(redis.exceptions.ConnectionError, match=rf"\n  s2: .*:{port}") as failed:
                await question()
            assert "s1" not in str(failed.value)


async def test_a_server_that_refuses_is_named(cluster_factory: ClusterFactory) -> None:
    cluster = cluster_factory()
    async with from_url(cluster.url) as client:
        assert await client.pubsub_numpat() == 0
        assert await cluster.ask("s1", "ACL", "SETUSER", "default", "-pubsub") == b"OK"
        with pytest.raises(redis.exceptions.NoPermissionError, match=r"s1: .* has no permissions to run the 'pubsub"):
            await client.pubsub_numpat()


def test_our_own_names_are_left_out() -> None:
    physical = [
        b"news",
        b"__dynamoth__:balancer:to-agent",
        replica_channel(b"a:b", 17),
        replica_channel(b"a:b", 18),
        b"__mine",
    ]
    sharded = [sharded_channel(b"s"), replica_channel(sharded_channel(b"t:u"), 17), sharded_channel(b"t:u")]
    assert merge_channels(physical + sharded) == [b"__mine", b"a:b", b"news"]
    assert merge_channels(physical + sharded, sharded=True) == [b"s", b"t:u"]


@pytest.mark.parametrize("epoch", [1, 16, 2**32 - 1])
@pytest.mark.parametrize("sharded", [False, True])
def test_replicated_channels_are_asked_for_whatever_their_epoch(epoch: int, sharded: bool) -> None:
    channel = sharded_channel(b"a:b") if sharded else b"a:b"
    names = [channel, replica_channel(channel, epoch)]
    globs = physical_globs(b"a:*", sharded)
    assert [[fnmatchcase(name.decode(), glob.decode()) for glob in globs] for name in names] == [[1, 0], [0, 1]]


def test_subscribers_are_added_up_by_mode() -> None:
    single = Route(5, Assignment(Mode.SINGLE, ("s1",)))
    every = Route(6, Assignment(Mode.ALL_SUBSCRIBERS, SERVERS))
    any_ = Route(7, Assignment(Mode.ALL_PUBLISHERS, SERVERS))
    counts = {Location("s1", b"c"): 1, Location("s2", b"c"): 2, Location("s1", b"other"): 1000}
    counts |= {place: 10 * (index + 1) for index, place in enumerate(every.locations(b"c"))}
    counts |= dict.fromkeys(any_.locations(b"c"), 100)
    assert merge_subscribers(b"c", [], counts) == 3
    assert merge_subscribers(b"c", [single], counts) == 3
    assert merge_subscribers(b"c", [every], counts) == 3 + 30
    assert merge_subscribers(b"c", [any_, every], counts) == 3 + 30 + 300
    assert merge_subscribers(b"c", [every], {}) == 0
