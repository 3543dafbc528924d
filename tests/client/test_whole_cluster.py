"""The client on a whole cluster: real servers, agents and balancer as processes, channels that move."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis.asyncio

from dynamoth_cli.admin import ask_balancer
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import PubSub, Redis, from_url
from dynamoth_link.urls import parse_cluster_url
from tests.client.stored_cluster import run

MOVES = 6
PUBLISHERS = 5
SETTLE_TIMEOUT_S = 15.0


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[LocalCluster]:
    """Two servers, kept for all tests here: each uses channels of its own."""
    with LocalCluster(2, password="a password") as cluster:
        yield cluster


async def _move(cluster: LocalCluster, channel: str, to: str) -> None:
    """Move a channel, and return when the move has settled."""
    arguments = {"channel": channel.encode(), "to": to}
    await ask_balancer(parse_cluster_url(cluster.url), "move", arguments, timeout_s=SETTLE_TIMEOUT_S)


def _plain(cluster: LocalCluster, server: str) -> Any:
    return redis.asyncio.Redis(port=cluster.redis[server].port, password=cluster.password)


async def _next(pubsub: PubSub) -> dict[str, Any]:
    while True:
        message = await pubsub.get_message(timeout=None)
        if message is not None:
            return message


def _other(server: str) -> str:
    return "s2" if server == "s1" else "s1"


def test_agents_are_not_counted_as_receivers(whole_cluster: LocalCluster) -> None:
    async def test() -> None:
        async with from_url(whole_cluster.url) as client, client.pubsub() as pubsub:
            for number in range(10):
                assert await client.publish(f"counted-{number}", "nobody") == 0
            await pubsub.subscribe(*(f"counted-{number}" for number in range(10)))
            for number in range(10):
                assert (await _next(pubsub))["data"] == number + 1
            for number in range(10):
                assert await client.publish(f"counted-{number}", "one") == 1

    run(test())


def test_moves_lose_repeat_and_reorder_nothing(whole_cluster: LocalCluster) -> None:
    channel = "moving"

    async def publish(client: Redis, name: int, stop: asyncio.Event) -> int:
        number = 0
        while not stop.is_set():
            await client.publish(channel, f"{name} {number}")
            number += 1
            await asyncio.sleep(0.002)
        return number

    async def read(pubsub: PubSub) -> dict[int, list[int]]:
        seen: dict[int, list[int]] = {name: [] for name in range(PUBLISHERS)}
        ends = 0
        async for message in pubsub.listen():
            assert message["type"] != "gap", message
            if message["data"] == b"end":
                ends += 1
                if ends == PUBLISHERS:
                    break
            elif message["type"] == "message":
                name, number = message["data"].split()
                seen[int(name)].append(int(number))
        return seen

    async def test() -> None:
        publishers = [from_url(whole_cluster.url) for _ in range(PUBLISHERS)]
        async with from_url(whole_cluster.url) as client:
            pubsubs = [client.pubsub(gaps=True) for _ in range(3)]
            for pubsub in pubsubs:
                await pubsub.subscribe(channel)
                assert (await _next(pubsub))["type"] == "subscribe"
            readers = [asyncio.create_task(read(pubsub)) for pubsub in pubsubs]
            stop = asyncio.Event()
            publishing = [asyncio.create_task(publish(one, name, stop)) for name, one in enumerate(publishers)]
            home = (await client.plan(channel)).servers[0]
            for move in range(MOVES):
                await _move(whole_cluster, channel, _other(home) if move % 2 == 0 else home)
            stop.set()
            counts = await asyncio.gather(*publishing)
            for one in publishers:
                await one.publish(channel, "end")
                assert (await one.plan(channel)).epoch > 0
            for seen in await asyncio.gather(*readers):
                assert seen == {name: list(range(count)) for name, count in enumerate(counts)}
            assert min(counts) > 10
            for one in publishers:
                await one.aclose()

    run(test())


def test_plain_redis_clients_beside_it_are_forwarded(whole_cluster: LocalCluster) -> None:
    channel = "also raw"

    async def test() -> None:
        async with from_url(whole_cluster.url) as client, client.pubsub() as pubsub:
            home = (await client.plan(channel)).servers[0]
            await _move(whole_cluster, channel, _other(home))
            await pubsub.subscribe(channel)
            assert (await _next(pubsub))["type"] == "subscribe"
            for server in (home, _other(home)):
                async with _plain(whole_cluster, server) as plain:
                    await plain.publish(channel, f"raw at {server}")
                assert (await _next(pubsub))["data"] == f"raw at {server}".encode()
            pipeline: Any = client.pipeline()
            pipeline.set("key", 1).publish(channel, "of a pipeline")
            await pipeline.execute()
            assert (await _next(pubsub))["data"] == b"of a pipeline"

    run(test())


@pytest.mark.filterwarnings("ignore::dynamoth_client.asyncio.GuaranteesOff")
def test_plain_payloads_find_a_moved_channel(whole_cluster: LocalCluster) -> None:
    channel = "plain payloads"

    async def test() -> None:
        async with from_url(whole_cluster.url, envelope=False) as client:
            home = (await client.plan(channel)).servers[0]
            await _move(whole_cluster, channel, _other(home))
            async with _plain(whole_cluster, _other(home)) as plain, plain.pubsub() as pubsub:
                await pubsub.subscribe(channel)
                assert (await pubsub.get_message(timeout=None))["type"] == "subscribe"
                while await client.publish(channel, "hello") != 1:  # noqa: ASYNC110  # until it has read the stored plan
                    await asyncio.sleep(0.01)
                while (message := await pubsub.get_message(timeout=None))["data"] != b"hello":
                    assert message["type"] == "message"

    run(test())


def test_a_client_whose_server_restarts_goes_on(whole_cluster: LocalCluster) -> None:
    async def test() -> None:
        async with from_url(whole_cluster.url) as client, client.pubsub(gaps=True) as pubsub:
            number = 0
            while (await client.plan(channel := f"restarted-{number}")).servers != ("s2",):
                number += 1
            await pubsub.subscribe(channel)
            assert (await _next(pubsub))["type"] == "subscribe"
            whole_cluster.restart_redis("s2")  # from this thread: a server ends with the thread that started it
            gap = await _next(pubsub)
            assert (gap["type"], gap["channel"]) == ("gap", channel.encode())
            await client.publish(channel, "back")
            assert (await _next(pubsub))["data"] == b"back"

    run(test())
