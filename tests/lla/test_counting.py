from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.names import AGENT_CHANNEL, ANNOUNCE_CHANNEL
from dynamoth.protocol.envelope import CONTROL, FIRST, FORWARDED, HEARTBEAT, MAGIC, RAW, ROUTE_CHANGED
from dynamoth_lla.counting import PMESSAGE_BYTES, Window
from dynamoth_lla.sampling import SampledWindow
from dynamoth_lla.traffic import Traffic
from tests.lla.harness import publication, push

#: With room for no record, everything is counted by head: the other of two ways to the same result.
BOTH_WAYS = pytest.mark.parametrize("records_max", [1000, 0])


def window(channels_max: int = 1000, records_max: int = 1000, heads_max: int = 1000) -> Window:
    return Window(channels_max, records_max, heads_max)


def id_of(publisher: int) -> bytes:
    return publisher.to_bytes(8, "big")


def traffic(counted: Window, channel: bytes = b"a") -> Traffic:
    return dict(counted.traffic())[channel]


@BOTH_WAYS
def test_messages_and_bytes_are_counted_by_channel_and_publisher(records_max: int) -> None:
    counted = window(records_max=records_max)
    counted.observe([push(b"a", publication(1)), push(b"a", publication(2)), push(b"b", publication(1))])
    counted.observe([push(b"a", publication(1, payload=b""))])
    of = dict(counted.traffic())
    assert (of[b"a"].messages, of[b"a"].size) == of[b"a"].published() == (3, 32 + 32 + 24)
    assert of[b"a"].publishers() == {id_of(1): 2, id_of(2): 1}
    assert of[b"a"].count_publishers() == 2
    assert of[b"b"].published() == (1, 32)


@BOTH_WAYS
@pytest.mark.parametrize("flags", [FORWARDED, HEARTBEAT, CONTROL, FORWARDED | FIRST | ROUTE_CHANGED, FORWARDED | RAW])
def test_copies_heartbeats_and_control_messages_are_not_publications(records_max: int, flags: int) -> None:
    counted = window(records_max=records_max)
    counted.observe([push(b"a", publication(1, flags=flags)), push(b"a", publication(2))])
    of = traffic(counted)
    assert of.published() == (1, 32)
    assert (of.messages, of.size) == (2, 64)
    assert of.publishers() == {id_of(2): 1}
    assert of.count_publishers() == 1


@BOTH_WAYS
def test_flags_that_say_nothing_about_the_load_do_not_hide_a_publication(records_max: int) -> None:
    counted = window(records_max=records_max)
    for flags in (0, FIRST, ROUTE_CHANGED, FIRST | ROUTE_CHANGED):
        counted.observe([push(b"a", publication(1, flags=flags))])
    assert traffic(counted).publishers() == {id_of(1): 4}


PLAIN = [
    b"",
    b"x",
    MAGIC,
    MAGIC + b"\x00",  # shorter than an envelope; whoever it claims to be from, 0 in this case, may be believed
    b"a message as long as any head",
    MAGIC + b"\x80" + bytes(30),
    b"\xd7\x0d\x02\x00" + bytes(30),
    b"\xd7\x0c\x01\x00" + bytes(30),
    b"\xd6\x0d\x01\x00" + bytes(30),
]


@BOTH_WAYS
@pytest.mark.parametrize("data", PLAIN)
def test_plain_messages_are_publications_without_a_publisher(records_max: int, data: bytes) -> None:
    counted = window(records_max=records_max)
    counted.observe([push(b"a", data), push(b"a", publication(7)), push(b"a", data)])
    of = traffic(counted)
    assert of.published() == (of.messages, of.size) == (3, 32 + 2 * len(data))
    assert of.publishers().keys() - {bytes(8)} == {id_of(7)}


@pytest.mark.parametrize("counted", [window(), SampledWindow(1000, 1000, 1000, stride=461, large_bytes=1000)])
def test_announcements_are_handed_on_once_and_other_pushes_passed_by(counted: Window | SampledWindow) -> None:
    other: list[list[Any]] = [[b"subscribe", b"a", 1], [b"message", AGENT_CHANNEL, b"x"], [b"invalidate", None]]
    assert counted.observe(other) == []
    batch = [*other, push(b"a", b"1"), push(ANNOUNCE_CHANNEL, b"one"), push(ANNOUNCE_CHANNEL, b"two")]
    assert counted.observe(batch) == [b"one", b"two"]
    assert counted.observe([push(b"a", b"2")]) == []
    assert {channel: of.messages for channel, of in counted.traffic()} == {b"a": 2}
    assert counted.uncounted_messages == 2


