"""The connection that speaks for an agent which sees nothing, and what it asks the server."""

from __future__ import annotations

import pytest

from dynamoth.machine.events import ErrorReply, LinkDown, LinkUp
from dynamoth_agent.events import BlindnessChanged, ServerAdvice
from dynamoth_agent.stand_in import CONFIG_ASKED, EVICTABLE, REPORTS, advice
from tests.agent.bench import DEFAULT_LIMIT, Bench


def test_an_agent_that_sees_reports_over_its_observing_link_only() -> None:
    agent = Bench()
    agent.up(REPORTS)
    agent.run(20)
    assert len(agent.reports("local")) >= 18
    assert agent.reports(REPORTS) == [] and not agent.machine.stand_in.blind
    assert all(report.observing and report.interruptions == 0 for report in agent.reports("local"))


def test_an_agent_whose_replies_do_not_come_through_reports_that_it_is_blind() -> None:
    agent = Bench()
    agent.up(REPORTS)
    agent.run(5)
    agent.floods = True
    agent.run(3)
    assert agent.reports(REPORTS) == [], "not before three intervals"
    agent.run(7)
    [change] = agent.said(BlindnessChanged)
    assert change.blind and agent.machine.stand_in.blind
    reports = agent.reports(REPORTS)
    assert len(reports) >= 4
    assert not any(report.observing for report in reports)
    assert reports[-1].blind_s > reports[0].blind_s > 3 and reports[-1].observation_lag_s == reports[-1].blind_s
    assert reports[-1].outgoing_bytes_per_s > 0 and reports[-1].memory_bytes == 7, "the server itself is measured"
    sequences = [report.sequence for report in (*agent.reports("local"), *reports)]
    assert sequences == list(range(len(sequences)))


def test_an_agent_that_is_disconnected_again_and_again_says_how_often() -> None:
    agent = Bench()
    agent.up(REPORTS)
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
    assert not agent.machine.stand_in.blind
    assert len(agent.reports(REPORTS)) <= seen + 2
    assert agent.reports("local")[-1].interruptions == 9 and agent.reports("local")[-1].observing


def test_an_agent_that_may_not_be_the_only_one_keeps_silent() -> None:
    agent = Bench(agents=2)
    agent.up(REPORTS)
    agent.floods = True
    agent.run(20)
    assert agent.machine.stand_in.blind and agent.reports(REPORTS) == []


def test_an_agent_that_hung_says_nothing_beside_the_one_in_its_place() -> None:
    agent = Bench()
    agent.up(REPORTS)
    agent.run(5)
    agent.now += 20
    agent.agents = 2
    agent.tell(LinkDown("local", "closed by the other one"))
    agent.tell(LinkUp("local", "run1"))
    agent.floods = True
    before = len(agent.reports("local"))
    agent.run(4)
    assert agent.machine.stand_in.blind
    assert agent.reports(REPORTS) == [] and len(agent.reports("local")) == before


def test_while_that_link_is_down_nothing_is_sent_over_it() -> None:
    agent = Bench()
    agent.up(REPORTS)
    agent.tell(LinkDown("local", "gone"))
    agent.tell(LinkDown(REPORTS, "gone"))
    count = len(agent.sent)
    agent.run(20)
    assert agent.sent[count:] == []


def asked_settings(agent: Bench) -> list[bytes]:
    return [bytes(send.args[2]) for send in agent.sent if send.args[0] == b"CONFIG"]  # type: ignore[arg-type]


def test_settings_are_asked_for_once_and_what_does_harm_is_said() -> None:
    agent = Bench(settings={"client-output-buffer-limit": DEFAULT_LIMIT, "maxmemory-policy": b"allkeys-lru"})
    agent.up(REPORTS)
    agent.tell(LinkDown(REPORTS, "gone"))
    agent.tell(LinkUp(REPORTS, "run1"))
    assert asked_settings(agent) == list(CONFIG_ASKED)
    [said] = agent.said(ServerAdvice)
    assert said.refused is None
    limit, policy = said.advice
    assert "33554432 8388608" in limit and "set client-output-buffer-limit pubsub 256mb 128mb 60" in limit
    assert "allkeys-lru" in policy and "noeviction" in policy
    agent.run(5)
    assert agent.reports("local")[-1].problems == ((EVICTABLE, policy),)


def test_settings_that_may_not_be_read_are_asked_for_once_per_connection_and_said_once() -> None:
    agent = Bench(settings={"client-output-buffer-limit": ErrorReply("NOPERM no")})
    agent.up(REPORTS)
    agent.run(10)
    assert asked_settings(agent) == [CONFIG_ASKED[0]], "each refusal is an entry in the ACL LOG"
    for _ in range(2):
        agent.tell(LinkDown(REPORTS, "gone"))
        agent.tell(LinkUp(REPORTS, "run1"))
    assert asked_settings(agent) == [CONFIG_ASKED[0]] * 3
    assert agent.said(ServerAdvice) == [ServerAdvice((), "NOPERM no")]
    agent.settings = {"client-output-buffer-limit": DEFAULT_LIMIT}
    agent.tell(LinkDown(REPORTS, "gone"))
    agent.tell(LinkUp(REPORTS, "run1"))
    assert len(agent.said(ServerAdvice)) == 2, "its rights were mended"


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
