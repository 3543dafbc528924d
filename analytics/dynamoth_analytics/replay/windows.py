"""Cuts a recording into windows that fit into one task each, and unpacks them in the tasks.

Spark groups the rows of a window; none of them comes to the driver. The rows are packed as Arrow streams, so that every
task that replays the window gets one small row.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas and pyarrow come without types; mypy checks the rest.

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dynamoth.errors import PlanError
from dynamoth.plan.plan import Assignment
from dynamoth.protocol.reports import ChannelColumns, Report
from dynamoth.recording import DecisionKind, channel_bytes
from dynamoth_analytics.errors import BadRecording
from dynamoth_analytics.reading import Recording
from dynamoth_analytics.replay.agreement import BalancerLog, RecordedDecision, ReportKey
from dynamoth_analytics.replay.recorded import Moved, PlanStep, RecordedReport, RecordedWindow, channel_columns
from dynamoth_analytics.replay.replay import SETTLE_S
from dynamoth_balancer.admin.changes import MODES
from dynamoth_balancer.decide.cluster import Ratios

PREROLL_S = 30.0
"""A window comes with the reports of this time before it: its averages begin with them."""

WHOLE_RECORDING = -1
"""The number of the window in which recorded and replayed decisions are compared."""

WHOLE_S_MAX = 3600.0
"""Of a longer recording, that window is the end."""

MOMENT_S = 1e-6

ROW_SHOWN_MAX = 200
"""Characters of a row in a message."""

_PAUSES = (DecisionKind.PAUSED.value, DecisionKind.RESUMED.value)

_LEADS = "leads"
"""Marks when a balancer was first heard of, among the rows of pauses."""

_KEY = ("server", "incarnation", "sequence")
_REPORT = (
    *_KEY,
    "interval_s",
    "outgoing_bytes_per_s_max",
    "outgoing_bytes_per_s",
    "interruptions",
    "blind_s",
    "observing",
    "problems",
)
_LOG = (
    *("number", "line", "at", "kind", "decision", "reason", "channel", "from_mode", "from_servers", "to_mode"),
    *("to_servers", "server", "ratio_before", "ratio_predicted", "clock_s", "reports", "settled"),
)
_CHANNEL = ("channel", "publications", "publishers", "subscribers", "bytes_out")


@dataclass(frozen=True, slots=True)
class ReplaySpan:
    """What all windows of a recording have in common. Times in seconds of the Unix clock."""

    begin: float
    end: float
    window_s: float
    servers: tuple[str, ...]
    ring: tuple[str, ...] = ()
    #: How long subscribers take to follow a change.
    settle_s: float = SETTLE_S
    #: The balancer whose settings are those in force, and when it began to lead; None: not recorded.
    balancer: int | None = None
    led_since: float | None = None

    @property
    def windows(self) -> int:
        """How many windows there are, those without reports included."""
        return math.floor((self.end - self.begin) / self.window_s) + 1

    def bounds(self, window: int) -> tuple[float, float]:
        """Return when a window begins and ends."""
        if window == WHOLE_RECORDING:
            return max(self.begin, self.end - WHOLE_S_MAX), self.end + MOMENT_S
        return self.begin + window * self.window_s, self.begin + (window + 1) * self.window_s


def _seconds(name: str = "at") -> Column:
    return F.col(name).cast("double")


def _window_of(at: Column, span: ReplaySpan) -> Column:
    return F.floor((at - F.lit(span.begin)) / F.lit(span.window_s))


def with_preroll(recording: Recording) -> Recording:
    """Return a recording that begins with the reports before the first window."""
    if recording.begin is None:
        return recording
    return recording.part(recording.begin - timedelta(seconds=PREROLL_S), recording.end)


def reports_of(recording: Recording, span: ReplaySpan) -> DataFrame:
    """Return the reports of each window, and those of the time before it."""
    at = _seconds()
    windows = F.array(
        F.when(at >= span.begin, _window_of(at, span)),
        F.least(_window_of(at + PREROLL_S, span), F.lit(span.windows - 1)),
        F.when(at >= span.bounds(WHOLE_RECORDING)[0] - PREROLL_S, F.lit(WHOLE_RECORDING).cast("long")),
    )
    rows = recording.table("servers", _REPORT).where(at >= span.begin - PREROLL_S)
    return rows.select(F.explode(F.array_compact(F.array_distinct(windows))).alias("window"), at.alias("at"), *_REPORT)


def packed_windows(recording: Recording, span: ReplaySpan) -> DataFrame:
    """Return one row per window: number, reports, channels, steps of plans, pauses; ``WHOLE_RECORDING`` has the log."""
    recording = with_preroll(recording)
    reports = reports_of(recording, span)
    named = recording.table("channels", _CHANNEL).where(F.col("channel").isNotNull()).select(*_KEY, *_CHANNEL)
    # Spark takes two columns for one where both have one origin: the alias makes another of it.
    windows_of = reports.select(F.col("window").alias("window"), *_KEY)
    channels = named.join(windows_of, list(_KEY)).select("window", *_KEY, *_CHANNEL)
    packed = (
        reports.groupBy("window")
        .cogroup(channels.groupBy("window"))
        .applyInArrow(_pack, "window long, reports binary, channels binary")
    )
    steps, log = plan_steps(recording, span), _log(recording, span)
    return packed.join(steps, "window", "left").join(log, "window", "left").crossJoin(pauses_of(recording))


def plan_steps(recording: Recording, span: ReplaySpan) -> DataFrame:
    """Return the steps of plans of each window as JSON, with the latest step of each channel before its reports."""
    following = F.lead("at").over(Window.partitionBy("channel").orderBy("at", "version"))
    plans = recording.until_end("plans").withColumn("at", _seconds())
    until = F.coalesce(following, F.lit(span.end))
    plans = plans.withColumn("until", until).where(F.col("until") >= span.begin - PREROLL_S)
    first = F.greatest(_window_of(F.col("at"), span), F.lit(0))
    last = F.least(_window_of(F.col("until") + PREROLL_S, span), F.lit(span.windows - 1))
    windows = F.when(last >= first, F.sequence(first, last)).otherwise(F.array(first))
    whole = F.when(F.col("until") >= span.bounds(WHOLE_RECORDING)[0] - PREROLL_S, F.lit(WHOLE_RECORDING).cast("long"))
    rows = plans.withColumn("window", F.explode(F.array_compact(F.array_append(windows, whole))))
    step = F.struct("at", "version", "channel", "from_mode", "from_servers", "to_mode", "to_servers", "phase")
    return rows.groupBy("window").agg(F.to_json(F.array_sort(F.collect_list(step))).alias("steps"))


def _log(recording: Recording, span: ReplaySpan) -> DataFrame:
    """Return the rows of the latest balancer in the table ``decisions`` for the whole recording, as JSON."""
    rows = recording.table("decisions").where(F.col("kind") != DecisionKind.OUTCOME.value).withColumn("at", _seconds())
    begin, _ = span.bounds(WHOLE_RECORDING)
    whole = rows.where((F.col("balancer") == span.balancer) & (F.col("at") >= begin - PREROLL_S))
    text = F.to_json(F.collect_list(F.struct(*_LOG))).alias("log")
    return whole.agg(text).select(F.lit(WHOLE_RECORDING).cast("long").alias("window"), "log")


def pauses_of(recording: Recording) -> DataFrame:
    """Return the rows of ``recorded_pauses`` as JSON."""
    pauses = recording.until_end("decisions").where(F.col("kind").isin(*_PAUSES)).withColumn("at", _seconds())
    balancers = recording.until_end("settings").groupBy("balancer").agg(F.min(_seconds()).alias("at"))
    columns = ("at", "balancer", "kind")
    rows = pauses.select(*columns).unionByName(balancers.withColumn("kind", F.lit(_LEADS)).select(*columns))
    return rows.agg(F.to_json(F.array_sort(F.collect_list(F.struct(*columns)))).alias("pauses"))


def _pack(key: tuple[Any, ...], reports: pa.Table, channels: pa.Table) -> pa.Table:
    """Pack the rows of one window. Runs in a task."""
    if not reports.num_rows:
        nothing = pa.array([], pa.binary())
        return pa.table({"window": pa.array([], pa.int64()), "reports": nothing, "channels": nothing})
    order = [(name, "ascending") for name in ("at", *_KEY)]
    rows = channels.sort_by([*((name, "ascending") for name in _KEY), ("bytes_out", "descending")])
    return pa.table(
        {
            "window": pa.array([key[0].as_py()], pa.int64()),
            "reports": pa.array([stream(reports.drop_columns(["window"]).sort_by(order))], pa.binary()),
            "channels": pa.array([stream(rows.drop_columns(["window"]))], pa.binary()),
        }
    )


def stream(table: pa.Table) -> bytes:
    """Return a table as a compressed Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


