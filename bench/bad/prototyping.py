"""Runs the prototype's workload for a figure, one run after the other, and keeps what that gives."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack

from bench.bad.emergencies import END_S, MINUTE_S
from bench.bad.prototype import Prototype, Task
from bench.bad.prototype_figures import PrototypeFigure
from bench.bad.runs import Run, Store
from bench.workers import WorkerFailed

WORLD, WORKLOAD = "prototype", "emergencies"


def prototyped(figure: PrototypeFigure, seeds: range, store: Store, minutes: float) -> Mapping[str, list[Run]]:
    """Return the runs of a figure by placement and scheme; run those that are missing, in ``minutes`` each.

    ``minutes`` 0: nothing is run.
    """
    names = [tuple(name.split("/")) for name in figure.runs]
    missing = [
        Task(placement, scheme, seed)
        for seed in seeds
        for placement, scheme in names
        if store.find(WORLD, WORKLOAD, placement, scheme, seed) is None
    ]
    if missing and minutes:
        with ExitStack() as stack:
            prototype = Prototype(stack, END_S / MINUTE_S / minutes)
            for number, task in enumerate(missing, 1):
                sys.stderr.write(f"{number} of {len(missing)}: {task}\n")
                try:
                    store.add(prototype.run(task))
                except WorkerFailed as error:
                    sys.stderr.write(f"  failed, and is left out: {error}\n")
    found: dict[str, list[Run]] = {}
    for placement, scheme in names:
        runs = [store.find(WORLD, WORKLOAD, placement, scheme, seed) for seed in seeds]
        found[f"{placement}/{scheme}"] = [run for run in runs if run is not None]
    return found
