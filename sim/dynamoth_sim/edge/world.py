"""A simulated cluster with log servers, brokers, coordinators and users, under audits of live and logged interests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dynamoth.edge.interests import Interest, channel_interest, presence_interest
from dynamoth.edge.log import LogOptions, log_server
from dynamoth.edge.positions import parse_found, position_key
from dynamoth.edge.presence import member_id, presence_keys
from dynamoth.edge.publications import Position
from dynamoth.plan.plan import Server
from dynamoth_broker.coordinator.machine import CoordinatorMachine
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.events import BrokerOptions
from dynamoth_sim.audit import Audit, Violation
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.edge.brokers import BrokerApp
from dynamoth_sim.edge.users import USER, UserApp
from dynamoth_sim.edge.wires import Wire
from dynamoth_sim.world.network import Delays
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.redis_keys import Snapshot
from dynamoth_user.machine.events import UserOptions

PUBLISH_S_MAX = 5.0
"""Every publish of a user ends within this, but for those that wait for a broker."""

CONNECT_S = 0.003
"""How long it takes to open a connection, without the delays of the network."""


SHORT_BROKER_OPTIONS = BrokerOptions(
    id="",
    linger_s=0.3,
    tip_check_s=0.4,
    log_wait_s=0.6,
    page_entries=4,
    recent_entries_max=6,
    pending_max=20,
    ping_s=0.5,
    pong_timeout_s=0.6,
    ack_s=0.1,
    slow_s_max=2.0,
    move_timeout_s=1.0,
    move_spread_s=0.1,
    grace_s=2.0,  # more than a message is held after a loss, as in production
    presence_ttl_s=1.5,
    presence_grace_s=0.5,
)

SHORT_USER_OPTIONS = UserOptions(
    urls=(),
    session="",
    backoff_s_min=0.05,
    backoff_s_max=0.3,
    connect_timeout_s=0.6,
    silence_s=0.7,
    hold_s=0.6,
    retry_s=0.1,
)


SHORT_COORDINATOR_OPTIONS = CoordinatorOptions(
    report_s=0.05,
    decide_s=0.1,
    looks=1,
    wait_s=0.1,
    rest_s=0.1,
    ask_timeout_s=0.1,
    batch_timeout_s=1.0,
    fast_half_life_s=0.1,
    slow_half_life_s=0.1,
    cov_max=0.02,
    cov_target=0.0,
    ratio_mean_min=0.0,
    shuffle_ratio_mean_min=0.0,
    gain_ratio_min=0.0,
    move_cost_ratio=0.0,
    stay_ratio=0.0,
    ratio_accept=1000.0,
    lease_s=0.5,
    forget_s=0.5,
)
"""It moves somebody several times in a second, with little reason."""


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """What the edge is like."""

    brokers: int = 3
    #: Without one, brokers have no control links either.
    coordinators: int = 0
    coordinator: CoordinatorOptions = field(default_factory=lambda: SHORT_COORDINATOR_OPTIONS)
    logs: int = 2
    #: Channels with a log, and plain ones.
    logged: tuple[str, ...] = ("log1", "log2", "log3")
    live: tuple[str, ...] = ("ch0", "ch1")
    #: Those on which users see who is present.
    presence: tuple[str, ...] = ()
    #: Whether every user comes back in time and unsubscribes from nothing: nobody may see anybody leave.
    presence_is_steady: bool = False
    #: Whether publications of logged interests may be lost, with a gap: where their servers fail.
    logs_may_fail: bool = False
    retained_min: int = 1000
    #: Whether log servers lose nothing when they restart.
    logs_are_durable: bool = False
    #: Users of random worlds whose positions brokers keep.
    stored_users: int = 0
    #: Frames that may wait for a user.
    unread_max: int = 1000
    broker: BrokerOptions = field(default_factory=lambda: SHORT_BROKER_OPTIONS)
    user: UserOptions = field(default_factory=lambda: SHORT_USER_OPTIONS)


class EdgeWorld:
    """Builds everything; ``start`` starts it."""

    def __init__(self, cluster: Cluster, options: EdgeOptions) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.options = options
        self.logged_audit = Audit(
            losses_allowed=options.logs_may_fail,
            failures_allowed=cluster.options.setting.losses_allowed,
            publish_s_max=PUBLISH_S_MAX,
            story=cluster.audit._story,  # pyright: ignore[reportPrivateUsage]
        )
        self.logs: dict[str, RedisServer] = {}
        for number in range(options.logs):
            server = RedisServer(self.world, f"l{number + 1}", f"redis://l{number + 1}:6379")
            self.logs[server.id] = server
            cluster.network.add_server(server.url, server)
        self.logged = [channel_interest(name) for name in options.logged]
        self.live = [channel_interest(name) for name in options.live]
        names = [f"b{number + 1}" for number in range(options.brokers)]
        urls = [f"wss://{name}" for name in names]
        self.brokers = {
            url: BrokerApp(
                cluster, self._broker_options(name, urls), replace(cluster.options.client.subscriber, numbered=True)
            )
            for name, url in zip(names, urls, strict=True)
        }
        self.coordinators = [self._coordinator(f"coordinator{number + 1}") for number in range(options.coordinators)]
        self.users: list[UserApp] = []
        self._wires = 0

    def _coordinator(self, name: str) -> Process:
        """Return the process of a coordinator; the caller starts it."""
        servers = [Server(server.id, server.url) for server in self.cluster.servers.values()]

        def make(incarnation: int) -> CoordinatorMachine:
            return CoordinatorMachine(servers, incarnation, self.options.coordinator, b"secret")

        return Process(self.world, self.cluster.network, name, make, lambda action: None)

    def _broker_options(self, name: str, urls: list[str]) -> BrokerOptions:
        return replace(
            self.options.broker,
            id=name,
            url=f"wss://{name}" if self.options.coordinators else "",
            control=(
                {server.id: server.url for server in self.cluster.servers.values()} if self.options.coordinators else {}
            ),
            logs={id_: server.url for id_, server in self.logs.items()},
            history=self.options.logged,
            presence=self.options.presence,
            alternates=tuple(url for url in urls if url != f"wss://{name}"),
            log=LogOptions(self.options.retained_min, durable=self.options.logs_are_durable),
        )

    def add_user(
        self, name: str, interests: list[Interest], first: str | None = None, *, is_stored: bool = False
    ) -> UserApp:
        """Add a user; the caller starts it. ``first`` is the broker that it tries first."""
        user = UserApp(self, name, self.user_options(first), interests, is_stored=is_stored)
        self.users.append(user)
        return user

    def user_options(self, first: str | None = None) -> UserOptions:
        """Return the options of a new user, with brokers in an order of its own."""
        urls = list(self.brokers)
        self.world.random.shuffle(urls)
        if first is not None:
            urls = [f"wss://{first}", *(url for url in urls if url != f"wss://{first}")]
        return replace(self.options.user, urls=tuple(urls))

    def broker_of(self, user: UserApp) -> BrokerApp | None:
        """Return the broker that serves a user."""
        machine = None if user.process is None else user.machine
        serving = None if machine is None else machine.serving
        return None if serving is None else self.brokers[serving.url]

    def audit_of(self, interest: Interest) -> Audit:
        """Return the audit for an interest."""
        return self.logged_audit if self.is_logged(interest) else self.cluster.audit

    def is_logged(self, interest: Interest) -> bool:
        """Return whether an interest has a log."""
        return interest.kind != "channel" or interest.name in self.options.logged

    def stored_position(self, session: str, interest: Interest) -> Position | None:
        """Return the position that the log server has for a session."""
        server = self.logs[log_server(interest.id, tuple(self.logs))]
        found = server.execute("audit", b"GET", position_key(interest.id, USER, session))
        return None if found is None else parse_found([found, 0])[0]

    def delays(self) -> Delays:
        """Return the delays of one direction of a user's connection."""
        return self.cluster.options.setting.delays

    def connect(self, user: UserApp, number: int, url: str, opened: Callable[[Wire | None], None]) -> None:
        """Open a connection of a user to a broker."""
        broker = self.brokers[url]

        def arrive() -> None:
            if not broker.is_ready:
                opened(None)
                return
            self._wires += 1
            wire = Wire(self.world, self.delays(), self._wires, number, user, broker, self.options.unread_max)
            broker.accept(wire)
            opened(wire)

        self.world.after(CONNECT_S * (1 + self.world.random.random()), arrive)

    def restart_log(self, server: RedisServer, snapshot: Snapshot | None) -> None:
        """Restart a log server with an old snapshot, or empty."""
        if server.up:
            server.stop()
        server.start(snapshot)

    def present(self, channel: str) -> set[str]:
        """Return the members that a channel should have: present users whose application runs."""
        users = [user for user in self.users if user.is_alive and channel in user.present]
        return {member_id(USER, each.name) for each in users if channel_interest(channel) in each.interests}

    def problems_of_presence(self) -> list[Violation]:
        """Return where the members that a log server has, or that a user sees, are not those who are connected."""
        found: list[Violation] = []
        for user in self.users if self.options.presence_is_steady else ():
            left = [member for kind, member in user.changes if kind == "leave"]
            if left:
                found.append(Violation("presence", f"{user.name} sees {len(left)} members leave", self.world.now))
        for channel in self.options.presence:
            present, id_ = self.present(channel), presence_interest(channel).id
            stored = self.logs[log_server(id_, tuple(self.logs))].hash(presence_keys(id_)[2])
            seen = {"its log server": {member.decode() for member in stored}}
            for user in self.users:
                if user.is_alive and presence_interest(channel) in user.interests:
                    seen[user.name] = set(user.rosters.get(channel, {"nobody": ""}))
            for who, members in seen.items():
                if members != present:
                    names = {member_id(USER, user.name): user.name for user in self.users}
                    wrong = ", ".join(sorted(names.get(each, each) for each in members ^ present))
                    text = f"{who} is wrong about {wrong} on {channel}"
                    found.append(Violation("presence", text, self.world.now, channel.encode()))
        return found

    def problems(self) -> list[Violation]:
        """Return what users have complained about, and who is not served."""
        now = self.world.now
        found = [Violation("B1", text, now) for user in self.users for text in user.problems]
        for user in self.users:
            missing = [each.name for each in user.interests if each.id not in user.confirmed]
            if missing:
                found.append(Violation("B5", f"{user.name} still waits for {', '.join(missing)}", now))
        return found
