"""A corpus of hostile bytes: each message that anybody may publish, with each part replaced by what does not belong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import msgpack

from dynamoth.plan.plan import EPOCH_MAX, Assignment, Entry, Mode, Phase, PlanDelta, Route, single
from dynamoth.protocol.control import (
    AdminReply,
    AdminRequest,
    Announcement,
    ControlMessage,
    ForwardRequest,
    LossNotice,
    Marker,
    ObservationGap,
    PlanAck,
    PlanChange,
    PlanQuery,
    RouteNotice,
    Vacated,
    pack_control,
)
from dynamoth.protocol.envelope import seal
from dynamoth.protocol.plan_wire import pack_entry
from dynamoth.protocol.reports import ChannelColumns, ChannelSums, Report, pack_ids, pack_report

DEPTHS = (1, 2, 7, 15, 31, 32, 33, 64, 200, 330, 500, 900, 980, 1000, 1020, 1023, 1024, 1025, 2000, 10_000, 100_000)
OPENINGS = (b"\x91", b"\x92\xc0", b"\x81\xa1k", b"\xdd\x00\x00\x00\x01", b"\xdf\x00\x00\x00\x01\xa1k")

_ROUTE = Route(1, single("s2"))
_ENTRY = Entry(Route(2, Assignment(Mode.ALL_PUBLISHERS, ("s1", "s2"))), Phase.ACTIVE, (_ROUTE,))

MESSAGES: tuple[ControlMessage, ...] = (
    RouteNotice(b"c", _ROUTE),
    Marker(b"c", "s1", 1),
    LossNotice(b"c", 3),
    ObservationGap("s1"),
    Announcement(7, 1, (b"c",), (b"d",), ("s1",)),
    ForwardRequest((("s2", seal(1, 2, 3, b"x")),)),
    PlanChange(PlanDelta(0, 1, {b"c": _ENTRY})),
    PlanQuery(1),
    PlanAck("s1", 5, 0),
    Vacated("s1", ((b"c", 1),), 7),
    AdminRequest(9, "move", {"channel": b"c", "to": "s2"}),
    AdminReply(9, {"version": 1}, None),
)

REPORT = Report(
    server="s1",
    incarnation=5,
    sequence=1,
    interval_s=1.0,
    plan_version=0,
    outgoing_bytes_per_s_max=1000,
    outgoing_bytes_per_s=10.0,
    columns=ChannelColumns((b"c",), (1,), (1,), (1,), (1,), (1,), (1,), (pack_ids([1]),), (b"",)),
    rest=ChannelSums(1, 2, 3, 4, 5, 6, 7, 8),
)

_HOLE = b"\x00the hole\x00"
_PACKED_HOLE: bytes = msgpack.packb(_HOLE)


def nest(opening: bytes, depth: int) -> bytes:
    """Containers within each other, with nil in the innermost."""
    return opening * depth + b"\xc0"


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


_CONTAINERS: tuple[Any, ...] = ([], {}, [[]], {"": {}}, [0] * 100, ["s1"] * 3, [b"c", b"c"], {b"c": 1}, [[b"c", 1]] * 2)

INTRUDERS: tuple[bytes, ...] = (
    *map(
        _packed, (None, True, False, 0, 1, -1, 2**32, EPOCH_MAX, EPOCH_MAX + 1, 2**48 - 1, 2**63, 2**64 - 1, -(2**63))
    ),
    *map(_packed, (0.0, -0.5, 1.5, math.nan, math.inf, -math.inf, 1e308)),
    *map(_packed, ("", b"", "s1", "s2", "s9", b"c", b"\xff", "a" * 2000, b"a" * 2000, "\0", "{}%s\n")),
    *map(_packed, _CONTAINERS),
    _packed(msgpack.ExtType(5, b"x" * 1000)),
    _packed(msgpack.Timestamp(1, 5)),
    b"\xa3\xed\xa0\x80",  # a surrogate, as UTF-8 has none
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time that cannot be
    b"\xdd\xff\xff\xff\xff",  # arrays and maps that end before they begin
    b"\xdf\x00\xff\xff\xff",
    b"\xdc\x3f\xff" * 200,
    b"\xc1",
    *(nest(opening, depth) for opening in OPENINGS for depth in (31, 33, 330, 1000, 1025)),
)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [*cast("dict[Any, Any]", value).items()]  # type: ignore[redundant-cast]  # for pyright
    return [*enumerate(cast("list[Any]", value))] if isinstance(value, list) else []  # type: ignore[redundant-cast]


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Go through all positions of a value."""
    yield ()
    pairs = _pairs(value)
    for key, inner in pairs:
        for path in _paths(inner):
            yield (key, *path)


def _with_hole(value: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return _HOLE
    copied: Any = value.copy()
    copied[path[0]] = _with_hole(copied[path[0]], path[1:])
    return copied


def intrusions(packed: bytes) -> Iterator[bytes]:
    """A message, once for each of its parts and each intruder, which takes the place of the part."""
    value = msgpack.unpackb(packed, strict_map_key=False)
    for path in _paths(value):
        if not path:
            continue
        with_hole = _packed(_with_hole(value, path))
        for intruder in INTRUDERS:
            yield with_hole.replace(_PACKED_HOLE, intruder)


def truncations(packed: bytes) -> Iterator[bytes]:
    """A message without its end, and with something behind it."""
    for length in range(len(packed)):
        yield packed[:length]
    yield packed + b"\xc0"
    yield packed * 2


@cache
def corpus() -> tuple[bytes, ...]:
    """Everything: some 10,000 messages."""
    found: dict[bytes, None] = {}
    for packed in (*map(pack_control, MESSAGES), pack_report(REPORT), pack_entry(_ENTRY)):
        found.update((data, None) for data in intrusions(packed))
        found.update((data, None) for data in truncations(packed))
    for code in range(16):
        for depth in (33, 330, 980, 1000, 1020, 1025):
            for opening in OPENINGS:
                found[b"\x92" + bytes((code,)) + nest(opening, depth)] = None
                found[b"\x95" + bytes((code,)) + nest(opening, depth) * 4] = None
    for depth in DEPTHS:
        found.update((nest(opening, depth), None) for opening in OPENINGS)
    return tuple(found)
