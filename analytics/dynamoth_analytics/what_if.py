"""``dynamoth what-if``: what other settings of the balancer would have done to a recorded load.

The production balancer machine replays each window of the recording under each combination of a grid, in parallel on
Spark: a task is one window and a few combinations, and each of its rows one of both. The driver gets one row per
combination.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
# pandas and pyarrow come without types; mypy checks the rest.

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError
from dynamoth.recording import channel_text
from dynamoth_analytics.errors import BadRecording, spark_errors
from dynamoth_analytics.output import deleted_after_failure, end_at_signals, new_folder, run_alone, say
from dynamoth_analytics.page import html
from dynamoth_analytics.reading import Recording, add_recording, asked_for
from dynamoth_analytics.recorded_settings import PresentSettings, settings_in_force
from dynamoth_analytics.replay.agreement import agreement
from dynamoth_analytics.replay.frontier import (
    Compared,
    DifferenceInWords,
    Fidelity,
    complete,
    fragment,
    frontier,
    sentences,
)
from dynamoth_analytics.replay.grid import Combination, read_grid
from dynamoth_analytics.replay.instant_cluster import ReplayError
from dynamoth_analytics.replay.replay import SETTLE_S, Moved, Outcome, RecordedWindow, measured, replay
from dynamoth_analytics.replay.windows import WHOLE, Extent, packed_windows, recorded_log, unpacked
from dynamoth_analytics.session import add_session, check_session, open_session
from dynamoth_balancer.admin.changes import mode_name
from dynamoth_balancer.options import BalancerOptions
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_INTERRUPTED

PAGE = "what-if.html"

WINDOW_MINUTES = 10.0
WINDOW_MINUTES_MIN = 1.0
WINDOW_MINUTES_MAX = 24 * 60.0
"""The memory of a task has to hold a window."""

OVERLOAD_RATIO_MAX = 1000.0

TASKS_PER_CORE = 4
"""No core waits long for the last task, and a window is copied to few of them."""

CLUSTER_CORES = 32
"""Cores to expect of a cluster: Spark Connect does not say how many there are, and a cluster may start them later."""

PARTITIONS_PER_TASK = 2
"""Spark chooses the partition of a task by its hash: few share one. An empty partition costs a quarter of a second."""

PARTITIONS_MAX = 2000

SAME_S = 1.0
"""Overload and server-seconds that differ by less are the same."""

REPLAYS = (
    "setting int, slot long, overload_s double, ratio_max double, ratio_mean double, imbalance double,"
    " server_s double, moves long, replications long, decisions string, problem string, agreement string"
)
"""One row per combination and window. JSON: the moves of the replay (``decisions``) and, in the window ``WHOLE``, how
recorded and replayed decisions agree."""

MOVES_SHOWN_MAX = 3
"""Moves of a decision that are shown."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_recording(parser)
    parser.add_argument(
        "--grid", metavar="FILE", required=True, help="the settings to try, as TOML: load_ratio_high = [0.7, 0.8]"
    )
    parser.add_argument("--out", metavar="DIR", help="a new or empty folder; default what-if-<time>")
    parser.add_argument(
        "--window", metavar="MINUTES", type=float, default=WINDOW_MINUTES, help="length of a window; default 10"
    )
    parser.add_argument(
        "--overload-ratio",
        metavar="RATIO",
        type=float,
        help="a server above this load ratio is overloaded, under all settings; default: load_ratio_high in force",
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
    check_session(arguments)
    out = new_folder(arguments.out, "what-if")
    end_at_signals(EXIT_INTERRUPTED, "interrupted")
    with deleted_after_failure(out), open_session(arguments, "dynamoth what-if") as spark:
        recording = Recording(spark, where, begin, end)
        present = settings_in_force(recording)
        combinations = read_grid(grid, arguments.grid, present.settings.options)
        what_if = WhatIf(recording, present, combinations, arguments.window * 60, arguments.overload_ratio, out)
        found = what_if.write(say)
    say("")
    for sentence in found:
        say(f"* {sentence}")
    say(f"\n{out / PAGE}")
    return EXIT_DONE


def settle_s(recording: Recording) -> float:
    """Return the median time that recorded changes took from active to settled; ``SETTLE_S`` where there are none."""
    at = F.col("at").cast("double")
    changes = (
        recording.table("plans", ["channel", "epoch", "phase"])
        .groupBy("channel", "epoch")
        .agg(*(F.min(F.when(F.col("phase") == phase, at)).alias(phase) for phase in ("active", "settled")))
    )
    with spark_errors():
        median = changes.agg(F.median(F.col("settled") - F.col("active"))).collect()[0][0]
    return SETTLE_S if median is None else max(0.0, float(median))


class WhatIf:
    """Replays a recording under combinations of settings, and compares what they did.

    Args:
        recording: the recorded load.
        present: the settings in force when it was recorded.
        combinations: what to try; the first one is the settings in force.
        window_s: length of a window, in seconds.
        overload_ratio: a server above this load ratio is overloaded; None: the ``load_ratio_high`` in force.
        out: an empty folder.

    """

    def __init__(
        self,
        recording: Recording,
        present: PresentSettings,
        combinations: Sequence[Combination],
        window_s: float,
        overload_ratio: float | None,
        out: Path,
    ) -> None:
        self._recording = recording
        self._present = present
        self._combinations = combinations
        self._window_s = window_s
        self._overload_ratio = present.settings.options.load_ratio_high if overload_ratio is None else overload_ratio
        self._out = out

    def write(self, say: Callable[[str], None]) -> list[str]:
        """Replay everything, write tables and page, and return the findings. Raises DynamothError."""
        spark, count = self._recording.spark, len(self._combinations)
        extent, windows = self._extent()
        say(
            f"replaying {html.counted(extent.windows, 'window')} under {html.counted(count, 'combination')} of settings"
        )
        with spark_errors():
            self._replays(extent, windows).write.parquet(str(self._out / "replays"))
            replays = spark.read.parquet(str(self._out / "replays"))
            compared = compare(replays, self._combinations)
            truth = self._fidelity(replays)
        edge = {each.setting for each in frontier(complete(compared))}
        say(f"{len(edge)} of them on the frontier")
        with spark_errors():
            self._table(spark, compared, edge).write.parquet(str(self._out / "settings"))
        window_s = min(self._window_s, extent.end - extent.begin)
        found = [*sentences(compared, window_s, self._overload_ratio), *truth.sentences]
        begin, end = (datetime.fromtimestamp(at, UTC) for at in (extent.begin, extent.end))
        drawn = html.page("What if", f"{begin:%F %T} to {end:%F %T} (UTC)", found, fragment(compared, truth))
        (self._out / PAGE).write_text(drawn, encoding="utf-8")
        return found

    def _extent(self) -> tuple[Extent, int]:
        """Return what the windows have in common, and about how many of them have reports."""
        at = F.col("at").cast("double")
        windows = F.size(F.collect_set(F.floor(at / self._window_s)))
        with spark_errors():
            row = (
                self._recording.table("servers", ["at"])
                .agg(
                    F.min(at).alias("begin"),
                    F.max(at).alias("end"),
                    F.collect_set("server").alias("servers"),
                    windows.alias("windows"),
                )
                .collect()[0]
            )
        if row["begin"] is None:
            raise self._recording.without_reports()
        present, settings = self._present, self._present.settings
        extent = Extent(
            row["begin"],
            row["end"],
            self._window_s,
            tuple(sorted({*row["servers"], *settings.servers})),
            tuple(settings.ring),
            settle_s(self._recording),
            present.balancer,
            present.led_since,
        )
        return extent, row["windows"]

    def _replays(self, extent: Extent, windows: int) -> DataFrame:
        """Return one row per window and combination, and one for the whole recording."""
        chunks = chunks_per_window(windows, len(self._combinations), cores_of(self._recording.spark))
        numbers = F.when(F.col("slot") == WHOLE, F.array(F.lit(0))).otherwise(F.sequence(F.lit(0), F.lit(chunks - 1)))
        tasks = packed_windows(self._recording, extent).withColumn("chunk", F.explode(numbers))
        partitions = min(PARTITIONS_MAX, PARTITIONS_PER_TASK * (windows * chunks + 1))
        work = partial(replayed, [each.options for each in self._combinations], extent, self._overload_ratio, chunks)
        return tasks.repartition(partitions, "slot", "chunk").mapInPandas(work, REPLAYS)

    @staticmethod
    def _fidelity(replays: DataFrame) -> Fidelity:
        row = replays.where(F.col("slot") == WHOLE).collect()[0]
        if row["problem"] is not None:
            return Fidelity(problem=row["problem"])
        found = json.loads(row["agreement"])
        differences = [DifferenceInWords(**each) for each in found.pop("differences")]
        return Fidelity(**found, differences=differences)

    def _table(self, spark: SparkSession, compared: Iterable[Compared], edge: set[int]) -> DataFrame:
        rows = [
            (
                each.setting,
                json.dumps(dict(self._combinations[each.setting].changes)),
                *(each.windows, each.overload_minutes, each.server_s, each.moves, each.replications),
                *(each.ratio_max, each.imbalance, each.better, each.worse, each.p, each.setting in edge),
                *(each.failed, each.problem),
            )
            for each in compared
        ]
        schema = (
            "setting int, changes string, windows long, overload_minutes double, server_s double, moves long,"
            " replications long, ratio_max double, imbalance double, better long, worse long, p double,"
            " on_frontier boolean, failed long, problem string"
        )
        return spark.createDataFrame(rows, schema).coalesce(1)


def cores_of(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at once, as far as is known."""
    try:
        context = spark.sparkContext
    except PySparkException:
        return CLUSTER_CORES
    cores = context.defaultParallelism
    return cores if context.master.startswith("local") else max(cores, CLUSTER_CORES)


def chunks_per_window(windows: int, combinations: int, cores: int) -> int:
    """Return into how many tasks the combinations of each window are divided: each gets a copy of the window.

    All windows together have about ``TASKS_PER_CORE`` tasks per core, and each has at least one.
    """
    return max(1, min(combinations, math.ceil(TASKS_PER_CORE * cores / windows)))


def compare(replays: DataFrame, combinations: Sequence[Combination]) -> list[Compared]:
    """Return the sums of each combination over the windows that the settings in force have, those in force first.

    Raises:
        BadRecording: the settings in force have no window.

    """
    windows = replays.where(F.col("slot") != WHOLE)
    now = windows.where((F.col("setting") == 0) & F.col("problem").isNull()).select(
        "slot",
        F.col("overload_s").alias("overload_now"),
        F.col("moves").alias("moves_now"),
        F.col("server_s").alias("server_now"),
    )
    less_overload = F.col("overload_now") - F.col("overload_s")
    fewer_moves = F.col("moves_now") - F.col("moves")
    fewer_servers = F.col("server_now") - F.col("server_s")
    gain = (
        F.when(F.abs(less_overload) >= SAME_S, less_overload)
        .when(fewer_moves != 0, fewer_moves)
        .when(F.abs(fewer_servers) >= SAME_S, fewer_servers)
        .otherwise(0.0)
    )
    problem_at = F.when(F.col("problem").isNotNull(), F.col("slot"))
    sums = (
        # Figures of a failed replay are null, and count nowhere.
        windows.join(now, "slot", "left")
        .where("overload_now IS NOT NULL OR problem IS NOT NULL")
        .groupBy("setting")
        .agg(
            F.count("overload_s").alias("windows"),
            (F.sum("overload_s") / 60).alias("overload_minutes"),
            F.sum("server_s").alias("server_s"),
            F.sum("moves").alias("moves"),
            F.sum("replications").alias("replications"),
            F.max("ratio_max").alias("ratio_max"),
            F.avg("imbalance").alias("imbalance"),
            F.count_if(gain > 0).alias("better"),
            F.count_if(gain < 0).alias("worse"),
            F.count("problem").alias("failed"),
            F.min_by("problem", problem_at).alias("problem"),
        )
        .fillna(0)
        .orderBy("setting")
    )
    tried = max(1, len(combinations) - 1)
    rows = [Compared(text=combinations[row["setting"]].text, tried=tried, **row.asDict()) for row in sums.collect()]
    if not rows or not rows[0].windows:
        problem = rows[0].problem if rows else "none has a report"
        raise BadRecording(f"no window can be replayed under the settings in force: {problem}")
    return rows


# In the tasks.

_TEXTS = ("steps", "pauses", "log")


def replayed(
    options: Sequence[BalancerOptions],
    extent: Extent,
    overload_ratio: float,
    chunks: int,
    tasks: Iterator[pd.DataFrame],
) -> Iterator[pd.DataFrame]:
    """Replay each row of ``tasks``, a window and the number of a chunk, under each combination of that chunk.

    Yields rows of ``REPLAYS`` one by one: a task has one window and one replay in its memory. Chunks are interleaved,
    as combinations that follow each other are alike and take the same time.
    """
    names = [column.split()[0] for column in REPLAYS.split(", ")]
    for frame in tasks:
        for task in frame.to_dict("records"):
            chunk = [0] if task["slot"] == WHOLE else range(task["chunk"], len(options), chunks)
            for row in _rows(task, chunk, options, extent, overload_ratio):
                yield pd.DataFrame([[row.get(name) for name in names]], columns=pd.Index(names))


def _rows(
    task: Mapping[Any, Any],
    chunk: Iterable[int],
    options: Sequence[BalancerOptions],
    extent: Extent,
    overload_ratio: float,
) -> Iterator[Mapping[str, Any]]:
    steps, pauses, log = (task[name] if isinstance(task[name], str) else None for name in _TEXTS)
    window = unpacked(task["slot"], task["reports"], task["channels"], steps, pauses, extent)
    for setting in chunk:
        row: dict[str, Any] = {"setting": setting, "slot": task["slot"]}
        try:
            outcome = replay(window, options[setting], overload_ratio, extent.settle_s)
            if outcome is not None and task["slot"] == WHOLE:
                row["agreement"] = _agreement(window, log, options[setting], extent, outcome, overload_ratio)
        except ReplayError as error:
            yield {**row, "problem": str(error)}
            continue
        if outcome is not None:
            yield {**row, **_figures(outcome)}


def _figures(outcome: Outcome) -> Mapping[str, Any]:
    return {
        "overload_s": outcome.overload_s,
        "ratio_max": outcome.ratio_max,
        "ratio_mean": outcome.ratio_mean,
        "imbalance": outcome.imbalance,
        "server_s": outcome.server_s,
        "moves": len(outcome.moves),
        "replications": outcome.replications,
        "decisions": _moves_text(outcome.moves),
    }


def _agreement(
    window: RecordedWindow,
    log: str | None,
    options: BalancerOptions,
    extent: Extent,
    outcome: Outcome,
    overload_ratio: float,
) -> str:
    """Return how the replay agrees with the recording as JSON: the fields of ``Fidelity``."""
    found = agreement(window, recorded_log(json.loads(log or "[]")), options, extent.led_since)
    return json.dumps(
        {
            "recorded": found.recorded,
            "same": found.same,
            "followed": found.followed,
            "moves": found.moves,
            "moves_replayed": len(outcome.moves),
            "overload_s": measured(window, overload_ratio).overload_s,
            "overload_s_replayed": outcome.overload_s,
            "differences": [
                {
                    "at": each.at,
                    "recorded": _moves_shown(each.recorded),
                    "replayed": _moves_shown(each.replayed),
                    "cause": each.cause,
                }
                for each in found.differences
            ],
        }
    )


def _moves_shown(moves: Sequence[Moved]) -> str:
    shown = [
        f"{html.shown(channel_text(move.channel))}: {', '.join(move.before.servers)} to {', '.join(move.after.servers)}"
        for move in moves[:MOVES_SHOWN_MAX]
    ]
    more = len(moves) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _moves_text(moves: Iterable[Moved]) -> str:
    """Return moves as JSON."""
    return json.dumps(
        [
            {
                "at": move.at,
                "channel": channel_text(move.channel),
                "from_mode": mode_name(move.before.mode),
                "from_servers": move.before.servers,
                "to_mode": mode_name(move.after.mode),
                "to_servers": move.after.servers,
                "reason": move.reason,
            }
            for move in moves
        ]
    )


if __name__ == "__main__":
    sys.exit(run_alone("dynamoth what-if", configure, run))
