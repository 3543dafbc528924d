"""One application of a fleet that is upgraded: a process that publishes numbered messages and listens to all channels.

It is the same program with plain redis-py and with the client of Dynamoth: only the import differs. It writes what it
does to its standard output, a line each, with times of the machine's monotonic clock; ``tests.whole.fleet`` reads that.
Commands come by its standard input: ``hush`` ends publishing, ``quit`` ends it all.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from typing import Any

CLIENTS = {"plain": "redis.asyncio", "dynamoth": "dynamoth_client.asyncio"}

INTERVAL_S = 0.05
"""Between two messages of the application on a channel."""


def say(*words: object) -> None:
    """Write one line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def publish(client: Any, name: str, channel: str, payload_bytes: int, hush: asyncio.Event) -> None:
    """Publish numbered messages, each when the one before has ended."""
    number = 0
    while not hush.is_set():
        number += 1
        say("begins", channel, number, time.monotonic())
        receivers = await client.publish(channel, f"{name}:{number}:".ljust(payload_bytes, "."))
        say("published", channel, number, receivers)
        await asyncio.sleep(INTERVAL_S)
    say("hushed", channel, number)


async def listen(pubsub: Any) -> None:
    """Write down what comes."""
    async for message in pubsub.listen():
        kind, channel, data = message["type"], message["channel"], message["data"]
        if kind in ("subscribe", "psubscribe"):
            say("confirmed", channel.decode(), time.monotonic())
        elif kind in ("message", "pmessage"):
            publisher, _, rest = data.partition(b":")
            # Bytes that are no message of ours, such as an envelope, are shown as they are.
            number = rest.partition(b":")[0]
            shown = f"{publisher.decode()} {number.decode()}" if number.isdigit() else f"? {data!r}"
            say("gets", channel.decode(), shown)
        else:
            say("gap", channel.decode(), str(data))


async def run(arguments: argparse.Namespace) -> None:
    """Publish and listen until told to quit."""
    client = importlib.import_module(CLIENTS[arguments.kind]).from_url(arguments.url)
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    pubsub = client.pubsub(gaps=True) if arguments.kind == "dynamoth" else client.pubsub()
    await (pubsub.psubscribe(arguments.pattern) if arguments.pattern else pubsub.subscribe(*arguments.channels))
    listening = asyncio.create_task(listen(pubsub))
    hush = asyncio.Event()
    channels = arguments.channels
    publishing = [
        asyncio.create_task(publish(client, arguments.name, channel, arguments.payload_bytes, hush))
        for channel in channels
    ]
    while line := await reader.readline():
        if line == b"hush\n":
            hush.set()
            await asyncio.gather(*publishing)
            say("quiet")
        if line == b"quit\n":
            break
    say("ends", time.monotonic())
    listening.cancel()
    await pubsub.aclose()
    await client.aclose()


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=list(CLIENTS))
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("channels", nargs="+")
    parser.add_argument("--pattern")
    parser.add_argument("--payload-bytes", type=int, default=0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
