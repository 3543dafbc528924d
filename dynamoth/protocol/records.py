"""What a balancer sends to recorders, on ``RECORD_CHANNEL``: rows for the tables of a recording.

One msgpack array ``[RECORD_CODE, balancer, number, table, columns, rows]``. Recorders add when they got it. A reader
ignores elements after those that it knows, and columns that it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.protocol.wire import pack, parser, read_array, read_natural, read_text, shortened, unpack
from dynamoth.recording import BALANCER_TABLES, NAME_CHARACTERS_MAX, Type

RECORD_CODE = 15

ROWS_MAX = 10_000
"""Rows of one message; a receiver refuses more."""

WHOLE_MAX = 2**63 - 1
"""Tables have 64 bits with a sign."""


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """Rows of one table. ``number`` counts the messages of one balancer process: one left out is lost."""

    balancer: int
    number: int
    table: str
    columns: tuple[str, ...]
    rows: tuple[Sequence[Any], ...]


def pack_rows(message: RecordedRows) -> bytes:
    """Serialise rows."""
    m = message
    return pack([RECORD_CODE, m.balancer, m.number, m.table, m.columns, m.rows])


@parser("recorded rows")
def unpack_rows(data: bytes) -> RecordedRows:
    """Read rows from anyone who can publish. Columns that this software does not know are left out.

    Raises:
        MalformedMessage: when they are not such rows, or a value is not of its column's type.

    """
    code, balancer, number, name, columns, rows = read_array(unpack(data))[:6]
    if code != RECORD_CODE:
        raise MalformedMessage(f"not recorded rows: they begin with {shortened(code)} instead of {RECORD_CODE}")
    if name not in BALANCER_TABLES:
        raise MalformedMessage(f"no table that balancers fill: {shortened(name)}")
    types = {column.name: column.type for column in BALANCER_TABLES[name].columns}
    names = [read_text(column) for column in read_array(columns)]
    known = [(index, types[column]) for index, column in enumerate(names) if column in types]
    read_rows = [read_array(row) for row in read_array(rows)]
    if len(read_rows) > ROWS_MAX or any(len(row) != len(names) for row in read_rows):
        raise MalformedMessage(f"at most {ROWS_MAX} rows of {len(names)} values each expected")
    return RecordedRows(
        read_natural(balancer, WHOLE_MAX),
        read_natural(number, WHOLE_MAX),
        name,
        tuple(names[index] for index, _ in known),
        tuple(tuple(_value(row[index], type_) for index, type_ in known) for row in read_rows),
    )


def _value(value: Any, expected: Type) -> Any:
    if value is None:
        return None
    if expected is Type.TEXTS:
        return tuple(read_text(each, NAME_CHARACTERS_MAX) for each in read_array(value)[:NAME_CHARACTERS_MAX])
    if expected is Type.TEXT:
        return read_text(value, NAME_CHARACTERS_MAX)
    if expected is Type.WHOLE:
        return read_natural(value, WHOLE_MAX)
    if expected is Type.NUMBER and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    raise MalformedMessage(f"a {expected.value} expected, not {shortened(value)}")
