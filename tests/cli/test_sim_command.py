"""``dynamoth sim``: what it says, and its exit codes."""

from __future__ import annotations

import pytest

from dynamoth_cli.main import main
from dynamoth_sim.mutations.registry import CHECKS
from dynamoth_sim.scenarios.registry import SCENARIOS


def test_clean_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seeds", "1-3", "--jobs", "1"]) == 0
    assert "3 seeds, 0 broken" in capsys.readouterr().out


def test_a_scenario_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seeds", "5", "--scenario", next(iter(SCENARIOS)), "--jobs", "1"]) == 0
    assert "1 seeds, 0 broken" in capsys.readouterr().out


def test_a_violation_exits_with_1_and_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    check = CHECKS[0]
    with check.mutation():
        assert main(["sim", "--seeds", "1", "--scenario", check.scenario, "--jobs", "1"]) == 1
    assert f"replay: dynamoth sim --seeds 1-1 --scenario {check.scenario}" in capsys.readouterr().out
