"""What tests of the transports need: a listener that records its events, and a raw WebSocket client."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from dynamoth_broker.process.frames import Frame
from dynamoth_broker.process.transport import TransportOptions, UserConnection
from dynamoth_broker.process.websocket import WebSocketServer
from dynamoth_daemon import event_loop

PATIENCE_S = 10.0

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
CONTINUATION = 0x0
MASK = b"\x01\x02\x03\x04"

OPTIONS = TransportOptions(origins=frozenset({"https://example.org"}))
SHORT = replace(OPTIONS, handshake_timeout_s=0.2, close_timeout_s=0.2)

Run = Callable[[Coroutine[Any, Any, None]], None]


def _run_in_asyncio(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@pytest.fixture(params=[_run_in_asyncio, event_loop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine, once in each event loop."""
    chosen: Run = request.param
    return chosen


class Recorder:
    """A listener that keeps what happens, and answers what is malformed as the broker does."""

    def __init__(self) -> None:
        #: Kind and argument, or None.
        self.events: list[tuple[str, Any]] = []
        self.connections: list[UserConnection] = []
        self.on_received: Callable[[UserConnection, Frame], None] = lambda conn, frame: None
        self._changed = asyncio.Event()

    def opened(self, conn: UserConnection) -> None:
        self.connections.append(conn)
        self._note("opened")

    def received(self, conn: UserConnection, frame: Frame) -> None:
        self._note("received", frame)
        self.on_received(conn, frame)

    def malformed(self, conn: UserConnection, reason: str) -> None:
        self._note("malformed", reason)
        conn.close(4005, reason)

    def overflowed(self, conn: UserConnection) -> None:
        self._note("overflowed")

    def writable(self, conn: UserConnection) -> None:
        self._note("writable")

    def closed(self, conn: UserConnection) -> None:
        self._note("closed")

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    @property
    def received_frames(self) -> list[Frame]:
        return [argument for kind, argument in self.events if kind == "received"]

    async def until(self, kind: str, count: int = 1) -> None:
        """Wait until ``kind`` has happened ``count`` times."""
        async with asyncio.timeout(PATIENCE_S):
            while self.kinds.count(kind) < count:
                self._changed.clear()
                await self._changed.wait()

    def _note(self, kind: str, argument: Any = None) -> None:
        self.events.append((kind, argument))
        self._changed.set()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nothing reports."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    options: TransportOptions = OPTIONS, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[tuple[WebSocketServer, Recorder]]:
    recorder = Recorder()
    server = WebSocketServer.start(recorder, "127.0.0.1", 0, options, tls)
    try:
        yield server, recorder
    finally:
        async with asyncio.timeout(PATIENCE_S):
            await server.close()
        assert recorder.kinds.count("closed") == recorder.kinds.count("opened")


def request(path: str = "/connect", subprotocol: str | None = "dynamoth.v1.json", *headers: str) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: localhost",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        *([] if subprotocol is None else [f"Sec-WebSocket-Protocol: {subprotocol}"]),
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def masked(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """Return a frame as clients send it."""
    head = bytes([(0x80 if fin else 0) | opcode])
    return head + _masked_length(len(payload)) + MASK + bytes(byte ^ MASK[at % 4] for at, byte in enumerate(payload))


def _masked_length(length: int) -> bytes:
    if length < 126:
        return bytes([0x80 | length])
    return struct.pack("!BH", 0x80 | 126, length) if length < 1 << 16 else struct.pack("!BQ", 0x80 | 127, length)


class RawUser:
    """A client that sends what it is given. All that it waits for has a bound."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def send(self, opcode: int, payload: bytes = b"", *, fin: bool = True) -> None:
        self.write(masked(opcode, payload, fin=fin))

    async def head(self) -> str:
        """Return status line and headers of the answer to a request."""
        async with asyncio.timeout(PATIENCE_S):
            return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def frame(self) -> tuple[int, bytes]:
        """Return opcode and payload of the next frame."""
        async with asyncio.timeout(PATIENCE_S):
            first, length = await self.reader.readexactly(2)
            assert first & 0xF0 == 0x80, "a frame of the server is whole and not compressed"
            assert length < 128, "a frame of the server is not masked"
            if length == 126:
                (length,) = struct.unpack("!H", await self.reader.readexactly(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", await self.reader.readexactly(8))
            return first & 0x0F, await self.reader.readexactly(length)

    async def close_frame(self) -> tuple[int, str]:
        """Skip to the close frame and return its code and reason."""
        while True:
            opcode, payload = await self.frame()
            if opcode == CLOSE:
                return int.from_bytes(payload[:2], "big"), payload[2:].decode()

    async def end(self) -> None:
        """Wait until the server has closed, and drop what comes before that."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass


@asynccontextmanager
async def raw_user(
    port: int, *, tls: ssl.SSLContext | None = None, receive_bytes: int = 65536
) -> AsyncGenerator[RawUser]:
    """Connect; the handshake is the caller's."""
    host = "127.0.0.1" if tls is None else "localhost"
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=receive_bytes)
    try:
        yield RawUser(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def user(
    port: int, subprotocol: str = "dynamoth.v1.json", *, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[RawUser]:
    """Connect and finish the handshake."""
    async with raw_user(port, tls=tls) as raw:
        raw.write(request("/connect", subprotocol))
        assert "101 Switching" in await raw.head()
        yield raw
