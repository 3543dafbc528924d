"""Virtual time: one heap of callbacks, one clock, one source of randomness.

Theory of operation
-------------------
Everything in the simulator happens in a callback that was scheduled here. Callbacks run in the order of their
time, those of the same time in the order in which they were scheduled. Each random choice is drawn from
:attr:`World.random`, so a seed determines a run completely. Nothing may iterate over a set of bytes or text, nor
depend on ``id()``: such orders differ from process to process. :attr:`World.digest` tells two runs apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from dynamoth_sim.world.trace import Trace

SAME_MOMENT_CALLBACKS_MAX = 200_000
"""More callbacks than this at one moment mean that something schedules itself without end."""


class Timer:
    """A scheduled callback, which can be cancelled."""

    __slots__ = ("arguments", "callback")

    def __init__(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.arguments = arguments

    def cancel(self) -> None:
        """Forget the callback. Harmless when it has run."""
        self.callback = None
        self.arguments = ()


class World:
    """One simulated universe.

    Args:
        seed: determines everything that happens.
        check_every: after how many of its events the invariants of a machine are checked; 0: never.
        trace_records_max: how many of the latest records the trace keeps, for the story of a failure.

    """

    def __init__(self, seed: int, check_every: int = 0, trace_records_max: int = 400_000) -> None:
        self.seed = seed
        self.check_every = check_every
        self.random = Random(seed)
        #: Seconds since the world began; never decreases.
        self.now = 0.0
        #: How many callbacks have run.
        self.steps = 0
        self.trace = Trace(trace_records_max)
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = 0
        self._digest = 0

    def at(self, when: float, callback: Callable[..., Any], *arguments: Any) -> Timer:
        """Run ``callback(*arguments)`` at time ``when``, or now if that has passed."""
        timer = Timer(callback, arguments)
        self._order += 1
        heappush(self._heap, (when if when > self.now else self.now, self._order, timer))
        return timer

    def after(self, delay_s: float, callback: Callable[..., Any], *arguments: Any) -> Timer:
        """Run ``callback(*arguments)`` after ``delay_s`` seconds."""
        return self.at(self.now + delay_s, callback, *arguments)

    def run_until(self, end: float) -> None:
        """Run everything up to and including time ``end``, where the clock stops."""
        heap = self._heap
        same_moment = 0
        while heap and heap[0][0] <= end:
            when, order, timer = heappop(heap)
            callback = timer.callback
            if callback is None:
                continue
            same_moment = same_moment + 1 if when == self.now else 0
            assert same_moment < SAME_MOMENT_CALLBACKS_MAX, f"time stands still at {when}: {callback} and others"
            self.now = when
            self.steps += 1
            self._digest = hash((self._digest, when, order))
            callback(*timer.arguments)
        self.now = max(self.now, end)

    def run_until_true(self, condition: Callable[[], bool], end: float, poll_s: float = 0.05) -> bool:
        """Run until ``condition()`` holds, asked each ``poll_s``, or until time ``end``. Return whether it holds."""
        while not condition():
            if self.now >= end:
                return False
            self.run_until(min(end, self.now + poll_s))
        return True

    @property
    def digest(self) -> int:
        """A number that two runs share only if the same happened in both, at the same times."""
        return zlib.crc32(repr((self._digest, self.steps, self.now)).encode())
