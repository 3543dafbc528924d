"""Django Channels: ``channels_redis.pubsub.RedisPubSubChannelLayer``, messages to one consumer and to a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from tests.dependants.worker import Hear, Publish

GROUP = "room"


@asynccontextmanager
async def listening(url: str, hear: Hear) -> AsyncGenerator[dict[str, str]]:
    layer = _layer(url)
    direct = await layer.new_channel()
    member = await layer.new_channel()
    await layer.group_add(GROUP, member)

    async def consume(channel: str) -> None:
        while True:
            message = await layer.receive(channel)
            hear(message["road"], message["number"])

    tasks = [asyncio.create_task(consume(channel)) for channel in (direct, member)]
    yield {"direct": direct, "group": f"asgi__group__{GROUP}"}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await layer.flush()


@asynccontextmanager
async def publishing(url: str, channels: dict[str, str]) -> AsyncGenerator[Publish]:
    layer = _layer(url)

    async def publish(road: str, number: int) -> None:
        message = {"type": "a.message", "road": road, "number": number}
        if road == "group":
            await layer.group_send(GROUP, message)
        else:
            await layer.send(channels[road], message)

    yield publish
    await layer.flush()


def _layer(url: str) -> Any:
    module: Any = import_module("channels_redis.pubsub")  # it has no types
    return module.RedisPubSubChannelLayer(hosts=[url])
