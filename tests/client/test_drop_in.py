"""What applications of redis-py do besides the usual, with both clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

import pytest
import redis
import redis.exceptions

from tests.client.both_clients import Connect, is_asynchronous
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S, confirmed, message_of, next_of
from tests.client.versions import REDIS_PY

# Methods and attributes of redis-py.


def test_commands_by_name(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.execute_command("SUBSCRIBE", "c")
        assert pubsub.parse_response() == [b"subscribe", b"c", 1]
        client.publish("c", "x")
        response = pubsub.parse_response()
        assert response == [b"message", b"c", b"x"]
        assert pubsub.handle_message(response) == message_of("message", b"c", b"x")
        assert pubsub.parse_response(block=False, timeout=0.01) is None
        pubsub.execute_command("SSUBSCRIBE", "s")
        client.spublish("s", "x")
        assert [pubsub.parse_response() for _ in range(2)] == [[b"ssubscribe", b"s", 1], [b"smessage", b"s", b"x"]]
        pubsub.execute_command(b"psubscribe", "p*", "q*")
        assert [next_of(pubsub)["data"] for _ in range(2)] == [2, 3]
        pubsub.execute_command("Unsubscribe")
        assert next_of(pubsub) == message_of("unsubscribe", b"c", 2)
        with pytest.raises(redis.exceptions.PubSubError, match="give it to the client"):
            pubsub.execute_command("GET", "c")


def test_health_is_checked_and_callbacks_are_taken(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        before = pubsub.connection
        assert before is None
        with pytest.raises(RuntimeError, match="did you forget to call subscribe"):
            pubsub.check_health()
        confirmed(pubsub, "c")
        pubsub.check_health()
        if not is_asynchronous(client):  # redis.asyncio has none of these
            pubsub.clean_health_check_responses()
            assert pubsub.health_check_response_counter == 0
        pubsub.connection.register_connect_callback(pytest.fail)
        pubsub.connection.deregister_connect_callback(pytest.fail)
        assert pubsub.connection.is_connected


def test_the_text_of_a_refusal_is_redis_py_s(cluster: StoredCluster, connect: Connect) -> None:
    for id_ in cluster.servers:
        asyncio.run(cluster.ask(id_, "ACL", "SETUSER", "default", "resetchannels", "&__dynamoth__:*"))
    plain: Any = redis.Redis(port=cluster.servers["s1"].port)
    with plain, pytest.raises(redis.exceptions.NoPermissionError) as theirs:
        plain.publish("c", "x")

    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.subscribe("c")
        for refused in (lambda: client.publish("c", "x"), lambda: next_of(pubsub)):
            with pytest.raises(redis.exceptions.NoPermissionError) as ours:
                refused()
            assert str(ours.value) == str(theirs.value)


# Channels of one server.

MEANT_FOR_ONE_SERVER = ("__key*__:*", "__keyevent@0__:*", "__k?yspace@0__:a", "[_]_keyspace@*", "__key*", "__redis__:*")
OTHERS = ("*", "_*", "__k*", "__keys:*", "__keyspace", "__k?ys", "*space@*", "__red*", "key*")


def test_patterns_for_one_server_are_refused_and_others_not(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        family = "redis.asyncio" if is_asynchronous(client) else "redis"
        words = rf"belongs to one server.* {family}\.client\.PubSub\("
        for pattern in MEANT_FOR_ONE_SERVER:
            with pytest.raises(redis.exceptions.DataError, match=words):
                pubsub.psubscribe(pattern)
        assert not pubsub.subscribed
        pubsub.psubscribe(*OTHERS)
        assert [next_of(pubsub)["channel"] for _ in OTHERS] == [pattern.encode() for pattern in OTHERS]


@pytest.mark.skipif(REDIS_PY < (8,), reason="this redis-py has no keyspace_notifications")
def test_keyspace_notifications_are_those_of_the_first_server(cluster: StoredCluster, connect: Connect) -> None:
    asyncio.run(cluster.ask("s1", "CONFIG", "SET", "notify-keyspace-events", "KEA"))
    with connect(cluster.hosts) as client:
        notifications = client.keyspace_notifications(key_prefix="user:", ignore_subscribe_messages=False)
        notifications.subscribe_keyspace("user:*", db=0)
        notifications.get_message(timeout=PATIENCE_S)
        client.set("user:1", "x")
        notification = notifications.get_message(timeout=PATIENCE_S)
        assert (notification.key, notification.event_type) == ("1", "set")
        notifications.close()


# Commands by name, and pipelines.


@contextlib.contextmanager
def agents_at(cluster: StoredCluster, server: str) -> Generator[None]:
    """Let somebody subscribe to what an agent does."""
    plain: Any = redis.Redis(port=cluster.servers[server].port)
    with plain, plain.pubsub() as pubsub:
        pubsub.subscribe("__dynamoth__:balancer:to-agent")
        pubsub.psubscribe("*")
        assert [next_of(pubsub)["data"] for _ in range(2)] == [1, 2]
        yield


@pytest.mark.parametrize("name", ["PUBLISH", "publish", "Publish", b"PUBLISH", b"pUblish"])
def test_publish_is_routed_however_it_is_written(cluster: StoredCluster, connect: Connect, name: str | bytes) -> None:
    channel = cluster.channel_at("s2")
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, channel)
        assert client.execute_command(name, channel, "x") == 1
        assert next_of(pubsub)["data"] == b"x"
        pubsub.ssubscribe("sharded")
        assert next_of(pubsub)["type"] == "ssubscribe"
        sharded = b"S" + name if isinstance(name, bytes) else f"s{name}"
        assert client.execute_command(sharded, "sharded", "x") == 1
        with pytest.raises(redis.exceptions.DataError, match="choose another name"):
            client.execute_command(name, "__dynamoth__:balancer:to-agent", "x")
        with pytest.raises(redis.exceptions.DataError, match="choose another name"):
            client.pipeline().execute_command(name, "__dynamoth__:balancer:to-agent", "x")
        with pytest.raises(redis.exceptions.ResponseError, match="wrong number of arguments"):
            client.execute_command(name, channel)


def test_pubsub_by_name_is_about_the_whole_cluster(cluster: StoredCluster, connect: Connect) -> None:
    one, two = sorted((cluster.channel_at("s1"), cluster.channel_at("s2")))
    names = [one.encode(), two.encode()]
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, one, two)
        pubsub.psubscribe("*")
        pubsub.ssubscribe("sharded")
        assert [next_of(pubsub)["type"] for _ in range(2)] == ["psubscribe", "ssubscribe"]
        ask = client.execute_command
        for answer in (ask("PUBSUB CHANNELS"), ask("PUBSUB", "CHANNELS"), ask(b"pubsub", b"channels", "channel-*")):
            assert answer == names
        assert ask("PUBSUB NUMSUB", one, two) == [(names[0], 1), (names[1], 1)]
        assert ask("PUBSUB", "NUMSUB", one, two) == [names[0], 1, names[1], 1]
        assert ask("PUBSUB", "NUMPAT") == ask("Pubsub numpat") == 1
        assert ask("PUBSUB SHARDCHANNELS") == [b"sharded"]
        assert ask("PUBSUB SHARDNUMSUB", "sharded") == [(b"sharded", 1)]
        assert any(b"CHANNELS" in line for line in ask("PUBSUB", "HELP"))
        with pytest.raises(redis.exceptions.ResponseError):
            ask("PUBSUB", "NUMPAT", "x")


def test_channels_of_dynamoth_s_own_have_no_subscribers(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        own = "__dynamoth__:balancer:to-agent"
        with agents_at(cluster, "s1"):
            assert client.pubsub_numsub(own, "c", own, "c") == [(own.encode(), 0), (b"c", 1)] * 2
            assert client.pubsub_numsub(own) == [(own.encode(), 0)]
            assert client.pubsub_shardnumsub(own) == [(own.encode(), 0)]


@pytest.mark.parametrize("transaction", [True, False])
def test_agents_are_not_counted_in_pipelines(cluster: StoredCluster, connect: Connect, transaction: bool) -> None:
    channel = cluster.channel_at("s1")
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, channel)
        with agents_at(cluster, "s1"):
            pipeline = client.pipeline(transaction)
            pipeline.set("key", "x")
            pipeline.publish(channel, "1")
            pipeline.spublish("nobody", "x")
            pipeline.execute_command("Publish", channel, 2)
            pipeline.get("key")
            assert pipeline.execute() == [True, 1, 0, 1, b"x"]
            assert [next_of(pubsub)["data"] for _ in range(2)] == [b"1", b"2"]
            assert pipeline.execute() == []
            pipeline.publish(channel, "3")
            pipeline.lpush("key", "x")
            receivers, refused = pipeline.execute(raise_on_error=False)
            assert receivers == 1 and isinstance(refused, redis.exceptions.ResponseError)


def test_agents_are_not_counted_while_keys_are_watched(cluster: StoredCluster, connect: Connect) -> None:
    channel = cluster.channel_at("s1")
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, channel)
        with agents_at(cluster, "s1"):
            pipeline = client.pipeline()
            for changed in (False, True):
                pipeline.watch("key")
                assert pipeline.publish(channel, "at once") == 1
                assert pipeline.spublish("nobody", "at once") == 0
                if changed:
                    client.set("key", "x")
                pipeline.multi()
                pipeline.publish(channel, "later")
                pipeline.spublish("nobody", "later")
                if changed:
                    with pytest.raises(redis.exceptions.WatchError):
                        pipeline.execute()
                else:
                    assert pipeline.execute() == [1, 0]


def test_a_pipeline_succeeds_where_agents_may_not_be_counted(cluster: StoredCluster, connect: Connect) -> None:
    asyncio.run(cluster.ask("s1", "ACL", "SETUSER", "default", "-pubsub"))
    with connect(cluster.hosts) as client:
        pipeline = client.pipeline()
        pipeline.incr("number")
        pipeline.publish("c", "x")
        assert pipeline.execute()[1:] == [0]
