"""Finds the files of a recording, and those among them that cannot be read."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from dynamoth.errors import ConfigError
from dynamoth.recording import MERGING_LOCK, TABLES, Type
from dynamoth_analytics.errors import BadRecording

# They have no types.
arrow: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")

_SPECIAL = "*?[]{}\\"

MERGING_S_MAX = 10.0
LOOK_S = 0.1

LOCK_FLAGS = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

NAMED_MAX = 3
"""Most files that a message names."""

_IS_OF_TYPE: dict[Type, Callable[[Any], bool]] = {
    Type.TIME: arrow.types.is_timestamp,
    Type.TEXT: lambda found: arrow.types.is_string(found) or arrow.types.is_large_string(found),
    Type.WHOLE: arrow.types.is_int64,
    Type.NUMBER: arrow.types.is_float64,
    Type.TRUTH: arrow.types.is_boolean,
    Type.BYTES: lambda found: arrow.types.is_binary(found) or arrow.types.is_large_binary(found),
    Type.TEXTS: lambda found: arrow.types.is_list(found) or arrow.types.is_large_list(found),
}


def is_url(folder: str) -> bool:
    """Return whether only Spark can look into a folder."""
    return "://" in folder


def check_recording(folder: str, begin: datetime | None, end: datetime | None) -> None:
    """Check that there is something to read and nothing is broken, before Spark starts.

    Raises:
        ConfigError: no such folder, or times in the wrong order.
        BadRecording: a folder without tables, or with files that do not belong to a recording.

    """
    if begin is not None and end is not None and begin >= end:
        raise ConfigError(f"--from {begin:%F %T} is not before --to {end:%F %T}: exchange them")
    if is_url(folder):
        return
    check_name(folder)
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            raise ConfigError(f"{folder} is a file: give the folder that `dynamoth record --out` wrote")
        raise ConfigError(f"there is no folder {folder}: give the one that `dynamoth record --out` wrote")
    if not {each.name for each in _listed(Path(folder))} & TABLES.keys():
        raise BadRecording(
            f"{folder} has no recording, as it has none of the folders {', '.join(TABLES)}: is it the right one?"
        )
    hours = {name: _files_between(Path(folder, name), begin, end) for name in TABLES}
    _refuse_broken({file: name for name, each in hours.items() for files in each.values() for file in files})


@contextmanager
def without_merging(folder: str) -> Generator[None]:
    """Keep recorders from merging files: jobs read a table several times, and list its files once.

    It needs a folder that this process can lock. A recorder that is merging is given ``MERGING_S_MAX`` to end.
    """
    if is_url(folder):
        yield
        return
    with ExitStack() as stack:
        with suppress(OSError):
            lock = stack.enter_context(open(os.open(Path(folder, MERGING_LOCK), LOCK_FLAGS, 0o644), "rb"))
            _lock_shared(lock)
        yield


def _lock_shared(lock: BinaryIO) -> None:
    deadline = time.monotonic() + MERGING_S_MAX
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)
        else:
            return


def check_name(folder: str) -> None:
    """Refuse the name of a folder that Spark would take for a pattern. Raises ConfigError."""
    if special := [each for each in _SPECIAL if each in folder]:
        raise ConfigError(f"{folder} has {special[0]} in its name, which Spark takes for a pattern: rename the folder")


def files_of(folder: str, name: str, begin: datetime | None, end: datetime | None) -> dict[Path, list[Path]]:
    """Return the files of a table, by the folders of the hours from ``begin`` to ``end`` that have some.

    Raises:
        BadRecording: a file is broken, or a folder is not an hour.

    """
    hours = _files_between(Path(folder, name), begin, end)
    _refuse_broken({file: name for files in hours.values() for file in files})
    return {hour: files for hour, files in hours.items() if files}


def _files_between(table: Path, begin: datetime | None, end: datetime | None) -> dict[Path, list[Path]]:
    return {
        hour: [file for file in _listed(hour) if file.suffix == ".parquet" and not file.name.startswith((".", "_"))]
        for hour in _hours_between(table, begin, end)
    }


def _refuse_broken(files: Mapping[Path, str]) -> None:
    """Raise BadRecording when files, each with the name of its table, are broken."""
    faults = {file: fault for file, table in files.items() if (fault := _fault(file, table))}
    if faults:
        named = ", ".join(f"{file} ({fault})" for file, fault in islice(faults.items(), NAMED_MAX))
        more = f" and {len(faults) - NAMED_MAX} more" if len(faults) > NAMED_MAX else ""
        raise BadRecording(f"cannot read {named}{more}: move what is broken elsewhere, and run it again")


def _hours_between(table: Path, begin: datetime | None, end: datetime | None) -> list[Path]:
    hours = hours_of(table).items()
    return [
        path
        for hour, path in hours
        if (begin is None or hour > begin - timedelta(hours=1)) and (end is None or hour < end)
    ]


def hours_of(table: Path) -> dict[datetime, Path]:
    """Return the folders of a table's hours, in order. Raises BadRecording when there are others among them."""
    dates = [date for date in _listed(table) if date.name.startswith("date=")] if table.is_dir() else []
    return {_begin_of(hour): hour for date in dates for hour in _listed(date) if hour.name.startswith("hour=")}


def _listed(folder: Path) -> list[Path]:
    """Return what is in a folder, by name. Raises BadRecording when that cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise BadRecording(f"{folder} cannot be read: {error.strerror}: correct its rights") from error


def _begin_of(hour: Path) -> datetime:
    try:
        return datetime.strptime(f"{hour.parent.name}/{hour.name}", "date=%Y-%m-%d/hour=%H").replace(tzinfo=UTC)
    except ValueError as error:
        raise BadRecording(f"{hour} is not an hour folder of a recording: move it elsewhere") from error


def _fault(file: Path, table: str) -> str | None:
    """Return what is wrong with a file, or None. Raises BadRecording when it cannot be looked at."""
    try:
        if not file.is_file() and file.exists():
            return "no regular file"
        metadata = parquet.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    except FileNotFoundError:
        return None  # a recorder has merged it with others
    except (arrow.ArrowInvalid, OSError) as error:
        if isinstance(error, PermissionError):
            raise BadRecording(f"{file} cannot be read: {error.strerror}: correct its rights") from error
        return "truncated, or not a Parquet file"
    types = dict(zip(schema.names, schema.types, strict=True))
    if len({name.lower() for name in types}) < len(schema.names):
        return "the names of two columns differ in case only"
    for column in TABLES[table].columns:
        found = types.get(column.name)
        if found is not None and not _IS_OF_TYPE[column.type](found):
            return f"its column {column.name} is {found}, not {column.type.value}"
    fields = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    nanoseconds = [
        field.path
        for field in fields
        if field.physical_type == "INT64" and getattr(types.get(field.path), "unit", None) == "ns"
    ]
    if nanoseconds:  # Spark itself writes those of its older format, INT96, and reads only these
        return f"its column {nanoseconds[0]} has nanoseconds, which Spark does not read: write microseconds"
    return None
