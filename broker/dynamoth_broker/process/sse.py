"""Serves users over server-sent events and POST, for networks that let no WebSocket through. aiohttp speaks HTTP.

A stream has a task of its own, which writes what :meth:`SseConnection.send` has queued and waits while the user does
not read; nobody else waits for it. It takes several times the memory of a WebSocket connection.

An event stream has no close codes, so the broker's last event is ``close``, with ``{"code": ..., "reason": ...}``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import logging
import math
import re
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from dynamoth.errors import MalformedMessage
from dynamoth_broker.machine import NOT_ALLOWED
from dynamoth_broker.process.accept import Acceptor
from dynamoth_broker.process.event_ids import HEADER_BYTES_MAX
from dynamoth_broker.process.frames import Encoding, Frame, parse_json
from dynamoth_broker.process.handshake import log_refused_origin
from dynamoth_broker.process.posting import records_answer, split_records
from dynamoth_broker.process.tokens import TokenRefused
from dynamoth_broker.process.transport import (
    EventId,
    Listener,
    Prepared,
    TransportOptions,
    UserConnection,
    abort_above,
)

PARSED_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Bound of the first line and of each header as parsed: what is longer than ``HEADER_BYTES_MAX`` gets an answer."""

WRITTEN_BYTES = 64 * 1024
"""What is given to aiohttp at a time, from the queue of a stream."""

KEEPALIVE_S = 30.0
"""A connection without a request is closed after this time."""

STREAMS_PER_SESSION_MAX = 4
"""A session of a user has two streams while it reconnects. More are refused."""

POSTS_UNPACED_MAX = 16
"""Frames that a stream may get by POST without a pause; more are slowed down to ``frames_per_s``, as WebSockets are."""

LOGGED_EVERY_S = 10.0
"""Requests that are no HTTP are logged this often, at most."""

_TOO_LONG = (
    f"The %s has more than {HEADER_BYTES_MAX} bytes: subscribe to less in `connect`, and to the rest by POST, or use"
    " WebSocket.\n"
)
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would wait for more
}
_PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Cache-Control, Content-Type, Last-Event-ID",
    "Access-Control-Max-Age": "86400",
}


UserOf = Callable[[str | None], str | None]
"""Returns the user that a token is of, empty for nobody's; None if the token is not valid."""


StoreRecords = Callable[[Sequence[bytes]], Awaitable[Sequence[tuple[str, str]]]]
"""Stores records; returns code and reason of each."""

PostRecords = Callable[[str | None, str], StoreRecords | None]
"""Returns what stores records of a dataset for the user of a token; None: it may not. Raises TokenRefused."""


def _no_event_id(_conn: UserConnection) -> None:
    return None


def _nobody(_token: str | None) -> str:
    return ""


