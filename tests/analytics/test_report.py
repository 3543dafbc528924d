"""Reports find what was planted, in one recording and in another with the same events."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.testing import assertSchemaEqual

from dynamoth.recording import TABLES
from dynamoth_analytics.errors import SparkFailed, spark_errors
from dynamoth_analytics.jobs import anomalies, channels, load, replication
from dynamoth_analytics.jobs.channels import ALL_PUBLISHERS, ALL_SUBSCRIBERS, SINGLE
from dynamoth_analytics.jobs.runner import COLLECTED_MAX, Drawn, Row
from dynamoth_analytics.page.findings import findings
from dynamoth_analytics.reading import Recording, made
from dynamoth_analytics.recommendation import as_toml, thresholds
from dynamoth_analytics.recorded_settings import DEFAULTS
from dynamoth_analytics.report import PAGE, SETTINGS_FILE, Extent, extent_of
from dynamoth_cli.main import main
from tests.analytics.conftest import Written
from tests.analytics.planted import (
    ALONE,
    BEGIN,
    BREAK,
    CAPACITY,
    CHANNELS,
    EVERYWHERE,
    EVERYWHERE_AT,
    EXPONENT,
    HOT,
    HOT_FROM,
    HOT_TO,
    LOST_AT,
    ODD_AT,
    PING_PONG,
    REPORTS,
    RESTART,
)

Rows = Callable[[str], list[Any]]

LOADS = (
    "slot timestamp, server string, overloaded boolean, covered_s double, ratio_max double, outgoing_bytes_per_s double"
)
REPORTS_SCHEMA = "server string, at timestamp, interval_s double, outgoing_bytes_per_s_max long"
SLOTS = "server string, slot timestamp, channel string, bytes_out long"


@pytest.fixture
def rows(spark: SparkSession, report: Path) -> Rows:
    return lambda job: spark.read.parquet(str(report / job)).collect()


def second(of_recording: float) -> float:
    return (BEGIN + timedelta(seconds=of_recording)).timestamp()


def test_the_hot_channel_is_first(rows: Rows) -> None:
    first = max(rows("channels"), key=lambda row: row["bytes_out"])
    assert (first["channel"], round(first["fan_out"]), first["subscribers"]) == (HOT, 10, 10.0)


def test_the_overload_is_found_with_its_cause_and_an_unused_hour_is_none(rows: Rows) -> None:
    (overload,) = rows("overloads")
    assert (overload["server"], overload["channel"], overload["cause"]) == ("s3", HOT, HOT)
    assert overload["cause_bytes_per_s_before"] < overload["cause_bytes_per_s"] / 5
    slot_s = 5
    assert abs(overload["begin"].timestamp() - second(HOT_FROM)) <= slot_s
    assert overload["minutes"] == pytest.approx((HOT_TO - HOT_FROM) / 60, abs=slot_s / 60)
    assert 0.6 < overload["channel_share"] < 0.9
    assert sum(row["server_seconds"] for row in rows("servers")) == 3 * REPORTS - 1  # one report was lost


def test_a_lost_report_does_not_end_an_overload(spark: SparkSession) -> None:
    reported = [second for second in range(60) if second not in (20, 21, 22, 40)]
    rows = [
        (BEGIN + timedelta(seconds=second), "s1", 10 <= second < 40 or second > 41, 1.0, 0.9, 1e6)
        for second in reported
    ]
    found = load.overloads(made(spark, rows, LOADS), made(spark, [], SLOTS), 1).orderBy("begin").collect()
    spans = [(row["begin"].timestamp(), row["end"].timestamp(), round(row["minutes"] * 60)) for row in found]
    assert spans == [(second(10), second(40), 27), (second(42), second(60), 18)]


def test_the_cause_of_an_overload_is_the_channel_that_rose_and_not_the_busiest(spark: SparkSession) -> None:
    loads: list[tuple[Any, ...]] = []
    slots: list[tuple[Any, ...]] = []
    for number in range(60):
        at, overloaded = BEGIN + timedelta(seconds=number), number >= 40
        rates = {"busy": 500_000, "rises": 450_000 if overloaded else 100_000, "hums": 20_000 + 1000 * (number % 2)}
        loads.append((at, "s1", overloaded, 1.0, 0.9, float(sum(rates.values()))))
        slots += [("s1", at, channel, rate) for channel, rate in rates.items()]
    frames = made(spark, loads, LOADS), made(spark, slots, SLOTS)
    [overload] = load.overloads(*frames, 1).collect()
    assert (overload["channel"], overload["cause"]) == ("busy", "rises")
    assert (overload["cause_bytes_per_s_before"], overload["cause_bytes_per_s"]) == (100_000, 450_000)
    assert overload["cause_share"] == pytest.approx(1.0, abs=0.01)
    [drawn] = findings(Drawn({"overloads": [{**overload.asDict(), "begin": BEGIN}]}, {"overloads": 1}))[:1]
    assert drawn.endswith("the cause was channel rises, which rose from 100 kB/s to 450 kB/s.")
    [unknown] = load.overloads(frames[0].where("overloaded"), frames[1], 1).collect()
    assert (unknown["channel"], unknown["cause"]) == ("busy", None), "nothing is known of the time before"


def test_anomalies_are_said_with_their_units() -> None:
    odd: Row = {
        **{"kind": "server", "subject": "s2", "at": BEGIN, "metric": "outgoing_bytes_per_s"},
        **{"score": 9.0, "value": 838e3, "expected": 237e3},
    }
    lacks: list[Row] = [
        {"server": "s2", "metric": "reports_missing", "value": 1},
        {"server": "s1", "metric": "silent_s", "value": 6600},
    ]
    drawn = Drawn({"anomalies": [odd], "incomplete": lacks})
    said = findings(drawn)
    assert f"At {BEGIN:%H:%M:%S} server s2 sent 838 kB/s; before: 237 kB/s." in said
    assert "Missing reports, which leave figures of their time incomplete: s2 1." in said
    assert "Time without any report: s1 110 minutes." in said


@pytest.mark.parametrize(
    ("length_s", "interval_s", "slot_s"),
    [(60, 1.0, 1), (60, 0.5, 1), (600, 5.0, 5), (7000, 2.5, 5), (90_000, 1.0, 60), (90_000, 300.0, 60)],
)
def test_a_slot_is_no_shorter_than_the_interval_of_reports(length_s: int, interval_s: float, slot_s: int) -> None:
    assert Extent(BEGIN, BEGIN + timedelta(seconds=length_s), length_s, interval_s, 1e6).slot_s == slot_s


def test_reports_that_came_late_were_not_missing(spark: SparkSession) -> None:
    at = (0, 1, 31, 31.1, 32, 62)
    rows = [
        (BEGIN + timedelta(seconds=second), "s1", 2 if second == 62 else 1, number, 1.0)
        for number, second in enumerate(at)
    ]
    servers = made(spark, rows, "at timestamp, server string, incarnation long, sequence long, interval_s double")
    found = {(row["kind"], row["metric"], row["value"]) for row in anomalies.missing_reports(servers).collect()}
    assert found == {("late", "late_s", 30.0), ("missing", "silent_s", 30.0)}


def test_a_clock_that_goes_back_loses_no_report(spark: SparkSession) -> None:
    """That of the recorder's machine: reports come in the order of their numbers all the same."""
    rows = [
        (BEGIN + timedelta(seconds=number - (60 if number >= 100 else 0)), "s1", 1, number, 1.0)
        for number in range(200)
        if number != 150
    ]
    servers = made(spark, rows, "at timestamp, server string, incarnation long, sequence long, interval_s double")
    found = [(row["metric"], row["value"]) for row in anomalies.missing_reports(servers).collect()]
    assert found == [("reports_missing", 1.0)]


