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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "x"), "seeds are given as A-B"),
        (("--seeds", "5-1"), "there is no seed"),
        (("--seeds", "1", "--scenario", "nonsense"), "invalid choice: 'nonsense'"),
        (("--seeds", "1", "--jobs", "0"), "a number from 1 to 1024"),
        ((), "--seeds"),
    ],
)
def test_arguments_that_make_no_sense_exit_with_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sim", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
