"""Compatibility rules, as administrators change them: no channel changes its place, and nobody is left behind."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import SimCluster, started

ALL_AT_S1 = BalancerOptions(
    load_ratio_high=1000.0, compatibility=(CompatibilityRule(b"*", "s1"),), plain_rest_s=0.0, rules_rest_s=0.0
)
NO_RULES = BalancerOptions(load_ratio_high=1000.0, plain_rest_s=0.0, rules_rest_s=0.0, join_s=0.0)


def rules(cluster: SimCluster, action: str, pattern: bytes = b"*", **more: Any) -> dict[bytes, bool]:
    reply = cluster.ask("compatibility", {"action": action, "pattern": pattern, **more})
    assert reply.error is None, reply.error
    return {rule["pattern"]: rule["plain"] for rule in reply.result["rules"]}


def refusal(cluster: SimCluster, action: str, pattern: bytes = b"*", **more: Any) -> str:
    return cluster.refusal("compatibility", {"action": action, "pattern": pattern, **more})


def test_a_new_cluster_has_the_rules_of_the_configuration_and_its_successor_those_of_the_plan() -> None:
    cluster, balancer = started(options=ALL_AT_S1)
    assert rules(cluster, "list") == {b"*": True}
    assert rules(cluster, "lift", b"news.*") == {b"news.*": False, b"*": True}
    cluster.kill(balancer)
    cluster.started(NO_RULES)
    assert rules(cluster, "list") == {b"news.*": False, b"*": True}
    stored = [server.plan_or_fail().compatibility for server in cluster.servers.values()]
    assert len(set(stored)) == 1 and stored[0].version > 0


def test_a_change_is_answered_when_every_agent_has_acknowledged_it() -> None:
    cluster, _ = started(options=ALL_AT_S1)
    cluster.agents["s2"].mute = True
    cluster.admin("s1", "compatibility", {"action": "lift", "pattern": b"*"})
    cluster.run(1.5)
    assert not cluster.servers["s1"].replies
    cluster.agents["s2"].mute = False
    cluster.run_until(lambda: bool(cluster.servers["s1"].replies))
    assert cluster.servers["s1"].replies[0].error is None


def test_a_rule_that_would_change_homes_is_refused() -> None:
    cluster, _ = started(options=NO_RULES)
    assert "another home" in refusal(cluster, "add", b"news.*", server="s1")
    with_rules = SimCluster(2)
    with_rules.started(ALL_AT_S1)
    assert "another home" in refusal(with_rules, "remove")
    assert "another home" in refusal(with_rules, "add", b"news.*", server="s2")


def test_in_a_cluster_of_one_any_pattern_may_be_a_rule() -> None:
    cluster, _ = started(1, NO_RULES)
    assert rules(cluster, "add", b"news.*", server="s1") == {b"news.*": True}
    assert rules(cluster, "remove", b"news.*") == {}


def test_one_channel_becomes_plain_where_it_is() -> None:
    cluster, balancer = started(options=NO_RULES)
    home = balancer.plan.entry(b"news").route.assignment.servers[0]
    other = next(id_ for id_ in cluster.servers if id_ != home)
    assert "another home" in refusal(cluster, "add", b"news", server=other)
    assert cluster.ask("move", {"channel": b"news", "to": other}).error is None
    assert "these are elsewhere" in refusal(cluster, "add", b"news", server=home)
    assert rules(cluster, "add", b"news", server=other) == {b"news": True}


def test_channels_that_moved_a_moment_ago_do_not_become_plain_yet() -> None:
    cluster, balancer = started(options=BalancerOptions(load_ratio_high=1000.0, rules_rest_s=0.0, join_s=0.0))
    home = balancer.plan.entry(b"news").route.assignment.servers[0]
    other = next(id_ for id_ in cluster.servers if id_ != home)
    cluster.run(BalancerOptions().plain_rest_s + 1)  # it may have moved before this balancer came, too
    assert cluster.ask("move", {"channel": b"news", "to": other}).error is None
    assert "try again in" in refusal(cluster, "add", b"news", server=other)
    cluster.run(BalancerOptions().plain_rest_s + 1)
    assert rules(cluster, "add", b"news", server=other) == {b"news": True}


def test_no_channel_moves_right_after_a_change_of_rules() -> None:
    cluster, _ = started(
        options=BalancerOptions(load_ratio_high=1000.0, compatibility=ALL_AT_S1.compatibility, join_s=0.0)
    )
    rules(cluster, "lift")
    assert "publishers hear of it first: try again" in cluster.refusal("move", {"channel": b"news", "to": "s2"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "explode", "pattern": b"*"}, "not 'explode'"),
        ({"action": "add", "pattern": "text", "server": "s1"}, "pattern \\(bytes\\)"),
        ({"action": "add", "pattern": b"*"}, "server \\(text\\)"),
        ({"action": "add", "pattern": b"x" * 300, "server": "s1"}, "1 to 256 bytes"),
        ({"action": "add", "pattern": b"*", "server": "s9"}, "'s9' is not known"),
        ({"action": "lift", "pattern": b"nothing"}, "no compatibility rule"),
        ({"action": "remove", "pattern": b"nothing"}, "there are: none"),
    ],
)
def test_requests_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    cluster, _ = started(1, NO_RULES)
    error = cluster.refusal("compatibility", arguments)
    assert re.search(message, error), error


def test_a_balancer_that_loses_the_lease_answers_a_change_of_rules_all_the_same() -> None:
    cluster, balancer = started(options=ALL_AT_S1)
    cluster.agents["s2"].mute = True
    cluster.admin("s1", "compatibility", {"action": "lift", "pattern": b"*"})
    cluster.run()
    balancer.process.pause()
    cluster.run(4.8)
    balancer.process.resume()
    cluster.run(0.05)
    assert any("lost the lease" in note.message for note in balancer.notes) and not cluster.servers["s1"].replies
    cluster.run_until(lambda: bool(cluster.servers["s1"].replies))
    assert "the agent of s2 to acknowledge" in (cluster.servers["s1"].replies[0].error or "")
