"""A fleet of applications that publish and listen without a pause, and the judgement of what they got.

An application is the same with plain redis-py and with the client of Dynamoth. All run on one loop, each with
connections of its own.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, Self

from dynamoth_client.asyncio import GapInfo, Redis
from tests.loop_thread import LoopThread
from tests.whole.harness import until

INTERVAL_S = 0.05
"""Between two messages of an application on a channel."""

SUBSCRIPTIONS = ("subscribe", "psubscribe")


class App:
    """One application: it publishes numbered messages on each channel, and listens to all, or to a pattern."""

    def __init__(
        self, client: Any, name: str, channels: Sequence[str], *, pattern: str = "", payload_bytes: int = 0
    ) -> None:
        self.name, self.channels, self.pattern = name, channels, pattern
        self._client = client
        self._payload_bytes = payload_bytes
        #: When each message began to be published, by channel; the number is the index + 1.
        self.begun: dict[str, list[float]] = {channel: [] for channel in channels}
        #: How many receivers the latest message had, by channel.
        self.receivers: dict[str, int] = {}
        #: (channel, publisher) to the numbers that came.
        self.got: dict[tuple[str, str], list[int]] = {}
        #: Channel, or pattern, to the time of the confirmation.
        self.confirmed: dict[str, float] = {}
        self.gaps: list[GapInfo] = []
        self._pubsub = client.pubsub(on_gap=self.gaps.append) if isinstance(client, Redis) else client.pubsub()
        self.is_quiet = False
        self.ended_at = float("inf")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribe, and begin to publish and to listen."""
        pubsub = self._pubsub
        await (pubsub.psubscribe(self.pattern) if self.pattern else pubsub.subscribe(*self.channels))
        self._tasks = [asyncio.create_task(self._publish(channel)) for channel in self.channels]
        self._tasks.append(asyncio.create_task(self._listen()))

    async def hush(self) -> None:
        """Publish no more, and go on listening."""
        self.is_quiet = True
        await asyncio.gather(*self._tasks[:-1])

    async def stop(self) -> None:
        """End it, whatever it is doing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pubsub.aclose()
        await self._client.aclose()

    async def _publish(self, channel: str) -> None:
        begun = self.begun[channel]
        while not self.is_quiet:
            begun.append(time.monotonic())
            payload = f"{self.name}:{len(begun)}:".ljust(self._payload_bytes, ".")
            self.receivers[channel] = await self._client.publish(channel, payload)
            await asyncio.sleep(INTERVAL_S)

    async def _listen(self) -> None:
        async for message in self._pubsub.listen():
            channel, data = message["channel"].decode(), message["data"]
            if message["type"] in SUBSCRIPTIONS:
                self.confirmed[channel] = time.monotonic()
                continue
            found = re.fullmatch(rb"([\w-]+):(\d+):\.*", data)
            assert found is not None, f"{self.name} got what is no message: {data!r}"
            self.got.setdefault((channel, found[1].decode()), []).append(int(found[2]))

    def check(self) -> None:
        """Raise what ended one of its tasks before its time."""
        for task in self._tasks:
            if task.done() and not (self.is_quiet or task.cancelled()):
                task.result()

    def is_listening(self) -> bool:
        """Tell whether all of its subscriptions are confirmed."""
        self.check()
        return len(self.confirmed) == (1 if self.pattern else len(self.channels))

    def has(self, other: App, channel: str, number: int) -> bool:
        """Tell whether the message of another application has come, or a later one."""
        self.check()
        return self.got.get((channel, other.name), [0])[-1] >= number


class Fleet:
    """The applications, those that were replaced included. All end on exit."""

    def __init__(self) -> None:
        self._loop = LoopThread("fleet")
        self.apps: list[App] = []
        self.running: list[App] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for app in self.running:
            self._loop.call(app.stop())
        self._loop.close()

    def add(self, app: App) -> App:
        """Start an application, and wait until it listens."""
        self.apps.append(app)
        self.running.append(app)
        self._loop.call(app.start())
        until(app.is_listening, f"{app.name} listens")
        return app

    def replace(self, old: App, new: App) -> App:
        """Upgrade an application as a rolling deployment does: the new one works before the old one ends."""
        self.add(new)
        self.flows()
        self._loop.call(old.hush())
        old.ended_at = time.monotonic()  # what begins from now on may come too late for it
        self.flows()
        self._loop.call(old.stop())
        self.running.remove(old)
        return new

    def flows(self) -> None:
        """Wait until everybody who runs has got the latest message of everybody, and some more."""
        wanted = [
            (app, channel, len(app.begun[channel]) + (0 if app.is_quiet else 3))
            for app in self.running
            for channel in app.channels
        ]
        until(lambda: all(app.has(*want) for app in self.running for want in wanted), "messages flow to everybody")

    def finish(self) -> int:
        """Let everybody hush and get all, and judge; return how many messages were delivered."""
        for app in self.running:
            self._loop.call(app.hush())
        self.flows()
        return sum(
            self._judge(listener, app, channel)
            for listener in self.apps
            for app in self.apps
            for channel in app.channels
        )

    @staticmethod
    def _judge(listener: App, publisher: App, channel: str) -> int:
        """Each message that began after the confirmation has come, once and in order, and nothing else has."""
        got = listener.got.get((channel, publisher.name), [])
        since, end = listener.confirmed[listener.pattern or channel], listener.ended_at
        expected = [number for number, at in enumerate(publisher.begun[channel], 1) if since < at < end]
        what = f"{listener.name} of {publisher.name} on {channel}"
        assert not got or got == list(range(got[0], got[-1] + 1)), f"{what}: not each once and in order: {got}"
        assert set(expected) <= set(got), f"{what}: lost {sorted({*expected} - {*got})}"
        assert not listener.gaps, f"{listener.name}: {listener.gaps}"
        return len(got)
