"""The vocabulary of a broker: its own events and actions, and its options."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dynamoth.edge.frames import Connect, Frame, UserFrame
from dynamoth.edge.interests import Scalar
from dynamoth.edge.log import LogOptions
from dynamoth.globs import compile_glob
from dynamoth.machine.events import LinkAction, LinkEvent
from dynamoth.settings.sections import SessionSettings

ConnectionId = Hashable
"""What the runtime calls a user's connection; the machine only keeps it."""

# Close codes of a user's connection; docs/brokers.md says what the user does then.
GOING_AWAY = 1001
RESTARTING = 1012
FULL = 1013
TOKEN_REFUSED = 4001
TOKEN_EXPIRED = 4002
TOO_SLOW = 4003
TAKEN_OVER = 4004
PROTOCOL_ERROR = 4005
NORMAL = 1000
MOVE_FAILED = 4006

LOST = 1006
"""The code of a connection that has ended without a close code."""

RETRY_MS = 1000
"""What was refused for now may be asked for again after this time."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a user: patterns of channels and queries. ``user`` is the subject of the token, empty for anybody.

    ``expires_at`` is a time of the machine; None: never.
    """

    user: str = ""
    channels: tuple[str, ...] = ("*",)
    queries: tuple[str, ...] = ("*",)
    publish: tuple[str, ...] = ()
    #: Parameters whose values the token fixes, by query and name.
    bound: dict[str, dict[str, Scalar]] = field(default_factory=dict[str, dict[str, Scalar]])
    expires_at: float | None = None

    def may_subscribe(self, kind: str, name: str) -> bool:
        """Return whether the user may subscribe to a channel, its presence, or a query."""
        return _matches(self.queries if kind == "query" else self.channels, name)

    def may_publish(self, channel: str) -> bool:
        """Return whether the user may publish on a channel."""
        return _matches(self.publish, channel)


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(pattern == "*" or _expression(pattern.encode()).fullmatch(name.encode()) for pattern in patterns)


_expression = lru_cache(4096)(compile_glob)
"""Users have the same few patterns, and each thing that one publishes is compared with them."""


# Events.


@dataclass(slots=True)
class Opened:
    """Event: a user's connection has sent its ``connect``, with a token that grants this.

    ``address`` is the host at its other end: users without a token share the limits of their address.
    """

    connection: ConnectionId
    connect: Connect
    grant: Grant
    address: str = ""


@dataclass(slots=True)
class Received:
    """Event: a frame of a connection that was ``Opened``; not a ``Connect``, and no ``Refresh``."""

    connection: ConnectionId
    frame: UserFrame


@dataclass(slots=True)
class Refreshed:
    """Event: a connection has brought a new token, which grants this."""

    connection: ConnectionId
    grant: Grant


@dataclass(slots=True)
class Closed:
    """Event: a connection that was ``Opened`` is gone; ``code`` is the user's close code, 1006 without one."""

    connection: ConnectionId
    code: int = LOST


@dataclass(slots=True)
class Overflowed:
    """Event: more bytes wait to be sent to a connection than may."""

    connection: ConnectionId


@dataclass(slots=True)
class Writable:
    """Event: the unsent bytes of a connection have fallen below a quarter of their bound."""

    connection: ConnectionId


@dataclass(slots=True)
class ChannelConfirmed:
    """Event: the Dynamoth client has confirmed a subscription."""

    channel: bytes


@dataclass(slots=True)
class ChannelEnded:
    """Event: the Dynamoth client has ended a subscription. It comes for each ``UnsubscribeChannel``."""

    channel: bytes


@dataclass(slots=True)
class ChannelFailed:
    """Event: a Redis server has refused a subscription."""

    channel: bytes
    reason: str


@dataclass(slots=True)
class Publications:
    """Event: messages of channels, ``(channel, payload)``, in order.

    A payload with attributes ``publisher`` and ``number`` has a place in the sequence of its publisher.
    """

    messages: Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class ChannelGap:
    """Event: messages of a channel are missing here; ``count`` None for unknown."""

    channel: bytes
    count: int | None
    reason: str


@dataclass(slots=True)
class BarrierPassed:
    """Event: all that was published on the channel before ``RaiseBarrier`` has come."""

    channel: bytes


@dataclass(slots=True)
class MessagePublished:
    """Event: the Dynamoth client has published a message, or has failed to: ``reason`` says why then."""

    token: object
    reason: str | None = None


@dataclass(slots=True)
class RecordsPosted:
    """Event: somebody with a token that grants this posts records of a dataset; ``RecordsAnswered`` follows."""

    request: object
    dataset: str
    records: Sequence[bytes]
    grant: Grant


@dataclass(slots=True)
class MoveSession:
    """Event: a user is to be moved to one of these brokers."""

    connection: ConnectionId
    to: tuple[str, ...]


@dataclass(slots=True)
class Drain:
    """Event: move every user to other brokers, at ``sessions_per_s``, and take no more."""

    sessions_per_s: float


@dataclass(slots=True)
class EndDrain:
    """Event: take users again; those who were not asked to move yet stay."""


@dataclass(slots=True)
class ResourcesMeasured:
    """Event: the highest use of any resource but traffic: the processor's, for example. 1 is all of it."""

    ratio: float


@dataclass(slots=True)
class Stop:
    """Event: close every connection, so that users connect elsewhere. ``Stopped`` follows."""


