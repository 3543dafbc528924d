"""One Spark session for all tests of jobs, and the report of the planted recording."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.classic.dataframe import DataFrame

from dynamoth_analytics.reading import Recording
from dynamoth_analytics.report import Report
from dynamoth_analytics.session import DRIVER_OPTIONS, LOCAL_OPTIONS, LOG_FILE, SESSION_OPTIONS
from tests.analytics.planted import plant, second_recording


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that need Spark first.

    The first process of several gets the first tests. Others take tests from the end of its list, so all of these run
    there, in one session.
    """
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # It logs the end of each connection, the last ones when another test's log is closed already.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    builder = SparkSession.builder.master("local[2]").appName("tests")
    options = {
        **DRIVER_OPTIONS,
        **LOCAL_OPTIONS,
        **SESSION_OPTIONS,
        "spark.driver.memory": "1g",
        # No job may collect a table: see test_the_driver_collects_only_what_is_drawn.
        "spark.driver.maxResultSize": "1m",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Tests run many jobs once, on little data: to compile them takes longer than to interpret them.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={LOG_FILE.as_uri()} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
        ),
    }
    session = builder.config(map={**options}).getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with planted facts."""
    folder = tmp_path_factory.mktemp("planted")
    plant(folder)
    return folder


@pytest.fixture(scope="session")
def doubled(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same events, as two recorders write them: in more files, in another order, and most of them twice."""
    folder = tmp_path_factory.mktemp("doubled")
    second_recording(planted, folder)
    return folder


@dataclass(frozen=True)
class Written:
    """A report, and how many rows the driver collected for it, time after time."""

    out: Path
    collected: list[int]


@pytest.fixture(scope="session")
def written(spark: SparkSession, doubled: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of that recording."""
    written = Written(tmp_path_factory.mktemp("report"), [])
    collect = DataFrame.collect

    def counted(rows: DataFrame) -> list[Row]:
        found = collect(rows)
        written.collected.append(len(found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataFrame, "collect", counted)
        Report(Recording(spark, str(doubled)), written.out).write()
    return written


@pytest.fixture(scope="session")
def report(written: Written) -> Path:
    """The folder of that report."""
    return written.out
