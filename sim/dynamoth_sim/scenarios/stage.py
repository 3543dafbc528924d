"""A small cluster whose every connection can be held up: where scenarios are played."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.names import AGENT_CHANNEL
from dynamoth.plan.plan import Assignment, Entry, Phase, single
from dynamoth.protocol.control import unpack_control
from dynamoth.protocol.envelope import CONTROL, is_enveloped, open_envelope
from dynamoth_sim.audit import Violation
from dynamoth_sim.cluster import Cluster, Setting, short_options
from dynamoth_sim.load.clients import Client, PatternSubscriberApp, PublisherApp, SubscriberApp
from dynamoth_sim.load.plain import RawPublisherApp
from dynamoth_sim.world.network import Delays, Pipe
from dynamoth_sim.world.trace import Record
from dynamoth_sim.world.world import World

PATIENCE_S = 10.0
"""How long a scenario waits for what must happen."""


HOLD_S_MAX = 1.0
"""How long subscribers hold messages back."""

LITTLE_BYTES_PER_S = 120_000
"""The capacity of servers in scenarios where the balancer has reasons to move channels."""


class SceneFailed(Exception):
    """Raised when a scenario cannot go on, as something that must happen did not; it has been noted as a violation."""


@dataclass(frozen=True, slots=True)
class Scenario(Setting):
    """A script, and the cluster that it is written for."""

    play: Callable[[Stage], None]
    #: Quick and nearly constant: in a scenario only held connections are slow.
    delays: Delays = field(default=Delays(base_s=0.0005, jitter_s=0.0005), kw_only=True)
    #: Whether the cluster runs when the script begins; otherwise the script calls :meth:`Stage.open`.
    opened: bool = True


class Stage:
    """A cluster under a script.

    Args:
        world: time and chance.
        setting: what the cluster is like.

    """

    def __init__(self, world: World, setting: Setting) -> None:
        self.world = world
        self.cluster = Cluster(world, short_options(setting, hold_s_max=HOLD_S_MAX))
        self._problems: list[Violation] = []

    # Time.

    def run(self, duration_s: float) -> None:
        """Advance the clock."""
        self.world.run_until(self.world.now + duration_s)

    def wait(self, what: str, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Advance the clock until a condition holds; if it does not in time, the scenario fails and ends."""
        if not self.world.run_until_true(condition, self.world.now + patience_s, poll_s=0.01):
            self.expect(what, False)
            raise SceneFailed(what)

    # What must be.

    def expect(self, what: str, holds: bool, channel: bytes | None = None) -> None:
        """Note a failure unless ``holds``. ``channel`` is whose story explains it."""
        if not holds:
            story = [] if channel is None else self.world.trace.story(channel, None)
            self._problems.append(Violation("expected", what, self.world.now, channel, story=story))

    def expect_gaps(self, count: int, channel: bytes) -> None:
        """Note a failure unless subscribers have reported ``count`` gaps so far."""
        gaps = self.cluster.audit.totals.gaps
        self.expect(f"subscribers report {count} gaps, not {gaps}", gaps == count, channel)

    def close(self) -> None:
        """Wait until everything is at rest, publish once more everywhere, and wait until every subscriber has it."""
        publishers = [client.publisher for client in self.cluster.clients if client.publisher is not None]
        used = [(publisher, channel) for publisher in publishers for channel in publisher.channels]
        self.wait_settled(*(channel for _, channel in used))
        self.run(0.3)
        for publisher, channel in used:
            publisher.publish(channel)
        self.run(self.cluster.options.client.subscriber.hold_s_max + 0.5)

    def violations(self) -> list[Violation]:
        """Return everything that went wrong."""
        return [*self._problems, *self.cluster.audit.finish(self.world.now)]

    # Actors.

    def open(self) -> None:
        """Start the cluster, and wait until every server stores a plan."""
        self.cluster.start()
        self.wait("every server stores a plan", lambda: all(self.cluster.stored_plan(s) for s in self.cluster.servers))
        self.run(0.5)

    def client(self, name: str, subscribers: int, pattern_subscribers: int = 0) -> Client:
        """Start a client, and wait until it can work."""
        client = self.cluster.add_client(name, subscribers, pattern_subscribers)
        client.start()
        self.wait(f"{name} reads the plan", lambda: client.ready)
        return client

    def publisher(self, name: str, *channels: bytes) -> PublisherApp:
        """Start a publisher that knows nothing of the plan but the ring. It publishes once on each channel."""
        app = self.client(name, 0).publisher
        assert app is not None
        for channel in channels:
            self.publish(app, channel)
        return app

    def trusting_publisher(
        self, name: str, *channels: bytes, for_s: float = 60.0, silent_s: float = 60.0
    ) -> PublisherApp:
        """Start a publisher that looks only every ``for_s`` whether the plan has changed; real ones do each second.

        It asks another server where channels are when one has not answered for ``silent_s``. It publishes once on each
        of ``channels``.
        """
        cluster = self.cluster
        options = cluster.options
        rare = replace(options.client.publisher, observers_interval_s=for_s, silent_s=silent_s)
        cluster.options = replace(options, client=replace(options.client, publisher=rare))
        publisher = self.publisher(name, *channels)
        cluster.options = options
        return publisher

    def subscriber(self, name: str, *channels: bytes) -> SubscriberApp:
        """Start a subscriber, and wait until its subscriptions are confirmed."""
        app = self.client(name, 1).subscribers[0]
        for channel in channels:
            self.join(app, channel)
        return app

    def pattern_subscriber(self, name: str, *patterns: bytes) -> PatternSubscriberApp:
        """Start a subscriber to patterns, and wait until its subscriptions are confirmed."""
        [app] = self.client(name, 0, 1).pattern_subscribers
        for pattern in patterns:
            app.subscribe(pattern)
        self.wait(f"{name} is confirmed", lambda: all(map(app.is_confirmed, patterns)))
        return app

    def raw_publisher(self, name: str, server: str, channel: bytes) -> RawPublisherApp:
        """Start a plain Redis client that publishes at a server. A name that begins with "raw" promises no order."""
        app = RawPublisherApp(self.cluster, name, self.cluster.servers[server].url, channel)
        app.process.start()
        self.run(0.1)
        return app

    def join(self, app: SubscriberApp, channel: bytes) -> None:
        """Subscribe, and wait for the confirmation."""
        app.subscribe(channel)
        self.wait(f"{app.name} is confirmed", lambda: self.cluster.audit.is_open(app.name, channel))

    def publish(self, app: PublisherApp, channel: bytes, times: int = 1) -> None:
        """Publish, and wait until the publish has ended."""
        for _ in range(times):
            app.publish(channel)
            self.wait(f"{app.name} publishes", lambda: not app.pending(channel))

    def channel_at(self, server: str, name: str = "c") -> bytes:
        """Return a channel whose home is ``server``."""
        plan = self.cluster.stored_plan(server)
        assert plan is not None
        return next(
            channel
            for channel in (f"{name}{number}".encode() for number in range(10_000))
            if plan.ring.home(channel) == server
        )

    def channel_with_subscriber(self, server: str) -> bytes:
        """Return a channel whose home is ``server``, and to which a new subscriber, S, is subscribed."""
        channel = self.channel_at(server)
        self.subscriber("S", channel)
        return channel

    def add_server(self) -> str:
        """Start another server, and have it added to the plan. Return its id."""
        added = self.cluster.add_server()
        self.change_server("add", added)
        self.wait(f"{added} stores the plan", lambda: self.cluster.stored_plan(added) is not None)
        return added

    def change_server(self, action: str, server: str) -> None:
        """Have a server added, drained or removed, and wait until that is done."""
        request = self.cluster.change_server(action, server)
        self.wait(f"the balancer answers to {action} {server}", lambda: request in self.cluster.answers)
        answer = self.cluster.answers[request]
        self.expect(f"{action} {server} is carried out, not refused: {answer}", answer is None)

    # Moves.

    def entry(self, channel: bytes, server: str = "s1") -> Entry:
        """Return what the plan stored at a server says of a channel."""
        plan = self.cluster.stored_plan(server)
        assert plan is not None
        return plan.entry(channel)

    def is_at(self, channel: bytes, server: str, phase: Phase) -> bool:
        """Tell whether every server's plan has a channel at ``server``, in ``phase`` or a later one."""
        return self.holds(channel, single(server), phase)

    def holds(self, channel: bytes, assignment: Assignment, phase: Phase) -> bool:
        """Tell whether every server's plan has a channel as ``assignment`` says, in ``phase`` or a later one."""
        entries = [self.entry(channel, id_) for id_ in self.cluster.present]
        return all(entry.route.assignment == assignment and entry.phase >= phase for entry in entries)

    def move(self, channel: bytes, to: str, phase: Phase = Phase.SETTLED) -> None:
        """Move a channel, and wait until the move has come to ``phase``."""
        self.change(channel, single(to), phase)

    def change(self, channel: bytes, assignment: Assignment, phase: Phase = Phase.SETTLED) -> None:
        """Change where a channel is, and wait until the change has come to ``phase``."""
        self.cluster.change(channel, assignment)
        what = f"{channel.decode()} is {phase.name} as {assignment.mode.name} at {'+'.join(assignment.servers)}"
        self.wait(what, lambda: self.holds(channel, assignment, phase))

    def wait_settled(self, *channels: bytes) -> None:
        """Wait until nothing is in transition any more and every administrator has an answer."""
        if not self.world.run_until_true(self.cluster.settled, self.world.now + PATIENCE_S, poll_s=0.01):
            self.expect("; ".join(self.cluster.unsettled()), False, channels[0] if channels else None)

    # Trouble.

    def flush_all(self) -> None:
        """Delete all keys of all servers."""
        for server in self.cluster.servers.values():
            server.flush()

    def pipes(self, process: str, server: str, to_server: bool) -> list[Pipe]:
        """Return one direction of the connections between a process (or all whose names begin so) and a server."""
        return [
            connection.to_server if to_server else connection.to_client
            for connection in self.cluster.network.connections(server=server)
            if connection.process == process or connection.process.startswith(process + ".")
        ]

    @contextmanager
    def held(self, process: str, server: str, *, to_server: bool) -> Generator[None]:
        """Hold up one direction of the connections that a process has to a server now."""
        pipes = self.pipes(process, server, to_server)
        assert pipes, f"{process} has no connection to {server}"
        for pipe in pipes:
            pipe.hold()
        try:
            yield
        finally:
            for pipe in pipes:
                pipe.release()

    @contextmanager
    def losing(self, server: str, lost: Callable[[bytes, bytes], bool]) -> Generator[None]:
        """Drop, at a server, the messages for which ``lost(channel, data)`` is True."""
        model = self.cluster.servers[server]
        model.meddle = lambda _, channel, data: 0 if lost(channel, data) else 1
        try:
            yield
        finally:
            model.meddle = None

    def deaf_agent(self, server: str) -> AbstractContextManager[None]:
        """Lose what the balancer says to the agent of a server."""
        return self.losing(server, lambda channel, _: channel == AGENT_CHANNEL)

    def cut(self, process: str, server: str) -> None:
        """Break the connections between a process and a server, with everything that is under way on them."""
        for connection in self.cluster.network.connections(process, server):
            self.cluster.network.break_connection(connection, lose_all=True)

    # Looking back.

    def records(self, kind: str, *, since: float = 0.0, **fields: Any) -> list[Record]:
        """Return what has happened, of one kind and with these fields."""
        return [
            record
            for record in self.world.trace
            if record.kind == kind
            and record.at >= since
            and all(getattr(record, name) == value for name, value in fields.items())
        ]


def control_in(data: bytes | None) -> Any:
    """Return the control message that is in an envelope or bare; None when there is none."""
    if data is None:
        return None
    try:
        if is_enveloped(data):
            envelope = open_envelope(data)
            return unpack_control(envelope.payload) if envelope.flags & CONTROL else None
        return unpack_control(data)
    except MalformedMessage:
        return None
