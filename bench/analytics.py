"""How long the report of a large recording takes: 5 and 50 million rows of ``channels``.

Run with ``python -m bench.analytics``; needs Java 17, 8 GB of memory and 3 GB of disk. Spark generates the recordings:
five servers whose reports, one per second, name 499 channels each, with the publishers of the busiest. Prints a line
per recording, then one line of JSON. Exits with 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bench import exit_status
from dynamoth.errors import ConfigError
from dynamoth_analytics.reading import SCHEMAS
from dynamoth_analytics.session import check_java, open_session

SERVERS = 5
CHANNELS, OTHERS = 500, 1000
"""Rows per server and report: one for each channel that it names, the last for these others."""

WITH_PUBLISHERS = 100
"""Channels of a report whose publishers it names: the default of agents."""

BEGIN = 1_763_888_400
ROWS = (5_000_000, 50_000_000)
REPORT_S_MAX, GROWTH_MAX = 300.0, 12.0
"""The target for 50 million rows on 2 cores, and for its time over that of 5 million."""

REPORT_TIMEOUT_S = 1800
SAMPLE_S = 0.2


def generate(spark: SparkSession, folder: Path, rows: int) -> None:
    """Write a recording with so many rows of ``channels``."""
    seconds = rows // (SERVERS * CHANNELS)
    rank = F.col("id") % CHANNELS
    server = F.floor(F.col("id") / CHANNELS) % SERVERS
    second = F.floor(F.col("id") / (CHANNELS * SERVERS))
    noise = F.pmod(F.xxhash64("id"), F.lit(200)) / 1000
    busy = F.floor(400 * F.pow(rank + 1, F.lit(-0.8)) * (0.9 + noise)).cast("long")
    digits = [F.lpad(F.hex(F.pmod(F.xxhash64(rank, server, F.lit(each)), F.lit(1 << 40))), 16, "0") for each in (1, 2)]
    ids = F.when(rank < WITH_PUBLISHERS, F.unhex(F.concat(*digits)))
    head = (
        F.timestamp_seconds(BEGIN + second + server / SERVERS).alias("at"),
        F.lit("r1").alias("recorder"),
        F.concat(F.lit("s"), server).alias("server"),
        F.lit(1).alias("incarnation"),
        second.alias("sequence"),
        F.lit(1.0).alias("interval_s"),
    )
    channels = spark.range(0, seconds * SERVERS * CHANNELS, 1, max(2, rows // 2_500_000)).select(
        *head,
        F.when(rank < CHANNELS - 1, F.concat(F.lit("channel-"), server, F.lit("-"), rank)).alias("channel"),
        F.when(rank < CHANNELS - 1, 1).otherwise(OTHERS).alias("channels"),
        busy.alias("publications"),
        F.lit(2).alias("publishers"),
        (rank % 10 + 1).alias("subscribers"),
        (busy * (rank % 10 + 1)).alias("messages_sent"),
        (busy * 100).alias("bytes_in"),
        (busy * (rank % 10 + 1) * 100).alias("bytes_out"),
        ids.alias("publisher_ids"),
    )
    servers = spark.range(0, seconds * SERVERS, 1, 1).select(
        F.timestamp_seconds(BEGIN + F.floor(F.col("id") / SERVERS) + F.col("id") % SERVERS / SERVERS).alias("at"),
        F.lit("r1").alias("recorder"),
        F.concat(F.lit("s"), F.col("id") % SERVERS).alias("server"),
        F.lit(1).alias("incarnation"),
        F.floor(F.col("id") / SERVERS).alias("sequence"),
        F.lit(1.0).alias("interval_s"),
        (1_000_000 + F.pmod(F.xxhash64("id"), F.lit(100_000))).cast("double").alias("outgoing_bytes_per_s"),
        F.lit(10_000_000).alias("outgoing_bytes_per_s_max"),
        F.lit(0.3).alias("cpu_ratio"),
        F.lit(0.0).alias("observation_lag_s"),
    )
    for name, table in (("channels", channels), ("servers", servers)):
        types = {each.name: each.dataType for each in SCHEMAS[name]}
        cast = table.select(*(F.col(each).cast(types[each]).alias(each) for each in table.columns))
        hours = F.date_format("at", "yyyy-MM-dd").alias("date"), F.date_format("at", "HH").alias("hour")
        cast.select("*", *hours).write.partitionBy("date", "hour").parquet(str(folder / name))


def measure(recording: Path, out: Path) -> tuple[float, int]:
    """Return how long the report takes, from the command to its end, and how many bytes it had in memory at most."""
    started = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "dynamoth_analytics.report",
        str(recording),
        "--out",
        str(out),
        "--master=local[2]",
    ]
    most = 0
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as process:
        while process.poll() is None:
            most = max(most, resident_bytes(process.pid))
            if time.monotonic() - started > REPORT_TIMEOUT_S:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.monotonic() - started, most


def resident_bytes(session: int) -> int:
    """Return the memory of all processes of a session: the report, Java, and the Python workers of Spark."""
    pages = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if os.getsid(int(folder.name)) == session:
                pages += int((folder / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Generate, report, print."""
    try:
        check_java()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return exit_status.SKIPPED
    parser = argparse.ArgumentParser(prog="python -m bench.analytics", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of channels, in each recording")
    sizes: list[int] = parser.parse_args().rows
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {rows: Path(folder, str(rows)) for rows in sizes}
        with open_session(Namespace(master="local[2]", remote=None, spark_log="off"), "bench.analytics") as spark:
            for rows, place in places.items():
                generate(spark, place, rows)
        for rows, place in places.items():
            seconds, memory = measure(place, Path(folder, f"report-{rows}"))
            results |= {f"report_s_{rows}": seconds, f"memory_max_mb_{rows}": memory / 1e6}
            sys.stdout.write(f"{rows:>12,} rows of channels: {seconds:.1f} s, {memory / 1e9:.1f} GB of memory\n")
    is_met = all(results[f"report_s_{rows}"] <= REPORT_S_MAX for rows in sizes)
    results["growth"] = results[f"report_s_{max(sizes)}"] / results[f"report_s_{min(sizes)}"]
    results["processors"] = float(len(os.sched_getaffinity(0)))
    sys.stdout.write(f"{json.dumps(results)}\n")
    return 0 if is_met and results["growth"] <= GROWTH_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
