"""A whole simulated cluster: servers, their agents, a balancer, an administrator and clients, under one audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynamoth.machine.events import Machine
from dynamoth.names import PLAN_KEY
from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import Assignment, Mode, Phase, Plan, Server
from dynamoth.protocol import stored_plan
from dynamoth_agent.events import AlreadyRunning
from dynamoth_agent.machine import AgentMachine
from dynamoth_balancer.events import BalancerAction, BalancerEvent, Decided, ListServers, Note, PlanChanged, Stopped
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions
from dynamoth_balancer.provision.fleet import FreeServer, StartServer
from dynamoth_balancer.provision.options import FleetOptions
from dynamoth_client.machines.patterns.events import PatternOptions
from dynamoth_client.machines.publisher.events import PublisherOptions
from dynamoth_client.machines.subscriber.events import SubscriberOptions
from dynamoth_dispatcher.options import DispatcherOptions, ForwarderOptions, TransitionOptions
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_sim.audit import Audit, Violation
from dynamoth_sim.load.administrator import Administrator, Answered, Ask
from dynamoth_sim.load.clients import PATTERN_MARK, Client, ClientOptions
from dynamoth_sim.load.provisioner import Provisioner
from dynamoth_sim.world.network import DEFAULT_DELAYS, Delays, Network
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

VIRTUAL_NODES = 16
"""Points per server on the ring: a few are enough to spread a few channels, and computing them takes time."""

VERSION_READ_INTERVAL_S = 0.3
"""How often publishers read the version of the stored plan."""

PUBLISH_TIMEOUT_S = 8.0

PUBLISH_S_MAX = PUBLISH_TIMEOUT_S + 1.0
"""Every publish ends within this: the timeout of the simulated clients, and some pauses."""

AMPLE_BYTES_PER_S = 1_000_000_000
"""The capacity of a server that is never loaded: the balancer then decides nothing by itself."""

JOIN_S = 2.0
"""How long a new server carries no channel, and a client with patterns has for getting there."""

RULES_REST_S = 1.0
"""How long no channel moves after a change of rules: longer than a client stands still."""

PLAIN_REST_S = 7.0
"""How long channels that have moved do not become plain: longer than clients and agents say that a route has changed,
and subscribers hold messages."""

SERVER_DEAD_S = 1.0
"""How long a server is silent before others get its channels: longer than servers are down that come back."""

RESTART_S = 0.2
"""How soon a process that has ended by itself is started again, as a supervisor would."""

STATUS_EVERY = 20
"""Once in so many checks of its invariants a balancer says how the cluster is: it leads or not, as the case may be."""


class WatchedBalancer(BalancerMachine):
    """A balancer that operators look at all the time (``dynamoth status``), also while another one leads."""

    _checks = 0
    _now = 0.0

    def handle(self, event: BalancerEvent, now: float) -> list[BalancerAction]:
        """Handle one event; see :class:`BalancerMachine`."""
        self._now = now
        return super().handle(event, now)

    def check(self) -> None:
        """Assert the invariants, and that it can be looked at."""
        super().check()
        self._checks += 1
        if self._checks % STATUS_EVERY == 0:
            self.overview.status(self._now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The parameters in which simulated clusters differ."""

    servers: int = 3
    delays: Delays = DEFAULT_DELAYS
    #: What each server can send: little makes the balancer move channels by itself.
    outgoing_bytes_per_s_max: int = AMPLE_BYTES_PER_S
    #: What the network of each server lets out; more waits in its output buffers. 0: it lets everything out.
    network_bytes_per_s: int = 0
    #: ``outgoing_bytes_per_s_max`` of servers of another size.
    capacities: Mapping[str, int] = field(default_factory=dict[str, int])
    #: The CPU of each server that counts as all of it, in cores.
    cpu_ratio_max: float = 1.0
    #: Whether something fails, so that messages may be lost if subscribers report it.
    losses_allowed: bool = False
    #: How many servers the balancer itself spreads a channel over; 1 leaves it to the administrator.
    replicas_max: int = 1
    #: How often agents report. Rarely, as reports are most of what an idle cluster does.
    report_interval_s: float = 0.4
    #: How many channels a report names.
    channels_per_report_max: int = 1000
    #: How long a channel that the plan names is silent before it returns to its slot.
    silent_s: float = 1000.0
    #: How long a server is silent before others get what it has.
    server_dead_s: float = SERVER_DEAD_S
    #: How many copies for one server a dispatcher keeps; few make it lose some, and say so.
    forwards_max: int = 1000
    #: How many channels and slots the balancer moves in one event, and so how many slots leave a server together.
    changes_per_event_max: int = BalancerOptions().changes_per_event_max
    #: Servers that the balancer drains.
    draining: frozenset[str] = frozenset()
    #: The compatibility rules with which the cluster begins.
    compatibility: tuple[CompatibilityRule, ...] = ()
    #: When servers are added and freed by load; None: never.
    fleet: FleetOptions | None = None


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A setting, and the options of every machine in it."""

    setting: Setting
    client: ClientOptions
    dispatcher: DispatcherOptions
    load_analyzer: LoadAnalyzerOptions
    balancer: BalancerOptions
    #: Each direction of each connection is slower, or quicker, by one of these factors.
    spread: tuple[float, ...] = (1.0,)


def _short_client_options(hold_s_max: float) -> ClientOptions:
    return ClientOptions(
        publisher=PublisherOptions(
            publish_timeout_s=PUBLISH_TIMEOUT_S,
            observers_interval_s=VERSION_READ_INTERVAL_S,
            straggler_s=0.1,
            failover_s=0.2,
            look_elsewhere_s=0.1,
            silent_s=0.2,
            look_again_s=0.2,
        ),
        subscriber=SubscriberOptions(
            hold_s_max=hold_s_max,
            verify_retry_s=0.05,
            distrust_s=1.0,
            failover_s=1.0,
            replace_s=0.05,
            marker_s=0.5,
            look_elsewhere_s=0.1,
            look_elsewhere_again_s=0.2,
            look_again_s=0.1,
            look_again_s_max=0.5,
            link_idle_s=1.0,
        ),
        patterns=PatternOptions(
            hold_s_max=hold_s_max,
            header_interval_s=0.5,
            retry_s=0.05,
            failover_s=1.0,
            join_s=JOIN_S,
            link_idle_s=1.0,
        ),
        entry_idle_s=0.8,
    )


def short_options(setting: Setting, *, hold_s_max: float, spread: tuple[float, ...] = (1.0,)) -> ClusterOptions:
    """Return options with short intervals, so that much happens in a few seconds."""
    return ClusterOptions(
        setting=setting,
        client=_short_client_options(hold_s_max),
        dispatcher=DispatcherOptions(
            transition=TransitionOptions(
                trickle_delay_s=0.05,
                notice_interval_s=0.2,
                settle_after_s=VERSION_READ_INTERVAL_S + 0.15,
                vacated_interval_s=0.2,
            ),
            renotify_s=0.3,
            plan_retry_s=0.1,
            forwarder=ForwarderOptions(forwards_max=setting.forwards_max, heartbeat_delay_s=1.5),
        ),
        load_analyzer=LoadAnalyzerOptions(
            outgoing_bytes_per_s_max=setting.outgoing_bytes_per_s_max,
            report_interval_s=setting.report_interval_s,
            channels_per_report_max=setting.channels_per_report_max,
            discovery_interval_s=2.0,
        ),
        balancer=BalancerOptions(
            wait_s=0.5,
            averaging_s=0.8,
            cpu_ratio_max=setting.cpu_ratio_max,
            reports_min=2,
            decision_interval_s=0.25,
            channel_rest_s=0.5,
            server_dead_s=setting.server_dead_s,
            agent_stale_s=1.5,
            ack_timeout_s=0.2,
            recovery_s=0.5,
            retry_s=0.1,
            verify_interval_s=0.5,
            lease_s=0.9,
            lease_renew_s=0.3,
            move_timeout_s=5.0,
            fold_interval_s=0.5,
            silent_s=setting.silent_s,
            virtual_nodes=VIRTUAL_NODES,
            all_subscribers_ratio_min=20.0,
            all_publishers_ratio_min=0.2,
            replicate_publications_per_s_min=40.0,
            replicate_subscribers_min=8,
            replicate_load_ratio_min=0.3,
            replicas_max=setting.replicas_max,
            replication_rest_s=0.5,
            draining=setting.draining,
            changes_per_event_max=setting.changes_per_event_max,
            join_s=JOIN_S,
            compatibility=setting.compatibility,
            rules_rest_s=RULES_REST_S,
            plain_rest_s=PLAIN_REST_S,
            interruptions_window_s=1.0,
        ),
        spread=spread,
    )


@dataclass(slots=True)
class Moves:
    """Counts the outcomes of the requested changes."""

    asked: int = 0
    settled: int = 0
    #: Reasons of refusals, by how often they were given.
    refused: Counter[str] = field(default_factory=Counter[str])


class Cluster:
    """Builds everything and starts it at time 0; clients are added by the caller."""

    def __init__(self, world: World, options: ClusterOptions) -> None:
        self.world = world
        self.options = options
        self.network = Network(world, self._draw_delays)
        self.audit = Audit(
            losses_allowed=options.setting.losses_allowed,
            publish_s_max=PUBLISH_S_MAX,
            ordered=lambda publisher: not str(publisher).startswith("raw"),
            story=self._story,
        )
        self.servers: dict[str, RedisServer] = {}
        self.agents: dict[str, Process] = {}
        #: Starts and frees servers for the balancers.
        self.provisioner = Provisioner(self)
        #: The servers that it has started.
        self._provisioned: dict[str, None] = {}
        for _ in range(options.setting.servers):
            self._make_server()
        #: The servers that the balancer's configuration names.
        self.configured = list(self.servers)
        #: Servers that were added later.
        self.added: list[str] = []
        #: Servers that are stopped and do not come back.
        self.gone: dict[str, None] = {}
        #: Where clients begin; all of them share it.
        self._seed_urls = [server.url for server in self.servers.values()]
        self.balancer = Process(world, self.network, "balancer", self.make_balancer, self._balancer_acts)
        #: Another balancer, which is not started but by faults.
        self.rival = Process(world, self.network, "rival", self._make_rival, self._rival_acts)
        #: Whether the other balancer waits while this one leads, instead of ending.
        self.rival_stands_by = False
        self.administrator = Process(
            world, self.network, "admin", lambda _: Administrator(self.server_list), self._answered
        )
        self.clients: list[Client] = []
        self.moves = Moves()
        #: What administrators were answered, by the number of the request: None, or why not.
        self.answers: dict[int, str | None] = {}
        #: And the results of requests of scenarios.
        self.results: dict[int, Mapping[str, Any]] = {}
        self._names: dict[int, str] = {}
        #: The latest parsed plan of each server, and its fields: plans are asked for far more often than they change.
        self._parsed: dict[str, tuple[dict[bytes, bytes], Plan | None]] = {}

    @property
    def server_list(self) -> list[Server]:
        """The servers, as a plan lists them."""
        return [Server(server.id, server.url) for id_, server in self.servers.items() if id_ not in self._provisioned]

    @property
    def configuration(self) -> list[Server]:
        """The servers of the balancer's configuration."""
        return [server for server in self.server_list if server.id in self.configured]

    def _draw_delays(self, process: str, server: str) -> Delays:
        delays, factor = self.options.setting.delays, self.world.random.choice(self.options.spread)
        return replace(delays, base_s=delays.base_s * factor, jitter_s=delays.jitter_s * factor)

    # The machines. Scenarios put others in their place.

    def make_agent(self, server: str, incarnation: int) -> Machine[Any, Any]:
        """Make the machine of an agent."""
        options = self.options
        capacity = options.setting.capacities.get(server, options.setting.outgoing_bytes_per_s_max)
        load_analyzer = replace(options.load_analyzer, outgoing_bytes_per_s_max=capacity)
        return AgentMachine(server, incarnation, options.dispatcher, load_analyzer, self.servers[server].url)

    def make_balancer(self, incarnation: int) -> Machine[Any, Any]:
        """Make the machine of the balancer."""
        return WatchedBalancer(self.configuration, incarnation, self.options.balancer, self.options.setting.fleet)

    def _make_rival(self, incarnation: int) -> Machine[Any, Any]:
        options = replace(self.options.balancer, standby=self.rival_stands_by)
        return WatchedBalancer(self.configuration, incarnation, options, self.options.setting.fleet)

    def is_observed(self, url: str) -> bool:
        """Tell whether somebody observes the server at a URL: its agent, unless it was lost lately."""
        return any(server.observed for server in self.servers.values() if server.url == url)

    def _agent(self, server: str, name: str = "") -> Process:
        def acts(action: Any) -> None:
            if type(action) is not AlreadyRunning:
                return
            if process is self.agents[server]:
                self._restart(process, action.reason)
            else:
                process.crash(f"ends by itself: {action.reason}")

        process = Process(
            self.world,
            self.network,
            name or f"agent-{server}",
            lambda incarnation: self.make_agent(server, incarnation),
            acts,
        )
        return process

    def replace_agent(self, server: str) -> Process:
        """Start another agent of a server, and return the earlier one, which nobody starts again when it ends."""
        earlier = self.agents[server]
        self.agents[server] = self._agent(server, f"{earlier.name}-again")
        self.agents[server].start()
        return earlier

    def _rival_acts(self, action: Any) -> None:
        match action:
            case Stopped(error):
                self.rival.crash(f"ends by itself: {error}")
            case StartServer() | FreeServer() | ListServers():
                self.provisioner.request(self.rival, action)
            case _:
                pass

    def _balancer_acts(self, action: Any) -> None:
        match action:
            case Stopped(error):
                self._restart(self.balancer, str(error))
            case Note(level, message, details) if level in ("warning", "error"):
                self.world.trace.add(
                    (self.world.now, "says", "balancer", None, None, None, f"{message}: {dict(details)}")
                )
            case PlanChanged(plan, _):
                self.world.trace.add((self.world.now, "moves", "balancer", None, None, None, plan))
            case Decided(decision):
                self.world.trace.add((self.world.now, "decides", "balancer", None, None, None, decision))
            case StartServer() | FreeServer() | ListServers():
                self.world.trace.add((self.world.now, "asks", "balancer", None, None, None, action))
                self.provisioner.request(self.balancer, action)
            case _:
                pass

    def _restart(self, process: Process, reason: str) -> None:
        """Start a process again that has ended by itself, as a supervisor does."""
        process.crash(f"ends by itself: {reason}")
        self.world.after(RESTART_S, lambda: None if process.alive else process.start())

    # Life.

    def _make_server(self, id_: str | None = None) -> str:
        id_ = id_ or f"s{len(self.servers) - len(self._provisioned) + 1}"
        server = self.servers[id_] = RedisServer(self.world, id_, f"redis://{id_}:6379")
        if self.options.setting.network_bytes_per_s:
            server.limit(self.options.setting.network_bytes_per_s)
        self.network.add_server(server.url, server)
        self.agents[id_] = self._agent(id_)
        return id_

    def add_server(self) -> str:
        """Start another server and its agent. :meth:`change_server` adds it to the plan."""
        id_ = self._make_server()
        self.added.append(id_)
        self.agents[id_].start()
        return id_

    def provision(self, id_: str, *, is_up: bool, has_agent: bool) -> None:
        """Start a server and its agent for the provisioner, or only one of them, or none."""
        self._provisioned[id_] = None
        self._make_server(id_)
        if not is_up:
            self.servers[id_].stop("it has never run")
        elif has_agent:
            self.agents[id_].start()

    def start_what_is_missing(self, id_: str, *, has_agent: bool) -> None:
        """Start a server that does not run again, and its agent, if that is to run and does not."""
        if not self.servers[id_].up:
            self.servers[id_].start()
        if has_agent and not self.agents[id_].alive:
            self.agents[id_].start()

    def stop_for_good(self, server: str, *, orderly: bool) -> None:
        """Stop a server and its agent, at once or as an operator does; neither comes back, and nobody begins there."""
        self.gone[server] = None
        model, agent = self.servers[server], self.agents[server]
        if model.url in self._seed_urls:
            self._seed_urls.remove(model.url)
        if model.up:
            model.stop("the server stops for good", orderly=orderly)
        if agent.alive:
            agent.crash("stops for good")

    def start(self) -> None:
        """Start agents, balancer and administrator."""
        for agent in self.agents.values():
            agent.start()
        self.balancer.start()
        self.administrator.start()

    def add_client(self, name: str, subscribers: int = 1, pattern_subscribers: int = 0) -> Client:
        """Add a client; the caller starts it."""
        urls, numbers = self._seed_urls, (subscribers, pattern_subscribers)
        client = Client(self.world, self.network, self.audit, name, urls, self.options.client, self._names, *numbers)
        self.clients.append(client)
        return client

    def begin_at(self, server: str) -> None:
        """Make this server the only one from which clients find the cluster, from now on."""
        self._seed_urls[:] = [self.servers[server].url]

    def change_server(self, action: str, server: str) -> int:
        """Ask the balancer to add, drain or remove a server; return the number of the request."""
        where = {"url": self.servers[server].url} if action == "add" else {}
        return self._ask("server", {"action": action, "server": server, **where})

    def is_done(self, request: int) -> bool:
        """Return whether a request was carried out."""
        return self.answers.get(request, "") is None

    def restart_balancer(self) -> None:
        """Restart the balancer, if it is alive."""
        if self.balancer.alive:
            self.balancer.crash()
            self.balancer.start()

    def change(self, channel: bytes, assignment: Assignment) -> None:
        """Ask the balancer for another assignment of a channel; one that it cannot begin now is refused."""
        servers = list(assignment.servers)
        if assignment.mode is not Mode.SINGLE:
            mode = assignment.mode.name.lower().replace("_", "-")
            self._ask("replicate", {"channel": channel, "mode": mode, "servers": servers})
        elif self._is_replicated(channel):
            self._ask("unreplicate", {"channel": channel, "to": servers[0]})
        else:
            self._ask("move", {"channel": channel, "to": servers[0]})

    def change_rules(self, action: str, pattern: bytes, server: str | None = None) -> int:
        """Ask the balancer for other compatibility rules; return the number of the request."""
        where = {} if server is None else {"server": server, "plain": True}
        return self._ask("compatibility", {"action": action, "pattern": pattern, **where})

    def ask(self, command: str, arguments: Mapping[str, Any]) -> int:
        """Ask the balancer for something else; return the number of the request. ``results`` will have the result."""
        request = self._ask(command, dict(arguments))
        self.results[request] = {}
        return request

    def _is_replicated(self, channel: bytes) -> bool:
        newest = self.newest_plan()
        return newest is not None and newest.entry(channel).route.assignment.mode is not Mode.SINGLE

    def _ask(self, command: str, arguments: dict[str, Any]) -> int:
        self.moves.asked += 1
        request = self.world.random.getrandbits(63)
        self.administrator.handle(Ask(request, command, arguments))
        return request

    def _answered(self, action: Any) -> None:
        assert type(action) is Answered, f"not an action of an administrator: {action!r}"
        self.answers[action.request] = action.error
        if action.request in self.results:
            self.results[action.request] = action.result
        if action.error is None:
            self.moves.settled += 1
        else:
            self.moves.refused[action.error] += 1

    # Views from outside, which no process has.

    def stored_plan(self, server: str) -> Plan | None:
        """Return the plan stored at a server, believed or not."""
        fields = self.servers[server].hash(PLAN_KEY)
        known, plan = self._parsed.get(server, (None, None))
        if fields != known:
            plan = stored_plan.parse_whole(fields, None)
            self._parsed[server] = dict(fields), plan
        return plan

    @property
    def present(self) -> list[str]:
        """The servers that are there, or come back; of those that a provisioner has started, those of the plan."""
        there = [id_ for id_ in self.servers if id_ not in self.gone]
        if not self._provisioned:
            return there
        plan = self._newest_plan(there)
        listed = () if plan is None else plan.servers
        return [id_ for id_ in there if id_ not in self._provisioned or id_ in listed]

    def newest_plan(self) -> Plan | None:
        """Return the newest plan that any present server stores."""
        return self._newest_plan(id_ for id_ in self.servers if id_ not in self.gone)

    def _newest_plan(self, servers: Iterable[str]) -> Plan | None:
        plans = [plan for id_ in servers if (plan := self.stored_plan(id_)) is not None]
        return max(plans, key=lambda plan: plan.version, default=None)

    def left_at(self, server: str) -> int | None:
        """Return what the balancer says is left at a server that is being drained; None where it does not know."""
        balancer = self.balancer.machine
        if not isinstance(balancer, BalancerMachine):
            return None
        channels, slots = balancer.overview.channels_left(server, self.world.now), balancer.overview.slots_left(server)
        return None if channels is None or slots is None else channels + slots

    def unsettled(self) -> list[str]:
        """Return, in words, what has not come to rest; nothing when all has."""
        plans = {id_: self.stored_plan(id_) for id_ in self.present}
        problems = [f"{id_} is down" for id_ in self.present if not self.servers[id_].up]
        problems += [f"{id_} stores no plan" for id_, plan in plans.items() if plan is None]
        versions = {id_: plan.version for id_, plan in plans.items() if plan is not None}
        if len(set(versions.values())) > 1:
            problems.append(f"the servers store different versions of the plan: {versions}")
        problems += [
            f"{channel.decode()} is in transition at {id_} since epoch {entry.route.epoch}"
            for id_, plan in plans.items()
            if plan is not None
            for channel, entry in plan.entries.items()
            if entry.phase is not Phase.SETTLED
        ]
        newest = self.newest_plan() if self.gone else None
        if newest is not None and (left := newest.servers_in_use & self.gone.keys()):
            problems.append(f"channels are left at {', '.join(sorted(left))}, which do not come back")
        administrator = self.administrator.machine
        assert isinstance(administrator, Administrator)
        problems += [
            f"{ask}, asked for {times} times, is not answered" for ask, times in administrator.unanswered.values()
        ]
        return problems

    def settled(self) -> bool:
        """Tell whether everything has come to rest."""
        return not self.unsettled()

    def _story(self, violation: Violation) -> list[str]:
        if violation.channel is None:
            return []
        payload = None
        if violation.publisher is not None and violation.number is not None:
            payload = b"%s:%d." % (str(violation.publisher).encode(), violation.number)
        names = [str(name) for name in (violation.publisher, violation.subscriber) if name is not None]
        people = [name.partition(PATTERN_MARK)[0] for name in names]
        return self.world.trace.story(violation.channel, payload, people)
