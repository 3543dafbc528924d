"""Cells of grids: whatever is near shares a cell, exactly one, and there are few of them."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dynamoth_analytics.cluster.spatial import LEVEL_MAX, LEVEL_MIN, level_of, levels_between, plane_cells, sphere_cells
from tests.data_cluster.test_sql import distance

POINTS = 4000


def cells_of(cells: tuple[NDArray[np.int64], NDArray[np.int64]], count: int) -> list[list[int]]:
    rows, values = cells
    found: list[list[int]] = [[] for _ in range(count)]
    for row, each in zip(rows.tolist(), values.tolist(), strict=True):
        found[row].append(each)
    return found


@pytest.mark.parametrize("centre", ["anywhere", "pole", "antimeridian", "town"])
@pytest.mark.parametrize("radius", [5.0, 300.0, 16_384.0, 500_000.0])
def test_what_is_near_on_the_sphere_shares_one_cell(centre: str, radius: float) -> None:
    rng = np.random.default_rng(7)
    lat, lon = {
        "anywhere": (rng.uniform(-90, 90, POINTS), rng.uniform(-180, 180, POINTS)),
        "pole": (90 - rng.exponential(radius / 111_000, POINTS), rng.uniform(-180, 180, POINTS)),
        "antimeridian": (rng.uniform(-60, 60, POINTS), np.full(POINTS, 180.0)),
        "town": (np.full(POINTS, 60.17), np.full(POINTS, 24.94)),
    }[centre]
    lat = np.clip(lat, -90, 90)
    # Others are up to 1.5 radiuses away, to every side.
    angle, away = rng.uniform(0, 2 * math.pi, POINTS), radius * 1.5 * np.sqrt(rng.uniform(0, 1, POINTS))
    other_lat = np.clip(lat + np.degrees(away * np.cos(angle) / 6_371_008.8), -90, 90)
    stretch = np.maximum(np.cos(np.radians(lat)), 1e-6)
    other_lon = (lon + np.degrees(away * np.sin(angle) / 6_371_008.8) / stretch + 180) % 360 - 180
    levels = np.full(POINTS, level_of(radius))
    around = cells_of(sphere_cells(lat, lon, np.full(POINTS, radius), levels), POINTS)
    at = cells_of(sphere_cells(other_lat, other_lon, np.full(POINTS, np.nan), levels), POINTS)
    near = 0
    for number in range(POINTS):
        (cell,) = at[number]
        assert len(set(around[number])) == len(around[number]), "no cell comes twice"
        if distance(lat[number], lon[number], other_lat[number], other_lon[number]) <= radius:
            near += 1
            assert cell in around[number]
    assert near > POINTS / 10
    assert np.mean([len(each) for each in around]) <= (20 if centre == "pole" else 12)


@pytest.mark.parametrize("radius", [5.0, 300.0, 16_384.0])
def test_what_is_near_in_a_plane_shares_one_cell(radius: float) -> None:
    rng = np.random.default_rng(8)
    x, y = rng.uniform(-1e5, 1e5, (2, POINTS))
    other_x, other_y = x + rng.uniform(-1.5, 1.5, POINTS) * radius, y + rng.uniform(-1.5, 1.5, POINTS) * radius
    levels = np.full(POINTS, level_of(radius))
    around = cells_of(plane_cells(x, y, np.full(POINTS, radius), levels), POINTS)
    at = cells_of(plane_cells(other_x, other_y, np.full(POINTS, np.nan), levels), POINTS)
    for number in range(POINTS):
        assert len(set(around[number])) == len(around[number]) <= 9
        if math.hypot(x[number] - other_x[number], y[number] - other_y[number]) <= radius:
            assert at[number][0] in around[number]


def test_levels_fit_radiuses() -> None:
    assert level_of(0.1) == LEVEL_MIN
    assert level_of(1e9) == LEVEL_MAX
    assert [level_of(radius) for radius in (17, 31.9, 32, 1000, 1024)] == [5, 5, 6, 10, 11]
    assert list(levels_between(100, 1000)) == [7, 8, 9, 10]
