"""Moves a session to another broker without an interruption: ``docs/brokers.md``, "Migration"."""

from __future__ import annotations

from collections import Counter

from dynamoth.edge.frames import Leave, Move
from dynamoth.machine.timers import Timers
from dynamoth_user.machine.connections import Connections
from dynamoth_user.machine.events import (
    CloseConnection,
    DeliverGap,
    Interrupted,
    SendFrame,
    Served,
    UserAction,
    UserOptions,
)
from dynamoth_user.machine.live import NUMBERS_MISSING, LiveDelivery
from dynamoth_user.machine.publishing import Publications
from dynamoth_user.machine.records import Connection, Role, UserSubscription

NORMAL = 1000

MOVE_FAILED = 4006
"""Closes a connection to a broker that did not take over: the session goes on at the other one."""

OLD_BROKER_LOST = "the former broker was lost during the migration"


class Migration:
    """Connects to the new broker, leaves the old one when the new one serves everything, and merges both meanwhile."""

    def __init__(
        self,
        options: UserOptions,
        timers: Timers[UserAction],
        counters: Counter[str],
        connections: Connections,
        subscriptions: dict[str, UserSubscription],
        live: LiveDelivery,
        publications: Publications,
    ) -> None:
        """Begin without a migration. The arguments are parts of one machine, which share its records."""
        self._options = options
        self._timers = timers
        self._counters = counters
        self._connections = connections
        self._subscriptions = subscriptions
        self._live = live
        self._publications = publications
        #: The URLs that are left, and until when the migration is to be done.
        self._targets: tuple[str, ...] = ()
        self._until = 0.0

    # The new broker.

    def on_move(self, connection: Connection, frame: Move, now: float) -> list[UserAction]:
        """Begin a migration after a random time, unless one is going on."""
        if connection.role is not Role.SERVING or self._connections.is_moving or not frame.to:
            return []
        self._targets = frame.to
        self._until = now + frame.deadline_ms / 1000
        due = now + frame.within_ms / 1000 * self._connections.random()
        self._timers.add(due, self._begin, connection.number, frame.ticket)
        return []

    def _begin(self, number: int, ticket: str | None, now: float) -> list[UserAction]:
        serving = self._connections.by_number.get(number)
        if serving is None or serving.role is not Role.SERVING or self._connections.is_moving or not self._targets:
            return []
        url, *rest = self._targets
        self._targets = tuple(rest)
        for subscription in self._subscriptions.values():
            subscription.awaits_old = True
        actions = self._connections.open(url, Role.CANDIDATE, now, ticket)
        candidate = self._connections.of_role(Role.CANDIDATE)
        assert candidate is not None, "it was just opened"
        candidate.deadline = min(candidate.deadline, self._until)
        self._timers.add(self._until, self._give_up, candidate.number)
        return actions

    def _give_up(self, number: int, now: float) -> list[UserAction]:
        candidate = self._connections.by_number.get(number)
        if candidate is None or candidate.role is not Role.CANDIDATE:
            return []
        self._targets = ()
        return self.drop_candidate(candidate, now)

    def drop_candidate(self, candidate: Connection, now: float) -> list[UserAction]:
        """Close the connection to a broker that did not take over, and try the next one."""
        del self._connections.by_number[candidate.number]
        self._counters["moves_failed"] += 1
        return [CloseConnection(candidate.number, MOVE_FAILED, "the move failed"), *self.try_next_target(now)]

    def try_next_target(self, now: float) -> list[UserAction]:
        """Go on with a migration whose target has failed; without another target, stay."""
        serving = self._connections.serving
        if serving is not None and self._targets and now < self._until:
            return self._begin(serving.number, None, now)
        for subscription in self._subscriptions.values():
            subscription.awaits_old = False
            subscription.held.clear()  # the old broker sends all of it
        return []

    def complete(self) -> list[UserAction]:
        """Leave the old broker if the new one serves every subscription."""
        candidate = self._connections.of_role(Role.CANDIDATE)
        if candidate is None or not candidate.has_moved_in:
            return []
        if any(id_ not in candidate.confirmed for id_ in self._subscriptions):
            return []
        old = self._connections.serving
        assert old is not None, "a candidate is promoted when the serving connection is lost"
        old.role = Role.LEAVING
        candidate.role = Role.SERVING
        self._counters["moves"] += 1
        return [
            SendFrame(old.number, Leave()),
            Served(candidate.broker, candidate.url, moved=True),
            *self._publications.send_waiting(),
        ]

    # The old broker.

    def promote(self, candidate: Connection) -> list[UserAction]:
        """Go on with the new broker alone: the old one was lost during the migration."""
        candidate.role = Role.SERVING
        self._targets = ()
        actions: list[UserAction] = []
        for subscription in self._subscriptions.values():
            subscription.awaits_old = False
            if subscription.is_interrupted and subscription.interest.id in candidate.confirmed:
                subscription.is_interrupted = False
                actions.append(DeliverGap(subscription.interest, OLD_BROKER_LOST))
            actions += self._live.release(subscription, OLD_BROKER_LOST)
        if not candidate.is_up:
            return [*actions, Interrupted(OLD_BROKER_LOST, 0.0)]
        return [
            *actions,
            Served(candidate.broker, candidate.url, moved=False),
            *self._publications.send_waiting(),
        ]

    def on_bye(self, connection: Connection, now: float) -> list[UserAction]:
        """Deliver the held messages: the old broker has sent everything from before."""
        if connection.role is not Role.LEAVING:
            return []
        connection.has_said_bye = True
        actions: list[UserAction] = []
        for subscription in self._subscriptions.values():
            subscription.awaits_old = False
            actions += self._live.release_ready(subscription)
        if any(each.held for each in self._subscriptions.values()):
            self._timers.add(now + self._options.hold_s, self._end_hold, connection.number)
            return actions
        return [*actions, *self.close_old_if_done()]

    def _end_hold(self, number: int, now: float) -> list[UserAction]:
        if number not in self._connections.by_number:
            return []
        return [*self.release_all(NUMBERS_MISSING), *self.close_old_if_done()]

    def close_old_if_done(self) -> list[UserAction]:
        """Close the old connection when it has said ``bye``, nothing is held, and no publication is unanswered."""
        old = self._connections.of_role(Role.LEAVING)
        if old is None or not old.has_said_bye or any(each.held for each in self._subscriptions.values()):
            return []
        if self._publications.is_awaited(old.number):
            return []
        del self._connections.by_number[old.number]
        return [CloseConnection(old.number, NORMAL, "moved")]

    def old_is_gone(self) -> list[UserAction]:
        """Handle the loss of the old broker before it has said ``bye``: live interests may miss something."""
        waiting = [each for each in self._subscriptions.values() if each.is_live and each.awaits_old]
        return [
            *(DeliverGap(each.interest, OLD_BROKER_LOST) for each in waiting),
            *self.release_all(OLD_BROKER_LOST),
        ]

    def release_all(self, reason: str) -> list[UserAction]:
        """Deliver everything that is held: nothing more comes from the old broker."""
        actions: list[UserAction] = []
        for subscription in self._subscriptions.values():
            subscription.awaits_old = False
            actions += self._live.release(subscription, reason)
        return actions
