"""What a machine wishes to do at a later time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVarTuple

_Ts = TypeVarTuple("_Ts")


class Wishes:
    """Calls for later, in the order of their times; those for one time in the order in which they were wished for.

    A wish is not taken back: it may be out of date when its time comes, and what is called looks whether it is.
    """

    __slots__ = ("_heap", "_numbers", "next_at")

    def __init__(self) -> None:
        """Begin without a wish."""
        #: The time of the earliest wish; None when there is none. It is a machine's deadline.
        self.next_at: float | None = None
        #: (time, tie-breaker, what to call, with what).
        self._heap: list[tuple[float, int, Callable[..., list[Any]], tuple[Any, ...]]] = []
        self._numbers = count()

    def __len__(self) -> int:
        """Return how many there are, out of date or not."""
        return len(self._heap)

    def add(self, at: float, call: Callable[[*_Ts, float], list[Any]], *arguments: *_Ts) -> None:
        """Wish for ``call(*arguments, now)`` at a time; it returns the actions to execute."""
        heappush(self._heap, (at, next(self._numbers), call, arguments))
        self.next_at = self._heap[0][0]

    def fulfil(self, now: float) -> list[Any]:
        """Make the calls whose time has come, also those that one of them wishes for; return their actions."""
        actions: list[Any] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, call, arguments = heappop(self._heap)
            actions += call(*arguments, now)
        self.next_at = self._heap[0][0] if self._heap else None
        return actions
