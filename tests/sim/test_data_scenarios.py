"""Every rule of standing queries has a script that is harmless with it, and not without it."""

from __future__ import annotations

import pytest

from dynamoth_sim.data.mutations import DATA_CHECKS
from dynamoth_sim.data.run import DATA_PROFILES
from dynamoth_sim.data.scenarios import DATA_SCENARIOS
from dynamoth_sim.edge.run import EDGE_PROFILES
from dynamoth_sim.edge.scenarios import EDGE_SCENARIOS
from dynamoth_sim.mutations.mutation import Check
from dynamoth_sim.run import run_data_scenario, run_seed
from dynamoth_sim.scenarios.registry import SCENARIOS
from tests.sim.seeds import first_seed
from tests.sim.test_scenarios import describe

SEEDS = range(1, 4)


@pytest.mark.parametrize("name", DATA_SCENARIOS)
def test_the_scenario_is_harmless(name: str) -> None:
    outcome = run_data_scenario(first_seed(), name)
    assert outcome.clean, describe(outcome)
    assert outcome.totals.delivered > 0


@pytest.mark.parametrize("check", DATA_CHECKS, ids=lambda check: f"{check.scenario}-{check.mutation.__name__}")
def test_the_scenario_fails_without_its_remedy(check: Check) -> None:
    with check.mutation():
        for seed in SEEDS:
            outcome = run_data_scenario(seed, check.scenario, check_every=0)
            broken = {violation.guarantee for violation in outcome.violations}
            assert "machine" not in broken, describe(outcome)
            if check.broken in broken:
                return
    pytest.fail(f"the mutation of {check.scenario} breaks nothing with seeds {SEEDS}")


def test_every_scenario_has_a_mutation() -> None:
    assert {check.scenario for check in DATA_CHECKS} == set(DATA_SCENARIOS)


def test_names_are_not_used_twice() -> None:
    assert not DATA_SCENARIOS.keys() & {*DATA_PROFILES, *EDGE_PROFILES, *EDGE_SCENARIOS, *SCENARIOS}
    assert all(name.startswith("data-") for name in (*DATA_SCENARIOS, *DATA_PROFILES))


def test_the_same_seed_plays_the_same() -> None:
    name = next(iter(DATA_SCENARIOS))
    assert run_seed(7, name).digest == run_seed(7, name).digest != run_seed(8, name).digest
