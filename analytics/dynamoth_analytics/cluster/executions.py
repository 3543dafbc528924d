"""The executions of a standing query: one job of Spark for each, for all interests at once.

An execution reads everything as of the end of its window: the new records up to its offsets, keyed datasets as
snapshots at them, static datasets as they were loaded then, and the interests that were registered before the end was
sealed. So it has the same result sets whenever it is repeated.

The driver reads the tables of a small window (``small_windows``), and Spark those of others (``source``).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast
from pyspark.sql.pandas.types import from_arrow_schema

from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import Window, WindowEnd
from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.context import ClusterContext
from dynamoth_analytics.cluster.interest_table import InterestTable, table_schema
from dynamoth_analytics.cluster.outdated import OutdatedInterests
from dynamoth_analytics.cluster.publishing import COUNTS_SCHEMA
from dynamoth_analytics.cluster.small_windows import PAIRS_MAX, ROWS_MAX, SETTINGS, Table, pairs
from dynamoth_analytics.cluster.sql.compiled import compile_query, without_large
from dynamoth_analytics.cluster.sql.schema import INTEREST
from dynamoth_analytics.cluster.storage.batches import record_schema

PARTITIONS = "spark.sql.shuffle.partitions"
"""Of Spark: in this many parts, interests are joined."""


class Executions:
    """The executions of one query, one at a time.

    Args:
        context: of the data cluster.
        query: with this version of its definition.
        datasets: those of the query, by name.

    Raises ConfigError where the SQL cannot be compiled.

    """

    def __init__(self, context: ClusterContext, query: StandingQuery, datasets: Mapping[str, Dataset]) -> None:
        self._context = context
        self._query = query
        self._datasets = datasets
        self._compiled = compile_query(query, datasets)
        self.interests = InterestTable(context.servers, context.table_folder(query.name), query)
        self._outdated = OutdatedInterests()
        #: Whether Spark has executed this version of the query in this process.
        self._has_executed = False

    def check(self) -> None:
        """Have Spark analyse the SQL. Raises ConfigError where it cannot be executed."""
        self._compiled.check(self._context.spark, self._datasets)

    def run(self, spark: SparkSession, execution: int, window: Window) -> Counter[str]:
        """Execute the query for a window, and publish the result sets; return their counts (``publishing.COUNTS``).

        A result set that a log has already is not appended again. Raises RecordsLost, LogServerFailed, OSError and
        errors of Spark: call it again then with the same arguments. Raises TakenOver, also as the text of an error of
        Spark (``failures.is_taken_over``).

        Args:
            spark: the session of the query's stream: views of the same name are others elsewhere.
            execution: its number.
            window: what it reads.

        """
        query, context, end = self._query, self._context, window.end
        publisher = context.publisher(query, execution, end["tick_ms"])
        self.interests.refresh()
        self._outdated.end(publisher, self.interests)
        counts: Counter[str] = Counter()
        file, interests_count = self.interests.file(end.get("sealed_ms", end["tick_ms"]))
        if not interests_count and self._has_executed:
            return counts
        self._has_executed = True  # once without interests, too: so Java is warm when the first ones come
        interests: DataFrame = spark.read.schema(from_arrow_schema(table_schema(query))).parquet(str(file))
        tables = None
        if interests_count <= ROWS_MAX:
            tables = context.small_windows.tables(query, self._datasets, window)
        for name, setting in SETTINGS.items():
            spark.conf.set(name, setting if tables is not None else str(context.spark.conf.get(name)))
        if tables is None:
            results = self._large(spark, window, interests)
        else:
            has_grids = pairs(tables, interests_count) > PAIRS_MAX
            results = self._small(spark, end["tick_ms"], interests, tables, has_grids=has_grids)
        results = without_large(results, query.result_bytes_max)
        for row in results.mapInArrow(publisher.publish, COUNTS_SCHEMA).collect():
            counts.update(row.asDict())
        return counts

    def _small(
        self, spark: SparkSession, tick_ms: int, interests: DataFrame, tables: Mapping[str, Table], *, has_grids: bool
    ) -> DataFrame:
        """Return the result sets of a small window, in a plan of one partition."""
        views = {name: self._table_view(spark, name, table).coalesce(1) for name, table in tables.items()}
        compiled = self._compiled if has_grids else self._compiled.without_grids()
        return compiled.run(spark, views, interests.coalesce(1), tick_ms)

    def _large(self, spark: SparkSession, window: Window, interests: DataFrame) -> DataFrame:
        """Return the result sets of any other window."""
        views = {name: self._view(spark, name, window.end) for name in self._query.reads}
        views[self._query.on], are_all = self._records(spark, window)
        if are_all:  # each task joins its own interests with all of them, and no row moves to another task
            interests = interests.repartition(int(str(spark.conf.get(PARTITIONS))), INTEREST)
        bytes_max = None if are_all else self._query.result_bytes_max
        return self._compiled.run(spark, views, interests, window.end["tick_ms"], bytes_max)

    def _table_view(self, spark: SparkSession, name: str, table: Table) -> DataFrame:
        """Return a table that the driver has read."""
        schema = from_arrow_schema(record_schema(self._datasets[name]))
        rows: DataFrame = spark.read.schema(schema).parquet(*map(str, table.files))
        return rows

    def _records(self, spark: SparkSession, window: Window) -> tuple[DataFrame, bool]:
        """Return the new records of a window, and whether each task gets all of them, as they are few."""
        query = self._query
        table = self._context.small_windows.records(query, self._datasets[query.on], window)
        if table is not None:
            rows = self._table_view(spark, query.on, table)
            # With a hint, Spark executes several joins in the order in which they are written.
            return rows if query.reads else broadcast(rows), True
        reader: Any = spark.read.format("dynamoth").options(**self._context.source_options())
        reader = reader.option("dataset", query.on).option("start", json.dumps(dict(window.start)))
        return reader.option("end", json.dumps(dict(window.end))).load(), False

    def _view(self, spark: SparkSession, name: str, end: WindowEnd) -> DataFrame:
        """Return a dataset besides the one that the query is on, as of the end of a window."""
        dataset = self._datasets[name]
        if dataset.kind == "keyed":
            return self._context.snapshots.at(spark, dataset, end["offsets"])
        reader: Any = spark.read.format("dynamoth").options(**self._context.source_options()).option("dataset", name)
        loaded = end.get("static", {}).get(name)
        if loaded is not None:
            reader = reader.option("loaded", str(loaded))
        rows: DataFrame = reader.load()
        return rows
