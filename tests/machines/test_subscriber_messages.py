"""What a subscriber machine delivers, and what it makes of hostile messages."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.machine.events import Pushed
from dynamoth.plan.plan import Route, single
from dynamoth.protocol.control import LossNotice, ObservationGap
from dynamoth.protocol.envelope import CONTROL, FIRST, FORWARDED, MAGIC, RAW, ROUTE_CHANGED, seal
from dynamoth_client.machines.sequences import STREAMS_MAX
from dynamoth_client.machines.subscriber.events import Deliver, GapDetected
from tests.machines.helpers import ACTIVE, PLAN_0, C, channel_at, control, message, only
from tests.machines.listener import OPTIONS, Listener, delivered

TO_S2 = Route(1, single("s2"))
COPY = FORWARDED | ROUTE_CHANGED


def test_delivers_a_batch_of_several_channels_in_order_and_what_is_expected_at_once() -> None:
    other = channel_at("s1", 1)
    listener = Listener().confirmed()
    listener.verify(listener.subscribe(other), PLAN_0, other)
    batch = [(C, message(1)), (other, message(1)), (C, message(2)), (C, b"raw")]
    actions = listener.tell(Pushed("s1", [[b"message", channel, data] for channel, data in batch]))
    delivery = [pair for deliver in only(Deliver, actions) for pair in deliver.messages]
    assert delivery == [(C, b"m1"), (other, b"m1"), (C, b"m2"), (C, b"raw")]
    assert listener.push("s1", C, message(3), message(4), b"raw") == [Deliver([(C, b"m3"), (C, b"m4"), (C, b"raw")])]


def test_a_gap_is_reported_when_nothing_comes() -> None:
    listener = Listener().confirmed()
    listener.push("s1", C, message(1), message(4))
    assert listener.pass_time(OPTIONS.hold_s_max - 0.01) == []
    assert listener.pass_time(0.02) == [GapDetected(C, 7, 2, "not arrived in time"), Deliver([(C, b"m4")])]


def test_deliveries_and_gaps_keep_their_order_within_a_batch() -> None:
    listener = Listener().confirmed()
    loss = control(LossNotice(C, 3))
    actions = listener.push("s1", C, message(1), loss, message(2))
    assert [type(action) for action in actions] == [Deliver, GapDetected, Deliver]
    assert actions[1] == GapDetected(C, None, 3, "the agent of a server could not forward messages")


# A publisher of which the subscriber has not heard yet, during a move (G1).


def newcomer(*arrivals: tuple[str, bytes]) -> tuple[list[bytes], list[GapDetected]]:
    """Let messages come in this order while s1 is being left for s2; return deliveries and gaps."""
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    actions: list[Any] = [action for link, data in arrivals for action in listener.push(link, C, data)]
    actions += listener.pass_time(2 * OPTIONS.hold_s_max)
    return delivered(actions), only(GapDetected, actions)


NEWCOMERS: dict[str, list[tuple[str, bytes]]] = {
    # m2 was published at s2 before the SUBSCRIBE there, and its copy comes to s1 after m3 came to s2.
    "before it joined": [("s2", message(3)), ("s1", message(2, flags=FORWARDED)), ("s1", message(3, flags=FORWARDED))],
    "the first of all": [("s2", message(3)), ("s1", message(2, flags=COPY | FIRST))],
    "before a change of route": [("s2", message(3, flags=ROUTE_CHANGED)), ("s1", message(2))],
}


@pytest.mark.parametrize("arrivals", NEWCOMERS.values(), ids=NEWCOMERS)
def test_what_was_published_at_another_place_is_not_lost(arrivals: list[tuple[str, bytes]]) -> None:
    assert newcomer(*arrivals) == ([b"m2", b"m3"], [])


def test_what_is_lost_is_reported_in_its_place() -> None:
    """m2 was published after the confirmation, and the agent that was to forward it died."""
    out = newcomer(("s2", message(3)), ("s2", message(4)))
    assert out == ([b"m3", b"m4"], [GapDetected(C, 7, None, "not arrived in time")])


@given(st.integers(1, 8), st.integers(0, 8), st.randoms(use_true_random=False))
def test_a_whole_and_a_late_copy_of_a_stream_in_any_interleaving(length: int, missed: int, random: Any) -> None:
    """s1 gets every message; s2 those after the first ``missed``, when the subscriber had joined it."""
    ahead = {"s1": 0, "s2": min(missed, length)}
    arrivals: list[tuple[str, bytes]] = []
    while open_ := [link for link, number in ahead.items() if number < length]:
        link = random.choice(open_)
        ahead[link] += 1
        arrivals.append((link, message(ahead[link], flags=FORWARDED if link == "s1" else 0)))
    assert newcomer(*arrivals) == ([b"m%d" % number for number in range(1, length + 1)], [])


# Plain messages.


def raw_copy(server: str, number: int, payload: bytes) -> bytes:
    """The copy that the dispatcher of ``server`` makes of a raw message (see ``DispatcherMachine``)."""
    publisher = zlib.crc32(server.encode()) << 32 | 5
    return seal(publisher, number, 1, payload, RAW | FORWARDED | (FIRST if number == 1 else 0))


def test_a_raw_message_may_come_twice_while_its_channel_moves() -> None:
    """It has no number, so nothing distinguishes it from its forwarded copy; losing one would be worse."""
    listener = Listener().confirmed().moving(ACTIVE, TO_S2)
    actions = listener.push("s1", C, b"plain")
    actions += listener.push("s2", C, raw_copy("s1", 1, b"plain"))
    assert delivered(actions) == [b"plain", b"plain"]
    copy = raw_copy("s3", 1, b"of elsewhere")
    assert delivered([*listener.push("s1", C, copy), *listener.push("s2", C, copy)]) == [b"of elsewhere"]


# Hostile messages.


@pytest.mark.parametrize(
    ("data", "counter"),
    [
        (MAGIC, "malformed_messages"),
        (seal(1, 1, 0, b"", 0x80), "malformed_messages"),
        (seal(1, 1, 0, b"\xc1", CONTROL), "malformed_messages"),
        (seal(1, 1, 0, b"", CONTROL), "malformed_messages"),
        (control(ObservationGap("s1")), "unexpected_messages"),
        (control(LossNotice(b"other", 1)), "unexpected_messages"),
    ],
)
def test_malformed_and_unexpected_messages_are_counted(data: bytes, counter: str) -> None:
    listener = Listener().confirmed()
    assert only(GapDetected, listener.push("s1", C, data)) == []
    assert listener.counters[counter] == 1


def test_messages_that_wait_leave_no_wish_behind_each() -> None:
    """Ten thousand messages that wait for one are one thing to look after, not ten thousand that renew themselves."""
    listener = Listener().confirmed()
    listener.push("s1", C, message(1))
    for number in range(3, 3000):
        listener.push("s1", C, message(number))
    assert len(listener.subscriber._timers) < 100  # pyright: ignore[reportPrivateUsage]  # no other way to see it


def test_remembers_a_bounded_number_of_publishers() -> None:
    """Anyone can invent publishers."""
    listener = Listener().confirmed()
    for publisher in range(STREAMS_MAX + 10):
        listener.push("s1", C, message(1, publisher=publisher))
    streams = listener.subscriber._register.current[C].sequences.streams  # pyright: ignore[reportPrivateUsage]
    assert len(streams) == STREAMS_MAX
    assert STREAMS_MAX + 9 in streams, "the newest one"


def test_the_timer_of_a_subscription_that_has_ended_leaves_the_next_one_alone() -> None:
    listener = Listener().confirmed()
    listener.push("s1", C, message(1), message(4))
    listener.pass_time(OPTIONS.hold_s_max / 2)
    listener.unsubscribe()
    listener.acknowledged(b"unsubscribe")
    listener.verify(listener.subscribe(), PLAN_0)
    listener.pass_time(0.01)
    assert listener.push("s1", C, message(7, flags=COPY)) == []
    actions = listener.pass_time(OPTIONS.hold_s_max * 0.6) + listener.pass_time(OPTIONS.hold_s_max)
    assert only(GapDetected, actions) and delivered(actions) == [b"m7"]
