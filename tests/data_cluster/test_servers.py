"""A log server that cannot be used is named with cause and cure."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from dynamoth_analytics.cluster import servers
from dynamoth_analytics.cluster.servers import LogServerFailed, read_servers
from dynamoth_cli.local.embedded import EmbeddedRedis
from tests.redis_servers import RedisServerFactory


@contextmanager
def no_redis() -> Generator[int]:
    """Run a server that answers as a web server does; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def said_of(url: str) -> str:
    with pytest.raises(LogServerFailed) as found:
        read_servers(f"l1={url}").run("l1", (b"PING",))
    return str(found.value)


def test_a_server_that_cannot_be_used_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "TIMEOUT_S", 0.5)
    with EmbeddedRedis() as redis:
        place = f"127.0.0.1:{redis.port}"
        text = said_of(f"redis://ann:secret@{place}")
        assert text.startswith(f"log server l1: redis://ann:***@{place}: wrong password for user 'ann'")
        assert "no answer within 0.5 s: check that" in said_of(f"rediss://{place}")
    assert "connection refused: start the server, or check host, port" in said_of(f"redis://{place}")
    with no_redis() as port:
        assert "check that this port is a Redis server" in said_of(f"redis://127.0.0.1:{port}")


def test_a_server_that_asks_for_a_password_says_where_it_comes_from() -> None:
    with EmbeddedRedis() as redis:
        one = read_servers(f"l1=redis://127.0.0.1:{redis.port}")
        one.run("l1", (b"CONFIG", b"SET", b"requirepass", b"x"))
        assert "none was given: clients take it from their URL" in said_of(f"redis://localhost:{redis.port}")


@pytest.mark.parametrize("durable", [False, True])
def test_settings_that_make_a_server_lose_records_are_named_with_the_cure(
    redis_server_factory: RedisServerFactory, *, durable: bool
) -> None:
    evicting = redis_server_factory(options={"maxmemory-policy": "allkeys-lru"})
    keeping = redis_server_factory(options={"appendonly": "yes"})
    urls = f"l1=redis://127.0.0.1:{evicting.port} l2=redis://127.0.0.1:{keeping.port}"
    servers = read_servers(urls, durable=durable)
    first, *others = servers.doubts("l1")
    assert first.startswith("log server l1: maxmemory-policy is allkeys-lru")
    assert first.endswith("set noeviction")
    assert ["appendonly yes" in each for each in others] == [True] * durable
    assert servers.doubts("l2") == []


@pytest.mark.parametrize(
    ("begin", "cure"),
    [
        (("ACL", "SETUSER", "default", "-set"), "'dynamoth acl'"),
        (("REPLICAOF", "127.0.0.1", "1"), "REPLICAOF NO ONE"),
        (("CONFIG", "SET", "maxmemory", "1"), "raise maxmemory"),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), "min-replicas-to-write asks for"),
    ],
)
def test_a_server_that_refuses_commands_is_named_with_its_cure(
    redis_server: EmbeddedRedis, begin: tuple[str, ...], cure: str
) -> None:
    one = read_servers(f"l1={redis_server.url}")
    one.run("l1", begin)
    for run in (lambda: one.run("l1", (b"SET", b"a", b"b")), lambda: one.run_all("l1", [(b"SET", b"a", b"b")])):
        with pytest.raises(LogServerFailed, match=r"log server l1: redis://127.0.0.1:\d+: ") as found:
            run()
        assert cure in str(found.value)
