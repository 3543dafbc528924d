"""Models the load of the cluster, from the reports of agents: of each server, and of each of its channels.

Theory of operation
-------------------
Per server the model keeps the samples of the last ``averaging_s`` (one per report) and averages over them on request.
A load is outgoing bytes and CPU; ``resources`` says how the CPU of a channel is estimated. Connections and memory are
those of the latest report. The outgoing bytes of a server are those that it has sent or, if these are more, the bytes
that are due to subscribers: a server that is full cannot send them all.

Reports add up by slot what they do not name. Such a sum is kept under the name of its slot, as a channel's load is.

Load on its way counts as load. When the assignment of a channel changes, its average is *attributed* to the new servers
at once, and taken out of the samples of the old ones. From then until the channel has settled, reports about it are
ignored at all of them: forwarding makes old and new servers send it, so it would count twice. After it has settled,
each report whose whole interval is younger takes over its share of the average from the attribution.

The traffic of a channel in the cluster is the same in every mode: each publication to each subscriber. With n replicas
each sends about one n-th: under ALL_SUBSCRIBERS of the publications, under ALL_PUBLISHERS to the subscribers.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import MappingProxyType

from dynamoth.plan.plan import Assignment, Mode
from dynamoth.plan.slots import is_slot, slot_name
from dynamoth.protocol.reports import Report
from dynamoth_balancer.decide.cluster import ChannelFigures, ChannelRate, ServerLoad
from dynamoth_balancer.decide.resources import (
    DELIVERIES_PER_PUBLICATION,
    NO_LOAD,
    Bounds,
    Load,
    Resource,
    deliveries,
    delivery_cpu_s,
)
from dynamoth_balancer.decide.samples import Sample, Window
from dynamoth_balancer.options import INTERRUPTIONS_WINDOW_S

SAMPLES_MAX = 200
"""Bound of the samples per server: ``averaging_s`` of 10 s at 20 reports per second. With more, older ones go earlier.
"""

BUSY_MAX = 100
"""Bound of the channels per server that are judged one by one. The next ones follow when these are done."""

BLINDING_INTERRUPTIONS = 2
"""An agent that lost its observing connection this often within the window counts as blind. Once happens to any agent:
the server restarts, or the network fails."""

INTERRUPTIONS_MAX = 100
"""Bound of the interruptions that are remembered per server."""

NO_MEMBERS: Mapping[bytes, Iterable[bytes]] = MappingProxyType({})

INTERVAL_S_MIN = 0.01
INTERVAL_S_MAX = 3600.0
BYTES_PER_S_MAX = 1e13
CPU_RATIO_MAX = 1e4
"""A report beyond these is no measurement of an agent of ours: 100 times the fastest networks, 10 times the largest
machines."""


@dataclass(slots=True)
class _Attribution:
    """The load of a channel with a changed assignment, at the servers where the plan has it."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    #: Over all servers.
    load: Load
    #: When the transition settled; None before.
    settled: float | None = None

    @property
    def servers(self) -> set[str]:
        """Old and new servers."""
        return {*self.before, *self.after}

    def load_at(self, server: str) -> Load:
        """Return the load that is attributed to one server."""
        return self.load / len(self.after) if self.load and server in self.after else NO_LOAD

    def covers(self, sample: Sample) -> bool:
        """Return whether the figures of a sample for this channel cannot be used."""
        return self.settled is None or sample.begins < self.settled


@dataclass(frozen=True, slots=True)
class Blindness:
    """The agent of a server does not see what is published there."""

    since: float
    #: The reason, how often the connection was lost, and the cure, in words.
    reason: str


@dataclass(slots=True)
class _ServerModel:
    """The records of one server."""

    capacity: float = 0.0
    latest: Report | None = None
    #: When ``latest`` arrived.
    latest_at: float = -math.inf
    #: When its agent lost the observing connection, within the window.
    interrupted: deque[float] = field(default_factory=lambda: deque[float](maxlen=INTERRUPTIONS_MAX))
    #: Since when the agent is blind; None while it sees.
    blind_since: float | None = None
    window: Window = field(default_factory=Window)
    #: How many reports came since the agent began, or since none had been in the average.
    reports: int = 0
    #: The latest sample, even if it is too old for the average.
    newest: Sample | None = None
    #: Channels that are attributed to this server or away from it.
    attributed: dict[bytes, _Attribution] = field(default_factory=dict[bytes, _Attribution])
    #: One object per channel name, shared by all samples; names of the latest sample only.
    names: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])


