"""A client that was written from ``docs/protocol.md`` alone shares a channel with ours while that moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import dynamoth_client
from dynamoth_cli.local.cluster import LocalCluster
from tests.docs.second_runtime import Publisher, Subscriber, turn

CHANNEL = b"news"
PUBLISHER, SUBSCRIBER = 0x0123456789ABCDEF, 0x0FEDCBA987654321

INTERVAL_S = 0.004
"""Between two messages of a publisher."""

TIMEOUT_S = 30.0

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("move", {"to": "s1"}),
    ("move", {"to": "s2"}),
    ("replicate", {"mode": "all-subscribers", "servers": ["s1", "s2"]}),
    ("replicate", {"mode": "all-publishers", "servers": ["s1", "s2"]}),
    ("unreplicate", {"to": "s1"}),
]


def test_it_shares_a_channel_that_moves() -> None:
    """Each of two publishers, theirs and ours, reaches each of two subscribers: everything, once and in order."""
    sent: list[bytes] = []
    received: list[bytes] = []
    gaps: list[object] = []
    with (
        LocalCluster(2) as cluster,
        closing(Publisher(PUBLISHER, f"redis://127.0.0.1:{cluster.redis['s1'].port}", CHANNEL)) as publisher,
        closing(Subscriber(SUBSCRIBER, f"redis://127.0.0.1:{cluster.redis['s2'].port}", CHANNEL)) as subscriber,
        closing(dynamoth_client.from_url(cluster.url)) as client,
        closing(client.pubsub(ignore_subscribe_messages=True, on_gap=gaps.append)) as pubsub,
        ThreadPoolExecutor(1) as operator,
    ):

        def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
            deadline = time.monotonic() + timeout_s
            while not condition():
                assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {subscriber.targets}"
                turn(publisher, subscriber)
                message = pubsub.get_message() if pubsub.subscribed else None
                if message is not None:
                    received.append(message["data"])

        def publish() -> None:
            sent.append(b"%d" % len(sent))
            publisher.publish(b"theirs " + sent[-1])
            client.publish(CHANNEL, b"ours " + sent[-1])
            at = time.monotonic() + INTERVAL_S
            until(lambda: time.monotonic() >= at)

        until(lambda: subscriber.confirmed_at is not None)
        pubsub.subscribe(CHANNEL)
        publish()
        for command, arguments in CHANGES:
            asked: Future[Any] = operator.submit(cluster.ask_balancer, command, {"channel": CHANNEL, **arguments})
            while not asked.done():
                publish()
            asked.result()
        publish()
        until(lambda: sum(map(len, subscriber.delivered.values())) == len(received) == 2 * len(sent))

    theirs, ours = ([kind + number for number in sent] for kind in (b"theirs ", b"ours "))
    assert subscriber.delivered.pop(PUBLISHER) == theirs
    assert [*subscriber.delivered.values()] == [ours]
    assert [payload for payload in received if payload.startswith(b"theirs")] == theirs
    assert [payload for payload in received if payload.startswith(b"ours")] == ours
    assert gaps == []
    assert (subscriber.targets, subscriber.leaving) == ({("s1", CHANNEL): True}, {})
    assert publisher.receivers == 2
