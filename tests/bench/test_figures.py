"""The table of figures: reached, missed, skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import exit_status
from bench.__main__ import MISSED, Benchmark, Figure, at_least, judge, run

ANY = Benchmark("bench.any", (), ())
FIGURE = Figure("at least 2.7x", lambda results: results["ratio"], at_least(2.7))


@pytest.mark.parametrize(("ratio", "verdict"), [(540 / 200, "reached"), (2.69, MISSED)])
def test_a_figure_is_compared_with_the_results(ratio: float, verdict: str) -> None:
    assert judge(FIGURE, {"ratio": ratio}).verdict == verdict


def program(folder: Path, text: str) -> str:
    """Return a program that stands in the place of Python, and so of a benchmark."""
    file = folder / "benchmark"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_a_benchmark_that_cannot_run_is_skipped_and_not_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", program(tmp_path, f"exit {exit_status.SKIPPED}"))
    assert run(ANY) is None
    assert judge(FIGURE, None).verdict == "skipped"


def test_results_are_the_last_line_of_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", program(tmp_path, """echo '{"ratio": 1}'; echo words; echo '{"ratio": 3}'"""))
    assert run(ANY) == {"ratio": 3}


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_a_benchmark_that_ends_otherwise_is_not_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    monkeypatch.setattr("sys.executable", program(tmp_path, f"exit {status}"))
    with pytest.raises(SystemExit, match=f"status {status} and without results"):
        run(ANY)