class ClusterModel:
    """Load ratios, busiest channels, and the figures of channels in the whole cluster.

    Memory: (servers * samples * channels per report + samples * slots) * 48 bytes, and the names.
    """

    def __init__(
        self,
        servers: Iterable[str],
        averaging_s: float,
        interruptions_window_s: float = INTERRUPTIONS_WINDOW_S,
        bounds: Bounds | None = None,
    ) -> None:
        self._averaging_s = averaging_s
        self._bounds = bounds or Bounds()
        self._interruptions_window_s = interruptions_window_s
        self._servers = {server: _ServerModel() for server in servers}
        #: Moved channels whose load no report proves yet; at most one attribution for each.
        self._attributions: dict[bytes, _Attribution] = {}
        #: The known channels of slots in transition.
        self._members: dict[bytes, tuple[bytes, ...]] = {}
        #: When channels settled, while that matters to averages.
        self._settled_at: dict[bytes, float] = {}
        self.counters: Counter[str] = Counter()
        #: The servers whose agents are blind, and why. Only ever changed in place.
        self.blind: dict[str, str] = {}

    def add_server(self, server: str) -> None:
        """Begin with a new server."""
        self._servers[server] = _ServerModel()

    def remove_server(self, server: str) -> None:
        """Forget a server that has left the plan."""
        for channel in list(self._servers[server].attributed):
            self._drop(channel)
        del self._servers[server]
        self.blind.pop(server, None)

    def report(self, report: Report, now: float) -> bool:
        """Add a report; return whether it is plausible."""
        if not _is_plausible(report):
            self.counters["reports_implausible"] += 1
            return False
        model = self._servers[report.server]
        model.capacity = float(report.outgoing_bytes_per_s_max)
        self._watch(model, report, now)
        model.latest, model.latest_at = report, now
        if not report.observing:
            return True  # it has no channels: the earlier figures are the best there are
        model.newest = self._sample(model, report, now)
        self._take(model, model.newest)
        self._forget_old(model, now)
        return True

    @staticmethod
    def _take(model: _ServerModel, sample: Sample) -> None:
        """Add a sample, without the channels that are attributed meanwhile."""
        uncovered = {channel: a for channel, a in model.attributed.items() if a.covers(sample)}
        if uncovered:
            sample.strip(uncovered)
        model.window.add(sample)
        model.reports += 1

    def _watch(self, model: _ServerModel, report: Report, now: float) -> None:
        """Find out whether the agent is blind."""
        latest = model.latest
        if latest is None:
            known = report.interruptions  # those before our first report may be long past
        else:
            known = latest.interruptions if latest.incarnation == report.incarnation else 0
        model.interrupted.extend([now] * min(INTERRUPTIONS_MAX, max(0, report.interruptions - known)))
        while model.interrupted and model.interrupted[0] <= now - self._interruptions_window_s:
            model.interrupted.popleft()
        times = len(model.interrupted)
        if report.observing and times < BLINDING_INTERRUPTIONS:
            model.blind_since = None
            self.blind.pop(report.server, None)
            return
        if model.blind_since is None:
            model.blind_since = now - report.blind_s
            if not model.window.samples and model.newest is not None:
                self._take(model, model.newest)  # blindness shows late, but nothing newer can be known
        state = "sees" if report.observing else "does not see"
        lost = (
            f", and lost its connection {times} times in {self._interruptions_window_s:g} s: Redis disconnects an agent"
            " that reads too slowly"
        )
        self.blind[report.server] = (
            f"its agent {state} what is published{lost if times else ''}. The server counts as overloaded. Give the"
            " agent a whole CPU, and raise client-output-buffer-limit pubsub"
        )

    def blindness(self, server: str) -> Blindness | None:
        """Return since when and why the agent of a server is blind; None while it sees."""
        since = self._servers[server].blind_since
        return None if since is None else Blindness(since, self.blind[server])

    def report_age_s(self, server: str, now: float) -> float | None:
        """Return how old the latest report of a server is; None where there is none."""
        latest_at = self._servers[server].latest_at
        return None if math.isinf(latest_at) else now - latest_at

    def _sample(self, model: _ServerModel, report: Report, now: float) -> Sample:
        interval, columns, slots = report.interval_s, report.columns, report.slots
        channels: tuple[bytes, ...] = tuple(map(model.names.get, columns.channels, columns.channels))
        model.names = dict(zip(channels, channels, strict=True))
        channels += tuple(map(slot_name, slots.slots))
        cpu_s = self._bounds.cpu_ratio(report.cpu_ratio) * interval
        each_s = self._bounds.cpu_ratio(delivery_cpu_s(report))
        publications = columns.publications + slots.publications
        sent = columns.messages_sent + slots.messages_sent
        numbers = (
            *(columns.bytes_out + slots.bytes_out, _deliveries(publications, sent), publications),
            *(columns.publishers + (0,) * len(slots), columns.subscribers + slots.subscribers),
        )
        arrays = [array("d", column) for column in numbers]
        outgoing_bytes = report.loading_bytes_per_s * interval
        due_bytes = float(sum(columns.bytes_out) + report.rest.bytes_out)
        named = len(columns)
        return Sample(now - interval, now, interval, outgoing_bytes, due_bytes, cpu_s, each_s, named, channels, *arrays)

    def _forget_old(self, model: _ServerModel, now: float) -> None:
        samples = model.window.samples
        if model.blind_since is not None and samples:
            now = min(now, samples[-1].arrived)  # nothing newer can be known
        while samples and (samples[0].arrived <= now - self._averaging_s or len(samples) > SAMPLES_MAX):
            model.window.drop_oldest()
        if not samples:
            model.reports = 0

    def on_agent_restart(self, server: str) -> None:
        """Forget the averages of a server: the agent begins new measurements."""
        model = self._servers[server]
        model.window.clear()
        model.reports, model.newest = 0, None

    # Channels on their way.

    def on_moves(
        self,
        changes: Mapping[bytes, tuple[Assignment, Assignment]],
        now: float,
        members: Mapping[bytes, Iterable[bytes]] = NO_MEMBERS,
    ) -> None:
        """Attribute channels, each changed from one assignment to another, to their new servers.

        ``members`` has the known channels of each slot among them: they change as their slot does.
        """
        known = {slot: tuple(channels) for slot, channels in members.items()}
        self._members.update(known)
        changes = {**changes, **{channel: changes[slot] for slot, channels in known.items() for channel in channels}}
        sources = {server for before, _ in changes.values() for server in before.servers}
        for server in sources:
            self._forget_old(self._servers[server], now)
        averages = {server: self._loads_of(changes, server) for server in sources}
        touched: set[str] = set()
        for channel, (before, after) in changes.items():
            self._drop(channel)
            load = sum((averages[server][channel] for server in before.servers), NO_LOAD)
            attribution = self._attributions[channel] = _Attribution(before.servers, after.servers, load)
            for server in attribution.servers:
                self._servers[server].attributed[channel] = attribution
            touched |= attribution.servers
        for server in touched:
            self._servers[server].window.strip(changes)

    def _loads_of(self, channels: Iterable[bytes], server: str) -> dict[bytes, Load]:
        """Return the loads of some channels at a server."""
        weight = self._servers[server].window.weight_s
        return {channel: self._channel_load(server, channel, weight) for channel in channels}

    def on_settled(self, channels: Collection[bytes], now: float) -> None:
        """Believe reports about these channels again, from now on."""
        for channel in (*channels, *(c for slot in channels for c in self._members.pop(slot, ()))):
            self._settled_at[channel] = now
            if (attribution := self._attributions.get(channel)) is not None:
                attribution.settled = now

    def _drop(self, channel: bytes) -> None:
        attribution = self._attributions.pop(channel, None)
        if attribution is not None:
            for server in attribution.servers:
                self._servers[server].attributed.pop(channel, None)

    def forget_proven(self, now: float) -> None:
        """Drop attributions on which no sample in the average depends any more. The owner calls this now and then."""
        proven = [
            channel
            for channel, attribution in self._attributions.items()
            if attribution.settled is not None
            and now - attribution.settled > self._averaging_s
            and all(self._is_proven(attribution, server) for server in attribution.after)
        ]
        for channel in proven:
            self._drop(channel)
        horizon = now - 2 * self._averaging_s  # no report in the average begins earlier, as none is longer than that
        self._settled_at = {channel: at for channel, at in self._settled_at.items() if at >= horizon}

    def _is_proven(self, attribution: _Attribution, server: str) -> bool:
        """Return whether the average of a server rests on reports that include the channel."""
        samples = self._servers[server].window.samples
        return bool(samples) and not any(attribution.covers(sample) for sample in samples)

    def check(self) -> None:
        """Assert that attributions and blindness are recorded alike everywhere."""
        for server, model in self._servers.items():
            assert (model.blind_since is not None) == (server in self.blind), (
                f"{server} blind since {model.blind_since}"
            )
            model.window.check()
            for channel, attribution in model.attributed.items():
                assert self._attributions.get(channel) is attribution, f"{channel!r} is attributed twice"
        for channel, attribution in self._attributions.items():
            for server in attribution.servers:
                assert channel in self._servers[server].attributed, f"{channel!r} is not attributed at {server}"

    # Averages.

    def load(self, server: str, now: float) -> ServerLoad | None:
        """Return the estimated load of a server, None while no report of it is in the average."""
        model = self._servers[server]
        self._forget_old(model, now)
        weight = model.window.weight_s
        if not weight:
            if model.blind_since is None or model.latest is None:
                return None
            cpu_ratio = self._bounds.cpu_ratio(model.latest.cpu_ratio)
            return ServerLoad(server, model.latest.loading_bytes_per_s, model.capacity, cpu_ratio)
        samples = model.window.samples
        sent, due = sum(sample.outgoing_bytes for sample in samples), sum(sample.due_bytes for sample in samples)
        rate = max(sent, due) / weight
        load = ServerLoad(server, rate, model.capacity, sum(sample.cpu_s for sample in samples) / weight)
        for attribution in model.attributed.values():
            if part := attribution.load_at(server):  # most of a thousand slots that move together have none
                load.add(part * self._share(attribution, model, weight))
        return load

    def usage(self, server: str, now: float) -> dict[Resource, float]:
        """Return how much a server uses of each resource whose maximum is known; nothing without a recent report."""
        load, latest = self.load(server, now), self._servers[server].latest
        if load is None or latest is None:
            return {}
        known = {Resource.OUTGOING: load.outgoing_ratio, Resource.CPU: load.cpu_ratio, **self._bounds.fixed(latest)}
        return {resource: ratio for resource, ratio in known.items() if resource is not Resource.CPU or ratio}

    def why_full(self, server: str) -> str:
        """Return why a server gets no channels, in words: of what it uses nearly all; empty when it may get some."""
        latest = self._servers[server].latest
        return "" if latest is None else self._bounds.why_full(self._bounds.fixed(latest))

    def names(self, server: str, channel: bytes) -> bool:
        """Return whether the latest report of a server names a channel."""
        return channel in self._servers[server].names

    def is_busy(self, server: str, channel: bytes) -> bool:
        """Return whether a report in the average of a server shows a load of a channel, or one is on its way there."""
        model = self._servers.get(server)
        if model is None:
            return False
        return channel in model.attributed or model.window.shows(channel)

    def reports(self, server: str) -> int:
        """Return how many reports of a server came since its agent began, or since none had been in the average.

        The average has fewer where ``averaging_s`` is shorter than so many reports take.
        """
        return self._servers[server].reports

    def latest(self, server: str) -> Report | None:
        """Return the latest report of a server."""
        return self._servers[server].latest

    def channels(self, server: str) -> list[ChannelRate]:
        """Return the estimated load of each channel that is known by name at a server, in any order."""
        model = self._servers[server]
        window, attributed = model.window, model.attributed
        weight = window.weight_s
        loads = [
            ChannelRate(known.outgoing_bytes / weight, channel, known.cpu_s / weight)
            for channel, known in window.sums.items()
            if (known.outgoing_bytes or known.cpu_s) and channel not in attributed and not is_slot(channel)
        ]
        for channel in attributed:
            load = NO_LOAD if is_slot(channel) else self._channel_load(server, channel, weight)
            if load:
                loads.append(ChannelRate(load.outgoing_bytes_per_s, channel, load.cpu_ratio))
        return loads

    def slots(self, server: str) -> dict[bytes, Load]:
        """Return the estimated load that the channels of each slot have which are not known by name at a server."""
        model = self._servers[server]
        weight = model.window.weight_s
        names = {name for name in (*model.window.sums, *model.attributed) if is_slot(name)}
        return {name: self._channel_load(server, name, weight) for name in names}

    def channel_names(self, server: str) -> Set[bytes]:
        """Return the channels that are known by name at a server: by recent reports, or as they come there."""
        model = self._servers[server]
        coming = {channel for channel, attribution in model.attributed.items() if server in attribution.after}
        return {name for name in (*model.window.sums, *coming) if not is_slot(name)}

    def _channel_load(self, server: str, channel: bytes, weight: float) -> Load:
        """Return the average load of a channel at a server. ``weight``: that of its window."""
        model = self._servers[server]
        known, attribution = model.window.sums.get(channel), model.attributed.get(channel)
        load = NO_LOAD if known is None else Load(known.outgoing_bytes, known.cpu_s) / weight
        if attribution is not None and (part := attribution.load_at(server)):
            load += part * self._share(attribution, model, weight)
        return load

    def unnamed(self, server: str) -> Load:
        """Return the load of channels without a name in the latest report of a server that does not say of which slot.

        That is one of an earlier version. In others, what belongs to no slot is of channels that the plan names.
        """
        model = self._servers[server]
        if model.latest is None or model.newest is None or model.latest.slots:
            return NO_LOAD
        rest = model.latest.rest
        cpu_s = deliveries(rest.publications, rest.messages_sent) * model.newest.delivery_cpu_s
        return Load(rest.bytes_out, cpu_s) / model.latest.interval_s

    def subscriptions(self, server: str) -> tuple[dict[bytes, int], int]:
        """Return how many subscriptions each channel and slot has in the latest report of a server, and how many more.

        A slot has those of its channels that have no name there. INFO counts channels with a subscriber, so there are
        at least as many.
        """
        latest = self._servers[server].latest
        if latest is None:
            return {}, 0
        named = dict(zip(latest.columns.channels, latest.columns.subscribers, strict=True))
        named.update(zip(map(slot_name, latest.slots.slots), latest.slots.subscribers, strict=True))
        named_in_all = sum(named.values())
        counted = sum(latest.columns.subscribers) + latest.rest.subscribers
        return named, max(0, counted - named_in_all, latest.channels_subscribed - named_in_all)

    @staticmethod
    def _share(attribution: _Attribution, model: _ServerModel, weight: float) -> float:
        """Return the share of the average that does not include the attributed channel, from 0 to 1."""
        if attribution.settled is None or not weight:
            return 1.0
        return sum(sample.interval_s for sample in model.window.samples if attribution.covers(sample)) / weight

    # Figures of channels.

    def busy(self, server: str, outgoing_bytes_per_s_min: float, cpu_ratio_min: float) -> list[bytes]:
        """Return the busiest channels in the latest report of a server: those with at least one of these loads."""
        samples = self._servers[server].window.samples
        if not samples:
            return []
        latest = samples[-1]
        least, least_cpu_s = outgoing_bytes_per_s_min * latest.interval_s, cpu_ratio_min * latest.interval_s
        # The busiest first, as reports have them, and slots last.
        loads = islice(zip(latest.channels, latest.channel_bytes, strict=True), latest.named)
        by_bytes = [channel for channel, _ in islice(takewhile(lambda load: load[1] >= least, loads), BUSY_MAX)]
        if latest.cpu_s < least_cpu_s:
            return by_bytes
        least_deliveries = least_cpu_s / latest.delivery_cpu_s if latest.delivery_cpu_s else math.inf
        counts = islice(zip(latest.channels, latest.deliveries, strict=True), latest.named)
        by_cpu = [channel for channel, count in counts if count >= least_deliveries]
        return [*by_bytes, *(channel for channel in by_cpu[:BUSY_MAX] if channel not in by_bytes)]

    def figures(self, assignments: Mapping[bytes, Assignment]) -> list[ChannelFigures]:
        """Return the figures of settled channels, from the reports of each server.

        Left out are channels for which the average has a report from before they settled, or a server has not reported.
        """
        wanted = {server: model.names.keys() & assignments.keys() for server, model in self._servers.items()}
        for channel, assignment in assignments.items():
            for server in assignment.servers:
                wanted[server].add(channel)
        rows = {server: _rows(self._servers[server].window.samples, channels) for server, channels in wanted.items()}
        seen: dict[bytes, dict[str, _Row]] = {}
        for server, by_channel in rows.items():
            for channel, row in by_channel.items():
                seen.setdefault(channel, {})[server] = row
        return [
            _merge(channel, assignment, seen.get(channel, {}))
            for channel, assignment in assignments.items()
            if all(self._knows(server, channel) for server in assignment.servers)
        ]

    def _knows(self, server: str, channel: bytes) -> bool:
        """Return whether the average of a server is younger than the latest change of a channel."""
        samples = self._servers[server].window.samples
        settled_at = self._settled_at.get(channel)
        return bool(samples) and (settled_at is None or all(sample.begins >= settled_at for sample in samples))


