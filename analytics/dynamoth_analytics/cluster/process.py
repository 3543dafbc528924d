"""Runs the data cluster as a process: ``dynamoth data-cluster``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs] it has none
from pyspark.sql import SparkSession

from dynamoth.errors import ConfigError, DynamothError
from dynamoth.settings.sections import DataClusterSettings
from dynamoth_analytics.cluster.failures import reason_of
from dynamoth_analytics.cluster.identity import WrongFolder
from dynamoth_analytics.cluster.ingest import Ingest
from dynamoth_analytics.cluster.metrics import collect, collect_ingest
from dynamoth_analytics.cluster.runner import ClusterRunner
from dynamoth_analytics.cluster.servers import LogServers, TakenOver
from dynamoth_analytics.cluster.signals import is_asked_to_end, java_ignores_sigterm
from dynamoth_analytics.cluster.source import DynamothSource
from dynamoth_analytics.errors import SparkFailed
from dynamoth_analytics.session import check_session, open_session
from dynamoth_daemon import metrics
from dynamoth_daemon.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from dynamoth_daemon.process import DaemonProcess
from dynamoth_link.options import LinkOptions

FOLLOW_S = 1.0
"""The catalog is read, and queries that have failed are started again, this often."""

UPKEEP_S = 60.0
"""Interests whose time is over are ended, and snapshots renewed, this often."""

WATCH_S = 10.0
"""It is checked this often whether queries are stalled."""

RESULT_SETS_MAX = 8
BATCH_BYTES_MAX = 32 * 2**20
"""Result sets that a task gathers at once, before it sorts rows by interest; bytes that a worker gets at once."""

JAVA_OPTIONS = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000"
    " -XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
"""Ten times the defaults: Java optimizes less code that executions of small windows call only a few times. That saves a
fifth of its CPU time on two cores, and large windows take as long as before (``bench.small_windows``,
``bench.data_cluster``).
"""

STOP_S = 7.0
"""Executions that run when the process is asked to end get this time; then they are left to the next process."""


@dataclass(frozen=True, kw_only=True)
class DataClusterConfig(DataClusterSettings):
    """The configuration of a data cluster.

    Attributes:
        cluster_url: of the cluster on which applications publish, and brokers are notified; with credentials and TLS.
        servers: ``logs``, with credentials and TLS.
        link: the options of links to these.

    """

    cluster_url: str
    servers: LogServers
    link: LinkOptions = field(default_factory=LinkOptions)


class _NoMachine:
    """The machine that every daemon has. That of a data cluster does nothing: threads and Spark do the work."""

    def handle(self, event: Any, now: float) -> list[Any]:
        """Do nothing."""
        return []

    def deadline(self) -> float | None:
        """Return None: it has no timers."""
        return None


def run(config: DataClusterConfig) -> int:
    """Run a data cluster until SIGTERM or SIGINT; return the exit code.

    Raises ConfigError (the folder, the log servers, no Java) and SparkFailed.
    """
    try:
        return _run_with_spark(config)
    except DynamothError:
        if not is_asked_to_end():
            raise
        return EXIT_DONE  # Java, and what else was started, may have ended before


def _run_with_spark(config: DataClusterConfig) -> int:
    _silence_py4j()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # Spark's workers import nothing from the current folder
    folder = prepare_folder(Path(config.folder).resolve())
    arguments = argparse.Namespace(master=config.master or None, remote=None, spark_log="off")
    check_session(arguments)
    codes: list[int] = []
    try:
        with ExitStack() as stack:
            with java_ignores_sigterm(), _private_files():
                spark = stack.enter_context(open_session(arguments, "dynamoth data-cluster", JAVA_OPTIONS))
            if is_asked_to_end():
                return EXIT_DONE
            spark.dataSource.register(DynamothSource)
            # A file that is missing is a failure here: without it, an execution would have other rows.
            spark.conf.set("spark.sql.files.ignoreMissingFiles", "false")
            # Result sets may be large, and many: a task has few of them in memory, and a worker one batch.
            spark.conf.set("spark.sql.objectHashAggregate.sortBased.fallbackThreshold", RESULT_SETS_MAX)
            spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", BATCH_BYTES_MAX)
            # Windows are small: each partition of a shuffle costs more than what is in it.
            spark.conf.set("spark.sql.shuffle.partitions", 2 * spark.sparkContext.defaultParallelism)
            codes.append(asyncio.run(_run(config, spark, folder)))
    except (Py4JError, ConnectionError):
        if not codes:
            raise
        # Its Java has died, and cannot be stopped any more: the log says so.
    return codes[0]


@contextmanager
def _private_files() -> Generator[None]:
    """Have the Java that is started in this context, and its workers, make files for this account alone.

    Spark writes rows and parameters to temporary files, too, in folders that everybody may read (``SPARK_LOCAL_DIRS``).
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _silence_py4j() -> None:
    """Drop what py4j logs: every call, and every error that we get, too. Some of it goes to the root logger."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)


def prepare_folder(folder: Path) -> Path:
    """Return the folder, which exists and can be written; a new one is for this account alone. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"1")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"data_cluster.folder: {folder} cannot be written ({error.strerror}): make room or give rights, or choose"
            " another folder; without its files, queries go on where the log servers say"
        ) from error
    return folder


