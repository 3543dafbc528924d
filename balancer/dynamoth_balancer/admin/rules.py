"""Carries out requests for other compatibility rules, and answers when the rules are in force everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth.protocol.control import AdminReply, AdminRequest
from dynamoth_balancer.admin.compatibility import describe_rules, new_rules
from dynamoth_balancer.events import InnerAction
from dynamoth_balancer.install.installer import Installer

COMMAND = "compatibility"

PATIENCE_S = 5.0
"""A request is answered after this time even if some agent has not acknowledged the rules."""


@dataclass(slots=True)
class _Asked:
    """An unanswered request: the server where it came in last, and when it came in first."""

    server: str
    since: float


class RuleRequests:
    """Changes the rules through the installer of a balancer.

    Args:
        installer: returns that of the present or latest term. Requests come only while the balancer leads; their
            answers may be due when it has lost the lease.

    """

    def __init__(self, installer: Callable[[], Installer]) -> None:
        self._installer = installer
        self._asked: dict[int, _Asked] = {}

    def repeated(self, server: str, request: int) -> bool:
        """Record where a request was repeated; return whether it is known and unanswered."""
        asked = self._asked.get(request)
        if asked is not None:
            asked.server = server
        return asked is not None

    def begin(self, server: str, request: AdminRequest, now: float) -> list[InnerAction]:
        """Carry out a request; return the actions to execute. Raises RequestRefused."""
        installer = self._installer()
        rules = new_rules(installer.plan, request.arguments)
        actions: list[InnerAction] = []
        if rules is not None:
            actions += installer.change_rules(rules, "an administrator has changed the compatibility rules", now)
        self._asked[request.request] = _Asked(server, now)
        return actions

    def answers(self, now: float) -> list[tuple[str, AdminReply]]:
        """Return the answers that are due, and the servers to send them to."""
        if not self._asked:
            return []
        installer = self._installer()
        waits = installer.rules_wait_for(now)
        due = {number: asked for number, asked in self._asked.items() if not waits or now - asked.since >= PATIENCE_S}
        for number in due:
            del self._asked[number]
        text = f"the rules are stored, but not in force everywhere yet: they wait for {', '.join(waits)}"
        plan = installer.plan
        result: Mapping[str, Any] = {"version": plan.version, "rules": describe_rules(plan.compatibility)}
        return [(asked.server, AdminReply(number, result, text if waits else None)) for number, asked in due.items()]
