from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.envelope import CONTROL, FIRST, FORWARDED, HEARTBEAT, MAGIC, RAW, ROUTE_CHANGED
from dynamoth.names import AGENT_CHANNEL, ANNOUNCE_CHANNEL
from dynamoth_lla.window import PMESSAGE_BYTES, Window, are_ordinary, publications, publishers, split
from tests.lla.harness import publication, push


def window(channels_max: int = 1000, heads_max: int = 1000) -> Window:
    return Window(channels_max, heads_max)


def published(counted: Window, channel: bytes) -> int:
    return publications(counted.counts[channel])


def id_of(publisher: int) -> bytes:
    return publisher.to_bytes(8, "big")


def test_messages_and_bytes_are_counted_by_channel_and_publisher() -> None:
    counted = window()
    counted.observe([push(b"a", publication(1)), push(b"a", publication(2)), push(b"b", publication(1))])
    counted.observe([push(b"a", publication(1, payload=b""))])
    assert split(published(counted, b"a")) == (3, 32 + 32 + 24)
    found = {id_: split(count) for id_, count in publishers(counted.counts[b"a"]).items()}
    assert found == {id_of(1): (2, 56), id_of(2): (1, 32)}
    assert split(published(counted, b"b")) == (1, 32)


def test_copies_heartbeats_and_control_messages_are_not_publications() -> None:
    counted = window()
    for flags in (FORWARDED, HEARTBEAT, CONTROL, FORWARDED | FIRST | ROUTE_CHANGED, FORWARDED | RAW):
        counted.observe([push(b"a", publication(1, flags=flags))])
    assert split(published(counted, b"a")) == (0, 0)
    assert publishers(counted.counts[b"a"]) == {}
    assert split(sum(counted.counts[b"a"].values()))[0] == 5


def test_flags_that_say_nothing_about_the_load_do_not_hide_a_publication() -> None:
    counted = window()
    for flags in (0, FIRST, ROUTE_CHANGED, FIRST | ROUTE_CHANGED):
        counted.observe([push(b"a", publication(1, flags=flags))])
    assert {id_: split(count)[0] for id_, count in publishers(counted.counts[b"a"]).items()} == {id_of(1): 4}


def test_plain_messages_are_publications_without_a_publisher() -> None:
    counted = window()
    plain = [b"", b"x", MAGIC, publication(1)[:11], b"a message as long as any head", MAGIC + b"\x80" + bytes(30)]
    counted.observe([push(b"a", data) for data in plain])
    assert split(published(counted, b"a")) == (6, sum(map(len, plain)))
    assert publishers(counted.counts[b"a"]) == {}


def test_other_pushes_are_passed_by() -> None:
    counted = window()
    other: list[list[Any]] = [[b"subscribe", b"a", 1], [b"message", AGENT_CHANNEL, b"x"], [b"invalidate", None]]
    assert counted.observe([*other, push(b"a", publication(1)), *other]) == []
    assert list(counted.counts) == [b"a"]


def test_announcements_are_handed_on_once() -> None:
    counted = window()
    batch = [push(b"a", b"1"), push(ANNOUNCE_CHANNEL, b"one"), push(ANNOUNCE_CHANNEL, b"two")]
    assert counted.observe(batch) == [b"one", b"two"]
    assert counted.observe([push(b"a", b"2")]) == []
    assert counted.uncounted_messages == 2
    assert counted.uncounted_wire_bytes == 6 + 2 * (PMESSAGE_BYTES + len(ANNOUNCE_CHANNEL))


def test_channels_beyond_the_bound_are_added_up() -> None:
    counted = window(channels_max=2)
    counted.observe([push(b"%d" % number, b"1234") for number in range(5)])
    counted.observe([push(b"0", b"1234"), push(b"9", b"1234"), push(AGENT_CHANNEL, b"1234")])
    assert set(counted.counts) == {b"0", b"1"}
    assert split(counted.overflow) == (4, 16)  # our own channels are nobody's load
    assert counted.uncounted_messages == 5


