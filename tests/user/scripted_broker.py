"""A broker that does what a test says: a WebSocket server whose connections are read and written frame by frame."""

from __future__ import annotations

import asyncio
import json
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from dynamoth.edge.frames import (
    BrokerFrame,
    Connect,
    Connected,
    Data,
    Subscribed,
    UserFrame,
    read_user_frame,
    to_wire,
)
from dynamoth.edge.interests import channel_interest
from dynamoth.edge.publications import Position
from dynamoth.protocol.wire import pack, unpack

EPOCH = 0xE1

JSON = "dynamoth.v1.json"
MSGPACK = "dynamoth.v1.msgpack"

_F = TypeVar("_F", bound=UserFrame)


def at(offset: int) -> Position:
    """Return a position of the log."""
    return Position(EPOCH, offset)


def data(channel: str, payload: str | bytes, offset: int | None = None, place: tuple[int, int] | None = None) -> Data:
    """Return a publication: of a logged channel with its offset, of a live one with publisher and number."""
    return Data(channel_interest(channel).id, payload.encode() if isinstance(payload, str) else payload, offset, place)


class Peer:
    """One connection of a user."""

    def __init__(self, websocket: ServerConnection) -> None:
        self.websocket = websocket
        self.frames: asyncio.Queue[UserFrame] = asyncio.Queue()
        #: Code and reason that the user has closed the connection with.
        self.closed: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Read frames until the connection is closed."""
        try:
            async for message in self.websocket:
                wire = json.loads(message) if isinstance(message, str) else unpack(message)
                self.frames.put_nowait(read_user_frame(wire))
        except ConnectionClosed:
            pass
        self.closed.set_result((self.websocket.close_code or 0, self.websocket.close_reason or ""))

    async def read(self, kind: type[_F]) -> _F:
        """Return the next frame, which has to be of this type."""
        frame = await self.frames.get()
        assert isinstance(frame, kind), f"{kind.__name__} expected, not {frame}"
        return frame

    async def send(self, *frames: BrokerFrame) -> None:
        """Send frames, in the encoding of the connection."""
        for frame in frames:
            wire = to_wire(frame)
            await self.websocket.send(pack(wire) if self.websocket.subprotocol == MSGPACK else _json(wire))

    async def welcome(self, broker: str = "b1", *, offset: int | None = 0, **connected: Any) -> Connect:
        """Answer ``connect``: every subscription begins at its ``since``, or at ``offset``; None: they are live."""
        connect = await self.read(Connect)
        await self.send(Connected(connect.session, broker, **cast("dict[str, Any]", {"ack_s": 0.0, **connected})))
        for wanted in connect.subs:
            begin = None if offset is None else wanted.since or at(offset)
            await self.send(Subscribed(wanted.ref, wanted.interest.id, begin))
        return connect

    async def close(self, code: int, reason: str = "") -> None:
        """Close the connection."""
        await self.websocket.close(code, reason)

    def abort(self) -> None:
        """Cut the connection."""
        self.websocket.transport.abort()


class ScriptedBroker:
    """Hands the connections of users to a test, in the order in which they come."""

    def __init__(self) -> None:
        self.url = ""
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def peer(self) -> Peer:
        """Return the next connection of a user."""
        return await self.peers.get()

    async def serve(self, websocket: ServerConnection) -> None:
        peer = Peer(websocket)
        self.peers.put_nowait(peer)
        await peer.run()


@asynccontextmanager
async def scripted_broker(
    *, subprotocols: Sequence[str] | None = (JSON, MSGPACK), tls: ssl.SSLContext | None = None
) -> AsyncGenerator[ScriptedBroker]:
    """Run a scripted broker."""
    broker = ScriptedBroker()
    async with serve(
        broker.serve,
        "127.0.0.1",
        0,
        ssl=tls,
        subprotocols=None if subprotocols is None else [Subprotocol(each) for each in subprotocols],
        compression=None,
        ping_interval=None,
        close_timeout=1,
    ) as server:
        port = server.sockets[0].getsockname()[1]
        broker.url = f"ws://127.0.0.1:{port}/connect" if tls is None else f"wss://localhost:{port}/connect"
        yield broker


def _json(wire: dict[str, Any]) -> str:
    return json.dumps(wire, default=lambda value: b64encode(value).decode())
