"""The vocabulary of a publisher: its own events and actions, and its options."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dynamoth.machine.events import LinkAction, LinkEvent
from dynamoth.protocol.stored_plan import VERSION_READ_INTERVAL_S
from dynamoth_client.machines.local_plan import NewerSoftware

PUBLISH_TIMEOUT_S_MAX = 10.0
"""How long a message waits for an answer at most. A channel that moves has moved by then, a replica has taken the place
of another, and a lost link has come back if its server has: waiting longer would not help."""

PUBLISH_TIMEOUT_S_MIN = 1.5
"""How long it waits at least. The first message to a server waits for the connection, whose lost first packet is sent
again after 1 s; and a replica takes the place of another after ``failover_s``, 1 s. Half a second is left for the
answer that comes then, and for a machine that is busy."""


@dataclass(slots=True)
class Publish:
    """Event: the application publishes. ``token`` comes back with the outcome."""

    token: Hashable
    channel: bytes
    payload: bytes


@dataclass(slots=True)
class PublishAll:
    """Event: the application publishes messages, each with its ``token``, channel and payload, in this order."""

    messages: Sequence[tuple[Hashable, bytes, bytes]]


@dataclass(slots=True)
class Published:
    """Action: the server has the message, or at least one replica has; ``receivers`` clients there got it (G7)."""

    token: Hashable
    receivers: int


@dataclass(slots=True)
class PublishedAll:
    """Action: one ``Published`` for each token, and at least one."""

    tokens: Sequence[Hashable]
    receivers: Sequence[int]


@dataclass(slots=True)
class PublishFailed:
    """Action: no server has answered, for ``reason``. The message may or may not be delivered.

    ``late``: a server is connected and has not answered. Otherwise there is no connection, or no room.
    """

    token: Hashable
    reason: str
    late: bool = False


@dataclass(slots=True)
class PublishRefused:
    """Action: the server answered with an error (its text). The message is not delivered."""

    token: Hashable
    error: str


PublisherEvent = LinkEvent | Publish | PublishAll

Outcome = Published | PublishedAll | PublishFailed | PublishRefused
"""The outcomes of messages: the application gets one for each message."""

PublisherAction = LinkAction | Outcome | NewerSoftware


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """Options of a publisher."""

    envelope: bool = True
    """False sends plain payloads that plain Redis clients can read. No guarantee holds for them."""
    publish_timeout_s: float = PUBLISH_TIMEOUT_S_MAX
    """A message that no server has answered in this time fails; it may have been delivered all the same."""
    unanswered_max: int = 100_000
    """Messages per server that wait for its answer at most; one more fails at once."""
    route_change_window_s: float = 5.0
    """A route change is announced to subscribers if the previous message went out at most this long before it. Longer
    than any forwarded copy may take."""
    observers_interval_s: float = VERSION_READ_INTERVAL_S
    """How often a publisher asks a server that it uses how many agents observe it (G7), and reads the version of the
    plan there."""
    channel_idle_s: float = 600.0
    """The numbering of a channel without messages for this time is forgotten and begins again (FIRST)."""
    channels_max: int = 1_000_000
    """Channels whose numbering is kept at most; past it, the oldest are forgotten although they are not idle."""
    straggler_s: float = 0.2
    """How long a message that one replica has answered waits for the answers of the others."""
    plan_missing_s: float = 1.0
    """How long messages wait for the stored plan of a server that has none to be believed, counted from when that was
    first seen; five times what a balancer takes to write it again. Then they count as confirmed."""
    look_elsewhere_s: float = 0.4
    """How long a server may be unreachable before another one is asked where its channels are; up to half as long
    again, so that not all clients ask at once. Infinity: none is."""
    silent_s: float = 1.0
    """How long a connected server may leave a message unanswered before its channels are looked up elsewhere."""
    look_again_s: float = 1.0
    """How often it is asked again while messages wait."""
    failover_s: float = 1.0
    """How long a replica may be away before another one takes its place (ALL_SUBSCRIBERS)."""
