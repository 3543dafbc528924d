from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dynamoth.errors import ConfigError, MalformedMessage
from dynamoth.plan.plan import Server
from dynamoth.protocol.reports import ChannelColumns, ChannelSums, Report
from dynamoth.recording import TABLES, VERSION, VERSION_KEY, Type
from dynamoth_recorder.events import Rows
from dynamoth_recorder.process import store as process_store
from dynamoth_recorder.process.backlog import (
    BATCH_BYTES,
    COMBINED_BATCHES,
    LARGE_ROWS,
    Backlog,
    Portion,
    folder_of,
)
from dynamoth_recorder.process.runtime import RecorderConfig
from dynamoth_recorder.process.store import FILES_PER_HOUR, DiskFull, Store
from dynamoth_recorder.process.tables import SCHEMAS, arrow, parquet, to_batch
from dynamoth_recorder.rows import rows_of_report

A, B = "a" * 16, "b" * 16
NOW = datetime(2026, 11, 23, 14, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)

VALUES: dict[Type, Any] = {
    Type.TEXT: "text",
    Type.WHOLE: 2**63 - 1,
    Type.NUMBER: 0.5,
    Type.TRUTH: True,
    Type.BYTES: b"\xff",
    Type.TEXTS: ["a", "b"],
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "recording", A)
    yield made
    made.close()


def portion(at: datetime = NOW, rows: int = 1) -> Portion:
    at_us = int(at.timestamp() * 1e6)
    batch = to_batch(Rows("latency", rows, {"server": "s1"}, {"number": range(rows)}), at_us, A)
    return Portion("latency", folder_of(at_us), (batch,))


def files(store: Store) -> list[str]:
    return sorted(str(path.relative_to(store.folder / "latency")) for path in store.folder.rglob("*-*.parquet"))


def rows_in(store: Store) -> int:
    return sum(parquet.ParquetFile(path).metadata.num_rows for path in store.folder.rglob("*.parquet"))


@pytest.mark.parametrize("table", TABLES)
def test_every_table_is_read_back_as_it_was_written(table: str, store: Store) -> None:
    columns = [column for column in TABLES[table].columns if column.name not in ("at", "recorder")]
    values = {column.name: VALUES[column.type] for column in columns}
    batches = [
        to_batch(Rows(table, 1, values), 1_000_000, A),
        to_batch(Rows(table, 2, {columns[0].name: None}, {name: [value] * 2 for name, value in values.items()}), 0, A),
        to_batch(Rows(table, 2, values), 0, A),
        to_batch(Rows(table, 1, {}), 0, A),
    ]
    store.write(Portion(table, "date=1970-01-01/hour=00", tuple(batches)))
    [path] = (store.folder / table).rglob("*.parquet")
    read = parquet.ParquetFile(path).read()
    assert read.schema.metadata[VERSION_KEY.encode()] == str(VERSION).encode()
    first, _, null, *_, last = read.to_pylist()
    assert first == {**values, "at": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), "recorder": A}
    assert null[columns[0].name] is None and null[columns[-1].name] == values[columns[-1].name]
    assert {value for name, value in last.items() if name not in ("at", "recorder")} == {None}


@pytest.mark.parametrize("number", [2**63, "x"])
def test_a_value_that_a_table_cannot_hold_is_malformed(number: Any) -> None:
    for rows in (Rows("latency", 1, {"number": number}), Rows("latency", 1, {}, {"number": [number]})):
        with pytest.raises(MalformedMessage):
            to_batch(rows, 0, A)


def test_small_files_are_merged_at_once_when_their_hour_is_over_and_many_before_that(store: Store) -> None:
    for _ in range(3):
        store.write(portion(NOW - 2 * HOUR))
    for _ in range(FILES_PER_HOUR - 1):
        store.write(portion())
    store.upkeep(NOW)
    assert len(files(store)) == 1 + FILES_PER_HOUR - 1
    store.write(portion())
    store.upkeep(NOW)
    assert len(files(store)) == 2
    assert rows_in(store) == 3 + FILES_PER_HOUR


