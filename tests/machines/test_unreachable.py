"""A server cannot be reached, or is not trusted: another one tells where its channels are, and messages go there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynamoth.machine.events import Connect, Disconnect, LinkDown, Send
from dynamoth.plan.plan import Mode, single
from dynamoth.protocol.envelope import HEARTBEAT
from dynamoth_client.machines.publisher.events import PublishAll, Published, PublishFailed
from dynamoth_client.machines.subscriber.events import GapDetected, SubscriberOptions, SubscriptionConfirmed
from tests.machines.helpers import (
    PLAN_0,
    SETTLED,
    URLS,
    C,
    channel_at,
    entry_reply,
    only,
    phases,
    published,
    reply,
    sends,
    tagged,
    to_replicas,
)
from tests.machines.listener import OPTIONS, Listener
from tests.machines.publisher import DEFAULTS, Publisher, envelopes, numbers

LOOKS_S = 1.5 * DEFAULTS.look_elsewhere_s
"""Within this another server is asked."""


class Looking(Publisher):
    """A publisher that asks elsewhere, and whose servers store the plan in which C has moved from s1 to s2, or not."""

    def __init__(self) -> None:
        super().__init__(look_elsewhere_s=DEFAULTS.look_elsewhere_s)

    def found(self, actions: list[Any]) -> list[Any]:
        return self.answer(actions, receivers=2, observers=1, stored=SETTLED)


def begun() -> Looking:
    """One that knows C at s1, and is connected to s3, too."""
    publisher = Looking()
    for server, channel in (("s1", C), ("s3", channel_at("s3"))):
        publisher.publish(channel)
        publisher.answer(publisher.up(server), observers=1)
    return publisher


def lost() -> Looking:
    publisher = begun()
    publisher.down("s1")
    return publisher


def test_what_waits_for_a_server_that_is_gone_goes_where_another_says() -> None:
    publisher = lost()
    for token in (1, 2, 3):
        publisher.publish(token=token)
    asked = publisher.pass_time(LOOKS_S)
    assert [send.link for send in tagged(asked, "elsewhere")] == ["s3"]
    assert publisher.found(asked) == [Connect("s2", URLS["s2"])]
    again = publisher.up("s2")
    assert numbers(again, link="s2") == [2, 3, 4]
    assert only(Published, publisher.found(again)) == [Published(token, 1) for token in (1, 2, 3)]
    assert numbers(publisher.publish(), link="s2") == [5]
    assert numbers(publisher.up("s1"), link="s1") == [], "nothing goes two ways"


def test_what_was_answered_and_not_confirmed_goes_there_too() -> None:
    publisher = Looking().connected("s3")
    publisher.publish(token="first")
    [publish] = [send for send in sends(publisher.up("s1")) if send.args[0] == b"PUBLISH"]
    assert publisher.tell(reply(publish, 1)) == []
    publisher.down("s1")
    publisher.found(publisher.pass_time(LOOKS_S))
    again = publisher.up("s2")
    assert numbers(again, link="s2") == [1]
    assert only(Published, publisher.found(again)) == [Published("first", 1)]


def test_what_one_replica_has_not_confirmed_goes_there_though_another_replica_has_taken_later_messages() -> None:
    publisher = Looking().connected("s2", "s3")
    publisher.plan.learn(C, to_replicas(Mode.ALL_SUBSCRIBERS, "s1"), publisher.now)
    publisher.publish(token="first")
    [publish] = [send for send in sends(publisher.up("s1")) if send.args[0] == b"PUBLISH"]
    assert publisher.tell(reply(publish, 1)) == []
    publisher.down("s1")
    publisher.learn(to_replicas(Mode.ALL_SUBSCRIBERS, "s1", "s2", epoch=2), link="s3")
    later = publisher.publish(token="second")
    later += publisher.pass_time(DEFAULTS.failover_s)
    assert {send.link for send in sends(later) if send.args[0] == b"PUBLISH"} == {"s2"}
    publisher.answer(later)
    *_, moved = phases(replace(PLAN_0, version=5), single("s3"))
    again = publisher.answer(publisher.pass_time(DEFAULTS.look_again_s), stored=moved)
    assert numbers(again, link="s3") == [1]
    assert only(Published, publisher.answer(again, stored=moved)) == [Published("first", 1)]


def test_who_has_no_other_connection_opens_one() -> None:
    publisher = Looking()
    publisher.publish()
    assert Connect("s3", URLS["s3"]) == only(Connect, publisher.pass_time(LOOKS_S))[0]
    publisher.answer(publisher.up("s3"), observers=1)
    publisher.found(publisher.pass_time(0.2))
    assert numbers(publisher.up("s2"), link="s2") == [1]


def test_a_channel_that_nobody_waits_for_is_looked_up_once_for_its_subscribers() -> None:
    """What was published there last may have been lost with the server and its agent."""
    publisher = lost()
    publisher.found(publisher.pass_time(LOOKS_S))
    assert [(e.flags, e.sequence) for e in envelopes(publisher.up("s2"), link="s2")] == [(HEARTBEAT, 1)]
    assert tagged(publisher.pass_time(30.0), "elsewhere") == []


def test_a_channel_that_is_new_is_looked_up_at_once_where_a_server_has_been_away_for_long() -> None:
    """Its home may be dead for days, until somebody removes it: each new channel must not wait for that."""
    publisher = lost()
    publisher.pass_time(LOOKS_S)
    first, second = channel_at("s1", 1), channel_at("s1", 2)

    def asked(*channels: bytes, within_s: float) -> list[bytes]:
        for channel in channels:
            publisher.publish(channel)
        return [send.tag[1] for send in tagged(publisher.pass_time(within_s), "elsewhere")]

    assert asked(first, within_s=0.0) == [first]
    assert asked(first, second, within_s=0.0) == [second], "each is asked for once"
    again = asked(first, within_s=DEFAULTS.look_again_s)
    assert sorted(again) == sorted([first, second]), "and again, together with all that wait"
    publisher.answer(publisher.up("s1"), observers=1)
    assert asked(channel_at("s1", 3), within_s=0.0) == []


def test_a_server_that_was_removed_is_left_when_nothing_waits_for_it() -> None:
    publisher = begun()
    listed = {id_: server for id_, server in PLAN_0.servers.items() if id_ != "s1"}
    publisher.publish()
    publisher.plan.update_header(replace(PLAN_0, version=1, servers=listed))
    assert Disconnect("s1") not in publisher.down("s1"), "a message waits for it"
    publisher.found(publisher.pass_time(LOOKS_S))
    assert publisher.down("s1") == [Disconnect("s1")]
    assert publisher.down("s3") == [], "it is in the plan, and comes back"
    publisher.plan.update_header(replace(PLAN_0, version=2))
    assert Connect("s1", URLS["s1"]) in publisher.publish(channel_at("s1", 1)), "a new cluster lists it again"


def silent() -> tuple[Looking, list[Any], list[Send]]:
    """One whose server s1 is connected and leaves messages unanswered; what it asked elsewhere; and the messages."""
    publisher = begun()
    sent = [*publisher.publish(token=1), *publisher.publish(channel_at("s1", 1), token="other")]
    sent += publisher.tell(PublishAll([(2, C, b"x"), (3, C, b"x")]))
    asked = publisher.pass_time(DEFAULTS.silent_s + LOOKS_S)
    assert [send.link for send in tagged(asked, "elsewhere")] == ["s3", "s3"], "for each channel"
    return publisher, asked, sends(sent)


def test_what_a_server_leaves_unanswered_goes_where_another_says() -> None:
    publisher, asked, _ = silent()
    assert publisher.found(asked) == [Connect("s2", URLS["s2"])]
    again = publisher.up("s2")
    assert numbers(again, link="s2") == [2, 3, 4]
    assert only(Published, publisher.found(again)) == [Published(token, 1) for token in (1, 2, 3)]
    assert numbers(publisher.publish(), link="s2") == [5]


def test_what_a_server_answers_late_has_had_its_outcome() -> None:
    publisher, asked, sent = silent()
    publisher.found(asked)
    late = publisher.answer(sent, receivers=2, observers=1)
    assert only(Published, late) == [Published("other", 1)], "the others wait for s2"


LOOKING = replace(OPTIONS, look_elsewhere_s=SubscriberOptions().look_elsewhere_s)
ASKS_S = LOOKING.look_elsewhere_s + LOOKING.look_elsewhere_again_s
"""Within this a subscriber asks another server."""


def found(listener: Listener, actions: list[Any]) -> list[Any]:
    """Answer what was asked elsewhere, and what verifies the place that is joined then."""
    asked = [send for send in only(Send, actions) if send.args[0] == b"HMGET"]
    return [action for send in asked for action in listener.tell(reply(send, entry_reply(SETTLED, C)))]


def test_a_new_subscriber_is_confirmed_although_the_home_is_down() -> None:
    listener = Listener(LOOKING)
    listener.subscribe()
    ask = only(Connect, listener.pass_time(ASKS_S))[0]
    assert ask.link in ("ask:s2", "ask:s3")
    listener.up(ask.link)
    assert found(listener, listener.pass_time(0.2)) == [Connect("s2", URLS["s2"])]
    assert found(listener, listener.up("s2")) == [SubscriptionConfirmed(C)]


def test_a_new_subscriber_asks_at_once_where_the_home_has_been_down_for_long() -> None:
    listener = Listener(LOOKING)
    listener.subscribe()
    ask = only(Connect, listener.pass_time(ASKS_S))[0]
    listener.up(ask.link)
    other = channel_at("s1", 1)
    listener.subscribe(other)
    assert [send.tag[1] for send in tagged(listener.pass_time(0.0), "elsewhere")] == [other]


def test_a_subscriber_whose_server_is_gone_follows_and_says_what_it_may_have_missed() -> None:
    listener = Listener(LOOKING).confirmed()
    listener.down("s1")
    ask = only(Connect, listener.pass_time(ASKS_S))[0]
    listener.up(ask.link)
    found(listener, listener.pass_time(0.2))
    assert [gap.channel for gap in only(GapDetected, found(listener, listener.up("s2")))] == [C]


# A server that is not trusted gets no connection: publishing there fails at once, with the reason.

REASON = "not connected: add it to trusted_hosts"


def refuse(publisher: Publisher, server: str) -> list[Any]:
    return publisher.tell(LinkDown(server, REASON, refused=True))


def failed(*tokens: object) -> list[PublishFailed]:
    return [PublishFailed(token, f"server s1: {REASON}") for token in tokens]


def test_messages_that_wait_fail_at_once_and_so_do_later_ones() -> None:
    publisher = Looking()
    publisher.publish(token="a")
    publisher.publish(token="b")
    assert only(PublishFailed, publisher.tell(LinkDown("s1", "connection refused"))) == [], "another reason"
    assert refuse(publisher, "s1") == failed("a", "b")
    assert publisher.publish(token="c") == failed("c")
    assert {each.flags for each in envelopes(publisher.up("s1"))} == {HEARTBEAT}, "not sent after all"
    refuse(publisher, "s1")
    assert only(PublishFailed, publisher.pass_time(20.0)) == [], "each has one outcome"
    publisher.up("s1")
    assert published(publisher.publish(), C) != []


def test_another_server_is_asked_for_a_newer_route_and_the_next_message_goes_there() -> None:
    publisher = Looking()
    publisher.publish(channel_at("s2"))
    publisher.up("s2")
    publisher.publish(token="a")
    refuse(publisher, "s1")
    assert publisher.publish(token="b") == failed("b")
    [look] = tagged(publisher.pass_time(LOOKS_S), "elsewhere")
    assert (look.link, look.tag[1]) == ("s2", C)
    publisher.found([look])
    assert published(publisher.publish(), C, "s2") != []
    late = channel_at("s1", 1)
    publisher.publish(late)
    [look] = tagged(publisher.pass_time(20 * LOOKS_S), "elsewhere")
    assert look.tag[1] == late, "also of a channel that was first used after the refusal"


def test_other_replicas_take_the_message() -> None:
    publisher = Looking()
    publisher.plan.learn(C, to_replicas(Mode.ALL_PUBLISHERS, "s1", "s2"), publisher.now)
    publisher.publish()
    assert refuse(publisher, "s1") == [], "s2 may take it"
    publisher.down("s2")
    assert only(PublishFailed, refuse(publisher, "s2")) != [], "neither is trusted"
