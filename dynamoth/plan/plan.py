"""The plan: which servers carry which channel, and which changes are in progress.

A plan is immutable and versioned. It names only the channels and slots whose assignment differs from the ring, or ever
did. A channel that it does not name inherits the entry of its slot. The entry of a channel can be folded into that of
its slot when both are alike; the slot gets a later epoch then, so that no epoch goes back.

An entry goes through three phases, each step in a plan version of its own::

    PREPARED   the dispatchers of old and new servers forward in both directions; clients still follow the old route
    ACTIVE     clients learn the new route; dispatchers forward until nobody listens on an old one
    SETTLED    nobody listens on an old route; stale publishers are still redirected, without end
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from dynamoth.errors import PlanError
from dynamoth.names import replica_channel
from dynamoth.plan.administration import NO_ADMINISTRATION, Administration
from dynamoth.plan.compatibility import NO_COMPATIBILITY, Compatibility, CompatibilityRule
from dynamoth.plan.ring import RING_POINTS_MAX, VIRTUAL_NODES, VIRTUAL_NODES_MAX, Ring, ring_of
from dynamoth.plan.slots import hash_of, is_slot, slot_of

_T = TypeVar("_T")

EPOCH_MAX = 2**32 - 1
"""Epochs and versions have 32 bits."""

TAKEOVER_VERSIONS = 1000
"""Versions left out at each takeover: more than a balancer can write between two checks of its lease. 32 bits last for
4 million takeovers."""

VERSIONS_IN_RESERVE = 10_000
"""With fewer versions left, no transition begins, no copy is merged and no term is claimed: transitions in progress
must be able to settle."""

JOIN_S = 10.0
"""A server that was not in use carries no channel for this time after the plan has listed it. Clients that listen at
every server, for patterns, get there meanwhile."""


class Mode(enum.IntEnum):
    """How a channel is spread over its servers (Dynamoth, section II-B)."""

    SINGLE = 1
    ALL_SUBSCRIBERS = 2
    ALL_PUBLISHERS = 3


class Phase(enum.IntEnum):
    """How far the latest change of a channel has come. Never goes back within an epoch."""

    PREPARED = 1
    ACTIVE = 2
    SETTLED = 3


@dataclass(frozen=True, slots=True)
class Server:
    """One Redis process: its id and where clients, agents and balancer reach it."""

    id: str
    url: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The servers that carry a channel, and how they share it. SINGLE has exactly one server."""

    mode: Mode
    servers: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse an assignment that no plan can have."""
        if not self.servers:
            raise PlanError("an assignment needs at least one server")
        if len(set(self.servers)) != len(self.servers):
            raise PlanError(f"an assignment names a server twice: {', '.join(self.servers)}")
        if self.mode is Mode.SINGLE and len(self.servers) != 1:
            raise PlanError(f"mode SINGLE takes one server, not {len(self.servers)}")


@lru_cache(maxsize=1024)
def single(server: str) -> Assignment:
    """Return the assignment of a channel to one server; the same object for all channels there."""
    return Assignment(Mode.SINGLE, (server,))


class Location(NamedTuple):
    """The place of a channel: a physical channel name at a server. A tuple, as many are made and compared."""

    server: str
    physical: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """An assignment and its epoch: clients follow it."""

    epoch: int
    assignment: Assignment

    def locations(self, channel: bytes) -> tuple[Location, ...]:
        """Return the places of ``channel`` for those who follow this route."""
        servers = self.assignment.servers
        if self.assignment.mode is Mode.SINGLE:
            return (Location(servers[0], channel),)
        physical = replica_channel(channel, self.epoch)
        return tuple(Location(server, physical) for server in servers)

    def published_at(self, publisher: int, channel: bytes) -> tuple[Location, ...]:
        """Return where a publisher, or a forwarder for it, sends a message: all locations of ALL_PUBLISHERS, else one.

        Under ALL_SUBSCRIBERS a publisher uses the same one for the whole epoch: another for each message would break
        the order (G3, docs/guarantees.md).
        """
        locations = self.locations(channel)
        if self.assignment.mode is Mode.ALL_SUBSCRIBERS:
            return (locations[(publisher ^ self.epoch) % len(locations)],)
        return locations

    def listened_at(self, subscriber: int, channel: bytes) -> tuple[Location, ...]:
        """Return where a subscriber listens: one location of ALL_PUBLISHERS, the same for the whole epoch, else all."""
        locations = self.locations(channel)
        if self.assignment.mode is Mode.ALL_PUBLISHERS:
            return (locations[(subscriber ^ self.epoch) % len(locations)],)
        return locations


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of one channel in a plan.

    ``route`` is the newest; ``previous`` holds the older routes that some subscriber may still follow, the one that
    clients have learned last at the end. It is empty exactly when the entry is SETTLED.
    """

    route: Route
    phase: Phase
    previous: tuple[Route, ...] = ()

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if (self.phase is Phase.SETTLED) != (not self.previous):
            raise PlanError("an entry has previous routes exactly while it is not settled")

    @property
    def client_route(self) -> Route:
        """The route that clients learn: the newest active one."""
        return self.previous[-1] if self.phase is Phase.PREPARED else self.route

    @property
    def live_routes(self) -> tuple[Route, ...]:
        """Every route that some subscriber may follow, the newest first."""
        return (self.route, *reversed(self.previous))

    def left(self, channel: bytes) -> frozenset[Location]:
        """Return the locations that subscribers leave: the old ones that are not new as well."""
        old = (place for route in self.previous for place in route.locations(channel))
        return frozenset(old).difference(self.route.locations(channel))

    def newer_than(self, other: Entry | None) -> bool:
        """Return whether this entry supersedes ``other``: by epoch, then by phase."""
        return other is None or (self.route.epoch, self.phase) > (other.route.epoch, other.phase)

    def may_follow(self, known: Entry) -> bool:
        """Return whether a plan that had ``known`` can have this entry now.

        Each change of a channel begins at the route before it. So an entry in transition from an older route than that
        of ``known`` is of another plan.
        """
        if self.route.epoch == known.route.epoch:
            return self.route == known.route and self.phase >= known.phase
        begins_at = max((route.epoch for route in self.previous), default=self.route.epoch)
        return begins_at >= known.route.epoch


