"""The balancer machine: decides which server carries which channel, and installs its decisions.

Theory of operation
-------------------
It is in one of these stages::

    CONTENDING   has no lease: it listens to agents and administrators, and changes nothing
    RECOVERING   has the lease: it reads the stored plans, to continue where its predecessor ended
    LEADING      makes decisions and installs plans
    SUSPENDED    has lost the lease while it was RECOVERING or LEADING: it changes nothing
    STOPPED      has ended

Before every action it checks that it still holds the lease. If not, it is SUSPENDED, until it has the lease again: then
it goes on, unless another balancer has led in between (``install.resumption``). If one has, it is CONTENDING, and a
later term begins with another recovery.

The parts: ``terms`` (how the stages follow each other), ``install`` (the lease, the takeover, the phases of changes),
``decide`` (the load model and the goals), ``repair`` (what failures ask for), and ``admin`` (requests, status and
problems). They know as little of each other as possible; this module connects them. ``install.servers`` and
``install.leadership`` have the state that many read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, assert_never

from dynamoth.errors import ConfigError, MalformedMessage, RequestRefused
from dynamoth.machine import lease
from dynamoth.machine.events import (
    Connect,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    Start,
    Tick,
    earliest,
)
from dynamoth.machine.lease import Lease, LeaseNames
from dynamoth.names import BALANCER_CHANNEL, BALANCER_LEASE_KEY, OPERATOR_CHANNEL
from dynamoth.plan.plan import Assignment, Plan, Server
from dynamoth.plan.slots import is_slot
from dynamoth.protocol.control import AdminRequest, unpack_control
from dynamoth_balancer.admin.api import Admin
from dynamoth_balancer.admin.changes import CarryOut, Changes
from dynamoth_balancer.admin.explain import Explainer
from dynamoth_balancer.admin.health import Health, find
from dynamoth_balancer.admin.overview import Overview
from dynamoth_balancer.admin.rebalance import Rebalance
from dynamoth_balancer.admin.records import Records
from dynamoth_balancer.admin.status import (
    plan_page,
)
from dynamoth_balancer.admin.waiting import PER_EVENT_MAX, WaitingRequests
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
    TransitionsSettled,
)
from dynamoth_balancer.install import candidate, contention, copies, leaver, listeners, resumption, takeover
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.contention import Contention
from dynamoth_balancer.install.dead_servers import DeadServers
from dynamoth_balancer.install.hearing import Hearing
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.leadership import Leadership, Stage
from dynamoth_balancer.install.listeners import Listeners
from dynamoth_balancer.install.membership import Membership
from dynamoth_balancer.install.quorum import Quorum
from dynamoth_balancer.install.servers import Servers
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_balancer.provision.scaling import Scaling
from dynamoth_balancer.repair import Repair
from dynamoth_balancer.terms import Terms

TICK_INTERVAL_S = 0.1
"""How often everything that waits is checked: a fifth of the shortest default timeout, and as often as copies of the
plan are (``PROBE_INTERVAL_S``)."""

CONNECTED = "connected to a server"

LEASE = LeaseNames(BALANCER_LEASE_KEY, BALANCER_CHANNEL, "balancer")

FOR_OTHERS = frozenset({candidate.TAG, leaver.TAG, copies.TAG, lease.TAG, contention.TAG})
"""The tags of replies that count also from servers that are not in the plan, as they come or go."""

NO_MOVES: Mapping[bytes, Move] = MappingProxyType({})


class BalancerMachine:
    """The balancer of a cluster.

    Args:
        servers: those of the configuration, at least one, each id once: where to find the plan, which lists all, and
            all servers of a new cluster.
        incarnation: up to 63 bits, random, new with each start of the process.
        options: every threshold, interval and bound.
        fleet: when servers are added and freed; None where no provisioner can do that.
        process: which process this is, for people.

    Raises:
        ConfigError: there is no server, or one is named twice; or the servers to drain are unknown, or all servers.

    """

    def __init__(
        self,
        servers: Sequence[Server],
        incarnation: int,
        options: BalancerOptions | None = None,
        fleet: FleetOptions | None = None,
        process: str = "",
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
        self._servers = Servers(servers)
        #: Its stage, and what it reads or installs plans with.
        self.leadership = Leadership()
        self._lease = Lease(LEASE, ids, incarnation, self.options.lease_s, self.options.lease_renew_s)
        patience_s = self.options.lease_s + self.options.lease_renew_s
        self._contention = Contention(
            self._lease, self._servers.listed, self._servers.down, patience_s, standby=self.options.standby
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
            self.options,
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
        self.membership = Membership(
            self.leadership.leading_installer, self._lease, self._quorum, self._servers.run_ids
        )
        look_s = self.options.decision_interval_s
        #: Adds and frees servers; None where no provisioner can do that.
        self.scaling = (
            None
            if fleet is None
            else Scaling(fleet, look_s, self._agents, self._listeners, self._model, self._decider, self.membership)
        )
        #: What people and metrics read.
        self.overview = Overview(
            incarnation=incarnation,
            process=process,
            leadership=self.leadership,
            servers=self._servers,
            lease=self._lease,
            contention=self._contention,
            quorum=self._quorum,
            dead_servers=self._dead_servers,
            agents=self._agents,
            listeners=self._listeners,
            model=self._model,
            decider=self._decider,
            health=self.health,
            scaling=self.scaling,
            counters=self.counters,
        )
        self._terms = Terms(
            incarnation=incarnation,
            options=self.options,
            leadership=self.leadership,
            servers=self._servers,
            lease=self._lease,
            contention=self._contention,
            quorum=self._quorum,
            dead_servers=self._dead_servers,
            agents=self._agents,
            membership=self.membership,
            counters=self.counters,
            why_not_leading=self.overview.why_not_leading,
            adopt=self._adopt,
            begun=self._on_term_begun,
            ended=self._on_term_ended,
        )
        latest = self.leadership.latest_installer
        explainer = Explainer(self._decider, self._model, self.overview.server_status)
        self._admin = Admin(
            {
                "status": lambda _, now: self.overview.status(now),
                "plan": lambda arguments, _: plan_page(latest().plan, arguments),
                "explain": lambda arguments, now: explainer.explain(latest(), arguments, now),
            },
            Changes(self.overview.load_ratio, self._change, self._decider.hold),
            Rebalance(self._decider, self._carry_out),
            self.membership,
            latest,
            self.options,
            self._records.on_pause,
            self.counters,
        )
        self._waiting_requests = WaitingRequests(self.counters)
        self._tick_at: float | None = None

    @property
    def stage(self) -> Stage:
        """How far it is on its way to lead."""
        return self.leadership.stage

    @property
    def plan(self) -> Plan | None:
        """The plan of the present or latest term; None before the first."""
        return self.leadership.plan

    # Events.

    def handle(self, event: BalancerEvent, now: float) -> list[BalancerAction]:
        """Handle one event; return the actions to execute, in order."""
        if self.stage is Stage.STOPPED:
            return []
        actions = self._terms.follow(now)
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
                actions += [Connect(server.id, server.url) for server in self._servers.listed.values()]
            case ProvisionerAnswered():
                if self.scaling is not None:
                    self.scaling.on_answer(event, self.leadership.at_work, now)
            case Shutdown():
                actions += self._terms.shut_down(now)
            case _:
                assert_never(event)
        return self._absorb(actions, now)

    def deadline(self) -> float | None:
        """Return when something may be due."""
        if self._tick_at is None or self.stage is Stage.STOPPED:
            return None
        installer = self.leadership.at_work
        return earliest(
            self._tick_at, self._waiting_requests.since, None if installer is None else installer.deadline()
        )

    def check(self) -> None:
        """Assert the invariants between the parts, after each event."""
        self.leadership.check()
        self._servers.check()
        self.membership.check(self._servers.listed)
        assert self._quorum.voters(self._servers.listed), "some servers of the plan count"
        self._model.check()
        self._decider.history.check()
        self._admin.check()
        if self.scaling is not None:
            self.scaling.fleet.check()

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
                self._servers.version = action.plan.version
                others += [action, *self._follow_servers(action.plan.servers, now)]
                continue
            elif isinstance(action, Decided):
                self._records.on_decision(action, now)
            others.append(action)
        if len(others) < len(actions):
            others += self._admin.tick(now)
        return others if self.leadership.at_work is None else [*others, *self._records.publish(self._servers.run_ids)]

    # The servers.

    def _adopt(self, plan: Plan, now: float) -> list[InnerAction]:
        """Contend at the servers of a stored plan: whoever leads needs the lease of more than half of these."""
        self._servers.version = plan.version
        details = {"version": plan.version, "servers": list(plan.servers)}
        note = Note("info", "the stored plan has other servers: going by these", details)
        return [note, *self._follow_servers(plan.servers, now)]

    def _follow_listing(self, now: float) -> list[InnerAction]:
        """Go by the servers of the stored plans while waiting for the lease, if these are newer than what is known."""
        if self.stage is not Stage.CONTENDING:
            return []
        plan = self._contention.listing(self._servers.reachable, self.options.virtual_nodes, now)
        if plan is None or plan.version <= self._servers.version:
            return []
        if plan.servers.keys() != self._servers.listed.keys():
            return self._adopt(plan, now)
        self._servers.version = plan.version
        return []

    def _follow_servers(self, servers: Mapping[str, Server], now: float) -> list[BalancerAction]:
        """Follow the list of servers of a plan. Where the configuration names one, it says where that is."""
        listed = self._servers.listed
        new = [server for id_, server in servers.items() if id_ not in listed]
        gone = [id_ for id_ in listed if id_ not in servers]
        if not new and not gone:
            return []
        tried = {each.id: self.membership.joined(each.id) or self._servers.lookouts.pop(each.id, None) for each in new}
        for server in new:
            self._servers.add(server)
            self._agents.add(server.id)
            self._dead_servers.add(server.id)
            self._model.add_server(server.id)
        self._lease.vote(self._quorum.voters(servers))
        actions: list[BalancerAction] = [action for id_ in gone for action in self._part_with(id_, now)]
        for server in new:
            candidate = tried[server.id]
            actions += [Connect(server.id, listed[server.id].url)] if candidate is None else []
            if candidate is not None and candidate.is_up:
                actions += self._absorb(self._on_link_up(server.id, candidate.run_id, now), now)
        return actions

    def _part_with(self, server: str, now: float) -> list[BalancerAction]:
        """Forget a server that the plan does not list any more."""
        link = self._servers.remove(server)
        self._listeners.link_down(server, now)
        self._agents.remove(server)
        self._dead_servers.remove(server)
        self._model.remove_server(server)
        back = self._lease.drop(server)
        if self.stage is not Stage.LEADING and server in self._servers.configured:
            self._servers.lookouts[server] = link
            return [*back]
        self._contention.link_down(server)
        return [*back, *self.membership.left(server, is_up=link.is_up)]

    def _on_link_up(self, server: str, run_id: str | None, now: float) -> list[InnerAction]:
        if (lookout := self._servers.lookouts.get(server)) is not None:
            lookout.is_up, lookout.run_id = True, run_id
            return [self._contention.read(server)]
        if server not in self._servers.listed:
            return [*self.membership.link_up(server, run_id)]
        self._dead_servers.hear(server)
        actions: list[InnerAction] = [
            self._servers.link_up(server, run_id),
            Note("info", CONNECTED, {"server": server}),
        ]
        if self.leadership.waits:
            actions.append(self._contention.read(server))
        actions += self._lease.link_up(server, now)
        if self.leadership.takeover is not None:
            actions += self.leadership.takeover.link_up(server, run_id)
        elif self.leadership.at_work is not None:
            actions += self.leadership.at_work.link_up(server, run_id, now)
        if self.leadership.resumption is not None:
            actions += self.leadership.resumption.read([server])
        return actions

    def _on_link_down(self, server: str, reason: str, now: float) -> list[InnerAction]:
        if (lookout := self._servers.lookouts.get(server)) is not None:
            lookout.is_up = False
            self._contention.link_down(server)
            return []
        if server not in self._servers.listed:
            self.membership.link_down(server, reason)
            self.leadership.latest_installer().link_down(server)
            return []
        is_new = self._servers.link_down(server, reason)
        self._lease.link_down(server)
        self._contention.link_down(server)
        self._listeners.link_down(server, now)
        if self.leadership.takeover is not None:
            self.leadership.takeover.link_down(server)
        if self.leadership.installer is not None:
            self.leadership.installer.link_down(server)
        if not is_new:
            return []
        return [Note("warning", "a server cannot be reached", {"server": server, "reason": reason})]

    def _on_reply(self, server: str, tag: Any, value: Any, now: float) -> list[InnerAction]:
        if server not in self._servers.listed and tag[0] not in FOR_OTHERS:
            return []  # it has left the plan since it was asked
        match tag[0]:
            case candidate.TAG | leaver.TAG:
                return self.membership.on_reply(server, tag, value, now)
            case lease.TAG:
                return [*self._lease.on_reply(server, tag[1], value, now), *self._terms.follow(now)]
            case takeover.TAG:
                if self.leadership.takeover is None:
                    return []
                return [*self.leadership.takeover.on_reply(server, tag, value), *self._terms.recover(now)]
            case resumption.TAG:
                if self.leadership.resumption is None:
                    return []
                self.leadership.resumption.on_reply(server, tag, value, self._servers.run_id(server))
                return self._terms.follow(now)
            case contention.TAG:
                self._contention.on_header(server, value, self._servers.run_id(server))
                return self._follow_listing(now)
            case copies.TAG:
                installer = self.leadership.at_work
                if installer is None:
                    return []
                return [*self._on_copy_reply(installer, server, tag, value, now), *self._terms.follow(now)]
            case listeners.TAG:
                self._listeners.on_reply(server, value, now)
                return []
            case "subscribe":
                self._servers.on_subscribe_error(server, value)
                return []
            case _:
                raise AssertionError(f"not a tag of a balancer: {tag!r}")

    def _on_copy_reply(self, installer: Installer, server: str, tag: Any, value: Any, now: float) -> list[InnerAction]:
        """Handle the reply to a command of a copy. Where the plan is gone, the lease has probably gone with it."""
        copy = installer.copy(server) if server in self._servers.listed else None
        was_whole = copy is not None and copy.is_written_whole
        actions = list(installer.on_reply(server, tag, value, now))
        if copy is not None and copy.is_written_whole and not was_whole:
            actions += self._lease.look_again(server, now)
        return actions

    # Terms.

    def _on_term_begun(self, installer: Installer, now: float) -> None:
        self._decider.begin_term(installer, now)
        self._records.begin_term(now)
        if self.scaling is not None:
            self.scaling.begin_term(installer, now)

    def _on_term_ended(self) -> None:
        self._records.end_term()
        self._decider.history.end_term()

    # Time.

    def _on_tick(self, now: float) -> list[InnerAction]:
        actions: list[InnerAction] = []
        if self._tick_at is None or now >= self._tick_at:
            if renewals := self._lease.tick(now):
                return [*renewals]  # at once: the rest may take long, and follows in the next tick
            self._tick_at = now + TICK_INTERVAL_S
            self._dead_servers.tick(now)
            actions += self._terms.count_all_again(now)
            actions += self._terms.recover(now)
            actions += self._follow_listing(now)
            actions += self._terms.take_over(now)
            if self.leadership.waits:
                actions += self._contention.read_headers(self._servers.reachable, now)
            actions += self._servers.resubscribe()
            actions += self._listeners.tick(self._servers.run_ids, now)
            actions += self._agents.note_changes(self._servers.run_ids, now)
            actions += self._admin.tick(now)
            if (installer := self.leadership.at_work) is not None:
                actions += self._repair.tick(installer, now)
                if self._repair.goes_on:
                    self._tick_at = now
                actions += installer.tick(now)
                actions += self.membership.tick(now)
                actions += self._decide(installer, now)
                for made in self._decider.history.measure(self.overview.load_ratio, now):
                    self._records.on_outcome(made)
                self._records.tick(now)
            actions += self._look_after_health(now)
            actions += self._scale(now)
        actions += self._handle_requests(now)
        if (installer := self.leadership.at_work) is not None:
            actions += installer.advance(now)
        return actions

    def _scale(self, now: float) -> list[InnerAction]:
        """Add and free servers. Comes last, as the list of servers that the other parts know follows it."""
        installer = self.leadership.at_work
        if self.scaling is None or installer is None or not self._knows_servers:
            return []
        return self.scaling.tick(installer, now)

    def _look_after_health(self, now: float) -> list[InnerAction]:
        """Find problems; report those that have begun and those that are over."""
        return [*self.health.report(find(self.overview.view(self._decision_refused, now), now), now)]

    # Messages.

    def _on_pushes(self, server: str, messages: Sequence[Sequence[Any]], now: float) -> list[InnerAction]:
        actions: list[InnerAction] = []
        for message in messages:
            if message[0] == b"message" and message[1] == OPERATOR_CHANNEL:
                self._on_operator_message(server, message[2], now)
            elif server not in self._servers.listed:
                continue  # it is leaving
            elif message[0] == b"message" and message[1] == BALANCER_CHANNEL:
                actions += self._hearing.on_message(server, message[2], self.leadership.in_term, now)
            elif message[0] == b"subscribe":
                self._servers.on_subscribed(server)
        actions += self._handle_requests(now)
        if (installer := self.leadership.at_work) is not None:
            actions += installer.advance(now)
        return actions

    def _on_operator_message(self, server: str, data: bytes, now: float) -> None:
        """Let a request of an operator wait for its turn."""
        try:
            message = unpack_control(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return
        if isinstance(message, AdminRequest):
            self._waiting_requests.put(server, message, now)
        else:
            self.counters["unexpected"] += 1

    def _handle_requests(self, now: float) -> list[InnerAction]:
        """Handle the requests whose turn it is. The other parts follow a new list of servers before the next one."""
        actions: list[InnerAction] = []
        for _ in range(PER_EVENT_MAX):
            if self._waiting_requests.since is None or not self._knows_servers:
                break
            server, request = self._waiting_requests.take()
            if self.leadership.at_work is not None or request.command == "status":
                actions += self._admin.handle(server, request, now)
            # else the administrator repeats it: perhaps we lead by then, or another balancer does
        return actions

    @property
    def _knows_servers(self) -> bool:
        """Whether all parts know the servers of the plan; they follow a new list at the end of an event."""
        installer = self.leadership.at_work
        return installer is None or installer.plan.servers.keys() == self._servers.listed.keys()

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
        installer = self.leadership.at_work
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
