"""Publishers: what reports say of single ones.

A report names the busiest publishers of its busiest channels, and how many publications a channel had in all. So two
things are known of a publisher: in how many channels it is among the busiest, and the publications of those channels
that it had to itself. What it publishes besides others is not known, and that it is not named does not mean that it has
gone.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dynamoth.protocol.reports import ID_BYTES
from dynamoth_analytics.jobs.load import slot_of


def publisher_slots(channels: DataFrame, loads: DataFrame, slot_s: int) -> DataFrame:
    """Return one row per publisher and slot in which reports name it.

    ``publisher`` is the client's id in hexadecimal digits. ``channels`` is the mean number of channels at once (of a
    replicated one, each server counts), ``publications_per_s`` the rate in channels without other publishers. Both are
    means over ``seconds``: the slot, or what the reports of it cover where that is more.

    Args:
        channels: the table.
        loads: those of :func:`dynamoth_analytics.jobs.load.load`.
        slot_s: length of a slot in seconds.

    """
    ids = F.regexp_extract_all(F.lower(F.hex("publisher_ids")), F.lit(f".{{{2 * ID_BYTES}}}"), F.lit(0))
    alone = F.when(F.col("publishers") == 1, F.col("publications"))
    named = channels.where(F.length("publisher_ids") >= ID_BYTES).select(
        "server", slot_of(slot_s).alias("slot"), "interval_s", alone.alias("alone"), F.explode(ids).alias("publisher")
    )
    seconds = F.greatest(F.max("covered_s"), F.max("interval_s"), F.lit(float(slot_s)))
    covered = F.broadcast(loads.select("server", "slot", "covered_s"))
    return (
        named.join(covered, ["server", "slot"], "left")
        .groupBy("publisher", "slot")
        .agg(
            seconds.alias("seconds"),
            (F.sum("interval_s") / seconds).alias("channels"),
            (F.sum("alone") / seconds).alias("publications_per_s"),
        )
    )
