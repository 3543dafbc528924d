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

KEPT_UP_MS = 1000.0
"""A run in which more than 1% of the results took longer to users at rest, in real time, is not counted: the processors
were busy with something else, and the coordinator's intervals, which are compressed, with them.
"""

TRIES = 3

FAULTS = ("lost", "repeated", "gaps", "faults")

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
                _run(prototype, task, store)
    found: dict[str, list[Run]] = {}
    for placement, scheme in names:
        runs = [store.find(WORLD, WORKLOAD, placement, scheme, seed) for seed in seeds]
        found[f"{placement}/{scheme}"] = [run for run in runs if run is not None]
    return found


def _run(prototype: Prototype, task: Task, store: Store) -> None:
    """Run one task, again where the machine did not keep up; keep the run if it did.

    A run in which something was lost or came twice is kept in any case. Raises WorkerFailed if each try has failed.
    """
    failures: list[WorkerFailed] = []
    for _ in range(TRIES):
        try:
            run = prototype.run(task)
        except WorkerFailed as error:
            sys.stderr.write(f"  failed: {error}\n")
            failures.append(error)
            continue
        late_ms = run.more["before_ms_p99"]
        if late_ms <= KEPT_UP_MS or any(run.more[name] for name in FAULTS):
            store.add(run)
            return
        sys.stderr.write(f"  not counted, as the machine did not keep up: p99 {late_ms:.0f} ms\n")
    if len(failures) == TRIES:
        raise failures[-1]
