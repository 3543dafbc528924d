"""``broadcaster``: ``Broadcast`` with two channels; the second is subscribed to while the first is listened to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from broadcaster import Broadcast

from tests.dependants.worker import Hear, Publish

CHANNELS = {"chat": "chat", "news": "news"}


@asynccontextmanager
async def listening(url: str, hear: Hear) -> AsyncGenerator[dict[str, str]]:
    async def consume(subscriber: Any) -> None:  # it is said to be no async iterable
        async for event in subscriber:
            hear(event.channel, int(event.message))

    async with Broadcast(url) as broadcast, AsyncExitStack() as stack:
        tasks: list[asyncio.Task[None]] = []
        for channel in CHANNELS.values():
            subscriber = await stack.enter_async_context(broadcast.subscribe(channel))
            tasks.append(asyncio.create_task(consume(subscriber)))
        yield CHANNELS
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def publishing(url: str, channels: dict[str, str]) -> AsyncGenerator[Publish]:
    async with Broadcast(url) as broadcast:

        async def publish(road: str, number: int) -> None:
            await broadcast.publish(channels[road], str(number))

        yield publish
