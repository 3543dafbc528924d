"""Accepts connections at a bounded rate, with or without TLS.

``loop.create_server`` accepts whatever comes. When 10,000 users return at once, their TLS handshakes would then take
the whole process for seconds, and those who are connected would wait. Here newcomers wait in the backlog of the kernel.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from dynamoth.errors import ConfigError
from dynamoth_broker.process.transport import TransportOptions

ACCEPTED_PER_TURN_MAX = 32
"""Connections accepted in one turn of the event loop, whatever the rate: 3 ms of work without TLS."""

BURST_S = 0.1
"""What was not accepted in the last 100 ms may be accepted at once."""

OUT_OF_FILES_PAUSE_S = 1.0
"""Without free file descriptors, ``accept`` fails at once and for a while."""

UNSENT_KERNEL_BYTES = 64 * 1024
"""Bytes that the kernel takes for a user who does not read. The rest is in the process, where it is counted."""

USER_TIMEOUT_S = 60
"""The kernel ends a connection whose peer has not confirmed bytes for this long: its machine or network is gone."""

KEEPALIVE_S = 60
"""The kernel asks an idle peer after this time, and ends the connection ``USER_TIMEOUT_S`` later."""


class Acceptor:
    """A listening socket, and the handshakes in progress. Made by :meth:`start`; ends with :meth:`close`."""

    def __init__(
        self,
        listening: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        options: TransportOptions,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._factory = factory
        self._options = options
        self._tls = tls
        #: Connections that may be accepted now: at most what ``BURST_S`` brings, and at least one.
        self._allowed = 1.0
        self._allowed_at = self._loop.time()
        self._resumption: asyncio.TimerHandle | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self.failed_handshakes = 0
        """Connections that ended before their protocol was made, nearly always in the TLS handshake."""
        self._loop.add_reader(listening, self._accept)

    @classmethod
    def start(
        cls,
        host: str,
        port: int,
        factory: Callable[[], asyncio.BaseProtocol],
        options: TransportOptions,
        tls: ssl.SSLContext | None = None,
    ) -> Acceptor:
        """Listen at ``host`` and ``port`` (0: any that is free, see :attr:`port`), with a protocol per connection.

        Raises:
            ConfigError: the address cannot be listened at.

        """
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listening = socket.create_server(address[:2], family=family, backlog=options.backlog)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen for users at {host!r}, port {port} ({error}): choose another host or port"
            ) from error
        listening.setblocking(False)
        _set_options(listening)
        return cls(listening, factory, options, tls)

    @property
    def port(self) -> int:
        """The port that is listened at."""
        port: int = self._socket.getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and end TLS handshakes that are in progress. Does nothing the second time."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        if self._resumption is not None:
            self._resumption.cancel()
        self._socket.close()
        handshakes = list(self._handshakes)
        if self._tls is not None:  # the others end within a turn of the event loop
            for each in handshakes:
                each.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)

    def _accept(self) -> None:
        self._add_allowance()
        for _ in range(min(int(self._allowed), ACCEPTED_PER_TURN_MAX)):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                _log.error("cannot accept users: %s", error)
                self._pause(OUT_OF_FILES_PAUSE_S)
                return
            self._allowed -= 1
            accepted.setblocking(False)
            task = self._loop.create_task(self._handshake(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
        if self._allowed < 1:
            self._pause((1 - self._allowed) / self._options.accepts_per_s)

    def _add_allowance(self) -> None:
        now = self._loop.time()
        rate = self._options.accepts_per_s
        self._allowed = min(self._allowed + (now - self._allowed_at) * rate, max(1.0, rate * BURST_S))
        self._allowed_at = now

    def _pause(self, delay_s: float) -> None:
        self._loop.remove_reader(self._socket)
        self._resumption = self._loop.call_later(delay_s, self._resume)

    def _resume(self) -> None:
        self._resumption = None
        self._loop.add_reader(self._socket, self._accept)

    async def _handshake(self, accepted: socket.socket) -> None:
        timeouts: dict[str, float] = {}
        if self._tls is not None:
            timeouts["ssl_handshake_timeout"] = self._options.handshake_timeout_s
            timeouts["ssl_shutdown_timeout"] = self._options.close_timeout_s
        try:
            await self._loop.connect_accepted_socket(self._factory, accepted, ssl=self._tls, **timeouts)
        except OSError as error:  # ssl.SSLError is one, TimeoutError too
            self.failed_handshakes += 1
            _log.debug("a handshake failed: %s", error)
            with suppress(OSError):
                accepted.close()


def _set_options(listening: socket.socket) -> None:
    """Set options that accepted sockets inherit, as far as the system has them."""
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_NOTSENT_LOWAT": UNSENT_KERNEL_BYTES,
        "TCP_USER_TIMEOUT": USER_TIMEOUT_S * 1000,
        "TCP_KEEPIDLE": KEEPALIVE_S,
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_log = logging.getLogger("dynamoth.broker.accept")