def test_the_popularity_of_reports_that_are_cut_is_that_of_what_they_always_name(spark: SparkSession) -> None:
    """100 reports with the 50 busiest of 400 channels; which of the rarer ones these are is chance."""
    random = Random(1)
    rates = [3000 / rank for rank in range(1, 401)]
    named: dict[str, list[float]] = {}
    unnamed = 0.0
    for _ in range(100):
        counts = sorted(((random.gauss(rate, rate**0.5), number) for number, rate in enumerate(rates)), reverse=True)
        for count, number in counts[:50]:
            named.setdefault(f"c{number:03}", []).append(count)
        unnamed += sum(count for count, _ in counts[50:])
    rows = [(channel, len(counts), sum(counts)) for channel, counts in named.items()]
    summary = made(spark, rows, "channel string, slots int, publications double")
    rest = made(spark, [(None, unnamed)], "channel string, publications double")
    [fit] = channels.popularity(summary, rest).collect()
    assert fit["exponent"] == pytest.approx(1.0, abs=0.03) and fit["channels"] < 50
    [biased] = channels.popularity(summary, made(spark, [], rest.schema)).collect()
    assert biased["exponent"] > 1.2 and biased["channels"] > 50, "of all that were named"
    [few] = channels.popularity(summary.limit(2), rest).collect()
    assert (few["exponent"], few["standard_error"]) == (None, None)


