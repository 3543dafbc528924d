"""The life of a publication: how the application asks for it, what the publisher remembers, what comes of it.

First the events and actions of ``PublisherMachine``; then its records: of a channel, of messages that wait for their
answers, and of servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dynamoth.machine.outbox import Outbox
from dynamoth.plan.plan import Location
from dynamoth.protocol.stored_plan import VERSION_READ_INTERVAL_S

LOOKED_UP_MAX = 1000
"""Channels of an unreachable server that are looked up at once at most; the others the next time."""

LEFT_MAX = 4
"""Servers that a channel has left and that are remembered: what was sent there last may not have been observed."""

PUBLISH_TIMEOUT_S_MAX = 10.0
"""How long a message waits for an answer at most. A channel that moves has moved by then, a replica has taken the place
of another, and a link that was lost has come back, if its server has: nothing is won by waiting longer."""

PUBLISH_TIMEOUT_S_MIN = 1.5
"""How long it waits at least. The first message to a server waits for the connection, whose lost first packet is sent
again after 1 s; and a replica takes the place of another after ``failover_s``, 1 s. Half a second is left for the
answer that comes then, and for a machine that is busy."""


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """What a publisher may choose."""

    envelope: bool = True
    """False sends plain payloads that plain Redis clients can read. No guarantee holds for them."""
    publish_timeout_s: float = PUBLISH_TIMEOUT_S_MAX
    """A message that no server has answered for so long fails; it may have been delivered all the same."""
    unanswered_max: int = 100_000
    """Messages per server that wait for its answer at most; one more fails at once."""
    route_change_window_s: float = 5.0
    """A route change is announced to subscribers if the previous message went out at most so long before it. Longer
    than any forwarded copy may take."""
    observers_interval_s: float = VERSION_READ_INTERVAL_S
    """How often a publisher asks a server that it uses how many agents observe it (G7), and reads the version of the
    plan there."""
    channel_idle_s: float = 600.0
    """The numbering of a channel that was not published to for so long is forgotten and begins anew (FIRST)."""
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
    """How long a server that is connected may leave a message unanswered before it counts as unreachable in that."""
    look_again_s: float = 1.0
    """How often it is asked again while messages wait."""
    failover_s: float = 1.0
    """How long a replica may be away before another one takes its place (ALL_SUBSCRIBERS)."""


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
    """Action: the server has the message, or at least one replica has; it went to so many clients there (G7)."""

    token: Hashable
    receivers: int


@dataclass(slots=True)
class PublishedAll:
    """Action: as so many ``Published``, at least one."""

    tokens: Sequence[Hashable]
    receivers: Sequence[int]


@dataclass(slots=True)
class PublishFailed:
    """Action: no server has answered, for ``reason``. The message may or may not be delivered.

    ``late``: a server is connected and owes the answer. Otherwise there is no connection, or no room.
    """

    token: Hashable
    reason: str
    late: bool = False


@dataclass(slots=True)
class PublishRefused:
    """Action: the server answered with an error (its text). The message is not delivered."""

    token: Hashable
    error: str


# What a publisher remembers.


@dataclass(slots=True)
class PublishedChannel:
    """What a publisher remembers of a channel that it publishes to."""

    #: The number of the latest message; equal to ``floor`` before the first.
    sequence: int
    floor: int
    #: Where the latest message went, or the first will go; several under ALL_PUBLISHERS only.
    locations: tuple[Location, ...]
    epoch: int
    #: Of the local plan, when locations and epoch were looked up there.
    generation: int
    used_at: float
    #: Its messages carry no envelopes and no numbers.
    plain: bool = False
    #: Servers where the latest message did not go any more, or of which its number is to be said; the latest last.
    left: tuple[str, ...] = ()
    #: Where the next message goes, while there is nothing about it to be decided: the one server of the only location.
    direct_server: PublisherServer | None = None
    physical: bytes = b""
    #: The latest check of the present route; None when it was confirmed, or is not in doubt.
    check: Check | None = None
    #: The version of the stored plan that named the present route when it was last read. -1: none has.
    version: int = -1

    def uses(self, server: str) -> bool:
        """Tell whether messages went to a server lately, or go there."""
        return server in self.left or any(location.server == server for location in self.locations)

    def note_left(self, *servers: str) -> None:
        """Remember servers where something may be missing of what was published."""
        self.left = (*self.left, *servers)[-LEFT_MAX:]

    def follow(self, locations: tuple[Location, ...], epoch: int) -> bool:
        """Note where messages go from now on; return whether that is elsewhere than before."""
        changed = locations != self.locations
        if changed:
            servers = {location.server for location in locations}
            self.note_left(*(location.server for location in self.locations if location.server not in servers))
        self.locations, self.epoch = locations, epoch
        return changed

    def change_format(self, *, plain: bool) -> None:
        """Go on with envelopes, or without; numbers begin anew (FIRST), as plain messages have none."""
        self.plain = plain
        self.floor = self.sequence


class Waiting:
    """A message that a server has not answered yet, or some of several."""

    def __init__(self, token: Hashable, expires_at: float, channel: bytes) -> None:
        self.token = token
        #: When no server is waited for any more; and when the message is looked at next. See ``Answers``.
        self.expires_at = self.tell_at = expires_at
        self.channel = channel

    # What few messages need is not stored with each.
    #: Clients that it went to, as far as servers have answered; None before the first did.
    receivers: int | None = None
    #: The latest error that a server has answered with.
    refusal: str = ""
    #: Servers that it was sent to in the place of the first.
    also_at: tuple[str, ...] = ()
    #: If it goes to several replicas: the servers that have not answered.
    missing: tuple[str, ...] = ()
    #: Those of them that have it and were not asked yet to forward it.
    holders: tuple[str, ...] = ()
    #: How many requests to forward it are unanswered.
    requests: int = 0
    #: The physical channel and the envelope that it was sent with; None where nothing is promised.
    sent: tuple[bytes, bytes] | None = None
    #: The application has been told of the outcome; a reply that still comes is dropped.
    done: bool = False


class Unconfirmed(Waiting):
    """A message whose route was in doubt when it was sent: its outcome is known behind that of a :class:`Check`."""

    #: The stored plan names the place where it was published, or cannot be read.
    confirmed: bool = False
    #: No further answer of a server is waited for: the outcome is known, but for the confirmation.
    answered: bool = False


@dataclass(slots=True)
class Together:
    """Messages, each for one server only, that went out to it together over the present connection.

    Cheaper than one ``Waiting`` for each, which take its place when the connection is lost.
    """

    tokens: list[Hashable]
    expires_at: float
    #: How many the server has answered: the first ones.
    answered: int = 0
    #: The application has been told of all outcomes; replies that still come are dropped.
    done: bool = False


@dataclass(slots=True)
class HandOver:
    """The token of a request to forward a message to the replicas that have not answered."""

    message: Waiting


@dataclass(slots=True, eq=False)
class Check:
    """A reading of the stored plan, and the messages of a channel that wait for it."""

    channel: bytes
    #: Where the messages went.
    locations: tuple[Location, ...]
    begun_at: float
    #: They and their envelopes, in the order of their numbers.
    messages: list[tuple[Waiting, bytes]] = field(default_factory=list[tuple[Waiting, bytes]])
    #: No reply is waited for: the messages are confirmed, or were sent again.
    done: bool = False


@dataclass(slots=True, eq=False)
class CheckAt:
    """The token of the reading at one location; under ALL_PUBLISHERS there are several, and the first reply counts."""

    check: Check
    location: Location
    #: The reading is repeated, behind one of the header.
    is_again: bool = False


@dataclass(slots=True, eq=False)
class VersionCheck:
    """A reading of the version of a server's stored plan, and the checks that an unchanged version confirms."""

    #: When it was begun; messages share it until the reply.
    begun_at: float
    checks: list[Check] = field(default_factory=list[Check])
    is_sent: bool = False


