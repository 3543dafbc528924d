"""One process of an application that publishes, or listens, through a library that knows redis-py only.

Run as ``python -m tests.dependants.worker APPLICATION listen|publish URL NAME ...``. What it has to say it writes as
JSON to stdout, line by line; it ends when its stdin is closed.

A listener says where it listens, and then every number that it hears. A publisher publishes numbers, from 0 on, by
every road of its application in turn, until it reads a line; then it says how many there were.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, Protocol

import dynamoth_client

INTERVAL_S = 0.003
"""Between two numbers of a publisher."""

Hear = Callable[[str, int], None]
"""Told of each message: by which road it came, its number."""

Publish = Callable[[str, int], Awaitable[None]]
"""Publishes a number by a road."""


class Application(Protocol):
    """What a module of an application has. ``names`` are those that its listener found."""

    def listening(self, url: str, hear: Hear) -> AbstractAsyncContextManager[dict[str, str]]:
        """Listen while the context lasts, which is entered with the channels in Redis by road."""
        ...

    def publishing(self, url: str, channels: dict[str, str]) -> AbstractAsyncContextManager[Publish]:
        """Be ready to publish on these channels."""
        ...


async def _listen(application: Application, url: str) -> None:
    async with application.listening(url, lambda road, number: _say("heard", road, number)) as channels:
        _say("channels", channels)
        await asyncio.to_thread(sys.stdin.read)


async def _publish(application: Application, url: str, channels: dict[str, str]) -> None:
    stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    async with application.publishing(url, channels) as publish:
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


def main(arguments: Sequence[str]) -> None:
    """Run until stdin is closed."""
    name, role, url, *rest = arguments
    application: Any = import_module(f"tests.dependants.{name}")
    dynamoth_client.replace_redis()  # the libraries have been imported; the URL of one server is enough for them
    asyncio.run(_listen(application, url) if role == "listen" else _publish(application, url, json.loads(rest[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