def test_heads_of_plain_messages_give_way_first() -> None:
    counted = window(heads_max=100)
    counted.observe([push(b"a", publication(number)) for number in range(10)])
    for number in range(200):
        counted.observe([push(b"a", b"plain %6d" % number)])
    assert len(publishers(counted.counts[b"a"])) == 10
    assert counted.publishers_uncounted == 0
    assert split(published(counted, b"a"))[0] == 210
    assert len(counted.counts[b"a"]) <= 101


def test_then_publishers_of_the_channels_that_have_most() -> None:
    counted = window(heads_max=100)
    counted.observe([push(b"few", publication(number)) for number in range(5)])
    counted.observe([push(b"many", publication(number)) for number in range(99)])
    assert len(publishers(counted.counts[b"few"])) == 5
    assert len(publishers(counted.counts[b"many"])) == 0
    assert counted.publishers_uncounted == 99
    assert split(published(counted, b"many")) == (99, 99 * 32)


def test_folding_keeps_copies_apart_from_publications() -> None:
    counted = window(heads_max=10)
    for number in range(50):
        counted.observe([push(b"a", publication(number, flags=FORWARDED)), push(b"a", publication(number))])
    assert split(published(counted, b"a")) == (50, 50 * 32)
    assert split(sum(counted.counts[b"a"].values())) == (100, 100 * 32)


@pytest.mark.parametrize(
    ("messages", "ordinary"),
    [
        ([publication(1), publication(2), publication(2, 2)], True),
        ([], True),
        ([publication(1), publication(1, flags=FIRST)], False),
        ([publication(1), publication(1, flags=FORWARDED)], False),
        ([publication(1), b"a plain message"], False),
        ([b"short"], False),
        ([b""], False),
        ([publication(1)[:11], publication(1)], False),
        ([b"\xd7\x0d\x02\x00" + bytes(30)], False),
        ([b"\xd7\x0c\x01\x00" + bytes(30)], False),
        ([b"\xd6\x0d\x01\x00" + bytes(30)], False),
    ],
)
def test_ordinary_heads_are_each_another_publishers_and_without_flags(messages: list[bytes], ordinary: bool) -> None:
    counted = window()
    counted.observe([push(b"a", message) for message in messages])
    assert are_ordinary(counted.counts.get(b"a", {})) == ordinary


def test_folded_heads_are_not_ordinary() -> None:
    counted = window(heads_max=4)
    for flags in (0, FORWARDED):
        counted.observe([push(b"a", publication(number, flags=flags)) for number in range(10)])
    assert not are_ordinary(counted.counts[b"a"])


messages = st.tuples(
    st.sampled_from([b"a", b"b", b"c", b"d", AGENT_CHANNEL]),
    st.binary(max_size=30)
    | st.builds(
        publication, st.integers(0, 20), st.just(1), st.binary(max_size=9), st.sampled_from([0, FIRST, FORWARDED])
    ),
)


@given(st.lists(st.lists(messages, max_size=20), max_size=20), st.integers(1, 5), st.integers(2, 40))
def test_nothing_is_lost_or_counted_twice_whatever_the_bounds(
    batches: list[list[tuple[bytes, bytes]]], channels_max: int, heads_max: int
) -> None:
    counted = window(channels_max, heads_max)
    expected: Counter[bytes] = Counter()
    wire_bytes = 0
    for batch in batches:
        counted.observe([push(*message) for message in batch])
        expected.update(channel for channel, _ in batch)
        wire_bytes += sum(PMESSAGE_BYTES + len(channel) + len(data) for channel, data in batch)
        assert len(counted.counts) <= channels_max
    seen_bytes = counted.uncounted_wire_bytes
    for channel, heads in counted.counts.items():
        count, size = split(sum(heads.values()))
        assert count <= expected[channel]
        seen_bytes += size + count * (PMESSAGE_BYTES + len(channel))
    assert seen_bytes == wire_bytes
    assert sum(split(sum(heads.values()))[0] for heads in counted.counts.values()) + counted.uncounted_messages == sum(
        expected.values()
    )
    assert split(counted.overflow)[0] <= counted.uncounted_messages
