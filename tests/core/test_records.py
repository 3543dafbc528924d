"""Rows for recorders: they survive the wire, newer writers are understood, and nonsense is refused."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given

from dynamoth.errors import MalformedMessage
from dynamoth.protocol.records import RECORD_CODE, ROWS_MAX, RecordedRows, pack_rows, unpack_rows
from dynamoth.recording import TEXT_CHARACTERS_MAX
from tests.core.strategies import recorded_rows


def packed(*values: Any) -> bytes:
    data: bytes = msgpack.packb([RECORD_CODE, *values])
    return data


@given(recorded_rows())
def test_rows_are_read_as_they_were_written(message: RecordedRows) -> None:
    assert unpack_rows(pack_rows(message)) == message


def test_what_newer_software_adds_is_left_out() -> None:
    data = packed(1, 2, "settings", ["new", "name"], [[{}, "a"]], "more")
    assert unpack_rows(data) == RecordedRows(1, 2, "settings", ("name",), (("a",),))


@pytest.mark.parametrize(
    "values",
    [
        (-1, 2, "plans", [], []),
        (1, 2**63, "plans", [], []),
        (1, 2, "servers_of_another_kind", [], []),
        (1, 2, "servers", ["interval_s"], [[1.0]]),
        (1, 2, ["plans"], [], []),
        (1, 2, "plans", ["version"], [[1, 2]]),
        (1, 2, "plans", ["version"], [["1"]]),
        (1, 2, "plans", ["version"], [[2**63]]),
        (1, 2, "plans", ["version"], [[1]] * (ROWS_MAX + 1)),
        (1, 2, "plans", ["channel"], [[b"news"]]),
        (1, 2, "plans", ["channel"], [["x" * (TEXT_CHARACTERS_MAX + 1)]]),
        (1, 2, "plans", ["to_servers"], [["s1"]]),
        (1, 2, "decisions", ["ratio_before"], [[math.nan]]),
        (1, 2, "decisions", ["ratio_before"], [[True]]),
        (1, 2, "plans", []),
    ],
)
def test_nonsense_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_rows(packed(*values))
