"""How long a message takes from ``publish`` to ``listen``: our client against redis-py's, on one server.

Run with ``python -m bench.client_latency``; ``--help`` tells the rest. One process publishes at a steady rate and
listens; the two clients take turns, several times in each run, and the medians of their p50 and p99 are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from typing import Any

import redis.asyncio

from bench.client_throughput import CHANNEL, TURNS, store_plan
from dynamoth_cli.embedded import EmbeddedRedis
from dynamoth_client.asyncio import from_url
from dynamoth_link.daemon import run

PAYLOAD_BYTES = 64
WARM_UP_RATIO = 10
"""One in so many messages, the first ones, is not counted."""


async def measure(port: int, messages: int, messages_per_s: float, *, ours: bool) -> list[float]:
    """Return the latencies of one turn, in milliseconds."""
    client: Any = from_url(f"redis://127.0.0.1:{port}") if ours else redis.asyncio.Redis(port=port)
    async with client, client.pubsub() as pubsub:
        await pubsub.subscribe(CHANNEL)
        await pubsub.get_message(timeout=None)
        publishing = asyncio.create_task(publish(client, messages, messages_per_s))
        latencies_ms: list[float] = []
        async for message in pubsub.listen():
            latencies_ms.append((time.monotonic_ns() - int(message["data"].split(None, 1)[0])) / 1e6)
            if len(latencies_ms) == messages:
                break
        await publishing
    return latencies_ms[messages // WARM_UP_RATIO :]


async def publish(client: Any, messages: int, messages_per_s: float) -> None:
    """Publish at a steady rate; each message tells when it began."""
    due = time.monotonic()
    for _ in range(messages):
        due += 1 / messages_per_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await client.publish(CHANNEL, (b"%d " % time.monotonic_ns()).ljust(PAYLOAD_BYTES, b"x"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=4000, help="per run")
    parser.add_argument("--messages-per-s", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    quantiles = {"p50": 0.5, "p99": 0.99}
    found: dict[bool, dict[str, list[float]]] = {ours: {name: [] for name in quantiles} for ours in (False, True)}
    with EmbeddedRedis() as server:
        asyncio.run(store_plan(server))
        for _ in range(arguments.rounds):
            latencies_ms: dict[bool, list[float]] = {ours: [] for ours in found}
            for _ in range(TURNS):
                for ours, measured in latencies_ms.items():
                    gc.collect()
                    part = max(1, arguments.messages // TURNS)
                    measured += run(measure(server.port, part, arguments.messages_per_s, ours=ours))
            for ours, measured in latencies_ms.items():
                measured.sort()
                for name, quantile in quantiles.items():
                    found[ours][name].append(measured[int(quantile * len(measured))])
    results: dict[str, dict[str, float]] = {}
    for name in quantiles:
        theirs, mine = (statistics.median(found[ours][name]) for ours in (False, True))
        results[name] = {"redis_py_ms": theirs, "dynamoth_ms": mine, "ratio": mine / theirs}
        sys.stdout.write(f"{name}  redis-py {theirs:.3f} ms   dynamoth {mine:.3f} ms   ratio {mine / theirs:.2f}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
