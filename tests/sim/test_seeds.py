"""Hundreds of random worlds, others for every commit: in none of them is a guarantee broken."""

from __future__ import annotations

import os

import pytest

from dynamoth_sim.run import main
from tests.sim.seeds import first_seed

COUNT = int(os.environ.get("DYNAMOTH_TEST_SEEDS", "400"))
"""``make soak`` runs more of them."""

PARTS = 16
"""Tests that share the seeds, so that several workers run them."""


@pytest.mark.parametrize("part", range(PARTS))
def test_no_guarantee_is_broken_in_a_random_world(part: int) -> None:
    seeds = range(first_seed(), first_seed() + COUNT)[part::PARTS]
    written: list[str] = []
    failed = [seed for seed in seeds if main(str(seed), jobs=1, write=written.append) != 0]
    assert not failed, "".join(written)
