"""The play of ``dynamoth demo-emergency``, on servers that are as slow as a test wants; and the ports of the demo."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynamoth_cli.local.embedded import keep_port
from dynamoth_daemon.exit_codes import EXIT_INTERRUPTED
from dynamoth_demo.emergency import command
from dynamoth_demo.emergency.play import DRAIN_AT, KILLS_AT, PATIENCE_S, Play, advice
from dynamoth_demo.emergency.servers import TooSlow

LENGTH_S = 60.0
QUERIES = ("slow", "quick")


@dataclass
class SlowServers:
    """Servers with a clock of their own: a record a second; an execution covers all, this time after each start."""

    warm_s: float
    now: float = 0.0
    started: float = 0.0
    #: Number of the last execution and the records that it covered, by query.
    done: dict[str, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(QUERIES, (0, 0)))
    events: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    is_between_executions: bool = True

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.started + self.warm_s:
            self.done = {query: (number + 1, int(self.now)) for query, (number, _) in self.done.items()}

    def is_executing(self, query: str) -> bool:
        self.is_between_executions = not self.is_between_executions
        return not self.is_between_executions

    def last_execution(self, query: str) -> int:
        return self.done[query][0]

    def waiting(self, query: str, tips: Mapping[str, int]) -> int:
        return max(0, tips["reports/0"] - self.done[query][1])

    def tips(self, partitions: Mapping[str, int]) -> dict[str, int]:
        return {"reports/0": int(self.now)}

    def restart_data_cluster(self) -> None:
        self.events.append(("kill", self.now))
        self.started = self.now

    def drain(self, broker: str) -> None:
        self.events.append(("drain", self.now))


def play(servers: SlowServers) -> Play:
    return Play(servers, QUERIES, {"reports": 1}, ("quick",), lambda: None, clock=servers.clock, pause=servers.pause)


def test_on_a_quick_machine_things_happen_at_their_parts_of_the_run() -> None:
    servers = SlowServers(warm_s=1.0)
    played = play(servers)
    played.run(LENGTH_S)
    played.catch_up()
    assert [name for name, _ in servers.events] == ["kill", "drain", "kill"]
    expected = [KILLS_AT[0] * LENGTH_S, DRAIN_AT * LENGTH_S, KILLS_AT[1] * LENGTH_S]
    assert [at for _, at in servers.events] == pytest.approx(expected, abs=1.0)
    assert servers.now == pytest.approx(LENGTH_S, abs=6.0)
    assert len(played.outages) == 2


def test_on_a_slow_machine_the_data_cluster_is_killed_when_it_has_executed_each_query_and_the_run_is_longer() -> None:
    servers = SlowServers(warm_s=100.0)
    played = play(servers)
    played.run(LENGTH_S)
    (_, first), (_, drained), (_, second) = servers.events
    assert first >= 100.0, "it has executed something"
    assert drained == pytest.approx(first + (DRAIN_AT - KILLS_AT[0]) * LENGTH_S, abs=1.0)
    assert second >= first + 100.0, "it has caught up with its first end"
    assert servers.now == pytest.approx(second + (1 - KILLS_AT[1]) * LENGTH_S, abs=1.0)
    assert len(played.outages) == 1, "it has not caught up with the second one"
    played.catch_up()
    assert servers.now >= second + 100.0
    assert len(played.outages) == 2


def test_a_data_cluster_that_never_gets_ready_ends_the_run_with_what_it_has_not_executed() -> None:
    servers = SlowServers(warm_s=2 * PATIENCE_S)
    with pytest.raises(TooSlow, match=r"after 600 s the data cluster is still behind: slow by \d+ records, quick by"):
        play(servers).run(LENGTH_S)
    assert servers.events == [], "it was not killed"


def test_advice_names_load_cure_and_log() -> None:
    assert "the load of this machine is " in advice(None)
    for cure in ("--users", "--minutes", "--keep FOLDER"):
        assert cure in advice(None)
    assert advice("/tmp/data-cluster.log").endswith("the log of the data cluster: /tmp/data-cluster.log")


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_run_that_is_too_slow_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    class Slow:
        def __init__(self, *arguments: object) -> None:
            raise TooSlow("data-cluster has not started within 300 s")

    monkeypatch.setattr(command, "_Demo", Slow)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    folder = tmp_path / "kept"
    with pytest.raises(TooSlow) as raised:
        command.run(parser.parse_args(["--keep", str(folder)] if is_kept else []))
    text = str(raised.value)
    assert text.startswith("data-cluster has not started within 300 s; the load of this machine is ")
    assert text.endswith(f": {folder / 'logs' / 'data-cluster.log'}") == is_kept


def test_a_demo_that_is_interrupted_says_what_it_ends() -> None:
    words = [sys.executable, "-P", "-m", "dynamoth_cli", "demo-emergency", "--users", "1", "--brokers", "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        begun = demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
    assert "starting servers, brokers and Spark; 7 standing queries, and report_counts_hurried" in begun
    assert "interrupted: ending users, reporters and page, the data cluster" in rest
    assert demo.returncode == EXIT_INTERRUPTED


def test_a_port_is_kept_from_connections_and_free_for_servers() -> None:
    with ExitStack() as stack:
        port = keep_port(stack)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as the kernel binds what connects
        for _ in range(2):  # a server that is started again finds it free
            with socket.create_server(("127.0.0.1", port)):
                pass
