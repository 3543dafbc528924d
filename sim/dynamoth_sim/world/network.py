"""Connections between processes and servers: two pipes each, with random delays, that can be held up and broken.

Messages keep their order within a pipe and nothing else: any two connections, and the two directions of one, reorder
freely against each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from dynamoth_sim.world.world import World


@dataclass(frozen=True, slots=True)
class Delays:
    """How long a message is under way: ``base_s`` plus up to ``jitter_s``; sometimes instead up to ``spike_s`` more.

    ``spike_ratio`` of the messages are hit by a spike. ``bytes_per_s`` is the rate of the line, 0 for no limit.
    """

    base_s: float = 0.0005
    jitter_s: float = 0.001
    spike_s: float = 0.0
    spike_ratio: float = 0.0
    bytes_per_s: float = 0.0


DEFAULT_DELAYS = Delays()
CALM = Delays(base_s=0.0002, jitter_s=0.0004)


def _calm(process: str, server: str) -> Delays:
    return CALM


class End:
    """The last item of a pipe: the connection ended, for ``reason``."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Packet:
    """Items that travel together."""

    __slots__ = ("arrival", "items", "size")

    def __init__(self, arrival: float, item: Any, size: int) -> None:
        self.arrival = arrival
        self.items = [item]
        self.size = size


SEGMENT_BYTES = 1460
"""What a connection sends at a time on a line that it shares: a TCP segment, or one item that is larger."""


class Line:
    """The network of a server, which sends a limited number of bytes per second for all of its connections.

    Connections take turns, as TCP shares a network: one that is behind does not delay one that sends little. What has
    not left yet is in the server's output buffers.

    Args:
        world: time and chance.
        bytes_per_s: how much the server can send.
        on_sent: called with the size of each item that has left.

    """

    def __init__(self, world: World, bytes_per_s: float, on_sent: Callable[[int], None]) -> None:
        self._world = world
        self._bytes_per_s = bytes_per_s
        self._on_sent = on_sent
        #: What has not left, with its size, by pipe; the next turn is that of the first pipe. No queue is empty.
        self._waiting: dict[Pipe, deque[tuple[int, Callable[[], None]]]] = {}
        self._is_busy = False

    def queue(self, pipe: Pipe, size: int, leave: Callable[[], None]) -> None:
        """Call ``leave`` when ``size`` bytes of a pipe have left, after all that it has queued before."""
        self._waiting.setdefault(pipe, deque()).append((size, leave))
        if not self._is_busy:
            self._begin()

    def forget(self, pipe: Pipe) -> int:
        """Drop what a pipe has queued. Return how many items that are."""
        return len(self._waiting.pop(pipe, ()))

    def _begin(self) -> None:
        pipe = next(iter(self._waiting), None)
        self._is_busy = pipe is not None
        if pipe is None:
            return
        size = count = 0
        for each, _ in self._waiting[pipe]:
            size += each
            count += 1
            if size >= SEGMENT_BYTES:
                break
        self._world.after(size / self._bytes_per_s, self._end, pipe, count)

    def _end(self, pipe: Pipe, count: int) -> None:
        queue = self._waiting.pop(pipe, deque())  # less is there if it was dropped on its way
        for _ in range(min(count, len(queue))):
            size, leave = queue.popleft()
            self._on_sent(size)
            leave()
        if queue:
            self._waiting[pipe] = queue
        self._begin()


