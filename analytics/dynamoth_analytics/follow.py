"""``dynamoth report --follow``: load, channels and anomalies of the last hour, kept current while recorders write.

Theory of operation
-------------------
Structured Streaming reads each file of the tables ``servers`` and ``channels`` once; its checkpoint says which it has
read. Batch *n* writes the folder ``batches/n`` from the folder of batch *n* - 1 and from its new rows: the reports and
the slots of channels of the last hour, and the tables of all jobs, which are the same code as in a report. Then the
link ``current`` and the page change over. A batch depends on nothing else. So when it is interrupted, Spark does it
again from the same files, with the same result.

A row comes again from a second recorder, and in the file into which a recorder has merged others. The folder of a batch
says of which reports it has rows (``seen``), so those that come again are dropped. Rows older than an hour are, too.

The jobs themselves are no streaming queries: medians of the past, ranks and joins of results are not among what
Structured Streaming can keep current. An hour of slots is small, and takes a few seconds.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from dynamoth.errors import ConfigError, DynamothError
from dynamoth.recording import CHANNELS, SERVERS
from dynamoth_analytics.errors import BadRecording, spark_errors
from dynamoth_analytics.files import hours_of, is_url
from dynamoth_analytics.jobs import anomalies, channels
from dynamoth_analytics.jobs.runner import SLOTS_DRAWN_MAX, Jobs, channel_jobs, load_jobs
from dynamoth_analytics.output import new_folder
from dynamoth_analytics.page.drawing import draw_recent
from dynamoth_analytics.page.findings import findings
from dynamoth_analytics.reading import SCHEMAS, Recording, made
from dynamoth_analytics.recorded_settings import present_settings
from dynamoth_analytics.text import time_format

TRIGGER = "10 seconds"
"""Recorders write every 5 s."""

PARTITIONS_MAX = 4
"""A batch has few rows, and each partition costs some time."""

RECENT = timedelta(hours=1)
AHEAD_MAX = timedelta(hours=1)
"""Rows that are further in the future are dropped."""

SLOT_S = 5
DRAWN_SLOT_S = SLOT_S * -(-int(RECENT.total_seconds()) // SLOT_S // SLOTS_DRAWN_MAX)

PAGE = "report.html"

REPORT_COLUMNS = (
    *("at", *SERVERS.key, "interval_s", "outgoing_bytes_per_s", "outgoing_bytes_per_s_max", "cpu_ratio"),
    "observation_lag_s",
)
CHANNEL_COLUMNS = ("at", *CHANNELS.key, *channels.COLUMNS)
_TYPES = {each.name: each for name in ("channels", "servers") for each in SCHEMAS[name]}
SCHEMA = StructType([_TYPES[name] for name in dict.fromkeys((*REPORT_COLUMNS, *CHANNEL_COLUMNS))])
"""Of both tables together. What a table does not have is null."""

SEEN = ("is_channel", *SERVERS.key)
SEEN_SCHEMA = "is_channel boolean, server string, incarnation long, sequence long, at timestamp"
REPORTS_SCHEMA = StructType([_TYPES[name] for name in REPORT_COLUMNS])
SLOTS_SCHEMA = (
    "channel string, server string, slot timestamp, seconds double, publications long, messages_sent long,"
    " bytes_in long, bytes_out long, publishers long, subscribers double, channels long"
)


def follow_folder(given: str | None, recording: str) -> Path:
    """Return the folder for a report that follows: a new one, or one that followed the same recording.

    Raises:
        ConfigError: it is neither, or cannot be written.

    """
    mark = Path(given or "", "recording.txt")
    if given is None or not mark.is_file():
        out = new_folder(given, "report")
        (out / mark.name).write_text(recording, encoding="utf-8")
        return out
    if (other := mark.read_text(encoding="utf-8")) != recording:
        raise ConfigError(f"--out {given} follows another recording, {other}: give a new folder")
    return mark.parent.resolve()


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Tables of the last hour, as a batch has left them."""

    seen: DataFrame
    reports: DataFrame
    slots: DataFrame


