"""Recorded loads that a test describes, and recordings of them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas and pyarrow come without types; mypy checks the rest.

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from dynamoth.machine.events import CommandPart
from dynamoth.names import RECORD_CHANNEL
from dynamoth.plan.plan import Plan
from dynamoth.plan.ring import Ring
from dynamoth.protocol.records import unpack_rows
from dynamoth.protocol.reports import ChannelColumns, Report, unpack_report
from dynamoth.recording import TABLES, Type, channel_text
from dynamoth_analytics.replay.instant_cluster import InstantCluster
from dynamoth_analytics.replay.recorded import Moved, RecordedReport, RecordedWindow
from dynamoth_analytics.replay.replay import replay
from dynamoth_analytics.replay.windows import plan_step
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions

CAPACITY = 1_000_000
SERVERS = ("s1", "s2", "s3")
BEGIN = 1_700_000_000.0
MESSAGE_BYTES = 100
RING = Ring(SERVERS)

Rates = Callable[[int], Mapping[bytes, float]]
Tables = Mapping[str, list[dict[str, Any]]]


def at_home(server: str, count: int, prefix: bytes = b"c") -> list[bytes]:
    """Return channels whose home is a server."""
    names = (b"%s-%d" % (prefix, number) for number in range(10_000))
    return [name for name in names if RING.home(name) == server][:count]


def load(seconds: int, rates: Rates, subscribers: int = 10) -> RecordedWindow:
    """Return a recording in which every channel stays at home. ``rates``: bytes/s of each, by second."""
    reports: list[RecordedReport] = []
    for second in range(seconds):
        now = rates(second)
        for index, server in enumerate(SERVERS):
            rows = sorted(((rate, name) for name, rate in now.items() if RING.home(name) == server), reverse=True)
            reports.append(
                RecordedReport(BEGIN + second + index / len(SERVERS), _report(server, second, rows, subscribers))
            )
    return RecordedWindow(BEGIN, BEGIN + seconds, SERVERS, reports)


def _report(server: str, second: int, rows: Sequence[tuple[float, bytes]], subscribers: int) -> Report:
    publications = tuple(round(rate / MESSAGE_BYTES / subscribers) for rate, _ in rows)
    many, zeros, nobody = (subscribers,) * len(rows), (0,) * len(rows), (b"",) * len(rows)
    sent = tuple(round(rate) for rate, _ in rows)
    names = tuple(name for _, name in rows)
    return Report(
        server=server,
        incarnation=1,
        sequence=second + 1,
        interval_s=1.0,
        plan_version=None,
        outgoing_bytes_per_s_max=CAPACITY,
        outgoing_bytes_per_s=50_000.0 + sum(sent),
        columns=ChannelColumns(names, publications, many, many, zeros, zeros, sent, nobody, nobody),
    )


def rising(channels: Mapping[str, int], rate: float, hot: float, begin: int, end: int = 10_000) -> Rates:
    """Return loads of ``rate`` each, and ``hot`` at the first server between two seconds."""
    names = {server: at_home(server, count) for server, count in channels.items()}
    first = next(iter(channels))

    def rates(second: int) -> dict[bytes, float]:
        return {
            name: (hot if server == first and begin <= second < end else rate) + 100 * index
            for server, some in names.items()
            for index, name in enumerate(some)
        }

    return rates


# What a recorder hears of a replay.


class RecordedCluster(InstantCluster):
    """The cluster of a replay, with a recorder at its first server that hears everything at once."""

    def __init__(
        self, machine: BalancerMachine, servers: Sequence[str], plan: Plan | None, begin: float, settle_s: float
    ) -> None:
        self.reports: list[RecordedReport] = []
        self.tables: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        super().__init__(machine, servers, plan, begin, settle_s)

    def report(self, server: str, incarnation: int, packed: bytes) -> None:
        self.reports.append(RecordedReport(self.now, unpack_report(packed)))
        super().report(server, incarnation, packed)

    def _send(self, server: str, command: Sequence[CommandPart], tag: Any) -> None:
        if command[:2] == (b"PUBLISH", RECORD_CHANNEL) and server == SERVERS[0]:
            assert isinstance(command[2], bytes), "rows are packed"
            said = unpack_rows(command[2])
            key = {"at": self.now, "balancer": said.sender, "number": said.number}
            self.tables[said.table] += [
                {**key, "line": line, **dict(zip(said.columns, row, strict=True))} for line, row in enumerate(said.rows)
            ]
        super()._send(server, command, tag)


def recorded_under(
    window: RecordedWindow, options: BalancerOptions
) -> tuple[RecordedWindow, tuple[Moved, ...], Tables]:
    """Return what a cluster with these settings would have done under a load, as a recorder hears it.

    That is the window, the moves, and by table the rows of the balancer from the first report on.
    """
    clusters: list[RecordedCluster] = []

    def cluster(*arguments: Any) -> RecordedCluster:
        clusters.append(RecordedCluster(*arguments))
        return clusters[0]

    with patch("dynamoth_analytics.replay.replay.InstantCluster", cluster):
        outcome = replay(window, options, math.inf)
    assert outcome is not None, "it has reports"
    [heard] = clusters
    since = window.first - 0.1
    tables = {name: [row for row in rows if row["at"] >= since] for name, rows in heard.tables.items()}
    steps = [plan_step(row) for row in tables.get("plans", ())]
    return replace(window, reports=heard.reports, steps=steps), outcome.moves, tables


# As a recorder writes it.

_ARROW = {
    Type.TIME: pa.timestamp("us", "UTC"),
    Type.TEXT: pa.string(),
    Type.WHOLE: pa.int64(),
    Type.NUMBER: pa.float64(),
    Type.TRUTH: pa.bool_(),
    Type.BYTES: pa.binary(),
    Type.TEXTS: pa.list_(pa.string()),
}


def write(folder: Path, window: RecordedWindow, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write a recording: a load, and by table the rows that a balancer sent to recorders."""
    columns: list[dict[str, Any]] = []
    servers: list[dict[str, Any]] = []
    for at, report in window.reports:
        key = {"at": at, "server": report.server, "incarnation": 1, "sequence": report.sequence, "interval_s": 1.0}
        figures = {name: getattr(report, name) for name in ("outgoing_bytes_per_s", "outgoing_bytes_per_s_max")}
        servers.append({**key, **figures, "observing": True})
        columns += [
            {**key, **row._asdict(), "channel": channel_text(row.channel), "channels": 1}
            for row in report.columns.rows()
        ]
    for name, rows in {**tables, "servers": servers, "channels": columns}.items():
        if rows:
            dated = [{**row, "recorder": "r1", "at": datetime.fromtimestamp(row["at"], UTC)} for row in rows]
            write_rows(folder, name, dated)


def write_rows(folder: Path, table: str, rows: Sequence[Mapping[str, Any]], files: int = 1) -> None:
    """Write rows with so many files per hour. Columns that are missing are null."""
    schema = pa.schema([(column.name, _ARROW[column.type]) for column in TABLES[table].columns])
    hours: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        hours[f"date={row['at']:%F}/hour={row['at']:%H}"].append(row)
    for hour, some in hours.items():
        place = folder / table / hour
        place.mkdir(parents=True)
        for number in range(files):
            pq.write_table(pa.Table.from_pylist(some[number::files], schema), place / f"r1-{number}.parquet")


def read_rows(folder: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table."""
    files = sorted((folder / table).rglob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def replace_column(file: Path, name: str, value: object) -> None:
    """Give all rows of a file the same value in a column, maybe of another type."""
    rows = pq.read_table(file)
    values = pa.array([value] * rows.num_rows)
    pq.write_table(rows.set_column(rows.schema.get_field_index(name), name, values), file)
