"""The synchronous PubSub and the threads that read it; test_pubsub.py has what both clients do."""

from __future__ import annotations

import threading
from typing import Any, cast

import dynamoth_client as redis
from dynamoth_client import PubSub
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import Running, confirmed, message_of, next_of


def test_one_poll_finds_what_has_arrived(cluster: StoredCluster) -> None:
    """Where redis-py finds it: on its socket."""
    with redis.from_url(cluster.url) as client, redis.from_url(cluster.url) as other, client.pubsub() as pubsub:
        channel, nobody = (cluster.channel_at("s1", prefix) for prefix in ("channel", "nobody"))
        confirmed(pubsub, channel)
        for number in range(20):
            assert other.publish(channel, number) == 1
            other.publish(nobody, "x")  # when this is answered, the same server has written the message before
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


def test_a_wait_that_begins_when_all_has_been_closed(cluster: StoredCluster) -> None:
    """As of a reader that saw a subscription a moment before."""
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        pubsub.close()
        assert Running(cast("Any", pubsub)._wait, None).result() is None
