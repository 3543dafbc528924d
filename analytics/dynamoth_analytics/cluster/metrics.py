"""The metrics of a data cluster. Labels name queries: operators register those, and they are few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from dynamoth_analytics.cluster.runner import ClusterRunner
from dynamoth_daemon import metrics

_FAMILIES = metrics.Families("dynamoth_data_cluster_")

_COUNTERS = {
    "executions": "Executions of queries",
    "failures": "Executions that failed and were, or will be, repeated",
    "overruns": "Executions that took longer than their period",
    "ticks_missed": "Ticks that were covered by a later execution",
    "result_sets": "Result sets",
    "rows": "Rows of result sets",
    "bytes": "Bytes of result sets",
    "repeated": "Result sets that were stored before: an execution was repeated",
    "overtaken": "Result sets that were not stored: their logs have later executions",
    "too_large": "Result sets that were replaced by an error, as they were too large",
    "unpublished": "Result sets that brokers were not notified of",
}

_INGESTED = {
    "stored": "Records that applications have published and that were stored",
    "duplicate": "Records that were published again, and not stored again",
    "refused": "Records that were published and refused: they are among the dead letters",
    "unknown": "Records that were published, and are stored or not: a log server's answer was lost",
    "gaps": "Gaps: messages for datasets were lost, or may have been",
    "missing": "Messages for datasets that were lost, or may have been: gaps, and what a reader had when it ended",
}


def collect_ingest(counts: Counter[str], waiting: int) -> Iterator[Metric]:
    """Yield the families of what applications publish for datasets; ``waiting`` datasets cannot be stored now."""
    yield _FAMILIES.gauge("ingest_waiting", "Datasets for which published records wait to be stored", waiting)
    yield from _FAMILIES.counters(
        {f"ingest_{name}": text for name, text in _INGESTED.items()},
        Counter({f"ingest_{name}": counts[name] for name in _INGESTED}),
    )


def collect(runner: ClusterRunner) -> Iterator[Metric]:
    """Yield all families. Counts are those since the queries were registered, also of those that were dropped since."""
    queries = runner.queries()
    yield _FAMILIES.gauge("term", "Term: the newest data cluster has the largest", runner.term)
    yield _FAMILIES.gauge("queries", "Queries that are executed", len(queries))
    yield _FAMILIES.gauge("queries_refused", "Queries whose definition cannot be executed", len(runner.refused))
    failing = sum(each.is_failing for each in queries.values())
    yield _FAMILIES.gauge("queries_failing", "Queries that fail now", failing)
    stalled = sum(each.is_stalled for each in queries.values())
    yield _FAMILIES.gauge("queries_stalled", "Queries of which no execution ends though records wait", stalled)
    interests = sum(len(each.executions.interests) for each in queries.values())
    yield _FAMILIES.gauge("interests", "Interests of all queries", interests)
    yield _FAMILIES.counter("archived", "Records that were archived", runner.archiver.records)
    is_full = int(runner.archiver.is_full)
    yield _FAMILIES.gauge("archive_full", "1: the disk of the archive is full, so records stay at Redis", is_full)
    yield from _FAMILIES.counters(_COUNTERS, runner.counts())
    seconds = {name: each.status.seconds for name, each in queries.items()}
    yield _FAMILIES.gauge_by("query", "execution_seconds", "How long the last execution took", seconds)
    ended = {name: each.status.ended_ms / 1000 for name, each in queries.items()}
    yield _FAMILIES.gauge_by("query", "last_execution_seconds", "Unix time when the last execution ended", ended)
