"""The recorded part of a replay: reports, steps of plans and pauses of one window, and the plan at its begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dynamoth.plan.compatibility import NO_COMPATIBILITY, Compatibility
from dynamoth.plan.plan import Assignment, Entry, Mode, Phase, Plan, Route, single
from dynamoth.protocol.reports import ChannelColumns, Report
from dynamoth_analytics.replay.instant_cluster import configured
from dynamoth_balancer.decide.cluster import Move, Ratios
from dynamoth_balancer.decide.decider import is_replicated
from dynamoth_balancer.options import BalancerOptions

OBSERVED_SHARE_MIN = 0.1
"""A server with at least this share of a channel's traffic counts as one of its replicas, where no plan is recorded."""


class RecordedReport(NamedTuple):
    """A report and when it came, in seconds."""

    at: float
    report: Report


@dataclass(frozen=True, slots=True)
class PlanStep:
    """A recorded step of a channel to another assignment; ``settled`` is False while it is in transition."""

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


def moved(moves: Sequence[Move], at: float) -> list[Moved]:
    """Return the moves of a decision that was made at a time."""
    return [Moved(at, move.channel, move.before, move.after, move.reason, move.ratios) for move in moves]


@dataclass(frozen=True, slots=True)
class RecordedWindow:
    """The recorded load from ``begin`` to ``end``, in seconds.

    ``servers`` are the ids of all servers, and ``ring`` of those that share the channels that no plan names; empty:
    all. ``reports`` are by time, and may begin before the window. ``steps`` are by time, with the latest step of each
    channel before the window. ``pauses``, by time, are when administrators paused the balancer (True) or resumed it.
    """

    begin: float
    end: float
    servers: tuple[str, ...]
    reports: Sequence[RecordedReport]
    steps: Sequence[PlanStep] = ()
    ring: tuple[str, ...] = ()
    pauses: Sequence[tuple[float, bool]] = ()

    @property
    def first(self) -> float:
        """When it begins, with the reports before it."""
        return min([self.begin, *(at for at, _ in self.reports[:1])])

    def paused_at(self, time: float) -> bool:
        """Return whether the balancer was paused."""
        return [paused for at, paused in self.pauses if at <= time][-1:] == [True]


def initial_plan(window: RecordedWindow, options: BalancerOptions) -> Plan | None:
    """Return the plan that the servers store at the begin of a window; None for that of a new cluster."""
    rules = Compatibility(1, options.compatibility) if options.compatibility else NO_COMPATIBILITY
    plan = Plan.initial(configured(window.servers), options.virtual_nodes, rules)
    is_new = set(window.ring or window.servers) == set(window.servers)
    if not is_new:
        plan = replace(plan, base=window.ring)
    known = set(window.servers)
    entries = {
        channel: Entry(Route(1, place), Phase.SETTLED)
        for channel, place in places_before(window, window.begin).items()
        if place != plan.entry(channel).route.assignment and known.issuperset(place.servers)
    }
    return plan.with_entries(entries) if entries or not is_new else None


def places_before(window: RecordedWindow, time: float) -> dict[bytes, Assignment]:
    """Return where channels were just before a time: by recorded steps, others by the first report of each server."""
    before = {step.channel: step.before for step in reversed(window.steps) if step.at >= time and step.before}
    return _observed(window) | before | {step.channel: step.after for step in window.steps if step.at < time}


def _observed(window: RecordedWindow) -> dict[bytes, Assignment]:
    """Return where channels are by the first report of each server, as no recording has the plan before it."""
    first: dict[str, Report] = {}
    for _, report in window.reports:
        first.setdefault(report.server, report)
        if len(first) == len(window.servers):
            break
    seen: dict[bytes, dict[str, tuple[int, int, int]]] = {}
    for server, report in first.items():
        for row in report.columns.rows():
            seen.setdefault(row.channel, {})[server] = (row.bytes_out, row.publications, row.subscribers)
    return {channel: place for channel, at in seen.items() if (place := _guess(at)) is not None}


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
