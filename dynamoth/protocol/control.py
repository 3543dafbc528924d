"""Control messages: what agents, balancer, clients and administrators say to each other.

Each is one msgpack array ``[code, field, ...]``. Codes are never reused. A reader ignores fields after those that it
knows, so that newer software may add some. Receivers count and drop unknown and malformed messages.

Messages to clients travel on the user's channel itself, in an envelope with the flag CONTROL, where their order
relative to the application's messages matters to all who listen there (:class:`RouteNotice`, :class:`LossNotice`), or
in the client's inbox. They are hints: a client goes only to servers of the plan, and verifies there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.plan.plan import EPOCH_MAX, PlanDelta, Route
from dynamoth.protocol.envelope import CONTROL, seal
from dynamoth.protocol.plan_wire import (
    compatibility_from_wire,
    compatibility_to_wire,
    entry_from_wire,
    entry_to_wire,
    route_from_wire,
    route_to_wire,
    servers_from_wire,
    servers_to_wire,
)
from dynamoth.protocol.wire import (
    pack,
    parser,
    read_array,
    read_bytes,
    read_natural,
    read_text,
    read_text_map,
    shortened,
    unpack,
)

LOSS_MAX = 1_000_000
"""Messages that one LossNotice counts; a larger number means "unknown". Ten times what an agent
keeps to be forwarded."""


@dataclass(frozen=True, slots=True)
class RouteNotice:
    """Dispatcher to clients: since ``route.epoch`` the channel is found there.

    Sent on an old location for its subscribers, and to the inbox of a publisher that used an old route.
    """

    channel: bytes
    route: Route


@dataclass(frozen=True, slots=True)
class Marker:
    """Dispatcher to a subscriber in transition: everything due to it at its old locations has been sent.

    Everything published at ``server`` before it saw your announcement has now been sent to you. A marker goes to the
    subscriber's inbox at every server with an old location, in one order with the messages forwarded there. ``number``
    is that of the announcement.
    """

    channel: bytes
    server: str
    number: int


@dataclass(frozen=True, slots=True)
class LossNotice:
    """Dispatcher to subscribers: messages of the channel may not have been forwarded.

    ``count`` None means unknown, or more than ``LOSS_MAX``.
    """

    channel: bytes
    count: int | None


@dataclass(frozen=True, slots=True)
class ObservationGap:
    """Dispatcher to the clients of its server: for a while I did not see the messages published here.

    Publishers that used this server in the meantime send heartbeats, so that subscribers elsewhere notice messages that
    were not forwarded.
    """

    server: str


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """Dispatcher to publishers: read the compatibility rules stored at your server, which have this version.

    To all clients of its server after a change, and to the inbox of a publisher that does not follow them.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """Subscriber to agent: I have joined and left these physical channels at your server.

    Published behind the SUBSCRIBE of the channels, on the same connection. For each new location of a channel in
    transition the dispatcher answers with markers, at the servers ``leaving``, where the subscriber listens to old
    locations and to its inbox. It may announce a channel again to get the markers again. ``number`` grows with each
    announcement of the subscriber.
    """

    client: int
    number: int
    joined: tuple[bytes, ...]
    left: tuple[bytes, ...]
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """Publisher to dispatcher: your server has a message of mine, and others have not answered: publish it there.

    The physical channel is that of the name on which the request is sent (``names.forward_channel``), so that only
    clients that may publish on the channel can ask. ``copies`` has pairs of a server and an envelope for the channel
    there: the message, at once, or a heartbeat, after a while in which the message itself should arrive.
    """

    copies: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Balancer to agent: the plan changed; it is stored at your server already. Answer with :class:`PlanAck`."""

    delta: PlanDelta


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """Balancer to agent: send your version; read the stored plan if yours is below ``version``.

    ``is_doubtful``: somebody else may have changed the stored plan, and the balancer has just written it. Read it
    whatever your version is, go by it, and have clients that listen in the wrong place verify again.
    """

    version: int
    is_doubtful: bool = False


@dataclass(frozen=True, slots=True)
class PlanAck:
    """Agent to balancer: I act on this version now. ``incarnation`` is new with each start of the agent."""

    server: str
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class Vacated:
    """Agent to balancer: since the change ``epoch`` of each channel, nobody listens at its old location here."""

    server: str
    channels: tuple[tuple[bytes, int], ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """Operator to balancer. The answer goes to ``operator_inbox(request)`` at the server where the request came in."""

    request: int
    command: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class AdminReply:
    """Balancer to operator. ``error`` is None when the request was carried out."""

    request: int
    result: Mapping[str, Any]
    error: str | None = None


ControlMessage = (
    RouteNotice
    | Marker
    | LossNotice
    | ObservationGap
    | RulesChanged
    | Announcement
    | ForwardRequest
    | PlanChange
    | PlanQuery
    | PlanAck
    | Vacated
    | AdminRequest
    | AdminReply
)

# Reading: each field is checked, as anyone who reaches a server can publish anything.


def _version(value: Any) -> int:
    """Read a version of the plan, or an epoch."""
    return read_natural(value, EPOCH_MAX)


def _loss(value: Any) -> int | None:
    """Read the number of lost messages: None, for unknown, above ``LOSS_MAX``."""
    return None if value is None or read_natural(value) > LOSS_MAX else int(value)


def _names(value: Any) -> tuple[bytes, ...]:
    return tuple(map(read_bytes, read_array(value)))


def _optional(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


def _pair(value: Any) -> tuple[bytes, int]:
    channel, epoch = read_array(value)[:2]
    return read_bytes(channel), _version(epoch)


def _copy(value: Any) -> tuple[str, bytes]:
    server, data = read_array(value)[:2]
    return read_text(server), read_bytes(data)


def _delta_to_wire(delta: PlanDelta) -> list[Any]:
    """Return the wire form of a change, without the administration, which agents do not need."""
    entries = [[channel, entry_to_wire(entry)] for channel, entry in delta.entries.items()]
    rules = None if delta.compatibility is None else compatibility_to_wire(delta.compatibility)
    servers = None if delta.servers is None else servers_to_wire(delta.servers)
    wire: list[Any] = [delta.base, delta.version, entries, rules, servers]
    while wire[-1] is None:
        wire.pop()
    return wire


def _delta_from_wire(value: Any) -> PlanDelta:
    base, version, entries, rules, servers = [*read_array(value), None, None][:5]
    read = {read_bytes(pair[0]): entry_from_wire(pair[1]) for pair in map(read_array, read_array(entries))}
    return PlanDelta(
        _version(base),
        _version(version),
        read,
        _optional(compatibility_from_wire, rules),
        _optional(servers_from_wire, servers),
    )


_WRITE: dict[type[Any], Callable[[Any], list[Any]]] = {
    RouteNotice: lambda m: [1, m.channel, route_to_wire(m.route)],
    Marker: lambda m: [2, m.channel, m.server, m.number],
    LossNotice: lambda m: [3, m.channel, m.count],
    ObservationGap: lambda m: [4, m.server],
    Announcement: lambda m: [5, m.client, m.number, m.joined, m.left, m.leaving],
    PlanChange: lambda m: [6, _delta_to_wire(m.delta)],
    PlanQuery: lambda m: [7, m.version, m.is_doubtful],
    PlanAck: lambda m: [8, m.server, m.incarnation, m.version],
    Vacated: lambda m: [9, m.server, m.channels, m.incarnation],
    AdminRequest: lambda m: [10, m.request, m.command, m.arguments],
    AdminReply: lambda m: [11, m.request, m.result, m.error],
    ForwardRequest: lambda m: [13, m.copies],
    RulesChanged: lambda m: [14, m.version],
}

_READ: dict[int, Callable[[list[Any]], ControlMessage]] = {
    1: lambda v: RouteNotice(read_bytes(v[0]), route_from_wire(v[1])),
    2: lambda v: Marker(read_bytes(v[0]), read_text(v[1]), read_natural(v[2])),
    3: lambda v: LossNotice(read_bytes(v[0]), _loss(v[1])),
    4: lambda v: ObservationGap(read_text(v[0])),
    5: lambda v: Announcement(
        read_natural(v[0]), read_natural(v[1]), _names(v[2]), _names(v[3]), tuple(map(read_text, read_array(v[4])))
    ),
    6: lambda v: PlanChange(_delta_from_wire(v[0])),
    7: lambda v: PlanQuery(_version(v[0]), v[1:2] == [True]),
    8: lambda v: PlanAck(read_text(v[0]), read_natural(v[1]), _version(v[2])),
    9: lambda v: Vacated(read_text(v[0]), tuple(map(_pair, read_array(v[1]))), read_natural(v[2])),
    10: lambda v: AdminRequest(read_natural(v[0]), read_text(v[1]), read_text_map(v[2])),
    11: lambda v: AdminReply(read_natural(v[0]), read_text_map(v[1]), _optional(read_text, v[2])),
    13: lambda v: ForwardRequest(tuple(map(_copy, read_array(v[0])))),
    14: lambda v: RulesChanged(read_natural(v[0])),
}

REPORT_CODE = 12
"""Reports of LLAs have a module of their own, ``dynamoth.protocol.reports``, and share this space of codes."""


def pack_control(message: ControlMessage) -> bytes:
    """Serialise a control message."""
    return pack(_WRITE[type(message)](message))


@parser("a control message")
def unpack_control(data: bytes) -> ControlMessage:
    """Read a control message from anyone.

    Raises:
        MalformedMessage: when it is not one, or of a kind that this software does not know.

    """
    value = read_array(unpack(data))
    code = value[0] if value else None
    read = _READ.get(code) if type(code) is int else None
    if read is None:
        raise MalformedMessage(f"not a control message that this software knows: {shortened(value)}")
    return read(value[1:])


def seal_control(message: ControlMessage) -> bytes:
    """Put a control message into an envelope, for travel on a user's channel."""
    return seal(0, 0, 0, pack_control(message), CONTROL)
