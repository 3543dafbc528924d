"""Errors of the commands that read recordings, and the translation of Spark's own."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs] it has none
from pyspark.errors import PySparkException

from dynamoth.errors import DynamothError
from dynamoth.protocol.wire import cut

MESSAGE_CHARACTERS_MAX = 300


class BadRecording(DynamothError):
    """Raised when a recording cannot be read: nothing in it, a broken file, a column of another type."""

    code = "bad-recording"


class SparkFailed(DynamothError):
    """Raised when Spark cannot start, cannot be reached, or fails in a job."""

    code = "spark"


@contextmanager
def spark_errors() -> Generator[None]:
    """Turn errors of Spark into one sentence with cause and cure.

    Raises:
        BadRecording: a file cannot be read.
        SparkFailed: anything else.

    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise translated(error) from error


def translated(error: Exception) -> DynamothError:
    """Return our error for one of Spark's."""
    text = str(error)
    file = re.search(r"[a-z0-9]+:/\S*?\.parquet", text)
    if "FILE_NOT_EXIST" in text or "FileNotFoundException" in text:
        return BadRecording("a file went away while it was read, as recorders merge files: run the command again")
    if "CANNOT_MERGE_SCHEMAS" in text or "SchemaColumnConvertNotSupported" in text:
        where = f" ({file[0]})" if file else ""
        return BadRecording(
            f"a column does not have the same type in all files{where}: move the foreign files elsewhere"
        )
    if file and ("FAILED_READ_FILE" in text or "not a Parquet file" in text):
        return BadRecording(f"{file[0]} cannot be read: it is damaged or not a Parquet file: move it elsewhere")
    if "PATH_NOT_FOUND" in text:
        return BadRecording("Spark does not find the recording: give a folder that each of its machines can read")
    if "TASK_WRITE_FAILED" in text or "No space left on device" in text:
        return SparkFailed(
            "results or temporary files cannot be written: make room on the disks of --out and SPARK_LOCAL_DIRS"
        )
    if "stopped SparkContext" in text:
        return SparkFailed("Spark gave up: nobody answers as a Spark master at that address, or it has no workers")
    if "Python worker" in text:
        if "ModuleNotFoundError" in text:
            return SparkFailed(
                "the Python of Spark's workers lacks packages: set PYSPARK_PYTHON to one that has dynamoth[analytics]"
            )
        text = text.strip().splitlines()[-1]
        if ours := re.search(rf"{BadRecording.__name__}: (.*)", text):
            return BadRecording(ours[1])
    cause = re.search(r"(?:Caused by|Exception): ?(.*)", text)
    lines = (cause[1] if cause and cause[1] else text).strip().splitlines() or [type(error).__name__]
    return SparkFailed(f"Spark failed: {cut(lines[0], MESSAGE_CHARACTERS_MAX)}: see --spark-log warn for more")
