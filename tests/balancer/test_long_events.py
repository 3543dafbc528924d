"""No event of the balancer takes long, however many channels and slots move: its lease is renewed in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from dynamoth.plan.plan import Plan, Server, single
from dynamoth.plan.slots import slot_name
from dynamoth_balancer.decide import samples
from dynamoth_balancer.decide.tidy import SilentChannels
from dynamoth_balancer.events import PlanChanged
from dynamoth_balancer.install.book import HISTORY_ENTRIES_MAX, HISTORY_MAX, PlanBook
from dynamoth_balancer.install.installer import Installer, Transition
from tests.balancer.cluster import NO_DECISIONS, Balancer, started

MOST = 100
OPTIONS = replace(NO_DECISIONS, changes_per_event_max=MOST, server_dead_s=2.0)


def _largest(balancer: Balancer, since: int) -> int:
    """Return the most changes in one version of the plan."""
    return max(len(change.channels) for change in balancer.taken(PlanChanged)[since:])


def test_what_a_dead_server_had_is_taken_over_part_by_part_without_a_pause() -> None:
    cluster, balancer = started(4, OPTIONS)
    slots = balancer.plan.ring.slots["s1"]
    since = len(balancer.taken(PlanChanged))
    cluster.stop_server("s1")
    cluster.run_until(lambda: bool(balancer.machine.overview.transitions))
    assert balancer.machine.overview.transitions == len(slots), "all at one moment"
    cluster.run_until(lambda: cluster.is_quiet(balancer))
    assert "s1" not in balancer.plan.servers_in_use
    assert _largest(balancer, since) == MOST


def test_slots_of_drained_servers_leave_in_steps_and_those_that_wait_are_no_problem() -> None:
    cluster, balancer = started(4, replace(OPTIONS, averaging_s=3.0, wait_s=1.0))
    since = len(balancer.taken(PlanChanged))
    for server in ("s1", "s2"):
        assert cluster.ask("server", {"action": "drain", "server": server}, server="s3").error is None
    cluster.run_until(lambda: not {"s1", "s2"} & balancer.plan.servers_in_use, timeout_s=300)
    assert _largest(balancer, since) == MOST
    assert not [finding for made in balancer.decided for finding in made.decision.findings]


def test_moves_that_a_failed_agent_stops_are_undone_part_by_part() -> None:
    cluster, balancer = started(2, OPTIONS)
    channels = balancer.at_home("s1", 2 * MOST + 50)
    cluster.agents["s2"].alive = False
    for request, channel in enumerate(channels):
        cluster.admin("s1", "move", {"channel": channel, "to": "s2"}, request)
    cluster.run_until(lambda: balancer.machine.overview.transitions == len(channels))
    cluster.run_until(lambda: not balancer.machine.overview.transitions)
    assert all(balancer.home(channel) == "s1" for channel in channels)
    undone = [len(change.channels) for change in balancer.taken(PlanChanged) if "has failed" in change.reason]
    assert undone == [MOST, MOST, 50]


def test_slots_that_need_the_same_are_looked_at_once() -> None:
    cluster, balancer = started(4, replace(OPTIONS, changes_per_event_max=10_000))
    waiting_for = Installer.waiting_for
    looks: list[Transition] = []

    def counted(self: Installer, transition: Transition, now: float) -> Any:
        looks.append(transition)
        return waiting_for(self, transition, now)

    with patch.object(Installer, "waiting_for", counted):
        cluster.stop_server("s1")
        cluster.run_until(lambda: bool(balancer.machine.overview.transitions))
        slots = balancer.machine.overview.transitions
        cluster.run_until(lambda: cluster.is_quiet(balancer))
    assert slots > 500
    assert len(looks) < slots / 5, "a look at one of each kind, each time that something has happened"


def test_looking_for_silent_channels_adds_up_no_reports() -> None:
    cluster, balancer = started(3, replace(OPTIONS, averaging_s=3.0))
    channels = balancer.at_home("s1", 2)
    for channel in channels:
        assert cluster.ask("move", {"channel": channel, "to": "s2"}).error is None
    cluster.follow[channels[0]] = 1000
    cluster.run(10.0)
    with patch.object(samples, "_sums", side_effect=AssertionError("the reports of a server are added up")):
        model, plan = balancer.machine.overview.model, balancer.plan
        looked = SilentChannels(silent_s=1.0)
        for second in range(5):
            looked.look(plan, model.is_busy, float(second))
        assert [stray.rate.channel for stray in looked.returning(plan, 5.0)] == channels[1:]


def test_a_server_that_is_many_versions_behind_gets_a_change() -> None:
    plan = Plan.initial([Server("s1", "redis://s1"), Server("s2", "redis://s2")])
    book = PlanBook(plan, {})
    channels = [b"c%d" % number for number in range(HISTORY_MAX)]
    for channel in channels:
        book.advance(book.plan.begin({channel: single(_other(book.plan, channel))}), [channel])
    change = book.change_from(0)
    assert change is not None and set(change.delta.entries) == set(channels) and change.new_fields == len(channels)
    assert plan.apply(change.delta) == book.plan
    book.advance(book.plan.activate(channels[:1]), channels[:1])
    assert book.change_from(0) is None, "the history is bounded by versions"
    assert book.change_from(1) is not None


def test_the_history_of_large_changes_is_short() -> None:
    slots = [slot_name(number) for number in range(4096)]
    plan = Plan.initial([Server("s1", "redis://s1"), Server("s2", "redis://s2")])
    book, versions = PlanBook(plan, {}), 0
    while versions <= HISTORY_ENTRIES_MAX / len(slots):
        begun = book.plan.begin({slot: single(_other(book.plan, slot)) for slot in slots})
        for step in (begun, begun.activate(slots), begun.activate(slots).settle(slots)):
            book.advance(_numbered(step, book.plan.version + 1), slots)
            versions += 1
    assert book.change_from(0) is None
    assert book.change_from(book.plan.version - 3) is not None


def _other(plan: Plan, name: bytes) -> str:
    return {"s1": "s2", "s2": "s1"}[plan.entry(name).route.assignment.servers[0]]


def _numbered(plan: Plan, version: int) -> Plan:
    return replace(plan, version=version)
