"""Keyed datasets as of an offset: the latest record of each key.

A *base* is a Parquet file with the latest records up to some offsets. A snapshot is a base and the records behind it.
So it is the same whenever it is computed, and costs what the dataset has keys, however long its history is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import partition_name
from dynamoth_analytics.cluster.batches import OFFSET, PARTITION

BASES_KEPT = 5
"""Bases of each dataset: an execution that is repeated after a crash needs one that is not behind its window."""


class KeyedSnapshots:
    """The snapshots of keyed datasets. ``options`` are those of the source: ``logs`` and ``archive``."""

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        self._folder = folder
        self._options = options

    def at(self, spark: SparkSession, dataset: Dataset, offsets: Mapping[str, int]) -> DataFrame:
        """Return the latest record of each key, as of these offsets."""
        base = next((each for each in self._bases(dataset) if _is_at_most(_offsets(each), offsets)), None)
        start = _offsets(base) if base else {}
        rows = self._read(spark, dataset, start, offsets)
        if base is not None:
            rows = spark.read.parquet(str(base / "rows")).unionByName(rows, allowMissingColumns=True)
        latest = Window.partitionBy(dataset.key).orderBy(F.desc(PARTITION), F.desc(OFFSET))
        return rows.withColumn("_rank", F.row_number().over(latest)).where("_rank = 1").drop("_rank")

    def renew(self, spark: SparkSession, dataset: Dataset, offsets: Mapping[str, int]) -> None:
        """Write a base as of these offsets. Raises OSError."""
        bases = self._bases(dataset)
        own = {name: offsets.get(name, 0) for name in _names(dataset)}
        if bases and _offsets(bases[0]) == own:
            return
        number = int(bases[0].name) + 1 if bases else 1
        folder = self._folder / dataset.name / f"{number:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        self.at(spark, dataset, own).coalesce(4).write.parquet(str(folder / "rows"))
        hidden = folder / "offsets.tmp"
        hidden.write_text(json.dumps(own), encoding="utf-8")
        hidden.rename(folder / "offsets.json")  # a base is one when it has this file
        for old in self._bases(dataset)[BASES_KEPT:]:
            (old / "offsets.json").unlink()
            shutil.rmtree(old)

    def _read(
        self, spark: SparkSession, dataset: Dataset, start: Mapping[str, int], end: Mapping[str, int]
    ) -> DataFrame:
        reader: Any = spark.read.format("dynamoth").options(**self._options).option("dataset", dataset.name)
        rows: DataFrame = reader.option("start", _json(start)).option("end", _json(end)).load()
        return rows

    def _bases(self, dataset: Dataset) -> list[Path]:
        """Return the bases of a dataset, the newest first."""
        folder = self._folder / dataset.name
        found = [each for each in folder.iterdir() if (each / "offsets.json").exists()] if folder.is_dir() else []
        return sorted(found, reverse=True)


def _names(dataset: Dataset) -> list[str]:
    return [partition_name(dataset.stream, number) for number in range(dataset.partitions)]


def _offsets(base: Path) -> dict[str, int]:
    offsets: dict[str, int] = json.loads((base / "offsets.json").read_text(encoding="utf-8"))
    return offsets


def _is_at_most(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return all(offset <= other.get(name, 0) for name, offset in one.items())


def _json(offsets: Mapping[str, int]) -> str:
    return json.dumps({"tick_ms": 0, "offsets": dict(offsets)})
