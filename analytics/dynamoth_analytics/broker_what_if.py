"""The part of ``dynamoth what-if`` about edge brokers: other settings of the coordinator under the recorded load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dynamoth_analytics import text
from dynamoth_analytics.errors import BadRecording, spark_errors
from dynamoth_analytics.page.broker_what_if import broker_sentences, broker_what_if_sections
from dynamoth_analytics.page.what_if import Found
from dynamoth_analytics.reading import Recording, made
from dynamoth_analytics.replay.brokers.comparison import BrokerFigures, ComparedBrokers, compare_brokers
from dynamoth_analytics.replay.brokers.task import BROKER_REPLAYS_SCHEMA, RECORDED, replayed_brokers
from dynamoth_analytics.replay.brokers.windows import BrokerSpan, broker_span, packed_broker_windows
from dynamoth_analytics.replay.comparison import complete, frontier
from dynamoth_analytics.replay.grid import Combination
from dynamoth_analytics.replay.tasks import chunks_per_window, cores_of, partitions_of
from dynamoth_broker.coordinator.settings import CoordinatorOptions

REPLAYS, SETTINGS = "broker_replays", "broker_settings"
"""The tables: a row per combination and window, and a row per combination."""

_FIGURES = {
    "windows": "long",
    "overload_minutes": "double",
    "ratio_max": "double",
    "ratio_max_mean": "double",
    "cov": "double",
    "redis_egress": "double",
    "moves": "long",
    "decisions": "long",
    "shuffles": "long",
}

_JUDGED = ("combination", "better", "worse", "p", "failed", "problem")

COLUMNS = {
    "combination": "int",
    "changes": "string",
    **_FIGURES,
    "better": "long",
    "worse": "long",
    "p": "double",
    "on_frontier": "boolean",
    "failed": "long",
    "problem": "string",
}
"""Columns and types of the table ``broker_settings``. Combination -1 is what was recorded."""


class BrokerWhatIf:
    """Replays the recorded loads of brokers under combinations of settings of the coordinator.

    Args:
        recording: the recorded load.
        combinations: what to try; the first one is the settings in force.
        window_s: length of a window, in seconds.
        overload_ratio: a broker above this load ratio is overloaded; None: the ``ratio_high`` in force.
        out: the folder of the results.

    """

    def __init__(
        self,
        recording: Recording,
        combinations: Sequence[Combination[CoordinatorOptions]],
        window_s: float,
        overload_ratio: float | None,
        out: Path,
    ) -> None:
        self._recording = recording
        self._combinations = combinations
        self._window_s = window_s
        self._overload_ratio = combinations[0].options.ratio_high if overload_ratio is None else overload_ratio
        self._out = out

    def run(self, say: Callable[[str], None]) -> Found:
        """Replay everything, write the tables, and return what goes on the page. Raises DynamothError."""
        spark, count = self._recording.spark, len(self._combinations)
        with spark_errors():
            spanned = broker_span(self._recording, self._window_s)
            if spanned is None:
                raise BadRecording(
                    f"{self._recording.folder} has no report of a broker in this time: leave coordinator.* out of the"
                    " grid, or record a cluster with brokers"
                )
            span, windows = spanned
            shown = text.counted(span.windows, "window")
            say(f"replaying {shown} of brokers under {text.counted(count, 'combination')} of coordinator settings")
            self._replays(span, windows).write.parquet(str(self._out / REPLAYS))
            replays = spark.read.parquet(str(self._out / REPLAYS))
            recorded, compared = compare_brokers(replays, self._combinations)
            edge = {each.combination for each in frontier(complete(compared))}
            self._table(spark, recorded, compared, edge).write.parquet(str(self._out / SETTINGS))
        begin, end = (datetime.fromtimestamp(at, UTC) for at in (span.begin, span.end))
        found = broker_sentences(recorded, compared, self._overload_ratio)
        return Found(begin, end, found, broker_what_if_sections(recorded, compared))

    def _replays(self, span: BrokerSpan, windows: int) -> DataFrame:
        """Return one row per window and combination, and one per window of what was recorded."""
        chunks = chunks_per_window(windows, len(self._combinations), cores_of(self._recording.spark))
        numbers = F.explode(F.sequence(F.lit(0), F.lit(chunks - 1)))
        tasks = packed_broker_windows(self._recording, span).withColumn("chunk", numbers)
        options = [each.options for each in self._combinations]
        work = partial(replayed_brokers, options, span, self._overload_ratio, chunks)
        partitions = partitions_of(windows * chunks)
        return tasks.repartition(partitions, "window", "chunk").mapInPandas(work, BROKER_REPLAYS_SCHEMA)

    def _table(
        self, spark: SparkSession, recorded: BrokerFigures, compared: Sequence[ComparedBrokers], edge: set[int]
    ) -> DataFrame:
        """Return the table ``broker_settings``."""
        rows = [{"combination": RECORDED, **{name: getattr(recorded, name) for name in _FIGURES}}]
        for each in compared:
            judged = {
                name: getattr(each, name) for name in ("combination", "better", "worse", "p", "failed", "problem")
            }
            changes = json.dumps(dict(self._combinations[each.combination].changes))
            figures = {name: getattr(each.figures, name) for name in _FIGURES}
            rows.append({**judged, **figures, "changes": changes, "on_frontier": each.combination in edge})
        schema = ", ".join(f"{name} {type_}" for name, type_ in COLUMNS.items())
        return made(spark, [tuple(row.get(name) for name in COLUMNS) for row in rows], schema).coalesce(1)
