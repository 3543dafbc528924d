"""A file is there after a power failure only if the name of each folder above it was forced to disk, too."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dynamoth_analytics.cluster.storage.archive import Archiver
from dynamoth_analytics.cluster.storage.checkpoints import CheckpointBase, CheckpointFolder
from dynamoth_analytics.cluster.storage.journal import write_execution
from dynamoth_analytics.cluster.storage.loads import LoadCopies
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots
from tests.data_cluster.world import STATIC, World, reports

Missing = Callable[[Path], list[Path]]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Missing:
    """Returns the files and folders below a new folder, and itself, whose names were not forced to disk."""
    on_disk: dict[int, set[str]] = {}
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            on_disk[status.st_ino] = set(os.listdir(descriptor))

    def names(folder: Path) -> list[Path]:
        found = [folder, *folder.rglob("*")]
        assert len(found) > 1
        return [each for each in found if each.name not in on_disk.get(each.parent.stat().st_ino, ())]

    monkeypatch.setattr(os, "fsync", recording)
    return names


def test_of_the_archive_before_the_stream_is_trimmed(world: World, missing: Missing, tmp_path: Path) -> None:
    world.append(world.set_dataset(partitions=1), *reports("a", "1", "2"))
    Archiver(world.servers, tmp_path / "archive").archive(world.servers.catalog())
    assert missing(tmp_path / "archive") == []


def test_of_the_journal(missing: Missing, tmp_path: Path) -> None:
    for query in ("near", "far"):
        write_execution(tmp_path / "data" / "executions", query, {"execution": 1})
        assert missing(tmp_path / "data") == []


def test_of_a_checkpoint(missing: Missing, tmp_path: Path) -> None:
    checkpoint = CheckpointFolder(tmp_path / "checkpoints" / "near")
    for number in range(2):
        checkpoint.begin(CheckpointBase(number, {"tick_ms": 0, "offsets": {}}, None, ["reports"]))
        checkpoint.write_end(0, {"tick_ms": 1, "offsets": {}})
        assert missing(tmp_path / "checkpoints") == []


def test_of_the_copy_of_a_load(world: World, missing: Missing, tmp_path: Path) -> None:
    dataset = world.set_dataset("shelters", **STATIC, loaded=1)
    world.load(dataset, {"id": "a", "type": "school"})
    assert LoadCopies(world.servers, tmp_path / "static").files(dataset)
    assert missing(tmp_path / "static") == []


def test_of_a_snapshot(driver: SparkSession, world: World, missing: Missing, tmp_path: Path) -> None:
    dataset = world.set_dataset(kind="keyed", key="id", id="", partitions=1)
    world.append(dataset, *reports("a", "1", "2"))
    snapshots = KeyedSnapshots(tmp_path / "snapshots", {"logs": world.logs})
    snapshots.renew(driver, dataset, world.servers.states({"reports": 1}))
    assert missing(tmp_path / "snapshots") == []
