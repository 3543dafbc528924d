"""Random worlds of brokers and users, others for every commit: in none of them is a guarantee broken."""

from __future__ import annotations

import os

import pytest

from dynamoth_sim.edge.run import EDGE_PROFILES
from dynamoth_sim.run import run_and_report
from tests.sim.seeds import first_seed

COUNT = int(os.environ.get("DYNAMOTH_TEST_SEEDS", "60")) // len(EDGE_PROFILES)
"""Of each profile. ``make exhaustive`` runs more of them."""


@pytest.mark.parametrize("profile", EDGE_PROFILES)
def test_no_guarantee_is_broken_in_a_random_world(profile: str) -> None:
    seeds = range(first_seed(), first_seed() + COUNT)
    written: list[str] = []
    assert run_and_report(seeds, profile, jobs=1, write=written.append), "".join(written)
