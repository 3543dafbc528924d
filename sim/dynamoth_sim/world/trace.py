"""What happened, kept in a ring, and shown as a readable story when a message went wrong.

Recording must cost next to nothing: a record is a tuple of what is at hand, and is put into words only when a
story is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dynamoth.errors import MalformedMessage
from dynamoth.names import logical_channel
from dynamoth.plan.plan import Assignment, Mode
from dynamoth.protocol.control import Marker, PlanChange, RouteNotice, unpack_control
from dynamoth.protocol.envelope import (
    CONTROL,
    FIRST,
    FORWARDED,
    HEARTBEAT,
    RAW,
    ROUTE_CHANGED,
    is_enveloped,
    open_envelope,
)
from dynamoth.protocol.plan_wire import unpack_entry

BEFORE_S = 0.3
AFTER_S = 0.5
"""The part of the time before and after a message that belongs to its story."""

STORY_LINES_MAX = 200
"""A story longer than this is cut in the middle: its beginning and its end tell the most."""

_ENTRY_PREFIX = b"c:"
"""Fields of the stored plan that name a channel; see ``dynamoth.protocol.stored_plan``."""

_FLAG_NAMES = (
    (FORWARDED, "forwarded"),
    (FIRST, "first"),
    (ROUTE_CHANGED, "route changed"),
    (HEARTBEAT, "heartbeat"),
    (RAW, "raw"),
)


class Record(NamedTuple):
    """One thing that happened. Fields that a kind has no use for are None.

    ``who`` is a process, ``where`` a server, ``data`` what was on the wire, ``note`` anything more.
    """

    at: float
    kind: str
    who: str | None
    where: str | None
    channel: bytes | None
    data: bytes | None
    note: Any


class Trace:
    """The latest records, at most ``records_max`` of them; 0 keeps none."""

    def __init__(self, records_max: int) -> None:
        self._records: deque[tuple[Any, ...]] = deque(maxlen=records_max)
        #: Adds one record, given as a plain tuple of the fields of :class:`Record`.
        self.add = self._records.append

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records, oldest first."""
        return (Record(*record) for record in self._records)

    def story(self, channel: bytes, payload: bytes | None, people: Sequence[str] = ()) -> list[str]:
        """Return, in words, what happened to a message, and around it.

        Args:
            channel: the user's channel; its plan entries and control messages belong to the story.
            payload: the application's bytes, found inside of envelopes; None for the story of the channel alone.
            people: whose doings belong to the story (names of processes begin with them); faults of everybody do.

        """
        mentions = [record for record in self if payload is not None and _is_message(record, channel, payload)]
        begin = mentions[0].at - BEFORE_S if mentions else 0.0
        end = mentions[-1].at + AFTER_S if mentions else float("inf")
        lines = [
            _in_words(record)
            for record in self
            if begin <= record.at <= end
            and ((payload is not None and _is_message(record, channel, payload)) or _is_around(record, channel, people))
        ]
        if len(lines) > STORY_LINES_MAX:
            half = STORY_LINES_MAX // 2
            lines = [*lines[:half], f"    ... {len(lines) - 2 * half} lines ...", *lines[-half:]]
        return lines


def _is_message(record: Record, channel: bytes, payload: bytes) -> bool:
    data = record.data
    return data is not None and payload in data and record.channel is not None and record.channel.endswith(channel)


def _is_around(record: Record, channel: bytes, people: Sequence[str]) -> bool:
    """Tell whether a record that is not of the message itself helps to understand it."""
    on_channel = record.channel is not None and logical_channel(record.channel) == channel
    concerned = record.who is not None and any(record.who.startswith(name) for name in people)
    match record.kind:
        case "fault" | "says":
            return True
        case "link":
            return concerned or (record.who or "").startswith("agent")
        case "stores plan":
            return _ENTRY_PREFIX + channel in record.note
        case "gets" if not concerned:
            return False
        case _:
            pass
    if record.data is None:
        return on_channel and concerned
    return (on_channel and _is_control(record.data)) or (
        channel in _control_channels(record.data) and record.kind == "publishes"
    )


def _is_control(data: bytes) -> bool:
    return is_enveloped(data) and len(data) > 3 and bool(data[3] & (CONTROL | HEARTBEAT))


def _control_channels(data: bytes) -> tuple[bytes, ...]:
    """Return the channels that a bare control message (to an inbox, to the balancer) is about."""
    try:
        message = unpack_control(data)
    except MalformedMessage:
        return ()
    channel = getattr(message, "channel", None)
    if isinstance(channel, bytes):
        return (channel,)
    delta = getattr(message, "delta", None)
    if delta is not None:
        return tuple(delta.entries)
    channels = getattr(message, "channels", ())
    return tuple(pair[0] for pair in channels)


def _in_words(record: Record) -> str:
    parts = [f"{record.at:10.6f}", f"{record.who or '':>10}", record.kind]
    if record.where is not None:
        parts.append(f"@{record.where}")
    if record.channel is not None:
        parts.append(record.channel.decode(errors="replace"))
    if record.kind == "stores plan":
        parts.append(_plan_in_words(record.note))
    else:
        if record.data is not None:
            parts.append(data_in_words(record.data))
        if record.note is not None:
            parts.append(f"[{record.note}]")
    return " ".join(parts)


def _plan_in_words(fields: dict[bytes, bytes]) -> str:
    words: list[str] = []
    for name, value in fields.items():
        if not name.startswith(_ENTRY_PREFIX):
            continue
        entry = unpack_entry(value)
        old = ",".join(_assignment_in_words(route.assignment) for route in entry.previous)
        new = _assignment_in_words(entry.route.assignment)
        words.append(f"{name.decode(errors='replace')} epoch {entry.route.epoch} {entry.phase.name} ({old} -> {new})")
    return "; ".join(words)


def data_in_words(data: bytes) -> str:
    """Return what is on the wire in words: an envelope opened, a control message read, or the bytes."""
    if is_enveloped(data):
        try:
            envelope = open_envelope(data)
        except MalformedMessage as error:
            return f"malformed envelope ({error})"
        if envelope.flags & CONTROL:
            return _control_in_words(envelope.payload)
        flags = "".join(f", {name}" for bit, name in _FLAG_NAMES if envelope.flags & bit)
        return (
            f"{envelope.payload.decode(errors='replace')} (publisher {envelope.publisher:x}"
            f" sequence {envelope.sequence} epoch {envelope.epoch}{flags})"
        )
    return _control_in_words(data)


def _control_in_words(data: bytes) -> str:
    try:
        message = unpack_control(data)
    except MalformedMessage:
        return data.decode(errors="replace")[:120]
    match message:
        case PlanChange(delta):
            return f"PlanChange({delta.base} to {delta.version}: {', '.join(map(_name, delta.entries))})"
        case RouteNotice(channel, route):
            return f"RouteNotice({_name(channel)}: epoch {route.epoch} at {_assignment_in_words(route.assignment)})"
        case Marker(channel, server, number):
            return f"Marker({_name(channel)}: {number} of {server})"
        case _:
            return str(message)


def _assignment_in_words(assignment: Assignment) -> str:
    mode = "" if assignment.mode is Mode.SINGLE else f"{assignment.mode.name} "
    return mode + "+".join(assignment.servers)


def _name(channel: bytes) -> str:
    return channel.decode(errors="replace")
