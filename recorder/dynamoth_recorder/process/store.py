"""Writes a recording to disk, as Parquet files that are complete when they appear.

Theory of operation
-------------------
A file is written under a hidden name, forced to disk and then renamed. So readers see all of it or nothing, also after
a crash. Its name begins with the id of the recorder, which no other process has. A lock on ``.recorder-<id>.lock``
shows that the recorder lives: the system releases it however the process ends. The next recorder that finds them
removes hidden files of dead recorders and merges their small files.

Small files of an hour are merged. The result appears before its parts are deleted, so a crash between the two leaves
rows twice and loses none. Rows have keys by which jobs drop copies.

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
"""Bounds of one merge. All rows are in memory, and twice at its end. A row of ``channels`` takes some 130 bytes of
memory. Long names take more, although they are compressed to nearly nothing on disk."""

FILES_PER_HOUR = 60
"""Small files of the present hour are merged once a table has this many, every 5 minutes at one file per 5 s. Those of
an hour that is over are merged at once."""

OVER_AFTER = timedelta(minutes=1)
"""An hour is over this long after its end, when late rows have been written."""

MERGING_S_MAX = 2.0
"""An upkeep begins no merge after this time. A recorder that is stopped waits for the merge that has begun."""

_HOUR = re.compile(r"date=(\d{4}-\d\d-\d\d)/hour=(\d\d)")
_FILE = re.compile(r"\.?([0-9a-f]{16})-\d+\.(?:parquet|tmp)")


class DiskFull(DynamothError):
    """Raised when a recorder cannot start because its disk is full."""

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
        folder: created if it does not exist. Other recorders may write to it, too.
        recorder: id, 16 hexadecimal digits that no other recorder has.
        keep_hours: older hours are deleted. 0: no limit.
        keep_bytes_max: while there are more bytes, the oldest hour is deleted, but never the present one. 0: no limit.

    Raises:
        ConfigError: the folder cannot be written.
        DiskFull: the folder cannot be written, but only because its disk is full.

    """

    def __init__(self, folder: Path, recorder: str, keep_hours: float = 0, keep_bytes_max: int = 0) -> None:
        self.folder = folder
        self.recorder = recorder
        self._keep_hours = keep_hours
        self._keep_bytes_max = keep_bytes_max
        self._numbers = count(1)
        #: Hours that are over and have nothing left to merge. Hours that no longer exist are removed.
        self._merged_hours: set[Path] = set()
        #: Files of other hours that are not merged: large, damaged, of another version, or impossible to delete.
        self._left_alone: set[Path] = set()
        #: By table, without merges.
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
        """Write a file for each portion. Return the portions that could not be written, and why.

        It tries all of them, as tables may be on different disks.
        """
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
        """Write a file. Raises OSError, and then leaves nothing of it."""
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
        """Delete old hours and merge small files, both as far as possible. Raises OSError."""
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
            except BlockingIOError:
                return
            self._merge(now)

    def _delete_old(self, now: datetime) -> None:
        """Delete hours, the oldest first. If some cannot be deleted, raises OSError after all others are."""
        failures: list[OSError] = []
        by_begin: defaultdict[datetime, list[_Hour]] = defaultdict(list)
        for hour in self._hours():
            by_begin[hour.begin].append(hour)
        past = sorted(begin for begin, hours in by_begin.items() if hours[0].is_over(now))
        if self._keep_hours:
            oldest = now - timedelta(hours=1 + self._keep_hours)
            while past and past[0] < oldest:
                failures += _delete(by_begin.pop(past.pop(0)))
        if self._keep_bytes_max:
            sizes = {begin: sum(map(_size_of, hours)) for begin, hours in by_begin.items()}
            total = sum(sizes.values())
            while past and total > self._keep_bytes_max:
                begin = past.pop(0)
                total -= sizes[begin]
                failures += _delete(by_begin[begin])
        if failures:
            raise failures[0]

    def _merge(self, now: datetime) -> None:
        deadline = time.monotonic() + MERGING_S_MAX
        hours = [*self._hours()]
        self._forget_except({hour.path for hour in hours})
        for hour in hours:
            if hour.path in self._merged_hours:
                continue
            is_over = hour.is_over(now)
            while group := self._mergeable(hour, 2 if is_over else FILES_PER_HOUR):
                self._merge_files(hour, group)
                if time.monotonic() > deadline:
                    return
            if is_over:
                self._merged_hours.add(hour.path)

    def _forget_except(self, hours: set[Path]) -> None:
        """Forget hours that do not exist, and files of hours that do not exist or are merged."""
        self._merged_hours &= hours
        self._left_alone = {path for path in self._left_alone if path.parent in hours - self._merged_hours}

    def _mergeable(self, hour: _Hour, least: int) -> list[Path]:
        """Return small files to merge, at least two; none if there are fewer than ``least``."""
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
        """Return whether a file belongs to this recorder or to one that has ended."""
        match = _FILE.fullmatch(path.name)
        if match is None or path in self._left_alone:
            return False
        return match[1] == self.recorder or not self._is_alive(match[1])

    def _rows_in(self, path: Path, schema: Any) -> int | None:
        """Return the number of rows; None if the file is damaged, gone, or of another version."""
        try:
            with parquet.ParquetFile(path) as file:
                is_ours = file.schema_arrow.equals(schema, check_metadata=True)
                return int(file.metadata.num_rows) if is_ours else None
        except (arrow.ArrowException, OSError):
            return None

    def _merge_files(self, hour: _Hour, paths: Sequence[Path]) -> None:
        """Merge files, as many as fit into memory. Leaves alone what is too large alone, or cannot be read or deleted.

        A part that is merged and not deleted would be merged again and again, with more copies of its rows each time.
        """
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
            failures: list[OSError] = []
            for path, _ in read:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    self._left_alone.add(path)
                    failures.append(error)
            if failures:
                raise failures[0]

    def _hours(self) -> Iterator[_Hour]:
        for table in TABLES:
            for path in sorted((self.folder / table).glob("date=*/hour=*")):
                if match := _HOUR.fullmatch(f"{path.parent.name}/{path.name}"):
                    with suppress(ValueError):  # such as hour=99
                        begin = datetime.strptime(f"{match[1]} {match[2]} +0000", "%Y-%m-%d %H %z")
                        yield _Hour(table, begin.astimezone(UTC), path)

    # Other recorders.

    def _locked(self) -> BinaryIO:
        """Return the open lock that shows that this recorder lives. The file is locked before it gets its name."""
        path = self._lock_path(self.recorder)
        hidden = path.with_suffix(".new")
        file = _opened_for_lock(hidden)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(path)
        return file

    def _lock_path(self, recorder: str) -> Path:
        return self.folder / f".recorder-{recorder}.lock"

    def _is_alive(self, recorder: str) -> bool:
        """Return whether another recorder still runs."""
        try:
            with open(self._lock_path(recorder), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def _remove_leftovers(self) -> None:
        """Remove the hidden files and the locks of dead recorders."""
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
    with suppress(FileNotFoundError, NotADirectoryError):  # another recorder deletes it; or it is no hour
        return sum(map(_size_of_file, hour.path.iterdir()))
    return 0


def _size_of_file(path: Path) -> int:
    """Return the size of a file, or 0 if it is gone: other recorders rename and delete files."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _delete(hours: list[_Hour]) -> list[OSError]:
    """Delete an hour of all tables, and the folder of a day without hours. Return the failures."""
    failures: list[OSError] = []
    for hour in hours:
        try:
            # The target of a link belongs to the user who made the link.
            hour.path.unlink() if hour.path.is_symlink() else shutil.rmtree(hour.path)
        except FileNotFoundError:  # another recorder has deleted it
            pass
        except OSError as error:
            failures.append(error)
        with suppress(OSError):  # the day has other hours
            hour.path.parent.rmdir()
    return failures


def _opened_for_lock(path: Path) -> BinaryIO:
    """Open a file to lock it. Never follows a link: its target may belong to another user."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "wb")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
