"""The publisher machine: numbering, routes, resending, outcomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import dynamoth.machine.outbox
from dynamoth.machine.events import Connect, Disconnect, ErrorReply, Replied, RepliedAll, Send
from dynamoth.names import AGENT_CHANNEL, CLIENTS_CHANNEL
from dynamoth.plan.plan import Plan, Route, single
from dynamoth.protocol.control import Marker, ObservationGap, pack_control
from dynamoth.protocol.envelope import FIRST, HEARTBEAT, QUIET_MS_MAX, ROUTE_CHANGED, Envelope, open_envelope, seal
from dynamoth.protocol.stored_plan import READ_BELIEVED_VERSION, READ_HEADER, read_entry
from dynamoth_client.machines.publisher.checks import READ_AGAIN_S
from dynamoth_client.machines.publisher.events import (
    PublishAll,
    Published,
    PublishedAll,
    PublisherOptions,
    PublishFailed,
    PublishRefused,
)
from dynamoth_client.machines.standalone import ALONE, OVERLAP_S, plan_of
from tests.machines.helpers import (
    ACTIVE,
    GROWN,
    PLAN_0,
    RUN,
    SETTLED,
    TO_S4,
    URLS,
    C,
    channel_at,
    commands,
    entry_reply,
    header_reply,
    only,
    over,
    published,
    sends,
    tagged,
)
from tests.machines.publisher import DEFAULTS, ID, INBOX, TO_S2, Publisher, envelopes, numbers, version_reply

# The first message.


def test_connects_where_the_channel_is_and_sends_when_the_link_is_up() -> None:
    publisher = Publisher()
    assert publisher.publish() == [Connect("s1", URLS["s1"])]
    actions = publisher.up("s1")
    assert actions[:2] == [
        Send("s1", (b"SUBSCRIBE", INBOX, CLIENTS_CHANNEL)),
        Send("s1", (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), ("observers",)),
    ]
    assert envelopes(actions) == [Envelope(FIRST, ID, 1, 0, b"x")]


def test_numbers_grow_by_one_per_channel_and_only_the_first_is_first() -> None:
    publisher = Publisher().connected()
    for channel, expected in ((C, (1, FIRST)), (C, (2, 0)), (channel_at("s1", 1), (1, FIRST)), (C, (3, 0))):
        [envelope] = envelopes(publisher.publish(channel), channel)
        assert (envelope.sequence, envelope.flags) == expected


def test_says_how_long_it_has_been_quiet() -> None:
    """A subscriber knows by it whether it should have got the previous message."""
    publisher = Publisher().connected()
    publisher.publish()
    for quiet_s, quiet_ms in ((0.0, 0), (0.0125, 12), (1.0, 1000), (3600.0, QUIET_MS_MAX)):
        publisher.now += quiet_s
        [data] = published(publisher.publish(), C)
        assert abs(open_envelope(data).quiet_ms - quiet_ms) <= 1


# Answers.


def test_tells_the_receivers_without_the_agents_and_asks_for_these_once_per_second() -> None:
    """G7: infrastructure is not counted."""
    publisher = Publisher()
    publisher.publish(token=1)
    assert publisher.answer(publisher.up("s1"), receivers=4, observers=1) == [Published(1, 3)]
    assert publisher.answer(publisher.publish(token=2), receivers=1) == [Published(2, 0)]
    assert publisher.answer(publisher.publish(token=3), receivers=0) == [Published(3, 0)]
    assert tagged(publisher.publish(), "observers") == []
    publisher.now += 1.0
    assert len(tagged([*publisher.publish(), *publisher.publish()], "observers")) == 1


def test_tells_that_the_server_refused() -> None:
    publisher = Publisher().connected()
    actions = publisher.answer(publisher.publish(token=1), receivers=ErrorReply("NOPERM no"))
    assert actions == [PublishRefused(1, "NOPERM no")]


def test_an_outcome_comes_within_the_timeout_and_only_once() -> None:
    publisher = Publisher(PublisherOptions(publish_timeout_s=10)).connected()
    sent = publisher.publish(token=1)
    assert publisher.machine.deadline() == publisher.now + 10
    assert publisher.pass_time(9.9) == []
    [failed] = publisher.pass_time(0.1)
    assert isinstance(failed, PublishFailed)
    assert (failed.token, failed.late) == (1, True)
    assert failed.reason.startswith("server s1 did not answer for 10 s: it is connected, so the message may have been")
    assert "socket_timeout" in failed.reason
    assert publisher.answer(sent) == []
    assert publisher.machine.deadline() is None


def test_messages_that_went_out_together_are_late_or_have_no_connection() -> None:
    publisher = Publisher(PublisherOptions(publish_timeout_s=1)).connected()
    publisher.answer(publisher.publish())
    messages = [(token, C, b"x") for token in (1, 2)]
    publisher.tell(PublishAll(messages))
    assert [(failed.token, failed.late) for failed in publisher.pass_time(1)] == [(1, True), (2, True)]
    publisher.tell(PublishAll(messages))
    publisher.down("s1")
    assert [(failed.token, failed.late) for failed in publisher.pass_time(1)] == [(1, False), (2, False)]
    publisher.publish(token=3)
    publisher.pass_time(0.5)
    publisher.up("s1")
    [failed] = publisher.pass_time(0.5)
    assert (failed.token, failed.late) == (3, True), "the new connection owes the answer"


def test_what_has_failed_while_the_link_was_down_is_not_sent_any_more() -> None:
    publisher = Publisher(PublisherOptions(publish_timeout_s=1))
    publisher.publish(token=1)
    publisher.pass_time(0.5)
    publisher.publish(token=2)
    publisher.pass_time(0.5)
    assert numbers(publisher.up("s1")) == [2, 2]  # the message, and a heartbeat that tells of the one that failed


def test_one_message_too_many_fails_at_once_and_takes_no_number() -> None:
    publisher = Publisher(PublisherOptions(unanswered_max=3))  # the two, and the reading of the plan after the first
    publisher.publish()
    publisher.publish()
    assert publisher.publish(token=3) == [
        PublishFailed(3, "3 messages wait for server s1: not connected yet: check that it is up and can be reached")
    ]
    sent = publisher.up("s1")
    [failed] = publisher.publish(token=4)
    assert failed.reason.startswith("3 messages wait for server s1: it is connected and too slow")
    publisher.answer(sent)
    assert numbers(publisher.publish()) == [3]


# A server without an agent.


@pytest.mark.parametrize("observers", [0, 1])
def test_what_was_published_at_the_wrong_server_is_sent_again_by_the_right_route(observers: int) -> None:
    """A new client follows the ring. An agent that would forward its messages may not be there, hang, lag or die."""
    publisher = Publisher().connected("s1", "s2")
    first, *rest = (publisher.publish(token=token) for token in range(3))
    assert commands([action for actions in rest for action in actions], b"HMGET") == [], "one reading is for all"
    again = publisher.answer([*first, *rest[0], *rest[1]], 0, observers, SETTLED)
    assert envelopes(again, link="s2") == [
        Envelope(FIRST | ROUTE_CHANGED, ID, 1, 1, b"x"),
        Envelope(ROUTE_CHANGED, ID, 2, 1, b"x"),
        Envelope(ROUTE_CHANGED, ID, 3, 1, b"x"),
    ]
    assert len(commands(again, b"HMGET", "s2")) == 1
    assert publisher.answer(again, 4, 1, SETTLED) == [Published(token, 4) for token in range(3)]
    assert publisher.publisher.deadline() is None
    assert envelopes(publisher.publish(), link="s2") == [Envelope(0, ID, 4, 1, b"x")]


@pytest.mark.parametrize("stored", [[b"0", b"", None], ErrorReply("NOPERM")], ids=["read", "refused"])
def test_the_outcome_of_a_first_message_waits_for_the_reading_behind_it(stored: Any) -> None:
    publisher = Publisher().connected()
    publish, read = publisher.publish()
    assert publisher.tell(Replied("s1", publish.tag, 3)) == []
    assert publisher.tell(Replied("s1", read.tag, stored)) == [Published("t", 3)]


def test_a_message_that_no_reading_confirms_fails() -> None:
    """The server has taken it and was lost: nobody knows whether the channel is there."""
    publisher = Publisher(PublisherOptions(publish_timeout_s=1)).connected()
    publish, _ = publisher.publish()
    publisher.tell(Replied("s1", publish.tag, 3))
    publisher.down("s1")
    [failed] = publisher.pass_time(1.1)
    assert isinstance(failed, PublishFailed)
    assert "did not confirm" in failed.reason
    assert not failed.late


def test_a_message_that_the_wrong_server_refuses_is_published_at_the_right_one() -> None:
    publisher = Publisher().connected("s1", "s2")
    publish, read = publisher.publish()
    assert publisher.tell(Replied("s1", publish.tag, ErrorReply("OOM"))) == []
    again = publisher.answer([read], stored=SETTLED)
    assert publisher.answer(again, 2, 1, SETTLED) == [Published("t", 2)]


def test_when_the_agent_is_gone_each_channel_is_checked_again() -> None:
    publisher = Publisher().connected()
    publisher.answer(publisher.publish())
    for observers in (1, 0):
        publisher.now += 1
        publisher.answer(publisher.publish(), observers=observers)
    assert len(commands(publisher.publish(), b"HMGET")) == 1


@pytest.mark.parametrize(("stored", "server"), [(SETTLED, "s2"), (PLAN_0, "s1")])
def test_a_newer_route_is_given_up_only_for_what_its_own_server_stores(stored: Plan, server: str) -> None:
    """Another cluster's life: this client has epoch 9 for s1, from a plan that was lost."""
    publisher = Publisher().connected()
    publisher.plan.learn(C, Route(9, single("s1")), 0.0)
    publisher.answer(publisher.publish())
    [read] = tagged(publisher.learn(TO_S2), "doubt")
    publisher.tell(Replied("s1", read.tag, entry_reply(stored, C)))
    assert publisher.plan.route(C).assignment == single(server)


