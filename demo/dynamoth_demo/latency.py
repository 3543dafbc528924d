"""Latencies, counted in classes: bounded, and added up over processes."""

from __future__ import annotations

import math
from collections.abc import Mapping

CLASS_RATIO = 1.05
"""Each class is this much wider than the one below: a quantile is exact to 5%."""

LOWEST_NS = 1_000
"""The first class holds everything up to a microsecond."""

HIGHEST_NS = 3_600_000_000_000
"""The last class holds everything from an hour: some 450 classes in all."""

_SCALE = 1 / math.log(CLASS_RATIO)
_LAST_CLASS = math.ceil(math.log(HIGHEST_NS / LOWEST_NS) * _SCALE)


class LatencyCounts:
    """How many latencies fell into each class."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        #: Class to count; at most ``_LAST_CLASS + 1`` of them.
        self.counts: dict[int, int] = {}
        self.total = 0

    def add(self, latency_ns: int) -> None:
        """Count one latency; one below 0 (clocks that disagree) counts as 0."""
        of = 0 if latency_ns <= LOWEST_NS else min(_LAST_CLASS, math.ceil(math.log(latency_ns / LOWEST_NS) * _SCALE))
        self.counts[of] = self.counts.get(of, 0) + 1
        self.total += 1

    def merge(self, counts: Mapping[int, int]) -> None:
        """Add the ``counts`` of another."""
        for of, count in counts.items():
            self.counts[of] = self.counts.get(of, 0) + count
            self.total += count

    def quantile_ms(self, ratio: float) -> float | None:
        """Return the latency that ``ratio`` (0-1) of all do not exceed, in milliseconds; None without any."""
        wanted = math.ceil(self.total * ratio)
        for of in sorted(self.counts):
            wanted -= self.counts[of]
            if wanted <= 0:
                return LOWEST_NS * CLASS_RATIO**of / 1e6
        return None
