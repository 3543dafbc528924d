"""Replays a recorded load through the balancer machine of production, under other settings.

Theory of operation
-------------------
A window of a recording has the reports of all agents, as they came. The replay hands them to a balancer machine at
their times, changed in one respect: a channel that the machine has moved is counted where the machine has it, and not
where it was recorded. Its traffic in the cluster is the sum over the servers that reported it. Replicas share it
evenly: under ALL_SUBSCRIBERS its publications, under ALL_PUBLISHERS its subscribers. What a server sent besides the
channels that its report names stays with it.

A channel that was in transition when it was recorded was sent by old and new servers. It counts as it was before,
until it had settled.

The machine takes over a cluster with the plan of the window's first moment. It is paused for the reports before the
window, long enough that no wait of its takeover reaches into the window. These are changed in the same way, so its
averages begin as if the plan had been in force all the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dynamoth.plan.compatibility import NO_COMPATIBILITY, Compatibility
from dynamoth.plan.plan import Assignment, Entry, Mode, Phase, Plan, Route, single
from dynamoth.protocol.records import unpack_rows
from dynamoth.protocol.reports import ChannelColumns, Report, pack_report
from dynamoth_analytics.replay.instant_cluster import InstantCluster, configured
from dynamoth_balancer.decide.cluster import Move, Ratios
from dynamoth_balancer.decide.decider import is_replicated
from dynamoth_balancer.events import Decided, PlanChanged
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions

SETTLE_S = 0.3
"""How long subscribers take to follow a change, where the recording has none: clients of one network."""

STALE_S = 5.0
STALE_INTERVALS = 3
"""A server's load, and a channel's traffic there, count for the longer of these after the report."""

TRANSITION_S_MAX = 60.0
"""A recorded transition that has not settled by then is not waited for: the end of it may be missing."""

TICK_S = 0.5
"""The machine looks this often whether something is due while nothing moves: it decides once a second."""

OBSERVED_SHARE_MIN = 0.1
"""A server with at least this share of a channel's traffic counts as one of its replicas, where no plan is recorded."""


class RecordedReport(NamedTuple):
    """A report and when it came, in seconds."""

    at: float
    report: Report


@dataclass(frozen=True, slots=True)
class PlanChangeRow:
    """A recorded step of a channel; ``settled`` is False while it is in transition."""

    at: float
    channel: bytes
    before: Assignment | None
    after: Assignment
    settled: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """A move that a balancer decided."""

    at: float
    channel: bytes
    before: Assignment
    after: Assignment
    reason: str = ""
    #: Load ratios of its servers before it and as predicted after it, as far as known.
    ratios: Mapping[str, Ratios] = field(default_factory=dict[str, Ratios], compare=False)

    @property
    def replicates(self) -> bool:
        """Whether the channel is replicated before or after."""
        return is_replicated(self.before) or is_replicated(self.after)


