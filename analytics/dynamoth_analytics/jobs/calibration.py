"""Calibration: the load ratio at which the latency of a server breaks, and settings that follow from it.

The latency of probes is compared with the load of their server, slot by slot. Medians of slots with the same load
(``STEP``) are fitted by curves of three parameters, by least squares of relative errors, where each probe weighs the
same:

* a break: flat up to a load ratio, a straight line from there on;
* smooth rises: flat up to a load ratio and a parabola from there on; a + b / (c - load ratio), as of a queue, which for
  large c is a straight line.

A break counts only if it explains the medians clearly better than a constant and than every smooth rise, and if loads
on both sides of it were seen. A smooth rise has no load ratio beyond which a server is too full, so none is given.
"""

from __future__ import annotations

import math

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dynamoth_analytics.jobs.load import slot_of

SLOT_S = 5
STEP = 0.005
RATIO_MAX = 2.0
"""Ratios beyond this are no measurement of a server with a sensible maximum."""

BREAK, SMOOTH, FLAT, TOO_LITTLE = "break", "smooth", "flat", "too little"
"""Shapes of latency against load. Too little: too few loads were seen, of all or beyond what may be a break."""

BINS_MIN = 8
BEFORE_MIN, BEYOND_MIN = 5, 3
"""Least loads that must have been seen, and of them before and beyond the break point."""

RISE_MIN = 2.0
"""A rise counts if the latency at the largest load is at least this many times that at the smallest."""

CLEAR_OF_FLAT, CLEAR_OF_SMOOTH = 10.0, 3.0
"""How much better a curve must explain n medians than another one: n log(squares of the other / own squares), twice the
logarithm of how much more probable it makes them. Of noise alone, one recording in a hundred seems to rise by the
first; hardly any by ``RISE_MIN``, too. The second keeps 97% of breaks with six noisy loads beyond them; a straight line
with errors of 10% seems to break in one recording of forty, and other smooth rises in fewer."""

_POLES = 27
_POLE_GROWTH = 1.4
"""The poles c of queues that are tried: from ``STEP`` beyond the largest load to 30 beyond it, where the curve is as
good as straight."""


def response(servers: DataFrame, latency: DataFrame) -> DataFrame:
    """Return the median latency per server and load: server, ratio, latency_s, probes."""
    weight = F.col("outgoing_bytes_per_s") * F.col("interval_s")
    most = F.sum(F.col("outgoing_bytes_per_s_max") * F.col("interval_s"))
    loads = servers.groupBy("server", slot_of(SLOT_S).alias("slot")).agg((F.sum(weight) / most).alias("ratio"))
    slot = F.timestamp_seconds(F.floor(F.col("at").cast("double") / SLOT_S) * SLOT_S)
    probes = latency.where("latency_s > 0").select("server", slot.alias("slot"), "latency_s")
    step = F.round(F.col("ratio") / STEP).cast("int")
    return (
        probes.join(loads, ["server", "slot"])
        .where(F.col("ratio").between(0.0, RATIO_MAX))
        .groupBy("server", step.alias("step"))
        .agg(
            F.avg("ratio").alias("ratio"),
            F.percentile_approx("latency_s", 0.5).alias("latency_s"),
            F.count("*").alias("probes"),
        )
        .drop("step")
    )


