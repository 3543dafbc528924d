"""The values of jobs on a few rows, computed by hand; and Algorithm 1 against the production balancer."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from math import exp, log
from random import Random

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.testing import assertDataFrameEqual  # pyright: ignore[reportUnknownVariableType] it names types of pandas

from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth.recording import GAPS
from dynamoth_analytics.jobs import channels, gaps, load, plans, replication
from dynamoth_analytics.jobs.channels import ALL_PUBLISHERS, ALL_SUBSCRIBERS, SINGLE
from dynamoth_analytics.jobs.publishers import publisher_slots
from dynamoth_analytics.reading import SCHEMAS, deduplicated, made
from dynamoth_analytics.recommendation import thresholds
from dynamoth_analytics.recorded_settings import DEFAULTS
from dynamoth_analytics.text import figure
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.decide.cluster import ChannelFigures
from dynamoth_balancer.decide.replicate import wanted_change
from dynamoth_balancer.options import BalancerOptions
from tests.analytics.planted import BEGIN

CAPACITY = 1_000_000.0

REPORTS = (
    "server string, at timestamp, interval_s double, outgoing_bytes_per_s double, outgoing_bytes_per_s_max double,"
    " cpu_ratio double"
)

CHANNEL_LOADS = (
    "channel string, slot timestamp, mode string, servers long, seconds double, publications long, subscribers double,"
    " publishers long, messages_sent long, bytes_in long, bytes_out long"
)


def after(seconds: float) -> object:
    return BEGIN + timedelta(seconds=seconds)


def test_load_and_balance(spark: SparkSession) -> None:
    """Two slots of 10 s: in the first, one server is half loaded and one overloaded; in the second nothing is sent."""
    reports = [
        ("s1", after(4), 4.0, 450.0, 1000.0, 0.1),
        ("s1", after(10), 6.0, 600.0, 1000.0, 0.3),
        ("s2", after(9), 8.0, 1200.0, 1000.0, 0.5),
        ("unbounded", after(9), 8.0, 700.0, None, None),
        ("s1", after(20), 10.0, 0.0, 1000.0, 0.0),
        ("s2", after(20), 10.0, 0.0, 1000.0, 0.0),
    ]
    loads = load.load(made(spark, reports, REPORTS), 10, 0.8)
    found = {(row["server"], row["slot"].timestamp() - BEGIN.timestamp()): row.asDict() for row in loads.collect()}
    names = ("covered_s", "outgoing_bytes_per_s", "ratio", "ratio_max", "overloaded", "unused_bytes_per_s", "cpu_ratio")
    assert {key: tuple(row[name] for name in names) for key, row in found.items()} == {
        ("s1", 0): (10.0, 540.0, 0.54, 0.6, False, 460.0, 0.2),
        ("s2", 0): (8.0, 1200.0, 1.2, 1.2, True, 0.0, 0.5),
        ("unbounded", 0): (8.0, 700.0, None, None, None, None, None),
        ("s1", 10): (10.0, 0.0, 0.0, 0.0, False, 1000.0, 0.0),
        ("s2", 10): (10.0, 0.0, 0.0, 0.0, False, 1000.0, 0.0),
    }
    expected = [
        # ratios 0.54 and 1.2: their mean is 0.87, and both are 0.33 away from it.
        (after(0), 3, 0.87, 1.2, 1.2 / 0.87, 0.33 / 0.87, 26.0),
        (after(10), 2, 0.0, 0.0, None, None, 20.0),
    ]
    columns = (
        "slot timestamp, servers long, ratio_mean double, ratio_max double, imbalance double, variation double,"
        " server_seconds double"
    )
    assertDataFrameEqual(load.balance(loads), made(spark, expected, columns))


def test_figures_of_channels(spark: SparkSession) -> None:
    rows = [
        # 600 publications in 30 s; 4, 7 and 5 subscribers.
        ("busy", after(0), SINGLE, 1, 10.0, 100, 4.0, 2, 400, 0, 800),
        ("busy", after(10), SINGLE, 2, 10.0, 200, 7.0, 3, 1400, 0, 2800),
        ("busy", after(20), SINGLE, 1, 10.0, 300, 5.0, 2, 1500, 0, 3000),
        ("not heard", after(0), SINGLE, 1, 10.0, 50, 0.0, 1, 0, 0, 0),
        ("silent", after(0), SINGLE, 1, 10.0, 0, 3.0, 0, 0, 0, 0),
    ]
    slots = made(spark, [("busy", 6600), (None, 3400)], "channel string, bytes_out long")
    found = channels.by_channel(made(spark, rows, CHANNEL_LOADS), slots)
    columns = (
        "channel string, publications_per_s double, messages_per_s double, bytes_out_per_s double, publishers long,"
        " subscribers double, fan_out double, p_ratio double, s_ratio double, share double, churn_per_minute double,"
        " servers_max long"
    )
    expected = [
        ("busy", 20.0, 110.0, 220.0, 3, 16 / 3, 5.5, 3.75, 4 / 15, 0.66, 10.0, 2),
        ("not heard", 5.0, 0.0, 0.0, 1, 0.0, 0.0, None, 0.0, 0.0, 0.0, 1),
        ("silent", 0.0, 0.0, 0.0, 0, 3.0, None, 0.0, None, 0.0, 0.0, 1),
    ]
    names = [part.split()[0] for part in columns.split(", ")]
    assertDataFrameEqual(found.select(*names), made(spark, expected, columns))


def test_modes_that_algorithm_1_asks_for_against_those_that_channels_had(spark: SparkSession) -> None:
    rows = [
        # By publications, in two slots; then replicated, and small again in the last.
        ("hot", after(0), SINGLE, 1, 10.0, 20_000, 2.0, 5, 0, 0, 6_000_000),
        ("hot", after(10), SINGLE, 1, 5.0, 15_000, 4.0, 5, 0, 0, 4_000_000),
        ("hot", after(20), ALL_SUBSCRIBERS, 2, 10.0, 20_000, 2.0, 5, 0, 0, 6_000_000),
        ("hot", after(30), ALL_SUBSCRIBERS, 2, 10.0, 10, 2.0, 5, 0, 0, 3000),
        ("wide", after(0), SINGLE, 1, 10.0, 10, 5000.0, 1, 0, 0, 9_000_000),
        ("small", after(0), SINGLE, 1, 10.0, 10, 5.0, 1, 0, 0, 1000),
        ("nothing known", after(0), ALL_PUBLISHERS, 2, 0.0, 10, 5.0, 1, 0, 0, 1000),
    ]
    settings = {
        **DEFAULTS,
        "all_subscribers_ratio_min": 100.0,
        "all_publishers_ratio_min": 10.0,
        "replicate_publications_per_s_min": 1000.0,
        "replicate_subscribers_min": 100,
        "replicate_load_ratio_min": 0.5,
    }
    expected = [
        ("hot", SINGLE, ALL_SUBSCRIBERS, 15.0, 3000.0, 4.0, 0.8),
        ("hot", ALL_SUBSCRIBERS, ALL_SUBSCRIBERS, 10.0, 2000.0, 2.0, 0.6),
        ("hot", ALL_SUBSCRIBERS, SINGLE, 10.0, 1.0, 2.0, 0.0003),
        ("wide", SINGLE, ALL_PUBLISHERS, 10.0, 1.0, 5000.0, 0.9),
    ]
    columns = (
        "channel string, mode string, wanted string, seconds double, publications_per_s_max double,"
        " subscribers_max double, ratio_max double"
    )
    found = replication.replication(made(spark, rows, CHANNEL_LOADS), settings, CAPACITY)
    assertDataFrameEqual(found, made(spark, expected, columns))


def test_jobs_and_the_balancer_read_algorithm_1_alike(spark: SparkSession) -> None:
    """900 channels in all modes, around all thresholds: the job's wanted mode is that of the production balancer."""
    options = BalancerOptions(
        all_subscribers_ratio_min=20.0,
        all_publishers_ratio_min=10.0,
        replicate_publications_per_s_min=200.0,
        replicate_subscribers_min=100,
        replicate_load_ratio_min=0.4,
    )
    chance, seconds, modes = Random(14), 10.0, (SINGLE, ALL_SUBSCRIBERS, ALL_PUBLISHERS)

    def around(least: float, most: float) -> float:
        return exp(chance.uniform(log(least), log(most)))

    rows = [
        (
            number,
            seconds,
            chance.choice([0, round(around(1, 200_000)), round(around(100, 20_000))]),
            chance.choice([0.0, 1.0, 2.0, around(0.5, 3000), around(20, 500)]),
            chance.choice([0, 1, 2, 3, 50]),
            round(around(0.1, 3) * CAPACITY * seconds),
            modes[number % 3],
        )
        for number in range(900)
    ]
    columns = "number long, seconds double, publications long, subscribers double, publishers long, bytes_out long"
    columns += ", mode string"
    wanted = replication.wanted_mode({name: getattr(options, name) for name in DEFAULTS}, CAPACITY)
    found = made(spark, rows, columns).select("number", wanted.alias("wanted")).orderBy("number").collect()

    def judged(publications: int, subscribers: float, publishers: int, bytes_out: int, mode: str) -> str:
        sent = {"s1": bytes_out / seconds}
        present = single("s1") if mode == SINGLE else Assignment(Mode[mode.replace("-", "_").upper()], ("s1", "s2"))
        figures = ChannelFigures(b"c", present, publications / seconds, publishers, subscribers, sent)
        wanted = wanted_change(figures, CAPACITY, options)
        return mode if wanted is None else mode_name(wanted.mode)

    expected = [judged(*row[2:]) for row in rows]
    assert [row["wanted"] for row in found] == expected
    counts = Counter((row[-1], wanted) for row, wanted in zip(rows, expected, strict=True))
    assert len(counts) == 9 and min(counts.values()) >= 10, counts


