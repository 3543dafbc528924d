"""What administrators ask of the balancer, and what they are answered.

Requests come as :class:`~dynamoth.control.AdminRequest` on the balancer's channel at any server, and are answered in
``inbox(request)`` at that server, once for each time that they were asked: a repeated request, as its answer may have
been lost, is not carried out again.

=========  ==============================  ==================================================================
command    arguments                       result
=========  ==============================  ==================================================================
status                                     see :mod:`dynamoth_balancer.status`
plan       after: bytes, limit: 1..1000,   version, servers, base, entries (by channel name), and next: what to
           all optional                    give as ``after`` for the following ones, None at the end
plan       channel: bytes                  version, and entries with the one of the channel, also at home
move       channel: bytes, to: str         when it has settled: channel, from, to, epoch, version, duration_s
pause                                      paused: True. No decisions of the balancer's own; moves go on
resume                                     paused: False
=========  ==============================  ==================================================================
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynamoth.control import AdminReply, AdminRequest, pack_control
from dynamoth.errors import RequestRefused
from dynamoth.events import Send
from dynamoth.names import inbox
from dynamoth_balancer.options import BalancerOptions

MOVES_PENDING_MAX = 1000
"""Bound of the moves that administrators wait for at one time."""


class MoveState(enum.Enum):
    """How far a move has come."""

    UNSETTLED = "unsettled"
    SETTLED = "settled"
    SUPERSEDED = "superseded"
    """A later move of the channel has taken its place."""


@dataclass(frozen=True, slots=True)
class BegunMove:
    """A move that an administrator waits for."""

    channel: bytes
    source: str
    target: str
    epoch: int


class Office(Protocol):
    """What the balancer can do for administrators. All raise RequestRefused."""

    def status(self, now: float) -> Mapping[str, Any]:
        """Return how everything is."""
        ...

    def plan_page(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a part of the plan."""
        ...

    def begin_move(self, channel: bytes, target: str, now: float) -> tuple[BegunMove, list[Any]]:
        """Begin to move a channel; return also the actions to execute."""
        ...

    def move_state(self, move: BegunMove, now: float) -> tuple[MoveState, str]:
        """Return how far a move is, and what it waits for."""
        ...

    def pause(self, paused: bool) -> None:
        """Make decisions, or make none."""
        ...

    def version(self) -> int:
        """Return the version of the plan."""
        ...


@dataclass(slots=True)
class _Pending:
    """An unanswered move."""

    server: str
    request: int
    move: BegunMove
    since: float


class Admin:
    """Answers requests."""

    def __init__(self, office: Office, options: BalancerOptions) -> None:
        self._office = office
        self._options = options
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        #: The latest answers, oldest first, at most ``requests_max``.
        self._answered: OrderedDict[int, AdminReply] = OrderedDict()
        self.counters: Counter[str] = Counter()
        self._commands: dict[str, Callable[[Mapping[str, Any], float], Mapping[str, Any]]] = {
            "status": lambda arguments, now: office.status(now),
            "plan": lambda arguments, now: office.plan_page(arguments),
            "pause": lambda arguments, now: self._pause(True),
            "resume": lambda arguments, now: self._pause(False),
        }

    def handle(self, server: str, request: AdminRequest, now: float) -> list[Any]:
        """Take a request that came in at ``server``."""
        if (pending := self._pending.get(request.request)) is not None:
            pending.server = server
            return []
        if (answered := self._answered.get(request.request)) is not None:
            self.counters["requests_repeated"] += 1
            return [_send(server, answered)]
        self.counters["requests"] += 1
        try:
            if request.command == "move":
                return self._move(server, request, now)
            command = self._commands.get(request.command)
            if command is None:
                known = ", ".join(sorted([*self._commands, "move"]))
                raise RequestRefused(f"command {request.command!r:.60} is not known; known are {known}")
            return [self._answer(server, AdminReply(request.request, command(request.arguments, now)))]
        except RequestRefused as error:
            self.counters["requests_refused"] += 1
            return [self._answer(server, AdminReply(request.request, {}, str(error)))]

    def _pause(self, paused: bool) -> Mapping[str, Any]:
        self._office.pause(paused)
        return {"paused": paused}

    def _move(self, server: str, request: AdminRequest, now: float) -> list[Any]:
        channel, target = request.arguments.get("channel"), request.arguments.get("to")
        if not isinstance(channel, bytes) or not isinstance(target, str):
            raise RequestRefused("move takes the arguments channel (bytes) and to (the id of a server, text)")
        if len(self._pending) >= MOVES_PENDING_MAX:
            raise RequestRefused(f"{MOVES_PENDING_MAX} moves are waited for already; try again later")
        move, actions = self._office.begin_move(channel, target, now)
        self._pending[request.request] = _Pending(server, request.request, move, now)
        return actions

    def tick(self, now: float) -> list[Send]:
        """Answer the moves that have settled, and those that took too long."""
        sends: list[Send] = []
        for pending in list(self._pending.values()):
            state, waits = self._office.move_state(pending.move, now)
            if state is MoveState.SETTLED:
                sends.append(self._settled(pending, now))
            elif state is MoveState.SUPERSEDED:
                sends.append(self._failed(pending, "another balancer has moved the channel elsewhere"))
            elif now - pending.since >= self._options.move_timeout_s:
                text = f"not settled after {self._options.move_timeout_s:g} s, but it goes on: it waits for {waits}"
                sends.append(self._failed(pending, text))
        return sends

    def _settled(self, pending: _Pending, now: float) -> Send:
        move = pending.move
        result = {
            "channel": move.channel,
            "from": move.source,
            "to": move.target,
            "epoch": move.epoch,
            "version": self._office.version(),
            "duration_s": now - pending.since,
        }
        del self._pending[pending.request]
        return self._answer(pending.server, AdminReply(pending.request, result))

    def _failed(self, pending: _Pending, error: str) -> Send:
        del self._pending[pending.request]
        self.counters["requests_refused"] += 1
        return self._answer(pending.server, AdminReply(pending.request, {}, error))

    def _answer(self, server: str, reply: AdminReply) -> Send:
        self._answered[reply.request] = reply
        if len(self._answered) > self._options.requests_max:
            self._answered.popitem(last=False)
        return _send(server, reply)


def _send(server: str, reply: AdminReply) -> Send:
    return Send(server, (b"PUBLISH", inbox(reply.request), pack_control(reply)))
