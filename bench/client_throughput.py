"""How many messages one process publishes and receives per second: our client against redis-py's, on one server.

Run with ``python -m bench.client_throughput``; ``--help`` tells the rest. The two clients take turns, several times in
each run, as the speed of a shared machine changes within seconds; medians of runs are compared: of the asynchronous
clients, and of the synchronous ones. Both asynchronous ones run on uvloop where it is installed.

For receiving, a second process publishes everything before the first message is read, envelopes for our client and
plain payloads for redis-py's: so what waits at the server is read as fast as the client can, and nothing else is
measured. A small queue keeps our client from reading ahead. ``batches`` is compared with redis-py's ``listen``, as that
is what one would have used. *Guarantees*: our client against itself, with numbered messages and with plain ones, which
are delivered as they come.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import redis
import redis.asyncio

import dynamoth_client
from bench.processors import processors_awake
from bench.servers import pack, send_packed, store_plan, unlimited_redis
from dynamoth.protocol.envelope import FIRST, seal
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_client.asyncio import from_url
from dynamoth_daemon.event_loop import run as run_fast

CHANNEL = b"channel:1"
TASKS = 200
TURNS = 5
"""In each run, of each of the two that are compared; with a new client, and its part of the messages."""
PUBLISHER_BATCH = 500
PUBLISHER_ID = 2**63 + 5
QUEUE = 1000
"""Messages that our client may have read before the measurement begins."""


@dataclass(frozen=True)
class Load:
    """The measurements to make, and their sizes."""

    name: str
    run: Callable[[Any, int, Load, bool], Coroutine[Any, Any, float]] | Callable[[Any, int, Load, bool], float]
    messages: int
    payload: bytes
    is_sync: bool = False
    #: Both runs are of our client.
    is_ours: bool = False
    #: Our client gets this many times as many messages, as its runs would be too short otherwise.
    ours_times: int = 1


async def publish_one_by_one(client: Any, port: int, load: Load, ours: bool) -> float:
    """One task that awaits each publication."""
    await client.publish(CHANNEL, load.payload)
    began_at = time.perf_counter()
    for _ in range(load.messages):
        await client.publish(CHANNEL, load.payload)
    return time.perf_counter() - began_at


async def publish_concurrently(client: Any, port: int, load: Load, ours: bool) -> float:
    """Many tasks, each of which awaits its publications."""

    async def publish(count: int) -> None:
        for _ in range(count):
            await client.publish(CHANNEL, load.payload)

    await asyncio.gather(*(publish(1) for _ in range(TASKS)))
    began_at = time.perf_counter()
    await asyncio.gather(*(publish(load.messages // TASKS) for _ in range(TASKS)))
    return time.perf_counter() - began_at


async def listen(client: Any, port: int, load: Load, ours: bool) -> float:
    """``async for`` over everything; the time from the first message to the last."""
    async with subscribed(client, port, load, ours, enveloped=ours) as pubsub:
        return await _listen(pubsub, load)


async def batches(client: Any, port: int, load: Load, ours: bool) -> float:
    """Our ``batches``, redis-py's ``listen``."""
    async with subscribed(client, port, load, ours, enveloped=ours) as pubsub:
        if not ours:
            return await _listen(pubsub, load)
        began_at = 0.0
        missing = load.messages
        async for batch in pubsub.batches():
            if not began_at:
                began_at = time.perf_counter()
            for message in batch:
                assert message["data"] == load.payload
            missing -= len(batch)
            if not missing:
                break
        return time.perf_counter() - began_at


async def listen_to_ours(client: Any, port: int, load: Load, ours: bool) -> float:
    """Our ``listen``: to numbered messages, and (in the place of redis-py's) to plain ones."""
    async with subscribed(client, port, load, ours=True, enveloped=ours) as pubsub:
        return await _listen(pubsub, load)


@asynccontextmanager
async def subscribed(client: Any, port: int, load: Load, ours: bool, enveloped: bool) -> AsyncGenerator[Any]:
    """A PubSub for which everything has been published already."""
    async with client.pubsub(**_options(ours)) as pubsub:
        await pubsub.subscribe(CHANNEL)
        await pubsub.get_message(timeout=None)
        await asyncio.to_thread(publish_all, port, load, enveloped)
        yield pubsub


async def _listen(pubsub: Any, load: Load) -> float:
    began_at = 0.0
    missing = load.messages
    async for message in pubsub.listen():
        assert message["data"] == load.payload
        if missing == load.messages:
            began_at = time.perf_counter()
        missing -= 1
        if not missing:
            break
    return time.perf_counter() - began_at


def publish_in_a_thread(client: Any, port: int, load: Load, ours: bool) -> float:
    """The synchronous client, one message after the other."""
    client.publish(CHANNEL, load.payload)
    began_at = time.perf_counter()
    for _ in range(load.messages):
        client.publish(CHANNEL, load.payload)
    return time.perf_counter() - began_at


