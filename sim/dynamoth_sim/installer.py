"""A scripted balancer: installs the moves that it is told of, and decides nothing.

It does what the balancer does to install a plan (ARCHITECTURE, "A change in three phases"), in as few lines as that takes, so
that scenarios can drive a move step by step, and do wrong what they want to see survived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth import stored_plan
from dynamoth.control import PlanAck, PlanChange, PlanQuery, Vacated, pack_control, unpack_control
from dynamoth.errors import MalformedMessage
from dynamoth.events import Connect, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan import Assignment, Phase, Plan

QUERY_INTERVAL_S = 0.1
"""How often an agent that has not acknowledged is asked."""


@dataclass(slots=True)
class Begin:
    """Event: begin these moves (PREPARED)."""

    assignments: Mapping[bytes, Assignment]


@dataclass(slots=True)
class Activate:
    """Event: go on to ACTIVE without waiting for anybody."""

    channels: tuple[bytes, ...]


@dataclass(slots=True)
class Settle:
    """Event: go on to SETTLED without waiting for anybody."""

    channels: tuple[bytes, ...]


class Installer:
    """Installs moves in all three phases. With ``by_hand``, it goes on to the next phase only when it is told to."""

    def __init__(self, plan: Plan, by_hand: bool = False) -> None:
        self.plan = plan
        self.by_hand = by_hand
        self._up: dict[str, None] = {}
        self._acknowledged: dict[str, int] = dict.fromkeys(plan.servers, -1)
        #: (channel, epoch) to the old servers that have been reported vacated.
        self._vacated: dict[tuple[bytes, int], dict[str, None]] = {}
        self._query_at: float | None = None

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        match event:
            case Start():
                self._query_at = now + QUERY_INTERVAL_S
                return [Connect(server.id, server.url) for server in self.plan.servers.values()]
            case LinkUp(link, run_id):
                self._up[link] = None
                whole = stored_plan.write_whole(self.plan, run_id)
                return [
                    Send(link, (b"SUBSCRIBE", BALANCER_CHANNEL)),
                    *(Send(link, command) for command in whole),
                    self._query(link),
                ]
            case LinkDown(link, _):
                self._up.pop(link, None)
            case Begin(assignments):
                at_rest = {c: a for c, a in assignments.items() if self.plan.entry(c).phase is Phase.SETTLED}
                return self._install(self.plan.begin(at_rest)) if at_rest else []
            case Activate(channels):
                return self._install(self.plan.activate(channels))
            case Settle(channels):
                return self._install(self.plan.settle(channels))
            case Pushed(_, messages):
                return [action for push in messages for action in self._pushed(push)]
            case Tick():
                self._query_at = now + QUERY_INTERVAL_S
                return [self._query(server) for server in self._up if self._acknowledged[server] < self.plan.version]
            case Replied():
                pass
            case _:
                raise AssertionError(f"not an event of an installer: {event!r}")
        return []

    def deadline(self) -> float | None:
        """Return when agents are asked again."""
        return self._query_at

    def _query(self, server: str) -> Send:
        return Send(server, (b"PUBLISH", AGENT_CHANNEL, pack_control(PlanQuery(self.plan.version))))

    def _install(self, plan: Plan) -> list[Any]:
        delta = self.plan.diff(plan)
        self.plan = plan
        change = pack_control(PlanChange(delta))
        return [
            Send(server, command)
            for server in self._up
            for command in (stored_plan.write_delta(delta), (b"PUBLISH", AGENT_CHANNEL, change))
        ]

    def _pushed(self, push: Any) -> list[Any]:
        if push[0] != b"message":
            return []
        try:
            message = unpack_control(push[2])
        except MalformedMessage:
            return []  # a report
        match message:
            case PlanAck(server, _, version):
                self._acknowledged[server] = max(version, self._acknowledged[server])
            case Vacated(server, channels):
                for key in channels:
                    self._vacated.setdefault(key, {})[server] = None
            case _:
                return []
        return [] if self.by_hand else self._go_on()

    def _go_on(self) -> list[Any]:
        actions: list[Any] = []
        if ready := [channel for channel in self._in(Phase.PREPARED) if self._is_prepared(channel)]:
            actions += self._install(self.plan.activate(ready))
        if done := [channel for channel in self._in(Phase.ACTIVE) if self._is_vacated(channel)]:
            actions += self._install(self.plan.settle(done))
        return actions

    def _in(self, phase: Phase) -> Iterable[bytes]:
        return [channel for channel, entry in self.plan.entries.items() if entry.phase is phase]

    def _is_prepared(self, channel: bytes) -> bool:
        entry = self.plan.entries[channel]
        servers = [server for route in entry.followed for server in route.assignment.servers]
        return all(self._acknowledged[server] >= entry.route.epoch for server in servers)

    def _is_vacated(self, channel: bytes) -> bool:
        entry = self.plan.entries[channel]
        vacated = self._vacated.get((channel, entry.route.epoch), {})
        return all(server in vacated for route in entry.previous for server in route.assignment.servers)
