"""What waits for the application to read it: bounded, first in, first out, with waiters."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import redis.exceptions

from dynamoth_client.pattern_subscription import PatternMessage

MAX_QUEUE = 65_536
"""Default bound. At some 200 bytes per short message this is about 13 MB, and half a second of a fast reader's work."""


@dataclass(frozen=True, slots=True)
class GapInfo:
    """Messages of a channel were lost, or may have been (see the README's guarantees; Dynamoth has no silent loss).

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
    """An error for whoever reads next. ``channel``, or the pattern, is that of a subscription that is gone, if any."""

    error: redis.exceptions.RedisError
    channel: bytes | None = None
    is_pattern: bool = False
    is_sharded: bool = False


Dropped = tuple[bytes, bytes | None, bool]
"""A channel, or the pattern that its messages came for, that pattern, if any, and whether it is a sharded channel. One
for all channels of a pattern: there is no bound to these."""

Item = tuple[bytes, bytes] | PatternMessage | ShardedMessage | Notice | Failure
"""A plain pair is a message of a channel: channel and payload."""


WhenFull = Literal["block", "drop_oldest", "disconnect"]
"""What becomes of a PubSub whose queue is full: its servers are not read from until there is room; its oldest messages
are dropped; or it ends, with an error behind what it has."""

WHEN_FULL: tuple[WhenFull, ...] = get_args(WhenFull)

DROPPED_RATIO = 4
"""One in so many of the items of a full queue is dropped, besides those that are too many: it costs a look at each."""


class MessageQueue:
    """The queue of one PubSub.

    Past ``bound`` items ``on_full`` is called, once, and at half of it ``on_room``. The owner stops reading from
    servers in between, or makes room by ``drop_oldest``, so that the queue exceeds its bound by what one read per
    server has brought at most.
    """

    __slots__ = ("_on_full", "_on_room", "_waiters", "bound", "error", "is_closed", "is_full", "items")

    def __init__(self, bound: int) -> None:
        """Make an empty queue. Raises ``redis.exceptions.DataError`` for a bound below 1."""
        if bound < 1:
            raise redis.exceptions.DataError(f"max_queue must be at least 1, not {bound}")
        self.bound = bound
        #: Oldest first. Readers take from the left themselves, and call ``relieve`` while ``is_full``; who fills it
        #: itself calls ``grown``.
        self.items: deque[Item] = deque()
        #: Between ``on_full`` and ``on_room``.
        self.is_full = False
        #: Nothing comes any more; readers that wait get ``error``, if there is one.
        self.is_closed = False
        self.error: redis.exceptions.RedisError | None = None
        #: Of those who wait, and of some who have been cancelled since the latest item.
        self._waiters: list[asyncio.Future[None]] = []
        self._on_full: Callable[[], None] = _nothing
        self._on_room: Callable[[], None] = _nothing

    def watch(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Set who is told of full and of room."""
        self._on_full = on_full
        self._on_room = on_room

    def put(self, item: Item) -> None:
        """Add one item."""
        self.extend((item,))

    def extend(self, items: Iterable[Item]) -> None:
        """Add items, in their order."""
        self.items.extend(items)
        self.grown()

    def grown(self) -> None:
        """Do what is due when ``items`` has got more, perhaps."""
        if self._waiters and self.items:
            self.wake()
        if len(self.items) >= self.bound and not self.is_full:
            self.is_full = True
            self._on_full()

    def drop_oldest(self) -> Counter[Dropped]:
        """Make room in a full queue by dropping the oldest messages; return how many of each subscription.

        All else stays, in its place.
        """
        items = self.items
        dropped: Counter[Dropped] = Counter()
        kept: list[Item] = []
        for _ in range(len(items) - self.bound + max(1, self.bound // DROPPED_RATIO)):
            item = items.popleft()
            if isinstance(item, tuple):
                dropped[item[0], None, False] += 1
            elif isinstance(item, ShardedMessage):
                dropped[item.channel, None, True] += 1
            elif isinstance(item, PatternMessage):
                dropped[item.pattern, item.pattern, False] += 1
            else:
                kept.append(item)
        items.extendleft(reversed(kept))
        self.is_full = False
        return dropped

    def put_first(self, item: Item) -> None:
        """Add one item before all others."""
        self.items.appendleft(item)
        self.wake()

    def relieve(self) -> None:
        """Let more come when half of the room is free."""
        if self.is_full and len(self.items) <= self.bound // 2:
            self.is_full = False
            self._on_room()

    def close(self, error: redis.exceptions.RedisError | None) -> None:
        """End: readers that wait get ``error``, or learn that nothing comes."""
        self.is_closed = True
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Let all who wait look again."""
        for waiter in self._waiters:
            _release(waiter)
        self._waiters.clear()

    def wakeup(self) -> asyncio.Future[None]:
        """Return a future that is done when it is worth looking again: an item has come, or the end."""
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


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _nothing() -> None:
    """Nobody is told."""
