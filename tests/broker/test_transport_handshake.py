from __future__ import annotations

import asyncio
import errno
import logging
import socket
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.errors import ConfigError
from dynamoth_broker.process import accept
from dynamoth_broker.process.accept import KEEPALIVE_S, UNSENT_KERNEL_BYTES, USER_TIMEOUT_S
from dynamoth_broker.process.handshake import REQUEST_BYTES_MAX
from dynamoth_broker.process.transport import TransportOptions
from dynamoth_broker.process.websocket import WebSocketServer
from tests.broker.transport_users import (
    OPTIONS,
    SHORT,
    TEXT,
    Recorder,
    Run,
    masked,
    raw_user,
    request,
    run,
    serving,
    user,
)

__all__ = ["run"]


REFUSED = {
    "no subprotocol": (request("/connect", None), 400),
    "an unknown subprotocol": (request("/connect", "dynamoth.v2.json, graphql-ws"), 400),
    "a foreign origin": (request("/connect", "dynamoth.v1.json", "Origin: https://example.com"), 403),
    "an origin that begins like ours": (
        request("/connect", "dynamoth.v1.json", "Origin: https://example.org.example.com"),
        403,
    ),
    "the origin of a local file": (request("/connect", "dynamoth.v1.json", "Origin: null"), 403),
    "two origins": (
        request("/connect", "dynamoth.v1.json", "Origin: https://example.org", "Origin: https://example.com"),
        400,
    ),
    "another path": (request("/"), 404),
    "a path below": (request("/connect/1"), 404),
    "plain HTTP": (b"GET /connect HTTP/1.1\r\nHost: localhost\r\n\r\n", 426),
    "another method": (request().replace(b"GET", b"PUT"), 405),
    "an old version": (request().replace(b"Version: 13", b"Version: 8"), 400),
    "no key": (request().replace(b"-Key: ", b"-Kex: "), 400),
    "a long line": (request("/connect", "dynamoth.v1.json", "Cookie: " + "x" * 9_000), 431),
    "many headers": (request("/connect", "dynamoth.v1.json", *["X: y"] * 200), 431),
    "a long request": (request("/connect", "dynamoth.v1.json", *["X: " + "y" * 8_000] * 3), 431),
    "a message before the answer": (request() + masked(TEXT, b"{}"), 400),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_handshakes(data: bytes, status: int) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), raw_user(server.port) as raw:
            raw.write(data)
            assert (await raw.head()).startswith(f"HTTP/1.1 {status} ")
            await raw.end()
            assert recorder.events == []

    asyncio.run(main())


@pytest.mark.parametrize("headers", [(), ("Origin: https://example.org",)])
@pytest.mark.parametrize("path", ["/connect", "/connect?a=b"])
def test_accepted_handshakes(path: str, headers: tuple[str, ...]) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), raw_user(server.port) as raw:
            offered = "graphql-ws, dynamoth.v1.msgpack, dynamoth.v1.json"
            compression = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"
            raw.write(request(path, offered, compression, *headers))
            head = await raw.head()
            assert "101 Switching Protocols" in head
            assert "Sec-WebSocket-Protocol: dynamoth.v1.msgpack\r\n" in head
            assert "Extensions" not in head, "compression is never negotiated"
            await recorder.until("opened")

    asyncio.run(main())


def test_bytes_that_are_no_request_end_the_connection(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder):
            for data in (b"\x16\x03\x01\x02\x00" + b"\r\n" * 10, b"hello\r\n", b"x" * (REQUEST_BYTES_MAX + 1)):
                async with raw_user(server.port) as raw:
                    raw.write(data)
                    await raw.end()
            assert recorder.events == []

    run(main())


def test_a_slow_handshake_is_cut_off(run: Run) -> None:
    async def main() -> None:
        async with serving(SHORT) as (server, recorder), raw_user(server.port) as silent, raw_user(server.port) as slow:
            slow.write(request()[:-2])
            await asyncio.gather(silent.end(), slow.end())
            assert recorder.events == [] and not server.connections
            async with user(server.port) as raw:
                loop = asyncio.get_running_loop()
                await recorder.until("opened")
                timed_out = loop.create_future()
                loop.call_later(2 * SHORT.handshake_timeout_s, timed_out.set_result, None)
                await timed_out
                raw.send(TEXT, b"{}")
                await recorder.until("received")  # who has finished has no such bound

    run(main())


def test_accepts_per_second_are_bounded(run: Run) -> None:
    async def main() -> None:
        async with serving(replace(OPTIONS, accepts_per_s=50.0)) as (server, recorder):
            loop = asyncio.get_running_loop()
            begin = loop.time()

            async def come() -> None:
                async with user(server.port):
                    pass

            await asyncio.gather(*(come() for _ in range(30)))
            assert recorder.kinds.count("opened") == 30
            assert loop.time() - begin >= 0.4  # a burst of 5, then 25 at 50 per second

    run(main())


def test_accepted_sockets_find_out_about_dead_peers(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, recorder), user(server.port):
            await recorder.until("opened")
            (conn,) = server.connections
            accepted = conn.get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            wanted = {
                socket.TCP_KEEPIDLE: KEEPALIVE_S,
                socket.TCP_USER_TIMEOUT: USER_TIMEOUT_S * 1000,
                socket.TCP_NOTSENT_LOWAT: UNSENT_KERNEL_BYTES,
                socket.TCP_NODELAY: 1,
            }
            assert {each: accepted.getsockopt(socket.IPPROTO_TCP, each) for each in wanted} == wanted

    run(main())


def test_without_file_descriptors_users_wait(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "OUT_OF_FILES_PAUSE_S", 0.05)
    accept_one, failures = socket.socket.accept, iter([errno.EMFILE, errno.ENFILE])

    def scarce(listening: socket.socket) -> tuple[socket.socket, Any]:
        code = next(failures, None)
        if code is not None:
            raise OSError(code, "none left")
        return accept_one(listening)

    async def main() -> None:
        async with serving() as (server, recorder):
            monkeypatch.setattr(socket.socket, "accept", scarce)
            async with user(server.port):
                await recorder.until("opened")

    with caplog.at_level(logging.ERROR, "dynamoth.broker"):
        run(main())
    assert caplog.text.count("none left") == 2


def test_a_taken_port_is_an_error_of_the_configuration() -> None:
    async def main() -> None:
        async with serving() as (server, _):
            with pytest.raises(ConfigError, match="choose another"):
                WebSocketServer.start(Recorder(), "127.0.0.1", server.port, TransportOptions())

    asyncio.run(main())
