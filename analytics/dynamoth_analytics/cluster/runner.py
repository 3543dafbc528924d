"""Brings what is executed in line with the catalog: the work of a data cluster, called by its process in threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Catalog, entry_of, put_command
from dynamoth.data.datasets import Dataset
from dynamoth.data.executions import (
    TERM_KEY,
    QueryStatus,
    executions_server,
    raise_term_command,
    restart_key,
)
from dynamoth.data.queries import StandingQuery
from dynamoth.errors import ConfigError, DynamothError
from dynamoth_analytics.cluster.archive import Archiver
from dynamoth_analytics.cluster.dropping import end_dropped
from dynamoth_analytics.cluster.executions import ClusterContext, QueryRunner
from dynamoth_analytics.cluster.interest_table import expire_interests
from dynamoth_analytics.cluster.phases import phases
from dynamoth_analytics.cluster.publishing import Fenced
from dynamoth_analytics.cluster.retention import Needs, needs_of, unneeded
from dynamoth_analytics.cluster.servers import LogServers
from dynamoth_analytics.cluster.small_windows import SmallWindows
from dynamoth_analytics.cluster.snapshots import KeyedSnapshots
from dynamoth_analytics.errors import SparkFailed

_log = logging.getLogger("dynamoth.data-cluster")


class TakenOver(DynamothError):
    """Raised when a newer data cluster works with the same log servers: this one has to end."""

    code = "taken-over"


class ClusterRunner:
    """The queries of one data cluster.

    Its methods are called in threads, each by one thread at a time. They raise LogServerFailed and OSError, and can be
    called again then; SparkFailed and TakenOver are the end.
    """

    def __init__(
        self, spark: SparkSession, servers: LogServers, logs: str, cluster_url: str, folder: Path, ttl_s: float
    ) -> None:
        self.archiver = Archiver(servers, folder / "archive", journal=folder / "executions")
        #: Why queries cannot be executed, by name.
        self.refused: dict[str, str] = {}
        #: Their definitions, and those of their datasets: they are not tried again before these change.
        self._refused_definitions: dict[str, _Definitions] = {}
        self._spark = spark
        self._servers = servers
        self._logs = logs
        self._cluster_url = cluster_url
        self._folder = folder
        self._ttl_s = ttl_s
        self._context: ClusterContext | None = None
        self._runners: dict[str, QueryRunner] = {}
        #: Dropped queries whose users know.
        self._ended: set[str] = set()
        #: Held while queries are started and stopped.
        self._looking = threading.Lock()
        self._is_stopping = False

    @property
    def has_begun(self) -> bool:
        """Whether it has a term."""
        return self._context is not None

    @property
    def term(self) -> int:
        """Its term; 0: it has not begun."""
        return 0 if self._context is None else self._context.term

    def queries(self) -> dict[str, QueryRunner]:
        """Return the queries that are executed, by name."""
        return dict(self._runners)

    def look(self) -> None:
        """Start, stop and restart queries, as the catalog and operators say."""
        with self._looking:
            if self._is_stopping:
                return
            self._check_spark()
            if self._context is None:
                self._context = self._begin()
            self._check_term(self._context)
            catalog = self._servers.catalog()
            self._stop_others(catalog)
            for name in catalog.dropped_queries - self._ended:
                try:
                    end_dropped(self._context, name)
                except Fenced as error:
                    raise TakenOver(str(error)) from error
                self._ended.add(name)
            self._start_missing(self._context, catalog)
            orders = self._orders()
            for name, runner in self._runners.items():
                if name in orders:
                    runner.restart()
                runner.keep_running()

    def archive(self) -> None:
        """Copy new records to the archive."""
        self.archiver.archive(self._servers.catalog())

    def tidy(self) -> None:
        """End interests, renew snapshots, and write definitions to servers that lack them."""
        catalog = self._servers.catalog()
        for id_ in self._servers.ids:
            commands = [put_command(DATASETS_KEY, name, entry_of(each)) for name, each in catalog.datasets.items()]
            commands += [put_command(QUERIES_KEY, name, entry_of(each)) for name, each in catalog.queries.items()]
            if commands:
                self._servers.run_all(id_, commands)
        for name in (*catalog.queries, *catalog.dropped_queries):
            expire_interests(self._servers, name)
        if self._context is None or self._is_stopping:
            return
        context = self._context
        needs = needs_of(catalog, context.progress, lambda name: context.checkpoint(name).read())
        try:
            self._renew_snapshots(context, catalog, needs)
        finally:
            self.archiver.unneeded = unneeded(catalog, needs, context.snapshots)

    def _renew_snapshots(self, context: ClusterContext, catalog: Catalog, needs: Sequence[Needs]) -> None:
        """Renew the snapshots of the keyed datasets that queries read. One that fails does not hold up the others."""
        failure: Exception | None = None
        for dataset in catalog.datasets.values():
            own = [each.offsets for each in needs if dataset.name in each.datasets]
            if dataset.kind == "keyed" and any(dataset.name in query.reads for query in catalog.queries.values()):
                try:
                    states = self._servers.states({dataset.stream: dataset.partitions})
                    context.snapshots.renew(self._spark, dataset, states, own)
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def prepare_stop(self) -> None:
        """Begin no further execution."""
        self._is_stopping = True
        for runner in self.queries().values():
            runner.prepare_stop()

    def stop(self, wait_s: float) -> None:
        """Stop all queries; executions that run get ``wait_s`` to end."""
        self.prepare_stop()
        end = time.monotonic() + wait_s
        with self._looking:
            for name, runner in self._runners.items():
                try:
                    runner.stop(end - time.monotonic())
                except Exception as error:  # Java may be gone; what was not done is done by the next process
                    _log.warning("query %s did not stop as it should: %s", name, type(error).__name__)

    # Parts.

    def _check_spark(self) -> None:
        """Raise SparkFailed where Spark has ended."""
        context: Any = self._spark.sparkContext
        process = getattr(context._gateway, "proc", None)
        ended = process is not None and process.poll() is not None
        try:
            ended = ended or context._jsc is None or context._jsc.sc().isStopped()
        except Exception as error:  # py4j has several for a Java that is gone
            raise SparkFailed(f"Spark does not answer ({type(error).__name__}): {_AGAIN}") from error
        if ended:
            raise SparkFailed(f"Spark has stopped, or its Java has died: {_AGAIN}")

    def _begin(self) -> ClusterContext:
        """Take a term that is larger than those of all data clusters before this one."""
        term = max(int(self._servers.run(id_, (b"INCR", TERM_KEY))) for id_ in self._servers.ids)
        for id_ in self._servers.ids:
            self._servers.run(id_, raise_term_command(term))
        options = {"logs": self._logs, "archive": str(self._folder / "archive")}
        options["durable"] = str(self._servers.durable).lower()
        snapshots = KeyedSnapshots(self._folder / "snapshots", options)
        _log.info("the data cluster begins, with term %d", term)
        return ClusterContext(
            self._spark, self._servers, self._logs, self._cluster_url, self._folder, term, self._ttl_s, snapshots,
            SmallWindows(self._servers, self._folder, snapshots),
        )  # fmt: skip

    def _check_term(self, context: ClusterContext) -> None:
        """Raise TakenOver where a server knows a larger term; one that has lost it gets it again."""
        terms = [int(self._servers.run(id_, raise_term_command(context.term))) for id_ in self._servers.ids]
        if max(terms) > context.term or context.fenced.is_set():
            raise TakenOver(
                f"another data cluster works with these log servers, with term {max(terms)} where this one has"
                f" {context.term}: one is enough"
            )

    def _stop_others(self, catalog: Catalog) -> None:
        """Stop queries whose definitions have changed, or are gone."""
        for name, runner in [*self._runners.items()]:
            query = catalog.queries.get(name)
            if query is None or (query, _comparable(_datasets(catalog, query))) != (
                runner.query, _comparable(runner.datasets),
            ):  # fmt: skip
                runner.stop()
                del self._runners[name]
        self.refused = {name: reason for name, reason in self.refused.items() if name in catalog.queries}

    def _start_missing(self, context: ClusterContext, catalog: Catalog) -> None:
        """Make runners of queries that have none. One that cannot be executed harms no other."""
        spread = phases({name: query.period_s for name, query in catalog.queries.items()})
        for name, query in catalog.queries.items():
            self._ended.discard(name)
            datasets = _datasets(catalog, query)
            definitions = (query, _comparable(datasets))
            if name in self._runners or self._refused_definitions.get(name) == definitions:
                continue
            try:
                self._runners[name] = QueryRunner(context, query, datasets, spread[name])
                self.refused.pop(name, None)
                self._refused_definitions.pop(name, None)
            except ConfigError as error:
                self._refuse(context, name, query.version, str(error))
                self._refused_definitions[name] = definitions
        for name, fault in catalog.faults.items():
            if name not in catalog.datasets and name not in catalog.queries:
                self._refuse(context, name, 0, fault)

    def _refuse(self, context: ClusterContext, name: str, version: int, reason: str) -> None:
        if self.refused.get(name) == reason:
            return
        self.refused[name] = reason
        _log.error("query %s cannot be executed: %s", name, reason)
        status = context.status(name) or QueryStatus()
        status.state, status.reason, status.version = "refused", reason, version
        status.since_ms = int(time.time() * 1000)
        context.store_status(name, status)

    def _orders(self) -> set[str]:
        """Return the queries that operators have ordered to begin again."""
        found: set[str] = set()
        for id_ in self._servers.ids:
            names = [name for name in self._runners if executions_server(name, self._servers.ids) == id_]
            if names:
                replies = self._servers.run(id_, (b"MGET", *map(restart_key, names)))
                found |= {name for name, reply in zip(names, replies, strict=True) if reply is not None}
        return found


_Definitions = tuple[StandingQuery, dict[str, Dataset]]

_AGAIN = "this process ends, and is to be started again; queries go on where they were"


def _datasets(catalog: Catalog, query: StandingQuery) -> dict[str, Dataset]:
    """Return the datasets of a query that are registered."""
    found = {name: catalog.dataset(name) for name in query.datasets}
    return {name: each for name, each in found.items() if each is not None}


def _comparable(datasets: dict[str, Dataset]) -> dict[str, Dataset]:
    """Return definitions without what changes when a dataset is only loaded again."""
    return {
        name: replace(each, loaded=0, version=0) if each.kind == "static" else each for name, each in datasets.items()
    }
