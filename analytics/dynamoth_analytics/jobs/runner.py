"""Runs jobs: writes the table of each, and collects the few of its rows that the page draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from dynamoth.settings.sections import MigrationSettings
from dynamoth_analytics.jobs import brokers, channels, load
from dynamoth_analytics.reading import Recording
from dynamoth_analytics.text import TimeFormat, time_of_day

Row = Mapping[str, Any]

ROWS_DRAWN_MAX = 50
SLOTS_DRAWN_MAX = 200
SERVERS_DRAWN_MAX = 16

COLLECTED_MAX = SERVERS_DRAWN_MAX * (SLOTS_DRAWN_MAX + 1)
"""Most rows of one job that the driver collects."""


@dataclass
class Drawn:
    """The rows that the page draws, by the name of their job; each job's are bounded."""

    rows: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    #: How many rows each job has altogether.
    counts: dict[str, int] = field(default_factory=dict[str, int])
    #: Columns that the recording lacks.
    missing: Mapping[str, Sequence[str]] = field(default_factory=dict[str, list[str]])
    #: The settings in force, and how they are known.
    settings: Mapping[str, float] = field(default_factory=dict[str, float])
    settings_recorded: bool = False
    #: A broker above this load ratio is overloaded, by the settings of the coordinator.
    broker_ratio_high: float = MigrationSettings.ratio_high
    #: Length of a slot in seconds, and of one in charts.
    slot_s: int = 1
    drawn_slot_s: int = 1
    #: How times are written.
    when: TimeFormat = time_of_day
    #: How far the clocks of recorders are apart; 0: they agree.
    clocks_differ_s: float = 0.0
    #: Files that were there at the begin and not at the end, as recorders merge and delete files.
    files_gone: int = 0

    def __getitem__(self, job: str) -> list[Row]:
        """Return the rows of a job."""
        return self.rows.get(job, [])


