"""A balancer in the simulated world: Redis servers, an agent with a script for each, and the balancers of a test.

Messages take no time, so that ``run()`` delivers everything; ``run(duration_s)`` lets virtual time pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count, islice
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.names import (
    BALANCER_CHANNEL,
    BALANCER_LEASE_KEY,
    OPERATOR_CHANNEL,
    OPERATOR_INBOX_PREFIX,
    PLAN_KEY,
    RECORD_CHANNEL,
)
from dynamoth.plan.plan import Phase, Plan, Server
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control, unpack_control
from dynamoth.protocol.records import RecordedRows, unpack_rows
from dynamoth.protocol.stored_plan import parse_whole, write_whole
from dynamoth_balancer.events import Decided, Note, PlanChanged, Stopped
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions
from dynamoth_sim.world.network import Delays, Network
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.redis import RedisServer, Refusal
from dynamoth_sim.world.redis_keys import Snapshot
from dynamoth_sim.world.world import World
from tests.balancer.scripted_agent import ScriptedAgent, old_servers
from tests.balancer.traffic import Row, Traffic

BALANCER = "balancer"
POLL_S = 0.02

NO_DECISIONS = BalancerOptions(load_ratio_high=1000.0)
"""The balancer moves nothing by itself."""

_numbers = count(1000)


def refusing(error: str, *commands: bytes) -> Refusal:
    """Return a refusal of some commands of balancers, for ``RedisServer.refuse``."""
    return lambda process, words: error if process.startswith(BALANCER) and words[0] in commands else None


def stored_hash(plan: Plan, run_id: str) -> dict[Any, Any]:
    """Return the hash that stores a plan, as another balancer has left it."""
    parts = [command[2:] for command in write_whole(plan, run_id) if command[0] == b"HSET"]
    return {name: value for part in parts for name, value in zip(part[::2], part[1::2], strict=True)}


class StoringServer(RedisServer):
    """A simulated Redis server that records what balancers do with its keys, and what administrators are answered."""

    def __init__(self, world: World, id_: str, url: str, check: Callable[[Plan, Plan], None]) -> None:
        super().__init__(world, id_, url)
        self._check = check
        #: Commands of balancers that were executed, in order.
        self.executed: list[tuple[bytes, ...]] = []
        self.replies: list[AdminReply] = []
        #: What balancers have sent to recorders.
        self.records: list[RecordedRows] = []
        #: The plan that a test has put there: a balancer may replace it by an older one.
        self._forged: Plan | None = None
        #: What the latest plan was parsed from, and that plan: parsing a large one takes long.
        self._parsed: tuple[tuple[str, dict[bytes, bytes]], Plan | None] = (("", {}), None)
        self.meddle = self._delivered

    def _delivered(self, _server: str, channel: bytes, data: bytes) -> int:
        if channel.startswith(OPERATOR_INBOX_PREFIX):
            reply = unpack_control(data)
            assert isinstance(reply, AdminReply)
            self.replies.append(reply)
        elif channel == RECORD_CHANNEL:
            self.records.append(unpack_rows(data))
        return 1

    def execute(self, who: str, *words: bytes) -> Any:
        if not who.startswith(BALANCER):
            return super().execute(who, *words)
        self.executed.append(words)
        before = self.plan if words[0] in (b"HSET", b"RENAME") else None
        reply = super().execute(who, *words)
        if before is not None and before != self._forged and (after := self.plan) is not None:
            self._check(before, after)
        return reply

    @property
    def plan(self) -> Plan | None:
        """The plan that it stores; None where there is none, or where it cannot be read."""
        source = (self.run_id, self.hash(PLAN_KEY))
        if source != self._parsed[0]:
            try:
                plan = parse_whole(source[1], self.run_id)
            except MalformedMessage:
                plan = None
            self._parsed = ((self.run_id, dict(source[1])), plan)
        return self._parsed[1]

    def plan_or_fail(self) -> Plan:
        plan = self.plan
        assert plan is not None, f"{self.id} stores no plan"
        return plan

    def put(self, key: bytes, value: Mapping[bytes, bytes] | bytes, *, keep: bool = False) -> None:
        """Write a key, as somebody else than a balancer; ``keep``: other fields of the hash stay."""
        if not keep:
            self.execute("test", b"DEL", key)
        if isinstance(value, bytes):
            self.execute("test", b"SET", key, value)
        else:
            self.execute("test", b"HSET", key, *(part for pair in value.items() for part in pair))
        self._forged = self.plan

    def put_plan(self, plan: Plan, run_id: str | None = None) -> None:
        self.put(PLAN_KEY, stored_hash(plan, self.run_id if run_id is None else run_id))

    def delete(self, key: bytes) -> None:
        self.execute("test", b"DEL", key)


class Balancer:
    """A balancer process, and what it has said."""

    def __init__(self, cluster: SimCluster, servers: list[Server], options: BalancerOptions | None) -> None:
        self.machine: BalancerMachine

        def make(incarnation: int) -> BalancerMachine:
            self.machine = BalancerMachine(servers, incarnation, options)
            return self.machine

        self.name = f"{BALANCER}-{next(_numbers)}"
        self.actions: list[Any] = []
        self.process = Process(cluster.world, cluster.network, self.name, make, self._act)
        self.process.start()

    def _act(self, action: Any) -> None:
        self.actions.append(action)
        if isinstance(action, Stopped):
            self.process.crash("ends by itself")

    def taken(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

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

    def home(self, channel: bytes) -> str:
        """Return the first server of a channel."""
        return self.plan.entry(channel).route.assignment.servers[0]

    def at_home(self, server: str, count: int = 1, prefix: bytes = b"c") -> list[bytes]:
        """Return channels whose home is a server."""
        names = (b"%s-%d" % (prefix, number) for number in range(10_000))
        return list(islice((name for name in names if self.plan.ring.home(name) == server), count))


class SimCluster:
    """Servers ``s1`` ... with an agent each, and the balancers that a test starts."""

    def __init__(self, servers: int = 2) -> None:
        self.world = World(1, trace_records_max=0, check_every=1)
        self.world.run_until(100.0)
        instant = Delays(0.0, 0.0)
        self.network = Network(self.world, lambda process, server: instant, silence_s_max=float("inf"))
        self.servers: dict[str, StoringServer] = {}
        self.agents: dict[str, ScriptedAgent] = {}
        #: Loads in bytes/s and traffic of channels, counted at the servers of their live routes.
        self.follow: dict[bytes, int] = {}
        self.traffic: dict[bytes, Traffic] = {}
        self.balancers: list[Balancer] = []
        self._plan: Plan | None = None
        self._processes: dict[str, Process] = {}
        self._heal: dict[tuple[str, str], list[Callable[[], None]]] = {}
        for number in range(1, servers + 1):
            self.add_server(f"s{number}")

    def add_server(self, id_: str, url: str = "") -> StoringServer:
        """Start a server and its agent, which no balancer knows yet."""
        server = self.servers[id_] = StoringServer(self.world, id_, url or f"redis://{id_}", self._check_phases)
        self.network.add_server(server.url, server)
        agent = self.agents[id_] = ScriptedAgent(id_, server.url, lambda: server.plan, self._rows)
        process = Process(self.world, self.network, f"agent-{id_}", lambda _: agent, lambda _: None)
        self._processes[id_] = process
        process.start()
        return server

    @property
    def now(self) -> float:
        return self.world.now

    def configured(self, ids: Iterable[str] | None = None) -> list[Server]:
        return [Server(id_, f"redis://{id_}") for id_ in ids or self.servers]

    def _rows(self, server: str) -> dict[bytes, Row]:
        plans = [balancer.machine.plan for balancer in self.balancers]
        self._plan = next((plan for plan in reversed(plans) if plan is not None), self._plan)
        rows: dict[bytes, Row] = {}
        for channel in {**self.follow, **self.traffic}:
            assert self._plan is not None
            routes = [r for r in self._plan.entry(channel).live_routes if server in r.assignment.servers]
            if channel in self.follow and routes:
                rows[channel] = Row(bytes_out=self.follow[channel])
            elif routes:
                rows[channel] = sum((self.traffic[channel].seen_at(server, route) for route in routes), start=Row())
        return rows

    # Balancers.

    def start(self, options: BalancerOptions | None = None, servers: Iterable[str] | None = None) -> Balancer:
        self.balancers.append(Balancer(self, self.configured(servers), options))
        return self.balancers[-1]

    def started(self, options: BalancerOptions | None = None) -> Balancer:
        """Start a balancer and wait until it leads, every server stores its plan, and all agents have acknowledged."""
        balancer = self.start(options)
        self.run_until(lambda: balancer.machine.stage is Stage.LEADING and self.is_quiet(balancer))
        return balancer

    def kill(self, balancer: Balancer) -> None:
        self.balancers.remove(balancer)
        balancer.process.crash()

    def succeed(
        self, balancer: Balancer, options: BalancerOptions | None = None, servers: Iterable[str] | None = None
    ) -> Balancer:
        """Kill a balancer; return its successor, with these servers, as soon as that has the plan."""
        self.kill(balancer)
        successor = self.start(options, servers)
        self.run_until(lambda: successor.machine.plan is not None)
        return successor

    def is_quiet(self, balancer: Balancer) -> bool:
        plan = balancer.plan
        up = [id_ for id_, server in self.servers.items() if server.up]
        agents = [self.agents[id_] for id_ in up if self.agents[id_].alive and not self.agents[id_].mute]
        return (
            all(entry.phase is Phase.SETTLED for entry in plan.entries.values())
            and all(agent.plan is not None and agent.plan.version == plan.version for agent in agents)
            and all((stored := self.servers[id_].plan) is not None and stored.version == plan.version for id_ in up)
        )

    # Administrators and agents.

    def admin(self, server: str, command: str, arguments: Mapping[str, Any] | None = None, request: int = 7) -> None:
        self.servers[server].inject(OPERATOR_CHANNEL, pack_control(AdminRequest(request, command, arguments or {})))

    def ask(self, command: str, arguments: Mapping[str, Any] | None = None, server: str = "s1") -> AdminReply:
        request, replies = next(_numbers), self.servers[server].replies
        self.admin(server, command, arguments, request)
        self.run_until(lambda: any(reply.request == request for reply in replies))
        return next(reply for reply in replies if reply.request == request)

    def refusal(self, command: str, arguments: Mapping[str, Any] | None = None, server: str = "s1") -> str:
        """Ask for something, and return why it is refused."""
        error = self.ask(command, arguments, server).error
        assert error is not None, f"{command} {arguments} was carried out"
        return error

    def others(self, *servers: str) -> list[str]:
        """Return the ids of all other servers."""
        return [id_ for id_ in self.servers if id_ not in servers]

    def say(self, server: str, message: Any) -> None:
        """Publish a control message, or bytes, on the balancer's channel at a server."""
        data = message if isinstance(message, bytes) else pack_control(message)
        self.servers[server].inject(BALANCER_CHANNEL, data)

    def listen(self, server: str, connections: int) -> None:
        """Let 0, 1 or 2 connections listen as the agent of a server."""
        self._processes[server].handle(self.agents[server].listening(connections))

    def lease_holders(self) -> list[bytes | None]:
        return [server.execute("test", b"GET", BALANCER_LEASE_KEY) for server in self.servers.values()]

    # Faults.

    def stop_server(self, id_: str) -> None:
        self.servers[id_].stop(orderly=True)

    def start_server(self, id_: str, snapshot: Snapshot | None = None) -> None:
        """Start a new process, with an empty memory or what its disk has kept."""
        self.servers[id_].start(snapshot)

    def part(self, balancer: Balancer, server: str) -> None:
        """Let nothing pass between a balancer and a server until ``heal``; the link stays up."""
        self._heal.setdefault((balancer.name, server), []).append(self.network.part([balancer.name], [server]))

    def cut(self, balancer: Balancer, server: str) -> None:
        """Break the connection of a balancer; it does not come back until ``heal``."""
        for connection in self.network.connections(balancer.name, server):
            self.servers[server].kill(connection, "connection lost")
        self.part(balancer, server)

    def heal(self, balancer: Balancer, server: str) -> None:
        for heal in self._heal.pop((balancer.name, server)):
            heal()

    # Time.

    def run(self, duration_s: float = 0.0) -> None:
        """Deliver everything, and let time pass."""
        self.world.run_until(self.now + duration_s)

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Let time pass until ``condition`` holds. Fails when it does not within ``timeout_s``."""
        self.run()
        assert self.world.run_until_true(condition, self.now + timeout_s, POLL_S), f"not within {timeout_s} s"

    def _check_phases(self, before: Plan, after: Plan) -> None:
        """Check what must be true of every change that a server stores, in every test."""
        if after.version > before.version:
            for channel in before.entries.keys() - after.entries.keys():
                assert after.entry(channel).may_follow(before.entries[channel]), f"{channel!r} is missing"
        installers = [balancer.machine.leadership.installer for balancer in self.balancers]
        dead = frozenset(server for each in installers if each is not None for server in each.dead)
        for channel, entry in after.entries.items():
            old = before.entries.get(channel)
            if old is None or old == entry:
                continue
            assert entry.newer_than(old), f"{channel!r} goes back from {old} to {entry}"
            if old.phase is Phase.PREPARED and entry.route == old.route:
                for id_ in {server for route in entry.live_routes for server in route.assignment.servers} - dead:
                    plan = self.agents[id_].plan
                    assert not self.agents[id_].alive or (plan is not None and channel in plan.entries), (
                        f"{channel!r} was activated before the agent of {id_} knew of it"
                    )
            if entry.phase is Phase.SETTLED:
                for id_ in set(old_servers(old)) - dead:
                    assert channel not in self.agents[id_].listened, f"{channel!r} settled with subscribers at {id_}"


def started(servers: int = 2, options: BalancerOptions = NO_DECISIONS) -> tuple[SimCluster, Balancer]:
    """Return a cluster, and a balancer that leads it: see ``SimCluster.started``."""
    cluster = SimCluster(servers)
    return cluster, cluster.started(options)
