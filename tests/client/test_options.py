"""Options of redis-py on the wire, with real servers: they hold for every server, and for both clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio.retry
import redis.backoff
import redis.credentials
import redis.exceptions
import redis.retry

import dynamoth_client
from dynamoth_client.machines.publisher.events import PUBLISH_TIMEOUT_S_MIN
from tests.client.both_clients import Connect, OnLoop
from tests.client.conftest import ClusterFactory
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import PATIENCE_S, Running, confirmed, next_of, until

SERVERS = ("s1", "s2")


def connections(cluster: StoredCluster, what: str) -> dict[str, list[str]]:
    """Return the connections at each server that ``CLIENT LIST`` shows with ``what``, a part of their lines."""
    lists = {id_: asyncio.run(cluster.ask(id_, "CLIENT", "LIST")).decode().splitlines() for id_ in SERVERS}
    return {id_: [line for line in lines if f" {what} " in f"{line} "] for id_, lines in lists.items()}


class Recording(redis.backoff.AbstractBackoff):
    """Notes after which failures it was asked, also by its copies."""

    def __init__(self, asked: list[int], pause_s: float = 0.001) -> None:
        self.asked = asked
        self.pause_s = pause_s

    def __deepcopy__(self, memo: Any) -> Recording:
        return Recording(self.asked, self.pause_s)

    def compute(self, failures: int) -> float:
        self.asked.append(failures)
        return self.pause_s


def _arrives(client: Any, pubsub: Any, channel: str) -> bool:
    """Publish, and tell whether that, or an earlier message, has come."""
    client.publish(channel, "x")
    with contextlib.suppress(redis.exceptions.ConnectionError):  # what was not read in time is said again
        message = pubsub.get_message(timeout=0.05)
        return message is not None and message["type"] == "message"
    return False


# Who one is.


def test_names_are_sent_to_every_server(cluster: StoredCluster, connect: Connect) -> None:
    channels = [cluster.channel_at(id_) for id_ in SERVERS]
    with connect(cluster.hosts, client_name="me") as client, client.pubsub() as pubsub:
        confirmed(pubsub, *channels)
        for channel in channels:
            assert client.publish(channel, "x") == 1
        found = connections(cluster, "name=me")
        assert [len(lines) for lines in found.values()] == [2, 2]
        assert all(" resp=3" in line or "resp=" not in line for lines in found.values() for line in lines)


STREAMING: Any = getattr(redis.credentials, "StreamingCredentialProvider", None)
"""Since redis-py 5.3."""


class Provider(redis.credentials.CredentialProvider):
    """Returns the given credentials, and streams where redis-py knows of that."""

    def __init__(self, *given: Any) -> None:
        self.given: Any = given
        self.asked = 0
        self.callback: Any = None

    def get_credentials(self) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "it may block"
        return self._give()

    async def get_credentials_async(self) -> Any:
        return self._give()

    def _give(self) -> Any:
        self.asked += 1
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def on_next(self, callback: Any) -> None:
        self.callback = callback

    def on_error(self, callback: Any) -> None:
        pass

    def is_streaming(self) -> bool:
        return True

    def stream(self, user: str, password: str, client: Any) -> None:
        """Have new credentials."""
        import redis.auth.token

        self.given = user, password
        token = redis.auth.token.SimpleToken(password, 1, 0, {"oid": user})
        if isinstance(client, OnLoop):
            client.on_loop(lambda: self.callback(token))
        else:
            self.callback(token)


if STREAMING is not None:
    STREAMING.register(Provider)


def _add_users(cluster: StoredCluster, *users: str) -> None:
    for id_ in SERVERS:
        for user in users:
            rules = ("on", f">{user}'s", "resetchannels", "&app.*", "&__dynamoth__:*", "~__dynamoth__:*", "+@all")
            asyncio.run(cluster.ask(id_, "ACL", "SETUSER", user, *rules))


def test_a_credential_provider_is_asked_for_each_connection(cluster: StoredCluster, connect: Connect) -> None:
    _add_users(cluster, "app")
    channels = [cluster.channel_at(id_, "app.") for id_ in SERVERS]
    provider = Provider("app", "app's")
    with connect(cluster.hosts, credential_provider=provider) as client, client.pubsub() as pubsub:
        confirmed(pubsub, *channels)
        for channel in channels:
            assert client.publish(channel, "x") == 1
            assert next_of(pubsub)["data"] == b"x"
        found = connections(cluster, "user=app")
        assert [len(lines) for lines in found.values()] == [2, 2]
        asked = provider.asked
        assert asked >= 2 * len(SERVERS), "for each connection; those that read the plan are taken over"
        provider.given = "app", "another"
        for id_ in SERVERS:
            asyncio.run(cluster.ask(id_, "ACL", "SETUSER", "app", ">another", "<app's"))
            asyncio.run(cluster.ask(id_, "CLIENT", "KILL", "USER", "app"))
        for channel in channels:
            assert client.publish(channel, "y") <= 1
        assert provider.asked >= asked + len(SERVERS)
        assert client.pubsub_numpat() == 0
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.publish("not-the-app's", "x")


def test_a_provider_that_fails_is_an_error_of_the_application(cluster: StoredCluster, connect: Connect) -> None:
    provider = Provider()
    provider.given = RuntimeError("the vault is sealed")
    with connect(cluster.hosts, credential_provider=provider, retry=None, socket_connect_timeout=1) as client:
        words = "the credential provider raised RuntimeError: the vault is sealed"
        with pytest.raises(redis.exceptions.ConnectionError, match=words):
            client.publish("c", "x")
        with pytest.raises(redis.exceptions.ConnectionError, match=words):
            client.pubsub().subscribe("c")
        provider.given = ()
        pubsub = client.pubsub()
        confirmed(pubsub, "c")
        assert client.publish("c", "x") == 1
        provider.given = RuntimeError("sealed again")
        for id_ in SERVERS:
            asyncio.run(cluster.kill_subscribers(id_))

        def is_sealed() -> bool:
            try:
                pubsub.get_message(timeout=PATIENCE_S)
            except redis.exceptions.ConnectionError as error:
                return "sealed again" in str(error)  # at first it may say how the connection was lost
            return False

        until(is_sealed, "the reason of the attempts since")
        provider.given = ()
        until(lambda: _arrives(client, pubsub, "c"), "a message")


@pytest.mark.skipif(STREAMING is None, reason="this redis-py has no providers that stream")
def test_a_provider_that_streams_renews_what_is_open(cluster: StoredCluster, connect: Connect) -> None:
    _add_users(cluster, "app", "app2")
    channels = [cluster.channel_at(id_, "app.") for id_ in SERVERS]
    provider = Provider("app", "app's")
    with connect(cluster.hosts, credential_provider=provider) as client, client.pubsub() as pubsub:
        confirmed(pubsub, *channels)
        for channel in channels:
            assert client.publish(channel, "x") == 1
        provider.stream("app2", "app2's", client)
        for channel in channels:
            assert client.publish(channel, "y") == 1
            assert next_of(pubsub)["data"]
        until(lambda: [len(lines) for lines in connections(cluster, "user=app2").values()] == [2, 2], "logged in again")
        assert pubsub.gaps_detected == 0


# Retries.


@pytest.mark.parametrize("kind", [redis.retry.Retry, redis.asyncio.retry.Retry])
def test_the_plan_is_asked_for_as_often_as_retries_say(cluster: StoredCluster, connect: Connect, kind: Any) -> None:
    for server in cluster.servers.values():
        server.stop()
    asked: list[int] = []
    with connect(cluster.hosts, retry=kind(Recording(asked), 3)) as client:
        with pytest.raises(redis.exceptions.ConnectionError, match="connection refused"):
            client.publish("c", "x")
        assert asked == [1, 2, 3]
        with pytest.raises(redis.exceptions.ConnectionError, match="connection refused"):
            client.pubsub_channels()
        assert asked == [1, 2, 3] * 2


def _raised_by(error: type[Exception], words: str, client: Any, channel: str) -> float:
    """Publish what cannot be; return after how many seconds that raised."""
    began_at = time.monotonic()
    with pytest.raises(error, match=words):
        client.publish(channel, "x")
    return time.monotonic() - began_at


SHORT: dict[str, Any] = {"retry": None, "socket_timeout": 1, "socket_connect_timeout": 1, "health_check_interval": 60}
BUSY_S = 3.0
"""How much longer everything may take on a machine that does other work."""


def test_a_server_that_hangs_is_waited_for_as_the_options_say(cluster: StoredCluster, connect: Connect) -> None:
    """And what was published there is delivered when it goes on."""
    channel = cluster.channel_at("s2")
    with connect(cluster.hosts, **SHORT) as client, client.pubsub(gaps=True) as pubsub:
        confirmed(pubsub, channel)
        assert client.publish(channel, "before") == 1
        cluster.servers["s2"].pause()
        try:
            words = r"server s2 did not answer for 1\.5 s: .* may have been delivered: .*socket_timeout"
            took_s = _raised_by(redis.exceptions.TimeoutError, words, client, channel)
        finally:
            cluster.servers["s2"].resume()
        assert PUBLISH_TIMEOUT_S_MIN * 0.99 < took_s < PUBLISH_TIMEOUT_S_MIN + BUSY_S
        assert client.publish(channel, "after") == 1
        assert [next_of(pubsub)["data"] for _ in range(3)] == [b"before", b"x", b"after"]


def test_a_server_that_is_down_is_waited_for_as_the_options_say(cluster: StoredCluster, connect: Connect) -> None:
    """Whether this client was connected to it before or not."""
    known, new = cluster.channel_at("s2"), cluster.channel_at("s1")
    with connect(cluster.hosts, **{**SHORT, "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0)}) as client:
        assert client.publish(known, "x") == 0
        for server in cluster.servers.values():
            server.kill()
        for channel, id_ in ((known, "s2"), (new, "s1")):
            words = rf"server {id_} did not answer for 1\.5 s: .*connection refused: start the server"
            took_s = _raised_by(redis.exceptions.ConnectionError, words, client, channel)
            assert PUBLISH_TIMEOUT_S_MIN * 0.99 < took_s < PUBLISH_TIMEOUT_S_MIN + BUSY_S


def test_a_cluster_that_comes_up_late(cluster_factory: ClusterFactory, connect: Connect) -> None:
    """No plan is stored at first: as if the balancer were about to start."""
    cluster = cluster_factory(stored=False)
    asked: list[int] = []
    with connect(cluster.hosts, retry=redis.retry.Retry(Recording(asked, 0.05), -1)) as client:
        publishing = Running(client.publish, "c", "x")
        until(lambda: len(asked) >= 2, "tried again")
        cluster.store()
        assert publishing.result() == 0


def test_refused_credentials_are_not_tried_again(cluster_factory: ClusterFactory, connect: Connect) -> None:
    cluster = cluster_factory(password="right")
    asked: list[int] = []
    for wrong in (None, "wrong"):
        with connect(cluster.hosts, password=wrong, retry=redis.retry.Retry(Recording(asked), 3)) as client:
            for refused in (partial(client.publish, "c", "x"), partial(client.pubsub().subscribe, "c")):
                with pytest.raises(redis.exceptions.AuthenticationError, match="password"):
                    refused()
    assert not asked


def test_other_errors_are_tried_again_where_they_are_named(cluster: StoredCluster, connect: Connect) -> None:
    _add_users(cluster, "app")
    asyncio.run(cluster.ask("s1", "ACL", "SETUSER", "app", "-pubsub"))
    asked, retry = list[int](), redis.asyncio.retry.Retry
    with connect(cluster.hosts, username="app", password="app's", retry=retry(Recording(asked), 2)) as client:
        for expected in ([], [1, 2]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.pubsub_channels()
            assert asked == expected
            client.set_retry(retry(Recording(asked), 2, (redis.exceptions.NoPermissionError,)))


def test_links_come_back_after_the_pauses_of_the_backoff(cluster: StoredCluster, connect: Connect) -> None:
    asked, channel = list[int](), cluster.channel_at("s1")
    retry = redis.retry.Retry(Recording(asked, 0.02), 1)
    with connect(cluster.hosts, retry=retry) as client, client.pubsub() as pubsub:
        confirmed(pubsub, channel)
        assert not asked
        cluster.servers["s1"].kill()
        while asked[:3] != [1, 2, 3]:
            pubsub.get_message(timeout=0.01)  # raises when that takes long
        cluster.servers["s1"].restart()
        cluster.store()
        until(lambda: _arrives(client, pubsub, channel), "a message")


# Health.


def test_a_server_that_hangs_is_noticed_as_soon_as_the_options_say(cluster: StoredCluster, connect: Connect) -> None:
    """By default that takes ten seconds, and five with either option alone."""
    options = {"health_check_interval": 0.1, "socket_timeout": 0.2, "socket_connect_timeout": 0.3}
    with connect(cluster.hosts, **options) as client, client.pubsub(gaps=True) as pubsub:
        confirmed(pubsub, cluster.channel_at("s2"))
        cluster.servers["s2"].pause()
        try:
            with pytest.raises(redis.exceptions.ConnectionError, match="not even the answer to a PING"):
                pubsub.get_message(timeout=4)
        finally:
            cluster.servers["s2"].resume()


# Limits.


def test_publishers_and_pubsubs_are_as_many_as_max_connections(cluster: StoredCluster, connect: Connect) -> None:
    channels = [cluster.channel_at(id_) for id_ in SERVERS]
    with connect(cluster.hosts, max_connections=3, client_name="limited") as client:
        pubsubs = [client.pubsub() for _ in range(3)]
        confirmed(pubsubs[0], *channels)
        confirmed(pubsubs[1], *channels)
        for channel in channels:
            assert client.publish(channel, "x") == 2
        with pytest.raises(redis.exceptions.MaxConnectionsError, match=r"max_connections=3 .* close some PubSubs"):
            pubsubs[2].subscribe(*channels)
        assert [len(lines) for lines in connections(cluster, "name=limited").values()] == [3, 3]
        pubsubs[0].close()
        confirmed(pubsubs[2], *channels)
        for channel in channels:
            assert client.publish(channel, "x") == 2
        with pytest.raises(redis.exceptions.MaxConnectionsError):
            pubsubs[0].psubscribe("*")


def test_clients_of_one_pool_share_its_limit(cluster: StoredCluster) -> None:
    pool = redis.ConnectionPool(port=cluster.servers["s1"].port, max_connections=2)
    with dynamoth_client.Redis(connection_pool=pool) as one, dynamoth_client.Redis(connection_pool=pool) as two:
        assert one.publish("c", "x") == two.publish("c", "x") == 0
        with pytest.raises(redis.exceptions.MaxConnectionsError):
            two.pubsub().subscribe("c")
        one.close()
        confirmed(two.pubsub(), "c")
    pool.close()
