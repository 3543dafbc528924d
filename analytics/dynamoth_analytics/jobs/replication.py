"""Replication: what Algorithm 1 asks for (Dynamoth, III-B.1), and the channels that one server is too small for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dynamoth_analytics.jobs.channels import ALL_PUBLISHERS, ALL_SUBSCRIBERS, SINGLE


@dataclass(frozen=True, slots=True)
class _Judgement:
    """The conditions of Algorithm 1, as ``dynamoth_balancer.decide.replicate.Judgement`` has them.

    For rows with ``publications``, ``seconds``, ``subscribers``, ``publishers`` and ``bytes_out``. ``factor`` is 1 for
    the conditions to replicate a channel, less for those to keep it so.
    """

    settings: Mapping[str, float]
    capacity: float
    factor: float = 1.0

    def _exceeds(self, value: Column, setting: str) -> Column:
        return value > self.settings[setting] * self.factor

    @property
    def _rate(self) -> Column:
        return F.col("publications") / F.col("seconds")

    @property
    def _ratio(self) -> Column:
        return F.col("bytes_out") / F.col("seconds") / F.lit(self.capacity)

    @property
    def outgrown(self) -> Column:
        return self._exceeds(self._ratio, "load_ratio_high")

    def keeps(self, mode: str) -> Column:
        rate, subscribers = self._rate, F.col("subscribers")
        large = self._exceeds(self._ratio, "replicate_load_ratio_min")
        many_publications = large & self._exceeds(rate, "replicate_publications_per_s_min")
        many_subscribers = large & self._exceeds(subscribers, "replicate_subscribers_min")
        if mode == ALL_SUBSCRIBERS:
            p_ratio = rate / F.greatest(subscribers, F.lit(1.0))
            return many_publications & (self._exceeds(p_ratio, "all_subscribers_ratio_min") | many_subscribers)
        s_ratio = subscribers / F.greatest(rate, F.lit(1e-9))
        return many_subscribers & self._exceeds(s_ratio, "all_publishers_ratio_min")

    def spreads(self, mode: str) -> Column:
        """Return whether two replicas have something to do."""
        return F.floor(F.col("publishers" if mode == ALL_SUBSCRIBERS else "subscribers") / self.factor) >= 2

    def enters(self, mode: str) -> Column:
        return self.keeps(mode) & self.spreads(mode)

    def entered(self) -> Column:
        """Return the mode of a channel that is not replicated."""
        more_publications = self.outgrown & (self._rate >= F.col("subscribers"))
        return (
            F.when(self.enters(ALL_SUBSCRIBERS), ALL_SUBSCRIBERS)
            .when(self.enters(ALL_PUBLISHERS), ALL_PUBLISHERS)
            .when(more_publications & self.spreads(ALL_SUBSCRIBERS), ALL_SUBSCRIBERS)
            .when(self.outgrown & self.spreads(ALL_PUBLISHERS), ALL_PUBLISHERS)
            .when(self.outgrown & self.spreads(ALL_SUBSCRIBERS), ALL_SUBSCRIBERS)
            .otherwise(SINGLE)
        )


def wanted_mode(settings: Mapping[str, float], capacity: float) -> Column:
    """Return the mode that Algorithm 1 asks for, given the present one, as ``dynamoth_balancer.decide.replicate`` does.

    A replicated channel stays so while it reaches ``replicate_keep_ratio`` of the thresholds. For rows with ``mode``,
    ``publications``, ``seconds``, ``subscribers``, ``publishers`` and ``bytes_out``.
    """
    strict = _Judgement(settings, capacity)
    lax = _Judgement(settings, capacity, settings["replicate_keep_ratio"])
    to_keep = F.when(lax.outgrown, F.col("mode")).otherwise(SINGLE)
    return (
        F.when(F.col("mode") == SINGLE, strict.entered())
        .when(
            F.col("mode") == ALL_SUBSCRIBERS,
            F.when(lax.keeps(ALL_SUBSCRIBERS), ALL_SUBSCRIBERS)
            .when(strict.enters(ALL_PUBLISHERS), ALL_PUBLISHERS)
            .otherwise(to_keep),
        )
        .when(strict.enters(ALL_SUBSCRIBERS), ALL_SUBSCRIBERS)
        .when(lax.keeps(ALL_PUBLISHERS), ALL_PUBLISHERS)
        .otherwise(to_keep)
    )


def replication(loads: DataFrame, settings: Mapping[str, float], capacity: float) -> DataFrame:
    """Return what Algorithm 1 asks for, slot by slot, against the mode that the plan had.

    One row per channel, mode and wanted mode, where either is not single.
    """
    rate = F.col("publications") / F.col("seconds")
    judged = loads.where("seconds > 0").withColumn("wanted", wanted_mode(settings, capacity))
    return (
        judged.where((F.col("wanted") != SINGLE) | (F.col("mode") != SINGLE))
        .groupBy("channel", "mode", "wanted")
        .agg(
            F.sum("seconds").alias("seconds"),
            F.max(rate).alias("publications_per_s_max"),
            F.max("subscribers").alias("subscribers_max"),
            F.max(F.col("bytes_out") / F.col("seconds") / F.lit(capacity)).alias("ratio_max"),
        )
    )


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
