"""One process of the demo's players, of its auditors, or of the performers of its festival.

Theory of operation
-------------------
The demo speaks to its workers in lines of JSON: orders come by stdin, events go by stdout. The first line says what
the worker is (:class:`WorkerOptions`). Then, for each order, there is an answer::

    start {at}                  players begin at this time of the machine's monotonic clock
    leave {stay_ratio}          players go home, all but this share of them
    stop                        players end after their present update      -> stopped, with what they published
    finish {published, failed}  wait until everything has arrived, judge    -> result

``ready`` is the first event; ``stats`` comes by itself each ``STATS_INTERVAL_S``. A worker whose stdin is closed
ends.

Each of them is a client of its own, with its own connections. *Auditors* listen on every tile, and on the channel of
the festival, from before the first update to the end, so they must get everything that anybody publishes. *Players*
come and go, which is harder to do right while channels move: an update must reach each player of the same process whose
subscription was confirmed before it was published. Both are judged by the checker that the simulator uses
(``dynamoth_sim.audit``). *Performers* only publish.
"""

from __future__ import annotations

import asyncio
import copy
import json
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import redis.exceptions

from dynamoth.errors import ClusterUnavailable
from dynamoth_cli.numbers import channel_name
from dynamoth_client.asyncio import GapInfo, PubSub, Redis
from dynamoth_daemon.event_loop import run
from dynamoth_demo.festival import Festival, Performer
from dynamoth_demo.latency import LatencyCounts
from dynamoth_sim.audit import Audit
from dynamoth_sim.load.rgame import GameWorld, Join, Leave, Player, Update, read_update

STATS_INTERVAL_S = 0.5
LINE_BYTES_MAX = 64 * 1024 * 1024
"""Bound of one order: what 10,000 players published on 100 tiles."""

ARRIVAL_POLL_S = 0.1
ARRIVAL_TIMEOUT_S = 15.0
"""An update that has not arrived this long after the last one was published is lost."""

QUIET_S = 1.0
"""Where a gap event covers all that is missing, this time without any delivery shows that nothing is under way."""

JOIN_DURATION_S = 2.0
"""The players join one after the other over this time, so that not all connect at once."""

CONFIRM_TIMEOUT_S = 30.0

ERRORS_MAX = 100
"""A worker gives up after this many failed calls of its clients. One is enough for an unclean audit."""