@dataclass(frozen=True, slots=True)
class RecordedWindow:
    """The recorded load from ``begin`` to ``end``, in seconds.

    ``servers`` are the ids of all servers, and ``ring`` of those that share the channels that no plan names; empty:
    all. ``reports`` are by time, and may begin before the window. ``plans`` are by time, with the latest step of each
    channel before the window. ``pauses``, by time, are when administrators paused the balancer (True) or resumed it.
    """

    begin: float
    end: float
    servers: tuple[str, ...]
    reports: Sequence[RecordedReport]
    plans: Sequence[PlanChangeRow] = ()
    ring: tuple[str, ...] = ()
    pauses: Sequence[tuple[float, bool]] = ()

    @property
    def first(self) -> float:
        """When it begins, with the reports before it."""
        return min([self.begin, *(at for at, _ in self.reports[:1])])

    def paused_at(self, time: float) -> bool:
        """Return whether the balancer was paused."""
        return [paused for at, paused in self.pauses if at <= time][-1:] == [True]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the settings did to the recorded load. Times in seconds, summed over servers where it says so."""

    #: Sum over servers.
    overload_s: float
    ratio_max: float
    ratio_mean: float
    #: The largest load ratio of a server over the mean of all, averaged over time.
    imbalance: float
    #: Sum over servers: while a server sends messages of channels.
    server_s: float
    moves: tuple[Moved, ...]

    @property
    def replications(self) -> int:
        """How many of the moves change the replicas of a channel."""
        return sum(move.replicates for move in self.moves)


class _Traffic(NamedTuple):
    """The traffic of a channel, per second where that applies."""

    publications: float
    publishers: float
    subscribers: float
    bytes_out: float


_NO_TRAFFIC = _Traffic(0.0, 0.0, 0.0, 0.0)


def replay(
    window: RecordedWindow, options: BalancerOptions, overload_ratio: float, settle_s: float = SETTLE_S
) -> Outcome | None:
    """Replay a window under some settings; None where the window has no report.

    Args:
        window: the recorded load.
        options: the settings.
        overload_ratio: a server with a larger load ratio is overloaded. The same for all settings that are compared.
        settle_s: how long subscribers take to follow a change, in seconds.

    Raises:
        ReplayError: a balancer with these settings does not lead.

    """
    if not any(window.begin <= at < window.end for at, _ in window.reports):
        return None
    return _Replay(window, options, overload_ratio, settle_s).run()


def recorded_anew(
    window: RecordedWindow, options: BalancerOptions
) -> tuple[RecordedWindow, tuple[Moved, ...], dict[str, list[dict[str, Any]]]]:
    """Record what a cluster with these settings would have done under the same load.

    Returns the recorded window, the moves, and by table the rows that the balancer sent to recorders.
    """
    run = _Replay(window, options, math.inf, SETTLE_S, records=[])
    moves = run.run().moves
    return replace(window, reports=run.reports, plans=run.plans), moves, run.tables()


def measured(window: RecordedWindow, overload_ratio: float) -> Outcome:
    """Return the figures of a window as it was recorded, without moves."""
    totals = _Totals(overload_ratio, window.begin)
    for at, report in window.reports:
        if window.begin <= at < window.end:
            totals.add(report, at)
    return totals.outcome(())


def initial_plan(window: RecordedWindow, options: BalancerOptions) -> Plan | None:
    """Return the plan that the servers store at the begin of a window; None for that of a new cluster."""
    return _Recorded(window).plan_at_begin(options)


def lead_s(options: BalancerOptions) -> float:
    """Return for how long a balancer leads before the first report, so that no wait of its takeover is left."""
    return max(options.wait_s, options.averaging_s, options.join_s) + 1.0


class _Replay:
    """One replay of one window."""

    def __init__(
        self,
        window: RecordedWindow,
        options: BalancerOptions,
        overload_ratio: float,
        settle_s: float,
        records: list[tuple[float, bytes]] | None = None,
    ) -> None:
        self._window = window
        self._recorded = _Recorded(window)
        self._totals = _Totals(overload_ratio, window.begin)
        plan = self._recorded.plan_at_begin(options)
        machine = BalancerMachine(configured(window.servers), 1, options)
        self._cluster = InstantCluster(machine, window.servers, plan, window.first - lead_s(options), settle_s)
        self._cluster.pause(paused=True)
        self._cluster.records = records
        later = [each for each in window.pauses if each[0] > window.begin]
        #: The pauses to come.
        self._pauses = deque([(window.begin, window.paused_at(window.begin)), *later])
        #: Where clients of the replay find each channel; channels at home are found when they are first seen.
        self._places: dict[bytes, Assignment] = {}
        self._moves: list[Moved] = []
        #: Of the plan that was looked at last.
        self._entries: Mapping[bytes, Entry] = {}
        #: What would have been recorded.
        self.reports: list[RecordedReport] = []
        self.plans: list[PlanChangeRow] = []
        self._take_news()

    def run(self) -> Outcome:
        for at, report in self._window.reports:
            if at >= self._window.end:
                break
            while self._pauses and self._pauses[0][0] <= at:
                time, paused = self._pauses.popleft()
                self._cluster.run_until(time, TICK_S)
                self._cluster.pause(paused=paused)
            self._cluster.run_until(at, TICK_S)
            self._take_news()
            self._recorded.advance(at)
            placed = self._placed(report, at)
            self._cluster.report(report.server, report.incarnation, pack_report(placed))
            if at >= self._window.begin:
                self._totals.add(placed, at)
            self.reports.append(RecordedReport(at, placed))
        self._cluster.run_until(self._window.end, TICK_S)
        self._take_news()
        return self._totals.outcome(tuple(self._moves))

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return what a recorder would have heard of the balancer, by table."""
        tables: dict[str, list[dict[str, Any]]] = {}
        for at, packed in self._cluster.records or ():
            said = unpack_rows(packed)
            tables.setdefault(said.table, []).extend(
                {"at": at, "balancer": said.balancer, "number": said.number, "line": line}
                | dict(zip(said.columns, row, strict=True))
                for line, row in enumerate(said.rows)
            )
        return tables

    def _take_news(self) -> None:
        """Learn what the machine has decided and where channels are now."""
        news = self._cluster.news
        while news:
            at, said = news.popleft()
            if isinstance(said, Decided):
                self._moves += moved(said.decision.moves, at)
            elif isinstance(said, PlanChanged):
                self._follow(said.plan, at)

    def _follow(self, plan: Plan, at: float) -> None:
        for channel, entry in plan.entries.items():
            if self._entries.get(channel) != entry:
                before = entry.previous[-1].assignment if entry.previous else None
                self.plans.append(
                    PlanChangeRow(at, channel, before, entry.route.assignment, entry.phase is Phase.SETTLED)
                )
                self._places[channel] = entry.client_route.assignment
        self._entries = plan.entries

    def _place(self, channel: bytes) -> Assignment:
        place = self._places.get(channel)
        if place is None:
            plan = self._cluster.machine.plan
            assert plan is not None, "a balancer that leads has a plan"
            place = self._places[channel] = plan.entry(channel).client_route.assignment
        return place

    def _placed(self, report: Report, at: float) -> Report:
        """Return a recorded report with the channels that the replay has at its server."""
        recorded, server, places = self._recorded, report.server, self._places
        columns = report.columns
        here = single(server)
        strays: dict[bytes, int] = {}
        for index, channel in enumerate(columns.channels):
            place = places.get(channel) or self._place(channel)
            if channel in recorded.frozen or (place is not here and place != recorded.place(channel, here)):
                strays[channel] = index
        recorded.note(at, report, strays)
        arriving: dict[bytes, _Traffic] = {}
        for channel, traffic in recorded.strays(at).items():
            share = _share(traffic, places.get(channel) or self._place(channel), server)
            if share is not None:
                arriving[channel] = share
        if not strays and not arriving:
            return report
        return _rewritten(report, strays, arriving)


