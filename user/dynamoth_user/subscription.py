"""A subscription as the application sees it: a queue of items, and what was handled of them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from types import TracebackType
from typing import Any, Literal, Protocol

from dynamoth.edge.interests import Interest
from dynamoth.edge.publications import Position
from dynamoth_user.errors import ClientFailed, RefusedError
from dynamoth_user.items import Gap, Item

QUEUE_ITEMS_MAX = 1000
"""Items of one subscription that wait for the application. With more, nothing is read from brokers."""

QUEUE_BYTES_MAX = 8 * 1024 * 1024
"""The same for the bytes of their payloads. What one message of a broker brings may exceed both bounds once."""

RESUME_RATIO = 0.5
"""Reading goes on when the queue is down to this part of both bounds."""

NORMAL = 1000
"""Close code of a regular end."""

Handler = Callable[[Item | Gap], Awaitable[object] | object]
"""Called with each item and gap of a subscription, one after the other; it may be asynchronous.

An item counts as handled when the call has ended without an error. Where it raises, the position stays before that item
until a later one is handled.
"""

Since = Position | Literal["new"] | None
"""Where a subscription begins. None: behind what was handled, as the storage knows it; without that, from now on."""

_log = logging.getLogger("dynamoth_user")


class SubscriptionOwner(Protocol):
    """What a subscription needs of its client."""

    def set_full(self, subscription: Subscription, *, is_full: bool) -> None:
        """Note whether the queue of a subscription is full."""
        ...

    def note_handled(self, subscription: Subscription, position: Position) -> None:
        """Note what the application has handled of a subscription."""
        ...

    def report_error(self, error: Exception) -> None:
        """Give an error to the application."""
        ...

    def remove(self, subscription: Subscription) -> None:
        """Unsubscribe."""
        ...


class Subscription:
    """One subscription, made by ``Client.subscribe``. Without a handler it is an iterator, for one task at a time.

    It iterates over :class:`Item` and :class:`Gap`. One counts as handled, so that its position is acknowledged and
    saved, when the next one is asked for, or when the task that has got it leaves ``async with`` of the subscription or
    of the client without an error. Iteration ends when the subscription or the client is closed. When a broker has
    ended either, it raises ``ClientFailed`` or ``RefusedError`` after the last item that came before.

    ``async with subscription:`` unsubscribes at its end.
    """

    def __init__(self, owner: SubscriptionOwner, interest: Interest, since: Position | None) -> None:
        """Begin without an item. For the client only."""
        self.interest = interest
        #: Where it began: `since`, or where the broker's delivery began; None for a channel without a log.
        self.position: Position | None = since
        #: Done when a broker has confirmed or refused it.
        self.confirmation: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._items: deque[Item | Gap] = deque()
        self._bytes = 0
        self._is_full = False
        self._waiter: asyncio.Future[None] | None = None
        #: The item that the application is at work with, and the task that has got it.
        self._taken: Item | Gap | None = None
        self._taken_by: asyncio.Task[object] | None = None
        self._is_ended = False
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    # The application's side.

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Item | Gap:
        if self._task is not None:
            raise RuntimeError("the items of this subscription go to its handler")
        if self._waiter is not None:
            raise RuntimeError("another task waits for the next item of this subscription")
        item = await self._next()
        if item is not None:
            return item
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def unsubscribe(self) -> None:
        """End the subscription: waiting items are dropped, the saved position is forgotten, a handler is cancelled."""
        self._owner.remove(self)
        await self.join()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(is_regular=kind is None)
        await self.unsubscribe()

    # The client's side.

    @property
    def is_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._is_ended

    def put(self, item: Item | Gap) -> None:
        """Queue an item."""
        if self._is_ended:
            return
        self._items.append(item)
        self._bytes += _size(item)
        if not self._is_full and (len(self._items) >= QUEUE_ITEMS_MAX or self._bytes >= QUEUE_BYTES_MAX):
            self._set_full(True)
        self._wake()

    def start(self, handler: Handler) -> None:
        """Begin to call a handler."""
        self._task = asyncio.create_task(self._serve(handler), name=f"dynamoth user: handler of {self.interest.name}")

    def end(self, error: Exception | None = None) -> None:
        """End the iteration: at once, or with ``error`` after the queued items."""
        if self._is_ended:
            return
        self._is_ended = True
        self._error = error
        if error is None:
            self._items.clear()
            self._bytes = 0
            self._taken = self._taken_by = None
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()
        self._set_full(False)
        if not self.confirmation.done():
            set_exception(self.confirmation, error or ClientFailed(NORMAL, "closed by the application"))
        self._wake()

    def leave(self, *, is_regular: bool) -> None:
        """Count the present item as handled if the present task has got it, or the one that has it is done with it."""
        task = self._taken_by
        if not is_regular or task is None:
            return
        if task is asyncio.current_task() or (task.done() and not task.cancelled() and task.exception() is None):
            self._mark_taken()

    async def join(self) -> None:
        """Wait until the handler has ended, unless it is the one that calls."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait((self._task,))

    # Inside.

    async def _next(self) -> Item | Gap | None:
        """Count the present item as handled, and return the next one; None at the end."""
        self._mark_taken()
        while not self._items:
            if self._is_ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        self._bytes -= _size(item)
        if (
            self._is_full
            and len(self._items) <= QUEUE_ITEMS_MAX * RESUME_RATIO
            and self._bytes <= QUEUE_BYTES_MAX * RESUME_RATIO
        ):
            self._set_full(False)
        self._taken, self._taken_by = item, asyncio.current_task()
        return item

    def _mark_taken(self) -> None:
        item, self._taken, self._taken_by = self._taken, None, None
        if item is not None and item.position is not None:
            self._owner.note_handled(self, item.position)

    async def _serve(self, handler: Handler) -> None:
        while (item := await self._next()) is not None:
            try:
                result = handler(item)
                if isawaitable(result):
                    await result
            except Exception as error:
                self._taken = None
                _log.exception("the handler of %s has failed", self.interest.name)
                self._owner.report_error(error)
        if isinstance(self._error, RefusedError):  # the client itself reports that it has failed
            self._owner.report_error(self._error)

    def _set_full(self, is_full: bool) -> None:
        self._is_full = is_full
        self._owner.set_full(self, is_full=is_full)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    """Set the exception of a future for which perhaps nobody waits any more."""
    future.set_exception(error)
    future.exception()  # else it is logged


def _size(item: Item | Gap) -> int:
    return len(item.data) if isinstance(item, Item) else 0
