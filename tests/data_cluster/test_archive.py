"""The archive's files: found by their names, merged, and complete when the disk is full or a process dies."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import Record
from dynamoth_analytics.cluster.archive import Archiver
from dynamoth_analytics.cluster.archive_files import Hole, archived, file_name
from dynamoth_analytics.cluster.batches import to_batch
from dynamoth_analytics.cluster.merging import compact
from dynamoth_analytics.cluster.reading import RecordsLost, read_range
from dynamoth_analytics.files import arrow, parquet
from tests.data_cluster.world import World, reports


def write(folder: Path, dataset: Dataset, day: str, first: int, last: int, before: int | None = None) -> Path:
    records = [Record(offset, 0, b'{"id":"%d","type":"a","size":1}' % offset) for offset in range(first, last + 1)]
    before = first - 1 if before is None else before
    path = folder / dataset.name / f"date={day}" / file_name(0, before, first, last)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_batches([to_batch(dataset, 0, records)]), path)
    return path


def _is_full(archiver: Archiver) -> bool:
    """Return what type checkers would take for unchanged."""
    return archiver.is_full


def offsets(folder: Path, dataset: Dataset, after: int, until: int) -> list[int]:
    found = archived(folder, dataset, 0, after, until)
    return [offset for batch in found if not isinstance(batch, Hole) for offset in batch["_offset"].to_pylist()]


def read(world: World, dataset: Dataset, folder: Path | None, **options: Any) -> list[str]:
    tip = world.servers.tips({dataset.stream: 1})[f"{dataset.stream}/0"]
    batches = read_range(world.servers, dataset, 0, 0, tip, folder, **options)
    return [id_ for batch in batches for id_ in batch["id"].to_pylist()]


def test_only_the_days_that_are_needed_are_listed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=1)
    for number in range(3000):  # ten records each, 300 files a day; only names matter, but for those that are read
        day = f"2026-01-{number // 300 + 1:02d}"
        name = file_name(0, number * 10, number * 10 + 1, number * 10 + 10)
        path = tmp_path / "reports" / f"date={day}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    write(tmp_path, dataset, "2026-01-10", 29_991, 30_000)
    for each in (tmp_path / "reports").iterdir():
        os.utime(each, (1, 1))
    listed: list[Path] = []
    listdir = os.listdir

    def counting(day: Path) -> list[str]:
        listed.append(day)
        return listdir(day)

    monkeypatch.setattr("dynamoth_analytics.cluster.archive_files.os.listdir", counting)
    for _ in range(2):
        assert offsets(tmp_path, dataset, 29_995, 40_000) == list(range(29_996, 30_001))
    assert [day.name for day in listed] == ["date=2026-01-10"]


def test_merged_files_and_their_parts_give_each_record_once(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    parts = [write(tmp_path, dataset, "2026-01-01", first, first + 4) for first in range(1, 51, 5)]
    kept = parts[3].read_bytes()
    assert compact(parts[0].parent) == 10
    assert [path.name for path in parts[0].parent.iterdir()] == [file_name(0, 0, 1, 50)]
    parts[3].write_bytes(kept)  # as if the process had died before it deleted this part
    assert offsets(tmp_path, dataset, 7, 44) == list(range(8, 45))
    assert compact(parts[0].parent) == 1
    assert offsets(tmp_path, dataset, 0, 100) == list(range(1, 51))


def test_a_reader_goes_on_when_its_files_are_merged_meanwhile(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    parts = [write(tmp_path, dataset, "2026-01-01", first, first + 4) for first in range(1, 31, 5)]
    reader = archived(tmp_path, dataset, 0, 0, 30)
    found = next(reader)["_offset"].to_pylist()
    compact(parts[0].parent)
    found += [offset for batch in reader for offset in batch["_offset"].to_pylist()]
    assert found == list(range(1, 31))


def test_a_full_disk_leaves_records_at_redis_and_says_so_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", "1", "2", "3"))
    archiver = Archiver(world.servers, tmp_path, hot_records=1)
    caplog.set_level(logging.WARNING)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dynamoth_analytics.cluster.batches.parquet.ParquetWriter", full)
        assert [archiver.archive(world.servers.catalog()) for _ in range(2)] == [0, 0]
    assert _is_full(archiver)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".tmp", ".parquet"}]
    assert read(world, dataset, tmp_path) == ["1", "2", "3"]
    assert archiver.archive(world.servers.catalog()) == 3
    assert not _is_full(archiver)
    assert read(world, dataset, tmp_path) == ["1", "2", "3"]


def test_what_a_crash_left_is_deleted(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    hidden = write(tmp_path, dataset, "2026-01-01", 1, 2).with_name(".0-3-4.tmp")
    hidden.write_bytes(b"half")
    Archiver(world.servers, tmp_path).archive(world.servers.catalog())
    assert not hidden.exists()


def test_trimmed_records_without_an_archive_are_an_error(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", "1", "2", "3"))
    Archiver(world.servers, tmp_path, hot_records=1).archive(world.servers.catalog())
    with pytest.raises(RecordsLost, match="option `archive`"):
        read(world, dataset, None)
    with pytest.raises(RecordsLost, match="lacks them"):
        read(world, dataset, tmp_path / "other")
    assert read(world, dataset, None, fail_on_loss=False) == ["3"]
    assert read(world, dataset, tmp_path) == ["1", "2", "3"]
