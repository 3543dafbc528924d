"""Handles events with a machine and checks its invariants after each."""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from dynamoth.machine.events import Machine

RECENT_EVENTS = 10

_recent: WeakKeyDictionary[Machine[Any, Any], deque[tuple[float, Any]]] = WeakKeyDictionary()


def handle_checked(machine: Machine[Any, Any], event: Any, now: float) -> list[Any]:
    """Return the actions of one event. A broken invariant names the recent events of the machine.

    A test that measures time hands its events to the machine itself.
    """
    recent = _recent.setdefault(machine, deque(maxlen=RECENT_EVENTS))
    recent.append((now, event))
    actions = machine.handle(event, now)
    if (check := getattr(machine, "check", None)) is not None:
        try:
            check()
        except AssertionError as error:
            error.add_note("\n".join(["recent events:", *(f"  {at:.3f} {each!r:.300}" for at, each in recent)]))
            raise
    return list(actions)
