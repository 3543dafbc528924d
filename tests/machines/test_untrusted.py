"""A server of the plan that is not trusted gets no connection: publishing there fails at once, with the reason."""

from __future__ import annotations

from typing import Any

from dynamoth.machine.events import LinkDown, LinkUp, Replied, Start
from dynamoth.plan.plan import Assignment, Mode, Route, single
from dynamoth.protocol.envelope import HEARTBEAT, open_envelope
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.events import Publish, PublisherOptions, PublishFailed
from dynamoth_client.machines.publisher.machine import PublisherMachine
from tests.machines.helpers import PLAN_0, RUN, SETTLED, C, Subject, channel_at, entry_reply, only, published, tagged

REASON = "not connected: add it to trusted_hosts"
LOOKS_S = 1.5 * PublisherOptions().look_elsewhere_s


class Publisher(Subject):
    def __init__(self) -> None:
        self.plan = LocalPlan(PLAN_0)
        super().__init__(PublisherMachine(7, self.plan))
        self.tell(Start())

    def publish(self, token: object, channel: bytes = C) -> list[Any]:
        return self.tell(Publish(token, channel, b"x"))

    def refuse(self, server: str) -> list[Any]:
        return self.tell(LinkDown(server, REASON, refused=True))

    def route(self, *servers: str, mode: Mode = Mode.SINGLE) -> None:
        route = Route(1, single(servers[0]) if mode is Mode.SINGLE else Assignment(mode, servers))
        assert self.plan.learn(C, route, self.now)


def failed(*tokens: object) -> list[PublishFailed]:
    return [PublishFailed(token, f"server s1: {REASON}") for token in tokens]


def test_messages_that_wait_fail_at_once_and_so_do_later_ones() -> None:
    publisher = Publisher()
    publisher.publish("a")
    publisher.publish("b")
    assert publisher.refuse("s1") == failed("a", "b")
    assert publisher.publish("c") == failed("c")
    publisher.refuse("s1")
    assert only(PublishFailed, publisher.pass_time(20.0)) == [], "each has one outcome"


def test_a_message_that_has_failed_is_not_sent_when_the_server_is_trusted_after_all() -> None:
    publisher = Publisher()
    publisher.publish("a")
    publisher.refuse("s1")
    assert [open_envelope(data).flags for data in published(publisher.tell(LinkUp("s1", RUN)), C)] == [HEARTBEAT]
    assert published(publisher.publish("b"), C) != []


def test_a_server_that_is_down_for_another_reason_gets_its_time() -> None:
    publisher = Publisher()
    publisher.publish("a")
    assert only(PublishFailed, publisher.tell(LinkDown("s1", "connection refused"))) == []


def test_another_server_is_asked_for_a_newer_route_and_the_next_message_goes_there() -> None:
    publisher = Publisher()
    publisher.publish("other", channel_at("s2"))
    publisher.tell(LinkUp("s2", RUN))
    publisher.publish("a")
    publisher.refuse("s1")
    assert publisher.publish("b") == failed("b")
    looks = tagged(publisher.pass_time(LOOKS_S), "elsewhere")
    assert [(send.link, send.tag[1]) for send in looks] == [("s2", C)]
    publisher.tell(Replied("s2", looks[0].tag, entry_reply(SETTLED, C)))
    assert published(publisher.publish("c"), C, "s2") != []


def test_other_replicas_take_the_message() -> None:
    publisher = Publisher()
    publisher.route("s1", "s2", mode=Mode.ALL_PUBLISHERS)
    publisher.publish("a")
    assert publisher.refuse("s1") == [], "s2 may take it"
    publisher.tell(LinkDown("s2", "connection refused"))
    assert only(PublishFailed, publisher.refuse("s2")) != [], "neither is trusted"
