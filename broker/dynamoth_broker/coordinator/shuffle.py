"""Shuffles users over all brokers so that users with the same interests share a broker (BAD, section 5.3, corrected).

Theory of operation
-------------------
The greedy shuffle as published gives the heaviest user to the least loaded broker, and so on, from empty brokers. It
moves nine users of ten for loads that relief reaches with a sixth of the moves. What only a shuffle can do is to group
users by interest: then brokers fetch fewer interests, and both their load and the Redis egress fall. So each user goes,
among the brokers that are loaded nearly as little as the least loaded one, to that whose load rises least; and the
present broker is preferred, as a move costs something.

The moves are executed in batches. Within a batch, users count at both brokers, as a migration makes before it breaks.
A move is put into the first batch in which its target stays within ``ratio_accept``, so no broker passes that on the
way (a broker that is above it gets nobody until it is below). Moves that fit into no batch are left out. What remains
is judged as a whole, with its moves as cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamoth_broker.coordinator.model import BrokerLoad, LoadModel, Standing, User
from dynamoth_broker.coordinator.plan import Move, Outcome, Plan, Worth, apply_move


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleSettings:
    """How users are grouped, and how fast they move."""

    #: A user may go to a broker that is then loaded up to this part above what it would bring the least loaded one to.
    #: 0: not above.
    slack_ratio: float = 0.05
    #: A user stays unless another broker's load rises less by this part of the user's own load. 0: moves are free.
    stay_ratio: float = 0.05
    #: No move takes a broker above this load ratio, not even for a while.
    ratio_accept: float = 0.85
    #: Most moves of one batch, and of one batch into one broker; at least 1.
    batch_moves_max: int = 500
    batch_moves_in_max: int = 200
    #: Most moves of one shuffle. Those from the most loaded brokers come first.
    moves_max: int = 20_000
    #: What the shuffle must bring.
    worth: Worth = field(default_factory=Worth)


def shuffle(model: LoadModel, settings: ShuffleSettings, movable: Callable[[str], bool] = lambda _: True) -> Plan:
    """Plan a shuffle of the users that are known one by one. The model stays as it is.

    Returns:
        Batches of moves; none, with the outcome NOT_WORTH_IT, where they would not be worth it.

    """
    before = model.summary()
    targets = _assign(model, settings, movable)
    after, batches, is_full = _in_batches(model, targets, settings)
    plan = Plan(tuple(batches), Outcome.PLAN_FULL if is_full else Outcome.BALANCED, before, after.summary())
    users = sum(broker.users for broker in model.brokers.values())
    if settings.worth.is_worth_it(plan, users):
        return plan
    return Plan((), Outcome.NOT_WORTH_IT, before, before)


def _assign(model: LoadModel, settings: ShuffleSettings, movable: Callable[[str], bool]) -> dict[str, str]:
    """Return the new broker of each user that should move."""
    trial = model.copy()
    free = [user for broker in model.counted() for user in broker.known.values() if movable(user.id)]
    ranked = sorted(free, key=lambda user: (-model.own_load(user.interests), user.id))
    for user in ranked:
        trial.detach(user.id)
    brokers = [broker for broker in trial.counted() if broker.standing is Standing.OPEN]
    targets: dict[str, str] = {}
    for user in ranked:
        target = _best(trial, brokers, user, settings)
        trial.attach(user.id, target, user.interests)
        if target != user.broker:
            targets[user.id] = target
    return targets


def _best(trial: LoadModel, brokers: list[BrokerLoad], user: User, settings: ShuffleSettings) -> str:
    """Return the broker that a user who is nowhere goes to."""
    present = trial.brokers[user.broker]
    admitting = brokers if present.standing is Standing.OPEN else [*brokers, present]
    own, shared = trial.own_load(user.interests), trial.shared(user.interests)
    increase_max = 2 * own + trial.connection_bytes_per_s
    ratios = [broker.load / broker.capacity for broker in admitting]
    # A broker that holds none of the interests rises by ``increase_max``: the least loaded one is always near enough.
    least = min(ratios)
    # Below 0 where reported totals are older than the candidates who were taken out of them.
    ratio_max = least + abs(least) * settings.slack_ratio
    best: tuple[float, float, str] | None = None
    for broker, ratio in zip(admitting, ratios, strict=True):
        similarity = shared.get(broker.id, 0.0)
        if broker.load - similarity * (1 + 1e-9) > ratio_max * broker.capacity:
            continue
        cost = 0.0 if broker is present else settings.stay_ratio * own
        rank = increase_max - similarity + cost, ratio, broker.id
        best = rank if best is None or rank < best else best
    assert best is not None, "the least loaded broker is always within its own slack"
    return best[2]


def _in_batches(
    model: LoadModel, targets: dict[str, str], settings: ShuffleSettings
) -> tuple[LoadModel, list[tuple[Move, ...]], bool]:
    """Order moves; return the model after them, the batches, and whether ``moves_max`` has left some out."""
    trial, done = model.copy(), model.copy()

    def urgency(user: str) -> tuple[float, float, str]:
        mover = model.users[user]
        return -model.brokers[mover.broker].ratio, -model.own_load(mover.interests), user

    waiting = sorted(targets, key=urgency)
    is_full = len(waiting) > settings.moves_max
    waiting = waiting[: settings.moves_max]
    batches: list[tuple[Move, ...]] = []
    while waiting:
        batch, waiting = _batch(trial, waiting, targets, settings)
        if not batch:
            break
        batches.append(tuple(apply_move(done, user, targets[user]) for user in batch))
    return trial, batches, is_full


def _batch(
    trial: LoadModel, waiting: list[str], targets: dict[str, str], settings: ShuffleSettings
) -> tuple[list[str], list[str]]:
    """Apply the next batch; return its users, and those who wait for a later one."""
    batch: list[str] = []
    moves_in: Counter[str] = Counter()
    later: list[str] = []
    for place, user in enumerate(waiting):
        if len(batch) >= settings.batch_moves_max:
            later += waiting[place:]
            break
        target = trial.brokers[targets[user]]
        if moves_in[target.id] >= settings.batch_moves_in_max:
            later.append(user)
            continue
        increase = trial.delta_add(trial.users[user].interests, target.id)
        if (target.load + increase) / target.capacity > settings.ratio_accept:
            later.append(user)
            continue
        trial.arrive(user, target.id)
        batch.append(user)
        moves_in[target.id] += 1
    for user in batch:
        trial.depart(user, targets[user])
    return batch, later
