"""How a dispatcher sees what is published at its server: by which patterns, and whether the server lets it.

Theory of operation
-------------------
It subscribes to ``*``. A server with ``notify-keyspace-events`` publishes a message for each change of a key, too. So
with the first of these the dispatcher changes to ``QUIET_PATTERNS``, which match every other name, each name once: an
agent is exactly one receiver of each message. (Not from the first, as so many patterns cost Redis time.)

First it asks whether it may unsubscribe, by leaving a pattern that it has not joined. Then both commands leave in one
write: PSUBSCRIBE of the patterns, PUNSUBSCRIBE of ``*``. What is published between the two comes twice. The
confirmations on the connection show where that begins and where it ends, so what ``*`` brings meanwhile is dropped.
A later connection begins with the patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamoth.glob import patterns_without
from dynamoth.machine.events import Send
from dynamoth.names import AGENT_CHANNEL, NOTIFICATION_PREFIXES
from dynamoth_dispatcher.forwarder import LOCAL

EVERYTHING = b"*"

QUIET_PATTERNS = patterns_without(*NOTIFICATION_PREFIXES)
"""Match all names but those of keyspace notifications, each by exactly one of these."""

TAG_OBSERVE = "observe"
TAG_LEAVE = "leave"
"""Tags of subscribing and unsubscribing: replies to these are refusals."""

_NOT_JOINED = NOTIFICATION_PREFIXES[0] + b"*"

SUBSCRIPTIONS = frozenset((b"psubscribe", b"subscribe", b"punsubscribe"))
"""The kinds of pushes that :meth:`Observation.changed` takes."""

_OBSERVING = frozenset((b"psubscribe", b"subscribe"))
"""What the server confirms to a dispatcher that observes it."""


class Observation:
    """The subscriptions of one dispatcher at its server."""

    def __init__(self) -> None:
        #: Why the server does not let this dispatcher observe; None where it does.
        self.refusal: str | None = None
        #: Why it does not let it unsubscribe from ``*``.
        self.leave_refusal: str | None = None
        #: When a refusal is retried.
        self.retry_at: float | None = None
        #: A pattern whose messages come by another one as well, for a moment.
        self.repeated: bytes | None = None
        #: The kinds of subscription that the server has confirmed over this connection.
        self._confirmed: set[bytes] = set()
        #: What this connection subscribes to.
        self._patterns: tuple[bytes, ...] = (EVERYTHING,)
        #: Whether there have been keyspace notifications, on this connection or an earlier one.
        self._notified = False
        #: Whether this connection has asked if it may unsubscribe.
        self._asked = False

    @property
    def why_blind(self) -> str | None:
        """Why the server is not observed now; None when it is."""
        if self.refusal is not None:
            return self.refusal
        return None if self._confirmed >= _OBSERVING else "the server has not confirmed PSUBSCRIBE yet"

    def link_up(self) -> list[Any]:
        """Begin a connection."""
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

    def subscribe(self) -> list[Any]:
        """Subscribe; again after a refusal."""
        self._confirmed.clear()
        self.retry_at = None
        return [
            Send(LOCAL, (b"PSUBSCRIBE", *self._patterns), (TAG_OBSERVE,)),
            Send(LOCAL, (b"SUBSCRIBE", AGENT_CHANNEL), (TAG_OBSERVE,)),
        ]

    def refused(self, reason: str, retry_at: float) -> None:
        """Take the refusal of a subscription: nothing is taken for observed before all of them are confirmed anew."""
        self._confirmed.clear()
        self.refusal = reason
        self.retry_at = retry_at

    def leave_refused(self, reason: str) -> None:
        """Take the refusal to unsubscribe: this connection goes on with what it has."""
        self.leave_refusal = reason

    def is_restored(self) -> bool:
        """Tell whether everything is confirmed after a refusal; the refusal is forgotten then."""
        if self.refusal is None or not self._confirmed >= _OBSERVING:
            return False
        self.refusal = None
        return True

    def notified(self) -> list[Any]:
        """Take note of a keyspace notification."""
        self._notified = True
        if self._asked or self._patterns == QUIET_PATTERNS:
            return []
        self._asked = True
        return [Send(LOCAL, (b"PUNSUBSCRIBE", _NOT_JOINED), (TAG_LEAVE,))]

    def changed(self, push: Sequence[Any]) -> list[Any]:
        """Take the confirmation of a subscription, or of the end of one."""
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
