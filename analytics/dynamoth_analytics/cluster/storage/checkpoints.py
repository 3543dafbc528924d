"""The checkpoint of a query: a folder, in which each window is written before it is executed.

``base.json`` says where it begins: the execution before its first one, and the offsets before its first window.
``windows/N.json`` is the end of the window of batch N. Spark's own files are below ``spark``: ``commits/N`` there says
that batch N has ended.

Spark does not force its files to disk: after a power failure some may be missing or empty, so that it cannot go on.
Then a new checkpoint is begun behind the last batch that has ended, as the names of Spark's files say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamoth.data.progress import Checkpoint, WindowEnd
from dynamoth_analytics.cluster.storage.durable_files import make_folder, sync, write_text

BASE_FILE = "base.json"

WINDOWS_KEPT = 100
"""Ends of windows that a checkpoint keeps: Spark keeps as many batches."""


@dataclass(frozen=True)
class CheckpointBase:
    """Where a checkpoint begins: the contents of ``base.json``."""

    #: The execution before the first one.
    execution: int
    start: WindowEnd
    #: End of the first window, where an execution is repeated; None: that of the next tick.
    first_end: WindowEnd | None
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

    def base(self) -> CheckpointBase | None:
        """Return where it begins; None if there is no checkpoint. Raises OSError."""
        try:
            values = json.loads((self._folder / BASE_FILE).read_text(encoding="utf-8"))
            return CheckpointBase(values["base"], values["start"], values["end"], values["datasets"])
        except (FileNotFoundError, ValueError, KeyError):
            return None  # it was never completed, or is damaged: what the log servers have stored counts then

    def begin(self, base: CheckpointBase) -> None:
        """Begin a new one in place of the former one. Raises OSError; where the disk is full, that is still there."""
        values = {
            "base": base.execution, "start": base.start, "end": base.first_end, "datasets": list(base.datasets)
        }  # fmt: skip
        hidden = self._folder.with_name(f".{self._folder.name}.tmp")
        shutil.rmtree(hidden, ignore_errors=True)
        make_folder(hidden / self._windows.name)
        write_text(hidden / BASE_FILE, json.dumps(values))
        self.remove()
        hidden.rename(self._folder)
        sync(self._folder.parent)

    def remove(self) -> None:
        """Remove it. ``base.json`` goes first: without that, the rest is no checkpoint."""
        (self._folder / BASE_FILE).unlink(missing_ok=True)
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def forget_first_batch(self) -> None:
        """Remove Spark's files where no batch has ended: beside those of a first batch that was stopped, none starts.

        Its window stays. Raises OSError.
        """
        if self.spark_folder.exists() and not _numbers(self.spark_folder / "commits"):
            shutil.rmtree(self.spark_folder)

    def read(self) -> Checkpoint | None:
        """Return its contents; None if there is none. Raises OSError."""
        base = self.base()
        if base is None:
            return None
        ends = {base.execution + 1 + batch: self._end(batch) for batch in _numbers(self._windows)}
        commits = _numbers(self.spark_folder / "commits")
        committed = base.execution + 1 + max(commits, default=-1)
        if max(ends, default=0) > committed + 1:
            return None  # Spark's files are gone, or are of a backup: it would begin with a former batch
        return Checkpoint(base.execution, ends, committed, base.start, base.first_end)

    def start(self, batch: int) -> WindowEnd:
        """Return where the window of a batch begins. Raises OSError."""
        base = self.base()
        assert base is not None, "a stream has a checkpoint"
        return self._end(batch - 1) if batch else base.start

    def end(self, batch: int) -> WindowEnd | None:
        """Return where the window of a batch ends; None: it has not been written yet. Raises OSError."""
        base = self.base()
        assert base is not None, "a stream has a checkpoint"
        if self._file(batch).exists():
            return self._end(batch)
        return base.first_end if batch == 0 else None

    def write_end(self, batch: int, end: WindowEnd) -> None:
        """Write down where the window of a batch ends, before it is executed. Raises OSError."""
        write_text(self._file(batch), json.dumps(end))
        self._file(batch - WINDOWS_KEPT).unlink(missing_ok=True)

    @property
    def _windows(self) -> Path:
        return self._folder / "windows"

    def _file(self, batch: int) -> Path:
        return self._windows / f"{batch}.json"

    def _end(self, batch: int) -> WindowEnd:
        end: WindowEnd = json.loads(self._file(batch).read_text(encoding="utf-8"))
        return end


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of batches that have a file."""
    return [int(file.stem) for file in folder.iterdir() if file.stem.isdecimal()] if folder.is_dir() else []
