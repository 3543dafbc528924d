"""Publishers: what reports say of single ones.

A report names the busiest publishers of its busiest channels, and how many publications a channel had in all. So two
things are known of a publisher: in how many channels it is among the busiest, and the publications of the channels that
it has to itself. What it publishes besides others is not known, and that it is not named does not mean that it has
gone. Where a report does not name the publishers of all channels, a publisher is named in more of them when others
leave: then the number of its channels says nothing.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dynamoth.protocol.reports import ID_BYTES
from dynamoth_analytics.jobs.load import slot_of


def publisher_slots(channels: DataFrame, slots: DataFrame, loads: DataFrame, slot_s: int) -> DataFrame:
    """Return one row per publisher and slot in which reports name it.

    ``publisher`` is the client's id in hexadecimal digits. ``channels`` is the mean number of channels at once (of a
    replicated one, each server counts) over ``seconds``: the slot, or what the reports of it cover where that is more.
    It is null where reports did not name the publishers of all channels. ``publications_per_s`` is the highest rate of
    a channel without other publishers.

    Args:
        channels: the table.
        slots: those of :func:`dynamoth_analytics.jobs.channels.channel_slots`.
        loads: those of :func:`dynamoth_analytics.jobs.load.load`.
        slot_s: length of a slot in seconds.

    """
    unnamed = F.col("channel").isNull() | F.col("unidentified")
    cut = slots.groupBy("server", "slot").agg(F.max(unnamed).alias("cut"))
    servers = loads.select("server", "slot", "covered_s").join(cut, ["server", "slot"], "full")
    ids = F.regexp_extract_all(F.lower(F.hex("publisher_ids")), F.lit(f".{{{2 * ID_BYTES}}}"), F.lit(0))
    alone = F.when(F.col("publishers") == 1, F.col("publications") / F.nullif("interval_s", F.lit(0.0)))
    named = channels.where(F.length("publisher_ids") >= ID_BYTES).select(
        "server", slot_of(slot_s).alias("slot"), "interval_s", alone.alias("alone"), F.explode(ids).alias("publisher")
    )
    seconds = F.greatest(F.max("covered_s"), F.max("interval_s"), F.lit(float(slot_s)))
    return (
        named.join(F.broadcast(servers), ["server", "slot"], "left")
        .groupBy("publisher", "slot")
        .agg(
            seconds.alias("seconds"),
            F.when(~F.max("cut"), F.sum("interval_s") / seconds).alias("channels"),
            F.max("alone").alias("publications_per_s"),
        )
    )