@dataclass(slots=True)
class _Row:
    """One channel at one server, averaged; publishers: the most of any report."""

    outgoing_bytes_per_s: float = 0.0
    cpu_ratio: float = 0.0
    publications_per_s: float = 0.0
    publishers: float = 0.0
    subscribers: float = 0.0


def _rows(samples: Iterable[Sample], wanted: Set[bytes]) -> dict[bytes, _Row]:
    """Return the averages of those of the wanted channels that reports name."""
    rows: dict[bytes, _Row] = {}
    if not wanted:
        return rows
    weight = 0.0
    for sample in samples:
        weight += sample.interval_s
        for index in [index for index, channel in enumerate(sample.channels) if channel in wanted]:
            row = rows.setdefault(sample.channels[index], _Row())
            row.outgoing_bytes_per_s += sample.channel_bytes[index]
            row.cpu_ratio += sample.deliveries[index] * sample.delivery_cpu_s
            row.publications_per_s += sample.publications[index]
            row.publishers = max(row.publishers, sample.publishers[index])
            row.subscribers += sample.subscribers[index] * sample.interval_s
    for row in rows.values():
        row.outgoing_bytes_per_s /= weight
        row.cpu_ratio /= weight
        row.publications_per_s /= weight
        row.subscribers /= weight
    return rows


