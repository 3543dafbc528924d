"""What the process of a balancer refuses, and its file of metrics."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from dynamoth.errors import ConfigError
from dynamoth.plan.plan import Server
from dynamoth_balancer.process.recorder import Recorder, report_row
from dynamoth_balancer.process.runtime import BalancerConfig, run_balancer
from tests.balancer.cluster import SimCluster


def test_what_cannot_be_configured() -> None:
    with pytest.raises(ConfigError, match="at least one server"):
        BalancerConfig(servers=())
    with pytest.raises(ConfigError, match="http"):
        BalancerConfig(servers=(Server("s1", "http://somewhere"),))
    with pytest.raises(ConfigError, match="metrics_file"):
        config = BalancerConfig(servers=(Server("s1", "redis://h"),), metrics_file="/nowhere/at/all")
        asyncio.run(run_balancer(config))


def test_rows_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    report = SimCluster(1).agents["s1"].report()
    for _ in range(2):
        recorder = Recorder(path)
        recorder.write(report_row(report, 1_700_000_000.1234, 0.5))
        recorder.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == second
    assert (first["server"], first["time_s"], first["load_ratio_averaged"]) == ("s1", 1_700_000_000.123, 0.5)


def test_a_full_disk_is_reported_once_and_costs_only_the_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Path("/dev/full"))
    for _ in range(5):
        recorder.write({"a": 1})
    recorder.close()
    assert (recorder.rows_written, recorder.rows_lost) == (0, 5)
    [record] = caplog.records
    assert "metrics cannot be recorded" in record.message and "No space left" in vars(record)["cause"]


def test_a_row_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path)
    recorder.write({"row": 1})
    write = os.write

    def write_some(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        recorder.write({"row": 2})
    recorder.write({"row": 3})
    recorder.close()
    lines = path.read_text().splitlines()
    assert [json.loads(lines[0]), json.loads(lines[2])] == [{"row": 1}, {"row": 3}]
    assert (recorder.rows_written, recorder.rows_lost) == (2, 1)
