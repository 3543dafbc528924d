"""Measures the rates of a broker's interests, and how the loads of its users are distributed.

The fan-out path adds the bytes of each publication to its interest; everything else happens at a report. A rate is an
exponentially weighted average with a half-life of ``HALF_LIFE_S``, corrected for its start: an interest that came a
second ago has the rate of that second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from dynamoth.edge.control import USER_LOAD_CLASSES
from dynamoth_broker.coordinator.reports import user_load_class
from dynamoth_broker.interests import InterestTable, SharedInterest
from dynamoth_broker.sessions import Session

HALF_LIFE_S = 10.0

NEGLIGIBLE_BYTES_PER_S = 0.1
"""An average below this counts as 0: a publication of 1 KB is forgotten after some two minutes."""

SAMPLE_USERS = 1000
"""A report looks at this many users at most, others each time: 50,000 would take the broker 100 ms."""


@dataclass(slots=True)
class _Average:
    """The average of one interest, as if it had been 0 before ``since``."""

    interest: SharedInterest
    since: float
    value: float = 0.0


class Rates:
    """The rates of all interests. Memory: those with a rate."""

    def __init__(self, interests: InterestTable, now: float) -> None:
        """Begin to measure now."""
        self._interests = interests
        self._begun_at = self._measured_at = now
        self._averages: dict[str, _Average] = {}
        #: In bytes/s by interest id, without those that are 0.
        self.by_id: dict[str, float] = {}
        self._sampled = 0

    def measure(self, now: float) -> None:
        """Count what has come since the last time."""
        elapsed_s = now - self._measured_at
        if elapsed_s <= 0:
            return
        self._measured_at = now
        arrived = [interest for interest in self._interests if interest.arrived_bytes]
        for interest in arrived:
            known = self._averages.get(interest.id)
            if known is None or known.interest is not interest:
                self._averages[interest.id] = _Average(interest, max(self._begun_at, interest.joined_at))
        weight = 0.5 ** (elapsed_s / HALF_LIFE_S)
        averages, self._averages, self.by_id = self._averages, {}, {}
        for id_, average in averages.items():
            interest = average.interest
            average.value = interest.arrived_bytes / elapsed_s * (1 - weight) + average.value * weight
            interest.arrived_bytes = 0
            if average.value >= NEGLIGIBLE_BYTES_PER_S and self._interests.by_id.get(id_) is interest:
                self._averages[id_] = average
                age_s = max(now - average.since, elapsed_s)
                self.by_id[id_] = average.value / (1 - 0.5 ** (age_s / HALF_LIFE_S))

    def totals(self) -> tuple[float, float]:
        """Return F_j and I_j of this broker, in bytes/s."""
        inbound = delivered = 0.0
        for id_, rate in self.by_id.items():
            inbound += rate
            delivered += rate * self._averages[id_].interest.users
        return inbound + delivered, inbound

    def counts(self, ids: Iterable[str] | None = None) -> dict[str, int]:
        """Return the users of these interests; of those with a rate without ``ids``."""
        by_id = self._interests.by_id
        return {id_: by_id[id_].users for id_ in (self.by_id if ids is None else ids) if id_ in by_id}

    def user_loads(self, sessions: dict[object, Session]) -> tuple[int, ...]:
        """Return how many users have a load in each class, estimated from some of them."""
        users = len(sessions)
        begin = self._sampled % users if users > SAMPLE_USERS else 0
        self._sampled = begin + SAMPLE_USERS
        sample = list(islice(sessions.values(), begin, begin + SAMPLE_USERS))
        classes = [0] * USER_LOAD_CLASSES
        rates = self.by_id
        for session in sample:
            classes[user_load_class(sum([rates.get(id_, 0.0) for id_ in session.subscriptions]))] += 1
        while classes and not classes[-1]:
            classes.pop()
        return tuple(round(count * users / len(sample)) for count in classes)
