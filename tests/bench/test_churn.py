"""The audit of the churn: what it finds in journals, and a short run of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import churn_journal as journal
from bench.churn import Load, churn
from bench.churn_journal import Event, Journal, Judgement, client_name, judge, read, read_all, read_tag, tag
from dynamoth_client.machines.sequences import SUSPICIONS

CHANNEL = b"churn:1"
PUBLISH_S_MAX = 10.5


def write(file: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a journal whose events happened at the times that they begin with."""
    written = Journal(file)
    with monkeypatch.context() as patched:
        for at, kind, *details in events:
            patched.setattr("bench.churn_journal.time.monotonic", lambda at=at: at)
            written.note(kind, *details)
    written.close()


def published(at: float, publisher: str, number: int) -> list[Event]:
    return [
        (at, journal.PUBLISHED, publisher, CHANNEL, number),
        (at + 0.001, journal.PUBLISH_ENDED, publisher, CHANNEL, number, None),
    ]


def delivered(at: float, publisher: str, number: int) -> Event:
    return at, journal.DELIVERED, "r", CHANNEL, publisher, number


class Run:
    """Two publishers in a process, a subscriber in another, an observer in a third."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch

    def judge(self, *received: Event, ends: bool = True) -> Judgement:
        sent = [
            *published(1.0, "p", 1), *published(2.0, "q", 1), *published(3.0, "p", 2), *published(4.0, "q", 2),
        ]  # fmt: skip
        seen: list[Event] = [
            (1.0, journal.SEEN, 7, "p", 1, "at s1", CHANNEL),
            (2.0, journal.SEEN, 8, "q", 1, "at s1", CHANNEL),
        ]
        heard: list[Event] = [(0.5, journal.CONFIRMED, "r", CHANNEL), *received]
        if ends:
            heard += [(9.0, journal.ENDING, "r", CHANNEL), (9.1, journal.DIED, "r")]
        for name, events in {"sent": sent, "seen": seen, "heard": heard}.items():
            write(self._folder / name, events, self._monkeypatch)
        return judge(sorted(self._folder.iterdir()), PUBLISH_S_MAX)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


ALL = (delivered(1.1, "p", 1), delivered(2.1, "q", 1), delivered(3.1, "p", 2), delivered(4.1, "q", 2))


def without(publisher: str, number: int) -> list[Event]:
    return [event for event in ALL if event[4:] != (publisher, number)]


def gap(publisher: int | None, count: int | None) -> Event:
    return 3.05, journal.GAP, "r", CHANNEL, publisher, count, "because of s1"


def test_a_run_in_which_everything_comes_is_clean(run: Run) -> None:
    judgement = run.judge(*ALL)
    assert not judgement.violations
    assert judgement.totals.delivered == judgement.totals.published == 4


def test_a_message_that_is_missing_is_a_silent_loss_and_its_story_says_where_it_was(run: Run) -> None:
    judgement = run.judge(*without("p", 1))
    assert (judgement.violations, judgement.totals.lost) == (1, 1)
    [story] = judgement.stories
    assert "r never gets p:1, nor a gap event on" in story
    assert "+0.000 seen 7 p 1 at s1" in story


@pytest.mark.parametrize(("publisher", "covers"), [(7, True), (None, True), (8, False), (9, False)])
def test_a_gap_event_covers_messages_of_the_publisher_it_names(run: Run, publisher: int | None, covers: bool) -> None:
    judgement = run.judge(*without("p", 1), gap(publisher, 1 if publisher else None))
    assert judgement.totals.lost == (0 if covers else 1)
    assert judgement.totals.covered_losses == (1 if covers else 0)
    assert judgement.gap_reasons == {"because of N": 1}


def test_a_gap_event_that_suspects_a_forger_is_a_violation_as_there_is_none(run: Run) -> None:
    [reason, *_] = SUSPICIONS
    judgement = run.judge(*ALL, (5.0, journal.GAP, "r", CHANNEL, 7, None, reason))
    assert judgement.violations == 1
    assert "suspects a forger" in judgement.stories[0]


def test_the_lag_of_event_loops_is_reported(run: Run) -> None:
    assert run.judge(*ALL, (5.0, journal.LAG, 0, 0.7), (6.0, journal.LAG, 1, 0.3)).client_lag_s_max == 0.7


@pytest.mark.parametrize(
    ("received", "ends", "violations", "total"),
    [
        ([*ALL, delivered(5.0, "p", 2)], True, 1, "duplicated"),
        ([*without("p", 1), delivered(3.2, "p", 1)], True, 1, "reordered"),
        (without("q", 2), False, 1, "lost"),  # the last message of all
        (without("q", 2), True, 0, None),  # not delivered when the subscriber left: it is not due
        ([(0.9, journal.CALM), *without("p", 1), gap(7, 1)], True, 1, "covered_losses"),  # after all was well again
    ],
)
def test_each_violation_is_found_and_counted(
    run: Run, received: list[Event], ends: bool, violations: int, total: str | None
) -> None:
    judgement = run.judge(*received, ends=ends)
    assert judgement.violations == violations
    assert total is None or getattr(judgement.totals, total) == 1


def test_journals_are_read_in_the_order_of_time_and_up_to_where_they_were_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, [(float(at), journal.FAULT, "even") for at in range(0, 4 * journal.BATCH, 2)], monkeypatch)
    write(second, [(float(at), journal.FAULT, "odd") for at in range(1, 4 * journal.BATCH, 2)], monkeypatch)
    assert [event[0] for event in read_all([first, second])] == list(range(4 * journal.BATCH))
    first.write_bytes(first.read_bytes()[:-20])
    assert len(list(read(first))) == journal.BATCH * 4 // 2 - journal.BATCH


def test_a_tag_is_read_as_it_was_written() -> None:
    name: Any = "3.141"
    assert read_tag(tag(name, 59) + b"more words") == (name, 59)


GENTLE = Load(
    seconds=10.0,
    calm_s=1.5,
    clients=40,
    processes=2,
    channels=20,
    life_s=2.5,
    interval_s=0.3,
    moves_at_once=2,
    fault_pause_s=0.5,
    flood_per_s=50_000,
    faults=("hang-kill", "flush-all", "flood-kill", "flush", "hang-wake"),
    players=4,
    rivals=1,
    seed=5,
)


def test_the_clients_of_a_killed_process_are_gone_and_what_they_had_begun_is_due_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = client_name(3, 1), client_name(4, 1)
    write(
        tmp_path / "theirs",
        [
            (0.5, journal.CONFIRMED, theirs, CHANNEL),
            (3.5, journal.DELIVERED, theirs, CHANNEL, mine, 1),
            (9.0, journal.DIED, theirs),
        ],
        monkeypatch,
    )
    begun = [
        (0.5, journal.CONFIRMED, mine, CHANNEL),
        *published(1.0, mine, 1),
        (4.0, journal.PUBLISHED, mine, CHANNEL, 2),
    ]
    write(tmp_path / "mine", begun, monkeypatch)
    assert judge(sorted(tmp_path.iterdir()), PUBLISH_S_MAX).violations
    write(tmp_path / "faults", [(4.1, journal.KILLED, 3)], monkeypatch)
    judgement = judge(sorted(tmp_path.iterdir()), PUBLISH_S_MAX)
    assert not judgement.violations, judgement.stories
    assert judgement.totals.published == 2


def test_clients_come_and_go_while_agents_fail_and_nothing_is_lost_silently() -> None:
    result = churn(GENTLE)
    assert result.clean, "\n".join(result.stories)
    assert result.clients > GENTLE.clients
    assert result.published > 0
    assert result.delivered > 0
    assert sum(result.faults.values()) >= 3
    assert result.moves["settled"] >= 1
