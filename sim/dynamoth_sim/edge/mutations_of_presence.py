"""Presence with one remedy switched off, and the scenario that must fail then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dynamoth.edge import presence as edge_presence
from dynamoth.edge.frames import EXACT_MAX
from dynamoth.edge.log import LogOptions
from dynamoth.edge.presence import Change, Kind, Leases
from dynamoth.edge.publications import Position
from dynamoth_broker import presence
from dynamoth_broker.presence import Presence
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced, returning
from dynamoth_user.machine import migration
from dynamoth_user.machine.presence import Rosters
from dynamoth_user.machine.records import UserSubscription

# Mutations replace private methods.
# pyright: reportPrivateUsage=false


def _changes(change: Callable[[Change], Change]) -> AbstractContextManager[None]:
    """Let brokers send other changes."""
    command = edge_presence.change_command

    def changed(id_: str, changes: list[Change], *rest: Any) -> Any:
        return command(id_, [change(each) for each in changes], *rest)

    return replaced(presence, change_command=changed)


def _as_exit(kind: Kind) -> AbstractContextManager[None]:
    """Let brokers say that a member has left for good, where they should say something milder."""
    return _changes(
        lambda each: Change("exit" if each.kind == kind else each.kind, each.member, each.generation, each.user)
    )


def changes_are_not_published() -> AbstractContextManager[None]:
    """A broker appends joins and leaves, and does not publish them."""
    return replaced(presence, _publish=no_actions)


def ends_are_not_sent() -> AbstractContextManager[None]:
    """A broker forgets a member without a word."""
    return replaced(Presence, on_ended=nothing)


def left_is_an_exit() -> AbstractContextManager[None]:
    """A broker that a user has left removes the member."""
    return _as_exit("move")


def lost_is_an_exit() -> AbstractContextManager[None]:
    """A broker removes the member of a lost connection at once."""
    return _as_exit("release")


def failed_moves_are_exits() -> AbstractContextManager[None]:
    """A user closes the connection to the target of a failed move as if it quit."""
    return replaced(migration, MOVE_FAILED=migration.NORMAL)


def newer_connections_stay_newer() -> AbstractContextManager[None]:
    """An older connection takes no member over, though the lease of the newer one is not renewed."""
    return replaced(edge_presence._Model, _is_half_over=returning(False))


def leases_do_not_end() -> AbstractContextManager[None]:
    """The scripts end nothing that is due."""
    command = edge_presence.change_command
    listing = edge_presence.members_command

    def change(
        id_: str, changes: Any, broker: str, leases: Leases, run_id: str, epoch: int, options: LogOptions
    ) -> Any:
        return command(id_, changes, broker, leases, run_id, epoch, options, expired_max=0)

    def list_members(id_: str, run_id: str, epoch: int, options: LogOptions) -> Any:
        return listing(id_, run_id, epoch, options, expired_max=0)

    return replaced(presence, change_command=change, members_command=list_members)


def exits_ignore_generations() -> AbstractContextManager[None]:
    """An exit counts, whatever connection it is of."""

    def newest(each: Change) -> Change:
        return Change(each.kind, each.member, EXACT_MAX if each.kind == "exit" else each.generation, each.user)

    return _changes(newest)


def exits_are_forgotten() -> AbstractContextManager[None]:
    """Nothing fences a member that has left against an older connection."""
    command = edge_presence.change_command

    def change(id_: str, changes: Any, broker: str, leases: Leases, *rest: Any) -> Any:
        return command(id_, changes, broker, Leases(leases.lease_s, leases.grace_s, 0.0), *rest)

    return replaced(presence, change_command=change)


def members_are_named_once() -> AbstractContextManager[None]:
    """A broker names its members when they come, and not again."""
    return replaced(Presence, _refresh=nothing, on_server_up=nothing)


def changes_before_the_list_are_dropped() -> AbstractContextManager[None]:
    """A user drops the joins and leaves that come while it waits for the list."""
    on_publication = Rosters.on_publication

    def drop(self: Rosters, subscription: UserSubscription, position: Position, payload: bytes) -> list[Any]:
        if self._rosters[subscription.interest.id].listed is None:
            return []
        return on_publication(self, subscription, position, payload)

    return replaced(Rosters, on_publication=drop)


def changes_in_the_list_count_twice() -> AbstractContextManager[None]:
    """A user does not compare positions of joins and leaves with that of the list."""
    report = Rosters._report

    def regardless(self: Rosters, roster: Any, position: Position, event: Any) -> list[Any]:
        return report(self, roster, Position(position.epoch, EXACT_MAX), event)

    return replaced(Rosters, _report=regardless)


CHECKS_OF_PRESENCE: tuple[Check, ...] = (
    Check("edge-presence-joins-and-leaves", changes_are_not_published, "expected"),
    Check("edge-presence-joins-and-leaves", ends_are_not_sent, "expected"),
    Check("edge-presence-moves", left_is_an_exit, "expected"),
    Check("edge-presence-move-fails", failed_moves_are_exits, "expected"),
    Check("edge-presence-move-target-dies", newer_connections_stay_newer, "expected"),
    Check("edge-presence-broker-dies", leases_do_not_end, "expected"),
    Check("edge-presence-broker-dies", leases_do_not_end, "presence"),
    Check("edge-presence-connection-lost", lost_is_an_exit, "expected"),
    Check("edge-presence-late-exit", exits_ignore_generations, "expected"),
    Check("edge-presence-ghost", exits_are_forgotten, "expected"),
    Check("edge-presence-log-restarts", members_are_named_once, "presence"),
    Check("edge-presence-joins-while-asked", changes_before_the_list_are_dropped, "expected"),
    Check("edge-presence-joins-while-asked", changes_in_the_list_count_twice, "B1"),
)
"""Every mutation of presence, with the scenario that must fail under it."""
