"""Keeps the plan of a balancer with its latest changes, to bring older copies up to date."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dynamoth.machine.events import CommandPart
from dynamoth.plan.plan import TAKEOVER_VERSIONS, Assignment, Entry, Mode, Plan, PlanDelta
from dynamoth.plan.slots import is_slot
from dynamoth.protocol.control import PlanChange, pack_control
from dynamoth.protocol.stored_plan import header_fields, write_delta
from dynamoth_balancer.install.folding import is_folded

HISTORY_MAX = 1000
"""A server that is more versions behind gets the whole plan instead of a change. Each request of an operator may be a
version, and many may come before a server has answered."""

HISTORY_ENTRIES_MAX = 100_000
"""Most entries in the changes that are kept: some 10 MB."""

DELTA_ENTRIES_MAX = 10_000
"""A larger change is written as a whole plan, in commands that Redis executes in a millisecond each."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change from the version of a copy to the present one."""

    delta: PlanDelta
    #: The HSET that brings the copy up to date.
    command: Sequence[CommandPart]
    #: How many fields it adds to a correct copy.
    new_fields: int
    #: The ``PlanChange`` for the agent.
    message: bytes


@dataclass(frozen=True, slots=True)
class _Step:
    delta: PlanDelta
    #: How many fields it adds to a correct copy.
    new_fields: int


class PlanIndex:
    """Finds the replicated channels, those at some servers, and the slots of each, without going through the plan.

    Args:
        plan: the plan.
        servers: the servers whose channels and slots are recorded by name.

    """

    def __init__(self, plan: Plan, servers: Iterable[str]) -> None:
        #: The assignments of the replicated channels.
        self.replicated: dict[bytes, Assignment] = {}
        homes = plan.ring.slots
        #: By server, the slots that are there or on their way there.
        self.slots_at = {server: set(homes.get(server, ())) for server in plan.servers}
        self._slot_servers = {slot: server for server, slots in homes.items() for slot in slots}
        #: By server, the channels for which somebody may use it.
        self.named_at: dict[str, set[bytes]] = {server: set() for server in servers}
        #: And the slots.
        self.slots_named_at = {server: set(homes.get(server, ())) for server in self.named_at}
        self.update(plan.entries)

    def add(self, server: str) -> None:
        """Begin with a new server, which has nothing."""
        self.slots_at.setdefault(server, set())

    def remove(self, server: str) -> None:
        """Forget a server that has nothing left."""
        assert not self.slots_at.pop(server), f"{server} has slots"
        self.named_at.pop(server, None)
        self.slots_named_at.pop(server, None)

    def is_unused(self, server: str) -> bool:
        """Return whether nobody may use a server for a channel or slot; False where that is not recorded."""
        return server in self.named_at and not (self.named_at[server] or self.slots_named_at[server])

    def watch(self, plan: Plan, servers: Iterable[str]) -> None:
        """Record the channels and slots of these servers by name, and no longer those of others."""
        names = set(servers)
        for server in self.named_at.keys() - names:
            del self.named_at[server], self.slots_named_at[server]
        if new := names - self.named_at.keys():
            added = PlanIndex(plan, new)
            self.named_at |= added.named_at
            self.slots_named_at |= added.slots_named_at

    def forget(self, channels: Iterable[bytes]) -> None:
        """Take channels out that have no entry of their own any more. They were not replicated."""
        for names in self.named_at.values():
            names.difference_update(channels)

    def update(self, changed: Mapping[bytes, Entry]) -> None:
        """Take the new entries of some channels in."""
        for channel, entry in changed.items():
            assignment = entry.route.assignment
            if is_slot(channel):
                [server] = assignment.servers
                self.slots_at.get(self._slot_servers[channel], set()).discard(channel)
                self.slots_at[server].add(channel)
                self._slot_servers[channel] = server
            if assignment.mode is not Mode.SINGLE:
                self.replicated[channel] = assignment
            else:
                self.replicated.pop(channel, None)
            for server, names in (self.slots_named_at if is_slot(channel) else self.named_at).items():
                if follows(entry, server):
                    names.add(channel)
                else:
                    names.discard(channel)


def follows(entry: Entry, server: str) -> bool:
    """Return whether somebody may use a server for a channel."""
    return any(server in route.assignment.servers for route in entry.live_routes)


