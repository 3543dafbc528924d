"""Real brokers for tests: on a real cluster, with a real log server; and users that speak the protocol themselves."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiohttp
import jwt
from websockets.asyncio.client import ClientConnection, connect

from dynamoth_broker.events import BrokerOptions
from dynamoth_broker.process.runtime import BrokerConfig, run_broker
from dynamoth_client.asyncio import Redis

PATIENCE_S = 10.0
SECRET = b"0123456789abcdef0123456789abcdef"


def write_keys(folder: Path) -> Path:
    """Write a key set with one secret key, and return the file."""
    file = folder / "keys.json"
    secret = base64.urlsafe_b64encode(SECRET).rstrip(b"=").decode()
    file.write_text(json.dumps({"keys": [{"kty": "oct", "kid": "k1", "alg": "HS256", "k": secret}]}))
    return file


def token(key: bytes = SECRET, algorithm: str = "HS256", kid: str = "k1", **claims: Any) -> str:
    """Return a token that allows everything, but for what ``claims`` say."""
    rights = {"sub": "ada", "exp": time.time() + 60, "channels": ["*"], "publish": ["*"], "queries": ["*"]}
    return jwt.encode(rights | claims, key, algorithm, headers={"kid": kid})


@dataclass
class RunningBroker:
    """A broker of this process."""

    id: str
    port: int
    sse_port: int
    _stop: asyncio.Event
    _task: asyncio.Task[int]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/connect"

    async def stop(self) -> int:
        """End it as SIGTERM does; return its exit code."""
        self._stop.set()
        return await asyncio.wait_for(self._task, PATIENCE_S)

    async def kill(self) -> None:
        """End it without a word to its users."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def running_broker(
    cluster_url: str, logs: dict[str, str], id_: str = "b1", **settings: Any
) -> AsyncGenerator[RunningBroker]:
    """Run a broker until the end of the block."""
    machine = {name: settings.pop(name) for name in list(settings) if name in BrokerOptions.__dataclass_fields__}
    options = replace(BrokerOptions(id=id_, logs=logs, history=("log*",)), **machine)
    make_client: Callable[[], Redis] = partial(Redis.from_url, cluster_url)
    defaults: dict[str, Any] = {"id": id_, "port": 0, "anonymous": True}
    config = BrokerConfig(**defaults | settings, options=options, make_client=make_client)
    stop = asyncio.Event()
    ports: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_broker(config, stop, lambda port, sse_port: ports.set_result((port, sse_port))))
    awaited: set[asyncio.Future[Any]] = {task, ports}
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    if task.done():
        await task
    port, sse_port = await ports
    broker = RunningBroker(id_, port, sse_port, stop, task)
    try:
        yield broker
    finally:
        if not task.done():
            await broker.stop()


@dataclass
class RawUser:
    """A user that speaks JSON over a WebSocket, frame by frame."""

    socket: ClientConnection
    #: Frames that were passed over.
    skipped: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @classmethod
    async def open(cls, url: str, *subs: dict[str, Any], session: str = "someone", **fields: Any) -> Self:
        """Connect, and wait until every subscription is answered."""
        user = await cls.dial(url)
        numbered = [{"ref": ref, **sub} for ref, sub in enumerate(subs)]
        await user.send("connect", v=1, session=session, subs=numbered, **fields)
        await user.until("moved_in")
        return user

    @classmethod
    async def dial(cls, url: str) -> Self:
        """Open a connection, and send nothing."""
        return cls(await connect(url, subprotocols=["dynamoth.v1.json"], compression=None))  # type: ignore[list-item]

    async def send(self, type_: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type_, **fields}))

    async def receive(self) -> dict[str, Any]:
        """Return the next frame, without pings."""
        while True:
            frame: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), PATIENCE_S))
            if frame["type"] != "ping":
                return frame

    async def until(self, type_: str) -> dict[str, Any]:
        """Return the next frame of a type; ``skipped`` keeps those before it."""
        while (frame := await self.receive())["type"] != type_:
            self.skipped.append(frame)
        return frame

    def answers(self) -> dict[int, dict[str, Any]]:
        """Return what was answered so far, by ``ref``."""
        return {frame["ref"]: frame for frame in self.skipped if "ref" in frame}

    async def texts(self, count: int) -> list[str]:
        """Return the texts of the next publications."""
        return [(await self.until("data"))["d"] for _ in range(count)]

    async def close_code(self) -> int | None:
        """Wait until the broker has closed the connection; return the code."""
        await asyncio.wait_for(self.socket.wait_closed(), PATIENCE_S)
        return self.socket.close_code

    async def close(self) -> None:
        await self.socket.close()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def encoded_connect(*subs: dict[str, Any]) -> str:
    """Return the parameter ``connect`` of a stream of server-sent events, of the session "ada"."""
    connect = {"type": "connect", "v": 1, "session": "ada", "subs": subs}
    return base64.urlsafe_b64encode(json.dumps(connect).encode()).decode()


async def events_until(stream: aiohttp.ClientResponse, type_: str) -> tuple[str, dict[str, Any]]:
    """Return the id and the frame of the next event of a type."""
    data: dict[str, Any] = {}
    id_ = ""
    while True:
        line = (await asyncio.wait_for(stream.content.readline(), PATIENCE_S)).decode().rstrip("\n")
        if line.startswith("data: "):
            data = json.loads(line.removeprefix("data: "))
        elif line.startswith("id: "):
            id_ = line.removeprefix("id: ")
        elif not line and data:
            if data["type"] == type_:
                return id_, data
            data = {}
