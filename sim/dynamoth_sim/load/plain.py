"""A simulated subscriber that is a plain Redis client: it knows one server, and nothing of plans and envelopes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynamoth.machine.events import Connect, LinkUp, Pushed, Send, Start
from dynamoth.protocol.envelope import is_enveloped
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.load.clients import read_payload
from dynamoth_sim.world.process import Process


class PlainSubscriber:
    """Subscribes at one server, and hands on what comes."""

    def __init__(self, url: str, channels: Iterable[bytes]) -> None:
        self._url = url
        self._channels = tuple(channels)

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        match event:
            case Start():
                return [Connect("server", self._url)]
            case LinkUp():
                return [Send("server", (b"SUBSCRIBE", *self._channels))]
            case Pushed():
                return list(event.messages)
            case _:
                return []

    def deadline(self) -> float | None:
        """Return None: it wants no ticks."""
        return None


class PlainSubscriberApp:
    """One application of a fleet that is not upgraded yet."""

    def __init__(self, cluster: Cluster, name: str, server: str, channels: Iterable[bytes]) -> None:
        self.name = name
        self.channels = tuple(channels)
        self._world = cluster.world
        self._audit = cluster.audit
        url = cluster.servers[server].url
        self.process = Process(
            cluster.world, cluster.network, name, lambda _: PlainSubscriber(url, self.channels), self._acted
        )

    def start(self) -> None:
        """Begin to listen."""
        self.process.start()

    def is_confirmed(self) -> bool:
        """Tell whether the server has taken all of its subscriptions."""
        return all(self._audit.is_open(self.name, channel) for channel in self.channels)

    def stop(self) -> None:
        """End it, as it is upgraded: what is under way is not due to it any more."""
        for channel in self.channels:
            self._audit.ending(self.name, channel)
        self._audit.subscriber_died(self.name, self._world.now)
        self.process.crash("is upgraded")

    def _acted(self, action: Any) -> None:
        kind, channel, data = action[0], action[1], action[2]
        now = self._world.now
        if kind == b"subscribe":
            self._audit.confirmed(self.name, channel, now)
        elif kind == b"message" and is_enveloped(data):
            self._world.trace.add((now, "CANNOT READ", self.name, None, channel, data, None))
            self._audit.unreadable(self.name, channel, now)
        elif kind == b"message":
            publisher, number = read_payload(data)
            self._world.trace.add((now, "DELIVERS", self.name, None, channel, data, None))
            self._audit.delivered(self.name, channel, publisher, number, now)
