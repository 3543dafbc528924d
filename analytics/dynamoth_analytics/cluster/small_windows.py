"""Small windows: the driver reads what an execution needs, and Spark executes a plan of one task.

For some thousand rows, Spark's work is nearly all overhead: a task for each partition and each join, a Python process
for each source, compiled code for each plan. So the driver reads the tables of a small window itself and writes them to
Parquet files; and the plan has one partition, no exchange, no grids, and is interpreted (``SETTINGS``). The results are
the same.

Of a keyed dataset, the driver keeps the latest record of each key in memory, as of the last few windows: a snapshot
costs what has changed since the one before.

Where only the records are few, as with many interests, Spark gets them from the driver, too, and has all of them in
each task: so rows need not move to the task of their interest.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import Window
from dynamoth.data.queries import StandingQuery
from dynamoth.data.records import partition_names
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.storage.batches import ARRIVED, PARTITION, record_schema, with_columns_of
from dynamoth_analytics.cluster.storage.loads import LoadCopies
from dynamoth_analytics.cluster.storage.reading import read_range
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots, SnapshotBase, are_at_most, own_offsets
from dynamoth_analytics.files import arrow, parquet

RECORDS_MAX = 20_000
RECORD_BYTES_MAX = 8 * 2**20
"""New records of a small window, and their bytes in memory: a result set may have all of them."""

BYTES_MAX = 32 * 2**20
"""Bytes of each other table of a small window: in memory, or in Parquet files without compression."""

ROWS_MAX = 50_000
"""Rows of each other table of a small window: keys, interests, rows of static datasets."""

CHANGES_MAX = 100_000
"""Records behind the last snapshot that the driver reads at most to make the next one."""

PAIRS_MAX = 500_000
"""Pairs of rows that a join by distance compares without a grid, in a fraction of a second."""

SNAPSHOTS_KEPT = 8
"""In memory, of each dataset: the windows of queries that are executed at the same time end at different offsets."""

SETTINGS = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Of Spark, for the execution of a small window."""


class Table(NamedTuple):
    """A table as Parquet files."""

    files: Sequence[Path]
    rows: int


@dataclass(frozen=True)
class _Snapshot:
    """The latest record of each key, as of these offsets."""

    offsets: Mapping[str, int]
    rows: Any


