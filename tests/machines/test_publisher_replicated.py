"""The publisher machine and replicated channels: copies, outcomes, failover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.machine.events import Connect, ErrorReply, Replied
from dynamoth.names import CLIENTS_CHANNEL, forward_channel, replica_channel
from dynamoth.plan.plan import Assignment, Mode, Plan, Route, single
from dynamoth.protocol.control import ObservationGap, pack_control, unpack_control
from dynamoth.protocol.envelope import FIRST, HEARTBEAT, ROUTE_CHANGED, Envelope, open_envelope
from dynamoth.protocol.stored_plan import read_entry
from dynamoth_client.machines.local_plan import NewerSoftware
from dynamoth_client.machines.publisher.events import Published, PublisherOptions, PublishFailed, PublishRefused
from tests.machines.helpers import (
    PLAN_0,
    C,
    channel_at,
    commands,
    only,
    over,
    phases,
    published,
    sends,
    tagged,
    to_replicas,
    unknown_entry,
    unknown_notice,
)
from tests.machines.publisher import DEFAULTS, ID, INBOX, Publisher, envelopes, numbers

ALL: tuple[str, ...] = ("s1", "s2", "s3")
TO_ALL = to_replicas(Mode.ALL_PUBLISHERS)
TO_ONE_OF_ALL = to_replicas(Mode.ALL_SUBSCRIBERS)
REPLICA = replica_channel(C, 1)
FORWARD = forward_channel(REPLICA)
"""The physical name of C under both of them."""
CHOSEN = TO_ONE_OF_ALL.published_at(ID, C)[0].server
"""The replica that the publisher of these tests uses under ALL_SUBSCRIBERS."""
NEXT = ALL[(ALL.index(CHOSEN) + 1) % 3]
LAST = ALL[(ALL.index(CHOSEN) + 2) % 3]
ONE_AGENT: dict[str, int] = dict.fromkeys(ALL, 1)


def following(
    route: Route, *up: str, options: PublisherOptions = DEFAULTS, observers: Mapping[str, int] = ONE_AGENT
) -> Publisher:
    """Return a publisher that knows the route of C and is connected to some servers."""
    publisher = Publisher(options)
    publisher.plan.learn(C, route, publisher.now)
    for server in up:
        publisher.publish(channel_at(server, 9), token="other")
        publisher.answer(publisher.up(server), observers=observers[server])
    return publisher


def begun(route: Route, *up: str, options: PublisherOptions = DEFAULTS) -> Publisher:
    """The same, after message 1 on C, which is FIRST and followed by readings of the plan."""
    publisher = following(route, *up, options=options)
    publisher.answer(publisher.publish(token="first"), observers=1)
    publisher.pass_time(DEFAULTS.straggler_s)
    return publisher


def replies(publisher: Publisher, server: str, actions: list[Any], receivers: object = 1) -> list[Any]:
    """Let one server answer."""
    return publisher.answer(over(server, actions), receivers, observers=1)


def replicas_of(actions: list[Any]) -> list[str]:
    """Return the servers to which copies are sent."""
    return [server for server in ALL if published(actions, REPLICA, server)]


# ALL_PUBLISHERS: a replica that is slow, dead, full or that refuses.


def test_a_slow_replica_does_not_keep_the_application_waiting() -> None:
    publisher = begun(TO_ALL, *ALL)
    sent = publisher.publish(token=2)
    publisher.pass_time(3)
    replies(publisher, "s1", sent, receivers=3)
    publisher.pass_time(DEFAULTS.straggler_s / 2)
    replies(publisher, "s2", sent, receivers=6)
    assert publisher.pass_time(DEFAULTS.straggler_s / 2 - 0.01) == []
    assert replies(publisher, "s1", publisher.pass_time(0.02)) == [Published(2, 2 + 5)]
    assert replies(publisher, "s3", sent) == []
    assert publisher.pass_time(60) == []


def requests(actions: list[Any], server: str) -> list[Any]:
    """Return what the dispatcher of a server is asked to forward."""
    return [unpack_control(data) for data in published(actions, FORWARD, server)]


def test_a_message_for_a_dead_replica_is_handed_to_the_dispatcher_of_one_that_has_it() -> None:
    """This client may end before the replica comes back, or before it can reach it."""
    publisher = begun(TO_ALL, *ALL)
    publisher.down("s2")
    sent = publisher.publish(token=2)
    replies(publisher, "s1", sent, ErrorReply("NOPERM no"))
    replies(publisher, "s3", sent)
    asked = publisher.pass_time(DEFAULTS.straggler_s)
    [request] = requests(asked, "s3")
    [(server, copy)] = request.copies
    envelope = open_envelope(copy)
    assert (server, envelope.payload) == ("s2", b"x")
    assert (envelope.flags, envelope.sequence, envelope.epoch) == (ROUTE_CHANGED, 2, 1)
    assert replies(publisher, "s3", asked) == [Published(2, 0)]
    assert publisher.pass_time(60) == []


def test_where_no_dispatcher_hears_the_next_one_is_asked() -> None:
    publisher = begun(TO_ALL, *ALL)
    publisher.down("s2")
    publisher.answer(publisher.publish(token=2))
    first = publisher.pass_time(DEFAULTS.straggler_s)
    second = publisher.answer(first, receivers=0)
    assert (len(requests(first, "s1")), len(requests(second, "s3"))) == (1, 1)
    assert publisher.answer(second, receivers=ErrorReply("NOPERM no")) == [Published(2, 0)]
    assert publisher.publisher.counters["unheard_requests"] == 2


def test_a_dispatcher_that_is_slow_to_hear_is_not_the_only_one_that_is_asked() -> None:
    publisher = begun(TO_ALL, *ALL)
    publisher.down("s2")
    publisher.answer(publisher.publish(token=2))
    first = publisher.pass_time(DEFAULTS.straggler_s)
    second = publisher.pass_time(DEFAULTS.straggler_s)
    assert (len(requests(first, "s1")), len(requests(second, "s3"))) == (1, 1)
    assert publisher.pass_time(DEFAULTS.straggler_s) == []
    assert replies(publisher, "s1", first) == [Published(2, 0)]
    assert replies(publisher, "s3", second) == []


def test_when_all_replicas_went_away_after_one_had_it_the_outcome_comes_with_the_time_out() -> None:
    publisher = begun(TO_ALL, *ALL)
    publisher.down("s2")
    replies(publisher, "s1", publisher.publish(token=2))
    asked = publisher.pass_time(DEFAULTS.straggler_s)
    publisher.down("s1")
    assert only(Published, publisher.pass_time(DEFAULTS.publish_timeout_s - 1)) == []
    again = requests(publisher.up("s1"), "s1")
    assert again == requests(asked, "s1")
    assert publisher.pass_time(1) == [Published(2, 0)]


def test_a_slow_replica_is_not_sent_the_same_twice_but_the_number() -> None:
    publisher = begun(TO_ALL, *ALL)
    publisher.down("s2")
    replies(publisher, "s1", publisher.publish(token=2))
    asked = publisher.pass_time(DEFAULTS.straggler_s)
    [request] = requests(asked, "s1")
    (away, copy), (slow, heartbeat) = request.copies
    assert (away, open_envelope(copy).payload) == ("s2", b"x")
    envelope = open_envelope(heartbeat)
    assert (slow, envelope.flags, envelope.sequence, envelope.payload) == ("s3", HEARTBEAT, 2, b"")
    assert envelope.quiet_ms == pytest.approx(1000 * DEFAULTS.straggler_s, abs=1)
    assert replies(publisher, "s1", asked) == [Published(2, 0)]


def test_plain_payloads_are_not_handed_over_as_nobody_could_know_the_second_copy() -> None:
    publisher = begun(TO_ALL, *ALL, options=PublisherOptions(envelope=False))
    publisher.down("s2")
    publisher.answer(publisher.publish(token=2))
    assert publisher.pass_time(DEFAULTS.straggler_s) == [Published(2, 0)]


def test_after_a_while_a_dead_replica_is_not_waited_for_at_all() -> None:
    publisher = begun(TO_ALL, *ALL)
    publisher.down("s2")
    earlier = publisher.publish(token=2)
    publisher.pass_time(DEFAULTS.failover_s)
    assert publisher.answer(publisher.answer(earlier)) == [Published(2, 0)]
    sent = publisher.publish(token=3)
    assert replies(publisher, "s1", sent) == []
    asked = replies(publisher, "s3", sent)
    assert replies(publisher, "s1", asked) == [Published(3, 0)]


def test_a_replica_that_comes_back_in_time_gets_what_it_has_not_answered() -> None:
    publisher = begun(TO_ALL, *ALL)
    unanswered = publisher.publish(token=2)
    replies(publisher, "s1", unanswered)
    replies(publisher, "s3", unanswered)
    publisher.down("s2")
    publisher.answer(publisher.publish(token=3))
    handed_over = publisher.pass_time(DEFAULTS.publish_timeout_s - 1)
    assert publisher.answer(handed_over) == [Published(2, 0), Published(3, 0)]
    again = publisher.up("s2")
    *messages, heartbeat = envelopes(again, REPLICA, "s2")
    assert messages == [Envelope(0, ID, 2, 1, b"x"), Envelope(0, ID, 3, 1, b"x")]
    assert heartbeat == Envelope(HEARTBEAT, ID, 3, 1, b"")
    assert publisher.answer(again) == []


def test_heartbeats_tell_of_what_a_replica_will_never_get() -> None:
    """Its subscribers could otherwise not know that there was anything (G5)."""
    publisher = begun(TO_ALL, "s1", "s3", options=PublisherOptions(publish_timeout_s=1))
    for number in (2, 3):
        publisher.answer(publisher.publish(token=number))
    publisher.pass_time(0.9)
    publisher.answer(publisher.publish(token=4))
    publisher.pass_time(0.9)
    sent = envelopes(publisher.up("s2"), REPLICA, "s2")
    assert [(envelope.flags, envelope.sequence) for envelope in sent] == [(0, 4), (HEARTBEAT, 4)]


def test_a_full_replica_misses_messages_and_the_others_do_not() -> None:
    publisher = begun(TO_ALL, *ALL, options=PublisherOptions(unanswered_max=2))
    for number in (2, 3):
        sent = publisher.publish(token=number)
        replies(publisher, "s1", sent)
        replies(publisher, "s3", sent)
    publisher.answer(publisher.pass_time(1))
    sent = publisher.publish(token=4)
    assert replicas_of(sent) == ["s1", "s3"]
    assert publisher.answer(sent, observers=1) == [Published(4, 0)]
    assert publisher.publisher.counters["copies_dropped"] == 1


def test_subscribers_of_a_replica_that_was_full_are_notified_when_it_has_room() -> None:
    """No later message may come that would show the gap (G5)."""
    publisher = begun(TO_ALL, *ALL, options=PublisherOptions(unanswered_max=2))
    sent = [*publisher.publish(), *publisher.publish()]
    replies(publisher, "s1", sent)
    replies(publisher, "s3", sent)
    publisher.answer(publisher.publish())
    got = replies(publisher, "s2", sent)
    assert Envelope(HEARTBEAT, ID, 4, 1, b"") in envelopes(got, REPLICA, "s2")


def test_when_every_replica_is_full_it_fails_at_once_and_takes_no_number() -> None:
    publisher = begun(TO_ALL, options=PublisherOptions(unanswered_max=2))  # message 1 and a reading of the plan
    assert publisher.publish(token=2) == [
        PublishFailed(2, "2 messages wait for server s1: not connected yet: check that it is up and can be reached")
    ]
    for server in ALL:
        publisher.answer(publisher.up(server))
    assert numbers(over("s1", publisher.publish(token=3)), REPLICA) == [2]


@pytest.mark.parametrize(
    ("dead", "reason"),
    [
        (ALL, "server s1 did not answer for 10 s: reset by peer"),
        (("s1", "s3"), "server s2 did not answer for 10 s: it is connected, so"),
    ],
    ids=["all", "all but one, which the error names"],
)
def test_when_no_replica_answers_it_fails_once(dead: tuple[str, ...], reason: str) -> None:
    publisher = begun(TO_ALL, *ALL)
    publisher.publish(token=2)
    for server in dead:
        publisher.down(server)
    assert only(PublishFailed, publisher.pass_time(DEFAULTS.publish_timeout_s - 0.1)) == []
    [failed] = only(PublishFailed, publisher.pass_time(0.1))
    assert (failed.token, failed.late, failed.reason[: len(reason)]) == (2, dead != ALL, reason)
    assert [only(Published, publisher.answer(publisher.up(server))) for server in dead] == [[]] * len(dead)


def test_only_when_all_refuse_it_is_refused() -> None:
    publisher = begun(TO_ALL, *ALL)
    sent = publisher.publish(token=2)
    assert replies(publisher, "s1", sent, ErrorReply("NOPERM no")) == []
    assert replies(publisher, "s2", sent, ErrorReply("NOPERM no")) == []
    assert replies(publisher, "s3", sent, ErrorReply("NOPERM never")) == [PublishRefused(2, "NOPERM never")]


def test_who_refuses_is_no_reason_to_give_up_on_those_who_may_not() -> None:
    """Refused means that the message is not delivered, and the others are about to deliver it."""
    publisher = begun(TO_ALL, *ALL)
    sent = publisher.publish(token=2)
    replies(publisher, "s1", sent, ErrorReply("NOPERM no"))
    assert publisher.pass_time(2 * DEFAULTS.straggler_s) == []
    assert [*replies(publisher, "s2", sent, 3), *replies(publisher, "s3", sent, 3)] == [Published(2, 4)]
    assert publisher.publisher.counters["copies_refused"] == 1


# Changes of route.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (single("s1"), single("s2")),
        (single("s1"), TO_ALL.assignment),
        (TO_ALL.assignment, single("s1")),
        (TO_ALL.assignment, TO_ONE_OF_ALL.assignment),
        (TO_ONE_OF_ALL.assignment, TO_ALL.assignment),
        (TO_ALL.assignment, Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2"))),
        (TO_ONE_OF_ALL.assignment, Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2"))),
        (TO_ALL.assignment, TO_ALL.assignment),
    ],
)
def test_the_first_message_after_a_change_says_so_at_every_new_location(old: Assignment, new: Assignment) -> None:
    publisher = begun(Route(1, old), *ALL)
    route = Route(2, new)
    assert publisher.learn(route) == []
    publisher.now += 30.0  # an agent that is to forward the previous one may hang for long
    for number, flags in ((2, ROUTE_CHANGED), (3, 0)):
        sent = publisher.publish()
        for place in route.published_at(ID, C):
            assert envelopes(sent, place.physical, place.server) == [Envelope(flags, ID, number, 2, b"x")]
        assert len(commands(sent, b"PUBLISH")) == len(route.published_at(ID, C))


# Heartbeats.


def test_heartbeats_go_where_messages_go_whichever_replica_was_blind() -> None:
    for route, places in ((TO_ALL, ALL), (TO_ONE_OF_ALL, (CHOSEN,))):
        publisher = begun(route, *ALL)
        for server in ALL:
            got = publisher.push("s1", CLIENTS_CHANNEL, pack_control(ObservationGap(server)))
            blind = server in places
            assert replicas_of(got) == [to for to in ALL if blind and to in places]
            assert set(envelopes(got, REPLICA)) <= {Envelope(HEARTBEAT, ID, 1, 1, b"")}


def test_heartbeats_tell_of_a_replica_that_was_left() -> None:
    publisher = begun(TO_ALL, *ALL)
    publisher.learn(Route(2, single("s1")))
    publisher.answer(publisher.publish())
    got = publisher.push("s1", CLIENTS_CHANNEL, pack_control(ObservationGap("s3")))
    assert envelopes(got) == [Envelope(HEARTBEAT, ID, 2, 2, b"")]


# What the stored plan confirms.

STORED = phases(PLAN_0, TO_ALL.assignment)[2]
"""The plan in which C is replicated, and settled; then one in which something else has changed, or C."""
OTHERWISE = replace(STORED, version=STORED.version + 1)
FOLDED = phases(STORED, single("s3"))[2]


def idle_publisher() -> tuple[Publisher, list[Any]]:
    """Return a publisher that has used C, and now publishes there after a while; and what it sends."""
    publisher = following(TO_ALL, *ALL)
    publisher.answer(publisher.publish(token=1), 1, 1, STORED)
    publisher.now += 60.0
    return publisher, publisher.publish(token=2)


@pytest.mark.parametrize("stored", [STORED, OTHERWISE], ids=["same", "newer"])
def test_a_replica_that_hangs_does_not_hold_up_what_another_confirms(stored: Plan) -> None:
    publisher, sent = idle_publisher()
    for number in range(2, 5):
        entries = publisher.answer([*over("s1", sent), *over("s2", sent)], 1, 1, stored)
        if stored is OTHERWISE and number == 2:
            entries = publisher.answer(entries, 1, 1, stored)
        assert only(Published, entries) == []
        handed_over = publisher.answer(publisher.pass_time(DEFAULTS.straggler_s), 1, 1, stored)
        assert only(Published, handed_over) == [Published(number, 0)]
        publisher.now += 1.0
        sent = publisher.publish(token=number + 1)


def test_a_version_that_has_changed_at_one_replica_shows_that_the_channel_has_moved() -> None:
    publisher, sent = idle_publisher()
    entry = publisher.answer(over("s2", sent), 1, 1, FOLDED)
    assert [(send.link, send.args) for send in sends(entry)] == [("s2", read_entry(C))]
    assert numbers(publisher.answer(entry, 0, 1, FOLDED)) == [2]


# ALL_SUBSCRIBERS: failover.


def away(publisher: Publisher, *servers: str) -> list[Any]:
    """Let replicas be lost, one after the other, each for so long that another one takes its place."""
    actions: list[Any] = []
    for server in servers:
        publisher.down(server)
        actions += publisher.pass_time(DEFAULTS.failover_s)
    return actions


def test_what_a_replica_does_not_answer_goes_to_the_next_with_its_numbers() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL)
    publisher.publish(token=2, payload=b"two")
    publisher.publish(token=3, payload=b"three")
    publisher.down(CHOSEN)
    assert publisher.publish(token=4, payload=b"four") == []
    assert publisher.pass_time(DEFAULTS.failover_s - 0.01) == []
    sent = publisher.pass_time(0.02)
    assert replicas_of(sent) == [NEXT]
    assert envelopes(sent, REPLICA) == [
        Envelope(ROUTE_CHANGED, ID, 2, 1, b"two"),
        Envelope(ROUTE_CHANGED, ID, 3, 1, b"three"),
        Envelope(ROUTE_CHANGED, ID, 4, 1, b"four"),
    ], "a subscriber that is new to the publisher would begin with the first, and drop its predecessors"
    assert publisher.answer(sent, receivers=5) == [Published(2, 4), Published(3, 4), Published(4, 4)]
    assert publisher.publisher.counters["failovers"] == 1


def test_the_first_message_of_all_stays_the_first() -> None:
    publisher = following(TO_ONE_OF_ALL)
    publisher.publish()
    assert Connect(NEXT, publisher.plan.servers[NEXT].url) in publisher.pass_time(DEFAULTS.failover_s)
    [envelope] = envelopes(publisher.up(NEXT), REPLICA)
    assert (envelope.sequence, envelope.flags & FIRST) == (1, FIRST)


def test_the_time_out_runs_from_the_beginning() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL)
    publisher.publish(token=2)
    away(publisher, CHOSEN)
    assert publisher.pass_time(DEFAULTS.publish_timeout_s - DEFAULTS.failover_s - 0.1) == []
    [failed] = publisher.pass_time(0.2)
    assert isinstance(failed, PublishFailed)
    assert failed.late
    assert failed.reason.startswith(f"server {NEXT} did not answer"), "the other one is away"
    assert publisher.pass_time(60) == []


def test_a_message_for_which_the_next_has_no_room_waits_for_its_own_replica() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL, options=PublisherOptions(unanswered_max=2))
    publisher.publish(channel_at(NEXT, 9), token="other")
    publisher.publish(token=2)
    publisher.publish(token=3)
    assert numbers(away(publisher, CHOSEN), REPLICA) == [2]
    again = publisher.up(CHOSEN)
    assert [envelope.sequence for envelope in envelopes(again, REPLICA) if not envelope.flags] == [2, 3]
    assert only(Published, publisher.answer(again, observers=1)) == [Published(2, 0), Published(3, 0)]


def test_what_has_failed_is_not_sent_to_the_next() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL, options=PublisherOptions(publish_timeout_s=0.5))
    publisher.publish(token=2)
    publisher.down(CHOSEN)
    assert only(PublishFailed, publisher.pass_time(0.5))
    publisher.publish(token=3)
    assert numbers(publisher.pass_time(0.5), REPLICA) == []
    assert numbers(publisher.publish(token=4), REPLICA) == [4]


def test_an_absence_is_measured_from_its_beginning_however_often_it_fails_to_connect() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL)
    publisher.publish()
    publisher.down(CHOSEN)
    for _ in range(4):
        publisher.pass_time(DEFAULTS.failover_s / 5)
        publisher.down(CHOSEN)
    assert replicas_of(publisher.pass_time(DEFAULTS.failover_s / 5 + 0.01)) == [NEXT]


def test_it_goes_to_the_next_and_returns_when_its_replica_does_and_says_so() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL)
    publisher.publish()
    publisher.answer(away(publisher, CHOSEN))
    for number, flags, server in ((3, ROUTE_CHANGED, NEXT), (4, 0, NEXT), (5, ROUTE_CHANGED, CHOSEN), (6, 0, CHOSEN)):
        if number == 5:
            publisher.answer(publisher.up(CHOSEN))
        sent = publisher.publish()
        assert envelopes(sent, REPLICA) == envelopes(sent, REPLICA, server) == [Envelope(flags, ID, number, 1, b"x")]
        publisher.answer(sent)


def test_when_the_next_is_away_too_the_one_after_it_takes_over() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL)
    publisher.publish(token=2)
    sent = away(publisher, CHOSEN, NEXT)
    assert replicas_of(sent) == sorted((NEXT, LAST))
    assert numbers(over(LAST, sent), REPLICA) == [2]
    assert replicas_of(publisher.publish()) == [LAST]
    assert replies(publisher, LAST, sent) == [Published(2, 0)]


def test_what_was_published_while_all_were_away_goes_to_whichever_returns() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL)
    publisher.publish(token=2)
    away(publisher, *ALL)
    publisher.publish(token=3)
    publisher.pass_time(DEFAULTS.failover_s)
    sent = over(NEXT, publisher.up(NEXT))
    assert [number for number in numbers(sent, REPLICA) if number > 2][:1] == [3]
    assert Published(3, 0) in replies(publisher, NEXT, sent)


def test_a_later_epoch_is_chosen_for_anew_and_avoids_what_is_away() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL)
    publisher.publish()
    away(publisher, CHOSEN)
    chosen: set[str] = set()
    for epoch in range(2, 12):
        route = to_replicas(Mode.ALL_SUBSCRIBERS, epoch=epoch)
        publisher.learn(route)
        [place] = route.published_at(ID, C)
        chosen.add(place.server)
        assert envelopes(publisher.publish(), place.physical, NEXT if place.server == CHOSEN else place.server)
    assert chosen == set(ALL)


def test_without_envelopes_the_next_takes_plain_payloads_over() -> None:
    publisher = begun(TO_ONE_OF_ALL, *ALL, options=PublisherOptions(envelope=False))
    publisher.publish(token=2)
    sent = away(publisher, CHOSEN)
    assert published(sent, REPLICA, NEXT) == [b"x"]
    assert publisher.answer(sent) == [Published(2, 0)]


# Modes of newer software.


def test_a_notice_of_an_unknown_mode_changes_nothing_and_is_reported_once() -> None:
    publisher = begun(Route(0, single("s1")), *ALL)
    [got] = publisher.push("s1", INBOX, unknown_notice())
    assert isinstance(got, NewerSoftware)
    assert "upgrade this software" in got.text
    assert publisher.push("s1", INBOX, unknown_notice(), unknown_notice(epoch=9)) == []
    assert envelopes(publisher.publish(), C, "s1") == [Envelope(0, ID, 2, 0, b"x")]
    publisher.learn(Route(5, single("s2")))
    assert envelopes(publisher.publish(), C, "s2") == [Envelope(ROUTE_CHANGED, ID, 3, 5, b"x")]


@pytest.mark.parametrize("tag", ["entry", "doubt"])
def test_other_readings_of_an_unknown_mode_are_notified_too(tag: str) -> None:
    publisher = begun(Route(2, single("s1")), *ALL, options=PublisherOptions(envelope=tag != "entry"))
    publisher.now += DEFAULTS.route_change_window_s
    [read] = tagged(publisher.publish() if tag == "entry" else publisher.learn(Route(1, single("s2"))), tag)
    [got] = publisher.tell(Replied(read.link, read.tag, unknown_entry()))
    assert isinstance(got, NewerSoftware)
    assert publisher.plan.route(C) == Route(2, single("s1"))
