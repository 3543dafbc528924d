"""The recorder as it runs: a process beside a whole cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from dynamoth.names import BALANCER_CHANNEL, RECORD_CHANNEL
from dynamoth.protocol.records import RecordedRows, pack_rows
from dynamoth.recording import GAPS, LATENCY, TABLES
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster, environment_without_settings
from dynamoth_client import from_url
from dynamoth_recorder.process.tables import parquet
from tests.whole.harness import Traffic, channels_at, logged, move, until

SETTINGS = {"agent.report_interval_s": 0.2}


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of a recording: each file can be read."""
    return {
        table: [
            row
            for path in sorted((folder / table).rglob("*.parquet"))
            for row in parquet.ParquetFile(path).read().to_pylist()
        ]
        for table in TABLES
    }


def recorders(cluster: LocalCluster, folder: Path) -> set[str]:
    return {row["recorder"] for row in read(folder)["channels"]}


def another_recorder(cluster: LocalCluster, folder: Path) -> Child:
    command = dynamoth_command("record", "--config", str(cluster.config_file), "--out", str(folder))
    return Child("another recorder", command, environment=environment_without_settings())


def rows_of_balancer(number: int) -> list[bytes]:
    """Return what a balancer may send: a row of each of its tables."""
    rows = [
        ("plans", ("channel", "version"), ("c", 1)),
        ("decisions", ("kind", "server"), ("finding", "s1")),
        ("settings", ("name", "value"), ("wait_s", "1.0")),
    ]
    return [pack_rows(RecordedRows(9, number + i, table, names, (row,))) for i, (table, names, row) in enumerate(rows)]


def test_a_cluster_is_recorded_and_a_killed_recorder_leaves_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    [channel] = channels_at("s1", 1)
    with LocalCluster(2, settings=SETTINGS, record=folder) as cluster, Traffic(cluster, [channel]) as traffic:
        recorder = cluster.recorder
        assert recorder is not None
        for server in cluster.server_ids:
            for data in rows_of_balancer(1):
                cluster.ask(server, (b"PUBLISH", RECORD_CHANNEL, data))
        move(cluster, channel, "s2")
        traffic.flows()
        full = TABLES.keys() - {GAPS.name}
        until(lambda: all(read(folder)[table] for table in full), "rows in all tables", every_s=0.5)

        until(lambda: {"s1", "s2"} <= places(folder, channel), "the channel at both servers", every_s=0.5)
        tables = read(folder)
        assert {row["server"] for row in tables[LATENCY.name]} == {"s1", "s2"}
        assert all(row["latency_s"] is None or row["latency_s"] > 0 for row in tables[LATENCY.name])
        assert len([row for row in tables["plans"] if row["balancer"] == 9]) == 1, "both servers had a copy"
        for name in ("servers", "channels", "latency"):
            keys = Counter(tuple(row[column] for column in TABLES[name].key) for row in tables[name])
            assert set(keys.values()) == {1}

        [(_, balancers), patterns] = cluster.ask("s1", (b"PUBSUB", b"NUMSUB", BALANCER_CHANNEL), (b"PUBSUB", b"NUMPAT"))
        assert (balancers, patterns) == (1, 2), "the recorder is no balancer; its pattern, and the agent's"
        with from_url(cluster.url) as client:
            assert client.pubsub_numpat() == 0, "neither is an application's"

        before = {table: len(rows) for table, rows in read(folder).items()}
        recorder.kill()
        after = read(folder)
        assert all(len(after[table]) >= count for table, count in before.items())
        first = recorders(cluster, folder)

        others = [another_recorder(cluster, folder) for _ in range(2)]
        for each in others:
            each.start()
        until(lambda: len(recorders(cluster, folder) - first) == 2, "two recorders write", every_s=0.5)
        assert not [*folder.rglob(f".{next(iter(first))}*")], "what the killed one has begun is gone"
        assert [each.stop() for each in others] == [0, 0]
        read(folder)
        assert traffic.finish().gaps == 0


def places(folder: Path, channel: bytes) -> set[str]:
    return {row["server"] for row in read(folder)["channels"] if row["channel"] == channel.decode()}


def test_a_recorder_that_cannot_write_says_so_in_its_log_and_in_status_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    with LocalCluster(1, settings=SETTINGS, record=folder) as cluster:
        assert cluster.recorder is not None

        def failing() -> bool:
            command = dynamoth_command("status", "--config", str(cluster.config_file), "--json")
            shown = subprocess.run(command, capture_output=True, text=True, check=False)
            return any(each["kind"] == "recorder_failing" for each in json.loads(shown.stdout)["problems"])

        until(lambda: read(folder)["servers"], "rows of the server", every_s=0.5)
        shutil.rmtree(folder)
        folder.touch()  # a file in place of the folder: nothing can be written
        until(failing, "status shows it", every_s=0.5)
        [line] = logged(cluster.recorder, "the recording cannot be written")
        assert line["cause"] and line["level"] == "error"
        folder.unlink()
        until(lambda: logged(cluster.recorder, "the recording is written again"), "it goes on")  # type: ignore[arg-type]
        assert read(folder)["servers"]
        until(lambda: not failing(), "status shows it no more", every_s=0.5)


def test_a_recorder_waits_for_a_cluster_that_has_no_plan(tmp_path: Path) -> None:
    with LocalCluster(1) as cluster:
        cluster.balancer.stop()
        cluster.ask("s1", (b"FLUSHALL",))
        recorder = another_recorder(cluster, tmp_path / "recording")
        recorder.start()
        until(lambda: logged(recorder, "waiting for the cluster"), "it waits")
        cluster.balancer.start()
        until(lambda: logged(recorder, "connected"), "it records")
        assert recorder.stop() == 0
