"""What a dispatcher does for replicated channels, and what several of them achieve together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.machine.events import ErrorReply, RepliedAll, Send, SendAll
from dynamoth.names import (
    BALANCER_CHANNEL,
    RELAY_PREFIX,
    forward_channel,
    inbox,
    is_user_channel,
    relay_channel,
    replica_channel,
)
from dynamoth.plan.plan import Assignment, Entry, Location, Mode, Phase, Plan, Route, single
from dynamoth.protocol.control import (
    ForwardRequest,
    LossNotice,
    Marker,
    ObservationGap,
    RouteNotice,
    Vacated,
    pack_control,
    seal_control,
    unpack_control,
)
from dynamoth.protocol.envelope import (
    CONTROL,
    FORWARDED,
    HEARTBEAT,
    RAW,
    Envelope,
    forwarded,
    is_enveloped,
    open_envelope,
    seal,
)
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.forwarder import forward_link
from dynamoth_dispatcher.options import DispatcherOptions, ForwarderOptions, TransitionOptions
from tests.core import strategies
from tests.machines.agent import INCARNATION, SUBSCRIBER, Agent, copies, marks
from tests.machines.helpers import PLAN_0, C, commands, message, only, phases, published, sends, tagged

PACE = TransitionOptions()
ALL_SUBSCRIBERS, ALL_PUBLISHERS = Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS
REPLICATED = [ALL_SUBSCRIBERS, ALL_PUBLISHERS]
AT_ALL = phases(PLAN_0, Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2", "s3")))[2]


def replicas(mode: Mode, *servers: str) -> Assignment:
    return Assignment(mode, servers)


def at(server: str, epoch: int) -> Location:
    return Location(server, replica_channel(C, epoch))


def plain(server: str) -> Location:
    return Location(server, C)


def sent(server: str, actions: list[Any]) -> list[tuple[Location, bytes]]:
    """Return what the dispatcher of ``server`` publishes, or relays, on users' channels, and where, in order."""
    out: list[tuple[Location, bytes]] = []
    for send in sends(actions):
        command, *parts = send.args
        if command == b"PUBLISH" and isinstance(parts[0], bytes) and isinstance(parts[1], bytes):
            physical = parts[0].removeprefix(RELAY_PREFIX)
            if is_user_channel(physical):
                there = server if send.link == LOCAL else send.link.removeprefix("to:")
                out.append((Location(there, physical), parts[1]))
    return out


def controls(server: str, actions: list[Any]) -> list[tuple[Location, Any]]:
    """Return the control messages among them."""
    pairs = [(place, open_envelope(data)) for place, data in sent(server, actions) if is_enveloped(data)]
    return [(place, unpack_control(envelope.payload)) for place, envelope in pairs if envelope.flags & CONTROL]


def arrive(plan: Plan, place: Location, *payloads: bytes) -> list[tuple[Location, Envelope]]:
    """Let messages arrive at a location; return what the dispatcher there makes of them."""
    agent = Agent(place.server).holding(plan)
    actions = agent.observe(*payloads, physical=place.physical)
    actions += agent.connect_all()
    actions += agent.send_later()
    envelopes = [(target, open_envelope(data)) for target, data in sent(place.server, actions)]
    return [(target, envelope) for target, envelope in envelopes if not envelope.flags & CONTROL]


def destinations(plan: Plan, place: Location, data: bytes) -> set[Location]:
    out = [target for target, _ in arrive(plan, place, data)]
    assert len(set(out)) == len(out)
    return set(out)


# Messages at a location of a route.

GROWN = phases(phases(PLAN_0, replicas(ALL_PUBLISHERS, "s1", "s2"))[2], replicas(ALL_PUBLISHERS, "s1", "s2", "s3"))
"""From two replicas (epoch 1) to three (epoch 4)."""


@pytest.mark.parametrize("phase", [0, 1])
def test_siblings_have_what_a_publisher_sent_by_todays_route(phase: int) -> None:
    """It has sent it to each of them; the followers of the other route have it from nobody yet."""
    old, new = {at("s1", 1), at("s2", 1)}, {at("s1", 4), at("s2", 4), at("s3", 4)}
    for place in old:
        assert destinations(GROWN[phase], place, message(1, epoch=1)) == new
    for place in new:
        assert destinations(GROWN[phase], place, message(1, epoch=4)) == old
    for place in old | new:
        assert destinations(GROWN[phase], place, forwarded(message(1), 4)) == set(), "a copy of today"


