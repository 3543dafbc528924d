"""The end user's client with one remedy switched off, and the scenario that must fail then."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dynamoth.edge.frames import Connected, Data, Gap, Leave, SubscriptionRequest
from dynamoth.edge.publications import Position
from dynamoth_sim.mutations.mutation import Check, no_actions, replaced, returning
from dynamoth_user.machine import live
from dynamoth_user.machine.connections import Connections
from dynamoth_user.machine.events import CloseConnection, Deliver, DeliverGap, SendFrame, Served
from dynamoth_user.machine.machine import UserMachine
from dynamoth_user.machine.migration import NORMAL, Migration
from dynamoth_user.machine.records import Connection, Role, UserSubscription

# Mutations replace private methods.
# pyright: reportPrivateUsage=false


def _on_data(change: Callable[[UserMachine, UserSubscription, Data], list[Any] | None]) -> AbstractContextManager[None]:
    """Let ``change`` see each logged publication first; what it returns is done instead, unless that is None."""
    on_data = UserMachine._on_data

    def changed(self: UserMachine, connection: Connection, frame: Data) -> list[Any]:
        subscription = self.subscriptions.get(frame.s)
        if subscription is not None and frame.o is not None and subscription.received is not None:
            actions = change(self, subscription, frame)
            if actions is not None:
                return actions
        return on_data(self, connection, frame)

    return replaced(UserMachine, _on_data=changed)


def _without_gaps(name: str) -> AbstractContextManager[None]:
    """Change a method of migrations so that it reports no gap."""
    method = getattr(Migration, name)

    def report_nothing(self: Migration, *arguments: Any) -> list[Any]:
        return [action for action in method(self, *arguments) if not isinstance(action, DeliverGap)]

    return replaced(Migration, **{name: report_nothing})


# Positions.


@contextmanager
def positions_move_at_receipt() -> Generator[None]:
    """A position moves when a publication comes, not when the application has handled it."""

    def move(_: UserMachine, subscription: UserSubscription, frame: Data) -> None:
        received = subscription.received
        if received is not None and frame.o is not None and frame.o == received.offset + 1:
            subscription.handled = Position(received.epoch, frame.o)

    with _on_data(move), replaced(UserMachine, _on_handled=no_actions):
        yield


def positions_move_back() -> AbstractContextManager[None]:
    """A gap moves the position to its end, though the user has received what is behind that."""
    on_gap = UserMachine._on_gap

    def move(self: UserMachine, connection: Connection, frame: Gap) -> list[Any]:
        subscription, position = self.subscriptions.get(frame.s), frame.position
        if subscription is not None and subscription.received is not None and position is not None:
            subscription.received = Position(position.epoch, min(position.offset, subscription.received.offset) - 1)
        return on_gap(self, connection, frame)

    return replaced(UserMachine, _on_gap=move)


def users_begin_with_what_is_new() -> AbstractContextManager[None]:
    """A user that connects again does not say what it has received."""

    def ask(self: UserSubscription, ref: int) -> SubscriptionRequest:
        return SubscriptionRequest(ref, self.interest, None)

    return replaced(UserSubscription, request=ask)


def copies_are_delivered() -> AbstractContextManager[None]:
    """A user hands out what it has received before."""

    def deliver(_: UserMachine, subscription: UserSubscription, frame: Data) -> list[Any] | None:
        received = subscription.received
        if received is None or frame.o is None or frame.o > received.offset:
            return None
        return [Deliver(subscription.interest, frame.payload, received)]

    return _on_data(deliver)


def live_copies_are_delivered() -> AbstractContextManager[None]:
    """A user does not look at the numbers of live publications."""
    return replaced(live, _is_copy=returning(False))


def holes_are_not_seen() -> AbstractContextManager[None]:
    """A user hands out what comes, though an offset is missing before it."""

    def skip(_: UserMachine, subscription: UserSubscription, frame: Data) -> None:
        received = subscription.received
        if received is not None and frame.o is not None and frame.o > received.offset:
            subscription.received = Position(received.epoch, frame.o - 1)

    return _on_data(skip)


# Connections.


def silence_is_not_noticed() -> AbstractContextManager[None]:
    """A user waits for a broker from which nothing comes."""
    return replaced(Connections, _watch=no_actions)


def lost_connections_leave_no_gap() -> AbstractContextManager[None]:
    """A user does not report what it may have missed of a live interest while it had no connection."""
    serving_is_gone = UserMachine._serving_is_gone

    def forget(self: UserMachine, *arguments: Any) -> list[Any]:
        actions = serving_is_gone(self, *arguments)
        for subscription in self.subscriptions.values():
            subscription.is_interrupted = False
        return actions

    return replaced(UserMachine, _serving_is_gone=forget)


# Moves.


def users_leave_early() -> AbstractContextManager[None]:
    """A user leaves the old broker when the new one has answered, before that one says ``moved_in``."""
    on_connected = UserMachine._on_connected

    def leave(self: UserMachine, connection: Connection, frame: Connected, now: float) -> list[Any]:
        actions = on_connected(self, connection, frame, now)
        old = self.serving
        if connection.role is not Role.CANDIDATE or old is None:
            return actions
        old.role, connection.role = Role.LEAVING, Role.SERVING
        served = Served(connection.broker, connection.url, moved=True)
        return [*actions, SendFrame(old.number, Leave()), served, *self._publications.send_waiting()]

    return replaced(UserMachine, _on_connected=leave)


def nothing_is_held() -> AbstractContextManager[None]:
    """A user hands out at once what comes from the new broker."""
    return replaced(Connections, is_new=returning(False))


def old_connections_are_closed_at_once() -> AbstractContextManager[None]:
    """A user closes the old connection at ``bye``, though a publication waits for its answer there."""

    def close(self: Migration) -> list[Any]:
        old = self._connections.of_role(Role.LEAVING)
        if old is None or not old.has_said_bye or any(each.held for each in self._subscriptions.values()):
            return []
        del self._connections.by_number[old.number]
        return [CloseConnection(old.number, NORMAL, "moved"), *self._publications.fail(old.number, "moved")]

    return replaced(Migration, close_old_if_done=close)


def loss_of_the_old_broker_is_not_reported() -> AbstractContextManager[None]:
    """A user reports no gap when the old broker is lost before ``bye``."""
    return _without_gaps("old_is_gone")


def loss_during_a_move_is_not_reported() -> AbstractContextManager[None]:
    """A user reports no gap when the old broker is lost before ``moved_in``."""
    return _without_gaps("promote")


def deadlines_are_ignored() -> AbstractContextManager[None]:
    """A user waits for a new broker without a limit."""
    return replaced(Migration, _give_up=no_actions)


def one_target_is_tried() -> AbstractContextManager[None]:
    """A user tries the first broker of a ``move`` only."""
    try_next_target = Migration.try_next_target

    def stay(self: Migration, now: float) -> list[Any]:
        self._targets = ()
        return try_next_target(self, now)

    return replaced(Migration, try_next_target=stay)


CHECKS_OF_USERS: tuple[Check, ...] = (
    Check("edge-crash-of-the-application", positions_move_at_receipt, "G1"),
    Check("edge-gap-is-old", positions_move_back, "G2"),
    Check("edge-catches-up", users_begin_with_what_is_new, "expected"),
    Check("edge-old-broker-overlaps", copies_are_delivered, "G2"),
    Check("edge-old-broker-overlaps", live_copies_are_delivered, "G2"),
    Check("edge-moves-around", copies_are_delivered, "G2"),
    Check("edge-hole-from-a-broker", holes_are_not_seen, "G1"),
    Check("edge-silent-connection", silence_is_not_noticed, "expected"),
    Check("edge-live-connection-lost", lost_connections_leave_no_gap, "G5"),
    Check("edge-new-broker-is-late", users_leave_early, "expected"),
    Check("edge-both-brokers-deliver", nothing_is_held, "G1"),
    Check("edge-moves-while-publishing", old_connections_are_closed_at_once, "G4"),
    Check("edge-old-broker-dies", loss_of_the_old_broker_is_not_reported, "G5"),
    Check("edge-old-broker-dies-early", loss_during_a_move_is_not_reported, "G5"),
    Check("edge-move-fails", deadlines_are_ignored, "expected"),
    Check("edge-first-target-is-gone", one_target_is_tried, "expected"),
)
"""Every mutation of the user's machine, with the scenario that must fail under it."""
