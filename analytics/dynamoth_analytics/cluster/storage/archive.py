"""The archive: Parquet files with the records of each dataset, behind its streams at Redis.

Theory of operation
-------------------
A file has a range of offsets of one partition, which its name says (``archive_files``). It appears as a whole or not at
all, and is on disk then. Only then the stream is trimmed. A process that dies in between archives nothing twice, as the
last file says where to go on. A partition that cannot be archived does not hold up the others.

A process that hangs may be taken over meanwhile, by a data cluster that archives and trims the same records. So the
term is checked after records were read: right before their file is put in place, and before they are called lost.

A log server that was restored from an older copy, and counts as durable, gives offsets again that the archive has for
other records. Whatever is stored there then would be taken for archived, and trimmed. So the last archived record is
compared with that of the stream before (``_offsets_again``). Queries on such a partition fail, too.

The small files of past days are merged (``merging``), and old days are deleted if so configured: before anything is
written, so that a full disk gets room.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import redis.exceptions

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import Dataset, dead_letters
from dynamoth.data.records import Record, parse_records, partition_keys, partition_name, range_command
from dynamoth.data.terms import trim_command
from dynamoth.errors import DynamothError
from dynamoth_analytics.cluster.failures import reason_of
from dynamoth_analytics.cluster.servers import LogServerFailed, LogServers, TakenOver
from dynamoth_analytics.cluster.storage.archive_files import (
    day_files,
    days,
    file_name,
    forget,
    last_archived,
    last_arrived,
)
from dynamoth_analytics.cluster.storage.batches import ARRIVED, OFFSET, record_schema, to_batch, write_file
from dynamoth_analytics.cluster.storage.durable_files import make_folder
from dynamoth_analytics.cluster.storage.journal import delete_days
from dynamoth_analytics.cluster.storage.merging import merge_day
from dynamoth_analytics.cluster.storage.paging import pages
from dynamoth_analytics.cluster.storage.reading import read_state
from dynamoth_analytics.files import arrow

FILE_RECORDS_MAX = 50_000
FILE_BYTES_MAX = 64 * 2**20
"""A file ends when it has this many records or bytes of JSON, which are in memory until it is written."""

TRIM_RECORDS_MAX = 10_000
"""Records that one command removes: a log server executes nothing else meanwhile."""

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("dynamoth.data-cluster")


class ArchivingFailed(DynamothError):
    """Raised when a part of the archive could not be written; everything else was, unless the disk is full."""

    code = "archiving"


class Archiver:
    """Copies records from Redis to Parquet files, and trims them at Redis.

    Args:
        servers: the log servers.
        folder: of the archive.
        hot_records: records of each partition that stay at Redis, but at most half of the dataset's ``waiting_max``.
        journal: the folder of the journal of executions, whose old days are deleted, too; None: there is none.

    """

    def __init__(
        self, servers: LogServers, folder: Path, hot_records: int = 100_000, journal: Path | None = None
    ) -> None:
        self._servers = servers
        self._folder = folder
        self._journal = journal
        self.hot_records = hot_records
        #: The term of its data cluster, with which it trims.
        self.term = 0
        #: Raises TakenOver where a log server has a newer term.
        self.check_term: Callable[[str], None] = lambda server: None
        #: Up to which offset each partition is archived, by its name.
        self._positions: dict[str, int] = {}
        #: When the last archived record of each partition was stored; None: its file cannot be read, or there is none.
        self._arrived: dict[str, datetime | None] = {}
        #: Partitions whose servers give offsets again, and what to do about it.
        self.offsets_again: dict[str, str] = {}
        #: Days whose files are merged.
        self._merged: set[Path] = set()
        #: Days that are older than this are deleted, those of the archive only where nobody needs them; 0: none is.
        self.keep_days = 0
        #: Up to which offset nobody needs the archive of each partition, by its name.
        self.unneeded: Mapping[str, int] = {}
        self._is_cleaned = False
        #: Why parts have failed in this call.
        self._failures: list[str] = []
        #: Log servers that cannot be reached in this call.
        self._unreachable: set[str] = set()
        #: How many records this process has archived.
        self.records = 0
        #: Whether the disk was full at the last call: records stay at Redis.
        self.is_full = False

    def archive(self, catalog: Catalog) -> int:
        """Archive the new records of all datasets; return how many there were.

        Raises ArchivingFailed where parts have failed, when all others are done. While the disk is full, records stay
        at Redis, and the next call tries again. Raises TakenOver where a newer data cluster is there.
        """
        before = self.records
        self._failures, self._unreachable = [], set()
        try:
            self._clean()
            self._delete_old(catalog)
            self._archive(catalog)
            self._merge_day()
            self.is_full = False
        except OSError as error:
            if error.errno not in _FULL_DISK:
                raise
            self.is_full = True
            text = f"the disk of the archive is full: make room in {self._folder}; records stay at Redis until then"
            self._failures.insert(0, text)
        if self._failures:
            others = len(self._failures) - 1
            raise ArchivingFailed(self._failures[0] + f" (and {others} more like this)" * (others > 0))
        return self.records - before

    def _clean(self) -> None:
        """Delete the hidden files of a process that died, and days that were deleted in part."""
        if self._is_cleaned:
            return
        try:
            for file in self._folder.glob("*/date=*/.*.tmp"):
                file.unlink(missing_ok=True)
            for day in self._folder.glob("*/.date=*"):
                shutil.rmtree(day)
            self._is_cleaned = True
        except OSError as error:
            self._failures.append(f"files that a process has left are not deleted: {error}")

    def _merge_day(self) -> None:
        """Merge the files of one past day; only one, so that a call does not take long."""
        today = f"date={datetime.now(UTC):%Y-%m-%d}"
        for day in sorted(self._folder.glob("*/date=*")):
            if day.name < today and day not in self._merged:
                self._merged.add(day)
                try:
                    merge_day(day)
                except (OSError, arrow.ArrowException) as error:
                    if isinstance(error, OSError) and error.errno in _FULL_DISK:
                        self._merged.discard(day)
                        raise
                    self._failures.append(f"the files of {day} are not merged: {error}")
                return

    def _delete_old(self, catalog: Catalog) -> None:
        """Delete old days of the archive and of the journal."""
        if not self.keep_days:
            return
        first_kept = f"date={datetime.now(UTC) - timedelta(days=self.keep_days):%Y-%m-%d}"
        if self._journal is not None:
            try:
                delete_days(self._journal, first_kept)
            except OSError as error:
                self._failures.append(f"old days of the journal of executions are not deleted: {error}")
        for dataset in archived_datasets(catalog):
            try:
                self._delete_days(dataset, first_kept)
            except OSError as error:
                self._is_cleaned = False  # what is left of a day is deleted by the next call
                self._failures.append(f"old days of dataset {dataset.name} are not deleted: {error}")

    def _delete_days(self, dataset: Dataset, first_kept: str) -> None:
        """Delete old days, the oldest first, up to one that somebody needs or that has the last file of a partition."""
        newest_first = days(self._folder, dataset.name)
        while newest_first and newest_first[-1].name < first_kept:
            day = newest_first.pop()
            if not self._is_unneeded(dataset, day, newest_first):
                return
            hidden = day.with_name(f".{day.name}")
            day.rename(hidden)
            forget(day)
            shutil.rmtree(hidden)
            _log.info("the archive of dataset %s: %s was deleted", dataset.name, day.name)

    def _is_unneeded(self, dataset: Dataset, day: Path, newer: Sequence[Path]) -> bool:
        for partition, files in day_files(day).items():
            until = self.unneeded.get(partition_name(dataset.name, partition), 0)
            if max(each.last for each in files) > until or not any(partition in day_files(each) for each in newer):
                return False
        return True

    def _archive(self, catalog: Catalog) -> None:
        for dataset in archived_datasets(catalog):
            for partition in range(dataset.partitions):
                self._try(dataset, partition)

    def _try(self, dataset: Dataset, partition: int) -> None:
        """Archive one partition; note why that fails."""
        name = partition_name(dataset.name, partition)
        server = self._servers.server_of(name)
        if server in self._unreachable:
            return
        try:
            self._archive_partition(dataset, partition)
        except TakenOver:
            raise
        except (DynamothError, OSError, arrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno in _FULL_DISK:
                raise
            if isinstance(error, LogServerFailed) and _is_unreachable(error):
                self._unreachable.add(server)
            reason = reason_of(error) if isinstance(error, OSError) else error
            self._failures.append(f"partition {name} is not archived: {reason}")

    def _archive_partition(self, dataset: Dataset, partition: int) -> None:
        name = partition_name(dataset.name, partition)
        if name not in self._positions:
            self._arrived[name] = last_arrived(self._folder, dataset.name, partition)
            self._positions[name] = last_archived(self._folder, dataset.name, partition)
        if reason := self._offsets_again(name):
            self.offsets_again[name] = reason
            raise ArchivingFailed(reason)
        self.offsets_again.pop(name, None)
        for before, batches in self._files(dataset, partition):
            first, last = batches[0].column(OFFSET)[0].as_py(), batches[-1].column(OFFSET)[-1].as_py()
            day = self._folder / dataset.name / f"date={datetime.now(UTC):%Y-%m-%d}"
            make_folder(day)
            tables = (arrow.Table.from_batches([batch]) for batch in batches)
            check = partial(self.check_term, self._servers.server_of(name))
            write_file(day / file_name(partition, before, first, last), record_schema(dataset), tables, check)
            self._positions[name], self._arrived[name] = last, batches[-1].column(ARRIVED)[-1].as_py()
            self.records += sum(map(len, batches))
        self._trim(dataset, name)

    def _offsets_again(self, name: str) -> str:
        """Return what to do where the server of a partition gives offsets again that the archive has; else nothing.

        Only a server that counts as durable goes on behind its last record when it comes back; others go on behind all
        offsets that were ever given.
        """
        position, arrived, server = self._positions[name], self._arrived[name], self._servers.server_of(name)
        if not position or not self._servers.durable:
            return ""
        at_end = parse_records(self._servers.run(server, range_command(name, position - 1, position, 1)))
        offset = read_state(self._servers, name).offset
        is_other = bool(at_end) and arrived is not None and at_end[0].arrived_ms != _milliseconds(arrived)
        if not is_other and not 0 < offset < position:
            return ""
        return (
            f"log server {server} gives offsets again that the archive has: was an older copy restored? Bring its"
            " latest files back; or save what is new (`dynamoth dataset tail`), let the server begin empty, and store"
            " that again: see docs/operating.md (Backup and restore)"
        )

    def _files(self, dataset: Dataset, partition: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield the contents of each new file: up to which offset other files have all records, and its batches."""
        before = position = self._positions[partition_name(dataset.name, partition)]
        batches: list[Any] = []
        records = size = 0
        for page in pages(self._servers, dataset, partition, position, 2**53):
            lost = self._lost(dataset, partition, position, page)
            if batches and (lost or records >= FILE_RECORDS_MAX or size >= FILE_BYTES_MAX):
                yield before, batches
                before, batches, records, size = position, [], 0, 0
            before = lost or before
            batches.append(to_batch(dataset, partition, page))
            records, size = records + len(page), size + sum(len(each.value) for each in page)
            position = page[-1].offset
        if batches:
            yield before, batches

    def _lost(self, dataset: Dataset, partition: int, after: int, page: list[Record]) -> int:
        """Return the last offset of records that were lost between ``after`` and a page; 0: none that is known."""
        first = page[0].offset
        if first == after + 1:
            return 0
        name = partition_name(dataset.name, partition)
        given = read_state(self._servers, name).given(after, first - 1)
        if given:
            self.check_term(self._servers.server_of(name))
            text = "records of %s from offset %d to %d were lost before they were archived"
            _log.error(text, name, given[0][0], given[-1][1])
        return given[-1][1] if given else 0

    def _trim(self, dataset: Dataset, name: str) -> None:
        """Remove archived records from the stream, the oldest first, until it has only as many as may stay.

        Offsets only jump upwards: so those of the oldest records are at least what is computed here.
        """
        server, stream = self._servers.server_of(name), partition_keys(name)[1]
        kept = min(self.hot_records, dataset.waiting_max // 2)
        while True:
            oldest = (b"XRANGE", stream, b"-", b"+", b"COUNT", b"1")
            length, entries = self._servers.run_all(server, [(b"XLEN", stream), oldest])
            if length <= kept or not entries:
                return
            first = int(entries[0][0].partition(b"-")[0])
            until = min(first + min(length - kept, TRIM_RECORDS_MAX) - 1, self._positions[name])
            if until < first:
                return
            self._servers.run(server, trim_command(name, until, self.term))


def archived_datasets(catalog: Catalog) -> Iterator[Dataset]:
    """Yield the datasets that are archived."""
    for dataset in catalog.datasets.values():
        if dataset.kind != "static":
            yield dataset
            yield dead_letters(dataset.name)


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def _is_unreachable(error: LogServerFailed) -> bool:
    """Return whether a server is down, and not only refuses a command: its other partitions would have to wait, too."""
    return isinstance(error.__cause__, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError)
