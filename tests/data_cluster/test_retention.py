"""Old days of the archive are deleted when nobody needs them."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dynamoth.data.catalog import Catalog
from dynamoth.data.datasets import Dataset, Field
from dynamoth.data.progress import Checkpoint, Progress, Window, WindowEnd
from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.storage.archive import Archiver, ArchivingFailed
from dynamoth_analytics.cluster.storage.archive_files import file_name
from dynamoth_analytics.cluster.storage.reading import RecordsLost, read_range
from dynamoth_analytics.cluster.storage.retention import NOBODY, needs_of, unneeded
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots
from tests.data_cluster.test_archive import write
from tests.data_cluster.world import World, reports

FIELDS = (Field("id", "string"),)
CATALOG = Catalog(
    {
        "reports": Dataset("reports", "append", FIELDS, partitions=2),
        "users": Dataset("users", "keyed", FIELDS, key="id", partitions=1),
        "shelters": Dataset("shelters", "static", FIELDS),
    },
    {
        "near": StandingQuery("near", "", "reports", 1, reads=("users", "shelters")),
        "all": StandingQuery("all", "", "reports", 1),
    },
)


def window(start: int, end: int) -> Window:
    def at(number: int) -> WindowEnd:
        offsets: dict[str, int] = dict.fromkeys(("reports/0", "reports/1", "users/0"), number)
        return {"tick_ms": number, "offsets": offsets}

    return Window(at(start), at(end))


def floors(
    folder: Path, progress: dict[str, Progress], checkpoints: dict[str, Checkpoint] | None = None, **catalog: object
) -> dict[str, int]:
    known = replace(CATALOG, **catalog)  # type: ignore[arg-type]  # its fields
    return unneeded(known, needs_of(known, progress.get, (checkpoints or {}).get), KeyedSnapshots(folder, {}))


def base(folder: Path, number: int, offset: int) -> None:
    path = folder / "users" / f"{number:08d}" / "base.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"offsets": {"users/0": offset}, "keys": 1}))


def test_a_query_needs_the_window_that_it_may_repeat(tmp_path: Path) -> None:
    done, failing = Progress(3, window(10, 20), is_done=True), Progress(3, window(10, 20), is_done=False)
    checkpoint = Checkpoint(0, {1: window(0, 7).end, 2: window(7, 15).end}, 1, window(0, 7).start)
    assert floors(tmp_path, {"all": done})["reports/0"] == 20
    assert floors(tmp_path, {"all": failing})["reports/1"] == 10
    assert floors(tmp_path, {"all": done, "near": failing})["reports/0"] == 10
    assert floors(tmp_path, {"all": done}, {"all": checkpoint})["reports/0"] == 7
    assert floors(tmp_path, {}, {"all": replace(checkpoint, committed=0)})["reports/0"] == 0
    assert floors(tmp_path, {"all": replace(done, dropped_version=2)})["reports/0"] == NOBODY
    assert floors(tmp_path, {"all": done})["reports_dead/0"] == NOBODY
    assert floors(tmp_path, {"odd": failing, "all": done}, query_faults={"odd": "why"})["reports/0"] == 10
    assert "shelters@0/0" not in floors(tmp_path, {})


def test_a_keyed_dataset_is_needed_behind_its_bases(tmp_path: Path) -> None:
    done = {"near": Progress(3, window(10, 20), is_done=True)}
    assert floors(tmp_path, done)["users/0"] == 0, "there is no base"
    base(tmp_path, 1, 12)
    assert floors(tmp_path, done)["users/0"] == 12
    base(tmp_path, 2, 30)
    assert floors(tmp_path, done)["users/0"] == 12
    assert floors(tmp_path, {})["users/0"] == 30
    assert floors(tmp_path, {"near": Progress(3, window(10, 20), is_done=False)})["users/0"] == 0, "no base is older"


def day(days_ago: int) -> str:
    return f"{datetime.now(UTC) - timedelta(days=days_ago):%Y-%m-%d}"


def test_old_days_are_deleted_up_to_one_that_is_needed(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    for number in range(10):
        write(tmp_path, dataset, day(10 - number), 10 * number + 1, 10 * number + 10)
    archiver = Archiver(world.servers, tmp_path)

    def left() -> int:
        archiver.archive(world.servers.catalog())
        return len([*(tmp_path / "reports").iterdir()])

    archiver.unneeded = {"reports/0": 100}
    assert left() == 10, "all are kept"
    archiver.keep_days = 4
    archiver.unneeded = {}
    assert left() == 10, "nobody knows what is needed"
    archiver.unneeded = {"reports/0": 25}
    assert left() == 8, "the third day has records that are needed"
    archiver.unneeded = {"reports/0": NOBODY}
    assert left() == 4
    with pytest.raises(RecordsLost, match="offset 1 to 60"):
        list(read_range(world.servers, dataset, 0, 0, 100, tmp_path))
    assert sum(map(len, read_range(world.servers, dataset, 0, 60, 100, tmp_path))) == 40


def test_old_days_are_deleted_before_a_full_disk_ends_the_archiving(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=1)
    for number in range(3):
        write(tmp_path, dataset, day(9 - number), 10 * number + 1, 10 * number + 10)
    world.append(dataset, *reports("a", "new"))
    archiver = Archiver(world.servers, tmp_path)
    archiver.keep_days, archiver.unneeded = 1, {"reports/0": NOBODY}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dynamoth_analytics.cluster.storage.archive.write_file", full)
        with pytest.raises(ArchivingFailed, match="disk of the archive is full"):
            archiver.archive(world.servers.catalog())
        assert [each.name for each in (tmp_path / "reports").glob("date=*") if day(7) > each.name[5:]] == []
    assert archiver.archive(world.servers.catalog()) == 1


def test_a_day_that_cannot_be_deleted_does_not_hold_up_the_archiving(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=1)
    for number in range(3):
        write(tmp_path, dataset, day(9 - number), 10 * number + 1, 10 * number + 10)
    archiver = Archiver(world.servers, tmp_path)
    archiver.keep_days, archiver.unneeded = 1, {"reports/0": NOBODY}

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("dynamoth_analytics.cluster.storage.archive.shutil.rmtree", refused)
        for count in (1, 2):
            world.append(dataset, *reports("a", f"new {count}"))
            with pytest.raises(ArchivingFailed, match=r"not deleted: .*Permission denied"):
                archiver.archive(world.servers.catalog())
            assert archiver.records == count
    archiver.archive(world.servers.catalog())
    assert {each.name for each in (tmp_path / "reports").iterdir()} == {f"date={day(0)}"}


def test_old_days_of_the_journal_are_deleted(world: World, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "executions" / f"date={day(number)}").mkdir(parents=True)
        (tmp_path / "executions" / f"date={day(number)}" / "near.jsonl").touch()
    archiver = Archiver(world.servers, tmp_path / "archive", journal=tmp_path / "executions")
    archiver.archive(world.servers.catalog())
    assert len([*(tmp_path / "executions").iterdir()]) == 4, "all are kept"
    archiver.keep_days = 2
    archiver.archive(world.servers.catalog())
    assert {each.name for each in (tmp_path / "executions").iterdir()} == {f"date={day(each)}" for each in range(3)}


def test_the_last_file_of_each_partition_stays_as_it_says_where_to_go_on(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=2)
    write(tmp_path, dataset, day(9), 1, 5)
    path = write(tmp_path, dataset, day(8), 6, 10)
    path.rename(path.with_name(file_name(1, 5, 6, 10)))
    write(tmp_path, dataset, day(7), 6, 10)
    archiver = Archiver(world.servers, tmp_path)
    archiver.keep_days, archiver.unneeded = 1, {"reports/0": NOBODY, "reports/1": NOBODY}
    archiver.archive(world.servers.catalog())
    assert {each.name for each in (tmp_path / "reports").iterdir()} == {f"date={day(8)}", f"date={day(7)}"}


def test_a_day_that_was_deleted_in_part_is_removed_at_the_next_start(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    path = write(tmp_path, dataset, day(9), 1, 5)
    path.parent.rename(path.parent.with_name(f".{path.parent.name}"))
    Archiver(world.servers, tmp_path).archive(world.servers.catalog())
    assert not [*(tmp_path / "reports").iterdir()]
