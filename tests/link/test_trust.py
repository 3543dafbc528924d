"""Which servers get our credentials."""

from __future__ import annotations

import asyncio

import pytest

from dynamoth.errors import ConfigError
from dynamoth.settings.load import load_config
from dynamoth_link.credentials import Credentials
from dynamoth_link.errors import ServerUntrusted
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from dynamoth_link.tls import TlsOptions
from dynamoth_link.trust import TRUSTED_HOSTS_MAX, TRUSTED_HOSTS_VARIABLE, Trust, parse_trusted_hosts, trust_in
from dynamoth_link.urls import parse_cluster_url, parse_server_url

HOSTS = "dynamoth://redis1.example.com,10.0.0.1"


def trusts(url: str, *trusted_hosts: str, configured: str = HOSTS) -> bool:
    trust = trust_in(parse_cluster_url(configured).servers, trusted_hosts)
    return trust.objection(parse_server_url(url)) is None


SOCKET, TLS = "unix:///run/redis/a.sock", "dynamoths://redis1.example.com"


@pytest.mark.parametrize(
    ("trusted", "configured", "url"),
    [
        (True, HOSTS, "redis://redis1.example.com"),
        (True, HOSTS, "redis://REDIS1.example.com.:7000"),
        (True, HOSTS, "rediss://redis1.example.com:1"),
        (True, HOSTS, "redis://10.0.0.1:9999"),
        (True, HOSTS, "redis://[::ffff:10.0.0.1]:9999"),
        (False, HOSTS, "redis://evil.org"),
        (False, HOSTS, "redis://redis2.example.com"),
        (False, HOSTS, "redis://redis1.example.com.evil.org"),
        (False, HOSTS, "redis://xredis1.example.com"),
        (False, HOSTS, "redis://10.0.0.2"),
        (False, HOSTS, "redis://167772161"),  # 10.0.0.1 to getaddrinfo
        (False, HOSTS, "redis://010.0.0.1"),
        (False, HOSTS, "redis://localhost"),
        (False, HOSTS, "redis://[::1]"),
        (False, HOSTS, "unix:///tmp/socket"),
        (True, SOCKET, "unix:///run/redis/b.sock"),
        (False, SOCKET, "unix:///run/redis/../x/b.sock"),
        (False, SOCKET, "unix:///tmp/b.sock"),
        (True, TLS, "rediss://redis1.example.com:7"),
        (False, TLS, "redis://redis1.example.com:7"),
    ],
)
def test_the_hosts_of_the_configuration_are_trusted_and_no_others(trusted: bool, configured: str, url: str) -> None:
    assert trusts(url, configured=configured) is trusted
    assert trusts(url, "*", configured=configured) is (trusted or configured != TLS), "* is no way around TLS"


def test_the_loopback_is_one_host() -> None:
    for configured in ("localhost", "127.0.0.1", "[::1]", "127.9.9.9"):
        for named in ("localhost:1", "127.0.0.1:2", "[::1]:3"):
            assert trusts(f"redis://{named}", configured=f"dynamoth://{configured}:6379")


@pytest.mark.parametrize(
    ("item", "url", "trusted"),
    [
        ("*.redis.org", "redis://a.b.redis.org", True),
        ("*.Redis.ORG", "redis://A.REDIS.org.", True),
        ("*.redis.org", "redis://redis.org", False),
        ("*.redis.org", "redis://evilredis.org", False),
        ("10.1.0.0/16", "redis://10.1.2.3", True),
        ("10.1.2.3", "redis://10.1.2.3", True),
        ("10.1.0.0/16", "redis://10.2.0.1", False),
        ("10.1.0.0/16", "redis://10.1.2.3.evil.org", False),
        ("fd00::/8", "redis://[fd00::5]", True),
        ("127.0.0.0/8", "redis://localhost", True),
        ("/tmp/r/", "unix:///tmp/r/b.sock", True),
    ],
)
def test_names_suffixes_networks_and_directories_can_be_trusted(item: str, url: str, trusted: bool) -> None:
    assert trusts(url, item) is trusted


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
async def test_nothing_is_sent_to_a_server_that_nobody_vouches_for(options: LinkOptions) -> None:
    connected: list[object] = []
    async with await asyncio.start_server(lambda _, writer: connected.append(writer), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ServerUntrusted, match=f"127.0.0.1:{port}.*trusted_hosts") as caught:
            await query(f"redis://127.0.0.1:{port}", (b"PING",), options=options)
    assert "secret" not in str(caught.value)
    assert not connected


def test_daemons_and_tools_read_the_variable_that_clients_read() -> None:
    config = load_config(environment={TRUSTED_HOSTS_VARIABLE: "*.redis.example.com"}).config
    assert config.cluster.trusted_hosts == "*.redis.example.com"
