"""What the balancer finds wrong: each kind, from when it begins until it is over."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.machine.events import Tick
from dynamoth.plan.plan import Plan, Server
from dynamoth_balancer.admin.health import Found, Health, Problem, Severity
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import NO_DECISIONS, Balancer, SimCluster, refusing
from tests.balancer.traffic import CAPACITY

CHANNEL = b"news"
HOMES = Plan.initial([Server("s1", "redis://s1"), Server("s2", "redis://s2")]).ring


def started(servers: int = 2, options: BalancerOptions = NO_DECISIONS) -> tuple[SimCluster, Balancer]:
    cluster = SimCluster(servers)
    balancer = cluster.started(options)
    cluster.run(6)
    assert balancer.machine.health.problems == []
    return cluster, balancer


def kinds(balancer: Balancer) -> dict[tuple[str, str], Problem]:
    return {(problem.kind, problem.subject): problem for problem in balancer.machine.health.problems}


def away(cluster: SimCluster, balancer: Balancer) -> tuple[str, str]:
    home = balancer.home(CHANNEL)
    return home, cluster.others(home)[0]


@pytest.mark.parametrize(
    ("reply", "cure"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "raise maxmemory"),
        ("READONLY You can't write against a read only replica.", "REPLICAOF NO ONE"),
    ],
)
def test_a_server_that_refuses_the_plan(reply: str, cure: str) -> None:
    cluster, balancer = started()
    home, other = away(cluster, balancer)
    cluster.servers[other].refuse = refusing(reply, b"HSET")
    since = cluster.now
    cluster.admin(home, "move", {"channel": CHANNEL, "to": other})
    cluster.run(12)
    problem = kinds(balancer)["plan_refused", other]
    assert problem.severity is Severity.ERROR
    assert reply in problem.reason and cure in problem.reason
    assert since <= problem.since <= since + 1
    assert "no channel moves to it or from it" in problem.reason
    assert ("transition_stalled", "news") not in kinds(balancer), "the move was undone"
    assert logged(balancer, "plan_refused") == []
    cluster.servers[other].refuse = None
    cluster.run(6)
    assert kinds(balancer) == {}
    assert logged(balancer, "plan_refused") == ["a problem is over"]


def test_a_dead_agent_has_no_rates_and_since_when_it_is_dead() -> None:
    cluster, balancer = started()
    cluster.agents["s1"].loads[CHANNEL] = CAPACITY // 2
    cluster.run(2)
    server = cluster.ask("status", server="s2").result["servers"]["s1"]
    assert server["outgoing_bytes_per_s"] == CAPACITY // 2 and server["report_age_s"] <= 1
    cluster.agents["s1"].alive = False
    died = cluster.now
    cluster.run(4)
    assert kinds(balancer) == {}, "it may only be slow"
    cluster.run(26)
    problem = kinds(balancer)["agent_silent", "s1"]
    assert problem.severity is Severity.ERROR and died - 1 <= problem.since <= died
    status = cluster.ask("status", server="s2").result
    server = status["servers"]["s1"]
    assert "outgoing_bytes_per_s" not in server and server["load_ratio"] is None
    assert 29 <= server["report_age_s"] <= 32
    [shown] = status["problems"]
    assert (shown["kind"], shown["subject"], shown["severity"]) == ("agent_silent", "s1", "error")
    assert 29 <= shown["age_s"] <= 32
    cluster.agents["s1"].alive = True
    cluster.run(2)
    assert kinds(balancer) == {}


def test_an_agent_that_is_gone_is_shown_before_its_reports_are_missed() -> None:
    cluster, balancer = started()
    cluster.agents["s1"].alive = False
    cluster.listen("s1", 0)
    died = cluster.now
    cluster.run(1.4)
    assert kinds(balancer) == {}, "it may come back at once"
    cluster.run(1.0)
    problem = kinds(balancer)["agent_silent", "s1"]
    assert problem.reason == "it has no agent: start 'dynamoth agent --server s1'"
    assert died <= problem.since <= died + 0.6
    assert cluster.ask("status", server="s2").result["servers"]["s1"]["agent"] == "silent"
    cluster.run(10)
    assert list(kinds(balancer)) == [("agent_silent", "s1")]
    cluster.agents["s1"].alive = True
    cluster.listen("s1", 1)
    cluster.run(2)
    assert kinds(balancer) == {}


def test_an_agent_that_reports_without_listening_is_not_gone() -> None:
    """An agent that Redis disconnects again and again reports itself blind over another connection."""
    cluster, balancer = started()
    cluster.listen("s1", 0)
    cluster.run(10)
    assert kinds(balancer) == {}


def test_several_that_listen_as_one_agent() -> None:
    cluster, balancer = started()
    cluster.listen("s1", 2)
    cluster.run(2)
    problem = kinds(balancer)["agents_in_conflict", "s1"]
    assert problem.severity is Severity.WARNING and "2 connections listen as its agent" in problem.reason
    cluster.listen("s1", 1)
    cluster.run(1)
    assert kinds(balancer) == {}


def test_a_server_that_hangs_is_shown_before_its_connection_is_lost() -> None:
    cluster, balancer = started(3)
    cluster.part(balancer, "s2")
    hung = cluster.now
    cluster.run(2.2)
    problem = kinds(balancer)["server_unreachable", "s2"]
    assert problem.severity is Severity.ERROR and "it does not answer" in problem.reason
    cluster.stop_server("s2")
    cluster.heal(balancer, "s2")
    cluster.run(1)
    problem = kinds(balancer)["server_unreachable", "s2"]
    assert "connection refused" in problem.reason and hung <= problem.since <= hung + 1.2
    assert list(kinds(balancer)) == [("server_unreachable", "s2")]
    cluster.start_server("s2")
    cluster.run(6)
    assert kinds(balancer) == {}


def test_a_balancer_that_was_stopped_for_a_while_does_not_blame_servers() -> None:
    cluster, balancer = started()
    cluster.run(0.5)
    for machine_time in (0.5, 4.5):
        balancer.machine.handle(Tick(), cluster.now + machine_time)
    assert not [key for key in kinds(balancer) if key[0] == "server_unreachable"]


def test_a_balancer_that_does_not_lead_says_why() -> None:
    cluster = SimCluster(3)
    for server in cluster.servers.values():
        server.refuse = refusing("NOPERM no", b"SET")
    balancer = cluster.start(NO_DECISIONS)
    cluster.run(3)
    problem = kinds(balancer)["not_leading", "balancer"]
    assert problem.reason == (
        "it is contending, not leading: the lease of 2 of 3 servers is needed;"
        " s1 refuses it: NOPERM no; s2 refuses it: NOPERM no; s3 refuses it: NOPERM no"
    )
    assert "dynamoth acl" in kinds(balancer)["server_refuses", "s1"].reason
    assert balancer.machine.health.errors[0] is problem


def test_goals_that_cannot_be_reached_stay_shown_as_long_as_they_are() -> None:
    cluster, balancer = started(2, BalancerOptions(wait_s=0.0, averaging_s=2.0))
    cluster.agents["s1"].loads[CHANNEL] = 2 * CAPACITY
    cluster.run(90)
    problem = kinds(balancer)["goal_unreached", "s1"]
    assert problem.severity is Severity.WARNING and "load ratio 2.00" in problem.reason
    assert balancer.machine.health.errors == []
    assert cluster.now - problem.since > 80
    cluster.agents["s1"].loads.clear()
    cluster.run(5)
    assert kinds(balancer) == {}


def test_a_goal_is_not_unreached_before_all_servers_are_measured() -> None:
    """After a start of the balancer nobody knows whether another server has room."""
    cluster = SimCluster(2)
    at_s1 = next(b"%d" % number for number in range(100) if HOMES.home(b"%d" % number) == "s1")
    cluster.agents["s1"].loads[at_s1] = CAPACITY // 2
    options = BalancerOptions(load_ratio_high=1000.0, draining=frozenset({"s1"}))
    cluster.agents["s2"].reports = False
    balancer = cluster.start(options)
    cluster.run_until(lambda: balancer.machine.stage is Stage.LEADING)
    cluster.run(4)
    assert not [key for key in kinds(balancer) if key[0] == "goal_unreached"], "s2 has begun a moment ago"
    cluster.run(10)
    assert ("goal_unreached", "s1") in kinds(balancer), "s2 was waited for long enough"


def test_only_some_of_many_stalled_transitions_are_listed() -> None:
    cluster, balancer = started()
    for number in range(30):
        channel = b"c%d" % number
        home = balancer.home(channel)
        cluster.agents[home].listened.add(channel)
        cluster.admin("s1", "move", {"channel": channel, "to": "s2" if home == "s1" else "s1"}, request=number)
    cluster.run(12)
    stalled = [problem for problem in balancer.machine.health.problems if problem.kind == "transition_stalled"]
    assert len(stalled) == 11
    assert "20 more channels" in stalled[-1].reason


@pytest.mark.parametrize(
    ("command", "reason"),
    [(b"SUBSCRIBE", "it does not let us hear its agent"), (b"PUBSUB", "it does not say whether it has an agent")],
)
def test_what_a_balancer_may_not_hear_or_ask_is_shown_and_logged_once(command: bytes, reason: str) -> None:
    cluster = SimCluster(2)
    cluster.servers["s1"].refuse = refusing("NOPERM no", command)
    balancer = cluster.start(NO_DECISIONS)
    cluster.run(10)
    problem = kinds(balancer)["server_refuses", "s1"]
    assert len(kinds(balancer)) == 1 or command == b"SUBSCRIBE", "who is not heard is a problem of its own"
    assert problem.reason == f"{reason}: NOPERM no (give the user the rights that 'dynamoth acl' prints)"
    assert logged(balancer, "server_refuses") == ["a problem has begun"]
    cluster.servers["s1"].refuse = None
    cluster.run(10)
    assert ("server_refuses", "s1") not in kinds(balancer)
    assert logged(balancer, "server_refuses") == ["a problem has begun", "a problem is over"]


def logged(balancer: Balancer, kind: str) -> list[str]:
    return [note.message for note in balancer.notes if note.details.get("kind") == kind]


WRITES = (b"SET", b"PEXPIRE", b"DEL", b"HSET", b"RENAME")


@pytest.mark.parametrize(
    ("reply", "cure"),
    [
        ("MISCONF Redis is configured to save RDB snapshots", "cannot save to its disk"),
        ("NOREPLICAS Not enough good replicas to write.", "min-replicas-to-write"),
        ("READONLY You can't write against a read only replica.", "REPLICAOF NO ONE"),
    ],
)
def test_a_server_that_refuses_writes_is_shown_and_logged_although_nothing_changes(reply: str, cure: str) -> None:
    cluster, balancer = started(3)
    cluster.servers["s2"].refuse = refusing(reply, *WRITES)
    cluster.run(2)
    problem = kinds(balancer)["server_refuses", "s2"]
    assert reply in problem.reason and cure in problem.reason
    cluster.run(10)
    assert list(kinds(balancer)) == [("server_refuses", "s2")]
    cluster.servers["s2"].refuse = None
    cluster.run(2)
    assert kinds(balancer) == {}
    assert logged(balancer, "server_refuses") == ["a problem has begun", "a problem is over"]


def found(kind: str, **more: Any) -> Found:
    return Found(Severity.WARNING, kind, "s1", "because", **more)


def test_since_is_when_it_was_first_seen_unless_more_is_known() -> None:
    health = Health()
    health.look([found("a"), found("b", since=3.0)], 10.0)
    health.look([found("a"), found("b", since=3.0)], 20.0)
    assert {problem.kind: problem.since for problem in health.problems} == {"a": 10.0, "b": 3.0}
    begun, over = health.look([found("b", since=3.0)], 21.0)
    assert (begun, [problem.kind for problem in over]) == ([], ["a"])
    health.look([found("a")], 30.0)
    assert [problem.since for problem in health.problems] == [30.0]


def test_what_does_not_last_is_no_problem_and_errors_come_first() -> None:
    health = Health()
    error = Found(Severity.ERROR, "b", "s1", "worse")
    for now in (10.0, 12.0, 14.9):
        health.look([found("a", after_s=5.0), error], now)
        assert [problem.kind for problem in health.problems] == ["b"]
    [problem], _ = health.look([found("a", after_s=5.0), error], 15.0)
    assert problem.since == 10.0
    assert [problem.kind for problem in health.problems] == ["b", "a"]
