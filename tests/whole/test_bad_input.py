"""What must not harm a running cluster: second daemons, and wrong passwords."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from dynamoth_cli.local.child import dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from tests.whole.harness import PATIENCE_S, channels_at, move, until

PASSWORD = "right password"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, password=PASSWORD, settings={"balancer.lease_s": 3.0}) as running:
        yield running


@contextmanager
def daemon(cluster: LocalCluster, *arguments: str, password: str = PASSWORD) -> Generator[subprocess.Popen[str]]:
    """Start one more daemon of the cluster, as an operator does."""
    process = subprocess.Popen(
        dynamoth_command(arguments[0], "--config", str(cluster.config_file), *arguments[1:]),
        env={**os.environ, "DYNAMOTH_LINK_PASSWORD": password},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def last_words(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a daemon; return its status and its errors."""
    _, log = process.communicate(timeout=PATIENCE_S)
    lines = [json.loads(line) for line in log.splitlines()]
    return process.returncode, " ".join(
        f"{line['message']}: {line['cause']}" for line in lines if line["level"] == "error"
    )


ALONE = ("balancer", "--standby", "false")


def test_second_daemons_end_with_2_and_say_what_to_do(cluster: LocalCluster) -> None:
    [channel] = channels_at("s1", 1)

    def believed() -> int | None:
        agent = cluster.ask_balancer("status")["servers"]["s1"]
        return agent["agent_incarnation"] if agent["agent"] == "alive" else None

    first = until(believed, "the balancer hears the agent")
    with daemon(cluster, "agent", "--server", "s1") as agent, daemon(cluster, *ALONE) as balancer:
        status, got = last_words(agent)
        assert status == 2
        assert "another agent of server 's1' is at work already" in got
        assert "stop the other first if this one is to replace it" in got
        status, got = last_words(balancer)
        assert status == 2
        assert "another balancer (incarnation " in got
        assert "stop that one first, or start this one with --standby true: " in got
    cluster.check()
    cluster.wait_ready()
    until(lambda: believed() == first, "the balancer believes the first agent again")
    move(cluster, channel, "s2")
    move(cluster, channel, "s1")


@pytest.mark.parametrize(
    ("arguments", "reason", "number"),
    [
        (("agent", "--server", "s1"), b"no connection to the Redis server", signal.SIGTERM),
        (("balancer",), b"the balancer is contending", signal.SIGINT),
    ],
)
def test_a_daemon_with_a_wrong_password_says_so_and_what_to_check_until_a_signal_ends_it(
    cluster: LocalCluster, free_port: int, arguments: tuple[str, ...], reason: bytes, number: signal.Signals
) -> None:
    with daemon(cluster, *arguments, "--http-port", str(free_port), password="wrong secret") as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "wrong password" in line)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{free_port}/readyz", timeout=PATIENCE_S)
        with refused.value as reply:
            assert (reply.code, reason in reply.read()) == (503, True)
        process.send_signal(number)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    entries = [json.loads(each) for each in rest.splitlines()]
    assert entries[-1]["message"] == f"the {arguments[0]} has ended"
    assert not [entry for entry in entries if entry["level"] in ("error", "critical")]
    assert json.loads(line)["level"] == "warning"
    assert "wrong password for the default user, or the user is off: check both (ACL LIST)" in line
    assert "secret" not in line + rest
