"""Processes of end users for the trials, which write down everything that happens to a file.

Each user is a ``dynamoth_user.Client``. Every event is written at once, so the file is complete up to a SIGKILL. A
line is a kind and its fields, separated by tabs:

====  =====================================================================================================
``S``  user, channel, epoch, offset, time: a subscription begins behind this position (``-``: no log)
``D``  user, channel, epoch, offset, publisher, number, time: a publication was handed out
``G``  user, channel, first, last, count, epoch, offset, time, reason: a gap was handed out
``V``  user, broker, 1 if moved, time: a broker serves the user
``I``  user, time, reason: no broker serves the user
``F``  user, time, reason: the user has ended, or a callback has failed
``B``  publisher, channel, number, time: a publication begins
``P``  publisher, channel, number, epoch, offset, time: it is published
``X``  publisher, channel, number, time, reason: it has failed; it may be published, or not
====  =====================================================================================================
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import redis.exceptions

from dynamoth.errors import DynamothError
from dynamoth_client.asyncio import Redis
from dynamoth_daemon import event_loop
from dynamoth_user import Client, Failed, FileStorage, Gap, Interrupted, Item, Served
from dynamoth_user.client import State

CONNECTS_AT_ONCE = 20
NONE = "-"


@dataclass(frozen=True, kw_only=True)
class PeopleOptions:
    """One process of users."""

    name: str
    #: What is written; appended to.
    record: Path
    #: The URLs of the brokers, in the order in which users try them; each user begins elsewhere in it.
    brokers: list[str]
    token: str
    users: int
    #: The channels of each user, by its number modulo the length.
    channels: list[list[str]]
    #: Where the users keep their positions; None: nowhere.
    storage: Path | None = None
    #: The cluster, for the publisher of live channels.
    cluster: str = ""
    #: Publications per second and channel.
    rates: dict[str, float]
    logged_prefix: str = "log."
    seed: int = 1
    #: How many of the users publish.
    publishers: int = 4


class People:
    """The users of one process."""

    def __init__(self, options: PeopleOptions) -> None:
        self._options = options
        self._file = os.open(options.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._clients: list[Client] = []
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._publishing: list[asyncio.Task[None]] = []
        self._random = Random(options.seed)
        self._live: Any = None

    def _write(self, *fields: object) -> None:
        os.write(self._file, ("\t".join(map(str, fields)) + "\n").encode())

    async def start(self) -> None:
        """Connect all users, and subscribe; returns when every subscription is confirmed."""
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def join(number: int) -> None:
            async with gate:
                await self._join(number)

        await asyncio.gather(*map(join, range(self._options.users)))

    async def _join(self, number: int) -> None:
        options = self._options
        name = f"{options.name}{number}"
        first = number % len(options.brokers)
        client = Client(
            options.brokers[first:] + options.brokers[:first],
            token=options.token,
            storage=None if options.storage is None else FileStorage(options.storage / f"{name}.json"),
            on_state=partial(self._on_state, name),
            on_error=lambda error: self._write("F", name, time.monotonic(), repr(error)),
            proxy=None,
        )
        await client.__aenter__()
        self._clients.append(client)
        for channel in options.channels[number % len(options.channels)]:
            subscription = await client.subscribe(channel, partial(self._take, name, channel))
            position = subscription.position
            epoch, offset = (NONE, NONE) if position is None else (f"{position.epoch:x}", position.offset)
            self._write("S", name, channel, epoch, offset, time.monotonic())

    def _on_state(self, name: str, state: State) -> None:
        now = time.monotonic()
        match state:
            case Served(broker, _, moved):
                self._write("V", name, broker, int(moved), now)
            case Interrupted(reason):
                self._write("I", name, now, reason)
            case Failed(code, reason):
                self._write("F", name, now, f"{code} {reason}")

    def _take(self, name: str, channel: str, item: Item | Gap) -> None:
        now, position = time.monotonic(), item.position
        epoch, offset = (NONE, NONE) if position is None else (f"{position.epoch:x}", str(position.offset))
        if isinstance(item, Gap):
            bounds = (NONE if each is None else each for each in (item.first, item.last, item.count))
            self._write("G", name, channel, *bounds, epoch, offset, now, item.reason)
            return
        publisher, number, *_ = item.text.split(" ")
        self._write("D", name, channel, epoch, offset, publisher, number, now)

    # Publishing.

    def begin_publishing(self) -> None:
        """Publish on every channel of ``rates`` until ``stop_publishing``."""
        options = self._options
        live = Redis.from_url(options.cluster)
        for index, (channel, per_s) in enumerate(options.rates.items()):
            publish: Any = live.publish
            publisher = f"{options.name}backend"
            if channel.startswith(options.logged_prefix):
                number = index % options.publishers
                publish, publisher = self._clients[number].publish, f"{options.name}{number}"
            self._publishing.append(asyncio.create_task(self._publish_on(publisher, channel, publish, per_s)))
        self._live = live

    async def _publish_on(self, publisher: str, channel: str, publish: Any, per_s: float) -> None:
        due = time.monotonic() + self._random.random() / per_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._publish(publisher, channel, publish)
            due = max(due + 1 / per_s, time.monotonic() - 1.0)

    async def _publish(self, publisher: str, channel: str, publish: Any) -> None:
        self._numbers[publisher, channel] += 1
        number = self._numbers[publisher, channel]
        begun = time.monotonic()
        self._write("B", publisher, channel, number, begun)
        try:
            position = await publish(channel, f"{publisher} {number} {'x' * 60}")
        except (DynamothError, redis.exceptions.RedisError) as error:
            self._write("X", publisher, channel, number, time.monotonic(), repr(error)[:200])
            return
        epoch, offset = (NONE, NONE) if isinstance(position, int) else (f"{position.epoch:x}", position.offset)
        self._write("P", publisher, channel, number, epoch, offset, time.monotonic())

    async def stop_publishing(self) -> None:
        """End publishing; what is under way is cut off, and counts as failed."""
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)
        self._publishing.clear()

    async def probe(self) -> float:
        """Publish once on every channel; return when that was done."""
        options = self._options
        for index, channel in enumerate(options.rates):
            publish: Any = self._live.publish
            publisher = f"{options.name}backend"
            if channel.startswith(options.logged_prefix):
                number = index % options.publishers
                publish, publisher = self._clients[number].publish, f"{options.name}{number}"
            await asyncio.wait_for(self._publish(publisher, channel, publish), 15.0)
        return time.monotonic()

    def look(self) -> dict[str, Any]:
        """Return where the users are, and how often they have moved."""
        where = Counter(client.broker or "" for client in self._clients)
        sessions = {client.session: client.broker for client in self._clients}
        return {"where": dict(where), "moved": sum(client.moved for client in self._clients), "sessions": sessions}

    async def close(self) -> None:
        """Close all clients."""
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)


def live_here(pipe: Connection, options: PeopleOptions) -> None:
    """Run a process of users: the target of a worker. It answers each order that comes through ``pipe``."""
    event_loop.run(_live(pipe, options))


async def _live(pipe: Connection, options: PeopleOptions) -> None:
    people = People(options)
    await people.start()
    pipe.send("ready")
    orders: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: orders.put_nowait(pipe.recv()))
    while True:
        answer: Any = None
        match await orders.get():
            case "publish":
                people.begin_publishing()
            case "hush":
                await people.stop_publishing()
            case "probe":
                answer = await people.probe()
            case "look":
                answer = people.look()
            case "close":
                await people.close()
            case other:
                raise AssertionError(other)
        pipe.send(answer)
