"""The settings of balancer and coordinator that were in force when a recording was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dynamoth.errors import ConfigError
from dynamoth.settings.sections import MigrationSettings, PlanningSettings
from dynamoth_analytics.errors import spark_errors
from dynamoth_analytics.reading import Recording
from dynamoth_balancer.admin.records import RecordedSettings, read_settings
from dynamoth_balancer.options import BalancerOptions
from dynamoth_broker.coordinator.records import read_settings as read_migration_settings
from dynamoth_broker.coordinator.settings import CoordinatorOptions

DEFAULTS = {item.name: item.default for item in fields(PlanningSettings) if isinstance(item.default, int | float)}

LED_NUMBER_MAX = 2
"""Settings in a balancer's first or second message are those of when it began to lead; later ones are repeated."""


@dataclass(frozen=True, slots=True)
class PresentSettings:
    """The settings that the latest recorded balancer led with; defaults where none are recorded."""

    settings: RecordedSettings
    #: Its incarnation; None where no settings are recorded.
    balancer: int | None = None
    #: When it began to lead, in seconds; None if that was not recorded.
    led_since: float | None = None

    @property
    def numbers(self) -> Mapping[str, float]:
        """Those that are numbers, by name."""
        return {name: getattr(self.settings.options, name) for name in DEFAULTS}

    @property
    def urls(self) -> Mapping[str, str]:
        """URLs of servers by id, as far as they are recorded."""
        return self.settings.servers

    @property
    def recorded(self) -> bool:
        """Whether they are recorded; False: all are defaults."""
        return self.balancer is not None


UNKNOWN = PresentSettings(RecordedSettings(BalancerOptions(), {}, ()))


def present_settings(recording: Recording) -> PresentSettings:
    """Return the settings in force; the defaults where none are recorded, or where they cannot be read.

    Raises BadRecording.
    """
    try:
        return settings_in_force(recording)
    except ConfigError:
        return UNKNOWN


def settings_in_force(recording: Recording) -> PresentSettings:
    """Return the settings in force; the defaults where none are recorded.

    Raises:
        BadRecording: a file is broken.
        ConfigError: a recorded value cannot be read, or is out of range.

    """
    with spark_errors():
        found = _latest(recording.table("settings"))
        if not found.recorded and recording.begin is not None:  # balancers repeat them, but not each second
            found = replace(_latest(recording.until_end("settings")), led_since=None)
    return found


def _latest(table: DataFrame) -> PresentSettings:
    """Return the latest message with settings of the balancer that has sent the latest one."""
    rows = table.withColumn("at", F.col("at").cast("double"))
    first = fields(BalancerOptions)[0].name
    balancers = (
        rows.where(F.col("name") == first)
        .groupBy("balancer")
        .agg(
            F.max("at").alias("at"),
            F.max("number").alias("latest"),  # by its number, as a clock may go back
            F.min(F.struct("number", "at")).alias("first"),
        )
    )
    found = balancers.orderBy(F.desc("at")).limit(1).collect()
    if not found:
        return UNKNOWN
    row = found[0]
    message = rows.where((F.col("balancer") == row["balancer"]) & (F.col("number") >= row["latest"]))
    texts = message.orderBy("number", "line").select("name", F.coalesce("value", F.lit("")).alias("value")).collect()
    settings = read_settings((text["name"], text["value"]) for text in texts)
    began_to_lead = row["first"]["number"] <= LED_NUMBER_MAX
    return PresentSettings(settings, row["balancer"], row["first"]["at"] if began_to_lead else None)


@dataclass(frozen=True, slots=True)
class CoordinatorInForce:
    """The settings that the latest recorded coordinator acted with; defaults where none are recorded."""

    options: CoordinatorOptions
    #: Whether they are recorded; False: all are defaults.
    recorded: bool = False


def coordinator_in_force(recording: Recording) -> CoordinatorInForce:
    """Return the settings of the coordinator; the defaults where none are recorded.

    Raises:
        BadRecording: a file is broken.
        ConfigError: a recorded value cannot be read, or is out of range.

    """
    with spark_errors():
        rows = recording.table("coordinator_settings").where(F.col("name").isNotNull())
        if recording.begin is not None and rows.isEmpty():
            rows = recording.until_end("coordinator_settings").where(F.col("name").isNotNull())
        latest = rows.groupBy("coordinator", "number").agg(F.max("at").alias("at")).orderBy(F.desc("at")).limit(1)
        found = rows.join(F.broadcast(latest.select("coordinator", "number")), ["coordinator", "number"])
        texts = [(row["name"], row["value"] or "") for row in found.select("name", "value").collect()]
    return CoordinatorInForce(read_migration_settings(texts), bool(texts))


def migration_settings(recording: Recording) -> MigrationSettings:
    """Return the settings of the coordinator; the defaults where none are recorded, or where they cannot be read."""
    try:
        return coordinator_in_force(recording).options
    except ConfigError:
        return CoordinatorOptions()
