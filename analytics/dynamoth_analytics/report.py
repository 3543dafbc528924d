"""``dynamoth report``: what happened in a recorded cluster, as Parquet tables and one page of HTML.

Each job is a function of data frames in a module of its own. This module reads the recording, runs the jobs one after
the other (``jobs``) and draws the page from a bounded part of their tables. Runs as ``spark-submit`` or
``python -m dynamoth_analytics.report``, too.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError
from dynamoth_analytics.files import without_merging
from dynamoth_analytics.follow import Follower, follow_folder
from dynamoth_analytics.jobs import anomalies, calibration, channels, gaps, plans, publishers, replication
from dynamoth_analytics.jobs.runner import COLLECTED_MAX, SLOTS_DRAWN_MAX, Jobs, broker_jobs, channel_jobs, load_jobs
from dynamoth_analytics.output import deleted_after_failure, end_at_signals, new_folder, run_alone, say
from dynamoth_analytics.page.drawing import RESPONSE_SERVERS_MAX, draw
from dynamoth_analytics.page.findings import findings
from dynamoth_analytics.reading import Recording, add_recording, asked_for
from dynamoth_analytics.recommendation import capacities, recommended
from dynamoth_analytics.recorded_settings import migration_settings, present_settings
from dynamoth_analytics.session import add_session, check_session, open_session
from dynamoth_analytics.text import time_format
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_INTERRUPTED

PAGE = "report.html"
SETTINGS_FILE = "recommended.toml"

SLOTS = ((15 * 60, 1), (3 * 3600, 5), (24 * 3600, 30), (math.inf, 60))
"""Length of slots in seconds, for recordings up to a length: a short one would have few slots of a minute."""

MAIN_FINDINGS = 3

USUAL_PERCENTILE = 0.95
"""The percentile of a slot's rise, its largest load ratio minus the mean, that counts as the usual rise."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_recording(parser)
    parser.add_argument("--out", metavar="DIR", help="a new or empty folder; default report-<time>")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="keep load, channels and anomalies of the last hour current until SIGINT or SIGTERM;"
        " with the --out of an earlier run it goes on where that ended",
    )
    add_session(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write a report. Returns the exit code."""
    where, begin, end = asked_for(arguments)
    if arguments.follow:
        return _follow(arguments, where, begin)
    check_session(arguments)
    out = new_folder(arguments.out, "report")
    end_at_signals(EXIT_INTERRUPTED, "interrupted")
    started = time.monotonic()
    with deleted_after_failure(out), without_merging(where), open_session(arguments, "dynamoth report") as spark:
        say(f"{'spark':14}{spark.version}, {time.monotonic() - started:.1f} s")
        report = Report(Recording(spark, where, begin, end), out)
        sentences = report.write()
    say("")
    for sentence in sentences[:MAIN_FINDINGS]:
        say(f"* {sentence}")
    say(f"\n{out / PAGE}")
    return EXIT_DONE


def _follow(arguments: argparse.Namespace, where: str, begin: datetime | None) -> int:
    """Keep a report current until SIGINT or SIGTERM. Returns the exit code."""
    if arguments.remote or arguments.end:
        wrong = "--remote" if arguments.remote else "--to"
        raise ConfigError(f"--follow does not go together with {wrong}: leave one of them out")
    check_session(arguments)
    out = follow_folder(arguments.out, where)
    end_at_signals(EXIT_DONE, "stopped")
    with open_session(arguments, "dynamoth report --follow") as spark:
        say(f"{out / PAGE}")
        follower = Follower(spark, where, out, say)
        follower.wait(follower.start(begin))
    return EXIT_DONE


@dataclass(frozen=True, slots=True)
class Extent:
    """The time that the reports of a recording are about, and what is usual in it.

    ``covered_s`` is the time with reports, to a minute: a report with a wrong time may be years away. ``interval_s`` is
    that between the reports of the slowest agent. ``capacity`` is that of the largest server.
    """

    begin: datetime
    end: datetime
    covered_s: float
    interval_s: float
    capacity: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return max(1.0, (self.end - self.begin).total_seconds())

    @property
    def slot_s(self) -> int:
        """How long the slots of its load are."""
        by_length = next(slot_s for limit, slot_s in SLOTS if self.covered_s <= limit)
        # A shorter slot would lack reports of some servers.
        return max(by_length, min(math.ceil(self.interval_s), SLOTS[-1][1]))


def extent_of(servers: DataFrame) -> Extent | None:
    """Return the extent of a table of servers; None where it has no report."""
    minute = F.floor(F.col("at").cast("double") / 60)
    by_server = servers.groupBy("server").agg(
        F.min(F.col("at").cast("double") - F.coalesce("interval_s", F.lit(0.0))).alias("begin"),
        F.max("at").cast("double").alias("end"),
        F.count_distinct(minute).alias("minutes"),
        F.percentile_approx("interval_s", 0.5).alias("interval_s"),
        F.max("outgoing_bytes_per_s_max").alias("capacity"),
    )
    largest = (F.max(name).alias(name) for name in ("end", "minutes", "interval_s", "capacity"))
    row = by_server.agg(F.min("begin").alias("begin"), *largest).collect()[0]
    if row["begin"] is None:
        return None
    begin, end = (datetime.fromtimestamp(row[name], UTC) for name in ("begin", "end"))
    covered_s = min((end - begin).total_seconds(), row["minutes"] * 60.0)
    return Extent(begin, end, covered_s, row["interval_s"] or 1.0, float(row["capacity"] or 1))


class Report:
    """The report of a recording, written to the folder ``out``."""

    def __init__(self, recording: Recording, out: Path) -> None:
        self._recording = recording
        self._out = out
        self._jobs = Jobs(out, say)

    def write(self) -> list[str]:
        """Run all jobs, write tables and page, and return the findings. Raises DynamothError."""
        servers = self._recording.table("servers").cache()
        extent = self._extent(servers)
        settings = present_settings(self._recording)
        self._run(servers, extent, settings.numbers)
        drawn = self._jobs.drawn
        drawn.settings, drawn.settings_recorded = settings.numbers, settings.recorded
        drawn.missing, drawn.files_gone = self._recording.missing, self._recording.files_gone()
        drawn.slot_s, drawn.when = extent.slot_s, time_format(extent.begin, extent.end)
        drawn.clocks_differ_s = self._recording.clocks_differ_s
        sentences = findings(drawn)
        toml = recommended(drawn, settings)
        (self._out / SETTINGS_FILE).write_text(toml, encoding="utf-8")
        (self._out / PAGE).write_text(draw(drawn, sentences, extent.begin, extent.end, toml), encoding="utf-8")
        return sentences

    def _extent(self, servers: DataFrame) -> Extent:
        if (extent := extent_of(servers)) is None:
            raise self._recording.without_reports()
        return extent

    def _run(self, servers: DataFrame, extent: Extent, settings: Mapping[str, float]) -> None:
        recording, jobs, slot_s = self._recording, self._jobs, extent.slot_s
        rows = recording.table("channels", (*channels.COLUMNS, "publisher_ids"))
        slots = jobs.run("channel_slots", lambda: channels.channel_slots(rows, slot_s))
        plan_rows = recording.table("plans")
        step = max(1, math.ceil(extent.covered_s / slot_s / SLOTS_DRAWN_MAX)) * slot_s
        server_loads = load_jobs(
            jobs, servers, slots, slot_s=slot_s, drawn_slot_s=step, high=settings["load_ratio_high"]
        )
        rise = F.percentile_approx(F.col("ratio_max") - F.col("ratio"), USUAL_PERCENTILE)
        jobs.draw("rise", server_loads.agg(rise.alias("rise")))
        loads = channel_jobs(jobs, slots, channels.replicated_spans(recording.until_end("plans")), slot_s)
        modes = jobs.run(
            "replication", lambda: replication.replication(loads, settings, extent.capacity), F.desc("seconds")
        )
        jobs.draw("not_as_wanted", modes.where("mode != wanted").orderBy(F.desc("seconds")), 1)
        changes = jobs.run("changes", lambda: plans.changes(plan_rows), F.desc("at"))
        effects = jobs.run("effects", lambda: plans.effects(recording.table("decisions")), F.desc("at"))
        jobs.draw("effects_error", effects.agg(F.percentile_approx(F.abs("error"), 0.5).alias("error")))
        jobs.run("without_gain", lambda: plans.without_gain(effects), F.desc("at"))
        jobs.run("ping_pong", lambda: plans.ping_pong(changes), F.desc("at"))
        latency = recording.table("latency")
        jobs.run("latency_around", lambda: plans.latency_around(changes, latency), F.desc("begin"))
        response = jobs.run("response", lambda: calibration.response(servers, latency))
        breaks = jobs.run(
            "break_points",
            lambda: calibration.break_points(recording.spark, response),
            "server",
            rows_max=COLLECTED_MAX,
        )
        busiest = breaks.orderBy(F.desc("ratio_max"), "server").limit(RESPONSE_SERVERS_MAX).select("server")
        jobs.draw("response", response.join(F.broadcast(busiest), "server").orderBy("server", "ratio"))
        capacity = max(capacities(jobs.drawn, at_break=True).values(), default=extent.capacity)
        high = settings["load_ratio_high"]
        jobs.run("outgrown", lambda: replication.outgrown(loads, capacity, high), F.desc("ratio"))
        named = jobs.run("publisher_slots", lambda: publishers.publisher_slots(rows, slots, server_loads, slot_s))
        found = partial(anomalies.anomalies, servers, loads, named)
        departed = jobs.run("anomalies", found, F.desc(F.abs("score")), F.desc("at"))
        jobs.draw("incomplete", anomalies.incomplete(departed))
        migration = migration_settings(recording)
        jobs.drawn.broker_ratio_high, jobs.drawn.drawn_slot_s = migration.ratio_high, step
        broker_jobs(jobs, recording, migration, slot_s, step)
        jobs.run("gaps", lambda: gaps.gaps(recording.table("gaps"), server_loads, slot_s), F.desc("at"))


if __name__ == "__main__":
    sys.exit(run_alone("dynamoth report", configure, run))
