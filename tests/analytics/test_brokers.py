"""What a report says of edge brokers: loads, evenness, sharing, decisions, and what migrations have brought."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dynamoth_analytics.errors import spark_errors
from dynamoth_analytics.jobs import brokers
from dynamoth_analytics.jobs.runner import Drawn, Jobs, Row, broker_jobs
from dynamoth_analytics.page.brokers import broker_findings, broker_overload, broker_sections
from dynamoth_analytics.reading import Recording, made
from dynamoth_analytics.recorded_settings import coordinator_in_force, migration_settings
from dynamoth_analytics.report import PAGE
from dynamoth_analytics.text import time_of_day
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from tests.analytics.loads import write_rows
from tests.analytics.planted_brokers import (
    BACK,
    BEFORE,
    BEGIN,
    DECIDED_AT,
    MOVED,
    OWN_USERS,
    at,
    load_of,
    ratio_of,
)

Rows = Callable[[str], list[Any]]
SLOT_S = 5


@pytest.fixture
def rows(spark: SparkSession, report: Path) -> Rows:
    return lambda job: spark.read.parquet(str(report / job)).collect()


def test_the_load_of_a_broker_is_what_it_fetches_and_delivers(rows: Rows) -> None:
    loads = {
        (row["broker"], (row["slot"].timestamp() - BEGIN.timestamp()) // SLOT_S): row for row in rows("broker_load")
    }
    first, last = loads["b1", 0], loads["b1", 240 // SLOT_S - 1]
    assert (first["load_bytes_per_s"], first["inbound_bytes_per_s"]) == load_of(60)
    assert first["ratio"] == pytest.approx(ratio_of(60)) and last["ratio"] == pytest.approx(ratio_of(40))
    assert (first["subscriptions"], first["interests"], first["reports"]) == (60 + OWN_USERS, 2, SLOT_S)
    assert first["delivered_bytes_per_s"] == load_of(60)[0] - load_of(60)[1]
    summary = {row["broker"]: row for row in rows("brokers")}
    assert summary["b1"]["overloaded_share"] == 0.5 and not summary["b3"]["overloaded_share"]


def test_evenness_and_sharing_are_those_of_all_brokers_together(rows: Rows) -> None:
    balance = sorted(rows("broker_balance"), key=lambda row: row["slot"])
    first, last = balance[0], balance[-1]
    ratios = [ratio_of(users) for users in BEFORE.values()]
    mean = sum(ratios) / 3
    assert first["cov"] == pytest.approx((sum((each - mean) ** 2 for each in ratios) / 3) ** 0.5 / mean)
    assert last["cov"] == pytest.approx(0.0, abs=1e-9) and last["users"] == sum(BEFORE.values())
    subscriptions = sum(BEFORE.values()) + 3 * OWN_USERS
    assert (first["subscriptions"], first["fetched"], first["interests"]) == (subscriptions, 6, 4)
    assert first["sharing_factor"] == subscriptions / 6 and first["copies"] == 1.5
    assert first["inbound_share"] == pytest.approx(4500 / sum(load_of(users)[0] for users in BEFORE.values()))


def test_a_decision_is_one_row_with_what_was_predicted_and_measured(rows: Rows) -> None:
    relief, shuffle = sorted(rows("broker_decisions"), key=lambda row: row["decision"])
    assert (relief["moves"], relief["moved"], relief["failed"], relief["seconds"]) == (MOVED + 1, MOVED, 1, 2.5)
    assert (relief["cov_before"], relief["cov_predicted"], relief["cov_measured"]) == (0.4, 0.02, 0.03)
    assert relief["cov_error"] == pytest.approx(0.01)
    assert relief["ratio_gain"] == pytest.approx(ratio_of(60) - ratio_of(40))
    assert (shuffle["is_dry_run"], shuffle["moved"], shuffle["cov_measured"]) == (True, None, None)
    assert [row["decision"] for row in rows("shuffles")] == [2]
    effects = {row["broker"]: row for row in rows("broker_effects")}
    assert effects["b2"]["error"] == pytest.approx(0.04) and effects["b1"]["ratio_before"] == ratio_of(60)


def test_a_migration_is_one_row_with_its_end_and_the_loads_of_both_brokers(rows: Rows) -> None:
    first = {row["session"]: row for row in rows("migrations") if row["decision"] == 1}
    assert len(first) == MOVED + 1
    gone = first[BACK]
    assert (gone["end"], gone["seconds"], gone["interests"], gone["back_s"]) == ("left", 0.5, 1, 30.0)
    assert (gone["from_ratio_before"], gone["from_ratio_predicted"], gone["from_ratio_measured"]) == (1.2, 1.18, 0.85)
    assert gone["to_ratio_measured"] == 0.84
    assert [row["session"] for row in first.values() if row["back_s"]] == [BACK]
    ends = {row["end"]: row for row in rows("migration_ends")}
    assert {end: row["moves"] for end, row in ends.items()} == {"left": MOVED, "deadline": 1, None: 1}
    assert ends["left"]["back"] == 1


def test_the_page_has_brokers_with_findings(report: Path) -> None:
    page = (report / PAGE).read_text()
    for text in (
        "<h2>Brokers</h2>",
        "Broker b1 was overloaded for 50% of its time (load ratio up to 1.21).",
        "3 brokers: the highest load ratio was 1.21, at b1; the cov of their load ratios was",
        "The coordinator made 2 decisions to move users, 1 of them shuffles, 1 of them in a dry run, without moves.",
        "The cov fell from 0.40 to 0.03 with one of them (median; predicted: 0.02).",
        f"{MOVED} of {MOVED + 1} moves of users succeeded, in 0.5 s (median); the others: 1 stayed.",
        "1 user went back within an hour",
        "A broker fetched an interest once for 25 subscriptions to it",
        "and 1.5 brokers fetched the same interest on the average.",
    ):
        assert text in page


def test_a_recording_without_brokers_says_nothing_of_them(spark: SparkSession, tmp_path: Path) -> None:
    recording = Recording(spark, str(tmp_path))
    jobs = Jobs(tmp_path / "out")
    broker_jobs(jobs, recording, migration_settings(recording), 1, 1)
    assert not jobs.drawn.counts and not [*tmp_path.iterdir()]
    assert coordinator_in_force(recording).options == CoordinatorOptions()
    drawn = Drawn()
    assert broker_findings(drawn) == broker_overload(drawn) == broker_sections(drawn, time_of_day) == []


def test_a_cov_that_rose_did_not_fall() -> None:
    sums = {"decisions": 1, "shuffles": 0, "dry_runs": 0, "measured": 1}
    covs = {"cov_before": 0.2, "cov_measured": 0.5, "cov_predicted": 0.1}
    jobs: dict[str, list[Row]] = {"brokers": [{"broker": "b1", "ratio_max": 0.5}]}
    jobs["broker_decision_sums"] = [{**sums, **covs}]
    sentence = broker_findings(Drawn(jobs, {"brokers": 1}))[1]
    assert "The cov did not fall: it went from 0.20 to 0.50 with one of them" in sentence


def test_the_times_in_which_a_broker_did_not_report_are_found(spark: SparkSession) -> None:
    schema = "broker string, at timestamp, number long, incarnation long, report_s double"
    times = {("b1", 1): range(60), ("b2", 1): range(20), ("b2", 2): range(30, 60), ("b3", 1): range(50)}
    slow = [("b4", at(second), second, 1, 10.0) for second in (0, 12, 36, 60)]
    rows = [
        (broker, at(second), second, incarnation, 1.0)
        for (broker, incarnation), seconds in times.items()
        for second in seconds
        if second not in (5, 6)
    ]
    found = brokers.broker_silences(made(spark, [*rows, *slow], schema)).orderBy("broker").collect()
    silent = [(row["broker"], row["seconds"], row["restarted"]) for row in found]
    assert silent == [("b2", 11.0, True), ("b3", 11.0, None)]
    jobs: dict[str, list[Row]] = {"brokers": [{"broker": "b2", "ratio_max": 0.5}]}
    jobs["broker_silences"] = [row.asDict() for row in found]
    [sentence] = broker_findings(Drawn(jobs, {"brokers": 1}))[2:]
    assert sentence.startswith("Broker b2 did not report for 11 s from")
    assert "and was started again; 1 other time without reports" in sentence


def test_a_broker_that_is_drained_does_not_make_the_loads_uneven(spark: SparkSession) -> None:
    schema = "broker string, slot timestamp, ratio double, ratio_max double, is_draining boolean, users double"
    more = ", load_bytes_per_s double, inbound_bytes_per_s double, subscriptions double, interests double"
    rest = (1.0, 10.0, 5.0, 0.0, 0.0)
    rows = [("b1", BEGIN, 0.5, 0.5, False, *rest), ("b2", BEGIN, 0.1, 0.1, True, *rest)]
    interests = made(spark, [], "at timestamp, interest string")
    [row] = brokers.broker_balance(made(spark, rows, schema + more), interests, 1).collect()
    assert (row["cov"], row["ratio_mean"], row["brokers"]) == (0.0, 0.5, 2)
    assert (row["sharing_factor"], row["copies"]) == (None, None)


def test_settings_that_cannot_be_read_are_defaults_in_a_report(spark: SparkSession, tmp_path: Path) -> None:
    row = {"at": at(DECIDED_AT), "coordinator": 1, "number": 1, "line": 0, "name": "cov_max", "value": "-3"}
    write_rows(tmp_path, "coordinator_settings", [row])
    with spark_errors():
        assert migration_settings(Recording(spark, str(tmp_path))) == CoordinatorOptions()
