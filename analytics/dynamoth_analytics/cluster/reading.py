"""Reads a range of a partition's records: from its stream at Redis, and what was trimmed there from the archive."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow import json as arrow_json  # pyright: ignore[reportMissingTypeStubs]

from dynamoth.data.datasets import Dataset, FieldType
from dynamoth.data.records import Record, parse_records, partition_keys, partition_name, range_command
from dynamoth.errors import DynamothError
from dynamoth_analytics.cluster.archive import archived, archived_until
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.files import arrow

PAGE_RECORDS = 5000

ARROW_TYPES: dict[FieldType, Any] = {
    "string": arrow.string(),
    "int": arrow.int64(),
    "float": arrow.float64(),
    "bool": arrow.bool_(),
    "timestamp": arrow.timestamp("us", tz="UTC"),
}

_STORED_TYPES = {**ARROW_TYPES, "timestamp": arrow.int64()}

PARTITION, OFFSET, ARRIVED = "_partition", "_offset", "_arrived"


class RecordsLost(DynamothError):
    """Raised when records that a reader asks for are neither at their server nor in the archive."""

    code = "records-lost"


def record_schema(dataset: Dataset) -> Any:
    """Return the Arrow schema of a dataset's records, with their partition, offset and time of arrival."""
    fields = [arrow.field(field.name, ARROW_TYPES[field.type]) for field in dataset.fields]
    return arrow.schema([
        *fields, arrow.field(PARTITION, arrow.int32()), arrow.field(OFFSET, arrow.int64()),
        arrow.field(ARRIVED, arrow.timestamp("us", tz="UTC")),
    ])  # fmt: skip


def to_batch(dataset: Dataset, partition: int, records: Sequence[Record]) -> Any:
    """Return records as an Arrow batch of ``record_schema``."""
    schema = record_schema(dataset)
    stored = arrow.schema([arrow.field(field.name, _STORED_TYPES[field.type]) for field in dataset.fields])
    lines = b"\n".join(record.value for record in records)
    table = arrow_json.read_json(
        io.BytesIO(lines),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=max(len(lines) + 1, 1024)),
        parse_options=arrow_json.ParseOptions(explicit_schema=stored, unexpected_field_behavior="ignore"),
    ).combine_chunks()
    columns = [
        table.column(field.name).combine_chunks().cast(ARROW_TYPES[field.type], safe=False) for field in dataset.fields
    ]
    columns += [
        arrow.array([partition] * len(records), arrow.int32()),
        arrow.array([record.offset for record in records], arrow.int64()),
        arrow.array([record.arrived_ms * 1000 for record in records], arrow.timestamp("us", tz="UTC")),
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


def read_range(
    servers: LogServers,
    dataset: Dataset,
    partition: int,
    after: int,
    until: int,
    archive: Path | None,
    *,
    fail_on_loss: bool = True,
) -> Iterator[Any]:
    """Yield the records of a partition behind ``after`` and up to ``until``, as Arrow batches, in order.

    A record is archived before it is trimmed: so whatever the stream lacks is looked for in the archive.
    Raises RecordsLost where the archive lacks what was trimmed, unless ``fail_on_loss`` is false.
    """
    name = partition_name(dataset.stream, partition)
    server, position = servers.server_of(name), after
    while position < until:
        page = parse_records(servers.run(server, range_command(name, position, until, PAGE_RECORDS)))
        if not page or page[0].offset > position + 1:
            end = page[0].offset - 1 if page else until
            if fail_on_loss:
                _check_archive(servers, dataset, partition, position, end, archive)
            yield from archived(archive, dataset, partition, position, end)
        if not page:
            return
        yield to_batch(dataset, partition, page)
        position = page[-1].offset


def _check_archive(
    servers: LogServers, dataset: Dataset, partition: int, after: int, until: int, archive: Path | None
) -> None:
    """Raise RecordsLost if records of this range were trimmed and the archive does not reach as far."""
    name = partition_name(dataset.stream, partition)
    trimmed = int(servers.run(servers.server_of(name), (b"HGET", partition_keys(name)[0], b"trimmed")) or 0)
    needed = min(trimmed, until)
    if needed > after and archived_until(archive, dataset, partition, after, until) < needed:
        where = f"the archive {archive} lacks them" if archive else "the option `archive` is missing"
        raise RecordsLost(
            f"records of {name} up to offset {needed} are no longer at Redis, and {where}. Give the folder of the data"
            " cluster's archive as option `archive`, or go on without them with option fail_on_loss=false"
        )
