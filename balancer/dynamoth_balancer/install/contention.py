"""Watches a balancer that waits for the lease, and ends it where another one is at work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynamoth.errors import AlreadyRunning
from dynamoth_balancer.events import Note
from dynamoth_balancer.install.lease import Lease

NOTED_AFTER_S = 0.5
"""A start that takes no longer than this is not worth a line in the log."""


class Contention:
    """Watches how a balancer waits for its lease.

    Args:
        lease: the lease.
        servers: how many there are.
        down: the servers that cannot be reached, and why; kept up to date by the owner.
        patience_s: longer than an unrenewed lease lasts: a balancer that has held it for longer is alive.
        standby: whether to go on waiting while another balancer is at work.

    """

    def __init__(
        self, lease: Lease, servers: int, down: Mapping[str, str], patience_s: float, *, standby: bool
    ) -> None:
        self._lease = lease
        self._servers = servers
        self._down = down
        self._patience_s = patience_s
        self._standby = standby
        self._since = math.inf
        #: The latest reasons in the log why the lease is not held.
        self._noted: dict[str, Any] = {}

    def begin(self, now: float) -> None:
        """Begin to wait for the lease."""
        self._since = now
        self._noted = {}

    @property
    def stands_by(self) -> bool:
        """Whether this balancer has nothing to do: another one holds the lease, and this one may wait for it."""
        return self._standby and bool(self._lease.others())

    def look(self, now: float) -> list[Note]:
        """Return what the log should say, if that is new. Raises AlreadyRunning where another balancer is at work."""
        others = self._lease.renewed_by_others(self._since, self._patience_s)
        if others and not self._standby:
            incarnations = ", ".join(sorted(set(others.values())))
            raise AlreadyRunning(
                f"another balancer (incarnation {incarnations}) is at work: it holds the lease at {', '.join(others)}"
                " and renews it; stop that one first, or start this one with --standby: CLIENT LIST at one of these"
                " servers shows its address (name=dynamoth-balancer)"
            )
        details = self.details()
        reason = self.reason()
        if now - self._since < NOTED_AFTER_S or not reason or details == self._noted:
            return []
        self._noted = details
        level = "info" if self.stands_by else "warning"
        return [Note(level, "waiting for the lease", {**details, "reason": reason})]

    def reason(self) -> str:
        """Return in words what keeps the lease from us; empty where nothing does, so that the next attempt gets it."""
        reasons: list[str] = []
        if others := self._lease.others():
            text = "another balancer holds it at {}; if that one was killed, the lease expires by itself"
            reasons.append(text.format(", ".join(others)))
        if rivals := self._lease.waits_for_rivals():
            text = "another balancer is connected to {} and may believe that it leads; this one waits until it cannot"
            reasons.append(text.format(", ".join(rivals)))
        reasons += [f"{server} refuses it: {reply}" for server, reply in self._lease.problems().items()]
        if self._down:
            reasons.append(f"{', '.join(self._down)} cannot be reached")
        return "; ".join(reasons)

    def details(self) -> dict[str, Any]:
        """Return who holds the lease, and what keeps it from us."""
        return {
            "needed": f"{self._lease.majority} of {self._servers} servers",
            "held_by_others": self._lease.others(),
            "refused": self._lease.problems(),
            "unreachable": dict(self._down),
        }
