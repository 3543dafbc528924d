"""Runs: the same seed is the same world in every process, and a violation comes with its story."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import islice

import pytest

from dynamoth_client.machines.sequences import Stream
from dynamoth_sim.faults.profiles import PROFILES
from dynamoth_sim.mutations.mutation import Mutation, replaced
from dynamoth_sim.mutations.published_protocol import (
    absence_without_end,
    empty_when_moves_begin,
    headers_read_once,
    no_markers,
    no_verification,
)
from dynamoth_sim.run import parse_seeds, run_and_report, run_seed, run_seeds

SEED = 11


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_runs_and_replays_exactly(name: str) -> None:
    first, second = run_seed(SEED, name), run_seed(SEED, name)
    assert first.clean, "\n".join(map(str, first.violations))
    assert first.digest == second.digest and first.steps == second.steps
    assert first.totals == second.totals
    assert first.totals.published > 10 and first.totals.delivered > 10


@cache
def digests_here() -> list[str]:
    return [str(run_seed(SEED, name).digest) for name in ("everything", "mixed", "09-left-before-the-forwarded")]


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_a_seed_replays_exactly_in_another_process(hash_seed: str) -> None:
    code = (
        "from dynamoth_sim.run import run_seed\n"
        f"print(*(run_seed({SEED}, name).digest for name in ('everything', 'mixed', '09-left-before-the-forwarded')))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == digests_here()


def test_processes_share_the_seeds_and_outcomes_come_in_order() -> None:
    alone = [outcome.digest for outcome in run_seeds(range(6))]
    together = list(run_seeds(range(6), jobs=2))
    assert [outcome.digest for outcome in together] == alone
    assert [outcome.seed for outcome in together] == list(range(6))


@pytest.mark.parametrize(
    ("mutation", "profile", "seeds", "broken_min", "first"),
    [
        (no_markers, "delays", 200, 1, [1]),
        (headers_read_once, "joining", 8, 4, [0, 1, 2, 7]),
        (absence_without_end, "dying", 3, 3, []),
        (empty_when_moves_begin, "leaving", 24, 3, [9, 15, 19]),
    ],
)
def test_random_worlds_find_what_the_scenarios_find(
    mutation: Mutation, profile: str, seeds: int, broken_min: int, first: Sequence[int]
) -> None:
    """Of so many worlds, so many are broken. Those of ``first`` were, and are tried first: that saves time, no more."""
    order = sorted(range(seeds), key=lambda seed: seed not in first)
    with mutation():
        broken = (outcome for outcome in run_seeds(order, profile) if not outcome.clean)
        assert len(list(islice(broken, broken_min))) == broken_min


def test_the_story_shows_what_happened_to_the_message() -> None:
    written: list[str] = []
    with no_verification():
        assert not run_and_report(range(1, 2), "10-empty-too-early", jobs=1, write=written.append)
    text = "".join(written)
    assert "seed 1 (10-empty-too-early)" in text
    assert "S.s0 never gets P:" in text
    assert "P begins to publish" in text and "P.p publishes @s2" in text
    assert "stores plan" in text and "SETTLED" in text
    assert "replay: dynamoth sim --seeds 1-1 --scenario 10-empty-too-early" in text
    assert "broken seeds: 1" in text


def test_a_machine_that_raises_is_a_violation_with_its_traceback() -> None:
    def arrive(*arguments: object) -> list[object]:
        raise RuntimeError("mutant")

    with replaced(Stream, arrive=arrive):
        outcome = run_seed(SEED, "storm")
    (violation,) = outcome.violations
    assert violation.guarantee == "machine" and "RuntimeError" in violation.text and "mutant" in violation.text


def test_seeds_are_read() -> None:
    assert parse_seeds("7") == range(7, 8)
    assert parse_seeds("0-1999") == range(2000)
