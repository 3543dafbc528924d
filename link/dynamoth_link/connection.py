"""One connection to one server: RESP over a transport of an event loop, with liveness and a bound on unwritten bytes.

Theory of operation
-------------------
What commands and answers mean is :class:`dynamoth_link.resp.Resp`'s. A command that is sent while no other waits for
its reply leaves at once. All others that are sent within one turn of the event loop leave in one write at its end:
commands are pipelined without anybody asking for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

from dynamoth.machine.events import CommandPart
from dynamoth_link import errors
from dynamoth_link.liveness import Liveness, Verdict, unacknowledged_bytes
from dynamoth_link.options import LinkOptions
from dynamoth_link.resp import (
    FEED_BYTES,
    LARGE_BYTES,
    OnPushBatch,
    OnReplies,
    OnReply,
    Packed,
    Refusal,
    Resp,
    Violation,
)
from dynamoth_link.urls import ServerAddress


class Connection(asyncio.Protocol):
    """The protocol of one connection, from ``connection_made`` until it is lost or closed.

    Made for ``loop.create_connection``. Callbacks that raise are reported to the loop's exception handler and
    do no other harm. After ``close``, ``abort`` or the loss of the connection no callback is called.

    ``lost`` is done, with the reason, when the connection is lost and we did not close it ourselves.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_closed",
        "_ended",
        "_flush_scheduled",
        "_liveness",
        "_loop",
        "_open",
        "_options",
        "_output",
        "_output_bytes",
        "_reading",
        "_resp",
        "_time",
        "_timer",
        "_tolerated_bytes",
        "_transport",
        "_written_bytes",
        "lost",
    )

    def __init__(self, address: ServerAddress, options: LinkOptions, on_pushes: OnPushBatch) -> None:
        self._address = address
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._resp = Resp(on_pushes, partial(_report_bug, self._loop, address))
        self._time = self._loop.time
        self._transport: asyncio.Transport | None = None
        #: From ``connection_made`` until the connection is lost or closed by whichever side.
        self._open = False
        #: Once true, never again open: nothing more is read, written or called.
        self._ended = False
        #: Packed commands of this turn, and their size. Not empty exactly while a flush is scheduled.
        self._output: list[Packed] = []
        self._output_bytes = 0
        self._flush_scheduled = False
        #: Bound of the bytes that wait for the operating system, after a write that was itself above the usual bound.
        self._tolerated_bytes = 0
        self._reading = True
        self._liveness = Liveness(options.ping_interval_s, options.ping_timeout_s, self._time())
        #: How many bytes the transport has been given.
        self._written_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.lost: asyncio.Future[errors.LinkError] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()

    # What callers do.

    @property
    def is_open(self) -> bool:
        """Whether commands can be sent."""
        return self._open

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the connection belongs to."""
        return self._loop

    @property
    def write_buffer_size(self) -> int:
        """How many bytes wait to be taken by the operating system."""
        if self._transport is None or not self._open:
            return 0
        return self._output_bytes + self._transport.get_write_buffer_size()

    @property
    def fileno(self) -> int:
        """The descriptor of the socket; -1 where there is none."""
        socket = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if socket is None else int(socket.fileno())

    def send(self, args: Sequence[CommandPart], on_reply: OnReply | None = None) -> bool:
        """Send one command, at the latest at the end of this turn of the loop; False, and nothing happens, if not open.

        ``on_reply`` is called once, with the reply, unless the connection is lost before it comes. For a
        subscription command it is called only with an error. Raises TypeError when a part of the command is
        not a CommandPart, and ValueError for a subscription command without channels or no command at all;
        nothing has been sent then.
        """
        if not self._open:
            return False
        packed = self._resp.pack(args, on_reply)
        if len(self._resp.pending) == 1 and not self._flush_scheduled:
            self._write(packed)  # nothing is under way that it could be joined to
            return True
        self._output.append(packed)
        self._output_bytes += len(packed)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        return True

    def send_all(self, commands: Sequence[Sequence[CommandPart]], on_replies: OnReplies) -> bool:
        """Send commands, at least one, that each have one reply, as ``send`` would; False if not open.

        ``on_replies`` is called with as many replies at once as came together. Raises TypeError for a part that is not
        a CommandPart; nothing has been sent then.
        """
        if not self._open:
            return False
        packed = self._resp.pack_all(commands, on_replies)
        self._output.append(packed)
        self._output_bytes += len(packed)
        self._flush()  # the caller has collected these commands already
        return True

    async def call(self, commands: Sequence[Sequence[CommandPart]], replies: list[Any] | None = None) -> list[Any]:
        """Send commands and return their replies, in order; error replies are values.

        Raises ``LinkError`` when the connection is lost first; then ``replies``, a list of the caller's, has those that
        came.
        """
        replies = [] if replies is None else replies
        done = self._loop.create_future()

        def take(reply: Any) -> None:
            replies.append(reply)
            if len(replies) == len(commands) and not done.done():
                done.set_result(None)

        # One write: after the server has closed, a second one fails, and what it has said is not read any more.
        self._flush_scheduled = True
        try:
            for command in commands:
                self.send(command, take)
        finally:
            self._flush()
        if commands:
            await asyncio.wait({done, self.lost, self._closed}, return_when=asyncio.FIRST_COMPLETED)
        if len(replies) < len(commands):
            raise self.lost.result() if self.lost.done() else errors.connection_lost(self._address)
        return replies

    def hand_over(self, on_pushes: OnPushBatch) -> None:
        """Give all further pushes to another owner."""
        self._resp.on_pushes = on_pushes

    def watch(self) -> None:
        """Begin to send PING when nothing comes, and to give up when even its answer does not come."""
        if self._options.ping_interval_s > 0 and self._open:
            self._liveness.heard_at = self._time()
            self._set_timer(self._options.ping_interval_s)

    def pause_reading(self) -> None:
        """Stop reading, after the read that is under way. While paused, a loss may go unnoticed."""
        if self._reading and self._open and self._transport is not None:
            self._transport.pause_reading()
            self._reading = False

    def resume_reading(self) -> None:
        """Read again."""
        if not self._reading and self._open and self._transport is not None:
            self._transport.resume_reading()
            self._reading = True
            self._liveness.heard_at = self._time()

    def close(self) -> None:
        """End the connection after what was sent has gone out. No callback comes any more."""
        if self._open:
            self._flush()
        self._end()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def cut(self, reason: errors.LinkError) -> None:
        """End the connection at once, and let ``lost`` say so; nothing happens where it has ended already."""
        if not self._open:
            return
        self._end()
        self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until the socket is closed; after ``timeout_s``, or when cancelled, cut it."""
        if self._transport is None:
            return
        try:
            await asyncio.wait({self._closed}, timeout=timeout_s)
        finally:
            if not self._closed.done():
                self._transport.abort()
        await self._closed  # abort takes effect in the next turn

    # What the event loop does.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Use the transport, or abort it if this was aborted while it connected."""
        self._transport = cast("asyncio.Transport", transport)
        if hasattr(transport, "max_size"):
            # An attribute of asyncio's that its documentation does not mention: each read makes an object of that size.
            cast("Any", transport).max_size = FEED_BYTES
        if self._ended:  # aborted while the socket was being connected
            self._transport.abort()
        else:
            self._open = True

    def data_received(self, data: bytes) -> None:
        """Parse what came, and hand replies and pushes on in their order."""
        if not self._open:
            return
        self._liveness.heard_at = self._time()
        try:
            self._resp.feed(data)
        except Refusal as error:
            self.cut(errors.diagnose_reply(self._address, None, str(error)))
        except Violation as error:
            self.cut(errors.violation(self._address, str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        """End, from the other side or because of our own ``close``."""
        if self._open:
            if exc is None:
                self.cut(errors.connection_lost(self._address))
            else:
                self.cut(errors.diagnose_exception(self._address, exc))
        if not self._closed.done():
            self._closed.set_result(None)

    # Writing.

    def _flush(self) -> None:
        """Write what this turn has sent."""
        self._flush_scheduled = False
        if not self._output or not self._open:
            return
        output, self._output = self._output, []
        size, self._output_bytes = self._output_bytes, 0
        if size <= LARGE_BYTES:
            self._write(b"".join(output))
            return
        for is_large, some in groupby(output, _is_large):
            for packed in some if is_large else (b"".join(some),):
                if self._open:
                    self._write(packed)

    def _write(self, data: Packed) -> None:
        """Write to the open connection, behind what was written before."""
        transport = self._transport
        assert transport is not None, "open without a transport"
        transport.write(data)
        self._written_bytes += len(data)
        waiting_bytes = transport.get_write_buffer_size()
        if waiting_bytes:
            self._check_waiting(waiting_bytes, len(data))

    def _check_waiting(self, waiting_bytes: int, newest_bytes: int) -> None:
        """Lose the connection when too much waits to be taken by the operating system, after a write."""
        limit_bytes = self._options.write_buffer_bytes_max
        if waiting_bytes <= limit_bytes or not limit_bytes:
            self._tolerated_bytes = 0
        elif waiting_bytes - newest_bytes <= limit_bytes:
            self._tolerated_bytes = waiting_bytes + limit_bytes
        elif waiting_bytes > self._tolerated_bytes:
            self.cut(errors.write_buffer_overrun(self._address, limit_bytes))

    # Liveness.

    def _set_timer(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._check_liveness)

    def _check_liveness(self) -> None:
        transport = self._transport
        if not self._open or transport is None:
            return
        if not self._reading:
            self._set_timer(self._options.ping_interval_s)
            return
        now = self._time()
        unacknowledged = transport.get_write_buffer_size() + unacknowledged_bytes(self.fileno)
        sent_bytes = self._written_bytes + self._output_bytes
        verdict, look_again_s = self._liveness.look(now, sent_bytes, self._written_bytes - unacknowledged)
        if verdict is Verdict.LOST:
            self.cut(errors.fell_silent(self._address, now - self._liveness.heard_at))
            return
        if verdict is Verdict.PING:
            self.send((b"PING",))
        if self._open:
            self._set_timer(look_again_s)

    # The end.

    def _end(self) -> None:
        self._open = False
        self._ended = True
        self._resp.close()
        self._output.clear()
        self._output_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _is_large(packed: Packed) -> bool:
    return len(packed) > LARGE_BYTES


def _report_bug(loop: asyncio.AbstractEventLoop, address: ServerAddress, error: Exception, callback: str) -> None:
    report_exception(loop, error, f"{callback} of the link to {address.redacted()}")


def report_exception(loop: asyncio.AbstractEventLoop, error: BaseException, where: str) -> None:
    """Give what a callback raised to the loop's exception handler: it is a bug of the callback's owner."""
    loop.call_exception_handler({"message": f"exception in {where}", "exception": error})
