"""The events and actions of a balancer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamoth.errors import DynamothError
from dynamoth.machine.events import Connect, Disconnect, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.plan.plan import Plan
from dynamoth_balancer.decide.cluster import Decision
from dynamoth_balancer.provision.fleet import FreeServer, StartServer


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Event: end in an orderly way. ``Stopped`` follows within a round trip, or after ``SHUTDOWN_S_MAX``."""


@dataclass(frozen=True, slots=True)
class ListServers:
    """Action: ask the provisioner which servers it runs; ``ProvisionerAnswered`` has their ids."""


ProvisionerRequest = StartServer | FreeServer | ListServers
"""What a balancer asks its provisioner for. Each request has one answer, or none."""


@dataclass(frozen=True, slots=True)
class ProvisionerAnswered:
    """Event: the provisioner has answered a request."""

    request: ProvisionerRequest
    #: Why it failed; empty where it did not.
    problem: str = ""
    #: Of the server that was started.
    url: str = ""
    #: Of the servers that run.
    ids: tuple[str, ...] = ()


BalancerEvent = Start | LinkUp | LinkDown | Replied | Pushed | Tick | ProvisionerAnswered | Shutdown


@dataclass(frozen=True, slots=True)
class Note:
    """An entry for the log. ``level`` is a name of the module ``logging`` in small letters."""

    level: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """The plan has a new version; it is being sent to the servers."""

    plan: Plan
    reason: str
    #: Those whose entries are new in it. At the beginning of a term, those in transition.
    channels: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """The balancer has made a decision of its own, if only that nothing can be done."""

    decision: Decision
    #: Counts the decisions of this process, from 1.
    number: int
    #: Why its moves cannot be carried out; empty when they are.
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The balancer has ended: because of ``error``, or after :class:`Shutdown` if that is None."""

    error: DynamothError | None = None


BalancerNews = Note | PlanChanged | Decided | Stopped
"""The reports of a balancer to its process. A driver may ignore all but ``Stopped``."""

BalancerAction = Connect | Disconnect | Send | BalancerNews | ProvisionerRequest


@dataclass(slots=True)
class TransitionsSettled:
    """From the installer to the rest of the balancer: these channels are where the plan has them."""

    channels: tuple[bytes, ...]


InnerAction = BalancerAction | TransitionsSettled
"""The actions of the parts of a balancer; the machine handles ``TransitionsSettled`` itself."""
