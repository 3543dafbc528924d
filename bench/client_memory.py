"""How much memory of the client a subscribed channel takes.

Run with ``python -m bench.client_memory``; ``--help`` tells the rest. One PubSub subscribes to many channels and reads
its acknowledgements; what the process has grown by is divided by their number. That includes the names of the channels.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import sys
from pathlib import Path

from bench.servers import store_plan
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import PubSub, from_url

CHUNK = 1000
"""Channels of one ``subscribe``."""


async def measure(url: str, channels: int) -> float:
    """Return the bytes per channel."""
    async with from_url(url) as client, client.pubsub() as pubsub:
        await _subscribe(pubsub, 0, CHUNK)  # what the first ones cost is not what one costs
        gc.collect()
        before = _resident_bytes()
        for first in range(CHUNK, CHUNK + channels, CHUNK):
            await _subscribe(pubsub, first, CHUNK)
        gc.collect()
        return (_resident_bytes() - before) / channels


def _resident_bytes() -> int:
    """Return how much memory this process has (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def _subscribe(pubsub: PubSub, first: int, count: int) -> None:
    await pubsub.subscribe(*(b"channel:%d" % number for number in range(first, first + count)))
    for _ in range(count):
        message = await pubsub.get_message(timeout=None)
        assert message is not None and message["type"] == "subscribe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=100_000)
    arguments = parser.parse_args()
    with EmbeddedRedis() as server:
        store_plan(server)
        bytes_per_channel = asyncio.run(measure(server.url, arguments.channels))
    sys.stdout.write(f"{arguments.channels:,} channels: {bytes_per_channel:,.0f} bytes each\n")
    sys.stdout.write(json.dumps({"bytes_per_channel": bytes_per_channel}) + "\n")


if __name__ == "__main__":
    main()