async def _run(config: DataClusterConfig, spark: SparkSession, folder: Path) -> int:
    return await DataClusterProcess(config, spark, folder, asyncio.Event()).run()


class DataClusterProcess(DaemonProcess[Any]):
    """One data cluster process: HTTP, signals, and the work of a ``ClusterRunner`` in threads."""

    def __init__(self, config: DataClusterConfig, spark: SparkSession, folder: Path, stop: asyncio.Event) -> None:
        super().__init__("data-cluster", _NoMachine(), config, LinkOptions(), stop)
        self._config = config
        self._folder = folder
        self._runner = ClusterRunner(spark, config.servers, config.cluster_url, folder, config.log_ttl_s)
        self._runner.archiver.hot_records = config.hot_records
        self._runner.archiver.keep_days = config.archive_keep_days
        self._ingest = Ingest(config.cluster_url, dict(config.servers.urls), config.link, durable=config.log_durable)
        #: Set when the runner has a term.
        self._begun = asyncio.Event()
        self._ingesting: asyncio.Future[None] | None = None
        #: Present faults, by kind of work.
        self._faults: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(5, "data-cluster")

    async def run(self) -> int:
        """Run until the end; return the exit code."""
        loop = asyncio.get_running_loop()
        self._runner.on_begun = lambda: loop.call_soon_threadsafe(self._begun.set)
        self._ingesting = asyncio.ensure_future(self._keep_ingesting())
        self._ingesting.add_done_callback(self._on_ingest_done)
        works = (
            self._repeat("queries", self._runner.follow_catalog, FOLLOW_S),
            self._repeat_once_begun("archive", self._runner.archive, self._config.archive_s),
            self._repeat_once_begun("upkeep", self._runner.tidy, UPKEEP_S),
            self._repeat_once_begun("watch", self._runner.watch, WATCH_S),
        )
        tasks = [self._ingesting, *map(asyncio.ensure_future, works)]
        try:
            return await super().run()
        finally:
            self._runner.prepare_stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.get_running_loop().run_in_executor(self._threads, self._runner.stop, STOP_S)
            self._threads.shutdown()

    async def _keep_ingesting(self) -> None:
        """Store published records, once this data cluster has begun: another one may do so until then."""
        await self._begun.wait()
        await self._ingest.run()

    def _on_ingest_done(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            message = "the data cluster ends because of a bug: please report this line"
            self._log.write(logging.CRITICAL, message, exception=error)
            self.end(EXIT_FAILED)

    async def _repeat_once_begun(self, name: str, work: Callable[[], Any], every_s: float) -> None:
        """Do some work as ``_repeat`` does, from when this data cluster has begun."""
        await self._begun.wait()
        await self._repeat(name, work, every_s)

    async def _repeat(self, name: str, work: Callable[[], Any], every_s: float) -> None:
        """Do some work every ``every_s`` seconds, in a thread. One that fails is logged once, and tried again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._threads, work)
            except (SparkFailed, TakenOver, WrongFolder) as error:
                if self._stop.is_set():
                    return  # Spark may have ended before
                if self._ingesting is not None:
                    self._ingesting.cancel()
                self._log.write(logging.CRITICAL, "the data cluster ends", str(error))
                self.end(EXIT_FAILED if isinstance(error, SparkFailed) else EXIT_REFUSED)
                return
            except Exception as error:  # of Spark, py4j and Arrow, too: the other queries go on
                is_ours = isinstance(error, DynamothError | OSError)
                reason = reason_of(error)
                if self._faults.get(name) != reason and not self._stop.is_set():
                    self._log.write(
                        logging.ERROR, "trying again", reason, work=name, exception=None if is_ours else error
                    )
                self._faults[name] = reason
            else:
                if self._faults.pop(name, None):
                    self._log.write(logging.INFO, "it works again", work=name)
            await asyncio.sleep(every_s)

    # The parts of a daemon.

    def shut_down(self) -> None:
        """End. Failures from now on are no faults of queries, as parts of Spark may have ended already."""
        self._runner.prepare_stop()
        super().shut_down()

    def execute(self, action: Any) -> None:
        """Do nothing: the machine has no actions."""

    def registry(self) -> CollectorRegistry:
        """Return the metrics of the data cluster."""

        def collected() -> Iterator[Metric]:
            yield from collect(self._runner)
            yield from collect_ingest(self._ingest.counts, len(self._ingest.faults))

        return metrics.make_registry("data_cluster", collected)

    def plan_version(self) -> int | None:
        """Return None: a data cluster acts on no plan of channels."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return where it keeps its files."""
        return {"folder": str(self._folder)}

    def why_not_ready(self) -> str | None:
        """Return the present faults. A query that only fails is not among them: see its status, and the metrics."""
        faults = [f"{name}: {reason}" for name, reason in self._faults.items()]
        queries = self._runner.queries().items()
        faults += [f"query {name} is stalled: {each.status.reason}" for name, each in queries if each.is_stalled]
        for name, fault in self._ingest.faults.items():
            what = f"dataset {name}" if name else "the catalog"
            faults.append(f"what is published waits to be stored ({what}): {fault}")
        if not faults and not self._runner.has_begun:
            return "it has not begun yet"
        return "\n".join(faults) or None
