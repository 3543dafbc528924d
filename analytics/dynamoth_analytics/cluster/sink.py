"""The Spark sink of channels: ``df.writeStream.format("dynamoth")``, and ``df.write.format("dynamoth")``.

>>> df.select("channel", "payload").writeStream.format("dynamoth").option("url", "dynamoth://10.0.0.3:6379")

Rows have the columns ``channel`` and ``payload``, each a string or bytes, and never null. A channel is one that users
may subscribe to, or without ``logs`` also that of a dataset (``d:NAME``). Other options than these are refused:

===============  ==================================================================================================
``url``          of the Dynamoth cluster
``logs``         the log servers, ``ID=URL`` separated by spaces: rows are appended to the log of their channel, and
                 then published
``ssl_...``      of log servers with ``rediss://``: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``,
                 ``ssl_cert_reqs``, as redis-py has them
``durable``      ``true``: the log servers lose nothing when they restart
``ordered_by``   a column. Several rows of one channel in a batch are published in its order, within a Spark partition
``retained``     how many publications a log keeps, at least (default 10000)
``ttl_s``        how long a log lives after its last reader or writer (default 7 days)
``term``         of the writer: a log refuses one with a smaller term than before (default 0)
===============  ==================================================================================================

What it promises
----------------
Without ``logs``: each row is published at least once, while a batch that Spark repeats publishes again.

With ``logs``, of a stream with one row per channel and batch: each row is appended exactly once, as the number of the
batch is the execution of the log. A new checkpoint begins at batch 0, which a log of later batches does not take: the
batch fails, and says so. Use other channels, or let the logs end first. (A log whose only batch is batch 0 takes it for
repeated.) Several rows of one channel in one Spark partition are an error; the batch is not published from that
partition. Rows of one channel must be in one partition: ``repartition("channel")``. Where they are not, the log keeps
the first, as the others look like those of a repeated task; the batch then fails, and says so. A log server that
restarts and is not ``durable`` begins its logs again: a batch that is repeated just then is appended again.

With ``logs`` and ``ordered_by``, or a batch (``df.write``): rows are appended at least once, in order within a Spark
partition.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.edge.interests import channel_interest
from dynamoth.edge.log import LogOptions, append_command, log_server, parse_appended
from dynamoth.edge.publications import LoggedPublication, pack_publication
from dynamoth.errors import ConfigError, DynamothError, MalformedMessage
from dynamoth_analytics.cluster.identity import check_ids
from dynamoth_analytics.cluster.options import check_names, read_flag
from dynamoth_analytics.cluster.publishing import ResultPublisher, publish_messages
from dynamoth_analytics.cluster.servers import TLS_OPTIONS, LogServers, read_servers

BATCH_ID_PROPERTY = "streaming.sql.batchId"
"""The property of a task with the number of its batch."""

OPTIONS = ("url", "logs", "durable", "ordered_by", "retained", "ttl_s", "term", *TLS_OPTIONS)
"""All options of the sink."""

_SPARKS_OWN = ("checkpointlocation", "queryname")
"""Options of each stream, which Spark reads and passes on to its sink."""

INLINE_BYTES_MAX = 64 * 1024
"""A longer payload is not published with its notice: brokers read it from the log."""

MESSAGES_MAX = 1000
"""Messages that are published at a time."""


class SinkFailed(DynamothError):
    """Raised when rows cannot be published as they are, or were not published."""

    code = "sink"


@dataclass
class _Published(WriterCommitMessage):
    """Which channels a task has published on; empty where the order does not matter."""

    channels: frozenset[str]


@dataclass(frozen=True)
class _Sink:
    """Publishes the rows of tasks, as the options say."""

    url: str
    servers: LogServers | None
    ordered_by: str | None
    options: LogOptions
    term: int

    def write(self, rows: Iterable[Row], execution: int | None) -> _Published:
        """Publish the rows of a task. ``execution`` is None where a batch has no number."""
        values = list(rows)
        if (column := self.ordered_by) is not None:
            values.sort(key=lambda row: _value(row, column))
        messages = [(self._channel(row), _bytes(_value(row, "payload"))) for row in values]
        if self.servers is None:
            self._publish([(channel.encode(), payload) for channel, payload in messages], is_needed=True)
        elif execution is None or self.ordered_by is not None:
            self._append(self.servers, messages)
        else:
            return self._append_once(self.servers, messages, execution)
        return _Published(frozenset())

    def _channel(self, row: Row) -> str:
        """Return the channel of a row. Raises SinkFailed where no user may subscribe to it."""
        value = _value(row, "channel")
        try:
            interest = channel_interest(value if isinstance(value, str) else bytes(value).decode())
        except (UnicodeDecodeError, MalformedMessage) as error:
            raise SinkFailed(f"column `channel` of a row is not the name of a channel: {error}") from error
        is_record = self.servers is None and interest.name.startswith(DATASET_PREFIX)
        if interest.is_reserved and not is_record:
            raise SinkFailed(
                f"channel {interest.name!r} is a reserved name: no user gets what is published there: use another one"
            )
        return interest.name

    def _append_once(self, servers: LogServers, messages: list[tuple[str, bytes]], execution: int) -> _Published:
        channels = frozenset(channel for channel, _ in messages)
        if len(channels) < len(messages):
            raise _several(Counter(channel for channel, _ in messages).most_common(1)[0][0])
        publisher = ResultPublisher(
            servers, self.url, "", 0, execution, 0, self.term, INLINE_BYTES_MAX, 0,
            self.options.retained_min, self.options.ttl_s,
        )  # fmt: skip
        publisher.publish_payloads((channel_interest(name).id, payload) for name, payload in messages)
        if publisher.overtaken:
            overtaken = min(name for name in channels if channel_interest(name).id in publisher.overtaken)
            raise _overtaken(overtaken, execution - 1)
        return _Published(channels)

    def _append(self, servers: LogServers, messages: list[tuple[str, bytes]]) -> None:
        run_ids = {id_: servers.run_id(id_) for id_ in servers.ids}
        notices: list[tuple[bytes, bytes]] = []
        for channel, payload in messages:
            interest = channel_interest(channel)
            server = log_server(interest.id, servers.ids)
            command = append_command(
                interest.id, payload, run_ids[server], secrets.randbits(64), self.options, self.term
            )
            place = parse_appended(servers.run(server, command))
            inline = payload if len(payload) <= INLINE_BYTES_MAX else None
            publication = LoggedPublication(place.epoch, place.offset, inline)
            notices.append((interest.log_channel, pack_publication(publication)))
        self._publish(notices, is_needed=False)

    def _publish(self, messages: list[tuple[bytes, bytes]], *, is_needed: bool) -> None:
        for start in range(0, len(messages), MESSAGES_MAX):
            failed = publish_messages(self.url, messages[start : start + MESSAGES_MAX])
            if failed and is_needed:
                raise SinkFailed(f"{failed} rows could not be published: is the cluster {self.url} there?")


def _several(channel: str) -> SinkFailed:
    return SinkFailed(
        f"channel {channel!r} has several rows in one batch. With option `logs`, a batch has one row for each channel,"
        " so that each is appended exactly once: aggregate them, or give option `ordered_by`, the column of their order"
        " (then each is appended at least once)"
    )


def _overtaken(channel: str, batch: int) -> SinkFailed:
    return SinkFailed(
        f"the log of channel {channel!r} has a later batch than {batch} already, and takes no row of this one. Either"
        " the checkpoint is a new or an older one: go on with that of the log's last batch, use other channels, or give"
        " option `ordered_by` (then each row is appended at least once). Or two streams write to this channel"
    )


def _value(row: Row, column: str) -> Any:
    """Return a value that is never null. Raises SinkFailed."""
    value = row[column]
    if value is None:
        raise SinkFailed(f"column `{column}` of a row is null: leave such rows out, or give it a value with coalesce()")
    return value


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _sink(options: Mapping[str, str], schema: StructType) -> _Sink:
    """Read the options, and check the columns. Raises ConfigError and LogServerFailed."""
    check_names(options, (*OPTIONS, *_SPARKS_OWN), "sink")
    ordered_by = options.get("ordered_by")
    for column in ("channel", "payload", *([ordered_by] if ordered_by else [])):
        if column not in schema.names:
            raise ConfigError(f"rows to be published need a column {column!r}; these have {', '.join(schema.names)}")
    for column in ("channel", "payload"):
        type_ = schema[column].dataType
        if not isinstance(type_, StringType | BinaryType):
            raise ConfigError(
                f"column {column!r} has to be a string or binary, not {type_.simpleString()}: make it one with"
                f" CAST({column} AS string), or of a struct, an array or a map with to_json({column})"
            )
    if not (url := options.get("url")):
        raise ConfigError("option `url` is missing: that of the Dynamoth cluster, as dynamoth://HOST:PORT")
    is_durable, logs = read_flag(options, "durable", default=False), options.get("logs")
    default = LogOptions()
    try:
        retained_min = int(options.get("retained", default.retained_min))
        ttl_s = float(options.get("ttl_s", default.ttl_s))
        term = int(options.get("term", "0"))
    except ValueError as error:
        raise ConfigError(f"options retained, ttl_s and term are numbers: {error}") from error
    servers = read_servers(logs, durable=is_durable, options=options) if logs else None
    if servers is not None:
        check_ids(servers, "option logs")
    return _Sink(url, servers, ordered_by, LogOptions(retained_min, ttl_s, is_durable), term)


class BatchWriter(DataSourceWriter):
    """Writes a DataFrame."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._sink = _sink(options, schema)

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Publish the rows of a task. Raises SinkFailed and LogServerFailed: then the task has failed."""
        return self._sink.write(iterator, None)


class StreamWriter(DataSourceStreamWriter):
    """Writes the batches of a stream."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._sink = _sink(options, schema)

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Publish the rows of a task. Raises SinkFailed and LogServerFailed: then the task has failed."""
        context = TaskContext.get()
        number = context.getLocalProperty(BATCH_ID_PROPERTY) if context is not None else None
        if number is None:
            raise SinkFailed("Spark does not give the number of the batch: this version of Spark is not supported")
        return self._sink.write(iterator, int(number) + 1)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Raise SinkFailed if several tasks had rows of one channel."""
        seen: set[str] = set()
        for message in messages:
            assert isinstance(message, _Published), "every task returns one"
            if both := seen & message.channels:
                raise _several(min(both))
            seen |= message.channels
