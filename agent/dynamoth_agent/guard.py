"""Makes sure that a server has one agent: of two, the later one stops, unless the other one hangs.

Theory of operation
-------------------
An agent names its connection, and subscribes to ``AGENT_CHANNEL`` as all agents do. So NUMSUB of that channel shows
cheaply whether there can be another agent; only if it is not 1, the agent reads the list of all subscribers. Of two
agents the one with the higher connection id stops. Connection ids grow, so both come to the same conclusion.

An agent at work publishes a report in each interval, which the later one sees, as it sees all messages at the server.
If no report comes for ``HUNG_INTERVALS``, the earlier one hangs. Then the later one closes its connection and takes its
place at once. If it goes on later, it is the later one, and stops. Until that is decided, the later one says nothing to
the balancer.

The name holds the incarnation of the agent's process, so that the agent does not take an old connection of its own,
which the server still holds, for another agent. Two agents that start at the same time may each be alone when they
look, so they look again now and then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from dynamoth.machine.events import ErrorReply, Replied, Send
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth_agent.events import AgentAction, AlreadyRunning, GuardRefused, HungAgentReplaced
from dynamoth_dispatcher.events import LOCAL

TAG = "guard"
"""The tags of the guard's commands are tuples that begin with this."""

CHECK_INTERVAL_S = 10.0
"""How often an agent looks for another one."""

HUNG_INTERVALS = 5.0
"""An agent that sends no report for this many intervals hangs. One that falls behind sends one after three."""

NAME_PREFIX = "dynamoth-agent:"
"""The beginning of the names of agents' connections; the id of the server and the incarnation follow."""

