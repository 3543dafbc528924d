"""What somebody else has written to the stored plan: it is reported and repaired, and no balancer fails to start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from dynamoth.names import PLAN_KEY
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, Entry, Phase, Plan, Route, Server, single
from dynamoth.protocol.stored_plan import ENTRIES_PER_COMMAND
from dynamoth_balancer.machine import Stage
from tests.balancer.cluster import Balancer, SimCluster
from tests.balancer.test_installation import NO_DECISIONS

EVIL = Server("evil", "redis://evil.example.org")


def with_server_more(plan: Plan) -> Plan:
    return replace(plan, servers={**plan.servers, "evil": EVIL})


def with_other_url(plan: Plan) -> Plan:
    return replace(plan, servers={**plan.servers, "s1": Server("s1", EVIL.url)})


def with_other_ring(plan: Plan) -> Plan:
    return replace(plan, base=("s1", "s2"))


def with_evil_ring(plan: Plan) -> Plan:
    return replace(with_server_more(plan), base=("evil", "s1", "s2"))


def with_other_nodes(plan: Plan) -> Plan:
    return replace(plan, virtual_nodes=plan.virtual_nodes + 1)


def with_evil_channel(plan: Plan) -> Plan:
    entry = Entry(Route(plan.version, single("evil")), Phase.SETTLED)
    return replace(with_server_more(plan), entries={**plan.entries, b"stolen": entry})


def with_other_place(plan: Plan) -> Plan:
    real = plan.entries[b"real"]
    to = "s1" if real.route.assignment == single("s2") else "s2"
    return replace(
        plan, entries={**plan.entries, b"real": replace(real, route=replace(real.route, assignment=single(to)))}
    )


def with_channel_more(plan: Plan) -> Plan:
    entry = Entry(Route(plan.version, single("s1")), Phase.SETTLED)
    return replace(plan, entries={**plan.entries, b"stolen": entry})


def with_other_channel(plan: Plan) -> Plan:
    entry = Entry(Route(plan.version, single("s1")), Phase.SETTLED)
    return replace(plan, entries={b"stolen": entry})


def with_rules(plan: Plan) -> Plan:
    return plan.following(Compatibility(plan.version + 1, (CompatibilityRule(b"*", "s1"),)))


def with_entry(channel: bytes, entry: Entry, plan: Plan) -> Plan:
    return replace(plan, entries={**plan.entries, channel: entry})


def with_last_version(plan: Plan) -> Plan:
    return replace(plan, version=EPOCH_MAX)


FORGERIES = (
    with_server_more,
    with_other_url,
    with_other_ring,
    with_evil_ring,
    with_other_nodes,
    with_evil_channel,
    with_last_version,
)

UNDER_THE_SAME_VERSION = (with_other_place, with_channel_more, with_other_channel, with_rules)
"""Nothing in such a copy shows that no balancer can have written it."""

Forgery = Callable[[Plan], Plan]


def forge(cluster: SimCluster, forgery: Forgery, *servers: str) -> None:
    for id_ in servers:
        server = cluster.servers[id_]
        server.put_plan(forgery(server.plan_or_fail()))


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
    to = "s1" if good.entries[b"real"].route.assignment == single("s2") else "s2"
    assert cluster.ask("move", {"channel": b"real", "to": to}, server="s3").error is None


def moved(cluster: SimCluster, balancer: Balancer) -> Plan:
    home = balancer.plan.entry(b"real").route.assignment.servers[0]
    assert cluster.ask("move", {"channel": b"real", "to": "s1" if home == "s2" else "s2"}).error is None
    cluster.run(1)
    return balancer.plan


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("newer", [False, True])
def test_a_forged_copy_is_repaired_while_the_balancer_leads(forgery: Forgery, newer: bool) -> None:
    cluster = SimCluster(3)
    balancer = cluster.started(NO_DECISIONS)
    good = moved(cluster, balancer)

    def forged(plan: Plan) -> Plan:
        return replace(forgery(plan), version=min(plan.version + 7, EPOCH_MAX)) if newer else forgery(plan)

    forge(cluster, forged, "s3")
    check_right(cluster, balancer, good)
    assert reported(balancer)


@pytest.mark.parametrize("forgery", UNDER_THE_SAME_VERSION)
def test_a_copy_that_was_changed_under_its_version_is_repaired_while_the_balancer_leads(forgery: Forgery) -> None:
    cluster = SimCluster(3)
    balancer = cluster.started(NO_DECISIONS)
    good = moved(cluster, balancer)
    forge(cluster, forgery, "s3")
    check_right(cluster, balancer, good)
    assert reported(balancer)
    assert balancer.machine.all_counters()["copies_conflicting"] == 1


def test_the_entries_of_a_large_plan_are_looked_at_by_turns() -> None:
    cluster = SimCluster(3)
    balancer = cluster.started(NO_DECISIONS)
    entry = Entry(Route(balancer.plan.version + 1, single("s1")), Phase.SETTLED)
    entries = {b"many.%d" % number: entry for number in range(2 * ENTRIES_PER_COMMAND + 100)}
    large = replace(balancer.plan, version=balancer.plan.version + 1, entries=entries)
    cluster.kill(balancer)
    for server in cluster.servers.values():
        server.put_plan(large)
    cluster.run(60)
    balancer = cluster.started(NO_DECISIONS)
    for channel in (b"many.0", b"many.%d" % (2 * ENTRIES_PER_COMMAND), b"many.5"):
        elsewhere = replace(entry, route=Route(entry.route.epoch, single("s2")))
        forge(cluster, partial(with_entry, channel, elsewhere), "s3")
        cluster.run_until(lambda: cluster.servers["s3"].plan == balancer.plan)
    assert balancer.machine.all_counters()["copies_conflicting"] == 3


def test_a_plan_that_is_right_is_not_written_again() -> None:
    cluster = SimCluster(3)
    balancer = cluster.started(NO_DECISIONS)
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


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("at", ["s1", "s3"])
def test_a_balancer_starts_in_spite_of_a_forged_copy_and_repairs_it(forgery: Forgery, at: str) -> None:
    cluster = SimCluster(3)
    first = cluster.started(NO_DECISIONS)
    good = moved(cluster, first)
    cluster.kill(first)
    forge(cluster, forgery, at)
    cluster.run(60)
    second = cluster.start(NO_DECISIONS)
    cluster.run_until(lambda: second.machine.stage is Stage.LEADING)
    check_right(cluster, second, good)
    if forgery is not with_other_url:  # which may as well be an older configuration
        assert reported(second)
        assert second.machine.all_counters()["copies_conflicting"] >= 1
        assert cluster.ask("status").result["counters"]["copies_conflicting"] >= 1


def test_servers_that_are_listed_everywhere_and_not_used_are_left_out() -> None:
    cluster = SimCluster(3)
    first = cluster.started(NO_DECISIONS)
    good = moved(cluster, first)
    cluster.kill(first)
    forge(cluster, with_server_more, "s1", "s2", "s3")
    cluster.run(60)
    second = cluster.start(NO_DECISIONS)
    cluster.run_until(lambda: second.machine.stage is Stage.LEADING)
    check_right(cluster, second, good)
    assert reported(second)


@pytest.mark.parametrize("at", [("s1",), ("s1", "s2", "s3")])
def test_an_entry_that_cannot_be_read_costs_no_other_entry(at: tuple[str, ...]) -> None:
    cluster = SimCluster(3)
    first = cluster.started(NO_DECISIONS)
    good = moved(cluster, first)
    cluster.kill(first)
    for id_ in at:  # the first is the one that is read as a whole
        cluster.servers[id_].put(PLAN_KEY, {b"c:garbage": b"\x91" * 500}, keep=True)
    cluster.run(60)
    second = cluster.start(NO_DECISIONS)
    cluster.run_until(lambda: second.machine.stage is Stage.LEADING)
    check_right(cluster, second, good)
    if len(at) == 3:
        assert reported(second)
        assert any("garbage" in str(note.details) for note in second.notes)


def test_an_entry_that_cannot_be_read_at_one_server_comes_from_another() -> None:
    cluster = SimCluster(3)
    first = cluster.started(NO_DECISIONS)
    good = moved(cluster, first)
    cluster.kill(first)
    cluster.servers["s1"].put(PLAN_KEY, {b"c:real": b"\xc1"}, keep=True)
    cluster.run(60)
    second = cluster.start(NO_DECISIONS)
    cluster.run_until(lambda: second.machine.stage is Stage.LEADING)
    check_right(cluster, second, good)
