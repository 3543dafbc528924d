"""A simulated edge with datasets, standing queries, and two machines of which one runs the data cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Entry, entry_of, put_command
from dynamoth.data.datasets import Dataset, Field
from dynamoth.data.progress import WindowEnd, begin_again_command, begin_progress_command, query_server
from dynamoth.data.queries import Parameter, StandingQuery
from dynamoth.data.records import (
    parse_records,
    parse_state,
    partition_keys,
    partition_names,
    partition_server,
    state_command,
)
from dynamoth.edge.interests import Interest, query_interest
from dynamoth_sim.audit import Violation
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.data.audit import AuditedQuery, DataAudit
from dynamoth_sim.data.cluster import BROKERS_KNOW_S, DataClusterApp
from dynamoth_sim.data.users import QueryUser, Reporter
from dynamoth_sim.edge.world import SHORT_BROKER_OPTIONS, EdgeOptions, EdgeWorld
from dynamoth_sim.world.redis import RedisServer

User = TypeVar("User", bound=QueryUser)

KEEP_S = 3.0
"""An interest without users is kept for this time. A broker renews interests about three times within it."""

TYPES = ("a", "b", "c")

FIELDS = (Field("id", "string"), Field("type", "string"))

DATASETS = (
    Dataset("reports", "append", FIELDS, id="id", duplicate_s=60.0, partitions=2),
    Dataset("alerts", "append", FIELDS, id="id", duplicate_s=60.0, partitions=1),
)

QUERIES = {
    StandingQuery(
        "reports_of", "SELECT id, type FROM reports WHERE type = :type", "reports", 1,
        (Parameter("type", "string"),), keep_s=KEEP_S,
    ): 0.2,
    StandingQuery(
        "alerts_of", "SELECT id, type FROM alerts WHERE type = :type", "alerts", 1,
        (Parameter("type", "string"),), delivery="pull", keep_s=KEEP_S,
    ): 0.3,
}  # fmt: skip
"""Each query, and the seconds between its ticks."""

QUICK_TO_LEARN = replace(SHORT_BROKER_OPTIONS, believed_s=BROKERS_KNOW_S / 2)
"""Options of brokers where queries are dropped: they believe a definition for a shorter time than in production."""

RESTART_S = 0.1
"""A data cluster that has ended is started again after this time."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What a world with standing queries is like besides its edge."""

    #: Whether log servers may lose what they have acknowledged.
    records_may_be_lost: bool = False
    #: How far the clock of a log server is ahead, at most.
    skew_s: float = 0.1


def data_edge(**changes: Any) -> EdgeOptions:
    """Return options of an edge with a data cluster, and without channels of its own."""
    broker = replace(changes.pop("broker", SHORT_BROKER_OPTIONS), has_data_cluster=True)
    return EdgeOptions(logged=(), live=(), broker=broker, **changes)


