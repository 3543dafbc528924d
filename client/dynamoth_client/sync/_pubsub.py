"""redis-py's synchronous ``PubSub`` over many servers: the asynchronous one, read by threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import redis
import redis.client
import redis.exceptions

from dynamoth_client.redis_py.errors import ClientClosed
from dynamoth_client.redis_py.subscribe_arguments import method_of
from dynamoth_client.runtime.cluster import Cluster
from dynamoth_client.runtime.feed import Feed
from dynamoth_client.runtime.queue import MAX_QUEUE, Failure, Item, Notice, WhenFull
from dynamoth_client.runtime.reader import Reader
from dynamoth_client.runtime.subscriptions import COMMANDS, NOT_CONNECTED, GapHandler, Handler
from dynamoth_client.threads.cluster import SyncCluster

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Subscription:
    """A channel or a pattern with its handler, as redis-py's ``Subscription``."""

    name: Any
    handler: Handler | None


_Inherited = dict[str, dict[Any, Handler | None]]
"""Subscriptions of the parent of a forked child, with their handlers, by the commands to subscribe."""


class _Inner(Reader):
    """The asynchronous half of a PubSub. A thread takes its items, and calls handlers and ``on_gap``."""

    _family = "redis"

    def __init__(self, *args: Any, call_soon: Callable[[Callable[[], object]], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._call_soon = call_soon

    @property
    def cluster(self) -> Cluster:
        """The cluster that its feeds are of."""
        return self._cluster

    def _make_room(self) -> None:
        """Fill the queue again. That begins to read from sockets, which is for the event loop to do."""
        self._call_soon(self._queue.relieve)

    async def until_item(self, timeout: float | None) -> None:
        """Wait until there is an item, or ``timeout`` seconds are over (None: never), or nothing is subscribed to.

        Raises as ``get_message``, when there is no item and none will come; ClientClosed when the client is closed.
        """
        queue = self._queue
        queue.settle()
        queue.relieve()  # it may have become full when its last item had just been taken
        if self._is_begun and (self.subscribed or queue.is_closed):
            await self._wait(timeout)

    def heritage(self) -> _Inherited:
        """Return the subscriptions that a forked child takes over: those whose end was not requested."""
        registries = {subscribe: self._registry(subscribe) for subscribe, _ in COMMANDS}
        return {
            command: {name: handler for name, handler in subscribed.items() if name not in pending}
            for command, (subscribed, pending) in registries.items()
        }

    def inherit(self, inherited: _Inherited) -> None:
        """Note subscriptions that will be made soon."""
        for command, names in inherited.items():
            self._registry(command)[0].update(names)


class Connection:
    """Stands for all connections of a PubSub, with the attributes of redis-py's that applications use."""

    def __init__(self, feed: Feed, cluster: SyncCluster) -> None:
        self._feed = feed
        self._cluster = cluster

    @property
    def is_connected(self) -> bool:
        """False after ``disconnect`` until a connection is made again, and after the end of the subscriptions."""
        return self._feed.is_connected

    def disconnect(self, *args: Any) -> None:
        """Cut all connections; they are made again at once, and every subscription is acknowledged again.

        Arguments are those of redis-py: without a meaning here.
        """
        if self._cluster.is_open:
            self._cluster.call(self._feed.disconnect)

    def register_connect_callback(self, callback: Any) -> None:
        """Do nothing: ``callback`` is never called, as subscriptions are restored without it."""

    def deregister_connect_callback(self, callback: Any) -> None:
        """Do nothing, as ``register_connect_callback``."""


def _of_inner(name: str) -> Any:
    """Return the property of a PubSub that is an attribute of its asynchronous half; it can be set, as redis-py's."""
    return property(lambda self: getattr(self._inner, name), lambda self, value: setattr(self._inner, name, value))


class PubSub(redis.client.PubSub):
    """Subscriptions, read with redis-py's methods; the servers and the moves of channels between them do not show.

    The promises, the arguments and the differences from redis-py are those of :class:`dynamoth_client.asyncio.PubSub`.
    The thread that reads calls ``on_gap`` and handlers.

    One thread may read at a time; any thread may subscribe, unsubscribe and ``close`` meanwhile. ``close`` lets a
    thread that waits in ``get_message`` or ``listen`` return. In a forked child a PubSub subscribes again to all that
    it was subscribed to, when it is used there first; the parent's goes on.
    """

    health_check_response_counter = 0
    """Always: links check themselves."""

    def __init__(
        self,
        connection_pool: redis.ConnectionPool,
        cluster: SyncCluster,
        *,
        on_gap: GapHandler | None = None,
        gaps: bool = False,
        max_queue: int = MAX_QUEUE,
        when_full: WhenFull = "block",
        push_handler_func: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(connection_pool, **kwargs)  # pyright: ignore[reportUnknownMemberType]  # redis-py is typed in part
        self._cluster = cluster
        self._on_gap = on_gap
        self._gaps = gaps
        pool = cast("Any", connection_pool)  # kept by it, and not used
        encoder = cast("Any", self).encoder
        self._make_inner: Callable[[], _Inner] = lambda: _Inner(
            pool,
            cluster.cluster,
            gaps=gaps or on_gap is not None,
            max_queue=max_queue,
            when_full=when_full,
            push_handler_func=push_handler_func,
            encoder=encoder,
            call_soon=cluster.call_soon,
        )
        self._inner = self._make_inner()
        #: What to subscribe to again in a forked child, until that has been done.
        self._inherited: _Inherited | None = None
        cluster.followers.add(self)

    def __del__(self) -> None:
        """Leave it to the asynchronous PubSub, which goes with this one, to end its feed."""

    def __enter__(self) -> Self:
        """Return this; the end of the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    # What redis-py has as attributes.

    channels: dict[Any, Any] = _of_inner("channels")
    """The channels that are subscribed to, confirmed or not, with their handlers."""
    patterns: dict[Any, Any] = _of_inner("patterns")
    """The patterns that are subscribed to, confirmed or not, with their handlers."""
    shard_channels: dict[Any, Any] = _of_inner("shard_channels")
    """The sharded channels that are subscribed to, confirmed or not, with their handlers."""
    pending_unsubscribe_channels: set[Any] = _of_inner("pending_unsubscribe_channels")
    """Channels whose unsubscription has been asked for, and not been read."""
    pending_unsubscribe_patterns: set[Any] = _of_inner("pending_unsubscribe_patterns")
    """Patterns whose unsubscription has been asked for, and not been read."""
    pending_unsubscribe_shard_channels: set[Any] = _of_inner("pending_unsubscribe_shard_channels")
    """Sharded channels whose unsubscription has been asked for, and not been read."""

    @property
    def subscribed(self) -> bool:
        """Whether there are subscriptions, confirmed or not."""
        return self._inner.subscribed

    @property
    def gaps_detected(self) -> int:
        """How many gaps there have been since the last ``close``."""
        return self._inner.gaps_detected

    @property
    def connection(self) -> Any:
        """A :class:`Connection`, or None before the first subscription."""
        feed = self._inner.connection
        return None if feed is None else Connection(feed, self._cluster)

    @connection.setter
    def connection(self, value: None) -> None:
        """Ignore what redis-py's constructor sets."""

    # The life of a PubSub.

    def reset(self) -> None:
        """End all subscriptions; what has not been read is dropped. The PubSub can be used again."""
        if "_inner" not in self.__dict__:  # redis-py's constructor
            return
        self._inherited = None
        try:
            if self._cluster.is_open:
                self._cluster.call(self._inner.aclose)
            else:  # what there was has ended
                self._inner = self._make_inner()
        except redis.exceptions.ConnectionError:  # the client is being closed
            self._inner = self._make_inner()
        self.subscribed_event.clear()

    def close(self) -> None:
        """End all subscriptions, as ``reset``."""
        self.reset()

    def connect(self) -> None:
        """Get ready: read the plan, if this client has not. Raises ``redis.exceptions.ConnectionError``."""
        self._call(self._inner.connect)

    def fork(self) -> None:
        """Begin again in a forked child."""
        inner, self._inner = self._inner, self._make_inner()
        self.subscribed_event = threading.Event()
        self._lock = threading.RLock()
        inherited = inner.heritage()
        self._inner.inherit(inherited)
        if self._inner.subscribed:
            self._inherited = inherited

    # Subscribing.

    def subscribe(self, *args: Any, **kwargs: Handler) -> None:
        """Subscribe to channels: names, or names as keywords with a handler that is called with each message.

        Returns when all are confirmed, and raises, as :meth:`dynamoth_client.asyncio.PubSub.subscribe`.
        """
        self._call(self._inner.subscribe, *args, **kwargs)

    def psubscribe(self, *args: Any, **kwargs: Handler) -> None:
        """Subscribe to patterns, as ``subscribe`` to channels."""
        self._call(self._inner.psubscribe, *args, **kwargs)

    def ssubscribe(self, *args: Any, target_node: Any = None, **kwargs: Handler) -> None:
        """Subscribe to sharded channels, which have names of their own, as ``subscribe`` does to channels."""
        self._call(self._inner.ssubscribe, *args, **kwargs)

    def unsubscribe(self, *args: Any) -> None:
        """Unsubscribe from channels, or from all; confirmed by messages of type ``unsubscribe``."""
        self._call(self._inner.unsubscribe, *args)

    def punsubscribe(self, *args: Any) -> None:
        """Unsubscribe from patterns, or from all; confirmed by messages of type ``punsubscribe``."""
        self._call(self._inner.punsubscribe, *args)

    def sunsubscribe(self, *args: Any, target_node: Any = None) -> None:
        """Unsubscribe from sharded channels, or from all; confirmed by messages of type ``sunsubscribe``."""
        self._call(self._inner.sunsubscribe, *args)

    def ping(self, message: Any = None) -> bool:
        """Ask a server for a sign of life; its answer is a message of type ``pong``.

        Raises ``redis.exceptions.ConnectionError`` when no server is there.
        """
        return bool(self._call(self._inner.ping, message))

    def check_health(self) -> None:
        """Do nothing: links check themselves. Raises RuntimeError before ``connect`` or the first subscription."""
        if self.connection is None:
            raise RuntimeError(NOT_CONNECTED)

    def clean_health_check_responses(self) -> None:
        """Do nothing: the answers of links to their checks never come here."""

    def execute_command(self, *args: Any) -> Any:
        """Execute a command of subscriptions. Raises ``redis.exceptions.PubSubError`` for any other."""
        return getattr(self, method_of(args[0]))(*args[1:])

    # Reading.

    def get_message(
        self, ignore_subscribe_messages: bool = False, timeout: float | None = 0.0
    ) -> dict[str, Any] | None:
        """Return the next message, or None when there is none within ``timeout`` seconds (None: wait without end).

        None also means that a handler took the message, or that it was to be ignored. Before the first subscription
        this waits for one.

        Raises:
            redis.exceptions.ConnectionError: no server can be reached, see the class; or the client was closed.

        """
        if not self._inner.subscribed:
            began_at = time.monotonic()
            if not self.subscribed_event.wait(timeout):
                return None
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - began_at))
        item = self._inner.pop()
        if item is None:
            self._wait(timeout)
            item = self._inner.pop()
        return self._read(item, ignored=ignore_subscribe_messages)

    get_sharded_message = get_message

    def listen(self) -> Generator[dict[str, Any], None, None]:
        """Yield messages until the last channel's unsubscription has been read. Raises as ``get_message``."""
        while (inner := self._inner).subscribed:
            item = inner.pop()
            if item is None:
                self._wait(None)
            elif type(item) is tuple:  # nearly always: as ``_read``, at less cost
                message, handler = inner.shown(item)
                if handler is None:
                    yield message
                else:
                    handler(message)
            elif (shown := self._read(item, ignored=False)) is not None:
                yield shown

    def batches(self) -> Generator[list[dict[str, Any]], None, None]:
        """Yield messages as ``listen``, in lists of those that have come: at least one, ``TURN_ITEMS_MAX`` at most.

        A handler is called, and an error raised, when all messages before it have been yielded.
        """
        while (inner := self._inner).subscribed:
            if batch := inner.take_batch():
                yield batch
            elif (item := inner.pop()) is None:
                self._wait(None)
            elif (message := self._read(item, ignored=False)) is not None:
                yield [message]

    def run(
        self, *, exception_handler: Callable[[BaseException, PubSub], object] | None = None, poll_timeout: float = 1.0
    ) -> None:
        """Call the handlers until the last channel's unsubscription has been read, or ``close``.

        As the asynchronous PubSub's: every channel needs a handler (``redis.exceptions.PubSubError``), and an error
        goes to ``exception_handler`` if there is one.
        """
        for name, handler in [*self.channels.items(), *self.patterns.items(), *self.shard_channels.items()]:
            if handler is None:
                raise redis.exceptions.PubSubError(f"{name!r} has no handler registered")
        while self.subscribed:
            try:
                self.get_message(ignore_subscribe_messages=True, timeout=poll_timeout)
            except Exception as error:
                if exception_handler is None:
                    raise
                exception_handler(error, self)

    def parse_response(self, block: bool = True, timeout: float = 0) -> Any:
        """Return the next message as the list that Redis sends; None when there is none within ``timeout``."""
        ends_at = time.monotonic() + timeout

        def parse(inner: _Inner) -> Coroutine[Any, Any, Any]:
            return self._request(inner.parse_response, (block, max(0.0, ends_at - time.monotonic())), {})

        return self._go_on(parse)

    def _wait(self, timeout: float | None) -> None:
        """Wait until there is an item, or ``timeout`` is over; the machines go on meanwhile."""
        ends_at = None if timeout is None else time.monotonic() + timeout
        self._go_on(lambda inner: inner.until_item(None if ends_at is None else max(0.0, ends_at - time.monotonic())))

    def _go_on(self, function: Callable[[_Inner], Coroutine[Any, Any, _T]]) -> _T | None:
        """Run a function of the asynchronous half, again each time the client is closed meanwhile.

        None when this PubSub is closed meanwhile.
        """
        if self._inherited is not None:
            self._subscribe_again()
        inner = self._inner
        while inner is self._inner:
            try:
                return self._cluster.call(function, inner)
            except ClientClosed:
                if not self._cluster.goes_on(inner.cluster):
                    raise
        return None

    def _read(self, item: Item | None, *, ignored: bool) -> dict[str, Any] | None:
        """Return what the application is to see of an item, unless there is none or a handler takes it."""
        if item is None:
            return None
        if not isinstance(item, (Notice, Failure)):
            message, handler = self._inner.shown(item)
            if handler is None:
                return message
            handler(message)
            return None
        ignored = ignored or self.ignore_subscribe_messages
        noted = self._go_on(lambda inner: self._note(inner, item, ignored))
        if noted is None or noted["type"] != "gap":
            return noted
        if self._on_gap is not None:
            self._on_gap(noted["data"])
        return noted if self._gaps else None

    async def _note(self, inner: _Inner, item: Notice | Failure, ignored: bool) -> dict[str, Any] | None:
        try:
            return inner.note(item, ignored=ignored)
        finally:
            if not self._inner.subscribed:
                self.subscribed_event.clear()

    # Requests.

    def _call(self, function: Callable[..., Awaitable[_T]], *args: Any, **kwargs: Any) -> _T:
        if self._inherited is not None:
            self._subscribe_again()
        return cast("_T", self._cluster.call(self._request, function, args, kwargs))

    async def _request(
        self, function: Callable[..., Awaitable[_T]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _T:
        try:
            return await function(*args, **kwargs)
        finally:
            if self._inner.subscribed:
                self.subscribed_event.set()

    def _subscribe_again(self) -> None:
        """Subscribe to what the parent process had subscribed to. When it fails, the next use tries again."""
        assert self._inherited is not None, "asked for in a forked child only"
        inherited, self._inherited = self._inherited, None
        inner = self._inner
        try:
            for command, names in inherited.items():
                if names:
                    self._call(getattr(inner, command), *(_Subscription(*each) for each in names.items()))
        except BaseException:
            self._inner.inherit(inherited)
            self._inherited = inherited
            raise
