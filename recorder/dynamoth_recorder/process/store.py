"""Writes a recording to disk: Parquet files that are complete when they appear.

Theory of operation
-------------------
A file is written under a hidden name, forced to disk and then renamed, so a reader and a crash see all of it or
nothing. Its name begins with the id of the recorder, which no other process has. A lock on ``.recorder-<id>.lock``
shows that the recorder lives: the system releases it however the process ends. Hidden files of dead recorders are
removed, and their small files merged, by whoever comes across them.

Small files of an hour are merged: the result appears before its parts are deleted, so a crash between leaves rows
twice, and never loses any. Rows have keys by which jobs drop copies.

All methods block, so they run in threads: writing in one, upkeep in another, so that rows never wait for a merge.
Upkeep touches complete files only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from dynamoth.errors import ConfigError, DynamothError
from dynamoth.recording import MERGING_LOCK, TABLES
from dynamoth_recorder.process.backlog import Portion
from dynamoth_recorder.process.tables import SCHEMAS, arrow, parquet

SMALL_BYTES = 16 * 1024 * 1024
SMALL_ROWS = 500_000
"""Files below this size and number of rows are merged."""

MERGED_BYTES_MAX = 2 * SMALL_BYTES
MERGED_ROWS_MAX = 2 * SMALL_ROWS
MERGED_MEMORY_BYTES_MAX = 256 * 1024 * 1024
"""Bounds of the files of one merge. All of it is in memory, twice at its end. A row of ``channels`` takes some 130
bytes there, and more with long names, which take next to nothing on disk."""

FILES_PER_HOUR = 60
"""Once the present hour has this many small files of a table, they are merged; those of an hour that is over, always.
At a file per 5 s this is 5 minutes."""

OVER_AFTER = timedelta(minutes=1)
"""An hour is over this long after its end: late rows have been written."""

MERGING_S_MAX = 2.0
"""No merge of an upkeep begins later than this: a recorder that is stopped waits for the last one."""

_HOUR = re.compile(r"date=(\d{4}-\d\d-\d\d)/hour=(\d\d)")
_FILE = re.compile(r"\.?([0-9a-f]{16})-\d+\.(?:parquet|tmp)")


class DiskFull(DynamothError):
    """Raised when a recorder cannot begin, as its disk is full."""

    code = "disk-full"


@dataclass(frozen=True, slots=True)
class _Hour:
    """One hour of one table."""

    table: str
    begin: datetime
    path: Path

    def is_over(self, now: datetime) -> bool:
        return now - timedelta(hours=1) - OVER_AFTER > self.begin


class Store:
    """The recording in a folder, as one recorder writes it.

    Args:
        folder: made if it is not there. Other recorders may write to it, too.
        recorder: 16 hexadecimal digits that no other recorder has.
        keep_hours: older hours are deleted; 0: none.
        keep_bytes_max: while there is more, the oldest hour is deleted, but not the present one; 0: none.

    Raises:
        ConfigError: nothing can be written there.
        DiskFull: nothing can be written there now.

    """

    def __init__(self, folder: Path, recorder: str, keep_hours: float = 0, keep_bytes_max: int = 0) -> None:
        self.folder = folder
        self.recorder = recorder
        self._keep_hours = keep_hours
        self._keep_bytes_max = keep_bytes_max
        self._numbers = count(1)
        #: Hours with nothing left to merge, and files that are not merged: large, damaged, of another version.
        self._merged_hours: set[Path] = set()
        self._left_alone: set[Path] = set()
        self.rows_written: Counter[str] = Counter()
        self.bytes_written = 0
        self.files_written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()  # a full disk may have room for the lock afterwards
            self._lock = self._locked()
        except OSError as error:
            reason = error.strerror or str(error)
            text = f"recorder.out: {folder} cannot be written ({reason})"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"{text}: make room, and start it again") from error
            raise ConfigError(f"{text}: choose another folder") from error

    def close(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            self._lock_path(self.recorder).unlink(missing_ok=True)
        self._lock.close()

    def write_all(self, portions: Sequence[Portion]) -> tuple[list[Portion], str]:
        """Write a file for each. Returns those that could not be written, and why: tables may be on different disks."""
        left: list[Portion] = []
        failure = ""
        for portion in portions:
            try:
                self.write(portion)
            except OSError as error:
                left.append(portion)
                failure = failure or f"{self.folder / portion.table}: {error.strerror or error}"
        return left, failure

    def write(self, portion: Portion) -> None:
        """Write a file. Raises OSError; then nothing of it is left."""
        table = arrow.Table.from_batches(portion.batches, SCHEMAS[portion.table]).combine_chunks()
        size = self._write_file(self.folder / portion.table / portion.hour, table)
        self.rows_written[portion.table] += table.num_rows
        self.bytes_written += size
        self.files_written += 1

    def _write_file(self, folder: Path, table: Any) -> int:
        """Write a file and return its size. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.recorder}-{next(self._numbers):08d}"
        hidden = folder / f".{name}.tmp"
        try:
            with open(hidden, "xb") as file:
                parquet.write_table(table, file, compression="zstd", compression_level=1)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            hidden.rename(folder / f"{name}.parquet")
        except OSError:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise
        _sync_folder(folder)
        return size

    # Upkeep.

    def upkeep(self, now: datetime, *, merge: bool = True) -> None:
        """Delete what is too old or too much, and merge small files. Raises OSError."""
        try:
            self._delete_old(now)
        finally:
            if merge:
                self._merge_alone(now)

    def _merge_alone(self, now: datetime) -> None:
        """Merge files, unless another recorder does."""
        with _opened_for_lock(self.folder / MERGING_LOCK) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another recorder does it
                return
            self._merge(now)

    def _delete_old(self, now: datetime) -> None:
        """Delete hours, the oldest first. Raises OSError when one cannot be deleted, after all others."""
        failures: list[OSError] = []
        by_begin: defaultdict[datetime, list[_Hour]] = defaultdict(list)
        for hour in self._hours():
            by_begin[hour.begin].append(hour)
        past = sorted(begin for begin, hours in by_begin.items() if hours[0].is_over(now))
        if self._keep_hours:
            oldest = now - timedelta(hours=1 + self._keep_hours)
            while past and past[0] < oldest:
                failures += _delete(by_begin.pop(past.pop(0)))
        sizes = {begin: sum(map(_size_of, hours)) for begin, hours in by_begin.items()}
        total = sum(sizes.values())
        while self._keep_bytes_max and past and total > self._keep_bytes_max:
            begin = past.pop(0)
            total -= sizes[begin]
            failures += _delete(by_begin[begin])
        if failures:
            raise failures[0]

    def _merge(self, now: datetime) -> None:
        deadline = time.monotonic() + MERGING_S_MAX
        for hour in self._hours():
            if hour.path in self._merged_hours:
                continue
            is_over = hour.is_over(now)
            while group := self._mergeable(hour, 2 if is_over else FILES_PER_HOUR):
                self._merge_files(hour, group)
                if time.monotonic() > deadline:
                    return
            if is_over:
                self._merged_hours.add(hour.path)

    def _mergeable(self, hour: _Hour, least: int) -> list[Path]:
        """Return small files to merge, at least two; none while there are less than ``least``."""
        paths = [path for path in sorted(hour.path.glob("*.parquet")) if self._may_merge(path)]
        if len(paths) < least:
            return []
        group: list[Path] = []
        rows = size = 0
        for path in paths:
            rows_here, size_here = self._rows_in(path, SCHEMAS[hour.table]), _size_of_file(path)
            if rows_here is None or rows_here >= SMALL_ROWS or size_here >= SMALL_BYTES:
                self._left_alone.add(path)
            elif rows + rows_here <= MERGED_ROWS_MAX and size + size_here <= MERGED_BYTES_MAX:
                group.append(path)
                rows += rows_here
                size += size_here
        return group if len(group) > 1 else []

    def _may_merge(self, path: Path) -> bool:
        """Return whether a file is ours, or of a recorder that has ended."""
        match = _FILE.fullmatch(path.name)
        if match is None or path in self._left_alone:
            return False
        return match[1] == self.recorder or not self._is_alive(match[1])

    def _rows_in(self, path: Path, schema: Any) -> int | None:
        """Return the number of rows; None for a file that is damaged, gone, or of another version: readers judge it."""
        try:
            with parquet.ParquetFile(path) as file:
                is_ours = file.schema_arrow.equals(schema, check_metadata=True)
                return int(file.metadata.num_rows) if is_ours else None
        except (arrow.ArrowException, OSError):
            return None

    def _merge_files(self, hour: _Hour, paths: Sequence[Path]) -> None:
        """Merge files, as many as the memory is for; those that are too large there are left alone."""
        read: list[tuple[Path, Any]] = []
        size = 0
        for path in paths:
            try:
                with parquet.ParquetFile(path) as file:
                    table = file.read()
            except (arrow.ArrowException, OSError):
                self._left_alone.add(path)
                continue
            if table.nbytes > MERGED_MEMORY_BYTES_MAX / 2:
                self._left_alone.add(path)
            elif size + table.nbytes > MERGED_MEMORY_BYTES_MAX:
                break
            else:
                read.append((path, table))
                size += table.nbytes
        if len(read) > 1:
            self._write_file(hour.path, arrow.concat_tables([table for _, table in read]).combine_chunks())
            for path, _ in read:
                path.unlink(missing_ok=True)

    def _hours(self) -> Iterator[_Hour]:
        for table in TABLES:
            for path in sorted((self.folder / table).glob("date=*/hour=*")):
                if match := _HOUR.fullmatch(f"{path.parent.name}/{path.name}"):
                    with suppress(ValueError):  # such as hour=99
                        begin = datetime.strptime(f"{match[1]} {match[2]} +0000", "%Y-%m-%d %H %z")
                        yield _Hour(table, begin.astimezone(UTC), path)

    # Other recorders.

    def _locked(self) -> BinaryIO:
        """Return the file that shows that this recorder lives. It gets its name once it is locked."""
        path = self._lock_path(self.recorder)
        hidden = path.with_suffix(".new")
        file = _opened_for_lock(hidden)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(path)
        return file

    def _lock_path(self, recorder: str) -> Path:
        return self.folder / f".recorder-{recorder}.lock"

    def _is_alive(self, recorder: str) -> bool:
        """Return whether a recorder, other than this one, still runs."""
        try:
            with open(self._lock_path(recorder), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def _remove_leftovers(self) -> None:
        """Remove what dead recorders have begun and not finished, and their locks."""
        alive = {self.recorder}
        for lock in self.folder.glob(".recorder-*.lock"):
            recorder = lock.name.removeprefix(".recorder-").removesuffix(".lock")
            if recorder != self.recorder and self._is_alive(recorder):
                alive.add(recorder)
            elif recorder != self.recorder:
                lock.unlink(missing_ok=True)
        for hour in self._hours():
            for hidden in hour.path.glob(".*.tmp"):
                match = _FILE.fullmatch(hidden.name)
                if match is not None and match[1] not in alive:
                    hidden.unlink(missing_ok=True)


def _size_of(hour: _Hour) -> int:
    return sum(map(_size_of_file, hour.path.iterdir()))


def _size_of_file(path: Path) -> int:
    """Return the size of a file; 0 when it is gone: others write, rename and delete."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _delete(hours: list[_Hour]) -> list[OSError]:
    """Delete an hour of all tables, and the day's folder with its last hour; return what failed."""
    failures: list[OSError] = []
    for hour in hours:
        try:
            # Behind a link is another disk's folder: that of whoever made the link.
            hour.path.unlink() if hour.path.is_symlink() else shutil.rmtree(hour.path)
        except FileNotFoundError:  # another recorder deletes it
            pass
        except OSError as error:
            failures.append(error)
        with suppress(OSError):  # it has other hours
            hour.path.parent.rmdir()
    return failures


def _opened_for_lock(path: Path) -> BinaryIO:
    """Open a file that nobody reads; never one behind a link, which may be of somebody else."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "wb")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
