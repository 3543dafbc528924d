"""A link: one connection to one server, held open.

Theory of operation
-------------------
One task per link runs in a loop: open a connection, call ``on_up``, wait until it is lost, call ``on_down``, wait
out the backoff, repeat. A failed attempt calls ``on_down`` too. What is sent between ``on_up`` and ``on_down``
goes to the connection; what is sent at any other time is dropped. Nothing is ever sent twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from dynamoth.machine.events import CommandPart
from dynamoth_link import errors
from dynamoth_link.backoff import Doubling, Pauses
from dynamoth_link.connection import Connection, report_exception
from dynamoth_link.handshake import open_connection
from dynamoth_link.options import LinkOptions
from dynamoth_link.resp import OnPushBatch, OnReplies, OnReply
from dynamoth_link.urls import ServerAddress, parse_server_url

_DEFAULTS = LinkOptions()

_logger = logging.getLogger("dynamoth.link")


class Link:
    """One RESP3 connection to one server, kept open from ``start`` until ``stop`` or ``close``.

    It promises, for each connection: commands take effect in the order of ``send``; replies and pushes are
    handed on in the order in which the server wrote them. What was sent and not replied to before ``on_down``
    may or may not have taken effect, and its ``on_reply`` is never called. Subscriptions do not outlive a
    connection: their owner makes them again at ``on_up``.

    Args:
        address: the server, or its URL (raises ``InvalidUrl``).
        options: credentials, TLS, timeouts.
        on_up: takes the run id of the server's process; None where the server does not let us ask.
        on_down: takes a reason for people, which names cause and cure. Called for each lost connection and
            for each failed attempt; the link goes on trying by itself.
        on_pushes: takes consecutive pushes, at least one and at most what one read brought, as RESP3 lists.

    A callback that raises is reported to the event loop's exception handler, and the link goes on.
    """

    def __init__(
        self,
        address: ServerAddress | str,
        *,
        on_up: Callable[[str | None], None],
        on_down: Callable[[str], None],
        on_pushes: OnPushBatch,
        options: LinkOptions = _DEFAULTS,
    ) -> None:
        self.address = parse_server_url(address) if isinstance(address, str) else address
        self._options = options
        self._pauses = Pauses(options.backoff or Doubling(options.backoff_s_min, options.backoff_s_max))
        self._on_up = on_up
        self._on_down = on_down
        self._on_pushes = on_pushes
        #: The connection between ``on_up`` and ``on_down``, else None.
        self._connection: Connection | None = None
        #: The connection that ``stop`` has ended and ``close`` waits for.
        self._closing: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._paused = False
        #: The connection was cut, and the task that holds it has not seen that yet.
        self._was_cut = False
        self._fault: errors.LinkError | None = None

    @property
    def is_up(self) -> bool:
        """Whether commands reach a connection."""
        return self._connection is not None

    @property
    def fault(self) -> errors.LinkError | None:
        """Why the latest connection ended, or was not made; None while up and before the first attempt."""
        return self._fault

    @property
    def refused(self) -> bool:
        """Whether we do not connect to this server, as it is not trusted with our credentials."""
        return isinstance(self._fault, errors.ServerUntrusted)

    @property
    def write_buffer_size(self) -> int:
        """How many bytes have been sent and not been taken by the operating system yet; 0 while down."""
        return self._connection.write_buffer_size if self._connection is not None else 0

    @property
    def fileno(self) -> int:
        """The descriptor of the socket; -1 while down."""
        return self._connection.fileno if self._connection is not None else -1

    def start(self) -> None:
        """Begin to open the link, and keep it open. Needs a running loop; once only."""
        assert self._task is None, "a link is started once"
        if not self._stopped:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"link {self.address.redacted()}")

    def send(self, args: Sequence[CommandPart], on_reply: OnReply | None = None) -> bool:
        """Send one command; False, and the command is dropped, while the link is down.

        All commands of one turn of the event loop leave in one write. ``on_reply`` takes the reply, an
        ``ErrorReply`` when the server refused the command; for (P)SUBSCRIBE and (P)UNSUBSCRIBE, which are
        answered by pushes, it takes only such an error. Raises TypeError for a part that is no
        ``CommandPart``, and ValueError for an empty command or a subscription command without channels.
        """
        connection = self._connection
        return connection is not None and connection.send(args, on_reply)

    def send_all(self, commands: Sequence[Sequence[CommandPart]], on_replies: OnReplies) -> bool:
        """Send commands that each have one reply; False, and they are dropped, while the link is down.

        ``on_replies`` takes replies, as many at once as came together. Raises TypeError as ``send``.
        """
        connection = self._connection
        return connection is not None and connection.send_all(commands, on_replies)

    def pause_reading(self) -> None:
        """Stop reading: the server's output waits in its buffers until ``resume_reading``, also across reconnections.

        What one read has brought is still handed on. While paused, no PING is sent and a loss may go
        unnoticed, and a server drops a subscriber that does not read for long (``client-output-buffer-limit
        pubsub``).
        """
        self._paused = True
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        """End a pause."""
        self._paused = False
        if self._connection is not None:
            self._connection.resume_reading()

    def cut(self) -> None:
        """Lose the present connection, if there is one, and make another one at once.

        ``on_down`` is called before this returns.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._was_cut = True
        self._fault = errors.connection_cut(self.address)
        connection.cut(self._fault)
        self._tell(self._on_down, str(self._fault), "on_down")

    def stop(self) -> None:
        """End the link: no callback comes any more. ``close`` waits until what was sent has gone out."""
        if self._stopped:
            return
        self._stopped = True
        self._closing, self._connection = self._connection, None
        if self._closing is not None:
            self._closing.close()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop, and wait until socket and task are gone: at most ``close_timeout_s``.

        A close that is cancelled cuts the connection at once.
        """
        self.stop()
        try:
            if self._task is not None:
                await asyncio.wait({self._task})
        finally:
            if self._closing is not None:
                await self._closing.wait_closed(self._options.close_timeout_s)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while not self._stopped:
            began_at = loop.time()
            was_up, fault = await self._live_once()
            if self._was_cut:  # ``cut`` has said so; it is no fault of the server's
                self._was_cut = False
                failures = 0
                continue
            # A server that accepts us and drops us at once is as good as down: only a connection that held
            # counts.
            held = was_up and loop.time() - began_at >= self._options.backoff_s_max
            failures = 0 if held else failures + 1
            self._fault = fault
            self._tell(self._on_down, str(fault), "on_down")
            await asyncio.sleep(self._pause_s(max(failures, 1)))

    async def _live_once(self) -> tuple[bool, errors.LinkError]:
        """Open one connection and return when it is lost: whether it came up, and why it ended."""
        try:
            connection, run_id = await open_connection(self.address, self._options, self._on_pushes)
        except errors.LinkError as error:
            if isinstance(error, errors.ServerUntrusted) and not isinstance(self._fault, errors.ServerUntrusted):
                _logger.error("%s", error)
            return False, error
        except Exception as error:
            report_exception(asyncio.get_running_loop(), error, f"the link to {self.address.redacted()}")
            return False, errors.diagnose_exception(self.address, error)
        try:
            return True, await self._hold(connection, run_id)
        finally:
            if not self._stopped:
                self._connection = None
                connection.abort()

    async def _hold(self, connection: Connection, run_id: str | None) -> errors.LinkError:
        if not connection.lost.done():
            self._connection = connection
            self._fault = None
            connection.watch()
            if self._paused:
                connection.pause_reading()
            self._tell(self._on_up, run_id, "on_up")
        return await connection.lost

    def _pause_s(self, failures: int) -> float:
        try:
            return self._pauses.after(failures)
        except Exception as error:
            report_exception(asyncio.get_running_loop(), error, f"the backoff of the link to {self.address.redacted()}")
            return self._options.backoff_s_max

    def _tell(self, callback: Callable[[Any], None], value: Any, name: str) -> None:
        if self._stopped:
            return
        try:
            callback(value)
        except Exception as error:
            where = f"{name} of the link to {self.address.redacted()}"
            report_exception(asyncio.get_running_loop(), error, where)
