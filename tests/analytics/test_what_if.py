"""``dynamoth what-if`` on real Spark: settings that are better than those in force are found."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas and pyarrow come without types; mypy checks the rest.

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError
from dynamoth.recording import channel_text
from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.page.what_if import fidelity_sentences, sections, sentences
from dynamoth_analytics.reading import Recording
from dynamoth_analytics.recorded_settings import DEFAULTS, present_settings, settings_in_force
from dynamoth_analytics.replay.comparison import Compared, compare, complete, frontier, sign_test
from dynamoth_analytics.replay.fidelity import DifferenceInWords, Fidelity, NotReplayed
from dynamoth_analytics.replay.grid import COMBINATIONS_MAX, read_grid
from dynamoth_analytics.replay.recorded import RecordedWindow
from dynamoth_analytics.replay.task import REPLAYS, REPLAYS_SCHEMA, replayed
from dynamoth_analytics.replay.tasks import chunks_per_window
from dynamoth_analytics.replay.windows import (
    WHOLE_RECORDING,
    ReplaySpan,
    packed_windows,
    pauses_of,
    plan_steps,
    reports_of,
    with_preroll,
)
from dynamoth_analytics.what_if import PAGE, WhatIf, settle_s
from dynamoth_balancer.options import BalancerOptions
from dynamoth_cli.main import main
from tests.analytics.loads import BEGIN, SERVERS, load, recorded_under, rising, write

IN_FORCE = BalancerOptions(load_ratio_high=1.1, wait_s=5.0, averaging_s=5.0, channel_rest_s=10.0)
GRID = "load_ratio_high = [0.8, 5.0]\nwait_s = { from = 5, to = 20, step = 15 }\n"


def test_settings_that_move_earlier_beat_those_in_force(spark: SparkSession, tmp_path: Path) -> None:
    window = load(180, rising({"s1": 8, "s2": 4, "s3": 4}, 50_000, 150_000, 90))
    recorded, moves, tables = recorded_under(window, IN_FORCE)
    write(tmp_path / "recording", recorded, tables)
    (tmp_path / "out").mkdir()
    recording = Recording(spark, str(tmp_path / "recording"))
    in_force = settings_in_force(recording)
    assert in_force.settings.options == IN_FORCE and moves
    combinations = read_grid(GRID, "grid.toml", in_force.settings.options)
    lines: list[str] = []
    found = WhatIf(recording, in_force, combinations, 90.0, 0.8, tmp_path / "out").write(lines.append)
    replays = spark.read.parquet(str(tmp_path / "out" / "replays"))
    assert replays.schema == spark.createDataFrame([], REPLAYS_SCHEMA).schema
    rows = {(row["combination"], row["window"]): row for row in replays.collect()}
    assert len(rows) == 5 * 2 + 1, "each combination in each window, and those in force in the whole"
    agreement = json.loads(rows[0, WHOLE_RECORDING]["agreement"])
    assert agreement["recorded"] == agreement["same"] > 0 and not agreement["differences"]
    assert agreement["moves"] == agreement["moves_replayed"] == len(moves)
    table = {row["combination"]: row for row in spark.read.parquet(str(tmp_path / "out" / "settings")).collect()}
    assert [json.loads(table[number]["changes"]).get("load_ratio_high") for number in range(5)] == [
        *(None, 0.8, 0.8, 5.0, 5.0)
    ]
    assert table[1]["overload_minutes"] < table[0]["overload_minutes"] < table[3]["overload_minutes"]
    assert table[1]["better"] >= 1 and not table[1]["worse"] and table[1]["on_frontier"]
    assert table[3]["moves"] == 0 and table[3]["on_frontier"], "no moves, more overload"
    page = (tmp_path / "out" / PAGE).read_text()
    assert "<svg" in page and "http" not in page and "load_ratio_high = 0.8" in page
    assert any("(100%)" in sentence for sentence in found) and lines
    # How the combinations are divided into tasks makes no difference.
    first, last = recorded.reports[0].at, recorded.reports[-1].at
    span = ReplaySpan(first, last, 90.0, SERVERS, SERVERS, settle_s(recording), in_force.balancer, in_force.led_since)
    task = packed_windows(recording, span).where(F.col("window") == 1).withColumn("chunk", F.lit(1)).toPandas()
    of_chunk = replayed([each.options for each in combinations], span, 0.8, 3, iter([task]))
    assert [row for frame in of_chunk for row in frame.to_dict("records")] == [
        rows[number, 1].asDict() for number in (1, 4)
    ]
    # A part of the recording begins with the averages and places of the time before it.
    later = Recording(spark, recording.folder, datetime.fromtimestamp(BEGIN + 140, UTC))
    span = ReplaySpan(BEGIN + 140, BEGIN + 180, 60.0, SERVERS)
    windows = {
        (row["window"], row["begin"])
        for row in reports_of(with_preroll(later), span).groupBy("window").agg(F.min("at").alias("begin")).collect()
    }
    assert windows == {(0, BEGIN + 110), (WHOLE_RECORDING, BEGIN + 110)}, "with reports for the averages"
    steps = plan_steps(later, span).where(F.col("window") == 0).collect()[0]["steps"]
    assert {row["channel"] for row in json.loads(steps)} == {channel_text(step.channel) for step in recorded.steps}


@pytest.mark.parametrize("windows", [1, 6, 31, 144])
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_a_window_is_copied_to_few_tasks_however_many_combinations_there_are(windows: int, cores: int) -> None:
    chunks = chunks_per_window(windows, 10_000, cores)
    assert chunks <= 4 * cores and cores < windows * chunks < 4 * cores + windows + 1
    assert chunks_per_window(windows, 100, cores) == min(100, chunks) and chunks_per_window(windows, 1, cores) == 1


def settings_rows(balancer: int, at: float, **values: object) -> list[dict[str, object]]:
    key = {"at": at, "balancer": balancer, "number": 1}
    return [{**key, "line": line, "name": name, "value": json.dumps(values[name])} for line, name in enumerate(values)]


def test_the_settings_in_force_are_those_of_the_latest_balancer(spark: SparkSession, tmp_path: Path) -> None:
    earlier = settings_rows(1, BEGIN, load_ratio_high=0.7, wait_s=3.0)
    latest = settings_rows(2, BEGIN + 60, load_ratio_high=0.9, servers={"s1": "redis://a:1"})
    paused = [{"at": BEGIN + 62, "balancer": 2, "number": 2, "line": 0, "kind": "paused"}]
    tables = {"settings": [*earlier, *latest], "decisions": paused}
    write(tmp_path, RecordedWindow(BEGIN, BEGIN, SERVERS, []), tables)
    found = present_settings(Recording(spark, str(tmp_path)))
    assert found.recorded and found.urls == {"s1": "redis://a:1"} and found.led_since == BEGIN + 60
    assert found.numbers == {**DEFAULTS, "load_ratio_high": 0.9}, "nothing of the balancer before"
    after = Recording(spark, str(tmp_path), datetime.fromtimestamp(BEGIN + 65, UTC))
    assert settings_in_force(after) == replace(found, led_since=None), "they are not recorded each second"
    again = [{**row, "number": 9} for row in settings_rows(2, BEGIN + 59, load_ratio_high=0.6, wait_s=4.0)]
    write(tmp_path / "back", RecordedWindow(BEGIN, BEGIN, SERVERS, []), {"settings": [*latest, *again]})
    of_latest = settings_in_force(Recording(spark, str(tmp_path / "back"))).numbers
    assert (of_latest["load_ratio_high"], of_latest["wait_s"]) == (0.6, 4.0), "the recorder's clock went back"
    pauses = json.loads(pauses_of(after).collect()[0]["pauses"])
    assert [row["kind"] for row in pauses] == ["leads", "leads", "paused"], "still paused, since before the begin"


def test_settings_that_could_not_be_replayed_in_all_windows_are_not_compared(spark: SparkSession) -> None:
    rows: list[dict[str, object]] = []
    recorded: list[list[float | None]] = [[60.0] * 3, [0.0, None, None], [30.0, 90.0, 60.0], [None] * 3]
    for combination, overloads in enumerate(recorded):
        for window, overload_s in enumerate(overloads):
            row: dict[str, object] = {"combination": combination, "window": window, "problem": f"cause {window}"}
            if overload_s is not None:
                figures = {"overload_s": overload_s, "ratio_max": 1.0, "imbalance": 1.0, "server_s": 180.0}
                row |= {**figures, "moves": 1, "replications": 0, "problem": None}
            rows.append(row)

    def compared(rows: Iterable[Mapping[str, object]]) -> list[Compared]:
        frame = spark.createDataFrame([tuple(row.get(name) for name in REPLAYS) for row in rows], REPLAYS_SCHEMA)
        return compare(frame, read_grid("wait_s = [1, 2, 3]", "grid.toml", BalancerOptions()))

    found = compared(rows)
    assert [(each.windows, each.failed, each.problem) for each in found] == [
        *((3, 0, None), (1, 2, "cause 1"), (3, 0, None), (0, 3, "cause 0"))
    ]
    assert [each.combination for each in complete(found)] == [0, 2] and (found[2].better, found[2].worse) == (1, 1)
    first, *others = sentences(found, 60.0, 0.8)
    assert first.startswith("The other combination is not better")
    assert others[-1].startswith("2 of 3 other combinations could not be") and "wait_s = 1.0: cause 1." in others[-1]
    parts = "".join(sections(found, NotReplayed("it ended")))
    assert "Not compared" in parts and "cause 0" in parts and "failed: it ended." in parts
    failed = [{**rows[0], "overload_s": None, "problem": "it does not lead"}, *rows[1:]]
    in_force, *_ = found = compared(failed)
    assert (in_force.windows, in_force.overload_minutes, in_force.failed) == (2, 2.0, 1)
    assert [(each.combination, each.windows) for each in found] == [(0, 2), (1, 0), (2, 2), (3, 0)]
    assert "in 1 of 3 windows: it does not lead." in "".join(sentences(found, 60.0, 0.8))
    with pytest.raises(BadRecording, match="it does not lead"):
        compared([{**row, "problem": "it does not lead", "overload_s": None} for row in rows])


@pytest.mark.parametrize(
    ("better", "worse", "tried", "sure"),
    [(12, 0, 8, True), (9, 3, 8, False), (7, 5, 8, False), (10, 1, 1, True), (10, 1, 100, False), (6, 0, 1, False)],
)
def test_only_what_is_hardly_chance_is_called_better(better: int, worse: int, tried: int, sure: bool) -> None:
    in_force = Compared(0, "as in force", 12, 2.0, 600.0, 3, 0, 1.0, 1.0, 0, 0)
    other = replace(in_force, combination=1, text="wait_s = 9.0", better=better, worse=worse, tried=tried)
    main = sentences([in_force, other], 60.0, 0.8)[0]
    assert main.startswith("Better: wait_s = 9.0") == sure and (
        sure or "No settings are clearly better" in main or " not better" in main
    )
    assert ("may be chance" in main) == (not sure and better > 6)


def test_a_setting_that_is_better_in_most_windows_and_worse_in_all_is_called_so() -> None:
    in_force = Compared(0, "as in force", 12, 2.0, 600.0, 3, 0, 1.0, 1.0, 0, 0)
    other = replace(in_force, combination=1, text="wait_s = 9.0", better=11, worse=1, overload_minutes=9.0)
    assert "with more overload in all" in sentences([in_force, other], 60.0, 0.8)[0]
    assert sentences([in_force], 60.0, 0.8)[0].startswith("There are no other settings")


def test_decisions_that_only_the_replay_makes_are_said_with_the_time_of_the_first() -> None:
    only_replayed = DifferenceInWords(BEGIN, "", "c-1: s1 to s2", "none was recorded")
    [none] = fidelity_sentences(Fidelity(differences=[only_replayed]))
    assert none.endswith("; the replay would have decided, first at 22:13:20.")
    assert fidelity_sentences(Fidelity())[0].endswith("; the replay makes none either.")
    some, _ = fidelity_sentences(Fidelity(recorded=4, same=3, differences=[only_replayed]))
    assert "makes 3 of the balancer's 4 recorded decisions (75%), and would have decided after the last of them" in some


def test_all_that_is_wrong_in_a_grid_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "servers").mkdir()
    grid = tmp_path / "grid.toml"
    grid.write_text(
        "load_ratio_hihg = 0.7\nwait_s = [10, -1, 'soon']\nmoves_per_plan_max = []\n"
        "averaging_s = { from = 5, to = 1, step = 1 }\nlease_s = 9\nreplicas_max = { to = 3 }\n"
    )
    assert main(["what-if", str(tmp_path), "--grid", str(grid), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    for problem in (
        "load_ratio_hihg is no setting that a grid can change: did you mean load_ratio_high?",
        "wait_s: a number from 0 to 1000000 (s) expected, not -1",
        "not 'soon'",
        "moves_per_plan_max: the list is empty",
        "averaging_s: a range goes up",
        "lease_s is no setting",
        "replicas_max: a range { from = 0.6, to = 0.9, step = 0.1 } expected, not { to = 3 }",
    ):
        assert problem in error
    assert "Traceback" not in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("load_ratio_high = ", "is not TOML"),
        ("", "names no setting"),
        ("grid = 3", "tables"),
        (
            f"wait_s = {{ from = 1, to = {COMBINATIONS_MAX}, step = 1 }}\nchannel_rest_s = [1, 2]",
            f"{2 * COMBINATIONS_MAX} combinations",
        ),
        ("load_ratio_safe = [0.5, 0.9]", "load_ratio_safe = 0.9 is above load_ratio_high = 0.8"),
    ],
)
def test_a_grid_that_cannot_be_used_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_grid(text, "grid.toml", BalancerOptions())


def test_what_contradicts_itself_is_refused_before_the_settings_in_force_are_known() -> None:
    text = "load_ratio_safe = [0.5, 0.95]\nload_ratio_high = 0.9"
    with pytest.raises(ConfigError, match=r"load_ratio_safe = 0.95 is above load_ratio_high = 0.9"):
        read_grid(text, "grid.toml", BalancerOptions(), related=False)
    assert len(read_grid("load_ratio_safe = 0.95", "grid.toml", BalancerOptions(), related=False)) == 1


def test_grids_are_combined_in_tables_of_their_own() -> None:
    text = "wait_s = [5, 10]\n[[grid]]\nload_ratio_high = 0.9\nload_ratio_safe = { from = 0.7, to = 0.9, step = 0.1 }"
    combinations = read_grid(text, "grid.toml", BalancerOptions(wait_s=5.0))
    assert [each.text for each in combinations] == [
        "as in force",
        "wait_s = 10.0",
        *(f"load_ratio_high = 0.9, load_ratio_safe = {safe}" for safe in (0.7, 0.8, 0.9)),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["{missing}", "--grid", "{grid}"], 2, "there is no folder"),
        (["{recording}", "--grid", "{missing}"], 2, "cannot be read: No such file or directory: give a TOML file"),
        (["{recording}", "--grid", "{grid}", "--window", "0.5"], 2, "from 1 to 1440 (minutes)"),
        (["{recording}", "--grid", "{grid}", "--window", "inf"], 2, "--window inf"),
        (["{recording}", "--grid", "{grid}", "--window", "nan"], 2, "--window nan"),
        (["{recording}", "--grid", "{grid}", "--out", "{recording}"], 2, "is not empty"),
        (["{recording}", "--grid", "{grid}", "--overload-ratio", "0"], 2, "a number above 0"),
        (["{recording}", "--grid", "{grid}", "--overload-ratio", "inf"], 2, "--overload-ratio inf"),
        (["{recording}", "--grid", "{grid}", "--overload-ratio", "nan"], 2, "--overload-ratio nan"),
    ],
)
def test_wrong_use_is_answered_in_one_sentence(
    arguments: list[str], code: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recording" / "servers").mkdir(parents=True)
    (tmp_path / "grid.toml").write_text("wait_s = 5")
    places = {"recording": tmp_path / "recording", "grid": tmp_path / "grid.toml", "missing": tmp_path / "missing"}
    assert main(["what-if", *(each.format(**places) for each in arguments)]) == code
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_the_frontier_has_what_nothing_beats_in_everything() -> None:
    one = Compared(1, "one", 6, 2.0, 600.0, 3, 0, 1.0, 1.0, 6, 0)
    more_moves, worse = replace(one, combination=2, overload_minutes=1.0, moves=9), replace(one, combination=3, moves=4)
    assert frontier([worse, one, more_moves]) == [more_moves, one]
    assert one.p == 1 / 64 and sign_test(0, 0) == 1.0 and sign_test(1, 1) == 0.75
    assert 0.5 < sign_test(5000, 5000) < 0.51, "two months of windows"
    assert replace(one, tried=10).p == 10 / 64 and replace(one, tried=100).p == 1.0, "each may be better by chance"