class PlanBook:
    """The plan of one term of a balancer, the latest changes, and the versions with known content."""

    def __init__(self, plan: Plan, known: Mapping[int, Plan], *, is_complete: bool = False, term: int = 0) -> None:
        """Begin a term with ``plan``. ``known`` are the plans that it was made from, by version.

        ``is_complete``: all servers were read, and one had a copy that the predecessor wrote. Then no version above
        ``plan`` can have been issued.

        ``term`` is the term at the servers; 0 for none.

        A change without entries brings a known plan to ``plan`` if the two differ only in their versions.
        """
        _ = plan.ring  # made here, once: later versions take it over
        self.plan = plan
        self.term = term
        #: The server that has refused a write, as it knows a newer term; empty for none.
        self.fenced_at = ""
        self.is_complete = is_complete
        self._first = plan.version
        #: Versions of earlier balancers whose entries are in our plan, or are older than ours.
        self._known = set(known)
        #: The latest changes, oldest first: at most ``HISTORY_MAX``, with ``HISTORY_ENTRIES_MAX`` entries.
        self._steps: deque[_Step] = deque()
        self._entries_in_steps = 0
        #: Changes to the present version, by their first version; made once for all servers.
        self._changes: dict[int, Change | None] = {}
        for version, old in known.items():
            if version < plan.version and same_content(old, plan):
                self._steps.append(_Step(PlanDelta(version, plan.version, MappingProxyType({})), 0))

    @property
    def is_used_up(self) -> bool:
        """Whether the plan's version is above those of the term: it is written in a new term only."""
        return 0 < self.term <= self.plan.version - TAKEOVER_VERSIONS

    def knows(self, version: int) -> bool:
        """Return whether our plan includes everything that a copy of this version can hold."""
        return version in self._known or self._first <= version <= self.plan.version

    def begin_term(self, term: int) -> None:
        """Go on in another term of the same balancer, before which no other one has led."""
        self.term, self.fenced_at = term, ""
        self.advance(self.plan.with_entries({}, term), ())

    def advance(self, plan: Plan, channels: Iterable[bytes]) -> None:
        """Begin the next version, in which only the entries of ``channels`` are new, and perhaps what is no entry."""
        old, self.plan = self.plan, plan
        delta = old.diff(plan, channels)
        new_channels = sum(channel not in old.entries for channel in delta.entries)
        self._entries_in_steps += len(delta.entries)
        while len(self._steps) >= HISTORY_MAX or (self._steps and self._entries_in_steps > HISTORY_ENTRIES_MAX):
            self._entries_in_steps -= len(self._steps.popleft().delta.entries)
        self._steps.append(_Step(delta, new_channels + header_fields(plan) - header_fields(old)))
        self._changes.clear()

    def replace(self, plan: Plan) -> None:
        """Begin the next version, from which entries are missing: every copy is written as a whole."""
        self.plan = plan
        self._steps.clear()
        self._entries_in_steps = 0
        self._changes.clear()

    def take_in(self, stranger: Plan, version: int) -> dict[bytes, Entry]:
        """Merge a copy that another balancer left; return its entries that are newer than ours.

        Not its servers and administration: what most servers store of these was read at the takeover.

        If there are any, or if its version is not below ours, the plan continues with ``version``, which must be above
        both.

        Raises:
            PlanError: it names a server that the plan does not list; nothing is merged then.

        """
        mine = self.plan.entries
        newer = {
            channel: entry
            for channel, entry in stranger.entries.items()
            if entry.newer_than(mine.get(channel)) and not is_folded(channel, entry, mine)
        }
        newer_rules = stranger.compatibility.version > self.plan.compatibility.version
        if newer or newer_rules or stranger.version >= self.plan.version:
            plan = self.plan.with_entries(newer, version)
            plan = plan.following(stranger.compatibility) if newer_rules else plan
            self.advance(plan, newer)
        self._known.add(stranger.version)
        return newer

    def change_from(self, version: int) -> Change | None:
        """Return the change from ``version`` to the present plan; None when a copy must be written as a whole."""
        if version not in self._changes:
            self._changes[version] = self._change_from(version)
        return self._changes[version]

    def _change_from(self, version: int) -> Change | None:
        steps: list[_Step] = []
        at = version
        for step in self._steps:
            if step.delta.base == at:
                steps.append(step)
                at = step.delta.version
        if not steps or at != self.plan.version:
            return None
        delta = steps[0].delta.then(*(step.delta for step in steps[1:]))
        if len(delta.entries) > DELTA_ENTRIES_MAX:
            return None
        new_fields = sum(step.new_fields for step in steps)
        return Change(delta, write_delta(delta, self.plan), new_fields, pack_control(PlanChange(delta)))


def same_content(one: Plan, other: Plan) -> bool:
    """Return whether two plans differ only in their versions."""
    return (
        one.base == other.base
        and one.virtual_nodes == other.virtual_nodes
        and one.compatibility == other.compatibility
        and one.administration == other.administration
        and one.others == other.others
        and dict(one.servers) == dict(other.servers)
        and dict(one.entries) == dict(other.entries)
    )


def merge_entries(one: Mapping[bytes, Entry], other: Mapping[bytes, Entry]) -> Mapping[bytes, Entry]:
    """Return the newest entry of each channel that either mapping names, unless it was folded in ``one``."""
    newer = {
        channel: entry
        for channel, entry in other.items()
        if entry.newer_than(one.get(channel)) and not is_folded(channel, entry, one)
    }
    return MappingProxyType({**one, **newer})
