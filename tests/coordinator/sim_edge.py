"""Coordinators and brokers over simulated servers, in virtual time, for tests of the coordinator's machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamoth.edge.frames import Connect, Leave, Move, SubscriptionRequest
from dynamoth.edge.interests import channel_interest
from dynamoth.machine.events import Connect as ConnectLink
from dynamoth.machine.events import LinkUp, Pushed, Send, Start
from dynamoth.names import OPERATOR_EDGE_CHANNEL, operator_inbox
from dynamoth.plan.plan import Server
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control, unpack_control
from dynamoth_broker.coordinator.events import Decision
from dynamoth_broker.coordinator.machine import CoordinatorMachine
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_broker.events import (
    BrokerOptions,
    ChannelConfirmed,
    Closed,
    Grant,
    Opened,
    Publications,
    Received,
    SubscribeChannel,
    Transmit,
)
from dynamoth_broker.machine import BrokerMachine
from dynamoth_sim.world.network import Delays, Network
from dynamoth_sim.world.process import Process
from dynamoth_sim.world.redis import RedisServer
from dynamoth_sim.world.world import World

OPTIONS = CoordinatorOptions(
    report_s=0.1,
    decide_s=0.2,
    looks=2,
    wait_s=0.3,
    rest_s=0.5,
    ask_timeout_s=0.3,
    batch_timeout_s=2.0,
    slow_half_life_s=0.2,
    fast_half_life_s=0.2,
    ratio_mean_min=0.01,
    shuffle_ratio_mean_min=5.0,
    connection_bytes_per_s=1.0,
    lease_s=1.5,
    forget_s=1.0,
)


class SimBroker:
    """A broker whose users move at once, in turn, and where every channel is confirmed at once."""

    def __init__(self, edge: SimEdge, name: str) -> None:
        self.edge = edge
        self.name = name
        self.url = f"wss://{name}/connect"
        self.options = BrokerOptions(
            id=name,
            url=self.url,
            control={server.id: server.url for server in edge.servers.values()},
            report_s=0.1,
            capacity_bytes_per_s=20_000,
            move_timeout_s=1.0,
            ping_s=1000.0,
        )
        self.process = Process(edge.world, edge.network, name, self._make, self._act)
        self.process.start()

    def _make(self, incarnation: int) -> BrokerMachine:
        return BrokerMachine(self.options, incarnation)

    @property
    def machine(self) -> BrokerMachine:
        assert isinstance(self.process.machine, BrokerMachine)
        return self.process.machine

    def open(self, user: str, channels: list[str]) -> None:
        subs = tuple(SubscriptionRequest(ref, channel_interest(channel)) for ref, channel in enumerate(channels, 1))
        self.process.handle(Opened(user, Connect(user, subs=subs), Grant()))

    def _act(self, action: Any) -> None:
        match action:
            case SubscribeChannel(channel):
                self.process.handle(ChannelConfirmed(channel))
            case Transmit(user, Move(to)) if user not in self.edge.staying:
                self.edge.world.after(0.01, self.edge.move, user, self, to[0])
            case _:
                pass


class SimEdge:
    """Servers, brokers, coordinators, users and publications, from a seed."""

    def __init__(self, servers: int = 3, brokers: int = 2, coordinators: int = 1, seed: int = 1) -> None:
        self.world = World(seed, check_every=1)
        delays = Delays(0.0005, 0.002)
        self.network = Network(self.world, lambda process, server: delays)
        self.servers: dict[str, RedisServer] = {}
        for number in range(servers):
            server = RedisServer(self.world, f"s{number + 1}", f"redis://s{number + 1}:6379")
            self.servers[server.id] = server
            self.network.add_server(server.url, server)
        self.staying: set[str] = set()
        self.brokers = {broker.url: broker for broker in (SimBroker(self, f"b{n + 1}") for n in range(brokers))}
        self.coordinators = [self._coordinator(f"c{number + 1}") for number in range(coordinators)]
        self.news: list[Any] = []
        self._channels: list[str] = []

    def _coordinator(self, name: str) -> Process:
        listed = [Server(server.id, server.url) for server in self.servers.values()]

        def make(incarnation: int) -> CoordinatorMachine:
            return CoordinatorMachine(listed, incarnation, OPTIONS)

        process = Process(self.world, self.network, name, make, lambda action: self.news.append(action))
        process.start()
        return process

    def coordinator(self, number: int = 0) -> CoordinatorMachine:
        machine = self.coordinators[number].machine
        assert isinstance(machine, CoordinatorMachine)
        return machine

    def plans(self) -> list[Decision]:
        """Return the decisions to move users: there is none while all users have just come."""
        return [decision for decision in self.coordinator().controller.decisions if decision.plan.moves]

    def leaders(self) -> list[str]:
        return [
            process.name
            for number, process in enumerate(self.coordinators)
            if process.alive and self.coordinator(number).is_leading
        ]

    def move(self, user: str, source: SimBroker, url: str) -> None:
        if user not in source.machine.sessions:
            return
        channels = [each.interest.interest.name for each in source.machine.sessions[user].subscriptions.values()]
        self.brokers[url].open(user, channels)
        source.process.handle(Received(user, Leave()))
        self.world.after(0.05, source.process.handle, Closed(user))

    def publish(self, channels: list[str]) -> None:
        """Publish 1000 bytes/s on each channel from now on."""
        self._channels = channels
        self._publish()

    def _publish(self) -> None:
        messages = [(channel.encode(), b"x" * 50) for channel in self._channels]
        for broker in self.brokers.values():
            if broker.process.alive:
                broker.process.handle(Publications(messages))
        self.world.after(0.05, self._publish)

    def users(self) -> list[int]:
        return [len(broker.machine.sessions) for broker in self.brokers.values() if broker.process.alive]

    def run(self, duration_s: float) -> None:
        self.world.run_until(self.world.now + duration_s)

    def until(self, condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
        assert self.world.run_until_true(condition, self.world.now + within_s), what

    def crowd(self, users: int = 12) -> None:
        """Have users at the first broker only, with traffic."""
        first = next(iter(self.brokers.values()))
        for number in range(users):
            first.open(f"u{number}", [f"ch{number % 4}"])
        self.publish([f"ch{number}" for number in range(4)])

    def ask(self, command: str, number: int, wait_s: float = 0.2, **arguments: Any) -> list[AdminReply]:
        """Send a request of an operator to everybody through a server; return the answers."""
        asker = Asker(AdminRequest(number, command, {"target": "coordinator", **arguments}))
        process = Process(self.world, self.network, f"o{number}", lambda _: asker, lambda _: None)
        process.start()
        self.run(wait_s)
        process.crash("is done")
        return asker.replies


class Asker:
    """An operator: asks at server s1, once."""

    def __init__(self, request: AdminRequest) -> None:
        self._request = request
        self.replies: list[AdminReply] = []

    def handle(self, event: Any, now: float) -> list[Any]:
        match event:
            case Start():
                return [ConnectLink("s", "redis://s1:6379")]
            case LinkUp():
                return [
                    Send("s", (b"SUBSCRIBE", operator_inbox(self._request.request))),
                    Send("s", (b"PUBLISH", OPERATOR_EDGE_CHANNEL, pack_control(self._request))),
                ]
            case Pushed(_, messages):
                for push in messages:
                    if push[0] == b"message":
                        reply = unpack_control(push[2])
                        assert isinstance(reply, AdminReply)
                        self.replies.append(reply)
            case _:
                pass
        return []

    def deadline(self) -> float | None:
        return None


def result_of(replies: list[AdminReply]) -> Mapping[str, Any]:
    [reply] = replies
    assert reply.error is None, reply.error
    return reply.result


def acting(replies: list[AdminReply]) -> Mapping[str, Any]:
    """Return the answer of the coordinator that acts."""
    assert all(reply.error is None for reply in replies), replies
    [result] = [reply.result for reply in replies if reply.result["leading"]]
    return result
