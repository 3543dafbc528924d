"""One run of an experiment, as data: what the brokers carried at each time. Runs are kept as lines of JSON.

Times and loads are those of the paper's 30 minutes: of a run whose time is compressed, times are multiplied and loads
divided by the factor.
"""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dynamoth_broker.coordinator.model import cov, mean


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, sampled at ``times``."""

    #: ``prototype`` (real processes) or ``simulation`` (virtual time).
    world: str
    workload: str
    placement: str
    scheme: str
    seed: int
    #: How much faster than the paper's time it ran; 1 for a simulation.
    compression: float = 1.0
    #: In seconds of the paper's time.
    times: list[float]
    #: F_j of each broker, in bytes/s of the paper's time, at each time.
    loads: list[list[float]]
    #: Users at each broker.
    users: list[list[int]]
    #: Users moved so far.
    moves: list[int]
    #: The sum of I_j, in bytes/s.
    egress: list[float]
    #: Capacities of the brokers, in bytes/s; empty: all are alike.
    capacities: list[float] = field(default_factory=list[float])
    #: Shuffles, the moves of these, and when the last of these moves ended (-1: there was none).
    shuffles: int = 0
    shuffle_moves: int = 0
    shuffle_end: float = -1.0
    #: What else was counted.
    more: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What distinguishes a run from others."""
        return self.world, self.workload, self.placement, self.scheme, self.seed

    # Figures of a run.

    def ratios(self, index: int) -> list[float]:
        """Return load ratios; loads where all brokers are alike."""
        loads = self.loads[index]
        capacities = self.capacities or [1.0] * len(loads)
        return [load / capacity for load, capacity in zip(loads, capacities, strict=True)]

    def covs(self, begin_s: float = 0.0) -> list[float]:
        """Return the cov at each time from ``begin_s`` on."""
        return [cov(self.ratios(index)) for index, at in enumerate(self.times) if at >= begin_s]

    def maxima(self, begin_s: float = 0.0) -> list[float]:
        """Return the largest load (ratio) at each time from ``begin_s`` on."""
        return [max(self.ratios(index)) for index, at in enumerate(self.times) if at >= begin_s]

    def mean_max(self, begin_s: float) -> float:
        """Return the mean of the largest load from ``begin_s`` on."""
        return mean(self.maxima(begin_s))

    def mean_cov(self, begin_s: float) -> float:
        return mean(self.covs(begin_s))

    def mean_egress(self, begin_s: float) -> float:
        return mean([egress for egress, at in zip(self.egress, self.times, strict=True) if at >= begin_s])

    def mean_spread(self, begin_s: float) -> float:
        """Return the mean of the largest less the least load."""
        indexes = [index for index, at in enumerate(self.times) if at >= begin_s]
        return mean([max(self.ratios(index)) - min(self.ratios(index)) for index in indexes])

    @property
    def moved(self) -> int:
        """Users moved, of shuffles too."""
        return self.moves[-1] if self.moves else 0

    def balanced_at(self, cov_max: float, begin_s: float) -> float:
        """Return the first time from ``begin_s`` on from which the cov stays at most this; infinity for never.

        A tenth of the later samples may be above: peaks.
        """
        covs, times = self.covs(begin_s), [at for at in self.times if at >= begin_s]
        for index, at in enumerate(times):
            later = covs[index:]
            if later[0] <= cov_max and sum(each > cov_max for each in later) <= len(later) / 10:
                return at
        return float("inf")

    def cov_after_shuffle(self, samples: int = 1) -> float:
        """Return the cov so many samples after the last shuffle ended; infinity without one."""
        later = [index for index, at in enumerate(self.times) if at >= self.shuffle_end]
        if self.shuffle_end < 0 or len(later) < samples:
            return float("inf")
        return cov(self.ratios(later[samples - 1]))


class Store:
    """A file of runs, one per line of JSON. A later line replaces an earlier one of the same run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._runs: dict[tuple[str, str, str, str, int], Run] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                run = Run(**json.loads(line))
                self._runs[run.key] = run

    def find(self, world: str, workload: str, placement: str, scheme: str, seed: int) -> Run | None:
        """Return a run; None where there is none."""
        return self._runs.get((world, workload, placement, scheme, seed))

    def add(self, run: Run) -> None:
        """Keep a run."""
        self._runs[run.key] = run
        line = json.dumps(_rounded(asdict(run)), separators=(",", ":")) + "\n"
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())  # at once: another command may append to the same file
        finally:
            os.close(file)


def _rounded(value: Any) -> Any:
    """Return data with floats of six digits at most: files are ten times shorter."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case list():
            return [_rounded(each) for each in value]
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case _:
            return value


class NoRuns(Exception):
    """Raised when a figure is asked for of which nothing has run."""


@dataclass(frozen=True)
class Spread:
    """Median and range of the values of several seeds."""

    median: float
    least: float
    most: float

    def text(self, unit: float = 1.0, digits: str = ".3g") -> str:
        """Return ``median (least to most)`` in a unit."""
        parts = (f"{each / unit:{digits}}" for each in (self.median, self.least, self.most))
        return "{} ({} to {})".format(*parts)


def spread(values: Iterable[float]) -> Spread:
    """Return median and range. Raises NoRuns: there is no value."""
    found: Sequence[float] = sorted(values)
    if not found:
        raise NoRuns("not run")
    return Spread(statistics.median(found), found[0], found[-1])
