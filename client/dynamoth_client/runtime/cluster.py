"""The state that all publications and subscriptions of one client share: bootstrap, local plan, event loop."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from typing import Any

from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.redis_py import errors
from dynamoth_client.redis_py.settings import Settings
from dynamoth_client.runtime.bootstrap import read_plan
from dynamoth_client.runtime.feed import Feed
from dynamoth_client.runtime.forks import point_to_nowhere
from dynamoth_client.runtime.publishing import Publishing
from dynamoth_client.runtime.queue import MessageQueue, WhenFull
from dynamoth_link.errors import LinkError
from dynamoth_link.query import query
from dynamoth_link.spares import Spares


class Cluster:
    """One client's view of the cluster. Nothing happens before the first use; after ``close`` it can be used again.

    It belongs to the event loop of its first use, until either is closed. In a forked child it begins again.
    """

    def __init__(self, settings: Callable[[], Settings], *, envelope: bool) -> None:
        """Keep what is needed to begin.

        Args:
            settings: gives the settings when they are needed first; raises ``redis.exceptions.DataError``.
            envelope: as for :class:`Publishing`.

        """
        self._read_settings = settings
        self._envelope = envelope
        self._settings: Settings | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The bootstrap that is under way, shared by all who need it.
        self._bootstrap: asyncio.Task[LocalPlan] | None = None
        self._local_plan: LocalPlan | None = None
        #: Connections of the bootstrap, for the links of the publisher and of feeds to take over.
        self._spares: Spares | None = None
        #: The publisher; ``_open_publishing`` makes it, also in the place of one that has stopped.
        self._publishing: Publishing | None = None
        #: Feeds that are at work, or were stopped without ``close``.
        self._feeds: set[Feed] = set()
        #: PubSubs, which have to begin again in a forked child.
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        _all.add(self)

    @property
    def settings(self) -> Settings:
        """Where and how to connect. Raises ``redis.exceptions.DataError``."""
        if self._settings is None:
            self._settings = self._read_settings()
        return self._settings

    def forget_settings(self) -> None:
        """Read the settings again for connections that are opened from now on."""
        self._settings = None

    def publish(self, channel: bytes, payload: bytes) -> asyncio.Future[int]:
        """Publish a message; the future gets the number of receivers. Opens the publisher when needed.

        Raises ``redis.exceptions.DataError`` as ``Publishing.publish``. The future fails as that, as ``local_plan``, or
        with ``MaxConnectionsError``.
        """
        publishing = self._publishing
        if publishing is not None and not publishing.is_stopped:
            try:
                return publishing.publish(channel, payload)
            except errors.OtherLoop:  # the loop of the publisher may be closed; if not, this is raised again
                pass
        return asyncio.ensure_future(self._open_and_publish(channel, payload))

    async def _open_and_publish(self, channel: bytes, payload: bytes) -> int:
        return await (await self._open_publishing()).publish(channel, payload)

    async def _open_publishing(self) -> Publishing:
        """Return the publisher; bootstraps when needed."""
        local_plan = await self.local_plan()
        if self._publishing is None or self._publishing.is_stopped:
            settings = self.settings
            self._publishing = settings.pool.connections.admit(
                lambda: Publishing(
                    local_plan,
                    settings.link_options,
                    envelope=self._envelope,
                    publish_timeout_s=settings.publish_timeout_s,
                )
            )
        return self._publishing

    async def open_feed(
        self, queue: MessageQueue, *, wants_gaps: bool, when_full: WhenFull = "block", numbered: bool = False
    ) -> Feed:
        """Make the feed of a PubSub; bootstraps when needed. Raises as ``local_plan``, and ``MaxConnectionsError``."""
        local_plan = await self.local_plan()
        settings = self.settings
        feed = settings.pool.connections.admit(
            lambda: Feed(
                queue,
                local_plan,
                settings.link_options,
                unreachable_s=settings.unreachable_s,
                wants_gaps=wants_gaps,
                when_full=when_full,
                numbered=numbered,
            )
        )
        self._feeds = {other for other in self._feeds if not other.is_stopped}
        self._feeds.add(feed)
        return feed

    async def local_plan(self) -> LocalPlan:
        """Return the local plan; the first call reads its header from the seeds, and concurrent ones wait for that.

        A bootstrap that failed is tried again by the next call.

        Raises:
            redis.exceptions.ConnectionError: no seed gave a plan; the text has each one's reason. Or closed meanwhile.
            redis.exceptions.AuthenticationError: (one of the former) the credentials are wrong.
            redis.exceptions.DataError: the client's settings cannot be used.
            RuntimeError: the client belongs to another event loop.

        """
        self.bind()
        if self._local_plan is not None:
            return self._local_plan
        if self._bootstrap is None:
            self._bootstrap = asyncio.create_task(self._read_plan(self.settings), name="read the Dynamoth plan")
            self._bootstrap.add_done_callback(retrieve)
        task = self._bootstrap
        await asyncio.wait({task})
        if task.cancelled() or not self._is_current(local_plan := task.result()):
            raise errors.ClientClosed
        return local_plan

    async def ping(self) -> None:
        """Check that one seed answers PING. Raises the error of the last one when none does."""
        self.bind()
        await self.settings.retrying.call(self._ping)

    async def close(self) -> None:
        """End everything that runs. The next use begins again, on any loop.

        A PubSub that is being read is used at once: it subscribes again. All has ended, and all other calls have
        failed, before anything is awaited: a close that is cancelled only does not wait until sockets are gone.
        """
        if self._loop is None:
            return
        if self._loop.is_closed():  # what ran there ended with its loop
            feeds = self._feeds
            self._abandon()
            for feed in feeds:
                feed.end(errors.ClientClosed())
            return
        self.bind()
        bootstrap, publishing, feeds, spares = self._bootstrap, self._publishing, self._feeds, self._spares
        self._loop = self._bootstrap = self._local_plan = self._publishing = None
        self._feeds = set()
        if bootstrap is not None:
            bootstrap.cancel()
        if publishing is not None:
            publishing.stop()
        for feed in feeds:
            feed.fail(errors.ClientClosed())
        if bootstrap is not None:
            await asyncio.wait({bootstrap})
        if publishing is not None:
            await publishing.close()
        for feed in feeds:
            await feed.close()
        if spares is not None:
            await spares.close()

    async def _ping(self) -> None:
        error: LinkError | None = None
        for seed in self.settings.seeds:
            options = self.settings.link_options
            try:
                await query(seed, (b"PING",), options=options, timeout_s=options.connect_timeout_s)
            except LinkError as fault:
                error = fault
            else:
                return
        assert error is not None, "there is at least one seed"
        raise errors.from_link(error) from error

    async def _read_plan(self, settings: Settings) -> LocalPlan:
        self._spares = settings.link_options.spares
        try:
            since = asyncio.get_running_loop().time()
            local_plan = LocalPlan(await settings.retrying.call(lambda: read_plan(settings, since)))
            if self._bootstrap is asyncio.current_task():
                self._local_plan = local_plan
        finally:
            if self._bootstrap is asyncio.current_task():
                self._bootstrap = None
        return local_plan

    def _is_current(self, local_plan: LocalPlan) -> bool:
        """Whether nobody has closed the client since this plan was read."""
        return local_plan is self._local_plan

    def bind(self) -> None:
        """Belong to the running event loop, and begin again there if that of the first use is closed.

        Raises:
            RuntimeError: the client belongs to another event loop, which is not closed.

        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if not self._loop.is_closed():
                raise errors.OtherLoop
            self._abandon()
        self._loop = loop

    def fork(self) -> None:
        """Begin again in a forked child; inherited connections are left alone, and go on in the parent."""
        if self._loop is None:
            return
        _inherited.append((self._loop, self._bootstrap, self._publishing, self._feeds))
        point_to_nowhere(self._abandon())
        for follower in list(self.followers):
            follower.fork()

    def _abandon(self) -> list[int]:
        """Forget what ran on a loop that is closed, or the parent process's; return the descriptors of its sockets."""
        publishing, feeds = self._publishing, self._feeds
        self._loop = self._bootstrap = self._local_plan = self._publishing = None
        self._feeds = set()
        numbers = [] if publishing is None else publishing.abandon()
        if self._spares is not None:
            numbers += self._spares.abandon()
        return numbers + [number for feed in feeds for number in feed.abandon()]


_all: weakref.WeakSet[Cluster] = weakref.WeakSet()

_inherited: list[object] = []
"""Objects of this process's parents. They are kept, because collecting them would warn that they are not closed."""


def _after_fork() -> None:
    for cluster in list(_all):
        cluster.fork()


os.register_at_fork(after_in_child=_after_fork)


def retrieve(task: asyncio.Task[Any]) -> None:
    """Mark the error of a shared task as seen: everybody who waited for it may have been cancelled."""
    if not task.cancelled():
        task.exception()
