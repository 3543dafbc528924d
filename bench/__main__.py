"""Every benchmark that has a figure to reach, one after the other, and a table of what was reached.

Run with ``make bench``, or ``python -m bench [NAME ...]`` for some of them. Ratios are of one run; machines differ.
Exits with 1 when a figure was missed. A benchmark that this machine does not allow is skipped, and says why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import exit_status
from dynamoth_cli.local.child import interrupted_by_signals

Results = Mapping[str, Any]

MISSED = "MISSED"
STOP_TIMEOUT_S = 60.0
"""A benchmark that is interrupted has removed what it made after this long at most."""


@dataclass(frozen=True)
class Figure:
    """One figure to reach, as text and as a test of what a benchmark printed."""

    text: str
    value: Callable[[Results], float]
    reached: Callable[[float], bool]


@dataclass(frozen=True)
class Row:
    """One line of the table. ``value`` is None for what was not measured."""

    verdict: str
    value: float | None
    text: str


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: what to run, and the figures that its results must reach."""

    module: str
    arguments: tuple[str, ...]
    figures: tuple[Figure, ...]


def _sum(*names: str) -> Callable[[Results], float]:
    return lambda results: sum(float(results[name]) for name in names)


def _ratio(load: str) -> Callable[[Results], float]:
    return lambda results: float(results[load]["ratio"])


def _seconds(query: str) -> Callable[[Results], float]:
    return lambda results: float(results["seconds"][query])


def _against(system: str) -> Callable[[Results], float]:
    """Return how to find the players of Dynamoth, against those of another system; 0 when that held none."""
    return lambda results: float(results["ratios"][f"dynamoth/{system}"] or 0.0)


def at_most(bound: float) -> Callable[[float], bool]:
    """Return a test for values up to ``bound``."""
    return lambda value: value <= bound


def at_least(bound: float) -> Callable[[float], bool]:
    """Return a test for values from ``bound``."""
    return lambda value: value >= bound


def _busy_channel(changes: str, where: str) -> tuple[Figure, ...]:
    """Return the figures of a busy channel that goes through ``changes``."""
    return (
        Figure(
            f"{changes}: lost + duplicated + reordered messages, gaps: 0",
            _sum("lost", "duplicated", "reordered", "gaps"),
            at_most(0),
        ),
        Figure(
            f"{changes}{where}: p99 at most 20 ms above rest",
            lambda results: results["changing_ms_p99"] - results["rest_ms_p99"],
            at_most(20),
        ),
        Figure(f"{changes}: the slowest settled within 2 s", _sum("settled_s_max"), at_most(2)),
    )


