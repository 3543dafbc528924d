"""What a whole edge broker does with real Redis servers: users that log in, memory of idle users, deliveries.

Run with ``python -m bench.edge_broker``; ``--help`` tells the rest. Users are raw, in a process of their own: they log
in with a signed token and three subscriptions each, and count bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import jwt
from websockets.frames import Frame, Opcode

from bench.edge_processes import (
    HANDSHAKES_AT_ONCE,
    REQUEST,
    USERS_PER_ADDRESS,
    allow_files,
    wait_for,
    wait_until_started,
)
from bench.workers import Worker
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, reserve_port
from dynamoth_client import Redis
from dynamoth_daemon import event_loop

SECRET = b"0123456789abcdef0123456789abcdef"
PAYLOAD = b"x" * 138
TAIL = b'"moved_in"}'
"""The end of the last frame that a user gets before it waits for publications."""


@dataclass(frozen=True)
class Measured:
    """What one broker did."""

    users: int
    logins_per_s: float
    bytes_per_user: float
    deliveries_per_s: float
    redis_connections: int
    redis_deliveries_per_publication: int


def write_keys(folder: Path) -> Path:
    """Write a key set with one secret key, and return the file."""
    keys = folder / "keys.json"
    secret = base64.urlsafe_b64encode(SECRET).rstrip(b"=").decode()
    keys.write_text(json.dumps({"keys": [{"kty": "oct", "kid": "k", "alg": "HS256", "k": secret}]}))
    return keys


def make_token() -> str:
    """Return a token that allows everything for an hour."""
    claims = {"sub": "bench", "exp": time.time() + 3600, "channels": ["*"], "publish": ["*"]}
    return jwt.encode(claims, SECRET, "HS256", headers={"kid": "k"})


class Users:
    """Users of one broker, in a process of their own."""

    def __init__(self, port: int, users: int, token: str) -> None:
        self._worker = Worker(_use, port, users, token)
        self.login_s: float = self._worker.receive()

    def received_bytes(self) -> int:
        self._worker.send(None)
        return cast(int, self._worker.receive())

    def stop(self) -> None:
        self._worker.stop()


class _User(asyncio.Protocol):
    received_bytes = 0

    def __init__(self, connect: bytes, ready: asyncio.Future[None]) -> None:
        self._connect: bytes | None = connect
        self._ready: asyncio.Future[None] | None = ready
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        if self._connect is not None:
            assert data.startswith(b"HTTP/1.1 101 "), data
            assert self._transport is not None
            self._transport.write(self._connect)
            self._connect = None
        elif self._ready is None:
            _User.received_bytes += len(data)
        elif data.endswith(TAIL):
            self._ready.set_result(None)
            self._ready = None

    def connection_lost(self, exc: Exception | None) -> None:
        sys.exit(f"the broker has closed a connection ({exc})")


def _use(pipe: Connection, port: int, users: int, token: str) -> None:
    event_loop.run(_use_all(pipe, port, users, token))


async def _use_all(pipe: Connection, port: int, users: int, token: str) -> None:
    numbers = iter(range(users))
    begin = time.perf_counter()
    await asyncio.gather(*(_connect_some(numbers, port, token) for _ in range(HANDSHAKES_AT_ONCE)))
    pipe.send(time.perf_counter() - begin)
    commands: asyncio.Queue[None] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    while True:
        await commands.get()
        pipe.send(_User.received_bytes)


_keep: list[asyncio.BaseTransport] = []


async def _connect_some(numbers: Iterator[int], port: int, token: str) -> None:
    loop = asyncio.get_running_loop()
    for number in numbers:
        address = number // USERS_PER_ADDRESS
        ready = loop.create_future()
        subs = [
            {"ref": 0, "channel": "all"},
            {"ref": 1, "channel": "log-all"},
            {"ref": 2, "channel": f"some{number % 100}"},
        ]
        text = json.dumps({"type": "connect", "v": 1, "session": f"u{number}", "token": token, "subs": subs})
        frame = Frame(Opcode.TEXT, text.encode()).serialize(mask=True)
        transport, _ = await loop.create_connection(
            partial(_User, frame, ready),
            "127.0.0.1",
            port,
            local_addr=(f"127.0.{1 + address // 250}.{1 + address % 250}", 0),
        )
        _keep.append(transport)
        await ready


@contextmanager
def broker(cluster: LocalCluster, log: EmbeddedRedis, folder: Path) -> Generator[tuple[Child, int]]:
    """Run a broker; yields it, and its port."""
    keys = write_keys(folder)
    with reserve_port() as reserved:
        port: int = reserved.getsockname()[1]
        child = Child(
            "broker",
            dynamoth_command(
                *("broker", "--config", str(cluster.config_file), "--id", "b1", "--port", str(port)),
                *("--logs", f"l1=redis://127.0.0.1:{log.port}", "--history", "log-*"),
                *("--token-keys-file", str(keys), "--accepts-per-s-max", "100000"),
            ),
            environment=dict(os.environ),
        )
        child.start()
    try:
        wait_until_started(child)
        yield child, port
    finally:
        child.stop()


def resident_bytes(process: int) -> int:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:"))


def measure(users: int, publications: int) -> Measured:
    token = make_token()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster, log = stack.enter_context(LocalCluster(1)), stack.enter_context(EmbeddedRedis())
        with broker(cluster, log, folder) as (child, port):
            first = Users(port, 100, token)
            before = resident_bytes(child.pid)
            crowd = Users(port, users, token)
            try:
                grown = resident_bytes(child.pid) - before
                client = Redis.from_url(cluster.url)
                connections = len(cast("list[Any]", cast("Any", client).client_list(_type="pubsub")))
                receivers = client.publish("all", PAYLOAD)
                wait_for(lambda: crowd.received_bytes() > 0)
                frame = crowd.received_bytes() // users
                wait_for(lambda: crowd.received_bytes() == frame * users or crowd.received_bytes() % users == 0)
                start = crowd.received_bytes()
                begin = time.perf_counter()
                for _ in range(publications):
                    client.publish("all", PAYLOAD)
                # The number of a publication has more digits after the ninth: no less than this comes.
                wait_for(lambda: crowd.received_bytes() - start >= start * publications, timeout_s=300)
                seconds = time.perf_counter() - begin
                client.close()
                return Measured(
                    users, users / crowd.login_s, grown / users, users * publications / seconds, connections, receivers
                )
            finally:
                crowd.stop()
                first.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--publications", type=int, default=50)
    arguments = parser.parse_args()
    allow_files(arguments.users + 2000)
    result = measure(arguments.users, arguments.publications)
    sys.stdout.write(
        f"{result.users:,} users: {result.logins_per_s:,.0f} logins/s, {result.bytes_per_user / 1024:.1f} KiB each,"
        f" {result.deliveries_per_s:,.0f} deliveries/s\n"
        f"Redis: {result.redis_connections} subscribed connections,"
        f" {result.redis_deliveries_per_publication} deliveries per publication\n"
    )
    sys.stdout.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
