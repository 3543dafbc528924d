"""Finds queries that are stalled: there is something to execute, and no execution ends.

Theory of operation
-------------------
An execution that fails is seen, as it raises. One that hangs says nothing: an executor that is stopped, a disk that
does not answer. So the caller looks at each query now and then (``Stall.look``), and says what the query waits for. A
query is stalled when it has waited for something all the time, and no execution has ended, for ``bound_s``. Time counts
by looks: a process that was stopped itself, and goes on, finds no query stalled.
"""

from __future__ import annotations

BOUND_S_MIN = 180.0
"""No query is stalled sooner. The longest cold start that was measured took 110 s (a small machine after a crash)."""

BOUND_PERIODS = 10
BOUND_S_MAX = 3600.0
"""Ten periods may pass, or one period and an hour where that is less: a query of once a day is not seen in ten days."""

LOOK_S_MAX = 30.0
"""From one look to the next, this time counts at most."""


def bound_s(period_s: float) -> float:
    """Return for how many seconds a query with this period may wait without an execution that ends."""
    return max(BOUND_S_MIN, min(BOUND_PERIODS * period_s, period_s + BOUND_S_MAX))


class Stall:
    """Whether one query is stalled.

    Args:
        period_s: of the query.

    """

    def __init__(self, period_s: float) -> None:
        self._bound_s = bound_s(period_s)
        #: For how long it has waited without an execution that ended, up to the last look.
        self._waited_s = 0.0
        self._looked_at = 0.0
        self._done = 0

    def look(self, waits_for: str, done: int, now: float) -> str:
        """Return what is wrong, and what to do; empty: the query is not stalled.

        Args:
            waits_for: what does not happen, "execution 8 does not end"; empty: there is nothing to execute.
            done: the number of its last execution that has ended.
            now: in seconds, by a clock that only grows.

        """
        is_waiting = bool(waits_for) and done == self._done and self._looked_at > 0
        self._waited_s = self._waited_s + min(now - self._looked_at, LOOK_S_MAX) if is_waiting else 0.0
        self._looked_at, self._done = now, done
        if not waits_for or self._waited_s <= self._bound_s:
            return ""
        return (
            f"{waits_for}, for more than {self._bound_s:g} s: Spark hangs, or is far too slow. See whether its"
            " executors run, and have CPU, memory and disk; then restart the data cluster, which executes the same"
            " window again"
        )
