"""Links over which brokers, coordinators and operators speak with each other: the part that all owners share.

Theory of operation
-------------------
There is a link to each server of the configuration. The owner listens at all of them, and sends each message through
two that are up, others each time: so a message arrives although one server is out of reach of one end, and a cluster
of many servers does not carry many copies. Receivers drop copies by incarnation and number.

A server that refuses a subscription is asked again: rights may have been given meanwhile. What it refuses is the fault
of that server until it allows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dynamoth.edge.control import EdgeMessage, Stamp, pack_edge, unpack_edge
from dynamoth.errors import MalformedMessage
from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable
from dynamoth.machine.events import Connect, ErrorReply, Send
from dynamoth.machine.timers import Timers
from dynamoth.names import operator_inbox
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control, unpack_control
from dynamoth_broker.events import ControlLinkChanged

COPIES = 2
"""A message travels through this many servers."""

RESUBSCRIBE_S = 10.0
"""A server that refused a subscription is asked again after this time: the user may have got the rights."""

ANSWERED_MAX = 1000
ANSWERED_BYTES_MAX = 1024 * 1024
"""Bounds of the answers to operators that are remembered."""

NOT_REACHED = "it was not reached yet"

TAG = "edge"
"""The first part of the tags of these commands; the second is one of these."""
SUBSCRIBE, PUBLISH = "subscribe", "publish"

EdgeLinkAction = Connect | Send | ControlLinkChanged

A = TypeVar("A")


@dataclass(slots=True)
class _Server:
    """The state of one link."""

    url: str
    is_up: bool = False
    #: Why the server cannot be reached; empty while it can.
    unreachable: str = NOT_REACHED
    #: What it refuses, ``SUBSCRIBE`` or ``PUBLISH``, and why.
    refused: dict[str, str] = field(default_factory=dict[str, str])
    #: When it is asked again; None: a timer is not needed, or not set.
    retry_at: float | None = None

    @property
    def fault(self) -> str:
        """Why it cannot be used; empty while all is well."""
        return self.unreachable or next(iter(self.refused.values()), "")


class EdgeLinks:
    """The links of one broker or coordinator.

    Args:
        servers: URLs by name of the link.
        channels: what the owner listens to at every server.
        incarnation: of the owner's process.
        timers: those of the owner.
        counters: those of the owner; ``malformed`` and ``control_refused`` are counted.
        seen_max: messages that are remembered to recognise copies.

    """

    def __init__(
        self,
        servers: Mapping[str, str],
        channels: Sequence[bytes],
        incarnation: int,
        timers: Timers[Any],
        counters: Counter[str],
        seen_max: int,
    ) -> None:
        self._servers = {link: _Server(url) for link, url in servers.items()}
        self._channels = tuple(channels)
        self._incarnation = incarnation
        self._timers = timers
        self._counters = counters
        #: The number of the latest message.
        self._number = 0
        self._seen: BoundedTable[Stamp, bool] = BoundedTable(seen_max, seen_max, lambda key, value: 1)

    def __contains__(self, link: object) -> bool:
        """Return whether a link is one of these."""
        return link in self._servers

    def __len__(self) -> int:
        return len(self._servers)

    def connect(self) -> list[EdgeLinkAction]:
        """Begin to connect to all servers."""
        return [Connect(link, server.url) for link, server in self._servers.items()]

    @property
    def faults(self) -> dict[str, str]:
        """The links that cannot be used, and why."""
        return {link: fault for link, server in self._servers.items() if (fault := server.fault)}

    # What happens to links.

    def is_up(self, link: str) -> bool:
        """Return whether a server can be reached."""
        return self._servers[link].is_up

    def on_up(self, link: str) -> list[EdgeLinkAction]:
        """Listen at a server."""
        server = self._servers[link]
        server.is_up, server.unreachable, server.refused = True, "", {}
        return [ControlLinkChanged(link, None), self._subscribe(link)]

    def on_down(self, link: str, reason: str) -> list[EdgeLinkAction]:
        """Note that a server cannot be reached."""
        server = self._servers[link]
        before, server.is_up, server.unreachable = server.fault, False, reason
        return self._news(link, before)

    def on_reply(self, link: str, what: str, value: Any, now: float) -> list[EdgeLinkAction]:
        """Handle the reply to a command whose tag is ``(TAG, what)``. An error says that the user lacks rights."""
        server = self._servers[link]
        before = server.fault
        if not isinstance(value, ErrorReply):
            server.refused.pop(what, None)
            return self._news(link, before)
        self._counters["control_refused"] += 1
        server.refused[what] = str(value)
        if what == SUBSCRIBE and server.retry_at is None:
            server.retry_at = now + RESUBSCRIBE_S
            self._timers.add(server.retry_at, self._subscribe_again, link)
        return self._news(link, before)

    def on_subscribed(self, link: str) -> list[EdgeLinkAction]:
        """Note that a server has confirmed a subscription."""
        server = self._servers[link]
        before = server.fault
        server.refused.pop(SUBSCRIBE, None)
        return self._news(link, before)

    def _news(self, link: str, before: str) -> list[EdgeLinkAction]:
        fault = self._servers[link].fault
        return [] if fault == before else [ControlLinkChanged(link, fault or None)]

    def _subscribe(self, link: str) -> Send:
        return Send(link, (b"SUBSCRIBE", *self._channels), (TAG, SUBSCRIBE))

    def _subscribe_again(self, link: str, now: float) -> Sequence[EdgeLinkAction]:
        server = self._servers[link]
        server.retry_at = None
        return [self._subscribe(link)] if server.is_up and SUBSCRIBE in server.refused else []

    # Messages.

    def publish(self, channel: bytes, message: EdgeMessage) -> list[Send]:
        """Send through two servers that are up."""
        up = [link for link, server in self._servers.items() if server.is_up]
        if not up:
            return []
        self._number += 1
        data = pack_edge(Stamp(self._incarnation, self._number), message)
        chosen = {up[(self._number + copy) % len(up)] for copy in range(COPIES)}
        return [Send(link, (b"PUBLISH", channel, data), (TAG, PUBLISH)) for link in sorted(chosen)]

    def read(self, data: bytes) -> tuple[Stamp, EdgeMessage] | None:
        """Read a message; None for one that cannot be read, and for a copy."""
        try:
            stamp, message = unpack_edge(data)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return None
        if stamp in self._seen:
            return None
        self._seen.put(stamp, True)
        return stamp, message


class OperatorAnswers:
    """Reads what operators ask, and remembers the answers: a request that comes again gets the same answer."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        #: By request; empty while the answer is to come.
        self._answered: BoundedTable[int, bytes] = BoundedTable(
            ANSWERED_MAX, ANSWERED_BYTES_MAX, lambda key, value: len(value) + ENTRY_BYTES
        )

    def on_request(
        self,
        link: str,
        data: bytes,
        targets: Collection[str],
        execute: Callable[[AdminRequest], tuple[AdminReply | None, list[A]]],
    ) -> list[A | Send]:
        """Have a request carried out that came over ``link``, and answer it there.

        Args:
            link: where it came from.
            data: the request, from anyone.
            targets: the targets that the owner obeys.
            execute: returns the answer, or None where the owner answers later; and actions.

        """
        try:
            request = unpack_control(data)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return []
        if not isinstance(request, AdminRequest) or request.arguments.get("target") not in targets:
            return []
        known = self._answered.get(request.request)
        if known is not None:
            return [_answer(link, request.request, known)] if known else []
        self._answered.put(request.request, b"")
        reply, actions = execute(request)
        return [*actions] if reply is None else [*actions, self.answer(link, reply)]

    def answer(self, link: str, reply: AdminReply) -> Send:
        """Return the command that sends an answer."""
        data = pack_control(reply)
        self._answered.put(reply.request, data)
        return _answer(link, reply.request, data)


def _answer(link: str, request: int, data: bytes) -> Send:
    return Send(link, (b"PUBLISH", operator_inbox(request), data), (TAG, PUBLISH))
