"""Recordings that cannot be read, or only in part: one sentence with cause and cure."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from contextlib import closing
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs] it has none
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError
from dynamoth_analytics.errors import BadRecording, translated
from dynamoth_analytics.files import arrow, check_recording, parquet, without_merging
from dynamoth_analytics.output import deleted_after_failure, new_folder
from dynamoth_analytics.reading import SCHEMAS, Recording, clocks_ahead
from dynamoth_analytics.report import Report
from dynamoth_analytics.session import check_java
from dynamoth_cli.main import main
from dynamoth_recorder.events import Rows
from dynamoth_recorder.process.backlog import Backlog, Portion
from dynamoth_recorder.process.store import Store
from dynamoth_recorder.process.tables import to_batch
from tests.analytics.loads import replace_column
from tests.analytics.planted import BEGIN

A, B = "a" * 16, "b" * 16


def record(folder: Path, *tables: Rows, hour: int = 0, second: float = 0, recorder: str = A) -> None:
    """Write a file per table, as a recorder does."""
    store, backlog = Store(folder, f"{len(list(folder.rglob('*.parquet'))):016x}"), Backlog()
    at_us = int((BEGIN + timedelta(hours=hour, minutes=10, seconds=second)).timestamp() * 1e6)
    for rows in tables:
        backlog.add(rows.table, at_us, to_batch(rows, at_us, recorder))
    for portion in backlog.take():
        store.write(portion)
    store.close()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A recording of one report in each of three hours."""
    folder = tmp_path / "small"
    for hour in range(3):
        report = {"server": "s1", "incarnation": 1, "sequence": hour, "interval_s": 1.0}
        record(folder, Rows("servers", 1, report), hour=hour)
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*/*.parquet"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Return the exit code of a report, and its one line."""
    code = main(["report", *map(str, arguments)])
    (line,) = capsys.readouterr().err.splitlines()
    return code, line


# With Spark.


def test_only_the_hours_that_were_asked_for_are_read(spark: SparkSession, small: Path) -> None:
    files_of(small)[2].write_bytes(b"broken")
    part = Recording(spark, str(small), BEGIN + timedelta(hours=1), BEGIN + timedelta(hours=2))
    assert [row["sequence"] for row in part.table("servers").collect()] == [1]


def test_recorders_do_not_merge_what_is_being_read(small: Path) -> None:
    record(small, Rows("servers", 1, {"server": "s1"}))
    with closing(Store(small, B)) as store:
        with without_merging(str(small)):
            store.upkeep(BEGIN + timedelta(hours=9))
            assert len(files_of(small)) == 4
        store.upkeep(BEGIN + timedelta(hours=9))
        assert len(files_of(small)) == 3
    with without_merging("hdfs://elsewhere"), without_merging(str(small / "none")):
        pass  # where there is nothing to lock


def test_a_recording_behind_a_url_may_lack_tables(spark: SparkSession, small: Path) -> None:
    part = Recording(spark, small.as_uri(), BEGIN + timedelta(hours=1), BEGIN + timedelta(hours=2))
    assert [row["sequence"] for row in part.table("servers").collect()] == [1]
    assert part.table("gaps").count() == 0 and part.table("gaps").columns == SCHEMAS["gaps"].names
    with pytest.raises(BadRecording, match="Spark does not find the recording"):
        Recording(spark, (small / "servers").as_uri()).table("servers")


def test_columns_of_other_versions(spark: SparkSession, small: Path) -> None:
    """An older version lacks a column, which is named; a newer one has one more, which is kept."""
    newer = (
        spark.read.parquet(str(small / "servers")).drop("date", "hour", "cpu_ratio").withColumn("colour", F.lit("red"))
    )
    folder = small.parent / "newer"
    newer.write.parquet(str(folder / "servers" / "date=2026-11-23" / "hour=10"))
    recording = Recording(spark, str(folder))
    rows = recording.table("servers")
    assert rows.columns == [*SCHEMAS["servers"].names, "colour"]
    assert {row["colour"] for row in rows.collect()} == {"red"}
    assert recording.missing["servers"] == ["cpu_ratio"]


def test_numbers_that_are_none_are_unknown(spark: SparkSession, small: Path) -> None:
    numbers = {"cpu_ratio": math.nan, "outgoing_bytes_per_s": math.inf, "incoming_bytes_per_s": -math.inf}
    file = files_of(small)[0]
    for name, number in numbers.items():
        replace_column(file, name, number)
    whole = parquet.read_table(file)
    parquet.write_table(whole.append_column("a`b", whole.column("server")), file)
    row = Recording(spark, str(small)).table("servers").orderBy("at").collect()[0]
    assert [row[name] for name in numbers] == [None, None, None]
    assert (row["interval_s"], row["a`b"]) == (1.0, "s1")


def test_rows_that_are_there_twice_count_once(spark: SparkSession, tmp_path: Path) -> None:
    """After a crash while files were merged, some reports are in two files, or in one file twice."""

    def channels(sequence: int) -> tuple[Rows, Rows]:
        head: dict[str, Any] = {"server": "s1", "incarnation": 1, "sequence": sequence, "interval_s": 1.0}
        named: dict[str, list[Any]] = {"channel": ["a", "b", "c"], "bytes_out": [1, 2, 3]}
        return Rows("channels", 3, {**head, "channels": 1}, named), Rows("channels", 1, {**head, "channels": 9})

    first, second, third, fourth = map(channels, range(4))
    record(tmp_path, *first, *second)
    record(tmp_path, *second)
    record(tmp_path, *third, *fourth, *third)
    rows = Recording(spark, str(tmp_path)).table("channels", ["bytes_out"]).collect()
    named = [("a", 1), ("b", 2), ("c", 3), (None, None)]
    expected = {(sequence, name, size) for sequence in range(4) for name, size in named}
    assert len(rows) == len(expected)
    assert {(row["sequence"], row["channel"], row["bytes_out"]) for row in rows} == expected


@pytest.mark.parametrize("second", [A, B])
def test_copies_that_were_merged_count_once(spark: SparkSession, tmp_path: Path, second: str) -> None:
    """One after the other in one file, and without a row for all other channels, which would show the copy.

    Of two recorders, or of one: after a crash while its files were merged.
    """
    head = {"server": "s1", "incarnation": 1, "sequence": 1, "interval_s": 1.0, "channels": 1}
    rows = Rows("channels", 2, head, {"channel": ["a", "b"], "bytes_out": [1, 2]})
    store = Store(tmp_path, A)
    portions: list[Portion] = []
    for recorder in (A, second):
        backlog = Backlog()
        backlog.add("channels", 0, to_batch(rows, 0, recorder))
        portions += backlog.take()
    store.write(Portion("channels", portions[0].hour, tuple(batch for each in portions for batch in each.batches)))
    store.close()
    assert Recording(spark, str(tmp_path)).table("channels", ["bytes_out"]).count() == 2


def test_recorders_whose_clocks_differ_give_one_time(spark: SparkSession, tmp_path: Path) -> None:
    """The second one is three minutes ahead. It begins before the first one ends."""

    def report(sequence: int) -> Rows:
        return Rows("servers", 1, {"server": "s1", "incarnation": 1, "sequence": sequence, "interval_s": 1.0})

    for sequence in range(6):
        record(tmp_path, report(sequence), second=sequence)
    for sequence in range(4, 10):
        record(tmp_path, report(sequence), second=sequence + 180.03, recorder=B)
    recording = Recording(spark, str(tmp_path))
    rows = recording.table("servers").orderBy("sequence").collect()
    times = [round((row["at"] - rows[0]["at"]).total_seconds()) for row in rows]
    assert times == [*range(10)]
    assert recording.clocks_differ_s == pytest.approx(180.03)
    # The part that only the second one has heard: by the same clock, of which its reports alone say nothing.
    part = recording.part(rows[6]["at"].astimezone(UTC), None)
    assert sorted(row["sequence"] for row in part.table("servers").collect()) == [6, 7, 8, 9]
    assert part.until_end("servers").count() == 10


def test_clocks_are_known_of_recorders_that_have_heard_the_same() -> None:
    pairs = [("b", "c", 0.02, 900), ("a", "b", -60.0, 100), ("d", "e", 5.0, 50), ("c", "f", -3.0, 1)]
    assert clocks_ahead(pairs) == {"a": 60.0, "e": 5.0, "f": pytest.approx(-2.98)}
    assert clocks_ahead([]) == {}


def test_a_file_with_damaged_data_is_named(spark: SparkSession, small: Path) -> None:
    broken = files_of(small)[1]
    content = broken.read_bytes()
    broken.write_bytes(content[:4] + b"\xff" * 32 + content[36:])
    with pytest.raises(BadRecording, match=f"{broken.name} cannot be read"):
        Recording(spark, str(small)).table("servers").collect()


def test_nothing_in_the_time_asked_for(spark: SparkSession, small: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BadRecording, match=r"no report of a server in this time: choose times between 2026-11-23 1.*\(UTC\)"
    ):
        Report(Recording(spark, str(small), BEGIN + timedelta(days=1)), tmp_path).write()


# Without: these are seen before Spark starts.


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 truncated", b"no Parquet", b"PAR1" * 40])
def test_a_broken_file_is_named(small: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    broken = files_of(small)[1]
    broken.write_bytes(content)
    code, line = refused(capsys, small, "--out", small.parent / "out")
    assert code == 1
    assert f"cannot read {broken} (truncated, or not a Parquet file): move" in line


def test_files_with_a_column_of_another_type_are_named(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = files_of(small)[1:]
    for file in odd:
        replace_column(file, "sequence", "one")
    code, line = refused(capsys, small, "--out", small.parent / "out")
    assert code == 1
    assert "cannot read " + ", ".join(f"{file} (its column sequence is string, not whole)" for file in odd) in line


def test_tables_that_spark_could_not_read_are_named(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times as pandas writes them, and columns whose names differ for all but Spark."""
    file = files_of(small)[0]
    whole = parquet.read_table(file)
    index = whole.schema.get_field_index("at")
    times = whole.column("at").cast(arrow.timestamp("ns", "UTC"))
    parquet.write_table(whole.set_column(index, "at", times), file, version="2.6")
    assert "its column at has nanoseconds, which Spark does not read: write microseconds" in refused(capsys, small)[1]
    parquet.write_table(whole, file, use_deprecated_int96_timestamps=True)
    check_recording(str(small), None, None)  # as Spark writes it
    parquet.write_table(whole.append_column("AT", whole.column("at")), file)
    assert "the names of two columns differ in case only" in refused(capsys, small)[1]


def test_names_that_spark_takes_for_patterns_are_refused(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = small.rename(small.with_name("s[1]"))
    assert refused(capsys, odd)[1] == (
        f"dynamoth: configuration: {odd} has [ in its name, which Spark takes for a pattern: rename the folder"
    )
    small = odd.rename(odd.with_name("small"))
    assert refused(capsys, small, "--out", small.with_name("o*"))[0] == 2


def test_what_names_have_of_control_characters_is_shown_and_not_obeyed(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files_of(small)[1].with_name("\x1b[31mred\x07.parquet").write_bytes(b"broken")
    assert "\\x1b[31mred\\x07.parquet" in refused(capsys, small)[1]


def test_wrong_use_is_refused(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty := small.parent / "empty").mkdir()
    out = ["--out", str(small.parent / "out")]
    wrong = {
        (str(small), "--out", str(small)): (2, "is not empty: give a new folder"),
        (str(small.parent / "none"), *out): (2, "there is no folder"),
        (str(empty), *out): (1, "has no recording"),
        (str(files_of(small)[0]), *out): (2, "is a file: give the folder"),
        (str(small), *out, "--from", "noon"): (2, "'noon' is not a time"),
        (str(small), *out, "--to", "9999-12-31T23:59-05:00"): (2, "is not a time"),
        (str(small), *out, "--from", "0001-01-01"): (2, "a year from 1971 to 9998"),
        (str(small), *out, "--master", "foo"): (2, "'foo' is not a Spark master URL"),
        (str(small), *out, "--master", ""): (2, "'' is not a Spark master URL"),
        (str(small), *out, "--from", "2026-11-24", "--to", "2026-11-23"): (2, "is not before"),
        (str(small), *out, "--remote", "http://x"): (2, "a URL sc://host:port expected"),
    }
    for arguments, (code, text) in wrong.items():
        found, line = refused(capsys, *arguments)
        assert found == code and text in line, arguments


def test_a_folder_that_is_no_hour_is_named(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (odd := small / "servers" / "date=2026-11-23" / "hour=99").mkdir()
    assert refused(capsys, small) == (1, f"dynamoth: {odd} is not an hour folder of a recording: move it elsewhere")


def test_a_folder_with_the_name_of_a_file_is_named(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (odd := files_of(small)[1].with_name("x.parquet")).mkdir()
    code, line = refused(capsys, small)
    assert code == 1 and f"cannot read {odd} (no regular file)" in line
    (other := small / "plans" / "date=2026-11-23" / "hour=10" / "y.parquet").parent.mkdir(parents=True)
    other.write_bytes(b"broken")
    _, both = refused(capsys, small)
    assert f"{odd} (no regular file), {other} (truncated, or not a Parquet file): move" in both, "of all tables at once"
    other.unlink()
    odd.rmdir()
    os.mkfifo(odd)
    assert refused(capsys, small) == (code, line), "nobody writes into it"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Spark failed: Py4JError: see --spark-log warn for more"),
        ("java.io.FileNotFoundException: x", "a file went away while it was read"),
        ("[CANNOT_MERGE_SCHEMAS] file:/x/a.parquet", "(file:/x/a.parquet): move the foreign files elsewhere"),
        ("[FAILED_READ_FILE] file:/x/a.parquet", "file:/x/a.parquet cannot be read: it is damaged"),
        ("[PATH_NOT_FOUND] x", "Spark does not find the recording"),
        ("No space left on device", "make room on the disks of --out and SPARK_LOCAL_DIRS"),
        ("Cannot call methods on a stopped SparkContext", "nobody answers as a Spark master"),
        ("Python worker: ModuleNotFoundError: x", "set PYSPARK_PYTHON"),
        ("Python worker\nBadRecording: a row: move it", "a row: move it"),
        ("line\nCaused by: it fell\nat java", "Spark failed: it fell: see"),
    ],
)
def test_errors_of_spark_become_one_sentence(text: str, said: str) -> None:
    line = str(translated(Py4JError(text)))
    assert said in line and "\n" not in line


def test_a_run_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    out = new_folder(str(tmp_path / "out"), "report")
    with pytest.raises(BadRecording), deleted_after_failure(out):
        (out / "load").mkdir()
        raise BadRecording("a damaged file")
    assert not out.exists()
    with deleted_after_failure(new_folder(str(out), "report")):
        (out / "load").mkdir()
    assert (out / "load").exists()


@pytest.mark.parametrize("url", ["--master=spark", "--remote=sc"])
def test_a_cluster_that_is_not_there(small: Path, free_port: int, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(capsys, small, "--out", small.parent / "out", f"{url}://127.0.0.1:{free_port}")
    assert code == 1
    assert "Spark cannot be reached" in line


def test_without_java_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigError, match="openjdk-17-jre-headless"):
        check_java()
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    os.chmod(old, 0o755)
    with pytest.raises(ConfigError, match="is version 11, and Spark needs 17"):
        check_java()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_at_once_and_with_one_line(number: signal.Signals) -> None:
    code = (
        "import os, time; from dynamoth_analytics.output import end_at_signals; end_at_signals(130, 'interrupted')\n"
        f"try: os.kill(os.getpid(), {int(number)}); time.sleep(60)\n"
        "finally: print('Python would clean up, and ask Java to')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "dynamoth: interrupted\n")
