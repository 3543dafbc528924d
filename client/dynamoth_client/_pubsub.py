"""redis-py's ``PubSub`` over many servers."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import redis.asyncio
import redis.asyncio.client
import redis.exceptions

from dynamoth.names import SHARDED_PREFIX, sharded_channel
from dynamoth_client._acks import Subject
from dynamoth_client._arguments import flat, method_of, refuse_unroutable, refuse_unroutable_pattern, with_handlers
from dynamoth_client._cluster import Cluster
from dynamoth_client._errors import ClientClosed, OtherLoop
from dynamoth_client._feed import Feed
from dynamoth_client._queue import (
    MAX_QUEUE,
    WHEN_FULL,
    Failure,
    GapInfo,
    Item,
    MessageQueue,
    Notice,
    ShardedMessage,
    WhenFull,
)
from dynamoth_client._settings import Encoder
from dynamoth_client.pattern_subscription import PatternMessage

Channel = bytes | str | memoryview
Handler = Callable[[dict[str, Any]], Any]
GapHandler = Callable[[GapInfo], Awaitable[None] | None]
_Other = PatternMessage | ShardedMessage
_Unusual = _Other | Notice | Failure
_Books = tuple[dict[Channel, Handler | None], set[Channel]]
"""What is subscribed to, confirmed or not, with handlers; and whose unsubscription was asked for and not read yet."""

TURN_ITEMS_MAX = 256
"""Items that a reader takes, at most, before others on the event loop get their turn; also in one list of ``batches``:
many more would make the garbage collector look at them."""

NOT_CONNECTED = "pubsub connection not set: did you forget to call subscribe() or psubscribe()?"


LOOP_CLOSED = "the event loop was closed that the subscription was on: close the client before its loop"
CLIENT_CLOSED = "the client was closed while the PubSub was subscribed, which was read on: close the PubSub first"
"""Reasons of gaps."""


class PubSub(redis.asyncio.client.PubSub):
    """Subscriptions, read with redis-py's methods; the servers and the moves of channels between them do not show.

    What is promised (G1-G3 of the README) begins for a channel with its ``subscribe`` (``ssubscribe``) message, for a
    pattern with its ``psubscribe`` message: from then on every message is delivered once, and in order per publisher.
    Besides redis-py's arguments:

    Args:
        on_gap: called, or awaited, with a :class:`GapInfo` where messages were lost or may have been, in its place
            among the messages.
        gaps: True gives messages of type ``gap`` as well, whose ``data`` is the :class:`GapInfo`. With neither,
            gaps are logged as warnings.
        max_queue: how many messages wait for the application at most; acknowledgements and gaps do not count.
        when_full: what is done about more. ``"block"``: they wait until half of the messages have been taken, for 1 s
            in the servers, then here, so that channels can be moved meanwhile. After 32 MB further messages are left
            out, and a gap in their place tells how many of which channel or pattern. ``"drop_oldest"``: the oldest
            quarter is dropped, and a gap in its place tells the same. ``"disconnect"``: the subscriptions end, and
            ConnectionError is raised behind the messages that have come.

    Different from redis-py:

    * A lost connection is made again without an exception; it shows as a gap. Only when no server of the subscribed
      channels can be reached for ``socket_connect_timeout`` (5 s if None) do ``get_message`` and ``listen`` raise
      ConnectionError or AuthenticationError, and again each time as long; the PubSub goes on trying and can be read on.
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

    channels: dict[Channel, Handler | None]
    patterns: dict[Channel, Handler | None]
    shard_channels: dict[Channel, Handler | None]
    pending_unsubscribe_channels: set[Channel]
    pending_unsubscribe_patterns: set[Channel]
    pending_unsubscribe_shard_channels: set[Channel]

    _family = "redis.asyncio"
    """What of redis-py the application uses, for the texts of errors."""

    def __init__(
        self,
        connection_pool: redis.asyncio.ConnectionPool,
        cluster: Cluster,
        *,
        on_gap: GapHandler | None = None,
        gaps: bool = False,
        max_queue: int = MAX_QUEUE,
        when_full: WhenFull = "block",
        push_handler_func: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if push_handler_func is not None:
            raise redis.exceptions.DataError(
                "push_handler_func is not supported: give handlers to subscribe(), and on_gap for gaps"
            )
        if when_full not in WHEN_FULL:
            raise redis.exceptions.DataError(f"when_full must be one of {', '.join(WHEN_FULL)}, not {when_full!r}")
        super().__init__(connection_pool, **kwargs)  # pyright: ignore[reportUnknownMemberType]  # redis-py is typed in part
        self.shard_channels = {}
        self.pending_unsubscribe_shard_channels = set()
        self._encoder = cast("Encoder", self.encoder)
        self._decodes = self._encoder.decode_responses
        self._cluster = cluster
        self._on_gap = on_gap
        self._gaps = gaps
        self._max_queue = max_queue
        self._when_full: WhenFull = when_full
        self._queue = MessageQueue(max_queue)
        #: Set by ``connect`` and all that needs it, before anything is awaited; cleared by ``aclose``.
        self._is_begun = False
        self._feed: Feed | None = None
        #: The event loop that it was opened on; None in a forked child until it is opened there.
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The feed that is being opened, shared by all who wait for it.
        self._opening: asyncio.Task[Feed] | None = None
        #: The feed whose subscriptions the next one takes over, and why that one ended.
        self._before: tuple[Feed, str] | None = None
        #: What was asked for while there was no feed, in order.
        self._requests: deque[Callable[[Feed], None]] = deque()
        #: How many items were read since others had their turn.
        self._turn = 0
        cluster.followers.add(self)

    def __del__(self) -> None:
        """End the feed of a PubSub that was dropped without ``aclose``."""
        feed: Feed | None = getattr(self, "_feed", None)
        if feed is not None and not feed.is_stopped and not feed.loop.is_closed():
            feed.loop.call_soon_threadsafe(feed.stop)

    # The life of a PubSub.

    async def connect(self) -> None:
        """Get ready: read the plan, if this client has not. Connections are opened when channels need them.

        Always gives others on the event loop a turn.

        Raises:
            redis.exceptions.ConnectionError: no server gave a plan.
            RuntimeError: the client belongs to another event loop.

        """
        is_open = self._feed is not None
        await self._opened()
        if is_open:
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """End all subscriptions; what has not been read is dropped. The PubSub can be used again.

        Raises RuntimeError on another event loop than that of the subscriptions, unless that is closed.
        """
        feed, opening, queue, loop = self._feed, self._opening, self._queue, self._loop
        if loop is not None and loop is not asyncio.get_running_loop():
            if not loop.is_closed() and (feed is None or not feed.is_stopped):
                raise OtherLoop
            if feed is not None:
                feed.abandon()
            queue.forget_waiters()
            feed = opening = None  # they have ended with their loop
        self._forget()
        queue.close(None)
        self._queue = MessageQueue(self._max_queue)
        if opening is not None:
            opening.cancel()
            await asyncio.wait({opening})
        if feed is not None:
            await feed.close()

    def fork(self) -> None:
        """Begin anew in a forked child, when this is used there: what waits to be read is the parent's."""
        error = self._queue.error
        self._queue = MessageQueue(self._max_queue)
        if error is not None:
            self._queue.close(error)
        self._feed = self._opening = self._loop = self._before = None
        self.connection = None

    @property
    def subscribed(self) -> bool:
        """Whether there are subscriptions, confirmed or not; True as soon as ``subscribe`` has begun."""
        return bool(self.channels or self.patterns or self.shard_channels)

    @property
    def gaps_detected(self) -> int:
        """How many gaps there have been since the last ``aclose``."""
        return self._feed.gaps if self._feed is not None else 0

    # Subscribing.

    async def subscribe(self, *args: Any, **kwargs: Handler) -> None:
        """Subscribe to channels: names, or names as keywords with a handler that is called with each message.

        Returns when all are confirmed: what anybody publishes afterwards arrives. (Sooner when a server cannot be
        reached for ``socket_connect_timeout``, 5 s if None, or while the queue is full; the subscription comes about
        all the same.) The message of type ``subscribe`` is the confirmation, as in redis-py.

        Raises:
            redis.exceptions.ConnectionError: the plan cannot be read from any server; nothing is subscribed.
            redis.exceptions.DataError: a channel that cannot be subscribed to here.

        """
        wanted = self._wanted("subscribe", args, kwargs)
        encoded = [channel for channel, _ in wanted]
        for channel in encoded:
            refuse_unroutable(channel, self._family)
        self._begin(wanted, self._books())
        await self._request(lambda feed: feed.subscribe(encoded), map(Subject, encoded))

    def unsubscribe(self, *args: Any) -> Awaitable[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unsubscribe from channels, or from all; confirmed by messages of type ``unsubscribe``.

        Raises ``redis.exceptions.DataError`` for what is a sharded channel inside: ``sunsubscribe`` is for these.
        """
        if args:
            args = (flat(args),)  # it may be an iterator, and is looked at twice
        for name in flat(args):
            if (encoded_name := self._encode(name)).startswith(SHARDED_PREFIX):
                refuse_unroutable(encoded_name, self._family)
        encoded = self._end(args, self._books())
        return self._request(lambda feed: feed.unsubscribe(encoded))

    async def psubscribe(self, *args: Any, **kwargs: Handler) -> None:
        """Subscribe to all channels that match patterns, as ``subscribe`` does to channels.

        A message of a channel comes once for each pattern that matches it, and once more if the channel is subscribed
        to by name. Patterns are Redis' own; channels that belong to one server (``__keyspace@...``) match none.

        Raises:
            redis.exceptions.ConnectionError: the plan cannot be read from any server; nothing is subscribed.
            redis.exceptions.DataError: a pattern that can match nothing here.

        """
        wanted = self._wanted("psubscribe", args, kwargs)
        encoded = [pattern for pattern, _ in wanted]
        for pattern in encoded:
            refuse_unroutable_pattern(pattern, self._family)
        self._begin(wanted, self._books(is_pattern=True))
        await self._request(lambda feed: feed.psubscribe(encoded), [Subject(pattern, True) for pattern in encoded])

    async def ssubscribe(self, *args: Any, target_node: Any = None, **kwargs: Handler) -> None:
        """Subscribe to sharded channels, which have names of their own, as ``subscribe`` does to channels.

        Confirmed by messages of type ``ssubscribe``; messages are of type ``smessage``. ``target_node`` is that of
        redis-py's cluster client: without a meaning here.

        Raises:
            redis.exceptions.ConnectionError: the plan cannot be read from any server; nothing is subscribed.

        """
        wanted = self._wanted("ssubscribe", args, kwargs)
        encoded = [channel for channel, _ in wanted]
        self._begin(wanted, self._books(is_sharded=True))
        await self._request(lambda feed: feed.ssubscribe(encoded), map(Subject, map(sharded_channel, encoded)))

    def punsubscribe(self, *args: Any) -> Awaitable[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unsubscribe from patterns, or from all; confirmed by messages of type ``punsubscribe``."""
        encoded = self._end(args, self._books(is_pattern=True))
        return self._request(lambda feed: feed.punsubscribe(encoded))

    def sunsubscribe(self, *args: Any, target_node: Any = None) -> Awaitable[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unsubscribe from sharded channels, or from all; confirmed by messages of type ``sunsubscribe``."""
        encoded = self._end(args, self._books(is_sharded=True))
        return self._request(lambda feed: feed.sunsubscribe(encoded))

    async def ping(self, message: Any = None) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Ask a server for a sign of life: one that is subscribed at, else one that the client was given.

        Its answer is a message of type ``pong``. Raises ``redis.exceptions.ConnectionError`` when no server is there.
        """
        feed = await self._opened()
        data = None if message is None else self._encode(message)
        if not feed.ping(data):
            await self._cluster.ping()
            feed.pong(data or b"")
        return True

    async def check_health(self) -> None:
        """Do nothing: links check themselves. Raises RuntimeError before ``connect`` or the first subscription."""
        if self.connection is None:
            raise RuntimeError(NOT_CONNECTED)

    async def execute_command(self, *args: Any) -> Any:
        """Execute a command of subscriptions. Raises ``redis.exceptions.PubSubError`` for any other."""
        return await getattr(self, method_of(args[0]))(*args[1:])

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
                return self._wait_anew(timeout)
        elif self._loop is not asyncio.get_running_loop():
            return self._wait_anew(timeout)
        return self._wait_with_others(timeout) if queue.items else self._until_item(timeout)

    def _wait_long(self) -> Awaitable[object]:
        """Wait as ``_wait`` does, without end and at less cost; perhaps until there is no item yet."""
        queue = self._queue
        elsewhere = self._loop is not asyncio.get_running_loop()
        if elsewhere or queue.items or queue.is_closed or not self._is_begun:
            return self._wait(None)
        self._turn = 0
        return queue.wakeup()

    async def _until_item(self, timeout: float | None) -> bool:
        """Wait for an item, also when the client is closed meanwhile: then the subscriptions begin anew."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            return await self._queue.until_item(timeout)
        except ClientClosed:
            left_s = None if timeout is None else max(0.0, began_at + timeout - loop.time())
        return await self._wait_anew(left_s)

    async def _wait_anew(self, timeout: float | None) -> bool:
        await self._opened()
        return await self._until_item(timeout)

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
            subscribed, pending = self._books(is_pattern=kind == "punsubscribe", is_sharded=kind == "sunsubscribe")
            if name in pending:
                pending.remove(name)
                subscribed.pop(name, None)
        return None if ignored or self.ignore_subscribe_messages else message

    async def _gap(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if self._on_gap is not None:
            result = self._on_gap(message["data"])
            if result is not None:
                await result
        return message if self._gaps else None

    def _failed(self, failure: Failure) -> redis.exceptions.RedisError:
        if failure.channel is not None:
            name = self._name(failure.channel)
            subscribed, pending = self._books(is_pattern=failure.is_pattern, is_sharded=failure.is_sharded)
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

    # The feed.

    async def _request(self, request: Callable[[Feed], None], subscribed: Iterable[Subject] = ()) -> None:
        """Let the feed do something, in the order of the calls; opens it when needed. Waits for what is subscribed."""
        self._requests.append(request)
        feed = await self._opened()
        self._pass_requests(feed)
        await feed.until_confirmed(subscribed)

    def _pass_requests(self, feed: Feed) -> None:
        while self._requests:
            self._requests.popleft()(feed)

    async def _opened(self) -> Feed:
        """Return the feed. Whoever waits shares the result; a failure ends all that was asked for."""
        was_begun, self._is_begun = self._is_begun, True
        if isinstance(self._queue.error, ClientClosed):
            self._restart_after_close()
        if self._queue.error is not None:
            self._requests.clear()
            self._queue.raise_error()
        if self._loop is not (loop := asyncio.get_running_loop()):
            if was_begun:
                self._begin_anew()
            self._loop = loop
        if self._feed is not None:
            return self._feed
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="open a Dynamoth PubSub")
            self._opening.add_done_callback(_retrieve)
        task = self._opening
        await asyncio.wait({task})
        if task.cancelled():
            raise redis.exceptions.ConnectionError("the PubSub was closed while this waited: close it afterwards")
        return task.result()

    async def _open(self) -> Feed:
        wants_gaps = self._gaps or self._on_gap is not None
        try:
            self._feed = await self._cluster.open_feed(self._queue, wants_gaps=wants_gaps, when_full=self._when_full)
        except Exception as error:
            if self._before is not None:  # what is subscribed stays so, and the next use tries again
                self._opening = self._loop = None
                raise
            queue = self._queue
            self._forget()
            self._queue = MessageQueue(self._max_queue)
            queue.close(error if isinstance(error, redis.exceptions.RedisError) else None)
            raise
        self._opening = self._before = None
        self.connection = cast("Any", self._feed)
        self._pass_requests(self._feed)
        return self._feed

    def _restart_after_close(self) -> None:
        """Let the subscriptions begin anew, as the client was closed and this PubSub is used again."""
        if self._feed is not None:
            self._before = self._feed, CLIENT_CLOSED
        self._feed = self._loop = None
        self._queue.reopen()

    def _begin_anew(self) -> None:
        """Ask again for all that has been asked for.

        The event loop is gone where that was, or the client was closed, or this is a forked child.

        Raises RuntimeError where the loop is not gone.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._requests.clear()
            raise OtherLoop
        self._cluster.bind()
        if self._feed is not None:
            self._feed.abandon()
            self._before = self._feed, LOOP_CLOSED
        self._feed = self._opening = None
        self.connection = None
        self._queue.forget_waiters()
        self._requests.clear()
        if self._before is not None:
            before, reason = self._before
            self._requests.append(lambda feed: feed.succeed(before, reason))
        for books, subscribe, unsubscribe in (
            (self._books(), Feed.subscribe, Feed.unsubscribe),
            (self._books(is_pattern=True), Feed.psubscribe, Feed.punsubscribe),
            (self._books(is_sharded=True), Feed.ssubscribe, Feed.sunsubscribe),
        ):
            for names, request in zip(books, (subscribe, unsubscribe), strict=True):
                if names:
                    self._requests.append(partial(_ask, request, [self._encode(name) for name in names]))

    def _forget(self) -> None:
        """Be as new."""
        self._feed = self._opening = self._loop = self._before = None
        self.connection = None
        self._is_begun = False
        self._requests.clear()
        self.channels = {}
        self.pending_unsubscribe_channels = set()
        self.patterns = {}
        self.pending_unsubscribe_patterns = set()
        self.shard_channels = {}
        self.pending_unsubscribe_shard_channels = set()

    # What is subscribed to, and its names.

    def _books(self, *, is_pattern: bool = False, is_sharded: bool = False) -> _Books:
        """Return what is kept of channels, of patterns or of sharded channels."""
        if is_pattern:
            return self.patterns, self.pending_unsubscribe_patterns
        if is_sharded:
            return self.shard_channels, self.pending_unsubscribe_shard_channels
        return self.channels, self.pending_unsubscribe_channels

    def _wanted(
        self, command: str, args: tuple[Any, ...], kwargs: Mapping[str, Handler]
    ) -> list[tuple[bytes, Handler | None]]:
        """Return what to subscribe to, with handlers. Raises ``redis.exceptions.ResponseError`` if that is nothing."""
        wanted = with_handlers(args, kwargs)
        if not wanted:
            what = "pattern" if command == "psubscribe" else "channel"
            raise redis.exceptions.ResponseError(f"wrong number of arguments for '{command}' command: name a {what}")
        return [(self._encode(name), handler) for name, handler in wanted.items()]

    def _begin(self, wanted: Iterable[tuple[bytes, Handler | None]], books: _Books) -> None:
        """Note what is subscribed to, by the names that the application sees."""
        subscribed, pending = books
        named = {self._name(name): handler for name, handler in wanted}
        subscribed.update(named)
        pending.difference_update(named)

    def _end(self, args: tuple[Any, ...], books: _Books) -> list[bytes]:
        """Return, and note, what is unsubscribed from: what is named, else all that is not pending."""
        subscribed, pending = books
        names = flat(args) if args else [name for name in subscribed if name not in pending]
        encoded = [self._encode(name) for name in names]
        pending.update(self._name(name) for name in encoded)
        return encoded

    def _encode(self, value: Any) -> bytes:
        return bytes(self._encoder.encode(value))

    def _name(self, value: bytes) -> Any:
        """Return a name, or a payload, as the application sees it."""
        return self._encoder.decode(value)


def _ask(request: Callable[[Feed, Iterable[bytes]], None], names: list[bytes], feed: Feed) -> None:
    request(feed, names)


async def _call(handler: Handler, message: dict[str, Any]) -> None:
    result = handler(message)
    if result is not None and inspect.isawaitable(result):
        await result


def _retrieve(task: asyncio.Task[Feed]) -> None:
    """Mark the error of an opening as seen: everybody who waited for it may have been cancelled."""
    if not task.cancelled():
        task.exception()
