"""Hundreds of random worlds, others for every commit: in none of them is a guarantee broken."""

from __future__ import annotations

import os

import pytest

from dynamoth_sim.run import run_and_report
from tests.sim.seeds import first_seed

COUNT = int(os.environ.get("DYNAMOTH_TEST_SEEDS", "120"))
"""``make exhaustive`` runs more of them."""

PARTS = 8
"""Tests that share the seeds, so that several workers run them."""


@pytest.mark.parametrize("part", range(PARTS))
def test_no_guarantee_is_broken_in_a_random_world(part: int) -> None:
    seeds = range(first_seed(), first_seed() + COUNT)[part::PARTS]
    written: list[str] = []
    assert run_and_report(seeds, jobs=1, write=written.append), "".join(written)
