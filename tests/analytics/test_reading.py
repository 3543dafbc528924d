"""Recordings that cannot be read, or only in part: one sentence with cause and cure."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError
from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.reading import SCHEMAS, Recording
from dynamoth_analytics.report import Report
from dynamoth_analytics.session import check_java
from dynamoth_cli.main import main
from tests.analytics.planted import BEGIN, write


@pytest.fixture
def small(spark: SparkSession, tmp_path: Path) -> Path:
    """A recording of one report in each of three hours."""
    at = F.timestamp_seconds(F.col("id") * 3600 + BEGIN.timestamp() + 600)
    rows = spark.range(3).select(at.alias("at"), F.lit("s1").alias("server"), F.col("id").alias("sequence"))
    write(rows, tmp_path / "small", "servers")
    return tmp_path / "small"


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*/*.parquet"))


def test_only_the_hours_that_were_asked_for_are_read(spark: SparkSession, small: Path) -> None:
    files_of(small)[2].write_bytes(b"broken")
    part = Recording(spark, str(small), BEGIN + timedelta(hours=1), BEGIN + timedelta(hours=2))
    assert [row["sequence"] for row in part.table("servers").collect()] == [1]


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


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 truncated", b"no Parquet"])
def test_a_broken_file_is_named(spark: SparkSession, small: Path, content: bytes) -> None:
    broken = files_of(small)[1]
    broken.write_bytes(content)
    with pytest.raises(BadRecording, match=f"truncated, or no Parquet files: {broken}: move"):
        Recording(spark, str(small)).table("servers")


def test_a_damaged_footer_is_named(spark: SparkSession, small: Path) -> None:
    broken = files_of(small)[1]
    content = broken.read_bytes()
    broken.write_bytes(content[:-40] + b"\xff" * 32 + content[-8:])
    with pytest.raises(BadRecording, match=f"{broken.name} cannot be read"):
        Recording(spark, str(small)).table("servers").collect()


def test_nothing_in_the_time_asked_for(spark: SparkSession, small: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="no report of a server in this time: choose other times"):
        Report(Recording(spark, str(small), BEGIN + timedelta(days=1)), tmp_path).write()


def test_wrong_use_is_refused_before_spark_starts(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty := small.parent / "empty").mkdir()
    out = ["--out", str(small.parent / "out")]
    wrong = {
        (str(small), "--out", str(small)): (2, "is not empty: give a new folder"),
        (str(small.parent / "none"), *out): (2, "there is no folder"),
        (str(empty), *out): (1, "has no recording"),
        (str(small), *out, "--from", "noon"): (2, "'noon' is no time"),
        (str(small), *out, "--from", "2026-11-24", "--to", "2026-11-23"): (2, "is not before"),
        (str(small), *out, "--remote", "http://x"): (2, "a URL sc://host:port expected"),
    }
    for arguments, (code, text) in wrong.items():
        assert main(["report", *arguments]) == code, arguments
        error = capsys.readouterr().err
        assert text in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("url", ["--master=spark", "--remote=sc"])
def test_a_cluster_that_is_not_there(small: Path, free_port: int, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(small), "--out", str(small.parent / "out"), f"{url}://127.0.0.1:{free_port}"]) == 1
    assert "Spark cannot be reached" in capsys.readouterr().err


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
