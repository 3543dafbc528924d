"""The plan: its steps, what it refuses, and who must get a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage, PlanError, UnknownMode
from dynamoth.names import replica_channel
from dynamoth.plan.plan import (
    EPOCH_MAX,
    Assignment,
    Entry,
    Location,
    Mode,
    Phase,
    Plan,
    PlanDelta,
    Route,
    Server,
    missing,
    single,
)
from dynamoth.plan.slots import SLOTS, slot_of
from dynamoth.protocol.control import unpack_control
from dynamoth.protocol.plan_wire import entry_from_wire, route_from_wire, route_to_wire
from tests.core.strategies import PLAN_0, SERVER_IDS, assignments, naturals, plans, routes

C = b"news"
HOME = PLAN_0.ring.home(C)
ACTIVATE = partial(Plan.activate, channels=[C])
SETTLE = partial(Plan.settle, channels=[C])
AWAY, FAR = [id_ for id_ in PLAN_0.base if id_ != HOME][:2]


def test_plan_0_names_no_channel_and_puts_every_one_at_home() -> None:
    assert PLAN_0.version == 0
    assert not PLAN_0.entries
    assert PLAN_0.entry(C) == Entry(Route(0, single(HOME)), Phase.SETTLED)


def test_a_change_goes_through_three_phases_each_in_a_version_of_its_own() -> None:
    home, away = Route(0, single(HOME)), Route(1, single(AWAY))
    prepared = PLAN_0.begin({C: single(AWAY)})
    assert (prepared.version, prepared.entry(C)) == (1, Entry(away, Phase.PREPARED, (home,)))
    assert prepared.entry(C).client_route == home
    active = prepared.activate([C])
    assert (active.version, active.entry(C)) == (2, Entry(away, Phase.ACTIVE, (home,)))
    assert active.entry(C).client_route == away
    settled = active.settle([C])
    assert (settled.version, settled.entry(C)) == (3, Entry(away, Phase.SETTLED))


def test_a_channel_that_comes_home_keeps_its_entry_so_that_epochs_never_go_back() -> None:
    moved = PLAN_0.begin({C: single(AWAY)}).activate([C]).settle([C])
    back = moved.begin({C: single(HOME)}).activate([C]).settle([C])
    assert back.entries[C] == Entry(Route(4, single(HOME)), Phase.SETTLED)


PREPARED = PLAN_0.begin({C: single(AWAY)})
ACTIVE = PREPARED.activate([C])
SETTLED = ACTIVE.settle([C])
TO_AWAY = Route(1, single(AWAY))
S1 = Server("s1", "redis://s1")

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: PREPARED.begin({C: single(FAR)}), "in transition"),
    (lambda: ACTIVE.begin({C: single(FAR)}), "in transition"),
    (lambda: PLAN_0.begin({C: single(HOME)}), "there already"),
    (lambda: PLAN_0.begin({C: single("s9")}), "'s9', which the plan does not list"),
    (lambda: PLAN_0.with_entries({C: Entry(TO_AWAY, Phase.PREPARED, (Route(0, single("s9")),))}), "'s9'"),
    (lambda: ACTIVE.activate([C]), "not newer"),
    (lambda: SETTLED.activate([C]), "previous routes"),
    (lambda: SETTLED.settle([C]), "cannot settle"),
    # Subscribers are at the old location: a dispatcher that takes this stops forwarding to them.
    (lambda: PREPARED.settle([C]), "cannot settle"),
    (lambda: SETTLED.with_entries({C: SETTLED.entries[C]}), "not newer"),
    (lambda: SETTLED.with_entries({C: Entry(Route(0, single(FAR)), Phase.SETTLED)}), "not newer"),
    (lambda: PLAN_0.apply(PlanDelta(3, 4, {})), "from version 3"),
    (lambda: Entry(TO_AWAY, Phase.SETTLED, (TO_AWAY,)), "previous routes"),
    (lambda: Entry(TO_AWAY, Phase.ACTIVE), "previous routes"),
    (lambda: Assignment(Mode.SINGLE, ()), "at least one"),
    (lambda: Assignment(Mode.SINGLE, ("s1", "s2")), "takes one server"),
    (lambda: Assignment(Mode.ALL_PUBLISHERS, ("s1", "s1")), "twice"),
    (lambda: PLAN_0.begin({slot_of(C): Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2"))}), "slots have one server"),
    (lambda: Plan(0, {"s1": S1}, ()), "each named once, not: none"),
    # Whoever asks such a plan for the home of a channel gets a ValueError that nobody expects.
    (lambda: Plan(0, {}, ()), "at least one server"),
    (lambda: Plan(-1, PLAN_0.servers, PLAN_0.base), "32 bits"),
    (lambda: Plan(EPOCH_MAX + 1, PLAN_0.servers, PLAN_0.base), "32 bits"),
]


@pytest.mark.parametrize(("make", "cause"), REFUSED)
def test_refuses_what_means_nothing(make: Callable[[], object], cause: str) -> None:
    with pytest.raises(PlanError, match=cause):
        make()


def test_the_largest_version_is_taken() -> None:
    assert Plan(EPOCH_MAX, PLAN_0.servers, PLAN_0.base).version == EPOCH_MAX


@given(st.data())
def test_a_diff_applied_gives_the_newer_plan(data: st.DataObject) -> None:
    older = data.draw(plans())
    newer = data.draw(plans(older))
    delta = older.diff(newer)
    assert older.apply(delta) == newer
    assert all(older.entries.get(channel) != entry for channel, entry in delta.entries.items())


def test_versions_of_a_plan_share_one_ring() -> None:
    ring = PLAN_0.ring
    assert PLAN_0.begin({C: single(AWAY)}).ring is ring


@given(plans())
def test_an_epoch_is_never_newer_than_the_plan(plan: Plan) -> None:
    for entry in plan.entries.values():
        epochs = [route.epoch for route in (*entry.previous, entry.route)]
        assert epochs == sorted(set(epochs))
        assert epochs[-1] <= plan.version


def test_a_move_that_is_undone_before_it_is_active_ends_where_it_began() -> None:
    prepared = PLAN_0.begin({C: single(AWAY)})
    undone = prepared.roll_back([C])
    assert (undone.version, undone.entry(C)) == (2, Entry(Route(2, single(HOME)), Phase.SETTLED))
    with pytest.raises(PlanError, match="cannot be undone: clients may have followed it"):
        prepared.activate([C]).roll_back([C])
    with pytest.raises(PlanError, match="cannot be undone"):
        prepared.activate([C]).fail_over({C: single(FAR)}).roll_back([C])


def test_a_replicated_channel_returns_to_its_replicas_by_another_transition() -> None:
    """The names of replicas contain the epoch."""
    replicas = Assignment(Mode.ALL_PUBLISHERS, (HOME, AWAY))
    replicated = PLAN_0.begin({C: replicas}).activate([C]).settle([C])
    undone = replicated.begin({C: single(FAR)}).roll_back([C])
    assert undone.entry(C) == Entry(Route(5, replicas), Phase.PREPARED, (Route(1, replicas),))


def test_an_entry_may_follow_those_before_it_in_its_plan_and_none_of_another_plan() -> None:
    entries: list[Entry] = []
    plan = PLAN_0
    for server in (AWAY, HOME, AWAY):
        for change in (partial(Plan.begin, assignments={C: single(server)}), ACTIVATE, SETTLE):
            plan = change(plan)
            entries.append(plan.entries[C])
    for index, entry in enumerate(entries):
        assert [entry.may_follow(other) for other in entries] == [at <= index for at in range(len(entries))]
    elsewhere = replace(PLAN_0, version=20).begin({C: single(AWAY)}).entries[C]
    assert [elsewhere.may_follow(other) for other in entries] == [False] * len(entries)
    assert not replace(entries[0], route=replace(entries[0].route, assignment=single(FAR))).may_follow(entries[0])


# Who must get a message.


def is_reached(channel: bytes, route: Route, reached: set[Location]) -> bool:
    """Tell whether every subscriber that follows ``route`` has got it."""
    locations = route.locations(channel)
    if route.assignment.mode is Mode.ALL_SUBSCRIBERS:
        return any(location in reached for location in locations)
    return all(location in reached for location in locations)


followed_routes = st.lists(routes, min_size=1, max_size=4)


@given(st.data(), followed_routes)
def test_after_forwarding_every_followed_route_is_reached(data: st.DataObject, followed: list[Route]) -> None:
    everywhere = sorted({place for route in followed for place in route.locations(C)}, key=repr)
    reached = data.draw(st.sets(st.sampled_from(everywhere)))
    targets = missing(C, followed, reached, 7)
    assert all(is_reached(C, route, reached | set(targets)) for route in followed)
    assert len(set(targets)) == len(targets)
    assert not reached & set(targets)
    assert set(targets) <= set(everywhere)
    assert missing(C, followed, reached | set(targets), 7) == []


@given(routes)
def test_no_target_is_superfluous(route: Route) -> None:
    targets = missing(C, [route], set(), 7)
    for left_out in targets:
        assert not is_reached(C, route, set(targets) - {left_out})


@given(st.data(), followed_routes, naturals)
def test_a_message_is_forwarded_to_where_its_publisher_sends_or_will_send(
    data: st.DataObject, followed: list[Route], publisher: int
) -> None:
    """A copy that took another replica than the publisher's next message could be overtaken by it for no reason."""
    everywhere = sorted({place for route in followed for place in route.locations(C)}, key=repr)
    reached = data.draw(st.sets(st.sampled_from(everywhere)))
    used = {place for route in followed for place in route.published_at(publisher, C)}
    assert set(missing(C, followed, reached, publisher)) <= used