def _merge(channel: bytes, assignment: Assignment, rows: Mapping[str, _Row]) -> ChannelFigures:
    """Merge the rows of all servers into the figures of a channel.

    Under ALL_SUBSCRIBERS each replica counts the same subscribers, under ALL_PUBLISHERS the same publications.
    Publications at other servers, by clients with old routes, were forwarded from there. Forwarded copies do not count
    as publications, so these are added.
    """
    here = {server: rows.get(server, _NOTHING) for server in assignment.servers}
    publications = [row.publications_per_s for row in here.values()]
    publishers = [row.publishers for row in here.values()]
    subscribers = [row.subscribers for row in here.values()]
    same_publications = assignment.mode is Mode.ALL_PUBLISHERS
    same_subscribers = assignment.mode is Mode.ALL_SUBSCRIBERS
    elsewhere = sum(row.publications_per_s for server, row in rows.items() if server not in here)
    return ChannelFigures(
        channel,
        assignment,
        (max(publications) if same_publications else sum(publications)) + elsewhere,
        int(max(publishers) if same_publications else sum(publishers)),
        max(subscribers) if same_subscribers else sum(subscribers),
        {server: row.outgoing_bytes_per_s for server, row in here.items()},
        cpu_ratio={server: row.cpu_ratio for server, row in here.items()},
    )


_NOTHING = _Row()


def _deliveries(publications: Iterable[int], messages_sent: Iterable[int]) -> list[float]:
    """Return :func:`deliveries` of each channel; written out, as a call for each takes twice as long."""
    each = DELIVERIES_PER_PUBLICATION
    return [each * published + sent for published, sent in zip(publications, messages_sent, strict=True)]


def _is_plausible(report: Report) -> bool:
    return (
        INTERVAL_S_MIN <= report.interval_s <= INTERVAL_S_MAX
        and report.outgoing_bytes_per_s + report.control_bytes_per_s <= BYTES_PER_S_MAX
        and report.cpu_ratio <= CPU_RATIO_MAX
        and sum(report.columns.bytes_out) + sum(report.slots.bytes_out) <= BYTES_PER_S_MAX * report.interval_s
    )
