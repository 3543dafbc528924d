"""What a dispatcher subscribes to at a server that publishes keyspace notifications."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.machine.events import ErrorReply, Pushed, Replied, Send
from dynamoth.names import AGENT_CHANNEL, CLIENTS_CHANNEL
from dynamoth.protocol.control import ObservationGap, pack_control
from dynamoth.protocol.envelope import open_envelope
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.observation import QUIET_PATTERNS
from tests.machines.agent import Agent, copies
from tests.machines.helpers import PLAN_0, SETTLED, C, commands, only, published

ASKED = (b"__keyspace@*",)
CONFIRMED: list[list[Any]] = [[b"psubscribe", pattern, 3 + number] for number, pattern in enumerate(QUIET_PATTERNS)]
LEFT: list[Any] = [b"punsubscribe", b"*", 30]


def notified(agent: Agent, physical: bytes = b"__keyspace@0__:key") -> list[Any]:
    return agent.observe(b"set", physical=physical)


def may_leave(agent: Agent) -> list[Any]:
    return agent.tell(Pushed(LOCAL, [[b"punsubscribe", *ASKED, 2]]))


def raw(pattern: bytes, data: bytes) -> list[bytes]:
    return [b"pmessage", pattern, C, data]


@pytest.mark.parametrize("physical", [b"__keyspace@0__:key", b"__keyevent@15__:expired"])
def test_with_the_first_notification_it_leaves_them_out_in_one_write(physical: bytes) -> None:
    agent = Agent().holding(PLAN_0)
    assert commands(notified(agent, physical), b"PUNSUBSCRIBE", LOCAL) == [ASKED]
    assert notified(agent) == [], "it asks once"
    actions = only(Send, may_leave(agent))
    assert [tuple(send.args) for send in actions] == [(b"PSUBSCRIBE", *QUIET_PATTERNS), (b"PUNSUBSCRIBE", b"*")]
    assert may_leave(agent) == notified(agent) == []
    assert agent.dispatcher.why_blind is None, "it observes all the time"


def test_what_both_subscriptions_bring_is_forwarded_once() -> None:
    agent = Agent().holding(SETTLED)
    notified(agent)
    may_leave(agent)
    pushes: list[list[Any]] = [
        raw(b"*", b"1"),
        *CONFIRMED,
        raw(b"*", b"2"),
        raw(b"[^\\_]*", b"2"),
        raw(b"[^\\_]*", b"3"),
        raw(b"*", b"3"),
        LEFT,
        raw(b"[^\\_]*", b"4"),
    ]
    actions = [*(action for push in pushes for action in agent.tell(Pushed(LOCAL, [push]))), *agent.connect("s2")]
    forwarded = copies(actions, "s2")
    assert [open_envelope(copy).payload for copy in forwarded] == [b"1", b"2", b"3", b"4"]
    assert [open_envelope(copy).sequence for copy in forwarded] == [1, 2, 3, 4]


def test_no_gap_is_reported_as_nothing_goes_by_unobserved() -> None:
    agent = Agent().holding(PLAN_0)
    actions = [*notified(agent), *may_leave(agent), *agent.tell(Pushed(LOCAL, [*CONFIRMED, LEFT]))]
    assert published(actions, CLIENTS_CHANNEL) == []
    assert {send.args[0] for send in only(Send, actions)} == {b"PSUBSCRIBE", b"PUNSUBSCRIBE"}


def test_the_next_connection_begins_without_them() -> None:
    agent = Agent().holding(SETTLED)
    notified(agent)
    agent.down(LOCAL)
    actions = agent.up(LOCAL, confirmed=False)
    assert commands(actions, b"PSUBSCRIBE") == [QUIET_PATTERNS]
    agent.tell(Pushed(LOCAL, [*CONFIRMED, [b"subscribe", AGENT_CHANNEL, 40]]))
    assert agent.dispatcher.why_blind is None
    assert published(agent.read(SETTLED), CLIENTS_CHANNEL) == [pack_control(ObservationGap("s1"))]
    actions = [*agent.tell(Pushed(LOCAL, [raw(b"[^\\_]*", b"x")])), *agent.connect("s2")]
    assert [open_envelope(copy).payload for copy in copies(actions, "s2")] == [b"x"]


def test_a_server_that_does_not_let_it_unsubscribe_is_observed_as_before() -> None:
    agent = Agent().holding(PLAN_0)
    [ask] = only(Send, notified(agent))
    assert agent.tell(Replied(LOCAL, ask.tag, ErrorReply("NOPERM punsubscribe"))) == []
    assert agent.dispatcher.observation.leave_refusal == "NOPERM punsubscribe"
    assert agent.dispatcher.why_blind is None
    assert notified(agent) == [], "each refusal is an entry in the ACL LOG"
    agent.down(LOCAL)
    assert commands(agent.up(LOCAL), b"PSUBSCRIBE") == [QUIET_PATTERNS]
    assert agent.dispatcher.observation.leave_refusal is None


def test_a_refusal_in_between_is_asked_about_again_with_the_same_patterns() -> None:
    agent = Agent().holding(PLAN_0)
    notified(agent)
    [psubscribe, _] = only(Send, may_leave(agent))
    agent.tell(Replied(LOCAL, psubscribe.tag, ErrorReply("NOPERM no")), Pushed(LOCAL, [LEFT]))
    assert "NOPERM" in (agent.dispatcher.why_blind or "")
    assert commands(agent.pass_time(2.0), b"PSUBSCRIBE") == [QUIET_PATTERNS]
    agent.tell(Pushed(LOCAL, [*CONFIRMED, [b"subscribe", AGENT_CHANNEL, 40]]))
    assert published(agent.read(PLAN_0), CLIENTS_CHANNEL) == [pack_control(ObservationGap("s1"))]
