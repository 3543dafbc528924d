"""The reports of one server that the model averages over, and their sums by channel.

The sums are kept up to date with each report that comes or goes, so that reading them costs the same however many
reports there are. They are exact: bytes are whole numbers, the cost of a delivery is rounded (:func:`rounded`), and
floating-point numbers add both without error.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

COST_STEPS_PER_S = 2.0**40
"""Costs are whole numbers of picoseconds, roughly: a delivery costs 280,000 of them or more, and the sums of ten
seconds of a thousand cores still fit into the 53 bits of a float."""


def rounded(cost_s: float) -> float:
    """Return the cost of a delivery as a number of which whole multiples add up exactly."""
    return round(cost_s * COST_STEPS_PER_S) / COST_STEPS_PER_S


@dataclass(slots=True)
class Sample:
    """One report, reduced to the averaged figures: bytes sent in its interval, and parts of all CPU times seconds."""

    begins: float
    arrived: float
    interval_s: float
    #: Of the whole server, without the attributed channels.
    outgoing_bytes: float
    cpu_s: float
    #: What one delivery cost; see :func:`rounded`.
    delivery_cpu_s: float
    channels: tuple[bytes, ...]
    #: Of each channel; 0 where it is attributed. The CPU likewise.
    channel_bytes: array[float]
    channel_cpu_s: array[float]
    publications: array[float]
    publishers: array[float]
    subscribers: array[float]

    def strip(self, channels: Mapping[bytes, object]) -> None:
        """Remove the load of some channels."""
        for index, channel in enumerate(self.channels):
            if channel in channels:
                self.outgoing_bytes = max(0.0, self.outgoing_bytes - self.channel_bytes[index])
                self.channel_bytes[index] = 0.0
                self.cpu_s = max(0.0, self.cpu_s - self.channel_cpu_s[index])
                self.channel_cpu_s[index] = 0.0


@dataclass(slots=True)
class ChannelSum:
    """The load of one channel in all samples of a window, and how often they name it (at least once)."""

    outgoing_bytes: float
    cpu_s: float
    samples: int = 1


class Window:
    """The samples in the average of one server, oldest first."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()
        #: By channel that some sample names. Changed together with the samples, only here.
        self.sums: dict[bytes, ChannelSum] = {}

    @property
    def weight_s(self) -> float:
        """The length of all intervals together."""
        return sum(sample.interval_s for sample in self.samples)

    def add(self, sample: Sample) -> None:
        """Add the newest sample. From now on, only :meth:`strip` may change it."""
        self.samples.append(sample)
        sums = self.sums
        for channel, count, cpu_s in _loads(sample):
            known = sums.get(channel)
            if known is None:
                sums[channel] = ChannelSum(count, cpu_s)
            else:
                known.outgoing_bytes += count
                known.cpu_s += cpu_s
                known.samples += 1

    def drop_oldest(self) -> None:
        """Remove the oldest sample, if there is one."""
        if not self.samples:
            return
        sums = self.sums
        for channel, count, cpu_s in _loads(self.samples.popleft()):
            known = sums[channel]
            if known.samples == 1:
                del sums[channel]
            else:
                known.outgoing_bytes -= count
                known.cpu_s -= cpu_s
                known.samples -= 1

    def clear(self) -> None:
        """Remove all samples."""
        self.samples.clear()
        self.sums.clear()

    def strip(self, channels: Mapping[bytes, object]) -> None:
        """Remove the load of some channels from all samples."""
        known = self.sums.keys() & channels.keys()
        if not known:
            return
        for sample in self.samples:
            sample.strip(channels)
        for channel in known:
            self.sums[channel].outgoing_bytes = self.sums[channel].cpu_s = 0.0

    def check(self) -> None:
        """Assert that the sums are those of the samples."""
        expected: dict[bytes, ChannelSum] = {}
        for sample in self.samples:
            for channel, count, cpu_s in _loads(sample):
                known = expected.setdefault(channel, ChannelSum(0.0, 0.0, 0))
                known.outgoing_bytes += count
                known.cpu_s += cpu_s
                known.samples += 1
        assert self.sums == expected, "the sums of a window are not those of its samples"


def _loads(sample: Sample) -> Iterable[tuple[bytes, float, float]]:
    return zip(sample.channels, sample.channel_bytes, sample.channel_cpu_s, strict=True)
