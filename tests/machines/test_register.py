from __future__ import annotations

from dataclasses import dataclass

from dynamoth_client.machines.register import Register
from dynamoth_client.machines.subscriber.events import SubscriptionConfirmed, SubscriptionEnded

NAME = b"name"
CONFIRMED = SubscriptionConfirmed(NAME)
ENDED = SubscriptionEnded(NAME)


@dataclass
class Registered:
    confirmed: bool = False
    confirmed_at: float = float("inf")
    confirmations_owed: int = 1
    unsubscribe_acks_pending: int = 0


def registered(ended_max: int = 10) -> tuple[Register[Registered, str], Registered]:
    """Return a register, and what the application has just subscribed to."""
    register: Register[Registered, str] = Register(ended_max)
    assert register.subscribe(NAME) is None
    register.add(NAME, subscription := Registered())
    return register, subscription


def test_each_subscribing_is_confirmed_once() -> None:
    register, subscription = registered()
    assert register.subscribe(NAME) == []
    assert register.confirm(NAME, subscription, 3.0) == [CONFIRMED] * 2
    assert register.confirm(NAME, subscription, 4.0) == []
    assert register.subscribe(NAME) == [CONFIRMED]
    assert subscription.confirmed and subscription.confirmed_at == 3.0


def test_what_was_never_subscribed_to_ends_at_once() -> None:
    assert Register[Registered, str](10).unsubscribe(NAME) == [ENDED]


def ending() -> Register[Registered, str]:
    register, subscription = registered()
    register.confirm(NAME, subscription, 3.0)
    assert register.unsubscribe(NAME) is None
    assert register.is_current(NAME, subscription)
    register.remove(NAME, "what was delivered")
    register.begin_to_end(NAME, subscription)
    assert not register.is_current(NAME, subscription)
    return register


def test_each_unsubscribing_is_told_of_the_end() -> None:
    register = ending()
    assert register.unsubscribe(NAME) == []
    assert register.ended(NAME) == ([ENDED] * 2, 0)
    assert register.unsubscribe(NAME) == [ENDED]


def test_subscribing_while_it_ends_waits_for_the_end_and_is_forgotten_by_unsubscribing() -> None:
    register = ending()
    assert register.subscribe(NAME) == register.subscribe(NAME) == []
    assert register.unsubscribe(NAME) == []
    assert register.subscribe(NAME) == []
    assert register.ended(NAME) == ([ENDED] * 2, 1)
    assert register.subscribe(NAME) is None


def test_what_was_delivered_is_remembered_once_of_so_many_names() -> None:
    register: Register[Registered, str] = Register(2)
    for name in (b"a", b"b", b"c"):
        register.add(name, Registered())
        register.remove(name, name.decode())
    assert [register.recall(name) for name in (b"a", b"b", b"b", b"c")] == [None, "b", None, "c"]
    register.add(b"d", Registered())
    register.remove(b"d", "d")
    register.forget()
    assert register.recall(b"d") is None
