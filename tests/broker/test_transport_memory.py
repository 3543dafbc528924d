"""What an idle user costs, measured as ``bench.edge_memory`` does, with fewer users."""

from __future__ import annotations

from bench.edge_memory import measure


def test_an_idle_user_takes_less_than_10_kib() -> None:
    assert measure("broker", 1000, None).bytes_per_user < 10 * 1024
