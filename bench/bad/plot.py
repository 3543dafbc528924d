"""The picture of a figure: load of each broker over time for each scheme, then largest load, cov and moves.

Needs matplotlib (the extra ``bench``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from bench.bad.claims import Runs
from bench.bad.runs import Run

WIDTH_INCHES, HEIGHT_INCHES = 3.2, 6.0


def draw(title: str, runs: Runs, begin_s: float, file: Path) -> None:
    """Draw runs into ``file``, in the format that its name ends with. Lines are of the first seed, bars of all.

    Raises SystemExit: there is no matplotlib.
    """
    try:
        figure_class: Any = import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise SystemExit("drawing needs matplotlib: pip install 'dynamoth[bench]'") from error
    names = [name for name, each in runs.items() if each]
    columns = max(3, len(names))
    figure = figure_class(figsize=(WIDTH_INCHES * columns, HEIGHT_INCHES), layout="constrained")
    figure.suptitle(title)
    top: Any = None
    for index, name in enumerate(names):
        axes = figure.add_subplot(2, columns, index + 1, sharey=top)
        top = top or axes
        _lines(axes, name, runs[name][0])
    bars: Sequence[tuple[str, Callable[[Run], float]]] = (
        ("mean of the largest load", lambda run: run.mean_max(begin_s)),
        ("mean cov", lambda run: run.mean_cov(begin_s)),
        ("users moved", lambda run: float(run.moved)),
    )
    for index, (label, value) in enumerate(bars):
        _bars(figure.add_subplot(2, columns, columns + index + 1), label, {name: runs[name] for name in names}, value)
    figure.savefig(file)


def _lines(axes: Any, name: str, run: Run) -> None:
    minutes = [at / 60 for at in run.times]
    for broker in range(len(run.loads[0])):
        axes.plot(minutes, [loads[broker] for loads in run.loads], linewidth=0.8)
    axes.set_title(f"{name}, seed {run.seed}", fontsize="small")
    axes.set_xlabel("minute")
    axes.set_ylabel("load of each broker (bytes/s)")


def _bars(axes: Any, label: str, runs: Runs, value: Callable[[Run], float]) -> None:
    """Draw medians, with the range of the seeds."""
    found = {name: [value(run) for run in each] for name, each in runs.items()}
    middles = [median(each) for each in found.values()]
    below = [middle - min(each) for middle, each in zip(middles, found.values(), strict=True)]
    above = [max(each) - middle for middle, each in zip(middles, found.values(), strict=True)]
    axes.bar(list(found), middles, yerr=[below, above], capsize=3)
    axes.tick_params(axis="x", labelrotation=60, labelsize="x-small")
    axes.set_ylabel(label)
