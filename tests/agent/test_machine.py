from __future__ import annotations

from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import Connect, ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.machine.outbox import Outbox
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan.plan import Plan, Server, single
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import PlanAck, PlanChange, pack_control, unpack_control
from dynamoth.protocol.envelope import seal
from dynamoth.protocol.reports import Report, pack_report
from dynamoth_agent.events import AlreadyRunning, LinkChanged, ObservationRefused, PlanFollowed
from dynamoth_agent.guard import CHECK_INTERVAL_S
from dynamoth_agent.machine import AgentMachine
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_lla.round import ObservationLate
from dynamoth_sim.world.checker import Checker

PLAN = Plan.initial([Server("s1", "redis://h1"), Server("s2", "redis://h2")])


def whole(plan: Plan) -> dict[bytes, bytes]:
    """Return what HGETALL answers where the plan is stored."""
    fields: dict[bytes, bytes] = {}
    for command in stored_plan.write_whole(plan, None):
        if command[0] == b"HSET":
            parts = [part if isinstance(part, bytes) else str(part).encode() for part in command[2:]]
            fields.update(zip(parts[::2], parts[1::2], strict=True))
    return fields


class Bench:
    """One agent and a server that answers it."""

    def __init__(self) -> None:
        self.machine = AgentMachine("s1", 5, None, LoadAnalyzerOptions(outgoing_bytes_per_s_max=1000), "redis://h1")
        self._checker = Checker(self.machine, every=1)
        self.now = 50.0
        self.plan: Plan | None = PLAN
        self.agents = 1
        self.clients = b""
        self.sent: list[Send] = []
        self.other: list[Any] = []

    def tell(self, event: Any, *, answer: bool = True) -> list[Any]:
        actions = self.machine.handle(event, self.now)
        self._checker.after(event)
        for action in actions:
            if isinstance(action, Send):
                self.sent.append(action)
                silent = action.args[0] in (b"SUBSCRIBE", b"PSUBSCRIBE")  # but for a push
                if answer and action.tag is not None and action.link == "local" and not silent:
                    self.tell(Replied("local", action.tag, self.answer(tuple(action.args))))
            else:
                self.other.append(action)
        return actions

    def answer(self, args: tuple[Any, ...]) -> Any:
        match args:
            case (b"HGETALL", _):
                return {} if self.plan is None else whole(self.plan)
            case (b"INFO", _):
                return b"total_net_output_bytes:0\r\npubsub_channels:0\r\n"
            case (b"CLIENT", b"ID"):
                return 9
            case (b"CLIENT", b"LIST", *_):
                return self.clients
            case (b"PUBSUB", b"NUMSUB", *names):
                return [part for name in names for part in (name, self.agents)]
            case (b"PUBSUB", b"CHANNELS"):
                return []
            case (b"PUBLISH", *_):
                return 2
            case _:
                return b"OK"

    def up(self) -> None:
        self.tell(Start())
        self.tell(LinkUp("local", "run1"))
        self.tell(Pushed("local", [[b"psubscribe", b"*", 1], [b"subscribe", AGENT_CHANNEL, 2]]))

    def commands(self) -> list[tuple[Any, ...]]:
        return [tuple(send.args) for send in self.sent]

    def first_report(self) -> Report:
        """Let time pass until there is one."""
        give_up_at = self.now + 10.0
        while not (report := self.machine.load_analyzer.last_report):
            assert self.now < give_up_at
            self.to_next_deadline()
        to_balancer = [args[2] for args in self.commands() if args[:2] == (b"PUBLISH", BALANCER_CHANNEL)]
        assert pack_report(report) in to_balancer
        return report

    def to_next_deadline(self) -> None:
        deadline = self.machine.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self.tell(Tick())


def test_it_asks_for_its_links_at_the_start() -> None:
    bench = Bench()
    assert bench.tell(Start()) == [Connect("local", "redis://h1"), Connect("reports", "redis://h1")]


