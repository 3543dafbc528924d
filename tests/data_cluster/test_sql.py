"""SQL of standing queries: for all interests at once it gives what it gives for each of them alone."""

# pyright: reportCallIssue=false, reportOptionalCall=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dynamoth.data.datasets import read_dataset
from dynamoth.data.queries import StandingQuery, read_query
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster.sql.compiled import compile_query
from dynamoth_analytics.cluster.sql.dialect import AGGREGATES, NOT_IN_PYTHON, StandingSql
from dynamoth_analytics.cluster.sql.schema import interest_schema, view_schema
from dynamoth_analytics.cluster.sql.spatial import EARTH_M
from dynamoth_analytics.cluster.trial import try_query

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


def query_of(sql: str, *reads: str, **parameters: Any) -> dict[str, Any]:
    return {"sql": sql, "reads": list(reads), "parameters": parameters}


QUERIES: dict[str, dict[str, Any]] = {
    "equality": query_of("SELECT r.id, r.n FROM reports r WHERE r.type = :type", type="string"),
    "a parameter with the name of a field": query_of(
        "SELECT id, type AS kind FROM reports WHERE type = :type AND n > :n", type="string", n="int"
    ),
    "near a place": query_of(
        "SELECT r.id FROM reports r WHERE r.type = :type AND near(r.lat, r.lon, :lat, :lon, :radius)",
        type="string", lat="float", lon="float", radius=RADIUS,
    ),
    "near a place, in kilometres": query_of(
        "SELECT r.id FROM reports r WHERE near(:lat, :lon, r.lat, r.lon, (:n + 0) * 0 + 700000) OR r.id = :n",
        lat="float", lon="float", n="int",
    ),
    "near a user": query_of(
        "SELECT r.id FROM reports r JOIN places p ON p.user = :user"
        " WHERE near(r.lat, r.lon, p.lat, p.lon, :radius * 1.5)",
        "places", user="string", radius=RADIUS,
    ),
    "near in a plane": query_of(
        "SELECT r.id FROM reports r, places p WHERE p.user = :user AND near_xy(r.x, r.y, p.x, p.y, 300)",
        "places", user="string",
    ),
    "near in a plane, with a radius": query_of(
        "SELECT r.id FROM reports r WHERE near_xy(:x, :y, r.x, r.y, :radius)", x="float", y="float", radius=RADIUS
    ),
    "near in a small plane": query_of(
        "SELECT r.id FROM reports r JOIN places p ON near_xy(p.x / 1e6, p.y / 1e6, r.x / 1e6, r.y / 1e6, :small)"
        " WHERE p.user = :user",
        "places", user="string", small={"type": "float", "min": 1e-6, "max": 0.01},
    ),
    "near twice": query_of(
        "SELECT s.name, r.id FROM reports r JOIN shelters s ON near(r.lat, r.lon, s.lat, s.lon, 200000)"
        " JOIN places p ON p.user = :user WHERE near(p.lat, p.lon, r.lat, r.lon, 2000000)",
        "places", "shelters", user="string",
    ),
    "near or nothing": query_of(
        "SELECT r.id, s.name FROM reports r LEFT JOIN shelters s ON near(r.lat, r.lon, s.lat, s.lon, :radius)"
        " AND s.name <> 's1' WHERE r.type = :type",
        "shelters", type="string", radius=RADIUS,
    ),
    "near nothing": query_of(
        "SELECT r.id FROM reports r ANTI JOIN shelters s ON near(s.lat, s.lon, r.lat, r.lon, 300000)"
        " WHERE near(:lat, :lon, r.lat, r.lon, 5000000)",
        "shelters", lat="float", lon="float",
    ),
    "near something": query_of(
        "SELECT r.id FROM reports r LEFT SEMI JOIN shelters s ON near(s.lat, s.lon, r.lat, r.lon, 300000)"
        " WHERE r.type = :type",
        "shelters", type="string",
    ),
    "near in a subquery": query_of(
        "WITH near_shelters AS (SELECT r.id, s.name FROM reports r JOIN shelters s"
        " ON near(r.lat, r.lon, s.lat, s.lon, 300000)) SELECT q.name, count(*) AS c FROM near_shelters q"
        " JOIN reports r ON r.id = q.id WHERE r.type = :type GROUP BY q.name",
        "shelters", type="string",
    ),
    "groups": query_of(
        "SELECT r.type, count(*) AS n, max(r.n) AS most FROM reports r WHERE r.n > :n GROUP BY r.type"
        " HAVING count(*) > 1 AND max(n) > 2",
        n="int",
    ),
    "groups by a parameter": query_of(
        "SELECT r.n > :n AS more, :n AS than, sum(r.n * :n) AS s FROM reports r WHERE r.type = :type GROUP BY 1"
        " HAVING count(*) > :n",
        type="string", n="int",
    ),
    "groups by an alias": query_of(
        "SELECT upper(r.type) AS t, listagg(cast(r.n AS string)) WITHIN GROUP (ORDER BY r.n) AS l,"
        " percentile_disc(0.4) WITHIN GROUP (ORDER BY r.n) AS p FROM reports r WHERE r.n <> :n GROUP BY t HAVING p > 1",
        n="int",
    ),
    "groups of groups": query_of(
        "SELECT r.type, r.n % 2 AS odd, grouping_id() AS g, count(*) AS c FROM reports r WHERE r.n > :n"
        " GROUP BY r.n % 2, CUBE (r.type)",
        n="int",
    ),
    "one group": query_of("SELECT count(*) AS n FROM reports r WHERE r.type = :type", type="string"),
    "one group of functions of Spark alone": query_of(
        "SELECT any(r.n > 3) AS a, every(r.n > 3) AS e, some(r.n > 8) AS s, bit_xor(r.id) AS q, :n AS n,"
        " count(DISTINCT r.n) AS d, try_sum(r.n) FILTER (WHERE r.n < 5) AS f FROM reports r WHERE r.n < :n",
        n="int",
    ),
    "distinct": query_of("SELECT DISTINCT r.type FROM reports r WHERE r.n >= :n", n="int"),
    "in an order": query_of(
        "SELECT r.id, r.n AS k FROM reports r WHERE r.type = :type ORDER BY k DESC, id", type="string"
    ),
    "in an order of tables": query_of(
        "SELECT r.id AS n, r.n AS K FROM reports r WHERE r.type = :type ORDER BY r.n DESC NULLS FIRST, n DESC",
        type="string",
    ),
    "in an order of expressions": query_of(
        "SELECT concat(r.type, r.n) AS type, r.id FROM reports r WHERE r.n > :n ORDER BY type NULLS LAST, 2 DESC",
        n="int",
    ),
    "a common table": query_of(
        "WITH big AS (SELECT * FROM reports WHERE n > 3) SELECT big.id FROM big WHERE big.type = :type", type="string"
    ),
    "a left join": query_of(
        "SELECT r.id, p.user FROM reports r LEFT JOIN places p ON p.user = :user AND p.x > r.x WHERE r.type = 't1'",
        "places", user="string",
    ),
    "commas and joins": query_of(
        "SELECT r.id, s.name FROM reports r, places p JOIN shelters s ON s.name = concat('s', substr(p.user, 2))"
        " WHERE p.user = :user AND r.type = 't2'",
        "places", "shelters", user="string",
    ),
    "the same field": query_of(
        "SELECT q.id, n FROM reports r JOIN reports q USING (n) WHERE r.id = :n", n="int"
    ),
    "a window": query_of(
        "SELECT r.id, row_number() OVER (ORDER BY r.id) AS number FROM reports r WHERE r.type = :type", type="string"
    ),
    "windows": query_of(
        "SELECT r.id, sum(r.n) OVER w AS s, last_value(r.n) IGNORE NULLS OVER w AS l, count(*) FILTER (WHERE r.n > :n)"
        " OVER (PARTITION BY r.n % 2 ORDER BY id) AS c FROM reports r WHERE r.type = 't1' WINDOW w AS (ORDER BY r.id)",
        n="int",
    ),
    "a window over groups": query_of(
        "SELECT r.type, count(*) AS c, sum(count(*)) OVER (ORDER BY r.type) AS s FROM reports r WHERE r.n > :n"
        " GROUP BY r.type",
        n="int",
    ),
    "a subquery": query_of(
        "SELECT q.id, q.number FROM (SELECT id, type, row_number() OVER (PARTITION BY type ORDER BY id)"
        " AS number FROM reports) q WHERE q.type = :type",
        type="string",
    ),
    "subqueries of each row": query_of(
        "SELECT r.id, (SELECT max(q.id) FROM reports q WHERE q.n = r.n) AS m FROM reports r WHERE r.type = :type"
        " AND EXISTS (SELECT 1 FROM places p WHERE p.x > r.x) AND r.n IN (SELECT n FROM reports WHERE id < 50)",
        "places", type="string",
    ),
    "capitals": query_of(
        "SELECT q.*, struct(r.n AS Number, r.id) AS `a``b` FROM reports r"
        " JOIN (SELECT id AS ReportId, type FROM reports) q ON q.ReportId = r.id WHERE r.type = :type",
        type="string",
    ),
    "functions": query_of(
        """
        SELECT r.id, r.n DIV 2 AS a, r.n % 3 AS b, r.n / 2 AS c, r.type || '\\x' AS d, r.type RLIKE 't[0-9]\\\\b' AS e,
            'it\\'s "so"' AS f, r'a\\d' AS g, 1.5D + 5L AS h, r.n << 2 AS i, r.n::string AS j, CAST(r.x AS int) AS k,
            IF(r.n > 2, 'm', "l") AS l, CASE WHEN r.n IS NULL THEN 1 ELSE r.n END AS m, nvl(r.n, -1) AS o,
            r.n BETWEEN 1 AND 4 AS p, r.n <=> NULL AS q, r.type LIKE ANY ('%1', '%2') AS s, 1.50BD AS t,
            transform(array(1, r.n), v -> v + 1)[0] AS u, map('k', r.n)['k'] AS v, try_cast(r.type AS int) AS w,
            TIMESTAMP '2024-01-01 00:00:00' + INTERVAL '1' DAY + INTERVAL 5 MINUTES AS x,
            dateadd(DAY, 3, DATE '2024-01-01') AS y, extract(YEAR FROM DATE '2024-01-01') AS z,
            date_format(TIMESTAMP '2024-01-01 00:00:00', 'yyyy-MM') AS aa, unix_timestamp(DATE '2024-01-02') AS ab,
            substring(r.type FROM 2 FOR 1) AS ac, position('1' IN r.type) AS ad, trim(BOTH 't' FROM r.type) AS ae,
            overlay(r.type PLACING 'z' FROM 1) AS af, log(r.id + 1) AS ag, log(2, r.id + 1) AS ah, round(r.x, 2) AS ai,
            split(r.type, '[0-9]') AS aj, X'1F' AS ak, -r.n AS al, ~r.n AS am, r.n ^ 1 AS an, NOT r.n IN (1, 2) AS ao,
            to_json(struct(r.n AS N)) AS ap, decode(r.n, 1, 'a', 'b') AS aq, greatest(r.n, 3) AS ar, r.n != 3 AS `as`,
            named_struct('A', r.n).A AS at, date_trunc('hour', TIMESTAMP '2024-01-01 01:02:03') AS au,
            mod(r.n, 2) AS av, exists(array(r.n), v -> v > 2) AS aw, size(array(1, 2)) AS ax, hash(r.n) AS ay,
            lpad(r.type, 4, '0') AS az
        FROM reports r WHERE r.type = :type AND r.id < 40
        """,
        type="string",
    ),
}  # fmt: skip


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


