"""What the broker knows of the connections of its users, whatever transport they use.

A transport (:mod:`~dynamoth_broker.process.websocket`, :mod:`~dynamoth_broker.process.sse`) makes a
:class:`UserConnection` for each user and reports to the one :class:`Listener` of the process, always in the thread of
the event loop. Nothing here waits for a user: :meth:`UserConnection.send` and :func:`broadcast` only queue bytes, and a
user who does not read them is reported as ``overflowed``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode

from dynamoth_broker.events import LOST
from dynamoth_broker.process.frames import FRAME_BYTES_MAX, Encoding, Frame, encode_json, encode_msgpack

UNSENT_BYTES_MAX = 1024 * 1024
"""Default bound of the bytes that wait for one user, in the broker and in the transport of the event loop."""

HARD_BOUND_RATIO = 2
"""A connection whose unsent bytes pass this many times their bound is aborted, if its listener knows that it is full.

What was sent before that may be more: then as much as the bound may follow it.
"""


def abort_above(unsent_bytes: int, unsent_bytes_max: int) -> int:
    """Return above how many unsent bytes a connection is aborted whose listener knows now that it is full."""
    return max(HARD_BOUND_RATIO * unsent_bytes_max, unsent_bytes + unsent_bytes_max)


class Listener(Protocol):
    """The broker's runtime, as transports see it.

    Calls for one connection come in order: ``opened``, any number of the others, ``closed``. They never come from
    inside of ``send``, ``broadcast``, ``close`` or ``abort``. A listener that raises ends the connection.
    """

    def opened(self, conn: UserConnection) -> None:
        """``conn`` has finished its handshake."""

    def received(self, conn: UserConnection, frame: Frame) -> None:
        """``frame`` came from the user: parsed, at most 64 KiB, with bounded nesting and finite numbers."""

    def malformed(self, conn: UserConnection, reason: str) -> None:
        """A message of the user cannot be read and was dropped. ``reason`` has no text of the user's in it."""

    def overflowed(self, conn: UserConnection) -> None:
        """The unsent bytes have passed their bound: the user reads too slowly. Once, until ``writable``."""

    def writable(self, conn: UserConnection) -> None:
        """The unsent bytes have fallen below a quarter of their bound, after ``overflowed``."""

    def closed(self, conn: UserConnection) -> None:
        """``conn`` has ended, whoever ended it. Exactly once for each ``opened``; nothing follows."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Bounds of the transports. Times are in seconds."""

    origins: frozenset[str] = frozenset()
    """Values of the header ``Origin`` that are accepted, such as ``https://example.org``. A request without this header
    does not come from a page in a browser, and is accepted."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    """Bound of one message from a user; a longer one closes the connection with 1009."""
    unsent_bytes_max: int = UNSENT_BYTES_MAX
    handshake_timeout_s: float = 5.0
    """From the accepted socket to the end of the handshake, TLS included."""
    close_timeout_s: float = 5.0
    """From ``close`` to the abort, if the peer does not answer or does not read."""
    accepts_per_s: float = 1000.0
    """Accepted connections; the others wait in the backlog of the kernel. TLS handshakes are what costs here."""
    backlog: int = 4096
    """Connections that wait to be accepted. The kernel has its own bound, net.core.somaxconn."""
    frames_per_s: float = 1000.0
    """Messages of one user that are handled, after a burst. More stay in the socket, so that TCP slows them down."""


class Prepared:
    """One frame for any number of users: each encoding is made once, when the first connection needs it.

    The payload, if there is one, becomes the field ``d`` where it is UTF-8, else ``b``.
    """

    __slots__ = ("_frame", "_json", "_msgpack", "_payload", "_sse")

    def __init__(self, frame: Frame, payload: bytes | None = None) -> None:
        self._frame = frame
        self._payload = payload
        self._json: bytes | None = None
        self._msgpack: bytes | None = None
        self._sse: bytes | None = None

    @property
    def websocket_json(self) -> bytes:
        """A complete text frame of a WebSocket server: unmasked, one fragment, not compressed."""
        if self._json is None:
            self._json = WebSocketFrame(Opcode.TEXT, self._text()).serialize(mask=False)
        return self._json

    @property
    def websocket_msgpack(self) -> bytes:
        """A complete binary frame of a WebSocket server."""
        if self._msgpack is None:
            packed = encode_msgpack(self._frame, self._payload)
            self._msgpack = WebSocketFrame(Opcode.BINARY, packed).serialize(mask=False)
        return self._msgpack

    @property
    def sse(self) -> bytes:
        """An event of a stream of server-sent events, without the empty line that ends it: an ``id`` may follow."""
        if self._sse is None:
            self._sse = b"data: %b\n" % self._text()  # JSON has no line breaks
        return self._sse

    def _text(self) -> bytes:
        return encode_json(self._frame, self._payload)


def prepare(frame: Frame, payload: bytes | None = None) -> Prepared:
    """Return ``frame`` to be sent to any number of connections. Do not change it afterwards."""
    return Prepared(frame, payload)


class UserConnection(ABC):
    """The connection of one user, open from ``opened`` to ``closed``. All methods return at once."""

    __slots__ = ("user",)

    user: Any
    """For the listener: its own state of this user. None at first."""

    @property
    @abstractmethod
    def encoding(self) -> Encoding:
        """What the user's frames are written in."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """Address and port of the other side, for logs; empty when the connection has ended."""

    @property
    def last_event_id(self) -> str | None:
        """The header ``Last-Event-ID`` of a stream of server-sent events that reconnects. Users can forge it."""
        return None

    @property
    def is_stream(self) -> bool:
        """Whether this is a stream of server-sent events, whose frames carry positions."""
        return False

    @property
    def close_code(self) -> int:
        """The code with which the user has closed the connection, once it has ended; 1006 without one."""
        return LOST

    @property
    @abstractmethod
    def unsent_bytes(self) -> int:
        """Bytes that wait in the broker and in the transport; not those in the socket."""

    @abstractmethod
    def send(self, prepared: Prepared) -> None:
        """Queue a frame. Frames arrive in order, or the connection ends. Does nothing once it is closing."""

    @abstractmethod
    def close(self, code: int, reason: str = "") -> None:
        """Send what is queued, then end with ``code`` and ``reason`` (cut to 123 bytes). Does nothing the second time.

        A peer that does not take part in this is aborted after ``close_timeout_s``. Nothing more is received.
        """

    @abstractmethod
    def abort(self) -> None:
        """End at once, and drop what is queued."""


def broadcast(connections: Iterable[UserConnection], prepared: Prepared) -> None:
    """Send one frame to all of ``connections``, which share its bytes.

    Bytes are written after this turn of the event loop, together with everything else that one connection gets in this
    turn: a burst of publications costs one system call per connection, not one per publication.
    """
    for each in connections:
        each.send(prepared)


EventId = Callable[[UserConnection], str | None]
"""Returns the ``id`` of the event that is being sent to a connection (server-sent events only)."""
