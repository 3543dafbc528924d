"""What the balancer wants, as an ordered list of small goals that propose moves of channels.

Theory of operation
-------------------
A goal sees a :class:`Cluster`, a working copy of the model: it proposes moves one by one, and each is taken into the
copy at once, so that later proposals, of this goal and of later ones, build on it. A move that breaks a bound, or
that an earlier goal does not permit, is not taken.

:class:`Relieve` is Algorithm 2 of the paper (section III-B) with its faults mended. It ends: each overloaded server is
looked at once, and each of its channels once. It does not move a channel to and fro: a move makes the larger load ratio
of the two servers smaller. So the ratios of all servers, sorted, the largest first, get smaller with each move, in the
order of dictionaries, and under constant load no earlier state comes back.

Everything here is data and arithmetic; nothing depends on time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamoth_balancer.options import BalancerOptions


class Ratios(NamedTuple):
    """Load ratios of the two servers that a move concerns."""

    source: float
    target: float


@dataclass(frozen=True, slots=True)
class Move:
    """A proposal: one channel from one server to another; why; and the estimated load ratios before and after."""

    channel: bytes
    source: str
    target: str
    reason: str
    before: Ratios
    after: Ratios


@dataclass(frozen=True, slots=True)
class Finding:
    """A goal could not be reached at a server, and why."""

    server: str
    load_ratio: float
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What all goals together propose, and what they could not reach."""

    moves: tuple[Move, ...] = ()
    findings: tuple[Finding, ...] = ()


class ChannelRate(NamedTuple):
    """How much a channel makes its server send. Sorts by that."""

    outgoing_bytes_per_s: float
    channel: bytes


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
    """

    servers: dict[str, ServerLoad]
    channels: Callable[[str], Sequence[ChannelRate]]
    movable: Callable[[bytes, str], bool]
    options: BalancerOptions
    moves: dict[bytes, Move] = field(default_factory=dict[bytes, Move])
    findings: list[Finding] = field(default_factory=list[Finding])
    _away: Counter[str] = field(default_factory=Counter[str])
    _here: Counter[str] = field(default_factory=Counter[str])
    _guards: list[Callable[[Cluster, Move], bool]] = field(default_factory=list[Callable[["Cluster", Move], bool]])

    def move(self, load: ChannelRate, source: ServerLoad, target: ServerLoad, reason: str) -> Move:
        """Return the move that this would be, without taking it."""
        rate = load.outgoing_bytes_per_s
        before = Ratios(source.load_ratio, target.load_ratio)
        after = Ratios(source.load_ratio_with(-rate), target.load_ratio_with(rate))
        return Move(load.channel, source.id, target.id, reason, before, after)

    def take(self, move: Move, outgoing_bytes_per_s: float) -> bool:
        """Take a move into this copy, and tell whether that was possible."""
        if not self._admits(move):
            return False
        source, target = self.servers[move.source], self.servers[move.target]
        source.outgoing_bytes_per_s = max(0.0, source.outgoing_bytes_per_s - outgoing_bytes_per_s)
        target.outgoing_bytes_per_s += outgoing_bytes_per_s
        self.moves[move.channel] = move
        self._away[move.source] += 1
        self._here[move.target] += 1
        return True

    def _admits(self, move: Move) -> bool:
        return (
            move.channel not in self.moves
            and not self.is_full
            and not self.has_given(move.source)
            and not self.has_taken(move.target)
            and self.movable(move.channel, move.source)
            and all(permits(self, move) for permits in self._guards)
        )

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
        room = _Room(cluster)
        moves: list[Move] = []
        for server in overloaded:
            moves += self._relieve(cluster, server, room)
        return moves

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Permit moves that fill no server beyond what this goal accepts."""
        return move.after.target <= cluster.options.accept_ratio

    def _relieve(self, cluster: Cluster, source: ServerLoad, room: _Room) -> list[Move]:
        options = cluster.options
        reason = f"{source.id} has load ratio {source.load_ratio:.2f}, above {options.load_ratio_high:.2f}"
        smallest = options.channel_ratio_min * source.outgoing_bytes_per_s_max
        moves: list[Move] = []
        for load in _busiest_first(cluster.channels(source.id)):
            done = source.load_ratio <= options.load_ratio_safe or load.outgoing_bytes_per_s < smallest
            if done or cluster.is_full or cluster.has_given(source.id):
                break
            target = room.most(source.id)
            if target is None:
                break
            move = cluster.move(load, source, target, reason)
            if _improves(move, options) and cluster.take(move, load.outgoing_bytes_per_s):
                moves.append(move)
                room.changed(source)
                room.changed(target)
        if source.load_ratio > options.load_ratio_high:
            cluster.findings.append(Finding(source.id, source.load_ratio, self._why_not(cluster, source, room)))
        return moves

    def _why_not(self, cluster: Cluster, source: ServerLoad, room: _Room) -> str:
        options = cluster.options
        if cluster.is_full or cluster.has_given(source.id):
            return "this plan has as many moves as one may have; the next goes on"
        if room.most(source.id) is None:
            return "there is no other server that could take channels: add servers, or see why their agents are down"
        stayed = (load for load in cluster.channels(source.id) if load.channel not in cluster.moves)
        busiest = max(stayed, default=None)
        if busiest is None:
            return "its load is not that of channels"
        ratio = busiest.outgoing_bytes_per_s / source.outgoing_bytes_per_s_max
        if ratio > options.load_ratio_safe:
            return f"channel {busiest.channel!r:.80} alone makes load ratio {ratio:.2f}: one server is too small for it"
        return "its channels rest, are in transition, or would overload any other server: add servers"


def _improves(move: Move, options: BalancerOptions) -> bool:
    """The one score of a move, for taking away and for placing: see :class:`Relieve`."""
    before = move.before.source
    accepted = move.after.target <= options.accept_ratio
    much_better = move.after.target <= before - options.much_better_ratio
    larger = max(move.after)
    smaller_by_margin = move.after.target <= before - options.improvement_ratio_min and larger < max(move.before)
    return (accepted or much_better) and smaller_by_margin


def _busiest_first(loads: Iterable[ChannelRate]) -> Iterable[ChannelRate]:
    """Go through loads in descending order; only as many are sorted as are asked for."""
    heap = [(-load.outgoing_bytes_per_s, load.channel) for load in loads]
    heapq.heapify(heap)
    while heap:
        negative, channel = heapq.heappop(heap)
        yield ChannelRate(-negative, channel)


class _Room:
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
        aside: tuple[float, str] | None = None
        found: ServerLoad | None = None
        while self._heap and found is None:
            negative, name = self._heap[0]
            server = self._cluster.servers[name]
            if -negative != self._room(server) or self._cluster.has_taken(name):
                heapq.heappop(self._heap)
            elif name == besides:
                aside = heapq.heappop(self._heap)
            else:
                found = server
        if aside is not None:
            heapq.heappush(self._heap, aside)
        return found