def values_for(query: StandingQuery, rng: random.Random) -> dict[str, Any]:
    lat, lon = place(rng)
    values: dict[str, Any] = {
        "type": f"t{rng.randrange(5)}",
        "user": f"u{rng.randrange(23)}",
        "n": rng.randrange(9),
        "radius": float(rng.choice((100, 500.5, 3000, 111_000, 1e6, 3e6))),
        "small": float(rng.choice((1e-6, 1e-4, 0.0003, 0.01))),
        "lat": lat,
        "lon": lon,
        "x": rng.uniform(-1000, 1000),
        "y": rng.uniform(-1000, 1000),
    }
    return {each.name: values[each.name] for each in query.parameters}


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

    a = "pow(sin(radians(c - a) / 2), 2) + cos(radians(a)) * cos(radians(c)) * pow(sin(radians(d - b) / 2), 2)"
    formulas = {
        "near": f"2 * {EARTH_M} * asin(least(1.0D, sqrt({a}))) <= r",
        "near_xy": "hypot(a - c, b - d) <= r",
    }
    for name, formula in formulas.items():  # functions in Python are not possible in ON
        spark.sql(
            f"CREATE OR REPLACE TEMPORARY FUNCTION {name}(a DOUBLE, b DOUBLE, c DOUBLE, d DOUBLE, r DOUBLE)"
            f" RETURNS BOOLEAN RETURN {formula}"
        )
    return made