def test_a_server_that_was_overloaded_for_less_than_a_slot_is_named() -> None:
    row = {"server": "s1", "ratio_max": 0.95}
    said = findings(Drawn({"servers": [row]}, settings={"load_ratio_high": 0.8}, slot_s=60))
    shortly = "No server was overloaded for 60 s or longer: the highest load ratio was 0.95, at s1, for a shorter time."
    assert said[0] == shortly


def test_a_report_with_a_wrong_time_does_not_make_slots_longer(spark: SparkSession) -> None:
    times = [datetime(1970, 1, 1, tzinfo=UTC), *(BEGIN + timedelta(seconds=number) for number in range(30))]
    rows = [("s1", at, 1.0, 1_000_000) for at in times]
    extent = extent_of(made(spark, rows, REPORTS_SCHEMA))
    assert extent is not None and (extent.slot_s, extent.seconds > 1e9) == (1, True)


def test_slots_are_as_long_as_the_interval_of_the_slowest_agent(spark: SparkSession) -> None:
    rows = [
        (server, BEGIN + timedelta(seconds=second), float(interval_s), 1_000_000)
        for server, interval_s in (("s1", 1), ("s2", 1), ("s3", 10))
        for second in range(0, 120, interval_s)
    ]
    extent = extent_of(made(spark, rows, REPORTS_SCHEMA))
    assert extent is not None and extent.slot_s == 10


def test_a_channel_that_moves_or_was_replicated_before_keeps_its_rate(spark: SparkSession) -> None:
    """In a slot of 10 s: one moves in the middle, with a second of both; one was replicated from the begin on."""
    rows = [
        # channel, server, seconds, publications: 10 per second each.
        ("moves", "s1", 6.0, 60),
        ("moves", "s2", 5.0, 50),
        ("stays", "s1", 11.0, 110),
        ("on two", "s1", 10.0, 100),
        ("on two", "s2", 10.0, 100),
        ("for two", "s1", 10.0, 60),
        ("for two", "s2", 10.0, 40),
    ]
    columns = "channel string, server string, seconds double, publications long"
    zeros = {
        name: F.lit(1).cast("long") for name in ("publishers", "subscribers", "messages_sent", "bytes_in", "bytes_out")
    }
    slots = made(spark, rows, columns).withColumns({**zeros, "slot": F.lit(BEGIN)})
    changes = [
        (channel, 3, BEGIN + timedelta(seconds=60), mode, SINGLE)
        for channel, mode in (("on two", ALL_PUBLISHERS), ("for two", ALL_SUBSCRIBERS))
    ]
    plans = made(spark, changes, "channel string, epoch long, at timestamp, from_mode string, to_mode string")
    loads = channels.channel_loads(slots, channels.replicated_spans(plans), 10).collect()
    names = ("mode", "seconds", "publications", "subscribers", "publishers")
    found = {row["channel"]: tuple(row[name] for name in names) for row in loads}
    assert found == {
        "moves": (SINGLE, 10.0, 110, 1, 1),
        "stays": (SINGLE, 11.0, 110, 1, 1),
        "on two": (ALL_PUBLISHERS, 10.0, 100, 2, 1),
        "for two": (ALL_SUBSCRIBERS, 10.0, 100, 1, 2),
    }


