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

# Edge brokers and their coordinator.

BROKERS = _table(
    "brokers",
    "broker incarnation number",
    broker=_TEXT,
    #: The incarnation of the broker's process, and the number of its message, which grows. Other messages of the broker
    #: have numbers in between.
    incarnation=_WHOLE,
    number=_WHOLE,
    # As in the broker's report: dynamoth.edge.control.BrokerReport.
    report_s=_NUMBER,
    users=_WHOLE,
    capacity_bytes_per_s=_NUMBER,
    #: F_j and I_j: what it fetches and delivers, and what it fetches.
    load_bytes_per_s=_NUMBER,
    inbound_bytes_per_s=_NUMBER,
    #: The use of the tightest other resource: CPU, connections, buffered bytes.
    other_ratio_max=_NUMBER,
    is_admitting=Type.TRUTH,
    is_draining=Type.TRUTH,
    latitude=_NUMBER,
    longitude=_NUMBER,
    #: How many users have a load u_i in each class, with spaces in between: below 1 byte/s, below 2, 4, 8 ...
    user_loads=_TEXT,
    url=_TEXT,
)
"""One row per report of an edge broker. ``at`` is when the recorder got it."""

BROKER_INTERESTS = _table(
    "broker_interests",
    "broker incarnation number interest",
    broker=_TEXT,
    incarnation=_WHOLE,
    number=_WHOLE,
    #: The id: a hash of kind, name and parameters.
    interest=_TEXT,
    #: lambda_k, in bytes/s.
    rate=_NUMBER,
    #: n_jk: users of the broker who have subscribed to it.
    users=_WHOLE,
)
"""One row per report of an edge broker and interest that it names: the busiest ones, in a number that is bounded. As in
``channels``, a recorder writes the rows of a report next to each other into one file."""


class BrokerDecisionState(enum.StrEnum):
    """What a row of table ``broker_decisions`` is about: its column ``state``."""

    #: The coordinator has decided. The rows of its moves come with it.
    MADE = "made"
    #: All moves have ended. How each did comes with it, as rows of ``broker_moves``.
    SETTLED = "settled"
    #: The loads at the first look after that; one row for all brokers, and one for each that the moves touched.
    MEASURED = "measured"
    #: Operators have paused decisions, or let the coordinator decide again.
    PAUSED = "paused"
    RESUMED = "resumed"


BROKER_DECISIONS = _table(
    "broker_decisions",
    "coordinator number line",
    #: The incarnation of the coordinator, the number of its message, and the index of the row in it.
    coordinator=_WHOLE,
    number=_WHOLE,
    line=_WHOLE,
    #: Counts the times that this coordinator began to act, from 1.
    term=_WHOLE,
    #: Counts the decisions of a term, from 1.
    decision=_WHOLE,
    #: A :class:`BrokerDecisionState`.
    state=_TEXT,
    #: relieve or shuffle.
    kind=_TEXT,
    #: Why it was due, with figures.
    reason=_TEXT,
    #: Why the plan has no more moves.
    outcome=_TEXT,
    is_dry_run=Type.TRUTH,
    moves=_WHOLE,
    #: Users who have moved, and who have not.
    moved=_WHOLE,
    failed=_WHOLE,
    #: Null: the row is about all brokers together.
    broker=_TEXT,
    #: Load ratio of ``broker`` or, without one, the largest of all.
    ratio_before=_NUMBER,
    ratio_predicted=_NUMBER,
    ratio_measured=_NUMBER,
    ratio_mean_before=_NUMBER,
    ratio_mean_predicted=_NUMBER,
    ratio_mean_measured=_NUMBER,
    #: Standard deviation over mean of the load ratios.
    cov_before=_NUMBER,
    cov_predicted=_NUMBER,
    cov_measured=_NUMBER,
    #: The sum of I_j of all brokers, in bytes/s.
    redis_egress_before=_NUMBER,
    redis_egress_predicted=_NUMBER,
    redis_egress_measured=_NUMBER,
    #: Time on the coordinator's monotonic clock, in seconds. Its zero is arbitrary.
    clock_s=_NUMBER,
)
"""One row per decision of a coordinator and state of it, one per measured broker, and begin and end of a pause."""

BROKER_MOVES = _table(
    "broker_moves",
    "coordinator number line",
    coordinator=_WHOLE,
    number=_WHOLE,
    line=_WHOLE,
    term=_WHOLE,
    decision=_WHOLE,
    #: Hash of the user's session, with a key that only the process of this coordinator has.
    session=_TEXT,
    from_broker=_TEXT,
    to_broker=_TEXT,
    #: Null when it is decided; then a :class:`dynamoth.edge.control.MoveEnd`, ``timeout`` (nobody has said how it
    #: ended) or ``unfit`` (nobody was asked: a broker had become unfit meanwhile).
    end=_TEXT,
    #: From asking the broker until the end. Null where there is none.
    seconds=_NUMBER,
    # Only when it is decided.
    #: The user's own load u_i, in bytes/s.
    load_bytes_per_s=_NUMBER,
    #: Ids of the user's interests.
    interests=Type.TEXTS,
    #: Load ratios of both brokers before this move, and as predicted after it and the moves before it.
    from_ratio_before=_NUMBER,
    from_ratio_predicted=_NUMBER,
    to_ratio_before=_NUMBER,
    to_ratio_predicted=_NUMBER,
)
"""Two rows per move that a coordinator decided: when it is decided, and when all moves of the decision have ended."""

COORDINATOR_SETTINGS = _table(
    "coordinator_settings",
    "coordinator number line",
    coordinator=_WHOLE,
    number=_WHOLE,
    line=_WHOLE,
    name=_TEXT,
    value=_TEXT,
)
"""The settings of a coordinator when it began to act, and every ten seconds since. ``value`` is JSON."""

MERGING_LOCK = ".merging.lock"
"""A file in the folder of a recording. A recorder locks it while it merges, and a reader, shared, against that."""

BALANCER_TABLES = {table.name: table for table in (PLANS, DECISIONS, SETTINGS)}
"""The tables whose rows a balancer sends."""

COORDINATOR_TABLES = {table.name: table for table in (BROKER_DECISIONS, BROKER_MOVES, COORDINATOR_SETTINGS)}
"""The tables whose rows a coordinator sends. Recorders make the rows of all others."""

BROKER_TABLES = {table.name: table for table in (BROKERS, BROKER_INTERESTS, *COORDINATOR_TABLES.values())}
"""The tables about edge brokers. A recording of a cluster without brokers has none of them."""

TABLES = {
    table.name: table
    for table in (SERVERS, CHANNELS, *BALANCER_TABLES.values(), LATENCY, GAPS, *BROKER_TABLES.values())
}


def channel_text(channel: bytes) -> str:
    r"""Return the name of a channel as text: bytes that are not UTF-8 become ``\xNN``, and backslashes are doubled."""
    return channel.replace(b"\\", rb"\\").decode(errors="backslashreplace")


_ESCAPED = re.compile(rb"\\(?:x([0-9a-f]{2})|\\)")


def channel_bytes(text: str) -> bytes:
    """Return the name of a channel from the text that :func:`channel_text` has returned."""
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"\\", text.encode())
