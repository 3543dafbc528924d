"""The workload of the simulation (BAD, section 6.2): users, their interests, and how the rates of results change.

What the paper does not give is a field of ``SimWorkload``, with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Literal

from bench.bad.town import HEIGHT_M, WIDTH_M, District, Place, grid, home

Interests = Literal["uniform", "zipf", "regional", "local"]
"""``regional``: each user has interests of one region, wherever it lives. ``local``: of the region where it lives."""

SHARES = (2100, 1600, 1300, 1100, 950, 850, 700, 550, 450, 400)
"""People who live nearest to each broker, of 10,000: they fit "more than 2,000 subscribers" and "less than 500"."""

MINUTE_S = 60.0
END_S = 30 * MINUTE_S
SUBSCRIBED_S = 8 * MINUTE_S
"""All subscriptions are made by then."""


@dataclass(frozen=True, kw_only=True)
class SimWorkload:
    """The sizes of a workload. The defaults are the paper's, where it gives them."""

    users: int = 10_000
    brokers: int = 10
    queries: int = 10
    interests_per_query: int = 100
    subscriptions: tuple[int, int] = (10, 30)
    interests: Interests = "uniform"
    #: Regions, and interests of each, where interests are regional. Not of the paper: it has uniform interests only.
    regions: int = 40
    interests_per_region: int = 500
    #: Normal(mean, standard deviation), in bytes/s. The paper gives no numbers; beta is 300 MB/s, and the mean load of
    #: a broker has to be above it: with 20 KB/s it is 418 MB/s.
    rate_mean: float = 20_000.0
    rate_deviation: float = 5_000.0
    #: A quarter of the interests that are at rest rises each minute, within 3 minutes, and falls after 4 to 6. The
    #: factor is not given.
    rising_ratio: float = 0.25
    rise_within_s: float = 3 * MINUTE_S
    fall_after_s: tuple[float, float] = (4 * MINUTE_S, 6 * MINUTE_S)
    rise_factor: float = 2.0
    shares: Sequence[float] = SHARES
    #: All subscriptions are made before the run begins: for very many users.
    is_subscribed_at_once: bool = False


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A user subscribes to another interest."""

    at: float
    user: int
    interest: str


@dataclass(frozen=True, slots=True)
class RateChanged:
    """The rate of an interest changes, to bytes/s."""

    at: float
    interest: str
    rate: float


class SimWorld:
    """The workload of one seed. The same seed gives the same workload to every scheme."""

    def __init__(self, workload: SimWorkload, seed: int) -> None:
        self.workload = workload
        rng = Random(f"bad simulation {seed}")
        columns = max(1, round((workload.brokers * WIDTH_M / HEIGHT_M) ** 0.5))
        while workload.brokers % columns:
            columns -= 1
        rows = workload.brokers // columns
        cell_m = min(WIDTH_M / columns, HEIGHT_M / rows)
        #: Brokers stand in the middle of equal parts of the town; which one is where differs by seed.
        places, order = list(grid(columns, rows)), list(range(workload.brokers))
        rng.shuffle(order)
        self.brokers: list[Place] = [places[part] for part in order]
        self._columns, self._rows = columns, rows
        self._number_of = {part: number for number, part in enumerate(order)}
        # A third of the way to the border of the part: 1 of 100 lives nearer to another broker.
        self.districts = [
            District(place, share, cell_m / 6) for place, share in zip(self.brokers, workload.shares, strict=True)
        ]
        self.homes = [home(self.districts, rng) for _ in range(workload.users)]
        self.names = self._make_names()
        self.rates = {
            name: max(1.0, round(rng.gauss(workload.rate_mean, workload.rate_deviation)))
            for names in self.names
            for name in names
        }
        #: The interests of each user at the start, and the subscriptions that are made later.
        self.initial: list[tuple[str, ...]] = [()] * workload.users
        self.subscriptions: list[Subscribed] = []
        self._subscribe_all(rng)
        self.changes = sorted(self._changes(rng), key=lambda each: (each.at, each.interest))

    def _make_names(self) -> list[list[str]]:
        workload = self.workload
        if workload.interests in ("uniform", "zipf"):
            numbers = range(workload.interests_per_query)
            return [[f"q{query}/{number}" for query in range(workload.queries) for number in numbers]]
        numbers = range(workload.interests_per_region)
        return [[f"r{region}/{number}" for number in numbers] for region in range(workload.regions)]

    def _subscribe_all(self, rng: Random) -> None:
        workload = self.workload
        ranked = list(self.names[0])
        rng.shuffle(ranked)  # the busiest interest is of any query
        weights = list(accumulate(1 / rank for rank in range(1, len(ranked) + 1)))
        for user in range(workload.users):
            theirs = self._choose(user, rng, ranked, weights)
            if workload.is_subscribed_at_once:
                self.initial[user] = tuple(theirs)
                continue
            self.subscriptions += [Subscribed(rng.uniform(0.0, SUBSCRIBED_S), user, each) for each in theirs]
        self.subscriptions.sort(key=lambda each: (each.at, each.user))

    def _choose(self, user: int, rng: Random, ranked: list[str], weights: list[float]) -> list[str]:
        """Return the interests of a user, each once."""
        workload = self.workload
        count = rng.randint(*workload.subscriptions)
        match workload.interests:
            case "zipf":
                chosen: dict[str, None] = {}
                while len(chosen) < count:
                    chosen[rng.choices(ranked, cum_weights=weights)[0]] = None
                return list(chosen)
            case "local":
                per_broker = max(1, workload.regions // workload.brokers)
                region = self.nearest(self.homes[user]) * per_broker + rng.randrange(per_broker)
                return rng.sample(self.names[region], count)
            case _:
                return rng.sample(rng.choice(self.names), count)

    def nearest(self, place: Place) -> int:
        """Return the number of the nearest broker: the one in whose part of the town the place is."""
        column = min(self._columns - 1, int(place[0] * self._columns / WIDTH_M))
        row = min(self._rows - 1, int(place[1] * self._rows / HEIGHT_M))
        return self._number_of[row * self._columns + column]

    def _changes(self, rng: Random) -> Iterator[RateChanged]:
        workload = self.workload
        names = [name for names in self.names for name in names]
        busy_until = dict.fromkeys(names, 0.0)
        for minute in range(int(END_S // MINUTE_S)):
            now = minute * MINUTE_S
            resting = [name for name in names if busy_until[name] <= now]
            for name in rng.sample(resting, round(workload.rising_ratio * len(resting))):
                rise = now + rng.uniform(0.0, workload.rise_within_s)
                fall = rise + rng.uniform(*workload.fall_after_s)
                busy_until[name] = fall
                yield RateChanged(rise, name, self.rates[name] * workload.rise_factor)
                yield RateChanged(fall, name, self.rates[name])