class SseServer:
    """Listens for users. Made by :meth:`start`; ends with :meth:`close`."""

    def __init__(self, listener: Listener, options: TransportOptions, event_id: EventId, user_of: UserOf) -> None:
        self.listener: Final = listener
        self.options: Final = options
        self.event_id: Final = event_id
        self.user_of: Final = user_of
        self.http_log: Final = HttpLog()
        self.loop: Final = asyncio.get_running_loop()
        #: Open streams by session, oldest first: POST goes to the newest of its user.
        self._streams: Final[dict[str, list[SseConnection]]] = {}
        #: Accepted sockets without a request, for at most ``handshake_timeout_s``; later, aiohttp bounds the time.
        self._silent: Final[set[web.RequestHandler]] = set()
        self._runner: web.AppRunner | None = None
        self._acceptor: Acceptor | None = None

    @classmethod
    async def start(
        cls,
        listener: Listener,
        host: str,
        port: int,
        options: TransportOptions | None = None,
        tls: ssl.SSLContext | None = None,
        event_id: EventId = _no_event_id,
        user_of: UserOf = _nobody,
        post_records: PostRecords | None = None,
    ) -> SseServer:
        """Listen at ``host`` and ``port`` (0: any that is free, see :attr:`port`).

        ``event_id`` is called for each frame in ``send``; it has no line breaks. ``user_of`` tells the streams of
        different users with one session apart. With ``post_records``, records of datasets are taken, too. Raises
        ConfigError.
        """
        self = cls(listener, options or TransportOptions(), event_id, user_of)
        app = web.Application(client_max_size=self.options.frame_bytes_max, middlewares=[self._note_request])
        app.router.add_get("/sse", self._stream, allow_head=False)
        app.router.add_post("/sse/{session}", self._post)
        app.router.add_options("/sse", self._preflight)
        app.router.add_options("/sse/{session}", self._preflight)
        if post_records is not None:
            app.router.add_post("/datasets/{dataset}", partial(self._post_records, post_records))
            app.router.add_options("/datasets/{dataset}", self._preflight)
        self._runner = web.AppRunner(
            app,
            access_log=None,  # it has sessions in it, and a line for each acknowledgement
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            logger=self.http_log,
            max_line_size=PARSED_BYTES_MAX,
            max_field_size=PARSED_BYTES_MAX,
            shutdown_timeout=self.options.close_timeout_s,
        )
        await self._runner.setup()
        try:
            self._acceptor = Acceptor.start(host, port, self._new_protocol, self.options, tls)
        except BaseException:
            await self._runner.cleanup()
            raise
        return self

    @property
    def port(self) -> int:
        """The port that is listened at."""
        assert self._acceptor is not None
        return self._acceptor.port

    async def close(self) -> None:
        """Stop listening, and abort all streams that are left: close them before with a code that says why."""
        if self._acceptor is not None:
            await self._acceptor.close()
        for streams in tuple(self._streams.values()):
            for each in tuple(streams):
                each.abort()
        if self._runner is not None:
            await self._runner.cleanup()

    def _new_protocol(self) -> asyncio.BaseProtocol:
        assert self._runner is not None and self._runner.server is not None
        protocol = self._runner.server()
        self._silent.add(protocol)
        self.loop.call_later(self.options.handshake_timeout_s, self._end_silent, protocol)
        return protocol

    def _end_silent(self, protocol: web.RequestHandler) -> None:
        if protocol in self._silent:
            self._silent.remove(protocol)
            protocol.force_close()

    @web.middleware
    async def _note_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._silent.discard(request.protocol)
        if len(request.raw_path) > HEADER_BYTES_MAX:
            raise web.HTTPRequestURITooLong(text=_TOO_LONG % "request line", headers=self._cors(request))
        if any(len(value) > HEADER_BYTES_MAX for _, value in request.raw_headers):
            raise web.HTTPRequestHeaderFieldsTooLarge(text=_TOO_LONG % "header", headers=self._cors(request))
        return await handler(request)

    async def _preflight(self, request: web.Request) -> web.Response:
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=_PREFLIGHT_HEADERS | self._cors(request))

    def _cors(self, request: web.Request) -> dict[str, str]:
        """Return headers for a page of an allowed origin. Raises HTTPForbidden for another."""
        origins = request.headers.getall("Origin", [])
        if not origins:
            return {}
        if len(origins) > 1 or origins[0] not in self.options.origins:
            log_refused_origin(origins[0])
            raise web.HTTPForbidden(text="Pages of this origin may not connect.\n")
        return {"Access-Control-Allow-Origin": origins[0], "Vary": "Origin"}

    # From the broker to the user.

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        headers = _STREAM_HEADERS | self._cors(request)
        frame = _connect_frame(request)
        session: str = frame["session"]
        token = _bearer(request)
        owner = self.user_of(token)
        streams = self._streams.get(session, ())
        if owner is not None and sum(each.owner == owner for each in streams) >= STREAMS_PER_SESSION_MAX:
            raise web.HTTPTooManyRequests(text="This session has too many streams.\n", headers=self._cors(request))
        if token is not None:
            frame["token"] = token
        response = web.StreamResponse(headers=headers)
        stream = SseConnection(self, request, token, owner)
        if owner is not None:  # else its listener refuses it
            self._streams.setdefault(session, []).append(stream)
        try:
            await response.prepare(request)
            await stream.run(response, frame)
        except ConnectionError:
            pass  # the user has gone
        finally:
            if owner is not None:
                self._forget(session, stream)
            stream.end()
        return response

    def _forget(self, session: str, stream: SseConnection) -> None:
        streams = self._streams[session]
        streams.remove(stream)
        if not streams:
            del self._streams[session]

    # From the user to the broker.

    async def _post(self, request: web.Request) -> web.Response:
        headers = self._cors(request)
        stream = self._find(request.match_info["session"], _bearer(request), headers)
        delay_s = stream.pace()
        if delay_s > self.options.handshake_timeout_s:
            headers["Retry-After"] = str(math.ceil(delay_s))
            text = f"A stream takes {self.options.frames_per_s:g} frames per second by POST.\n"
            raise web.HTTPTooManyRequests(text=text, headers=headers)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        body = await self._read(request, headers)
        if not stream.is_open:
            raise web.HTTPNotFound(text="The stream has ended.\n", headers=headers)
        reason = stream.receive(body)
        if reason is not None:
            raise web.HTTPBadRequest(text=f"{reason}\n", headers=headers)
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers)

    async def _post_records(self, post_records: PostRecords, request: web.Request) -> web.Response:
        """Take records of a dataset: an object, an array of them, or one in each line. Every answer is JSON."""
        headers = self._cors(request)
        try:
            store = post_records(_bearer(request), request.match_info["dataset"])
            if store is None:
                return _refusal(HTTPStatus.FORBIDDEN, NOT_ALLOWED, headers)
            records = split_records(await self._read(request, headers))
        except MalformedMessage as error:
            return _refusal(HTTPStatus.BAD_REQUEST, str(error), headers)
        except TokenRefused as error:
            return _refusal(HTTPStatus.UNAUTHORIZED, str(error), headers)
        except web.HTTPRequestTimeout:
            return _refusal(HTTPStatus.REQUEST_TIMEOUT, "the body did not come in time", headers, "later")
        except web.HTTPException as error:
            return _refusal(HTTPStatus(error.status), (error.text or error.reason).strip(), headers)
        return _json_answer(*records_answer(await store(records)), headers)

    async def _read(self, request: web.Request, headers: dict[str, str]) -> bytes:
        """Return the body. Raises HTTPRequestTimeout, HTTPRequestEntityTooLarge, HTTPBadRequest."""
        most = self.options.frame_bytes_max
        try:
            async with asyncio.timeout(self.options.handshake_timeout_s):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(headers=headers) from None
        except web.HTTPRequestEntityTooLarge as error:
            error.text = f"the body has more than {most} bytes: send it in parts\n"
            error.headers.update(headers)
            raise
        except (web.RequestPayloadError, HttpProcessingError):
            text = "the body is not what its Content-Encoding or Transfer-Encoding says\n"
            raise web.HTTPBadRequest(text=text, headers=headers) from None

    def _find(self, session: str, token: str | None, headers: dict[str, str]) -> SseConnection:
        """Return the newest stream of the user whose token this is. Raises HTTPNotFound, HTTPForbidden."""
        newest = {each.owner: each for each in self._streams.get(session, ()) if not each.is_closing}
        if not newest:
            raise web.HTTPNotFound(text="This session has no stream here.\n", headers=headers)
        stream = next((each for each in newest.values() if each.is_of(token)), None)
        if stream is None:
            raise web.HTTPForbidden(text="The token is not that of the stream.\n", headers=headers)
        if not stream.is_open:
            raise web.HTTPNotFound(text="The stream is not open yet.\n", headers=headers)
        return stream


