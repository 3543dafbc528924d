"""What the balancer wants, as an ordered list of small goals that propose moves of channels.

Theory of operation
-------------------
A goal sees a :class:`Cluster`, a working copy of the model: it proposes moves one by one, and each is taken into the
copy at once, so that later proposals, of this goal and of later ones, build on it. A move that breaks a bound, or
that an earlier goal does not permit, is not taken.

There are three: ``replication`` has Algorithm 1 of the paper, and comes first, as a channel that one server is too
small for cannot be placed well anywhere. The second is here, and ``drain`` has the last.

:class:`Relieve` is Algorithm 2 of the paper (section III-B) with its faults mended. It ends: each overloaded server is
looked at once, and each of its channels once. It does not move a channel to and fro: a move makes the larger load ratio
of the two servers smaller. So the ratios of all servers, sorted, the largest first, get smaller with each move, in the
order of dictionaries, and under constant load no earlier state comes back.

Everything here is data and arithmetic; nothing depends on time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth.protocol.names import in_quotes
from dynamoth_balancer.options import BalancerOptions

NO_FIGURES = "its agent has not seen which channels make the load: CLIENT LIST of the server shows who publishes"
"""Why nothing leaves a server whose agent has been blind from the first second on."""


class Ratios(NamedTuple):
    """Load ratio of a server before and after a move."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Move:
    """A proposal: one channel from an assignment to another; why; and the estimated loads before and after."""

    channel: bytes
    before: Assignment
    after: Assignment
    reason: str
    #: Load ratios of all old and new servers.
    ratios: Mapping[str, Ratios]
    #: How many bytes/s more each of these sends after the move, or fewer (negative).
    loads: Mapping[str, float]

    @property
    def source(self) -> str:
        """The busiest of the old servers: the only one of a channel that is not replicated."""
        return max(self.before.servers, key=lambda server: self.ratios[server].before)

    @property
    def target(self) -> str:
        """The new server that will be the busiest: the only one of a channel that will not be replicated."""
        return max(self.after.servers, key=lambda server: self.ratios[server].after)


