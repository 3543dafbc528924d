"""The players of the benchmarks of RGame: real clients with connections of their own, in a few processes.

A player subscribes to the tile where it is and publishes its state there three times per second. Its *response time* is
the paper's: from the moment when an update is due to the moment when the player receives it back (section V-D). An
update is due whether those before it were answered or not, so what an overloaded server delays is part of it. Players
do not react to messages, so the latency of a wide area network is added when a message arrives instead of waited for.

Each player checks the numbers of the updates that it hears of others, from one change of tile to the next: a number
that is missing was lost, or its publish had failed; one that is not higher than the last came twice or late.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Protocol

import redis.asyncio
import redis.exceptions

from bench.game import WideArea
from dynamoth_client.asyncio import GapInfo, Redis
from dynamoth_daemon.event_loop import run
from dynamoth_demo.latency import LatencyCounts
from dynamoth_sim.load.rgame import GameWorld, Join, Leave, Player, Update, read_update

PENDING_MAX = 30
"""Updates of one player that wait to be published: 10 s of them. More are dropped, and counted as failed."""
CHANGES_MAX = 30
"""Changes of tile that wait for a player to carry them out; it walks no farther with more."""
READ_TIMEOUT_S = 1.0
JOIN_AGAIN_S = 0.5

Take = Callable[[bytes, bytes], None]
"""Called with channel and payload of each message."""


@dataclass(kw_only=True)
class Sample:
    """What the players of a process saw since the sample before."""

    players: int = 0
    published: int = 0
    publish_failed: int = 0
    join_failed: int = 0
    delivered: int = 0
    lost: int = 0
    out_of_order: int = 0
    gaps: int = 0
    response_ms_sum: float = 0.0
    wan_ms_sum: float = 0.0
    #: Counts by class, as of ``LatencyCounts``; ``wan``: with the latency of a wide area network.
    response: dict[int, int] = field(default_factory=dict)
    wan: dict[int, int] = field(default_factory=dict)
    cpu_s: float = 0.0

    def add(self, other: Sample) -> None:
        """Add the sample of another process."""
        for each in fields(self):
            if each.name not in ("response", "wan"):
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for mine, theirs in ((self.response, other.response), (self.wan, other.wan)):
            for of, count in theirs.items():
                mine[of] = mine.get(of, 0) + count

    @property
    def responses(self) -> int:
        """How many response times there are."""
        return sum(self.response.values())


class Connected(Protocol):
    """The connections of one player."""

    async def join(self, channel: bytes) -> None:
        """Subscribe."""

    async def leave(self, channel: bytes) -> None:
        """Unsubscribe."""

    async def publish(self, channel: bytes, payload: bytes) -> None:
        """Publish."""

    async def close(self) -> None:
        """Close all connections."""


class ByDynamoth:
    """A player that is a client of Dynamoth."""

    def __init__(self, url: str, take: Take, on_gap: Callable[[], None]) -> None:
        def gap(_: GapInfo) -> None:
            on_gap()

        self._client = Redis.from_url(url)
        self._pubsub = self._client.pubsub(on_gap=gap)
        self._take = take
        self._reader: asyncio.Task[None] | None = None

    async def join(self, channel: bytes) -> None:
        """Subscribe."""
        await self._pubsub.subscribe(channel)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

    async def leave(self, channel: bytes) -> None:
        """Unsubscribe."""
        await self._pubsub.unsubscribe(channel)

    async def publish(self, channel: bytes, payload: bytes) -> None:
        """Publish."""
        await self._client.publish(channel, payload)

    async def close(self) -> None:
        """Close all connections."""
        await _end([] if self._reader is None else [self._reader])
        await self._pubsub.aclose()
        await self._client.aclose()

    async def _read(self) -> None:
        while True:
            message = await self._pubsub.get_message(timeout=None)
            if message is not None and message["type"] == "message":
                self._take(message["channel"], message["data"])


class BySharding:
    """A player that is a client of a Redis Cluster: sharded pub/sub with redis-py.

    One task reads from each node where it listens: asking all of them in turn, as ``get_sharded_message`` does by
    itself, would have messages wait for a node that is silent.
    """

    def __init__(self, url: str, take: Take, on_gap: Callable[[], None]) -> None:
        self._client: Any = redis.asyncio.RedisCluster.from_url(url)
        self._pubsub: Any = None
        self._take = take
        self._on_gap = on_gap
        self._readers: dict[str, asyncio.Task[None]] = {}

    async def join(self, channel: bytes) -> None:
        """Subscribe."""
        if self._pubsub is None:
            await self._client.initialize()
            self._pubsub = self._client.pubsub()
        await self._pubsub.ssubscribe(channel)
        for name in self._pubsub.node_pubsub_mapping:
            if name not in self._readers or self._readers[name].done():
                node = self._client.get_node(node_name=name)
                self._readers[name] = asyncio.create_task(self._read(node))

    async def leave(self, channel: bytes) -> None:
        """Unsubscribe."""
        await self._pubsub.sunsubscribe(channel)

    async def publish(self, channel: bytes, payload: bytes) -> None:
        """Publish."""
        await self._client.execute_command("SPUBLISH", channel, payload)

    async def close(self) -> None:
        """Close all connections."""
        await _end(list(self._readers.values()))
        if self._pubsub is not None:
            await self._pubsub.aclose()
        await self._client.aclose()

    async def _read(self, node: Any) -> None:
        """Read from a node until nothing is subscribed there any more."""
        while node.name in self._pubsub.node_pubsub_mapping:
            try:
                message = await self._pubsub.get_sharded_message(target_node=node, timeout=READ_TIMEOUT_S)
            except redis.exceptions.RedisError:
                self._on_gap()  # a lost connection: redis-py subscribes again with the next call
                await asyncio.sleep(0.1)
                continue
            if message is not None and message["type"] == "smessage":
                self._take(message["channel"], message["data"])


TRANSPORTS: dict[str, Callable[[str, Take, Callable[[], None]], Connected]] = {
    "dynamoth": ByDynamoth,
    "sharded": BySharding,
}


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True)
class Game:
    """What all players share, in values that can go to another process.

    ``world``: the fields of ``GameWorld``. ``began_s``: of the monotonic clock of this machine.
    """

    transport: str
    url: str
    world: Mapping[str, Any]
    payload_bytes: int
    seed: int
    began_s: float


class Playing:
    """One player at work."""

    def __init__(self, number: int, game: Game, process: Process) -> None:
        self._number = number
        self._game = game
        self._process = process
        random = Random(f"{game.seed}:{number}")
        self._player = Player(number, GameWorld(**game.world), random, time.monotonic(), game_start_s=game.began_s)
        self._connected = TRANSPORTS[game.transport](game.url, self._take, self._gap)
        self._due: asyncio.Queue[tuple[Update, int]] = asyncio.Queue(PENDING_MAX)
        self._changes: asyncio.Queue[Join | Leave] = asyncio.Queue(CHANGES_MAX)
        #: By channel that it has joined: when that was, and the latest number of each player that it has heard since.
        self._heard: dict[bytes, tuple[int, dict[int, int]]] = {}

    async def play(self) -> None:
        """Play until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish())
                tasks.create_task(self._change())
                await self._walk()
        finally:
            await self._connected.close()

    async def _walk(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._player.deadline() - time.monotonic()))
            for action in self._player.step(time.monotonic()):
                match action:
                    case Join() | Leave():
                        await self._changes.put(action)
                    case Update():
                        try:
                            self._due.put_nowait((action, time.monotonic_ns()))
                        except asyncio.QueueFull:
                            self._process.sample.publish_failed += 1

    async def _change(self) -> None:
        """Join and leave channels, one after the other. An overloaded server makes that slow, but not the updates."""
        while True:
            action = await self._changes.get()
            if isinstance(action, Leave):
                del self._heard[action.channel]
            while not await self._carry_out(action):
                self._process.sample.join_failed += 1
                await asyncio.sleep(JOIN_AGAIN_S)
            if isinstance(action, Join):
                self._heard[action.channel] = time.monotonic_ns(), {}

    async def _carry_out(self, action: Join | Leave) -> bool:
        """Join or leave; return whether that worked."""
        try:
            await (self._connected.join if isinstance(action, Join) else self._connected.leave)(action.channel)
        except redis.exceptions.RedisError:
            return False
        return True

    async def _publish(self) -> None:
        """Publish one update after the other: several connections would change their order."""
        while True:
            update, due_ns = await self._due.get()
            self._process.sample.published += 1
            try:
                await self._connected.publish(update.channel, update.payload(due_ns, self._game.payload_bytes))
            except redis.exceptions.RedisError:
                self._process.sample.publish_failed += 1

    def _take(self, channel: bytes, payload: bytes) -> None:
        sample = self._process.sample
        sample.delivered += 1
        player, sequence, sent_ns, _, _ = read_update(payload)
        if player == self._number:
            self._process.response(time.monotonic_ns() - sent_ns)
        joined_ns, heard = self._heard.get(channel, (sent_ns + 1, {}))
        if sent_ns < joined_ns:
            return  # of an earlier visit, or it has left, and unsubscribing takes its time
        latest = heard.get(player)
        if latest is None or sequence > latest:
            sample.lost += 0 if latest is None else sequence - latest - 1
            heard[player] = sequence
        else:
            sample.out_of_order += 1

    def _gap(self) -> None:
        self._process.sample.gaps += 1


