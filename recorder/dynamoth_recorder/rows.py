"""Makes the rows of a recording from the messages of agents and balancer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dynamoth.protocol.records import RecordedRows
from dynamoth.protocol.reports import Report
from dynamoth.recording import CHANNELS, GAPS, SERVERS, channel_text
from dynamoth_recorder.events import Rows

_OF_REPORT = [
    name
    for name in (column.name for column in SERVERS.columns)
    if name not in ("at", "recorder", "problems", "messages_untracked", "publishers_uncounted")
]
"""Columns that are attributes of a report by the same name."""

_OF_COLUMNS = (
    *("publications", "publishers", "subscribers", "messages_sent", "bytes_in", "bytes_out"),
    *("publisher_ids", "subscriber_ids"),
)
_OF_SUMS = ("channels", "publications", "subscribers", "messages_sent", "bytes_in", "bytes_out")


def rows_of_report(report: Report) -> list[Rows]:
    """Return the row of the server, and those of its channels, if any."""
    r = report
    server = {name: getattr(r, name) for name in _OF_REPORT} | {
        "problems": [f"{kind}: {text}" for kind, text in r.problems],
        "messages_untracked": r.rest.messages_untracked,
        "publishers_uncounted": r.rest.publishers_uncounted,
    }
    head = {name: server[name] for name in ("server", "incarnation", "sequence", "interval_s")}
    rows = [Rows(SERVERS.name, 1, server)]
    if count := len(r.columns):
        columns = {name: getattr(r.columns, name) for name in _OF_COLUMNS}
        columns["channel"] = _texts(r.columns.channels)
        rows.append(Rows(CHANNELS.name, count, {**head, "channels": 1}, columns))
    if r.rest.channels:
        rows.append(Rows(CHANNELS.name, 1, {**head, **{name: getattr(r.rest, name) for name in _OF_SUMS}}))
    return rows


def _texts(channels: Sequence[bytes]) -> list[str]:
    """Return ``channel_text`` of each, in a loop that runs in C where there is nothing to escape."""
    with suppress(UnicodeDecodeError):
        if b"\\" not in b"".join(channels):
            return [*map(bytes.decode, channels)]
    return [*map(channel_text, channels)]


def rows_of_balancer(message: RecordedRows) -> list[Rows]:
    """Return the rows of a message of the balancer, numbered by ``line``."""
    if not message.rows:
        return []
    columns: dict[str, Any] = dict(zip(message.columns, zip(*message.rows, strict=True), strict=True))
    columns["line"] = range(len(message.rows))
    same = {"balancer": message.balancer, "number": message.number}
    return [Rows(message.table, len(message.rows), same, columns)]


def gap(kind: str, server: str, seconds: float, reason: str, **more: int) -> Rows:
    """Return one row of ``gaps``; ``more`` are ``incarnation``, ``sequence`` and ``count``."""
    return Rows(GAPS.name, 1, {"kind": kind, "server": server, "seconds": seconds, "reason": reason, **more})
