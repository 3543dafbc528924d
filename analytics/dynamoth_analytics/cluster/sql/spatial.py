"""Distances, and the grids that find places near each other without comparing all pairs.

A grid of *level* n has cells of 2^n metres. Of two places that are to be near each other, one is in one cell, and the
other one is given all cells that its radius touches, at the level that fits the radius: nine at most, but near the
poles. So a join by cell finds each pair once, and the exact distance decides. Cells on the sphere are bands of
latitude, each divided into as many columns as fit.

Cells are computed here only, in Python for both sides: they are the same to the last bit.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

EARTH_M = 6_371_008.8
"""Mean radius of the Earth in metres (IUGG)."""

DEGREE_M = EARTH_M * math.pi / 180

RADIUS_MAX = 1e18
"""Of ``near_xy``, whatever its unit is. On the sphere nothing is farther away than 20,016 km."""

SLACK = 1e-6
"""A radius is taken this part larger for the cells, as distances are rounded."""
SLACK_M, SLACK_XY = 0.001, 1e-150
"""Added to it, too. In a plane only for differences whose square is 0."""

INDEX_BITS = 28
"""Bits of a band, and of a column, in the number of a cell. In a plane they repeat: that only makes candidates more."""

INDEX_MAX = 2.0**62
LEVEL_BASE = 64
"""Added to a level, which may be negative, in the number of a cell."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_Cells = Callable[[_Floats, _Floats, _Floats, _Ints], tuple[_Ints, _Ints]]


@dataclass(frozen=True)
class Grid:
    """The cells of the sphere, or of a plane."""

    #: The function of SQL that ``register`` makes: cells of (place, radius, level). Without a radius, the one of the
    #: place; without a level, the one that fits the radius.
    function: str
    #: The smallest and the largest level. Every radius fits some level; many levels are many cells for each place.
    level_min: int
    level_max: int
    slack: float
    cells: _Cells

    def level_of(self, radius: float) -> int:
        """Return the level for a radius: its cells are at least as wide as the radius."""
        return int(self.levels_of(np.array([radius]))[0])

    def levels_of(self, radiuses: _Floats) -> _Ints:
        """Return the levels for radiuses."""
        exact = np.ceil(np.log2(np.maximum(radiuses, 2.0 ** (self.level_min - 1)) * (1 + SLACK) + self.slack))
        return np.clip(exact, self.level_min, self.level_max).astype(np.int64)

    def levels_between(self, least: float, most: float) -> range:
        """Return the levels of all radiuses between two."""
        return range(self.level_of(least * (1 - SLACK)), self.level_of(most * (1 + SLACK)) + 1)

    def listed(self, one: pa.Array, other: pa.Array, radius: pa.Array, level: pa.Array) -> pa.Array:
        """Return the cells of each row as an Arrow list; none for rows whose place is unknown."""
        columns = (each.to_numpy(zero_copy_only=False).astype(np.float64) for each in (one, other, radius, level))
        first, second, wide, given = columns
        known = np.isfinite(first) & np.isfinite(second)
        fitting = self.levels_of(np.where(np.isnan(wide), 0.0, wide))
        levels = np.where(np.isnan(given), fitting, given).astype(np.int64)
        rows, values = self.cells(first[known], second[known], wide[known], levels[known])
        counts = np.zeros(len(first), np.int64)
        counts[known] = np.bincount(rows, minlength=int(known.sum()))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))  # pyright: ignore[reportUnknownVariableType]


def distance_sql(lat1: str, lon1: str, lat2: str, lon2: str) -> str:
    """Return SQL for the distance of two places on the sphere, in metres (haversine)."""
    half = (
        f"pow(sin(radians({lat2} - {lat1}) / 2), 2)"
        f" + cos(radians({lat1})) * cos(radians({lat2})) * pow(sin(radians({lon2} - {lon1}) / 2), 2)"
    )
    return f"(2 * {EARTH_M} * asin(least(1.0D, sqrt({half}))))"


def distance_xy_sql(x1: str, y1: str, x2: str, y2: str) -> str:
    """Return SQL for the distance of two places in a plane."""
    return f"sqrt(pow({x2} - {x1}, 2) + pow({y2} - {y1}, 2))"


def register(spark: SparkSession) -> None:
    """Make the functions for cells known to a session."""
    for grid, function in ((SPHERE, _cells), (PLANE, _cells_xy)):
        arrow_udf: Any = getattr(F, "arrow_udf")  # noqa: B009 it is not among the types that PySpark declares
        spark.udf.register(grid.function, arrow_udf(function, "array<bigint>"))


def _cells(lat: pa.Array, lon: pa.Array, radius: pa.Array, level: pa.Array) -> pa.Array:
    return SPHERE.listed(lat, lon, radius, level)


def _cells_xy(x: pa.Array, y: pa.Array, radius: pa.Array, level: pa.Array) -> pa.Array:
    return PLANE.listed(x, y, radius, level)


