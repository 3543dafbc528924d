"""Snapshots of keyed datasets: the latest record of each key, whatever base they begin with."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import PartitionState, partition_keys
from dynamoth_analytics.cluster import small_windows
from dynamoth_analytics.cluster.storage import snapshots
from dynamoth_analytics.cluster.storage.archive import Archiver
from dynamoth_analytics.cluster.storage.batches import OtherType
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots
from dynamoth_analytics.files import arrow
from tests.data_cluster.world import World, until

NAME = "reports/0"


@pytest.fixture
def dataset(world: World) -> Dataset:
    return world.set_dataset(kind="keyed", key="id", id="", partitions=1)


def put(world: World, dataset: Dataset, keys: str, size: int) -> int:
    """Store a record of each key; return the last offset."""
    for key in keys:
        world.append(dataset, {"id": key, "type": "t", "size": size})
    return state(world).offset


def state(world: World) -> PartitionState:
    return world.servers.states({"reports": 1})[NAME]


def read(driver: SparkSession, found: KeyedSnapshots, dataset: Dataset, offset: int) -> dict[str, int]:
    return {row["id"]: row["size"] for row in found.at(driver, dataset, {NAME: offset}).collect()}


def offsets(found: KeyedSnapshots, dataset: Dataset) -> list[int]:
    return [each.offsets[NAME] for each in found.bases(dataset)]


def test_a_snapshot_has_the_latest_of_each_key_before_and_after_renewals(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "RENEW_RECORDS_MIN", 1)
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    latest: dict[str, int] = {}
    expected: list[tuple[int, dict[str, int]]] = []
    for turn in range(3):
        keys = "abc"[: turn + 1]
        latest |= dict.fromkeys(keys, turn)
        expected.append((put(world, dataset, keys, turn), dict(latest)))
    assert [read(driver, found, dataset, offset) for offset, _ in expected] == [sizes for _, sizes in expected]
    for offset, _ in expected[:2]:
        found.renew(driver, dataset, {NAME: replace(state(world), offset=offset)})
    assert offsets(found, dataset) == [expected[1][0], expected[0][0]]
    assert [each.keys for each in found.bases(dataset)] == [2, 1]
    assert [read(driver, found, dataset, offset) for offset, _ in expected] == [sizes for _, sizes in expected]


def test_a_base_with_another_type_of_a_field_is_an_error(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path
) -> None:
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    offset = put(world, dataset, "a", 1)
    found.renew(driver, dataset, world.servers.states({"reports": 1}))
    fields = {"id": "string", "type": "string", "size": "float"}
    changed = world.set_dataset(kind="keyed", key="id", id="", partitions=1, fields=fields, version=2)
    with pytest.raises(OtherType, match="field 'size' is of type float, and stored records have int there"):
        read(driver, found, changed, offset)


def test_a_base_is_renewed_when_many_records_are_behind_it_or_when_it_is_old(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "RENEW_RECORDS_MIN", 3)
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})

    def renew() -> list[int]:
        found.renew(driver, dataset, {NAME: state(world)})
        return offsets(found, dataset)

    assert renew() == []
    first = put(world, dataset, "abcdefghijklmnopqrst", 1)
    assert renew() == [first]
    put(world, dataset, "abcd", 2)
    assert renew() == [first], "that is less than a quarter of 20 keys"
    second = put(world, dataset, "a", 3)
    assert renew() == [second, first]
    hash_ = partition_keys(NAME)[0]
    world.servers.run(world.servers.server_of(NAME), (b"HSET", hash_, b"run", b"another"))
    third = put(world, dataset, "a", 4)
    assert third > second + 5
    assert renew() == [second, first], "a jump of offsets is no number of records"
    os.utime(found.bases(dataset)[0].folder / "base.json", (1, 1))
    assert renew() == [third, second, first]
    os.utime(found.bases(dataset)[0].folder / "base.json", (1, 1))
    assert renew() == [third, second, first], "nothing is behind it"


def test_the_bases_that_executions_need_are_kept(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "RENEW_RECORDS_MIN", 1)
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    ends: list[int] = []

    def renew(*needed: int) -> list[int]:
        ends.append(put(world, dataset, "a", len(ends)))
        found.renew(driver, dataset, {NAME: state(world)}, [{NAME: each} for each in needed])
        return [ends.index(each) for each in offsets(found, dataset)]

    assert [renew() for _ in range(2)][-1] == [1, 0]
    middle = put(world, dataset, "a", 99)  # the window of an execution that fails ends here
    assert [renew(middle) for _ in range(4)][-1] == [5, 4, 3, 1]
    assert read(driver, found, dataset, middle) == {"a": 99}
    assert renew() == [6, 5, 4]
    assert len([*(tmp_path / "reports").iterdir()]) == 3


def test_what_was_lost_is_an_error_until_an_operator_goes_on(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path
) -> None:
    options = {"logs": world.logs, "archive": str(tmp_path / "archive")}
    found = KeyedSnapshots(tmp_path / "snapshots", options)
    found.renew(driver, dataset, {NAME: state(world)})
    put(world, dataset, "ab", 1)
    Archiver(world.servers, tmp_path / "archive", hot_records=0).archive(world.servers.catalog())
    put(world, dataset, "bc", 2)
    Archiver(world.servers, tmp_path / "archive", hot_records=0).archive(world.servers.catalog())
    end = put(world, dataset, "d", 3)
    max((tmp_path / "archive").rglob("0-*.parquet")).unlink()
    with pytest.raises(PySparkException, match="no longer at Redis"):
        read(driver, found, dataset, end)
    with pytest.raises(PySparkException, match="no longer at Redis"):
        found.renew(driver, dataset, {NAME: state(world)})
    found.pass_over_losses(driver, dataset, {NAME: end})
    last = put(world, dataset, "a", 4)
    assert read(driver, found, dataset, last) == {"a": 4, "b": 1, "d": 3}
    found.renew(driver, dataset, {NAME: state(world)})


def test_a_base_never_goes_back(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has lost its last records has lower offsets than the base, which has these records."""
    monkeypatch.setattr(snapshots, "RENEW_RECORDS_MIN", 1)
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    end = put(world, dataset, "abc", 1)
    found.renew(driver, dataset, {NAME: state(world)})
    found.renew(driver, dataset, {NAME: PartitionState(end - 2, 1, state(world).runs)})
    found.pass_over_losses(driver, dataset, {NAME: end - 2})
    assert offsets(found, dataset) == [end, end]
    assert read(driver, found, dataset, end) == dict.fromkeys("abc", 1)


