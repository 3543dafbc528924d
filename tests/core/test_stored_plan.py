"""The plan as servers store it: what is written is what is read, and nothing else is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage, OtherFormat, PlanError
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.names import PLAN_KEY, PLAN_KEY_NEW
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import Entry, Phase, Plan, PlanDelta, Route, single
from dynamoth.plan.slots import SLOTS, slot_of
from dynamoth.protocol import stored_plan
from dynamoth.protocol.plan_wire import pack_compatibility, pack_entry
from tests.core.strategies import CHANNELS, PLAN_0, plans

C = b"news"
RUN = "a1b2"
MOVED = PLAN_0.begin({C: single(next(id_ for id_ in PLAN_0.base if id_ != PLAN_0.ring.home(C)))})


class Redis(dict[bytes, dict[bytes, bytes]]):
    """What the commands of this module do to Redis, and no others."""

    def execute(self, commands: Iterable[Sequence[CommandPart]]) -> Any:
        return [self._one(*(part if isinstance(part, bytes) else str(part).encode() for part in c)) for c in commands][
            -1
        ]

    def _one(self, name: bytes, key: bytes, *rest: bytes) -> Any:
        match name:
            case b"DEL":
                return int(self.pop(key, None) is not None)
            case b"HSET":
                self.setdefault(key, {}).update(zip(rest[::2], rest[1::2], strict=True))
                return len(rest) // 2
            case b"RENAME":
                self[rest[0]] = self.pop(key)
                return b"OK"
            case b"HMGET":
                return [self.get(key, {}).get(field) for field in rest]
            case b"HGETALL":
                return dict(self.get(key, {}))
            case _:
                raise AssertionError(f"not expected here: {name!r}")

    def whole(self, run_id: str | None) -> Plan | None:
        return stored_plan.parse_whole(self.execute([stored_plan.READ_WHOLE]), run_id)

    def entry(self, channel: bytes, run_id: str | None) -> stored_plan.StoredEntry | None:
        return stored_plan.parse_entry(self.execute([stored_plan.read_entry(channel)]), run_id)

    def header(self, run_id: str | None) -> stored_plan.StoredHeader | None:
        return stored_plan.parse_header(self.execute([stored_plan.READ_HEADER]), run_id)


def holding(plan: Plan, run_id: str | None = RUN) -> Redis:
    redis = Redis()
    redis.execute(stored_plan.write_whole(plan, run_id))
    return redis


@given(plans())
def test_a_whole_plan_is_read_as_it_was_written(plan: Plan) -> None:
    assert holding(plan).whole(RUN) == plan


@given(st.data())
def test_deltas_bring_a_stored_plan_to_the_newer_version(data: st.DataObject) -> None:
    older = data.draw(plans())
    newer = data.draw(plans(older))
    redis = holding(older)
    redis.execute([stored_plan.write_delta(older.diff(newer), newer)])
    assert redis.whole(RUN) == newer


@given(plans())
def test_an_entry_is_read_as_it_was_written(plan: Plan) -> None:
    redis = holding(plan)
    for channel in (*CHANNELS, b"not named"):
        stored = redis.entry(channel, RUN)
        own, slot = plan.entries.get(channel), plan.entries.get(slot_of(channel))
        assert stored == stored_plan.StoredEntry(plan.version, own, ring=plan.ring_mark, slot=slot)
        assert stored is not None
        assert stored.entry(channel, plan.home_route(channel)) == plan.entry(channel)


def test_a_header_is_a_plan_without_entries() -> None:
    assert holding(MOVED).header(RUN) == stored_plan.StoredHeader(
        1, True, Plan(1, PLAN_0.servers, PLAN_0.base, virtual_nodes=PLAN_0.virtual_nodes)
    )


def test_a_whole_plan_replaces_the_old_one_and_leaves_nothing_of_it() -> None:
    redis = holding(MOVED)
    redis.execute(stored_plan.write_whole(PLAN_0, RUN))
    assert redis.whole(RUN) == PLAN_0
    assert set(redis) == {PLAN_KEY}


def test_readers_see_the_old_plan_until_the_last_command() -> None:
    redis = holding(PLAN_0)
    *first, last = stored_plan.write_whole(MOVED, RUN)
    for command in first:
        redis.execute([command])
        assert redis.whole(RUN) == PLAN_0
    redis.execute([last])
    assert redis.whole(RUN) == MOVED


def test_remains_of_a_writer_that_died_are_not_mixed_in() -> None:
    redis = holding(PLAN_0)
    redis.execute(stored_plan.write_whole(MOVED, RUN)[:-1])
    redis.execute(stored_plan.write_whole(PLAN_0, RUN))
    assert redis.whole(RUN) == PLAN_0
    assert PLAN_KEY_NEW not in redis


def test_no_command_of_a_large_plan_is_long() -> None:
    entry = Entry(Route(1, single("s1")), Phase.SETTLED)
    entries = {b"c%d" % number: entry for number in range(3 * stored_plan.ENTRIES_PER_COMMAND)}
    plan = Plan(1, PLAN_0.servers, PLAN_0.base, entries, PLAN_0.virtual_nodes)
    commands = stored_plan.write_whole(plan, RUN)
    assert max(map(len, commands)) <= 2 * stored_plan.ENTRIES_PER_COMMAND + 2
    redis = Redis()
    redis.execute(commands)
    assert redis.whole(RUN) == plan


# What is believed.


@pytest.mark.parametrize(
    ("written_to", "asked_of", "believed"),
    [("a1", "a1", True), ("a1", "b2", False), ("a1", None, True), (None, "b2", True), (None, None, True)],
)
def test_a_plan_of_an_earlier_run_is_not_believed(written_to: str | None, asked_of: str | None, believed: bool) -> None:
    redis = holding(MOVED, written_to)
    assert (redis.whole(asked_of) is not None) is believed
    assert (redis.entry(C, asked_of) is not None) is believed
    header = redis.header(asked_of)
    assert header is not None
    assert header.believed is believed


def test_an_empty_server_stores_no_plan() -> None:
    redis = Redis()
    assert redis.whole(RUN) is None
    assert redis.entry(C, RUN) is None
    assert redis.header(RUN) is None


def test_what_newer_software_has_added_is_kept_or_ignored() -> None:
    """Fields are kept by whoever writes the plan; elements of arrays are ignored."""
    redis = holding(MOVED)
    redis[PLAN_KEY] |= {b"@trees": b"unknown", b"other": b"too"}
    for field in (b"@cluster", b"@compatibility", b"c:" + C):
        redis[PLAN_KEY][field] = msgpack.packb([*msgpack.unpackb(redis[PLAN_KEY][field]), "more"])
    plan = redis.whole(RUN)
    assert plan is not None and dict(plan.others) == {b"@trees": b"unknown", b"other": b"too"}
    assert replace(plan, others=MOVED.others) == MOVED
    [entry, header] = redis.entry(C, RUN), redis.header(RUN)
    assert entry is not None and entry.own == MOVED.entries[C]
    assert header is not None and header.plan.servers == MOVED.servers
    later = plan.activate([C])
    assert holding(later).whole(RUN) == later and later.others == plan.others
    redis.execute([stored_plan.write_delta(plan.diff(later), later)])
    assert redis.whole(RUN) == later
    assert len(redis[PLAN_KEY]) == len(later.entries) + stored_plan.header_fields(later)


def test_a_map_may_come_as_a_flat_list() -> None:
    """RESP2 has no maps."""
    flat = [part for pair in holding(MOVED)[PLAN_KEY].items() for part in pair]
    assert stored_plan.parse_whole(flat, RUN) == MOVED


# What is refused.


def header_of(servers: Any, base: Any, virtual_nodes: Any, slots: int = SLOTS) -> bytes:
    packed: bytes = msgpack.packb([servers, base, virtual_nodes, slots])
    return packed


PAIRS = [["s1", "redis://s1"], ["s2", "redis://s2"]]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([PAIRS]),
        msgpack.packb({"servers": PAIRS}),
        header_of(7, ["s1"], 8),
        header_of([["s1"]], ["s1"], 8),
        header_of([], ["s3"], 8),
        header_of(PAIRS, None, 8),
        header_of(PAIRS, ["s1"], "many"),
        header_of(PAIRS, ["s1"], float("nan")),
        pytest.param(header_of(PAIRS, ["s1"], float("inf")), id="infinite virtual nodes"),
        pytest.param(header_of(PAIRS, ["s1"], 0), id="no virtual nodes"),
        pytest.param(header_of(PAIRS, ["s1"], -1), id="negative virtual nodes"),
        pytest.param(header_of(PAIRS, ["s1"], 10**12), id="virtual nodes that fill the memory"),
        pytest.param(header_of(PAIRS, ["s1", "s1"], 8), id="a server twice in the ring"),
        pytest.param(header_of(PAIRS, [], 8), id="a ring over no server"),
        pytest.param(header_of([], [], 8), id="no server"),
    ],
)
def test_refuses_a_header_that_is_none(header: bytes) -> None:
    """What is accepted must be usable: the ring is only computed when the first channel is looked up."""
    with pytest.raises(MalformedMessage):
        stored_plan.parse_header([b"1", None, header], RUN)
    with pytest.raises(MalformedMessage):
        stored_plan.parse_whole({b"@version": b"1", b"@run": b"", b"@cluster": header}, RUN)


def test_a_plan_of_another_format_is_not_continued() -> None:
    """Without slots its channels have other homes; what a newer format means is unknown here."""
    with pytest.raises(OtherFormat, match=r"delete the plan at every server \(DEL __dynamoth__:plan\)"):
        stored_plan.parse_header([b"1", b"", None, None, b"an older header"], RUN)
    with pytest.raises(MalformedMessage, match="8192 slots, not 4096: upgrade"):
        stored_plan.parse_header([b"1", b"", header_of(PAIRS, ["s1"], 8, 8192)], RUN)
    redis = holding(MOVED)
    redis[PLAN_KEY][b"@format"] = b"1"
    assert redis.whole(RUN) == MOVED
    redis[PLAN_KEY][b"@format"] = b"2"
    for read in (redis.whole, redis.header):
        with pytest.raises(OtherFormat, match="in format 2, and this one knows format 1: upgrade this software"):
            read(RUN)


def test_a_rule_comes_before_a_slot() -> None:
    """Plain clients look for the channel where the rule has it."""
    plan = (
        PLAN_0.begin({slot_of(C): single("s1")})
        if PLAN_0.ring.home(C) != "s1"
        else PLAN_0.begin({slot_of(C): single("s2")})
    )
    ruled = plan.with_compatibility([CompatibilityRule(C, "s3")])
    for each, servers in ((plan, plan.entry(slot_of(C)).route.assignment.servers), (ruled, ("s3",))):
        stored = holding(each).entry(C, RUN)
        assert stored is not None
        assert stored.entry(C, each.home_route(C)) == each.entry(C)
        assert each.entry(C).route.assignment.servers == servers


@pytest.mark.parametrize("version", [b"", b"one", b"1.5", b"-1", b"4294967296", b"9" * 5000])
def test_refuses_a_version_that_is_none(version: bytes) -> None:
    header = header_of(PAIRS, ["s1"], 8)
    with pytest.raises(MalformedMessage):
        stored_plan.parse_header([version, None, header], RUN)
    with pytest.raises(MalformedMessage):
        stored_plan.parse_whole({b"@version": version, b"@run": b"", b"@cluster": header}, RUN)
    with pytest.raises(MalformedMessage):
        stored_plan.parse_entry([version, b"", None], RUN)


@pytest.mark.parametrize("reply", [None, b"text", 7, [], [b"1"], [b"1", *[None] * 6], ErrorReply("WRONGTYPE ...")])
def test_refuses_a_reply_of_another_shape(reply: Any) -> None:
    parsers: list[Callable[[Any, str], Any]] = [stored_plan.parse_entry, stored_plan.parse_header]
    for parse in parsers if isinstance(reply, list) else [*parsers, stored_plan.parse_whole]:
        with pytest.raises(MalformedMessage, match="does not hold a plan"):
            parse(reply, RUN)


def test_refuses_an_entry_that_sends_to_an_unlisted_server() -> None:
    redis = holding(PLAN_0)
    for entry in (
        Entry(Route(0, single("s9")), Phase.SETTLED),
        Entry(Route(0, single("s1")), Phase.ACTIVE, (Route(0, single("s9")),)),
    ):
        redis[PLAN_KEY][b"c:" + C] = pack_entry(entry)
        with pytest.raises(MalformedMessage, match="does not list"):
            redis.whole(RUN)


def test_refuses_rules_with_a_version_above_the_plans() -> None:
    """No later rules would be newer."""
    redis, why = holding(PLAN_0), "rules have version 7, and the stored plan only version 0"
    redis[PLAN_KEY][b"@compatibility"] = pack_compatibility(Compatibility(7, (CompatibilityRule(b"*", "s1"),)))
    header = redis.execute([stored_plan.READ_HEADER])
    for read in (
        lambda: redis.whole(RUN),
        lambda: redis.entry(C, RUN),
        lambda: stored_plan.parse_header(header, RUN),
        lambda: stored_plan.parse_rules(redis.execute([stored_plan.READ_RULES]), RUN),
    ):
        with pytest.raises(MalformedMessage, match=why):
            read()
    lost: list[str] = []
    found = stored_plan.parse_header(header, RUN, lost)
    assert found is not None and not found.plan.compatibility.rules
    assert lost == [why]
    with pytest.raises(PlanError, match="rules of version 7 do not fit version 1"):
        PLAN_0.apply(PlanDelta(0, 1, {}, Compatibility(7)))


def test_refuses_an_entry_with_an_epoch_above_the_version() -> None:
    redis = holding(PLAN_0)
    redis[PLAN_KEY][b"c:" + C] = pack_entry(Entry(Route(1, single("s1")), Phase.SETTLED))
    with pytest.raises(MalformedMessage, match="has epoch 1, and the stored plan only version 0"):
        redis.whole(RUN)
    with pytest.raises(MalformedMessage, match="has epoch 1, and the stored plan only version 0"):
        redis.entry(C, RUN)
