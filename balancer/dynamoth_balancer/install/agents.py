"""What the balancer knows of the agents: which process each is, when it was heard, what it has acknowledged.

Theory of operation
-------------------
Every process that speaks for a server is a *voice*, told apart by its incarnation. A server has one agent, so there is
one voice, and another one after a restart. What a voice says counts only while it is the only one: when another one was
heard within ``alone_s``, either the agent has just been restarted, which passes, or two processes speak for one server.
That is a conflict: two agents, or somebody who forges reports. The balancer cannot know which one observes the server,
so it believes neither until one has fallen silent.

A voice that says that it cannot observe its server acknowledges nothing, whatever it says of versions.

A server knows how many connections listen as its agent. Where there is none, the agent is gone before it is missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

VOICES_MAX = 16
"""How many processes of one agent are remembered: the one that was heard least recently goes first."""

GONE_S = 1.5
"""An agent to which nobody listens any more is gone after this time without a word of it: longer than the interval of
its reports, which one that does not see its server sends over another connection."""

ALONE_RATIO = 0.5
"""A voice is the only one when no other was heard in this part of ``stale_s``: more than two reports of the other."""


@dataclass(slots=True)
class Voice:
    """One process that speaks for a server."""

    heard_at: float
    #: The newest version that this very process has acknowledged; -1 for none.
    acked: int = -1
    #: Why it cannot observe its server, as it says itself; empty if it can.
    problem: str = ""


@dataclass(slots=True)
class Agent:
    """The agent of one server."""

    #: By incarnation, the one heard last at the end.
    voices: dict[int, Voice] = field(default_factory=dict[int, Voice])
    #: When it was last asked which version it holds.
    asked_at: float = -math.inf
    #: When a voice was last heard again, though another one had spoken meanwhile.
    conflict_at: float = -math.inf
    #: How many connections listen as this agent; None while that is not known.
    listeners: int | None = None
    #: Since when there is none; infinite while there is one, or that is not known.
    deserted_at: float = math.inf


class Agents:
    """All agents. An acknowledgement is worth as much as the process that gave it: a restarted agent has none."""

    def __init__(self, servers: Iterable[str], stale_s: float, blind: Mapping[str, str] | None = None) -> None:
        self._stale_s = stale_s
        self._alone_s = stale_s * ALONE_RATIO
        self._agents = {server: Agent() for server in servers}
        #: Servers whose agents do not see what is published, and why; kept up to date by the owner.
        self.blind: Mapping[str, str] = {} if blind is None else blind

    def __getitem__(self, server: str) -> Agent:
        return self._agents[server]

    def hear(self, server: str, incarnation: int, now: float) -> bool:
        """Take note of a sign of life; tell whether the process was not known."""
        agent = self._agents[server]
        latest = self.incarnation(server)
        voice = agent.voices.pop(incarnation, None)
        is_new = voice is None
        if voice is None:
            voice = Voice(now)
            agent.asked_at = -math.inf
            if len(agent.voices) >= VOICES_MAX:
                del agent.voices[next(iter(agent.voices))]
        elif latest is not None and latest != incarnation and now - agent.voices[latest].heard_at < self._alone_s:
            agent.conflict_at = now
        voice.heard_at = now
        agent.voices[incarnation] = voice
        return is_new

    def incarnation(self, server: str) -> int | None:
        """Return the process that spoke last for a server; None before the first message."""
        return next(reversed(self._agents[server].voices), None)

    def speaks_alone(self, server: str, incarnation: int, now: float) -> bool:
        """Tell whether a process is the only one that speaks for its server."""
        voices = self._agents[server].voices
        return incarnation in voices and all(
            own == incarnation or now - voice.heard_at >= self._alone_s for own, voice in voices.items()
        )

    def _voice(self, server: str, now: float) -> Voice | None:
        """Return the only voice of a server; None when there is none, or more than one."""
        incarnation = self.incarnation(server)
        if incarnation is None or not self.speaks_alone(server, incarnation, now):
            return None
        return self._agents[server].voices[incarnation]

    def acked(self, server: str, now: float) -> int:
        """Return the newest version that the agent of a server acts on; -1 while that is not known."""
        voice = self._voice(server, now)
        return -1 if voice is None or voice.problem else voice.acked

    def acknowledge(self, server: str, incarnation: int, version: int) -> bool:
        """Take an acknowledgement of a process that was heard; tell whether it says anything new."""
        voice = self._agents[server].voices[incarnation]
        if version <= voice.acked:
            return False
        voice.acked = version
        return True

    def cannot_observe(self, server: str, incarnation: int, problem: str) -> None:
        """Note why a process cannot observe its server; empty: it can."""
        voice = self._agents[server].voices[incarnation]
        voice.problem = problem
        if problem:
            voice.acked = -1  # what it has acknowledged, it may have missed since

    def problem(self, server: str, incarnation: int) -> str:
        """Return why a process cannot observe its server; empty if it can."""
        return self._agents[server].voices[incarnation].problem

    def forget_acknowledgements(self) -> None:
        """Ask everybody again: versions before this may be those of another balancer."""
        for agent in self._agents.values():
            agent.asked_at = -math.inf
            for voice in agent.voices.values():
                voice.acked = -1

    def heard_at(self, server: str) -> float:
        """Return when an agent was heard last."""
        return max((voice.heard_at for voice in self._agents[server].voices.values()), default=-math.inf)

    def is_alive(self, server: str, now: float) -> bool:
        """Tell whether an agent was heard lately, and listens as far as is known."""
        return now - self.heard_at(server) < self._stale_s and not self.is_gone(server, now)

    def listen(self, server: str, listeners: int | None, now: float) -> None:
        """Note how many connections listen as the agent of a server; None: that is not known."""
        agent = self._agents[server]
        agent.listeners = listeners
        agent.deserted_at = min(agent.deserted_at, now) if listeners == 0 else math.inf

    def listeners(self, server: str) -> int | None:
        """Return how many connections listen as the agent of a server; None while that is not known."""
        return self._agents[server].listeners

    def deserted_at(self, server: str) -> float:
        """Return since when nobody listens as the agent of a server; infinite while somebody does."""
        return self._agents[server].deserted_at

    def is_gone(self, server: str, now: float) -> bool:
        """Tell whether nobody listens as the agent of a server, and the agent says nothing."""
        return now - max(self.deserted_at(server), self.heard_at(server)) >= GONE_S

    def is_in_conflict(self, server: str, now: float) -> bool:
        """Tell whether several processes speak for a server, and did so after each other's first word."""
        return now - self._agents[server].conflict_at < self._stale_s

    def why_not(self, server: str, now: float) -> str | None:
        """Say why nothing can be begun that needs the agent of a server; None when it can."""
        if not self.is_alive(server, now):
            return f"the agent of server {server} is not heard; start `dynamoth agent` for it"
        if self.is_in_conflict(server, now):
            return (
                f"several processes speak as the agent of server {server}, and none is believed: stop all but one;"
                " if there is one only, somebody forges its messages: see `dynamoth acl`"
            )
        if problem := self.unobserved(server, now):
            return f"the agent of server {server} does not observe it: {problem}"
        return None

    def unobserved(self, server: str, now: float) -> str:
        """Say why the agent of a server cannot observe it; empty when it can, or nothing is known."""
        voice = self._voice(server, now)
        return "" if voice is None else voice.problem
