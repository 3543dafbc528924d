"""The protocol by itself: pushes and replies in the order of the server, in whatever pieces they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.machine.events import ErrorReply
from dynamoth_link.resp import FEED_BYTES, LARGE_BYTES, Resp, Violation


def _no_bug(error: Exception, callback: str) -> None:
    raise AssertionError(callback) from error


def _ignore(_: object) -> None:
    """Somebody else looks."""


def _push(kind: bytes, number: int) -> bytes:
    return b">3\r\n$%d\r\n%b\r\n$1\r\nc\r\n:%d\r\n" % (len(kind), kind, number)


commands = st.lists(st.tuples(st.sampled_from(["one", "together", "subscribe"]), st.integers(1, 4)), max_size=10)


@given(commands, st.lists(st.integers(0, 40), max_size=10), st.lists(st.integers(1, 60), max_size=30))
def test_everything_is_handed_on_once_and_in_order(
    sent: Sequence[tuple[str, int]], messages: list[int], pieces: list[int]
) -> None:
    """The server answers as it would, with messages in between; its bytes come in pieces of any size."""
    seen: list[tuple[str, Any]] = []
    resp = Resp(lambda pushes: seen.extend(("push", push[2]) for push in pushes), _no_bug)
    kinds: list[bytes] = []
    for command, count in sent:
        if command == "one":
            resp.pack((b"GET", b"k"), lambda value: seen.append(("reply", value)))
            kinds.append(b"reply")
        elif command == "together":
            resp.pack_all([(b"GET", b"k")] * count, lambda values: seen.extend(("reply", value) for value in values))
            kinds += [b"reply"] * count
        else:
            resp.pack((b"SUBSCRIBE", *[b"c"] * count))
            kinds += [b"subscribe"] * count
    assert len(resp.pending) == len(sent)
    for place in messages:
        kinds.insert(place, b"message")
    answers = b"".join(b":%d\r\n" % n if kind == b"reply" else _push(kind, n) for n, kind in enumerate(kinds))
    for size in pieces:
        piece, answers = answers[:size], answers[size:]
        resp.feed(piece)
    resp.feed(answers)
    expected = [("reply" if kind == b"reply" else "push", number) for number, kind in enumerate(kinds)]
    assert seen == expected
    assert not resp.pending
    with pytest.raises(Violation, match="nobody asked for"):
        resp.feed(b":1\r\n")
    assert seen == expected


def test_replies_of_every_type_may_be_cut_at_every_byte() -> None:
    stream = (
        b"+one\r\n>3\r\n+message\r\n$1\r\nc\r\n$4\r\n\r\n\r\n\r\n-ERR no\r\n>2\r\n+m\r\n:5\r\n*1\r\n-ERR in\r\n_\r\n"
    )
    seen: list[Any] = []
    resp = Resp(seen.append, _no_bug)
    for _ in range(4):
        resp.pack(("X",), seen.append)
    for index in range(len(stream)):
        resp.feed(stream[index : index + 1])
    pushes: list[list[list[Any]]] = [[[b"message", b"c", b"\r\n\r\n"]], [[b"m", 5]]]
    assert seen == [b"one", pushes[0], ErrorReply("ERR no"), pushes[1], [ErrorReply("ERR in")], None]


def test_what_came_before_a_fault_is_handed_on() -> None:
    seen: list[Any] = []
    resp = Resp(seen.extend, _no_bug)
    with pytest.raises(Violation, match="Protocol error"):
        resp.feed(_push(b"message", 1) + _push(b"message", 2) + b"?nonsense\r\n" + _push(b"message", 3))
    assert [push[2] for push in seen] == [1, 2]


def test_an_error_answers_a_subscription_and_nothing_else_does() -> None:
    seen: list[Any] = []
    resp = Resp(_ignore, _no_bug)
    resp.pack(("SUBSCRIBE", "c", "d"), seen.append)
    resp.feed(_push(b"unsubscribe", 0) + _push(b"subscribe", 1))
    assert len(resp.pending) == 1, "one channel of two"
    resp.feed(b"-NOPERM no\r\n")
    assert seen == [ErrorReply("NOPERM no")]
    resp.pack(("SUBSCRIBE", "c"), seen.append)
    with pytest.raises(Violation, match="subscribe was answered with b'OK'"):
        resp.feed(b"+OK\r\n")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ((), ValueError),
        (("SUBSCRIBE",), ValueError),
        (("UNSUBSCRIBE",), ValueError),
        (("SUBSCRIBE", None), TypeError),
        ((b"PUBLISH", b"c", None), TypeError),
    ],
)
def test_what_cannot_be_sent_is_not_waited_for(command: Any, error: type[Exception]) -> None:
    resp = Resp(_ignore, _no_bug)
    with pytest.raises(error):
        resp.pack(command)
    with pytest.raises((TypeError, ValueError)):
        resp.pack_all([("ECHO", 1), ("ECHO", None)], _ignore)  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]  # wrong on purpose
    assert not resp.pending


def test_a_callback_that_raises_does_no_other_harm() -> None:
    bugs: list[str] = []
    seen: list[Any] = []

    def fail(_: object) -> None:
        raise ZeroDivisionError

    resp = Resp(fail, lambda _, callback: bugs.append(callback))
    resp.pack(("GET", "k"), fail)
    resp.pack_all([("GET", "k")], fail)
    resp.pack(("GET", "k"), seen.append)
    resp.feed(b":1\r\n:2\r\n" + _push(b"message", 1) + b":3\r\n")
    assert bugs == ["on_reply", "on_replies", "on_pushes"]
    assert seen == [3]


@pytest.mark.parametrize("size", [1, FEED_BYTES])
def test_nothing_is_handed_on_after_close(size: int) -> None:
    """Neither of the same piece nor of a later one, whoever closes."""
    seen: list[Any] = []

    def close(value: object) -> None:
        seen.append(value)
        resp.close()

    resp = Resp(seen.append, _no_bug)
    resp.pack(("GET", "k"), close)
    resp.pack(("GET", "k"), seen.append)
    resp.feed(b":1\r\n$%d\r\n%b\r\n" % (size, b"x" * size) + _push(b"message", 1))
    assert seen == [1]
    assert not resp.pending


parts: Any = st.sampled_from([b"", b"c", "é", 1.5, 7, b"PUBLISH", b"x" * 1023, b"x" * 1024, b"x" * (LARGE_BYTES + 1)])


@given(st.lists(st.tuples(parts, parts, parts), min_size=1, max_size=6))
def test_commands_are_packed_as_hiredis_packs_them(sent: list[tuple[Any, Any, Any]]) -> None:
    resp = Resp(_ignore, _no_bug)
    packed = [bytes(resp.pack_all(sent, _ignore)), *(bytes(resp.pack(command)) for command in sent)]
    pack = cast("Callable[[tuple[Any, ...]], bytes]", hiredis.pack_command)
    assert b"".join(packed) == b"".join(map(pack, [*sent, *sent]))
