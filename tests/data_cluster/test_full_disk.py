"""A disk that is full fails the queries that write to it, with a message that says so; nothing is skipped then."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dynamoth.data.progress import Checkpoint, WindowEnd
from dynamoth_analytics.cluster import query_runner
from dynamoth_analytics.cluster.failures import DISK_IS_FULL, reason_of
from dynamoth_analytics.cluster.metrics import collect
from dynamoth_analytics.cluster.query_runner import QueryRunner
from dynamoth_analytics.cluster.runner import ClusterRunner
from dynamoth_analytics.cluster.storage import checkpoints, journal
from dynamoth_analytics.cluster.storage.archive import ArchivingFailed
from dynamoth_analytics.cluster.storage.checkpoints import CheckpointBase, CheckpointFolder
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots
from dynamoth_analytics.files import parquet
from tests.data_cluster.test_executions import running
from tests.data_cluster.world import World, reports, until


def _first(path: Any, _: Any) -> Path:
    return Path(path)


def _name_of_first(file: Any, _: Any) -> Path:
    return Path(file.name)


def _second(_: Any, path: Any) -> Path:
    return Path(path)


def _goes_on(runners: Sequence[QueryRunner]) -> bool:
    """Keep queries running; one that cannot be started shows why, as in a data cluster."""
    for each in runners:
        try:
            each.keep_running()
        except OSError as error:
            each.show_failure(error)
    return True


PLACES: dict[str, tuple[Any, str, Callable[..., Path]]] = {
    "checkpoints": (checkpoints, "write_text", _first),
    "executions": (journal, "_write", _name_of_first),
    "windows": (parquet, "write_table", _second),
}
"""Folders of a data cluster: what writes their files, and how its arguments say which file."""


@pytest.mark.parametrize("place", PLACES)
def test_a_query_without_room_says_so_and_loses_nothing(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(query_runner, "RETRY_S", 0.1)
    monkeypatch.setattr(query_runner, "RETRY_S_MAX", 0.5)
    dataset, names = world.set_dataset(), ("fails", "goes_on")
    context, interests = world.context(driver), [world.register(each, {"type": "fire"}) for each in names]
    runners = [world.runner(context, world.set_query(each), dataset) for each in names]
    module, name, file_of = PLACES[place]
    write = getattr(module, name)

    def writing(*arguments: Any) -> None:
        path = Path(file_of(*arguments)).relative_to(world.folder)
        if path.parts[0] == place and "fails" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    with running(*runners):
        until(lambda: all(each.status.state == "running" for each in runners), *runners)
        world.append(dataset, *reports("fire", "a"))
        until(lambda: all(each.status.execution for each in runners), *runners)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, writing)
            for count, id_ in enumerate("bc", 2):
                world.append(dataset, *reports("fire", id_))
                until(lambda: _goes_on(runners) and len(world.ids(interests[1])) == count and runners[0].is_failing)  # noqa: B023
            assert runners[0].status.reason == DISK_IS_FULL
            assert len(world.executions("fails")) == 1
            assert runners[0].is_failing
            assert not runners[1].is_failing
        until(lambda: len(world.ids(interests[0])) == 3 and not runners[0].is_failing, *runners)
    assert [world.ids(each) for each in interests] == [["a", "b", "c"]] * 2
    for each in names:
        written = world.executions(each)
        assert [entry["execution"] for entry in written] == [*range(1, len(written) + 1)]
        assert all(after["start"] == before["end"] for before, after in pairwise(written))


def test_a_checkpoint_that_cannot_be_written_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = CheckpointFolder(tmp_path / "checkpoints" / "near")
    start: WindowEnd
    end: WindowEnd
    start, end = {"tick_ms": 0, "offsets": {}}, {"tick_ms": 1, "offsets": {}}
    checkpoint.begin(CheckpointBase(7, start, None, ["reports"]))
    checkpoint.write_end(0, end)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.write_end(1, end)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.begin(CheckpointBase(8, end, None, ["reports"]))
    assert checkpoint.read() == Checkpoint(7, {8: end}, 7, start)
    assert not [*tmp_path.rglob("*.json.tmp")]
    checkpoint.begin(CheckpointBase(8, end, None, ["reports"]))
    assert checkpoint.read() == Checkpoint(8, {}, 8, end)


# On a real disk.


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk of 256 KiB. It is outside of pytest's folder: pytest cannot delete one that a killed run has left."""
    folder = Path(tempfile.mkdtemp(prefix="dynamoth-disk-"))
    try:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True).returncode:
            pytest.skip("a file system can be mounted by root only")
        yield folder
        subprocess.run(["umount", "--lazy", folder], check=True)  # Spark may have a file open
    finally:
        folder.rmdir()


def fill(disk: Path) -> Path:
    """Leave no room on a disk; return the file that takes it."""
    file = disk / "filler"
    with pytest.raises(OSError, match="No space left"), file.open("wb", buffering=0) as output:
        while True:
            output.write(b"x" * 4096)
    return file


def test_the_archive_goes_on_when_there_is_room(driver: SparkSession, world: World, disk: Path) -> None:
    world.append(world.set_dataset(partitions=1), *reports("a", *"123"))
    runner = ClusterRunner(driver, world.servers, world.cluster_url, disk, 3600.0)

    def is_full() -> list[float]:
        name = "dynamoth_data_cluster_archive_full"
        return [each.value for family in collect(runner) for each in family.samples if each.name == name]

    filler = fill(disk)
    with pytest.raises(ArchivingFailed, match="disk of the archive is full"):
        runner.archiver.archive(world.servers.catalog())
    assert is_full() == [1]
    filler.unlink()
    assert runner.archiver.archive(world.servers.catalog()) == 3
    assert is_full() == [0]


def test_the_journal_has_whole_lines(disk: Path) -> None:
    journal.write_execution(disk, "near", {"execution": 1, "text": "x" * 3000})
    filler = fill(disk)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            journal.write_execution(disk, "near", {"execution": 2, "text": "x" * 3000})
    filler.unlink()
    journal.write_execution(disk, "near", {"execution": 2})
    (file,) = disk.glob("date=*/near.jsonl")
    assert [line[:30] for line in file.read_text().splitlines()] == [
        '{"query":"near","execution":1,', '{"query":"near","execution":2}'
    ]  # fmt: skip


def test_a_snapshot_is_written_when_there_is_room(driver: SparkSession, world: World, disk: Path) -> None:
    dataset = world.set_dataset(kind="keyed", key="id", id="", partitions=1)
    world.append(dataset, *reports("a", *"123"))
    snapshots = KeyedSnapshots(disk / "snapshots", {"logs": world.logs})
    filler = fill(disk)
    with pytest.raises(Exception, match="No space left") as caught:
        snapshots.renew(driver, dataset, world.servers.states({"reports": 1}))
    assert reason_of(caught.value) == DISK_IS_FULL
    assert snapshots.bases(dataset) == []
    filler.unlink()
    snapshots.renew(driver, dataset, world.servers.states({"reports": 1}))
    assert [each.keys for each in snapshots.bases(dataset)] == [3]
