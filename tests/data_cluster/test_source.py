"""The source: ranges over Redis and the archive, streams that start again, and its errors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StringType, StructType

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import partition_keys, partition_name
from dynamoth.edge.log import SERVERS_KEY
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster.identity import check_identity
from dynamoth_analytics.cluster.sink import BatchWriter
from dynamoth_analytics.cluster.source import DynamothSource
from dynamoth_analytics.cluster.storage.archive import Archiver
from dynamoth_analytics.cluster.storage.loads import LOADS_KEPT, LoadCopies, read_copy
from dynamoth_analytics.cluster.storage.reading import RecordsLost, read_range
from tests.data_cluster.world import STATIC, World, reports

SINK_SCHEMA = StructType().add("channel", StringType()).add("payload", StringType())


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


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"failonloss": "false"}, "the source has no option 'failonloss': did you mean fail_on_loss"),
        ({"Archives": "/"}, "the source has no option 'Archives': did you mean archive"),
        ({"path": "/x"}, "the source has no option 'path'"),
        ({"archive": "/no/such/folder"}, "there is no folder '/no/such/folder': it is `archive` below"),
        ({"fail_on_loss": "no"}, "fail_on_loss is true or false, not 'no'"),
        ({"durable": "yes"}, "durable is true or false, not 'yes'"),
        ({"loaded": "last"}, "loaded is the number of a load, not 'last'"),
        ({"start": "17"}, 'start has offsets as {"offsets": {"reports/0": 17}}, not \'17\''),
        ({"end": '{"offsets": {"reports/0": "17"}}'}, "end has offsets as"),
        ({"dataset": ""}, "option `dataset` is missing"),
    ],
)
def test_options_that_are_wrong_are_refused(world: World, options: dict[str, str], cause: str) -> None:
    source = DynamothSource({"logs": world.logs, "dataset": world.set_dataset().name, **options})
    with pytest.raises(ConfigError, match=re.escape(cause)):
        source.reader(StructType())


def test_log_servers_with_other_ids_than_those_of_the_brokers_are_refused(world: World) -> None:
    world.set_dataset()
    world.servers.run("l2", (b"SET", SERVERS_KEY, b"l1 l2"))
    first, second = (url for _, url in world.servers.urls)
    wrong = f"a={first} b={second}"
    cause = "option logs: these are the log servers 'a b', and brokers have 'l1 l2', says log server b"
    with pytest.raises(ConfigError, match=cause):
        DynamothSource({"logs": wrong, "dataset": "reports"}).schema()
    with pytest.raises(ConfigError, match=cause):
        BatchWriter({"logs": wrong, "url": world.cluster_url}, SINK_SCHEMA)
    DynamothSource({"logs": world.logs, "dataset": "reports"}).schema()
    BatchWriter({"logs": world.logs, "url": world.cluster_url}, SINK_SCHEMA)


def test_log_servers_that_are_exchanged_are_refused(world: World, tmp_path: Path) -> None:
    world.set_dataset()
    check_identity(world.servers, tmp_path)
    first, second = (url for _, url in world.servers.urls)
    source = DynamothSource({"logs": f"l1={second} l2={first}", "dataset": "reports"})
    with pytest.raises(ConfigError, match="the log server that is called l1 is l2 for the data cluster"):
        source.schema()


def test_an_unknown_option_of_a_stream_is_refused(driver: SparkSession, world: World) -> None:
    world.set_dataset()
    reader = driver.readStream.format("dynamoth").option("logs", world.logs).option("dataset", "reports")
    with pytest.raises(PySparkException, match="the source has no option 'star': did you mean start"):
        reader.option("Star", "{}").load()


def test_a_start_above_the_end_is_an_error(world: World) -> None:
    dataset = world.set_dataset()
    world.append(dataset, *reports("a", "1", "2"))
    source = DynamothSource({"logs": world.logs, "dataset": "reports"})
    reader = source.streamReader(source.schema())
    start = {"offsets": {"reports/0": 2**52, "reports/1": 0}}
    with pytest.raises(RecordsLost, match="its log server has lost records"):
        reader.latestOffset(start, ReadAllAvailable())


def _lose_the_last(world: World, *names: str) -> None:
    """Have servers restart without the last record of each partition."""
    for name in names:
        server, (hash_, stream, _) = world.servers.server_of(name), partition_keys(name)
        kept = world.servers.run(server, (b"XRANGE", stream, b"-", b"+"))[:-1]
        again = [(b"XADD", stream, id_, *fields) for id_, fields in kept]
        last = kept[-1][0].partition(b"-")[0] if kept else b"0"
        note = (b"HSET", hash_, b"offset", last, b"run", b"another")
        world.servers.run_all(server, [(b"DEL", stream), *again, note])


def test_a_stream_stops_when_a_server_has_lost_what_it_has_read(world: World) -> None:
    dataset = world.set_dataset()
    world.append(dataset, *reports("a", *"1234"))

    def stream(**options: str) -> Any:
        source = DynamothSource({"logs": world.logs, "dataset": "reports", **options})
        return source.streamReader(source.schema())

    reader = stream()
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    _lose_the_last(world, "reports/0", "reports/1")
    for expected in ([], ["5"]):  # "5" is in one of the two partitions
        with pytest.raises(RecordsLost, match="which is no longer there"):
            reader.latestOffset(start, ReadAllAvailable())
        lenient = stream(fail_on_loss="false")
        end = lenient.latestOffset(start, ReadAllAvailable())
        found = [batch for part in lenient.partitions(start, end) for batch in lenient.read(part)]
        assert [id_ for batch in found for id_ in batch["id"].to_pylist()] == expected
        assert all(end["offsets"][name] >= offset for name, offset in start["offsets"].items()), "it never goes back"
        world.append(dataset, *reports("a", "5"))


def test_a_stream_from_what_is_retained_begins_with_the_oldest_file_that_is_left(
    driver: SparkSession, world: World, tmp_path: Path
) -> None:
    dataset = world.set_dataset()
    archive = tmp_path / "archive"
    archive.mkdir()
    assert ids(driver, world, **{"from": "retained"}) == []
    for records in ("12", "34", "56"):
        world.append(dataset, *reports("a", *records))
        assert ids(driver, world, archive=str(archive), **{"from": "retained"}) == list("123456")[: int(records[-1])]
        Archiver(world.servers, archive, hot_records=0).archive(world.servers.catalog())
    for number in range(2):
        min(archive.rglob(f"{number}-*.parquet")).unlink()
    with pytest.raises(PySparkException, match="no longer at Redis"):
        ids(driver, world, archive=str(archive))
    assert ids(driver, world, archive=str(archive), **{"from": "retained"}) == list("3456")
    source = DynamothSource({"logs": world.logs, "dataset": "reports", "archive": str(archive), "from": "retained"})
    reader = source.streamReader(source.schema())
    end = {"offsets": world.servers.tips({"reports": 2})}
    parts = reader.partitions(reader.initialOffset(), end)
    assert sum(len(batch) for part in parts for batch in reader.read(part)) == 4
    with pytest.raises(ConfigError, match="from is one of begin, retained, now"):
        DynamothSource({"logs": world.logs, "dataset": "reports", "from": "start"}).schema()


# Loads of static datasets.


def shelters(driver: SparkSession, world: World, **options: str) -> list[str]:
    reader = driver.read.format("dynamoth").option("logs", world.logs).option("dataset", "shelters")
    return sorted(row["id"] for row in reader.options(**options).load().collect())


def _expire(world: World, stream: str, *numbers: int) -> None:
    for number in numbers:
        name = partition_name(stream, number)
        world.servers.run(world.servers.server_of(name), (b"DEL", *partition_keys(name)))


def test_a_load_that_was_read_once_is_read_again_when_redis_has_it_no_more(
    driver: SparkSession, world: World, tmp_path: Path
) -> None:
    loads, rows = str(tmp_path / "static"), [{"id": each, "type": "a"} for each in "123"]
    world.load(world.set_dataset("shelters", **STATIC, loaded=1), *rows)
    assert shelters(driver, world, loads=loads) == list("123")
    world.load(world.set_dataset("shelters", **STATIC, loaded=2, version=2), *rows[:1])
    assert shelters(driver, world, loads=loads) == ["1"]
    assert shelters(driver, world) == ["1"]
    _expire(world, "shelters@1", 0, 1)
    _expire(world, "shelters@2", 0)  # the other partition is still there
    assert shelters(driver, world, loads=loads, loaded="1") == list("123")
    assert shelters(driver, world, loads=loads) == ["1"]
    for options in ({}, {"loaded": "1"}):
        with pytest.raises(PySparkException, match=f"load {options.get('loaded', 2)} of dataset shelters is no longer"):
            shelters(driver, world, **options)
    with pytest.raises(PySparkException, match="there is no copy"):
        shelters(driver, world, loads=str(tmp_path / "other"))
    assert not [*(tmp_path / "static" / "shelters").glob(".*")]


def test_a_load_without_records_is_none_that_is_lost(driver: SparkSession, world: World, tmp_path: Path) -> None:
    loads = str(tmp_path / "static")
    world.set_dataset("shelters", **STATIC)
    assert shelters(driver, world) == shelters(driver, world, loads=loads) == []
    world.load(world.set_dataset("shelters", **STATIC, loaded=1, version=2))
    for _ in range(2):
        assert shelters(driver, world, loads=loads) == []
        _expire(world, "shelters@1", 0, 1)


def test_copies_are_of_the_latest_loads_and_of_the_dataset_that_has_the_name_now(world: World, tmp_path: Path) -> None:
    copies = LoadCopies(world.servers, tmp_path)

    def ids_of(dataset: Dataset) -> list[str]:
        batches = [batch for path in copies.files(dataset) for batch in read_copy(path, dataset)]
        return sorted(id_ for batch in batches for id_ in batch["id"].to_pylist())

    dataset = world.set_dataset("shelters", **STATIC)
    assert ids_of(dataset) == []
    for number in range(1, 12):
        dataset = world.set_dataset("shelters", **STATIC, loaded=number, version=number)
        world.load(dataset, {"id": str(number), "type": "a"})
        assert ids_of(dataset) == [str(number)]
    kept = {path.name for path in (tmp_path / "shelters").iterdir()}
    assert kept == {str(number) for number in range(12 - LOADS_KEPT, 12)}
    _expire(world, dataset.stream, 0, 1)
    assert ids_of(dataset) == ["11"]
    world.load(dataset, {"id": "new", "type": "a"}, {"id": "newer", "type": "a"})
    assert ids_of(dataset) == ["new", "newer"]
    assert len([*(tmp_path / "shelters").iterdir()]) == LOADS_KEPT


def test_processes_that_copy_a_load_at_the_same_time_make_one_copy(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset("shelters", **STATIC, loaded=1)
    world.load(dataset, {"id": "1", "type": "a"})
    copies = LoadCopies(world.servers, tmp_path)

    def other_first(*arguments: Any) -> Any:
        monkeypatch.undo()
        assert len(copies.files(dataset)) == 2
        return read_range(*arguments)

    monkeypatch.setattr("dynamoth_analytics.cluster.storage.loads.read_range", other_first)
    assert len(copies.files(dataset)) == 2
    assert [path.name for path in (tmp_path / "shelters").iterdir()] == ["1"]
