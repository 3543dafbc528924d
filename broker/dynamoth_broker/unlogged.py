"""Notices publications on the plain names of logged channels: they are in no log, and reach no user.

A backend that does not know of the log publishes there, with the client of the cluster, and gets no error. So a broker
listens to these names, too, for as long as it has the logged channels. That they cannot be subscribed to is no fault.
"""

from __future__ import annotations

from collections import Counter

from dynamoth_broker.events import BrokerAction, Noted, SubscribeChannel, UnsubscribeChannel
from dynamoth_broker.interests import SharedInterest

WATCHED_MAX = 1000
"""Names that a broker listens to: enough to notice a mistake, at a bounded cost."""

WARN_S = 600.0
"""Time between two warnings about one channel."""


class Unlogged:
    """The plain names of one broker's logged channels."""

    def __init__(self, counters: Counter[str]) -> None:
        """Begin without names; ``counters`` is shared with the owner."""
        self._counters = counters
        #: When each may be warned about next.
        self._watched: dict[bytes, float] = {}

    def watch(self, interest: SharedInterest) -> list[BrokerAction]:
        """Begin to listen to the plain name of an interest, if it is a logged channel."""
        name = _name_of(interest)
        if name is None or name in self._watched or len(self._watched) >= WATCHED_MAX:
            return []
        self._watched[name] = 0.0
        return [SubscribeChannel(name)]

    def end(self, interest: SharedInterest) -> list[BrokerAction]:
        """Stop listening to the plain name of an interest."""
        name = _name_of(interest)
        if name is None or self._watched.pop(name, None) is None:
            return []
        return [UnsubscribeChannel(name)]

    def on_publication(self, channel: bytes, now: float) -> list[BrokerAction]:
        """Count a publication of a channel that no user can get, and warn of it now and then."""
        due = self._watched.get(channel)
        if due is None:
            return []
        self._counters["unlogged"] += 1
        if now < due:
            return []
        self._watched[channel] = now + WARN_S
        what = "a publication on a logged channel is not in its log, and reaches no user"
        why = "it came from the client of the cluster: publish with LogPublisher, or as a user of a broker"
        return [Noted(what, why, {"channel": channel.decode(errors="replace")}, is_warning=True)]


def _name_of(interest: SharedInterest) -> bytes | None:
    """Return the plain name of a logged channel; None for anything else."""
    is_logged_channel = interest.is_logged and interest.interest.kind == "channel"
    return interest.interest.name.encode() if is_logged_channel else None
