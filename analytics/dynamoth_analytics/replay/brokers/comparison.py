"""Compares settings of a coordinator by what they did to the recorded loads of brokers."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.replay.brokers.task import RECORDED
from dynamoth_analytics.replay.comparison import SAME_S, Judged
from dynamoth_analytics.replay.grid import Combination
from dynamoth_broker.coordinator.settings import CoordinatorOptions

SAME_COV = 0.005
"""Means of the cov that differ by less are the same."""

_MEANS = ("ratio_max_mean", "cov", "redis_egress")
_SUMS = ("moves", "decisions", "shuffles")


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """All windows together: of what was recorded, or of a combination. Means are over the time with reports."""

    windows: int
    overload_minutes: float
    #: The largest load ratio of all, and the mean of the largest at a time.
    ratio_max: float
    ratio_max_mean: float
    cov: float
    #: In bytes/s.
    redis_egress: float
    moves: int
    decisions: int
    shuffles: int


@dataclass(frozen=True, slots=True)
class ComparedBrokers(Judged):
    """A combination of settings, compared with those in force (``combination`` 0)."""

    combination: int
    text: str
    figures: BrokerFigures
    better: int
    worse: int
    tried: int = 1
    #: In how many windows its replay failed, and why in one of them.
    failed: int = 0
    problem: str | None = None

    @property
    def windows(self) -> int:  # type: ignore[override]
        """The windows that were replayed."""
        return self.figures.windows

    @property
    def costs(self) -> tuple[float, float, float]:
        """Overload, unevenness and moves: lower is better."""
        return round(self.figures.overload_minutes, 3), round(self.figures.cov, 3), float(self.figures.moves)


def compare_brokers(
    replays: DataFrame, combinations: Sequence[Combination[CoordinatorOptions]]
) -> tuple[BrokerFigures, list[ComparedBrokers]]:
    """Return what was recorded, and each combination over the windows of the settings in force, those in force first.

    A combination is better in a window if it has less overload; where that is the same, a lower mean cov; then fewer
    moves.

    Args:
        replays: rows of ``task.BROKER_REPLAYS``.
        combinations: by number.

    Raises:
        BadRecording: the settings in force have no window.

    """
    in_force = replays.where((F.col("combination") == 0) & F.col("problem").isNull()).select(
        "window", *(F.col(name).alias(f"{name}_in_force") for name in ("overload_s", "cov", "moves"))
    )

    def saved(name: str) -> Column:
        return F.col(f"{name}_in_force") - F.col(name)

    gain = (
        F.when(F.abs(saved("overload_s")) >= SAME_S, saved("overload_s"))
        .when(F.abs(saved("cov")) >= SAME_COV, saved("cov"))
        .otherwise(saved("moves"))
    )
    seconds = F.nullif(F.sum("seconds"), F.lit(0.0))
    sums = (
        # Figures of a failed replay are null, and count nowhere.
        replays.join(in_force, "window", "left")
        .where("overload_s_in_force IS NOT NULL OR problem IS NOT NULL")
        .groupBy("combination")
        .agg(
            F.count("overload_s").alias("windows"),
            (F.sum("overload_s") / 60).alias("overload_minutes"),
            F.max("ratio_max").alias("ratio_max"),
            *((F.sum(F.col(name) * F.col("seconds")) / seconds).alias(name) for name in _MEANS),
            *(F.sum(name).alias(name) for name in _SUMS),
            F.count_if(gain > 0).alias("better"),
            F.count_if(gain < 0).alias("worse"),
            F.count("problem").alias("failed"),
            F.first("problem", ignorenulls=True).alias("problem"),
        )
        .fillna(0)
        .orderBy("combination")
    )
    rows = {row["combination"]: row for row in sums.collect()}
    if 0 not in rows or not rows[0]["windows"]:
        problem = rows[0]["problem"] if 0 in rows else "none has a report"
        raise BadRecording(f"no window of brokers can be replayed under the settings in force: {problem}")
    tried = max(1, len(combinations) - 1)
    figures = {
        number: BrokerFigures(**{name: row[name] for name in BrokerFigures.__dataclass_fields__})
        for number, row in rows.items()
    }
    compared = [
        ComparedBrokers(
            number,
            combinations[number].text,
            figures[number],
            row["better"],
            row["worse"],
            tried,
            row["failed"],
            row["problem"],
        )
        for number, row in rows.items()
        if number != RECORDED
    ]
    return figures[RECORDED], compared
