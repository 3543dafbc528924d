"""A local cluster of real processes, and the commands that look at it and change it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL, PLAN_KEY
from dynamoth.plan.plan import Phase, Plan, Server
from dynamoth_cli.local.child import ChildEnded
from dynamoth_cli.local.cluster import ClusterNotReady, LocalCluster, latest_fault
from dynamoth_cli.local.embedded import RedisServerFailed
from dynamoth_cli.main import main
from dynamoth_link.errors import ServerUnreachable
from tests.processes import command_lines
from tests.whole.harness import logged, until

CHANNEL = "some:channel"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One cluster for the tests that leave it as it was, but for moved channels."""
    with LocalCluster(2, password="p@ss/word", settings={"balancer.wait_s": 1.5, "balancer.lease_s": 3.0}) as running:
        yield running


def home(channel: str) -> str:
    plan = Plan.initial(Server(id_, "redis://x") for id_ in ("s1", "s2"))
    return plan.ring.home(channel.encode())


def other(server: str) -> str:
    return {"s1": "s2", "s2": "s1"}[server]


Run = Callable[..., tuple[int, str, str]]
"""Runs a command on the cluster; returns its exit code, and what it printed to stdout and stderr."""


@pytest.fixture
def run(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--url", cluster.url])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_command


def stored_plan(run: Run) -> dict[str, Any]:
    code, out, _ = run("plan", "show", "--json")
    assert code == 0
    return json.loads(out)  # type: ignore[no-any-return]


def agents_at(cluster: LocalCluster, server: str) -> int:
    [(_, agents)] = cluster.ask(server, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL))
    return int(agents)


def test_it_is_ready_on_entry(cluster: LocalCluster) -> None:
    assert cluster.server_ids == ["s1", "s2"]
    for server in cluster.server_ids:
        assert agents_at(cluster, server) == 1
        [(_, balancers), stored] = cluster.ask(server, (b"PUBSUB", b"NUMSUB", BALANCER_CHANNEL), (b"EXISTS", PLAN_KEY))
        assert (balancers, stored) == (1, 1)
    cluster.check()


def test_the_url_holds_the_password_and_neither_files_nor_the_status_do(cluster: LocalCluster, run: Run) -> None:
    ports = ",".join(f"127.0.0.1:{server.port}" for server in cluster.redis.values())
    assert cluster.url == f"dynamoth://:p%40ss%2Fword@{ports}"
    assert "p@ss" not in cluster.config_file.read_text()
    [arguments] = command_lines("-p", str(cluster.balancer.pid)).values()
    assert "balancer --config" in arguments
    assert "p@ss" not in arguments
    code, out, _ = run("status", "--json")
    assert code == 0 and "word" not in out
    assert [server["agents"] for server in json.loads(out)["servers"].values()] == [1, 1]


def test_a_channel_is_moved_and_shown(run: Run) -> None:
    before = stored_plan(run)
    assert CHANNEL not in [entry["channel"] for entry in before["channels"]]
    target = other(home(CHANNEL))
    code, out, err = run("plan", "move", CHANNEL, "--to", target)
    assert code == 0, err
    assert f"{CHANNEL} is at {target}, settled" in out
    after = stored_plan(run)
    assert after["version"] > before["version"]
    [entry] = [entry for entry in after["channels"] if entry["channel"] == CHANNEL]
    assert (entry["servers"], entry["phase"], entry["previous"]) == ([target], Phase.SETTLED.name, [])
    code, out, _ = run("plan", "show")
    assert f"{CHANNEL}  {target}  single  settled" in out


