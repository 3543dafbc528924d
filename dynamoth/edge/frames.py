"""The frames between end user and broker: ``docs/brokers.md`` explains each.

A frame is a map with a ``type``; on the wire it is JSON or msgpack. ``to_wire`` makes the map of a frame, and
``read_user_frame`` and ``read_broker_frame`` read one from anyone. Payloads are bytes here; on the wire they are text
(``d``) where they are UTF-8, else bytes or base64 (``b``).
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

from dynamoth.edge.interests import (
    ID_CHARACTERS,
    KINDS,
    Interest,
    channel_interest,
    presence_interest,
    query_interest,
)
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage
from dynamoth.protocol.wire import parser, read_array, read_natural, read_text, read_text_map, shortened

PROTOCOL_VERSION = 1

EXACT_MAX = 2**53 - 1
"""Largest number that every client can read exactly."""

SUBSCRIPTIONS_MAX = 1000
"""Subscriptions in one ``connect`` at most. A broker may allow fewer."""

TEXT_MAX = 8192
"""Longest token or ticket, in characters."""

URL_MAX = 2000
URLS_MAX = 64

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EPOCH = re.compile(r"[0-9a-f]{16}")
_INTEREST_ID = re.compile(rf"[A-Za-z0-9_-]{{{ID_CHARACTERS}}}")

Retry = Literal["never", "later", "elsewhere"]

_F = TypeVar("_F")

# Frames of the user.


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """One subscription that a user asks for.

    ``since`` None is "from now on". If it is *stored*, that is behind the position that brokers keep for this session.
    ``is_present``: whether others are to see that the session is on the channel.
    """

    ref: int
    interest: Interest
    since: Position | None = None
    is_stored: bool = False
    is_present: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """The first frame of a connection."""

    type: ClassVar = "connect"
    session: str
    generation: int = 0
    token: str | None = None
    ticket: str | None = None
    subs: tuple[SubscriptionRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Asks for a subscription, or to read one again from a position."""

    type: ClassVar = "subscribe"
    request: SubscriptionRequest


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Ends a subscription."""

    type: ClassVar = "unsubscribe"
    s: str


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Publishes on a channel."""

    type: ClassVar = "publish"
    ref: int
    channel: Interest
    payload: bytes


@dataclass(frozen=True, slots=True)
class AskMembers:
    """Asks who is present on a channel; ``interest`` is the presence of the channel."""

    type: ClassVar = "members"
    ref: int
    interest: Interest


@dataclass(frozen=True, slots=True)
class Ack:
    """Says up to which positions of which stored subscriptions the application has handled publications."""

    type: ClassVar = "ack"
    p: Mapping[str, Position]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Brings a new token."""

    type: ClassVar = "refresh"
    token: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Says that another broker serves the session now."""

    type: ClassVar = "leave"


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers a ping."""

    type: ClassVar = "pong"


UserFrame = Connect | Subscribe | Unsubscribe | PublishRequest | AskMembers | Ack | Refresh | Leave | Pong

# Frames of the broker.


@dataclass(frozen=True, slots=True)
class Connected:
    """Answers ``Connect``. Times are in seconds; ``expires_in_s`` is that of the token."""

    type: ClassVar = "connected"
    session: str
    broker: str
    alternates: tuple[str, ...] = ()
    ping_s: float = 25.0
    ack_s: float = 1.0
    expires_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Confirms a subscription. A live one has no position."""

    type: ClassVar = "subscribed"
    ref: int
    s: str
    position: Position | None = None
    recovered: bool = True


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    """Nothing of the interest comes any more."""

    type: ClassVar = "unsubscribed"
    s: str


