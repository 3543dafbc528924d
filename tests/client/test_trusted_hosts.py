"""A stored plan that somebody has added a server to gets no password, from neither client."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

import dynamoth_client
from dynamoth.plan.plan import Server
from dynamoth_client.machines.publisher.events import PublisherOptions
from tests.client.both_clients import Connect
from tests.client.conftest import ClusterFactory
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import confirmed, until

PASSWORD = "the secret of all clients"
PUBLISH_TIMEOUT_S = PublisherOptions().publish_timeout_s
SOON: dict[str, Any] = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5, "retry": Retry(NoBackoff(), 0)}


class Thief:
    """Listens, and keeps what it is sent."""

    def __init__(self, path: Path) -> None:
        self.url = f"unix://{path}"
        self.received = b""
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            connection.settimeout(2)
            try:
                self.received += connection.recv(10_000)
            except OSError:
                pass
            finally:
                connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def thief(tmp_path: Path) -> Iterator[Thief]:
    thief = Thief(tmp_path / "s")
    yield thief
    thief.close()


@pytest.fixture
def forged(cluster_factory: ClusterFactory, thief: Thief) -> StoredCluster:
    """A cluster whose stored plan has a server more, and a channel there."""
    cluster = cluster_factory(2, password=PASSWORD)
    cluster.plan = replace(cluster.plan, servers={**cluster.plan.servers, "s3": Server("s3", thief.url)})
    cluster.put({"stolen": "s3"})
    return cluster


def publish_there(client: Any, channel: str) -> None:
    """Publish until the client knows where the channel is: it goes home at first."""
    for _ in range(100):
        client.publish(channel, b"x")
        time.sleep(0.02)


def with_password(cluster: StoredCluster, options: str = "") -> str:
    return cluster.url.replace("://", f"://:{PASSWORD.replace(' ', '%20')}@") + options


def test_a_client_keeps_its_password(
    forged: StoredCluster, thief: Thief, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(forged.hosts, password=PASSWORD, **SOON) as client, client.pubsub() as pubsub:
        with pytest.raises(redis.exceptions.ConnectionError, match="trusted_hosts"):
            publish_there(client, "stolen")
        confirmed(pubsub, forged.channel_at("s1"), forged.channel_at("s2"))
        assert client.publish(forged.channel_at("s1"), b"x") == client.publish(forged.channel_at("s2"), b"x") == 1
        with pytest.raises(redis.exceptions.ConnectionError, match="trusted_hosts"):
            client.pubsub_numsub("stolen")
        assert client.get("nothing") is None
    assert (thief.connections, thief.received) == (0, b"")
    errors = {record.getMessage() for record in caplog.records if record.levelno == logging.ERROR}
    assert len(errors) == 1
    error = errors.pop()
    assert thief.url.removeprefix("unix://") in error and "trusted_hosts" in error and PASSWORD not in error


def test_publishing_at_a_server_that_is_not_trusted_fails_at_once(forged: StoredCluster) -> None:
    """With the timeouts that clients have by default: nothing is waited for."""
    once: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)}
    with dynamoth_client.from_url(with_password(forged), **once) as client:
        began_at = time.monotonic()
        with pytest.raises(redis.exceptions.ConnectionError, match="trusted_hosts"):
            publish_there(client, "stolen")
        with pytest.raises(redis.exceptions.ConnectionError, match="trusted_hosts"):
            client.publish("stolen", b"x")
        assert time.monotonic() - began_at < PUBLISH_TIMEOUT_S


@pytest.mark.parametrize("how", ["argument", "option", "from_url", "environment"])
def test_a_server_that_is_trusted_is_used(
    how: str, forged: StoredCluster, thief: Thief, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And would get the password: what the tests above would see without the check."""
    if how == "argument":
        client = dynamoth_client.Redis(
            servers=forged.hosts, password=PASSWORD, trusted_hosts=["*.example.com", str(tmp_path)], **SOON
        )
    elif how == "option":
        client = dynamoth_client.from_url(with_password(forged, f"?trusted_hosts=10.0.0.0/8,{tmp_path}"), **SOON)
    elif how == "from_url":
        client = dynamoth_client.from_url(with_password(forged), trusted_hosts=[str(tmp_path)], **SOON)
    else:
        monkeypatch.setenv("DYNAMOTH_TRUSTED_HOSTS", str(tmp_path))
        client = dynamoth_client.from_url(with_password(forged), **SOON)
    with client, pytest.raises(redis.exceptions.RedisError):
        publish_there(client, "stolen")
    until(lambda: PASSWORD.encode() in thief.received, "the thief has it")


def test_without_credentials_any_server_is_connected_to(cluster_factory: ClusterFactory, thief: Thief) -> None:
    cluster = cluster_factory(2)
    cluster.plan = replace(cluster.plan, servers={**cluster.plan.servers, "s3": Server("s3", thief.url)})
    cluster.put({"elsewhere": "s3"})
    with dynamoth_client.from_url(cluster.url, **SOON) as client, pytest.raises(redis.exceptions.RedisError):
        publish_there(client, "elsewhere")
    assert thief.connections and b"AUTH" not in thief.received