def test_gaps_of_two_recorders(spark: SparkSession) -> None:
    """A recorder that writes a gap again, as after a restart, counts it once; what another one noted stays."""
    rows = [
        (after(9), "r1", "report_missing", "s1", 1, 7, 2.0),
        (after(4), "r1", "report_missing", "s1", 1, 7, 2.0),
        (after(5), "r2", "report_missing", "s1", 1, 7, 2.0),
        (after(6), "r2", "recorder_away", None, None, 1, 30.0),
        (after(8), "r2", "recorder_away", None, None, 1, 30.0),
    ]
    columns = ["at", "recorder", "kind", "server", "incarnation", "sequence", "seconds"]
    schema = ", ".join(f"{name} {SCHEMAS[GAPS.name][name].dataType.simpleString()}" for name in columns)
    once = deduplicated(made(spark, rows, schema), GAPS)
    assertDataFrameEqual(once, made(spark, rows[1:4], schema))
    blind = [(after(7), recorder, "agent_blind", "s1", 1, 9, 4.0) for recorder in ("r1", "r2")]
    times = [(after(second), 1.0) for second in (0, 1, 2, 30, 31)]
    found = gaps.gaps(once.union(made(spark, blind, schema)), made(spark, times, "slot timestamp, covered_s double"), 1)
    assert sorted((row["kind"], row["seconds"]) for row in found.collect()) == [
        ("agent_blind", 4.0),
        ("no_reports", 27.0),
        ("recorder_away", 30.0),
        *[("report_missing", 2.0)] * 2,
    ]


