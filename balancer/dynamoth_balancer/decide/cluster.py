"""The cluster as goals see it, and the moves they propose.

Theory of operation
-------------------
A goal sees a :class:`Cluster`, a working copy of the load model. It proposes moves one by one. Each accepted move
changes the copy at once, so later proposals, of this goal and of later goals, build on it. The cluster refuses a move
that breaks a bound, or that an earlier goal does not permit.

The goals, in their order:

1. ``pin``: brings channels back to where administrators have pinned them.
2. ``replicate``: Algorithm 1. Before the others, because a channel that is too large for one server has no good place.
3. ``relieve``: Algorithm 2; then slots, where no busy channel explains the load of a server.
4. ``release``: at low load, empties a server that is no longer needed.
5. ``drain``: empties servers that an operator wants to stop. Both first move channels, and then, in the same order,
   slots.
6. ``spread``: gives slots to servers that have too few, such as new ones.
7. ``tidy``: moves silent channels back to their slots.

The goals that move slots or silent channels go on in steps without waiting between two plans: each step is small, and a
server has many of them.

The algorithms are those of Dynamoth, section III-B. Everything here is data and arithmetic; nothing depends on time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth.plan.slots import is_slot
from dynamoth_balancer.decide.resources import Load, Resource
from dynamoth_balancer.options import BalancerOptions

NO_SUBSCRIPTIONS: Mapping[bytes, float] = MappingProxyType({})


class Ratios(NamedTuple):
    """Load ratio of a server before and after a move."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Move:
    """A proposal to change the assignment of one channel, with its reason and the estimated loads."""

    channel: bytes
    before: Assignment
    after: Assignment
    reason: str
    #: Load ratios of all old and new servers.
    ratios: Mapping[str, Ratios]
    #: The change of the load of each of these servers.
    loads: Mapping[str, Load]
    #: The name of the goal that proposed it.
    goal: str = ""

    @property
    def source(self) -> str:
        """The busiest of the old servers: the only one of a channel that is not replicated."""
        return max(self.before.servers, key=lambda server: self.ratios[server].before)

    @property
    def target(self) -> str:
        """The new server that will be the busiest: the only one of a channel that will not be replicated."""
        return max(self.after.servers, key=lambda server: self.ratios[server].after)

    @property
    def left(self) -> set[str]:
        """The servers that the channel leaves."""
        return set(self.before.servers).difference(self.after.servers)

    @property
    def joined(self) -> set[str]:
        """The servers that the channel comes to."""
        return set(self.after.servers).difference(self.before.servers)

    @property
    def replicates(self) -> bool:
        """Whether the channel is replicated before or after."""
        return self.before.mode is not Mode.SINGLE or self.after.mode is not Mode.SINGLE


