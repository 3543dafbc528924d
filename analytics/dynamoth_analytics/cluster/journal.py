"""The journal of executions: JSON lines, from which anybody can compute again what each execution had to give.

``executions/date=YYYY-MM-DD/QUERY.jsonl`` has a line per execution: its number and window (``start`` and ``end``, with
the offsets of all datasets, the loads of static ones, and ``sealed_ms``: interests that were registered until then
count), the version of the query, when its results were published (``ended_ms``), and figures. A line is written before
an execution counts as done: an execution that is repeated after a crash can have two lines with the same window, and
the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write_execution(folder: Path, query: str, values: Mapping[str, Any]) -> None:
    """Append a line, and force it to disk. Raises OSError; the line is not there then, nor a part of it."""
    day = folder / f"date={datetime.now(UTC):%Y-%m-%d}"
    day.mkdir(parents=True, exist_ok=True)
    line = (json.dumps({"query": query, **values}, separators=(",", ":")) + "\n").encode()
    with (day / f"{query}.jsonl").open("ab") as file:
        size = file.tell()
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
