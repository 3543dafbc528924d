"""A fleet of applications, each a process of its own (``migrating_app``), and the judgement of what they got."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dynamoth_cli.local.child import Child
from tests.whole.harness import until

ROOT = Path(__file__).parents[2]


class App:
    """One application that runs, and all that it has written."""

    def __init__(
        self, kind: str, url: str, name: str, channels: Sequence[str], *, pattern: str = "", payload_bytes: int = 0
    ) -> None:
        self.kind, self.name, self.channels, self.pattern = kind, name, channels, pattern
        options = ["--payload-bytes", str(payload_bytes), *(["--pattern", pattern] if pattern else [])]
        command = [sys.executable, "-m", "tests.whole.migrating_app", kind, url, name, *channels, *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._child = Child(f"app {name}", command, environment=environment, pipes=True)
        #: When each message began to be published, by channel; the number is the index + 1.
        self.begun: dict[str, list[float]] = {channel: [] for channel in channels}
        #: How many receivers the latest message had, by channel.
        self.receivers: dict[str, int] = {}
        #: (channel, publisher) to the numbers that came.
        self.got: dict[tuple[str, str], list[int]] = {}
        #: Channel, or pattern, to the time of the confirmation.
        self.confirmed: dict[str, float] = {}
        #: Bytes that are no message, and gaps.
        self.strange: list[str] = []
        self.gaps: list[str] = []
        self.quiet = False
        self._fault: Exception | None = None
        self.ended_at = float("inf")

    def start(self) -> None:
        """Start it."""
        self._child.start()
        threading.Thread(target=self._read, name=self._child.name, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._child.stdout:
                self._take(line.decode().split(maxsplit=3))
        except Exception as error:
            self._fault = error

    def _take(self, words: list[str]) -> None:
        match words:
            case ["gets", channel, "?", data]:
                self.strange.append(f"{channel}: {data}")
            case ["gets", channel, publisher, number]:
                self.got.setdefault((channel, publisher), []).append(int(number))
            case ["begins", channel, _, at]:
                self.begun[channel].append(float(at))
            case ["published", channel, _, receivers]:
                self.receivers[channel] = int(receivers)
            case ["confirmed", channel, at]:
                self.confirmed[channel] = float(at)
            case ["gap", *what]:
                self.gaps.append(" ".join(what))
            case ["quiet"]:
                self.quiet = True
            case ["ends", at]:
                self.ended_at = float(at)
            case _:
                assert words[0] == "hushed", words

    def ask(self, command: str) -> None:
        """Give it a command."""
        self._child.stdin.write(f"{command}\n".encode())
        self._child.stdin.flush()

    def check(self) -> None:
        """Raise if it has ended by itself, or has written what cannot be read."""
        if self._fault is not None:
            raise self._fault
        if self._child.ended_by_itself:
            raise self._child.failure()

    def stop(self) -> None:
        """End it, whatever it is doing."""
        self._child.stop()

    def is_listening(self) -> bool:
        """Tell whether all of its subscriptions are confirmed."""
        self.check()
        return (self.confirmed.keys() >= {self.pattern}) if self.pattern else len(self.confirmed) == len(self.channels)

    def confirmed_at(self, channel: str) -> float:
        """Return when its subscription to a channel was confirmed."""
        return self.confirmed[self.pattern or channel]

    def has(self, other: App, channel: str, number: int) -> bool:
        """Tell whether the message of another application has come, or a later one."""
        return self.latest(other, channel) >= number

    def latest(self, other: App, channel: str) -> int:
        """Return the number of the latest message of another application that has come, 0 for none."""
        return (self.got.get((channel, other.name)) or [0])[-1]


class Fleet:
    """The applications, those that were replaced included. All end on exit."""

    def __init__(self) -> None:
        self.apps: list[App] = []
        self.running: list[App] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for app in self.apps:
            app.stop()

    def add(self, app: App) -> App:
        """Start an application, and wait until it listens."""
        self.apps.append(app)
        self.running.append(app)
        app.start()
        until(app.is_listening, f"{app.name} listens")
        return app

    def replace(self, old: App, new: App) -> App:
        """Upgrade an application as a rolling deployment does: the new one works before the old one ends."""
        self.add(new)
        self.flows()
        self.retire(old)
        return new

    def retire(self, app: App) -> None:
        """End an application when everybody has got what it published."""
        app.ask("hush")
        until(lambda: app.quiet, f"{app.name} publishes no more")
        self.flows()
        app.ask("quit")
        until(lambda: app.ended_at < float("inf"), f"{app.name} ends")
        self.running.remove(app)

    def flows(self) -> None:
        """Wait until everybody who runs has got the latest message of everybody, and some more."""
        wanted = [
            (app, channel, len(app.begun[channel]) + (0 if app.quiet else 3))
            for app in self.running
            for channel in app.channels
        ]

        def arrived() -> bool:
            for app in self.running:
                app.check()
            return all(other.has(*want) for other in self.running for want in wanted)

        try:
            until(arrived, "messages flow from everybody to everybody")
        except AssertionError as error:
            late = [
                f"{other.name} has not got {app.name}:{number} on {channel}, but {other.latest(app, channel)}"
                for other in self.running
                for app, channel, number in wanted
                if not other.has(app, channel, number)
            ]
            raise AssertionError(f"{error}: {late[:5]}") from error

    def finish(self) -> int:
        """Let everybody hush and get all, and judge; return how many messages were delivered."""
        for app in self.running:
            app.ask("hush")
        until(lambda: all(app.quiet for app in self.running), "all are quiet")
        self.flows()
        return sum(self._judge(listener, app, channel) for listener in self.apps for app, channel in self._streams())

    def _streams(self) -> list[tuple[App, str]]:
        return [(app, channel) for app in self.apps for channel in app.channels]

    @staticmethod
    def _judge(listener: App, publisher: App, channel: str) -> int:
        """Each message that began after the confirmation has come, once and in order, and nothing else has."""
        got = listener.got.get((channel, publisher.name), [])
        begun, since = publisher.begun[channel], listener.confirmed_at(channel)
        owed = [number for number, at in enumerate(begun, 1) if since < at and at < listener.ended_at - 1.0]
        what = f"{listener.name} ({listener.kind}) of {publisher.name} ({publisher.kind}) on {channel}"
        assert got == list(range(got[0], got[-1] + 1)) if got else True, f"{what}: not each once and in order: {got}"
        if owed:
            assert got, f"{what}: got nothing"
            assert got[0] <= owed[0], f"{what}: the first that came was {got[0]}, and {owed[0]} was owed"
            assert got[-1] >= owed[-1], f"{what}: the last that came was {got[-1]}, and {owed[-1]} was owed"
        assert not listener.strange, f"{listener.name} got what is no message: {listener.strange[:3]}"
        assert not listener.gaps, f"{listener.name} was told of gaps: {listener.gaps[:3]}"
        return len(got)
