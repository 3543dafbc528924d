"""A small cluster with log servers, brokers and users whose every connection can be held up, for scripts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from dynamoth.edge import log
from dynamoth.edge.frames import BrokerFrame, Data, to_wire
from dynamoth.edge.interests import Interest
from dynamoth.edge.log import Appended, LogOptions, log_server, parse_appended
from dynamoth.edge.publications import Position
from dynamoth.machine.events import ErrorReply
from dynamoth_broker.interests import SharedInterest
from dynamoth_sim.audit import Violation
from dynamoth_sim.cluster import Setting
from dynamoth_sim.edge.brokers import BrokerApp
from dynamoth_sim.edge.users import UserApp
from dynamoth_sim.edge.wires import Wire
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS, EdgeOptions, EdgeWorld
from dynamoth_sim.load.clients import make_payload
from dynamoth_sim.scenarios.stage import Stage
from dynamoth_sim.world.network import Delays
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

AT_ONCE_S = 0.3
"""Within this everything that is under way has arrived and was handled, where nothing is held up."""

NEVER_S = 1000.0
"""An interval that no scenario lasts: what is done this often is not done."""

SELDOM_CHECKED = EdgeOptions(broker=replace(SHORT_BROKER_OPTIONS, tip_check_s=NEVER_S))
"""Brokers that do not compare tips: what that would mend has to come by itself."""


@dataclass(frozen=True, slots=True)
class EdgeScenario(Setting):
    """A script, and the edge that it is written for."""

    play: Callable[[EdgeStage], None]
    #: Quick and nearly constant: in a scenario only held connections are slow.
    delays: Delays = field(default=Delays(base_s=0.0005, jitter_s=0.0005), kw_only=True)
    edge: EdgeOptions = field(default_factory=EdgeOptions, kw_only=True)
    #: Whether users may see a hole in the offsets, because the script makes one.
    makes_holes: bool = field(default=False, kw_only=True)


class EdgeStage(Stage):
    """A cluster with an edge under a script.

    Args:
        world: time and chance.
        scenario: what cluster and edge are like.

    """

    def __init__(self, world: World, scenario: EdgeScenario) -> None:
        super().__init__(world, scenario)
        self.edge = self._make_edge(scenario)
        self._makes_holes = scenario.makes_holes
        #: How many publications each writer has appended without a broker, by interest.
        self._written: dict[tuple[str, str], int] = {}
        #: A user who publishes for the script, and is not subscribed to anything.
        self._writer: UserApp | None = None

    def _make_edge(self, scenario: EdgeScenario) -> EdgeWorld:
        return EdgeWorld(self.cluster, scenario.edge)

    # Actors.

    def open(self) -> None:
        """Start the cluster and the brokers, and wait until they have everything that they need."""
        super().open()
        for broker in self.edge.brokers.values():
            self.start(broker)

    def start(self, broker: BrokerApp) -> None:
        """Start a broker, and wait until its log servers answer."""
        broker.start()
        self.wait(f"{broker.name} is ready", lambda: broker.is_ready and not broker.machine.logs.faults)

    def broker(self, name: str) -> BrokerApp:
        """Return a broker by its name."""
        return self.edge.brokers[f"wss://{name}"]

    def user(self, name: str, *interests: Interest, at: str = "b1", is_stored: bool = False) -> UserApp:
        """Start a user at a broker, and wait until all subscriptions are confirmed."""
        user = self.edge.add_user(name, list(interests), at, is_stored=is_stored)
        user.start()
        self.wait_served(user, at)
        return user

    def join_user(self, user: UserApp, interest: Interest) -> None:
        """Let a user subscribe to one more interest."""
        user.interests.append(interest)
        user.subscribe(interest)

    def wait_served(self, user: UserApp, by: str | None = None) -> None:
        """Wait until a broker serves a user with everything."""
        where = by or "a broker"
        self.wait(f"{user.name} is served by {where}", lambda: self.is_served(user, by))

    def is_served(self, user: UserApp, by: str | None = None) -> bool:
        """Tell whether a broker serves a user alone, with every subscription; ``by`` None: any broker."""
        if user.process is None or len(user.machine.connections) != 1 or user.machine.serving is None:
            return False
        serving = user.machine.serving
        served = all(each.id in user.confirmed and each.id in serving.confirmed for each in user.interests)
        return serving.is_up and served and by in (None, serving.broker)

    def shared(self, broker: str, interest: Interest) -> SharedInterest:
        """Return what a broker has of an interest."""
        return self.broker(broker).machine.interests.by_id[interest.id]

    def wire(self, user: UserApp) -> Wire:
        """Return the connection over which a user is served."""
        serving = user.machine.serving
        assert serving is not None, f"{user.name} is not served"
        return user.wires[serving.number]

    # Publishing.

    def publish_by(self, user: UserApp, interest: Interest, times: int = 1) -> None:
        """Let a user publish, and wait until each publication is answered."""
        for _ in range(times):
            user.publish(interest)
            self.wait(f"{user.name} publishes", lambda: not user.is_publishing)

    def publish_logged(self, interest: Interest, times: int = 1) -> None:
        """Publish by way of the last broker, as somebody who is not part of the story."""
        if self._writer is None:
            self._writer = self.user("writer", at=list(self.edge.brokers.values())[-1].name)
        self.publish_by(self._writer, interest, times)

    def append(self, interest: Interest, times: int = 1, writer: str = "driver") -> Position:
        """Append to a log and publish nothing, as a publisher that dies in between. Return the last place."""
        position = Position(0, 0)
        for _ in range(times):
            number = self._written[writer, interest.id] = self._written.get((writer, interest.id), 0) + 1
            channel, now, audit = interest.name.encode(), self.world.now, self.edge.logged_audit
            audit.published(writer, channel, number, now)
            appended = self.execute(interest, make_payload(writer, number))
            assert isinstance(appended, Appended), appended
            audit.publish_ended(writer, channel, number, now)
            position = Position(appended.epoch, appended.offset)
        return position

    def execute(self, interest: Interest, payload: bytes, term: int = 0, execution: int = 0) -> Appended | str:
        """Append at a log server, as a writer with a connection of its own. Return the place, or the refusal."""
        server = self.log_of(interest)
        new_epoch, options = self.world.random.getrandbits(64), LogOptions(self.edge.options.retained_min)
        words = log.append_command(interest.id, payload, server.run_id, new_epoch, options, term, execution)
        reply = server.execute("writer", *(word if isinstance(word, bytes) else str(word).encode() for word in words))
        return str(reply) if isinstance(reply, ErrorReply) else parse_appended(reply)

    def log_of(self, interest: Interest) -> RedisServer:
        """Return the server that has the log of an interest."""
        return self.edge.logs[log_server(interest.id, tuple(self.edge.logs))]

    def channel_of(self, interest: Interest) -> bytes:
        """Return the Dynamoth channel of an interest."""
        return interest.log_channel if self.edge.is_logged(interest) else interest.name.encode()

    def home(self, interest: Interest) -> str:
        """Return the server at which the channel of an interest is while nobody has moved it."""
        plan = self.cluster.stored_plan("s1")
        assert plan is not None
        return plan.ring.home(self.channel_of(interest))

    def warm_up(self, *brokers: str) -> None:
        """Let brokers have a link to the server of the first interests, which can be held up then."""
        other = self.edge.live[1]
        assert self.home(other) == self.home(self.edge.live[0]) == self.home(self.edge.logged[0])
        for name in brokers:
            self.user(f"warms-{name}", other, at=name)

    # Moves.

    def ask_to_move(self, user: UserApp, *to: str) -> None:
        """Let the serving broker ask a user to move to one of these."""
        broker = self.edge.broker_of(user)
        assert broker is not None, f"{user.name} is not served"
        broker.move(self.wire(user).id, tuple(f"wss://{name}" for name in to))

    def move_user(self, user: UserApp, to: str) -> None:
        """Move a user, and wait until that is done."""
        self.ask_to_move(user, to)
        self.wait_served(user, to)

    # Trouble.

    @contextmanager
    def log_held(self, broker: str, interest: Interest, *, to_server: bool) -> Generator[None]:
        """Hold up one direction between a broker and the log of an interest."""
        with self.held(broker, self.log_of(interest).id, to_server=to_server):
            yield

    @contextmanager
    def channel_held(self, broker: str, interest: Interest, *, to_server: bool) -> Generator[None]:
        """Hold up what a broker sends to the server of a channel, or what comes from there."""
        with self.held(f"{broker}.s", self.home(interest), to_server=to_server):
            yield

    @contextmanager
    def barrier_held(self, broker: str, interest: Interest) -> Generator[None]:
        """Hold up the barriers of a broker, but not what is published: its commands do not come to the server."""
        with self.channel_held(broker, interest, to_server=True):
            yield

    @contextmanager
    def not_reading(self, user: UserApp) -> Generator[Wire]:
        """Let a user read nothing of its connection."""
        wire = self.wire(user)
        wire.hold_down()
        try:
            yield wire
        finally:
            wire.release_down()

    def lose_wire(self, user: UserApp) -> None:
        """Break the connection of a user. Each end learns of it within 50 ms."""
        self.wire(user).lose(0.05, self.world.random.random)

    def forge(self, user: UserApp, frame: BrokerFrame) -> None:
        """Let a frame come to a user that its broker has not sent."""
        user.receive(self.wire(user), to_wire(frame))

    def forge_data(self, user: UserApp, interest: Interest, offset: int, writer: str, number: int) -> None:
        """Let a publication come to a user that its broker has not sent."""
        self.forge(user, Data(interest.id, make_payload(writer, number), offset))

    def crash_with_positions(self, user: UserApp) -> None:
        """Let a user's application store the positions that its client gives, and die."""
        user._stored = dict(user.machine.positions())  # pyright: ignore[reportPrivateUsage]
        user.crash()

    # What must be.

    def offset(self, user: UserApp, interest: Interest) -> int:
        """Return the offset up to which a user has received an interest; -1 before its confirmation."""
        subscription = user.machine.subscriptions.get(interest.id)
        return -1 if subscription is None or subscription.received is None else subscription.received.offset

    def expect_received(self, user: UserApp, interest: Interest, offset: int) -> None:
        """Note a failure unless a user has received everything up to an offset."""
        received = self.offset(user, interest)
        what = f"{user.name} has received {interest.name} up to {offset}, not {received}"
        self.expect(what, received == offset, interest.name.encode())

    def delivered(self, user: UserApp) -> int:
        """Return how many publications the application of a user has handled."""
        return len(self.records("DELIVERS", who=user.name))

    def expect_delivered(self, user: UserApp, count: int) -> None:
        """Note a failure unless the application of a user has handled this many publications."""
        delivered = self.delivered(user)
        self.expect(f"{user.name} has {count} publications, not {delivered}", delivered == count)

    def stored_offset(self, user: UserApp, interest: Interest) -> int:
        """Return the offset that the log server has stored for a user; -1 for none."""
        position = self.edge.stored_position(user.name, interest)
        return -1 if position is None else position.offset

    def expect_stored(self, user: UserApp, interest: Interest, offset: int) -> None:
        """Note a failure unless the log server has this offset for a user."""
        stored = self.stored_offset(user, interest)
        self.expect(f"{offset} is stored for {user.name}, not {stored}", stored == offset, interest.name.encode())

    def restart_user(self, user: UserApp) -> None:
        """Start a user who has crashed, and wait until it is served and has all that was published."""
        user.start()
        self.wait_served(user)
        self.run(AT_ONCE_S)

    def expect_user_gaps(self, count: int, interest: Interest) -> None:
        """Note a failure unless the applications of users got this many gaps of an interest and its kind."""
        gaps = self.edge.audit_of(interest).totals.gaps
        self.expect(f"users get {count} gaps, not {gaps}", gaps == count, interest.name.encode())

    def close(self) -> None:
        """Wait until every user is served, publish everywhere once more, and wait until everybody has it."""
        alive = [user for user in self.edge.users if user.is_alive]
        for user in alive:
            if not self.world.run_until_true(partial(self.is_served, user), self.world.now + 3.0):
                self.expect(f"{user.name} is served in the end, alone", False)
        self.edge.logged_audit.calm()
        self.cluster.audit.calm()
        for interest in self.edge.logged:
            if any(interest in user.interests for user in alive):
                self.publish_logged(interest)
        super().close()
        for user in alive:
            holes = user.machine.counters["offsets_missing"]
            self.expect(f"{user.name} sees no hole in the offsets, not {holes}", self._makes_holes or not holes)

    def violations(self) -> list[Violation]:
        """Return everything that went wrong."""
        edge = self.edge
        problems = [*edge.problems(), *edge.problems_of_presence()]
        return [*super().violations(), *problems, *edge.logged_audit.finish(self.world.now)]
