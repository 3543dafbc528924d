"""The pictures of the benchmarks of RGame, drawn like figures 5 to 7 of the Dynamoth paper. Needs matplotlib.

Also on its own, from the raw data that ``--parquet FILE`` wrote, of one run or of several::

    python -m bench.game_plot FILE [FILE ...] picture.svg
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.game import PAPER_RESPONSE_MS_MAX, WINDOW_S, mean_response_ms
from bench.game_run import Moment, read_parquet

# Not imported by name: checks and tests do without it.
try:
    _figure: Any = import_module("matplotlib.figure")
except ModuleNotFoundError as error:
    raise SystemExit("drawing needs matplotlib: pip install 'dynamoth[bench]'") from error

WIDTH_INCHES, ROW_INCHES = 9.0, 2.6
COLOURS = {"dynamoth": "tab:blue", "hashing": "tab:red", "redis-cluster": "tab:green"}


def draw(moments: Sequence[Moment], file: Path) -> None:
    """Draw all systems into ``file``, in the format that its name ends with. Diamonds: channels began to move."""
    rows: list[tuple[str, dict[str, Callable[[Moment], float]]]] = [
        ("players", {"": lambda each: each.players}),
        ("deliveries per second", {"": lambda each: each.delivered}),
        ("servers", {"": lambda each: each.servers}),
        ("load ratio", {"mean": lambda each: each.load_ratio_mean, "busiest": lambda each: each.load_ratio_max}),
    ]
    systems = list(dict.fromkeys(moment.system for moment in moments))
    figure = _figure.Figure(figsize=(WIDTH_INCHES, ROW_INCHES * (len(rows) + 1)), layout="constrained")
    all_axes = figure.subplots(len(rows) + 1, 1, sharex=True)
    for axes, (label, lines) in zip(all_axes, rows, strict=False):
        for system in systems:
            mine = [moment for moment in moments if moment.system == system]
            for (name, of), style in zip(lines.items(), ("-", ":"), strict=False):
                values = [of(moment) for moment in mine]
                text = f"{system}, {name}" if name else system
                axes.plot([moment.at_s for moment in mine], values, style, color=COLOURS[system], label=text)
        axes.set_ylabel(label)
        axes.legend(fontsize="small")
    for system in systems:
        _draw_response(all_axes[-1], system, [moment for moment in moments if moment.system == system])
    all_axes[-1].axhline(PAPER_RESPONSE_MS_MAX, color="grey", linewidth=0.8)
    all_axes[-1].set_yscale("log")
    all_axes[-1].set_ylabel("response time (ms)")
    all_axes[-1].set_xlabel("seconds")
    all_axes[-1].legend(fontsize="small")
    figure.savefig(file)


def _draw_response(axes: Any, system: str, moments: Sequence[Moment]) -> None:
    """Draw response times, without and with the wide area network, and where channels began to move."""
    colour = COLOURS[system]
    for wan, style in ((False, "-"), (True, ":")):
        points: list[tuple[float, float]] = []
        for end in range(1, len(moments) + 1):
            time_ms = mean_response_ms([moment.response(wan=wan) for moment in moments[max(0, end - WINDOW_S) : end]])
            if time_ms is not None:
                points.append((moments[end - 1].at_s, time_ms))
        text = f"{system}, with wide area" if wan else system
        axes.plot([at_s for at_s, _ in points], [time_ms for _, time_ms in points], style, color=colour, label=text)
    moved = [moment for moment in moments if moment.moves and moment.responses]
    times_ms = [moment.response_ms_sum / moment.responses for moment in moved]
    axes.plot([moment.at_s for moment in moved], times_ms, "D", color=colour, markersize=4)


if __name__ == "__main__":
    *files, picture = map(Path, sys.argv[1:])
    draw([moment for file in files for moment in read_parquet(file)], picture)
