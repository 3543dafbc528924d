"""Executes the queries of the catalog: the work of a data cluster, which its process calls in threads."""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Catalog, entry_of, put_command
from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import QueryStatus, query_server, restart_key
from dynamoth.data.queries import StandingQuery
from dynamoth.errors import ConfigError
from dynamoth_analytics.cluster import outdated
from dynamoth_analytics.cluster.context import ClusterContext
from dynamoth_analytics.cluster.dropping import end_dropped
from dynamoth_analytics.cluster.failures import Failures, check_spark, reason_of
from dynamoth_analytics.cluster.identity import check_identity, check_ids
from dynamoth_analytics.cluster.interest_table import expire_interests
from dynamoth_analytics.cluster.known import KnownQueries
from dynamoth_analytics.cluster.phases import phases
from dynamoth_analytics.cluster.query_runner import QueryRunner
from dynamoth_analytics.cluster.servers import LogServerFailed, LogServers, TakenOver
from dynamoth_analytics.cluster.small_windows import SmallWindows
from dynamoth_analytics.cluster.storage.archive import Archiver
from dynamoth_analytics.cluster.storage.durable_files import make_folder
from dynamoth_analytics.cluster.storage.retention import Needs, needs_of, unneeded
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots
from dynamoth_analytics.errors import SparkFailed

_log = logging.getLogger("dynamoth.data-cluster")


