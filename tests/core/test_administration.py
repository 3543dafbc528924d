"""What administrators have decided: what a plan can carry, how it travels with the servers, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dynamoth.errors import MalformedMessage, PlanError
from dynamoth.plan.administration import NO_ADMINISTRATION, PINS_MAX, REMOVED_MAX, Administration
from dynamoth.plan.plan import Assignment, Mode, Plan, PlanDelta, Server, single
from dynamoth.plan.slots import SLOTS, slot_name
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import PlanChange, pack_control, unpack_control
from dynamoth.protocol.plan_wire import administration_from_wire, administration_to_wire
from dynamoth.protocol.wire import pack, unpack

SERVERS = tuple(Server(f"s{number}", f"redis://s{number}") for number in (1, 2, 3))
NEW = Server("s4", "redis://s4")
PLAN = Plan.initial(SERVERS, 8)
FULL = Administration(
    7,
    paused=True,
    draining=frozenset({"s3"}),
    pins={b"c": single("s1"), b"d": Assignment(Mode.ALL_SUBSCRIBERS, ("s2", "s1"))},
    removed=("s8", "s9"),
    provisioned=frozenset({"s2", "s3"}),
    releasing="s3",
    outgoing_bytes_per_s_max={"s2": 1000},
    others={"of newer software": [1, 2]},
)


def stored(plan: Plan) -> dict[bytes, Any]:
    """The fields of a stored plan, as Redis returns them."""
    return dict(zip(*[iter(stored_plan.write_whole(plan, "run")[1][2:])] * 2, strict=True))


def without_s3() -> Plan:
    """A plan in which nothing is at s3 any more."""
    moved = {slot_name(slot): single("s1") for slot in range(SLOTS) if PLAN.ring.home(slot_name(slot)) == "s3"}
    return PLAN.begin(moved).activate(moved).settle(moved)


def test_it_is_read_as_it_was_written_with_what_newer_software_has_added() -> None:
    wire = administration_to_wire(FULL)
    assert wire["of newer software"] == [1, 2]
    assert administration_from_wire(unpack(pack(wire))) == FULL
    assert administration_from_wire({}) == NO_ADMINISTRATION, "what is missing has its default"


def test_it_is_stored_with_the_plan_once_there_is_one() -> None:
    assert stored_plan.ADMINISTRATION_FIELD not in stored(PLAN)
    plan = PLAN.administered(FULL)
    assert plan.administration == replace(FULL, version=1)
    assert stored_plan.parse_whole(stored(plan), "run") == plan
    assert [len(stored(each)) - stored_plan.header_fields(each) for each in (PLAN, plan)] == [0, 0]
    redis = {**stored(PLAN), **fields_of(PLAN.diff(plan), plan)}
    assert stored_plan.parse_whole(redis, "run") == plan


def fields_of(delta: PlanDelta, plan: Plan) -> dict[bytes, Any]:
    return dict(zip(*[iter(stored_plan.write_delta(delta, plan)[2:])] * 2, strict=True))


def test_a_server_is_added_and_agents_learn_of_it_but_not_of_the_administration() -> None:
    plan = PLAN.administered(replace(FULL, removed=()), (*SERVERS, NEW))
    assert (*plan.servers.values(),) == (*SERVERS, NEW) and plan.base == PLAN.base
    delta = PLAN.diff(plan)
    assert delta == PlanDelta(0, 1, {}, None, (*SERVERS, NEW), plan.administration)
    assert PLAN.apply(delta) == plan
    assert stored_plan.parse_whole({**stored(PLAN), **fields_of(delta, plan)}, "run") == plan
    sent = unpack_control(pack_control(PlanChange(delta)))
    assert isinstance(sent, PlanChange) and sent.delta == replace(delta, administration=None)
    assert PLAN.apply(sent.delta) == replace(plan, administration=NO_ADMINISTRATION)


def test_a_server_that_is_in_use_stays_listed() -> None:
    with pytest.raises(PlanError, match="these are missing: s3"):
        PLAN.administered(NO_ADMINISTRATION, SERVERS[:2])
    with pytest.raises(PlanError, match="these are missing: s3"):
        PLAN.apply(PlanDelta(0, 1, {}, servers=SERVERS[:2]))


def test_a_server_that_nothing_uses_can_leave_in_one_change_with_its_last_entries() -> None:
    moved = without_s3()
    plan = moved.administered(NO_ADMINISTRATION.without_server("s3"), SERVERS[:2])
    assert plan.administration.removed == ("s3",) and set(plan.servers) == {"s1", "s2"}
    assert PLAN.apply(PLAN.diff(moved).then(moved.diff(plan))) == plan
    assert stored_plan.parse_whole(stored(plan), "run") == plan


def test_changes_one_after_the_other_are_one_change() -> None:
    added = PLAN.administered(NO_ADMINISTRATION, (*SERVERS, NEW))
    moved = added.begin({b"c": single("s4")})
    paused = moved.administered(replace(moved.administration, paused=True))
    joined = PLAN.diff(added).then(added.diff(moved)).then(moved.diff(paused))
    assert joined == PLAN.diff(paused)


def test_pins_come_and_go() -> None:
    pinned = NO_ADMINISTRATION.with_pin(b"c", single("s1")).with_pin(b"c", single("s2"))
    assert pinned.pins == {b"c": single("s2")} and pinned.pinned_servers == {"s2"}
    assert pinned.without_pin(b"c").without_pin(b"never") == NO_ADMINISTRATION


def test_the_ids_of_removed_servers_are_bounded_and_the_oldest_is_forgotten() -> None:
    decided = replace(NO_ADMINISTRATION, removed=tuple(f"r{number}" for number in range(REMOVED_MAX)))
    assert decided.without_server("s1").removed[-2:] == (f"r{REMOVED_MAX - 1}", "s1")
    assert len(decided.without_server("s1").removed) == REMOVED_MAX


def test_nothing_is_kept_of_a_removed_server_but_its_id() -> None:
    assert FULL.without_server("s2").outgoing_bytes_per_s_max == {}
    assert FULL.without_server("s2").releasing == "s3"
    rest = FULL.without_server("s3")
    assert rest.provisioned == {"s2"} and not rest.draining and not rest.releasing


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: PLAN.administered(Administration(draining=frozenset({"s9"}))),
            "plan does not list are drained, or have pinned channels: s9",
        ),
        (
            lambda: PLAN.administered(Administration(pins={b"c": single("s9")})),
            "plan does not list are drained, or have pinned channels: s9",
        ),
        (lambda: PLAN.administered(Administration(draining=frozenset({"s1", "s2", "s3"}))), "all servers are being"),
        (lambda: PLAN.administered(Administration(removed=("s2",))), "removed servers are listed: s2"),
        (lambda: Administration(draining=frozenset({"s1"}), pins={b"c": single("s1")}), "pinned to servers that are"),
        (lambda: Administration(pins={b"%d" % n: single("s1") for n in range(PINS_MAX + 1)}), "at most 1000 pinned"),
        (lambda: Administration(removed=tuple(map(str, range(REMOVED_MAX + 1)))), "at most 1000 removed"),
    ],
)
def test_what_no_plan_can_carry_is_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        make()


HOSTILE: list[Any] = [
    *(None, [], {1: 2}, {"version": -1}, {"version": 2**40}, {"paused": 1}, {"draining": "s1"}, {"draining": [b"s1"]}),
    *({"pins": {}}, {"pins": [[b"c", 1]]}, {"pins": [["c", 1, ["s1"]]]}, {"pins": [[b"c", 9, ["s1"]]]}),
    *({"pins": [[b"c", 1, []]]}, {"removed": [1]}, {"outgoing_bytes_per_s_max": {"s1": -1}}),
    *({"removed": [str(number) for number in range(REMOVED_MAX + 1)]}, {"draining": ["x" * 2001]}),
]


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_bytes_are_malformed(value: Any) -> None:
    with pytest.raises(MalformedMessage):
        administration_from_wire(value)
    with pytest.raises(MalformedMessage):
        stored_plan.parse_whole({**stored(PLAN), stored_plan.ADMINISTRATION_FIELD: pack(value)}, "run")
