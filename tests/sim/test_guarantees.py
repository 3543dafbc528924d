"""The checker of the guarantees finds each way to break one, and nothing else."""

from __future__ import annotations

import pytest

from dynamoth_sim.guarantees import Audit, Violation

C = b"c"


def subscribed(*, losses_allowed: bool = False) -> Audit:
    """Return an audit in which ``s`` is subscribed to ``C`` before anything is published."""
    audit = Audit(publish_s_max=1.0, losses_allowed=losses_allowed)
    audit.confirmed("s", C, 0.0)
    return audit


def publish(audit: Audit, *numbers: int, at: float = 1.0, publisher: str = "p", channel: bytes = C) -> None:
    for number in numbers:
        audit.published(publisher, channel, number, at)
        audit.publish_ended(publisher, channel, number, at)


def deliver(audit: Audit, *numbers: int, subscriber: str = "s") -> None:
    for number in numbers:
        audit.delivered(subscriber, C, "p", number, 2.0)


def guarantees(violations: list[Violation]) -> list[str]:
    return [violation.guarantee for violation in violations]


def numbered(violations: list[Violation]) -> list[tuple[str, int | None]]:
    return [(violation.guarantee, violation.number) for violation in violations]


@pytest.mark.parametrize(
    ("published", "delivered", "found", "lost"),
    [
        (2, [1, 2], [], 0),
        (3, [1, 3], [("G1", 2)], 1),
        (3, [1], [("G1", 2)], 2),  # the tail is looked for in the end
        (1, [], [("G1", 1)], 1),  # a publisher from whom nothing came
        (2, [2], [("G1", 1)], 1),
        (3, [1, 1, 3, 2, 2], [("G2", 1), ("G3", 2), ("G2", 2)], 0),
        (0, [1], [("G2", 1)], 0),  # never published
    ],
)
def test_each_message_must_come_once_and_in_order(
    published: int, delivered: list[int], found: list[tuple[str, int]], lost: int
) -> None:
    audit = subscribed()
    publish(audit, *range(1, published + 1))
    deliver(audit, *delivered)
    assert numbered(audit.finish(9.0)) == found
    assert (audit.totals.published, audit.totals.delivered, audit.totals.lost) == (published, len(delivered), lost)


@pytest.mark.parametrize("delivered", [[], [2], [2, 3]])
def test_messages_from_before_the_confirmation_may_come_or_not(delivered: list[int]) -> None:
    audit = Audit(publish_s_max=1.0)
    publish(audit, 1, 2)
    audit.published("p", C, 3, 1.0)
    audit.confirmed("s", C, 1.1)
    audit.publish_ended("p", C, 3, 1.2)
    deliver(audit, *delivered)
    assert audit.finish(9.0) == []


def test_a_message_of_an_earlier_subscription_must_not_come_again() -> None:
    audit = subscribed()
    publish(audit, 1)
    deliver(audit, 1)
    audit.ending("s", C)
    audit.ended("s", C, 2.0)
    audit.confirmed("s", C, 3.0)
    deliver(audit, 1)
    assert guarantees(audit.finish(9.0)) == ["G2"]


def test_nothing_comes_outside_of_a_subscription() -> None:
    audit = Audit()
    publish(audit, 1)
    deliver(audit, 1)
    audit.confirmed("s", C, 1.0)
    audit.ended("s", C, 1.5)
    deliver(audit, 1)
    assert guarantees(audit.finish(9.0)) == ["confirmation", "confirmation"]


def test_an_ended_subscription_may_miss_the_tail_but_no_message_before_it() -> None:
    audit = subscribed()
    publish(audit, 1, 2, 3, 4)
    deliver(audit, 1, 3)
    audit.ended("s", C, 2.0)
    assert numbered(audit.finish(9.0)) == [("G1", 2)]


