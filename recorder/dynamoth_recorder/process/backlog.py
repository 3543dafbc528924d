"""Holds rows until they are on disk, by table and hour. Bounded in bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dynamoth_recorder.process.tables import arrow

BACKLOG_BYTES_MAX = 256 * 1024 * 1024
"""Rows beyond this are lost. With 100,000 rows of ``channels`` per second, a disk may be full for 20 s."""

BATCH_BYTES = 10_000
"""Memory of a batch besides its values, as measured: most batches of the table ``servers`` have one row."""

LARGE_ROWS = 100
"""Batches with this many rows stay as they are; smaller ones are combined."""

COMBINED_BATCHES = 100
"""This many small batches in a row become one, so that few of them take ``BATCH_BYTES`` for a few rows."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows for one file: record batches of one table and hour."""

    table: str
    #: ``date=YYYY-MM-DD/hour=HH``, in UTC.
    hour: str
    batches: tuple[Any, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(batch.num_rows for batch in self.batches)


@dataclass(slots=True)
class _Gathered:
    """Batches of one table and hour, in the order in which they came."""

    batches: list[Any] = field(default_factory=list[Any])
    #: How many of the last ones are small; fewer than ``COMBINED_BATCHES``.
    small: int = 0

    def add(self, batch: Any) -> int:
        """Add a batch; return by how many bytes the size changes. A batch is never divided: its rows stay together."""
        self.batches.append(batch)
        self.small = self.small + 1 if batch.num_rows < LARGE_ROWS else 0
        if self.small < COMBINED_BATCHES:
            return _size(batch)
        small = self.batches[-COMBINED_BATCHES:]
        combined = arrow.Table.from_batches(small).combine_chunks().to_batches()
        self.batches[-COMBINED_BATCHES:] = combined
        self.small = 0
        return _size(batch) + sum(map(_size, combined)) - sum(map(_size, small))


class Backlog:
    """First in, first out. A full one refuses the newest rows.

    Rows that were added together are next to each other in a portion.
    """

    def __init__(self, bytes_max: int = BACKLOG_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._gathered: defaultdict[tuple[str, str], _Gathered] = defaultdict(_Gathered)
        #: Bytes of the rows that were not taken.
        self.size_bytes = 0
        #: Bytes of the rows that were taken and are being written.
        self._taken_bytes = 0
        #: Rows that did not fit, by table.
        self.lost: Counter[str] = Counter()

    def add(self, table: str, at_us: int, batch: Any) -> None:
        """Add rows, or count them as lost. ``at_us``: microseconds since 1970."""
        if self._taken_bytes + self.size_bytes + _size(batch) > self._bytes_max:
            self.lost[table] += batch.num_rows
        else:
            self._add(table, folder_of(at_us), batch)

    def take(self) -> list[Portion]:
        """Take everything. It counts toward the bound until :meth:`give_back`."""
        self._taken_bytes = self.size_bytes
        return self._take()

    def give_back(self, portions: list[Portion]) -> None:
        """Put back, as the oldest, the portions that could not be written. Nothing of them is lost."""
        self._taken_bytes = 0
        if not portions:
            return
        for portion in (*portions, *self._take()):
            for batch in portion.batches:
                self._add(portion.table, portion.hour, batch)

    def _take(self) -> list[Portion]:
        portions = [Portion(*key, tuple(each.batches)) for key, each in self._gathered.items()]
        self._gathered.clear()
        self.size_bytes = 0
        return portions

    def _add(self, table: str, hour: str, batch: Any) -> None:
        self.size_bytes += self._gathered[table, hour].add(batch)


def _size(batch: Any) -> int:
    return BATCH_BYTES + int(batch.nbytes)


def folder_of(at_us: int) -> str:
    """Return the folder of an hour, inside the folder of a table. ``at_us``: microseconds since 1970."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("date=%Y-%m-%d/hour=%H")
