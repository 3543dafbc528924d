"""How far a balancer is on its way to lead, and what it leads with."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from dynamoth.errors import RequestRefused
from dynamoth.plan.plan import Plan
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.install.resumption import Resumption
from dynamoth_balancer.install.takeover import Takeover


class Stage(enum.Enum):
    """The stage of a balancer; ``dynamoth_balancer.machine`` explains each."""

    CONTENDING = "contending"
    RECOVERING = "recovering"
    LEADING = "leading"
    SUSPENDED = "suspended"
    STOPPED = "stopped"


@dataclass(slots=True)
class Leadership:
    """The stage, the term, and what reads or installs plans in it."""

    stage: Stage = Stage.CONTENDING
    #: When it began to lead in the present or latest term; minus infinity before the first.
    since: float = -math.inf
    #: How often this process got the lease; 0 before the first time.
    term: int = 0
    #: Not None exactly while RECOVERING, or SUSPENDED while it was.
    takeover: Takeover | None = None
    #: Not None while SUSPENDED, with the lease, until it is known whether another balancer has led.
    resumption: Resumption | None = None
    #: How often it was suspended.
    suspensions: int = 0
    #: That of the present or latest term; None before the first.
    installer: Installer | None = None

    @property
    def at_work(self) -> Installer | None:
        """The installer while the balancer leads; None otherwise."""
        return self.installer if self.stage is Stage.LEADING else None

    @property
    def in_term(self) -> Installer | None:
        """The installer while its term goes on, also suspended: what agents say counts; None otherwise."""
        is_suspended = self.stage is Stage.SUSPENDED and self.takeover is None
        return self.installer if is_suspended or self.stage is Stage.LEADING else None

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

    @property
    def waits(self) -> bool:
        """Whether the balancer has to get the lease, for the first time or again."""
        return self.stage in (Stage.CONTENDING, Stage.SUSPENDED)

    @property
    def recovering(self) -> Takeover | None:
        """The takeover while it goes on; None otherwise."""
        return self.takeover if self.stage is Stage.RECOVERING else None

    def end(self, stage: Stage) -> None:
        """End the term, or the attempt to begin one."""
        self.stage, self.takeover, self.resumption = stage, None, None

    def suspend(self) -> None:
        """Change nothing without the lease, and keep everything."""
        self.stage, self.resumption = Stage.SUSPENDED, None
        self.suspensions += 1

    def look(self) -> Resumption:
        """Begin to look whether another balancer has led since the lease was lost."""
        term = self.latest_installer().book.term if self.takeover is None else self.takeover.fence_term
        self.resumption = Resumption(self.suspensions, term)
        return self.resumption

    def resume(self) -> None:
        """Go on where the balancer was suspended."""
        self.stage = Stage.LEADING if self.takeover is None else Stage.RECOVERING
        self.resumption = None

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        may_read = self.stage in (Stage.RECOVERING, Stage.SUSPENDED)
        assert may_read or self.takeover is None, f"{self.stage} with {self.takeover}"
        assert self.takeover is not None or self.stage is not Stage.RECOVERING, "it reads nothing"
        assert self.resumption is None or self.stage is Stage.SUSPENDED, f"{self.stage}: nothing is to be found out"
        assert self.installer is not None or self.stage is not Stage.LEADING, "a leader installs plans"
        if self.installer is not None:
            self.installer.check()