class _Recorded:
    """What was recorded until now: where channels were, and the traffic of those that the replay has elsewhere."""

    def __init__(self, window: RecordedWindow) -> None:
        self._window = window
        self._plans = iter(window.plans)
        self._next = next(self._plans, None)
        #: By channel with a recorded step.
        self._places: dict[bytes, Assignment] = {}
        #: The latest report of each server.
        self._latest: dict[str, RecordedReport] = {}
        #: By server, the channels of its latest report that the replay has elsewhere.
        self._strays: dict[str, dict[bytes, _Traffic]] = {}
        #: The traffic before their transition of channels that are in one, and when they stop to count so.
        self.frozen: dict[bytes, tuple[float, _Traffic]] = {}

    def plan_at_begin(self, options: BalancerOptions) -> Plan | None:
        """Return the plan that the servers store at first; None for that of a new cluster."""
        window = self._window
        rules = Compatibility(1, options.compatibility) if options.compatibility else NO_COMPATIBILITY
        plan = Plan.initial(configured(window.servers), options.virtual_nodes, rules)
        is_new = set(window.ring or window.servers) == set(window.servers)
        if not is_new:
            plan = replace(plan, base=window.ring)
        observed = self._observed()
        self._places |= observed | self._planned(window.first)
        places = observed | self._planned(window.begin)
        known = set(window.servers)
        entries = {
            channel: Entry(Route(1, place), Phase.SETTLED)
            for channel, place in places.items()
            if place != plan.entry(channel).route.assignment and known.issuperset(place.servers)
        }
        return plan.with_entries(entries) if entries or not is_new else None

    def _planned(self, time: float) -> dict[bytes, Assignment]:
        """Return where channels with recorded steps were just before a time."""
        plans = self._window.plans
        before = {row.channel: row.before for row in reversed(plans) if row.at >= time and row.before}
        return before | {row.channel: row.after for row in plans if row.at < time}

    def _observed(self) -> dict[bytes, Assignment]:
        """Return where channels are by the first report of each server, as no recording has the plan before it."""
        first: dict[str, Report] = {}
        for _, report in self._window.reports:
            first.setdefault(report.server, report)
            if len(first) == len(self._window.servers):
                break
        seen: dict[bytes, dict[str, tuple[int, int, int]]] = {}
        for server, report in first.items():
            for row in report.columns.rows():
                seen.setdefault(row.channel, {})[server] = (row.bytes_out, row.publications, row.subscribers)
        return {channel: place for channel, at in seen.items() if (place := _guess(at)) is not None}

    def place(self, channel: bytes, default: Assignment) -> Assignment:
        """Return where a channel was recorded to be."""
        return self._places.get(channel, default)

    def advance(self, at: float) -> None:
        """Take in the recorded steps until now."""
        while self._next is not None and self._next.at <= at:
            row, self._next = self._next, next(self._plans, None)
            if not row.settled and row.channel not in self.frozen:
                self.frozen[row.channel] = (row.at + TRANSITION_S_MAX, self._traffic(row.channel, at))
            elif row.settled and row.channel in self.frozen:
                interval_s = max((latest.report.interval_s for latest in self._latest.values()), default=1.0)
                self.frozen[row.channel] = (row.at + interval_s, self.frozen[row.channel][1])
            if row.settled:
                self._places[row.channel] = row.after
        self.frozen = {channel: kept for channel, kept in self.frozen.items() if kept[0] > at}

    def _traffic(self, channel: bytes, at: float) -> _Traffic:
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
        return at - reported_at <= max(STALE_S, STALE_INTERVALS * report.interval_s)

    def note(self, at: float, report: Report, strays: Mapping[bytes, int]) -> None:
        """Take in a report with the indices of the channels that the replay has elsewhere."""
        self._latest[report.server] = RecordedReport(at, report)
        self._strays[report.server] = {
            channel: _traffic_of(report, index) for channel, index in strays.items() if channel not in self.frozen
        }

    def strays(self, at: float) -> dict[bytes, _Traffic]:
        """Return the traffic of all channels that the replay has elsewhere than their reports."""
        totals = {channel: traffic for channel, (_, traffic) in self.frozen.items()}
        for server, strays in self._strays.items():
            if self._counts(server, at):
                for channel, traffic in strays.items():
                    if channel not in self.frozen:
                        totals[channel] = self._add(channel, totals.get(channel, _NO_TRAFFIC), traffic)
        return totals

    def _add(self, channel: bytes, one: _Traffic, other: _Traffic) -> _Traffic:
        """Add what two servers counted: replicas count the same subscribers, or the same publications."""
        place = self._places.get(channel)
        same_publications = place is not None and place.mode is Mode.ALL_PUBLISHERS
        same_subscribers = place is not None and place.mode is Mode.ALL_SUBSCRIBERS
        return _Traffic(
            max(one.publications, other.publications) if same_publications else one.publications + other.publications,
            max(one.publishers, other.publishers) if same_publications else one.publishers + other.publishers,
            max(one.subscribers, other.subscribers) if same_subscribers else one.subscribers + other.subscribers,
            one.bytes_out + other.bytes_out,
        )


