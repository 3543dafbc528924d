from __future__ import annotations

from dynamoth_client.machines.register import Register, Registered, State
from dynamoth_client.machines.subscriber.events import SubscriptionConfirmed, SubscriptionEnded

NAME = b"name"
CONFIRMED = SubscriptionConfirmed(NAME)
ENDED = SubscriptionEnded(NAME)


def registered(ended_max: int = 10) -> tuple[Register[Registered, str], Registered]:
    """Return a register, and a subscription that the application has just asked for."""
    register: Register[Registered, str] = Register(ended_max)
    assert register.subscribe(NAME) is None
    register.add(NAME, subscription := Registered())
    return register, subscription


def test_each_subscribe_is_confirmed_once() -> None:
    register, subscription = registered()
    assert register.subscribe(NAME) == []
    assert register.confirm(NAME, subscription, 3.0) == [CONFIRMED] * 2
    assert register.confirm(NAME, subscription, 4.0) == []
    assert register.subscribe(NAME) == [CONFIRMED]
    assert (subscription.state, subscription.confirmed_at) == (State.LISTENING, 3.0)
    register.check()


def ending_register() -> Register[Registered, str]:
    register, subscription = registered()
    register.confirm(NAME, subscription, 3.0)
    assert register.unsubscribe(NAME) is None
    assert register.current == {NAME: subscription}
    register.begin_to_end(NAME, "delivered numbers")
    assert (register.current, register.ending, subscription.state) == ({}, {NAME: subscription}, State.ENDING)
    register.check()
    return register


def test_each_unsubscribe_is_acknowledged_by_an_end() -> None:
    register = ending_register()
    assert register.unsubscribe(NAME) == []
    ending = register.ending[NAME]
    assert register.on_ended(NAME) == ([ENDED] * 2, 0)
    assert ending.state is State.ENDED
    assert register.unsubscribe(NAME) == [ENDED]


def test_a_subscribe_while_it_ends_waits_for_the_end_and_is_taken_back_by_an_unsubscribe() -> None:
    register = ending_register()
    assert register.subscribe(NAME) == register.subscribe(NAME) == []
    assert register.unsubscribe(NAME) == []
    assert register.subscribe(NAME) == []
    assert register.on_ended(NAME) == ([ENDED] * 2, 1)
    assert register.subscribe(NAME) is None


def test_delivered_numbers_of_the_latest_names_are_recalled_once() -> None:
    register: Register[Registered, str] = Register(2)
    for name in (b"a", b"b", b"c"):
        register.add(name, subscription := Registered())
        register.end(name, name.decode())
        assert subscription.state is State.ENDED
        register.check()
    assert [register.recall(name) for name in (b"a", b"b", b"b", b"c")] == [None, "b", None, "c"]
    register.add(b"d", Registered())
    register.end(b"d", "d")
    register.forget()
    assert register.recall(b"d") is None
