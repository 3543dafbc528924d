"""The outbox: in order, at least once, bounded."""

from __future__ import annotations

import pytest

from dynamoth.events import Send, SendAll
from dynamoth.outbox import Outbox


def sent(sends: list[Send]) -> list[object]:
    return [send.args[0] for send in sends]


def test_sends_at_once_while_the_link_is_up() -> None:
    outbox = Outbox("to:s2", 3)
    assert outbox.link_up() == []
    assert outbox.put((b"1",)) == [Send("to:s2", (b"1",), outbox)]


def test_waits_for_the_link() -> None:
    outbox = Outbox("to:s2", 3)
    assert outbox.put((b"1",)) == outbox.put((b"2",)) == []
    assert sent(outbox.link_up()) == [b"1", b"2"]


def test_sends_again_in_order_what_was_not_answered() -> None:
    outbox = Outbox("to:s2", 5)
    outbox.link_up()
    for name in (b"1", b"2", b"3"):
        outbox.put((name,), name)
    assert outbox.replied() == b"1"
    outbox.link_down()
    assert outbox.put((b"4",), b"4") == []
    assert sent(outbox.link_up()) == [b"2", b"3", b"4"]
    assert [outbox.replied() for _ in range(3)] == [b"2", b"3", b"4"]
    assert len(outbox) == 0


def test_takes_and_answers_several_together() -> None:
    outbox = Outbox("to:s2", 3)
    outbox.link_up()
    assert outbox.put((b"1",), "a") == [Send("to:s2", (b"1",), outbox)]
    assert outbox.room == 2
    assert outbox.put_all([(b"2",), (b"3",)], "b") == [SendAll("to:s2", [(b"2",), (b"3",)], outbox)]
    assert outbox.full
    with pytest.raises(AssertionError, match="no room"):
        outbox.put_all([(b"4",)], "d")
    with pytest.raises(AssertionError, match="4 replies"):
        outbox.replied_all(4)
    assert outbox.replied_all(2) == ["a", "b"]
    outbox.link_down()
    with pytest.raises(AssertionError, match="down"):
        outbox.put_all([(b"4",)], "d")
    outbox.replace_tokens(lambda args, token: (args, token))
    assert sent(outbox.link_up()) == [b"3"]
    assert outbox.replied() == ((b"3",), "b")


def test_is_bounded() -> None:
    outbox = Outbox("to:s2", 2)
    full: list[bool] = []
    for name in (b"1", b"2"):
        full.append(outbox.full)
        outbox.put((name,))
    full.append(outbox.full)
    with pytest.raises(AssertionError, match="full"):
        outbox.put((b"3",))
    outbox.link_up()
    outbox.replied()
    assert [*full, outbox.full] == [False, False, True, False]


def test_forgets_what_is_useless_from_the_oldest_on() -> None:
    outbox = Outbox("to:s2", 5)
    for name in (b"1", b"2", b"3"):
        outbox.put((name,), name)
    outbox.discard_while(lambda token: token in (b"1", b"3"))
    assert sent(outbox.link_up()) == [b"2", b"3"]


def test_a_reply_without_a_command_is_a_bug() -> None:
    outbox = Outbox("to:s2", 5)
    outbox.put((b"1",))
    with pytest.raises(AssertionError, match="without a command"):
        outbox.replied()
