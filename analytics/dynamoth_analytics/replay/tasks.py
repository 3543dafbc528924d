"""Divides the combinations of a what-if into tasks of Spark."""

from __future__ import annotations

import math

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

TASKS_PER_CORE = 4
"""Enough that no core waits long for the last task; each more is another copy of a window."""

CLUSTER_CORES = 32
"""Cores to expect of a cluster: Spark Connect does not say how many there are, and a cluster may start them later."""

PARTITIONS_PER_TASK = 2
"""Spark chooses the partition of a task by its hash: few share one. An empty one costs some tenths of a second."""

PARTITIONS_MAX = 2000


def cores_of(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at once, as far as is known."""
    try:
        context = spark.sparkContext
    except PySparkException:
        return CLUSTER_CORES
    cores = context.defaultParallelism
    return cores if (context.master or "").startswith("local") else max(cores, CLUSTER_CORES)


def chunks_per_window(windows: int, combinations: int, cores: int) -> int:
    """Return into how many tasks the combinations of each window are divided; each gets a copy of the window.

    All windows together have about ``TASKS_PER_CORE`` tasks per core, and each has at least one.
    """
    return max(1, min(combinations, math.ceil(TASKS_PER_CORE * cores / windows)))


def partitions_of(tasks: int) -> int:
    """Return how many partitions so many tasks get."""
    return min(PARTITIONS_MAX, PARTITIONS_PER_TASK * tasks)
