"""The demo with real processes, and its audit with real faults."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dynamoth_cli.local.child import Child, dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import find_redis_server
from dynamoth_demo.command import worker_command
from dynamoth_demo.festival import Festival
from dynamoth_demo.worker import WorkerOptions
from dynamoth_sim.load.rgame import GameWorld, Update
from tests.processes import command_lines

TIMEOUT_S = 120.0
WORLD: dict[str, Any] = {"tiles_per_side": 2}
FESTIVAL = Festival(
    name="a:festival",
    replicas=2,
    performers=4,
    messages_per_s=100.0,
    payload_bytes=500,
    begins_s=0.0,
    gathers_s=0.0,
    ends_s=3600.0,
)


def demo(*arguments: str) -> subprocess.Popen[str]:
    """Start the demo in a session of its own, as a terminal does: all its descendants are in that one."""
    return subprocess.Popen(
        dynamoth_command("demo", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def session_of(process: subprocess.Popen[str]) -> dict[int, str]:
    """Return the command lines of all processes of the demo's session, whoever their parent is."""
    return command_lines("-s", str(process.pid))


def test_channels_move_one_is_split_and_folded_back_and_the_audit_is_clean(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    process = demo("--players", "40", "--servers", "3", "--seconds", "24", "--seed", "1", "--json", str(file))
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out + err
    assert session_of(process) == {}
    result = json.loads(file.read_text())
    assert result["clean"], result
    for name in ("lost", "duplicated", "reordered", "gaps", "errors", "violations"):
        assert result[name] == 0
    updates_due = 40 * 3 * 16  # of the players, in the seconds that they play at least
    assert result["published"] + result["skipped"] > updates_due, "a busy machine skips, and counts"
    assert result["audited"] == 2 * result["published"], "both auditors see everything"
    assert result["delivered"] > result["audited"]
    assert result["migrations"] >= 1
    assert result["replicated"] >= 1, out
    assert result["folded_back"] >= 1, out
    assert 2 <= result["replicas_max"] <= 3
    assert result["plan_version"] >= 3 * (1 + 2), "three versions for each change"
    assert 0 < result["latency_ms_p50"] <= result["latency_ms_p99"]
    assert set(result["load_ratios_before"]) == set(result["load_ratios_after"]) == {"s1", "s2", "s3"}
    assert "audit: clean (0 lost, 0 duplicated, 0 reordered, 0 gaps)" in out
    assert re.search(
        r"rgame:festival\S*  split: s\d -> s\d,s\d.* all-subscribers  \(s\d: .* publications/s to 2 subs", out
    )
    assert re.search(r"rgame:festival\S*  folded back: s\d,s\d.* -> s\d  \(s\d: .*: one server is enough", out)
    assert re.search(r"channels split: \d+, over up to [23] servers.*; folded back: \d+", out)


def test_servers_join_one_is_killed_and_servers_leave_and_each_loss_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    process = demo("--players", "40", "--seconds", "30", "--seed", "1", "--json", str(file))
    out, err = process.communicate(timeout=2 * TIMEOUT_S)
    assert process.returncode == 0, out + err
    assert session_of(process) == {}
    result = json.loads(file.read_text())
    assert result["clean"], result
    for name in ("lost", "duplicated", "reordered", "errors", "violations"):
        assert result[name] == 0
    assert (result["servers"], result["servers_in_the_end"], result["killed"]) == (2, 2, "s2")
    assert 3 <= result["servers_at_most"] <= 4
    assert 0 < result["served_s"] <= 6.0
    assert result["gaps"] > 0
    assert result["server_seconds"] > 2 * 30
    assert re.search(r"auto-\S+ joins the cluster: 3 servers", out)
    assert re.search(r"s2 is killed \(SIGKILL\), with its agent; it had \d+ channels", out)
    assert re.search(r"others serve all channels of s2, \d\.\d s after its death", out)
    assert re.search(r"auto-\S+ has left the cluster: 2 servers", out)
    assert re.search(r"audit: clean \(0 lost, 0 duplicated, 0 reordered, \d+ gaps, \d+ lost with a gap event\)", out)
    assert "servers: 2 at first, up to" in out


@pytest.fixture
def playing() -> Iterator[subprocess.Popen[str]]:
    """A demo of one server whose players play."""
    process = demo("--players", "10", "--servers", "1", "--seconds", "60")
    try:
        assert process.stdout is not None
        assert any("the crowd gathers" in line for line in process.stdout), process.communicate()
        assert len(session_of(process)) >= 6, "itself, a server, its agent, the balancer, auditors and players"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def test_ctrl_c_stops_everything_and_leaves_no_process(playing: subprocess.Popen[str]) -> None:
    os.killpg(playing.pid, signal.SIGINT)  # a terminal signals the whole group
    _, err = playing.communicate(timeout=TIMEOUT_S)
    assert (playing.returncode, err) == (130, "dynamoth: interrupted\n")
    assert session_of(playing) == {}


def test_a_server_that_dies_by_itself_ends_the_demo_with_the_reason(playing: subprocess.Popen[str]) -> None:
    [server] = [pid for pid, arguments in session_of(playing).items() if str(find_redis_server()) in arguments]
    os.kill(server, signal.SIGKILL)
    _, err = playing.communicate(timeout=TIMEOUT_S)
    assert playing.returncode == 1
    assert "dynamoth: the Redis server s1 has ended" in err
    assert session_of(playing) == {}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as running:
        yield running


class Worker:
    """A worker of the demo, spoken with as the demo does."""

    def __init__(self, cluster: LocalCluster, role: str, count: int, festival: Festival | None = None) -> None:
        options = WorkerOptions(
            role=role,
            url=cluster.url,
            world=WORLD,
            seed=1,
            first=0,
            count=count,
            payload_bytes=100,
            festival=None if festival is None else asdict(festival),
            arrival_timeout_s=1.0,
        )
        self.child = Child(role, worker_command(), environment=os.environ, pipes=True)
        self.child.start()
        self.tell(asdict(options))
        self.wait_for("ready")

    def tell(self, line: dict[str, Any]) -> None:
        self.child.stdin.write(json.dumps(line).encode() + b"\n")
        self.child.stdin.flush()

    def wait_for(self, kind: str) -> dict[str, Any]:
        for line in self.child.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == kind:
                return event
        raise self.child.failure()

    def finish(self, published: list[tuple[int, str, int]]) -> dict[str, Any]:
        self.tell({"order": "finish", "published": published, "failed": []})
        return self.wait_for("result")


@pytest.fixture
def auditors(cluster: LocalCluster) -> Iterator[Worker]:
    worker = Worker(cluster, "auditors", 2)
    yield worker
    worker.child.kill()


def publish(cluster: LocalCluster, *sequences: int) -> None:
    channel = GameWorld(**WORLD).channels()[0]
    for sequence in sequences:
        update = Update(channel, 7, sequence, 0.0, 0.0)
        cluster.ask("s1", (b"PUBLISH", channel, update.payload(0, 100)))


@pytest.mark.parametrize(
    ("sequences", "last", "found"),
    [
        ((1, 2, 3), 3, {"lost": 0, "duplicated": 0, "reordered": 0, "violations": 0}),
        ((1, 2, 2, 5, 4), 6, {"lost": 4, "duplicated": 2, "reordered": 2}),
    ],
)
def test_auditors_find_what_is_wrong(
    cluster: LocalCluster, auditors: Worker, sequences: tuple[int, ...], last: int, found: dict[str, int]
) -> None:
    channel = GameWorld(**WORLD).channels()[0].decode()
    publish(cluster, *sequences)
    result = auditors.finish([(7, channel, last)])
    assert result["delivered"] == 2 * len(sequences), "two auditors"
    assert {name: result[name] for name in found} == found
    assert bool(result["stories"]) == any(found.values())


def test_players_judge_what_their_own_process_publishes(cluster: LocalCluster) -> None:
    worker = Worker(cluster, "players", 6)
    worker.tell({"order": "start", "at": 0.0})  # long ago: they skip what is past, and begin at once
    while worker.wait_for("stats")["delivered"] < 50:
        pass
    # A copy that nobody published a second time: the players of the tile must notice it.
    [again] = [stats for stats in [worker.wait_for("stats")] if stats["duplicated"] == 0]
    assert again["published"] > 0
    worker.tell({"order": "stop"})
    stopped = worker.wait_for("stopped")
    for player, name, sequence in stopped["published"]:
        update = Update(name.encode(), player, sequence, 0.0, 0.0)
        cluster.ask("s1", (b"PUBLISH", update.channel, update.payload(0, 100)))
    result = worker.finish(stopped["published"])
    assert result["duplicated"] > 0
    assert result["lost"] == result["reordered"] == result["gaps"] == 0
    worker.child.stdin.close()
    assert worker.child.wait(TIMEOUT_S), "a worker ends with its demo"
    assert worker.child.stop() == 0


def test_players_go_home_and_the_others_play_on(cluster: LocalCluster) -> None:
    worker = Worker(cluster, "players", 6)
    worker.tell({"order": "start", "at": time.monotonic()})
    while worker.wait_for("stats")["delivered"] < 50:
        pass
    worker.tell({"order": "leave", "stay_ratio": 0.5})
    subscribers = [b"PUBSUB", b"NUMSUB", *GameWorld(**WORLD).channels()]
    while sum(cluster.ask("s1", subscribers)[0][1::2]) > 3:
        worker.wait_for("stats")
    assert worker.wait_for("stats")["delivered"] < worker.wait_for("stats")["delivered"], "three play on"
    worker.tell({"order": "stop"})
    result = worker.finish(worker.wait_for("stopped")["published"])
    assert (result["violations"], result["errors"]) == (0, 0)
    worker.child.kill()


@pytest.mark.parametrize(("concealed", "lost"), [(0, 0), (1, 2)])
def test_the_auditors_must_get_what_performers_publish(cluster: LocalCluster, concealed: int, lost: int) -> None:
    auditors = Worker(cluster, "auditors", 2, FESTIVAL)
    performers = Worker(cluster, "performers", FESTIVAL.performers, FESTIVAL)
    performers.tell({"order": "start", "at": time.monotonic()})
    while performers.wait_for("stats")["published"] < 50:
        pass
    performers.tell({"order": "stop"})
    published = performers.wait_for("stopped")["published"]
    assert [(number, name) for number, name, _ in published] == [(n, FESTIVAL.name) for n in range(4)]
    total = sum(sequence for _, _, sequence in published)
    assert total >= 50
    published[0][2] += concealed  # as if one message more had been published
    result = auditors.finish(published)
    assert result["delivered"] == 2 * total
    assert (result["lost"], result["duplicated"], result["reordered"], result["gaps"]) == (lost, 0, 0, 0)
    result = performers.finish(published)
    assert (result["published"], result["violations"], result["errors"]) == (total, 0, 0)
    for worker in (auditors, performers):
        worker.child.kill()