def alone(spark: SparkSession, query: StandingQuery, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the query gives when Spark puts the values in place of the parameters."""
    found = spark.sql(query.sql, args=dict(values))
    row = F.struct(*(F.col(f"`{name.replace('`', '``')}`") for name in found.columns))
    rows = [json.loads(each["row"]) for each in found.select(F.to_json(row).alias("row")).collect()]
    is_empty_group = len(rows) == 1 and (rows[0].get("n") == 0 or rows[0].get("d") == 0)
    return [] if is_empty_group else rows  # of an interest without records there is no result set


@pytest.mark.parametrize("name", QUERIES)
def test_all_interests_at_once_give_what_each_gives_alone(
    name: str, spark: SparkSession, views: dict[str, DataFrame]
) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, **QUERIES[name]})
    rng = random.Random(name)
    interests = [values_for(query, rng) for _ in range(8)]
    rows = [(f"i{number}", *values.values()) for number, values in enumerate(interests)]
    table = spark.createDataFrame(rows, interest_schema(query))
    compiled = compile_query(query, DATASETS)
    expected = [alone(spark, query, values) for values in interests]
    assert any(expected), "the data has something for these interests"
    for each, bytes_max in ((compiled, None), (compiled.without_grids(), 2**20)):
        results = {row["interest"]: row for row in each.run(spark, views, table, 0, bytes_max).collect()}
        for number, rows_expected in enumerate(expected):
            row = results.get(f"i{number}")
            rows_found = [] if row is None else json.loads(row["result"])
            assert row is None or (row["rows"], row["bytes"]) == (len(rows_found), len(row["result"].encode()))
            if compiled.order:
                assert rows_found == rows_expected
            else:
                assert sorted(rows_found, key=json.dumps) == sorted(rows_expected, key=json.dumps), interests[number]


def test_rows_of_a_result_set_that_is_too_large_are_not_gathered(
    spark: SparkSession, views: dict[str, DataFrame]
) -> None:
    sql = "SELECT r.id, concat('\u00e4', r.type) AS text, array(r.type) AS types FROM reports r WHERE r.id < :n"
    query = read_query("q", {"on": "reports", "period_s": 10, **query_of(sql, n="int")})
    table = spark.createDataFrame([("few", 4), ("some", 5), ("many", 60)], interest_schema(query))
    compiled = compile_query(query, DATASETS)
    whole = {row["interest"]: row for row in compiled.run(spark, views, table, 0).collect()}
    bytes_max = whole["some"]["bytes"]
    cut = {row["interest"]: row for row in compiled.run(spark, views, table, 0, bytes_max).collect()}
    assert {name: cut[name] for name in ("few", "some")} == {name: whole[name] for name in ("few", "some")}
    assert (cut["many"]["rows"], cut["many"]["result"]) == (whole["many"]["rows"], None)
    assert bytes_max < cut["many"]["bytes"] <= whole["many"]["bytes"]


def test_functions_are_those_of_spark(spark: SparkSession) -> None:
    registry = spark._jsparkSession.sessionState().functionRegistry()
    functions, found, names = registry.listFunction().iterator(), set[str](), set[str]()
    while functions.hasNext():
        name = functions.next()
        info = registry.lookupFunction(name).get()
        if info.getSource() == "built-in":  # other tests of this session have registered ours
            names.add(name.funcName())
        if info.getGroup() == "agg_funcs":
            found.add(name.funcName())
    assert "any" in found
    assert found - {"any"} <= AGGREGATES
    unknown = {name for name in names if name.isidentifier() and not hasattr(F, name)} - AGGREGATES - NOT_IN_PYTHON
    operators = {"and", "any", "between", "case", "div", "in", "not", "or"}
    refused_or_for_tables = {"from_protobuf", "to_protobuf", "localtime", "range", "collations", "sql_keywords"}
    of_other_packages = {"from_avro", "to_avro", "schema_of_avro"}
    of_tables = {"python_worker_logs", "variant_explode", "variant_explode_outer"}
    assert unknown <= operators | refused_or_for_tables | of_other_packages | of_tables


@pytest.mark.parametrize(
    ("expression", "good", "bad"),
    [
        ("r.id + :n", 6, None),
        ("r.id - :n - :n", 3, None),
        ("r.id * :n", 5, None),
        ("-(:n - 2)", 1, -(2**63) + 3),
        ("sum(:n * r.id) OVER ()", 5, None),
        ("r.id DIV (:n - 1)", None, 0),
        ("CAST(:n * 1e10 AS BIGINT)", 10**10, None),
        ("CAST(:n AS INT)", 1, None),
        ("CAST(r.type AS INT)", None, None),
        ("bigint(:n * 1e10)", 10**10, None),
        ("floor(:n * 1e10)", 10**10, None),
        ("ceil(:n * -1e10)", -(10**10), None),
        ("floor(if(:n > 1, double('NaN'), 1.5))", 1, None),
        ("floor(:n)", 1, 2**63 - 1),
        ("abs(0 - :n - 1)", 2, None),
        ("negative(0 - :n - 1)", 2, None),
        ("(0 - :n - 1) DIV -1", 2, None),
        ("round(:n, -1)", 0, None),
        ("CAST(:n AS TIMESTAMP)", "1970-01-01T00:00:01.000Z", None),
        ("to_timestamp(:n)", "1970-01-01T00:00:01.000Z", None),
        ("date_from_unix_date(:n)", "1970-01-02", None),
        ("substring('abc', :n)", "abc", None),
        ("left('abc', :n)", "a", None),
        ("'a' LIKE concat('a', if(:n > 1, char(92), ''))", True, True),
        ("'a%' LIKE concat('_', if(:n > 1, concat(char(92), '%'), '_'))", True, True),
        ("concat('a', char(92)) LIKE concat('a', char(92), char(92))", True, True),
        ("cast(parse_json(if(:n > 1, '{', '1')) AS INT)", 1, None),
        ("array(5, 6)[:n - 1]", 5, None),
        ("to_json(map(:n, 1, 1, 2))", '{"1":2}', f'{{"{2**63 - 1}":1,"1":2}}'),
        ("to_json(map(nullif(:n, 1), 1))", None, f'{{"{2**63 - 1}":1}}'),
        ("'a' LIKE ANY (if(:n > 1, concat('a', char(92), 'b'), 'a'), 'c')", True, False),
        ("string(unbase64(if(:n > 1, 'Y', 'YQ==')))", "a", None),
        ("decode(unhex(if(:n > 1, 'FF', '41')), 'utf-8')", "A", None),
        ("timestamp_seconds(:n)", "1970-01-01T00:00:01.000Z", None),
        ("timestamp_millis(:n)", "1970-01-01T00:00:00.001Z", None),
        ("from_unixtime(:n)", "1970-01-01 00:00:01", None),
        ("INTERVAL 1 DAY / (2 - least(:n, 2)) > INTERVAL 1 HOUR", True, None),
        ("near(to_number(if(:n > 1, 'a', '1'), '9'), 1, 1, 1, 10)", True, False),
        ("near(unix_seconds(timestamp_seconds(:n)), 1, 1, 1, 10)", True, False),
    ],
)
def test_what_cannot_be_computed_is_null_for_its_interest_alone(
    expression: str, good: Any, bad: Any, spark: SparkSession, views: dict[str, DataFrame]
) -> None:
    sql = f"SELECT {expression} AS found FROM reports r WHERE r.id IN (5, if(:n > 0, 5, 6))"
    query = read_query("q", {"on": "reports", "period_s": 10, **query_of(sql, n="int")})
    table = spark.createDataFrame([("good", 1), ("bad", 2**63 - 1)], interest_schema(query))
    rows = compile_query(query, DATASETS).run(spark, views, table, 0).collect()
    assert {row["interest"]: json.loads(row["result"])[0].get("found") for row in rows} == {"good": good, "bad": bad}


def test_sums_that_are_too_large_are_null(spark: SparkSession, views: dict[str, DataFrame]) -> None:
    sql = "SELECT sum(:n) AS s, count(*) AS c FROM reports r WHERE r.id < 2"
    query = read_query("q", {"on": "reports", "period_s": 10, **query_of(sql, n="int")})
    table = spark.createDataFrame([("good", 1), ("bad", 2**63 - 1)], interest_schema(query))
    rows = compile_query(query, DATASETS).run(spark, views, table, 0).collect()
    assert {row["interest"]: json.loads(row["result"]) for row in rows} == {
        "good": [{"s": 2, "c": 2}],
        "bad": [{"c": 2}],
    }


def test_no_variable_stands_for_a_secret(spark: SparkSession, views: dict[str, DataFrame]) -> None:
    sql = (
        "SELECT '${env:PATH}' AS a, '${system:java.home}' AS b, '${spark.app.name}' AS c FROM reports r WHERE r.id = :n"
    )
    query = read_query("q", {"on": "reports", "period_s": 10, **query_of(sql, n="int")})
    table = spark.createDataFrame([("i", 1)], interest_schema(query))
    [row] = compile_query(query, DATASETS).run(spark, views, table, 0).collect()
    assert json.loads(row["result"]) == [{"a": "${env:PATH}", "b": "${system:java.home}", "c": "${spark.app.name}"}]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("'it''s'", r"'it\'s'"),
        ('"so ""so"""', "'so \"so\"'"),
        ("''''", r"'\''"),
        ("''", "''"),
        ('"it\'s"', r"'it\'s'"),
        ("'a\"\"b'", "'a\"\"b'"),
        (r"'a\'b'", r"'a\'b'"),
        (r"'\\'", r"'\\'"),
    ],
)
def test_two_quotes_in_a_text_are_one(text: str, written: str) -> None:
    sql = f"SELECT {text} AS a FROM reports WHERE n = :n"
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"n": "int"}})
    assert compile_query(query, DATASETS).tree.expressions[1].this.sql(StandingSql) == written


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
    ("SELECT id, rand() AS x FROM reports WHERE type = :type", "before the record is stored"),
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
    ("SELECT id FROM reports WHERE type = :type ORDER BY abs(n)", "no such column"),
    ("SELECT id FROM reports WHERE type = :type ORDER BY n", "no such column"),
    ("SELECT r.id FROM reports r RIGHT JOIN reports q ON q.id = r.id WHERE r.type = :type", "LEFT JOIN"),
    ("SELECT r.id FROM reports r, reports q WHERE r.type = :type AND near(r.x, r.y, q.x, q.y, q.n)", "min and max"),
    ("SELECT id, uniform(1, 9) AS x FROM reports WHERE type = :type", "before the record is stored"),
    ("SELECT id, raise_error('x') AS x FROM reports WHERE type = :type", "for all users"),
    ("SELECT id, xpath_int(type, 'a') AS x FROM reports WHERE type = :type", "for all users"),
    ("SELECT id FROM reports WHERE type RLIKE :type", "rlike() fails for some values, for all users"),
    ("SELECT id FROM reports WHERE regexp_replace(type, :type, '') = ''", "regexp_replace() fails for some values"),
    ("SELECT id, split_part(type, 'a', n) AS x FROM reports WHERE type = :type", "write a literal"),
    ("SELECT id FROM reports WHERE type LIKE :type ESCAPE '/'", "like() fails for some values"),
    ("SELECT id, regexp_replace(type, 'a', :type) AS x FROM reports", "regexp_replace() fails for some values"),
    ("SELECT id, regexp_extract(:type, '(a)', n) AS x FROM reports", "regexp_extract() fails for some values"),
    ("SELECT id, format_string(:type, n) AS x FROM reports", "format_string() fails for some values"),
    ("SELECT id, date_format(current_date, :type) AS x FROM reports", "gives another time"),
    ("SELECT id, date_format(DATE '2024-01-01', :type) AS x FROM reports", "date_format() fails for some values"),
    ("SELECT id, convert_timezone('UTC', :type, _arrived) AS x FROM reports", "write a literal"),
    ("SELECT id, str_to_map(type, :type) AS x FROM reports", "str_to_map() fails for some values"),
    ("SELECT id, encode(:type, 'US-ASCII') AS x FROM reports", "use UTF-8"),
    ("SELECT id, map_from_arrays(array(:type), array(n)) AS x FROM reports", "for all users"),
    ("SELECT id FROM reports WHERE near(element_at(array(1, 2), n), 1, 1, 1, 10) AND type = :type", "write a literal"),
    ("SELECT id, unix_timestamp() AS x FROM reports WHERE type = :type", "execution_time"),
    ("SELECT id FROM reports TABLESAMPLE (50 PERCENT) WHERE type = :type", "TABLESAMPLE takes other rows"),
    ("SELECT r.id FROM (SELECT id, type FROM reports LIMIT 3) r WHERE r.type = :type", "without an ORDER BY"),
    ("SELECT q.a FROM (SELECT TRANSFORM(type) USING 'cat' AS (a) FROM reports) q WHERE q.a = :type", "reaches outside"),
    ("SELECT id FROM reports WHERE type = :type AND id = _cells(lat, lon, 1, 1)[0]", "reaches outside"),
    ("WITH reports AS (SELECT * FROM reports) SELECT id FROM reports WHERE type = :type", "choose another name"),
    ("SELECT r.ID FROM reports r WHERE r.type = :type", "in small letters"),
    ("SELECT id, 'a FROM reports WHERE type = :type", "is a quote missing"),
    ("SELECT id FROM reports WHERE type = :type AND n = " + "(" * 5000 + "1" + ")" * 5000, "nested too deeply"),
    ("SELECT /*+ BROADCAST(r) */ r.id FROM reports r WHERE r.type = :type", "HINT is not possible"),
    ("SELECT type, count(*) AS n FROM reports WHERE type = :type GROUP BY type WITH CUBE", "GROUP BY names"),
    ("SELECT type, count(*) AS n FROM reports WHERE type = :type GROUP BY ALL", "GROUP BY names"),
    ("SELECT r.id FROM reports r WHERE r.type = :type AND near(r.x, r.y, 3)", "five arguments"),
]


