"""What dead servers have goes to others, and nothing else counts as death."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.machine import lease
from dynamoth.machine.events import Send, Tick
from dynamoth.plan.plan import Assignment, Mode, Phase, single
from dynamoth.plan.slots import SLOTS
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.install.dead_servers import DeadServers
from tests.balancer.cluster import NO_DECISIONS, started

OPTIONS = replace(NO_DECISIONS, server_dead_s=2.0)


def test_a_pause_of_the_balancer_itself_makes_no_server_dead() -> None:
    servers = DeadServers(["s1", "s2"], 3.0)
    now = 100.0
    for _ in range(20):
        now += 0.1
        servers.hear("s2")
        servers.tick(now)
    assert not servers.dead
    servers.tick(now + 60.0)  # it was stopped for a minute, and finds nothing but what it knew before
    assert not servers.dead
    for _ in range(10):
        now += 0.1
        servers.hear("s2")
        servers.tick(now + 60.0)
    assert servers.dead == {"s1"}
    servers.hear("s1")
    assert not servers.dead


def test_slots_and_channels_of_a_dead_server_are_shared_among_the_others() -> None:
    cluster, balancer = started(4, OPTIONS)
    replicated, kept = balancer.at_home("s1"), balancer.at_home("s2")
    for channel, mode, servers in ((replicated[0], "all-publishers", "134"), (kept[0], "all-subscribers", "12")):
        named = [f"s{number}" for number in servers]
        assert cluster.ask("replicate", {"channel": channel, "mode": mode, "servers": named}).error is None
    cluster.stop_server("s1")
    cluster.run(OPTIONS.server_dead_s - 0.5)
    assert not balancer.machine.overview.transitions
    cluster.run(2.0)
    plan = balancer.plan
    assert "s1" not in plan.servers_in_use
    assert plan.entry(replicated[0]).route.assignment == Assignment(Mode.ALL_PUBLISHERS, ("s3", "s4"))
    assert plan.entry(kept[0]).route.assignment == single("s2")
    assert {entry.phase for entry in plan.entries.values()} == {Phase.SETTLED}
    slots = balancer.machine.overview.slots_left("s1")
    assert slots == 0
    installer = balancer.machine.leadership.installer
    assert installer is not None
    shares = {server: len(slots) for server, slots in installer.index.slots_at.items()}
    assert sum(shares.values()) == SLOTS
    assert max(shares.values()) - min(shares[each] for each in ("s2", "s3", "s4")) < SLOTS / 8
    [problem] = [each for each in balancer.machine.health.problems if each.kind == "server_unreachable"]
    assert "others have taken over its channels and slots" in problem.reason


def test_with_half_of_the_servers_dead_nothing_changes() -> None:
    cluster, balancer = started(2, OPTIONS)
    version = balancer.plan.version
    cluster.stop_server("s1")
    cluster.run(3 * OPTIONS.server_dead_s)
    assert balancer.plan.version == version
    assert not balancer.machine.overview.transitions


def test_the_lease_is_renewed_before_anything_that_takes_long() -> None:
    """A thousand slots that move cost a busy machine a second, and the lease lasts two."""
    cluster, balancer = started(4, OPTIONS)
    handle = balancer.machine.handle
    together: list[set[bool]] = []

    def watched(event: Any, now: float) -> list[Any]:
        actions = handle(event, now)
        if isinstance(event, Tick):
            tags = [each.tag if isinstance(each, Send) else None for each in actions]
            together.append({tag is not None and tag[0] == lease.TAG for tag in tags})
        return actions

    balancer.machine.handle = watched  # type: ignore[method-assign]
    cluster.stop_server("s1")
    cluster.run(OPTIONS.server_dead_s + 2.0)
    assert "s1" not in balancer.plan.servers_in_use
    assert {True} in together and {False} in together and {True, False} not in together


def test_a_dead_server_that_has_nothing_left_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, balancer = started(4, OPTIONS)
    cluster.stop_server("s1")
    cluster.run(OPTIONS.server_dead_s + 2.0)
    assert "s1" not in balancer.plan.servers_in_use
    looks: list[str] = []
    load = ClusterModel.load

    def counted(self: ClusterModel, server: str, now: float) -> Any:
        looks.append(server)
        return load(self, server, now)

    monkeypatch.setattr(ClusterModel, "load", counted)
    cluster.run(3.0)
    assert len(looks) <= 3 * 4 * 3, "the goals look once per second, not with each tick"
