"""The vocabulary of an end user's client: its events and actions, and its options."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.edge.frames import BrokerFrame, UserFrame
from dynamoth.edge.interests import Interest
from dynamoth.edge.publications import Position
from dynamoth.machine.events import Start, Tick

# Events.


@dataclass(slots=True)
class ConnectionOpened:
    """Event: a connection is open."""

    number: int


@dataclass(slots=True)
class ConnectionClosed:
    """Event: a connection was closed, lost, or could not be opened. ``code`` is the close code, 1006 without one.

    It also answers ``CloseConnection``, unless it has come before.
    """

    number: int
    code: int
    reason: str


@dataclass(slots=True)
class FrameReceived:
    """Event: a frame of a broker."""

    number: int
    frame: BrokerFrame


@dataclass(slots=True)
class TokenReady:
    """Event: the application has given the token that ``NeedToken`` has asked for.

    ``expires_at`` is its claim ``exp``, in seconds since 1970, where it can be read.
    """

    number: int
    token: str | None
    expires_at: float | None = None


@dataclass(slots=True)
class AddSubscription:
    """Event: the application subscribes. ``since`` None: to what is published from now on.

    If it is *stored*, brokers keep its position, and ``since`` None is that position. ``is_present``: others see that
    this session is on the channel.
    """

    interest: Interest
    since: Position | None = None
    is_stored: bool = False
    is_present: bool = False


@dataclass(slots=True)
class RemoveSubscription:
    """Event: the application unsubscribes."""

    interest: Interest


@dataclass(slots=True)
class PublishMessage:
    """Event: the application publishes. ``PublishEnded`` answers it."""

    token: object
    channel: Interest
    payload: bytes


@dataclass(slots=True)
class ForgetPublication:
    """Event: the application does not wait for a publication any more. It is not sent, unless it already was."""

    token: object


@dataclass(slots=True)
class Handled:
    """Event: the application has handled everything of an interest up to a position."""

    interest: Interest
    position: Position


@dataclass(slots=True)
class ReadingPaused:
    """Event: the runtime reads nothing from a connection for now, as the application is behind; or it reads again."""

    number: int
    is_paused: bool


@dataclass(slots=True)
class Close:
    """Event: the application closes the client."""


UserEvent = (
    Start | Tick | ConnectionOpened | ConnectionClosed | FrameReceived | TokenReady | AddSubscription
    | RemoveSubscription | PublishMessage | ForgetPublication | Handled | ReadingPaused | Close
)  # fmt: skip


# Actions.


@dataclass(slots=True)
class OpenConnection:
    """Action: connect to a broker. ``ConnectionOpened`` or ``ConnectionClosed`` follows."""

    number: int
    url: str


@dataclass(slots=True)
class CloseConnection:
    """Action: close a connection."""

    number: int
    code: int
    reason: str


@dataclass(slots=True)
class SendFrame:
    """Action: send a frame; lost without notice if the connection is."""

    number: int
    frame: UserFrame


@dataclass(slots=True)
class NeedToken:
    """Action: ask the application for a token; ``TokenReady`` follows."""

    number: int


@dataclass(slots=True)
class Deliver:
    """Action: a publication for the application. ``position`` is that of a logged interest."""

    interest: Interest
    payload: bytes
    position: Position | None


@dataclass(slots=True)
class DeliverGap:
    """Action: publications are missing here, in their place among the others.

    ``first`` and ``last`` name the offsets that are missing; ``last`` None: nobody knows how many. ``count``: how many
    publications of a live interest are missing, None for unknown. ``position`` is where a logged interest goes on.
    """

    interest: Interest
    reason: str
    first: int | None = None
    last: int | None = None
    count: int | None = None
    position: Position | None = None


@dataclass(slots=True)
class MembersListed:
    """Action: these are present on a channel now: user by member. With very many not all are named; all count."""

    interest: Interest
    members: dict[str, str]
    count: int


@dataclass(slots=True)
class MemberChanged:
    """Action: somebody has joined or left since ``MembersListed``."""

    interest: Interest
    is_join: bool
    member: str
    user: str


@dataclass(slots=True)
class Confirmed:
    """Action: a subscription is confirmed, for the first time: what is published from now on is delivered."""

    interest: Interest
    position: Position | None


@dataclass(slots=True)
class Refused:
    """Action: a broker has refused a subscription for good. It is gone."""

    interest: Interest
    code: str
    reason: str


@dataclass(slots=True)
class PublishEnded:
    """Action: a publication was accepted, or not: ``code`` and ``reason`` say why not.

    ``is_retryable``: the same publication can succeed later.
    """

    token: object
    position: Position | None = None
    code: str | None = None
    reason: str = ""
    is_retryable: bool = False


@dataclass(slots=True)
class Served:
    """Action: a broker serves the session now; ``moved`` tells that another one did so without interruption."""

    broker: str
    url: str
    moved: bool


@dataclass(slots=True)
class Interrupted:
    """Action: no broker serves the session now; the client connects again in ``retry_s``. 0: it does so already.

    ``url`` is the broker's that has served the session, or was tried in vain.
    """

    reason: str
    retry_s: float
    url: str = ""


@dataclass(slots=True)
class Complained:
    """Action: a broker has sent an error that ends nothing, such as a token that it has refused."""

    code: str
    message: str
    url: str


@dataclass(slots=True)
class Failed:
    """Action: the client has given up: ``code`` is the close code that says why."""

    code: int
    reason: str


UserAction = (
    OpenConnection | CloseConnection | SendFrame | NeedToken | Deliver | DeliverGap | MembersListed | MemberChanged
    | Confirmed | Refused | PublishEnded | Served | Interrupted | Complained | Failed
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOptions:
    """Options of an end user's client."""

    urls: tuple[str, ...]
    session: str
    #: Whether the application gives a token for each connection.
    has_token: bool = False
    #: Whether this token is always the same: one that has expired ends the client, and it is never refreshed.
    has_fixed_token: bool = False
    #: Of the first connection; each further one has the next number. Larger than any of an earlier run.
    generation: int = 0
    backoff_s_min: float = 0.5
    backoff_s_max: float = 20.0
    #: An attempt to connect may take this time, until `connected`.
    connect_timeout_s: float = 10.0
    #: A connection without a frame for `ping_s` of the broker, and this, is lost.
    silence_s: float = 10.0
    #: How long a live publication of the new broker waits for an earlier one of the old broker, after `bye`.
    hold_s: float = 1.0
    held_max: int = 10_000
    #: Publications that wait until a broker serves the session.
    unsent_max: int = 1000
    #: A subscription that a broker cannot serve now is asked for again after this time, if the broker names none.
    retry_s: float = 1.0
    #: Publishers of one live interest whose numbers are remembered.
    publishers_max: int = 10_000
    #: A token is refreshed this long before it expires.
    refresh_s: float = 25.0
    #: And no more often than this, whatever its life is.
    refresh_s_min: float = 1.0
