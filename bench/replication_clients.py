"""The clients of the benchmark of replication: real ones, in a few processes that can be made to hold more of them.

Every subscriber is a PubSub, with links of its own; every publisher a ``Redis`` client, with links of its own. So the
servers see as many connections as if each client were a process.

A *step* is some seconds of publishing with a number of clients that stays the same. A publisher publishes when it is
time to, whether its previous message was answered or not: clients that wait for an overloaded server would hide that
it is. The response time is measured from the call of ``publish`` to the receipt, by one clock. All that is delivered
is judged by the checker that the simulator uses.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any

import redis.exceptions

from bench.processors import BusyMeter
from bench.workers import Worker
from dynamoth_client.asyncio import GapInfo, Redis
from dynamoth_daemon.event_loop import run
from dynamoth_demo.latency import LatencyCounts
from dynamoth_sim.audit import Audit

HEAD = Struct(">IIIQ")
"""Step, publisher, number, time of sending in nanoseconds."""

INTERVAL_S = 0.1
"""Each publisher publishes 10 messages per second (Dynamoth, section V-C)."""

WARM_UP_MESSAGES = 2
"""The first one takes a new publisher to the channel's home, the second one where the channel is."""
WARM_UP_STEP = 0

CONFIRMATION_TIMEOUT_S = 60.0
DRAIN_S_MAX = 30.0
"""How long a step waits for what is under way."""
QUIET_S = 2.0
"""When nothing has come for this long, nothing will: a lost connection is made again within a second."""
POLL_INTERVAL_S = 0.02

GROW_AT_ONCE = 50
"""Clients that connect at the same time. An accept queue of Redis holds 511."""


@dataclass(frozen=True)
class Step:
    """The result of one step. Latencies in milliseconds; None when nothing was delivered."""

    subscribers: int
    publishers: int
    published: int
    publish_failed: int
    due: int
    """Deliveries: what was published, times subscribers."""
    delivered: int
    lost_reported: int
    """Lost, and reported by a gap event, as with a lost connection."""
    lost_silently: int
    duplicated: int
    reordered: int
    response_ms_p50: float | None
    response_ms_p99: float | None
    busy_ratio: float | None
    """As of ``BusyMeter``."""

    @property
    def delivered_ratio(self) -> float:
        """The share of the due deliveries that came."""
        return (self.delivered - self.duplicated) / self.due

    def held(self, response_ms_max: float) -> bool:
        """Tell whether all was delivered, as it should be, and p99 of the response time is in order."""
        clean = self.delivered == self.due and not (self.duplicated or self.reordered or self.publish_failed)
        return clean and self.response_ms_p99 is not None and self.response_ms_p99 <= response_ms_max


