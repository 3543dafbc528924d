"""A cluster in memory for tests of the balancer: servers that keep keys, agents that acknowledge, time that is told.

Nothing happens by itself: ``run`` delivers what was sent, in the order of each link, and lets time pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from dynamoth.errors import MalformedMessage, PlanError
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
)
from dynamoth.names import (
    AGENT_CHANNEL,
    BALANCER_CHANNEL,
    BALANCER_LEASE_KEY,
    OPERATOR_CHANNEL,
    PLAN_KEY,
    operator_inbox,
)
from dynamoth.plan.plan import Entry, Mode, Phase, Plan, Route, Server
from dynamoth.protocol.control import (
    AdminReply,
    AdminRequest,
    PlanAck,
    PlanChange,
    PlanQuery,
    Vacated,
    pack_control,
    unpack_control,
)
from dynamoth.protocol.reports import ChannelColumns, Report, pack_report
from dynamoth.protocol.stored_plan import parse_whole, write_whole
from dynamoth_balancer.events import Decided, Note, PlanChanged, Stopped
from dynamoth_balancer.machine import BalancerMachine, Stage
from dynamoth_balancer.options import BalancerOptions

CAPACITY = 1_000_000
REPORT_INTERVAL_S = 0.5

_incarnations = count(1000)


@dataclass
class FakeServer:
    """One Redis process."""

    id: str
    up: bool = True
    run_id: str = "run-1"
    keys: dict[bytes, Any] = field(default_factory=dict[bytes, Any])
    expiries: dict[bytes, float] = field(default_factory=dict[bytes, float])
    #: Asked for each command: an error that the server answers with instead of executing it.
    refuse: Callable[[tuple[Any, ...]], str | None] = lambda args: None
    #: Asked for each message to agent or balancer: whether it gets lost.
    lose: Callable[[Any], bool] = lambda message: False
    #: What administrators were answered.
    replies: list[AdminReply] = field(default_factory=list[AdminReply])
    #: How many balancers are connected.
    balancers: int = 1
    #: How many connections listen as its agent.
    agents: int = 1
    #: Commands executed, in order.
    executed: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    #: What somebody else than a balancer has put there; what is written over that may go back.
    forged: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        try:
            return parse_whole(self.keys.get(PLAN_KEY, {}), self.run_id)
        except (MalformedMessage, TypeError):  # no plan, or no hash at all
            return None

    def plan_or_fail(self) -> Plan:
        plan = self.plan
        assert plan is not None, f"{self.id} stores no plan"
        return plan

    def execute(self, args: tuple[Any, ...], now: float) -> Any:
        self.executed.append(args)
        if (refusal := self.refuse(args)) is not None:
            return ErrorReply(refusal)
        for key in [key for key, at in self.expiries.items() if at <= now]:
            del self.expiries[key]
            self.keys.pop(key, None)
        if args[0] in (b"HMGET", b"HGETALL", b"HLEN", b"HSET") and not isinstance(self.keys.get(args[1], {}), dict):
            return ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
        if args[0] == b"GET" and not isinstance(self.keys.get(args[1], b""), bytes):
            return ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
        words: list[Any] = [*args]
        match words:
            case [b"SET", key, value, b"NX", b"PX", ms]:
                if key in self.keys:
                    return None
                self.keys[key] = value
                self.expiries[key] = now + ms / 1000
                return b"OK"
            case [b"GET", key]:
                return self.keys.get(key)
            case [b"PEXPIRE", key, ms]:
                if key in self.keys:
                    self.expiries[key] = now + ms / 1000
                return int(key in self.keys)
            case [b"PUBSUB", b"NUMSUB", channel]:
                return [channel, self.agents if channel == AGENT_CHANNEL else self.balancers]
            case [b"DEL", key]:
                self.expiries.pop(key, None)
                return int(self.keys.pop(key, None) is not None)
            case [b"HMGET", key, *names]:
                return [self.keys.get(key, {}).get(name) for name in names]
            case [b"HGETALL", key]:
                return dict(self.keys.get(key, {}))
            case [b"HLEN", key]:
                return len(self.keys.get(key, {}))
            case [b"HSET", key, *pairs]:
                stored = self.keys.setdefault(key, {})
                fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
                new = sum(name not in stored for name in fields)
                stored.update(fields)
                return new
            case [b"RENAME", key, new_key]:
                if key not in self.keys:
                    return ErrorReply("ERR no such key")
                self.keys[new_key] = self.keys.pop(key)
                return b"OK"
            case _:
                raise AssertionError(f"the fake server does not know {args!r:.100}")


@dataclass(frozen=True)
class Traffic:
    """What is true of a channel, wherever it is."""

    publications_per_s: float
    subscribers: int
    publishers: int = 40
    message_bytes: float = 100

    @property
    def outgoing_bytes_per_s(self) -> float:
        return self.publications_per_s * self.subscribers * self.message_bytes

    def seen_at(self, server: str, route: Route) -> Row:
        """Return what the agent of a server of a route counts of it in a second."""
        mode, servers = route.assignment.mode, route.assignment.servers
        publishers, subscribers = self.publishers, self.subscribers
        index = servers.index(server)
        if mode is Mode.ALL_SUBSCRIBERS:
            publishers = sum((number ^ route.epoch) % len(servers) == index for number in range(publishers))
        if mode is Mode.ALL_PUBLISHERS:
            subscribers = sum((number ^ route.epoch) % len(servers) == index for number in range(subscribers))
        publications = self.publications_per_s * publishers / self.publishers if self.publishers else 0.0
        return Row(publications, publishers, subscribers, publications * subscribers * self.message_bytes)


@dataclass(frozen=True)
class Row:
    """What an agent counts of a channel in a second."""

    publications: float = 0.0
    publishers: int = 0
    subscribers: int = 0
    bytes_out: float = 0.0

    def __add__(self, other: Row) -> Row:
        return Row(
            self.publications + other.publications,
            self.publishers + other.publishers,
            self.subscribers + other.subscribers,
            self.bytes_out + other.bytes_out,
        )


def columns(rows: Mapping[bytes, Row], interval_s: float) -> ChannelColumns:
    """Return rows as a report has them."""
    names = sorted(rows, key=lambda name: (-rows[name].bytes_out, name))
    zeros, nobody = (0,) * len(names), (b"",) * len(names)
    return ChannelColumns(
        channels=tuple(names),
        publications=tuple(round(rows[name].publications * interval_s) for name in names),
        publishers=tuple(rows[name].publishers for name in names),
        subscribers=tuple(rows[name].subscribers for name in names),
        messages_sent=zeros,
        bytes_in=zeros,
        bytes_out=tuple(round(rows[name].bytes_out * interval_s) for name in names),
        publisher_ids=nobody,
        subscriber_ids=nobody,
    )


@dataclass
class FakeAgent:
    """The agent of one server, as the balancer sees it."""

    server: FakeServer
    incarnation: int = field(default_factory=lambda: next(_incarnations))
    alive: bool = True
    #: How many connections listen as this agent: that of a process that hangs is there, too.
    listeners: int = 1
    #: A mute one acts on plans, and says nothing.
    mute: bool = False
    plan: Plan | None = None
    #: What each channel makes the server send, bytes/s.
    loads: dict[bytes, int] = field(default_factory=dict[bytes, int])
    #: What it counts of other channels.
    rows: dict[bytes, Row] = field(default_factory=dict[bytes, Row])
    #: Channels whose subscribers have not left their old location here.
    listened: set[bytes] = field(default_factory=set[bytes])
    reports: bool = True
    reports_version: bool = False
    sequence: int = 0

    def restart(self) -> None:
        self.incarnation = next(_incarnations)
        self.plan = None
        self.alive = True

    def told(self, data: bytes) -> list[bytes]:
        message = unpack_control(data)
        match message:
            case PlanChange(delta):
                if self.plan is None or delta.base != self.plan.version:
                    if self.plan is None or delta.version > self.plan.version:
                        self.plan = self.server.plan
                else:
                    try:
                        self.plan = self.plan.apply(delta)
                    except PlanError:
                        self.plan = self.server.plan
            case PlanQuery(version):
                if self.plan is None or self.plan.version < version:
                    self.plan = self.server.plan
            case _:
                raise AssertionError(f"an agent is not told {message}")
        return [] if self.plan is None else [self.ack()]

    def ack(self) -> bytes:
        assert self.plan is not None
        return pack_control(PlanAck(self.server.id, self.incarnation, self.plan.version))

    def vacated(self) -> Vacated:
        entries: Mapping[bytes, Entry] = {} if self.plan is None else self.plan.entries
        vacated = tuple(
            (channel, entry.route.epoch)
            for channel, entry in entries.items()
            if entry.phase is Phase.ACTIVE and channel not in self.listened and self.server.id in _old(entry)
        )
        return Vacated(self.server.id, vacated, self.incarnation)

    def report(self) -> Report:
        self.sequence += 1
        rows = {**self.rows, **{channel: Row(bytes_out=load) for channel, load in self.loads.items()}}
        return Report(
            server=self.server.id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            interval_s=REPORT_INTERVAL_S,
            plan_version=self.plan.version if self.reports_version and self.plan is not None else None,
            outgoing_bytes_per_s_max=CAPACITY,
            outgoing_bytes_per_s=sum(row.bytes_out for row in rows.values()),
            columns=columns(rows, REPORT_INTERVAL_S),
        )


def _old(entry: Entry) -> set[str]:
    return {server for route in entry.previous for server in route.assignment.servers}


def stored_hash(plan: Plan, run_id: str) -> dict[Any, Any]:
    """Return the hash that holds a plan, as another balancer has left it."""
    parts = [command[2:] for command in write_whole(plan, run_id) if command[0] == b"HSET"]
    return {name: value for part in parts for name, value in zip(part[::2], part[1::2], strict=True)}


@dataclass
class Balancer:
    """A balancer process: its machine and its links."""

    machine: BalancerMachine
    links: set[str] = field(default_factory=set[str])
    asked: set[str] = field(default_factory=set[str])
    hears: set[str] = field(default_factory=set[str])
    own: list[Any] = field(default_factory=list[Any])
    frozen: bool = False
    #: Servers whose replies do not reach it.
    deaf: set[str] = field(default_factory=set[str])

    def taken(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.own if isinstance(action, kind)]

    @property
    def notes(self) -> list[Note]:
        return self.taken(Note)

    @property
    def decided(self) -> list[Decided]:
        return self.taken(Decided)

    @property
    def stopped(self) -> Stopped | None:
        return next(iter(self.taken(Stopped)), None)

    @property
    def plan(self) -> Plan:
        assert self.machine.plan is not None
        return self.machine.plan

    def plans(self) -> list[Plan]:
        return [action.plan for action in self.taken(PlanChanged)]


class FakeCluster:
    """Servers ``s1`` ... with an agent each, and the balancers that tests start."""

    def __init__(self, servers: int = 2, now: float = 100.0) -> None:
        self.now = now
        self.servers = {f"s{number}": FakeServer(f"s{number}") for number in range(1, servers + 1)}
        self.agents = {id_: FakeAgent(server) for id_, server in self.servers.items()}
        self.balancers: list[Balancer] = []
        #: (balancer, event) in the order in which they happen.
        self._events: deque[tuple[Balancer, Any]] = deque()
        self._agents_at = now
        #: Channels whose load follows them to where the agents of the new servers have settled them.
        self.follow: dict[bytes, int] = {}
        #: What is true of other channels; it follows them in the same way.
        self.traffic: dict[bytes, Traffic] = {}
        self._followed: Plan | None = None

    def configured(self, ids: Iterable[str] | None = None) -> list[Server]:
        return [Server(id_, f"redis://{id_}") for id_ in (self.servers if ids is None else ids)]

    def start(
        self,
        options: BalancerOptions | None = None,
        servers: Iterable[str] | None = None,
        incarnation: int | None = None,
    ) -> Balancer:
        machine = BalancerMachine(
            self.configured(servers), next(_incarnations) if incarnation is None else incarnation, options
        )
        balancer = Balancer(machine)
        self.balancers.append(balancer)
        self.handle(balancer, Start())
        return balancer

    def kill(self, balancer: Balancer) -> None:
        """As SIGKILL does."""
        self.balancers.remove(balancer)
        self._events = deque(item for item in self._events if item[0] is not balancer)

    def started(self, options: BalancerOptions | None = None) -> Balancer:
        """Start a balancer and wait until it leads, every server stores its plan, and all agents have acknowledged."""
        balancer = self.start(options)
        self.run_until(lambda: balancer.machine.stage is Stage.LEADING and self.is_quiet(balancer))
        return balancer

    def is_quiet(self, balancer: Balancer) -> bool:
        version = balancer.plan.version
        stored = [server.plan for server in self.servers.values() if server.up]
        agents = [agent for agent in self.agents.values() if agent.alive and agent.server.up and not agent.mute]
        return (
            all(plan is not None and plan.version == version for plan in stored)
            and all(agent.plan is not None and agent.plan.version == version for agent in agents)
            and all(entry.phase is Phase.SETTLED for entry in balancer.plan.entries.values())
        )

    # What happens.

    def stop_server(self, id_: str) -> None:
        self.servers[id_].up = False
        for balancer in self.balancers:
            self._cut(balancer, id_)

    def start_server(self, id_: str, *, keys: Mapping[bytes, Any] | None = None) -> None:
        """Start a new process, with an empty memory or what its disk has kept."""
        server = self.servers[id_]
        server.up = True
        server.run_id += "+"
        server.keys = dict(keys or {})
        server.expiries = {}
        self.agents[id_].plan = None
        for balancer in self.balancers:
            self.reconnect(balancer, id_)

    def cut(self, balancer: Balancer, id_: str) -> None:
        """Break the connection of a balancer; it does not come back until ``reconnect``."""
        self._cut(balancer, id_)

    def _cut(self, balancer: Balancer, id_: str) -> None:
        if id_ in balancer.links:
            balancer.links.remove(id_)
            balancer.hears.discard(id_)
            self._events = deque(
                item for item in self._events if item[0] is not balancer or getattr(item[1], "link", None) != id_
            )
            self._events.append((balancer, LinkDown(id_, "connection lost")))

    def reconnect(self, balancer: Balancer, id_: str) -> None:
        if id_ in balancer.asked and id_ not in balancer.links and self.servers[id_].up:
            balancer.links.add(id_)
            self._events.append((balancer, LinkUp(id_, self.servers[id_].run_id)))

    def admin(self, server: str, command: str, arguments: Mapping[str, Any] | None = None, request: int = 7) -> None:
        self.publish(
            self.servers[server], OPERATOR_CHANNEL, pack_control(AdminRequest(request, command, arguments or {}))
        )

    def ask(self, command: str, arguments: Mapping[str, Any] | None = None, server: str = "s1") -> AdminReply:
        request = next(_incarnations)
        self.admin(server, command, arguments, request)
        self.run_until(lambda: any(reply.request == request for reply in self.servers[server].replies))
        return next(reply for reply in self.servers[server].replies if reply.request == request)

    def refused_by(self, balancer: Balancer, command: str, arguments: Mapping[str, Any]) -> str:
        """Ask one of several balancers, and return why it refuses."""
        request = AdminRequest(next(_incarnations), command, arguments)
        for action in balancer.machine.handle(
            Pushed("s1", [[b"message", OPERATOR_CHANNEL, pack_control(request)]]), self.now
        ):
            if isinstance(action, Send) and action.args[1] == operator_inbox(request.request):
                assert isinstance(action.args[2], bytes)
                reply = unpack_control(action.args[2])
                assert isinstance(reply, AdminReply) and reply.error is not None
                return reply.error
        raise AssertionError("not answered")

    def publish(self, server: FakeServer, channel: bytes, data: bytes) -> int:
        receivers = 0
        if channel in (BALANCER_CHANNEL, OPERATOR_CHANNEL):
            for balancer in self.balancers:
                if server.id in balancer.hears:
                    receivers += 1
                    self._events.append((balancer, Pushed(server.id, [[b"message", channel, data]])))
        return receivers

    def say(self, server: str, message: Any) -> None:
        """Publish a control message, or bytes, on the balancer's channel at a server."""
        data = message if isinstance(message, bytes) else pack_control(message)
        self.publish(self.servers[server], BALANCER_CHANNEL, data)

    # Time.

    def run(self, duration_s: float = 0.0) -> None:
        """Deliver everything, and let time pass."""
        end = self.now + duration_s
        self._deliver()
        while (next_at := self._next_at()) <= end:
            self.now = max(self.now, next_at)
            if self._agents_at <= self.now:
                self._agents_at = self.now + REPORT_INTERVAL_S
                self._agents_say()
            for balancer in list(self.balancers):
                deadline = None if balancer.frozen else balancer.machine.deadline()
                if deadline is not None and deadline <= self.now:
                    self.handle(balancer, Tick())
            self._deliver()
        self.now = end

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Let time pass until ``condition`` holds. Fails when it does not within ``timeout_s``."""
        end = self.now + timeout_s
        self._deliver()
        while not condition():
            assert self.now < end, f"not within {timeout_s} s"
            self.run(max(0.0, min(self._next_at(), end) - self.now))

    def _next_at(self) -> float:
        deadlines = [balancer.machine.deadline() for balancer in self.balancers if not balancer.frozen]
        return min([self._agents_at, *(deadline for deadline in deadlines if deadline is not None)])

    def _deliver(self) -> None:
        for _ in range(100_000):
            if not self._events:
                return
            balancer, event = self._events.popleft()
            if balancer.frozen:
                self._events.append((balancer, event))
                if all(other.frozen for other, _ in self._events):
                    return
                continue
            self.handle(balancer, event)
        raise AssertionError("the machines never come to rest")

    def _agents_say(self) -> None:
        for agent in self.agents.values():
            if agent.alive and agent.server.up and not agent.mute:
                self._follow(agent)
                if agent.reports:
                    self.publish(agent.server, BALANCER_CHANNEL, pack_report(agent.report()))
                vacated = agent.vacated()
                if vacated.channels and not agent.server.lose(vacated):
                    self.publish(agent.server, BALANCER_CHANNEL, pack_control(vacated))

    def _follow(self, agent: FakeAgent) -> None:
        """Let the load of ``follow`` be where the plan has it; in transition it is at both servers, by forwarding."""
        plans = [balancer.machine.plan for balancer in self.balancers]
        self._followed = next((plan for plan in reversed(plans) if plan is not None), self._followed)
        for channel, load in self.follow.items():
            assert self._followed is not None
            entry = self._followed.entry(channel)
            here = {server for route in entry.live_routes for server in route.assignment.servers}
            agent.loads.pop(channel, None)
            if agent.server.id in here:
                agent.loads[channel] = load
        agent.rows.clear()
        for channel, traffic in self.traffic.items():
            assert self._followed is not None
            for route in self._followed.entry(channel).live_routes:
                if agent.server.id in route.assignment.servers:
                    row = agent.rows.get(channel, Row())
                    agent.rows[channel] = row + traffic.seen_at(agent.server.id, route)

    # Actions.

    def handle(self, balancer: Balancer, event: Any) -> None:
        """Tell a balancer of an event, and carry out what it wants."""
        for action in balancer.machine.handle(event, self.now):
            match action:
                case Connect(link, _):
                    balancer.asked.add(link)
                    self.reconnect(balancer, link)
                case Send(link, args, tag):
                    if link in balancer.links:
                        self._send(balancer, link, tuple(args), tag)
                case Disconnect(link):
                    self._cut(balancer, link)
                case _:
                    balancer.own.append(action)

    def _send(self, balancer: Balancer, link: str, args: tuple[Any, ...], tag: Any) -> None:
        server = self.servers[link]
        if args[0] == b"SUBSCRIBE":
            refusal = server.refuse(args)
            if refusal is not None:
                self._events.append((balancer, Replied(link, tag, ErrorReply(refusal))))
            else:
                balancer.hears.add(link)
                self._events.append((balancer, Pushed(link, [[b"subscribe", args[1], 1]])))
            return
        if args[0] == b"PUBLISH":
            self._published(server, args[1], args[2])
            return
        before = server.plan
        server.balancers = sum(link in each.hears for each in self.balancers if each.stopped is None)
        server.agents = self.agents[link].listeners
        value = server.execute(args, self.now)
        if args[0] in (b"HSET", b"RENAME") and server.plan is not None and before not in (None, server.forged):
            self._check_phases(before, server.plan)
        if tag is not None and link not in balancer.deaf:
            self._events.append((balancer, Replied(link, tag, value)))

    def _published(self, server: FakeServer, channel: bytes, data: bytes) -> None:
        if channel == AGENT_CHANNEL:
            agent = self.agents[server.id]
            if agent.alive and not server.lose(unpack_control(data)):
                answers = agent.told(data)
                for answer in [] if agent.mute else answers:
                    if not server.lose(unpack_control(answer)):
                        self.publish(server, BALANCER_CHANNEL, answer)
            return
        reply = unpack_control(data)
        assert isinstance(reply, AdminReply) and channel == operator_inbox(reply.request)
        server.replies.append(reply)

    def _check_phases(self, before: Plan, after: Plan) -> None:
        """Check what must be true of every change that a server stores, in every test."""
        for channel, entry in after.entries.items():
            old = before.entries.get(channel)
            if old is None or old == entry:
                continue
            assert entry.newer_than(old), f"{channel!r} goes back from {old} to {entry}"
            if old.phase is Phase.PREPARED and entry.route == old.route:
                for id_ in {server for route in entry.live_routes for server in route.assignment.servers}:
                    plan = self.agents[id_].plan
                    assert not self.agents[id_].alive or (plan is not None and channel in plan.entries), (
                        f"{channel!r} was activated before the agent of {id_} knew of it"
                    )
            if entry.phase is Phase.SETTLED:
                for id_ in _old(old):
                    assert channel not in self.agents[id_].listened, f"{channel!r} settled with subscribers at {id_}"

    def lease_holders(self) -> list[bytes | None]:
        return [server.keys.get(BALANCER_LEASE_KEY) for server in self.servers.values()]
