"""The sink: rows to channels, live and logged."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, IntegerType, LongType, StringType, StructType

from dynamoth.edge.interests import channel_interest
from dynamoth.edge.log import log_keys
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster.sink import BatchWriter, SinkFailed
from tests.data_cluster.world import World


def log(world: World, channel: str) -> list[bytes]:
    interest = channel_interest(channel).id
    entries = world.servers.run(world.server_of(interest), (b"XRANGE", log_keys(interest)[1], b"-", b"+"))
    return [fields[1] for _, fields in entries]


def run(frame: DataFrame, world: World, checkpoint: Path, mode: str = "append", **options: Any) -> None:
    writer = frame.writeStream.format("dynamoth").option("url", world.cluster_url).option("logs", world.logs)
    writer = writer.outputMode(mode)
    query = writer.options(**options).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def _schema() -> StructType:
    return StructType().add("channel", StringType()).add("payload", StringType())


def stream(driver: SparkSession, folder: Path) -> DataFrame:
    return driver.readStream.schema("channel string, payload string, n int").json(str(folder))


def put(folder: Path, name: str, *lines: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(lines))


@pytest.mark.parametrize("option", ["retained", "ttl_s", "term"])
def test_an_option_that_is_no_number_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="retained, ttl_s and term are numbers"):
        BatchWriter({"url": "dynamoth://127.0.0.1:6379", option: "many"}, _schema())


@pytest.mark.parametrize(
    ("option", "cure"), [("log", "did you mean logs"), ("TTL", "did you mean ttl_s"), ("zzzz", "known are url, logs,")]
)
def test_an_unknown_option_is_refused(option: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=f"the sink has no option '{option}': {cure}"):
        BatchWriter({"url": "dynamoth://127.0.0.1:6379", option: "x"}, _schema())


def test_an_unknown_option_of_a_stream_is_refused(driver: SparkSession, world: World, tmp_path: Path) -> None:
    put(tmp_path / "in", "1.json", '{"channel":"a","payload":"1"}')
    with pytest.raises(PySparkException, match="the sink has no option 'orderedby': did you mean ordered_by"):
        run(stream(driver, tmp_path / "in"), world, tmp_path / "one", orderedBy="n")
    run(stream(driver, tmp_path / "in"), world, tmp_path / "two", queryName="named", Durable="False")
    assert log(world, "a") == [b"1"]


@pytest.mark.parametrize(
    ("channel", "cause"),
    [
        ("q:abc", "'q:abc' is a reserved name: no user gets"),
        (b"__dynamoth__:client:announce", "is a reserved name"),
        ("__keyspace@0__:a", "is a reserved name"),
        ("", "`channel` of a row is not the name of a channel: a name expected, not ''"),
        (b"\xff", "`channel` of a row is not the name of a channel"),
        (None, "column `channel` of a row is null"),
    ],
)
def test_rows_of_channels_that_no_user_may_have_are_refused(world: World, channel: Any, cause: str) -> None:
    for options in ({}, {"logs": world.logs}):
        writer = BatchWriter({"url": world.cluster_url, **options}, _schema())
        with pytest.raises(SinkFailed, match=cause):
            writer.write(iter([Row(channel=channel, payload="1")]))


def test_records_of_a_dataset_are_published_but_have_no_log(world: World) -> None:
    rows = [Row(channel="d:reports", payload="{}")]
    BatchWriter({"url": world.cluster_url}, _schema()).write(iter(rows))
    with pytest.raises(SinkFailed, match="'d:reports' is a reserved name"):
        BatchWriter({"url": world.cluster_url, "logs": world.logs}, _schema()).write(iter(rows))


@pytest.mark.parametrize(
    ("column", "type_", "cause"),
    [
        ("payload", LongType(), r"not bigint: make it one with CAST\(payload AS string\)"),
        ("payload", StructType().add("n", IntegerType()), r"not struct<n:int>: .* with to_json\(payload\)"),
        ("channel", LongType(), "not bigint"),
    ],
)
def test_columns_of_other_types_are_refused(column: str, type_: DataType, cause: str) -> None:
    schema = StructType()
    for name in ("channel", "payload"):
        schema.add(name, type_ if name == column else StringType())
    with pytest.raises(ConfigError, match=f"column '{column}' has to be a string or binary, {cause}"):
        BatchWriter({"url": "dynamoth://127.0.0.1:6379"}, schema)


@pytest.mark.parametrize("column", ["payload", "n"])
def test_a_row_with_null_is_refused(world: World, column: str) -> None:
    writer = BatchWriter({"url": world.cluster_url, "ordered_by": "n"}, _schema().add("n", LongType()))
    values = {"channel": "a", "payload": "1", "n": 1, column: None}
    with pytest.raises(SinkFailed, match=f"column `{column}` of a row is null"):
        writer.write(iter([Row(**values)]))


def test_a_batch_is_published_on_live_channels(driver: SparkSession, world: World) -> None:
    client: Any = redis.Redis(port=world.redis[2].port)
    with client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("news")
        listener.get_message(timeout=10)  # the confirmation
        frame = driver.createDataFrame([("news", b"\xff1"), ("news", b"2")], "channel string, payload binary")
        frame.coalesce(1).write.format("dynamoth").option("url", world.cluster_url).mode("append").save()
        got = [message for _ in range(4) if (message := listener.get_message(timeout=5))][:2]
    assert len(got) == 2
    assert got[0]["data"].endswith(b"\xff1")


def test_an_aggregate_is_published_in_complete_mode(driver: SparkSession, world: World, tmp_path: Path) -> None:
    source = tmp_path / "in"
    put(source, "1.json", '{"channel":"a","n":1}', '{"channel":"a","n":2}', '{"channel":"b","n":3}')
    counts = stream(driver, source).groupBy("channel").count()
    rows = counts.select("channel", F.to_json(F.struct("count")).alias("payload"))
    writer = rows.writeStream.format("dynamoth").outputMode("complete").option("url", world.cluster_url)
    query = writer.option("logs", world.logs).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert [len(log(world, channel)) for channel in ("a", "b")] == [1, 1]
    assert b'{"count":2}' in log(world, "a")[0]


def test_a_repeated_batch_is_appended_once(driver: SparkSession, world: World, tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    put(source, "1.json", '{"channel":"a","payload":"1"}', '{"channel":"b","payload":"1"}')
    run(stream(driver, source), world, checkpoint)
    put(source, "2.json", '{"channel":"a","payload":"2"}')
    run(stream(driver, source), world, checkpoint)
    for file in (checkpoint / "commits").glob("*1*"):  # as if Spark had died before it wrote down batch 1
        file.unlink()
    run(stream(driver, source), world, checkpoint)
    assert log(world, "a") == [b"1", b"2"]
    assert log(world, "b") == [b"1"]


def test_a_new_checkpoint_on_channels_that_have_later_batches_is_an_error(
    driver: SparkSession, world: World, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    for number in ("1", "2"):
        put(source, f"{number}.json", f'{{"channel":"a","payload":"{number}"}}')
        run(stream(driver, source), world, tmp_path / "one")
    put(source, "3.json", '{"channel":"a","payload":"3"}')
    with pytest.raises(PySparkException, match=r"channel 'a' has a later batch than 0 already.*a new or an older one"):
        run(
            stream(driver, source).groupBy("channel").agg(F.max("payload").alias("payload")),
            world,
            tmp_path / "two",
            "complete",
        )
    assert log(world, "a") == [b"1", b"2"]


def test_several_rows_of_a_channel_are_an_error_or_ordered(driver: SparkSession, world: World, tmp_path: Path) -> None:
    source = tmp_path / "in"
    lines = [f'{{"channel":"a","payload":"{n}","n":{n}}}' for n in (2, 3, 1)]
    put(source, "1.json", *lines)
    with pytest.raises(PySparkException, match="several rows in one batch"):
        run(stream(driver, source).coalesce(1), world, tmp_path / "one")
    assert log(world, "a") == []
    run(stream(driver, source).coalesce(1), world, tmp_path / "two", ordered_by="n")
    assert log(world, "a") == [b"1", b"2", b"3"]


def test_rows_without_a_payload_column_are_refused(driver: SparkSession, world: World) -> None:
    frame = driver.range(1).select(F.lit("a").alias("channel"))
    with pytest.raises(PySparkException, match="need a column 'payload'"):
        frame.write.format("dynamoth").option("url", world.cluster_url).mode("append").save()
