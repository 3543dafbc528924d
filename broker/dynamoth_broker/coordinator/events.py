"""The vocabulary of the coordinator's controller: its events and actions, and what it records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dynamoth.edge.control import BrokerReport, Candidates
from dynamoth_broker.coordinator.model import Summary
from dynamoth_broker.coordinator.plan import Move, Plan


class Kind(Enum):
    """What a decision does."""

    RELIEVE = "relieve"
    SHUFFLE = "shuffle"


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision, as data. A later record with the same number replaces an earlier one."""

    number: int
    at: float
    kind: Kind
    #: Why it was due, with figures, in words.
    reason: str
    #: The moves, and the loads before and as predicted.
    plan: Plan
    is_dry_run: bool
    #: Users who have moved, and who have not: they refused, had left, or took too long.
    moved: int = 0
    failed: int = 0
    #: The loads at the first look after the plan has settled; None before, and in a dry run.
    measured: Summary | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the controller does now, and why, as data."""

    stage: str
    #: The loads that decisions go by.
    loads: Summary
    #: Load ratio and standing by broker.
    brokers: dict[str, tuple[float, str]]
    #: The next actions, in words with figures; empty: none.
    due: str
    #: At how many looks one after the other it was due.
    looks: int
    #: Why nothing is decided at the next look although it may be due, in words.
    obstacles: tuple[str, ...]
    suspects: tuple[str, ...]
    pinned: tuple[str, ...]
    in_flight: int
    latest: Decision | None


# Events.


@dataclass(slots=True)
class Reported:
    """Event: a broker has reported."""

    report: BrokerReport


@dataclass(slots=True)
class Answered:
    """Event: a broker has answered ``AskCandidates`` with this number."""

    request: int
    candidates: Candidates


@dataclass(slots=True)
class MoveEnded:
    """Event: a user of ``MoveUsers`` is at its new broker, or is not and will not be moved."""

    user: str
    moved: bool


@dataclass(slots=True)
class BrokerGone:
    """Event: a broker has left the cluster, or is dead."""

    broker: str


@dataclass(slots=True)
class Tick:
    """Event: ``deadline`` has passed."""


ControllerEvent = Reported | Answered | MoveEnded | BrokerGone | Tick


# Actions.


@dataclass(slots=True)
class AskCandidates:
    """Action: ask a broker for users who may move. ``Answered`` with this number follows, or nothing.

    ``load``: what has to leave, in bytes/s (infinite: as much as can). Users who came within ``rest_s`` are left out.
    """

    request: int
    broker: str
    load: float
    users_max: int
    rest_s: float


@dataclass(slots=True)
class MoveUsers:
    """Action: have brokers move these users. ``MoveEnded`` follows for each, or nothing."""

    decision: int
    moves: tuple[Move, ...]


@dataclass(slots=True)
class DecisionRecorded:
    """Action: record a decision: when it is made, when its moves have ended, and when they have been measured."""

    decision: Decision


@dataclass(slots=True)
class Refused:
    """Action: say that an event was refused, and why."""

    reason: str


ControllerAction = AskCandidates | MoveUsers | DecisionRecorded | Refused
