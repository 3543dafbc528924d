"""Every rule of brokers and users has a script that is harmless with it, and not without it."""

from __future__ import annotations

import pytest

from dynamoth_sim.edge.mutations import EDGE_CHECKS
from dynamoth_sim.edge.run import EDGE_PROFILES
from dynamoth_sim.edge.scenarios import EDGE_SCENARIOS
from dynamoth_sim.mutations.mutation import Check
from dynamoth_sim.run import run_edge_scenario, run_seed
from dynamoth_sim.scenarios.registry import SCENARIOS
from tests.sim.seeds import first_seed
from tests.sim.test_scenarios import describe

SEEDS = range(1, 5)


@pytest.mark.parametrize("name", EDGE_SCENARIOS)
@pytest.mark.parametrize("of_this_commit", [False, True])
def test_the_scenario_is_harmless(name: str, of_this_commit: bool) -> None:
    outcome = run_edge_scenario(first_seed() if of_this_commit else 1, name)
    assert outcome.clean, describe(outcome)
    assert outcome.totals.delivered > 0


@pytest.mark.parametrize("check", EDGE_CHECKS, ids=lambda check: f"{check.scenario}-{check.mutation.__name__}")
def test_the_scenario_fails_without_its_remedy(check: Check) -> None:
    with check.mutation():
        for seed in SEEDS:
            outcome = run_edge_scenario(seed, check.scenario, check_every=0)
            broken = {violation.guarantee for violation in outcome.violations}
            assert "machine" not in broken, describe(outcome)
            if check.broken in broken:
                return
    pytest.fail(f"the mutation of {check.scenario} breaks nothing with seeds {SEEDS}")


def test_every_scenario_has_a_mutation() -> None:
    assert {check.scenario for check in EDGE_CHECKS} == set(EDGE_SCENARIOS)


def test_names_are_not_used_twice() -> None:
    assert not EDGE_SCENARIOS.keys() & {*EDGE_PROFILES, *SCENARIOS}
    assert all(name.startswith("edge-") for name in EDGE_SCENARIOS)


def test_the_same_seed_plays_the_same() -> None:
    name = next(iter(EDGE_SCENARIOS))
    assert run_seed(7, name).digest == run_seed(7, name).digest != run_seed(8, name).digest
