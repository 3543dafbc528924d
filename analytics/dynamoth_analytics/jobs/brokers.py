"""Edge brokers: how loaded they were, how evenly, what sharing saved, and what each migration of users has brought.

The load of a broker is F_j = I_j + O_j, in bytes/s: each interest that it holds is fetched once (I_j), and delivered to
each of its users who has subscribed to it (O_j) (BAD, DEBS 2019, section 4). Its load ratio is what the coordinator
goes by: load and the weight of its users' connections over its capacity or, if that is higher, the use of the tightest
other resource.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dynamoth.edge.control import MoveEnd
from dynamoth.recording import BrokerDecisionState

BACK_S = 3600.0
"""A user who is moved back within this time was moved to and fro."""

SILENT_S_MIN = 3.0
"""A broker that does not report for less was late, at most."""

_REPORT = ("broker", "incarnation", "number")
_DECISION = ("coordinator", "term", "decision")
_WHEN = ("before", "predicted", "measured")
_FIGURES = ("ratio", "ratio_mean", "cov", "redis_egress")


def _slot(slot_s: int) -> Column:
    return F.timestamp_seconds(F.floor(F.col("at").cast("double") / slot_s) * slot_s)


def _over(value: Column, by: Column) -> Column:
    return value / F.nullif(by.cast("double"), F.lit(0.0))


def broker_load(brokers: DataFrame, interests: DataFrame, slot_s: int, connection_bytes_per_s: float) -> DataFrame:
    """Return one row per broker and slot: means over its reports.

    ``subscriptions`` and ``interests`` are those that reports name: all, unless there are more than they have room for.

    Args:
        brokers: the table.
        interests: the table ``broker_interests``.
        slot_s: length of a slot in seconds.
        connection_bytes_per_s: what each user counts, as a setting of the coordinator.

    """
    named = interests.groupBy(*_REPORT).agg(F.sum("users").alias("subscriptions"), F.count("*").alias("interests"))
    traffic = F.col("load_bytes_per_s") + F.lit(connection_bytes_per_s) * F.col("users")
    ratio = F.greatest(_over(traffic, F.col("capacity_bytes_per_s")), F.coalesce("other_ratio_max", F.lit(0.0)))
    reports = brokers.join(named, list(_REPORT), "left").fillna(0, ["subscriptions", "interests"])
    means = ("users", "load_bytes_per_s", "inbound_bytes_per_s", "other_ratio_max", "subscriptions", "interests")
    slots = (
        reports.withColumn("ratio", ratio)
        .groupBy("broker", _slot(slot_s).alias("slot"))
        .agg(
            F.count("*").alias("reports"),
            F.avg("ratio").alias("ratio"),
            F.max("ratio").alias("ratio_max"),
            *(F.avg(name).alias(name) for name in means),
            F.max("capacity_bytes_per_s").alias("capacity_bytes_per_s"),
            F.bool_or(F.coalesce("is_draining", F.lit(False))).alias("is_draining"),
        )
    )
    delivered = F.col("load_bytes_per_s") - F.col("inbound_bytes_per_s")
    return slots.withColumn("delivered_bytes_per_s", F.greatest(delivered, F.lit(0.0)))


def broker_balance(loads: DataFrame, interests: DataFrame, slot_s: int) -> DataFrame:
    """Return one row per slot: how evenly the brokers were loaded, and what sharing saved.

    Mean, maximum and cov are those of the brokers that were not being drained. ``sharing_factor`` is subscriptions per
    interest that a broker fetches. ``copies`` is how many brokers fetch an interest, on the average: moves of users to
    others with the same interests lower it. ``inbound_share`` is the part of the load that is fetched.

    Args:
        loads: rows of ``broker_load``.
        interests: the table ``broker_interests``.
        slot_s: length of a slot in seconds.

    """
    counted = F.when(~F.col("is_draining"), F.col("ratio"))
    mean = F.avg(counted)
    distinct = interests.groupBy(_slot(slot_s).alias("slot")).agg(F.count_distinct("interest").alias("interests"))
    sums = loads.groupBy("slot").agg(
        F.count("*").alias("brokers"),
        F.sum("users").alias("users"),
        mean.alias("ratio_mean"),
        F.max(F.when(~F.col("is_draining"), F.col("ratio_max"))).alias("ratio_max"),
        _over(F.stddev_pop(counted), mean).alias("cov"),
        F.sum("load_bytes_per_s").alias("load_bytes_per_s"),
        F.sum("inbound_bytes_per_s").alias("redis_egress"),
        F.sum("subscriptions").alias("subscriptions"),
        F.sum("interests").alias("fetched"),
    )
    fetched = F.col("fetched")
    return sums.join(distinct, "slot", "left").select(
        "*",
        _over(F.col("redis_egress"), F.col("load_bytes_per_s")).alias("inbound_share"),
        _over(F.col("subscriptions"), fetched).alias("sharing_factor"),
        _over(fetched, F.col("interests")).alias("copies"),
    )


def broker_silences(brokers: DataFrame) -> DataFrame:
    """Return one row per time in which a broker did not report: more than ``SILENT_S_MIN`` and three of its intervals.

    ``restarted`` is whether another process reported afterwards; null: the broker did not report again.
    """
    at = F.col("at").cast("double")
    order = Window.partitionBy("broker").orderBy("at", "number")
    follower = F.lead(at).over(order)
    end = F.max(at).over(Window.partitionBy())
    found = brokers.select(
        "broker",
        F.col("at").alias("begin"),
        (F.coalesce(follower, end) - at).alias("seconds"),
        F.coalesce("report_s", F.lit(0.0)).alias("report_s"),
        (F.lead("incarnation").over(order) != F.col("incarnation")).alias("restarted"),
    )
    long = F.col("seconds") > F.greatest(3 * F.col("report_s"), F.lit(SILENT_S_MIN))
    return found.where(long).drop("report_s")


def balance_sums(balance: DataFrame) -> DataFrame:
    """Return one row: means of ``broker_balance`` over its slots, and cov in the first and in the last slot."""
    return balance.agg(
        F.avg("cov").alias("cov"),
        F.min_by("cov", "slot").alias("cov_first"),
        F.max_by("cov", "slot").alias("cov_last"),
        _over(F.sum("redis_egress"), F.sum("load_bytes_per_s")).alias("inbound_share"),
        _over(F.sum("subscriptions"), F.sum("fetched")).alias("sharing_factor"),
        F.avg("copies").alias("copies"),
    )


def by_broker(loads: DataFrame, high: float) -> DataFrame:
    """Return one row per broker: means over its slots. ``high``: a broker above this load ratio is overloaded."""
    over = F.when(F.col("ratio") > high, 1).otherwise(0)
    return loads.groupBy("broker").agg(
        F.avg("ratio").alias("ratio"),
        F.max("ratio_max").alias("ratio_max"),
        F.avg(over).alias("overloaded_share"),
        F.avg("users").alias("users"),
        F.max("users").alias("users_max"),
        F.avg("load_bytes_per_s").alias("load_bytes_per_s"),
        _over(F.sum("inbound_bytes_per_s"), F.sum("load_bytes_per_s")).alias("inbound_share"),
        _over(F.sum("subscriptions"), F.sum("interests")).alias("sharing_factor"),
        F.bool_or("is_draining").alias("was_draining"),
    )


def broker_decisions(decisions: DataFrame) -> DataFrame:
    """Return one row per decision of a coordinator, with the loads before, as predicted, and as measured.

    ``cov_error`` is measured less predicted, and ``ratio_gain`` before less measured, of the largest load ratio. What
    is not known is null: nothing is measured in a dry run, or when the coordinator ended before.
    """
    whole = decisions.where(F.col("broker").isNull() & F.col("decision").isNotNull())
    order = F.struct("number", "line")

    def of(state: BrokerDecisionState, value: Column) -> Column:
        return F.when(F.col("state") == state.value, value)

    made = F.min(of(BrokerDecisionState.MADE, F.col("clock_s")))
    settled = F.max(of(BrokerDecisionState.SETTLED, F.col("clock_s")))
    found = whole.groupBy(*_DECISION).agg(
        F.min("at").alias("at"),
        *(F.max_by(name, order).alias(name) for name in ("kind", "reason", "outcome", "is_dry_run", "moves")),
        F.max(of(BrokerDecisionState.SETTLED, F.col("moved"))).alias("moved"),
        F.max(of(BrokerDecisionState.SETTLED, F.col("failed"))).alias("failed"),
        (settled - made).alias("seconds"),
        *(F.max(f"{name}_{when}").alias(f"{name}_{when}") for name in _FIGURES for when in _WHEN),
    )
    return found.select(
        "*",
        (F.col("cov_measured") - F.col("cov_predicted")).alias("cov_error"),
        (F.col("ratio_before") - F.col("ratio_measured")).alias("ratio_gain"),
    )


def decision_sums(found: DataFrame) -> DataFrame:
    """Return one row: how many decisions with moves there are among ``broker_decisions``, and medians of their cov."""
    measured = F.col("cov_measured").isNotNull()
    return found.where("moves > 0").agg(
        F.count("*").alias("decisions"),
        F.count_if(F.col("kind") == "shuffle").alias("shuffles"),
        F.count_if(F.col("is_dry_run")).alias("dry_runs"),
        F.count_if(measured).alias("measured"),
        *(F.percentile_approx(F.when(measured, F.col(f"cov_{when}")), 0.5).alias(f"cov_{when}") for when in _WHEN),
    )


def shuffles(found: DataFrame) -> DataFrame:
    """Return the shuffles among the rows of ``broker_decisions``, with what they have changed of the Redis egress."""
    saved = _over(F.col("redis_egress_before") - F.col("redis_egress_measured"), F.col("redis_egress_before"))
    return found.where("kind = 'shuffle'").withColumn("redis_egress_saved", saved)


def broker_effects(decisions: DataFrame) -> DataFrame:
    """Return one row per decision and broker that its moves touched; ``error`` is measured less predicted."""
    rows = decisions.where(F.col("broker").isNotNull())
    ratios = (F.max(f"ratio_{when}").alias(f"ratio_{when}") for when in _WHEN)
    found = rows.groupBy(*_DECISION, "broker").agg(F.min("at").alias("at"), *ratios)
    return found.withColumn("error", F.col("ratio_measured") - F.col("ratio_predicted"))


def migrations(moves: DataFrame, effects: DataFrame) -> DataFrame:
    """Return one row per move: how it ended, and the load ratios of both brokers.

    ``predicted`` is after this move and those before it in the plan; ``measured`` is after all moves of the decision.
    ``back_s`` is after which time the user was moved back, if within an hour and by the same coordinator process.

    Args:
        moves: the table ``broker_moves``.
        effects: rows of ``broker_effects``.

    """
    once = ("load_bytes_per_s", *(f"{side}_ratio_{when}" for side in ("from", "to") for when in _WHEN[:2]))
    found = moves.groupBy(*_DECISION, "session", "from_broker", "to_broker").agg(
        F.min("at").alias("at"),
        F.max("end").alias("end"),
        F.max("seconds").alias("seconds"),
        F.max(F.size("interests")).alias("interests"),
        *(F.max(name).alias(name) for name in once),
    )
    for side in ("from", "to"):
        measured = effects.select(
            *_DECISION, F.col("broker").alias(f"{side}_broker"), F.col("ratio_measured").alias(f"{side}_ratio_measured")
        )
        found = found.join(measured, [*_DECISION, f"{side}_broker"], "left")
    later = Window.partitionBy("coordinator", "session").orderBy("at")
    is_back = (F.lead("to_broker").over(later) == F.col("from_broker")) & (F.col("end") == MoveEnd.LEFT.value)
    away_s = F.lead("at").over(later).cast("double") - F.col("at").cast("double")
    return found.withColumn("back_s", F.when(is_back & (away_s <= BACK_S), away_s))


def migration_ends(found: DataFrame) -> DataFrame:
    """Return one row per end of moves, of the rows of ``migrations``: how many, how long they took, how many went back.

    A null end: the recording lacks it, nobody was to be moved (dry run), or it is still going on.
    """
    return found.groupBy("end").agg(
        F.count("*").alias("moves"),
        F.sum("load_bytes_per_s").alias("load_bytes_per_s"),
        F.percentile_approx("seconds", 0.5).alias("seconds"),
        F.max("seconds").alias("seconds_max"),
        F.count("back_s").alias("back"),
    )
