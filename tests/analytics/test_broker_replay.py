"""Recorded loads of brokers, replayed through the production coordinator under other settings."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dynamoth.edge.control import BrokerReport, InterestColumns
from dynamoth.errors import ConfigError
from dynamoth_analytics.broker_what_if import REPLAYS, SETTINGS, BrokerWhatIf
from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.page.broker_what_if import broker_sentences
from dynamoth_analytics.reading import Recording, made
from dynamoth_analytics.recorded_settings import coordinator_in_force
from dynamoth_analytics.replay.brokers.comparison import compare_brokers
from dynamoth_analytics.replay.brokers.population import make_users, own_loads
from dynamoth_analytics.replay.brokers.replay import BrokerWindow, RecordedReport, recorded_figures, replay_brokers
from dynamoth_analytics.replay.brokers.task import BROKER_REPLAYS_SCHEMA, RECORDED
from dynamoth_analytics.replay.brokers.windows import (
    broker_span,
    packed_broker_windows,
    pauses_of,
    unpacked_brokers,
)
from dynamoth_analytics.replay.brokers.world import World
from dynamoth_analytics.replay.grid import (
    known_coordinator_settings,
    names_balancer,
    names_coordinator,
    read_coordinator_grid,
    read_grid,
)
from dynamoth_analytics.what_if import PAGE, write_page
from dynamoth_balancer.options import BalancerOptions
from dynamoth_broker.coordinator.events import AskCandidates
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from tests.analytics.broker_loads import BEGIN, RecordedBrokers, crowded, recorded, window_of
from tests.analytics.loads import write_rows
from tests.coordinator.scripted_cluster import report_of

ALERT = CoordinatorOptions(wait_s=5.0, rest_s=10.0, slow_half_life_s=5.0, looks=1, ratio_mean_min=0.1)
IDLE = replace(ALERT, cov_max=50.0, shuffle_cov_min=60.0, ratio_high=10.0)


def loads(world: World) -> dict[str, tuple[float, float, int]]:
    reports = {id_: world.present(id_) for id_ in world.brokers}
    return {id_: (each.load_bytes_per_s, each.inbound_bytes_per_s, each.users) for id_, each in reports.items()}


def test_loads_that_no_move_has_changed_are_those_recorded() -> None:
    world, model = World(), crowded()
    for broker in model.brokers.values():
        report = report_of(model, broker)
        assert world.report(report) is report


def test_moves_of_a_replay_change_loads_as_the_model_of_the_coordinator_does() -> None:
    world, model = World(), crowded()
    for broker in model.brokers.values():
        world.report(report_of(model, broker))
    # Each user is put back to where it was from: as if the recorded coordinator had moved it the other way.
    for number, user in enumerate([*model.users.values()][:40]):
        target = "b3" if number % 2 else "b2"
        world.put_back(user.id, target, user.broker, user.interests)
        model.move(user.id, target)
    for id_, (load, inbound, users) in loads(world).items():
        expected = report_of(model, model.brokers[id_])
        assert load == pytest.approx(expected.load_bytes_per_s) and inbound == pytest.approx(
            expected.inbound_bytes_per_s
        )
        assert users == expected.users
        present = world.present(id_).interests
        assert dict(zip(present.ids, present.users, strict=True)) == model.brokers[id_].counts


def test_what_the_recorded_coordinator_has_moved_is_put_back() -> None:
    model = crowded()
    before = {id_: (report_of(model, each).load_bytes_per_s, each.users) for id_, each in model.brokers.items()}
    cluster = recorded(ALERT, 40, model)
    assert cluster.migrations and model.brokers["b1"].users < 90
    world = World()
    for broker in model.brokers.values():
        world.report(report_of(model, broker))
    for each in cluster.migrations:
        world.put_back(each.session, each.source, each.target, each.interests)
    after = loads(world)
    assert {id_: users for id_, (_, _, users) in after.items()} == {id_: users for id_, (_, users) in before.items()}
    assert [load for load, _, _ in after.values()] == pytest.approx([load for load, _ in before.values()])


def test_users_are_made_up_as_reports_say_and_moved_users_are_offered_where_they_are() -> None:
    world, model = World(), crowded()
    for broker in model.brokers.values():
        world.report(report_of(model, broker))
    ask = AskCandidates(1, "b1", 1e9, 10_000, 60.0)
    found = world.candidates(ask, 0.0)
    counts = Counter(interest for each in found.users for interest in each.interests)
    assert counts == model.brokers["b1"].counts and len(found.users) == 90
    own = sorted(model.own_load(each.interests) for each in model.brokers["b1"].known.values())
    made = sorted(model.own_load(each.interests) for each in found.users)
    assert sum(own) == pytest.approx(sum(made))
    assert max(abs(a - b) for a, b in zip(own, made, strict=True)) < max(own) / 2

    chosen = found.users[0]
    world.move(chosen.user, "b1", "b2", 0.0)
    assert chosen.user not in {each.user for each in world.candidates(replace(ask, broker="b2"), 59.0).users}
    rested = {each.user: each.interests for each in world.candidates(replace(ask, broker="b2"), 60.0).users}
    assert rested[chosen.user] == chosen.interests and len(rested) == 21
    present = world.present("b2").interests
    assert Counter(each for theirs in rested.values() for each in theirs) == dict(
        zip(present.ids, present.users, strict=True)
    )
    assert len(world.candidates(ask, 60.0).users) == 89
    world.move(chosen.user, "b2", "b1", 61.0)
    assert loads(world)["b1"][2] == 90 and loads(world)["b1"][0] == pytest.approx(model.brokers["b1"].load - 64 * 90)


def test_made_users_have_the_loads_of_the_classes_and_counts_are_right_in_the_sum() -> None:
    assert own_loads([2, 0, 0, 2], 4) == [6.0, 6.0, 0.0, 0.0] and own_loads([], 2) == [0.0, 0.0]
    assert len(own_loads([3, 3, 3], 5)) == 5
    users = make_users(3, [0, 0, 1, 0, 2], {"a": 2.0, "b": 1.0}, {"a": 10.0, "b": 3.0})
    assert sorted(users) == [("a",), ("a",), ("b",)]
    many = {f"k{number}": 0.25 for number in range(40)}
    assert sum(map(len, make_users(5, [], many, {}))) == 10


def test_the_replay_under_the_settings_in_force_is_like_what_was_recorded() -> None:
    cluster = recorded(ALERT, 90)
    window = window_of(cluster)
    real, replayed = (run(window, ALERT, 0.9) for run in (recorded_figures, replay_brokers))
    assert real is not None and replayed is not None and real.moves == len(cluster.migrations) > 10
    assert replayed.moves == pytest.approx(real.moves, rel=0.5)
    assert replayed.cov == pytest.approx(real.cov, abs=0.05)
    assert replayed.seconds == pytest.approx(real.seconds, abs=2)
    idle = replay_brokers(window, IDLE, 0.9)
    assert idle is not None and idle.moves == idle.decisions == 0
    assert idle.cov > 2 * replayed.cov and idle.ratio_max_mean > replayed.ratio_max_mean
    assert idle.overload_s > replayed.overload_s


def test_a_coordinator_in_a_dry_run_is_replayed_as_if_it_moved_users_and_a_pause_as_a_pause() -> None:
    cluster = recorded(replace(ALERT, dry_run=True), 40)
    window = window_of(cluster)
    assert not cluster.migrations
    moving = replay_brokers(window, replace(ALERT, dry_run=True), 0.9)
    assert moving is not None and moving.moves
    paused = replay_brokers(replace(window, pauses=[(BEGIN - 100.0, True)]), ALERT, 0.9)
    assert paused is not None and not paused.moves
    later = replay_brokers(replace(window, pauses=[(BEGIN - 100.0, True), (BEGIN + 20.0, False)]), ALERT, 0.9)
    assert later is not None and later.moves > 0


def test_brokers_that_end_or_drain_count_no_more_and_a_window_without_reports_has_no_figures() -> None:
    one = BrokerReport(
        broker="b1",
        capacity_bytes_per_s=10.0,
        load_bytes_per_s=9.5,
        inbound_bytes_per_s=2.0,
        users=1,
        other_ratio_max=0.2,
    )
    gone = replace(one, broker="b2", load_bytes_per_s=1.0)
    reports = [RecordedReport(BEGIN + second, one) for second in range(60)]
    reports.insert(1, RecordedReport(BEGIN, gone))
    options = replace(IDLE, connection_bytes_per_s=0.0, forget_s=10.0)
    found = recorded_figures(BrokerWindow(BEGIN, BEGIN + 60, reports), options, 0.9)
    assert found is not None and found.overload_s == 59.0 and found.ratio_max == 0.95
    assert 0 < found.cov < 0.3, "b2 counts for ten seconds"
    draining = [each._replace(report=replace(each.report, is_draining=True)) for each in reports]
    empty = recorded_figures(BrokerWindow(BEGIN, BEGIN + 60, draining), options, 0.9)
    assert empty is not None and empty.overload_s == empty.ratio_max == 0.0
    assert replay_brokers(BrokerWindow(BEGIN + 100, BEGIN + 200, reports), options, 0.9) is None


def test_reports_without_interests_keep_those_before() -> None:
    world, model = World(), crowded()
    report = report_of(model, model.brokers["b1"])
    world.report(report)
    later = world.report(replace(report, interests=InterestColumns(), users=91))
    assert later.interests == report.interests and later.users == 91


GRID = (
    "coordinator.cov_max = [0.1, 50.0]\ncoordinator.shuffle_cov_min = 60.0\ncoordinator.cov_target = 0.05\n"
    "coordinator.ratio_high = 10.0\n"
)


@pytest.fixture(scope="module")
def cluster() -> RecordedBrokers:
    return recorded(IDLE, 120)


def test_settings_that_move_users_beat_those_in_force_that_do_not(
    spark: SparkSession, cluster: RecordedBrokers, tmp_path: Path
) -> None:
    cluster.write(tmp_path / "recording")
    (tmp_path / "out").mkdir()
    recording = Recording(spark, str(tmp_path / "recording"))
    in_force = coordinator_in_force(recording)
    assert in_force.recorded and in_force.options == IDLE
    combinations = read_coordinator_grid(GRID, "grid.toml", in_force.options)
    assert [each.text for each in combinations][1].startswith("coordinator.cov_max = 0.1, ") and len(combinations) == 2
    lines: list[str] = []
    found = BrokerWhatIf(recording, combinations, 120.0, 0.8, tmp_path / "out").run(lines.append)
    replays = spark.read.parquet(str(tmp_path / "out" / REPLAYS))
    assert replays.schema == spark.createDataFrame([], BROKER_REPLAYS_SCHEMA).schema
    rows = {(row["combination"], row["window"]): row for row in replays.collect()}
    assert rows.keys() == {(number, 0) for number in (RECORDED, 0, 1)}
    for name in ("overload_s", "ratio_max", "cov", "redis_egress", "moves"):
        assert rows[0, 0][name] == pytest.approx(rows[RECORDED, 0][name]), "nobody was moved"
    table = {row["combination"]: row for row in spark.read.parquet(str(tmp_path / "out" / SETTINGS)).collect()}
    assert json.loads(table[1]["changes"])["coordinator.cov_max"] == 0.1
    assert table[1]["cov"] < table[0]["cov"] and table[1]["moves"] > 0 == table[0]["moves"]
    assert (table[1]["better"], table[1]["worse"], table[1]["failed"]) == (1, 0, 0)
    write_page(tmp_path / "out", [found])
    page = (tmp_path / "out" / PAGE).read_text()
    assert "coordinator.cov_max = 0.1" in page and "<svg" in page and "(recorded)" in page
    assert found.sentences[0].startswith("Brokers, better") and lines


def test_less_overload_counts_before_a_lower_cov_and_that_before_fewer_moves(spark: SparkSession) -> None:
    def row(combination: int, window: int, overload_s: float, cov: float, moves: int) -> tuple[Any, ...]:
        return combination, window, 60.0, overload_s, 1.0, 0.5, cov, 1e6, moves, 1, 0, None

    in_force = [row(number, window, 30.0, 0.2, 10) for number in (RECORDED, 0) for window in range(3)]
    other = [row(1, 0, 29.5, 0.204, 9), row(1, 1, 30.5, 0.1, 50), row(1, 2, 40.0, 0.1, 1)]
    failed = (2, 0, *[None] * 9, "it is broken")
    combinations = read_coordinator_grid("coordinator.looks = [1, 2]", "grid.toml", CoordinatorOptions())
    replays = made(spark, [*in_force, *other, row(2, 1, 0.0, 0.0, 0), failed], BROKER_REPLAYS_SCHEMA)
    recorded_sum, compared = compare_brokers(replays, combinations)
    assert (recorded_sum.windows, recorded_sum.overload_minutes, recorded_sum.moves) == (3, 1.5, 30)
    first, second, third = compared
    assert (first.better, first.worse, first.costs) == (0, 0, (1.5, 0.2, 30.0))
    assert (second.better, second.worse, second.tried) == (2, 1, 2), "fewer moves; a lower cov; more overload"
    assert second.figures.cov == pytest.approx((0.204 + 0.1 + 0.1) / 3)
    assert (third.windows, third.failed, third.problem) == (1, 1, "it is broken")
    said = broker_sentences(recorded_sum, compared, 0.9)
    assert said[-1].endswith("The first: coordinator.looks = 2: it is broken.")
    assert said[0].startswith("Brokers, better in most windows, which may be chance: coordinator.looks = 1")
    with pytest.raises(BadRecording, match="none has a report"):
        compare_brokers(replays.where("combination > 0"), combinations)


def test_a_window_is_unpacked_as_it_was_recorded(spark: SparkSession, tmp_path: Path) -> None:
    cluster = RecordedBrokers(crowded(), ALERT)
    cluster.refusing = {f"b1u{number}@ann" for number in range(45)}
    cluster.run(30)
    cluster.write(tmp_path)
    recording = Recording(spark, str(tmp_path))
    spanned = broker_span(recording, 20.0)
    assert spanned is not None
    span, windows = spanned
    assert (span.begin, span.end, span.windows, span.move_s) == (BEGIN, BEGIN + 29, 2, 0.0) and windows >= 2
    packed = packed_broker_windows(recording, span).collect()
    found = {
        row["window"]: unpacked_brokers(
            row["window"], bytes(row["reports"]), bytes(row["interests"]), row["migrations"], row["pauses"], span
        )
        for row in packed
    }
    first, second = found[0], found[1]
    assert (first.begin, second.end) == (BEGIN, BEGIN + 40) and len(second.reports) == len(cluster.reports), "a preroll"
    recorded_ones = sorted(cluster.reports, key=lambda each: (each.at, each.report.broker))
    for mine, theirs in zip(recorded_ones, second.reports, strict=True):
        whole = replace(theirs.report, interests=mine.report.interests)
        assert (theirs.at, whole) == (mine.at, mine.report)
        columns = theirs.report.interests
        assert sorted(columns.ids) == (sorted(mine.report.interests.ids) if mine.at % 10 == BEGIN % 10 else [])
    moves = [(each.source, each.target, sorted(each.interests)) for each in (*first.migrations, *second.migrations)]
    assert sorted(moves) == sorted((each.source, each.target, sorted(each.interests)) for each in cluster.migrations)
    assert any(row["end"] == "deadline" for row in cluster.tables["broker_moves"]), "some did not move"


def test_a_coordinator_decides_nothing_before_the_recorded_one_was_there_nor_while_it_was_paused(
    spark: SparkSession, tmp_path: Path
) -> None:
    def pauses() -> list[tuple[float, str]]:
        found = pauses_of(Recording(spark, str(tmp_path))).collect()[0]["pauses"]
        return [(row["at"], row["state"]) for row in json.loads(found)]

    assert pauses() == []
    at = datetime.fromtimestamp(BEGIN, UTC)
    row = {"at": at, "coordinator": 1, "number": 1, "line": 0, "name": "looks", "value": "3"}
    write_rows(tmp_path, "coordinator_settings", [row])
    states = [(10, "made"), (20, "paused"), (30, "resumed")]
    decisions = [
        {"at": at + timedelta(seconds=second), "coordinator": 1, "number": second, "line": 0, "state": state}
        for second, state in states
    ]
    write_rows(tmp_path, "broker_decisions", decisions)
    times = [(0.0, "paused"), (BEGIN, "resumed"), (BEGIN + 20, "paused"), (BEGIN + 30, "resumed")]
    assert pauses() == times


def test_a_recording_without_brokers_cannot_be_replayed_with_coordinator_settings(
    spark: SparkSession, tmp_path: Path
) -> None:
    combinations = read_coordinator_grid(GRID, "grid.toml", CoordinatorOptions())
    with pytest.raises(BadRecording, match=r"no report of a broker.*leave coordinator\.\* out"):
        BrokerWhatIf(Recording(spark, str(tmp_path)), combinations, 60.0, None, tmp_path).run(lambda _: None)


def test_a_grid_may_name_settings_of_the_balancer_and_of_the_coordinator() -> None:
    text = (
        "wait_s = [5, 10]\ncoordinator.wait_s = [1, 2]\n[[grid]]\nreplicate = false\n[grid.coordinator]\nlooks = [1, 2]"
    )
    text = text.replace("replicate = false", "load_ratio_high = 0.9")
    assert names_balancer(text, "g") and names_coordinator(text, "g")
    assert not names_balancer(GRID, "g") and not names_coordinator("wait_s = 5", "g")
    of_balancer = read_grid(text, "g", BalancerOptions(wait_s=5.0))
    assert [each.text for each in of_balancer] == ["as in force", "wait_s = 10.0", "load_ratio_high = 0.9"]
    of_coordinator = read_coordinator_grid(text, "g", CoordinatorOptions(looks=2))
    assert [each.text for each in of_coordinator] == [
        *("as in force", "coordinator.wait_s = 1.0", "coordinator.wait_s = 2.0", "coordinator.looks = 1")
    ]
    assert "lease_s" not in known_coordinator_settings() and "dry_run" not in known_coordinator_settings()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("coordinator.cov_maxx = 1", r"coordinator\.cov_maxx is no setting .*coordinator\.cov_max"),
        ("coordinator.looks = 0", r"coordinator\.looks: a whole number from 1"),
        ("coordinator = 3", r"coordinator\.cov_max = \[0\.1, 0\.2\] expected"),
        ("coordinator.cov_max = 0.01", r"coordinator\.cov_target = 0\.05 must be at most coordinator\.cov_max = 0\.01"),
        (
            "coordinator.shuffle_cov_min = 0.15",
            r"cov_max = 0\.15 must be less than coordinator\.shuffle_cov_min = 0\.15",
        ),
        ("coordinator.lease_s = 3", "no setting that a grid can change"),
        ("[coordinator]", "it names no setting"),
    ],
)
def test_a_grid_of_the_coordinator_that_cannot_be_used_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_coordinator_grid(text, "grid.toml", CoordinatorOptions())


def test_what_contradicts_itself_is_refused_before_the_settings_in_force_are_known() -> None:
    text = "coordinator.cov_max = 0.01\ncoordinator.cov_target = 0.05"
    with pytest.raises(ConfigError, match="must be at most"):
        read_coordinator_grid(text, "grid.toml", CoordinatorOptions(), related=False)
    early = read_coordinator_grid("coordinator.cov_max = 0.01", "grid.toml", CoordinatorOptions(), related=False)
    assert len(early) == 1