STORIES_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The first command of a worker. ``first`` and ``count`` number its players, auditors or performers.

    ``world`` and ``festival`` are the fields of ``GameWorld`` and ``Festival``; None where there is no festival.
    """

    role: str
    url: str
    world: dict[str, Any]
    seed: int
    first: int
    count: int
    payload_bytes: int
    festival: dict[str, Any] | None = None
    arrival_timeout_s: float = ARRIVAL_TIMEOUT_S
    #: Whether a server dies: messages may be lost if a gap event says so, and publishes may fail.
    losses_allowed: bool = False


class Worker(ABC):
    """The base of the workers: players, auditors and performers."""

    def __init__(self, options: WorkerOptions, tasks: asyncio.TaskGroup, audit: Audit) -> None:
        self.options = options
        self.audit = audit
        self.world = GameWorld(**options.world)
        self.festival = None if options.festival is None else Festival(**options.festival)
        #: Since the last ``stats``.
        self.latencies = LatencyCounts()
        #: Messages that were handed to our subscribers, the time of the latest, and calls of clients that failed.
        self.delivered = 0
        self.delivered_at = 0.0
        self.errors = 0
        #: Publisher, channel and number of each message whose publish failed.
        self.publishes_failed: list[tuple[int, str, int]] = []
        #: What went wrong, in words: the first ``STORIES_MAX``.
        self.stories: list[str] = []
        self._tasks = tasks
        #: Everything that runs besides reading orders.
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task until it ends or the worker does; a failed task ends the worker."""
        task = self._tasks.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def end(self) -> None:
        """Cancel everything that runs."""
        for task in self._running:
            task.cancel()

    @abstractmethod
    async def open(self, clients: AsyncExitStack) -> None:
        """Get ready; what must be closed in the end goes to ``clients``."""

    @abstractmethod
    def start(self, at: float) -> None:
        """Begin at a time of the monotonic clock."""

    @abstractmethod
    def leave(self, stay_ratio: float) -> None:
        """End some publishers: ``stay_ratio`` of them go on."""

    @abstractmethod
    async def stop(self) -> dict[str, Any]:
        """End publishing. Returns what ``stopped`` tells."""

    @abstractmethod
    def expect(self, published: list[tuple[int, str, int]], failed: list[tuple[int, str, int]]) -> None:
        """Record the final number of each publisher's messages, and the messages whose publish failed."""

    def stats(self) -> dict[str, Any]:
        """Return what has come since the last time (latencies), and since the beginning (all else)."""
        latencies, self.latencies = self.latencies, LatencyCounts()
        return {
            "delivered": self.delivered,
            "latencies": latencies.counts,
            "errors": self.errors,
            "publishes_failed": len(self.publishes_failed),
            **asdict(self.audit.totals),
        }

    async def finish(self) -> dict[str, Any]:
        """Wait, for a bounded time, until every expected update has arrived; end everything; judge."""
        deadline = time.monotonic() + self.options.arrival_timeout_s
        for _ in range(round(self.options.arrival_timeout_s / ARRIVAL_POLL_S)):
            if self._is_complete() or time.monotonic() >= deadline:
                break
            await asyncio.sleep(ARRIVAL_POLL_S)
        self.end()  # what arrives after the judgement would look like a second delivery, or a late one
        violations = self.audit.finish(time.monotonic())
        return {
            **self.stats(),
            "violations": self.audit.violations_count,
            "stories": [*map(str, violations[:STORIES_MAX]), *self.stories],
        }

    def _is_complete(self) -> bool:
        rehearsal = copy.deepcopy(self.audit)
        rehearsal.finish(time.monotonic())
        if rehearsal.violations_count > self.audit.violations_count:
            return False
        all_arrived = rehearsal.totals.covered_losses == self.audit.totals.covered_losses
        return all_arrived or time.monotonic() - self.delivered_at >= QUIET_S

    async def read(self, subscriber: int, pubsub: PubSub) -> None:
        """Handle the messages of one subscriber, without end."""
        while True:
            try:
                message = await pubsub.get_message(timeout=None)
            except redis.exceptions.RedisError as error:
                self.failed(f"subscriber {subscriber}: {error}")
                continue
            if message is None:
                continue
            kind, channel = message["type"], message["channel"]
            now = time.monotonic()
            if kind == "message":
                self.take(subscriber, channel, message["data"], now)
            elif kind == "subscribe":
                self.confirmed(subscriber, channel, now)
            elif kind == "unsubscribe":
                self.audit.ended(subscriber, channel, now)

    def take(self, subscriber: int, channel: bytes, payload: bytes, now: float) -> None:
        """Handle one message."""
        update = read_update(payload)
        self.delivered += 1
        self.delivered_at = now
        self.latencies.add(time.monotonic_ns() - update.sent_ns)
        self.judge(subscriber, channel, update.player, update.sequence, now)

    def confirmed(self, subscriber: int, channel: bytes, now: float) -> None:
        """Handle the confirmation of a subscription."""
        self.audit.confirmed(subscriber, channel, now)

    @abstractmethod
    def judge(self, subscriber: int, channel: bytes, player: int, sequence: int, now: float) -> None:
        """Show one delivery to the audit."""

    async def publish(self, client: Redis, update: Update, payload_bytes: int) -> None:
        """Publish, and tell the audit."""
        what = update.player, update.channel, update.sequence
        payload = update.payload(time.monotonic_ns(), payload_bytes)
        self.audit.published(*what, time.monotonic())
        try:
            await client.publish(update.channel, payload)
        except redis.exceptions.RedisError as error:
            self.audit.publish_ended(*what, time.monotonic(), failed=True)
            self.publishes_failed.append((update.player, update.channel.decode(), update.sequence))
            if not self.options.losses_allowed:
                self.failed(f"{self.options.role} {update.player}: publish: {error}")
        else:
            self.audit.publish_ended(*what, time.monotonic())

    def gap(self, subscriber: int, gap: GapInfo) -> None:
        """Handle a gap event. The audit knows publishers by their player's number, not by their client's id."""
        channel = gap.channel if isinstance(gap.channel, bytes) else gap.channel.encode()
        self.audit.gap(subscriber, channel, None, None, time.monotonic())
        self.tell_story(f"subscriber {subscriber}: gap on {channel_name(channel)}: {gap.reason}")

    def failed(self, story: str) -> None:
        """Count a call of a client that failed. Raises ClusterUnavailable when there are too many."""
        self.errors += 1
        self.tell_story(story)
        if self.errors >= ERRORS_MAX:
            raise ClusterUnavailable(f"{self.errors} calls of clients have failed, the last: {story}")

    def tell_story(self, story: str) -> None:
        """Record a failure in words, if there is room for one more."""
        if len(self.stories) < STORIES_MAX:
            self.stories.append(story)

    def pubsub(self, subscriber: int, client: Redis) -> PubSub:
        """Return the PubSub of a subscriber."""

        def on_gap(gap: GapInfo) -> None:
            self.gap(subscriber, gap)

        return client.pubsub(on_gap=on_gap)


