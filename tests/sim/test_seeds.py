"""Two thousand random worlds: in none of them is a guarantee broken."""

from __future__ import annotations

from dynamoth_sim.run import main

SEEDS = "0-1999"


def test_two_thousand_seeds() -> None:
    written: list[str] = []
    assert main(SEEDS, write=written.append) == 0, "".join(written)