@pytest.mark.parametrize(("losses_allowed", "found"), [(True, []), (False, ["G1"])])
def test_a_reported_loss_is_a_violation_where_nothing_failed(losses_allowed: bool, found: list[str]) -> None:
    audit = subscribed(losses_allowed=losses_allowed)
    publish(audit, 1, 2, 3, 4)
    deliver(audit, 1)
    audit.gap("s", C, "p", 2, 2.0)
    deliver(audit, 4)
    assert guarantees(audit.finish(9.0)) == found
    assert audit.totals.covered_losses == 2


def test_a_gap_event_covers_no_more_than_it_counts() -> None:
    audit = subscribed(losses_allowed=True)
    publish(audit, 1, 2, 3, 4)
    audit.gap("s", C, "p", 1, 2.0)
    deliver(audit, 4)
    assert numbered(audit.finish(9.0)) == [("G5", 2)]
    assert (audit.totals.covered_losses, audit.totals.lost) == (1, 2)


def test_a_gap_event_after_the_fact_covers_too() -> None:
    audit = subscribed(losses_allowed=True)
    publish(audit, 1, 2, 3, 4, 5)
    deliver(audit, 2, 5)
    audit.gap("s", C, "p", 2, 2.0)
    assert (numbered(audit.finish(9.0)), audit.totals.covered_losses) == ([("G5", 4)], 2)


def test_an_unknown_gap_covers_everything_that_began_before_it() -> None:
    audit = subscribed(losses_allowed=True)
    publish(audit, 1, 2)
    publish(audit, 1, publisher="q")
    audit.gap("s", C, None, None, 2.0)
    publish(audit, 3, 4)
    deliver(audit, 4)
    (violation,) = audit.finish(9.0)
    assert (violation.publisher, violation.number) == ("p", 3)


def test_a_gap_event_of_another_publisher_channel_or_subscriber_covers_nothing() -> None:
    audit = subscribed(losses_allowed=True)
    audit.confirmed("t", C, 0.0)
    audit.confirmed("s", b"d", 0.0)
    publish(audit, 1)
    publish(audit, 1, publisher="q", channel=b"d")
    deliver(audit, 1, subscriber="t")
    audit.gap("s", C, "q", None, 2.0)
    audit.gap("t", C, None, None, 2.0)
    audit.gap("s", b"d", None, None, 2.0)
    (violation,) = audit.finish(9.0)
    assert (violation.guarantee, violation.subscriber, violation.channel) == ("G5", "s", C)


def test_a_covered_message_that_comes_after_all_is_out_of_order() -> None:
    audit = subscribed(losses_allowed=True)
    publish(audit, 1, 2)
    audit.gap("s", C, "p", 1, 2.0)
    deliver(audit, 2, 1)
    assert guarantees(audit.finish(9.0)) == ["G3"]


def test_failed_publishes_are_due_to_nobody() -> None:
    audit = subscribed(losses_allowed=True)
    audit.published("p", C, 1, 1.0)
    audit.publish_ended("p", C, 1, 1.5, failed=True)
    publish(audit, 2)
    deliver(audit, 2)
    audit.published("p", C, 3, 1.0)
    audit.publisher_died("p")
    assert audit.finish(9.0) == []


def test_a_publish_that_fails_where_nothing_failed_is_a_violation() -> None:
    audit = Audit(publish_s_max=1.0)
    audit.published("p", C, 1, 1.0)
    audit.publish_ended("p", C, 1, 1.5, failed=True)
    assert guarantees(audit.finish(9.0)) == ["G4"]


def test_publishers_are_never_blocked() -> None:
    audit = Audit(publish_s_max=1.0)
    audit.published("p", C, 1, 1.0)
    audit.publish_ended("p", C, 1, 2.5)
    audit.published("p", C, 2, 2.5)
    assert guarantees(audit.finish(9.0)) == ["G4", "G4"]


