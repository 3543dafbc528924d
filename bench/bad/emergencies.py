"""The workload of the prototype (BAD, section 6.1): an emergency notification application, as data, from a seed.

Seven standing queries over reports of emergencies match them by type and by place. The paper names their parameters,
periods and numbers, not the queries themselves; these seven give about its 600 interests and 2,200 subscriptions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from random import Random

from bench.bad.town import HEIGHT_M, WIDTH_M, District, Place, Town, home, riders, walkers
from dynamoth.edge.interests import Scalar

USERS = 400
BROKERS = 5
MINUTE_S = 60.0
END_S = 30 * MINUTE_S
LOGGED_IN_S = 4 * MINUTE_S
SUBSCRIBED_S = 8 * MINUTE_S

REPORTS = 10_000
REPORT_BYTES = (200, 700)
PUBLISHERS = 8
TYPES = ("fire", "flood", "accident", "crime", "storm", "outage", "medical", "chemical")
SHELTERS = 200

COLUMNS, ROWS = 6, 5
"""Cells of the town that can be subscribed to as the location of events."""

PARTS = 3
"""Parts of the town from west to east, for queries of larger places."""

RADII_M = (150, 300, 450)
NEAR_RATIO = 0.7
"""This part of the places that users ask about is where they live; the others are anywhere."""

SHARES = (0.46, 0.22, 0.14, 0.11, 0.07)
"""How many people live around each broker: "the non uniform distribution of subscribers"."""

BROKER_PLACES: tuple[Place, ...] = ((2250, 1700), (900, 2600), (3700, 2700), (3600, 700), (800, 700))


@dataclass(frozen=True)
class Query:
    """A standing query: its period in seconds, and its parameters."""

    name: str
    period_s: float
    parameters: tuple[str, ...]


QUERIES = (
    Query("EmergenciesOfType", 10, ("type",)),
    Query("EmergenciesAt", 10, ("cell",)),
    Query("EmergenciesOfTypeAt", 20, ("cell", "type")),
    Query("EmergenciesNearMe", 20, ("radius", "user")),
    Query("EmergenciesOfTypeInPart", 30, ("part", "type")),
    Query("SheltersForEmergenciesAt", 30, ("cell",)),
    Query("SheltersForType", 30, ("type",)),
)
BY_NAME = {query.name: query for query in QUERIES}

Values = tuple[Scalar, ...]
"""Values of the parameters of a query, in their order."""


@dataclass(frozen=True)
class PlannedSubscription:
    """A user subscribes to a query, at a time."""

    at: float
    query: str
    values: Values

    @property
    def params(self) -> Mapping[str, Scalar]:
        """The parameters by name."""
        return dict(zip(BY_NAME[self.query].parameters, self.values, strict=True))


@dataclass(frozen=True)
class UserPlan:
    """What one user does."""

    number: int
    home: Place
    login_at: float
    subscriptions: tuple[PlannedSubscription, ...]


@dataclass(frozen=True)
class Report:
    """A report of an emergency."""

    at: float
    type: str
    place: Place
    size: int


def cell_of(place: Place) -> int:
    """Return the cell that a place is in, or that is nearest to a place outside of the town."""
    column, row = int(place[0] * COLUMNS / WIDTH_M), int(place[1] * ROWS / HEIGHT_M)
    return min(ROWS - 1, max(0, row)) * COLUMNS + min(COLUMNS - 1, max(0, column))


def part_of(place: Place) -> int:
    """Return the part that a place is in."""
    return min(PARTS - 1, int(place[0] * PARTS / WIDTH_M))


class Emergencies:
    """Users, reports and matching of one seed."""

    def __init__(self, seed: int, users: int = USERS) -> None:
        rng = Random(f"bad prototype {seed}")
        self.town = Town(seed)
        districts = [District(place, share, 350.0) for place, share in zip(BROKER_PLACES, SHARES, strict=True)]
        homes = [home(districts, rng) for _ in range(users)]
        self.users = [self._plan(number, homes[number], rng) for number in range(users)]
        self.shelters = [self.town.crossings[rng.randrange(len(self.town.crossings))] for _ in range(SHELTERS)]
        self._walkers = walkers(self.town, homes, rng)
        self.reports = list(self._make_reports(rng))
        #: When each interest is subscribed to first.
        self.interests: dict[tuple[str, Values], float] = {}
        planned = [each for user in self.users for each in user.subscriptions]
        for each in sorted(planned, key=lambda each: each.at):
            self.interests.setdefault((each.query, each.values), each.at)

    @property
    def subscriptions(self) -> int:
        """How many subscriptions all users make."""
        return sum(len(user.subscriptions) for user in self.users)

    def _plan(self, number: int, lives_at: Place, rng: Random) -> UserPlan:
        subscriptions: dict[tuple[str, Values], PlannedSubscription] = {}
        for query in rng.sample(QUERIES, rng.randint(1, 5)):
            for _ in range(rng.randint(1, 3)):
                values = self._values(query, number, lives_at, rng)
                at = rng.uniform(LOGGED_IN_S, SUBSCRIBED_S)
                subscriptions.setdefault((query.name, values), PlannedSubscription(at, query.name, values))
        login_at = rng.uniform(0.0, LOGGED_IN_S)
        return UserPlan(number, lives_at, login_at, tuple(sorted(subscriptions.values(), key=lambda each: each.at)))

    def _values(self, query: Query, user: int, lives_at: Place, rng: Random) -> Values:
        place = lives_at if rng.random() < NEAR_RATIO else (rng.uniform(0, WIDTH_M), rng.uniform(0, HEIGHT_M))
        makers: Mapping[str, Scalar] = {
            "type": rng.choice(TYPES),
            "cell": cell_of((place[0] + rng.gauss(0, 400), place[1] + rng.gauss(0, 400))),
            "part": part_of(place),
            "user": user,
            "radius": rng.choice(RADII_M),
        }
        return tuple(makers[name] for name in query.parameters)

    def _make_reports(self, rng: Random) -> Iterator[Report]:
        publishers = riders(self.town, PUBLISHERS, rng)
        at = 0.0
        while (at := at + rng.expovariate(REPORTS / END_S)) < END_S:
            place = rng.choice(publishers).at(at)
            yield Report(at, rng.choice(TYPES), place, rng.randint(*REPORT_BYTES))

    # Matching.

    def results(self, query: Query, end_s: float) -> dict[Values, list[Report]]:
        """Execute a query over the reports of the period that ends at ``end_s``, for those subscribed to it by then.

        Returns the rows by interest, without empty result sets. Times never go back.
        """
        reports = self._between(end_s - query.period_s, end_s)
        found: defaultdict[Values, list[Report]] = defaultdict(list)
        if query.name == "EmergenciesNearMe":
            self._match_near(reports, end_s, found)
        for report in reports:
            values: Mapping[str, Scalar] = {
                "type": report.type, "cell": cell_of(report.place), "part": part_of(report.place),
            }  # fmt: skip
            if "user" not in query.parameters:
                found[tuple(values[name] for name in query.parameters)].append(report)
        never = END_S + 1
        return {
            values: rows for values, rows in found.items() if self.interests.get((query.name, values), never) <= end_s
        }

    def _match_near(self, reports: Sequence[Report], now: float, found: defaultdict[Values, list[Report]]) -> None:
        """Match reports with the users who are near now."""
        for user, walker in enumerate(self._walkers):
            x, y = walker.at(now)
            for report in reports:
                distance_m = hypot(report.place[0] - x, report.place[1] - y)
                for radius in RADII_M:
                    if distance_m <= radius:
                        found[radius, user].append(report)

    def _between(self, begin_s: float, end_s: float) -> list[Report]:
        return [report for report in self.reports if begin_s <= report.at < end_s]

    def payload(self, query: Query, rows: Sequence[Report]) -> str:
        """Return a result set as text: rows of the sizes of the reports, with the nearest shelters where asked for."""
        texts: list[str] = []
        for row in rows:
            text = f"{row.type} {row.place[0]:.0f} {row.place[1]:.0f}"
            if query.name.startswith("Shelters"):
                nearest = sorted(self.shelters, key=lambda at: hypot(at[0] - row.place[0], at[1] - row.place[1]))[:2]
                text += "".join(f" shelter {x:.0f} {y:.0f}" for x, y in nearest)
            texts.append(text.ljust(row.size, "."))
        return "\n".join(texts)
