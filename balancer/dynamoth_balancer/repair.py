"""Repairs the plan after failures: others take over from dead servers, and moves that cannot go on are undone.

This is no goal of balancing: it goes on while the balancer is paused or waits between two plans, and whatever else is
under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Protocol

from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import Assignment
from dynamoth_balancer.admin.changes import CarryOut
from dynamoth_balancer.decide.failover import fail_over
from dynamoth_balancer.decide.history import FAILOVER, ROLLBACK
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.rollback import stuck, unstored
from dynamoth_balancer.events import InnerAction, Note
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.dead_servers import DeadServers
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.quorum import Quorum
from dynamoth_balancer.options import BalancerOptions


class Change(Protocol):
    """Changes assignments by a method of the installer, and has model and history follow."""

    def __call__(
        self, assignments: Mapping[bytes, Assignment], reason: str, now: float, *, begin: CarryOut, goal: str
    ) -> list[InnerAction]:
        """Return the actions to execute. Raises RequestRefused."""
        ...


class Repair:
    """Looks for failures, and repairs what they have left.

    Args:
        dead_servers: which servers are dead; the owner keeps it up to date.
        quorum: which servers count.
        agents: the agents of all servers.
        model: the load of servers and channels.
        options: those of the balancer.
        counters: those of the balancer.
        change: carries out a change.

    """

    def __init__(
        self,
        dead_servers: DeadServers,
        quorum: Quorum,
        agents: Agents,
        model: ClusterModel,
        options: BalancerOptions,
        counters: Counter[str],
        change: Change,
    ) -> None:
        self._dead_servers = dead_servers
        self._quorum = quorum
        self._agents = agents
        self._model = model
        self._options = options
        self._counters = counters
        self._change = change
        #: Whether there is probably more to repair at once: the latest ``tick`` has changed as much as one event may.
        self.goes_on = False

    def tick(self, installer: Installer, now: float) -> list[InnerAction]:
        """Repair what can be repaired now, ``changes_per_event_max`` channels and slots of each kind at most."""
        self.goes_on = False
        return [*self._note_dead(installer), *self._fail_over(installer, now), *self._roll_back(installer, now)]

    def _note_dead(self, installer: Installer) -> list[InnerAction]:
        before, dead = installer.dead, self._dead_servers.dead
        # With half of the servers dead, the lease may last a little longer, but nothing could be stored at a majority.
        servers = installer.plan.servers
        installer.note_dead(dead if self._quorum.decides(servers.keys() - dead, servers) else frozenset())
        text = "a server is dead: others take over what it has"
        return [Note("error", text, {"server": server}) for server in sorted(installer.dead - before)]

    def _fail_over(self, installer: Installer, now: float) -> list[InnerAction]:
        """Give what dead servers have to others."""
        if not installer.dead or installer.rules_rest(now) > 0:
            return []
        room = self._options.transitions_max - len(installer.transitions)
        assignments = fail_over(installer, self._model, room, self._options.changes_per_event_max, now)
        if not assignments:
            return []
        self._counters["failovers"] += len(assignments)
        reason = f"{', '.join(sorted(installer.dead))} cannot be reached"
        return self._carry_out(assignments, reason, now, installer.fail_over, FAILOVER, "nothing can be taken over")

    def _roll_back(self, installer: Installer, now: float) -> list[InnerAction]:
        """Undo the moves that wait for failed agents or for servers without room, and that no client has noticed."""
        undone, reason = stuck(installer, self._agents, now), "an agent that the move needs has failed"
        if not undone:
            undone = unstored(installer, self._options.agent_stale_s, now)
            reason = "a server that the move needs refuses to store the plan"
        if not undone:
            return []
        assignments = dict(islice(undone.items(), self._options.changes_per_event_max))
        self._counters["moves_rolled_back"] += len(assignments)
        return self._carry_out(assignments, reason, now, installer.roll_back, ROLLBACK, "no move can be undone")

    def _carry_out(
        self,
        assignments: Mapping[bytes, Assignment],
        reason: str,
        now: float,
        begin: CarryOut,
        goal: str,
        refusal: str,
    ) -> list[InnerAction]:
        try:
            actions = self._change(assignments, reason, now, begin=begin, goal=goal)
        except RequestRefused as error:
            return [Note("error", refusal, {"reason": str(error)})]
        self.goes_on = self.goes_on or len(assignments) >= self._options.changes_per_event_max
        return actions
