"""Decisions: what is moved away from overloaded servers, and what never happens (cases 19 and 20)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.plan.plan import Mode, single
from dynamoth_balancer.decide.cluster import Decision
from dynamoth_balancer.decide.relieve import Relieve
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.planning import World, fill
from tests.balancer.traffic import CAPACITY


def world(
    servers: Mapping[str, Mapping[str, float]], options: BalancerOptions | None = None, rest: float = 0.0
) -> World:
    """Make a world out of load ratios by channel by server; ``rest`` is the load ratio of s1 that is no channel's."""
    places = {channel.encode(): single(server) for server, channels in servers.items() for channel in channels}
    loads = {c.encode(): ratio * CAPACITY for channels in servers.values() for c, ratio in channels.items()}
    capacities: dict[str, float] = dict.fromkeys(servers, CAPACITY)
    return World(capacities, places, loads, {"s1": rest * CAPACITY}, options=options or BalancerOptions())


def relieved(cluster: World) -> Decision:
    return cluster.decide(Relieve())


def moved(decision: Decision) -> list[tuple[bytes, str, str]]:
    assert all(move.before.mode is move.after.mode is Mode.SINGLE for move in decision.moves)
    return [(move.channel, move.source, move.target) for move in decision.moves]


def test_nothing_is_done_below_the_threshold() -> None:
    assert relieved(world({"s1": {"a": 0.5, "b": 0.3}, "s2": {}})) == Decision()


def test_the_busiest_channels_go_to_the_server_with_most_room_until_it_is_safe() -> None:
    cluster = world({"s1": {"a": 0.3, "b": 0.25, "c": 0.2, "d": 0.2}, "s2": {"e": 0.2}, "s3": {"f": 0.1}})
    decision = relieved(cluster)
    assert moved(decision) == [(b"a", "s1", "s3"), (b"b", "s1", "s2")]
    first = decision.moves[0]
    assert first.ratios["s1"] == pytest.approx((0.95, 0.65)) and first.ratios["s3"] == pytest.approx((0.1, 0.4))
    assert "0.95" in first.reason and not decision.findings


def test_algorithm_2_ends_when_one_channel_alone_exceeds_the_safe_ratio() -> None:
    """Number 20: published, the channel goes to and fro for ever."""
    cluster = world({"s1": {"huge": 0.9}, "s2": {}})
    decision = relieved(cluster)
    assert not decision.moves
    [finding] = decision.findings
    assert "one server is too small for it" in finding.reason and finding.server == "s1"


def test_moves_that_gain_almost_nothing_are_not_made() -> None:
    """A demo showed ``0.88 -> 0.87``: one small channel could leave, and the large ones could not."""
    servers = {"s1": {"a": 0.43, "b": 0.43, "c": 0.01, "d": 0.01}, "s2": {"e": 0.5}, "s3": {"f": 0.1, "g": 0.45}}
    decision = relieved(world(servers))
    assert not decision.moves
    [finding] = decision.findings
    assert finding.server == "s1" and finding.load_ratio == pytest.approx(0.88)
    assert finding.reason == (
        "what could leave would relieve it by only 0.020, not worth the moves; its channels rest, are in transition, or"
        " would overload any other server: add servers"
    )


def test_moves_that_are_given_up_leave_the_cluster_as_it_was() -> None:
    servers = {"s1": {"a": 0.43, "b": 0.43, "c": 0.02}, "s2": {"d": 0.85, "e": 0.01, "f": 0.02}, "s3": {"g": 0.3}}
    options = BalancerOptions(moves_per_server_max=3, load_ratio_safe=0.4)
    cluster = world(servers, options).cluster()
    assert Relieve().propose(cluster) == [] and not cluster.moves
    ratios = {id_: server.load_ratio for id_, server in cluster.servers.items()}
    assert ratios == pytest.approx({"s1": 0.88, "s2": 0.88, "s3": 0.3})
    servers_of = cluster.servers
    for source, channel in (("s1", b"c"), ("s2", b"e"), ("s2", b"f")):
        load = next(rate for rate in cluster.channels(source) if rate.channel == channel)
        assert cluster.take(cluster.move(load, servers_of[source], servers_of["s3"], "as many as one plan may have"))


def test_small_gains_go_on_when_only_the_bounds_of_a_plan_end_them() -> None:
    options = BalancerOptions(moves_per_server_max=1)
    channels = {f"c{number}": 0.03 for number in range(30)}
    assert len(relieved(world({"s1": channels, "s2": {}}, options)).moves) == 1


@pytest.mark.parametrize(
    ("cluster", "moves"),
    [
        # A huge channel stays, and the others leave.
        (world({"s1": {"huge": 0.75, "b": 0.1, "c": 0.1}, "s2": {"e": 0.1}}), [b"b", b"c"]),
        # A server may be filled beyond the accepted ratio when that is much better: 0.70 is not, over 0.85.
        (world({"s1": {"a": 0.7, "b": 0.7}, "s2": {}}), [b"a"]),
        (world({"s1": {"a": 0.7, "b": 0.15}, "s2": {}}), [b"b"]),
        (world({"s1": {f"c{n}": 0.0005 for n in range(100)}, "s2": {}}, rest=0.9), []),  # dust
    ],
)
def test_what_is_moved_to_the_other_server(cluster: World, moves: list[bytes]) -> None:
    assert moved(relieved(cluster)) == [(channel, "s1", "s2") for channel in moves]


