"""What every user does and when: logins, subscriptions, absences. Pure and seeded (BAD, section 6.1).

Users log in during the first 4 of 30 minutes, and subscribe during the next 4: each to one to five of the seven
queries, with one to three sets of parameters each. Some go away for a while and come back, and some unsubscribe again.
A run of another length has the same proportions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from emergency.reports import TYPES
from emergency.town import Place, Town

LOGIN_RATIO = 4 / 30
SUBSCRIBE_RATIO = 4 / 30
"""Parts of the run in which users log in, and then subscribe."""

QUERIES_PER_USER = (1, 5)
SUBSCRIPTIONS_PER_QUERY = (1, 3)

VEHICLE_RATIO = 0.1
"""This share of the users sits in trams and cars."""

AWAY_RATIO = 0.3
AWAY_LENGTH_RATIO = (0.03, 0.15)
"""This share of the users goes away once, for a part of the run between these two."""

UNSUBSCRIBE_RATIO = 0.1
"""This share of the users gives up one subscription."""

PLACE_RADIUSES_M = (500.0, 1000.0)
OWN_RADIUSES_M = (300.0, 600.0, 1000.0)

HURRIED_SUFFIX = "_hurried"
"""A query whose name has this suffix is the one without it, with a shorter period."""

HURRIED_RADIUS_M = 2000.0
"""About a third of the town: no execution is without a report."""

Parameters = dict[str, str | float]

QUERY_WEIGHTS = {
    "reports_of_type": 5.0,
    "reports_near_place": 5.0,
    "report_counts": 5.0,
    "people_near_reports": 4.0,
    "reports_near_me": 0.8,
    "reports_of_type_near_me": 0.8,
    "shelters_near_me": 0.8,
}
"""How many users want a query. Those about the own place are shared by nobody: with these weights, 400 users have about
600 interests and 2,400 subscriptions, as in the paper."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSubscription:
    """A subscription of a user. Times are seconds since the beginning of the run."""

    query: str
    params: Parameters
    at_s: float
    #: When it is given up; None: never.
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class UserPlan:
    """What a user does."""

    name: str
    #: Of the walker.
    seed: int
    is_vehicle: bool
    login_s: float
    subscriptions: tuple[PlannedSubscription, ...]
    #: When the user goes away, and comes back; None: never.
    away_s: tuple[float, float] | None


def plan_users(town: Town, count: int, length_s: float, seed: int, *, hurried: bool = False) -> list[UserPlan]:
    """Return the plans of all users, named ``u000`` and so on; the same for the same arguments.

    With ``hurried``, the first user subscribes to ``report_counts_hurried``, too, a query of the demo.
    """
    plans = [_plan_user(town, f"u{number:03}", length_s, Random(f"{seed} user {number}")) for number in range(count)]
    if hurried and plans:
        centre = town.squares[len(town.squares) // 2]
        params: Parameters = {"lat": centre.lat, "lon": centre.lon, "radius_m": HURRIED_RADIUS_M}
        more = PlannedSubscription("report_counts" + HURRIED_SUFFIX, params, SUBSCRIBE_RATIO * length_s)
        plans[0] = replace(plans[0], subscriptions=(more, *plans[0].subscriptions))
    return plans


def _plan_user(town: Town, name: str, length_s: float, random: Random) -> UserPlan:
    login_s = random.uniform(0, LOGIN_RATIO * length_s)
    begin_s, end_s = LOGIN_RATIO * length_s, (LOGIN_RATIO + SUBSCRIBE_RATIO) * length_s
    planned: list[PlannedSubscription] = []
    for query in _draw_queries(random, random.randint(*QUERIES_PER_USER)):
        wanted = random.randint(*SUBSCRIPTIONS_PER_QUERY)
        drawn: list[Parameters] = []
        while len(drawn) < wanted:
            params = draw_parameters(town, query, name, random)
            if params not in drawn:
                drawn.append(params)
        planned += [PlannedSubscription(query, params, random.uniform(begin_s, end_s)) for params in drawn]
    planned.sort(key=lambda each: each.at_s)
    if random.random() < UNSUBSCRIBE_RATIO:
        first = planned[0]
        until_s = random.uniform(end_s, length_s)
        planned[0] = PlannedSubscription(first.query, first.params, first.at_s, until_s)
    away_s = None
    if random.random() < AWAY_RATIO:
        absence_s = random.uniform(*AWAY_LENGTH_RATIO) * length_s
        leave_s = random.uniform(end_s, 0.85 * length_s - absence_s)
        away_s = leave_s, leave_s + absence_s
    return UserPlan(name, random.getrandbits(32), random.random() < VEHICLE_RATIO, login_s, tuple(planned), away_s)


def _draw_queries(random: Random, count: int) -> list[str]:
    left = dict(QUERY_WEIGHTS)
    drawn: list[str] = []
    for _ in range(count):
        query = random.choices(list(left), list(left.values()))[0]
        del left[query]
        drawn.append(query)
    return drawn


def draw_parameters(town: Town, query: str, user: str, random: Random) -> Parameters:
    """Draw a set of parameters of a query. Those of shared queries come from few values, so that users share them."""
    type_ = random.choice(TYPES)
    square: Place = random.choice(town.squares)
    place: Parameters = {"lat": square.lat, "lon": square.lon, "radius_m": random.choice(PLACE_RADIUSES_M)}
    own: Parameters = {"user": user, "radius_m": random.choice(OWN_RADIUSES_M)}
    match query:
        case "reports_of_type" | "people_near_reports":
            return {"type": type_}
        case "reports_near_place":
            return {"type": type_, **place}
        case "report_counts":
            return place
        case "reports_near_me":
            return own
        case "reports_of_type_near_me" | "shelters_near_me":
            return {"type": type_, **own}
        case _:
            raise AssertionError(f"not a query of the application: {query}")
