"""The settings of the balancer, as a recording has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pyspark.sql import functions as F

from dynamoth.settings.sections import PlanningSettings
from dynamoth_analytics.reading import Recording

SETTINGS_MAX = 1000
"""Most settings that the driver collects."""

DEFAULTS = {item.name: item.default for item in fields(PlanningSettings) if isinstance(item.default, int | float)}


@dataclass(frozen=True, slots=True)
class PresentSettings:
    """The settings in force at the end of a recording."""

    #: Those that are numbers, by name; defaults where none are recorded.
    numbers: Mapping[str, float]
    #: URLs of servers by id, as far as they are recorded.
    urls: Mapping[str, str]
    #: False: all are defaults.
    recorded: bool


def present_settings(recording: Recording) -> PresentSettings:
    """Read the settings in force. Raises BadRecording."""
    # A long value is continued in the next rows of its message.
    messages = recording.table("settings").groupBy("name", "balancer", "number")
    lines = F.array_sort(F.collect_list(F.struct("line", F.coalesce("value", F.lit("")).alias("value"))))
    values = messages.agg(F.min("at").alias("at"), F.concat_ws("", lines["value"]).alias("value"))
    latest = values.groupBy("name").agg(F.max_by("value", "at").alias("value"))
    found = {row["name"]: _json(row["value"]) for row in latest.limit(SETTINGS_MAX).collect()}
    known = {name: value for name, value in found.items() if name in DEFAULTS and isinstance(value, int | float)}
    return PresentSettings({**DEFAULTS, **known}, _urls(found.get("servers")), "load_ratio_high" in known)


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None


def _urls(servers: Any) -> dict[str, str]:
    """Return the setting ``servers``: URLs by id."""
    known: dict[Any, Any] = {**servers} if isinstance(servers, dict) else {}
    return {id_: url for id_, url in known.items() if isinstance(id_, str) and isinstance(url, str)}
