"""What an execution of a standing query costs: for all of its interests at once, on Spark.

Run with ``python -m bench.data_cluster``; ``--help`` tells the rest. Three queries: of a type, near a place and of a
type, and near the user, whose place is in a keyed dataset. The interests have 100 to 1,000 metres; records, interests
and users' places are spread evenly. Each execution is timed after one that is not; result sets are made, and with
``--publish`` stored in the logs of a real Redis server, too.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dynamoth.data.datasets import Dataset, read_dataset
from dynamoth.data.queries import StandingQuery, read_query
from dynamoth_analytics.cluster.process import JAVA_OPTIONS
from dynamoth_analytics.cluster.publishing import METRICS_SCHEMA, Publication
from dynamoth_analytics.cluster.servers import read_servers
from dynamoth_analytics.cluster.sql import compile_query
from dynamoth_analytics.session import open_session
from dynamoth_cli.local.embedded import EmbeddedRedis

TYPES = 8
PER_TYPE = 100
"""Interests of one type, in the query by type alone: its types are as many as that makes."""

DATASETS: dict[str, Dataset] = {
    "reports": read_dataset(
        "reports",
        {
            "kind": "append",
            "fields": {
                "id": "int",
                "kind": "string",
                "type": "string",
                "lat": "float",
                "lon": "float",
                "text": "string",
            },
        },
    ),
    "places": read_dataset(
        "places", {"kind": "keyed", "key": "user", "fields": {"user": "string", "lat": "float", "lon": "float"}}
    ),
}

METRES = {"type": "float", "min": 100, "max": 1000}

QUERIES: dict[str, StandingQuery] = {
    name: read_query(name, {"on": "reports", "period_s": 10, **definition})
    for name, definition in {
        "of_kind": {
            "sql": "SELECT r.id, r.text FROM reports r WHERE r.kind = :kind",
            "parameters": {"kind": "string"},
        },
        "near_place": {
            "sql": "SELECT r.id, r.text FROM reports r"
            " WHERE r.type = :type AND near(r.lat, r.lon, :lat, :lon, :metres)",
            "parameters": {"type": "string", "lat": "float", "lon": "float", "metres": METRES},
        },
        "near_user": {
            "sql": "SELECT r.id, r.text FROM reports r JOIN places p ON p.user = :user"
            " WHERE near(r.lat, r.lon, p.lat, p.lon, :metres)",
            "reads": ["places"],
            "parameters": {"user": "string", "metres": METRES},
        },
    }.items()
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--interests", type=int, nargs="+", default=[100_000], metavar="N")
    parser.add_argument("--records", type=int, nargs="+", default=[10_000], metavar="N")
    parser.add_argument("--users", type=int, metavar="N", help="users' places; default: as many as interests")
    parser.add_argument("--queries", nargs="+", default=[*QUERIES], choices=[*QUERIES])
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    parser.add_argument("--publish", action="store_true", help="store the result sets in logs, and notify")
    parser.add_argument("--seconds-max", type=float, default=0, metavar="S", help="fail above this median")
    arguments = parser.parse_args()
    place = argparse.Namespace(master="local[2]", remote=None, spark_log="off")
    slowest = 0.0
    with open_session(place, "bench", JAVA_OPTIONS) as spark, tempfile.TemporaryDirectory() as folder:
        for interests in arguments.interests:
            for records in arguments.records:
                users = arguments.users or interests
                views = _views(spark, Path(folder, f"{interests}-{records}-{users}"), records, users, interests)
                for name in arguments.queries:
                    table = _interests(spark, Path(folder, f"{name}-{interests}"), name, interests)
                    seconds, sets, rows = _measure(spark, name, views, table, arguments)
                    slowest = max(slowest, seconds)
                    sys.stdout.write(
                        f"{name:12} {interests:>9} interests {records:>9} records {users:>9} users: {seconds:6.2f} s,"
                        f" {sets} result sets, {rows} rows\n"
                    )
                    sys.stdout.flush()
    if arguments.seconds_max and slowest > arguments.seconds_max:
        sys.stdout.write(f"slower than {arguments.seconds_max:g} s\n")
        return 1
    return 0


def _measure(
    spark: SparkSession, name: str, views: dict[str, DataFrame], table: DataFrame, arguments: argparse.Namespace
) -> tuple[float, int, int]:
    """Return the median of the seconds, and how many result sets and rows there are."""
    compiled, times, sets, rows = compile_query(QUERIES[name], DATASETS), [], 0, 0
    with EmbeddedRedis() as log, EmbeddedRedis() as cluster:
        servers = read_servers(f"l1=redis://127.0.0.1:{log.port}")
        for run in range(arguments.runs + 1):
            began = time.monotonic()
            results = compiled.run(spark, views, table, 0)
            if arguments.publish:
                publication = Publication(
                    servers, f"dynamoth://127.0.0.1:{cluster.port}", name, 1, run + 1, 0, 1, 16_384, 2**20, 100, 3600.0
                )
                metrics: Any = results.mapInArrow(publication.publish, METRICS_SCHEMA).agg(
                    F.sum("result_sets"), F.sum("rows")
                )
            else:
                metrics = results.agg(F.count("*"), F.sum("rows"), F.sum(F.length("result")))
            sets, rows, *_ = metrics.collect()[0]
            if run:
                times.append(time.monotonic() - began)
    return statistics.median(times), sets, rows


def _views(spark: SparkSession, folder: Path, records: int, users: int, interests: int) -> dict[str, DataFrame]:
    kinds = max(TYPES, interests // PER_TYPE)
    own = ["cast(0 AS int) AS _partition", "id AS _offset", "cast(NULL AS timestamp) AS _arrived"]
    reports = spark.range(records).selectExpr(
        "id", f"concat('k', id % {kinds}) AS kind", f"concat('t', id % {TYPES}) AS type", "60 + rand(1) AS lat",
        "24 + 2 * rand(2) AS lon", "repeat('x', 300) AS text", *own,
    )  # fmt: skip
    places = spark.range(users).selectExpr(
        "concat('u', id) AS user", "60 + rand(3) AS lat", "24 + 2 * rand(4) AS lon", *own
    )
    return {name: _stored(spark, rows, folder / name) for name, rows in (("reports", reports), ("places", places))}


def _interests(spark: SparkSession, folder: Path, name: str, count: int) -> DataFrame:
    kinds = max(TYPES, count // PER_TYPE)
    columns = {
        "of_kind": [f"concat('k', id % {kinds}) AS __kind"],
        "near_place": [
            f"concat('t', id % {TYPES}) AS __type", "60 + rand(5) AS __lat", "24 + 2 * rand(6) AS __lon",
            "100 + 900 * rand(7) AS __metres",
        ],
        "near_user": ["concat('u', id) AS __user", "100 + 900 * rand(7) AS __metres"],
    }  # fmt: skip
    return _stored(spark, spark.range(count).selectExpr("concat('i', id) AS _interest", *columns[name]), folder)


def _stored(spark: SparkSession, rows: DataFrame, folder: Path) -> DataFrame:
    """Return rows that are read from files, as those of the data cluster are."""
    rows.write.mode("overwrite").parquet(str(folder))
    return spark.read.parquet(str(folder))


if __name__ == "__main__":
    sys.exit(main())
