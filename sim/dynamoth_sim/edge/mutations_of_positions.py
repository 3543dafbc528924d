"""Stored positions with one remedy switched off, and the scenario that must fail then."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import dynamoth.edge.positions
import dynamoth_broker.positions
from dynamoth.edge.positions import FIND_SCRIPT
from dynamoth_broker.positions import Positions
from dynamoth_broker.sessions import Subscription
from dynamoth_sim.mutations.mutation import Check, replaced, returning
from dynamoth_user.machine.machine import UserMachine
from dynamoth_user.machine.records import UserSubscription

# Mutations replace private methods.
# pyright: reportPrivateUsage=false


def positions_move_back() -> AbstractContextManager[None]:
    """A log server stores each position that comes, not the highest one."""
    return replaced(dynamoth.edge.positions, is_behind=returning(False))


@contextmanager
def positions_ahead_are_stored() -> Generator[None]:
    """Neither broker nor log server look whether the log has come to a position."""
    script = replaced(dynamoth.edge.positions, may_be_stored=returning(True))
    with script, replaced(dynamoth_broker.positions, is_known=returning(True)):
        yield


@contextmanager
def first_positions_are_not_stored() -> Generator[None]:
    """A log server says where a log ends, but does not store it."""
    evaluate = dynamoth.edge.positions.evaluate

    def look(words: Sequence[bytes], execute: Any) -> Any:
        is_first = words[1] == FIND_SCRIPT and execute(b"GET", words[5]) is None
        reply = evaluate(words, execute)
        if is_first:
            execute(b"DEL", words[5])
        return reply

    with replaced(dynamoth.edge.positions, evaluate=look):
        yield


def stored_positions_are_not_used() -> AbstractContextManager[None]:
    """A broker begins a stored subscription with what is new."""
    return replaced(Positions, begin=_begin_nowhere)


def _begin_nowhere(self: Positions, subscription: Subscription, now: float) -> list[Any]:
    return []


def unanswered_positions_are_forgotten() -> AbstractContextManager[None]:
    """A broker does not store again what a log server has not confirmed."""

    def forget(self: Positions, id_: str, batch: Sequence[Any], reply: Any, now: float) -> list[Any]:
        self._under_way[id_] -= 1
        return []

    return replaced(Positions, _saved=forget)


def acks_are_dropped() -> AbstractContextManager[None]:
    """A broker ignores acknowledgements."""

    def drop(self: Positions, session: Any, positions: Mapping[str, Any], now: float) -> None:
        return None

    return replaced(Positions, acknowledge=drop)


def what_is_received_is_acknowledged() -> AbstractContextManager[None]:
    """A user acknowledges what has come, though the application has not handled it."""
    acknowledge = UserMachine._acknowledge

    def move(self: UserMachine, now: float) -> list[Any]:
        for subscription in self.subscriptions.values():
            subscription.handled = subscription.received
        return acknowledge(self, now)

    return replaced(UserMachine, _acknowledge=move)


def acks_are_sent_once() -> AbstractContextManager[None]:
    """A user takes for stored what it has acknowledged to any broker."""
    acknowledge = UserMachine._acknowledge

    def send_once(self: UserMachine, now: float) -> list[Any]:
        for subscription in self.subscriptions.values():
            _take_for_stored(self, subscription)
        return acknowledge(self, now)

    return replaced(UserMachine, _acknowledge=send_once)


def _take_for_stored(machine: UserMachine, subscription: UserSubscription) -> None:
    if machine.serving is not None and subscription.acknowledged == subscription.handled:
        subscription.acknowledged_over = machine.serving.number


CHECKS_OF_POSITIONS: tuple[Check, ...] = (
    Check("edge-stored-acks-cross", positions_move_back, "expected"),
    Check("edge-stored-ack-ahead", positions_ahead_are_stored, "G1"),
    Check("edge-stored-dies-before-its-first-ack", first_positions_are_not_stored, "expected"),
    Check("edge-stored-process-dies", stored_positions_are_not_used, "expected"),
    Check("edge-stored-process-dies", acks_are_dropped, "expected"),
    Check("edge-stored-log-connection-lost", unanswered_positions_are_forgotten, "expected"),
    Check("edge-stored-handler-at-work", what_is_received_is_acknowledged, "G1"),
    Check("edge-stored-broker-dies", acks_are_sent_once, "expected"),
)
"""Every mutation of stored positions, with the scenario that must fail under it."""