@given(routes, assignments(), st.integers(0, EPOCH_MAX))
def test_replicas_of_different_epochs_never_share_a_location(route: Route, other: Assignment, epoch: int) -> None:
    """So that NUMSUB counts the followers of one epoch (case 5)."""
    if Mode.SINGLE in (route.assignment.mode, other.mode) or route.epoch == epoch:
        return
    assert not set(route.locations(C)) & set(Route(epoch, other).locations(C))


# Where one client publishes and listens.

REPLICAS = ("s3", "s1", "s2")


@given(assignments(), st.integers(0, EPOCH_MAX), naturals)
def test_every_publisher_and_subscriber_share_a_location(assignment: Assignment, epoch: int, publisher: int) -> None:
    """Whatever the mode, and exactly one: more would be duplicates, fewer a loss (Dynamoth, section II-B)."""
    route = Route(epoch, assignment)
    for subscriber in range(8):
        assert len(set(route.published_at(publisher, C)) & set(route.listened_at(subscriber, C))) == 1


@pytest.mark.parametrize("mode", [Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS])
def test_one_side_uses_every_replica_and_the_other_one_of_them(mode: Mode) -> None:
    route = Route(5, Assignment(mode, REPLICAS))
    everywhere = tuple(Location(server, replica_channel(C, 5)) for server in REPLICAS)
    for client in range(10):
        one, all_ = route.published_at(client, C), route.listened_at(client, C)
        if mode is Mode.ALL_PUBLISHERS:
            one, all_ = all_, one
        assert len(one) == 1
        assert one[0] in everywhere
        assert all_ == everywhere