@dataclass(frozen=True, slots=True)
class Data:
    """One publication: of a logged interest with its offset, of a live one with publisher and number, if known."""

    type: ClassVar = "data"
    s: str
    payload: bytes
    o: int | None = None
    p: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Publications are missing here. ``position`` says where a logged interest goes on."""

    type: ClassVar = "gap"
    s: str
    reason: str
    first: int | None = None
    last: int | None = None
    position: Position | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """A publication was accepted; ``position`` is where it is in the log, if its interest is logged."""

    type: ClassVar = "published"
    ref: int
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """Says who is present on a channel, exactly at a position of its presence.

    Each member is ``(member, user)``. With very many, not all are named; ``count`` is that of all.
    """

    type: ClassVar = "members"
    ref: int
    members: tuple[tuple[str, str], ...]
    count: int
    position: Position


@dataclass(frozen=True, slots=True)
class Move:
    """Asks the user to connect to one of these brokers, and then to leave this one."""

    type: ClassVar = "move"
    to: tuple[str, ...]
    within_ms: int
    deadline_ms: int
    ticket: str | None = None


@dataclass(frozen=True, slots=True)
class MovedIn:
    """Every subscription of ``Connect`` has been answered."""

    type: ClassVar = "moved_in"


@dataclass(frozen=True, slots=True)
class Bye:
    """Everything from before ``Leave`` has been sent, up to these offsets."""

    type: ClassVar = "bye"
    p: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Ping:
    """To be answered with ``Pong``."""

    type: ClassVar = "ping"


@dataclass(frozen=True, slots=True)
class Error:
    """Says what was refused, and whether to try again."""

    type: ClassVar = "error"
    code: str
    message: str
    retry: Retry = "never"
    retry_after_ms: int | None = None
    ref: int | None = None


BrokerFrame = (
    Connected | Subscribed | Unsubscribed | Data | Gap | Published | Members | Move | MovedIn | Bye | Ping | Error
)  # fmt: skip

Frame = UserFrame | BrokerFrame

# Writing.


def to_wire(frame: Frame) -> dict[str, Any]:
    """Return the map of a frame; values are text, numbers, booleans, lists, maps, and bytes (``b``) only."""
    wire: dict[str, Any] = {"type": frame.type}
    match frame:
        case Connect():
            wire["v"] = PROTOCOL_VERSION
            wire["subs"] = [_request_to_wire(request) for request in frame.subs]
        case Subscribe(request):
            return wire | _request_to_wire(request)
        case PublishRequest(_, channel, payload):
            return wire | {"ref": frame.ref, "channel": channel.name} | _payload_to_wire(payload)
        case AskMembers(ref, interest):
            return wire | {"ref": ref, "channel": interest.name}
        case Members():
            members = [[user, member] for member, user in frame.members]
            wire |= {"ref": frame.ref, "members": members, "count": frame.count}
            return wire | _position_to_wire(frame.position)
        case Ack(p):
            return wire | {"p": {s: _position_to_wire(position) for s, position in p.items()}}
        case Data(s, payload, offset, place):
            wire["s"] = s
            if offset is not None:
                wire["o"] = offset
            elif place is not None:
                wire["p"] = [f"{place[0]:016x}", place[1]]
            return wire | _payload_to_wire(payload)
        case Subscribed(ref, s, None):
            return wire | {"ref": ref, "s": s, "live": True}
        case Gap():
            wire |= {key: value for key, value in (("from", frame.first), ("to", frame.last)) if value is not None}
        case _:
            pass
    for each in fields(frame):
        value = getattr(frame, each.name)
        if isinstance(value, Position):
            wire |= _position_to_wire(value)
        elif value is not None and each.name not in ("subs", "first", "last"):
            wire[each.name] = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
    return wire


def _position_to_wire(position: Position) -> dict[str, Any]:
    return {"epoch": f"{position.epoch:016x}", "offset": position.offset}


def _request_to_wire(request: SubscriptionRequest) -> dict[str, Any]:
    interest = request.interest
    wire: dict[str, Any] = {"ref": request.ref, interest.kind: interest.name}
    if interest.kind == "query":
        wire["params"] = interest.values
    if request.is_present:
        wire["present"] = True
    if request.since is not None:
        wire["since"] = _position_to_wire(request.since)
    elif request.is_stored:
        wire["since"] = "stored"
    if request.is_stored:
        wire["stored"] = True
    return wire


def _payload_to_wire(payload: bytes) -> dict[str, Any]:
    try:
        return {"d": payload.decode()}
    except UnicodeDecodeError:
        return {"b": bytes(payload)}


# Reading.


@parser("a frame")
def read_user_frame(wire: Mapping[str, Any]) -> UserFrame:
    """Read a frame that a user has sent. Raises MalformedMessage."""
    return _read(wire, _USER)


@parser("a frame")
def read_broker_frame(wire: Mapping[str, Any]) -> BrokerFrame:
    """Read a frame that a broker has sent. Raises MalformedMessage."""
    return _read(wire, _BROKER)


def _read(wire: Mapping[str, Any], readers: Mapping[str, Callable[[Mapping[str, Any]], _F]]) -> _F:
    kind = wire.get("type")
    read = readers.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise MalformedMessage(f"there is no frame of type {shortened(kind)}")
    return read(wire)


def _exact(value: Any) -> int:
    return read_natural(value, EXACT_MAX)


def _optional(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise MalformedMessage(f"{what} expected, not {shortened(value)}")
        return value

    return read


_read_session = _matching(_SESSION, "the name of a session")
_read_id = _matching(_INTEREST_ID, "an interest id")
_read_epoch_text = _matching(_EPOCH, "an epoch of 16 hexadecimal digits")


def _token(value: Any) -> str:
    return read_text(value, TEXT_MAX)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise MalformedMessage(f"a time in seconds expected, not {shortened(value)}")
    return float(value)


def _urls(value: Any) -> tuple[str, ...]:
    urls = read_array(value)
    if len(urls) > URLS_MAX:
        raise MalformedMessage(f"at most {URLS_MAX} URLs expected, not {len(urls)}")
    return tuple(read_text(url, URL_MAX) for url in urls)


def read_position(wire: Mapping[str, Any]) -> Position:
    """Read the position of a logged publication. Raises MalformedMessage."""
    offset = read_natural(wire.get("offset"), EXACT_MAX - 1)  # another one follows it
    return Position(int(_read_epoch_text(wire.get("epoch")), 16), offset)


def _position_if_any(wire: Mapping[str, Any]) -> Position | None:
    return read_position(wire) if "epoch" in wire else None


def _offsets(value: Any) -> dict[str, int]:
    offsets = read_text_map(value)
    if len(offsets) > SUBSCRIPTIONS_MAX:
        raise MalformedMessage(f"at most {SUBSCRIPTIONS_MAX} positions expected, not {len(offsets)}")
    return {_read_id(s): _exact(offset) for s, offset in offsets.items()}


def _acked(value: Any) -> dict[str, Position]:
    positions = read_text_map(value)
    if len(positions) > SUBSCRIPTIONS_MAX:
        raise MalformedMessage(f"at most {SUBSCRIPTIONS_MAX} positions expected, not {len(positions)}")
    return {_read_id(s): read_position(read_text_map(position)) for s, position in positions.items()}


def _payload(wire: Mapping[str, Any]) -> bytes:
    if "d" in wire and "b" in wire:
        raise MalformedMessage("a payload is either text (d) or bytes (b), not both")
    if "d" in wire:
        return read_text(wire["d"]).encode()
    raw = wire.get("b")
    if isinstance(raw, bytes):
        return raw
    return b64decode(read_text(raw), validate=True)


def _read_request(wire: Mapping[str, Any]) -> SubscriptionRequest:
    if sum(kind in wire for kind in KINDS) != 1:
        raise MalformedMessage("a subscription names either a channel, or a query, or the presence of a channel")
    if "channel" in wire:
        interest = channel_interest(wire["channel"])
    elif "presence" in wire:
        interest = presence_interest(wire["presence"])
    else:
        interest = query_interest(wire["query"], wire.get("params", {}))
    is_stored = wire.get("stored") is True
    since = wire.get("since", "stored" if is_stored else "new")
    if since == "new" and is_stored:
        raise MalformedMessage("a stored subscription begins at a position, or at the stored one")
    is_stored = is_stored or since == "stored"
    if is_stored and interest.kind == "presence":
        raise MalformedMessage("positions are stored for channels and queries, not for the presence of a channel")
    position = None if since in ("new", "stored") else read_position(read_text_map(since))
    return SubscriptionRequest(_exact(wire.get("ref")), interest, position, is_stored, wire.get("present") is True)


def _connect(wire: Mapping[str, Any]) -> Connect:
    if wire.get("v") != PROTOCOL_VERSION:
        raise MalformedMessage(f"this broker speaks version {PROTOCOL_VERSION}, not {shortened(wire.get('v'))}")
    subs = read_array(wire.get("subs", []))
    if len(subs) > SUBSCRIPTIONS_MAX:
        raise MalformedMessage(f"at most {SUBSCRIPTIONS_MAX} subscriptions expected, not {len(subs)}")
    return Connect(
        _read_session(wire.get("session")),
        _exact(wire.get("generation", 0)),
        _optional(_token, wire.get("token")),
        _optional(_token, wire.get("ticket")),
        tuple(_read_request(read_text_map(each)) for each in subs),
    )


def _data(wire: Mapping[str, Any]) -> Data:
    place = wire.get("p")
    if place is not None:
        publisher, number = read_array(place)
        place = (int(_read_epoch_text(publisher), 16), read_natural(number))
    return Data(_read_id(wire.get("s")), _payload(wire), _optional(_exact, wire.get("o")), place)


def _gap(wire: Mapping[str, Any]) -> Gap:
    return Gap(
        _read_id(wire.get("s")),
        read_text(wire.get("reason")),
        _optional(_exact, wire.get("from")),
        _optional(_exact, wire.get("to")),
        _position_if_any(wire),
        _optional(_exact, wire.get("count")),
    )


def _connected(wire: Mapping[str, Any]) -> Connected:
    return Connected(
        _read_session(wire.get("session")),
        read_text(wire.get("broker")),
        _urls(wire.get("alternates", [])),
        _seconds(wire.get("ping_s", 25.0)),
        _seconds(wire.get("ack_s", 1.0)),
        _optional(_seconds, wire.get("expires_in_s")),
    )


def _subscribed(wire: Mapping[str, Any]) -> Subscribed:
    ref, s = _exact(wire.get("ref")), _read_id(wire.get("s"))
    return Subscribed(ref, s, _position_if_any(wire), wire.get("recovered", True) is True)


def _move(wire: Mapping[str, Any]) -> Move:
    return Move(
        _urls(wire.get("to")),
        _exact(wire.get("within_ms")),
        _exact(wire.get("deadline_ms")),
        _optional(_token, wire.get("ticket")),
    )


def _members(wire: Mapping[str, Any]) -> Members:
    members: list[tuple[str, str]] = []
    for row in read_array(wire.get("members")):
        user, member = read_array(row)
        members.append((_read_id(member), read_text(user)))
    return Members(_exact(wire.get("ref")), tuple(members), _exact(wire.get("count")), read_position(wire))


def _error(wire: Mapping[str, Any]) -> Error:
    retry = wire.get("retry")
    if retry not in get_args(Retry):
        raise MalformedMessage(f"never, later or elsewhere expected, not {shortened(retry)}")
    return Error(
        read_text(wire.get("code")),
        read_text(wire.get("message")),
        cast("Retry", retry),
        _optional(_exact, wire.get("retry_after_ms")),
        _optional(_exact, wire.get("ref")),
    )


_USER: dict[str, Callable[[Mapping[str, Any]], UserFrame]] = {
    "connect": _connect,
    "subscribe": lambda wire: Subscribe(_read_request(wire)),
    "unsubscribe": lambda wire: Unsubscribe(_read_id(wire.get("s"))),
    "publish": lambda wire: PublishRequest(
        _exact(wire.get("ref")), channel_interest(wire.get("channel")), _payload(wire)
    ),
    "members": lambda wire: AskMembers(_exact(wire.get("ref")), presence_interest(wire.get("channel"))),
    "ack": lambda wire: Ack(_acked(wire.get("p"))),
    "refresh": lambda wire: Refresh(_token(wire.get("token"))),
    "leave": lambda _: Leave(),
    "pong": lambda _: Pong(),
}

_BROKER: dict[str, Callable[[Mapping[str, Any]], BrokerFrame]] = {
    "connected": _connected,
    "subscribed": _subscribed,
    "unsubscribed": lambda wire: Unsubscribed(_read_id(wire.get("s"))),
    "data": _data,
    "gap": _gap,
    "published": lambda wire: Published(_exact(wire.get("ref")), _position_if_any(wire)),
    "members": _members,
    "move": _move,
    "moved_in": lambda _: MovedIn(),
    "bye": lambda wire: Bye(_offsets(wire.get("p"))),
    "ping": lambda _: Ping(),
    "error": _error,
}
