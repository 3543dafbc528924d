"""One agent, and a server that answers it without a network."""

from __future__ import annotations

from typing import Any, TypeVar

from dynamoth.machine.events import ErrorReply, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan.plan import Plan, Server, single
from dynamoth.protocol import stored_plan
from dynamoth.protocol.reports import Report, pack_report, unpack_report
from dynamoth_agent.machine import AgentMachine
from dynamoth_agent.stand_in import REPORTS
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_sim.world.invariants import Checker

_T = TypeVar("_T")

PLAN = Plan.initial([Server("s1", "redis://h1"), Server("s2", "redis://h2")])
AT_S2 = next(b"%d" % n for n in range(100) if PLAN.entry(b"%d" % n).route.assignment == single("s2"))
"""A channel whose home is s2."""

DEFAULT_LIMIT = b"normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60"
GOOD = {"client-output-buffer-limit": DEFAULT_LIMIT.replace(b"pubsub 33554432 8388608 60", b"pubsub 0 0 0")}


def whole(plan: Plan) -> dict[bytes, bytes]:
    """Return what HGETALL answers where the plan is stored."""
    fields: dict[bytes, bytes] = {}
    for command in stored_plan.write_whole(plan, None):
        if command[0] == b"HSET":
            parts = [part if isinstance(part, bytes) else str(part).encode() for part in command[2:]]
            fields.update(zip(parts[::2], parts[1::2], strict=True))
    return fields


class Bench:
    """One agent. ``agents``: how many connections listen as it; ``floods``: its observing link is never answered."""

    def __init__(self, *, agents: int = 1, settings: dict[str, Any] | None = None) -> None:
        self.machine = AgentMachine("s1", 5, None, LoadAnalyzerOptions(outgoing_bytes_per_s_max=1000), "redis://h1")
        self._checker = Checker(self.machine, every=1)
        self.now = 50.0
        self.plan: Plan | None = PLAN
        self.agents = agents
        self.floods = False
        self.settings: dict[str, Any] = GOOD if settings is None else settings
        #: Grows with time.
        self.output_bytes = 0
        self.sent: list[Send] = []
        self.other: list[Any] = []

    def tell(self, event: Any, *, answer: bool = True) -> list[Any]:
        actions = self.machine.handle(event, self.now)
        self._checker.after(event)
        for action in actions:
            if isinstance(action, Send):
                self.sent.append(action)
                silent = action.args[0] in (b"SUBSCRIBE", b"PSUBSCRIBE") or (self.floods and action.link == "local")
                if answer and action.tag is not None and action.link in ("local", REPORTS) and not silent:
                    self.tell(Replied(action.link, action.tag, self.answer(tuple(action.args))))
            else:
                self.other.append(action)
        return actions

    def answer(self, args: tuple[Any, ...]) -> Any:
        match args:
            case (b"HGETALL", _):
                return {} if self.plan is None else whole(self.plan)
            case (b"INFO", _):
                return b"total_net_output_bytes:%d\r\npubsub_channels:0\r\nused_memory:7\r\n" % self.output_bytes
            case (b"CONFIG", b"GET", name):
                value = self.settings.get(name.decode(), b"")
                return value if isinstance(value, ErrorReply) else {name: value}
            case (b"CLIENT", b"ID"):
                return 9
            case (b"CLIENT", b"LIST", *_):
                return b"id=3 addr=10.0.0.1:99 laddr=x fd=8 name=dynamoth-agent:s1:4 age=12 idle=0 flags=P\n"
            case (b"PUBSUB", b"NUMSUB", *names):
                return [part for name in names for part in (name, self.agents)]
            case (b"PUBSUB", b"CHANNELS"):
                return []
            case (b"PUBLISH", *_):
                return 2
            case _:
                return b"OK"

    def up(self, *links: str) -> None:
        """Start, and bring up the observing link and others."""
        self.tell(Start())
        self.tell(LinkUp("local", "run1"))
        self.tell(Pushed("local", [[b"psubscribe", b"*", 1], [b"subscribe", AGENT_CHANNEL, 2]]))
        for link in links:
            self.tell(LinkUp(link, "run1"))

    def commands(self) -> list[tuple[Any, ...]]:
        return [tuple(send.args) for send in self.sent]

    def said(self, kind: type[_T]) -> list[_T]:
        return [action for action in self.other if isinstance(action, kind)]

    def reports(self, link: str) -> list[Report]:
        sent = [send for send in self.sent if send.link == link and send.args[:2] == (b"PUBLISH", BALANCER_CHANNEL)]
        data = [bytes(send.args[2]) for send in sent]  # type: ignore[arg-type]
        return [unpack_report(each) for each in data if each[1] == 12]

    def first_report(self) -> Report:
        """Let time pass until there is one."""
        give_up_at = self.now + 10.0
        while not (report := self.machine.load_analyzer.last_report):
            assert self.now < give_up_at
            self.to_next_deadline()
        assert (b"PUBLISH", BALANCER_CHANNEL, pack_report(report)) in self.commands()
        return report

    def to_next_deadline(self) -> None:
        deadline = self.machine.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self.output_bytes += 50
        self.tell(Tick())

    def run(self, duration_s: float) -> None:
        end = self.now + duration_s
        while (at := self.machine.deadline()) is not None and at <= end:
            self.to_next_deadline()
        self.now = end
