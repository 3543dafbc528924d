"""The tables of a recording: their names, columns and keys.

Recorders write them, and the jobs of ``analytics`` read them.

A recording is a folder with one folder per table, and below that ``date=YYYY-MM-DD/hour=HH/*.parquet``, by ``at`` in
UTC. Recorders and jobs make their schemas (Arrow, Spark) from these definitions.

Several recorders may write one recording. Rows with equal *keys* are the same event, seen twice: jobs keep the first.

A later version may add columns, at the end, and never removes one or gives it another meaning. Jobs keep unknown
columns. Missing columns are null, and the report names them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

VERSION = 1
"""Version of the tables. Each file has it in its metadata, under ``VERSION_KEY``."""

VERSION_KEY = "dynamoth.recording"

TEXT_CHARACTERS_MAX = 4096
"""Bound of a text in a cell, in characters, and of a list, in elements. The name of a channel has up to 1024 bytes in a
report, and an escaped byte (``\\xff``) takes four characters."""


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


class GapKind(enum.StrEnum):
    """What is missing: column ``kind`` of table ``gaps``. Each says what ``seconds`` is there.

    ``count`` is the number of missing reports or lost rows, and null for all other kinds.
    """

    #: Reports did not arrive, although the recorder listened. ``seconds``: the length of their intervals together.
    REPORT_MISSING = "report_missing"
    #: An agent saw nothing of what was published. ``seconds``: how long, right before the interval of its report.
    AGENT_BLIND = "agent_blind"
    #: An agent has started again. ``seconds``: from the end of the last interval that the old one saw to the begin of
    #: the new one's first interval. An upper bound if that report waited for the recorder.
    AGENT_RESTARTED = "agent_restarted"
    #: The recorder did not listen at a server. ``seconds``: from the last sign of the lost connection until it listened
    #: again, to everything.
    RECORDER_AWAY = "recorder_away"
    #: The recorder did not run. ``seconds``: how late it was. What it heard afterwards, except reports, is dated too
    #: late by up to this.
    RECORDER_LATE = "recorder_late"
    #: Rows of one table were lost, as the recording could not be written and memory was full. ``seconds``: how long it
    #: could not be written.
    ROWS_LOST = "rows_lost"
    #: A probe did not return. ``seconds``: how long the recorder had waited when it gave it up.
    PROBE_LOST = "probe_lost"


class DecisionKind(enum.StrEnum):
    """What a row of table ``decisions`` is about: its column ``kind``."""

    #: A channel gets another assignment; one row for each server that this touches.
    MOVE = "move"
    #: Something that the balancer noticed and cannot change.
    FINDING = "finding"
    #: The load ratio of a server after the moves of a decision.
    OUTCOME = "outcome"
    #: An administrator has paused the balancer.
    PAUSED = "paused"
    #: An administrator lets the balancer decide again.
    RESUMED = "resumed"


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
    # As in the agent's report: dynamoth.protocol.reports.Report.
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
"""One row per report of an agent. ``at`` is the end of its interval: when the recorder got the report or, if that was
late, when it was due after the report before it."""

CHANNELS = _table(
    "channels",
    "server incarnation sequence channel",
    server=_TEXT,
    incarnation=_WHOLE,
    sequence=_WHOLE,
    interval_s=_NUMBER,
    #: As :func:`channel_text` returns it. Null: the sum of the channels that the report does not name.
    channel=_TEXT,
    #: How many channels the row stands for: 1 if it has a name.
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
"""One row per report and channel, and one for all channels that the report does not name, if any. Counts are those of
the interval, as in ``ChannelColumns``. A recorder writes the rows of a report next to each other into one file: readers
rely on that."""

PLANS = _table(
    "plans",
    "balancer number line",
    #: The incarnation of the balancer, the number of its message, and the index of the row in it.
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
    #: A :class:`DecisionKind`.
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
    #: Load ratio of ``server`` before this move.
    ratio_before=_NUMBER,
    #: Predicted load ratio after this move and the earlier moves of the decision.
    ratio_predicted=_NUMBER,
    #: Only in outcomes: the load ratio ``averaging_s`` after all moves of the decision had settled.
    ratio_measured=_NUMBER,
    # The state that a replay needs: in the first row of a decision, and in those of pauses.
    #: Time on the balancer's monotonic clock, in seconds. Its zero is arbitrary.
    clock_s=_NUMBER,
    #: The latest reports that the balancer has heard since the previous such row. Each is a text with server,
    #: incarnation, sequence and time on the same clock.
    reports=Type.TEXTS,
    #: The latest changes that have settled since the previous such row. Each is a text with time on the same clock and
    #: channel.
    settled=Type.TEXTS,
)
"""One row per move and server that it touches, finding, outcome and server, and begin and end of a pause."""

SETTINGS = _table(
    "settings", "balancer number line", balancer=_WHOLE, number=_WHOLE, line=_WHOLE, name=_TEXT, value=_TEXT
)
"""The settings of a balancer when it began to lead, and every ten seconds since. ``value`` is JSON.

``dynamoth_balancer.admin.records.read_settings`` reads the rows of one message.
"""

LATENCY = _table(
    "latency",
    "recorder server number",
    server=_TEXT,
    number=_WHOLE,
    #: From PUBLISH to receipt, on the recorder's own connection. Null: it did not return in time.
    latency_s=_NUMBER,
)
"""One row per probe: a message on a channel of the recorder's own at each server."""

GAPS = _table(
    "gaps",
    "kind server incarnation sequence recorder",
    #: A :class:`GapKind`.
    kind=_TEXT,
    server=_TEXT,
    # Incarnation of the agent and sequence of its first report after the gap. In gaps of the recorder itself,
    # incarnation is null, and sequence is a number of the recorder that makes the key unique.
    incarnation=_WHOLE,
    sequence=_WHOLE,
    #: As the kind says. The gap ends at ``at`` or, if it is of an agent, where the interval of that report begins.
    seconds=_NUMBER,
    count=_WHOLE,
    #: The cause, in words.
    reason=_TEXT,
)
"""Events and times that the recording lacks."""

MERGING_LOCK = ".merging.lock"
"""A file in the folder of a recording. A recorder locks it while it merges, and a reader, shared, against that."""

BALANCER_TABLES = {table.name: table for table in (PLANS, DECISIONS, SETTINGS)}
"""The tables whose rows a balancer sends. Recorders make the rows of the others."""

TABLES = {table.name: table for table in (SERVERS, CHANNELS, *BALANCER_TABLES.values(), LATENCY, GAPS)}


def channel_text(channel: bytes) -> str:
    r"""Return the name of a channel as text: bytes that are not UTF-8 become ``\xNN``, and backslashes are doubled."""
    return channel.replace(b"\\", rb"\\").decode(errors="backslashreplace")


_ESCAPED = re.compile(rb"\\(?:x([0-9a-f]{2})|\\)")


def channel_bytes(text: str) -> bytes:
    """Return the name of a channel from the text that :func:`channel_text` has returned."""
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"\\", text.encode())
