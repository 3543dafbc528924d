"""The subscriptions of a ``PubSub``, and the feed that fills its queue: how these begin, change and end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from operator import methodcaller
from typing import Any, cast

import redis.asyncio
import redis.asyncio.client
import redis.exceptions

from dynamoth.names import SHARDED_PREFIX
from dynamoth_client.redis_py.errors import ClientClosed, OtherLoop
from dynamoth_client.redis_py.settings import Encoder
from dynamoth_client.redis_py.subscribe_arguments import (
    flat,
    method_of,
    refuse_unroutable,
    refuse_unroutable_pattern,
    with_handlers,
)
from dynamoth_client.runtime.cluster import Cluster, retrieve
from dynamoth_client.runtime.feed import Feed
from dynamoth_client.runtime.queue import (
    MAX_QUEUE,
    WHEN_FULL,
    GapInfo,
    MessageQueue,
    WhenFull,
)

Channel = bytes | str | memoryview
Handler = Callable[[dict[str, Any]], Any]
GapHandler = Callable[[GapInfo], object]
COMMANDS = (("subscribe", "unsubscribe"), ("psubscribe", "punsubscribe"), ("ssubscribe", "sunsubscribe"))
"""For channels, patterns and sharded channels."""

_Registry = tuple[dict[Channel, Handler | None], set[Channel]]
"""Names with handlers, confirmed or not; and those whose unsubscription was asked for and not read yet."""

NOT_CONNECTED = "pubsub connection not set: did you forget to call subscribe() or psubscribe()?"

LOOP_CLOSED = "the event loop of the subscription was closed: close the client before its loop"
CLIENT_CLOSED = "the client was closed before its PubSub, which was then used again: close the PubSub first"
"""Reasons of gaps."""


class Subscriptions(redis.asyncio.client.PubSub):
    """The base of ``PubSub``: everything but reading. See there for the arguments and the promises."""

    channels: dict[Channel, Handler | None]
    patterns: dict[Channel, Handler | None]
    shard_channels: dict[Channel, Handler | None]
    pending_unsubscribe_channels: set[Channel]
    pending_unsubscribe_patterns: set[Channel]
    pending_unsubscribe_shard_channels: set[Channel]

    _family = "redis.asyncio"
    """The module of redis-py that the application's client replaces, for error texts."""

    def __init__(
        self,
        connection_pool: redis.asyncio.ConnectionPool,
        cluster: Cluster,
        *,
        on_gap: GapHandler | None = None,
        gaps: bool = False,
        max_queue: int = MAX_QUEUE,
        when_full: WhenFull = "block",
        numbered: bool = False,
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
        self._numbered = numbered
        self._queue = MessageQueue(max_queue)
        #: Set by ``connect`` and all that needs it, before anything is awaited; cleared by ``aclose``.
        self._is_begun = False
        self._feed: Feed | None = None
        #: The event loop that it was opened on; None in a forked child until it is opened there.
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The feed that is being opened; all who wait share it.
        self._opening: asyncio.Task[Feed] | None = None
        #: The feed whose subscriptions the next one takes over, and why that one ended.
        self._before: tuple[Feed, str] | None = None
        #: What was asked for while there was no feed, in order.
        self._requests: deque[Callable[[Feed], None]] = deque()
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
        """End all subscriptions; unread messages are dropped. The PubSub can be used again.

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
        """Begin again in a forked child, when this is used there: the unread messages are the parent's."""
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
        await self._request("subscribe", self._begin("subscribe", args, kwargs))

    def unsubscribe(self, *args: Any) -> Awaitable[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unsubscribe from channels, or from all; confirmed by messages of type ``unsubscribe``.

        Raises ``redis.exceptions.DataError`` for the inner name of a sharded channel: use ``sunsubscribe``.
        """
        if args:
            args = (flat(args),)  # it may be an iterator, and is looked at twice
        for name in flat(args):
            if (encoded_name := self._encode(name)).startswith(SHARDED_PREFIX):
                refuse_unroutable(encoded_name, self._family)
        return self._request("unsubscribe", self._end("unsubscribe", args))

    async def psubscribe(self, *args: Any, **kwargs: Handler) -> None:
        """Subscribe to all channels that match patterns, as ``subscribe`` does to channels.

        A message of a channel comes once for each pattern that matches it, and once more if the channel is subscribed
        to by name. Patterns are Redis' own; channels that belong to one server (``__keyspace@...``) match none.

        Raises:
            redis.exceptions.ConnectionError: the plan cannot be read from any server; nothing is subscribed.
            redis.exceptions.DataError: a pattern that can match nothing here.

        """
        await self._request("psubscribe", self._begin("psubscribe", args, kwargs))

    async def ssubscribe(self, *args: Any, target_node: Any = None, **kwargs: Handler) -> None:
        """Subscribe to sharded channels, which have names of their own, as ``subscribe`` does to channels.

        Confirmed by messages of type ``ssubscribe``; messages are of type ``smessage``. ``target_node`` is that of
        redis-py's cluster client: without a meaning here.

        Raises:
            redis.exceptions.ConnectionError: the plan cannot be read from any server; nothing is subscribed.

        """
        await self._request("ssubscribe", self._begin("ssubscribe", args, kwargs))

    def punsubscribe(self, *args: Any) -> Awaitable[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unsubscribe from patterns, or from all; confirmed by messages of type ``punsubscribe``."""
        return self._request("punsubscribe", self._end("punsubscribe", args))

    def sunsubscribe(self, *args: Any, target_node: Any = None) -> Awaitable[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Unsubscribe from sharded channels, or from all; confirmed by messages of type ``sunsubscribe``."""
        return self._request("sunsubscribe", self._end("sunsubscribe", args))

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

    # The feed.

    async def _request(self, command: str, names: list[bytes]) -> None:
        """Pass a request to the feed, in the order of the calls, and wait until subscriptions are confirmed.

        Opens the feed when needed.
        """
        self._requests.append(lambda feed: feed.request(command, names))
        feed = await self._opened()
        self._pass_requests(feed)
        await feed.until_confirmed(command, () if command.endswith("unsubscribe") else names)

    def _pass_requests(self, feed: Feed) -> None:
        while self._requests:
            self._requests.popleft()(feed)

    async def _opened(self) -> Feed:
        """Return the open feed. Concurrent callers share the result; a failure ends all requested subscriptions."""
        was_begun, self._is_begun = self._is_begun, True
        if isinstance(self._queue.error, ClientClosed):
            self._restart_after_close()
        if self._queue.error is not None:
            self._requests.clear()
            self._queue.raise_error()
        if self._loop is not (loop := asyncio.get_running_loop()):
            if was_begun:
                self._subscribe_again()
            self._loop = loop
        if self._feed is not None:
            return self._feed
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="open a Dynamoth PubSub")
            self._opening.add_done_callback(retrieve)
        task = self._opening
        await asyncio.wait({task})
        if task.cancelled():
            raise redis.exceptions.ConnectionError("the PubSub was closed while it was being opened")
        return task.result()

    async def _open(self) -> Feed:
        wants_gaps = self._gaps or self._on_gap is not None
        try:
            self._feed = await self._cluster.open_feed(
                self._queue, wants_gaps=wants_gaps, when_full=self._when_full, numbered=self._numbered
            )
        except Exception as error:
            if self._before is not None:  # subscriptions stay; the next use tries again, and readers at once
                self._opening = self._loop = None
                self._queue.close(ClientClosed())
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
        """Subscribe again, as the client was closed and this PubSub is used again."""
        if self._feed is not None:
            self._before = self._feed, CLIENT_CLOSED
        self._feed = self._loop = None
        self._queue.reopen()

    def _subscribe_again(self) -> None:
        """Subscribe again to everything.

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
            self._requests.append(lambda feed: feed.resume_from(before, reason))
        for commands in COMMANDS:
            for command, names in zip(commands, self._registry(commands[0]), strict=True):
                if names:
                    request = methodcaller("request", command, [self._encode(name) for name in names])
                    self._requests.append(request)

    def _forget(self) -> None:
        """Forget all subscriptions."""
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

    # Names.

    def _registry(self, command: str) -> _Registry:
        """Return the names that a command to subscribe or to unsubscribe is about, with their handlers."""
        if command.startswith("p"):
            return self.patterns, self.pending_unsubscribe_patterns
        if command in ("ssubscribe", "sunsubscribe"):
            return self.shard_channels, self.pending_unsubscribe_shard_channels
        return self.channels, self.pending_unsubscribe_channels

    def _begin(self, command: str, args: tuple[Any, ...], kwargs: Mapping[str, Handler]) -> list[bytes]:
        """Note subscriptions, by the names that the application sees; return the encoded names.

        Raises ``redis.exceptions.ResponseError`` if there are none, and DataError for one that cannot be subscribed to.
        """
        wanted = with_handlers(args, kwargs)
        if not wanted:
            what = "pattern" if command == "psubscribe" else "channel"
            raise redis.exceptions.ResponseError(f"wrong number of arguments for '{command}' command: name a {what}")
        encoded = [self._encode(name) for name in wanted]
        for name in encoded:
            if command == "subscribe":
                refuse_unroutable(name, self._family)
            elif command == "psubscribe":
                refuse_unroutable_pattern(name, self._family)
        subscribed, pending = self._registry(command)
        named = dict(zip(map(self._name, encoded), wanted.values(), strict=True))
        subscribed.update(named)
        pending.difference_update(named)
        return encoded

    def _end(self, command: str, args: tuple[Any, ...]) -> list[bytes]:
        """Note unsubscriptions, of the given names, else of all that are not pending; return the encoded names."""
        subscribed, pending = self._registry(command)
        names = flat(args) if args else [name for name in subscribed if name not in pending]
        encoded = [self._encode(name) for name in names]
        pending.update(self._name(name) for name in encoded)
        return encoded

    def _encode(self, value: Any) -> bytes:
        return bytes(self._encoder.encode(value))

    def _name(self, value: bytes) -> Any:
        """Return a name, or a payload, as the application sees it."""
        return self._encoder.decode(value)
