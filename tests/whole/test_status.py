"""``dynamoth status``, ``/readyz`` and ``/metrics`` of real processes say what is wrong, with reason and age."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from dynamoth_cli.local.child import dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import reserve_port
from tests.whole.harness import channels_at, until

TIMEOUT_S = 30.0

SETTINGS = {
    "balancer.load_ratio_high": 100.0,
    "balancer.averaging_s": 2.0,
    "balancer.full_ratio": 0.02,
    "agent.report_interval_s": 0.5,
}
"""A handful of connections fill a server that permits 100, and not one that permits 10,000."""


class Watched:
    """A cluster of two, and what people see of it."""

    def __init__(self, cluster: LocalCluster, http_port: int) -> None:
        self.cluster = cluster
        self._http_port = http_port

    def status(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "80"}
        command = dynamoth_command("status", "--config", str(self.cluster.config_file), *arguments)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self._http_port}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def problem(self, kind: str, subject: str) -> dict[str, Any] | None:
        problems = json.loads(self.status("--json").stdout)["problems"]
        return next((each for each in problems if (each["kind"], each["subject"]) == (kind, subject)), None)

    def until_healthy(self) -> None:
        until(lambda: self.get("readyz") == (200, "ready\n"), "the balancer is ready", every_s=0.1)
        until(lambda: "dynamoth_balancer_problems{" not in self.get("metrics")[1], "it shows no problem", every_s=0.1)
        until(lambda: (shown := self.status()).returncode == 0 and "!" not in shown.stdout, "nothing is wrong", 0.1)

    def until_not_ready(self, reason: str) -> None:
        """Wait until ``/readyz`` says why it is not ready."""
        until(lambda: reason in self.get("readyz")[1], reason, every_s=0.05)

    def until_shown(self, kind: str, server: str, reason: str, *, error: bool = True) -> dict[str, Any]:
        """Wait until everything says that something is wrong with a server, and why; return what JSON has of it."""

        def known() -> dict[str, Any] | None:
            if f'{{kind="{kind}",server="{server}"' not in self.get("metrics")[1]:  # cheaper to ask than the command
                return None
            problem = self.problem(kind, server)
            return problem if problem is not None and problem["age_s"] is not None else None

        problem = until(known, f"{kind} of {server}", every_s=0.1)
        assert problem is not None
        assert reason in problem["reason"]
        text = self.status()
        assert text.returncode == 1
        assert re.search(rf"^! {server}: .*{re.escape(reason)}.* \(for \d+ s\)$", text.stdout, re.MULTILINE), (
            text.stdout
        )
        code, ready = self.get("readyz")
        assert (code == 503) is error
        assert not error or reason in ready
        metrics = self.get("metrics")[1]
        labels = f'{{kind="{kind}",server="{server}",severity="{problem["severity"]}"}}'
        assert f"dynamoth_balancer_problems{labels} 1.0" in metrics
        assert f"dynamoth_balancer_problem_age_seconds{labels}" in metrics
        return problem


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """One cluster for all tests, which leave it healthy."""
    with reserve_port() as reserved:
        port: int = reserved.getsockname()[1]
        settings = {**SETTINGS, "balancer.http_port": port}
        with LocalCluster(2, settings=settings) as cluster:
            watched = Watched(cluster, port)
            watched.until_healthy()
            yield watched


def plan_move(watched: Watched, channel: bytes, to: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("plan", "move", channel.decode(), "--to", to, "--config", str(watched.cluster.config_file), *arguments)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        dynamoth_command(*command), capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False
    )


def test_a_server_at_maxmemory_that_refuses_the_plan(watched: Watched) -> None:
    [_, channel] = channels_at("s1", 2)
    fill = b"SET", b"filler", b"x" * 2_000_000
    watched.cluster.ask("s2", fill, (b"CONFIG", b"SET", b"maxmemory", b"1mb"))
    assert plan_move(watched, channel, "s2", "--timeout", "1").returncode == 1
    problem = watched.until_shown("plan_refused", "s2", "OOM command not allowed")
    assert "raise maxmemory" in problem["reason"]
    assert watched.problem("memory_full", "s2"), "the memory itself is shown as well, before it matters"
    watched.cluster.ask("s2", (b"CONFIG", b"SET", b"maxmemory", b"0"), (b"DEL", b"filler"))
    watched.until_healthy()


def test_a_server_that_is_nearly_out_of_connections(watched: Watched) -> None:
    watched.cluster.ask("s2", (b"CONFIG", b"SET", b"maxclients", b"100"))
    until(lambda: watched.problem("server_full", "s2"), "it is full", every_s=0.1)
    status = watched.status("--json")
    load = json.loads(status.stdout)["servers"]["s2"]["load"]
    assert status.returncode == 0 and load["connections_max"] == 100 and load["full"].endswith("of its connections")
    assert 0.02 < load["resource_ratios"]["connections"] < 0.5 and {"outgoing", "cpu"} <= load["resource_ratios"].keys()
    ratio = re.escape('dynamoth_balancer_resource_ratio{resource="connections",server="s2"} 0.')
    assert re.search(ratio, watched.get("metrics")[1])
    assert re.search(r"^s2 .* (connections|cpu|outgoing) 0\.\d\d", watched.status().stdout, re.MULTILINE)
    watched.cluster.ask("s2", (b"CONFIG", b"SET", b"maxclients", b"10000"))
    watched.until_healthy()


def test_a_server_that_has_become_a_replica(watched: Watched) -> None:
    port = str(watched.cluster.redis["s1"].port).encode()
    watched.cluster.ask("s2", (b"REPLICAOF", b"127.0.0.1", port))
    watched.until_shown("server_refuses", "s2", "READONLY")
    watched.cluster.ask("s2", (b"REPLICAOF", b"NO", b"ONE"))
    watched.until_healthy()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_dead_or_hangs(watched: Watched, number: signal.Signals) -> None:
    agent = watched.cluster.agents["s2"]

    def has_load() -> bool:
        load: dict[str, float] = json.loads(watched.status("--json").stdout)["servers"]["s2"]["load"]
        return load.get("connections", 0) > 0

    until(has_load, "its load is shown", every_s=0.1)
    if number is signal.SIGKILL:
        agent.kill()
    else:
        os.kill(agent.pid, number)
    if number is signal.SIGKILL:
        watched.until_not_ready("it has no agent: start 'dynamoth agent --server s2'")
        watched.until_shown("agent_silent", "s2", "it has no agent")
    else:
        watched.until_shown("agent_silent", "s2", "its agent is not heard")
    load = json.loads(watched.status("--json").stdout)["servers"]["s2"]["load"]
    assert "connections" not in load and load["load_ratio"] is None, "its last figures are not shown as present"
    assert load["report_age_s"] > (1 if number is signal.SIGKILL else 4)
    if number is signal.SIGKILL:
        agent.start()
    else:
        os.kill(agent.pid, signal.SIGCONT)
    watched.until_healthy()


def test_a_server_that_hangs_is_named_at_once_and_holds_nobody_up(watched: Watched) -> None:
    began = time.monotonic()
    watched.status()
    usual_s = time.monotonic() - began
    watched.cluster.redis["s2"].pause()
    try:
        watched.until_not_ready("s2: it does not answer: it hangs")

        def in_time() -> subprocess.CompletedProcess[str] | None:
            began = time.monotonic()
            status = watched.status()
            return status if time.monotonic() - began < usual_s + 6.0 else None

        status = until(in_time, "it takes 2 s more than usual; it was 8 s and more each time")
        assert status is not None and status.returncode == 1
        assert re.search(r"^! s2: ", status.stdout, re.MULTILINE), status.stdout
        shown = run("plan", "show", "--config", str(watched.cluster.config_file))
        assert shown.returncode == 0 and "plan version" in shown.stdout
        assert f"127.0.0.1:{watched.cluster.redis['s2'].port}: timed out: no answer within 1 s" in shown.stderr
    finally:
        watched.cluster.redis["s2"].resume()
    watched.until_healthy()


def test_moving_a_channel_to_where_it_is(watched: Watched) -> None:
    [channel] = channels_at("s1", 1)
    done = plan_move(watched, channel, "s1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "is at s1, settled" in done.stdout and "note: it was there already" in done.stdout
    done = plan_move(watched, channel, "s1", "--json")
    assert (done.returncode, json.loads(done.stdout)["note"]) == (0, "it was there already")