@pytest.mark.parametrize("data", [*(forwarded(message(1), epoch) for epoch in (0, 1, 3)), b"raw"], ids=repr)
def test_siblings_lack_what_somebody_else_sent(data: bytes) -> None:
    everywhere = {at("s1", 1), at("s2", 1), at("s1", 4), at("s2", 4), at("s3", 4)}
    for place in everywhere:
        assert destinations(GROWN[1], place, data) == everywhere - {place}


@pytest.mark.parametrize("mode", REPLICATED)
def test_at_rest_nothing_is_forwarded(mode: Mode) -> None:
    plan = phases(PLAN_0, replicas(mode, "s1", "s2"))[2]
    for data in (message(1, epoch=1), forwarded(message(1), 0), b"raw"):
        assert destinations(plan, at("s1", 1), data) == set()


# Messages elsewhere.

BETWEEN = phases(phases(PLAN_0, replicas(ALL_SUBSCRIBERS, "s1", "s2"))[2], replicas(ALL_PUBLISHERS, "s1", "s3"))
"""From epoch 1 to epoch 4; the plain name of C is no location of either."""


@pytest.mark.parametrize(
    "place", [plain("s1"), plain("s2"), plain("s3"), at("s1", 2), at("s3", 1), at("s2", 4)], ids=str
)
@pytest.mark.parametrize("data", [message(1), message(1, epoch=3), forwarded(message(1), 3), b"raw"])
def test_elsewhere_a_message_goes_where_clients_are_notified_to_be(place: Location, data: bytes) -> None:
    """Only the dispatchers of locations forward between them: copies that went round must not overtake markers."""
    prepared, active, _ = BETWEEN
    for plan in (prepared, active):
        out = arrive(plan, place, data)
        publisher = out[0][1].publisher
        assert {target for target, _ in out} == {*plan.entry(C).client_route.published_at(publisher, C)}
        assert {envelope.epoch for _, envelope in out} == {3}, "older, so that the dispatcher there forwards it on"
        assert all(envelope.flags & FORWARDED for _, envelope in out)


# Raw messages.


@pytest.mark.parametrize("mode", REPLICATED)
def test_raw_messages_under_the_plain_name_are_numbered_for_the_replicas(mode: Mode) -> None:
    """A plain client knows the channel by no other name."""
    plan = phases(PLAN_0, replicas(mode, "s1", "s2"))[2]
    out = arrive(plan, plain("s1"), b"one", b"two")
    publisher = out[0][1].publisher
    places = list(plan.entry(C).route.published_at(publisher, C))
    for number, payload in ((0, b"one"), (1, b"two")):
        some = [(target, envelope) for target, envelope in out if envelope.payload == payload]
        assert sorted((target for target, _ in some), key=repr) == places
        assert {envelope.sequence - out[0][1].sequence for _, envelope in some} == {number}
        assert all(envelope.flags & (RAW | FORWARDED) == RAW | FORWARDED for _, envelope in some)


# Two locations at one server.


def test_a_name_at_rest_becomes_restless_when_only_the_epoch_changes() -> None:
    """The servers stay, and what was remembered as needing nothing is the old location now."""
    start = phases(PLAN_0, replicas(ALL_PUBLISHERS, "s1", "s2"))[2]
    agent = Agent().holding(start)
    assert agent.observe(message(1, epoch=1), physical=replica_channel(C, 1)) == []
    agent.change(start, start.begin({C: replicas(ALL_SUBSCRIBERS, "s1", "s2")}))
    actions = agent.observe(message(2, epoch=1), physical=replica_channel(C, 1))
    actions += agent.connect_all()
    assert [place.physical for place, _ in sent("s1", actions)] == [replica_channel(C, 4)]


