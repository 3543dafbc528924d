"""Runs simulations, several at once, and keeps what they give."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.bad.runs import Run, Store
from bench.bad.simulated import SimWorkload
from bench.bad.simulation_figures import SCHEMES, SimFigure
from bench.bad.virtual import VirtualEdge


@dataclass(frozen=True)
class SimTask:
    """One simulation."""

    workload: SimWorkload
    capacities: tuple[float, ...] | None
    scheme: str
    seed: int


def simulated(figure: SimFigure, seeds: range, store: Store, jobs: int) -> Mapping[str, list[Run]]:
    """Return the runs of a figure by placement and scheme; run those that are missing, unless ``jobs`` is 0."""
    workload = _workload_name(figure)
    missing = [
        SimTask(figure.workload, figure.capacities, scheme, seed)
        for scheme in figure.schemes
        for seed in seeds
        if store.find("simulation", workload, "NR", scheme, seed) is None
    ]
    for number, run in enumerate(_run_all(missing, jobs), 1):
        store.add(run)
        sys.stderr.write(f"{number} of {len(missing)}: {run.scheme}, seed {run.seed}: {run.more['seconds']:.1f} s\n")
    found: dict[str, list[Run]] = {}
    for scheme in figure.schemes:
        runs = [store.find("simulation", workload, "NR", scheme, seed) for seed in seeds]
        found[f"NR/{scheme}"] = [run for run in runs if run is not None]
    return found


def _run_all(missing: list[SimTask], jobs: int) -> Iterator[Run]:
    if not jobs:
        return
    if jobs == 1 or len(missing) < 2:
        yield from map(_run_one, missing)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_run_one, missing)


def _run_one(task: SimTask) -> Run:
    begin = time.perf_counter()
    run = VirtualEdge(task.workload, task.seed, SCHEMES[task.scheme], task.capacities).run()
    run.more["seconds"] = time.perf_counter() - begin
    return run


def _workload_name(figure: SimFigure) -> str:
    return figure.workload.interests + (", sizes" if figure.capacities else "")