class ClusterRunner:
    """The queries of one data cluster. A query that fails does not hold up the others.

    Its methods are called in threads, each by one thread at a time. After an error they can be called again:
    LogServerFailed, OSError, other errors of ours, and those of Spark. After SparkFailed, TakenOver and WrongFolder the
    process has to end.

    Args:
        spark: the session.
        servers: the log servers.
        cluster_url: of the cluster through which brokers are notified.
        folder: of the data cluster; no other process may use it.
        ttl_s: how long the log of an interest lives after its last reader or writer, at least.

    """

    def __init__(self, spark: SparkSession, servers: LogServers, cluster_url: str, folder: Path, ttl_s: float) -> None:
        self.archiver = Archiver(servers, folder / "archive", journal=folder / "executions")
        #: Called, in a thread, when it has a term.
        self.on_begun: Callable[[], Any] = lambda: None
        #: Why queries cannot be executed, by name.
        self.refused: dict[str, str] = {}
        #: Their definitions: they are not tried again before these change.
        self._refused_definitions: dict[str, _Definitions] = {}
        self._dataset_faults: Mapping[str, str] = {}
        self._spark = spark
        self._servers = servers
        self._cluster_url = cluster_url
        self._folder = folder
        self._ttl_s = ttl_s
        #: Its id among those that take terms.
        self._owner = secrets.token_hex(8)
        self._context: ClusterContext | None = None
        self._runners: dict[str, QueryRunner] = {}
        #: The highest counts of queries, by name, also of those that do not run any more.
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._known = KnownQueries()
        #: The versions of dropped queries whose users got their last publication, by name.
        self._ended: dict[str, int] = {}
        #: When this process has found that a query was dropped, by its name and that version.
        self._dropped_at: dict[tuple[str, int], float] = {}
        #: Locked while queries are started and stopped.
        self._changing = threading.Lock()
        self._is_stopping = False

    @property
    def has_begun(self) -> bool:
        """Whether it has a term."""
        return self._context is not None

    @property
    def is_in_charge(self) -> bool:
        """Whether it has begun, is not stopping, and has met no newer data cluster."""
        return self._context is not None and not self._is_stopping and not self._context.fenced.is_set()

    @property
    def term(self) -> int:
        """Its term; 0: it has not begun."""
        return 0 if self._context is None else self._context.term

    def queries(self) -> dict[str, QueryRunner]:
        """Return the queries that are executed, by name."""
        return dict(self._runners)

    def counts(self) -> Counter[str]:
        """Return the counts of all queries that were executed since this process began: they never fall."""
        counts: Counter[str] = Counter()
        for name in {*self._counts, *(runners := self.queries())}:
            self._counts[name] = self._counts[name] | Counter(runners[name].status.counts if name in runners else {})
            counts.update(self._counts[name])
        return counts

    def follow_catalog(self) -> None:
        """Start, stop and restart queries, as the catalog and operators say."""
        with self._changing:
            if self._is_stopping:
                return
            check_spark(self._spark)
            if self._context is None:
                self._context = self._begin()
                self.on_begun()
            self._check_term(self._context)
            catalog = self._servers.catalog()
            self._note_faults(catalog)
            failures = Failures()
            with failures.kept():
                self._known.check(catalog)
            self._stop_others(catalog, failures)
            self._end_dropped(self._context, catalog, failures)
            self._start_missing(self._context, catalog, failures)
            self._keep_running(failures)
            failures.raise_first()

    def archive(self) -> None:
        """Copy new records to the archive, if this is the newest data cluster."""
        if self._context is not None and self.is_in_charge:
            self.archiver.check_term = partial(self._check_term, self._context)
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
        context = self._context
        if context is None or not self.is_in_charge:
            return
        needs = needs_of(catalog, context.progress, lambda name: context.checkpoint(name).read())
        try:
            self._renew_snapshots(context, catalog, needs)
        finally:
            self.archiver.unneeded = unneeded(catalog, needs, context.snapshots)

    def _renew_snapshots(self, context: ClusterContext, catalog: Catalog, needs: Sequence[Needs]) -> None:
        """Renew the snapshots of the keyed datasets that queries read. One that fails does not hold up the others."""
        failures = Failures()
        for dataset in catalog.datasets.values():
            own = [each.offsets for each in needs if dataset.name in each.datasets]
            if dataset.kind == "keyed" and any(dataset.name in query.reads for query in catalog.queries.values()):
                with failures.kept():
                    states = self._servers.states({dataset.stream: dataset.partitions})
                    context.snapshots.renew(self._spark, dataset, states, own)
        failures.raise_first()

    def watch(self) -> None:
        """Show which queries are stalled. Spark is not asked: the other methods wait for it if it hangs."""
        for runner in self.queries().values():
            with suppress(LogServerFailed):  # ``follow_catalog`` raises it, too
                runner.watch(time.monotonic())

    def prepare_stop(self) -> None:
        """Begin no further execution."""
        self._is_stopping = True
        if self._context is not None:
            self._context.stopping.set()
        for runner in self.queries().values():
            runner.prepare_stop()

    def stop(self, wait_s: float) -> None:
        """Stop all queries; executions that run get ``wait_s`` to end."""
        self.prepare_stop()
        end = time.monotonic() + wait_s
        with self._changing:
            for name, runner in self._runners.items():
                try:
                    runner.stop(end - time.monotonic())
                except Exception as error:  # what was not done is done by the next process
                    try:
                        check_spark(self._spark)
                    except SparkFailed:
                        _log.info("Spark has ended before the queries were stopped")
                        return
                    _log.warning("query %s did not stop as it should: %s", name, type(error).__name__)

    # Parts.

    def _begin(self) -> ClusterContext:
        """Take a term that is larger than those of all data clusters before this one.

        Raises WrongFolder where the folder belongs to other log servers, and ConfigError where brokers have others.
        """
        check_ids(self._servers, "data_cluster.logs")
        check_identity(self._servers, self._folder)
        term = self.archiver.term = self._servers.take_term(self._owner)
        make_folder(self._folder / "archive")  # the source refuses one that does not exist
        options = {**self._servers.options(), "archive": str(self._folder / "archive")}
        snapshots = KeyedSnapshots(self._folder / "snapshots", options)
        for kind in ("interests", "windows"):
            for former in self._folder.glob(f"{kind}/*"):
                shutil.rmtree(former, ignore_errors=True)
        _log.info("the data cluster begins, with term %d", term)
        for doubt in (doubt for id_ in self._servers.ids for doubt in self._servers.doubts(id_)):
            _log.warning("%s", doubt)
        return ClusterContext(
            self._spark, self._servers, self._cluster_url, self._folder, term, self._ttl_s, snapshots,
            SmallWindows(self._servers, self._folder, snapshots, term), offsets_again=self.archiver.offsets_again,
        )  # fmt: skip

    def _check_term(self, context: ClusterContext, server: str | None = None) -> None:
        """Raise TakenOver where another data cluster is newer; a server that has lost the term gets it again.

        It is newer at all servers once it has begun: so one server can be asked alone.
        """
        taken = self._servers.claim_term(context.term, self._owner, server)
        if taken is not None or context.fenced.is_set():
            context.fenced.set()
            number = "" if taken is None else f" (term {taken})"
            raise TakenOver(f"another data cluster has taken over{number}: this one ends. Run one of them only")

    def _note_faults(self, catalog: Catalog) -> None:
        """Log, once, which definitions of datasets cannot be read. Their queries are refused."""
        for name, fault in catalog.dataset_faults.items():
            if self._dataset_faults.get(name) != fault:
                _log.error("the definition of dataset %s cannot be read: %s", name, fault)
        self._dataset_faults = catalog.dataset_faults

    def _stop_others(self, catalog: Catalog, failures: Failures) -> None:
        """Stop queries whose definitions have changed, or are gone."""
        for name, runner in [*self._runners.items()]:
            query = catalog.queries.get(name)
            if query is None or (query, _comparable(_datasets(catalog, query))) != (
                runner.query, _comparable(runner.datasets),
            ):  # fmt: skip
                with failures.kept():
                    runner.stop()
                    self.counts()
                    del self._runners[name]
        known = {*catalog.queries, *catalog.query_faults}
        self.refused = {name: reason for name, reason in self.refused.items() if name in known}

    def _end_dropped(self, context: ClusterContext, catalog: Catalog, failures: Failures) -> None:
        """Publish to the users of dropped queries that they were dropped, when brokers know that, too."""
        now = time.monotonic()
        self._dropped_at = {each: self._dropped_at.get(each, now) for each in catalog.dropped_queries.items()}
        for name, version in catalog.dropped_queries.items():
            if self._ended.get(name) == version or now < self._dropped_at[name, version] + outdated.BROKERS_KNOW_S:
                continue
            with failures.kept():
                end_dropped(context, name, version)
                self._ended[name] = version

    def _start_missing(self, context: ClusterContext, catalog: Catalog, failures: Failures) -> None:
        """Make runners for queries that have none. One that cannot be executed harms no other."""
        spread = phases({name: query.period_s for name, query in catalog.queries.items()})
        for name, query in catalog.queries.items():
            unreadable = {each: catalog.dataset_faults.get(each, "") for each in query.datasets}
            definitions = (query, _datasets(catalog, query), unreadable)
            if name in self._runners or _is_same(self._refused_definitions.get(name), definitions):
                continue
            with failures.kept():
                self._check_term(context)  # to start many takes time
                self._start(context, definitions, spread[name])
        for name, fault in catalog.query_faults.items():
            with failures.kept():
                self._refuse(context, name, 0, fault)

    def _start(self, context: ClusterContext, definitions: _Definitions, phase_s: float) -> None:
        """Make a runner. One whose definitions cannot be executed is refused; other errors are shown, and raised."""
        query, datasets, unreadable = definitions
        name = query.name
        try:
            _check_readable(unreadable)
            self._runners[name] = QueryRunner(context, query, datasets, phase_s)
            self.refused.pop(name, None)
            self._refused_definitions.pop(name, None)
        except ConfigError as error:
            self._refuse(context, name, query.version, str(error))
            self._refused_definitions[name] = definitions
        except Exception as error:
            self._show(context, name, "failing", reason_of(error), query.version)
            raise

    def _keep_running(self, failures: Failures) -> None:
        """Start streams that have ended, and restart queries as operators have ordered."""
        orders = self._orders()
        for name, runner in self._runners.items():
            with failures.kept():
                try:
                    if name in orders:
                        runner.restart()
                    runner.keep_running()
                except SparkFailed:
                    raise
                except Exception as error:
                    runner.show_failure(error)
                    raise

    def _refuse(self, context: ClusterContext, name: str, version: int, reason: str) -> None:
        if self.refused.get(name) != reason:
            self.refused[name] = reason
            _log.error("query %s cannot be executed: %s", name, reason)
        self._show(context, name, "refused", reason, version)

    def _show(self, context: ClusterContext, name: str, state: str, reason: str, version: int) -> None:
        """Store the state of a query that does not run, unless it is stored already."""
        status = context.status(name) or QueryStatus()
        if (status.state, status.reason, status.version) != (state, reason, version):
            status.state, status.reason, status.version = state, reason, version
            status.since_ms = int(time.time() * 1000)
            context.store_status(name, status)

    def _orders(self) -> set[str]:
        """Return the queries that operators have ordered to begin again."""
        found: set[str] = set()
        for id_ in self._servers.ids:
            names = [name for name in self._runners if query_server(name, self._servers.ids) == id_]
            if names:
                replies = self._servers.run(id_, (b"MGET", *map(restart_key, names)))
                found |= {name for name, reply in zip(names, replies, strict=True) if reply is not None}
        return found


_Definitions = tuple[StandingQuery, dict[str, Dataset], dict[str, str]]
"""A query, its datasets, and why the definitions of some of these cannot be read."""


def _datasets(catalog: Catalog, query: StandingQuery) -> dict[str, Dataset]:
    """Return the datasets of a query that are registered."""
    found = {name: catalog.dataset(name) for name in query.datasets}
    return {name: each for name, each in found.items() if each is not None}


def _check_readable(faults: Mapping[str, str]) -> None:
    """Raise ConfigError where the definition of a dataset cannot be read."""
    for name, fault in faults.items():
        if fault:
            raise ConfigError(f"the definition of dataset {name!r} cannot be read: {fault}")


def _is_same(one: _Definitions | None, other: _Definitions) -> bool:
    """Return whether definitions differ in nothing but the loads of static datasets."""
    return one is not None and (one[0], _comparable(one[1]), one[2]) == (other[0], _comparable(other[1]), other[2])


def _comparable(datasets: dict[str, Dataset]) -> dict[str, Dataset]:
    """Return definitions without the settings that change when a static dataset is loaded again."""
    return {
        name: replace(each, loaded=0, version=0) if each.kind == "static" else each for name, each in datasets.items()
    }
