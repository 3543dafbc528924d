"""What the balancer knows of the agents: which process each is, when it was heard, what it has acknowledged."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

SUPERSEDED_MAX = 16
"""How many earlier processes of an agent are remembered: late messages of theirs are to be told from a new one's."""


class Heard(enum.Enum):
    """Whose message that was."""

    SAME = "same"
    NEW = "new"
    STALE = "stale"


@dataclass(slots=True)
class Agent:
    """The agent of one server."""

    #: The process that speaks for the server; None before the first message.
    incarnation: int | None = None
    #: The newest version that this very process has acknowledged; -1 for none.
    acked: int = -1
    heard_at: float = -math.inf
    #: When it was last asked which version it holds.
    asked_at: float = -math.inf
    #: Earlier processes, the oldest first.
    superseded: deque[int] = field(default_factory=lambda: deque[int](maxlen=SUPERSEDED_MAX))


class Agents:
    """All agents.

    An acknowledgement is worth as much as the process that gave it: a restarted agent has an incarnation of its own and
    begins with none. A message of a process that was superseded is stale, unless the newer one has fallen silent.
    """

    def __init__(self, servers: Iterable[str], stale_s: float) -> None:
        self._stale_s = stale_s
        self._agents = {server: Agent() for server in servers}

    def __getitem__(self, server: str) -> Agent:
        return self._agents[server]

    def hear(self, server: str, incarnation: int, now: float) -> Heard:
        """Take note of a sign of life."""
        agent = self._agents[server]
        heard = Heard.SAME
        if incarnation != agent.incarnation:
            if incarnation in agent.superseded and self.is_alive(server, now):
                return Heard.STALE
            if agent.incarnation is not None:
                agent.superseded.append(agent.incarnation)
            agent.incarnation = incarnation
            agent.acked = -1
            agent.asked_at = -math.inf
            heard = Heard.NEW
        agent.heard_at = now
        return heard

    def acknowledge(self, server: str, version: int) -> bool:
        """Take an acknowledgement of the present process; tell whether it says anything new."""
        agent = self._agents[server]
        if version <= agent.acked:
            return False
        agent.acked = version
        return True

    def forget_acknowledgements(self) -> None:
        """Ask everybody anew: versions before this may be those of another balancer."""
        for agent in self._agents.values():
            agent.acked = -1
            agent.asked_at = -math.inf

    def is_alive(self, server: str, now: float) -> bool:
        """Tell whether an agent was heard lately."""
        return now - self._agents[server].heard_at < self._stale_s