Token = Waiting | Together | HandOver | CheckAt | VersionCheck | None
"""What a command in an outbox is for; None: nothing waits for its answer."""


@dataclass(slots=True, eq=False)
class PublisherServer:
    """What a publisher knows of a server that it publishes to."""

    outbox: Outbox
    #: What the outbox holds of the application's messages, oldest first; those that are done leave from the left.
    waiting: deque[Waiting | Together] = field(default_factory=deque["Waiting | Together"])
    #: The messages of the present event that go out together, and their tokens; empty between events.
    commands: list[tuple[bytes, bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes, bytes]])
    tokens: list[Hashable] = field(default_factory=list[Hashable])
    run_id: str | None = None
    up: bool = False
    #: Since when the link is down; infinity while it is up.
    down_since: float = float("inf")
    #: When the connection was lost, until it was looked up where the channels are that were used there.
    lost_at: float | None = None
    #: Not before this is another server asked where its channels are.
    look_at: float = float("-inf")
    #: How often that was done.
    looks: int = 0
    #: It is away for so long that replicas elsewhere take its place.
    avoided: bool = False
    #: Whether something may have got lost on the way here: subscribers are to be told the latest numbers.
    owes_heartbeats: bool = False
    #: Why the link is down, in words for the application.
    reason: str = "not connected yet: check that it is up and can be reached"
    #: We do not connect there: it is not trusted with our credentials. What is published there fails at once.
    refused: bool = False
    #: Channels whose messages failed so, to be looked up at another server.
    refused_channels: dict[bytes, None] = field(default_factory=dict[bytes, None])
    #: Agents that observe it: receivers of every message that are no clients.
    observers: int = 0
    #: Channels whose route the plan stored here has confirmed since the latest connection, and since the agents were
    #: last seen to be gone: it stays right as long, for no channel is moved away from a server without an agent.
    confirmed: set[bytes] = field(default_factory=set[bytes])
    observers_asked_at: float = float("-inf")
    #: The version of the plan that this process stored when it was last read; None before.
    version: int | None = None
    #: The reading of the version that is under way.
    version_check: VersionCheck | None = None
    #: Whether the latest reading of an entry found a plan to be believed, or one that this software cannot read.
    has_plan: bool = True
    #: Since when the plan stored here is missing, or not to be believed; infinity while it is there.
    missing_since: float = float("inf")
    #: Readings that found no plan to be believed, and when they are repeated.
    unread: list[CheckAt | VersionCheck] = field(default_factory=list["CheckAt | VersionCheck"])
    read_again_at: float = float("inf")
    #: Until when a message needs no other command beside it, if its channel is confirmed; minus infinity while down.
    clear_until: float = float("-inf")

    def note_refused(self, channel: bytes) -> None:
        """Note that a message of a channel failed, as this server is not trusted."""
        if len(self.refused_channels) < LOOKED_UP_MAX:
            self.refused_channels[channel] = None

    def is_clear_for(self, count: int, now: float) -> bool:
        """Tell whether so many messages of confirmed channels can go out here with no other command beside them."""
        return now < self.clear_until and count <= self.outbox.room
