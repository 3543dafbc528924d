"""What a client costs that publishes once and closes, against redis-py's: ``python -m bench.client_start``.

Both in turn, on one server that stores a plan, in one process that has made such clients before.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis
import redis.asyncio

import dynamoth_client
from dynamoth_cli.local.cluster import HOST, LocalCluster


def publish_once(make: Callable[[], Any]) -> float:
    """Return how long it takes to make a client, publish, and close it, in milliseconds."""
    began_at = time.perf_counter()
    with make() as client:
        client.publish("c", "x")
    return (time.perf_counter() - began_at) * 1000


def publish_once_async(make: Callable[[], Any]) -> float:
    """Do the same on an event loop that runs already."""

    async def once() -> float:
        began_at = time.perf_counter()
        async with make() as client:
            await client.publish("c", "x")
        return (time.perf_counter() - began_at) * 1000

    return asyncio.run(once())


def main() -> None:
    """Print medians and worst of both clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=300, help="clients of each kind (default: %(default)s)")
    times = parser.parse_args().times
    with LocalCluster(1) as cluster:
        url = f"redis://{HOST}:{cluster.redis['s1'].port}"
        kinds: list[tuple[str, Callable[[Callable[[], Any]], float], Any, Any]] = [
            ("sync", publish_once, redis, dynamoth_client),
            ("asyncio", publish_once_async, redis.asyncio, dynamoth_client.asyncio),
        ]
        for name, run, theirs, ours in kinds:
            took: dict[str, list[float]] = {"redis-py": [], "dynamoth": []}
            for _ in range(times):
                took["redis-py"].append(run(partial(theirs.from_url, url)))
                took["dynamoth"].append(run(partial(ours.from_url, url)))
            medians = {who: statistics.median(values) for who, values in took.items()}
            for who, values in took.items():
                print(f"{name:8} {who:9} median {medians[who]:6.2f} ms, worst {max(values):7.2f} ms")  # noqa: T201  # the result
            print(f"{name:8} ratio {medians['dynamoth'] / medians['redis-py']:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
