"""Judges whether the move of a channel from one server to another is worth it."""

from __future__ import annotations

import enum

from dynamoth_balancer.decide.cluster import Move
from dynamoth_balancer.options import BalancerOptions


class Worth(enum.Enum):
    """The judgement of a move."""

    WORTH_IT = "worth it"
    FILLS_TARGET = "fills its target"
    """The target would be above ``accept_ratio``, and not ``much_better_ratio`` below what the source is now."""
    GAINS_LITTLE = "gains little"
    """The larger load ratio of the two servers would not get smaller, or by less than ``improvement_ratio_min``."""


def judge(move: Move, options: BalancerOptions) -> Worth:
    """Return whether a move is worth it: the one score for both the source and the target."""
    source, target = move.ratios[move.source], move.ratios[move.target]
    much_better = target.after <= source.before - options.much_better_ratio
    if not much_better and target.after > options.accept_ratio:
        return Worth.FILLS_TARGET
    smaller_by_margin = target.after <= source.before - options.improvement_ratio_min
    smaller = max(source.after, target.after) < max(source.before, target.before)
    return Worth.WORTH_IT if smaller_by_margin and smaller else Worth.GAINS_LITTLE
