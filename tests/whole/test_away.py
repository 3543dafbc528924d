"""A user who was away while very much was published comes back at another broker, by WebSocket and by stream."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from dynamoth.edge.interests import channel_interest
from dynamoth.edge.log import LogOptions, append_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis, reserve_port
from dynamoth_link.query import query
from dynamoth_link.urls import parse_server_url
from dynamoth_user import Client, Gap, Item
from dynamoth_user.storage import Storage
from tests.broker.edge import RunningBroker, running_broker

MISSED = 10_000
RETAINED = 2_000
BEFORE = 3
EPOCH = 0xE
TEST_S_MAX = 60.0


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[LocalCluster, EmbeddedRedis]]:
    """A cluster, and a log server."""
    with LocalCluster(1) as cluster, EmbeddedRedis() as log:
        yield cluster, log


@dataclass
class _Memory(Storage):
    """A storage that ends with the test."""

    state: dict[str, Any] | None = None

    def load(self) -> dict[str, Any] | None:
        return self.state

    def save(self, state: dict[str, Any]) -> None:
        self.state = state


@asynccontextmanager
async def two_brokers(
    servers: tuple[LocalCluster, EmbeddedRedis], options: LogOptions
) -> AsyncGenerator[tuple[RunningBroker, RunningBroker]]:
    """Run two brokers of one cluster."""
    cluster, log = servers
    logs = {"l1": log.url}
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                running_broker(cluster.url, logs, id_, log=options, tip_check_s=0.1, sse_port=free_port())
            )
            for id_ in ("b1", "b2")
        ]
        yield first, second


def free_port() -> int:
    with reserve_port() as reserved:
        port: int = reserved.getsockname()[1]
        return port


async def publish(log: EmbeddedRedis, channel: str, numbers: range, options: LogOptions) -> None:
    """Append to the log of a channel, as a publisher that dies before it publishes."""
    id_ = channel_interest(channel).id
    commands = [append_command(id_, b"%d" % number, "", EPOCH, options) for number in numbers]
    for first in range(0, len(commands), 1000):
        await query(parse_server_url(log.url), *commands[first : first + 1000], timeout_s=30.0)


def check(numbers: list[int], gaps: list[tuple[int, int]], options: LogOptions) -> None:
    """Everything comes in order, and once; or one gap names what the log does not have any more."""
    if options.retained_min >= MISSED:
        assert gaps == []
        assert numbers == list(range(BEFORE + 1, BEFORE + MISSED + 1))
        return
    [(first, last)] = gaps
    assert first == BEFORE + 1
    assert last <= BEFORE + MISSED - options.retained_min, "the log keeps as many as it promises"
    assert numbers == list(range(last + 1, BEFORE + MISSED + 1))


both = pytest.mark.parametrize("options", [LogOptions(durable=True), LogOptions(RETAINED, durable=True)])


@both
def test_by_web_socket(servers: tuple[LocalCluster, EmbeddedRedis], options: LogOptions) -> None:
    async def main() -> None:
        channel, storage = f"log-socket-{options.retained_min}", _Memory()
        await publish(servers[1], channel, range(1, 2), options)  # so that the epoch is known
        async with two_brokers(servers, options) as (first, second):
            async with Client([first.url], storage=storage) as client:
                subscription = await client.subscribe(channel)
                await publish(servers[1], channel, range(2, BEFORE + 1), options)
                for _ in range(2, BEFORE + 1):
                    assert isinstance(await anext(subscription), Item)
            await publish(servers[1], channel, range(BEFORE + 1, BEFORE + MISSED + 1), options)
            numbers: list[int] = []
            gaps: list[tuple[int, int]] = []
            async with Client([second.url], storage=storage) as client:
                async for item in await client.subscribe(channel):
                    if isinstance(item, Gap):
                        assert item.first is not None and item.last is not None and item.position is not None
                        gaps.append((item.first, item.last))
                        assert item.position.offset == item.last
                        continue
                    assert item.position is not None and item.position.offset == int(item.text)
                    numbers.append(int(item.text))
                    if numbers[-1] == BEFORE + MISSED:
                        break
        check(numbers, gaps, options)

    asyncio.run(asyncio.wait_for(main(), TEST_S_MAX))


@both
def test_by_server_sent_events(servers: tuple[LocalCluster, EmbeddedRedis], options: LogOptions) -> None:
    async def main() -> None:
        channel = f"log-stream-{options.retained_min}"
        await publish(servers[1], channel, range(1, 2), options)
        connect = {"type": "connect", "v": 1, "session": "ada", "subs": [{"ref": 1, "channel": channel}]}
        params = {"connect": base64.urlsafe_b64encode(json.dumps(connect).encode()).decode()}
        async with two_brokers(servers, options) as (first, second), aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{first.sse_port}/sse", params=params) as stream:
                await event(stream, {"moved_in"})
                await publish(servers[1], channel, range(2, BEFORE + 1), options)
                frame: dict[str, Any] = {}
                last = ""
                while frame.get("o") != BEFORE:
                    last, frame = await event(stream, {"data"})
            await publish(servers[1], channel, range(BEFORE + 1, BEFORE + MISSED + 1), options)
            headers = {"Last-Event-ID": last}
            numbers: list[int] = []
            gaps: list[tuple[int, int]] = []
            url = f"http://127.0.0.1:{second.sse_port}/sse"
            async with http.get(url, params=params, headers=headers) as stream:
                while not numbers or numbers[-1] != BEFORE + MISSED:
                    _, frame = await event(stream, {"data", "gap"})
                    if frame["type"] == "gap":
                        gaps.append((frame["from"], frame["to"]))
                    else:
                        assert frame["o"] == int(frame["d"])
                        numbers.append(frame["o"])
        check(numbers, gaps, options)

    asyncio.run(asyncio.wait_for(main(), TEST_S_MAX))


async def event(stream: aiohttp.ClientResponse, types: set[str]) -> tuple[str, dict[str, Any]]:
    """Return the id and the frame of the next event of one of these types."""
    frame: dict[str, Any] = {}
    id_ = ""
    while True:
        line = (await stream.content.readline()).decode()
        assert line, "the stream has ended"
        match line.rstrip("\n").partition(": "):
            case ("data", _, text):
                frame = json.loads(text)
            case ("id", _, text):
                id_ = text
            case ("", "", "") if frame:
                if frame["type"] in types:
                    return id_, frame
                frame = {}
            case _:
                pass
