"""The town: streets, and people who move along them. Pure and seeded.

This is a stand-in for the mobility of the paper (BAD, DEBS 2019, section 6.1), which uses the ONE simulator and its map
of Helsinki. Neither is used here: streets are generated, and people are walkers on them with the figures of that
simulator's default world: 4,500 x 3,400 m, walkers of 0.5 to 1.5 m/s with pauses of up to 120 s, trams of 7 to 10 m/s.
The town is placed on the sphere at the centre of Helsinki, so that positions look like real ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

WIDTH_M = 4500.0
HEIGHT_M = 3400.0

ORIGIN_LAT = 60.1699
ORIGIN_LON = 24.9384
"""The middle of the town: the centre of Helsinki."""

EARTH_RADIUS_M = 6_371_008.8

COLUMNS = 16
ROWS = 12
JITTER_RATIO = 0.3
"""Crossings lie off a regular grid by up to this part of a cell: below a half, so that no two streets cross."""

CLOSED_RATIO = 0.15
"""This share of the grid's streets does not exist, where the town stays connected."""

CENTRES = ((0.5, 0.5, 0.5, 350.0), (0.2, 0.75, 0.3, 300.0), (0.8, 0.3, 0.2, 250.0))
"""Where people are: x and y as parts of the town, share of the people, and spread in metres."""

POPULAR_RATIO = 0.6
"""Share of the ways that lead to one of the centres; the others lead anywhere."""

WALKER_SPEED_M_PER_S = (0.5, 1.5)
VEHICLE_SPEED_M_PER_S = (7.0, 10.0)
PAUSE_S_MAX = 120.0
VEHICLE_PAUSE_S_MAX = 30.0

LAT_LON_DIGITS = 6
"""Decimals of degrees: 0.1 m."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place on the sphere, in degrees."""

    lat: float
    lon: float


def to_place(x_m: float, y_m: float) -> Place:
    """Return the place of a point of the town; (0, 0) is its south-western corner."""
    per_degree = math.radians(1) * EARTH_RADIUS_M
    lat = ORIGIN_LAT + (y_m - HEIGHT_M / 2) / per_degree
    lon = ORIGIN_LON + (x_m - WIDTH_M / 2) / (per_degree * math.cos(math.radians(ORIGIN_LAT)))
    return Place(round(lat, LAT_LON_DIGITS), round(lon, LAT_LON_DIGITS))


@dataclass(frozen=True)
class Town:
    """Crossings and the streets between them. Made by ``build_town``."""

    #: Metres from the south-western corner.
    crossings: tuple[tuple[float, float], ...]
    #: Of each crossing, the crossings at the other ends of its streets.
    neighbours: tuple[tuple[int, ...], ...]

    def length_m(self, here: int, there: int) -> float:
        """Return the distance of two crossings, as the crow flies."""
        return math.dist(self.crossings[here], self.crossings[there])

    def way(self, start: int, end: int) -> list[int]:
        """Return the crossings of a shortest way (A*), both ends included."""
        best = {start: 0.0}
        before: dict[int, int] = {}
        queue = [(self.length_m(start, end), start)]
        while queue:
            _, here = heapq.heappop(queue)
            if here == end:
                break
            for there in self.neighbours[here]:
                walked = best[here] + self.length_m(here, there)
                if walked < best.get(there, math.inf):
                    best[there], before[there] = walked, here
                    heapq.heappush(queue, (walked + self.length_m(there, end), there))
        way = [end]
        while way[-1] != start:
            way.append(before[way[-1]])
        return way[::-1]

    def nearest(self, x_m: float, y_m: float) -> int:
        """Return the crossing that is nearest to a point."""
        return min(range(len(self.crossings)), key=lambda each: math.dist(self.crossings[each], (x_m, y_m)))

    @cached_property
    def squares(self) -> tuple[Place, ...]:
        """Twelve places that people know by name, spread over the town: those whom many ask about."""
        points = [((column + 0.5) / 4 * WIDTH_M, (row + 0.5) / 3 * HEIGHT_M) for row in range(3) for column in range(4)]
        return tuple(to_place(*self.crossings[self.nearest(*point)]) for point in points)


def build_town(random: Random) -> Town:
    """Generate a town: a grid with crossings out of line and some streets missing, planar and connected."""
    width, height = WIDTH_M / COLUMNS, HEIGHT_M / ROWS

    def off() -> float:
        return 0.5 + random.uniform(-JITTER_RATIO, JITTER_RATIO)

    crossings = tuple(
        ((column + off()) * width, (row + off()) * height) for row in range(ROWS) for column in range(COLUMNS)
    )
    streets = {(here, here + 1) for here in range(len(crossings)) if (here + 1) % COLUMNS}
    streets |= {(here, here + COLUMNS) for here in range(len(crossings) - COLUMNS)}
    for street in random.sample(sorted(streets), round(len(streets) * CLOSED_RATIO)):
        if _is_connected(len(crossings), streets - {street}):
            streets.remove(street)
    return Town(crossings, _neighbours(len(crossings), streets))


