"""A seeded town: streets, where people live, and how they and the publishers of emergencies move.

The paper moves people over the Helsinki map of the ONE simulator. That map cannot be had as data, so this is a street
graph of the size of its default world, with the speeds of its walkers and trams. What matters to the experiments is
kept: people live unevenly, move slowly and near to where they are, and publishers are anywhere soon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, hypot, radians
from random import Random

Place = tuple[float, float]
"""East and north of the south-west corner, in metres."""

WIDTH_M, HEIGHT_M = 4500.0, 3400.0
"""The default world of the ONE simulator."""

BLOCK_M = 170.0
"""Distance of two crossings, before they are moved at random by up to a third of it."""

MISSING_RATIO = 0.15
"""This part of the streets of a regular grid is missing."""

WALK_M_PER_S = (0.5, 1.5)
PAUSE_S = (0.0, 120.0)
RIDE_M_PER_S = (7.0, 10.0)
"""Walkers and trams of the ONE simulator; publishers of emergencies move as trams, without pauses."""

SOUTH_WEST_DEGREES = (60.15, 24.90)
METRES_PER_DEGREE = 111_195.0


@dataclass(frozen=True)
class District:
    """Where people live: ``share`` of them, around ``centre``, with a standard deviation of ``spread_m``."""

    centre: Place
    share: float
    spread_m: float


class Town:
    """The street graph of a seed. Crossings are numbered."""

    def __init__(self, seed: int) -> None:
        rng = Random(f"town {seed}")
        columns, rows = int(WIDTH_M // BLOCK_M) + 1, int(HEIGHT_M // BLOCK_M) + 1
        shift = BLOCK_M / 3
        self.crossings: list[Place] = [
            (
                min(WIDTH_M, max(0.0, column * BLOCK_M + rng.uniform(-shift, shift))),
                min(HEIGHT_M, max(0.0, row * BLOCK_M + rng.uniform(-shift, shift))),
            )
            for row in range(rows)
            for column in range(columns)
        ]
        #: The crossings that a street leads to, by crossing; each has at least one.
        self.streets: list[list[int]] = [[] for _ in self.crossings]
        for number in range(len(self.crossings)):
            if number % columns < columns - 1:
                self._join(number, number + 1, rng)
            if number + columns < len(self.crossings):
                self._join(number, number + columns, rng)
        for number, ends in enumerate(self.streets):
            if not ends:
                self._join(number, number - 1 if number % columns else number + 1, None)

    def _join(self, one: int, other: int, rng: Random | None) -> None:
        if rng is None or rng.random() >= MISSING_RATIO:
            self.streets[one].append(other)
            self.streets[other].append(one)

    def crossing_near(self, place: Place) -> int:
        """Return the crossing nearest to a place."""
        x, y = place
        return min(
            range(len(self.crossings)), key=lambda each: hypot(self.crossings[each][0] - x, self.crossings[each][1] - y)
        )


def home(districts: Sequence[District], rng: Random) -> Place:
    """Return where somebody lives."""
    [district] = rng.choices(districts, [each.share for each in districts])
    x, y = (rng.gauss(middle, district.spread_m) for middle in district.centre)
    return min(WIDTH_M, max(0.0, x)), min(HEIGHT_M, max(0.0, y))


def degrees(place: Place) -> tuple[float, float]:
    """Return latitude and longitude of a place."""
    south, west = SOUTH_WEST_DEGREES
    return south + place[1] / METRES_PER_DEGREE, west + place[0] / (METRES_PER_DEGREE * cos(radians(south)))


class Walker:
    """Somebody who moves along the streets: from crossing to crossing, and never back at once if there is a choice."""

    def __init__(
        self, town: Town, begin: int, rng: Random, metres_per_s: tuple[float, float], pause_s: tuple[float, float]
    ) -> None:
        self._town, self._rng = town, rng
        self._metres_per_s, self._pause_s = metres_per_s, pause_s
        self._from = self._to = begin
        #: The walk along the present street: when it begins and ends.
        self._begin_s = self._end_s = 0.0

    def at(self, now_s: float) -> Place:
        """Return the place at a time; times never go back."""
        while now_s >= self._end_s:
            self._next()
        one, other = self._town.crossings[self._from], self._town.crossings[self._to]
        length_s = self._end_s - self._begin_s
        part = min(1.0, max(0.0, (now_s - self._begin_s) / length_s)) if length_s else 1.0
        return one[0] + (other[0] - one[0]) * part, one[1] + (other[1] - one[1]) * part

    def _next(self) -> None:
        ends = [each for each in self._town.streets[self._to] if each != self._from]
        former, self._from = self._from, self._to
        self._to = self._rng.choice(ends) if ends else former
        one, other = self._town.crossings[self._from], self._town.crossings[self._to]
        self._begin_s = self._end_s + self._rng.uniform(*self._pause_s)
        distance_m = max(1.0, hypot(one[0] - other[0], one[1] - other[1]))
        self._end_s = self._begin_s + distance_m / self._rng.uniform(*self._metres_per_s)


def walkers(town: Town, places: Sequence[Place], rng: Random) -> list[Walker]:
    """Return people on foot, who begin at places."""
    return [Walker(town, town.crossing_near(place), rng, WALK_M_PER_S, PAUSE_S) for place in places]


def riders(town: Town, count: int, rng: Random) -> list[Walker]:
    """Return publishers of emergencies, who begin anywhere."""
    begins = rng.choices(range(len(town.crossings)), k=count)
    return [Walker(town, begin, rng, RIDE_M_PER_S, (0.0, 0.0)) for begin in begins]


def grid(columns: int, rows: int) -> Iterator[Place]:
    """Yield the centres of equal parts of the town, row by row."""
    for row in range(rows):
        for column in range(columns):
            yield WIDTH_M * (column + 0.5) / columns, HEIGHT_M * (row + 0.5) / rows
