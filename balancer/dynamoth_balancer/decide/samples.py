"""The reports of one server that the model averages over, and their sums by channel.

A decision asks for the channels of few servers. So a report is only put aside, and the sums of a window are made when
somebody asks for them, and kept until it changes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress


@dataclass(slots=True)
class Sample:
    """One report, reduced to the averaged figures: bytes sent in its interval, and parts of all CPU times seconds.

    A server that is full sends no more than it can, and the rest waits in its output buffers. ``due_bytes`` are all
    bytes that are due to subscribers: each message of each channel, once for each.
    """

    begins: float
    arrived: float
    interval_s: float
    #: Of the whole server, without the attributed channels.
    outgoing_bytes: float
    due_bytes: float
    cpu_s: float
    #: What one delivery cost.
    delivery_cpu_s: float
    #: How many channels have names of their own. The sums of slots follow them, under the slots' names.
    named: int
    channels: tuple[bytes, ...]
    #: Of each channel; 0 where it is attributed. The deliveries, each of which cost ``delivery_cpu_s``, likewise.
    channel_bytes: array[float]
    deliveries: array[float]
    publications: array[float]
    publishers: array[float]
    subscribers: array[float]
    #: The channels with a load; None while nobody has asked.
    _loaded: set[bytes] | None = field(default=None, init=False)

    def shows(self, channel: bytes) -> bool:
        """Return whether it shows a load of a channel."""
        if self._loaded is None:
            self._loaded = set(compress(self.channels, self.channel_bytes))
            if self.delivery_cpu_s:
                self._loaded.update(compress(self.channels, self.deliveries))
        return channel in self._loaded

    def strip(self, channels: Mapping[bytes, object]) -> None:
        """Remove the load of some channels."""
        if channels.keys().isdisjoint(self.channels):
            return
        for index, channel in enumerate(self.channels):
            if channel in channels:
                self.outgoing_bytes = max(0.0, self.outgoing_bytes - self.channel_bytes[index])
                self.due_bytes = max(0.0, self.due_bytes - self.channel_bytes[index])
                self.channel_bytes[index] = 0.0
                self.cpu_s = max(0.0, self.cpu_s - self.deliveries[index] * self.delivery_cpu_s)
                self.deliveries[index] = 0.0
        self._loaded = None


@dataclass(slots=True)
class ChannelSum:
    """The load of one channel in all samples of a window."""

    outgoing_bytes: float = 0.0
    cpu_s: float = 0.0


class Window:
    """The samples in the average of one server, oldest first."""

    def __init__(self) -> None:
        #: Changed only here.
        self.samples: deque[Sample] = deque()
        #: None while they are out of date.
        self._sums: dict[bytes, ChannelSum] | None = {}

    @property
    def weight_s(self) -> float:
        """The length of all intervals together."""
        return sum(sample.interval_s for sample in self.samples)

    @property
    def sums(self) -> Mapping[bytes, ChannelSum]:
        """The load of each channel that some sample names."""
        if self._sums is None:
            self._sums = _sums(self.samples)
        return self._sums

    def shows(self, channel: bytes) -> bool:
        """Return whether some sample shows a load of a channel. It costs no sums, as it is asked for many servers."""
        return any(sample.shows(channel) for sample in self.samples)

    def add(self, sample: Sample) -> None:
        """Add the newest sample. From now on, only :meth:`strip` may change it."""
        self.samples.append(sample)
        self._sums = None

    def drop_oldest(self) -> None:
        """Remove the oldest sample, if there is one."""
        if self.samples:
            self.samples.popleft()
            self._sums = None

    def clear(self) -> None:
        """Remove all samples."""
        self.samples.clear()
        self._sums = None

    def strip(self, channels: Mapping[bytes, object]) -> None:
        """Remove the load of some channels from all samples."""
        for sample in self.samples:
            sample.strip(channels)
        if self._sums is not None:
            self._sums.update((channel, ChannelSum()) for channel in channels.keys() & self._sums.keys())

    def check(self) -> None:
        """Assert that the sums are those of the samples."""
        assert self._sums is None or self._sums == _sums(self.samples), (
            "the sums of a window are not those of its samples"
        )


def _sums(samples: Iterable[Sample]) -> dict[bytes, ChannelSum]:
    sums: dict[bytes, ChannelSum] = {}
    for sample in samples:
        each_s = sample.delivery_cpu_s
        for channel, count, deliveries in zip(sample.channels, sample.channel_bytes, sample.deliveries, strict=True):
            known = sums.get(channel)
            if known is None:
                known = sums[channel] = ChannelSum()
            known.outgoing_bytes += count
            known.cpu_s += deliveries * each_s
    return sums
