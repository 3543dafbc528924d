"""Writes names, figures and times as people read them: on pages, in sentences and in comments."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime

from dynamoth.errors import printable

TimeFormat = Callable[[datetime | None], str]
"""How a time is written."""

NAME_CHARACTERS_MAX = 80
"""Longer names are cut where people read them; the tables in Parquet have them whole."""

PREFIXES = ((1e12, "T", 1e12), (1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3))
"""Of figures: from which value on, the prefix, and what it stands for."""


def display_name(name: str | None) -> str:
    """Return a name as people may read it: without control characters, and not too long."""
    if name is None:
        return "(none)"
    text = printable(name).replace("\n", "\\n")
    return text if len(text) <= NAME_CHARACTERS_MAX else f"{text[: NAME_CHARACTERS_MAX - 1]}…"


def figure(value: float | None, unit: str = "") -> str:
    """Return a number with three digits that matter, all of whole ones below 10,000; a dash when it is unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    is_small = value == int(value) and abs(value) < PREFIXES[-1][0]
    rounded = value if is_small else float(f"{value:.3g}")
    for limit, prefix, scale in PREFIXES:
        if abs(rounded) >= limit:
            return f"{float(f'{rounded / scale:.3g}'):.15g} {prefix}{unit}".rstrip()
    text = f"{value:.0f}" if value == int(value) or abs(rounded) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def ratio(value: float | None) -> str:
    """Return a load ratio, or another figure around 1."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 window", "2 windows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def percent(value: float | None) -> str:
    """Return a share."""
    return "-" if value is None else f"{value:.0%}"


def time_format(begin: datetime, end: datetime) -> TimeFormat:
    """Return how times from ``begin`` to ``end`` are written: with the day, if there are several."""
    return time_of_day if begin.date() == end.date() else day_and_time


def time_of_day(at: datetime | None) -> str:
    """Return a time of the day, in UTC."""
    return "-" if at is None else f"{at:%H:%M:%S}"


def day_and_time(at: datetime | None) -> str:
    """Return a time with its month and day, in UTC: where there are several days."""
    return "-" if at is None else f"{at:%m-%d %H:%M:%S}"


def duration(seconds: float) -> str:
    """Return a time span in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
