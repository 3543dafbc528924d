"""A simulated broker: its machine, with the machines of a Dynamoth client, and the connections of its users."""

from __future__ import annotations

from itertools import count
from typing import Any

from dynamoth.edge import frames
from dynamoth.edge.frames import Connect, Refresh, to_wire
from dynamoth_broker.events import (
    BarrierPassed,
    Broadcast,
    BrokerOptions,
    ChannelConfirmed,
    ChannelEnded,
    ChannelFailed,
    ChannelGap,
    CloseConnection,
    Closed,
    ControlLinkChanged,
    Grant,
    LogLinkChanged,
    MessagePublished,
    MoveSession,
    Noted,
    Opened,
    Overflowed,
    Publications,
    PublishMessage,
    RaiseBarrier,
    Received,
    Stopped,
    SubscribeChannel,
    Transmit,
    UnsubscribeChannel,
    Writable,
)
from dynamoth_broker.machine import BrokerMachine
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.events import Publish, Published, PublishedAll, PublishFailed
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_client.machines.subscriber import events as subscriber
from dynamoth_client.machines.subscriber.events import SubscriberOptions
from dynamoth_client.machines.subscriber.machine import SubscriberMachine
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.edge.users import USER
from dynamoth_sim.edge.wires import Wire, WireFrame
from dynamoth_sim.load.clients import HeaderRead, HeaderReader
from dynamoth_sim.world.process import Process

ANYTHING = Grant(USER, publish=("*",))


