"""Transports of :class:`dynamoth_client.threads.loop.Loop`: a connected socket, plain or with TLS.

TLS is done in memory (``ssl.MemoryBIO``), between the protocol and the same non-blocking socket as without it: so
nothing but ``recv`` and ``send`` touches a socket, whatever a cooperative scheduler has made of the module ``ssl``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamoth_client.threads.loop import Loop

READ_BYTES = 32 * 1024
"""One read. The parser gets no more at once, and each read makes an object of this size."""


class SocketTransport(asyncio.Transport):
    """Reads from a connected socket for a protocol, and keeps what the operating system does not take at once."""

    def __init__(self, loop: Loop, sock: socket.socket, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._socket = sock
        self._fd = sock.fileno()
        self._protocol = protocol
        #: Gets the bytes of each read.
        self._received: Callable[[bytes], None] = protocol.data_received
        #: Bytes that wait for the operating system, in order; ``_waiting_bytes`` in all.
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        #: Nothing is read or accepted any more.
        self._is_ending = False
        #: The socket is closed in the next turn, or has been.
        self._is_over = False
        loop.add_reader(self._fd, self._read)
        self._begin()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the socket, for the name "socket"."""
        return self._socket if name == "socket" else default

    def is_closing(self) -> bool:
        """Whether the end has begun, from whichever side."""
        return self._is_ending

    def get_write_buffer_size(self) -> int:
        """How many bytes wait for the operating system."""
        return self._waiting_bytes

    def pause_reading(self) -> None:
        """Stop reading."""
        self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        """Read again."""
        if not self._is_ending:
            self._loop.add_reader(self._fd, self._read)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write behind what was written before. Nothing happens after the end has begun."""
        if self._is_ending:
            return
        if not self._waiting:
            try:
                sent = self._socket.send(data)  # as ``_send``, at less cost
            except OSError:
                sent = self._send(data)
            if sent == len(data) or self._is_over:
                return
            data = memoryview(data)[sent:]
            self._loop.add_writer(self._fd, self._write_on)
        self._waiting.append(memoryview(data))
        self._waiting_bytes += len(data)

    def close(self) -> None:
        """Close the socket when everything written has gone out."""
        if self._is_ending:
            return
        self._is_ending = True
        self._loop.remove_reader(self._fd)
        if not self._waiting:
            self._finish(None)

    def abort(self) -> None:
        """Close the socket at once; what waits is dropped."""
        self._finish(None)

    def _begin(self) -> None:
        self._protocol.connection_made(self)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._finish(error)
            return
        if not data:
            self._finish(None)
            return
        try:
            self._received(data)
        except BaseException:  # a bug, or a signal's handler has raised
            self._finish(None)
            raise

    def _write_on(self) -> None:
        while self._waiting:
            data = self._waiting.popleft()
            sent = self._send(data)
            if self._is_over:
                return
            self._waiting_bytes -= sent
            if sent < len(data):
                self._waiting.appendleft(data[sent:])
                return
        self._loop.remove_writer(self._fd)
        if self._is_ending:
            self._finish(None)

    def _send(self, data: bytes | bytearray | memoryview[Any]) -> int:
        """Return how many bytes the operating system has taken; 0 also after an error, which ends the connection."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._finish(error)
            return 0

    def _finish(self, error: Exception | None) -> None:
        """Close the socket in the next turn, and tell the protocol."""
        if self._is_over:
            return
        self._is_over = self._is_ending = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._loop.discard(self._socket)


class TlsTransport(SocketTransport):
    """The same with TLS; the protocol's connection begins when ``secured`` is done."""

    def __init__(
        self, loop: Loop, sock: socket.socket, protocol: asyncio.Protocol, context: ssl.SSLContext, host: str
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        #: Done when both sides have agreed; fails with ``ssl.SSLError`` or ConnectionError.
        self.secured: asyncio.Future[None] = loop.create_future()
        super().__init__(loop, sock, protocol)
        self._received = self._decrypt

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt, and write behind what was written before. Nothing happens after the end has begun."""
        if self._is_ending or not data:
            return
        try:
            self._tls.write(data)
        except ssl.SSLError as error:  # also where TLS 1.2 wants to negotiate again, which Redis does not do
            self._finish(error)
            return
        self._write_encrypted()

    def close(self) -> None:
        """Close the socket when everything written has gone out, and a last record that says so."""
        if not self._is_ending and self.secured.done():
            with contextlib.suppress(ssl.SSLError):  # the answer is not waited for
                self._tls.unwrap()
            self._write_encrypted()
        super().close()

    def _begin(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._write_encrypted()
        except ssl.SSLError as error:
            self._write_encrypted()  # it says why
            self._finish(error)
        else:
            self._write_encrypted()
            super()._begin()
            self.secured.set_result(None)

    def _decrypt(self, data: bytes) -> None:
        self._incoming.write(data)
        if not self.secured.done():
            self._begin()
        if not self.secured.done() or self._is_over:
            return
        chunks: list[bytes] = []
        error: Exception | None = None
        is_end = False
        while not is_end:
            try:
                chunk = self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as fault:
                is_end, error = True, fault
            else:
                is_end = not chunk
                chunks.append(chunk)
        if plain := b"".join(chunks):
            self._protocol.data_received(plain)
        if is_end:
            self._finish(error)

    def _write_encrypted(self) -> None:
        if data := self._outgoing.read():
            super().write(data)

    def _finish(self, error: Exception | None) -> None:
        if not self.secured.done():
            self.secured.set_exception(error or ConnectionResetError("closed during the TLS handshake"))
        super()._finish(error)

    def _end(self, error: Exception | None) -> None:
        if self.secured.cancelled() or self.secured.exception() is not None:
            self._loop.discard(self._socket)  # the protocol has never heard of this connection
        else:
            super()._end(error)
