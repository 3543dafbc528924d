"""A subscriber machine in a test, with servers that answer when the test says so."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from dynamoth.machine.events import Pushed, Start
from dynamoth.names import ANNOUNCE_CHANNEL, inbox
from dynamoth.plan.plan import Plan, Route
from dynamoth.protocol.control import Announcement, Marker, RouteNotice, unpack_control
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.subscriber.events import Deliver, Subscribe, SubscriberOptions, Unsubscribe
from dynamoth_client.machines.subscriber.machine import SubscriberMachine
from tests.machines.helpers import PLAN_0, URLS, C, Subject, control, entry_reply, only, published, reply, tagged

OPTIONS = SubscriberOptions(move_spread_s=0.0, join_moving_s=0.0, look_elsewhere_s=inf, marker_s=inf)
ID = 0xABCD
INBOX = inbox(ID)


class Listener(Subject):
    """A subscriber."""

    def __init__(self, options: SubscriberOptions = OPTIONS, header: Plan = PLAN_0) -> None:
        self.plan = LocalPlan(header)
        self.subscriber = SubscriberMachine(ID, self.plan, options)
        super().__init__(self.subscriber)
        #: Server to the number of the latest announcement there.
        self.announced: dict[str, int] = {}
        self.tell(Start())

    @property
    def counters(self) -> dict[str, int]:
        return self.subscriber.counters

    def tell(self, *events: Any) -> list[Any]:
        actions = super().tell(*events)
        for server in URLS:
            for message in map(unpack_control, published(actions, ANNOUNCE_CHANNEL, server)):
                assert isinstance(message, Announcement)
                self.announced[server] = message.number
        return actions

    def subscribe(self, *channels: bytes) -> list[Any]:
        return self.tell(Subscribe(channels or (C,)))

    def unsubscribe(self, *channels: bytes) -> list[Any]:
        return self.tell(Unsubscribe(channels or (C,)))

    def verify(self, actions: Iterable[Any], plan: Plan | None, channel: bytes = C) -> list[Any]:
        """Answer every verification as a server would that stores ``plan``."""
        stored = entry_reply(plan, channel)
        return [action for send in tagged(actions, "verify") for action in self.tell(reply(send, stored))]

    def confirmed(self, plan: Plan = PLAN_0, channel: bytes = C) -> Listener:
        """Subscribe, and be confirmed at the channel's home."""
        self.subscribe(channel)
        self.verify(self.up(self.plan.home(channel).assignment.servers[0]), plan, channel)
        return self

    def moving(self, plan: Plan, route: Route) -> Listener:
        """From a confirmed subscription at s1: learn ``route`` and be verified there; s1 is still listened to."""
        self.learn(route)
        self.verify(self.up(route.assignment.servers[0]), plan)
        return self

    def learn(self, route: Route, link: str = "s1", channel: bytes = C) -> list[Any]:
        return self.push(link, channel, control(RouteNotice(channel, route)))

    def acknowledged(self, *kinds: bytes, link: str = "s1") -> list[Any]:
        """Let the server acknowledge SUBSCRIBE or UNSUBSCRIBE, as RESP3 does: with a push."""
        return self.tell(Pushed(link, [[kind, C, 1] for kind in kinds]))

    def mark(self, link: str, server: str = "s2", number: int | None = None) -> list[Any]:
        """Let a marker of the dispatcher of ``server`` come to the inbox: the answer to the latest announcement."""
        answered = self.announced[server] if number is None else number
        return self.push(link, INBOX, control(Marker(C, server, answered)))


def joining() -> tuple[Listener, list[Any]]:
    """Return a subscriber that has asked for C and is connected to s1, and what it sends there."""
    listener = Listener()
    listener.subscribe()
    return listener, listener.up("s1")


def delivered(actions: Iterable[Any]) -> list[bytes]:
    """Return the payloads handed to the application."""
    return [payload for action in only(Deliver, actions) for _, payload in action.messages]
