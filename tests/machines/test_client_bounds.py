"""What hostile publishers can make a client remember is bounded in bytes, and nothing gives way in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import dynamoth_client.machines.held_bytes
import dynamoth_client.machines.local_plan
import dynamoth_client.machines.patterns.messages
import dynamoth_client.machines.sequences
from dynamoth.plan.plan import Route, single
from dynamoth.protocol.envelope import FIRST, ROUTE_CHANGED
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.patterns.events import PatternGapDetected
from dynamoth_client.machines.subscriber.events import GapDetected
from tests.machines.helpers import PLAN_0, C, kept_bytes, message, only
from tests.machines.listener import Listener
from tests.machines.listener import delivered as delivered_to_listener
from tests.machines.test_patterns import OPTIONS, Matcher, delivered

MB = 1024 * 1024
LARGE = b"x" * 10_000
ROUNDS = 1000
"""Messages of ``LARGE`` each: ten times the bounds that the tests set."""

HONEST = 1


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamoth_client.machines.held_bytes, "HELD_BYTES_MAX", MB)
    monkeypatch.setattr(dynamoth_client.machines.patterns.messages, "NAMES_BYTES_MAX", MB)
    monkeypatch.setattr(dynamoth_client.machines.local_plan, "NAMES_BYTES_MAX", MB)


def fresh(number: int) -> bytes:
    """Return ``LARGE`` in memory of its own, as a connection brings it."""
    return LARGE + b"%d" % number


def gaps(actions: list[Any]) -> list[GapDetected]:
    return only(GapDetected, actions)


def test_many_publishers_make_a_subscriber_hold_a_bounded_number_of_bytes() -> None:
    listener = Listener().confirmed()
    actions: list[Any] = []

    def flood() -> None:
        for number in range(ROUNDS):
            actions.extend(listener.push("s1", C, message(1, publisher=100 + number)))
            early = message(9, b"%d" % number, publisher=100 + number)
            assert listener.push("s1", C, early + LARGE) == [] or listener.counters["held_bytes_exceeded"]

    assert kept_bytes(flood) < 3 * MB
    assert listener.counters["held_bytes_exceeded"] > 0.8 * ROUNDS


def test_each_message_that_is_released_early_is_behind_its_gap() -> None:
    listener = Listener().confirmed()
    actions: list[Any] = []
    for publisher in range(ROUNDS):
        listener.push("s1", C, message(1, publisher=publisher))
        actions += listener.push("s1", C, message(3, fresh(publisher), publisher=publisher))
    released = listener.counters["held_bytes_exceeded"]
    assert [gap.publisher for gap in gaps(actions)] == list(range(released)), "the first that came are the first to go"
    assert {gap.count for gap in gaps(actions)} == {1}
    assert delivered_to_listener(actions) == [fresh(publisher) for publisher in range(released)]
    actions = listener.pass_time(listener.subscriber.options.hold_s_max)
    assert len(gaps(actions)) == ROUNDS - released, "the others come when their time is over"
    assert len(delivered_to_listener(actions)) == ROUNDS - released


def test_who_holds_for_the_longest_gives_way_and_not_an_honest_publisher() -> None:
    listener = Listener().confirmed()
    for publisher in (HONEST, 666):
        listener.push("s1", C, message(1, publisher=publisher))
    listener.push("s1", C, message(3, LARGE, publisher=666))
    assert listener.push("s1", C, message(3, publisher=HONEST)) == []
    for number in range(5, ROUNDS, 2):
        actions = listener.push("s1", C, message(number, fresh(number), publisher=666))
        assert {gap.publisher for gap in gaps(actions)} <= {666}
    assert listener.counters["held_bytes_exceeded"]
    assert delivered_to_listener(listener.push("s1", C, message(2, publisher=HONEST))) == [b"m2", b"m3"]


def test_the_messages_of_a_channel_that_was_left_count_no_more_when_their_time_is_over() -> None:
    listener = Listener().confirmed()
    for again in range(20):
        listener.push("s1", C, message(1 + 1000 * again, flags=FIRST))
        for number in range(50):
            listener.push("s1", C, message(1000 * again + 3 + number, fresh(number)))
        listener.unsubscribe()
        listener.acknowledged(b"unsubscribe")
        listener.pass_time(1.0)
        sent = listener.subscribe()
        listener.verify(sent, PLAN_0)
    assert not listener.counters["held_bytes_exceeded"], "half of the bound each time"


def test_a_publisher_that_gives_way_to_others_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamoth_client.machines.sequences, "STREAMS_MAX", 2)
    listener = Listener().confirmed()
    listener.push("s1", C, message(1, publisher=HONEST))
    listener.push("s1", C, message(3, publisher=HONEST))
    listener.push("s1", C, message(1, publisher=666))
    actions = listener.push("s1", C, message(1, publisher=667))
    assert [(gap.publisher, gap.count) for gap in gaps(actions)] == [(HONEST, 1)]
    assert delivered_to_listener(actions) == [b"m3", b"m1"]


def test_a_pattern_holds_a_bounded_number_of_bytes_over_all_channels() -> None:
    matcher = Matcher().confirmed()
    actions: list[Any] = []
    for number in range(ROUNDS):
        channel = b"news.%d" % number
        matcher.matched("s1", message(1, flags=FIRST), channel=channel)
        actions += matcher.matched("s1", message(3, fresh(number), flags=ROUTE_CHANGED), channel=channel)
    released = matcher.patterns.counters["held_bytes_exceeded"]
    assert released > 0.8 * ROUNDS
    assert [gap.channel for gap in only(PatternGapDetected, actions)] == [b"news.%d" % n for n in range(released)]
    assert len(delivered(actions)) == released


def test_the_names_of_a_pattern_s_channels_are_bounded_in_bytes() -> None:
    matcher = Matcher(replace(OPTIONS, channels_max=10**6)).confirmed()

    def flood() -> None:
        for number in range(ROUNDS):
            matcher.now += 0.001
            matcher.matched("s1", message(1, flags=FIRST), channel=b"news.%d" % number + LARGE)
            matcher.matched("s1", b"raw", channel=b"news.%d" % number)

    assert kept_bytes(flood) < 4 * MB
    assert matcher.patterns.counters["channels_forgotten"] > 0.5 * ROUNDS


def test_a_local_plan_bounds_the_bytes_of_its_names() -> None:
    plan = LocalPlan(PLAN_0)
    pinned = b"pinned" + LARGE
    plan.pin(pinned)
    for number in range(ROUNDS):
        plan.learn(pinned if not number else LARGE + b"%d" % number, Route(1, single("s2")), number / 1000)
    kept = [number for number in range(1, ROUNDS) if plan.epoch(LARGE + b"%d" % number)]
    assert 70 < len(kept) < 105
    assert kept[-1] == ROUNDS - 1 and kept == list(range(kept[0], ROUNDS)), "the longest idle are forgotten"
    assert plan.epoch(pinned) == 1
