"""The recorder as it runs: a process beside a whole cluster."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamoth.names import BALANCER_CHANNEL, RECORD_CHANNEL
from dynamoth.protocol.records import RecordedRows, pack_rows
from dynamoth.protocol.reports import ChannelColumns, Report, pack_report
from dynamoth.recording import BROKER_TABLES, DECISIONS, GAPS, LATENCY, TABLES
from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster, environment_without_settings
from dynamoth_cli.local.embedded import reserve_port
from dynamoth_client import from_url
from dynamoth_recorder.process.tables import parquet
from tests.whole.acl_cluster import Rules, acl_cluster, acl_log, all_rules
from tests.whole.harness import Traffic, channels_at, logged, move, until

SETTINGS = {"agent.report_interval_s": 0.2}

INCARNATION = 9
"""Of an agent that a test plays."""

LOST_S_MAX = 10.0
"""What a recorder that is killed may lose."""


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


def test_a_cluster_is_recorded_and_a_killed_recorder_leaves_whole_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
        full = TABLES.keys() - {GAPS.name} - BROKER_TABLES.keys()
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
        assert (balancers, patterns) == (1, 3), "the recorder is no balancer; its patterns, and the agent's"
        with from_url(cluster.url) as client:
            assert client.pubsub_numpat() == 0, "neither is an application's"

        before = {table: len(rows) for table, rows in read(folder).items()}
        os.kill(recorder.pid, signal.SIGKILL)
        until(lambda: "nothing is recorded any more" in capfd.readouterr().err, "its end is said")
        after = read(folder)
        assert all(len(after[table]) >= count for table, count in before.items())
        first = recorders(cluster, folder)

        others = [another_recorder(cluster, folder) for _ in range(2)]
        for each in others:
            each.start()
        until(lambda: len(recorders(cluster, folder) - first) == 2, "two recorders write", every_s=0.5)
        assert not [*folder.rglob(f".{next(iter(first))}*")], "what the killed one has begun is gone"
        fill_disk(others[0], full=True)
        until(lambda: logged(others[0], "the recording cannot be written"), "one cannot write")
        assert [each.stop() for each in others] == [1, 0]
        lost = [bool(logged(each, "rows were lost, as they could not be written")) for each in others]
        assert lost == [True, False], "what one could not write to the end is lost"
        read(folder)
        cluster.check()  # it does not miss the recorder
        assert traffic.finish().gaps == 0


def places(folder: Path, channel: bytes) -> set[str]:
    return {row["server"] for row in read(folder)["channels"] if row["channel"] == channel.decode()}


def fill_disk(recorder: Child, *, full: bool) -> None:
    """Have the system refuse whatever a recorder writes to files, as a full disk does, or end that."""
    _, hard = resource.prlimit(recorder.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(recorder.pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def is_shown_as_failing(cluster: LocalCluster) -> bool:
    command = dynamoth_command("status", "--url", cluster.url_of("operator"), "--json")
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return any(each["kind"] == "recorder_failing" for each in json.loads(shown.stdout)["problems"])


@pytest.mark.parametrize("rules", all_rules(), ids=str)
def test_a_full_disk_is_logged_and_shown_and_stops_nothing_and_the_rights_of_a_recorder_suffice(
    rules: Rules, tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    [channel] = channels_at("s1", 1, prefix=b"news.")
    with acl_cluster(rules, tmp_path, settings=SETTINGS, record=folder) as cluster:
        recorder = cluster.recorder
        assert recorder is not None
        with Traffic(cluster, [channel]) as traffic:
            move(cluster, channel, "s2")
            heard = TABLES.keys() - {GAPS.name, DECISIONS.name} - BROKER_TABLES.keys()
            until(lambda: all(read(folder)[table] for table in heard), "rows in the tables", every_s=0.5)

            fill_disk(recorder, full=True)
            until(lambda: is_shown_as_failing(cluster), "status shows it", every_s=0.5)
            [line] = logged(recorder, "the recording cannot be written")
            assert str(folder) in line["cause"] and line["level"] == "error"
            traffic.flows()
            before = {(row["server"], row["sequence"]) for row in read(folder)["servers"]}
            fill_disk(recorder, full=False)
            until(lambda: logged(recorder, "the recording is written again"), "it goes on")
            until(lambda: not is_shown_as_failing(cluster), "status shows it no more", every_s=0.5)
            after = {(row["server"], row["sequence"]) for row in read(folder)["servers"]}
            assert before < after
            for server in cluster.server_ids:
                sequences = {sequence for id_, sequence in after if id_ == server}
                assert sequences == {*range(min(sequences), max(sequences) + 1)}, "rows waited in memory"
            assert traffic.finish().gaps == 0
        assert acl_log(cluster) == []


def test_brokers_and_their_coordinator_are_recorded_under_the_rules(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    settings = {"broker.report_s": 0.3, "broker.anonymous": True}
    with acl_cluster(all_rules()[-1], tmp_path, settings=settings, record=folder) as cluster, ExitStack() as stack:
        port = str(stack.enter_context(reserve_port()).getsockname()[1])
        broker = cluster.beside("b1", "broker", "--id", "b1", "--port", port)
        coordinator = cluster.beside("coordinator", "coordinator")
        for child in (broker, coordinator):
            stack.callback(child.stop)
            child.start()
        wanted = "brokers", "coordinator_settings"
        until(lambda: all(read(folder)[table] for table in wanted), "both are recorded", every_s=0.5)
        rows = read(folder)["brokers"]
        assert {(row["broker"], row["users"]) for row in rows} == {("b1", 0)}
        keys = [tuple(row[name] for name in TABLES["brokers"].key) for row in rows]
        assert len(keys) == len(set(keys)), "each report has come through two servers"
        assert acl_log(cluster) == []


def reported(folder: Path) -> dict[str, set[int]]:
    """Return, by recorder, the sequences of the reports of ``INCARNATION`` whose channels it has written."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for path in (folder / "channels").rglob("*.parquet"):
        columns = parquet.ParquetFile(path).read(columns=["recorder", "incarnation", "sequence"]).to_pydict()
        for recorder, incarnation, sequence in zip(*columns.values(), strict=True):
            if incarnation == INCARNATION:
                found[recorder].add(sequence)
    return found


