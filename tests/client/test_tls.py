"""TLS of both clients, on the wire: two servers behind TLS that store a plan of ``rediss://`` URLs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis.exceptions

from dynamoth.plan.plan import Plan, Server
from tests.client.both_clients import Connect, on_all_loops
from tests.client.stored_cluster import StoredCluster
from tests.client.sync_helpers import confirmed, message_of, next_of
from tests.client.versions import REDIS_PY
from tests.redis_servers import RedisServerFactory
from tests.tls import Certificates, make_certificates, tls_in_front_of

MakeCluster = Callable[..., StoredCluster]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_cluster(redis_server_factory: RedisServerFactory, certificates: Certificates) -> Iterator[MakeCluster]:
    """Two servers whose plan names them by ``host`` and over TLS only; the certificate is for ``localhost``."""
    with ExitStack() as fronts:

        def make(host: str = "localhost", *, asks_for_client: bool = False) -> StoredCluster:
            cluster = StoredCluster([redis_server_factory() for _ in range(2)])
            ports = {
                id_: fronts.enter_context(tls_in_front_of(server.port, certificates, asks_for_client=asks_for_client))
                for id_, server in cluster.servers.items()
            }
            cluster.plan = Plan.initial(Server(id_, f"rediss://{host}:{port}") for id_, port in ports.items())
            cluster.store()
            return cluster

        yield make


def _urls(cluster: StoredCluster) -> list[str]:
    return [server.url for server in cluster.plan.servers.values()]


def _use(connect: Connect, cluster: StoredCluster, **options: Any) -> None:
    """Publish and subscribe at both servers, and use the first one for something else."""
    channels = [cluster.channel_at("s1"), cluster.channel_at("s2")]
    with connect(_urls(cluster), **options) as client, client.pubsub() as pubsub:
        confirmed(pubsub, *channels)
        for channel in channels:
            assert client.publish(channel, b"x" * 100_000) == 1
            assert next_of(pubsub) == message_of("message", channel.encode(), b"x" * 100_000)
        assert client.ping()
        assert client.pubsub_numsub(*channels) == [(channel.encode(), 1) for channel in channels]


def _refused(connect: Connect, cluster: StoredCluster, words: str, **options: Any) -> None:
    with connect(_urls(cluster), retry=None, **options) as client:
        with pytest.raises(redis.exceptions.ConnectionError, match=words):
            client.publish("c", "x")
        with pytest.raises(redis.exceptions.ConnectionError, match=words):
            client.pubsub().subscribe("c")


@on_all_loops
def test_an_own_authority(tls_cluster: MakeCluster, certificates: Certificates, connect: Connect) -> None:
    cluster = tls_cluster()
    _use(connect, cluster, ssl_ca_certs=str(certificates.authority))
    _use(connect, cluster, ssl_ca_data=certificates.authority.read_text())
    _use(connect, cluster, ssl_cert_reqs="none")
    _refused(connect, cluster, "certificate is not trusted")


@on_all_loops
def test_the_certified_name(tls_cluster: MakeCluster, certificates: Certificates, connect: Connect) -> None:
    cluster = tls_cluster("127.0.0.1")
    authority = str(certificates.authority)
    _use(connect, cluster, ssl_ca_certs=authority, ssl_check_hostname=False)
    by_default = {} if REDIS_PY >= (6,) else {"ssl_check_hostname": True}
    _refused(connect, cluster, "certificate is not trusted.*IP address mismatch", ssl_ca_certs=authority, **by_default)


@on_all_loops
def test_our_own_certificate(tls_cluster: MakeCluster, certificates: Certificates, connect: Connect) -> None:
    cluster = tls_cluster(asks_for_client=True)
    authority = str(certificates.authority)
    own = {"ssl_certfile": str(certificates.client), "ssl_keyfile": str(certificates.client_key)}
    _use(connect, cluster, ssl_ca_certs=authority, **own)
    _refused(connect, cluster, "asks for a certificate|or our certificate, which it may miss", ssl_ca_certs=authority)


@on_all_loops
def test_a_file_that_is_missing_is_named(
    tls_cluster: MakeCluster, certificates: Certificates, connect: Connect
) -> None:
    own = {"ssl_certfile": "/nowhere/client.pem", "ssl_keyfile": str(certificates.client_key)}
    named = r"ssl_certfile=/nowhere/client\.pem, ssl_keyfile="
    with connect(_urls(tls_cluster()), **own) as client, pytest.raises(redis.exceptions.DataError, match=named):
        client.publish("c", "x")


def test_a_first_server_is_plain(tls_cluster: MakeCluster, certificates: Certificates, connect: Connect) -> None:
    """redis-py drops them, as its own connections go to the first server; the others need them all the same."""
    cluster = tls_cluster()
    first = f"127.0.0.1:{cluster.servers['s1'].port}"
    with connect([first, *_urls(cluster)], ssl_ca_certs=str(certificates.authority)) as made, made.client() as client:
        assert client.publish("c", "x") == 0
        assert made.publish("c", "x") == 0
