"""The whole loop in virtual time: reports in, moves out, and what decisions wait for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dynamoth_balancer.events import Decided
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster, started
from tests.balancer.traffic import CAPACITY

QUICK = BalancerOptions(wait_s=5.0, averaging_s=3.0, channel_rest_s=10.0)

SLOW = BalancerOptions(wait_s=5.0, averaging_s=30.0)
"""Reports of agents that are down are in the average for longer than the agents count as alive."""


def _load(cluster: SimCluster, balancer: Balancer, ratios: dict[str, list[float]]) -> list[bytes]:
    """Give servers channels that are at home there, with these load ratios; return all of them."""
    channels: list[bytes] = []
    for server, wanted in ratios.items():
        for name, ratio in zip(balancer.at_home(server, len(wanted)), wanted, strict=True):
            cluster.follow[name] = round(ratio * CAPACITY)
            channels.append(name)
    return channels


def _moves(balancer: Balancer) -> list[tuple[bytes, str, str]]:
    return [(m.channel, m.source, m.target) for decided in balancer.decided for m in decided.decision.moves]


@pytest.mark.parametrize("variation", [0.0, 0.12])
def test_a_channel_too_large_for_any_server_is_reported_now_and_then_and_never_moved(variation: float) -> None:
    cluster, balancer = started(options=QUICK)
    [channel] = _load(cluster, balancer, {"s1": [0.95]})
    for number in range(300):
        cluster.follow[channel] = round((0.95 + variation * (number % 7) / 6) * CAPACITY)
        cluster.run(1)
    assert not _moves(balancer)
    assert 1 <= len(balancer.decided) <= 6


@pytest.mark.parametrize(("wait_s", "decision_interval_s"), [(7.0, 1.0), (1.0, 7.0)])
def test_plans_are_wait_s_or_a_decision_interval_apart(wait_s: float, decision_interval_s: float) -> None:
    cluster = SimCluster(4)
    options = BalancerOptions(
        wait_s=wait_s, decision_interval_s=decision_interval_s, averaging_s=3.0, moves_per_plan_max=2
    )
    balancer = cluster.started(options)
    _load(cluster, balancer, {"s1": [0.1] * 16})
    times: list[float] = []
    for _ in range(200):
        cluster.run(0.25)
        if len(balancer.decided) > len(times):
            times.append(cluster.now)
    assert len(times) >= 3
    assert all(later - earlier >= 7.0 for earlier, later in pairwise(times))
    assert all(len(decided.decision.moves) <= 2 for decided in balancer.decided)


def test_a_channel_that_was_moved_rests_although_its_new_server_becomes_overloaded() -> None:
    cluster, balancer = started(3, BalancerOptions(wait_s=1.0, averaging_s=2.0, channel_rest_s=40.0))
    channels = _load(cluster, balancer, {"s1": [0.55, 0.35]})
    cluster.run_until(lambda: bool(balancer.decided))
    begun = cluster.now
    [(moved, _, target)] = _moves(balancer)
    cluster.run(5)
    cluster.follow[next(c for c in channels if c != moved)] = 1
    [other] = balancer.at_home(target, 1, b"more")
    cluster.follow[other] = round(0.45 * CAPACITY)  # the moved one is busier, and would go first
    cluster.run(10)
    assert [(channel, source) for channel, source, _ in _moves(balancer)[1:]] == [(other, target)]
    cluster.follow[moved] = round(0.7 * CAPACITY)
    cluster.follow[b"rest"] = 0
    more = balancer.at_home(target, 2, b"last")
    cluster.follow.update(dict.fromkeys(more, round(0.25 * CAPACITY)))
    cluster.run_until(lambda: moved in [channel for channel, _, _ in _moves(balancer)[1:]] or cluster.now > begun + 60)
    assert moved not in [channel for channel, _, _ in _moves(balancer)[1:]] or cluster.now - begun >= 40.0


def test_what_a_restarted_agent_measures_is_not_mixed_with_what_was_before() -> None:
    cluster, balancer = started(options=SLOW)
    _load(cluster, balancer, {"s1": [0.7]})
    cluster.run(20)
    cluster.follow.update(dict.fromkeys(cluster.follow, 0))
    cluster.agents["s1"].restart()
    cluster.run(1)
    assert balancer.machine.overview.load_ratio("s1", cluster.now) is None, "its predecessor may still be alive"
    cluster.run(2)
    assert balancer.machine.overview.load_ratio("s1", cluster.now) == 0.0


def test_no_plan_is_made_while_one_is_being_installed() -> None:
    cluster, balancer = started(3, BalancerOptions(wait_s=0.0, averaging_s=2.0))
    channels = _load(cluster, balancer, {"s1": [0.2] * 5})
    cluster.agents["s1"].listened.update(channels)
    cluster.run_until(lambda: bool(balancer.decided))
    assert cluster.ask("server", {"action": "drain", "server": "s2"}).error is None
    cluster.run(20)
    assert len(balancer.decided) == 1, "nothing leaves s2 yet"
    cluster.agents["s1"].listened.clear()
    cluster.run(10)
    assert len(balancer.decided) >= 2


def test_an_overloaded_server_is_relieved_further_while_its_moves_take_long() -> None:
    """Its subscribers are behind, so they leave late: that is no reason to leave it overloaded."""
    options = BalancerOptions(wait_s=3.0, averaging_s=2.0, moves_per_plan_max=1, move_timeout_s=1000.0)
    cluster, balancer = started(3, options)
    channels = _load(cluster, balancer, {"s1": [0.2] * 8})
    cluster.agents["s1"].listened.update(channels)
    times: list[float] = []
    for _ in range(120):
        cluster.run(0.25)
        if len(balancer.decided) > len(times):
            times.append(cluster.now)
    moved = [channel for channel, _, _ in _moves(balancer)]
    assert len(set(moved)) == len(moved) == 4, "until its load ratio is 0.8"
    assert balancer.machine.overview.transitions == 4, "all of them are under way"
    assert all(later - earlier >= 3.0 for earlier, later in pairwise(times))


def test_a_server_may_join_while_an_overloaded_one_is_relieved() -> None:
    """For a moment the plan lists a server of which the model does not know yet."""
    options = BalancerOptions(wait_s=0.0, averaging_s=2.0, moves_per_plan_max=1, decision_interval_s=0.1)
    cluster, balancer = started(3, options)
    channels = _load(cluster, balancer, {"s1": [0.2] * 8})
    cluster.agents["s1"].listened.update(channels)
    cluster.run_until(lambda: bool(balancer.decided))
    cluster.add_server("s4")
    assert cluster.ask("server", {"action": "add", "server": "s4", "url": "redis://s4"}).error is None
    assert "s4" in balancer.plan.servers
    assert balancer.machine.overview.transitions


def test_a_transition_that_is_stuck_does_not_stop_all_decisions() -> None:
    cluster = SimCluster(3)
    options = BalancerOptions(wait_s=0.0, averaging_s=2.0, moves_per_plan_max=1, move_timeout_s=10.0)
    balancer = cluster.started(options)
    channels = _load(cluster, balancer, {"s1": [0.2] * 8})
    cluster.agents["s1"].listened.update(channels)
    cluster.run(60)
    assert len(balancer.decided) >= 3
    moved = [channel for channel, _, _ in _moves(balancer)]
    assert len(set(moved)) == len(moved), "what is in transition is not moved again"


def test_servers_without_a_living_agent_take_no_part() -> None:
    cluster, balancer = started(3, SLOW)
    cluster.run(10)
    cluster.agents["s2"].alive = False
    cluster.run(QUICK.agent_stale_s + 1)
    _load(cluster, balancer, {"s1": [0.3] * 4})
    cluster.run(60)
    assert _moves(balancer)
    assert all(target == "s3" for _, _, target in _moves(balancer))
    assert not [note for note in balancer.notes if "cannot be carried out" in note.message]


def test_an_overloaded_server_whose_agent_is_down_is_left_alone() -> None:
    cluster, balancer = started(options=SLOW)
    assert cluster.ask("pause").error is None
    _load(cluster, balancer, {"s1": [0.3] * 4})
    cluster.run(15)
    cluster.agents["s1"].alive = False
    cluster.run(SLOW.agent_stale_s)
    assert cluster.ask("resume").error is None
    cluster.run(60)
    assert not _moves(balancer)


def test_a_successor_waits_before_its_first_plan() -> None:
    cluster, first = started(3, QUICK)
    _load(cluster, first, {"s1": [0.3] * 4})
    cluster.run_until(lambda: bool(first.decided))
    successor = cluster.succeed(first, QUICK)
    _load(cluster, successor, {"s2": [0.3] * 4})
    began = cluster.now
    cluster.run_until(lambda: bool(successor.decided))
    assert cluster.now - began >= QUICK.wait_s - 1
    assert isinstance(successor.decided[0], Decided)
