"""The metrics of a recorder, as Prometheus reads them. Labels are the names of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from dynamoth.recording import TABLES
from dynamoth_daemon import metrics
from dynamoth_recorder.machine import RecorderMachine
from dynamoth_recorder.process.backlog import Backlog
from dynamoth_recorder.process.store import Store


@dataclass(slots=True)
class Recording:
    """The parts of a recorder process, and the state of its writing."""

    store: Store
    backlog: Backlog
    machine: RecorderMachine
    #: Why the recording cannot be written; empty while it can.
    failure: str = ""
    #: When it was written last, in seconds since 1970; 0 for never.
    last_write: float = 0.0


_COUNTERS = {
    "malformed": "Messages that could not be read",
    "wrong_server": "Reports about another server than the one they came from",
    "repeated": "Reports that came twice",
    "unexpected": "Probes that came too late, or are another's",
    "refused": "Commands that a server refused",
}

_FAMILIES = metrics.Families("dynamoth_recorder_")


def make_registry(recording: Recording) -> CollectorRegistry:
    """Return a registry with the metrics of a recorder and of its process."""
    return metrics.make_registry("recorder", lambda: _collect(recording))


def _collect(recording: Recording) -> Iterator[Metric]:
    store, backlog, machine = recording.store, recording.backlog, recording.machine
    gauge, counter = _FAMILIES.gauge, _FAMILIES.counter
    yield gauge("failing", "1 while the recording cannot be written", bool(recording.failure))
    yield gauge("last_write_timestamp_seconds", "When rows were written last; 0 for never", recording.last_write)
    yield gauge("backlog_bytes", "Memory of rows that are not on disk yet", backlog.size_bytes)
    yield gauge("servers", "Servers of the cluster", machine.servers_known)
    yield gauge("servers_not_heard", "Servers at which the recorder does not listen", len(machine.not_heard))
    yield counter("written_bytes", "Bytes of all files written", store.bytes_written)
    yield counter("files_written", "Files written, without those that merge others", store.files_written)
    yield _by_table("rows_written", "Rows written", store.rows_written)
    yield _by_table("rows_lost", "Rows lost, as they could not be written", backlog.lost)
    yield from _FAMILIES.counters(_COUNTERS, machine.counters)


def _by_table(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"dynamoth_recorder_{name}", text, labels=["table"])
    for table in TABLES:
        family.add_metric([table], values.get(table, 0))
    return family
