"""A plan of moves, as data: each move with the load ratios before and after, and why the plan ends where it does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dynamoth_broker.coordinator.model import LoadModel, Summary


class Outcome(Enum):
    """Why a plan has no more moves."""

    BALANCED = "the loads are even enough"
    NO_IMPROVING_MOVE = "no user that may move now would improve the loads elsewhere"
    PLAN_FULL = "the plan has as many moves as one plan may have; the next plan continues"
    NOT_WORTH_IT = "the gain is not worth the moves"


class Change(NamedTuple):
    """A load ratio before and after a move."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Move:
    """A user moves from one broker to another. The ratios assume that the moves before it in the plan are done."""

    user: str
    source: str
    target: str
    #: The user's own load u_i, in bytes/s.
    load: float
    source_ratio: Change
    target_ratio: Change


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in batches: a batch begins when the one before has settled. No user is in it twice."""

    batches: tuple[tuple[Move, ...], ...]
    outcome: Outcome
    before: Summary
    #: As predicted, when all moves are done; equal to ``before`` without moves.
    after: Summary

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves, in order."""
        return tuple(move for batch in self.batches for move in batch)


def apply_move(model: LoadModel, user: str, target: str) -> Move:
    """Move a user in the model, and return the record of that."""
    moved = model.users[user]
    source, destination = model.brokers[moved.broker], model.brokers[target]
    before = source.ratio, destination.ratio
    model.move(user, target)
    load = model.own_load(moved.interests)
    changes = Change(before[0], source.ratio), Change(before[1], destination.ratio)
    return Move(user, source.id, target, load, *changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a plan must bring to be worth its moves."""

    #: The least gain: a part of the largest load ratio, or more of the Redis egress. 0: any.
    gain_ratio_min: float = 0.1
    #: A part of the Redis egress is worth this part of the largest load ratio. 0: Redis egress does not matter.
    egress_weight: float = 0.5
    #: Moving every user costs as much as this part of the largest load ratio; fewer cost less. 0: moves are free.
    move_cost_ratio: float = 0.2

    def gain(self, plan: Plan) -> float:
        """Return the predicted gain, as a part of the largest load ratio. Negative: the plan makes things worse."""
        load = _part(plan.before.ratio_max, plan.after.ratio_max)
        return load + self.egress_weight * _part(plan.before.redis_egress, plan.after.redis_egress)

    def net_gain(self, plan: Plan, users: int) -> float:
        """Return the gain less the cost of the moves, of which ``users`` would be all."""
        return self.gain(plan) - self.move_cost_ratio * len(plan.moves) / max(1, users)

    def is_worth_it(self, plan: Plan, users: int) -> bool:
        """Return whether a plan should be executed."""
        return self.gain(plan) >= self.gain_ratio_min and self.net_gain(plan, users) > 0


def _part(before: float, after: float) -> float:
    return (before - after) / before if before else 0.0
