"""PubSub of both clients on real servers that store a plan: redis-py's behaviour, and what is added to it."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from typing import Any

import pytest
import redis.exceptions
import redis.typing

from dynamoth_client import GapInfo
from dynamoth_client.machines.acks import HOLD_S_MAX
from dynamoth_client.runtime import feed
from tests.client.both_clients import Connect, is_asynchronous, on_all_loops
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S, Running, confirmed, message_of, next_of, until, waiting

pytestmark = on_all_loops

SUBSCRIPTION: Any = getattr(redis.typing, "Subscription", None)


def _where(cluster: StoredCluster, channel: str) -> tuple[str, str]:
    return cluster.plan.ring.home(channel.encode()), channel


@pytest.mark.parametrize(
    ("subscribe", "publish"), [("subscribe", "publish"), ("psubscribe", "publish"), ("ssubscribe", "spublish")]
)
def test_what_is_published_after_subscribe_arrives(
    cluster: StoredCluster, connect: Connect, subscribe: str, publish: str
) -> None:
    cluster.put({"c3": "s1", "c4": "s2"})
    with connect(cluster.hosts) as other, connect(cluster.hosts) as client, client.pubsub() as connected:
        for number in range(10):
            with client.pubsub() as fresh:
                for pubsub in (fresh, connected):
                    getattr(pubsub, subscribe)(f"c{number}")
                for publisher in (client, other):
                    getattr(publisher, publish)(f"c{number}", f"{number}")
                for pubsub in (fresh, connected):
                    assert [next_of(pubsub)["data"] for _ in range(3)][1:] == [b"%d" % number] * 2


def test_before_the_first_subscribe(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        assert (pubsub.channels, pubsub.patterns, pubsub.pending_unsubscribe_channels) == ({}, {}, set())
        before = pubsub.connection
        if is_asynchronous(client):
            with pytest.raises(RuntimeError, match="did you forget to call subscribe"):
                pubsub.get_message()
            pubsub.connect()
            assert pubsub.get_message() is None
        else:
            reading = Running(pubsub.get_message, False, None)
            pubsub.connect()
            assert pubsub.get_message() is None
            pubsub.subscribe("c")
            assert reading.result() == message_of("subscribe", b"c", 1)
            pubsub.unsubscribe()
            assert next_of(pubsub)["type"] == "unsubscribe"
        assert before is None
        assert pubsub.connection is not None
        assert list(pubsub.listen()) == []


def test_timeouts_of_get_message(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe("c")
        assert pubsub.get_message(timeout=None) is None  # the ignored acknowledgement
        assert pubsub.get_message() is None
        began_at = time.monotonic()
        assert pubsub.get_message(timeout=0.05) is None
        assert time.monotonic() - began_at >= 0.049
        reading = Running(lambda: pubsub.get_message(timeout=PATIENCE_S))
        client.publish("c", "x")
        assert reading.result() == message_of("message", b"c", b"x")


def test_idle_reads_never_time_out(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts, socket_timeout=0.05) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        reading = Running(next, pubsub.listen())
        reading.join(0.3)
        assert reading.is_alive()
        client.publish("c", "x")
        assert reading.result()["data"] == b"x"


def test_names_may_come_from_iterators_and_in_lists(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.subscribe(name for name in ("a", "b"))
        assert [next_of(pubsub)["channel"] for _ in range(2)] == [b"a", b"b"]
        pubsub.unsubscribe(name for name in ("a", "b"))
        assert next_of(pubsub) == message_of("unsubscribe", b"a", 1)
        assert next_of(pubsub) == message_of("unsubscribe", b"b", 0)
        pubsub.subscribe(["a", "b"], "c")
        pubsub.unsubscribe(["a"], "b")
        assert [next_of(pubsub)["data"] for _ in range(5)] == [1, 2, 3, 2, 1]


@pytest.mark.skipif(SUBSCRIPTION is None, reason="this redis-py has no Subscription")
def test_subscription_objects(cluster: StoredCluster, connect: Connect) -> None:
    seen: list[Any] = []
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.subscribe("a", SUBSCRIPTION(b"\xff", seen.append))
        assert [next_of(pubsub)["channel"] for _ in range(2)] == [b"a", b"\xff"]
        client.publish(b"\xff", "x")
        assert pubsub.get_message(timeout=None) is None
        assert len(seen) == 1


@pytest.mark.parametrize(
    "name", [b"", b"\0", b"\r\n", b"\xff", b"a b*?[", b"n" * 100_000], ids=lambda name: repr(name[:8])
)
def test_names_and_payloads_of_any_bytes(cluster: StoredCluster, connect: Connect, name: bytes) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, name)
        for payload in (b"", b"\0", b"\r\n", b"\xff", b"p" * 100_000):
            assert client.publish(name, payload) == 1
            assert next_of(pubsub) == message_of("message", name, payload)
        assert client.pubsub_numsub(name) == [(name, 1)]
        pubsub.unsubscribe(name)
        assert next_of(pubsub) == message_of("unsubscribe", name, 0)


def test_a_server_that_hangs_does_not_hold_up_others(
    cluster: StoredCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "HOLD_S_MAX", HOLD_S_MAX)
    hanging, quick = cluster.channel_at("s1"), cluster.channel_at("s2")
    with connect(cluster.hosts, socket_connect_timeout=1) as client, client.pubsub() as pubsub:
        pubsub.connect()
        cluster.servers["s1"].pause()
        pubsub.subscribe(hanging, quick)
        assert next_of(pubsub) == message_of("subscribe", quick.encode(), 1)
        cluster.servers["s1"].resume()
        assert next_of(pubsub) == message_of("subscribe", hanging.encode(), 2)


def test_no_message_comes_before_the_acknowledgement_of_its_channel(cluster: StoredCluster, connect: Connect) -> None:
    hanging, quick = cluster.channel_at("s1"), cluster.channel_at("s2")
    with connect(cluster.hosts, socket_connect_timeout=1) as client, client.pubsub() as pubsub:
        client.plan(quick)
        cluster.servers["s1"].pause()
        pubsub.subscribe(hanging, quick)
        reading = Running(next_of, pubsub)
        while reading.is_alive():
            client.publish(quick, "x")
        assert reading.result() == message_of("subscribe", quick.encode(), 1)
        assert next_of(pubsub) == message_of("message", quick.encode(), b"x")
        cluster.servers["s1"].resume()
        while (message := next_of(pubsub))["type"] == "message":
            assert message["channel"] == quick.encode()
        assert message == message_of("subscribe", hanging.encode(), 2)


def test_a_lost_connection_is_made_again_and_shows_as_a_gap(
    cluster: StoredCluster, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    lost, other = cluster.channel_at("s1"), cluster.channel_at("s2")
    got: list[tuple[GapInfo, threading.Thread]] = []

    def tell(gap: GapInfo) -> str:
        got.append((gap, threading.current_thread()))
        return "ignored"

    async def tell_later(gap: GapInfo) -> str:
        await asyncio.sleep(0)
        return tell(gap)

    with caplog.at_level(logging.WARNING, logger="dynamoth_client"), connect(cluster.hosts) as client:
        quiet = client.pubsub()
        loud = client.pubsub(gaps=True, on_gap=tell_later if is_asynchronous(client) else tell)
        for pubsub in (quiet, loud):
            confirmed(pubsub, lost, other)
        asyncio.run(cluster.kill_subscribers("s1"))
        message = next_of(loud)
        gap = message["data"]
        assert message == message_of("gap", lost.encode(), gap)
        assert gap == GapInfo(lost.encode(), None, None, gap.reason) and "s1" in gap.reason
        assert [each for each, _ in got] == [gap]
        assert is_asynchronous(client) or got[0][1] is threading.current_thread(), "the reader's"
        asyncio.run(cluster.until_subscribed("s1", lost, 2))
        client.publish(other, 1)
        client.publish(lost, 2)
        for pubsub in (quiet, loud):
            assert sorted(next_of(pubsub)["data"] for _ in range(2)) == [b"1", b"2"]
            assert pubsub.gaps_detected == 1
    (record,) = caplog.records
    assert lost in record.getMessage()


# Ends of subscriptions.


def test_unsubscribing_from_all_does_not_repeat_what_is_under_way(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "a", "b")
        pubsub.unsubscribe("a")
        pubsub.punsubscribe()
        pubsub.unsubscribe()
        assert next_of(pubsub) == message_of("unsubscribe", b"a", 1)
        assert next_of(pubsub) == message_of("punsubscribe", None, 1)
        assert next_of(pubsub) == message_of("unsubscribe", b"b", 0)


def test_messages_come_before_the_unsubscription_and_not_after(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "a", "b")
        client.publish("a", 1)
        pubsub.unsubscribe("a")
        assert next_of(pubsub) == message_of("message", b"a", b"1")
        assert next_of(pubsub) == message_of("unsubscribe", b"a", 1)
        assert client.publish("a", 2) == 0
        client.publish("b", 3)
        assert next_of(pubsub) == message_of("message", b"b", b"3")
        assert set(pubsub.channels) == {b"b"}


def test_subscribing_again_before_the_unsubscription_is_read(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "a")
        pubsub.unsubscribe("a")
        assert pubsub.pending_unsubscribe_channels == {b"a"}
        pubsub.subscribe("a")
        assert pubsub.pending_unsubscribe_channels == set()
        assert next_of(pubsub) == message_of("unsubscribe", b"a", 0)
        assert pubsub.subscribed
        assert next_of(pubsub) == message_of("subscribe", b"a", 1)
        assert client.publish("a", "x") == 1


def test_listen_ends_with_the_last_subscription(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.subscribe("a", "b")
        seen: list[Any] = []
        for message in pubsub.listen():
            seen.append((message["type"], message["data"]))
            if message["data"] == 2:
                client.publish("a", "x")
            elif message["data"] == b"x":
                pubsub.unsubscribe()
        assert seen[2:] == [("message", b"x"), ("unsubscribe", 1), ("unsubscribe", 0)]
        assert not pubsub.subscribed
        confirmed(pubsub, "c")
        listening = Running(lambda: [message["type"] for message in pubsub.listen()])
        listening.join(0.02)
        pubsub.unsubscribe("c")
        assert listening.result() == ["unsubscribe"], "although another one has asked for it"


@pytest.mark.parametrize("read", ["listen", "get_message", "run", "polls"])
def test_closing_lets_a_reader_go_and_it_can_be_used_again(cluster: StoredCluster, connect: Connect, read: str) -> None:
    handled: list[Any] = []

    def poll() -> None:
        while pubsub.subscribed:
            pubsub.get_message(timeout=0.001)

    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, a=handled.append)
        functions: dict[str, Any] = {
            "listen": lambda: list(pubsub.listen()),
            "get_message": lambda: pubsub.get_message(timeout=None),
            "run": lambda: pubsub.run(),
            "polls": poll,
        }
        reading = Running(functions[read])
        if read == "get_message" and is_asynchronous(client):
            reading.join(0.03)
        elif read == "get_message":
            until(lambda: client._subscriptions.call(waiting) == 1, "it waits")
        else:
            client.publish("a", "x")
            until(lambda: bool(handled), "the handler is called")
        assert reading.is_alive()
        pubsub.close()
        try:
            assert not reading.result()
        except RuntimeError as error:  # of one that begins to read a moment later
            assert is_asynchronous(client) and "did you forget to call subscribe" in str(error)
        assert not pubsub.subscribed
        assert pubsub.connection is None
        asyncio.run(cluster.until_subscribed(*_where(cluster, "a"), count=0))
        confirmed(pubsub, "b")
        assert client.publish("b", "x") == 1


# Closed clients.


@pytest.mark.parametrize("is_read", [True, False])
def test_it_subscribes_again_when_the_client_is_closed(cluster: StoredCluster, connect: Connect, is_read: bool) -> None:
    """At once if somebody reads it, else when it is used: as redis-py's does."""
    gaps: list[GapInfo] = []
    with connect(cluster.hosts) as client, client.pubsub(on_gap=gaps.append) as pubsub:
        confirmed(pubsub, "a", "b")
        client.publish("b", "before")
        assert next_of(pubsub)["data"] == b"before"
        reading = Running(next_of, pubsub) if is_read else None
        client.close()
        first = reading.result() if reading is not None else next_of(pubsub)
        again = [(message["type"], message["data"]) for message in (first, next_of(pubsub))]
        assert again == [("subscribe", 1), ("subscribe", 2)]
        assert {gap.channel for gap in gaps} == {b"a", b"b"}
        assert client.publish("a", "x") == 1
        assert next_of(pubsub)["data"] == b"x"
        client.close()
        confirmed(pubsub, "c")  # what is asked for next begins with what there was
        assert client.publish("a", "y") == 1
        assert pubsub.channels.keys() == {b"a", b"b", b"c"}
        pubsub.close()
        asyncio.run(cluster.until_subscribed(*_where(cluster, "a"), count=0))


