"""Servers are drained, and taken back, by command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamoth.plan.plan import single
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import SimCluster, started

OPTIONS = BalancerOptions(wait_s=4.0, averaging_s=3.0, channel_rest_s=5.0)


def _server(cluster: SimCluster, action: str, server: object) -> str:
    """Ask for a change of a server; return why it was refused, or the note."""
    reply = cluster.ask("server", {"action": action, "server": server}, server="s2")
    return reply.result["note"] if reply.error is None else reply.error


def _is_empty(cluster: SimCluster, server: str) -> bool:
    status = cluster.ask("status", server="s2").result["servers"][server]
    return (status["draining"], status["channels_left"], status["slots_left"]) == (True, 0, 0)


def test_a_server_is_drained_by_command_and_a_later_balancer_goes_on() -> None:
    cluster, before = started(3, OPTIONS)
    assert _server(cluster, "drain", "s1") == ""
    stored = [server.plan_or_fail().administration.draining for server in cluster.servers.values()]
    assert sum("s1" in draining for draining in stored) >= 2, "the answer says that it is stored"
    cluster.run(10)
    balancer = cluster.succeed(before, OPTIONS)
    assert balancer.plan.administration.draining == {"s1"}
    cluster.run_until(lambda: _is_empty(cluster, "s1"), timeout_s=300)
    version = balancer.plan.version
    assert _server(cluster, "drain", "s1") == "it is being drained already" and balancer.plan.version == version
    assert _server(cluster, "undrain", "s1") == ""
    assert balancer.plan.administration.draining == frozenset()
    cluster.run_until(lambda: any(e.route.assignment == single("s1") for e in balancer.plan.entries.values()), 300)
    assert _server(cluster, "undrain", "s1") == "it is not being drained"


def test_a_replication_that_an_administrator_has_asked_for_leaves_a_server_that_is_drained() -> None:
    cluster, balancer = started(3, replace(OPTIONS, replicas_max=1, load_ratio_high=1000.0))
    assert cluster.ask("replicate", {"channel": b"c", "mode": "all-subscribers", "servers": ["s1", "s2"]}).error is None
    assert _server(cluster, "drain", "s1") == ""
    cluster.run_until(lambda: "s1" not in balancer.plan.entry(b"c").route.assignment.servers, timeout_s=300)


@pytest.mark.parametrize(
    ("action", "server", "reason"),
    [
        ("drain", "s9", "server 's9' is not known; known are s1, s2"),
        ("undrain", "s9", "server 's9' is not known; known are s1, s2"),
        ("drain", 1, "server must be the id of a server (text), not 1"),
        ("explode", "s1", "action must be drain or undrain, not 'explode'"),
        ("drain", "s2", "server s2 cannot be drained, as all others are being drained, and its channels would have"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(action: str, server: object, reason: str) -> None:
    cluster, balancer = started(2, OPTIONS)
    assert _server(cluster, "drain", "s1") == ""
    administration = balancer.plan.administration
    assert _server(cluster, action, server).startswith(reason)
    assert balancer.plan.administration == administration


def test_the_only_server_is_not_drained() -> None:
    cluster, _ = started(1, OPTIONS)
    error = cluster.ask("server", {"action": "drain", "server": "s1"}).error
    assert error is not None and "as it is the only one" in error and "'dynamoth server add'" in error


def test_the_configuration_begins_a_cluster_and_is_not_used_after_a_command() -> None:
    configured = replace(OPTIONS, draining=frozenset({"s1"}))
    cluster, before = started(3, configured)
    assert before.plan.administration.draining == {"s1"}
    assert _server(cluster, "undrain", "s1") == ""
    balancer = cluster.succeed(before, configured)
    cluster.run(5)
    assert balancer.plan.administration.draining == frozenset()
    [note] = [note for note in balancer.notes if "draining = true is not used" in note.message]
    assert note.details == {"configured": ["s1"], "plan": []}
