"""The model of the cluster: how loaded each server is, and by which channels, from the reports of the agents.

Theory of operation
-------------------
Per server the model keeps the samples of the last ``averaging_s`` (one per report) and averages over them when asked.

Load on its way counts as load. When a channel is moved, its average is *attributed* to the new server at once, and
taken out of what the old one has reported. From then until the channel has settled, what reports say of it is ignored
at both servers: it is sent at both, by forwarding, and would count twice (DESIGN 7, number 19). After it has settled,
each report whose whole interval is younger takes over its share of the average from the attribution.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dynamoth.reports import Report
from dynamoth_balancer.goals import ChannelRate, ServerLoad

SAMPLES_MAX = 200
"""Bound of the samples per server: ``averaging_s`` of 10 s at 20 reports per second. Older ones go earlier then."""

INTERVAL_S_MIN = 0.01
INTERVAL_S_MAX = 3600.0
BYTES_PER_S_MAX = 1e13
"""A report beyond these was not measured by an agent of ours: 100 times the fastest networks."""


@dataclass(slots=True)
class _Sample:
    """One report, reduced to what is averaged: bytes sent in its interval."""

    begins: float
    arrived: float
    interval_s: float
    #: By the whole server, without the channels that are attributed.
    outgoing_bytes: float
    channels: tuple[bytes, ...]
    #: By each channel; 0 where it is attributed.
    channel_bytes: array[float]

    def strip(self, channels: Mapping[bytes, object]) -> None:
        """Take some channels out."""
        for index, channel in enumerate(self.channels):
            if channel in channels:
                self.outgoing_bytes = max(0.0, self.outgoing_bytes - self.channel_bytes[index])
                self.channel_bytes[index] = 0.0


@dataclass(slots=True)
class _Attribution:
    """The load of a moved channel, where the plan has it."""

    source: str
    target: str
    rate: float
    #: When the transition settled; None before.
    settled: float | None = None

    def covers(self, sample: _Sample) -> bool:
        """Tell whether a sample says nothing of this channel that could be used."""
        return self.settled is None or sample.begins < self.settled


@dataclass(slots=True)
class _ServerModel:
    """What is known of one server."""

    capacity: float = 0.0
    latest: Report | None = None
    samples: deque[_Sample] = field(default_factory=deque[_Sample])
    #: Channels that are attributed to this server or away from it.
    attributed: dict[bytes, _Attribution] = field(default_factory=dict[bytes, _Attribution])
    #: One object per channel name, shared by all samples. Names of the latest sample only.
    names: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])


class ClusterModel:
    """Load ratios and busiest channels. Memory: (servers * samples * channels per report) * 16 bytes, and the names."""

    def __init__(self, servers: Iterable[str], averaging_s: float) -> None:
        self._averaging_s = averaging_s
        self._servers = {server: _ServerModel() for server in servers}
        #: Moved channels whose load is not yet proven by reports; at most one attribution for each.
        self._attributions: dict[bytes, _Attribution] = {}
        self.counters: Counter[str] = Counter()

    def report(self, report: Report, now: float) -> bool:
        """Take a report; tell whether it can have been measured."""
        if not _is_plausible(report):
            self.counters["reports_implausible"] += 1
            return False
        model = self._servers[report.server]
        model.capacity = float(report.outgoing_bytes_per_s_max)
        model.latest = report
        sample = self._sample(model, report, now)
        uncovered = {channel: a for channel, a in model.attributed.items() if a.covers(sample)}
        if uncovered:
            sample.strip(uncovered)
        model.samples.append(sample)
        self._forget_old(model, now)
        return True

    def _sample(self, model: _ServerModel, report: Report, now: float) -> _Sample:
        interval, columns = report.interval_s, report.columns
        channels: tuple[bytes, ...] = tuple(map(model.names.get, columns.channels, columns.channels))
        model.names = dict(zip(channels, channels, strict=True))
        outgoing = report.outgoing_bytes_per_s * interval
        return _Sample(now - interval, now, interval, outgoing, channels, array("d", columns.bytes_out))

    def _forget_old(self, model: _ServerModel, now: float) -> None:
        samples = model.samples
        while samples and (samples[0].arrived <= now - self._averaging_s or len(samples) > SAMPLES_MAX):
            samples.popleft()

    def agent_restarted(self, server: str) -> None:
        """Forget the averages of a server: what the agent measures from now on begins anew."""
        self._servers[server].samples.clear()

    # Channels on their way.

    def moved(self, moves: Mapping[bytes, tuple[str, str]], now: float) -> None:
        """Attribute channels, each moved from a source to a target, to their targets."""
        by_source: dict[str, dict[bytes, _Attribution]] = {}
        for channel, (source, target) in moves.items():
            by_source.setdefault(source, {})[channel] = _Attribution(source, target, 0.0)
        for source, attributions in by_source.items():
            self._forget_old(self._servers[source], now)
            averages = self.channel_rates(source)
            for channel, attribution in attributions.items():
                self._drop(channel)
                attribution.rate = averages.get(channel, 0.0)
                self._attributions[channel] = attribution
                for server in (attribution.source, attribution.target):
                    self._servers[server].attributed[channel] = attribution
        for server in {server for pair in moves.values() for server in pair}:
            for sample in self._servers[server].samples:
                sample.strip(moves)

    def settled(self, channels: Iterable[bytes], now: float) -> None:
        """From now on reports tell the truth about these channels."""
        for channel in channels:
            if (attribution := self._attributions.get(channel)) is not None:
                attribution.settled = now

    def _drop(self, channel: bytes) -> None:
        attribution = self._attributions.pop(channel, None)
        if attribution is not None:
            for server in (attribution.source, attribution.target):
                self._servers[server].attributed.pop(channel, None)

    def forget_proven(self, now: float) -> None:
        """Drop the attributions of which no sample in the average depends any more. To be called now and then."""
        proven = [
            channel
            for channel, attribution in self._attributions.items()
            if attribution.settled is not None
            and now - attribution.settled > self._averaging_s
            and not any(attribution.covers(sample) for sample in self._servers[attribution.target].samples)
            and self._servers[attribution.target].samples
        ]
        for channel in proven:
            self._drop(channel)

    # Averages.

    def load(self, server: str, now: float) -> ServerLoad | None:
        """Return the estimated load of a server, None while no report of it is in the average."""
        model = self._servers[server]
        self._forget_old(model, now)
        weight = sum(sample.interval_s for sample in model.samples)
        if not weight:
            return None
        rate = sum(sample.outgoing_bytes for sample in model.samples) / weight
        rate += sum(a.rate * self._share(a, model, weight) for a in model.attributed.values() if a.target == server)
        return ServerLoad(server, rate, model.capacity)

    def samples(self, server: str) -> int:
        """Return how many reports are in the average of a server."""
        return len(self._servers[server].samples)

    def latest(self, server: str) -> Report | None:
        """Return the latest report of a server."""
        return self._servers[server].latest

    def channels(self, server: str) -> list[ChannelRate]:
        """Return the estimated load of each channel that is known by name at a server, in no order."""
        return [ChannelRate(rate, channel) for channel, rate in self.channel_rates(server).items() if rate > 0]

    def channel_rates(self, server: str) -> dict[bytes, float]:
        """Return the estimated outgoing bytes/s of each channel that is known by name at a server."""
        model = self._servers[server]
        weight = sum(sample.interval_s for sample in model.samples)
        sums: dict[bytes, float] = {}
        for sample in model.samples:
            for channel, count in zip(sample.channels, sample.channel_bytes, strict=True):
                sums[channel] = sums.get(channel, 0.0) + count
        rates = {channel: count / weight for channel, count in sums.items()}
        for channel, attribution in model.attributed.items():
            if attribution.target == server:
                rates[channel] = rates.get(channel, 0.0) + attribution.rate * self._share(attribution, model, weight)
        return rates

    @staticmethod
    def _share(attribution: _Attribution, model: _ServerModel, weight: float) -> float:
        """Return which share of the average knows nothing of the attributed channel, from 0 to 1."""
        if attribution.settled is None or not weight:
            return 1.0
        return sum(sample.interval_s for sample in model.samples if attribution.covers(sample)) / weight


def _is_plausible(report: Report) -> bool:
    return (
        INTERVAL_S_MIN <= report.interval_s <= INTERVAL_S_MAX
        and report.outgoing_bytes_per_s <= BYTES_PER_S_MAX
        and sum(report.columns.bytes_out) <= BYTES_PER_S_MAX * report.interval_s
    )