def _neighbours(count: int, streets: set[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    beside: list[list[int]] = [[] for _ in range(count)]
    for here, there in sorted(streets):
        beside[here].append(there)
        beside[there].append(here)
    return tuple(map(tuple, beside))


def _is_connected(count: int, streets: set[tuple[int, int]]) -> bool:
    neighbours = _neighbours(count, streets)
    seen, waiting = {0}, [0]
    while waiting:
        for there in neighbours[waiting.pop()]:
            if there not in seen:
                seen.add(there)
                waiting.append(there)
    return len(seen) == count


def popular_crossing(town: Town, random: Random) -> int:
    """Draw a crossing at one of the centres."""
    x, y, _, spread_m = random.choices(CENTRES, [share for _, _, share, _ in CENTRES])[0]
    return town.nearest(random.gauss(x * WIDTH_M, spread_m), random.gauss(y * HEIGHT_M, spread_m))


@dataclass(frozen=True, slots=True)
class _Leg:
    """A straight part of a way, or a pause, in seconds since the walker's beginning."""

    start_s: float
    end_s: float
    start: tuple[float, float]
    end: tuple[float, float]


class Walker:
    """A person who goes from place to place along the streets, without end.

    Where a walker is depends on the time and the seed, not on how often it is asked. Ask with times that never
    decrease.

    Args:
        town: where.
        random: of this walker alone.
        speed_m_per_s: bounds; each way is walked at one speed between them.
        pause_s_max: of the pause behind each way.

    """

    def __init__(
        self,
        town: Town,
        random: Random,
        speed_m_per_s: tuple[float, float] = WALKER_SPEED_M_PER_S,
        pause_s_max: float = PAUSE_S_MAX,
    ) -> None:
        self._town = town
        self._random = random
        self._speed_m_per_s = speed_m_per_s
        self._pause_s_max = pause_s_max
        self._legs = self._walk(popular_crossing(town, random))
        self._leg = next(self._legs)

    def point(self, at_s: float) -> tuple[float, float]:
        """Return the point of the town, in metres, at a time since the beginning."""
        while at_s > self._leg.end_s:
            self._leg = next(self._legs)
        leg = self._leg
        part = (at_s - leg.start_s) / (leg.end_s - leg.start_s) if leg.end_s > leg.start_s else 1.0
        return _between(leg.start, leg.end, part)

    def place(self, at_s: float) -> Place:
        """Return the place on the sphere at a time since the beginning."""
        return to_place(*self.point(at_s))

    def _walk(self, here: int) -> Iterator[_Leg]:
        random, town, now_s = self._random, self._town, 0.0
        while True:
            is_popular = random.random() < POPULAR_RATIO
            goal = popular_crossing(town, random) if is_popular else random.randrange(len(town.crossings))
            speed = random.uniform(*self._speed_m_per_s)
            way = town.way(here, goal)
            for start, end in pairwise(way):
                end_s = now_s + town.length_m(start, end) / speed
                yield _Leg(now_s, end_s, town.crossings[start], town.crossings[end])
                now_s = end_s
            end_s = now_s + 0.1 + random.random() * self._pause_s_max
            yield _Leg(now_s, end_s, town.crossings[goal], town.crossings[goal])
            here, now_s = goal, end_s


def vehicle(town: Town, random: Random) -> Walker:
    """Return a person in a tram or car: seven times as fast, with short stops."""
    return Walker(town, random, VEHICLE_SPEED_M_PER_S, VEHICLE_PAUSE_S_MAX)


def draw_shelters(town: Town, random: Random, count: int = 200) -> list[dict[str, object]]:
    """Draw the emergency shelters: records of the dataset ``shelters``."""
    shelters: list[dict[str, object]] = []
    for number in range(count):
        here = random.randrange(len(town.crossings))
        there = random.choice(town.neighbours[here])
        place = to_place(*_between(town.crossings[here], town.crossings[there], random.random()))
        shelters.append(
            {
                "id": number,
                "name": f"Shelter {number}",
                "lat": place.lat,
                "lon": place.lon,
                "capacity": random.randrange(20, 500, 10),
            }
        )
    return shelters


def _between(start: tuple[float, float], end: tuple[float, float], part: float) -> tuple[float, float]:
    return start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part
