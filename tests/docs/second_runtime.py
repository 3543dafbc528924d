"""The client of ``second_client.py`` on real sockets: it publishes and subscribes as ``docs/protocol.md`` says.

Only what a client needs while nothing fails: connections are not made again, and nothing has a time limit but the test.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import hiredis
import msgpack

from tests.docs import second_client as second

PLAN = second.PREFIX + b"plan"
MOVE_SPREAD_S = 0.8
READ_AGAIN_S = 0.1
LOOK_AGAIN_S, LOOK_AGAIN_S_MAX = 0.25, 2.0


class Connection:
    """A RESP3 connection to one server; pushes that have come are in ``pushes``."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port))
        self.pushes: deque[list[Any]] = deque()
        self._replies: deque[Any] = deque()
        self._reader = hiredis.Reader()
        self.call(b"HELLO", b"3")
        [line] = [line for line in self.call(b"INFO", b"server").splitlines() if line.startswith(b"run_id:")]
        self.run_id = line.removeprefix(b"run_id:").decode()

    def send(self, *words: bytes) -> None:
        """Send a command without a reply: pushes answer SUBSCRIBE and UNSUBSCRIBE."""
        lines = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self.socket.sendall(b"*%d\r\n" % len(words) + lines)

    def call(self, *words: bytes) -> Any:
        """Send any other command and return its reply."""
        self.send(*words)
        while not self._replies:
            self.read()
        return self._replies.popleft()

    def read(self) -> None:
        """Read once from the socket, and keep the replies and pushes."""
        self._reader.feed(self.socket.recv(1 << 16))
        while (value := self._reader.gets()) is not False:
            (self.pushes if isinstance(value, hiredis.PushNotification) else self._replies).append(value)


class Node:
    """What publisher and subscriber share: the plan's header, and connections to its servers."""

    def __init__(self, id_: int, url: str, channel: bytes) -> None:
        self.id = id_
        self.channel = channel
        self.connections: dict[str, Connection] = {}
        first = Connection(url)
        self.plan = second.StoredPlan.read(first.call(b"HGETALL", PLAN))
        first.socket.close()
        self.route = self.plan.home(channel)

    def connection(self, server: str) -> Connection:
        if server not in self.connections:
            self.connections[server] = Connection(self.plan.servers[server])
            self.connected(self.connections[server])
        return self.connections[server]

    def connected(self, connection: Connection) -> None:
        """Be the first on a new connection."""

    def pushed(self, server: str, push: list[Any]) -> None:
        """Handle a push."""

    def tick(self) -> None:
        """Run the timers that have expired."""

    def take_pushes(self) -> None:
        for server, connection in list(self.connections.items()):
            while connection.pushes:
                self.pushed(server, connection.pushes.popleft())

    def close(self) -> None:
        for connection in self.connections.values():
            connection.socket.close()

    def read_entry(self, server: str) -> list[Any]:
        """Return the entry of the channel that is stored at a server."""
        connection = self.connection(server)
        slot = b"c:" + second.slot_name(self.channel)
        fields = (b"@version", b"@run", b"c:" + self.channel, b"@compatibility", b"@ring", slot)
        version, run, own, _, _, of_slot = connection.call(b"HMGET", PLAN, *fields)
        assert second.is_believed(version, run, connection.run_id)
        packed = own or (of_slot if self.plan.rule(self.channel) is None else None)
        entry: list[Any] = msgpack.unpackb(packed or second.pack([second.SETTLED, self.plan.home(self.channel), []]))
        return entry


class Publisher(Node):
    """Publishes on one channel."""

    def __init__(self, id_: int, url: str, channel: bytes) -> None:
        super().__init__(id_, url, channel)
        self.number = 0
        self.published_at = time.monotonic()
        self.places: list[second.Location] = []
        self.receivers: int | None = None

    def connected(self, connection: Connection) -> None:
        connection.send(b"SUBSCRIBE", second.inbox(self.id), second.PREFIX + b"inbox:all")

    def pushed(self, server: str, push: list[Any]) -> None:
        if push[0] == b"message":
            code, *fields = msgpack.unpackb(push[2])
            if code == 1 and fields[0] == self.channel:
                self.learn(fields[1])

    def learn(self, route: second.Route) -> None:
        if route[0] > self.route[0]:
            self.route = route[:3]

    def publish(self, payload: bytes) -> None:
        places = second.publishes_at(self.route, self.channel, self.id)
        flags = second.FIRST if not self.number else second.ROUTE_CHANGED if places != self.places else 0
        now = time.monotonic()
        quiet_ms = min(int((now - self.published_at) * 1000), 65_535)
        self.number += 1
        self.published_at, self.places = now, places
        data = second.seal(second.Envelope(flags, self.id, self.number, quiet_ms, self.route[0], payload))
        agents = len(places)
        self.receivers = sum(self.connection(server).call(b"PUBLISH", name, data) for server, name in places) - agents
        if flags & second.FIRST:
            for server, _ in places:
                self.learn(second.followed_route(self.read_entry(server)))