# Reconnection.


def test_sends_again_with_the_same_numbers_what_was_not_answered() -> None:
    publisher = Publisher().connected()
    first = publisher.publish(token=1)
    second, third = publisher.publish(token=2), publisher.publish(token=3)
    publisher.answer(first)
    publisher.down("s1")
    waiting = publisher.publish(token=4)
    assert waiting == []
    again = publisher.up("s1")
    *sent, heartbeat = published(again, C)
    assert sent == [*published(second, C), *published(third, C), seal(ID, 4, 0, b"x")]
    assert heartbeat == seal(ID, 4, 0, b"", HEARTBEAT)
    assert [type(action) for action in again[:2]] == [Send, Send]
    assert publisher.answer(again) == [Published(2, 1), Published(3, 1), Published(4, 1)]


# Routes.


def test_a_change_that_the_outbox_refused_is_announced_by_the_next_message() -> None:
    publisher = Publisher(PublisherOptions(unanswered_max=1)).connected("s1")
    publisher.publish()
    publisher.learn(TO_S2)
    publisher.publish(channel_at("s2"))
    assert only(PublishFailed, publisher.publish())
    publisher.answer(publisher.up("s2"))
    assert envelopes(publisher.publish()) == [Envelope(ROUTE_CHANGED, ID, 2, 1, b"x")]


