"""The journal of executions has whole lines only."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamoth_analytics.cluster.storage.journal import write_execution

FULL = """
import resource, sys
from pathlib import Path
from dynamoth_analytics.cluster.storage.journal import write_execution

folder, bytes_max = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, resource.RLIM_INFINITY))
for number in range(3):
    try:
        write_execution(folder, "near", {"execution": number, "text": "x" * 60})
    except OSError as error:
        print(number, error.strerror)
"""
"""Writes lines of about 100 bytes to a file that cannot have more bytes: what does not fit is not written, as on a full
disk."""


def lines(folder: Path) -> list[Any]:
    (file,) = folder.glob("date=*/near.jsonl")
    text = file.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", FULL, str(tmp_path), "150"]
    done = subprocess.run(arguments, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == ["1 File too large", "2 File too large"]
    assert [each["execution"] for each in lines(tmp_path)] == [0]
    write_execution(tmp_path, "near", {"execution": 1})
    assert [each["execution"] for each in lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize("before", [b"", b'{"execution":0}\n'])
def test_a_part_of_a_line_that_a_crash_has_left_is_removed(
    tmp_path: Path, before: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write_execution(tmp_path, "near", {"execution": 0})
    (file,) = tmp_path.glob("date=*/near.jsonl")
    file.write_bytes(before + b'{"query":"near","execu')
    caplog.set_level(logging.WARNING)
    write_execution(tmp_path, "near", {"execution": 1})
    assert [each["execution"] for each in lines(tmp_path)] == [0] * bool(before) + [1]
    assert "a part of a line" in caplog.text