@pytest.mark.parametrize("arguments", [["status"], ["plan", "show"], ["plan", "move", "c", "--to", "s1"]])
def test_a_wrong_password_and_no_server_at_all_are_named(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main([*arguments, "--url", cluster.url.replace("p%40ss", "wrong")]) == 1
    message = capsys.readouterr().err
    assert "wrong password for the default user" in message and "wrong%2F" not in message
    assert main([*arguments, "--url", "dynamoth://127.0.0.1:1,127.0.0.1:2"]) == 1
    message = capsys.readouterr().err
    assert "no server of the cluster answers:" in message
    assert "redis://127.0.0.1:2: connection refused: start the server" in message


def test_each_part_can_be_stopped_killed_and_started_again(cluster: LocalCluster, run: Run) -> None:
    assert cluster.agents["s1"].stop() == 0
    assert agents_at(cluster, "s1") == 0
    cluster.check()
    with pytest.raises(ClusterNotReady, match=r"not ready after 0\.1 s: 0 agents observe server s1, not 1"):
        cluster.wait_ready(timeout_s=0.1)
    code, out, _ = run("status")
    assert code == 1
    assert "s1: it has no agent: start 'dynamoth agent --server s1'" in " ".join(out.split())
    cluster.agents["s1"].start()
    cluster.wait_ready()

    until(lambda: logged(cluster.agents["s1"], "following the plan"), "the agent has read the plan")
    os.kill(cluster.agents["s1"].pid, signal.SIGKILL)
    assert cluster.agents["s1"].wait(30)
    with pytest.raises(ChildEnded, match=r"agent s1 \(process \d+\) was killed by SIGKILL(.|\n)*following the plan"):
        cluster.check()
    cluster.agents["s1"].start()
    cluster.wait_ready()

    cluster.balancer.kill()
    move_away = "plan", "move", "another:channel", "--to", other(home("another:channel"))
    code, _, err = run(*move_away)
    assert code == 1
    assert "no balancer is running in this cluster" in err
    assert "start 'dynamoth balancer'" in err
    code, out, _ = run("status")
    assert code == 1
    assert "no balancer is running" in " ".join(out.split())
    cluster.balancer.start()
    cluster.wait_ready()
    assert cluster.ask_balancer("status")["stage"] == "leading"
    code, _, err = run(*move_away)
    assert code == 0, err

    port = cluster.redis["s1"].port
    cluster.redis["s1"].kill()
    with pytest.raises(RedisServerFailed, match="the Redis server s1 has ended"):
        cluster.check()
    with pytest.raises(ServerUnreachable):
        cluster.ask("s1", (b"PING",))
    assert run("plan", "show")[0] == 0

    def refused() -> bool:
        code, out, _ = run("status")
        return code == 1 and "connection refused" in " ".join(out.split())

    until(refused, "the balancer has tried to connect again")
    cluster.restart_redis("s1")
    assert cluster.redis["s1"].port == port
    cluster.wait_ready()


def test_a_start_that_takes_too_long_names_what_it_waits_for_and_the_latest_errors() -> None:
    cluster = LocalCluster(2, redis_options={"maxmemory": "1"})
    try:
        cluster.start()
        until(lambda: "maxmemory" in latest_fault(cluster.balancer.lines), "the balancer has logged what is wrong")
        with pytest.raises(ClusterNotReady) as raised:
            cluster.wait_ready(timeout_s=0.1)
    finally:
        cluster.stop()
    missing, *logs = str(raised.value).splitlines()
    assert "server s1 does not store the plan; server s2 does not store the plan" in missing
    assert "the balancer is contending, not leading" in missing
    assert [line.split(":")[0] for line in logs] == ["  agent s1", "  agent s2", "  balancer"]
    assert "maxmemory" in logs[-1]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([], "it has logged nothing yet"),
        (["Traceback"], "Traceback"),
        (['{"level": "error", "message": "cut'], '{"level": "error", "message": "cut'),
        (['{"level": "info", "message": "m", "cause": null}'], "m"),
        (
            ['{"level": "error", "message": "m", "server": "s2", "cause": "c"}', '{"level": "info", "message": "n"}'],
            "m: s2: c",
        ),
    ],
)
def test_the_latest_error_of_a_log_is_the_one_that_is_shown(lines: list[str], fault: str) -> None:
    assert latest_fault(lines) == fault


def test_settings_that_are_refused_end_the_start_with_the_reason() -> None:
    with (
        pytest.raises(ChildEnded, match=r"ended with status 2(.|\n)*did you mean balancer.wait_s\?"),
        LocalCluster(1, settings={"balancer.wait": 3}),
    ):
        pytest.fail("it became ready")
