"""Patterns of both clients on real servers: redis-py's behaviour, over all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import redis.exceptions

from dynamoth_client import GapInfo
from tests.client.both_clients import Connect
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import confirmed, message_of, next_of


def _pconfirmed(pubsub: Any, *patterns: str, **handlers: Any) -> None:
    pubsub.psubscribe(*patterns, **handlers)
    for _ in range(len(patterns) + len(handlers)):
        assert next_of(pubsub)["type"] == "psubscribe"


def _pmessage(pattern: Any, channel: Any, data: Any) -> dict[str, Any]:
    return message_of("pmessage", channel, data) | {"pattern": pattern}


def _use(client: Any, pubsub: Any) -> list[Any]:
    """Do all kinds of things; return what is to be seen of them."""
    seen: list[Any] = []
    pubsub.subscribe("news.x", "news.?")
    pubsub.psubscribe("news.?", "n*")
    pubsub.psubscribe("n*")
    seen += [next_of(pubsub) for _ in range(5)]
    seen.append((sorted(pubsub.channels), sorted(pubsub.patterns), pubsub.subscribed))
    seen.append(client.publish("news.x", "both"))
    seen.append(sorted([next_of(pubsub) for _ in range(3)], key=str))
    seen.append(client.publish("nothing", "one"))
    seen.append(next_of(pubsub))
    pubsub.punsubscribe("never", "n*")
    seen += [next_of(pubsub) for _ in range(2)]
    pubsub.unsubscribe("news.x", "news.?")
    seen += [next_of(pubsub) for _ in range(2)]
    seen.append((pubsub.subscribed, sorted(pubsub.patterns), sorted(pubsub.pending_unsubscribe_patterns)))
    pubsub.punsubscribe()
    seen.append(sorted(pubsub.pending_unsubscribe_patterns))
    seen.append(list(pubsub.listen()))
    seen.append((pubsub.subscribed, pubsub.patterns, pubsub.pending_unsubscribe_patterns))
    return seen


def test_patterns_are_as_redis_py_has_them(cluster: StoredCluster, connect: Connect) -> None:
    plain: Any = redis.Redis(port=cluster.servers["s1"].port)
    with plain, plain.pubsub() as plain_pubsub:
        expected = _use(plain, plain_pubsub)
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        assert _use(client, pubsub) == expected


def test_messages_of_all_servers_come(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.psubscribe("channel-*")
        assert pubsub.parse_response() == [b"psubscribe", b"channel-*", 1]
        for channel in (cluster.channel_at(server) for server in cluster.servers):
            assert client.publish(channel, channel) == 1
            assert pubsub.parse_response() == [b"pmessage", b"channel-*", channel.encode(), channel.encode()]


def test_everything_but_what_is_dynamoth_s_own(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub, client.pubsub() as other:
        _pconfirmed(pubsub, "*")
        confirmed(other, "a")  # says so to the agents
        for channel in ("_", "__dynamoth__", "__x", "a"):
            assert client.publish(channel, "x") == 1 + (channel == "a")
            assert next_of(pubsub) == _pmessage(b"*", channel.encode(), b"x")


def test_handlers(cluster: StoredCluster, connect: Connect) -> None:
    seen: list[Any] = []
    handled, none = (cluster.channel_at("s1", prefix) for prefix in ("handled", "none"))  # of one server: in order
    with connect(cluster.hosts, decode_responses=True) as client, client.pubsub() as pubsub:
        _pconfirmed(pubsub, "none*", **{"handled*": seen.append})
        for channel in (handled, none):
            client.publish(channel, "é")
        assert next_of(pubsub) == _pmessage("none*", none, "é")
        client.publish(handled, "2")
        assert pubsub.get_message(timeout=None) is None
        assert seen == [_pmessage("handled*", handled, data) for data in ("é", "2")]
        _pconfirmed(pubsub, "handled*")  # without its handler
        client.publish(handled, "x")
        assert next_of(pubsub) == _pmessage("handled*", handled, "x")


def test_unsubscribing_without_any_pattern_opens_nothing(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.punsubscribe("a*", "b*")
        assert [pubsub.parse_response()[2] for _ in range(2)] == [0, 0]
        assert not pubsub.get_message()


def test_ping_is_answered_with_patterns_only(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        _pconfirmed(pubsub, "a*")
        pubsub.ping("hello")
        assert next_of(pubsub)["data"] == b"hello"


def test_a_lost_connection_shows_as_a_gap_of_the_pattern(cluster: StoredCluster, connect: Connect) -> None:
    handled: list[GapInfo] = []
    channel = cluster.channel_at("s2", "gap")
    options = {"on_gap": handled.append, "gaps": True}
    with connect(cluster.hosts, decode_responses=True) as client, client.pubsub(**options) as pubsub:
        _pconfirmed(pubsub, "gap*")
        asyncio.run(cluster.kill_subscribers("s2"))
        message = next_of(pubsub)
        assert (message["type"], message["channel"]) == ("gap", "gap*")
        assert handled == [message["data"]]
        assert (handled[0].channel, handled[0].pattern, handled[0].publisher) == ("gap*", "gap*", None)
        client.publish(channel, "back")
        assert next_of(pubsub) == _pmessage("gap*", channel, "back")
        assert pubsub.gaps_detected == 1


def test_a_pattern_that_the_servers_refuse_is_an_error_for_the_reader(cluster: StoredCluster, connect: Connect) -> None:
    for server in cluster.servers:
        acl = ("resetchannels", "&__dynamoth__:*", "&allowed", "&allowed*", "&__dynamoth__:r:????????:allowed*")
        asyncio.run(cluster.ask(server, "ACL", "SETUSER", "default", *acl))
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "allowed")
        pubsub.psubscribe("forbidden*")
        with pytest.raises(redis.exceptions.NoPermissionError):
            next_of(pubsub)
        assert not pubsub.patterns and pubsub.channels
        client.publish("allowed", "x")
        assert next_of(pubsub)["data"] == b"x"
        _pconfirmed(pubsub, "allowed*")  # Redis compares patterns with those of the rules literally
