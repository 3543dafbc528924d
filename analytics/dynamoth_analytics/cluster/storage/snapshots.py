"""Keyed datasets as of an offset: the latest record of each key.

A *base* is a folder of Parquet files with the latest records up to some offsets. A snapshot is a base and the records
behind it. So it is the same whenever it is computed, and its cost depends on the number of keys, not on the length of
the history. A new base is written when many records are behind the newest one, in proportion to its keys. It appears as
a whole or not at all: a former data cluster that goes on with the same folder changes none.

The latest record of a key is the last one of its partition, by offset. A key has records in several partitions after an
operator has changed their number: then the latest of those counts that were the last ones of their partitions, by the
time of arrival.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import PartitionState, partition_names
from dynamoth_analytics.cluster.storage.batches import ARRIVED, OFFSET, PARTITION, check_types, record_schema
from dynamoth_analytics.cluster.storage.durable_files import make_folder, sync, write_text
from dynamoth_analytics.files import parquet

BASES_KEPT = 3
"""The newest bases of each dataset stay: an execution that has just begun may have a window before the newest one."""

RENEW_RECORDS_MIN = 10_000
RENEW_KEYS_RATIO = 0.25
"""A base is renewed when this many records are behind it, or this part of its keys if that is more."""

RENEW_AGE_S = 86_400.0
"""A base that is older is renewed if there is any record behind it: the archive's old days can be deleted then."""


ABANDONED_S = 86_400.0
"""A hidden folder that is older than this is of a process that died."""


@dataclass(frozen=True)
class SnapshotBase:
    """A base."""

    folder: Path
    offsets: Mapping[str, int]
    keys: int
    age_s: float

    def is_of(self, offsets: Mapping[str, int]) -> bool:
        """Return whether it is the snapshot as of these offsets of all partitions."""
        return all(self.offsets.get(name, 0) == offset for name, offset in offsets.items())

    def is_at_most(self, offsets: Mapping[str, int]) -> bool:
        """Return whether a snapshot as of these offsets can begin with it."""
        return are_at_most(self.offsets, offsets)


def are_at_most(offsets: Mapping[str, int], others: Mapping[str, int]) -> bool:
    """Return whether no offset is behind the one of the same partition among others."""
    return all(offset <= others.get(name, 0) for name, offset in offsets.items())


def own_offsets(dataset: Dataset, offsets: Mapping[str, int]) -> dict[str, int]:
    """Return the offsets of a dataset's partitions, among those of several datasets."""
    return {name: offsets.get(name, 0) for name in partition_names(dataset)}


