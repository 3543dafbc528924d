from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio
import redis.exceptions

from dynamoth_client._settings import Settings, parse_servers, read_settings
from dynamoth_client.asyncio import GuaranteesOff, Redis, from_url
from dynamoth_link.urls import ServerAddress


def _settings(client: Redis) -> Settings:
    return client._cluster.settings  # pyright: ignore[reportPrivateUsage]


def test_is_a_redis_and_not_a_cluster_client() -> None:
    client = from_url("dynamoth://one:6379,two:6380")
    assert isinstance(client, redis.asyncio.Redis)
    assert not hasattr(client, "nodes_manager")


def test_url_gives_seeds_in_order_and_the_pool_of_the_first() -> None:
    client = from_url("dynamoth://user:p%40ss@one:6379,two:6380,[::1]:6381/3?client_name=me&socket_connect_timeout=2.5")
    settings = _settings(client)
    assert [(seed.host, seed.port, seed.db) for seed in settings.seeds] == [
        ("one", 6379, 0),
        ("two", 6380, 0),
        ("::1", 6381, 0),
    ]
    assert {(seed.username, seed.password) for seed in settings.seeds} == {("user", "p@ss")}
    assert settings.link_options.client_name == "me"
    assert settings.link_options.connect_timeout_s == 2.5
    pool = client.connection_pool.connection_kwargs
    assert {name: pool[name] for name in ("host", "port", "db", "username", "password")} == {
        "host": "one", "port": 6379, "db": 3, "username": "user", "password": "p@ss",
    }  # fmt: skip


def test_keyword_credentials_serve_all_servers_without_their_own() -> None:
    client = Redis(servers=["one:7000", "redis://her:own@two:7001"], username="u", password="p", client_name="me")
    settings = _settings(client)
    assert (settings.link_options.username, settings.link_options.password) == ("u", "p")
    assert not settings.seeds[0].has_credentials
    assert (settings.seeds[1].username, settings.seeds[1].password) == ("her", "own")
    assert client.connection_pool.connection_kwargs["host"] == "one"


def test_host_and_port_alone_are_one_seed() -> None:
    assert _settings(Redis(host="one", port=7000)).seeds == (ServerAddress("one", 7000),)
    assert _settings(from_url("redis://one:7000/2")).seeds == (ServerAddress("one", 7000),)
    assert _settings(Redis(unix_socket_path="/tmp/r")).seeds[0].path == "/tmp/r"
    assert _settings(from_url("unix:///tmp/r")).seeds[0].path == "/tmp/r"


def test_tls_of_redis_py_is_tls_of_the_links() -> None:
    for client in (
        from_url("dynamoths://one:1,two:2?ssl_cert_reqs=none"),
        Redis(servers=["one:1", "two:2"], ssl=True, ssl_cert_reqs="none"),
        Redis(servers=["rediss://one:1", "rediss://two:2"], ssl_cert_reqs="none"),
    ):
        settings = _settings(client)
        assert all(seed.tls for seed in settings.seeds)
        context = settings.link_options.tls.context
        assert context is not None
        assert context.check_hostname is False


def test_tls_files_that_are_not_there() -> None:
    client = Redis(servers=["one:1"], ssl=True, ssl_ca_certs="/nowhere/ca.pem")
    with pytest.raises(redis.exceptions.DataError, match="ssl_"):
        _settings(client)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"servers": []}, "empty"),
        ({"servers": "one:1,two:2"}, "list"),
        ({"servers": ["one:1"], "host": "two"}, "not both"),
        ({"servers": ["one:1"], "unix_socket_path": "/tmp/r"}, "not both"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(redis.exceptions.DataError, match=words):
        _ = Redis(**arguments)


def test_urls_that_cannot_be_read_do_not_show_the_password() -> None:
    for url in ("dynamoth://user:secret@one:x", "dynamoth://user:secret@", "dynamoth://user:secret@one:1/db"):
        with pytest.raises(ValueError, match="dynamoth://") as error:
            _ = from_url(url)
        assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match="one:x"):
        _ = Redis(servers=["one:x"])


def test_credential_provider_is_refused_with_the_cure() -> None:
    provider = redis.UsernamePasswordCredentialProvider("u", "p")
    with pytest.raises(redis.exceptions.DataError, match="username and password"):
        _settings(Redis(servers=["one:1"], credential_provider=provider))


def test_a_client_name_that_links_cannot_send() -> None:
    with pytest.raises(redis.exceptions.DataError, match="client_name"):
        _settings(Redis(servers=["one:1"], client_name="two words"))


def test_plain_payloads_are_warned_of() -> None:
    with pytest.warns(GuaranteesOff, match="lost"):
        _ = Redis(servers=["one:1"], envelope=False)
    with pytest.warns(GuaranteesOff):
        _ = from_url("dynamoth://one:1,two:2?envelope=false")
    with pytest.raises(redis.exceptions.DataError, match="envelope"):
        _ = from_url("dynamoth://one:1?envelope=perhaps")


def test_a_client_of_a_client_has_the_same_seeds() -> None:
    client = Redis(servers=["one:1", "two:2"]).client()
    assert [seed.host for seed in _settings(client).seeds] == ["one", "two"]
    assert client.single_connection_client


def test_a_pool_of_the_application() -> None:
    pool = redis.asyncio.ConnectionPool(host="one", port=7000, password="p")
    client = Redis(connection_pool=pool)
    assert client.connection_pool is pool
    assert not client.auto_close_connection_pool
    assert read_settings(pool, None).seeds == (ServerAddress("one", 7000),)
    assert _settings(client).link_options.password == "p"
    assert Redis.from_pool(pool).auto_close_connection_pool


def test_servers_of_several_kinds() -> None:
    assert parse_servers(["one:1", "redis://two:2", "[::1]:3", "unix:///s"], tls=False) == (
        ServerAddress("one", 1),
        ServerAddress("two", 2),
        ServerAddress("::1", 3),
        ServerAddress("", 0, "/s"),
    )
