"""Places newcomers: which broker a user who has none connects to (BAD, section 5.1, corrected).

All placements have one interface, and none puts anybody at a broker that is not OPEN. Ties go to the lowest id.

A newcomer has usually subscribed to nothing yet, so its load shows later. The least loaded broker would get every user
of a burst, and be overwhelmed when they subscribe: the paper's objection to that placement. ``Reservations`` mend it:
a placed user counts as a mean user until a report of the broker can show the load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import asin, cos, hypot, radians, sin, sqrt
from typing import TYPE_CHECKING, Protocol

from dynamoth_broker.coordinator.model import BrokerLoad, LoadModel, Standing

if TYPE_CHECKING:
    from random import Random

RESERVATIONS_MAX = 4096
"""Bound of the different times per broker that reservations remember; more are merged with the latest."""

EARTH_M = 6_371_000.0
"""Mean radius of the earth, in metres."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A user to be placed, with what is known of it."""

    id: str
    #: In the coordinates of the brokers; None: unknown.
    location: tuple[float, float] | None = None
    #: Measured round trips in seconds by broker; they count before the location.
    latency_s: Mapping[str, float] = field(default_factory=dict[str, float])
    #: Of a stored session; empty where it has none.
    interests: tuple[str, ...] = ()


class Placement(Protocol):
    """Chooses a broker for a newcomer."""

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        ...


class Reservations:
    """The users that were placed at a broker, and that no report shows yet.

    A report shows the users that were placed at least ``appear_s`` before it was measured: the time in which a
    user connects and subscribes. 0: a report shows all that were placed before.
    """

    def __init__(self, appear_s: float = 10.0) -> None:
        self.appear_s = appear_s
        #: Times and numbers of placed users by broker, the earliest first; at most ``RESERVATIONS_MAX``.
        self._placed: dict[str, deque[tuple[float, int]]] = {}
        self._counts: dict[str, int] = {}

    def add(self, broker: str, now: float) -> None:
        """Reserve for one user."""
        placed = self._placed.setdefault(broker, deque())
        if placed and (placed[-1][0] == now or len(placed) >= RESERVATIONS_MAX):
            placed[-1] = (now, placed[-1][1] + 1)
        else:
            placed.append((now, 1))
        self._counts[broker] = self._counts.get(broker, 0) + 1

    def on_report(self, broker: str, measured_at: float) -> None:
        """Drop the reservations of users that a report shows."""
        placed = self._placed.get(broker, deque())
        while placed and placed[0][0] <= measured_at - self.appear_s:
            self._counts[broker] -= placed.popleft()[1]

    def on_broker_gone(self, broker: str) -> None:
        """Forget a broker."""
        self._placed.pop(broker, None)
        self._counts.pop(broker, None)

    def count(self, broker: str) -> int:
        """Return how many users are reserved for."""
        return self._counts.get(broker, 0)

    def user_load(self, model: LoadModel) -> float:
        """Return what one of them counts as, in bytes/s: a mean user, or anything while nobody has a load."""
        return model.user_load_mean() or model.connection_bytes_per_s or 1.0


