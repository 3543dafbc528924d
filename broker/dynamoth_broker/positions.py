"""Keeps the positions of stored subscriptions at the log servers: looks for them, and stores what users acknowledge.

Theory of operation
-------------------
A stored subscription begins behind the position that the log server has for it. Until that is known, it waits.

Acknowledgements are collected, the latest of each subscription, and stored together every ``ack_s``; at once when a
subscription ends, so that the user's next process finds them. What a log server did not confirm is stored again, later:
scripts let positions only move forward, so neither order nor repetition matters. A position that is ahead of the log is
ignored, here and by the server: once the log has come there, it would lose what the user has not got.

Positions of users who are connected are stored again now and then, though nothing is published, so that they last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from dynamoth.edge.log import LogOptions
from dynamoth.edge.positions import POSITIONS_PER_COMMAND_MAX, find_command, parse_found, position_key, store_command
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply
from dynamoth.machine.timers import Timers
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import BrokerAction, BrokerOptions
from dynamoth_broker.logs import Logs
from dynamoth_broker.sessions import Session, Stage, Subscription

REFRESH_RATIO = 0.25
"""Positions of connected users are stored again within this part of the time after which they are forgotten."""

REFRESH_PARTS = 50
"""In this many portions, so that not all come at once."""

_Batch = list[tuple[str, bytes, Position]]


def is_known(subscription: Subscription, position: Position) -> bool:
    """Return whether this broker knows that the log has come to a position."""
    interest = subscription.interest
    is_present = subscription.stage is not Stage.WAITING and position.epoch == interest.epoch
    return is_present and position.offset <= max(interest.tip, subscription.cursor)  # its own may be ahead


class Positions:
    """The positions of one broker's stored subscriptions."""

    def __init__(
        self,
        options: BrokerOptions,
        logs: Logs,
        delivery: Delivery,
        timers: Timers[BrokerAction],
        counters: Counter[str],
    ) -> None:
        """Begin without positions; all arguments but the options are shared with the owner."""
        self._options = options
        self._logs = logs
        self._delivery = delivery
        self._timers = timers
        self._counters = counters
        #: Subscriptions that have not ended, by the key of their position.
        self._stored: dict[bytes, Subscription] = {}
        #: Positions that no server has stored yet, by log server and key, with the interest's id: the latest of each.
        self._unsaved: dict[str, dict[bytes, tuple[str, Position]]] = {}
        self._unsaved_count = 0
        #: Commands without an answer, by log server.
        self._under_way: Counter[str] = Counter()
        self._is_flush_due = False
        #: Servers that were at work when something was to be stored there: it follows their answer.
        self._skipped: set[str] = set()
        self._is_refresh_due = False
        #: The keys that are still to be stored again in this round, and how many at a time.
        self._to_refresh: list[bytes] = []
        self._refreshed_at_once = 0

    @property
    def is_saved(self) -> bool:
        """Whether log servers have confirmed all that was acknowledged."""
        return not self._unsaved_count and not self._under_way.total()

    # Subscriptions.

    def begin(self, subscription: Subscription, now: float) -> list[BrokerAction]:
        """Look for the position of a stored subscription, unless the user has said where it begins."""
        session, interest = subscription.session, subscription.interest
        key = subscription.position_key = position_key(interest.id, session.grant.user, session.name)
        self._stored[key] = subscription
        if not self._is_refresh_due:
            self._is_refresh_due = True
            self._refresh_later(now)
        if subscription.since is not None:
            return []
        subscription.awaits_position = True
        actions: list[BrokerAction] = []
        id_ = self._logs.server_of(interest.id)
        if self._logs.is_up(id_):  # another connection of this session has acknowledged it
            actions += self._save(id_, self._take(id_, [key]), now)
        command = partial(self._find_command, interest.id, key)
        found = partial(self._found, subscription)
        return [*actions, *self._logs.request(interest.id, command, found, now, waits=True)]

    def _find_command(
        self, interest_id: str, key: bytes, run_id: str, new_epoch: int, options: LogOptions
    ) -> tuple[CommandPart, ...]:
        return find_command(interest_id, key, run_id, new_epoch, options, self._options.position_ttl_s)

    def _found(self, subscription: Subscription, reply: Any, now: float) -> Sequence[BrokerAction]:
        if subscription.is_ended:
            return []
        try:
            if reply is None or isinstance(reply, ErrorReply):
                return self._delivery.refuse(subscription)
            position, is_new = parse_found(reply)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return self._delivery.refuse(subscription)
        self._counters["positions_new"] += is_new
        subscription.since = subscription.acknowledged = position
        subscription.awaits_position = False
        return self._delivery.begin(subscription, now)

    def end(self, subscription: Subscription, now: float) -> None:
        """Forget a subscription that has ended; what it has acknowledged is stored soon."""
        key = subscription.position_key
        if key is None:
            return
        if self._stored.get(key) is subscription:
            del self._stored[key]
        if key in self._unsaved.get(self._logs.server_of(subscription.interest.id), ()):
            self._timers.add(now, self.flush)

    # Acknowledgements.

    def acknowledge(self, session: Session, positions: Mapping[str, Position], now: float) -> None:
        """Note what a user's application has handled."""
        for s, position in positions.items():
            subscription = session.subscriptions.get(s)
            if subscription is None or subscription.position_key is None or not is_known(subscription, position):
                self._counters["acks_ignored"] += 1
                continue
            known = subscription.acknowledged
            if known is not None and known.epoch == position.epoch and known.offset > position.offset:
                continue  # they came in another order
            subscription.acknowledged = position
            self._add(subscription.interest.id, subscription.position_key, position)
            self._flush_later(now)

    def _add(self, interest_id: str, key: bytes, position: Position) -> None:
        unsaved = self._unsaved.setdefault(self._logs.server_of(interest_id), {})
        if key not in unsaved:
            if self._unsaved_count >= self._options.unsaved_positions_max:
                self._counters["positions_dropped"] += 1
                return
            self._unsaved_count += 1
        unsaved[key] = interest_id, position

    def _take(self, id_: str, keys: Sequence[bytes]) -> _Batch:
        unsaved = self._unsaved.get(id_, {})
        taken = [(unsaved[key][0], key, unsaved.pop(key)[1]) for key in keys if key in unsaved]
        self._unsaved_count -= len(taken)
        return taken

    def _flush_later(self, now: float) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._timers.add(now + self._options.ack_s, self._flush_due)

    def _flush_due(self, now: float) -> Sequence[BrokerAction]:
        self._is_flush_due = False
        return self.flush(now)

    def flush(self, now: float) -> list[BrokerAction]:
        """Store everything, but for what a server that does not answer would have to take; that waits."""
        actions: list[BrokerAction] = []
        for id_, unsaved in self._unsaved.items():
            if not self._logs.is_up(id_):
                continue
            if self._under_way[id_]:
                self._skipped.add(id_)
                continue
            while unsaved:
                keys = list(islice(unsaved, POSITIONS_PER_COMMAND_MAX))
                actions += self._save(id_, self._take(id_, keys), now)
        if self._unsaved_count:
            self._flush_later(now)
        return actions

    def _save(self, id_: str, batch: _Batch, now: float) -> list[BrokerAction]:
        if not batch:
            return []
        self._under_way[id_] += 1
        command = partial(self._store_command, batch)
        return self._logs.request(batch[0][0], command, partial(self._saved, id_, batch), now)

    def _store_command(self, batch: _Batch, run_id: str, _: int, options: LogOptions) -> tuple[CommandPart, ...]:
        return store_command(batch, run_id, options, self._options.position_ttl_s)

    def _saved(self, id_: str, batch: _Batch, reply: Any, now: float) -> Sequence[BrokerAction]:
        self._under_way[id_] -= 1
        if isinstance(reply, int):
            self._counters["positions_stored"] += reply
            self._counters["acks_ignored"] += len(batch) - reply
            return self._flush_skipped(id_, now)
        for interest_id, key, position in batch:
            if key not in self._unsaved.get(id_, ()):  # else there is a later one
                self._add(interest_id, key, position)
        self._flush_later(now)
        return []

    def _flush_skipped(self, id_: str, now: float) -> list[BrokerAction]:
        if id_ not in self._skipped or self._under_way[id_]:
            return []
        self._skipped.discard(id_)
        return self.flush(now)

    # Positions last while their users are here.

    def _refresh_later(self, now: float) -> None:
        self._timers.add(now + self._options.position_ttl_s * REFRESH_RATIO / REFRESH_PARTS, self._refresh)

    def _refresh(self, now: float) -> Sequence[BrokerAction]:
        """Store a portion of the positions again, though they have not changed."""
        if not self._to_refresh:
            self._to_refresh = list(self._stored)
            self._refreshed_at_once = -(-len(self._to_refresh) // REFRESH_PARTS)
        self._is_refresh_due = bool(self._stored)
        if not self._stored:
            self._to_refresh.clear()
            return []
        self._refresh_later(now)
        for _ in range(min(self._refreshed_at_once, len(self._to_refresh))):
            key = self._to_refresh.pop()
            subscription = self._stored.get(key)
            if subscription is not None and subscription.acknowledged is not None:
                self._add(subscription.interest.id, key, subscription.acknowledged)
        return self.flush(now)

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert self._unsaved_count == sum(map(len, self._unsaved.values())), "a wrong count of positions"
        for key, subscription in self._stored.items():
            assert subscription.position_key == key and not subscription.is_ended, "a position of an ended subscription"
