"""Random worlds of brokers and users: one seed is one world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from dynamoth.edge.interests import Interest, presence_interest
from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth_broker.events import BrokerOptions, Drain, EndDrain
from dynamoth_sim.audit import Violation
from dynamoth_sim.cluster import Cluster, Setting, short_options
from dynamoth_sim.edge.users import UserApp
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS, SHORT_USER_OPTIONS, EdgeOptions, EdgeWorld
from dynamoth_sim.load.clients import Client
from dynamoth_sim.world.redis import out_of_memory, read_only
from dynamoth_sim.world.world import World

HOLD_S_MAX = 1.5
RECOVERY_S = 4.0
"""Within this after the last fault every user is served again, and has everything."""

SETTLE_S_MAX = 8.0

USERS = 6
PUBLISHERS = 3
LIVE_PUBLISHERS = 2
THINK_S_MAX = 0.06
MOVE_CHANNEL_S_MAX = 0.5
PAUSE_S_MAX = 0.3
DOWN_S_MAX = 0.4
NOTICE_S_MAX = 0.3
REFUSE_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class EdgeProfile(Setting):
    """The faults of a run with brokers."""

    name: str = ""
    #: Names of faults of :class:`EdgeChaos`.
    faults: tuple[str, ...] = ()
    interval_s: float = 0.15
    work_s: float = 3.0
    #: Whether the assignments of channels change underneath.
    moves_channels: bool = True
    edge: EdgeOptions = field(default_factory=EdgeOptions)


MOVES = ("move user", "move user", "move users", "drain broker")
PLANNED = (*MOVES[:3], "join", "leave", "drain broker")
CRASHES = ("crash broker", "crash user", "cut user", "cut log", "freeze user")

PATIENT = EdgeOptions(
    broker=replace(SHORT_BROKER_OPTIONS, pong_timeout_s=5.0), user=replace(SHORT_USER_OPTIONS, silence_s=5.0)
)
"""Nobody takes an end that was paused, perhaps several times in a row, for dead."""

STEADY = replace(
    PATIENT,
    broker=replace(PATIENT.broker, presence_grace_s=4.0, presence_ttl_s=6.0),
    presence=("ch0", "log1"),
    presence_is_steady=True,
)
"""Every user comes back within the time of grace, also one that several brokers in a row send elsewhere."""

COORDINATOR_FAULTS = ("crash coordinator", "pause coordinator", "cut coordinator")


def _reporting(options: BrokerOptions) -> BrokerOptions:
    """Return options of brokers that report often, and that a few publications load."""
    return replace(options, report_s=0.05, capacity_bytes_per_s=10_000)


BALANCED = replace(PATIENT, coordinators=2, broker=_reporting(PATIENT.broker))
"""Two coordinators, of which one acts: it moves users all the time."""

EDGE_PROFILES = {
    profile.name: profile
    for profile in (
        EdgeProfile(name="edge-calm", moves_channels=False),
        EdgeProfile(
            name="edge-moves", faults=(*PLANNED, "pause broker", "pause user"), edge=replace(PATIENT, stored_users=2)
        ),
        EdgeProfile(
            name="edge-balanced",
            faults=(*PLANNED, *COORDINATOR_FAULTS, "pause broker", "pause user"),
            edge=BALANCED,
        ),
        EdgeProfile(
            name="edge-balanced-crashes",
            faults=(*PLANNED, *COORDINATOR_FAULTS, *CRASHES, "slow user", "pause broker", "lose publication"),
            losses_allowed=True,
            edge=replace(BALANCED, broker=_reporting(SHORT_BROKER_OPTIONS), user=SHORT_USER_OPTIONS, unread_max=100),
        ),
        EdgeProfile(
            name="edge-slow",
            faults=(*PLANNED, "slow user", "slow user"),
            losses_allowed=True,
            edge=EdgeOptions(unread_max=30),
        ),
        EdgeProfile(
            name="edge-crashes",
            faults=(*PLANNED, *CRASHES, "slow user", "pause broker", "pause user", "lose publication"),
            losses_allowed=True,
            edge=EdgeOptions(unread_max=100, stored_users=3),
        ),
        EdgeProfile(
            name="edge-stored",
            faults=(*PLANNED, *CRASHES, *("crash user",) * 8, "slow user"),
            losses_allowed=True,
            edge=EdgeOptions(unread_max=100, stored_users=USERS),
        ),
        EdgeProfile(
            name="edge-logs",
            faults=(*PLANNED, "restart log", "restore log", "flush log", "cut log"),
            losses_allowed=True,
            edge=EdgeOptions(logs_may_fail=True),
        ),
        EdgeProfile(
            name="edge-refusals",
            faults=(*PLANNED, *CRASHES, *("refuse log",) * 3),
            losses_allowed=True,
            edge=EdgeOptions(stored_users=3),
        ),
        EdgeProfile(
            name="edge-retention",
            faults=(*PLANNED, *CRASHES),
            losses_allowed=True,
            edge=EdgeOptions(logs_may_fail=True, retained_min=8, stored_users=2),
        ),
        EdgeProfile(
            name="edge-presence",
            faults=(
                *PLANNED,
                *CRASHES,
                "quit user",
                "lose user",
                "pause broker",
                "pause user",
                "restart log",
                "restore log",
                "flush log",
            ),
            losses_allowed=True,
            edge=EdgeOptions(logs_may_fail=True, presence=("ch0", "log1"), unread_max=100),
        ),
        EdgeProfile(
            name="edge-presence-steady",
            faults=(*MOVES, "crash broker", "cut user", "cut log", "pause broker", "pause user", "lose publication"),
            losses_allowed=True,
            edge=STEADY,
        ),
    )
}


class EdgeChaos:
    """Does to brokers and users what a profile allows, until :meth:`stop`."""

    def __init__(self, edge: EdgeWorld, profile: EdgeProfile) -> None:
        self._edge = edge
        self._world = edge.world
        self._random = edge.world.random
        self._profile = profile
        self._stopped = False
        self._undo: list[Callable[[], None]] = []
        every = self._by_name()
        self._faults = [every[name] for name in profile.faults]

    def _by_name(self) -> dict[str, Callable[[], None]]:
        """Return every fault by its name."""
        return {
            "move user": self._move_user,
            "move users": self._move_users,
            "drain broker": self._drain_broker,
            "join": self._join,
            "leave": self._leave,
            "slow user": self._slow_user,
            "pause broker": self._pause_broker,
            "pause user": self._pause_user,
            "pause coordinator": self._pause_coordinator,
            "crash coordinator": self._crash_coordinator,
            "cut coordinator": self._cut_coordinator,
            "crash broker": self._crash_broker,
            "crash user": self._crash_user,
            "quit user": self._quit_user,
            "lose user": self._lose_user,
            "cut user": self._cut_user,
            "freeze user": self._freeze_user,
            "cut log": self._cut_log,
            "lose publication": self._lose_publication,
            "restart log": self._restart_log,
            "restore log": self._restore_log,
            "flush log": self._flush_log,
            "refuse log": self._refuse_log,
        }

    def start(self) -> None:
        """Begin."""
        if self._faults:
            self._later()
        if self._profile.moves_channels:
            self._move_channel()

    def stop(self) -> None:
        """Undo everything."""
        self._stopped = True
        for undo in list(self._undo):
            undo()

    def _later(self) -> None:
        self._world.after(2 * self._profile.interval_s * self._random.random(), self._strike)

    def _strike(self) -> None:
        if not self._stopped:
            self._random.choice(self._faults)()
            self._later()

    def _until(self, duration_s: float, undo: Callable[[], None]) -> None:
        """Undo something after a time, or at the end."""

        def once() -> None:
            if once in self._undo:
                self._undo.remove(once)
                undo()

        self._undo.append(once)
        self._world.after(duration_s, once)

    def _note(self, text: str) -> None:
        self._world.trace.add((self._world.now, "fault", None, None, None, None, text))

    # Planned operations: nothing may be lost.

    def _move_channel(self) -> None:
        if self._stopped:
            return
        edge, random = self._edge, self._random
        interest = random.choice([*edge.logged, *edge.live])
        channel = interest.log_channel if interest in edge.logged else interest.name.encode()
        servers = list(edge.cluster.servers)
        if random.random() < 0.6:
            edge.cluster.change(channel, single(random.choice(servers)))
        else:
            mode = random.choice([Mode.ALL_PUBLISHERS, Mode.ALL_SUBSCRIBERS])
            edge.cluster.change(channel, Assignment(mode, tuple(random.sample(servers, 2))))
        self._world.after(MOVE_CHANNEL_S_MAX * random.random(), self._move_channel)

    def _served(self) -> list[UserApp]:
        return [user for user in self._edge.users if user.is_alive and user.machine.serving is not None]

    def _move_user(self, user: UserApp | None = None) -> None:
        served = self._served()
        if not served:
            return
        user = user or self._random.choice(served)
        broker = self._edge.broker_of(user)
        serving = user.machine.serving
        wire = None if serving is None else user.wires.get(serving.number)
        if broker is None or wire is None or wire.id not in broker.wires:
            return
        others = [url for url in self._edge.brokers if url != broker.url]
        self._random.shuffle(others)
        broker.move(wire.id, tuple(others))

    def _move_users(self) -> None:
        for user in self._served():
            self._move_user(user)

    def _drain_broker(self) -> None:
        ready = [broker for broker in self._edge.brokers.values() if broker.is_ready]
        if len(ready) < 3 or any(broker.machine.is_draining for broker in ready):
            return
        broker = self._random.choice(ready)
        assert broker.broker is not None
        generation = broker.broker
        generation.handle(Drain(100.0))
        self._note(f"{broker.name} is drained")
        self._until(0.6, lambda: generation.handle(EndDrain()))

    def _join(self) -> None:
        """A user subscribes to one more interest."""
        user = self._random.choice(self._edge.users)
        missing = [each for each in (*self._edge.logged, *self._edge.live) if each not in user.interests]
        if missing and user.process is not None and not user.process.paused:
            interest = self._random.choice(missing)
            user.interests.append(interest)
            user.subscribe(interest)

    def _leave(self) -> None:
        user = self._random.choice(self._edge.users)
        if len(user.interests) > 1 and user.process is not None and not user.process.paused:
            user.leave(self._random.choice(user.interests))

    def _slow_user(self) -> None:
        """A user reads nothing for a while, and then everything."""
        wires = [wire for user in self._served() for wire in user.wires.values()]
        if wires:
            wire = self._random.choice(wires)
            wire.hold_down()
            self._until(0.8 * self._random.random(), wire.release_down)

    def _pause_broker(self) -> None:
        broker = self._random.choice(list(self._edge.brokers.values()))
        broker.pause(PAUSE_S_MAX * self._random.random())

    def _pause_coordinator(self) -> None:
        """It stands still for longer than its lease, perhaps, and goes on with what it was about to do."""
        self._random.choice(self._edge.coordinators).pause(4 * PAUSE_S_MAX * self._random.random())

    def _pause_user(self) -> None:
        user = self._random.choice(self._edge.users)
        if user.process is not None:
            user.process.pause(PAUSE_S_MAX * self._random.random())

    # Failures.

    def _crash_broker(self) -> None:
        ready = [broker for broker in self._edge.brokers.values() if broker.is_ready]
        if len(ready) < 2:
            return
        broker = self._random.choice(ready)
        broker.crash(NOTICE_S_MAX)
        self._until(DOWN_S_MAX * self._random.random(), lambda: None if broker.processes else broker.start())

    def _crash_coordinator(self) -> None:
        coordinator = self._random.choice(self._edge.coordinators)
        if coordinator.alive:
            coordinator.crash("crashes")
            self._until(DOWN_S_MAX * self._random.random(), lambda: None if coordinator.alive else coordinator.start())

    def _cut_coordinator(self) -> None:
        """A connection of a coordinator is lost, or one that a broker has to a coordinator."""
        names = [*(each.name for each in self._edge.coordinators), *(each.name for each in self._edge.brokers.values())]
        network = self._edge.cluster.network
        connections = [
            each
            for each in network.connections(process=self._random.choice(names))
            if each.server in self._edge.cluster.servers
        ]
        if connections:
            network.break_connection(self._random.choice(connections))

    def _crash_user(self) -> None:
        user = self._random.choice(self._edge.users)
        if user.is_alive:
            user.crash()
            self._until(DOWN_S_MAX * self._random.random(), lambda: None if user.is_alive else user.start())

    def _quit_user(self) -> None:
        """A user closes the application, and opens it again later; perhaps at once."""
        user = self._random.choice(self._edge.users)
        if user.process is not None and not user.process.paused:
            user.quit()
            self._until(DOWN_S_MAX * self._random.random(), lambda: None if user.is_alive else user.start())

    def _lose_user(self) -> None:
        """A user who is present dies, and does not come back."""
        alive = [user for user in self._edge.users if user.is_alive and user.present]
        if len(alive) > USERS // 2:
            self._random.choice(alive).abandon()

    def _cut_user(self) -> None:
        wires = [wire for user in self._served() for wire in user.wires.values()]
        if wires:
            self._note("a user's connection is lost")
            self._random.choice(wires).lose(NOTICE_S_MAX, self._random.random)

    def _freeze_user(self) -> None:
        wires = [wire for user in self._served() for wire in user.wires.values()]
        if wires:
            self._note("nothing arrives any more on a user's connection")
            self._random.choice(wires).hold()

    def _cut_log(self) -> None:
        names = [broker.name for broker in self._edge.brokers.values()]
        connections = self._edge.cluster.network.connections(process=self._random.choice(names))
        if connections:
            self._edge.cluster.network.break_connection(self._random.choice(connections))

    def _lose_publication(self) -> None:
        """A connection of a broker's Dynamoth client is lost."""
        names = [f"{broker.name}.s" for broker in self._edge.brokers.values()]
        connections = self._edge.cluster.network.connections(process=self._random.choice(names))
        if connections:
            self._edge.cluster.network.break_connection(self._random.choice(connections))

    def _restart_log(self) -> None:
        self._edge.restart_log(self._random.choice(list(self._edge.logs.values())), None)

    def _restore_log(self) -> None:
        """A log server takes a snapshot, goes on, and restarts with the snapshot."""
        server = self._random.choice(list(self._edge.logs.values()))
        snapshot = server.snapshot()
        self._world.after(0.5 * self._random.random(), self._edge.restart_log, server, snapshot)

    def _flush_log(self) -> None:
        self._random.choice(list(self._edge.logs.values())).flush()

    def _refuse_log(self) -> None:
        """A log server has no memory left, or has become a replica."""
        server = self._random.choice(list(self._edge.logs.values()))
        if not server.up or server.refuse is not None:
            return
        server.refuse = self._random.choice((out_of_memory, read_only))
        self._note(f"{server.id} refuses writes: {server.refuse.__name__}")

        def accept() -> None:
            server.refuse = None
            self._note(f"{server.id} takes writes again")

        self._until(REFUSE_S_MAX * self._random.random(), accept)


