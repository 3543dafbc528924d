"""What the balancer hears from agents: reports, acknowledgements, and which old locations are vacated.

Nothing that a process says counts for more than the process: see :mod:`dynamoth_balancer.install.agents`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.protocol.control import REPORT_CODE, PlanAck, Vacated, unpack_control
from dynamoth.protocol.reports import Report, unpack_report
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.events import Note, ReportReceived
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer

_REPORT_FIRST_BYTES = frozenset(bytes((0x90 | length, REPORT_CODE)) for length in range(16))
"""How a packed report begins: a msgpack array of up to 15 elements, the first of which is the code."""


class Hearing:
    """Takes the messages of agents."""

    def __init__(self, agents: Agents, model: ClusterModel, counters: Counter[str]) -> None:
        """Share these with the balancer."""
        self._agents = agents
        self._model = model
        self._counters = counters

    def heard(self, server: str, data: bytes, installer: Installer | None, now: float) -> list[Any]:
        """Take a message on the agents' channel at a server. ``installer`` is None while the balancer does not lead."""
        try:
            message = unpack_report(data) if data[:2] in _REPORT_FIRST_BYTES else unpack_control(data)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return []
        if not isinstance(message, Report | PlanAck | Vacated):
            self._counters["unexpected"] += 1
            return []
        if message.server == server:
            return self._agent_says(message, installer, now)
        self._counters["wrong_server"] += 1
        text = (
            "an agent speaks at a server that is not its own: correct its configuration, or stop Redis replication"
            " (REPLICAOF) between these servers"
        )
        return [Note("error", text, {"server": server, "agent_of": message.server})]

    def _agent_says(self, message: Report | PlanAck | Vacated, installer: Installer | None, now: float) -> list[Any]:
        server, incarnation = message.server, message.incarnation
        actions: list[Any] = []
        before = self._agents.incarnation(server)
        if self._agents.hear(server, incarnation, now) and before is not None:
            self._model.agent_restarted(server)
            actions.append(Note("info", "an agent has restarted", {"server": server}))
        alone = self._agents.speaks_alone(server, incarnation, now)
        self._counters["contested_messages"] += not alone
        if isinstance(message, Report):
            problem = message.why_unobserved
            self._agents.cannot_observe(server, incarnation, problem)
            if alone and not problem and self._model.report(message, now):
                actions.append(ReportReceived(message))
        if installer is None:
            return actions
        if isinstance(message, Vacated):
            if alone:
                installer.vacated(server, message)
            return actions
        version = _acted_upon(message)
        if version is not None and not self._agents.problem(server, incarnation):
            installer.acknowledged(server, incarnation, version, now)
        return actions


def _acted_upon(message: Report | PlanAck) -> int | None:
    """Return the version of the plan that an agent acts on, as far as its message proves it.

    The report of an agent that sees nothing of what is published at the time proves nothing.
    """
    if isinstance(message, PlanAck):
        return message.version
    return message.plan_version if message.observing else None
