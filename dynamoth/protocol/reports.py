"""The reports of load analyzers to the balancer, one per time unit.

A report is columnar and bounded: the busiest channels by name, one column per metric, and the rest as sums, over all
and by slot. So its size does not depend on how many channels a server carries, and the balancer reads a column without
touching the others. On the wire it is one msgpack array that begins with ``REPORT_CODE``; a reader ignores elements
after those that it knows.

The metrics are those of Dynamoth, section III-A, and every other resource of the server that can run out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from dynamoth.errors import MalformedMessage
from dynamoth.plan.slots import SLOTS
from dynamoth.protocol.control import REPORT_CODE
from dynamoth.protocol.wire import pack, parser, read_natural, read_text, shortened, unpack

REPORT_PROBLEMS_MAX = 20
REPORT_PROBLEM_CHARACTERS_MAX = 500
"""Bounds of ``Report.problems``; a receiver refuses more."""

REPORT_CHANNELS_MAX = 10_000
"""Most channels that a report may name; a receiver refuses more. About 600 KB."""

CANNOT_OBSERVE = "agent_cannot_observe"
"""The kind of problem of an agent that its server does not let observe: it acts on no plan."""

NAME_BYTES_MAX = 1024
"""Bytes of a channel's name in a report; load analyzers count channels with longer names in the sums."""

IDS_MAX = 1024
"""Ids in one cell of a "who" column."""

ID_BYTES = 8
"""Width of a client's id in the "who" columns: big-endian, as in the envelope."""


