"""What both clients do alike on real servers that store a plan: publish, subscribe, and everything else of redis-py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis as redis_py

from dynamoth.plan.plan import Mode
from dynamoth.protocol.envelope import open_envelope
from dynamoth_client import ChannelPlan, GuaranteesOff
from tests.client.both_clients import Connect
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S, confirmed, message_of, next_of
from tests.client.versions import REDIS_PY


def test_what_is_published_arrives_whatever_server_the_channel_is_at(cluster: StoredCluster, connect: Connect) -> None:
    channels = {server: cluster.channel_at(server) for server in cluster.servers}
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, *channels.values())
        for server, channel in channels.items():
            assert client.publish(channel, "hello") == 1
            assert next_of(pubsub) == message_of("message", channel.encode(), b"hello")
            assert asyncio.run(cluster.ask(server, "PUBSUB", "NUMSUB", channel)) == [channel.encode(), 1]
            assert client.plan(channel) == ChannelPlan(Mode.SINGLE, (server,), 0)


def test_messages_are_encoded_as_redis_py_does(cluster: StoredCluster, connect: Connect) -> None:
    sent: list[Any] = ["text", "é", b"\x00\xff", 7, 2.5, memoryview(b"view"), ""]
    expected = [b"text", "é".encode(), b"\x00\xff", b"7", b"2.5", b"view", b""]
    if REDIS_PY >= (8,):
        sent.append(bytearray(b"array"))
        expected.append(b"array")
    refused: list[Any] = [None, True, [], object()]
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        for message in sent:
            assert client.publish("c", message) == 1
        assert [next_of(pubsub)["data"] for _ in sent] == expected
        for message in refused:
            with pytest.raises(redis_py.DataError):
                client.publish("c", message)


def test_other_commands_go_to_the_first_server(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts, decode_responses=True) as client:
        client.set("key", "value")
        assert client.get("key") == "value"
        pipeline = client.pipeline()
        for _ in range(2):
            pipeline.incr("number")
        assert pipeline.execute() == [1, 2]
        assert asyncio.run(cluster.ask("s1", "GET", "key")) == b"value"
        assert asyncio.run(cluster.ask("s2", "GET", "key")) is None


def test_channels_of_one_server_go_to_the_first_and_ours_are_refused(cluster: StoredCluster, connect: Connect) -> None:
    plain: Any = redis_py.Redis(port=cluster.servers["s1"].port)

    with plain, plain.pubsub() as pubsub, connect(cluster.hosts) as client:
        confirmed(pubsub, "__keyspace@0__:key")
        assert client.publish("__keyspace@0__:key", "set") == 1
        with pytest.raises(redis_py.DataError, match="choose another name"):
            client.publish("__dynamoth__:balancer:to-agent", "x")
        assert client.publish("__dynamo", "fine") == 0


def test_envelopes_can_be_left_out(cluster: StoredCluster, connect: Connect) -> None:
    channel = cluster.channel_at("s2")
    plain: Any = redis_py.Redis(port=cluster.servers["s2"].port)

    with plain, plain.pubsub() as pubsub:
        confirmed(pubsub, channel)
        with pytest.warns(GuaranteesOff), connect(cluster.hosts, envelope=False) as client, client.pubsub() as ours:
            confirmed(ours, channel)
            assert client.publish(channel, "hello") == 2
            assert next_of(ours)["data"] == next_of(pubsub)["data"] == b"hello"
        with connect(cluster.hosts) as client:
            assert client.publish(channel, "hello") == 1
        assert open_envelope(next_of(pubsub)["data"]).payload == b"hello"


# Clusters that cannot be used.


def test_all_seeds_down(cluster: StoredCluster, connect: Connect) -> None:
    for server in cluster.servers.values():
        server.kill()
    with connect(cluster.hosts, retry=None) as client, client.pubsub() as pubsub:
        with pytest.raises(redis_py.ConnectionError) as error:
            client.publish("c", "x")
        for host in cluster.hosts:
            assert f"{host}: connection refused: start the server" in str(error.value)
        with pytest.raises(redis_py.ConnectionError, match="connection refused"):
            pubsub.subscribe("c")
        assert not pubsub.subscribed


def test_a_key_that_is_no_plan(cluster: StoredCluster, connect: Connect) -> None:
    commands = [
        (("HSET", "__dynamoth__:plan", "@cluster", b"\xc1"), "delete the key"),
        (("SET", "__dynamoth__:plan", "text"), "WRONGTYPE"),
    ]
    with connect(cluster.hosts, retry=None) as client:
        for command, words in commands:
            for server in cluster.servers:
                asyncio.run(cluster.ask(server, *command))
            with pytest.raises(redis_py.ConnectionError, match=words):
                client.publish("c", "x")


# PubSubs.


def test_acknowledgements_are_redis_py_s(cluster: StoredCluster, connect: Connect) -> None:
    x, y, z = (cluster.channel_at(server, name) for server, name in (("s2", "x"), ("s1", "y"), ("s2", "z")))

    def acknowledged(client: Any) -> list[Any]:
        pubsub = client.pubsub()
        pubsub.subscribe(x, y)
        pubsub.subscribe(z, x)
        pubsub.unsubscribe("never", x)
        pubsub.unsubscribe(y)
        pubsub.unsubscribe(z)
        seen = [next_of(pubsub) for _ in range(7)]
        assert pubsub.subscribed
        seen.append(next_of(pubsub))
        assert not pubsub.subscribed
        return seen

    with redis_py.Redis(port=cluster.servers["s1"].port) as plain:
        expected = acknowledged(plain)

    with connect(cluster.hosts) as client:
        assert acknowledged(client) == expected


def test_text_for_those_who_want_it(cluster: StoredCluster, connect: Connect) -> None:
    handled: list[Any] = []
    with connect(cluster.hosts, decode_responses=True) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "dé", b"b", handled=handled.append)
        assert set(pubsub.channels) == {"dé", "b", "handled"}
        client.publish("dé", "é")
        assert next_of(pubsub) == message_of("message", "dé", "é")
        client.publish("handled", 1)
        assert pubsub.get_message(timeout=PATIENCE_S) is None
        assert handled.pop() == message_of("message", "handled", "1")
        client.publish("b", b"\xff")
        with pytest.raises(UnicodeDecodeError):
            next_of(pubsub)
        pubsub.unsubscribe("dé")
        assert next_of(pubsub) == message_of("unsubscribe", "dé", 2)
        assert set(pubsub.channels) == {"b", "handled"}


def test_what_cannot_be_subscribed_to_is_refused_with_words(cluster: StoredCluster, connect: Connect) -> None:
    own = "__dynamoth__:balancer:to-agent"
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        refused: list[tuple[Any, tuple[str, ...], str]] = [
            (pubsub.ssubscribe, (), "name a channel"),
            (pubsub.subscribe, (), "name a channel"),
            (pubsub.psubscribe, (), "name a pattern"),
            (pubsub.subscribe, ("__dynamoth__:s:a",), "choose another name"),
            (pubsub.subscribe, (own,), "choose another name"),
            (pubsub.unsubscribe, ("a", "__dynamoth__:s:a"), "choose another name"),
            (pubsub.psubscribe, ("__dynamoth__:s:*",), "choose another name"),
            (pubsub.psubscribe, ("__dynamoth__:*",), "choose another name"),
            (client.publish, ("__dynamoth__:s:a", "x"), "choose another name"),
            (pubsub.subscribe, ("__keyspace@0__:a",), "belongs to one server"),
            (pubsub.psubscribe, ("__keyspace@*",), "belongs to one server"),
        ]
        for call, names, words in refused:
            with pytest.raises((redis_py.DataError, redis_py.ResponseError), match=words):
                call(*names)
        assert not pubsub.subscribed