def test_values_that_are_unknown_count_for_nothing(spark: SparkSession) -> None:
    """A server did not know for three seconds of four what it sent, nor a report how many subscribers there were."""
    reports = [("s1", after(2), 1.0, 400.0, 1000.0, 0.1), ("s1", after(5), 3.0, None, 1000.0, None)]
    [row] = load.load(made(spark, reports, REPORTS), 10, 0.8).collect()
    assert (row["covered_s"], row["outgoing_bytes_per_s"], row["ratio"]) == (4.0, 400.0, 0.4)
    columns = "channel string, slot timestamp, seconds double, subscribers double"
    rows = made(spark, [("c", after(0), 1.0, 6.0), ("c", after(5), 3.0, None)], columns)
    zeros = ("publications", "messages_sent", "bytes_in", "bytes_out", "publishers", "channels")
    rows = rows.withColumns({"server": F.lit("s1"), **{name: F.lit(0) for name in zeros}})
    [slot] = channels.combined(rows.withColumn("slot", F.lit(BEGIN))).collect()
    assert (slot["seconds"], slot["subscribers"]) == (4.0, 6.0)


def test_channels_with_unknown_figures_give_no_reason_for_thresholds() -> None:
    """Columns that an older version did not record are null."""
    row = {"channel": "c", "ratio": 1.2, "publications_per_s": 100.0, "subscribers": 5.0, "publishers": 3}
    assert thresholds([row], DEFAULTS)
    for name in ("publications_per_s", "subscribers", "publishers"):
        assert thresholds([{**row, name: None}], DEFAULTS) == []


def test_thresholds_under_which_a_channel_is_replicated_in_time_stay() -> None:
    """150 is above the rate at load ratio 0.5, and below that at 0.8, where a server is overloaded."""
    row = {"channel": "c", "ratio": 1.0, "publications_per_s": 250.0, "subscribers": 1.0, "publishers": 3}
    assert thresholds([row], {**DEFAULTS, "replicate_publications_per_s_min": 150}) == []
    [*_, line] = thresholds([row], {**DEFAULTS, "replicate_publications_per_s_min": 201})
    assert line == "replicate_publications_per_s_min = 110.0"


