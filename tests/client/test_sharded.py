"""Sharded channels of both clients on real servers: redis-py's behaviour, at servers that may have none themselves."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import redis
import redis.exceptions

import dynamoth_client
from dynamoth.names import sharded_channel
from dynamoth_client import GapInfo
from tests.client.both_clients import Connect
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S, message_of, next_of, until
from tests.client.versions import REDIS_PY


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
    seen += [getattr(pubsub, "get_sharded_message", pubsub.get_message)(timeout=PATIENCE_S), handled]
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


def _sconfirmed(pubsub: Any, *channels: str) -> None:
    pubsub.ssubscribe(*channels)
    for number, channel in enumerate(channels, 1):
        assert next_of(pubsub) == message_of("ssubscribe", channel.encode(), number)


@pytest.mark.parametrize("decode_responses", [False, True])
def test_they_are_as_redis_py_has_them(cluster: StoredCluster, connect: Connect, decode_responses: bool) -> None:
    port = cluster.servers["s1"].port
    make_plain: Any = redis.Redis
    version = make_plain(port=port).info("server")["redis_version"]
    with connect(cluster.hosts, decode_responses=decode_responses) as client, client.pubsub() as pubsub:
        seen = _use(client, pubsub)
    kinds: list[str] = [item["type"] for item in seen if isinstance(item, dict)]
    assert kinds.count("ssubscribe") == kinds.count("sunsubscribe") == 4 and kinds.count("smessage") == 1
    if int(version.split(".")[0]) >= 7:  # the first Redis that has them itself
        with make_plain(port=port, decode_responses=decode_responses) as plain, plain.pubsub() as plain_pubsub:
            assert seen == _use(plain, plain_pubsub)


def test_those_that_are_dropped_are_gaps(cluster: StoredCluster, connect: Connect) -> None:
    count = 100
    options = {"max_queue": 8, "when_full": "drop_oldest", "gaps": True}
    with connect(cluster.hosts) as client, client.pubsub(**options) as pubsub:
        _sconfirmed(pubsub, "c")
        for number in range(count):
            assert client.spublish("c", str(number)) == 1
        seen = [next_of(pubsub)]
        while seen[-1]["data"] != b"%d" % (count - 1):
            seen.append(next_of(pubsub))
        gaps = [message["data"] for message in seen if message["type"] == "gap"]
        assert gaps and all(gap.sharded and gap.channel == b"c" for gap in gaps)
        assert sum(gap.count for gap in gaps) + len(seen) - len(gaps) == count


def test_a_gap_of_a_sharded_channel_says_so(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub(gaps=True) as pubsub:
        _sconfirmed(pubsub, "a")
        asyncio.run(cluster.kill_subscribers(client.plan(sharded_channel(b"a")).servers[0]))
        gap = next_of(pubsub)
        assert (gap["type"], gap["channel"]) == ("gap", b"a")
        assert isinstance(gap["data"], GapInfo)
        assert (gap["data"].channel, gap["data"].sharded) == (b"a", True)
        assert client.spublish("a", "back") == 1
        assert next_of(pubsub) == message_of("smessage", b"a", b"back")


def test_a_sharded_channel_that_a_server_refuses_is_gone(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.subscribe("a")
        assert next_of(pubsub) == message_of("subscribe", b"a", 1)
        for server in cluster.servers:
            rules = ("resetchannels", "&a", "&__dynamoth__:[^s]*")
            asyncio.run(cluster.ask(server, "ACL", "SETUSER", "default", *rules))
        pubsub.ssubscribe("a")
        with pytest.raises(redis.exceptions.NoPermissionError):
            next_of(pubsub)
        assert pubsub.shard_channels == {} and pubsub.channels == {b"a": None}


def test_a_worker_thread_calls_handlers(cluster: StoredCluster) -> None:
    handled: list[Any] = []
    with dynamoth_client.from_url(cluster.url) as client, client.pubsub() as pubsub:
        pubsub.ssubscribe("bare")
        run_in_thread: Any = cast("Any", pubsub).run_in_thread
        for run in (pubsub.run, run_in_thread):
            with pytest.raises(redis.exceptions.PubSubError, match="has no handler"):
                run()
        pubsub.ssubscribe(bare=handled.append)
        sharded = {"sharded_pubsub": True} if REDIS_PY >= (7, 4) else {}
        worker = run_in_thread(sleep_time=0.01, daemon=True, **sharded)
        until(lambda: client.spublish("bare", "x") == 1 and bool(handled), "a handler was called")
        assert handled[0] == message_of("smessage", b"bare", b"x")
        worker.stop()
        worker.join(PATIENCE_S)
        assert not worker.is_alive() and not pubsub.subscribed
        until(lambda: client.spublish("bare", "x") == 0, "nobody is subscribed")
