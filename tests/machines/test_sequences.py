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
    UNDER_WAY_S_MAX,
    Gap,
    Sequences,
)

P = 7
HOLD_S = 0.5


OWED = (0.0, 0.0)
"""When the previous message was published, and since when messages are owed."""


def previous(now: float, owed: bool) -> tuple[float, float]:
    return (now, 0.0) if owed else (now - 1.0, now)


class Channel:
    """Sequences with a clock; what comes out is kept in order."""

    def __init__(self) -> None:
        self.sequences = Sequences(HOLD_S)
        self.now = 0.0
        self.out: list[bytes | Gap] = []

    def arrive(self, *numbers: int, flags: int = 0, publisher: int = P, owed: bool = True) -> list[bytes | Gap]:
        new: list[bytes | Gap] = []
        for number in numbers:
            new += self.sequences.arrive(publisher, number, flags, b"%d" % number, self.now, *previous(self.now, owed))
        self.out += new
        return new

    def wait(self, seconds: float) -> list[bytes | Gap]:
        self.now += seconds
        new = self.sequences.expire(P, self.now)
        self.out += new
        return new


def payloads(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_delivers_in_order() -> None:
    assert Channel().arrive(5, 6, 7) == payloads(5, 6, 7)


def test_drops_duplicates() -> None:
    assert Channel().arrive(5, 5, 6, 5, 6, 7) == payloads(5, 6, 7)


def test_publishers_do_not_concern_each_other() -> None:
    channel = Channel()
    channel.arrive(5)
    assert channel.arrive(1, 2, publisher=8) == payloads(1, 2)
    assert channel.arrive(6) == payloads(6)


def test_holds_what_came_too_early() -> None:
    channel = Channel()
    assert channel.arrive(1, 3, 5, 4) == payloads(1)
    assert channel.arrive(2) == payloads(2, 3, 4, 5)
    assert channel.sequences.watch(P) is None


def test_reports_a_gap_when_the_wait_is_over() -> None:
    channel = Channel()
    channel.arrive(1, 4, 5)
    assert channel.sequences.watch(P) == HOLD_S
    assert channel.wait(HOLD_S - 0.01) == []
    assert channel.wait(0.01) == [Gap(P, 2, "not arrived in time"), *payloads(4, 5)]
    assert channel.arrive(6) == payloads(6)


def test_what_comes_after_its_gap_was_reported_is_not_delivered() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    channel.wait(HOLD_S)
    assert channel.arrive(2, 4) == payloads(4)


def test_a_message_without_a_number_comes_behind_what_waits() -> None:
    channel = Channel()
    assert channel.sequences.arrive_plain(b"a", 0.0) == [b"a"]
    channel.arrive(1, 3)
    assert channel.sequences.arrive_plain(b"b", 0.0) == []
    assert channel.arrive(2) == [*payloads(2, 3), b"b"]
    channel.arrive(5)
    assert channel.sequences.arrive_plain(b"c", 0.0) == []
    assert channel.wait(HOLD_S) == [Gap(P, 1, "not arrived in time"), *payloads(5), b"c"]


def test_a_message_without_a_number_waits_for_what_came_before_it_only_and_not_for_long() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    channel.sequences.arrive_plain(b"a", 0.0)
    channel.now = HOLD_S / 2
    channel.arrive(1, 3, publisher=8)
    assert channel.wait(HOLD_S / 2) == [Gap(P, 1, "not arrived in time"), *payloads(3), b"a"]
    channel.sequences.arrive_plain(b"b", channel.now)
    channel.now += HOLD_S
    assert channel.arrive(4) == [*payloads(4), b"b"], "whatever the other publisher's waits for"


def test_a_bounded_number_of_messages_without_numbers_waits() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    out = [channel.sequences.arrive_plain(b"%d" % number, 0.0) for number in range(BEHIND_MAX + 2)]
    assert out == [[]] * BEHIND_MAX + [[b"0"], [b"1"]]


def test_a_bounded_number_of_bytes_without_numbers_waits() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    half = bytes(BEHIND_BYTES_MAX // 2)
    out = [channel.sequences.arrive_plain(payload, 0.0) for payload in (half, half, b"", b"x")]
    assert out == [[], [], [], [half]]


def test_every_gap_waits_for_its_own_time() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    channel.now = 0.3
    channel.arrive(5)
    assert channel.wait(0.2) == [Gap(P, 1, "not arrived in time"), *payloads(3)]
    assert channel.sequences.watch(P) == 0.3 + HOLD_S
    assert channel.wait(0.3) == [Gap(P, 1, "not arrived in time"), *payloads(5)]


# A stream whose beginning is in doubt.


def test_a_stream_that_begins_with_a_route_change_waits_for_its_past() -> None:
    channel = Channel()
    assert channel.arrive(5, flags=ROUTE_CHANGED) == []
    assert channel.arrive(6) == []
    assert channel.arrive(4) == payloads(4, 5, 6)


def test_it_may_have_changed_route_several_times() -> None:
    channel = Channel()
    assert channel.arrive(5, flags=ROUTE_CHANGED) == []
    assert channel.arrive(4, flags=ROUTE_CHANGED) == []
    assert channel.arrive(3) == payloads(3, 4, 5)


def test_an_owed_past_that_does_not_come_is_a_gap_in_its_place() -> None:
    channel = Channel()
    channel.arrive(5, flags=ROUTE_CHANGED)
    channel.arrive(6, 7)
    assert channel.wait(HOLD_S) == [Gap(P, None, "not arrived in time"), *payloads(5, 6, 7)]
    assert channel.arrive(8) == payloads(8)


def test_what_comes_faster_shows_that_the_past_is_not_owed() -> None:
    """5 was under way for 0.3 s, 6 for no time: 4 was published 0.2 s before the confirmation, at 1.0."""
    sequences = Sequences(HOLD_S)
    assert sequences.arrive(P, 5, ROUTE_CHANGED, b"5", 1.3, 1.1, 1.0) == []
    assert sequences.arrive(P, 6, 0, b"6", 1.4, 1.0, 1.0) == []
    assert sequences.expire(P, 1.3 + HOLD_S) == payloads(5, 6)


def test_messages_that_do_not_follow_each_other_say_nothing_of_the_past() -> None:
    sequences = Sequences(HOLD_S)
    sequences.arrive(P, 5, ROUTE_CHANGED, b"5", 1.3, 1.1, 1.0)
    sequences.arrive(P, 7, 0, b"7", 1.4, 1.0, 1.0)
    assert sequences.expire(P, 1.3 + HOLD_S) == [Gap(P, None, "not arrived in time"), b"5"]


def test_a_past_that_is_long_ago_is_not_waited_for() -> None:
    """The envelope cannot say how long; nothing is under way for so long."""
    sequences = Sequences(HOLD_S)
    assert sequences.arrive(P, 5, ROUTE_CHANGED, b"5", 100.0, 100.0 - UNDER_WAY_S_MAX, 1.0) == [b"5"]


def test_what_is_missing_and_not_owed_is_no_gap() -> None:
    """A late copy from before the confirmation has opened the stream."""
    channel = Channel()
    channel.arrive(5, owed=False)
    assert channel.arrive(9, owed=False) == payloads(9)
    assert channel.arrive(10, 7) == payloads(10)


def test_what_follows_the_last_subscription_is_not_waited_for() -> None:
    channel = Channel()
    channel.arrive(1, 2)
    channel.sequences.resume()
    assert channel.arrive(3, flags=ROUTE_CHANGED) == payloads(3)


def test_a_past_that_is_not_owed_is_not_waited_for() -> None:
    """It was published before the subscription was confirmed."""
    channel = Channel()
    assert channel.arrive(5, flags=ROUTE_CHANGED, owed=False) == payloads(5)
    assert channel.arrive(4, 6) == payloads(6)


def test_a_heartbeat_of_what_is_not_owed_is_no_gap() -> None:
    channel = Channel()
    assert channel.arrive(4, flags=HEARTBEAT, owed=False) == []
    assert channel.arrive(5) == payloads(5)


def test_nothing_comes_again_in_the_next_subscription() -> None:
    channel = Channel()
    channel.arrive(1, 2, 4)
    channel.sequences.resume()
    assert channel.arrive(1, 2) == []
    assert channel.arrive(4, 5, owed=False) == payloads(4, 5)


def test_a_past_that_comes_too_late_is_dropped_as_its_gap_was_reported() -> None:
    channel = Channel()
    channel.arrive(5, flags=ROUTE_CHANGED)
    channel.wait(HOLD_S)
    assert channel.arrive(4, 5) == []
    assert channel.out == [Gap(P, None, "not arrived in time"), b"5"]


def test_the_first_message_of_all_needs_no_past() -> None:
    assert Channel().arrive(5, flags=FIRST | ROUTE_CHANGED) == payloads(5)


def test_first_opens_an_opening_stream() -> None:
    channel = Channel()
    channel.arrive(5, flags=ROUTE_CHANGED)
    assert channel.arrive(4, flags=FIRST | FORWARDED) == payloads(4, 5)


def test_a_restart_while_opening_loses_nothing_silently() -> None:
    """What was held from before the restart comes out, and what is missing is reported in its place."""
    channel = Channel()
    channel.arrive(5, 7, flags=ROUTE_CHANGED)
    reason = "the publisher began a new sequence"
    assert channel.arrive(9, flags=FIRST) == [Gap(P, None, reason), b"5", Gap(P, 1, reason), b"7", b"9"]


# Restarts of a publisher's numbering.


def test_first_begins_again_without_a_gap() -> None:
    channel = Channel()
    channel.arrive(1, 2)
    assert channel.arrive(100, flags=FIRST) == payloads(100)
    assert channel.arrive(101, 2, 100) == payloads(101)


def test_first_releases_what_was_held_from_before_with_its_gap() -> None:
    channel = Channel()
    channel.arrive(1, 3, 110)
    reason = "the publisher began a new sequence"
    assert channel.arrive(100, flags=FIRST) == [Gap(P, 1, reason), *payloads(3, 100)]
    channel.arrive(*range(101, 110))
    assert channel.out[-1] == b"110"


def test_first_that_is_a_duplicate_restarts_nothing() -> None:
    channel = Channel()
    channel.arrive(1, flags=FIRST)
    channel.arrive(2, 3)
    assert channel.arrive(1, flags=FIRST) == []
    assert channel.arrive(4) == payloads(4)


# Heartbeats.


def test_a_heartbeat_that_tells_nothing_new_is_ignored() -> None:
    channel = Channel()
    channel.arrive(1, 2)
    channel.arrive(2, flags=HEARTBEAT)
    assert channel.sequences.watch(P) is None
    assert channel.arrive(3) == payloads(3)


def test_a_heartbeat_reveals_a_lost_tail() -> None:
    channel = Channel()
    channel.arrive(1, 2)
    assert channel.arrive(4, flags=HEARTBEAT) == []
    assert channel.wait(HOLD_S) == [Gap(P, 2, "not arrived in time")]
    assert channel.arrive(5) == payloads(5)


def test_a_tail_that_comes_after_its_heartbeat_is_delivered() -> None:
    channel = Channel()
    channel.arrive(1)
    channel.arrive(3, flags=HEARTBEAT)
    assert channel.arrive(2, 3) == payloads(2, 3)
    assert channel.wait(HOLD_S) == []
    assert channel.arrive(4) == payloads(4)


def test_a_heartbeat_of_an_unknown_publisher_is_a_gap_of_unknown_size() -> None:
    channel = Channel()
    assert channel.arrive(4, flags=HEARTBEAT) == []
    assert channel.wait(HOLD_S) == [Gap(P, None, "not arrived in time")]
    assert channel.arrive(5) == payloads(5)


def test_a_heartbeat_waits_for_its_message_also_while_the_stream_opens() -> None:
    channel = Channel()
    assert channel.arrive(4, flags=HEARTBEAT) == []
    assert channel.arrive(4) == payloads(4)
    assert channel.wait(HOLD_S) == []


def test_a_heartbeat_reveals_the_lost_tail_of_a_stream_that_opens() -> None:
    channel = Channel()
    channel.arrive(3, flags=ROUTE_CHANGED)
    channel.arrive(4, flags=HEARTBEAT)
    channel.arrive(2)
    assert channel.wait(HOLD_S) == [Gap(P, 1, "not arrived in time")]
    assert channel.out[:2] == payloads(2, 3)


def test_a_heartbeat_and_a_held_message_count_once() -> None:
    channel = Channel()
    channel.arrive(1, 3)
    channel.arrive(5, flags=HEARTBEAT)
    channel.wait(HOLD_S)
    assert channel.out == [b"1", Gap(P, 1, "not arrived in time"), b"3", Gap(P, 2, "not arrived in time")]


# Bounds.


def test_holds_at_most_so_many() -> None:
    channel = Channel()
    channel.arrive(1)
    assert channel.arrive(*range(3, 3 + HELD_MAX)) == []
    released = channel.arrive(3 + HELD_MAX)
    assert released[0] == Gap(P, 1, "too many wait for it")
    assert released[1:] == payloads(*range(3, 4 + HELD_MAX))


def held(channel: Channel) -> int:
    return len(channel.sequences.streams[P].held)


def test_an_opening_stream_holds_at_most_so_many() -> None:
    channel = Channel()
    channel.sequences.arrive(P, 5, ROUTE_CHANGED, b"", 0.0, *OWED)
    for number in range(6, 6 + HELD_MAX + 50):
        channel.sequences.arrive(P, number, ROUTE_CHANGED, b"", 0.0, *OWED)
        if held(channel) > HELD_MAX:
            break
    assert held(channel) <= HELD_MAX


def test_heartbeats_are_held_within_the_bound_as_well() -> None:
    channel = Channel()
    channel.arrive(1)
    for number in range(3, 2 * HELD_MAX + 100, 2):
        channel.sequences.arrive(P, number, HEARTBEAT, b"", 0.0, *OWED)
    assert held(channel) <= HELD_MAX


def test_holding_costs_the_same_however_much_is_held() -> None:
    """A fast publisher whose forwarded copy is late: the subscriber asks after each message until when it waits."""

    def cost_s(messages: int) -> float:
        channel = Channel()
        channel.arrive(1)
        started = process_time()
        for number in range(3, 3 + messages):
            channel.sequences.arrive(P, number, 0, b"", 0.0, *OWED)
            channel.sequences.watch(P)
        return process_time() - started

    few, many = (min(cost_s(size) for _ in range(3)) for size in (1000, 8000))
    assert many < 8 * few * 3, f"8 times the messages cost {many / few:.0f} times as much"


def test_giving_up_many_gaps_costs_the_same_for_each() -> None:
    def cost_s(gaps: int) -> float:
        channel = Channel()
        channel.arrive(1)
        for number in range(3, 3 + 2 * gaps, 2):
            channel.sequences.arrive(P, number, 0, b"", 0.0, *OWED)
        started = process_time()
        channel.wait(HOLD_S)
        return process_time() - started

    few, many = (min(cost_s(size) for _ in range(3)) for size in (600, 4800))
    assert many < 8 * few * 3, f"8 times the gaps cost {many / few:.0f} times as much"


def test_forgets_a_publisher_that_is_idle() -> None:
    channel = Channel()
    channel.arrive(1)
    channel.sequences.forget_idle()
    assert P in channel.sequences.streams
    channel.sequences.forget_idle()
    assert P not in channel.sequences.streams


def test_does_not_forget_a_publisher_that_moves_on_or_is_waited_for() -> None:
    channel = Channel()
    channel.arrive(1)
    channel.sequences.forget_idle()
    channel.arrive(2)
    channel.sequences.forget_idle()
    channel.arrive(4)
    channel.sequences.forget_idle()
    channel.sequences.forget_idle()
    assert channel.arrive(3) == payloads(3, 4)


def test_the_largest_numbers() -> None:
    channel = Channel()
    assert channel.arrive(NUMBER_MAX - 1, NUMBER_MAX, NUMBER_MAX) == payloads(NUMBER_MAX - 1, NUMBER_MAX)
    assert channel.arrive(NUMBER_MAX, flags=HEARTBEAT) == []


# Numbers that somebody forges in the name of a publisher.

FAR = HELD_MAX + 100


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
@pytest.mark.parametrize("owed", [True, False])
def test_a_jump_far_ahead_of_a_live_publisher_is_refused(flags: int, owed: bool) -> None:
    channel = Channel()
    channel.arrive(1)
    assert channel.arrive(FAR, flags=flags, owed=owed) == []
    assert channel.arrive(2) == payloads(2)
    [gap] = channel.wait(HOLD_S)
    assert isinstance(gap, Gap)
    assert "refused" in gap.reason
    assert channel.arrive(3) == payloads(3)


def test_a_jump_far_ahead_of_a_silent_publisher_is_reported_and_so_is_what_comes_below_it() -> None:
    channel = Channel()
    channel.arrive(1)
    channel.arrive(FAR)
    assert channel.wait(HOLD_S) == [Gap(P, FAR - 2, "not arrived in time"), b"%d" % FAR]
    assert channel.arrive(2) == [], "as a late copy"
    channel.wait(LATE_S + 0.1)
    [gap] = channel.arrive(3, 4, 5)
    assert isinstance(gap, Gap)
    assert gap.count is None
    channel.wait(LATE_S + 0.1)
    assert len(channel.arrive(6)) == 1, "again, as long as it goes on"


def test_a_first_message_far_ahead_is_believed_without_a_gap_when_its_publisher_was_silent() -> None:
    """So the numbers of a channel go on that a publisher had forgotten, and which has become its busiest meanwhile."""
    channel = Channel()
    channel.arrive(1)
    assert channel.arrive(FAR, flags=FIRST) == []
    assert channel.wait(HOLD_S) == payloads(FAR)


@pytest.mark.parametrize("begins", ["late", "behind a gap"])
def test_what_an_agent_forwards_late_is_no_gap(begins: str) -> None:
    """It hung, or a flood delayed it: nobody has forged anything."""
    channel = Channel()
    if begins == "late":
        channel.arrive(5, owed=False)
    else:
        channel.arrive(1, 5)
        channel.wait(HOLD_S)
    channel.wait(LATE_S + 0.1)
    assert channel.arrive(1, 2, 3, 4, flags=FORWARDED) == []
    assert channel.arrive(6) == payloads(6)


def test_duplicates_are_no_gap_however_late() -> None:
    channel = Channel()
    channel.arrive(1, 2, 3)
    channel.wait(LATE_S + 0.1)
    assert channel.arrive(1, 2, 3) == []


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
