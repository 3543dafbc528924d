"""``dynamoth what-if``: what other settings of balancer or coordinator would have done to a recorded load.

The production balancer machine replays each window of the recording under each combination of a grid, in parallel on
Spark: a task replays one window under a few combinations and returns a row for each. The driver gets one row per
combination. ``broker_what_if`` does the same with the coordinator of edge brokers, where the grid has settings of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError
from dynamoth_analytics import text
from dynamoth_analytics.broker_what_if import BrokerWhatIf
from dynamoth_analytics.errors import spark_errors
from dynamoth_analytics.files import without_merging
from dynamoth_analytics.jobs import plans
from dynamoth_analytics.output import deleted_after_failure, end_at_signals, new_folder, run_alone, say
from dynamoth_analytics.page import html
from dynamoth_analytics.page.what_if import Found, fidelity_sentences, sections, sentences
from dynamoth_analytics.reading import Recording, add_recording, asked_for, made
from dynamoth_analytics.recorded_settings import PresentSettings, coordinator_in_force, settings_in_force
from dynamoth_analytics.replay.comparison import Compared, compare, complete, frontier
from dynamoth_analytics.replay.fidelity import Fidelity, NotReplayed, fidelity_from_json
from dynamoth_analytics.replay.grid import (
    Combination,
    names_balancer,
    names_coordinator,
    read_coordinator_grid,
    read_grid,
)
from dynamoth_analytics.replay.replay import SETTLE_S
from dynamoth_analytics.replay.task import REPLAYS_SCHEMA, replayed
from dynamoth_analytics.replay.tasks import chunks_per_window, cores_of, partitions_of
from dynamoth_analytics.replay.windows import WHOLE_RECORDING, ReplaySpan, packed_windows
from dynamoth_analytics.session import add_session, check_session, open_session
from dynamoth_balancer.options import BalancerOptions
from dynamoth_broker.coordinator.settings import CoordinatorOptions
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_INTERRUPTED

PAGE = "what-if.html"

WINDOW_MINUTES = 10.0
WINDOW_MINUTES_MIN = 1.0
WINDOW_MINUTES_MAX = 24 * 60.0
"""The memory of a task has to hold a window."""

OVERLOAD_RATIO_MAX = 1000.0

SETTINGS = {
    "combination": "int",
    "changes": "string",
    "windows": "long",
    "overload_minutes": "double",
    "server_s": "double",
    "moves": "long",
    "replications": "long",
    "ratio_max": "double",
    "imbalance": "double",
    "better": "long",
    "worse": "long",
    "p": "double",
    "on_frontier": "boolean",
    "failed": "long",
    "problem": "string",
}
"""Columns and types of the table ``settings``: a row per combination, with what it changes as JSON."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_recording(parser)
    parser.add_argument(
        "--grid",
        metavar="FILE",
        required=True,
        help="the settings to try, as TOML: load_ratio_high = [0.7, 0.8], or coordinator.cov_max = [0.1, 0.2]",
    )
    parser.add_argument("--out", metavar="DIR", help="a new or empty folder; default what-if-<time>")
    parser.add_argument(
        "--window", metavar="MINUTES", type=float, default=WINDOW_MINUTES, help="length of a window; default 10"
    )
    parser.add_argument(
        "--overload-ratio",
        metavar="RATIO",
        type=float,
        help="a server or broker above this load ratio is overloaded, under all settings; default: load_ratio_high in"
        " force, for brokers coordinator.ratio_high",
    )
    add_session(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare settings. Returns the exit code."""
    if not WINDOW_MINUTES_MIN <= arguments.window <= WINDOW_MINUTES_MAX:
        limits = f"{WINDOW_MINUTES_MIN:g} to {WINDOW_MINUTES_MAX:g}"
        raise ConfigError(f"--window {arguments.window:g}: a number from {limits} (minutes) expected")
    if arguments.overload_ratio is not None and not 0 < arguments.overload_ratio <= OVERLOAD_RATIO_MAX:
        limits = f"above 0, up to {OVERLOAD_RATIO_MAX:g}"
        raise ConfigError(f"--overload-ratio {arguments.overload_ratio:g}: a number {limits} expected")
    where, begin, end = asked_for(arguments)
    try:
        grid = Path(arguments.grid).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--grid {arguments.grid} cannot be read: {reason}: give a TOML file") from error
    read_grid(grid, arguments.grid, BalancerOptions(), related=False)
    read_coordinator_grid(grid, arguments.grid, CoordinatorOptions(), related=False)
    check_session(arguments)
    out = new_folder(arguments.out, "what-if")
    end_at_signals(EXIT_INTERRUPTED, "interrupted")
    with deleted_after_failure(out), without_merging(where), open_session(arguments, "dynamoth what-if") as spark:
        recording = Recording(spark, where, begin, end)
        parts = list(_parts(recording, grid, arguments, out))
        write_page(out, parts)
    found = [sentence for part in parts for sentence in part.sentences]
    say("")
    for sentence in found:
        say(f"* {sentence}")
    say(f"\n{out / PAGE}")
    return EXIT_DONE


def _parts(recording: Recording, grid: str, arguments: argparse.Namespace, out: Path) -> Iterator[Found]:
    """Compare settings of the balancer, and of the coordinator: those that the grid names."""
    window_s, overload_ratio = arguments.window * 60, arguments.overload_ratio
    if names_balancer(grid, arguments.grid):
        in_force = settings_in_force(recording)
        combinations = read_grid(grid, arguments.grid, in_force.settings.options)
        yield WhatIf(recording, in_force, combinations, window_s, overload_ratio, out).run(say)
    if names_coordinator(grid, arguments.grid):
        with_brokers = read_coordinator_grid(grid, arguments.grid, coordinator_in_force(recording).options)
        yield BrokerWhatIf(recording, with_brokers, window_s, overload_ratio, out).run(say)


def write_page(out: Path, parts: Sequence[Found]) -> None:
    """Write the page of what was found."""
    begin, end = min(part.begin for part in parts), max(part.end for part in parts)
    found = [sentence for part in parts for sentence in part.sentences]
    shown = [section for part in parts for section in part.sections]
    drawn = html.page("What if", f"{begin:%F %T} to {end:%F %T} (UTC)", found, shown)
    (out / PAGE).write_text(drawn, encoding="utf-8")


def settle_s(recording: Recording) -> float:
    """Return the median time that recorded changes took from active to settled; ``SETTLE_S`` where there are none."""
    with spark_errors():
        median = plans.changes(recording.table("plans")).agg(F.median("settling_s")).collect()[0][0]
    return SETTLE_S if median is None else max(0.0, float(median))


class WhatIf:
    """Replays a recording under combinations of settings, and compares what they did.

    Args:
        recording: the recorded load.
        in_force: the settings in force when it was recorded.
        combinations: what to try; the first one is the settings in force.
        window_s: length of a window, in seconds.
        overload_ratio: a server above this load ratio is overloaded; None: the ``load_ratio_high`` in force.
        out: an empty folder.

    """

    def __init__(
        self,
        recording: Recording,
        in_force: PresentSettings,
        combinations: Sequence[Combination[BalancerOptions]],
        window_s: float,
        overload_ratio: float | None,
        out: Path,
    ) -> None:
        self._recording = recording
        self._in_force = in_force
        self._combinations = combinations
        self._window_s = window_s
        self._overload_ratio = in_force.settings.options.load_ratio_high if overload_ratio is None else overload_ratio
        self._out = out

    def write(self, say: Callable[[str], None]) -> Sequence[str]:
        """Replay everything, write tables and page, and return the findings. Raises DynamothError."""
        found = self.run(say)
        write_page(self._out, [found])
        return found.sentences

    def run(self, say: Callable[[str], None]) -> Found:
        """Replay everything, write the tables, and return what goes on the page. Raises DynamothError."""
        spark, count = self._recording.spark, len(self._combinations)
        span, windows = self._span()
        shown = text.counted(span.windows, "window")
        say(f"replaying {shown} under {text.counted(count, 'combination')} of settings")
        with spark_errors():
            self._replays(span, windows).write.parquet(str(self._out / "replays"))
            replays = spark.read.parquet(str(self._out / "replays"))
            compared = compare(replays, self._combinations)
            fidelity = _fidelity(replays)
        edge = {each.combination for each in frontier(complete(compared))}
        say(f"{len(edge)} of them on the frontier")
        with spark_errors():
            self._table(spark, compared, edge).write.parquet(str(self._out / "settings"))
        window_s = min(self._window_s, span.end - span.begin)
        found = [*sentences(compared, window_s, self._overload_ratio), *fidelity_sentences(fidelity)]
        begin, end = (datetime.fromtimestamp(at, UTC) for at in (span.begin, span.end))
        return Found(begin, end, found, sections(compared, fidelity))

    def _span(self) -> tuple[ReplaySpan, int]:
        """Return what all windows have in common, and about how many of them have reports."""
        at = F.col("at").cast("double")
        with spark_errors():
            row = (
                self._recording.table("servers", ["at"])
                .agg(
                    F.min(at).alias("begin"),
                    F.max(at).alias("end"),
                    F.collect_set("server").alias("servers"),
                    F.size(F.collect_set(F.floor(at / self._window_s))).alias("windows"),
                )
                .collect()[0]
            )
        if row["begin"] is None:
            raise self._recording.without_reports()
        settings = self._in_force.settings
        span = ReplaySpan(
            row["begin"],
            row["end"],
            self._window_s,
            tuple(sorted({*row["servers"], *settings.servers})),
            tuple(settings.ring),
            settle_s(self._recording),
            self._in_force.balancer,
            self._in_force.led_since,
        )
        return span, row["windows"]

    def _replays(self, span: ReplaySpan, windows: int) -> DataFrame:
        """Return one row per window and combination, and one for the whole recording."""
        chunks = chunks_per_window(windows, len(self._combinations), cores_of(self._recording.spark))
        is_whole = F.col("window") == WHOLE_RECORDING
        numbers = F.when(is_whole, F.array(F.lit(0))).otherwise(F.sequence(F.lit(0), F.lit(chunks - 1)))
        tasks = packed_windows(self._recording, span).withColumn("chunk", F.explode(numbers))
        partitions = partitions_of(windows * chunks + 1)
        work = partial(replayed, [each.options for each in self._combinations], span, self._overload_ratio, chunks)
        return tasks.repartition(partitions, "window", "chunk").mapInPandas(work, REPLAYS_SCHEMA)

    def _table(self, spark: SparkSession, compared: Iterable[Compared], edge: set[int]) -> DataFrame:
        """Return the table ``settings``."""
        rows = [
            {
                "changes": json.dumps(dict(self._combinations[each.combination].changes)),
                "on_frontier": each.combination in edge,
                **{name: getattr(each, name) for name in SETTINGS if name not in ("changes", "on_frontier")},
            }
            for each in compared
        ]
        schema = ", ".join(f"{name} {type_}" for name, type_ in SETTINGS.items())
        return made(spark, [tuple(row[name] for name in SETTINGS) for row in rows], schema).coalesce(1)


def _fidelity(replays: DataFrame) -> Fidelity | NotReplayed:
    whole = replays.where(F.col("window") == WHOLE_RECORDING).select("problem", "agreement").collect()[0]
    return fidelity_from_json(whole["agreement"]) if whole["problem"] is None else NotReplayed(whole["problem"])


if __name__ == "__main__":
    sys.exit(run_alone("dynamoth what-if", configure, run))
