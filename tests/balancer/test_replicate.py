"""Algorithm 1: which channels are spread over several servers, over which; and nothing flaps (case 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dynamoth.plan.plan import Assignment, Mode, Route, single
from dynamoth_balancer.decide.cluster import (
    ChannelFigures,
    ChannelRate,
    Cluster,
    Decision,
    Finding,
    Move,
    ServerLoad,
    decide,
)
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.replicate import Judgement, Replicate, wanted_change
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.planning import Push, replicated
from tests.balancer.traffic import CAPACITY, Traffic, report

CHANNEL = b"hot"
SUBS, PUBS = Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS

OPTIONS = BalancerOptions(
    all_subscribers_ratio_min=100.0,
    all_publishers_ratio_min=10.0,
    replicate_publications_per_s_min=1000.0,
    replicate_subscribers_min=100,
    replicate_load_ratio_min=0.5,
    replicate_keep_ratio=0.6,
)


def figures(
    publications_per_s: float,
    subscribers: float,
    load_ratio: float,
    assignment: Assignment | None = None,
    publishers: int = 100,
) -> ChannelFigures:
    """Return figures of a channel whose load is evenly spread over its servers."""
    assignment = assignment or single("s1")
    share = load_ratio * CAPACITY / len(assignment.servers)
    loads = dict.fromkeys(assignment.servers, share)
    return ChannelFigures(CHANNEL, assignment, publications_per_s, publishers, subscribers, loads)


def decided(
    given_figures: ChannelFigures | Sequence[ChannelFigures],
    others: Mapping[str, float],
    options: BalancerOptions = OPTIONS,
    *,
    capacities: Mapping[str, float] | None = None,
    draining: Sequence[str] = (),
) -> Decision:
    """Decide. ``others`` is the load ratio of each server without the channels that the figures are of."""
    channels = [given_figures] if isinstance(given_figures, ChannelFigures) else given_figures
    servers: dict[str, ServerLoad] = {}
    for name, ratio in others.items():
        capacity = (capacities or {}).get(name, CAPACITY)
        own = sum(each.outgoing_bytes_per_s.get(name, 0.0) for each in channels)
        servers[name] = ServerLoad(name, ratio * capacity + own, capacity)
    drained: dict[str, Sequence[ChannelRate]] = dict.fromkeys(draining, ())
    cluster = Cluster(servers, lambda server: [], lambda channel, server: True, options, channels, drained)
    return decide((Replicate(),), cluster)


def only_move(decision: Decision) -> Move:
    [move] = decision.moves
    return move


def loaded(*ratios: float) -> dict[str, float]:
    """Return the load ratios of s1, s2 and so on."""
    return {f"s{number}": ratio for number, ratio in enumerate(ratios, 1)}


IDLE = loaded(0.0, 0.0, 0.0, 0.0, 0.0)


# The branches of Algorithm 1.


def test_many_publications_for_few_subscribers_are_spread_over_servers_with_all_subscribers() -> None:
    move = only_move(decided(figures(3000, 10, 0.6), IDLE))
    assert (move.before, move.after) == (single("s1"), replicated(SUBS, 1, 2))
    assert "3000 publications/s to 10 subscribers make load ratio 0.60" in move.reason
    assert move.ratios["s1"] == pytest.approx((0.6, 0.3)) and move.ratios["s2"] == pytest.approx((0.0, 0.3))


LARGE = {"s2": 10 * CAPACITY}
FIVE = replicated(SUBS, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("some", "more", "after"),
    [
        # The branches of Algorithm 1. Where there are many of both, it is all-subscribers (the paper's corner case).
        (figures(10, 3000, 0.6), {}, replicated(PUBS, 1, 2)),
        (figures(2000, 500, 0.6), {}, replicated(SUBS, 1, 2)),
        (figures(2000, 50_000, 0.6), {}, replicated(SUBS, 1, 2)),
        (figures(3000, 10, 0.5), {}, None),  # the load is not above its threshold
        (figures(1000, 5, 0.6), {}, None),  # the publications are not
        (figures(3000, 30, 0.6), {}, None),  # the publications for each subscriber are not
        (figures(3000, 10, 0.7, publishers=1), {}, None),  # one publisher is one stream
        (figures(9, 100, 0.6), {}, None),  # the subscribers are not
        (figures(30, 300, 0.6), {}, None),  # the subscribers for each publication are not
        (figures(0, 5000, 0.0, publishers=0), {}, None),  # nothing is published
        (figures(5000, 0, 0.0), {}, None),  # nobody listens
        # Between the thresholds, where the paper would leave it: one that alone overloads a server is spread.
        (figures(500, 90, 0.8), {}, None),
        (figures(500, 90, 0.9), {}, replicated(SUBS, 1, 2)),
        (figures(90, 500, 0.9), {}, replicated(PUBS, 1, 2)),
        (figures(500, 90, 0.9, publishers=1), {}, replicated(PUBS, 1, 2)),
        (figures(0.5, 1, 0.9), {}, replicated(SUBS, 1, 2)),  # one subscriber
        (figures(5000, 1, 0.9, publishers=1), {}, None),  # nothing to spread
        # A larger server would do, unless it is being drained.
        (figures(3000, 10, 0.9), {"capacities": LARGE}, None),
        (figures(1500, 10, 9.0), {"capacities": {**LARGE, "s3": 10 * CAPACITY}}, replicated(SUBS, 2, 3)),
        (figures(3000, 10, 0.9), {"capacities": LARGE, "draining": ["s2"]}, replicated(SUBS, 1, 3, 4)),
        # From one mode to the other.
        (figures(10, 3000, 0.6, replicated(SUBS, 1, 2)), {}, replicated(PUBS, 1, 2)),
        (figures(3000, 10, 0.6, replicated(PUBS, 1, 2)), {}, replicated(SUBS, 1, 2)),
        (figures(2000, 300, 0.6, replicated(PUBS, 1, 2)), {}, replicated(SUBS, 1, 2)),
        (figures(10, 3000, 0.6, replicated(SUBS, 1, 2, 3, 4)), {"others": {**IDLE, "s1": 0.3}}, replicated(PUBS, 2, 3)),
        (figures(2000, 300, 0.9, replicated(PUBS, 1, 2), publishers=1), {}, None),  # one publisher cannot be spread
        # The least loaded servers are taken, without the channel's own load; the busiest are freed first.
        (figures(3000, 10, 0.55), {"others": loaded(0.0, 0.2, 0.1, 0.3)}, replicated(SUBS, 1, 3)),
        (figures(3000, 10, 0.7, FIVE), {"others": loaded(0.05, 0.4, 0.1, 0.3, 0.2)}, replicated(SUBS, 1, 3, 5, 4)),
        (figures(3000, 10, 0.35, FIVE), {"others": loaded(0.05, 0.4, 0.1, 0.3, 0.2)}, replicated(SUBS, 1, 3)),
        # None is freed that the others have no room for.
        (figures(3000, 10, 0.6, FIVE), {"others": loaded(0.5, 0.5, 0.5, 0.5, 0.5)}, None),
        (figures(3000, 10, 0.6, FIVE), {"others": loaded(0.4, 0.4, 0.4, 0.4, 0.9)}, replicated(SUBS, 1, 2, 3, 4)),
        (figures(700, 10, 0.4, replicated(SUBS, 1, 2)), {}, None),  # within the hysteresis
    ],
)
def test_the_assignment_a_channel_gets(some: ChannelFigures, more: dict[str, Any], after: Assignment | None) -> None:
    arguments: dict[str, Any] = {"others": IDLE, **more}
    decision = decided(some, **arguments)
    assert [move.after for move in decision.moves] == ([] if after is None else [after])


def test_the_replicas_are_as_many_as_the_ratio_asks_for_within_what_the_load_needs() -> None:
    def count(*some: Any, **options: Any) -> int:
        return len(only_move(decided(figures(*some), IDLE, replace(OPTIONS, **options))).after.servers)

    assert count(1010, 10, 0.95) == 2, "1.01 times the threshold"
    assert count(2500, 10, 0.95) == 3, "2.5 times"
    assert count(90_000, 10, 0.95) == 3, "more would carry less than a fourth of a server each"
    assert count(1010, 10, 1.3) == 3, "0.65 is too much for a server"
    assert count(10, 40_000, 2.9) == 5
    assert count(90_000, 10, 0.95, replicate_load_ratio_min=0.0) == 5, "all there are"
    assert count(10, 40_000, 2.9, replicas_max=4) == 4
    assert Judgement(figures(90_000, 10, 2.0, publishers=3), CAPACITY, OPTIONS).replicas(SUBS) == 3


# Which servers.


def test_the_present_server_is_freed_when_others_have_more_room() -> None:
    move = only_move(decided(figures(3000, 10, 0.55), loaded(0.5, 0.2, 0.1, 0.3)))
    assert move.after == replicated(SUBS, 3, 2) and move.ratios["s1"] == pytest.approx((1.05, 0.5))


def test_it_grows_to_the_least_loaded_servers_and_keeps_those_that_it_has() -> None:
    some = figures(3000, 10, 1.3, replicated(SUBS, 1, 2))
    others = {"s1": 0.3, "s2": 0.3, "s3": 0.1, "s4": 0.05, "s5": 0.2}
    move = only_move(decided(some, others))
    assert set(move.after.servers) == {"s1", "s2", "s4"} and move.before == replicated(SUBS, 1, 2)
    changes = {server: load.outgoing_bytes_per_s for server, load in move.loads.items()}
    assert changes == pytest.approx({"s1": -650_000 + 1.3e6 / 3, "s2": -650_000 + 1.3e6 / 3, "s4": 1.3e6 / 3})


def test_a_channel_is_folded_back_to_the_least_loaded_of_its_replicas_that_has_room() -> None:
    some = figures(500, 10, 0.2, replicated(SUBS, 1, 2, 3))
    others = {"s1": 0.3, "s2": 0.2, "s3": 0.5, "s4": 0.0}
    move = only_move(decided(some, others))
    assert move.after == single("s2") and "one server is enough" in move.reason
    assert move.ratios["s2"].after == pytest.approx(0.4) and move.ratios["s3"].after == pytest.approx(0.5)
    assert decided(some, dict.fromkeys(others, 0.45)) == Decision(), "no replica has room"


# When there are too few servers.


def test_fewer_servers_than_wanted_are_used_and_reported() -> None:
    decision = decided(figures(3000, 10, 1.9), {"s1": 0.0, "s2": 0.0, "s3": 0.0})
    assert set(only_move(decision).after.servers) == {"s1", "s2", "s3"}
    assert decision.findings == (
        Finding(
            "s1",
            1.9,
            "channel 'hot' needs 4 servers and has 3, as no more can take part: add servers, or see why their agents"
            " are down",
            CHANNEL,
            "replicate",
        ),
    )


def test_one_server_is_not_enough_to_spread_anything() -> None:
    decision = decided(figures(3000, 10, 0.9), {"s1": 0.0})
    assert not decision.moves
    assert "needs 3 servers and has 1, as no more can take part" in decision.findings[0].reason


def test_servers_without_room_are_not_used() -> None:
    decision = decided(figures(3000, 10, 0.7), {"s1": 0.0, "s2": 0.5, "s3": 0.55})
    assert not decision.moves
    [finding] = decision.findings
    assert "needs 2 servers and has 1, as no other has room: add servers" in finding.reason
    much_better = decided(figures(3000, 10, 1.3), {"s1": 0.0, "s2": 0.3, "s3": 0.3})
    assert set(only_move(much_better).after.servers) == {"s1", "s2", "s3"}, "0.73 is much less than 1.3"


def test_growth_takes_what_has_room() -> None:
    decision = decided(figures(9000, 10, 2.9, replicated(SUBS, 1, 2)), loaded(0.0, 0.0, 0.0, 1.2, 1.2))
    assert set(only_move(decision).after.servers) == {"s1", "s2", "s3"}
    assert "has 3, as no other has room" in decision.findings[0].reason


def test_the_bound_of_replicas_is_reported_and_one_switches_it_off() -> None:
    some = figures(9000, 10, 2.9)
    decision = decided(some, IDLE, replace(OPTIONS, replicas_max=2))
    assert len(only_move(decision).after.servers) == 2
    assert "raise replicas_max" in decision.findings[0].reason
    off = replace(OPTIONS, replicas_max=1)
    assert decided(some, IDLE, off) == Decision()
    assert decided(figures(1, 1, 0.0, replicated(SUBS, 1, 2)), IDLE, off) == Decision(), "nor is one folded back"


# Other goals.


def _scattered(cluster: Cluster) -> list[Move]:
    """Return moves of every channel to one server, another one."""
    moves: list[Move] = []
    for each in cluster.figures:
        loads = {name: -each.load_at(name) for name in each.assignment.servers}
        target = next(name for name in cluster.servers if name not in loads)
        loads[target] = each.total
        moves.append(cluster.change(each.channel, each.assignment, single(target), loads, "test"))
    return moves


def test_no_later_goal_moves_replicated_channels() -> None:
    some = figures(1500, 10, 0.9, replicated(SUBS, 1, 2))
    servers = {name: ServerLoad(name, some.outgoing_bytes_per_s.get(name, 0.0), CAPACITY) for name in IDLE}

    def cluster() -> Cluster:
        return Cluster(servers, lambda server: [], lambda channel, server: True, OPTIONS, [some])

    assert not decide((Replicate(), Push(_scattered)), cluster()).moves
    assert decide((Push(_scattered),), cluster()).moves, "the goal itself would"


# Nothing flaps.


def _traffic(publications_log: float, subscribers_log: float, publishers: int, load_ratio: float) -> Traffic:
    publications, subscribers = 10**publications_log, round(10**subscribers_log)
    return Traffic(publications, subscribers, publishers, load_ratio * CAPACITY / (publications * subscribers))


loads = st.builds(_traffic, st.floats(0, 4), st.floats(0, 4), st.integers(1, 60), st.floats(0.1, 3))
modes = st.sampled_from(Mode)


LONG_S = 100.0
"""The interval of reports in which a rate is hardly rounded: 1.67 publications/s at a replica are not 2."""


def _reported(model: ClusterModel, traffic: Traffic, route: Route, servers: Iterable[str], until: float) -> None:
    """Let the agents of all servers report for long enough what they see of a settled channel."""
    for second in range(12):
        for server in servers:
            here = server in route.assignment.servers
            rows = {CHANNEL: traffic.seen_at(server, route)} if here else {}
            model.report(report(server, rows, LONG_S), until - 11 + second)


@given(loads, modes, st.integers(2, 8), st.integers(2, 8))
@example(Traffic(9000, 10, 40, 22.2), Mode.SINGLE, 2, 8)  # as published, 80 subscribers are seen with eight replicas
@example(Traffic(10, 800, 40, 250), Mode.SINGLE, 2, 8)  # ... and 80 publications/s
@example(_traffic(2.4765625, 0.0, 36, 1.0), Mode.ALL_SUBSCRIBERS, 7, 2)  # six replicas by 299 publications/s, then five
@example(_traffic(1.0, 2.0625, 18, 1.0), Mode.ALL_SUBSCRIBERS, 6, 2)  # the threshold is exactly 10 publications/s
def test_under_constant_load_one_decision_is_final_whatever_the_mode(
    traffic: Traffic, mode: Mode, replicas: int, servers: int
) -> None:
    """With figures as each replica would report them: as published, a mode cancels what has led to it."""
    names = [f"s{number}" for number in range(1, max(replicas, servers) + 1)]
    assignment = single("s1") if mode is Mode.SINGLE else Assignment(mode, tuple(names[:replicas]))
    route = Route(1, assignment)
    seen: list[Assignment] = []
    for step in range(1, 4):
        model = ClusterModel(names, averaging_s=10.0)
        _reported(model, traffic, route, names, 100.0)
        [found] = model.figures({CHANNEL: route.assignment})
        cluster = Cluster(
            {name: load for name in names if (load := model.load(name, 100.0)) is not None},
            model.channels,
            lambda channel, server: False,
            OPTIONS,
            [found],
        )
        decision = decide((Replicate(),), cluster)
        if not decision.moves:
            return
        [move] = decision.moves
        seen.append(route.assignment)
        # Reports have whole bytes: a load that is a whole number of servers may turn out to be a little more, or less.
        rounded = move.after.mode is move.before.mode and abs(len(move.after.servers) - len(move.before.servers)) == 1
        assert len(seen) == 1 or rounded, f"on to {move.after} under constant load, after {seen}"
        route = Route(step + 1, move.after)
    raise AssertionError(f"it goes on: {seen}")


varied = st.floats(0.8, 1.25)


@given(
    st.floats(0, 1e5),
    st.floats(0, 1e5),
    st.floats(0, 20),
    st.integers(2, 100),
    modes,
    st.integers(2, 20),
    varied,
    varied,
)
def test_what_was_decided_is_kept_when_figures_vary_a_little(
    publications_per_s: float,
    subscribers: float,
    load_ratio: float,
    publishers: int,
    mode: Mode,
    replicas: int,
    first: float,
    second: float,
) -> None:
    """Figures that vary by a fourth around their mean undo no decision: neither back to the mode, nor to the number."""

    def seen(assignment: Assignment, factor: float) -> ChannelFigures:
        # With as many bytes for each message the load varies as the publications do.
        return figures(publications_per_s * factor, subscribers, load_ratio * factor, assignment, publishers)

    before = single("s0") if mode is Mode.SINGLE else Assignment(mode, tuple(f"s{n}" for n in range(replicas)))
    wanted = wanted_change(seen(before, first), CAPACITY, OPTIONS)
    assume(wanted is not None)
    assert wanted is not None
    after = Assignment(wanted.mode, tuple(f"s{number}" for number in range(wanted.replicas)))
    again = wanted_change(seen(after, second), CAPACITY, OPTIONS)
    assert again is None or (again.mode, again.replicas) != (before.mode, len(before.servers))
