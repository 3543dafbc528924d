from __future__ import annotations

from pathlib import Path

from prometheus_client import generate_latest

from dynamoth.plan.plan import Server
from dynamoth_recorder.events import Rows, ServersChanged
from dynamoth_recorder.machine import RecorderMachine
from dynamoth_recorder.process.backlog import BATCH_BYTES, Backlog
from dynamoth_recorder.process.metrics import make_registry
from dynamoth_recorder.process.state import RecorderState
from dynamoth_recorder.process.store import Store
from dynamoth_recorder.process.tables import to_batch


def test_what_was_written_and_lost_is_counted_by_table(tmp_path: Path) -> None:
    store, machine = Store(tmp_path, "a" * 16), RecorderMachine(1)
    batch = to_batch(Rows("latency", 2, {"server": "s1"}), 0, store.recorder)
    kept = 2
    backlog = Backlog(bytes_max=kept * (BATCH_BYTES + batch.nbytes))
    for _ in range(3):
        backlog.add("latency", 0, batch)
    for portion in backlog.take():
        store.write(portion)
    machine.handle(ServersChanged((Server("s1", "redis://a"),)), 0.0)
    text = generate_latest(make_registry(RecorderState(machine, backlog, store, failure="full"))).decode()
    store.close()
    for name, value in (
        ('rows_written_total{table="latency"}', 2 * kept),
        ('rows_lost_total{table="latency"}', 6 - 2 * kept),
        ('rows_written_total{table="plans"}', 0),
        ("files_written_total", 1),
        ("failing", 1),
        ("servers_not_heard", 1),
        ("malformed_total", 0),
    ):
        assert f"dynamoth_recorder_{name} {float(value)}\n" in text
