"""The broker's own subscriptions: one PubSub of the drop-in client, however many users there are.

Hands what comes to the broker's machine as events, in order, and carries out its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import redis.exceptions

from dynamoth_broker.events import (
    BarrierPassed,
    ChannelConfirmed,
    ChannelEnded,
    ChannelFailed,
    ChannelGap,
    MessagePublished,
    Publications,
)
from dynamoth_client.asyncio import PubSub, Redis

RETRY_S = 1.0
"""Subscriptions that failed because no server gave a plan are asked for again after this time."""

PAUSE_S = 0.1
"""After an error the broker reads on after this time: a client that has broken down raises one without waiting."""

ERRORS_MAX = 100
AT_ONCE_S = 0.1
"""After that many errors in a row, each within this time, the client is broken for good: the broker would be deaf."""

Handle = Callable[[Any], None]


class Subscriptions:
    """Subscribes, publishes and listens for one broker.

    Args:
        client: of the cluster; closed by the owner.
        handle: gets the events for the machine.
        report: gets errors, for the log; None when there is none any more.

    """

    def __init__(self, client: Redis, handle: Handle, report: Callable[[str | None], None]) -> None:
        self._client = client
        self._handle = handle
        self._report = report
        self._pubsub: PubSub = client.pubsub(numbered=True, gaps=True)
        self._wanted: dict[bytes, None] = {}
        #: Those of them for which the client has sent SUBSCRIBE.
        self._asked: set[bytes] = set()
        self._has_some = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = asyncio.create_task(self._listen(), name="listen for the broker")
        #: Why the cluster cannot be reached; None while it can.
        self.fault: str | None = None

    @property
    def listening(self) -> asyncio.Task[None]:
        """The task that listens; it ends only with ``close`` or a bug."""
        return self._listening

    def subscribe(self, channel: bytes) -> None:
        """Subscribe; ``ChannelConfirmed`` or ``ChannelFailed`` follows."""
        self._wanted[channel] = None
        self._start(self._subscribe(channel))

    def unsubscribe(self, channel: bytes) -> None:
        """End a subscription; ``ChannelEnded`` follows."""
        self._wanted.pop(channel, None)
        self._asked.discard(channel)
        self._start(self._unsubscribe(channel))

    def raise_barrier(self, channel: bytes) -> None:
        """Have ``BarrierPassed`` follow what was published on a channel."""
        if channel in self._pubsub.channels:
            self._pubsub.barrier(channel)
        else:
            self._handle(BarrierPassed(channel))

    def publish(self, channel: bytes, payload: bytes, token: object) -> None:
        """Publish; ``MessagePublished`` follows if ``token`` is not None."""
        self._start(self._publish(channel, payload, token))

    async def close(self) -> None:
        """End everything."""
        tasks = [self._listening, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pubsub.aclose()

    def _start(self, work: Any) -> None:
        """Begin a request; requests begin in the order in which they were made."""
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(f"a request to the cluster has failed: {error!r}")

    async def _subscribe(self, channel: bytes) -> None:
        while channel in self._wanted:
            try:
                await self._pubsub.subscribe(channel)
            except redis.exceptions.ConnectionError as error:
                self._note(str(error))
                await asyncio.sleep(RETRY_S)
                continue
            except redis.exceptions.RedisError as error:
                self._wanted.pop(channel, None)
                self._handle(ChannelFailed(channel, str(error)))
                return
            self._has_some.set()
            if channel in self._wanted:
                self._asked.add(channel)
                if channel not in self._pubsub.channels:  # it was refused meanwhile
                    self._on_refused("a Redis server has refused it")
            return

    async def _unsubscribe(self, channel: bytes) -> None:
        if channel in self._pubsub.channels:
            await self._pubsub.unsubscribe(channel)
        else:
            self._handle(ChannelEnded(channel))

    async def _publish(self, channel: bytes, payload: bytes, token: object) -> None:
        reason: str | None = None
        try:
            await self._client.publish(channel, payload)
        except redis.exceptions.RedisError as error:
            reason = str(error)
        if token is not None:
            self._handle(MessagePublished(token, reason))
        elif reason is not None:
            self._report(
                f"a logged publication is stored, and was not published; it is found at the next tip check: {reason}"
            )

    async def _listen(self) -> None:
        """Forward messages to the machine until ``close``.

        Raises:
            RuntimeError: the client has broken down for good.

        """
        loop = asyncio.get_running_loop()
        errors = 0
        while True:
            await self._has_some.wait()
            began_at = loop.time()
            try:
                async for batch in self._pubsub.batches():
                    self._take(batch)
                    errors = 0
                self._has_some.clear()
            except redis.exceptions.NoPermissionError as error:
                self._on_refused(str(error))
            except redis.exceptions.RedisError as error:
                self._note(str(error))
                errors = errors + 1 if loop.time() - began_at < AT_ONCE_S else 0
                if errors == ERRORS_MAX:
                    raise RuntimeError(f"the client of the cluster has broken down: {error}") from error
                await asyncio.sleep(PAUSE_S)

    def _take(self, batch: list[dict[str, Any]]) -> None:
        self._note(None)
        messages: list[tuple[bytes, bytes]] = []
        for each in batch:
            kind = each["type"]
            if kind == "message":
                messages.append((each["channel"], each["data"]))
                continue
            if messages:
                self._handle(Publications(messages))
                messages = []
            channel = each["channel"]
            if kind == "subscribe":
                self._handle(ChannelConfirmed(channel))
            elif kind == "unsubscribe":
                self._handle(ChannelEnded(channel))
            elif kind == "gap":
                gap = each["data"]
                self._handle(ChannelGap(channel, gap.count, gap.reason))
            elif kind == "barrier":
                self._handle(BarrierPassed(channel))
        if messages:
            self._handle(Publications(messages))

    def _on_refused(self, reason: str) -> None:
        """Find out which subscriptions Redis has refused: the client does not have them any more."""
        for channel in [channel for channel in self._asked if channel not in self._pubsub.channels]:
            self._wanted.pop(channel, None)
            self._asked.discard(channel)
            self._handle(ChannelFailed(channel, reason))

    def _note(self, fault: str | None) -> None:
        if fault != self.fault:
            self.fault = fault
            self._report(fault)
