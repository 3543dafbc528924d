"""The synchronous client on real servers that store a plan: everything but PubSub's own behaviour."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import redis as redis_py

import dynamoth_client as redis
from tests.client.conftest import ClusterFactory
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import confirmed, keepers, next_of, until


def test_ways_to_make_a_client(cluster_factory: ClusterFactory) -> None:
    cluster = cluster_factory(password="secret")
    first = cluster.servers["s1"]
    pool = redis.ConnectionPool(port=first.port, password="secret")
    makers: list[Any] = [
        lambda: redis.Redis("127.0.0.1", first.port, 0, "secret"),
        lambda: redis.StrictRedis(host="127.0.0.1", port=first.port, password="secret"),
        lambda: redis.Redis(servers=cluster.hosts, password="secret"),
        lambda: redis.Redis(connection_pool=pool),
        lambda: redis.Redis.from_pool(redis.ConnectionPool(port=first.port, password="secret")),
        lambda: redis.Redis.from_url(f"redis://:secret@127.0.0.1:{first.port}"),
        lambda: redis.from_url(cluster.url.replace("//", "//:secret@")).client(),
    ]
    channel = cluster.channel_at("s2")
    for make in makers:
        with make() as client, client.pubsub() as pubsub:
            confirmed(pubsub, channel)
            assert client.publish(channel, "x") == 1
            assert client.ping()
            assert isinstance(client, redis_py.Redis)
            assert next_of(pubsub)["data"] == b"x"
    pool.close()


def test_a_dropped_client_leaves_nothing(cluster: StoredCluster) -> None:
    client = redis.from_url(cluster.url)
    pubsub = client.pubsub()
    confirmed(pubsub, "c")
    assert client.publish("c", "x") == 1
    reference = weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None
    assert next_of(pubsub)["data"] == b"x"
    del pubsub
    gc.collect()
    until(lambda: keepers() == 0, "the thread ends")
    for server in cluster.servers:
        until(lambda s=server: b"sub=1" not in asyncio.run(cluster.ask(s, "CLIENT", "LIST")), "nobody is subscribed")  # type: ignore[misc]


def test_a_log_handler_that_publishes_does_not_hang(cluster: StoredCluster) -> None:
    outcomes: list[Any] = []

    class Publisher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            outcomes.append(client.publish("log", record.getMessage()))

    logger = logging.getLogger("dynamoth_client")
    handler = Publisher()
    channel = cluster.channel_at("s1")
    with redis.from_url(cluster.url) as client, client.pubsub() as pubsub:
        confirmed(pubsub, channel)
        logger.addHandler(handler)
        try:
            asyncio.run(cluster.kill_subscribers("s1"))
            until(lambda: bool(outcomes), "the gap is logged")
        finally:
            logger.removeHandler(handler)
        assert outcomes[0] == 0
        until(lambda: client.publish(channel, "x") == 1, "it goes on")
