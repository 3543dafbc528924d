"""Random worlds with standing queries, others for every commit: none breaks a guarantee, unless a rule is missing."""

from __future__ import annotations

import os

import pytest

from dynamoth_sim.data.mutations import RANDOM_CHECKS
from dynamoth_sim.data.run import DATA_PROFILES
from dynamoth_sim.mutations.mutation import Check
from dynamoth_sim.run import run_and_report, run_seed
from tests.sim.seeds import first_seed

COUNT = int(os.environ.get("DYNAMOTH_TEST_SEEDS", "60")) // 30
"""Of each profile. ``make exhaustive`` runs more of them."""

MUTATED_SEEDS = range(1, 13)
"""A mutation is found in one of these worlds; in most of them it is in one of the first four."""


@pytest.mark.parametrize("profile", DATA_PROFILES)
def test_no_guarantee_is_broken_in_a_random_world(profile: str) -> None:
    seeds = range(first_seed(), first_seed() + COUNT)
    written: list[str] = []
    assert run_and_report(seeds, profile, jobs=1, write=written.append), "".join(written)


@pytest.mark.parametrize("check", RANDOM_CHECKS, ids=lambda check: f"{check.scenario}-{check.mutation.__name__}")
def test_random_worlds_find_what_the_scenarios_find(check: Check) -> None:
    with check.mutation():
        for seed in MUTATED_SEEDS:
            outcome = run_seed(seed, check.scenario)
            if check.broken in {violation.guarantee for violation in outcome.violations}:
                return
    pytest.fail(f"{check.mutation.__name__} breaks nothing in the worlds {MUTATED_SEEDS}")
