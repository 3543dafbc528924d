"""A simulated administrator: asks the balancer for changes, and asks again until there is an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import Connect, LinkDown, LinkUp, Pushed, Send, Start, Tick
from dynamoth.names import OPERATOR_CHANNEL, operator_inbox
from dynamoth.plan.plan import Server
from dynamoth.protocol.control import AdminReply, AdminRequest, pack_control, unpack_control

ASK_AGAIN_S = 0.3
"""How soon an unanswered request is repeated, at another server."""


@dataclass(slots=True)
class Ask:
    """Event: ask the balancer to change where a channel is. ``request`` has up to 63 bits and is new for each."""

    request: int
    command: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.command} {self.arguments}"


@dataclass(slots=True)
class Answered:
    """Action: the balancer has answered; ``error`` is None when the change has settled."""

    request: int
    error: str | None
    result: Mapping[str, Any]


class Administrator:
    """Sends each request to one server after the other until the balancer has answered."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._up: dict[str, None] = {}
        #: Unanswered requests, oldest first, with how often they were sent.
        self.unanswered: dict[int, tuple[Ask, int]] = {}
        self._again_at: float | None = None

    def handle(self, event: Any, now: float) -> list[Any]:
        """Handle one event; return the actions to execute, in order."""
        match event:
            case Start():
                return [Connect(server.id, server.url) for server in self._servers]
            case LinkUp(link, _):
                self._up[link] = None
                inboxes = [operator_inbox(request) for request in self.unanswered]
                return [Send(link, (b"SUBSCRIBE", *inboxes))] if inboxes else []
            case LinkDown(link, _):
                self._up.pop(link, None)
            case Ask():
                self.unanswered[event.request] = (event, 0)
                self._again_at = now + ASK_AGAIN_S if self._again_at is None else self._again_at
                subscribes = [Send(link, (b"SUBSCRIBE", operator_inbox(event.request))) for link in self._up]
                return [*subscribes, *self._ask(event.request)]
            case Tick():
                self._again_at = now + ASK_AGAIN_S if self.unanswered else None
                return [action for request in list(self.unanswered) for action in self._ask(request)]
            case Pushed(_, messages):
                return [action for push in messages if push[0] == b"message" for action in self._on_message(push[2])]
            case _:
                raise AssertionError(f"not an event of an administrator: {event!r}")
        return []

    def deadline(self) -> float | None:
        """Return when unanswered requests are sent again."""
        return self._again_at

    def _ask(self, request: int) -> list[Any]:
        if not self._up:
            return []
        ask, times = self.unanswered[request]
        self.unanswered[request] = (ask, times + 1)
        link = list(self._up)[times % len(self._up)]
        message = AdminRequest(request, ask.command, ask.arguments)
        return [Send(link, (b"PUBLISH", OPERATOR_CHANNEL, pack_control(message)))]

    def _on_message(self, data: bytes) -> list[Any]:
        reply = unpack_control(data)
        if not isinstance(reply, AdminReply) or self.unanswered.pop(reply.request, None) is None:
            return []
        leave = [Send(link, (b"UNSUBSCRIBE", operator_inbox(reply.request))) for link in self._up]
        return [*leave, Answered(reply.request, reply.error, reply.result)]
