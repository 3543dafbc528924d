"""Serves users over server-sent events and POST, for networks that let no WebSocket through; aiohttp speaks HTTP.

It takes records of datasets, too (``POST /datasets/NAME``).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.errors import MalformedMessage
from dynamoth_broker.process.accept import Acceptor
from dynamoth_broker.process.compressed import CODINGS, TooLarge, coding_of, unpacked
from dynamoth_broker.process.event_ids import HEADER_BYTES_MAX
from dynamoth_broker.process.frames import Frame, parse_json
from dynamoth_broker.process.handshake import log_refused_origin
from dynamoth_broker.process.posting import records_answer, split_records
from dynamoth_broker.process.sse_connection import SseConnection
from dynamoth_broker.process.tokens import TokenRefused
from dynamoth_broker.process.transport import EventId, Listener, TransportOptions, UserConnection
from dynamoth_broker.publishing import not_allowed

PARSED_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Bound of the first line and of each header as parsed: what is longer than ``HEADER_BYTES_MAX`` gets an answer."""

KEEPALIVE_S = 30.0
"""A connection without a request is closed after this time."""

STREAMS_PER_SESSION_MAX = 4
"""A session of a user has two streams while it reconnects. More are refused."""

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
"""Returns the user of a token, empty for nobody's; None if the token is not valid."""

StoreRecords = Callable[[Sequence[bytes]], Awaitable[Sequence[tuple[str, str]]]]
"""Stores records; returns the code of each (``records.Code``, or ``forbidden``), and the reason where it is refused."""

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

        ``event_id`` is called for each frame in ``send``; it has no line breaks. ``user_of`` keeps the streams of
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
            auto_decompress=False,  # see `compressed`
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
        """Take records of a dataset: an object, an array of them, or one in each line.

        Every answer is JSON, but for pages of other origins and for headers that are too long.
        """
        headers = self._cors(request)
        try:
            dataset = request.match_info["dataset"]
            store = post_records(_bearer(request), dataset)
            if store is None:
                return _refusal(HTTPStatus.FORBIDDEN, not_allowed(DATASET_PREFIX + dataset), headers)
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
        """Return the body, unpacked.

        Raises HTTPRequestTimeout, HTTPRequestEntityTooLarge, HTTPBadRequest, HTTPUnsupportedMediaType.
        """
        most = self.options.frame_bytes_max
        try:
            coding = coding_of(request.headers.get("Content-Encoding", ""))
            async with asyncio.timeout(self.options.handshake_timeout_s):
                return unpacked(await request.read(), coding, most)
        except LookupError:
            text = f"the broker reads no such Content-Encoding: send {CODINGS}, or no compressed body\n"
            raise web.HTTPUnsupportedMediaType(text=text, headers=headers) from None
        except TimeoutError:
            raise web.HTTPRequestTimeout(headers=headers) from None
        except (TooLarge, web.HTTPRequestEntityTooLarge):
            text = f"the body has more than {most} bytes: send it in parts\n"
            raise web.HTTPRequestEntityTooLarge(most, text=text, headers=headers) from None
        except MalformedMessage as error:
            raise web.HTTPBadRequest(text=f"{error}\n", headers=headers) from None
        except (web.RequestPayloadError, HttpProcessingError):
            text = "the body is not what its Transfer-Encoding says\n"
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
