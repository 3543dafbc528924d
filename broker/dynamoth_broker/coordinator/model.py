"""Models the loads of brokers, and what moving a user would change (BAD, section 4, equations 1 to 8).

Theory of operation
-------------------
A broker fetches each interest once, however many of its users have it, and delivers it to each of them. With
``lambda_k`` the rate of interest k and ``n_jk`` its users at broker j, the load of the broker is

    F_j = I_j + O_j = sum over the interests held of lambda_k * (1 + n_jk)

plus ``connection_bytes_per_s`` for each user: without it, users who have subscribed to nothing would weigh nothing.
``I_j`` is what Redis sends to the broker, so the sum of all ``I_j`` is the Redis egress.

The model keeps ``F_j``, ``I_j`` and ``n_jk`` up to date with each planned move, in time proportional to the
interests of the user. Sums are exact where rates are whole numbers; else they are as exact as sums of floats are.

There are two ways to fill it. A *full* model has every user (``attach``): for simulations. A *sampled* model has what
brokers report (``set_totals``, ``set_count``) and, as candidates for moves, a few of the users that the totals contain
(``introduce``): for one decision, with a million users. There, an interest of which no count is known at a broker is
taken as not held, so the predicted load of a target is an upper bound.

Loads are compared as ratios of load to capacity. With capacities of 1 they are the loads of the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import fsum, sqrt


class Standing(Enum):
    """What a broker takes part in.

    ========  ===========================  ==================  ========================
    Standing  users may be moved there     may be moved away   counts in mean and cov
    ========  ===========================  ==================  ========================
    OPEN      yes                          yes                 yes
    FULL      no                           yes                 yes
    DRAINING  no                           no (it drains)      no
    SUSPECT   no                           no                  no
    ========  ===========================  ==================  ========================

    FULL: it admits nobody. SUSPECT: its reports are too old to act on.
    """

    OPEN = auto()
    FULL = auto()
    DRAINING = auto()
    SUSPECT = auto()

    @property
    def is_counted(self) -> bool:
        """Whether its load counts, and users may be moved away from it."""
        return self in (Standing.OPEN, Standing.FULL)


@dataclass(slots=True, eq=False)
class User:
    """A user (a session) that may be moved, with the interests it has subscribed to, each once."""

    id: str
    broker: str
    interests: tuple[str, ...]


@dataclass(slots=True, eq=False)
class BrokerLoad:
    """The load of one broker. Only the model changes it, but for ``standing``."""

    id: str
    #: Bytes/s that count as all of it; more than 0.
    capacity: float
    standing: Standing = Standing.OPEN
    #: Coordinates for the nearest-broker placement; None: unknown.
    location: tuple[float, float] | None = None
    #: F_j and the weight of the connections, in bytes/s.
    load: float = 0.0
    #: I_j: the rates of the interests held, in bytes/s.
    inbound: float = 0.0
    #: All users, known one by one or not.
    users: int = 0
    #: n_jk by interest, where it is known and not 0.
    counts: dict[str, int] = field(default_factory=dict[str, int])
    #: The users that are known one by one, in the order of their arrival.
    known: dict[str, User] = field(default_factory=dict[str, User])

    @property
    def ratio(self) -> float:
        """Load / capacity."""
        return self.load / self.capacity


@dataclass(frozen=True, slots=True)
class Summary:
    """How loaded, and how unevenly loaded, the brokers that count are."""

    ratio_max: float
    ratio_mean: float
    #: Standard deviation (population) / mean of the load ratios; 0 where the mean is 0.
    cov: float
    #: The sum of I_j of all brokers, in bytes/s.
    redis_egress: float


class LoadModel:
    """Brokers, interests and users with their loads.

    Args:
        connection_bytes_per_s: the weight of a user besides its interests; 0: none, as in the paper.

    """

    def __init__(self, connection_bytes_per_s: float = 0.0) -> None:
        self.connection_bytes_per_s = connection_bytes_per_s
        self.brokers: dict[str, BrokerLoad] = {}
        #: The users that are known one by one.
        self.users: dict[str, User] = {}
        #: lambda_k by interest, in bytes/s.
        self._rates: dict[str, float] = {}
        self._rates_are_shared = False
        #: The brokers that hold each interest; None until somebody asks, as not everybody does.
        self._holders: dict[str, dict[str, None]] | None = None

    def copy(self) -> LoadModel:
        """Return an independent copy, to try moves on. The rates are shared until one of the two sets one."""
        other = LoadModel(self.connection_bytes_per_s)
        other._rates = self._rates
        other._rates_are_shared = self._rates_are_shared = True
        for broker in self.brokers.values():
            known = {user: User(user, entry.broker, entry.interests) for user, entry in broker.known.items()}
            other.brokers[broker.id] = replace(broker, counts=dict(broker.counts), known=known)
        other.users = {user: other.brokers[entry.broker].known[user] for user, entry in self.users.items()}
        return other

    # Brokers and interests.

    def add_broker(
        self,
        broker: str,
        capacity: float,
        *,
        standing: Standing = Standing.OPEN,
        location: tuple[float, float] | None = None,
    ) -> BrokerLoad:
        """Add a broker without users. Raises ValueError: it is known already, or its capacity is not above 0."""
        if broker in self.brokers:
            raise ValueError(f"there is a broker {broker!r} already")
        if not capacity > 0:
            raise ValueError(f"the capacity of {broker} must be more than 0, not {capacity}")
        added = self.brokers[broker] = BrokerLoad(broker, capacity, standing, location)
        return added

    def set_totals(self, broker: str, *, load: float, inbound: float, users: int) -> None:
        """Set what a broker has reported of all its users: its load and I_j in bytes/s. Empties its counts."""
        entry = self.brokers[broker]
        entry.load, entry.inbound, entry.users = load, inbound, users
        entry.counts.clear()
        self._holders = None

    def set_count(self, broker: str, interest: str, users: int) -> None:
        """Set n_jk as reported. The totals do not change."""
        if users > 0:
            self.brokers[broker].counts[interest] = users
        else:
            self.brokers[broker].counts.pop(interest, None)
        self._holders = None

    def rate(self, interest: str) -> float:
        """Return lambda_k in bytes/s; 0 for an interest that nobody has measured yet."""
        return self._rates.get(interest, 0.0)

    def set_rate(self, interest: str, rate: float) -> None:
        """Set lambda_k, and change the loads of the brokers where users with this interest are known."""
        change = rate - self._rates.get(interest, 0.0)
        if self._rates_are_shared:
            self._rates, self._rates_are_shared = dict(self._rates), False
        self._rates[interest] = rate
        if not change:
            return
        for broker in self.brokers.values():
            if count := broker.counts.get(interest):
                broker.load += change * (1 + count)
                broker.inbound += change

    def set_rates(self, rates: dict[str, float]) -> None:
        """Set every lambda_k at once, without a change to any load: for totals that contain them. Keeps the dict."""
        self._rates, self._rates_are_shared = rates, False

    # Users.

    def attach(self, user: str, broker: str, interests: Iterable[str]) -> None:
        """Add a user whom no total contains yet. The loads of the broker rise."""
        self.introduce(user, broker, interests)
        self._add(self.users[user], self.brokers[broker])
        self.brokers[broker].users += 1

    def introduce(self, user: str, broker: str, interests: Iterable[str]) -> None:
        """Add a user whom the totals and counts of the broker contain already. Raises ValueError: it is known."""
        if user in self.users:
            raise ValueError(f"there is a user {user!r} already")
        added = User(user, broker, tuple(dict.fromkeys(interests)))
        self.users[user] = self.brokers[broker].known[user] = added

    def detach(self, user: str) -> None:
        """Remove a user. The loads of its broker fall."""
        gone = self.users.pop(user)
        broker = self.brokers[gone.broker]
        del broker.known[user]
        broker.users -= 1
        self._remove(gone, broker)

    def move(self, user: str, target: str) -> None:
        """Move a user to another broker, and change the loads of both."""
        self.arrive(user, target)
        self.depart(user, target)

    def arrive(self, user: str, target: str) -> None:
        """Add a user to its new broker while it still counts at its old one: a migration makes before it breaks.

        ``depart`` with the same target must follow, before any other call for this user.
        """
        self._add(self.users[user], self.brokers[target])
        self.brokers[target].users += 1

    def depart(self, user: str, target: str) -> None:
        """Remove a user who has arrived at ``target`` from its old broker."""
        moved = self.users[user]
        source = self.brokers[moved.broker]
        self._remove(moved, source)
        del source.known[user]
        source.users -= 1
        moved.broker = target
        self.brokers[target].known[user] = moved

    def _add(self, user: User, broker: BrokerLoad) -> None:
        counts, fetched, delivered = broker.counts, 0.0, 0.0
        for interest in user.interests:
            rate = self._rates.get(interest, 0.0)
            delivered += rate
            count = counts.get(interest, 0)
            if not count:
                fetched += rate
                if self._holders is not None:
                    self._holders.setdefault(interest, {})[broker.id] = None
            counts[interest] = count + 1
        broker.inbound += fetched
        broker.load += delivered + fetched + self.connection_bytes_per_s

    def _remove(self, user: User, broker: BrokerLoad) -> None:
        counts, fetched, delivered = broker.counts, 0.0, 0.0
        for interest in user.interests:
            rate = self._rates.get(interest, 0.0)
            delivered += rate
            count = counts[interest]
            if count == 1:
                fetched += rate
                del counts[interest]
                if self._holders is not None:
                    del self._holders[interest][broker.id]
            else:
                counts[interest] = count - 1
        broker.inbound -= fetched
        broker.load -= delivered + fetched + self.connection_bytes_per_s

    # What a move would change.

    def own_load(self, interests: Iterable[str]) -> float:
        """Return u_i: the rates of a user's interests, in bytes/s, without the weight of its connection."""
        rates = self._rates
        return sum([rates.get(interest, 0.0) for interest in interests])

    def delta_add(self, interests: Iterable[str], broker: str) -> float:
        """Return by how much a user with these interests would raise the load of a broker, in bytes/s."""
        rates, counts = self._rates, self.brokers[broker].counts
        parts = [rates.get(each, 0.0) if each in counts else 2 * rates.get(each, 0.0) for each in interests]
        return sum(parts) + self.connection_bytes_per_s

    def delta_remove(self, user: User) -> float:
        """Return by how much the load of its broker would fall without a user, in bytes/s."""
        rates, counts = self._rates, self.brokers[user.broker].counts
        parts = [(2 if counts[each] == 1 else 1) * rates.get(each, 0.0) for each in user.interests]
        return sum(parts) + self.connection_bytes_per_s

    def shared(self, interests: Iterable[str]) -> dict[str, float]:
        """Return the similarity of a user with these interests to each broker where it is not 0.

        ``delta_add`` is twice the own load and the weight of a connection, less this. So the brokers that are left out
        would all rise by the same; with many brokers, this is much faster than to ask ``delta_add`` of each.
        """
        if self._holders is None:
            self._holders = {}
            for broker in self.brokers.values():
                for interest in broker.counts:
                    self._holders.setdefault(interest, {})[broker.id] = None
        rates, holders = self._rates, self._holders
        shared: dict[str, float] = {}
        for interest in interests:
            if rate := rates.get(interest, 0.0):
                for holder in holders.get(interest, ()):
                    shared[holder] = shared.get(holder, 0.0) + rate
        return shared

    def similarity(self, interests: Iterable[str], broker: str) -> float:
        """Return the rates of the interests that the broker holds already, in bytes/s (BAD, Algorithm 1, line 10)."""
        rates, counts = self._rates, self.brokers[broker].counts
        return sum([rates.get(each, 0.0) for each in interests if each in counts])

    # Figures.

    def counted(self) -> Iterator[BrokerLoad]:
        """Yield the brokers whose load counts: neither suspect nor draining."""
        return (broker for broker in self.brokers.values() if broker.standing.is_counted)

    def summary(self) -> Summary:
        """Return maximum, mean and spread of the load ratios, and the Redis egress; all 0 without brokers."""
        ratios = [broker.ratio for broker in self.counted()]
        egress = fsum(broker.inbound for broker in self.brokers.values())
        return Summary(max(ratios, default=0.0), mean(ratios), cov(ratios), egress)

    def user_load_mean(self) -> float:
        """Return the mean load of a user, known one by one or not, in bytes/s; 0 without users."""
        users = sum(broker.users for broker in self.brokers.values())
        return fsum(broker.load for broker in self.brokers.values()) / users if users else 0.0

    def check(self) -> None:
        """Assert that every known user is at its broker, and is contained in the counts there."""
        for broker in self.brokers.values():
            needed: dict[str, int] = {}
            for user in broker.known.values():
                assert self.users[user.id] is user and user.broker == broker.id, f"{user.id} is in two places"
                for interest in user.interests:
                    needed[interest] = needed.get(interest, 0) + 1
            if self._holders is not None:
                held = {interest for interest, holders in self._holders.items() if broker.id in holders}
                assert held == broker.counts.keys(), f"the index of interests is wrong for {broker.id}"
            assert len(broker.known) <= broker.users, f"{broker.id} has fewer users than are known"
            for interest, count in needed.items():
                assert broker.counts.get(interest, 0) >= count, f"{broker.id} counts too few users of {interest}"
        assert sum(len(broker.known) for broker in self.brokers.values()) == len(self.users)


def mean(ratios: list[float]) -> float:
    """Return the mean; 0 without values (BAD, equation 8)."""
    return fsum(ratios) / len(ratios) if ratios else 0.0


def cov(ratios: list[float]) -> float:
    """Return standard deviation (population) / mean; 0 where the mean is 0 (BAD, equations 6 and 7)."""
    middle = mean(ratios)
    if not middle:
        return 0.0
    return sqrt(fsum((ratio - middle) ** 2 for ratio in ratios) / len(ratios)) / middle
