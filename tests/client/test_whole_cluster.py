"""Both clients on a whole cluster: real servers, agents and balancer as processes, channels that move."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import redis.asyncio

import dynamoth_client
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import from_url
from tests.client.both_clients import Connect
from tests.client.stored_cluster import confirmed, next_of
from tests.client.sync_helpers import PATIENCE_S, Running
from tests.client.sync_helpers import confirmed as confirmed_sync
from tests.client.sync_helpers import next_of as next_sync
from tests.whole.harness import channels_at, move

MOVES = 5
PUBLISHERS = 4
READERS = 3

AHEAD_MAX = 100
"""How far a publisher may be ahead of each reader. Publishers that take all of a busy machine's processor time leave
none for the agent that forwards: messages that come later than ``hold_s_max`` are rightly reported as a gap."""


def _channel_at(server: str, number: int) -> str:
    """Return a channel at home at a server, another one for each test."""
    return channels_at(server, number + 1, servers=3)[-1].decode()


def _urls(cluster: LocalCluster) -> list[str]:
    return [server.url for server in cluster.redis.values()]


def _plain(cluster: LocalCluster, server: str) -> Any:
    return redis.asyncio.Redis(port=cluster.redis[server].port, password=cluster.password)


def test_agents_are_not_counted_as_receivers(whole_cluster: LocalCluster, connect: Connect) -> None:
    channels = [f"counted-{number}" for number in range(10)]
    with connect(_urls(whole_cluster)) as client:
        for channel in channels:
            assert client.publish(channel, "nobody") == 0
        pubsub = client.pubsub()
        confirmed_sync(pubsub, *channels)
        for channel in channels:
            assert client.publish(channel, "one") == 1


def test_moves_lose_repeat_and_reorder_nothing_of_the_synchronous_client(whole_cluster: LocalCluster) -> None:
    channel = _channel_at("s1", 1)
    stop: list[None] = []
    room = [[threading.Semaphore(AHEAD_MAX) for _ in range(READERS)] for _ in range(PUBLISHERS)]

    def publish(client: dynamoth_client.Redis, name: int) -> int:
        number = 0
        while not stop and all(each.acquire(timeout=PATIENCE_S) for each in room[name]):
            client.publish(channel, f"{name} {number}")
            number += 1
        return number

    def read(pubsub: dynamoth_client.PubSub, reader: int) -> list[list[int]]:
        """Return the numbers of each publisher's messages, until each has ended."""
        seen: list[list[int]] = [[] for _ in range(PUBLISHERS)]
        ends = 0
        while ends < PUBLISHERS:
            message = next_sync(pubsub)
            assert message["type"] == "message", message
            if message["data"] == b"end":
                ends += 1
                continue
            name, number = map(int, message["data"].split())
            seen[name].append(number)
            room[name][reader].release()
        return seen

    clients = [dynamoth_client.from_url(whole_cluster.url) for _ in range(PUBLISHERS)]
    with dynamoth_client.from_url(whole_cluster.url) as client:
        pubsubs = [client.pubsub(gaps=True), client.pubsub(gaps=True), clients[0].pubsub(gaps=True)]
        for pubsub in pubsubs:
            confirmed_sync(pubsub, channel)
        reading = [Running(read, pubsub, reader) for reader, pubsub in enumerate(pubsubs)]
        publishing = [Running(publish, one, name) for name, one in enumerate(clients)]
        for number in range(MOVES):
            move(whole_cluster, channel.encode(), "s1" if number % 2 else "s2")
        stop.append(None)
        counts = [one.result() for one in publishing]
        for one in clients:
            one.publish(channel, "end")
            assert one.plan(channel).epoch > 0
        for each in reading:
            assert each.result() == [list(range(count)) for count in counts]
        assert min(counts) > 10
    for one in clients:
        one.close()


def test_a_move_is_followed_while_the_application_does_something_else(whole_cluster: LocalCluster) -> None:
    """Settling needs the subscriber to leave the old server: nobody calls it meanwhile."""
    channel = _channel_at("s1", 2)
    with dynamoth_client.from_url(whole_cluster.url) as client, client.pubsub(gaps=True) as pubsub:
        confirmed_sync(pubsub, channel)
        move(whole_cluster, channel.encode(), "s2")
        client.publish(channel, "moved")
        assert next_sync(pubsub)["data"] == b"moved"


async def test_plain_redis_clients_beside_it_are_forwarded(whole_cluster: LocalCluster) -> None:
    channel = _channel_at("s1", 3)
    await asyncio.to_thread(move, whole_cluster, channel.encode(), "s2")
    async with from_url(whole_cluster.url) as client, client.pubsub() as pubsub:
        await confirmed(pubsub, channel)
        for server in ("s1", "s2"):
            async with _plain(whole_cluster, server) as plain:
                await plain.publish(channel, f"raw at {server}")
            assert (await next_of(pubsub))["data"] == f"raw at {server}".encode()


def test_a_pipeline_s_publish_is_forwarded(whole_cluster: LocalCluster, connect: Connect) -> None:
    """Pipelines go to the first server, and the channel is at another one."""
    channel = _channel_at("s2", 0)
    with connect(_urls(whole_cluster)) as client, client.pubsub() as pubsub:
        confirmed_sync(pubsub, channel)
        for transaction in (True, False):
            pipeline = client.pipeline(transaction)
            pipeline.set("key", 1)
            pipeline.publish(channel, "raw")
            pipeline.execute()
        assert [next_sync(pubsub)["data"] for _ in range(2)] == [b"raw"] * 2


@pytest.mark.filterwarnings("ignore::dynamoth_client.asyncio.GuaranteesOff")
async def test_plain_payloads_find_a_moved_channel(whole_cluster: LocalCluster) -> None:
    channel = _channel_at("s1", 4)
    async with from_url(whole_cluster.url, envelope=False) as client:
        assert (await client.plan(channel)).servers == ("s1",)
        await asyncio.to_thread(move, whole_cluster, channel.encode(), "s2")
        async with _plain(whole_cluster, "s2") as plain, plain.pubsub() as pubsub:
            await pubsub.subscribe(channel)
            assert (await pubsub.get_message(timeout=None))["type"] == "subscribe"
            while await client.publish(channel, "hello") != 1:  # noqa: ASYNC110  # until it has read the stored plan
                await asyncio.sleep(0.01)
            while (message := await pubsub.get_message(timeout=None))["data"] != b"hello":
                assert message["type"] == "message"


async def test_a_client_whose_server_restarts_goes_on(whole_cluster: LocalCluster) -> None:
    channel = _channel_at("s2", 1)
    async with from_url(whole_cluster.url) as client, client.pubsub(gaps=True) as pubsub:
        await confirmed(pubsub, channel)
        whole_cluster.restart_redis("s2")  # from this thread: a server ends with the thread that started it
        gap = await next_of(pubsub)
        assert (gap["type"], gap["channel"]) == ("gap", channel.encode())
        await client.publish(channel, "back")
        assert (await next_of(pubsub))["data"] == b"back"
    await asyncio.to_thread(whole_cluster.wait_ready)