def test_the_connection_is_named_before_it_is_subscribed_and_observed_before_it_is_measured() -> None:
    bench = Bench()
    bench.tell(Start())
    actions = [action for action in bench.tell(LinkUp("local", "run1"), answer=False) if isinstance(action, Send)]
    names = [tuple(action.args[:2]) for action in actions]
    order = [
        (b"CLIENT", b"SETNAME"),
        (b"PSUBSCRIBE", b"*"),
        (b"PUBSUB", b"NUMSUB"),
        (b"INFO", b"stats"),
    ]
    assert sorted(order, key=names.index) == order
    assert names.index((b"CLIENT", b"SETNAME")) < names.index((b"SUBSCRIBE", AGENT_CHANNEL))


def test_it_is_ready_when_it_observes_and_knows_a_plan() -> None:
    bench = Bench()
    bench.plan = None
    bench.up()
    assert (bench.machine.is_up, bench.machine.is_ready) == (True, False)
    bench.plan = PLAN
    bench.to_next_deadline()
    assert (bench.machine.is_up, bench.machine.is_ready) == (True, True)
    bench.tell(LinkDown("local", "lost"))
    assert (bench.machine.is_up, bench.machine.is_ready) == (False, False)


def test_messages_go_to_dispatcher_and_analyzer() -> None:
    """The channel's home is s2: the dispatcher forwards; and the report of the analyzer has it."""
    channel = next(b"%d" % n for n in range(100) if PLAN.entry(b"%d" % n).route.assignment == single("s2"))
    bench = Bench()
    bench.up()
    actions = bench.tell(Pushed("local", [[b"pmessage", b"*", channel, seal(77, 1, 0, b"hello")]]))
    assert Connect("to:s2", "redis://h2") in actions
    actions = bench.tell(LinkUp("to:s2", "run2"))
    (forward,) = [action for action in actions if isinstance(action, Send)]
    assert forward.link == "to:s2" and forward.args[:2] == (b"PUBLISH", channel)
    assert isinstance(forward.tag, Outbox)
    assert bench.tell(Replied("to:s2", forward.tag, 1)) == []
    assert channel in bench.first_report().columns.channels


def test_reports_tell_the_version_of_the_dispatchers_plan_and_people_hear_of_it() -> None:
    bench = Bench()
    bench.up()
    newer = PLAN.begin({b"a": single("s1" if PLAN.entry(b"a").route.assignment == single("s2") else "s2")})
    change = pack_control(PlanChange(PLAN.diff(newer)))
    bench.tell(Pushed("local", [[b"message", AGENT_CHANNEL, change]]))
    assert [action.version for action in bench.other if isinstance(action, PlanFollowed)] == [0, 1]
    assert bench.first_report().plan_version == 1


def test_links_of_forwarding_do_not_touch_the_analyzer() -> None:
    bench = Bench()
    bench.up()
    before = bench.machine.load_analyzer.deadline()
    channel = next(b"%d" % n for n in range(100) if PLAN.entry(b"%d" % n).route.assignment == single("s2"))
    bench.tell(Pushed("local", [[b"pmessage", b"*", channel, b"raw"]]))
    bench.tell(LinkUp("to:s2", None))
    bench.tell(LinkDown("to:s2", "lost"))
    bench.tell(Pushed("to:s2", [[b"pmessage", b"*", b"x", b"raw"]]))
    assert bench.machine.load_analyzer.deadline() == before
    assert bench.machine.is_up


def test_a_link_that_is_down_is_said_once_per_reason() -> None:
    bench = Bench()
    bench.tell(Start())
    for reason in ("refused", "refused", "wrong password", "wrong password", "refused"):
        bench.tell(LinkDown("local", reason))
    bench.tell(LinkUp("local", "run1"))
    bench.tell(LinkDown("local", "refused"))
    said = [action.reason for action in bench.other if isinstance(action, LinkChanged)]
    assert said == ["refused", "wrong password", "refused", None, "refused"]


def test_a_second_agent_is_told_to_end() -> None:
    bench = Bench()
    bench.agents = 2
    bench.clients = b"id=3 addr=10.0.0.1:99 laddr=x fd=8 name=dynamoth-agent:s1:4 age=12 idle=0 flags=P\n"
    bench.up()
    (end,) = [action for action in bench.other if isinstance(action, AlreadyRunning)]
    assert "10.0.0.1:99" in end.reason