BENCHMARKS: Mapping[str, Benchmark] = {
    "plan": Benchmark(
        "bench.plan_cost",
        (),
        (Figure("new plan, 100,000 channels on 100 servers: under 0.5 s", _sum("plan_s"), at_most(0.5)),),
    ),
    "cycle": Benchmark(
        "bench.cycle_cost",
        (),
        (
            Figure(
                "a cycle of the balancer, 1,000,000 channels on 1,000 servers: under 2 s", _sum("cycle_s"), at_most(2)
            ),
            Figure("the same: memory under 2 GB", _sum("memory_bytes"), at_most(2e9)),
        ),
    ),
    "moves": Benchmark("bench.moves", ("--json",), _busy_channel("100 moves", "")),
    "transitions": Benchmark(
        "bench.transitions",
        ("--json",),
        _busy_channel("100 transitions between all modes", ", on a machine that is a third idle"),
    ),
    "churn": Benchmark(
        "bench.churn",
        ("--json",),
        (
            Figure(
                "5 minutes, 300 clients come and go, agents fail: lost silently + duplicated + reordered: 0",
                _sum("lost", "duplicated", "reordered"),
                at_most(0),
            ),
            Figure("5 minutes of churn: violations of any guarantee: 0", _sum("violations"), at_most(0)),
        ),
    ),
    "agent": Benchmark(
        "bench.agent_cost",
        (),
        (
            Figure("agent: at most 1.2 us of CPU per observed message", _sum("cpu_us_per_message"), at_most(1.2)),
            Figure(
                "Redis keeps at least 85% of its throughput (by its CPU time per publication)",
                lambda r: r["redis_cpu_us_alone"] / r["redis_cpu_us_with_agent"],
                at_least(0.85),
            ),
        ),
    ),
    "agent-memory": Benchmark(
        "bench.agent_memory",
        (),
        (
            Figure("agent of 200,000 active channels: at most 300 MB", _sum("process_bytes"), at_most(300e6)),
            Figure("the same: channels that it does not follow: 0", _sum("unfollowed"), at_most(0)),
        ),
    ),
    "client": Benchmark(
        "bench.client_throughput",
        ("--keep-awake", "--json", "{file}"),
        (
            Figure("publish, one task, against redis-py: at least 1x", _ratio("publish, one by one"), at_least(1)),
            Figure("publish, 200 tasks, against redis-py: at least 20x", _ratio("publish, 200 tasks"), at_least(20)),
            Figure("listen(), against redis-py: at least 3x", _ratio("listen"), at_least(3)),
            Figure("batches(), against redis-py's listen(): at least 5x", _ratio("batches"), at_least(5)),
            Figure("listen() with guarantees, against without: at least 0.7x", _ratio("guarantees"), at_least(0.7)),
            Figure("sync publish, against redis-py: at least 1x", _ratio("sync publish"), at_least(1)),
            Figure("sync listen(), against redis-py: at least 1x", _ratio("sync listen"), at_least(1)),
        ),
    ),
    "latency": Benchmark(
        "bench.client_latency",
        ("--keep-awake", "--json"),
        (
            Figure("latency at 1,000 messages/s, p50, against redis-py: at most 1x", _ratio("p50"), at_most(1)),
            Figure("latency at 1,000 messages/s, p99, against redis-py: at most 1x", _ratio("p99"), at_most(1)),
        ),
    ),
    "memory": Benchmark(
        "bench.client_memory",
        (),
        (Figure("client memory per channel, 100,000: at most 1 KB", _sum("bytes_per_channel"), at_most(1024)),),
    ),
    "profile": Benchmark("bench.client_profile", (), ()),
    "recorder": Benchmark(
        "bench.recorder_cost",
        (),
        (
            Figure("recorder, 100,000 rows of channels/s: at most half a core", _sum("cores"), at_most(0.5)),
            Figure("the same: rows lost: 0", _sum("rows_lost"), at_most(0)),
        ),
    ),
    "records": Benchmark(
        "bench.records_cost",
        (),
        (Figure("the balancer's machine with records, against without: at most 1.05x", _sum("ratio"), at_most(1.05)),),
    ),
    "analytics": Benchmark(
        "bench.analytics",
        (),
        (
            Figure("report of 50 million rows: under 300 s on 2 cores", _sum("report_s_50000000"), at_most(300)),
            Figure("report of 50 million rows, against 5 million: at most 12x", _sum("growth"), at_most(12)),
        ),
    ),
    "replication": Benchmark(
        "bench.replication",
        ("--json", "{file}"),
        (
            Figure(
                "all-publishers: 3 servers hold at least 2.7x the subscribers", _ratio("all-publishers"), at_least(2.7)
            ),
            Figure(
                "all-subscribers: 3 servers hold at least 2.7x the publishers", _ratio("all-subscribers"), at_least(2.7)
            ),
        ),
    ),
    "scalability": Benchmark(
        "bench.scalability",
        ("--small", "--seed", "4", "--json", "{file}"),
        (
            Figure(
                "RGame, small: players under 150 ms mean, against consistent hashing: at least 1.6x",
                _against("hashing"),
                at_least(1.6),
            ),
            Figure(
                "RGame, small: the same, against a Redis Cluster: at least 1x", _against("redis-cluster"), at_least(1)
            ),
        ),
    ),
    "elasticity": Benchmark(
        "bench.elasticity",
        ("--small", "--json", "{file}"),
        (
            Figure(
                "servers come and go, small: server-seconds, against the best fixed number: at most 1.3x",
                _sum("ratio"),
                at_most(1.3),
            ),
            Figure("the same: too few servers for at most 60 s", _sum("short_s"), at_most(60)),
            Figure("the same: too many servers for at most 60 s", _sum("spare_s"), at_most(60)),
        ),
    ),
    "bad-13": Benchmark(
        "bench.bad",
        ("--figure", "13", "--quick", "--results", "{file}.runs"),
        (Figure("figure 13 of BAD, 2 seeds of 10: checks missed: 0", _sum("missed"), at_most(0)),),
    ),
    "bad-14": Benchmark(
        "bench.bad",
        ("--figure", "14", "--quick", "--results", "{file}.runs"),
        (Figure("figure 14 of BAD, 2 seeds of 10: checks missed: 0", _sum("missed"), at_most(0)),),
    ),
    "data-cluster": Benchmark(
        "bench.data_cluster",
        (),
        tuple(
            Figure(
                f"an execution for 100,000 interests and 10,000 records, {words}: at most 10 s",
                _seconds(query),
                at_most(10),
            )
            for query, words in (
                ("of_kind", "by kind"),
                ("near_place", "near a place"),
                ("near_user", "near the user"),
            )
        ),
    ),
    "data-users": Benchmark(
        "bench.data_users",
        (),
        (
            Figure(
                "10 times the users with the same interests: an execution takes at most 1.1 times",
                _sum("ratio"),
                at_most(1.1),
            ),
        ),
    ),
    "bad-12": Benchmark(
        "bench.bad",
        ("--figure", "12", "--quick", "--results", "{file}.runs"),
        (Figure("figure 12 of BAD on real processes, 2 seeds of 10: checks missed: 0", _sum("missed"), at_most(0)),),
    ),
    "bad-regional": Benchmark(
        "bench.bad",
        ("--beyond", "regional", "--quick", "--results", "{file}.runs"),
        (Figure("regional interests, against the shuffle of BAD: checks missed: 0", _sum("missed"), at_most(0)),),
    ),
    "cluster-moves": Benchmark(
        "bench.cluster_moves",
        ("--small", "--json", "{file}"),
        (
            Figure(
                "channels move all the time, small: lost + duplicated + reordered: 0",
                lambda results: _sum("lost", "duplicated", "reordered")(results["dynamoth"]),
                at_most(0),
            ),
        ),
    ),
}


