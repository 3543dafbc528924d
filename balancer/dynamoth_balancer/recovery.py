"""What a balancer that comes to work finds: copies of the plan, of which it makes the plan to go on with.

Each copy is the plan as some balancer wrote it, at some time. For each channel the newest entry (by epoch, then
phase) of all copies is right: every phase follows from what is stored, and a newer one was only begun because all
that it needs had been stored.

The new plan's version is far above those found: a predecessor may have written newer versions where we cannot read
now, or its last writes may still be on their way. So no epoch means two things.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamoth.compatibility import Compatibility, CompatibilityRule
from dynamoth.envelope import EPOCH_MAX
from dynamoth.errors import ConfigError
from dynamoth.plan import Plan, Server
from dynamoth.ring import VIRTUAL_NODES
from dynamoth_balancer.book import merge_entries

TAKEOVER_VERSIONS = 1000
"""Versions left out at each takeover: more than a balancer can write between two looks at its lease. 32 bits last for 4
million takeovers."""

VERSIONS_LOST_MAX = 2**24
"""An agent that holds a version so far above all that is stored is not believed: more changes than years of work."""

VERSIONS_IN_RESERVE = 10_000
"""No transition is begun and no copy merged when fewer versions are left: those in progress must be able to settle."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the plan that was found at a server; ``believed`` when it was written to this very Redis process."""

    server: str
    plan: Plan
    believed: bool


def recover(
    configured: Sequence[Server],
    copies: Iterable[Copy],
    *,
    is_complete: bool,
    virtual_nodes: int = VIRTUAL_NODES,
    rules: tuple[CompatibilityRule, ...] = (),
) -> Plan:
    """Return the plan to go on with.

    Args:
        configured: the servers of our configuration. One that no copy knows is listed in the plan, but is no part of
            the ring.
        copies: what was found; none makes plan 0, with the ring over all configured servers.
        is_complete: False when some server could not be read.
        virtual_nodes: for the ring of plan 0.
        rules: the compatibility rules of plan 0; a plan that is stored has its own.

    Raises:
        ConfigError: the copies are of different clusters, or a server that they list is not configured.

    """
    copies = _of_one_cluster(list(copies))
    if not copies:
        plan = Plan.initial(configured, virtual_nodes, Compatibility(0, rules))
        return plan if is_complete else replace(plan, version=TAKEOVER_VERSIONS)
    newest = max(copies, key=lambda copy: copy.plan.version).plan
    check_servers(configured, copies)
    entries = newest.entries
    for copy in copies:
        if copy.plan is not newest:
            entries = merge_entries(entries, copy.plan.entries)
    version = version_after(newest.version)
    by_id = {server.id: server for server in configured}
    compatibility = max((copy.plan.compatibility for copy in copies), key=lambda rules: rules.version)
    return Plan(version, by_id, newest.base, entries, newest.virtual_nodes, compatibility)


def version_after(version: int) -> int:
    """Return the first version after a takeover. Raises ConfigError when there is none left."""
    after = version + TAKEOVER_VERSIONS
    if after > EPOCH_MAX - VERSIONS_IN_RESERVE:
        raise ConfigError(
            f"the stored plan has version {version}: the versions are nearly used up, which only a damaged plan can do;"
            " stop all clients and delete the stored plans to begin anew"
        )
    return after


def check_servers(configured: Sequence[Server], copies: Iterable[Copy]) -> None:
    """Refuse copies that list a server which is not configured. Raises ConfigError."""
    known = {server.id for server in configured}
    for copy in copies:
        gone = sorted((set(copy.plan.servers) | servers_in_use(copy.plan)) - known)
        if gone:
            raise ConfigError(
                f"the plan stored at {copy.server} lists {', '.join(gone)}, which the configuration does not:"
                " servers cannot be removed yet, put them back into the list of servers"
            )


def servers_in_use(plan: Plan) -> set[str]:
    """Return the servers that some channel may be at: those of the ring, of rules, and those that entries name."""
    assignments = {route.assignment for entry in plan.entries.values() for route in (entry.route, *entry.previous)}
    return {
        *plan.base,
        *plan.compatibility.servers,
        *(server for assignment in assignments for server in assignment.servers),
    }


def check_ring(copy: Copy, plan: Plan) -> None:
    """Refuse a copy that has another ring than ``plan``. Raises ConfigError."""
    if not same_ring(copy.plan, plan):
        raise ConfigError(
            f"the plan stored at {copy.server} is of another cluster: its ring is over {', '.join(copy.plan.base)},"
            f" ours over {', '.join(plan.base)}; delete it there (DEL __dynamoth__:plan) or correct the list of servers"
        )


def same_ring(one: Plan, other: Plan) -> bool:
    """Tell whether two plans put every channel that they do not name at the same server."""
    return set(one.base) == set(other.base) and one.virtual_nodes == other.virtual_nodes


def _of_one_cluster(copies: list[Copy]) -> list[Copy]:
    """Leave out copies that a Redis process loaded from an old disk, of another cluster. Raises ConfigError."""
    believed = [copy for copy in copies if copy.believed] or copies
    for copy in believed[1:]:
        check_ring(copy, believed[0].plan)
    return [copy for copy in copies if same_ring(copy.plan, believed[0].plan)]


def known_plans(copies: Iterable[Copy]) -> Mapping[int, Plan]:
    """Return the plans of copies by version."""
    return {copy.plan.version: copy.plan for copy in copies}
