"""The barriers of a subscriber: they pass when nothing from before can be on its way any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamoth.plan.plan import Plan
from dynamoth_client.machines.subscriber.events import BarrierPassed, Deliver, RaiseBarrier, SubscriptionEnded
from tests.machines.helpers import ACTIVE, PLAN_0, PREPARED, SETTLED, C, message, only, tagged
from tests.machines.listener import OPTIONS, Listener

PASSED = BarrierPassed(C)
MOVING = replace(OPTIONS, join_moving_s=0.1)


def barrier(listener: Listener) -> list[Any]:
    return listener.tell(RaiseBarrier(C))


def test_the_reply_of_the_place_lets_it_pass() -> None:
    """The reply comes behind what was published before."""
    listener = Listener().confirmed()
    asked = barrier(listener)
    assert len(tagged(asked, "verify")) == 1
    assert PASSED not in listener.push("s1", C, message(1))
    assert listener.verify(asked, PLAN_0) == [PASSED]


@pytest.mark.parametrize("is_joining", [False, True])
def test_one_of_a_channel_that_is_not_subscribed_to_passes_at_once(is_joining: bool) -> None:
    listener = Listener()
    if is_joining:
        listener.subscribe()
    assert barrier(listener) == [PASSED]


def test_a_question_from_before_the_barrier_does_not_count() -> None:
    listener = Listener().confirmed()
    earlier, asked = barrier(listener), barrier(listener)
    assert listener.verify(earlier, PLAN_0) == []
    assert listener.verify(asked, PLAN_0) == [PASSED, PASSED]


def test_it_waits_until_the_former_place_is_left_where_the_plan_names_a_newer_route() -> None:
    """What is published at the new server comes by way of the agents until the marker."""
    listener = Listener().confirmed()
    listener.verify(barrier(listener), ACTIVE)
    listener.verify(listener.up("s2"), ACTIVE)
    assert PASSED not in listener.pass_time(1.0)
    listener.mark("s1")
    asked = listener.pass_time(0.02)
    assert PASSED in listener.verify(asked, SETTLED)


@pytest.mark.parametrize("plan", [PREPARED, ACTIVE])
def test_it_waits_for_forwarded_messages_while_a_change_is_not_settled(plan: Plan) -> None:
    listener = Listener(MOVING)
    listener.subscribe()
    server = plan.entry(C).client_route.assignment.servers[0]
    listener.verify(listener.up("s1"), plan)
    if server != "s1":
        listener.verify(listener.up(server), plan)
    listener.pass_time(0.1)
    assert PASSED not in listener.verify(barrier(listener), plan)
    assert tagged(listener.pass_time(0.09), "verify") == []
    assert listener.verify(listener.pass_time(0.02), plan) == [PASSED]


def test_it_begins_again_where_the_change_becomes_active_meanwhile() -> None:
    listener = Listener(MOVING)
    listener.subscribe()
    listener.verify(listener.up("s1"), PREPARED)
    listener.pass_time(0.1)
    listener.verify(barrier(listener), PREPARED)
    assert PASSED not in listener.verify(listener.pass_time(0.11), ACTIVE)
    assert PASSED not in listener.pass_time(1.0)


def test_it_waits_for_a_link_that_is_down() -> None:
    listener = Listener().confirmed()
    asked = barrier(listener)
    assert PASSED not in listener.down("s1")
    assert PASSED not in listener.pass_time(1.0)
    assert PASSED not in listener.verify(listener.up("s1"), PLAN_0)
    assert PASSED not in listener.verify(asked, PLAN_0)
    assert PASSED in listener.verify(listener.pass_time(0.02), PLAN_0)


def test_it_waits_for_messages_that_wait_for_earlier_ones() -> None:
    listener = Listener().confirmed()
    listener.push("s1", C, message(1), message(3))
    assert listener.verify(barrier(listener), PLAN_0) == []
    listener.push("s1", C, message(2))
    assert PASSED in listener.pass_time(0.02)


def test_a_reply_that_does_not_decide_makes_it_ask_again() -> None:
    listener = Listener().confirmed()
    assert PASSED not in listener.verify(barrier(listener), None)
    assert listener.verify(listener.pass_time(0.02), PLAN_0) == [PASSED]


def test_it_passes_when_the_subscription_ends() -> None:
    listener = Listener().confirmed()
    asked = barrier(listener)
    listener.unsubscribe()
    assert SubscriptionEnded(C) in listener.acknowledged(b"unsubscribe")
    assert listener.verify(asked, PLAN_0) == [PASSED]
    assert not only(Deliver, listener.pass_time(1.0))
