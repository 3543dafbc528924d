"""The balancing of BAD exactly as published (Algorithm 1 and the greedy shuffle), to compare with. Not for production.

Nothing is corrected: the test of a migration is ``<=``; SDM tries one target; the source is not excluded from the
targets; ties go to whatever comes first in the broker's dictionary; where no user passes the test, lines 22 and 23 move
the pair that was tried last; nothing bounds the loop. A loop that never ends is found by its repeating a state: the
algorithm has no memory but the assignment, so it then repeats the same steps without end.

The loads are those of :class:`~dynamoth_broker.coordinator.model.LoadModel`, with capacities of 1 and no connection
weight, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from dynamoth_broker.coordinator.model import LoadModel


class Published(Enum):
    """The schemes of dynamic migration."""

    LDM = "load-based"
    SDM = "similarity-based"


@dataclass(slots=True)
class PublishedPlan:
    """What the published algorithm plans, and what it does to the loads."""

    #: M: (user, source, target), one per iteration that passes the test of line 17.
    moves: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    #: Iterations in which no user passed, so that the last tried pair was moved without being planned.
    unplanned: int = 0
    iterations: int = 0
    #: The length of the cycle of states that the loop ended up in; None: it ended by itself.
    cycle: int | None = None
    #: The largest load after each iteration, and the mean: as the loop sees them.
    load_max: list[float] = field(default_factory=list[float])
    load_mean: list[float] = field(default_factory=list[float])

    @property
    def is_endless(self) -> bool:
        """Whether the loop would never end."""
        return self.cycle is not None


def dynamic_migration(model: LoadModel, scheme: Published, alpha: float, beta: float) -> PublishedPlan:
    """Run lines 5 to 25 of Algorithm 1. The moves are applied to the model.

    Args:
        model: all users, with all their interests.
        scheme: LDM or SDM.
        alpha: cov that is even enough.
        beta: mean load, in bytes/s, up to which nothing is done.

    """
    plan = PublishedPlan()
    state = 0
    seen = {state: 0}
    while _cov(model) > alpha and _mean(model) > beta:
        source = max(model.brokers, key=lambda broker: model.brokers[broker].load)  # the first of equals
        user, target = _iterate(model, scheme, source, plan)
        state ^= _digest(user, source) ^ _digest(user, target)
        model.move(user, target)
        plan.iterations += 1
        plan.load_max.append(max(broker.load for broker in model.brokers.values()))
        plan.load_mean.append(_mean(model))
        if state in seen:
            plan.cycle = plan.iterations - seen[state]
            return plan
        seen[state] = plan.iterations
    return plan


def _iterate(model: LoadModel, scheme: Published, source: str, plan: PublishedPlan) -> tuple[str, str]:
    """Run lines 8 to 21; return the user and the target of lines 22 and 23."""
    users = model.brokers[source].known
    ranked = sorted(users, key=lambda user: model.own_load(users[user].interests), reverse=True)
    user = target = ""
    for user in ranked:
        interests = users[user].interests
        if scheme is Published.LDM:
            target = min(model.brokers, key=lambda broker: model.brokers[broker].load)
        else:
            middle = _mean(model)
            below = [broker.id for broker in model.brokers.values() if broker.load < middle]
            target = max(below, key=lambda broker: model.similarity(interests, broker))
        # The test comes after the move (section 5.2); a user that is at the target already adds nothing.
        increase = 0.0 if target == source else model.delta_add(interests, target)
        if model.brokers[target].load + increase <= model.brokers[source].load:
            plan.moves.append((user, source, target))
            return user, target
    plan.unplanned += 1
    return user, target


def greedy_shuffle(model: LoadModel) -> dict[str, str]:
    """Return the broker of each user by GSH (section 5.3): the heaviest user to the least loaded broker, from empty.

    The model stays as it is.
    """
    trial = LoadModel(model.connection_bytes_per_s)
    for broker in model.brokers.values():
        trial.add_broker(broker.id, broker.capacity)
    users = sorted(model.users.values(), key=lambda user: model.own_load(user.interests), reverse=True)
    for user in users:
        for interest in user.interests:
            trial.set_rate(interest, model.rate(interest))
        target = min(trial.brokers, key=lambda broker: trial.brokers[broker].load)
        trial.attach(user.id, target, user.interests)
    return {user.id: user.broker for user in trial.users.values()}


def multistage(
    model: LoadModel, scheme: Published, thresholds: tuple[float, float, float, float]
) -> dict[str, list[tuple[str, str]]]:
    """Run Algorithm 1 as a whole; return M, a list of (user, target) by source.

    After a shuffle, the loads of lines 5 to 25 are still those from before it, and both write to M.

    Args:
        model: all users, with all their interests. Only the moves of the second stage are applied.
        scheme: LDM or SDM.
        thresholds: gamma, theta, alpha, beta.

    """
    gamma, theta, alpha, beta = thresholds
    planned: dict[str, list[tuple[str, str]]] = {}
    if _cov(model) > gamma and _mean(model) > theta:
        for user, target in greedy_shuffle(model).items():
            planned.setdefault(model.users[user].broker, []).append((user, target))
    for user, source, target in dynamic_migration(model, scheme, alpha, beta).moves:
        planned.setdefault(source, []).append((user, target))
    return planned


def _mean(model: LoadModel) -> float:
    """Return mu as a program computes it that adds one load after the other (equation 8)."""
    return sum(broker.load for broker in model.brokers.values()) / len(model.brokers)


def _cov(model: LoadModel) -> float:
    """Return sigma / mu (equations 6 to 8). Raises ZeroDivisionError: there is no load."""
    loads, middle = [broker.load for broker in model.brokers.values()], _mean(model)
    variance: float = sum((load - middle) ** 2 for load in loads) / len(loads)
    return float(variance**0.5) / middle


def _digest(user: str, broker: str) -> int:
    """Return 128 bits; those of all users, combined by XOR, name an assignment."""
    return int.from_bytes(blake2b(f"{len(user)} {user} {broker}".encode(), digest_size=16).digest(), "big")