def test_a_kill_in_the_middle_of_a_write_costs_ten_seconds_at_most_and_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    names, ones, no_ids = tuple(b"%d" % number for number in range(500)), (1,) * 500, (b"",) * 500
    report = Report(
        server="s1",
        incarnation=INCARNATION,
        sequence=0,
        interval_s=1.0,
        plan_version=0,
        outgoing_bytes_per_s_max=1,
        outgoing_bytes_per_s=0.0,
        columns=ChannelColumns(names, ones, ones, ones, ones, ones, ones, no_ids, no_ids),
    )
    with LocalCluster(1, record=folder) as cluster:
        cluster.balancer.stop()
        recorder = cluster.recorder
        assert recorder is not None
        sent: list[float] = []

        def is_struck() -> bool:
            """Report; kill the recorder in the middle of a write, once it has recorded for long enough."""
            data = pack_report(replace(report, sequence=len(sent)))
            cluster.ask("s1", (b"PUBLISH", BALANCER_CHANNEL, data))
            sent.append(time.monotonic())
            if sent[-1] < sent[0] + LOST_S_MAX + 1 or not [*folder.rglob(".*.tmp")]:
                return False
            recorder.kill()
            return True

        until(is_struck, "a write to interrupt")
        [(killed, written)] = reported(folder).items()
        assert written == {*range(len(written))}
        assert sent[-1] - sent[len(written) - 1] < LOST_S_MAX
        files = {*folder.rglob("*.parquet")}

        recorder.start()
        until(lambda: len({row["recorder"] for row in read(folder)["latency"]}) == 2, "the next one writes", 0.5)
        assert files <= {*folder.rglob("*.parquet")}
        assert not [*folder.rglob(f".{killed}*")], "what the killed one has begun is gone"


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
