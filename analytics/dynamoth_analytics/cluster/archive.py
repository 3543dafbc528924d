"""The archive: Parquet files with the records of each dataset, behind its streams at Redis.

Theory of operation
-------------------
A file has a range of offsets of one partition, which its name says. It is written under a hidden name, forced to disk
and renamed: readers see all of it or nothing. Only then the stream is trimmed. A process that dies in between archives
nothing twice, as the last file says where to go on.

The small files of past days are merged: the merged file is there before its parts are deleted. Whoever meets both
reads each record once, as the ranges in the names show what was read already.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import Dataset
from dynamoth.data.records import parse_records, partition_keys, partition_name, range_command, trim_command
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.files import arrow, parquet

FILE_RECORDS_MAX = 50_000


MERGED_RECORDS_MAX = 500_000
"""Records of a merged file. Merging holds one of its parts in memory at a time."""

SETTLED_S = 2.0
"""A folder that has changed within this time is listed again: its time of change may not show the next change."""

_log = logging.getLogger(__name__)

_Ranges = list[tuple[int, int, Path]]

_known: dict[Path, tuple[int, dict[int, _Ranges]]] = {}
"""Of this process: what day folders held, and when they had changed last."""


def _day_files(day: Path) -> dict[int, _Ranges]:
    """Return first and last offset, and path, of a day's files, in order, by partition."""
    try:
        changed_ns = day.stat().st_mtime_ns
        known = _known.get(day)
        if known is not None and known[0] == changed_ns:
            return known[1]
        names = os.listdir(day)
    except FileNotFoundError:
        return {}
    found: dict[int, _Ranges] = {}
    for name in names:
        if name.endswith(".parquet") and not name.startswith("."):
            partition, first, last = name.removesuffix(".parquet").split("-")
            found.setdefault(int(partition), []).append((int(first), int(last), day / name))
    for files in found.values():
        files.sort(key=lambda each: (each[0], -each[1]))
    if time.time_ns() - changed_ns > SETTLED_S * 1e9:
        _known[day] = (changed_ns, found)
    return found


def _days(folder: Path, dataset: str) -> list[Path]:
    """Return the day folders of a dataset, the newest first."""
    return sorted((folder / dataset).glob("date=*"), reverse=True)


def _ranges(folder: Path, dataset: str, partition: int, after: int, until: int) -> _Ranges:
    """Return the files with offsets behind ``after`` and up to ``until``, in order; a merged file before its parts.

    Offsets grow from day to day, so no day is listed that is older than ``after``.
    """
    found: _Ranges = []
    for day in _days(folder, dataset):
        files = _day_files(day).get(partition, [])
        found += [each for each in files if each[1] > after and each[0] <= until]
        if files and files[0][0] <= after + 1:
            break
    return sorted(found, key=lambda each: (each[0], -each[1]))


def _last_archived(folder: Path, dataset: str, partition: int) -> int:
    for day in _days(folder, dataset):
        if files := _day_files(day).get(partition):
            return max(last for _, last, _ in files)
    return 0


def archived_until(folder: Path | None, dataset: Dataset, partition: int, after: int, until: int) -> int:
    """Return the last offset of the files that have records of this range; ``after`` where there is none."""
    files = _ranges(folder, dataset.name, partition, after, until) if folder is not None else []
    return max((last for _, last, _ in files), default=after)


def archived(folder: Path | None, dataset: Dataset, partition: int, after: int, until: int) -> Iterator[Any]:
    """Yield the archived records behind ``after`` and up to ``until``, as Arrow batches, each record once."""
    from dynamoth_analytics.cluster.reading import OFFSET, record_schema

    if folder is None:
        return
    schema, position = record_schema(dataset), after
    files = _ranges(folder, dataset.name, partition, position, until)
    while files:
        _, last, file = files.pop(0)
        if last <= position:
            continue
        try:
            wanted = [(OFFSET, ">", position), (OFFSET, "<=", until)]
            table = parquet.read_table(file, filters=wanted, partitioning=None)
        except FileNotFoundError:  # it was merged meanwhile
            _known.pop(file.parent, None)
            files = _ranges(folder, dataset.name, partition, position, until)
            if file in [each for _, _, each in files]:
                raise
            continue
        for missing in set(schema.names) - set(table.schema.names):
            table = table.append_column(missing, arrow.nulls(len(table), schema.field(missing).type))
        yield from table.select(schema.names).cast(schema).to_batches()
        position = last


def compact(day: Path) -> int:
    """Merge the files of a day folder; return how many were deleted. Call it for past days. Raises OSError.

    Files are merged with their neighbours while they have the same columns and ``MERGED_RECORDS_MAX`` at most.
    """
    deleted = 0
    for partition, files in _day_files(day).items():
        group: list[Path] = []
        end, size, schema = 0, 0, None
        for _, last, file in files:
            if last <= end:  # a merged file has it: a process died before it deleted this one
                file.unlink()
                deleted += 1
                continue
            end = last
            metadata = parquet.read_metadata(file)
            columns = metadata.schema.to_arrow_schema()
            if group and (columns != schema or size + metadata.num_rows > MERGED_RECORDS_MAX):
                deleted += _merge(day, partition, group)
                group, size = [], 0
            group.append(file)
            size, schema = size + metadata.num_rows, columns
        deleted += _merge(day, partition, group)
    return deleted


