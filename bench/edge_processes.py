"""Processes for the benchmarks of the edge broker's transports: a server, and users from many addresses.

Users are raw: they send the request of a handshake and count the bytes that come, so that the server is measured.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import broadcast as websockets_broadcast
from websockets.asyncio.server import serve as websockets_serve

from bench.workers import Worker
from dynamoth_broker.process.frames import Frame
from dynamoth_broker.process.handshake import JSON
from dynamoth_broker.process.transport import TransportOptions, UserConnection, broadcast, prepare
from dynamoth_broker.process.websocket import WebSocketServer
from dynamoth_cli.local.child import Child
from dynamoth_daemon import event_loop
from dynamoth_demo.latency import LatencyCounts

System = Literal["broker", "websockets"]
SYSTEMS: tuple[System, ...] = ("broker", "websockets")

TEXT_CHARACTERS = 138
FRAME: Frame = {"type": "data", "s": "A" * 22, "o": 123456, "d": "x" * TEXT_CHARACTERS}
"""200 bytes as JSON."""

FRAME_BYTES = len(prepare(FRAME).websocket_json)
TIME_AT = prepare(FRAME).websocket_json.index(b"xxx")
"""Where the text begins in a frame on the wire."""

SAMPLE_EVERY = 8
"""One of so many users takes times."""

HANDSHAKES_AT_ONCE = 256
USERS_PER_ADDRESS = 250
REQUEST = (
    b"GET /connect HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: dynamoth.v1.json\r\n"
    b"User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0\r\n"
    b"Accept-Encoding: gzip, deflate, br\r\nAccept-Language: en-US,en;q=0.9\r\n\r\n"
)


@dataclass(frozen=True)
class Usage:
    """What a process has used so far."""

    resident_bytes: int
    user_s: float
    system_s: float


def usage() -> Usage:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(pages * resource.getpagesize(), used.ru_utime, used.ru_stime)


# The server.


class ServerProcess:
    """A server of one system in a process of its own."""

    def __init__(self, system: System, certificate: Path | None = None) -> None:
        self._worker = Worker(_serve, system, certificate)
        self.port: int = self._worker.receive()

    def usage(self) -> Usage:
        self._worker.send(("usage",))
        return cast(Usage, self._worker.receive())

    def users(self) -> int:
        """Return how many users have finished their handshake."""
        self._worker.send(("users",))
        return cast(int, self._worker.receive())

    def fan_out(self, turns: int, burst: int) -> float:
        """Send ``burst`` frames to every user in each of ``turns`` turns, and return how many seconds that took."""
        self._worker.send(("fan_out", turns, burst))
        return cast(float, self._worker.receive())

    def sustain(self, per_s: float, seconds: float) -> tuple[int, float]:
        """Send frames to every user at a rate, whatever becomes of them.

        Returns how many were sent, and how long it took until all were in the sockets.
        """
        self._worker.send(("sustain", per_s, seconds))
        return cast("tuple[int, float]", self._worker.receive())

    def stop(self) -> None:
        self._worker.stop()


class _Idle:
    """A listener that keeps the connections."""

    def __init__(self) -> None:
        self.connections: list[UserConnection] = []

    def opened(self, conn: UserConnection) -> None:
        self.connections.append(conn)

    def received(self, conn: UserConnection, frame: Frame) -> None: ...
    def malformed(self, conn: UserConnection, reason: str) -> None: ...
    def overflowed(self, conn: UserConnection) -> None: ...
    def writable(self, conn: UserConnection) -> None: ...
    def closed(self, conn: UserConnection) -> None: ...


def _serve(pipe: Connection, system: System, certificate: Path | None) -> None:
    event_loop.run((_serve_broker if system == "broker" else _serve_websockets)(pipe, _tls(certificate)))


def _tls(certificate: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def _serve_broker(pipe: Connection, tls: ssl.SSLContext | None) -> None:
    listener = _Idle()
    options = TransportOptions(accepts_per_s=1e6)  # how many it can accept is measured
    server = WebSocketServer.start(listener, "0.0.0.0", 0, options, tls)
    prepared = prepare(FRAME)

    def unsent() -> bool:
        return any(each.unsent_bytes for each in reversed(listener.connections))  # the last one is written to last

    def send(text: str) -> None:
        broadcast(listener.connections, prepare({**FRAME, "d": text}))

    def send_one() -> None:
        broadcast(listener.connections, prepared)

    await _obey(pipe, server.port, listener.connections, send_one, send, unsent)


async def _serve_websockets(pipe: Connection, tls: ssl.SSLContext | None) -> None:
    connections: list[ServerConnection] = []

    async def handle(connection: ServerConnection) -> None:
        connections.append(connection)
        await connection.wait_closed()

    server = await websockets_serve(
        handle, "0.0.0.0", 0, ssl=tls, subprotocols=[JSON], compression=None, ping_interval=None, backlog=4096
    )
    fixed = prepare(FRAME).sse.removeprefix(b"data: ").strip().decode()

    def send(text: str) -> None:
        websockets_broadcast(connections, json.dumps({**FRAME, "d": text}, separators=(",", ":")))

    def unsent() -> bool:
        return any(each.transport.get_write_buffer_size() for each in reversed(connections))

    port = next(iter(server.sockets)).getsockname()[1]
    await _obey(pipe, port, connections, lambda: websockets_broadcast(connections, fixed), send, unsent)


async def _obey(
    pipe: Connection,
    port: int,
    connections: list[Any],
    send_one: Callable[[], None],
    send: Callable[[str], None],
    unsent: Callable[[], bool],
) -> None:
    """Do what the commands in ``pipe`` say, until it ends."""
    commands: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    pipe.send(port)
    while True:
        match await commands.get():
            case ("usage",):
                pipe.send(usage())
            case ("users",):
                pipe.send(len(connections))
            case ("fan_out", int(turns), int(burst)):
                pipe.send(await _fan_out(turns, burst, send_one, unsent))
            case ("sustain", float(per_s), float(seconds)):
                pipe.send(await _sustain(per_s, seconds, send, unsent))
            case other:
                raise AssertionError(other)


async def _fan_out(turns: int, burst: int, send_one: Callable[[], None], unsent: Callable[[], bool]) -> float:
    begin = time.perf_counter()
    for _ in range(turns):
        for _ in range(burst):
            send_one()
        while unsent():  # noqa: ASYNC110 - all is in the sockets before the next turn, so that no two of them join
            await asyncio.sleep(0)
    return time.perf_counter() - begin


async def _sustain(
    per_s: float, seconds: float, send: Callable[[str], None], unsent: Callable[[], bool]
) -> tuple[int, float]:
    """Send at a rate, open loop: if the loop is late, it sends several in one turn."""
    begin = time.monotonic()
    sent = 0
    while (now := time.monotonic()) < begin + seconds:
        while begin + sent / per_s <= now:
            due_ns = int((begin + sent / per_s) * 1e9)
            send(f"{due_ns:019d}".ljust(TEXT_CHARACTERS, "x"))
            sent += 1
        await asyncio.sleep(max(0.0, begin + sent / per_s - time.monotonic()))
    while unsent():  # noqa: ASYNC110 - a turn of the loop writes more
        await asyncio.sleep(0)
    return sent, time.monotonic() - begin


# The users.


class UsersProcess:
    """Users of one server in a process of their own."""

    def __init__(self, port: int, users: int, *, tls: bool = False) -> None:
        self._worker = Worker(_use, port, users, tls)
        self.connect_s: float = self._worker.receive()
        """From the first connection to the last handshake."""

    def received_bytes(self) -> int:
        """Return the bytes of frames that have come."""
        self._worker.send(None)
        return cast(int, self._worker.receive())

    def latencies(self) -> dict[int, int]:
        """Return the classes of latencies of timed frames since the last call; see ``_SampledUser``."""
        self._worker.send("latencies")
        return cast("dict[int, int]", self._worker.receive())

    def usage(self) -> Usage:
        self._worker.send("usage")
        return cast(Usage, self._worker.receive())

    def stop(self) -> None:
        self._worker.stop()


class _User(asyncio.Protocol):
    received_bytes = 0

    def __init__(self, ready: asyncio.Future[None]) -> None:
        self._ready: asyncio.Future[None] | None = ready

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(REQUEST)

    def data_received(self, data: bytes) -> None:
        if self._ready is not None:
            assert data.startswith(b"HTTP/1.1 101 ") and data.endswith(b"\r\n\r\n"), data
            self._ready.set_result(None)
            self._ready = None
        else:
            _User.received_bytes += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        sys.exit(f"the server has closed a connection ({exc})")


class _SampledUser(_User):
    """A user that takes times: of the oldest frame of each part that comes, for all frames in it."""

    latencies = LatencyCounts()

    def __init__(self, ready: asyncio.Future[None]) -> None:
        super().__init__(ready)
        #: Bytes of the frame that has come in part.
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        is_frames = self._ready is None
        super().data_received(data)
        if not is_frames:
            return
        data = self._rest + data
        frames, rest = divmod(len(data), FRAME_BYTES)
        self._rest = data[len(data) - rest :] if rest else b""
        if frames and (due := data[TIME_AT : TIME_AT + 19]).isdigit():
            type(self).latencies.add(time.monotonic_ns() - int(due))


def _use(pipe: Connection, port: int, users: int, tls: bool) -> None:
    event_loop.run(_use_all(pipe, port, users, tls))


async def _use_all(pipe: Connection, port: int, users: int, tls: bool) -> None:
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    numbers = iter(range(users))
    begin = time.perf_counter()
    await asyncio.gather(*(_connect_some(numbers, port, context) for _ in range(HANDSHAKES_AT_ONCE)))
    pipe.send(time.perf_counter() - begin)
    commands: asyncio.Queue[str | None] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    while True:
        match await commands.get():
            case "latencies":
                pipe.send(dict(_SampledUser.latencies.counts))
                _SampledUser.latencies = LatencyCounts()
            case "usage":
                pipe.send(usage())
            case _:
                pipe.send(_User.received_bytes)


_keep: list[asyncio.BaseTransport] = []


async def _connect_some(numbers: Iterator[int], port: int, context: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    for number in numbers:
        address = number // USERS_PER_ADDRESS
        ready = loop.create_future()
        transport, _ = await loop.create_connection(
            lambda ready=ready, kind=_User if number % SAMPLE_EVERY else _SampledUser: kind(ready),
            "127.0.0.1",
            port,
            ssl=context,
            local_addr=(f"127.0.{1 + address // 250}.{1 + address % 250}", 0),
        )
        _keep.append(transport)
        await ready


# For both benchmarks.


def allow_files(files: int) -> None:
    """Raise the limit of open files of this process and of those that it starts. Raises ValueError if it cannot."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, max(files, hard)))


@contextmanager
def certificate(folder: Path) -> Generator[Path]:
    """Make a key on the curve P-256 and a certificate for localhost, in one file."""
    path = folder / "server.pem"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path)]
    command = ["openssl", "req", "-x509", *key, "-subj", "/CN=localhost", "-out", str(folder / "server.crt")]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + (folder / "server.crt").read_bytes())
    yield path


def wait_until_started(broker: Child) -> None:
    """Wait until a broker serves users. Raises ChildEnded, TimeoutError."""
    broker.wait_for_line('"the broker has started"', timeout_s=60.0)


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Ask every 20 ms until ``condition`` holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    for _ in itertools.count():
        if condition():
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the server or its users have not got this far")
        time.sleep(0.02)
