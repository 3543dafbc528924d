"""python-socketio: a server with ``AsyncRedisManager`` and a browser's part; another process emits to its clients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from aiohttp import web

from tests.dependants.worker import Hear, Publish

socketio: Any = import_module("socketio")  # it has no types

CHANNEL = "socketio"
"""What python-socketio calls it by default."""

MANAGERS: dict[str, Callable[..., Any]] = {"asyncio": socketio.AsyncRedisManager, "sync": socketio.RedisManager}
"""What emits from outside of a server, by road."""


@asynccontextmanager
async def listening(url: str, hear: Hear) -> AsyncGenerator[dict[str, str]]:
    server: Any = socketio.AsyncServer(async_mode="aiohttp", client_manager=socketio.AsyncRedisManager(url))
    web_application = web.Application()
    server.attach(web_application)
    runner = web.AppRunner(web_application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with browsing(runner.addresses[0][1], "websocket", hear):
        yield dict.fromkeys(MANAGERS, CHANNEL)
    await server.shutdown()
    await runner.cleanup()


@asynccontextmanager
async def browsing(port: int, transport: str, hear: Hear) -> AsyncGenerator[None]:
    """Be a client of a server."""

    def on_number(data: dict[str, Any]) -> None:
        hear(data["road"], data["number"])

    browser: Any = socketio.AsyncClient(reconnection=False)  # with a new session it would miss what others hear
    browser.on("number", on_number)
    await browser.connect(f"http://127.0.0.1:{port}", transports=[transport])
    yield
    await browser.disconnect()


@asynccontextmanager
async def publishing(url: str, channels: dict[str, str]) -> AsyncGenerator[Publish]:
    managers = {road: MANAGERS[road](url, write_only=True, channel=channel) for road, channel in channels.items()}

    async def publish(road: str, number: int) -> None:
        emit, data = managers[road].emit, {"road": road, "number": number}
        if inspect.iscoroutinefunction(emit):
            await emit("number", data)
        else:
            await asyncio.to_thread(emit, "number", data)

    yield publish
    for manager in managers.values():
        if hasattr(manager.redis, "aclose"):
            await manager.redis.aclose()
        else:
            manager.redis.close()
