"""The clients of the benchmark of moving channels: each publishes or listens on one channel, in two processes.

A publisher numbers its messages from 1 when the measurement begins. Before that it publishes *probes* with number 0,
until each listener has heard one. So everything that is numbered is due to all listeners.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any

import redis.asyncio
import redis.exceptions

from bench.game_players import ByDynamoth, Connected, Take
from dynamoth_daemon.event_loop import run
from dynamoth_demo.latency import LatencyCounts
from dynamoth_sim.audit import Audit

HEAD = Struct(">QQ")
"""Number, and time of sending in nanoseconds."""
PAYLOAD_BYTES = 200

READ_TIMEOUT_S = 1.0
AGAIN_S = 0.01
QUIET_S = 2.0
"""When nothing has come for this long, nothing will."""
DRAIN_S_MAX = 15.0
CONNECT_AT_ONCE = 20


@dataclass(frozen=True)
class Clients:
    """What both processes know: how clients connect, and the channels; each has one publisher."""

    transport: str
    url: str
    channels: tuple[bytes, ...]
    listeners_per_channel: int
    interval_s: float


@dataclass(frozen=True)
class Heard:
    """What all listeners heard. ``totals`` are those of ``Audit``."""

    totals: dict[str, int]
    gaps: int
    #: Response times by class, as of ``LatencyCounts``: of messages sent before the first move, and afterwards.
    rest: dict[int, int]
    moving: dict[int, int]


class OneChannel:
    """A client of a Redis Cluster that uses one channel: sharded pub/sub, redis-py as it comes.

    redis-py subscribes again when one of its commands is answered with MOVED. A client that only listens sends none.
    One task reads from each node: redis-py keeps connections to nodes that are silent now, and would wait at each.

    Args:
        url: the cluster.
        take: called with each message.
        on_gap: never called: redis-py knows no gaps.
        returns: whether the application looks where its channel is, with a command, when the server has ended its
            subscription. redis-py does not do so by itself.

    """

    def __init__(self, url: str, take: Take, on_gap: Callable[[], None], *, returns: bool) -> None:
        self._client: Any = redis.asyncio.RedisCluster.from_url(url)
        self._pubsub: Any = None
        self._take = take
        self._returns = returns
        #: Those that read, by node, and those that look where the channel is.
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._confirmed = asyncio.Event()

    async def join(self, channel: bytes) -> None:
        """Subscribe."""
        await self._client.initialize()
        self._pubsub = self._client.pubsub()
        await self._pubsub.ssubscribe(channel)
        self._read_all(channel)

    async def leave(self, channel: bytes) -> None:
        """Unsubscribe."""
        await self._pubsub.sunsubscribe(channel)

    async def publish(self, channel: bytes, payload: bytes) -> None:
        """Publish."""
        await self._client.execute_command("SPUBLISH", channel, payload)

    async def close(self) -> None:
        """Close all connections."""
        tasks = [*self._readers.values(), *self._returning]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pubsub is not None:
            await self._pubsub.aclose()
        await self._client.aclose()

    def _read_all(self, channel: bytes) -> None:
        for name, pubsub in self._pubsub.node_pubsub_mapping.items():
            reader = self._readers.get(name)
            if reader is not None and reader.done():
                reader.result()  # raises what ended it
            if pubsub.connection is not None and (reader is None or reader.done()):
                node = self._client.get_node(node_name=name)
                self._readers[name] = asyncio.create_task(self._read(channel, node))

    async def _read(self, channel: bytes, node: Any) -> None:
        while node.name in self._pubsub.node_pubsub_mapping:
            try:
                message = await self._pubsub.get_sharded_message(target_node=node, timeout=READ_TIMEOUT_S)
            except redis.exceptions.RedisError:
                await asyncio.sleep(AGAIN_S)  # MOVED, to a SUNSUBSCRIBE of redis-py, or a lost connection
                continue
            if message is None:
                continue
            if message["type"] == "smessage":
                self._take(channel, message["data"])
            elif message["type"] == "ssubscribe":
                self._confirmed.set()
            elif self._returns:
                self._confirmed.clear()
                task = asyncio.create_task(self._return(channel))
                self._returning.add(task)
                task.add_done_callback(self._returning.discard)

    async def _return(self, channel: bytes) -> None:
        """Have redis-py subscribe where the channel is now."""
        while not self._confirmed.is_set():
            with suppress(redis.exceptions.RedisError):  # the slot is between two servers: try again
                await self._client.exists(channel)
            self._read_all(channel)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._confirmed.wait(), AGAIN_S)


TRANSPORTS: dict[str, Callable[[str, Take, Callable[[], None]], Connected]] = {
    "dynamoth": ByDynamoth,
    "redis-cluster": partial(OneChannel, returns=False),
    "redis-cluster, returning": partial(OneChannel, returns=True),
}


# Listeners.


class Listeners:
    """All listeners, in one process."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._audit = Audit(live=False, losses_allowed=True)
        self._moving_since_ns: int | None = None
        self._rest, self._moving = LatencyCounts(), LatencyCounts()
        self._probed: set[int] = set()
        self._latest_ns = 0
        self._gaps = 0

    async def work(self, pipe: Connection) -> None:
        """Listen; say when all have heard a probe; note when moves begin; judge what came when all is published."""
        loop = asyncio.get_running_loop()
        channels = [channel for channel in self._clients.channels for _ in range(self._clients.listeners_per_channel)]
        listening: list[Connected] = []
        connect = TRANSPORTS[self._clients.transport]
        try:
            for first in range(0, len(channels), CONNECT_AT_ONCE):
                some = range(first, min(first + CONNECT_AT_ONCE, len(channels)))
                new = [connect(self._clients.url, partial(self._take, each), partial(self._gap, each)) for each in some]
                listening += new
                await asyncio.gather(*(one.join(channels[each]) for one, each in zip(new, some, strict=True)))
            while len(self._probed) < len(channels):  # noqa: ASYNC110 - an event for each message would be measured, too
                await asyncio.sleep(AGAIN_S)
            pipe.send("ready")
            self._moving_since_ns = await loop.run_in_executor(None, pipe.recv)
            pipe.send(await self._judge(await loop.run_in_executor(None, pipe.recv)))
        finally:
            await asyncio.gather(*(one.close() for one in listening))

    def _take(self, listener: int, channel: bytes, payload: bytes) -> None:
        number, sent_ns = HEAD.unpack_from(payload)
        self._latest_ns = time.monotonic_ns()
        if number == 0:
            if listener not in self._probed:
                self._probed.add(listener)
                self._audit.confirmed(listener, channel, 0.0)
            return
        during = self._moving_since_ns is not None and sent_ns >= self._moving_since_ns
        (self._moving if during else self._rest).add(self._latest_ns - sent_ns)
        self._audit.delivered(listener, channel, channel, number, 0.0)

    def _gap(self, listener: int) -> None:
        self._gaps += 1
        channel = self._clients.channels[listener // self._clients.listeners_per_channel]
        self._audit.gap(listener, channel, None, None, 0.0)

    async def _judge(self, published: Sequence[int]) -> Heard:
        """Wait until nothing comes any more, and judge."""
        deadline = time.monotonic() + DRAIN_S_MAX
        due = sum(published) * self._clients.listeners_per_channel
        self._latest_ns = max(self._latest_ns, time.monotonic_ns())
        while self._audit.totals.delivered < due and time.monotonic() < deadline:
            if time.monotonic_ns() - self._latest_ns > QUIET_S * 1e9:
                break
            await asyncio.sleep(AGAIN_S)
        for channel, count in zip(self._clients.channels, published, strict=True):
            self._audit.published_upto(channel, channel, count)
        self._audit.finish(0.0)
        return Heard(asdict(self._audit.totals), self._gaps, self._rest.counts, self._moving.counts)


def listen(pipe: Connection, clients: Clients) -> None:
    """Run the process of the listeners."""
    run(Listeners(clients).work(pipe))


# Publishers.


async def publish_until(pipe: Connection, clients: Clients) -> None:
    """Publish probes until the pipe says "begin", then numbered messages until it says "stop"; answer how many.

    Each publisher waits for an answer before its next message, as their order matters.
    """
    begun, stop = asyncio.Event(), asyncio.Event()
    padding = bytes(PAYLOAD_BYTES - HEAD.size)
    connect = TRANSPORTS[clients.transport]

    async def publish(index: int, channel: bytes) -> int:
        connected = connect(clients.url, lambda _channel, _payload: None, lambda: None)
        due = time.monotonic() + clients.interval_s * index / len(clients.channels)
        number = 0
        try:
            while not stop.is_set():
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due = max(due + clients.interval_s, time.monotonic())
                number += begun.is_set()
                await connected.publish(channel, HEAD.pack(number, time.monotonic_ns()) + padding)
        finally:
            await connected.close()
        return number

    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        publishing = [tasks.create_task(publish(*each)) for each in enumerate(clients.channels)]
        for event in (begun, stop):
            await loop.run_in_executor(None, pipe.recv)
            event.set()
    pipe.send([each.result() for each in publishing])


def publish(pipe: Connection, clients: Clients) -> None:
    """Run the process of the publishers."""
    run(publish_until(pipe, clients))
