"""When the balancer makes a plan of its own, and out of what: between the model and the goals.

There is at most one such plan per ``wait_s`` (T_wait of the paper), and none while an earlier change is being
installed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from dynamoth.plan import Mode, Phase
from dynamoth_balancer.goals import Cluster, Decision, Goal, decide
from dynamoth_balancer.installer import Installer
from dynamoth_balancer.model import ClusterModel
from dynamoth_balancer.options import BalancerOptions

DECISIONS_KEPT_MAX = 20
FINDING_REPEAT_S = 60.0
"""A decision that nothing can be done is told again only when its findings are others, or after this time."""


class Decider:
    """Asks the goals when it is time."""

    def __init__(self, model: ClusterModel, goals: Sequence[Goal], options: BalancerOptions) -> None:
        self._model = model
        self._goals = goals
        self._options = options
        #: No plans of the balancer's own; what administrators ask for is done.
        self.paused = False
        #: The latest decisions with their numbers (from 1) and times, oldest first.
        self.decisions: deque[tuple[int, float, Decision]] = deque(maxlen=DECISIONS_KEPT_MAX)
        self._made = 0
        self._look_at = -math.inf
        self._plan_at = -math.inf
        self._findings_at = -math.inf
        #: When each channel was moved last; those that have rested are forgotten.
        self._moved_at: dict[bytes, float] = {}

    def wait(self, now: float) -> None:
        """Make no plan for ``wait_s``."""
        self._plan_at = now + self._options.wait_s

    def moved(self, channels: Iterable[bytes], now: float) -> None:
        """Let channels that have been moved, by whomever, rest."""
        self._moved_at.update(dict.fromkeys(channels, now))

    def look(self, installer: Installer, now: float) -> Decision | None:
        """Return a decision, if it is time and there is something to decide or to be told."""
        if now < self._look_at:
            return None
        self._look_at = now + self._options.decision_interval_s
        self._forget(now)
        if self.paused or now < self._plan_at or self._is_busy(installer, now):
            return None
        decision = decide(self._goals, self.cluster(installer, now))
        if decision.moves:
            self.wait(now)
        elif not decision.findings or not self._is_news(decision, now):
            return None
        self._findings_at = now
        self._made += 1
        self.decisions.append((self._made, now, decision))
        return decision

    def cluster(self, installer: Installer, now: float) -> Cluster:
        """Return the servers that can take part in a plan, as the goals see them."""
        options = self._options
        loads = {
            server: load
            for server in installer.plan.servers
            if installer.why_not(server, now) is None
            and self._model.samples(server) >= options.reports_min
            and (load := self._model.load(server, now)) is not None
        }
        entry_of = installer.plan.entry
        rests_since = now - options.channel_rest_s

        def movable(channel: bytes, server: str) -> bool:
            entry = entry_of(channel)
            return (
                entry.phase is Phase.SETTLED
                and entry.route.assignment.mode is Mode.SINGLE
                and entry.route.assignment.servers[0] == server
                and self._moved_at.get(channel, -math.inf) <= rests_since
            )

        return Cluster(loads, self._model.channels, movable, options)

    def _is_busy(self, installer: Installer, now: float) -> bool:
        """Tell whether a change is still being installed; what has got stuck does not count."""
        patience = self._options.move_timeout_s
        return any(now - transition.since < patience for transition in installer.transitions.values())

    def _is_news(self, decision: Decision, now: float) -> bool:
        if now - self._findings_at >= FINDING_REPEAT_S:
            return True
        return not self.decisions or _summary(self.decisions[-1][2]) != _summary(decision)

    def _forget(self, now: float) -> None:
        rest = self._options.channel_rest_s
        self._moved_at = {channel: at for channel, at in self._moved_at.items() if now - at < rest}
        self._model.forget_proven(now)


def _summary(decision: Decision) -> Mapping[str, str]:
    """What must differ for a decision to be news: ratios always do."""
    return {finding.server: finding.reason for finding in decision.findings}
