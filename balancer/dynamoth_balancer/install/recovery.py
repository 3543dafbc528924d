"""Makes the plan of a new leader from the copies that it finds.

Each copy is the plan as some balancer wrote it, at some time. For each channel the newest entry (by epoch, then phase)
of all copies is right: every phase follows from what is stored, and a newer one only began because everything it needs
was stored.

The list of servers, and what administrators have decided, come from the newest copy (:func:`listing_of`): a list is
done when most servers of the old and of the new one store it, and then every balancer reads one of these. The
configuration only has the servers of a new cluster. An older copy may name servers that have left since: the newest
copy has newer entries then.

A copy that no balancer of ours can have written is reported, not used, and overwritten: its ring is not that of most
copies, or it names servers that are not listed, or its version leaves no room for others.

The new plan's version is far above those found: a predecessor may have written newer versions where we cannot read now,
or its last writes may still be on their way. So no epoch has two meanings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamoth.errors import ConfigError
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, TAKEOVER_VERSIONS, VERSIONS_IN_RESERVE, Entry, Plan, Server
from dynamoth.plan.ring import VIRTUAL_NODES
from dynamoth_balancer.install.book import merge_entries

VERSIONS_LOST_MAX = 2**24
"""An agent's version further above all stored ones is not believed: no balancer makes as many changes in years."""

NAMED_MAX = 5
"""Most servers that an error text names."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the plan at a server; ``believed`` when it was written to this very Redis process."""

    server: str
    plan: Plan
    believed: bool
    #: Whether another balancer may have led since: all other copies are newer then, whatever their versions.
    is_outdated: bool = False


@dataclass(frozen=True, slots=True)
class Conflict:
    """A copy, or a part of it, that no balancer of ours can have written: it is not used, and overwritten."""

    server: str
    reason: str


def listing_of(listed: Sequence[Server], headers: Sequence[Copy], virtual_nodes: int) -> Plan | None:
    """Return the header with the list of servers that is right; None without headers of one cluster.

    Of the newest version, the list that most servers store: others of this version are forged.

    Args:
        listed: the servers of the present list, or of the configuration. It is right where as many store others.
        headers: one for each server that stores a plan; entries do not matter.
        virtual_nodes: those of the ring of plan 0.

    """
    known = [each for each in headers if each.server in each.plan.servers or each.server in each.plan.base]
    try:
        usable, _ = _of_one_cluster(listed, known, virtual_nodes)
    except ConfigError:  # it is reported when the copies are read
        return None
    newest = max((each.plan.version for each in usable), default=-1)
    plans = [each.plan for each in usable if each.plan.version == newest]
    votes = Counter(frozenset(plan.servers) for plan in plans)
    own = frozenset(server.id for server in listed)
    return max(plans, key=lambda plan: (votes[frozenset(plan.servers)], frozenset(plan.servers) == own), default=None)


def recover(
    listed: Sequence[Server],
    copies: Iterable[Copy],
    *,
    is_complete: bool,
    first: int = TAKEOVER_VERSIONS,
    virtual_nodes: int = VIRTUAL_NODES,
    rules: tuple[CompatibilityRule, ...] = (),
) -> tuple[Plan, list[Copy], list[Conflict]]:
    """Return the plan to continue with, the copies that it was made from, and those left out.

    Args:
        listed: the servers of the plan, as ``listing_of`` has them; those of the configuration in a new cluster.
        copies: all copies found; none makes plan 0, with the ring over all these servers.
        is_complete: False when some server could not be read, or one has granted a term before.
        first: the first version of the balancer's term.
        virtual_nodes: for the ring of plan 0.
        rules: the compatibility rules of plan 0; a stored plan has its own.

    Raises:
        ConfigError: the copies are of different clusters.

    """
    by_id = {server.id: server for server in listed}
    usable, conflicts = _of_one_cluster(listed, list(copies), virtual_nodes)
    usable.sort(key=lambda copy: (copy.is_outdated, -copy.plan.version, copy.plan.servers.keys() != by_id.keys()))
    entries: Mapping[bytes, Entry] = {}
    taken: list[Copy] = []
    for copy in usable:  # the newest one first
        if (reason := _why_left_out(copy.plan, by_id, taken, entries)) is not None:
            conflicts.append(Conflict(copy.server, reason))
            continue
        entries = merge_entries(entries, copy.plan.entries)
        taken.append(copy)
    if not taken:
        plan = Plan.initial(listed, virtual_nodes, Compatibility(0, rules))
        return plan if is_complete else replace(plan, version=first), [], conflicts
    newest = taken[0].plan
    version = max(first, version_after(newest.version))
    compatibility = max((copy.plan.compatibility for copy in taken), key=lambda rules: rules.version)
    administration = newest.administration.fitting(by_id, version)
    others = newest.others
    plan = Plan(version, by_id, newest.base, entries, newest.virtual_nodes, compatibility, administration, others)
    return plan, taken, conflicts


