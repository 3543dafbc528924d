"""Load: what each server sent, against what it can send.

A load ratio is outgoing bytes/s over the server's maximum (Dynamoth, eq. 1). Time is cut into slots. A slot without
reports has no row: it is neither an overload nor idle. Reports belong to the slot that has the middle of their
interval.
"""

from __future__ import annotations

import math

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

HOLE_S_MAX = 3
BEFORE_S_MIN, BEFORE_SLOTS_MIN = 30, 3


def slot_of(slot_s: int) -> Column:
    """Return the begin of the slot of a report or channel row."""
    middle = F.col("at").cast("double") - F.coalesce("interval_s", F.lit(0.0)) / 2
    return F.timestamp_seconds(F.floor(middle / slot_s) * slot_s)


def weighted_mean(name: str, weight: str) -> Column:
    """Return the mean of the values that are known."""
    known = F.when(F.col(name).isNotNull(), F.col(weight))
    return F.sum(F.col(name) * F.col(weight)) / F.nullif(F.sum(known), F.lit(0.0))


def load(servers: DataFrame, slot_s: int, high: float) -> DataFrame:
    """Return one row per server and slot.

    Args:
        servers: the table.
        slot_s: length of a slot in seconds.
        high: a server above this mean load ratio is overloaded.

    """
    ratio = F.col("outgoing_bytes_per_s") / F.nullif("outgoing_bytes_per_s_max", F.lit(0))
    sums = servers.groupBy("server", slot_of(slot_s).alias("slot")).agg(
        F.sum("interval_s").alias("covered_s"),
        weighted_mean("outgoing_bytes_per_s", "interval_s").alias("outgoing_bytes_per_s"),
        F.max("outgoing_bytes_per_s_max").cast("double").alias("outgoing_bytes_per_s_max"),
        F.max(ratio).alias("ratio_max"),
        F.avg("cpu_ratio").alias("cpu_ratio"),
    )
    sent, most = F.col("outgoing_bytes_per_s"), F.col("outgoing_bytes_per_s_max")
    loads = sums.withColumn("ratio", sent / F.nullif(most, F.lit(0.0)))
    return loads.select(
        "*",
        (F.col("ratio") > high).alias("overloaded"),
        F.when(most > 0, F.greatest(most - sent, F.lit(0.0))).alias("unused_bytes_per_s"),
    )


def balance(loads: DataFrame) -> DataFrame:
    """Return one row per slot: how evenly the load was spread, and the server-seconds that reports cover."""
    mean = F.avg("ratio")
    return loads.groupBy("slot").agg(
        F.count("*").alias("servers"),
        mean.alias("ratio_mean"),
        F.max("ratio").alias("ratio_max"),
        (F.max("ratio") / F.nullif(mean, F.lit(0.0))).alias("imbalance"),
        (F.stddev_pop("ratio") / F.nullif(mean, F.lit(0.0))).alias("variation"),
        F.sum("covered_s").alias("server_seconds"),
    )


def by_server(loads: DataFrame) -> DataFrame:
    """Return one row per server: means over the time that reports cover."""

    def mean(name: str) -> Column:
        return weighted_mean(name, "covered_s").alias(name)

    overload_s = F.sum(F.when(F.col("overloaded"), F.col("covered_s")).otherwise(0.0))
    return loads.groupBy("server").agg(
        F.sum("covered_s").alias("server_seconds"),
        mean("ratio"),
        F.max("ratio_max").alias("ratio_max"),
        (overload_s / 60).alias("overload_minutes"),
        mean("outgoing_bytes_per_s"),
        mean("unused_bytes_per_s"),
        mean("cpu_ratio"),
        F.max("outgoing_bytes_per_s_max").alias("outgoing_bytes_per_s_max"),
    )