@pytest.mark.parametrize(
    ("server", "replica", "concerned"),
    [("s1", "s1", {plain("s1"), at("s1", 1), at("s2", 1)}), ("s2", "s3", {plain("s1"), at("s3", 1)})],
    ids=["here at two names", "here at one"],
)
def test_subscribers_hear_that_a_dispatcher_was_blind(server: str, replica: str, concerned: set[Location]) -> None:
    """What was published at one name was not forwarded to the others; its publisher may be gone by now (G5)."""
    agent = Agent(server)
    agent.up(LOCAL)
    actions = agent.read(phases(PLAN_0, replicas(ALL_SUBSCRIBERS, *sorted({replica, "s2"})))[1])
    actions += agent.connect_all()
    assert {place for place, notice in controls(server, actions) if notice == LossNotice(C, None)} == concerned


# Relaying: what is published at all of several new locations.


SPREAD = phases(PLAN_0, replicas(ALL_PUBLISHERS, "s2", "s3"))[1]


def relayed(agent: Agent, *payloads: bytes, physical: bytes = C) -> list[bytes]:
    """Let other dispatchers relay something to a location here; return what is published there."""
    return published(agent.observe(*payloads, physical=relay_channel(physical)), physical, LOCAL)


def test_only_what_comes_at_several_new_locations_is_relayed_to_the_old_ones() -> None:
    new, old = Agent("s3").holding(SPREAD, "s1", "s2"), Agent("s1").holding(SPREAD, "s2", "s3")
    [relay] = only(Send, new.observe(message(1, epoch=1), physical=replica_channel(C, 1)))
    assert (relay.link, relay.args[1]) == ("to:s1", relay_channel(C))
    assert {send.args[1] for send in only(Send, old.observe(message(1)))} >= {replica_channel(C, 1)}
    one = phases(PLAN_0, replicas(ALL_SUBSCRIBERS, "s2", "s3"))[1]
    agent = Agent("s2").holding(one, "s1", "s3")
    [copy] = only(Send, agent.observe(message(1, epoch=1), physical=replica_channel(C, 1)))
    assert copy.args[1] == C


def test_what_several_relay_is_published_once_and_markers_each_time() -> None:
    agent = Agent("s1", DispatcherOptions(forwarder=ForwarderOptions(relayed_max=2))).holding(SPREAD, "s2", "s3")
    first, second, third = (forwarded(message(number), 1) for number in (1, 2, 3))
    marker = seal_control(Marker(C, "s2", 1))
    assert relayed(agent, first, second, marker, second, first, marker) == [first, second, marker, marker]
    assert relayed(agent, third, first) == [third, first], "past the bound the oldest is forgotten"
    assert relayed(agent, forwarded(message(1, publisher=8), 1)) == [forwarded(message(1, publisher=8), 1)]
    assert relayed(agent, b"raw") == []


def test_one_dispatcher_relays_at_once_and_the_others_later_and_together() -> None:
    """Publisher 7 is s3's among s2 and s3; where the old location is at a new server, every publisher is that one's."""
    later = Agent("s2").holding(SPREAD, "s1", "s3")
    assert later.observe(message(1, epoch=1), message(2, epoch=1), physical=replica_channel(C, 1)) == []
    assert later.announce(replica_channel(C, 1), leaving=("s1",)) == []
    [together] = only(SendAll, later.send_later())
    assert order("s2", plain("s1"), [together]) == [1, 2, 0]
    again = later.tell(RepliedAll("to:s1", together.tag, [1, 0, ErrorReply("NOPERM")]))
    assert [open_envelope(data).sequence for data in copies(again, "s1")] == [2]
    assert later.counters["forwards_refused"] == 1
    assert later.send_later() == []
    over = phases(PLAN_0, replicas(ALL_PUBLISHERS, "s1", "s2"))[1]
    for publisher in (7, 8):
        data = message(1, epoch=1, publisher=publisher)
        assert Agent("s2").holding(over, "s1").observe(data, physical=replica_channel(C, 1)) == []
        assert published(Agent("s1").holding(over, "s2").observe(data, physical=replica_channel(C, 1)), C, LOCAL)