def test_counts_that_cannot_be_chance_are_anomalies_however_small(spark: SparkSession) -> None:
    """Of each series the last value, after 30 alike: counts of one second, of a minute, and numbers of subscribers."""
    series = {
        # name: metric, past, last, seconds of a slot, found
        "stops": ("publications_per_s", 20.0, 0.0, 5.0, True),
        "stops within chance": ("publications_per_s", 3.0, 0.0, 1.0, False),
        "starts": ("publications_per_s", 0.0, 20.0, 1.0, True),
        "one message": ("publications_per_s", 0.0, 1.0, 1.0, False),
        "triples in a minute": ("publications_per_s", 5.0, 15.0, 60.0, True),
        "triples in a second": ("publications_per_s", 2.0, 6.0, 1.0, False),
        "a quarter more": ("publications_per_s", 1000.0, 1250.0, 60.0, False),
        "all leave": ("subscribers", 40.0, 0.0, 60.0, True),
        "some leave": ("subscribers", 5.0, 0.0, 60.0, False),
    }
    rows = [
        ("channel", name, BEGIN + timedelta(seconds=number), metric, past if number < 30 else last, counted_s)
        for name, (metric, past, last, seconds, _) in series.items()
        for number in range(31)
        for counted_s in [seconds if metric == "publications_per_s" else 1.0]
    ]
    columns = "kind string, subject string, at timestamp, metric string, value double, counted_s double"
    found = {row["subject"] for row in anomalies.departures(made(spark, rows, columns)).collect()}
    assert found == {name for name, (*_, is_odd) in series.items() if is_odd}


def test_the_popularity_is_that_of_zipf(rows: Rows) -> None:
    (fit,) = rows("popularity")
    assert fit["exponent"] == pytest.approx(EXPONENT, abs=0.05)
    assert 0 < fit["standard_error"] < 0.05


def test_the_channel_that_went_to_and_fro_is_found_and_no_other(rows: Rows) -> None:
    assert [(row["channel"], row["to_servers"]) for row in rows("ping_pong")] == [(PING_PONG, ["s1"])]
    assert {round(row["preparing_s"], 3) for row in rows("changes")} == {0.2}
    assert {round(row["settling_s"], 3) for row in rows("changes")} == {0.5}


def test_decisions_are_compared_with_their_outcome(rows: Rows) -> None:
    errors = {(row["decision"], row["server"]): round(row["error"], 3) for row in rows("effects")}
    assert errors == {(1, "s1"): 0.02, (1, "s2"): -0.02, (2, "s2"): 0.23}
    assert [row["decision"] for row in rows("without_gain")] == [2]


