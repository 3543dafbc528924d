"""A server cannot be reached: another one tells where its channels are, and messages go there once, in order."""

from __future__ import annotations

from typing import Any

from dynamoth.machine.events import Connect, LinkDown, LinkUp, Pushed, Replied, Send, Start
from dynamoth.protocol.envelope import HEARTBEAT, open_envelope
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.events import Publish, PublishAll, Published, PublisherOptions
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_client.machines.subscriber.events import GapDetected, Subscribe, SubscriberOptions, SubscriptionConfirmed
from dynamoth_client.machines.subscriber.machine import SubscriberMachine
from tests.machines.helpers import (
    PLAN_0,
    RUN,
    SETTLED,
    URLS,
    C,
    Subject,
    channel_at,
    entry_reply,
    only,
    published,
    sends,
    tagged,
)

ID = 0xABCD
LOOKS_S = 1.5 * PublisherOptions().look_elsewhere_s
"""Within this another server is asked."""


class Publisher(Subject):
    """A publisher whose servers answer with the plan in which C has moved from s1 to s2."""

    def __init__(self) -> None:
        super().__init__(PublisherMachine(ID, LocalPlan(PLAN_0)))
        self.tell(Start())

    def publish(self, token: object = "t", channel: bytes = C) -> list[Any]:
        return self.tell(Publish(token, channel, b"x"))

    def answer(self, actions: list[Any], plan: Any = PLAN_0) -> list[Any]:
        out: list[Any] = []
        for send in sends(actions):
            if send.tag is None:
                continue
            name = next((bytes(part[2:]) for part in send.args if isinstance(part, bytes) and part[:2] == b"c:"), b"")
            answers: dict[Any, Any] = {b"PUBLISH": 2, b"PUBSUB": [b"", 1], b"HMGET": entry_reply(plan, name)}
            out += self.tell(Replied(send.link, send.tag, answers[send.args[0]]))
        return out


def begun() -> Publisher:
    """One that knows C at s1, and is connected to s3, too."""
    publisher = Publisher()
    for server, channel in (("s1", C), ("s3", channel_at("s3"))):
        publisher.publish(channel=channel)
        publisher.answer(publisher.tell(LinkUp(server, RUN)))
    return publisher


def lost() -> Publisher:
    publisher = begun()
    publisher.tell(LinkDown("s1", "reset by peer"))
    return publisher


def numbers(actions: list[Any], link: str) -> list[int]:
    return [open_envelope(data).sequence for data in published(actions, C, link)]


def test_what_waits_for_a_server_that_is_gone_goes_where_another_says() -> None:
    publisher = lost()
    for token in (1, 2, 3):
        publisher.publish(token)
    asked = publisher.pass_time(LOOKS_S)
    assert [send.link for send in tagged(asked, "elsewhere")] == ["s3"]
    assert publisher.answer(asked, SETTLED) == [Connect("s2", URLS["s2"])]
    again = publisher.tell(LinkUp("s2", RUN))
    assert numbers(again, "s2") == [2, 3, 4]
    assert only(Published, publisher.answer(again, SETTLED)) == [Published(token, 1) for token in (1, 2, 3)]
    assert numbers(publisher.publish(), "s2") == [5]
    assert numbers(publisher.tell(LinkUp("s1", RUN)), "s1") == [], "nothing goes two ways"


def test_what_was_answered_and_not_confirmed_goes_there_too() -> None:
    publisher = Publisher()
    publisher.publish(channel=channel_at("s3"))
    publisher.answer(publisher.tell(LinkUp("s3", RUN)))
    publisher.publish("first")
    [publish] = [send for send in sends(publisher.tell(LinkUp("s1", RUN))) if send.args[0] == b"PUBLISH"]
    assert publisher.tell(Replied("s1", publish.tag, 1)) == []
    publisher.tell(LinkDown("s1", "reset by peer"))
    publisher.answer(publisher.pass_time(LOOKS_S), SETTLED)
    again = publisher.tell(LinkUp("s2", RUN))
    assert numbers(again, "s2") == [1]
    assert only(Published, publisher.answer(again, SETTLED)) == [Published("first", 1)]


