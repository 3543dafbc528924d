"""The two drivers of machines, for the tests of their contract: one on real servers, one on simulated ones."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import Pushed, Replied, RepliedAll, Start, Tick
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.driver import Driver
from dynamoth_link.query import query
from dynamoth_link.urls import parse_server_url
from dynamoth_sim.world.network import CALM, Network
from dynamoth_sim.world.process import MachineFailed, Process
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World
from tests.link.harness import HASTY, PATIENCE_S

BUG = "the machine raises when it handles this"


@dataclass(frozen=True)
class Do:
    """Event: ask for these actions."""

    actions: tuple[Any, ...]


class Puppet:
    """A machine that asks for what the test says, and keeps every event with its time."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.times: list[float] = []
        #: What it asks for when it has handled an event.
        self.answer: Callable[[Any], list[Any]] = lambda event: []
        self.wants_tick_at: float | None = None
        self.on_event: Callable[[], None] = lambda: None
        self._entered = False

    def handle(self, event: Any, now: float) -> list[Any]:
        assert not self._entered, "it is entered twice"
        self._entered = True
        self.times.append(now)
        self.on_event()
        if event == BUG:
            self._entered = False
            raise ZeroDivisionError
        if isinstance(event, Tick):
            self.wants_tick_at = None
        self._entered = False
        if isinstance(event, Do):
            return [*event.actions]
        if not isinstance(event, Start):
            self.events.append(event)
        return self.answer(event)

    def deadline(self) -> float | None:
        return self.wants_tick_at


class DriverUnderTest(ABC):
    """A driver with a puppet, and one server."""

    def __init__(self) -> None:
        self.puppet = Puppet()
        #: Actions that are the machine's own, in order.
        self.own: list[Any] = []
        self.on_action: Callable[[Any], None] = lambda action: None
        self.crashed = False

    def _act(self, action: Any) -> None:
        self.own.append(action)
        self.on_action(action)

    @property
    def events(self) -> list[Any]:
        return self.puppet.events

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def values(self, tag: Any) -> list[Any]:
        """Return the replies to a tag in order, however they were put together."""
        found: list[Any] = []
        for event in self.events:
            if isinstance(event, Replied) and event.tag == tag:
                found.append(event.value)
            if isinstance(event, RepliedAll) and event.tag == tag:
                found += event.values
        return found

    def pushes(self) -> list[Any]:
        return [push for event in self.of(Pushed) for push in event.messages]

    def do(self, *actions: Any) -> None:
        """Let the machine ask for actions."""
        self.handle(Do(actions))

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def handle(self, event: Any) -> None: ...

    @abstractmethod
    def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; fail when it does not."""

    @abstractmethod
    def wait(self, duration_s: float) -> None:
        """Let time pass in which nothing should happen."""

    @abstractmethod
    def publish(self, channel: bytes, *data: bytes) -> None:
        """Publish over another connection."""

    @abstractmethod
    def forbid(self, command: str) -> None: ...

    @abstractmethod
    def stop_server(self) -> None: ...

    @abstractmethod
    def start_server(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class RealDriver(DriverUnderTest):
    """``dynamoth_link.driver`` on an event loop and a redis-server."""

    def __init__(self, redis: EmbeddedRedis, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        super().__init__()
        self._redis = redis
        self._run = run
        self._happened: asyncio.Event
        self._driver: Driver
        run(self._start())

    async def _start(self) -> None:
        self._happened = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.puppet.on_event = self._happened.set

        def crashed(_: Exception) -> None:
            self.crashed = True

        self._driver = Driver(self.puppet, on_action=self._act, link_options=lambda _: HASTY, on_crash=crashed)
        self._driver.start()

    @property
    def url(self) -> str:
        return self._redis.url

    @property
    def now(self) -> float:
        return self._loop.time()

    def handle(self, event: Any) -> None:
        async def inside() -> None:
            self._driver.handle(event)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._run(inside())
        else:
            self._driver.handle(event)

    def until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            while not condition():
                self._happened.clear()
                async with asyncio.timeout(PATIENCE_S):
                    await self._happened.wait()

        self._run(wait())

    def wait(self, duration_s: float) -> None:
        self._run(asyncio.sleep(duration_s))

    def publish(self, channel: bytes, *data: bytes) -> None:
        self._ask(*((b"PUBLISH", channel, each) for each in data))

    def forbid(self, command: str) -> None:
        self._ask((b"ACL", b"SETUSER", b"default", b"-" + command.encode()))

    def _ask(self, *commands: tuple[bytes, ...]) -> None:
        self._run(query(parse_server_url(self.url), *commands))

    def stop_server(self) -> None:
        self._redis.stop()

    def start_server(self) -> None:
        self._redis.start()

    def close(self) -> None:
        self._run(self._driver.close())


class SimulatedDriver(DriverUnderTest):
    """``dynamoth_sim.world.process`` in a world of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._world = World(1)
        self._network = Network(self._world, lambda process, server: CALM)
        self._server = RedisServer(self._world, "s1", "redis://s1")
        self._forbidden: set[bytes] = set()
        self._server.refuse = lambda _, words: "NOPERM" if words[0] in self._forbidden else None
        self._network.add_server(self._server.url, self._server)
        self._process = Process(self._world, self._network, "p", lambda _: self.puppet, self._act)
        self._process.start()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def now(self) -> float:
        return self._world.now

    def handle(self, event: Any) -> None:
        try:
            self._process.handle(event)
        except MachineFailed:
            self.crashed = True

    def until(self, condition: Callable[[], object]) -> None:
        assert self._world.run_until_true(lambda: bool(condition()), self.now + PATIENCE_S, 0.001), self.events

    def wait(self, duration_s: float) -> None:
        self._world.run_until(self.now + duration_s)

    def publish(self, channel: bytes, *data: bytes) -> None:
        for each in data:
            self._server.inject(channel, each)

    def forbid(self, command: str) -> None:
        self._forbidden.add(command.upper().encode())

    def stop_server(self) -> None:
        self._server.stop()

    def start_server(self) -> None:
        self._server.start()

    def close(self) -> None:
        if self._process.alive:
            self._process.crash()
