"""Cuts the reports of brokers into windows that fit into one task each, and unpacks them in the tasks.

As ``replay.windows`` does with those of servers: Spark groups the rows of a window, and packs them as Arrow streams.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas and pyarrow come without types; mypy checks the rest.

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dynamoth.edge.control import BrokerReport, InterestColumns, MoveEnd
from dynamoth.recording import BrokerDecisionState
from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.reading import Recording
from dynamoth_analytics.replay.brokers.replay import MOVE_S, BrokerWindow, RecordedMigration, RecordedReport
from dynamoth_analytics.replay.windows import stream

PREROLL_S = 120.0
"""A window comes with the reports of this time before it: two half-lives of the average that moves go by."""

INTERESTS_S = 10
"""A replay has the interests of one report of a broker per this time: rates are averages with such a half-life."""

_KEY = ("broker", "incarnation", "number")
_REPORT = (
    *_KEY,
    *("report_s", "users", "capacity_bytes_per_s", "load_bytes_per_s", "inbound_bytes_per_s", "other_ratio_max"),
    *("is_admitting", "is_draining", "latitude", "longitude", "user_loads"),
)
_INTEREST = ("interest", "rate", "users")
_DECISION = ("coordinator", "term", "decision", "session", "from_broker", "to_broker")
_PAUSES = (BrokerDecisionState.PAUSED.value, BrokerDecisionState.RESUMED.value)


@dataclass(frozen=True, slots=True)
class BrokerSpan:
    """What all windows of a recording have in common. Times in seconds of the Unix clock."""

    begin: float
    end: float
    window_s: float
    #: How long moves of users took.
    move_s: float = MOVE_S

    @property
    def windows(self) -> int:
        """How many windows there are, those without reports included."""
        return math.floor((self.end - self.begin) / self.window_s) + 1

    def bounds(self, window: int) -> tuple[float, float]:
        """Return when a window begins and ends."""
        return self.begin + window * self.window_s, self.begin + (window + 1) * self.window_s


def _seconds(name: str = "at") -> Column:
    return F.col(name).cast("double")


def _window_of(at: Column, span: BrokerSpan) -> Column:
    return F.floor((at - F.lit(span.begin)) / F.lit(span.window_s))


def migrations_of(recording: Recording) -> DataFrame:
    """Return the moves that succeeded, each with the time at which the user was at the new broker."""
    planned = F.col("end").isNull()
    found = (
        recording.table("broker_moves")
        .groupBy(*_DECISION)
        .agg(
            F.min(F.when(planned, _seconds())).alias("planned_at"),
            F.max("end").alias("end"),
            F.max("seconds").alias("seconds"),
            F.first(F.when(planned, F.col("interests")), ignorenulls=True).alias("interests"),
        )
    )
    left = found.where((F.col("end") == MoveEnd.LEFT.value) & F.col("planned_at").isNotNull())
    return left.withColumn("at", F.col("planned_at") + F.coalesce("seconds", F.lit(0.0)))


def broker_span(recording: Recording, window_s: float) -> tuple[BrokerSpan, int] | None:
    """Return what all windows have in common, and about how many of them have reports; None: no broker has reported."""
    windows = F.size(F.collect_set(F.floor(_seconds() / window_s)))
    times = F.min(_seconds()).alias("begin"), F.max(_seconds()).alias("end"), windows.alias("windows")
    row = recording.table("brokers", ()).agg(*times).collect()[0]
    if row["begin"] is None:
        return None
    move_s = migrations_of(recording).agg(F.percentile_approx("seconds", 0.5)).collect()[0][0]
    return BrokerSpan(row["begin"], row["end"], window_s, MOVE_S if move_s is None else move_s), row["windows"]


def packed_broker_windows(recording: Recording, span: BrokerSpan) -> DataFrame:
    """Return one row per window: number, reports, interests, migrations and pauses."""
    reports = _reports_of(recording, span)
    first = Window.partitionBy("window", "broker", F.floor(F.col("at") / INTERESTS_S)).orderBy("at")
    # Spark takes two columns for one where both have one origin: the alias makes another of it.
    chosen = reports.withColumn("place", F.row_number().over(first)).where("place = 1")
    chosen = chosen.select(F.col("window").alias("window"), *_KEY)
    named = recording_with_preroll(recording).table("broker_interests", _INTEREST).select(*_KEY, *_INTEREST)
    interests = named.join(chosen, list(_KEY)).select("window", *_KEY, *_INTEREST)
    packed = (
        reports.groupBy("window")
        .cogroup(interests.groupBy("window"))
        .applyInArrow(_pack, "window long, reports binary, interests binary")
    )
    moved = (
        migrations_of(recording).where(F.col("at") >= span.begin).withColumn("window", _window_of(F.col("at"), span))
    )
    move = F.struct("at", "session", "from_broker", "to_broker", "interests")
    moves = moved.groupBy("window").agg(F.to_json(F.array_sort(F.collect_list(move))).alias("migrations"))
    return packed.join(moves, "window", "left").crossJoin(pauses_of(recording))


def recording_with_preroll(recording: Recording) -> Recording:
    """Return a recording that begins with the reports before the first window."""
    if recording.begin is None:
        return recording
    return recording.part(recording.begin - timedelta(seconds=PREROLL_S), recording.end)


def _reports_of(recording: Recording, span: BrokerSpan) -> DataFrame:
    """Return the reports of each window, and those of the time before it."""
    at = _seconds()
    last = F.least(_window_of(at + PREROLL_S, span), F.lit(span.windows - 1))
    windows = F.sequence(F.greatest(_window_of(at, span), F.lit(0)), F.greatest(last, F.lit(0)))
    rows = recording_with_preroll(recording).table("brokers", _REPORT).where(at >= span.begin - PREROLL_S)
    return rows.select(F.explode(windows).alias("window"), at.alias("at"), *_REPORT)


def pauses_of(recording: Recording) -> DataFrame:
    """Return when the coordinator began to decide nothing, and when it decided again, as JSON.

    Before the first settings of a coordinator, none was there. Without any, as of a recording of brokers alone, the
    replay shows what one would have done.
    """
    rows = recording.until_end("broker_decisions").where(F.col("state").isin(*_PAUSES)).withColumn("at", _seconds())
    paused, resumed = map(F.lit, _PAUSES)
    begin = recording.until_end("coordinator_settings").agg(F.min(_seconds()).alias("at")).where("at is not null")
    absent = begin.select(F.lit(0.0).alias("at"), paused.alias("state"))
    present = begin.select("at", resumed.alias("state"))
    every = rows.select("at", "state").unionByName(absent).unionByName(present)
    return every.agg(F.to_json(F.array_sort(F.collect_list(F.struct("at", "state")))).alias("pauses"))


def _pack(key: tuple[Any, ...], reports: pa.Table, interests: pa.Table) -> pa.Table:
    """Pack the rows of one window. Runs in a task."""
    if not reports.num_rows:
        nothing = pa.array([], pa.binary())
        return pa.table({"window": pa.array([], pa.int64()), "reports": nothing, "interests": nothing})
    order = [(name, "ascending") for name in ("at", *_KEY)]
    rows = interests.sort_by([(name, "ascending") for name in (*_KEY, "interest")])
    return pa.table(
        {
            "window": pa.array([key[0].as_py()], pa.int64()),
            "reports": pa.array([stream(reports.drop_columns(["window"]).sort_by(order))], pa.binary()),
            "interests": pa.array([stream(rows.drop_columns(["window"]))], pa.binary()),
        }
    )


# In the tasks.


def unpacked_brokers(
    window: int, reports: bytes, interests: bytes, migrations: str | None, pauses: str | None, span: BrokerSpan
) -> BrokerWindow:
    """Return a window that ``packed_broker_windows`` has packed. Raises BadRecording."""
    columns = _columns(pa.ipc.open_stream(interests).read_all())
    rows = pa.ipc.open_stream(reports).read_all().to_pylist()
    begin, end = span.bounds(window)
    return BrokerWindow(
        begin,
        end,
        [RecordedReport(row["at"], _report(row, columns)) for row in rows],
        [_migration(row) for row in json.loads(migrations or "[]")],
        [(row["at"], row["state"] == BrokerDecisionState.PAUSED) for row in json.loads(pauses or "[]")],
        span.move_s,
    )


def _columns(table: pa.Table) -> dict[tuple[str, int, int], InterestColumns]:
    """Return the interests of each report; the rows are in the order of reports."""
    keys = list(zip(*(table.column(name).to_pylist() for name in _KEY), strict=True))
    ids, rates, users = (table.column(name).to_pylist() for name in _INTEREST)
    found: dict[tuple[str, int, int], InterestColumns] = {}
    start = 0
    for stop in range(1, len(keys) + 1):
        if stop == len(keys) or keys[stop] != keys[start]:
            numbers = tuple(rate or 0.0 for rate in rates[start:stop]), tuple(count or 0 for count in users[start:stop])
            found[keys[start]] = InterestColumns(tuple(ids[start:stop]), *numbers)
            start = stop
    return found


def _report(row: Mapping[str, Any], columns: Mapping[tuple[str, int, int], InterestColumns]) -> BrokerReport:
    try:
        user_loads = tuple(map(int, (row["user_loads"] or "").split()))
    except ValueError as error:
        shown = f"{row['user_loads']!r:.80}"
        raise BadRecording(f"the table brokers has user_loads {shown}: move its file elsewhere") from error
    place = row["latitude"], row["longitude"]
    return BrokerReport(
        broker=row["broker"],
        capacity_bytes_per_s=row["capacity_bytes_per_s"] or 1.0,
        load_bytes_per_s=row["load_bytes_per_s"] or 0.0,
        inbound_bytes_per_s=row["inbound_bytes_per_s"] or 0.0,
        users=row["users"] or 0,
        other_ratio_max=row["other_ratio_max"] or 0.0,
        is_admitting=row["is_admitting"] is not False,
        is_draining=row["is_draining"] is True,
        location=None if None in place else place,
        interests=columns.get((row["broker"], row["incarnation"], row["number"]), InterestColumns()),
        user_loads=user_loads,
        report_s=row["report_s"] or 0.0,
    )


def _migration(row: Mapping[str, Any]) -> RecordedMigration:
    interests: Iterable[str] = row.get("interests") or ()
    return RecordedMigration(row["at"], row["session"], row["from_broker"], row["to_broker"], tuple(interests))
