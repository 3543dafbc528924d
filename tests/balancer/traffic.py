"""What agents count of the traffic of channels, and the columns of their reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth.plan.plan import Mode, Route
from dynamoth.protocol.reports import ChannelColumns, Report

CAPACITY = 1_000_000
"""Outgoing bytes per second of every server."""


@dataclass(frozen=True)
class Row:
    """What one agent counts of a channel, per second."""

    publications: float = 0.0
    publishers: int = 0
    subscribers: int = 0
    bytes_out: float = 0.0

    def __add__(self, other: Row) -> Row:
        return Row(
            self.publications + other.publications,
            self.publishers + other.publishers,
            self.subscribers + other.subscribers,
            self.bytes_out + other.bytes_out,
        )


@dataclass(frozen=True)
class Traffic:
    """The traffic of a channel, wherever it is."""

    publications_per_s: float
    subscribers: int
    publishers: int = 40
    message_bytes: float = 100

    @property
    def outgoing_bytes_per_s(self) -> float:
        return self.publications_per_s * self.subscribers * self.message_bytes

    def seen_at(self, server: str, route: Route) -> Row:
        """Return the part that the agent of one server of a route counts."""
        mode, servers = route.assignment.mode, route.assignment.servers
        publishers, subscribers = self.publishers, self.subscribers
        index = servers.index(server)
        if mode is Mode.ALL_SUBSCRIBERS:
            publishers = sum((number ^ route.epoch) % len(servers) == index for number in range(publishers))
        if mode is Mode.ALL_PUBLISHERS:
            subscribers = sum((number ^ route.epoch) % len(servers) == index for number in range(subscribers))
        publications = self.publications_per_s * publishers / self.publishers if self.publishers else 0.0
        return Row(publications, publishers, subscribers, publications * subscribers * self.message_bytes)


def columns(rows: Mapping[bytes, Row], interval_s: float) -> ChannelColumns:
    """Return the columns of a report over ``interval_s``."""
    names = sorted(rows, key=lambda name: (-rows[name].bytes_out, name))
    zeros, nobody = (0,) * len(names), (b"",) * len(names)
    return ChannelColumns(
        channels=tuple(names),
        publications=tuple(round(rows[name].publications * interval_s) for name in names),
        publishers=tuple(rows[name].publishers for name in names),
        subscribers=tuple(rows[name].subscribers for name in names),
        messages_sent=zeros,
        bytes_in=zeros,
        bytes_out=tuple(round(rows[name].bytes_out * interval_s) for name in names),
        publisher_ids=nobody,
        subscriber_ids=nobody,
    )


def report(
    server: str, rows: Mapping[bytes, Row], interval_s: float = 1.0, *, capacity: int = CAPACITY, **fields: Any
) -> Report:
    """Return the report of an agent that has counted ``rows``, and nothing else unless ``fields`` say so."""
    known: dict[str, Any] = {
        "incarnation": 1,
        "sequence": 1,
        "plan_version": 0,
        "outgoing_bytes_per_s": sum(row.bytes_out for row in rows.values()),
        "columns": columns(rows, interval_s),
    }
    known |= fields
    return Report(server=server, interval_s=interval_s, outgoing_bytes_per_s_max=capacity, **known)
