"""Executions whose data is gone: they fail, and go on where an operator says so, or where there is a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dynamoth.data.datasets import Dataset
from dynamoth.data.records import partition_keys, partition_name
from dynamoth_analytics.cluster import query_runner
from dynamoth_analytics.cluster.query_runner import QueryRunner
from dynamoth_analytics.cluster.sql import nulls
from dynamoth_analytics.cluster.storage.archive import Archiver
from dynamoth_analytics.cluster.storage.reading import RecordsLost
from tests.data_cluster.world import STATIC, World, reports, until

KEYED: dict[str, Any] = {"kind": "keyed", "key": "id", "id": "", "partitions": 1}

FAILS = "cardinality(sequence(CAST(r.size AS int), 4, 1)) AS ok"  # of a size above 5 there is no such sequence


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are tried again soon."""
    monkeypatch.setitem(nulls.LITERALS, "sequence", ())  # else queries that can fail are refused
    monkeypatch.setattr(query_runner, "RETRY_S", 0.1)
    monkeypatch.setattr(query_runner, "RETRY_S_MAX", 0.5)


@pytest.fixture
def run(driver: SparkSession, world: World) -> Callable[..., QueryRunner]:
    """Makes the runner of a query, which has begun."""

    def started(*datasets: Dataset, **settings: Any) -> QueryRunner:
        runner = world.runner(world.context(driver), world.set_query(**settings), *datasets)
        until(lambda: runner.status.state == "running", runner)
        return runner

    return started


def forget(world: World, dataset: Dataset, number: int = 0, *, records_only: bool = False) -> None:
    """Have a server lose a partition."""
    name = partition_name(dataset.stream, number)
    keys = partition_keys(name)
    world.servers.run(world.servers.server_of(name), (b"DEL", *(keys[1:2] if records_only else keys)))


def report(world: World, dataset: Dataset, interest: str, id_: str, runner: QueryRunner) -> None:
    """Store a record, and wait until its interest has it."""
    world.append(dataset, *reports("fire", id_))
    until(lambda: id_ in world.ids(interest), runner)


def test_an_execution_that_is_repeated_after_its_load_has_expired_reads_the_same(
    world: World, run: Callable[..., QueryRunner]
) -> None:
    dataset, shelters = world.set_dataset(), world.set_dataset("shelters", **STATIC, loaded=1)
    world.load(shelters, {"id": "s1", "type": "fire"})
    sql = (
        f"SELECT r.id, s.id AS shelter, {FAILS} FROM reports r JOIN shelters s ON s.type = r.type WHERE r.type = :type"
    )
    interest = world.register("of_type", {"type": "fire"})
    runner = run(dataset, shelters, reads=["shelters"], sql=sql)
    try:
        world.append(dataset, *reports("fire", "too long"))
        until(lambda: runner.is_failing, runner)
        newer = world.set_dataset("shelters", **STATIC, loaded=2, version=2)
        world.load(newer, {"id": "s2", "type": "fire"})
        for number in range(shelters.partitions):
            forget(world, shelters, number)
        runner.stop(10.0)
        # The SQL has a bug, which is corrected: the window stays the same.
        corrected = world.set_query(version=2, reads=["shelters"], sql=sql.replace("r.size AS int", "4 AS int"))
        runner = world.runner(runner._context, corrected, dataset, newer)  # pyright: ignore[reportPrivateUsage]
        until(lambda: world.ids(interest), runner)
        world.append(dataset, *reports("fire", "next"))
        until(lambda: len(world.ids(interest)) == 2, runner)
    finally:
        runner.stop(10.0)
    assert [row["shelter"] for rows in world.rows(interest) for row in rows] == ["s1", "s2"]
    assert [each["end"]["static"] for each in world.executions("of_type")] == [{"shelters": 1}, {"shelters": 2}]


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_query_that_reads_a_keyed_dataset_goes_on_behind_a_loss_when_it_is_restarted(
    world: World, run: Callable[..., QueryRunner], has_snapshot: bool
) -> None:
    """Also where the driver has a snapshot in memory, of before the loss."""
    dataset, users = world.set_dataset(), world.set_dataset("users", **KEYED)
    sql = "SELECT r.id, u.size FROM reports r JOIN users u ON u.type = r.type WHERE r.type = :type"
    interest = world.register("of_type", {"type": "fire"})
    runner = run(dataset, users, reads=["users"], sql=sql)
    first: list[list[dict[str, Any]]] = []
    try:
        if has_snapshot:
            world.append(users, {"id": "joe", "type": "fire", "size": 0})
            world.append(dataset, *reports("fire", "first"))
            first = [[{"id": "first", "size": 0}]]
            until(lambda: world.rows(interest) == first, runner)
        world.append(users, {"id": "ann", "type": "fire", "size": 1}, {"id": "bob", "type": "fire", "size": 2})
        forget(world, users, records_only=True)
        world.append(users, {"id": "eve", "type": "fire", "size": 3})
        world.append(dataset, *reports("fire", "a"))
        until(lambda: runner.is_failing, runner)
        assert "no longer at Redis" in runner.status.reason
        assert world.rows(interest) == first
        runner.restart()
        world.append(dataset, *reports("fire", "b"))
        until(lambda: len(world.rows(interest)) > len(first), runner)
    finally:
        runner.stop(10.0)
    assert world.rows(interest) == [*first, [{"id": "b", "size": 3}]]


