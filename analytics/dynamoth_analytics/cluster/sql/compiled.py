"""SQL of standing queries: from one interest with parameters to all interests at once.

Theory of operation
-------------------
What a query means is simple: for each interest, put its values in place of the parameters, and execute the SQL. What is
executed is one statement for all interests: parameters become columns of the *interest table*, which is joined with the
rest, and the interest is added to what is selected, grouped and partitioned by. ``r.type = :type`` is then a join by
equality, so an interest costs nothing for the records that do not concern it (BAD, section 3: subscriptions are
aggregated; the parameter join is pushed down).

``near(lat1, lon1, lat2, lon2, metres)`` and ``near_xy(x1, y1, x2, y2, distance)`` become a join by the cells of a grid,
and the exact distance (``near``, ``spatial``).

What cannot be executed for all interests with exactly the same result is refused when the query is registered
(``statement``, ``compiler``).
"""

# pyright: reportPrivateImportUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import sqlglot
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType
from sqlglot import exp

from dynamoth.data.datasets import Dataset
from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.sql import spatial
from dynamoth_analytics.cluster.sql.compiler import Compiler, Ordering
from dynamoth_analytics.cluster.sql.dialect import StandingSql
from dynamoth_analytics.cluster.sql.schema import INTEREST, INTERESTS, interest_schema, view_schema
from dynamoth_analytics.cluster.sql.statement import TICK, refusal

FOUND, ROWS, BYTES = "_found", "_rows", "_bytes"
"""Columns beside those of the interest and of the query."""


@dataclass(frozen=True)
class CompiledQuery:
    """A query that is executed for all of its interests at once."""

    query: StandingQuery
    tree: exp.Select
    #: The same without grids, for tables that are small.
    exact_tree: exp.Select
    #: By which the rows of a result set are sorted first; then by all columns.
    order: tuple[Ordering, ...]
    #: What makes it slow.
    warnings: tuple[str, ...] = ()

    def without_grids(self) -> CompiledQuery:
        """Return the query that compares all pairs of rows where this one joins by the cells of grids."""
        return replace(self, tree=self.exact_tree)

    def run(
        self,
        spark: SparkSession,
        views: Mapping[str, DataFrame],
        interests: DataFrame,
        tick_ms: int,
        gathered_bytes_max: int | None = None,
    ) -> DataFrame:
        """Return the result sets of the interests that have rows.

        Args:
            spark: the session; temporary views of it are replaced.
            views: the rows of each dataset, by name.
            interests: the interest table.
            tick_ms: time of the execution.
            gathered_bytes_max: how much a result set may take. The rows of a larger one are not gathered in memory: its
                result is NULL, and its size a lower bound. None: all are gathered, which takes less time.

        Returns:
            The columns interest, rows (their number), result (a JSON array of them) and bytes (of that array).

        """
        rows = spark.sql(self.sql(spark, views, interests, tick_ms))
        columns = [field for field in rows.schema.fields if field.name != INTEREST]
        names = [field.name for field in columns]
        if gathered_bytes_max is None:
            found = rows.groupBy(INTEREST).agg(self._gathered(names, "true").alias(FOUND))
            return _results(found.withColumn(ROWS, F.size(FOUND)), F.to_json(FOUND), F.lit(0))
        until_here = Window.partitionBy(INTEREST).orderBy(INTEREST).rowsBetween(Window.unboundedPreceding, 0)
        counted = rows.withColumn(BYTES, F.sum(_bytes_at_least(columns)).over(until_here))
        found = counted.groupBy(INTEREST).agg(
            F.count("*").cast("int").alias(ROWS),
            F.max(BYTES).alias(BYTES),
            self._gathered(names, f"{BYTES} <= {gathered_bytes_max}").alias(FOUND),
        )
        return _results(found, F.when(F.col(BYTES) <= gathered_bytes_max, F.to_json(FOUND)), F.col(BYTES))

    def sql(self, spark: SparkSession, views: Mapping[str, DataFrame], interests: DataFrame, tick_ms: int) -> str:
        """Return the statement, over temporary views that are made."""
        if self.tree is not self.exact_tree:
            spatial.register(spark)
        tree = self.tree.copy()
        named = {**views, INTERESTS: interests}
        for name, rows in named.items():
            rows.createOrReplaceTempView(self._view(name))
        for table in tree.find_all(exp.Table):
            if table.name in named:
                table.set("this", exp.to_identifier(self._view(table.name)))
        for call in list(tree.find_all(exp.Anonymous)):
            if call.name.lower() == TICK:
                at = datetime.fromtimestamp(tick_ms / 1000, UTC)
                call.replace(sqlglot.parse_one(f"TIMESTAMP '{at:%Y-%m-%d %H:%M:%S.%f}+00:00'", dialect=StandingSql))
        return tree.sql(StandingSql, normalize_functions=False)

    def _view(self, name: str) -> str:
        return f"_{len(self.query.name)}_{self.query.name}_{name}"  # no two pairs of names give the same

    def _gathered(self, columns: Sequence[str], condition: str) -> Column:
        """Return the rows for which a condition holds, by the query's own order, and then by all columns."""
        row = f"struct({', '.join(map(_quoted, columns))})"
        rows = f"collect_list({row}) FILTER (WHERE {condition})"
        if not self.order:
            return F.expr(f"array_sort({rows})")
        tests: list[str] = []
        for name, is_descending, has_nulls_first in (*self.order, *(Ordering(name, False, True) for name in columns)):
            a, b = f"a.{_quoted(name)}", f"b.{_quoted(name)}"
            less, more = (1, -1) if is_descending else (-1, 1)
            null, other = (-1, 1) if has_nulls_first else (1, -1)
            tests += [
                f"WHEN {a} IS NULL AND {b} IS NOT NULL THEN {null}",
                f"WHEN {a} IS NOT NULL AND {b} IS NULL THEN {other}",
                f"WHEN {a} < {b} THEN {less}",
                f"WHEN {a} > {b} THEN {more}",
            ]
        return F.expr(f"array_sort({rows}, (a, b) -> CASE {' '.join(tests)} ELSE 0 END)")

    def check(self, spark: SparkSession, datasets: Mapping[str, Dataset]) -> list[str]:
        """Have Spark analyse the query on empty tables; return the names of the result columns. Raises ConfigError."""
        views = {name: spark.createDataFrame([], view_schema(datasets[name])) for name in self.query.datasets}
        interests = spark.createDataFrame([], interest_schema(self.query))
        try:
            columns = spark.sql(self.sql(spark, views, interests, 0)).columns
            self.run(spark, views, interests, 0).schema  # noqa: B018 analyses it
        except PySparkException as error:
            raise refusal(self.query, _spark_reason(error)) from error
        return [name for name in columns if name != INTEREST]


