"""Executes one standing query, as a stream of Spark: one job per execution, for all interests at once.

Theory of operation
-------------------
The source ends each window at a tick of the query. Spark writes the window to its checkpoint, and then calls
``_execute`` with the new records, again and again until that succeeds. The number of the batch, behind that of the
executions before this checkpoint, is the number of the execution: what a crash has left half done is done again under
the same number, and logs do not take it twice.

What an execution reads besides is as of the end of its window, too: keyed snapshots at its offsets, and the interests
that were registered before its tick.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dynamoth.data.datasets import Dataset
from dynamoth.data.executions import (
    Progress,
    Window,
    continuation,
    executions_key,
    executions_server,
    parse_progress,
    store_progress_command,
    ticks_missed,
)
from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.interest_table import REGISTERED, InterestTable
from dynamoth_analytics.cluster.publishing import METRICS_SCHEMA, Publication
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.snapshots import KeyedSnapshots
from dynamoth_analytics.cluster.sql import compile_query

TRIGGER = "1 second"
"""Spark asks the source this often whether a tick has passed."""

RETRY_S = 5.0
RETRY_S_MAX = 60.0
"""A query that fails is started again after ``RETRY_S``, and after twice the time each time, up to this one."""

BASE_FILE = "base.json"

_log = logging.getLogger("dynamoth.data-cluster")


@dataclass(frozen=True)
class ClusterContext:
    """What all queries of a data cluster share."""

    spark: SparkSession
    servers: LogServers
    logs: str
    cluster_url: str
    folder: Path
    term: int
    ttl_s: float
    snapshots: KeyedSnapshots

    def source_options(self) -> dict[str, str]:
        """Return the options of the source for all datasets."""
        return {
            "logs": self.logs,
            "durable": str(self.servers.durable).lower(),
            "archive": str(self.folder / "archive"),
        }


@dataclass
class QueryState:
    """What people see of a query."""

    execution: int = 0
    #: Seconds of the last execution.
    seconds: float = 0.0
    failure: str | None = None
    counts: Counter[str] = field(default_factory=Counter[str])


class QueryRunner:
    """Executes one query until it is stopped. Threads of Spark call it back."""

    def __init__(
        self, context: ClusterContext, query: StandingQuery, datasets: Mapping[str, Dataset], phase_s: float
    ) -> None:
        """Compile the query. Raises ConfigError."""
        self.query = query
        self.datasets = dict(datasets)
        self.state = QueryState()
        self._context = context
        self._compiled = compile_query(query, datasets)
        self._phase_s = phase_s
        self.table = InterestTable(context.servers, context.folder / "interests" / query.name, query)
        self._stream: StreamingQuery | None = None
        self._base = 0
        self._start: Mapping[str, Any] = {}
        self._checkpoint = context.folder / "checkpoints" / query.name
        self._progress: Progress | None = None
        self._ended_ms = 0
        self._retry_at = 0.0
        self._retry_s = RETRY_S
        self._lock = threading.Lock()

    # The stream.

    def keep_running(self) -> None:
        """Start the stream if it does not run, and is not to wait. Raises LogServerFailed, OSError."""
        if self._stream is not None and not self._stream.isActive:
            error = self._stream.exception()
            self._stream = None
            self._fail(str(error) if error is not None else "Spark has stopped it")
        if self._stream is None and time.monotonic() >= self._retry_at:
            self._stream = self._start_stream()

    def stop(self) -> None:
        """Stop the stream; an execution that runs is repeated at the next start."""
        if self._stream is not None:
            self._stream.stop()
            self._stream = None

    def _fail(self, reason: str) -> None:
        if self.state.failure is None:
            self.state.failure = reason.splitlines()[0][:300]
        self.state.counts["failures"] += 1
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
        _log.error("query %s failed; it is tried again with the same records: %s", self.query.name, self.state.failure)

    def _start_stream(self) -> StreamingQuery:
        self._prepare_checkpoint()
        begun = json.loads((self._checkpoint / BASE_FILE).read_text(encoding="utf-8"))
        self._base, self._start = begun["base"], begun["start"]
        others = [each for each in self.query.reads if self.datasets[each].kind != "static"]
        reader: Any = self._context.spark.readStream.format("dynamoth").options(**self._context.source_options())
        reader = reader.option("dataset", self.query.on).option("also", ",".join(others)).option("from", "now")
        reader = reader.option("period_s", str(self.query.period_s)).option("phase_s", str(self._phase_s))
        for option in ("start", "end"):
            if begun[option] is not None:
                reader = reader.option(option, json.dumps(begun[option]))
        writer = reader.load().writeStream.queryName(self.query.name).foreachBatch(self._execute)
        writer = writer.option("checkpointLocation", str(self._checkpoint / "spark"))
        stream: StreamingQuery = writer.trigger(processingTime=TRIGGER).start()
        return stream

    def _prepare_checkpoint(self) -> None:
        """Use the checkpoint that there is, or begin one where the executions before it have ended."""
        query, servers = self.query.name, self._context.servers
        server = executions_server(query, servers.ids)
        self._progress = parse_progress(servers.run(server, (b"GET", executions_key(query))))
        if (self._checkpoint / BASE_FILE).exists():
            return
        if self._progress is not None:
            _log.warning(
                "query %s has no checkpoint: it goes on behind what log server %s has stored, execution %d",
                query, server, self._progress.execution,
            )  # fmt: skip
        begin = continuation(self._progress)
        shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._checkpoint.mkdir(parents=True)
        hidden = self._checkpoint / "base.tmp"
        values = {"base": begin.base, "start": begin.start or self._ends_now(), "end": begin.first_end}
        hidden.write_text(json.dumps(values), encoding="utf-8")
        hidden.rename(self._checkpoint / BASE_FILE)

    def _ends_now(self) -> Mapping[str, Any]:
        """Return where the datasets end now: a query that was never executed begins behind that."""
        datasets = [each for each in self.datasets.values() if each.kind != "static"]
        tips = self._context.servers.tips({each.stream: each.partitions for each in datasets})
        return {"tick_ms": int(time.time() * 1000), "offsets": tips}

    # An execution.

    def _window(self, batch: int) -> Window:
        """Return the window of a batch: Spark has written it to the checkpoint before it calls."""

        def end_of(number: int) -> Mapping[str, Any]:
            if number < 0:
                return self._start
            text = (self._checkpoint / "spark" / "offsets" / str(number)).read_text(encoding="utf-8")
            end: Mapping[str, Any] = json.loads(text.splitlines()[-1])
            return end

        return Window(end_of(batch - 1), end_of(batch))

    def _execute(self, records: DataFrame, batch: int) -> None:
        """Execute the query for the records of a window."""
        began, execution, window = time.monotonic(), self._base + batch + 1, self._window(batch)
        end, before = window.end, self._progress
        missed = ticks_missed(window.start["tick_ms"], end["tick_ms"], self.query.period_s, self._ended_ms)
        if missed and self._ended_ms:
            self.state.counts["overruns"] += 1
            self.state.counts["ticks_missed"] += missed
            _log.warning("query %s took too long: it has missed %d ticks, and covers them now", self.query.name, missed)
        if not (before is not None and before.execution >= execution and before.is_done):
            self._store(Progress(execution, window, is_done=False))
            counts = self._run(records, execution, window)
            # Before it counts as done: a crash between the two notes it twice, and not never.
            self._write_down(execution, window, counts, time.monotonic() - began)
            self._store(Progress(execution, window, is_done=True))
            self.state.counts.update(counts)
        self.state.execution, self.state.seconds, self.state.failure = execution, time.monotonic() - began, None
        self.state.counts["executions"] += 1
        self._retry_s, self._ended_ms = RETRY_S, int(time.time() * 1000)

    def _store(self, progress: Progress) -> None:
        server = executions_server(self.query.name, self._context.servers.ids)
        self._context.servers.run(server, store_progress_command(self.query.name, progress))
        self._progress = progress

    def _run(self, records: DataFrame, execution: int, window: Window) -> Counter[str]:
        query, context, end = self.query, self._context, window.end
        spark = records.sparkSession  # the stream's own: views of the same name are others elsewhere
        self.table.refresh()
        interests = spark.read.parquet(str(self.table.file())).where(f"{REGISTERED} <= {end['tick_ms']}")
        views = {query.on: records, **{name: self._view(spark, name, end["offsets"]) for name in query.reads}}
        results = self._compiled.run(spark, views, interests, end["tick_ms"])
        publication = Publication(
            context.servers, context.cluster_url, query.name, query.version, execution, end["tick_ms"], context.term,
            query.inline_bytes_max if query.delivery == "inline" else -1, query.result_bytes_max, query.retained_min,
            max(context.ttl_s, query.keep_s),
        )  # fmt: skip
        counts: Counter[str] = Counter()
        for row in results.mapInArrow(publication.publish, METRICS_SCHEMA).collect():
            counts.update(row.asDict())
        return counts

    def _view(self, spark: SparkSession, name: str, offsets: Mapping[str, int]) -> DataFrame:
        dataset = self.datasets[name]
        if dataset.kind == "keyed":
            return self._context.snapshots.at(spark, dataset, offsets)
        reader: Any = spark.read.format("dynamoth").options(**self._context.source_options())
        rows: DataFrame = reader.option("dataset", name).load()
        return rows

    def _write_down(self, execution: int, window: Window, counts: Mapping[str, int], seconds: float) -> None:
        """Note an execution, for those who check it later."""
        folder = self._context.folder / "executions"
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            "query": self.query.name, "execution": execution, "version": self.query.version, "start": window.start,
            "end": window.end, "seconds": round(seconds, 3), **counts,
        }  # fmt: skip
        with (folder / f"{self.query.name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