class Auditors(Worker):
    """Subscribers on every tile and at the festival, from before the first update to the end."""

    def __init__(self, options: WorkerOptions, tasks: asyncio.TaskGroup) -> None:
        super().__init__(options, tasks, Audit(live=False, losses_allowed=options.losses_allowed))
        #: Subscriptions that are not confirmed yet.
        self._awaited: set[tuple[int, bytes]] = set()
        self._all_confirmed = asyncio.Event()

    async def open(self, clients: AsyncExitStack) -> None:
        """Subscribe to everything, and wait until all subscriptions are confirmed."""
        channels = self.world.channels()
        if self.festival is not None:
            channels.append(self.festival.channel)
        for number in range(self.options.first, self.options.first + self.options.count):
            client = await clients.enter_async_context(Redis.from_url(self.options.url))
            pubsub = await clients.enter_async_context(self.pubsub(number, client))
            self._awaited.update((number, channel) for channel in channels)
            await pubsub.subscribe(*channels)
            self.spawn(self.read(number, pubsub))
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await self._all_confirmed.wait()
        except TimeoutError as error:
            text = f"{len(self._awaited)} subscriptions were not confirmed within {CONFIRM_TIMEOUT_S:g} s"
            raise ClusterUnavailable(f"{text}: see the logs of the agents and the balancer") from error

    def confirmed(self, subscriber: int, channel: bytes, now: float) -> None:
        """Handle the confirmation of a subscription."""
        super().confirmed(subscriber, channel, now)
        self._awaited.discard((subscriber, channel))
        if not self._awaited:
            self._all_confirmed.set()

    def start(self, at: float) -> None:
        """Keep listening."""

    def leave(self, stay_ratio: float) -> None:
        """Keep listening."""

    async def stop(self) -> dict[str, Any]:
        """Keep listening."""
        return {}

    def expect(self, published: list[tuple[int, str, int]], failed: list[tuple[int, str, int]]) -> None:
        """Expect everything that was published."""
        for player, channel, sequence in published:
            self.audit.published_upto(player, channel.encode(), sequence)
        for player, channel, sequence in failed:
            self.audit.publish_failed(player, channel.encode(), sequence)

    def judge(self, subscriber: int, channel: bytes, player: int, sequence: int, now: float) -> None:
        """Every update is expected."""
        self.audit.delivered(subscriber, channel, player, sequence, now)


