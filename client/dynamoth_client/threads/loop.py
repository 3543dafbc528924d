"""The event loop of the synchronous client: callbacks, timers and sockets, run by whichever thread drives it.

Theory of operation
-------------------
:class:`Loop` has the part of ``asyncio.AbstractEventLoop`` that a client uses. So links, publishers and feeds are the
same under both clients, and a thread that publishes spends one turn: wait, read, done. asyncio's own loops have no
public way to run a single turn.

It waits for sockets by what cooperative schedulers (gevent, eventlet) replace. Modules of the standard library are
therefore used by name each time (``select.epoll``, ``threading.Thread``), as their members may change after the import.

asyncio keeps the *running loop* per thread of the operating system, where a cooperative scheduler runs others while one
waits. So this loop is the running one while its callbacks run, and at no other time: not while it waits for sockets,
nor while it starts threads. ``_set_running_loop`` and ``_get_running_loop`` are what asyncio has for implementers of
event loops; this module uses them, and no other internals.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import ipaddress
import itertools
import logging
import select
import selectors
import socket
import ssl
import threading
import time
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, TypeVarTuple

import redis.exceptions

from dynamoth_client.threads.transports import SocketTransport, TlsTransport

SOCKETS_MAX = 64
"""Sockets that one wait reports; the others are reported by the next one. A client has one per server and few more."""

WAIT_S_MAX = 3600.0
"""Operating systems refuse waits of many days."""

TIMERS_MIN = 64
"""Cancelled timers are looked for when there are this many timers, or twice as many as the last look has left."""

WAKE_BYTES = 4096
"""How many wake-up calls are taken out of their socket at once."""

_logger = logging.getLogger("dynamoth_client")

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

Address = tuple[socket.AddressFamily, Any]


class Outcome(Protocol):
    """The result that a driver waits for, such as a future."""

    def done(self) -> bool:
        """Whether the result is there."""
        ...


class Loop(asyncio.AbstractEventLoop):
    """One event loop. Any thread may drive it, one at a time, between ``enter`` and ``leave``."""

    time = staticmethod(time.monotonic)  # pyright: ignore[reportAssignmentType]  # no frame of Python for each call

    def __init__(self) -> None:
        self._poller = poller = _Epoll() if hasattr(select, "epoll") else _Selector()
        self._wait, self._readable, self._writable = poller.wait, poller.readable, poller.writable
        #: The callbacks for descriptors that can be read, or written.
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        #: Every open socket, connected or not.
        self.sockets: set[socket.socket] = set()
        self._ready: deque[_Call] = deque()
        #: A heap: when, and a number that tells equal ones apart.
        self._timers: list[tuple[float, int, _Call]] = []
        self._timer_numbers = itertools.count()
        self._timers_max = TIMERS_MIN
        #: Threads that are to be started outside of callbacks, each with the future of its result.
        self._starting: list[tuple[threading.Thread, asyncio.Future[Any]]] = []
        #: The interpreter exits and may refuse to start threads: what they would do is done in their place.
        self.is_exiting = False
        #: Whether the driver waits for sockets. While it does, an exception ends the wait and nothing else.
        self.is_waiting = False
        self._is_closed = False
        #: In a forked child: the loop is the parent's, and whoever drives it here must stop.
        self.is_inherited = False
        #: The running loop of the driver's thread, outside of this one's callbacks.
        self._outer: asyncio.AbstractEventLoop | None = None
        #: The exception of a signal handler or of a bug that a callback raised in the main thread.
        self._fault: BaseException | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
            self.sockets.add(end)
        self.add_reader(self._wake_reader.fileno(), self._drain)

    # Driving.

    @staticmethod
    def can_be_driven_here() -> bool:
        """Whether this thread has no running event loop: asyncio allows one per thread."""
        return _get_running_loop() is None

    def enter(self) -> None:
        """Become the running loop of this thread."""
        self._fault = None  # that of a drive which another exception has ended
        self._outer = _get_running_loop()
        _set_running_loop(self)

    def leave(self) -> None:
        """Undo ``enter``; nothing happens where that has been done."""
        if _get_running_loop() is self:
            _set_running_loop(self._outer)

    def drive(self, outcome: Outcome) -> None:
        """Run until ``outcome`` is done; one turn at least, so that a caller that never waits starves nobody.

        This is the running loop before and after. Raises what a callback raised in the main thread.
        """
        done = outcome.done
        if done():
            self.call_soon(_nothing)
        while True:
            self._turn()
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if done():
                return

    def _turn(self) -> None:
        """Collect timers, wait once for sockets, then run what is ready. Inlined, as most of a publish is this.

        A callback that raises ends the turn. The next one does the rest: sockets are reported until they were read.
        """
        ready, timers = self._ready, self._timers
        timeout_s = WAIT_S_MAX
        if timers:
            now = self.time()
            while timers and timers[0][0] <= now:
                ready.append(heapq.heappop(timers)[2])
            if timers:
                timeout_s = min(timeout_s, timers[0][0] - now)
        _set_running_loop(self._outer)
        if self._starting:
            self._start_threads()
        self.is_waiting = True
        sockets = self._wait(0.0 if ready else timeout_s, SOCKETS_MAX)
        self.is_waiting = False
        self._outer = _get_running_loop()
        _set_running_loop(self)
        if self.is_inherited:
            raise RuntimeError("a forked child drives the event loop of its parent")
        function: Callable[..., object] | None = None
        try:
            for fd, mask in sockets:
                # One that was called before may have removed the next.
                if mask & self._readable and (function := self._readers.get(fd)) is not None:
                    function()
                if mask & self._writable and (function := self._writers.get(fd)) is not None:
                    function()
            for _ in range(len(ready)):
                call = ready.popleft()
                if (function := call.function) is not None:
                    call.context.run(function, *call.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"exception in {function!r}", "exception": error})

    def _start_threads(self) -> None:
        while self._starting:
            thread, future = self._starting.pop()
            if self.is_exiting:
                thread.run()
                continue
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter exits
                _finish(future, None, error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an exception that nobody else gets; one that was raised in the main thread ends ``drive``."""
        error = context.get("exception")
        if error is None or "future" in context or not self._is_driven_in_main_thread():
            # Nothing was interrupted: it is a bug, or an outcome that nobody has fetched.
            text = "; ".join(str(value) for key, value in context.items() if key != "exception")
            _logger.error("%s", text, exc_info=error)
        else:
            self._fault = error

    def _look_at(self, task: asyncio.Task[Any]) -> None:
        """Look whether a signal's handler has interrupted a task, which keeps the exception to itself."""
        if self._is_driven_in_main_thread() and not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, redis.exceptions.RedisError):
                self._fault = error

    def _is_driven_in_main_thread(self) -> bool:
        return _get_running_loop() is self and threading.current_thread() is threading.main_thread()

    # Callbacks, futures and tasks.

    def call_soon(
        self, callback: Callable[[*_Args], object], *args: *_Args, context: contextvars.Context | None = None
    ) -> Any:
        """Call in the next turn, or at the end of this one."""
        if self._is_closed:
            raise RuntimeError("Event loop is closed")
        call = _Call(callback, args, context)
        self._ready.append(call)
        return call

    def call_soon_threadsafe(
        self, callback: Callable[[*_Args], object], *args: *_Args, context: contextvars.Context | None = None
    ) -> Any:
        """Call soon, from any thread, from finalizers and from handlers of signals."""
        call = self.call_soon(callback, *args, context=context)
        if self.is_waiting:  # else the driver sees the call before it waits
            with contextlib.suppress(OSError):  # it is full, so the driver wakes anyway; or another thread closes it
                self._wake_writer.send(b"\0")
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Args], object],
        *args: *_Args,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Call after ``delay`` seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Args], object],
        *args: *_Args,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Call at a time of this loop's clock."""
        if self._is_closed:
            raise RuntimeError("Event loop is closed")
        call = _Call(callback, args, context)
        if len(self._timers) >= self._timers_max:
            self._timers[:] = [timer for timer in self._timers if timer[2].function is not None]
            heapq.heapify(self._timers)
            self._timers_max = max(TIMERS_MIN, 2 * len(self._timers))
        heapq.heappush(self._timers, (when, next(self._timer_numbers), call))
        return call

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Run a coroutine."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        task.add_done_callback(self._look_at)
        return task

    def run_in_executor(self, executor: object, func: Callable[[*_Args], _T], *args: *_Args) -> asyncio.Future[_T]:
        """Call a function in a daemon thread of its own; whatever ``executor`` is.

        The thread starts when the callbacks of this turn are done: to start one waits, which must not happen in them.
        """
        future: asyncio.Future[_T] = self.create_future()

        def work() -> None:
            try:
                finish = partial(_finish, future, func(*args), None)
            except BaseException as error:
                finish = partial(_finish, future, None, error)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.call_soon_threadsafe(finish)

        thread = threading.Thread(target=work, name="dynamoth_client: blocking call", daemon=True)
        self._starting.append((thread, future))
        return future

    def get_debug(self) -> bool:
        """Return False; futures and tasks ask."""
        return False

    def is_running(self) -> bool:
        """Whether a callback of this loop runs in this thread."""
        return _get_running_loop() is self

    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def close(self) -> None:
        """End, without a word to servers; what still waits to be called is dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        self._readers.clear()
        self._writers.clear()
        self._poller.close()
        while self.sockets:
            self.sockets.pop().close()

    def descriptors(self) -> set[int]:
        """Return the descriptors of all sockets and of what waits for them; none of a closed loop."""
        return set() if self._is_closed else {self._poller.fileno(), *(sock.fileno() for sock in self.sockets)}

    # Sockets.

    def add_reader(self, fd: Any, callback: Callable[[*_Args], Any], *args: *_Args) -> None:
        """Call whenever ``fd``, a descriptor or what has one, can be read."""
        self._watch(self._readers, fd, callback, *args)

    def remove_reader(self, fd: Any) -> bool:
        """Undo ``add_reader``; False where there is nothing to be undone."""
        return self._watch(self._readers, fd, None)

    def add_writer(self, fd: Any, callback: Callable[[*_Args], Any], *args: *_Args) -> None:
        """Call whenever ``fd``, a descriptor or what has one, can be written."""
        self._watch(self._writers, fd, callback, *args)

    def remove_writer(self, fd: Any) -> bool:
        """Undo ``add_writer``; False where there is nothing to be undone."""
        return self._watch(self._writers, fd, None)

    def _watch(
        self, callbacks: dict[int, Callable[[], Any]], fd: Any, callback: Callable[..., Any] | None, *args: Any
    ) -> bool:
        """Set or remove what is called for a descriptor; return whether there was something."""
        number: int = fd if isinstance(fd, int) else fd.fileno()
        before = callbacks.pop(number, None)
        if callback is not None:
            callbacks[number] = partial(callback, *args) if args else callback
        if (before is None) != (callback is None):
            self._poller.watch(number, reads=number in self._readers, writes=number in self._writers)
        return before is not None

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        """Resolve a host name, in a thread."""
        return await self.run_in_executor(None, partial(socket.getaddrinfo, host, port, **options))

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        *,
        ssl: ssl.SSLContext | None = None,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect to a host, at the first of its addresses that lets us in, with TLS if there is a context for it.

        Raises OSError, of the last address; ``ssl.SSLError`` when TLS cannot be agreed on.
        """
        sock = await self._connect_to_any(await self._resolve(host, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol = protocol_factory()
        if ssl is None:
            return SocketTransport(self, sock, protocol), protocol
        transport = TlsTransport(self, sock, protocol, ssl, host)
        try:
            await transport.secured
        except BaseException:
            transport.abort()
            raise
        return transport, protocol

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect to a socket in the file system. Raises OSError."""
        sock = await self._connect(socket.AF_UNIX, path)
        protocol = protocol_factory()
        return SocketTransport(self, sock, protocol), protocol

    def discard(self, sock: socket.socket) -> None:
        """Close a socket that nobody waits for any more."""
        self.sockets.discard(sock)
        sock.close()

    async def _resolve(self, host: str, port: int) -> Sequence[Address]:
        with contextlib.suppress(ValueError):
            if isinstance(ipaddress.ip_address(host), ipaddress.IPv4Address):
                return [(socket.AF_INET, (host, port))]
            if "%" not in host:  # else the scope has a number that is looked up
                return [(socket.AF_INET6, (host, port, 0, 0))]
        found = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]

    async def _connect_to_any(self, addresses: Sequence[Address]) -> socket.socket:
        last_error: OSError | None = None
        for family, address in addresses:
            try:
                return await self._connect(family, address)
            except OSError as error:
                last_error = error
        assert last_error is not None, "a name that is resolved has addresses"
        raise last_error

    async def _connect(self, family: socket.AddressFamily, address: Any) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        self.sockets.add(sock)
        try:
            sock.setblocking(False)
            try:
                sock.connect(address)
            except (BlockingIOError, InterruptedError):
                await self._until_writable(sock.fileno())
                if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, f"cannot connect to {address}") from None
        except BaseException:
            self.discard(sock)
            raise
        return sock

    async def _until_writable(self, fd: int) -> None:
        writable = self.create_future()
        self.add_writer(fd, _finish, writable, None, None)
        try:
            await writable
        finally:
            self.remove_writer(fd)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(WAKE_BYTES)


class _Call:
    """A callback that is due in a turn, or later."""

    __slots__ = ("args", "context", "function")

    def __init__(
        self, function: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        #: None when cancelled.
        self.function: Callable[..., object] | None = function
        self.args = args
        self.context = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        """Do not call."""
        self.function = None
        self.args = ()


class _Epoll:
    """Waits for descriptors, with less around each wait than the selectors of the standard library."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        #: Takes seconds and a number of descriptors; returns these, each with a mask.
        self.wait = self._epoll.poll
        self._watched: dict[int, int] = {}
        #: Bits of a mask: errors and the end can be read and written.
        self.readable = ~select.EPOLLOUT
        self.writable = ~select.EPOLLIN

    def watch(self, fd: int, *, reads: bool, writes: bool) -> None:
        mask = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if writes else 0)
        before = self._watched.pop(fd, 0)
        if mask:
            self._watched[fd] = mask
        if not before:
            self._epoll.register(fd, mask)
        elif mask:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.unregister(fd)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        self._epoll.close()


class _Selector:
    """Waits for descriptors where there is no epoll, or where a cooperative scheduler has replaced it."""

    readable = selectors.EVENT_READ
    writable = selectors.EVENT_WRITE

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, *, reads: bool, writes: bool) -> None:
        mask = (self.readable if reads else 0) | (self.writable if writes else 0)
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        if mask:
            self._selector.register(fd, mask)

    def wait(self, timeout_s: float, number_max: int) -> list[tuple[int, int]]:
        return [(key.fd, mask) for key, mask in self._selector.select(timeout_s)]

    def fileno(self) -> int:
        fileno = getattr(self._selector, "fileno", None)
        return -1 if fileno is None else fileno()

    def close(self) -> None:
        self._selector.close()


def _finish(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _nothing() -> None:
    """Do nothing: a callback keeps the loop from waiting for sockets."""