class Clients:
    """The clients of one channel, in processes of their own.

    As a context manager; the processes end on exit.
    """

    def __init__(self, url: str, channel: bytes, payload_bytes: int, processes: tuple[int, int]) -> None:
        """Start the processes, without clients.

        Args:
            url: the cluster.
            channel: what they all use.
            payload_bytes: of each message.
            processes: for subscribers, for publishers.

        """
        assert payload_bytes >= HEAD.size, "a message has its head"
        self._subscribers = [Worker(subscribe, url, channel) for _ in range(processes[0])]
        self._publishers = [Worker(publish, url, channel, payload_bytes) for _ in range(processes[1])]
        self._counts = {"subscribers": 0, "publishers": 0}
        self._step = WARM_UP_STEP

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._publishers, *self._subscribers):
            worker.stop()

    def grow(self, subscribers: int, publishers: int) -> None:
        """Add clients up to these numbers. Subscriptions are confirmed when it returns."""
        for kind, workers, wanted in (
            ("subscribers", self._subscribers, subscribers),
            ("publishers", self._publishers, publishers),
        ):
            for index, worker in enumerate(workers):
                worker.send(("grow", range(self._counts[kind] + index, wanted, len(workers))))
            for worker in workers:
                worker.receive()
            self._counts[kind] = wanted

    def step(self, duration_s: float) -> Step:
        """Publish for ``duration_s``, wait for what is under way, and return what came of it."""
        self._step += 1
        for worker in self._subscribers:
            worker.send(("begin", self._step))
        for worker in self._subscribers:
            worker.receive()
        meter = BusyMeter()
        for worker in self._publishers:
            worker.send(("publish", self._step, duration_s))
        sent: list[_Sent] = [worker.receive() for worker in self._publishers]
        busy_ratio = meter.ratio()
        published = {publisher: count for part in sent for publisher, count in part.published.items()}
        for worker in self._subscribers:
            worker.send(("end", published))
        answers: list[_Received] = [worker.receive() for worker in self._subscribers]
        return self._sum(published, sum(part.failed for part in sent), answers, busy_ratio)

    def _sum(
        self, published: dict[int, int], failed: int, answers: Sequence[_Received], busy_ratio: float | None
    ) -> Step:
        latencies = LatencyCounts()
        for answer in answers:
            latencies.merge(answer.latencies)

        def total(name: str) -> int:
            return sum(answer.totals[name] for answer in answers)

        count = sum(published.values())
        return Step(
            subscribers=self._counts["subscribers"],
            publishers=self._counts["publishers"],
            published=count,
            publish_failed=failed,
            due=count * self._counts["subscribers"],
            delivered=total("delivered"),
            lost_reported=total("covered_losses"),
            lost_silently=total("lost"),
            duplicated=total("duplicated"),
            reordered=total("reordered"),
            response_ms_p50=latencies.quantile_ms(0.5),
            response_ms_p99=latencies.quantile_ms(0.99),
            busy_ratio=busy_ratio,
        )


# Subscribers.


@dataclass(frozen=True)
class _Received:
    totals: dict[str, int]
    latencies: dict[int, int]


class Subscribers:
    """The subscribers of one process."""

    def __init__(self, channel: bytes) -> None:
        self._channel = channel
        self._numbers: list[int] = []
        self._readers: set[asyncio.Task[None]] = set()
        self._confirmed: set[int] = set()
        self._begin(WARM_UP_STEP)

    async def work(self, pipe: Connection, url: str) -> None:
        """Do what the pipe says, until it ends."""
        loop = asyncio.get_running_loop()
        async with Redis.from_url(url) as client:
            while True:
                match await loop.run_in_executor(None, pipe.recv):
                    case "grow", numbers:
                        await self._grow(client, numbers)
                        pipe.send(None)
                    case "begin", step:
                        self._begin(step)
                        pipe.send(None)
                    case "end", published:
                        pipe.send(await self._end(published))
                    case command:
                        raise AssertionError(f"not a command: {command!r}")

    async def _grow(self, client: Redis, numbers: range) -> None:
        for start in range(0, len(numbers), GROW_AT_ONCE):
            some = numbers[start : start + GROW_AT_ONCE]
            for number in some:
                pubsub = client.pubsub(on_gap=partial(self._on_gap, number))
                await pubsub.subscribe(self._channel)
                self._readers.add(asyncio.create_task(self._read(number, pubsub)))
            self._numbers += some
            async with asyncio.timeout(CONFIRMATION_TIMEOUT_S):
                while len(self._confirmed) < len(self._numbers):
                    self._check()
                    await asyncio.sleep(POLL_INTERVAL_S)

    def _begin(self, step: int) -> None:
        self._step = step
        self._audit = Audit(live=False, losses_allowed=True)
        self._latencies = LatencyCounts()
        self._latest_ns = time.monotonic_ns()
        for number in self._numbers:
            self._audit.confirmed(number, self._channel, 0.0)

    async def _end(self, published: dict[int, int]) -> _Received:
        """Wait until everything has come, or nothing does any more; judge it."""
        due = sum(published.values()) * len(self._numbers)
        self._latest_ns = max(self._latest_ns, time.monotonic_ns())
        deadline = time.monotonic() + DRAIN_S_MAX
        while self._audit.totals.delivered < due and time.monotonic() < deadline:
            if time.monotonic_ns() - self._latest_ns > QUIET_S * 1e9:
                break
            self._check()
            await asyncio.sleep(POLL_INTERVAL_S)
        for publisher, count in published.items():
            self._audit.published_upto(publisher, self._channel, count)
        self._audit.finish(0.0)
        return _Received(asdict(self._audit.totals), dict(self._latencies.counts))

    async def _read(self, number: int, pubsub: Any) -> None:
        async for message in pubsub.listen():
            if message["type"] == "message":
                self._take(number, message["data"])
            elif message["type"] == "subscribe":
                self._confirmed.add(number)

    def _take(self, subscriber: int, payload: bytes) -> None:
        step, publisher, number, sent_ns = HEAD.unpack_from(payload)
        if step == self._step and step != WARM_UP_STEP:
            self._latest_ns = time.monotonic_ns()
            self._latencies.add(self._latest_ns - sent_ns)
            self._audit.delivered(subscriber, self._channel, publisher, number, 0.0)

    def _on_gap(self, subscriber: int, gap: GapInfo) -> None:
        self._audit.gap(subscriber, self._channel, None, None, 0.0)

    def _check(self) -> None:
        """Raise the exception that ended a reader, if one did."""
        for reader in self._readers:
            if reader.done():
                reader.result()


