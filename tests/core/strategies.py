"""Plans, routes, control messages and hostile bytes, for hypothesis."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import strategies as st

from dynamoth.plan.plan import EPOCH_MAX, Assignment, Entry, Mode, Phase, Plan, PlanDelta, Route, Server, single
from dynamoth.plan.slots import is_slot, slot_of
from dynamoth.protocol.control import (
    LOSS_MAX,
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
    RulesChanged,
    Vacated,
)
from dynamoth.protocol.records import WHOLE_MAX, RecordedRows
from dynamoth.recording import DECISIONS, PLANS, SETTINGS, Type

SERVER_IDS = ("s1", "s2", "s3", "s4")
SERVERS = tuple(Server(id_, f"redis://{id_}:6379") for id_ in SERVER_IDS)
PLAN_0 = Plan.initial(SERVERS, virtual_nodes=8)

naturals = st.integers(0, 2**64 - 1)
epochs = st.integers(0, EPOCH_MAX)
channels = st.binary(max_size=12)
server_ids = st.sampled_from(SERVER_IDS)

CHANNELS = [b"c%d" % number for number in range(5)]
"""Those of drawn plans."""


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    mode = draw(st.sampled_from(Mode))
    if mode is Mode.SINGLE:
        return single(draw(server_ids))
    return Assignment(mode, tuple(draw(st.lists(server_ids, min_size=1, unique=True))))


routes = st.builds(Route, epochs, assignments())


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    phase = draw(st.sampled_from(Phase))
    older = () if phase is Phase.SETTLED else tuple(draw(st.lists(routes, min_size=1, max_size=3)))
    return Entry(draw(routes), phase, older)


@st.composite
def plans(draw: st.DrawFn, start: Plan = PLAN_0) -> Plan:
    """A plan that came about by the steps that the balancer takes, from ``start`` on."""
    plan = start
    names = [*CHANNELS, *map(slot_of, CHANNELS[:3])]
    for step in draw(st.lists(st.sampled_from(("begin", "activate", "settle")), max_size=12)):
        channel = draw(st.sampled_from(names))
        entry = plan.entry(channel)
        if step == "begin" and entry.phase is Phase.SETTLED:
            assignment = single(draw(server_ids)) if is_slot(channel) else draw(assignments())
            if assignment != entry.route.assignment:
                plan = plan.begin({channel: assignment})
        elif channel not in plan.entries:
            continue
        elif step == "activate" and entry.phase is Phase.PREPARED:
            plan = plan.activate([channel])
        elif step == "settle" and entry.phase is Phase.ACTIVE:
            plan = plan.settle([channel])
    return plan


admin_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
admin_mappings = st.dictionaries(st.text(max_size=5), admin_values, max_size=3)
server_lists = st.lists(st.sampled_from(SERVERS), unique=True, max_size=4).map(tuple)
deltas = st.builds(
    PlanDelta,
    epochs,
    epochs,
    st.dictionaries(channels, entries(), max_size=3),
    servers=st.none() | server_lists,
)
channel_tuples = st.lists(channels, max_size=4).map(tuple)

MESSAGES: dict[type[Any], st.SearchStrategy[Any]] = {
    RouteNotice: st.builds(RouteNotice, channels, routes),
    Marker: st.builds(Marker, channels, st.text(max_size=5), naturals),
    LossNotice: st.builds(LossNotice, channels, st.none() | st.integers(0, LOSS_MAX)),
    ObservationGap: st.builds(ObservationGap, st.text(max_size=5)),
    RulesChanged: st.builds(RulesChanged, naturals),
    Announcement: st.builds(Announcement, naturals, naturals, channel_tuples, channel_tuples),
    ForwardRequest: st.builds(
        ForwardRequest, st.lists(st.tuples(server_ids, st.binary(max_size=20)), max_size=3).map(tuple)
    ),
    PlanChange: st.builds(PlanChange, deltas),
    PlanQuery: st.builds(PlanQuery, epochs, st.booleans()),
    PlanAck: st.builds(PlanAck, st.text(max_size=5), naturals, epochs),
    Vacated: st.builds(
        Vacated, st.text(max_size=5), st.lists(st.tuples(channels, epochs), max_size=3).map(tuple), naturals
    ),
    AdminRequest: st.builds(AdminRequest, naturals, st.text(max_size=5), admin_mappings),
    AdminReply: st.builds(AdminReply, naturals, admin_mappings, st.none() | st.text(max_size=5)),
}
"""Every kind of control message."""
control_messages: st.SearchStrategy[ControlMessage] = st.one_of(*MESSAGES.values())

_CELLS: dict[Type, st.SearchStrategy[Any]] = {
    Type.TEXT: st.text(max_size=5),
    Type.TEXTS: st.lists(server_ids, max_size=3).map(tuple),
    Type.WHOLE: st.integers(0, WHOLE_MAX),
    Type.NUMBER: st.floats(allow_nan=False, allow_infinity=False),
}


@st.composite
def recorded_rows(draw: st.DrawFn) -> RecordedRows:
    """Rows of some columns of a table that the balancer fills."""
    table = draw(st.sampled_from((PLANS, DECISIONS, SETTINGS)))
    columns = draw(st.lists(st.sampled_from(table.columns[5:]), unique=True))
    rows = st.tuples(*(st.none() | _CELLS[column.type] for column in columns))
    names = tuple(column.name for column in columns)
    whole = _CELLS[Type.WHOLE]
    return RecordedRows(draw(whole), draw(whole), table.name, names, tuple(draw(st.lists(rows, max_size=3))))


# Hostile bytes.

anything: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.integers(0, 12),
        st.floats(),
        st.text(max_size=4),
        st.binary(max_size=4),
        server_ids,
        st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 5), inner),
    max_leaves=6,
)


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _message(code: int, rest: list[Any]) -> bytes:
    return _packed([code, *rest])


well_formed_nonsense = st.one_of(
    anything.map(_packed),
    st.builds(_message, st.integers(0, 15), st.lists(anything, max_size=5)),
)


@st.composite
def mutations(draw: st.DrawFn, original: st.SearchStrategy[bytes]) -> bytes:
    """A valid message, of which some bytes were replaced, cut out, doubled or appended."""
    data = bytearray(draw(original))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        until = at + draw(st.integers(0, 4))
        data[at:until] = draw(st.binary(max_size=4) | st.just(bytes(data[at:until] * 2)))
    return bytes(data)


@st.composite
def nests(draw: st.DrawFn) -> bytes:
    """Arrays in arrays, or maps in maps, up to the depth where msgpack itself refuses, and past it."""
    depth = draw(st.integers(1, 1100) | st.integers(900, 1023))
    opening = draw(st.sampled_from((b"\x91", b"\x81\xa1k", b"\x92\xc0", b"\xdd\x00\x00\x00\x01")))
    inner = opening * depth + b"\xc0"
    head = draw(
        st.sampled_from((b"", b"\x91", b"\x92\x01", b"\x93\x01\xc4\x01c", b"\x93\x09\xa2s1", b"\x92\x06", b"\x95\x0c"))
    )
    return head + inner


@st.composite
def lies_about_length(draw: st.DrawFn) -> bytes:
    """A header that announces up to 2**32 elements or bytes, and little behind it."""
    head = draw(st.sampled_from((b"", b"\x91", b"\x92\x01", b"\x93\x01\xc4\x01c", b"\x93\x09\xa2s1")))
    kind = draw(st.sampled_from((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")))
    length = draw(st.sampled_from((2**32 - 1, 2**31, 2**24, 1000)))
    return head + kind + length.to_bytes(4, "big") + draw(st.binary(max_size=8))
