"""Servers that are being drained: what leaves them, what is refused, and what nobody puts there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import ConfigError
from dynamoth.plan.plan import Assignment, Mode, Phase, Plan, Server, single
from dynamoth.plan.slots import SLOTS, slot_name, slot_of
from dynamoth.protocol.reports import pack_report
from dynamoth_balancer.admin.health import Severity
from dynamoth_balancer.decide.cluster import Decision
from dynamoth_balancer.decide.drain import Drain, DrainSlots
from dynamoth_balancer.decide.relieve import Relieve
from dynamoth_balancer.decide.replicate import Replicate
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.process.metrics import make_registry
from tests.balancer.cluster import SimCluster, started
from tests.balancer.planning import World, fill, replicated
from tests.balancer.traffic import CAPACITY

SUBS, PUBS = Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS
HOT = frozenset({b"hot"})


# The goal.


def world(
    places: Mapping[str, tuple[Assignment, float]],
    servers: int = 3,
    draining: Sequence[str] = ("s1",),
    rest: Mapping[str, float] | None = None,
    **others: Any,
) -> World:
    """Make a world of alike servers, out of assignment and load ratio by channel, and other load ratios by server."""
    return World(
        {f"s{number}": CAPACITY for number in range(1, servers + 1)},
        {channel.encode(): place for channel, (place, _) in places.items()},
        {channel.encode(): ratio * CAPACITY for channel, (_, ratio) in places.items()},
        {server: ratio * CAPACITY for server, ratio in (rest or {}).items()},
        draining=frozenset(draining),
        **others,
    )


def planned(cluster: World) -> Decision:
    return cluster.decide(Replicate(), Relieve(), Drain(), DrainSlots())


def after(decision: Decision) -> dict[bytes, Assignment]:
    return {move.channel: move.after for move in decision.moves}


def test_channels_leave_the_busiest_first_for_the_servers_with_most_room_idle_ones_too() -> None:
    s1, s2 = single("s1"), single("s2")
    decision = planned(world({"a": (s1, 0.3), "b": (s1, 0.2), "idle": (s1, 0.0), "c": (s2, 0.1)}))
    assert [(move.channel, move.after) for move in decision.moves] == [
        (b"a", single("s3")),
        (b"b", single("s2")),
        (b"idle", single("s2")),
    ]
    assert not decision.findings
    assert {move.reason for move in decision.moves} == {"s1 is being drained"}
    assert decision.moves[0].ratios["s1"] == pytest.approx((0.5, 0.2))


RESTING = "it is not drained yet: its channels rest, are in transition, or would overload"
DRAIN_S1 = "or end the draining of s1"
NO_OTHER = (
    "it is not drained yet: there is no other server that could take channels: add servers, or see why their agents are"
    " down, or end the draining of s1, s2"
)


@pytest.mark.parametrize(
    ("cluster", "changes", "finding"),
    [
        (world({"a": (single("s1"), 0.3)}, draining=()), {}, None),
        # A channel that fits nowhere stays, and smaller ones leave.
        (
            world({"large": (single("s1"), 0.5), "small": (single("s1"), 0.1)}, rest={"s2": 0.3, "s3": 0.4}),
            {b"small": single("s2")},
            RESTING,
        ),
        (world({"huge": (single("s1"), 0.75)}), {}, "channel 'huge' alone makes load ratio 0.75 here"),
        (world({"a": (single("s1"), 0.3)}, fixed={b"a"}), {}, "its channels rest"),
        # A server that is down is shown while something is there.
        (
            world({"a": (single("s1"), 0.3)}, down=frozenset({"s1"})),
            {},
            "cannot take part in changes: see whether the server and its agent are up",
        ),
        (world({}, down=frozenset({"s1"})), {}, None),
        # A replica is replaced by the least loaded server with room.
        (
            world({"hot": (replicated(SUBS, 1, 2), 0.7)}, 4, rest={"s3": 0.3, "s4": 0.2}, hot=HOT),
            {b"hot": replicated(SUBS, 2, 4)},
            None,
        ),
        # Of two replicas the other one is left, if it has room.
        (world({"hot": (replicated(SUBS, 1, 2), 0.58)}, 2, hot=HOT), {b"hot": single("s2")}, None),
        (world({"hot": (replicated(SUBS, 1, 2), 0.9)}, 2, hot=HOT), {}, RESTING),
        # All are replaced when all their servers are being drained.
        (
            world({"hot": (replicated(SUBS, 1, 2), 0.9)}, 4, ("s1", "s2"), hot=HOT),
            {b"hot": replicated(SUBS, 3, 4)},
            "needs 3 servers and has 2, as no more can take part: add servers",
        ),
        (world({"hot": (replicated(SUBS, 1, 2), 0.5)}, 3, ("s1", "s2"), hot=HOT), {b"hot": single("s3")}, None),
        # Nothing leaves without another server.
        (world({"a": (replicated(SUBS, 1, 2), 0.4)}, 2, ("s1", "s2")), {}, NO_OTHER),
        (world({"a": (single("s1"), 0.3)}, 3, ("s1", "s2"), down=frozenset({"s3"})), {}, NO_OTHER),
        # Replicas leave also where the balancer does not spread by itself.
        (
            world({"hot": (replicated(SUBS, 1, 2), 0.4)}, options=BalancerOptions(replicas_max=1)),
            {b"hot": replicated(SUBS, 2, 3)},
            None,
        ),
        # An overloaded server is not relieved to one that is being drained, and no channel is spread to it.
        (world({f"c{n}": (single("s2"), 0.3) for n in range(3)}, rest={"s3": 0.2}), {b"c0": single("s3")}, None),
        (
            world({f"c{n}": (single("s2"), 0.3) for n in range(3)}, 2),
            {},
            f"add servers, or see why their agents are down, {DRAIN_S1}",
        ),
        (world({"hot": (single("s1"), 0.7)}, 4, hot=HOT), {b"hot": replicated(SUBS, 2, 3)}, None),
        (world({"hot": (replicated(SUBS, 1, 2), 1.3)}, 4, hot=HOT), {b"hot": replicated(SUBS, 2, 3, 4)}, None),
        (world({"hot": (single("s2"), 0.9)}, 2, hot=HOT), {}, DRAIN_S1),
    ],
)
def test_the_changes_of_one_plan(cluster: World, changes: dict[bytes, Assignment], finding: str | None) -> None:
    decision = planned(cluster)
    assert after(decision) == changes
    if finding is None:
        assert decision.findings == ()
    else:
        assert any(finding in each.reason for each in decision.findings)


@pytest.mark.parametrize("full", [{"s4": 0.5}, {"s4": 0.9}, {"s4": 1.0}])
def test_without_another_server_with_room_there_are_fewer_replicas(full: dict[str, float]) -> None:
    cluster = world({"hot": (replicated(PUBS, 1, 2, 3), 0.9)}, 4, rest=full)
    assert [move.after for move in Drain().propose(cluster.cluster())] == [replicated(PUBS, 2, 3)]


def test_bounds_of_a_plan_and_of_a_server_hold_and_are_reported() -> None:
    channels = {f"c{number}": (single("s1"), 0.001) for number in range(30)}
    for options in (BalancerOptions(moves_per_plan_max=5), BalancerOptions(moves_per_server_max=5)):
        decision = planned(world(channels, options=options))
        assert len(decision.moves) == 5 and "the next goes on" in decision.findings[0].reason
        assert decision.findings[0].load_ratio == pytest.approx(0.025), "of what stays"
    two = {**channels, **{f"d{number}": (single("s2"), 0.001) for number in range(30)}}
    one_target = world(two, draining=("s1", "s2"), options=BalancerOptions(moves_per_server_max=5))
    decision = planned(one_target)
    assert len(decision.moves) == 5 and "the next goes on" in decision.findings[1].reason, "s3 has taken five"


# The other goals, beside a server that is being drained.


def test_an_overloaded_server_is_emptied_in_the_same_plan() -> None:
    channels = {f"c{number}": (single("s1"), 0.3) for number in range(3)}
    decision = planned(world(channels, 4, draining=("s1",)))
    assert {move.channel for move in decision.moves} == {b"c0", b"c1", b"c2"}
    assert "above 0.80" in decision.moves[0].reason and decision.moves[-1].reason == "s1 is being drained"


def test_a_channel_is_folded_back_and_shrunk_to_what_is_kept() -> None:
    cold = world({"cold": (replicated(SUBS, 1, 2, 3), 0.2)}, rest={"s2": 0.3, "s3": 0.1})
    assert after(planned(cold)) == {b"cold": single("s3")}
    some = world({"hot": (replicated(SUBS, 1, 2, 3, 4, 5), 0.7)}, 5, draining=("s2",), hot=frozenset({b"hot"}))
    [move] = planned(some).moves
    assert "s2" not in move.after.servers and "publications/s" in move.reason


def test_what_no_replica_can_keep_is_replaced_first() -> None:
    """Nothing is folded back to a server that is being drained."""
    cluster = world({"cold": (replicated(SUBS, 1, 2), 0.2)}, 4, draining=("s1", "s2"))
    first = planned(cluster)
    assert after(first) == {b"cold": replicated(SUBS, 3, 4)} and first.moves[0].reason == "s1, s2 are being drained"
    cluster.carry_out(first)
    assert planned(cluster).moves[0].after.mode is Mode.SINGLE


def test_no_goal_at_all_can_put_a_channel_there() -> None:
    channels = {"a": (single("s2"), 0.1)}
    assert not world(channels).decide(fill("s1")).moves
    assert world(channels, draining=()).decide(fill("s1")).moves, "the goal itself would"


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(2, 5))
    names = [f"s{number}" for number in range(1, count + 1)]
    draining = draw(st.sets(st.sampled_from(names), max_size=count - 1))
    places: dict[bytes, Assignment] = {}
    for number in range(draw(st.integers(0, 20))):
        servers = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        mode = Mode.SINGLE if len(servers) == 1 else draw(st.sampled_from((SUBS, PUBS)))
        places[b"c%d" % number] = Assignment(mode, tuple(servers))
    loads = {channel: draw(st.floats(0.0, 0.2) | st.floats(0.0, 1.5)) * CAPACITY for channel in places}
    options = BalancerOptions(
        moves_per_plan_max=draw(st.integers(1, 20)),
        moves_per_server_max=draw(st.integers(1, 20)),
        replicas_max=draw(st.sampled_from((1, 16))),
    )
    return World(
        dict.fromkeys(names, CAPACITY),
        places,
        loads,
        {name: draw(st.sampled_from((0.0, 0.0, 0.3, 0.9))) * CAPACITY for name in names},
        {channel for channel in places if draw(st.integers(0, 9)) == 0},
        options,
        frozenset(draining),
        hot=frozenset(channel for channel in places if draw(st.booleans())),
    )


@given(worlds())
def test_any_plan_puts_nothing_there_keeps_its_bounds_and_there_is_an_end(cluster: World) -> None:
    """Under constant load: what could leave has left, or there is a finding that says why it has not."""
    options = cluster.options
    for _ in range(200):
        decision = planned(cluster)
        assert len(decision.moves) <= options.moves_per_plan_max
        for move in decision.moves:
            assert cluster.draining.isdisjoint(move.after.servers)
            if "being drained" in move.reason:
                joined = set(move.after.servers).difference(move.before.servers)
                assert all(move.ratios[server].after <= options.accept_ratio + 1e-9 for server in joined)
        for server in cluster.capacities:
            left = [move for move in decision.moves if server in {*move.before.servers} - {*move.after.servers}]
            joined_here = [move for move in decision.moves if server in {*move.after.servers} - {*move.before.servers}]
            assert max(len(left), len(joined_here)) <= options.moves_per_server_max
        cluster.carry_out(decision)
        got = {finding.server for finding in decision.findings if "not drained yet" in finding.reason}
        assert got == {server for server in cluster.draining if cluster.rates(server)}
        if not decision.moves:
            return
    raise AssertionError("200 plans under constant load")


# The whole loop.

DRAINED = "s1"
OPTIONS = BalancerOptions(wait_s=4.0, averaging_s=3.0, channel_rest_s=5.0, draining=frozenset({DRAINED}))


def _left(cluster: SimCluster) -> tuple[bool, int | None]:
    status = cluster.ask("status", server="s2").result["servers"][DRAINED]
    return status["draining"], status["channels_left"]


def _is_empty(cluster: SimCluster) -> bool:
    status = cluster.ask("status", server="s2").result["servers"][DRAINED]
    return (status["channels_left"], status["slots_left"]) == (0, 0)


def test_a_server_that_is_empty_may_be_stopped_for_good() -> None:
    cluster, before = started(3, replace(OPTIONS, draining=frozenset()))
    [channel] = before.at_home("s2", 1, b"named")
    assert cluster.ask("move", {"channel": channel, "to": DRAINED}).error is None
    cluster.kill(before)
    cluster.run(6)
    balancer = cluster.start(replace(OPTIONS, wait_s=30.0, server_dead_s=60.0))
    cluster.run_until(lambda: balancer.machine.plan is not None)
    cluster.stop_server(DRAINED)
    cluster.run(10)
    unreachable = next(each for each in balancer.machine.health.problems if each.subject == DRAINED)
    assert (unreachable.kind, unreachable.severity) == ("server_unreachable", Severity.ERROR), "a channel is there"
    assert cluster.ask("status", server="s2").result["servers"][DRAINED]["channels_named"] == 1
    cluster.start_server(DRAINED)
    cluster.run_until(lambda: _is_empty(cluster), timeout_s=300)
    cluster.stop_server(DRAINED)
    cluster.run(10)
    [problem] = balancer.machine.health.problems
    assert (problem.kind, problem.subject, problem.severity) == ("server_unreachable", DRAINED, Severity.WARNING)
    assert problem.reason == f"it is drained and stopped: type 'dynamoth server remove {DRAINED}'"
    assert balancer.machine.health.errors == [], "the balancer is ready"
    assert cluster.ask("status", server="s2").result["servers"][DRAINED]["channels_named"] == 0


def test_channels_that_the_plan_does_not_name_leave_with_their_slots() -> None:
    cluster, balancer = started(options=OPTIONS)
    [channel], [elsewhere] = balancer.at_home(DRAINED, 1, b"new"), balancer.at_home("s2", 1, b"other")
    slot = slot_of(channel)
    cluster.follow[channel] = 1000
    cluster.agents[DRAINED].loads[elsewhere] = 1000  # by a publisher that does not know better
    cluster.agents[DRAINED].listened.add(slot)
    cluster.run_until(lambda: balancer.plan.entry(channel).phase is Phase.ACTIVE)
    cluster.run(5)
    assert balancer.plan.entry(channel).phase is Phase.ACTIVE and _left(cluster) == (True, 1), "subscribers are there"
    cluster.agents[DRAINED].listened.clear()
    cluster.run_until(lambda: _is_empty(cluster), timeout_s=300)
    assert balancer.plan.entry(channel).route.assignment == single("s2") and channel not in balancer.plan.entries


def test_a_server_that_is_empty_is_removed_and_another_one_takes_its_share() -> None:
    cluster, before = started(3, OPTIONS)
    cluster.run_until(lambda: _is_empty(cluster), timeout_s=300)
    cluster.stop_server(DRAINED)
    cluster.run(1)
    others = {id_: server for id_, server in before.plan.servers.items() if id_ != DRAINED}
    assert cluster.ask("server", {"action": "remove", "server": DRAINED}, server="s2").error is None
    balancer = cluster.succeed(before, replace(OPTIONS, draining=frozenset(), join_s=0.0), servers=others)
    cluster.run(5)
    assert balancer.plan.servers == others and balancer.machine.health.problems == []
    cluster.add_server("s4")
    add = {"action": "add", "server": "s4", "url": "redis://s4"}
    assert cluster.ask("server", add, server="s2").error is None
    cluster.run_until(lambda: slots_of(balancer.plan, "s4") > 1200, timeout_s=300)
    assert sum(slots_of(balancer.plan, id_) for id_ in balancer.plan.servers) == SLOTS


def slots_of(plan: Plan, server: str) -> int:
    """Return how many slots a server has."""
    return sum(plan.entry(slot_name(slot)).route.assignment == single(server) for slot in range(SLOTS))


def test_what_was_on_its_way_there_arrives_and_leaves_again() -> None:
    cluster, before = started(options=replace(OPTIONS, draining=frozenset()))
    [channel] = before.at_home("s2", 1, b"late")
    cluster.agents["s2"].listened.add(channel)
    cluster.admin("s2", "move", {"channel": channel, "to": DRAINED})
    cluster.run(1)
    assert before.plan.entry(channel).phase is Phase.ACTIVE
    balancer = cluster.succeed(before, OPTIONS)
    cluster.run(2)
    assert _left(cluster) == (True, 1)
    cluster.agents["s2"].listened.clear()
    cluster.run_until(lambda: balancer.plan.entry(channel).route.assignment == single("s2"))


def test_a_replication_that_an_administrator_still_waits_for_is_no_reason_to_stay() -> None:
    cluster, before = started(3, replace(OPTIONS, draining=frozenset()))
    wanted = {"channel": b"hot", "mode": "all-subscribers", "servers": [DRAINED, "s2"]}
    home = before.plan.ring.home(b"hot")
    cluster.agents[home].listened.add(b"hot")
    cluster.admin("s2", "replicate", wanted)
    cluster.run(1)
    balancer = cluster.succeed(before, OPTIONS)
    cluster.run(2)
    cluster.admin("s2", "replicate", wanted)
    cluster.run(1)
    cluster.agents[home].listened.clear()
    cluster.run(3)
    assert [reply.error for reply in cluster.servers["s2"].replies] == [None], "what was begun is waited for"
    cluster.run_until(lambda: DRAINED not in balancer.plan.entry(b"hot").route.assignment.servers)


def test_channels_that_reports_do_not_name_count_too() -> None:
    cluster, balancer = started(options=OPTIONS)
    cluster.run(5)
    report = cluster.agents[DRAINED].report()
    for users, left in (({"subscribers": 7}, 5), ({"publications": 3}, 5), ({}, 0)):
        crowded = replace(report, rest=replace(report.rest, channels=5, **users))
        cluster.say(DRAINED, pack_report(crowded))
        cluster.run()
        assert balancer.machine.overview.channels_left(DRAINED, cluster.now) == left


def test_what_is_left_is_not_known_while_the_agent_is_silent() -> None:
    cluster, balancer = started(options=OPTIONS)
    cluster.run(5)
    registry = make_registry(balancer.machine, lambda: cluster.now)
    metric = ("dynamoth_balancer_channels_left", {"server": DRAINED})
    assert registry.get_sample_value(*metric) == 0.0
    assert registry.get_sample_value(metric[0], {"server": "s2"}) is None
    assert _left(cluster) == (True, 0)
    cluster.run_until(lambda: _is_empty(cluster), timeout_s=300)
    decided = len(balancer.decided)
    cluster.stop_server(DRAINED)
    cluster.run(10)
    assert _left(cluster) == (True, None) and registry.get_sample_value(*metric) is None
    assert len(balancer.decided) == decided, "it may be down: there is nothing"


def test_not_all_servers_can_be_drained_and_only_those_that_there_are() -> None:
    servers = [Server(id_, f"redis://{id_}") for id_ in ("s1", "s2")]
    for names in ({"s1", "s2"}, {"s3"}, {"s1", "s3"}):
        with pytest.raises(ConfigError, match=r"must name some of the servers \(s1, s2\) and leave one, not: s"):
            BalancerMachine(servers, 1, BalancerOptions(draining=frozenset(names)))


# Administrators.

BY_HAND = BalancerOptions(load_ratio_high=1000.0, wait_s=1000.0, draining=frozenset({DRAINED}))
"""The balancer does not drain: the administrator is quicker."""

REFUSAL = "server s1 is being drained and takes no channels: name another one, or type 'dynamoth server undrain s1'"


def _by_hand(servers: int = 4) -> tuple[SimCluster, bytes]:
    """Return a cluster in which s1 is being drained, and a channel whose home it is."""
    cluster = SimCluster(servers)
    balancer = cluster.started(BY_HAND)
    return cluster, balancer.at_home(DRAINED, 1, b"news")[0]


def test_a_count_takes_others_and_the_note_says_why_there_are_fewer() -> None:
    cluster, channel = _replicated_at_drained(servers=3)
    reply = cluster.ask("replicate", {"channel": channel, "mode": "all-publishers", "count": 3})
    assert reply.error is None and sorted(reply.result["servers"]) == ["s2", "s3"]
    assert reply.result["note"] == f"2 servers instead of 3, as no more can take part: {REFUSAL}"
    two, other = _by_hand(servers=2)
    error = two.ask("replicate", {"channel": other, "mode": "all-publishers", "count": 2}).error
    assert error is not None and "1 can take part" in error and REFUSAL in error


def test_unreplicate_takes_a_replica_that_is_not_being_drained_if_there_is_one() -> None:
    cluster, channel = _replicated_at_drained()
    cluster.agents["s2"].loads[b"load"] = round(0.5 * CAPACITY)
    cluster.run(5)
    assert cluster.ask("unreplicate", {"channel": channel}).result["to"] == "s2"
    both, channel = _replicated_at_drained(draining={DRAINED, "s2"})
    error = both.ask("unreplicate", {"channel": channel}).error
    assert error is not None and "is being drained" in error


def _replicated_at_drained(
    servers: int = 4, draining: set[str] | frozenset[str] = BY_HAND.draining
) -> tuple[SimCluster, bytes]:
    """Return a cluster with a channel that was replicated over s1 and s2 before they were to be drained."""
    cluster = SimCluster(servers)
    before = cluster.started(replace(BY_HAND, draining=frozenset()))
    wanted = {"channel": b"news", "mode": "all-subscribers", "servers": [DRAINED, "s2"]}
    assert cluster.ask("replicate", wanted).error is None
    cluster.kill(before)
    balancer = cluster.start(replace(BY_HAND, draining=frozenset(draining)))
    cluster.run_until(lambda: balancer.machine.plan is not None and cluster.is_quiet(balancer))
    cluster.run(3)
    return cluster, b"news"