def test_two_threads_write_two_bases(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal begins while an operator's order is carried out."""
    monkeypatch.setattr(snapshots, "RENEW_RECORDS_MIN", 1)
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    end = put(world, dataset, "abc", 1)
    at = found._at  # pyright: ignore[reportPrivateUsage]
    renewal = threading.Thread(target=found.renew, args=(driver, dataset, {NAME: state(world)}))

    def meanwhile(*arguments: Any) -> DataFrame:
        if not renewal.ident:
            renewal.start()
            renewal.join(1.0)  # it waits for this thread
        return at(*arguments)

    monkeypatch.setattr(found, "_at", meanwhile)
    found.pass_over_losses(driver, dataset, {NAME: end - 1})
    renewal.join()
    assert offsets(found, dataset) == [end, end - 1]


def test_a_former_data_cluster_that_goes_on_changes_no_base_of_the_newer_one(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs while it writes one with the same number."""
    former, newer = (KeyedSnapshots(tmp_path, {"logs": world.logs}) for _ in range(2))
    put(world, dataset, "a", 1)
    before, force = state(world), snapshots._force_to_disk  # pyright: ignore[reportPrivateUsage]

    def meanwhile(folder: Path) -> int:
        monkeypatch.setattr(snapshots, "_force_to_disk", force)
        put(world, dataset, "a", 2)
        newer.renew(driver, dataset, {NAME: state(world)})
        return force(folder)

    monkeypatch.setattr(snapshots, "_force_to_disk", meanwhile)
    with pytest.raises(OSError, match="not empty"):
        former.renew(driver, dataset, {NAME: before})
    assert offsets(newer, dataset) == [before.offset + 1]
    assert [read(driver, newer, dataset, before.offset + more) for more in range(2)] == [{"a": 1}, {"a": 2}]
    assert len([*(tmp_path / "reports").iterdir()]) == 1


def test_a_base_is_written_beside_one_that_is_damaged(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path
) -> None:
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    first = put(world, dataset, "a", 1)
    found.renew(driver, dataset, {NAME: state(world)}, [])
    (found.bases(dataset)[0].folder / "base.json").unlink()
    last = put(world, dataset, "ab", 2)
    found.renew(driver, dataset, {NAME: state(world)}, [])
    assert offsets(found, dataset) == [last] != [first]
    assert read(driver, found, dataset, last) == {"a": 2, "b": 2}


def test_old_bases_are_deleted_also_where_no_new_one_can_be_written(
    driver: SparkSession, world: World, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "RENEW_RECORDS_MIN", 1)
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    for size in range(2):
        put(world, dataset, "a", size)
        found.renew(driver, dataset, {NAME: state(world)})
    end = put(world, dataset, "a", 2)
    monkeypatch.setattr(snapshots, "BASES_KEPT", 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            found.renew(driver, dataset, {NAME: state(world)})
    assert offsets(found, dataset) == [end - 1]
    assert read(driver, found, dataset, end) == {"a": 2}
    found.renew(driver, dataset, {NAME: state(world)})
    assert offsets(found, dataset) == [end]


Row = tuple[str, int, int, int, int]
"""Key, partition, offset, time of arrival in ms, and a number."""

MOVED: list[Row] = [
    ("stays", 0, 1, 50, 0), ("stays", 0, 2, 60, 1),
    ("clock set back", 0, 3, 60, 0), ("clock set back", 0, 4, 50, 1),
    ("down", 1, 9, 50, 0), ("down", 0, 5, 60, 1),
    ("up", 0, 6, 50, 0), ("up", 1, 10, 60, 1),
    ("back and forth", 0, 7, 50, 0), ("back and forth", 1, 11, 60, 0), ("back and forth", 0, 8, 70, 1),
    ("at once", 0, 12, 50, 0), ("at once", 1, 12, 50, 1),
]  # fmt: skip


def test_the_latest_record_of_a_key_whose_partition_has_changed(driver: SparkSession, dataset: Dataset) -> None:
    """Small and large windows agree: a key has other partitions after an operator has raised their number."""
    keys = dict.fromkeys(key for key, *_ in MOVED)
    chance = Random(1)
    rows = sorted(
        [*MOVED, *((f"k{chance.randrange(100)}", chance.randrange(3), offset, chance.randrange(20), offset)
        for offset in range(20, 500))], key=lambda row: row[1:3],
    )  # fmt: skip
    columns = [*zip(*rows, strict=True)]
    arrived = [value * 1000 for value in columns[3]]
    table = arrow.table({"id": columns[0], "size": columns[4], "_partition": columns[1], "_offset": columns[2]})
    table = table.append_column("_arrived", arrow.array(arrived, arrow.timestamp("us", tz="UTC")))
    small = _sizes(small_windows._latest(table, "id").to_pylist())  # pyright: ignore[reportPrivateUsage]
    frame = driver.createDataFrame(table)
    large = _sizes(snapshots._latest(frame, "id").toArrow().to_pylist())  # pyright: ignore[reportPrivateUsage]
    assert small == large
    assert {key: small[key] for key in keys} == dict.fromkeys(keys, 1)
    assert len(small) == len({row[0] for row in rows})


def _sizes(rows: list[dict[str, Any]]) -> dict[str, int]:
    found = {row["id"]: row["size"] for row in rows}
    assert len(found) == len(rows), "each key is there once"
    return found


def test_a_stale_record_of_a_former_partition_does_not_come_back(
    driver: SparkSession, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "RENEW_RECORDS_MIN", 1)
    dataset = world.set_dataset(kind="keyed", key="id", id="", partitions=2)
    found = KeyedSnapshots(tmp_path, {"logs": world.logs})
    for size, partition in enumerate((1, 0)):
        world.append(dataset, {"id": "a", "type": "t", "size": size}, partition=partition)
        stored_ms = world.servers.now_ms()
        until(lambda: world.servers.now_ms() > stored_ms)  # noqa: B023
    ends = world.servers.tips({"reports": 2})
    for _ in range(2):
        assert [row["size"] for row in found.at(driver, dataset, ends).collect()] == [1]
        found.renew(driver, dataset, world.servers.states({"reports": 2}))
    assert len(found.bases(dataset)) == 1