class ChannelLoad(NamedTuple):
    """One channel at one server within one interval: a row of :class:`ChannelColumns`."""

    channel: bytes
    publications: int
    publishers: int
    subscribers: int
    messages_sent: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class ChannelColumns:
    """The measurements of the channels that a report names. All columns have the same length; one row is one channel.

    Numbers are those of the report's interval, not rates. Names are the users' (a replicated channel is one row).
    """

    #: The users' names, each once, by ``bytes_out`` descending.
    channels: tuple[bytes, ...] = ()
    #: Messages published here by clients. Neither forwarded copies nor heartbeats nor control messages are among them.
    publications: tuple[int, ...] = ()
    #: How many clients published them; plain Redis clients have no identity and are not counted. A lower bound where
    #: ``ChannelSums.publishers_uncounted`` is not zero.
    publishers: tuple[int, ...] = ()
    #: Subscriptions by name (NUMSUB). Pattern subscriptions, such as the agent's, are not counted by Redis.
    subscribers: tuple[int, ...] = ()
    #: Copies sent to subscribers by name, of all messages, forwarded copies and control messages included.
    messages_sent: tuple[int, ...] = ()
    #: Size on the wire of the publications, as they came in.
    bytes_in: tuple[int, ...] = ()
    #: Size on the wire of the messages sent: what the server would be relieved of without this channel.
    bytes_out: tuple[int, ...] = ()
    #: Who published: ids of ``ID_BYTES`` each, end to end, the busiest publishers first. Bounded, so it may tell only
    #: some, and empty for all but the busiest channels.
    publisher_ids: tuple[bytes, ...] = ()
    #: Who has announced to be subscribed: as ``publisher_ids``, the latest first. Plain Redis clients announce nothing.
    subscriber_ids: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        """Return how many channels are named."""
        return len(self.channels)

    def rows(self) -> Iterator[ChannelLoad]:
        """Yield the channels, the busiest first."""
        numbers = zip(
            self.publications,
            self.publishers,
            self.subscribers,
            self.messages_sent,
            self.bytes_in,
            self.bytes_out,
            strict=True,
        )
        return (ChannelLoad(channel, *row) for channel, row in zip(self.channels, numbers, strict=True))


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """The channels that a report does not name, added up; the numbers mean what they do in :class:`ChannelColumns`."""

    channels: int = 0
    publications: int = 0
    subscribers: int = 0
    messages_sent: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    #: Messages seen on channels that there was no room to track; their subscribers, and so what was sent, are unknown.
    messages_untracked: int = 0
    #: Pairs of (channel, publisher) that there was no room to tell apart, in all channels: named ones as well.
    publishers_uncounted: int = 0


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """The channels that a report does not name and that follow their slot, added up by slot: a part of the rest.

    All columns have the same length, ``SLOTS`` at most; one row is one slot. A slot lives at one server, so the reports
    of a whole cluster have little more than ``SLOTS`` rows. The numbers mean what they do in :class:`ChannelColumns`.
    """

    #: Numbers of the slots, ascending; those without load and subscribers are left out.
    slots: tuple[int, ...] = ()
    publications: tuple[int, ...] = ()
    #: An upper bound: subscribers of idle channels that the plan names count here, too.
    subscribers: tuple[int, ...] = ()
    messages_sent: tuple[int, ...] = ()
    bytes_in: tuple[int, ...] = ()
    bytes_out: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return how many slots are named."""
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The measurements of one load analyzer at its server within one interval.

    Sent on ``BALANCER_CHANNEL`` at that server, also when it is idle. Zero as a maximum means that none is known.
    """

    server: str
    #: New with each start of the agent.
    incarnation: int
    #: Grows by one with each report of an incarnation: a number left out is a report lost.
    sequence: int
    #: Length of the time measured, in seconds; more than 0.
    interval_s: float
    #: The version of the plan that this agent's dispatcher acts on; None while it knows no plan.
    plan_version: int | None
    #: T_i of eq. 1: what the server's network can send, as configured; more than 0.
    outgoing_bytes_per_s_max: int
    #: M_i of eq. 1: what the server sent, without what the agent itself read, and without control messages.
    outgoing_bytes_per_s: float
    #: True where the server does not let us read its counters: ``outgoing_bytes_per_s`` is the sum over the channels
    #: then, ``incoming_bytes_per_s`` likewise, and the other resources are 0.
    outgoing_is_estimate: bool = False
    #: What the server sent of the messages between agents, balancers and operators; 0 in reports of earlier versions,
    #: whose ``outgoing_bytes_per_s`` includes it.
    control_bytes_per_s: float = 0.0
    incoming_bytes_per_s: float = 0.0
    #: CPU seconds per second of the thread that executes commands. It can use one core, so 1.0 is full.
    cpu_ratio: float = 0.0
    memory_bytes: int = 0
    #: ``maxmemory``.
    memory_bytes_max: int = 0
    connections: int = 0
    #: ``maxclients``.
    connections_max: int = 0
    #: The largest recent output buffer of any client: Redis drops a subscriber whose buffer passes its limit.
    output_buffer_bytes_max: int = 0
    #: Memory of all clients' buffers together.
    client_buffers_bytes: int = 0
    #: Channels at the server that have a subscriber, as Redis counts them (our own ones included).
    channels_subscribed: int = 0
    #: How late the analyzer saw the end of the interval: the backlog of its observation.
    observation_lag_s: float = 0.0
    #: Time right before this interval in which nothing was observed, as the observing connection was down; nothing was
    #: measured of it. 0 without an interruption.
    blind_s: float = 0.0
    #: How often this process of the agent lost its observing connection to a server that went on: Redis drops one that
    #: reads too slowly.
    interruptions: int = 0
    #: False: at the time of this report the agent sees nothing of what is published, or only long after. Such a report
    #: comes over a connection of its own, and tells of the server only: ``columns`` and ``rest`` are empty.
    observing: bool = True
    #: Other problems of the agent, present or imminent: a stable kind, and a text with cause and cure.
    problems: tuple[tuple[str, str], ...] = ()
    columns: ChannelColumns = ChannelColumns()
    rest: ChannelSums = ChannelSums()
    #: Empty in reports of earlier versions.
    slots: SlotColumns = SlotColumns()

    @property
    def why_unobserved(self) -> str:
        """Why the server does not let the agent observe it; empty where it does."""
        return next((text for kind, text in self.problems if kind == CANNOT_OBSERVE), "")

    @property
    def loading_bytes_per_s(self) -> float:
        """What counts as load: no control messages, as no move takes them away; every byte when the link is full.

        In between, ever more of them, so that no small change makes a server look overloaded.
        """
        ratio = (self.outgoing_bytes_per_s + self.control_bytes_per_s) / self.outgoing_bytes_per_s_max
        share = min(1.0, max(0.0, (ratio - LINK_FULL_RATIO) / (1 - LINK_FULL_RATIO)))
        return self.outgoing_bytes_per_s + share * self.control_bytes_per_s

    @property
    def load_ratio(self) -> float:
        """LR_i of eq. 1 (Dynamoth, section III-A): measured over maximum outgoing bytes/s. May exceed 1."""
        return self.loading_bytes_per_s / self.outgoing_bytes_per_s_max

    @property
    def tightest_ratio(self) -> float:
        """How full the server is in the resource that it has least left of, among those with a known maximum."""
        connections = self.connections / self.connections_max if self.connections_max else 0.0
        memory = self.memory_bytes / self.memory_bytes_max if self.memory_bytes_max else 0.0
        return max(self.load_ratio, self.cpu_ratio, connections, memory)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Put client ids end to end, as a "who" column has them."""
    return b"".join(id_.to_bytes(ID_BYTES, "big") for id_ in ids)


# The wire form.


def pack_report(report: Report) -> bytes:
    """Serialise a report."""
    r, columns, rest, slots = report, report.columns, report.rest, report.slots
    return pack(
        [
            REPORT_CODE,
            [
                *(r.server, r.incarnation, r.sequence, r.interval_s, r.plan_version, r.observation_lag_s, r.blind_s),
                *(r.interruptions, r.observing, r.problems),
            ],
            [
                *(r.outgoing_bytes_per_s_max, r.outgoing_bytes_per_s, r.outgoing_is_estimate, r.incoming_bytes_per_s),
                *(r.cpu_ratio, r.memory_bytes, r.memory_bytes_max, r.connections, r.connections_max),
                *(r.output_buffer_bytes_max, r.client_buffers_bytes, r.channels_subscribed, r.control_bytes_per_s),
            ],
            [
                columns.channels,
                *(columns.publications, columns.publishers, columns.subscribers),
                *(columns.messages_sent, columns.bytes_in, columns.bytes_out),
                *(columns.publisher_ids, columns.subscriber_ids),
            ],
            [
                *(rest.channels, rest.publications, rest.subscribers, rest.messages_sent),
                *(rest.bytes_in, rest.bytes_out, rest.messages_untracked, rest.publishers_uncounted),
            ],
            [
                *(slots.slots, slots.publications, slots.subscribers),
                *(slots.messages_sent, slots.bytes_in, slots.bytes_out),
            ],
        ]
    )


LINK_FULL_RATIO = 0.9
"""From this part of a server's maximum on, control messages are load, too: little room is left. At 1, all of them."""

