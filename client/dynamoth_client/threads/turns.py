"""Lets the threads of a synchronous client take turns to drive one event loop, and a keeper thread when none does.

Theory of operation
-------------------
Machines live on an event loop that no thread owns: a client's publisher on one, its subscribers on another. A
thread that wants something takes the *turn* if it is free, hands its request to the machines, and drives the loop
itself until its own result is there: so the usual call costs no switch of threads. A thread that finds the turn taken
lets the driver begin its request and waits; when the driver has its own result and leaves, it hands the turn to the one
that has waited longest. While nobody calls, a *keeper* thread has the turn, so that connections are kept, moves are
followed and queues are filled; it gives way to everybody.

The mutex guards who has the turn and who waits, and is never held while anything runs. ``abandon`` is called by
finalizers, which run at any point of any thread, and takes no lock. Finalizers and signal handlers of the application
may call ``run`` at any point, too: a thread that has the turn or the mutex is refused, as it would wait for itself.
The mutex is an ``RLock`` only because that knows its thread (``is_held_here``).

In the main thread, handlers of signals run between any two steps of what it does, and may raise. While it waits for
sockets, that ends the wait and nothing else. While the machines are at work, anything may be left half done: then
the loop is *broken*; its machines are ended, and its owner makes another. For that, an exception must not be lost
where callbacks and tasks keep it to themselves (``Loop.drive`` raises it), nor the turn: what gives it back can be done
twice, and uses no lock that is written in Python, which an exception may leave locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import redis.exceptions

from dynamoth_client.redis_py import errors
from dynamoth_client.runtime.forks import point_to_nowhere
from dynamoth_client.threads.loop import Loop
from dynamoth_link.errors import MachineCrashed

KEEPER_IDLE_S = 0.05
"""The keeper takes the turn when no caller has driven for this long: longer than a busy caller pauses between two
calls, and short beside every timer of the machines."""

INSIDE = (
    "the client was called from inside itself: handlers of logs and signals, and finalizers (__del__), must not use a"
    " client that they may have interrupted; let another thread do it"
)

END_S_MAX = 5.0
"""Bound for the end of a loop: closing connections takes much less, and a thread that does not come back is logged."""

EXIT_S_MAX = 1.0
"""How long a daemon thread waits for the end of the interpreter: functions of atexit may need a lock that it holds, as
that of logging needs those of handlers."""

_logger = logging.getLogger("dynamoth_client")

_T = TypeVar("_T")


class _Waiter:
    """A thread whose request another thread begins, and perhaps finishes."""

    __slots__ = ("_is_done", "error", "future", "may_drive", "thread", "wake")

    def __init__(self, may_drive: bool) -> None:
        #: False for a thread that runs an event loop of its own: asyncio allows one per thread.
        self.may_drive = may_drive
        self.thread = threading.get_ident()
        #: Rung when the request is done, or the turn is this thread's.
        self.wake = _Bell()
        self.future: asyncio.Future[Any] | None = None
        self.error: BaseException | None = None
        self._is_done = False

    def done(self) -> bool:
        """Whether the request has its outcome."""
        return self._is_done

    def finish(self) -> None:
        """Wake the thread: its request is done."""
        self._is_done = True
        self.wake.ring()

    def result(self) -> Any:
        """Return the outcome, or raise it."""
        if self.error is not None:
            raise self.error
        assert self.future is not None, "done without an outcome"
        return _outcome(self.future)


class _Bell:
    """Wakes one thread. As ``threading.Event``, but an exception out of a signal's handler cannot leave it locked."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        #: Released to ring; that raises RuntimeError where it has been rung.
        self.lock = threading.Lock()
        self.lock.acquire()

    def ring(self) -> None:
        """Wake the thread; if it does not wait yet, its next wait ends at once."""
        with contextlib.suppress(RuntimeError):
            self.lock.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is rung, or no longer than ``timeout_s``."""
        self.lock.acquire(timeout=-1 if timeout_s is None else timeout_s)


class _Leaving:
    """Ends the keeper's drive: done when another thread wants the turn."""

    is_wanted = False

    def done(self) -> bool:
        """Whether the keeper is to leave."""
        return self.is_wanted


