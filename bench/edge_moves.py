"""Migrations of very many users between two edge brokers, at a given rate, while publications come: is anything lost?

Run with ``python -m bench.edge_moves``; ``--help`` tells the rest. The users run the machine of the client over raw
sockets, in a process of their own. All begin at one broker, which is drained; then the other one is drained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, cast

from bench.edge_broker import make_token, write_keys
from bench.edge_processes import REQUEST, USERS_PER_ADDRESS, allow_files, wait_until_started
from bench.workers import Worker
from dynamoth.edge.frames import read_broker_frame, to_wire
from dynamoth.edge.interests import channel_interest
from dynamoth.machine.events import Start, Tick
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, reserve_port
from dynamoth_client.asyncio import Redis
from dynamoth_daemon import event_loop
from dynamoth_demo.latency import LatencyCounts
from dynamoth_user import Client
from dynamoth_user.machine.events import (
    AddSubscription,
    CloseConnection,
    Confirmed,
    ConnectionClosed,
    ConnectionOpened,
    Deliver,
    DeliverGap,
    Failed,
    FrameReceived,
    Interrupted,
    NeedToken,
    OpenConnection,
    SendFrame,
    TokenReady,
    UserOptions,
)
from dynamoth_user.machine.machine import UserMachine

LOGGED, LIVE = channel_interest("log-all"), channel_interest("all")
CONNECTS_AT_ONCE = 200


@dataclass
class Seen:
    """What all users of the process have seen."""

    delivered: int = 0
    lost: int = 0
    reordered: int = 0
    gaps: int = 0
    failed: int = 0
    ready: int = 0
    #: How often a user was without a broker, and how much of a log was lost.
    interrupted: int = 0
    lost_of_log: int = 0


class _Socket(asyncio.Protocol):
    """One WebSocket of a user: short frames only."""

    def __init__(self, user: _User, number: int) -> None:
        self._user = user
        self._number = number
        self._buffer = b""
        self._is_open = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_open:
            head, end, self._buffer = self._buffer.partition(b"\r\n\r\n")
            if not end:
                self._buffer = head
                return
            assert head.startswith(b"HTTP/1.1 101 "), head
            self._is_open = True
            self._user.handle(ConnectionOpened(self._number))
        buffer, at = self._buffer, 0
        while len(buffer) >= at + 2:
            size, begin = buffer[at + 1], at + 2
            if size == 126:
                if len(buffer) < at + 4:
                    break
                size, begin = struct.unpack_from(">H", buffer, at + 2)[0], at + 4
            if len(buffer) < begin + size:
                break
            if buffer[at] == 0x81:
                frame = read_broker_frame(json.loads(buffer[begin : begin + size]))
                self._user.handle(FrameReceived(self._number, frame))
            at = begin + size
        self._buffer = buffer[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._user.lost(self._number)

    def send(self, wire: dict[str, Any]) -> None:
        text = json.dumps(wire).encode()
        assert self.transport is not None
        head = bytes((0x81, 0x80 | len(text))) if len(text) < 126 else struct.pack(">BBH", 0x81, 0xFE, len(text))
        self.transport.write(head + b"\0\0\0\0" + text)  # masked with zeros


class _User:
    """One user: its machine, its sockets, and what it has seen."""

    def __init__(
        self, number: int, urls: tuple[str, ...], made_token: str, seen: Seen, latencies: LatencyCounts
    ) -> None:
        self._number = number
        self._token = made_token
        self._seen = seen
        self._latencies = latencies
        self._sockets: dict[int, _Socket] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._latest: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        options = UserOptions(urls=urls, session=f"u{number}", has_token=True, has_fixed_token=True)
        self.machine = UserMachine(options, number)

    def start(self) -> None:
        self.handle(AddSubscription(LOGGED))
        self.handle(AddSubscription(LIVE))
        self.handle(Start())

    def handle(self, event: Any) -> None:
        now = self._loop.time()
        for action in self.machine.handle(event, now):
            self._act(action)
        deadline = self.machine.deadline()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if deadline is None else self._loop.call_at(deadline, self.handle, Tick())

    def _act(self, action: Any) -> None:
        match action:
            case SendFrame(number, frame):
                if (socket := self._sockets.get(number)) is not None:
                    socket.send(to_wire(frame))
            case Deliver(interest, payload, _):
                self._take(interest.name, payload)
            case OpenConnection(number, url):
                task = self._loop.create_task(self._open(number, url))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case CloseConnection(number, _, _):
                socket = self._sockets.pop(number, None)
                if socket is not None and socket.transport is not None:
                    socket.transport.abort()
            case NeedToken(number):
                self._loop.call_soon(self.handle, TokenReady(number, self._token))
            case Confirmed():
                self._seen.ready += 1
            case DeliverGap():
                self._seen.gaps += 1
            case Failed():
                self._seen.failed += 1
            case Interrupted():
                self._seen.interrupted += 1
            case _:
                pass

    async def _open(self, number: int, url: str) -> None:
        socket = self._sockets[number] = _Socket(self, number)
        address = self._number // USERS_PER_ADDRESS
        port = int(url.rpartition(":")[2].partition("/")[0])
        local = (f"127.0.{1 + address // 250}.{1 + address % 250}", 0)
        try:
            await self._loop.create_connection(lambda: socket, "127.0.0.1", port, local_addr=local)
        except OSError as error:
            self._sockets.pop(number, None)
            self.handle(ConnectionClosed(number, 1006, str(error)))

    def lost(self, number: int) -> None:
        if self._sockets.pop(number, None) is not None:
            self.handle(ConnectionClosed(number, 1006, "lost"))

    def _take(self, name: str, payload: bytes) -> None:
        number, sent_ns = map(int, payload.split())
        latest = self._latest.get(name)
        self._seen.delivered += 1
        if latest is not None:
            lost = max(0, number - latest - 1)
            self._seen.lost += lost
            self._seen.lost_of_log += lost if name == LOGGED.name else 0
            self._seen.reordered += number <= latest
        self._latest[name] = max(number, latest or 0)
        self._latencies.add(time.monotonic_ns() - sent_ns)


def use(pipe: Pipe, urls: tuple[str, ...], users: int, made_token: str, first_number: int = 0) -> None:
    """Run users: the target of a worker. Whatever it gets, it answers with what was seen."""
    event_loop.run(_use_all(pipe, urls, users, made_token, first_number))


async def _use_all(pipe: Pipe, urls: tuple[str, ...], users: int, made_token: str, first_number: int) -> None:
    seen, latencies = Seen(), LatencyCounts()
    crowd = [_User(first_number + number, urls, made_token, seen, latencies) for number in range(users)]
    for first in range(0, users, CONNECTS_AT_ONCE):
        for user in crowd[first : first + CONNECTS_AT_ONCE]:
            user.start()
        while seen.ready < 2 * min(first + CONNECTS_AT_ONCE, users):  # noqa: ASYNC110 - callbacks count
            await asyncio.sleep(0.01)
    pipe.send("ready")
    commands: asyncio.Queue[None] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    while True:
        await commands.get()
        where: dict[str, int] = {}
        moves = 0
        for user in crowd:
            serving = user.machine.serving
            broker = "" if serving is None or not serving.is_up else serving.broker
            where[broker] = where.get(broker, 0) + 1
            moves += user.machine.counters["moves"]
        pipe.send((asdict(seen), where, moves, dict(latencies.counts)))
        latencies.counts.clear()
        latencies.total = 0


def _quantile_ms(counts: dict[int, int], ratio: float) -> float:
    latencies = LatencyCounts()
    latencies.merge(counts)
    latencies.total = sum(counts.values())
    return latencies.quantile_ms(ratio) or 0.0


class _Bench:
    def __init__(self, stack: ExitStack, users: int, rate: float, per_s: float) -> None:
        self._users, self._rate, self._per_s = users, rate, per_s
        #: Latencies while users move, by class.
        self._during: dict[int, int] = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._cluster = stack.enter_context(LocalCluster(2))
        log = stack.enter_context(EmbeddedRedis())
        self._ports: dict[str, int] = {}
        for id_ in ("b1", "b2"):
            with reserve_port() as reserved:
                self._ports[id_] = reserved.getsockname()[1]
        self._urls = {id_: f"ws://127.0.0.1:{port}/connect" for id_, port in self._ports.items()}
        for id_, port in self._ports.items():
            others = " ".join(url for other, url in self._urls.items() if other != id_)
            child: Child = self._cluster.beside(
                id_,
                *("broker", "--id", id_, "--port", str(port), "--logs", f"l1=redis://127.0.0.1:{log.port}"),
                *("--history", "log-*", "--token-keys-file", str(write_keys(folder)), "--alternates", others),
                *("--accepts-per-s-max", "5000"),
            )
            child.start()
            stack.callback(child.stop)
            wait_until_started(child)
        self._made_token = make_token()
        self._worker = Worker(use, (self._urls["b1"], self._urls["b2"]), users, self._made_token)
        stack.callback(self._worker.stop)

    def _ask(self) -> tuple[dict[str, int], dict[str, int], int, dict[int, int]]:
        self._worker.send(None)
        return cast("tuple[dict[str, int], dict[str, int], int, dict[int, int]]", self._worker.receive())

    async def _publish(self) -> None:
        client = Redis.from_url(self._cluster.url)
        async with Client([self._urls["b1"]], token=self._made_token) as logged:
            number = 0
            while True:
                number += 1
                text = b"%d %d" % (number, time.monotonic_ns())
                await asyncio.gather(client.publish(LIVE.name, text), logged.publish(LOGGED.name, text))
                await asyncio.sleep(1 / self._per_s)

    async def run(self) -> dict[str, Any]:
        await asyncio.to_thread(self._worker.receive)
        publishing = asyncio.create_task(self._publish())
        await asyncio.sleep(5)
        await asyncio.to_thread(self._ask)
        await asyncio.sleep(10)
        *_, rest = await asyncio.to_thread(self._ask)
        begin = time.monotonic()
        for full, empty in (("b1", "b2"), ("b2", "b1")):
            await asyncio.to_thread(self._operate, "drain", full, "--rate", str(self._rate))
            await self._until_all_are_at(empty)
            await asyncio.to_thread(self._operate, "undrain", full)
        duration_s = time.monotonic() - begin
        seen, where, moves, during = await asyncio.to_thread(self._ask)
        during_all = dict(self._during)
        for of, count in during.items():
            during_all[of] = during_all.get(of, 0) + count
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        return {
            "users": self._users,
            "moves": moves,
            "moves_per_s": round(moves / duration_s, 1),
            **seen,
            "where": where,
            "rest_ms_p99": round(_quantile_ms(rest, 0.99), 1),
            "moving_ms_p99": round(_quantile_ms(during_all, 0.99), 1),
        }

    async def _until_all_are_at(self, broker: str) -> None:
        while True:
            if (await asyncio.to_thread(self._where)).get(broker, 0) == self._users:
                return
            await asyncio.sleep(0.5)

    def _where(self) -> dict[str, int]:
        _, where, _, counts = self._ask()
        for of, count in counts.items():
            self._during[of] = self._during.get(of, 0) + count
        return where

    def _operate(self, *words: str) -> None:
        command = dynamoth_command("broker", *words, "--url", self._cluster.url_of("operator"))
        subprocess.run(command, check=True, capture_output=True, timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=500.0, help="users that are asked to move per second")
    parser.add_argument("--per-s", type=float, default=0.5, help="publications per second on each of two channels")
    arguments = parser.parse_args()
    allow_files(3 * arguments.users // 2 + 2000)  # a second connection while one moves
    with ExitStack() as stack:
        bench = _Bench(stack, arguments.users, arguments.rate, arguments.per_s)
        result = asyncio.run(bench.run())
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
