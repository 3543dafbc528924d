"""Mutations for the scenarios about what agents observe. See ``mutations``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from dynamoth.protocol.reports import Report
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_dispatcher.observation import Observation
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced


def observed_twice() -> AbstractContextManager[None]:
    """An agent takes what comes by two of its patterns for two messages."""
    changed = Observation.on_confirmation

    def forget(self: Observation, push: Any) -> list[Any]:
        actions = changed(self, push)
        self.repeated = None
        return actions

    return replaced(Observation, on_confirmation=forget)


def notifications_are_kept() -> AbstractContextManager[None]:
    """An agent observes keyspace notifications like everything else."""
    return replaced(Observation, on_notification=no_actions)


def blind_is_idle() -> AbstractContextManager[None]:
    """The balancer takes a server whose agent sees nothing for one that is idle."""
    return replaced(ClusterModel, _watch=nothing)


def forgotten_before_it_shows() -> AbstractContextManager[None]:
    """The balancer forgets what it knew of a server before it hears that its agent sees nothing."""
    watch = ClusterModel._watch  # pyright: ignore[reportPrivateUsage]

    def forget(self: ClusterModel, model: Any, report: Report, now: float) -> None:
        model.newest = None
        watch(self, model, report, now)

    return replaced(ClusterModel, _watch=forget)


CHECKS: tuple[Check, ...] = (
    Check("62-keyspace-notifications", observed_twice, "G2"),
    Check("62-keyspace-notifications", notifications_are_kept, "expected"),
    Check("63-flooded-agent", blind_is_idle, "expected"),
    Check("63-flooded-agent", forgotten_before_it_shows, "expected"),
)
