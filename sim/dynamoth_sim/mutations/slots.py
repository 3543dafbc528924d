"""Mutations for the scenarios about slots. See ``mutations``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from dynamoth_dispatcher.transitions import Transition, Transitions
from dynamoth_sim.mutations.mutation import Check, replaced


def nothing_is_listed() -> AbstractContextManager[None]:
    """A slot counts as vacated whoever listens to its channels."""
    on_list = Transitions.on_list

    def empty(self: Transitions, asked: list[tuple[bytes, int, bool]], reply: Any, now: float) -> Any:
        return on_list(self, asked, [], now)

    return replaced(Transitions, on_list=empty)


def markers_overtake_losses() -> AbstractContextManager[None]:
    """A marker is sent without the losses of its slot ahead of it."""

    def nothing(self: Transitions, transition: Transition) -> bool:
        return False

    return replaced(Transitions, take_loss=nothing)


CHECKS: tuple[Check, ...] = (
    Check("81-slot-idle-subscribers", nothing_is_listed, "G1"),
    Check("82-slot-loss-before-marker", markers_overtake_losses, "G5"),
)
