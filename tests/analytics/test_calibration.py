"""A break point is claimed where latency breaks, and where it rises smoothly or not at all, none is."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random

import pytest
from pyspark.sql import SparkSession

from dynamoth_analytics.jobs.calibration import BREAK, FLAT, SMOOTH, TOO_LITTLE, break_points
from dynamoth_analytics.jobs.runner import Drawn, Row
from dynamoth_analytics.page.drawing import draw
from dynamoth_analytics.reading import made
from dynamoth_analytics.recommendation import as_toml
from dynamoth_analytics.recorded_settings import DEFAULTS
from dynamoth_analytics.text import time_format

BASE_S = 0.001

BY_CHANCE = (
    (0.13, 0.526), (0.16, 0.356), (0.23, 0.591), (0.42, 1.029), (0.45, 0.198), (0.58, 1.070), (0.66, 0.372),
    (0.73, 0.801), (0.83, 0.673), (0.86, 0.810), (0.88, 0.982), (1.13, 0.530), (1.66, 1.098),
)  # fmt: skip
"""Load ratios and milliseconds of a server of a demo of 60 s, without a break."""


def broken(at: float) -> Callable[[float], float]:
    return lambda ratio: 1 + 30 * max(0.0, ratio - at)


def bent(at: float) -> Callable[[float], float]:
    return lambda ratio: 1 + (20 * max(0.0, ratio - at)) ** 2


def queue(pole: float) -> Callable[[float], float]:
    return lambda ratio: 1 / (1 - ratio / pole)


def medians(times: Callable[[float], float], highest: float, noise: float) -> list[tuple[float, float]]:
    """Return loads and latencies from load ratio 0.05 to ``highest``."""
    noisy = Random(7)
    loads = [0.05 + number / 100 for number in range(round((highest - 0.05) * 100) + 1)]
    return [(load, BASE_S * times(load) * noisy.lognormvariate(0, noise)) for load in loads]


SHAPES = {
    # server: medians, shape, break point.
    "breaks early": (medians(broken(0.3), 0.65, 0.05), BREAK, 0.3),
    "breaks late": (medians(broken(0.9), 1.2, 0.05), BREAK, 0.9),
    "breaks, hardly seen": (medians(broken(0.45), 0.51, 0.05), BREAK, 0.45),
    "breaks, two loads seen": ([*medians(broken(0.6), 0.58, 0.01), (0.65, 0.0025), (0.7, 0.004)], TOO_LITTLE, None),
    "queue": (medians(queue(0.7), 0.65, 0.05), SMOOTH, None),
    "queue far from full": (medians(queue(1.3), 0.9, 0.05), SMOOTH, None),
    "parabola": (medians(lambda ratio: 1 + 8 * ratio**2, 0.9, 0.05), SMOOTH, None),
    "parabola from a load on": (medians(bent(0.6), 0.9, 0.05), SMOOTH, None),
    "straight": (medians(lambda ratio: 1 + 3 * ratio, 0.6, 0.05), SMOOTH, None),
    "breaks at once": (medians(broken(0.07), 0.6, 0.02), SMOOTH, None),
    "rises little": (medians(lambda ratio: 1 + ratio / 2, 0.6, 0.05), FLAT, None),
    "flat": (medians(lambda ratio: 1.0, 0.6, 0.2), FLAT, None),
    "by chance": ([(load, milliseconds / 1e3) for load, milliseconds in BY_CHANCE], FLAT, None),
    "seldom loaded": (medians(broken(0.05), 0.08, 0.01), TOO_LITTLE, None),
}


def test_breaks_are_told_from_smooth_rises_and_from_chance(spark: SparkSession) -> None:
    rows = [(server, *each, 5) for server, (points, *_) in SHAPES.items() for each in points]
    response = made(spark, rows, "server string, ratio double, latency_s double, probes long")
    found = {row["server"]: row for row in break_points(spark, response).collect()}
    assert {server: row["shape"] for server, row in found.items()} == {
        server: shape for server, (_, shape, _) in SHAPES.items()
    }
    for server, (_, shape, at) in SHAPES.items():
        row = found[server]
        assert row["break_ratio"] == (at and pytest.approx(at, rel=0.02)), server
        if shape == BREAK:
            assert row["latency_s_min"] == pytest.approx(BASE_S, rel=0.05), server
    toml = as_toml(
        [row.asDict() for row in found.values()],
        dict.fromkeys(SHAPES, 1e6),
        dict.fromkeys(SHAPES, "redis://10.0.0.1:6379"),
        None,
        DEFAULTS,
    )
    maxima = {server["id"]: server["outgoing_bytes_per_s_max"] for server in tomllib.loads(toml)["cluster"]["servers"]}
    for server, (_, _, at) in SHAPES.items():
        assert maxima[server] == pytest.approx((at or 1.0) * 1e6, rel=0.02)
    assert "As now: latency rises smoothly from 1." in toml


def test_without_a_break_all_settings_stay() -> None:
    toml = as_toml([], {"s1": 5e5, "s2": 7e5}, {}, 0.1, DEFAULTS)
    assert tomllib.loads(toml)["balancer"] == {
        "load_ratio_high": DEFAULTS["load_ratio_high"],
        "load_ratio_safe": DEFAULTS["load_ratio_safe"],
    }
    assert "# As now: no latency was measured.\n# [[cluster.servers]]" in toml


def test_the_recommended_servers_are_those_of_the_settings_in_force() -> None:
    urls = {"s1": "redis://10.0.0.1:6379", "s2": "redis://10.0.0.2:6379"}
    toml = as_toml([], {"s1": 5e5, "s9": 7e5}, urls, None, DEFAULTS, draining=["s2"])
    assert tomllib.loads(toml)["cluster"]["servers"] == [
        {"id": "s1", "url": urls["s1"], "outgoing_bytes_per_s_max": 500_000},
        {"id": "s2", "url": urls["s2"], "draining": True},
    ]
    assert "# No report of it was recorded" in toml
    assert "# It was not in the last recorded settings: it may have left." in toml and '# id = "s9"' in toml


def test_load_ratio_high_leaves_room_for_peaks_within_its_bounds() -> None:
    row = {
        "server": "s1", "shape": BREAK, "break_ratio": 0.5, "latency_s_min": 0.001, "latency_s_max": 0.004,
        "ratio_max": 0.7, "probes": 100,
    }  # fmt: skip
    for rise, high in ((0.0, 0.9), (0.1, 0.8), (0.4, 0.6)):
        toml = tomllib.loads(as_toml([row], {"s1": 1e6}, {"s1": "redis://10.0.0.1:6379"}, rise, DEFAULTS))
        assert toml["balancer"]["load_ratio_high"] == high
        assert toml["balancer"]["load_ratio_safe"] == pytest.approx(high * 0.75, abs=0.01)
        assert toml["cluster"]["servers"][0]["outgoing_bytes_per_s_max"] == 500_000


def test_the_page_says_why_there_is_no_break_point_and_which_day_it_was() -> None:
    begin, end = datetime(2026, 11, 23, 23, 59, tzinfo=UTC), datetime(2026, 11, 24, 0, 1, tzinfo=UTC)
    row: Row = {"break_ratio": None, "latency_s_min": None, "latency_s_max": 0.004, "ratio_max": 0.7, "probes": 99}
    rows: list[Row] = [{**row, "server": shape, "shape": shape} for shape in (SMOOTH, FLAT, TOO_LITTLE)]
    rows.append({**row, "server": "s1", "shape": BREAK, "break_ratio": 0.55, "latency_s_min": 0.001})
    response: list[Row] = [{"server": "s1", "ratio": ratio, "latency_s": ratio / 1000} for ratio in (0.5, 2.0)]
    balance: list[Row] = [{"slot": begin, "imbalance": None}, {"slot": end, "imbalance": None}]
    gaps: list[Row] = [{"server": "s1", "at": end, "kind": "report_missing", "seconds": 5.0, "reason": "lost"}]
    tables: dict[str, list[Row]] = {"break_points": rows, "response": response, "balance": balance, "gaps": gaps}
    drawn = Drawn(tables)
    drawn.settings, drawn.when = DEFAULTS, time_format(begin, end)
    page = draw(drawn, [], begin, end, "")
    for said in (
        "<td>0.55</td>",
        "break point of s1",
        "rises smoothly, no break",
        "no clear rise",
        "too few loads seen",
    ):
        assert said in page
    assert ">2.1<" in page, "the latency axis is in milliseconds, up to 5% above the largest"
    assert "<td>11-24 00:01:00</td>" in page
    drawn.when = time_format(end, end)
    assert "<td>00:01:00</td>" in draw(drawn, [], end, end, "")
    assert page.count("There is nothing to draw.") == 2, "where nothing was loaded, nothing is unbalanced"
