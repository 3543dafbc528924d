"""Compatibility rules: which one holds for a channel, what they say of homes, and how they travel with the plan."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.errors import MalformedMessage, PlanError
from dynamoth.names import sharded_channel
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule, homes, proves
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol import stored_plan
from dynamoth.protocol.plan_wire import compatibility_from_wire, compatibility_to_wire, pack_compatibility

SERVERS = tuple(Server(f"s{number}", f"redis://s{number}") for number in (1, 2, 3))

NEWS = CompatibilityRule(b"news.*", "s2", plain=False)
ALL = CompatibilityRule(b"*", "s1")


def plan_with(*rules: CompatibilityRule) -> Plan:
    return Plan.initial(SERVERS, 8, Compatibility(0, rules))


def test_the_first_rule_that_matches_holds() -> None:
    compatibility = Compatibility(0, (NEWS, ALL))
    assert compatibility.rule_of(b"news.sport") is NEWS
    assert compatibility.rule_of(b"chat") is ALL
    assert Compatibility(0, (NEWS,)).rule_of(b"chat") is None
    assert compatibility.is_plain(b"chat")
    assert not compatibility.is_plain(b"news.sport")


def test_sharded_channels_match_no_rule() -> None:
    assert Compatibility(0, (ALL,)).rule_of(sharded_channel(b"chat")) is None


def test_a_rule_gives_the_home_of_channels_that_the_plan_does_not_name() -> None:
    plan = plan_with(NEWS, ALL)
    assert {plan.home_route(b"c%d" % number).assignment.servers for number in range(50)} == {("s1",)}
    assert plan.home_route(b"news.sport").assignment.servers == ("s2",)
    moved = plan_with(ALL).begin({b"c": plan_with(NEWS).home_route(b"news.x").assignment})
    assert moved.entry(b"c").route.assignment.servers == ("s2",), "the plan names it: no rule counts"


def test_homes_are_those_of_the_ring_where_no_rule_matches() -> None:
    channels = [b"c%d" % number for number in range(50)]
    assert [plan_with(NEWS).home_route(c) for c in channels] == [plan_with().home_route(c) for c in channels]


@pytest.mark.parametrize(
    ("rules", "base", "pattern", "server", "proven"),
    [
        ((), ("s1",), b"x*", "s1", True),
        ((), ("s1", "s2"), b"x*", "s1", False),
        ((ALL,), ("s1", "s2"), b"x*", "s1", True),
        ((NEWS, ALL), ("s1", "s2"), b"x*", "s1", False),
        ((NEWS,), ("s1",), b"x*", "s1", False),
        ((CompatibilityRule(b"x*", "s1"),), ("s2",), b"x*", "s1", True),
        ((CompatibilityRule(b"x*", "s1"),), ("s2",), b"xy*", "s1", False),
    ],
)
def test_where_channels_are_is_proven_by_the_patterns_alone(
    rules: tuple[CompatibilityRule, ...], base: tuple[str, ...], pattern: bytes, server: str, proven: bool
) -> None:
    assert proves(rules, base, pattern, server) is proven


def test_rules_that_change_no_home_are_left_out() -> None:
    lifted = CompatibilityRule(b"news.*", "s1", plain=False)
    assert homes((lifted, ALL), ("s1",)) == []
    assert homes((lifted, ALL), ("s1", "s2")) == [(b"*", "s1")]
    assert homes((NEWS, ALL), ("s1", "s2")) == [(b"news.*", "s2"), (b"*", "s1")]
    assert homes((CompatibilityRule(b"chat", "s2"),), ("s1",), named=[b"chat"]) == []


def test_they_are_stored_read_and_sent_as_they_are() -> None:
    compatibility = Compatibility(7, (NEWS, ALL))
    assert compatibility_from_wire(compatibility_to_wire(compatibility)) == compatibility
    plan = plan_with(NEWS, ALL)
    stored = dict(zip(*[iter(stored_plan.write_whole(plan, "run")[1][2:])] * 2, strict=True))
    assert stored_plan.parse_whole(stored, "run") == plan
    packed = pack_compatibility(plan.compatibility)
    header = stored_plan.parse_header([b"0", b"run", stored[b"@cluster"], packed], "run")
    assert header is not None and header.plan.compatibility == plan.compatibility
    entry = stored_plan.parse_entry([b"0", b"run", None, packed], "run")
    assert entry is not None and entry.compatibility == plan.compatibility
    rules = stored_plan.parse_rules([b"0", b"run", b"0", packed], "run")
    assert rules == plan.compatibility
    assert stored_plan.parse_rules([b"0", b"another", b"0", packed], "run") is None, "not to be believed"


def test_a_change_of_rules_is_a_delta_that_keeps_the_entries() -> None:
    before = plan_with(ALL)
    after = before.with_compatibility((NEWS, ALL))
    assert after.compatibility.version == after.version == 1
    delta = before.diff(after)
    assert before.apply(delta) == after
    assert stored_plan.write_delta(delta, after)[-2:] == (b"@compatibility", pack_compatibility(after.compatibility))
    assert before.diff(before.with_entries({})).compatibility is None


@pytest.mark.parametrize("make", [lambda: CompatibilityRule(b"", "s1"), lambda: CompatibilityRule(b"x" * 257, "s1"),
                                  lambda: CompatibilityRule(b"*", ""), lambda: Compatibility(0, (ALL, ALL)),
                                  lambda: plan_with(*(CompatibilityRule(b"%d" % n, "s1") for n in range(65))),
                                  lambda: plan_with(CompatibilityRule(b"*", "s9"))])  # fmt: skip
def test_rules_that_no_plan_can_carry_are_refused(make: Any) -> None:
    with pytest.raises(PlanError):
        make()


@pytest.mark.parametrize(
    "value",
    [None, 7, [], [1], [-1, []], [2**40, []], [1, [1]], [1, [["*", "s1", True]]], [1, [[b"*", b"s1", True]]],
     [1, [[b"*", "s1", 1]]], [1, [[b"*", "s1"]]], [True, 3], [1, [[b"*", "s1", True]] * 2]],
)  # fmt: skip
def test_hostile_rules_are_malformed(value: Any) -> None:
    with pytest.raises(MalformedMessage):
        compatibility_from_wire(value)
