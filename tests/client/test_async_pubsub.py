"""The asynchronous PubSub beside other tasks of its event loop; test_pubsub.py has what both clients do."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import redis.exceptions

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import PubSub, Redis, from_url
from tests.client.stored_cluster import StoredCluster, confirmed, next_of, on_both_loops

pytestmark = on_both_loops

SERVERS = ["s1", "s2", "s3"]

CHANGES: list[tuple[str, dict[str, Any]]] = [
    *(("move", {"to": server}) for server in SERVERS),
    ("replicate", {"mode": "all-publishers", "servers": SERVERS}),
    ("unreplicate", {"to": "s2"}),
]
"""What happens to a channel while it is used."""


async def test_is_subscribed_before_subscribe_first_yields(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        subscribing = pubsub.subscribe("c")
        before = pubsub.subscribed
        yielded: Any = subscribing.send(None)  # runs until it first yields
        assert (before, pubsub.subscribed) == (False, True)
        assert yielded is not None
        subscribing.close()


async def test_a_listener_learns_that_subscribe_failed(cluster: StoredCluster) -> None:
    for server in cluster.servers.values():
        server.kill()
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    subscribing = asyncio.create_task(pubsub.subscribe("c"))
    await asyncio.sleep(0)
    reading = asyncio.create_task(pubsub.get_message(timeout=None))
    outcomes = await asyncio.gather(subscribing, reading, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [redis.exceptions.ConnectionError] * 2
    assert not pubsub.subscribed
    await client.aclose()


async def test_a_reader_that_never_waits_lets_others_run(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe("c")
        while (message := await pubsub.get_message()) is None:
            pass
        assert message["type"] == "subscribe"
        publishing = asyncio.create_task(client.publish("c", "x"))
        while (message := await pubsub.get_message()) is None:
            pass
        assert message["data"] == b"x" and await publishing == 1


async def test_a_full_queue_does_not_starve_the_loop(cluster: StoredCluster) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "c")
        await asyncio.gather(*(client.publish("c", number) for number in range(2000)))
        await client.publish("c", "end")
        counting = asyncio.create_task(count())
        async for message in pubsub.listen():
            if message["data"] == b"end":
                break
        counting.cancel()
        await asyncio.wait({counting})
        assert turns >= 5


async def test_a_barrier_comes_behind_everything_from_before(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub(numbered=True) as pubsub:
        with pytest.raises(RuntimeError):
            pubsub.barrier("c")
        await confirmed(pubsub, "c")
        for number in range(3):
            await client.publish("c", number)
        pubsub.barrier("c")
        messages = [await next_of(pubsub) for _ in range(4)]
        assert [message["type"] for message in messages] == ["message"] * 3 + ["barrier"]
        payloads = [message["data"] for message in messages[:3]]
        assert payloads == [b"0", b"1", b"2"]
        assert len({payload.publisher for payload in payloads}) == 1
        assert [payload.number - payloads[0].number for payload in payloads] == [0, 1, 2]


async def test_barriers_hold_while_a_channel_moves(whole_cluster: LocalCluster) -> None:
    """What is published at the new server comes by way of the agents until the subscriber is there, too."""
    name = "barriers"
    received: list[int] = []

    def move() -> None:
        for command, arguments in CHANGES:
            whole_cluster.ask_balancer(command, {"channel": name.encode(), **arguments})

    url = whole_cluster.url
    async with from_url(url) as publisher, from_url(url) as client, client.pubsub(gaps=True) as pubsub:
        await confirmed(pubsub, name)
        moving = asyncio.create_task(asyncio.to_thread(move))
        rounds = 0
        while not moving.done():
            await publisher.publish(name, rounds)
            rounds += 1
            pubsub.barrier(name)
            while (message := await next_of(pubsub))["type"] != "barrier":
                received.append(int(message["data"]))
            assert received == list(range(rounds))
        await moving


async def test_run_calls_handlers_until_it_is_cancelled(cluster: StoredCluster) -> None:
    got = asyncio.Event()
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(c=lambda _: got.set())
        running = asyncio.create_task(cast("Any", pubsub).run(poll_timeout=0.05))
        while not await client.publish("c", "x"):  # noqa: ASYNC110  # `run` takes the acknowledgement
            await asyncio.sleep(0)
        await got.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        without = client.pubsub()
        await without.subscribe("without a handler")
        with pytest.raises(redis.exceptions.PubSubError, match="no handler"):
            await cast("Any", without).run()
        for deprecated in (cast("Any", without).reset, cast("Any", without).close):
            with pytest.deprecated_call():
                await deprecated()


async def test_a_reader_goes_on_when_the_client_is_closed_while_another_task_subscribes(cluster: StoredCluster) -> None:
    """The reader waits for messages then, and the other task is about to subscribe again."""
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    await confirmed(pubsub, "a")
    reading = asyncio.create_task(anext(message async for message in pubsub.listen() if message["type"] == "message"))
    await asyncio.sleep(0)
    subscribing = pubsub.subscribe("b")
    _, error, _ = await asyncio.gather(client.aclose(), subscribing, _close_later(client), return_exceptions=True)
    assert isinstance(error, redis.exceptions.ConnectionError)
    await cluster.until_subscribed(cluster.plan.ring.home(b"b"), "b")
    assert await client.publish("b", "x") == 1
    assert (await reading)["data"] == b"x"
    await pubsub.aclose()
    await client.aclose()


async def _close_later(client: Redis) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    await client.aclose()


async def test_a_reader_learns_that_another_task_cannot_subscribe_again(cluster: StoredCluster) -> None:
    client = from_url(cluster.url)
    pubsub = client.pubsub()
    await confirmed(pubsub, "a")
    reading = asyncio.create_task(next_of(pubsub))
    await asyncio.sleep(0)
    for server in cluster.servers.values():
        server.kill()
    _, *got = await asyncio.gather(client.aclose(), pubsub.subscribe("b"), reading, return_exceptions=True)
    assert [type(error) for error in got] == [redis.exceptions.ConnectionError] * 2


async def test_a_pubsub_that_is_closed_behind_its_client_lets_its_reader_go(cluster: StoredCluster) -> None:
    """As one that is closed before it: also while the reader is about to subscribe again."""
    for turns in range(20):
        client = from_url(cluster.url)
        pubsub = client.pubsub()
        await confirmed(pubsub, "a")
        reading = asyncio.create_task(_all(pubsub))
        await asyncio.sleep(0)
        await client.aclose()
        for _ in range(turns):
            await asyncio.sleep(0)
        await pubsub.aclose()
        assert {message["type"] for message in await reading} <= {"subscribe"}
        assert not pubsub.subscribed
        await client.aclose()


async def _all(pubsub: PubSub) -> list[dict[str, Any]]:
    return [message async for message in pubsub.listen()]


async def test_a_cancelled_reader_loses_nothing(cluster: StoredCluster) -> None:
    async with from_url(cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, "c")
        seen: list[bytes] = []
        publishing = asyncio.gather(*(client.publish("c", number) for number in range(200)))
        while len(seen) < 200:
            reading = asyncio.create_task(next_of(pubsub))
            await asyncio.wait({reading}, timeout=0.0005)
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                seen.append(reading.result()["data"])
        await publishing
        assert seen == [b"%d" % number for number in range(200)]