def run_edge_profile(world: World, profile: EdgeProfile) -> tuple[EdgeWorld, Callable[[], list[Violation]]]:
    """Build one world; the function runs it from start to audit, and returns what went wrong."""
    cluster = Cluster(world, short_options(profile, hold_s_max=HOLD_S_MAX))
    edge = EdgeWorld(cluster, profile.edge)
    return edge, partial(_live, edge, profile)


def _live(edge: EdgeWorld, profile: EdgeProfile) -> list[Violation]:
    world, cluster = edge.world, edge.cluster
    workload = _Workload(edge)
    cluster.start()
    world.run_until(0.5)
    for broker in edge.brokers.values():
        broker.start()
    for coordinator in edge.coordinators:
        coordinator.start()
    world.run_until(1.0)
    workload.start()
    world.run_until(1.5)
    chaos = EdgeChaos(edge, profile)
    chaos.start()
    world.run_until(world.now + profile.work_s)
    chaos.stop()
    workload.stop()
    cluster.network.calm()
    violations: list[Violation] = []
    world.run_until(world.now + RECOVERY_S)
    if not world.run_until_true(cluster.settled, world.now + SETTLE_S_MAX):
        violations.append(Violation("settling", "; ".join(cluster.unsettled()), world.now))
    violations += [*edge.problems(), *edge.problems_of_presence()]
    edge.logged_audit.calm()
    cluster.audit.calm()
    workload.publish_everywhere()
    world.run_until(world.now + 2 * HOLD_S_MAX)
    if workload.unpublished():
        violations.append(Violation("B5", f"these still publish: {workload.unpublished()}", world.now))
    return [*violations, *cluster.audit.finish(world.now), *edge.logged_audit.finish(world.now)]


