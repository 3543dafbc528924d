"""One process of an application that listens and publishes through a library that knows redis-py only.

Run as ``python -m tests.dependants.worker APPLICATION URL``. It writes lines of JSON to stdout: where it listens, and
then every number that it hears. It publishes numbers, from 0 on, by every road of its application in turn, until it
reads a line from stdin; then it writes how many there were. It ends when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, Protocol

import dynamoth_client

INTERVAL_S = 0.01
"""Between two numbers."""

Hear = Callable[[str, int], None]
"""Called with each message: by which road it came, its number."""

Publish = Callable[[str, int], Awaitable[None]]
"""Publishes a number by a road."""


class Application(Protocol):
    """What a module of an application has. Both parts have connections of their own."""

    def listening(self, url: str, hear: Hear) -> AbstractAsyncContextManager[dict[str, str]]:
        """Listen while the context lasts, which is entered with the channels in Redis by road."""
        ...

    def publishing(self, url: str, channels: dict[str, str]) -> AbstractAsyncContextManager[Publish]:
        """Be ready to publish on these channels."""
        ...


async def _run(application: Application, url: str) -> None:
    async with (
        application.listening(url, lambda road, number: _say("heard", road, number)) as channels,
        application.publishing(url, channels) as publish,
    ):
        _say("channels", channels)
        stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        number = 0
        while not stop.done():
            for road in channels:
                await publish(road, number)
            number += 1
            await asyncio.sleep(INTERVAL_S)
        _say("published", number)
        await asyncio.to_thread(sys.stdin.read)


def _say(*words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main(name: str, url: str) -> None:
    """Run until stdin is closed."""
    application: Any = import_module(f"tests.dependants.{name}")
    dynamoth_client.replace_redis()  # the libraries have been imported; the URL of one server is enough for them
    asyncio.run(_run(application, url))


if __name__ == "__main__":
    main(*sys.argv[1:])
