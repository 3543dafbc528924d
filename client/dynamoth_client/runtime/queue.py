"""The queue of messages that the application has not read: bounded, first in, first out, with waiters."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import redis.exceptions

from dynamoth_client.machines.patterns.events import PatternMessage

MAX_QUEUE = 65_536
"""Default bound. At some 200 bytes per short message this is about 13 MB, and half a second of a fast reader's work."""


@dataclass(frozen=True, slots=True)
class GapInfo:
    """Messages of a channel were lost, or may have been. ``docs/guarantees.md`` says when (G5).

    ``channel`` is decoded as messages are; it is the pattern where messages of any channel that matches may be missing.
    ``pattern`` is the pattern that the gap is of, None for a channel that was subscribed to by name. ``publisher`` is
    the 64-bit id of the client whose messages are missing, None for any. ``count`` is how many, None for unknown, 0
    included. ``reason`` is for people. ``sharded`` tells that the channel is a sharded one.
    """

    channel: bytes | str
    publisher: int | None
    count: int | None
    reason: str
    pattern: bytes | str | None = None
    sharded: bool = False


@dataclass(slots=True)
class ShardedMessage:
    """A message of a sharded channel, by the application's name of it."""

    channel: bytes
    payload: bytes


@dataclass(slots=True)
class Notice:
    """Anything in the queue that is neither a message nor an error. ``kind`` is redis-py's ``type``.

    ``channel`` is the pattern where it is about one, and None for a pong and for the acknowledgement of an UNSUBSCRIBE
    that had nothing to end.
    """

    kind: str
    channel: bytes | None
    data: int | bytes | GapInfo
    is_read: bool = False


@dataclass(slots=True)
class Failure:
    """An error for the next reader. ``channel``, or the pattern, is that of a subscription that is gone, if any.

    ``command`` is what had begun the subscription, such as ``psubscribe``.
    """

    error: redis.exceptions.RedisError
    channel: bytes | None = None
    command: str = "subscribe"


Dropped = tuple[bytes, bytes | None, bool]
"""A subscription with dropped messages: its channel or pattern, the pattern or None, whether it is sharded. One
for all channels of a pattern: there is no bound to these."""

Message = tuple[bytes, bytes] | PatternMessage | ShardedMessage
"""A plain pair is a message of a channel: channel and payload."""

Item = Message | Notice | Failure


WhenFull = Literal["block", "drop_oldest", "disconnect"]
"""How messages for a full queue are treated: they wait (see ``backpressure.py``), or the oldest are dropped, or the
PubSub ends, with an error behind them."""

WHEN_FULL: tuple[WhenFull, ...] = get_args(WhenFull)

DROPPED_RATIO = 4
"""This part of the messages of a full queue is dropped (a quarter), in addition to those above the bound."""


