"""Gaps: what the recording does not know."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from dynamoth.recording import GapKind
from dynamoth_analytics.jobs.load import HOLE_S_MAX

NOTED_BY_ALL = (GapKind.AGENT_BLIND.value, GapKind.AGENT_RESTARTED.value)
"""Kinds that every recorder notes."""

NO_REPORTS = "no_reports"


def gaps(rows: DataFrame, loads: DataFrame, slot_s: int) -> DataFrame:
    """Return the table, and the times without reports of any server.

    What every recorder notes is there once.
    """
    heard_by_all = F.when(F.col("kind").isin(*NOTED_BY_ALL), "").otherwise(F.col("recorder"))
    once = rows.withColumn("of", heard_by_all).dropDuplicates(["kind", "server", "incarnation", "sequence", "of"])
    return once.drop("of").unionByName(without_reports(loads, slot_s), allowMissingColumns=True)


def without_reports(loads: DataFrame, slot_s: int) -> DataFrame:
    """Return the times without reports of any server, as rows of the table ``gaps``: more than ``HOLE_S_MAX``.

    Nothing else can say so: a recorder that does not run writes nothing.
    """
    in_order = Window.orderBy("slot")
    slots = loads.select("slot").distinct().withColumn("before", F.lag("slot").over(in_order))
    seconds = F.col("slot").cast("double") - F.col("before").cast("double") - slot_s
    rows = slots.select(
        F.col("slot").alias("at"),
        F.lit(NO_REPORTS).alias("kind"),
        seconds.alias("seconds"),
        F.lit("no server's report was recorded: did a recorder run?").alias("reason"),
    )
    return rows.where(F.col("seconds") > max(slot_s, HOLE_S_MAX))
