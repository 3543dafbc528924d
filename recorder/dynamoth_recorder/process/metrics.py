"""The metrics of a recorder for Prometheus. Labels are names of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from dynamoth.recording import TABLES
from dynamoth_daemon import metrics
from dynamoth_recorder.process.state import RecorderState

_COUNTERS = {
    "malformed": "Messages that could not be read",
    "wrong_server": "Reports about another server than the one they came from",
    "repeated": "Reports that came twice",
    "unexpected": "Probes that came too late, or that somebody else published",
    "refused": "Commands that a server refused",
}

_FAMILIES = metrics.Families("dynamoth_recorder_")


def make_registry(state: RecorderState) -> CollectorRegistry:
    """Return a registry with the metrics of a recorder and of its process."""
    return metrics.make_registry("recorder", lambda: _collect(state))


def _collect(state: RecorderState) -> Iterator[Metric]:
    store, backlog, machine = state.store, state.backlog, state.machine
    gauge, counter = _FAMILIES.gauge, _FAMILIES.counter
    yield gauge("failing", "1 while the recording cannot be written", bool(state.failure))
    yield gauge("last_write_timestamp_seconds", "When rows were last written; 0 for never", state.last_write)
    yield gauge("backlog_bytes", "Memory of rows that are not on disk yet", backlog.size_bytes)
    yield gauge("servers", "Servers of the cluster", machine.servers_known)
    yield gauge("servers_not_heard", "Servers where something is not recorded", len(machine.not_heard))
    yield counter("written_bytes", "Bytes of the files written, except by merges", store.bytes_written)
    yield counter("files_written", "Files written, except by merges", store.files_written)
    yield _by_table("rows_written", "Rows written", store.rows_written)
    yield _by_table("rows_lost", "Rows lost, as they could not be written", backlog.lost)
    yield from _FAMILIES.counters(_COUNTERS, machine.counters)


def _by_table(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"dynamoth_recorder_{name}", text, labels=["table"])
    for table in TABLES:
        family.add_metric([table], values.get(table, 0))
    return family
