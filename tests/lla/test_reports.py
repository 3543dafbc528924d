from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage
from dynamoth.plan.slots import SLOTS
from dynamoth.protocol.control import REPORT_CODE, PlanQuery, pack_control
from dynamoth.protocol.reports import (
    REPORT_CHANNELS_MAX,
    ChannelColumns,
    ChannelLoad,
    ChannelSums,
    Report,
    SlotColumns,
    pack_ids,
    pack_report,
    unpack_report,
)

COLUMNS = ChannelColumns(
    channels=(b"a", b"b"),
    publications=(10, 5),
    publishers=(2, 1),
    subscribers=(3, 0),
    messages_sent=(30, 0),
    bytes_in=(1000, 500),
    bytes_out=(3000, 0),
    publisher_ids=(pack_ids([1, 2**64 - 1]), b""),
    subscriber_ids=(pack_ids([7]), b""),
)


def a_report(**fields: Any) -> Report:
    known: dict[str, Any] = {
        "server": "s1",
        "incarnation": 2**63 - 1,
        "sequence": 3,
        "interval_s": 1.0,
        "plan_version": 7,
        "outgoing_bytes_per_s_max": 1000,
        "outgoing_bytes_per_s": 250.0,
        "columns": COLUMNS,
        "rest": ChannelSums(1, 2, 3, 4, 5, 6, 7, 8),
        "slots": SlotColumns((0, 4095), (1, 1), (3, 0), (4, 0), (5, 0), (6, 0)),
    }
    return Report(**{**known, **fields})


naturals = st.integers(0, 2**63)


NUMBERS = ("publications", "publishers", "subscribers", "messages_sent", "bytes_in", "bytes_out")


@st.composite
def columns(draw: st.DrawFn) -> ChannelColumns:
    channels = draw(st.lists(st.binary(max_size=20), max_size=5, unique=True))
    length = len(channels)
    numbers = st.lists(naturals, min_size=length, max_size=length).map(tuple)
    ids = st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3).map(pack_ids), min_size=length, max_size=length)
    publishers, subscribers = (tuple(draw(ids)) for _ in range(2))
    counted = {name: draw(numbers) for name in NUMBERS}
    return ChannelColumns(tuple(channels), **counted, publisher_ids=publishers, subscriber_ids=subscribers)


@st.composite
def slots(draw: st.DrawFn) -> SlotColumns:
    numbers = tuple(sorted(draw(st.sets(st.integers(0, SLOTS - 1), max_size=5))))
    counts = st.lists(naturals, min_size=len(numbers), max_size=len(numbers)).map(tuple)
    return SlotColumns(numbers, *(draw(counts) for _ in range(5)))


OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    "str": st.text(max_size=10),
    "int": naturals,
    "int | None": st.none() | naturals,
    "float": st.floats(0, 1e15),
    "bool": st.booleans(),
    "ChannelColumns": columns(),
    "SlotColumns": slots(),
    "ChannelSums": st.builds(ChannelSums, *[naturals] * 8),
    "tuple[tuple[str, str], ...]": st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=3).map(tuple),
}
BOUNDED: dict[str, st.SearchStrategy[Any]] = {
    "interval_s": st.floats(1e-9, 1e9),
    "outgoing_bytes_per_s_max": st.integers(1, 2**63),
}
reports = st.builds(Report, **{each.name: OF_TYPE[each.type] for each in dataclasses.fields(Report)} | BOUNDED)


@given(reports)
def test_a_report_is_read_as_it_was_written(report: Report) -> None:
    assert unpack_report(pack_report(report)) == report


def test_every_field_travels() -> None:
    """With hypothesis alone, a field that keeps its default on both sides would not be missed."""
    other: dict[Any, Any] = {int: 7, float: 0.25, tuple: (("kind", "cause and cure"),)}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Report):
        if isinstance(field.default, bool):
            values[field.name] = not field.default
        elif type(field.default) in other:
            values[field.name] = other[type(field.default)]
    report = a_report(**values)
    read = unpack_report(pack_report(report))
    for field in dataclasses.fields(Report):
        assert getattr(read, field.name) == getattr(report, field.name), field.name
        assert getattr(read, field.name) != field.default, f"give {field.name} another value in this test"


def test_elements_of_newer_software_are_ignored() -> None:
    code, *parts = msgpack.unpackb(pack_report(a_report()))
    assert code == REPORT_CODE
    newer: list[Any] = [code, *([*part, "more"] for part in parts), "more"]
    assert unpack_report(msgpack.packb(newer)) == a_report()


def test_a_report_of_an_earlier_version_has_no_slots() -> None:
    wire = msgpack.unpackb(pack_report(a_report()))
    assert unpack_report(msgpack.packb(wire[:5])) == a_report(slots=SlotColumns())


