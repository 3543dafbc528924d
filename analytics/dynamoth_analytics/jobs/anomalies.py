"""Anomalies: servers, channels and publishers that depart from their own recent past, missing reports, lagging agents.

A value is judged by its distance from the median of the ``PAST`` values before it, in units of their spread (1.4826
times the median absolute deviation, the standard deviation if they are normal). Medians do not follow a single odd
value. Of a departure that lasts, only the begin is reported. Of publishers only rises are: reports name the busiest
only, so a fall may mean that others are busier.
"""

from __future__ import annotations

import math
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

PAST = 30
PAST_MIN = 20
"""How many earlier values a value is compared with, and the least that say anything."""

SCORE_MIN = 7.0
"""Departures of fewer spreads are usual. The spread of 30 values is itself uncertain: of normally distributed noise,
one value in 27,000 is 6 spreads away from 30 earlier ones, and one in 240,000 is 7 (one in 68,000 from 20; simulated,
six million values each). A server or channel has some thousand values per hour. Counts must depart as far from chance,
too: twice the root of a count varies by one (Anscombe 1948, with 3/8 added), however large the count is."""

CHANGE_RATIO_MIN = 1 / 3
"""A change by less is no anomaly, however constant a load was: the least spread follows from it."""

LEAST_SPREADS = {"outgoing_bytes_per_s": 1000.0, "cpu_ratio": 0.05}
"""Smaller changes of measurements are ignored."""

SMALLEST = 1e-9

LAG_S_MIN = 1.0
"""An agent with a larger observation lag does not keep up."""

SILENCE_INTERVALS = 3.0
"""A server without a report for so many intervals was silent."""


def anomalies(servers: DataFrame, channel_loads: DataFrame, publisher_slots: DataFrame | None = None) -> DataFrame:
    """Return one row per anomaly: kind, subject, metric, at, value, expected, score.

    Kinds: ``server``, ``channel`` and ``publisher`` depart from their past; ``missing``, ``late`` and ``lag`` are about
    reports of servers, with a null score. Without ``publisher_slots`` there are none of publishers.
    """
    rate = F.col("publications") / F.nullif("seconds", F.lit(0.0))
    values = [
        _values("server", servers, "server", "at", *LEAST_SPREADS, counted_s=F.lit(None).cast("double")),
        _values(
            "channel",
            channel_loads.withColumn("publications_per_s", rate),
            *("channel", "slot", "publications_per_s", "subscribers", "publishers"),
            counted_s=F.col("seconds"),
        ),
    ]
    if publisher_slots is not None:
        values.append(
            _values(
                "publisher",
                publisher_slots,
                *("publisher", "slot", "publications_per_s", "channels"),
                counted_s=F.col("seconds"),
            ),
        )
    departed = departures(reduce(DataFrame.unionByName, values)).where("kind != 'publisher' or score > 0")
    return reduce(DataFrame.unionByName, [departed, missing_reports(servers), lagging(servers)])


def _values(kind: str, rows: DataFrame, subject: str, at: str, *metrics: str, counted_s: Column) -> DataFrame:
    """Return kind, subject, metric, at, value and counted_s of each metric of each row."""
    columns = F.lit(kind).alias("kind"), F.col(subject).alias("subject"), F.col(at).alias("at")
    values = rows.select(*columns, counted_s.alias("slot_s"), *(F.col(name).cast("double") for name in metrics))
    unpivoted = values.unpivot(["kind", "subject", "at", "slot_s"], [*metrics], "metric", "value")
    # A rate counts what came in a time; numbers of subscribers and the like are counts themselves.
    counted = F.when(F.col("metric") == "publications_per_s", F.col("slot_s")).otherwise(F.lit(1.0))
    is_measured = F.col("metric").isin(*LEAST_SPREADS)
    return unpivoted.withColumn("counted_s", F.when(~is_measured, counted)).drop("slot_s")


def departures(values: DataFrame) -> DataFrame:
    """Return the values that depart from their past; of several in a row, the first.

    Args:
        values: kind, subject, metric, at, value, and for how many seconds a count was counted; null: it is no count.

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
    spread = F.greatest(1.4826 * _median(deviations), _least_spread(expected))
    distance = F.col("value") - expected
    score = F.signum(distance) * F.least(F.abs(distance) / spread, _beyond_chance(expected))
    return F.struct(expected.alias("expected"), score.alias("score"))


def _may_be_odd() -> Column:
    """Return whether some median between the least and the largest past value would make a value an anomaly.

    Few values pass, and to order the past of all others would take most of the time of a report. The farthest median is
    one of the two.
    """
    ends = F.array_min("past"), F.array_max("past")
    far = (F.abs(F.col("value") - end) > SCORE_MIN * _least_spread(end) for end in ends)
    unlikely = (F.coalesce(_beyond_chance(end), F.lit(math.inf)) > SCORE_MIN for end in ends)
    return (F.size("past") >= PAST_MIN) & reduce(Column.__or__, far) & reduce(Column.__or__, unlikely)


def _least_spread(expected: Column) -> Column:
    """Return the least spread of a value: a part of what is expected, and of measurements a constant."""
    constants = [F.when(F.col("metric") == name, value) for name, value in LEAST_SPREADS.items()]
    return F.greatest(CHANGE_RATIO_MIN / SCORE_MIN * F.abs(expected), F.coalesce(*constants, F.lit(SMALLEST)))


def _beyond_chance(expected: Column) -> Column:
    """Return the distance of two counts in units of what chance does to them; null: they are no counts."""
    roots = (F.sqrt(each * F.col("counted_s") + 3 / 8) for each in (F.col("value"), expected))
    return 2 * F.abs(reduce(Column.__sub__, roots))


def _median(ordered: Column) -> Column:
    return F.get(ordered, F.floor(F.size(ordered) / 2).cast("int"))


def missing_reports(servers: DataFrame) -> DataFrame:
    """Return the reports that no recorder got, by their numbers, the silences of servers, and reports that came late.

    A server that reports no more is silent up to the end.

    Where no report is missing between two that came far apart, the agent was not silent: the recorder, or the way to
    it, was late.
    """
    # By their numbers, as the clock of a recorder may go back.
    numbered = Window.partitionBy("server", "incarnation").orderBy("sequence")
    left_out = F.col("sequence") - F.lag("sequence").over(numbered) - 1
    order = Window.partitionBy("server").orderBy("at")
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
    newest = F.broadcast(servers.agg(F.max("at").cast("double").alias("end")))
    latest = servers.groupBy("server").agg(F.max("at").alias("at"), F.max_by("interval_s", "at").alias("interval_s"))
    gone_s = F.col("end") - F.col("at").cast("double")
    gone = latest.crossJoin(newest).where(gone_s > SILENCE_INTERVALS * F.greatest("interval_s", F.lit(1.0)))
    return lost.unionByName(silent).unionByName(
        gone.select(
            F.lit("missing").alias("kind"),
            F.col("server").alias("subject"),
            F.lit("silent_s").alias("metric"),
            "at",
            gone_s.alias("value"),
            F.col("interval_s").alias("expected"),
            F.lit(None).cast("double").alias("score"),
        )
    )


def incomplete(anomalies: DataFrame) -> DataFrame:
    """Return the sum of each metric of missing and late reports: server, metric and value."""
    rows = anomalies.where("kind in ('missing', 'late')")
    return rows.groupBy(F.col("subject").alias("server"), "metric").agg(F.sum("value").alias("value")).orderBy("server")


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
