"""redis-py's ``PubSub`` over many servers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dynamoth_client.redis_py.errors import ClientClosed
from dynamoth_client.runtime.queue import Failure, Item, Notice
from dynamoth_client.runtime.reader import TURN_ITEMS_MAX, Reader
from dynamoth_client.runtime.subscriptions import NOT_CONNECTED


class PubSub(Reader):
    """Subscriptions, read with redis-py's methods; the servers and the moves of channels between them do not show.

    The guarantees (``docs/guarantees.md``) begin for a channel with its ``subscribe`` (``ssubscribe``) message,
    for a pattern with its ``psubscribe`` message: from then on every message is delivered once, and in order per
    publisher. Besides redis-py's arguments:

    Args:
        on_gap: called, or awaited, with a :class:`GapInfo` where messages were lost or may have been, in its place
            among the messages. What it returns is ignored.
        gaps: True gives messages of type ``gap`` as well, whose ``data`` is the :class:`GapInfo`. With neither,
            gaps are logged as warnings (logger ``dynamoth_client``).
        max_queue: how many messages wait for the application at most; acknowledgements and gaps do not count.
        when_full: what happens at that number. ``"block"``: reading from the servers stops for 1 s, then up to 32 MB
            wait in this process, so that channels can be moved meanwhile. Further messages are dropped, and a gap in
            their place says how many of which channel or pattern. All is normal again when half of the messages have
            been taken. ``"drop_oldest"``: the oldest quarter is dropped, and a gap in its place says the same.
            ``"disconnect"``: the subscriptions end, and ConnectionError is raised behind the messages that have come.
        numbered: True makes ``data`` of messages with an envelope a :class:`NumberedPayload`: bytes that know the id of
            their publisher and their number in its sequence. Lost where responses are decoded.

    Different from redis-py:

    * A lost connection is made again without an exception; it shows as a gap. Only when no server of the subscribed
      channels can be reached for 10 s, or for the ``socket_connect_timeout`` that you give, do ``get_message`` and
      ``listen`` raise ConnectionError or AuthenticationError, and again after each further such time. The PubSub keeps
      reconnecting: read on. A failover takes up to 6 s.
    * ``connection`` is None or what stands for all connections: it has ``is_connected``, and ``disconnect``, which cuts
      them. Only after that is every subscription acknowledged again; redis-py does it after each lost connection.
      Callbacks that are registered there are never called; it has nothing else of redis-py's connections.
    * ``push_handler_func`` is refused with an error: handlers and ``on_gap`` tell what comes. ``execute_command`` has
      the commands of subscriptions and PING, and no other.
    * After ``aclose`` of the client it subscribes again when it is used, at once if somebody reads it, as redis-py's
      does; so it does where its event loop was closed without ``aclose``, on the loop where it is used next. That is a
      gap. To end a reader, close the PubSub.
    * The first ``subscribe`` raises when the plan cannot be read from any server, and nothing is subscribed then.
    * A pattern needs a connection to every server. If one is away for 5 s, it goes on without it, with a gap.
    * Sharded channels (``ssubscribe``) are channels with names of their own, which live, move and are replicated as
      others do, on servers of any version. A plain Redis client neither sees nor sends their messages.
    * Channels that belong to one server (``__keyspace@...``), and patterns that begin as these do (``__key*``), are
      refused with an error. ``Redis.keyspace_notifications`` is redis-py's own, at the first server.
    """

    #: How many items were read since others had their turn.
    _turn = 0

    def barrier(self, channel: Any) -> None:
        """Have a message of type ``barrier`` come behind everything that was published on ``channel`` before this call.

        Where messages were lost, the gap is before it. Raises RuntimeError while nothing is subscribed to.
        """
        if self._feed is None:
            raise RuntimeError(NOT_CONNECTED)
        self._feed.raise_barrier(bytes(self._encoder.encode(channel)))

    # Reading.

    async def get_message(
        self, ignore_subscribe_messages: bool = False, timeout: float | None = 0.0
    ) -> dict[str, Any] | None:
        """Return the next message, or None when there is none within ``timeout`` seconds (None: wait without end).

        None also means that a handler took the message, or that it was to be ignored.

        Raises:
            RuntimeError: nothing was subscribed to yet.
            redis.exceptions.ConnectionError: no server can be reached, see the class; or the client was closed.

        """
        if self._turn >= TURN_ITEMS_MAX or not self._queue.items:
            self._turn = 0
            if not await self._wait(timeout):
                return None
        self._turn += 1
        item = self.pop()
        if type(item) is not tuple:
            return await self._read(item, ignored=ignore_subscribe_messages)
        message, handler = self.shown(item)  # nearly always: as ``_read``, at less cost
        if handler is None:
            return message
        await _call(handler, message)
        return None

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        """Yield messages until the last unsubscription has been read. Raises as ``get_message``."""
        while self.channels or self.patterns or self.shard_channels:
            if self._turn >= TURN_ITEMS_MAX or not self._queue.items:
                await self._wait_long()
            self._turn += 1
            item = self.pop()
            if type(item) is tuple:  # nearly always: as ``_read``, at less cost
                message, handler = self.shown(item)
                if handler is None:
                    yield message
                else:
                    await _call(handler, message)
            elif (shown := await self._read(item, ignored=False)) is not None:
                yield shown

    async def batches(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield messages as ``listen``, in lists of those that have come: at least one, ``TURN_ITEMS_MAX`` at most.

        For applications that read very much. A handler is called, and an error raised, when all messages before it have
        been yielded.
        """
        while self.subscribed:
            await self._wait(None)
            batch: list[dict[str, Any]] = []
            for _ in range(TURN_ITEMS_MAX):
                if batch or not self._queue.items:
                    break
                batch = self.take_batch()
                if not batch and (message := await self._read(self.pop(), ignored=False)) is not None:
                    batch = [message]
            if batch:
                yield batch

    async def _read(self, item: Item | None, *, ignored: bool) -> dict[str, Any] | None:
        """Return what the application is to see of an item, unless there is none or a handler takes it."""
        if item is None:
            return None
        if not isinstance(item, (Notice, Failure)):
            message, handler = self.shown(item)
            if handler is None:
                return message
            await _call(handler, message)
            return None
        noted = self.note(item, ignored=ignored)
        if noted is None or noted["type"] != "gap":
            return noted
        if self._on_gap is not None:
            await _call(self._on_gap, noted["data"])
        return noted if self._gaps else None

    def _wait_long(self) -> Awaitable[object]:
        """Wait as ``_wait`` does, without end and at less cost; perhaps until there is no item yet."""
        self._turn = 0
        queue = self._queue
        elsewhere = self._loop is not asyncio.get_running_loop()
        if elsewhere or queue.items or queue.is_closed or not self._is_begun:
            return self._wait(None)
        return queue.wakeup()

    async def _until_item(self, timeout: float | None, *, reopen: bool) -> bool:
        """Wait for an item. Subscribe again each time the client is closed meanwhile; with ``reopen`` at once.

        False also when this PubSub is closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        ends_at = None if timeout is None else loop.time() + timeout
        while True:
            try:
                left_s = None if ends_at is None else max(0.0, ends_at - loop.time())
                return await super()._until_item(left_s, reopen=reopen)
            except ClientClosed:
                if not self._is_begun:
                    return False
                reopen = True


async def _call(function: Callable[[Any], object], argument: Any) -> None:
    """Call a handler, and await what it returns if that can be awaited."""
    result = function(argument)
    if inspect.isawaitable(result):
        await result
