"""``dynamoth demo`` leaves no process behind, however it ends: every one of its descendants is looked for."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from pathlib import Path

import pytest

from dynamoth_cli.child import dynamoth_command
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
MARK = "DYNAMOTH_TEST_MARK"


def marked(mark: str) -> list[str]:
    """Return the command lines of all processes with a mark in their environment, whoever their parent is."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile, or is somebody else's
        if f"{MARK}={mark}".encode() in environment.split(b"\0"):
            found.append(command.replace(b"\0", b" ").decode())
    return found


def start(mark: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the demo in a process group of its own, as a shell does."""
    return subprocess.Popen(
        dynamoth_command("demo", *arguments),
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def test_the_demo_ends_clean_writes_its_result_and_is_gone(tmp_path: Path) -> None:
    file, mark = tmp_path / "result.json", secrets.token_hex()
    with start(mark, "--players", "20", "--servers", "2", "--seconds", "12", "--json", str(file)) as process:
        until(lambda: len(marked(mark)) >= 8, "demo, 2 servers, 2 agents, balancer, auditors and players are at work")
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    assert marked(mark) == []
    result = json.loads(file.read_text())
    assert set(KEYS) <= set(result)
    assert result["published"] > 0 and result["delivered"] > result["published"]
    assert [result[name] for name in ("lost", "duplicated", "reordered", "gaps")] == [0, 0, 0, 0]
    assert result["plan_version"] >= 3 * min(result["migrations"], 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_demo_is_gone_when_its_terminal_ends_it_in_the_middle(number: signal.Signals, tmp_path: Path) -> None:
    file, mark = tmp_path / "result.json", secrets.token_hex()
    with start(mark, "--players", "20", "--servers", "2", "--seconds", "12", "--json", str(file)) as process:
        assert process.stdout is not None
        assert any("20 players play" in line for line in process.stdout), "the crowd has gathered: channels move now"
        assert len(marked(mark)) >= 8
        os.killpg(process.pid, number)  # a terminal signals the whole group
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err == "dynamoth: interrupted\n"
    assert marked(mark) == []
