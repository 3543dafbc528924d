"""Makes rows of a recording from the messages of agents, balancer, edge brokers and coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dynamoth.edge.control import BrokerReport, Stamp
from dynamoth.protocol.records import RecordedRows
from dynamoth.protocol.reports import Report
from dynamoth.recording import BROKER_INTERESTS, BROKERS, CHANNELS, GAPS, SERVERS, GapKind, channel_text
from dynamoth_recorder.events import Rows

_OF_REPORT = [
    name
    for name in (column.name for column in SERVERS.columns)
    if name not in ("at", "recorder", "problems", "messages_untracked", "publishers_uncounted")
]
"""Columns that are attributes of a report."""

_OF_COLUMNS = ("publications", "subscribers", "messages_sent", "bytes_in", "bytes_out")
"""Columns that are attributes of ``ChannelColumns`` and ``ChannelSums``."""

_OF_NAMED = ("publishers", "publisher_ids", "subscriber_ids")
"""Columns that are attributes of ``ChannelColumns`` only."""


def rows_of_report(report: Report) -> list[Rows]:
    """Return the row of the server, and those of its channels together: those with a name, then one for the rest."""
    rest = report.rest
    server = {name: getattr(report, name) for name in _OF_REPORT} | {
        "problems": [f"{kind}: {text}" for kind, text in report.problems],
        "messages_untracked": rest.messages_untracked,
        "publishers_uncounted": rest.publishers_uncounted,
    }
    rows = [Rows(SERVERS.name, 1, server)]
    head = {name: server[name] for name in ("server", "incarnation", "sequence", "interval_s")}
    named = len(report.columns)
    columns: dict[str, Sequence[Any]] = {"channel": _texts(report.columns.channels), "channels": [1] * named}
    columns |= {name: getattr(report.columns, name) for name in (*_OF_COLUMNS, *_OF_NAMED)}
    if rest.channels:
        last = {"channels": rest.channels} | {name: getattr(rest, name) for name in _OF_COLUMNS}
        columns = {name: [*values, last.get(name)] for name, values in columns.items()}
    if count := named + bool(rest.channels):
        rows.append(Rows(CHANNELS.name, count, head, columns))
    return rows


def _texts(channels: Sequence[bytes]) -> list[str]:
    """Return ``channel_text`` of each; if nothing needs an escape, the loop runs in C."""
    with suppress(UnicodeDecodeError):
        if b"\\" not in b"".join(channels):
            return [*map(bytes.decode, channels)]
    return [*map(channel_text, channels)]


def rows_of_sender(message: RecordedRows, sender: str) -> list[Rows]:
    """Return the rows of a message, numbered by ``line``. ``sender``: the column of its sender's incarnation."""
    if not message.rows:
        return []
    columns: dict[str, Any] = dict(zip(message.columns, zip(*message.rows, strict=True), strict=True))
    columns["line"] = range(len(message.rows))
    same = {sender: message.sender, "number": message.number}
    return [Rows(message.table, len(message.rows), same, columns)]


_OF_BROKER = [
    name
    for name in (column.name for column in BROKERS.columns)
    if name not in ("at", "recorder", "incarnation", "number", "latitude", "longitude", "user_loads")
]
"""Columns that are attributes of a broker's report."""


def rows_of_broker(stamp: Stamp, report: BrokerReport) -> list[Rows]:
    """Return the row of a broker, and those of the interests that its report names together."""
    head = {"broker": report.broker, "incarnation": stamp.incarnation, "number": stamp.number}
    latitude, longitude = report.location or (None, None)
    broker = {name: getattr(report, name) for name in _OF_BROKER} | {
        **head,
        "latitude": latitude,
        "longitude": longitude,
        "user_loads": " ".join(map(str, report.user_loads)),
    }
    rows, interests = [Rows(BROKERS.name, 1, broker)], report.interests
    if interests.ids:
        columns = {"interest": interests.ids, "rate": interests.rates, "users": interests.users}
        rows.append(Rows(BROKER_INTERESTS.name, len(interests.ids), head, columns))
    return rows


def gap(kind: GapKind, server: str | None, seconds: float, reason: str, **more: int) -> Rows:
    """Return one row of ``gaps``; ``more`` is ``incarnation``, ``sequence`` and ``count``."""
    return Rows(GAPS.name, 1, {"kind": kind, "server": server, "seconds": seconds, "reason": reason, **more})
