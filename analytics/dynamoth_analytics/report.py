"""``dynamoth report``: what happened in a recorded cluster, as Parquet tables and one page of HTML.

Each job is a function of data frames in a module of its own. This module reads the recording, runs the jobs one after
the other, writes what each returns to ``DIR/<job>``, and draws the page from a bounded part of that. Nothing else is
collected. Runs as ``spark-submit`` or ``python -m dynamoth_analytics.report``, too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError, DynamothError
from dynamoth.settings.sections import PlanningSettings
from dynamoth_analytics import anomalies, calibration, channels, load, plans
from dynamoth_analytics.drawing import draw
from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.findings import Drawn, findings
from dynamoth_analytics.reading import Recording, check_recording, is_url, parse_time
from dynamoth_analytics.session import add_session, open_session
from dynamoth_daemon.exit_codes import EXIT_CODES, EXIT_DONE, EXIT_FAILED, EXIT_REFUSED

PAGE = "report.html"
SETTINGS_FILE = "recommended.toml"

SLOTS = ((15 * 60, 1), (3 * 3600, 5), (24 * 3600, 30), (math.inf, 60))
"""Length of slots in seconds, for recordings up to a length: a short one would have few slots of a minute."""

ROWS_DRAWN_MAX = 50
SLOTS_DRAWN_MAX = 200
SERVERS_DRAWN_MAX = 16
SETTINGS_MAX = 1000
"""Bounds of what the driver collects for the page, per job."""

MAIN_FINDINGS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("recording", metavar="RECORDING", help="the folder that `dynamoth record` wrote, or its URL")
    parser.add_argument("--from", dest="begin", metavar="TIME", help="only from this time on: 2026-11-23T10:00 (UTC)")
    parser.add_argument("--to", dest="end", metavar="TIME", help="only up to this time")
    parser.add_argument("--out", metavar="DIR", help="a new or empty folder; default report-<time>")
    add_session(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write a report. Returns the exit code."""
    begin, end = (parse_time(text) if text else None for text in (arguments.begin, arguments.end))
    where = arguments.recording if is_url(arguments.recording) else str(Path(arguments.recording).resolve())
    check_recording(where, begin, end)
    out = _out(arguments.out)
    started = time.monotonic()
    with open_session(arguments, "dynamoth report") as spark:
        _say(f"{'spark':14}{spark.version}, {time.monotonic() - started:.1f} s")
        report = Report(Recording(spark, where, begin, end), out)
        sentences = report.write()
    _say("")
    for sentence in sentences[:MAIN_FINDINGS]:
        _say(f"* {sentence}")
    _say(f"\n{out / PAGE}")
    return EXIT_DONE


def _out(given: str | None) -> Path:
    """Return the folder for a report, which is made. Raises ConfigError when it cannot be used."""
    out = Path(given or f"report-{datetime.now(UTC):%Y%m%d-%H%M%S}").resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: give a folder that can be written") from error
    if used:
        raise ConfigError(f"--out {out} is not empty: give a new folder")
    return out


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Extent:
    """The time that the reports of a recording cover, and the largest server."""

    begin: datetime
    end: datetime
    capacity: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return max(1.0, (self.end - self.begin).total_seconds())

    @property
    def slot_s(self) -> int:
        """How long the slots of its load are."""
        return next(slot_s for limit, slot_s in SLOTS if self.seconds <= limit)