class Process:
    """The players of one process."""

    def __init__(self, game: Game, index: int, processes: int) -> None:
        self._game = game
        self._index = index
        self._processes = processes
        self._playing: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._wan = WideArea(Random(f"{game.seed} wide area {index}"))
        self.sample = Sample()
        self._response, self._with_wan = LatencyCounts(), LatencyCounts()

    async def work(self, pipe: Connection) -> None:
        """Answer each number of players of the whole game with a sample, until the pipe says None."""
        loop = asyncio.get_running_loop()
        while (wanted := await loop.run_in_executor(None, pipe.recv)) is not None:
            self._grow_to(len(range(self._index, wanted, self._processes)))
            pipe.send(self._take_sample())
        await _end([*self._playing, *self._leaving])
        pipe.send(None)

    def response(self, response_ns: int) -> None:
        """Count a response time."""
        with_wan_ns = response_ns + self._wan.round_trip_ns()
        self._response.add(response_ns)
        self._with_wan.add(with_wan_ns)
        self.sample.response_ms_sum += response_ns / 1e6
        self.sample.wan_ms_sum += with_wan_ns / 1e6

    def _grow_to(self, count: int) -> None:
        for task in self._playing:
            if task.done():
                task.result()  # raises what ended it
        while len(self._playing) > count:
            task = self._playing.pop()
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for nth in range(len(self._playing), count):
            number = self._index + nth * self._processes
            self._playing.append(asyncio.create_task(Playing(number, self._game, self).play()))

    def _take_sample(self) -> Sample:
        sample, self.sample = self.sample, Sample()
        sample.players = len(self._playing)
        sample.response, sample.wan = self._response.counts, self._with_wan.counts
        self._response, self._with_wan = LatencyCounts(), LatencyCounts()
        used = resource.getrusage(resource.RUSAGE_SELF)
        sample.cpu_s = used.ru_utime + used.ru_stime
        return sample


def play(pipe: Connection, game: Game, index: int, processes: int) -> None:
    """Run one process of players."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    run(Process(game, index, processes).work(pipe))