def test_channels_that_have_all_gone_to_an_unknown_server_are_learned_with_one_reading() -> None:
    other = channel_at("s1", 1)
    publisher = Publisher().connected()
    for channel in (C, other):
        publisher.publish(channel)
    asked = [action for channel in (C, other) for action in publisher.learn(TO_S4, channel)]
    assert asked == [Send("s1", READ_HEADER, ("header",))]
    publisher.tell(Replied("s1", ("header",), header_reply(GROWN)))
    assert [publisher.plan.route(channel) for channel in (C, other)] == [TO_S4, TO_S4]


def test_stale_notices_are_ignored() -> None:
    publisher = Publisher().connected("s1", "s2")
    publisher.publish()
    publisher.learn(Route(5, single("s2")))
    assert publisher.learn(Route(4, single("s3"))) == []
    assert publisher.learn(Route(5, single("s3"))) == []
    assert [envelope.epoch for envelope in envelopes(publisher.publish(), link="s2")] == [5]


def test_asks_again_after_a_header_that_could_not_be_read_or_does_not_list_the_server() -> None:
    loading = ErrorReply("LOADING Redis is loading the dataset in memory")
    for header in (loading, [b"1", None, b"\xc1"], [1], header_reply(PLAN_0)):
        publisher = Publisher().connected()
        publisher.publish()
        publisher.learn(TO_S4)
        publisher.tell(Replied("s1", ("header",), header))
        assert publisher.learn(TO_S4) == [Send("s1", READ_HEADER, ("header",))], header
        assert publisher.publisher.counters["distrusted_hints"] == (header is not loading)
        assert envelopes(publisher.publish(), link="s1")


# A dispatcher that was blind.


def gap(server: str) -> bytes:
    return pack_control(ObservationGap(server))


