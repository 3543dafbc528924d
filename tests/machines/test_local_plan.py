"""What one client knows of the plan."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

from dynamoth.plan.plan import Plan, Route, Server, single
from dynamoth.protocol.stored_plan import StoredEntry
from dynamoth_client.machines.local_plan import LocalPlan
from tests.machines.helpers import ACTIVE, PLAN_0, SERVERS, C, channel_at

HOME = Route(0, single("s1"))
IDLE_S = 100.0


def learned(plan: LocalPlan, *channels: bytes, now: float = 0.0) -> None:
    for channel in channels:
        assert plan.learn(channel, Route(1, single("s2")), now)


def test_learns_newer_routes_only() -> None:
    plan = LocalPlan(PLAN_0)
    assert (plan.route(C), plan.epoch(C)) == (HOME, 0)
    assert not plan.learn(C, Route(9, single("s9")), 0.0), "the plan does not list this server"
    assert plan.learn(C, Route(5, single("s2")), 0.0)
    for stale in (Route(4, single("s3")), Route(5, single("s3")), HOME):
        assert not plan.learn(C, stale, 0.0)
    assert plan.route(C) == Route(5, single("s2"))
    assert plan.home(C) == HOME


def test_takes_a_newer_header_only() -> None:
    older = replace(PLAN_0, servers={**PLAN_0.servers, "s9": Server("s9", "redis://s9:6379")})
    plan = LocalPlan(ACTIVE)
    plan.update_header(older)
    assert set(plan.servers) == {"s1", "s2", "s3"}
    newer = Plan(7, {"s1": SERVERS[0]}, ("s1",))
    plan.update_header(newer)
    assert (plan.version, set(plan.servers)) == (7, {"s1"})


def test_a_header_with_another_ring_is_never_older() -> None:
    """All servers have lost the plan; whatever its version, the new one holds."""
    plan = LocalPlan(ACTIVE)
    another_plan = replace(PLAN_0, base=("s2",))
    assert plan.has_other_ring(StoredEntry(0, None, ring=another_plan.ring_mark))
    assert not plan.has_other_ring(StoredEntry(0, None, ring=PLAN_0.ring_mark))
    assert not plan.has_other_ring(StoredEntry(0, None)), "an older balancer has written it"
    plan.update_header(another_plan)
    assert plan.home(C) == Route(0, single("s2"))
    assert not plan.has_other_ring(StoredEntry(0, None, ring=b"forged")), "its header has been read"


def test_follows_no_route_to_a_server_that_a_newer_header_does_not_list() -> None:
    """Whoever follows it would look for the URL of a server that is not there."""
    plan = LocalPlan(PLAN_0)
    plan.learn(C, Route(5, single("s2")), 0.0)
    plan.update_header(Plan(7, {"s1": SERVERS[0]}, ("s1",)))
    assert plan.reachable(plan.route(C))


def test_distrust_puts_the_truth_in_the_place_of_a_hint() -> None:
    plan = LocalPlan(PLAN_0)
    plan.learn(C, Route(99, single("s3")), 0.0)
    plan.distrust(C, Route(4, single("s2")))
    assert plan.route(C) == Route(4, single("s2"))
    plan.distrust(C, HOME)
    assert plan.route(C) == HOME
    assert plan.learn(C, Route(1, single("s2")), 0.0)


def test_forgets_a_route_that_nobody_uses() -> None:
    plan = LocalPlan(PLAN_0, entry_idle_s=IDLE_S)
    used, pinned = channel_at("s1", 1), channel_at("s1", 2)
    learned(plan, C, used, pinned)
    plan.pin(pinned)
    plan.use(used, IDLE_S - 1)
    learned(plan, channel_at("s1", 3), now=IDLE_S)
    assert plan.epoch(C) == 0
    assert plan.epoch(used) == plan.epoch(pinned) == 1


def test_a_route_may_be_forgotten_once_its_last_subscription_has_ended() -> None:
    plan = LocalPlan(PLAN_0, entry_idle_s=IDLE_S)
    learned(plan, C)
    plan.pin(C)
    plan.pin(C)
    plan.unpin(C, 0.0)
    learned(plan, channel_at("s1", 1), now=IDLE_S)
    assert plan.epoch(C) == 1
    plan.unpin(C, IDLE_S)
    learned(plan, channel_at("s1", 2), now=2 * IDLE_S - 1)
    assert plan.epoch(C) == 1
    learned(plan, channel_at("s1", 3), now=2.5 * IDLE_S)
    assert plan.epoch(C) == 0


def test_past_its_bound_the_oldest_go_first() -> None:
    plan = LocalPlan(PLAN_0, entries_max=8)
    names = [channel_at("s1", number) for number in range(10)]
    plan.pin(names[0])
    for now, name in enumerate(names):
        learned(plan, name, now=float(now))
    assert [plan.epoch(name) for name in names] == [1, 0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_learning_stays_cheap_when_subscriptions_alone_exceed_the_bound() -> None:
    def cost_s(channels: int) -> float:
        plan = LocalPlan(PLAN_0, entries_max=10)
        names = [b"%d" % number for number in range(channels)]
        started = process_time()
        for name in names:
            plan.pin(name)
            plan.learn(name, Route(1, single("s2")), 0.0)
        return process_time() - started

    few, many = (min(cost_s(size) for _ in range(3)) for size in (200, 1600))
    assert many < 8 * few * 3, f"8 times the channels cost {many / few:.0f} times as much"