# In the tasks.


def unpacked(
    window: int, reports: bytes, channels: bytes, steps: str | None, pauses: str | None, span: ReplaySpan
) -> RecordedWindow:
    """Return a window that ``packed_windows`` has packed."""
    columns = _columns(pa.ipc.open_stream(channels).read_all())
    rows = pa.ipc.open_stream(reports).read_all().to_pylist()
    begin, end = span.bounds(window)
    return RecordedWindow(
        begin,
        end,
        span.servers,
        [RecordedReport(row["at"], _report(row, columns)) for row in rows],
        [plan_step(row) for row in json.loads(steps or "[]")],
        span.ring,
        recorded_pauses(json.loads(pauses or "[]")),
    )


def recorded_pauses(rows: Iterable[Mapping[str, Any]]) -> list[tuple[float, bool]]:
    """Return when the balancer that led was paused (True), and when that ended: a new balancer is not paused.

    Args:
        rows: by time, when administrators paused or resumed a balancer, and when each balancer was first heard of.

    """
    pauses: list[tuple[float, bool]] = []
    balancer: int | None = None
    for row in rows:
        if row["kind"] != _LEADS or row["balancer"] != balancer:
            pauses.append((row["at"], row["kind"] == DecisionKind.PAUSED))
        balancer = row["balancer"]
    return pauses