def test_an_agent_that_came_at_the_same_time_is_found_later() -> None:
    bench = Bench()
    bench.up()
    bench.agents = 2
    bench.clients = b"id=3 addr=10.0.0.1:99 laddr=x fd=8 name=dynamoth-agent:s1:4 age=12 idle=0 flags=P\n"
    began = bench.now
    while not any(isinstance(action, AlreadyRunning) for action in bench.other):
        bench.to_next_deadline()
        assert bench.now <= began + CHECK_INTERVAL_S


def test_its_own_old_connection_does_not_end_it() -> None:
    bench = Bench()
    bench.agents = 2
    bench.clients = b"id=3 addr=10.0.0.1:99 laddr=x fd=8 name=dynamoth-agent:s1:5 age=12 idle=0 flags=P\n"
    bench.up()
    assert not [action for action in bench.other if isinstance(action, AlreadyRunning)]


def test_actions_of_the_analyzer_come_through() -> None:
    bench = Bench()
    bench.tell(Start())
    sent = bench.tell(LinkUp("local", "run1"), answer=False)
    bench.now += 3.0
    for action in sent:
        if isinstance(action, Send) and action.tag is not None and action.tag[0] == "lla":
            bench.tell(Replied("local", action.tag, b""))
    assert ObservationLate(True, 3.0) in bench.other


def test_its_deadline_is_the_earliest() -> None:
    bench = Bench()
    assert bench.machine.deadline() is None
    bench.plan = None
    bench.up()
    retry = bench.machine.dispatcher.deadline()
    report = bench.machine.load_analyzer.deadline()
    assert retry is not None and report is not None
    assert bench.machine.deadline() == min(retry, report)
    bench.tell(LinkDown("local", "lost"))
    assert bench.machine.deadline() is None


def test_an_agent_that_may_not_observe_is_not_ready_says_why_and_acknowledges_nothing() -> None:
    bench = Bench()
    bench.tell(Start())
    bench.tell(LinkUp("local", "run1"))
    [psubscribe] = [send for send in bench.sent if send.args[0] == b"PSUBSCRIBE"]
    bench.tell(Replied("local", psubscribe.tag, ErrorReply("NOPERM this user has no permissions")))
    assert (bench.machine.is_ready, bench.machine.plan_version) == (False, 0)
    assert "NOPERM" in (bench.machine.problem or "") and "dynamoth acl" in (bench.machine.problem or "")
    [refused] = [action for action in bench.other if isinstance(action, ObservationRefused)]
    assert refused.reason == bench.machine.problem
    assert "NOPERM" in bench.first_report().why_unobserved
    sent = [args[2] for args in bench.commands() if args[:2] == (b"PUBLISH", BALANCER_CHANNEL)]
    assert not [data for data in sent if unpack_control_or_none(data) is not None], "no acknowledgement"
    bench.tell(LinkDown("local", "lost"))
    bench.up()
    assert bench.machine.is_ready and not bench.machine.problem


def unpack_control_or_none(data: bytes) -> PlanAck | None:
    try:
        message = unpack_control(data)
    except MalformedMessage:  # a report
        return None
    return message if isinstance(message, PlanAck) else None


def test_a_report_says_that_another_server_refuses_what_is_forwarded() -> None:
    channel = next(b"%d" % n for n in range(100) if PLAN.entry(b"%d" % n).route.assignment == single("s2"))
    bench = Bench()
    bench.up()
    bench.tell(Pushed("local", [[b"pmessage", b"*", channel, seal(77, 1, 0, b"hello")]]))
    [forward] = [action for action in bench.tell(LinkUp("to:s2", "run2")) if isinstance(action, Send)]
    bench.tell(Replied("to:s2", forward.tag, ErrorReply("NOPERM no")))
    [(kind, text)] = bench.first_report().problems
    assert kind == "forwards_refused" and "server s2 refuses forwarded messages" in text and "NOPERM no" in text
