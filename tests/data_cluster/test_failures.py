"""What an error of Spark means to a person."""

from __future__ import annotations

import errno
import os

import pytest

from dynamoth_analytics.cluster.failures import CHARACTERS_MAX, DISK_IS_FULL, DISK_IS_READ_ONLY, reason_of
from dynamoth_analytics.cluster.servers import LogServerFailed

WORKER = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times
Caused by: org.apache.spark.SparkException:{0}
Error from python worker:
  Traceback (most recent call last):
    File "/usr/lib/python3/runpy.py", line 198, in _run_module_as_main
      return _run_code(code, main_globals, None,
  ModuleNotFoundError: No module named 'pyspark'
PYTHONPATH was:
  /opt/spark/python
java.io.EOFException
\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:386)
"""


@pytest.mark.parametrize("space", ["", " "])
def test_a_worker_that_does_not_start_says_why(space: str) -> None:
    reason = reason_of(RuntimeError(WORKER.format(space)))
    assert reason.startswith("Error from python worker: Traceback")
    assert reason.endswith("ModuleNotFoundError: No module named 'pyspark'")
    assert len(reason) <= CHARACTERS_MAX


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x\nCaused by: java.lang.ArithmeticException: long overflow\n\tat a.b(C.java:1)\n", "long overflow"),
        ("x\nCaused by: java.io.EOFException\n\tat a.b(C.java:1)\n", "java.io.EOFException"),
        ("x\nCaused by: java.io.EOFException: \n\tat a.b(C.java:1)\n", "java.io.EOFException:"),
        ("[PYTHON_DATA_SOURCE_ERROR] Failed:\nOSError: x\n SQLSTATE: 38000\n", "RuntimeError: OSError: x"),
        ("x\nCaused by: java.lang.RuntimeException: " + "y" * 400, "y" * 147 + " ... " + "y" * 148),
    ],
)
def test_the_last_cause_counts(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason


@pytest.mark.parametrize(
    "error",
    [
        LogServerFailed("x" * 400 + " (the cure)"),
        RuntimeError("dynamoth_analytics.cluster.servers.LogServerFailed: " + "x" * 400 + " (the cure)"),
        RuntimeError("[UNRESOLVED_COLUMN] " + "x" * 400 + " (the cure)"),
        RuntimeError("x" * 400 + " (the cure)"),
    ],
)
def test_a_long_reason_is_cut_where_it_can_be_seen_and_keeps_its_end(error: Exception) -> None:
    reason = reason_of(error)
    assert len(reason) <= CHARACTERS_MAX
    assert "xx ... xx" in reason and reason.endswith("(the cure)")


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, DISK_IS_FULL), (errno.EROFS, DISK_IS_READ_ONLY)])
def test_a_disk_that_takes_nothing_is_named_with_the_cure(number: int, reason: str) -> None:
    error = OSError(number, os.strerror(number), "/data/.0.tmp")
    assert reason_of(error) == reason
    assert (
        reason_of(RuntimeError(f"x\nCaused by: java.io.IOException: {error.strerror}\n\tat a.b(C.java:1)\n")) == reason
    )
