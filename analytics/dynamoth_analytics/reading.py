"""Reads the tables of a recording (``dynamoth.recording``) as data frames.

Only the hours that were asked for are read. Two recorders may have written the same event: one row stays.
Where the clocks of their machines differ, all times become those of one of them.
Columns that this version does not know are kept; those that are missing are null, and named in ``Recording.missing``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dynamoth.errors import ConfigError
from dynamoth.recording import BROKER_INTERESTS, CHANNELS, SERVERS, TABLES, Table, Type
from dynamoth_analytics.errors import BadRecording, spark_errors
from dynamoth_analytics.files import check_recording, files_of, is_url

SPARK_TYPES: dict[Type, DataType] = {
    Type.TIME: TimestampType(),
    Type.TEXT: StringType(),
    Type.WHOLE: LongType(),
    Type.NUMBER: DoubleType(),
    Type.TRUTH: BooleanType(),
    Type.BYTES: BinaryType(),
    Type.TEXTS: ArrayType(StringType()),
}

SCHEMAS = {
    table.name: StructType([StructField(column.name, SPARK_TYPES[column.type]) for column in table.columns])
    for table in TABLES.values()
}
"""Of each table, as this version writes it."""

YEARS = 1971, 9998
"""Times of the command line are in these: with some hours more or less, they are still times for Python."""

CLOCK_S_MIN = 1.0
"""Smaller differences are ignored: they may be delays of messages on a busy machine."""

PAIRS_MAX = 1000
"""Most pairs of recorders that are compared."""

NOTHING_THERE = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")
"""What Spark says of a folder that does not exist, or has no files."""


def made(spark: SparkSession, rows: Sequence[tuple[Any, ...]], schema: StructType | str) -> DataFrame:
    """Return a data frame of a few rows; the types of PySpark's own function are not complete."""
    make = cast(Callable[..., DataFrame], spark.createDataFrame)  # pyright: ignore[reportUnknownMemberType]
    return make(list(rows), schema)


