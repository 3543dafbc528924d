"""The outbox: in order, at least once, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamoth.machine.outbox
from dynamoth.machine.events import Send, SendAll
from dynamoth.machine.outbox import Outbox


def sent(sends: list[Send]) -> list[object]:
    return [send.args[0] for send in sends]


def test_sends_again_in_order_what_was_not_answered() -> None:
    outbox = Outbox("to:s2", 5)
    outbox.link_up()
    for name in (b"1", b"2", b"3"):
        outbox.put((name,), name)
    assert outbox.on_reply() == b"1"
    outbox.link_down()
    assert outbox.put((b"4",), b"4") == []
    assert sent(outbox.link_up()) == [b"2", b"3", b"4"]
    assert [outbox.on_reply() for _ in range(3)] == [b"2", b"3", b"4"]
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
    assert outbox.on_reply() == ((b"3",), "b")


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
    outbox.on_reply()
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
        outbox.on_reply()


@pytest.fixture
def hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 100 bytes be under way at most."""
    monkeypatch.setattr(dynamoth.machine.outbox, "UNDER_WAY_BYTES_MAX", 100)


def _lengths(actions: Sequence[Send | SendAll]) -> list[int]:
    """Return how large the commands are that are sent."""
    return [
        len(args[-1])
        for action in actions
        for args in cast("Sequence[Sequence[bytes]]", action.commands if isinstance(action, SendAll) else [action.args])
    ]


@pytest.mark.usefixtures("hundred")
def test_what_is_too_much_at_once_goes_out_as_replies_come() -> None:
    outbox = Outbox("to:s2", 20)
    for _ in range(5):
        outbox.put((b"x" * 30,))
    held = [outbox.held]
    assert _lengths(outbox.link_up()) == [30, 30, 30], "also over a new connection"
    held.append(outbox.held)
    assert outbox.put((b"x",)) == outbox.put_all([(b"y",), (b"y",)], None) == []
    outbox.on_reply()
    assert outbox.flush() == [], "until half of it is answered"
    outbox.on_reply()
    assert _lengths(outbox.flush()) == [30, 30, 1, 1, 1]
    held.append(outbox.held)
    outbox.replied_all(6)
    assert _lengths(outbox.put_all([(b"x" * 99,), (b"x" * 2,)], None)) == [99], "what was answered is not counted"
    held.append(outbox.held)
    outbox.link_down()
    held.append(outbox.held)
    assert _lengths(outbox.link_up()) == [99]
    assert held == [False, True, False, True, False]


@pytest.mark.usefixtures("hundred")
def test_the_rest_goes_out_when_just_half_of_it_is_answered() -> None:
    outbox = Outbox("to:s2", 20)
    outbox.link_up()
    for _ in range(4):
        outbox.put((b"x" * 50,))
    outbox.replied_all(2)
    assert _lengths(outbox.flush()) == [50]


@pytest.mark.usefixtures("hundred")
def test_what_is_held_can_be_discarded() -> None:
    outbox = Outbox("to:s2", 20)
    outbox.link_up()
    for name in (b"a", b"b", b"c"):
        outbox.put((name * 60,), name)
    assert outbox.held
    assert outbox.discard_while(lambda token: token in (b"a", b"b")) == 0, "they are under way"
    assert outbox.discard_while(lambda token: token == b"c") == 1
    assert outbox.replied_all(2) == [b"a", b"b"]
    assert outbox.flush() == []
    assert _lengths(outbox.put_all([(b"d",), (b"d",)], b"d")) == [1, 1], "nothing waits for replies that do not come"


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "later"]), st.integers(0, 150)),
        st.tuples(st.just("all"), st.lists(st.integers(0, 150), min_size=1, max_size=4)),
        st.tuples(st.just("reply"), st.integers(1, 5)),
        st.tuples(st.just("lose"), st.none()),
    ),
    max_size=40,
)


@given(steps)
def test_everything_goes_out_once_and_in_order_and_bounded(script: list[tuple[str, Any]]) -> None:
    """Per connection; and whatever waits, waits for a reply that is to come."""
    outbox = Outbox("to:s2", 1000)
    under_way: list[int] = []
    number = 0
    tokens: list[int] = []

    def execute(actions: Sequence[Send | SendAll]) -> None:
        under_way.extend(_lengths(actions))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamoth.machine.outbox, "UNDER_WAY_BYTES_MAX", 100)
        execute(outbox.link_up())
        for kind, value in script:
            if kind in ("put", "later"):
                put = outbox.put if kind == "put" else outbox.put_later
                execute(put((b"x" * value,), number) or ())
                number += 1
            elif kind == "all":
                execute(outbox.flush())
                execute(outbox.put_all([(b"x" * size,) for size in value], number))
                number += len(value)
            elif kind == "reply" and (count := min(value, len(under_way))):
                del under_way[:count]
                tokens += outbox.replied_all(count)
                execute(outbox.flush())
            elif kind == "lose":
                outbox.link_down()
                under_way.clear()
                execute(outbox.link_up())
            execute(outbox.flush())
            waiting = [len(args[-1]) for args, _ in outbox.unanswered()]
            assert under_way == waiting[: len(under_way)]
            assert sum(under_way[:-1]) <= 100, "one command may be more"
            assert outbox.held == (len(under_way) < len(waiting))
            assert under_way or not waiting
    assert tokens == sorted(tokens)