class MessageQueue:
    """The queue of one PubSub.

    At ``bound`` messages ``on_full`` is called, once, and at half of it ``on_room``. In between the owner decides about
    more messages (``Blocking``), or makes room at once by ``drop_oldest``. Notices and errors do not count: the
    application has asked for them, or they are few.
    """

    __slots__ = (
        "_behind",
        "_first",
        "_on_full",
        "_on_room",
        "_waiters",
        "bound",
        "error",
        "is_closed",
        "is_full",
        "items",
        "limit",
    )

    def __init__(self, bound: int) -> None:
        """Make an empty queue. Raises ``redis.exceptions.DataError`` for a bound below 1."""
        if bound < 1:
            raise redis.exceptions.DataError(f"max_queue must be at least 1, not {bound}")
        self.bound = bound
        #: Oldest first. Readers pop from the left and then call ``relieve`` while ``is_full``, and ``has_read``
        #: for a notice or an error. Code that adds messages here directly calls ``on_grown``.
        self.items: deque[Item] = deque()
        #: How many items make it full: ``bound``, and the notices and errors.
        self.limit = bound
        #: Notices and errors whose neighbouring messages were dropped: the first one is in ``items``, or is being
        #: read; those behind it wait here, so that they are not moved again each time. None behind without a first.
        self._first: Notice | Failure | None = None
        self._behind: deque[Notice | Failure] = deque()
        #: Between ``on_full`` and ``on_room``.
        self.is_full = False
        #: Nothing comes any more; readers that wait get ``error``, if there is one.
        self.is_closed = False
        self.error: redis.exceptions.RedisError | None = None
        #: Futures of those who wait, and of some who were cancelled since the latest item.
        self._waiters: list[asyncio.Future[None]] = []
        self._on_full: Callable[[], None] = _nothing
        self._on_room: Callable[[], None] = _nothing

    def watch(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Set the callbacks for a full queue and for room."""
        self._on_full = on_full
        self._on_room = on_room

    @property
    def notices(self) -> int:
        """How many notices and errors have not been read."""
        return self.limit - self.bound + len(self._behind)

    def put(self, item: Notice | Failure) -> None:
        """Add one item that is no message."""
        self.items.append(item)
        self.limit += 1
        self.wake()

    def extend(self, messages: Iterable[Message]) -> None:
        """Add messages, in their order."""
        self.items.extend(messages)
        self.on_grown()

    def on_grown(self) -> None:
        """Wake readers and apply the bound after ``items`` may have grown."""
        if self._waiters and self.items:
            self.wake()
        if len(self.items) >= self.limit and not self.is_full:
            self.is_full = True
            self._on_full()

    def has_read(self, item: Notice | Failure) -> None:
        """Count a notice or an error that a reader has popped from ``items``."""
        if self.limit > self.bound:  # else it was of a queue that this one has replaced
            self.limit -= 1
        if item is self._first:
            self._next()

    def drop_oldest(self) -> Counter[Dropped]:
        """Make room in a full queue by dropping the oldest messages; return how many of each subscription.

        All else stays, in its order.
        """
        items = self.items
        dropped: Counter[Dropped] = Counter()
        kept: Notice | Failure | None = None
        number = len(items) - self.limit + max(1, self.bound // DROPPED_RATIO)
        while number > 0 and items:
            item = items.popleft()
            if isinstance(item, (Notice, Failure)):
                if self._first is None or item is self._first:
                    self._first = kept = item
                else:
                    self._behind.append(item)
                    self.limit -= 1
                continue
            number -= 1
            dropped[subject_of(item)] += 1
        if kept is not None:
            items.appendleft(kept)
        self.is_full = False
        return dropped

    def put_dropped(self, item: Notice) -> None:
        """Add one item where ``drop_oldest`` has just dropped messages: before all others."""
        self._behind.append(item)
        if self._first is None:
            self._next()
        self.wake()

    def _next(self) -> None:
        """Move the next notice that waits behind the first one into ``items``."""
        self._first = self._behind.popleft() if self._behind else None
        if self._first is not None:
            self.items.appendleft(self._first)
            self.limit += 1

    def relieve(self) -> None:
        """Call ``on_room`` when half of the room is free."""
        if self.is_full and len(self.items) <= self.half:
            self.is_full = False
            self._on_room()

    @property
    def half(self) -> int:
        """At how many items half of the room is free."""
        return self.limit - self.bound + self.bound // 2

    def settle(self) -> None:
        """Correct the counts after a reader was interrupted between popping an item and ``has_read``."""
        if not self.items:
            self.limit = self.bound
            self._next()

    def close(self, error: redis.exceptions.RedisError | None) -> None:
        """End: readers that wait get ``error``, or learn that nothing comes."""
        self.is_closed = True
        self.error = error
        self.wake()

    def reopen(self) -> None:
        """Undo ``close``: the queue can be filled again."""
        self.is_closed = False
        self.error = None

    def forget_waiters(self) -> None:
        """Forget the waiters, as their event loop is gone."""
        self._waiters.clear()

    def wake(self) -> None:
        """Wake all waiters."""
        for waiter in self._waiters:
            _release(waiter)
        self._waiters.clear()

    def wakeup(self) -> asyncio.Future[None]:
        """Return a future that is done when an item has come, or the end."""
        if self._waiters:
            self._waiters = [waiter for waiter in self._waiters if not waiter.done()]
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    async def until_item(self, timeout_s: float | None) -> bool:
        """Wait until there is an item; False when none comes within ``timeout_s``, or ever. None: wait without end.

        What has come to sockets is read even if ``timeout_s`` is 0. Raises the error that ``close`` was given, when
        there is no item.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None or timeout_s == math.inf else loop.time() + timeout_s
        while not self.items:
            if self.is_closed:
                self.raise_error()
                return False
            if until is not None and loop.time() >= until:
                await asyncio.sleep(0)
                return bool(self.items)
            waiter = self.wakeup()
            timer = None if until is None else loop.call_at(until, _release, waiter)
            try:
                await waiter
            finally:
                if timer is not None:
                    timer.cancel()
        return True

    def raise_error(self) -> None:
        """Raise the error that ``close`` was given, if any: a new one each time, as each has a traceback of its own."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)


def subject_of(message: Message) -> Dropped:
    """Return the subscription that a message is for."""
    if isinstance(message, tuple):
        return message[0], None, False
    if isinstance(message, ShardedMessage):
        return message.channel, None, True
    return message.pattern, message.pattern, False


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _nothing() -> None:
    """Do nothing, before ``watch``."""