def test_heartbeats_tell_the_latest_number_of_each_channel_at_that_server() -> None:
    publisher = Publisher().connected("s1", "s2")
    publisher.answer([*publisher.publish(), *publisher.publish(), *publisher.publish(channel_at("s2"))])
    actions = publisher.push("s1", CLIENTS_CHANNEL, gap("s1"))
    assert envelopes(actions, link="s1") == [Envelope(HEARTBEAT, ID, 2, 0, b"")]
    assert envelopes(actions, channel_at("s2")) == []
    assert publisher.answer(actions) == []


# Plain payloads.


def test_without_envelopes_plain_payloads_are_sent_and_the_stored_plan_is_read_once_per_window() -> None:
    options = PublisherOptions(envelope=False, route_change_window_s=5)
    publisher = Publisher(options).connected("s1", "s2")
    actions = publisher.publish()
    assert published(actions, C) == [b"x"]
    assert tagged(actions, "entry") == [Send("s1", read_entry(C), ("entry", C))]
    assert tagged(publisher.publish(), "entry") == []
    publisher.now += 5
    [read] = tagged(publisher.publish(), "entry")
    assert publisher.push("s1", CLIENTS_CHANNEL, gap("s1")) == [], "the application sees nothing"
    publisher.tell(Replied("s1", read.tag, entry_reply(ACTIVE, C)))
    assert published(publisher.publish(), C, "s2") == [b"x"]


# Forgetting.


def test_a_forgotten_channel_begins_again_above_its_past() -> None:
    publisher = Publisher(PublisherOptions(channel_idle_s=600)).connected()
    for _ in range(7):
        publisher.answer(publisher.publish())
    publisher.now += 600
    publisher.answer(publisher.publish(channel_at("s1", 1)))
    [envelope] = envelopes(publisher.publish())
    assert (envelope.sequence > 7, envelope.flags) == (True, FIRST)


def test_past_the_bound_the_oldest_quarter_is_forgotten() -> None:
    publisher = Publisher(PublisherOptions(channels_max=8))
    names = [channel_at("s1", number) for number in range(9)]
    for name in names:
        publisher.now += 1
        publisher.publish(name)
    actions = publisher.up("s1")
    again = [envelopes(publisher.publish(name), name)[0].flags for name in (names[8], names[2], names[0])]
    assert len(commands(actions, b"PUBLISH")) == 9
    assert again == [0, 0, FIRST]


def test_one_idle_channel_does_not_make_the_crowd_be_swept_for_every_new_one() -> None:
    """Each sweep looks at every channel, so it must make room for many."""
    publisher = Publisher(PublisherOptions(channels_max=8, channel_idle_s=600))
    names = [channel_at("s1", number) for number in range(9)]
    publisher.publish(names[0])
    publisher.now += 599
    for name in names[1:8]:
        publisher.publish(name)
        publisher.now += 0.1
    publisher.now += 1
    publisher.publish(names[8])
    publisher.up("s1")
    flags = [envelopes(publisher.publish(name), name)[0].flags for name in (names[8], names[1])]
    assert flags == [0, FIRST]


# What else may come in.


def test_malformed_and_unexpected_messages_and_plans_are_counted() -> None:
    publisher = Publisher().connected()
    assert publisher.push("s1", INBOX, b"", b"\xc1", pack_control(Marker(C, "s1", 1))) == []
    publisher.publish()
    publisher.tell(Replied("s1", ("entry", C), [b"1", b"", b"\xc1"]))
    publisher.tell(Replied("s1", ("entry", C), ErrorReply("NOPERM no")))
    counters = publisher.publisher.counters
    assert (counters["malformed_messages"], counters["unexpected_messages"]) == (3, 1)
    assert counters["refused_commands"] == 1


# Messages that are large, or many.


