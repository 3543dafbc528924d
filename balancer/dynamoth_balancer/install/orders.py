"""Orders of administrators that the plan keeps: what the balancer and later ones go by.

An order is in force at once. It is *done* when more than half of the servers store it: every later balancer reads one
of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth.protocol.control import AdminReply
from dynamoth_balancer.install.installer import Installer

STORE_TIMEOUT_S = 5.0
"""An order is answered after this time even if too few servers store it."""


@dataclass(slots=True)
class Order:
    """An order, and how far it is."""

    #: The answer when it is done, without the version.
    result: Mapping[str, Any]
    #: The term of the installer that began it: a later balancer may have left it out.
    term: int
    since: float
    #: The version of the plan that has it; None while it is not in the plan.
    version: int | None = None
    #: Why it was given up; empty where it was not. Then nothing has changed.
    problem: str = ""
    #: What it waits for besides, in words; empty for nothing.
    waits: str = ""

    def is_stored(self, installer: Installer) -> bool:
        """Return whether every later balancer finds it."""
        return self.version is not None and installer.term == self.term and installer.is_stored(self.version)

    def is_over(self, installer: Installer) -> bool:
        """Return whether nothing more comes of it: it is stored, or was given up, perhaps with its term."""
        return bool(self.problem) or installer.term != self.term or self.is_stored(installer)

    def reply(self, installer: Installer, number: int, now: float) -> AdminReply | None:
        """Return the reply to a request with this number; None while it is not due."""
        if self.problem:
            return AdminReply(number, {}, self.problem)
        if installer.term != self.term:
            text = "the balancer has lost its lease in between, and may have left this out: ask again"
            return AdminReply(number, {}, text)
        if self.version is None:
            return None
        if self.is_stored(installer):
            return None if self.waits else AdminReply(number, {**self.result, "version": self.version})
        if now - self.since < STORE_TIMEOUT_S:
            return None
        stored, servers = installer.stored_at(self.version), len(installer.plan.servers)
        return AdminReply(
            number,
            {},
            f"it is in force, but only {stored} of {servers} servers store it, and a restart may lose it:"
            " 'dynamoth status' says which servers are down",
        )
