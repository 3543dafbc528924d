"""The messages of brokers and coordinator: what was packed is read again, and nothing else is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.edge.control import (
    HASH_MAX,
    INTERESTS_MAX,
    MESSAGE_BYTES_MAX,
    USER_LOAD_CLASSES,
    BrokerReport,
    Candidate,
    Candidates,
    CandidatesOffer,
    CandidatesRequest,
    EdgeMessage,
    InterestColumns,
    MoveEnd,
    MovesEnded,
    MovesRequest,
    OpenBrokers,
    Stamp,
    pack_edge,
    parse_location,
    parse_user_key,
    unpack_edge,
    user_key,
)
from dynamoth.edge.tickets import KEY_BYTES
from dynamoth.errors import MalformedMessage

STAMP = Stamp(2**63 - 1, 7)
COLUMNS = InterestColumns(("a", "b"), (1.5, 0.0), (3, 1))
REPORT = BrokerReport(
    broker="b1",
    url="wss://b1/connect",
    capacity_bytes_per_s=1e6,
    load_bytes_per_s=5.5,
    inbound_bytes_per_s=2.0,
    users=4,
    other_ratio_max=0.5,
    is_admitting=False,
    is_draining=True,
    location=(1.0, -2.5),
    interests=COLUMNS,
    user_loads=(0, 3, 1),
    logs_hash="0123abcd",
    history_hash="4567ef89",
    report_s=2.5,
)
MESSAGES: list[EdgeMessage] = [
    REPORT,
    CandidatesRequest(3, inf, 10, 0.5),
    CandidatesOffer(3, Candidates("b1", (Candidate("u", ("b",)), Candidate("v@w", ("a", "b"))), COLUMNS)),
    MovesRequest((("wss://b2", "wss://b3"), ()), (("u", 0), ("v", 1))),
    MovesEnded("b1", (("u", MoveEnd.LEFT), ("v", MoveEnd.DEADLINE))),
    OpenBrokers(("wss://b2",), b"k" * KEY_BYTES),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_packed_is_read(message: EdgeMessage) -> None:
    assert unpack_edge(pack_edge(STAMP, message)) == (STAMP, message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_newer_software_may_add_fields(message: EdgeMessage) -> None:
    newer = msgpack.packb([*msgpack.unpackb(pack_edge(STAMP, message)), "new"])
    assert unpack_edge(newer) == (STAMP, message)


@pytest.mark.parametrize("known", range(4))
def test_a_report_of_an_older_broker_is_read(known: int) -> None:
    fields = msgpack.unpackb(pack_edge(STAMP, REPORT))[: 15 + known]
    newer: dict[str, Any] = {"logs_hash": "", "history_hash": "", "report_s": 0.0}
    missing = dict(list(newer.items())[known:])
    assert unpack_edge(bytes(msgpack.packb(fields))) == (STAMP, replace(REPORT, **missing))


@pytest.mark.parametrize(
    ("text", "location"),
    [("48.2,16.4", (48.2, 16.4)), (" -90 , +180 ", (-90.0, 180.0)), ("0,0", (0.0, 0.0)), ("1e1,-1.5", (10.0, -1.5))],
)
def test_a_location(text: str, location: tuple[float, float]) -> None:
    assert parse_location(text) == location


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "two numbers"),
        ("48.2", "two numbers"),
        ("1,2,3", "two numbers"),
        ("north,1", "two numbers"),
        ("91,0", "a latitude from -90 to 90 degrees expected, not 91"),
        ("0,-180.5", "a longitude from -180 to 180"),
        ("nan,0", "a latitude"),
        ("0,inf", "a longitude"),
    ],
)
def test_a_wrong_location_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_location(text)


def test_the_largest_report_is_small() -> None:
    ids = tuple(f"{number:022}" for number in range(INTERESTS_MAX))
    columns = InterestColumns(ids, tuple(0.1 + number for number in range(INTERESTS_MAX)), (2**31,) * INTERESTS_MAX)
    largest = BrokerReport(
        broker="b" * 64,
        url="wss://" + "u" * 1000,
        capacity_bytes_per_s=1e13,
        load_bytes_per_s=1e13,
        inbound_bytes_per_s=1e13,
        users=2**31,
        interests=columns,
        user_loads=(2**31,) * USER_LOAD_CLASSES,
        location=(48.2, 16.4),
        logs_hash="h" * HASH_MAX,
        history_hash="h" * HASH_MAX,
        report_s=59.9,
    )
    data = pack_edge(STAMP, largest)
    assert len(data) <= 64 * 1024
    assert unpack_edge(data) == (STAMP, largest)


def forged(position: int, value: Any) -> bytes:
    """Return a report with another value at a position."""
    fields = msgpack.unpackb(pack_edge(STAMP, REPORT))
    fields[position] = value
    return bytes(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 99),
        (0, True),
        (1, -1),
        (3, "b" * 65),
        (5, 0),
        (6, float("nan")),
        (6, inf),
        (7, -1.0),
        (8, 1.5),
        (10, 1),
        (12, [1.0, inf]),
        (13, [["a"], [1.0], []]),
        (13, [["a"] * (INTERESTS_MAX + 1), [1.0] * (INTERESTS_MAX + 1), [1] * (INTERESTS_MAX + 1)]),
        (13, [["a" * 23], [1.0], [1]]),
        (14, [1] * (USER_LOAD_CLASSES + 1)),
        (15, "h" * 17),
        (16, 5),
        (17, -1.0),
        (17, 60.1),
        (17, "often"),
    ],
)
def test_a_report_with_a_wrong_field_is_refused(position: int, value: Any) -> None:
    assert unpack_edge(forged(4, "wss://other"))[1] != REPORT
    with pytest.raises(MalformedMessage):
        unpack_edge(forged(position, value))


@pytest.mark.parametrize(
    "wire",
    [
        [3, 1, 1, 5, "b1", [["a"], [1.0], [1]], [["u", [1]]]],  # an interest that is not in the columns
        [4, 1, 1, [["wss://b2"]], [["u", 1]]],  # a target that is not there
        [4, 1, 1, [], [["u", 0]]],
        [5, 1, 1, "b1", [["u", "flown"]]],
        [6, 1, 1, ["u" * 2001]],
    ],
)
def test_a_reference_to_nothing_is_refused(wire: list[Any]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_edge(bytes(msgpack.packb(wire)))


def test_a_message_that_is_too_large_is_not_unpacked() -> None:
    with pytest.raises(MalformedMessage, match="at most"):
        unpack_edge(pack_edge(STAMP, OpenBrokers(())) + bytes(MESSAGE_BYTES_MAX))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(st.integers(1, 6), st.lists(ANYTHING, max_size=14))
def test_nothing_but_malformed_message_comes_out(code: int, fields: list[Any]) -> None:
    for wire in ([code, 1, 1, *fields], [code, *fields], fields):
        with suppress(MalformedMessage):
            stamp, message = unpack_edge(bytes(msgpack.packb(wire)))
            assert unpack_edge(pack_edge(stamp, message)) == (stamp, message)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused(data: bytes) -> None:
    with suppress(MalformedMessage):
        unpack_edge(data)


@given(st.text(max_size=20), st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True))
def test_the_name_of_a_user_is_unambiguous(user: str, session: str) -> None:
    assert parse_user_key(user_key(user, session)) == (user, session)
