"""Records as Arrow batches, for the archive and for Spark."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import json as arrow_json  # pyright: ignore[reportMissingTypeStubs]

from dynamoth.data.datasets import Dataset, Field, FieldType
from dynamoth.data.records import Record
from dynamoth.errors import DynamothError
from dynamoth_analytics.cluster.storage.durable_files import replacing
from dynamoth_analytics.files import arrow, parquet

ARROW_TYPES: dict[FieldType, Any] = {
    "string": arrow.string(),
    "int": arrow.int64(),
    "float": arrow.float64(),
    "bool": arrow.bool_(),
    "timestamp": arrow.timestamp("us", tz="UTC"),
}

_STORED_TYPES = {**ARROW_TYPES, "timestamp": arrow.int64()}

PARTITION, OFFSET, ARRIVED = "_partition", "_offset", "_arrived"

ROW_GROUP_BYTES = 16 * 2**20
ROW_GROUP_RECORDS = 50_000
"""Most bytes in memory, and records, of a row group that is made of smaller ones or of pages. Readers hold one."""


_JSON_TYPES: dict[type, FieldType] = {str: "string", int: "int", float: "float", bool: "bool"}


class OtherType(DynamothError):
    """Raised when stored records have a field of another type than their dataset.

    A dataset that was dropped was registered again with another type.
    """

    code = "other-type"

    def __init__(self, dataset: Dataset, field: Field, stored: str) -> None:
        """Name cause and cure; ``stored`` is the type that the records have."""
        cure = "leave the field out (`dynamoth dataset set --force`), and add it again with the type of the records"
        super().__init__(
            f"dataset {dataset.name}: field {field.name!r} is of type {field.type}, and stored records have {stored}"
            f" there: {cure}, or use a new name"
        )


def record_schema(dataset: Dataset) -> Any:
    """Return the Arrow schema of a dataset's records, with their partition, offset and time of arrival."""
    fields = [arrow.field(field.name, ARROW_TYPES[field.type]) for field in dataset.fields]
    return arrow.schema([
        *fields, arrow.field(PARTITION, arrow.int32()), arrow.field(OFFSET, arrow.int64()),
        arrow.field(ARRIVED, arrow.timestamp("us", tz="UTC")),
    ])  # fmt: skip


def to_batch(dataset: Dataset, partition: int, records: Sequence[Record]) -> Any:
    """Return records as an Arrow batch of ``record_schema``. Raises OtherType, and ArrowInvalid for what is no JSON."""
    schema = record_schema(dataset)
    stored = arrow.schema([arrow.field(field.name, _STORED_TYPES[field.type]) for field in dataset.fields])
    lines = b"\n".join(record.value for record in records)
    try:
        table = arrow_json.read_json(
            io.BytesIO(lines),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=max(len(lines) + 1, 1024)),
            parse_options=arrow_json.ParseOptions(explicit_schema=stored, unexpected_field_behavior="ignore"),
        ).combine_chunks()
    except arrow.ArrowInvalid:
        _check_values(dataset, records)
        raise
    columns = [
        table.column(field.name).combine_chunks().cast(ARROW_TYPES[field.type], safe=False) for field in dataset.fields
    ]
    columns += [
        arrow.array([partition] * len(records), arrow.int32()),
        arrow.array([record.offset for record in records], arrow.int64()),
        arrow.array([record.arrived_ms * 1000 for record in records], arrow.timestamp("us", tz="UTC")),
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


def _check_values(dataset: Dataset, records: Sequence[Record]) -> None:
    """Raise OtherType for the first value of another type than that of its field; pass over what is no JSON."""
    for record in records:
        try:
            values: dict[str, Any] = json.loads(record.value)
        except ValueError:
            continue
        for field in dataset.fields:
            found = _JSON_TYPES.get(type(values.get(field.name)))
            expected = "int" if field.type == "timestamp" else field.type
            if found is not None and found != expected and (found, expected) != ("int", "float"):
                raise OtherType(dataset, field, found)


def check_types(dataset: Dataset, schema: Any) -> None:
    """Raise OtherType where a file with this schema has a field of another type than its dataset.

    Values are never cast: a number could become a time, or a text that is no number nothing at all.
    """
    for field in dataset.fields:
        if field.name not in schema.names:
            continue
        found, expected = schema.field(field.name).type, ARROW_TYPES[field.type]
        are_times = arrow.types.is_timestamp(found) and field.type == "timestamp"  # Spark writes them with another unit
        if found != expected and not are_times:
            stored = next((name for name, type_ in ARROW_TYPES.items() if type_ == found), str(found))
            raise OtherType(dataset, field, "timestamp" if arrow.types.is_timestamp(found) else stored)


def read_file(file: Any, dataset: Dataset, after: int, until: int) -> Iterator[Any]:
    """Yield the records of an open Parquet file behind ``after`` and up to ``until``, one row group at a time."""
    for table in row_groups(file, after, until):
        yield from with_columns_of(dataset, table).to_batches()


def with_columns_of(dataset: Dataset, table: Any) -> Any:
    """Return records of a file with the columns of their dataset: a field that is newer than the file has no values.

    Raises OtherType.
    """
    schema = record_schema(dataset)
    check_types(dataset, table.schema)
    for missing in set(schema.names) - set(table.schema.names):
        table = table.append_column(missing, arrow.nulls(len(table), schema.field(missing).type))
    return table.select(schema.names).cast(schema)


def row_groups(file: Any, after: int, until: int) -> Iterator[Any]:
    """Yield the row groups of an open Parquet file as tables, with the records behind ``after`` and up to ``until``."""
    for number in range(file.num_row_groups):
        first, last = _offsets_of(file.metadata.row_group(number), file.schema_arrow.names.index(OFFSET))
        if last <= after or first > until:
            continue
        table = file.read_row_group(number)
        if first <= after or last > until:
            offsets = table.column(OFFSET).to_pylist()
            table = table.filter(arrow.array([after < each <= until for each in offsets]))
        yield table


def _offsets_of(group: Any, column: int) -> tuple[int, int]:
    """Return the first and last offset of a row group: the archive's files have statistics."""
    statistics = group.column(column).statistics
    return statistics.min, statistics.max


def write_file(path: Path, schema: Any, tables: Iterator[Any], check: Callable[[], None] = lambda: None) -> None:
    """Write tables to a Parquet file, which appears as a whole or not at all, and is on disk then. Raises OSError.

    No more than one row group is in memory, besides the table that comes next. ``check`` is called right before
    the file appears: if it raises, there is no file.
    """
    with (
        replacing(path, path.with_name(f".{path.stem}.tmp"), check) as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for group in _grouped(tables):
            writer.write_table(group, row_group_size=ROW_GROUP_RECORDS)


def _grouped(tables: Iterator[Any]) -> Iterator[Any]:
    """Yield tables of one row group at most, or single larger ones."""
    group: list[Any] = []
    size = records = 0
    for table in tables:
        if group and (size + table.nbytes > ROW_GROUP_BYTES or records + len(table) > ROW_GROUP_RECORDS):
            yield arrow.concat_tables(group)
            group, size, records = [], 0, 0
        group.append(table)
        size, records = size + table.nbytes, records + len(table)
    if group:
        yield arrow.concat_tables(group)
