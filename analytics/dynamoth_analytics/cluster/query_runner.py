"""Runs one standing query, as a stream of Spark whose batches are its executions.

Theory of operation
-------------------
Spark calls ``_execute`` for a batch of the stream, again and again until that succeeds. It waits until a tick of the
query ends the window (``windows``), writes the window to the checkpoint, and executes the query for it
(``executions``). The number of the batch, behind that of the executions before this checkpoint, is the number of the
execution: what a crash has left half done is done again under the same number, and logs do not take it twice.

A failure ends the stream. It is started again later, with the same window: nothing is skipped.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs] it has none
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import (
    Checkpoint,
    Progress,
    QueryStatus,
    Window,
    WindowEnd,
    farther,
    give_up,
    resumption,
    ticks_missed,
    with_new_datasets,
)
from dynamoth.data.queries import StandingQuery
from dynamoth.errors import DynamothError
from dynamoth_analytics.cluster.context import ClusterContext
from dynamoth_analytics.cluster.dropping import finish_dropping
from dynamoth_analytics.cluster.executions import Executions
from dynamoth_analytics.cluster.failures import check_spark, is_taken_over, reason_of
from dynamoth_analytics.cluster.servers import LogServerFailed
from dynamoth_analytics.cluster.stalls import Stall
from dynamoth_analytics.cluster.storage.checkpoints import CheckpointBase
from dynamoth_analytics.cluster.storage.journal import write_execution
from dynamoth_analytics.cluster.windows import Ticks, Windows

RETRY_S = 5.0
RETRY_S_MAX = 60.0
"""A query that fails is started again after ``RETRY_S``, and after twice the time each time, up to this one."""

CLOCK_S = 1.0
"""A query that waits for a tick reads the clock this often."""

_log = logging.getLogger("dynamoth.data-cluster")


class Stopping(DynamothError):
    """Raised in an execution that would begin while its query is stopped; the next start executes it."""

    code = "stopping"


class ExecutionFailed(DynamothError):
    """Raised to Spark by an execution that fails."""

    code = "execution-failed"


class QueryRunner:
    """Executes one query until it is stopped. Threads of Spark call it back.

    Args:
        context: of the data cluster.
        query: with this version of its definition.
        datasets: those of the query, by name.
        phase_s: seconds between a multiple of the period and its tick.

    Raises ConfigError where the query cannot be executed, and LogServerFailed.

    """

    def __init__(
        self, context: ClusterContext, query: StandingQuery, datasets: Mapping[str, Dataset], phase_s: float
    ) -> None:
        self.query = query
        self.datasets = dict(datasets)
        self._context = context
        self.executions = Executions(context, query, self.datasets)
        on, *reads = (self.datasets[name] for name in (query.on, *query.reads))
        self._windows = Windows(context.servers, on, reads, Ticks(query.period_s, phase_s))
        self.status = context.status(query.name) or QueryStatus()
        versions = {name: each.version for name, each in sorted(self.datasets.items())}
        if not self.status.execution or (self.status.version, self.status.datasets) != (query.version, versions):
            self.executions.check()
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
        #: Locked while an execution runs.
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

        ``now`` is the time of a clock that only grows, in seconds. Raises LogServerFailed.
        """
        reason = self._stall.look(self._waits_for(), self.status.execution, now)
        if reason and not self.is_stalled:
            _log.warning("query %s is stalled: %s", self.query.name, reason)
            self._set_state("stalled", reason)
        elif self.is_stalled and not reason:
            self._set_state("running")

    def _waits_for(self) -> str:
        """Return what the query waits for, as text, though there is something to execute; empty: there is nothing."""
        if self.is_failing or self._stopping.is_set():
            return ""
        if self._executing.locked():
            return f"execution {self._execution} does not end"
        if self._window_start is None:
            return "Spark does not begin to execute it"
        return "records wait, and no execution begins" if self._windows.has_waiting(self._window_start) else ""

    # The stream.

    def keep_running(self) -> None:
        """Start the stream, unless it runs, or waits for its next attempt after a failure.

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
            except LogServerFailed as error:
                if not is_taken_over(error):
                    raise
                self._fail(error)
                return
            if self._could_not_start:
                self._could_not_start = False
                self._set_state("running")

    def prepare_stop(self) -> None:
        """Begin no further execution."""
        self._stopping.set()

    def stop(self, wait_s: float = 0.0) -> None:
        """Stop the stream. An execution that runs gets ``wait_s`` to end; else the next start repeats it."""
        self._stopping.set()
        if self._stream is None:
            return
        if wait_s > 0 and self._executing.acquire(timeout=wait_s):
            self._executing.release()
        stream, self._stream = self._stream, None
        stream.stop()

    def restart(self) -> None:
        """Go on behind all records that are stored now: an operator has ordered so.

        The journal has what is skipped as an execution without results. Raises LogServerFailed, OSError, and errors of
        Spark.
        """
        self.stop()
        name, context = self.query.name, self._context
        progress, checkpoint = context.progress(name), self._checkpoint.read()
        before = farther(progress, checkpoint)
        end = self._windows.now({} if before is None else before.window.end["offsets"])
        for each in (self.datasets[each] for each in self.query.reads):
            if each.kind == "keyed":
                context.snapshots.pass_over_losses(context.spark, each, end["offsets"])
        self._give_up(progress, checkpoint, end)
        context.forget_restart(name)
        _log.warning("query %s: restarted by an operator: it goes on behind the records that there are", name)
        self._retry_at, self._retry_s, self._ended_ms = 0.0, RETRY_S, 0
        self._set_state("running")

    def _give_up(self, progress: Progress | None, checkpoint: Checkpoint | None, end: WindowEnd) -> Progress:
        """Give up the records up to ``end``, with an execution without results, in the journal; return that."""
        skipped, context = give_up(progress, checkpoint, end, _now_ms()), self._context
        values = {
            "execution": skipped.execution, "version": self.query.version, "start": skipped.window.start,
            "end": skipped.window.end, "seconds": 0.0, "ended_ms": _now_ms(), "skipped": True,
        }  # fmt: skip
        write_execution(context.journal, self.query.name, values)
        context.store_progress(self.query.name, skipped, follows=False)
        return skipped

    def show_failure(self, error: BaseException) -> None:
        """Show people why the query cannot be started: the next call of ``keep_running`` may succeed."""
        reason, self._could_not_start = reason_of(error), True
        if (self.status.state, self.status.reason) != ("failing", reason):
            self._set_state("failing", reason)

    def _fail(self, error: BaseException) -> None:
        if is_taken_over(error):
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
        self._checkpoint.forget_first_batch()
        batches = self._context.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        writer = batches.writeStream.queryName(self.query.name).foreachBatch(self._execute)
        writer = writer.option("checkpointLocation", str(self._checkpoint.spark_folder))
        stream: StreamingQuery = writer.trigger(processingTime="0 seconds").start()
        return stream

    def _prepared_checkpoint(self) -> CheckpointBase:
        """Return where the checkpoint begins: the one that there is, or a new one behind the last execution."""
        finish_dropping(self._context, self.query.name)
        base, datasets = self._checkpoint.base(), sorted(self.query.datasets)
        checkpoint, progress, name = self._checkpoint.read(), self._context.progress(self.query.name), self.query.name
        if checkpoint is None and progress is None:
            progress = self._give_up(None, None, self._windows.now())
            _log.error(
                "query %s has no checkpoint, and the log servers have lost its progress: it goes on behind the"
                " records that are stored, with execution %d", name, progress.execution + 1,
            )  # fmt: skip
        elif checkpoint is None and progress is not None and progress.execution and not progress.is_dropped:
            _log.warning(
                "query %s has no checkpoint: it goes on where the log server says that execution %d %s",
                name, progress.execution, "ended" if progress.is_done else "began",
            )  # fmt: skip
        if progress is not None:
            self._context.store_progress(name, progress)  # a process that died may have stored it at some servers only
        self._progress = progress
        if self._has_spark_failed:
            _log.warning(
                "query %s: Spark has failed outside of an execution, maybe as it cannot read or write its files: they"
                " are made again", name,
            )  # fmt: skip
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
                self._context.check_offsets(self.datasets.values())
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
        """Store a window at every log server, and then write its end to the checkpoint.

        A data cluster that hangs may be taken over by one with the same folder. When it goes on, the log servers refuse
        it. So it does not change the window of an execution that the newer one is at work with.
        """
        if not self._is_done(self._execution):
            self._progress = Progress(self._execution, window, is_done=False)
            self._context.store_progress(self.query.name, self._progress)
        self._checkpoint.write_end(batch, window.end)

    def _is_done(self, execution: int) -> bool:
        return self._progress is not None and self._progress.execution >= execution and self._progress.is_done

    def _execute_window(self, spark: SparkSession, execution: int, window: Window) -> None:
        """Execute a window, unless that is done, and show it: once, though Spark repeats a batch that has ended."""
        began, began_ms, status = time.monotonic(), _now_ms(), self.status
        self._note_overrun(window)
        is_done = self._is_done(execution)
        is_shown = is_done and status.execution == execution
        if not is_done:
            self._count(self._run(spark, execution, window, began))
            status.seconds, status.interests = round(time.monotonic() - began, 3), len(self.executions.interests)
        self._retry_s, self._began_ms, self._ended_ms = RETRY_S, began_ms, _now_ms()
        if not is_shown:
            self._count({"executions": 1})
            status.execution, status.tick_ms, status.ended_ms = execution, window.end["tick_ms"], self._ended_ms
        self._set_state("running")

    def _run(self, spark: SparkSession, execution: int, window: Window, began: float) -> Counter[str]:
        """Execute a window, and store that it is done; return what is counted."""
        name, counts = self.query.name, self.executions.run(spark, execution, window)
        if counts["overtaken"]:
            _log.error(
                "query %s: %d result sets of execution %d were not stored, as their logs have later executions: was its"
                " progress restored from an older copy than these logs? Users miss them",
                name, counts["overtaken"], execution,
            )  # fmt: skip
        values = {
            "execution": execution, "version": self.query.version, "start": window.start, "end": window.end,
            "interests": len(self.executions.interests), "seconds": round(time.monotonic() - began, 3),
            "ended_ms": _now_ms(), **counts,
        }  # fmt: skip
        write_execution(self._context.journal, name, values)
        self._progress = Progress(execution, window, is_done=True)
        self._context.store_progress(name, self._progress)
        return counts

    def _note_overrun(self, window: Window) -> None:
        if not self._ended_ms:
            return
        start_ms, end_ms = window.start["tick_ms"], window.end["tick_ms"]
        missed = ticks_missed(start_ms, end_ms, self.query.period_s, self._began_ms, self._ended_ms)
        if missed:
            self._count({"overruns": 1, "ticks_missed": missed})
            _log.warning("query %s took too long: it has missed %d ticks, and covers them now", self.query.name, missed)

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
