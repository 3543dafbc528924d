"""The files of the archive: their names, and the records in them.

Theory of operation
-------------------
A file has a range of offsets of one partition. Its name, ``PARTITION-BEFORE-FIRST-LAST``, says which, and chains it to
the file before: ``BEFORE`` is the offset up to which other files have to have all records. That is the last offset of
the file before, whatever jumps of offsets (restarts of the server) are in between. Where records were lost before they
were archived, it is the offset of the last lost one. So a reader whose position is below ``BEFORE`` has met a hole:
a file is missing, its day was deleted, or the records were never archived.

Small files are merged (``merging``): the merged file is there before its parts are deleted. A reader that meets both
reads each record once, as the ranges in the names show what was read already.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dynamoth.data.datasets import Dataset
from dynamoth_analytics.cluster.storage.batches import ARRIVED, read_file
from dynamoth_analytics.files import arrow, parquet

SETTLED_S = 2.0
"""A folder that has changed within this time is listed again: its time of change may not show the next change."""


class ArchiveFile(NamedTuple):
    """A file of the archive, as its name describes it."""

    #: Up to this offset, other files have all records.
    before: int
    first: int
    last: int
    path: Path

    @property
    def order(self) -> tuple[int, int]:
        """For sorting: by first offset, and a merged file before its parts."""
        return self.first, -self.last


class Hole(NamedTuple):
    """Offsets of records that a file says were there, and no file has."""

    first: int
    last: int


_known: dict[Path, tuple[int, dict[int, list[ArchiveFile]]]] = {}
"""Of this process: when each day folder had changed last, and its files by partition."""


def file_name(partition: int, before: int, first: int, last: int) -> str:
    """Return the name of a file."""
    return f"{partition}-{before:016d}-{first:016d}-{last:016d}.parquet"


def day_files(day: Path) -> dict[int, list[ArchiveFile]]:
    """Return a day's files, in order, by partition."""
    try:
        changed_ns = day.stat().st_mtime_ns
        known = _known.get(day)
        if known is not None and known[0] == changed_ns:
            return known[1]
        names = os.listdir(day)
    except FileNotFoundError:
        return {}
    found: dict[int, list[ArchiveFile]] = {}
    for name in names:
        if name.endswith(".parquet") and not name.startswith("."):
            partition, before, first, last = map(int, name.removesuffix(".parquet").split("-"))
            found.setdefault(partition, []).append(ArchiveFile(before, first, last, day / name))
    for files in found.values():
        files.sort(key=lambda each: each.order)
    if time.time_ns() - changed_ns > SETTLED_S * 1e9:
        _known[day] = (changed_ns, found)
    return found


def forget(day: Path) -> None:
    """Forget the files of a day folder: it is listed again when it is needed next."""
    _known.pop(day, None)


def days(folder: Path, dataset: str) -> list[Path]:
    """Return the day folders of a dataset, the newest first."""
    return sorted((folder / dataset).glob("date=*"), reverse=True)


def first_archived(folder: Path, dataset: str, partition: int) -> ArchiveFile | None:
    """Return the oldest file of a partition; None: there is none."""
    for day in reversed(days(folder, dataset)):
        if files := day_files(day).get(partition):
            return files[0]
    return None


def last_archived(folder: Path, dataset: str, partition: int) -> int:
    """Return the last archived offset of a partition; 0: there is none."""
    for day in days(folder, dataset):
        if files := day_files(day).get(partition):
            return max(each.last for each in files)
    return 0


def last_arrived(folder: Path, dataset: str, partition: int) -> datetime | None:
    """Return when the last archived record of a partition was stored; None: there is none, or it cannot be read."""
    for day in days(folder, dataset):
        if files := day_files(day).get(partition):
            latest = max(files, key=lambda each: each.last)
            try:
                with parquet.ParquetFile(latest.path) as file:
                    group = file.read_row_group(file.num_row_groups - 1, columns=[ARRIVED])
                    found: datetime = group.column(ARRIVED)[-1].as_py()
                    return found
            except (OSError, arrow.ArrowException):
                return None
    return None


def files_between(folder: Path, dataset: str, partition: int, after: int, until: int) -> list[ArchiveFile]:
    """Return the files with records, or losses, behind ``after`` and up to ``until``, in order.

    Offsets grow from day to day, so no day is listed that is older than ``after``.
    """
    found: list[ArchiveFile] = []
    for day in days(folder, dataset):
        files = day_files(day).get(partition, [])
        found += [each for each in files if each.last > after and (each.first <= until or each.before < until)]
        if files and min(each.before for each in files) <= after:
            break
    return sorted(found, key=lambda each: each.order)


def archived(folder: Path, dataset: Dataset, partition: int, after: int, until: int) -> Iterator[Any | Hole]:
    """Yield the archived records behind ``after`` and up to ``until`` as Arrow batches, in order, each record once.

    Where the chain of files has a hole, a ``Hole`` comes in its place. Records after the last file are not reported.
    One row group is in memory at a time.
    """
    position = after
    files = files_between(folder, dataset.name, partition, position, until)
    while files:
        each = files.pop(0)
        if each.last <= position:
            continue
        if each.before > position and position < until:
            yield Hole(position + 1, min(each.before, until))
            position = min(each.before, until)
        if each.first > until:
            return
        try:
            file = parquet.ParquetFile(each.path)
        except FileNotFoundError:  # it was merged meanwhile
            forget(each.path.parent)
            files = files_between(folder, dataset.name, partition, position, until)
            if each in files:
                raise
            continue
        with file:
            yield from read_file(file, dataset, position, until)
        position = each.last