def test_what_is_sent_later_goes_before_what_is_sent_at_once() -> None:
    agent = Agent("s2").holding(SPREAD, "s1", "s3")
    both = [message(1, epoch=1), message(1, epoch=1, publisher=8)]
    [together] = agent.observe(*both, physical=replica_channel(C, 1))
    assert [open_envelope(data).publisher for _, data in commands([together], b"PUBLISH")] == [7, 8]


def test_what_waits_to_be_sent_later_survives_its_link() -> None:
    agent = Agent("s2").holding(SPREAD, "s1", "s3")
    agent.observe(message(1, epoch=1), physical=replica_channel(C, 1))
    agent.down("to:s1")
    assert agent.send_later() == []
    [relay] = agent.connect("s1")
    assert relay.args[1] == relay_channel(C)


def asked(agent: Agent, *copies: tuple[str, bytes], physical: bytes = replica_channel(C, 1)) -> list[Any]:
    """Let a publisher ask the dispatcher to forward something."""
    return agent.observe(pack_control(ForwardRequest(copies)), physical=forward_channel(physical))


def heartbeat(number: int, quiet_ms: int = 200) -> bytes:
    return seal(0xABCD, number, 1, b"", HEARTBEAT, quiet_ms)


def heartbeats(actions: list[Any], server: str) -> list[Envelope]:
    return [open_envelope(data) for data in copies(actions, server, replica_channel(C, 1))]


def test_a_request_to_forward_waits_for_the_plan() -> None:
    agent = Agent("s1")
    agent.up(LOCAL)
    assert asked(agent, ("s2", message(5, epoch=1))) == []
    agent.read(AT_ALL)
    assert copies(agent.connect("s2"), "s2", replica_channel(C, 1)) == [message(5, epoch=1)]


def test_a_heartbeat_is_sent_when_the_publisher_asks_for_no_other_for_a_while() -> None:
    """As long as it does, later messages show the gap; and the message itself is to come first if it can."""
    agent = Agent("s1").holding(AT_ALL)
    wait_s = ForwarderOptions().heartbeat_delay_s
    assert asked(agent, ("s2", heartbeat(5)), ("s3", heartbeat(5))) == []
    assert agent.pass_time(wait_s / 2) == []
    assert asked(agent, ("s2", heartbeat(6))) == []
    agent.pass_time(wait_s / 2)
    assert [(e.sequence, e.flags, e.quiet_ms) for e in heartbeats(agent.connect("s3"), "s3")] == [(5, HEARTBEAT, 5200)]
    agent.pass_time(wait_s / 2)
    assert [(e.sequence, e.flags, e.quiet_ms) for e in heartbeats(agent.connect("s2"), "s2")] == [(6, HEARTBEAT, 5200)]
    assert agent.pass_time(60) == []


def test_of_too_many_heartbeats_the_oldest_is_sent_at_once() -> None:
    agent = Agent("s1", DispatcherOptions(forwarder=ForwarderOptions(heartbeats_max=1))).holding(AT_ALL)
    asked(agent, ("s2", heartbeat(5)), ("s3", heartbeat(5)))
    assert [envelope.sequence for envelope in heartbeats(agent.connect("s2"), "s2")] == [5]


def test_a_heartbeat_for_a_server_that_has_left_the_plan_is_dropped() -> None:
    agent = Agent("s1").holding(AT_ALL)
    asked(agent, ("s3", heartbeat(5)))
    agent.read(Plan(9, {id_: AT_ALL.servers[id_] for id_ in ("s1", "s2")}, ("s1", "s2"), virtual_nodes=8))
    assert agent.pass_time(60) == []


@pytest.mark.parametrize(
    ("request_", "counter"),
    [
        (b"junk", "malformed_messages"),
        (pack_control(ObservationGap("s1")), "unexpected_messages"),
        (pack_control(ForwardRequest((("s2", b"raw"),))), "unexpected_messages"),
        (pack_control(ForwardRequest((("s9", message(1)),))), "unexpected_messages"),
        (pack_control(ForwardRequest((("s1", message(1)),))), "unexpected_messages"),
    ],
    ids=["malformed", "another message", "no envelope", "unknown server", "itself"],
)
def test_nothing_else_is_forwarded_at_request(request_: bytes, counter: str) -> None:
    agent = Agent("s1").holding(AT_ALL)
    assert agent.observe(request_, physical=forward_channel(replica_channel(C, 1))) == []
    assert agent.counters[counter] == 1


