"""The seven queries once more, in plain Python: what each result set has to be.

The audit compares results with these. Nothing here is shared with the data cluster: no SQL, no Spark, no grid of cells.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emergency.scenario import HURRIED_SUFFIX

Row = Mapping[str, Any]
"""Times are milliseconds since 1970."""

Offsets = Mapping[str, int]
"""By partition, such as ``reports/0``: the last offset."""

EARTH_RADIUS_M = 6_371_008.8
METRES_PER_DEGREE = math.radians(1) * EARTH_RADIUS_M

SHELTER_RADIUS_M = 400.0
PEOPLE_RADIUS_M = 300.0
SERIOUS = 2


@dataclass(frozen=True, slots=True)
class Window:
    """The records of one execution: reports behind ``start`` up to ``end``, and locations up to ``end``."""

    start: Offsets
    end: Offsets


@dataclass
class History:
    """All records of a run, by partition and in the order of their offsets."""

    reports: dict[str, list[tuple[int, Row]]] = field(default_factory=dict[str, list[tuple[int, Row]]])
    locations: dict[str, list[tuple[int, Row]]] = field(default_factory=dict[str, list[tuple[int, Row]]])
    shelters: Sequence[Row] = ()

    def __post_init__(self) -> None:
        #: Offsets and records of each user, by partition.
        self._places: dict[str, dict[str, tuple[list[int], list[Row]]]] = {}
        for partition, records in self.locations.items():
            of_users: dict[str, tuple[list[int], list[Row]]] = defaultdict(lambda: ([], []))
            for offset, record in records:
                offsets, rows = of_users[record["user"]]
                offsets.append(offset)
                rows.append(record)
            self._places[partition] = of_users

    def reports_in(self, window: Window) -> list[Row]:
        """Return the reports of a window."""
        found: list[Row] = []
        for partition, records in self.reports.items():
            first = bisect_right(records, window.start.get(partition, 0), key=lambda each: each[0])
            last = bisect_right(records, window.end.get(partition, 0), key=lambda each: each[0])
            found += [record for _, record in records[first:last]]
        return found

    def places_at(self, end: Offsets) -> dict[str, Row]:
        """Return the latest location of each user, up to these offsets."""
        latest: dict[str, Row] = {}
        for partition, of_users in self._places.items():
            for user, (offsets, rows) in of_users.items():
                if count := bisect_right(offsets, end.get(partition, 0)):
                    latest[user] = rows[count - 1]
        return latest


@dataclass
class View:
    """The records that the queries see in one execution."""

    reports: Sequence[Row]
    places: Mapping[str, Row]
    shelters: Sequence[Row]

    def __post_init__(self) -> None:
        self.by_type: dict[str, list[Row]] = defaultdict(list)
        for report in self.reports:
            self.by_type[report["type"]].append(report)


def view_of(history: History, window: Window) -> View:
    """Return the records that the queries see in an execution with this window."""
    return View(history.reports_in(window), history.places_at(window.end), history.shelters)


def is_near(a: Row, lat: float, lon: float, metres: float) -> bool:
    """Return whether a place is within a distance on the sphere (haversine)."""
    if abs(a["lat"] - lat) * METRES_PER_DEGREE > metres + 1:
        return False
    lat_a, lat_b = math.radians(a["lat"]), math.radians(lat)
    half_lat, half_lon = (lat_b - lat_a) / 2, math.radians(lon - a["lon"]) / 2
    chord = math.sin(half_lat) ** 2 + math.cos(lat_a) * math.cos(lat_b) * math.sin(half_lon) ** 2
    return 2 * EARTH_RADIUS_M * math.asin(math.sqrt(chord)) <= metres


def evaluate(query: str, params: Row, view: View) -> list[dict[str, Any]]:
    """Return the rows of a query for one set of parameters, in their order; none: nothing is published."""
    return QUERIES[query.removesuffix(HURRIED_SUFFIX)](params, view)


def reports_of_type(params: Row, view: View) -> list[dict[str, Any]]:
    """Event type."""
    return _reports(view.by_type[params["type"]], "at id type severity lat lon")


def reports_near_place(params: Row, view: View) -> list[dict[str, Any]]:
    """Event type and event place."""
    return _reports(_near(view.by_type[params["type"]], params, params), "at id type severity lat lon text")


def reports_near_me(params: Row, view: View) -> list[dict[str, Any]]:
    """The user's place."""
    return _reports(_near_user(view.reports, params, view), "at id type severity lat lon text")


def reports_of_type_near_me(params: Row, view: View) -> list[dict[str, Any]]:
    """Event type and the user's place."""
    return _reports(_near_user(view.by_type[params["type"]], params, view), "at id severity lat lon text")


def shelters_near_me(params: Row, view: View) -> list[dict[str, Any]]:
    """Shelters near the user, where there are serious reports near the user, too."""
    serious = [each for each in view.by_type[params["type"]] if each["severity"] >= SERIOUS]
    if not _near_user(serious, params, view):
        return []
    me = view.places[params["user"]]
    near = [each for each in view.shelters if is_near(each, me["lat"], me["lon"], SHELTER_RADIUS_M)]
    return sorted(({name: each[name] for name in ("id", "name", "lat", "lon", "capacity")} for each in near), key=_id)


def report_counts(params: Row, view: View) -> list[dict[str, Any]]:
    """How many reports of each type in an area."""
    severities: dict[str, list[int]] = defaultdict(list)
    for report in _near(view.reports, params, params):
        severities[report["type"]].append(report["severity"])
    return [
        {"type": type_, "reports": len(found), "severity_max": max(found)}
        for type_, found in sorted(severities.items())
    ]


def people_near_reports(params: Row, view: View) -> list[dict[str, Any]]:
    """How many people are near each report of a type."""
    rows: list[dict[str, Any]] = []
    for report in _reports(view.by_type[params["type"]], "at id severity lat lon"):
        people = sum(is_near(place, report["lat"], report["lon"], PEOPLE_RADIUS_M) for place in view.places.values())
        if people:
            rows.append({**report, "people": people})
    return rows


QUERIES: Mapping[str, Callable[[Row, View], list[dict[str, Any]]]] = {
    function.__name__: function
    for function in (
        reports_of_type,
        reports_near_place,
        reports_near_me,
        reports_of_type_near_me,
        shelters_near_me,
        report_counts,
        people_near_reports,
    )
}


def _near(records: Sequence[Row], place: Row, params: Row) -> list[Row]:
    return [each for each in records if is_near(each, place["lat"], place["lon"], params["radius_m"])]


def _near_user(records: Sequence[Row], params: Row, view: View) -> list[Row]:
    me = view.places.get(params["user"])
    return [] if me is None else _near(records, me, params)


def _reports(records: Sequence[Row], columns: str) -> list[dict[str, Any]]:
    ordered = sorted(records, key=lambda each: (each["at"], each["id"]))
    return [{name: each[name] for name in columns.split()} for each in ordered]


def _id(row: Row) -> Any:
    return row["id"]
