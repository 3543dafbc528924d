"""Sharded channels on real servers: redis-py's behaviour, while they move and are split like any others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import redis as plain_redis
import redis.exceptions

import dynamoth_client
from dynamoth.names import sharded_channel
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import GapInfo, from_url
from tests.client.stored_cluster import StoredCluster, run
from tests.client.stored_cluster import next_of as next_async
from tests.client.sync_helpers import PATIENCE_S, next_of, until
from tests.client.versions import REDIS_PY
from tests.whole.harness import move

SERVERS = ("s1", "s2", "s3")
MESSAGES_BETWEEN_CHANGES = 50


def _of(kind: str, channel: Any, data: Any) -> dict[str, Any]:
    return {"type": kind, "pattern": None, "channel": channel, "data": data}


def _use(client: Any, pubsub: Any) -> list[Any]:
    """Do all kinds of things with sharded channels, and others beside them; return what is to be seen of them."""
    handled: list[Any] = []

    def read(count: int) -> list[Any]:
        return [next_of(pubsub) for _ in range(count)]

    seen: list[Any] = []
    pubsub.subscribe("a")
    pubsub.ssubscribe("a", "b")
    pubsub.ssubscribe("b", c=handled.append)
    seen += read(5)
    pubsub.psubscribe("*")
    seen += read(1)
    seen.append((sorted(pubsub.channels), sorted(pubsub.shard_channels), pubsub.subscribed))
    seen.append([client.spublish("a", "sharded"), client.publish("a", "plain"), client.spublish("none", "nobody")])
    seen += sorted(read(3), key=str)
    seen.append(client.execute_command("SPUBLISH", "c", 1.5))
    seen += [pubsub.get_sharded_message(timeout=PATIENCE_S), handled]
    seen += [client.pubsub_channels("*"), sorted(client.pubsub_shardchannels()), client.pubsub_shardchannels("[bd]")]
    seen += [client.pubsub_numsub("a", "b"), client.pubsub_shardnumsub("b", "a", "none"), client.pubsub_shardnumsub()]
    pubsub.punsubscribe()
    pubsub.unsubscribe()
    seen += read(2)
    pubsub.sunsubscribe("never", "a")
    seen += read(2)
    seen.append((pubsub.subscribed, sorted(pubsub.pending_unsubscribe_shard_channels)))
    pubsub.sunsubscribe()
    seen.append(sorted(pubsub.pending_unsubscribe_shard_channels))
    seen += sorted(({**message, "data": None} for message in pubsub.listen()), key=str)
    seen.append((pubsub.subscribed, pubsub.shard_channels, pubsub.pending_unsubscribe_shard_channels))
    return seen


@pytest.mark.parametrize("decode_responses", [False, True])
def test_they_are_as_redis_py_has_them(cluster: StoredCluster, decode_responses: bool) -> None:
    port = cluster.servers["s1"].port
    make_plain: Any = plain_redis.Redis
    version = make_plain(port=port).info("server")["redis_version"]
    with dynamoth_client.from_url(cluster.url, decode_responses=decode_responses) as client, client.pubsub() as pubsub:
        seen = _use(client, pubsub)
    kinds: list[str] = [item["type"] for item in seen if isinstance(item, dict)]
    assert kinds.count("ssubscribe") == kinds.count("sunsubscribe") == 4 and kinds.count("smessage") == 1
    if int(version.split(".")[0]) >= 7:  # the first Redis that has them itself
        with make_plain(port=port, decode_responses=decode_responses) as plain, plain.pubsub() as plain_pubsub:
            assert seen == _use(plain, plain_pubsub)


async def test_the_asynchronous_client(cluster: StoredCluster) -> None:
    handled: list[Any] = []
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        waiting = asyncio.create_task(pubsub.ssubscribe("one", two=handled.append))
        await asyncio.sleep(0)
        assert pubsub.subscribed
        await waiting
        assert [await next_async(pubsub) for _ in range(2)] == [
            _of("ssubscribe", b"one", 1),
            _of("ssubscribe", b"two", 2),
        ]
        assert await client.pubsub_shardchannels("t*") == [b"two"]
        assert await client.pubsub_channels() == []
        assert await client.pubsub_shardnumsub("one", "none") == [(b"one", 1), (b"none", 0)]
        assert await client.spublish("two", "handled") == await client.execute_command("SPUBLISH", "one", "x") == 1
        assert await pubsub.parse_response() == [b"smessage", b"two", b"handled"]
        assert await client.spublish("two", "again") == 1
        assert await next_async(pubsub) == _of("smessage", b"one", b"x")
        assert await pubsub.get_message(timeout=PATIENCE_S) is None
        assert handled == [_of("smessage", b"two", b"again")]
        await pubsub.sunsubscribe()
        ended = [message async for message in pubsub.listen()]
        assert sorted(message["channel"] for message in ended) == [b"one", b"two"]
        assert [message["data"] for message in ended] == [1, 0]
        await pubsub.sunsubscribe()
        assert await next_async(pubsub) == _of("sunsubscribe", None, 0)


def test_in_batches(cluster: StoredCluster) -> None:
    handled: list[Any] = []
    expected = [[_of("ssubscribe", b"c", 1)], [_of("ssubscribe", b"handled", 2)], [_of("smessage", b"c", b"x")]]

    async def test() -> None:
        async with from_url(cluster.url) as client, client.pubsub() as pubsub:
            await pubsub.ssubscribe("c", handled=handled.append)
            batches = pubsub.batches()
            assert [await anext(batches) for _ in range(2)] == expected[:2]
            for channel in ("handled", "c"):
                assert await client.spublish(channel, "x") == 1
            assert await anext(batches) == expected[2]
            await pubsub.sunsubscribe()
            assert len([message async for batch in batches for message in batch]) == 2

    run(test())
    with dynamoth_client.from_url(cluster.url) as client, client.pubsub() as pubsub:
        pubsub.ssubscribe("c")
        batches = pubsub.batches()
        assert next(batches) == expected[0]
        assert client.spublish("c", "x") == 1
        assert next(batches) == expected[2]
    assert handled == [_of("smessage", b"handled", b"x")]


async def test_those_that_are_dropped_are_gaps(cluster: StoredCluster) -> None:
    count = 100
    async with from_url(cluster.url) as client, client.pubsub(max_queue=8, when_full="drop_oldest", gaps=True) as p:
        await p.ssubscribe("c")
        assert await next_async(p) == _of("ssubscribe", b"c", 1)
        for number in range(count):
            assert await client.spublish("c", str(number)) == 1
        seen = [await next_async(p)]
        while seen[-1]["data"] != b"%d" % (count - 1):
            seen.append(await next_async(p))
        gaps = [message["data"] for message in seen if message["type"] == "gap"]
        assert gaps and all(gap.sharded and gap.channel == b"c" for gap in gaps)
        assert sum(gap.count for gap in gaps) + len(seen) - len(gaps) == count


async def test_a_gap_of_a_sharded_channel_says_so(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub(gaps=True) as pubsub:
        await pubsub.ssubscribe("a")
        assert await next_async(pubsub) == _of("ssubscribe", b"a", 1)
        home = (await client.plan(sharded_channel(b"a"))).servers[0]
        await cluster.kill_subscribers(home)
        gap = await next_async(pubsub)
        assert (gap["type"], gap["channel"]) == ("gap", b"a")
        assert isinstance(gap["data"], GapInfo)
        assert (gap["data"].channel, gap["data"].sharded) == (b"a", True)
        assert await client.spublish("a", "back") == 1
        assert await next_async(pubsub) == _of("smessage", b"a", b"back")


async def test_a_sharded_channel_that_a_server_refuses_is_gone(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe("a")
        assert await next_async(pubsub) == _of("subscribe", b"a", 1)
        for server in cluster.servers:
            await cluster.ask(server, "ACL", "SETUSER", "default", "resetchannels", "&a", "&__dynamoth__:[^s]*")
        await pubsub.ssubscribe("a")
        with pytest.raises(redis.exceptions.NoPermissionError):
            await next_async(pubsub)
        assert pubsub.shard_channels == {} and pubsub.channels == {b"a": None}


@pytest.mark.parametrize("mode", ["all-subscribers", "all-publishers"])
async def test_one_that_moves_and_is_split_loses_repeats_and_reorders_nothing(
    whole_cluster: LocalCluster, mode: str
) -> None:
    name = f"shard:{mode}".encode()
    raw = sharded_channel(name)
    async with (
        from_url(whole_cluster.url) as client,
        client.pubsub(gaps=True) as pubsub,
        client.pubsub(gaps=True) as patterns,
    ):
        await patterns.psubscribe("*")
        assert (await next_async(patterns))["type"] == "psubscribe"
        await pubsub.ssubscribe(name)
        assert await next_async(pubsub) == _of("ssubscribe", name, 1)
        home = (await client.plan(raw)).servers[0]
        target = next(server for server in SERVERS if server != home)
        sent = 0

        async def publish() -> list[int]:
            nonlocal sent
            counts: list[int] = []
            for _ in range(MESSAGES_BETWEEN_CHANGES):
                counts.append(await client.spublish(name, str(sent)))
                sent += 1
            return counts

        await publish()
        await asyncio.gather(asyncio.to_thread(move, whole_cluster, raw, target), publish())
        arguments = {"channel": raw, "mode": mode, "servers": list(SERVERS)}
        await asyncio.gather(asyncio.to_thread(whole_cluster.ask_balancer, "replicate", arguments), publish())
        assert (await publish())[-1] == 1, "nobody who listens by pattern is sent it, or counted"
        assert await client.pubsub_shardchannels("shard:*") == [name]
        assert await client.pubsub_shardnumsub(name) == [(name, 1)]
        await client.publish("the end", "of what a pattern sees")
        assert (await next_async(patterns))["channel"] == b"the end"
        await asyncio.to_thread(whole_cluster.ask_balancer, "unreplicate", {"channel": raw})
        await publish()
        for number in range(sent):
            assert await next_async(pubsub) == _of("smessage", name, b"%d" % number)


def test_they_are_followed_by_the_synchronous_client_too(whole_cluster: LocalCluster) -> None:
    with dynamoth_client.from_url(whole_cluster.url) as client, client.pubsub(gaps=True) as pubsub:
        pubsub.ssubscribe("followed")
        assert next_of(pubsub) == _of("ssubscribe", b"followed", 1)
        raw = sharded_channel(b"followed")
        home = client.plan(raw).servers[0]
        move(whole_cluster, raw, next(server for server in SERVERS if server != home))
        client.spublish("followed", "moved")
        assert next_of(pubsub) == _of("smessage", b"followed", b"moved")
        pubsub.sunsubscribe("followed")
        assert next_of(pubsub) == _of("sunsubscribe", b"followed", 0)


def test_those_of_pipelines_are_forwarded(whole_cluster: LocalCluster) -> None:
    """Pipelines go to the first server, and the channel is at another one."""
    name, raw = b"of a pipeline", sharded_channel(b"of a pipeline")
    expected = _of("smessage", name, b"x")
    with dynamoth_client.from_url(whole_cluster.url) as client, client.pubsub() as pubsub:
        if client.plan(raw).servers[0] != "s2":
            move(whole_cluster, raw, "s2")
        pubsub.ssubscribe(name)
        assert next_of(pubsub) == _of("ssubscribe", name, 1)
        for transaction in (True, False):
            pipeline: Any = client.pipeline(transaction)
            pipeline.set("key", 1).spublish(name, "x").execute()
            assert next_of(pubsub) == expected

        async def test() -> None:
            async with from_url(whole_cluster.url) as asynchronous:
                pipeline: Any = asynchronous.pipeline()
                await pipeline.spublish(name, "x").execute_command("SPUBLISH", name, "x").execute()

        run(test())
        assert [next_of(pubsub) for _ in range(2)] == [expected] * 2


def test_a_worker_thread_calls_handlers(cluster: StoredCluster) -> None:
    handled: list[Any] = []
    with dynamoth_client.from_url(cluster.url) as client, client.pubsub() as pubsub:
        pubsub.ssubscribe("bare")
        with pytest.raises(redis.exceptions.PubSubError, match="has no handler"):
            pubsub.run()
        pubsub.ssubscribe(bare=handled.append)
        sharded = {"sharded_pubsub": True} if REDIS_PY >= (7, 4) else {}
        worker = cast("Any", pubsub).run_in_thread(sleep_time=0.01, daemon=True, **sharded)
        until(lambda: client.spublish("bare", "x") == 1 and bool(handled), "a handler was called")
        assert handled[0] == _of("smessage", b"bare", b"x")
        worker.stop()
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
