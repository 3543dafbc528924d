"""How long a message takes from ``publish`` to ``listen``: our client against redis-py's, on one server.

Run with ``python -m bench.client_latency``; ``--help`` tells the rest. One process publishes at a steady rate and
listens, with each client for a tenth of a second in turn, so that a machine that stands still for some milliseconds now
and then does so to both; the medians of their p50 and p99 in several runs are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import redis.asyncio

from bench.processors import processors_awake
from bench.servers import store_plan
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import from_url
from dynamoth_daemon.event_loop import run

PAYLOAD_BYTES = 64
TURN_S = 0.1
WARM_UP_RATIO = 10
"""The first tenth of the messages is not counted."""


async def measure(port: int, messages: int, messages_per_s: float) -> dict[str, list[float]]:
    """Return the latencies of one run of each client, in milliseconds, sorted."""
    clients: dict[str, Any] = {
        "redis_py": redis.asyncio.Redis(port=port),
        "dynamoth": from_url(f"redis://127.0.0.1:{port}"),
    }
    async with AsyncExitStack() as stack:
        listening: dict[str, asyncio.Task[list[float]]] = {}
        for name, client in clients.items():
            pubsub = await stack.enter_async_context((await stack.enter_async_context(client)).pubsub())
            await pubsub.subscribe(name)
            await pubsub.get_message(timeout=None)
            listening[name] = asyncio.create_task(listen(pubsub, messages))
        turn = max(1, round(TURN_S * messages_per_s))
        for begin in range(0, messages, turn):
            for name, client in clients.items():
                await publish(client, name, min(turn, messages - begin), messages_per_s)
        return {name: sorted((await task)[messages // WARM_UP_RATIO :]) for name, task in listening.items()}


async def listen(pubsub: Any, messages: int) -> list[float]:
    """Return the latencies of ``messages`` messages, in milliseconds, in their order."""
    latencies_ms: list[float] = []
    async for message in pubsub.listen():
        latencies_ms.append((time.monotonic_ns() - int(message["data"].split(None, 1)[0])) / 1e6)
        if len(latencies_ms) == messages:
            break
    return latencies_ms


async def publish(client: Any, channel: str, messages: int, messages_per_s: float) -> None:
    """Publish at a steady rate; each message tells when it began."""
    due = time.monotonic()
    for _ in range(messages):
        due += 1 / messages_per_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await client.publish(channel, (b"%d " % time.monotonic_ns()).ljust(PAYLOAD_BYTES, b"x"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=8000, help="per run and client")
    parser.add_argument("--messages-per-s", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep-awake", action="store_true", help="let no processor sleep; see bench/processors.py")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    quantiles = {"p50": 0.5, "p99": 0.99}
    found: dict[str, dict[str, list[float]]] = {name: {"redis_py": [], "dynamoth": []} for name in quantiles}
    awake = processors_awake() if arguments.keep_awake else nullcontext()
    with awake, EmbeddedRedis() as server:
        store_plan(server)
        for _ in range(arguments.rounds):
            gc.collect()
            measured = run(measure(server.port, arguments.messages, arguments.messages_per_s))
            for name, quantile in quantiles.items():
                for client, latencies_ms in measured.items():
                    found[name][client].append(latencies_ms[int(quantile * len(latencies_ms))])
    results: dict[str, dict[str, float]] = {}
    for name, by_client in found.items():
        theirs, mine = (statistics.median(by_client[client]) for client in ("redis_py", "dynamoth"))
        results[name] = {"redis_py_ms": theirs, "dynamoth_ms": mine, "ratio": mine / theirs}
        sys.stdout.write(f"{name}  redis-py {theirs:.3f} ms   dynamoth {mine:.3f} ms   ratio {mine / theirs:.2f}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
