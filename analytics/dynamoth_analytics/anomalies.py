"""Anomalies: servers, channels and publishers that depart from their own recent past, missing reports, lagging agents.

A value is judged by its distance from the median of the ``PAST`` values before it, in units of their spread (1.4826
times the median absolute deviation, the standard deviation if they are normal). Medians do not follow a single odd
value. Of a departure that lasts, only the begin is reported. Of publishers only rises are: reports name the busiest
only, so a fall may mean that others are busier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

PAST = 30
PAST_MIN = 20
"""How many earlier values a value is compared with, and the least that say anything."""

SCORE_MIN = 7.0
"""Departures of fewer spreads are usual. The spread of 30 values is itself uncertain: of normally distributed noise,
one value in 27,000 is 6 spreads away from 30 earlier ones, and one in 240,000 is 7 (one in 68,000 from 20; simulated,
six million values each). A server or channel has some thousand values per hour."""

CHANGE_RATIO_MIN = 1 / 3
"""A change by less is no anomaly, however constant a load was: the least spread follows from it."""

LAG_S_MIN = 1.0
"""An agent that sees the end of an interval so late does not keep up."""

SILENCE_INTERVALS = 3.0
"""A server without a report for so many intervals was silent."""


def anomalies(servers: DataFrame, channel_loads: DataFrame, publisher_slots: DataFrame | None = None) -> DataFrame:
    """Return one row per anomaly: kind, subject (server, channel or publisher), metric, at, value, expected, score."""
    rate = F.col("publications") / F.nullif("seconds", F.lit(0.0))
    values = [
        _values("server", servers, "server", "at", "outgoing_bytes_per_s", "cpu_ratio"),
        _values(
            "channel",
            channel_loads.withColumn("publications_per_s", rate),
            *("channel", "slot", "publications_per_s", "subscribers", "publishers"),
        ),
    ]
    if publisher_slots is not None:
        values.append(
            _values("publisher", publisher_slots, "publisher", "slot", "publications_per_s", "channels"),
        )
    departed = departures(reduce(DataFrame.unionByName, values)).where("kind != 'publisher' or score > 0")
    return reduce(DataFrame.unionByName, [departed, missing_reports(servers), lagging(servers)])


def _values(kind: str, rows: DataFrame, subject: str, at: str, *metrics: str) -> DataFrame:
    """Return kind, subject, metric, at and value of each metric of each row."""
    columns = F.lit(kind).alias("kind"), F.col(subject).alias("subject"), F.col(at).alias("at")
    values = rows.select(*columns, *(F.col(name).cast("double").alias(name) for name in metrics))
    return values.unpivot(["kind", "subject", "at"], [*metrics], "metric", "value")


def departures(values: DataFrame) -> DataFrame:
    """Return the values that depart from their past; of several in a row, the first.

    Args:
        values: kind, subject, metric, at and value.

    """
    series = Window.partitionBy("kind", "subject", "metric").orderBy("at")
    past = F.collect_list("value").over(series.rowsBetween(-PAST, -1))
    known = values.where("value is not null").withColumn("past", past)
    scored = known.withColumn("judged", F.when(_may_be_odd(), _judged())).select("*", "judged.*")
    odd = F.coalesce(F.abs("score") > SCORE_MIN, F.lit(False))
    begins = scored.withColumn("odd", odd).withColumn("before", F.lag("odd", 1, False).over(series))
    return begins.where("odd and not before").select("kind", "subject", "metric", "at", "value", "expected", "score")


def _judged() -> Column:
    """Return what was expected, and the distance of the value from it in spreads."""
    ordered = F.array_sort("past")
    return F.transform(F.array(_median(ordered)), _with_score)[0]


def _with_score(expected: Column) -> Column:
    deviations = F.array_sort(F.transform("past", lambda each: F.abs(each - expected)))
    least = F.greatest(CHANGE_RATIO_MIN / SCORE_MIN * F.abs(expected), _least_spread(F.col("metric"), expected))
    spread = F.greatest(1.4826 * _median(deviations), least)
    return F.struct(expected.alias("expected"), ((F.col("value") - expected) / spread).alias("score"))


def _may_be_odd() -> Column:
    """Return whether some median between the least and the largest past value would make a value an anomaly.

    Few values pass, and to order the past of all others would take most of the time of a report. Distance less least
    spread is convex in the median for each of the two least spreads, so it is largest at an end.
    """
    ends = F.array_min("past"), F.array_max("past")

    def beyond(least: Callable[[Column], Column]) -> Column:
        return reduce(Column.__or__, (F.abs(F.col("value") - end) > SCORE_MIN * least(end) for end in ends))

    enough = F.size("past") >= PAST_MIN
    far = beyond(lambda end: CHANGE_RATIO_MIN / SCORE_MIN * F.abs(end))
    return enough & far & beyond(lambda end: _least_spread(F.col("metric"), end))


def _median(ordered: Column) -> Column:
    return F.get(ordered, F.floor(F.size(ordered) / 2).cast("int"))


def _least_spread(metric: Column, expected: Column) -> Column:
    """Return the spread of the smallest loads: counts vary by their root, and a kilobyte or a twentieth is nothing."""
    return (
        F.when(metric == "outgoing_bytes_per_s", 1000.0)
        .when(metric == "cpu_ratio", 0.05)
        .otherwise(F.sqrt(F.greatest(expected, F.lit(1.0))))
    )


def missing_reports(servers: DataFrame) -> DataFrame:
    """Return the reports that no recorder got, by their numbers, the silences of servers, and reports that came late.

    Where no report is missing between two that came far apart, the agent was not silent: the recorder, or the way to
    it, was late.
    """
    order = Window.partitionBy("server").orderBy("at")
    same = F.lag("incarnation").over(order) == F.col("incarnation")
    left_out = F.when(same, F.col("sequence") - F.lag("sequence").over(order) - 1)
    silent_s = F.col("at").cast("double") - F.lag("at").over(order).cast("double")
    rows = servers.withColumn("left_out", left_out).withColumn("silent_s", silent_s)
    lost = rows.where("left_out > 0").select(
        F.lit("missing").alias("kind"),
        F.col("server").alias("subject"),
        F.lit("reports_missing").alias("metric"),
        "at",
        F.col("left_out").cast("double").alias("value"),
        F.lit(0.0).alias("expected"),
        F.lit(None).cast("double").alias("score"),
    )
    in_order = F.coalesce(F.col("left_out") == 0, F.lit(False))
    silent = rows.where(
        (F.col("silent_s") > SILENCE_INTERVALS * F.col("interval_s")) & F.coalesce(F.col("left_out") <= 0, F.lit(True))
    ).select(
        F.when(in_order, "late").otherwise("missing").alias("kind"),
        F.col("server").alias("subject"),
        F.when(in_order, "late_s").otherwise("silent_s").alias("metric"),
        "at",
        F.col("silent_s").alias("value"),
        F.col("interval_s").alias("expected"),
        F.lit(None).cast("double").alias("score"),
    )
    return lost.unionByName(silent)


def lagging(servers: DataFrame) -> DataFrame:
    """Return when agents began to see their servers late."""
    order = Window.partitionBy("server").orderBy("at")
    late = F.coalesce(F.col("observation_lag_s") > LAG_S_MIN, F.lit(False))
    rows = servers.withColumn("late", late).withColumn("before", F.lag("late", 1, False).over(order))
    return rows.where("late and not before").select(
        F.lit("lag").alias("kind"),
        F.col("server").alias("subject"),
        F.lit("observation_lag_s").alias("metric"),
        "at",
        F.col("observation_lag_s").alias("value"),
        F.lit(0.0).alias("expected"),
        F.lit(None).cast("double").alias("score"),
    )