@pytest.mark.parametrize("what", ["the partition", "its offset", "the partition, and the folder"])
def test_keyed_records_that_a_server_has_lost_are_those_of_the_snapshot(
    world: World, run: Callable[..., QueryRunner], what: str
) -> None:
    """The query goes on with the records that it knows, and not as if there had never been any."""
    dataset, users = world.set_dataset(partitions=1), world.set_dataset("users", **KEYED)
    sql = "SELECT r.id, u.size FROM reports r LEFT JOIN users u ON u.type = r.type WHERE r.type = :type"
    interest = world.register("of_type", {"type": "fire"})
    runner = run(dataset, users, reads=["users"], sql=sql)
    try:
        world.append(users, {"id": "joe", "type": "fire", "size": 7})
        report(world, dataset, interest, "a", runner)
        Archiver(world.servers, world.folder / "archive").archive(world.servers.catalog())
        if what == "its offset":
            name = partition_name(users.stream, 0)
            world.servers.run(world.servers.server_of(name), (b"HDEL", partition_keys(name)[0], b"offset"))
        else:
            forget(world, users)
        if "folder" in what:
            runner.stop(10.0)
            shutil.rmtree(world.folder)
            (world.folder / "archive").mkdir(parents=True)
            runner = run(dataset, users, reads=["users"], sql=sql)
        world.append(dataset, *reports("fire", "b"))
        until(lambda: runner.is_failing, runner)
        runner.restart()
        report(world, dataset, interest, "c", runner)
        world.append(users, {"id": "eve", "type": "other", "size": 8})
        report(world, dataset, interest, "d", runner)
    finally:
        runner.stop(10.0)
    size = 7 if "folder" not in what else None
    expected = [{"id": "a", "size": 7}, *({"id": each} | ({"size": size} if size else {}) for each in ("c", "d"))]
    assert [row for rows in world.rows(interest) for row in rows] == expected


def test_a_load_of_which_a_server_has_lost_the_offsets_is_that_of_the_copy(
    world: World, run: Callable[..., QueryRunner]
) -> None:
    dataset, shelters = world.set_dataset(), world.set_dataset("shelters", **STATIC, loaded=1)
    world.load(shelters, {"id": "s1", "type": "fire"})
    sql = "SELECT r.id, s.id AS shelter FROM reports r JOIN shelters s ON s.type = r.type WHERE r.type = :type"
    interest = world.register("of_type", {"type": "fire"})
    runner = run(dataset, shelters, reads=["shelters"], sql=sql)
    try:
        for id_ in ("a", "b"):
            report(world, dataset, interest, id_, runner)
            for number in range(shelters.partitions):
                name = partition_name(shelters.stream, number)
                world.servers.run(world.servers.server_of(name), (b"HDEL", partition_keys(name)[0], b"offset"))
    finally:
        runner.stop(10.0)
    assert [row["shelter"] for rows in world.rows(interest) for row in rows] == ["s1", "s1"]


