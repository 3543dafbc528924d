"""One Spark session for all tests of jobs, and the reports of the planted recording."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dynamoth_analytics.reading import Recording
from dynamoth_analytics.report import Report
from dynamoth_analytics.session import LOCAL_OPTIONS, LOG_FILE, SESSION_OPTIONS
from tests.analytics.planted import plant


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").appName("tests")
    options = {
        **LOCAL_OPTIONS,
        **SESSION_OPTIONS,
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOG_FILE.as_uri()}",
    }
    for key, value in options.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def planted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with planted facts."""
    folder = tmp_path_factory.mktemp("planted")
    plant(spark, folder)
    return folder


@pytest.fixture(scope="session")
def report(spark: SparkSession, planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of that recording."""
    out = tmp_path_factory.mktemp("report")
    Report(Recording(spark, str(planted)), out).write()
    return out
