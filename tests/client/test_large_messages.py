"""Messages as large as Redis takes, and many large ones at once. The servers drop no subscriber for what is large."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis.exceptions

import dynamoth_client
import dynamoth_client.asyncio
from dynamoth_client.redis_py import settings
from dynamoth_client.runtime.publishing import PAYLOAD_BYTES_MAX
from tests.client.both_clients import Connect
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import confirmed, next_of
from tests.redis_servers import RedisServerFactory

PATIENCE_S = 60.0
"""Bound of every wait for a large message: some seconds are usual."""

MANY = 400
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 MB may need most of the 10 s that a publish may take by default, while others use the processors."""
    monkeypatch.setattr(settings, "PUBLISH_TIMEOUT_S_MAX", PATIENCE_S)


@pytest.fixture
def cluster(redis_server_factory: RedisServerFactory) -> StoredCluster:
    """One server."""
    cluster = StoredCluster([redis_server_factory(options={"client-output-buffer-limit": "pubsub 0 0 0"})])
    cluster.store()
    return cluster


def test_the_largest_message_arrives_and_a_larger_one_is_refused(cluster: StoredCluster, connect: Connect) -> None:
    # No PING: on a busy machine Redis may take longer to copy 512 MB than it may to answer one.
    with connect(cluster.hosts, health_check_interval=600) as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        assert client.publish("c", bytes(PAYLOAD_BYTES_MAX)) == 1
        message = pubsub.get_message(timeout=PATIENCE_S)
        assert message is not None and len(message["data"]) == PAYLOAD_BYTES_MAX
        del message
        with pytest.raises(redis.exceptions.DataError, match="too large"):
            client.publish("c", bytes(PAYLOAD_BYTES_MAX + 1))
        assert client.publish("c", "next") == 1
        assert next_of(pubsub)["data"] == b"next"


async def test_many_large_messages_wait_for_a_server_that_has_stopped_for_a_while(cluster: StoredCluster) -> None:
    """More than may wait to be sent on a link: they go out as the server takes them."""
    async with dynamoth_client.asyncio.from_url(cluster.url) as client:
        await client.publish("c", "first")
        cluster.servers["s1"].pause()
        outcomes = [asyncio.create_task(client.publish("c", bytes(MIB))) for _ in range(MANY)]
        _, unanswered = await asyncio.wait(outcomes, timeout=0.5)
        cluster.servers["s1"].resume()
        assert len(unanswered) == MANY
        assert await asyncio.gather(*outcomes) == [0] * MANY


def test_many_threads_publish_large_messages_at_once(cluster: StoredCluster) -> None:
    payload = bytes(MIB)
    with dynamoth_client.from_url(cluster.url) as client, ThreadPoolExecutor(MANY) as threads:
        outcomes = [threads.submit(client.publish, "c", payload) for _ in range(MANY)]
        assert [outcome.result(PATIENCE_S) for outcome in outcomes] == [0] * MANY
