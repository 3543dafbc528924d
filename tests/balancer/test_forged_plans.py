"""What somebody else has written to the stored plan: it is reported and repaired, and no balancer fails to start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from dynamoth.names import PLAN_KEY
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, Entry, Phase, Plan, Route, Server, single
from dynamoth.protocol.control import PlanQuery
from dynamoth_balancer.install.leadership import Stage
from tests.balancer.cluster import NO_DECISIONS, Balancer, SimCluster, started

EVIL = Server("evil", "redis://evil.example.org")


Forgery = Callable[[Plan], Plan]


def moved_entry(plan: Plan) -> Entry:
    """Return the entry of the real channel, at the other one of two servers."""
    real = plan.entries[b"real"]
    to = "s1" if real.route.assignment == single("s2") else "s2"
    return replace(real, route=replace(real.route, assignment=single(to)))


def stolen(plan: Plan, server: str) -> Entry:
    return Entry(Route(plan.version, single(server)), Phase.SETTLED)


def with_entry(channel: bytes, entry: Entry, plan: Plan) -> Plan:
    return replace(plan, entries={**plan.entries, channel: entry})


def with_server_more(plan: Plan) -> Plan:
    return replace(plan, servers={**plan.servers, "evil": EVIL})


def with_other_url(plan: Plan) -> Plan:
    return replace(plan, servers={**plan.servers, "s1": Server("s1", EVIL.url)})


FORGERIES: dict[str, Forgery] = {
    "a server more": with_server_more,
    "another URL": with_other_url,
    "another ring": lambda plan: replace(plan, base=("s1", "s2")),
    "an evil ring": lambda plan: replace(with_server_more(plan), base=("evil", "s1", "s2")),
    "other virtual nodes": lambda plan: replace(plan, virtual_nodes=plan.virtual_nodes + 1),
    "an evil channel": lambda plan: with_entry(b"stolen", stolen(plan, "evil"), with_server_more(plan)),
    "the last version": lambda plan: replace(plan, version=EPOCH_MAX),
}

UNDER_THE_SAME_VERSION: dict[str, Forgery] = {
    "another place": lambda plan: with_entry(b"real", moved_entry(plan), plan),
    "a channel more": lambda plan: with_entry(b"stolen", stolen(plan, "s1"), plan),
    "another channel": lambda plan: replace(plan, entries={b"stolen": stolen(plan, "s1")}),
    "rules": lambda plan: plan.following(Compatibility(plan.version, (CompatibilityRule(b"*", "s1"),))),
}
"""Nothing in such a copy shows that no balancer can have written it."""


def forge(cluster: SimCluster, forgery: Forgery, *servers: str, newer_by: int = 0) -> None:
    for id_ in servers:
        forged = forgery(cluster.servers[id_].plan_or_fail())
        cluster.servers[id_].put_plan(replace(forged, version=min(forged.version + newer_by, EPOCH_MAX)))


def reported(balancer: Balancer) -> bool:
    return any(note.level == "error" and "plan" in note.message for note in balancer.notes)


def check_right(cluster: SimCluster, balancer: Balancer, good: Plan) -> None:
    """The plan is what it was, everywhere, and can be changed."""
    cluster.run(10)
    assert balancer.machine.stage is Stage.LEADING
    for server in cluster.servers.values():
        assert server.plan == balancer.plan
    assert dict(balancer.plan.servers) == {server.id: server for server in cluster.configured()}
    assert (balancer.plan.base, balancer.plan.virtual_nodes) == (good.base, good.virtual_nodes)
    assert b"stolen" not in balancer.plan.entries
    assert balancer.plan.entries[b"real"].route == good.entries[b"real"].route
    moved(cluster, balancer)


def moved(cluster: SimCluster, balancer: Balancer) -> Plan:
    """Move the real channel, and return the plan after that."""
    to = "s1" if balancer.home(b"real") == "s2" else "s2"
    assert cluster.ask("move", {"channel": b"real", "to": to}, server="s3").error is None
    cluster.run(1)
    return balancer.plan


def add_rule(cluster: SimCluster, balancer: Balancer, channel: bytes) -> None:
    """Add a compatibility rule for a channel that the plan names."""
    rule = {"action": "add", "pattern": channel, "server": balancer.home(channel), "plain": False}
    assert cluster.ask("compatibility", rule).error is None
    assert channel in [each.pattern for each in balancer.plan.compatibility.rules]
    cluster.run(10)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_copy_is_repaired_while_the_balancer_leads(forgery: Forgery, newer: bool) -> None:
    cluster, balancer = started(3)
    good = moved(cluster, balancer)
    forge(cluster, forgery, "s3", newer_by=7 if newer else 0)
    check_right(cluster, balancer, good)
    assert reported(balancer)


@pytest.mark.parametrize("forgery", UNDER_THE_SAME_VERSION.values(), ids=UNDER_THE_SAME_VERSION)
def test_a_copy_that_was_changed_under_its_version_is_repaired_while_the_balancer_leads(forgery: Forgery) -> None:
    cluster, balancer = started(3)
    good = moved(cluster, balancer)
    forge(cluster, forgery, "s3")
    check_right(cluster, balancer, good)
    assert reported(balancer)
    assert balancer.machine.overview.all_counters()["copies_conflicting"] == 1


def test_the_agent_reads_a_repaired_copy_again_though_its_version_is_the_same() -> None:
    cluster, balancer = started(3)
    moved(cluster, balancer)
    agent = cluster.agents["s3"]
    forge(cluster, partial(with_entry, b"real", moved_entry(balancer.plan)), "s3")
    agent.restart()
    agent.plan = cluster.servers["s3"].plan
    assert agent.plan != balancer.plan
    cluster.run_until(lambda: agent.plan == balancer.plan)


def test_a_doubt_is_repeated_until_an_agent_hears_of_it() -> None:
    cluster, balancer = started(3)
    good = moved(cluster, balancer)
    agent, doubts = cluster.agents["s3"], 0

    def lose(message: object) -> bool:
        nonlocal doubts
        doubts += isinstance(message, PlanQuery) and message.is_doubtful
        return False

    agent.lose = lose
    cluster.listen("s3", 0)
    forge(cluster, partial(with_entry, b"real", moved_entry(balancer.plan)), "s3")
    cluster.run_until(lambda: cluster.servers["s3"].plan == good)
    cluster.run(3)
    cluster.listen("s3", 1)
    cluster.run_until(lambda: doubts > 0)
    cluster.run(10)
    assert doubts == 1


def test_an_entry_above_the_version_is_left_out_and_the_channel_can_be_moved() -> None:
    """No balancer can have written it, and no later change of the channel would be newer."""
    cluster, balancer = started(3)
    good = moved(cluster, balancer)
    last = replace(good.entries[b"real"], route=replace(good.entries[b"real"].route, epoch=EPOCH_MAX))
    cluster.kill(balancer)
    for server in ("s1", "s3"):
        forge(cluster, partial(with_entry, b"real", last), server)
    cluster.run(10)
    check_right(cluster, cluster.started(NO_DECISIONS), good)


@pytest.mark.parametrize("forged_at", [("s1",), ("s1", "s2", "s3")], ids="+".join)
def test_rules_above_the_version_are_left_out_and_rules_can_be_changed(forged_at: tuple[str, ...]) -> None:
    """No balancer can have written them, and no later rules would be newer."""
    cluster, first = started(3)
    good = moved(cluster, first)
    add_rule(cluster, first, b"real")
    known = first.plan.compatibility
    cluster.kill(first)
    last = Compatibility(EPOCH_MAX, (CompatibilityRule(b"evil.*", "s2"),))
    forge(cluster, lambda plan: plan.following(last), *forged_at)
    cluster.run(10)
    balancer = cluster.started(NO_DECISIONS)
    assert any("compatibility rules are left out" in str(note.details) for note in balancer.notes)
    if len(forged_at) == 1:
        assert balancer.plan.compatibility == known
    else:
        assert balancer.plan.compatibility == Compatibility(balancer.plan.version), "clients give the old ones up"
    check_right(cluster, balancer, good)
    cluster.run(10)
    before = balancer.plan.compatibility.version
    to = "s1" if balancer.home(b"other") == "s2" else "s2"
    assert cluster.ask("move", {"channel": b"other", "to": to}).error is None
    cluster.run(20)
    add_rule(cluster, balancer, b"other")
    assert balancer.plan.compatibility.version > before


def test_the_entries_of_a_large_plan_are_looked_at_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamoth_balancer.install.copies.ENTRIES_PER_COMMAND", 50)
    keeps_entries = replace(NO_DECISIONS, fold_interval_s=1e6)
    cluster, balancer = started(3)
    entry = Entry(Route(balancer.plan.version + 1, single("s1")), Phase.SETTLED)
    entries = {b"many.%d" % number: entry for number in range(110)}
    large = replace(balancer.plan, version=balancer.plan.version + 1, entries=entries)
    cluster.kill(balancer)
    for server in cluster.servers.values():
        server.put_plan(large)
    cluster.run(60)
    balancer = cluster.started(keeps_entries)
    for channel in (b"many.0", b"many.100", b"many.5"):
        elsewhere = replace(entry, route=Route(entry.route.epoch, single("s2")))
        forge(cluster, partial(with_entry, channel, elsewhere), "s3")
        cluster.run_until(lambda: cluster.servers["s3"].plan == balancer.plan)
    assert balancer.machine.overview.all_counters()["copies_conflicting"] == 3


def test_a_plan_that_is_right_is_not_written_again() -> None:
    cluster, balancer = started(3)
    moved(cluster, balancer)
    cluster.run(5)
    before = len(balancer.notes)
    for server in cluster.servers.values():
        server.executed.clear()
    cluster.run(30)
    assert balancer.notes[before:] == []
    for server in cluster.servers.values():
        done = {args[0] for args in server.executed}
        assert b"HLEN" in done and not done & {b"HSET", b"RENAME"}, f"{server.id}: {done}"


def check_restart(damage: Callable[[SimCluster], None]) -> Balancer:
    """Damage what a balancer has stored, let another one start, and see that it repairs the damage."""
    cluster, first = started(3)
    good = moved(cluster, first)
    cluster.kill(first)
    damage(cluster)
    cluster.run(60)
    second = cluster.start(NO_DECISIONS)
    cluster.run_until(lambda: second.machine.stage is Stage.LEADING)
    check_right(cluster, second, good)
    return second


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("at", ["s1", "s3"])
def test_a_balancer_starts_in_spite_of_a_forged_copy_and_repairs_it(forgery: Forgery, at: str) -> None:
    second = check_restart(lambda cluster: forge(cluster, forgery, at))
    if forgery is not with_other_url:  # which may as well be an older configuration
        assert reported(second)
        assert second.machine.overview.all_counters()["copies_conflicting"] >= 1


def test_the_servers_of_the_plan_are_those_that_most_copies_of_its_newest_version_list() -> None:
    assert reported(check_restart(lambda cluster: forge(cluster, with_server_more, "s2")))


@pytest.mark.parametrize("at", [("s1",), ("s1", "s2", "s3")])
def test_an_entry_that_cannot_be_read_costs_no_other_entry(at: tuple[str, ...]) -> None:
    def damage(cluster: SimCluster) -> None:
        for id_ in at:  # the first is the one that is read as a whole
            cluster.servers[id_].put(PLAN_KEY, {b"c:garbage": b"\x91" * 500}, keep=True)

    second = check_restart(damage)
    if len(at) == 3:
        assert reported(second)
        assert any("garbage" in str(note.details) for note in second.notes)


def test_an_entry_that_cannot_be_read_at_one_server_comes_from_another() -> None:
    check_restart(lambda cluster: cluster.servers["s1"].put(PLAN_KEY, {b"c:real": b"\xc1"}, keep=True))
