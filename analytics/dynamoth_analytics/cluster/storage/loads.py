"""Copies of the loads of static datasets.

A load is at Redis until an hour after the next one. An execution that is repeated later needs the load of its window:
so the first execution that reads a load copies it, to the folder ``DATASET/LOAD``. A copy appears as a whole or not at
all, and is on disk then.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import load_size_command, parse_load_size, partition_name
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.storage.batches import read_file, record_schema, write_file
from dynamoth_analytics.cluster.storage.durable_files import make_folder, sync, write_text
from dynamoth_analytics.cluster.storage.reading import RecordsLost, read_range
from dynamoth_analytics.files import arrow, parquet

LOADS_KEPT = 5
"""Copies that are kept of each dataset, those of the latest loads."""

ABANDONED_S = 3600.0
"""A hidden folder that is older than this is of a process that died."""

_OFFSETS_FILE = "offsets.json"


@dataclass(frozen=True)
class LoadCopies:
    """The copies of one data cluster. Several processes may use them at the same time."""

    servers: LogServers
    folder: Path

    def files(self, dataset: Dataset) -> list[Path]:
        """Return the Parquet files of the load ``dataset.loaded``, which are written if they are missing.

        A dataset that was never loaded has none. Raises RecordsLost where the load is neither here nor at Redis,
        LogServerFailed and OSError.
        """
        if not dataset.loaded:
            return []
        copy, offsets = self.folder / dataset.name / str(dataset.loaded), load_offsets(self.servers, dataset)
        if offsets is None and not copy.is_dir():
            raise load_lost(dataset, f"there is no copy {copy}")
        if offsets is not None and offsets != _offsets_of(copy):  # none yet, or of a dataset of this name before
            self._write(dataset, copy, offsets)
        return sorted(copy.glob("*.parquet"))

    def _write(self, dataset: Dataset, copy: Path, offsets: Mapping[str, int]) -> None:
        hidden = copy.with_name(f".{copy.name}-{uuid4().hex}.tmp")
        make_folder(hidden)
        try:
            for number in range(dataset.partitions):
                until = offsets[partition_name(dataset.stream, number)]
                batches = read_range(self.servers, dataset, number, 0, until, None)
                tables = (arrow.Table.from_batches([batch]) for batch in batches)
                write_file(hidden / f"{number}.parquet", record_schema(dataset), tables)
            write_text(hidden / _OFFSETS_FILE, json.dumps(offsets))
            self._move(hidden, copy, offsets)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        self._delete_old(copy)

    def _move(self, hidden: Path, copy: Path, offsets: Mapping[str, int]) -> None:
        """Give a copy its name, unless another process has written the same one meanwhile."""
        former = hidden.with_name(f".{uuid4().hex}.tmp")
        if copy.is_dir() and _offsets_of(copy) != offsets:
            copy.rename(former)
        try:
            hidden.rename(copy)
        except OSError:
            if _offsets_of(copy) != offsets:
                raise
        sync(copy.parent)
        shutil.rmtree(former, ignore_errors=True)

    def _delete_old(self, written: Path) -> None:
        copies = sorted((each for each in written.parent.iterdir() if each.name.isdecimal()), key=_number)
        for old in copies[:-LOADS_KEPT]:
            if old != written:
                shutil.rmtree(old, ignore_errors=True)
        for hidden in written.parent.glob(".*.tmp"):
            if time.time() - hidden.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(hidden, ignore_errors=True)


def read_copy(path: Path, dataset: Dataset) -> Iterator[Any]:
    """Yield the records of a file of a copy as Arrow batches."""
    with parquet.ParquetFile(path) as file:
        yield from read_file(file, dataset, 0, 2**53)


def load_offsets(servers: LogServers, dataset: Dataset) -> dict[str, int] | None:
    """Return the last offset of each partition of a load that is complete at Redis; None: it is not.

    Raises LogServerFailed.
    """
    offsets = servers.tips({dataset.stream: dataset.partitions})
    for name, offset in offsets.items():
        size = parse_load_size(servers.run(servers.server_of(name), load_size_command(name)))
        if size is None or (size and not offset):
            return None
    return offsets


def load_lost(dataset: Dataset, where: str) -> RecordsLost:
    """Return the error about a load that is nowhere."""
    return RecordsLost(
        f"load {dataset.loaded} of dataset {dataset.name} is no longer at Redis, and {where}. Bring the copy back, or"
        " go on with the latest load: `dynamoth query restart`"
    )


def _offsets_of(copy: Path) -> dict[str, int] | None:
    try:
        offsets: dict[str, int] = json.loads((copy / _OFFSETS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return offsets


def _number(path: Path) -> int:
    return int(path.name)
