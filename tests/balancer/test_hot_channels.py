"""The whole loop in virtual time: hot channels are spread and folded back, and what these decisions wait for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dynamoth.plan.plan import Assignment, Mode, Phase
from dynamoth_balancer.machine import TICK_INTERVAL_S
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import Balancer, SimCluster
from tests.balancer.traffic import CAPACITY, Traffic

OPTIONS = BalancerOptions(wait_s=2.0, averaging_s=3.0, channel_rest_s=5.0, replication_rest_s=20.0)
HOT = b"hot"
MANY_PUBLICATIONS = Traffic(3000, 10, message_bytes=30)
MANY_SUBSCRIBERS = Traffic(10, 3000, message_bytes=30)


def _started(
    traffic: Traffic | None = None, servers: int = 4, options: BalancerOptions = OPTIONS
) -> tuple[SimCluster, Balancer]:
    cluster = SimCluster(servers)
    balancer = cluster.started(options)
    if traffic is not None:
        cluster.traffic[HOT] = traffic
    return cluster, balancer


def _assignment(balancer: Balancer) -> Assignment:
    return balancer.plan.entry(HOT).route.assignment


def _settled_as(balancer: Balancer, mode: Mode) -> bool:
    entry = balancer.plan.entry(HOT)
    return entry.phase is Phase.SETTLED and entry.route.assignment.mode is mode


def _changes(balancer: Balancer) -> list[Assignment]:
    """Return the assignments that the balancer has decided, in order."""
    return [move.after for decided in balancer.decided for move in decided.decision.moves if move.channel == HOT]


def _findings(balancer: Balancer) -> list[str]:
    return [finding.reason for decided in balancer.decided for finding in decided.decision.findings]


@pytest.mark.parametrize(
    ("traffic", "mode"), [(MANY_PUBLICATIONS, Mode.ALL_SUBSCRIBERS), (MANY_SUBSCRIBERS, Mode.ALL_PUBLISHERS)]
)
def test_a_hot_channel_is_spread_once_and_folded_back_when_it_has_cooled_down(traffic: Traffic, mode: Mode) -> None:
    cluster, balancer = _started(traffic)
    cluster.run_until(lambda: _settled_as(balancer, mode))
    cluster.run(100)
    [spread] = _changes(balancer)
    assert (spread.mode, len(spread.servers)) == (mode, 3)
    share = traffic.outgoing_bytes_per_s / 3 / CAPACITY
    ratios = {id_: balancer.machine.overview.load_ratio(id_, cluster.now) for id_ in cluster.servers}
    assert ratios == pytest.approx({id_: share if id_ in spread.servers else 0.0 for id_ in ratios}, abs=0.02)
    cluster.traffic[HOT] = replace(traffic, message_bytes=5)
    cluster.run_until(lambda: _settled_as(balancer, Mode.SINGLE))
    cluster.run(100)
    numbers = [len(change.servers) for change in _changes(balancer)]
    assert numbers in ([3, 1], [3, 2, 1]), "the average may be on its way down when it decides"
    assert _assignment(balancer).servers[0] in spread.servers


def test_it_follows_the_load_with_a_rest_between_changes() -> None:
    cluster, balancer = _started(replace(MANY_PUBLICATIONS, message_bytes=20), servers=6)
    times: list[float] = []
    for factor in (1, 3, 5, 1, 0.2):
        cluster.traffic[HOT] = replace(MANY_PUBLICATIONS, message_bytes=20 * factor)
        for _ in range(60):
            cluster.run(1)
            if len(_changes(balancer)) > len(times):
                times.append(cluster.now)
    numbers = [len(assignment.servers) for assignment in _changes(balancer)]
    assert numbers[0] == 2 and max(numbers) == 5 and numbers[-1] == 1
    assert numbers[: numbers.index(5) + 1] == sorted(numbers[: numbers.index(5) + 1]), "it grows"
    assert numbers[numbers.index(5) :] == sorted(numbers[numbers.index(5) :], reverse=True), "and shrinks"
    assert all(later - earlier >= OPTIONS.replication_rest_s for earlier, later in pairwise(times))


def test_nothing_is_decided_of_a_channel_before_it_has_been_measured_where_it_is() -> None:
    """While subscribers move they are counted twice, and later averages still know of it."""
    options = replace(OPTIONS, averaging_s=8.0, replication_rest_s=0.0, channel_rest_s=0.0, wait_s=0.0)
    cluster, balancer = _started(MANY_PUBLICATIONS, options=options)
    cluster.run_until(lambda: bool(_changes(balancer)))
    cluster.traffic[HOT] = replace(MANY_PUBLICATIONS, message_bytes=1)
    cluster.run_until(lambda: _settled_as(balancer, Mode.ALL_SUBSCRIBERS))
    settled = cluster.now
    cluster.run_until(lambda: len(_changes(balancer)) == 2)
    assert cluster.now - settled >= options.averaging_s
    assert _changes(balancer)[1].mode is Mode.SINGLE


def test_a_successor_measures_before_it_folds_back_or_spreads() -> None:
    cluster, balancer = _started(MANY_PUBLICATIONS)
    cluster.run_until(lambda: _settled_as(balancer, Mode.ALL_SUBSCRIBERS))
    cluster.kill(balancer)
    options = replace(OPTIONS, wait_s=0.0, averaging_s=15.0, replication_rest_s=0.0)
    successor = cluster.start(options)
    cluster.traffic[HOT] = replace(MANY_PUBLICATIONS, message_bytes=1)
    cluster.run_until(lambda: successor.machine.plan is not None)
    began = cluster.now
    cluster.run_until(lambda: bool(_changes(successor)))
    assert cluster.now - began >= 15 - 1 and _changes(successor)[0].mode is Mode.SINGLE


# Administrators.


def test_what_an_administrator_has_replicated_is_left_so() -> None:
    cluster, balancer = _started()
    arguments = {"channel": HOT, "mode": "all-publishers", "servers": ["s1", "s2"]}
    assert cluster.ask("replicate", arguments).error is None
    cluster.run(120)
    assert not _changes(balancer) and _settled_as(balancer, Mode.ALL_PUBLISHERS)
    cluster.traffic[HOT] = MANY_PUBLICATIONS
    cluster.run(120)
    assert not _changes(balancer), "also when the balancer would spread it in another way"
    assert cluster.ask("unreplicate", {"channel": HOT}).error is None
    unreplicated = cluster.now
    cluster.run_until(lambda: bool(_changes(balancer)))
    assert cluster.now - unreplicated >= OPTIONS.replication_rest_s - 1, "and it rests"
    assert _changes(balancer)[0].mode is Mode.ALL_SUBSCRIBERS


def test_beyond_a_bound_the_channel_that_was_replicated_first_follows_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamoth_balancer.decide.decider.HELD_MAX", 2)
    cluster, balancer = _started(servers=2)
    for channel in (b"first", b"second", b"third"):
        arguments = {"channel": channel, "mode": "all-publishers", "servers": ["s1", "s2"]}
        assert cluster.ask("replicate", arguments).error is None
    cluster.run(40)
    modes = [balancer.plan.entry(channel).route.assignment.mode for channel in (b"first", b"second", b"third")]
    assert modes == [Mode.SINGLE, Mode.ALL_PUBLISHERS, Mode.ALL_PUBLISHERS]


def test_a_successor_decides_by_load() -> None:
    cluster, balancer = _started()
    arguments = {"channel": HOT, "mode": "all-publishers", "servers": ["s1", "s2"]}
    assert cluster.ask("replicate", arguments).error is None
    cluster.kill(balancer)
    successor = cluster.start(OPTIONS)
    cluster.run_until(lambda: bool(successor.decided))
    assert _changes(successor)[0].mode is Mode.SINGLE


def test_what_another_balancer_has_made_of_a_channel_since_is_not_held() -> None:
    cluster, balancer = _started()
    arguments = {"channel": HOT, "mode": "all-publishers", "servers": ["s1", "s2"]}
    assert cluster.ask("replicate", arguments).error is None
    balancer.process.pause()
    cluster.run(10)
    other = cluster.start(OPTIONS)
    cluster.run_until(lambda: other.machine.plan is not None)
    changed = {"channel": HOT, "mode": "all-subscribers", "servers": ["s2", "s3"]}
    assert cluster.ask("replicate", changed).error is None
    cluster.run(5)
    cluster.kill(other)
    balancer.process.resume()
    cluster.run_until(lambda: bool(_changes(balancer)))
    assert _changes(balancer)[0].mode is Mode.SINGLE


# Dead replicas.


def _with_a_dead_replica(message_bytes: float) -> tuple[SimCluster, Balancer, str]:
    """Return a cluster whose hot channel has three replicas, of which one has just died."""
    cluster, balancer = _started(MANY_PUBLICATIONS, servers=5)
    cluster.run_until(lambda: _settled_as(balancer, Mode.ALL_SUBSCRIBERS))
    cluster.run(OPTIONS.replication_rest_s + 5)
    dead = _assignment(balancer).servers[1]
    cluster.traffic[HOT] = replace(MANY_PUBLICATIONS, message_bytes=message_bytes)
    cluster.stop_server(dead)
    return cluster, balancer, dead


def test_a_dead_replica_is_left() -> None:
    cluster, balancer, dead = _with_a_dead_replica(20)
    died, before = cluster.now, _assignment(balancer)
    rest = tuple(server for server in before.servers if server != dead)
    cluster.run_until(lambda: _assignment(balancer) == Assignment(before.mode, rest))
    assert OPTIONS.server_dead_s - TICK_INTERVAL_S <= cluster.now - died <= OPTIONS.server_dead_s + 3 * TICK_INTERVAL_S
    cluster.run(5)
    assert _settled_as(balancer, Mode.ALL_SUBSCRIBERS)


def test_a_replica_that_is_away_for_a_moment_is_not_dead() -> None:
    cluster, balancer, dead = _with_a_dead_replica(20)
    cluster.run(OPTIONS.server_dead_s - 1)
    cluster.start_server(dead)
    cluster.run(60)
    assert len(_changes(balancer)) == 1 and not _findings(balancer)


def test_a_server_whose_agent_is_dead_keeps_its_channels() -> None:
    cluster, balancer = _started(MANY_PUBLICATIONS)
    cluster.run_until(lambda: _settled_as(balancer, Mode.ALL_SUBSCRIBERS))
    cluster.agents[_assignment(balancer).servers[0]].alive = False
    cluster.run(60)
    assert len(_changes(balancer)) == 1