class _Workload:
    """What users and backends do."""

    def __init__(self, edge: EdgeWorld) -> None:
        self._edge = edge
        self._world = edge.world
        self._random = edge.world.random
        self._stopped = False
        self._backends: list[Client] = []
        self._publishers: list[UserApp] = []

    def start(self) -> None:
        edge, random = self._edge, self._random
        every = [*edge.logged, *edge.live]
        for number in range(USERS):
            interests = random.sample(every, random.randint(1, len(every)))
            is_stored = number < edge.options.stored_users
            user = edge.add_user(f"u{number}", interests, is_stored=is_stored)
            if edge.options.presence:
                user.present.update(random.sample(edge.options.presence, random.randint(1, len(edge.options.presence))))
                interests.append(presence_interest(random.choice(edge.options.presence)))
            self._start(user)
        for number in range(PUBLISHERS):
            user = edge.add_user(f"v{number}", [random.choice(edge.logged)])
            self._publishers.append(user)
            self._start(user)
            self._world.after(random.random(), self._publish, user)
        for number in range(LIVE_PUBLISHERS):
            client = edge.cluster.add_client(f"p{number}", 0)
            self._backends.append(client)
            client.start()
            self._world.after(0.3 + random.random(), self._publish_live, client)

    def _start(self, user: UserApp) -> None:
        self._world.after(0.3 * self._random.random(), user.start)

    def stop(self) -> None:
        self._stopped = True

    def _publish(self, user: UserApp) -> None:
        if self._stopped:
            return
        if user.is_alive and not user.is_publishing:
            user.publish(self._random.choice(self._edge.logged))
        self._world.after(THINK_S_MAX * self._random.random(), self._publish, user)

    def _publish_live(self, client: Client) -> None:
        if self._stopped:
            return
        if client.publisher is not None and not client.publisher.process.paused:
            client.publisher.publish(self._random.choice(self._edge.live).name.encode())
        self._world.after(THINK_S_MAX * self._random.random(), self._publish_live, client)

    def publish_everywhere(self) -> None:
        """Publish once on every channel."""
        for interest in self._edge.logged:
            self._publish_once(interest)
        for interest in self._edge.live:
            for client in self._backends:
                assert client.publisher is not None
                client.publisher.publish(interest.name.encode())

    def _publish_once(self, interest: Interest) -> None:
        free = [user for user in self._publishers if user.is_alive and not user.is_publishing]
        if free:
            self._random.choice(free).publish(interest)
        else:
            self._world.after(0.05, self._publish_once, interest)

    def unpublished(self) -> list[str]:
        return [user.name for user in self._publishers if user.is_publishing]
