"""The contract between machines and drivers: events go in, actions come out.

Theory of operation
-------------------
Every machine of Dynamoth (publisher, subscriber, dispatcher, load analyzer, balancer) is pure. A driver hands it one
event at a time (:meth:`Machine.handle`) and executes the actions that it returns. A machine reads no clock, opens no
socket and draws no random number of its own.

The vocabulary of its I/O is Redis itself: a machine asks for named *links* to servers, sends *commands* over them, and
gets their replies and the pushed messages as events (:data:`LinkAction`, :data:`LinkEvent`). Each machine adds events
and actions of its own and names both unions, so that type checkers prove that it handles every event. One driver
(``dynamoth_link.driver``) runs every machine against real servers, and one (``dynamoth_sim``) runs every machine
against simulated ones. ``tests/contract`` holds both to what this module says.

An event that arises while the machine is at work, because an action caused it, waits until all actions of the present
event have been executed. A machine that raises, or that connects a link twice, is broken: its driver stops it, closes
its links and hands it no event any more.

A link is one connection that speaks RESP3, so that commands and subscriptions share it. Its rules:

* It is first in, first out: commands take effect, and replies and pushes come back, in the order of the connection.
* After :class:`Connect` the driver keeps trying to hold it open, with backoff, until :class:`Disconnect`. Then the
  name is free at once.
* :class:`LinkUp` begins a connection and :class:`LinkDown` ends it. A command that was not replied to before
  ``LinkDown`` may or may not have taken effect, and will never be replied to. Nothing is sent again by itself.
* A command sent while the link is down is dropped by the driver; machines send between ``LinkUp`` and ``LinkDown``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

CommandPart = bytes | str | int | float
"""What a Redis command is made of."""

Tag = Any
"""A machine's own name for a command; comes back with its reply, untouched."""


# Actions that every driver can execute.


@dataclass(slots=True)
class Connect:
    """Open a link to the server at ``url`` and keep it open until ``Disconnect``.

    One ``LinkDown`` answers a URL that cannot be parsed, and there is no link.
    """

    link: str
    url: str


@dataclass(slots=True)
class Disconnect:
    """Close a link. No event of this link comes after it, not even ``LinkDown``.

    For a link that does not exist it does nothing: a machine cannot know whether the driver accepted its URL.
    """

    link: str


@dataclass(slots=True)
class Send:
    """Send one Redis command. Its reply comes as ``Replied`` when ``tag`` is not None, and is dropped otherwise.

    SUBSCRIBE, PSUBSCRIBE and UNSUBSCRIBE have no reply of their own (RESP3 acknowledges them with pushes): their tag
    comes back only with an error.
    """

    link: str
    args: Sequence[CommandPart]
    tag: Tag = None


@dataclass(slots=True)
class SendAll:
    """Send commands that have replies (no subscription commands), in order, as one ``Send`` for each would.

    Their replies come as ``RepliedAll``, as many at once as came together, or as ``Replied``.
    """

    link: str
    commands: Sequence[Sequence[CommandPart]]
    tag: Tag


LinkAction = Connect | Disconnect | Send | SendAll
"""What every driver executes. Each machine adds its own actions to these."""


# Events that every driver reports.


@dataclass(slots=True)
class Start:
    """The first event of every machine."""


@dataclass(slots=True)
class LinkUp:
    """A link is open, authenticated and speaks RESP3.

    ``run_id`` is the identity of the server's process (``INFO server``), new with each start of it; None where the
    server does not let us ask.
    """

    link: str
    run_id: str | None = None


@dataclass(slots=True)
class LinkDown:
    """A link was lost, or one more attempt to open it failed. The driver goes on trying.

    ``refused``: we do not connect there by our own configuration, so waiting does not help.
    """

    link: str
    reason: str
    refused: bool = False


@dataclass(slots=True)
class Replied:
    """The reply to a tagged command. ``value`` is an ``ErrorReply`` when the server answered with an error."""

    link: str
    tag: Tag
    value: Any


@dataclass(slots=True)
class RepliedAll:
    """The replies to consecutive commands of one ``SendAll``; at least one."""

    link: str
    tag: Tag
    values: Sequence[Any]


@dataclass(slots=True)
class Pushed:
    """Push messages of one link, in the order they came.

    Each is a list as RESP3 has it: ``[b"message", channel, data]``, ``[b"pmessage", pattern, channel, data]``,
    ``[b"subscribe", channel, count]`` ...
    """

    link: str
    messages: Sequence[Sequence[Any]]


@dataclass(slots=True)
class Tick:
    """The time of ``Machine.deadline`` has come or passed. ``handle`` gets a time that is not before it."""


LinkEvent = Start | LinkUp | LinkDown | Replied | RepliedAll | Pushed | Tick
"""What every driver reports. Each machine adds its own events to these."""


class ErrorReply(Exception):
    """Never raised. The value of a :class:`Replied` whose command failed; its argument is the server's text."""

    @property
    def lacks_permission(self) -> bool:
        """Whether the user must be given a permission first (ACL), or must log in: asking again does not help."""
        return str(self).startswith(("NOPERM", "NOAUTH"))

    def __eq__(self, other: object) -> bool:
        """Compare by text, so that tests can compare events."""
        return isinstance(other, ErrorReply) and self.args == other.args

    def __hash__(self) -> int:
        """Hash by text."""
        return hash(self.args)


def earliest(*times: float | None) -> float | None:
    """Return the earliest of several deadlines; None stands for none."""
    first = None
    for time in times:
        if time is not None and (first is None or time < first):
            first = time
    return first


_Event = TypeVar("_Event", contravariant=True)
_Action = TypeVar("_Action", covariant=True)
_Message = TypeVar("_Message", covariant=True)


class Machine(Protocol[_Event, _Action]):
    """The shape of everything that decides: the union of its events, and that of its actions."""

    def handle(self, event: _Event, now: float) -> Sequence[_Action]:
        """Handle one event at time ``now`` (seconds, never decreasing); return the actions to execute, in order."""
        ...

    def deadline(self) -> float | None:
        """Return the time at which the machine needs a :class:`Tick`; None while it needs none."""
        ...


class DirectDelivery(Protocol[_Message]):
    """An optional part of a machine: hands expected messages to the application without an event and its actions.

    Where messages come one by one, an event with its actions costs more than what the machine decides. So a driver that
    gets pushes while the machine is at rest may offer them here first, and make a :class:`Pushed` of the rest.
    """

    def take_expected(
        self, link: str, pushes: Sequence[Sequence[Any]], deliver: Callable[[_Message], object], begin: int = 0
    ) -> int:
        """Handle pushes from index ``begin`` on, while nothing is to be done but to deliver them or to drop copies.

        Calls ``deliver`` with each message for the application. Returns the index of the first push that it has left
        to ``handle``, which would have had the same effect for the pushes before it. The deadline stays as it is.
        """
        ...


OnPushes = Callable[[str, list[list[Any]]], int]
"""What both drivers offer the pushes of a link to while the machine is at rest: a function of its owner that calls
``take_expected`` where it can. Returns how many of the pushes it has handled, from the first on."""