class Follower:
    """Keeps the report of a recording current, in the folder ``out``."""

    def __init__(self, spark: SparkSession, folder: str, out: Path, say: Callable[[str], None]) -> None:
        self._spark = spark
        self._folder = folder
        self._out = out
        self._say = say
        #: Why a batch has failed.
        self._failure: Exception | None = None

    def start(self, begin: datetime | None = None, **trigger: Any) -> StreamingQuery:
        """Start to follow. Rows before ``begin`` are not read; None: begin an hour before the newest hour.

        ``trigger`` is that of Spark's ``DataStreamWriter``; none: every ``TRIGGER``.
        """
        partitions = int(self._spark.conf.get("spark.sql.shuffle.partitions") or PARTITIONS_MAX)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(min(partitions, PARTITIONS_MAX)))
        source = self._spark.readStream.schema(SCHEMA).option("recursiveFileLookup", "true")
        rows = source.option("pathGlobFilter", "*.parquet").parquet(f"{self._folder}/{{servers,channels}}")
        if (first := begin or _recent_begin(self._folder)) is not None:
            rows = rows.where(F.col("at") >= F.lit(first))
        writer = rows.writeStream.option("checkpointLocation", str(self._out / "checkpoint"))
        return writer.foreachBatch(self._on_batch).trigger(**trigger or {"processingTime": TRIGGER}).start()

    def wait(self, query: StreamingQuery) -> None:
        """Wait for the end of a query. Raises DynamothError when it fails."""
        try:
            with spark_errors():
                query.awaitTermination()
        except DynamothError:
            if self._failure is not None:
                raise self._failure from None
            raise

    def _on_batch(self, rows: DataFrame, number: int) -> None:
        try:
            with spark_errors():
                self._batch(rows, number)
        except Exception as error:  # Spark raises one of its own instead
            self._failure = error
            raise

    def _batch(self, rows: DataFrame, number: int) -> None:
        """Make the folder of a batch from that of the batch before and the new rows."""
        started = time.monotonic()
        folder, before = (self._out / "batches" / str(each) for each in (number, number - 1))
        if number and not before.is_dir():
            raise BadRecording(f"{before} is not there, from which to go on: give a new folder with --out")
        _keep_only(before)
        jobs = Jobs(folder)
        earlier = self._earlier(before if number else None)
        # One row of a wrong clock must not make all others too old.
        rows = rows.where(F.col("at") <= F.lit(datetime.now(UTC) + AHEAD_MAX))
        new = rows.withColumn("is_channel", F.col("channels").isNotNull()).join(
            F.broadcast(earlier.seen), list(SEEN), "left_anti"
        )
        new = new.dropDuplicates(["is_channel", *CHANNELS.key]).persist()
        try:
            reports = earlier.reports.unionByName(new.where("not is_channel").select(*REPORT_COLUMNS))
            slots = channels.channel_slots(new.where("is_channel"), SLOT_S)
            ends = F.min("at").cast("double").alias("oldest"), F.max("at").cast("double").alias("newest")
            extent = reports.agg(*ends).collect()[0]
            oldest, newest = (datetime.fromtimestamp(extent[name] or 0, UTC) for name in ("oldest", "newest"))
            since = F.lit(newest - RECENT)
            jobs.run("seen", lambda: earlier.seen.unionByName(_seen(new)).where(F.col("at") > since))
            reports = jobs.run("reports", lambda: reports.where(F.col("at") > since))
            combined = channels.combined(earlier.slots.unionByName(slots))
            slots = jobs.run("channel_slots", lambda: combined.where(F.col("slot") > since))
        finally:
            new.unpersist()
        begin = max(oldest, newest - RECENT)
        sentence = self._draw(jobs, reports, slots, begin, newest) if extent["newest"] else "no server has reported yet"
        _point(self._out / "current", folder)
        self._say(f"{newest:%H:%M:%S}  {sentence} ({time.monotonic() - started:.1f} s)")

    def _earlier(self, before: Path | None) -> _Earlier:
        """Return what the batch before has left; None: there is none."""
        if before is None:
            return _Earlier(*(made(self._spark, [], schema) for schema in (SEEN_SCHEMA, REPORTS_SCHEMA, SLOTS_SCHEMA)))
        return _Earlier(
            *(self._spark.read.parquet(str(before / name)) for name in ("seen", "reports", "channel_slots"))
        )

    def _draw(self, jobs: Jobs, reports: DataFrame, slots: DataFrame, begin: datetime, newest: datetime) -> str:
        """Run the jobs, draw the page, and return the main finding."""
        spark = reports.sparkSession
        recording = Recording(spark, self._folder, newest - RECENT, compares_clocks=False)
        settings = present_settings(recording)
        spans = channels.replicated_spans(recording.until_end("plans"))
        high = settings.numbers["load_ratio_high"]
        load_jobs(jobs, reports, slots, slot_s=SLOT_S, drawn_slot_s=DRAWN_SLOT_S, high=high)
        loads = channel_jobs(jobs, slots, spans, SLOT_S)
        departed = jobs.run("anomalies", lambda: anomalies.anomalies(reports, loads), F.desc("at"))
        jobs.draw("incomplete", anomalies.incomplete(departed))
        jobs.drawn.settings, jobs.drawn.settings_recorded = settings.numbers, settings.recorded
        jobs.drawn.slot_s, jobs.drawn.when = SLOT_S, time_format(begin, newest)
        sentences = findings(jobs.drawn)
        hidden = self._out / f".{PAGE}"
        hidden.write_text(draw_recent(jobs.drawn, sentences, begin, newest), encoding="utf-8")
        hidden.replace(self._out / PAGE)
        return sentences[0]


def _seen(rows: DataFrame) -> DataFrame:
    """Return of which reports there are rows, and when they came."""
    return rows.groupBy(*SEEN).agg(F.max("at").alias("at"))


def _recent_begin(folder: str) -> datetime | None:
    """Return the begin of the hour before the newest one; None where only Spark can look."""
    if is_url(folder):
        return None
    hours = (hour for hour in hours_of(Path(folder, SERVERS.name)) if hour <= datetime.now(UTC) + AHEAD_MAX)
    newest = max(hours, default=None)
    return newest and newest - RECENT


def _keep_only(batch: Path) -> None:
    """Delete the folders of all other batches: older ones, and one that was interrupted."""
    batch.parent.mkdir(exist_ok=True)
    for each in batch.parent.iterdir():
        if each != batch:
            shutil.rmtree(each)


def _point(link: Path, folder: Path) -> None:
    """Make a link point at another folder, at once."""
    hidden = link.with_name(f".{link.name}")
    hidden.unlink(missing_ok=True)
    hidden.symlink_to(folder.relative_to(link.parent))
    os.replace(hidden, link)
