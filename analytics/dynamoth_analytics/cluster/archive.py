"""The archive: Parquet files with the records of each dataset, behind its streams at Redis.

Theory of operation
-------------------
A file has a range of offsets of one partition, which its name says. It is written under a hidden name, forced to disk
and renamed: readers see all of it or nothing. Only then the stream is trimmed. A process that dies in between archives
nothing twice, as the last file says where to go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import Dataset
from dynamoth.data.records import parse_records, partition_keys, partition_name, range_command, trim_command
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.files import arrow, parquet

FILE_RECORDS_MAX = 50_000


def _ranges(folder: Path, dataset: str, partition: int) -> list[tuple[int, int, Path]]:
    """Return first and last offset, and path, of a partition's files, in order."""
    found: list[tuple[int, int, Path]] = []
    for file in folder.glob(f"{dataset}/date=*/{partition}-*.parquet"):
        _, first, last = file.stem.split("-")
        found.append((int(first), int(last), file))
    return sorted(found)


def archived(folder: Path | None, dataset: Dataset, partition: int, after: int, until: int) -> Iterator[Any]:
    """Yield the archived records behind ``after`` and up to ``until``, as Arrow batches."""
    from dynamoth_analytics.cluster.reading import OFFSET, record_schema

    if folder is None:
        return
    schema = record_schema(dataset)
    for first, last, file in _ranges(folder, dataset.name, partition):
        if last <= after or first > until:
            continue
        table = parquet.read_table(file, filters=[(OFFSET, ">", after), (OFFSET, "<=", until)])
        for missing in set(schema.names) - set(table.schema.names):
            table = table.append_column(missing, arrow.nulls(len(table), schema.field(missing).type))
        yield from table.select(schema.names).cast(schema).to_batches()


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
        self.records = 0

    def archive(self, catalog: Catalog) -> int:
        """Archive what is new of all datasets; return how many records that were. Raises OSError, LogServerFailed."""
        count = 0
        names = [name for name, dataset in catalog.datasets.items() if dataset.kind != "static"]
        for name in [*names, *(f"{name}_dead" for name in names)]:
            dataset = catalog.dataset(name)
            assert dataset is not None, "it is in the catalog"
            for partition in range(dataset.partitions):
                count += self._archive_partition(dataset, partition)
        self.records += count
        return count

    def _archive_partition(self, dataset: Dataset, partition: int) -> int:
        from dynamoth_analytics.cluster.reading import to_batch

        name, count = partition_name(dataset.name, partition), 0
        if name not in self._positions:
            self._positions[name] = max(
                (last for _, last, _ in _ranges(self._folder, dataset.name, partition)), default=0
            )
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
        if count:
            self._trim(server, name)
        return count

    def _trim(self, server: str, name: str) -> None:
        stream = partition_keys(name)[1]
        kept = self._servers.run(server, (b"XREVRANGE", stream, b"+", b"-", b"COUNT", b"%d" % (self.hot_records + 1)))
        if len(kept) > self.hot_records:
            self._servers.run(server, trim_command(name, int(kept[-1][0].partition(b"-")[0])))

    def _write(self, dataset: Dataset, partition: int, batch: Any, first: int, last: int) -> None:
        day = self._folder / dataset.name / f"date={datetime.now(UTC):%Y-%m-%d}"
        day.mkdir(parents=True, exist_ok=True)
        name = f"{partition}-{first:016d}-{last:016d}"
        hidden = day / f".{name}.tmp"
        with hidden.open("wb") as file:
            parquet.write_table(arrow.Table.from_batches([batch]), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(day / f"{name}.parquet")
