"""Subscribes a dispatcher to everything that is published at its server, and knows whether the server lets it.

Theory of operation
-------------------
It subscribes to ``*``. A server with ``notify-keyspace-events`` also publishes a message for each change of a key. At
the first of these the dispatcher changes to ``QUIET_PATTERNS``, which match every other name exactly once, so that an
agent is exactly one receiver of each message. (Not from the start, because 31 patterns cost Redis time.)

First it asks whether it may unsubscribe, by leaving a pattern that it has not joined. Then both commands leave in one
write: PSUBSCRIBE of the patterns, PUNSUBSCRIBE of ``*``. Messages published between the two come twice. The
confirmations on the connection show where that begins and ends, and copies that ``*`` brings in between are dropped. A
later connection begins with the patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamoth.globs import patterns_without
from dynamoth.machine.events import Send
from dynamoth.names import AGENT_CHANNEL, NOTIFICATION_PREFIXES
from dynamoth_dispatcher.events import LOCAL, DispatcherAction

EVERYTHING = b"*"

QUIET_PATTERNS = patterns_without(*NOTIFICATION_PREFIXES)
"""Match all names but those of keyspace notifications, each by exactly one of these."""

TAG_OBSERVE = "observe"
TAG_LEAVE = "leave"
"""Tags of subscribing and unsubscribing: replies to these are refusals."""

_NOT_JOINED = NOTIFICATION_PREFIXES[0] + b"*"

SUBSCRIPTIONS = frozenset((b"psubscribe", b"subscribe", b"punsubscribe"))
"""The kinds of pushes for :meth:`Observation.on_confirmation`."""

_OBSERVING = frozenset((b"psubscribe", b"subscribe"))
"""The confirmations that an observing dispatcher needs."""


class Observation:
    """The subscriptions of one dispatcher at its server."""

    def __init__(self) -> None:
        #: Why the server refuses observation; None where it does not.
        self.refusal: str | None = None
        #: Why the server refuses to end the subscription to ``*``.
        self.leave_refusal: str | None = None
        #: When a refusal is retried.
        self.retry_at: float | None = None
        #: A pattern whose messages come by another one as well, for a moment.
        self.repeated: bytes | None = None
        #: The kinds of subscription that the server has confirmed over this connection.
        self._confirmed: set[bytes] = set()
        #: The patterns of this connection.
        self._patterns: tuple[bytes, ...] = (EVERYTHING,)
        #: Whether there was a keyspace notification, on this connection or an earlier one.
        self._notified = False
        #: Whether this connection has asked if it may unsubscribe.
        self._asked = False

    @property
    def why_blind(self) -> str | None:
        """Why the server is not observed now; None when it is."""
        if self.refusal is not None:
            return self.refusal
        return None if self._confirmed >= _OBSERVING else "the server has not confirmed PSUBSCRIBE yet"

    def link_up(self) -> list[DispatcherAction]:
        """Subscribe over a new connection."""
        self.refusal = None
        self.leave_refusal = None
        self.repeated = None
        self._asked = False
        self._patterns = QUIET_PATTERNS if self._notified else (EVERYTHING,)
        return self.subscribe()

    def link_down(self) -> None:
        """Forget the connection."""
        self._confirmed.clear()
        self.retry_at = None

    def subscribe(self) -> list[DispatcherAction]:
        """Subscribe, for the first time or after a refusal."""
        self._confirmed.clear()
        self.retry_at = None
        return [
            Send(LOCAL, (b"PSUBSCRIBE", *self._patterns), (TAG_OBSERVE,)),
            Send(LOCAL, (b"SUBSCRIBE", AGENT_CHANNEL), (TAG_OBSERVE,)),
        ]

    def on_refusal(self, reason: str, retry_at: float) -> None:
        """Record a refused subscription; observation begins again when all are confirmed."""
        self._confirmed.clear()
        self.refusal = reason
        self.retry_at = retry_at

    def on_leave_refusal(self, reason: str) -> None:
        """Record a refusal to unsubscribe: this connection keeps its patterns."""
        self.leave_refusal = reason

    def is_restored(self) -> bool:
        """Return whether everything is confirmed after a refusal, and clear the refusal."""
        if self.refusal is None or not self._confirmed >= _OBSERVING:
            return False
        self.refusal = None
        return True

    def on_notification(self) -> list[DispatcherAction]:
        """Handle a keyspace notification: ask once whether unsubscribing is permitted."""
        self._notified = True
        if self._asked or self._patterns == QUIET_PATTERNS:
            return []
        self._asked = True
        return [Send(LOCAL, (b"PUNSUBSCRIBE", _NOT_JOINED), (TAG_LEAVE,))]

    def on_confirmation(self, push: Sequence[Any]) -> list[DispatcherAction]:
        """Handle the confirmation that a subscription has begun or ended."""
        kind, name = push[0], push[1]
        if kind != b"punsubscribe":
            self._confirmed.add(kind)
            if self._asked and kind == b"psubscribe" and name != EVERYTHING:
                self.repeated = EVERYTHING
        elif name == EVERYTHING:
            self.repeated = None
        elif name == _NOT_JOINED and self._asked and self._patterns != QUIET_PATTERNS:
            self._patterns = QUIET_PATTERNS
            return [
                Send(LOCAL, (b"PSUBSCRIBE", *QUIET_PATTERNS), (TAG_OBSERVE,)),
                Send(LOCAL, (b"PUNSUBSCRIBE", EVERYTHING), (TAG_LEAVE,)),
            ]
        return []
