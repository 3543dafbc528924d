"""The source: ranges over Redis and the archive, streams that start again, and its errors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from dynamoth.data.records import partition_keys, partition_name
from dynamoth_analytics.cluster.archive import Archiver
from dynamoth_analytics.cluster.reading import RecordsLost
from dynamoth_analytics.cluster.source import DynamothSource
from tests.data_cluster.world import World, reports


def ids(driver: SparkSession, world: World, **options: str) -> list[str]:
    reader = driver.read.format("dynamoth").option("logs", world.logs).option("dataset", "reports")
    return sorted(row["id"] for row in reader.options(**options).load().collect())


def collect_stream(driver: SparkSession, world: World, checkpoint: Path, into: Path) -> list[str]:
    """Read what is new, to the end; return all that was ever read."""
    frame = driver.readStream.format("dynamoth").option("logs", world.logs).option("dataset", "reports").load()
    writer = frame.select("id").writeStream.format("json").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(processingTime="0 seconds").start(str(into))
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    return sorted(row["id"] for row in driver.read.schema("id string").json(str(into)).collect())


def test_a_range_spans_the_archive_and_redis_in_two_partitions(
    driver: SparkSession, world: World, tmp_path: Path
) -> None:
    dataset = world.set_dataset()
    world.append(dataset, *reports("a", *"123456"))
    middle = world.servers.tips({"reports": 2})
    Archiver(world.servers, tmp_path, hot_records=1).archive(world.servers.catalog())
    world.append(dataset, *reports("a", *"78"))
    frame = driver.read.format("dynamoth").option("logs", world.logs).option("dataset", "reports")
    assert frame.option("archive", str(tmp_path)).load().rdd.getNumPartitions() == 2
    assert ids(driver, world, archive=str(tmp_path)) == list("12345678")
    assert ids(driver, world, start=json.dumps({"offsets": middle})) == list("78")
    with pytest.raises(PySparkException, match="no longer at Redis"):
        ids(driver, world)
    assert ids(driver, world, fail_on_loss="false") == list("5678")


def test_a_stream_that_starts_again_reads_each_record_once(driver: SparkSession, world: World, tmp_path: Path) -> None:
    dataset = world.set_dataset()
    checkpoint, into = tmp_path / "checkpoint", tmp_path / "rows"
    world.append(dataset, *reports("a", *"123"))
    assert collect_stream(driver, world, checkpoint, into) == list("123")
    for number in range(2):  # a doubtful restart: the server's process is another one, and offsets go on far above
        name = partition_name("reports", number)
        world.servers.run(world.servers.server_of(name), (b"HSET", partition_keys(name)[0], b"run", b"another"))
    world.append(dataset, *reports("a", *"456"))
    assert collect_stream(driver, world, checkpoint, into) == list("123456")


def test_a_dataset_that_is_unknown_is_an_error(driver: SparkSession, world: World) -> None:
    with pytest.raises(PySparkException, match="there is no dataset 'reports'"):
        ids(driver, world)


def test_a_start_above_the_end_is_an_error(world: World) -> None:
    dataset = world.set_dataset()
    world.append(dataset, *reports("a", "1", "2"))
    source = DynamothSource({"logs": world.logs, "dataset": "reports"})
    reader = source.streamReader(source.schema())
    start = {"tick_ms": 0, "sealed_ms": 0, "offsets": {"reports/0": 2**52, "reports/1": 0}, "static": {}}
    with pytest.raises(RecordsLost, match="its log server has lost records"):
        reader.latestOffset(start, ReadAllAvailable())