def replaced(path: tuple[int, ...], value: Any) -> bytes:
    """Return the wire form of a report in which one element is another."""
    wire = msgpack.unpackb(pack_report(a_report()))
    part = wire
    for index in path[:-1]:
        part = part[index]
    part[path[-1]] = value
    packed: bytes = msgpack.packb(wire)
    return packed


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ((0,), 7, "begins with"),
        ((1,), 5, "head"),
        ((5,), 5, "slots"),
        ((5, 0), [0, SLOTS], "slots from 0 to 4095"),
        ((5, 0), [7, 7], "ascending"),
        ((5, 1), [1], "column"),
        ((5, 2, 0), -1, "numbers"),
        ((1,), [1], "head"),
        ((1, 0), b"s1", "server as text"),
        ((1, 1), -1, "number from 0"),
        ((1, 1), True, "number from 0"),
        ((1, 2), 1.0, "number from 0"),
        ((1, 3), 0.0, "interval"),
        ((1, 3), math.nan, "finite"),
        ((1, 4), "7", "number from 0"),
        ((1, 5), -0.5, "finite"),
        ((1, 6), math.inf, "finite"),
        ((2,), [], "resources"),
        ((2, 0), 0, "maximum of 0"),
        ((2, 1), None, "finite"),
        ((2, 2), 1, "estimates"),
        ((2, 5), "1", "number from 0"),
        ((3,), [[b"a"]], "columns"),
        ((3, 0), b"ab", "array"),
        ((3, 0), [b"a", "b"], "bytes"),
        ((3, 0), [b"a", b"a"], "twice"),
        ((3, 0), [b"a", b"b", b"c"], "column"),
        ((3, 1), [1], "column"),
        ((3, 2), [1, -1], "numbers from 0"),
        ((3, 3), [1, True], "numbers from 0"),
        ((3, 4), [1, 1.5], "numbers from 0"),
        ((3, 7), [b"1234567", b""], "8-byte ids"),
        ((3, 8), [b"", 5], "bytes"),
        ((4,), [1], "sums"),
        ((4, 2), -1, "number from 0"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(path: tuple[int, ...], value: Any, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        unpack_report(replaced(path, value))


def test_a_report_that_names_too_many_channels_is_refused() -> None:
    count = REPORT_CHANNELS_MAX + 1
    zeros, nobody = (0,) * count, (b"",) * count
    names = tuple(b"%d" % number for number in range(count))
    many = ChannelColumns(names, zeros, zeros, zeros, zeros, zeros, zeros, nobody, nobody)
    with pytest.raises(MalformedMessage, match="at most"):
        unpack_report(pack_report(a_report(columns=many)))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", pack_control(PlanQuery(1)), b"\x81\x01\x02", b"hello"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_report(data)


@pytest.mark.parametrize(
    ("fields", "ratio"),
    [
        ({}, 0.25),
        ({"cpu_ratio": 0.75}, 0.75),
        ({"connections": 90, "connections_max": 100}, 0.9),
        ({"memory_bytes": 95, "memory_bytes_max": 100}, 0.95),
        ({"connections": 90, "memory_bytes": 95}, 0.25),  # no maximum is known
        ({"outgoing_bytes_per_s": 1500.0}, 1.5),
    ],
)
def test_a_server_is_as_loaded_as_its_tightest_resource(fields: dict[str, Any], ratio: float) -> None:
    report = a_report(**fields)
    assert report.tightest_ratio == ratio
    assert report.load_ratio == report.outgoing_bytes_per_s / report.outgoing_bytes_per_s_max


def test_rows() -> None:
    assert list(COLUMNS.rows()) == [ChannelLoad(b"a", 10, 2, 3, 30, 1000, 3000), ChannelLoad(b"b", 5, 1, 0, 0, 500, 0)]
    assert len(COLUMNS) == 2


def test_ids() -> None:
    assert pack_ids((1, 2**64 - 1)) == bytes(7) + b"\x01" + b"\xff" * 8
    assert pack_ids(()) == b""


def test_control_messages_are_load_when_the_link_is_full() -> None:
    report = a_report(outgoing_bytes_per_s=500.0, outgoing_bytes_per_s_max=1000)
    ratios = [dataclasses.replace(report, control_bytes_per_s=each).load_ratio for each in (0.0, 400.0, 450.0, 500.0)]
    assert ratios == pytest.approx([0.5, 0.5, 0.725, 1.0])
    assert dataclasses.replace(report, control_bytes_per_s=900.0).load_ratio == 1.4


def test_a_report_of_an_earlier_version_counts_everything() -> None:
    wire = msgpack.unpackb(pack_report(a_report(control_bytes_per_s=7.0)))
    wire[2].pop()
    assert unpack_report(msgpack.packb(wire)) == a_report(control_bytes_per_s=0.0)