def listen_in_a_thread(client: Any, port: int, load: Load, ours: bool) -> float:
    """The synchronous ``listen`` over everything; the time from the first message to the last."""
    with client.pubsub(**_options(ours)) as pubsub:
        pubsub.subscribe(CHANNEL)
        pubsub.get_message(timeout=None)
        publish_all(port, load, ours)
        began_at = 0.0
        missing = load.messages
        for message in pubsub.listen():
            assert message["data"] == load.payload
            if missing == load.messages:
                began_at = time.perf_counter()
            missing -= 1
            if not missing:
                break
        return time.perf_counter() - began_at


def _options(ours: bool) -> dict[str, Any]:
    return {"max_queue": QUEUE} if ours else {}


def publish_all(port: int, load: Load, enveloped: bool) -> None:
    """Have another process publish, and wait for its end."""
    arguments = (port, load.messages, load.payload, enveloped)
    process = multiprocessing.get_context("spawn").Process(target=publish_raw, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def publish_raw(port: int, messages: int, payload: bytes, enveloped: bool) -> None:
    """Publish as fast as the server takes it. Everything is packed before it begins."""
    numbered = range(1, messages + 1)
    data = [seal(PUBLISHER_ID, n, 0, payload, FIRST if n == 1 else 0) if enveloped else payload for n in numbered]
    packed = [pack((b"PUBLISH", CHANNEL, one)) for one in data]
    batches = [b"".join(packed[i : i + PUBLISHER_BATCH]) for i in range(0, messages, PUBLISHER_BATCH)]
    send_packed(port, batches, PUBLISHER_BATCH)


async def measure(port: int, load: Load, *, ours: bool) -> float:
    """Return messages per second of one run."""
    url = f"redis://127.0.0.1:{port}"
    is_ours = ours or load.is_ours
    client: Any = from_url(url) if is_ours else redis.asyncio.Redis(port=port, max_connections=TASKS + 1)
    async with client:
        if ours:
            load = replace(load, messages=load.messages * load.ours_times)
        return load.messages / await cast("Coroutine[Any, Any, float]", load.run(client, port, load, ours))


def measure_sync(port: int, load: Load, *, ours: bool) -> float:
    """Return messages per second of one run of a synchronous client."""
    url = f"redis://127.0.0.1:{port}"
    client: Any = dynamoth_client.from_url(url) if ours else redis.Redis(port=port)
    with client:
        return load.messages / cast("float", load.run(client, port, load, ours))


def compare(server: EmbeddedRedis, load: Load, rounds: int, *, own_loop: bool) -> dict[str, float]:
    """Return the medians of the runs of both clients, and their ratio; ``own_loop``: asyncio's, always."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    part = replace(load, messages=load.messages // TURNS)
    for _ in range(rounds):
        parts: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(TURNS):
            for ours in parts:
                gc.collect()
                if part.is_sync:
                    parts[ours].append(measure_sync(server.port, part, ours=ours))
                else:
                    run = asyncio.run if own_loop else run_fast
                    parts[ours].append(run(measure(server.port, part, ours=ours)))
        for ours in rates:
            rates[ours].append(statistics.harmonic_mean(parts[ours]))  # all messages by all of the time
    theirs, mine = statistics.median(rates[False]), statistics.median(rates[True])
    return {"other_per_s": theirs, "dynamoth_per_s": mine, "ratio": mine / theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="to receive per run; others are in proportion")
    parser.add_argument("--payload-bytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--asyncio", action="store_true", help="on asyncio's own loop, although uvloop is installed")
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--keep-awake", action="store_true", help="let no processor sleep; see bench/processors.py")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    arguments = parser.parse_args()
    smallest = 5 * TASKS * TURNS
    messages = max(1, arguments.messages // smallest) * smallest
    payload = b"x" * arguments.payload_bytes
    loads = [
        Load("publish, one by one", publish_one_by_one, messages // 10, payload),
        Load(f"publish, {TASKS} tasks", publish_concurrently, messages // 5, payload, ours_times=20),
        Load("listen", listen, messages, payload),
        Load("batches", batches, messages, payload),
        Load("guarantees", listen_to_ours, messages, payload, is_ours=True),
        Load("sync publish", publish_in_a_thread, messages // 10, payload, is_sync=True),
        Load("sync listen", listen_in_a_thread, messages, payload, is_sync=True),
    ]
    results: dict[str, dict[str, float]] = {}
    awake = processors_awake() if arguments.keep_awake else nullcontext()
    with awake, unlimited_redis() as server:
        store_plan(server)
        for load in (load for load in loads if arguments.only in load.name):
            result = results[load.name] = compare(server, load, arguments.rounds, own_loop=arguments.asyncio)
            sys.stdout.write(
                f"{load.name:22} {'without ' if load.is_ours else 'redis-py'} {result['other_per_s']:>9,.0f}/s"
                f"   dynamoth {result['dynamoth_per_s']:>9,.0f}/s   ratio {result['ratio']:.2f}\n"
            )
            sys.stdout.flush()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
