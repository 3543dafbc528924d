"""The machine that asks the balancer one thing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.machine.events import Connect, ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import OPERATOR_CHANNEL, operator_inbox
from dynamoth.protocol.control import AdminReply, AdminRequest, PlanQuery, pack_control, unpack_control
from dynamoth_cli.admin import REPEAT_INTERVAL_S, AdminMachine, Answered, Refused

REQUEST = AdminRequest(77, "move", {"channel": b"c", "to": "s2"})
INBOX = operator_inbox(77)
SUBSCRIBED = Pushed("server", [[b"subscribe", INBOX, 1]])
ASK = Send("server", (b"PUBLISH", OPERATOR_CHANNEL, pack_control(REQUEST)), "publish")


def answer(reply: AdminReply | PlanQuery | bytes) -> Pushed:
    data = reply if isinstance(reply, bytes) else pack_control(reply)
    return Pushed("server", [[b"message", INBOX, data]])


@pytest.fixture
def machine() -> AdminMachine:
    machine = AdminMachine("redis://a", REQUEST)
    assert machine.handle(Start(), 0.0) == [Connect("server", "redis://a")]
    return machine


@pytest.fixture
def asked(machine: AdminMachine) -> AdminMachine:
    assert machine.handle(LinkUp("server"), 1.0) == [Send("server", (b"SUBSCRIBE", INBOX), "subscribe")]
    assert machine.deadline() is None
    assert machine.handle(SUBSCRIBED, 2.0) == [ASK]
    return machine


def test_the_request_is_what_the_balancer_reads() -> None:
    assert unpack_control(bytes(ASK.args[2])) == REQUEST  # type: ignore[arg-type]


def test_the_inbox_is_subscribed_before_the_request_is_sent(asked: AdminMachine) -> None:
    reply = AdminReply(77, {"version": 3})
    assert asked.handle(answer(reply), 2.1) == [Answered(reply)]
    assert asked.deadline() is None


def test_it_asks_again_with_the_same_number_until_it_is_answered(asked: AdminMachine) -> None:
    assert asked.deadline() == 2.0 + REPEAT_INTERVAL_S
    assert asked.handle(Tick(), 3.0) == [ASK]
    assert asked.deadline() == 3.0 + REPEAT_INTERVAL_S
    asked.handle(answer(AdminReply(77, {})), 3.5)
    assert asked.handle(Tick(), 4.0) == []


def test_it_asks_again_over_a_new_connection(asked: AdminMachine) -> None:
    assert asked.handle(LinkDown("server", "gone: start it"), 2.5) == []
    assert (asked.fault, asked.deadline()) == ("gone: start it", None)
    assert asked.handle(LinkUp("server"), 3.0) == [Send("server", (b"SUBSCRIBE", INBOX), "subscribe")]
    assert (asked.fault, asked.deadline()) == (None, None)
    assert asked.handle(SUBSCRIBED, 3.1) == [ASK]


def test_a_refusal_by_the_server_is_reported(machine: AdminMachine) -> None:
    machine.handle(LinkUp("server"), 1.0)
    refusal = Replied("server", "subscribe", ErrorReply("NOPERM no channels"))
    assert machine.handle(refusal, 1.1) == [Refused("NOPERM no channels")]


@pytest.mark.parametrize("foreign", [b"", b"\xc1", b"\x93\x0b", AdminReply(78, {}), PlanQuery(3)])
def test_foreign_messages_are_counted_and_ignored(asked: AdminMachine, foreign: AdminReply | PlanQuery | bytes) -> None:
    assert asked.handle(answer(foreign), 2.1) == []
    assert asked.ignored == 1
    assert asked.deadline() == 2.0 + REPEAT_INTERVAL_S


@given(st.binary(max_size=40))
def test_no_bytes_in_the_inbox_do_harm(data: bytes) -> None:
    machine = AdminMachine("redis://a", REQUEST)
    for event in (Start(), LinkUp("server"), SUBSCRIBED, answer(data)):
        machine.handle(event, 1.0)
    assert machine.ignored == 1
