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

from dynamoth_client.redis_py import errors, pools
from dynamoth_client.redis_py.settings import Settings
from dynamoth_client.runtime.cluster import Cluster
from dynamoth_client.threads.turns import SharedLoop, stop_daemon_thread

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
        self._lock = threading.Lock()
        self._loop: SharedLoop | None = None
        #: The interpreter exits: nothing begins again.
        self._is_exiting = False
        #: PubSubs, which have to begin again in a forked child.
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        _all.add(self)

    def __del__(self) -> None:
        """End what runs."""
        loop: SharedLoop | None = getattr(self, "_loop", None)
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
        """End the event loop and all connections. Waiting calls fail. The next use begins again."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.close()

    def exit(self) -> None:
        """End everything that runs, for good, as the interpreter exits."""
        self._is_exiting = True
        if (loop := self._loop) is not None:
            loop.exit()

    def fork(self) -> None:
        """Begin again in a forked child: new connections, new client ids."""
        self._lock = threading.Lock()
        self.cluster = self._make_cluster()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.disown()
            _inherited.append(loop)
        for follower in list(self.followers):
            follower.fork()

    def _open(self) -> SharedLoop:
        with self._lock:
            if not self._is_exiting:
                if self._loop is not None and self._loop.is_broken:
                    self._loop = None
                    self.cluster = self._make_cluster()
                if self._loop is None:
                    self._loop = SharedLoop(self.cluster.close, callers_drive=self._callers_drive)
                return self._loop
        stop_daemon_thread()
        raise errors.ClientClosed


def _begin(function: Callable[..., Coroutine[Any, Any, _T]], args: tuple[Any, ...]) -> asyncio.Future[_T]:
    return asyncio.ensure_future(function(*args))


_all: weakref.WeakSet[SyncCluster] = weakref.WeakSet()

_inherited: list[SharedLoop] = []
"""Loops of the parents of this process: never to be collected, as what they hold would complain of not being closed.
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
