"""An operator lets a balancer lead without most of the servers; nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamoth.errors import ConfigError
from dynamoth.names import PLAN_KEY
from dynamoth.plan.plan import single
from dynamoth.plan.slots import SLOTS
from dynamoth_balancer.install.leadership import Stage
from tests.balancer.cluster import NO_DECISIONS, Balancer, SimCluster, started

OPTIONS = replace(NO_DECISIONS, server_dead_s=2.0)
TAKING_OVER = replace(OPTIONS, take_over=True)


def _without_most() -> tuple[SimCluster, Balancer]:
    """Return a cluster in which two of three servers are dead, and a balancer that has noticed."""
    cluster, balancer = started(3, OPTIONS)
    for server in ("s2", "s3"):
        cluster.stop_server(server)
    cluster.run(3 * OPTIONS.server_dead_s)
    return cluster, balancer


def _taken_over() -> tuple[SimCluster, Balancer]:
    """Return this cluster with a balancer that has taken over."""
    cluster, balancer = _without_most()
    cluster.kill(balancer)
    other = cluster.start(TAKING_OVER)
    cluster.run_until(lambda: _leads(other))
    cluster.run(3)
    return cluster, other


def _leads(balancer: Balancer) -> bool:
    return balancer.machine.stage is Stage.LEADING


def _problem(balancer: Balancer, kind: str) -> str:
    [problem] = [each for each in balancer.machine.health.problems if each.kind == kind]
    return problem.reason


def test_without_most_servers_a_balancer_changes_nothing_and_says_what_can_be_done() -> None:
    cluster, balancer = _without_most()
    assert not _leads(balancer)
    version = balancer.plan.version
    reason = _problem(balancer, "not_leading")
    assert "the lease of 2 of 3 servers is needed; s2, s3 cannot be reached" in reason
    assert "if they are lost for good, stop all balancers and start one with --take-over" in reason
    cluster.run(60)
    assert cluster.servers["s1"].plan_or_fail().version == version


def test_a_standby_that_cannot_reach_most_servers_says_so_too() -> None:
    """Nobody leads, though the other balancer still has the lease of the server that is left."""
    cluster, balancer = started(3, OPTIONS)
    standby = cluster.start(replace(OPTIONS, standby=True))
    cluster.run(1)
    assert standby.machine.overview.stands_by and not standby.machine.health.problems
    for server in ("s2", "s3"):
        cluster.stop_server(server)
    cluster.run(10 * OPTIONS.lease_s)
    for each in (balancer, standby):
        assert not _leads(each) and not each.machine.overview.stands_by
        assert "s2, s3 cannot be reached; start them again; if they are lost" in _problem(each, "not_leading")


def test_a_balancer_that_takes_over_gives_everything_to_the_living_servers() -> None:
    _, other = _taken_over()
    assert other.plan.servers_in_use == {"s1"}
    assert not other.machine.overview.transitions
    assert "does not count s2, s3" in _problem(other, "servers_given_up")
    [channel] = other.at_home("s2")
    assert other.plan.entry(channel).route.assignment == single("s1")


def test_lost_servers_are_removed_and_then_a_balancer_leads_without_taking_over() -> None:
    cluster, other = _taken_over()
    for server in ("s2", "s3"):
        for action in ("drain", "remove"):
            assert cluster.ask("server", {"action": action, "server": server}).error is None
    assert set(other.plan.servers) == {"s1"}
    assert {each.kind for each in other.machine.health.problems} == {"server_not_listed"}
    later = cluster.succeed(other, OPTIONS)
    cluster.run_until(lambda: _leads(later))
    assert set(later.plan.servers) == {"s1"}


def test_servers_that_come_back_count_again_and_get_the_plan() -> None:
    cluster, other = _taken_over()
    cluster.start_server("s2")
    cluster.run(10)
    assert not any(each.kind == "servers_given_up" for each in other.machine.health.problems)
    assert cluster.servers["s2"].plan_or_fail().version == other.plan.version
    cluster.stop_server("s1")
    cluster.run(10)
    assert not _leads(other), "s2 alone is not more than half"
    cluster.start_server("s1")
    cluster.start_server("s3")
    cluster.run_until(lambda: _leads(other) and cluster.is_quiet(other))
    assert other.plan.servers.keys() == {"s1", "s2", "s3"}


@pytest.mark.parametrize("is_lease_free", [False, True])
def test_taking_over_is_refused_where_most_servers_can_be_reached(is_lease_free: bool) -> None:
    cluster, balancer = started(3, OPTIONS)
    cluster.stop_server("s3")
    cluster.kill(balancer)
    if is_lease_free:
        cluster.run(10)
    plan = cluster.servers["s1"].plan_or_fail()
    other = cluster.start(TAKING_OVER)
    cluster.run(10)
    stopped = other.stopped
    assert stopped is not None and isinstance(stopped.error, ConfigError)
    assert "--take-over is refused, as 2 of 3 servers can be reached" in str(stopped.error)
    assert "nothing has changed; start the balancer without --take-over" in str(stopped.error)
    assert cluster.servers["s1"].plan_or_fail().version == plan.version


def test_half_of_the_servers_are_not_enough_without_taking_over() -> None:
    cluster, balancer = started(2, OPTIONS)
    cluster.stop_server("s2")
    cluster.run(10)
    assert not _leads(balancer)
    cluster.kill(balancer)
    later = cluster.start(TAKING_OVER)
    cluster.run_until(lambda: _leads(later))
    cluster.run(3)
    installer = later.machine.leadership.installer
    assert installer is not None and len(installer.index.slots_at["s1"]) == SLOTS


def test_without_a_stored_plan_there_is_nothing_to_take_over() -> None:
    """The plan may be at the servers that cannot be reached."""
    cluster, balancer = _without_most()
    cluster.kill(balancer)
    cluster.servers["s1"].delete(PLAN_KEY)
    other = cluster.start(TAKING_OVER)
    cluster.run(30)
    assert other.machine.stage is Stage.CONTENDING
    assert cluster.servers["s1"].plan is None
