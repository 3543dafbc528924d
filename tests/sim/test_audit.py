"""The checker of the guarantees finds each way to break one, and nothing else."""

from __future__ import annotations

import re

import pytest

from dynamoth_sim.audit import Audit, Violation

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


def run(story: str, *, losses_allowed: bool = False) -> Audit:
    """Return an audit of what ``s`` gets from ``p``. Each word is an event, with the number of its message or count."""
    audit = Audit(publish_s_max=1.0, losses_allowed=losses_allowed)
    for index, word in enumerate(story.split()):
        at = index / 10
        kind, number = re.fullmatch(r"([a-z]+)-?(\d*)", word).groups()  # type: ignore[union-attr]
        match kind:
            case "published":
                publish(audit, int(number), at=at)
            case "publishing":
                audit.published("p", C, int(number), at)
            case "answered" | "failed":
                audit.publish_ended("p", C, int(number), at, failed=kind == "failed")
            case "died":
                audit.publisher_died("p", at)
            case "subscribed":
                audit.confirmed("s", C, at)
            case "leaving":
                audit.ending("s", C)
            case "left":
                audit.ended("s", C, at)
            case "delivered":
                deliver(audit, int(number))
            case "gap":
                audit.gap("s", C, "p" if number else None, int(number) if number else None, at)
            case _:
                raise AssertionError(word)
    return audit


SENT_2 = "subscribed published-1 published-2"
SENT_3 = f"{SENT_2} published-3"
SENT_4 = f"{SENT_3} published-4"
BEFORE = "published-1 published-2 publishing-3 subscribed answered-3"


@pytest.mark.parametrize(
    ("story", "found"),
    [
        # Everything once and in order.
        (f"{SENT_2} delivered-1 delivered-2", []),
        (f"{SENT_3} delivered-1 delivered-3", [("G1", 2)]),
        (f"{SENT_3} delivered-1", [("G1", 2)]),  # the tail is looked for in the end
        ("subscribed published-1", [("G1", 1)]),  # a publisher from whom nothing came
        (f"{SENT_2} delivered-2", [("G1", 1)]),
        (f"{SENT_3} delivered-1 delivered-1 delivered-3 delivered-2 delivered-2", [("G2", 1), ("G3", 2), ("G2", 2)]),
        ("subscribed delivered-1", [("G2", 1)]),  # never published
        # What was published before the confirmation may come or not.
        (BEFORE, []),
        (f"{BEFORE} delivered-2", []),
        (f"{BEFORE} delivered-2 delivered-3", []),
        # Nothing comes outside of a subscription, nor what an earlier one had; the end of one may be missing.
        ("published-1 delivered-1 subscribed left delivered-1", [("confirmation", 1), ("confirmation", 1)]),
        ("subscribed published-1 delivered-1 leaving left subscribed delivered-1", [("G2", 1)]),
        (f"{SENT_4} delivered-1 delivered-3 left", [("G1", 2)]),
        # Where nothing fails, nothing is lost, reported or not, and every publish succeeds.
        (f"{SENT_4} delivered-1 gap-2 delivered-4", [("G1", 2)]),
        ("publishing-1 failed-1", [("G4", 1)]),
    ],
)
def test_where_nothing_fails_each_message_comes_once_and_in_order(story: str, found: list[tuple[str, int]]) -> None:
    assert numbered(run(story).finish(9.0)) == found


@pytest.mark.parametrize(
    ("story", "found", "covered"),
    [
        (f"{SENT_4} delivered-1 gap-2 delivered-4", [], 2),
        (f"{SENT_4} gap-1 delivered-4", [("G5", 2)], 1),  # no more than it counts
        (f"{SENT_4} published-5 delivered-2 delivered-5 gap-2", [("G5", 4)], 2),  # also after the fact
        (f"{SENT_2} gap published-3 published-4 delivered-4", [("G5", 3)], 2),  # all that began before it
        (f"{SENT_2} gap-1 delivered-2 delivered-1", [("G3", 1)], 1),  # what comes after all is out of order
        ("subscribed publishing-1 failed-1 published-2 delivered-2 publishing-3 died", [], 0),  # due to nobody
    ],
)
def test_where_something_fails_gaps_cover_what_is_lost(story: str, found: list[tuple[str, int]], covered: int) -> None:
    audit = run(story, losses_allowed=True)
    assert numbered(audit.finish(9.0)) == found
    assert audit.totals.covered_losses == covered


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


@pytest.mark.parametrize(("publisher", "lost"), [(None, []), ("p", [("G5", 1), ("G5", 1), ("G5", 1)])])
def test_a_gap_event_that_names_nobody_covers_publishers_that_were_not_seen_yet(
    publisher: str | None, lost: list[tuple[str, int]]
) -> None:
    audit = Audit(live=False, losses_allowed=True)
    audit.confirmed("s", C, 0.0)
    audit.gap("s", C, publisher, None, 1.0)
    for new, first, last in (("q", 2, 2), ("r", 3, 3)):
        audit.delivered("s", C, new, first, 2.0)
        audit.published_upto(new, C, last)
    audit.published_upto("never seen", C, 2)
    assert numbered(audit.finish(9.0)) == lost


def test_a_gap_event_covers_nothing_that_is_missing_after_the_next_delivery() -> None:
    audit = Audit(live=False, losses_allowed=True)
    audit.confirmed("s", C, 0.0)
    audit.gap("s", C, None, None, 1.0)
    deliver(audit, 2, 4)
    audit.published_upto("p", C, 4)
    assert numbered(audit.finish(9.0)) == [("G5", 3)]


def test_a_publish_that_failed_is_due_to_nobody_also_when_that_is_known_afterwards() -> None:
    audit = Audit(live=False, losses_allowed=True)
    audit.confirmed("s", C, 0.0)
    deliver(audit, 1, 4)
    audit.published_upto("p", C, 4)
    audit.publish_failed("p", C, 2)
    assert numbered(audit.finish(9.0)) == [("G5", 3)]
    assert audit.totals.failed == 1


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
    found = [(v.guarantee, v.subscriber, v.channel, v.number) for v in violations]
    assert found == [("G1", "t", C, 2), ("G1", "t", b"c2", 1)]


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
