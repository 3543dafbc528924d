"""Windows of busy servers: what is exact, and how far estimates are from the truth."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.names import AGENT_CHANNEL, ANNOUNCE_CHANNEL
from dynamoth.protocol.envelope import FORWARDED
from dynamoth_lla.counting import PMESSAGE_BYTES
from dynamoth_lla.digest import Digest, digest
from dynamoth_lla.sampling import SAMPLE_MESSAGES, STRIDES, EstimatedTraffic, SampledWindow, large_from, stride_for
from dynamoth_lla.traffic import Traffic
from tests.lla.harness import Bench, publication, push

STRIDE = 7
LARGE_BYTES = 1000


def window(channels_max: int = 1000, stride: int = STRIDE) -> SampledWindow:
    return SampledWindow(channels_max, 1_000_000, 1_000_000, stride, LARGE_BYTES)


def observe(counted: SampledWindow, messages: list[list[Any]], at_once: int = 100) -> None:
    for start in range(0, len(messages), at_once):
        counted.observe(messages[start : start + at_once])


def traffic(counted: SampledWindow) -> dict[bytes, Traffic | EstimatedTraffic]:
    return dict(counted.traffic())


def busy_server(chance: random.Random, count: int) -> list[list[Any]]:
    """Publications on two busy channels and twenty others; every fifth on ``hot`` is a copy."""
    channels = [b"hot", b"hot", b"warm", *(b"c%d" % number for number in range(20))]
    messages: list[list[Any]] = []
    for number in range(count):
        channel = chance.choice(channels)
        flags = FORWARDED if channel == b"hot" and number % 5 == 0 else 0
        payload = bytes(chance.randint(10, 200))
        messages.append(push(channel, publication(chance.randrange(30), payload=payload, flags=flags)))
    return messages


@given(
    st.lists(st.sampled_from([b"a", b"b", b"c", AGENT_CHANNEL, ANNOUNCE_CHANNEL]), max_size=300),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 400),
)
def test_messages_and_bytes_of_the_agent_are_exact_whatever_the_bounds(
    channels: list[bytes], channels_max: int, stride: int, at_once: int
) -> None:
    counted = window(channels_max, stride)
    observe(counted, [push(channel, bytes(index)) for index, channel in enumerate(channels)], at_once)
    expected = Counter(channels)
    for channel, of in traffic(counted).items():
        assert of.messages <= expected[channel]
        assert of.messages == expected[channel] or counted.uncounted_messages
        assert 0 <= of.published()[0] <= of.messages
    digested = Digest()
    for _ in digest(counted, Bench().analyzer.channels, digested):
        pass
    assert digested.agent_messages == len(channels)
    assert digested.agent_bytes == sum(PMESSAGE_BYTES + len(name) + index for index, name in enumerate(channels))


def test_figures_of_busy_channels_are_near_the_truth() -> None:
    messages = busy_server(random.Random(1), 60_000)
    counted = window()
    observe(counted, messages)
    of = traffic(counted)
    for channel, error in ((b"hot", 0.03), (b"warm", 0.04), (b"c7", 0.06)):
        data = [message[3] for message in messages if message[2] == channel]
        published = [item for item in data if not item[3] & FORWARDED]
        assert of[channel].messages == len(data)
        assert of[channel].size == pytest.approx(sum(map(len, data)), rel=error)
        assert of[channel].published()[0] == pytest.approx(len(published), rel=error)
        assert of[channel].published()[1] == pytest.approx(sum(map(len, published)), rel=2 * error)
        assert of[channel].count_publishers() == 30
        assert sum(of[channel].publishers().values()) == pytest.approx(len(published), rel=error)


def test_large_messages_are_exact_however_few_they_are() -> None:
    counted = window()
    small = [push(b"small", publication(1, payload=b"x")) for _ in range(3000)]
    large = [push(b"large", publication(number, payload=bytes(50_000))) for number in range(3)]
    both = [push(b"both", publication(9, payload=bytes(50_000))), push(b"both", publication(10, payload=b"x"))]
    observe(counted, [*small[:1000], *large, *small[1000:], *both])
    of = traffic(counted)
    assert of[b"large"].published() == (3, 3 * 50_024)
    assert of[b"large"].count_publishers() == 3
    assert of[b"both"].published()[0] == 2
    assert of[b"both"].size == pytest.approx(50_024 + 25, abs=30)
    assert of[b"small"].size == 3000 * 25


@pytest.mark.parametrize("publishers", [200, 1000])
def test_publishers_that_are_not_in_the_sample_are_estimated(publishers: int) -> None:
    chance = random.Random(publishers)
    counted = window()
    observe(counted, [push(b"a", publication(chance.randrange(publishers))) for _ in range(7 * publishers)])
    seen = len(traffic(counted)[b"a"].publishers())
    assert seen < 0.75 * publishers
    assert traffic(counted)[b"a"].count_publishers() == pytest.approx(publishers, rel=0.35)


def test_channels_in_turns_are_all_met() -> None:
    counted = window()
    observe(counted, [push(b"%d" % (number % 50), publication(number % 50)) for number in range(20_000)], at_once=200)
    assert {len(of.publishers()) for of in traffic(counted).values()} == {1}


def test_the_stride_follows_the_messages_of_the_interval_before() -> None:
    assert [stride_for(count) for count in (0, SAMPLE_MESSAGES, 2 * SAMPLE_MESSAGES - 1)] == [1, 1, 1]
    assert stride_for(2 * SAMPLE_MESSAGES) == 2
    assert stride_for(100_000) == 7
    assert stride_for(10**9) == STRIDES[-1]


def test_what_is_large_follows_the_mean_size() -> None:
    assert large_from(0, 0) == 1025
    assert large_from(1000, 100_000) == 1025
    assert large_from(1000, 1_000_000) == 8001


def test_a_busy_analyzer_samples_and_a_quiet_one_counts_everything() -> None:
    """Through the analyzer: the second report of a busy time is sampled, and the one after a quiet time is exact."""
    bench = Bench()
    bench.up()
    windows: list[str] = []
    for count in (300, 300, 300, 1, 1):
        for _ in range(count):
            bench.observe(*[push(b"a", publication(number % 5)) for number in range(100)])
        windows.append(type(bench.analyzer._window).__name__)  # pyright: ignore[reportPrivateUsage]
        columns = bench.next_report().columns
        assert columns.publications == (100 * count,)
        assert columns.publishers == (5,)
        assert columns.bytes_in == (100 * count * (32 + 1 + 32),)
    assert windows == ["Window", "SampledWindow", "SampledWindow", "SampledWindow", "Window"]
    assert bench.analyzer.counters["messages_observed"] == 90_200