class SharedLoop:
    """An event loop that threads drive in turns, from the first ``run`` until ``close`` or ``abandon``."""

    def __init__(self, on_end: Callable[[], Any], *, callers_drive: bool = True) -> None:
        """Make a loop that nobody drives yet.

        Args:
            on_end: an asynchronous function that ends everything that runs on the loop. Must not keep the owner of this
                object alive: the keeper holds it.
            callers_drive: False leaves it to the keeper.

        """
        self._on_end = on_end
        self._callers_drive = callers_drive
        self._loop = Loop()  # type: ignore[abstract]  # it has what a client uses
        self._mutex = threading.RLock()
        #: Whether an exception may have left the machines half done; then they are ended.
        self.is_broken = False
        #: The thread that has the turn, and whether that is the keeper.
        self._driver: int | None = None
        self._keeper_drives = False
        #: The waiting threads, in order.
        self._waiting: dict[_Waiter, None] = {}
        #: How often a caller drove: the keeper sees by it whether callers are busy.
        self._drives = 0
        self._keeper: threading.Thread | None = None
        self._keeper_wake = _Bell()
        self._keeper_leaving = _Leaving()
        #: The keeper waits without end; whoever leaves the turn wakes it.
        self._keeper_sleeps = False
        #: No new requests; the keeper ends everything.
        self._is_ending = False
        #: The interpreter exits: daemon threads stop here, as they soon would anywhere.
        self._is_exiting = False
        #: The keeper has ended, and whoever has the turn is the last.
        self._is_left = False
        #: The keeper has the last turn: new requests fail.
        self._has_ended = False

    def run(self, begin: Callable[..., asyncio.Future[_T]], *args: Any) -> _T:
        """Call ``begin(*args)`` on the loop, wait for the future that it returns, and return or raise its outcome.

        The loop gets one turn at least, so that a caller that is always answered at once does not starve it. A wait
        that an exception in this thread ends (KeyboardInterrupt, a handler of a signal) cancels the future.

        Any exception but redis-py's, from ``begin`` or from whatever runs meanwhile, breaks the loop.

        Raises:
            redis.exceptions.ConnectionError: the loop has ended.
            RuntimeError: called by something that runs on this loop, as the handler of a log line, or that has
                interrupted a call of this thread, as a signal handler or a finalizer: nobody could answer.

        """
        if is_held_here(self._mutex):
            raise RuntimeError(INSIDE)
        waiter: _Waiter | None = None
        is_counted = False  # before that, a turn of this thread's is not this call's, but one's that it has interrupted
        try:
            with self._mutex:
                if self._driver == threading.get_ident():  # that of the call that this has interrupted
                    raise RuntimeError(INSIDE)
                if self._is_ending:
                    raise errors.ClientClosed
                if self._waiting:
                    self._step_back()
                is_counted = True
                if self._keeper is None:
                    self._start_keeper()
                waiter = self._take_turn_or_wait(self._callers_drive and Loop.can_be_driven_here())
            return self._lead(None, begin, args) if waiter is None else self._follow(waiter, begin, args)
        except redis.exceptions.ConnectionError:
            if self._is_exiting:
                self._give_back(waiter)  # the end of the loop waits for the turn
                stop_daemon_thread()
            raise
        finally:
            if is_counted:
                try:
                    self._give_back(waiter)
                except BaseException:
                    self._give_back(waiter)
                    raise

    def run_at_exit(self, begin: Callable[..., asyncio.Future[_T]], *args: Any) -> _T:
        """Run as ``run`` does, on a loop that was not used yet, and end everything: without a keeper or other threads.

        For what runs when the interpreter exits, and no thread can be started any more.
        """
        self._loop.is_exiting = True
        self._driver = threading.get_ident()
        try:
            return self._lead(None, begin, args)
        finally:
            self._loop.leave()
            try:
                self._lead(None, self._begin_end, ())
            finally:
                self._loop.leave()
                self._loop.close()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon; nothing happens when the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # out of a signal's handler

    def close(self) -> None:
        """End everything: waiting calls fail. Returns when the thread is gone, after ``END_S_MAX`` at most.

        Where it has interrupted a call of this thread (in a signal handler, or a finalizer) it returns at once.
        """
        self._is_ending = True
        self._rouse_keeper()
        if is_held_here(self._mutex):
            return
        with self._mutex:
            self._step_back()
            keeper, is_interrupted = self._keeper, self._driver == threading.get_ident()
        if keeper is None:
            self._loop.close()
        elif not is_interrupted and keeper is not threading.current_thread() and keeper.is_alive():
            keeper.join(END_S_MAX)  # it is not alive where its start has failed

    def is_interrupted_here(self) -> bool:
        """Whether the caller has interrupted a call of its own thread: nobody but this thread can finish it."""
        return self._driver == threading.get_ident() or is_held_here(self._mutex)

    def abandon(self) -> None:
        """End everything, soon; for finalizers."""
        self._is_ending = True
        if self._keeper is None:
            if not self._loop.is_closed():
                self._loop.close()
            return
        self._send_keeper_away()

    def exit(self) -> None:
        """End everything, as the interpreter exits. Daemon threads that use this wait for that."""
        self._is_exiting = True
        self.close()

    def disown(self) -> None:
        """Close what a forked child has inherited, without a word to servers or to the parent.

        The selector, too: it is shared with the parent, so sockets must not be taken out of it. The loop itself cannot
        be used or closed: in the parent a thread may have been driving it.
        """
        self._loop.is_inherited = True
        self._mutex = threading.RLock()  # another thread of the parent may have had it
        point_to_nowhere(self._loop.descriptors())

    # Turns.

    def _take_turn_or_wait(self, may_drive: bool) -> _Waiter | None:
        """Take the turn and return None, or queue for it. The caller holds the mutex."""
        if may_drive and self._driver is None:
            self._driver = threading.get_ident()
            return None
        waiter = _Waiter(may_drive)
        self._waiting[waiter] = None
        return waiter

    def _step_back(self) -> None:
        """Let others drive for the calls of this thread that wait: what calls now has interrupted them. With the mutex.

        They could not use the turn: nobody would drive until the call that is made now has returned.
        """
        me = threading.get_ident()
        for waiter in self._waiting:
            if waiter.thread == me:
                waiter.may_drive = False

    def _lead(self, waiter: _Waiter | None, begin: Callable[..., asyncio.Future[_T]], args: tuple[Any, ...]) -> _T:
        """Drive until our request is done; begin it, unless we have waited with it. The turn is ours."""
        future: asyncio.Future[_T] | None = None
        self._loop.enter()
        try:
            self._drives += 1
            if waiter is not None:
                self._loop.drive(waiter)
                return cast("_T", waiter.result())
            future = begin(*args)
            self._loop.drive(future)
            return _outcome(future)
        except redis.exceptions.RedisError:
            raise
        except BaseException:
            self._interrupted()
            raise
        finally:
            if future is not None and not future.done():
                future.cancel()

    def _interrupted(self) -> None:
        """Note that an exception has interrupted the driver: the loop is broken unless it waited for sockets."""
        if not self._loop.is_waiting:
            self.is_broken = self._is_ending = True
            self._rouse_keeper()
        self._loop.is_waiting = False

    def _give_back(self, waiter: _Waiter | None) -> None:
        """End a request, however far it has come, and our turn. Called again it does what is left to do."""
        me = threading.get_ident()
        is_over = False
        if self._driver == me:
            self._loop.leave()
        with self._mutex:
            if waiter is not None:
                self._waiting.pop(waiter, None)
            if self._driver == me:  # looked at here, as the turn may have come to us until now
                is_over = self._hand_on()
        if waiter is not None and not waiter.done():
            self.call_soon(partial(_cancel, waiter))
        if is_over:
            self._close()

    def _hand_on(self) -> bool:
        """Hand the turn to the next one, or free it; True when it was the last. With the mutex."""
        self._keeper_drives = False
        for waiter in self._waiting:
            if waiter.may_drive:
                # No function is called on the way, so that no signal comes between.
                try:
                    del self._waiting[waiter]
                    self._driver = waiter.thread
                    waiter.wake.lock.release()
                except RuntimeError:
                    pass
                return False
        if self._keeper_sleeps or self._waiting:
            self._keeper_wake.ring()  # before the turn is free: what interrupts this is followed by another try
        self._keeper_sleeps = False
        if not self._is_left:  # nobody takes the last turn
            self._driver = None
        return self._is_left

    def _follow(self, waiter: _Waiter, begin: Callable[..., asyncio.Future[_T]], args: tuple[Any, ...]) -> _T:
        """Submit a request to the thread that drives; wait until it is done, or the turn is ours."""

        def submit() -> None:
            try:
                if self._has_ended:
                    raise errors.ClientClosed
                waiter.future = begin(*args)
            except BaseException as error:
                waiter.error = error
                self._finish(waiter)
                if not isinstance(error, redis.exceptions.RedisError):
                    raise  # it may be the driver's, whom a signal has interrupted
            else:
                waiter.future.add_done_callback(lambda _: self._finish(waiter))

        try:
            self._loop.call_soon_threadsafe(submit)
        except RuntimeError as error:
            raise errors.ClientClosed from error
        self._make_way(waiter)
        waiter.wake.wait()
        if not waiter.done():  # the turn is ours
            return self._lead(waiter, begin, args)
        return cast("_T", waiter.result())

    def _make_way(self, waiter: _Waiter) -> None:
        """Wake the keeper where nobody else may drive; else make it leave the turn."""
        if not waiter.may_drive:
            self._keeper_wake.ring()
        elif self._keeper_drives:
            self._send_keeper_away()

    def _finish(self, waiter: _Waiter) -> None:
        waiter.finish()
        with self._mutex:
            self._waiting.pop(waiter, None)

    # The keeper.

    def _start_keeper(self) -> None:
        """Start it, for the first request. With the mutex."""
        self._keeper = threading.Thread(target=self._keep, name="dynamoth_client", daemon=True)
        try:
            self._keeper.start()
        except BaseException as error:  # nobody knows whether it has
            self.is_broken = self._is_ending = True
            self._loop.close()  # nothing has run there; the keeper waits for the mutex, if it has been started
            if isinstance(error, RuntimeError) and error.__context__ is not None:
                raise error.__context__ from None  # an interrupted wait of ``threading`` hides what interrupted it
            raise

    def _rouse_keeper(self) -> None:
        self._keeper_wake.ring()
        self._send_keeper_away()

    def _send_keeper_away(self) -> None:
        """Make the keeper leave the turn, if it has it."""
        self._keeper_leaving.is_wanted = True
        self.call_soon(_nothing)  # it waits for sockets, perhaps

    def _keep(self) -> None:
        try:
            while self._await_turn():
                try:
                    self._loop.enter()
                    self._loop.drive(self._keeper_leaving)
                finally:
                    self._give_back(None)
            if not self._loop.is_closed():  # else the start of this thread was interrupted
                self._end()
        except BaseException:
            if self._loop.is_inherited:  # cooperative schedulers fork greenlets, and cannot end one that was a thread
                stop_daemon_thread()
            _logger.exception("the thread that keeps a client's connections has ended: this is a bug")

    def _await_turn(self) -> bool:
        """Wait until callers have been idle, and take the turn; False when it is time to end."""
        seen = -1
        timeout_s: float | None = KEEPER_IDLE_S
        while True:
            self._keeper_wake.wait(timeout_s)
            timeout_s = KEEPER_IDLE_S
            with self._mutex:
                self._keeper_leaving.is_wanted = False  # first, as ``abandon`` does not take the mutex
                if self._is_ending:
                    return False
                if self._driver is not None:
                    if seen == self._drives:  # one caller drives for long
                        self._keeper_sleeps = True
                        timeout_s = None
                elif seen == self._drives or self._waiting:
                    self._driver = threading.get_ident()
                    self._keeper_drives = True
                    return True
                seen = self._drives

    def _end(self) -> None:
        """End what runs on the loop, wait until no thread is there any more, and close it."""
        with self._mutex:
            waiter = self._take_turn_or_wait(may_drive=True)
        try:
            if waiter is None:
                self._lead(None, self._begin_end, ())
            else:
                self._follow(waiter, self._begin_end, ())
        finally:
            self._give_back(waiter)
            if self._take_last_turn():
                try:
                    self._lead(None, self._loop.create_task, (self._end_rest(),))
                finally:
                    self._loop.leave()
                    self._close()

    async def _end_rest(self) -> None:
        """End the work of requests that came during the shutdown, and give all waiting threads their outcome."""
        self._has_ended = True
        await self._on_end()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        await asyncio.sleep(0)  # what has ended before tells its waiter in this turn

    def _close(self) -> None:
        """Close the loop. Requests that still wait are lost: they were interrupted, or came too late."""
        self._loop.close()
        self._driver = None  # the thread ends soon, and its number may become another's
        for waiter in list(self._waiting):
            waiter.error = errors.ClientClosed()
            self._finish(waiter)

    def _take_last_turn(self) -> bool:
        """Take the last turn; False when a thread does not leave it: then that one closes the loop."""
        with self._mutex:
            waiter = self._take_turn_or_wait(may_drive=True)
        if waiter is None:
            return True
        waiter.wake.wait(END_S_MAX)
        with self._mutex:
            self._waiting.pop(waiter, None)
            self._is_left = self._driver != waiter.thread
        if self._is_left:
            _logger.error("a thread still uses a client that was closed %s s ago: it is left alone", END_S_MAX)
        return not self._is_left

    def _begin_end(self) -> asyncio.Future[None]:
        return self._loop.create_task(self._on_end(), name="end a client")


