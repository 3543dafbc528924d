"""Records which processes speak for each server, when each was heard, and which version it has acknowledged.

Theory of operation
-------------------
Every process that speaks for a server is a *voice*, identified by its incarnation. A server has one agent, so there is
one voice, and another one after a restart. The messages of a voice count only while it is the only one. If another one
was heard within ``alone_s``, either the agent has just been restarted, which passes, or two processes speak for one
server: two agents, or somebody who forges reports. The balancer cannot know which of them observes the server, so it
believes neither until one has fallen silent.

A voice that cannot observe its server, by its own words, acknowledges nothing, whatever versions it names.

A server knows how many connections listen as its agent. If there are none, the agent is gone, which shows before its
reports are overdue.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dynamoth_balancer.events import Note

VOICES_MAX = 16
"""Remembered processes of one agent: the least recently heard one is dropped first."""

GONE_S = 1.5
"""An agent without listeners is gone after this time of silence: longer than the interval of its reports, which a blind
agent sends over another connection."""

ALONE_RATIO = 0.5
"""A voice is the only one when no other was heard for this part of ``stale_s``: more than two reports of the other."""


@dataclass(slots=True)
class Voice:
    """One process that speaks for a server."""

    heard_at: float
    #: The newest version that this process has acknowledged; -1 for none.
    acked: int = -1
    #: Why it cannot observe its server, in its own words; empty if it can.
    problem: str = ""


@dataclass(slots=True)
class Agent:
    """The agent of one server."""

    #: By incarnation, the one heard last at the end.
    voices: dict[int, Voice] = field(default_factory=dict[int, Voice])
    #: When it was last asked for its version.
    asked_at: float = -math.inf
    #: When a voice was last heard again after another one had spoken.
    conflict_at: float = -math.inf
    #: How many connections listen as this agent; None while unknown.
    listeners: int | None = None
    #: Since when there are none; infinite while there are some, or while that is unknown.
    deserted_at: float = math.inf


class Agents:
    """All agents. An acknowledgement counts for the process that gave it: after a restart it is void."""

    def __init__(self, servers: Iterable[str], stale_s: float, blind: Mapping[str, str] | None = None) -> None:
        self._stale_s = stale_s
        self._alone_s = stale_s * ALONE_RATIO
        self._agents = {server: Agent() for server in servers}
        #: Servers whose agents do not see what is published, and why; kept up to date by the owner.
        self.blind: Mapping[str, str] = {} if blind is None else blind
        #: The servers whose agents are alive, according to the log.
        self._noted: set[str] = set()

    def __getitem__(self, server: str) -> Agent:
        return self._agents[server]

    def add(self, server: str) -> None:
        """Begin with a new server."""
        self._agents[server] = Agent()

    def remove(self, server: str) -> None:
        """Forget the agent of a server that has left the plan."""
        del self._agents[server]
        self._noted.discard(server)

    def hear(self, server: str, incarnation: int, now: float) -> bool:
        """Record a sign of life; return whether the process is new."""
        agent = self._agents[server]
        latest = self.incarnation(server)
        voice = agent.voices.pop(incarnation, None)
        is_new = voice is None
        if voice is None:
            voice = Voice(now)
            agent.asked_at = -math.inf
            if len(agent.voices) >= VOICES_MAX:
                dropped = agent.voices.pop(next(iter(agent.voices)))
                if now - dropped.heard_at < self._alone_s:  # no agent is restarted that often
                    agent.conflict_at = now
        elif latest is not None and latest != incarnation and now - agent.voices[latest].heard_at < self._alone_s:
            agent.conflict_at = now
        voice.heard_at = now
        agent.voices[incarnation] = voice
        return is_new

    def incarnation(self, server: str) -> int | None:
        """Return the process that spoke last for a server; None before the first message."""
        return next(reversed(self._agents[server].voices), None)

    def note_changes(self, connected: Collection[str], now: float) -> list[Note]:
        """Return log entries about agents that have come and gone. One that has gone with its server is noted later.

        ``connected`` are the servers that can be reached: nothing is heard of the agents of others.
        """
        alive = {server for server in self._agents if self.is_alive(server, now)}
        changed = {server for server in alive ^ self._noted if server in alive or server in connected}
        self._noted ^= changed
        heard, gone = ("info", "an agent is heard"), ("warning", "an agent is not heard any more: see whether it runs")
        return [Note(*(heard if id_ in alive else gone), {"server": id_}) for id_ in self._agents if id_ in changed]

    def speaks_alone(self, server: str, incarnation: int, now: float) -> bool:
        """Return whether a process is the only one that speaks for its server."""
        voices = self._agents[server].voices
        return incarnation in voices and all(
            own == incarnation or now - voice.heard_at >= self._alone_s for own, voice in voices.items()
        )

    def _voice(self, server: str, now: float) -> Voice | None:
        """Return the only voice of a server; None when there are none or several."""
        incarnation = self.incarnation(server)
        if incarnation is None or not self.speaks_alone(server, incarnation, now):
            return None
        return self._agents[server].voices[incarnation]

    def acked(self, server: str, now: float) -> int:
        """Return the newest version that the agent of a server acts on; -1 while unknown."""
        voice = self._voice(server, now)
        return -1 if voice is None or voice.problem else voice.acked

    def acknowledge(self, server: str, incarnation: int, version: int) -> bool:
        """Record an acknowledgement of a process that was heard; return whether it is news."""
        voice = self._agents[server].voices[incarnation]
        if version <= voice.acked:
            return False
        voice.acked = version
        return True

    def cannot_observe(self, server: str, incarnation: int, problem: str) -> None:
        """Record why a process cannot observe its server; empty: it can."""
        voice = self._agents[server].voices[incarnation]
        voice.problem = problem
        if problem:
            voice.acked = -1  # it may have missed messages since it acknowledged

    def forget_acknowledgements(self) -> None:
        """Forget all acknowledgements: earlier versions may be those of another balancer."""
        for agent in self._agents.values():
            agent.asked_at = -math.inf
            for voice in agent.voices.values():
                voice.acked = -1

    def heard_at(self, server: str) -> float:
        """Return when an agent was last heard."""
        return max((voice.heard_at for voice in self._agents[server].voices.values()), default=-math.inf)

    def is_alive(self, server: str, now: float) -> bool:
        """Return whether an agent was heard lately and, as far as known, listens."""
        return now - self.heard_at(server) < self._stale_s and not self.is_gone(server, now)

    def listen(self, server: str, listeners: int | None, now: float) -> None:
        """Record how many connections listen as the agent of a server; None: unknown."""
        agent = self._agents[server]
        agent.listeners = listeners
        agent.deserted_at = min(agent.deserted_at, now) if listeners == 0 else math.inf

    def is_gone(self, server: str, now: float) -> bool:
        """Return whether nobody listens as the agent of a server, and the agent is silent."""
        return now - max(self._agents[server].deserted_at, self.heard_at(server)) >= GONE_S

    def is_in_conflict(self, server: str, now: float) -> bool:
        """Return whether several processes speak for a server in turns."""
        return now - self._agents[server].conflict_at < self._stale_s

    def why_not(self, server: str, now: float) -> str | None:
        """Return why no change can begin that needs the agent of a server; None when it can."""
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

    def has_failed(self, server: str, now: float) -> bool:
        """Return whether the agent of a server is silent, or does not observe it."""
        return not self.is_alive(server, now) or bool(self.unobserved(server, now))

    def unobserved(self, server: str, now: float) -> str:
        """Return why the agent of a server cannot observe it; empty when it can, or while unknown."""
        voice = self._voice(server, now)
        return "" if voice is None else voice.problem
