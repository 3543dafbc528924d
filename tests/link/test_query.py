"""One-shot queries."""

from __future__ import annotations

import pytest

from dynamoth.errors import DynamothError
from dynamoth.machine.events import ErrorReply
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.errors import AuthenticationFailed, LinkError, ServerTooOld, ServerUnreachable
from dynamoth_link.handshake import open_connection
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from dynamoth_link.spares import Spares
from dynamoth_link.urls import InvalidUrl, parse_server_url
from tests.link.harness import NOBODY, fake_server, polite
from tests.redis_servers import RedisServerFactory


async def test_replies_in_order_with_errors_as_values(redis: EmbeddedRedis) -> None:
    address = parse_server_url(redis.url)
    first, error, last = await query(address, ["SET", "k", b"v"], ["NONSENSE"], ("GET", "k"))
    assert (first, last) == (b"OK", b"v")
    assert isinstance(error, ErrorReply)
    assert await query(redis.url) == []


async def test_failures_are_typed(redis_server_factory: RedisServerFactory) -> None:
    server = redis_server_factory(password="right")

    async def failure(url: str, timeout_s: float = 5.0) -> LinkError:
        with pytest.raises(LinkError) as raised:
            await query(url, ["PING"], timeout_s=timeout_s)
        assert isinstance(raised.value, DynamothError)
        return raised.value

    assert type(await failure(NOBODY)) is ServerUnreachable
    assert "the host name cannot be used (" in str(await failure("redis://x..y"))
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


async def test_a_connection_lost_before_the_last_reply(redis: EmbeddedRedis) -> None:
    with pytest.raises(ServerUnreachable, match="closed by the server"):
        await query(redis.url, ["PING"], ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"], ["PING"], ["PING"])
    async with fake_server(lambda command: b"" if command[0] == b"GET" else polite(command)) as url:
        with pytest.raises(ServerUnreachable, match="within"):
            await query(url, ["GET", "k"], timeout_s=0.1)


async def _received(redis: EmbeddedRedis) -> int:
    """How many connections the server has seen, this one included."""
    [stats] = await query(redis.url, ["INFO", "stats"])
    return int(stats.split(b"total_connections_received:")[1].split()[0])


async def test_a_kept_connection_is_taken_over_once(redis: EmbeddedRedis) -> None:
    options = LinkOptions(spares=Spares())
    before = await _received(redis)
    pushes: list[list[object]] = []
    [own_id] = await query(redis.url, ["CLIENT", "ID"], options=options, keep=True)
    connection, run_id = await open_connection(parse_server_url(redis.url), options, pushes.extend)
    try:
        assert await connection.call([["CLIENT", "ID"]]) == [own_id]
        assert run_id is not None
        connection.send(["SUBSCRIBE", "c"])
        await connection.call([["PING"]])
        assert [push[0] for push in pushes] == [b"subscribe"], "pushes go to the new owner"
        [other_id] = await query(redis.url, ["CLIENT", "ID"], options=options)
        assert other_id != own_id
    finally:
        connection.abort()
    assert await _received(redis) - before == 3


async def test_a_kept_connection_is_not_taken_when_it_is_lost_or_has_another_login(redis: EmbeddedRedis) -> None:
    spares = Spares()
    options = LinkOptions(spares=spares)
    [first] = await query(redis.url, ["CLIENT", "ID"], options=options, keep=True)
    await query(redis.url, ["ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all"])
    as_other = redis.url.replace("redis://", "redis://u:p@")
    [second] = await query(as_other, ["CLIENT", "ID"], options=options)
    assert second != first
    await query(redis.url, ["CLIENT", "KILL", "ID", first])
    [third] = await query(redis.url, ["CLIENT", "ID"], options=options, keep=True)
    assert third not in (first, second)
    await spares.close()
    clients = (await query(redis.url, ["CLIENT", "LIST"]))[0]
    assert b"id=%d " % third not in clients, "close ends what nobody took"
