"""The clients of ``bench.churn``: they come, publish, listen, idle and go, all the time.

Each process has some *slots*. In each slot one client after the other lives one of the lives below, chosen at random by
the seed. All that a client sees goes into the journal of its process (``bench.churn_journal``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis.exceptions

from bench import churn_journal as journal
from bench.churn_journal import BATCH, Journal, client_name, read_tag, tag
from dynamoth_client.asyncio import PubSub, Redis, from_url
from dynamoth_daemon.event_loop import run
from dynamoth_sim.load.rgame import GameWorld, Join, Leave, Player, Update

QUIET_S = 3.0
"""When nothing was delivered for this long after the last publish, nothing more is on its way ..."""
QUIET_S_MAX = 40.0
"""... and a cluster that is never quiet is judged after this long."""
LEAVE_TIMEOUT_S = 10.0
LAG_INTERVAL_S = 0.1
LAG_NOTED_S = 0.2
UNSUBSCRIBE_RATIO = 0.5
"""This share of the listeners unsubscribes in the end; the others just close."""


@dataclass(frozen=True)
class Slots:
    """The parameters of one process of clients."""

    url: str
    channels: tuple[bytes, ...]
    #: Tells the processes apart, in names and in chance.
    process: int
    seed: int
    count: int
    journal: Path
    #: Mean length of a client's life.
    life_s: float
    #: Mean time between two messages of a client that publishes all its life.
    interval_s: float
    #: How many players of RGame there are besides, from which number on, and the name of their world.
    players: int = 0
    first_player: int = 0
    world: str = "rgame"
    #: Whether the process may be killed at any time, so that its journal must be complete at any time.
    may_be_killed: bool = False


class Clients:
    """The clients of one process."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._chance = random.Random(f"{slots.seed} {slots.process}")
        self._journal = Journal(slots.journal, 1 if slots.may_be_killed else BATCH)
        self._world = GameWorld(name=slots.world)
        self._stopping = asyncio.Event()
        self._lives = 0
        self._deliveries = 0
        #: (publisher, channel) to the number of its latest message.
        self._numbers: dict[tuple[str, bytes], int] = {}

    async def work(self, pipe: Connection) -> None:
        """Send ``ready`` and begin; stop when the pipe says so, and answer how many clients there were."""
        loop = asyncio.get_running_loop()
        pipe.send("ready")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_lag())
            for slot in range(self._slots.count):
                tasks.create_task(self._slot(slot))
            for number in range(self._slots.players):
                tasks.create_task(self._player(self._slots.first_player + number))
            await loop.run_in_executor(None, pipe.recv)
            self._stopping.set()
        self._journal.close()
        pipe.send(self._lives)

    async def _watch_lag(self) -> None:
        """Note when the event loop is late."""
        while not self._stopping.is_set():
            due = time.monotonic() + LAG_INTERVAL_S
            await self._pause(LAG_INTERVAL_S)
            if (lag_s := time.monotonic() - due) >= LAG_NOTED_S:
                self._journal.note(journal.LAG, self._slots.process, lag_s)

    # One client after the other.

    async def _slot(self, slot: int) -> None:
        lives = [*2 * [self._visit], *3 * [self._listen], self._idle, self._talk]
        # A fifth of the listeners stay to the end: everything is due to them.
        stays = slot % 5 == 0
        await self._pause(self._chance.uniform(0.0, 2.0))
        while not self._stopping.is_set():
            name = self._next_name()
            live = self._stay if stays else self._chance.choice(lives)
            await self._live(live(name))

    async def _player(self, number: int) -> None:
        """Play to the end of the run; a player whose client fails comes back as another."""
        await self._pause(self._chance.uniform(0.0, 2.0))
        while not self._stopping.is_set():
            await self._live(self._play(self._next_name(), number))

    def _next_name(self) -> str:
        self._lives += 1
        return client_name(self._slots.process, self._lives)

    async def _live(self, life: Coroutine[Any, Any, None]) -> None:
        try:
            await life
        except redis.exceptions.RedisError as error:
            self._journal.note(journal.ERROR, f"{type(error).__name__}: {error}")
            await self._pause(0.5)

    async def _play(self, name: str, number: int) -> None:
        """Walk about the world of RGame: subscribe to the tile where one is, and publish there three times a second."""
        player = Player(number, self._world, random.Random(f"{self._slots.seed} {name}"), time.monotonic())
        async with from_url(self._slots.url) as client, client.pubsub(gaps=True) as pubsub:
            reading: asyncio.Task[None] | None = None
            try:
                while not self._stopping.is_set() and (reading is None or not reading.done()):
                    await self._pause(player.deadline() - time.monotonic())
                    for action in player.step(time.monotonic()):
                        match action:
                            case Join(channel):
                                await pubsub.subscribe(channel)
                                reading = reading or asyncio.create_task(self._read(name, pubsub, None))
                            case Leave(channel):
                                self._journal.note(journal.ENDING, name, channel)
                                await pubsub.unsubscribe(channel)
                            case Update(channel):
                                await self._publish(client, name, channel)
                await self._until_quiet()
            finally:
                if reading is not None:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                self._journal.note(journal.DIED, name)
            if reading is not None and not reading.cancelled() and (error := reading.exception()) is not None:
                raise error

    async def _visit(self, name: str) -> None:
        """Publish once, on a channel or two, and go at once or soon."""
        async with from_url(self._slots.url) as client:
            for channel in self._some(2):
                await self._publish(client, name, channel)
            await self._pause(self._chance.choice((0.0, self._short())))

    async def _idle(self, name: str) -> None:
        """Publish, say nothing for long, publish again: by then the route is old."""
        async with from_url(self._slots.url) as client:
            channels = self._some(2)
            for _ in range(3):
                for channel in channels:
                    await self._publish(client, name, channel)
                await self._pause(self._life())

    async def _talk(self, name: str) -> None:
        """Publish all the time."""
        async with from_url(self._slots.url) as client:
            channels = self._some(3)
            for _ in range(max(1, round(self._life() / self._slots.interval_s))):
                if self._stopping.is_set():
                    return
                await self._publish(client, name, self._chance.choice(channels))
                await self._pause(self._chance.expovariate(1 / self._slots.interval_s))

    async def _listen(self, name: str) -> None:
        """Subscribe for a while, then unsubscribe or just go."""
        await self._subscribed(name, self._some(4), self._life())

    async def _stay(self, name: str) -> None:
        """Subscribe to the end."""
        await self._subscribed(name, self._some(8), None)

    # What they do.

    async def _publish(self, client: Redis, name: str, channel: bytes) -> None:
        if self._stopping.is_set():
            return
        number = self._numbers.get((name, channel), 0) + 1
        self._numbers[name, channel] = number
        self._journal.note(journal.PUBLISHED, name, channel, number)
        why: str | None = None
        try:
            await client.publish(channel, tag(name, number))
        except redis.exceptions.RedisError as error:
            why = f"{type(error).__name__}: {error}"
        self._journal.note(journal.PUBLISH_ENDED, name, channel, number, why)

    async def _subscribed(self, name: str, channels: list[bytes], life_s: float | None) -> None:
        async with from_url(self._slots.url) as client, client.pubsub(gaps=True) as pubsub:
            await pubsub.subscribe(*channels)
            reading = asyncio.create_task(self._read(name, pubsub, set(channels)))
            living = asyncio.create_task(self._until_quiet() if life_s is None else self._pause(life_s))
            try:
                await asyncio.wait({reading, living}, return_when=asyncio.FIRST_COMPLETED)
                for channel in channels:
                    self._journal.note(journal.ENDING, name, channel)
                if self._chance.random() < UNSUBSCRIBE_RATIO and not reading.done():
                    await pubsub.unsubscribe()
                    await asyncio.wait({reading}, timeout=LEAVE_TIMEOUT_S)
            finally:
                living.cancel()
                reading.cancel()
                await asyncio.gather(living, reading, return_exceptions=True)
                self._journal.note(journal.DIED, name)
            if not reading.cancelled() and (error := reading.exception()) is not None:
                raise error

    async def _read(self, name: str, pubsub: PubSub, subscribed: set[bytes] | None) -> None:
        """Note what comes, until nothing of ``subscribed`` is left; None: without end."""
        note = self._journal.note
        async for message in pubsub.listen():
            kind, channel, data = message["type"], message["channel"], message["data"]
            if kind == "message":
                self._deliveries += 1
                if (tagged := read_tag(data)) is not None:
                    note(journal.DELIVERED, name, channel, *tagged)
            elif kind == "subscribe":
                note(journal.CONFIRMED, name, channel)
            elif kind == "unsubscribe":
                note(journal.ENDED, name, channel)
                if subscribed is not None:
                    subscribed.discard(channel)
                    if not subscribed:
                        return
            elif kind == "gap":
                note(journal.GAP, name, channel, data.publisher, data.count, data.reason)

    # Time.

    async def _pause(self, duration_s: float) -> None:
        """Wait for a time, or until the end of the run if that is earlier."""
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._stopping.wait()

    async def _until_quiet(self) -> None:
        """Wait for the end of the run, and then until nothing is delivered any more."""
        await self._stopping.wait()
        for _ in range(round(QUIET_S_MAX / QUIET_S)):
            before = self._deliveries
            await asyncio.sleep(QUIET_S)
            if self._deliveries == before:
                return

    def _some(self, count_max: int) -> list[bytes]:
        return self._chance.sample(self._slots.channels, self._chance.randint(1, count_max))

    def _life(self) -> float:
        return self._chance.expovariate(1 / self._slots.life_s)

    def _short(self) -> float:
        return self._chance.uniform(0.0, 1.0)


def live(pipe: Connection, slots: Slots) -> None:
    """Run one process of clients."""

    async def work() -> None:
        await Clients(slots).work(pipe)

    run(work())
