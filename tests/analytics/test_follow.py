"""A report that follows a recording, while it is killed, and while recorders write everything twice and merge files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.testing import assertDataFrameEqual  # pyright: ignore[reportUnknownVariableType] it names types of pandas

from dynamoth_analytics.follow import PAGE, REPORT_COLUMNS, SLOT_S, Follower, follow_folder
from dynamoth_analytics.jobs.channels import COLUMNS, channel_slots
from dynamoth_analytics.reading import Recording
from dynamoth_analytics.replay.recorded import RecordedReport
from dynamoth_cli.main import main
from dynamoth_recorder.process.backlog import Backlog
from dynamoth_recorder.process.store import Store
from dynamoth_recorder.process.tables import to_batch
from dynamoth_recorder.rows import rows_of_report
from tests.analytics.loads import BEGIN, SERVERS, load, rising
from tests.processes import command_lines

SECONDS = 240
HOT_FROM = 150
TIMEOUT_S = 120.0
DAYS_2_S = 172_800
LATER = datetime.fromtimestamp(BEGIN, UTC) + timedelta(hours=2)


@contextmanager
def recorders(folder: Path) -> Generator[tuple[Store, Store]]:
    with closing(Store(folder, "a" * 16)) as first, closing(Store(folder, "b" * 16)) as second:
        yield first, second


def record(stores: Iterable[Store], reports: Iterable[RecordedReport]) -> None:
    """Write reports as recorders do: in files of some seconds, the second recorder 30 ms later."""
    for late_us, store in enumerate(stores):
        backlog = Backlog()
        for number, (at, report) in enumerate(reports):
            at_us = int(at * 1e6) + late_us * 30_000
            for rows in rows_of_report(report):
                backlog.add(rows.table, at_us, to_batch(rows, at_us, store.recorder))
            if number % 60 == 59:
                write(store, backlog)
        write(store, backlog)


def write(store: Store, backlog: Backlog) -> None:
    for portion in backlog.take():
        store.write(portion)


def follow(spark: SparkSession, recording: Path, out: Path) -> None:
    """Read all files that are there now, then stop."""
    follower = Follower(spark, str(recording), out, lambda line: None)
    follower.wait(follower.start(availableNow=True))


def killed_while_it_follows(recording: Path, out: Path) -> None:
    command = [sys.executable, "-m", "dynamoth_analytics.report", str(recording), "--follow", "--master=local[2]"]
    with subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: (out / "batches" / "0").is_dir() or process.poll() is not None)
        assert process.poll() is None
        children = command_lines("--ppid", str(process.pid))
        process.kill()
    until(lambda: not any(map(is_alive, children)))


def is_alive(pid: int) -> bool:
    return bool(command_lines("-p", str(pid)))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def table(spark: SparkSession, out: Path, job: str) -> DataFrame:
    """Return a table; times in whole seconds."""
    return in_seconds(spark.read.parquet(str(out / "current" / job)))


def in_seconds(rows: DataFrame) -> DataFrame:
    """Return rows with whole seconds, as it does not matter which recorder's copy is kept."""
    times = {name: F.date_trunc("second", name) for name, kind in rows.dtypes if kind == "timestamp"}
    return rows.withColumns(times)


def test_a_run_that_was_killed_goes_on_and_each_row_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    recording, out = tmp_path / "recording", follow_folder(str(tmp_path / "out"), "x")
    (out / "recording.txt").write_text(str(recording))
    reports = load(SECONDS, rising({"s1": 8, "s2": 4, "s3": 4}, 20_000, 110_000, HOT_FROM)).reports
    half = len(reports) // 2
    with recorders(recording) as stores:
        record(
            stores[:1], [RecordedReport(time.time() + DAYS_2_S, replace(reports[0][1], sequence=10**6))]
        )  # its clock was wrong
        record(stores, reports[:half])
        killed_while_it_follows(recording, out)
        assert not (out / "current").exists()
        follow(spark, recording, out)
        record(stores, reports[half:])
        for store in stores:  # each merges its own files
            store.upkeep(LATER)
        assert len(list(recording.glob("channels/*/*/*.parquet"))) == 2 + 1
        follow(spark, recording, out)
    whole = Recording(spark, str(recording), end=LATER, compares_clocks=False)
    slots = channel_slots(whole.table("channels", COLUMNS), SLOT_S)
    for job, expected in (("reports", whole.table("servers").select(*REPORT_COLUMNS)), ("channel_slots", slots)):
        assertDataFrameEqual(table(spark, out, job), in_seconds(expected), rtol=1e-6, atol=1e-9)
    servers = {row["server"]: row for row in table(spark, out, "servers").collect()}
    assert {name: row["server_seconds"] for name, row in servers.items()} == dict.fromkeys(SERVERS, float(SECONDS))
    assert sum(row["messages_sent"] for row in table(spark, out, "channel_loads").collect()) == sum(
        sum(report.columns.messages_sent) for _, report in reports
    )
    (overload,) = table(spark, out, "overloads").collect()
    assert (overload["server"], overload["begin"].timestamp()) == ("s1", BEGIN + HOT_FROM)
    odd = {(row["subject"], row["at"].timestamp()) for row in table(spark, out, "anomalies").collect()}
    assert ("s1", BEGIN + HOT_FROM) in odd
    page = (out / PAGE).read_text()
    assert "<li>s1 was overloaded" in page and not list(out.glob(".*.html"))
    assert sorted(each.name for each in (out / "batches").iterdir()) == [
        *sorted(str(number) for number in range(last_batch(out) - 1, last_batch(out) + 1))
    ]


def last_batch(out: Path) -> int:
    return int(os.readlink(out / "current").rpartition("/")[2])


def test_what_cannot_be_followed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recording" / "servers").mkdir(parents=True)
    out = follow_folder(str(tmp_path / "out"), "/another")
    assert follow_folder(str(out), "/another") == out
    for more, text in (
        (["--to", "2026-11-23"], "does not go together with --to"),
        (["--remote", "sc://x"], "does not go together with --remote"),
        ([], "follows another recording, /another"),
    ):
        assert main(["report", str(tmp_path / "recording"), "--follow", "--out", str(out), *more]) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1