class KeyedSnapshots:
    """The snapshots of keyed datasets. ``options`` are those of the source: ``logs`` and ``archive``.

    Threads may use it at the same time.
    """

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        self._folder = folder
        self._options = options
        #: By dataset: locked while a base is written or deleted.
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def at(self, spark: SparkSession, dataset: Dataset, offsets: Mapping[str, int]) -> DataFrame:
        """Return the latest record of each key, as of these offsets."""
        return self._at(spark, dataset, offsets, self._options)

    def _at(
        self, spark: SparkSession, dataset: Dataset, offsets: Mapping[str, int], options: Mapping[str, str]
    ) -> DataFrame:
        base = self.base_of(dataset, offsets)
        if base is not None:
            for file in [*(base.folder / "rows").glob("*.parquet")][:1]:
                check_types(dataset, parquet.read_schema(file))
        if base is not None and base.is_of(own_offsets(dataset, offsets)):
            schema = from_arrow_schema(record_schema(dataset))  # a field may be newer than the base
            found: DataFrame = spark.read.schema(schema).parquet(str(base.folder / "rows"))
            return found
        start = base.offsets if base else dict[str, int]()
        reader: Any = spark.read.format("dynamoth").options(**options).option("dataset", dataset.name)
        rows: DataFrame = reader.option("start", _json(start)).option("end", _json(offsets)).load()
        if base is not None:
            rows = spark.read.parquet(str(base.folder / "rows")).unionByName(rows, allowMissingColumns=True)
        return _latest(rows, dataset.key)

    def renew(
        self,
        spark: SparkSession,
        dataset: Dataset,
        states: Mapping[str, PartitionState],
        needed: Iterable[Mapping[str, int]] = (),
    ) -> None:
        """Write a base as of now, if many records are behind the newest one; delete bases that nobody needs.

        Args:
            spark: the session.
            dataset: which.
            states: what the servers know about the offsets of its partitions.
            needed: the lowest offsets as of which each query may still need a snapshot.

        Raises OSError, also where another data cluster has written a base meanwhile, and errors of Spark, as that of a
        range whose records are lost.

        """
        with self._locks[dataset.name]:
            newest = next(iter(self.bases(dataset)), None)
            try:
                if _is_due(newest, states):
                    self._write(spark, dataset, {name: state.offset for name, state in states.items()}, self._options)
            finally:
                self._delete_old(dataset, needed)  # also where the disk is full: that makes room

    def pass_over_losses(self, spark: SparkSession, dataset: Dataset, offsets: Mapping[str, int]) -> None:
        """Write a base as of these offsets, without records that are lost: an operator goes on with what there is.

        Raises OSError and errors of Spark.
        """
        with self._locks[dataset.name]:
            self._write(spark, dataset, own_offsets(dataset, offsets), {**self._options, "fail_on_loss": "false"})

    def base_of(self, dataset: Dataset, offsets: Mapping[str, int]) -> SnapshotBase | None:
        """Return the base with which a snapshot as of these offsets begins; None: it begins with the first record."""
        return next((each for each in self.bases(dataset) if each.is_at_most(offsets)), None)

    def bases(self, dataset: Dataset) -> list[SnapshotBase]:
        """Return the bases of a dataset, the newest first."""
        found = [_read_base(self._base_folder(dataset, number)) for number in self._numbers(dataset)]
        return [each for each in found if each is not None]

    def _numbers(self, dataset: Dataset) -> list[int]:
        """Return the numbers of the folders of bases, the largest first; one that is damaged has a number, too."""
        folder = self._folder / dataset.name
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _base_folder(self, dataset: Dataset, number: int) -> Path:
        return self._folder / dataset.name / f"{number:08d}"

    def _write(
        self, spark: SparkSession, dataset: Dataset, offsets: Mapping[str, int], options: Mapping[str, str]
    ) -> None:
        bases = self.bases(dataset)
        former = bases[0].offsets if bases else dict[str, int]()
        # A server that has lost its last records has lower offsets than the base, which has these records.
        own = {name: max(offset, former.get(name, 0)) for name, offset in offsets.items()}
        folder = self._base_folder(dataset, 1 + max(self._numbers(dataset), default=0))
        hidden = folder.with_name(f".{folder.name}-{uuid4().hex}.tmp")
        make_folder(hidden)
        try:
            self._at(spark, dataset, own, options).coalesce(4).write.parquet(str(hidden / "rows"))
            keys = _force_to_disk(hidden / "rows")
            write_text(hidden / "base.json", json.dumps({"offsets": own, "keys": keys}))
            hidden.rename(folder)  # not where another data cluster has written one meanwhile
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        sync(folder.parent)

    def _delete_old(self, dataset: Dataset, needed: Iterable[Mapping[str, int]]) -> None:
        kept = [base.folder for offsets in needed if (base := self.base_of(dataset, offsets)) is not None]
        for old in self.bases(dataset)[BASES_KEPT:]:
            if old.folder not in kept:
                (old.folder / "base.json").unlink()
                shutil.rmtree(old.folder)
        for hidden in (self._folder / dataset.name).glob(".*.tmp"):
            if time.time() - hidden.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(hidden, ignore_errors=True)


def _latest(rows: DataFrame, key: str) -> DataFrame:
    """Return the latest record of each key. All of its records are brought together once, for both steps."""
    steps = (
        Window.partitionBy(key, PARTITION).orderBy(F.desc(OFFSET)),
        Window.partitionBy(key).orderBy(F.desc(ARRIVED), F.desc(PARTITION)),
    )
    rows = rows.repartition(F.col(key))
    for latest in steps:
        rows = rows.withColumn("_rank", F.row_number().over(latest)).where("_rank = 1").drop("_rank")
    return rows


def _is_due(newest: SnapshotBase | None, states: Mapping[str, PartitionState]) -> bool:
    """Return whether enough records are behind a base to write the next one."""
    start = newest.offsets if newest else dict[str, int]()
    behind = sum(state.count(start.get(name, 0), state.offset) for name, state in states.items())
    if newest is None or not behind:
        return behind > 0
    return newest.age_s > RENEW_AGE_S or behind >= max(RENEW_RECORDS_MIN, RENEW_KEYS_RATIO * newest.keys)


def _force_to_disk(folder: Path) -> int:
    """Force the Parquet files of a folder to disk; return how many rows they have."""
    files = sorted(folder.glob("*.parquet"))
    for each in (*files, folder):
        sync(each)
    return sum(int(parquet.read_metadata(each).num_rows) for each in files)


def _read_base(folder: Path) -> SnapshotBase | None:
    """Return the base of a folder; None: it was not completed, or is being deleted."""
    file = folder / "base.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return SnapshotBase(folder, values["offsets"], values["keys"], time.time() - file.stat().st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _json(offsets: Mapping[str, int]) -> str:
    return json.dumps({"tick_ms": 0, "offsets": dict(offsets)})
