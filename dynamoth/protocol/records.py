"""The messages of balancers and coordinators to recorders: rows for the tables of a recording.

Balancers send on ``RECORD_CHANNEL``, coordinators of edge brokers on ``COORDINATOR_RECORD_CHANNEL``.

A message is one msgpack array ``[RECORD_CODE, sender, number, table, columns, rows]``. Recorders add the time of
receipt. A reader ignores unknown elements at the end, and unknown columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.protocol.wire import pack, parser, read_array, read_natural, read_text, shortened, unpack
from dynamoth.recording import BALANCER_TABLES, TEXT_CHARACTERS_MAX, Table, Type

RECORD_CODE = 15

ROWS_MAX = 10_000
"""Most rows of one message; a receiver refuses more."""

WHOLE_MAX = 2**63 - 1
"""Largest number of a column: tables have 64 bits with a sign."""


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """Rows of one table.

    A message goes to every server, at most once each and without an answer: it is lost where nobody listens.
    """

    #: The incarnation of the balancer or coordinator.
    sender: int
    #: Counts the messages of this sender, from 1, so that receivers recognise the copies at other servers. Nobody
    #: looks for missing numbers.
    number: int
    table: str
    columns: tuple[str, ...]
    #: Each with one value per column.
    rows: tuple[Sequence[Any], ...]


def pack_rows(message: RecordedRows) -> bytes:
    """Serialise rows."""
    return pack([RECORD_CODE, message.sender, message.number, message.table, message.columns, message.rows])


@parser("recorded rows")
def unpack_rows(data: bytes, tables: Mapping[str, Table] = BALANCER_TABLES) -> RecordedRows:
    """Read rows. They may come from anyone who can publish. Unknown columns are left out.

    Args:
        data: the message.
        tables: those that its sender may fill.

    Raises:
        MalformedMessage: these are no such rows, or a value does not fit its column.

    """
    code, sender, number, name, columns, rows = read_array(unpack(data))[:6]
    if code != RECORD_CODE:
        raise MalformedMessage(f"not recorded rows: they begin with {shortened(code)} instead of {RECORD_CODE}")
    if name not in tables:
        raise MalformedMessage(f"no table that this sender fills: {shortened(name)}")
    types = {column.name: column.type for column in tables[name].columns}
    names = [read_text(column) for column in read_array(columns)]
    known = [(index, types[column]) for index, column in enumerate(names) if column in types]
    read_rows = [read_array(row) for row in read_array(rows)]
    if len(read_rows) > ROWS_MAX or any(len(row) != len(names) for row in read_rows):
        raise MalformedMessage(f"at most {ROWS_MAX} rows of {len(names)} values each expected")
    return RecordedRows(
        read_natural(sender, WHOLE_MAX),
        read_natural(number, WHOLE_MAX),
        name,
        tuple(names[index] for index, _ in known),
        tuple(tuple(_value(row[index], type_) for index, type_ in known) for row in read_rows),
    )


def _value(value: Any, expected: Type) -> Any:
    if value is None:
        return None
    if expected is Type.TEXTS:
        return tuple(read_text(each, TEXT_CHARACTERS_MAX) for each in read_array(value)[:TEXT_CHARACTERS_MAX])
    if expected is Type.TEXT:
        return read_text(value, TEXT_CHARACTERS_MAX)
    if expected is Type.WHOLE:
        return read_natural(value, WHOLE_MAX)
    if expected is Type.TRUTH and isinstance(value, bool):
        return value
    if expected is Type.NUMBER and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    raise MalformedMessage(f"a {expected.value} expected, not {shortened(value)}")