def recorded_log(rows: Iterable[Mapping[str, Any]]) -> BalancerLog:
    """Read rows of the table ``decisions``, those of one balancer, with ``at`` in seconds. Raises BadRecording."""
    ordered = sorted(rows, key=lambda row: (row["number"], row["line"]))
    offset = min((row["at"] - row["clock_s"] for row in ordered if row.get("clock_s") is not None), default=0.0)
    heard: dict[ReportKey, float] = {}
    settled: list[tuple[float, bytes]] = []
    after = -math.inf  # the reports and changes of a row came after the row before it
    pauses: list[tuple[float, bool]] = []
    decisions: dict[int, RecordedDecision] = {}
    looks: dict[float, None] = {}
    for row in ordered:
        at = row["at"] if row.get("clock_s") is None else row["clock_s"] + offset
        new = {key: max(clock_s + offset, after) for key, clock_s in map(_heard, row.get("reports") or ())}
        heard |= new
        for clock_s, channel in map(_settled, row.get("settled") or ()):
            settled.append((max(clock_s + offset, after), channel))
        if row.get("clock_s") is not None:
            after = at + MOMENT_S
            looks |= {} if row["kind"] in _PAUSES else {at: None}
        if row["kind"] in _PAUSES:
            pauses.append((at, row["kind"] == DecisionKind.PAUSED))
        elif row["kind"] == DecisionKind.MOVE:
            decision = decisions.get(row["decision"]) or RecordedDecision(at, (), tuple(new))
            decisions[row["decision"]] = _with_move(decision, row)
    return BalancerLog(tuple(decisions.values()), tuple(pauses), tuple(looks), heard, tuple(settled))


