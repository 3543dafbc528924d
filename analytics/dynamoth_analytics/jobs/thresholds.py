"""Thresholds of replication that a recording gives reason for.

A channel that alone makes more than ``load_ratio_high`` of the largest server needs several servers. Algorithm 1 (see
``dynamoth_balancer.decide.replicate``) should replicate it before that. Where the thresholds in force are above what
the channel has at ``load_ratio_high``, lower ones are recommended: by what it has at ``replicate_load_ratio_min``. Only
channels with so much load are concerned, so lower thresholds replicate no small ones. A recording without such channels
gives no reason for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dynamoth_analytics.jobs.channels import SINGLE
from dynamoth_analytics.page.html import figure, shown
from dynamoth_analytics.recorded_settings import DEFAULTS

BELOW_RATIO = 0.9
"""A threshold is this share of the figure that is to be above it."""

REPLICAS_MIN = 2

Row = Mapping[str, Any]


def outgrown(loads: DataFrame, capacity: float, high: float) -> DataFrame:
    """Return the channels that alone made more than the load ratio ``high``, each at its largest load.

    Args:
        loads: those of :func:`dynamoth_analytics.channels.channel_loads`.
        capacity: outgoing bytes/s of the largest server.
        high: the load ratio above which a server is relieved.

    """
    seconds = F.nullif("seconds", F.lit(0.0))
    figures = loads.where(F.col("mode") == SINGLE).select(
        "channel",
        (F.col("bytes_out") / seconds / F.lit(capacity)).alias("ratio"),
        (F.col("publications") / seconds).alias("publications_per_s"),
        "subscribers",
        "publishers",
    )
    names = [name for name in figures.columns if name != "channel"]
    largest = figures.where(F.col("ratio") > high).groupBy("channel").agg(F.max(F.struct(*names)).alias("largest"))
    return largest.select("channel", "largest.*")


def thresholds(channels: Sequence[Row], present: Mapping[str, float]) -> list[str]:
    """Return the recommended thresholds as lines of TOML, with the evidence as comments; none without evidence.

    Args:
        channels: rows of :func:`outgrown`.
        present: the settings in force.

    """
    large, high = present["replicate_load_ratio_min"], present["load_ratio_high"]
    lowest: dict[str, tuple[float, Row]] = {}
    for row in channels:
        at_high = _figures(row, high)
        for name, value in _figures(row, large).items():
            if at_high[name] <= present[name] and (name not in lowest or value < lowest[name][0]):
                lowest[name] = value, row
    lines: list[str] = []
    for name, (value, row) in lowest.items():
        lines += [
            f"# {present[name]:g} is too much: {shown(row['channel'])} alone made load ratio {row['ratio']:.2f}, with"
            f" {figure(row['publications_per_s'])} publications/s to {figure(row['subscribers'])} subscribers.",
            f"# At load ratio {large:g}, from which channels are replicated, it would have {value:.3g}.",
            f"{name} = {_rounded(value * BELOW_RATIO, whole=isinstance(DEFAULTS[name], int))}",
        ]
    return lines


def _figures(row: Row, ratio: float) -> dict[str, float]:
    """Return what the thresholds are compared with, at a load ratio; nothing where figures are unknown.

    A channel with more publications than subscribers got there by publications, another one by subscribers.
    """
    share = min(1.0, ratio / row["ratio"])
    rate, subscribers, publishers = row["publications_per_s"], row["subscribers"], row["publishers"]
    if None in (rate, subscribers, publishers):
        return {}
    if rate >= subscribers and publishers >= REPLICAS_MIN:
        rate *= share
        return {
            "replicate_publications_per_s_min": rate,
            "all_subscribers_ratio_min": rate / max(subscribers, 1.0),
        }
    if subscribers >= REPLICAS_MIN and rate > 0:
        subscribers *= share
        return {"replicate_subscribers_min": subscribers, "all_publishers_ratio_min": subscribers / rate}
    return {}


def _rounded(value: float, *, whole: bool) -> str:
    """Return a number with two digits that matter, as TOML."""
    rounded = float(f"{value:.2g}")
    return f"{int(rounded)}" if whole else f"{rounded!r}"
