"""A server that freezes, or dies, and a reader that stops reading: everybody else goes on, in bounded time (G4, G5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import dynamoth_client
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client.asyncio import PubSub, from_url
from dynamoth_link.options import LinkOptions
from tests.whole.harness import PATIENCE_S, channels_at, move, stored_entry

DETECTION_S = 5.0
"""In which a server that freezes is found by default: see the options of links."""

GO_ON_S_MAX = 1.5
"""How long after that a subscriber may be without messages: it goes to another replica after 0.2 s, and holds what has
come there for 0.5 s, as earlier messages are missing. The others show how much longer everything takes on a busy
machine."""

PUBLISH_INTERVAL_S = 0.02

LISTENERS_MIN = 2
"""At either replica."""

STAYS = {"balancer.replicas_max": 1}
"""What is replicated stays so, however little traffic there is."""


def listeners_at(cluster: LocalCluster, server: str, channel: bytes) -> int:
    """Return how many are subscribed to the replica of a channel at a server."""
    entry = stored_entry(cluster, server, channel)
    assert entry is not None
    [physical] = {location.physical for location in entry.route.locations(channel)}
    [[_, count]] = cluster.ask(server, (b"PUBSUB", b"NUMSUB", physical))
    return int(count)


def longest_silence_s(arrivals: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(arrivals))


@pytest.mark.parametrize(("freezes", "known_s"), [(True, DETECTION_S), (False, 0.0)])
def test_subscribers_of_a_replica_that_freezes_or_dies_go_on_at_another(freezes: bool, known_s: float) -> None:
    """ALL_PUBLISHERS: each has all messages. A publisher goes on all the while."""
    assert LinkOptions().ping_interval_s + LinkOptions().ping_timeout_s < DETECTION_S
    [channel] = channels_at("s1", 1, servers=3)
    arrivals: dict[int, list[float]] = {}
    gaps: dict[int, float] = {}
    at_s2: set[int] = set()

    async def listen(number: int, pubsub: PubSub) -> None:
        async for message in pubsub.listen():
            if message["type"] == "gap":
                gaps[number] = time.monotonic()
            elif message["type"] == "message":
                arrivals.setdefault(number, []).append(time.monotonic())

    async def publish(client: Any, is_enough: Callable[[], bool]) -> None:
        count = 0
        publishing: set[asyncio.Task[int]] = set()
        while not is_enough():
            publishing.add(asyncio.create_task(client.publish(channel, b"%d" % count)))
            count += 1
            await asyncio.sleep(PUBLISH_INTERVAL_S)
        await asyncio.gather(*publishing)

    async def join(client: Any, cluster: LocalCluster) -> list[PubSub]:
        """Subscribe until some listen at either replica, which they choose at random; note who listens at s2."""
        pubsubs: list[PubSub] = []
        while min(len(at_s2), len(pubsubs) - len(at_s2)) < LISTENERS_MIN:
            pubsubs.append(client.pubsub(gaps=True))
            await pubsubs[-1].subscribe(channel)
            if await asyncio.to_thread(listeners_at, cluster, "s2", channel) > len(at_s2):
                at_s2.add(len(pubsubs) - 1)
        return pubsubs

    def go_on() -> bool:
        """Tell whether all that were at s2 have had messages behind their gap."""
        return gaps.keys() >= at_s2 and all(arrivals[number][-1] > gaps[number] for number in at_s2)

    async def test(cluster: LocalCluster) -> None:
        async with from_url(cluster.url) as client:
            pubsubs = await join(client, cluster)
            listening = [asyncio.create_task(listen(*each)) for each in enumerate(pubsubs)]
            await publish(client, lambda: len(arrivals) == len(pubsubs) and min(map(len, arrivals.values())) > 10)
            publishing = asyncio.create_task(publish(client, go_on))
            cluster.redis["s2"].pause() if freezes else cluster.redis["s2"].kill()
            await publishing
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    with LocalCluster(3, settings=STAYS) as cluster:
        cluster.ask_balancer("replicate", {"channel": channel, "mode": "all-publishers", "servers": ["s2", "s3"]})
        try:
            asyncio.run(asyncio.wait_for(test(cluster), PATIENCE_S))
        finally:
            if freezes:
                cluster.redis["s2"].resume()
    assert gaps.keys() == at_s2
    silences = {number: longest_silence_s(times) for number, times in arrivals.items()}
    undisturbed_s = max(silence_s for number, silence_s in silences.items() if number not in at_s2)
    longest_s = max(silences[number] for number in at_s2)
    assert undisturbed_s < longest_s < known_s + GO_ON_S_MAX + undisturbed_s, silences


def test_a_publisher_whose_old_server_hangs_finds_its_channel_before_that_is_known() -> None:
    """It asks another server when a message has had no answer for a second and a half."""
    [channel] = channels_at("s1", 1)

    async def test(cluster: LocalCluster) -> float:
        async with from_url(cluster.url) as publisher, from_url(cluster.url) as client, client.pubsub() as pubsub:
            await publisher.publish(channel, b"before")
            await asyncio.to_thread(move, cluster, channel, "s2")
            await pubsub.subscribe(channel)
            cluster.redis["s1"].pause()
            began_at = time.monotonic()
            assert await publisher.publish(channel, b"after") == 1
            took_s = time.monotonic() - began_at
            messages = [await pubsub.get_message(timeout=PATIENCE_S) for _ in range(2)]
            assert [message["data"] for message in messages if message] == [1, b"after"]
            return took_s

    with LocalCluster(2) as cluster:
        try:
            took_s = asyncio.run(asyncio.wait_for(test(cluster), PATIENCE_S))
        finally:
            cluster.redis["s1"].resume()
    assert took_s < DETECTION_S - 1.0


def test_a_reader_that_has_stopped_does_not_keep_its_channel_from_moving() -> None:
    """Its queue has been full for long when the channel moves, twice; nothing is lost, as it fits behind the queue."""
    [channel] = channels_at("s1", 1)
    count, bound = 5000, 50

    async def publish(url: str, numbers: range) -> None:
        async with from_url(url) as client:
            await asyncio.gather(*(client.publish(channel, b"%d" % number) for number in numbers))

    with (
        LocalCluster(2) as cluster,
        dynamoth_client.from_url(cluster.url) as client,
        client.pubsub(max_queue=bound, gaps=True) as stopped,
        client.pubsub(gaps=True) as other,
    ):
        for pubsub in (stopped, other):
            pubsub.subscribe(channel)
        asyncio.run(publish(cluster.url, range(count)))
        move(cluster, channel, "s2")
        asyncio.run(publish(cluster.url, range(count, count + 10)))
        move(cluster, channel, "s1")
        asyncio.run(publish(cluster.url, range(count + 10, count + 20)))
        for pubsub in (other, stopped):
            got = [message for _ in range(count + 21) if (message := pubsub.get_message(timeout=PATIENCE_S))]
            assert got[0]["type"] == "subscribe"
            assert [message["data"] for message in got[1:]] == [b"%d" % number for number in range(count + 20)]
