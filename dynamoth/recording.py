"""The tables of a recording: their names, columns and keys.

Recorders write them, and the jobs of ``analytics`` read them.

A recording is a folder with one folder per table, and below that ``date=YYYY-MM-DD/hour=HH/*.parquet``, by ``at`` in
UTC. Recorders and jobs make their own schemas (Arrow, Spark) from what stands here.

Several recorders may write one recording. Rows with equal *keys* are the same event, seen twice: jobs keep the first.

A later version may add columns, at the end, and never removes one or gives it another meaning. Jobs keep columns that
they do not know, and name those that are missing, which are null then.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

VERSION = 1
"""Of these tables; in the metadata of each file, under ``VERSION_KEY``."""

VERSION_KEY = "dynamoth.recording"

NAME_CHARACTERS_MAX = 4096
"""Longest text in a cell, and longest list."""


class Type(enum.Enum):
    """The type of a column. Each may be null."""

    #: UTC, in microseconds.
    TIME = "time"
    TEXT = "text"
    #: 64 bits, with a sign.
    WHOLE = "whole"
    NUMBER = "number"
    TRUTH = "truth"
    BYTES = "bytes"
    TEXTS = "texts"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    type: Type


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its columns in order, and the names of those that identify an event."""

    name: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]


def _table(name: str, key: str, /, **columns: Type) -> Table:
    first = {"at": Type.TIME, "recorder": Type.TEXT}
    return Table(name, tuple(key.split()), tuple(Column(each, type_) for each, type_ in (first | columns).items()))


_TEXT, _WHOLE, _NUMBER = Type.TEXT, Type.WHOLE, Type.NUMBER

SERVERS = _table(
    "servers",
    "server incarnation sequence",
    server=_TEXT,
    # Those of the agent's report: dynamoth.protocol.reports.Report.
    incarnation=_WHOLE,
    sequence=_WHOLE,
    interval_s=_NUMBER,
    plan_version=_WHOLE,
    outgoing_bytes_per_s_max=_WHOLE,
    outgoing_bytes_per_s=_NUMBER,
    outgoing_is_estimate=Type.TRUTH,
    incoming_bytes_per_s=_NUMBER,
    cpu_ratio=_NUMBER,
    memory_bytes=_WHOLE,
    memory_bytes_max=_WHOLE,
    connections=_WHOLE,
    connections_max=_WHOLE,
    output_buffer_bytes_max=_WHOLE,
    client_buffers_bytes=_WHOLE,
    channels_subscribed=_WHOLE,
    observation_lag_s=_NUMBER,
    blind_s=_NUMBER,
    interruptions=_WHOLE,
    observing=Type.TRUTH,
    #: Each a kind and a text, with ": " between them.
    problems=Type.TEXTS,
    messages_untracked=_WHOLE,
    publishers_uncounted=_WHOLE,
)
"""One row per report of an agent. ``at`` is the end of its interval: when the recorder got it or, of a report that came
late, when it was due after the one before it."""

CHANNELS = _table(
    "channels",
    "server incarnation sequence channel",
    server=_TEXT,
    incarnation=_WHOLE,
    sequence=_WHOLE,
    interval_s=_NUMBER,
    #: Bytes that are not UTF-8 as ``\xNN``. Null: the sum of the channels that the report does not name.
    channel=_TEXT,
    #: How many channels the row stands for: 1 for one with a name.
    channels=_WHOLE,
    publications=_WHOLE,
    publishers=_WHOLE,
    subscribers=_WHOLE,
    messages_sent=_WHOLE,
    bytes_in=_WHOLE,
    bytes_out=_WHOLE,
    publisher_ids=Type.BYTES,
    subscriber_ids=Type.BYTES,
)
"""One row per report and channel. Counts are those of the interval, as in ``ChannelColumns``."""

