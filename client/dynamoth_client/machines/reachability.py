"""Adds PING to a subscriber machine for its PubSub, and reports when no server can be reached.

Theory of operation
-------------------
:class:`WatchedSubscriber` is a machine around a machine. Events go through to the inner one, whose actions come out;
on the way it notes which links there are and which of them are up. A PING waits until one is. When none has been up for
``unreachable_s`` it says so, and again each time that this much time has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from dynamoth.machine.events import (
    Connect,
    Disconnect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Machine,
    Pushed,
    Replied,
    Send,
    Tick,
    earliest,
)
from dynamoth_client.machines.subscriber.listening import ASK_PREFIX

NOT_CONNECTED_YET = "not connected yet"

PINGS_WAITING_MAX = 100
"""Further PINGs are dropped while no link is up."""


@dataclass(slots=True)
class Ping:
    """Event: the application asks for a PING; ``message`` None stands for a PING without one."""

    message: bytes | None


@dataclass(slots=True)
class Ponged:
    """Action: the server answered the PING with ``message``."""

    message: bytes


@dataclass(slots=True)
class LinkOpened:
    """Action: the link exists from now on. It follows the ``Connect``."""

    link: str


@dataclass(slots=True)
class LinkClosed:
    """Action: the link exists no longer."""

    link: str


@dataclass(slots=True)
class Unreachable:
    """Action: no link has been up for ``unreachable_s``; ``reasons`` has one for each link."""

    reasons: dict[str, str]


ReachabilityAction = Ponged | LinkOpened | LinkClosed | Unreachable
"""The actions that a ``WatchedSubscriber`` adds to those of its inner machine."""


@dataclass(slots=True, frozen=True)
class _PingTag:
    """The tag of our own command."""


_PING = _PingTag()

_OF_LINKS = frozenset((Connect, Disconnect))
_STATES = frozenset((LinkUp, LinkDown))


class WatchedSubscriber:
    """Adds :class:`Ping` to the events of a subscriber machine, and the actions of this module to its actions."""

    def __init__(self, machine: Machine[Any, Any], unreachable_s: float) -> None:
        """Watch ``machine`` from its first event on."""
        self._machine = machine
        self._unreachable_s = unreachable_s
        #: Link to the reason why it is down; None while it is up.
        self._down: dict[str, str | None] = {}
        #: Since when no link has been up, or when this was last said. None while one is up, or there is none.
        self._alone_since: float | None = None
        #: PINGs that wait for a link to be up.
        self._pings: list[Ping] = []

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """Handle one event; return the actions to execute, in order."""
        if type(event) is Pushed:  # nearly all of them
            return self._watched(self._machine.handle(event, now), now)
        kind = cast("type[object]", type(event))
        if kind is Ping:
            return self._ping(event)
        if kind is Replied and event.tag is _PING:
            return [] if isinstance(event.value, ErrorReply) else [Ponged(_pong(event.value))]
        if kind in _STATES and event.link.startswith(ASK_PREFIX):
            return self._watched(self._machine.handle(event, now), now)
        if kind is LinkUp:
            self._down[event.link] = None
        elif kind is LinkDown:
            self._down[event.link] = event.reason
        actions = self._machine.handle(event, now)
        if kind is LinkUp and self._pings:
            actions = [*actions, *(ping for waiting in self._pings for ping in self._send(event.link, waiting))]
            self._pings.clear()
        actions = self._watched(actions, now)
        if kind is LinkUp or kind is LinkDown:
            self._judge(now)
        elif kind is Tick and self._alone_since is not None and now >= self._alone_since + self._unreachable_s:
            self._alone_since = now
            reasons = {link: reason for link, reason in self._down.items() if reason is not None}
            return [*actions, Unreachable(reasons)]
        return actions

    def _watched(self, actions: Sequence[Any], now: float) -> Sequence[Any]:
        """Note links that are opened and closed."""
        for action in actions:
            if type(action) in _OF_LINKS:
                return self._note_links(actions, now)
        return actions

    def deadline(self) -> float | None:
        """Return the earlier deadline of the two."""
        inner = self._machine.deadline()
        return inner if self._alone_since is None else earliest(inner, self._alone_since + self._unreachable_s)

    def _ping(self, event: Ping) -> list[Any]:
        for link, reason in self._down.items():
            if reason is None:
                return self._send(link, event)
        if len(self._pings) < PINGS_WAITING_MAX:
            self._pings.append(event)
        return []

    def _send(self, link: str, ping: Ping) -> list[Any]:
        return [Send(link, (b"PING",) if ping.message is None else (b"PING", ping.message), _PING)]

    def _note_links(self, actions: Sequence[Any], now: float) -> list[Any]:
        noted: list[Any] = []
        for action in actions:
            noted.append(action)
            if type(action) is Connect:
                if not action.link.startswith(ASK_PREFIX):
                    self._down[action.link] = NOT_CONNECTED_YET
                noted.append(LinkOpened(action.link))
            elif type(action) is Disconnect:
                self._down.pop(action.link, None)
                noted.append(LinkClosed(action.link))
        self._judge(now)
        return noted

    def _judge(self, now: float) -> None:
        if not self._down or None in self._down.values():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now


def _pong(reply: Any) -> bytes:
    """Return the data of the pong message: empty for a PING without a message, as redis-py has it."""
    return b"" if reply == b"PONG" or not isinstance(reply, bytes) else reply