class _Totals:
    """Adds up the load ratios of a window."""

    def __init__(self, overload_ratio: float, begin: float) -> None:
        self._overload_ratio = overload_ratio
        self._at = begin
        #: By server, its latest load ratio, and until when that counts.
        self._ratios: dict[str, tuple[float, float]] = {}
        self._overload_s = self._server_s = self._weight_s = self._sum = self._ratio_max = 0.0
        self._imbalance = self._imbalance_s = 0.0

    def add(self, report: Report, at: float) -> None:
        ratio, interval_s = report.load_ratio, report.interval_s
        self._ratios = {server: known for server, known in self._ratios.items() if known[1] > self._at}
        ratios = [each for each, _ in self._ratios.values()]
        mean = sum(ratios) / len(ratios) if ratios else 0.0
        if mean:
            self._imbalance += (at - self._at) * max(ratios) / mean
            self._imbalance_s += at - self._at
        self._at = at
        self._ratios[report.server] = ratio, at + max(STALE_S, STALE_INTERVALS * interval_s)
        self._overload_s += interval_s * (ratio > self._overload_ratio)
        self._server_s += interval_s * any(report.columns.bytes_out[:1])
        self._sum += ratio * interval_s
        self._weight_s += interval_s
        self._ratio_max = max(self._ratio_max, ratio)

    def outcome(self, moves: tuple[Moved, ...]) -> Outcome:
        return Outcome(
            self._overload_s,
            self._ratio_max,
            self._sum / self._weight_s if self._weight_s else 0.0,
            self._imbalance / self._imbalance_s if self._imbalance_s else 1.0,
            self._server_s,
            moves,
        )


