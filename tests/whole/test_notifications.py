"""A server that publishes keyspace notifications: its agent leaves them out, while it goes on with everything else."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import redis

from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_dispatcher.observation import QUIET_PATTERNS
from tests.whole.harness import PlainListener, Traffic, channels_at, move, until

KEY = b"counter"
EVENTS = (b"__keyspace@0__:" + KEY, b"__keyevent@0__:set")
SETS_PER_S = 500


@contextmanager
def keys_change(port: int) -> Generator[list[int]]:
    """Change a key at a steady rate; the list has one item for each time."""
    over = threading.Event()
    done: list[int] = []
    client: Any = redis.Redis(port=port)  # redis-py is typed in part

    def change() -> None:
        while not over.wait(1 / SETS_PER_S):
            client.set(KEY, len(done))
            done.append(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
        client.close()


def receivers(cluster: LocalCluster, channel: bytes) -> int:
    [count] = cluster.ask("s1", (b"PUBLISH", channel, b"x"))
    assert isinstance(count, int)
    return count


def patterns(cluster: LocalCluster) -> int:
    [count] = cluster.ask("s1", (b"PUBSUB", b"NUMPAT"))
    assert isinstance(count, int)
    return count


def test_an_agent_receives_no_keyspace_notification_and_is_one_receiver_of_all_else() -> None:
    moving, quiet = channels_at("s1", 2)
    names = [quiet, b"_", b"__", b"__key", b"__keys", b"__keyspace", b"__keyevent", b"__keyspace:x", b"__kez", b"x"]
    with LocalCluster(2) as cluster, Traffic(cluster, [moving], plain=["s1"], interval_s=0.005) as traffic:
        assert patterns(cluster) == 1
        port = cluster.redis["s1"].port
        with keys_change(port) as changes:
            move(cluster, moving, "s2")
            cluster.ask("s1", (b"CONFIG", b"SET", b"notify-keyspace-events", b"KEA"))
            until(lambda: patterns(cluster) == len(QUIET_PATTERNS), "the agent leaves them out")
            assert [receivers(cluster, event) for event in EVENTS] == [0, 0]
            assert [receivers(cluster, name) for name in names] == [1] * len(names)
            before = len(changes)
            until(lambda: len(changes) > before + 200, "keys change", 0.05)
            assert patterns(cluster) == len(QUIET_PATTERNS)
            traffic.flows()
            traffic.finish()
            with PlainListener(cluster, "s1", [quiet]):
                assert receivers(cluster, quiet) == 2, "the agent, and this subscriber"
            [killed] = [line for line in clients(cluster) if "name=dynamoth-agent:" in line]
            cluster.ask("s1", (b"CLIENT", b"KILL", b"ID", killed.split()[0].removeprefix("id=").encode()))
            until(lambda: any(new_agent(line, killed) for line in clients(cluster)), "the agent is back")
            assert patterns(cluster) == len(QUIET_PATTERNS), "it begins without them"
            assert [receivers(cluster, event) for event in EVENTS] == [0, 0]


def clients(cluster: LocalCluster) -> list[str]:
    [text] = cluster.ask("s1", (b"CLIENT", b"LIST"))
    assert isinstance(text, bytes)
    return text.decode().splitlines()


def new_agent(line: str, old: str) -> bool:
    return (
        "name=dynamoth-agent:" in line and f"psub={len(QUIET_PATTERNS)} " in line and line.split()[0] != old.split()[0]
    )
