"""What the demo knows: put together from its workers, the stored plan and the balancer; and what comes out of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamoth.plan import Phase, Plan
from dynamoth_cli.latency import LatencyCounts
from dynamoth_cli.plan import channel_name

RATE_WINDOW_S = 3.0
NEWS_KEPT_MAX = 8
STORIES_SHOWN_MAX = 10
"""How much of it is shown."""

AUDITED = ("lost", "covered_losses", "duplicated", "reordered", "gaps")


@dataclass(slots=True)
class WorkerState:
    """What one worker has told."""

    role: str
    ready: bool = False
    stats: dict[str, Any] = field(default_factory=dict[str, Any])
    stopped: dict[str, Any] | None = None
    result: dict[str, Any] | None = None


@dataclass(slots=True)
class Sample:
    """Sums at one time."""

    at: float
    published: int
    delivered: int


class DemoState:
    """Everything that is shown and judged.

    Args:
        servers: ids.
        channels: of all tiles.
        seconds: how long players play.
    """

    def __init__(self, servers: Sequence[str], channels: Sequence[bytes], seconds: float) -> None:
        self.servers = list(servers)
        self.channels = list(channels)
        self.seconds = seconds
        #: In words, what goes on.
        self.stage = "starting"
        #: Seconds since the players began; 0 before.
        self.elapsed_s = 0.0
        self.workers: list[WorkerState] = []
        #: Over the whole run, over the last ``RATE_WINDOW_S`` that are complete, and over those that are not.
        self.latencies = LatencyCounts()
        self.latencies_now = LatencyCounts()
        self._latencies_next = LatencyCounts()
        self._latencies_next_since = 0.0
        self._samples: deque[Sample] = deque()
        self.plan: Plan | None = None
        #: Each (channel, epoch) that a plan has had: a channel that moves gets a new epoch.
        self._moves: set[tuple[bytes, int]] = set()
        #: What the balancer told last, and why it does not answer.
        self.balancer: Mapping[str, Any] | None = None
        self.balancer_problem: str | None = None
        self._decisions_seen: set[float] = set()
        #: Newest last.
        self.news: deque[str] = deque(maxlen=NEWS_KEPT_MAX)
        #: Load ratios by server: the latest, those just before the first move, and the highest of each.
        self.load_ratios: dict[str, float | None] = dict.fromkeys(self.servers)
        self.load_ratios_before: dict[str, float | None] | None = None
        self.load_ratio_peak = 0.0

    # What comes in.

    def take_event(self, worker: WorkerState, event: dict[str, Any]) -> None:
        """Take an event of a worker."""
        kind = event.pop("event")
        if kind == "ready":
            worker.ready = True
            return
        if kind == "stopped":
            worker.stopped = event
            return
        latencies = {int(of): number for of, number in event.pop("latencies").items()}
        self.latencies.merge(latencies)
        self._latencies_next.merge(latencies)
        worker.stats = event
        if kind == "result":
            worker.result = event

    def take_plan(self, plan: Plan) -> None:
        """Take the plan that a server stores."""
        self.plan = plan
        for channel, entry in plan.entries.items():
            if entry.route.epoch > 0:
                self._moves.add((channel, entry.route.epoch))

    def take_balancer(self, status: Mapping[str, Any]) -> None:
        """Take the status of the balancer."""
        self.balancer, self.balancer_problem = status, None
        self.load_ratios = {id_: server["load_ratio"] for id_, server in status["servers"].items()}
        known = [ratio for ratio in self.load_ratios.values() if ratio is not None]
        self.load_ratio_peak = max([self.load_ratio_peak, *known])
        if not self._moves and len(known) == len(self.servers):
            self.load_ratios_before = dict(self.load_ratios)
        for decision in status["decisions"]:
            self._take_decision(decision)

    def take_problem(self, problem: str) -> None:
        """Take the reason why plan or balancer do not answer."""
        self.balancer_problem = problem

    def sample(self, now: float) -> None:
        """Note the sums, for rates."""
        if now >= self._latencies_next_since + RATE_WINDOW_S:
            self.latencies_now, self._latencies_next = self._latencies_next, LatencyCounts()
            self._latencies_next_since = now
        self._samples.append(Sample(now, self.published, self.delivered))
        while self._samples[0].at < now - RATE_WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()

    def _take_decision(self, decision: Mapping[str, Any]) -> None:
        at = round(self.elapsed_s - decision["age_s"])  # told anew each time, with the age of that moment
        if any(abs(at - seen) <= 1 for seen in self._decisions_seen):
            return
        self._decisions_seen.add(at)
        for move in decision["first_moves"]:
            before, after = move["load_ratio_from_before"], move["load_ratio_from_after"]
            self.news.append(
                f"{max(0, at):3d} s  {channel_name(move['channel'])}  {move['from']} -> {move['to']}"
                f"  ({move['from']}: {before:.2f} -> {after:.2f})  {move['reason']}"
            )
        for finding in decision["findings"]:
            ratio = finding["load_ratio"]
            self.news.append(f"{max(0, at):3d} s  {finding['server']} at {ratio:.2f}: {finding['reason']}")

    # What comes out.

    @property
    def published(self) -> int:
        """Updates that players have published."""
        return self._sum("published", "players")

    @property
    def delivered(self) -> int:
        """Messages that were handed to players and auditors."""
        return self._sum("delivered", "players") + self._sum("delivered", "auditors")

    @property
    def audited(self) -> int:
        """Messages that were handed to auditors."""
        return self._sum("delivered", "auditors")

    @property
    def migrations(self) -> int:
        """How many times a channel has moved."""
        return len(self._moves)

    @property
    def in_transition(self) -> int:
        """Channels that move now."""
        return 0 if self.plan is None else sum(e.phase is not Phase.SETTLED for e in self.plan.entries.values())

    def audit(self) -> dict[str, int]:
        """Return what the auditors, and the players themselves, have found so far."""
        found = {name: self._sum(name, "players") + self._sum(name, "auditors") for name in AUDITED}
        # A loss that is reported by a gap event is a loss all the same.
        found["lost"] += found.pop("covered_losses")
        return found

    def channels_at(self) -> dict[str, int]:
        """Return how many tiles are at each server."""
        counts = dict.fromkeys(self.servers, 0)
        if self.plan is not None:
            for channel in self.channels:
                for server in self.plan.entry(channel).told.assignment.servers:
                    counts[server] += 1
        return counts

    def rates(self) -> tuple[float, float]:
        """Return updates published and messages delivered per second, over the last seconds."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        first, last = self._samples[0], self._samples[-1]
        duration_s = max(last.at - first.at, 1e-9)
        return (last.published - first.published) / duration_s, (last.delivered - first.delivered) / duration_s

    def summary(self) -> dict[str, Any]:
        """Return the result of the demo, for ``--json``."""
        results = [worker.result or {} for worker in self.workers]
        stories = [story for result in results for story in result.get("stories", ())]
        return {
            "clean": not self.faults(),
            "faults": self.faults(),
            "published": self.published,
            "delivered": self.delivered,
            "audited": self.audited,
            **self.audit(),
            "violations": sum(result.get("violations", 0) for result in results),
            "errors": self._sum("errors", "players") + self._sum("errors", "auditors"),
            "skipped": sum((worker.stopped or {}).get("skipped", 0) for worker in self.workers),
            "migrations": self.migrations,
            "plan_version": None if self.plan is None else self.plan.version,
            "latency_ms_p50": self.latencies.quantile_ms(0.50),
            "latency_ms_p99": self.latencies.quantile_ms(0.99),
            "load_ratios_before": self.load_ratios_before,
            "load_ratios_after": self.load_ratios,
            "load_ratio_peak": self.load_ratio_peak,
            "stories": stories[:STORIES_SHOWN_MAX],
        }

    def faults(self) -> list[str]:
        """Return, in words, why the demo has failed: nothing when the audit is clean, and was one."""
        faults: list[str] = []
        if any(worker.result is None for worker in self.workers) or not self.workers:
            faults.append("not every worker has judged")
        if self.audited == 0:
            faults.append("the auditors have seen nothing, so nothing was checked")
        faults += [f"{count} {name}" for name, count in self.audit().items() if count]
        violations = sum((worker.result or {}).get("violations", 0) for worker in self.workers)
        if violations and len(faults) == 0:
            faults.append(f"{violations} violations")
        errors = self._sum("errors", "players") + self._sum("errors", "auditors")
        if errors:
            faults.append(f"{errors} errors of clients")
        return faults

    def _sum(self, name: str, role: str) -> int:
        return sum(worker.stats.get(name, 0) for worker in self.workers if worker.role == role)