def is_held_here(lock: threading.RLock) -> bool:
    """Whether this thread holds a lock: asked as ``threading.Condition`` does; gevent's and eventlet's answer."""
    return lock._is_owned()  # type: ignore[attr-defined,no-any-return]


def stop_daemon_thread() -> None:
    """Wait if this is a daemon thread: for calls that fail only because the interpreter exits.

    Python stops daemon threads a moment later wherever they are. Until then an error would end them with a traceback,
    although nothing is wrong. The caller must hold no lock.
    """
    if threading.current_thread().daemon:
        threading.Event().wait(EXIT_S_MAX)


def _outcome(future: asyncio.Future[_T]) -> _T:
    """Return or raise the outcome of a request; raise the exception that crashed its machine, if it crashed.

    A cancelled request has nobody waiting for it, unless the end of the loop has cancelled it.
    """
    if future.cancelled():
        raise errors.ClientClosed
    try:
        return future.result()
    except redis.exceptions.RedisError as error:
        crash = error.__cause__
        in_main_thread = threading.current_thread() is threading.main_thread()
        if isinstance(crash, MachineCrashed) and crash.__cause__ is not None and in_main_thread:
            raise crash.__cause__ from None
        raise


def _nothing() -> None:
    """Do nothing: a callback makes the loop take a turn."""


def _cancel(waiter: _Waiter) -> None:
    if waiter.future is not None and not waiter.future.done():
        waiter.future.cancel()
