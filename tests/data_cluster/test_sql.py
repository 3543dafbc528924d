"""SQL of standing queries: for all interests at once it gives what it gives for each of them alone."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dynamoth.data.datasets import read_dataset
from dynamoth.data.queries import Parameter, StandingQuery, read_query
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster.spatial import EARTH_M
from dynamoth_analytics.cluster.sql import compile_query, interest_schema, view_schema

DATASETS = {
    "reports": read_dataset(
        "reports",
        {
            "kind": "append",
            "fields": {
                "id": "int",
                "type": "string",
                "lat": "float",
                "lon": "float",
                "x": "float",
                "y": "float",
                "n": "int?",
            },
        },
    ),
    "places": read_dataset(
        "places",
        {
            "kind": "keyed",
            "key": "user",
            "fields": {"user": "string", "lat": "float", "lon": "float", "x": "float", "y": "float"},
        },
    ),
    "shelters": read_dataset(
        "shelters", {"kind": "static", "fields": {"name": "string", "lat": "float", "lon": "float"}}
    ),
}

RADIUS = {"type": "float", "min": 1, "max": 3_000_000}

QUERIES: dict[str, dict[str, Any]] = {
    "equality": {
        "sql": "SELECT r.id, r.n FROM reports r WHERE r.type = :type",
        "parameters": {"type": "string"},
    },
    "a parameter with the name of a field": {
        "sql": "SELECT id, type AS kind FROM reports WHERE type = :type AND n > :n",
        "parameters": {"type": "string", "n": "int"},
    },
    "near a place": {
        "sql": "SELECT r.id FROM reports r WHERE r.type = :type AND near(r.lat, r.lon, :lat, :lon, :radius)",
        "parameters": {"type": "string", "lat": "float", "lon": "float", "radius": RADIUS},
    },
    "near a user": {
        "sql": "SELECT r.id FROM reports r JOIN places p ON p.user = :user"
        " WHERE near(r.lat, r.lon, p.lat, p.lon, :radius)",
        "reads": ["places"],
        "parameters": {"user": "string", "radius": RADIUS},
    },
    "near in a plane": {
        "sql": "SELECT r.id FROM reports r, places p WHERE p.user = :user AND near_xy(r.x, r.y, p.x, p.y, 300)",
        "reads": ["places"],
        "parameters": {"user": "string"},
    },
    "near in a plane, with a radius": {
        "sql": "SELECT r.id FROM reports r WHERE near_xy(:x, :y, r.x, r.y, :radius)",
        "parameters": {"x": "float", "y": "float", "radius": RADIUS},
    },
    "near twice": {
        "sql": "SELECT s.name, r.id FROM reports r JOIN shelters s ON near(r.lat, r.lon, s.lat, s.lon, 200000)"
        " JOIN places p ON p.user = :user WHERE near(p.lat, p.lon, r.lat, r.lon, 500000)",
        "reads": ["places", "shelters"],
        "parameters": {"user": "string"},
    },
    "groups": {
        "sql": "SELECT r.type, count(*) AS n, max(r.n) AS most FROM reports r WHERE r.n > :n"
        " GROUP BY r.type HAVING count(*) > 1",
        "parameters": {"n": "int"},
    },
    "one group": {"sql": "SELECT count(*) AS n FROM reports r WHERE r.type = :type", "parameters": {"type": "string"}},
    "distinct": {"sql": "SELECT DISTINCT r.type FROM reports r WHERE r.n >= :n", "parameters": {"n": "int"}},
    "in an order": {
        "sql": "SELECT r.id, r.n AS k FROM reports r WHERE r.type = :type ORDER BY k DESC, id",
        "parameters": {"type": "string"},
    },
    "a common table": {
        "sql": "WITH big AS (SELECT * FROM reports WHERE n > 3) SELECT big.id FROM big WHERE big.type = :type",
        "parameters": {"type": "string"},
    },
    "a left join": {
        "sql": "SELECT r.id, p.user FROM reports r LEFT JOIN places p ON p.user = :user AND p.x > r.x"
        " WHERE r.type = 't1'",
        "reads": ["places"],
        "parameters": {"user": "string"},
    },
    "a window": {
        "sql": "SELECT r.id, row_number() OVER (ORDER BY r.id) AS number FROM reports r WHERE r.type = :type",
        "parameters": {"type": "string"},
    },
    "a subquery": {
        "sql": "SELECT q.id, q.number FROM (SELECT id, type, row_number() OVER (PARTITION BY type ORDER BY id)"
        " AS number FROM reports) q WHERE q.type = :type",
        "parameters": {"type": "string"},
    },
}


def place(rng: random.Random) -> tuple[float, float]:
    """Return a place: anywhere, at a pole, at the antimeridian, or in a town."""
    return rng.choice(
        (
            (rng.uniform(-90, 90), rng.uniform(-180, 180)),
            (rng.choice((-89.9, 89.95, 90.0)), rng.uniform(-180, 180)),
            (rng.uniform(-5, 5), rng.choice((-179.9, 179.9, 180.0, -180.0, 179.99))),
            (60 + rng.uniform(-0.05, 0.05), 24 + rng.uniform(-0.05, 0.05)),
        )
    )


def value(parameter: Parameter, rng: random.Random) -> Any:
    values: dict[str, Any] = {
        "type": f"t{rng.randrange(5)}",
        "user": f"u{rng.randrange(23)}",
        "n": rng.randrange(9),
        "radius": float(rng.choice((10, 500.5, 3000, 20_000, 111_000, 1e6, 3e6))),
        "lat": 60 + rng.uniform(-0.05, 0.05),
        "lon": 24 + rng.uniform(-0.05, 0.05),
        "x": rng.uniform(-1000, 1000),
        "y": rng.uniform(-1000, 1000),
    }
    return values[parameter.name]


def distance(lat1: float, lon1: float, lat2: float, lon2: float) -> float:
    half = (
        math.sin(math.radians(lat2 - lat1) / 2) ** 2
        + math.cos(math.radians(lat1)) * math.cos(math.radians(lat2)) * math.sin(math.radians(lon2 - lon1) / 2) ** 2
    )
    return 2 * EARTH_M * math.asin(min(1.0, math.sqrt(half)))


@pytest.fixture(scope="module")
def views(spark: SparkSession) -> dict[str, DataFrame]:
    rng = random.Random(5)
    rows: dict[str, list[tuple[Any, ...]]] = {
        "reports": [
            (
                number, f"t{number % 4}", *place(rng), rng.uniform(-1000, 1000), rng.uniform(-1000, 1000),
                None if number % 7 == 0 else number % 9, 0, number, None,
            )
            for number in range(120)
        ],
        "places": [
            (f"u{number}", *place(rng), rng.uniform(-1000, 1000), rng.uniform(-1000, 1000), 0, number, None)
            for number in range(20)
        ],
        "shelters": [(f"s{number}", *place(rng), 0, number, None) for number in range(40)],
    }  # fmt: skip
    made = {name: spark.createDataFrame(each, view_schema(DATASETS[name])).cache() for name, each in rows.items()}
    for name, each in made.items():
        each.createOrReplaceTempView(name)

    def is_near(a: float, b: float, c: float, d: float, radius: float) -> bool:
        return distance(a, b, c, d) <= float(radius)

    def is_near_xy(a: float, b: float, c: float, d: float, radius: float) -> bool:
        return math.hypot(a - c, b - d) <= float(radius)

    spark.udf.register("near", is_near, "boolean")
    spark.udf.register("near_xy", is_near_xy, "boolean")
    return made


def literal(given: Any) -> str:
    return f"{given!r}D" if isinstance(given, float) else repr(given)


def alone(spark: SparkSession, query: StandingQuery, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the query gives with literals in place of the parameters."""
    sql = query.sql
    for name in values:
        sql = sql.replace(f":{name}", literal(values[name]))
    rows = [{name: each for name, each in row.asDict().items() if each is not None} for row in spark.sql(sql).collect()]
    return [] if rows == [{"n": 0}] else rows  # of an interest without records there is no result set


