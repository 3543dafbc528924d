"""A publisher machine in a test, with servers that answer when the test says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any, Self

from dynamoth.machine.events import Start
from dynamoth.names import AGENT_CHANNEL, inbox
from dynamoth.plan.plan import Plan, Route, single
from dynamoth.protocol.control import RouteNotice, pack_control
from dynamoth.protocol.envelope import Envelope, open_envelope
from dynamoth.protocol.stored_plan import READ_BELIEVED_VERSION
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.events import Publish, PublisherOptions
from dynamoth_client.machines.publisher.machine import PublisherMachine
from tests.machines.helpers import PLAN_0, RUN, C, Subject, channel_at, entry_reply, published, reply, sends

ID = 0xABCD
INBOX = inbox(ID)
TO_S2 = Route(1, single("s2"))
DEFAULTS = PublisherOptions()


class Publisher(Subject):
    """A publisher; as most tests are about one server at a time, it asks no other one where a channel is."""

    def __init__(
        self, options: PublisherOptions = DEFAULTS, header: Plan = PLAN_0, *, look_elsewhere_s: float = inf
    ) -> None:
        self.plan = LocalPlan(header)
        self.publisher = PublisherMachine(ID, self.plan, replace(options, look_elsewhere_s=look_elsewhere_s))
        super().__init__(self.publisher)
        self.tell(Start())

    def publish(self, channel: bytes = C, token: object = "t", payload: bytes = b"x") -> list[Any]:
        return self.tell(Publish(token, channel, payload))

    def learn(self, route: Route, channel: bytes = C, link: str = "s1") -> list[Any]:
        return self.push(link, INBOX, pack_control(RouteNotice(channel, route)))

    def connected(self, *links: str) -> Self:
        """Let the links come up as soon as something is published there."""
        for link in links or ("s1",):
            self.publish(channel_at(link, 9))
            self.answer(self.up(link))
        return self

    def answer(
        self, actions: Iterable[Any], receivers: object = 1, observers: int = 0, stored: Plan = PLAN_0
    ) -> list[Any]:
        """Answer every command as a server would that stores a plan."""
        out: list[Any] = []
        for send in sends(actions):
            if send.tag is None:
                continue
            value = receivers
            if send.args == READ_BELIEVED_VERSION:
                value = version_reply(stored.version)
            elif send.args[0] == b"HMGET":
                fields = [part for part in send.args if isinstance(part, bytes)]
                value = entry_reply(stored, next((name[2:] for name in fields if name.startswith(b"c:")), b""))
            elif send.args[0] == b"PUBSUB":
                value = [AGENT_CHANNEL, observers]
            out += self.tell(reply(send, value))
        return out


def version_reply(version: int) -> list[bytes]:
    return [b"%d" % version, RUN.encode()]


def envelopes(actions: list[Any], channel: bytes = C, link: str | None = None) -> list[Envelope]:
    """Return what is published, without the time since the previous message."""
    return [open_envelope(data)._replace(quiet_ms=0) for data in published(actions, channel, link)]


def numbers(actions: list[Any], channel: bytes = C, link: str | None = None) -> list[int]:
    return [envelope.sequence for envelope in envelopes(actions, channel, link)]
