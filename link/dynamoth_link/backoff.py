"""How long a link waits between two attempts to connect."""

from __future__ import annotations

import copy
import random
from typing import Protocol, final

PAUSE_S_MIN = 0.01
"""A link never gives up: with no pause at all it would keep a core busy for as long as its server is away."""

FAILURES_MAX = 30
"""Failures in a row are counted up to this: any backoff has reached its bound by then, and doubling cannot overflow."""


class Backoff(Protocol):
    """Decides how long a link pauses between two attempts.

    It has the methods of redis-py's backoffs, and may keep state as they do.
    """

    def reset(self) -> None:
        """Start again from the first failure: a connection has held."""
        ...

    def compute(self, failures: int) -> float:
        """Return how many seconds to wait after ``failures`` in a row (from 1)."""
        ...


@final
class Doubling:
    """The default backoff of a link: doubling pauses, shortened at random; see ``LinkOptions``."""

    def __init__(self, delay_s_min: float, delay_s_max: float) -> None:
        self._delay_s_min = delay_s_min
        self._delay_s_max = delay_s_max

    def reset(self) -> None:
        """Do nothing: it keeps no state."""

    def compute(self, failures: int) -> float:
        """Return the bound after ``failures``, less up to a half."""
        delay_s = min(self._delay_s_max, self._delay_s_min * 2.0 ** (failures - 1))
        return delay_s * random.uniform(0.5, 1.0)


@final
class Pauses:
    """The pauses of one link. It copies the given backoff, which may keep state."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = copy.deepcopy(backoff)

    def after(self, failures: int) -> float:
        """Return how many seconds to wait after ``failures`` in a row (from 1). Raises what the backoff raises."""
        if failures == 1:
            self._backoff.reset()
        return max(PAUSE_S_MIN, self._backoff.compute(min(failures, FAILURES_MAX)))