_AGENT_LINE = re.compile(rf"^id=(\d+) addr=(\S+) (?:\S+ )*?name={NAME_PREFIX}(\S+):(\S+) age=(\d+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Agent:
    """An agent's connection in CLIENT LIST."""

    id: int
    server: str
    incarnation: str
    address: str
    age_s: str


class AgentGuard:
    """Finds out whether another agent is at work at the same server."""

    def __init__(
        self, server: str, incarnation: int, report_interval_s: float, why_blind: Callable[[], str | None]
    ) -> None:
        self._server = server
        self._why_blind = why_blind
        self._hung_s = HUNG_INTERVALS * report_interval_s
        self._incarnation = f"{incarnation:x}"
        #: When to look next; None while the link is down.
        self._check_at: float | None = None
        self._client_id: int | None = None
        #: Whether the server has shown, over the present connection, that no other agent was there before.
        self.is_clear = False
        self._refused = False
        #: An earlier agent that may hang, and when it was first seen.
        self._watched: tuple[_Agent, float] | None = None
        #: Which agent hung whose connection is being closed, in words.
        self._hung = ""

    @property
    def connection_name(self) -> str:
        """The name of this agent's connection: without spaces, whatever the id of the server."""
        return f"{NAME_PREFIX}{quote(self._server, safe='')}:{self._incarnation}"

    @property
    def has_met_another(self) -> bool:
        """Whether there is an earlier agent, which may hang or be at work."""
        return self._watched is not None

    def deadline(self) -> float | None:
        """Return when to look next."""
        return self._check_at

    def introduce(self) -> list[AgentAction]:
        """Return the first commands on a connection, before it is subscribed."""
        return [
            Send(LOCAL, (b"CLIENT", b"SETNAME", self.connection_name), (TAG, "name")),
            Send(LOCAL, (b"CLIENT", b"ID"), (TAG, "id")),
        ]

    def check(self, now: float) -> list[AgentAction]:
        """Ask whether there can be another agent; the connection has been introduced and is subscribed."""
        self._check_at = now + CHECK_INTERVAL_S
        return [Send(LOCAL, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), (TAG, "count"))]

    def tick(self, now: float) -> list[AgentAction]:
        """Look again, when it is time."""
        return self.check(now) if self._check_at is not None and now >= self._check_at else []

    def link_down(self) -> None:
        """Forget the connection."""
        self._check_at = None
        self._client_id = None
        self.is_clear = False
        self._watched = None

    def on_reply(self, event: Replied, now: float) -> list[AgentAction]:
        """Handle the reply to a command of the guard."""
        value = event.value
        if isinstance(value, ErrorReply):
            return self._refuse_to_kill(value) if event.tag[1] == "kill" else self._refuse(value)
        match event.tag[1]:
            case "id" if isinstance(value, int):
                self._client_id = value
            case "count" if not isinstance(value, list) or value[1:] != [1]:
                return [Send(LOCAL, (b"CLIENT", b"LIST", b"TYPE", b"pubsub"), (TAG, "list"))]
            case "count":
                self.is_clear, self._watched = True, None
            case "list":
                return self._compare(value, now)
            case "kill" if self._check_at is not None:
                return [HungAgentReplaced(self._hung), *self.check(now)]
            case _:
                pass
        return []

    def _refuse(self, error: ErrorReply) -> list[AgentAction]:
        self.is_clear = True
        if self._refused:
            return []
        self._refused = True
        reason = (
            f"the server does not let this agent see whether another one is at work ({error}): make sure yourself that"
            " there is one agent per server, or permit +client|setname, +client|id, +client|list and +pubsub|numsub"
        )
        return [GuardRefused(reason)]

    @staticmethod
    def _refuse_to_kill(error: ErrorReply) -> list[AgentAction]:
        reason = (
            f"another agent hangs, and this one may not take its place ({error}): permit +client|kill, or end the"
            " process of the other one"
        )
        return [AlreadyRunning(reason)]

    def _compare(self, listed: Any, now: float) -> list[AgentAction]:
        if self._client_id is None or not isinstance(listed, bytes):
            return []
        for agent in _agents(listed.decode(errors="replace")):
            if agent.id < self._client_id and agent.incarnation != self._incarnation:
                return self._meet(agent, now)
        self.is_clear = True
        self._watched = None
        return []

    def _meet(self, other: _Agent, now: float) -> list[AgentAction]:
        """Decide whether an earlier agent is at work or hangs, or look again."""
        if other.server != self._server or self.is_clear:
            return [AlreadyRunning(self._reason(other))]
        if self._watched is None or self._watched[0].id != other.id:
            self._watched = other, now
        hung_at = self._watched[1] + self._hung_s
        if now < hung_at:
            self._check_at = hung_at
            return []
        if self._why_blind() is not None:  # it could not see the reports of one at work
            return [AlreadyRunning(self._reason(other))]
        where = f"connection {other.id} from {other.address}"
        self._hung = f"it has sent no report for {self._hung_s:g} s ({where}): end its process"
        return [Send(LOCAL, (b"CLIENT", b"KILL", b"ID", other.id), (TAG, "kill"))]

    def on_pushes(self, messages: Sequence[Sequence[Any]]) -> list[AgentAction]:
        """End if an earlier agent is at work: messages to the balancer are its own."""
        if self._watched is None or not any(BALANCER_CHANNEL in message[1:3] for message in messages):
            return []
        return [AlreadyRunning(self._reason(self._watched[0]))]

    def _reason(self, other: _Agent) -> str:
        where = f"connection {other.id} from {other.address}, since {other.age_s} s"
        if other.server != self._server:
            return (
                f"the agent of server {other.server!r} is at work at the Redis server that this agent of"
                f" {self._server!r} was given ({where}): give each server of the cluster its own URL"
            )
        return (
            f"another agent of server {self._server!r} is at work already ({where}): one is enough, so this one ends;"
            " stop the other first if this one is to replace it"
        )


def _agents(listed: str) -> list[_Agent]:
    """Read the lines of CLIENT LIST that are agents'."""
    return [
        _Agent(int(id_), unquote(server), incarnation, address, age_s)
        for id_, address, server, incarnation, age_s in _AGENT_LINE.findall(listed)
    ]
