"""The subscriber machine and replicated channels: where it listens, moves between replica sets, replicas away."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.machine.events import Connect, Pushed
from dynamoth.names import CLIENTS_CHANNEL, replica_channel
from dynamoth.plan.plan import Assignment, Location, Mode, Plan, Route, single
from dynamoth.protocol.control import RouteNotice
from dynamoth_client.machines.local_plan import NewerSoftware
from dynamoth_client.machines.publisher.events import Publish
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_client.machines.subscriber.events import (
    Deliver,
    GapDetected,
    SubscriberOptions,
    SubscriptionConfirmed,
    SubscriptionEnded,
)
from tests.machines.helpers import (
    PLAN_0,
    SETTLED,
    C,
    Subject,
    commands,
    control,
    message,
    only,
    phases,
    published,
    reply,
    tagged,
    unknown_entry,
    unknown_notice,
)
from tests.machines.listener import ID, INBOX, OPTIONS, Listener, delivered, joining

ALL = ("s1", "s2", "s3")
EVERY = Assignment(Mode.ALL_SUBSCRIBERS, ALL)
"""A subscriber listens at every replica."""
ANY = Assignment(Mode.ALL_PUBLISHERS, ALL)
"""A subscriber listens at one of the replicas."""


def replicated(assignment: Assignment) -> Plan:
    """Return a plan where C has rested at its replicas for long."""
    return phases(PLAN_0, assignment)[2]


AT_EVERY = replicated(EVERY)
AT_ANY = replicated(ANY)
REPLICA = replica_channel(C, 1)
"""The physical name of C in both."""
CHOSEN = AT_ANY.entry(C).route.listened_at(ID, C)[0].server
NEXT = ALL[(ALL.index(CHOSEN) + 1) % 3]
LAST = ALL[(ALL.index(CHOSEN) + 2) % 3]


def gaps(actions: list[Any]) -> list[str]:
    """Return why messages may be missing."""
    return [gap.reason for gap in only(GapDetected, actions)]


def listening(plan: Plan, *up: str, options: SubscriberOptions = OPTIONS) -> Listener:
    """Return a subscriber that follows the route of ``plan``, and is verified at those of its servers that are up."""
    listener = Listener(options)
    listener.plan.learn(C, plan.entry(C).client_route, listener.now)
    asked = [connect.link for connect in only(Connect, listener.subscribe())]
    for server in up:
        if server in asked:
            listener.verify(listener.up(server), plan)
    if set(asked) <= set(up):
        assert listener.pass_time(5) == [], "nothing is left to be done"
    return listener


def moving(old: Plan, assignment: Assignment) -> tuple[Listener, Plan, list[Any]]:
    """Let a subscriber be confirmed where ``old`` says, notified of a new assignment, and verified there."""
    active = phases(old, assignment)[1]
    listener = listening(old, *ALL)
    actions = notified(listener, active.entry(C).route, old.entry(C).route.listened_at(ID, C)[0])
    return listener, active, settle_in(listener, actions, active)


def notified(listener: Listener, route: Route, at: Location) -> list[Any]:
    return listener.push(at.server, at.physical, control(RouteNotice(C, route)))


def settle_in(listener: Listener, actions: list[Any], plan: Plan) -> list[Any]:
    """Let every connection come up that was asked for, and every verification be answered."""
    actions = [*actions, *(a for connect in only(Connect, actions) for a in listener.up(connect.link))]
    return [*actions, *listener.verify(actions, plan)]


def mark(listener: Listener, server: str, at: Location) -> list[Any]:
    """Let the dispatcher of ``server`` answer the latest announcement there, in the inbox at the server of ``at``."""
    return listener.mark(at.server, server)


def joined(actions: list[Any]) -> set[Location]:
    names = {(server, args[0]) for server in ALL for args in commands(actions, b"SUBSCRIBE", server)}
    return {Location(server, name) for server, name in names if name != INBOX}


def left(actions: list[Any]) -> set[Location]:
    return {Location(server, args[0]) for server in ALL for args in commands(actions, b"UNSUBSCRIBE", server)}


def at(*servers: str, epoch: int = 1) -> set[Location]:
    return {Location(server, replica_channel(C, epoch)) for server in servers}


# ALL_SUBSCRIBERS.


@pytest.mark.parametrize(("plan", "places"), [(AT_EVERY, ALL), (AT_ANY, (CHOSEN,))], ids=["every", "one"])
def test_listens_at_replicas_and_is_confirmed_when_the_last_is_verified(plan: Plan, places: tuple[str, ...]) -> None:
    listener = Listener()
    listener.plan.learn(C, plan.entry(C).route, listener.now)
    assert [connect.link for connect in only(Connect, listener.subscribe())] == list(places)
    sent = {server: listener.up(server) for server in places}
    assert joined([send for each in sent.values() for send in each]) == at(*places)
    confirmed = [listener.verify(sent[server], plan) for server in places]
    assert confirmed == [*([[]] * (len(places) - 1)), [SubscriptionConfirmed(C)]]


# Routing.


@pytest.mark.parametrize("last", ALL)
def test_leaves_a_single_server_only_after_markers_of_every_replica(last: str) -> None:
    """A message of a publisher that uses another replica may still be on its way to the old place."""
    home = Location("s1", C)
    listener, _, actions = moving(PLAN_0, EVERY)
    assert (joined(actions), left(actions)) == (at(*ALL), set())
    for server in ALL:
        for elsewhere in at("s2", "s3"):
            assert left(mark(listener, server, elsewhere)) == set(), "that is behind what went to its server only"
    for server in (*(server for server in ALL if server != last), last):
        assert left(mark(listener, server, home)) == ({home} if server == last else set())


def test_leaves_each_replica_of_an_old_set_after_its_own_markers() -> None:
    listener, _, _ = moving(AT_EVERY, single("s2"))
    for place in sorted(at(*ALL), key=repr):
        assert left(mark(listener, "s2", place)) == {place}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (EVERY, Assignment(Mode.ALL_SUBSCRIBERS, ("s2", "s3"))),
        (Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2")), EVERY),
        (EVERY, ANY),
        (ANY, EVERY),
        (ANY, Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2"))),
        (EVERY, single("s1")),
        (ANY, single(CHOSEN)),
    ],
)
def test_moves_between_routes_that_share_servers(old: Assignment, new: Assignment) -> None:
    """At a shared server it listens under both names; the old one is left, and the new one is not."""
    listener, active, actions = moving(replicated(old), new)
    entry = active.entry(C)
    old_places = set(entry.previous[0].listened_at(ID, C))
    new_places = set(entry.route.listened_at(ID, C))
    assert (joined(actions), left(actions)) == (new_places, set())
    for place in old_places:
        assert place not in left(actions)
        actions += [action for target in new_places for action in mark(listener, target.server, place)]
    assert left(actions) == old_places
    assert gaps(actions) == []
    for number, place in enumerate(sorted(new_places, key=repr), 1):
        assert delivered(listener.push(place.server, place.physical, message(number))) == [b"m%d" % number]
    assert left(listener.unsubscribe()) == new_places


def test_a_notice_from_every_replica_moves_it_once() -> None:
    listener = listening(AT_EVERY, *ALL, options=SubscriberOptions(move_spread_s=0.1))
    route = phases(AT_EVERY, single("s2"))[1].entry(C).route
    for server in ALL:
        assert notified(listener, route, Location(server, REPLICA)) == []
    assert joined(listener.pass_time(0.1)) == {Location("s2", C)}


# A replica that is away: ALL_PUBLISHERS.


def test_goes_to_the_next_replica_and_reports_the_gap() -> None:
    listener = listening(AT_ANY, CHOSEN)
    listener.push(CHOSEN, REPLICA, message(1))
    listener.down(CHOSEN)
    assert listener.pass_time(OPTIONS.replace_s - 0.01) == []
    actions = listener.pass_time(0.02)
    assert only(Connect, actions) == [Connect(NEXT, PLAN_0.servers[NEXT].url)]
    sent = listener.up(NEXT)
    assert joined(sent) == at(NEXT)
    assert gaps(listener.verify(sent, AT_ANY)) == [f"the connection to server {CHOSEN} was lost: reset by peer"]
    assert listener.push(NEXT, REPLICA, message(1)) == []
    assert delivered(listener.push(NEXT, REPLICA, message(2))) == [b"m2"]
    assert joined(listener.up(CHOSEN)) == set()
    listener.down(NEXT)
    listener.pass_time(OPTIONS.replace_s)
    got = listener.verify(listener.up(LAST), AT_ANY)
    assert gaps(got) == [f"the connection to server {NEXT} was lost: reset by peer"]


def test_goes_to_the_next_replica_soon_when_the_first_cannot_be_connected_to() -> None:
    """Only a replica of which nothing is known yet is waited for: the network, or this process, may be slow."""
    listener = listening(AT_ANY)
    listener.pass_time(OPTIONS.replace_s)
    assert listener.down(CHOSEN) == []
    assert only(Connect, listener.pass_time(OPTIONS.replace_s)) == [Connect(NEXT, PLAN_0.servers[NEXT].url)]
    listener.down(NEXT)
    for _ in range(10):
        assert listener.down(NEXT) == []
    assert only(Connect, listener.pass_time(OPTIONS.replace_s)) == [Connect(LAST, PLAN_0.servers[LAST].url)]
    assert listener.counters["failovers"] == 2


ABSENCES = [(AT_ANY, OPTIONS.replace_s), (AT_EVERY, OPTIONS.failover_s)]


@pytest.mark.parametrize(("plan", "away_s_max"), ABSENCES)
def test_a_replica_that_is_back_in_time_stays_and_a_short_absence_is_not_added_to_the_one_before(
    plan: Plan, away_s_max: float
) -> None:
    listener = listening(plan, *ALL)
    listener.down(CHOSEN)
    assert listener.pass_time(away_s_max * 0.9) == []
    sent = listener.up(CHOSEN)
    assert joined(sent) == at(CHOSEN)
    assert len(gaps(listener.verify(sent, plan))) == 1
    listener.down(CHOSEN)
    assert listener.pass_time(away_s_max * 0.9) == []
    assert listener.counters["failovers"] == 0


def test_a_move_to_a_replica_that_is_away_goes_to_another_and_nothing_is_missed() -> None:
    """It stays at the old place until markers of the replica that it found have come round."""
    home = Location("s1", C)
    listener = Listener().confirmed()
    active = phases(PLAN_0, Assignment(Mode.ALL_PUBLISHERS, ("s2", "s3")))[1]
    [away] = active.entry(C).route.listened_at(ID, C)
    [there] = set(active.entry(C).route.locations(C)) - {away}
    actions = listener.learn(active.entry(C).route)
    actions += listener.pass_time(OPTIONS.failover_s)
    assert [connect.link for connect in only(Connect, actions)] == [away.server, there.server]
    actions += listener.verify(listener.up(there.server), active)
    assert left(actions) == set()
    actions += mark(listener, there.server, home)
    assert left(actions) == {home}
    assert gaps(actions) == []


# A replica that is away: ALL_SUBSCRIBERS.

WITHOUT_S2 = "subscribed without what is published at s2, which cannot be reached"


def test_is_confirmed_without_a_replica_that_is_away_and_says_so() -> None:
    listener = listening(AT_EVERY, "s1", "s3")
    listener.push("s1", REPLICA, message(1))
    assert listener.pass_time(OPTIONS.failover_s - 0.01) == []
    gap = GapDetected(C, None, None, WITHOUT_S2)
    assert listener.pass_time(0.02) == [SubscriptionConfirmed(C), gap, Deliver([(C, b"m1")])]
    assert delivered(listener.push("s3", REPLICA, message(1, publisher=8))) == [b"m1"]
    back = listener.up("s2")
    assert joined(back) == at("s2")
    assert gaps(listener.verify(back, AT_EVERY)) == ["server s2 could not be reached"], "what it had is missing"
    assert delivered(listener.push("s2", REPLICA, message(1, publisher=9))) == [b"m1"]


def test_a_replica_that_is_lost_is_a_gap_once_it_stays_away_and_when_it_is_back() -> None:
    listener = listening(AT_EVERY, *ALL)
    assert listener.down("s2") == []
    assert delivered(listener.push("s1", REPLICA, message(1))) == [b"m1"]
    assert listener.pass_time(OPTIONS.failover_s - 0.01) == []
    assert gaps(listener.pass_time(0.02)) == ["the connection to server s2 was lost: reset by peer"]
    assert listener.pass_time(10) == []
    assert gaps(listener.verify(listener.up("s2"), AT_EVERY)) == ["server s2 could not be reached"]
    assert listener.pass_time(10) == []


def test_a_replica_that_is_lost_before_the_confirmation_holds_it_up_for_a_while() -> None:
    listener = listening(AT_EVERY, "s1", "s2")
    listener.down("s2")
    sent = listener.up("s3")
    assert listener.verify(sent, AT_EVERY) == []
    assert listener.pass_time(OPTIONS.failover_s) == [SubscriptionConfirmed(C), GapDetected(C, None, None, WITHOUT_S2)]


def test_with_every_replica_away_it_waits_for_the_first() -> None:
    listener = listening(AT_EVERY)
    assert listener.pass_time(10 * OPTIONS.failover_s) == []
    confirmed, gap = listener.verify(listener.up("s2"), AT_EVERY)
    assert confirmed == SubscriptionConfirmed(C)
    assert "s1, s3" in gap.reason


def test_a_replica_that_is_up_and_holds_no_plan_is_not_away() -> None:
    """Nobody may be confirmed where the route cannot be verified."""
    listener = listening(AT_EVERY, "s1", "s3")
    retry = listener.verify(listener.up("s2"), None)
    for _ in range(20):
        retry = listener.verify([*retry, *listener.pass_time(OPTIONS.failover_s / 10)], None)
        assert only(SubscriptionConfirmed, retry) == []
    assert listener.verify(listener.pass_time(1), AT_EVERY) == [SubscriptionConfirmed(C)]


def test_ending_before_a_lost_replica_is_given_up_reports_the_gap() -> None:
    listener = listening(AT_EVERY, *ALL)
    listener.down("s2")
    actions = listener.unsubscribe()
    assert gaps(actions) == ["the connection to server s2 was lost: reset by peer"]
    assert left(actions) == at("s1", "s3")
    assert listener.pass_time(OPTIONS.failover_s) == []
    assert listener.tell(Pushed("s1", [[b"unsubscribe", REPLICA, 0]])) == []
    assert listener.tell(Pushed("s3", [[b"unsubscribe", REPLICA, 0]])) == [SubscriptionEnded(C)]


def test_a_move_to_replicas_of_which_one_is_away_keeps_the_old_place() -> None:
    """What is published at that one is forwarded to the old place, if its dispatcher can; its markers come later."""
    home = Location("s1", C)
    active = phases(PLAN_0, EVERY)[1]
    listener = Listener().confirmed()
    actions = listener.learn(active.entry(C).route)
    actions += listener.verify([*actions, *listener.up("s2")], active)
    actions += listener.pass_time(OPTIONS.failover_s)
    for server in ("s1", "s2"):
        actions += mark(listener, server, home)
    assert left(actions) == set()
    assert gaps(actions) == ["server s3 cannot be reached"]
    assert delivered(listener.push("s1", C, message(1))) == [b"m1"]
    listener.verify(listener.up("s3"), active)
    assert left(mark(listener, "s3", home)) == {home}


def test_a_single_server_has_no_substitute() -> None:
    listener = Listener().confirmed()
    listener.down("s1")
    assert listener.pass_time(60) == []
    assert listener.counters["failovers"] == 0
    assert joined(listener.up("s1")) == {Location("s1", C)}


def test_replicas_that_come_and_go_leave_no_wishes_behind() -> None:
    listener = listening(AT_ANY)
    for _ in range(1000):
        listener.pass_time(OPTIONS.failover_s)
    assert len(listener.subscriber._timers) < 100  # pyright: ignore[reportPrivateUsage]  # no other way to see it


# Modes of newer software.


def test_a_notice_of_an_unknown_mode_changes_nothing_and_is_reported_once_per_client() -> None:
    listener = Listener().confirmed()
    publisher = Subject(PublisherMachine(7, listener.plan))
    publisher.tell(Publish("t", C, b"x"))
    publisher.up("s1")
    notice = message(0, unknown_notice(), flags=0x10)
    [got] = listener.push("s1", C, notice)
    assert isinstance(got, NewerSoftware)
    assert "mode 4 " in got.text and "upgrade this software" in got.text
    assert listener.push("s1", C, notice, message(1)) == [Deliver([(C, b"m1")])]
    assert publisher.push("s1", CLIENTS_CHANNEL, unknown_notice()) == []
    assert len(published(publisher.tell(Publish("t", C, b"x")), C, "s1")) == 1


def test_a_subscription_waits_while_the_stored_mode_is_unknown() -> None:
    """Confirmed, it would promise what nobody knows how to keep."""
    listener, sent = joining()
    [verify] = tagged(sent, "verify")
    [got] = listener.tell(reply(verify, unknown_entry()))
    assert isinstance(got, NewerSoftware)
    [verify] = tagged(listener.pass_time(OPTIONS.look_again_s_max), "verify")
    assert listener.tell(reply(verify, unknown_entry())) == []
    assert listener.verify(listener.pass_time(OPTIONS.look_again_s_max), PLAN_0) == [SubscriptionConfirmed(C)]


def test_an_unknown_mode_while_it_moves_leaves_it_where_it_is() -> None:
    listener = Listener().confirmed().moving(SETTLED.begin({C: single("s1")}), Route(1, single("s2")))
    [verify] = tagged(listener.pass_time(OPTIONS.look_again_s_max), "verify")
    assert [type(each) for each in listener.tell(reply(verify, unknown_entry(5)))] == [NewerSoftware]
    assert delivered([*listener.push("s1", C, message(1)), *listener.push("s2", C, message(2))]) == [b"m1", b"m2"]
    assert listener.plan.route(C) == Route(1, single("s2"))


def test_a_gap_is_reported_although_the_stored_mode_is_unknown() -> None:
    """It goes on by the route that it knows, so that nothing else would ever tell of what it has missed (G5)."""
    listener = Listener().confirmed()
    listener.down("s1")
    [verify] = tagged(listener.up("s1"), "verify")
    got = listener.tell(reply(verify, unknown_entry()))
    assert gaps(got) == ["the connection to server s1 was lost: reset by peer"]
    again = tagged(listener.pass_time(1), "verify")
    assert gaps(listener.tell(*(reply(send, unknown_entry()) for send in again))) == []