@pytest.mark.parametrize("name", QUERIES)
def test_all_interests_at_once_give_what_each_gives_alone(
    name: str, spark: SparkSession, views: dict[str, DataFrame]
) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, **QUERIES[name]})
    rng = random.Random(name)
    interests = [{each.name: value(each, rng) for each in query.parameters} for _ in range(6)]
    rows = [(f"i{number}", *values.values()) for number, values in enumerate(interests)]
    table = spark.createDataFrame(rows, interest_schema(query))
    compiled = compile_query(query, DATASETS)
    results = {row["interest"]: row for row in compiled.run(spark, views, table, 0).collect()}
    found = 0
    for number, values in enumerate(interests):
        expected, row = alone(spark, query, values), results.get(f"i{number}")
        rows_found = [] if row is None else json.loads(row["result"])
        assert row is None or row["rows"] == len(rows_found)
        found += len(rows_found)
        if "ORDER BY k" in query.sql:
            assert rows_found == expected
        else:
            assert sorted(rows_found, key=json.dumps) == sorted(expected, key=json.dumps), values
    assert found, "the data has something for these interests"


def test_equal_executions_have_equal_results(spark: SparkSession, views: dict[str, DataFrame]) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, **QUERIES["equality"]})
    table = spark.createDataFrame([("i", "t1")], interest_schema(query))
    shuffled = views | {"reports": views["reports"].orderBy("x").repartition(3)}
    compiled = compile_query(query, DATASETS)
    first, second = (compiled.run(spark, each, table, 0).collect() for each in (views, shuffled))
    assert first == second


