"""Channels: rates, fan-out, what Algorithm 1 says of them, popularity and churn.

The figures are those of a channel in the whole cluster. Under ALL_PUBLISHERS each replica sees all publications and its
share of the subscribers; in the other modes publications are those of all its servers together.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from dynamoth.plan.plan import Mode
from dynamoth_analytics.jobs.load import slot_of, weighted_mean
from dynamoth_balancer.admin.changes import mode_name

SINGLE, ALL_SUBSCRIBERS, ALL_PUBLISHERS = map(mode_name, (Mode.SINGLE, Mode.ALL_SUBSCRIBERS, Mode.ALL_PUBLISHERS))

COLUMNS = (
    "interval_s",
    "channels",
    "publications",
    "publishers",
    "subscribers",
    "messages_sent",
    "bytes_in",
    "bytes_out",
)
"""Those of the table that jobs about channels read."""

ZIPF_CHANNELS_MIN, ZIPF_CHANNELS_MAX = 10, 1000
ZIPF_PUBLICATIONS_MIN = 30
ZIPF_NAMED_MIN = 0.99
"""The popularity is fitted to the busiest channels: at most as many as reports name, and those with counts that chance
changes by less than a fifth. Where reports are cut, only to those that are named in nearly all slots."""


def channel_slots(channels: DataFrame, slot_s: int) -> DataFrame:
    """Return one row per channel, server and slot. The channel null stands for all others.

    Sums over its reports; ``publishers`` and ``channels`` are the largest, ``subscribers`` is the mean over the time.
    ``unidentified`` says whether a report did not name its publishers; only where ``channels`` has their ids.
    """
    rows = channels.select("*", slot_of(slot_s).alias("slot"), F.col("interval_s").alias("seconds"))
    if "publisher_ids" in rows.columns:
        is_empty = F.coalesce(F.length("publisher_ids"), F.lit(0)) == 0
        rows = rows.withColumn("unidentified", (F.col("publishers") > 0) & is_empty)
    return _summed(rows)


def combined(slots: DataFrame) -> DataFrame:
    """Return :func:`channel_slots` of all rows, from those of some rows and those of the others."""
    return _summed(slots)


def _summed(rows: DataFrame) -> DataFrame:
    sums = ("seconds", "publications", "messages_sent", "bytes_in", "bytes_out")
    unidentified = [F.max(name).alias(name) for name in rows.columns if name == "unidentified"]
    return rows.groupBy("channel", "server", "slot").agg(
        *(F.sum(name).alias(name) for name in sums),
        F.max("publishers").alias("publishers"),
        weighted_mean("subscribers", "seconds").alias("subscribers"),
        F.max("channels").alias("channels"),
        *unidentified,
    )


def replicated_spans(plans: DataFrame) -> DataFrame:
    """Return when channels were replicated: channel, mode, begin and end.

    Null stands for the begin or the end of the recording. Of a channel that does not change in it nothing is known.
    """
    changes = plans.groupBy("channel", "epoch").agg(
        F.min("at").alias("begin"), F.max("from_mode").alias("mode_before"), F.max("to_mode").alias("mode")
    )
    in_order = Window.partitionBy("channel").orderBy("begin")
    after = changes.select("channel", "mode", "begin", F.lead("begin").over(in_order).alias("end"))
    is_first = F.row_number().over(in_order) == 1
    before = changes.withColumn("is_first", is_first).where("is_first")
    unbounded = F.lit(None).cast("timestamp").alias("begin")
    before = before.select("channel", F.col("mode_before").alias("mode"), unbounded, F.col("begin").alias("end"))
    return after.unionByName(before).where(F.col("mode") != SINGLE)


def channel_loads(slots: DataFrame, spans: DataFrame, slot_s: int) -> DataFrame:
    """Return one row per channel and slot, over all servers. ``seconds`` is the time that reports of it cover.

    Servers of a replicated channel report it at the same time. In a slot in which a channel moves, they do so one after
    the other, but for the time that its subscribers take to follow.
    """
    s, r = slots.where("channel is not null").alias("s"), F.broadcast(spans.alias("r"))
    within = F.col("r.begin").isNull() | (F.col("s.slot") >= F.col("r.begin"))
    within &= F.col("r.end").isNull() | (F.col("s.slot") < F.col("r.end"))
    joined = s.join(r, (F.col("s.channel") == F.col("r.channel")) & within, "left")
    rows = joined.select("s.*", F.coalesce("r.mode", F.lit(SINGLE)).alias("mode"))
    # Each publisher of a channel with ALL_SUBSCRIBERS is at one of its servers, and with ALL_PUBLISHERS at all.
    publishers_of_each = F.max("mode") == ALL_SUBSCRIBERS
    each_sees_all = F.max("mode") == ALL_PUBLISHERS
    in_turn = F.least(F.sum("seconds"), F.greatest(F.max("seconds"), F.lit(float(slot_s))))
    return rows.groupBy("channel", "slot").agg(
        F.max("mode").alias("mode"),
        F.count("*").alias("servers"),
        F.when(F.max("mode") == SINGLE, in_turn).otherwise(F.max("seconds")).alias("seconds"),
        F.when(each_sees_all, F.max("publications")).otherwise(F.sum("publications")).alias("publications"),
        F.when(each_sees_all, F.sum("subscribers")).otherwise(F.max("subscribers")).alias("subscribers"),
        F.when(publishers_of_each, F.sum("publishers")).otherwise(F.max("publishers")).alias("publishers"),
        F.sum("messages_sent").alias("messages_sent"),
        F.sum("bytes_in").alias("bytes_in"),
        F.sum("bytes_out").alias("bytes_out"),
    )


def by_channel(loads: DataFrame, slots: DataFrame) -> DataFrame:
    """Return one row per channel.

    ``slots`` counts the slots in which reports name the channel; rates refer to their time. ``p_ratio`` and
    ``s_ratio`` are those of Algorithm 1 (Dynamoth, III-B.1): publications/s per subscriber, and subscribers per
    publication/s. ``share`` is that of all bytes sent to subscribers, of the channels that reports do not name as well.
    ``churn_per_minute`` is the mean change of the number of subscribers: a lower bound of those who came and went.
    """
    before = Window.partitionBy("channel").orderBy("slot")
    changed = F.abs(F.col("subscribers") - F.lag("subscribers").over(before))
    figures = (
        loads.withColumn("changed", changed)
        .groupBy("channel")
        .agg(
            F.count("*").alias("slots"),
            F.sum("seconds").alias("seconds"),
            F.sum("publications").alias("publications"),
            F.sum("bytes_out").alias("bytes_out"),
            F.max("publishers").alias("publishers"),
            weighted_mean("subscribers", "seconds").alias("subscribers"),
            F.sum("messages_sent").alias("messages_sent"),
            F.coalesce(F.sum("changed"), F.lit(0.0)).alias("changed"),
            F.max("servers").alias("servers_max"),
        )
    )
    total = F.broadcast(slots.agg(F.sum("bytes_out").alias("total_bytes_out")))
    seconds = F.nullif("seconds", F.lit(0.0))
    rate = F.col("publications") / seconds
    return figures.crossJoin(total).select(
        "channel",
        "slots",
        "seconds",
        "publications",
        rate.alias("publications_per_s"),
        (F.col("messages_sent") / seconds).alias("messages_per_s"),
        "bytes_out",
        (F.col("bytes_out") / seconds).alias("bytes_out_per_s"),
        "publishers",
        "subscribers",
        (F.col("messages_sent") / F.nullif("publications", F.lit(0))).alias("fan_out"),
        (rate / F.nullif("subscribers", F.lit(0.0))).alias("p_ratio"),
        (F.col("subscribers") / F.nullif(rate, F.lit(0.0))).alias("s_ratio"),
        (F.col("bytes_out") / F.nullif("total_bytes_out", F.lit(0))).alias("share"),
        (F.col("changed") * 60 / seconds).alias("churn_per_minute"),
        "servers_max",
    )


def popularity(summary: DataFrame, slots: DataFrame) -> DataFrame:
    """Fit Zipf's law to the publications of the busiest channels: one row.

    Where reports had no room for all channels, those that are not named all the time are left out: their publications
    are not all known, and the exponent would be too large.

    ``exponent`` s of publications ~ rank^-s, by linear regression of the logarithms, and its standard error. The errors
    of ranked data depend on each other, so the true one is larger. Null with fewer than ``ZIPF_CHANNELS_MIN``.
    """
    unnamed = slots.where("channel is null").agg(F.coalesce(F.sum("publications"), F.lit(0)).alias("unnamed"))
    most = summary.agg(F.max("slots").alias("slots_max"))
    is_whole = (F.col("unnamed") == 0) | (F.col("slots") >= ZIPF_NAMED_MIN * F.col("slots_max"))
    top = (
        summary.crossJoin(F.broadcast(unnamed))
        .crossJoin(F.broadcast(most))
        .where(is_whole & (F.col("publications") >= ZIPF_PUBLICATIONS_MIN))
        .orderBy(F.desc("publications"), "channel")
        .limit(ZIPF_CHANNELS_MAX)
    )
    rank = F.row_number().over(Window.orderBy(F.desc("publications"), "channel"))
    points = top.select(F.log("publications").alias("y"), F.log(rank.cast("double")).alias("x"))
    fit = points.agg(
        F.count("*").alias("channels"),
        F.regr_slope("y", "x").alias("slope"),
        F.regr_r2("y", "x").alias("r2"),
        F.regr_sxx("y", "x").alias("sxx"),
        F.regr_syy("y", "x").alias("syy"),
    )
    spread = (1 - F.col("r2")) * F.col("syy") / F.nullif(F.col("channels") - 2, F.lit(0)) / F.col("sxx")
    enough = F.col("channels") >= ZIPF_CHANNELS_MIN
    return fit.select(
        "channels",
        F.when(enough, -F.col("slope")).alias("exponent"),
        F.when(enough, F.sqrt(F.greatest(spread, F.lit(0.0)))).alias("standard_error"),
        "r2",
    )
