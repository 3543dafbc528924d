"""Plans: what decisions promised and did, how long changes took, and moves that were for nothing."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dynamoth.recording import DecisionKind

UNDONE_S = 3600.0
"""A channel that is back where it was within this time went to and fro."""

GAIN_MIN = 0.01
"""A decision that lowered the largest load ratio of the servers it touched by less gained nothing."""

AROUND_S = 10.0
"""Latency is compared over this time before and after a change."""

CHANGE_S_MAX = 3600.0
"""Of a change that took longer, this time is compared: it was stuck, or the recording lacks its end."""

SLOT_S = 60


def effects(decisions: DataFrame) -> DataFrame:
    """Return one row per decision and server that it touched: predicted and measured load ratio.

    ``goal`` names all goals of its moves at the server. ``error`` is measured less predicted, null while there is no
    outcome.
    """
    key = ["balancer", "decision", "server"]
    moves = decisions.where(F.col("kind") == DecisionKind.MOVE.value)
    order = F.struct("number", "line")
    promised = moves.groupBy(*key).agg(
        F.min("at").alias("at"),
        F.concat_ws(", ", F.array_sort(F.collect_set("goal"))).alias("goal"),
        F.min_by("reason", order).alias("reason"),
        F.count_distinct(F.col("channel")).alias("channels"),
        F.min_by("ratio_before", order).alias("ratio_before"),
        F.max_by("ratio_predicted", order).alias("ratio_predicted"),
    )
    outcomes = (
        decisions.where(F.col("kind") == DecisionKind.OUTCOME.value)
        .groupBy(*key)
        .agg(F.max("ratio_measured").alias("ratio_measured"))
    )
    return promised.join(outcomes, key, "left").withColumn("error", F.col("ratio_measured") - F.col("ratio_predicted"))


def without_gain(effects: DataFrame) -> DataFrame:
    """Return the decisions only to relieve servers whose most loaded server was as loaded afterwards.

    Only those with an outcome; other goals (drain, replicate) do not promise a lower load ratio.
    """
    decisions = effects.groupBy("balancer", "decision").agg(
        F.min("at").alias("at"),
        F.max_by("reason", F.struct("ratio_before", "server")).alias("reason"),
        F.max("ratio_before").alias("ratio_before"),
        F.max("ratio_predicted").alias("ratio_predicted"),
        F.max("ratio_measured").alias("ratio_measured"),
        F.min(F.col("ratio_measured").isNotNull() & (F.col("goal") == "relieve")).alias("judged"),
    )
    gain = F.col("ratio_before") - F.col("ratio_measured")
    return decisions.where(F.col("judged") & (gain < GAIN_MIN)).drop("judged")


def changes(plans: DataFrame) -> DataFrame:
    """Return one row per change of a channel: when each phase began, and how long the first two took."""

    def begin(phase: str) -> Column:
        return F.min(F.when(F.col("phase") == phase, F.col("at")))

    def known(name: str) -> Column:
        return F.first(name, ignorenulls=True).alias(name)

    return (
        plans.groupBy("channel", "epoch")
        .agg(
            F.min("at").alias("at"),
            known("from_mode"),
            known("from_servers"),
            known("to_mode"),
            known("to_servers"),
            known("reason"),
            begin("prepared").alias("prepared_at"),
            begin("active").alias("active_at"),
            begin("settled").alias("settled_at"),
        )
        .withColumn("preparing_s", F.col("active_at").cast("double") - F.col("prepared_at").cast("double"))
        .withColumn("settling_s", F.col("settled_at").cast("double") - F.col("active_at").cast("double"))
    )


def ping_pong(changes: DataFrame) -> DataFrame:
    """Return the changes that put a channel back where another change within the hour before had taken it from.

    A channel that is replicated or folded back is not among them: it follows its load.
    """

    def place(prefix: str) -> Column:
        return F.concat_ws(" ", f"{prefix}_mode", F.array_sort(f"{prefix}_servers"))

    moved = changes.where((place("from") != place("to")) & (F.col("from_mode") == F.col("to_mode")))
    left = moved.select("channel", F.col("at").alias("left_at"), place("from").alias("place"))
    back = moved.select("channel", "at", "epoch", "to_mode", "to_servers", "reason", place("to").alias("place"))
    away_s = F.col("at").cast("double") - F.col("left_at").cast("double")
    found = (
        back.join(left, ["channel", "place"]).withColumn("away_s", away_s).where(f"away_s > 0 and away_s <= {UNDONE_S}")
    )
    latest = Window.partitionBy("channel", "epoch").orderBy("away_s")
    return found.withColumn("n", F.row_number().over(latest)).where("n = 1").drop("n", "place")


def latency_around(changes: DataFrame, latency: DataFrame) -> DataFrame:
    """Return the median latency at the servers of each version, before, during and after its changes.

    ``lost`` counts the probes that did not come back in time.
    """
    servers = F.array_union(F.coalesce("from_servers", F.array()), F.coalesce("to_servers", F.array()))
    done = F.coalesce("settled_at", "active_at", "at")
    versions = (
        changes.select("epoch", "channel", "at", done.alias("done"), F.explode(servers).alias("server"))
        .groupBy("epoch", "server")
        .agg(
            F.min("at").alias("begin"), F.max("done").alias("end"), F.count_distinct(F.col("channel")).alias("channels")
        )
        .withColumn("end", F.least("end", F.timestamp_seconds(F.col("begin").cast("double") + CHANGE_S_MAX)))
    )
    begin_s, end_s, at_s = (F.col(name).cast("double") for name in ("begin", "end", "at"))
    slots = F.sequence(F.floor((begin_s - AROUND_S) / SLOT_S), F.floor((end_s + AROUND_S) / SLOT_S))
    probes = latency.select("server", "at", "latency_s", F.floor(at_s / SLOT_S).alias("slot"))
    joined = versions.withColumn("slot", F.explode(slots)).join(probes, ["server", "slot"])
    near = joined.where((at_s >= begin_s - AROUND_S) & (at_s <= end_s + AROUND_S))

    def median(condition: Column, name: str) -> Column:
        return F.percentile_approx(F.when(condition, F.col("latency_s")), 0.5).alias(name)

    return near.groupBy("epoch", "server", "begin", "end", "channels").agg(
        median(at_s < begin_s, "before_s"),
        median((at_s >= begin_s) & (at_s <= end_s), "during_s"),
        median(at_s > end_s, "after_s"),
        F.count(F.when(F.col("latency_s").isNull(), 1)).alias("lost"),
    )
