"""A link to servers that are silent, too old, not Redis at all, or break the rules."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from dynamoth.errors import ConfigError
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.errors import (
    AuthenticationFailed,
    LinkError,
    ProtocolViolation,
    ServerLoading,
    ServerTooOld,
    ServerUnreachable,
)
from dynamoth_link.options import LinkOptions
from dynamoth_link.query import query
from tests.link.harness import NOBODY, PATIENCE_S, Answer, fake_server, opened, polite, up


def answering(name: bytes, reply: bytes) -> Answer:
    """Polite but for one command."""
    return lambda command: reply if command[0] == name else polite(command)


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (answering(b"HELLO", b"-ERR unknown command `HELLO`\r\n"), ServerTooOld, "use Redis 6.2"),
        (answering(b"HELLO", b"-NOPROTO unsupported\r\n"), ServerTooOld, "use Redis 6.2"),
        (answering(b"HELLO", b"%1\r\n+version\r\n+6.0.16\r\n"), ServerTooOld, "this is Redis 6.0.16"),
        (answering(b"HELLO", b"-NOPERM no hello\r\n"), AuthenticationFailed, "ACL SETUSER"),
        (answering(b"HELLO", b"-DENIED Redis is running in protected mode\r\n"), AuthenticationFailed, "protected"),
        (answering(b"HELLO", b"-ERR max number of clients reached\r\n"), ServerUnreachable, "maxclients"),
        (answering(b"HELLO", b"-LOADING Redis is loading\r\n"), ServerLoading, "wait until it has finished"),
        (answering(b"PING", b"-LOADING Redis is loading\r\n"), ServerLoading, "wait until it has finished"),
        (answering(b"HELLO", b"-ERR whatever\r\n"), LinkError, "whatever"),
        (answering(b"HELLO", b"+OK\r\n"), ProtocolViolation, "HELLO was answered with"),
        (answering(b"HELLO", b"HTTP/1.1 400 Bad Request\r\n\r\n"), ProtocolViolation, "is a Redis server"),
    ],
)
async def test_handshakes_that_fail(answer: Answer, error: type[LinkError], says: str) -> None:
    async with fake_server(answer) as url, opened(url) as (link, calls):
        first, second = (await calls.count("down", 2))[:2]
        assert says in first
        assert first == second
        assert type(link.fault) is error
        assert calls.of("up") == []


@pytest.mark.parametrize(
    ("refusal", "error", "says"),
    [
        (b"-ERR max number of clients reached\r\n", ServerUnreachable, "maxclients"),
        (b"-DENIED Redis is running in protected mode\r\n", AuthenticationFailed, "protected mode"),
    ],
)
async def test_a_server_that_says_why_it_takes_no_connection(refusal: bytes, error: type[LinkError], says: str) -> None:
    """As Redis does: it writes and closes before it has read anything, so that a write of ours may fail."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for _ in range(20):
        with pytest.raises(error, match=says):
            await query(url, ["PING"])
    server.close()


async def test_a_version_that_cannot_be_read_is_left_in_peace() -> None:
    answer = answering(b"HELLO", b"%1\r\n+version\r\n+unstable\r\n")
    async with fake_server(answer) as url, up(url) as (_, calls):
        assert calls.of("up") == ["abcdef"]


async def test_a_server_that_accepts_and_never_answers() -> None:
    cut = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # to the end: the link cuts the connection
        cut.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = LinkOptions(connect_timeout_s=0.05, backoff_s_min=1000, backoff_s_max=1000)
    async with opened(url, options) as (link, calls):
        assert "no answer within 0.05 s" in (await calls.count("down", 1))[0]
        assert isinstance(link.fault, ServerUnreachable)
        async with asyncio.timeout(10):
            await cut.wait()
    server.close()


async def test_pings_keep_a_silent_link_up_unless_they_are_off() -> None:
    pings: Counter[str] = Counter()
    enough = asyncio.Event()

    def counting(name: str) -> Answer:
        def answer(command: list[bytes]) -> bytes:
            pings[name] += command[0] == b"PING"
            if pings["on"] == 5:
                enough.set()
            return polite(command)

        return answer

    off = LinkOptions(ping_interval_s=0, ping_timeout_s=0.01)
    async with (
        fake_server(counting("on")) as pinged,
        fake_server(counting("off")) as other,
        up(other, off) as (_, other_calls),
        up(pinged) as (_, calls),
    ):
        async with asyncio.timeout(PATIENCE_S):
            await enough.wait()
        assert pings["off"] == 1, "that of the handshake"
        assert calls.of("down") == other_calls.of("down") == []


@pytest.mark.parametrize(
    ("bytes_", "says"),
    [
        (b"garbage\r\n", "protocol error"),
        (b"$-17\r\n", "protocol error"),
        (b"+first\r\n+second\r\n", "nobody asked for"),
        (b">2\r\n+message\r\n:1\r\n@\r\n", "protocol error"),
    ],
)
async def test_garbage_ends_the_connection_and_not_the_link(bytes_: bytes, says: str) -> None:
    async with fake_server(answering(b"ECHO", bytes_)) as url, up(url) as (link, calls):
        link.send(["ECHO", "x"])
        assert says in (await calls.count("down", 1))[0]
        assert isinstance(link.fault, ProtocolViolation) or link.is_up
        await calls.count("up", 2)
        assert len(calls.pushes) == bytes_.count(b">")


async def test_a_server_that_does_not_read(redis: EmbeddedRedis) -> None:
    loop = asyncio.get_running_loop()
    options = LinkOptions(write_buffer_bytes_max=1_000_000, ping_interval_s=0, close_timeout_s=0.1)
    without_bound = replace(options, write_buffer_bytes_max=0)
    async with up(redis.url, options) as (link, calls), up(redis.url, without_bound) as (unbounded, _):
        redis.pause()
        while not calls.of("down"):
            link.send(["PUBLISH", "c", b"x" * 500_000])
            await asyncio.sleep(0)
        assert "more than 1000000 bytes wait to be sent" in calls.of("down")[0]
        unbounded.send(["PUBLISH", "c", b"x" * 50_000_000])
        assert unbounded.write_buffer_size > 25_000_000  # the operating system takes some at once
        began_at = loop.time()
        await unbounded.close()
        assert 0.09 < loop.time() - began_at < 5
        redis.resume()


@pytest.mark.parametrize("accepts", [False, True])
async def test_attempts_are_spaced_by_the_backoff(accepts: bool) -> None:
    """Whether nobody listens, or the server drops us at once."""
    loop = asyncio.get_running_loop()
    options = LinkOptions(backoff_s_min=0.02, backoff_s_max=0.08, ping_interval_s=0)
    async with fake_server(answering(b"INFO", polite([b"INFO"]) + b"+unasked\r\n")) as url:
        began_at = loop.time()
        async with opened(url if accepts else NOBODY, options) as (_, calls):
            await calls.count("down", 6)  # after waits of 0.02, 0.04, 0.08, 0.08, 0.08 s, halved at most
            assert loop.time() - began_at >= 0.15 - 0.01


@pytest.mark.parametrize(
    "setting",
    [
        {"connect_timeout_s": 0},
        {"ping_interval_s": -1},
        {"ping_timeout_s": 0},
        {"backoff_s_min": 0},
        {"backoff_s_min": 2, "backoff_s_max": 1},
        {"client_name": "two words"},
        {"client_name": ""},
        {"write_buffer_bytes_max": -1},
    ],
)
def test_options_out_of_range(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(reversed(setting)))):
        LinkOptions(**setting)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # wrong on purpose
