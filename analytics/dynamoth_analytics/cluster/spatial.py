"""Distances, and the grids that find what is near without comparing everything with everything.

A grid of *level* n has cells of 2^n metres. Of two places that are to be near each other, one is in one cell, and the
other one is given all cells that its radius touches, with a level that fits the radius: at most some 16 cells. So a join
by cell finds each pair once, and the exact distance decides. Cells on the sphere are bands of latitude, divided into as
many columns as fit; near the poles there are few.
"""

from __future__ import annotations

import math

EARTH_M = 6_371_008.8
"""Mean radius of the Earth in metres (IUGG)."""

DEGREE_M = EARTH_M * math.pi / 180

LEVEL_MIN, LEVEL_MAX = 4, 24

SLACK = 1e-6
"""A radius is taken this part larger for the cells, as distances are rounded."""


def level_of(radius: float) -> int:
    """Return the level for a radius in metres."""
    return min(LEVEL_MAX, max(LEVEL_MIN, math.ceil(math.log2(max(radius, 1.0) * (1 + SLACK)))))


def levels_between(least: float, most: float) -> range:
    """Return the levels of all radiuses between two."""
    return range(level_of(least), level_of(most) + 1)


def level_sql(radius: str) -> str:
    """Return SQL for the level of a radius."""
    return f"least({LEVEL_MAX}, greatest({LEVEL_MIN}, ceil(log2(greatest({radius}, 1.0D) * {1 + SLACK}))))"


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


def _columns_sql(band: str, size: str) -> str:
    """Return SQL for the number of columns of a band of latitude: those at its edge nearest to the equator are widest."""
    edge = (
        f"CASE WHEN {band} * {size} < {90 * DEGREE_M} AND ({band} + 1) * {size} > {90 * DEGREE_M} THEN 0.0D"
        f" ELSE least(abs({band} * {size} / {DEGREE_M} - 90), abs(({band} + 1) * {size} / {DEGREE_M} - 90)) END"
    )
    return f"cast(greatest(1, ceil({360 * DEGREE_M} * cos(radians({edge})) / {size})) AS bigint)"


def cell_sql(lat: str, lon: str, level: str) -> str:
    """Return SQL for the cell of a place on the sphere."""
    size = f"pow(2, {level})"
    band = f"cast(floor(({lat} + 90) * {DEGREE_M} / {size}) AS bigint)"
    columns = _columns_sql(band, size)
    column = f"pmod(cast(floor(({lon} + 180) / 360 * {columns}) AS bigint), {columns})"
    return f"xxhash64(cast({level} AS int), {band}, {column})"


def cells_sql(lat: str, lon: str, radius: str, level: str) -> str:
    """Return SQL for an array of all cells that a circle on the sphere touches."""
    size, wide = f"pow(2, {level})", f"({radius} * {1 + SLACK} + 0.001)"
    top = math.ceil(180 * DEGREE_M)
    first = f"cast(floor(greatest(0, ({lat} + 90) * {DEGREE_M} - {wide}) / {size}) AS bigint)"
    last = f"cast(floor(least({top}, ({lat} + 90) * {DEGREE_M} + {wide}) / {size}) AS bigint)"
    # Beyond a pole, all longitudes are near.
    is_pole = f"abs({lat}) * {DEGREE_M} + {wide} >= {90 * DEGREE_M}"
    angle = f"degrees(asin(least(1.0D, sin({wide} / {EARTH_M}) / cos(radians({lat})))))"
    width = f"(CASE WHEN {is_pole} THEN 180.0D ELSE {angle} + 1e-9D END)"
    columns = _columns_sql("b", size)
    west = f"cast(floor(({lon} - {width} + 180) / 360 * {columns}) AS bigint)"
    east = f"cast(floor(({lon} + {width} + 180) / 360 * {columns}) AS bigint)"
    cell = f"xxhash64(cast({level} AS int), b, pmod(c, {columns}))"
    in_band = f"transform(sequence({west}, least({east}, {west} + {columns} - 1)), c -> {cell})"
    return f"flatten(transform(sequence({first}, {last}), b -> {in_band}))"


def cell_xy_sql(x: str, y: str, level: str) -> str:
    """Return SQL for the cell of a place in a plane."""
    size = f"pow(2, {level})"
    return f"xxhash64(cast({level} AS int), cast(floor({x} / {size}) AS bigint), cast(floor({y} / {size}) AS bigint))"


def cells_xy_sql(x: str, y: str, radius: str, level: str) -> str:
    """Return SQL for an array of all cells that a circle in a plane touches."""
    size, wide = f"pow(2, {level})", f"({radius} * {1 + SLACK} + 0.001)"

    def edges(value: str) -> str:
        low, high = f"floor(({value} - {wide}) / {size})", f"floor(({value} + {wide}) / {size})"
        return f"sequence(cast({low} AS bigint), cast({high} AS bigint))"

    return (
        f"flatten(transform({edges(x)}, b -> transform({edges(y)}, c -> xxhash64(cast({level} AS int), b, c))))"
    )