def test_a_query_that_goes_on_behind_a_loss_does_not_execute_the_archive_again(
    world: World, run: Callable[..., QueryRunner]
) -> None:
    """Also where the server has nothing yet when the query is restarted, and offsets begin again."""
    dataset = world.set_dataset(partitions=2)
    interest = world.register("of_type", {"type": "fire"})
    runner = run(dataset)
    try:
        world.append(dataset, *reports("fire", "a", "b"))
        until(lambda: sorted(world.ids(interest)) == ["a", "b"], runner)
        assert Archiver(world.servers, world.folder / "archive").archive(world.servers.catalog()) == 2
        forget(world, dataset)
        runner.restart()
        world.append(dataset, *reports("fire", "c"), partition=1)
        until(lambda: "c" in world.ids(interest), runner)
        world.append(dataset, *reports("fire", "d", "e"))
        until(lambda: {"d", "e"} <= {*world.ids(interest)}, runner)
    finally:
        runner.stop(10.0)
    assert sorted(world.ids(interest)) == ["a", "b", "c", "d", "e"]


def test_a_durable_server_that_is_restored_is_noticed_with_the_next_window(driver: SparkSession, world: World) -> None:
    """Though it has given all offsets again that were read: else the next window would lack their records."""
    world.servers = replace(world.servers, durable=True)
    dataset, query = world.set_dataset(partitions=1), world.set_query()
    interest = world.register("of_type", {"type": "fire"})
    runner = world.runner(world.context(driver), query, dataset)
    server = world.servers.server_of(partition_name(dataset.stream, 0))
    until(lambda: runner.status.state == "running", runner)
    world.append(dataset, *reports("fire", "a"))
    until(lambda: runner.status.execution == 1, runner)
    copy = {key: world.servers.run(server, (b"DUMP", key)) for key in world.servers.run(server, (b"KEYS", b"*"))}
    world.append(dataset, *reports("fire", "b", "c"))
    until(lambda: "c" in world.ids(interest), runner)
    runner.stop(10.0)
    world.servers.run(server, (b"FLUSHALL",))
    for key, value in copy.items():
        world.servers.run(server, (b"RESTORE", key, b"0", value))
    world.append(dataset, *reports("fire", "d", "e", "f"))
    runner = world.runner(world.context(driver), query, dataset)
    try:
        with pytest.raises(RecordsLost, match=f"log server {server} has lost what it had stored, though log_durable"):
            runner.keep_running()
        runner.restart()
        world.append(dataset, *reports("fire", "g"))
        until(lambda: "g" in world.ids(interest), runner)
    finally:
        runner.stop(10.0)
    assert not {"d", "e", "f"}.intersection(world.ids(interest)), "an operator has given them up"


def test_a_window_that_a_server_has_lost_is_not_executed_without_its_records(
    world: World, run: Callable[..., QueryRunner]
) -> None:
    """Also when the server has new records meanwhile, which are far behind the window."""
    dataset = world.set_dataset(partitions=1)
    interest = world.register("of_type", {"type": "fire"})
    runner = run(dataset, sql=f"SELECT r.id, {FAILS} FROM reports r WHERE r.type = :type")
    try:
        world.append(dataset, *reports("fire", "a"))
        until(lambda: world.ids(interest) == ["a"], runner)
        world.append(dataset, *reports("fire", "too long", "b"))
        until(lambda: runner.is_failing, runner)
        forget(world, dataset)
        world.append(dataset, *reports("fire", "c"))
        until(lambda: "no longer at Redis" in runner.status.reason, runner)
        assert world.ids(interest) == ["a"]
        runner.restart()
        world.append(dataset, *reports("fire", "d"))
        until(lambda: len(world.ids(interest)) == 2, runner)
    finally:
        runner.stop(10.0)
    assert world.ids(interest) == ["a", "d"]