class SseConnection(UserConnection):
    """The event stream of one user, and what the user posts."""

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


class HttpLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp logs. A request that is no HTTP is counted, and is a line without a traceback now and then."""

    def __init__(self) -> None:
        super().__init__(_log)
        self.malformed_requests = 0
        self._logged_at = -math.inf

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """Log an exception."""
        if not isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
            super().exception(msg, *args, exc_info=exc_info, **kwargs)
            return
        self.malformed_requests += 1
        now = time.monotonic()
        if now - self._logged_at >= LOGGED_EVERY_S:
            self._logged_at = now
            kind = type(exc_info).__name__  # its text has bytes of the request, perhaps of a token
            self.warning("a request is no HTTP: %s; so far there were %d", kind, self.malformed_requests)


def _connect_frame(request: web.Request) -> Frame:
    """Return the frame in the query. Raises HTTPBadRequest."""
    encoded = request.query.get("connect", "")
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        frame = parse_json(data)
    except (binascii.Error, ValueError, MalformedMessage) as error:  # UnicodeDecodeError is a ValueError
        reason = str(error) if isinstance(error, MalformedMessage) else "it is JSON in base64url"
        raise web.HTTPBadRequest(text=f"The parameter `connect` cannot be read: {reason}.\n") from None
    session = frame.get("session")
    if not isinstance(session, str) or _SESSION.fullmatch(session) is None:
        raise web.HTTPBadRequest(text="`session` is 1 to 64 letters, digits, `-` and `_`.\n")
    if "token" in frame:
        raise web.HTTPBadRequest(text="URLs are logged: the token goes into the header `Authorization`.\n")
    return frame


def _bearer(request: web.Request) -> str | None:
    """Return the token of a request. Raises HTTPBadRequest if there is something else in its place."""
    header = request.headers.get("Authorization")
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token.isascii():
        raise web.HTTPBadRequest(text="`Authorization` is `Bearer` and a token.\n")
    return token.strip()


def _refusal(status: HTTPStatus, reason: str, headers: dict[str, str], retry: str = "never") -> web.Response:
    return _json_answer(status, {"error": reason, "retry": retry}, headers)


def _json_answer(status: HTTPStatus, body: dict[str, Any], headers: dict[str, str]) -> web.Response:
    return web.json_response(body, status=status, headers=headers)


_log = logging.getLogger("dynamoth.broker.sse")
