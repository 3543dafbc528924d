"""Both clients on a whole cluster: real servers, agents and balancer as processes, channels that move."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

import dynamoth_client
from dynamoth.names import sharded_channel
from dynamoth_cli.local.cluster import LocalCluster
from tests.client.both_clients import Connect
from tests.client.sync_helpers import PATIENCE_S, Running, confirmed, next_of, until
from tests.whole.harness import channels_at, move

pytestmark = pytest.mark.usefixtures("patient_subscribers")

SERVERS = ["s1", "s2", "s3"]

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("replicate", {"mode": "all-publishers", "servers": SERVERS}),
    ("unreplicate", {"to": "s2"}),
    ("replicate", {"mode": "all-subscribers", "servers": SERVERS}),
    ("unreplicate", {"to": "s1"}),
    ("move", {"to": "s3"}),
]
"""What happens to a channel while it is used."""

KINDS = {
    "channel": ("subscribe", "publish", "message"),
    "pattern": ("psubscribe", "publish", "pmessage"),
    "sharded": ("ssubscribe", "spublish", "smessage"),
}

PUBLISHERS = 3
READERS = 2

AHEAD_MAX = 100
"""How far a publisher may be ahead of each reader. Publishers that take all of a busy machine's processor time leave
none for the agent that forwards: messages that come later than ``hold_s_max`` are rightly reported as a gap."""


def _channel_at(server: str, number: int) -> str:
    """Return a channel at home at a server, another one for each test."""
    return channels_at(server, number + 1, servers=len(SERVERS))[-1].decode()


def _urls(cluster: LocalCluster) -> list[str]:
    return [server.url for server in cluster.redis.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_moves_and_splits_lose_repeat_and_reorder_nothing(whole_cluster: LocalCluster, kind: str) -> None:
    """tests/whole has the same with the asynchronous client, and failures."""
    subscribe, publish_by, message_type = KINDS[kind]
    name = f"{kind}:moves".encode()
    raw = sharded_channel(name) if kind == "sharded" else name
    stop = threading.Event()
    room = [[threading.Semaphore(AHEAD_MAX) for _ in range(READERS)] for _ in range(PUBLISHERS)]

    def publish(client: Any, publisher: int) -> int:
        number = 0
        while not stop.is_set() and all(each.acquire(timeout=PATIENCE_S) for each in room[publisher]):
            getattr(client, publish_by)(name, f"{publisher} {number}")
            number += 1
        return number

    def read(pubsub: dynamoth_client.PubSub, reader: int) -> list[list[int]]:
        """Return the numbers of each publisher's messages, until each has ended."""
        seen: list[list[int]] = [[] for _ in range(PUBLISHERS)]
        ends = 0
        while ends < PUBLISHERS:
            message = next_of(pubsub)
            assert (message["type"], message["channel"]) == (message_type, name), message
            if message["data"] == b"end":
                ends += 1
                continue
            publisher, number = map(int, message["data"].split())
            seen[publisher].append(number)
            room[publisher][reader].release()
        return seen

    clients: list[Any] = [dynamoth_client.from_url(whole_cluster.url) for _ in range(PUBLISHERS)]
    with dynamoth_client.from_url(whole_cluster.url) as client, client.pubsub(gaps=True) as others:
        pubsubs = [client.pubsub(gaps=True), clients[0].pubsub(gaps=True)]
        for pubsub in pubsubs:
            getattr(pubsub, subscribe)(b"pattern:*" if kind == "pattern" else name)
            assert next_of(pubsub)["type"] == subscribe
        others.psubscribe("nothing*" if kind == "pattern" else "[^c]*")
        assert next_of(others)["type"] == "psubscribe"
        reading = [Running(read, pubsub, reader) for reader, pubsub in enumerate(pubsubs)]
        publishing = [Running(publish, one, number) for number, one in enumerate(clients)]
        for command, arguments in CHANGES:
            whole_cluster.ask_balancer(command, {"channel": raw, **arguments})
        stop.set()
        counts = [one.result() for one in publishing]
        for one in clients:
            assert getattr(one, publish_by)(name, "end") == READERS
            assert one.plan(raw).epoch > 0
        for each in reading:
            assert each.result() == [list(range(count)) for count in counts]
        assert min(counts) > 10
        assert others.get_message() is None, "others hear nothing of it, as of a sharded channel by a pattern"
    for one in clients:
        one.close()


def test_a_move_is_followed_while_the_application_does_something_else(whole_cluster: LocalCluster) -> None:
    """Settling needs the subscriber to leave the old server: nobody calls it meanwhile."""
    channel = _channel_at("s1", 2)
    with dynamoth_client.from_url(whole_cluster.url) as client, client.pubsub(gaps=True) as pubsub:
        confirmed(pubsub, channel)
        move(whole_cluster, channel.encode(), "s2")
        client.publish(channel, "moved")
        assert next_of(pubsub)["data"] == b"moved"


@pytest.mark.parametrize(("subscribe", "publish"), [("subscribe", "publish"), ("ssubscribe", "spublish")])
def test_what_a_pipeline_publishes_is_forwarded(
    whole_cluster: LocalCluster, connect: Connect, subscribe: str, publish: str
) -> None:
    """Pipelines go to the first server, and the channel is at another one."""
    channel = _channel_at("s2", 0).encode()
    move(whole_cluster, sharded_channel(channel) if publish == "spublish" else channel, "s2")
    with connect(_urls(whole_cluster)) as client, client.pubsub() as pubsub:
        getattr(pubsub, subscribe)(channel)
        assert next_of(pubsub)["type"] == subscribe
        for transaction in (True, False):
            pipeline = client.pipeline(transaction)
            pipeline.set("key", 1)
            getattr(pipeline, publish)(channel, "raw")
            pipeline.execute_command(publish.upper(), channel, "by name")
            pipeline.execute()
        assert [next_of(pubsub)["data"] for _ in range(4)] == [b"raw", b"by name"] * 2


@pytest.mark.filterwarnings("ignore::dynamoth_client.asyncio.GuaranteesOff")
def test_plain_payloads_find_a_moved_channel(whole_cluster: LocalCluster) -> None:
    channel = _channel_at("s1", 4)
    with dynamoth_client.from_url(whole_cluster.url, envelope=False) as client:
        assert client.plan(channel).servers == ("s1",)
        move(whole_cluster, channel.encode(), "s2")
        plain: Any = redis.Redis(port=whole_cluster.redis["s2"].port, password=whole_cluster.password)
        with plain, plain.pubsub() as pubsub:
            confirmed(pubsub, channel)
            until(lambda: client.publish(channel, "hello") == 1, "it has read the stored plan")
            until(lambda: next_of(pubsub)["data"] == b"hello", "it comes, behind what was forwarded before")
