"""Compares settings by what they did to the recorded load: sums over all windows, a sign test, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.replay.grid import Combination
from dynamoth_analytics.replay.windows import WHOLE_RECORDING
from dynamoth_balancer.options import BalancerOptions

CONFIDENT_P = 0.05
"""Settings are called better where chance alone makes some look so good with at most this probability."""

SAME_S = 1.0
"""Overload and server-seconds that differ by less are the same."""


class Judged:
    """A combination of settings that was compared with those in force (``combination`` 0), window by window."""

    combination: int
    windows: int
    #: In how many windows it was better, or worse, than the settings in force.
    better: int
    worse: int
    #: How many combinations are tried besides the settings in force.
    tried: int

    @property
    def p(self) -> float:
        """A bound of the probability that any of the combinations tried has so many better windows by chance.

        Sign test, times ``tried`` (Bonferroni). By chance: better and worse are equally probable in each window, and
        windows do not depend on each other. Windows that are alike do not count.
        """
        return min(1.0, self.tried * sign_test(self.better, self.worse))

    @property
    def beats(self) -> bool:
        """Whether it is better than the settings in force in most windows."""
        return 2 * self.better > self.windows

    @property
    def is_sure(self) -> bool:
        """Whether it is better in most windows, and hardly by chance."""
        return self.beats and self.p <= CONFIDENT_P

    @property
    def costs(self) -> tuple[float, float, float]:
        """What it costs: lower is better."""
        raise NotImplementedError


J = TypeVar("J", bound=Judged)


@dataclass(frozen=True, slots=True)
class Compared(Judged):
    """The sum of all windows under a combination of settings, compared with those in force (``combination`` 0)."""

    combination: int
    text: str
    windows: int
    overload_minutes: float
    server_s: float
    moves: int
    replications: int
    ratio_max: float
    imbalance: float
    #: In how many windows it was better, or worse, than the settings in force.
    better: int
    worse: int
    #: How many combinations are tried besides the settings in force.
    tried: int = 1
    #: In how many windows its replay failed, and why in the first of them. No figure includes these windows.
    failed: int = 0
    problem: str | None = None

    @property
    def costs(self) -> tuple[float, float, float]:
        """Overload, server-seconds and moves: lower is better."""
        return round(self.overload_minutes, 3), round(self.server_s), float(self.moves)


@cache
def sign_test(better: int, worse: int) -> float:
    """Return the probability of at least ``better`` heads in ``better + worse`` throws of a coin."""
    throws = better + worse
    ways = total = math.comb(throws, better)
    for heads in range(better, throws):
        ways = ways * (throws - heads) // (heads + 1)
        total += ways
    return total / (1 << throws)


def complete(compared: Sequence[J]) -> list[J]:
    """Return the combinations that were replayed in all windows of the settings in force, which come first.

    The others have smaller sums only because they lack windows.
    """
    return [each for each in compared if each.windows == compared[0].windows]


def incomplete(compared: Sequence[J]) -> list[J]:
    """Return the combinations that lack windows of the settings in force, which come first."""
    return [each for each in compared if each.windows != compared[0].windows]


def frontier(compared: Iterable[J]) -> list[J]:
    """Return those that no other one beats in all costs at once, by the first.

    Of several with the same costs, the first.
    """
    kept: list[J] = []
    for each in sorted(compared, key=lambda one: (one.costs, one.combination)):
        if not any(all(a <= b for a, b in zip(other.costs, each.costs, strict=True)) for other in kept):
            kept.append(each)
    return kept


def winners(compared: Iterable[J]) -> list[J]:
    """Return the combinations that are better than the settings in force in most windows, the surest and best first."""
    return sorted((each for each in compared if each.beats), key=lambda one: (one.p, one.costs, one.combination))


def compare(replays: DataFrame, combinations: Sequence[Combination[BalancerOptions]]) -> list[Compared]:
    """Return the sums of each combination over the windows that the settings in force have, those in force first.

    Args:
        replays: rows of ``task.REPLAYS``.
        combinations: by number.

    Raises:
        BadRecording: the settings in force have no window.

    """
    windows = replays.where(F.col("window") != WHOLE_RECORDING)
    in_force = windows.where((F.col("combination") == 0) & F.col("problem").isNull()).select(
        "window", *(F.col(name).alias(f"{name}_in_force") for name in ("overload_s", "moves", "server_s"))
    )

    def saved(name: str) -> Column:
        return F.col(f"{name}_in_force") - F.col(name)

    gain = (
        F.when(F.abs(saved("overload_s")) >= SAME_S, saved("overload_s"))
        .when(saved("moves") != 0, saved("moves"))
        .when(F.abs(saved("server_s")) >= SAME_S, saved("server_s"))
        .otherwise(0.0)
    )
    problem_at = F.when(F.col("problem").isNotNull(), F.col("window"))
    sums = (
        # Figures of a failed replay are null, and count nowhere.
        windows.join(in_force, "window", "left")
        .where("overload_s_in_force IS NOT NULL OR problem IS NOT NULL")
        .groupBy("combination")
        .agg(
            F.count("overload_s").alias("windows"),
            (F.sum("overload_s") / 60).alias("overload_minutes"),
            F.sum("server_s").alias("server_s"),
            F.sum("moves").alias("moves"),
            F.sum("replications").alias("replications"),
            F.max("ratio_max").alias("ratio_max"),
            F.avg("imbalance").alias("imbalance"),
            F.count_if(gain > 0).alias("better"),
            F.count_if(gain < 0).alias("worse"),
            F.count("problem").alias("failed"),
            F.min_by("problem", problem_at).alias("problem"),
        )
        .fillna(0)
        .orderBy("combination")
    )
    tried = max(1, len(combinations) - 1)
    texts = {number: each.text for number, each in enumerate(combinations)}
    rows = [Compared(text=texts[row["combination"]], tried=tried, **row.asDict()) for row in sums.collect()]
    if not rows or not rows[0].windows:
        problem = rows[0].problem if rows else "none has a report"
        raise BadRecording(f"no window can be replayed under the settings in force: {problem}")
    return rows
