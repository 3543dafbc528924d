"""The checkpoint of a query: a folder, in which Spark writes each window before it is executed.

``base.json`` says where it begins: the execution before its first one, and the offsets before its first window. Spark's
own files are below ``spark``: ``offsets/N`` has the end of the window of batch N, and ``commits/N`` says that it ended.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamoth.data.executions import Checkpoint, Window

BASE_FILE = "base.json"

Offsets = Mapping[str, Any]
"""As the source gives them."""


@dataclass(frozen=True)
class Base:
    """What ``base.json`` says."""

    #: The execution before the first one.
    execution: int
    start: Offsets
    #: End of the first window, where an execution is repeated; None: that of the next tick.
    first_end: Offsets | None
    #: The datasets that the query read then.
    datasets: Sequence[str]


class CheckpointFolder:
    """One query's checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def spark_folder(self) -> Path:
        """Where Spark writes."""
        return self._folder / "spark"

    def base(self) -> Base | None:
        """Return where it begins; None if there is no checkpoint. Raises OSError."""
        try:
            values = json.loads((self._folder / BASE_FILE).read_text(encoding="utf-8"))
            return Base(values["base"], values["start"], values["end"], values["datasets"])
        except (FileNotFoundError, ValueError, KeyError):
            return None  # it never came to be, or is damaged: what the log server has stored counts then

    def begin(self, base: Base) -> None:
        """Begin a new one. Raises OSError."""
        self.remove()
        self._folder.mkdir(parents=True)
        values = {
            "base": base.execution, "start": base.start, "end": base.first_end, "datasets": list(base.datasets)
        }  # fmt: skip
        hidden = self._folder / "base.tmp"
        with hidden.open("w", encoding="utf-8") as file:
            file.write(json.dumps(values))
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(self._folder / BASE_FILE)

    def remove(self) -> None:
        """Remove it. ``base.json`` goes first: without that, the rest is no checkpoint."""
        (self._folder / BASE_FILE).unlink(missing_ok=True)
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def read(self) -> Checkpoint | None:
        """Return what it says; None if there is none. Raises OSError."""
        base = self.base()
        if base is None:
            return None
        ends = {base.execution + 1 + batch: self._end(batch) for batch in _numbers(self.spark_folder / "offsets")}
        commits = _numbers(self.spark_folder / "commits")
        committed = base.execution + 1 + max(commits, default=-1)
        return Checkpoint(base.execution, ends, committed, base.start, base.first_end)

    def window(self, batch: int) -> Window:
        """Return the window of a batch: Spark has written it before it is executed."""
        base = self.base()
        assert base is not None, "a stream has a checkpoint"
        return Window(self._end(batch - 1) if batch else base.start, self._end(batch))

    def _end(self, batch: int) -> Offsets:
        text = (self.spark_folder / "offsets" / str(batch)).read_text(encoding="utf-8")
        end: Offsets = json.loads(text.splitlines()[-1])
        return end


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of batches that have a file."""
    return [int(file.name) for file in folder.iterdir() if file.name.isdecimal()] if folder.is_dir() else []
