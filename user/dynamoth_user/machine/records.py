"""What an end user's client keeps of its subscriptions and connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dynamoth.edge.frames import SubscriptionRequest
from dynamoth.edge.interests import Interest
from dynamoth.edge.publications import Position


class Role(Enum):
    """What a connection is for.

    =========  =========================================================================
    SERVING    frames come from here; the only one but during a migration
    CANDIDATE  a migration to it has begun; it is asked to resume every subscription
    LEAVING    the migration is done but for ``bye``; it still delivers
    =========  =========================================================================
    """

    SERVING = auto()
    CANDIDATE = auto()
    LEAVING = auto()


@dataclass(slots=True, eq=False)
class Connection:
    """One connection to a broker."""

    number: int
    url: str
    role: Role
    #: When an attempt is given up, or silence ends the connection.
    deadline: float
    #: Whether it was opened, ``connect`` was sent, and ``connected`` came.
    is_open: bool = False
    is_asked: bool = False
    is_up: bool = False
    #: Whether the runtime reads nothing from it, as the application is behind; and when a pong shows that we are alive.
    is_paused: bool = False
    alive_due: float = 0.0
    broker: str = ""
    ping_s: float = 25.0
    ticket: str | None = None
    has_moved_in: bool = False
    has_said_bye: bool = False
    #: The subscriptions that it was asked for, by the number in ``ref``.
    asked: dict[int, SubscriptionRequest] = field(default_factory=dict[int, SubscriptionRequest])
    #: Confirmed subscriptions: the epoch by interest id; None for a live one.
    confirmed: dict[str, int | None] = field(default_factory=dict[str, "int | None"])
    #: Ids of interests that begin before what was asked for: their log has lost that, within its epoch.
    went_back: set[str] = field(default_factory=set[str])
    #: The time that its last error asked for.
    retry_after_s: float = 0.0
    #: Its last error, as code and message.
    error: tuple[str, str] = ("", "")
    #: The ``exp`` of its present token, where it is known, and when the broker ends it.
    token_exp: float | None = None
    token_ends_at: float | None = None


@dataclass(slots=True)
class HeldPublication:
    """A publication of a live interest that came from the new broker, and waits for earlier ones of the old broker."""

    payload: bytes
    place: tuple[int, int] | None


@dataclass(slots=True, eq=False)
class UserSubscription:
    """One subscription of the application."""

    interest: Interest
    #: The last publication, or the last gap, that went to the application; None while it begins with what is new.
    received: Position | None
    #: Epochs of the log that are over.
    past_epochs: set[int] = field(default_factory=set[int])
    #: Whether brokers keep its position: it begins there, and what was handled is acknowledged.
    is_stored: bool = False
    #: Whether others see that this session is on the channel.
    is_present: bool = False
    #: Up to where the application has handled it; what was acknowledged, and over which connection.
    handled: Position | None = None
    acknowledged: Position | None = None
    acknowledged_over: int = 0
    is_confirmed: bool = False
    #: Known from the first confirmation on.
    is_live: bool | None = None
    #: A live one whose connection was lost since its confirmation: a gap is due with the next confirmation.
    is_interrupted: bool = False
    #: Of a live one: the latest number by publisher.
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    held: list[HeldPublication] = field(default_factory=list[HeldPublication])
    #: During a migration: whether the old broker may still send earlier publications.
    awaits_old: bool = False

    def request(self, ref: int) -> SubscriptionRequest:
        """Return what a broker is asked for."""
        return SubscriptionRequest(ref, self.interest, self.received, self.is_stored, self.is_present)
