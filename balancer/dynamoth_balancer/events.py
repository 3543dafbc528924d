"""What the balancer tells its surroundings, besides the commands that it sends; and what it is told by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamoth.errors import DynamothError
from dynamoth.plan.plan import Plan
from dynamoth.protocol.reports import Report
from dynamoth_balancer.decide.cluster import Decision


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Event: end in an orderly way. Answered by ``Stopped`` within a round trip, or with ``ShutdownExpired``."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that belongs in the log. ``level`` is a name of the module ``logging`` in small letters."""

    level: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The plan has a new version; it is being sent to the servers."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The balancer has made a decision of its own; it may be that nothing can be done."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """A report of an agent has gone into the model."""

    report: Report


@dataclass(frozen=True, slots=True)
class Stopped:
    """The balancer has ended, for good: because of ``error``, or as it was told to when that is None."""

    error: DynamothError | None = None
