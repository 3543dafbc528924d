"""Control messages: every kind survives the wire, newer writers are understood, nonsense is refused."""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage
from dynamoth.plan.plan import EPOCH_MAX, Entry, Route, single
from dynamoth.protocol.control import (
    REPORT_CODE,
    Announcement,
    ControlMessage,
    LossNotice,
    Marker,
    ObservationGap,
    PlanQuery,
    RouteNotice,
    pack_control,
    seal_control,
    unpack_control,
)
from dynamoth.protocol.envelope import CONTROL, open_envelope
from dynamoth.protocol.plan_wire import entry_from_wire, entry_to_wire, pack_entry, unpack_entry
from tests.core.strategies import MESSAGES, anything, control_messages, entries


@pytest.mark.parametrize("kind", get_args(ControlMessage))
def test_every_kind_is_read_as_it_was_written(kind: type[Any]) -> None:
    @given(MESSAGES[kind])
    def survives(message: ControlMessage) -> None:
        assert unpack_control(pack_control(message)) == message

    survives()


@given(control_messages, st.lists(anything, min_size=1, max_size=3))
def test_fields_of_newer_software_are_ignored(message: ControlMessage, added: list[Any]) -> None:
    fields = msgpack.unpackb(pack_control(message), strict_map_key=False)
    assert unpack_control(msgpack.packb([*fields, *added])) == message


def test_a_query_of_an_older_balancer_has_no_doubt() -> None:
    assert unpack_control(msgpack.packb([7, 3])) == PlanQuery(3)


@given(entries(), st.lists(anything, min_size=1, max_size=3))
def test_fields_of_newer_software_are_ignored_within_an_entry(entry: Entry, added: list[Any]) -> None:
    phase, route, previous = entry_to_wire(entry)
    wire = [phase, [*route, *added], [[*old, *added] for old in previous], *added]
    assert entry_from_wire(wire) == entry
    assert unpack_entry(pack_entry(entry)) == entry


def test_travels_on_a_users_channel_in_a_marked_envelope() -> None:
    marker = Marker(b"news", "s1", 7)
    envelope = open_envelope(seal_control(marker))
    assert envelope.flags == CONTROL
    assert unpack_control(envelope.payload) == marker


def test_bytes_on_the_wire_never_change_silently() -> None:
    notice = RouteNotice(b"news", Route(5, single("s1")))
    assert pack_control(notice) == bytes.fromhex("93 01 c404 6e657773 93 05 01 91 a2 7331")
    marker = pack_control(Marker(b"c", "s1", 7))
    assert marker == bytes.fromhex("94 02 c401 63 a2 7331 07")
    announcement = pack_control(Announcement(1, 2, (b"a",), (), ("s1",)))
    assert announcement == bytes.fromhex("96 05 01 02 91 c401 61 90 91 a2 7331")
    assert pack_control(LossNotice(b"c", None)) == bytes.fromhex("93 03 c401 63 c0")


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


NO_MESSAGES: list[Any] = [
    None,
    7,
    {},
    [],
    [0],
    [99, b"c"],
    [REPORT_CODE],
    ["1", b"c"],
    [[1], b"c"],
    [{}, b"c"],
    [1],
    [1, b"c"],
    [1, "text", [5, 1, ["s1"]]],
    [1, b"c", [5, 1]],
    [1, b"c", [-1, 1, ["s1"]]],
    [1, b"c", [EPOCH_MAX + 1, 1, ["s1"]]],
    [1, b"c", [5, 4, ["s1"]]],
    [1, b"c", [5, 1, []]],
    [1, b"c", [5, 1, ["s1", "s2"]]],
    [1, b"c", [5, 2, ["s1", "s1"]]],
    [1, b"c", [5, 1, [b"s1"]]],
    [1, b"c", [5, 1, 7]],
    [2, b"c", "s1", -1, 0],
    [2, b"c", "s1", True, 0],
    [2, b"c", "s1", 1.0, 0],
    [3, b"c", "many"],
    [4, b"s1"],
    [5, 1, b"c", []],
    [6, [0, 1, [[b"c"]]]],
    [6, [0, 1, [[b"c", [1, [5, 1, ["s1"]], []]]]]],
    [6, [0, 1, [[b"c", [9, [5, 1, ["s1"]], []]]]]],
    [9, "s1", [[b"c"]]],
    [10, 1, "status", []],
    [10, 1, "status", {1: 2}],
    [11, 1, {}, 7],
]


@pytest.mark.parametrize("value", NO_MESSAGES, ids=repr)
def test_refuses_what_is_no_message(value: Any) -> None:
    with pytest.raises(MalformedMessage):
        unpack_control(packed(value))


def test_refuses_trailing_bytes() -> None:
    with pytest.raises(MalformedMessage):
        unpack_control(pack_control(ObservationGap("s1")) + b"\x00")
