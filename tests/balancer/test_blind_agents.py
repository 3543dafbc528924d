"""An agent that does not see what is published: it is shown, its server is relieved, and gets no channels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamoth.protocol.reports import ChannelColumns, ChannelSums, Report
from dynamoth_balancer.decide.model import BLINDING_INTERRUPTIONS, ClusterModel
from dynamoth_balancer.options import INTERRUPTIONS_WINDOW_S, BalancerOptions
from dynamoth_balancer.process.metrics import make_registry
from tests.balancer.cluster import Balancer, SimCluster
from tests.balancer.traffic import CAPACITY

QUICK = BalancerOptions(wait_s=2.0, averaging_s=3.0, channel_rest_s=5.0, join_s=0.0)


class Blindness:
    """What the agent of s1 reports of itself: since ``blind_since``, that it sees nothing."""

    blind_since: float | None = None
    interruptions = 0

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        cluster.agents["s1"].amend = self._amend

    def _amend(self, report: Report) -> Report:
        report = replace(report, interruptions=self.interruptions)
        if self.blind_since is None:
            return report
        blind_s = self._cluster.now - self.blind_since
        return replace(report, observing=False, blind_s=blind_s, columns=ChannelColumns(), rest=ChannelSums())


def started(options: BalancerOptions = QUICK, servers: int = 3) -> tuple[SimCluster, Balancer, Blindness]:
    """Start a cluster with channels of little load at each server; return also the agent of s1."""
    cluster = SimCluster(servers)
    agent = Blindness(cluster)
    balancer = cluster.started(options)
    for channel in balancer.at_home("s1", 4):
        cluster.follow[channel] = CAPACITY // 20
    cluster.run(5)
    assert not balancer.decided
    return cluster, balancer, agent


def moved(balancer: Balancer) -> list[tuple[str, str]]:
    return [(move.source, move.target) for decided in balancer.decided for move in decided.decision.moves]


def test_a_blind_agent_is_overload_and_its_server_is_relieved_by_what_was_known_before() -> None:
    cluster, balancer, agent = started()
    agent.blind_since = cluster.now
    cluster.run(1)
    [problem] = balancer.machine.health.errors
    assert (problem.kind, problem.subject) == ("agent_blind", "s1")
    assert agent.blind_since - 0.5 <= problem.since <= agent.blind_since + 0.5
    assert "does not see what is published" in problem.reason
    cluster.run(20)
    assert moved(balancer) and {source for source, _ in moved(balancer)} == {"s1"}
    reasons = {move.reason for decided in balancer.decided for move in decided.decision.moves}
    assert reasons == {"the agent of s1 does not see what is published there, so s1 is overloaded"}
    assert all(target != "s1" for _, target in moved(balancer))


def test_a_blind_agent_that_falls_silent_stays_blind_in_the_metrics() -> None:
    cluster, balancer, agent = started()
    registry = make_registry(balancer.machine, lambda: cluster.now)

    def metric(name: str) -> float | None:
        return registry.get_sample_value(f"dynamoth_balancer_{name}", {"server": "s1"})

    assert metric("agent_blind") == 0.0
    agent.blind_since = cluster.now
    cluster.run(1)
    cluster.agents["s1"].alive = False
    cluster.run(30)
    assert {problem.kind for problem in balancer.machine.health.errors} == {"agent_silent"}
    assert metric("agent_blind") == 1.0 and metric("load_ratio") is not None, "an alert does not end by silence"


def test_how_long_the_blindness_lasts_does_not_wear_out_what_is_known() -> None:
    cluster, balancer, agent = started(replace(QUICK, wait_s=60.0))
    cluster.ask("pause")
    agent.blind_since = cluster.now
    cluster.run(100)
    cluster.ask("resume")
    cluster.run(3)
    assert {source for source, _ in moved(balancer)} == {"s1"}


def test_no_channel_goes_to_a_server_whose_agent_is_blind() -> None:
    cluster, balancer, agent = started(servers=2)
    agent.blind_since = cluster.now
    for channel in balancer.at_home("s2", 4):
        cluster.follow[channel] = CAPACITY // 3
    cluster.run(60)
    assert not [target for _, target in moved(balancer) if target == "s1"], "s2 is overloaded, and s1 looks idle"
    [channel] = balancer.at_home("s2", 1)
    reply = cluster.ask("move", {"channel": channel, "to": "s1"}, server="s2")
    assert reply.error is not None and "server s1 takes no channels now: its agent does not see" in reply.error
    arguments = {"channel": channel, "mode": "all-publishers", "servers": ["s1", "s2"]}
    assert cluster.ask("replicate", arguments, server="s2").error is not None
    agent.blind_since = None
    cluster.run(10)
    assert cluster.ask("status").result["problems"] == [] or balancer.machine.health.errors == []
    assert any(target == "s1" for _, target in moved(balancer)), "it takes part again"


def test_an_agent_that_is_disconnected_again_and_again_is_blind_though_its_reports_come() -> None:
    cluster, balancer, agent = started()
    agent.interruptions += 1
    cluster.run(3)
    assert balancer.machine.health.errors == [], "one lost connection happens to anybody"
    agent.interruptions += 1
    cluster.run(1)
    [problem] = balancer.machine.health.errors
    assert problem.kind == "agent_blind" and "lost its connection 2 times in 30 s" in problem.reason
    cluster.run(INTERRUPTIONS_WINDOW_S + 1)
    assert balancer.machine.health.errors == [], "no more interruptions: it sees"


@pytest.mark.parametrize(
    ("before", "restarts", "after", "is_blind"),
    [
        (0, False, 50, True),
        (0, True, BLINDING_INTERRUPTIONS - 1, False),  # it counts from 0 again
        (50, False, 50, False),  # what was before the balancer started is no news
        (50, False, 50 + BLINDING_INTERRUPTIONS, True),
    ],
)
def test_interruptions_count_from_the_first_report_on(before: int, restarts: bool, after: int, is_blind: bool) -> None:
    model = ClusterModel(["s1"], averaging_s=10.0)
    agent = SimCluster(1).agents["s1"]
    model.report(replace(agent.report(), interruptions=before), 10.0)
    assert model.blindness("s1") is None
    if restarts:
        agent.restart()
    model.report(replace(agent.report(), interruptions=after), 11.0)
    assert (model.blindness("s1") is not None) is is_blind


@pytest.mark.parametrize("known", [True, False])
def test_the_load_of_a_blind_server_is_at_least_high_also_where_nothing_was_known(known: bool) -> None:
    cluster = SimCluster(2)
    agent = Blindness(cluster)
    if not known:
        agent.blind_since = cluster.now - 5
    balancer = cluster.started(QUICK)
    cluster.run(5)
    agent.blind_since = agent.blind_since or cluster.now
    cluster.run(5)
    [problem] = [each for each in balancer.machine.health.problems if each.kind == "goal_unreached"]
    assert problem.subject == "s1" and "load ratio 0.81" in problem.reason
    assert "its agent has not seen which channels make the load" in problem.reason
