"""Replays of described loads: what the balancer of production does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynamoth.plan.plan import Assignment, Mode, single
from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.replay.recorded import Moved, RecordedReport, RecordedWindow
from dynamoth_analytics.replay.replay import Outcome, measured, replay
from dynamoth_analytics.replay.windows import plan_step, recorded_log
from dynamoth_balancer.options import BalancerOptions
from tests.analytics.loads import BEGIN, at_home, load, recorded_under, rising

OPTIONS = BalancerOptions(wait_s=5.0, averaging_s=5.0, channel_rest_s=10.0, replication_rest_s=10.0)
NO_MOVES = replace(OPTIONS, load_ratio_high=100.0, replicas_max=1)
OVERLOAD = rising({"s1": 8, "s2": 4, "s3": 4}, 50_000, 120_000, 20)


def outcome(window: RecordedWindow, options: BalancerOptions = OPTIONS) -> Outcome:
    """Return the outcome of a window with reports."""
    found = replay(window, options, 0.8)
    assert found is not None
    return found


def places(moves: Sequence[Moved]) -> list[tuple[bytes, Assignment, Assignment]]:
    return [(move.channel, move.before, move.after) for move in moves]


def test_moves_end_an_overload_that_lasts_without_them() -> None:
    window = load(60, OVERLOAD)
    alone, moved = outcome(window, NO_MOVES), outcome(window)
    assert alone.overload_s == 40 and not alone.moves and alone.server_s == 180
    assert moved.overload_s < 10 and all(move.before == single("s1") for move in moved.moves)
    assert moved.imbalance < alone.imbalance and moved.ratio_mean == pytest.approx(alone.ratio_mean, rel=0.02)


def test_replaying_what_was_recorded_gives_the_recorded_moves() -> None:
    recorded, moves, _ = recorded_under(load(90, OVERLOAD), OPTIONS)
    assert len(moves) >= 2 and places(outcome(recorded).moves) == places(moves)


def test_recorded_moves_are_undone_under_settings_that_would_not_have_made_them() -> None:
    window = load(60, OVERLOAD)
    recorded, moves, _ = recorded_under(window, OPTIONS)
    undone, alone = outcome(recorded, NO_MOVES), outcome(window, NO_MOVES)
    assert moves and not undone.moves
    assert undone.overload_s == pytest.approx(alone.overload_s, abs=2)
    assert undone.ratio_max == pytest.approx(alone.ratio_max, rel=0.02)


def test_reports_that_are_rare_count_until_the_next_one() -> None:
    window, interval_s = load(180, OVERLOAD), 10
    rare: list[RecordedReport] = []
    for at, report in window.reports:
        if report.sequence % interval_s == 1:
            columns = replace(report.columns, bytes_out=tuple(each * interval_s for each in report.columns.bytes_out))
            rare.append(RecordedReport(at, replace(report, interval_s=float(interval_s), columns=columns)))
    options = replace(OPTIONS, averaging_s=30.0, agent_stale_s=30.0)
    recorded, moves, _ = recorded_under(replace(window, reports=rare), options)
    undone = outcome(recorded, replace(NO_MOVES, agent_stale_s=30.0))
    assert moves and undone.overload_s == pytest.approx(160, abs=20), "what was moved counts where it was"


def test_a_later_window_begins_where_channels_were() -> None:
    recorded, moves, _ = recorded_under(load(60, OVERLOAD), OPTIONS)
    later = replace(recorded, begin=BEGIN + 45)
    assert not outcome(later).moves and outcome(later).overload_s == 0
    unseen = replace(later, steps=())
    assert outcome(unseen, NO_MOVES).overload_s == 0, "the reports show where channels are"
    assert moves


def test_a_window_that_begins_just_after_moves_does_not_move_more() -> None:
    recorded, moves, _ = recorded_under(load(60, OVERLOAD), OPTIONS)
    later = replace(recorded, begin=moves[-1].at + 0.6)
    assert moves and not outcome(later).moves, "its averages have the moved channels where they are now"


@pytest.mark.parametrize(("subscribers", "mode"), [(2, Mode.ALL_SUBSCRIBERS), (2000, Mode.ALL_PUBLISHERS)])
def test_a_channel_too_large_for_one_server_is_replicated_and_shared(subscribers: int, mode: Mode) -> None:
    hot, *others = at_home("s1", 3)
    quiet = dict.fromkeys([*others, *at_home("s2", 2)], 1000.0)
    window = load(60, lambda second: {**quiet, hot: 1_000_000.0 if second >= 15 else 1000.0}, subscribers)
    options = replace(OPTIONS, all_publishers_ratio_min=10.0)
    found = outcome(window, options)
    assert found.replications and found.moves[0].after.mode is mode
    assert found.overload_s < outcome(window, NO_MOVES).overload_s
    recorded, moves, _ = recorded_under(window, options)
    assert moves and places(outcome(recorded, options).moves) == places(moves)


def test_a_server_whose_reports_stop_gets_no_channels() -> None:
    window = load(60, OVERLOAD)
    kept = [each for each in window.reports if each.report.server != "s2" or each.at < BEGIN + 10]
    assert {move.after for move in outcome(replace(window, reports=kept)).moves} == {single("s3")}


def test_a_server_that_has_left_does_not_count_in_the_imbalance() -> None:
    busy, *quiet = (at_home(server, 1)[0] for server in ("s1", "s2", "s3"))
    window = load(300, lambda _: {busy: 90_000.0, quiet[0]: 30_000.0, quiet[1]: 30_000.0})
    whole = measured(window, 0.8).imbalance
    kept = [each for each in window.reports if each.report.server != "s1" or each.at < BEGIN + 60]
    assert whole > 1.3
    part = measured(replace(window, reports=kept), 0.8).imbalance
    assert part == pytest.approx(1 + (whole - 1) * 65 / 300, abs=0.02), "the others are loaded alike"


def test_rows_that_no_balancer_wrote_are_named() -> None:
    step = {"at": 1.0, "channel": "c", "phase": "settled", "to_mode": "single", "to_servers": ["s1", "s2"]}
    with pytest.raises(BadRecording, match=r"^the table plans has a row that no balancer wrote: .*'to_mode': 'single'"):
        plan_step(step)
    for row in ({"reports": ["odd"]}, {"settled": ["odd"]}, {"kind": "move", "decision": 1, "channel": "c"}):
        line = {"at": 1.0, "number": 1, "line": 0, "kind": "look", "clock_s": 1.0, **row}
        with pytest.raises(BadRecording, match=r"^the table decisions has a row that no balancer wrote"):
            recorded_log([line])


def test_a_window_without_reports_has_no_outcome() -> None:
    window = load(10, OVERLOAD)
    assert replay(replace(window, begin=BEGIN + 10, end=BEGIN + 20), OPTIONS, 0.8) is None
