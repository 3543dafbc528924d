"""Mutations for the scenarios of operators. See ``mutations``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from dynamoth.plan.administration import NO_ADMINISTRATION
from dynamoth_balancer.admin.rebalance import Rebalance
from dynamoth_balancer.decide import decider
from dynamoth_balancer.decide.cluster import Cluster, Decision
from dynamoth_balancer.decide.decider import Decider
from dynamoth_balancer.decide.history import History, MadeDecision
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.takeover import Takeover
from dynamoth_sim.mutations.mutation import Check, no_actions, replaced, returning


def rehearsals_are_real() -> AbstractContextManager[None]:
    """A dry run begins the moves that it shows."""
    begin = Rebalance.begin

    def begin_really(self: Rebalance, installer: Any, arguments: Mapping[str, Any], now: float) -> Any:
        return begin(self, installer, {**arguments, "dry_run": False}, now)

    return replaced(Rebalance, begin=begin_really)


def a_pause_stops_operators() -> AbstractContextManager[None]:
    """A balancer that is paused makes no decision for an operator either."""
    decide_now = Decider.decide_now

    def refuse(self: Decider, installer: Installer, now: float) -> tuple[MadeDecision, Cluster]:
        if installer.plan.administration.paused:
            return MadeDecision(0, now, Decision()), self.cluster(installer, now)
        return decide_now(self, installer, now)

    return replaced(Decider, decide_now=refuse)


def nothing_is_measured() -> AbstractContextManager[None]:
    """The balancer does not look at what came of its decisions."""
    return replaced(History, measure=no_actions)


def pins_are_ignored() -> AbstractContextManager[None]:
    """Goals move pinned channels as they move others."""
    return replaced(decider, pinned_names=returning({}))


def pauses_end_with_the_process() -> AbstractContextManager[None]:
    """A balancer that takes over forgets what administrators have decided."""
    finish = Takeover.finish

    def forget(self: Takeover) -> Any:
        book, found, conflicts = finish(self)
        book.advance(book.plan.administered(NO_ADMINISTRATION), ())
        return book, found, conflicts

    return replaced(Takeover, finish=forget)


CHECKS = (
    Check("73-rehearsed", rehearsals_are_real, "expected"),
    Check("73-rehearsed", a_pause_stops_operators, "expected"),
    Check("73-rehearsed", nothing_is_measured, "expected"),
    Check("75-pinned", pins_are_ignored, "expected"),
    Check("75-pinned", pauses_end_with_the_process, "expected"),
)
