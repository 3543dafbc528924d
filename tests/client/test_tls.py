"""TLS of both clients, on the wire: two servers behind TLS that store a plan of ``rediss://`` URLs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest
import redis.exceptions

import dynamoth_client
import dynamoth_client.asyncio
from dynamoth.plan.plan import Plan, Server
from tests.client.stored_cluster import StoredCluster, on_both_loops
from tests.client.sync_helpers import confirmed, message_of, next_of
from tests.client.versions import REDIS_PY
from tests.redis_servers import RedisServerFactory
from tests.tls import Certificates, make_certificates, tls_in_front_of


class TlsClusterFactory(Protocol):
    def __call__(self, host: str = "localhost", *, asks_for_client: bool = False) -> StoredCluster: ...


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_cluster(redis_server_factory: RedisServerFactory, certificates: Certificates) -> Iterator[TlsClusterFactory]:
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


def _use(cluster: StoredCluster, **options: Any) -> None:
    """Publish and subscribe at both servers, and use the first one for something else."""
    channels = [cluster.channel_at("s1"), cluster.channel_at("s2")]
    for client in _clients(cluster, **options):
        with client, client.pubsub() as pubsub:
            confirmed(pubsub, *channels)
            for channel in channels:
                assert client.publish(channel, b"x" * 100_000) == 1
                assert next_of(pubsub) == message_of("message", channel.encode(), b"x" * 100_000)
            assert client.ping()
            assert client.pubsub_numsub(*channels) == [(channel.encode(), 1) for channel in channels]


def _clients(cluster: StoredCluster, **options: Any) -> Iterator[Any]:
    yield dynamoth_client.Redis(servers=_urls(cluster), **options)
    hosts = ",".join(url.partition("://")[2] for url in _urls(cluster))
    yield dynamoth_client.from_url(f"dynamoths://{hosts}", **options)


def _refused(cluster: StoredCluster, words: str, **options: Any) -> None:
    for client in _clients(cluster, retry=None, **options):
        with client:
            with pytest.raises(redis.exceptions.ConnectionError, match=words):
                client.publish("c", "x")
            with pytest.raises(redis.exceptions.ConnectionError, match=words):
                client.pubsub().subscribe("c")


def test_an_authority_of_one_s_own(tls_cluster: TlsClusterFactory, certificates: Certificates) -> None:
    cluster = tls_cluster()
    _use(cluster, ssl_ca_certs=str(certificates.authority))
    _use(cluster, ssl_ca_data=certificates.authority.read_text())
    _use(cluster, ssl_cert_reqs="none")
    _refused(cluster, "certificate is not trusted")


def test_the_name_in_the_certificate(tls_cluster: TlsClusterFactory, certificates: Certificates) -> None:
    cluster = tls_cluster("127.0.0.1")
    authority = str(certificates.authority)
    _use(cluster, ssl_ca_certs=authority, ssl_check_hostname=False)
    by_default = {} if REDIS_PY >= (6,) else {"ssl_check_hostname": True}
    _refused(cluster, "certificate is not trusted.*IP address mismatch", ssl_ca_certs=authority, **by_default)


def test_a_certificate_of_the_client(tls_cluster: TlsClusterFactory, certificates: Certificates) -> None:
    cluster = tls_cluster(asks_for_client=True)
    authority = str(certificates.authority)
    own = {"ssl_certfile": str(certificates.client), "ssl_keyfile": str(certificates.client_key)}
    _use(cluster, ssl_ca_certs=authority, **own)
    _refused(cluster, "our certificate|closed by the server", ssl_ca_certs=authority)


async def test_tls_options_of_a_first_server_without_tls(
    tls_cluster: TlsClusterFactory, certificates: Certificates
) -> None:
    """redis-py drops them, as its own connections go to the first server; the others need them all the same."""
    cluster = tls_cluster()
    first = f"127.0.0.1:{cluster.servers['s1'].port}"
    options: dict[str, Any] = {"servers": [first, *_urls(cluster)], "ssl_ca_certs": str(certificates.authority)}
    with dynamoth_client.Redis(**options) as made, made.client() as client, client.pubsub() as pubsub:
        confirmed(pubsub, "c")
        assert client.publish("c", "x") == 1
    async with dynamoth_client.asyncio.Redis(**options) as asynchronous:
        assert await asynchronous.publish("c", "x") == 0


@on_both_loops
async def test_the_asynchronous_client(tls_cluster: TlsClusterFactory, certificates: Certificates) -> None:
    cluster = tls_cluster(asks_for_client=True)
    authority = str(certificates.authority)
    make: Any = dynamoth_client.asyncio.Redis
    own = {"ssl_certfile": str(certificates.client), "ssl_keyfile": str(certificates.client_key)}
    client = make(servers=_urls(cluster), ssl_ca_certs=authority, **own)
    async with client, client.pubsub() as pubsub:
        for channel in (cluster.channel_at("s1"), cluster.channel_at("s2")):
            await pubsub.subscribe(channel)
            assert (await pubsub.get_message(timeout=None) or {})["type"] == "subscribe"
            assert await client.publish(channel, "x") == 1
            assert (await pubsub.get_message(timeout=None) or {})["data"] == b"x"
        assert await client.ping()
    untrusting = make(servers=_urls(cluster), retry=None, **own)
    with pytest.raises(redis.exceptions.ConnectionError, match="certificate is not trusted"):
        await untrusting.publish("c", "x")
    await untrusting.aclose()