def test_channels_beyond_the_bound_are_added_up() -> None:
    counted = window(channels_max=2)
    counted.observe([push(b"%d" % number, b"1234") for number in range(5)])
    counted.observe([push(b"0", b"1234"), push(b"9", b"1234"), push(AGENT_CHANNEL, b"1234")])
    assert {channel: of.messages for channel, of in counted.traffic()} == {b"0": 2, b"1": 1}
    assert counted.overflow_messages == 4  # our own channels are nobody's load
    assert counted.uncounted_messages == 5


def test_records_beyond_the_bound_are_counted_by_head() -> None:
    counted = window(records_max=10)
    for number in range(100):
        counted.observe([push(b"%d" % (number % 5), publication(number % 20))])
        assert sum(len(log) for log in counted._logs.values()) <= 10 * 16  # pyright: ignore[reportPrivateUsage]
    assert {channel: of.messages for channel, of in counted.traffic()} == {b"%d" % number: 20 for number in range(5)}


def test_heads_of_plain_messages_give_way_first() -> None:
    counted = window(records_max=0, heads_max=100)
    counted.observe([push(b"a", publication(number)) for number in range(10)])
    for number in range(200):
        counted.observe([push(b"a", b"plain %6d" % number)])
    of = traffic(counted)
    assert of.count_publishers() == 10
    assert counted.publishers_uncounted == 0
    assert of.published()[0] == 210


def test_then_publishers_of_the_channels_that_have_most() -> None:
    counted = window(records_max=0, heads_max=100)
    counted.observe([push(b"few", publication(number)) for number in range(5)])
    counted.observe([push(b"many", publication(number)) for number in range(99)])
    of = dict(counted.traffic())
    assert of[b"few"].count_publishers() == 5
    assert of[b"many"].count_publishers() == 0
    assert counted.publishers_uncounted == 99
    assert of[b"many"].published() == (99, 99 * 32)


def test_folding_keeps_copies_apart_from_publications() -> None:
    counted = window(records_max=0, heads_max=10)
    for number in range(50):
        counted.observe([push(b"a", publication(number, flags=FORWARDED)), push(b"a", publication(number))])
    of = traffic(counted)
    assert of.published() == (50, 50 * 32)
    assert (of.messages, of.size) == (100, 100 * 32)
    assert 0 < of.count_publishers() <= 10


messages = st.tuples(
    st.sampled_from([b"a", b"b", b"c", b"d", AGENT_CHANNEL]),
    st.binary(max_size=30)
    | st.binary(max_size=30).map(lambda rest: MAGIC + rest)
    | st.builds(
        publication, st.integers(0, 20), st.just(1), st.binary(max_size=9), st.sampled_from([0, FIRST, FORWARDED])
    ),
)


def is_copy(data: bytes) -> bool:
    """Tell it as slowly and plainly as possible."""
    if len(data) < 4 or not data.startswith(MAGIC):
        return False
    known = data[3] & (FORWARDED | FIRST | ROUTE_CHANGED | HEARTBEAT | CONTROL | RAW) == data[3]
    return known and data[3] & (FORWARDED | HEARTBEAT | CONTROL) != 0


@given(
    st.lists(st.lists(messages, max_size=20), max_size=20), st.integers(1, 5), st.integers(0, 60), st.integers(2, 40)
)
def test_nothing_is_lost_or_counted_twice_whatever_the_bounds(
    batches: list[list[tuple[bytes, bytes]]], channels_max: int, records_max: int, heads_max: int
) -> None:
    counted = window(channels_max, records_max, heads_max)
    expected: Counter[bytes] = Counter()
    published: Counter[bytes] = Counter()
    wire_bytes = 0
    for batch in batches:
        counted.observe([push(*message) for message in batch])
        for channel, data in batch:
            expected[channel] += 1
            published[channel] += not is_copy(data)
            wire_bytes += PMESSAGE_BYTES + len(channel) + len(data)
    seen, seen_bytes = counted.uncounted_messages, counted.uncounted_wire_bytes
    for channel, of in counted.traffic():
        seen += of.messages
        seen_bytes += of.size + of.messages * (PMESSAGE_BYTES + len(channel))
        assert of.messages <= expected[channel]
        assert of.published()[0] <= published[channel]
        if not counted.uncounted_messages:
            assert (of.messages, of.published()[0]) == (expected[channel], published[channel])
        assert sum(of.publishers().values()) <= of.published()[0]
    assert (seen, seen_bytes) == (expected.total(), wire_bytes)
    assert counted.overflow_messages <= counted.uncounted_messages
    told_apart = channels_max if len(batches) * 20 <= records_max else channels_max / 2
    assert counted.uncounted_messages == 0 or len(expected) > told_apart
