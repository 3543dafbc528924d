"""The synchronous PubSub on real servers that store a plan: redis-py's behaviour, and what is added to it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any, cast

import pytest

import dynamoth_client as redis
from dynamoth_client import GapInfo, PubSub
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import Running, confirmed, message_of, next_of, until


@pytest.mark.parametrize(
    ("subscribe", "publish"), [("subscribe", "publish"), ("psubscribe", "publish"), ("ssubscribe", "spublish")]
)
def test_what_is_published_after_subscribe_arrives(cluster: StoredCluster, subscribe: str, publish: str) -> None:
    with redis.from_url(cluster.url) as client, redis.from_url(cluster.url) as other:
        for number in range(10):
            with client.pubsub() as pubsub:
                getattr(pubsub, subscribe)(f"c{number}")
                for publisher in (client, other):
                    assert getattr(publisher, publish)(f"c{number}", f"{number}") == 1
                assert [next_of(pubsub)["data"] for _ in range(3)][1:] == [b"%d" % number] * 2


def test_it_is_one_of_redis_py_s(cluster: StoredCluster) -> None:
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        before = pubsub.connection
        pubsub.connect()
        assert before is None
        assert pubsub.connection is not None
        assert isinstance(pubsub, redis.client.PubSub)
        assert cast("Any", pubsub).connection_pool is client.connection_pool
        assert (pubsub.channels, pubsub.patterns, pubsub.pending_unsubscribe_channels) == ({}, {}, set())
        assert list(pubsub.listen()) == []


def test_get_message_before_the_first_subscribe(cluster: StoredCluster) -> None:
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        assert pubsub.get_message() is None
        began_at = time.monotonic()
        assert pubsub.get_message(timeout=0.05) is None
        assert time.monotonic() - began_at >= 0.049
        reading = Running(pubsub.get_message, False, None)
        pubsub.subscribe("c")
        assert reading.result() == message_of("subscribe", b"c", 1)


def test_timeouts_of_get_message(cluster: StoredCluster) -> None:
    with redis.from_url(cluster.url) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe("c")
        assert pubsub.get_message(timeout=None) is None  # the ignored acknowledgement
        assert pubsub.get_message() is None
        began_at = time.monotonic()
        assert pubsub.get_message(timeout=0.05) is None
        assert 0.049 <= time.monotonic() - began_at < 2
        client.publish("c", "x")
        assert pubsub.get_message(timeout=20) == message_of("message", b"c", b"x")


def test_idle_reads_never_time_out(cluster: StoredCluster) -> None:
    with redis.from_url(cluster.url + "?socket_timeout=0.05") as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        reading = Running(next, pubsub.listen())
        reading.join(0.3)
        assert reading.is_alive()
        client.publish("c", "x")
        assert reading.result()["data"] == b"x"


def test_a_reader_that_polls_gets_everything(cluster: StoredCluster) -> None:
    """``get_message()`` without a timeout drives the connections too, as nothing else may ever do."""
    with redis.from_url(cluster.url) as client, redis.from_url(cluster.url) as other, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        for number in range(50):
            other.publish("c", number)
        seen: list[int] = []

        def poll() -> bool:
            while (message := pubsub.get_message()) is not None:
                seen.append(int(message["data"]))
            return len(seen) == 50

        until(poll, "all messages")
        assert seen == list(range(50))


def test_one_poll_finds_what_has_arrived(cluster: StoredCluster) -> None:
    """Where redis-py finds it: on its socket."""
    with redis.from_url(cluster.url) as client, redis.from_url(cluster.url) as other, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        for number in range(20):
            assert other.publish("c", number) == 1
            other.publish("nobody", "x")  # when this is answered, the server has written the message before
            message = pubsub.get_message()
            assert message is not None
            assert message["data"] == b"%d" % number


def test_handlers_are_called_by_the_reader_and_may_use_the_client(cluster: StoredCluster) -> None:
    taken: list[Any] = []

    def answer(message: dict[str, Any]) -> None:
        taken.append((message, threading.current_thread()))
        client.publish("answers", message["data"])
        pubsub.subscribe("one more")

    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "answers", questions=answer)
        assert pubsub.channels == {b"answers": None, b"questions": answer}
        client.publish("questions", "why")
        assert pubsub.get_message(timeout=20) is None
        assert taken == [(message_of("message", b"questions", b"why"), threading.current_thread())]
        assert {next_of(pubsub)["type"], next_of(pubsub)["type"]} == {"message", "subscribe"}


def test_an_error_of_a_handler_goes_to_the_reader(cluster: StoredCluster) -> None:
    def fail(message: dict[str, Any]) -> None:
        raise ZeroDivisionError(message["data"])

    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, c=fail)
        client.publish("c", "1")
        client.publish("c", "2")
        with pytest.raises(ZeroDivisionError, match="1"):
            next_of(pubsub)
        with pytest.raises(ZeroDivisionError, match="2"):
            next(pubsub.listen())


@pytest.mark.parametrize(
    "name", [b"", b"\0", b"\r\n", b"\xff", b"a b*?[", b"n" * 100_000], ids=lambda name: repr(name[:8])
)
def test_names_and_payloads_of_any_bytes(cluster: StoredCluster, name: bytes) -> None:
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, name)
        for payload in (b"", b"\0", b"\r\n", b"\xff", b"p" * 100_000):
            assert client.publish(name, payload) == 1
            assert next_of(pubsub) == message_of("message", name, payload)
        assert client.pubsub_numsub(name) == [(name, 1)]
        pubsub.unsubscribe(name)
        assert next_of(pubsub) == message_of("unsubscribe", name, 0)


def test_listen_ends_with_the_last_subscription(cluster: StoredCluster) -> None:
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        pubsub.subscribe("a", "b")
        seen: list[Any] = []
        for message in pubsub.listen():
            seen.append((message["type"], message["data"]))
            if message["data"] == 2:
                client.publish("a", "x")
            elif message["data"] == b"x":
                pubsub.unsubscribe()
                assert pubsub.pending_unsubscribe_channels == {b"a", b"b"}
        assert seen[2:] == [("message", b"x"), ("unsubscribe", 1), ("unsubscribe", 0)]
        assert not pubsub.subscribed


def test_patterns(cluster: StoredCluster) -> None:
    taken: list[Any] = []
    channels = [cluster.channel_at("s1", "news"), cluster.channel_at("s2", "news")]
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        pubsub.psubscribe("news-*", **{"new*": taken.append})
        for number in (1, 2):
            acknowledged = next_of(pubsub)
            assert (acknowledged["type"], acknowledged["data"]) == ("psubscribe", number)
        assert pubsub.patterns == {b"news-*": None, b"new*": taken.append}
        for channel in channels:
            client.publish(channel, "x")
            expected = message_of("pmessage", channel.encode(), b"x") | {"pattern": b"news-*"}
            assert next_of(pubsub) == expected
            until(lambda: pubsub.get_message(timeout=0.01) is None and bool(taken), "the handler is called")
            assert taken.pop() == expected | {"pattern": b"new*"}
        pubsub.punsubscribe()
        assert [message["type"] for message in pubsub.listen()] == ["punsubscribe", "punsubscribe"]
        assert not pubsub.subscribed


def test_ping(cluster: StoredCluster) -> None:
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        assert pubsub.ping() is True
        assert next_of(pubsub) == message_of("pong", None, b"")
        assert pubsub.ping("hello") is True
        assert next_of(pubsub) == message_of("pong", None, b"hello")
        pubsub.check_health()


def test_run_in_thread(cluster: StoredCluster) -> None:
    taken: list[Any] = []
    with redis.from_url(cluster.url) as client:
        pubsub = client.pubsub()
        run_in_thread = cast("Any", pubsub).run_in_thread
        pubsub.subscribe("no handler")
        with pytest.raises(redis.PubSubError, match="no handler"):
            run_in_thread()
        pubsub.unsubscribe()
        pubsub.subscribe(c=taken.append)
        while list(pubsub.channels) != [b"c"]:
            next_of(pubsub)
        thread = run_in_thread(sleep_time=0.01, daemon=True)
        until(lambda: client.publish("c", "x") == 1, "it is subscribed")
        until(lambda: bool(taken), "the handler is called")
        thread.stop()
        thread.join(20)
        assert not thread.is_alive()
        assert not pubsub.subscribed
        until(lambda: client.publish("c", "x") == 0, "nobody is subscribed")


def test_run_in_thread_has_a_handler_for_exceptions(cluster: StoredCluster) -> None:
    errors: list[Any] = []

    def fail(message: dict[str, Any]) -> None:
        raise ZeroDivisionError

    def take(error: BaseException, pubsub: PubSub, thread: Any) -> None:
        errors.append((type(error), pubsub))
        thread.stop()

    with redis.from_url(cluster.url) as client:
        pubsub = client.pubsub()
        confirmed(pubsub, c=fail)
        thread = cast("Any", pubsub).run_in_thread(sleep_time=0.5, exception_handler=take)
        client.publish("c", "x")
        thread.join(20)
        assert errors == [(ZeroDivisionError, pubsub)]


def test_gaps_are_told_by_the_reader(cluster: StoredCluster) -> None:
    told: list[tuple[redis.GapInfo, threading.Thread]] = []

    def tell(gap: redis.GapInfo) -> None:
        told.append((gap, threading.current_thread()))

    channel = cluster.channel_at("s1")
    with redis.from_url(cluster.url) as client:
        by_call = client.pubsub(on_gap=tell)
        by_message = client.pubsub(gaps=True)
        for pubsub in (by_call, by_message):
            confirmed(pubsub, channel)
        asyncio.run(cluster.kill_subscribers("s1"))
        gap = next_of(by_message)
        assert (gap["type"], gap["channel"], gap["data"].channel) == ("gap", channel.encode(), channel.encode())
        until(lambda: by_call.get_message(timeout=0.1) is None and bool(told), "a gap")
        assert told == [(gap["data"], threading.current_thread())]
        assert (by_call.gaps_detected, by_message.gaps_detected) == (1, 1)


def test_a_full_queue_is_taken_from_and_filled_again(cluster: StoredCluster) -> None:
    def publish(client: redis.Redis) -> list[int]:
        return [client.publish("c", number) for number in range(2000)]

    for bound in (1, 2, 7):
        with redis.from_url(cluster.url) as client, redis.from_url(cluster.url) as other:
            pubsub = client.pubsub(max_queue=bound)
            confirmed(pubsub, "c")
            publishing = Running(publish, other)
            assert [int(next_of(pubsub)["data"]) for _ in range(2000)] == list(range(2000))
            assert publishing.result() == [1] * 2000
    with redis.from_url(cluster.url) as client, pytest.raises(redis.DataError):
        client.pubsub(max_queue=0)


@pytest.mark.parametrize("read", ["get_message", "listen", "batches", "parse_response"])
def test_a_reader_goes_on_however_often_the_client_is_closed(
    cluster: StoredCluster, read: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while it is about to subscribe again after the close before; and nothing is left that complains."""
    client = redis.from_url(cluster.url)
    gaps: list[GapInfo] = []
    pubsub = client.pubsub(on_gap=gaps.append)
    confirmed(pubsub, "c")
    heard: list[Any] = []

    def go_on() -> None:
        if read == "listen":
            heard.extend(message["data"] for message in pubsub.listen())
        elif read == "batches":
            heard.extend(message["data"] for batch in pubsub.batches() for message in batch)
        elif read == "get_message":
            while pubsub.subscribed:
                message = pubsub.get_message(timeout=0.1)
                heard.append(message and message["data"])
        else:
            while pubsub.subscribed:
                response = pubsub.parse_response()
                heard.append(response and response[-1])

    def send(payload: str) -> None:
        until(lambda: client.publish("c", payload) == 1 or not reading.is_alive(), "it has subscribed again")
        until(lambda: payload.encode() in heard or not reading.is_alive(), "it hears")
        assert reading.is_alive(), reading.result()

    reading = Running(go_on)
    for number in range(20):
        gaps.clear()
        for pause_s in (0.0, 0.0, 0.001, 0.002, 0.003):
            client.close()
            time.sleep(pause_s)
        send(str(number))
        assert gaps or read == "parse_response"
    pubsub.close()
    reading.result()
    client.close()
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("read", ["listen", "get_message", "run", "polls"])
def test_closing_lets_a_blocked_reader_go(cluster: StoredCluster, read: str) -> None:
    def poll(pubsub: PubSub) -> None:
        while pubsub.subscribed:
            pubsub.get_message(timeout=0.001)

    client = redis.from_url(cluster.url)
    pubsub = client.pubsub()
    confirmed(pubsub, c=print)
    functions: dict[str, Any] = {
        "listen": lambda: list(pubsub.listen()),
        "get_message": lambda: pubsub.get_message(timeout=None),
        "run": lambda: pubsub.run(),
        "polls": lambda: poll(pubsub),
    }
    reading = Running(functions[read])
    reading.join(0.03)
    assert reading.is_alive()
    pubsub.close()
    assert not reading.result()
    confirmed(pubsub, "again")
    client.close()


def test_a_wait_that_begins_when_all_has_been_closed(cluster: StoredCluster) -> None:
    """As of a reader that saw a subscription a moment before."""
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        pubsub.close()
        assert Running(cast("Any", pubsub)._wait, None).result() is None


def test_unsubscribing_elsewhere_ends_a_listener(cluster: StoredCluster) -> None:
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        listening = Running(lambda: [message["type"] for message in pubsub.listen()])
        listening.join(0.02)
        pubsub.unsubscribe("c")
        assert listening.result() == ["unsubscribe"]