def test_publishers_are_not_busier_when_reports_come_together(spark: SparkSession) -> None:
    """Three reports fall into one slot of a second: the rates are those of the three seconds that they cover."""
    at = datetime(2026, 11, 23, 10, 0, 1, tzinfo=UTC)
    columns = "at timestamp, server string, channel string, interval_s double, publishers long, publications long"
    reports = [(at, "s1", "c", 1.0, 1, 90, b"12345678")] * 3
    rows = made(spark, reports, f"{columns}, publisher_ids binary")
    zeros = {name: F.lit(0) for name in ("messages_sent", "bytes_in", "bytes_out", "subscribers", "channels")}

    def slots_of(channel_rows: DataFrame) -> DataFrame:
        return channels.channel_slots(channel_rows.withColumns(zeros), 1)

    figures = F.lit(1.0).alias("outgoing_bytes_per_s"), F.lit(9.0).alias("outgoing_bytes_per_s_max")
    loads = load.load(rows.select("*", *figures, F.lit(0.0).alias("cpu_ratio")), 1, 0.8)
    [row] = publisher_slots(rows, slots_of(rows), loads, 1).collect()
    assert (row["seconds"], row["channels"], row["publications_per_s"]) == (3.0, 1.0, 90.0)
    for channel, publishers in ((None, 0), ("d", 1)):
        more = made(spark, [(at, "s1", channel, 1.0, publishers, 5, None)], rows.schema)
        [row] = publisher_slots(rows.union(more), slots_of(rows.union(more)), loads, 1).collect()
        assert (row["channels"], row["publications_per_s"]) == (None, 90.0), "of others no publisher is named"


def test_thresholds_are_written_as_their_settings_are() -> None:
    """However the settings in force were recorded: a rate below 1 does not become 0, nor 30 subscribers 30.0."""
    rows = [
        {"channel": "a", "ratio": 1.0, "publications_per_s": 1.2, "subscribers": 1.0, "publishers": 3},
        {"channel": "b", "ratio": 1.0, "publications_per_s": 30.0, "subscribers": 60.0, "publishers": 3},
    ]
    present = {**DEFAULTS, "replicate_publications_per_s_min": 150, "replicate_subscribers_min": 100.0}
    lines = thresholds(rows, present)
    assert {"replicate_publications_per_s_min = 0.54", "replicate_subscribers_min = 27"} < set(lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (float("nan"), "-"), (0, "0 B/s"), (0.12345, "0.123 B/s"), (57, "57 B/s"), (99.96, "100 B/s"),
        (100.4, "100 B/s"), (1234.5, "1234 B/s"), (9994, "9994 B/s"), (9999.6, "10 kB/s"), (10_000, "10 kB/s"),
        (123_456, "123 kB/s"), (999_400, "999 kB/s"), (999_600, "1 MB/s"), (-999_600, "-1 MB/s"),
        (999_600_000, "1 GB/s"), (1.5e9, "1.5 GB/s"), (999.6e9, "1 TB/s"), (1.2e16, "12000 TB/s"),
    ],
)  # fmt: skip
def test_figures_are_rounded_before_their_prefix_is_chosen(value: float | None, text: str) -> None:
    assert figure(value, "B/s") == text


def test_a_decision_with_several_goals_is_not_judged_as_one_to_relieve(spark: SparkSession) -> None:
    rows = [
        # decision, line, kind, server, goal, reason, before, predicted, measured
        (1, 0, "move", "s1", "replicate", "too many publications", 0.9, 0.5, None),
        (1, 1, "move", "s1", "relieve", "s1 is too full", 0.9, 0.4, None),
        (1, 2, "move", "s2", "relieve", "s1 is too full", 0.2, 0.3, None),
        (1, 3, "outcome", "s1", None, None, None, None, 0.95),
        (1, 4, "outcome", "s2", None, None, None, None, 0.3),
        (2, 5, "move", "s1", "relieve", "s1 is too full", 0.9, 0.5, None),
        (2, 6, "move", "s2", "relieve", "s2 gets it", 0.1, 0.5, None),
        (2, 7, "outcome", "s1", None, None, None, None, 0.4),
        (2, 8, "outcome", "s2", None, None, None, None, 0.9),
        (3, 9, "move", "s1", "relieve", "no outcome yet", 0.9, 0.5, None),
    ]
    columns = (
        "decision long, line long, kind string, server string, goal string, reason string, ratio_before double,"
        " ratio_predicted double, ratio_measured double"
    )
    decisions = made(spark, rows, columns).selectExpr(
        "*", "1L as balancer", "1L as number", "'c' as channel", "timestamp_seconds(decision) as at"
    )
    effects = plans.effects(decisions)
    found = {(row["decision"], row["server"]): row for row in effects.collect()}
    assert {key: row["goal"] for key, row in found.items() if key[0] == 1} == {
        (1, "s1"): "relieve, replicate",
        (1, "s2"): "relieve",
    }
    assert found[1, "s1"]["reason"] == "too many publications"
    assert found[1, "s1"]["ratio_predicted"] == 0.4
    [idle] = plans.without_gain(effects).collect()
    assert (idle["decision"], idle["reason"], idle["ratio_before"], idle["ratio_measured"]) == (
        2,
        "s1 is too full",
        0.9,
        0.9,
    )
