from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import pytest

from dynamoth.errors import ConfigError
from dynamoth_daemon import http
from dynamoth_daemon.http import HttpAnswer, HttpQuery, HttpServer, health, readiness

PATIENCE_S = 10.0


def answer_fine() -> HttpAnswer:
    return HttpAnswer(HTTPStatus.OK, b"fine\n")


def answer_bug() -> HttpAnswer:
    raise RuntimeError("a bug")


@asynccontextmanager
async def serving() -> AsyncGenerator[HttpServer]:
    paths: dict[str, Callable[[], HttpAnswer]] = {
        "/fine": answer_fine,
        "/bug": answer_bug,
        "/healthz": health,
        "/readyz": lambda: readiness("no plan"),
    }
    queries: dict[str, HttpQuery] = {"/echo": lambda query: HttpAnswer(HTTPStatus.OK, query.encode())}
    server = await HttpServer.start("127.0.0.1", 0, paths, queries)
    try:
        yield server
    finally:
        await server.close()


async def ask(server: HttpServer, request: bytes) -> tuple[int, bytes, bytes]:
    """Return status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head, body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (get("/fine"), 200, b"fine\n"),
        (get("/fine?name[]=x"), 200, b"fine\n"),
        (get("/echo?name[]=x&y"), 200, b"name[]=x&y"),
        (get("/echo"), 200, b""),
        (get("/healthz"), 200, b"ok\n"),
        (get("/readyz"), 503, b"not ready: no plan\n"),
        (get("/"), 404, b"no such path; there are /fine, /bug, /healthz, /readyz, /echo\n"),
        (get("/fine", "HEAD"), 200, b""),
        (get("/fine", "POST"), 405, b"Method Not Allowed\n"),
        (b"GET /fine\r\n\r\n", 400, b"Bad Request\n"),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", 400, b"Bad Request\n"),
        (b"GET /fine HTTP/2.0\r\n\r\n", 400, b"Bad Request\n"),
        (b"GET /fine HTTP/1.1\r\nX: " + b"x" * http.REQUEST_BYTES_MAX, 431, b"Request Header Fields Too Large\n"),
    ],
)
async def test_requests(request_bytes: bytes, status: int, body: bytes) -> None:
    async with serving() as server:
        found_status, head, found_body = await ask(server, request_bytes)
        assert (found_status, found_body) == (status, body)
        length = 5 if request_bytes.startswith(b"HEAD") else len(body)
        assert b"Content-Length: %d" % length in head and b"Connection: close" in head


async def test_a_handler_with_a_bug_is_logged_and_answers_500(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "dynamoth.http"):
        async with serving() as server:
            assert (await ask(server, get("/bug")))[0] == 500
            assert (await ask(server, get("/fine")))[0] == 200
    assert "/bug" in caplog.text and "a bug" in caplog.text


async def test_a_request_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.05)
    async with serving() as server:
        assert (await ask(server, b"GET /fine HTTP/1.1\r\n"))[0] == 408


async def test_a_client_that_leaves_in_the_middle_does_no_harm() -> None:
    async with serving() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /fi")
        writer.transport.abort()
        assert (await ask(server, get("/fine")))[0] == 200


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 2)
    async with serving() as server:
        slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        for number in range(3):  # slow ones do not keep a probe out: the oldest is closed
            assert (await ask(server, get("/fine")))[0] == 200
            with suppress(ConnectionResetError):
                async with asyncio.timeout(PATIENCE_S):
                    assert await slow[number][0].read() == b""
            slow += [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        for reader, writer in slow[-2:]:
            writer.write(get("/fine"))
            async with asyncio.timeout(PATIENCE_S):
                assert (await reader.read()).endswith(b"fine\n")
        for _, writer in slow:
            writer.close()
        assert (await ask(server, get("/fine")))[0] == 200


async def test_connections_that_come_in_one_turn_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of the oldest one has not begun when it is cancelled."""
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 2)
    async with serving() as server:
        together = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
        streams = [await asyncio.open_connection(sock=one) for one in together]
        for reader, _ in streams[:3]:
            with suppress(ConnectionResetError):
                async with asyncio.timeout(PATIENCE_S):
                    assert await reader.read() == b""
        for _, writer in streams:
            writer.close()


async def test_closing_cuts_what_is_under_way() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET")
        assert (await ask(server, get("/fine")))[0] == 200, "so it has taken the earlier connection too"
        await server.close()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
async def test_an_address_that_cannot_be_listened_at_is_a_configuration_error(host: str) -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match=r"http_port .*: choose another host or port"):
            await HttpServer.start(host, server.port, {})


def test_readiness() -> None:
    assert readiness(None).status == HTTPStatus.OK
    assert readiness("x").status == HTTPStatus.SERVICE_UNAVAILABLE
