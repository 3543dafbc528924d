"""Measures the rates of a broker's interests, and how the loads of its users are distributed.

The fan-out path adds the bytes of each publication to its interest; everything else happens at a report. A rate is an
exponentially weighted average with a half-life of ``HALF_LIFE_S``, corrected for its start: an interest that came a
second ago has the rate of that second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

from dynamoth.edge.control import INTERESTS_MAX, USER_LOAD_CLASSES, InterestColumns
from dynamoth_broker.candidates import busiest, user_load_class
from dynamoth_broker.events import ConnectionId
from dynamoth_broker.interests import InterestTable, SharedInterest
from dynamoth_broker.sessions import Session

HALF_LIFE_S = 10.0

NEGLIGIBLE_BYTES_PER_S = 0.1
"""An average below this counts as 0: a publication of 1 KB is forgotten after some two minutes."""

CORRECTED_S = 10 * HALF_LIFE_S
"""The start of an average matters for this time: by less than 0.1 % later."""

RESERVED_S = 1e-4
"""With many rates, time between two measurements per rate: one takes some 2 us, so they take some 2 % of the time."""

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
        #: F_j and I_j of the latest measurement.
        self.load_bytes_per_s = 0.0
        self.inbound_bytes_per_s = 0.0
        #: The interests with the highest rates then.
        self.busiest = InterestColumns()
        self._sampled = 0

    def measure(self, now: float) -> None:
        """Count what has come since the last time, unless that is so recent that it would cost too much."""
        elapsed_s = now - self._measured_at
        if elapsed_s <= len(self._averages) * RESERVED_S:
            return
        self._measured_at = now
        arrived = [interest for interest in self._interests if interest.arrived_bytes]
        for interest in arrived:
            known = self._averages.get(interest.id)
            if known is None or known.interest is not interest:
                self._averages[interest.id] = _Average(interest, max(self._begun_at, interest.joined_at))
        weight = 0.5 ** (elapsed_s / HALF_LIFE_S)
        share = (1 - weight) / elapsed_s
        began_since, table = now - CORRECTED_S, self._interests.by_id
        averages, kept, rates = self._averages, dict[str, _Average](), dict[str, float]()
        for id_, average in averages.items():
            interest = average.interest
            value = average.value = interest.arrived_bytes * share + average.value * weight
            interest.arrived_bytes = 0
            if value >= NEGLIGIBLE_BYTES_PER_S and table.get(id_) is interest:
                kept[id_] = average
                if average.since > began_since:
                    value /= 1 - 0.5 ** (max(now - average.since, elapsed_s) / HALF_LIFE_S)
                rates[id_] = value
        self._averages, self.by_id = kept, rates
        self._sum_up()

    def _sum_up(self) -> None:
        inbound = delivered = 0.0
        for id_, rate in self.by_id.items():
            inbound += rate
            delivered += rate * self._averages[id_].interest.users
        self.load_bytes_per_s, self.inbound_bytes_per_s = inbound + delivered, inbound
        chosen = nlargest(INTERESTS_MAX, self.by_id, key=self.by_id.__getitem__)
        self.busiest = busiest(self.by_id, self.counts(chosen))

    def counts(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the users of these interests."""
        by_id = self._interests.by_id
        return {id_: by_id[id_].users for id_ in ids if id_ in by_id}

    def user_loads(self, sessions: Mapping[ConnectionId, Session]) -> tuple[int, ...]:
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
