"""Simulated plain Redis clients, which know one server, and nothing of plans and envelopes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dynamoth.machine.events import Connect, LinkDown, LinkUp, Pushed, Replied, Send, Start
from dynamoth.protocol.envelope import is_enveloped
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.load.clients import make_payload, read_payload
from dynamoth_sim.world.process import Process


class PlainClient:
    """Subscribes and publishes at one server; hands on what it gets."""

    def __init__(self, url: str, channels: tuple[bytes, ...] = ()) -> None:
        self._url = url
        self._channels = channels

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Start():
                return [Connect("server", self._url)]
            case LinkUp():
                subscribe = [Send("server", (b"SUBSCRIBE", *self._channels))] if self._channels else []
                return [*subscribe, event]
            case LinkDown() | Replied():
                return [event]
            case Pushed(_, messages):
                return list(messages)
            case (channel, number, payload):
                return [Send("server", (b"PUBLISH", channel, payload), (channel, number))]
            case _:
                raise AssertionError(f"not an event of a plain client: {event!r}")

    def deadline(self) -> float | None:
        """Return None: it wants no ticks."""
        return None


class RawPublisherApp:
    """Publishes numbered messages without envelopes, one after the other."""

    def __init__(self, cluster: Cluster, name: str, url: str, channel: bytes) -> None:
        self.name = name
        self._world = cluster.world
        self._audit = cluster.audit
        self._channel = channel
        self._number = 0
        self.process = Process(cluster.world, cluster.network, name, lambda _: PlainClient(url), self._acted)
        #: Called when it may publish (again).
        self.on_ended: Callable[[], Any] = lambda: None

    def publish(self) -> None:
        """Publish the next message."""
        self._number += 1
        self._audit.published(self.name, self._channel, self._number, self._world.now)
        self.process.handle((self._channel, self._number, make_payload(self.name, self._number)))

    def _acted(self, action: Any) -> None:
        match action:
            case LinkUp():
                self.on_ended()
            case LinkDown():
                self._audit.publisher_died(self.name, self._world.now)
            case Replied(_, (channel, number), _):
                self._audit.publish_ended(self.name, channel, number, self._world.now)
                self.on_ended()
            case _:
                raise AssertionError(f"not an action of a raw publisher: {action!r}")


class PlainSubscriberApp:
    """One application of a fleet that is not upgraded yet."""

    def __init__(self, cluster: Cluster, name: str, server: str, channels: Iterable[bytes]) -> None:
        self.name = name
        self.channels = tuple(channels)
        self._world = cluster.world
        self._audit = cluster.audit
        url = cluster.servers[server].url
        self.process = Process(
            cluster.world, cluster.network, name, lambda _: PlainClient(url, self.channels), self._acted
        )

    def start(self) -> None:
        """Begin to listen."""
        self.process.start()

    def is_confirmed(self) -> bool:
        """Tell whether the server has taken all of its subscriptions."""
        return all(self._audit.is_open(self.name, channel) for channel in self.channels)

    def stop(self) -> None:
        """Stop the application for its upgrade: messages under way are not due to it any more."""
        for channel in self.channels:
            self._audit.ending(self.name, channel)
        self._audit.subscriber_died(self.name, self._world.now)
        self.process.crash("is upgraded")

    def _acted(self, action: Any) -> None:
        if isinstance(action, LinkUp | LinkDown):
            return
        kind, channel, data = action
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
