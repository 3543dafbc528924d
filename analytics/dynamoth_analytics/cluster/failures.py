"""Reasons of failures in words for people, whether Spark still runs, and work whose parts fail one by one."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from dynamoth.edge.log import is_fenced
from dynamoth.errors import DynamothError
from dynamoth_analytics.cluster.servers import LogServerFailed, TakenOver
from dynamoth_analytics.errors import SparkFailed

CHARACTERS_MAX = 300
"""Of a reason, for people."""

_AGAIN = "this process ends, and is to be started again; queries go on where they were"


_OURS = re.compile(r"dynamoth\w*\.[\w.]*?(\w+): (.+)")
"""The last line of a traceback of a worker, with an error of ours."""

_SPARKS = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] (.+)")
"""An error of Spark with its class."""

_CAUSED = re.compile(
    r"(?:Caused by|An error occurred while calling .+\n): (?:[\w.$]+:(?: |\s*\n(?!\s+at )))?(.+(?:\n  .+)*)"
)
"""The causes of an error of Java, without their classes; the last one is the first that went wrong. That of a worker
that did not start is its own text, below a line and indented.
"""

_STATE = re.compile(r"[. ]*(?:SQLSTATE: \w+)?\s*")
"""What a line has, with the error of a worker before it, that says nothing to a person."""

_STREAM = "=== Streaming Query ==="
"""Behind this, an error of a stream describes the stream."""

DISK_IS_FULL = "a disk of the data cluster is full: make room in data_cluster.folder and in SPARK_LOCAL_DIRS"

DISK_IS_READ_ONLY = (
    "a disk of the data cluster is read-only: see why in the log of the system, and mount it for writing"
    " (data_cluster.folder, SPARK_LOCAL_DIRS)"
)

_DISK_FAILURES = {
    os.strerror(errno.ENOSPC): DISK_IS_FULL,
    os.strerror(errno.EDQUOT): DISK_IS_FULL,
    os.strerror(errno.EROFS): DISK_IS_READ_ONLY,
}
"""What is in the texts of errors of the operating system, of Arrow and of Java, and what it means."""

_WRAPPERS = ("STREAM_FAILED", "FOREACH_BATCH_USER_FUNCTION_ERROR", "PYTHON_EXCEPTION", "PYTHON_DATA_SOURCE_ERROR")
"""Classes of errors that say only that there is another one."""


def reason_of(error: BaseException) -> str:
    """Return why something has failed, as one sentence of at most ``CHARACTERS_MAX`` characters for people."""
    text = str(error).strip()
    disk_failure = next((meaning for each, meaning in _DISK_FAILURES.items() if each in text), None)
    if isinstance(error, OSError) and disk_failure:
        return disk_failure
    if isinstance(error, DynamothError | OSError):
        return _shown(text)
    if ours := [*_OURS.finditer(text)]:
        return _shown(ours[-1][2])
    if disk_failure:
        return disk_failure
    for found in _SPARKS.finditer(text):
        if found[1] not in _WRAPPERS:
            return _shown(f"[{found[1]}] {found[2]}")
    if causes := [*_CAUSED.finditer(text)]:
        return _shown(causes[-1][1])
    lines = [each for each in text.partition(_STREAM)[0].splitlines() if not _STATE.fullmatch(each)]
    lines = lines or [type(error).__name__]
    return _shown(f"{type(error).__name__}: {lines[-1]}")


def _shown(reason: str) -> str:
    """Return a reason as one line; of a long one the beginning, and the end, where Python's error or our cure is."""
    words = " ".join(reason.split())
    half = CHARACTERS_MAX // 2
    return words if len(words) <= CHARACTERS_MAX else f"{words[: half - 3]} ... {words[2 - half :]}"


def check_spark(spark: SparkSession) -> None:
    """Raise SparkFailed where Spark has ended."""
    context: Any = spark.sparkContext
    process = getattr(context._gateway, "proc", None)
    ended = process is not None and process.poll() is not None
    try:
        ended = ended or context._jsc is None or context._jsc.sc().isStopped()
    except Exception as error:  # py4j has several for a Java that is gone
        raise SparkFailed(f"Spark does not answer ({type(error).__name__}): {_AGAIN}") from error
    if ended:
        raise SparkFailed(f"Spark has stopped, or its Java has died: {_AGAIN}")


def is_taken_over(error: BaseException) -> bool:
    """Return whether an error, perhaps one of a worker of Spark, says that a newer data cluster has taken over."""
    if isinstance(error, LogServerFailed):
        return is_fenced(str(error.__cause__))
    return isinstance(error, TakenOver) or f"{TakenOver.__module__}.{TakenOver.__name__}: " in str(error)


class Failures:
    """The failures of parts of some work: each part is tried, and the first failure is raised when all is done."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def kept(self) -> Generator[None]:
        """Keep the failure of a part; SparkFailed and TakenOver end all work at once."""
        try:
            yield
        except (SparkFailed, TakenOver):
            raise
        except Exception as error:
            self._first = self._first or error

    def raise_first(self) -> None:
        """Raise the first failure, if there is one."""
        if self._first is not None:
            raise self._first
