"""Replays a recorded load through the balancer machine of production, under other settings.

Theory of operation
-------------------
A window of a recording has the reports of all agents, as they came. The replay hands them to a balancer machine at
their times, changed in one respect: a channel that the machine has moved counts where the machine has it, and not
where it was recorded (``traffic.py``).

The machine takes over a cluster with the plan of the window's first moment. It is paused for the reports before the
window, long enough that no wait of its takeover reaches into the window. These are changed in the same way, so its
averages begin as if the plan had been in force all the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dynamoth.plan.plan import Assignment, Entry, Plan, single
from dynamoth.plan.slots import is_slot
from dynamoth.protocol.reports import Report, pack_report
from dynamoth_analytics.replay.instant_cluster import InstantCluster, configured
from dynamoth_analytics.replay.recorded import Moved, RecordedWindow, initial_plan, moved
from dynamoth_analytics.replay.traffic import RecordedTraffic, Traffic, counts_for_s, rewritten, share
from dynamoth_balancer.events import Decided, PlanChanged
from dynamoth_balancer.machine import BalancerMachine
from dynamoth_balancer.options import BalancerOptions

SETTLE_S = 0.3
"""How long subscribers take to follow a change, where the recording has none: clients of one network."""

TICK_S = 0.5
"""The machine looks this often whether something is due while nothing moves: it decides once a second."""


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


def measured(window: RecordedWindow, overload_ratio: float) -> Outcome:
    """Return the figures of a window as it was recorded, without moves."""
    totals = _Totals(overload_ratio, window.begin)
    for at, report in window.reports:
        if window.begin <= at < window.end:
            totals.add(report, at)
    return totals.outcome(())


def lead_s(options: BalancerOptions) -> float:
    """Return for how long a balancer leads before the first report, so that no wait of its takeover is left."""
    return max(options.wait_s, options.averaging_s, options.join_s) + 1.0


class _Replay:
    """One replay of one window."""

    def __init__(
        self, window: RecordedWindow, options: BalancerOptions, overload_ratio: float, settle_s: float
    ) -> None:
        self._window = window
        self._recorded = RecordedTraffic(window)
        self._totals = _Totals(overload_ratio, window.begin)
        machine = BalancerMachine(configured(window.servers), 1, options)
        begin = window.first - lead_s(options)
        self._cluster = InstantCluster(machine, window.servers, initial_plan(window, options), begin, settle_s)
        self._cluster.pause(paused=True)
        later = [each for each in window.pauses if each[0] > window.begin]
        #: The pauses to come.
        self._pauses = deque([(window.begin, window.paused_at(window.begin)), *later])
        #: Where clients of the replay find each channel; channels at home are found when they are first seen.
        self._places: dict[bytes, Assignment] = {}
        self._moves: list[Moved] = []
        #: Of the latest plan.
        self._entries: Mapping[bytes, Entry] = {}
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
        self._cluster.run_until(self._window.end, TICK_S)
        self._take_news()
        return self._totals.outcome(tuple(self._moves))

    def _take_news(self) -> None:
        """Learn what the machine has decided and where channels are now."""
        news = self._cluster.news
        while news:
            at, said = news.popleft()
            if isinstance(said, Decided):
                self._moves += moved(said.decision.moves, at)
            elif isinstance(said, PlanChanged):
                self._follow(said.plan)

    def _follow(self, plan: Plan) -> None:
        known, self._entries = self._entries, plan.entries
        changed = [channel for channel, entry in plan.entries.items() if known.get(channel) != entry]
        if any(map(is_slot, changed)):  # any channel may follow it
            self._places.clear()
            changed = list(plan.entries)
        for channel in changed:
            self._places[channel] = plan.entries[channel].client_route.assignment

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
        here = single(server)
        strays: dict[bytes, int] = {}
        for index, channel in enumerate(report.columns.channels):
            place = places.get(channel) or self._place(channel)
            if channel in recorded.frozen or (place is not here and place != recorded.place(channel, here)):
                strays[channel] = index
        recorded.on_report(at, report, strays)
        arriving: dict[bytes, Traffic] = {}
        for channel, traffic in recorded.strays(at).items():
            part = share(traffic, places.get(channel) or self._place(channel), server)
            if part is not None:
                arriving[channel] = part
        if not strays and not arriving:
            return report
        return rewritten(report, strays, arriving)


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
        self._ratios[report.server] = ratio, at + counts_for_s(report)
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
