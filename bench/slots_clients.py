"""The clients of ``bench.slots``: idle subscribers of very many channels, and publishers that make a trickle of load.

Each process has a share of the channels. One client subscribes to all of them and only waits; another publishes on one
after the other. In the end new clients subscribe and publish, who know nothing of what has moved.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bench.processors import resident_mib
from dynamoth_client.asyncio import PubSub, Redis, from_url
from dynamoth_client.machines.subscriber import machine as subscriber
from dynamoth_client.machines.subscriber.events import SubscriberOptions
from dynamoth_daemon.event_loop import run

CHUNK = 1000
"""Channels of one ``subscribe``."""
TOGETHER = 100
"""Publications that are under way at once."""
TICK_S = 0.02
LOOK_S = 1.0
QUIET_S = 60.0
"""What was published and has not come after this long is lost."""


@dataclass(frozen=True)
class Share:
    """The part of the load of one process."""

    url: str
    process: int
    channels: int
    messages_per_s: float
    #: Whether subscribers wait 10 s for what is late: on a machine that is busy with other things it is no loss.
    is_patient: bool = False


@dataclass(frozen=True)
class Seen:
    """What the subscribers of one process, or of several, have seen."""

    published: int = 0
    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    gaps: int = 0
    #: How many gaps there were for each reason.
    reasons: Counter[str] = field(default_factory=Counter[str])

    def __add__(self, other: Seen) -> Seen:
        """Return the sums."""
        return Seen(
            self.published + other.published,
            self.delivered + other.delivered,
            self.lost + other.lost,
            self.duplicated + other.duplicated,
            self.reordered + other.reordered,
            self.gaps + other.gaps,
            self.reasons + other.reasons,
        )


class Listener:
    """A subscriber to all channels of a share, which knows the number of the latest message on each."""

    def __init__(self, share: Share, pubsub: PubSub, latest: array[int]) -> None:
        self._share = share
        self._pubsub = pubsub
        self._latest = array("q", latest)
        self._index = {name_of(share, number): number for number in range(share.channels)}
        self.confirmed = 0
        #: Whether there is something to read, and whether all subscriptions are confirmed.
        self._begun, self._all_confirmed = asyncio.Event(), asyncio.Event()
        self.delivered = 0
        self._skipped: set[tuple[int, int]] = set()
        self._duplicated = self._reordered = 0
        self._gaps = Counter[str]()
        #: From ``publish`` to here, in ms, since it was emptied.
        self.delays_ms: list[float] = []

    async def subscribe(self) -> None:
        """Subscribe to all channels."""
        names = list(self._index)
        await self._pubsub.subscribe(names[0])
        self._begun.set()
        for first in range(1, len(names), CHUNK):
            await self._pubsub.subscribe(*names[first : first + CHUNK])
        await self._all_confirmed.wait()

    async def read(self) -> None:
        """Read to the end of the task."""
        await self._begun.wait()
        async for batch in self._pubsub.batches():
            for message in batch:
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            self.confirmed += 1
            if self.confirmed == len(self._index):
                self._all_confirmed.set()
        elif message["type"] == "gap":
            self._gaps[message["data"].reason] += 1
        elif message["type"] == "message":
            number, at = message["data"].split()
            self.delays_ms.append((time.monotonic() - float(at)) * 1000)
            self._count(self._index[message["channel"]], int(number))

    def _count(self, channel: int, number: int) -> None:
        latest = self._latest[channel]
        self.delivered += 1
        if number > latest:
            self._skipped.update((channel, skipped) for skipped in range(latest + 1, number))
            self._latest[channel] = number
        elif (channel, number) in self._skipped:
            self._skipped.remove((channel, number))
            self._reordered += 1
        else:
            self._duplicated += 1

    def lost(self, published: array[int]) -> int:
        """Return how many messages have not come, of those up to the number that was published last on each channel."""
        return len(self._skipped) + sum(max(0, last - here) for last, here in zip(published, self._latest, strict=True))

    def seen(self, published: array[int], before: int = 0) -> Seen:
        """Return what there was of all messages after the first ``before`` ones."""
        total = sum(published) - before
        lost, gaps = self.lost(published), self._gaps
        return Seen(total, self.delivered, lost, self._duplicated, self._reordered, gaps.total(), gaps)


class Clients:
    """The clients of one process."""

    def __init__(self, share: Share) -> None:
        self._share = share
        #: The number of the latest message on each channel.
        self._published = array("q", bytes(8 * share.channels))
        self._next = 0
        self._trickles = True

    async def work(self, pipe: Connection) -> None:
        """Subscribe, then do what the pipe says: ``phase`` returns the delays since the last one."""
        loop = asyncio.get_running_loop()
        async with listening(self._share, self._published) as old:
            await old.subscribe()
            pipe.send(old.confirmed)
            trickle = asyncio.create_task(self._trickle())
            while await loop.run_in_executor(None, pipe.recv) == "phase":
                delays, old.delays_ms = old.delays_ms, []
                pipe.send((delays, resident_mib(os.getpid())))
            self._trickles = False
            await trickle
            await self._until_quiet(old)
            before = sum(self._published)
            async with listening(self._share, self._published) as new:
                await new.subscribe()
                async with from_url(self._share.url) as publisher:
                    for first in range(0, self._share.channels, TOGETHER):
                        numbers = range(first, min(first + TOGETHER, self._share.channels))
                        await asyncio.gather(*(self._publish(publisher, number) for number in numbers))
                await self._until_quiet(old, new)
                pipe.send((old.seen(self._published), new.seen(self._published, before)))

    async def _trickle(self) -> None:
        async with from_url(self._share.url) as publisher:
            began, sent = time.monotonic(), 0
            while self._trickles:
                due = int((time.monotonic() - began) * self._share.messages_per_s)
                count = min(due - sent, TOGETHER)
                await asyncio.gather(*(self._publish(publisher, self._turn()) for _ in range(count)))
                sent += count
                await asyncio.sleep(TICK_S)

    def _turn(self) -> int:
        self._next = (self._next + 1) % self._share.channels
        return self._next

    async def _publish(self, publisher: Redis, number: int) -> None:
        self._published[number] += 1
        data = b"%d %f" % (self._published[number], time.monotonic())
        await publisher.publish(name_of(self._share, number), data)

    async def _until_quiet(self, *listeners: Listener) -> None:
        for _ in range(round(QUIET_S / LOOK_S)):
            await asyncio.sleep(LOOK_S)  # once more than needed, for what may come twice
            if not any(each.lost(self._published) for each in listeners):
                return


@asynccontextmanager
async def listening(share: Share, latest: array[int]) -> AsyncGenerator[Listener]:
    """Return a listener that reads while the block runs."""
    async with from_url(share.url) as client, client.pubsub(gaps=True) as pubsub:
        listener = Listener(share, pubsub, latest)
        reading = asyncio.create_task(listener.read())
        try:
            yield listener
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def name_of(share: Share, number: int) -> bytes:
    """Return the name of a channel."""
    return b"slots:%d:%d" % (share.process, number)


def live(pipe: Connection, share: Share) -> None:
    """Run the clients of a process."""
    if share.is_patient:
        subscriber.__dict__["SubscriberOptions"] = partial(SubscriberOptions, hold_s_max=10.0, marker_s=10.0)
    run(Clients(share).work(pipe))