def _close_often(client: Any, pause: int) -> None:
    """Close a client three times, so many turns of its loop apart; the synchronous one, 0.2 ms each."""

    async def close() -> None:
        for _ in range(3):
            await client.inner.aclose()
            for _ in range(pause):
                await asyncio.sleep(0)

    if is_asynchronous(client):
        client.on_loop(close)
    else:
        for _ in range(3):
            client.close()
            time.sleep(pause / 5000)


@pytest.mark.parametrize("read", ["get_message", "listen", "batches", "parse_response"])
def test_a_reader_goes_on_however_often_the_client_is_closed(
    cluster: StoredCluster, connect: Connect, read: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while it is about to subscribe again after the close before; and nothing is left that complains."""
    gaps: list[GapInfo] = []
    heard: list[Any] = []

    def go_on() -> None:
        if read == "listen":
            heard.extend(message["data"] for message in pubsub.listen())
        elif read == "batches":
            heard.extend(message["data"] for batch in pubsub.batches() for message in batch)
        while pubsub.subscribed:
            if read == "get_message":
                message = pubsub.get_message(timeout=0.1)
                heard.append(message and message["data"])
            else:
                response = pubsub.parse_response()
                heard.append(response and response[-1])
                if response and response[0] == b"unsubscribe":
                    break

    def goes_on(payload: str) -> None:
        until(lambda: client.publish("c", payload) == 1 or not reading.is_alive(), "it has subscribed again")
        until(lambda: payload.encode() in heard or not reading.is_alive(), "it hears")
        assert reading.is_alive(), reading.result()

    with connect(cluster.hosts) as client, client.pubsub(on_gap=gaps.append) as pubsub:
        confirmed(pubsub, "c")
        reading = Running(go_on)
        for number in range(20):
            gaps.clear()
            _close_often(client, number)
            goes_on(str(number))
            assert gaps or read == "parse_response"
            assert {gap.channel for gap in gaps} <= {b"c"}
        pubsub.unsubscribe()
        reading.result()
    gc.collect()
    assert not caplog.records


def test_it_tries_again_while_servers_are_away(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts, retry=None) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "a")
        client.close()
        for server in cluster.servers.values():
            server.kill()
        for _ in range(2):
            with pytest.raises(redis.exceptions.ConnectionError, match="no server of the cluster gave a plan"):
                pubsub.get_message(timeout=None)
        assert pubsub.subscribed
        for server in cluster.servers.values():
            server.restart()
        cluster.store()
        assert next_of(pubsub)["type"] == "subscribe"
        assert client.publish("a", "x") == 1


# The rest.


def test_ping_is_answered_with_a_pong_message(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        pubsub.connect()
        assert pubsub.ping()
        pubsub.subscribe("c")
        pubsub.ping("hello")
        expected = [message_of("pong", None, b""), message_of("subscribe", b"c", 1), message_of("pong", None, b"hello")]
        assert sorted((next_of(pubsub) for _ in expected), key=str) == sorted(expected, key=str)
        for server in cluster.servers.values():
            server.kill()
        with pytest.raises(redis.exceptions.ConnectionError):
            until(lambda: not pubsub.ping(), "the loss is noticed")


def test_a_handler_that_raises_and_reading_goes_on(cluster: StoredCluster, connect: Connect) -> None:
    failing, quiet = cluster.channel_at("s1", "h"), cluster.channel_at("s1", "a")  # of one server: in order

    def fail(message: dict[str, Any]) -> None:
        raise ZeroDivisionError(message["data"])

    async def fail_later(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        fail(message)

    with connect(cluster.hosts) as client, client.pubsub() as pubsub:
        confirmed(pubsub, quiet, **{failing: fail_later if is_asynchronous(client) else fail})
        for number in range(2):
            client.publish(failing, number)
            client.publish(quiet, number)
        with pytest.raises(ZeroDivisionError, match="0"):
            next_of(pubsub)
        assert next_of(pubsub)["data"] == b"0"
        with pytest.raises(ZeroDivisionError, match="1"):
            next(pubsub.listen())
        assert next(pubsub.listen())["data"] == b"1"


def test_push_handlers_are_refused(cluster: StoredCluster, connect: Connect) -> None:
    with connect(cluster.hosts) as client, pytest.raises(redis.exceptions.DataError, match="push_handler_func"):
        client.pubsub(push_handler_func=print)