class BrokerApp:
    """One broker process. Its three machines live and die together.

    Args:
        cluster: the Dynamoth cluster that it uses.
        options: of the broker.
        seed_urls: where it finds the cluster.

    """

    def __init__(self, cluster: Cluster, options: BrokerOptions, subscriber_options: SubscriberOptions) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.options = options
        self.name = options.id
        self.url = f"wss://{options.id}"
        self._subscriber_options = subscriber_options
        self._reader: Process | None = None
        self.broker: Process | None = None
        self._subscriber: Process | None = None
        self._publisher: Process | None = None
        self.wires: dict[int, Wire] = {}
        self._tokens: dict[int, object] = {}
        self._numbers = count(1)
        self._generation = 0

    @property
    def processes(self) -> list[Process]:
        """Everything that runs now."""
        every = (self._reader, self.broker, self._subscriber, self._publisher)
        return [process for process in every if process is not None]

    @property
    def is_ready(self) -> bool:
        """Whether it takes users."""
        return self.broker is not None

    @property
    def machine(self) -> BrokerMachine:
        """The broker's machine."""
        assert self.broker is not None
        assert isinstance(self.broker.machine, BrokerMachine)
        return self.broker.machine

    # Life.

    def start(self) -> None:
        """Begin by reading the plan."""
        self._generation += 1
        url = self.world.random.choice([server.url for server in self.cluster.servers.values()])
        self._reader = Process(
            self.world, self.cluster.network, f"{self.name}.reader", lambda _: HeaderReader(url), self._begin
        )
        self._reader.start()

    def _begin(self, action: HeaderRead) -> None:
        assert self._reader is not None
        reader, self._reader = self._reader, None
        reader.crash("has read the plan")
        plan = LocalPlan(action.plan, self.cluster.options.client.entry_idle_s)
        world, network = self.world, self.cluster.network

        def make_subscriber(incarnation: int) -> SubscriberMachine:
            return SubscriberMachine(incarnation, plan, self._subscriber_options)

        def make_publisher(incarnation: int) -> PublisherMachine:
            return PublisherMachine(incarnation, plan, self.cluster.options.client.publisher)

        def make_broker(incarnation: int) -> BrokerMachine:
            return BrokerMachine(self.options, incarnation)

        self._subscriber = Process(world, network, f"{self.name}.s", make_subscriber, self._on_subscriber)
        self._publisher = Process(world, network, f"{self.name}.p", make_publisher, self._on_publisher)
        self.broker = Process(world, network, self.name, make_broker, self._act)
        for process in (self._subscriber, self._publisher, self.broker):
            process.start()

    def pause(self, duration_s: float) -> None:
        """Pause all of it."""
        for process in self.processes:
            process.pause(duration_s)

    def crash(self, notice_s_max: float = 0.0) -> None:
        """End at once. Users learn of it within ``notice_s_max``."""
        for process in self.processes:
            process.crash("crashes")
        self._reader = self.broker = self._subscriber = self._publisher = None
        wires, self.wires = self.wires, {}
        for wire in wires.values():
            wire.lose(notice_s_max, self.world.random.random)
        self._tokens.clear()

    # Users.

    def accept(self, wire: Wire) -> None:
        """Take a connection of a user."""
        self.wires[wire.id] = wire
        wire.on_full = lambda each: self._tell(Overflowed(each.id))
        wire.on_room = lambda each: self._tell(Writable(each.id))

    def receive(self, wire: Wire, frame: WireFrame) -> None:
        """Take a frame of a user."""
        if wire.id not in self.wires:
            return
        match frames.read_user_frame(frame):
            case Connect() as connect:
                wire.is_opened = True
                self._tell(Opened(wire.id, connect, ANYTHING, connect.session))
            case Refresh():
                raise AssertionError("simulated users have no tokens")
            case other:
                self._tell(Received(wire.id, other))

    def ended(self, wire: Wire, code: int, reason: str) -> None:
        """Note that a user's connection is gone."""
        if self.wires.pop(wire.id, None) is not None and wire.is_opened:
            self._tell(Closed(wire.id, code))

    def move(self, connection: int, to: tuple[str, ...]) -> None:
        """Ask a user to move."""
        self._tell(MoveSession(connection, to))

    def _tell(self, event: Any) -> None:
        if self.broker is not None:
            self.broker.handle(event)

    # The broker's machine.

    def _act(self, action: Any) -> None:
        match action:
            case Transmit(connection, frame):
                self._send(connection, to_wire(frame))
            case Broadcast(connections, frame):
                wire_frame = to_wire(frame)
                for connection in connections:
                    self._send(connection, wire_frame)
            case CloseConnection(connection, code, reason):
                assert isinstance(connection, int)
                wire = self.wires.pop(connection, None)
                if wire is not None:
                    wire.close_by_broker(code, reason)
                    self._tell(Closed(connection))
            case SubscribeChannel(channel):
                self._subscribe(subscriber.Subscribe((channel,)))
            case UnsubscribeChannel(channel):
                self._subscribe(subscriber.Unsubscribe((channel,)))
            case RaiseBarrier(channel):
                self._subscribe(subscriber.RaiseBarrier(channel))
            case PublishMessage(channel, payload, token):
                assert self._publisher is not None
                number = next(self._numbers)
                self._tokens[number] = token
                self._publisher.handle(Publish(number, channel, payload))
            case Stopped() | LogLinkChanged() | ControlLinkChanged() | Noted():
                pass
            case _:
                raise AssertionError(f"not an action of a broker: {action!r}")

    def _send(self, connection: Any, frame: WireFrame) -> None:
        wire = self.wires.get(connection)
        if wire is not None:
            wire.send_down(frame)

    def _subscribe(self, event: Any) -> None:
        assert self._subscriber is not None
        self._subscriber.handle(event)

    # The machines of the Dynamoth client.

    def _on_subscriber(self, action: Any) -> None:
        match action:
            case subscriber.Deliver(messages):
                self._tell(Publications(list(messages)))
            case subscriber.SubscriptionConfirmed(channel):
                self._tell(ChannelConfirmed(channel))
            case subscriber.SubscriptionEnded(channel):
                self._tell(ChannelEnded(channel))
            case subscriber.SubscriptionFailed(channel, reason):
                self._tell(ChannelFailed(channel, reason))
            case subscriber.GapDetected(channel, _, lost, reason):
                self._tell(ChannelGap(channel, lost, reason))
            case subscriber.BarrierPassed(channel):
                self._tell(BarrierPassed(channel))
            case _:
                raise AssertionError(f"not an action of a subscriber: {action!r}")

    def _on_publisher(self, action: Any) -> None:
        outcomes: list[tuple[Any, str | None]]
        match action:
            case PublishedAll(tokens, _):
                outcomes = [(token, None) for token in tokens]
            case Published(token, _):
                outcomes = [(token, None)]
            case PublishFailed(token, reason):
                outcomes = [(token, reason)]
            case _:
                raise AssertionError(f"not an action of a publisher: {action!r}")
        for number, why_not in outcomes:
            token = self._tokens.pop(number)
            if token is not None:
                self._tell(MessagePublished(token, why_not))
