"""Small windows: the tables that the driver makes are those that Spark reads, and so are the results."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import Window
from dynamoth.data.records import partition_keys
from dynamoth_analytics.cluster import small_windows
from dynamoth_analytics.cluster.small_windows import PAIRS_MAX, SmallWindows, Table, pairs
from dynamoth_analytics.cluster.storage.reading import RecordsLost
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots
from dynamoth_analytics.files import parquet
from tests.data_cluster.world import STATIC, World, reports, stream_session

PLACES: dict[str, Any] = {"kind": "keyed", "key": "id", "id": ""}

NEAR: dict[str, Any] = {
    "on": "reports",
    "reads": ["places", "shelters"],
    "parameters": {"type": "string"},
    "sql": "SELECT r.id, p.size, s.type AS shelter FROM reports r JOIN places p ON near_xy(r.size, 0, p.size, 0, 1.5)"
    " LEFT JOIN shelters s ON s.id = r.id WHERE r.type = :type",
}


OF_TYPE: dict[str, Any] = {
    "on": "reports",
    "parameters": {"type": "string"},
    "sql": "SELECT r.id, r.size FROM reports r WHERE r.type = :type",
}


def rows_of(table: Table) -> list[tuple[str, int]]:
    found = [row for file in table.files for row in parquet.read_table(file).to_pylist()]
    assert table.rows == len(found)
    return sorted((row["id"], row.get("size", 0)) for row in found)


def small(world: World, term: int = 1) -> SmallWindows:
    options = {"logs": world.logs, "archive": str(world.folder / "archive")}
    return SmallWindows(world.servers, world.folder, KeyedSnapshots(world.folder / "snapshots", options), term)


def window(world: World, start: Mapping[str, int] | None = None, **static: int) -> Window:
    end = world.servers.tips({"reports": 2, "places": 2})
    return Window({"tick_ms": 0, "offsets": start or {}}, {"tick_ms": 1, "offsets": end, "static": static})


def set_all(world: World) -> dict[str, Dataset]:
    made = {"reports": world.set_dataset(), "places": world.set_dataset("places", **PLACES)}
    made["shelters"] = world.set_dataset("shelters", **STATIC, loaded=1)
    world.load(made["shelters"], {"id": "a", "type": "school"})
    return made


def test_tables_are_as_of_the_window(world: World) -> None:
    datasets, query = set_all(world), world.set_query(**NEAR)
    found = small(world)
    world.append(datasets["reports"], *reports("fire", "a", "b"))
    world.append(datasets["places"], {"id": "u", "type": "x", "size": 1}, {"id": "v", "type": "x", "size": 2})
    first = window(world, shelters=1)
    world.append(datasets["reports"], *reports("fire", "c"))
    for size in range(3, 9):
        world.append(datasets["places"], {"id": "u", "type": "x", "size": size})
    second = window(world, first.end["offsets"], shelters=1)
    for _ in range(2):  # the later one first, the second time
        for each, ids, u in ((first, "ab", 1), (second, "c", 8)):
            tables = found.tables(query, datasets, each)
            assert tables is not None
            assert [id_ for id_, _ in rows_of(tables["reports"])] == list(ids)
            assert dict(rows_of(tables["places"])) == {"u": u, "v": 2}
            assert rows_of(tables["shelters"]) == [("a", 0)]


def test_a_former_data_cluster_writes_no_table_of_one_with_the_same_folder(world: World) -> None:
    """It hangs in an execution, and writes its tables when the newer one has written those of the next execution."""
    datasets, query = set_all(world), world.set_query(**NEAR)
    world.append(datasets["reports"], *reports("fire", "a", "b"))
    first = window(world, shelters=1)
    world.append(datasets["reports"], *reports("fire", "c"))
    tables = small(world, term=2).tables(query, datasets, window(world, first.end["offsets"], shelters=1))
    assert tables is not None
    assert small(world, term=1).tables(query, datasets, first) is not None
    assert [id_ for id_, _ in rows_of(tables["reports"])] == ["c"]


def test_a_snapshot_begins_with_the_base_of_spark(driver: SparkSession, world: World) -> None:
    datasets, query = set_all(world), world.set_query(**NEAR)
    context = world.context(driver)
    world.append(datasets["reports"], *reports("fire", "a"))
    for size in range(5):
        world.append(datasets["places"], *({"id": f"u{size % 3}", "type": "x", "size": size},))
    context.snapshots.renew(driver, datasets["places"], world.servers.states({"places": 2}))
    world.append(datasets["places"], {"id": "u1", "type": "x", "size": 9})
    tables = context.small_windows.tables(query, datasets, window(world, shelters=1))
    assert tables is not None
    spark_rows = context.snapshots.at(driver, datasets["places"], world.servers.tips({"places": 2})).collect()
    assert (
        dict(rows_of(tables["places"])) == {row["id"]: row["size"] for row in spark_rows} == {"u0": 3, "u1": 9, "u2": 2}
    )


def test_a_base_that_is_too_large_is_not_read(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        pytest.fail("it was read")

    datasets, query = set_all(world), world.set_query(**NEAR)
    context = world.context(driver)
    world.append(datasets["reports"], *reports("fire", "a"))
    places = ({"id": f"u{number}", "type": secrets.token_hex(2000), "size": number} for number in range(20))
    world.append(datasets["places"], *places)
    context.snapshots.renew(driver, datasets["places"], world.servers.states({"places": 2}))
    assert context.small_windows.tables(query, datasets, window(world, shelters=1)) is not None
    monkeypatch.setattr(small_windows, "BYTES_MAX", 20_000)
    monkeypatch.setattr(parquet, "read_table", refuse)
    assert small(world).tables(query, datasets, window(world, shelters=1)) is None


@pytest.mark.parametrize(
    ("bound", "value"),
    [("RECORDS_MAX", 1), ("BYTES_MAX", 10), ("ROWS_MAX", 0), ("CHANGES_MAX", 1)],
)
def test_a_window_beyond_a_bound_is_not_small(
    bound: str, value: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, query = set_all(world), world.set_query(**NEAR)
    world.append(datasets["reports"], *reports("fire", "a", "b"))
    world.append(datasets["places"], {"id": "u", "type": "x", "size": 1}, {"id": "v", "type": "x", "size": 1})
    assert small(world).tables(query, datasets, window(world, shelters=1)) is not None
    monkeypatch.setattr(small_windows, bound, value)
    assert small(world).tables(query, datasets, window(world, shelters=1)) is None


def test_what_is_lost_is_an_error(world: World) -> None:
    datasets, query = set_all(world), world.set_query(**NEAR)
    world.append(datasets["reports"], *reports("fire", "a", "b"))
    lost = window(world, shelters=1)
    for name in ("reports/0", "reports/1"):
        world.servers.run(world.servers.server_of(name), (b"DEL", partition_keys(name)[1]))
    with pytest.raises(RecordsLost, match="no longer at Redis"):
        small(world).tables(query, datasets, lost)


@pytest.mark.parametrize(("definition", "rows"), [(NEAR, 4), (OF_TYPE, 3)], ids=["joins", "alone"])
def test_results_are_those_of_a_large_window(
    driver: SparkSession, world: World, monkeypatch: pytest.MonkeyPatch, definition: dict[str, Any], rows: int
) -> None:
    datasets = set_all(world)
    interests: dict[str, str] = {}
    context = world.context(driver)
    world.append(datasets["reports"], *reports("fire", "a", "bb", "ccc"), *reports("flood", "a"))
    world.append(datasets["places"], *({"id": f"u{size}", "type": "x", "size": size} for size in range(4)))
    start, end = window(world).start, window(world, shelters=1).end
    bounds = {"small": None, "grids": "executions.PAIRS_MAX", "interests": "executions.ROWS_MAX"}
    for name, bound in {**bounds, "large": "small_windows.RECORDS_MAX"}.items():
        query = world.set_query(name, **definition)
        interests[name] = world.register(name, {"type": "fire"})
        runner = world.runner(context, query, *datasets.values())
        with monkeypatch.context() as patch:
            if bound is not None:
                patch.setattr(f"dynamoth_analytics.cluster.{bound}", 0)
            sealed = Window(start, {**end, "sealed_ms": world.servers.now_ms()})
            runner.executions.run(stream_session(driver), 1, sealed)
    found = {name: world.rows(interest) for name, interest in interests.items()}
    assert found["small"] == found["grids"] == found["interests"] == found["large"]
    assert len(found["small"][0]) >= rows


def test_pairs_are_those_of_the_two_largest_tables() -> None:
    tables = {"a": Table((), 10), "b": Table((), 3)}
    assert pairs(tables, 4) == 40
    assert pairs(tables, 20) == 200
    assert PAIRS_MAX > 0
