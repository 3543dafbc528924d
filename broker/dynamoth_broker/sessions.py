"""The users of a broker: one session per connection, with its subscriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from ipaddress import IPv6Address, IPv6Network
from typing import TYPE_CHECKING

from dynamoth.edge.publications import Position
from dynamoth_broker.events import ConnectionId, Grant

if TYPE_CHECKING:
    from dynamoth_broker.interests import SharedInterest


IPV6_PREFIX = 64
"""Bits of an address that its network has: the host chooses the others itself (RFC 4291, RFC 8981)."""


class Stage(Enum):
    """Where a subscription is.

    ========  =====================================================================================
    WAITING   asked for; the interest is being joined, or the log is being read for the first time
    CATCHING  confirmed; publications are read from the log, behind ``cursor``
    LIVE      confirmed; gets what comes, as all others do
    ========  =====================================================================================
    """

    WAITING = auto()
    CATCHING = auto()
    LIVE = auto()


@dataclass(slots=True, eq=False)
class Subscription:
    """One session's subscription to one interest."""

    session: Session
    interest: SharedInterest
    #: The user's number for it.
    ref: int
    #: Where it begins; None: with what is published from now on.
    since: Position | None
    #: Whether ``moved_in`` waits for its answer.
    is_of_connect: bool = False
    stage: Stage = Stage.WAITING
    #: While CATCHING: the last offset that was sent; of a live interest, how many publications had come. A LIVE
    #: one has that of its interest.
    cursor: int = 0
    #: Of a stored one: the key of its position, whether that is being looked for, and what was acknowledged last.
    position_key: bytes | None = None
    awaits_position: bool = False
    acknowledged: Position | None = None
    #: Of a standing query: whether its interest is still to be registered.
    awaits_registration: bool = False
    #: While CATCHING: whether a read of the log is under way for it.
    is_reading: bool = False
    #: Whether others are to see that the session is on the channel.
    is_present: bool = False
    #: Whether the user has unsubscribed.
    has_unsubscribed: bool = False
    #: Ended by the user, or with the session.
    is_ended: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """One user's connection."""

    connection: ConnectionId
    name: str
    grant: Grant
    generation: int
    #: When a frame of the user came last.
    heard_at: float
    #: When its connection was opened.
    opened_at: float = 0.0
    #: Where it comes from: the host, without a port.
    address: str = ""
    #: By interest id.
    subscriptions: dict[str, Subscription] = field(default_factory=dict[str, Subscription])
    #: How many subscriptions of its ``connect`` are not answered; 0 when ``moved_in`` was sent.
    unanswered: int = 0
    #: Since when too much waits to be sent; None while it does not.
    slow_since: float | None = None
    #: Bytes that were sent in the present burst to subscriptions that are behind, and when it began.
    burst_bytes: int = 0
    burst_at: float = 0.0
    #: Subscriptions that go on with the next burst.
    waiting: dict[Subscription, None] = field(default_factory=dict["Subscription", None])
    #: Channels whose barriers must pass before ``bye``; None while it has not left.
    leaving_channels: dict[bytes, None] | None = None
    #: Until when it is to have moved; None: it was not asked to.
    move_until: float | None = None
    is_closed: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """User and session: what two connections of one session share."""
        return self.grant.user, self.name

    @property
    def payer(self) -> tuple[str, str]:
        """Whose limits count: those of the token's subject, without one those of the network."""
        return self.grant.user, "" if self.grant.user else network_of(self.address)


def network_of(address: str) -> str:
    """Return what one user has of addresses: one of IPv4, or a network of IPv6, of which any host has 2^64."""
    try:
        ip = IPv6Address(address)
    except ValueError:
        return address
    mapped = ip.ipv4_mapped
    return str(mapped or IPv6Network((ip, IPV6_PREFIX), strict=False))
