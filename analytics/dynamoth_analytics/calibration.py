"""Calibration: the load ratio at which the latency of a server breaks, and settings that follow from it.

The latency of probes is compared with the load of their server, slot by slot. Medians of slots with the same load
(``STEP``) are fitted by a line that is flat up to a break point and rises from there; the break point is the one with
the smallest sum of squares. It counts only if the latency rises clearly and loads beyond it were seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dynamoth.settings.declare import to_text
from dynamoth_analytics.load import slot_of

SLOT_S = 5
STEP = 0.01
RATIO_MAX = 2.0
"""Ratios beyond this are no measurement of a server with a sensible maximum."""

BINS_MIN = 8
BEYOND_MIN = 3
"""Least loads that must have been seen, and of them beyond the break point."""

RISE_MIN = 2.0
"""The latency at the largest load is at least so many times that before the break point."""

HIGH_MIN, HIGH_MAX = 0.6, 0.9
SAFE_RATIO = 0.75
"""Bounds of the recommended LR_high; LR_safe is this share of it, as with Dynamoth's 0.8 and 0.6."""


def response(servers: DataFrame, latency: DataFrame) -> DataFrame:
    """Return the median latency per server and load: server, ratio, latency_s, probes."""
    weight = F.col("outgoing_bytes_per_s") * F.col("interval_s")
    most = F.sum(F.col("outgoing_bytes_per_s_max") * F.col("interval_s"))
    loads = servers.groupBy("server", slot_of(SLOT_S).alias("slot")).agg((F.sum(weight) / most).alias("ratio"))
    slot = F.timestamp_seconds(F.floor(F.col("at").cast("double") / SLOT_S) * SLOT_S)
    probes = latency.where("latency_s is not null").select("server", slot.alias("slot"), "latency_s")
    step = F.round(F.col("ratio") / STEP).cast("int")
    return (
        probes.join(loads, ["server", "slot"])
        .where(F.col("ratio").between(0.0, RATIO_MAX))
        .groupBy("server", step.alias("step"))
        .agg(F.percentile_approx("latency_s", 0.5).alias("latency_s"), F.count("*").alias("probes"))
        .select("server", (F.col("step") * STEP).alias("ratio"), "latency_s", "probes")
    )


def break_points(spark: SparkSession, response: DataFrame) -> DataFrame:
    """Return one row per server: the break point as a load ratio, null where none was found, with the evidence.

    ``flat_s`` is the fitted latency up to it, ``latency_s_max`` that at the largest load.
    """
    seen = response.groupBy("server").agg(
        F.min("ratio").alias("ratio_min"),
        F.max("ratio").alias("ratio_max"),
        F.count("*").alias("bins"),
        F.sum("probes").alias("probes"),
        F.max_by("latency_s", "ratio").alias("latency_s_max"),
    )
    # Candidates lie between the steps, too: the true one need not be on a step.
    candidates = spark.range(1, int(RATIO_MAX / STEP) * 2).select((F.col("id") * STEP / 2).alias("at_ratio"))
    beyond = F.greatest(F.col("ratio") - F.col("at_ratio"), F.lit(0.0))
    fits = (
        response.join(F.broadcast(seen.select("server", "ratio_min", "ratio_max")), "server")
        .crossJoin(F.broadcast(candidates))
        .where("at_ratio > ratio_min and at_ratio < ratio_max")
        .groupBy("server", "at_ratio")
        .agg(
            (F.regr_syy("latency_s", beyond) * (1 - F.regr_r2("latency_s", beyond))).alias("squares"),
            F.regr_slope("latency_s", beyond).alias("slope"),
            F.regr_intercept("latency_s", beyond).alias("flat_s"),
            F.count(F.when(F.col("ratio") > F.col("at_ratio"), 1)).alias("bins_beyond"),
        )
    )
    best = (
        fits.where("squares is not null")
        .groupBy("server")
        .agg(F.min(F.struct("squares", "at_ratio", "slope", "flat_s", "bins_beyond")).alias("fit"))
    )
    clear = F.col("bins") >= BINS_MIN
    clear &= (F.col("fit.bins_beyond") >= BEYOND_MIN) & (F.col("fit.slope") > 0)
    clear &= F.col("latency_s_max") > RISE_MIN * F.col("fit.flat_s")
    return seen.join(best, "server", "left").select(
        "server",
        F.when(clear, F.col("fit.at_ratio")).alias("break_ratio"),
        F.when(clear, F.col("fit.flat_s")).alias("flat_s"),
        "latency_s_max",
        "ratio_max",
        "bins",
        "probes",
    )


def recommended(
    breaks: Sequence[Mapping[str, Any]],
    capacities: Mapping[str, float],
    urls: Mapping[str, str],
    rise: float | None,
    present: Mapping[str, float],
    thresholds: Sequence[str] = (),
) -> str:
    """Return the recommended settings as TOML for ``dynamoth balancer``, with the evidence as comments.

    The maximum of each server becomes what it sent at its break point, so that load ratio 1 means the same at all. Only
    what the recording proves is changed. LR_high leaves room for the usual rise of a load within a slot.

    Args:
        breaks: rows of :func:`break_points`.
        capacities: the present maximum of each server, in bytes/s.
        urls: of the servers; where one is missing, the servers are comments.
        rise: how far the largest load ratio of a slot is above its mean, usually; None: unknown.
        present: the settings in force.
        thresholds: more lines of ``[balancer]``.

    """
    by_server = {row["server"]: row for row in breaks}
    found = [row for row in breaks if row["break_ratio"] is not None]
    lines = [
        "# Recommended by `dynamoth report`. Check: `dynamoth balancer --check --config FILE`.",
        "",
        "[balancer]",
    ]
    high, safe = present["load_ratio_high"], present["load_ratio_safe"]
    if found and rise is not None:
        scale = min(row["break_ratio"] for row in found)
        high = round(min(HIGH_MAX, max(HIGH_MIN, 1.0 - rise / scale)), 2)
        safe = round(high * SAFE_RATIO, 2)
        lines.append(f"# Loads rise {rise / scale:.2f} above the mean of a slot, of a server's break point.")
    else:
        lines.append("# As now: no server was seen beyond a break point.")
    lines += [f"load_ratio_high = {high:g}", f"load_ratio_safe = {safe:g}", *thresholds]
    complete = all(server in urls for server in capacities)
    mark = "" if complete else "# "
    if not complete:
        lines += ["", "# The recording does not have the URLs of all servers: add them, and remove the marks."]
    for server in sorted(capacities):
        row = by_server.get(server)
        value = capacities[server]
        if row is not None and row["break_ratio"] is not None:
            value *= row["break_ratio"]
            why = (
                f"latency rises from {row['flat_s'] * 1e3:.2f} ms to {row['latency_s_max'] * 1e3:.2f} ms beyond load"
                f" ratio {row['break_ratio']:.3f} of {capacities[server]:.0f} bytes/s; {row['probes']} probes"
            )
        else:
            seen = f" up to load ratio {row['ratio_max']:.2f}" if row is not None else ""
            why = f"as now: no break was seen{seen}"
        lines += ["", f"# {why}", f"{mark}[[cluster.servers]]", f"{mark}id = {to_text(server, quoted=True)}"]
        lines += [f"{mark}url = {to_text(urls.get(server, 'redis://HOST:PORT'), quoted=True)}"]
        lines += [f"{mark}outgoing_bytes_per_s_max = {max(1, round(value))}"]
    return "\n".join(lines) + "\n"