def moved(moves: Sequence[Move], at: float) -> list[Moved]:
    """Return the moves of a decision that was made now."""
    return [Moved(at, move.channel, move.before, move.after, move.reason, move.ratios) for move in moves]


def _guess(seen: Mapping[str, tuple[int, int, int]]) -> Assignment | None:
    """Guess an assignment from bytes, publications and subscribers at each server; None for no traffic."""
    total = sum(bytes_out for bytes_out, _, _ in seen.values())
    servers = [server for server, row in seen.items() if row[0] >= OBSERVED_SHARE_MIN * total and any(row)]
    if not servers:
        return None
    if len(servers) == 1:
        return single(servers[0])
    spread = [max(figures) - min(figures) for figures in list(zip(*(seen[server] for server in servers), strict=True))]
    same_subscribers = spread[2] == 0 and spread[1] > 0
    return Assignment(Mode.ALL_SUBSCRIBERS if same_subscribers else Mode.ALL_PUBLISHERS, tuple(sorted(servers)))


def _traffic_of(report: Report, index: int) -> _Traffic:
    columns, interval_s = report.columns, report.interval_s
    return _Traffic(
        columns.publications[index] / interval_s,
        columns.publishers[index],
        columns.subscribers[index],
        columns.bytes_out[index] / interval_s,
    )


def _share(traffic: _Traffic, place: Assignment, server: str) -> _Traffic | None:
    """Return the part of a channel's traffic that one server has; None for a server without it."""
    if server not in place.servers:
        return None
    part = 1 / len(place.servers)
    few_publications = part if place.mode is Mode.ALL_SUBSCRIBERS else 1.0
    few_subscribers = part if place.mode is Mode.ALL_PUBLISHERS else 1.0
    return _Traffic(
        traffic.publications * few_publications,
        math.ceil(traffic.publishers * few_publications),
        traffic.subscribers * few_subscribers,
        traffic.bytes_out * part,
    )


def _rewritten(report: Report, leaving: Mapping[bytes, int], arriving: Mapping[bytes, _Traffic]) -> Report:
    """Return a report without some channels, and with others."""
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
            traffic = _Traffic(*(a + b for a, b in zip(traffic, _traffic_of(report, number), strict=True)))
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


def channel_columns(
    channels: Sequence[bytes],
    publications: Sequence[int],
    publishers: Sequence[int],
    subscribers: Sequence[int],
    bytes_out: Sequence[int],
) -> ChannelColumns:
    """Return the measurements of channels, by ``bytes_out`` descending, without those that no balancer needs."""
    zeros, nobody = (0,) * len(channels), (b"",) * len(channels)
    return ChannelColumns(
        tuple(channels),
        tuple(publications),
        tuple(publishers),
        tuple(subscribers),
        zeros,
        zeros,
        tuple(bytes_out),
        nobody,
        nobody,
    )
