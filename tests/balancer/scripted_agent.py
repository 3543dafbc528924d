"""An agent that does what a test says: it acknowledges plans and reports loads, or loses messages, or is silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from dynamoth.errors import PlanError
from dynamoth.machine.events import Connect, Disconnect, LinkDown, LinkUp, Pushed, Send, Start, Tick
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan.plan import Entry, Phase, Plan
from dynamoth.protocol.control import PlanAck, PlanChange, PlanQuery, Vacated, pack_control, unpack_control
from dynamoth.protocol.reports import Report, pack_report
from tests.balancer.traffic import Row, report

REPORT_INTERVAL_S = 0.5
LOCAL, SECOND = "local", "second"
"""Names of its links."""

_incarnations = count(1000)


@dataclass(frozen=True)
class Listen:
    """Event: change which connections listen as the agent."""

    actions: list[Any]


class ScriptedAgent:
    """The machine of the agent of one server.

    Args:
        server: its id.
        url: of the server.
        stored: returns the plan that the server stores.
        rows: returns what the agent counts of the traffic of the cluster.

    """

    def __init__(
        self, server: str, url: str, stored: Callable[[], Plan | None], rows: Callable[[str], Mapping[bytes, Row]]
    ) -> None:
        self.server, self._url, self._stored, self._rows = server, url, stored, rows
        self.incarnation = next(_incarnations)
        #: A dead one is connected, and does nothing.
        self.alive = True
        #: A mute one acts on plans, and says nothing.
        self.mute = False
        self.reports = True
        self.reports_version = False
        self.plan: Plan | None = None
        #: What each channel makes the server send, bytes/s, besides the traffic of the cluster.
        self.loads: dict[bytes, int] = {}
        #: Channels whose subscribers have not left their old location here.
        self.listened: set[bytes] = set()
        #: Asked for each control message from or to the agent: whether it gets lost.
        self.lose: Callable[[Any], bool] = lambda message: False
        #: Changes each report before it is sent.
        self.amend: Callable[[Report], Report] = lambda report: report
        self._second = False
        self._sequence = 0
        self._report_at: float | None = None

    def handle(self, event: Any, now: float) -> list[Any]:
        match event:
            case Start():
                self._report_at = now
                return [Connect(LOCAL, self._url)]
            case LinkUp(link):
                return [Send(link, (b"SUBSCRIBE", AGENT_CHANNEL))]
            case LinkDown():
                self.plan = None
            case Pushed(link, messages) if self.alive and link == LOCAL:
                return [each for message in messages if message[0] == b"message" for each in self._hear(message[2])]
            case Tick():
                self._report_at = now + REPORT_INTERVAL_S
                return self._tick() if self.alive and not self.mute else []
            case Listen(actions):
                return actions
            case _:
                pass
        return []

    def deadline(self) -> float | None:
        return self._report_at

    def restart(self) -> None:
        """Be another process from now on."""
        self.incarnation, self.plan, self.alive = next(_incarnations), None, True

    def listening(self, connections: int) -> Listen:
        """Return the event after which 0, 1 or 2 connections listen as this agent."""
        actions: list[Any] = [Send(LOCAL, (b"SUBSCRIBE" if connections else b"UNSUBSCRIBE", AGENT_CHANNEL))]
        if (connections == 2) != self._second:
            self._second = not self._second
            actions.append(Connect(SECOND, self._url) if self._second else Disconnect(SECOND))
        return Listen(actions)

    def _hear(self, data: bytes) -> list[Any]:
        message = unpack_control(data)
        if self.lose(message):
            return []
        match message:
            case PlanChange(delta):
                try:
                    if self.plan is not None:
                        self.plan = self.plan.apply(delta)
                except PlanError:
                    self.plan = None
                if self.plan is None or self.plan.version < delta.version:
                    self.plan = self._stored()
            case PlanQuery(version, is_doubtful):
                if self.plan is None or self.plan.version < version or is_doubtful:
                    self.plan = self._stored()
            case _:
                raise AssertionError(f"not a message to an agent: {message}")
        return [] if self.plan is None else self._say(PlanAck(self.server, self.incarnation, self.plan.version))

    def _say(self, message: Any) -> list[Any]:
        if self.mute or self.lose(message):
            return []
        return [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, pack_control(message)))]

    def _tick(self) -> list[Any]:
        report = [Send(LOCAL, (b"PUBLISH", BALANCER_CHANNEL, pack_report(self.report())))] if self.reports else []
        entries: Mapping[bytes, Entry] = {} if self.plan is None else self.plan.entries
        vacated = tuple(
            (channel, entry.route.epoch)
            for channel, entry in entries.items()
            if entry.phase is Phase.ACTIVE and channel not in self.listened and self.server in old_servers(entry)
        )
        return [*report, *(self._say(Vacated(self.server, vacated, self.incarnation)) if vacated else [])]

    def report(self) -> Report:
        """Return its next report."""
        self._sequence += 1
        rows = {**self._rows(self.server), **{name: Row(bytes_out=load) for name, load in self.loads.items()}}
        version = self.plan.version if self.reports_version and self.plan is not None else None
        numbers: dict[str, Any] = {"incarnation": self.incarnation, "sequence": self._sequence, "plan_version": version}
        return self.amend(report(self.server, rows, REPORT_INTERVAL_S, **numbers))


def old_servers(entry: Entry) -> set[str]:
    """Return the servers of the previous routes of a channel."""
    return {server for route in entry.previous for server in route.assignment.servers}
