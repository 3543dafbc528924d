"""Two thousand random worlds: in none of them is a guarantee broken."""

from __future__ import annotations

import pytest

from dynamoth_sim.run import main


@pytest.mark.parametrize("seeds", [f"{first}-{first + 499}" for first in range(0, 2000, 500)])
def test_two_thousand_seeds(seeds: str) -> None:
    written: list[str] = []
    assert main(seeds, write=written.append) == 0, "".join(written)