def test_a_query_knows_the_time_of_its_execution(spark: SparkSession, views: dict[str, DataFrame]) -> None:
    sql = "SELECT r.id, execution_time() AS at FROM reports r WHERE r.id = :n"
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"n": "int"}})
    table = spark.createDataFrame([("i", 1)], interest_schema(query))
    (row,) = compile_query(query, DATASETS).run(spark, views, table, 1_700_000_000_250).collect()
    assert json.loads(row["result"]) == [{"id": 1, "at": "2023-11-14T22:13:20.250Z"}]


REFUSED = [
    ("SELECT r.id FROM reports r WHERE r.typ = :type", "typ"),
    ("SELECT FROM WHERE", "cannot be read"),
    ("DELETE FROM reports", "one SELECT, not DELETE"),
    ("SELECT id FROM reports; SELECT 1", "2 statements"),
    ("SELECT id FROM reports WHERE type = :type LIMIT 3", "LIMIT is not possible"),
    ("SELECT id, rand() AS x FROM reports WHERE type = :type", "execution_time"),
    ("SELECT id, now() AS x FROM reports WHERE type = :type", "execution_time"),
    ("SELECT id FROM reports WHERE type IN (SELECT type FROM reports WHERE type = :type)", "in a subquery"),
    ("SELECT id FROM parquet.`/etc/passwd` WHERE :type = 'a'", "none of its datasets"),
    ("SELECT id FROM places WHERE user = :type", "none of its datasets"),
    ("SELECT id + 1 FROM reports WHERE type = :type", "has no name"),
    ("SELECT * FROM reports WHERE type = :type", "name a table"),
    ("SELECT id AS _id FROM reports WHERE type = :type", "such names are ours"),
    ("SELECT id, n AS id FROM reports WHERE type = :type", "two columns"),
    ("SELECT id FROM reports WHERE type = :other", "not declared"),
    ("SELECT id FROM reports", "does not use the parameter"),
    ("SELECT java_method('java.lang.System', 'exit', 0) AS a FROM reports WHERE type = :type", "reaches outside"),
    ("SELECT id FROM reports WHERE type = :type ORDER BY abs(n)", "ORDER BY names columns"),
    ("SELECT id FROM reports WHERE type = :type ORDER BY n", "no such column"),
    ("SELECT r.id FROM reports r RIGHT JOIN reports q ON q.id = r.id WHERE r.type = :type", "LEFT JOIN"),
    ("SELECT r.id FROM reports r, reports q WHERE r.type = :type AND near(r.x, r.y, q.x, q.y, q.n)", "min and max"),
    ("SELECT r.id FROM reports r WHERE r.type = :type AND near(r.x, r.y, 3)", "five arguments"),
]


@pytest.mark.parametrize(("sql", "words"), REFUSED)
def test_what_cannot_be_executed_is_refused_with_the_reason(sql: str, words: str) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"type": "string"}})
    with pytest.raises(ConfigError, match="query 'q': ") as error:
        compile_query(query, DATASETS)
    assert words in str(error.value)


def test_what_only_spark_can_tell_is_found_on_empty_tables(spark: SparkSession) -> None:
    sql = "SELECT nosuch(id) AS a FROM reports WHERE type = :type"
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"type": "string"}})
    with pytest.raises(ConfigError, match=r"(?i)query 'q': .*nosuch"):
        compile_query(query, DATASETS).check(spark, DATASETS)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT id FROM reports WHERE n > :n", "all rows are compared"),
        ("SELECT id FROM reports WHERE type = 'a' OR near(lat, lon, 1, 2, :n)", "all pairs are compared"),
    ],
)
def test_what_compares_everything_with_everything_is_warned_of(sql: str, words: str) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"n": "int"}})
    assert any(words in warning for warning in compile_query(query, DATASETS).warnings)


@pytest.mark.parametrize("name", ["equality", "near a place", "near a user", "near twice", "one group"])
def test_no_interest_is_compared_with_all_rows(name: str, spark: SparkSession, views: dict[str, DataFrame]) -> None:
    """Nor is any table multiplied with another one: every join has an equality."""
    query = read_query("q", {"on": "reports", "period_s": 10, **QUERIES[name]})
    compiled = compile_query(query, DATASETS)
    assert compiled.warnings == ()
    rng = random.Random(1)
    rows = [(f"i{number}", *(value(each, rng) for each in query.parameters)) for number in range(3)]
    table = spark.createDataFrame(rows, interest_schema(query))
    statement: Any = spark.sql(compiled.sql(spark, views, table, 0))
    plan = statement._jdf.queryExecution().executedPlan().toString()
    assert "HashJoin" in plan or "SortMergeJoin" in plan
    assert "CartesianProduct" not in plan
    assert "NestedLoop" not in plan