_LATER_HEAD: tuple[Any, ...] = (0, True, [])
"""Defaults of the last fields of the head, which agents of earlier versions leave out."""

_NO_SLOTS: Any = [[], [], [], [], [], []]
"""The columns of slots, which they leave out, too."""


@parser("a report")
def unpack_report(data: bytes) -> Report:
    """Read a report from anyone who can publish.

    Raises:
        MalformedMessage: when it is not a report, or holds what cannot have been measured.

    """
    whole = _whole_array(unpack(data, check_depth=False), 5, "a report")
    code, head, resources, columns, rest, slots = [*whole, _NO_SLOTS][:6]
    if code != REPORT_CODE:
        raise MalformedMessage(f"not a report: it begins with {shortened(code)} instead of {REPORT_CODE}")
    head = _whole_array(head, 7, "the head of a report")
    server, incarnation, sequence, interval, version, lag, blind = head[:7]
    interruptions, observing, problems = (*head[7:10], *_LATER_HEAD[len(head) - 7 :])[:3]
    resources = [*_whole_array(resources, 12, "the resources of a report"), 0.0][:13]  # earlier versions have 12
    out_max, out, estimate, into, cpu, *counts, control = resources
    memory, memory_max, connections, connections_max, buffer, buffers, subscribed = map(read_natural, counts)
    if not isinstance(server, str) or not isinstance(estimate, bool) or not isinstance(observing, bool):
        raise MalformedMessage("a report names its server as text, and says True or False whether it estimates or sees")
    return Report(
        server=server,
        incarnation=read_natural(incarnation),
        sequence=read_natural(sequence),
        interval_s=_positive(interval),
        plan_version=None if version is None else read_natural(version),
        outgoing_bytes_per_s_max=_at_least_one(out_max),
        outgoing_bytes_per_s=_measure(out),
        outgoing_is_estimate=estimate,
        control_bytes_per_s=_measure(control),
        incoming_bytes_per_s=_measure(into),
        cpu_ratio=_measure(cpu),
        memory_bytes=memory,
        memory_bytes_max=memory_max,
        connections=connections,
        connections_max=connections_max,
        output_buffer_bytes_max=buffer,
        client_buffers_bytes=buffers,
        channels_subscribed=subscribed,
        observation_lag_s=_measure(lag),
        blind_s=_measure(blind),
        interruptions=read_natural(interruptions),
        observing=observing,
        problems=_problems(problems),
        columns=_columns_from_wire(columns),
        rest=ChannelSums(*map(read_natural, _array(rest, 8, "the sums of a report"))),
        slots=_slots_from_wire(slots),
    )


