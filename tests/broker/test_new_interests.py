"""How many new interests one user has registered."""

from __future__ import annotations

import pytest

from dynamoth_broker.events import Grant
from dynamoth_broker.new_interests import HOUR_S, PURGED_MIN, NewInterests
from dynamoth_broker.sessions import Session


def registered(new: NewInterests, user: str, interest: str, now: float, keep_s: float = 1e6) -> bool:
    """Have an interest registered, unless the user has to wait."""
    if new.wait_s(user, interest, now):
        return False
    new.note(interest, now + keep_s, now)
    return True


@pytest.mark.parametrize("per_hour", [1, 7, 1000])
def test_so_many_at_once_and_then_as_many_per_hour(per_hour: int) -> None:
    new = NewInterests(per_hour)
    assert [registered(new, "ann", f"a{n}", 5.0) for n in range(per_hour + 1)] == [True] * per_hour + [False]
    wait_s = new.wait_s("ann", "more", 5.0)
    assert wait_s == pytest.approx(HOUR_S / per_hour)
    assert registered(new, "bob", "b", 5.0), "another user has its own"
    assert registered(new, "ann", "more", 5.0 + wait_s)
    assert not registered(new, "ann", "still more", 5.0 + wait_s)


def test_who_has_no_token_has_the_limits_of_its_network() -> None:
    def payer(address: str, user: str = "") -> tuple[str, str]:
        return Session("connection", "s", Grant(user), 0, 0.0, address=address).payer

    assert payer("2001:db8::1") == payer("2001:db8::ffff:ffff:ffff:ffff") == payer("2001:db8::5%2")
    assert len({payer(each) for each in ("2001:db8::1", "2001:db8:0:1::1", "10.0.0.1", "10.0.0.2", "")}) == 5
    assert payer("::ffff:10.0.0.1") == payer("10.0.0.1")
    assert payer("10.0.0.1", "ann") == payer("10.0.0.2", "ann") != payer("10.0.0.1")


def test_what_is_refused_costs_nothing() -> None:
    new = NewInterests(1)
    assert registered(new, "ann", "first", 0.0)
    assert not any(registered(new, "ann", f"a{n}", 0.0) for n in range(100))
    assert new.wait_s("ann", "second", 0.0) == HOUR_S


def test_an_interest_that_is_registered_is_not_new_whoever_has_it() -> None:
    new = NewInterests(1)
    assert registered(new, "ann", "first", 0.0, keep_s=100.0)
    assert all(registered(new, user, "first", 99.0, keep_s=100.0) for user in ("ann", "bob", "ann"))
    assert registered(new, "bob", "second", 99.0), "it was free"
    assert registered(new, "ann", "first", 198.0), "it was renewed"


def test_an_interest_whose_time_is_over_is_new() -> None:
    new = NewInterests(1)
    assert registered(new, "ann", "first", 0.0, keep_s=100.0)
    assert not registered(new, "ann", "first", 100.0)


def test_without_a_bound_nothing_is_remembered() -> None:
    new = NewInterests(0)
    assert all(registered(new, "ann", f"a{n}", 0.0) for n in range(5000))
    assert new.size == 0


def test_what_is_over_is_forgotten() -> None:
    new = NewInterests(1000)
    for number in range(20 * PURGED_MIN):
        assert registered(new, f"user {number}", f"interest {number}", float(number), keep_s=100.0)
    assert new.size < 4 * PURGED_MIN + 10