def test_receivers() -> None:
    audit = Audit(publish_s_max=1.0)
    publish(audit, 1)
    audit.receivers("p", C, 1, 1.0, returned=3, true=3)
    audit.receivers("p", C, 1, 1.0, returned=4, true=3)
    assert guarantees(audit.finish(9.0)) == ["G7"]


def test_messages_of_raw_publishers_must_come_in_any_order() -> None:
    audit = Audit(ordered=lambda publisher: publisher != "p")
    audit.confirmed("s", C, 0.0)
    publish(audit, 1, 2, 3, 4)
    deliver(audit, 1, 3, 2, 2)
    assert numbered(audit.finish(9.0)) == [("G1", 4)]


def test_the_number_of_messages_may_come_afterwards() -> None:
    audit = Audit(live=False, losses_allowed=True)
    audit.confirmed("s", C, 0.0)
    deliver(audit, 1, 2)
    audit.gap("s", C, None, None, 1.0)
    deliver(audit, 4, 6)
    audit.published_upto("p", C, 7)
    violations = audit.finish(9.0)
    assert numbered(violations) == [("G5", 5), ("G5", 7)]
    assert (audit.totals.published, audit.totals.delivered, audit.totals.covered_losses) == (7, 4, 1)


def test_memory_does_not_grow_with_the_messages() -> None:
    audit = subscribed(losses_allowed=True)
    for number in range(1, 50_001):
        publish(audit, number)
        if number % 2:
            deliver(audit, number)
    assert len(audit.violations) == 100 and audit.violations_count > 20_000
    assert audit.records_count() < 3000


def test_once_all_is_calm_every_loss_is_a_violation() -> None:
    audit = subscribed(losses_allowed=True)
    publish(audit, 1, 2)
    audit.calm()
    publish(audit, 3, 4)
    publish(audit, 1, 2, publisher="new")
    audit.gap("s", C, None, None, 2.0)
    deliver(audit, 4)
    violations = audit.finish(9.0)
    assert [(v.guarantee, v.publisher, v.number) for v in violations] == [("G1", "p", 3), ("G1", "new", 1)]


def is_c(channel: bytes) -> bool:
    return channel.startswith(b"c")


def test_messages_on_every_channel_that_matches_are_due_to_a_pattern() -> None:
    audit = Audit(publish_s_max=1.0)
    publish(audit, 1)
    audit.pattern_confirmed("t", is_c, 1.0)
    audit.pattern_confirmed("t", is_c, 1.1)
    publish(audit, 2)
    publish(audit, 1, channel=b"c2")
    publish(audit, 1, channel=b"other")
    assert (audit.pattern_count(C), audit.open_count(C), audit.pattern_count(b"other")) == (1, 0, 0)
    violations = audit.finish(9.0)
    assert [(v.guarantee, v.subscriber, v.channel, v.number) for v in violations] == [
        ("G1", "t", C, 2),
        ("G1", "t", b"c2", 1),
    ]


def test_a_pattern_that_has_ended_may_get_nothing() -> None:
    audit = Audit(publish_s_max=1.0)
    audit.pattern_confirmed("t", is_c, 1.0)
    publish(audit, 1)
    audit.pattern_ending("t")
    assert audit.is_open_pattern("t")
    audit.pattern_ended("t", 2.0)
    assert not audit.is_open_pattern("t")
    publish(audit, 1, channel=b"c2")
    assert audit.finish(9.0) == []
    deliver(audit, 1, subscriber="t")
    assert guarantees(audit.violations) == ["confirmation"]


def test_a_gap_of_a_pattern_covers_every_channel_that_matches() -> None:
    audit = Audit(losses_allowed=True)
    audit.pattern_confirmed("t", is_c, 1.0)
    publish(audit, 1)
    publish(audit, 1, channel=b"c2")
    audit.pattern_gap("t", 2.0)
    publish(audit, 2)
    violations = audit.finish(9.0)
    assert [(v.guarantee, v.channel, v.number) for v in violations] == [("G5", C, 2)]
