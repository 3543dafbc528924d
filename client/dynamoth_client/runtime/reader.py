"""Reads the queue of a ``PubSub``: how both clients take items from it, and what the application sees of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, cast

import redis.exceptions

from dynamoth_client.machines.patterns.events import PatternMessage
from dynamoth_client.redis_py.errors import ClientClosed
from dynamoth_client.runtime.queue import Failure, GapInfo, Item, Message, Notice, ShardedMessage
from dynamoth_client.runtime.subscriptions import NOT_CONNECTED, Handler, Subscriptions

TURN_ITEMS_MAX = 256
"""Items that a reader takes, at most, before others on the event loop get their turn; also in one list of ``batches``:
many more would make the garbage collector look at them."""


class Reader(Subscriptions):
    """The base of both PubSubs. A thread may take items (``pop``, ``take_batch``); all else is for the event loop.

    Both PubSubs call handlers and ``on_gap`` themselves; the asynchronous one awaits what they return.
    """

    # Taking items.

    def pop(self) -> Item | None:
        """Remove the next item from the queue and return it; None when there is none."""
        queue = self._queue
        try:
            item = queue.items.popleft()
        except IndexError:
            return None
        if queue.is_full and len(queue.items) == queue.half:
            self._make_room()
        return item

    def take_batch(self) -> list[dict[str, Any]]:
        """Remove the next messages without handlers from the queue and return them, up to ``TURN_ITEMS_MAX``.

        Empty if the next item has a handler, is a notice or an error, or cannot be decoded: ``pop`` it.
        """
        queue = self._queue
        items, channels, decodes = queue.items, self.channels, self._decodes
        batch: list[dict[str, Any]] = []
        while items and len(batch) < TURN_ITEMS_MAX:
            item = items.popleft()
            try:
                if type(item) is tuple and not decodes:
                    channel, payload = item
                    message: dict[str, Any] = {"type": "message", "pattern": None, "channel": channel, "data": payload}
                    handler = channels.get(channel)
                elif isinstance(item, (Notice, Failure)):
                    items.appendleft(item)
                    break
                else:
                    message, handler = self.shown(item)
            except UnicodeError:
                items.appendleft(item)
                break
            if handler is not None:
                items.appendleft(item)
                break
            batch.append(message)
        if queue.is_full and len(items) <= queue.half:
            self._make_room()
        return batch

    def _make_room(self) -> None:
        """Fill the queue again, of which half has been read."""
        self._queue.relieve()

    # What the application sees.

    def shown(self, item: Message) -> tuple[dict[str, Any], Handler | None]:
        """Return a message as the application sees it, and its handler. Raises UnicodeError where it is no text."""
        if isinstance(item, tuple):
            channel, payload = item
            if self._decodes:
                channel, payload = self._name(channel), self._name(payload)
            return {"type": "message", "pattern": None, "channel": channel, "data": payload}, self.channels.get(channel)
        channel, payload = self._name(item.channel), self._name(item.payload)
        if isinstance(item, PatternMessage):
            pattern = self._name(item.pattern)
            message = {"type": "pmessage", "pattern": pattern, "channel": channel, "data": payload}
            return message, self.patterns.get(pattern)
        message = {"type": "smessage", "pattern": None, "channel": channel, "data": payload}
        return message, self.shard_channels.get(channel)

    def note(self, item: Notice | Failure, *, ignored: bool) -> dict[str, Any] | None:
        """Return a notice that was read as the application sees it; None for an acknowledgement to be ignored.

        Raises an error that was read.
        """
        notice = self._read_notice(item)
        kind = notice.kind
        name = None if notice.channel is None else self._name(notice.channel)
        message = {"type": kind, "pattern": None, "channel": name, "data": self._data(notice)}
        if kind in ("gap", "pong", "barrier"):
            return message
        if kind.endswith("unsubscribe"):
            subscribed, pending = self._registry(kind)
            if name in pending:
                pending.remove(name)
                subscribed.pop(name, None)
        return None if ignored or self.ignore_subscribe_messages else message

    async def parse_response(self, block: bool = True, timeout: float = 0) -> Any:
        """Return the next message as the list that Redis sends; None when there is none within ``timeout``."""
        if not await self._wait(None if block else timeout) or (item := self.pop()) is None:
            return None
        if isinstance(item, (Notice, Failure)):
            notice = self._read_notice(item)
            kind, data = self._name(notice.kind.encode()), self._data(notice)
            if notice.kind == "pong":
                return [kind, data]
            return [kind, None if notice.channel is None else self._name(notice.channel), data]
        if isinstance(item, PatternMessage):
            return [self._name(part) for part in (b"pmessage", item.pattern, item.channel, item.payload)]
        if isinstance(item, ShardedMessage):
            return [self._name(part) for part in (b"smessage", item.channel, item.payload)]
        return [self._name(part) for part in (b"message", *item)]

    def _read_notice(self, item: Notice | Failure) -> Notice:
        """Note that a notice was read, and return it; raise an error that was read, and forget its subscription."""
        self._queue.has_read(item)
        if isinstance(item, Notice):
            item.is_read = True
            return item
        if item.channel is not None:
            name = self._name(item.channel)
            subscribed, pending = self._registry(item.command)
            subscribed.pop(name, None)
            pending.discard(name)
        raise item.error

    def _data(self, notice: Notice) -> Any:
        if isinstance(notice.data, GapInfo):
            pattern = notice.data.pattern
            return replace(
                notice.data,
                channel=self._name(cast("bytes", notice.data.channel)),
                pattern=None if pattern is None else self._name(cast("bytes", pattern)),
            )
        return self._name(notice.data) if isinstance(notice.data, bytes) else notice.data

    # Waiting.

    def _wait(self, timeout: float | None) -> Awaitable[bool]:
        """Wait for an item, with a turn for others; False when there is none in time, or this PubSub was closed."""
        if not self._is_begun:
            raise RuntimeError(NOT_CONNECTED)
        queue = self._queue
        if queue.is_closed:
            reopen = isinstance(queue.error, ClientClosed) and not queue.items
        else:
            reopen = self._loop is not asyncio.get_running_loop()
        return self._until_item(timeout, reopen=reopen)

    async def _until_item(self, timeout: float | None, *, reopen: bool) -> bool:
        """Wait as ``_wait``; subscribe again first with ``reopen``. Raises ClientClosed when the client is closed."""
        queue = self._queue
        if reopen:
            try:
                await self._opened()
            except redis.exceptions.ConnectionError:
                if self._queue is not queue:  # this PubSub was closed
                    return False
                raise
        elif queue.items:
            await asyncio.sleep(0)
        return await queue.until_item(timeout)