class Pipe:
    """One direction of a connection; over the ``line`` of a server, if that has a limit."""

    __slots__ = ("_due", "_free_at", "_holds", "_last", "_packets", "_receive", "_world", "delays", "ended", "line")

    def __init__(
        self, world: World, delays: Delays, receive: Callable[[Packet], None], line: Line | None = None
    ) -> None:
        self._world = world
        self.delays = delays
        self._receive = receive
        self.line = line
        #: In flight, oldest first. Arrivals never decrease.
        self._packets: deque[Packet] = deque()
        #: Arrival of the youngest packet that was ever sent.
        self._last = 0.0
        #: When the line has transmitted everything that was sent (only with a rate).
        self._free_at = 0.0
        #: How many holds are in force; the pipe delivers nothing while there is one.
        self._holds = 0
        #: How many of the oldest packets would have arrived if nobody held the pipe.
        self._due = 0
        #: Nothing can be sent any more.
        self.ended = False

    def send(self, item: Any, size: int) -> None:
        """Send one item; it is lost without notice when the pipe has ended."""
        if self.ended:
            return
        if self.line is None:
            self._put(item, size)
        else:
            self.line.queue(self, size, partial(self._put, item, size))

    def _put(self, item: Any, size: int) -> None:
        world, delays = self._world, self.delays
        draw = world.random.random()
        if draw < delays.spike_ratio:
            delay = delays.base_s + delays.spike_s * draw / delays.spike_ratio
        else:
            delay = delays.base_s + delays.jitter_s * draw
        if delays.bytes_per_s:
            self._free_at = max(world.now, self._free_at) + size / delays.bytes_per_s
            delay += self._free_at - world.now
        arrival = world.now + delay
        packets = self._packets
        if arrival <= self._last and len(packets) > self._due:
            packet = packets[-1]
            packet.items.append(item)
            packet.size += size
            return
        self._last = arrival
        packets.append(Packet(arrival, item, size))
        world.at(arrival, self._arrive)

    def _arrive(self) -> None:
        if self._holds:
            self._due += 1
        else:
            self._receive(self._packets.popleft())

    def hold(self) -> None:
        """Hold the pipe: nothing arrives until :meth:`release` has been called as often."""
        self._holds += 1

    def release(self) -> None:
        """Take back one :meth:`hold`; after the last one, everything that is due arrives at once."""
        self._holds -= 1
        while not self._holds and self._due:
            self._due -= 1
            self._receive(self._packets.popleft())

    def end(self, reason: str, notice_s: float = 0.0) -> None:
        """End the pipe after what is in flight; the receiver sees the end ``notice_s`` later, in order."""
        if self.ended:
            return
        self.ended = True
        if self.line is None:
            self._put_end(reason, notice_s)
        else:
            self.line.queue(self, 0, partial(self._put_end, reason, notice_s))

    def _put_end(self, reason: str, notice_s: float) -> None:
        self._last = max(self._last, self._world.now) + notice_s
        self._packets.append(Packet(self._last, End(reason), 0))
        self._world.at(self._last, self._arrive)

    def drop_unsent(self) -> int:
        """Drop what has not left the server yet. Return how many items that are."""
        return 0 if self.line is None else self.line.forget(self)

    def cut(self, reason: str, notice_s: float, *, lose_all: bool = False) -> int:
        """End the pipe and lose what is in flight, all of it or from a random point on. Return how much was lost."""
        if self.ended:
            return 0
        in_flight = sum(len(packet.items) for packet in self._packets)
        kept = 0 if lose_all else self._world.random.randint(0, in_flight)
        lost = in_flight - kept + self.drop_unsent()
        for packet in self._packets:
            del packet.items[kept:]  # an empty packet arrives, too: one scheduled arrival belongs to each
            kept = max(0, kept - len(packet.items))
        self.end(reason, notice_s)
        return lost

    def give_up(self, reason: str) -> None:
        """End the pipe at once: the receiver has given up what is in flight, held or not."""
        if self.ended:
            return
        self.ended = True
        self.drop_unsent()
        for packet in self._packets:  # they arrive all the same, empty: one scheduled arrival belongs to each
            packet.items.clear()
        self._receive(Packet(self._world.now, End(reason), 0))


class Connection:
    """One TCP connection between a process and a server, with what the server knows of it."""

    __slots__ = (
        "channels",
        "id",
        "name",
        "patterns",
        "process",
        "server",
        "to_client",
        "to_server",
        "unread_bytes",
    )

    def __init__(self, id_: int, process: str, server: str) -> None:
        self.id = id_
        self.process = process
        self.server = server
        self.name = b""
        #: What it is subscribed to. Empty from the moment at which the server knows that it has ended.
        self.channels: dict[bytes, None] = {}
        self.patterns: dict[bytes, None] = {}
        #: Bytes that were sent to the client and that it has not handled yet.
        self.unread_bytes = 0
        self.to_server: Pipe
        self.to_client: Pipe

    def __repr__(self) -> str:
        return f"{self.process}~{self.server}#{self.id}"


class Endpoint(Protocol):
    """A server, as the network knows it."""

    id: str
    up: bool

    def line_to(self, process: str) -> Line | None:
        """Return the line over which what it sends to a process leaves; None: nothing limits it."""
        ...

    def accept(self, connection: Connection) -> None:
        """Take a new connection: greet the client over it."""
        ...

    def receive(self, connection: Connection, packet: Packet) -> None:
        """Take what has arrived on a connection."""
        ...


CONNECT_TIMEOUT_S = 0.5
"""How long an attempt to connect waits for a server that cannot be reached. Short, as everything here is."""

SILENCE_S_MAX = 0.5
"""How long a link that is up can be silent before it is given up. A tenth of what PINGs take to find a cut connection,
as everything here is short."""


@dataclass(slots=True, eq=False)
class _Partition:
    """Pairs of process and server that cannot reach each other, and the connections that it holds up."""

    #: Process None stands for all of them.
    pairs: dict[tuple[str | None, str], None]
    _held: list[Connection] = field(default_factory=list[Connection])

    def parts(self, process: str, server: str) -> bool:
        return (process, server) in self.pairs or (None, server) in self.pairs

    def hold(self, connection: Connection) -> None:
        connection.to_server.hold()
        connection.to_client.hold()
        self._held.append(connection)

    def release(self) -> None:
        for connection in self._held:
            connection.to_server.release()
            connection.to_client.release()


