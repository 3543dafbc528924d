"""Executes one standing query, as a stream of Spark: one job per execution, for all interests at once.

Theory of operation
-------------------
A batch of the stream is an execution. Spark calls ``_execute`` for it, again and again until that succeeds. It waits
until a tick of the query ends the window (``windows``), writes the window to the checkpoint, and executes the query for
the new records. The driver reads those of a small window (``small_windows``), and Spark those of others. The number of
the batch, behind that of the executions before this checkpoint, is the number of the execution: what a crash has left
half done is done again under the same number, and logs do not take it twice.

What an execution reads besides is as of the end of its window, too: keyed snapshots at its offsets, static datasets as
they were loaded then, and the interests that were registered before its end was sealed.

A failure ends the stream. It is started again later, with the same window: nothing is skipped.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs] it has none
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery

from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import (
    Checkpoint,
    Progress,
    QueryStatus,
    Window,
    WindowEnd,
    begin_key,
    executions_key,
    executions_server,
    give_up,
    parse_begin,
    parse_progress,
    parse_status,
    restart_key,
    resumption,
    status_key,
    store_progress_command,
    store_status_command,
    ticks_missed,
    with_new_datasets,
)
from dynamoth.data.queries import StandingQuery
from dynamoth.errors import DynamothError
from dynamoth_analytics.cluster import publishing
from dynamoth_analytics.cluster.batches import record_schema
from dynamoth_analytics.cluster.checkpoints import CheckpointBase, CheckpointFolder
from dynamoth_analytics.cluster.failures import check_spark, is_fenced_by_another, reason_of
from dynamoth_analytics.cluster.interest_table import InterestTable, table_schema
from dynamoth_analytics.cluster.journal import write_execution
from dynamoth_analytics.cluster.outdated import OutdatedInterests
from dynamoth_analytics.cluster.publishing import METRICS_SCHEMA, ResultPublisher
from dynamoth_analytics.cluster.schema import INTEREST
from dynamoth_analytics.cluster.servers import LogServerFailed, LogServers
from dynamoth_analytics.cluster.small_windows import PAIRS_MAX, ROWS_MAX, SETTINGS, SmallWindows, Table, pairs
from dynamoth_analytics.cluster.snapshots import KeyedSnapshots
from dynamoth_analytics.cluster.sql import compile_query
from dynamoth_analytics.cluster.stalls import Stall
from dynamoth_analytics.cluster.windows import Ticks, Windows

RETRY_S = 5.0
RETRY_S_MAX = 60.0
"""A query that fails is started again after ``RETRY_S``, and after twice the time each time, up to this one."""

CLOCK_S = 1.0
"""A query that waits for a tick reads the clock this often."""

PARTITIONS = "spark.sql.shuffle.partitions"
"""Of Spark: in this many parts, interests are joined."""

_log = logging.getLogger("dynamoth.data-cluster")


class Stopping(DynamothError):
    """Raised in an execution that would begin while its query is stopped; the next start executes it."""

    code = "stopping"


class ExecutionFailed(DynamothError):
    """Raised to Spark by an execution that fails."""

    code = "execution-failed"


@dataclass(frozen=True)
class ClusterContext:
    """What all queries of a data cluster share."""

    spark: SparkSession
    servers: LogServers
    cluster_url: str
    folder: Path
    term: int
    ttl_s: float
    snapshots: KeyedSnapshots
    small_windows: SmallWindows
    #: Appends to a log server that fails are tried again for this time.
    append_retry_s: float = publishing.RETRY_S_MAX
    #: Set when a newer data cluster was met: this one has to end.
    fenced: threading.Event = field(default_factory=threading.Event)
    #: Set when this data cluster begins to end.
    stopping: threading.Event = field(default_factory=threading.Event)

    def source_options(self) -> dict[str, str]:
        """Return the options of the source for all datasets."""
        return {
            **self.servers.options(),
            "archive": str(self.folder / "archive"),
            "loads": str(self.folder / "static"),
        }

    def publisher(self, query: StandingQuery, execution: int, tick_ms: int) -> ResultPublisher:
        """Return how the result sets of an execution are published."""
        return ResultPublisher(
            self.servers, self.cluster_url, query.name, query.version, execution, tick_ms, self.term,
            query.inline_bytes_max if query.delivery == "inline" else -1, query.result_bytes_max, query.retained_min,
            max(self.ttl_s, query.keep_s), self.append_retry_s,
        )  # fmt: skip

    def table_folder(self, query: str) -> Path:
        """Return where the interest table of a query is: of this data cluster alone, as one before it may go on."""
        return self.folder / "interests" / str(self.term) / query

    def checkpoint(self, query: str) -> CheckpointFolder:
        """Return the checkpoint of a query."""
        return CheckpointFolder(self.folder / "checkpoints" / query)

    # What is stored about a query.

    def progress(self, query: str) -> Progress | None:
        """Return the stored progress of a query. Raises LogServerFailed."""
        return parse_progress(self._get(query, executions_key(query)))

    def begin(self, query: str) -> WindowEnd | None:
        """Return behind which offsets a query begins that was dropped, None: not known. Raises LogServerFailed."""
        return parse_begin(self._get(query, begin_key(query)))

    def store_progress(self, query: str, progress: Progress) -> None:
        """Store the progress of a query. Raises LogServerFailed, also where a newer data cluster is there."""
        self._run(query, store_progress_command(query, progress, self.term))

    def status(self, query: str) -> QueryStatus | None:
        """Return the stored status of a query. Raises LogServerFailed."""
        return parse_status(self._get(query, status_key(query)))

    def store_status(self, query: str, status: QueryStatus) -> None:
        """Store the status of a query, if that is possible: it is only for people."""
        try:
            self._run(query, store_status_command(query, status, self.term))
        except LogServerFailed as error:
            _log.debug("the status of query %s is not stored: %s", query, error)

    def _get(self, query: str, key: bytes) -> Any:
        return self._run(query, (b"GET", key))

    def _run(self, query: str, command: Any) -> Any:
        return self.servers.run(executions_server(query, self.servers.ids), command)


class QueryRunner:
    """Executes one query until it is stopped. Threads of Spark call it back.

    Raises ConfigError where the query cannot be executed, and LogServerFailed.
    """

    def __init__(
        self, context: ClusterContext, query: StandingQuery, datasets: Mapping[str, Dataset], phase_s: float
    ) -> None:
        self.query = query
        self.datasets = dict(datasets)
        self._context = context
        self._compiled = compile_query(query, datasets)
        on, *reads = (self.datasets[name] for name in (query.on, *query.reads))
        self._windows = Windows(context.servers, on, reads, Ticks(query.period_s, phase_s))
        self.table = InterestTable(context.servers, context.table_folder(query.name), query)
        self._outdated = OutdatedInterests()
        self.status = context.status(query.name) or QueryStatus()
        versions = {name: each.version for name, each in sorted(self.datasets.items())}
        if not self.status.execution or (self.status.version, self.status.datasets) != (query.version, versions):
            self._compiled.check(context.spark, datasets)
        self.status.datasets = versions
        self._set_state("running")
        self._stream: StreamingQuery | None = None
        self._base = 0
        #: The number of the execution that runs, or ran last.
        self._execution = 0
        self._checkpoint = context.checkpoint(query.name)
        self._progress: Progress | None = None
        #: The error of the execution that has failed: that of the stream quotes it in pages of text.
        self._error: BaseException | None = None
        #: Whether Spark failed outside of an execution, as it does when it cannot read its own files.
        self._has_spark_failed = False
        #: When the last execution of this process began and ended; 0: there was none.
        self._began_ms = self._ended_ms = 0
        self._retry_at = 0.0
        self._retry_s = RETRY_S
        #: Whether the last attempt to start the stream has failed.
        self._could_not_start = False
        #: Whether Spark has executed the query in this process.
        self._has_executed = False
        #: Held while an execution runs.
        self._executing = threading.Lock()
        self._stopping = threading.Event()
        #: The beginning of the window that comes next, or is executed; None: Spark has not asked for one.
        self._window_start: WindowEnd | None = None
        self._stall = Stall(query.period_s)

    @property
    def is_failing(self) -> bool:
        """Whether its last execution has failed."""
        return self.status.state == "failing"

    @property
    def is_stalled(self) -> bool:
        """Whether there is something to execute, and no execution ends."""
        return self.status.state == "stalled"

    def watch(self, now: float) -> None:
        """Find out whether the query is stalled, and show it. It does not ask Spark, which may hang.

        ``now``: of a clock that only grows, in seconds. Raises LogServerFailed.
        """
        reason = self._stall.look(self._waits_for(), self.status.execution, now)
        if reason and not self.is_stalled:
            _log.warning("query %s is stalled: %s", self.query.name, reason)
            self._set_state("stalled", reason)
        elif self.is_stalled and not reason:
            self._set_state("running")

    def _waits_for(self) -> str:
        """Return what does not happen, though there is something to execute; empty: there is nothing."""
        if self.is_failing or self._stopping.is_set():
            return ""
        if self._executing.locked():
            return f"execution {self._execution} does not end"
        if self._window_start is None:
            return "Spark does not begin to execute it"
        return "records wait, and no execution begins" if self._windows.has_waiting(self._window_start) else ""

    # The stream.

    def keep_running(self) -> None:
        """Start the stream if it does not run, and is not to wait.

        Raises LogServerFailed and OSError, and SparkFailed where Spark has ended.
        """
        if self._context.stopping.is_set():
            return
        if self._stream is not None and not self._stream.isActive:
            self._has_spark_failed = self._error is None
            error = self._error or self._stream.exception()
            self._stream, self._error = None, None
            if error is not None:
                self._fail(error)
        if self._stream is None and time.monotonic() >= self._retry_at:
            try:
                self._stream = self._start_stream()
            except (PySparkException, Py4JError) as error:
                self._has_spark_failed = True
                self._fail(error)
                return
            if self._could_not_start:
                self._could_not_start = False
                self._set_state("running")

    def prepare_stop(self) -> None:
        """Begin no further execution."""
        self._stopping.set()

    def stop(self, wait_s: float = 0.0) -> None:
        """Stop the stream. An execution that runs may end within ``wait_s``; else the next start repeats it."""
        self._stopping.set()
        if self._stream is None:
            return
        if wait_s > 0 and self._executing.acquire(timeout=wait_s):
            self._executing.release()
        stream, self._stream = self._stream, None
        stream.stop()

    def restart(self) -> None:
        """Go on behind all records that there are now: an operator has ordered so. Raises LogServerFailed, OSError.

        What is skipped is written down as an execution without results.
        """
        self.stop()
        name, context = self.query.name, self._context
        end = self._windows.now()
        for each in (self.datasets[each] for each in self.query.reads):
            if each.kind == "keyed":
                context.snapshots.pass_over_losses(context.spark, each, end["offsets"])
        self._give_up(context.progress(name), self._checkpoint.read(), end)
        context.servers.run(executions_server(name, context.servers.ids), (b"DEL", restart_key(name)))
        _log.warning("query %s: restarted by an operator: it goes on behind the records that there are", name)
        self._retry_at, self._retry_s, self._ended_ms = 0.0, RETRY_S, 0
        self._set_state("running")

    def _give_up(self, progress: Progress | None, checkpoint: Checkpoint | None, end: WindowEnd) -> Progress:
        """Go on behind ``end``; what is given up is written down as an execution without results. Returns that."""
        skipped, context = give_up(progress, checkpoint, end, _now_ms()), self._context
        values = {
            "execution": skipped.execution, "version": self.query.version, "start": skipped.window.start,
            "end": skipped.window.end, "seconds": 0.0, "ended_ms": _now_ms(), "skipped": True,
        }  # fmt: skip
        write_execution(context.folder / "executions", self.query.name, values)
        context.store_progress(self.query.name, skipped)
        return skipped

    def show_failure(self, error: BaseException) -> None:
        """Show why the query cannot be started: the next call of ``keep_running`` may succeed."""
        reason, self._could_not_start = reason_of(error), True
        if (self.status.state, self.status.reason) != ("failing", reason):
            self._set_state("failing", reason)

    def _fail(self, error: BaseException) -> None:
        if is_fenced_by_another(error):
            self._context.fenced.set()
            return
        if self._context.stopping.is_set():
            return  # parts of Spark may have ended before
        check_spark(self._context.spark)
        reason = reason_of(error)
        self._count({"failures": 1})
        self._set_state("failing", reason)
        _log.error(
            "query %s failed; the same window is tried again in %g s: %s", self.query.name, self._retry_s, reason
        )
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)

    def _start_stream(self) -> StreamingQuery:
        base = self._prepared_checkpoint()
        self._base, self._error, self._has_spark_failed = base.execution, None, False
        self._window_start = None
        self._stopping.clear()
        batches = self._context.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        writer = batches.writeStream.queryName(self.query.name).foreachBatch(self._execute)
        writer = writer.option("checkpointLocation", str(self._checkpoint.spark_folder))
        stream: StreamingQuery = writer.trigger(processingTime="0 seconds").start()
        return stream

    def _prepared_checkpoint(self) -> CheckpointBase:
        """Return where the checkpoint begins: the one that there is, or a new one behind the last execution."""
        base, datasets = self._checkpoint.base(), sorted(self.query.datasets)
        checkpoint, progress, name = self._checkpoint.read(), self._context.progress(self.query.name), self.query.name
        if checkpoint is None and progress is None:
            progress = self._give_up(None, None, self._windows.now())
            _log.error(
                "query %s has no checkpoint, and its log server has lost its progress: it goes on behind the records"
                " that there are, with execution %d", name, progress.execution + 1,
            )  # fmt: skip
        elif checkpoint is None and progress is not None and progress.execution and not progress.is_dropped:
            _log.warning(
                "query %s has no checkpoint: it goes on where the log server says that execution %d %s",
                name, progress.execution, "ended" if progress.is_done else "began",
            )  # fmt: skip
        self._progress = progress
        if self._has_spark_failed:
            _log.warning("query %s: Spark has failed, maybe as it cannot read its files: they are made again", name)
        is_same = not self._has_spark_failed and (base is None or sorted(base.datasets) == datasets)
        begin = resumption(progress, checkpoint, reads_the_same=is_same)
        if begin is None:
            assert base is not None, "it goes on"
            return base
        now = self._windows.now()
        start = with_new_datasets(begin.start or self._context.begin(name) or now, now["offsets"])
        end = None if begin.first_end is None else with_new_datasets(begin.first_end, now["offsets"])
        base = CheckpointBase(begin.base, start, end, datasets)
        self._checkpoint.begin(base)
        return base

    # An execution.

    def _execute(self, rows: DataFrame, batch: int) -> None:
        """Wait for the end of a window, and execute the query for its records.

        The rows of the batch mean nothing: the stream gives batches their numbers, and repeats those that have failed.
        """
        try:
            window = self._next_window(batch)
            with self._executing:
                self._check_stopping()
                self._execution = self._base + batch + 1
                self._begin_window(batch, window)
                self._execute_window(rows.sparkSession, self._execution, window)
                self._window_start = window.end
        except Exception as error:
            self._error = error
            # Without the cause: Spark searches the text of an error with a regular expression that recurses. A long
            # text, as that of an error of Java, ends the thread with an overflow of its stack.
            raise ExecutionFailed("the execution failed") from None

    def _next_window(self, batch: int) -> Window:
        """Return the window of a batch: that of its last attempt, or else the next one, when it has ended.

        Only the first batch of a stream may have had an attempt. The others begin where this process has ended the
        window before, whatever a data cluster that was taken over writes to the folder.
        """
        start, end = self._window_start, None
        if start is None:
            start, end = self._checkpoint.start(batch), self._checkpoint.end(batch)
        self._window_start = start
        while end is None:
            self._check_stopping()
            end = self._windows.next_end(start)
            if end is None:
                self._wait_until(self._windows.ticks.next(start["tick_ms"], _now_ms()))
        return Window(start, end)

    def _wait_until(self, tick_ms: int) -> None:
        """Wait for a tick, or until the query is stopped. The clock may be set meanwhile."""
        while (left_s := tick_ms / 1000 - time.time()) > 0 and not self._stopping.is_set():
            self._stopping.wait(min(left_s, CLOCK_S))

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise Stopping("the query is stopped")

    def _begin_window(self, batch: int, window: Window) -> None:
        """Store a window at the log server, and then write its end to the checkpoint.

        A data cluster that hangs may be taken over by one with the same folder. It is refused by the log server when it
        goes on, and so does not change the window of an execution that the newer one is at work with.
        """
        if not self._is_done(self._execution):
            self._progress = Progress(self._execution, window, is_done=False)
            self._context.store_progress(self.query.name, self._progress)
        self._checkpoint.write_end(batch, window.end)

    def _is_done(self, execution: int) -> bool:
        return self._progress is not None and self._progress.execution >= execution and self._progress.is_done

    def _execute_window(self, spark: SparkSession, execution: int, window: Window) -> None:
        began, began_ms, name = time.monotonic(), _now_ms(), self.query.name
        self._note_overrun(window)
        counts = Counter[str]()
        if not self._is_done(execution):
            counts = self._run(spark, execution, window)
            values = {
                "execution": execution, "version": self.query.version, "start": window.start, "end": window.end,
                "interests": len(self.table), "seconds": round(time.monotonic() - began, 3),
                "ended_ms": _now_ms(), **counts,
            }  # fmt: skip
            write_execution(self._context.folder / "executions", name, values)
            self._progress = Progress(execution, window, is_done=True)
            self._context.store_progress(name, self._progress)
        self._count({"executions": 1, **counts})
        self._retry_s, self._began_ms, self._ended_ms = RETRY_S, began_ms, _now_ms()
        status = self.status
        status.execution, status.tick_ms, status.ended_ms = execution, window.end["tick_ms"], self._ended_ms
        status.seconds, status.interests = round(time.monotonic() - began, 3), len(self.table)
        self._set_state("running")

    def _note_overrun(self, window: Window) -> None:
        if not self._ended_ms:
            return
        start_ms, end_ms = window.start["tick_ms"], window.end["tick_ms"]
        missed = ticks_missed(start_ms, end_ms, self.query.period_s, self._began_ms, self._ended_ms)
        if missed:
            self._count({"overruns": 1, "ticks_missed": missed})
            _log.warning("query %s took too long: it has missed %d ticks, and covers them now", self.query.name, missed)

    def _run(self, spark: SparkSession, execution: int, window: Window) -> Counter[str]:
        """Execute the query. The session is the stream's own: views of the same name are others elsewhere."""
        query, context, end = self.query, self._context, window.end
        self.table.refresh()
        self._outdated.end(context.publisher(query, execution, end["tick_ms"]), self.table)
        counts: Counter[str] = Counter()
        file, interests_count = self.table.file(end.get("sealed_ms", end["tick_ms"]))
        if not interests_count and self._has_executed:
            return counts
        self._has_executed = True  # once without interests, too: so Java is warm when the first ones come
        interests: DataFrame = spark.read.schema(from_arrow_schema(table_schema(query))).parquet(str(file))
        tables = None
        if interests_count <= ROWS_MAX:
            tables = context.small_windows.tables(query, self.datasets, window)
        for name, setting in SETTINGS.items():
            spark.conf.set(name, setting if tables is not None else str(context.spark.conf.get(name)))
        if tables is None:
            views = {name: self._view(spark, name, end) for name in query.reads}
            views[query.on], are_all = self._records(spark, window)
            if are_all:  # each task joins its own interests with all of them, and no row moves to another task
                interests = interests.repartition(int(str(spark.conf.get(PARTITIONS))), INTEREST)
            results = self._compiled.run(spark, views, interests, end["tick_ms"])
        else:
            views = {name: self._table_view(spark, name, table).coalesce(1) for name, table in tables.items()}
            has_grids = pairs(tables, interests_count) > PAIRS_MAX
            compiled = self._compiled if has_grids else self._compiled.without_grids()
            results = compiled.run(spark, views, interests.coalesce(1), end["tick_ms"])
        publisher = context.publisher(query, execution, end["tick_ms"])
        for row in results.mapInArrow(publisher.publish, METRICS_SCHEMA).collect():
            counts.update(row.asDict())
        return counts

    def _table_view(self, spark: SparkSession, name: str, table: Table) -> DataFrame:
        """Return a table that the driver has read."""
        schema = from_arrow_schema(record_schema(self.datasets[name]))
        rows: DataFrame = spark.read.schema(schema).parquet(*map(str, table.files))
        return rows

    def _records(self, spark: SparkSession, window: Window) -> tuple[DataFrame, bool]:
        """Return the new records of a window, and whether each task gets all of them, as they are few."""
        query = self.query
        table = self._context.small_windows.records(query, self.datasets[query.on], window)
        if table is not None:
            rows = self._table_view(spark, query.on, table)
            # With a hint, Spark executes several joins in the order in which they are written.
            return rows if query.reads else broadcast(rows), True
        reader: Any = spark.read.format("dynamoth").options(**self._context.source_options())
        reader = reader.option("dataset", query.on).option("start", json.dumps(dict(window.start)))
        return reader.option("end", json.dumps(dict(window.end))).load(), False

    def _view(self, spark: SparkSession, name: str, end: WindowEnd) -> DataFrame:
        """Return a dataset besides the one that the query is on, as of the end of a window."""
        dataset = self.datasets[name]
        if dataset.kind == "keyed":
            return self._context.snapshots.at(spark, dataset, end["offsets"])
        reader: Any = spark.read.format("dynamoth").options(**self._context.source_options()).option("dataset", name)
        loaded = end.get("static", {}).get(name)
        if loaded is not None:
            reader = reader.option("loaded", str(loaded))
        rows: DataFrame = reader.load()
        return rows

    # What people see.

    def _count(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self.status.counts[name] = self.status.counts.get(name, 0) + count

    def _set_state(self, state: str, reason: str = "") -> None:
        status = self.status
        if status.state != state or not status.since_ms:
            status.since_ms = _now_ms()
        status.state, status.reason, status.version = state, reason, self.query.version
        self._context.store_status(self.query.name, status)


def _now_ms() -> int:
    return int(time.time() * 1000)