@pytest.mark.parametrize("mode", [Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_clients_are_spread_over_the_replicas(mode: Mode, replicas: int) -> None:
    servers = SERVER_IDS[:replicas]
    route = Route(5, Assignment(mode, servers))
    choose = route.published_at if mode is Mode.ALL_SUBSCRIBERS else route.listened_at
    shares = [choose(client, C)[0].server for client in range(100 * replicas)]
    assert all(90 <= shares.count(server) <= 110 for server in servers)


@pytest.mark.parametrize("mode", [Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS])
def test_a_choice_lasts_as_long_as_its_epoch_and_no_longer(mode: Mode) -> None:
    """It is the same for all who know the route: a forwarder sends where the publisher itself does (G3)."""

    def choice(client: int, epoch: int) -> str:
        route = Route(epoch, Assignment(mode, REPLICAS))
        [place] = route.published_at(client, C) if mode is Mode.ALL_SUBSCRIBERS else route.listened_at(client, C)
        return place.server

    for client in range(20):
        assert len({choice(client, 5) for _ in range(3)}) == 1
        assert {choice(client, epoch) for epoch in range(20)} == set(REPLICAS)


# Modes of newer software.


def of_mode(mode: Any, epoch: Any = 3) -> list[Any]:
    return [epoch, mode, ["s1", "s2"]]


@pytest.mark.parametrize("mode", [max(Mode) + 1, 2**63])
def test_a_mode_of_newer_software_is_not_taken_for_nonsense(mode: int) -> None:
    for read in (
        lambda: route_from_wire(of_mode(mode)),
        lambda: entry_from_wire([Phase.SETTLED, of_mode(mode), []]),
        lambda: entry_from_wire([Phase.ACTIVE, route_to_wire(Route(4, single("s1"))), [of_mode(mode)]]),
        lambda: unpack_control(msgpack.packb([1, C, of_mode(mode)])),
    ):
        with pytest.raises(UnknownMode, match=f"mode {mode} .* upgrade this software"):
            read()


def test_whoever_drops_malformed_messages_drops_those_too() -> None:
    assert issubclass(UnknownMode, MalformedMessage)


@pytest.mark.parametrize("mode", [0, -1, "2", None, 2.5, [2]])
def test_a_mode_that_no_software_writes_is_malformed(mode: Any) -> None:
    with pytest.raises(MalformedMessage) as raised:
        route_from_wire(of_mode(mode))
    assert not isinstance(raised.value, UnknownMode)


# Slots.


def test_channels_inherit_the_entry_of_their_slot_until_they_have_one() -> None:
    slot = slot_of(C)
    moving = PLAN_0.begin({slot: single(FAR)})
    assert moving.entry(C) is moving.entry(slot) and moving.entry(C).phase is Phase.PREPARED
    assert moving.slot_above(C) == slot and moving.slot_above(slot) is None
    with pytest.raises(PlanError, match="in transition"):
        moving.begin({C: single(FAR)})
    moved = moving.activate([slot]).settle([slot])
    assert moved.entry(C).route == Route(1, single(FAR))
    own = moved.begin({C: single(HOME)})
    assert own.entry(C).previous == (Route(1, single(FAR)),), "it begins where its slot is"
    assert own.slot_above(C) is None and own.begin({slot: single(HOME)}).entry(C) is own.entry(C)


def test_where_a_home_has_left_any_server_is_asked() -> None:
    """Each stores where the slot is; a client has read only the header, which does not list the home any more."""
    left = replace(PLAN_0, servers={id_: server for id_, server in PLAN_0.servers.items() if id_ != HOME})
    assert left.home_route(C).assignment.servers[0] in left.servers
    assert left.ring_mark == PLAN_0.ring_mark


def test_each_slot_belongs_to_one_server() -> None:
    slots = PLAN_0.ring.slots
    assert sum(map(len, slots.values())) == SLOTS
    assert all(PLAN_0.ring.home(slot) == server for server, names in slots.items() for slot in names)
    assert PLAN_0.ring.home(C) == PLAN_0.ring.home(slot_of(C))
