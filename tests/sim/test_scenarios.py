"""Every known fault of the published protocol is provoked, and each remedy is what keeps it harmless."""

from __future__ import annotations

import pytest

from dynamoth_sim.mutations.mutation import Check
from dynamoth_sim.mutations.registry import CHECKS
from dynamoth_sim.run import Outcome, run_scenario
from dynamoth_sim.scenarios.registry import SCENARIOS
from tests.sim.seeds import first_seed

SEEDS = range(1, 5)


def describe(outcome: Outcome) -> str:
    replay = f"replay: dynamoth sim --seeds {outcome.seed}-{outcome.seed} --scenario {outcome.name}"
    return "\n".join([str(outcome), *map(str, outcome.violations), replay])


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("of_this_commit", [False, True])
def test_the_scenario_is_harmless(name: str, of_this_commit: bool) -> None:
    outcome = run_scenario(first_seed() if of_this_commit else 1, name)
    assert outcome.clean, describe(outcome)
    assert outcome.totals.published > 0


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.scenario}-{check.mutation.__name__}")
def test_the_scenario_fails_without_its_remedy(check: Check) -> None:
    """Each seed has other delays: most show the fault, and one of the first ones does."""
    with check.mutation():
        for seed in SEEDS:
            outcome = run_scenario(seed, check.scenario, check_every=0)
            broken = {violation.guarantee for violation in outcome.violations}
            assert "machine" not in broken, describe(outcome)
            if check.broken in broken:
                return
    pytest.fail(f"the mutation of {check.scenario} breaks nothing with seeds {SEEDS}")


def test_every_scenario_has_a_mutation() -> None:
    assert {check.scenario for check in CHECKS} == set(SCENARIOS)


def test_every_known_case_is_there() -> None:
    assert {int(name.partition("-")[0]) for name in SCENARIOS} >= set(range(1, 75))