def _heard(text: str) -> tuple[ReportKey, float]:
    """Read which report a balancer has heard, and when."""
    try:
        server, incarnation, sequence, clock = text.rsplit(" ", 3)
        return (server, int(incarnation), int(sequence)), float(clock)
    except ValueError as error:
        raise _not_written("decisions", text) from error


def _settled(text: str) -> tuple[float, bytes]:
    """Read when which channel has settled."""
    try:
        clock, channel = text.split(" ", 1)
        return float(clock), channel_bytes(channel)
    except ValueError as error:
        raise _not_written("decisions", text) from error


def _not_written(table: str, row: object) -> BadRecording:
    shown = f"{row}"[:ROW_SHOWN_MAX]
    return BadRecording(f"the table {table} has a row that no balancer wrote: {shown}: move its file elsewhere")


def _with_move(decision: RecordedDecision, row: Mapping[str, Any]) -> RecordedDecision:
    """Return a decision with one more row: there is one per move and server that it touches."""
    channel, others = channel_bytes(row["channel"]), [*decision.moves]
    before, after = _assignment(row, "from"), _assignment(row, "to")
    if before is None or after is None:
        raise _not_written("decisions", row)
    ratios = {row["server"]: Ratios(row.get("ratio_before") or 0.0, row.get("ratio_predicted") or 0.0)}
    if others and others[-1].channel == channel:
        ratios = {**others.pop().ratios, **ratios}
    move = Moved(decision.at, channel, before, after, row.get("reason") or "", ratios)
    return replace(decision, moves=(*others, move))


def _columns(table: pa.Table) -> dict[tuple[str, int, int], ChannelColumns]:
    """Return the channels of each report; the rows are in the order of reports."""
    keys = list(zip(*(table.column(name).to_pylist() for name in _KEY), strict=True))
    names = {text: channel_bytes(text) for text in table.column("channel").unique().to_pylist()}
    channels = [names[text] for text in table.column("channel").to_pylist()]
    numbers = [[value or 0 for value in table.column(name).to_pylist()] for name in _CHANNEL[1:]]
    found: dict[tuple[str, int, int], ChannelColumns] = {}
    start = 0
    for stop in range(1, len(keys) + 1):
        if stop == len(keys) or keys[stop] != keys[start]:
            found[keys[start]] = channel_columns(channels[start:stop], *(column[start:stop] for column in numbers))
            start = stop
    return found


def _report(row: dict[str, Any], columns: dict[tuple[str, int, int], ChannelColumns]) -> Report:
    problems = [tuple(text.split(": ", 1)) for text in row["problems"] or () if ": " in text]
    return Report(
        server=row["server"],
        incarnation=row["incarnation"],
        sequence=row["sequence"],
        interval_s=row["interval_s"] or 1.0,
        plan_version=None,  # the agents of a replay acknowledge the plans of the replay
        outgoing_bytes_per_s_max=row["outgoing_bytes_per_s_max"] or 1,
        outgoing_bytes_per_s=row["outgoing_bytes_per_s"] or 0.0,
        interruptions=row["interruptions"] or 0,
        blind_s=row["blind_s"] or 0.0,
        observing=row["observing"] is not False,
        problems=tuple((kind, text) for kind, text in problems),
        columns=columns.get((row["server"], row["incarnation"], row["sequence"]), ChannelColumns()),
    )


def plan_step(row: Mapping[str, Any]) -> PlanStep:
    """Read a row of the table ``plans``, with ``at`` in seconds. Raises BadRecording."""
    after = _assignment(row, "to")
    if after is None:
        raise _not_written("plans", row)
    before = _assignment(row, "from")
    return PlanStep(row["at"], channel_bytes(row["channel"]), before, after, row.get("phase") == "settled")


def _assignment(row: Mapping[str, Any], which: str) -> Assignment | None:
    mode: str | None = row.get(f"{which}_mode")
    servers: Sequence[str] = row.get(f"{which}_servers") or ()
    if mode is None or mode not in MODES or not servers:
        return None
    try:
        return Assignment(MODES[mode], tuple(servers))
    except PlanError:
        return None
