"""Every scenario, by its number and name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth_sim.cluster import AMPLE_BYTES_PER_S
from dynamoth_sim.scenarios import (
    compatibility,
    delivery,
    failure,
    observation,
    patterns,
    published,
    replication,
    rights,
    standalone,
)
from dynamoth_sim.scenarios.stage import Stage


@dataclass(frozen=True, slots=True)
class Scenario:
    """A script, and the stage that it is written for."""

    play: Callable[[Stage], None]
    servers: int = 3
    #: What each server can send.
    outgoing_bytes_per_s_max: int = AMPLE_BYTES_PER_S
    #: Whether something fails in it, so that messages may be lost if subscribers report it.
    losses_allowed: bool = False
    #: How many servers the balancer itself spreads a channel over.
    replicas_max: int = 1
    compatibility: tuple[CompatibilityRule, ...] = ()


_OTHERS = (patterns, failure, delivery, standalone)
_HARMLESS = (*_OTHERS, published, rights, observation)
SCENARIOS: dict[str, Scenario] = {
    "14-different-rings": Scenario(published.different_rings, servers=2),
    "20-hot-channel": Scenario(published.hot_channel, outgoing_bytes_per_s_max=120_000),
    **{name: Scenario(play, servers=4) for name, play in replication.PLAYS.items()},
    **{name: Scenario(play, losses_allowed=True) for name, play in replication.FAILURES.items()},
    **{name: Scenario(play) for module in _HARMLESS for name, play in module.PLAYS.items()},
    **{name: Scenario(play, losses_allowed=True) for module in _OTHERS for name, play in module.FAILURES.items()},
    **{name: Scenario(play, compatibility=rules) for name, (play, rules) in compatibility.PLAYS.items()},
    **{
        name: Scenario(play, outgoing_bytes_per_s_max=120_000, replicas_max=3)
        for name, play in replication.LOADS.items()
    },
    **{
        name: Scenario(play, outgoing_bytes_per_s_max=120_000, losses_allowed=True)
        for name, play in observation.LOADS.items()
    },
}
"""Every case by its number and name."""
