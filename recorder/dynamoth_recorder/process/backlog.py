"""Rows that are not on disk yet: gathered by table and hour, bounded in bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dynamoth_recorder.process.tables import arrow

BACKLOG_BYTES_MAX = 256 * 1024 * 1024
"""Rows beyond this are lost. At 100,000 rows of ``channels`` per second, 20 s of a full disk."""

BATCH_BYTES = 10_000
"""What a batch takes besides its values, by measurement: most batches of the table ``servers`` have one row."""

COMBINED = 100
"""So many batches become one; larger ones stay as they are."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows for one file: record batches of one table and hour."""

    table: str
    #: ``date=YYYY-MM-DD/hour=HH``, in UTC.
    hour: str
    batches: tuple[Any, ...]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(batch.num_rows for batch in self.batches)


@dataclass(slots=True)
class _Gathered:
    """Batches of one table and hour."""

    large: list[Any] = field(default_factory=list[Any])
    #: Fewer than ``COMBINED``.
    small: list[Any] = field(default_factory=list[Any])


class Backlog:
    """First in, first out; a full one refuses the newest."""

    def __init__(self, bytes_max: int = BACKLOG_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._gathered: defaultdict[tuple[str, str], _Gathered] = defaultdict(_Gathered)
        #: Bytes of all rows that are here.
        self.size_bytes = 0
        #: Of those that were taken and are being written.
        self._taken_bytes = 0
        #: Rows that there was no room for, by table.
        self.lost: Counter[str] = Counter()

    def add(self, table: str, at_us: int, batch: Any) -> None:
        """Add rows, or count them as lost."""
        self._add(table, folder_of(at_us), batch)

    def take(self) -> list[Portion]:
        """Take everything. It counts until :meth:`give_back`."""
        portions = [Portion(*key, (*each.large, *each.small)) for key, each in self._gathered.items()]
        self._gathered.clear()
        self._taken_bytes, self.size_bytes = self.size_bytes, 0
        return portions

    def give_back(self, portions: list[Portion]) -> None:
        """Put back what could not be written of what was taken."""
        self._taken_bytes = 0
        for portion in portions:
            for batch in portion.batches:
                self._add(portion.table, portion.hour, batch)

    def _add(self, table: str, hour: str, batch: Any) -> None:
        if self._taken_bytes + self.size_bytes + _size(batch) > self._bytes_max:
            self.lost[table] += batch.num_rows
            return
        self.size_bytes += _size(batch)
        gathered = self._gathered[table, hour]
        if batch.num_rows >= COMBINED:
            gathered.large.append(batch)
            return
        gathered.small.append(batch)
        if len(gathered.small) == COMBINED:
            combined = arrow.Table.from_batches(gathered.small).combine_chunks().to_batches()
            self.size_bytes += sum(map(_size, combined)) - sum(map(_size, gathered.small))
            gathered.large += combined
            gathered.small = []


def _size(batch: Any) -> int:
    return BATCH_BYTES + int(batch.nbytes)


def folder_of(at_us: int) -> str:
    """Return the folder of an hour, inside that of a table."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("date=%Y-%m-%d/hour=%H")
