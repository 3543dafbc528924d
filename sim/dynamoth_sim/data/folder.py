"""The checkpoint of one query in the model of the data cluster: what a process finds on its disk when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dynamoth.data.progress import Checkpoint, WindowEnd


@dataclass(slots=True)
class Folder:
    """A checkpoint. Data clusters with the same folder share it."""

    #: The execution before its first one, and the offsets before that; None: there is no checkpoint.
    base: int | None = None
    start: WindowEnd = field(default_factory=lambda: WindowEnd(tick_ms=0, offsets={}))
    first_end: WindowEnd | None = None
    ends: dict[int, WindowEnd] = field(default_factory=dict[int, WindowEnd])
    committed: int = 0

    def write_end(self, batch: int, end: WindowEnd) -> None:
        """Write the end of a window. A former data cluster numbers its batches as its own checkpoint did."""
        assert self.base is not None, "a stream has a checkpoint"
        self.ends[self.base + 1 + batch] = end

    def begin(self, base: int, start: WindowEnd, first_end: WindowEnd | None) -> None:
        """Begin a checkpoint in place of the one that there is."""
        self.base, self.start, self.first_end, self.ends, self.committed = base, start, first_end, {}, base

    def remove(self) -> None:
        """Remove the checkpoint."""
        self.base = None

    def read(self) -> Checkpoint | None:
        """Return what the production code learns of it."""
        if self.base is None or max(self.ends, default=0) > self.committed + 1:
            return None
        return Checkpoint(self.base, dict(self.ends), self.committed, self.start, self.first_end)

    def end(self, execution: int) -> WindowEnd:
        """Return the end of a window; the base ends where the first one starts."""
        return self.start if execution == self.base else self.ends[execution]

    def copy(self) -> Folder:
        """Return a backup."""
        return replace(self, ends=dict(self.ends))