class Publishers(Worker):
    """The base of players and performers."""

    def __init__(self, options: WorkerOptions, tasks: asyncio.TaskGroup) -> None:
        super().__init__(options, tasks, Audit(live=True, losses_allowed=options.losses_allowed))
        self.numbers = range(options.first, options.first + options.count)
        self._clients: dict[int, tuple[Redis, PubSub]] = {}
        self._publishers: list[Player | Performer] = []
        #: Publishers that have not finished their last message.
        self._publishing = 0
        #: Numbers of the publishers that end before the demo does.
        self._leaving: set[int] = set()
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def payload_bytes(self) -> int:
        """The size of a message."""
        return self.options.payload_bytes

    @abstractmethod
    def make_publisher(self, index: int, number: int, at: float) -> Player | Performer:
        """Return the publisher ``number``, the ``index``-th of ours, for a demo that begins ``at``."""

    async def open(self, clients: AsyncExitStack) -> None:
        """Make the clients. They connect when they join or publish."""
        for number in self.numbers:
            client = await clients.enter_async_context(Redis.from_url(self.options.url))
            self._clients[number] = client, await clients.enter_async_context(self.pubsub(number, client))

    def start(self, at: float) -> None:
        """Begin to publish, each at its time."""
        for index, number in enumerate(self.numbers):
            publisher = self.make_publisher(index, number, at)
            self._publishers.append(publisher)
            self._publishing += 1
            self.spawn(self._until_end(publisher))

    async def _until_end(self, publisher: Player | Performer) -> None:
        await self._play(publisher)
        self._publishing -= 1
        if not self._publishing:
            self._stopped.set()

    async def _play(self, publisher: Player | Performer) -> None:
        """Do what a publisher has to do, until there is nothing more or the demo stops us."""
        client, pubsub = self._clients[publisher.number]
        reading = False
        while (deadline := publisher.deadline()) is not None:
            if await self.stopped_within(deadline - time.monotonic()):
                break
            if publisher.number in self._leaving:
                for channel in publisher.sequences:
                    self.audit.ending(publisher.number, channel)
                await pubsub.unsubscribe()
                break
            for action in publisher.step(time.monotonic()):
                match action:
                    case Join(channel):
                        await pubsub.subscribe(channel)
                        if not reading:
                            self.spawn(self.read(publisher.number, pubsub))
                            reading = True
                    case Leave(channel):
                        self.audit.ending(publisher.number, channel)
                        await pubsub.unsubscribe(channel)
                    case Update():
                        await self.publish(client, action, self.payload_bytes)

    def leave(self, stay_ratio: float) -> None:
        """End those with the highest numbers, each when its next message is due."""
        self._leaving.update(self.numbers[round(len(self.numbers) * stay_ratio) :])

    async def stop(self) -> dict[str, Any]:
        """Wait until every publisher has finished its present message.

        Returns what was ``published``, as publisher, channel and number of the latest, the messages that ``failed``,
        and how many were ``skipped``.
        """
        self._stopping.set()
        if self._publishing:
            await self._stopped.wait()
        return {
            "published": [
                (publisher.number, channel.decode(), sequence)
                for publisher in self._publishers
                for channel, sequence in publisher.sequences.items()
            ],
            "failed": self.publishes_failed,
            "skipped": sum(publisher.skipped for publisher in self._publishers),
        }

    async def stopped_within(self, duration_s: float) -> bool:
        """Wait for a time, or until the demo stops us; tell whether it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, duration_s)):
                await self._stopping.wait()
        return self._stopping.is_set()

    def expect(self, published: list[tuple[int, str, int]], failed: list[tuple[int, str, int]]) -> None:
        """Ignore our own messages: the audit knows them since they were published."""

    def judge(self, subscriber: int, channel: bytes, player: int, sequence: int, now: float) -> None:
        """Only of the publishers of this process do we know what was published before what."""
        if player in self.numbers:
            self.audit.delivered(subscriber, channel, player, sequence, now)


class Players(Publishers):
    """The players."""

    def make_publisher(self, index: int, number: int, at: float) -> Player:
        """Return a player; they join one after the other."""
        start_s = at + JOIN_DURATION_S * index / self.options.count
        return Player(number, self.world, Random(f"{self.options.seed}:{number}"), start_s, game_start_s=at)


class Performers(Publishers):
    """The performers of the festival."""

    @property
    def payload_bytes(self) -> int:
        """The size of a message."""
        assert self.festival is not None, "there are performers where there is a festival"
        return self.festival.payload_bytes

    def make_publisher(self, index: int, number: int, at: float) -> Performer:
        """Return a performer of the festival."""
        assert self.festival is not None, "there are performers where there is a festival"
        return Performer(number, index, self.festival, start_s=at)


async def read_orders() -> AsyncGenerator[dict[str, Any]]:
    """Yield the orders of the demo, one per line of stdin."""
    reader = asyncio.StreamReader(LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def _send_event(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def _report(worker: Worker) -> None:
    while True:
        await asyncio.sleep(STATS_INTERVAL_S)
        _send_event("stats", **worker.stats())


async def _obey(orders: AsyncGenerator[dict[str, Any]], worker: Worker) -> None:
    async for order in orders:
        match order["order"]:
            case "start":
                worker.start(order["at"])
            case "leave":
                worker.leave(order["stay_ratio"])
            case "stop":
                _send_event("stopped", **await worker.stop())
            case "finish":
                worker.expect(order["published"], order["failed"])
                _send_event("result", **await worker.finish())
            case unknown:
                raise ValueError(f"the demo gives an order that its worker does not know: {unknown}")


async def work() -> None:
    """Run a worker, from the first line to the end of stdin."""
    orders = read_orders()
    first = await anext(orders, None)
    if first is None:
        return
    options = WorkerOptions(**first)
    kinds: dict[str, type[Players | Auditors | Performers]]
    kinds = {"players": Players, "auditors": Auditors, "performers": Performers}
    async with AsyncExitStack() as clients, asyncio.TaskGroup() as tasks:
        worker = kinds[options.role](options, tasks)
        await worker.open(clients)
        _send_event("ready")
        worker.spawn(_report(worker))
        await _obey(orders, worker)
        worker.end()


def main() -> None:
    """Run the worker's process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each player has some connections
    run(work())


if __name__ == "__main__":
    main()
