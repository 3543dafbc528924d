"""How many messages one process receives and publishes per second over one link, and what each costs in CPU.

Run with ``python -m bench.link_throughput``; ``--help`` tells the rest. A Redis server is started for it, and
for receiving a second process publishes as fast as the server takes it, so on two cores all three compete.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

from bench.servers import pack, send_packed, unlimited_redis
from dynamoth.machine.events import Connect, LinkUp, Pushed, Replied, Send
from dynamoth_link.driver import Driver
from dynamoth_link.link import Link

CHANNEL = b"channel:1"
IN_FLIGHT = 1000
"""Publications without a reply yet, at most: what a busy application of many tasks has."""

PUBLISHER_BATCH = 500

Measurement: TypeAlias = "Callable[[str, int, bytes], Coroutine[Any, Any, Result]]"


@dataclass(frozen=True)
class Result:
    messages: int
    wall_s: float
    cpu_s: float

    def __str__(self) -> str:
        per_message_us = 1e6 * self.cpu_s / self.messages
        return f"{self.messages / self.wall_s:>9,.0f} messages/s {per_message_us:6.2f} us CPU/message"


class Stopwatch:
    def __init__(self) -> None:
        self.wall_s = time.perf_counter()
        self.cpu_s = time.process_time()

    def stop(self, messages: int) -> Result:
        return Result(messages, time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s)


async def receive(url: str, messages: int, payload: bytes) -> Result:
    """A bare link: on_pushes counts."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()
    subscribed: asyncio.Future[None] = loop.create_future()
    missing = messages
    stopwatch = Stopwatch()

    def on_pushes(batch: list[list[Any]]) -> None:
        nonlocal missing, stopwatch
        if not subscribed.done():
            subscribed.set_result(None)
            return
        if missing == messages:
            stopwatch = Stopwatch()
        missing -= len(batch)
        if missing <= 0 and not done.done():
            done.set_result(stopwatch.stop(messages))

    def subscribe(_: str | None) -> None:
        link.send((b"SUBSCRIBE", CHANNEL))

    link = Link(url, on_up=subscribe, on_down=fail, on_pushes=on_pushes)
    link.start()
    await subscribed
    with Publisher(url, messages, payload):
        result = await done
    await link.close()
    return result


async def publish(url: str, messages: int, payload: bytes) -> Result:
    """A bare link: each reply sends the next publication, IN_FLIGHT at a time."""
    loop = asyncio.get_running_loop()
    up: asyncio.Future[None] = loop.create_future()
    done: asyncio.Future[None] = loop.create_future()
    to_send, to_come = messages, messages

    def send() -> None:
        nonlocal to_send
        if to_send:
            to_send -= 1
            link.send((b"PUBLISH", CHANNEL, payload), on_reply)

    def on_reply(_: Any) -> None:
        nonlocal to_come
        to_come -= 1
        if to_come:
            send()
        else:
            done.set_result(None)

    link = Link(url, on_up=lambda _: up.set_result(None), on_down=fail, on_pushes=void)
    link.start()
    await up
    stopwatch = Stopwatch()
    for _ in range(IN_FLIGHT):
        send()
    await done
    result = stopwatch.stop(messages)
    await link.close()
    return result


class Counter:
    """The smallest machine that receives, or publishes."""

    def __init__(self, url: str, messages: int, payload: bytes, *, publishes: bool) -> None:
        self.url = url
        self.missing = messages
        self.to_send = messages
        self.payload = payload
        self.publishes = publishes

    def handle(self, event: Any, now: float) -> list[Any]:
        if type(event) is Pushed:
            return self._count(len(event.messages)) if event.messages[0][0] == b"message" else ["subscribed"]
        if type(event) is Replied:
            return self._count(1) + self._sends(1)
        if type(event) is LinkUp:
            return self._sends(IN_FLIGHT) if self.publishes else [Send("s", (b"SUBSCRIBE", CHANNEL))]
        return [Connect("s", self.url)]

    def deadline(self) -> float | None:
        return None

    def _count(self, number: int) -> list[Any]:
        self.missing -= number
        return ["done"] if self.missing == 0 else []

    def _sends(self, number: int) -> list[Any]:
        number = min(number, self.to_send)
        self.to_send -= number
        return [Send("s", (b"PUBLISH", CHANNEL, self.payload), 1) for _ in range(number)]


async def run_machine(url: str, messages: int, payload: bytes, *, publishes: bool) -> Result:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    subscribed: asyncio.Future[None] = loop.create_future()
    futures = {"done": done, "subscribed": subscribed}
    machine = Counter(url, messages, payload, publishes=publishes)
    driver = Driver(machine, on_action=lambda action: futures[action].set_result(None))
    stopwatch = Stopwatch()
    driver.handle("begin")
    if publishes:
        await done
        result = stopwatch.stop(messages)
    else:
        await subscribed
        stopwatch = Stopwatch()
        with Publisher(url, messages, payload):
            await done
            result = stopwatch.stop(messages)
    await driver.close()
    return result


class Publisher:
    """A process that publishes as fast as the server takes it."""

    def __init__(self, url: str, messages: int, payload: bytes) -> None:
        port = int(url.rpartition(":")[2])
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=publish_raw, args=(port, messages, payload))

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, *error: object) -> None:
        self._process.join()


def publish_raw(port: int, messages: int, payload: bytes) -> None:
    batch = pack((b"PUBLISH", CHANNEL, payload)) * PUBLISHER_BATCH
    send_packed(port, repeat(batch, messages // PUBLISHER_BATCH), PUBLISHER_BATCH)


def void(_: object) -> None:
    """Do nothing."""


def fail(reason: str) -> None:
    raise RuntimeError(reason)


def run(measurement: Measurement, loop_name: str, url: str, messages: int, payload: bytes) -> Result:
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if loop_name == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(measurement(url, messages, payload))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--payload-bytes", type=int, default=64)
    parser.add_argument("--loop", choices=["uvloop", "asyncio", "both"], default="both")
    arguments = parser.parse_args()
    messages = max(1, arguments.messages // PUBLISHER_BATCH) * PUBLISHER_BATCH
    payload = b"x" * arguments.payload_bytes
    measurements: dict[str, Measurement] = {
        "receive, link": receive,
        "publish, link": publish,
        "receive, driver": partial(run_machine, publishes=False),
        "publish, driver": partial(run_machine, publishes=True),
    }
    loops = ["uvloop", "asyncio"] if arguments.loop == "both" else [arguments.loop]
    with unlimited_redis() as server:
        for loop_name in loops:
            for name, measurement in measurements.items():
                result = run(measurement, loop_name, server.url, messages, payload)
                sys.stdout.write(f"{loop_name:8} {name:16} {result}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
