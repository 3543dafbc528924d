"""The benchmark of a cycle of the balancer, at a small size: it does all that it measures."""

from __future__ import annotations

from bench.cycle_cost import MEMORY_BYTES_MAX, OVERLOADED_SHARE, Bench


def test_a_cycle_takes_reports_in_decides_and_sends_the_change() -> None:
    bench = Bench(channels=2000, servers=8, named_ratio=0.5)
    assert all(bench.model.reports(server) >= bench.options.averaging_s for server in bench.plan.servers)
    result = bench.measure()
    assert (result.channels, result.servers, result.named) == (2000, 8, 1000)
    assert min(result.ingest_s, result.decide_s, result.diff_s) > 0
    assert result.ingest_s + result.decide_s + result.diff_s <= result.cycle_s + 1e-9
    [made] = bench.decider.history.decisions
    overloaded = {f"s{number}" for number in range(0, 8, OVERLOADED_SHARE)}
    assert {move.source for move in made.decision.moves} == overloaded and result.moves == len(made.decision.moves)
    assert bench.installer.transitions.keys() == {move.channel for move in made.decision.moves}
    assert 0 < result.memory_bytes < MEMORY_BYTES_MAX and not result.missed()