BrokerEvent = (
    LinkEvent | Opened | Received | Refreshed | Closed | Overflowed | Writable | ChannelConfirmed | ChannelEnded
    | ChannelFailed | Publications | ChannelGap | BarrierPassed | MessagePublished | MoveSession
    | Drain | EndDrain | ResourcesMeasured | RecordsPosted | Stop
)  # fmt: skip


# Actions.


@dataclass(slots=True)
class Transmit:
    """Action: send a frame to one connection."""

    connection: ConnectionId
    frame: Frame


@dataclass(slots=True)
class Broadcast:
    """Action: send the same frame to many connections."""

    connections: Sequence[ConnectionId]
    frame: Frame


@dataclass(slots=True)
class CloseConnection:
    """Action: close a connection. ``Closed`` follows."""

    connection: ConnectionId
    code: int
    reason: str


@dataclass(slots=True)
class SubscribeChannel:
    """Action: subscribe to a channel with the Dynamoth client."""

    channel: bytes


@dataclass(slots=True)
class UnsubscribeChannel:
    """Action: end that subscription."""

    channel: bytes


@dataclass(slots=True)
class RaiseBarrier:
    """Action: have ``BarrierPassed`` come behind everything that was published on the channel before."""

    channel: bytes


@dataclass(slots=True)
class PublishMessage:
    """Action: publish with the Dynamoth client; ``MessagePublished`` with the ``token`` follows if that is not None."""

    channel: bytes
    payload: bytes
    token: object = None


@dataclass(slots=True)
class RecordsAnswered:
    """Action: answer a request that posted records with the outcome of each: code and reason."""

    request: object
    outcomes: Sequence[tuple[str, str]]


@dataclass(slots=True)
class Stopped:
    """Action: note that log servers have everything that users have acknowledged; the process may end."""


@dataclass(slots=True)
class LogLinkChanged:
    """Action: a connection to a log server is up (``reason`` None), or was lost. For the log of the process."""

    server: str
    reason: str | None


@dataclass(slots=True)
class ControlLinkChanged:
    """Action: coordinators can be reached through a server (``reason`` None), or not. For the log of the process."""

    link: str
    reason: str | None


@dataclass(slots=True)
class Noted:
    """Action: something for the log of the process. A warning: somebody has to mend something."""

    message: str
    cause: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    is_warning: bool = False


BrokerAction = (
    LinkAction | Transmit | Broadcast | CloseConnection | SubscribeChannel | UnsubscribeChannel | RaiseBarrier
    | PublishMessage | RecordsAnswered | Stopped | LogLinkChanged | ControlLinkChanged | Noted
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BrokerOptions(SessionSettings):
    """Options of a broker."""

    #: The name of this broker, in reports and in ``connected``.
    id: str
    #: Where users reach it; empty where the coordinator can send nobody.
    url: str = ""
    #: Latitude and longitude in degrees; None: unknown.
    location: tuple[float, float] | None = None
    #: Servers through which coordinators and operators are spoken to, by id; empty: there are none.
    control: dict[str, str] = field(default_factory=dict[str, str])
    #: Log servers, by id.
    logs: dict[str, str] = field(default_factory=dict[str, str])
    #: Patterns of the channels that are logged.
    history: tuple[str, ...] = ()
    #: Patterns of the other channels of which a user who falls behind gets the latest publication only.
    conflate: tuple[str, ...] = ()
    #: Patterns of the channels on which users see who else is present.
    presence: tuple[str, ...] = ()
    #: A user whose broker has died leaves after this time, unless another broker serves it then.
    presence_ttl_s: float = 30.0
    #: A user whose connection was lost leaves after this time, unless a broker serves it again.
    presence_grace_s: float = 10.0
    log: LogOptions = field(default_factory=LogOptions)
    #: Whether queries and datasets are those of the catalog at the log servers.
    has_data_cluster: bool = False
    #: A broker may still go by a former definition for this time after a change.
    believed_s: float = 5.0
    #: Other brokers, for users who come when this one is full, drained or gone.
    alternates: tuple[str, ...] = ()
    #: A user waits this long for the server of a log.
    log_wait_s: float = 5.0
    #: Publications that are read from a log at a time, at most. They have at most 128 KiB together, or are one: a log
    #: server executes nothing else meanwhile.
    page_entries: int = 64
    #: A user who is behind is sent this many bytes in 10 ms: the connection says in that time whether it is full. It
    #: may be more by one publication, or by ``recent_bytes_max``. This comes on top of ``unsent_bytes_max``.
    burst_bytes: int = 262_144
    #: The latest publications of an interest that are kept for users who come back, at most, and their bytes.
    recent_entries_max: int = 128
    recent_bytes_max: int = 65_536
    #: Bound of those of all interests together.
    recent_bytes_all_max: int = 128 * 1024 * 1024
    #: Publications that wait for an earlier one, at most; more are read from the log later.
    pending_max: int = 1000
    pong_timeout_s: float = 10.0
    ack_s: float = 1.0
    #: Acknowledged positions that wait for a log server, at most; with more, what they cover may come again.
    unsaved_positions_max: int = 100_000
    #: A user who is behind for this time without a break is disconnected at the next ping: up to ``ping_s`` later.
    slow_s_max: float = 60.0
    #: A user who was asked to move has this time.
    move_timeout_s: float = 15.0
    #: Users who are asked to move at once spread over this time.
    move_spread_s: float = 0.5
    #: A user who has said ``leave`` is disconnected after this time, whether ``bye`` was sent or not, if the user's own
    #: end has not done so.
    grace_s: float = 10.0
