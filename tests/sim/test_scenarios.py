"""Every known fault of the published protocol is provoked, and each remedy is what keeps it harmless."""

from __future__ import annotations

import pytest

from dynamoth_sim.mutations.mutation import Check
from dynamoth_sim.mutations.registry import CHECKS
from dynamoth_sim.run import Outcome, run_scenario
from dynamoth_sim.scenarios.registry import SCENARIOS


def describe(outcome: Outcome) -> str:
    return "\n".join([str(outcome), *map(str, outcome.violations)])


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_scenario_is_harmless(name: str, seed: int) -> None:
    outcome = run_scenario(seed, name)
    assert outcome.clean, describe(outcome)
    assert outcome.totals.published > 0


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.scenario}-{check.mutation.__name__}")
def test_the_scenario_fails_without_its_remedy(check: Check) -> None:
    with check.mutation():
        outcome = run_scenario(1, check.scenario, check_every=0)
    broken = {violation.guarantee for violation in outcome.violations}
    assert check.broken in broken and "machine" not in broken, describe(outcome)
    assert run_scenario(1, check.scenario).clean, "a mutation leaves nothing behind"


def test_every_scenario_has_a_mutation() -> None:
    assert {check.scenario for check in CHECKS} == set(SCENARIOS)


def test_every_known_case_is_there() -> None:
    cases = {int(name[:2]) for name in SCENARIOS}
    assert cases == set(range(1, 69))
