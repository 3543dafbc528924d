"""``dynamoth demo-brokers``: real brokers, a coordinator and users; one broker is drained, and one is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 150


def test_the_audit_of_the_demo_is_clean(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-P", "-m", "dynamoth_cli", "demo-brokers"]
    command += ["--users", "40", "--seconds", "10", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert (result["lost"], result["duplicated"], result["reordered"], result["violations"]) == (0, 0, 0, 0)
    assert result["migrations"] > 0
    assert result["delivered"] > 500
