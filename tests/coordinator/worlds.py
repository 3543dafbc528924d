"""Loads to balance: small ones out of literals, and the workloads of BAD's simulation (section 6.2)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache

from dynamoth_broker.coordinator.model import LoadModel
from dynamoth_broker.coordinator.plan import Plan

SHARES = (2100, 1600, 1300, 1100, 950, 850, 700, 550, 450, 400)
"""Users per broker in proportion: what nearest-broker placement makes of users who are not evenly spread."""

REGIONS = 40
INTERESTS_PER_REGION = 500


def own_interests(loads: Mapping[str, Sequence[float]]) -> LoadModel:
    """Make brokers of capacity 1 with users who share nothing, out of their own loads u_i. Such a user weighs 2 u_i.

    Users are named after broker and place: ``a0`` is the first at ``a``.
    """
    model = LoadModel()
    for broker in loads:
        model.add_broker(broker, 1.0)
    for broker, users in loads.items():
        for place, load in enumerate(users):
            user = f"{broker}{place}"
            model.set_rate(user, load)
            model.attach(user, broker, (user,))
    return model


def sharing(rates: Mapping[str, float], users: Mapping[str, Mapping[str, str]]) -> LoadModel:
    """Make brokers of capacity 1 out of ``{broker: {user: interests}}``; an interest has one letter."""
    model = LoadModel()
    for interest, rate in rates.items():
        model.set_rate(interest, rate)
    for broker in users:
        model.add_broker(broker, 1.0)
    for broker, theirs in users.items():
        for user, interests in theirs.items():
            model.attach(user, broker, interests)
    return model


def paper(seed: int, users: int = 10_000, *, regional: bool = False) -> LoadModel:
    """Return ``_paper`` of the same arguments; it is made once."""
    return _paper(seed, users, regional=regional).copy()


@cache
def _paper(seed: int, users: int, *, regional: bool) -> LoadModel:
    """Make 10 unevenly loaded brokers whose users have 10 to 30 interests of 20 KB/s, spread by ``SHARES``.

    The interests are 1,000 for all, or, ``regional``, those of the one region where the user is.
    """
    rng = random.Random(seed)
    model = LoadModel()
    brokers = [f"b{number}" for number in range(len(SHARES))]
    for broker in brokers:
        model.add_broker(broker, 1.0)
    regions, size = (REGIONS, INTERESTS_PER_REGION) if regional else (1, 1000)
    names = [[f"{region}/{number}" for number in range(size)] for region in range(regions)]
    for region in names:
        for interest in region:
            model.set_rate(interest, max(1, round(rng.gauss(20_000, 5_000))))
    for number in range(users):
        [broker] = rng.choices(brokers, SHARES)
        model.attach(f"u{number:05}", broker, rng.sample(rng.choice(names), rng.randint(10, 30)))
    return model


def recomputed(model: LoadModel) -> LoadModel:
    """Return a model with the same users at the same brokers, filled from nothing."""
    other = LoadModel(model.connection_bytes_per_s)
    for broker in model.brokers.values():
        other.add_broker(broker.id, broker.capacity, standing=broker.standing)
    for user in model.users.values():
        for interest in user.interests:
            other.set_rate(interest, model.rate(interest))
        other.attach(user.id, user.broker, user.interests)
    return other


def placed(model: LoadModel, assignment: Mapping[str, str]) -> LoadModel:
    """Return a copy of a model with all users where an assignment has them."""
    other = model.copy()
    for user, broker in assignment.items():
        if other.users[user].broker != broker:
            other.move(user, broker)
    return other


def ratios(model: LoadModel) -> list[float]:
    """Return the load ratios, the largest first."""
    return sorted((broker.ratio for broker in model.brokers.values()), reverse=True)


def routes(plan: Plan) -> list[tuple[str, str, str]]:
    return [(move.user, move.source, move.target) for move in plan.moves]
