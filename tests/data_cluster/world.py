"""Log servers with datasets, queries, records and interests, as brokers and applications would have left them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pyspark.sql import SparkSession

from dynamoth.data.catalog import DATASETS_KEY, QUERIES_KEY, Entry, entry_of, put_command
from dynamoth.data.datasets import Dataset, read_dataset
from dynamoth.data.progress import (
    Progress,
    QueryStatus,
    begin_progress_command,
    parse_progress,
    parse_status,
    progress_key,
    query_server,
    status_key,
)
from dynamoth.data.queries import StandingQuery, read_query
from dynamoth.data.records import append_records_command, finish_load_command, partition_keys, partition_name
from dynamoth.data.registrations import register_command
from dynamoth.edge.interests import query_interest
from dynamoth.edge.log import LOG_PREFIX, log_keys, log_server
from dynamoth_analytics.cluster.context import ClusterContext
from dynamoth_analytics.cluster.publishing import close_publishers
from dynamoth_analytics.cluster.query_runner import QueryRunner
from dynamoth_analytics.cluster.servers import LogServers, read_servers
from dynamoth_analytics.cluster.small_windows import SmallWindows
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_link.urls import ClusterAddress, parse_server_url

POLL_S = 0.02
TIMEOUT_S = 120.0

REPORTS: dict[str, Any] = {
    "kind": "append",
    "id": "id",
    "partitions": 2,
    "fields": {"id": "string", "type": "string", "size": "int"},
}

STATIC: dict[str, Any] = {"kind": "static", "id": "", "fields": {"id": "string", "type": "string"}}

OF_TYPE: dict[str, Any] = {
    "on": "reports",
    "period_s": 1,
    "parameters": {"type": "string"},
    "sql": "SELECT r.id, r.size FROM reports r WHERE r.type = :type",
}


class World:
    """Two log servers and one server of a cluster without agents.

    Args:
        folder: of the data cluster.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data-cluster"
        self._stack = ExitStack()
        self._turn = 0

    def __enter__(self) -> Self:
        (self.folder / "archive").mkdir(parents=True, exist_ok=True)  # as the process does
        redis = self.redis = [self._stack.enter_context(EmbeddedRedis()) for _ in range(3)]
        self.logs = " ".join(f"l{number}=redis://127.0.0.1:{each.port}" for number, each in enumerate(redis[:2], 1))
        self.servers: LogServers = read_servers(self.logs)
        self.server_url = f"redis://127.0.0.1:{redis[2].port}"
        self.cluster_url = ClusterAddress((parse_server_url(self.server_url),)).url()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_publishers()
        self._stack.close()

    # What operators, brokers and applications do.

    def set_dataset(self, name: str = "reports", **settings: Any) -> Dataset:
        dataset = read_dataset(name, {**REPORTS, **settings})
        self.put(DATASETS_KEY, name, entry_of(dataset))
        return dataset

    def set_query(self, name: str = "of_type", **settings: Any) -> StandingQuery:
        query = read_query(name, {**OF_TYPE, **settings})
        begin = begin_progress_command(name, {"tick_ms": 0, "offsets": {}})
        self.servers.run(query_server(name, self.servers.ids), begin)
        self.put(QUERIES_KEY, name, entry_of(query))
        return query

    def drop_query(self, name: str, version: int) -> None:
        self.put(QUERIES_KEY, name, Entry(version, None))

    def put(self, key: bytes, name: str, entry: Entry) -> None:
        for id_ in self.servers.ids:
            self.servers.run(id_, put_command(key, name, entry))

    def append(self, dataset: Dataset, *records: Mapping[str, Any], partition: int | None = None) -> None:
        """Store records in the partitions in turn, or in one."""
        for record in records:
            value, _, id_ = dataset.normalize(json.dumps(record).encode(), time.time())
            number, self._turn = self._turn % dataset.partitions, self._turn + 1
            number = number if partition is None else partition
            server = self.servers.server_of(partition_name(dataset.stream, number))
            run_id = self.servers.run_id(server)
            self.servers.run(server, append_records_command(dataset, number, [(value, id_)], run_id))

    def load(self, dataset: Dataset, *records: Mapping[str, Any]) -> None:
        """Store the records of a load of a static dataset."""
        self.append(dataset, *records)
        for number in range(dataset.partitions):
            name = partition_name(dataset.stream, number)
            server = self.servers.server_of(name)
            size = self.servers.run(server, (b"XLEN", partition_keys(name)[1]))
            self.servers.run(server, finish_load_command(name, size))

    def register(self, query: str, params: Mapping[str, Any], keep_s: float = 3600.0) -> str:
        """Register an interest as a broker does; return its id."""
        interest = query_interest(query, params)
        self.servers.run(self.server_of(interest.id), register_command(query, [(interest.id, interest.params, keep_s)]))
        return interest.id

    # What there is to see.

    def server_of(self, interest: str) -> str:
        return log_server(interest, self.servers.ids)

    def log(self, interest: str) -> list[dict[str, Any]]:
        """Return the payloads of a log, in order."""
        entries = self.servers.run(self.server_of(interest), (b"XRANGE", log_keys(interest)[1], b"-", b"+"))
        return [json.loads(fields[1]) for _, fields in entries]

    def log_keys(self) -> set[bytes]:
        """Return the keys of all logs."""
        return {key for id_ in self.servers.ids for key in self.servers.run(id_, (b"KEYS", LOG_PREFIX + b"*"))}

    def rows(self, interest: str) -> list[Any]:
        """Return the rows of the result sets of a log, in order."""
        return [payload["rows"] for payload in self.log(interest) if "rows" in payload]

    def ids(self, interest: str) -> list[str]:
        """Return the ids of all rows that an interest got, in order."""
        return [row["id"] for rows in self.rows(interest) for row in rows]

    def progress(self, query: str) -> Progress | None:
        server = query_server(query, self.servers.ids)
        return parse_progress(self.servers.run(server, (b"GET", progress_key(query))))

    def status(self, query: str) -> QueryStatus | None:
        server = query_server(query, self.servers.ids)
        return parse_status(self.servers.run(server, (b"GET", status_key(query))))

    def executions(self, query: str) -> list[dict[str, Any]]:
        """Return what was written down about a query's executions."""
        files = sorted((self.folder / "executions").glob(f"*/{query}.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    # The data cluster, without its process.

    def context(self, driver: SparkSession, folder: Path | None = None) -> ClusterContext:
        term = self.servers.take_term(secrets.token_hex(8))
        options = {"logs": self.logs, "archive": str(self.folder / "archive")}
        folder = folder or self.folder
        snapshots = KeyedSnapshots(folder / "snapshots", options)
        small_windows = SmallWindows(self.servers, folder, snapshots, term)
        return ClusterContext(driver, self.servers, self.cluster_url, folder, term, 3600.0, snapshots, small_windows)

    def runner(self, context: ClusterContext, query: StandingQuery, *datasets: Dataset) -> QueryRunner:
        return QueryRunner(context, query, {each.name: each for each in datasets}, 0.0)


def stream_session(driver: SparkSession) -> SparkSession:
    """Return a session such as a stream has: a copy, whose settings are its own."""
    java: Any = driver._jsparkSession  # pyright: ignore[reportPrivateUsage]
    return SparkSession(driver.sparkContext, java.cloneSession())


def until(holds: Callable[[], Any], *runners: QueryRunner, timeout_s: float = TIMEOUT_S) -> None:
    """Keep these queries running until something holds."""
    end = time.monotonic() + timeout_s
    while True:
        for runner in runners:
            runner.keep_running()
        if holds():
            return
        states = [(runner.query.name, runner.status) for runner in runners]
        assert time.monotonic() < end, f"it does not hold after {timeout_s:g} s: {states}"
        time.sleep(POLL_S)


def reports(type_: str, *ids: str) -> Sequence[dict[str, Any]]:
    return [{"id": each, "type": type_, "size": len(each)} for each in ids]
