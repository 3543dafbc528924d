"""The load of a replay: the traffic of channels, and reports with the channels where the replay has them.

Theory of operation
-------------------
A channel that the replay has elsewhere than its report is a stray: it leaves the report of one server and arrives in
those of others. Its traffic in the cluster is the sum over the servers that reported it. Replicas share it evenly:
under ALL_SUBSCRIBERS its publications, under ALL_PUBLISHERS its subscribers. What a server sent besides the channels
that its report names stays with it.

A channel that was in transition when it was recorded was sent by old and new servers. It counts as it was before,
until it had settled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from dynamoth.plan.plan import Assignment, Mode
from dynamoth.protocol.reports import Report
from dynamoth_analytics.replay.recorded import RecordedReport, RecordedWindow, channel_columns, places_before

STALE_S = 5.0
STALE_INTERVALS = 3
"""A server's load, and a channel's traffic there, count for the longer of these after the report."""

TRANSITION_S_MAX = 60.0
"""A recorded transition that has not settled by then is not waited for: the end of it may be missing."""


class Traffic(NamedTuple):
    """The traffic of a channel, per second where that applies."""

    publications: float
    publishers: float
    subscribers: float
    bytes_out: float


_NO_TRAFFIC = Traffic(0.0, 0.0, 0.0, 0.0)


def counts_for_s(report: Report) -> float:
    """Return for how many seconds a report counts."""
    return max(STALE_S, STALE_INTERVALS * report.interval_s)


class RecordedTraffic:
    """The recording until now: where channels were, and the traffic of strays."""

    def __init__(self, window: RecordedWindow) -> None:
        self._steps = iter(window.steps)
        self._next = next(self._steps, None)
        #: By channel with a recorded step, or in the first reports.
        self._places = places_before(window, window.first)
        #: The latest report of each server.
        self._latest: dict[str, RecordedReport] = {}
        #: By server, the strays of its latest report.
        self._strays: dict[str, dict[bytes, Traffic]] = {}
        #: The traffic before their transition of channels that are in one, and when they stop to count so.
        self.frozen: dict[bytes, tuple[float, Traffic]] = {}

    def place(self, channel: bytes, default: Assignment) -> Assignment:
        """Return where a channel was recorded to be."""
        return self._places.get(channel, default)

    def advance(self, at: float) -> None:
        """Take in the recorded steps until now."""
        while self._next is not None and self._next.at <= at:
            step, self._next = self._next, next(self._steps, None)
            if not step.settled and step.channel not in self.frozen:
                self.frozen[step.channel] = (step.at + TRANSITION_S_MAX, self._traffic(step.channel, at))
            elif step.settled and step.channel in self.frozen:
                interval_s = max((latest.report.interval_s for latest in self._latest.values()), default=1.0)
                self.frozen[step.channel] = (step.at + interval_s, self.frozen[step.channel][1])
            if step.settled:
                self._places[step.channel] = step.after
        self.frozen = {channel: kept for channel, kept in self.frozen.items() if kept[0] > at}

    def on_report(self, at: float, report: Report, strays: Mapping[bytes, int]) -> None:
        """Take in a report, and the indices of its strays."""
        self._latest[report.server] = RecordedReport(at, report)
        self._strays[report.server] = {
            channel: _traffic_of(report, index) for channel, index in strays.items() if channel not in self.frozen
        }

    def strays(self, at: float) -> dict[bytes, Traffic]:
        """Return the traffic of all strays."""
        totals = {channel: traffic for channel, (_, traffic) in self.frozen.items()}
        for server, strays in self._strays.items():
            if self._counts(server, at):
                for channel, traffic in strays.items():
                    if channel not in self.frozen:
                        totals[channel] = self._add(channel, totals.get(channel, _NO_TRAFFIC), traffic)
        return totals

    def _traffic(self, channel: bytes, at: float) -> Traffic:
        """Return the traffic of any channel, by the latest reports."""
        total = _NO_TRAFFIC
        for server, (_, report) in self._latest.items():
            channels = report.columns.channels
            if self._counts(server, at) and channel in channels:
                total = self._add(channel, total, _traffic_of(report, channels.index(channel)))
        return total

    def _counts(self, server: str, at: float) -> bool:
        """Return whether the latest report of a server is not too old."""
        reported_at, report = self._latest[server]
        return at - reported_at <= counts_for_s(report)

    def _add(self, channel: bytes, one: Traffic, other: Traffic) -> Traffic:
        """Add the counts of two servers: replicas count the same subscribers, or the same publications."""
        place = self._places.get(channel)
        same_publications = place is not None and place.mode is Mode.ALL_PUBLISHERS
        same_subscribers = place is not None and place.mode is Mode.ALL_SUBSCRIBERS
        return Traffic(
            max(one.publications, other.publications) if same_publications else one.publications + other.publications,
            max(one.publishers, other.publishers) if same_publications else one.publishers + other.publishers,
            max(one.subscribers, other.subscribers) if same_subscribers else one.subscribers + other.subscribers,
            one.bytes_out + other.bytes_out,
        )


def _traffic_of(report: Report, index: int) -> Traffic:
    columns, interval_s = report.columns, report.interval_s
    return Traffic(
        columns.publications[index] / interval_s,
        columns.publishers[index],
        columns.subscribers[index],
        columns.bytes_out[index] / interval_s,
    )


def share(traffic: Traffic, place: Assignment, server: str) -> Traffic | None:
    """Return the part of a channel's traffic that one server has; None for a server without it."""
    if server not in place.servers:
        return None
    part = 1 / len(place.servers)
    few_publications = part if place.mode is Mode.ALL_SUBSCRIBERS else 1.0
    few_subscribers = part if place.mode is Mode.ALL_PUBLISHERS else 1.0
    return Traffic(
        traffic.publications * few_publications,
        math.ceil(traffic.publishers * few_publications),
        traffic.subscribers * few_subscribers,
        traffic.bytes_out * part,
    )


def rewritten(report: Report, leaving: Mapping[bytes, int], arriving: Mapping[bytes, Traffic]) -> Report:
    """Return a report without some channels, given with their indices, and with others."""
    columns, interval_s = report.columns, report.interval_s
    rows = zip(
        columns.bytes_out, columns.channels, columns.publications, columns.publishers, columns.subscribers, strict=True
    )
    kept = [row for row in rows if row[1] not in leaving and row[1] not in arriving]
    index = {channel: number for number, channel in enumerate(columns.channels) if channel in arriving}
    outgoing = -sum(columns.bytes_out[number] for number in leaving.values()) / interval_s
    for channel, traffic in arriving.items():
        number = index.get(channel)
        if number is not None and channel not in leaving:
            traffic = Traffic(*(a + b for a, b in zip(traffic, _traffic_of(report, number), strict=True)))
            outgoing -= columns.bytes_out[number] / interval_s
        outgoing += traffic.bytes_out
        kept.append(
            (
                round(traffic.bytes_out * interval_s),
                channel,
                round(traffic.publications * interval_s),
                round(traffic.publishers),
                round(traffic.subscribers),
            )
        )
    if arriving:
        kept.sort(key=lambda row: row[0], reverse=True)
    bytes_out, channels, publications, publishers, subscribers = zip(*kept, strict=True) if kept else ((),) * 5
    return replace(
        report,
        outgoing_bytes_per_s=max(0.0, report.outgoing_bytes_per_s + outgoing),
        columns=channel_columns(channels, publications, publishers, subscribers, bytes_out),
    )
