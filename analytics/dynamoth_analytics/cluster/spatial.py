"""Distances, and the grids that find what is near without comparing everything with everything.

A grid of *level* n has cells of 2^n metres. Of two places that are to be near each other, one is in one cell, and the
other one is given all cells that its radius touches, at the level that fits the radius: nine at most, but near the
poles. So a join by cell finds each pair once, and the exact distance decides. Cells on the sphere are bands of
latitude, each divided into as many columns as fit.

Cells are computed here only, in Python for both sides: they are the same to the last bit.
"""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

EARTH_M = 6_371_008.8
"""Mean radius of the Earth in metres (IUGG)."""

DEGREE_M = EARTH_M * math.pi / 180

LEVEL_MIN, LEVEL_MAX = 4, 24

SLACK = 1e-6
"""A radius is taken this part larger for the cells, as distances are rounded."""

INDEX_BITS = 28
"""Bits of a band, and of a column, in the number of a cell."""

CELLS, CELLS_XY = "_cells", "_cells_xy"
"""Functions of SQL that ``register`` makes: cells of (place, radius, level); without a radius, the one of the place."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


def level_of(radius: float) -> int:
    """Return the level for a radius in metres."""
    return min(LEVEL_MAX, max(LEVEL_MIN, math.ceil(math.log2(max(radius, 1.0) * (1 + SLACK) + 0.001))))


def levels_between(least: float, most: float) -> range:
    """Return the levels of all radiuses between two."""
    return range(level_of(least), level_of(most) + 1)


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
    arrow_udf: Any = getattr(F, "arrow_udf")  # noqa: B009 it is not among the types that PySpark declares
    spark.udf.register(CELLS, arrow_udf(_cells, "array<bigint>"))
    spark.udf.register(CELLS_XY, arrow_udf(_cells_xy, "array<bigint>"))


def _cells(lat: pa.Array, lon: pa.Array, radius: pa.Array, level: pa.Array) -> pa.Array:
    return _listed(sphere_cells, lat, lon, radius, level)


def _cells_xy(x: pa.Array, y: pa.Array, radius: pa.Array, level: pa.Array) -> pa.Array:
    return _listed(plane_cells, x, y, radius, level)


def _listed(cells: Any, *columns: Any) -> Any:
    """Return the cells of each row as an Arrow list; none for rows whose place is unknown."""
    first, second, wide, level = (column.to_numpy(zero_copy_only=False).astype(np.float64) for column in columns)
    known = np.isfinite(first) & np.isfinite(second)
    exact = np.where(np.isnan(wide), LEVEL_MIN, wide)
    fitting = np.ceil(np.log2(np.maximum(exact, 1.0) * (1 + SLACK) + 0.001))
    levels = np.where(np.isnan(level), np.clip(fitting, LEVEL_MIN, LEVEL_MAX), level).astype(np.int64)
    rows, values = cells(first[known], second[known], wide[known], levels[known])
    counts = np.zeros(len(first), np.int64)
    counts[known] = np.bincount(rows, minlength=int(known.sum()))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))  # pyright: ignore[reportUnknownVariableType]


def sphere_cells(lat: _Floats, lon: _Floats, radius: _Floats, levels: _Ints) -> tuple[_Ints, _Ints]:
    """Return the cells that circles on the sphere touch: for each cell the number of its circle, in order, and itself.

    Places and radiuses are in degrees and metres. With the radius nan, the circle is its place.
    """
    size = np.exp2(levels.astype(np.float64))
    wide = np.where(np.isnan(radius), 0.0, radius * (1 + SLACK) + 0.001)
    lat = np.clip(lat, -90.0, 90.0)
    lon = np.mod(lon + 180.0, 360.0) - 180.0  # 180 and -180 are one place
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
    """Return the cells that circles in a plane touch, as ``sphere_cells`` does."""
    size = np.exp2(levels.astype(np.float64))
    wide = np.where(np.isnan(radius), 0.0, radius * (1 + SLACK) + 0.001)
    first = np.floor((x - wide) / size).astype(np.int64)
    rows, bands = _runs(first, np.floor((x + wide) / size).astype(np.int64) - first + 1)
    low = np.floor((y - wide) / size).astype(np.int64)[rows]
    inner, column = _runs(low, np.floor((y + wide) / size).astype(np.int64)[rows] - low + 1)
    return rows[inner], _numbered(levels[rows[inner]], bands[inner], column)


def _columns(bands: _Ints, size: _Floats) -> _Ints:
    """Return how many columns bands of latitude have: each is as wide as a cell at the band's edge near the equator."""
    low, high = bands * size / DEGREE_M - 90.0, (bands + 1) * size / DEGREE_M - 90.0
    edge = np.where((low < 0.0) & (high > 0.0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    widest = np.cos(np.radians(np.minimum(edge, 90.0)))
    return np.maximum(1, np.ceil(360.0 * DEGREE_M * widest / size)).astype(np.int64)


def _numbered(levels: _Ints, bands: _Ints, columns: _Ints) -> _Ints:
    mask = (1 << INDEX_BITS) - 1
    numbers: _Ints = (levels << (2 * INDEX_BITS)) | ((bands & mask) << INDEX_BITS) | (columns & mask)
    return numbers


def _runs(first: _Ints, counts: _Ints) -> tuple[_Ints, _Ints]:
    """Return runs of numbers, behind each other: of each number its run, and itself."""
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return rows, first[rows] + np.arange(len(rows)) - starts[rows]
