"""The synchronous client on a whole cluster: real servers, agents and balancer as processes, channels that move."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

import dynamoth_client as redis
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_client import PubSub
from tests.client.sync_helpers import PATIENCE_S, Running, confirmed, next_of

MOVES = 4
PUBLISHERS = 3
READERS = 3

AHEAD_MAX = 100
"""How far a publisher may be ahead of each reader. Publishers that take all of a busy machine's processor time leave
none for the agent that forwards: messages that come later than ``hold_s_max`` are rightly reported as a gap."""


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[LocalCluster]:
    """Two servers, kept for all tests here: each uses channels of its own."""
    with LocalCluster(2) as cluster:
        yield cluster


def _move(cluster: LocalCluster, channel: str, to: str) -> None:
    """Move a channel, and return when the move has settled."""
    assert cluster.ask_balancer("move", {"channel": channel.encode(), "to": to})["to"] == to


def _other(server: str) -> str:
    return "s2" if server == "s1" else "s1"


def test_listeners_and_publishers_while_their_channel_moves(whole_cluster: LocalCluster) -> None:
    channel = "moving"
    stop: list[None] = []
    room = [[threading.Semaphore(AHEAD_MAX) for _ in range(READERS)] for _ in range(PUBLISHERS)]

    def publish(client: redis.Redis, name: int) -> int:
        number = 0
        while not stop and all(each.acquire(timeout=PATIENCE_S) for each in room[name]):
            client.publish(channel, f"{name} {number}")
            number += 1
        return number

    def read(pubsub: PubSub, reader: int) -> dict[int, list[int]]:
        seen: dict[int, list[int]] = {name: [] for name in range(PUBLISHERS)}
        ends = 0
        for message in pubsub.listen():
            assert message["type"] == "message", message
            if message["data"] == b"end":
                ends += 1
                if ends == PUBLISHERS:
                    break
            else:
                name, number = message["data"].split()
                seen[int(name)].append(int(number))
                room[int(name)][reader].release()
        return seen

    clients = [redis.from_url(whole_cluster.url) for _ in range(PUBLISHERS)]
    with redis.from_url(whole_cluster.url) as client:
        pubsubs: list[PubSub] = [client.pubsub(gaps=True), client.pubsub(gaps=True), clients[0].pubsub(gaps=True)]
        for pubsub in pubsubs:
            confirmed(pubsub, channel)
        reading = [Running(read, pubsub, reader) for reader, pubsub in enumerate(pubsubs)]
        publishing = [Running(publish, one, name) for name, one in enumerate(clients)]
        home = client.plan(channel).servers[0]
        for move in range(MOVES):
            _move(whole_cluster, channel, _other(home) if move % 2 == 0 else home)
        stop.append(None)
        counts = [one.result() for one in publishing]
        for one in clients:
            one.publish(channel, "end")
            assert one.plan(channel).epoch > 0
        for each in reading:
            assert each.result() == {name: list(range(count)) for name, count in enumerate(counts)}
        assert min(counts) > 10
    for one in clients:
        one.close()


def test_a_move_is_followed_while_the_application_does_something_else(whole_cluster: LocalCluster) -> None:
    """Settling needs the subscriber to leave the old server: nobody calls it meanwhile."""
    channel = "followed"
    with redis.from_url(whole_cluster.url) as client, client.pubsub(gaps=True) as pubsub:
        confirmed(pubsub, channel)
        home = client.plan(channel).servers[0]
        _move(whole_cluster, channel, _other(home))
        client.publish(channel, "moved")
        assert next_of(pubsub)["data"] == b"moved"


def test_agents_are_not_counted_as_receivers(whole_cluster: LocalCluster) -> None:
    with redis.from_url(whole_cluster.url) as client, client.pubsub() as pubsub:
        assert client.publish("counted", "nobody") == 0
        confirmed(pubsub, "counted")
        assert client.publish("counted", "one") == 1


def test_a_pipeline_s_publish_is_forwarded(whole_cluster: LocalCluster) -> None:
    channel = "of a pipeline"
    with redis.from_url(whole_cluster.url) as client, client.pubsub() as pubsub:
        _move(whole_cluster, channel, _other(client.plan(channel).servers[0]))
        confirmed(pubsub, channel)
        for transaction in (True, False):
            pipeline = cast("Any", client).pipeline(transaction)
            pipeline.set("key", 1).publish(channel, "raw").execute()
        assert [next_of(pubsub)["data"] for _ in range(2)] == [b"raw"] * 2