def test_the_break_point_is_found_where_there_is_one(
    rows: Rows, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {row["server"]: row["break_ratio"] for row in rows("break_points")}
    assert found.pop("s1") == pytest.approx(BREAK, rel=0.05)
    assert set(found.values()) == {None}
    toml = (report / SETTINGS_FILE).read_text()
    (limit,) = re.findall(r'id = "s1".*\n.*\noutgoing_bytes_per_s_max = (\d+)', toml)
    assert int(limit) == pytest.approx(BREAK * CAPACITY, rel=0.05)
    assert main(["balancer", "--check", "--config", str(report / SETTINGS_FILE)]) == 0
    assert "valid" in capsys.readouterr().err


def test_anomalies_are_found_within_one_interval_and_no_others(rows: Rows) -> None:
    found = {(row["kind"], row["metric"], row["subject"], row["at"].timestamp()) for row in rows("anomalies")}
    slots = {each for each in found if each[0] in ("channel", "publisher")}
    assert slots == {
        ("channel", "publications_per_s", HOT, second(HOT_FROM)),
        ("channel", "publications_per_s", HOT, second(HOT_TO)),
        ("publisher", "channels", EVERYWHERE, second(EVERYWHERE_AT)),
    }
    reports = {(metric, subject, round(at - second(1))) for _, metric, subject, at in found - slots}
    assert reports == {
        ("outgoing_bytes_per_s", "s2", ODD_AT),
        ("outgoing_bytes_per_s", "s3", HOT_FROM),
        ("outgoing_bytes_per_s", "s3", HOT_TO),
        ("reports_missing", "s2", LOST_AT + 1),
        *(("silent_s", f"s{n}", 7200) for n in (1, 2, 3)),
    }


def test_the_time_without_a_recorder_is_a_gap(rows: Rows) -> None:
    [gap] = rows("gaps")
    assert (gap["kind"], gap["server"]) == ("no_reports", None)
    assert gap["at"].timestamp() == second(7200), "when reports come again"
    assert gap["seconds"] == pytest.approx(7200 - RESTART, abs=5)


def test_what_a_publisher_had_to_itself_is_known(rows: Rows) -> None:
    alone = [row for row in rows("publisher_slots") if row["publications_per_s"] is not None]
    assert {row["publisher"] for row in alone} == {f"{CHANNELS - 1:016x}"}
    rates = [row["publications"] / row["seconds"] for row in rows("channel_loads") if row["channel"] == ALONE]
    assert max(rates) <= max(row["publications_per_s"] for row in alone) <= 1.1 * max(rates)


def test_the_driver_collects_only_what_is_drawn(spark: SparkSession, planted: Path, written: Written) -> None:
    """The session of tests has a bound of 1 MB for what the driver collects, and this recording is larger."""
    with pytest.raises(SparkFailed, match="maxResultSize"), spark_errors():
        spark.read.parquet(str(planted / "channels")).collect()
    assert len(written.collected) > 15
    assert max(written.collected) <= COLLECTED_MAX


def test_thresholds_are_lowered_to_what_channels_had_before_they_overloaded_a_server(
    spark: SparkSession, tmp_path: Path
) -> None:
    loads = made(
        spark,
        [
            ("many publications", SINGLE, 1.0, 900, 30.0, 5, 900_000),
            ("many publications", SINGLE, 1.0, 600, 30.0, 5, 600_000),
            ("many subscribers", SINGLE, 2.0, 40, 90.0, 1, 2_000_000),
            ("replicated", ALL_PUBLISHERS, 1.0, 1, 20.0, 1, 2_000_000),
            ("one of each", SINGLE, 1.0, 10, 1.0, 1, 1_000_000),
        ],
        "channel string, mode string, seconds double, publications long, subscribers double, publishers long,"
        " bytes_out long",
    )
    found = [row.asDict() for row in replication.outgrown(loads, 1e6, 0.8).orderBy("channel").collect()]
    assert [(row["channel"], row["ratio"]) for row in found] == [
        ("many publications", 0.9),
        ("many subscribers", 1.0),
        ("one of each", 1.0),
    ]
    lines = thresholds(found, DEFAULTS)
    values = dict(line.split(" = ") for line in lines if not line.startswith("#"))
    # At load ratio 0.5: 500 publications/s to 30 subscribers, and 20 publications/s to 45 subscribers.
    assert values == {
        "replicate_publications_per_s_min": "450.0",
        "all_subscribers_ratio_min": "15.0",
        "replicate_subscribers_min": "40",
        "all_publishers_ratio_min": "2.0",
    }
    assert any("many publications alone made load ratio 0.90" in line for line in lines)
    toml = tmp_path / "recommended.toml"
    toml.write_text(as_toml([], {"s1": 1e6}, {"s1": "redis://10.0.0.1"}, None, DEFAULTS, lines))
    assert main(["balancer", "--check", "--config", str(toml)]) == 0
    assert thresholds([], DEFAULTS) == []


def test_latency_around_changes(rows: Rows) -> None:
    around = rows("latency_around")
    assert {row["lost"] for row in around} == {0}
    assert all(row[name] == pytest.approx(0.0004, rel=0.1) for row in around for name in ("before_s", "after_s"))
    assert {row["during_s"] for row in around if row["server"] == "s2"} != {None}


def test_the_page_is_one_file_and_says_it_in_sentences(report: Path) -> None:
    page = (report / PAGE).read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=|url\(|@import|https?:", page)
    assert re.search(r"<li>s3 was overloaded for [56] minutes from 10:02:\d\d .*&lt;script&gt;", page)
    assert "width=device-width" in page and "prefers-color-scheme:dark" in page


def test_the_same_events_in_other_files_are_the_same_tables(spark: SparkSession, planted: Path, doubled: Path) -> None:
    """The report is that of the recording with two recorders. What its jobs read is what they would read of one."""
    one, two = (Recording(spark, str(folder)) for folder in (planted, doubled))
    for name in TABLES:
        first, again = (each.table(name).drop("recorder") for each in (one, two))
        assertSchemaEqual(again.schema, first.schema)
        rows = summary(first)
        assert bool(rows["count"]) == (name != "gaps")
        assert summary(again) == rows, (name, first.exceptAll(again).take(3))
    assert spark.read.parquet(str(doubled / "channels")).count() > 1.9 * one.table("channels").count()


def summary(rows: DataFrame) -> dict[str, Any]:
    """Return how many rows there are, and a sum over their values in which the order of rows does not count."""
    values = F.xxhash64(F.to_json(F.struct("*"))).cast("decimal(38,0)")
    return rows.agg(F.count("*").alias("count"), F.sum(values).alias("sum")).collect()[0].asDict()
