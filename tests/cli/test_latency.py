"""Latencies, counted in classes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamoth_demo.latency import CLASS_RATIO, HIGHEST_NS, LOWEST_NS, LatencyCounts


def counts(*latencies_ns: int) -> LatencyCounts:
    made = LatencyCounts()
    for latency_ns in latencies_ns:
        made.add(latency_ns)
    return made


def test_nothing_has_no_quantile() -> None:
    assert LatencyCounts().quantile_ms(0.5) is None


@given(st.lists(st.integers(LOWEST_NS, HIGHEST_NS), min_size=1, max_size=200), st.sampled_from((0.5, 0.9, 0.99, 1.0)))
def test_a_quantile_is_exact_to_the_width_of_a_class(latencies_ns: list[int], ratio: float) -> None:
    ordered = sorted(latencies_ns)
    true_ms = next(ns for rank, ns in enumerate(ordered, 1) if rank >= len(ordered) * ratio) / 1e6
    found_ms = counts(*latencies_ns).quantile_ms(ratio)
    assert found_ms is not None
    assert true_ms / CLASS_RATIO <= found_ms * 1.0001
    assert found_ms <= true_ms * CLASS_RATIO * 1.0001


def test_memory_is_bounded_whatever_comes() -> None:
    made = counts(-5, 0, 10**30, *(3**power for power in range(60)))
    made.merge(counts(*(7**power for power in range(60))).counts)
    assert len(made.counts) <= 460
    assert made.quantile_ms(0.0001) == LOWEST_NS / 1e6
