"""A program with the client of whatever version PYTHONPATH names: it publishes on channels, listens, and reports both.

It is run as ``python audited_client.py URL NAME CHANNEL...``. Each line of its output is a JSON array: the kind of an
event, the channel, the time (of the monotonic clock, which all processes share), and what belongs to the kind. After
the first SIGTERM it publishes no more and writes ``["stopped"]``; it ends with the second one.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import Any

from redis.exceptions import ConnectionError, TimeoutError  # as redis-py names them

from dynamoth_client.asyncio import PubSub, Redis, from_url

INTERVAL_S = 0.02


def _say(kind: str, channel: str = "", *values: Any) -> None:
    print(json.dumps([kind, channel, time.monotonic(), *values]), flush=True)  # noqa: T201  # its output


async def _publish(client: Redis, name: str, channel: str, stopping: asyncio.Event) -> None:
    number = 0
    while not stopping.is_set():
        number += 1
        _say("published", channel, number)
        has_failed = False
        try:
            await client.publish(channel, f"{name} {number}")
        except (ConnectionError, TimeoutError):
            has_failed = True
        _say("publish_ended", channel, number, has_failed)
        await asyncio.sleep(INTERVAL_S)


async def _read(pubsub: PubSub) -> None:
    async for message in pubsub.listen():
        kind, channel, data = message["type"], message["channel"].decode(), message["data"]
        if kind == "subscribe":
            _say("confirmed", channel)
        elif kind == "gap":
            _say("gap", channel, data.reason)
        else:
            publisher, number = data.split()
            _say("delivered", channel, publisher.decode(), int(number))


async def _run(url: str, name: str, channels: list[str]) -> None:
    stopping, ending = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (ending if stopping.is_set() else stopping).set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_signal)
    async with from_url(url) as client, from_url(url) as listener, listener.pubsub(gaps=True) as pubsub:
        await pubsub.subscribe(*channels)
        reading = asyncio.create_task(_read(pubsub))
        async with asyncio.TaskGroup() as publishing:
            for channel in channels:
                publishing.create_task(_publish(client, name, channel, stopping))
        _say("stopped")
        await ending.wait()
        reading.cancel()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], sys.argv[2], sys.argv[3:]))
