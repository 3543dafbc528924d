"""One WebSocket connection to a broker: opens it, reads and writes frames, and closes it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.typing import Subprotocol

from dynamoth.edge.frames import BrokerFrame, UserFrame
from dynamoth.errors import MalformedMessage
from dynamoth_user.complaints import why_not_connected
from dynamoth_user.encoding import Codec

LOST = 1006
WRONG_SUBPROTOCOL = 1002
MALFORMED = 4005

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Bound of one message from a broker; a larger one ends the connection."""

OUTGOING_MAX = 10_000
"""Frames that wait to be written. With more, and none written for ``UNREAD_S_MAX``, the connection is lost."""

UNREAD_S_MAX = 10.0
"""A broker that reads nothing for this time is taken for dead, where much waits for it."""

CLOSE_S_MAX = 2.0
"""Time for the answer to our close frame; then the socket is closed without it."""

REASON_BYTES_MAX = 123
"""Bound of the reason in a close frame (RFC 6455, section 5.5)."""

_log = logging.getLogger("dynamoth_user")
_websocket_log = logging.getLogger("dynamoth_user.websocket")


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What all connections of a client share."""

    codec: Codec
    #: None: the one that Python makes by default.
    tls: ssl.SSLContext | None = None
    proxy: str | Literal[True] | None = True


class Owner(Protocol):
    """What happens on connections is reported to it. Each method returns at once."""

    @property
    def is_behind(self) -> bool:
        """Whether the application is so far behind that nothing more is read; ``BrokerConnection.resume`` ends it."""
        ...

    def connection_opened(self, number: int) -> None:
        """Handle that a connection is open."""
        ...

    def connection_closed(self, number: int, code: int, reason: str) -> None:
        """Handle that a connection was lost, or could not be opened. It does not come after ``close``."""
        ...

    def frame_received(self, number: int, frame: BrokerFrame) -> None:
        """Handle a frame."""
        ...

    def reading_paused(self, number: int, *, is_paused: bool) -> None:
        """Handle that nothing is read any more, or again."""
        ...


class BrokerConnection:
    """One connection; it begins to open at once, in a task of its own."""

    def __init__(self, number: int, url: str, options: ConnectionOptions, owner: Owner) -> None:
        """Begin to connect to ``url``."""
        self._number = number
        self._url = url
        self._options = options
        self._owner = owner
        self._websocket: ClientConnection | None = None
        self._outgoing: deque[UserFrame] = deque()
        #: When the last frame was written, or the first one began to wait.
        self._progress_at = 0.0
        self._wakes_writer = asyncio.Event()
        self._wakes_reader = asyncio.Event()
        #: Code and reason, once it is to be closed: nothing more is reported.
        self._closing: tuple[int, str] | None = None
        self.task = asyncio.create_task(self._run(), name=f"dynamoth user: connection {number}")

    # The owner's side.

    def send(self, frame: UserFrame) -> None:
        """Send a frame after the earlier ones. It is lost if the connection is."""
        if self._closing is not None:
            return
        now = asyncio.get_running_loop().time()
        if not self._outgoing:
            self._progress_at = now
        self._outgoing.append(frame)
        self._wakes_writer.set()
        if len(self._outgoing) > OUTGOING_MAX and now - self._progress_at > UNREAD_S_MAX:
            self._lose(LOST, "the broker does not read")

    def close(self, code: int, reason: str) -> None:
        """Close the connection after the frames that wait; ``task`` ends when that is done, or has taken too long."""
        if self._closing is not None:
            return
        self._closing = code, reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
        self._wakes_writer.set()
        self._wakes_reader.set()
        if self._websocket is None:
            self.task.cancel()
        else:
            timer = asyncio.get_running_loop().call_later(2 * CLOSE_S_MAX, self.task.cancel)
            self.task.add_done_callback(lambda _: timer.cancel())

    def resume(self) -> None:
        """Read again: the application has handled enough."""
        self._wakes_reader.set()

    # Its task.

    async def _run(self) -> None:
        options = self._options
        try:
            websocket = await connect(
                self._url,
                subprotocols=[Subprotocol(options.codec.subprotocol)],
                compression=None,
                proxy=options.proxy,
                open_timeout=None,  # the machine has a bound
                ping_interval=None,  # the protocol has its own
                close_timeout=CLOSE_S_MAX,
                max_size=FRAME_BYTES_MAX,
                logger=_websocket_log,
                ssl=(options.tls or True) if self._url.startswith("wss:") else None,
            )
        except Exception as error:
            self._report_closed(LOST, why_not_connected(error, self._url))
            return
        self._websocket = websocket
        writer = asyncio.create_task(self._write(websocket), name=f"dynamoth user: writer {self._number}")
        try:
            if websocket.subprotocol != options.codec.subprotocol:
                self._lose(WRONG_SUBPROTOCOL, f"the broker does not speak {options.codec.subprotocol}")
            else:
                self._owner.connection_opened(self._number)
            await self._read(websocket)
            await writer
        finally:
            writer.cancel()
            if websocket.state is not State.CLOSED:  # after a cancellation
                websocket.transport.abort()
            await asyncio.gather(writer, return_exceptions=True)
            await websocket.wait_closed()

    async def _read(self, websocket: ClientConnection) -> None:
        """Report frames until the connection is closed."""
        while True:
            try:
                message = await websocket.recv()
            except ConnectionClosed as error:
                self._on_end(error)
                return
            if self._closing is not None:
                continue  # until the answer to our close frame
            try:
                frame = self._options.codec.decode(message)
            except MalformedMessage as error:
                _log.warning("a broker has sent a malformed frame: %s: %s", self._url, error)
                self._lose(MALFORMED, f"a malformed frame: {error}")
                continue
            self._owner.frame_received(self._number, frame)
            if self._owner.is_behind and not self._is_closing():
                await self._pause()

    def _is_closing(self) -> bool:
        return self._closing is not None

    async def _pause(self) -> None:
        self._owner.reading_paused(self._number, is_paused=True)
        while self._owner.is_behind and not self._is_closing():
            self._wakes_reader.clear()
            await self._wakes_reader.wait()
        self._owner.reading_paused(self._number, is_paused=False)

    async def _write(self, websocket: ClientConnection) -> None:
        try:
            while True:
                while self._outgoing:
                    await websocket.send(self._options.codec.encode(self._outgoing.popleft()))
                    self._progress_at = asyncio.get_running_loop().time()
                if self._closing is not None:
                    await websocket.close(*self._closing)
                    return
                self._wakes_writer.clear()
                await self._wakes_writer.wait()
        except ConnectionClosed:
            return  # the reader reports it

    # The end.

    def _on_end(self, error: ConnectionClosed) -> None:
        """Report a code of the broker; where this side has ended the connection it would only be an echo."""
        self._wakes_writer.set()
        if error.rcvd is not None and error.rcvd_then_sent is not False:
            self._report_closed(error.rcvd.code, error.rcvd.reason or f"closed with {error.rcvd.code}")
        else:
            self._report_closed(LOST, f"the connection was lost: {error}")
        if self._closing is None:
            self._closing = LOST, ""  # ends the writer

    def _lose(self, code: int, reason: str) -> None:
        """Close the connection for what the broker did, and report it as lost."""
        self._report_closed(LOST, reason)
        self.close(code, reason)

    def _report_closed(self, code: int, reason: str) -> None:
        if self._closing is None:
            self._owner.connection_closed(self._number, code, reason)