def distance_planar(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return the distance of two points of a plane, in their unit."""
    return hypot(a[0] - b[0], a[1] - b[1])


def distance_earth(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return the great-circle distance in metres of two places (latitude, longitude), in degrees."""
    (lat_a, lon_a), (lat_b, lon_b) = (tuple(map(radians, place)) for place in (a, b))
    chord = sin((lat_b - lat_a) / 2) ** 2 + cos(lat_a) * cos(lat_b) * sin((lon_b - lon_a) / 2) ** 2
    return 2 * EARTH_M * asin(min(1.0, sqrt(chord)))


def _open(model: LoadModel) -> list[BrokerLoad]:
    """Return the brokers that admit users, the lowest id first."""
    admitting = (broker for broker in model.brokers.values() if broker.standing is Standing.OPEN)
    return sorted(admitting, key=lambda broker: broker.id)


class _Reserving:
    """What placements with reservations share."""

    def __init__(self, reservations: Reservations) -> None:
        self.reservations = reservations

    def _ratios(self, model: LoadModel, brokers: list[BrokerLoad]) -> dict[str, float]:
        """Return the load ratio of each broker, with the reservations."""
        each, count = self.reservations.user_load(model), self.reservations.count
        return {broker.id: (broker.load + count(broker.id) * each) / broker.capacity for broker in brokers}

    def _reserve(self, broker: str, now: float) -> str:
        self.reservations.add(broker, now)
        return broker


class NearestPlacement(_Reserving):
    """NR: the nearest broker whose load ratio is not above ``ratio_accept``; where all are, the least loaded.

    Near is a short round trip where one was measured, else a short distance. Brokers of which neither is known come
    last, the least loaded first: so newcomers of whom nothing is known go to the least loaded broker.
    """

    def __init__(
        self,
        reservations: Reservations,
        ratio_accept: float,
        distance: Callable[[tuple[float, float], tuple[float, float]], float] = distance_earth,
    ) -> None:
        super().__init__(reservations)
        self._ratio_accept = ratio_accept
        self._distance = distance

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        brokers = _open(model)
        ratios = self._ratios(model, brokers)
        accepting = [broker for broker in brokers if ratios[broker.id] <= self._ratio_accept]
        if accepting:
            nearest = min(
                accepting, key=lambda broker: (*self.nearness(newcomer, broker), ratios[broker.id], broker.id)
            )
            return self._reserve(nearest.id, now)
        return self._reserve(min(ratios, key=lambda broker: (ratios[broker], broker)), now) if ratios else None

    def nearness(self, newcomer: Newcomer, broker: BrokerLoad) -> tuple[int, float]:
        """Return what ranks brokers for a newcomer: less is nearer."""
        if (latency_s := newcomer.latency_s.get(broker.id)) is not None:
            return 0, latency_s
        if newcomer.location is not None and broker.location is not None:
            return 1, self._distance(newcomer.location, broker.location)
        return 2, 0.0


class RoundRobinPlacement:
    """RR: each broker in turn, in proportion to capacity, and evenly spread over time (smooth weighted round robin)."""

    def __init__(self) -> None:
        #: By how much each broker is behind its share; the sum is 0 while the brokers stay the same.
        self._credits: dict[str, float] = {}

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        brokers = _open(model)
        if not brokers:
            return None
        credit = {broker.id: self._credits.get(broker.id, 0.0) + broker.capacity for broker in brokers}
        chosen = max(brokers, key=lambda broker: credit[broker.id])  # the first of equals has the lowest id
        credit[chosen.id] -= sum(broker.capacity for broker in brokers)
        self._credits = credit
        return chosen.id


class RandomPlacement:
    """RND: any broker, each as likely."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        brokers = _open(model)
        return self._random.choice(brokers).id if brokers else None


class LeastLoadedPlacement:
    """LL: the broker with the least load ratio. Overwhelms it when many users come at once; to compare with."""

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        chosen = min(_open(model), key=lambda broker: broker.ratio, default=None)
        return None if chosen is None else chosen.id


class ReservingPlacement(_Reserving):
    """LL with reservations: the least load ratio, with the users on their way there."""

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        ratios = self._ratios(model, _open(model))
        return self._reserve(min(ratios, key=lambda broker: (ratios[broker], broker)), now) if ratios else None


class TwoChoicesPlacement(_Reserving):
    """The less loaded of two random brokers, with reservations: nearly as even, at the cost of two look-ups."""

    def __init__(self, reservations: Reservations, random: Random) -> None:
        super().__init__(reservations)
        self._random = random

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        brokers = _open(model)
        ratios = self._ratios(model, self._random.sample(brokers, min(2, len(brokers))))
        return self._reserve(min(ratios, key=lambda broker: (ratios[broker], broker)), now) if ratios else None


class SimilarPlacement(_Reserving):
    """For users with a stored session: the broker whose load rises least, among those near the least load ratio.

    A broker is near if, with the newcomer, it is loaded at most ``slack_ratio`` above what the newcomer would bring the
    least loaded one to. A newcomer of whom no
    interest is known goes to the least loaded one.
    """

    def __init__(self, reservations: Reservations, slack_ratio: float = 0.05) -> None:
        super().__init__(reservations)
        self._slack_ratio = slack_ratio

    def place(self, newcomer: Newcomer, model: LoadModel, now: float) -> str | None:
        """Return the id of an OPEN broker; None where there is none."""
        brokers = _open(model)
        if not brokers:
            return None
        ratios = self._ratios(model, brokers)
        ratio_max = min(ratios.values()) * (1 + self._slack_ratio)
        own = 2 * model.own_load(newcomer.interests) + model.connection_bytes_per_s
        increase = {broker.id: model.delta_add(newcomer.interests, broker.id) for broker in brokers}
        near = [
            broker
            for broker in brokers
            if ratios[broker.id] - ratio_max <= (own * (1 + 1e-9) - increase[broker.id]) / broker.capacity
        ]
        return self._reserve(min(near, key=lambda each: (increase[each.id], ratios[each.id], each.id)).id, now)
