"""Users of standing queries, and reporters whose records are stored by way of brokers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.edge.interests import Interest, channel_interest
from dynamoth_sim.data.audit import DataAudit
from dynamoth_sim.edge.users import UserApp
from dynamoth_user.machine.events import DeliverGap, PublishEnded, PublishMessage, Refused

RETRY_S = 0.05
"""A reporter sends a record again after this time."""

ASK_AGAIN_S = 0.2
"""A user asks this often for a query that was dropped."""


class QueryUser(UserApp):
    """A user whose interests are standing queries. ``data_audit`` and ``keep_s`` have to be set before it starts."""

    data_audit: DataAudit
    #: How long interests without users are kept.
    keep_s: float = 0.0
    #: When its last life has ended, and whether the present one has begun too late for its interests.
    _ended_at: float | None = None
    _was_away_long: bool = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: Interests without results since it was refused them: maybe nobody had them, and they have ended.
        self._was_refused: set[str] = set()

    def start(self) -> None:
        """Start the application, with what it has stored."""
        self._was_away_long = self._ended_at is not None and self.world.now > self._ended_at + self.keep_s / 2
        super().start()

    def subscribe(self, interest: Interest) -> None:
        """Subscribe to one of its interests."""
        self.data_audit.asked(self.name, interest)
        super().subscribe(interest)

    def _act(self, action: Any) -> None:
        if isinstance(action, Refused) and self.data_audit.was_dropped(action.interest.name):
            self._ask_later(action.interest)
        else:
            super()._act(action)

    def _ask_later(self, interest: Interest) -> None:
        """Forget an interest whose query was dropped, and ask for it as a newcomer until it is registered again."""
        self.confirmed.pop(interest.id, None)
        self._stored.pop(interest.id, None)
        self._was_refused.add(interest.id)
        self._queue = deque(item for item in self._queue if item.interest != interest)
        self._audit_left(interest)
        self.world.after(ASK_AGAIN_S, self._ask_again, interest, self._life)

    def _ask_again(self, interest: Interest, life: int) -> None:
        if self.is_alive and self._life == life and interest in self.interests:
            self.subscribe(interest)

    def _end_process(self, reason: str) -> None:
        super()._end_process(reason)
        self._ended_at = self.world.now

    def _audit_confirmed(self, interest: Interest) -> None:
        self.data_audit.confirmed(self.name, interest)

    def _audit_left(self, interest: Interest) -> None:
        self.data_audit.left(self.name, interest)

    def _audit_delivered(self, interest: Interest, payload: bytes) -> None:
        self._was_refused.discard(interest.id)
        self.data_audit.delivered(self.name, interest, payload)

    def _audit_gap(self, interest: Interest, gap: DeliverGap) -> None:
        was_away_long = self._was_away_long or interest.id in self._was_refused
        self.data_audit.gap(self.name, interest, gap.reason, was_away_long=was_away_long)


class Reporter(QueryUser):
    """A user who publishes records, one after the other, each again until it is acknowledged."""

    data_audit: DataAudit
    #: Chooses dataset and type of the next record.
    choose: Callable[[], tuple[str, str]]
    #: The record that is not acknowledged yet: dataset, id and JSON.
    _sending: tuple[str, str, bytes] | None = None
    _count = 0

    @property
    def is_reporting(self) -> bool:
        """Whether a record is not acknowledged yet."""
        return self._sending is not None

    def start(self) -> None:
        """Start the application; it goes on with the record that was not acknowledged."""
        super().start()
        if self._sending is not None:
            self.data_audit.unacknowledged(self._sending[1])
        self._send()

    def report(self) -> str:
        """Report a new record, not before the one before it is acknowledged; return its id."""
        assert self._sending is None, "one at a time"
        self._count += 1
        dataset, type_ = self.choose()
        id_ = f"{self.name}-{self._count}"
        self._sending = dataset, id_, json.dumps({"id": id_, "type": type_}).encode()
        self.data_audit.reported(id_, dataset, type_)
        self._send()
        return id_

    def _send(self) -> None:
        if self._sending is not None and self.process is not None:
            dataset, id_, record = self._sending
            self.process.handle(PublishMessage(id_, channel_interest(DATASET_PREFIX + dataset), record))

    def _act(self, action: Any) -> None:
        if not isinstance(action, PublishEnded):
            super()._act(action)
            return
        if self._sending is None or action.token != self._sending[1]:
            return
        if action.code is None:
            self.data_audit.acknowledged(self._sending[1])
            self._sending = None
        elif action.is_retryable:
            self.data_audit.unacknowledged(self._sending[1])
            self.world.after(RETRY_S, self._send_again, self._sending[1])
        else:
            self.problems.append(f"{self.name} may not report {self._sending}: {action.code}: {action.reason}")

    def _send_again(self, id_: str) -> None:
        if self._sending is not None and self._sending[1] == id_:
            self._send()
