"""What all queries of a data cluster share, and what the log servers store about each of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from dynamoth.data.datasets import Dataset
from dynamoth.data.progress import (
    Progress,
    QueryStatus,
    WindowEnd,
    begin_key,
    is_behind,
    latest_progress,
    parse_begin,
    parse_progress,
    parse_status,
    progress_key,
    query_server,
    restart_key,
    status_key,
    store_progress_command,
    store_status_command,
)
from dynamoth.data.queries import StandingQuery
from dynamoth.data.records import partition_names
from dynamoth.data.terms import TERM_KEY
from dynamoth_analytics.cluster import publishing
from dynamoth_analytics.cluster.publishing import ResultPublisher
from dynamoth_analytics.cluster.servers import LogServerFailed, LogServers
from dynamoth_analytics.cluster.small_windows import SmallWindows
from dynamoth_analytics.cluster.storage.checkpoints import CheckpointFolder
from dynamoth_analytics.cluster.storage.reading import RecordsLost
from dynamoth_analytics.cluster.storage.snapshots import KeyedSnapshots

_log = logging.getLogger("dynamoth.data-cluster")


@dataclass(frozen=True)
class ClusterContext:
    """What all queries of a data cluster share. Threads of all of them use it."""

    spark: SparkSession
    servers: LogServers
    cluster_url: str
    #: Of the data cluster: archive, checkpoints, copies of loads, interest tables, journal, snapshots, small windows.
    folder: Path
    term: int
    #: How long the log of an interest lives after its last reader or writer, at least.
    ttl_s: float
    snapshots: KeyedSnapshots
    small_windows: SmallWindows
    #: Appends to a log server that fails are tried again for this time.
    append_retry_s: float = publishing.RETRY_FOR_S
    #: Partitions whose offsets stand for other records than before, and what to do about it.
    offsets_again: Mapping[str, str] = field(default_factory=dict[str, str])
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
        """Return the publisher of the result sets of an execution."""
        return ResultPublisher(
            self.servers, self.cluster_url, query.name, query.version, execution, tick_ms, self.term,
            query.inline_bytes_max if query.delivery == "inline" else -1, query.result_bytes_max, query.retained_min,
            max(self.ttl_s, query.keep_s), self.append_retry_s, fence=TERM_KEY,
        )  # fmt: skip

    def table_folder(self, query: str) -> Path:
        """Return where the interest table of a query is: of this data cluster alone, as one before it may go on."""
        return self.folder / "interests" / str(self.term) / query

    def checkpoint(self, query: str) -> CheckpointFolder:
        """Return the checkpoint of a query."""
        return CheckpointFolder(self.folder / "checkpoints" / query)

    @property
    def journal(self) -> Path:
        """The folder of the journal of executions."""
        return self.folder / "executions"

    def check_offsets(self, datasets: Iterable[Dataset]) -> None:
        """Raise RecordsLost where offsets of a dataset stand for other records than before: a query would miss some."""
        for name in (name for dataset in datasets for name in partition_names(dataset)):
            if reason := self.offsets_again.get(name):
                raise RecordsLost(f"{name}: {reason}, and then `dynamoth query restart` the query")

    # What is stored about a query.

    def progress(self, query: str) -> Progress | None:
        """Return the latest progress of a query that any log server has; None: there is none. Raises LogServerFailed.

        A server that was restored from an older copy, or has lost everything, does not have the latest.
        """
        command = (b"GET", progress_key(query))
        return latest_progress([parse_progress(self.servers.run(id_, command)) for id_ in self.servers.ids])

    def store_progress(self, query: str, progress: Progress, *, follows: bool = True) -> None:
        """Store the progress of a query at every log server, as an execution needs all of them anyway.

        Raises LogServerFailed, also where a newer data cluster is there. Raises RecordsLost where a server is durable,
        and has not the progress before; not if ``follows`` is false, as what came before is given up.
        """
        command = store_progress_command(query, progress, self.term, follows=follows and self.servers.durable)
        for id_ in self.servers.ids:
            try:
                self.servers.run(id_, command)
            except LogServerFailed as error:
                if not is_behind(str(error.__cause__)):
                    raise
                raise RecordsLost(
                    f"log server {id_} has lost what it had stored, though log_durable is set: was an older copy"
                    " restored? It may give offsets again: see docs/operating.md (Backup and restore), and then"
                    " `dynamoth query restart`"
                ) from error

    def begin(self, query: str) -> WindowEnd | None:
        """Return behind which offsets a query begins that was dropped; None: not known. Raises LogServerFailed."""
        return parse_begin(self._get(query, begin_key(query)))

    def forget_restart(self, query: str) -> None:
        """Delete the order of an operator to restart a query: it was carried out. Raises LogServerFailed."""
        self._run(query, (b"DEL", restart_key(query)))

    def status(self, query: str) -> QueryStatus | None:
        """Return the stored status of a query; None: there is none. Raises LogServerFailed."""
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
        return self.servers.run(query_server(query, self.servers.ids), command)
