"""Handles the messages of agents: reports, acknowledgements, and vacated old locations.

A message counts no more than the process that sent it: see :mod:`dynamoth_balancer.install.agents`.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from dynamoth.errors import MalformedMessage
from dynamoth.protocol.control import REPORT_CODE, PlanAck, Vacated, unpack_control
from dynamoth.protocol.reports import Report, unpack_report
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.events import InnerAction, Note
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.installer import Installer

_REPORT_FIRST_BYTES = frozenset(bytes((0x90 | length, REPORT_CODE)) for length in range(16))
"""The first bytes of a packed report: a msgpack array of up to 15 elements, the first of which is the code."""

REPORTS_MAX = 1000
"""Bound of the reports that are remembered: those of the default ``averaging_s`` at 100 servers."""


SHOWN_CHARACTERS_MAX = 64
"""Bound of an id of a server that somebody says in a message, in the log: the longest that a configuration allows."""

RESTARTED = "an agent has restarted"


class HeardReport(NamedTuple):
    """A report that counts, and when it was heard."""

    server: str
    incarnation: int
    sequence: int
    at: float


class Hearing:
    """Passes the messages of agents on to the model and the installer."""

    def __init__(self, agents: Agents, model: ClusterModel, counters: Counter[str]) -> None:
        """Use the agents, the model and the counters of the balancer."""
        self._agents = agents
        self._model = model
        self._counters = counters
        #: The latest reports, oldest first; recorders get them with the next decision, which takes them out.
        self.reports: deque[HeardReport] = deque(maxlen=REPORTS_MAX)

    def on_message(self, server: str, data: bytes, installer: Installer | None, now: float) -> list[InnerAction]:
        """Handle a message on the agents' channel. ``installer`` is None without a term."""
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
        return [Note("error", text, {"server": server, "agent_of": message.server[:SHOWN_CHARACTERS_MAX]})]

    def _agent_says(
        self, message: Report | PlanAck | Vacated, installer: Installer | None, now: float
    ) -> list[InnerAction]:
        server, incarnation = message.server, message.incarnation
        actions: list[InnerAction] = []
        before = self._agents.incarnation(server)
        if self._agents.hear(server, incarnation, now) and before is not None:
            self._model.on_agent_restart(server)
            actions.append(Note("info", RESTARTED, {"server": server}))
        alone = self._agents.speaks_alone(server, incarnation, now)
        self._counters["contested_messages"] += not alone
        if isinstance(message, Report):
            problem = message.why_unobserved
            self._agents.cannot_observe(server, incarnation, problem)
            if alone and not problem and self._model.report(message, now):
                self.reports.append(HeardReport(server, incarnation, message.sequence, now))
        if installer is None:
            return actions
        if isinstance(message, Vacated):
            if alone:
                installer.on_vacated(server, message)
            return actions
        version = message.plan_version if isinstance(message, Report) else message.version
        if isinstance(message, Report) and not message.observing:
            return actions  # an agent that is blind at the time proves nothing
        if version is not None and not self._agents[server].voices[incarnation].problem:
            installer.on_acknowledgement(server, incarnation, version, now)
        return actions
