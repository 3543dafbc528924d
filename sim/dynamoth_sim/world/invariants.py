"""Checks the invariants of a machine after its events. The simulator and the tests of machines use it."""

from __future__ import annotations

import reprlib
from collections import deque
from typing import Any

EVENTS_SHOWN = 20
"""How many of the latest events a failed check shows."""


SELDOM = 100
"""After ``CLOSELY_MAX`` events one in this many is checked: tables are large then, and so is the cost of a check."""

CLOSELY_MAX = 2000


class Checker:
    """Calls ``check`` of a machine, if it has one, after every ``every``-th event; 0: never."""

    def __init__(self, machine: Any, every: int) -> None:
        self._check = getattr(machine, "check", None) if every else None
        self._every = every
        self._count = 0
        self._recent: deque[Any] = deque(maxlen=EVENTS_SHOWN)

    def after(self, event: Any) -> None:
        """Check the machine, which has handled ``event``. Raises AssertionError with the latest events."""
        if self._check is None:
            return
        self._recent.append(event)
        self._count += 1
        if self._count % (self._every if self._count <= CLOSELY_MAX else SELDOM):
            return
        try:
            self._check()
        except AssertionError as error:
            events = "\n".join(f"  {_short.repr(each)}" for each in self._recent)
            raise AssertionError(
                f"an invariant is broken: {error}\nthe latest events, oldest first:\n{events}"
            ) from error


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 300
