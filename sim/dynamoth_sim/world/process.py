"""The simulated driver: one process that runs one machine, and can be paused, crashed and started again.

It keeps the contract of ``dynamoth.machine.events`` as the real driver does: an event goes into the machine, the
actions that come out are executed in their order, and only then the next event goes in. A link is opened again
with backoff until it is disconnected, what is sent on a link that is down is dropped, consecutive pushes that
arrive together are one event, and a :class:`Tick` comes at the machine's deadline or a little later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from dynamoth.machine.events import (
    CommandPart,
    Connect,
    Disconnect,
    LinkDown,
    LinkUp,
    Machine,
    OnPushes,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    SendAll,
    Start,
    Tick,
)
from dynamoth_sim.world.invariants import Checker
from dynamoth_sim.world.network import Connection, End, Network, Packet, Pipe
from dynamoth_sim.world.redis import COMMAND_BYTES, Greeting, Reply
from dynamoth_sim.world.world import Timer, World

BACKOFF_S_MIN = 0.01
BACKOFF_S_MAX = 0.1
"""A tenth of what the real driver waits: in the simulator everything is short."""

TICK_LATENESS_S_MAX = 0.001
"""How much later than asked for a tick may come; a real event loop is no better."""

SPINS_MAX = 1000
"""Ticks at one moment that a machine may ask for; more is a machine that forgets to move its deadline."""


class MachineFailed(Exception):
    """Raised when a machine raised, or asked for the impossible: a bug of the machine."""


@dataclass(slots=True)
class _Link:
    """A link that the machine has asked for."""

    name: str
    url: str
    #: None while an attempt to connect is under way, or waits.
    connection: Connection | None = None
    up: bool = False
    failures: int = 0


class _Together:
    """The tag of the commands of one ``SendAll``."""

    def __init__(self, tag: Any) -> None:
        self.tag = tag


def _kind(item: Any) -> object:
    """Return the kind of an item: consecutive items of equal kind are one event."""
    if isinstance(item, Reply):
        return item.tag if isinstance(item.tag, _Together) else Reply
    return cast("type[object]", type(item))


class Process:
    """Runs one machine.

    Args:
        world: time and chance.
        network: where servers are found.
        name: for traces and for faults that choose this process.
        make_machine: makes the machine at each start; takes a random 63-bit incarnation, new for each.
        on_action: executes the machine's own actions. It may call :meth:`handle`.
        on_pushes: see :data:`dynamoth.machine.events.OnPushes`.

    """

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        make_machine: Callable[[int], Machine[Any, Any]],
        on_action: Callable[[Any], None],
        on_pushes: OnPushes | None = None,
    ) -> None:
        self._world = world
        self._network = network
        self.name = name
        self._make_machine = make_machine
        self._on_action = on_action
        self._on_pushes = on_pushes
        #: None before the first start and after a crash.
        self.machine: Machine[Any, Any] | None = None
        self._checker = Checker(None, 0)
        self._links: dict[str, _Link] = {}
        self._waiting: deque[Any] = deque()
        self._busy = False
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._spins = 0
        self._pauses = 0
        #: How often it has crashed: a pause ends with the machine that stood still.
        self._crashes = 0
        #: The pipes that are not read from for now.
        self._unread_pipes: list[Pipe] = []
        #: What has come in during a pause: packets by connection; and everything else, to be done afterwards.
        self._unread: dict[Connection, list[Packet]] = {}
        self._postponed: list[Callable[[], None]] = []

    # Life.

    @property
    def alive(self) -> bool:
        """Whether a machine runs (or is paused)."""
        return self.machine is not None

    @property
    def paused(self) -> bool:
        """Whether the process is paused."""
        return self._pauses > 0

    def start(self) -> None:
        """Start a new machine."""
        assert self.machine is None, f"{self.name} runs already"
        self.machine = self._make_machine(self._world.random.getrandbits(63))
        self._checker = Checker(self.machine, self._world.check_every)
        self._note("fault" if self._world.now else "link", "starts")
        self.handle(Start())

    def crash(self, reason: str = "crashes", connections_linger: bool = False) -> None:
        """End at once. What was sent goes out, and servers see the connections end.

        ``connections_linger``: the machine it ran on is gone too, so servers find out late.
        """
        assert self.machine is not None, f"{self.name} does not run"
        self._note("fault", reason)
        self.machine = None
        self._pauses = 0
        self._crashes += 1
        self._cancel_timer()
        for link in self._links.values():
            if link.connection is not None:
                link.connection.to_server.end(reason, self._world.random.random() if connections_linger else 0.0)
                link.connection.to_client.ended = True
        self._links = {}
        self._waiting.clear()
        self._unread = {}
        self._postponed = []

    def pause(self, duration_s: float | None = None) -> None:
        """Pause: handle nothing, let timers wait and input queue up. None: until :meth:`resume`."""
        self._note("fault", "pauses" if duration_s is None else f"pauses for {duration_s:.3f} s")
        self._pauses += 1
        if duration_s is not None:
            self._world.after(duration_s, self._pause_is_over, self._crashes)

    def _pause_is_over(self, crashes: int) -> None:
        if crashes == self._crashes:
            self.resume()

    def resume(self) -> None:
        """End one pause; after the last one, handle what has queued up."""
        self._pauses -= 1
        if self._pauses:
            return
        unread, self._unread = self._unread, {}
        postponed, self._postponed = self._postponed, []
        if self.machine is None:
            return
        self._note("fault", "goes on")
        connections = list(unread)
        self._world.random.shuffle(connections)
        for connection in connections:
            packets = unread[connection]
            merged = Packet(self._world.now, None, sum(packet.size for packet in packets))
            merged.items = [item for packet in packets for item in packet.items]
            self._receive(connection, merged)
        for action in postponed:
            action()
        self._set_timer()

    def pause_reading(self) -> None:
        """Stop reading from the present connections until ``resume_reading``."""
        self._unread_pipes = [link.connection.to_client for link in self._links.values() if link.connection is not None]
        for pipe in self._unread_pipes:
            pipe.hold()

    def resume_reading(self) -> None:
        """Read again."""
        pipes, self._unread_pipes = self._unread_pipes, []
        for pipe in pipes:
            pipe.release()

    def _note(self, kind: str, text: str) -> None:
        self._world.trace.add((self._world.now, kind, self.name, None, None, None, text))

    # The machine.

    def handle(self, event: Any) -> None:
        """Hand an event to the machine and execute its actions. Events to a dead process are lost."""
        if self.machine is None:
            return
        if self._pauses:
            self._postponed.append(lambda: self.handle(event))
            return
        self._waiting.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._step(self._waiting.popleft())
        except MachineFailed:
            self.crash("is broken")
            raise
        finally:
            self._busy = False
        self._set_timer()

    def _step(self, event: Any) -> None:
        machine = self.machine
        if machine is None:
            return
        try:
            actions = machine.handle(event, self._world.now)
            self._checker.after(event)
        except Exception as error:
            raise MachineFailed(f"{self.name} raised {error!r} for {event!r:.400}") from error
        for action in actions:
            if type(action) is Send:
                self._send(action.link, action.args, action.tag)
            elif type(action) is SendAll:
                together = _Together(action.tag)
                for args in action.commands:
                    self._send(action.link, args, together)
            elif type(action) is Connect:
                self._connect(action)
            elif type(action) is Disconnect:
                self._disconnect(action)
            else:
                self._on_action(action)

    # Links.

    def _send(self, name: str, args: Sequence[CommandPart], tag: Any) -> None:
        link = self._links.get(name)
        if link is None or not link.up:
            return
        assert link.connection is not None
        last = args[-1]
        size = COMMAND_BYTES + (len(last) if isinstance(last, bytes) else 0)
        link.connection.to_server.send((args, tag), size)

    def _connect(self, action: Connect) -> None:
        if action.link in self._links:
            raise MachineFailed(f"{self.name} connects link {action.link!r} twice")
        link = self._links[action.link] = _Link(action.link, action.url)
        self._open(link)

    def _open(self, link: _Link) -> None:
        if self._links.get(link.name) is not link:
            return  # disconnected in the meantime, or the process has crashed

        def receive(connection: Connection, packet: Packet) -> None:
            if not packet.items:
                return  # they were lost
            if self._links.get(link.name) is not link:
                connection.to_server.end("closed by the client")
                connection.to_client.ended = True
                return
            if link.connection is None:
                link.connection = connection
            if self._pauses:
                self._unread.setdefault(connection, []).append(packet)
            else:
                self._receive(connection, packet)

        self._network.open(self.name, link.url, receive, lambda reason: self._failed(link, reason))

    def _failed(self, link: _Link, reason: str) -> None:
        if self._pauses:
            self._postponed.append(lambda: self._failed(link, reason))
        elif self._links.get(link.name) is link:
            self._down(link, reason)

    def _disconnect(self, action: Disconnect) -> None:
        link = self._links.pop(action.link, None)
        if link is not None and link.connection is not None:
            link.connection.to_server.end("closed by the client")
            link.connection.to_client.ended = True

    def _link_of(self, connection: Connection) -> _Link | None:
        for link in self._links.values():
            if link.connection is connection:
                return link
        return None

    def _receive(self, connection: Connection, packet: Packet) -> None:
        """Hand the items of a connection to the machine, in order; those of one kind in a row are one event."""
        connection.unread_bytes -= packet.size
        if len(packet.items) == 1 and type(packet.items[0]) is list:  # nearly always
            self._pushed(connection, packet.items)
            return
        for kind, items in groupby(packet.items, _kind):
            if kind is list:
                self._pushed(connection, list(items))
            elif isinstance(kind, _Together):
                link = self._link_of(connection)
                if link is not None:
                    self.handle(RepliedAll(link.name, kind.tag, [item.value for item in items]))
            else:
                for item in items:
                    self._on_reply(connection, item)

    def _pushed(self, connection: Connection, pushes: list[Any]) -> None:
        link = self._link_of(connection)
        if link is None:
            return
        world = self._world
        for push in pushes:
            if len(push) == 4 or push[0] == b"message":
                world.trace.add((world.now, "gets", self.name, connection.server, push[-2], push[-1], None))
        if self._on_pushes is not None and self.machine is not None and not self._busy:
            pushes = pushes[self._on_pushes(link.name, pushes) :]
        if pushes:
            self.handle(Pushed(link.name, pushes))

    def _on_reply(self, connection: Connection, item: Any) -> None:
        link = self._link_of(connection)
        if link is None:
            return
        if type(item) is Reply:
            self.handle(Replied(link.name, item.tag, item.value))
        elif type(item) is Greeting:
            link.up = True
            link.failures = 0
            self._world.trace.add((self._world.now, "link", self.name, connection.server, None, None, "up"))
            self.handle(LinkUp(link.name, item.run_id))
        else:
            assert type(item) is End, f"not an item of a connection: {item!r}"
            connection.to_server.end("closed by the client")
            self._down(link, item.reason)

    def _down(self, link: _Link, reason: str) -> None:
        link.connection = None
        link.up = False
        link.failures += 1
        self._world.trace.add((self._world.now, "link", self.name, link.url, None, None, f"down: {reason}"))
        backoff = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2.0 ** min(link.failures - 1, 10))
        self._world.after(backoff * (0.5 + 0.5 * self._world.random.random()), self._open, link)
        self.handle(LinkDown(link.name, reason))

    # Time.

    def _set_timer(self) -> None:
        """Set the timer to the machine's deadline; a timer that goes off too early is set again then."""
        if self.machine is None or self._pauses or self._busy:
            return
        deadline = self.machine.deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        self._cancel_timer()
        lateness = TICK_LATENESS_S_MAX * self._world.random.random()
        self._timer_at = deadline
        self._timer = self._world.at(max(deadline, self._world.now) + lateness, self._time_is_up)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self.machine is None or self._pauses:
            return
        deadline = self.machine.deadline()
        if deadline is None or deadline > self._world.now:
            self._set_timer()
            return
        self.handle(Tick())
        after = self.machine.deadline() if self.alive else None
        self._spins = self._spins + 1 if after is not None and after <= deadline else 0
        if self._spins > SPINS_MAX:
            raise MachineFailed(f"{self.name} does not move its deadline {after} at {self._world.now}")