@dataclass(frozen=True, slots=True)
class Finding:
    """A goal that could not be reached at a server, and the reason. ``load_ratio`` is 0 for one that is away."""

    server: str
    load_ratio: float
    reason: str
    #: None if it does not concern one channel.
    channel: bytes | None = None
    #: The name of the goal that found it.
    goal: str = ""
    #: Whether another server would help.
    short: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The moves that all goals together propose, and the findings where they fail."""

    moves: tuple[Move, ...] = ()
    findings: tuple[Finding, ...] = ()


class ChannelRate(NamedTuple):
    """The load that a channel causes at its server; sorts by its outgoing bytes/s."""

    outgoing_bytes_per_s: float
    channel: bytes
    #: As in :class:`Load`.
    cpu_ratio: float = 0.0

    @property
    def load(self) -> Load:
        """What the channel takes of its server."""
        return Load(self.outgoing_bytes_per_s, self.cpu_ratio)


class Stray(NamedTuple):
    """A pinned channel that is at another server."""

    rate: ChannelRate
    present: Assignment
    pin: Assignment


@dataclass(frozen=True, slots=True)
class ChannelFigures:
    """The figures of a channel in the whole cluster, independent of how many replicas measured it."""

    channel: bytes
    assignment: Assignment
    #: Messages that clients publish, each counted once.
    publications_per_s: float
    #: A lower bound: the most clients that published within one recent report.
    publishers: int
    #: How many clients subscribe, each counted once.
    subscribers: float
    #: By server of the assignment.
    outgoing_bytes_per_s: Mapping[str, float]
    #: As in :class:`Load`, by server of the assignment.
    cpu_ratio: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def total(self) -> Load:
        """The sum over all servers: nearly the same in every mode (each replica needs CPU for the publications)."""
        return Load(sum(self.outgoing_bytes_per_s.values()), sum(self.cpu_ratio.values()))

    def load_at(self, server: str) -> Load:
        """Return the load at one server."""
        return Load(self.outgoing_bytes_per_s.get(server, 0.0), self.cpu_ratio.get(server, 0.0))


@dataclass(slots=True)
class ServerLoad:
    """The estimated load of one server that may take part in moves."""

    id: str
    outgoing_bytes_per_s: float
    #: More than 0.
    outgoing_bytes_per_s_max: float
    #: As in :class:`Load`; 0 where it is not known or does not count.
    cpu_ratio: float = 0.0

    @property
    def outgoing_ratio(self) -> float:
        """LR_i of eq. 1."""
        return self.outgoing_bytes_per_s / self.outgoing_bytes_per_s_max

    @property
    def load_ratio(self) -> float:
        """The part used of the tighter one of the resources that moves relieve; may exceed 1."""
        return max(self.outgoing_ratio, self.cpu_ratio)

    @property
    def resource(self) -> Resource:
        """The tighter one of the resources that moves relieve."""
        return Resource.CPU if self.cpu_ratio > self.outgoing_ratio else Resource.OUTGOING

    def share(self, load: Load) -> float:
        """Return the part of ``load_ratio`` that is this load: what it takes of the tighter resource."""
        by_cpu = self.resource is Resource.CPU
        return load.cpu_ratio if by_cpu else load.outgoing_bytes_per_s / self.outgoing_bytes_per_s_max

    def load_ratio_with(self, load: Load) -> float:
        """Return the load ratio after adding this load; it may be negative."""
        outgoing = max(0.0, self.outgoing_bytes_per_s + load.outgoing_bytes_per_s) / self.outgoing_bytes_per_s_max
        return max(outgoing, self.cpu_ratio + load.cpu_ratio)

    def add(self, load: Load) -> None:
        """Add a load; it may be negative."""
        self.outgoing_bytes_per_s = max(0.0, self.outgoing_bytes_per_s + load.outgoing_bytes_per_s)
        self.cpu_ratio = max(0.0, self.cpu_ratio + load.cpu_ratio)


@dataclass(slots=True)
class Cluster:
    """The working copy that goals see.

    ``channels`` returns the measured channels of a server, in any order. ``movable`` returns whether a channel is at
    this server alone and may be moved.

    ``figures`` has the channels whose replication may be changed now: all replicated ones, and those that make much of
    a server's load. ``draining`` maps each server that is being drained to its channels; no move puts a channel there,
    or leaves one of its replicas there. ``releasing`` does the same for each server that is being emptied at low load.
    ``blind`` has the servers whose agents do not see what is published: they count as overloaded, and no move puts a
    channel there. ``full`` has the servers that are nearly out of connections or memory, and of what: no move puts a
    channel there. ``slots`` has the slots of each server, with the load of each, and ``slot_subscriptions`` returns how
    many subscriptions each slot of a server has. ``pins`` has the channels and slots that no move may put elsewhere,
    and ``strays`` the pinned channels that are elsewhere.
    """

    servers: dict[str, ServerLoad]
    channels: Callable[[str], Sequence[ChannelRate]]
    movable: Callable[[bytes, str], bool]
    options: BalancerOptions
    figures: Sequence[ChannelFigures] = ()
    draining: Mapping[str, Sequence[ChannelRate]] = field(default_factory=dict[str, Sequence[ChannelRate]])
    blind: Set[str] = frozenset()
    slots: Mapping[str, Sequence[ChannelRate]] = field(default_factory=dict[str, Sequence[ChannelRate]])
    full: Mapping[str, str] = field(default_factory=dict[str, str])
    slot_subscriptions: Callable[[str], Mapping[bytes, float]] = lambda _: NO_SUBSCRIPTIONS
    releasing: Mapping[str, Sequence[ChannelRate]] = field(default_factory=dict[str, Sequence[ChannelRate]])
    pins: Mapping[bytes, Assignment] = field(default_factory=dict[bytes, Assignment])
    strays: Sequence[Stray] = ()
    #: Channels that have gone silent, each with where it is and where its slot is.
    returning: Sequence[Stray] = ()
    #: How many more channels and slots may be in transition.
    room: float = math.inf
    #: The name of the goal that proposes moves now.
    goal: str = ""
    #: The overloaded servers that moves of channels do not relieve.
    unrelieved: set[str] = field(default_factory=set[str])
    moves: dict[bytes, Move] = field(default_factory=dict[bytes, Move])
    findings: list[Finding] = field(default_factory=list[Finding])
    #: How many channels, and how many slots, these moves take away from each server, and bring to it.
    _away: Counter[str] = field(default_factory=Counter[str])
    _here: Counter[str] = field(default_factory=Counter[str])
    _slots_away: Counter[str] = field(default_factory=Counter[str])
    _slots_here: Counter[str] = field(default_factory=Counter[str])
    #: The subscriptions and the load ratio that these slots take away from each server, and bring to it.
    _slot_subscriptions_moved: dict[str, float] = field(default_factory=dict[str, float])
    _slot_load_moved: dict[str, float] = field(default_factory=dict[str, float])
    #: By whether CPU counts, a heap of (less room first, server); entries whose room has changed since are out of date.
    _roomiest: dict[bool, list[tuple[float, str]]] = field(default_factory=dict[bool, list[tuple[float, str]]])
    _guards: list[Callable[[Cluster, Move], bool]] = field(default_factory=list[Callable[["Cluster", Move], bool]])

    def move(self, load: ChannelRate, source: ServerLoad, target: ServerLoad, reason: str) -> Move:
        """Return a move from one server to another; it does not change this copy."""
        loads = {source.id: -load.load, target.id: load.load}
        return self.change(load.channel, single(source.id), single(target.id), loads, reason)

    def change(
        self, channel: bytes, before: Assignment, after: Assignment, loads: Mapping[str, Load], reason: str
    ) -> Move:
        """Return a move between any two assignments; it does not change this copy."""
        ratios = {
            server: Ratios(self.servers[server].load_ratio, self.servers[server].load_ratio_with(load))
            for server, load in loads.items()
        }
        return Move(channel, before, after, reason, ratios, loads, self.goal)

    def take(self, move: Move) -> bool:
        """Apply a move to this copy, if bounds and earlier goals permit it; return whether they do."""
        if not self._admits(move):
            return False
        self.moves[move.channel] = move
        self._apply(move, 1)
        return True

    def give_up(self, moves: Sequence[Move]) -> None:
        """Take moves of this plan back."""
        for move in reversed(moves):
            del self.moves[move.channel]
            self._apply(move, -1)

    def _apply(self, move: Move, sign: int) -> None:
        """Add (``sign`` 1) or subtract (-1) the loads of a move, and count it."""
        for name, load in move.loads.items():
            self.servers[name].add(load * sign)
        for by_cpu, heap in self._roomiest.items():
            for name in move.loads:
                heapq.heappush(heap, (-self._room(self.servers[name], by_cpu=by_cpu), name))
        if not is_slot(move.channel):
            self._away.update(dict.fromkeys(move.left, sign))
            self._here.update(dict.fromkeys(move.joined, sign))
            return
        self._slots_away[move.source] += sign
        self._slots_here[move.target] += sign
        for server, (subscriptions, ratio) in self._step_with(move, sign).items():
            self._slot_subscriptions_moved[server], self._slot_load_moved[server] = subscriptions, ratio

    def _admits(self, move: Move) -> bool:
        return (
            move.channel not in self.moves
            and self.pins.get(move.channel, move.after) == move.after
            and self._has_place(move)
            and self.leaving.isdisjoint(move.after.servers)
            and self._closed.isdisjoint(move.joined)
            and (move.replicates or self.movable(move.channel, move.source))
            and all(permits(self, move) for permits in self._guards)
        )

    def _has_place(self, move: Move) -> bool:
        """Return whether the bounds of a plan allow one more move like this one."""
        if len(self.moves) >= self.room:
            return False
        if is_slot(move.channel):
            return self._has_place_for_slot(move)
        full = self.is_full or any(map(self.has_given, move.left)) or any(map(self.has_taken, move.joined))
        return not full

    def _has_place_for_slot(self, move: Move) -> bool:
        """Return whether a slot fits into the step: at least one per server does, whatever its load."""
        options = self.options
        if self.is_step_full:
            return False
        is_first = not any(self._slots_away[server] + self._slots_here[server] for server in move.loads)
        return is_first or all(
            subscriptions <= options.slot_subscriptions_max and ratio <= options.slot_load_ratio_max
            for subscriptions, ratio in self._step_with(move).values()
        )

    def _step_with(self, move: Move, sign: int = 1) -> dict[str, tuple[float, float]]:
        """Return, by server, the subscriptions and the load ratio that move with the slots so far and this one.

        ``sign`` is -1 for those that move without this one.
        """
        added = self.slot_subscriptions(move.source).get(move.channel, 0.0)
        return {
            server: (
                self._slot_subscriptions_moved.get(server, 0.0) + sign * added,
                self._slot_load_moved.get(server, 0.0) + sign * max(load_ratios(self.servers[server], load)),
            )
            for server, load in move.loads.items()
        }

    @property
    def targets(self) -> list[ServerLoad]:
        """The servers that may get channels."""
        closed = self.leaving | self._closed
        return [server for server in self.servers.values() if server.id not in closed]

    def _is_open(self, server: str) -> bool:
        """Return whether a server may get channels."""
        return server not in self.leaving and server not in self._closed

    @property
    def leaving(self) -> Set[str]:
        """The servers that give up all that they have, whoever wants that."""
        return self.draining.keys() | self.releasing.keys()

    @property
    def _closed(self) -> Set[str]:
        """The servers that keep what they have, and to which no channel comes."""
        return self.blind | self.full.keys()

    def candidates(self, present: Iterable[str]) -> list[ServerLoad]:
        """Return the servers that may have a channel which is at ``present`` now: full ones keep theirs."""
        kept = {server for server in present if server in self.full and server not in self.leaving}
        return [*self.targets, *(self.servers[server] for server in sorted(kept & self.servers.keys() - self.blind))]

    def roomiest(self, besides: str) -> ServerLoad | None:
        """Return the server with most room for channels of ``besides``; None when none takes channels.

        Room is what is left below the accepted load ratio: in bytes/s, or of the CPU if ``besides`` is short of that.
        """
        by_cpu = self.servers[besides].resource is Resource.CPU
        if by_cpu not in self._roomiest:
            rooms = [(-self._room(each, by_cpu=by_cpu), each.id) for each in self.targets]
            heapq.heapify(rooms)
            self._roomiest[by_cpu] = rooms
        heap, passed = self._roomiest[by_cpu], list[tuple[float, str]]()
        found: ServerLoad | None = None
        while heap and found is None:
            entry = heapq.heappop(heap)
            server = self.servers[entry[1]]
            if entry[0] == -self._room(server, by_cpu=by_cpu) and self._is_open(server.id):
                passed.append(entry)
                found = None if server.id == besides or self.has_taken(server.id) else server
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _room(self, server: ServerLoad, *, by_cpu: bool) -> float:
        ratio = self.options.accept_ratio - server.load_ratio
        return ratio if by_cpu else ratio * server.outgoing_bytes_per_s_max

    def slots_with(self, server: str) -> int:
        """Return how many slots a server has after the moves of this plan."""
        return len(self.slots.get(server, ())) - self._slots_away[server] + self._slots_here[server]

    @property
    def more_servers(self) -> str:
        """Advice, in words, for a cluster with too few servers."""
        text = "add servers, or see why their agents are down"
        if self.full:
            text += "".join(f", or relieve {server}, which uses {why}" for server, why in sorted(self.full.items()))
        return f"{text}, or end the draining of {', '.join(sorted(self.draining))}" if self.draining else text

    @property
    def is_full(self) -> bool:
        """Whether the plan moves ``moves_per_plan_max`` channels."""
        return len(self.moves) - self._slots_here.total() >= self.options.moves_per_plan_max

    @property
    def is_step_full(self) -> bool:
        """Whether the plan has so many moves that no slot is moved besides."""
        return len(self.moves) >= self.options.changes_per_event_max

    def has_given(self, server: str) -> bool:
        """Return whether this plan may move no more channels away from a server."""
        return self._away[server] >= self.options.moves_per_server_max

    def has_taken(self, server: str) -> bool:
        """Return whether this plan may move no more channels to a server."""
        return self._here[server] >= self.options.moves_per_server_max

    def check(self) -> None:
        """Assert the invariants of every plan, whatever the goals did."""
        moves, options = [move for move in self.moves.values() if not is_slot(move.channel)], self.options
        assert len(moves) <= options.moves_per_plan_max, f"a plan of {len(moves)} moves"
        leaving = Counter(server for move in moves for server in move.left)
        coming = Counter(server for move in moves for server in move.joined)
        for server in leaving | coming:
            most = max(leaving[server], coming[server])
            assert most <= options.moves_per_server_max, f"{server}: {leaving[server]} leave, {coming[server]} come"
        closed = self._closed
        for move in self.moves.values():
            wrong = self.leaving & set(move.after.servers) | closed & move.joined
            assert not wrong, f"{move.channel!r} comes to {sorted(wrong)}, which take no channels"
            assert self.pins.get(move.channel, move.after) == move.after, f"{move.channel!r} is pinned"
            assert move.before != move.after, f"{move.channel!r} is moved to where it is"

    def guard(self, permits: Callable[[Cluster, Move], bool]) -> None:
        """Accept from now on only moves for which ``permits`` returns True."""
        self._guards.append(permits)


def load_ratios(server: ServerLoad, load: Load) -> tuple[float, float]:
    """Return the parts of each resource of a server that a change of its load is, without its sign."""
    return abs(load.outgoing_bytes_per_s) / server.outgoing_bytes_per_s_max, abs(load.cpu_ratio)


class Goal(Protocol):
    """One aim of the balancer. ``name`` is the one that records show.

    What a goal remembers is its own, as a copy of it (``copy.deepcopy``) must be able to decide without an effect.
    """

    name: str

    def propose(self, cluster: Cluster) -> list[Move]:
        """Return moves towards the goal, in order, already applied to ``cluster``. Always ends."""
        ...

    def permits(self, cluster: Cluster, move: Move) -> bool:
        """Return whether a move of a later goal does no harm to this one."""
        ...


def decide(goals: Iterable[Goal], cluster: Cluster) -> Decision:
    """Run the goals in their order. A later goal cannot undo the moves that an earlier one needs."""
    moves: list[Move] = []
    for goal in goals:
        known, cluster.goal = len(cluster.findings), goal.name
        moves += goal.propose(cluster)
        cluster.findings[known:] = [replace(finding, goal=goal.name) for finding in cluster.findings[known:]]
        cluster.guard(goal.permits)
    cluster.check()
    return Decision(tuple(moves), tuple(cluster.findings))


def busiest_first(loads: Iterable[ChannelRate], server: ServerLoad | None = None) -> list[ChannelRate]:
    """Return loads in descending order: of outgoing bytes/s, or of the tighter resource of ``server``."""
    if server is not None and server.resource is Resource.CPU:
        return sorted(loads, key=lambda load: (-load.cpu_ratio, -load.outgoing_bytes_per_s, load.channel))
    return sorted(loads, key=lambda load: (-load.outgoing_bytes_per_s, load.channel))
