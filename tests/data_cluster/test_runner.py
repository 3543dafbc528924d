"""What a data cluster does about its catalog, on real Spark and Redis, without its process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Entry
from dynamoth.data.progress import progress_key, query_server, restart_key
from dynamoth.data.records import partition_keys
from dynamoth.data.terms import TERM_KEY
from dynamoth.edge.log import SERVERS_KEY
from dynamoth.errors import ConfigError, DynamothError
from dynamoth_analytics.cluster import outdated
from dynamoth_analytics.cluster.context import ClusterContext
from dynamoth_analytics.cluster.identity import IDENTITY_KEY, WrongFolder, check_identity
from dynamoth_analytics.cluster.metrics import collect
from dynamoth_analytics.cluster.runner import ClusterRunner
from dynamoth_analytics.cluster.servers import TakenOver, read_servers
from dynamoth_analytics.cluster.storage import archive
from dynamoth_analytics.cluster.storage.batches import write_file
from dynamoth_analytics.files import parquet
from tests.data_cluster.world import STATIC, World, reports, until

EXECUTIONS = "dynamoth_data_cluster_executions_total"


@contextmanager
def data_cluster(driver: SparkSession, world: World) -> Generator[ClusterRunner]:
    runner = ClusterRunner(driver, world.servers, world.cluster_url, world.folder, 3600.0)
    try:
        yield runner
    finally:
        runner.stop(10.0)


def test_what_runs_follows_the_catalog(driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, interest = world.set_dataset(), world.register("of_type", {"type": "fire"})
    world.set_query()
    world.set_query("lost", on="nowhere", sql="SELECT n.id FROM nowhere n WHERE n.type = :type")
    world.set_query("unknown", sql="SELECT no_function(r.id) AS id FROM reports r WHERE r.type = :type")
    with data_cluster(driver, world) as cluster:
        assert not cluster.has_begun
        cluster.follow_catalog()
        assert [*cluster.queries()] == ["of_type"]
        assert "nowhere" in cluster.refused["lost"]
        assert "no_function" in cluster.refused["unknown"]
        refused = world.status("lost")
        assert refused is not None
        assert (refused.state, refused.reason) == ("refused", cluster.refused["lost"])
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.ids(interest), *cluster.queries().values())
        first = cluster.queries()["of_type"]
        cluster.follow_catalog()
        assert cluster.queries()["of_type"] is first, "nothing has changed"
        world.set_query(version=2, sql="SELECT upper(r.id) AS id FROM reports r WHERE r.type = :type")
        cluster.follow_catalog()
        world.append(dataset, *reports("fire", "b"))
        until(lambda: len(world.log(interest)) == 2, *cluster.queries().values())
        assert [each["version"] for each in world.log(interest)] == [1, 2]
        assert world.ids(interest) == ["a", "B"]
        world.drop_query("of_type", 3)
        cluster.follow_catalog()
        assert cluster.queries() == {}
        assert len(world.log(interest)) == 2, "brokers may take users still"
        late = world.register("of_type", {"type": "quake"})
        monkeypatch.setattr(outdated, "BROKERS_KNOW_S", 0.0)
        cluster.follow_catalog()
        assert [world.log(each)[-1].get("dropped") for each in (interest, late)] == [True, True]
        cluster.follow_catalog()
        assert len(world.log(interest)) == 3
        names = {family.name for family in collect(cluster)}
        assert {"dynamoth_data_cluster_queries", "dynamoth_data_cluster_overruns"} <= names


def test_a_folder_of_other_log_servers_is_refused(world: World, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second, first):
        folder.mkdir(exist_ok=True)
        check_identity(world.servers, folder)
    assert (first / "identity").read_text() == (second / "identity").read_text(), "it is that of the servers"
    world.servers.run("l2", (b"DEL", IDENTITY_KEY))
    check_identity(world.servers, first)
    assert world.servers.run("l2", (b"GET", IDENTITY_KEY)), "a server that has lost all gets it again"
    with World(tmp_path / "other") as other:
        (tmp_path / "others").mkdir()
        check_identity(other.servers, tmp_path / "others")
        with pytest.raises(WrongFolder, match="has the files of other log servers"):
            check_identity(other.servers, first)
        mixed = read_servers(f"l1={dict(world.servers.urls)['l1']} l2={dict(other.servers.urls)['l2']}")
        (tmp_path / "new").mkdir()
        with pytest.raises(WrongFolder, match="log server l2 does not belong here: they are of several clusters"):
            check_identity(mixed, tmp_path / "new")


def test_log_servers_that_have_exchanged_their_ids_are_refused(world: World, tmp_path: Path) -> None:
    check_identity(world.servers, tmp_path)
    first, second = (url for _, url in world.servers.urls)
    for ids in (f"l1={second} l2={first}", f"l1={first} m2={second}"):
        with pytest.raises(WrongFolder, match=r"is called (l1|m2) now was l2 before"):
            check_identity(read_servers(ids), tmp_path)
    check_identity(world.servers, tmp_path)


def test_a_data_cluster_does_not_begin_where_brokers_have_other_log_servers(driver: SparkSession, world: World) -> None:
    world.servers.run("l1", (b"SET", SERVERS_KEY, b"l1 l2 l3"))
    with data_cluster(driver, world) as cluster:
        with pytest.raises(
            ConfigError, match=r"data_cluster\.logs: these are the log servers 'l1 l2', and brokers have"
        ):
            cluster.follow_catalog()
        assert not (world.folder / "identity").exists(), "what is wrong leaves no trace"
        world.servers.run("l1", (b"SET", SERVERS_KEY, b"l1 l2"))
        cluster.follow_catalog()
        assert (world.folder / "identity").exists()


def test_a_static_dataset_that_is_loaded_again_is_seen_by_the_next_execution(
    driver: SparkSession, world: World
) -> None:
    dataset = world.set_dataset()
    world.load(world.set_dataset("shelters", **STATIC, loaded=1), {"id": "s1", "type": "fire"})
    world.set_query(
        reads=["shelters"], sql="SELECT r.id, s.id AS shelter FROM reports r JOIN shelters s ON s.type = r.type"
        " WHERE r.type = :type",
    )  # fmt: skip
    interest = world.register("of_type", {"type": "fire"})
    with data_cluster(driver, world) as cluster:
        cluster.follow_catalog()
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.ids(interest), *cluster.queries().values())
        first = cluster.queries()["of_type"]
        world.load(world.set_dataset("shelters", **STATIC, loaded=2, version=2), {"id": "s2", "type": "fire"})
        cluster.follow_catalog()
        assert cluster.queries()["of_type"] is first
        world.append(dataset, *reports("fire", "b"))
        until(lambda: len(world.ids(interest)) == 2, *cluster.queries().values())
    assert [row["shelter"] for rows in world.rows(interest) for row in rows] == ["s1", "s2"]
    assert [each["end"]["static"] for each in world.executions("of_type")] == [{"shelters": 1}, {"shelters": 2}]


def test_an_order_to_restart_is_carried_out_once(driver: SparkSession, world: World) -> None:
    world.set_dataset()
    world.set_query()
    with data_cluster(driver, world) as cluster:
        cluster.follow_catalog()
        server = query_server("of_type", world.servers.ids)
        world.servers.run(server, (b"SET", restart_key("of_type"), b"1"))
        for _ in range(2):
            cluster.follow_catalog()
        assert world.servers.run(server, (b"EXISTS", restart_key("of_type"))) == 0
    assert [each.get("skipped") for each in world.executions("of_type")] == [True]


def test_a_newer_data_cluster_ends_this_one(driver: SparkSession, world: World) -> None:
    with data_cluster(driver, world) as former, data_cluster(driver, world) as newer:
        former.follow_catalog()
        newer.follow_catalog()
        assert newer.term == former.term + 1
        with pytest.raises(TakenOver, match=r"has taken over \(term \d+\): this one ends"):
            former.follow_catalog()
        for id_ in world.servers.ids:
            world.servers.run(id_, (b"DEL", TERM_KEY))
        newer.follow_catalog()
        terms = [int(world.servers.run(id_, (b"GET", TERM_KEY))) for id_ in world.servers.ids]
        assert terms == [newer.term] * 2, "servers that have lost the term get it again"


def test_only_the_newest_data_cluster_archives(driver: SparkSession, world: World) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("fire", "a", "b"))
    server, stream = world.servers.server_of("reports/0"), partition_keys("reports/0")[1]
    with data_cluster(driver, world) as former, data_cluster(driver, world) as newer:
        former.archiver.hot_records = 1
        former.archive()
        assert not [*(world.folder / "archive").iterdir()], "it has not begun"
        former.follow_catalog()
        newer.follow_catalog()
        with pytest.raises(TakenOver):
            former.archive()  # it did not know yet
        assert not [*(world.folder / "archive").glob("*/date=*/*")], "the newer one writes these files"
        assert world.servers.run(server, (b"XLEN", stream)) == 2, "the newer one needs them"
        with pytest.raises(TakenOver):
            former.follow_catalog()
        world.append(dataset, *reports("fire", "c"))
        former.archive()
        assert former.archiver.records == 0, "it knows"
        newer.archiver.hot_records = 1
        newer.prepare_stop()
        newer.archive()
        assert newer.archiver.records == 0, "it is stopping"


def test_one_that_is_taken_over_between_reading_and_writing_writes_no_file(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("fire", "a", "b"))
    with data_cluster(driver, world) as former, data_cluster(driver, world) as newer:
        former.follow_catalog()

        def take_over_and_write(*arguments: Any) -> None:
            monkeypatch.undo()
            world.append(dataset, *reports("fire", "c"))
            newer.follow_catalog()
            newer.archive()
            write_file(*arguments)

        monkeypatch.setattr(archive, "write_file", take_over_and_write)
        with pytest.raises(TakenOver):
            former.archive()
    [file] = (world.folder / "archive" / "reports").glob("date=*/*")
    assert parquet.read_table(file).column("id").to_pylist() == ["a", "b", "c"]


def test_one_that_is_taken_over_calls_no_records_lost_that_the_newer_one_has_archived(
    driver: SparkSession, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = world.set_dataset(partitions=1)
    world.append(dataset, *reports("fire", "a"))
    with data_cluster(driver, world) as former, data_cluster(driver, world) as newer:
        former.follow_catalog()
        former.archive()
        newer.follow_catalog()
        newer.archiver.hot_records = 1
        world.append(dataset, *reports("fire", "b", "c", "d"))
        newer.archive()
        with pytest.raises(TakenOver):
            former.archive()
    assert "lost" not in caplog.text


def two_queries(world: World) -> tuple[str, str]:
    """Register two queries; return them in the order in which a data cluster looks after them."""
    for name in ("one", "two"):
        world.set_query(name)
    first, second = world.servers.catalog().queries
    return first, second


@pytest.mark.parametrize("kind", ["checkpoints", "interests"])
def test_a_query_that_cannot_be_started_holds_up_no_other_one(
    driver: SparkSession, world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table_folder(self: ClusterContext, query: str) -> Path:
        return self.folder / "interests" / query

    monkeypatch.setattr(ClusterContext, "table_folder", table_folder)
    dataset, (name, other) = world.set_dataset(), two_queries(world)
    interest = world.register(other, {"type": "fire"})
    damaged = world.folder / kind / name
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    with data_cluster(driver, world) as cluster:
        with pytest.raises(OSError, match=f"{kind}/{name}"):
            cluster.follow_catalog()
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.ids(interest) == ["a"])
        status = world.status(name)
        assert status is not None
        assert status.state == "failing"
        assert f"{kind}/{name}" in status.reason
        with pytest.raises(OSError, match=f"{kind}/{name}"):
            cluster.follow_catalog()
        assert world.status(name) == status, "and it is said once"
        damaged.unlink()
        cluster.follow_catalog()
        status = world.status(name)
        assert status is not None
        assert status.state == "running"


def test_an_order_that_cannot_be_carried_out_holds_up_no_other_one(driver: SparkSession, world: World) -> None:
    dataset, (name, other) = world.set_dataset(), two_queries(world)
    interest = world.register(other, {"type": "fire"})
    server = query_server(name, world.servers.ids)
    with data_cluster(driver, world) as cluster:
        cluster.follow_catalog()
        cluster.queries()[other].stop()
        world.servers.run(server, (b"SET", restart_key(name), b"1"))
        progress = world.servers.run(server, (b"GETSET", progress_key(name), b"damaged"))
        world.append(dataset, *reports("fire", "a"))

        def is_published() -> bool:
            with pytest.raises(DynamothError, match="progress"):
                cluster.follow_catalog()
            return bool(world.ids(interest))

        until(is_published)
        assert world.servers.run(server, (b"EXISTS", restart_key(name))) == 1
        world.servers.run(server, (b"SET", progress_key(name), progress))
        cluster.follow_catalog()
        assert world.servers.run(server, (b"EXISTS", restart_key(name))) == 0


def test_definitions_that_cannot_be_read_are_refused_once(
    driver: SparkSession, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.set_dataset()
    world.set_query()
    world.set_query("of_events", on="events", sql="SELECT e.id FROM events e WHERE e.type = :type")
    world.put(DATASETS_KEY, "events", Entry(1, {"kind": "odd"}))
    world.put(QUERIES_KEY, "odd", Entry(1, {"sql": 7}))
    with data_cluster(driver, world) as cluster:
        cluster.follow_catalog()
        assert [*cluster.queries()] == ["of_type"]
        assert cluster.refused.keys() == {"of_events", "odd"}
        assert "the definition of dataset 'events' cannot be read: " in cluster.refused["of_events"]
        statuses = [world.status(name) for name in cluster.refused]
        cluster.follow_catalog()
        assert [world.status(name) for name in cluster.refused] == statuses
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert sorted(each.partition(" cannot be ")[0] for each in said) == [
            "query odd", "query of_events", "the definition of dataset events",
        ]  # fmt: skip
        world.set_dataset("events", version=2)
        world.drop_query("odd", 2)
        cluster.follow_catalog()
        assert cluster.queries().keys() == {"of_type", "of_events"}
        assert cluster.refused == {}


def test_counters_do_not_fall_when_queries_are_changed_and_dropped(driver: SparkSession, world: World) -> None:
    dataset, interest = world.set_dataset(), world.register("of_type", {"type": "fire"})
    world.set_query()

    def counted() -> float:
        return sum(
            sample.value for family in collect(cluster) for sample in family.samples if sample.name == EXECUTIONS
        )

    with data_cluster(driver, world) as cluster:
        cluster.follow_catalog()
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.ids(interest))
        until(lambda: counted() == 1)
        world.set_query(version=2, sql="SELECT upper(r.id) AS id FROM reports r WHERE r.type = :type")
        cluster.follow_catalog()
        assert counted() == 1
        world.append(dataset, *reports("fire", "b"))
        until(lambda: counted() == 2)
        world.drop_query("of_type", 3)
        cluster.follow_catalog()
        assert counted() == 2
        world.set_query(version=4)
        cluster.follow_catalog()
        assert counted() == 2, "the counts of the query go on, and count once"


def test_definitions_come_back_to_a_server_that_has_lost_them(driver: SparkSession, world: World) -> None:
    world.set_dataset()
    query = world.set_query()
    world.servers.run("l1", (b"FLUSHALL",))
    with data_cluster(driver, world) as cluster:
        cluster.tidy()
    world.servers.run("l2", (b"FLUSHALL",))
    assert world.servers.catalog().queries == {"of_type": query}