def _merge(day: Path, partition: int, parts: Sequence[Path]) -> int:
    if len(parts) < 2:
        return 0
    name = f"{partition}-{parts[0].stem.split('-')[1]}-{parts[-1].stem.split('-')[2]}"
    hidden = day / f".{name}.tmp"
    try:
        with hidden.open("wb") as file:
            schema = parquet.read_schema(parts[0])
            with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                for part in parts:
                    writer.write_table(parquet.read_table(part, partitioning=None))
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(day / f"{name}.parquet")
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    _sync(day)
    for part in parts:
        part.unlink()
    return len(parts)


def _sync(folder: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Archiver:
    """Copies what is stored at Redis to Parquet files, and trims it there.

    Args:
        servers: the log servers.
        folder: of the archive.
        hot_records: of each partition so many records stay at Redis.

    """

    def __init__(self, servers: LogServers, folder: Path, hot_records: int = 100_000) -> None:
        self._servers = servers
        self._folder = folder
        self.hot_records = hot_records
        self._positions: dict[str, int] = {}
        self._compacted: set[Path] = set()
        self._is_cleaned = False
        self.records = 0
        #: Whether the disk was full at the last call: records stay at Redis.
        self.is_full = False

    def archive(self, catalog: Catalog) -> int:
        """Archive what is new of all datasets; return how many records that were.

        While the disk is full, records stay at Redis, and the next call tries again. Raises OSError, LogServerFailed.
        """
        before = self.records
        try:
            self._clean()
            self._archive(catalog)
            self._compact()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self.is_full:
                _log.error("the disk of the archive %s is full: records stay at Redis until it has room", self._folder)
            self.is_full = True
        else:
            if self.is_full:
                _log.warning("the archive %s has room again", self._folder)
            self.is_full = False
        return self.records - before

    def _clean(self) -> None:
        """Delete the hidden files of a process that died."""
        if not self._is_cleaned:
            for file in self._folder.glob("*/date=*/.*.tmp"):
                file.unlink(missing_ok=True)
            self._is_cleaned = True

    def _compact(self) -> None:
        """Merge the files of one past day, so that a call does not take long."""
        today = f"date={datetime.now(UTC):%Y-%m-%d}"
        for day in sorted(self._folder.glob("*/date=*")):
            if day.name < today and day not in self._compacted:
                compact(day)
                self._compacted.add(day)
                return

    def _archive(self, catalog: Catalog) -> None:
        names = [name for name, dataset in catalog.datasets.items() if dataset.kind != "static"]
        for name in [*names, *(f"{name}_dead" for name in names)]:
            dataset = catalog.dataset(name)
            assert dataset is not None, "it is in the catalog"
            for partition in range(dataset.partitions):
                self._archive_partition(dataset, partition)

    def _archive_partition(self, dataset: Dataset, partition: int) -> None:
        from dynamoth_analytics.cluster.reading import to_batch

        name, count = partition_name(dataset.name, partition), 0
        if name not in self._positions:
            self._positions[name] = _last_archived(self._folder, dataset.name, partition)
        server = self._servers.server_of(name)
        while True:
            command = range_command(name, self._positions[name], 2**53, FILE_RECORDS_MAX)
            records = parse_records(self._servers.run(server, command))
            if not records:
                break
            self._write(
                dataset, partition, to_batch(dataset, partition, records), records[0].offset, records[-1].offset
            )
            self._positions[name] = records[-1].offset
            count += len(records)
            self.records += len(records)
        if count:
            self._trim(server, name)

    def _trim(self, server: str, name: str) -> None:
        stream = partition_keys(name)[1]
        kept = self._servers.run(server, (b"XREVRANGE", stream, b"+", b"-", b"COUNT", b"%d" % (self.hot_records + 1)))
        if len(kept) > self.hot_records:
            until = int(kept[-1][0].partition(b"-")[0])
            # Readers compare it with what they find: a gap without it is only a restart of the server.
            note = (b"HSET", partition_keys(name)[0], b"trimmed", b"%d" % until)
            self._servers.run_all(server, [note, trim_command(name, until)])

    def _write(self, dataset: Dataset, partition: int, batch: Any, first: int, last: int) -> None:
        day = self._folder / dataset.name / f"date={datetime.now(UTC):%Y-%m-%d}"
        day.mkdir(parents=True, exist_ok=True)
        name = f"{partition}-{first:016d}-{last:016d}"
        hidden = day / f".{name}.tmp"
        try:
            with hidden.open("wb") as file:
                parquet.write_table(arrow.Table.from_batches([batch]), file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            hidden.rename(day / f"{name}.parquet")
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        _sync(day)
