"""Event loops that end before the client, and forked children, on real servers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from dynamoth_client.asyncio import PubSub, Redis, from_url
from tests.client.forked import a_child_that_lives, in_child
from tests.client.stored_cluster import StoredCluster, next_of

PATIENCE_S = 20.0


def run(test: Coroutine[Any, Any, None], runner: asyncio.Runner | None = None) -> None:
    (asyncio.run if runner is None else runner.run)(asyncio.wait_for(test, PATIENCE_S))


async def subscribe_to_all(client: Redis, pubsub: PubSub) -> None:
    await pubsub.subscribe("a")
    await pubsub.psubscribe("p*")
    await pubsub.ssubscribe("s")
    assert {(await next_of(pubsub))["type"] for _ in range(3)} == {"subscribe", "psubscribe", "ssubscribe"}
    assert await client.publish("a", "1") == 1
    assert (await next_of(pubsub))["data"] == b"1"


async def all_arrives(client: Redis, pubsub: PubSub) -> None:
    await client.publish("a", "2")
    await client.publish("pattern", "2")
    await client.spublish("s", "2")
    seen = {(message["type"], message["channel"]) for message in [await next_of(pubsub) for _ in range(3)]}
    assert seen == {("message", b"a"), ("pmessage", b"pattern"), ("smessage", b"s")}


async def acknowledged_again(pubsub: PubSub, *, gaps: int) -> None:
    kinds = sorted([(await next_of(pubsub))["type"] for _ in range(3 + gaps)])
    assert kinds == sorted(["gap"] * gaps + ["subscribe", "psubscribe", "ssubscribe"])


FIRST: dict[str, Callable[[Redis, PubSub], Awaitable[object]]] = {
    "publish": lambda client, _: client.publish("other", "x"),
    "read": lambda _, pubsub: pubsub.get_message(),
    "ask": lambda client, _: client.pubsub_numsub("a"),
    "listen": lambda _, pubsub: anext(pubsub.listen()),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_loop_that_ended_without_a_close(cluster: StoredCluster, first: str) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub(gaps=True)
    run(subscribe_to_all(client, pubsub))

    async def again() -> None:
        await FIRST[first](client, pubsub)
        if first in ("publish", "ask"):
            assert pubsub.gaps_detected == 0
            assert "event loop" in (await next_of(pubsub))["data"].reason
        await acknowledged_again(pubsub, gaps=2)
        assert pubsub.gaps_detected == 3
        await all_arrives(client, pubsub)
        await pubsub.subscribe("b")
        assert (await next_of(pubsub))["channel"] == b"b"

    run(again())
    run(client.aclose())
    run(pubsub.aclose())
    gc.collect()


def test_what_was_not_read_is_read_first(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub(gaps=True)

    async def leave_some() -> None:
        await subscribe_to_all(client, pubsub)
        for number in range(3):
            await client.publish("a", number)
        while len(pubsub._queue.items) < 3:  # pyright: ignore[reportPrivateUsage]  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)

    async def read_on() -> None:
        assert [(await next_of(pubsub))["data"] for _ in range(3)] == [b"0", b"1", b"2"]
        await acknowledged_again(pubsub, gaps=3)
        await all_arrives(client, pubsub)
        await client.aclose()

    run(leave_some())
    run(read_on())
    gc.collect()


def test_a_subscription_that_the_end_of_its_loop_has_interrupted(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub()

    async def interrupted() -> None:
        subscribing = asyncio.create_task(pubsub.subscribe("a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not subscribing.done()

    async def go_on() -> None:
        assert (await next_of(pubsub))["type"] == "subscribe"
        assert await client.publish("a", "x") == 1
        assert (await next_of(pubsub))["data"] == b"x"
        await client.aclose()

    run(interrupted())
    run(go_on())
    gc.collect()


def test_pubsubs_of_loops_that_ended_can_be_closed(cluster: StoredCluster) -> None:
    client = from_url(cluster.url, max_connections=2)  # those that have ended do not count
    for _ in range(3):
        pubsub = client.pubsub()
        run(subscribe_to_all(client, pubsub))
        run(pubsub.aclose())
        assert not pubsub.subscribed
        run(subscribe_to_all(client, pubsub))
        run(client.aclose())
        run(acknowledged_again(pubsub, gaps=0))
        run(pubsub.aclose())
    gc.collect()


def test_another_loop_while_that_of_the_subscriptions_is_open(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    with asyncio.Runner() as runner:
        run(subscribe_to_all(client, pubsub), runner)
        uses: list[Any] = [client.publish("a", "x"), client.aclose(), pubsub.subscribe("a"), pubsub.get_message()]
        uses += [pubsub.ping(), pubsub.aclose(), anext(pubsub.listen())]
        for use in uses:
            with pytest.raises(RuntimeError, match="one client per loop"):
                run(use)
        run(all_arrives(client, pubsub), runner)
        run(client.aclose(), runner)
    run(pubsub.aclose())
    gc.collect()


def test_a_forked_child_begins_anew_and_the_parent_goes_on(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    pubsub, other = client.pubsub(gaps=True), client.pubsub()

    async def of_child() -> None:
        await acknowledged_again(pubsub, gaps=0)
        for channel in ("a", "pattern"):
            assert await client.publish(channel, "x") == 2
        assert {(await next_of(pubsub))["type"] for _ in range(2)} == {"message", "pmessage"}
        await other.aclose()
        await client.aclose()

    async def begun() -> None:
        await subscribe_to_all(client, pubsub)
        await other.subscribe("other")

    async def of_parent() -> None:
        assert {(await next_of(pubsub))["type"] for _ in range(2)} == {"message", "pmessage"}
        await all_arrives(client, pubsub)
        assert pubsub.gaps_detected == 0
        await client.aclose()
        for id_ in cluster.servers:
            await cluster.until_subscribed(id_, "a", count=0)

    with asyncio.Runner() as runner:
        run(begun(), runner)
        in_child(lambda: run(client.aclose()))
        in_child(lambda: run(pubsub.aclose()))
        in_child(lambda: None)
        in_child(lambda: run(of_child()))
        run(of_parent(), runner)


def test_a_child_that_lives_keeps_no_connection_of_the_parent_open(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub()

    async def close() -> None:
        await client.aclose()
        for id_ in cluster.servers:
            await cluster.until_subscribed(id_, "a", count=0)

    with asyncio.Runner() as runner:
        run(subscribe_to_all(client, pubsub), runner)
        with a_child_that_lives():
            run(close(), runner)
