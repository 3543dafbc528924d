"""The connection that speaks for an agent which sees nothing, and what it asks the server."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.machine.events import Connect, ErrorReply, LinkDown, LinkUp, Replied, Send, Start, Tick
from dynamoth.names import BALANCER_CHANNEL
from dynamoth.protocol.reports import Report, unpack_report
from dynamoth_agent.events import BlindnessChanged, ServerAdvice
from dynamoth_agent.machine import AgentMachine
from dynamoth_agent.stand_in import CONFIG_ASKED, EVICTABLE, REPORTS, advice
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_sim.world.checker import Checker

DEFAULT_LIMIT = b"normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60"
GOOD = {"client-output-buffer-limit": DEFAULT_LIMIT.replace(b"pubsub 33554432 8388608 60", b"pubsub 0 0 0")}


class Agent:
    """An agent, and a server that answers it. ``floods``: what it asks over the observing link is never answered."""

    def __init__(self, *, others: int = 1, settings: dict[str, Any] | None = None) -> None:
        options = LoadAnalyzerOptions(outgoing_bytes_per_s_max=1000)
        self.machine = AgentMachine("s1", 5, None, options, "redis://h1")
        self._checker = Checker(self.machine, every=1)
        self.now = 50.0
        self.floods = False
        self.others = others
        self.settings: dict[str, Any] = GOOD if settings is None else settings
        self.output_bytes = 0
        self.sent: list[Send] = []
        self.said: list[Any] = []

    def tell(self, event: Any) -> None:
        actions = self.machine.handle(event, self.now)
        self._checker.after(event)
        for action in actions:
            if isinstance(action, Send):
                self.sent.append(action)
                silent = action.args[0] in (b"SUBSCRIBE", b"PSUBSCRIBE") or (self.floods and action.link == "local")
                if action.tag is not None and not silent:
                    self.tell(Replied(action.link, action.tag, self.answer(tuple(action.args))))
            elif not isinstance(action, Connect):
                self.said.append(action)

    def answer(self, args: tuple[Any, ...]) -> Any:
        match args:
            case (b"CONFIG", b"GET", name):
                value = self.settings.get(name.decode(), b"")
                return value if isinstance(value, ErrorReply) else {name: value}
            case (b"INFO", _):
                return b"total_net_output_bytes:%d\r\npubsub_channels:0\r\nused_memory:7\r\n" % self.output_bytes
            case (b"HGETALL", _):
                return {}
            case (b"CLIENT", b"LIST", *_):
                line = "id=3 addr=a:1 name=dynamoth-agent:s1:abc age=9 flags=P\n"
                return line.encode()
            case (b"CLIENT", b"ID"):
                return 9
            case (b"PUBSUB", b"NUMSUB", *names):
                return [part for name in names for part in (name, self.others)]
            case (b"PUBSUB", b"CHANNELS"):
                return []
            case (b"PUBLISH", *_):
                return 2
            case _:
                return b"OK"

    def up(self) -> None:
        self.tell(Start())
        self.tell(LinkUp("local", "run1"))
        self.tell(LinkUp(REPORTS, "run1"))

    def run(self, duration_s: float) -> None:
        end = self.now + duration_s
        while (at := self.machine.deadline()) is not None and at <= end:
            self.now = max(self.now, at)
            self.output_bytes += 50
            self.tell(Tick())
        self.now = end

    def reports(self, link: str) -> list[Report]:
        published = [send for send in self.sent if send.link == link and send.args[0] == b"PUBLISH"]
        return [unpack_report(bytes(send.args[2])) for send in published if send.args[1] == BALANCER_CHANNEL]  # type: ignore[arg-type]


def test_an_agent_that_sees_reports_over_its_observing_link_only() -> None:
    agent = Agent()
    agent.up()
    agent.run(20)
    assert len(agent.reports("local")) >= 18
    assert agent.reports(REPORTS) == [] and not agent.machine.is_blind
    assert all(report.observing and report.interruptions == 0 for report in agent.reports("local"))


def test_an_agent_whose_replies_do_not_come_through_reports_that_it_is_blind() -> None:
    agent = Agent()
    agent.up()
    agent.run(5)
    agent.floods = True
    agent.run(3)
    assert agent.reports(REPORTS) == [], "not before three intervals"
    agent.run(7)
    [change] = [said for said in agent.said if isinstance(said, BlindnessChanged)]
    assert change.blind and agent.machine.is_blind
    reports = agent.reports(REPORTS)
    assert len(reports) >= 4
    assert not any(report.observing for report in reports)
    assert reports[-1].blind_s > reports[0].blind_s > 3 and reports[-1].observation_lag_s == reports[-1].blind_s
    assert reports[-1].outgoing_bytes_per_s > 0 and reports[-1].memory_bytes == 7, "the server itself is measured"
    sequences = [report.sequence for report in (*agent.reports("local"), *reports)]
    assert sequences == list(range(len(sequences)))


def test_an_agent_that_is_disconnected_again_and_again_says_how_often() -> None:
    agent = Agent()
    agent.up()
    agent.run(5)
    agent.floods = True
    for _ in range(8):
        agent.tell(LinkDown("local", "connection lost"))
        agent.run(0.2)
        agent.tell(LinkUp("local", "run1"))
        agent.run(0.6)
    assert agent.reports(REPORTS)[-1].interruptions >= 7
    agent.floods = False
    agent.tell(LinkDown("local", "connection lost"))
    agent.tell(LinkUp("local", "run1"))
    seen = len(agent.reports(REPORTS))
    agent.run(5)
    assert not agent.machine.is_blind
    assert len(agent.reports(REPORTS)) <= seen + 2
    assert agent.reports("local")[-1].interruptions == 9 and agent.reports("local")[-1].observing


def test_an_agent_that_may_not_be_the_only_one_keeps_silent() -> None:
    agent = Agent(others=2)
    agent.up()
    agent.floods = True
    agent.run(20)
    assert agent.machine.is_blind and agent.reports(REPORTS) == []


def test_while_that_link_is_down_nothing_is_sent_over_it() -> None:
    agent = Agent()
    agent.up()
    agent.tell(LinkDown("local", "gone"))
    agent.tell(LinkDown(REPORTS, "gone"))
    count = len(agent.sent)
    agent.run(20)
    assert agent.sent[count:] == []


def asked_settings(agent: Agent) -> list[bytes]:
    return [bytes(send.args[2]) for send in agent.sent if send.args[0] == b"CONFIG"]  # type: ignore[arg-type]


def test_settings_are_asked_for_once_and_what_does_harm_is_said() -> None:
    agent = Agent(settings={"client-output-buffer-limit": DEFAULT_LIMIT, "maxmemory-policy": b"allkeys-lru"})
    agent.up()
    agent.tell(LinkDown(REPORTS, "gone"))
    agent.tell(LinkUp(REPORTS, "run1"))
    assert asked_settings(agent) == list(CONFIG_ASKED)
    [said] = [said for said in agent.said if isinstance(said, ServerAdvice)]
    assert said.refused is None
    limit, policy = said.advice
    assert "33554432 8388608" in limit and "set client-output-buffer-limit pubsub 256mb 128mb 60" in limit
    assert "allkeys-lru" in policy and "noeviction" in policy
    agent.run(5)
    assert agent.reports("local")[-1].problems == ((EVICTABLE, policy),)


def test_settings_that_may_not_be_read_are_asked_for_once_per_connection_and_said_once() -> None:
    agent = Agent(settings={"client-output-buffer-limit": ErrorReply("NOPERM no")})
    agent.up()
    agent.run(10)
    assert asked_settings(agent) == [CONFIG_ASKED[0]], "each refusal is an entry in the ACL LOG"
    for _ in range(2):
        agent.tell(LinkDown(REPORTS, "gone"))
        agent.tell(LinkUp(REPORTS, "run1"))
    assert asked_settings(agent) == [CONFIG_ASKED[0]] * 3
    assert [said for said in agent.said if isinstance(said, ServerAdvice)] == [ServerAdvice((), "NOPERM no")]
    agent.settings = {"client-output-buffer-limit": DEFAULT_LIMIT}
    agent.tell(LinkDown(REPORTS, "gone"))
    agent.tell(LinkUp(REPORTS, "run1"))
    assert len([said for said in agent.said if isinstance(said, ServerAdvice)]) == 2, "its rights were mended"


@pytest.mark.parametrize(
    ("value", "fine"),
    [
        ("pubsub 0 0 0", True),
        ("pubsub 268435456 134217728 60", True),
        ("pubsub 268435456 8388608 60", False),
        ("pubsub 33554432 0 0", False),
        ("normal 0 0 0", True),
        ("pubsub", True),
        ("pubsub x y z", True),
        ("", True),
    ],
)
def test_output_buffer_limits(value: str, fine: bool) -> None:
    assert (advice({b"client-output-buffer-limit": value}) == []) is fine
