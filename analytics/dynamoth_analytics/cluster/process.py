"""Runs the data cluster as a process: ``dynamoth data-cluster``."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from pyspark.sql import SparkSession

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Catalog, entry_of, put_command
from dynamoth.data.datasets import Dataset
from dynamoth.data.executions import TERM_KEY
from dynamoth.data.queries import StandingQuery
from dynamoth.errors import ConfigError, DynamothError
from dynamoth.settings.sections import DataClusterSettings
from dynamoth_analytics.cluster.archive import Archiver
from dynamoth_analytics.cluster.executions import ClusterContext, QueryRunner
from dynamoth_analytics.cluster.phases import phases
from dynamoth_analytics.cluster.servers import LogServers, read_servers
from dynamoth_analytics.cluster.snapshots import KeyedSnapshots
from dynamoth_analytics.cluster.source import DynamothSource
from dynamoth_analytics.errors import SparkFailed
from dynamoth_analytics.session import open_session
from dynamoth_daemon import metrics
from dynamoth_daemon.exit_codes import EXIT_FAILED
from dynamoth_daemon.process import DaemonProcess
from dynamoth_link.options import LinkOptions

LOOK_S = 1.0
"""The catalog is read, and failed queries are started again, this often."""

UPKEEP_S = 60.0
"""Interests are ended, and snapshots renewed, this often."""

_FAMILIES = metrics.Families("dynamoth_data_cluster_")


@dataclass(frozen=True, kw_only=True)
class DataClusterConfig(DataClusterSettings):
    """The configuration of a data cluster. ``cluster_url``: of the cluster through which brokers are notified."""

    cluster_url: str


class _NoMachine:
    """A daemon has a machine. This one decides nothing that needs one: Spark does the work."""

    def handle(self, event: Any, now: float) -> list[Any]:
        """Do nothing."""
        return []

    def deadline(self) -> float | None:
        """Return None: nothing is due."""
        return None


def run(config: DataClusterConfig) -> int:
    """Run a data cluster until SIGTERM or SIGINT; return the exit code.

    Raises ConfigError (the folder, the log servers, no Java) and SparkFailed.
    """
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it logs every call
    folder = Path(config.folder).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
    except OSError as error:
        raise ConfigError(f"data_cluster.folder: {folder} cannot be written: {error.strerror}") from error
    servers = read_servers(config.logs, durable=config.log_durable)
    arguments = argparse.Namespace(master=config.master or None, remote=None, spark_log="off")
    with open_session(arguments, "dynamoth data-cluster") as spark:
        spark.dataSource.register(DynamothSource)
        return asyncio.run(_run(config, servers, spark, folder))


async def _run(config: DataClusterConfig, servers: LogServers, spark: SparkSession, folder: Path) -> int:
    return await DataClusterProcess(config, servers, spark, folder, asyncio.Event()).run()


class DataClusterProcess(DaemonProcess[Any]):
    """One data cluster process."""

    def __init__(
        self, config: DataClusterConfig, servers: LogServers, spark: SparkSession, folder: Path, stop: asyncio.Event
    ) -> None:
        super().__init__("data-cluster", _NoMachine(), config, LinkOptions(), stop)
        self._config = config
        self._servers = servers
        self._spark = spark
        self._folder = folder
        self._archiver = Archiver(servers, folder / "archive", config.hot_records)
        self._runners: dict[str, QueryRunner] = {}
        self._faults: dict[str, str] = {}
        self._context: ClusterContext | None = None
        self._catalog = Catalog()
        self._threads = ThreadPoolExecutor(3, "data-cluster")
        self._is_ending = False

    async def run(self) -> int:
        """Run until the end; return the exit code."""
        tasks = [
            asyncio.ensure_future(self._keep(self._look, LOOK_S)),
            asyncio.ensure_future(self._keep(self._archive, self._config.archive_s)),
            asyncio.ensure_future(self._keep(self._tidy, UPKEEP_S)),
        ]
        try:
            return await super().run()
        finally:
            self._is_ending = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for runner in self._runners.values():
                runner.stop()
            self._threads.shutdown()

    async def _keep(self, work: Any, every_s: float) -> None:
        """Do some work again and again, in a thread; a fault that may pass is logged."""
        loop, last = asyncio.get_running_loop(), ""
        while True:
            try:
                await loop.run_in_executor(self._threads, work)
                if last:
                    self._log.write(logging.INFO, "it works again", work=work.__name__.strip("_"))
                last = ""
            except (DynamothError, OSError) as error:
                self._faults[work.__name__] = str(error)
                if str(error) != last:
                    self._log.write(logging.ERROR, "trying again", str(error), work=work.__name__.strip("_"))
                last = str(error)
                if isinstance(error, SparkFailed):
                    self.end(EXIT_FAILED)
            else:
                self._faults.pop(work.__name__, None)
            await asyncio.sleep(every_s)

    # What is done in threads.

    def _look(self) -> None:
        """Bring what runs in line with the catalog."""
        if self._spark.sparkContext._jsc is None:  # pyright: ignore[reportPrivateUsage]
            raise SparkFailed("Spark has stopped: see --spark-log; the process ends, so that it is started again")
        if self._context is None:
            self._context = self._begin()
        catalog = self._catalog = self._servers.catalog()
        spread = phases({name: query.period_s for name, query in catalog.queries.items()})
        for name in [*self._runners]:
            runner = self._runners[name]
            if _definitions(catalog, catalog.queries.get(name)) != (runner.query, runner.datasets):
                runner.stop()
                del self._runners[name]
        for name, query in catalog.queries.items():
            if name not in self._runners:
                _, datasets = _definitions(catalog, query)
                try:
                    self._runners[name] = QueryRunner(self._context, query, datasets, spread[name])
                except ConfigError as error:
                    if self._faults.get(name) != str(error):
                        self._log.write(logging.ERROR, "a query cannot be executed", str(error), query=name)
                    self._faults[name] = str(error)
                    continue
                self._faults.pop(name, None)
            self._runners[name].keep_running()

    def _begin(self) -> ClusterContext:
        """Take a term that is larger than those of all data clusters before this one."""
        term = max(int(self._servers.run(id_, (b"INCR", TERM_KEY))) for id_ in self._servers.ids)
        for id_ in self._servers.ids:
            self._servers.run(id_, (b"SET", TERM_KEY, b"%d" % term))
        options = {"logs": self._config.logs, "archive": str(self._folder / "archive")}
        snapshots = KeyedSnapshots(self._folder / "snapshots", options)
        return ClusterContext(
            self._spark, self._servers, self._config.logs, self._config.cluster_url, self._folder, term,
            self._config.log_ttl_s, snapshots,
        )  # fmt: skip

    def _archive(self) -> None:
        self._archiver.archive(self._servers.catalog())

    def _tidy(self) -> None:
        """End interests, renew snapshots, and write definitions to servers that lack them."""
        catalog = self._servers.catalog()
        for id_ in self._servers.ids:
            commands = [put_command(DATASETS_KEY, name, entry_of(each)) for name, each in catalog.datasets.items()]
            commands += [put_command(QUERIES_KEY, name, entry_of(each)) for name, each in catalog.queries.items()]
            if commands:
                self._servers.run_all(id_, commands)
        for runner in [*self._runners.values()]:
            runner.table.expire()
        if self._context is not None:
            keyed = [each for each in catalog.datasets.values() if each.kind == "keyed"]
            for dataset in keyed:
                self._context.snapshots.renew(
                    self._spark, dataset, self._servers.tips({dataset.stream: dataset.partitions})
                )

    # The parts of a daemon.

    def execute(self, action: Any) -> None:
        """Do nothing: the machine has no actions."""

    def registry(self) -> CollectorRegistry:
        """Return the metrics of the data cluster."""
        return metrics.make_registry("data_cluster", self._collect)

    def _collect(self) -> Iterator[Metric]:
        counts: Counter[str] = Counter()
        for runner in [*self._runners.values()]:
            counts.update(runner.state.counts)
        yield _FAMILIES.gauge("queries", "Queries that are executed", len(self._runners))
        failing = sum(runner.state.failure is not None for runner in [*self._runners.values()])
        yield _FAMILIES.gauge("queries_failing", "Queries that fail now", failing)
        yield _FAMILIES.gauge(
            "interests", "Interests of all queries", sum(len(r.table) for r in [*self._runners.values()])
        )
        yield _FAMILIES.counter("archived", "Records that were archived", self._archiver.records)
        yield from _FAMILIES.counters(_COUNTERS, counts)

    def plan_version(self) -> int | None:
        """Return None: a data cluster acts on no plan of channels."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return where it keeps its files."""
        return {"folder": str(self._folder)}

    def why_not_ready(self) -> str | None:
        """Return what does not work now."""
        faults = dict(self._faults)
        faults |= {name: f"query {name}: {r.state.failure}" for name, r in self._runners.items() if r.state.failure}
        return "\n".join(faults.values()) or (None if self._context is not None else "it has not begun yet")


_COUNTERS = {
    "executions": "Executions of queries",
    "failures": "Executions that failed and were, or will be, repeated",
    "overruns": "Executions that took longer than their period",
    "ticks_missed": "Ticks that were covered by a later execution",
    "result_sets": "Result sets",
    "rows": "Rows of result sets",
    "bytes": "Bytes of result sets",
    "repeated": "Result sets that were stored before: an execution was repeated",
    "too_large": "Result sets that were replaced by an error, as they were too large",
    "unpublished": "Result sets that brokers were not notified of",
}


def _definitions(catalog: Catalog, query: StandingQuery | None) -> tuple[StandingQuery | None, dict[str, Dataset]]:
    """Return what a runner depends on."""
    if query is None:
        return None, {}
    found = {name: catalog.dataset(name) for name in query.datasets}
    return query, {name: each for name, each in found.items() if each is not None}