def test_subscribers_are_notified_that_what_was_relayed_may_be_lost() -> None:
    """Before a marker lets them go (G5)."""
    agent = Agent("s1")
    agent.up(LOCAL)
    marker = seal_control(Marker(C, "s2", 1))
    agent.observe(marker, physical=relay_channel(C))
    got = [notice for place, notice in controls("s1", agent.read(SPREAD)) if place == plain("s1")]
    assert got == [LossNotice(C, None), Marker(C, "s2", 1)]


# Markers.


@pytest.mark.parametrize("server", ["s1", "s3"])
def test_the_markers_of_each_new_location_go_to_the_servers_of_all_old_ones(server: str) -> None:
    agent = Agent(server).holding(BETWEEN[1])
    links = {"s1": LOCAL if server == "s1" else "to:s1", "s2": "to:s2"}
    got = marks([*agent.announce(replica_channel(C, 4)), *agent.connect_all(), *agent.send_later()])
    assert got == [(links[old], Marker(C, server, 1)) for old in ("s1", "s2")]


@given(strategies.assignments(), strategies.assignments(), strategies.naturals)
def test_at_every_old_location_a_marker_is_behind_what_was_published_before_it(
    old: Assignment, new: Assignment, publisher: int
) -> None:
    """What a subscriber relies on when it leaves. Holds for each link, as each is first in, first out."""
    if old == new:
        return
    active = phases(phases(strategies.PLAN_0, old)[2], new)[1] if old != home() else phases(strategies.PLAN_0, new)[1]
    entry = active.entry(C)
    for place in entry.route.locations(C):
        agent = Agent(place.server).holding(active)
        before = message(1, publisher=publisher, epoch=entry.route.epoch)
        after = message(2, publisher=publisher, epoch=entry.route.epoch)
        actions = agent.observe(before, physical=place.physical)
        actions += agent.announce(place.physical)
        actions += agent.observe(after, physical=place.physical)
        actions += agent.connect_all()
        actions += agent.send_later()
        for target in (target for route in entry.previous for target in route.locations(C)):
            if target not in entry.route.locations(C):
                assert order(place.server, target, actions) in ([0], [1, 0, 2])


def order(server: str, target: Location, actions: list[Any]) -> list[int]:
    """Return the numbers of what ``server`` sends to a location, in order; 0 is the subscriber's marker."""
    numbers: list[int] = []
    for name, data in commands(actions, b"PUBLISH", LOCAL if target.server == server else forward_link(target.server)):
        physical = name.removeprefix(RELAY_PREFIX)
        if physical == inbox(SUBSCRIBER):
            numbers.append(0)
        elif physical == target.physical and is_message(data):
            numbers.append(open_envelope(data).sequence)
    return numbers


def is_message(data: bytes) -> bool:
    return not open_envelope(data).flags & CONTROL


def home() -> Assignment:
    return strategies.PLAN_0.entry(C).route.assignment


# Vacated locations.


def count(agent: Agent, actions: list[Any], listeners: Mapping[bytes, int]) -> list[Any]:
    """Answer NUMSUB with the number of listeners of each name; return what the balancer gets."""
    answered = agent.listeners(actions, listeners)
    return [unpack_control(data) for data in published(answered, BALANCER_CHANNEL, LOCAL)]


def polled(agent: Agent) -> list[Any]:
    return agent.pass_time(PACE.settle_after_s + 2 * PACE.tick_interval_s)


def test_only_the_old_names_are_counted_at_a_server_that_stays() -> None:
    """Case 5: the server never empties, the old name does."""
    agent = Agent("s1").holding(BETWEEN[1])
    actions = polled(agent)
    assert commands(actions, b"PUBSUB") == [(b"NUMSUB", replica_channel(C, 1))] * len(tagged(actions, "numsub"))
    assert count(agent, actions, {replica_channel(C, 1): 0}) == [Vacated("s1", ((C, 4),), INCARNATION)]