class DataWorld(EdgeWorld):
    """Builds everything; the caller starts it."""

    def __init__(self, cluster: Cluster, edge: EdgeOptions, options: DataOptions) -> None:
        super().__init__(cluster, edge)
        self.data_options = options
        self.logged: list[Interest] = [
            query_interest(query.name, {"type": type_}) for query in QUERIES for type_ in TYPES
        ]
        for server in self.logs.values():
            server.clock_ahead_s = options.skew_s * self.world.random.random()
        self.data_audit = DataAudit(
            lambda: self.world.now,
            {query.name: AuditedQuery(query.on, query.keep_s) for query in QUERIES},
            gaps_allowed=edge.logs_may_fail,
            records_may_be_lost=options.records_may_be_lost,
            skew_s=options.skew_s,
        )
        self.data_clusters = [self._data_cluster(f"dc{number}") for number in (1, 2)]
        #: The one that is to run.
        self.current = self.data_clusters[0]
        self.reporters: list[Reporter] = []
        #: The definitions that are registered, and what an operator registers next in place of those that were dropped.
        self.queries = {query.name: query for query in QUERIES}
        self.dropped: dict[str, StandingQuery] = {}

    def _data_cluster(self, name: str) -> DataClusterApp:
        urls = {id_: server.url for id_, server in self.logs.items()}
        durable = self.options.logs_are_durable
        return DataClusterApp(self.cluster, name, urls, durable, DATASETS, QUERIES, self.data_audit)

    # Actors.

    def register(self) -> None:
        """Register datasets and queries, as an operator does: a query begins behind the records that there are."""
        for server in self.logs.values():
            for dataset in DATASETS:
                self.execute(server, put_command(DATASETS_KEY, dataset.name, entry_of(dataset)))
            for query in QUERIES:
                self.execute(server, put_command(QUERIES_KEY, query.name, entry_of(query)))
        datasets = {each.name: each for each in DATASETS}
        for query in QUERIES:
            offsets = dict.fromkeys(partition_names(datasets[query.on]), 0)
            for server in self.logs.values():
                self.execute(server, begin_progress_command(query.name, {"tick_ms": 0, "offsets": offsets}))

    def drop(self, name: str) -> None:
        """Drop a query, as an operator does."""
        query = self.queries.pop(name)
        self.dropped[name] = replace(query, version=query.version + 2)
        for server in self.logs.values():
            entry = Entry(query.version + 1, None, entry_of(query).definition)
            self.execute(server, put_command(QUERIES_KEY, name, entry))
        self.data_audit.query_dropped(name)

    def register_again(self, name: str) -> None:
        """Register a dropped query, as an operator does: it begins behind the records that there are."""
        query = self.queries[name] = self.dropped.pop(name)
        offsets = {each: self._tip(each) for each in partition_names(next(d for d in DATASETS if d.name == query.on))}
        end: WindowEnd = {"tick_ms": 0, "offsets": offsets}
        for server in self.logs.values():
            self.execute(server, begin_progress_command(name, end, round(self.world.now * 1000)))
        self.execute(self.logs[query_server(name, tuple(self.logs))], begin_again_command(name, end))
        for server in self.logs.values():
            self.execute(server, put_command(QUERIES_KEY, name, entry_of(query)))
        self.data_audit.query_registered(name, offsets)

    def _tip(self, partition: str) -> int:
        server = self.logs[partition_server(partition, tuple(self.logs))]
        return parse_state(self.execute(server, state_command(partition))).offset

    @staticmethod
    def execute(server: RedisServer, command: Sequence[Any]) -> Any:
        """Execute a command at a log server, as somebody with redis-cli."""
        words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
        return server.execute("operator", *words)

    def supervise(self) -> None:
        """Start the data cluster again whenever it does not run."""
        if not self.current.is_running:
            self.current.start()
        self.world.after(RESTART_S * (0.5 + self.world.random.random()), self.supervise)

    def add_query_user(self, name: str, interests: list[Interest], first: str | None = None) -> QueryUser:
        """Add a user of queries; the caller starts it. ``first`` is the broker that it tries first."""
        return self._add(QueryUser(self, name, self.user_options(first), interests))

    def add_reporter(self, name: str, first: str | None = None) -> Reporter:
        """Add a user who reports; the caller starts it."""
        reporter = self._add(Reporter(self, name, self.user_options(first), []))
        random = self.world.random
        reporter.choose = lambda: (random.choice(DATASETS).name, random.choice(TYPES))
        self.reporters.append(reporter)
        return reporter

    def _add(self, user: User) -> User:
        user.data_audit, user.keep_s = self.data_audit, KEEP_S
        self.users.append(user)
        return user

    # The end.

    def streams(self) -> dict[str, dict[str, dict[int, str]]]:
        """Return the ids of all records that log servers have, by dataset, partition and offset."""
        return {dataset.name: {name: self._records(name) for name in partition_names(dataset)} for dataset in DATASETS}

    def _records(self, partition: str) -> dict[int, str]:
        server = self.logs[partition_server(partition, tuple(self.logs))]
        key = partition_keys(partition)[1]
        found = parse_records(server.execute("audit", b"XRANGE", key, b"-", b"+", b"COUNT", b"1000000"))
        return {each.offset: each.value.partition(b'"id":"')[2].partition(b'"')[0].decode() for each in found}

    def problems_of_reporters(self) -> list[Violation]:
        """Return whose records are not acknowledged."""
        late = [each.name for each in self.reporters if each.is_reporting]
        return [Violation("B5", f"these still report: {', '.join(late)}", self.world.now)] if late else []
