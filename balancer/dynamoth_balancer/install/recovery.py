"""Makes the plan of a new leader from the copies that it finds.

Each copy is the plan as some balancer wrote it, at some time. For each channel the newest entry (by epoch, then phase)
of all copies is right: every phase follows from what is stored, and a newer one only began because everything it needs
was stored.

A copy that no balancer of ours can have written is reported, not used, and overwritten: its ring is not that of most
copies, or its channels are at servers that are not configured, or its version leaves no room for others. Servers that
are only listed come from our configuration, whatever copies say.

The new plan's version is far above those found: a predecessor may have written newer versions where we cannot read now,
or its last writes may still be on their way. So no epoch has two meanings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dynamoth.errors import ConfigError
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import EPOCH_MAX, TAKEOVER_VERSIONS, Plan, Server
from dynamoth.plan.ring import VIRTUAL_NODES
from dynamoth_balancer.install.book import merge_entries

VERSIONS_LOST_MAX = 2**24
"""An agent's version further above all stored ones is not believed: no balancer makes as many changes in years."""

NAMED_MAX = 5
"""Most servers that an error text names."""

VERSIONS_IN_RESERVE = 10_000
"""With fewer versions left, no transition begins and no copy is merged: those in progress must be able to settle."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the plan at a server; ``believed`` when it was written to this very Redis process."""

    server: str
    plan: Plan
    believed: bool


@dataclass(frozen=True, slots=True)
class Conflict:
    """A copy, or a part of it, that no balancer of ours can have written: it is not used, and overwritten."""

    server: str
    reason: str


def recover(
    configured: Sequence[Server],
    copies: Iterable[Copy],
    *,
    is_complete: bool,
    first: int = TAKEOVER_VERSIONS,
    virtual_nodes: int = VIRTUAL_NODES,
    rules: tuple[CompatibilityRule, ...] = (),
) -> tuple[Plan, list[Copy], list[Conflict]]:
    """Return the plan to continue with, the copies that it was made from, and those left out.

    Args:
        configured: the servers of our configuration. One that no copy knows is listed in the plan, but is no part of
            the ring.
        copies: all copies found; none makes plan 0, with the ring over all configured servers.
        is_complete: False when some server could not be read, or one has granted a term before.
        first: the first version of the balancer's term.
        virtual_nodes: for the ring of plan 0.
        rules: the compatibility rules of plan 0; a stored plan has its own.

    Raises:
        ConfigError: the copies are of different clusters, or all usable ones need a server that is not configured.

    """
    usable, conflicts = _of_one_cluster(configured, list(copies), virtual_nodes)
    if not usable:
        plan = Plan.initial(configured, virtual_nodes, Compatibility(0, rules))
        return plan if is_complete else replace(plan, version=first), [], conflicts
    usable, left_out = _without_strange_servers(configured, usable)
    newest = max(usable, key=lambda copy: copy.plan.version).plan
    entries = newest.entries
    for copy in usable:
        if copy.plan is not newest:
            entries = merge_entries(entries, copy.plan.entries)
    version = max(first, version_after(newest.version))
    by_id = {server.id: server for server in configured}
    compatibility = max((copy.plan.compatibility for copy in usable), key=lambda rules: rules.version)
    administration = max((copy.plan.administration for copy in usable), key=lambda decided: decided.version)
    if gone := administration.draining - by_id.keys():  # it was drained, and taken out of the configuration
        administration = replace(administration, version=version, draining=administration.draining - gone)
    plan = Plan(version, by_id, newest.base, entries, newest.virtual_nodes, compatibility, administration)
    return plan, usable, [*conflicts, *left_out]


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


def _without_strange_servers(configured: Sequence[Server], copies: list[Copy]) -> tuple[list[Copy], list[Conflict]]:
    """Leave out copies that use servers which are not configured, if others do not.

    If all do, a server in use was taken out of the configuration: that is refused. Servers that a copy lists and does
    not use are left out of it.
    """
    known = {server.id for server in configured}
    strange = {id(copy): sorted(copy.plan.servers_in_use - known) for copy in copies}
    usable = [copy for copy in copies if not strange[id(copy)]]
    if not usable:
        raise ConfigError(
            f"the plan stored at {copies[0].server} uses {some_of(strange[id(copies[0])])}, which the configuration"
            " does not list: put them back into the list of servers, and drain them before you remove them"
        )
    conflicts = [
        Conflict(copy.server, f"its channels are at servers that are not configured: {some_of(strange[id(copy)])}")
        for copy in copies
        if strange[id(copy)]
    ]
    conflicts += [
        Conflict(copy.server, f"it lists servers that are not configured: {some_of(listed)}")
        for copy in usable
        if (listed := sorted(set(copy.plan.servers) - known))
    ]
    return usable, conflicts


def some_of(names: Sequence[str]) -> str:
    """List some names, which may be hostile, in an error text."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(f"{name:.64}" for name in names[:NAMED_MAX]) + more


def why_not_ours(configured: Sequence[Server], plan: Plan, found: Plan) -> str | None:
    """Return why a copy that was found later cannot be from a balancer of ours; None when it can."""
    known = {server.id for server in configured}
    if not same_ring(found, plan):
        return f"its ring is over {some_of(found.base)}, ours over {some_of(plan.base)}"
    if strange := sorted(found.servers_in_use - known):
        return f"its channels are at servers that are not configured: {some_of(strange)}"
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
    configured: Sequence[Server], copies: list[Copy], virtual_nodes: int
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
    expected = (frozenset(server.id for server in configured), virtual_nodes)
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