@pytest.fixture
def hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 100 bytes be under way at most."""
    monkeypatch.setattr(dynamoth.machine.outbox, "UNDER_WAY_BYTES_MAX", 100)


def test_a_message_that_has_failed_is_not_sent_again() -> None:
    """It may be what the link was lost for."""
    publisher = Publisher(PublisherOptions(publish_timeout_s=1)).connected()
    publisher.publish(payload=b"large")
    assert [failed.token for failed in only(PublishFailed, publisher.pass_time(1.1))] == ["t"]
    publisher.down("s1")
    assert publisher.publish(payload=b"next") == []
    actions = publisher.up("s1")
    assert [(envelope.payload, envelope.flags) for envelope in envelopes(actions)] == [(b"next", 0), (b"", HEARTBEAT)]
    assert publisher.publisher.deadline() is not None
    assert only(Published, publisher.answer(actions)) == [Published("t", 1)]


@pytest.mark.usefixtures("hundred")
def test_many_messages_go_out_as_replies_come() -> None:
    publisher = Publisher().connected()
    publisher.answer(publisher.publish(C))
    sent = sends(publisher.tell(PublishAll([(number, C, b"x" * 16) for number in range(10)])))
    assert len(sent) == 2
    assert publisher.publish(C, token=10) == [], "in order"
    outcomes: list[Any] = []
    while sent:
        actions = publisher.tell(RepliedAll("s1", sent[0].tag, [1] * len(sent)))
        outcomes += [token for done in only(PublishedAll, actions) for token in done.tokens]
        outcomes += [done.token for done in only(Published, actions)]
        sent = sends(actions)
        assert len(sent) <= 3
    assert outcomes == list(range(11))
    assert publisher.publisher.deadline() is None


@pytest.mark.usefixtures("hundred")
def test_what_fails_before_it_was_its_turn_is_not_sent() -> None:
    """The replies that still come belong to what was sent."""
    publisher = Publisher(PublisherOptions(publish_timeout_s=1, observers_interval_s=100)).connected()
    publisher.answer(publisher.publish(C))
    [first, second] = sends(publisher.tell(PublishAll([(number, C, b"x" * 16) for number in range(10)])))
    publisher.now += 0.5
    publisher.publish(C, token="later")
    failed = only(PublishFailed, publisher.pass_time(0.6))
    assert [message.token for message in failed] == list(range(10))
    actions = publisher.tell(RepliedAll("s1", first.tag, [1, 1]))
    [(channel, data)] = commands(actions, b"PUBLISH")
    assert (channel, open_envelope(data).sequence) == (C, 12)
    assert second.tag is sends(actions)[0].tag
    actions = publisher.tell(Replied("s1", first.tag, 3))
    assert only(Published, actions) == [Published("later", 3)]
    assert [envelope.flags for envelope in envelopes(actions)] == [HEARTBEAT], "subscribers learn what is missing"


@pytest.mark.usefixtures("hundred")
def test_a_connection_that_is_busy_with_a_large_message_that_has_failed_is_given_up() -> None:
    """On a slow network all that follows would fail as well."""
    publisher = Publisher(PublisherOptions(publish_timeout_s=1, observers_interval_s=100)).connected()
    publisher.answer(publisher.publish(C))
    publisher.publish(C, token="large", payload=b"x" * 1000)
    publisher.now += 0.5
    assert publisher.publish(C, token="next", payload=b"y") == []
    [failed, *reconnect] = publisher.pass_time(0.5)
    assert isinstance(failed, PublishFailed)
    assert failed.token == "large"
    assert reconnect == [Disconnect("s1"), Connect("s1", URLS["s1"])]
    actions = publisher.up("s1")
    assert [envelope.payload for envelope in envelopes(actions)] == [b"y", b""], "and a heartbeat"
    assert Published("next", 1) in publisher.answer(actions)


# The version of the stored plan.


def idle_publisher() -> tuple[Publisher, Send]:
    """Return a publisher that has used a channel, and now publishes there after a while; and what it reads behind."""
    publisher = Publisher().connected()
    for _ in range(2):
        publisher.answer(publisher.publish(token=1))
    publisher.now += 60.0
    sent = publisher.publish(token=2)
    [read] = [send for send in sends(sent) if send.args == READ_BELIEVED_VERSION]
    [message] = [send for send in sends(sent) if send.args[0] == b"PUBLISH"]
    assert publisher.tell(Replied("s1", message.tag, 2)) == [], "the outcome waits for the version"
    return publisher, read


@pytest.mark.parametrize("version", [[b"0", RUN.encode()], ErrorReply("NOPERM")], ids=["unchanged", "refused"])
def test_a_version_that_shows_no_change_confirms_what_is_published(version: Any) -> None:
    publisher, read = idle_publisher()
    assert publisher.tell(Replied("s1", read.tag, version)) == [Published(2, 2)]
    is_refused = isinstance(version, ErrorReply)
    assert bool(commands(publisher.publish(token=3), b"HMGET")) is is_refused, "once a second"


def test_another_version_makes_the_publisher_look_at_the_entry_of_the_channel() -> None:
    publisher, read = idle_publisher()
    [entry] = sends(publisher.tell(Replied("s1", read.tag, version_reply(SETTLED.version))))
    assert entry.args == read_entry(C)
    publisher.answer([entry], stored=SETTLED)
    assert numbers(publisher.up("s2")) == [3]


def test_follows_the_ring_of_a_plan_that_was_begun_anew() -> None:
    """All servers have lost the plan, and the new one has another ring: its header is read before the entry counts."""
    another_plan = replace(PLAN_0, version=1000, base=("s2",))
    publisher = Publisher().connected()
    message, read = publisher.publish()
    publisher.tell(Replied("s1", message.tag, 1))
    header, again = sends(publisher.tell(Replied("s1", read.tag, entry_reply(another_plan, C))))
    assert (header.args, again.args) == (READ_HEADER, read_entry(C))
    assert publisher.tell(Replied("s1", header.tag, header_reply(another_plan))) == []
    assert publisher.tell(Replied("s1", again.tag, entry_reply(another_plan, C))) == [Connect("s2", URLS["s2"])]
    assert numbers(publisher.up("s2")) == [1]


def test_a_first_message_waits_for_a_plan_that_is_missing_and_no_longer_than_that() -> None:
    """It is read again until it is there; without a balancer it never is, and publishing goes on."""
    for returns in (True, False):
        publisher = Publisher()
        publisher.publish(token=1)
        sent = publisher.up("s1")
        [read] = [send for send in sends(sent) if send.args == read_entry(C)]
        [message] = [send for send in sends(sent) if send.args[0] == b"PUBLISH"]
        publisher.tell(Replied("s1", message.tag, 2))
        outcome = publisher.tell(Replied("s1", read.tag, entry_reply(None, C)))
        waited = 0.0
        while not outcome:
            [read] = sends(publisher.pass_time(READ_AGAIN_S))
            waited += READ_AGAIN_S
            plan = PLAN_0 if returns and waited > 0.2 else None
            outcome = publisher.tell(Replied("s1", read.tag, entry_reply(plan, C)))
        assert outcome == [Published(1, 2)]
        assert waited < 0.3 if returns else abs(waited - DEFAULTS.plan_missing_s) < 0.1


# Time, and messages that are sent again.


def test_what_is_sent_again_has_an_outcome_in_its_own_time() -> None:
    """It waits at another server behind messages that have more time left."""
    publisher, read = idle_publisher()
    publisher.connected("s2")
    publisher.pass_time(DEFAULTS.publish_timeout_s - 1.0)
    publisher.publish(channel_at("s2"), token="newer")
    [entry] = sends(publisher.tell(Replied("s1", read.tag, version_reply(SETTLED.version))))
    assert numbers(publisher.tell(Replied("s1", entry.tag, entry_reply(SETTLED, C)))) == [3]
    [failed] = only(PublishFailed, publisher.pass_time(1.0))
    assert failed.token == 2
    assert "server s2 did not answer" in failed.reason


def test_what_is_sent_again_counts_the_agents_that_its_new_server_has_by_then() -> None:
    publisher = Publisher().connected("s1", "s2")
    publisher.answer(publisher.publish())
    publisher.pass_time(DEFAULTS.observers_interval_s)
    read = publisher.answer(publisher.publish(token="again"), stored=SETTLED)
    again = publisher.answer(read, stored=SETTLED)
    assert [send.args[0] for send in sends(over("s2", again))][:2] == [b"PUBSUB", b"PUBLISH"]
    outcomes = publisher.answer(again, receivers=3, observers=1, stored=SETTLED)
    assert only(Published, outcomes) == [Published("again", 2)]


# A server that was alone.


def test_copies_at_a_server_that_was_alone_may_come_before_earlier_messages_of_the_right_route() -> None:
    """One of them may be lost with the connection, while the message is under way at the other."""
    publisher = Publisher(header=plan_of(URLS["s1"]))
    publisher.publish()
    alone = publisher.up(ALONE)
    [read] = [send for send in sends(alone) if send.args == READ_HEADER]
    publisher.answer([send for send in sends(alone) if send.args != READ_HEADER])
    publisher.tell(Replied(ALONE, read.tag, header_reply(PLAN_0)))
    publisher.answer(publisher.up("s1"))
    both = publisher.publish()
    assert envelopes(both, link="s1") == [Envelope(0, ID, 2, 0, b"x")]
    assert envelopes(both, link=ALONE) == [Envelope(ROUTE_CHANGED, ID, 2, 0, b"x")]
    publisher.pass_time(OVERLAP_S)
    assert numbers(publisher.publish(), link=ALONE) == []
