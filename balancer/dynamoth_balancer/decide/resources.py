"""The resources of a server that can run out, and the load of channels on those that moves relieve.

Theory of operation
-------------------
Dynamoth balances outgoing bytes (eq. 1) and names CPU as future work (section VII). Here the load ratio of a server is
that of the tighter one of these two. Both follow a channel when it moves. Connections and memory do not: clients stay
connected for their other channels, and most of the memory holds other keys. So a server that is nearly out of one of
them keeps its channels, and gets no more.

Redis does not say how much CPU a channel costs. Its work is counted in *deliveries*: one for each message sent to a
subscriber, and ``DELIVERIES_PER_PUBLICATION`` for each publication. The CPU of an interval, divided by all deliveries
of the interval, gives the cost of one. Other commands of an application use CPU as well, so the cost is bounded by
``DELIVERY_CPU_S_MAX``: CPU beyond is not that of channels, and moving them away would not lower it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from dynamoth.protocol.reports import Report

DELIVERIES_PER_PUBLICATION = 2.5
"""Measured: a PUBLISH without subscribers costs Redis 0.7 us, and each subscriber 0.28 us more."""

DELIVERY_CPU_S_MAX = 20e-6
"""Most CPU that one delivery can cost: 70 times the measured cost, for slow machines, TLS, and clients that wait for
each reply."""


class Resource(enum.Enum):
    """A resource that a server can run out of."""

    OUTGOING = "outgoing"
    CPU = "cpu"
    CONNECTIONS = "connections"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Load:
    """What a channel, or several, take of a server. Negative: what the server is relieved of."""

    outgoing_bytes_per_s: float = 0.0
    #: CPU as a part of all that counts (``cpu_ratio_max``).
    cpu_ratio: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.outgoing_bytes_per_s + other.outgoing_bytes_per_s, self.cpu_ratio + other.cpu_ratio)

    def __sub__(self, other: Load) -> Load:
        return self + -other

    def __neg__(self) -> Load:
        return Load(-self.outgoing_bytes_per_s, -self.cpu_ratio)

    def __mul__(self, factor: float) -> Load:
        return Load(self.outgoing_bytes_per_s * factor, self.cpu_ratio * factor)

    def __truediv__(self, divisor: float) -> Load:
        return Load(self.outgoing_bytes_per_s / divisor, self.cpu_ratio / divisor)

    def __bool__(self) -> bool:
        return self.outgoing_bytes_per_s != 0 or self.cpu_ratio != 0


NO_LOAD = Load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What counts as all of a resource where reports do not say it: settings of the balancer."""

    #: In cores; 0: CPU does not count.
    cpu_ratio_max: float = 1.0
    #: Of servers without ``maxmemory``; 0: not known.
    memory_bytes_max: int = 0
    #: A server that uses more of its connections or its memory is full.
    full_ratio: float = 0.9

    def cpu_ratio(self, cores: float) -> float:
        """Return CPU as a part of all that counts."""
        return cores / self.cpu_ratio_max if self.cpu_ratio_max else 0.0

    def fixed(self, report: Report) -> dict[Resource, float]:
        """Return how much of connections and memory, which no move frees, a server uses; known maxima only."""
        memory_max = report.memory_bytes_max or self.memory_bytes_max
        known = {
            Resource.CONNECTIONS: (report.connections, report.connections_max),
            Resource.MEMORY: (report.memory_bytes, memory_max),
        }
        return {resource: used / most for resource, (used, most) in known.items() if most}

    def why_full(self, ratios: Mapping[Resource, float]) -> str:
        """Return why a server that uses so much gets no channels, in words; empty when it may."""
        return " and ".join(
            f"{ratio:.2f} of its {resource.value}"
            for resource, ratio in ratios.items()
            if resource in FIXED and ratio > self.full_ratio
        )


FIXED = frozenset({Resource.CONNECTIONS, Resource.MEMORY})
"""The resources that no move of a channel frees."""


def delivery_cpu_s(report: Report) -> float:
    """Return the CPU seconds that one delivery cost in the interval of a report."""
    columns, rest = report.columns, report.rest
    total = deliveries(
        sum(columns.publications) + rest.publications,
        sum(columns.messages_sent) + rest.messages_sent,
    )
    return min(report.cpu_ratio * report.interval_s / total, DELIVERY_CPU_S_MAX) if total else 0.0


def deliveries(publications: float, messages_sent: float) -> float:
    """Return the work of Redis for some messages, in deliveries."""
    return DELIVERIES_PER_PUBLICATION * publications + messages_sent