def run(benchmark: Benchmark) -> Results | None:
    """Run one benchmark in a process of its own.

    Returns its results: its last line of JSON, or the file that it wrote. None when it cannot run on this machine; it
    has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        arguments = [argument.format(file=file) for argument in benchmark.arguments]
        with subprocess.Popen(
            [sys.executable, "-m", benchmark.module, *arguments], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                printed, _ = process.communicate()
            except BaseException:
                # Not killed, as ``subprocess.run`` would: some have to remove what they made.
                process.terminate()
                process.wait(STOP_TIMEOUT_S)
                raise
        sys.stdout.write(printed)
        if process.returncode == exit_status.SKIPPED:
            return None
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        if not file.exists() and not lines:
            raise SystemExit(f"{benchmark.module} ended with status {process.returncode} and without results")
        results: Results = json.loads(file.read_text() if file.exists() else lines[-1])
        return results


def main() -> int:
    """Run what is asked for, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)}; all by default")
    names: list[str] = parser.parse_args().names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    sys.stdout.write(f"{describe_machine()}\n")
    rows: list[Row] = []
    for name in names or BENCHMARKS:
        sys.stdout.write(f"== {name}\n")
        sys.stdout.flush()
        results = run(BENCHMARKS[name])
        rows += [judge(figure, results) for figure in BENCHMARKS[name].figures]
    sys.stdout.write("\n")
    for row in rows:
        value = "" if row.value is None else f"{row.value:.3f}"
        sys.stdout.write(f"{row.verdict:8} {value:>9}  {row.text}\n")
    return 1 if any(row.verdict == MISSED for row in rows) else 0


def describe_machine() -> str:
    """Return what figures depend on: this Python and how it was built, and the processors."""
    built_with = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    build = "built with" if "--enable-optimizations" in built_with else "built without"
    return (
        f"{platform.python_implementation()} {platform.python_version()} ({sys.executable}, {build}"
        f" --enable-optimizations), {os.cpu_count()} processors"
    )


def judge(figure: Figure, results: Results | None) -> Row:
    """Compare a figure with the results; None: the benchmark could not run."""
    if results is None:
        return Row("skipped", None, figure.text)
    value = figure.value(results)
    return Row("reached" if figure.reached(value) else MISSED, value, figure.text)


if __name__ == "__main__":
    try:
        with interrupted_by_signals():
            sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(exit_status.INTERRUPTED)
