"""redis-py's ``PubSub`` over many servers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any, cast

import redis.exceptions

from dynamoth_client.machines.patterns.events import PatternMessage
from dynamoth_client.redis_py.errors import ClientClosed
from dynamoth_client.runtime.queue import (
    Failure,
    GapInfo,
    Item,
    Notice,
    ShardedMessage,
)
from dynamoth_client.runtime.subscriptions import NOT_CONNECTED, Handler, Subscriptions

_Other = PatternMessage | ShardedMessage
_Unusual = _Other | Notice | Failure

TURN_ITEMS_MAX = 256
"""Items that a reader takes, at most, before others on the event loop get their turn; also in one list of ``batches``:
many more would make the garbage collector look at them."""


class PubSub(Subscriptions):
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
        when_full: what happens when so many wait. ``"block"``: reading from the servers stops for 1 s, then up to 32 MB
            wait in this process, so that channels can be moved meanwhile. Further messages are dropped, and a gap in
            their place says how many of which channel or pattern. All is normal again when half of the messages have
            been taken. ``"drop_oldest"``: the oldest quarter is dropped, and a gap in its place says the same.
            ``"disconnect"``: the subscriptions end, and ConnectionError is raised behind the messages that have come.

    Different from redis-py:

    * A lost connection is made again without an exception; it shows as a gap. Only when no server of the subscribed
      channels can be reached for ``socket_connect_timeout`` (5 s if None) do ``get_message`` and ``listen`` raise
      ConnectionError or AuthenticationError, and again after each further such time. The PubSub keeps reconnecting:
      read on.
    * ``connection`` is None or what stands for all connections: it has ``is_connected``, and ``disconnect``, which cuts
      them. After that, and no other loss, every subscription is acknowledged again, as redis-py does after each.
      Callbacks that are registered there are never called; it has nothing else of redis-py's connections.
    * ``push_handler_func`` is refused with an error: handlers and ``on_gap`` tell what comes. ``execute_command`` has
      the commands of subscriptions and PING, and no other.
    * After ``aclose`` of the client it subscribes again when it is used, at once if somebody reads it, as redis-py's
      does; so it does where its event loop was closed without ``aclose``, on the loop where it is used next. That is a
      gap. To end a reader, close the PubSub.
    * The first ``subscribe`` raises when the plan cannot be read from any server, and nothing is subscribed then.
    * A pattern needs a connection to every server. One that is away for 5 s is done without, and that is a gap.
    * Sharded channels (``ssubscribe``) are channels with names of their own, which live, move and are replicated as
      others do, on servers of any version. A plain Redis client neither sees nor sends their messages.
    * Channels that belong to one server (``__keyspace@...``), and patterns that begin as these do (``__key*``), are
      refused with an error. ``Redis.keyspace_notifications`` is redis-py's own, at the first server.
    """

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
        must_wait = self._turn >= TURN_ITEMS_MAX or not self._queue.items
        if must_wait and not await self._wait(timeout):
            return None
        item = self._pop()
        if type(item) is not tuple:
            return await self._unusual(cast("_Unusual", item), ignore_subscribe_messages)
        message = self._message(item)
        handler = self.channels.get(message["channel"])
        if handler is None:
            return message
        await _call(handler, message)
        return None

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        """Yield messages until the last unsubscription has been read. Raises as ``get_message``."""
        while self.channels or self.patterns or self.shard_channels:
            if self._turn >= TURN_ITEMS_MAX or not self._queue.items:
                await self._wait_long()
                if not self._queue.items:
                    continue
            item = self._pop()
            if type(item) is tuple:
                message = self._message(item)
                handler = self.channels.get(message["channel"])
                if handler is None:
                    yield message
                else:
                    await _call(handler, message)
            else:
                unusual = await self._unusual(cast("_Unusual", item), ignored=False)
                if unusual is not None:
                    yield unusual

    async def batches(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield messages as ``listen``, in lists of those that have come: at least one, ``TURN_ITEMS_MAX`` at most.

        For applications that read very much. A handler is called, and an error raised, when all messages before it have
        been yielded.
        """
        while self.subscribed:
            if not await self._wait(None):
                continue
            batch: list[dict[str, Any]] = []
            try:
                await self._fill(batch)
            finally:
                if self._queue.is_full:
                    self._queue.relieve()
            if batch:
                yield batch

    async def _fill(self, batch: list[dict[str, Any]]) -> None:
        """Take messages from the queue as long as there are some, or one item of another kind.

        What may raise, or be cancelled, begins a batch: nothing that was taken before is lost by it.
        """
        items, channels, decodes = self._queue.items, self.channels, self._decodes
        for count in range(min(len(items), TURN_ITEMS_MAX)):
            item = items.popleft()
            try:
                if type(item) is tuple:
                    channel, payload = item
                    message: dict[str, Any] = {"type": "message", "pattern": None, "channel": channel, "data": payload}
                    if decodes:
                        message = self._message(item)
                    handler = channels.get(message["channel"])
                elif not isinstance(item, (Notice, Failure)):
                    message, handler = self._shown(cast("_Other", item))
                elif count:
                    items.appendleft(item)
                    break
                else:
                    notice = await self._notice(item, ignored=False)
                    batch += [] if notice is None else [notice]
                    break
            except UnicodeError:  # of a payload; that of a handler is another matter
                if not batch:
                    raise
                items.appendleft(item)
                break
            if handler is None:
                batch.append(message)
            elif batch:
                items.appendleft(item)
                break
            else:
                await _call(handler, message)

    async def parse_response(self, block: bool = True, timeout: float = 0) -> Any:
        """Return the next message as the list that Redis sends; None when there is none within ``timeout``."""
        if not await self._wait(None if block else timeout):
            return None
        item = self._pop()
        if isinstance(item, (Notice, Failure)):
            self._queue.has_read(item)
        if isinstance(item, Failure):
            raise self._failed(item)
        if isinstance(item, Notice):
            item.is_read = True
            kind = self._name(item.kind.encode())
            if item.kind == "pong":
                return [kind, self._data(item)]
            return [kind, None if item.channel is None else self._name(item.channel), self._data(item)]
        if isinstance(item, PatternMessage):
            return [self._name(part) for part in (b"pmessage", item.pattern, item.channel, item.payload)]
        if isinstance(item, ShardedMessage):
            return [self._name(part) for part in (b"smessage", item.channel, item.payload)]
        return [self._name(part) for part in (b"message", *item)]

    def _pop(self) -> Item:
        """Take the next item, without waiting; there is one."""
        queue = self._queue
        self._turn += 1
        item = queue.items.popleft()
        if queue.is_full:
            queue.relieve()
        return item

    def _wait(self, timeout: float | None) -> Awaitable[bool]:
        """Wait for an item, with a turn for others; False when there is none in time, or this PubSub was closed."""
        if not self._is_begun:
            raise RuntimeError(NOT_CONNECTED)
        self._turn = 0
        queue = self._queue
        if queue.is_closed:
            if isinstance(queue.error, ClientClosed) and not queue.items:
                return self._wait_reopened(timeout)
        elif self._loop is not asyncio.get_running_loop():
            return self._wait_reopened(timeout)
        return self._wait_with_others(timeout) if queue.items else self._until_item(timeout)

    def _wait_long(self) -> Awaitable[object]:
        """Wait as ``_wait`` does, without end and at less cost; perhaps until there is no item yet."""
        queue = self._queue
        elsewhere = self._loop is not asyncio.get_running_loop()
        if elsewhere or queue.items or queue.is_closed or not self._is_begun:
            return self._wait(None)
        self._turn = 0
        return queue.wakeup()

    async def _until_item(self, timeout: float | None, *, reopen: bool = False) -> bool:
        """Wait for an item. Subscribe again each time the client is closed meanwhile; with ``reopen`` at once.

        False also when this PubSub is closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        ends_at = None if timeout is None else loop.time() + timeout
        while True:
            try:
                return await self._wait_once(
                    None if ends_at is None else max(0.0, ends_at - loop.time()), reopen=reopen
                )
            except ClientClosed:
                if not self._is_begun:
                    return False
                reopen = True

    async def _wait_once(self, timeout: float | None, *, reopen: bool) -> bool:
        """Do as ``_until_item``, until the client is closed: then raise ``ClientClosed``."""
        queue = self._queue
        if reopen:
            try:
                await self._opened()
            except redis.exceptions.ConnectionError:
                if self._queue is not queue:  # this PubSub was closed
                    return False
                raise
        return await queue.until_item(timeout)

    def _wait_reopened(self, timeout: float | None) -> Awaitable[bool]:
        return self._until_item(timeout, reopen=True)

    async def _wait_with_others(self, timeout: float | None) -> bool:
        await asyncio.sleep(0)
        return await self._queue.until_item(timeout)

    def _message(self, item: tuple[bytes, bytes]) -> dict[str, Any]:
        channel, payload = item
        if not self._decodes:
            return {"type": "message", "pattern": None, "channel": channel, "data": payload}
        return {"type": "message", "pattern": None, "channel": self._name(channel), "data": self._name(payload)}

    def _shown(self, item: _Other) -> tuple[dict[str, Any], Handler | None]:
        """Return a message as the application sees it, and its handler."""
        if isinstance(item, PatternMessage):
            pattern, channel, payload = self._name(item.pattern), self._name(item.channel), self._name(item.payload)
            message = {"type": "pmessage", "pattern": pattern, "channel": channel, "data": payload}
            return message, self.patterns.get(pattern)
        channel, payload = self._name(item.channel), self._name(item.payload)
        message = {"type": "smessage", "pattern": None, "channel": channel, "data": payload}
        return message, self.shard_channels.get(channel)

    async def _unusual(self, item: _Unusual, ignored: bool) -> dict[str, Any] | None:
        """Do as ``get_message`` with what is no plain message of a channel."""
        if isinstance(item, (Notice, Failure)):
            return await self._notice(item, ignored)
        message, handler = self._shown(item)
        if handler is None:
            return message
        await _call(handler, message)
        return None

    async def _notice(self, item: Notice | Failure, ignored: bool) -> dict[str, Any] | None:
        self._queue.has_read(item)
        if isinstance(item, Failure):
            raise self._failed(item)
        item.is_read = True
        kind = item.kind
        name = None if item.channel is None else self._name(item.channel)
        message = {"type": kind, "pattern": None, "channel": name, "data": self._data(item)}
        if kind == "gap":
            return await self._gap(message)
        if kind == "pong":
            return message
        if kind.endswith("unsubscribe"):
            subscribed, pending = self._registry(is_pattern=kind == "punsubscribe", is_sharded=kind == "sunsubscribe")
            if name in pending:
                pending.remove(name)
                subscribed.pop(name, None)
        return None if ignored or self.ignore_subscribe_messages else message

    async def _gap(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if self._on_gap is not None:
            result = self._on_gap(message["data"])
            if inspect.isawaitable(result):
                await result
        return message if self._gaps else None

    def _failed(self, failure: Failure) -> redis.exceptions.RedisError:
        if failure.channel is not None:
            name = self._name(failure.channel)
            subscribed, pending = self._registry(is_pattern=failure.is_pattern, is_sharded=failure.is_sharded)
            subscribed.pop(name, None)
            pending.discard(name)
        return failure.error

    def _data(self, notice: Notice) -> Any:
        if isinstance(notice.data, GapInfo):
            pattern = notice.data.pattern
            return replace(
                notice.data,
                channel=self._name(cast("bytes", notice.data.channel)),
                pattern=None if pattern is None else self._name(cast("bytes", pattern)),
            )
        return self._name(notice.data) if isinstance(notice.data, bytes) else notice.data


async def _call(handler: Handler, message: dict[str, Any]) -> None:
    result = handler(message)
    if inspect.isawaitable(result):
        await result
