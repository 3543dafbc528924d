"""What the command lines of experiments 2 and 3 have in common: arguments, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import exit_status
from bench.game_run import Moment, write_parquet
from bench.replication_network import NotPossible
from dynamoth_cli.local.child import interrupted_by_signals


@dataclass(frozen=True, slots=True)
class Shown:
    """What an experiment has measured, in the forms in which it is shown."""

    table: Iterable[str]
    as_json: Mapping[str, Any]
    moments: Sequence[Moment]


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that both have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small game, for two minutes in all")
    parser.add_argument("--seed", type=int, default=1, help="of the players' paths and channels' names (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="write the raw data there: a row for each second")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there: .svg or .png; needs matplotlib")
    return parser


def measure_and_show(name: str, arguments: argparse.Namespace, measure: Callable[[], Shown]) -> int:
    """Measure, print the table, and write what the arguments ask for. Returns the exit status."""
    plot: Path | None = arguments.plot
    draw = None if plot is None else _drawer()
    try:
        with interrupted_by_signals():
            shown = measure()
    except NotPossible as error:
        sys.stderr.write(f"skipped: the benchmark of {name} {error}\n")
        return exit_status.SKIPPED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: networks and processes are removed\n")
        return exit_status.INTERRUPTED
    sys.stdout.write("\n".join([*shown.table, ""]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(shown.as_json, indent=2) + "\n")
    if arguments.parquet is not None:
        write_parquet(shown.moments, arguments.parquet)
    if draw is not None and plot is not None:
        draw(shown.moments, plot)
    return 0


def say(line: str) -> None:
    """Write a line about the progress."""
    sys.stderr.write(f"{line}\n")


def _drawer() -> Callable[[Sequence[Moment], Path], None]:
    """Return the function that draws. Called before the measurement, so that a missing matplotlib shows at once."""
    from bench.game_plot import draw

    return draw
