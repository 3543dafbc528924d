"""``dynamoth up`` as a user has it: a process in the foreground, ended by a signal."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from dynamoth_cli.local.child import dynamoth_command
from tests.processes import command_lines
from tests.whole.harness import until

TIMEOUT_S = 60.0


class Up:
    """A running ``dynamoth up``."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            dynamoth_command("up", *arguments),
            env={**os.environ, "TMPDIR": str(folder)},  # what it leaves behind when it is killed is pytest's
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def descendants(self) -> dict[int, str]:
        """Process ids of its children, and their command lines."""
        return command_lines("--ppid", str(self.process.pid))

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, stderr


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(cleanup: ExitStack, folder: Path, *arguments: str) -> Up:
    up = Up(folder, *arguments)
    cleanup.callback(up.process.communicate)
    cleanup.callback(up.process.kill)
    return up


def watch(cleanup: ExitStack, pids: dict[int, str]) -> list[int]:
    descriptors = [os.pidfd_open(pid) for pid in pids]
    for descriptor in descriptors:
        cleanup.callback(os.close, descriptor)
    return descriptors


def test_it_prints_the_url_and_leaves_nothing_behind(cleanup: ExitStack, tmp_path: Path) -> None:
    up = start(cleanup, tmp_path, "--servers", "2")
    assert re.fullmatch(r"dynamoth://127\.0\.0\.1:\d+,127\.0\.0\.1:\d+", up.url)
    children = up.descendants()
    assert len(children) == 5, f"two servers, two agents and a balancer expected: {children}"
    descriptors = watch(cleanup, children)
    code, stderr = up.end(signal.SIGINT)
    assert code == 0
    assert "dynamoth: stopped" in stderr
    assert len(select.select(descriptors, [], [], 0)[0]) == 5, "a process was left behind"
    assert list(tmp_path.iterdir()) == [], "a file was left behind"


def test_ports_logs_and_json_are_as_asked_for(cleanup: ExitStack, tmp_path: Path, free_port: int) -> None:
    up = start(cleanup, tmp_path, "--servers", "1", "--port-base", str(free_port), "--verbose", "--json")
    url = f"127.0.0.1:{free_port}"
    assert json.loads(up.url) == {"url": f"dynamoth://{url}", "servers": {"s1": f"redis://{url}"}}
    code, stderr = up.end(signal.SIGTERM)
    assert code == 0
    assert "[agent s1] {" in stderr
    assert "[balancer] {" in stderr


def test_nothing_outlives_it_even_if_it_is_killed(cleanup: ExitStack, tmp_path: Path) -> None:
    up = start(cleanup, tmp_path, "--servers", "1")
    descriptors = watch(cleanup, up.descendants())
    assert len(descriptors) == 3
    up.process.kill()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 10)[0], "a process outlived it"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_the_balancer_has_started_ends_too(number: signal.Signals, cleanup: ExitStack, tmp_path: Path) -> None:
    up = start(cleanup, tmp_path, "--servers", "1", "--servers-max", "2", "--outgoing-bytes-per-s-max", "10000")
    client: Any = cleanup.enter_context(redis.Redis(port=int(up.url.rpartition(":")[2])))  # redis-py is typed in part
    pubsub = cleanup.enter_context(client.pubsub())
    pubsub.subscribe("c")

    def of_the_fleet() -> dict[int, str]:
        lines = command_lines("-e").items()
        return {pid: line for pid, line in lines if str(tmp_path) in line and "auto-" in line and " -m " not in line}

    def is_started() -> bool:
        for _ in range(10):
            client.publish("c", b"." * 1000)
        return len(of_the_fleet()) == 1

    until(is_started, "a further redis-server runs", 0.1)
    descriptors = watch(cleanup, {**of_the_fleet(), **up.descendants()})
    up.end(number)
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 30)[0], "a process outlived it"


def test_a_part_that_dies_ends_everything_with_its_last_lines(cleanup: ExitStack, tmp_path: Path) -> None:
    up = start(cleanup, tmp_path, "--servers", "1")
    children = up.descendants()
    descriptors = watch(cleanup, children)
    [agent] = [pid for pid, arguments in children.items() if " agent " in arguments]
    os.kill(agent, signal.SIGKILL)
    _, stderr = up.process.communicate(timeout=TIMEOUT_S)
    assert up.process.returncode == 1
    assert re.search(r"dynamoth: agent s1 \(process \d+\) was killed by SIGKILL; its last output:\n  \{", stderr)
    assert len(select.select(descriptors, [], [], 0)[0]) == len(children), "a process was left behind"


def test_a_port_that_is_taken_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            dynamoth_command("up", "--servers", "1", "--port-base", str(port)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 1
    assert "Address already in use" in done.stderr
