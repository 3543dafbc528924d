"""The connection of one user over WebSocket: handshake, frames in and out, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from enum import IntEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from websockets.frames import Close, CloseCode, Opcode
from websockets.frames import Frame as WebSocketFrame
from websockets.http11 import Request, Response
from websockets.protocol import Protocol as Parser
from websockets.protocol import State as ParserState

from dynamoth.errors import MalformedMessage
from dynamoth_broker.events import LOST
from dynamoth_broker.process.frames import Encoding, parse_json, parse_msgpack
from dynamoth_broker.process.handshake import JSON, REQUEST_BYTES_MAX, Handshake
from dynamoth_broker.process.transport import Prepared, UserConnection, abort_above

if TYPE_CHECKING:
    from dynamoth_broker.process.websocket import WebSocketServer

FRAMES_UNPACED_MAX = 16
"""Messages in one read that do not make the connection pause; more do, by ``frames_per_s``."""

FRAGMENTS_MAX = 64
"""Fragments of one message. Their bytes are bounded, but a fragment may be empty."""

LINGERING_BYTES_MAX = 1024 * 1024
"""Bytes of a peer that are read and dropped after it broke the protocol, so that the close frame reaches it: closing a
socket with unread bytes resets the connection."""

REASON_BYTES_MAX = 123
"""Bound of the reason in a close frame (RFC 6455, section 5.5)."""

_log = logging.getLogger("dynamoth.broker.websocket")
parser_log = logging.getLogger("dynamoth.broker.websocket.parser")
parser_log.setLevel(logging.CRITICAL)  # else a line for each connection


class State(IntEnum):
    """The states of a connection, in order."""

    HANDSHAKE = 0
    OPEN = 1
    CLOSING = 2  # our close frame is sent; the peer's is awaited
    LINGERING = 3  # nothing more is sent or handled; waits for the end of the peer's bytes
    CLOSED = 4


class _Partial:
    """A message of which some fragments have come."""

    __slots__ = ("count", "data", "opcode")

    def __init__(self, frame: WebSocketFrame) -> None:
        self.opcode = frame.opcode
        self.data = bytearray(frame.data)
        self.count = 1

    def add(self, frame: WebSocketFrame) -> None:
        self.data += frame.data
        self.count += 1


class WebSocketConnection(asyncio.BufferedProtocol, UserConnection):
    """The connection of one user."""

    __slots__ = (
        "_abort_above",
        "_close_code",
        "_discarded",
        "_is_text",
        "_opened",
        "_over",
        "_parser",
        "_partial",
        "_queued",
        "_queued_bytes",
        "_server",
        "_state",
        "_timer",
        "_transport",
        "_unparsed_bytes",
    )

    def __init__(self, server: WebSocketServer) -> None:
        self.user = None
        self._server = server
        self._state = State.HANDSHAKE
        self._transport: asyncio.Transport | None = None
        self._close_code = LOST
        #: Only while a message or the handshake is incomplete.
        self._parser: Parser | None = None
        #: Of the bytes that this parser was given, those of incomplete frames. If the client has written a length in
        #: more bytes than it needs, it is higher, and the connection keeps its parser.
        self._unparsed_bytes = 0
        self._partial: _Partial | None = None
        self._is_text = True
        #: Frames for the next flush, or None: then this connection is not among those to be flushed.
        self._queued: list[bytes] | None = None
        self._queued_bytes = 0
        #: The transport has more than its bound.
        self._over = False
        #: More unsent bytes than this end the connection; None while the listener does not know that it is full.
        self._abort_above: int | None = None
        #: The listener knows this connection.
        self._opened = False
        #: Bytes of the request so far; later, bytes that were dropped.
        self._discarded = 0
        self._timer: asyncio.TimerHandle | None = server.loop.call_later(
            server.options.handshake_timeout_s, self._handshake_timed_out
        )

    # What the listener uses.

    @property
    def encoding(self) -> Encoding:
        """What the user's frames are written in."""
        return "json" if self._is_text else "msgpack"

    @property
    def peer(self) -> str:
        """Address and port of the other side; empty when the connection has ended."""
        address = self.get_extra_info("peername")
        return "" if address is None else f"{address[0]}:{address[1]}"

    @property
    def close_code(self) -> int:
        """The code with which the user has closed the connection, once it has ended; 1006 without one."""
        return self._close_code

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in the broker and in the transport; not those in the socket."""
        if self._transport is None:
            return 0
        return self._queued_bytes + self._transport.get_write_buffer_size()

    def send(self, prepared: Prepared) -> None:
        """Queue a frame. Frames arrive in order, or the connection ends. Does nothing once it is closing.

        Whoever goes on sending after ``overflowed`` has the connection aborted: see ``abort_above``.
        """
        if self._state is not State.OPEN:
            return
        data = prepared.websocket_json if self._is_text else prepared.websocket_msgpack
        queued = self._queued
        if queued is None:
            self._queued = [data]
            self._queued_bytes = len(data)
            self._server.flush_later(self)
        else:
            queued.append(data)
            self._queued_bytes += len(data)

    def close(self, code: int, reason: str = "") -> None:
        """Send what is queued, then end with ``code`` and ``reason``. Does nothing the second time."""
        if self._state is not State.OPEN:
            return
        self._write_queued()
        if self._state is State.OPEN:
            text = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
            self.write(_close_frame(code, text))
            self._state = State.CLOSING
            self._abort_later()

    def abort(self) -> None:
        """End at once, and drop what is queued."""
        if self._state is State.CLOSED or self._transport is None:
            return
        self._queued, self._queued_bytes = None, 0
        self._state = State.LINGERING
        self._discarded = 0
        self._transport.abort()

    # What the server and tests use.

    @property
    def parses(self) -> bool:
        """Whether part of a message, or of the request, has come."""
        return self._parser is not None

    def get_extra_info(self, name: str) -> Any:
        """Return what the transport knows, such as its ``socket``; None when the connection has ended."""
        return None if self._transport is None else self._transport.get_extra_info(name)

    def take_queued(self) -> list[bytes] | None:
        """Return the frames that are to be written, and forget them."""
        queued, self._queued, self._queued_bytes = self._queued, None, 0
        return queued

    def write(self, data: bytes) -> None:
        """Give bytes to the transport. Aborts the connection if far too many wait there."""
        transport = self._transport
        if transport is None or self._state > State.CLOSING:
            return
        transport.write(data)
        if self._abort_above is not None and transport.get_write_buffer_size() > self._abort_above:
            self.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: the request of the handshake comes next."""
        transport = cast(asyncio.Transport, transport)  # those of uvloop do not say so
        self._transport = transport
        self._server.connections.add(self)
        options = self._server.options
        transport.set_write_buffer_limits(options.unsent_bytes_max, options.unsent_bytes_max // 4)
        if self._timer is None:  # TLS took all of the time
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to read to."""
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle what was read."""
        data = bytes(self._server.buffer[:nbytes])
        try:
            match self._state:
                case State.HANDSHAKE:
                    self._shake_hands(data)
                case State.OPEN | State.CLOSING:
                    self._parse(data)
                case _:
                    self._discard(nbytes)
        except Exception:
            _log.exception("a connection of a user ends")
            self.abort()

    def eof_received(self) -> None:
        """End, as the peer sends nothing more: the transport writes what it has, and closes."""
        self._state = State.LINGERING
        self._abort_later()

    def pause_writing(self) -> None:
        """Note that the transport has passed its bound, and report it in the next turn of the event loop."""
        self._over = True
        self._server.loop.call_soon(self._report_over, True)

    def resume_writing(self) -> None:
        """Note that the transport has sent most of its bytes."""
        self._over = False
        self._server.loop.call_soon(self._report_over, False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, whoever ended it."""
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSED
        self._server.forget(self)
        self._cancel_timer()
        self._transport = self._parser = self._partial = self._queued = None
        self._queued_bytes = 0
        if self._opened:
            self._server.listener.closed(self)

    # The handshake.

    def _shake_hands(self, data: bytes) -> None:
        if self._parser is None:
            self._parser = Handshake(self._server.options.frame_bytes_max, parser_log)
        parser = self._parser
        assert isinstance(parser, Handshake)
        self._discarded += len(data)
        if self._discarded > REQUEST_BYTES_MAX:
            self._refuse(parser, parser.reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "Too large.\n"))
            return
        parser.receive_data(data)
        events = parser.events_received()
        if not events:
            written = parser.data_to_send()
            if written:  # the parser has refused it
                self._linger(b"".join(written))
            return
        request = events[0]
        assert isinstance(request, Request)
        if len(events) > 1 or not data.endswith(b"\n"):
            self._refuse(parser, parser.reject(HTTPStatus.BAD_REQUEST, "Wait for the answer before you send.\n"))
            return
        response = parser.answer(request, self._server.options.origins)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refuse(parser, response)
            return
        parser.send_response(response)
        self._open(parser)

    def _open(self, parser: Handshake) -> None:
        assert self._transport is not None
        self._cancel_timer()
        self._is_text = parser.subprotocol == JSON
        self._parser = None
        self._discarded = 0
        self._state = State.OPEN
        self._opened = True
        self._transport.writelines(parser.data_to_send())
        self._server.listener.opened(self)

    def _refuse(self, parser: Handshake, response: Response) -> None:
        parser.send_response(response)
        self._parser = None
        self._linger(b"".join(parser.data_to_send()))

    def _handshake_timed_out(self) -> None:
        self._timer = None
        if self._transport is not None:
            self._transport.abort()

    # Messages.

    def _parse(self, data: bytes) -> None:
        parser, self._parser = self._parser or self._server.borrow_parser(), None
        self._unparsed_bytes += len(data)
        parser.receive_data(data)
        events = parser.events_received()
        answers = b"".join(parser.data_to_send())
        for each in events:
            assert isinstance(each, WebSocketFrame)
            self._unparsed_bytes -= _bytes_at_least(each)
            self._handle(each)
        if parser.state is not ParserState.OPEN:
            if parser.close_rcvd is not None:
                self._close_code = parser.close_rcvd.code
            self._end_as_parsed(answers, broken=parser.parser_exc is not None)
            return
        if answers and self._state is State.OPEN and not self._over:  # pongs: none for those who do not read
            self.write(answers)
        if self._state is State.OPEN and self._partial is None and not self._unparsed_bytes:
            self._server.give_back(parser)
        elif self._state <= State.CLOSING:
            self._parser = parser  # while closing, messages are not followed: the parser may be within one
        if len(events) > FRAMES_UNPACED_MAX:
            self._pause_reading(len(events) / self._server.options.frames_per_s)

    def _handle(self, frame: WebSocketFrame) -> None:
        if self._state is not State.OPEN:
            return
        partial = self._partial
        match frame.opcode:
            case Opcode.TEXT | Opcode.BINARY if frame.fin:
                self._deliver(frame.opcode, frame.data)
            case Opcode.TEXT | Opcode.BINARY:
                self._partial = _Partial(frame)
            case Opcode.CONT:
                assert partial is not None, "the parser refuses a continuation of nothing"
                partial.add(frame)
                if frame.fin:
                    self._partial = None
                    self._deliver(partial.opcode, partial.data)
                elif partial.count >= FRAGMENTS_MAX:
                    self._fail(CloseCode.MESSAGE_TOO_BIG, f"more than {FRAGMENTS_MAX} fragments")
            case _:
                pass  # the parser answers pings and closes

    def _deliver(self, opcode: Opcode, data: bytes | bytearray | memoryview) -> None:
        assert not isinstance(data, memoryview), "only frames to be sent have them"
        listener = self._server.listener
        if (opcode is Opcode.TEXT) is not self._is_text:
            listener.malformed(self, "a text message is expected" if self._is_text else "a binary message is expected")
            return
        try:
            frame = parse_json(data) if self._is_text else parse_msgpack(data)
        except UnicodeDecodeError:
            self._fail(CloseCode.INVALID_DATA, "a text message is not UTF-8")
        except MalformedMessage as error:
            listener.malformed(self, str(error))
        else:
            listener.received(self, frame)

    def _pause_reading(self, delay_s: float) -> None:
        if self._state is State.OPEN and self._transport is not None:
            self._transport.pause_reading()
            self._server.loop.call_later(delay_s, self._resume_reading)

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _report_over(self, over: bool) -> None:
        if self._state is not State.OPEN:
            return
        unsent_bytes_max = self._server.options.unsent_bytes_max
        self._abort_above = abort_above(self.unsent_bytes, unsent_bytes_max) if over else None
        listener = self._server.listener
        try:
            (listener.overflowed if over else listener.writable)(self)
        except Exception:
            _log.exception("a connection of a user ends")
            self.abort()

    # The end.

    def _end_as_parsed(self, answers: bytes, *, broken: bool) -> None:
        """End, as the peer has sent its close frame or, where ``broken``, something that no frame is."""
        if self._state is State.OPEN:
            self._write_queued()
        if self._state is State.OPEN and broken:
            self._linger(answers)
        elif self._state <= State.CLOSING and self._transport is not None:
            if self._state is State.OPEN:
                self.write(answers)
            self._state = State.LINGERING
            self._transport.close()
            self._abort_later()

    def _fail(self, code: int, reason: str) -> None:
        """End, as the peer has broken the protocol."""
        self._write_queued()
        if self._state is State.OPEN:
            self._linger(_close_frame(code, reason))

    def _linger(self, last: bytes) -> None:
        """Write the last bytes, then wait for the end of the peer's, as closing now could destroy them on their way."""
        transport = self._transport
        if transport is None:
            return
        self._state = State.LINGERING
        self._discarded = 0
        self._partial = None
        transport.write(last)
        if transport.can_write_eof():
            with suppress(OSError):  # the peer has reset the connection
                transport.write_eof()
        self._abort_later()

    def _discard(self, nbytes: int) -> None:
        self._discarded += nbytes
        if self._discarded > LINGERING_BYTES_MAX:
            self.abort()

    def _write_queued(self) -> None:
        queued = self.take_queued()
        if queued:
            self.write(b"".join(queued))

    def _abort_later(self) -> None:
        self._cancel_timer()
        self._timer = self._server.loop.call_later(self._server.options.close_timeout_s, self.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _bytes_at_least(frame: WebSocketFrame) -> int:
    """Return how many bytes ``frame`` took on its way from the client, with the shortest form of its length."""
    payload = len(frame.data)
    length = 0 if payload < 126 else 2 if payload < 1 << 16 else 8
    return 2 + length + 4 + payload  # 4: the mask


def _close_frame(code: int, reason: str) -> bytes:
    return WebSocketFrame(Opcode.CLOSE, Close(code, reason).serialize()).serialize(mask=False)
