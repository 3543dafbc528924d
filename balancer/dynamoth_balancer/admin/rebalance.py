"""Shows administrators what the balancer would do now, and does it when they say so.

A result is one decision as :func:`~dynamoth_balancer.admin.status.describe_decision` has it, with up to
``MOVES_SHOWN_MAX`` moves, and:

``dry_run``
    Whether nothing was begun.
``obstacles``
    Why the balancer does not do it by itself now, each in words: it is paused, waits between two plans, or changes are
    under way.
``servers``
    All servers of the plan: ``load_ratio_before`` and ``load_ratio_predicted``, both None for a server that cannot take
    part, and then ``why_not``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth.errors import RequestRefused
from dynamoth.protocol.control import AdminReply
from dynamoth_balancer.admin.explain import why_absent
from dynamoth_balancer.admin.status import describe_decision
from dynamoth_balancer.decide.cluster import Ratios
from dynamoth_balancer.decide.decider import Decider
from dynamoth_balancer.decide.history import MadeDecision, Progress
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install.installer import Installer

MOVES_SHOWN_MAX = 1000
"""Bound of the moves in one reply: some 400 KB."""


@dataclass(frozen=True, slots=True)
class BegunRebalance:
    """A decision that an administrator has asked for."""

    made: MadeDecision
    details: Mapping[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.made.progress is not Progress.IN_TRANSITION

    def reply(self, number: int, now: float) -> AdminReply:
        """Return the reply to a request with this number."""
        if self.made.refused:
            return AdminReply(number, {}, self.made.refused)
        return AdminReply(number, {**describe_decision(self.made, now, MOVES_SHOWN_MAX), **self.details})


class Rebalance:
    """Makes decisions for administrators.

    Args:
        decider: makes them.
        carry_out: begins the moves of a decision, and returns the actions to execute.

    """

    def __init__(self, decider: Decider, carry_out: Callable[[MadeDecision, float], list[InnerAction]]) -> None:
        self._decider = decider
        self._carry_out = carry_out

    def begin(
        self, installer: Installer, arguments: Mapping[str, Any], now: float
    ) -> tuple[BegunRebalance, list[InnerAction]]:
        """Make a decision, and begin its moves unless this is a dry run; return also the actions to execute.

        Raises:
            RequestRefused: the arguments make no sense, or no plan can be made now.

        """
        dry_run = arguments.get("dry_run", False)
        if type(dry_run) is not bool:
            raise RequestRefused("rebalance takes the argument dry_run (true or false)")
        obstacles = list(self._decider.obstacles(installer, now))
        actions: list[InnerAction] = []
        if dry_run:
            decision, cluster = self._decider.preview(installer, now)
            made = MadeDecision(0, now, decision)
            made.progress = Progress.PREVIEW if decision.moves else Progress.NO_MOVES
        else:
            made, cluster = self._decider.decide_now(installer, now)
            actions = self._carry_out(made, now) if made.decision.moves else []
        after = {server.id: server.load_ratio for server in cluster.servers.values()}
        servers = {id_: _server(id_, installer, after, made.ratios, now) for id_ in installer.plan.servers}
        return BegunRebalance(made, {"dry_run": dry_run, "obstacles": obstacles, "servers": servers}), actions


def _server(
    id_: str, installer: Installer, after: Mapping[str, float], touched: Mapping[str, Ratios], now: float
) -> dict[str, Any]:
    if id_ not in after:
        why = why_absent(installer, id_, now)
        return {"load_ratio_before": None, "load_ratio_predicted": None, "why_not": why}
    ratios = touched.get(id_, Ratios(after[id_], after[id_]))
    return {"load_ratio_before": ratios.before, "load_ratio_predicted": ratios.after, "why_not": ""}