class Network:
    """Makes and breaks connections.

    Args:
        world: time and chance.
        delays_of: gives the delays of one direction of a connection between a process and a server.
        silence_s_max: how long a link that is up can be silent before its process gives it up.

    """

    def __init__(
        self, world: World, delays_of: Callable[[str, str], Delays], silence_s_max: float = SILENCE_S_MAX
    ) -> None:
        self._world = world
        self._delays_of = delays_of
        self._silence_s_max = silence_s_max
        self._servers: dict[str, Endpoint] = {}
        #: Connections that may still carry something, by id.
        self._connections: dict[int, Connection] = {}
        self._partitions: list[_Partition] = []
        #: How many bytes per second a process reads of what a server sends, where that is little.
        self._slow_readers: dict[tuple[str, str], float] = {}
        self._ids = 0

    def add_server(self, url: str, server: Endpoint) -> None:
        """Make ``server`` reachable at ``url``."""
        self._servers[url] = server

    def open(
        self,
        process: str,
        url: str,
        receive: Callable[[Connection, Packet], None],
        failed: Callable[[str], None],
    ) -> None:
        """Open a connection; the server's greeting is the first item that ``receive`` gets."""
        server = self._servers.get(url)
        if server is None:
            raise KeyError(f"{process} connects to {url}, where no server of the simulation is")
        if any(partition.parts(process, server.id) for partition in self._partitions):
            self._world.after(CONNECT_TIMEOUT_S, failed, "timed out")
            return
        delays = self._delays_of(process, server.id)
        delay = 3 * (delays.base_s + delays.jitter_s * self._world.random.random())
        self._world.after(delay, self._opened, process, server, receive, failed)

    def _opened(
        self,
        process: str,
        server: Endpoint,
        receive: Callable[[Connection, Packet], None],
        failed: Callable[[str], None],
    ) -> None:
        if not server.up:
            failed("connection refused")
            return
        self._ids += 1
        connection = Connection(self._ids, process, server.id)
        world = self._world
        connection.to_server = Pipe(
            world, self._delays_of(process, server.id), lambda packet: server.receive(connection, packet)
        )
        connection.to_client = Pipe(
            world,
            self._delays_of(process, server.id),
            lambda packet: receive(connection, packet),
            server.line_to(process),
        )
        self._set_rate(connection)
        for partition in self._partitions:
            if partition.parts(process, server.id):
                self._hold(partition, connection)
        self._connections[connection.id] = connection
        server.accept(connection)

    def connections(self, process: str | None = None, server: str | None = None) -> list[Connection]:
        """Return the connections between ``process`` and ``server``, oldest first; None means any."""
        ended = [c.id for c in self._connections.values() if c.to_server.ended and c.to_client.ended]
        for id_ in ended:
            del self._connections[id_]
        return [
            connection
            for connection in self._connections.values()
            if process in (None, connection.process) and server in (None, connection.server)
        ]

    def break_connection(self, connection: Connection, notice_s_max: float = 0.3, *, lose_all: bool = False) -> None:
        """Lose a connection, and what is in flight, all of it or from a random point on, in both directions.

        Each end learns of it at a time of its own, up to ``notice_s_max`` later; until then a server counts a dead
        client among its subscribers.
        """
        random = self._world.random
        lost = connection.to_server.cut("connection lost", notice_s_max * random.random(), lose_all=lose_all)
        lost += connection.to_client.cut("connection lost", notice_s_max * random.random(), lose_all=lose_all)
        text = f"the connection is lost, with {lost} items in flight"
        self._world.trace.add((self._world.now, "fault", connection.process, connection.server, None, None, text))

    def calm(self) -> None:
        """Make everything quick from now on, on old connections and new ones."""
        self._delays_of = _calm
        for connection in self.connections():
            connection.to_server.delays = CALM
            connection.to_client.delays = CALM

    def slow_down(self, process: str, server: str, bytes_per_s: float) -> Callable[[], None]:
        """Limit what a process reads on each of its connections. Returns a function that ends this."""
        self._slow_readers[process, server] = bytes_per_s

        def apply() -> None:
            for connection in self.connections(process, server):
                self._set_rate(connection)

        def undo() -> None:
            self._slow_readers.pop((process, server), None)
            apply()

        apply()
        return undo

    def _set_rate(self, connection: Connection) -> None:
        rate = self._slow_readers.get((connection.process, connection.server), 0.0)
        connection.to_client.delays = replace(connection.to_client.delays, bytes_per_s=rate)

    def part(self, processes: Iterable[str], servers: Iterable[str]) -> Callable[[], None]:
        """Block all bytes between ``processes`` and ``servers``. Return a function that ends this."""
        return self._part(_Partition(dict.fromkeys((process, server) for process in processes for server in servers)))

    def freeze(self, server: str) -> Callable[[], None]:
        """Freeze a server and all of its connections. Returns a function that ends this."""
        return self._part(_Partition({(None, server): None}))

    def _part(self, partition: _Partition) -> Callable[[], None]:
        self._partitions.append(partition)
        for pair in partition.pairs:
            for connection in self.connections(*pair):
                self._hold(partition, connection)

        def heal() -> None:
            self._partitions.remove(partition)
            partition.release()

        return heal

    def _hold(self, partition: _Partition, connection: Connection) -> None:
        """Hold up a connection; its process gives it up after a long hold."""
        partition.hold(connection)

        def give_up() -> None:
            if partition in self._partitions:
                connection.to_client.give_up(f"nothing came for {self._silence_s_max} s")

        self._world.after(self._silence_s_max, give_up)
