"""Makes Arrow schemas of the tables of a recording, and record batches of rows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.recording import TABLES, VERSION, VERSION_KEY, Type
from dynamoth_recorder.events import Rows

# Both packages have no types.
arrow: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")

_TYPES = {
    Type.TIME: arrow.timestamp("us", tz="UTC"),
    Type.TEXT: arrow.string(),
    Type.WHOLE: arrow.int64(),
    Type.NUMBER: arrow.float64(),
    Type.TRUTH: arrow.bool_(),
    Type.BYTES: arrow.binary(),
    Type.TEXTS: arrow.list_(arrow.field("element", arrow.string())),  # the name that Parquet gives it
}

SCHEMAS: dict[str, Any] = {
    table.name: arrow.schema(
        [(column.name, _TYPES[column.type]) for column in table.columns], metadata={VERSION_KEY: str(VERSION)}
    )
    for table in TABLES.values()
}
"""The Arrow schema of each table, by its name."""


def to_batch(rows: Rows, at_us: int, recorder: str) -> Any:
    """Return rows as one Arrow record batch. ``at_us``: microseconds since 1970.

    Raises:
        MalformedMessage: a value does not fit its column, such as a number of more than 63 bits.

    """
    same = {**rows.same, "at": at_us, "recorder": recorder}
    schema = SCHEMAS[rows.table]
    try:
        columns = [_column(field, same, rows) for field in schema]
        return arrow.RecordBatch.from_arrays(columns, schema=schema)
    except (arrow.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise MalformedMessage(f"rows that do not fit table {rows.table!r}: {error}") from error


def _column(field: Any, same: dict[str, Any], rows: Rows) -> Any:
    name = field.name
    if name in same:
        value = same[name]
        if rows.count == 1 or isinstance(value, list):
            return arrow.array([value] * rows.count, field.type)
        return arrow.repeat(arrow.scalar(value, field.type), rows.count)
    if name in rows.columns:
        return arrow.array(rows.columns[name], field.type)
    return arrow.nulls(rows.count, field.type)