@pytest.mark.parametrize(("sql", "words"), REFUSED)
def test_what_cannot_be_executed_is_refused_with_the_reason(sql: str, words: str) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"type": "string"}})
    with pytest.raises(ConfigError, match="query 'q': ") as error:
        compile_query(query, DATASETS)
    assert words in str(error.value)


@pytest.mark.parametrize("samples", [[], ["reports=nothing.jsonl"]])
def test_a_query_is_tried_with_the_datasets_of_its_file(samples: list[str]) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": "SELECT r.id FROM reports r"})
    given: Any = SimpleNamespace(queries={"q": query}, datasets={})
    with pytest.raises(ConfigError, match=r"'reports', which the file does not have: copy its \[datasets\.reports\]"):
        try_query(given, argparse.Namespace(name="q", sample=samples, params=[], json=False))


@pytest.mark.parametrize(
    ("on", "reads", "words"),
    [
        ("shelters", [], "it is on 'shelters', a static dataset, which has no new records: name it in reads"),
        ("report", [], "there is no dataset 'report': register it first; those are others, "),
        ("reports", ["others"], "reads has 'others', which is neither keyed nor static"),
    ],
)
def test_datasets_of_a_kind_that_cannot_be_read_so_are_refused(on: str, reads: list[str], words: str) -> None:
    others = read_dataset("others", {"kind": "append", "fields": {"name": "string"}})
    sql = f"SELECT a.name FROM {', '.join([f'{on} a', *reads])} WHERE a.name = :name"
    query = read_query("q", {"on": on, "reads": reads, "period_s": 10, "sql": sql, "parameters": {"name": "string"}})
    with pytest.raises(ConfigError, match=f"query 'q': {words}"):
        compile_query(query, DATASETS | {"others": others})