def without_large(results: DataFrame, bytes_max: int) -> DataFrame:
    """Return result sets with NULL in place of a result of more than ``bytes_max``: a worker gets many in a batch."""
    return results.withColumn("result", F.when(F.col("bytes") <= bytes_max, F.col("result")))


def compile_query(query: StandingQuery, datasets: Mapping[str, Dataset]) -> CompiledQuery:
    """Compile the SQL of a query. Raises ConfigError, which names cause and cure."""
    compiler = Compiler(query, datasets)
    compiler.compile()
    return CompiledQuery(query, compiler.tree, compiler.exact_tree, compiler.order, tuple(compiler.warnings))


def _results(found: DataFrame, result: Column, bytes_at_least: Column) -> DataFrame:
    results = found.select(
        F.col(INTEREST).alias("interest"),
        F.col(ROWS).alias("rows"),
        result.alias("result"),
        bytes_at_least.alias(BYTES),
    )
    size = F.coalesce(F.octet_length("result"), BYTES).cast("long").alias("bytes")
    return results.select("interest", "rows", "result", size)


def _bytes_at_least(columns: Sequence[StructField]) -> Column:
    """Return how many bytes the JSON of a row has at least: those of its texts, and of what has texts."""
    size = F.lit(2)
    for field in columns:
        value = F.col(_quoted(field.name))
        if isinstance(field.dataType, StringType):
            size += F.coalesce(F.octet_length(value), F.lit(0))
        elif isinstance(field.dataType, ArrayType | MapType | StructType):
            size += F.coalesce(F.octet_length(F.to_json(F.struct(value))), F.lit(0))
    return size.cast("long")


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _spark_reason(error: PySparkException) -> str:
    """Return the first sentence of what Spark says."""
    text = str(error).split("\n")[0]
    return re.sub(r"^\[[A-Z_.]+\] ", "", text)[:300]
