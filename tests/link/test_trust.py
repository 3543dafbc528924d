"""Which servers get our credentials."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamoth.errors import ConfigError
from dynamoth.settings.load import load_config
from dynamoth_link.credentials import Credentials
from dynamoth_link.errors import ServerUntrusted
from dynamoth_link.options import LinkOptions, TlsOptions
from dynamoth_link.query import query
from dynamoth_link.trust import TRUSTED_HOSTS_MAX, TRUSTED_HOSTS_VARIABLE, Trust, parse_trusted_hosts, trust_in
from dynamoth_link.urls import parse_cluster_url, parse_server_url


def trusts(url: str, *trusted_hosts: str, configured: str = "dynamoth://redis1.example.com,10.0.0.1") -> bool:
    trust = trust_in(parse_cluster_url(configured).servers, trusted_hosts)
    return trust.objection(parse_server_url(url)) is None


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis1.example.com",
        "redis://REDIS1.example.com.:7000",
        "rediss://redis1.example.com:1",
        "redis://10.0.0.1:9999",
        "redis://[::ffff:10.0.0.1]:9999",
    ],
)
def test_any_port_of_a_configured_host_is_trusted(url: str) -> None:
    assert trusts(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://evil.org",
        "redis://redis2.example.com",
        "redis://redis1.example.com.evil.org",
        "redis://xredis1.example.com",
        "redis://10.0.0.2",
        "redis://167772161",  # 10.0.0.1 to getaddrinfo
        "redis://010.0.0.1",
        "redis://localhost",
        "redis://[::1]",
        "unix:///tmp/socket",
    ],
)
def test_no_other_host_is(url: str) -> None:
    assert not trusts(url)
    assert trusts(url, "*")


def test_the_loopback_is_one_host() -> None:
    for configured in ("localhost", "127.0.0.1", "[::1]", "127.9.9.9"):
        for named in ("localhost:1", "127.0.0.1:2", "[::1]:3"):
            assert trusts(f"redis://{named}", configured=f"dynamoth://{configured}:6379")


def test_suffixes_and_networks() -> None:
    assert trusts("redis://a.b.redis.org", "*.redis.org")
    assert trusts("redis://A.REDIS.org.", "*.Redis.ORG")
    assert not trusts("redis://redis.org", "*.redis.org")
    assert not trusts("redis://evilredis.org", "*.redis.org")
    assert trusts("redis://10.1.2.3", "10.1.0.0/16")
    assert trusts("redis://10.1.2.3", "10.1.2.3")
    assert not trusts("redis://10.2.0.1", "10.1.0.0/16")
    assert not trusts("redis://10.1.2.3.evil.org", "10.1.0.0/16")
    assert trusts("redis://[fd00::5]", "fd00::/8")
    assert trusts("redis://localhost", "127.0.0.0/8")


def test_sockets_are_trusted_by_their_directory() -> None:
    assert trusts("unix:///run/redis/b.sock", configured="unix:///run/redis/a.sock")
    assert not trusts("unix:///run/redis/../x/b.sock", configured="unix:///run/redis/a.sock")
    assert not trusts("unix:///tmp/b.sock", configured="unix:///run/redis/a.sock")
    assert trusts("unix:///tmp/r/b.sock", "/tmp/r/")


def test_a_server_without_tls_is_no_way_around_tls() -> None:
    configured = "dynamoths://redis1.example.com"
    assert trusts("rediss://redis1.example.com:7", configured=configured)
    assert not trusts("redis://redis1.example.com:7", configured=configured)
    assert not trusts("redis://redis1.example.com:7", "*", configured=configured)


@pytest.mark.parametrize("item", ["*.", "a b", "10.0.0.0/33", "a*", "http://x", "-", "*.*.org", "x" * 3 + "/8"])
def test_what_is_no_host_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="trusted_hosts"):
        trust_in((), [item])
    with pytest.raises(ConfigError, match="at most"):
        trust_in((), ["a"] * (TRUSTED_HOSTS_MAX + 1))


def test_a_list_in_text() -> None:
    assert parse_trusted_hosts("a, *.b 10.0.0.0/8,") == ("a", "*.b", "10.0.0.0/8")


async def _ask() -> object:
    raise AssertionError("nobody is asked for credentials")


@pytest.mark.parametrize(
    "options",
    [
        LinkOptions(password="secret", trust=Trust()),
        LinkOptions(username="me", trust=Trust()),
        LinkOptions(credentials=Credentials(_ask), trust=Trust()),
        LinkOptions(tls=TlsOptions(cert_file="/no/file", key_file="/no/file"), trust=Trust()),
        LinkOptions(tls=TlsOptions(has_certificate=True), trust=Trust()),
    ],
)
def test_nothing_is_sent_to_a_server_that_nobody_vouches_for(options: LinkOptions) -> None:
    asyncio.run(_send_nothing(options))


async def _send_nothing(options: LinkOptions) -> None:
    connected: list[object] = []
    server = await asyncio.start_server(lambda reader, writer: connected.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        begun = time.monotonic()
        with pytest.raises(ServerUntrusted, match=f"127.0.0.1:{port}.*trusted_hosts") as caught:
            await query(f"redis://127.0.0.1:{port}", (b"PING",), options=options)
        assert time.monotonic() - begun < 2
        assert "secret" not in str(caught.value)
        assert not connected
    finally:
        server.close()
        await server.wait_closed()


def test_daemons_and_tools_read_the_variable_that_clients_read() -> None:
    config = load_config(environment={TRUSTED_HOSTS_VARIABLE: "*.redis.example.com"}).config
    assert config.cluster.trusted_hosts == "*.redis.example.com"