def sphere_cells(lat: _Floats, lon: _Floats, radius: _Floats, levels: _Ints) -> tuple[_Ints, _Ints]:
    """Return the cells that circles on the sphere touch: for each cell the number of its circle, in order, and itself.

    Places and radiuses are in degrees and metres. With the radius nan, the circle is its place. Any degrees are a
    place: behind a pole, it goes on down the other side, as the formula for distances has it.
    """
    size = np.exp2(levels.astype(np.float64))
    wide = np.where(np.isnan(radius), 0.0, np.maximum(radius, 0.0) * (1 + SLACK) + SLACK_M)
    lat, lon = _wrapped(lat, lon)
    north_m = (lat + 90.0) * DEGREE_M
    first = np.floor(np.maximum(north_m - wide, 0.0) / size).astype(np.int64)
    last = np.floor(np.minimum(north_m + wide, 180.0 * DEGREE_M) / size).astype(np.int64)
    rows, bands = _runs(first, last - first + 1)
    # The longitudes that a circle reaches; all of them where a pole is in it.
    with np.errstate(divide="ignore", invalid="ignore"):
        angle = np.degrees(
            np.arcsin(np.minimum(1.0, np.sin(np.minimum(wide / EARTH_M, math.pi / 2)) / np.cos(np.radians(lat))))
        )
    has_pole = np.abs(lat) * DEGREE_M + wide >= 90.0 * DEGREE_M - 1.0
    reach = np.where(wide == 0.0, 0.0, np.where(has_pole | np.isnan(angle), 180.0, angle + 1e-9))
    columns = _columns(bands, size[rows])
    west = np.floor((lon[rows] - reach[rows] + 180.0) / 360.0 * columns).astype(np.int64)
    east = np.floor((lon[rows] + reach[rows] + 180.0) / 360.0 * columns).astype(np.int64)
    counts = np.minimum(east - west + 1, columns)
    inner, column = _runs(west, counts)
    column = np.mod(column, columns[inner])
    return rows[inner], _numbered(levels[rows[inner]], bands[inner], column)


def plane_cells(x: _Floats, y: _Floats, radius: _Floats, levels: _Ints) -> tuple[_Ints, _Ints]:
    """Return the cells that circles in a plane touch, as ``sphere_cells`` does: nine at most."""
    size = np.exp2(levels.astype(np.float64))
    wide = np.where(np.isnan(radius), 0.0, np.maximum(radius, 0.0) * (1 + SLACK) + SLACK_XY)
    first, last = _index(x - wide, size), _index(x + wide, size)
    rows, bands = _runs(first, last - first + 1)
    low, high = _index(y - wide, size)[rows], _index(y + wide, size)[rows]
    inner, column = _runs(low, high - low + 1)
    return rows[inner], _numbered(levels[rows[inner]], bands[inner], column)


def _index(value: _Floats, size: _Floats) -> _Ints:
    """Return numbers of bands of a plane. The last ones have all that is farther out."""
    with np.errstate(over="ignore"):
        return np.clip(np.floor(value / size), -INDEX_MAX, INDEX_MAX).astype(np.int64)


def _wrapped(lat: _Floats, lon: _Floats) -> tuple[_Floats, _Floats]:
    """Return places with a latitude between -90 and 90 degrees, and a longitude between -180 and 180."""
    around = np.mod(lat + 90.0, 360.0)
    is_behind = around > 180.0
    outside = np.abs(lat) > 90.0  # the others stay as they are, to the last bit
    lon = np.where(outside & is_behind, lon + 180.0, lon)
    lat = np.where(outside, np.where(is_behind, 270.0 - around, around - 90.0), lat)
    return lat, np.mod(lon + 180.0, 360.0) - 180.0  # 180 and -180 are one place


def _columns(bands: _Ints, size: _Floats) -> _Ints:
    """Return how many columns bands of latitude have: each is as wide as a cell at the band's edge near the equator."""
    low, high = bands * size / DEGREE_M - 90.0, (bands + 1) * size / DEGREE_M - 90.0
    edge = np.where((low < 0.0) & (high > 0.0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    widest = np.cos(np.radians(np.minimum(edge, 90.0)))
    return np.maximum(1, np.ceil(360.0 * DEGREE_M * widest / size)).astype(np.int64)


def _numbered(levels: _Ints, bands: _Ints, columns: _Ints) -> _Ints:
    mask = (1 << INDEX_BITS) - 1
    numbers: _Ints = ((levels + LEVEL_BASE) << (2 * INDEX_BITS)) | ((bands & mask) << INDEX_BITS) | (columns & mask)
    return numbers


def _runs(first: _Ints, counts: _Ints) -> tuple[_Ints, _Ints]:
    """Return runs of numbers, behind each other: of each number its run, and itself."""
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return rows, first[rows] + np.arange(len(rows)) - starts[rows]


SPHERE = Grid("_cells", 4, 24, SLACK_M, sphere_cells)
"""Its unit is the metre: cells of 16 metres to 16,777 km."""
PLANE = Grid("_cells_xy", -32, 60, SLACK_XY, plane_cells)
"""Its unit is that of the coordinates, which may be degrees."""
