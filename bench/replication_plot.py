"""The picture of the benchmark of replication, drawn like Figure 4 of the Dynamoth paper.

Needs matplotlib (the extra ``bench``). Also on its own, from what ``python -m bench.replication --json FILE`` wrote::

    python -m bench.replication_plot FILE picture.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

# Not imported by name: checks and tests do without it.
try:
    _figure: Any = import_module("matplotlib.figure")
except ModuleNotFoundError as error:
    raise SystemExit("drawing needs matplotlib: pip install 'dynamoth[bench]'") from error

WIDTH_INCHES, HEIGHT_INCHES = 11.0, 5.5
COLOURS = {"one": "tab:red", "three": "tab:blue"}
MODES = ("all-publishers", "all-subscribers")


def draw(results: Mapping[str, Any], file: Path) -> None:
    """Draw the results into ``file``, in the format that its name ends with."""
    modes = [mode for mode in MODES if mode in results]
    figure = _figure.Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    for index, mode in enumerate(modes):
        _draw_one(figure.add_subplot(1, len(modes), index + 1), mode, results[mode], results["response_ms_max"])
    figure.savefig(file)


def _draw_one(axes: Any, mode: str, outcome: Mapping[str, Any], response_ms_max: float) -> None:
    for name, colour in COLOURS.items():
        ladder = outcome[name]
        label = "1 server" if name == "one" else f"{ladder['servers']} servers"
        steps = [step for step in ladder["steps"] if step["response_ms_p99"] is not None]
        clients = [step["clients"] for step in steps]
        for quantile, style in (("p99", "-"), ("p50", ":")):
            times_ms = [step[f"response_ms_{quantile}"] for step in steps]
            axes.plot(clients, times_ms, style, marker=".", color=colour, label=f"{label}, {quantile}")
        lossy = [step for step in steps if step["delivered"] - step["duplicated"] < step["due"]]
        if lossy:
            times_ms = [step["response_ms_p99"] for step in lossy]
            axes.plot([step["clients"] for step in lossy], times_ms, "x", color=colour, label=f"{label}, messages lost")
        held = outcome["paper"][f"held_by_{name}"]
        more = " or more" if held == outcome["paper"]["tried"] else ""
        axes.axvline(held, color=colour, linewidth=0.8, linestyle="--", label=f"paper's text, {label}: {held}{more}")
    axes.axhline(response_ms_max, color="grey", linewidth=0.8, label=f"{response_ms_max:g} ms")
    axes.set_yscale("log")
    axes.set_title(f"{mode}: {outcome['ratio']:.2g}x")
    axes.set_xlabel(f"{outcome['growing']} of one channel")
    axes.set_ylabel("response time (ms)")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
