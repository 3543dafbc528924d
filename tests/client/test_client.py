"""The client on real servers that store a plan: everything but PubSub's own behaviour."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import redis.exceptions

from dynamoth.plan.plan import Mode
from dynamoth_client.asyncio import ChannelPlan, Redis, from_url
from dynamoth_client.runtime.publishing import PAYLOAD_BYTES_MAX
from tests.client.conftest import ClusterFactory
from tests.client.stored_cluster import StoredCluster, confirmed, on_both_loops, run

pytestmark = on_both_loops


async def test_sequential_publications_keep_their_order_and_so_do_200_tasks(cluster: StoredCluster) -> None:
    async def publish(client: Redis, name: int) -> None:
        for number in range(20):
            await client.publish("c", f"{name} {number}")

    async with from_url(cluster.url) as client:
        pubsub = client.pubsub()
        await confirmed(pubsub, "c")
        await asyncio.gather(*(publish(client, name) for name in range(200)))
        seen: dict[bytes, list[int]] = {}
        for _ in range(4000):
            message = await pubsub.get_message(timeout=None)
            assert message is not None
            name, number = message["data"].split()
            seen.setdefault(name, []).append(int(number))
        assert len(seen) == 200
        assert all(numbers == list(range(20)) for numbers in seen.values())


async def test_nothing_connects_before_it_is_needed(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    client.pubsub()
    before = await _connections(cluster)
    async with client:
        assert await _connections(cluster) == before + 1  # its own question
        await client.publish("c", "x")
        assert await _connections(cluster) > before + 2


async def test_the_publisher_takes_over_the_connection_that_read_the_plan(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    before = await _connections(cluster)
    async with from_url(cluster.url) as client:
        await client.publish(channel, "x")
        await client.publish(channel, "y")
        assert await _connections(cluster) == before + 2  # the client's only one, and this question


async def _connections(cluster: StoredCluster) -> int:
    info: bytes = await cluster.ask("s1", "INFO", "stats")
    return int(info.split(b"total_connections_received:")[1].split(b"\r\n")[0])


async def test_concurrent_first_calls_share_one_bootstrap(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    before = await _connections(cluster)
    await asyncio.gather(*(client.plan(f"c{number}") for number in range(50)))
    assert await _connections(cluster) == before + 2  # the bootstrap, and this question
    await client.aclose()


async def test_a_subscriber_learns_a_moved_channel_from_the_stored_plan(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    cluster.put({channel: "s2"})
    async with from_url(cluster.url) as client:
        pubsub = client.pubsub()
        await confirmed(pubsub, channel)
        assert await cluster.ask("s2", "PUBSUB", "NUMSUB", channel) == [channel.encode(), 1]
        assert await client.plan(channel) == ChannelPlan(Mode.SINGLE, ("s2",), 1)
        assert await client.publish(channel, "hello") == 1


async def test_a_seed_that_hangs_does_not_hold_the_others_up(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s2")
    cluster.servers["s1"].pause()
    async with from_url(cluster.url) as client:
        began_at = asyncio.get_running_loop().time()
        await client.publish(channel, "hello")
        assert asyncio.get_running_loop().time() - began_at < 4.0, "connecting to the other takes 5 s"


async def test_a_failed_bootstrap_is_tried_again(cluster: StoredCluster) -> None:
    cluster.servers["s2"].kill()
    cluster.servers["s1"].kill()
    async with from_url(cluster.url) as client:
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.plan("c")
        cluster.servers["s1"].restart()
        await cluster.write(at=["s1"])
        await client.plan("c")


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
                kinds.append((await pubsub.get_message(timeout=None) or {})["type"])
        assert set(pubsub.channels) == {b"allowed"}
        if not kinds:  # the refusal came first
            kinds.append((await pubsub.get_message(timeout=None) or {})["type"])
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
            message = await pubsub.get_message(timeout=None)
            assert message is not None
            seen.append(message["data"])
        assert {b"%d" % number for number in range(0, 101, 2)} <= set(seen)


async def test_a_cancelled_first_publish_leaves_the_bootstrap_to_the_others(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client:
        first, second = (asyncio.create_task(client.publish("c", "x")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 0
        assert first.cancelled()


async def test_publish_to_a_server_that_dies_waits_for_it(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s2")
    async with from_url(cluster.url) as client:
        await client.publish(channel, "before")
        cluster.servers["s2"].kill()
        task = asyncio.create_task(client.publish(channel, "meanwhile"))
        await asyncio.wait({task}, timeout=0.2)
        assert not task.done()
        cluster.servers["s2"].restart()
        assert await task == 0


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


def test_another_event_loop(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)

    async def publish() -> int:
        return await client.publish("c", "x")

    async def close() -> None:
        await client.publish("c", "x")
        await client.aclose()

    run(close())
    run(close())  # closed in between: fine
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(publish())
        with pytest.raises(RuntimeError, match="one client per loop"):
            asyncio.run(publish())
        with pytest.raises(RuntimeError, match="one client per loop"):
            asyncio.run(client.aclose())
        loop.run_until_complete(client.aclose())
    finally:
        loop.close()


async def test_a_dropped_pubsub_closes_its_links(cluster: StoredCluster) -> None:
    channel = cluster.channel_at("s1")
    async with from_url(cluster.url) as client:
        pubsub = client.pubsub()
        await confirmed(pubsub, channel)
        del pubsub
        gc.collect()
        await cluster.until_subscribed("s1", channel, 0)


async def test_payloads_of_any_size_up_to_redis_own_limit(cluster: StoredCluster) -> None:
    channel = bytes(range(256)) * 4
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        assert (await pubsub.get_message(timeout=None) or {})["channel"] == channel
        for payload in (b"", b"\0", bytes(20_000_000)):
            assert await client.publish(channel, payload) == 1
            message = await pubsub.get_message(timeout=None)
            assert message is not None
            assert message["data"] == payload
        with pytest.raises(redis.exceptions.DataError, match="too large"):
            await client.publish(channel, bytes(PAYLOAD_BYTES_MAX + 1))
        assert await client.publish(channel, b"goes on") == 1
