"""The subscriber machine: confirmation, connections, moves. Messages have a file of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.machine.events import Connect, Disconnect, ErrorReply, Pushed, Send
from dynamoth.names import ANNOUNCE_CHANNEL, replica_channel
from dynamoth.plan.plan import Assignment, Entry, Location, Mode, Phase, Plan, Route, single
from dynamoth.protocol.control import Announcement, LossNotice, Marker, RouteNotice, pack_control
from dynamoth.protocol.envelope import FIRST
from dynamoth.protocol.stored_plan import READ_HEADER, read_entry
from dynamoth_client.machines.subscriber.events import (
    Deliver,
    GapDetected,
    SubscriberOptions,
    SubscriptionConfirmed,
    SubscriptionEnded,
    SubscriptionFailed,
)
from dynamoth_client.machines.subscriber.subscription import EARLY_BYTES_MAX, EARLY_MAX
from tests.machines.helpers import (
    ACTIVE,
    GROWN,
    PLAN_0,
    PREPARED,
    SETTLED,
    TO_S4,
    URLS,
    C,
    channel_at,
    commands,
    control,
    entry_reply,
    header_reply,
    message,
    only,
    reply,
    tagged,
)
from tests.machines.listener import ID, INBOX, OPTIONS, Listener, delivered, joining

TO_S2 = Route(1, single("s2"))
JOIN_S1 = [
    Send("s1", (b"SUBSCRIBE", C), ("subscribe", C)),
    Send("s1", read_entry(C), ("verify", C, Location("s1", C), 1)),
]
LEAVE_S1 = Send("s1", (b"UNSUBSCRIBE", C), ("unsubscribe", C))
LEAVE_S2 = Send("s2", (b"UNSUBSCRIBE", C), ("unsubscribe", C))
LISTEN_S1 = Send("s1", (b"SUBSCRIBE", INBOX), ("inbox",))


def announcement(link: str, joined: tuple[bytes, ...], left: tuple[bytes, ...], number: int) -> Send:
    return Send(link, (b"PUBLISH", ANNOUNCE_CHANNEL, pack_control(Announcement(ID, number, joined, left))))


def gaps(actions: list[Any]) -> list[GapDetected]:
    return only(GapDetected, actions)


# Confirmation.


def test_subscribes_and_reads_the_stored_plan_on_one_connection() -> None:
    listener = Listener()
    assert listener.subscribe() == [Connect("s1", URLS["s1"])]
    assert listener.up("s1") == [*JOIN_S1, announcement("s1", (C,), (), 1)]


@pytest.mark.parametrize("plan", [PLAN_0, PREPARED])
def test_confirms_only_when_the_stored_plan_says_so(plan: Plan) -> None:
    """The old location is right until the change is active."""
    listener, sent = joining()
    assert listener.push("s1", C, message(1)) == []
    assert listener.verify(sent, plan) == [SubscriptionConfirmed(C), Deliver([(C, b"m1")])]
    assert delivered(listener.push("s1", C, message(1), message(2))) == [b"m2"]


def test_of_too_many_messages_or_bytes_before_the_confirmation_the_newest_are_kept() -> None:
    half, larger = bytes(EARLY_BYTES_MAX // 2), bytes(2 * EARLY_BYTES_MAX)
    many = [b"%d" % number for number in range(EARLY_MAX + 2)]
    for payloads, kept in ((many, many[2:]), ([b"1", half, half], [half, half]), ([half, larger], [larger])):
        listener, sent = joining()
        for payload in payloads:
            listener.push("s1", C, payload)
        assert delivered(listener.verify(sent, PLAN_0)) == kept


def test_what_came_at_a_place_that_was_given_up_before_the_confirmation_is_not_delivered() -> None:
    """What lies between the two places is missing; a gap before the subscription has begun would only confuse."""
    listener, sent = joining()
    listener.push("s1", C, message(1))
    listener.verify(sent, ACTIVE)
    sent = listener.up("s2")
    listener.acknowledged(b"subscribe", link="s2")
    listener.push("s2", C, message(3))
    assert listener.verify(sent, ACTIVE) == [SubscriptionConfirmed(C), Deliver([(C, b"m3")])]


@pytest.mark.parametrize(
    ("stored", "counter"),
    [
        (entry_reply(None, C), "no_plan_at_server"),
        (entry_reply(PLAN_0, C, "an earlier process"), "no_plan_at_server"),
        ([b"1", b"", b"\xc1"], "malformed_plans"),
    ],
    ids=["none", "of an earlier process", "malformed"],
)
def test_without_a_plan_it_asks_again(stored: Any, counter: str) -> None:
    listener, sent = joining()
    [verify] = tagged(sent, "verify")
    assert listener.tell(reply(verify, stored)) == []
    assert listener.counters[counter] == 1
    assert listener.pass_time(OPTIONS.verify_retry_s - 0.01) == []
    again = listener.pass_time(0.02)
    assert [send.args for send in tagged(again, "verify")] == [read_entry(C)]
    assert listener.verify(again, PLAN_0) == [SubscriptionConfirmed(C)]


@pytest.mark.parametrize("plan", [ACTIVE, SETTLED])
def test_in_the_wrong_place_it_follows_before_it_confirms(plan: Plan) -> None:
    listener, sent = joining()
    actions = listener.verify(sent, plan)
    assert actions == [Connect("s2", URLS["s2"]), LEAVE_S1, announcement("s1", (), (C,), 2)]
    assert listener.verify(listener.up("s2"), plan) == [SubscriptionConfirmed(C)]


@pytest.mark.parametrize("refused", [0, 1], ids=["SUBSCRIBE", "the reading of the plan"])
def test_a_refused_subscription_fails_and_is_gone(refused: int) -> None:
    listener, sent = joining()
    actions = listener.tell(reply(sent[refused], ErrorReply("NOPERM no")))
    [failed] = only(SubscriptionFailed, actions)
    assert failed.channel == C and "NOPERM no" in failed.reason
    assert only(SubscriptionEnded, actions) == []
    assert listener.unsubscribe() == [SubscriptionEnded(C)]


def test_a_server_that_loads_its_data_is_asked_again() -> None:
    """After a restart Redis takes SUBSCRIBE at once and HMGET only when it has loaded: no reason to give up (G5)."""
    listener = Listener().confirmed()
    listener.down("s1")
    [verify] = tagged(listener.up("s1"), "verify")
    loading = listener.tell(reply(verify, ErrorReply("LOADING Redis is loading the dataset in memory")))
    assert only(SubscriptionFailed, loading) == []
    assert SubscriptionConfirmed(C) not in loading
    assert gaps(listener.verify(listener.pass_time(1), PLAN_0))


# Unsubscribing.


def test_unsubscribing_delivers_what_was_on_its_way_before_it_ends() -> None:
    listener = Listener().confirmed()
    assert listener.unsubscribe() == [LEAVE_S1, announcement("s1", (), (C,), 2)]
    assert delivered(listener.push("s1", C, message(1))) == [b"m1"]
    push = [b"message", C, message(2)]
    actions = listener.tell(Pushed("s1", [push, [b"unsubscribe", C, 0], [b"message", C, message(3)]]))
    assert actions == [Deliver([(C, b"m2")]), SubscriptionEnded(C)]


def test_a_server_that_refuses_to_unsubscribe_ends_it_too() -> None:
    """An ACL that allows SUBSCRIBE only must not keep the application waiting."""
    listener = Listener().confirmed()
    listener.unsubscribe()
    assert listener.tell(reply(LEAVE_S1, ErrorReply("NOPERM no"))) == [SubscriptionEnded(C)]
    assert listener.push("s1", C, message(1)) == []


def test_a_subscription_that_is_ending_follows_nobody() -> None:
    listener = Listener().confirmed()
    listener.unsubscribe()
    assert listener.learn(TO_S2) == []
    assert listener.mark("s1", "s1") == []
    assert listener.pass_time(1) == []


def test_subscribing_again_waits_for_the_end() -> None:
    listener = Listener().confirmed()
    listener.unsubscribe()
    assert listener.subscribe(C, C) == []
    ended, *sent = listener.acknowledged(b"unsubscribe")
    assert ended == SubscriptionEnded(C)
    assert commands(sent, b"SUBSCRIBE") == [(C,)]
    assert listener.verify(sent, PLAN_0) == [SubscriptionConfirmed(C), SubscriptionConfirmed(C)]


def test_the_end_of_an_earlier_stay_is_not_the_end_of_this_one() -> None:
    """The subscription moved from s1 to s2 and back; what s1 acknowledges first is the leaving in between."""
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    assert LEAVE_S1 in listener.mark("s1")
    back = PLAN_0.begin({C: single("s2")}).activate([C]).settle([C]).begin({C: single("s1")}).activate([C])
    listener.verify(listener.learn(back.entry(C).route, link="s2"), back)
    assert LEAVE_S2 in listener.mark("s2", "s1")
    listener.unsubscribe()
    assert listener.acknowledged(b"unsubscribe", b"subscribe") == []
    assert delivered(listener.push("s1", C, message(1))) == [b"m1"]
    assert listener.acknowledged(b"unsubscribe") == [SubscriptionEnded(C)]


def test_unsubscribing_during_a_move_leaves_both_places() -> None:
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    actions = listener.unsubscribe()
    assert LEAVE_S1 in actions
    assert LEAVE_S2 in actions
    assert listener.acknowledged(b"unsubscribe") == []
    assert delivered(listener.push("s2", C, message(1, flags=FIRST))) == [b"m1"]
    assert listener.acknowledged(b"unsubscribe", link="s2") == [SubscriptionEnded(C)]
    assert listener.push("s1", C, message(2)) == listener.push("s2", C, message(2)) == []
    assert [action for action in listener.pass_time(25) if not isinstance(action, Disconnect)] == []


def test_while_a_move_ends_nothing_is_delivered_before_what_is_on_its_way() -> None:
    """Seed 11148: the old place is gone first, with what was still to be forwarded there."""
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    listener.unsubscribe()
    listener.acknowledged(b"unsubscribe")
    assert listener.push("s2", C, message(2)) == []
    assert listener.acknowledged(b"unsubscribe", link="s2") == [SubscriptionEnded(C)]


def test_unsubscribing_while_disconnected_tells_of_what_may_have_been_missed() -> None:
    listener = Listener().confirmed()
    listener.down("s1")
    gap, ended = listener.unsubscribe()
    assert isinstance(gap, GapDetected) and ended == SubscriptionEnded(C)
    assert commands(listener.up("s1"), b"SUBSCRIBE") == []


def test_a_new_subscription_or_connection_is_confirmed_by_a_verification_of_its_own() -> None:
    listener, stale = joining()
    assert listener.unsubscribe()[:2] == [LEAVE_S1, SubscriptionEnded(C)]
    fresh = listener.subscribe()
    assert commands(fresh, b"SUBSCRIBE") == [(C,)]
    assert listener.verify(stale, PLAN_0) == []
    listener.down("s1")
    again = listener.up("s1")
    assert listener.verify(fresh, PLAN_0) == []
    assert listener.verify(again, PLAN_0) == [SubscriptionConfirmed(C)], "no gap"


@pytest.mark.parametrize("is_used_again", [False, True])
def test_an_unused_link_is_closed_after_a_while(is_used_again: bool) -> None:
    listener = Listener().confirmed()
    listener.unsubscribe()
    listener.acknowledged(b"unsubscribe")
    assert listener.pass_time(OPTIONS.link_idle_s - 1) == []
    if is_used_again:
        listener.subscribe()
        assert only(Disconnect, listener.pass_time(100)) == []
    else:
        assert listener.pass_time(1) == [Disconnect("s1")]
        assert listener.subscribe() == [Connect("s1", URLS["s1"])]


# Make before break.


def test_asks_again_for_a_marker_that_does_not_come() -> None:
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    first = listener.announced["s2"]
    times: list[float] = []
    for _ in range(7):
        begun = listener.now
        while not commands(listener.pass_time(0.01), b"PUBLISH", "s2"):
            assert listener.now < begun + 10
        times.append(listener.now - begun)
    assert times == pytest.approx([0.25, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0], abs=0.02)
    assert listener.announced["s2"] > first
    assert listener.mark("s1", number=first)[0] == LEAVE_S1, "the answer to any announcement since it joined counts"
    assert commands(listener.pass_time(10), b"PUBLISH") == []


WITH_MARKERS = replace(OPTIONS, marker_s=1.0)
TO_S3 = Route(TO_S2.epoch + 1, single("s3"))


@pytest.mark.parametrize("answers", [False, True])
def test_a_new_place_whose_agent_does_not_answer_is_a_gap(answers: bool) -> None:
    listener = Listener(WITH_MARKERS).confirmed().moving(ACTIVE, TO_S2)
    assert gaps(listener.pass_time(0.99)) == []
    if answers:
        listener.mark("s1")
    assert ["agent of server s2" in gap.reason for gap in gaps(listener.pass_time(0.01))] == [True] * (not answers)
    assert gaps(listener.pass_time(10)) == []
    assert answers or listener.mark("s1")[0] == LEAVE_S1


def test_the_time_for_markers_begins_again_with_a_newer_route() -> None:
    listener = Listener(WITH_MARKERS).confirmed().moving(ACTIVE, TO_S2)
    listener.pass_time(0.6)
    listener.learn(TO_S3)
    listener.verify(listener.up("s3"), PLAN_0.with_entries({C: Entry(TO_S3, Phase.ACTIVE, (TO_S2,))}, TO_S3.epoch))
    assert gaps(listener.pass_time(0.9)) == []
    [gap] = gaps(listener.pass_time(0.1))
    assert "agent of server s3" in gap.reason


def test_subscribers_that_are_reported_a_move_do_not_move_all_at_once() -> None:
    listener = Listener(SubscriberOptions(move_spread_s=0.1)).confirmed()
    assert listener.learn(TO_S2) == listener.learn(TO_S2) == []
    deadline = listener.subscriber.deadline()
    assert deadline is not None and listener.now < deadline <= listener.now + 0.1
    assert Connect("s2", URLS["s2"]) in listener.pass_time(0.1)
    assert commands(listener.up("s2"), b"SUBSCRIBE") == [(C,)]


def test_a_marker_counts_only_once_the_new_place_is_verified() -> None:
    listener = Listener().confirmed()
    listener.learn(TO_S2)
    sent = listener.up("s2")
    assert listener.mark("s1") == []
    assert listener.verify(sent, ACTIVE)[0] == LEAVE_S1


@pytest.mark.parametrize("lost", ["s1", "s2"], ids=["old place", "new place"])
def test_a_marker_that_came_before_a_reconnection_does_not_count_after_it(lost: str) -> None:
    """What was forwarded in the meantime may not have come."""
    listener = Listener().confirmed()
    listener.learn(TO_S2)
    sent = listener.up("s2")
    listener.mark("s1")
    listener.down(lost)
    again = listener.up(lost)
    assert (C,) in commands(again, b"SUBSCRIBE", lost) and (LISTEN_S1 in again) == (lost == "s1")
    assert commands(again, b"PUBLISH", "s2") != []
    assert LEAVE_S1 not in listener.verify([*sent, *again], ACTIVE)
    assert listener.mark("s1")[0] == LEAVE_S1


def test_a_refused_inbox_costs_the_subscription_nothing() -> None:
    """It stays at both places until the move is over."""
    listener = Listener().confirmed()
    [refused] = tagged(listener.learn(TO_S2), "inbox")
    assert listener.tell(reply(refused, ErrorReply("NOPERM no channel permission"))) == []
    assert listener.counters["refused_commands"] == 1
    assert delivered(listener.push("s1", C, message(1))) == [b"m1"]


def test_junk_in_the_inbox_is_counted() -> None:
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    notice = control(RouteNotice(C, TO_S2))
    assert listener.push("s1", INBOX, b"", control(Marker(b"other", "s2", 9)), notice) == []
    assert listener.push("s1", C, control(RouteNotice(b"other", TO_S2))) == []
    assert (listener.counters["malformed_messages"], listener.counters["unexpected_messages"]) == (1, 2)


def test_stale_notices_are_ignored() -> None:
    listener = Listener().confirmed()
    listener.learn(Route(5, single("s2")))
    assert listener.learn(Route(5, single("s3"))) == []
    assert listener.learn(Route(4, single("s3"))) == []


def test_moves_back_before_the_first_move_ended() -> None:
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    back = Route(4, single("s1"))
    actions = listener.learn(back, "s2")
    assert commands(actions, b"SUBSCRIBE") == [(INBOX,)]
    assert commands(actions, b"UNSUBSCRIBE") == []
    plan = SETTLED.begin({C: single("s1")}).activate([C])
    assert gaps(listener.verify(actions, plan)) == []
    assert listener.mark("s2", "s1")[0] == LEAVE_S2


def test_while_leaving_it_looks_again_whether_the_move_is_over() -> None:
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    again = listener.pass_time(OPTIONS.look_again_s)
    assert [send.link for send in tagged(again, "verify")] == ["s2"]
    actions = listener.verify(again, SETTLED)
    assert LEAVE_S1 in actions
    assert [gap.reason for gap in gaps(actions)] == ["the move ended while this client was away"]


def test_looks_again_once_per_interval_however_often_it_was_told() -> None:
    """Each notice that is followed must not leave a wish of its own behind that renews itself for ever."""
    listener = Listener().confirmed()
    for epoch in range(1, 2001):
        listener.learn(Route(epoch, single("s2" if epoch % 2 else "s1")))
    listener.pass_time(4 * OPTIONS.look_again_s_max)
    assert len(listener.subscriber._timers) < 100  # pyright: ignore[reportPrivateUsage]  # no other way to see it


# Servers and routes that may not be true.


@pytest.mark.parametrize(
    ("header", "counts"),
    [
        (header_reply(PLAN_0), (1, 0, 0)),
        (ErrorReply("LOADING"), (0, 1, 0)),
        ([b"1", None, b"\xc1"], (0, 0, 1)),
        ([None, None, None], (1, 0, 0)),
    ],
)
def test_reads_the_header_until_it_lists_an_unknown_server(header: Any, counts: tuple[int, ...]) -> None:
    listener = Listener().confirmed()
    read = Send("s1", READ_HEADER, ("header",))
    assert (listener.learn(TO_S4), listener.learn(TO_S4)) == ([read], [])
    assert listener.tell(reply(read, header)) == []
    found = [listener.counters[name] for name in ("distrusted_hints", "refused_commands", "malformed_plans")]
    assert tuple(found) == counts
    assert listener.learn(TO_S4) == [read]
    assert listener.tell(reply(read, header_reply(GROWN))) == [Connect("s4", "redis://s4:6379"), LISTEN_S1]


def test_a_forged_notice_is_distrusted_after_a_while_and_nothing_is_lost() -> None:
    listener = Listener().confirmed()
    listener.learn(Route(99, single("s2")))
    retry = listener.verify(listener.up("s2"), PLAN_0)
    for number in range(1, 200):
        assert delivered(listener.push("s1", C, message(number))) == [b"m%d" % number]
        retry = listener.verify(listener.pass_time(OPTIONS.verify_retry_s), PLAN_0)
        if listener.counters["distrusted_routes"]:
            break
    assert listener.plan.route(C) == Route(0, single("s1"))
    back = listener.verify(retry, PLAN_0)
    assert gaps(retry) == gaps(back) == []
    assert LEAVE_S2 in retry
    listener.learn(TO_S2)
    assert listener.plan.route(C) == TO_S2


def test_a_route_that_the_plan_has_lost_is_given_up_when_an_agent_tells_of_it() -> None:
    listener, sent = joining()
    listener.verify(sent, SETTLED)
    listener.verify(listener.up("s2"), SETTLED)
    listener.pass_time(OPTIONS.distrust_s)
    look = listener.push("s2", C, control(LossNotice(C, None)))
    assert len(gaps(look)) == 1
    listener.verify(look, PLAN_0)
    assert listener.plan.route(C) == Route(0, single("s1"))


def test_a_subscription_that_is_not_confirmed_verifies_again_when_an_agent_tells_of_a_new_plan() -> None:
    """Its server was away and has just stored the plan; nothing is missed before the confirmation."""
    listener = Listener()
    listener.subscribe(C)
    verifying = listener.up("s1")
    again = listener.push("s1", C, control(LossNotice(C, None)))
    assert gaps(again) == []
    assert [send.args[0] for send in only(Send, again)] == [b"HMGET"]
    listener.verify(verifying, PLAN_0)
    listener.verify(again, SETTLED)
    assert listener.plan.route(C) == TO_S2


def test_a_connection_lost_while_a_forged_notice_was_followed_is_reported() -> None:
    listener = Listener().confirmed()
    listener.learn(Route(99, single("s2")))
    listener.verify(listener.up("s2"), PLAN_0)
    listener.down("s1")
    retry = listener.verify(listener.up("s1"), PLAN_0)
    while not listener.counters["distrusted_routes"]:
        retry = listener.verify(listener.pass_time(OPTIONS.verify_retry_s), PLAN_0)
    assert len(gaps(listener.verify(retry, PLAN_0))) == 1


def test_a_forged_epoch_does_not_make_it_deaf_to_true_notices() -> None:
    """The route that it follows names the right server, so that nobody would ever contradict it."""
    listener = Listener().confirmed()
    sent = listener.learn(Route(2**32 - 1, single("s1")))
    listener.verify([*sent, *listener.pass_time(60)], PLAN_0)
    assert listener.learn(TO_S2)


def test_a_newer_route_to_the_same_place_is_taken() -> None:
    back = SETTLED.begin({C: single("s1")}).activate([C]).settle([C])
    listener, sent = joining()
    assert SubscriptionConfirmed(C) in listener.verify(sent, back)
    assert listener.plan.epoch(C) == 4
    looks = listener.learn(TO_S2)
    assert [send.args for send in only(Send, looks)] == [read_entry(C)], "an older notice is a reason to look"
    assert listener.verify(looks, back) == [] and listener.plan.epoch(C) == 4


def test_reserved_names_of_an_application_do_not_confuse_it() -> None:
    """An application may subscribe to the physical name of a replica that another subscription listens at."""
    listener = Listener(header=PLAN_0)
    listener.plan.learn(C, Route(5, Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2", "s3"))), 0.0)
    physical = replica_channel(C, 5)
    listener.subscribe(C, physical)
    for link in ("s1", "s2", "s3"):
        listener.up(link)
    listener.unsubscribe(C)
    listener.unsubscribe(physical)


# Lost connections.


def test_the_channel_may_have_moved_while_it_was_away() -> None:
    listener = Listener().confirmed()
    listener.down("s1")
    actions = listener.verify(listener.up("s1"), SETTLED)
    assert only(Connect, actions) == [Connect("s2", URLS["s2"])]
    assert gaps(actions) == []
    settled = listener.verify(listener.up("s2"), SETTLED)
    assert LEAVE_S1 in settled
    assert len(gaps(settled)) == 1


def test_losing_the_old_place_of_a_move_that_is_verified_is_a_gap_and_ends_it() -> None:
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    assert len(gaps(listener.down("s1"))) == 1
    assert commands(listener.up("s1"), b"SUBSCRIBE") == []
    assert delivered(listener.push("s2", C, message(1))) == [b"m1"]


def test_losing_the_old_place_before_the_new_one_is_verified_is_a_gap_later() -> None:
    listener = Listener().confirmed()
    listener.learn(TO_S2)
    assert gaps(listener.down("s1")) == []
    assert commands(listener.up("s1"), b"SUBSCRIBE") == [(C,), (INBOX,)]
    assert len(gaps(listener.verify(listener.up("s2"), ACTIVE))) == 1


def test_every_channel_of_a_lost_link_gets_its_gap() -> None:
    other = channel_at("s1", 1)
    listener = Listener().confirmed()
    listener.verify(listener.subscribe(other), PLAN_0, other)
    assert listener.down("s1") == []
    actions = listener.up("s1")
    assert commands(actions, b"SUBSCRIBE") == [(C,), (other,)]
    reason = "the connection to server s1 was lost: reset by peer"
    assert listener.verify(actions, PLAN_0) == [GapDetected(name, None, None, reason) for name in (C, other)]
    assert delivered(listener.push("s1", C, message(1))) == [b"m1"]


def test_the_gap_comes_before_what_follows_it() -> None:
    """Also when the stored plan cannot be read for long: the application must not wait for that."""
    listener = Listener().confirmed()
    listener.down("s1")
    sent = listener.up("s1")
    actions = listener.tell(Pushed("s1", [[b"subscribe", C, 1], [b"message", C, message(1)]]))
    assert [type(action) for action in actions] == [GapDetected, Deliver]
    assert gaps(listener.verify(sent, PLAN_0)) == []


def test_a_loss_at_a_place_that_is_left_meanwhile_is_reported() -> None:
    """The new place was lost, and the channel moves on while the old one is still listened to."""
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    listener.down("s2")
    moved_on = SETTLED.begin({C: single("s3")}).activate([C])
    listener.learn(moved_on.entry(C).route)
    assert gaps(listener.verify(listener.up("s3"), moved_on))


def test_another_gap_is_reported_when_the_place_was_not_right_any_more() -> None:
    listener = Listener().confirmed()
    listener.down("s1")
    sent = listener.up("s1")
    assert len(gaps(listener.acknowledged(b"subscribe"))) == 1
    listener.verify(sent, SETTLED)
    [gap] = gaps(listener.verify(listener.up("s2"), SETTLED))
    assert "moved" in gap.reason


def test_what_was_seen_before_the_confirmation_causes_no_gap_after_it() -> None:
    """What was published while an unconfirmed subscription was away is due to nobody."""
    listener, _ = joining()
    listener.push("s1", C, message(1))
    listener.down("s1")
    listener.verify(listener.up("s1"), PLAN_0)
    assert delivered(listener.push("s1", C, message(5))) == [b"m5"]
    assert gaps(listener.pass_time(1)) == []


def test_a_subscription_to_a_channel_in_transition_is_confirmed_a_little_later() -> None:
    listener = Listener(replace(OPTIONS, join_moving_s=0.1))
    listener.subscribe()
    listener.verify(listener.up("s1"), ACTIVE)
    assert SubscriptionConfirmed(C) not in listener.verify(listener.up("s2"), ACTIVE)
    assert SubscriptionConfirmed(C) not in listener.pass_time(0.09)
    assert SubscriptionConfirmed(C) in listener.pass_time(0.02)