def overloads(loads: DataFrame, channel_slots: DataFrame, slot_s: int) -> DataFrame:
    """Return one row per overload: a run of overloaded slots, with the channel that sent most in it, and its cause.

    One slot without reports does not end a run, nor do ``HOLE_S_MAX``: a report or two may be lost. The cause is the
    channel whose bytes/s rose most against the time before, at least ``BEFORE_S_MIN`` and ``BEFORE_SLOTS_MIN``; it may
    have come from another server. ``cause_share`` is its part of the server's rise. It is null where nothing before the
    overload was recorded.
    """
    order = Window.partitionBy("server").orderBy("slot")
    since = F.col("slot").cast("long") - F.lag("slot").over(order).cast("long")
    goes_on = F.lag("overloaded").over(order) & (since <= slot_s + max(slot_s, HOLE_S_MAX))
    marked = loads.withColumn("begins", F.when(F.coalesce(goes_on, F.lit(False)), 0).otherwise(1))
    runs = marked.withColumn("run", F.sum("begins").over(order)).where("overloaded")
    ago = F.sequence(F.lit(1), F.lit(max(BEFORE_SLOTS_MIN, math.ceil(BEFORE_S_MIN / slot_s))))
    earlier = F.transform(ago, lambda number: F.timestamp_seconds(F.col("slot").cast("long") - number * slot_s))
    before = runs.where("begins = 1").select(
        "server", "run", F.explode(earlier).alias("slot"), F.lit(True).alias("before")
    )
    slots = runs.select("server", "run", "slot", F.lit(False).alias("before")).unionByName(before)
    known = loads.select("server", "slot", "covered_s", "ratio_max", "outgoing_bytes_per_s")
    # Cut off from the tables that it comes from: joined with them again, Spark 4.3 gave null for the time before.
    found = _sums(slots.join(known, ["server", "slot"]), slot_s).localCheckpoint()
    sent = (
        channel_slots.where("channel is not null")
        .join(F.broadcast(slots), ["server", "slot"])
        .groupBy("server", "run", "channel")
        .agg(
            F.sum(F.when(F.col("before"), F.col("bytes_out")).otherwise(0)).alias("bytes_before"),
            F.sum(F.when(F.col("before"), 0).otherwise(F.col("bytes_out"))).alias("bytes"),
        )
        .join(F.broadcast(found.select("server", "run", "before_s", "covered_s")), ["server", "run"])
        .withColumn("rate_before", F.col("bytes_before") / F.col("before_s"))
        .withColumn("rate", F.col("bytes") / F.nullif("covered_s", F.lit(0.0)))
        .withColumn("rise", F.col("rate") - F.col("rate_before"))
    )
    named = sent.groupBy("server", "run").agg(
        F.max(F.struct("bytes", "channel")).alias("busiest"),
        F.max(F.when(F.col("rise").isNotNull(), F.struct("rise", "channel", "rate_before", "rate"))).alias("cause"),
    )
    rise = F.col("bytes_out") / F.nullif("covered_s", F.lit(0.0)) - F.col("bytes_out_before") / F.col("before_s")
    return found.join(F.broadcast(named), ["server", "run"], "left").select(
        "server",
        "begin",
        "end",
        (F.col("covered_s") / 60).alias("minutes"),
        "ratio_max",
        F.col("busiest.channel").alias("channel"),
        (F.col("busiest.bytes") / F.nullif("bytes_out", F.lit(0.0))).alias("channel_share"),
        F.col("cause.channel").alias("cause"),
        F.col("cause.rate_before").alias("cause_bytes_per_s_before"),
        F.col("cause.rate").alias("cause_bytes_per_s"),
        (F.col("cause.rise") / F.when(rise > 0, rise)).alias("cause_share"),
    )


def _sums(slots: DataFrame, slot_s: int) -> DataFrame:
    """Return what the slots of an overload, and those before it, are together."""
    bytes_out = F.col("outgoing_bytes_per_s") * F.col("covered_s")

    def of(before: bool, value: Column) -> Column:
        return F.when(F.col("before") == F.lit(before), value)

    return slots.groupBy("server", "run").agg(
        F.min(of(False, F.col("slot"))).alias("begin"),
        F.timestamp_seconds(F.max(of(False, F.col("slot"))).cast("long") + slot_s).alias("end"),
        F.max(of(False, F.col("ratio_max"))).alias("ratio_max"),
        F.sum(of(False, F.col("covered_s"))).alias("covered_s"),
        F.sum(of(False, bytes_out)).alias("bytes_out"),
        F.sum(of(True, F.col("covered_s"))).alias("before_s"),
        F.sum(of(True, bytes_out)).alias("bytes_out_before"),
    )