def _problems(value: Any) -> tuple[tuple[str, str], ...]:
    problems = _whole_array(value, 0, "the problems of a report")
    if len(problems) > REPORT_PROBLEMS_MAX:
        raise MalformedMessage(f"a report has at most {REPORT_PROBLEMS_MAX} problems, this one has {len(problems)}")
    return tuple(map(_problem, problems))


def _problem(value: Any) -> tuple[str, str]:
    kind, text = _array(value, 2, "a problem")
    return read_text(kind, REPORT_PROBLEM_CHARACTERS_MAX), read_text(text, REPORT_PROBLEM_CHARACTERS_MAX)


def _columns_from_wire(value: Any) -> ChannelColumns:
    names, *cells = _array(value, 9, "the columns of a report")
    channels = _texts(names)
    length = len(channels)
    if length > REPORT_CHANNELS_MAX:
        raise MalformedMessage(f"a report names at most {REPORT_CHANNELS_MAX} channels, this one names {length}")
    if max(map(len, channels), default=0) > NAME_BYTES_MAX:
        raise MalformedMessage(f"a report names channels of at most {NAME_BYTES_MAX} bytes, this one a longer one")
    if len(set(channels)) != length:
        raise MalformedMessage("a report names a channel twice")
    publications, publishers, subscribers, sent, into, out = (_numbers(column, length) for column in cells[:6])
    publisher_ids, subscriber_ids = (_ids(column, length) for column in cells[6:])
    return ChannelColumns(
        channels, publications, publishers, subscribers, sent, into, out, publisher_ids, subscriber_ids
    )


def _slots_from_wire(value: Any) -> SlotColumns:
    numbers, *cells = _array(value, 6, "the slots of a report")
    slots = _numbers(numbers, 0, whole=True)
    if any(one >= other for one, other in pairwise(slots)) or slots[-1:] > (SLOTS - 1,):
        raise MalformedMessage(f"a report names slots from 0 to {SLOTS - 1}, ascending, each once")
    return SlotColumns(slots, *(_numbers(column, len(slots)) for column in cells))


def _array(value: Any, length: int, what: str) -> list[Any]:
    """Check that a value is an array of at least ``length`` elements; return the first ``length``."""
    return _whole_array(value, length, what)[:length]


def _whole_array(value: Any, length: int, what: str) -> list[Any]:
    """Check that a value is an array of at least ``length`` elements; return it whole."""
    if not isinstance(value, list) or len(value) < length:  # pyright: ignore[reportUnknownArgumentType]  # anything
        raise MalformedMessage(f"{what} is an array of {length}, not {shortened(value)}")
    return value  # pyright: ignore[reportUnknownVariableType]  # msgpack arrays hold anything


def _at_least_one(value: Any) -> int:
    if read_natural(value) == 0:
        raise MalformedMessage("a maximum of 0 bytes/s cannot be: the agent's configuration is wrong")
    return int(value)


def _measure(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise MalformedMessage(f"a finite measure from 0 expected, not {shortened(value)}")
    return float(value)


def _positive(value: Any) -> float:
    if not _measure(value) > 0:
        raise MalformedMessage("an interval lasts longer than 0 s")
    return float(value)


# A balancer reads hundreds of columns per second: they are checked by functions that run in C.


def _texts(value: Any) -> tuple[bytes, ...]:
    cells = _whole_array(value, 0, "a column")
    if not set(map(type, cells)) <= {bytes}:
        raise MalformedMessage(f"an array of bytes expected, not {shortened(cells)}")
    return tuple(cells)


def _numbers(value: Any, length: int, *, whole: bool = False) -> tuple[int, ...]:
    cells = (_whole_array if whole else _array)(value, length, "a column")
    if not set(map(type, cells)) <= {int} or min(cells, default=0) < 0:
        raise MalformedMessage(f"a column of numbers from 0 expected, not {shortened(cells)}")
    return tuple(cells)


def _ids(value: Any, length: int) -> tuple[bytes, ...]:
    cells = _texts(_array(value, length, "a column"))
    if not any(cells):
        return cells
    if any(size % ID_BYTES or size > IDS_MAX * ID_BYTES for size in set(map(len, cells))):
        raise MalformedMessage(f"a column of lists of {ID_BYTES}-byte ids expected, not {shortened(cells)}")
    return cells