@dataclass(frozen=True, slots=True)
class Finding:
    """A goal could not be reached at a server, and why. ``load_ratio`` is 0 for a server that is dead."""

    server: str
    load_ratio: float
    reason: str
    #: None where it is not about one channel.
    channel: bytes | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What all goals together propose, and what they could not reach."""

    moves: tuple[Move, ...] = ()
    findings: tuple[Finding, ...] = ()


class ChannelRate(NamedTuple):
    """How much a channel makes its server send. Sorts by that."""

    outgoing_bytes_per_s: float
    channel: bytes


@dataclass(frozen=True, slots=True)
class ChannelFigures:
    """What is true of a channel in the whole cluster, however many replicas have measured it."""

    channel: bytes
    assignment: Assignment
    #: Messages that clients publish, each counted once.
    publications_per_s: float
    #: How many clients published within one report lately; a lower bound.
    publishers: int
    #: How many clients subscribe, each counted once.
    subscribers: float
    #: What the channel makes each server of the assignment send.
    outgoing_bytes_per_s: Mapping[str, float]
    #: Replicas that were dead for so long that the channel should have left them, and are back.
    unwanted: frozenset[str] = frozenset()

    @property
    def outgoing_bytes_per_s_total(self) -> float:
        """What the channel makes the cluster send: the same in every mode."""
        return sum(self.outgoing_bytes_per_s.values())


@dataclass(slots=True)
class ServerLoad:
    """The estimated load of one server that may take part in moves."""

    id: str
    outgoing_bytes_per_s: float
    #: More than 0.
    outgoing_bytes_per_s_max: float

    @property
    def load_ratio(self) -> float:
        """LR_i of eq. 1."""
        return self.outgoing_bytes_per_s / self.outgoing_bytes_per_s_max

    def load_ratio_with(self, outgoing_bytes_per_s: float) -> float:
        """Return what the load ratio would be with so much more (or less) load."""
        return max(0.0, self.outgoing_bytes_per_s + outgoing_bytes_per_s) / self.outgoing_bytes_per_s_max


@dataclass(slots=True)
class Cluster:
    """The working copy that goals see.

    ``channels`` returns what is measured of the channels of a server, in any order; ``movable`` tells whether a
    channel lives at a server, alone, and may be moved. Both are asked only where a goal looks.

    ``figures`` are of the channels whose replication may be changed now: all that are replicated, and those that make
    much of a server's load. ``dead`` are the servers that cannot take part for long, each with replicated channels that
    have a replica there. ``draining`` are the servers that are to become empty, each with what is there; no move puts a
    channel there, or leaves one of its replicas there. ``blind`` are the servers whose agents do not see what is
    published: they count as overloaded, and no move puts a channel there.
    """

    servers: dict[str, ServerLoad]
    channels: Callable[[str], Sequence[ChannelRate]]
    movable: Callable[[bytes, str], bool]
    options: BalancerOptions
    figures: Sequence[ChannelFigures] = ()
    dead: Mapping[str, Sequence[bytes]] = field(default_factory=dict[str, Sequence[bytes]])
    draining: Mapping[str, Sequence[ChannelRate]] = field(default_factory=dict[str, Sequence[ChannelRate]])
    blind: Set[str] = frozenset()
    moves: dict[bytes, Move] = field(default_factory=dict[bytes, Move])
    findings: list[Finding] = field(default_factory=list[Finding])
    _away: Counter[str] = field(default_factory=Counter[str])
    _here: Counter[str] = field(default_factory=Counter[str])
    _guards: list[Callable[[Cluster, Move], bool]] = field(default_factory=list[Callable[["Cluster", Move], bool]])

    def move(self, load: ChannelRate, source: ServerLoad, target: ServerLoad, reason: str) -> Move:
        """Return the move from one server to another that this would be, without taking it."""
        loads = {source.id: -load.outgoing_bytes_per_s, target.id: load.outgoing_bytes_per_s}
        return self.change(load.channel, single(source.id), single(target.id), loads, reason)

    def change(
        self, channel: bytes, before: Assignment, after: Assignment, loads: Mapping[str, float], reason: str
    ) -> Move:
        """Return the move between any two assignments that this would be, without taking it."""
        ratios = {
            server: Ratios(self.servers[server].load_ratio, self.servers[server].load_ratio_with(load))
            for server, load in loads.items()
        }
        return Move(channel, before, after, reason, ratios, loads)

    def take(self, move: Move) -> bool:
        """Take a move into this copy, and tell whether that was possible."""
        if not self._admits(move):
            return False
        for name, load in move.loads.items():
            server = self.servers[name]
            server.outgoing_bytes_per_s = max(0.0, server.outgoing_bytes_per_s + load)
        self.moves[move.channel] = move
        self._away.update(_left(move))
        self._here.update(_joined(move))
        return True

    def _admits(self, move: Move) -> bool:
        return (
            move.channel not in self.moves
            and not self.is_full
            and self.draining.keys().isdisjoint(move.after.servers)
            and self.blind.isdisjoint(_joined(move))
            and not any(map(self.has_given, _left(move)))
            and not any(map(self.has_taken, _joined(move)))
            and (_replicates(move) or self.movable(move.channel, move.source))
            and all(permits(self, move) for permits in self._guards)
        )

    @property
    def targets(self) -> list[ServerLoad]:
        """The servers that channels may be put at."""
        closed = self.draining.keys() | self.blind
        return [server for server in self.servers.values() if server.id not in closed]

    @property
    def more_servers(self) -> str:
        """What helps where there are too few servers, in words for people."""
        text = "add servers, or see why their agents are down"
        return f"{text}, or end the draining of {', '.join(sorted(self.draining))}" if self.draining else text

    @property
    def is_full(self) -> bool:
        """Whether one more move would be more than a plan may have."""
        return len(self.moves) >= self.options.moves_per_plan_max

    def has_given(self, server: str) -> bool:
        """Tell whether no more channels may be moved away from a server by this plan."""
        return self._away[server] >= self.options.moves_per_server_max

    def has_taken(self, server: str) -> bool:
        """Tell whether no more channels may be moved to a server by this plan."""
        return self._here[server] >= self.options.moves_per_server_max

    def guard(self, permits: Callable[[Cluster, Move], bool]) -> None:
        """From now on take only moves that ``permits`` returns True for."""
        self._guards.append(permits)


def _left(move: Move) -> set[str]:
    return set(move.before.servers).difference(move.after.servers)


def _joined(move: Move) -> set[str]:
    return set(move.after.servers).difference(move.before.servers)


def _replicates(move: Move) -> bool:
    """Tell whether a channel is, or will be, at several servers: those to choose from are in ``Cluster.figures``."""
    return move.before.mode is not Mode.SINGLE or move.after.mode is not Mode.SINGLE


class Goal(Protocol):
    """One thing that the balancer wants."""

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose moves that bring the goal nearer, in order; they have been taken into ``cluster``. Always ends."""
        ...

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Tell whether a later goal's move leaves this goal as near as it is."""
        ...


def decide(goals: Iterable[Goal], cluster: Cluster) -> Decision:
    """Ask the goals in their order. A later one cannot undo what an earlier one needs."""
    moves: list[Move] = []
    for goal in goals:
        moves += goal.propose(cluster)
        cluster.guard(goal.permits)
    return Decision(tuple(moves), tuple(cluster.findings))


