"""A process of very many raw users for the trials: one connection each, no client. They log in, subscribe and count.

Orders come through the pipe, and each is answered. A frame is looked at as text: only the time in a publication is
read.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

from bench.edge_processes import REQUEST
from bench.workers import Worker
from dynamoth_daemon import event_loop
from dynamoth_demo.latency import LatencyCounts

CONNECTS_AT_ONCE = 200
SMALL_BUFFER_BYTES = 65_536
PING, MOVED_IN, UNSUBSCRIBED, GAP = b'"ping"', b'"moved_in"', b'"unsubscribed"', b'"gap"'
MARK = b"sent="
"""What comes before the time at which a publication was sent, in ns, and a blank."""


@dataclass(frozen=True, kw_only=True)
class CrowdOptions:
    """What the users of a process are."""

    port: int
    users: int
    token: str
    name: str = "u"
    #: Channels that every user has, and how many it has for itself alone.
    channels: Sequence[str] = ()
    own_channels: int = 0
    own_prefix: str = "own"
    #: These users also have the channel ``heavy``, and stop reading when they are asked to.
    stalling: int = 0
    heavy: str = ""
    tls: bool = False


class _User(asyncio.Protocol):
    def __init__(self, crowd: _Crowd, number: int) -> None:
        self._crowd = crowd
        self._buffer = b""
        self._is_open = False
        self.transport: asyncio.Transport | None = None
        self.number = number
        self.ready: asyncio.Future[None] = crowd.loop.create_future()
        self.unsubscribed: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        crowd = self._crowd
        buffer = self._buffer + data if self._buffer else data
        at = 0
        if not self._is_open:
            head, end, _ = buffer.partition(b"\r\n\r\n")
            if not end:
                self._buffer = buffer
                return
            assert head.startswith(b"HTTP/1.1 101 "), head
            self._is_open = True
            self.send(crowd.connect_frame(self.number))
            at = len(head) + 4
        while len(buffer) >= at + 2:
            size, begin = buffer[at + 1], at + 2
            if size == 126:
                if len(buffer) < at + 4:
                    break
                size, begin = struct.unpack_from(">H", buffer, at + 2)[0], at + 4
            elif size == 127:
                if len(buffer) < at + 10:
                    break
                size, begin = struct.unpack_from(">Q", buffer, at + 2)[0], at + 10
            if len(buffer) < begin + size:
                break
            self._frame(buffer, begin, begin + size)
            at = begin + size
        self._buffer = buffer[at:]

    def _frame(self, buffer: bytes, begin: int, end: int) -> None:
        crowd = self._crowd
        crowd.frames += 1
        place = buffer.find(MARK, begin, end)
        if place >= 0:
            if self.number < crowd.options.stalling:
                crowd.frames_of_stalling += 1
            else:
                crowd.latencies.add(time.monotonic_ns() - int(buffer[place + 5 : buffer.index(b" ", place)]))
        elif buffer.find(PING, begin, end) >= 0:
            self.send({"type": "pong"})
        elif buffer.find(MOVED_IN, begin, end) >= 0:
            self.ready.set_result(None)
        elif buffer.find(UNSUBSCRIBED, begin, end) >= 0:
            if self.unsubscribed is not None and not self.unsubscribed.done():
                self.unsubscribed.set_result(None)
        elif buffer.find(GAP, begin, end) >= 0:
            crowd.gaps += 1
        elif buffer.find(b'"error"', begin, end) >= 0:
            crowd.errors.append(buffer[begin:end].decode(errors="replace")[:300])

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.lost.append(self.number)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(f"closed before it was served: {exc}"))

    def send(self, frame: dict[str, Any]) -> None:
        text = json.dumps(frame).encode()
        assert self.transport is not None
        head = bytes((0x81, 0x80 | len(text))) if len(text) < 126 else struct.pack(">BBH", 0x81, 0xFE, len(text))
        self.transport.write(head + b"\0\0\0\0" + text)  # masked with zeros


class _Crowd:
    def __init__(self, options: CrowdOptions) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.latencies = LatencyCounts()
        self.frames = 0
        #: Publications that came to those who stall at times.
        self.frames_of_stalling = 0
        self.gaps = 0
        self.lost: list[int] = []
        self.errors: list[str] = []
        self.users: list[_User] = []
        self._churned = 0

    def connect_frame(self, number: int) -> dict[str, Any]:
        """Return the first frame of a user."""
        options = self.options
        names = [*options.channels]
        names += [f"{options.own_prefix}{number * options.own_channels + each}" for each in range(options.own_channels)]
        if number < options.stalling:
            names.append(options.heavy)
        subs = [{"ref": ref, "channel": name} for ref, name in enumerate(names)]
        return {
            "type": "connect", "v": 1, "session": f"{options.name}{number}", "token": options.token, "subs": subs,
        }  # fmt: skip

    async def connect_all(self) -> float:
        """Connect all users; return how long that took."""
        context = None
        if self.options.tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        numbers = iter(range(self.options.users))

        async def connect_some() -> None:
            for number in numbers:
                user = _User(self, number)
                self.users.append(user)
                connected = await self._connect(is_small=number < self.options.stalling)
                await self.loop.create_connection(
                    lambda user=user: user,
                    sock=connected,
                    ssl=context,
                    server_hostname="localhost" if context else None,
                )
                await user.ready

        begin = time.perf_counter()
        await asyncio.gather(*(connect_some() for _ in range(CONNECTS_AT_ONCE)))
        return time.perf_counter() - begin

    async def _connect(self, *, is_small: bool) -> socket.socket:
        """Connect a socket; a small one keeps little, so that the broker sees soon that nobody reads."""
        connected = socket.socket()
        connected.setblocking(False)
        if is_small:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        await self.loop.sock_connect(connected, ("127.0.0.1", self.options.port))
        return connected

    def take(self) -> dict[str, Any]:
        """Return what has happened, and latencies since the last call."""
        counts, self.latencies = dict(self.latencies.counts), LatencyCounts()
        return {
            "latencies": counts,
            "frames": self.frames,
            "frames_of_stalling": self.frames_of_stalling,
            "gaps": self.gaps,
            "lost": len(self.lost),
            "errors": self.errors[:5],
        }

    def set_reading(self, is_reading: bool) -> None:
        """Let the users that stall read, or not."""
        for user in self.users:
            if user.number < self.options.stalling and user.transport is not None:
                if user.transport.is_closing():
                    continue
                (user.transport.resume_reading if is_reading else user.transport.pause_reading)()

    async def churn(self, per_s: float, seconds: float, pool: int, prefix: str) -> dict[str, float]:
        """Subscribe and unsubscribe, ``per_s`` times a second; return how many pairs were done, and how long it took.

        Names are of ``pool`` different ones, 0: each is new.
        """
        begin = time.perf_counter()
        done = 0
        latest = 0.0

        async def run(user: _User, offset: int) -> None:
            nonlocal done, latest
            ref = 1000
            interval = len(self.users) / per_s
            due = begin + offset / per_s
            while due < begin + seconds:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                self._churned += 1
                name = f"{prefix}{self._churned % pool if pool else self._churned}"
                ref += 1
                user.send({"type": "subscribe", "ref": ref, "channel": name})
                user.unsubscribed = self.loop.create_future()
                user.send({"type": "unsubscribe", "s": _interest(name)})
                asked = time.perf_counter()
                await user.unsubscribed
                latest = max(latest, time.perf_counter() - asked)
                done += 1
                due += interval

        await asyncio.gather(*(run(user, offset) for offset, user in enumerate(self.users)))
        return {"pairs": done, "seconds": time.perf_counter() - begin, "answer_s_max": latest}


def _interest(name: str) -> str:
    from dynamoth.edge.interests import channel_interest

    return channel_interest(name).id


class Crowd:
    """The handle of a process of raw users."""

    def __init__(self, options: CrowdOptions) -> None:
        self._worker = Worker(_live, options)
        self.login_s: float = self._worker.receive(300.0)
        """From the first connection until every subscription of everybody was answered."""

    def ask(self, *order: Any) -> Any:
        """Send an order; return the answer."""
        self._worker.send(order)
        return self._worker.receive(300.0)

    def stop(self) -> None:
        """End the process."""
        self._worker.stop()


def _live(pipe: Connection, options: CrowdOptions) -> None:
    event_loop.run(_live_all(pipe, options))


async def _live_all(pipe: Connection, options: CrowdOptions) -> None:
    crowd = _Crowd(options)
    pipe.send(await crowd.connect_all())
    orders: asyncio.Queue[Any] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: orders.put_nowait(pipe.recv()))
    while True:
        match await orders.get():
            case ("take",):
                pipe.send(crowd.take())
            case ("reading", bool(is_reading)):
                crowd.set_reading(is_reading)
                pipe.send(None)
            case ("churn", float(per_s), float(seconds), int(pool), str(prefix)):
                pipe.send(await crowd.churn(per_s, seconds, pool, prefix))
            case other:
                raise AssertionError(other)
