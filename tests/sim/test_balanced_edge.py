"""Worlds in which coordinators move users while everything else goes on, or fails."""

from __future__ import annotations

import pytest

from dynamoth_broker.coordinator.machine import CoordinatorMachine
from dynamoth_sim.edge.run import EDGE_PROFILES, run_edge_profile
from dynamoth_sim.world.world import World


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("profile", ["edge-balanced", "edge-balanced-crashes"])
def test_coordinators_move_users_and_nobody_loses_anything(profile: str, seed: int) -> None:
    edge, live = run_edge_profile(World(seed, check_every=1), EDGE_PROFILES[profile])
    assert live() == []
    machines = [process.machine for process in edge.coordinators]
    assert sum(each.counters["moves_left"] for each in machines if isinstance(each, CoordinatorMachine)) > 0
