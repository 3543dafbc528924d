"""One-shot queries."""

from __future__ import annotations

import socket

import pytest

from dynamoth.errors import DynamothError
from dynamoth.events import ErrorReply
from dynamoth_cli.embedded import EmbeddedRedis
from dynamoth_link.errors import AuthenticationFailed, LinkError, ServerTooOld, ServerUnreachable
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from dynamoth_link.urls import InvalidUrl, parse_server_url
from tests.link.harness import Runner, fake_server, polite
from tests.redis_servers import RedisServerFactory


def test_replies_in_order_with_errors_as_values(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        address = parse_server_url(redis.url)
        first, error, last = await query(address, ["SET", "k", b"v"], ["NONSENSE"], ("GET", "k"))
        assert (first, last) == (b"OK", b"v")
        assert isinstance(error, ErrorReply)
        assert await query(redis.url) == []

    run_async(main)


def test_failures_are_typed(redis_server_factory: RedisServerFactory, run_async: Runner) -> None:
    server = redis_server_factory(password="right")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = f"redis://127.0.0.1:{probe.getsockname()[1]}"

    async def failure(url: str, timeout_s: float = 5.0) -> LinkError:
        with pytest.raises(LinkError) as raised:
            await query(url, ["PING"], timeout_s=timeout_s)
        assert isinstance(raised.value, DynamothError)
        return raised.value

    async def main() -> None:
        assert type(await failure(nobody)) is ServerUnreachable
        wrong = await failure(f"redis://:wrong@127.0.0.1:{server.port}")
        assert type(wrong) is AuthenticationFailed
        assert not wrong.retryable
        async with fake_server(lambda command: b"-ERR unknown command\r\n") as url:
            assert type(await failure(url)) is ServerTooOld
        async with fake_server(lambda command: b"") as url:
            assert "within 0.05 s" in str(await failure(url, timeout_s=0.05))
        options = LinkOptions(password="right")
        assert await query(f"redis://127.0.0.1:{server.port}", ["PING"], options=options) == [b"PONG"]
        with pytest.raises(InvalidUrl):
            await query("localhost", ["PING"])

    run_async(main)


def test_a_connection_lost_before_the_last_reply(redis: EmbeddedRedis, run_async: Runner) -> None:
    async def main() -> None:
        with pytest.raises(ServerUnreachable, match="closed by the server"):
            await query(redis.url, ["PING"], ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"], ["PING"], ["PING"])
        async with fake_server(lambda command: b"" if command[0] == b"GET" else polite(command)) as url:
            with pytest.raises(ServerUnreachable, match="within"):
                await query(url, ["GET", "k"], timeout_s=0.1)

    run_async(main)