def break_points(spark: SparkSession, response: DataFrame) -> DataFrame:
    """Return one row per server: the shape of its latency, and the break point as a load ratio where it has one.

    ``latency_s_min`` is the latency of the curve at the smallest load, null without a rise; ``latency_s_max`` is the
    measured one at the largest.
    """
    seen = response.groupBy("server").agg(
        F.min("ratio").alias("ratio_min"),
        F.max("ratio").alias("ratio_max"),
        F.count("*").alias("bins"),
        F.sum("probes").alias("probes"),
        F.max_by("latency_s", "ratio").alias("latency_s_max"),
    )
    is_break, names = F.col("curve") == BREAK, ("squares", "low_s", "high_s")
    best = (
        _fits(response, _curves(spark, seen))
        .groupBy("server")
        .agg(
            F.max("squares_flat").alias("squares_flat"),
            F.min(F.when(is_break, F.struct(*names, "at_ratio", "before", "beyond"))).alias("broken"),
            F.min(F.when(~is_break, F.struct(*names))).alias("smooth"),
        )
    )
    squares_broken, squares_smooth = (F.coalesce(f"{fit}.squares", F.lit(math.inf)) for fit in ("broken", "smooth"))
    breaks = squares_broken * F.exp(CLEAR_OF_SMOOTH / F.col("bins")) < squares_smooth
    squares, low_s, high_s = (
        F.when(breaks, F.col(f"broken.{name}")).otherwise(F.col(f"smooth.{name}")) for name in names
    )
    rises = (squares * F.exp(CLEAR_OF_FLAT / F.col("bins")) < F.col("squares_flat")) & (high_s > RISE_MIN * low_s)
    shape = (
        F.when(F.col("bins") < BINS_MIN, TOO_LITTLE)
        .when(~F.coalesce(rises, F.lit(False)), FLAT)
        .when(~breaks | (F.col("broken.before") < BEFORE_MIN), SMOOTH)
        .when(F.col("broken.beyond") < BEYOND_MIN, TOO_LITTLE)
        .otherwise(BREAK)
    )
    judged = seen.join(best, "server", "left").withColumn("shape", shape)
    return judged.select(
        "server",
        "shape",
        F.when(F.col("shape") == BREAK, F.col("broken.at_ratio")).alias("break_ratio"),
        F.when(F.col("shape").isin(BREAK, SMOOTH), low_s).alias("latency_s_min"),
        "latency_s_max",
        "ratio_max",
        "bins",
        "probes",
    )


def _fits(response: DataFrame, curves: DataFrame) -> DataFrame:
    """Return the best fit of each rising curve to each server: its squares, and its latency at both ends."""
    ratio, at = F.col("ratio"), F.col("at_ratio")
    beyond = F.greatest(ratio - at, F.lit(0.0))
    feature = (
        F.when(F.col("curve") == BREAK, beyond).when(at > F.col("ratio_max"), 1 / (at - ratio)).otherwise(beyond**2)
    )
    rows = response.join(F.broadcast(curves), "server").select(
        *("server", "curve", "at_ratio", "ratio"),
        feature.alias("x"),
        F.col("latency_s").alias("y"),
        (F.col("probes") / F.col("latency_s") ** 2).alias("w"),
    )
    sums = rows.groupBy("server", "curve", "at_ratio").agg(
        *(F.sum(F.expr(" * ".join(product))).alias(product) for product in ("w", "wx", "wy", "wxx", "wxy", "wyy")),
        F.min("x").alias("x_min"),
        F.max("x").alias("x_max"),
        F.count(F.when(ratio <= at, 1)).alias("before"),
        F.count(F.when(ratio > at, 1)).alias("beyond"),
    )
    w, wx, wy = F.col("w"), F.col("wx"), F.col("wy")
    return (
        sums.withColumn("xx", F.col("wxx") - wx * wx / w)
        .withColumn("xy", F.col("wxy") - wx * wy / w)
        .withColumn("squares_flat", F.col("wyy") - wy * wy / w)
        .where("xx > 0 and xy > 0")
        .withColumn("slope", F.col("xy") / F.col("xx"))
        .withColumn("squares", F.col("squares_flat") - F.col("slope") * F.col("xy"))
        .withColumn("low_s", wy / w + F.col("slope") * (F.col("x_min") - wx / w))
        .withColumn("high_s", wy / w + F.col("slope") * (F.col("x_max") - wx / w))
    )


def _curves(spark: SparkSession, seen: DataFrame) -> DataFrame:
    """Return the curves to try per server: which, and the load ratio of its break, of its bend or of its pole."""
    names = "server", "ratio_min", "ratio_max"
    steps = seen.select(*names).crossJoin(spark.range(int(RATIO_MAX / STEP)))
    below = steps.select(*names, "id", (F.col("id") * STEP).alias("at_ratio")).where("at_ratio < ratio_max")
    breaks = below.where("at_ratio > ratio_min").select(*names, "at_ratio", F.lit(BREAK).alias("curve"))
    # Where a parabola bends matters less: every fourth step is enough.
    bends = below.where("id % 4 = 0").select(*names, "at_ratio", F.lit(SMOOTH).alias("curve"))
    pole = F.col("ratio_max") + STEP * F.pow(F.lit(_POLE_GROWTH), F.col("id"))
    poles = seen.crossJoin(spark.range(_POLES)).select(*names, pole.alias("at_ratio"), F.lit(SMOOTH).alias("curve"))
    return breaks.unionByName(bends).unionByName(poles)