def both_old_here() -> Plan:
    """Return a plan where two older routes of C had a location at s1 and may still be followed."""
    older = (Route(0, single("s1")), Route(1, replicas(ALL_SUBSCRIBERS, "s1", "s2")))
    return PLAN_0.with_entries({C: Entry(Route(4, single("s3")), Phase.ACTIVE, older)}, 5)


def test_it_is_vacated_when_nobody_listens_at_any_old_name() -> None:
    agent = Agent("s1").holding(both_old_here())
    for at_plain, at_replica in ((1, 0), (0, 1), (1, 1)):
        assert count(agent, polled(agent), {C: at_plain, replica_channel(C, 1): at_replica}) == []
    assert count(agent, polled(agent), {C: 0, replica_channel(C, 1): 0}) == [Vacated("s1", ((C, 4),), INCARNATION)]


# Telling clients.


@pytest.mark.parametrize("mode", REPLICATED)
@pytest.mark.parametrize("server", ["s1", "s2", "s3"])
def test_a_publisher_is_notified_unless_it_is_at_a_replica(mode: Mode, server: str) -> None:
    """At any: under ALL_SUBSCRIBERS it may have a reason to use another one than its own."""
    plan = phases(PLAN_0, replicas(mode, "s1", "s2"))[1]
    got = pack_control(RouteNotice(C, plan.entry(C).route))
    for physical in (C, replica_channel(C, 1)):
        actions = Agent(server).holding(plan).observe(message(1, epoch=1), physical=physical)
        right = physical != C and server != "s3"
        assert published(actions, inbox(7), LOCAL) == ([] if right else [got])


# Several dispatchers together.


