"""A ``Cluster`` on an event loop that threads share: a synchronous client has one to publish, one for its PubSubs."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

import redis.exceptions

from dynamoth_client.redis_py import errors, pools
from dynamoth_client.redis_py.settings import Settings
from dynamoth_client.runtime.cluster import Cluster
from dynamoth_client.threads.turns import INSIDE, SharedLoop, is_held_here, stop_daemon_thread

_T = TypeVar("_T")


class SyncCluster:
    """A view of the cluster, for any thread. Nothing happens before the first use.

    A client has one to publish with, and one for its PubSubs, who own it too: what runs is ended when the last owner is
    gone.
    """

    def __init__(self, settings: Callable[[], Settings], *, envelope: bool, callers_drive: bool) -> None:
        """Keep what is needed to begin.

        Args:
            settings: as for :class:`Cluster`. Must not keep the client alive.
            envelope: as for :class:`Cluster`.
            callers_drive: as for :class:`SharedLoop`.

        """
        self._callers_drive = callers_drive
        self._make_cluster = partial(Cluster, settings, envelope=envelope)
        #: The asynchronous cluster, to be used on its event loop only. A forked child has another one.
        self.cluster = self._make_cluster()
        #: Held while a loop is made and while it is ended, so that ``cluster`` is at home on one at a time.
        self._lock = threading.RLock()
        self._loop: SharedLoop | None = None
        #: One that is being closed: calls in whose midst that is done have to return before it ends.
        self._ending: SharedLoop | None = None
        #: The interpreter exits: nothing begins again.
        self._is_exiting = False
        #: PubSubs, which have to begin again in a forked child.
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        _all.add(self)

    def __del__(self) -> None:
        """End what runs."""
        for name in ("_loop", "_ending"):
            loop: SharedLoop | None = getattr(self, name, None)
            if loop is not None:
                loop.abandon()

    @property
    def is_open(self) -> bool:
        """Whether it was used since it was made, closed or inherited by a forked child."""
        return self._loop is not None

    def goes_on(self, cluster: Cluster) -> bool:
        """Tell whether the objects of ``cluster`` can be used again after ``close``."""
        with self._lock:
            is_broken = self._loop is not None and self._loop.is_broken
            return cluster is self.cluster and not is_broken and not self._is_exiting

    def publish(self, channel: bytes, payload: bytes) -> int:
        """Publish; return and raise as ``Redis.publish``."""
        loop = self._loop
        if loop is None or loop.is_broken:
            if self._is_exiting:
                return self._publish_at_exit(channel, payload)
            loop = self._open()
        try:
            return loop.run(self.cluster.publish, channel, payload)
        except errors.OtherLoop as error:  # closed, and used again, since this call has taken its loop
            raise errors.ClientClosed from error

    def call(self, function: Callable[..., Coroutine[Any, Any, _T]], *args: Any) -> _T:
        """Run an asynchronous function on the event loop, and return or raise its outcome."""
        return cast("_T", self._open().run(_begin, function, args))

    def ask(self, question: Callable[..., Coroutine[Any, Any, _T]], *args: Any) -> _T:
        """Ask the asynchronous cluster, which is the first argument of ``question``; return or raise the outcome."""
        return self.call(question, self.cluster, *args)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop, soon. Does nothing when no loop runs."""
        if (loop := self._loop) is not None:
            loop.call_soon(function)

    def close(self) -> None:
        """End the event loop and all connections. Waiting calls fail. The next use begins again.

        Nothing happens in a signal handler or a finalizer that has interrupted this: what it has interrupted goes on.
        """
        if is_held_here(self._lock):
            return
        with self._lock:
            if self._loop is not None:
                self._ending, self._loop = self._loop, None
            self._end_loop()

    def exit(self) -> None:
        """End everything that runs, as the interpreter exits. Only ``publish`` can be called afterwards."""
        self._is_exiting = True
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.exit()

    def fork(self) -> None:
        """Begin again in a forked child: new connections, new client ids."""
        self._lock = threading.RLock()
        self.cluster = self._make_cluster()
        loops, self._loop, self._ending = (self._loop, self._ending), None, None
        for loop in loops:
            if loop is not None:
                loop.disown()
                _inherited.append(loop)
        for follower in list(self.followers):
            follower.fork()

    def _publish_at_exit(self, channel: bytes, payload: bytes) -> int:
        """Publish for functions of ``atexit`` that run after ours, as that of ``logging`` does."""
        stop_daemon_thread()
        if is_held_here(self._lock):
            raise RuntimeError(INSIDE)
        with self._lock:
            return SharedLoop(self.cluster.close).run_at_exit(self.cluster.publish, channel, payload)

    def _open(self) -> SharedLoop:
        """Return the loop; make one if there is none.

        Raises:
            redis.exceptions.ConnectionError: this process has no descriptors left, or exits.

        """
        ending = self._ending
        if is_held_here(self._lock) or (ending is not None and ending.is_interrupted_here()):
            raise RuntimeError(INSIDE)
        with self._lock:
            if self._ending is not None:
                self._end_loop()
            if not self._is_exiting:
                if self._loop is not None and self._loop.is_broken:
                    self.cluster = self._make_cluster()  # first, so that a broken one is not used on another loop
                    self._loop = None
                if self._loop is None:
                    try:
                        self._loop = SharedLoop(self.cluster.close, callers_drive=self._callers_drive)
                    except OSError as error:
                        raise redis.exceptions.ConnectionError(
                            f"no event loop can be made ({error}): let this process have more open files (ulimit -n)"
                        ) from error
                return self._loop
        stop_daemon_thread()
        raise errors.ClientClosed

    def _end_loop(self) -> None:
        """End the loop that is being closed, if there is one and it is not this call's to finish. With the lock."""
        ending = self._ending
        if ending is not None:
            ending.close()
            if not ending.is_interrupted_here():
                self._ending = None


def _begin(function: Callable[..., Coroutine[Any, Any, _T]], args: tuple[Any, ...]) -> asyncio.Future[_T]:
    return asyncio.ensure_future(function(*args))


_all: weakref.WeakSet[SyncCluster] = weakref.WeakSet()

_inherited: list[SharedLoop] = []
"""Loops of this process's parents. They are kept, because collecting them would warn that they are not closed.
As many as the parents had clients."""


def _after_fork() -> None:
    pools.start_over()
    for cluster in list(_all):
        cluster.fork()


def _at_exit() -> None:
    for cluster in list(_all):
        cluster.exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
