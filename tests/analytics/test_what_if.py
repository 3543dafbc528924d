"""``dynamoth what-if`` on real Spark: settings that are better than those in force are found."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas and pyarrow come without types; mypy checks the rest.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dynamoth.errors import ConfigError
from dynamoth_analytics.frontier import Compared, frontier, sign_test
from dynamoth_analytics.grid import SETTINGS_MAX, read_grid
from dynamoth_analytics.reading import Recording
from dynamoth_analytics.replay import recorded_anew
from dynamoth_analytics.what_if import PAGE, REPLAYS, WhatIf, in_force
from dynamoth_analytics.windows import WHOLE
from dynamoth_balancer.options import BalancerOptions
from dynamoth_cli.main import main
from tests.analytics.loads import load, rising, write

IN_FORCE = BalancerOptions(load_ratio_high=1.1, wait_s=5.0, averaging_s=5.0, channel_rest_s=10.0)
GRID = "load_ratio_high = [0.8, 5.0]\nwait_s = { from = 5, to = 20, step = 15 }\n"


def test_settings_that_move_earlier_beat_those_in_force(spark: SparkSession, tmp_path: Path) -> None:
    window = load(180, rising({"s1": 8, "s2": 4, "s3": 4}, 50_000, 150_000, 90))
    recorded, moves, tables = recorded_anew(window, IN_FORCE)
    write(tmp_path / "recording", recorded, tables)
    (tmp_path / "out").mkdir()
    recording = Recording(spark, str(tmp_path / "recording"))
    settings = in_force(recording)
    assert settings.recorded.options == IN_FORCE and moves
    combinations = read_grid(GRID, "grid.toml", settings.recorded.options)
    lines: list[str] = []
    found = WhatIf(recording, settings, combinations, 60.0, 0.8, tmp_path / "out").write(lines.append)
    replays = spark.read.parquet(str(tmp_path / "out" / "replays"))
    assert replays.schema == spark.createDataFrame([], REPLAYS).schema
    rows = {(row["setting"], row["slot"]): row for row in replays.collect()}
    assert len(rows) == 5 * 3 + 1, "each combination in each window, and those in force in the whole"
    agreement = json.loads(rows[0, WHOLE]["agreement"])
    assert agreement["recorded"] == agreement["same"] > 0 and not agreement["differences"]
    assert agreement["moves"] == agreement["moves_replayed"] == len(moves)
    table = {row["setting"]: row for row in spark.read.parquet(str(tmp_path / "out" / "settings")).collect()}
    assert [json.loads(table[number]["changes"]).get("load_ratio_high") for number in range(5)] == [
        *(None, 0.8, 0.8, 5.0, 5.0)
    ]
    assert table[1]["overload_minutes"] < table[0]["overload_minutes"] < table[3]["overload_minutes"]
    assert table[1]["better"] >= 1 and not table[1]["worse"] and table[1]["on_frontier"]
    assert table[3]["moves"] == 0 and table[3]["on_frontier"], "no moves, more overload"
    page = (tmp_path / "out" / PAGE).read_text()
    assert "<svg" in page and "http" not in page and "load_ratio_high = 0.8" in page
    assert any("(100%)" in sentence for sentence in found) and lines


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
        "replicas_max: a range { from = 0.6, to = 0.9, step = 0.1 } expected",
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
            f"wait_s = {{ from = 1, to = {SETTINGS_MAX}, step = 1 }}\nchannel_rest_s = [1, 2]",
            f"{2 * SETTINGS_MAX} combinations",
        ),
        ("load_ratio_safe = [0.5, 0.9]", "load_ratio_safe = 0.9 is above load_ratio_high = 0.8"),
    ],
)
def test_a_grid_that_cannot_be_used_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_grid(text, "grid.toml", BalancerOptions())


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
        (["{recording}", "--grid", "{missing}"], 2, "cannot be read"),
        (["{recording}", "--grid", "{grid}", "--window", "0.5"], 2, "at least 1 minute"),
        (["{recording}", "--grid", "{grid}", "--out", "{recording}"], 2, "is not empty"),
        (["{recording}", "--grid", "{grid}", "--overload-ratio", "0"], 2, "more than 0"),
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
    more_moves, worse = replace(one, setting=2, overload_minutes=1.0, moves=9), replace(one, setting=3, moves=4)
    assert frontier([worse, one, more_moves]) == [more_moves, one]
    assert one.p == 1 / 64 and sign_test(0, 0) == 1.0 and sign_test(1, 1) == 0.75
    assert replace(one, tried=10).p == 10 / 64 and replace(one, tried=100).p == 1.0, "each may be better by chance"
