"""What the demo knows: put together from its workers, the stored plan and the balancer; and what comes out of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamoth.plan.plan import Mode, Phase, Plan, Route
from dynamoth.plan.slots import is_slot
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_cli.numbers import channel_name
from dynamoth_demo.festival import Festival
from dynamoth_demo.latency import LatencyCounts
from dynamoth_demo.scene import Elasticity

RATE_WINDOW_S = 3.0
NEWS_KEPT_MAX = 100
MOVES_SHOWN_MAX = 4
STORIES_SHOWN_MAX = 10
HOT_SHOWN_MAX = 3
"""How much news is kept; how many moves of one decision, stories and hot channels are shown."""

FINDING_INTERVAL_S = 8.0
"""Time between two lines that say why a server stays overloaded: the balancer finds that each second."""

PUBLISHING = ("players", "performers")
LISTENING = ("players", "auditors")
ROLES = ("players", "auditors", "performers")
"""Roles of workers."""

_SINGLE = mode_name(Mode.SINGLE)

AUDITED = ("lost", "covered_losses", "duplicated", "reordered", "gaps")


@dataclass(slots=True)
class WorkerState:
    """The events of one worker, summed up."""

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
    #: Published at the festival.
    performed: int


@dataclass(frozen=True, slots=True)
class HotChannel:
    """A channel that is, or may come to be, at several servers, and where clients look for it."""

    name: str
    mode: str
    servers: tuple[str, ...]
    is_changing: bool


class DemoState:
    """Everything that is shown and judged.

    Args:
        servers: ids.
        channels: of all tiles.
        seconds: how long players play.
        festival: None where there is none.
        elasticity: how servers come and go; None where their number is fixed.
    """

    def __init__(
        self,
        servers: Sequence[str],
        channels: Sequence[bytes],
        seconds: float,
        festival: Festival | None = None,
        elasticity: Elasticity | None = None,
    ) -> None:
        self.servers = list(servers)
        self.channels = list(channels)
        self.seconds = seconds
        self.festival = festival
        self.elasticity = elasticity
        #: The present stage of the demo, in words.
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
        #: The newest route that a plan has had for each channel: one that changes gets a new epoch.
        self._routes: dict[bytes, Route] = {}
        #: How many times a slot has gone from one server to another.
        self.slots_moved = 0
        #: How many times a channel has gone from one server to another; from one to several; to several others, or
        #: to as many in another mode; and from several to one. Counted when it begins.
        self.migrations = 0
        self.replicated = 0
        self.replicas_changed = 0
        self.folded_back = 0
        #: The most servers that a channel had at once.
        self.replicas_max = 1
        #: The latest status of the balancer, and why it does not answer.
        self.balancer: Mapping[str, Any] | None = None
        self.balancer_problem: str | None = None
        #: The number of the latest decision that was taken.
        self._decision_seen = 0
        #: When a finding about a server is shown again.
        self._finding_due_s: dict[str, float] = {}
        #: Newest last; and how many there were, those that are forgotten included.
        self.news: deque[str] = deque(maxlen=NEWS_KEPT_MAX)
        self.news_count = 0
        #: Load ratios by server: the latest, those just before the first move, and the highest of each.
        self.load_ratios: dict[str, float | None] = dict.fromkeys(self.servers)
        self.load_ratios_before: dict[str, float | None] | None = None
        self.load_ratio_peak = 0.0
        #: The server that was killed, and when; None before.
        self.killed: str | None = None
        self._killed_at = 0.0
        #: How long the channels of that server were without a server, by the plan; None while some are.
        self.served_s: float | None = None
        #: The latest state of the fleet; None where the number of servers is fixed.
        self.fleet: Mapping[str, Any] | None = None
        #: The living servers of the plan: at first, and the most at once.
        self.servers_at_first = self.servers_at_most = len(self.servers)

    # What comes in.

    def take_event(self, worker: WorkerState, event: dict[str, Any]) -> None:
        """Handle an event of a worker."""
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

    def take_plan(self, plan: Plan, now: float = 0.0) -> None:
        """Handle the plan that a server stored at a time of the monotonic clock."""
        self._take_servers(list(plan.servers))
        self.plan = plan
        if self.killed is not None and self.served_s is None and not self.channels_at()[self.killed]:
            self.served_s = now - self._killed_at
            self._tell(
                f"{self._time()}  others serve all channels of {self.killed}, {self.served_s:.1f} s after its death"
            )
        for channel, entry in plan.entries.items():
            for route in reversed(entry.live_routes):
                self._take_route(channel, route)

    def _take_servers(self, servers: list[str]) -> None:
        """Report which servers have come and gone."""
        before, self.servers = self.servers, servers
        number = len(self.alive)
        self.servers_at_most = max(self.servers_at_most, number)
        for id_ in [id_ for id_ in servers if id_ not in before]:
            self._tell(f"{self._time()}  {id_} joins the cluster: {number} servers")
        for id_ in [id_ for id_ in before if id_ not in servers]:
            self._tell(f"{self._time()}  {id_} has left the cluster: {number} servers")

    def _take_route(self, channel: bytes, route: Route) -> None:
        """Count a change of a channel, when its epoch is new."""
        known = self._routes.get(channel)
        if route.epoch <= (0 if known is None else known.epoch):
            return
        self._routes[channel] = route
        was_single = known is None or known.assignment.mode is Mode.SINGLE
        is_single = route.assignment.mode is Mode.SINGLE
        if is_slot(channel):
            self.slots_moved += 1
            return
        self.migrations += was_single and is_single
        self.replicated += was_single and not is_single
        self.replicas_changed += not was_single and not is_single
        self.folded_back += not was_single and is_single
        self.replicas_max = max(self.replicas_max, len(route.assignment.servers))

    def take_balancer(self, status: Mapping[str, Any]) -> None:
        """Handle the status of the balancer."""
        self.balancer, self.balancer_problem = status, None
        self.fleet = status.get("fleet")
        self.load_ratios = {id_: server["load_ratio"] for id_, server in status["servers"].items()}
        known = [ratio for ratio in self.load_ratios.values() if ratio is not None]
        self.load_ratio_peak = max([self.load_ratio_peak, *known])
        if not self._routes and len(known) == len(self.servers):
            self.load_ratios_before = dict(self.load_ratios)
        for decision in status["decisions"]:
            self._take_decision(decision)

    def on_kill(self, server: str, now: float) -> None:
        """Record that a server was killed, at a time of the monotonic clock."""
        self.killed, self._killed_at = server, now
        tiles = self.channels_at()[server]
        self._tell(f"{self._time()}  {server} is killed (SIGKILL), with its agent; it had {tiles} channels")

    @property
    def alive(self) -> list[str]:
        """The servers of the plan but the one that was killed."""
        return [id_ for id_ in self.servers if id_ != self.killed]

    @property
    def has_shrunk(self) -> bool:
        """Whether there are as many servers as at first, and none is coming or going."""
        is_calm = self.fleet is None or all(each["life"] == "active" for each in self.fleet["servers"].values())
        return is_calm and len(self.alive) <= self.servers_at_first

    def take_problem(self, problem: str) -> None:
        """Record why plan or balancer do not answer."""
        self.balancer_problem = problem

    def sample(self, now: float) -> None:
        """Note the sums, for rates."""
        if now >= self._latencies_next_since + RATE_WINDOW_S:
            self.latencies_now, self._latencies_next = self._latencies_next, LatencyCounts()
            self._latencies_next_since = now
        self._samples.append(Sample(now, self.published, self.delivered, self.performed))
        while self._samples[0].at < now - RATE_WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()

    def _take_decision(self, decision: Mapping[str, Any]) -> None:
        if decision["number"] <= self._decision_seen:  # each status repeats it
            return
        self._decision_seen = decision["number"]
        time = self._time(decision["age_s"])
        moves = decision["first_moves"]
        slots = [move for move in moves if is_slot(move["channel"])]
        shown = [move for move in moves if _replicates(move)]
        shown += [move for move in moves if move not in shown and move not in slots][:MOVES_SHOWN_MAX]
        for move in shown:
            self._tell(f"{time}  {channel_name(move['channel'])}  {_describe_move(move)}")
        more = decision["moves"] - len(shown)
        if slots:
            self._tell(f"{time}  slots: {more}  {slots[0]['reason']}")
        elif more:
            self._tell(f"{time}  and {more} more moves")
        for finding in decision["findings"]:
            if self.elapsed_s >= self._finding_due_s.get(finding["server"], 0.0):
                self._finding_due_s[finding["server"]] = self.elapsed_s + FINDING_INTERVAL_S
                self._tell(f"{time}  {finding['server']} at {finding['load_ratio']:.2f}: {finding['reason']}")

    def _time(self, age_s: float = 0.0) -> str:
        """Return a moment, as seconds since the players began."""
        return f"{max(0, round(self.elapsed_s - age_s)):3d} s"

    def _tell(self, news: str) -> None:
        self.news.append(news)
        self.news_count += 1

    # What comes out.

    @property
    def published(self) -> int:
        """Messages that players and performers have published."""
        return self._sum("published", *PUBLISHING)

    @property
    def performed(self) -> int:
        """Messages that performers have published."""
        return self._sum("published", "performers")

    @property
    def delivered(self) -> int:
        """Messages that were handed to players and auditors."""
        return self._sum("delivered", *LISTENING)

    @property
    def audited(self) -> int:
        """Messages that were handed to auditors."""
        return self._sum("delivered", "auditors")

    @property
    def in_transition(self) -> int:
        """Channels that move now."""
        return 0 if self.plan is None else sum(e.phase is not Phase.SETTLED for e in self.plan.entries.values())

    def audit(self) -> dict[str, int]:
        """Return what the auditors, and the players themselves, have found so far."""
        found = {name: self._sum(name, *LISTENING) for name in AUDITED}
        if self.elasticity is None:  # a loss that is reported by a gap event is a loss all the same
            found["lost"] += found.pop("covered_losses")
        return found

    @property
    def allowed(self) -> tuple[str, ...]:
        """What the audit may count: a loss that a gap event reports, where a server is killed."""
        return () if self.elasticity is None else ("gaps", "covered_losses")

    def channels_at(self) -> dict[str, int]:
        """Return how many tiles are at each server."""
        counts = dict.fromkeys(self.servers, 0)
        if self.plan is not None:
            for channel in self.channels:
                for server in self.plan.entry(channel).client_route.assignment.servers:
                    counts[server] += 1
        return counts

    def rate(self, name: str) -> float:
        """Return how many messages were published, delivered or performed per second, over the last seconds."""
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return float(getattr(last, name) - getattr(first, name)) / max(last.at - first.at, 1e-9)

    def hot_channels(self) -> list[HotChannel]:
        """Return the channel of the festival, and the first of any others that are at several servers."""
        if self.plan is None:
            return []
        entries = self.plan.entries.items()
        replicated = [name for name, entry in entries if entry.client_route.assignment.mode is not Mode.SINGLE]
        festival = [] if self.festival is None else [self.festival.channel]
        return [self._hot_channel(self.plan, name) for name in dict.fromkeys([*festival, *sorted(replicated)])][
            :HOT_SHOWN_MAX
        ]

    @staticmethod
    def _hot_channel(plan: Plan, channel: bytes) -> HotChannel:
        entry = plan.entry(channel)
        assignment = entry.client_route.assignment
        is_changing = entry.phase is not Phase.SETTLED
        return HotChannel(channel_name(channel), mode_name(assignment.mode), assignment.servers, is_changing)

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
            "servers": self.servers_at_first,
            "killed": self.killed,
            "served_s": self.served_s,
            "servers_at_most": self.servers_at_most,
            "servers_in_the_end": len(self.alive),
            "server_seconds": None if self.fleet is None else self.fleet["server_seconds"],
            "publishes_failed": self._sum("publishes_failed", *PUBLISHING),
            "violations": sum(result.get("violations", 0) for result in results),
            "errors": self._sum("errors", *ROLES),
            "skipped": sum((worker.stopped or {}).get("skipped", 0) for worker in self.workers),
            "migrations": self.migrations,
            "slots_moved": self.slots_moved,
            "replicated": self.replicated,
            "replicas_changed": self.replicas_changed,
            "folded_back": self.folded_back,
            "replicas_max": self.replicas_max,
            "festival": None if self.festival is None else self.festival.name,
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
        faults += [f"{count} {name}" for name, count in self.audit().items() if count and name not in self.allowed]
        violations = sum((worker.result or {}).get("violations", 0) for worker in self.workers)
        if violations and len(faults) == 0:
            faults.append(f"{violations} violations")
        errors = self._sum("errors", *ROLES)
        if errors:
            faults.append(f"{errors} errors of clients")
        return faults if self.elasticity is None else faults + self._faults_of_servers(self.elasticity)

    def _faults_of_servers(self, elasticity: Elasticity) -> list[str]:
        """Return, in words, which changes of the servers did not happen, or not in time."""
        faults: list[str] = []
        if self.servers_at_most <= self.servers_at_first:
            faults.append("no server was added under load")
        if self.killed is None:
            faults.append("no server was killed")
        elif self.served_s is None:
            faults.append(f"nobody serves the channels of {self.killed}")
        elif self.served_s > elasticity.served_s_max:
            faults.append(f"the channels of {self.killed} were served again after {self.served_s:.1f} s only")
        if self.killed is not None and not self._sum("gaps", *LISTENING):
            faults.append(f"nobody noticed the death of {self.killed}: there was no gap event")
        if not self.has_shrunk:
            faults.append(f"{len(self.alive)} servers are left, not {self.servers_at_first}")
        return faults

    def _sum(self, name: str, *roles: str) -> int:
        return sum(worker.stats.get(name, 0) for worker in self.workers if worker.role in roles)


def _replicates(move: Mapping[str, Any]) -> bool:
    """Tell whether a channel is, or will be, at several servers."""
    return not move["mode_before"] == move["mode_after"] == _SINGLE


def _describe_move(move: Mapping[str, Any]) -> str:
    """Return what a decision does with a channel, with the load ratios of servers before and after."""
    was_single, is_single = move["mode_before"] == _SINGLE, move["mode_after"] == _SINGLE
    if was_single and is_single:
        before, after = move["load_ratio_from_before"], move["load_ratio_from_after"]
        return f"{move['from']} -> {move['to']}  ({move['from']}: {before:.2f} -> {after:.2f})  {move['reason']}"
    if is_single:
        what = f"folded back: {move['from']} -> {move['to']}"
    else:
        what = f"{'split' if was_single else 'changed'}: {move['from']} -> {move['to']} {move['mode_after']}"
    ratios = ", ".join(
        f"{server}: {before:.2f} -> {after:.2f}" for server, (before, after) in move["load_ratios"].items()
    )
    return f"{what}  ({ratios})  {move['reason']}"