def test_where_all_are_overloaded_the_worst_is_still_relieved() -> None:
    cluster = world({"s1": {f"a{n}": 0.1 for n in range(15)}, "s2": {f"b{n}": 0.1 for n in range(9)}})
    decision = relieved(cluster)
    assert {move.source for move in decision.moves} == {"s1"}
    cluster.carry_out(decision)
    assert max(cluster.ratios().values()) <= 1.31
    assert {finding.server for finding in decision.findings} == {"s1", "s2"}


def test_bounds_of_a_plan_and_of_a_server_hold_and_are_reported() -> None:
    channels = {f"c{n}": 0.01 for n in range(100)}
    for options in (BalancerOptions(moves_per_plan_max=5), BalancerOptions(moves_per_server_max=5)):
        decision = relieved(world({"s1": channels, "s2": {}, "s3": {}}, options))
        assert len(decision.moves) == 5 and "the next goes on" in decision.findings[0].reason


def test_the_most_loaded_server_comes_first() -> None:
    servers = {"s1": {f"a{n}": 0.09 for n in range(10)}, "s2": {f"b{n}": 0.1 for n in range(10)}, "s3": {}}
    cluster = world(servers, BalancerOptions(moves_per_plan_max=1))
    assert moved(relieved(cluster)) == [(b"b0", "s2", "s3")]


def test_only_one_server_and_load_that_is_no_channels_are_reported() -> None:
    [finding] = relieved(world({"s1": {"a": 0.5, "b": 0.5}})).findings
    assert "no other server" in finding.reason
    [finding] = relieved(world({"s1": {}, "s2": {}}, rest=0.9)).findings
    assert finding.reason == "its load is not that of channels"


def test_capacities_differ() -> None:
    cluster = world({"small": {"a": 0.45, "b": 0.45}, "s2": {"c": 0.1}, "large": {"d": 0.5}})
    cluster.capacities["large"] = 10 * CAPACITY
    assert moved(relieved(cluster)) == [(b"a", "small", "large")], "it has most room in bytes"


def test_a_later_goal_cannot_undo_what_an_earlier_one_needs() -> None:
    cluster = world({"s1": {"a": 0.5, "b": 0.4}, "s2": {"c": 0.05, "d": 0.1, "e": 0.08}})
    decision = cluster.decide(Relieve(), fill("s1"))
    assert moved(decision) == [(b"b", "s1", "s2"), (b"c", "s2", "s1")], "neither b again, nor what fits no more"


# What must be true of any cluster.


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(1, 6))
    capacities = {
        f"s{n}": float(draw(st.sampled_from([CAPACITY, CAPACITY, CAPACITY / 2, 10 * CAPACITY]))) for n in range(count)
    }
    size = draw(st.integers(0, 40))
    ratios = st.floats(0.0, 1.5) | st.floats(0.0, 0.1)
    channels = [b"c%d" % n for n in range(size)]
    places = {c: single(draw(st.sampled_from(sorted(capacities)))) for c in channels}
    loads = {c: draw(ratios) * capacities[places[c].servers[0]] for c in channels}
    fixed = {c for c in channels if draw(st.integers(0, 9)) == 0}
    in_a_plan, per_server = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    options = BalancerOptions(moves_per_plan_max=in_a_plan, moves_per_server_max=per_server)
    rest = {server: draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])) * capacity for server, capacity in capacities.items()}
    return World(capacities, places, loads, rest, fixed, options)


def _check(cluster: World, decision: Decision) -> None:
    options = cluster.options
    before = cluster.ratios()
    sources = [move.source for move in decision.moves]
    targets = [move.target for move in decision.moves]
    assert len(decision.moves) <= options.moves_per_plan_max
    assert all(sources.count(server) <= options.moves_per_server_max for server in sources)
    assert all(targets.count(server) <= options.moves_per_server_max for server in targets)
    assert len({move.channel for move in decision.moves}) == len(decision.moves), "a channel is moved once"
    assert not {move.channel for move in decision.moves} & cluster.fixed
    assert all(before[source] > options.load_ratio_high for source in sources)
    for move in decision.moves:
        cluster.places[move.channel] = move.after
        source, target = move.ratios[move.source], move.ratios[move.target]
        assert max(source.after, target.after) < max(source.before, target.before)
        assert target.after <= options.accept_ratio or target.after <= source.before - 0.2 + 1e-9
    after = cluster.ratios()
    assert max(after.values()) <= max(before.values()) + 1e-9
    for move in decision.moves[-1:]:
        estimated = move.ratios[move.source].after
        assert after[move.source] == pytest.approx(estimated, abs=1e-6), "what was estimated is what comes"


@given(worlds())
def test_any_plan_keeps_its_bounds_and_makes_nothing_worse(cluster: World) -> None:
    _check(cluster, relieved(cluster))


@given(worlds())
def test_under_constant_load_it_comes_to_rest_without_ping_pong(cluster: World) -> None:
    """The sorted load ratios get smaller with each plan, so no state comes back; and there is an end."""
    seen: list[list[float]] = []
    for _ in range(400):
        decision = relieved(cluster)
        if not decision.moves:
            return
        state = sorted(cluster.ratios().values(), reverse=True)
        assert not seen or state < seen[-1]
        seen.append(state)
        _check(cluster, decision)
    raise AssertionError("400 plans under constant load")