class Report:
    """The report of a recording, written to the folder ``out``."""

    def __init__(self, recording: Recording, out: Path) -> None:
        self._recording = recording
        self._out = out
        self._drawn = Drawn()
        #: Of the servers, by id, as far as the recording has them.
        self._urls: dict[str, str] = {}

    def write(self) -> list[str]:
        """Run all jobs, write tables and page, and return the findings. Raises DynamothError."""
        servers = self._recording.table("servers").cache()
        extent = self._extent(servers)
        settings = self._settings()
        self._jobs(servers, extent, settings)
        toml = self._recommended(settings)
        self._drawn.missing = self._recording.missing
        sentences = findings(self._drawn)
        (self._out / SETTINGS_FILE).write_text(toml, encoding="utf-8")
        (self._out / PAGE).write_text(draw(self._drawn, sentences, extent.begin, extent.end, toml), encoding="utf-8")
        return sentences

    def _extent(self, servers: DataFrame) -> Extent:
        row = servers.agg(
            F.min("at").cast("double").alias("begin"),
            F.max("at").cast("double").alias("end"),
            F.max("outgoing_bytes_per_s_max").alias("capacity"),
        ).collect()[0]
        if row["begin"] is None:
            asked = self._recording.begin or self._recording.end
            cure = "choose other times for --from and --to" if asked else "record for longer than one report interval"
            raise BadRecording(
                f"{self._recording.folder} has no report of a server{' in this time' if asked else ''}: {cure}"
            )
        begin, end = (datetime.fromtimestamp(row[name], UTC) for name in ("begin", "end"))
        return Extent(begin, end, float(row["capacity"] or 1))

    def _settings(self) -> dict[str, float]:
        """Return the numbers of the settings in force at the end, by name; defaults where none are recorded."""
        # A long value is continued in the next rows of its message.
        messages = self._recording.table("settings").groupBy("name", "balancer", "number")
        lines = F.array_sort(F.collect_list(F.struct("line", F.coalesce("value", F.lit("")).alias("value"))))
        values = messages.agg(F.min("at").alias("at"), F.concat_ws("", lines["value"]).alias("value"))
        latest = values.groupBy("name").agg(F.max_by("value", "at").alias("value"))
        found = {row["name"]: _json(row["value"]) for row in latest.limit(SETTINGS_MAX).collect()}
        settings = {
            item.name: item.default for item in fields(PlanningSettings) if isinstance(item.default, int | float)
        }
        known = {name: value for name, value in found.items() if name in settings and isinstance(value, int | float)}
        self._drawn.settings = settings | known
        self._drawn.settings_recorded = "load_ratio_high" in known
        self._urls = _urls(found.get("servers"))
        return {**settings, **known}

    def _jobs(self, servers: DataFrame, extent: Extent, settings: Mapping[str, float]) -> None:
        recording, slot_s, high = self._recording, extent.slot_s, settings["load_ratio_high"]
        rows = recording.table("channels", channels.COLUMNS)
        slots = self._job("channel_slots", lambda: channels.channel_slots(rows, slot_s))
        plan_rows = recording.table("plans")
        spans = channels.replicated_spans(plan_rows)
        loads = self._job("load", lambda: load.load(servers, slot_s, high))
        step = max(1, math.ceil(extent.seconds / slot_s / SLOTS_DRAWN_MAX)) * slot_s
        busy = load.by_server(loads).orderBy(F.desc("ratio_max")).limit(SERVERS_DRAWN_MAX).select("server")
        self._draw("load", _coarser(loads.join(F.broadcast(busy), "server"), step, "server"))
        self._draw("balance", _coarser(self._job("balance", lambda: load.balance(loads)), step))
        self._job("servers", lambda: load.by_server(loads), F.desc("ratio_max"))
        self._job("overloads", lambda: load.overloads(loads, slots, slot_s), F.desc("minutes"))
        channel_loads = self._job("channel_loads", lambda: channels.channel_loads(slots, spans))
        summary = self._job("channels", lambda: channels.by_channel(channel_loads, slots), F.desc("bytes_out"))
        self._job("popularity", lambda: channels.popularity(summary))
        self._job(
            "replication", lambda: channels.replication(channel_loads, settings, extent.capacity), F.desc("seconds")
        )
        changes = self._job("changes", lambda: plans.changes(plan_rows), F.desc("at"))
        effects = self._job("effects", lambda: plans.effects(recording.table("decisions")), F.desc("at"))
        self._job("without_gain", lambda: plans.without_gain(effects), F.desc("at"))
        self._job("ping_pong", lambda: plans.ping_pong(changes), F.desc("at"))
        latency = recording.table("latency")
        self._job("latency_around", lambda: plans.latency_around(changes, latency), F.desc("begin"))
        response = self._job("response", lambda: calibration.response(servers, latency))
        self._draw("response", response.orderBy("server", "ratio").limit(SERVERS_DRAWN_MAX * SLOTS_DRAWN_MAX))
        self._job("break_points", lambda: calibration.break_points(recording.spark, response), "server")
        found = partial(anomalies.anomalies, servers, channel_loads)
        self._job("anomalies", found, F.desc(F.abs("score")), F.desc("at"))
        self._job("gaps", lambda: recording.table("gaps"), F.desc("at"))

    def _job(self, name: str, job: Callable[[], DataFrame], *order: Any) -> DataFrame:
        """Run a job, write its table and return it; draw its first rows if there is an order."""
        started = time.monotonic()
        folder = str(self._out / name)
        rows = job()
        rows.write.parquet(folder)
        written = self._recording.spark.read.schema(rows.schema).parquet(folder)
        count = self._drawn.counts[name] = written.count()
        _say(f"{name:14}{count:>10} rows, {time.monotonic() - started:.1f} s")
        if order:
            self._draw(name, written.orderBy(*order).limit(ROWS_DRAWN_MAX))
        elif name == "popularity":
            self._draw(name, written)
        return written

    def _draw(self, name: str, rows: DataFrame) -> None:
        self._drawn.rows[name] = [_utc(row.asDict()) for row in rows.collect()]

    def _recommended(self, settings: Mapping[str, float]) -> str:
        loads = self._drawn["load"]
        capacities = {row["server"]: float(row["outgoing_bytes_per_s_max"] or 1) for row in self._drawn["servers"]}
        rises = sorted(row["ratio_max"] - row["ratio"] for row in loads if row["ratio"] is not None)
        rise = rises[len(rises) * 95 // 100] if rises else None
        return calibration.recommended(self._drawn["break_points"], capacities, self._urls, rise, settings)


def _coarser(rows: DataFrame, step: int, *keys: str) -> DataFrame:
    """Return load or balance with few enough slots to be drawn."""
    slot = F.timestamp_seconds(F.floor(F.col("slot").cast("long") / step) * step)
    largest = [name for name in ("ratio_max", "ratio_mean", "imbalance") if name in rows.columns]
    mean = [F.avg("ratio").alias("ratio")] if "ratio" in rows.columns else []
    grouped = rows.groupBy(*keys, slot.alias("slot")).agg(*(F.max(name).alias(name) for name in largest), *mean)
    return grouped.orderBy("slot")


def _utc(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose times are in UTC: Spark gives those of this machine's zone."""
    return {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()}


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None


def _urls(servers: Any) -> dict[str, str]:
    """Return the setting ``servers``: URLs by id."""
    known: dict[Any, Any] = {**servers} if isinstance(servers, dict) else {}
    return {id_: url for id_, url in known.items() if isinstance(id_, str) and isinstance(url, str)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alone, as ``spark-submit`` does. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="dynamoth report", epilog=EXIT_CODES, allow_abbrev=False)
    configure(parser)
    try:
        return run(parser.parse_args(argv))
    except DynamothError as error:
        sys.stderr.write(f"dynamoth: {error}\n")
        return EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
