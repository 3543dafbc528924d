"""Tiny machines, to test the simulated driver with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import Connect, LinkUp, Send, Start


@dataclass(slots=True)
class Do:
    """Event: ask for these actions."""

    actions: list[Any]


class Recorder:
    """Connects to one server, sends the same commands at each connection, and keeps every event with its time."""

    def __init__(self, url: str, *commands: tuple[bytes, ...]) -> None:
        self._url = url
        self._commands = commands
        self.events: list[Any] = []
        self.times: list[float] = []
        self.deadline_at: float | None = None

    def handle(self, event: Any, now: float) -> list[Any]:
        self.events.append(event)
        self.times.append(now)
        match event:
            case Start():
                return [Connect("server", self._url)]
            case LinkUp():
                return [Send("server", command, command) for command in self._commands]
            case Do(actions):
                return actions
            case _:
                return []

    def deadline(self) -> float | None:
        return self.deadline_at

    def kinds(self) -> list[type[object]]:
        """Return the kinds of all events, in their order."""
        return [type(event) for event in self.events]

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]
