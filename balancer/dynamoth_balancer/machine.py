"""The balancer machine: decides which server carries which channel, and installs its decisions.

Theory of operation
-------------------
It is in one of these stages::

    CONTENDING   has no lease: it listens to agents and administrators, and changes nothing
    RECOVERING   has the lease: it reads the stored plans, to continue where its predecessor ended
    LEADING      makes decisions and installs plans
    STOPPED      has ended

Before every action it checks that it still holds the lease. If not, it is CONTENDING again, and a later term begins
with another recovery, as another balancer may have been at work in between.

The parts: ``install`` (the lease, the takeover, and the phases of changes), ``decide`` (the load model and the goals),
``repair`` (what failures ask for), and ``admin`` (requests, status and problems). They know as little of each other as
possible; this module connects them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, assert_never

from dynamoth.errors import AlreadyRunning, ConfigError, MalformedMessage, RequestRefused
from dynamoth.machine.events import (
    Connect,
    Disconnect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    Send,
    Start,
    Tick,
    earliest,
)
from dynamoth.names import BALANCER_CHANNEL, OPERATOR_CHANNEL
from dynamoth.plan.plan import Assignment, Plan, Server
from dynamoth.plan.slots import is_slot
from dynamoth.protocol.control import AdminRequest, unpack_control
from dynamoth_balancer.admin.api import Admin
from dynamoth_balancer.admin.changes import CarryOut, Changes
from dynamoth_balancer.admin.compatibility import describe_rules
from dynamoth_balancer.admin.explain import Explainer
from dynamoth_balancer.admin.health import Health, View, find
from dynamoth_balancer.admin.rebalance import Rebalance
from dynamoth_balancer.admin.records import Records
from dynamoth_balancer.admin.status import (
    describe_channels,
    describe_decisions,
    describe_pins,
    describe_server,
    plan_page,
)
from dynamoth_balancer.decide.cluster import Move
from dynamoth_balancer.decide.decider import Decider, is_replicated
from dynamoth_balancer.decide.drain import Drain, DrainSlots
from dynamoth_balancer.decide.history import BY_ADMINISTRATOR, MadeDecision, PastMove
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.pins import Pin
from dynamoth_balancer.decide.release import Release, ReleaseSlots
from dynamoth_balancer.decide.relieve import Relieve, RelieveSlots
from dynamoth_balancer.decide.replicate import Replicate
from dynamoth_balancer.decide.spread import Spread
from dynamoth_balancer.decide.tidy import Tidy
from dynamoth_balancer.events import (
    BalancerAction,
    BalancerEvent,
    Decided,
    InnerAction,
    Note,
    PlanChanged,
    ProvisionerAnswered,
    Shutdown,
    Stopped,
    TransitionsSettled,
)
from dynamoth_balancer.install import candidate, contention, copies, lease, leaver, listeners, takeover
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.contention import Contention
from dynamoth_balancer.install.dead_servers import DeadServers
from dynamoth_balancer.install.hearing import Hearing
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.lease import Lease
from dynamoth_balancer.install.listeners import Listeners
from dynamoth_balancer.install.membership import Membership
from dynamoth_balancer.install.quorum import CURE, Quorum
from dynamoth_balancer.install.recovery import Conflict
from dynamoth_balancer.install.takeover import Takeover
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_balancer.provision.scaling import Scaling
from dynamoth_balancer.repair import Repair

TICK_INTERVAL_S = 0.1
"""How often everything that waits is checked: a fifth of the shortest default timeout, and as often as copies of the
plan are (``PROBE_INTERVAL_S``)."""

CONNECTED = "connected to a server"

PROBLEMS_SHOWN_MAX = 100
"""Bound of the problems in a status, the worst first."""

FOR_OTHERS = frozenset({candidate.TAG, leaver.TAG, copies.TAG, lease.TAG, contention.TAG})
"""The tags of replies that count also from servers that are not in the plan, as they come or go."""

NO_MOVES: Mapping[bytes, Move] = MappingProxyType({})

SHUTDOWN_S_MAX = 1.0
"""A server that does not answer in this time keeps the lease until it expires."""


class Stage(enum.Enum):
    """The stage of a balancer; the docstring of the module explains each."""

    CONTENDING = "contending"
    RECOVERING = "recovering"
    LEADING = "leading"
    STOPPED = "stopped"


@dataclass(slots=True)
class Lookout:
    """The link to a configured server that the plan does not list."""

    is_up: bool = False
    run_id: str | None = None


class BalancerMachine:
    """The balancer of a cluster.

    Args:
        servers: those of the configuration, at least one, each id once: where to find the plan, which lists all, and
            all servers of a new cluster.
        incarnation: up to 63 bits, random, new with each start of the process.
        options: every threshold, interval and bound.
        fleet: when servers are added and freed; None where no provisioner can do that.

    Raises:
        ConfigError: there is no server, or one is named twice; or the servers to drain are unknown, or all servers.

    """

    def __init__(
        self,
        servers: Sequence[Server],
        incarnation: int,
        options: BalancerOptions | None = None,
        fleet: FleetOptions | None = None,
    ) -> None:
        ids = [server.id for server in servers]
        if not ids or len(set(ids)) != len(ids):
            raise ConfigError(f"a balancer needs servers, each named once, not: {', '.join(ids) or 'none'}")
        self.incarnation = incarnation
        self.options = options or BalancerOptions()
        if not self.options.draining < set(ids):
            names = ", ".join(sorted(self.options.draining))
            raise ConfigError(f"draining must name some of the servers ({', '.join(ids)}) and leave one, not: {names}")
        self.counters: Counter[str] = Counter()
        self.stage = Stage.CONTENDING
        #: Those of the configuration: where to look first, and the servers of a new cluster.
        self._configured = {server.id: server for server in servers}
        #: Those of the plan, as far as known. Their majority grants the lease.
        self._servers = dict(self._configured)
        #: The version of the plan that lists them; -1 for the configuration.
        self._list_version = -1
        #: Configured servers that the plan does not list, while this balancer does not lead: one may know a newer plan.
        self._lookouts: dict[str, Lookout] = {}
        self._run_ids: dict[str, str | None] = {}
        self._down_reasons: dict[str, str] = dict.fromkeys(ids, "not connected yet")
        #: Servers that refused the subscription; a dict, as it keeps its order.
        self._unsubscribed: dict[str, None] = {}
        #: Their replies, until the subscription is accepted.
        self._refused: dict[str, str] = {}
        self._lease = Lease(ids, incarnation, self.options.lease_s, self.options.lease_renew_s)
        patience_s = self.options.lease_s + self.options.lease_renew_s
        self._contention = Contention(
            self._lease, self._servers, self._down_reasons, patience_s, standby=self.options.standby
        )
        self._model = ClusterModel(
            ids, self.options.averaging_s, self.options.interruptions_window_s, self.options.bounds
        )
        self._agents = Agents(ids, self.options.agent_stale_s, self._model.blind)
        self._listeners = Listeners(self._agents)
        self._dead_servers = DeadServers(ids, self.options.server_dead_s)
        self._quorum = Quorum(may_give_up=self.options.take_over)
        self._hearing = Hearing(self._agents, self._model, self.counters)
        self._repair = Repair(
            self._dead_servers,
            self._quorum,
            self._agents,
            self._model,
            self.options.transitions_max,
            self.counters,
            self._change,
        )
        self._decider = Decider(
            self._model,
            (Pin(), Replicate(), Relieve()),
            (Release(), Drain()),
            (RelieveSlots(), ReleaseSlots(), DrainSlots(), Spread(), Tidy()),
            self.options,
        )
        self._records = Records(incarnation, self.options, self._hearing.reports)
        #: The problems of the cluster, for people.
        self.health = Health()
        #: Why the latest decision could not be carried out; empty when it could.
        self._decision_refused = ""
        #: Changes of the list of servers.
        self.membership = Membership(self._leading_installer, self._lease, self._quorum, self._run_ids)
        look_s = self.options.decision_interval_s
        #: Adds and frees servers; None where no provisioner can do that.
        self.scaling = (
            None if fleet is None else Scaling(fleet, look_s, self._agents, self._model, self._decider, self.membership)
        )
        self._explainer = Explainer(self._decider, self._model, self._server_status)
        self._admin = Admin(
            {
                "status": lambda _, now: self.status(now),
                "plan": lambda arguments, _: plan_page(self._latest_installer().plan, arguments),
                "explain": lambda arguments, now: self._explainer.explain(self._latest_installer(), arguments, now),
            },
            Changes(self.load_ratio, self._change, self._decider.hold),
            Rebalance(self._decider, self._carry_out),
            self.membership,
            self._latest_installer,
            self.options,
            self._records.on_pause,
        )
        #: How often this process got the lease; 0 before the first time.
        self._term = 0
        #: Not None exactly while RECOVERING.
        self._takeover: Takeover | None = None
        #: That of the present or latest term; None before the first.
        self._installer: Installer | None = None
        #: The term that the servers have granted for it.
        self._granted_term = 0
        self._tick_at: float | None = None
        self._shutdown_at: float | None = None

    # What others may read.

    @property
    def plan(self) -> Plan | None:
        """The plan of the present or latest term; None before the first."""
        return None if self._installer is None else self._installer.plan

    @property
    def paused(self) -> bool:
        """Whether administrators have paused the balancer; as far as this process knows."""
        return self.plan is not None and self.plan.administration.paused

    @property
    def stands_by(self) -> bool:
        """Whether another balancer leads and this one waits to replace it, as its options say."""
        return self.stage is Stage.CONTENDING and self._contention.stands_by

    @property
    def _draining(self) -> frozenset[str]:
        return frozenset() if self._installer is None else self._installer.draining

    @property
    def transitions(self) -> int:
        """How many channels are in transition."""
        return 0 if self._installer is None else len(self._installer.transitions)

    def load_ratio(self, server: str, now: float) -> float | None:
        """Return the estimated load ratio of a server, None where it is not known."""
        load = self._model.load(server, now) if server in self._servers else None
        return None if load is None else load.load_ratio

    def channels_left(self, server: str, now: float) -> int | None:
        """Return how many channels a server that gives them up still has, by its reports; None while unknown."""
        installer = self._installer
        if installer is None or server not in installer.leaving or self.load_ratio(server, now) is None:
            return None
        return self._decider.channels_left(server, installer)

    def slots_left(self, server: str) -> int | None:
        """Return how many slots a server that gives them up still has; None for others, and without a plan."""
        if self._installer is None or server not in self._installer.leaving | self._installer.dead:
            return None
        return len(self._installer.index.slots_named_at[server])

    def _channels_named(self, server: str) -> int | None:
        """Return how many channels the plan names at a server that gives them up; None for others."""
        if self._installer is None or server not in self._installer.leaving:
            return None
        return len(self._installer.index.named_at[server])

    def figures(self, now: float) -> Mapping[str, float]:
        """Return the figures of the whole cluster for the metrics; their cost does not depend on the plan's entries."""
        transitions = {} if self._installer is None else self._installer.transitions
        figures: dict[str, float] = {
            "leading": self.stage is Stage.LEADING,
            "standing_by": self.stands_by,
            "paused": self.paused,
            "links_up": len(self._run_ids),
            "agents_alive": sum(self._agents.is_alive(server, now) for server in self._servers),
            "agents_in_conflict": sum(self._agents.is_in_conflict(server, now) for server in self._servers),
            "transitions": len(transitions),
            "transition_age_seconds": now - min((each.since for each in transitions.values()), default=now),
        }
        if self.scaling is not None:
            figures |= self.scaling.figures()
        if self._installer is not None:
            plan = self._installer.plan
            figures |= {"plan_version": plan.version, "plan_entries": len(plan.entries)}
            figures["replicated_channels"] = len(self._installer.index.replicated)
        return figures

    def server_figures(self, now: float) -> Mapping[str, Mapping[str, float | None]]:
        """Return the figures of each server for the metrics, by their names; None while unknown.

        An agent that has fallen silent stays blind if it was: alerts end when it sees again, not when it says nothing.
        """
        return {
            "load_ratio": {server: self.load_ratio(server, now) for server in self._servers},
            "channels_left": {server: self.channels_left(server, now) for server in self._servers},
            "slots_left": {server: self.slots_left(server) for server in self._servers},
            "agent_blind": {server: server in self._model.blind for server in self._servers},
        }

    def resource_ratios(self, now: float) -> Mapping[tuple[str, str], float]:
        """Return how much each server uses of each resource, by both names; without those that are not known."""
        usage = {server: self._model.usage(server, now) for server in self._servers}
        return {(server, each.value): ratio for server, ratios in usage.items() for each, ratio in ratios.items()}

    def all_counters(self) -> Counter[str]:
        """Return the counters of all parts."""
        parts = [self._admin.counters, self._model.counters]
        if self._installer is not None:
            parts.append(self._installer.counters)
        if self.scaling is not None:
            parts.append(self.scaling.fleet.counters)
        return sum(parts, start=Counter(self.counters))

    # Events.

    def handle(self, event: BalancerEvent, now: float) -> list[BalancerAction]:
        """Handle one event; return the actions to execute, in order."""
        if self.stage is Stage.STOPPED:
            return []
        actions = self._follow_lease(now)
        match event:
            case Pushed(link, messages):
                self._dead_servers.hear(link)
                actions += self._on_pushes(link, messages, now)
            case Replied(link, tag, value):
                self._dead_servers.hear(link)
                actions += self._on_reply(link, tag, value, now)
            case Tick():
                actions += self._on_tick(now)
            case LinkUp(link, run_id):
                actions += self._on_link_up(link, run_id, now)
            case LinkDown(link, reason):
                actions += self._on_link_down(link, reason, now)
            case Start():
                self._contention.begin(now)
                self._tick_at = now + TICK_INTERVAL_S
                actions += [Connect(server.id, server.url) for server in self._servers.values()]
            case ProvisionerAnswered():
                if self.scaling is not None:
                    self.scaling.on_answer(event, self._at_work, now)
            case Shutdown():
                actions += self._on_shutdown(now)
            case _:
                assert_never(event)
        return self._absorb(actions, now)

    def deadline(self) -> float | None:
        """Return when something may be due."""
        if self._tick_at is None or self.stage is Stage.STOPPED:
            return None
        installer = self._at_work
        return earliest(self._tick_at, None if installer is None else installer.deadline())

    def check(self) -> None:
        """Assert the invariants between the parts, after each event."""
        assert (self._takeover is not None) == (self.stage is Stage.RECOVERING), f"{self.stage} with {self._takeover}"
        assert self._installer is not None or self.stage is not Stage.LEADING, "a leader installs plans"
        assert self._run_ids.keys().isdisjoint(self._down_reasons), "a server is up or down"
        assert self._run_ids.keys() | self._down_reasons.keys() == self._servers.keys(), "each server is up or down"
        if self._installer is not None:
            self._installer.check()
        self.membership.check(self._servers)
        assert self._quorum.voters(self._servers), "some servers of the plan count"
        assert self._lookouts.keys() <= self._configured.keys() - self._servers.keys(), "lookouts are not in the plan"
        self._model.check()
        self._decider.history.check()
        self._admin.check()
        if self.scaling is not None:
            self.scaling.fleet.check()

    @property
    def _at_work(self) -> Installer | None:
        """The installer while the balancer leads; the lease has just been checked then."""
        return self._installer if self.stage is Stage.LEADING else None

    def _absorb(self, actions: list[InnerAction], now: float) -> list[BalancerAction]:
        """Pass settled transitions on to the model and to waiting administrators; return the other actions.

        Everything that recorders want is among the actions: their messages come last.
        """
        others: list[BalancerAction] = []
        for action in actions:
            if isinstance(action, TransitionsSettled):
                self._model.on_settled(action.channels, now)
                self._decider.history.on_settled(action.channels, now)
                self._records.on_settled(action.channels, now)
                self.counters["moves_settled"] += len(action.channels)
                continue
            if isinstance(action, PlanChanged):
                self._records.on_plan(action, now)
                self._list_version = action.plan.version
                others += [action, *self._follow_servers(action.plan.servers, now)]
                continue
            elif isinstance(action, Decided):
                self._records.on_decision(action, now)
            others.append(action)
        if len(others) < len(actions):
            others += self._admin.tick(now)
        return [*others, *self._records.publish(self._run_ids)] if self.stage is Stage.LEADING else others

    # The servers.

    def _adopt(self, plan: Plan, now: float) -> list[InnerAction]:
        """Contend at the servers of a stored plan: whoever leads needs the lease of more than half of these."""
        self._list_version = plan.version
        details = {"version": plan.version, "servers": list(plan.servers)}
        note = Note("info", "the stored plan has other servers: going by these", details)
        return [note, *self._follow_servers(plan.servers, now)]

    def _follow_listing(self, now: float) -> list[InnerAction]:
        """Go by the servers of the stored plans while waiting for the lease, if these are newer than what is known."""
        if self.stage is not Stage.CONTENDING:
            return []
        plan = self._contention.listing(self._reachable(), self.options.virtual_nodes, now)
        if plan is None or plan.version <= self._list_version:
            return []
        if plan.servers.keys() != self._servers.keys():
            return self._adopt(plan, now)
        self._list_version = plan.version
        return []

    def _reachable(self) -> list[str]:
        """Return the connected servers, and configured ones that the plan may not list."""
        return [*self._run_ids, *(id_ for id_, lookout in self._lookouts.items() if lookout.is_up)]

    def _follow_servers(self, servers: Mapping[str, Server], now: float) -> list[BalancerAction]:
        """Follow the list of servers of a plan. Where the configuration names one, it says where that is."""
        new = [self._configured.get(id_, server) for id_, server in servers.items() if id_ not in self._servers]
        gone = [id_ for id_ in self._servers if id_ not in servers]
        if not new and not gone:
            return []
        tried = {each.id: self.membership.joined(each.id) or self._lookouts.pop(each.id, None) for each in new}
        for server in new:
            self._servers[server.id] = server
            self._down_reasons[server.id] = "not connected yet"
            self._agents.add(server.id)
            self._dead_servers.add(server.id)
            self._model.add_server(server.id)
        self._lease.vote(self._quorum.voters(servers))
        actions: list[BalancerAction] = [action for id_ in gone for action in self._part_with(id_, now)]
        for server in new:
            candidate = tried[server.id]
            actions += [Connect(server.id, server.url)] if candidate is None else []
            if candidate is not None and candidate.is_up:
                actions += self._absorb(self._on_link_up(server.id, candidate.run_id, now), now)
        return actions

    def _part_with(self, server: str, now: float) -> list[BalancerAction]:
        """Forget a server that the plan does not list any more."""
        is_up = server in self._run_ids
        run_id = self._run_ids.pop(server, None)
        del self._servers[server]
        for record in (self._down_reasons, self._unsubscribed, self._refused):
            record.pop(server, None)
        self._listeners.link_down(server, now)
        self._agents.remove(server)
        self._dead_servers.remove(server)
        self._model.remove_server(server)
        back = self._lease.drop(server)
        if self.stage is not Stage.LEADING and server in self._configured:
            self._lookouts[server] = Lookout(is_up, run_id)
            return [*back]
        self._contention.link_down(server)
        return [*back, *self.membership.left(server, is_up=is_up)]

    def _look_out(self) -> list[InnerAction]:
        """Connect to the configured servers that the plan does not list, while this balancer does not lead."""
        others = [each for id_, each in self._configured.items() if id_ not in self._servers | self._lookouts]
        self._lookouts |= {server.id: Lookout() for server in others}
        return [Connect(server.id, server.url) for server in others]

    def _end_lookouts(self) -> list[InnerAction]:
        actions: list[InnerAction] = [Disconnect(id_) for id_ in self._lookouts]
        self._lookouts = {}
        return actions

    def _on_link_up(self, server: str, run_id: str | None, now: float) -> list[InnerAction]:
        if (lookout := self._lookouts.get(server)) is not None:
            lookout.is_up, lookout.run_id = True, run_id
            return [self._contention.read(server)]
        if server not in self._servers:
            return [*self.membership.link_up(server, run_id)]
        self._dead_servers.hear(server)
        self._run_ids[server] = run_id
        self._down_reasons.pop(server, None)
        actions: list[InnerAction] = [
            Send(server, (b"SUBSCRIBE", BALANCER_CHANNEL, OPERATOR_CHANNEL), ("subscribe",)),
            Note("info", CONNECTED, {"server": server}),
        ]
        if self.stage is Stage.CONTENDING:
            actions.append(self._contention.read(server))
        actions += self._lease.link_up(server, now)
        if self._takeover is not None:
            actions += self._takeover.link_up(server, run_id)
        elif self._at_work is not None:
            actions += self._at_work.link_up(server, run_id, now)
        return actions

    def _on_link_down(self, server: str, reason: str, now: float) -> list[InnerAction]:
        if (lookout := self._lookouts.get(server)) is not None:
            lookout.is_up = False
            self._contention.link_down(server)
            return []
        if server not in self._servers:
            self.membership.link_down(server, reason)
            self._latest_installer().link_down(server)
            return []
        was_up = server in self._run_ids
        self._run_ids.pop(server, None)
        self._refused.pop(server, None)
        self._lease.link_down(server)
        self._contention.link_down(server)
        self._listeners.link_down(server, now)
        if self._takeover is not None:
            self._takeover.link_down(server)
        if self._installer is not None:
            self._installer.link_down(server)
        repeated = not was_up and self._down_reasons.get(server) == reason
        self._down_reasons[server] = reason
        if repeated:
            return []
        return [Note("warning", "a server cannot be reached", {"server": server, "reason": reason})]

    def _on_reply(self, server: str, tag: Any, value: Any, now: float) -> list[InnerAction]:
        if server not in self._servers and tag[0] not in FOR_OTHERS:
            return []  # it has left the plan since it was asked
        match tag[0]:
            case candidate.TAG | leaver.TAG:
                return self.membership.on_reply(server, tag, value, now)
            case lease.TAG:
                return [*self._lease.on_reply(server, tag[1], value, now), *self._follow_lease(now)]
            case takeover.TAG:
                if self._takeover is None:
                    return []
                return [*self._takeover.on_reply(server, tag, value), *self._recover(now)]
            case contention.TAG:
                lookout = self._lookouts.get(server)
                run_id = self._run_ids.get(server) if lookout is None else lookout.run_id
                self._contention.on_header(server, value, run_id)
                return self._follow_listing(now)
            case copies.TAG:
                if self._at_work is None:
                    return []
                return [*self._on_copy_reply(self._at_work, server, tag, value, now), *self._follow_lease(now)]
            case listeners.TAG:
                self._listeners.on_reply(server, value, now)
                return []
            case "subscribe":
                return self._on_subscribe_error(server, value)
            case _:
                raise AssertionError(f"not a tag of a balancer: {tag!r}")

    def _on_copy_reply(self, installer: Installer, server: str, tag: Any, value: Any, now: float) -> list[InnerAction]:
        """Handle the reply to a command of a copy. Where the plan is gone, the lease has probably gone with it."""
        copy = installer.copy(server) if server in self._servers else None
        was_whole = copy is not None and copy.is_written_whole
        actions = list(installer.on_reply(server, tag, value, now))
        if copy is not None and copy.is_written_whole and not was_whole:
            actions += self._lease.look_again(server, now)
        return actions

    def _on_subscribe_error(self, server: str, value: Any) -> list[InnerAction]:
        assert isinstance(value, ErrorReply), f"SUBSCRIBE has no reply but an error: {value!r}"
        self._unsubscribed[server] = None
        self._refused[server] = f"it does not let us hear its agent: {value}"
        return []

    # The lease and the stages.

    def _follow_lease(self, now: float) -> list[InnerAction]:
        """Enter the stage that the lease allows."""
        if self.stage is Stage.STOPPED:
            return []
        if self._shutdown_at is not None:
            return self._shut_down(now)
        held = self._lease.is_held(now)
        if held and self.stage is Stage.CONTENDING:
            return self._begin_term(now)
        if held and self.stage is Stage.LEADING:
            return self._follow_fence(now)
        if not held and self.stage is not Stage.CONTENDING:
            return self._end_term(now)
        if not held:
            return self._contend(now)
        return []

    def _follow_fence(self, now: float) -> list[InnerAction]:
        """End a term in which a server has refused a write, or which has no versions left."""
        installer = self._latest_installer()
        if server := installer.fenced_at:
            self.counters["writes_fenced"] += 1
            reason = f"server {server} refuses its writes: another balancer has begun a newer term"
        elif installer.is_used_up:
            reason = "it has used all versions of this term: the next one follows when the lease is confirmed"
        else:
            return []
        self._lease.doubt(now)
        return [*self._end_term(now, reason, "warning"), *self._lease.tick(now)]

    def _take_over(self, now: float) -> list[InnerAction]:
        """Give up dead servers, if an operator has started this balancer for that, once it is known which are alive."""
        servers, dead = self._servers, self._dead_servers.dead
        alive = servers.keys() & self._run_ids.keys() - dead
        if not self._quorum.may_give_up or self.stage is not Stage.CONTENDING or not alive:
            return []
        plan = self._contention.listing(self._reachable(), self.options.virtual_nodes, now)
        if plan is None or plan.servers.keys() != servers.keys():
            return []  # without a stored plan there is nothing to take over
        if not self._quorum.decides(alive, servers) and alive | dead != servers.keys():
            return []
        try:
            self._quorum.take_over(alive, servers)
        except ConfigError as error:
            return self._stop(error)
        self._lease.vote(self._quorum.voters(servers))
        text = "takes over, as an operator wants: only the servers that it can reach count"
        return [Note("warning", text, {"given_up": sorted(self._quorum.given_up)}), *self._lease.tick(now)]

    def _count_all_again(self, now: float) -> list[InnerAction]:
        """Count the servers again that were given up, when the lease is held at more than half of all in the plan."""
        if not self._quorum.given_up or not self._lease.would_hold(self._servers, now):
            return []
        if self._at_work is not None and not self._at_work.may_change_servers:
            return []
        self._quorum.given_up = frozenset()
        self._lease.vote(list(self._servers))
        return [Note("info", "all servers of the plan count again", {"servers": list(self._servers)})]

    def _begin_term(self, now: float) -> list[InnerAction]:
        if self._quorum.may_give_up:  # it has the lease of more than half of the servers, so there is no need to
            refusal = self._quorum.refusal(len(self._run_ids), len(self._servers))
            return [*self._lease.release(now), *self._stop(refusal)]
        self._term += 1
        self.stage = Stage.RECOVERING
        servers = list(self._servers.values())
        self._takeover = Takeover(
            servers,
            self._term,
            self.options.recovery_s,
            self.options.virtual_nodes,
            self.plan,
            self._granted_term,
            self.options.compatibility,
            self._quorum.voters(self._servers),
        )
        details = {"incarnation": self.incarnation}
        actions: list[InnerAction] = [Note("info", "got the lease; reading the stored plans", details)]
        for server, run_id in self._run_ids.items():
            actions += self._takeover.link_up(server, run_id)
        return actions

    def _end_term(self, now: float, reason: str = "", level: str = "error") -> list[InnerAction]:
        self.stage = Stage.CONTENDING
        self._takeover = None
        given_up = self.membership.end_term()
        self._records.end_term()
        self._decider.history.end_term()
        self._contention.begin(now)
        details = {**self._contention.details(), "reason": reason or self._why_not_leading()}
        text = "ends its term" if reason else "lost the lease: no decisions and no changes until it is back"
        return [*given_up, *self._look_out(), Note(level, text, details)]

    def _contend(self, now: float) -> list[InnerAction]:
        try:
            return list(self._contention.look(now))
        except AlreadyRunning as error:
            return self._stop(error)

    def _stop(self, error: AlreadyRunning | ConfigError | None) -> list[InnerAction]:
        self.stage = Stage.STOPPED
        self._takeover = None
        return [Stopped(error)]

    def _recover(self, now: float) -> list[InnerAction]:
        """Continue reading stored plans, and lead when that is done."""
        if self._takeover is None:
            return []
        listing = self._takeover.listing(now)
        is_newer = listing is not None and listing.version >= self._list_version
        if listing is not None and is_newer and listing.servers.keys() != self._servers.keys():
            self.stage, self._takeover = Stage.CONTENDING, None
            self._contention.begin(now)
            return [*self._adopt(listing, now), *self._lease.tick(now)]
        sends = self._takeover.read(now)
        if sends is not None:
            return list(sends)
        missing = self._takeover.missing()
        try:
            book, found, conflicts = self._takeover.finish()
        except ConfigError as error:
            return [*self._lease.release(now), *self._stop(error)]
        self._takeover = None
        self.stage = Stage.LEADING
        self._granted_term = book.term
        self._agents.forget_acknowledgements()
        servers = list(self._servers.values())
        installer = Installer(book, servers, self._agents, self.options, self._term, now, self._quorum)
        self._installer = installer
        self._decider.begin_term(installer, now)
        self._records.begin_term(now)
        if self.scaling is not None:
            self.scaling.begin_term(installer, now)
        details = {
            "version": book.plan.version,
            "entries": len(book.plan.entries),
            "transitions": len(installer.transitions),
            "not_read": missing,
        }
        actions: list[InnerAction] = [Note("warning" if missing else "info", "leading", details)]
        actions += self._end_lookouts()
        actions += self._note_conflicts(conflicts)
        actions += [] if listing is None else self._note_urls(listing)
        reason = "recovered from the servers" if book.plan.version else "a new cluster"
        actions.append(PlanChanged(book.plan, reason, tuple(installer.transitions)))
        for server, run_id in self._run_ids.items():
            actions += installer.link_up(server, run_id, now, found.get(server))
        return [*actions, *self._drain_as_configured(installer, now)]

    def _drain_as_configured(self, installer: Installer, now: float) -> list[InnerAction]:
        """Drain the servers that the configuration names, if nobody has administered this cluster yet."""
        draining = self.options.draining
        if draining == installer.draining or not draining:
            return []
        details = {"configured": sorted(draining), "plan": sorted(installer.draining)}
        if installer.plan.administration.version:
            text = (
                "draining = true is not used: which servers are drained is in the stored plan; take it out of the"
                " configuration, and type 'dynamoth server drain' or 'undrain'"
            )
            return [Note("warning", text, details)]
        administration = replace(installer.plan.administration, draining=draining)
        try:
            return installer.administer(administration, None, "the configuration has draining = true", now)
        except RequestRefused as error:
            return [Note("error", "the configured draining cannot begin", {**details, "reason": str(error)})]

    def _note_conflicts(self, conflicts: Sequence[Conflict]) -> list[Note]:
        """Report copies that cannot be ours."""
        self.counters["copies_conflicting"] += len(conflicts)
        text = "a stored plan cannot be ours: it is not used, and written over; see who may write the key"
        return [Note("error", text, {"server": each.server, "reason": each.reason}) for each in conflicts]

    def _note_urls(self, stored: Plan) -> list[Note]:
        """Report the servers that had another URL in the stored plan. That of the configuration is stored now.

        A plan may be forged, and a server may have moved: only the operator's own file tells.
        """
        text = (
            "the stored plan had another URL for a server; it has that of this balancer's configuration now, which"
            " clients follow: if the file is old, correct it and restart the balancer"
        )
        known = self._configured
        moved = [id_ for id_, each in stored.servers.items() if id_ in known and known[id_].url != each.url]
        return [Note("warning", text, {"server": server}) for server in moved]

    def _on_shutdown(self, now: float) -> list[InnerAction]:
        self._shutdown_at = now + SHUTDOWN_S_MAX
        return [*self._lease.release(now), *self._shut_down(now)]

    def _shut_down(self, now: float) -> list[InnerAction]:
        """Stop, once the servers have confirmed that the lease is given back."""
        assert self._shutdown_at is not None
        if self.stage is Stage.STOPPED or (self._lease.is_releasing and now < self._shutdown_at):
            return []
        return self._stop(None)

    # Time.

    def _on_tick(self, now: float) -> list[InnerAction]:
        actions: list[InnerAction] = []
        if self._tick_at is None or now >= self._tick_at:
            if renewals := self._lease.tick(now):
                return [*renewals]  # at once: the rest may take long, and follows in the next tick
            self._tick_at = now + TICK_INTERVAL_S
            self._dead_servers.tick(now)
            actions += self._count_all_again(now)
            actions += self._recover(now)
            if self.stage is Stage.CONTENDING:
                actions += self._follow_listing(now)
                actions += self._take_over(now)
                actions += self._contention.read_headers(self._reachable(), now)
            actions += self._resubscribe()
            actions += self._listeners.tick(self._run_ids, now)
            actions += self._agents.note_changes(self._run_ids, now)
            actions += self._admin.tick(now)
            if (installer := self._at_work) is not None:
                actions += self._repair.tick(installer, now)
                actions += installer.tick(now)
                actions += self.membership.tick(now)
                actions += self._decide(installer, now)
                for made in self._decider.history.measure(self.load_ratio, now):
                    self._records.on_outcome(made)
                self._records.tick(now)
            actions += self._look_after_health(now)
            actions += self._scale(now)
        elif (installer := self._at_work) is not None:
            actions += installer.advance(now)
        return actions

    def _scale(self, now: float) -> list[InnerAction]:
        """Add and free servers. Comes last, as the list of servers that the other parts know follows it."""
        installer = self._at_work
        if self.scaling is None or installer is None or installer.plan.servers.keys() != self._servers.keys():
            return []
        return self.scaling.tick(installer, now)

    def _look_after_health(self, now: float) -> list[InnerAction]:
        """Find problems; report those that have begun and those that are over."""
        leads = self.stage is Stage.LEADING
        refusals = {} if self._takeover is None else self._takeover.refusals()
        term_problems = {id_: f"it refuses the term: {reply}" for id_, reply in refusals.items()}
        lease_problems = {id_: f"it refuses the lease: {reply}" for id_, reply in self._lease.problems().items()}
        view = View(
            why_not_leading=None if leads else self._why_not_leading(),
            stands_by=self.stands_by,
            servers=tuple(self._servers),
            down=self._down_reasons,
            emptied=[
                server
                for server in self._draining
                if self._channels_named(server) == 0 and self.slots_left(server) == 0
            ],
            unanswered=[server for server in self._run_ids if self._listeners.is_unanswered(server, now)],
            refused={**self._listeners.refused, **term_problems, **lease_problems, **self._refused},
            installer=self._installer,
            agents=self._agents,
            model=self._model,
            unreached=self._decider.unreached if leads and not self.paused else (),
            decision_refused=self._decision_refused if leads else "",
            given_up=self._quorum.given_up & self._servers.keys(),
            not_listed=[id_ for id_ in self._configured if id_ not in self._servers] if leads else (),
            fleet_problems={} if self.scaling is None or not leads else self.scaling.fleet.problems(),
        )
        return [*self.health.report(find(view, now), now)]

    def _why_not_leading(self) -> str:
        reason = self._contention.reason()
        needed = f"the lease of {self._lease.needed} is needed"
        alive = self._servers.keys() - self._dead_servers.dead
        cure = "" if self._quorum.decides(alive, self._servers) else CURE
        return "; ".join(filter(None, (f"it is {self.stage.value}, not leading: {needed}", reason, cure)))

    def _resubscribe(self) -> list[InnerAction]:
        servers = [server for server in self._unsubscribed if server in self._run_ids]
        self._unsubscribed.clear()
        return [Send(server, (b"SUBSCRIBE", BALANCER_CHANNEL, OPERATOR_CHANNEL), ("subscribe",)) for server in servers]

    # Messages.

    def _on_pushes(self, server: str, messages: Sequence[Sequence[Any]], now: float) -> list[InnerAction]:
        actions: list[InnerAction] = []
        for message in messages:
            if server not in self._servers:
                if message[0] == b"message" and message[1] == OPERATOR_CHANNEL:  # it is leaving
                    actions += self._on_operator_message(server, message[2], now)
            elif message[0] == b"message" and message[1] == BALANCER_CHANNEL:
                actions += self._hearing.on_message(server, message[2], self._at_work, now)
            elif message[0] == b"message" and message[1] == OPERATOR_CHANNEL:
                actions += self._on_operator_message(server, message[2], now)
            elif message[0] == b"subscribe":
                self._refused.pop(server, None)
        if (installer := self._at_work) is not None:
            actions += installer.advance(now)
        return actions

    def _on_operator_message(self, server: str, data: bytes, now: float) -> list[InnerAction]:
        """Handle a request of an operator."""
        try:
            message = unpack_control(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return []
        if not isinstance(message, AdminRequest):
            self.counters["unexpected"] += 1
            return []
        if self._at_work is None and message.command != "status":
            return []  # the administrator repeats it: perhaps we lead by then, or another balancer does
        return self._admin.handle(server, message, now)

    # Changes.

    def _decide(self, installer: Installer, now: float) -> list[InnerAction]:
        """Make a plan, if it is time and there is a reason."""
        made = self._decider.look(installer, now)
        return [] if made is None else self._carry_out(made, now)

    def _carry_out(self, made: MadeDecision, now: float) -> list[InnerAction]:
        """Begin the moves of a decision."""
        self.counters["decisions"] += 1
        self._decision_refused = ""
        moves = {move.channel: move for move in made.decision.moves}
        if not moves:
            return [Decided(made.decision, made.number)]
        assignments = {channel: move.after for channel, move in moves.items()}
        try:
            actions = self._change(assignments, made.decision.moves[0].reason, now, moves)
        except RequestRefused as error:
            self._decision_refused = reason = str(error)
            self._decider.history.refuse(made, reason)
            note = Note("warning", "a decision cannot be carried out now", {"reason": reason})
            return [Decided(made.decision, made.number, reason), note]
        return [Decided(made.decision, made.number), *actions]

    def _change(
        self,
        assignments: Mapping[bytes, Assignment],
        reason: str,
        now: float,
        moves: Mapping[bytes, Move] = NO_MOVES,
        *,
        begin: CarryOut | None = None,
        goal: str = BY_ADMINISTRATOR,
    ) -> list[InnerAction]:
        """Begin to change assignments, with ``Installer.begin`` if nothing else is given.

        Channels of ``moves`` have their own goals and reasons. Raises RequestRefused.
        """
        installer = self._at_work
        assert installer is not None, "only a balancer that leads changes the plan"
        plan = installer.plan
        changes = {channel: (plan.entry(channel).route.assignment, after) for channel, after in assignments.items()}
        actions = (begin or installer.begin)(assignments, reason, now)
        self._model.on_moves(changes, now, self._decider.members(filter(is_slot, changes), installer))
        self._decider.on_moves(changes, now)
        for channel, (before, after) in changes.items():
            move = moves.get(channel)
            why = (goal, reason) if move is None else (move.goal, move.reason)
            self._decider.history.add_move(channel, PastMove(now, before, after, *why))
        self.counters["moves_begun"] += len(changes)
        self.counters["replications_begun"] += sum(any(map(is_replicated, pair)) for pair in changes.values())
        return list(actions)

    # For administrators.

    def _latest_installer(self) -> Installer:
        assert self._installer is not None, "a balancer that has never led takes no request that needs it"
        return self._installer

    def _leading_installer(self) -> Installer:
        if self._at_work is None:
            raise RequestRefused("this balancer does not lead now: ask again")
        return self._at_work

    def status(self, now: float) -> Mapping[str, Any]:
        """Return the state of everything, for people."""
        return {
            "stage": self.stage.value,
            "incarnation": self.incarnation,
            "version": -1 if self.plan is None else self.plan.version,
            "paused": self.paused,
            **describe_pins({} if self.plan is None else self.plan.administration.pins),
            "compatibility": [] if self.plan is None else describe_rules(self.plan.compatibility),
            "problems": [
                {"severity": problem.severity.value, **problem.details(now)}
                for problem in self.health.problems[:PROBLEMS_SHOWN_MAX]
            ],
            "servers": {server: self._server_status(server, now) for server in self._servers},
            **describe_channels(self._installer, now),
            "moves_begun": self.counters["moves_begun"],
            "moves_settled": self.counters["moves_settled"],
            "decisions": describe_decisions(self._decider.history.decisions, now),
            "fleet": None if self.scaling is None else self.scaling.describe(now),
            "counters": dict(self.all_counters()),
        }

    def _server_status(self, server: str, now: float) -> dict[str, Any]:
        return {
            "link": "up" if server in self._run_ids else "down",
            "link_problem": self._down_reasons.get(server, ""),
            "draining": server in self._draining,
            "channels_left": self.channels_left(server, now),
            "channels_named": self._channels_named(server),
            "slots_left": self.slots_left(server),
            **describe_server(server, self._agents, self._model, self._installer, now),
        }
