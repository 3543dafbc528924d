"""How far a balancer is on its way to lead, and what it leads with."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import Plan
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.takeover import Takeover


class Stage(enum.Enum):
    """The stage of a balancer; ``dynamoth_balancer.machine`` explains each."""

    CONTENDING = "contending"
    RECOVERING = "recovering"
    LEADING = "leading"
    STOPPED = "stopped"


@dataclass(slots=True)
class Leadership:
    """The stage, the term, and what reads or installs plans in it."""

    stage: Stage = Stage.CONTENDING
    #: When it began to lead in the present or latest term; minus infinity before the first.
    since: float = -math.inf
    #: How often this process got the lease; 0 before the first time.
    term: int = 0
    #: Not None exactly while RECOVERING.
    takeover: Takeover | None = None
    #: That of the present or latest term; None before the first.
    installer: Installer | None = None

    @property
    def at_work(self) -> Installer | None:
        """The installer while the balancer leads; None otherwise."""
        return self.installer if self.stage is Stage.LEADING else None

    @property
    def plan(self) -> Plan | None:
        """The plan of the present or latest term; None before the first."""
        return None if self.installer is None else self.installer.plan

    @property
    def draining(self) -> frozenset[str]:
        """The servers that are being drained, by that plan."""
        return frozenset() if self.installer is None else self.installer.draining

    def latest_installer(self) -> Installer:
        """Return the installer of the present or latest term; there has been one."""
        assert self.installer is not None, "a balancer that has never led takes no request that needs it"
        return self.installer

    def leading_installer(self) -> Installer:
        """Return the installer of the present term. Raises RequestRefused where the balancer does not lead."""
        if self.at_work is None:
            raise RequestRefused("this balancer does not lead now: ask again")
        return self.at_work

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert (self.takeover is not None) == (self.stage is Stage.RECOVERING), f"{self.stage} with {self.takeover}"
        assert self.installer is not None or self.stage is not Stage.LEADING, "a leader installs plans"
        if self.installer is not None:
            self.installer.check()
