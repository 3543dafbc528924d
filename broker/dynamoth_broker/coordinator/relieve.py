"""Relieves loaded brokers of users: LDM and SDM of BAD (Algorithm 1, lines 5 to 25), with their faults corrected.

Theory of operation
-------------------
While the load ratios are uneven, one user after another moves from a broker above the mean to one below it. A move must
leave the source lower than it was, and the target below what the source was, by a margin. So both new ratios are below
the old ratio of the source, and the ratios of all brokers, sorted with the largest first, fall in lexicographic order
with each move. The largest never rises, no state comes back, and the plan ends, at the latest when it is full: a user
is in it at most once.

Corrected against the printed algorithm: the test is strict; a broker is no target of its own; if no user of the most
loaded broker can leave, the next broker is looked at, and a plan that cannot go on says so; each user is tried at every
target in order, not at one; ties go to the lowest id; the user is preferred whose load is nearest to what has to move,
which is the heaviest only as long as much has to; users who rest, are in flight or are pinned stay; and both the plan
and the users that one broker gets from it are bounded.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from dynamoth_broker.coordinator.model import BrokerLoad, LoadModel, Standing, User, cov, mean
from dynamoth_broker.coordinator.plan import Move, Outcome, Plan, apply_move


class Scheme(Enum):
    """Which target a user is tried at first."""

    #: The least loaded broker (LDM, load-based dynamic migration).
    LOAD = "load"
    #: The broker whose load rises least, as it holds most of the user's interests (SDM, similarity-based).
    SIMILARITY = "similarity"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefLimits:
    """When relief begins and ends, and how much one plan may do."""

    #: alpha: uneven above this cov of the load ratios. 0: any unevenness counts.
    cov_max: float = 0.15
    #: beta: unevenness does not matter up to this mean load ratio. 0: it always does.
    ratio_mean_min: float = 0.3
    #: Relief is due whatever the cov while a broker is above this load ratio: of 200 brokers, one that is overloaded
    #: alone hardly shows in the cov. None: only the cov counts, as in the paper.
    ratio_high: float | None = None
    #: Most moves of one plan; at least 1.
    moves_max: int = 500
    #: Most moves of one plan into one broker; at least 1.
    moves_in_max: int = 200
    #: A move leaves its target this part below the load ratio that the source had. 0: anything below.
    margin_ratio: float = 0.001

    def is_uneven(self, ratio_max: float, ratio_mean: float, cov: float) -> bool:
        """Return whether the largest load ratio, their mean and their cov make relief due."""
        if self.ratio_high is not None and ratio_max > self.ratio_high:
            return True
        return cov > self.cov_max and ratio_mean > self.ratio_mean_min


def relieve(
    model: LoadModel,
    scheme: Scheme,
    limits: ReliefLimits,
    movable: Callable[[str], bool] = lambda _: True,
) -> Plan:
    """Plan moves until the brokers are evenly loaded, as far as users that are known one by one allow.

    Args:
        model: the present loads. The moves are applied to it.
        scheme: the order of targets.
        limits: bounds.
        movable: whether a user may move now: does not rest, is not in flight, is not pinned.

    """
    return _Relief(model, scheme, limits, movable).plan()


class _Relief:
    """One plan in the making."""

    def __init__(self, model: LoadModel, scheme: Scheme, limits: ReliefLimits, movable: Callable[[str], bool]) -> None:
        self._model = model
        self._scheme = scheme
        self._limits = limits
        self._movable = movable
        self._moves_in: Counter[str] = Counter()
        #: Own loads of the users that may leave a broker, ascending, and the users in the same order; made on demand.
        self._leavers: dict[str, tuple[list[float], list[User]]] = {}
        #: Brokers that no user can leave: the load then, and the targets. A target that only gains users gets no
        #: better, so there is no need to look again until the broker changes, a target loses a user, or another comes.
        self._stuck: dict[str, tuple[float, frozenset[str]]] = {}
        #: Whether ``moves_in_max`` has excluded a target.
        self._was_bounded = False
        #: Standings do not change while a plan is made.
        self._counted = list(model.counted())

    def plan(self) -> Plan:
        """Make the plan."""
        before = self._model.summary()
        moves: list[Move] = []
        outcome = Outcome.BALANCED
        while True:
            ratios = [broker.load / broker.capacity for broker in self._counted]
            ratio_mean = mean(ratios)
            if not self._limits.is_uneven(max(ratios, default=0.0), ratio_mean, cov(ratios)):
                break
            if len(moves) >= self._limits.moves_max:
                outcome = Outcome.PLAN_FULL
                break
            move = self._next(ratio_mean)
            if move is None:
                outcome = Outcome.PLAN_FULL if self._was_bounded else Outcome.NO_IMPROVING_MOVE
                break
            moves.append(move)
        return Plan((tuple(moves),) if moves else (), outcome, before, self._model.summary())

    def _next(self, ratio_mean: float) -> Move | None:
        """Apply the next move, and return it; None if there is none."""
        above = [broker for broker in self._counted if broker.load / broker.capacity > ratio_mean]
        targets = self._targets(ratio_mean)
        if not targets:
            return None
        names = frozenset(target.id for target in targets)
        for source in sorted(above, key=lambda broker: (-broker.ratio, broker.id)):
            load, seen = self._stuck.get(source.id, (math.nan, names))
            if load == source.load and names <= seen:
                continue
            if (found := self._find(source, targets, ratio_mean)) is not None:
                return self._apply(*found)
            self._stuck[source.id] = source.load, names
        return None

    def _targets(self, ratio_mean: float) -> list[BrokerLoad]:
        """Return the brokers below the mean that admit users, the least loaded first."""
        below = [broker for broker in self._counted if broker.load / broker.capacity < ratio_mean]
        admitting = [broker for broker in below if broker.standing is Standing.OPEN]
        targets = [broker for broker in admitting if self._moves_in[broker.id] < self._limits.moves_in_max]
        self._was_bounded |= len(targets) < len(admitting)
        return sorted(targets, key=lambda broker: (broker.ratio, broker.id))

    def _find(self, source: BrokerLoad, targets: list[BrokerLoad], ratio_mean: float) -> tuple[User, BrokerLoad] | None:
        """Return the first user, and the first target for it, that make an improving move."""
        bound = source.ratio * (1 - self._limits.margin_ratio)
        rooms = [bound * target.capacity - target.load for target in targets]
        excess = source.load - ratio_mean * source.capacity
        room = ratio_mean * targets[0].capacity - targets[0].load
        for user in self._by_fit(source, min(excess, room), max(rooms)):
            if not self._model.delta_remove(user) > 0:
                continue
            for target in self._in_order(user, targets):
                added = self._model.delta_add(user.interests, target.id)
                if (target.load + added) / target.capacity < bound:
                    return user, target
        return None

    def _in_order(self, user: User, targets: list[BrokerLoad]) -> Iterator[BrokerLoad]:
        """Yield the targets in the order in which they are tried: as they come, or the most similar ones first."""
        if self._scheme is Scheme.LOAD:
            yield from targets
            return
        shared = self._model.shared(user.interests)
        similar = [target for target in targets if target.id in shared]
        yield from sorted(similar, key=lambda target: (-shared[target.id], target.ratio, target.id))
        yield from (target for target in targets if target.id not in shared)

    def _by_fit(self, source: BrokerLoad, wanted: float, room_max: float) -> Iterator[User]:
        """Yield the users that may leave a broker, the one first whose load is nearest to the load that has to move.

        Users who fit in nowhere are left out: a target's load rises by the own load and the connection at least.
        """
        loads, users = self._leavers_of(source)
        weight = self._model.connection_bytes_per_s
        fetched_too = source.load / max(source.load - source.inbound, 1e-12)  # mean load per byte/s delivered
        fit = wanted / fetched_too - weight
        end = bisect_right(loads, (room_max - weight) * (1 + 1e-9))
        above = min(bisect_left(loads, fit), end)
        below = above - 1
        while below >= 0 or above < end:
            if below < 0 or (above < end and loads[above] - fit < fit - loads[below]):
                yield users[above]
                above += 1
            else:
                yield users[below]
                below -= 1

    def _leavers_of(self, source: BrokerLoad) -> tuple[list[float], list[User]]:
        if source.id not in self._leavers:
            own_load = self._model.own_load
            movable = [user for user in source.known.values() if self._movable(user.id)]
            ranked = sorted((own_load(user.interests), user.id) for user in movable)
            loads, users = [load for load, _ in ranked], [source.known[user] for _, user in ranked]
            self._leavers[source.id] = loads, users
        return self._leavers[source.id]

    def _apply(self, user: User, target: BrokerLoad) -> Move:
        loads, users = self._leavers[user.broker]
        place = next(
            index
            for index in range(bisect_left(loads, self._model.own_load(user.interests)), len(users))
            if users[index] is user
        )
        del loads[place], users[place]
        # Its list at the target is not made yet, or leaves it out: a user is in a plan at most once.
        self._leavers_of(target)
        self._stuck = {broker: (load, seen) for broker, (load, seen) in self._stuck.items() if user.broker not in seen}
        self._moves_in[target.id] += 1
        return apply_move(self._model, user.id, target.id)