def _why_left_out(
    plan: Plan, listed: Collection[str], taken: Sequence[Copy], entries: Mapping[bytes, Entry]
) -> str | None:
    """Return why a copy cannot be used besides those that are taken, whose entries are given; None when it can."""
    if any(copy.plan.version == plan.version and copy.plan.servers.keys() != plan.servers.keys() for copy in taken):
        more = sorted(plan.servers.keys() - set(listed))
        return f"it has the version of other copies, and lists other servers: {some_of(more) or 'fewer'}"
    used = servers_of(newer_entries(plan, entries)) if taken else plan.servers_in_use
    if strange := sorted((used | plan.compatibility.servers) - set(listed)):
        return f"its channels are at servers that the plan does not list: {some_of(strange)}"
    return None


def newer_entries(plan: Plan, entries: Mapping[bytes, Entry]) -> dict[bytes, Entry]:
    """Return the entries of a plan that are newer than these."""
    return {channel: entry for channel, entry in plan.entries.items() if entry.newer_than(entries.get(channel))}


def servers_of(entries: Mapping[bytes, Entry]) -> frozenset[str]:
    """Return the servers that entries name."""
    routes = {route.assignment for entry in entries.values() for route in entry.live_routes}
    return frozenset(server for assignment in routes for server in assignment.servers)


def version_after(version: int) -> int:
    """Return the first version after a takeover. Raises ConfigError when there is none left."""
    if is_used_up(version):
        raise ConfigError(
            f"the stored plan has version {version}: the versions are nearly used up, which only a damaged plan can do;"
            " stop all clients and delete the plan at every server (DEL __dynamoth__:plan)"
        )
    return version + TAKEOVER_VERSIONS


def is_used_up(version: int) -> bool:
    """Return whether there is no version left for after a takeover."""
    return version + TAKEOVER_VERSIONS > EPOCH_MAX - VERSIONS_IN_RESERVE


def some_of(names: Sequence[str]) -> str:
    """List some names, which may be hostile, in an error text."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(f"{name:.64}" for name in names[:NAMED_MAX]) + more


def why_not_ours(plan: Plan, found: Plan) -> str | None:
    """Return why a copy that was found later cannot be from a balancer of ours; None when it can."""
    if not same_ring(found, plan):
        return f"its ring is over {some_of(found.base)}, ours over {some_of(plan.base)}"
    used = servers_of(newer_entries(found, plan.entries)) | found.compatibility.servers
    if strange := sorted(used - plan.servers.keys()):
        return f"its channels are at servers that the plan does not list: {some_of(strange)}"
    if is_used_up(found.version):
        return f"it has the impossible version {found.version}"
    return None


def is_of_another_cluster(found: Copy, plan: Plan) -> bool:
    """Return whether a copy has no server in common with us but the one that stores it.

    Then our list of servers is probably wrong, and the copy is not ours to overwrite.
    """
    return not (set(found.plan.base) - {found.server}) & set(plan.base)


def same_ring(one: Plan, other: Plan) -> bool:
    """Return whether two plans give every channel that they do not name the same home."""
    return set(one.base) == set(other.base) and one.virtual_nodes == other.virtual_nodes


def same_header(one: Plan, other: Plan) -> bool:
    """Return whether two plans list the same servers and have the same ring."""
    return dict(one.servers) == dict(other.servers) and same_ring(one, other)


def _of_one_cluster(
    listed: Sequence[Server], copies: list[Copy], virtual_nodes: int
) -> tuple[list[Copy], list[Conflict]]:
    """Choose the copies with the right ring: that of most copies that a balancer has written.

    Others were loaded from an old disk, or are forged. Raises ConfigError where the right one cannot be determined.
    """
    conflicts: list[Conflict] = []
    if any(not is_used_up(copy.plan.version) for copy in copies):
        used_up = [copy for copy in copies if is_used_up(copy.plan.version)]
        conflicts += [Conflict(copy.server, f"it has the impossible version {copy.plan.version}") for copy in used_up]
        copies = [copy for copy in copies if not is_used_up(copy.plan.version)]
    believed = [copy for copy in copies if copy.believed] or copies
    if not believed:
        return [], conflicts
    votes = Counter(_ring(copy.plan) for copy in believed)
    (first, most), *others = votes.most_common()
    tied = [first, *(ring for ring, count in others if count == most)]
    expected = (frozenset(server.id for server in listed), virtual_nodes)
    if len(tied) > 1 and expected not in tied:
        one, other = (next(copy for copy in believed if _ring(copy.plan) == ring) for ring in tied[:2])
        raise ConfigError(
            f"the plan stored at {one.server} is of another cluster than that at {other.server}: its ring is over"
            f" {some_of(one.plan.base)}, the other's over {some_of(other.plan.base)}; delete the wrong one"
            " (DEL __dynamoth__:plan) or correct the list of servers"
        )
    right = expected if len(tied) > 1 else first
    theirs = some_of(sorted(right[0]))
    conflicts += [
        Conflict(copy.server, f"its ring is over {some_of(copy.plan.base)}, that of the others over {theirs}")
        for copy in copies
        if _ring(copy.plan) != right
    ]
    return [copy for copy in copies if _ring(copy.plan) == right], conflicts


def _ring(plan: Plan) -> tuple[frozenset[str], int]:
    return frozenset(plan.base), plan.virtual_nodes