class SmallWindows:
    """Makes the tables of small windows, for all queries of a data cluster. Threads of several queries use it.

    Args:
        servers: the log servers.
        folder: of the data cluster.
        snapshots: of keyed datasets.
        term: of the data cluster. Files are its own: one that was taken over may go on, and write the same ones.

    """

    def __init__(self, servers: LogServers, folder: Path, snapshots: KeyedSnapshots, term: int) -> None:
        self._servers = servers
        self._archive = folder / "archive"
        self._folder = folder / "windows" / str(term)
        self._loads = LoadCopies(servers, folder / "static")
        self._bases = snapshots
        self._snapshots: dict[str, list[_Snapshot]] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def tables(self, query: StandingQuery, datasets: Mapping[str, Dataset], window: Window) -> dict[str, Table] | None:
        """Return the tables of a window by dataset; None: it is not a small one, and Spark reads it.

        The files are the query's own, and live until its next execution. Raises RecordsLost, LogServerFailed, OSError.
        """
        folder = self._folder_of(query)
        found: dict[str, Table] = {}
        for name in (*query.reads, query.on):
            dataset = datasets[name]
            if name != query.on and dataset.kind == "static":
                table = self._load(dataset, window, folder)
            else:
                rows = self._records(dataset, window) if name == query.on else self._snapshot(dataset, window)
                table = None if rows is None else _written(folder, dataset, rows)
            if table is None:
                return None
            found[name] = table
        return found

    def records(self, query: StandingQuery, dataset: Dataset, window: Window) -> Table | None:
        """Return the new records of a window, as ``tables`` does; None: there are too many."""
        rows = self._records(dataset, window)
        return None if rows is None else _written(self._folder_of(query), dataset, rows)

    def _folder_of(self, query: StandingQuery) -> Path:
        folder = self._folder / query.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _records(self, dataset: Dataset, window: Window) -> Any:
        return self._read(dataset, window.start["offsets"], window.end["offsets"], RECORDS_MAX, RECORD_BYTES_MAX)

    def _read(
        self, dataset: Dataset, start: Mapping[str, int], end: Mapping[str, int], records_max: int, bytes_max: int
    ) -> Any:
        """Return the records between offsets as an Arrow table; None: there are too many."""
        states = self._servers.states({dataset.stream: dataset.partitions})
        names = partition_names(dataset)
        if sum(states[name].count(start.get(name, 0), end.get(name, 0)) for name in names) > records_max:
            return None
        batches: list[Any] = []
        size = 0
        for number, name in enumerate(names):
            after, until = start.get(name, 0), end.get(name, 0)
            if until <= after:
                continue
            for batch in read_range(self._servers, dataset, number, after, until, self._archive):
                batches.append(batch)
                size += batch.nbytes
                if size > bytes_max:
                    return None
        return arrow.Table.from_batches(batches, schema=record_schema(dataset))

    def _snapshot(self, dataset: Dataset, window: Window) -> Any:
        """Return the latest record of each key as of the end of a window; None: there are too many."""
        end: Mapping[str, int] = window.end["offsets"]
        with self._locks[dataset.name]:
            known = [
                each for each in self._snapshots.get(dataset.name, []) if each.rows.schema == record_schema(dataset)
            ]
            newest = next((each for each in reversed(known) if are_at_most(each.offsets, end)), None)
            base = self._bases.base_of(dataset, end)
            # A base is newer where no window has ended for a while, or where records were lost after the last one.
            if newest is None or (base is not None and not base.is_at_most(newest.offsets)):
                newest = self._read_base(dataset, base)
            own = own_offsets(dataset, end)
            if newest is not None and newest.offsets == own:
                return newest.rows
            changes = None if newest is None else self._read(dataset, newest.offsets, end, CHANGES_MAX, BYTES_MAX)
            if newest is None or changes is None:
                return None
            snapshot = _Snapshot(own, _latest(arrow.concat_tables([newest.rows, changes]), dataset.key))
            if len(snapshot.rows) > ROWS_MAX or snapshot.rows.nbytes > BYTES_MAX:
                return None
            kept = sorted([*known, snapshot], key=lambda each: sum(each.offsets.values()))
            self._snapshots[dataset.name] = kept[-SNAPSHOTS_KEPT:]
            return snapshot.rows

    def _read_base(self, dataset: Dataset, base: SnapshotBase | None) -> _Snapshot | None:
        """Return the snapshot of a base; without one, that before the first record. None: it is too large."""
        if base is None:
            return _Snapshot({}, record_schema(dataset).empty_table())
        if _is_large(base.keys, sorted((base.folder / "rows").glob("*.parquet"))):
            return None
        return _Snapshot(base.offsets, with_columns_of(dataset, parquet.read_table(base.folder / "rows")))

    def _load(self, dataset: Dataset, window: Window, folder: Path) -> Table | None:
        """Return a static dataset as it was loaded at the end of a window; None: it is too large."""
        loaded = window.end.get("static", {}).get(dataset.name, dataset.loaded)
        files = self._loads.files(replace(dataset, loaded=loaded))
        rows = sum(int(parquet.read_metadata(each).num_rows) for each in files)
        if _is_large(rows, files):
            return None
        return Table(files, rows) if files else _written(folder, dataset, record_schema(dataset).empty_table())


def pairs(tables: Mapping[str, Table], interests: int) -> int:
    """Return how many pairs of rows the largest join of two tables compares."""
    sizes = sorted([interests, *(each.rows for each in tables.values())])
    return sizes[-1] * sizes[-2]


def _is_large(rows: int, files: Sequence[Path]) -> bool:
    """Return whether files with ``rows`` rows have too many rows or bytes. Only their metadata is read."""
    if rows > ROWS_MAX:
        return True
    found = [parquet.read_metadata(each) for each in files]
    size: int = sum(each.row_group(n).total_byte_size for each in found for n in range(each.num_row_groups))
    return size > BYTES_MAX


def _latest(rows: Any, key: str) -> Any:
    """Return the latest row of each key, as ``snapshots`` says. Rows of a partition have to be in order."""
    last = _last(rows, key, PARTITION)
    if len(last.column(key).unique()) == len(last):  # nobody has changed the number of partitions
        return last
    return _last(last.sort_by([(ARRIVED, "ascending"), (PARTITION, "ascending")]), key)


def _last(rows: Any, *columns: str) -> Any:
    """Return the last row of each group with the same values in these columns."""
    numbered = rows.append_column("_row", arrow.array(range(len(rows)), arrow.int64()))
    return rows.take(numbered.group_by([*columns]).aggregate([("_row", "max")]).column("_row_max"))


def _written(folder: Path, dataset: Dataset, rows: Any) -> Table:
    file = folder / f"{dataset.name}.parquet"
    hidden = file.with_suffix(".tmp")
    parquet.write_table(rows, hidden)
    hidden.rename(file)
    return Table((file,), len(rows))
