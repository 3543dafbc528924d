"""``dynamoth demo`` leaves no process behind, however it ends: every one of its descendants is looked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from dynamoth_cli.local.child import dynamoth_command
from tests.processes import command_lines
from tests.whole.harness import PATIENCE_S, until

KEYS = (
    "published",
    "delivered",
    "lost",
    "duplicated",
    "reordered",
    "gaps",
    "migrations",
    "latency_ms_p50",
    "latency_ms_p99",
    "plan_version",
)
PROCESSES_MIN = 8
"""The demo itself, 2 servers, 2 agents, the balancer, auditors and players."""


def session_of(pid: int) -> dict[int, str]:
    """Return the command lines of all processes of a session, whoever their parent is."""
    return command_lines("-s", str(pid))


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the demo in a session of its own, as a terminal does; all its descendants are in that one."""
    return subprocess.Popen(
        dynamoth_command("demo", "--players", "20", "--servers", "2", "--seconds", "12", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_demo_ends_clean_writes_its_result_and_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with start("--json", str(file)) as process:
        until(lambda: len(session_of(process.pid)) >= PROCESSES_MIN, "all processes are at work")
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    assert session_of(process.pid) == {}
    result = json.loads(file.read_text())
    assert set(KEYS) <= set(result)
    assert result["published"] > 0
    assert result["delivered"] > result["published"]
    assert [result[name] for name in ("lost", "duplicated", "reordered", "gaps")] == [0, 0, 0, 0]
    assert result["plan_version"] >= 3 * min(result["migrations"], 1), "three versions for a move"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_demo_is_gone_when_its_terminal_ends_it_in_the_middle(number: signal.Signals) -> None:
    with start() as process:
        assert process.stdout is not None
        assert any("20 players play" in line for line in process.stdout), "the crowd has gathered: channels move now"
        assert len(session_of(process.pid)) >= PROCESSES_MIN
        os.killpg(process.pid, number)  # a terminal signals the whole group
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err == "dynamoth: interrupted\n"
    assert session_of(process.pid) == {}