@pytest.mark.parametrize("table", TABLES)
def test_files_of_every_table_are_merged(table: str, store: Store) -> None:
    for _ in range(3):
        store.write(Portion(table, "date=2026-11-23/hour=10", (to_batch(Rows(table, 1, {}), 0, A),)))
    store.upkeep(NOW)
    [path] = (store.folder / table).rglob("*.parquet")
    assert parquet.ParquetFile(path).metadata.num_rows == 3


def test_a_merge_takes_no_more_files_than_it_has_memory_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names that are alike take memory, and next to nothing on disk."""
    for rows in (1000, 1000, 5000, 1000, 1000, 1000):
        store.write(portion(NOW - 2 * HOUR, rows))
    one = parquet.ParquetFile(next(store.folder.rglob("*.parquet"))).read().nbytes
    monkeypatch.setattr(process_store, "MERGED_MEMORY_BYTES_MAX", 2.5 * one)
    store.upkeep(NOW)
    counts = sorted(parquet.ParquetFile(path).metadata.num_rows for path in store.folder.rglob("*.parquet"))
    assert counts == [1000, 2000, 2000, 5000], "one that is too large alone is left, and two at a time are merged"


def test_files_that_cannot_be_deleted_are_merged_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        store.write(portion(NOW - 2 * HOUR))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "of another user", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        store.upkeep(NOW)
    store.upkeep(NOW)
    assert rows_in(store) == 2 * 3, "each row twice, and not more from one upkeep to the next"


def test_hours_and_files_that_do_not_exist_are_forgotten(store: Store) -> None:
    with_bounds = Store(store.folder, B, keep_hours=24.0)
    for age in (20, 2):
        with_bounds.write(portion(NOW - age * HOUR))
        with_bounds.write(portion(NOW - age * HOUR))
        damaged = store.folder / "latency" / portion(NOW - age * HOUR).hour / f"{B}-{age:08d}.parquet"
        damaged.write_bytes(b"")
    remembered = "_merged_hours", "_left_alone"
    with_bounds.upkeep(NOW)
    with_bounds.upkeep(NOW)
    assert [len(getattr(with_bounds, name)) for name in remembered] == [2, 0], "files of merged hours are forgotten"
    with_bounds.upkeep(NOW + 23 * HOUR)
    with_bounds.upkeep(NOW + 48 * HOUR)
    with_bounds.close()
    assert [len(getattr(with_bounds, name)) for name in remembered] == [0, 0] and files(store) == []


def test_files_that_cannot_be_merged_do_not_keep_old_hours(store: Store) -> None:
    store.write(portion(NOW - 50 * HOUR))
    store.write(portion())
    (store.folder / ".merging.lock").mkdir()
    with_bounds = Store(store.folder, B, keep_hours=24.0)
    with pytest.raises(OSError, match="directory"):
        with_bounds.upkeep(NOW)
    with_bounds.close()
    assert len(files(store)) == 1


def test_a_table_that_cannot_be_written_does_not_keep_the_others(store: Store) -> None:
    (store.folder / "servers").touch()
    servers = Portion("servers", portion().hour, (to_batch(Rows("servers", 1, {}), 0, A),))
    left, failure = store.write_all([servers, portion()])
    assert left == [servers] and failure.startswith(f"{store.folder / 'servers'}: ")
    assert len(files(store)) == 1
    (store.folder / "servers").unlink()
    assert store.write_all(left) == ([], "")


def test_a_recorder_whose_disk_is_full_at_its_start_can_be_started_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DiskFull, match="make room, and start it again"):
        patch.setattr(process_store, "_opened_for_lock", full)
        Store(store.folder, B)
    Store(store.folder, B).close()


def test_files_of_a_living_recorder_and_damaged_ones_are_left_alone(store: Store) -> None:
    other = Store(store.folder, B)
    other.write(portion(NOW - 2 * HOUR))
    store.write(portion(NOW - 2 * HOUR))
    store.write(portion(NOW - 2 * HOUR))
    damaged = store.folder / "latency" / folder_of(int((NOW - 2 * HOUR).timestamp() * 1e6)) / f"{A}-00000099.parquet"
    damaged.write_bytes(b"PAR1")
    store.upkeep(NOW)
    assert len(files(store)) == 3 and damaged.exists()
    other.close()
    store.write(portion(NOW - 5 * HOUR))
    fresh = Store(store.folder, "c" * 16)  # knows nothing of what is damaged
    fresh.upkeep(NOW)
    fresh.close()
    assert damaged.exists()
    damaged.unlink()
    assert rows_in(store) == 4


def test_a_new_recorder_removes_what_a_dead_one_has_begun_and_not_what_a_living_one_writes(store: Store) -> None:
    store.write(portion())
    folder = next(store.folder.rglob("*.parquet")).parent
    dead, alive, foreign = (folder / f".{name}.tmp" for name in (f"{B}-00000001", f"{A}-00000009", "notes"))
    for path in (dead, alive, foreign):
        path.touch()
    (store.folder / f".recorder-{B}.lock").touch()
    Store(store.folder, "c" * 16).close()
    assert [path.exists() for path in (dead, alive, foreign)] == [False, True, True]
    assert [path.name for path in store.folder.glob(".recorder-*")] == [f".recorder-{A}.lock"]


def test_old_hours_are_deleted_by_age_and_by_size_but_never_the_present_one(store: Store) -> None:
    ages = [0, 2, 3, 50]
    for age in ages:
        store.write(portion(NOW - age * HOUR, rows=1000))
    size = sum(path.stat().st_size for path in store.folder.rglob("*.parquet")) // len(ages)
    no_hour = store.folder / "servers" / portion(NOW).hour
    no_hour.parent.mkdir(parents=True)
    no_hour.touch()
    for keep_hours, keep_bytes, left in ((24.0, 0, 3), (0.0, 2 * size + size // 2, 2), (0.0, 1, 1)):
        with_bounds = Store(store.folder, B, keep_hours, keep_bytes)
        with_bounds.upkeep(NOW)
        with_bounds.close()
        assert len(files(store)) == left
    assert files(store)[0].startswith("date=2026-11-23/hour=14/")


def test_nothing_is_left_of_a_file_that_could_not_be_written(store: Store) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # the file ends in the middle, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            store.write(portion())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path for path in (store.folder / "latency").rglob("*") if path.is_file()] == []
    store.write(portion())
    assert rows_in(store) == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file cannot be written .*: choose another folder"):
        Store(tmp_path / "file", A)


def test_a_file_is_no_folder_for_a_recording(tmp_path: Path) -> None:
    (out := tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"recorder.out: .*file is a file: give the folder"):
        RecorderConfig(find_servers=no_servers, out=str(out))


async def no_servers() -> tuple[Server, ...]:
    return ()


def test_a_full_backlog_counts_what_it_refuses() -> None:
    one = portion(rows=10)
    two_bytes = 2 * (BATCH_BYTES + one.batches[0].nbytes)
    backlog = Backlog(two_bytes)
    for _ in range(3):
        backlog.add("latency", 0, one.batches[0])
    assert backlog.lost == {"latency": 10}
    taken = backlog.take()
    assert (sum(each.rows for each in taken), backlog.size_bytes) == (20, 0)
    backlog.add("latency", 0, one.batches[0])
    backlog.give_back(taken)
    assert backlog.lost == {"latency": 20} and backlog.size_bytes == two_bytes


def sequences(portions: list[Portion]) -> list[int]:
    return [row["sequence"] for each in portions for batch in each.batches for row in batch.to_pylist()]


def test_rows_that_could_not_be_written_stay_before_newer_ones_and_only_the_newest_are_lost() -> None:
    batches = [to_batch(Rows("servers", rows, {"sequence": number}), 0, A) for number, rows in enumerate([100, 1, 1])]
    backlog = Backlog(sum(BATCH_BYTES + batch.nbytes for batch in batches[:2]))
    backlog.add("servers", 0, batches[1])
    taken = backlog.take()
    backlog.add("servers", 0, batches[0])
    backlog.add("servers", 0, batches[2])
    backlog.give_back(taken)
    backlog.add("servers", 0, batches[2])
    assert backlog.lost == {"servers": 2}
    assert sequences(backlog.take()) == [1] + [0] * 100, "in the order in which they came"


def test_what_is_given_back_again_and_again_is_combined() -> None:
    backlog = Backlog()
    for number in range(3 * COMBINED_BATCHES):
        backlog.add("servers", 0, to_batch(Rows("servers", 1, {"sequence": number}), 0, A))
        backlog.give_back(backlog.take())
    [portion] = backlog.take()
    assert len(portion.batches) == 3 and sequences([portion]) == [*range(3 * COMBINED_BATCHES)]


def report_of(names: int, rest: int, sequence: int) -> Report:
    some, nobody = (1,) * names, (b"",) * names
    columns = ChannelColumns(tuple(b"%d" % n for n in range(names)), some, some, some, some, some, some, nobody, nobody)
    return Report(
        server="s1",
        incarnation=1,
        sequence=sequence,
        interval_s=1.0,
        plan_version=0,
        outgoing_bytes_per_s_max=1,
        outgoing_bytes_per_s=0.0,
        columns=columns,
        rest=ChannelSums(channels=rest),
    )


def test_the_rows_of_a_report_are_next_to_each_other_in_the_file(store: Store) -> None:
    backlog = Backlog()
    sizes = [(LARGE_ROWS, 5), (0, 5), (3, 0), (LARGE_ROWS - 1, 9), (0, 0), (2 * LARGE_ROWS, 1)]
    reports = [report_of(*sizes[number % len(sizes)], number) for number in range(3 * COMBINED_BATCHES)]
    for number, report in enumerate(reports):
        for rows in rows_of_report(report):
            backlog.add(rows.table, 0, to_batch(rows, 0, A))
        if number % 50 == 49:
            backlog.give_back(backlog.take())
    store.write_all(backlog.take())
    store.write_all(backlog.take())
    store.upkeep(NOW)
    [path] = (store.folder / "channels").rglob("*.parquet")
    read = parquet.ParquetFile(path).read()
    expected = [each.sequence for each in reports for _ in range(len(each.columns) + bool(each.rest.channels))]
    assert read["sequence"].to_pylist() == expected
    rest = {number for number, name in zip(expected, read["channel"].to_pylist(), strict=True) if name is None}
    assert rest == {each.sequence for each in reports if each.rest.channels}


def test_what_waits_takes_as_much_memory_as_is_counted() -> None:
    backlog, rows = Backlog(), 5_050
    before = arrow.total_allocated_bytes()
    for number in range(rows):
        backlog.add("servers", 0, to_batch(Rows("servers", 1, {"sequence": number}), 0, A))
    assert arrow.total_allocated_bytes() - before < backlog.size_bytes < 2_000 * rows, "one row alone takes 10 kB"
    assert sequences(backlog.take()) == [*range(rows)]


def test_one_hour_that_cannot_be_deleted_does_not_keep_the_others(store: Store, tmp_path: Path) -> None:
    for age in (60, 50, 40, 2):
        store.write(portion(NOW - age * HOUR))
    store.write(portion(NOW - 2 * HOUR))
    first, second, *_ = sorted((store.folder / "latency").glob("date=*/hour=*"))
    moved = second.rename(tmp_path / "another disk")
    second.symlink_to(moved)
    for path in first.iterdir():
        path.unlink()
    first.rmdir()
    first.touch()  # no folder, and so it cannot be deleted like one
    (store.folder / "servers" / "date=9999-12-31" / "hour=23").mkdir(parents=True)
    with_bounds = Store(store.folder, B, keep_hours=24.0)
    with pytest.raises(NotADirectoryError):
        with_bounds.upkeep(NOW)
    with_bounds.close()
    assert first.exists() and not second.is_symlink() and any(moved.iterdir()), "a link alone is deleted"
    assert [path[:23] for path in files(store)] == ["date=2026-11-23/hour=12"] * 2


def test_no_file_behind_a_planted_link_is_opened(store: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("text")
    (store.folder / ".merging.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        store.upkeep(NOW)
    assert victim.read_text() == "text"


def test_the_schemas_are_those_of_the_contract() -> None:
    assert {name: schema.names for name, schema in SCHEMAS.items()} == {
        table.name: [column.name for column in table.columns] for table in TABLES.values()
    }