class Cluster:
    """The dispatchers of some servers, with plans of their own, and links that deliver at once."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self.agents = {server: Agent(server) for server in plans}
        for server, agent in self.agents.items():
            agent.up(LOCAL)
            agent.read(plans[server])
            agent.connect_all()
        #: Where the message has arrived, with the number of times that it was forwarded before, in order.
        self.arrivals: list[tuple[Location, int]] = []

    def publish(self, *places: Location, data: bytes, hops_max: int = 50) -> set[Location]:
        """Let a message arrive at some locations, and let the dispatchers forward until nothing is left to do."""
        todo = deque((place, data, 0) for place in places)
        while todo:
            place, payload, hops = todo.popleft()
            assert hops <= hops_max, f"forwarded for ever: {self.arrivals}"
            self.arrivals.append((place, hops))
            agent = self.agents[place.server]
            linked = len(agent.links)
            actions = agent.observe(payload, physical=place.physical)
            actions += [action for link in agent.links[linked:] for action in agent.up(link)]
            actions += agent.send_later()
            todo.extend((to, copy, hops + 1) for to, copy in sent(place.server, actions) if is_message(copy))
        return {place for place, _ in self.arrivals}

    def publish_by(self, route: Route, publisher: int) -> set[Location]:
        data = message(1, publisher=publisher, epoch=route.epoch)
        return self.publish(*route.published_at(publisher, C), data=data)

    @property
    def hops(self) -> int:
        return max(hops for _, hops in self.arrivals)


def has_reached(route: Route, reached: set[Location]) -> bool:
    """Tell whether every subscriber that follows a route has got the message, also one whose replica was away."""
    places = route.locations(C)
    if route.assignment.mode is ALL_SUBSCRIBERS:
        return any(place in reached for place in places)
    return all(place in reached for place in places)


@st.composite
def changes(draw: st.DrawFn) -> list[Plan]:
    """The versions of two changes in a row, from home over one assignment to another."""
    first = draw(strategies.assignments().filter(lambda assignment: assignment != home()))
    second = draw(strategies.assignments().filter(lambda assignment: assignment != first))
    once = phases(strategies.PLAN_0, first)
    return [strategies.PLAN_0, *once, *phases(once[-1], second)]


OLD, PREPARED, ACTIVE, SETTLED = 3, 4, 5, 6
"""Indices of the versions of the second change."""
MEANWHILE = st.sampled_from((PREPARED, ACTIVE, SETTLED))
SERVERS = strategies.SERVER_IDS


def everywhere(plan: Plan) -> Cluster:
    return Cluster(dict.fromkeys(SERVERS, plan))


@given(changes(), MEANWHILE, st.booleans(), strategies.naturals)
def test_whoever_follows_any_route_gets_what_is_published_by_any(
    plans: list[Plan], version: int, by_the_old: bool, publisher: int
) -> None:
    entry = plans[version].entry(C)
    route = plans[OLD].entry(C).route if by_the_old else entry.client_route
    cluster = everywhere(plans[version])
    reached = cluster.publish_by(route, publisher)
    assert all(has_reached(each, reached) for each in entry.live_routes)
    assert cluster.hops <= 1
    assert len(cluster.arrivals) <= len(SERVERS) + len(SERVERS) ** 2


@given(changes(), st.sampled_from((PREPARED, ACTIVE)), st.data(), strategies.naturals)
def test_one_replica_is_enough_for_the_followers_of_the_other_route(
    plans: list[Plan], version: int, data: st.DataObject, publisher: int
) -> None:
    """The others may be slow or away; under ALL_SUBSCRIBERS the publisher may have taken any."""
    entry = plans[version].entry(C)
    route = data.draw(st.sampled_from(entry.live_routes))
    place = data.draw(st.sampled_from(route.locations(C)))
    reached = everywhere(plans[version]).publish(place, data=message(1, publisher=publisher, epoch=route.epoch))
    assert all(has_reached(other, reached) for other in entry.live_routes if other != route)
    if route.assignment.mode is ALL_SUBSCRIBERS:
        assert has_reached(route, reached)


@st.composite
def anywhere(draw: st.DrawFn, plans: list[Plan]) -> Location:
    """Any server, under any name that the channel ever had or might have had."""
    epochs = [plan.entry(C).route.epoch for plan in plans]
    physical = draw(st.sampled_from((C, *(replica_channel(C, epoch) for epoch in (*epochs, 99)))))
    return Location(draw(st.sampled_from(SERVERS)), physical)


@given(changes(), MEANWHILE, st.data(), strategies.naturals)
def test_whoever_follows_any_route_gets_what_was_published_anywhere(
    plans: list[Plan], version: int, data: st.DataObject, publisher: int
) -> None:
    """By a very stale publisher, one of another life of the cluster, or a plain client."""
    entry = plans[version].entry(C)
    place = data.draw(anywhere(plans))
    route = next((route for route in entry.live_routes if place in route.locations(C)), None)
    if route is not None and route.assignment.mode is ALL_PUBLISHERS and entry.phase is Phase.SETTLED:
        return  # nobody sends to some of the replicas at rest
    payload = message(1, publisher=publisher, epoch=0 if route is None or route.epoch else 1)
    cluster = everywhere(plans[version])
    reached = cluster.publish(place, data=data.draw(st.sampled_from((payload, b"raw"))))
    assert all(has_reached(each, reached) for each in entry.live_routes)
    assert cluster.hops <= 2


@given(changes(), MEANWHILE, st.data(), strategies.naturals)
def test_dispatchers_need_not_change_their_plans_at_once(
    plans: list[Plan], newest: int, data: st.DataObject, publisher: int
) -> None:
    """Those of a change have acknowledged the version before; others may have slept since the last that was theirs.

    A copy goes on only from a dispatcher that knows more, so that each step is nearer to the present, and ends.
    """
    before, now = plans[newest - 1].entry(C), plans[newest].entry(C)
    old = plans[OLD].entry(C).route
    concerned = {*old.assignment.servers, *now.route.assignment.servers}
    oldest = dict.fromkeys(SERVERS, 0) | dict.fromkeys(home().servers, ACTIVE - OLD)
    oldest |= dict.fromkeys(concerned, newest - 1)
    cluster = Cluster({server: plans[data.draw(st.integers(oldest[server], newest))] for server in SERVERS})
    route = data.draw(st.sampled_from([plans[0].entry(C).route, old, now.client_route]))
    reached = cluster.publish_by(route, publisher)
    followed = [each for each in now.live_routes if each in before.live_routes]
    assert followed
    assert all(has_reached(each, reached) for each in followed)
    assert cluster.hops <= 3
