"""Measures the figures of the BAD paper again, and what goes beyond them. See docs/bad-figures.md.

Each figure has one command, ``python -m bench.bad --figure N``, which prints a table of claims. Runs are stored in a
file, as several figures need the same ones: a stored run is not repeated. The exit status is 1 when a check was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from bench.bad import million
from bench.bad.claims import Row, Runs, markdown, rows, table
from bench.bad.plot import draw
from bench.bad.prototype_figures import FIGURES as PROTOTYPED
from bench.bad.prototype_figures import STEADY_S as PROTOTYPE_STEADY_S
from bench.bad.prototype_figures import PrototypeFigure
from bench.bad.prototyping import prototyped
from bench.bad.runs import Store
from bench.bad.simulating import simulated
from bench.bad.simulation_figures import FIGURES as SIMULATED
from bench.bad.simulation_figures import STEADY_S as SIM_STEADY_S
from bench.bad.simulation_figures import SimFigure

QUICK_SEEDS = 2
"""With ``--quick``."""


def main() -> int:
    """Run what the file of runs lacks, and judge the claims; return the exit status."""
    arguments = _parse()
    store = Store(arguments.results)
    seeds = range(1, 1 + (QUICK_SEEDS if arguments.quick else arguments.seeds))
    found: list[Row] = []
    name = arguments.figure or arguments.beyond
    if name == "million":
        return _million(arguments, store)
    for figure in _figures(name):
        if isinstance(figure, SimFigure):
            runs = simulated(figure, seeds, store, 0 if arguments.stored else arguments.jobs)
        else:
            runs = prototyped(figure, seeds, store, 0.0 if arguments.stored else arguments.minutes)
        judged = rows(figure.claims, runs)
        text = markdown(judged) if arguments.markdown else table(judged)
        sys.stdout.write(f"{figure.title}; {_seeds(runs)}\n\n{text}\n\n")
        found += judged
        if arguments.plot is not None:
            begin_s = SIM_STEADY_S if isinstance(figure, SimFigure) else PROTOTYPE_STEADY_S
            draw(figure.title, runs, begin_s, arguments.plot)
    return _conclude(name, found)


def _conclude(name: str, found: list[Row]) -> int:
    """Print how many checks were reached and missed; return the exit status."""
    reached, missed = (sum(row.verdict == verdict for row in found) for verdict in ("reached", "MISSED"))
    counts = {"reached": reached, "missed": missed}
    sys.stdout.write(json.dumps({"benchmark": "bad", "figure": name, **counts}) + "\n")
    return int(missed > 0)


def _million(arguments: argparse.Namespace, store: Store) -> int:
    users, brokers = (100_000, 20) if arguments.quick else (1_000_000, million.BROKERS)
    workload = f"million, {users} users"
    run = store.find("simulation", workload, "NR", million.SCHEME.name, 1)
    if run is None:
        run = replace(million.run(users, brokers, 1), workload=workload)
        store.add(run)
    judged = rows(million.CLAIMS, {"NR/ours": [run]})
    text = markdown(judged) if arguments.markdown else table(judged)
    sys.stdout.write(f"{million.title(users, brokers)}; 1 seed\n\n{text}\n\n")
    return _conclude("million", judged)


def _figures(name: str) -> tuple[SimFigure | PrototypeFigure, ...]:
    return SIMULATED[name] if name in SIMULATED else (PROTOTYPED[name],)


def _seeds(runs: Runs) -> str:
    """Return how many seeds there are of each run, and which, if not the first ones."""
    least, most = min(map(len, runs.values())), max(map(len, runs.values()))
    found = sorted({run.seed for each in runs.values() for run in each})
    which = "" if found == [*range(1, most + 1)] else f" ({', '.join(map(str, found))})"
    return (f"{least} seeds" if least == most else f"{least} to {most} seeds") + which


NAMES = sorted((*SIMULATED, *PROTOTYPED, "million"), key=lambda name: (not name.isdigit(), name.zfill(2)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.bad", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure", choices=[name for name in NAMES if name.isdigit()])
    what.add_argument("--beyond", choices=[name for name in NAMES if not name.isdigit()])
    parser.add_argument("--seeds", type=int, default=10, help="seeds, from 1 on (default 10)")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_SEEDS} seeds; 100,000 users in place of a million"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("bad-results.jsonl"), help="the file of runs (default bad-results.jsonl)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1.0,
        help="figures 5 to 12: how long a run takes; 30 is the paper's time, less compresses it (default 1)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once (default 1)")
    parser.add_argument("--stored", action="store_true", help="run nothing: judge the stored runs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture, with matplotlib")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
