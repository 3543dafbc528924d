"""The archive's files: found by their names, merged, and complete when the disk is full or a process dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import Record, append_records_command, partition_keys
from dynamoth.data.terms import trim_command
from dynamoth_analytics.cluster.servers import LogServerFailed, LogServers, read_servers
from dynamoth_analytics.cluster.storage import archive
from dynamoth_analytics.cluster.storage.archive import Archiver, ArchivingFailed
from dynamoth_analytics.cluster.storage.archive_files import Hole, archived, file_name
from dynamoth_analytics.cluster.storage.batches import OtherType, to_batch, write_file
from dynamoth_analytics.cluster.storage.merging import merge_day
from dynamoth_analytics.cluster.storage.paging import next_count, pages
from dynamoth_analytics.cluster.storage.reading import RecordsLost, read_range, read_state
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
    return [each for found in archived(folder, dataset, 0, after, until) for each in _offsets_in(found)]


def _offsets_in(found: Any) -> list[int]:
    assert not isinstance(found, Hole)
    return list(found["_offset"].to_pylist())


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

    monkeypatch.setattr("dynamoth_analytics.cluster.storage.archive_files.os.listdir", counting)
    for _ in range(2):
        assert offsets(tmp_path, dataset, 29_995, 40_000) == list(range(29_996, 30_001))
    assert [day.name for day in listed] == ["date=2026-01-10"]


def test_merged_files_and_their_parts_give_each_record_once(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    parts = [write(tmp_path, dataset, "2026-01-01", first, first + 4) for first in range(1, 51, 5)]
    kept = parts[3].read_bytes()
    assert merge_day(parts[0].parent) == 10
    assert [path.name for path in parts[0].parent.iterdir()] == [file_name(0, 0, 1, 50)]
    parts[3].write_bytes(kept)  # as if the process had died before it deleted this part
    assert offsets(tmp_path, dataset, 7, 44) == list(range(8, 45))
    assert merge_day(parts[0].parent) == 1
    assert offsets(tmp_path, dataset, 0, 100) == list(range(1, 51))


def test_a_reader_goes_on_when_its_files_are_merged_meanwhile(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    parts = [write(tmp_path, dataset, "2026-01-01", first, first + 4) for first in range(1, 31, 5)]
    reader = archived(tmp_path, dataset, 0, 0, 30)
    found = _offsets_in(next(reader))
    merge_day(parts[0].parent)
    found += [offset for batch in reader for offset in _offsets_in(batch)]
    assert found == list(range(1, 31))


def test_a_full_disk_leaves_records_at_redis_and_is_an_error(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", "1", "2", "3"))
    archiver = Archiver(world.servers, tmp_path, hot_records=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dynamoth_analytics.cluster.storage.batches.parquet.ParquetWriter", full)
        for _ in range(2):
            with pytest.raises(ArchivingFailed, match="the disk of the archive is full: make room"):
                archiver.archive(world.servers.catalog())
            assert _is_full(archiver)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".tmp", ".parquet"}]
    assert read(world, dataset, tmp_path) == ["1", "2", "3"]
    assert archiver.archive(world.servers.catalog()) == 3
    assert not _is_full(archiver)
    assert read(world, dataset, tmp_path) == ["1", "2", "3"]


def test_a_disk_that_is_read_only_is_named_with_the_cure(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", "r1"))

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / ".0.tmp"))

    monkeypatch.setattr("dynamoth_analytics.cluster.storage.batches.parquet.ParquetWriter", read_only)
    with pytest.raises(ArchivingFailed, match="reports/0 is not archived: a disk of the data cluster is read-only"):
        Archiver(world.servers, tmp_path, hot_records=1).archive(world.servers.catalog())


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


def store(world: World, dataset: Dataset, count: int, value: bytes = b'{"id":"x","type":"a","size":1}') -> list[str]:
    """Store records in partition 0, as a writer does; return the refusals."""
    server, refusals = world.servers.server_of("reports/0"), list[str]()
    for begin in range(0, count, 500):
        part = [(value, "")] * min(500, count - begin)
        try:
            world.servers.run(server, append_records_command(dataset, 0, part, world.servers.run_id(server)))
        except LogServerFailed as error:
            refusals.append(str(error))
    return refusals


def length(world: World) -> int:
    return int(world.servers.run(world.servers.server_of("reports/0"), (b"XLEN", partition_keys("reports/0")[1])))


def tip(world: World, name: str = "reports/0") -> int:
    return read_state(world.servers, name).offset


def restart(world: World, keep: int | None = None, name: str = "reports/0") -> None:
    """Have a server restart: it has the first records of a partition that it had, or all of them."""
    server, (hash_, stream, _) = world.servers.server_of(name), partition_keys(name)
    if keep is not None:
        kept = world.servers.run(server, (b"XRANGE", stream, b"-", b"+", b"COUNT", keep))
        again = [(b"XADD", stream, id_, *fields) for id_, fields in kept]
        last = kept[-1][0].partition(b"-")[0]
        world.servers.run_all(server, [(b"DEL", stream), *again, (b"HSET", hash_, b"offset", last)])
    world.servers.run(server, (b"HSET", hash_, b"run", b"another"))


def ids_between(world: World, dataset: Dataset, after: int, until: int, folder: Path | None) -> list[str]:
    batches = read_range(world.servers, dataset, 0, after, until, folder)
    return [id_ for batch in batches for id_ in batch["id"].to_pylist()]


# Bounds.


def test_a_partition_with_a_small_bound_is_trimmed_to_half_of_it(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1, waiting_max=1000)
    assert store(world, dataset, 1000) == []
    assert "FULL" in store(world, dataset, 1)[0]
    archiver = Archiver(world.servers, tmp_path)
    assert archiver.archive(world.servers.catalog()) == 1000
    assert length(world) == 500
    assert store(world, dataset, 500) == []


def test_trimming_takes_steps_and_never_takes_what_is_not_archived(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "TRIM_RECORDS_MAX", 7)
    dataset = world.set_dataset(partitions=1)
    store(world, dataset, 20)
    restart(world)
    store(world, dataset, 20)
    archiver = Archiver(world.servers, tmp_path, hot_records=5)

    def write_and_append(*arguments: Any) -> None:
        write_file(*arguments)
        store(world, dataset, 30)

    def one_page(*arguments: Any) -> Iterator[list[Record]]:
        return islice(pages(*arguments), 1)

    with monkeypatch.context() as patch:
        patch.setattr(archive, "write_file", write_and_append)
        patch.setattr(archive, "FILE_RECORDS_MAX", 1)
        patch.setattr("dynamoth_analytics.cluster.storage.paging.PAGE_RECORDS_MAX", 40)
        patch.setattr(archive, "pages", one_page)
        assert archiver.archive(world.servers.catalog()) == 40
    assert length(world) == 30
    assert archiver.archive(world.servers.catalog()) == 30
    assert length(world) == 5
    assert len(ids_between(world, dataset, 0, tip(world), tmp_path)) == 70


def test_pages_files_and_row_groups_are_bounded_by_bytes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=1, record_bytes_max=65_536)
    store(world, dataset, 300)
    store(world, dataset, 100, json.dumps({"id": "y" * 60_000, "type": "a", "size": 1}).encode())
    store(world, dataset, 300)
    monkeypatch.setattr("dynamoth_analytics.cluster.storage.paging.PAGE_BYTES", 2**20)
    monkeypatch.setattr(archive, "FILE_BYTES_MAX", 2**21)
    monkeypatch.setattr("dynamoth_analytics.cluster.storage.batches.ROW_GROUP_BYTES", 2**20)
    sizes = [sum(len(each.value) for each in page) for page in pages(world.servers, dataset, 0, 0, 2**53)]
    assert max(sizes) <= 2**20
    Archiver(world.servers, tmp_path, hot_records=100).archive(world.servers.catalog())
    (day,) = (tmp_path / "reports").iterdir()
    files = [*day.iterdir()]
    assert len(files) >= 3
    assert max(_bytes_of(file) for file in files) <= 2**21 + 2**20
    merge_day(day)
    (merged,) = day.iterdir()
    with parquet.ParquetFile(merged) as file:
        groups = [file.read_row_group(number).nbytes for number in range(file.num_row_groups)]
    assert len(groups) >= 6
    assert max(groups) <= 2**20
    assert len(ids_between(world, dataset, 0, tip(world), tmp_path)) == 700


def _bytes_of(file: Path) -> int:
    return int(parquet.read_table(file, partitioning=None).nbytes)


def test_a_page_follows_the_largest_record_of_the_page_before() -> None:
    def page(size: int) -> list[Record]:
        return [Record(1, 0, b"x"), Record(2, 0, b"x" * size)]

    assert next_count(page(10), 64, 1000) == 128
    assert next_count(page(10), 900, 1000) == 1000
    assert next_count(page(2**20), 500, 1000) == 64
    assert next_count(page(2**30), 500, 1000) == 1


# One fault does not hold up the rest.


def test_a_malformed_record_holds_up_only_its_partition(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=4)
    server = world.servers.server_of("reports/1")
    world.servers.run(server, (b"XADD", partition_keys("reports/1")[1], b"5-0", b"t", b"1", b"d", b"no JSON"))
    world.append(dataset, *reports("a", *"12345678"))
    archiver = Archiver(world.servers, tmp_path, hot_records=1)
    for _ in range(2):
        with pytest.raises(ArchivingFailed, match="partition reports/1 is not archived"):
            archiver.archive(world.servers.catalog())
    assert archiver.records == 6
    assert {file.name[0] for file in tmp_path.rglob("*.parquet")} == {"0", "2", "3"}


_TYPES = {
    "string": "x", "int": 5, "float": 1.5, "bool": True, "timestamp": "2026-01-31T12:00:00Z",
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [(old, new) for old in _TYPES for new in _TYPES if old != new])
def test_records_of_another_type_than_their_dataset_are_an_error(
    world: World, tmp_path: Path, old: str, new: str
) -> None:
    dataset = world.set_dataset(partitions=1, id="", fields={"size": old + "?"})
    world.append(dataset, {}, {"size": _TYPES[old]})
    changed = world.set_dataset(partitions=1, id="", fields={"size": new + "?"}, version=2)
    cause = f"dataset reports: field 'size' is of type {new}, and stored records have"
    if (old, new) not in (("int", "float"), ("int", "timestamp"), ("timestamp", "int"), ("timestamp", "float")):
        with pytest.raises(OtherType, match=cause):  # JSON has only numbers for those
            list(read_range(world.servers, changed, 0, 0, world.servers.tips({"reports": 1})["reports/0"], None))
        with pytest.raises(ArchivingFailed, match=f"partition reports/0 is not archived: {cause}"):
            Archiver(world.servers, tmp_path, hot_records=0).archive(world.servers.catalog())
    world.set_dataset(partitions=1, id="", fields={"size": old + "?"}, version=3)
    Archiver(world.servers, tmp_path, hot_records=0).archive(world.servers.catalog())
    tip = world.servers.tips({"reports": 1})["reports/0"]
    with pytest.raises(OtherType, match=f"{cause} {old} there: leave the field out"):
        list(read_range(world.servers, changed, 0, 0, tip, tmp_path))


def test_a_server_that_is_down_holds_up_only_its_partitions(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=8)
    world.append(dataset, *reports("a", *"12345678"))
    catalog, servers = world.servers.catalog(), world.servers
    own = {number for number in range(8) if servers.server_of(f"reports/{number}") == "l1"}
    assert 0 < len(own) < 8
    down = LogServers((("l1", "redis://127.0.0.1:1"), *servers.urls[1:]))
    tried: list[str] = []
    run = LogServers.run

    def counting(self: LogServers, server: str, command: Any) -> Any:
        tried.append(server)
        return run(self, server, command)

    monkeypatch.setattr(LogServers, "run", counting)
    archiver = Archiver(down, tmp_path)
    with pytest.raises(ArchivingFailed, match="log server l1"):
        archiver.archive(catalog)
    assert archiver.records == 8 - len(own)
    assert tried.count("l1") == 1, "each attempt takes a timeout"


def test_a_damaged_file_does_not_hold_up_the_merging_of_others(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    write(tmp_path, dataset, "2026-01-01", 1, 5).write_bytes(b"damaged")
    for first in (6, 11):
        write(tmp_path, dataset, "2026-01-02", first, first + 4)
    archiver = Archiver(world.servers, tmp_path)
    with pytest.raises(ArchivingFailed, match="date=2026-01-01"):
        archiver.archive(world.servers.catalog())
    archiver.archive(world.servers.catalog())
    assert [file.name for file in (tmp_path / "reports" / "date=2026-01-02").iterdir()] == [file_name(0, 5, 6, 15)]


def wait_for_next_millisecond() -> None:
    """The archive compares records by when they were stored, in ms."""
    now = time.time_ns() // 10**6
    while time.time_ns() // 10**6 == now:
        time.sleep(0.0001)


def test_a_server_that_gives_offsets_again_is_neither_archived_nor_trimmed(world: World, tmp_path: Path) -> None:
    dataset, durable = world.set_dataset(partitions=1), read_servers(world.logs, durable=True)
    server, keys = durable.server_of("reports/0"), partition_keys("reports/0")

    def keep(*ids: str) -> None:
        records = [(json.dumps(each).encode(), each["id"]) for each in reports("a", *ids)]
        durable.run(server, append_records_command(dataset, 0, records, ""))

    offsets_again: dict[str, str] = {}

    def archive(hot_records: int = 1) -> int:
        archiver = Archiver(durable, tmp_path, hot_records)
        archiver.offsets_again = offsets_again
        return archiver.archive(durable.catalog())

    keep("1", "2")
    older = durable.run_all(server, ((b"DUMP", key) for key in keys))
    wait_for_next_millisecond()
    keep("3", "4")
    assert archive(100) == 4
    durable.run_all(server, ((b"RESTORE", key, b"0", copy, b"REPLACE") for key, copy in zip(keys, older, strict=True)))
    keep("5")
    wait_for_next_millisecond()
    for behind in (False, True):
        if behind:
            keep("6", "7")
        with pytest.raises(ArchivingFailed, match="gives offsets again"):
            archive()
        assert [*offsets_again] == ["reports/0"]
    assert ids_between(world, dataset, 0, tip(world), None) == list("12567"), "nothing is trimmed"
    durable.run(server, (b"DEL", *keys))  # as the error says
    keep("5", "6", "7")
    assert archive() == 3
    assert not offsets_again
    assert ids_between(world, dataset, 0, tip(world), tmp_path) == list("1234567")


# What was lost, and what was not.


def test_a_restart_without_losses_is_none(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    for id_ in "123":
        world.append(dataset, *reports("a", id_))
        restart(world)
    end = tip(world)
    assert ids_between(world, dataset, 0, end, None) == list("123")
    Archiver(world.servers, tmp_path, hot_records=1).archive(world.servers.catalog())
    world.append(dataset, *reports("a", "4"))
    assert ids_between(world, dataset, 0, tip(world), tmp_path) == list("1234")
    assert ids_between(world, dataset, 0, end, tmp_path) == list("123")


def test_a_window_that_a_server_has_lost_is_an_error_before_and_after_new_records(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", *"12345"))
    seen = tip(world)
    restart(world, keep=3)
    text = f"reports/0 from offset {seen - 1} to {seen} are no longer at Redis"
    for _ in range(2):
        with pytest.raises(RecordsLost, match=text):
            ids_between(world, dataset, seen - 4, seen, tmp_path)
        world.append(dataset, *reports("a", "6"))
    assert ids_between(world, dataset, 0, tip(world), tmp_path) == list("1236"), "nobody can tell what was in between"
    assert ids_between(world, dataset, 0, seen - 2, tmp_path) == list("123")


def test_a_window_is_an_error_when_a_server_has_lost_everything(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", *"12"))
    Archiver(world.servers, tmp_path).archive(world.servers.catalog())
    archived_until = tip(world)
    world.append(dataset, *reports("a", "3"))
    seen = tip(world)
    world.servers.run(world.servers.server_of("reports/0"), (b"DEL", *partition_keys("reports/0")))
    for _ in range(2):
        with pytest.raises(RecordsLost, match=f"from offset {seen} to {seen}"):
            ids_between(world, dataset, 0, seen, tmp_path)
        assert ids_between(world, dataset, 0, archived_until, tmp_path) == list("12")
        world.append(dataset, *reports("a", "4"))
    assert ids_between(world, dataset, 0, tip(world), tmp_path) == list("124")


def test_records_that_only_the_archive_has_are_read_between_those_at_redis(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", *"12345"))
    Archiver(world.servers, tmp_path).archive(world.servers.catalog())
    restart(world, keep=3)
    world.append(dataset, *reports("a", *"67"))
    for _ in range(2):
        assert ids_between(world, dataset, 0, tip(world), tmp_path) == list("1234567")
        Archiver(world.servers, tmp_path, hot_records=1).archive(world.servers.catalog())


def test_what_was_trimmed_before_a_restart_is_missed(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("a", *"123"))
    last = tip(world)
    Archiver(world.servers, tmp_path / "one", hot_records=0).archive(world.servers.catalog())
    restart(world)
    world.append(dataset, *reports("a", "4"))
    for folder in (None, tmp_path / "other"):
        with pytest.raises(RecordsLost, match=f"to {last} are no longer"):
            ids_between(world, dataset, 0, tip(world), folder)
    assert ids_between(world, dataset, 0, tip(world), tmp_path / "one") == list("1234")
    # Another archive that begins now remembers that it does not have them, also when the server forgets.
    caplog.set_level(logging.ERROR)
    Archiver(world.servers, tmp_path / "other").archive(world.servers.catalog())
    assert "were lost before they were archived" in caplog.text
    server, (hash_, _, _) = world.servers.server_of("reports/0"), partition_keys("reports/0")
    world.servers.run(server, (b"HDEL", hash_, b"runs"))
    world.servers.run(server, trim_command("reports/0", tip(world), 0))
    with pytest.raises(RecordsLost, match=f"from offset 1 to {last}"):
        ids_between(world, dataset, 0, tip(world), tmp_path / "other")
    assert ids_between(world, dataset, last, tip(world), tmp_path / "other") == ["4"]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_file_that_is_missing_is_noticed(world: World, tmp_path: Path, missing: int) -> None:
    dataset = world.set_dataset(partitions=1)
    parts = [
        write(tmp_path, dataset, "2026-01-01", 1, 5),
        write(tmp_path, dataset, "2026-01-01", 6, 10),
        write(tmp_path, dataset, "2026-01-02", 1001, 1005, before=10),  # a restart in between
        write(tmp_path, dataset, "2026-01-02", 1006, 1010),
        write(tmp_path, dataset, "2026-01-02", 1011, 1015),
    ]
    assert ids_between(world, dataset, 0, 1015, tmp_path) == [str(each) for each in (*range(1, 11), *range(1001, 1016))]
    parts[missing].unlink()
    for folder in {each.parent for each in parts}:
        merge_day(folder)
    hole = [(0, 0), (6, 10), (11, 1005), (1006, 1010)][missing]
    for after in (0, hole[0]):
        with pytest.raises(RecordsLost, match=f"reports/0 from offset {max(hole[0], after + 1)} to {hole[1]}"):
            ids_between(world, dataset, after, 1015, tmp_path)
    assert ids_between(world, dataset, hole[1], 1015, tmp_path)[-1] == "1015"
    assert ids_between(world, dataset, 0, hole[0] - 1, tmp_path)[-1] == str(hole[0] - 1)


def test_overlapping_files_of_two_data_clusters_give_each_record_once(world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset(partitions=1)
    write(tmp_path, dataset, "2026-01-01", 1, 10)
    write(tmp_path, dataset, "2026-01-01", 5, 15)
    path = write(tmp_path, dataset, "2026-01-01", 11, 20)
    for _ in range(2):
        assert offsets(tmp_path, dataset, 0, 20) == list(range(1, 21))
        merge_day(path.parent)
    assert len([*path.parent.iterdir()]) == 1