class Jobs:
    """The jobs of one report. Each one's table is the folder ``out/<job>``."""

    def __init__(self, out: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._out = out
        self._say = say
        self.drawn = Drawn()

    def run(
        self, name: str, job: Callable[[], DataFrame], *order: Column | str, rows_max: int = ROWS_DRAWN_MAX
    ) -> DataFrame:
        """Run a job, write its table and return it; draw its first rows if there is an order."""
        started = time.monotonic()
        folder = str(self._out / name)
        rows = job()
        counted = Observation()
        rows.observe(counted, F.count(F.lit(1)).alias("rows")).write.parquet(folder)
        count = self.drawn.counts[name] = counted.get["rows"]
        written = rows.sparkSession.read.schema(rows.schema).parquet(folder)
        self._say(f"{name:16}{count:>10} rows, {time.monotonic() - started:.1f} s")
        if order:
            self.draw(name, written.orderBy(*order), rows_max)
        return written

    def draw(self, name: str, rows: DataFrame, rows_max: int = COLLECTED_MAX) -> None:
        """Collect rows for the page: no more than ``rows_max`` of them."""
        self.drawn.rows[name] = [_utc(row.asDict()) for row in rows.limit(rows_max).collect()]


def load_jobs(
    jobs: Jobs, servers: DataFrame, slots: DataFrame, *, slot_s: int, drawn_slot_s: int, high: float
) -> DataFrame:
    """Run the jobs about servers, and return their loads (:func:`load.load`).

    Args:
        jobs: runs them.
        servers: the table.
        slots: those of :func:`channels.channel_slots`.
        slot_s: length of a slot in seconds.
        drawn_slot_s: length of a slot in charts: a multiple.
        high: a server above this mean load ratio is overloaded.

    """
    loads = jobs.run("load", lambda: load.load(servers, slot_s, high))
    busy = load.by_server(loads).orderBy(F.desc("ratio_max")).limit(SERVERS_DRAWN_MAX).select("server")
    jobs.draw("load", _coarser(loads.join(F.broadcast(busy), "server"), drawn_slot_s, "server"))
    jobs.draw("balance", _coarser(jobs.run("balance", lambda: load.balance(loads)), drawn_slot_s))
    jobs.run("servers", lambda: load.by_server(loads), F.desc("ratio_max"), rows_max=COLLECTED_MAX)
    jobs.run("overloads", lambda: load.overloads(loads, slots, slot_s), F.desc("minutes"))
    return loads


def channel_jobs(jobs: Jobs, slots: DataFrame, spans: DataFrame, slot_s: int) -> DataFrame:
    """Run the jobs about channels, and return their loads (:func:`channels.channel_loads`)."""
    loads = jobs.run("channel_loads", lambda: channels.channel_loads(slots, spans, slot_s))
    summary = jobs.run("channels", lambda: channels.by_channel(loads, slots), F.desc("bytes_out"))
    jobs.run("popularity", lambda: channels.popularity(summary, slots), "channels")
    return loads


def broker_jobs(jobs: Jobs, recording: Recording, settings: MigrationSettings, slot_s: int, drawn_slot_s: int) -> None:
    """Run the jobs about edge brokers, if the recording has any.

    Args:
        jobs: runs them.
        recording: the recording.
        settings: those of the coordinator.
        slot_s: length of a slot in seconds.
        drawn_slot_s: length of a slot in charts: a multiple.

    """
    reports = recording.table("brokers")
    if reports.isEmpty():
        return
    interests = recording.table("broker_interests")
    weight, high = settings.connection_bytes_per_s, settings.ratio_high
    loads = jobs.run("broker_load", lambda: brokers.broker_load(reports, interests, slot_s, weight))
    summary = jobs.run(
        "brokers", lambda: brokers.by_broker(loads, high), F.desc("ratio_max"), rows_max=SERVERS_DRAWN_MAX
    )
    busy = summary.orderBy(F.desc("ratio_max")).limit(SERVERS_DRAWN_MAX).select("broker")
    jobs.draw("broker_load", _coarser(loads.join(F.broadcast(busy), "broker"), drawn_slot_s, "broker"))
    balance = jobs.run("broker_balance", lambda: brokers.broker_balance(loads, interests, slot_s))
    jobs.draw("broker_balance", _coarser(balance, drawn_slot_s))
    jobs.draw("broker_sums", brokers.balance_sums(balance))
    jobs.run("broker_silences", lambda: brokers.broker_silences(reports), F.desc("seconds"))
    rows = recording.table("broker_decisions")
    decided = jobs.run("broker_decisions", lambda: brokers.broker_decisions(rows), F.desc("at"))
    jobs.draw("broker_decision_sums", brokers.decision_sums(decided))
    jobs.run("shuffles", lambda: brokers.shuffles(decided), F.desc("at"))
    effects = jobs.run("broker_effects", lambda: brokers.broker_effects(rows))
    moved = jobs.run(
        "migrations",
        lambda: brokers.migrations(recording.table("broker_moves"), effects),
        F.desc("load_bytes_per_s"),
        F.desc("at"),
    )
    jobs.run("migration_ends", lambda: brokers.migration_ends(moved), F.desc("moves"))


def _coarser(rows: DataFrame, step: int, *keys: str) -> DataFrame:
    """Return load or balance with few enough slots to be drawn."""
    slot = F.timestamp_seconds(F.floor(F.col("slot").cast("long") / step) * step)
    largest = [name for name in ("ratio_max", "ratio_mean", "imbalance") if name in rows.columns]
    mean = [F.avg(name).alias(name) for name in ("ratio", "cov") if name in rows.columns]
    grouped = rows.groupBy(*keys, slot.alias("slot")).agg(*(F.max(name).alias(name) for name in largest), *mean)
    return grouped.orderBy("slot")


def _utc(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose times are in UTC: Spark gives those of this machine's zone."""
    return {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()}
