"""What applications of redis-py do besides the usual, with both clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.exceptions

from tests.client.both_clients import Use, with_client
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S, next_of
from tests.client.versions import REDIS_PY

__all__ = ["with_client"]

# Channels of one server.

MEANT_FOR_ONE_SERVER = ("__key*__:*", "__keyevent@0__:*", "__k?yspace@0__:a", "[_]_keyspace@*", "__key*", "__redis__:*")
OTHERS = ("*", "_*", "__k*", "__keys:*", "__keyspace", "__k?ys", "*space@*", "__red*", "key*")


@pytest.mark.parametrize("pattern", MEANT_FOR_ONE_SERVER)
def test_patterns_that_are_meant_for_one_server_are_refused(
    cluster: StoredCluster, with_client: Use, pattern: str
) -> None:
    def use(client: Any) -> None:
        pubsub = client.pubsub()
        family = "redis.asyncio" if hasattr(client, "aclose") else "redis"
        with pytest.raises(redis.exceptions.DataError, match=rf"belongs to one server.* {family}\.client\.PubSub\("):
            pubsub.psubscribe(pattern)
        assert not pubsub.subscribed

    with_client(cluster.hosts, use)


def test_other_patterns_are_not(cluster: StoredCluster, with_client: Use) -> None:
    def use(client: Any) -> None:
        pubsub = client.pubsub()
        pubsub.psubscribe(*OTHERS)
        assert [next_of(pubsub)["channel"] for _ in OTHERS] == [pattern.encode() for pattern in OTHERS]

    with_client(cluster.hosts, use)


@pytest.mark.skipif(REDIS_PY < (8,), reason="this redis-py has no keyspace_notifications")
def test_keyspace_notifications_are_those_of_the_first_server(cluster: StoredCluster, with_client: Use) -> None:
    asyncio.run(cluster.ask("s1", "CONFIG", "SET", "notify-keyspace-events", "KEA"))

    def use(client: Any) -> None:
        notifications = client.keyspace_notifications(key_prefix="user:", ignore_subscribe_messages=False)
        notifications.subscribe_keyspace("user:*", db=0)
        notifications.get_message(timeout=PATIENCE_S)
        client.set("user:1", "x")
        notification = notifications.get_message(timeout=PATIENCE_S)
        assert (notification.key, notification.event_type) == ("1", "set")
        (getattr(notifications, "aclose", None) or notifications.close)()

    with_client(cluster.hosts, use)