def missing(channel: bytes, routes: Iterable[Route], reached: Set[Location], publisher: int) -> list[Location]:
    """Return where a message that has reached ``reached`` must still be forwarded, for followers of ``routes``.

    For SINGLE its server. For ALL_SUBSCRIBERS any one of the servers, as every subscriber listens at all of them: the
    one for its publisher. For ALL_PUBLISHERS every one. Deterministic, without repetition.
    """
    targets: dict[Location, None] = {}
    for route in routes:
        any_will_do = route.assignment.mode is Mode.ALL_SUBSCRIBERS
        if any_will_do and not reached.isdisjoint(route.locations(channel)):
            continue
        targets.update((place, None) for place in route.published_at(publisher, channel) if place not in reached)
    return list(targets)


@dataclass(frozen=True)
class Plan:
    """One version of the plan.

    ``base`` are the ids of the servers of the ring; one that has left the cluster is not in ``servers``, and all its
    slots have entries. ``compatibility`` are the rules for channels that plain Redis clients use, too.
    ``administration`` is what administrators have decided; agents and clients do without it. ``others`` are the fields
    of the stored plan that only newer software knows; they are kept.
    """

    version: int
    servers: Mapping[str, Server]
    base: tuple[str, ...]
    entries: Mapping[bytes, Entry] = field(default_factory=lambda: MappingProxyType({}))
    virtual_nodes: int = VIRTUAL_NODES
    compatibility: Compatibility = NO_COMPATIBILITY
    administration: Administration = NO_ADMINISTRATION
    others: Mapping[bytes, bytes] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse a plan that nobody could follow."""
        if not self.servers:
            raise PlanError("a plan needs at least one server")
        if not self.base or len(set(self.base)) != len(self.base):
            raise PlanError(f"the ring needs servers, each named once, not: {', '.join(self.base) or 'none'}")
        if not 1 <= self.virtual_nodes <= VIRTUAL_NODES_MAX:
            raise PlanError(f"a ring has 1 to {VIRTUAL_NODES_MAX} virtual nodes per server, not {self.virtual_nodes}")
        if len(self.base) * self.virtual_nodes > RING_POINTS_MAX:
            raise PlanError(f"a ring has at most {RING_POINTS_MAX} points: take fewer servers or virtual nodes")
        if not 0 <= self.version <= EPOCH_MAX:
            raise PlanError(f"plan version {self.version} does not fit into 32 bits")
        strange = sorted(self.compatibility.servers.difference(self.servers))
        if strange:
            raise PlanError(f"compatibility rules name servers that the plan does not list: {', '.join(strange)}")
        if (reason := self.administration.why_unfit(self.servers)) is not None:
            raise PlanError(reason)

    @classmethod
    def initial(
        cls,
        servers: Iterable[Server],
        virtual_nodes: int = VIRTUAL_NODES,
        compatibility: Compatibility = NO_COMPATIBILITY,
    ) -> Plan:
        """Return plan 0: every channel where rules or the ring put it (Dynamoth, section II-C)."""
        by_id = {server.id: server for server in servers}
        return cls(0, by_id, tuple(sorted(by_id)), virtual_nodes=virtual_nodes, compatibility=compatibility)

    @cached_property
    def ring(self) -> Ring:
        """The ring over the base servers."""
        return ring_of(self.base, self.virtual_nodes)

    @cached_property
    def ring_mark(self) -> bytes:
        """A few bytes that identify the ring."""
        return b"%08x" % zlib.crc32(repr((self.base, self.virtual_nodes)).encode())

    def home_route(self, channel: bytes) -> Route:
        """Return the route of plan 0, which a rule or the ring gives; the same object for all channels of a server."""
        rule = self.compatibility.rule_of(channel) if self.compatibility.rules else None
        home = self.ring.home(channel) if rule is None else rule.server
        return self._homes.get(home) or self._homes[self._instead(channel)]

    def _instead(self, channel: bytes) -> str:
        """Return where to ask for a channel whose home has left the cluster: any server stores where its slot is."""
        return sorted(self.servers)[hash_of(channel) % len(self.servers)]

    @cached_property
    def _homes(self) -> dict[str, Route]:
        return {server: Route(0, single(server)) for server in self.servers}

    def entry(self, name: bytes) -> Entry:
        """Return the entry of a channel or slot; that of its slot, or its home, where the plan does not name it."""
        return self.entries.get(name) or self.entries.get(self.slot_above(name) or b"") or self._home_entry(name)

    def _home_entry(self, name: bytes) -> Entry:
        return Entry(self.home_route(name), Phase.SETTLED)

    def slot_above(self, name: bytes) -> bytes | None:
        """Return the slot whose entry a channel inherits; None where it has its own, or the home that a rule gives."""
        if name in self.entries or is_slot(name):
            return None
        is_ruled = self.compatibility.rules and self.compatibility.rule_of(name) is not None
        return None if is_ruled else slot_of(name)

    def with_entries(self, changed: Mapping[bytes, Entry], version: int | None = None) -> Plan:
        """Return the next version (or ``version``) with the ``changed`` entries.

        Raises:
            PlanError: a route names a server that the plan does not list, or an epoch or phase would go back, or an
                epoch is above the version.

        """
        next_version = self.version + 1 if version is None else version
        for channel, entry in changed.items():
            if entry.route.epoch > next_version:
                raise PlanError(f"the entry of {channel!r} has epoch {entry.route.epoch} in version {next_version}")
            for server in (server for route in entry.live_routes for server in route.assignment.servers):
                if server not in self.servers:
                    raise PlanError(f"the entry of {channel!r} names server {server!r}, which the plan does not list")
            if not entry.newer_than(self.entries.get(channel)):
                raise PlanError(f"the entry of {channel!r} is not newer than the one it would replace")
            if is_slot(channel) and any(route.assignment.mode is not Mode.SINGLE for route in entry.live_routes):
                raise PlanError(f"{channel.decode()} is a slot, and slots have one server")
        entries = MappingProxyType({**self.entries, **changed})
        return self._replaced(version=next_version, entries=entries)

    def with_compatibility(self, rules: Iterable[CompatibilityRule]) -> Plan:
        """Return the next version, with these compatibility rules. Raises PlanError.

        The caller has made sure that no channel moves by that.
        """
        version = self.version + 1
        return self._replaced(version=version, compatibility=Compatibility(version, tuple(rules)))

    def following(self, compatibility: Compatibility) -> Plan:
        """Return the same version with other compatibility rules. Raises PlanError: they name unknown servers."""
        return self._replaced(compatibility=compatibility)

    def administered(self, administration: Administration, servers: Iterable[Server] | None = None) -> Plan:
        """Return the next version, with another administration, and perhaps with other servers.

        Raises:
            PlanError: a server that is missing is in use, or the administration does not fit the servers.

        """
        version = self.version + 1
        listed = self.servers.values() if servers is None else servers
        return self.listing(listed, replace(administration, version=version), version)

    def listing(self, servers: Iterable[Server], administration: Administration, version: int | None = None) -> Plan:
        """Return the same version (or ``version``) with this list of servers and this administration.

        Raises:
            PlanError: as :meth:`administered`.

        """
        by_id = {server.id: server for server in servers}
        gone = self.servers.keys() - by_id.keys()
        if gone and (used := sorted(gone & self.servers_in_use)):
            raise PlanError(f"a plan lists the servers that it uses, and these are missing: {', '.join(used)}")
        new_version = self.version if version is None else version
        return self._replaced(version=new_version, servers=by_id, administration=administration)

    def has_left(self, server: str) -> bool:
        """Return whether a server was in the plan once and is not any more; ``REMOVED_MAX`` are remembered."""
        return server not in self.servers and (server in self.administration.removed or server in self.base)

    @cached_property
    def servers_in_use(self) -> frozenset[str]:
        """The servers that may have channels: those of rules, of entries, and of slots that never moved."""
        assignments = {route.assignment for entry in self.entries.values() for route in entry.live_routes}
        return frozenset(
            (
                *(server for server, slots in self.ring.slots.items() if not slots <= self.entries.keys()),
                *self.compatibility.servers,
                *(server for assignment in assignments for server in assignment.servers),
            )
        )

    def begin(self, assignments: Mapping[bytes, Assignment]) -> Plan:
        """Return the next version, with a PREPARED transition for each given channel.

        Raises:
            PlanError: when a channel is in transition already, or has this assignment already.

        """
        epoch = self.version + 1
        changed: dict[bytes, Entry] = {}
        for channel, assignment in assignments.items():
            entry = self.entry(channel)
            if entry.phase is not Phase.SETTLED:
                raise PlanError(f"channel {channel!r} is in transition; wait until it has settled")
            if entry.route.assignment == assignment:
                raise PlanError(f"channel {channel!r} is there already")
            changed[channel] = Entry(Route(epoch, assignment), Phase.PREPARED, (entry.route,))
        return self.with_entries(changed)

    def fail_over(self, assignments: Mapping[bytes, Assignment]) -> Plan:
        """Return the next version, with a PREPARED transition for each given channel, whatever its phase is now.

        Subscribers may follow any of its routes, as its servers have failed in the middle of a change.
        """
        epoch = self.version + 1
        changed: dict[bytes, Entry] = {}
        for channel, assignment in assignments.items():
            entry = self.entry(channel)
            newest_last = entry.phase is not Phase.PREPARED  # else clients have not learned the newest route
            previous = (*entry.previous, entry.route) if newest_last else (entry.route, *entry.previous)
            changed[channel] = Entry(Route(epoch, assignment), Phase.PREPARED, previous)
        return self.with_entries(changed)

    def roll_back(self, channels: Iterable[bytes]) -> Plan:
        """Return the next version, in which PREPARED transitions are undone whose new routes nobody has used.

        A channel that was at one server is settled there again, under a new epoch. The names of replicas contain the
        epoch, so a channel that was replicated begins another transition.

        Raises:
            PlanError: one is not PREPARED, or began before an earlier one had settled.

        """
        epoch = self.version + 1
        changed: dict[bytes, Entry] = {}
        for channel in channels:
            entry = self.entries[channel]
            if entry.phase is not Phase.PREPARED or len(entry.previous) != 1:
                raise PlanError(f"the transition of channel {channel!r} cannot be undone: clients may have followed it")
            [before] = entry.previous
            route = Route(epoch, before.assignment)
            is_single = before.assignment.mode is Mode.SINGLE
            changed[channel] = Entry(route, Phase.SETTLED) if is_single else Entry(route, Phase.PREPARED, (before,))
        return self.with_entries(changed)

    def activate(self, channels: Iterable[bytes]) -> Plan:
        """Return the next version, in which the PREPARED transitions of ``channels`` are ACTIVE."""
        return self.with_entries({channel: replace(self.entries[channel], phase=Phase.ACTIVE) for channel in channels})

    def settle(self, channels: Iterable[bytes]) -> Plan:
        """Return the next version, in which the ACTIVE transitions of ``channels`` are SETTLED.

        Raises:
            PlanError: one is not ACTIVE: subscribers have not learned the new route.

        """
        channels = list(channels)
        for channel in channels:
            if self.entries[channel].phase is not Phase.ACTIVE:
                raise PlanError(f"channel {channel!r} is not active; it cannot settle")
        return self.with_entries({channel: Entry(self.entries[channel].route, Phase.SETTLED) for channel in channels})

    def folds(self, channel: bytes) -> bool:
        """Return whether a channel has an entry of its own without need: it is where its slot is, both settled."""
        entry = self.entries.get(channel)
        if entry is None or entry.phase is not Phase.SETTLED or is_slot(channel):
            return False
        slot = self.entry(slot_of(channel))
        is_alike = slot.phase is Phase.SETTLED and slot.route.assignment == entry.route.assignment
        return is_alike and self.compatibility.rule_of(channel) is None

    def fold(self, channels: Iterable[bytes]) -> Plan:
        """Return the next version, in which these channels follow their slots again. Nothing changes its place.

        The epoch of a slot is above all that its channels had.

        Raises:
            PlanError: a channel does not fold.

        """
        entries = dict(self.entries)
        for channel in channels:
            if not self.folds(channel):
                raise PlanError(f"channel {channel!r} is not where its slot is, or has no entry of its own")
            route, slot = entries.pop(channel).route, slot_of(channel)
            if self.entry(slot).route.epoch <= route.epoch:
                entries[slot] = Entry(Route(self.version + 1, route.assignment), Phase.SETTLED)
        return self._replaced(version=self.version + 1, entries=MappingProxyType(entries))

    def _replaced(self, **changes: Any) -> Plan:
        new = replace(self, **changes)
        if "ring" in self.__dict__:
            new.__dict__["ring"] = self.__dict__["ring"]
        return new

    def diff(self, newer: Plan, channels: Iterable[bytes] | None = None) -> PlanDelta:
        """Return the changes from this plan to ``newer``, a later version with the same ring.

        With ``channels``, the entries of exactly these are taken for changed.
        """
        mine = self.entries
        if channels is None:
            channels = (channel for channel, entry in newer.entries.items() if mine.get(channel) != entry)
        changed = {channel: newer.entries[channel] for channel in channels}
        return PlanDelta(
            self.version,
            newer.version,
            changed,
            newer.compatibility if newer.compatibility != self.compatibility else None,
            tuple(newer.servers.values()) if newer.servers != self.servers else None,
            newer.administration if newer.administration != self.administration else None,
        )

    def apply(self, delta: PlanDelta) -> Plan:
        """Return the plan after ``delta``.

        Raises:
            PlanError: when the delta was not made for this version, or does not fit it; the holder must read the whole
                plan again.

        """
        if delta.base != self.version:
            raise PlanError(f"a delta from version {delta.base} does not fit version {self.version}")
        plan = self
        if delta.servers is not None:  # the list may lack a server that an entry before the change names
            joined = {**self.servers, **{server.id: server for server in delta.servers}}
            plan = plan._replaced(servers=joined)
        plan = plan.with_entries(delta.entries, delta.version)
        if delta.compatibility is not None:
            if delta.compatibility.version > delta.version:
                raise PlanError(f"rules of version {delta.compatibility.version} do not fit version {delta.version}")
            plan = plan.following(delta.compatibility)
        if delta.servers is None and delta.administration is None:
            return plan
        servers = plan.servers.values() if delta.servers is None else delta.servers
        return plan.listing(servers, delta.administration or plan.administration)


@dataclass(frozen=True, slots=True)
class PlanDelta:
    """The changes from plan version ``base`` to ``version``.

    ``compatibility``, ``servers`` (all of them) and ``administration`` are None when they stay.
    """

    base: int
    version: int
    entries: Mapping[bytes, Entry]
    compatibility: Compatibility | None = None
    servers: tuple[Server, ...] | None = None
    administration: Administration | None = None

    def then(self, *later: PlanDelta) -> PlanDelta:
        """Return all changes as one; each of ``later`` begins at the version where the one before it ends."""
        steps = (self, *later)
        return PlanDelta(
            self.base,
            steps[-1].version,
            {channel: entry for step in steps for channel, entry in step.entries.items()},
            _latest(step.compatibility for step in steps),
            _latest(step.servers for step in steps),
            _latest(step.administration for step in steps),
        )


def _latest(values: Iterable[_T | None]) -> _T | None:
    """Return the last value that is not None, if there is one."""
    return next((value for value in reversed(list(values)) if value is not None), None)
