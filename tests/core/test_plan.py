"""The plan: its steps, what it refuses, and who must get a message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.envelope import EPOCH_MAX
from dynamoth.errors import PlanError
from dynamoth.names import replica_channel
from dynamoth.plan import Assignment, Entry, Location, Mode, Phase, Plan, PlanDelta, Route, Server, missing, single
from tests.core.strategies import PLAN_0, assignments, plans, routes

C = b"news"
HOME = PLAN_0.ring.home(C)
AWAY, FAR = [id_ for id_ in PLAN_0.base if id_ != HOME][:2]


def test_plan_0_names_no_channel_and_puts_every_one_at_home() -> None:
    assert PLAN_0.version == 0
    assert not PLAN_0.entries
    assert PLAN_0.entry(C) == Entry(Route(0, single(HOME)), Phase.SETTLED)


def test_a_change_goes_through_three_phases_each_in_a_version_of_its_own() -> None:
    home, away = Route(0, single(HOME)), Route(1, single(AWAY))
    prepared = PLAN_0.begin({C: single(AWAY)})
    assert (prepared.version, prepared.entry(C)) == (1, Entry(away, Phase.PREPARED, (home,)))
    active = prepared.activate([C])
    assert (active.version, active.entry(C)) == (2, Entry(away, Phase.ACTIVE, (home,)))
    settled = active.settle([C])
    assert (settled.version, settled.entry(C)) == (3, Entry(away, Phase.SETTLED))


def test_clients_are_told_the_old_route_until_the_new_one_is_active() -> None:
    prepared = PLAN_0.begin({C: single(AWAY)})
    assert prepared.entry(C).told == Route(0, single(HOME))
    assert prepared.activate([C]).entry(C).told == Route(1, single(AWAY))


def test_a_channel_that_comes_home_keeps_its_entry_so_that_epochs_never_go_back() -> None:
    moved = PLAN_0.begin({C: single(AWAY)}).activate([C]).settle([C])
    back = moved.begin({C: single(HOME)}).activate([C]).settle([C])
    assert back.entries[C] == Entry(Route(4, single(HOME)), Phase.SETTLED)


def test_refuses_a_channel_in_transition() -> None:
    prepared = PLAN_0.begin({C: single(AWAY)})
    for plan in (prepared, prepared.activate([C])):
        with pytest.raises(PlanError, match="in transition"):
            plan.begin({C: single(FAR)})


def test_refuses_a_move_to_where_the_channel_is() -> None:
    with pytest.raises(PlanError, match="there already"):
        PLAN_0.begin({C: single(HOME)})


def test_refuses_an_unknown_server() -> None:
    with pytest.raises(PlanError, match="'s9', which the plan does not list"):
        PLAN_0.begin({C: single("s9")})


def test_refuses_an_unknown_server_in_a_previous_route() -> None:
    entry = Entry(Route(1, single(AWAY)), Phase.PREPARED, (Route(0, single("s9")),))
    with pytest.raises(PlanError, match="'s9'"):
        PLAN_0.with_entries({C: entry})


def test_refuses_to_activate_twice_or_what_has_settled() -> None:
    active = PLAN_0.begin({C: single(AWAY)}).activate([C])
    with pytest.raises(PlanError):
        active.activate([C])
    with pytest.raises(PlanError):
        active.settle([C]).activate([C])


def test_refuses_to_settle_twice() -> None:
    settled = PLAN_0.begin({C: single(AWAY)}).activate([C]).settle([C])
    with pytest.raises(PlanError):
        settled.settle([C])


def test_refuses_to_settle_what_clients_were_never_told() -> None:
    """Subscribers are at the old location: a dispatcher that takes this stops forwarding to them."""
    with pytest.raises(PlanError):
        PLAN_0.begin({C: single(AWAY)}).settle([C])


def test_refuses_an_entry_that_is_not_newer() -> None:
    moved = PLAN_0.begin({C: single(AWAY)}).activate([C]).settle([C])
    for stale in (moved.entries[C], Entry(Route(0, single(FAR)), Phase.SETTLED)):
        with pytest.raises(PlanError, match="not newer"):
            moved.with_entries({C: stale})


def test_refuses_contradictions_in_an_entry() -> None:
    route = Route(1, single("s1"))
    with pytest.raises(PlanError, match="previous routes"):
        Entry(route, Phase.SETTLED, (route,))
    with pytest.raises(PlanError, match="previous routes"):
        Entry(route, Phase.ACTIVE)


@pytest.mark.parametrize(
    ("mode", "servers", "cause"),
    [
        (Mode.SINGLE, (), "at least one"),
        (Mode.SINGLE, ("s1", "s2"), "takes one server"),
        (Mode.ALL_PUBLISHERS, ("s1", "s1"), "twice"),
    ],
)
def test_refuses_assignments_that_mean_nothing(mode: Mode, servers: tuple[str, ...], cause: str) -> None:
    with pytest.raises(PlanError, match=cause):
        Assignment(mode, servers)


def test_refuses_a_ring_over_servers_that_are_not_listed() -> None:
    with pytest.raises(PlanError, match="s2"):
        Plan(0, {"s1": Server("s1", "redis://s1")}, ("s1", "s2"))


def test_refuses_a_ring_over_no_server() -> None:
    """Whoever asks such a plan for the home of a channel gets a ValueError that nobody expects."""
    with pytest.raises(PlanError):
        Plan(0, {}, ())


def test_refuses_a_version_that_no_envelope_can_carry() -> None:
    Plan(EPOCH_MAX, PLAN_0.servers, PLAN_0.base)
    for version in (-1, EPOCH_MAX + 1):
        with pytest.raises(PlanError, match="32 bits"):
            Plan(version, PLAN_0.servers, PLAN_0.base)


@given(st.data())
def test_a_diff_applied_gives_the_newer_plan(data: st.DataObject) -> None:
    older = data.draw(plans())
    newer = data.draw(plans(older))
    delta = older.diff(newer)
    assert older.apply(delta) == newer
    assert all(older.entries.get(channel) != entry for channel, entry in delta.entries.items())


def test_refuses_a_delta_for_another_version() -> None:
    with pytest.raises(PlanError, match="from version 3"):
        PLAN_0.apply(PlanDelta(3, 4, {}))


def test_versions_of_a_plan_share_one_ring() -> None:
    ring = PLAN_0.ring
    assert PLAN_0.begin({C: single(AWAY)}).ring is ring


@given(plans())
def test_an_epoch_is_never_newer_than_the_plan(plan: Plan) -> None:
    for entry in plan.entries.values():
        epochs = [route.epoch for route in (*entry.previous, entry.route)]
        assert epochs == sorted(set(epochs))
        assert epochs[-1] <= plan.version


# Who must get a message.


def is_reached(channel: bytes, route: Route, reached: set[Location]) -> bool:
    """DESIGN, "who must get a message": whether every subscriber that follows ``route`` has got it."""
    locations = route.locations(channel)
    if route.assignment.mode is Mode.ALL_SUBSCRIBERS:
        return any(location in reached for location in locations)
    return all(location in reached for location in locations)


followed_routes = st.lists(routes, min_size=1, max_size=4)


@given(st.data(), followed_routes)
def test_after_forwarding_every_followed_route_is_reached(data: st.DataObject, followed: list[Route]) -> None:
    everywhere = sorted({place for route in followed for place in route.locations(C)}, key=repr)
    reached = data.draw(st.sets(st.sampled_from(everywhere)))
    targets = missing(C, followed, reached)
    assert all(is_reached(C, route, reached | set(targets)) for route in followed)
    assert len(set(targets)) == len(targets)
    assert not reached & set(targets)
    assert set(targets) <= set(everywhere)


@given(followed_routes)
def test_nothing_is_missing_once_it_was_forwarded(followed: list[Route]) -> None:
    targets = missing(C, followed, set())
    assert missing(C, followed, set(targets)) == []


@given(routes)
def test_no_target_is_superfluous(route: Route) -> None:
    targets = missing(C, [route], set())
    for left_out in targets:
        assert not is_reached(C, route, set(targets) - {left_out})


def test_single_is_missing_at_its_server() -> None:
    routes = [Route(5, single("s2")), Route(0, single("s1"))]
    assert missing(C, routes, {Location("s1", C)}) == [Location("s2", C)]
    assert missing(C, routes, {Location("s2", C)}) == [Location("s1", C)]
    assert missing(C, routes, {Location("s3", C)}) == [Location("s2", C), Location("s1", C)]


def test_all_subscribers_has_it_once_one_server_has_it() -> None:
    physical = replica_channel(C, 5)
    replicated = Route(5, Assignment(Mode.ALL_SUBSCRIBERS, ("s1", "s2")))
    assert missing(C, [replicated], {Location("s2", physical)}) == []
    assert missing(C, [replicated], {Location("s1", C)}) == [Location("s1", physical)]


def test_all_publishers_lacks_it_wherever_it_is_not() -> None:
    """Case 6 of the published protocol's failures: "some current server has it" is not enough."""
    physical = replica_channel(C, 5)
    replicated = Route(5, Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2", "s3")))
    assert missing(C, [replicated], {Location("s2", physical)}) == [Location("s1", physical), Location("s3", physical)]


@given(routes, assignments(), st.integers(0, EPOCH_MAX))
def test_replicas_of_different_epochs_never_share_a_location(route: Route, other: Assignment, epoch: int) -> None:
    """So that NUMSUB counts the followers of one epoch (case 5)."""
    if Mode.SINGLE in (route.assignment.mode, other.mode) or route.epoch == epoch:
        return
    assert not set(route.locations(C)) & set(Route(epoch, other).locations(C))
