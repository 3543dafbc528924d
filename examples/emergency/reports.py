"""Emergency reports: what the reporters of the application send. Pure and seeded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from emergency.town import Place

TYPES = ("fire", "flood", "gas_leak", "accident", "collapse", "power_cut", "storm_damage", "medical")
"""The eight types of reports; earlier ones come more often."""

TYPE_WEIGHTS = tuple(1 / (rank + 2) for rank in range(len(TYPES)))

REPORTS_PER_S = 10_000 / 1800
"""Of all reporters together: about 10,000 in 30 minutes (BAD, section 6.1)."""

REPORTERS = 8
REPORT_BYTES = (200, 700)
"""Bounds of the length of a report as JSON."""

SEVERITIES = (1, 2, 3, 4, 5)
SEVERITY_WEIGHTS = (5, 4, 3, 2, 1)

PHRASES = (
    "the street is closed",
    "smoke from the second floor",
    "people are leaving the building",
    "water rises near the bridge",
    "please keep away",
    "help is on its way",
    "several cars are involved",
    "the power is out in this block",
    "a tree has fallen on the tram line",
    "an ambulance was requested",
    "the crossing is blocked",
    "stay inside and listen to the radio",
)


def draw_report(random: Random, reporter: str, number: int, place: Place, at_s: float) -> dict[str, object]:
    """Draw a report: a record of the dataset ``reports``.

    Args:
        random: of this reporter.
        reporter: who reports.
        number: of this reporter's reports, from 1; with the name, the id of the report.
        place: where the reporter is.
        at_s: Unix time; it is reported in whole milliseconds.

    """
    report: dict[str, object] = {
        "id": f"{reporter}-{number:06}",
        "type": random.choices(TYPES, TYPE_WEIGHTS)[0],
        "severity": random.choices(SEVERITIES, SEVERITY_WEIGHTS)[0],
        "lat": place.lat,
        "lon": place.lon,
        "at": round(at_s, 3),
        "reporter": reporter,
        "text": "",
    }
    length = random.randint(*REPORT_BYTES)
    missing = length - len(encode(report))
    text = ""
    while len(text) < missing:
        text += random.choice(PHRASES) + "; "
    report["text"] = text[: max(0, missing)]
    return report


def encode(record: dict[str, object]) -> bytes:
    """Return a record as JSON."""
    return json.dumps(record, separators=(",", ":")).encode()