def test_what_only_spark_can_tell_is_found_on_empty_tables(spark: SparkSession) -> None:
    sql = "SELECT nosuch(id) AS a FROM reports WHERE type = :type"
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"type": "string"}})
    with pytest.raises(ConfigError, match=r"query 'q': .*`nosuch`"):
        compile_query(query, DATASETS).check(spark, DATASETS)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT id FROM reports WHERE n > :n", "all rows are compared"),
        ("SELECT id FROM reports WHERE type = 'a' OR near(lat, lon, :n, 2, 1000)", "all pairs are compared"),
        ("SELECT r.id FROM reports r LEFT JOIN reports q ON q.n = :n AND q.id = r.id", "links r with"),
    ],
)
def test_what_compares_everything_with_everything_is_warned_of(sql: str, words: str) -> None:
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"n": "int"}})
    assert any(words in warning for warning in compile_query(query, DATASETS).warnings)


@pytest.mark.parametrize(
    ("condition", "warnings"),
    [
        ("naer(lat, lon, 1, 2, 3)", ["naer() is no known function: did you mean near()? `dynamoth query try` says"]),
        ("zzz(id) = 1 AND zzz(n) = 2", ["zzz() is no known function: `dynamoth query try` says"]),
        ("year(_arrived) = 2026 AND int(n) = 1 AND LOWER(id) = 'a' AND execution_time() > _arrived", []),
    ],
)
def test_a_function_that_looks_misspelt_is_warned_of_once(condition: str, warnings: list[str]) -> None:
    sql = f"SELECT id FROM reports WHERE type = :type AND {condition}"
    query = read_query("q", {"on": "reports", "period_s": 10, "sql": sql, "parameters": {"type": "string"}})
    found = compile_query(query, DATASETS).warnings
    assert [each.partition(" whether")[0] for each in found] == warnings


@pytest.mark.parametrize(
    "name", ["equality", "near a place", "near a user", "near twice", "near or nothing", "near nothing"]
)
def test_no_interest_is_compared_with_all_rows(name: str, spark: SparkSession, views: dict[str, DataFrame]) -> None:
    """Nor is any table multiplied with another one: every join has an equality."""
    query = read_query("q", {"on": "reports", "period_s": 10, **QUERIES[name]})
    compiled = compile_query(query, DATASETS)
    assert compiled.warnings == ()
    rng = random.Random(1)
    rows = [(f"i{number}", *values_for(query, rng).values()) for number in range(3)]
    table = spark.createDataFrame(rows, interest_schema(query))
    statement: Any = spark.sql(compiled.sql(spark, views, table, 0))
    plan = statement._jdf.queryExecution().executedPlan().toString()
    assert "HashJoin" in plan or "SortMergeJoin" in plan
    assert "CartesianProduct" not in plan
    assert "NestedLoop" not in plan