PLANS = _table(
    "plans",
    "balancer number line",
    #: The incarnation of the balancer, the number of its message, and the row in it.
    balancer=_WHOLE,
    number=_WHOLE,
    line=_WHOLE,
    version=_WHOLE,
    channel=_TEXT,
    from_mode=_TEXT,
    from_servers=Type.TEXTS,
    to_mode=_TEXT,
    to_servers=Type.TEXTS,
    #: prepared, active or settled.
    phase=_TEXT,
    epoch=_WHOLE,
    reason=_TEXT,
)
"""One row per channel whose entry changed in a version of the plan."""

DECISIONS = _table(
    "decisions",
    "balancer number line",
    balancer=_WHOLE,
    number=_WHOLE,
    line=_WHOLE,
    #: Counts the decisions of a balancer, from 1.
    decision=_WHOLE,
    #: move, finding or outcome; or paused or resumed, by an administrator.
    kind=_TEXT,
    #: replicate, relieve, drain ...
    goal=_TEXT,
    reason=_TEXT,
    channel=_TEXT,
    from_mode=_TEXT,
    from_servers=Type.TEXTS,
    to_mode=_TEXT,
    to_servers=Type.TEXTS,
    server=_TEXT,
    #: Load ratio of ``server`` when the decision was made.
    ratio_before=_NUMBER,
    #: What the move was to make of it, other moves of the decision before it included.
    ratio_predicted=_NUMBER,
    #: In outcomes: what it was ``averaging_s`` after all moves of the decision had settled.
    ratio_measured=_NUMBER,
    # What a replay needs to be in the same state. In the first row of a decision, and where it was paused or resumed:
    #: When, by the balancer's own clock, which begins anywhere.
    clock_s=_NUMBER,
    #: The latest reports that it has heard since such a row: each a server, incarnation, sequence and that clock.
    reports=Type.TEXTS,
    #: The latest changes that have settled since such a row: each that clock and a channel.
    settled=Type.TEXTS,
)
"""One row per move and server that it touches, per finding, per server of an outcome, and per pause and its end."""

SETTINGS = _table(
    "settings", "balancer number line", balancer=_WHOLE, number=_WHOLE, line=_WHOLE, name=_TEXT, value=_TEXT
)
"""The settings of a balancer's machine when it began to lead, and every ten seconds since. ``value`` is JSON.

``dynamoth_balancer.admin.records.read_settings`` reads the rows of one message.
"""

LATENCY = _table(
    "latency",
    "recorder server number",
    server=_TEXT,
    number=_WHOLE,
    #: From PUBLISH to receipt, on the recorder's own connection. Null: it did not come back in time.
    latency_s=_NUMBER,
)
"""One row per probe: a message on a channel of the recorder's own at each server."""

GAPS = _table(
    "gaps",
    "kind server incarnation sequence recorder",
    #: report_missing, agent_blind (nobody saw what was published), recorder_away, recorder_late or probe_lost.
    kind=_TEXT,
    server=_TEXT,
    incarnation=_WHOLE,
    #: Of the first report after the gap; otherwise the recorder's own number.
    sequence=_WHOLE,
    seconds=_NUMBER,
    count=_WHOLE,
    reason=_TEXT,
)
"""What the recording does not know."""

MERGING_LOCK = ".merging.lock"
"""A file in the folder of a recording. A recorder locks it while it merges, and a reader, shared, against that."""

BALANCER_TABLES = {table.name: table for table in (PLANS, DECISIONS, SETTINGS)}
"""Those whose rows a balancer sends. Recorders make the others themselves."""

TABLES = {table.name: table for table in (SERVERS, CHANNELS, *BALANCER_TABLES.values(), LATENCY, GAPS)}


def channel_text(channel: bytes) -> str:
    """Return the name of a channel as tables have it: bytes that are not UTF-8, and backslashes, are escaped."""
    return channel.replace(b"\\", rb"\\").decode(errors="backslashreplace")


_ESCAPED = re.compile(rb"\\(?:x([0-9a-f]{2})|\\)")


def channel_bytes(text: str) -> bytes:
    """Return the name of a channel that :func:`channel_text` has made a text of."""
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"\\", text.encode())
