"""Order, duplicates and gaps of one channel."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamoth.protocol.envelope import FIRST, FORWARDED, HEARTBEAT, ROUTE_CHANGED, SEQUENCE_MAX
from dynamoth_client.machines.sequences import (
    BEHIND_BYTES_MAX,
    BEHIND_MAX,
    HELD_MAX,
    LATE_S,
    NUMBER_MAX,
    Gap,
    Sequences,
)

P = 7
HOLD_S = 0.5
DUE = (0.0, 0.0)
"""When the previous message was published, and since when messages are due."""


class Channel:
    """Sequences with a clock; what comes out is kept in order."""

    def __init__(self) -> None:
        self.sequences = Sequences(HOLD_S)
        self.now = 0.0
        self.out: list[bytes | Gap] = []

    def arrive(self, *numbers: int, flags: int = 0, publisher: int = P, due: bool = True) -> list[bytes | Gap]:
        new: list[bytes | Gap] = []
        previous = (self.now, 0.0) if due else (self.now - 1.0, self.now)
        for number in numbers:
            new += self.sequences.arrive(publisher, number, flags, b"%d" % number, self.now, *previous)
        self.out += new
        return new

    def wait(self, seconds: float) -> list[bytes | Gap]:
        self.now += seconds
        new = self.sequences.expire(P, self.now)
        self.out += new
        return new


def payloads(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def missed(count: int | None, reason: str = "not arrived in time") -> Gap:
    return Gap(P, count, reason)


RESTARTED = "the publisher began a new sequence"
FAR = HELD_MAX + 100
"""Further ahead than a live publisher can be."""

STORIES: dict[str, tuple[list[float | tuple[int, ...]], list[int | Gap]]] = {
    "what comes after its gap is not delivered": ([(0, 1, 3), HOLD_S, (0, 2, 4)], [1, missed(1), 3, 4]),
    "duplicates are no gap, however late": ([(0, 1, 2, 3), LATE_S + 0.1, (0, 1, 2, 3)], [1, 2, 3]),
    "the largest numbers": ([(0, NUMBER_MAX - 1, NUMBER_MAX), (HEARTBEAT, NUMBER_MAX)], [NUMBER_MAX - 1, NUMBER_MAX]),
    # A stream whose beginning is in doubt.
    "a past that does not come": ([(ROUTE_CHANGED, 5), (0, 6, 7), HOLD_S, (0, 8)], [missed(None), 5, 6, 7, 8]),
    "a past that comes too late": ([(ROUTE_CHANGED, 5), HOLD_S, (0, 4, 5)], [missed(None), 5]),
    "the first message of all needs no past": ([(FIRST | ROUTE_CHANGED, 5)], [5]),
    "a restart while opening loses nothing silently": (
        [(ROUTE_CHANGED, 5, 7), (FIRST, 9)],
        [missed(None, RESTARTED), 5, missed(1, RESTARTED), 7, 9],
    ),
    # Restarts of a publisher's numbering.
    "FIRST begins again without a gap": ([(0, 1, 2), (FIRST, 100), (0, 101, 2, 100)], [1, 2, 100, 101]),
    "FIRST releases what was held, with its gap": (
        [(0, 1, 3, 110), (FIRST, 100), (0, *range(101, 110))],
        [1, missed(1, RESTARTED), 3, *range(100, 111)],
    ),
    "a duplicate FIRST restarts nothing": ([(FIRST, 1), (0, 2, 3), (FIRST, 1), (0, 4)], [1, 2, 3, 4]),
    "FIRST far ahead of a silent publisher": ([(0, 1), (FIRST, FAR), HOLD_S], [1, FAR]),
    # Heartbeats.
    "a heartbeat without news": ([(0, 1, 2), (HEARTBEAT, 2), HOLD_S, (0, 3)], [1, 2, 3]),
    "a heartbeat reveals a lost tail": ([(0, 1, 2), (HEARTBEAT, 4), HOLD_S, (0, 5)], [1, 2, missed(2), 5]),
    "a tail that comes after its heartbeat": ([(0, 1), (HEARTBEAT, 3), (0, 2, 3), HOLD_S, (0, 4)], [1, 2, 3, 4]),
    "a heartbeat of an unknown publisher": ([(HEARTBEAT, 4), HOLD_S, (0, 5)], [missed(None), 5]),
    "a heartbeat and its message open the stream": ([(HEARTBEAT, 4), (0, 4), HOLD_S], [4]),
    "the lost tail of a stream that opens": ([(ROUTE_CHANGED, 3), (HEARTBEAT, 4), (0, 2), HOLD_S], [2, 3, missed(1)]),
    "a heartbeat and a held message count once": ([(0, 1, 3), (HEARTBEAT, 5), HOLD_S], [1, missed(1), 3, missed(2)]),
}
"""What happens: numbers that arrive (behind their flags), or seconds that pass; and what comes out."""


@pytest.mark.parametrize(("steps", "expected"), STORIES.values(), ids=STORIES)
def test_what_comes_out_of_a_stream(steps: list[float | tuple[int, ...]], expected: list[int | Gap]) -> None:
    channel = Channel()
    for step in steps:
        if isinstance(step, tuple):
            channel.arrive(*step[1:], flags=step[0])
        else:
            channel.wait(step)
    assert channel.out == [b"%d" % each if isinstance(each, int) else each for each in expected]


def test_a_message_without_a_number_comes_behind_what_waits() -> None:
    channel = Channel()
    assert channel.sequences.arrive_plain(b"a", 0.0) == [b"a"]
    channel.arrive(1, 3)
    assert channel.sequences.arrive_plain(b"b", 0.0) == []
    assert channel.arrive(2) == [*payloads(2, 3), b"b"]
    channel.arrive(5)
    assert channel.sequences.arrive_plain(b"c", 0.0) == []
    assert channel.wait(HOLD_S) == [missed(1), *payloads(5), b"c"]


def test_a_message_without_a_number_waits_for_what_came_before_it_only_and_not_for_long() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    channel.sequences.arrive_plain(b"a", 0.0)
    channel.now = HOLD_S / 2
    channel.arrive(1, 3, publisher=8)
    assert channel.wait(HOLD_S / 2) == [missed(1), *payloads(3), b"a"]
    channel.sequences.arrive_plain(b"b", channel.now)
    channel.now += HOLD_S
    assert channel.arrive(4) == [*payloads(4), b"b"], "whatever the other publisher's waits for"


def test_a_bounded_number_of_messages_and_bytes_without_numbers_waits() -> None:
    half = bytes(BEHIND_BYTES_MAX // 2)
    many = payloads(*range(BEHIND_MAX + 2))
    for arriving, released in ((many, many[:2]), ([half, half, b"", b"x"], [half])):
        channel = Channel()
        channel.arrive(1, 3)
        out = [channel.sequences.arrive_plain(payload, 0.0) for payload in arriving]
        assert out == [[]] * (len(arriving) - len(released)) + [[payload] for payload in released]


def test_every_gap_waits_for_its_own_time() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    channel.now = 0.3
    channel.arrive(5)
    assert channel.arrive(1, 2, publisher=8) == payloads(1, 2), "publishers do not concern each other"
    assert channel.sequences.watch(P) == HOLD_S
    assert channel.wait(0.19) == []
    assert channel.wait(0.01) == [missed(1), *payloads(3)]
    assert channel.sequences.watch(P) == 0.3 + HOLD_S
    assert channel.wait(0.3) == [missed(1), *payloads(5)]


# A stream whose beginning is in doubt.


def test_a_quick_message_proves_that_nothing_is_missing_before_a_slow_one() -> None:
    """5 was under way for 0.3 s, 6 for no time: 4 was published 0.2 s before the confirmation."""
    sequences = Sequences(HOLD_S)
    assert sequences.arrive(P, 5, ROUTE_CHANGED, b"5", 1.3, 1.1, 1.0) == []
    assert sequences.arrive(P, 6, 0, b"6", 1.4, 1.0, 1.0) == payloads(5, 6)


def test_a_message_that_does_not_follow_proves_nothing() -> None:
    sequences = Sequences(HOLD_S)
    assert sequences.arrive(P, 5, ROUTE_CHANGED, b"5", 1.3, 1.1, 1.0) == []
    assert sequences.arrive(P, 7, 0, b"7", 1.4, 1.0, 1.0) == []
    assert sequences.expire(P, 1.3 + HOLD_S) == [missed(None), b"5"]


def test_what_is_missing_and_not_due_is_no_gap() -> None:
    """A late copy from before the confirmation has opened the stream."""
    channel = Channel()
    channel.arrive(5, due=False)
    assert channel.arrive(9, due=False) == payloads(9)
    assert channel.arrive(10, 7) == payloads(10)


def test_a_heartbeat_of_what_is_not_owed_is_no_gap() -> None:
    channel = Channel()
    assert channel.arrive(4, flags=HEARTBEAT, due=False) == []
    assert channel.arrive(5) == payloads(5)


def test_nothing_comes_again_in_the_next_subscription_and_nothing_is_waited_for() -> None:
    channel = Channel()
    channel.arrive(1, 2, 4)
    channel.sequences.resume()
    assert channel.arrive(1, 2) == []
    assert channel.arrive(3, flags=ROUTE_CHANGED) == payloads(3)
    assert channel.arrive(4, 5, due=False) == payloads(4, 5)


# Bounds.


def test_holds_at_most_so_many() -> None:
    channel = Channel()
    channel.arrive(1)
    assert channel.arrive(*range(3, 3 + HELD_MAX)) == []
    released = channel.arrive(3 + HELD_MAX)
    assert released[0] == Gap(P, 1, "too many wait for it")
    assert released[1:] == payloads(*range(3, 4 + HELD_MAX))


@pytest.mark.parametrize(("flags", "step"), [(ROUTE_CHANGED, 1), (HEARTBEAT, 2)], ids=["opening", "heartbeats"])
def test_what_opens_a_stream_and_heartbeats_are_held_within_the_bound(flags: int, step: int) -> None:
    channel = Channel()
    if flags == HEARTBEAT:
        channel.arrive(1)
    held: list[int] = []
    for number in range(5, 5 + step * (HELD_MAX + 50), step):
        channel.sequences.arrive(P, number, flags, b"", 0.0, *DUE)
        held.append(len(channel.sequences.streams[P].held))
    assert HELD_MAX / 2 < max(held) <= HELD_MAX


def test_holding_and_giving_up_cost_the_same_however_much_is_held() -> None:
    """A fast publisher whose forwarded copy is late: the subscriber asks after each message until when it waits."""

    def costs_s(messages: int, step: int) -> tuple[float, float]:
        channel = Channel()
        channel.arrive(1)
        started = process_time()
        for number in range(3, 3 + step * messages, step):
            channel.sequences.arrive(P, number, 0, b"", 0.0, *DUE)
            channel.sequences.watch(P)
        held = process_time()
        channel.wait(HOLD_S)
        return held - started, process_time() - held

    for step, which, what in ((1, 0, "messages"), (2, 1, "gaps")):
        few, many = (min(costs_s(size, step)[which] for _ in range(3)) for size in (600, 4800))
        assert many < 8 * few * 3, f"8 times the {what} cost {many / few:.0f} times as much"


def test_forgets_a_publisher_that_is_idle_and_none_that_moves_on_or_is_waited_for() -> None:
    channel = Channel()
    for number in (1, 2, 4):
        channel.arrive(number)
        channel.sequences.forget_idle()
    channel.sequences.forget_idle()
    assert channel.arrive(3) == payloads(3, 4)
    channel.sequences.forget_idle()
    assert P in channel.sequences.streams
    channel.sequences.forget_idle()
    assert P not in channel.sequences.streams


# Numbers that somebody forges in the name of a publisher.


@pytest.mark.parametrize("flags", [0, FIRST, ROUTE_CHANGED, HEARTBEAT])
@pytest.mark.parametrize("known", [True, False])
def test_numbers_that_no_publisher_reaches_are_refused(flags: int, known: bool) -> None:
    channel = Channel()
    if known:
        channel.arrive(1)
    assert channel.arrive(2**47, SEQUENCE_MAX, flags=flags) == []
    assert channel.wait(HOLD_S) == []
    assert channel.arrive(2) == payloads(2)


@pytest.mark.parametrize("flags", [0, FIRST, HEARTBEAT])
@pytest.mark.parametrize("due", [True, False])
def test_a_jump_far_ahead_of_a_live_publisher_is_refused(flags: int, due: bool) -> None:
    channel = Channel()
    channel.arrive(1)
    assert channel.arrive(FAR, flags=flags, due=due) == []
    assert channel.arrive(2) == payloads(2)
    [gap] = channel.wait(HOLD_S)
    assert isinstance(gap, Gap)
    assert "refused" in gap.reason
    assert channel.arrive(3) == payloads(3)


def test_a_jump_far_ahead_of_a_silent_publisher_is_reported_and_so_is_what_comes_below_it() -> None:
    channel = Channel()
    channel.arrive(1)
    channel.arrive(FAR)
    assert channel.wait(HOLD_S) == [missed(FAR - 2), b"%d" % FAR]
    assert channel.arrive(2) == [], "as a late copy"
    channel.wait(LATE_S + 0.1)
    [gap] = channel.arrive(3, 4, 5)
    assert isinstance(gap, Gap)
    assert gap.count is None
    channel.wait(LATE_S + 0.1)
    assert len(channel.arrive(6)) == 1, "again, as long as it goes on"


@pytest.mark.parametrize("flags", [0, FIRST])
def test_who_moves_a_stream_ahead_again_and_again_does_not_silence_the_loss(flags: int) -> None:
    channel = Channel()
    channel.arrive(1)
    gaps = 0
    for number in range(2, 62):
        if number % 5 == 0:
            channel.arrive(1000 * number, flags=flags, due=False)
        gaps += len(channel.arrive(number)) if number > 5 else 0
        channel.wait(1.0)
    assert gaps == 60 // LATE_S - 1


@pytest.mark.parametrize("begins", ["late", "behind a gap"])
def test_what_an_agent_forwards_late_is_no_gap(begins: str) -> None:
    """It hung, or a flood delayed it: nobody has forged anything."""
    channel = Channel()
    if begins == "late":
        channel.arrive(5, due=False)
    else:
        channel.arrive(1, 5)
        channel.wait(HOLD_S)
    channel.wait(LATE_S + 0.1)
    assert channel.arrive(1, 2, 3, 4, flags=FORWARDED) == []
    assert channel.arrive(6) == payloads(6)


# Any interleaving.


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Two FIFO copies of messages 1 to n, interleaved in any way."""
    length = draw(st.integers(1, 25))
    ahead = [0, 0]
    order: list[int] = []
    for which in draw(st.lists(st.integers(0, 1), max_size=2 * length)) + [0] * length + [1] * length:
        if ahead[which] < length:
            ahead[which] += 1
            order.append(ahead[which])
    return length, order