def parse_time(text: str) -> datetime:
    """Read a time of the command line: ISO 8601, UTC unless it says otherwise. Raises ConfigError."""
    try:
        time = datetime.fromisoformat(text)
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r} is not a time: 2026-11-23T10:00 expected (UTC)") from error
    if not YEARS[0] <= time.year <= YEARS[1]:
        raise ConfigError(f"{text!r} is in no recording: a year from {YEARS[0]} to {YEARS[1]} expected")
    return time


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to read."""
    parser.add_argument("recording", metavar="RECORDING", help="the folder that `dynamoth record` wrote, or its URL")
    parser.add_argument("--from", dest="begin", metavar="TIME", help="only from this time on: 2026-11-23T10:00 (UTC)")
    parser.add_argument("--to", dest="end", metavar="TIME", help="only up to this time")


def asked_for(arguments: argparse.Namespace) -> tuple[str, datetime | None, datetime | None]:
    """Return the folder, begin and end of the arguments of :func:`add_recording`. Raises as check_recording does."""
    begin, end = (parse_time(text) if text else None for text in (arguments.begin, arguments.end))
    folder = arguments.recording if is_url(arguments.recording) else str(Path(arguments.recording).resolve())
    check_recording(folder, begin, end)
    return folder, begin, end


@dataclass
class Recording:
    """A recording, or the part of it from ``begin`` up to ``end``; None: no bound.

    ``folder`` is a path, or a URL that Spark can read.
    """

    spark: SparkSession
    folder: str
    begin: datetime | None = None
    end: datetime | None = None
    #: Whether to look for clocks that differ. It takes some seconds.
    compares_clocks: bool = True
    #: Per table, the columns that no file has.
    missing: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    #: The files of the tables that were read, if this process can look into the folder.
    _files: set[Path] = field(default_factory=set[Path])

    def files_gone(self) -> int:
        """Return how many of the files do not exist any more. Spark skips those that go before it reads them."""
        return sum(not file.exists() for file in self._files)

    @property
    def clocks_differ_s(self) -> float:
        """How far the clocks of two recorders are apart, at most; 0: they agree, as far as is known."""
        behind = [0.0, *self._ahead_s.values()]
        return max(behind) - min(behind)

    @cached_property
    def _ahead_s(self) -> dict[str, float]:
        """How far the clocks of recorders are ahead of that of one of them, where that matters.

        Known of those that have heard the same reports.
        """
        heard = self._rows_of(SERVERS.name, ())
        together = F.sort_array(F.collect_list(F.struct("recorder", "at")))
        several = heard.groupBy(*SERVERS.key).agg(together.alias("heard")).where("size(heard) > 1")
        first = F.col("heard")[0]
        later = F.explode(F.slice("heard", 2, F.size("heard"))).alias("later")
        ahead_s = F.col("later.at").cast("double") - F.col("first.at").cast("double")
        pairs = (
            several.select(first.alias("first"), later)
            .where("first.recorder != later.recorder")
            .groupBy(F.col("first.recorder").alias("a"), F.col("later.recorder").alias("b"))
            .agg(F.percentile_approx(ahead_s, 0.5).alias("ahead_s"), F.count("*").alias("reports"))
        )
        found = pairs.orderBy(F.desc("reports")).limit(PAIRS_MAX).collect()
        return clocks_ahead([(row["a"], row["b"], row["ahead_s"], row["reports"]) for row in found])

    def without_reports(self) -> BadRecording:
        """Return the error of a recording that has no report of a server in the time asked for."""
        text = f"{self.folder} has no report of a server"
        if self.begin is None and self.end is None:
            return BadRecording(f"{text}: record for longer than one report interval")
        times = F.min("at").cast("double").alias("begin"), F.max("at").cast("double").alias("end")
        row = self.part(None, None).table(SERVERS.name, ()).agg(*times).collect()[0]
        if row["begin"] is None:
            return BadRecording(f"{text}, at no time: record for longer than one report interval")
        begin, end = (datetime.fromtimestamp(row[name], UTC) for name in ("begin", "end"))
        return BadRecording(f"{text} in this time: choose times between {begin:%F %T} and {end:%F %T} (UTC)")

    def part(self, begin: datetime | None, end: datetime | None) -> Recording:
        """Return another part of the recording, by the same clock."""
        part = Recording(self.spark, self.folder, begin, end, self.compares_clocks)
        if self.compares_clocks:
            part._ahead_s = self._ahead_s
        return part

    def until_end(self, name: str) -> DataFrame:
        """Return a table up to ``end``, with the rows before ``begin``."""
        return self.table(name) if self.begin is None else self.part(None, self.end).table(name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> DataFrame:
        """Return a table, each event once.

        Args:
            name: of the table.
            columns: only these, the key, and who recorded it. None: all.

        Raises:
            BadRecording: a file is broken, or a column is not what this version writes.

        """
        with spark_errors():
            rows = self._rows(name, columns)
            named = _OF_REPORTS.get(name)
            if named is None or not rows.inputFiles():
                return deduplicated(rows, TABLES[name])
            return _reports_once(rows, TABLES[name], named)

    def _rows(self, name: str, columns: Sequence[str] | None) -> DataFrame:
        """Return a table between ``begin`` and ``end``, by one clock."""
        rows = self._rows_of(name, columns)
        if self.compares_clocks and self._ahead_s:
            pairs = [F.lit(each) for item in self._ahead_s.items() for each in item]
            ahead_s = F.coalesce(F.create_map(*pairs)[F.col("recorder")], F.lit(0.0))
            rows = rows.withColumn("at", F.timestamp_micros(F.unix_micros("at") - F.round(ahead_s * 1e6).cast("long")))
        if self.begin is not None:
            rows = rows.where(F.col("at") >= F.lit(self.begin))
        if self.end is not None:
            rows = rows.where(F.col("at") < F.lit(self.end))
        return rows

    def _rows_of(self, name: str, columns: Sequence[str] | None) -> DataFrame:
        """Return a table in the hours from ``begin`` to ``end``."""
        table = TABLES[name]
        rows = self._conformed(self._found(name), table)
        return rows if columns is None else rows.select(*dict.fromkeys(["at", "recorder", *table.key, *columns]))

    def _found(self, name: str) -> DataFrame:
        """Return what is in the files of a table; nothing where it has none."""
        reader = self.spark.read.option("mergeSchema", "true").option("pathGlobFilter", "*.parquet")
        path = f"{self.folder}/{name}"
        if not is_url(self.folder):
            hours = files_of(self.folder, name, self.begin, self.end)
            self._files.update(*hours.values())
            if not hours:
                return made(self.spark, [], SCHEMAS[name])
            return reader.option("basePath", path).parquet(*map(str, hours)).drop("date", "hour")
        try:
            found = reader.parquet(path)
        except AnalysisException as error:
            if name == SERVERS.name or error.getCondition() not in NOTHING_THERE:
                raise
            return made(self.spark, [], SCHEMAS[name])
        if {"date", "hour"} <= set(found.columns):
            begin = F.to_timestamp(F.concat_ws(" ", "date", "hour"), "yyyy-MM-dd HH")
            if self.begin is not None:
                found = found.where(begin > F.lit(self.begin - timedelta(hours=1)))
            if self.end is not None:
                found = found.where(begin < F.lit(self.end))
        return found.drop("date", "hour")

    def _conformed(self, found: DataFrame, table: Table) -> DataFrame:
        types = {each.name: each.dataType for each in found.schema}
        if lost := [name for name in ("at", *table.key) if name not in types]:
            raise BadRecording(
                f"the files of the table {table.name} have no column {' and no '.join(lost)}: is it a recording?"
            )
        selected = [
            _value(each).alias(each.name) if each.name in types else F.lit(None).cast(each.dataType).alias(each.name)
            for each in SCHEMAS[table.name]
        ]
        self.missing[table.name] = [each.name for each in SCHEMAS[table.name] if each.name not in types]
        known = set(SCHEMAS[table.name].names)
        return found.select(*selected, *(_named(name) for name in types if name not in known))


def _value(column: StructField) -> Column:
    """Return the values of a column; NaN and infinity become null."""
    value = F.col(column.name).cast(column.dataType)
    if not isinstance(column.dataType, DoubleType):
        return value
    return F.when(F.abs(value) < F.lit(math.inf), value)  # Spark takes NaN for larger than all


def _named(name: str) -> Column:
    """Return the column with a name that may have any characters."""
    return F.col("`" + name.replace("`", "``") + "`")


def clocks_ahead(pairs: Sequence[tuple[str, str, float, int]]) -> dict[str, float]:
    """Return how far the clocks of recorders are ahead of one of theirs, where that is ``CLOCK_S_MIN`` or more.

    Args:
        pairs: recorder, another, how far the other's clock is ahead in seconds, and the reports that both have heard;
            most reports first.

    """
    ahead_s: dict[str, float] = {}
    known = list(pairs)
    while known:
        ahead_s.setdefault(known[0][0], 0.0)
        # Those that have heard something together with one that is known, until there are none left.
        while linked := [pair for pair in known if pair[0] in ahead_s or pair[1] in ahead_s]:
            for a, b, difference_s, _ in linked:
                if a in ahead_s:
                    ahead_s.setdefault(b, ahead_s[a] + difference_s)
                else:
                    ahead_s[a] = ahead_s[b] - difference_s
            known = [pair for pair in known if pair not in linked]
    return {recorder: value for recorder, value in ahead_s.items() if abs(value) >= CLOCK_S_MIN}


_OF_REPORTS = {CHANNELS.name: "channel", BROKER_INTERESTS.name: "interest"}
"""The tables with many rows per report, and the column that differs in them: the last one of the key."""


def _reports_once(rows: DataFrame, table: Table, named: str) -> DataFrame:
    """Return a table with many rows per report, each event once.

    To compare all rows with each other takes most of the time of a report, and hardly any is there twice. A recorder
    writes the rows of a report one after the other into one file. So only those of other reports are compared: which
    are in several files, or in one that was merged from files with the same rows. Where the copies of such a report lie
    side by side, the hashes of what they name cancel out.

    Args:
        rows: of the table.
        table: one of ``_OF_REPORTS``.
        named: its column there.

    """
    report = [name for name in table.key if name != named]
    placed = rows.select(
        *report,
        "recorder",
        F.col(named).isNull().cast("int").alias("rest"),
        F.xxhash64(F.coalesce(named, F.lit(""))).alias("hash"),
        F.xxhash64("_metadata.file_path").alias("file"),
        F.col("_metadata.row_index").alias("row"),
    )
    one_file = (F.min("file") == F.max("file")) & (F.min("recorder") == F.max("recorder"))
    together = one_file & (F.max("row") - F.min("row") + 1 == F.count("*"))
    together &= (F.sum("rest") <= 1) & (F.bit_xor("hash") != 0)
    marked = placed.groupBy(*report).agg(together.alias("together"))
    doubtful = marked.where("not together").select(*report).cache()
    if doubtful.isEmpty():
        doubtful.unpersist()
        return rows
    others = rows.join(doubtful, report, "left_anti").select(*rows.columns)
    again = rows.join(doubtful, report, "left_semi").select(*rows.columns)
    return others.unionByName(deduplicated(again, table))


def deduplicated(rows: DataFrame, table: Table) -> DataFrame:
    """Return each event once, at the earliest time that a recorder gives.

    Rows with equal keys differ in ``at`` and ``recorder`` only, so any of them has the other values.
    """
    others = [name for name in rows.columns if name not in ("at", *table.key)]
    values = [F.min("at").alias("at"), *(F.first(_named(name)).alias(name) for name in others)]
    return rows.groupBy(*table.key).agg(*values).select(*map(_named, rows.columns))
