"""One process of the demo's end users, and of backends that publish.

It reads orders as lines of JSON from stdin, and writes events to stdout::

    publish            backends and publishing users begin
    stop               they end                                    -> stopped, with what was published and what failed
    judge {published, failed}   wait until everything has come, judge   -> result

``ready`` is the first event: every user's subscriptions are confirmed. ``stats`` comes by itself. Users subscribe
before anything is published, so everything is due to each of them; the simulator's checker judges.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import redis.exceptions

from dynamoth.errors import DynamothError
from dynamoth_client.asyncio import Redis
from dynamoth_daemon.event_loop import run
from dynamoth_demo.latency import LatencyCounts
from dynamoth_sim.audit import Audit
from dynamoth_user import Client, Gap

STATS_INTERVAL_S = 0.5
ARRIVAL_TIMEOUT_S = 20.0
QUIET_S = 2.0
"""Nothing is under way when nothing has come for this time."""

LINE_BYTES_MAX = 16 * 1024 * 1024
CONNECTS_AT_ONCE = 50
STORIES_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersOptions:
    """The first line of a worker: what it is."""

    name: str
    #: The cluster, for backends; brokers, the one first that users of this process prefer.
    url: str
    brokers: list[str]
    token: str
    users: int
    logged: list[str]
    live: list[str]
    #: How many channels of each kind a user has.
    logged_per_user: int
    live_per_user: int
    #: Publications per second of this process, on logged and on live channels.
    logged_per_s: float
    live_per_s: float
    seed: int


class Worker:
    """The users of one process."""

    def __init__(self, options: UsersOptions) -> None:
        self._options = options
        self._random = Random(options.seed)
        self._audit = Audit(losses_allowed=True, live=False)
        self._logged_audit = Audit(losses_allowed=False, failures_allowed=True, live=False)
        self._latencies = LatencyCounts()
        self._clients: list[Client] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: list[asyncio.Task[None]] = []
        self._is_publishing = False
        self._delivered_at = 0.0
        self._published: Counter[tuple[str, str]] = Counter()
        self._failed: list[tuple[str, str, int]] = []
        self._gaps = 0
        #: Why users have ended; none should.
        self._faults: list[str] = []

    async def start(self) -> None:
        """Connect all users, and subscribe."""
        options = self._options
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def join(number: int) -> None:
            async with gate:
                await self._join(f"{options.name}{number}")

        await asyncio.gather(*(join(number) for number in range(options.users)))

    async def _join(self, name: str) -> None:
        options = self._options
        client = Client(options.brokers, token=options.token)
        await client.__aenter__()
        self._clients.append(client)
        chosen = self._random.sample(options.logged, options.logged_per_user)
        chosen += self._random.sample(options.live, options.live_per_user)
        for channel in chosen:
            subscription = await client.subscribe(channel)
            audit = self._audit_of(channel)
            audit.confirmed(name, channel.encode(), time.monotonic())
            self._spawn(self._listen(name, channel, subscription, audit))

    def _audit_of(self, channel: str) -> Audit:
        return self._logged_audit if channel in self._options.logged else self._audit

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faults.append(f"a user has ended: {error!r}")

    async def _listen(self, name: str, channel: str, subscription: Any, audit: Audit) -> None:
        key = channel.encode()
        async for item in subscription:
            now = time.monotonic()
            self._delivered_at = now
            if isinstance(item, Gap):
                self._gaps += 1
                audit.gap(name, key, None, None, now, item.reason)
                continue
            publisher, number, sent_ns = item.text.split(" ")
            self._latencies.add(time.monotonic_ns() - int(sent_ns))
            audit.delivered(name, key, publisher, int(number), now)

    # Publishing.

    def begin_publishing(self) -> None:
        """Let backends publish on live channels, and some users on logged ones."""
        options = self._options
        self._is_publishing = True
        self._publishing = [
            asyncio.create_task(self._publish_live()),
            *(
                asyncio.create_task(self._publish_logged(client, index))
                for index, client in enumerate(self._clients[:4])
            ),
        ]
        assert options.users >= 4, "four users publish"

    async def _publish_live(self) -> None:
        options = self._options
        publisher = f"{options.name}backend"
        client = Redis.from_url(options.url)
        try:
            while self._is_publishing:
                channel = self._random.choice(options.live)
                await self._publish(publisher, channel, client.publish)
                await asyncio.sleep(self._random.random() * 2 / options.live_per_s)
        finally:
            await client.aclose()

    async def _publish_logged(self, client: Client, index: int) -> None:
        options = self._options
        failures = 0
        publisher = f"{options.name}p{index}"
        while self._is_publishing:
            channel = self._random.choice(options.logged)
            if not await self._publish(publisher, channel, client.publish):
                failures += 1  # it may still be stored, behind later ones
                publisher = f"{options.name}p{index}-{failures}"
            await asyncio.sleep(self._random.random() * 2 * 4 / options.logged_per_s)

    async def _publish(self, publisher: str, channel: str, publish: Any) -> bool:
        self._published[publisher, channel] += 1
        number = self._published[publisher, channel]
        try:
            await publish(channel, f"{publisher} {number} {time.monotonic_ns()}".encode())
        except (DynamothError, redis.exceptions.RedisError):
            self._failed.append((publisher, channel, number))
            return False
        return True

    async def stop_publishing(self) -> dict[str, Any]:
        """End publishing; return what was published, and what failed."""
        self._is_publishing = False
        await asyncio.gather(*self._publishing)
        published = [[publisher, channel, count] for (publisher, channel), count in self._published.items()]
        return {"published": published, "failed": self._failed}

    # Judging.

    async def judge(self, published: Iterable[list[Any]], failed: Iterable[list[Any]]) -> dict[str, Any]:
        """Wait until everything has come, and judge."""
        await self._until_quiet()
        for publisher, channel, number in failed:
            self._audit_of(channel).publish_failed(publisher, channel.encode(), number)
        for publisher, channel, count in published:
            self._audit_of(channel).published_upto(publisher, channel.encode(), count)
        now = time.monotonic()
        violations = [*self._faults, *self._audit.finish(now), *self._logged_audit.finish(now)]
        totals = asdict(self._audit.totals + self._logged_audit.totals)
        return {
            "totals": totals,
            "violations": len(violations),
            "stories": [str(each)[:500] for each in violations[:STORIES_MAX]],
        }

    async def _until_quiet(self) -> None:
        end = time.monotonic() + ARRIVAL_TIMEOUT_S
        while True:
            left_s = min(self._delivered_at + QUIET_S, end) - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    def stats(self) -> dict[str, Any]:
        """Return what has happened since the start, and latencies since the last call."""
        latencies, self._latencies = self._latencies, LatencyCounts()
        where = Counter(client.broker for client in self._clients)
        return {
            "users": {broker or "": count for broker, count in where.items()},
            "moved": sum(client.moved for client in self._clients),
            "delivered": self._audit.totals.delivered + self._logged_audit.totals.delivered,
            "gaps": self._gaps,
            "latencies": {str(of): count for of, count in latencies.counts.items()},
        }

    async def close(self) -> None:
        """End everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)


def _say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def _say_stats(worker: Worker) -> None:
    while True:
        await asyncio.sleep(STATS_INTERVAL_S)
        _say("stats", **worker.stats())


async def _main() -> None:
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    worker = Worker(UsersOptions(**json.loads(await reader.readline())))
    await worker.start()
    _say("ready")
    stats = asyncio.create_task(_say_stats(worker))
    try:
        while line := await reader.readline():
            order = json.loads(line)
            match order.pop("order"):
                case "publish":
                    worker.begin_publishing()
                case "stop":
                    _say("stopped", **await worker.stop_publishing())
                case "judge":
                    _say("result", **await worker.judge(**order))
                case other:
                    raise AssertionError(f"not an order: {other!r}")
    finally:
        stats.cancel()
        await worker.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run(_main())
