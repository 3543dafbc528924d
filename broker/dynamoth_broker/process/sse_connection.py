"""The event stream of one user, and what the user posts.

A stream has a task of its own, which writes what :meth:`SseConnection.send` has queued and waits while the user does
not read; nobody else waits for it. It takes several times the memory of a WebSocket connection.

An event stream has no close codes, so the broker's last event is ``close``, with ``{"code": ..., "reason": ...}``.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiohttp import web

from dynamoth.errors import MalformedMessage
from dynamoth_broker.process.frames import Encoding, Frame, parse_json
from dynamoth_broker.process.transport import Prepared, UserConnection, abort_above

if TYPE_CHECKING:
    from dynamoth_broker.process.sse import SseServer

WRITTEN_BYTES = 64 * 1024
"""What is given to aiohttp at a time, from the queue of a stream."""

POSTS_UNPACED_MAX = 16
"""Frames that a stream may get by POST without a pause; more are slowed down to ``frames_per_s``, as WebSockets are."""

_log = logging.getLogger("dynamoth.broker.sse")


class SseConnection(UserConnection):
    """One event stream."""

    __slots__ = (
        "_abort_above",
        "_closing",
        "_ended",
        "_last_event_id",
        "_opened",
        "_over",
        "_paced_at",
        "_queued",
        "_queued_bytes",
        "_request",
        "_server",
        "_timer",
        "_token",
        "_wake",
        "owner",
    )

    def __init__(self, server: SseServer, request: web.Request, token: str | None, owner: str | None) -> None:
        self.user = None
        self.owner: Final = owner
        self._server = server
        self._request = request
        self._token = token
        self._last_event_id = request.headers.get("Last-Event-ID")
        self._queued: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._opened = False
        self._over = False
        #: More unsent bytes than this end the connection; None while the listener does not know that it is full.
        self._abort_above: int | None = None
        self._closing = False
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        #: When everything that was posted is handled, at ``frames_per_s``.
        self._paced_at = 0.0

    @property
    def encoding(self) -> Encoding:
        """Always JSON."""
        return "json"

    @property
    def peer(self) -> str:
        """Address and port of the other side; empty when the connection has ended."""
        transport = self._request.transport
        address = None if transport is None else transport.get_extra_info("peername")
        return "" if address is None else f"{address[0]}:{address[1]}"

    @property
    def last_event_id(self) -> str | None:
        """The header ``Last-Event-ID``: where a browser goes on that has reconnected. Users can forge it."""
        return self._last_event_id

    @property
    def is_stream(self) -> bool:
        """Always."""
        return True

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in the broker and in the transport; not those in the socket."""
        transport = self._request.transport
        return self._queued_bytes + (0 if transport is None else transport.get_write_buffer_size())

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent and received."""
        return self._opened and not self._closing and not self._ended

    @property
    def is_closing(self) -> bool:
        """Whether nothing more can be sent or received, ever."""
        return self._closing or self._ended

    def is_of(self, token: str | None) -> bool:
        """Whether ``token`` is what the stream began with, or what it was refreshed with."""
        return hmac.compare_digest((token or "").encode(), (self._token or "").encode())

    def send(self, prepared: Prepared) -> None:
        """Queue a frame. Frames arrive in order, or the connection ends. Does nothing once it is closing."""
        if not self.is_open:
            return
        event_id = self._server.event_id(self)
        self._queue(prepared.sse, b"\n" if event_id is None else b"id: %b\n\n" % event_id.encode())
        bound = self._server.options.unsent_bytes_max
        unsent = self.unsent_bytes
        if self._abort_above is not None and unsent > self._abort_above:
            self.abort()
        elif unsent > bound and not self._over:
            self._over = True
            self._server.loop.call_soon(self._report_over)

    def _report_over(self) -> None:
        if self._over:
            self._abort_above = abort_above(self.unsent_bytes, self._server.options.unsent_bytes_max)
            self._report(self._server.listener.overflowed)

    def close(self, code: int, reason: str = "") -> None:
        """Send what is queued and an event ``close``, then end. Does nothing the second time."""
        if not self.is_open:
            return
        text = json.dumps({"code": code, "reason": reason}, ensure_ascii=False, separators=(",", ":"))
        self._queue(b"event: close\ndata: %b\n\n" % text.encode())
        self._closing = True
        self._timer = self._server.loop.call_later(self._server.options.close_timeout_s, self.abort)

    def abort(self) -> None:
        """End at once, and drop what is queued."""
        self._closing = True
        self._queued.clear()
        self._queued_bytes = 0
        self._wake.set()
        if self._request.transport is not None:
            self._request.transport.abort()

    # What the server uses.

    def pace(self) -> float:
        """Return how many seconds the next POST has to wait; one that would wait too long does not count."""
        now, options = self._server.loop.time(), self._server.options
        due = max(self._paced_at, now) + 1 / options.frames_per_s
        delay_s = due - now - POSTS_UNPACED_MAX / options.frames_per_s
        if delay_s <= options.handshake_timeout_s:
            self._paced_at = due
        return max(0.0, delay_s)

    async def run(self, response: web.StreamResponse, connect: Frame) -> None:
        """Report the connection, then write what is queued until it is closed. Raises ConnectionError."""
        self._opened = True
        self._server.listener.opened(self)
        if self.is_open:
            self._report(lambda conn: self._server.listener.received(conn, connect))
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queued:
                await response.write(self._take())
                low = self._server.options.unsent_bytes_max // 4
                if self._over and (not self._queued or self.unsent_bytes <= low):
                    self._over = False
                    if self._abort_above is not None:
                        self._abort_above = None
                        self._report(self._server.listener.writable)
            if self._closing:
                await response.write_eof()
                return

    def receive(self, body: bytes) -> str | None:
        """Report what the user has posted, and return why it is malformed, if it is."""
        try:
            frame = parse_json(body)
        except (MalformedMessage, UnicodeDecodeError) as error:
            reason = str(error) if isinstance(error, MalformedMessage) else "not UTF-8"
            self._report(lambda conn: self._server.listener.malformed(conn, reason))
            return reason
        self._report(lambda conn: self._server.listener.received(conn, frame))
        token = frame.get("token")
        if frame.get("type") == "refresh" and isinstance(token, str) and self._server.user_of(token) == self.owner:
            self._token = token  # a refused one leaves the former, which is valid until it expires
        return None

    def end(self) -> None:
        """Report the end, once."""
        self._ended = True
        self._queued.clear()
        self._queued_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        if self._opened:
            self._opened = False
            self._server.listener.closed(self)

    def _queue(self, *parts: bytes) -> None:
        self._queued.extend(parts)
        self._queued_bytes += sum(map(len, parts))
        self._wake.set()

    def _take(self) -> bytes:
        parts: list[bytes] = []
        taken = 0
        while self._queued and taken < WRITTEN_BYTES:
            part = self._queued.popleft()
            parts.append(part)
            taken += len(part)
        self._queued_bytes -= taken
        return b"".join(parts)

    def _report(self, event: Callable[[UserConnection], None]) -> None:
        if not self.is_open:
            return
        try:
            event(self)
        except Exception:
            _log.exception("a stream of a user ends")
            self.abort()
