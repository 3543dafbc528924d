"""Judges whether moves are worth their price.

Each move has one, however small its channel is: versions of the plan at every server, and clients that subscribe anew
and for a moment get everything twice.
"""

from __future__ import annotations

import enum

from dynamoth_balancer.decide.cluster import Move, ServerLoad
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


def can_be_worth_it(source: ServerLoad, target: ServerLoad, options: BalancerOptions) -> bool:
    """Return whether any channel, however small, may be worth a move; False spares judging all of them."""
    ratio = target.load_ratio
    much_better = ratio <= source.load_ratio - options.much_better_ratio
    return (much_better or ratio <= options.accept_ratio) and ratio <= source.load_ratio - options.improvement_ratio_min


def is_worth_moves(gain: float, options: BalancerOptions) -> bool:
    """Return whether lowering the load ratio of a server by ``gain`` is worth all the moves that do it."""
    return gain >= options.improvement_ratio_min