class Subscriber(Node):
    """Subscribes to one channel, and moves with it."""

    def __init__(self, id_: int, url: str, channel: bytes) -> None:
        super().__init__(id_, url, channel)
        self.confirmed_at: float | None = None
        self.delivered: dict[int, list[second.Delivered]] = {}
        self._streams: dict[int, second.Stream] = {}
        #: Where it listens, by the route that it follows; and whether the stored plan has said that this is right.
        self.targets: dict[second.Location, bool] = {}
        #: Where it still listens, with the markers that have come there: server to the largest number.
        self.leaving: dict[second.Location, dict[str, int]] = {}
        #: The number of the first announcement of each place.
        self._announced: dict[second.Location, int] = {}
        self._number = 0
        self._noticed_epoch = 0
        #: What is to be done, and when.
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._follow(self.route)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + delay_s, action))

    def _follow(self, route: second.Route) -> None:
        if self.targets and route[0] <= self.route[0]:
            return
        self.route = route[:3]
        wanted = second.listens_at(route, self.channel, self.id)
        self.leaving |= {place: {} for place in self.targets if place not in wanted}
        for server in self._old_servers():
            self.connection(server).send(b"SUBSCRIBE", second.inbox(self.id))
        self.targets = dict.fromkeys(wanted, False)
        for place in wanted:
            self.leaving.pop(place, None)
            self.connection(place[0]).send(b"SUBSCRIBE", place[1])
            self._announced[place] = self._announce(place)
            self._later(0, partial(self._verify, place))
        self._later(LOOK_AGAIN_S, partial(self._look_again, LOOK_AGAIN_S))

    def _old_servers(self) -> list[str]:
        return list(dict.fromkeys(server for server, _ in self.leaving))

    def _announce(self, place: second.Location) -> int:
        self._number += 1
        announcement = second.pack([5, self.id, self._number, [place[1]], [], self._old_servers()])
        self.connection(place[0]).call(b"PUBLISH", second.PREFIX + b"client:announce", announcement)
        return self._number

    def _look_again(self, waited_s: float) -> None:
        if self.leaving:
            for place in self.targets:
                self._announce(place)
                self._later(0, partial(self._verify, place))
            self._later(2 * waited_s, partial(self._look_again, min(2 * waited_s, LOOK_AGAIN_S_MAX)))

    def _verify(self, place: second.Location) -> None:
        """Judge a place by the entry that is stored at its server."""
        if place not in self.targets:
            return
        entry = self.read_entry(place[0])
        route = second.followed_route(entry)
        is_new = entry[0] == second.PREPARED and entry[1][:3] == self.route
        if place not in second.locations(route, self.channel) and not is_new:
            self._follow(route)
            if place in self.targets:
                self._later(READ_AGAIN_S, partial(self._verify, place))
            return
        self.targets[place] = True
        if self.confirmed_at is None and all(self.targets.values()):
            assert entry[0] == second.SETTLED, "this test subscribes at rest"
            self.confirmed_at = time.monotonic()
        self._leave_marked()

    def _leave_marked(self) -> None:
        if not all(self.targets.values()):
            return
        for place, markers in list(self.leaving.items()):
            if all(markers.get(target[0], 0) >= self._announced[target] for target in self.targets):
                del self.leaving[place]
                self.connection(place[0]).send(b"UNSUBSCRIBE", place[1])

    def pushed(self, server: str, push: list[Any]) -> None:
        if push[0] != b"message":
            return
        place = (server, push[1])
        envelope = second.unseal(push[2])
        assert envelope is not None, "nobody publishes plain messages here"
        if envelope.flags & second.CONTROL:
            self._told(server, msgpack.unpackb(envelope.payload))
        elif place in self.targets or place in self.leaving:
            if self.leaving and place in self.targets:
                envelope = envelope._replace(flags=envelope.flags | second.ROUTE_CHANGED)
            assert self.confirmed_at is not None, "nobody publishes before the confirmation here"
            stream = self._streams.setdefault(envelope.publisher, second.Stream(self.confirmed_at))
            out = self.delivered.setdefault(envelope.publisher, [])
            out += stream.arrive(envelope, time.monotonic())

    def _told(self, server: str, message: list[Any]) -> None:
        match message:
            case [1, self.channel, route]:
                if route[0] > self._noticed_epoch:
                    self._noticed_epoch = route[0]
                    self._later(MOVE_SPREAD_S * (self.id % 1024) / 1024, partial(self._follow, route))
            case [2, self.channel, new_server, number]:
                for place, markers in self.leaving.items():
                    if place[0] == server:
                        markers[new_server] = max(number, markers.get(new_server, 0))
                self._leave_marked()
            case _:
                raise AssertionError(f"nothing is lost in this test, but {server} says {message}")

    def tick(self) -> None:
        """Run the timers that have expired."""
        now = time.monotonic()
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()
        for publisher, stream in self._streams.items():
            self.delivered[publisher] += stream.tick(now)


def turn(*nodes: Node, timeout_s: float = 0.002) -> None:
    """Read from all sockets of the nodes, handle their pushes, and run expired timers."""
    sockets = {link.socket: link for node in nodes for link in node.connections.values()}
    for ready in select.select([*sockets], [], [], timeout_s)[0]:
        sockets[ready].read()
    for node in nodes:
        node.take_pushes()
        node.tick()
