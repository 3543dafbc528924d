"""The journal of executions: JSON lines, from which anybody can compute again what each execution had to give.

``executions/date=YYYY-MM-DD/QUERY.jsonl`` has a line per execution: its number and window (``start`` and ``end``, with
the offsets of all datasets, the loads of static ones, and ``sealed_ms``: interests that were registered until then
count), the version of the query, when its results were published (``ended_ms``), and figures. A line is written before
an execution counts as done: an execution that is repeated after a crash can have two lines with the same window, and
the last one counts.

Lines are whole. Only a crash can leave a part of one, without a newline, at the end of a file. It is of an execution
that did not count as done and is repeated. It is removed when the next line is written to the file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from dynamoth_analytics.cluster.storage.durable_files import make_folder, sync

_log = logging.getLogger("dynamoth.data-cluster")


def write_execution(folder: Path, query: str, values: Mapping[str, Any]) -> None:
    """Append a line, and force it to disk. Raises OSError; the line is not there then, nor a part of it."""
    line = (json.dumps({"query": query, **values}, separators=(",", ":")) + "\n").encode()
    day = folder / f"date={datetime.now(UTC):%Y-%m-%d}"
    make_folder(day)
    path = day / f"{query}.jsonl"
    with FileIO(path, "a+") as file:
        size = _end_of_lines(file)
        if size < file.seek(0, os.SEEK_END):
            file.truncate(size)
            _log.warning("the journal %s ended with a part of a line, of an execution that is repeated", path)
        try:
            _write(file, line)
            os.fsync(file.fileno())
            if not size:
                sync(day)
        except OSError:
            file.truncate(size)
            raise


def delete_days(folder: Path, first_kept: str) -> None:
    """Delete the day folders before one with this name. Raises OSError."""
    for day in folder.glob("date=*"):
        if day.name < first_kept:
            shutil.rmtree(day)


def _end_of_lines(file: FileIO) -> int:
    """Return the size of a file without a part of a line at its end."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.readall().rfind(b"\n") + 1


def _write(file: FileIO, data: bytes) -> None:
    """Write all bytes: one call may write only a part of them."""
    while data:
        data = data[file.write(data) :]