class Relieve:
    """No server is above ``load_ratio_high`` when others have room for what it has too much (Algorithm 2).

    As published: the busiest channels of the most loaded server go to the least loaded one until ``load_ratio_safe`` is
    reached. Mended: a channel that no other server could carry better stays, and smaller ones are tried; the least
    loaded server is the one with most room in bytes, as capacities differ.
    """

    def propose(self, cluster: Cluster) -> list[Move]:
        """Propose moves away from overloaded servers, the most loaded first."""
        high = cluster.options.load_ratio_high
        overloaded = [server for server in cluster.servers.values() if server.load_ratio > high]
        if not overloaded:
            return []
        overloaded.sort(key=lambda server: (-server.load_ratio, server.id))
        room = Room(cluster)
        moves: list[Move] = []
        for server in overloaded:
            moves += self._relieve(cluster, server, room)
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit moves that fill no server beyond what this goal accepts."""
        accept = cluster.options.accept_ratio
        return all(move.ratios[server].after <= accept for server in _joined(move))

    def _relieve(self, cluster: Cluster, source: ServerLoad, room: Room) -> list[Move]:
        options = cluster.options
        reason = f"{source.id} has load ratio {source.load_ratio:.2f}, above {options.load_ratio_high:.2f}"
        if source.id in cluster.blind:
            reason = f"the agent of {source.id} does not see what is published there, so {source.id} is overloaded"
        smallest = options.channel_ratio_min * source.outgoing_bytes_per_s_max
        moves: list[Move] = []
        for load in busiest_first(cluster.channels(source.id)):
            done = source.load_ratio <= options.load_ratio_safe or load.outgoing_bytes_per_s < smallest
            if done or cluster.is_full or cluster.has_given(source.id):
                break
            target = room.most(source.id)
            if target is None:
                break
            move = cluster.move(load, source, target, reason)
            if _improves(move, options) and cluster.take(move):
                moves.append(move)
                room.changed(source)
                room.changed(target)
        if source.load_ratio > options.load_ratio_high:
            stayed = [load for load in cluster.channels(source.id) if load.channel not in cluster.moves]
            unknown = NO_FIGURES if source.id in cluster.blind else "its load is not that of channels"
            why = why_they_stay(cluster, source, stayed) if stayed else unknown
            cluster.findings.append(Finding(source.id, source.load_ratio, why))
        return moves


def why_they_stay(cluster: Cluster, source: ServerLoad, stayed: Sequence[ChannelRate]) -> str:
    """Say why channels, at least one, that should leave a server have not left it, and what helps."""
    others = [server.id for server in cluster.targets if server is not source]
    if not others:
        return f"there is no other server that could take channels: {cluster.more_servers}"
    if cluster.is_full or cluster.has_given(source.id) or all(map(cluster.has_taken, others)):
        return "this plan has as many moves as one may have; the next goes on"
    busiest = max(stayed)
    ratio = busiest.outgoing_bytes_per_s / source.outgoing_bytes_per_s_max
    if ratio > cluster.options.load_ratio_safe:
        what = f"channel {in_quotes(busiest.channel)} alone makes load ratio {ratio:.2f} here"
        return f"{what}: one server is too small for it, 'dynamoth plan replicate' spreads it over several"
    return "its channels rest, are in transition, or would overload any other server: add servers"


def _improves(move: Move, options: BalancerOptions) -> bool:
    """The one score of a move, for taking away and for placing: see :class:`Relieve`."""
    source, target = move.ratios[move.source], move.ratios[move.target]
    accepted = target.after <= options.accept_ratio
    much_better = target.after <= source.before - options.much_better_ratio
    smaller_by_margin = target.after <= source.before - options.improvement_ratio_min
    smaller = max(source.after, target.after) < max(source.before, target.before)
    return (accepted or much_better) and smaller_by_margin and smaller


def busiest_first(loads: Iterable[ChannelRate]) -> Iterable[ChannelRate]:
    """Go through loads in descending order; only as many are sorted as are asked for."""
    heap = [(-load.outgoing_bytes_per_s, load.channel) for load in loads]
    heapq.heapify(heap)
    while heap:
        negative, channel = heapq.heappop(heap)
        yield ChannelRate(-negative, channel)


class Room:
    """Which server has most room, in bytes/s below the accepted load ratio. Each question costs O(log servers)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: (minus room, server id), with outdated items between; bounded by servers + 2 * moves.
        self._heap = [(-self._room(server), server.id) for server in cluster.servers.values()]
        heapq.heapify(self._heap)

    def _room(self, server: ServerLoad) -> float:
        accept = self._cluster.options.accept_ratio * server.outgoing_bytes_per_s_max
        return accept - server.outgoing_bytes_per_s

    def changed(self, server: ServerLoad) -> None:
        """Take note of a server's new load."""
        heapq.heappush(self._heap, (-self._room(server), server.id))

    def most(self, besides: str) -> ServerLoad | None:
        """Return the server with most room that may still take channels, None when there is none."""
        closed = self._cluster.draining.keys() | self._cluster.blind
        aside: tuple[float, str] | None = None
        found: ServerLoad | None = None
        while self._heap and found is None:
            negative, name = self._heap[0]
            server = self._cluster.servers[name]
            if -negative != self._room(server) or self._cluster.has_taken(name) or name in closed:
                heapq.heappop(self._heap)
            elif name == besides:
                aside = heapq.heappop(self._heap)
            else:
                found = server
        if aside is not None:
            heapq.heappush(self._heap, aside)
        return found
