"""Serves users over WebSocket, on asyncio's protocols and the Sans-I/O parser of the library ``websockets``.

Why this parser: measured with 5,000 to 10,000 idle connections, in uvloop, a connection of ``websockets.asyncio`` takes
14.2 KiB, one of picows 2.3 takes 29.5 KiB (it has a read buffer of its own), one with a ``ServerProtocol`` that is kept
7.0 KiB, and one of this module 1.6 KiB. A delivery of 200 bytes takes 3.7 us of processor time in
``websockets.broadcast``, and 0.6 us if prepared bytes are handed to the transport, with any of these libraries; the
kernel takes 5 us on top. So picows is not faster where it matters, and it has one maintainer. With TLS, a connection
takes 26 KiB in uvloop, but 283 KiB in asyncio's own loop, whose TLS has a read buffer of 256 KiB. ``bench.edge_memory``
and ``bench.edge_fanout`` measure all but picows again.

How a connection stays small: between messages a parser has no state. A connection borrows one from its server when
bytes arrive, and gives it back when they end with a whole message. The ``ServerProtocol`` of the handshake, with the
headers of the request, is dropped. All connections read into one buffer.

How one publication reaches many users: its bytes are made once, and each connection queues a reference. What was queued
in a turn of the event loop is written in the next one, by one system call per connection, and for
``FLUSHED_PER_TURN_MAX`` connections at a time. So a loop that has much to send still reads, and what it reads meanwhile
joins what waits: the more there is to send, the fewer system calls each publication takes. If publications come one at
a time, the system call is most of the cost, and this makes 1.5 times the deliveries per second of
``websockets.broadcast``; if 4 come together it makes 4.5 times as many, and 10 times if 16 do.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from typing import Final

from websockets.protocol import Protocol as Parser
from websockets.protocol import Side

from dynamoth_broker.process.accept import Acceptor
from dynamoth_broker.process.transport import Listener, TransportOptions
from dynamoth_broker.process.websocket_connection import WebSocketConnection, parser_log

READ_BYTES = 8 * 1024
"""Bytes read from one user at a time. The smallest frame has 6 bytes, so this bounds the work: 10 ms at the worst."""

FLUSHED_PER_TURN_MAX = 500
"""Connections written to in one turn of the event loop: 3 to 4 ms."""

PARSERS_KEPT_MAX = 64
"""Parsers without state that a server keeps. Only those that wait for the rest of a message are more."""

_log = logging.getLogger("dynamoth.broker.websocket")


class WebSocketServer:
    """Listens for users. Made by :meth:`start`; ends with :meth:`close`."""

    def __init__(self, listener: Listener, options: TransportOptions) -> None:
        self.listener: Final = listener
        self.options: Final = options
        self.loop: Final = asyncio.get_running_loop()
        #: What every connection reads into: reading, and handling what was read, is one step of the event loop.
        self.buffer: Final = memoryview(bytearray(READ_BYTES))
        #: Open sockets, those in a handshake included.
        self.connections: Final[set[WebSocketConnection]] = set()
        #: Connections with something to write, oldest first. A connection is in here if it has a list of frames.
        self._unflushed: Final[deque[WebSocketConnection]] = deque()
        self._parsers: Final[list[Parser]] = []
        self._acceptor: Acceptor | None = None
        #: Made by ``close``.
        self._last_left: asyncio.Future[None] | None = None

    @classmethod
    def start(
        cls,
        listener: Listener,
        host: str,
        port: int,
        options: TransportOptions | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> WebSocketServer:
        """Listen at ``host`` and ``port`` (0: any that is free, see :attr:`port`). Raises ConfigError."""
        self = cls(listener, options or TransportOptions())
        self._acceptor = Acceptor.start(host, port, lambda: WebSocketConnection(self), self.options, tls)
        return self

    @property
    def port(self) -> int:
        """The port that is listened at."""
        assert self._acceptor is not None
        return self._acceptor.port

    @property
    def failed_handshakes(self) -> int:
        """Connections that ended in their TLS handshake."""
        assert self._acceptor is not None
        return self._acceptor.failed_handshakes

    async def close(self) -> None:
        """Stop listening, and abort all connections that are left: close them before with a code that says why."""
        if self._acceptor is not None:
            await self._acceptor.close()
        for each in tuple(self.connections):
            each.abort()
        if self.connections:
            self._last_left = self.loop.create_future()
            await asyncio.wait([self._last_left], timeout=self.options.close_timeout_s)
        for each in tuple(self.connections):  # uvloop does not report those whose TLS handshake ended just now
            each.connection_lost(None)

    def forget(self, connection: WebSocketConnection) -> None:
        """Note that the socket of ``connection`` is closed."""
        self.connections.discard(connection)
        if self._last_left is not None and not self.connections and not self._last_left.done():
            self._last_left.set_result(None)

    def flush_later(self, connection: WebSocketConnection) -> None:
        """Write what ``connection`` has queued, in a later turn of the event loop."""
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def borrow_parser(self) -> Parser:
        """Return a parser without state."""
        if self._parsers:
            return self._parsers.pop()
        return Parser(Side.SERVER, max_size=self.options.frame_bytes_max, logger=parser_log)

    def give_back(self, parser: Parser) -> None:
        """Take a parser back that has no state."""
        if len(self._parsers) < PARSERS_KEPT_MAX:
            self._parsers.append(parser)

    def _flush(self) -> None:
        # Users of one interest have the same frames queued: they share what joins them, too.
        shared: list[bytes] = []
        joined = b""
        for _ in range(min(FLUSHED_PER_TURN_MAX, len(self._unflushed))):
            connection = self._unflushed.popleft()
            queued = connection.take_queued()
            if not queued:
                continue
            if queued != shared:
                shared, joined = queued, queued[0] if len(queued) == 1 else b"".join(queued)
            try:
                connection.write(joined)
            except Exception:  # the others must not wait because of this one
                _log.exception("a connection of a user ends")
                connection.abort()
        if self._unflushed:
            self.loop.call_soon(self._flush)
