"""What a balancer says of itself and of its cluster: figures for the metrics, the status, and what problems show in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.lease import Lease
from dynamoth.plan.plan import Plan
from dynamoth_balancer.admin.compatibility import describe_rules
from dynamoth_balancer.admin.health import Health, View, start_agent
from dynamoth_balancer.admin.status import describe_channels, describe_decisions, describe_pins, describe_server
from dynamoth_balancer.decide.decider import Decider
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.contention import Contention
from dynamoth_balancer.install.dead_servers import DeadServers
from dynamoth_balancer.install.leadership import Leadership, Stage
from dynamoth_balancer.install.listeners import Listeners
from dynamoth_balancer.install.quorum import CURE, Quorum
from dynamoth_balancer.install.servers import Servers
from dynamoth_balancer.provision.fleet import Life
from dynamoth_balancer.provision.scaling import Scaling

PROBLEMS_SHOWN_MAX = 100
"""Bound of the problems in a status, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Reads the parts of a balancer, and changes nothing."""

    incarnation: int
    #: Which process this is, for people.
    process: str
    leadership: Leadership
    servers: Servers
    lease: Lease
    contention: Contention
    quorum: Quorum
    dead_servers: DeadServers
    agents: Agents
    listeners: Listeners
    model: ClusterModel
    decider: Decider
    health: Health
    scaling: Scaling | None
    #: Those of the machine; :meth:`all_counters` has those of other parts, too.
    counters: Counter[str]

    @property
    def plan(self) -> Plan | None:
        """The plan while this balancer leads; None while it does not, as another one may have changed it since."""
        return None if (installer := self.leadership.at_work) is None else installer.plan

    @property
    def paused(self) -> bool:
        """Whether administrators have paused the balancer; False while it does not lead."""
        return self.plan is not None and self.plan.administration.paused

    @property
    def stands_by(self) -> bool:
        """Whether another balancer leads and this one waits to replace it, as its options say."""
        return self.leadership.waits and self.contention.stands_by

    @property
    def transitions(self) -> int:
        """How many channels are in transition."""
        installer = self.leadership.installer
        return 0 if installer is None else len(installer.transitions)

    def why_not_leading(self) -> str:
        """Return in words what a balancer that does not lead waits for."""
        reason = self.contention.reason()
        needed = f"the lease of {self.lease.needed} is needed"
        alive = self.servers.listed.keys() - self.dead_servers.dead
        cure = "" if self.quorum.decides(alive, self.servers.listed) else CURE
        stage = self.leadership.stage.value
        return "; ".join(filter(None, (f"it is {stage}, not leading: {needed}", reason, cure)))

    # One server.

    def load_ratio(self, server: str, now: float) -> float | None:
        """Return the estimated load ratio of a server, None where it is not known."""
        load = self.model.load(server, now) if server in self.servers.listed else None
        return None if load is None else load.load_ratio

    def channels_left(self, server: str, now: float) -> int | None:
        """Return how many channels a server that gives them up still has, by its reports; None while unknown."""
        installer = self.leadership.installer
        if installer is None or server not in installer.leaving or self.load_ratio(server, now) is None:
            return None
        return self.decider.channels_left(server, installer)

    def slots_left(self, server: str) -> int | None:
        """Return how many slots a server that gives them up still has; None for others, and without a plan."""
        installer = self.leadership.installer
        if installer is None or server not in installer.leaving | installer.dead:
            return None
        return len(installer.index.slots_named_at[server])

    def _channels_named(self, server: str) -> int | None:
        """Return how many channels the plan names at a server that gives them up; None for others."""
        installer = self.leadership.installer
        if installer is None or server not in installer.leaving:
            return None
        return len(installer.index.named_at[server])

    def server_status(self, server: str, now: float) -> dict[str, Any]:
        """Return the state of a server, for people."""
        return {
            "link": "up" if server in self.servers.run_ids else "down",
            "link_problem": self.servers.down.get(server, ""),
            "draining": server in self.leadership.draining,
            "channels_left": self.channels_left(server, now),
            "channels_named": self._channels_named(server),
            "slots_left": self.slots_left(server),
            **describe_server(server, self.agents, self.model, self.leadership.at_work, now),
        }

    # The cluster.

    def status(self, now: float) -> Mapping[str, Any]:
        """Return the state of everything, for people.

        What this balancer knew of the plan, its copies and transitions when it led is left out while it does not:
        another one may have changed all of them since.
        """
        plan, stage = self.plan, self.leadership.stage
        return {
            "stage": stage.value,
            "leading_s": now - self.leadership.since if stage is Stage.LEADING else None,
            "incarnation": self.incarnation,
            "process": self.process,
            "version": -1 if plan is None else plan.version,
            "paused": self.paused,
            **describe_pins({} if plan is None else plan.administration.pins),
            "compatibility": [] if plan is None else describe_rules(plan.compatibility),
            "problems": [
                {"severity": problem.severity.value, **problem.details(now)}
                for problem in self.health.problems[:PROBLEMS_SHOWN_MAX]
            ],
            "servers": {server: self.server_status(server, now) for server in self.servers.listed},
            **describe_channels(self.leadership.at_work, now),
            "moves_begun": self.counters["moves_begun"],
            "moves_settled": self.counters["moves_settled"],
            "decisions": describe_decisions(self.decider.history.decisions, now),
            "fleet": None if self.scaling is None else self.scaling.describe(now),
            "counters": dict(self.all_counters()),
        }

    def view(self, decision_refused: str, now: float) -> View:
        """Return what problems show in. ``decision_refused``: why the latest decision could not be carried out."""
        leads = self.leadership.stage is Stage.LEADING
        fleet = self.scaling.fleet if leads and self.scaling is not None else None
        servers, takeover = self.servers, self.leadership.takeover
        refusals = {} if takeover is None else takeover.refusals()
        term_problems = {id_: f"it refuses the term: {reply}" for id_, reply in refusals.items()}
        lease_problems = {id_: f"it refuses the lease: {reply}" for id_, reply in self.lease.problems().items()}
        return View(
            why_not_leading=None if leads else self.why_not_leading(),
            stands_by=self.stands_by,
            servers=tuple(servers.listed),
            down=servers.down,
            emptied=[
                server
                for server in self.leadership.draining
                if self._channels_named(server) == 0 and self.slots_left(server) == 0
            ],
            unanswered=[server for server in servers.run_ids if self.listeners.is_unanswered(server, now)],
            refused={**self.listeners.refused, **term_problems, **lease_problems, **servers.refused},
            installer=self.leadership.installer,
            agents=self.agents,
            model=self.model,
            unreached=self.decider.unreached if leads and not self.paused else (),
            decision_refused=decision_refused if leads else "",
            given_up=self.quorum.given_up & servers.listed.keys(),
            not_listed=[id_ for id_ in servers.configured if id_ not in servers.listed] if leads else (),
            fleet_problems={} if fleet is None else fleet.problems(),
            joining=self._joining(now) if leads else {},
            started_again=frozenset() if fleet is None else fleet.started_again,
        )

    def _joining(self, now: float) -> Mapping[str, str]:
        """Return the servers that are only being added, and what each waits for, in words."""
        installer, agents = self.leadership.latest_installer(), self.agents
        joining = {
            server: f"its agent: {start_agent(server)}, unless it runs"
            for server in self.servers.listed
            if agents.incarnation(server) is None and installer.joins_in(server, now) > 0
        }
        if self.scaling is None:
            return joining
        patience_s = self.scaling.fleet.options.join_timeout_s
        text = f"its agent: if that does not report its load within {patience_s:g} s, the server is given up"
        lives = self.scaling.fleet.lives.items()
        return joining | {server: text for server, life in lives if life is Life.JOINING}

    # Metrics.

    def figures(self, now: float) -> Mapping[str, float]:
        """Return the figures of the whole cluster for the metrics; their cost does not depend on the plan's entries."""
        installer = self.leadership.installer
        transitions = {} if installer is None else installer.transitions
        figures: dict[str, float] = {
            "leading": self.leadership.stage is Stage.LEADING,
            "standing_by": self.stands_by,
            "paused": self.paused,
            "links_up": len(self.servers.run_ids),
            "agents_alive": sum(self.agents.is_alive(server, now) for server in self.servers.listed),
            "agents_in_conflict": sum(self.agents.is_in_conflict(server, now) for server in self.servers.listed),
            "transitions": len(transitions),
            "transition_age_seconds": now - min((each.since for each in transitions.values()), default=now),
        }
        if self.scaling is not None:
            figures |= self.scaling.figures()
        if installer is not None:
            figures |= {"plan_version": installer.plan.version, "plan_entries": len(installer.plan.entries)}
            figures["replicated_channels"] = len(installer.index.replicated)
        return figures

    def server_figures(self, now: float) -> Mapping[str, Mapping[str, float | None]]:
        """Return the figures of each server for the metrics, by their names; None while unknown.

        An agent that has fallen silent stays blind if it was: alerts end when it sees again, not when it says nothing.
        """
        servers = self.servers.listed
        return {
            "load_ratio": {server: self.load_ratio(server, now) for server in servers},
            "channels_left": {server: self.channels_left(server, now) for server in servers},
            "slots_left": {server: self.slots_left(server) for server in servers},
            "agent_blind": {server: server in self.model.blind for server in servers},
        }

    def resource_ratios(self, now: float) -> Mapping[tuple[str, str], float]:
        """Return how much each server uses of each resource, by both names; without those that are not known."""
        usage = {server: self.model.usage(server, now) for server in self.servers.listed}
        return {(server, each.value): ratio for server, ratios in usage.items() for each, ratio in ratios.items()}

    def all_counters(self) -> Counter[str]:
        """Return the counters of all parts."""
        parts = [self.model.counters]
        if self.leadership.installer is not None:
            parts.append(self.leadership.installer.counters)
        if self.scaling is not None:
            parts.append(self.scaling.fleet.counters)
        return sum(parts, start=Counter(self.counters))
