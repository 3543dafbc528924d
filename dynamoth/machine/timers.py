"""Timers of a machine: calls that are due at a later time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar, TypeVarTuple

_Action = TypeVar("_Action")
_Ts = TypeVarTuple("_Ts")


class Timers(Generic[_Action]):
    """Calls for later, in the order of their times; those for one time in the order in which they were added.

    Timers cannot be cancelled; the callback checks that it still applies.
    """

    __slots__ = ("_heap", "_numbers", "next_at")

    def __init__(self) -> None:
        """Begin without a timer."""
        #: The time of the earliest timer; None when there is none. It is a machine's deadline.
        self.next_at: float | None = None
        #: (time, tie-breaker, callback, arguments).
        self._heap: list[tuple[float, int, Callable[..., Sequence[_Action]], tuple[Any, ...]]] = []
        self._numbers = count()

    def __len__(self) -> int:
        """Return the number of pending timers, including those that no longer apply."""
        return len(self._heap)

    def add(self, at: float, call: Callable[[*_Ts, float], Sequence[_Action]], *arguments: *_Ts) -> None:
        """Schedule ``call(*arguments, now)`` for the time ``at``; it returns the actions to execute."""
        heappush(self._heap, (at, next(self._numbers), call, arguments))
        self.next_at = self._heap[0][0]

    def run_due(self, now: float) -> list[_Action]:
        """Make the calls whose time has come, including those that these calls add; return their actions."""
        actions: list[_Action] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, call, arguments = heappop(self._heap)
            actions += call(*arguments, now)
        self.next_at = self._heap[0][0] if self._heap else None
        return actions
