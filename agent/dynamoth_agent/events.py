"""The events and actions of an agent."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.machine.events import LinkEvent
from dynamoth_dispatcher.events import DispatcherAction
from dynamoth_lla.round import ObservationLate


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """A link is up (``reason`` None), or down for another reason than the last time."""

    link: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class ObservationRefused:
    """The server does not let this agent observe it, so it does nothing. Once per reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlanFollowed:
    """The dispatcher acts on this version of the plan now."""

    version: int


@dataclass(frozen=True, slots=True)
class NotListed:
    """The plan does not list the server. ``reason`` says what to do."""

    reason: str


@dataclass(frozen=True, slots=True)
class AlreadyRunning:
    """Another agent is at work at this server: end this process. ``reason`` says what to do."""

    reason: str


@dataclass(frozen=True, slots=True)
class HungAgentReplaced:
    """This agent has taken the place of one that hangs. ``reason`` says what to do."""

    reason: str


@dataclass(frozen=True, slots=True)
class GuardRefused:
    """The server does not show whether another agent is at work. ``reason`` says what to do. Once per process."""

    reason: str


@dataclass(frozen=True, slots=True)
class BlindnessChanged:
    """The agent has become blind, or sees again."""

    blind: bool
    blind_s: float
    interruptions: int


@dataclass(frozen=True, slots=True)
class ServerAdvice:
    """Harmful settings of the server, each with the value to set. Once per process.

    ``refused``: why the server does not show its settings; None when it does.
    """

    advice: tuple[str, ...]
    refused: str | None


AgentEvent = LinkEvent

AgentNews = (
    LinkChanged
    | NotListed
    | ObservationRefused
    | PlanFollowed
    | AlreadyRunning
    | GuardRefused
    | HungAgentReplaced
    | BlindnessChanged
    | ServerAdvice
    | ObservationLate
)
"""The reports of an agent to its process, for the log. A driver may ignore all but ``AlreadyRunning``."""

AgentAction = DispatcherAction | AgentNews
