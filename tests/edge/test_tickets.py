"""Tickets of users who were asked to move."""

from __future__ import annotations

from dynamoth.edge.tickets import KEY_BYTES, KEY_PERIOD_S, is_ticket, key_of_period, make_ticket

KEY, OTHER = b"k" * KEY_BYTES, b"o" * KEY_BYTES


def test_a_ticket_is_worth_something_to_one_session_only() -> None:
    ticket = make_ticket(KEY, "ada", "phone")
    assert is_ticket(ticket, [OTHER, KEY], "ada", "phone")
    assert not is_ticket(ticket, [OTHER], "ada", "phone")
    assert not is_ticket(ticket, [KEY], "ada", "laptop")
    assert not is_ticket(ticket, [KEY], "bob", "phone")
    assert not is_ticket(ticket[:-1], [KEY], "ada", "phone")
    assert not is_ticket("é" * 43, [KEY], "ada", "phone")
    assert not is_ticket(None, [KEY], "ada", "phone")
    assert not is_ticket(ticket, [], "ada", "phone")


def test_user_and_session_cannot_be_mixed_up() -> None:
    # The name of a session has no newline; that of a user may have one.
    assert make_ticket(KEY, "b\nc", "a") != make_ticket(KEY, "c", "a-b")


def test_keys_change_with_time_and_differ_by_secret() -> None:
    key = key_of_period(b"secret", 0.0)
    assert len(key) == KEY_BYTES
    assert key == key_of_period(b"secret", KEY_PERIOD_S - 0.1)
    assert key != key_of_period(b"secret", KEY_PERIOD_S)
    assert key != key_of_period(b"other", 0.0)


def test_without_a_secret_there_is_no_key() -> None:
    assert key_of_period(b"", 0.0) == b""
