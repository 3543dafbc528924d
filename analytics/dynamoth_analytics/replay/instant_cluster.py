"""The cluster of a replay: servers and agents that answer a balancer machine at once.

Each server keeps the lease and the plan as Redis does. Its agent acts on a change of the plan when it hears of it, and
reports an old location as empty ``settle_s`` after the change has become active. An agent answers while its reports
are in the recording.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from dynamoth.errors import DynamothError
from dynamoth.machine.events import CommandPart, Connect, Disconnect, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL, OPERATOR_CHANNEL, PLAN_KEY
from dynamoth.plan.plan import Entry, Phase, Plan, Server
from dynamoth.protocol.control import AdminRequest, PlanAck, Vacated, pack_control
from dynamoth.protocol.fence import evaluate
from dynamoth.protocol.stored_plan import VERSION_FIELD, write_whole
from dynamoth_balancer.events import BalancerAction, BalancerEvent, BalancerNews, ListServers, PlanChanged, Stopped
from dynamoth_balancer.install.leadership import Stage
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.provision.fleet import FreeServer, StartServer

AGENT_SILENT_S = 3.0
"""An agent without reports for longer is down: it answers nothing."""

LEAD_S_MAX = 10.0
"""A balancer that does not lead after this time never will: nothing here takes time."""

REQUEST_DONE = 1


class ReplayError(DynamothError):
    """Raised when a recorded load cannot be replayed: the text says why."""

    code = "replay"


class _Redis:
    """The keys of one server."""

    def __init__(self, plan: Plan | None) -> None:
        self._hashes: dict[bytes, dict[bytes, bytes]] = {}
        self._texts: dict[bytes, bytes] = {}
        for command in [] if plan is None else write_whole(plan, None):
            self.execute(command)

    @property
    def version(self) -> int:
        """Of the stored plan; 0 without one."""
        return int(self._hashes.get(PLAN_KEY, {}).get(VERSION_FIELD, 0))

    def execute(self, command: Sequence[CommandPart]) -> Any:
        """Return the reply to a command."""
        words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
        name, key, *rest = words
        fields = self._hashes.get(key, {})
        match name:
            case b"EVAL":
                return evaluate(words, lambda *inner: self.execute(inner), ReplayError)
            case b"HMGET":
                return [fields.get(field) for field in rest]
            case b"HGETALL":
                return dict(fields)
            case b"HLEN":
                return len(fields)
            case b"HSET":
                fields = self._hashes.setdefault(key, {})
                before = len(fields)
                fields.update(zip(rest[::2], rest[1::2], strict=True))
                return len(fields) - before
            case b"RENAME":
                self._hashes[rest[0]] = self._hashes.pop(key)
            case b"DEL":
                self._hashes.pop(key, None)
                self._texts.pop(key, None)
            case b"SET":
                self._texts.setdefault(key, rest[0])
            case b"GET":
                return self._texts.get(key)
            case b"PUBSUB":
                return [rest[0], 1]
            case b"PEXPIRE" | b"PUBLISH":
                pass
            case _:
                raise AssertionError(f"a balancer that sends {name!r} cannot be replayed")
        return REQUEST_DONE


class InstantCluster:
    """Runs one balancer machine in virtual time.

    Args:
        machine: of the ``configured`` servers.
        servers: their ids, at least one.
        plan: the plan that the servers store at first; None for a new cluster.
        begin: the virtual time, in seconds.
        settle_s: how long subscribers take to follow a change; infinite: until ``vacate`` is called.

    """

    def __init__(
        self, machine: BalancerMachine, servers: Sequence[str], plan: Plan | None, begin: float, settle_s: float
    ) -> None:
        self.now = self._ticked_at = begin
        self.machine = machine
        #: The news of the machine, for the owner to take.
        self.news: deque[tuple[float, BalancerNews]] = deque()
        self._settle_s = settle_s
        self._redis = {server: _Redis(plan) for server in servers}
        #: When each agent has reported last, and its incarnation.
        self._agents: dict[str, tuple[float, int]] = {}
        self._events: deque[BalancerEvent] = deque()
        #: When subscribers will have left old locations: time, number, server, channels with their epochs.
        self._later: list[tuple[float, int, str, tuple[tuple[bytes, int], ...]]] = []
        self._numbers = count()
        #: The epochs of the changes that are known to be active.
        self._active: dict[bytes, int] = {}
        self._handle(Start())
        while self.machine.stage is not Stage.LEADING:
            if self.now - begin > LEAD_S_MAX:
                raise ReplayError("the balancer of a replay does not get to lead: its settings may forbid it")
            self.run_until(self.now + machine.options.step_interval_s + 0.1)

    def pause(self, *, paused: bool) -> None:
        """Stop the balancer from making plans of its own, or let it make them again."""
        request = AdminRequest(next(self._numbers), "pause" if paused else "resume")
        self._push(next(iter(self._redis)), OPERATOR_CHANNEL, pack_control(request))

    def report(self, server: str, incarnation: int, packed: bytes) -> None:
        """Deliver a report of an agent now."""
        self._agents[server] = (self.now, incarnation)
        self._push(server, BALANCER_CHANNEL, packed)

    def run_until(self, time: float, tick_s: float = 0.0) -> None:
        """Let time pass. While no channel is in transition, the machine gets at most one tick in ``tick_s``."""
        while True:
            due = self.machine.deadline()
            assert due is not None, "a balancer that leads has a deadline"
            has_more = due <= self._ticked_at  # the latest tick only renewed the lease
            if tick_s and not self.machine.overview.transitions and not has_more:
                due = max(due, self._ticked_at + tick_s)
            if self._later and self._later[0][0] <= min(due, time):
                self._report_vacated(*heapq.heappop(self._later))
            elif due <= time:
                self.now = self._ticked_at = max(self.now, due)
                self._handle(Tick())
            else:
                self.now = max(self.now, time)
                return

    def _push(self, server: str, channel: bytes, data: bytes) -> None:
        self._handle(Pushed(server, [[b"message", channel, data]]))

    def _handle(self, event: BalancerEvent) -> None:
        self._events.append(event)
        while self._events:
            self._run_actions(self.machine.handle(self._events.popleft(), self.now))

    def execute(self, actions: Iterable[BalancerAction]) -> None:
        """Execute actions that the machine has returned outside of an event."""
        self._run_actions(actions)
        self._handle(Tick())

    def _run_actions(self, actions: Iterable[BalancerAction]) -> None:
        for action in actions:
            match action:
                case Send(link, command, tag):
                    self._send(link, command, tag)
                case Connect(link):
                    self._events.append(LinkUp(link))
                case Disconnect():
                    raise ReplayError("the servers of a replay do not change")
                case Stopped(error):
                    raise ReplayError(f"the balancer of a replay has ended: {error}")
                case StartServer() | FreeServer() | ListServers():
                    raise AssertionError(f"the balancer of a replay has no provisioner, and asks for {action}")
                case _:
                    self.news.append((self.now, action))
                    if isinstance(action, PlanChanged):
                        self._follow(action.plan)

    def _send(self, server: str, command: Sequence[CommandPart], tag: Any) -> None:
        if command[0] == b"SUBSCRIBE":
            return
        reply = self._redis[server].execute(command)
        if tag is not None:
            self._events.append(Replied(server, tag, reply))
        if (
            command[0] == b"PUBLISH"
            and command[1] == AGENT_CHANNEL
            and (incarnation := self._agent(server)) is not None
        ):
            ack = pack_control(PlanAck(server, incarnation, self._redis[server].version))
            self._events.append(Pushed(server, [[b"message", BALANCER_CHANNEL, ack]]))

    def _agent(self, server: str) -> int | None:
        """Return the incarnation of an agent; None while it is down."""
        reported_at, incarnation = self._agents.get(server, (-math.inf, 0))
        return incarnation if self.now - reported_at <= AGENT_SILENT_S else None

    def _report_vacated(self, time: float, _: int, server: str, left: tuple[tuple[bytes, int], ...]) -> None:
        """Send that nobody listens at old locations any more, from an agent that is up; later if it is down."""
        self.now = max(self.now, time)
        incarnation = self._agent(server)
        if incarnation is None:
            heapq.heappush(self._later, (self.now + AGENT_SILENT_S, next(self._numbers), server, left))
        else:
            self._push(server, BALANCER_CHANNEL, pack_control(Vacated(server, left, incarnation)))

    def vacate(self, channel: bytes) -> bool:
        """Send that nobody listens at the old locations of a channel; return whether it has settled."""
        assert self.machine.plan is not None, "a balancer that leads has a plan"
        entry = self.machine.plan.entries.get(channel)
        if entry is not None and entry.phase is Phase.ACTIVE:
            for server in _old_servers(entry):
                if (incarnation := self._agent(server)) is not None:
                    left = ((channel, entry.route.epoch),)
                    self._push(server, BALANCER_CHANNEL, pack_control(Vacated(server, left, incarnation)))
        return self.machine.plan.entry(channel).phase is Phase.SETTLED

    def _follow(self, plan: Plan) -> None:
        """Plan when subscribers leave the old locations of changes that have become active."""
        left: dict[str, list[tuple[bytes, int]]] = {}
        for channel, epoch, entry in self._activated(plan.entries):
            for server in _old_servers(entry):
                left.setdefault(server, []).append((channel, epoch))
        for server, channels in left.items():
            heapq.heappush(self._later, (self.now + self._settle_s, next(self._numbers), server, tuple(channels)))

    def _activated(self, entries: Mapping[bytes, Entry]) -> Iterator[tuple[bytes, int, Entry]]:
        for channel, entry in entries.items():
            epoch = entry.route.epoch
            if entry.phase is Phase.ACTIVE and self._active.get(channel) != epoch:
                self._active[channel] = epoch
                yield channel, epoch, entry


def _old_servers(entry: Entry) -> set[str]:
    return {server for route in entry.previous for server in route.assignment.servers}


def configured(servers: Sequence[str]) -> list[Server]:
    """Return servers of a replay; nobody connects to their URLs."""
    return [Server(server, f"redis://{server}") for server in servers]
