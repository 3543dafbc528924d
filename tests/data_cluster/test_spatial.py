"""Cells of grids: whatever is near shares a cell, exactly one, and there are few of them."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from dynamoth_analytics.cluster.sql.spatial import PLANE, SPHERE, Grid
from tests.data_cluster.test_sql import distance

POINTS = 4000

Floats = NDArray[np.float64]


def listed(grid: Grid, one: Floats, other: Floats, radius: Floats, levels: NDArray[np.int64]) -> list[list[int]]:
    rows, values = grid.cells(one, other, radius, levels)
    found: list[list[int]] = [[] for _ in range(len(one))]
    for row, each in zip(rows.tolist(), values.tolist(), strict=True):
        found[row].append(each)
    return found


def check(grid: Grid, one: tuple[Floats, Floats], other: tuple[Floats, Floats], radius: float, is_near: object) -> None:
    """Check that near places share one cell, and that every place has one, at the level of the radius."""
    count = len(one[0])
    levels = np.full(count, grid.level_of(radius))
    around = listed(grid, *one, np.full(count, radius), levels)
    at = listed(grid, *other, np.full(count, math.nan), levels)
    near = np.asarray(is_near).tolist()
    for number in range(count):
        (cell,) = at[number]
        assert len(set(around[number])) == len(around[number]), "no cell comes twice"
        assert not near[number] or cell in around[number], (one[0][number], one[1][number], radius)


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
    is_near = [distance(*each) <= radius for each in zip(lat, lon, other_lat, other_lon, strict=True)]
    assert sum(is_near) > POINTS / 10
    check(SPHERE, (lat, lon), (other_lat, other_lon), radius, is_near)
    around = listed(SPHERE, lat, lon, np.full(POINTS, radius), np.full(POINTS, SPHERE.level_of(radius)))
    assert np.mean([len(each) for each in around]) <= (20 if centre == "pole" else 12)


@pytest.mark.parametrize("radius", [1e6, 9e6, 10_007_557.0, 1.5e7, 2e7, 2.1e7])
def test_circles_as_large_as_the_earth(radius: float) -> None:
    rng = np.random.default_rng(9)
    lat, lon, other_lat, other_lon = (rng.uniform(-size, size, POINTS) for size in (90, 180, 90, 180))
    is_near = [distance(*each) <= radius for each in zip(lat, lon, other_lat, other_lon, strict=True)]
    check(SPHERE, (lat, lon), (other_lat, other_lon), radius, is_near)


def test_degrees_behind_a_pole_and_around_the_earth_are_places() -> None:
    rng = np.random.default_rng(10)
    lat, lon = rng.uniform(-400, 400, (2, POINTS))
    other_lat, other_lon = lat + rng.uniform(-3, 3, POINTS), lon + rng.uniform(-3, 3, POINTS)
    turned = rng.uniform(0, 1, POINTS) < 0.5  # the same place with other degrees
    other_lat, other_lon = np.where(turned, 180 - other_lat, other_lat), np.where(turned, other_lon + 180, other_lon)
    is_near = [distance(*each) <= 200_000 for each in zip(lat, lon, other_lat, other_lon, strict=True)]
    assert sum(is_near) > POINTS / 10
    check(SPHERE, (lat, lon), (other_lat, other_lon), 200_000, is_near)


@pytest.mark.parametrize("radius", [0.0, 1e-9, 0.0003, 5.0, 300.0, 16_384.0, 1e12, 1e18])
@pytest.mark.parametrize("centre", [0.0, 1.0, -1e5, 1e15, 1e300])
def test_what_is_near_in_a_plane_shares_one_cell(centre: float, radius: float) -> None:
    rng = np.random.default_rng(8)
    x, y = centre + rng.uniform(-100, 100, (2, POINTS)) * radius
    other_x, other_y = x + rng.uniform(-1.5, 1.5, POINTS) * radius, y + rng.uniform(-1.5, 1.5, POINTS) * radius
    is_near = np.hypot(x - other_x, y - other_y) <= radius
    assert is_near.any()
    check(PLANE, (x, y), (other_x, other_y), radius, is_near)
    around = listed(PLANE, x, y, np.full(POINTS, radius), np.full(POINTS, PLANE.level_of(radius)))
    assert max(len(each) for each in around) <= 9


def test_a_negative_radius_is_near_nothing_and_harms_nothing() -> None:
    place = np.zeros(1)
    for grid in (SPHERE, PLANE):
        assert len(listed(grid, place, place, np.full(1, -5.0), np.full(1, 5))[0]) <= 4


def test_unknown_places_have_no_cells() -> None:
    place = pa.array([None, 1.0, math.nan, math.inf, 1.0], pa.float64())
    other = pa.array([1.0, None, 1.0, 1.0, 1.0], pa.float64())
    none, level = pa.array([None] * 5, pa.float64()), pa.array([5] * 5, pa.int32())
    for grid in (SPHERE, PLANE):
        assert [len(each) for each in grid.listed(place, other, none, level).to_pylist()] == [0, 0, 0, 0, 1]
        empty = pa.array([], pa.float64())
        assert grid.listed(empty, empty, empty, empty).to_pylist() == []


def test_without_a_level_it_is_that_of_the_radius() -> None:
    place, radius = pa.array([1.0, 1.0]), pa.array([100.0, 5000.0])
    levels = pa.array([SPHERE.level_of(100.0), SPHERE.level_of(5000.0)], pa.int32())
    unknown = pa.array([None, None], pa.int32())
    assert SPHERE.listed(place, place, radius, unknown) == SPHERE.listed(place, place, radius, levels)


def test_levels_fit_radiuses() -> None:
    assert SPHERE.level_of(0.1) == SPHERE.level_min
    assert SPHERE.level_of(1e9) == SPHERE.level_max
    assert [SPHERE.level_of(radius) for radius in (17, 31.9, 32, 1000, 1024)] == [5, 5, 6, 10, 11]
    assert list(SPHERE.levels_between(100, 1000)) == [7, 8, 9, 10]
    assert [PLANE.level_of(radius) for radius in (0.0, 0.3, 1000, 1e18)] == [-32, -1, 10, 60]
