"""``dynamoth demo-emergency``: a whole data cluster that is killed twice, brokers, users, and the independent audit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 420


def test_the_audit_of_the_demo_is_clean(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-P", "-m", "dynamoth_cli", "demo-emergency"]
    command += ["--users", "40", "--brokers", "3", "--minutes", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["texts"] == [] and result["faults"] == 0
    assert result["gaps"] == 0, "log servers lose nothing here, and nobody reads slowly"
    assert result["moved"] > 0
    assert all(count > 0 for count in result["result_sets"].values())
    assert result["delivered"] > 100
    assert result["overruns"]["report_counts_hurried"] > 0