def test_who_has_no_other_connection_opens_one() -> None:
    publisher = Publisher()
    publisher.publish()
    opened = only(Connect, publisher.pass_time(LOOKS_S))
    assert opened[0] == Connect("s2", URLS["s2"])
    publisher.answer(publisher.tell(LinkUp("s2", RUN)))
    again = publisher.answer(publisher.pass_time(0.2), SETTLED)
    assert numbers(again, "s2") == [1]


def test_a_channel_that_nobody_waits_for_is_looked_up_once_for_its_subscribers() -> None:
    """What was published there last may have been lost with the server and its agent."""
    publisher = lost()
    publisher.answer(publisher.pass_time(LOOKS_S), SETTLED)
    told = publisher.tell(LinkUp("s2", RUN))
    assert [(e.flags, e.sequence) for e in map(open_envelope, published(told, C, "s2"))] == [(HEARTBEAT, 1)]
    assert tagged(publisher.pass_time(30.0), "elsewhere") == []


def silent() -> tuple[Publisher, list[Any], list[Send]]:
    """One whose server s1 is connected and leaves messages unanswered; what it asked elsewhere; and the messages."""
    publisher = begun()
    sent = publisher.publish(1)
    sent += publisher.publish("other", channel_at("s1", 1))
    sent += publisher.tell(PublishAll([(2, C, b"x"), (3, C, b"x")]))
    asked = publisher.pass_time(PublisherOptions().silent_s + LOOKS_S)
    assert [send.link for send in tagged(asked, "elsewhere")] == ["s3", "s3"], "for each channel"
    return publisher, asked, sends(sent)


def test_what_a_server_leaves_unanswered_goes_where_another_says() -> None:
    publisher, asked, _ = silent()
    assert publisher.answer(asked, SETTLED) == [Connect("s2", URLS["s2"])]
    again = publisher.tell(LinkUp("s2", RUN))
    assert numbers(again, "s2") == [2, 3, 4]
    assert only(Published, publisher.answer(again, SETTLED)) == [Published(token, 1) for token in (1, 2, 3)]
    assert numbers(publisher.publish(), "s2") == [5]


def test_what_a_server_answers_late_has_had_its_outcome() -> None:
    publisher, asked, sent = silent()
    publisher.answer(asked, SETTLED)
    assert only(Published, publisher.answer(sent)) == [Published("other", 1)], "the others wait for s2"


class Listener(Subject):
    def __init__(self) -> None:
        super().__init__(
            SubscriberMachine(ID, LocalPlan(PLAN_0), SubscriberOptions(move_spread_s=0.0, join_moving_s=0.0))
        )
        self.tell(Start())

    def found(self, actions: list[Any]) -> list[Any]:
        """Answer what was asked elsewhere, and what verifies the place that is joined then."""
        out: list[Any] = []
        for send in only(Send, actions):
            if send.args[0] == b"SUBSCRIBE" and send.args[1] == C:
                out += self.tell(Pushed(send.link, [[b"subscribe", C, 1]]))
            elif send.args[0] == b"HMGET":
                out += self.tell(Replied(send.link, send.tag, entry_reply(SETTLED, C)))
        return out


def test_a_new_subscriber_is_confirmed_although_the_home_is_down() -> None:
    listener = Listener()
    listener.tell(Subscribe((C,)))
    assert Connect("ask:s2", URLS["s2"]) in listener.pass_time(LOOKS_S)
    listener.tell(LinkUp("ask:s2", RUN))
    assert listener.found(listener.pass_time(0.2)) == [Connect("s2", URLS["s2"])]
    joined = listener.tell(LinkUp("s2", RUN))
    assert only(SubscriptionConfirmed, listener.found(joined)) == [SubscriptionConfirmed(C)]


def test_a_subscriber_whose_server_is_gone_follows_and_says_what_it_may_have_missed() -> None:
    listener = Listener()
    listener.tell(Subscribe((C,)))
    for send in only(Send, listener.tell(LinkUp("s1", RUN))):
        if send.args[0] == b"HMGET":
            listener.tell(Replied("s1", send.tag, entry_reply(PLAN_0, C)))
    listener.tell(LinkDown("s1", "reset by peer"))
    listener.pass_time(LOOKS_S)
    listener.tell(LinkUp("ask:s2", RUN))
    listener.found(listener.pass_time(0.2))
    joined = listener.tell(LinkUp("s2", RUN))
    assert [gap.channel for gap in only(GapDetected, listener.found(joined))] == [C]
