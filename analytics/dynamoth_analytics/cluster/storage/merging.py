"""Merges the small files of a day of the archive."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dynamoth_analytics.cluster.storage.archive_files import ArchiveFile, day_files, file_name
from dynamoth_analytics.cluster.storage.batches import row_groups, write_file
from dynamoth_analytics.files import parquet

MERGED_RECORDS_MAX = 500_000
MERGED_BYTES_MAX = 2**28
"""Records of a merged file, and bytes of its parts: files of 256 MiB suit Spark. Merging holds about a row group."""


def merge_day(day: Path) -> int:
    """Merge the files of a day folder; return how many were deleted. Call it for past days. Raises OSError.

    Files are merged with their neighbours while they have the same columns, no records are missing between them,
    and the merged file is not too large.
    """
    return sum(_merge_files(day, partition, files) for partition, files in day_files(day).items())


def _merge_files(day: Path, partition: int, files: Sequence[ArchiveFile]) -> int:
    """Merge the files of a partition; return how many were deleted."""
    deleted, end = 0, 0
    group: list[ArchiveFile] = []
    records, size, schema = 0, 0, None
    for each in files:
        if each.last <= end:  # a merged file has it: a process died before it deleted this one
            each.path.unlink()
            deleted += 1
            continue
        metadata, own_size = parquet.read_metadata(each.path), each.path.stat().st_size
        columns = metadata.schema.to_arrow_schema()
        is_large = records + metadata.num_rows > MERGED_RECORDS_MAX or size + own_size > MERGED_BYTES_MAX
        if group and (columns != schema or is_large or each.before > end):
            deleted += _merge(day, partition, group)
            group, records, size = [], 0, 0
        end = each.last
        group.append(each)
        records, size, schema = records + metadata.num_rows, size + own_size, columns
    return deleted + _merge(day, partition, group)


def _merge(day: Path, partition: int, parts: Sequence[ArchiveFile]) -> int:
    """Make one file of several; return how many were deleted."""
    if len(parts) < 2:
        return 0
    name = file_name(partition, parts[0].before, parts[0].first, parts[-1].last)
    write_file(day / name, parquet.read_schema(parts[0].path), _tables(parts))
    for each in parts:
        each.path.unlink()
    return len(parts)


def _tables(parts: Sequence[ArchiveFile]) -> Iterator[Any]:
    """Yield the row groups of files, each record once."""
    position = 0
    for each in parts:
        with parquet.ParquetFile(each.path) as file:
            yield from row_groups(file, position, each.last)
        position = each.last