def subscribe(pipe: Connection, url: str, channel: bytes) -> None:
    """Run one process of subscribers."""
    run(Subscribers(channel).work(pipe, url))


# Publishers.


@dataclass(frozen=True)
class _Sent:
    #: By publisher.
    published: dict[int, int]
    failed: int


class Publishers:
    """The publishers of one process."""

    def __init__(self, channel: bytes, payload_bytes: int) -> None:
        self._channel = channel
        self._padding = bytes(payload_bytes - HEAD.size)
        self._clients: dict[int, Redis] = {}

    async def work(self, pipe: Connection, url: str) -> None:
        """Do what the pipe says, until it ends."""
        loop = asyncio.get_running_loop()
        while True:
            match await loop.run_in_executor(None, pipe.recv):
                case "grow", numbers:
                    for start in range(0, len(numbers), GROW_AT_ONCE):
                        some = numbers[start : start + GROW_AT_ONCE]
                        await asyncio.gather(*(self._add(url, number) for number in some))
                    pipe.send(None)
                case "publish", step, duration_s:
                    pipe.send(await self._publish(step, duration_s))
                case command:
                    raise AssertionError(f"not a command: {command!r}")

    async def _add(self, url: str, publisher: int) -> None:
        client = self._clients[publisher] = Redis.from_url(url)
        for number in range(WARM_UP_MESSAGES):
            await client.publish(self._channel, HEAD.pack(WARM_UP_STEP, publisher, number + 1, 0))

    async def _publish(self, step: int, duration_s: float) -> _Sent:
        count = round(duration_s / INTERVAL_S)
        began = time.monotonic()
        failed = await asyncio.gather(*(self._keep_time(publisher, step, count, began) for publisher in self._clients))
        return _Sent(dict.fromkeys(self._clients, count), sum(failed))

    async def _keep_time(self, publisher: int, step: int, count: int, began: float) -> int:
        """Publish ``count`` messages on time, as one publisher; return how many of them failed."""
        client = self._clients[publisher]
        phase_s = INTERVAL_S * random.Random(publisher).random()
        outcomes: list[asyncio.Task[int]] = []  # ``count`` of them at most
        for index in range(count):
            await asyncio.sleep(max(0.0, began + phase_s + INTERVAL_S * index - time.monotonic()))
            outcomes.append(asyncio.create_task(self._publish_one(client, publisher, step, index + 1)))
        return sum(await asyncio.gather(*outcomes))

    async def _publish_one(self, client: Redis, publisher: int, step: int, number: int) -> bool:
        """Publish; return whether that failed."""
        message = HEAD.pack(step, publisher, number, time.monotonic_ns()) + self._padding
        try:
            await client.publish(self._channel, message)
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return True  # the step counts it
        return False


def publish(pipe: Connection, url: str, channel: bytes, payload_bytes: int) -> None:
    """Run one process of publishers."""
    run(Publishers(channel, payload_bytes).work(pipe, url))
