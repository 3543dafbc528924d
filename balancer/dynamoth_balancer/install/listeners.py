"""Asks each server how many processes listen as its agent, so that a dead agent shows before its reports are missed.

The questions also show that a server does not answer, before its connection is given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import AGENT_CHANNEL
from dynamoth_balancer.install.agents import Agents

TAG = "listeners"

ASK_INTERVAL_S = 0.5

UNANSWERED_S = 0.5
"""A server that has not answered for longer hangs, or is too busy to serve anybody."""


@dataclass(slots=True)
class _Question:
    """The latest question to a connected server."""

    asked_at: float
    answered: bool = False


class Listeners:
    """Keeps :class:`Agents` up to date with the number of listeners at each server."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._questions: dict[str, _Question] = {}
        #: The replies of servers that refuse the question.
        self.refused: dict[str, str] = {}

    def tick(self, servers: Iterable[str], now: float) -> list[Send]:
        """Ask the connected servers, when it is time."""
        sends: list[Send] = []
        for server in servers:
            question = self._questions.get(server)
            if question is None or (question.answered and now - question.asked_at >= ASK_INTERVAL_S):
                self._questions[server] = _Question(now)
                sends.append(Send(server, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), (TAG,)))
        return sends

    def on_reply(self, server: str, value: Any, now: float) -> None:
        """Record the answer of a server."""
        self._questions[server].answered = True
        if isinstance(value, ErrorReply):
            self.refused[server] = f"it does not say whether it has an agent: {value}"
            self._agents.listen(server, None, now)
        else:
            self.refused.pop(server, None)
            self._agents.listen(server, value[1], now)

    def link_down(self, server: str, now: float) -> None:
        """Forget the answers of a server."""
        self._questions.pop(server, None)
        self.refused.pop(server, None)
        self._agents.listen(server, None, now)

    def is_unanswered(self, server: str, now: float) -> bool:
        """Return whether the answer of a connected server is overdue."""
        question = self._questions.get(server)
        return question is not None and not question.answered and now - question.asked_at >= UNANSWERED_S