@given(interleavings(), st.sampled_from((0, FIRST)), st.sets(st.integers(2, 25)))
def test_two_copies_in_any_interleaving_are_delivered_once_and_in_order(
    copies: tuple[int, list[int]], first: int, changed: set[int]
) -> None:
    length, order = copies
    channel = Channel()
    for number in order:
        flags = (first if number == 1 else 0) | (ROUTE_CHANGED if number in changed else 0)
        channel.arrive(number, flags=flags)
    assert channel.out == payloads(*range(1, length + 1))


@given(st.integers(2, 20).flatmap(lambda n: st.permutations(range(1, n + 1))))
def test_any_order_after_the_first_message_comes_out_in_order(numbers: list[int]) -> None:
    channel = Channel()
    channel.arrive(0, *numbers)
    assert channel.out == payloads(*range(len(numbers) + 1))
    assert channel.sequences.watch(P) is None


arrivals = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.sampled_from((0, 0, 0, FIRST, ROUTE_CHANGED, HEARTBEAT, FIRST | ROUTE_CHANGED)),
        st.sampled_from((0.0, 0.1, HOLD_S)),
    ),
    max_size=40,
)


@given(arrivals)
@example([(1, 0, 0.0), (11, 0, 0.0), (12, 0, 0.0), (12, FIRST, 0.0)])
def test_whatever_comes_nothing_is_delivered_twice_or_out_of_order(steps: list[tuple[int, int, float]]) -> None:
    channel = Channel()
    for number, flags, pause_s in steps:
        channel.arrive(number, flags=flags)
        channel.wait(pause_s)
    channel.wait(HOLD_S)
    delivered: list[Any] = [int(outcome) for outcome in channel.out if isinstance(outcome, bytes)]
    assert delivered == sorted(set(delivered))
    assert channel.sequences.watch(P) is None
    assert all(gap.count is None or gap.count > 0 for gap in channel.out if isinstance(gap, Gap))
