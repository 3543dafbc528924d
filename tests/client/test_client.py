"""The client on real servers that store a plan: everything but PubSub's own behaviour."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest
import redis.asyncio
import redis.exceptions

from dynamoth.plan.plan import Mode
from dynamoth_client.asyncio import ChannelPlan, Redis, from_url
from dynamoth_link import spares
from tests.client.conftest import ClusterFactory
from tests.client.stored_cluster import StoredCluster, confirmed, next_of, on_both_loops

pytestmark = on_both_loops

CONNECT_TIMEOUT_S = 4.0
"""Far above what connecting takes, also on a machine that is busy."""


async def test_connections_are_made_when_they_are_needed_and_no_more(
    cluster: StoredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "SPARE_S", 3600.0)
    before = await _connections(cluster)
    async with from_url(cluster.url) as client:
        client.pubsub()
        assert await _connections(cluster) == before + 1, "this question"
        await asyncio.gather(*(client.plan(f"c{number}") for number in range(50)))
        assert await _connections(cluster) == before + 3, "one reads the plan for all"
        for _ in range(2):
            await client.publish(cluster.channel_at("s1"), "x")
        assert await _connections(cluster) == before + 4, "the publisher has taken over the one that read the plan"


async def _connections(cluster: StoredCluster) -> int:
    info: bytes = await cluster.ask("s1", "INFO", "stats")
    return int(info.split(b"total_connections_received:")[1].split(b"\r\n")[0])


async def test_a_subscriber_learns_a_moved_channel_from_the_stored_plan(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    cluster.put({channel: "s2"})
    async with from_url(cluster.url) as client, from_url(cluster.url) as other:
        pubsub = client.pubsub()
        await confirmed(pubsub, channel)
        assert await cluster.ask("s2", "PUBSUB", "NUMSUB", channel) == [channel.encode(), 1]
        assert await client.plan(channel) == ChannelPlan(Mode.SINGLE, ("s2",), 1)
        counts = await asyncio.gather(*(other.publish(channel, "x") for _ in range(3)))
        assert counts == [1, 1, 1], "already those of the first publications"


async def test_a_new_client_of_a_pool_needs_the_named_server_no_more(cluster: StoredCluster) -> None:
    """As of libraries that make a client for each message."""
    pool = cast("Any", redis.asyncio.ConnectionPool).from_url(f"redis://{cluster.hosts[0]}")
    async with Redis(connection_pool=pool) as client:
        await client.publish(cluster.channel_at("s2"), "x")
    cluster.servers["s1"].kill()
    async with Redis(connection_pool=pool) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, cluster.channel_at("s2"))
        assert await client.publish(cluster.channel_at("s2"), "x") == 1
    await pool.aclose()


async def test_the_named_server_of_a_pool_that_hangs_costs_only_the_first_client_time(cluster: StoredCluster) -> None:
    pool = cast("Any", redis.asyncio.ConnectionPool).from_url(
        f"redis://{cluster.hosts[0]}", socket_connect_timeout=CONNECT_TIMEOUT_S
    )
    clock = asyncio.get_running_loop().time

    async def publish() -> float:
        began_at = clock()
        async with Redis(connection_pool=pool) as client:
            await client.publish(cluster.channel_at("s2"), "x")
        return clock() - began_at

    await publish()
    cluster.servers["s1"].pause()
    assert await publish() >= CONNECT_TIMEOUT_S, "until it is known that the named server does not answer"
    assert [took_s for _ in range(3) if (took_s := await publish()) >= CONNECT_TIMEOUT_S] == []
    cluster.servers["s1"].resume()
    await publish()
    assert await publish() < CONNECT_TIMEOUT_S
    await pool.aclose()


async def test_a_seed_that_hangs_does_not_hold_the_others_up(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s2")
    cluster.servers["s1"].pause()
    async with from_url(cluster.url, socket_connect_timeout=40) as client:
        began_at = asyncio.get_running_loop().time()
        await client.publish(channel, "hello")
        assert asyncio.get_running_loop().time() - began_at < 20.0, "connecting to the other takes 40 s"


async def test_what_the_acl_forbids(cluster: StoredCluster) -> None:
    for server in cluster.servers:
        rules = ["on", ">p", "~*", "+@all", "resetchannels", "&allowed*", "&__dynamoth__:*"]
        await cluster.ask(server, "ACL", "SETUSER", "limited", *rules)
    async with from_url(cluster.url.replace("://", "://limited:p@")) as client:
        assert await client.publish("allowed", "x") == 0
        with pytest.raises(redis.exceptions.NoPermissionError):
            await client.publish("secret", "x")
        pubsub = client.pubsub()
        await pubsub.subscribe("secret", "allowed")
        kinds: list[str] = []
        with pytest.raises(redis.exceptions.NoPermissionError):
            while True:
                kinds.append((await next_of(pubsub))["type"])
        assert set(pubsub.channels) == {b"allowed"}
        if not kinds:  # the refusal came first
            kinds.append((await next_of(pubsub))["type"])
        assert kinds == ["subscribe"]
        assert await client.publish("allowed", "x") == 1


async def test_a_newer_plan_of_another_seed_is_taken(cluster_factory: ClusterFactory) -> None:
    cluster = cluster_factory(2)
    cluster.put({"c": "s2"})  # version 1 at both
    newer = cluster.plan
    cluster.plan = cluster.plan.with_entries({}, 0)
    cluster.store(at=["s1"])
    cluster.plan = newer
    async with from_url(cluster.url) as client:
        await client.plan("c")
        plan = await client._cluster.local_plan()  # pyright: ignore[reportPrivateUsage]
        assert plan.version == 1


async def test_a_cancelled_publish_does_no_harm(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client:
        pubsub = client.pubsub()
        await confirmed(pubsub, "c")
        await client.publish("c", 0)
        tasks = [asyncio.create_task(client.publish("c", number)) for number in range(1, 101)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[:2]] == [asyncio.CancelledError, int]
        assert await client.publish("c", "end") == 1
        seen: list[bytes] = []
        while not seen or seen[-1] != b"end":
            seen.append((await next_of(pubsub))["data"])
        assert {b"%d" % number for number in range(0, 101, 2)} <= set(seen)


async def test_a_cancelled_first_publish_leaves_the_bootstrap_to_the_others(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client:
        first, second = (asyncio.create_task(client.publish("c", "x")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 0
        assert first.cancelled()


async def test_close_fails_what_waits_and_the_client_can_be_used_again(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s2")
    client = from_url(cluster.url)
    await client.publish(channel, "before")
    cluster.servers["s2"].pause()
    task = asyncio.create_task(client.publish(channel, "meanwhile"))
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(redis.exceptions.ConnectionError, match="closed"):
        await task
    cluster.servers["s2"].resume()
    assert await client.publish(channel, "again") == 0
    await client.aclose()
    await client.aclose()


async def test_close_during_the_bootstrap(cluster: StoredCluster) -> None:
    for server in cluster.servers.values():
        server.pause()
    client = from_url(cluster.url)
    waiting: list[asyncio.Task[Any]] = [
        asyncio.create_task(client.publish("c", "x")),
        asyncio.create_task(client.pubsub().subscribe("c")),
    ]
    await asyncio.sleep(0.05)
    await client.aclose()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, redis.exceptions.ConnectionError) for outcome in outcomes), outcomes


async def test_a_dropped_pubsub_closes_its_links(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url) as client:
        pubsub = client.pubsub()
        await confirmed(pubsub, channel)
        del pubsub
        gc.collect()
        await cluster.until_subscribed("s1", channel, 0)
