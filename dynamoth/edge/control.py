"""What edge brokers and their coordinator say to each other: reports, candidates, moves.

Each message is one msgpack array ``[code, incarnation, number, field, ...]``. Incarnation (of the sending process) and
number (of its message) name a message, so that a receiver drops copies: a message travels through two servers where
there are two, and the receiver listens at all of them. Codes are never reused; a reader ignores fields after those that
it knows. Every message is bounded, whatever the number of users.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dynamoth.edge.frames import URL_MAX, URLS_MAX
from dynamoth.edge.interests import ID_CHARACTERS
from dynamoth.edge.tickets import KEY_BYTES
from dynamoth.errors import MalformedMessage
from dynamoth.protocol.wire import (
    ARRAY_MAX,
    pack,
    parser,
    read_array,
    read_bytes,
    read_natural,
    read_text,
    shortened,
    unpack,
)

INTERESTS_MAX = 1000
"""Bound of the interests that a report names: at most 37 bytes each, so that a report stays below 64 KiB."""

MESSAGE_BYTES_MAX = 1024 * 1024
"""Bound of every message. Redis disconnects a subscriber for whom 32 MiB wait."""

CANDIDATE_BYTES_MAX = 768 * 1024
"""Bound of the candidates of one answer, as far as their sizes are estimated: it leaves room for the rest."""

USERS_MAX = 10_000
"""Bound of the users in one message."""

MOVES_MAX = 500
"""Bound of the users that one message has moved, and of the ends of moves that one reports."""

USER_MAX = 512
"""Longest name of a user in characters. Users of whom a token says longer names are served, but not moved for load."""

BROKER_MAX = 64

HASH_MAX = 16
"""Bound of a hash of settings, in characters."""

REPORT_S_MAX = 60.0
"""Longest time between two reports of a broker."""

USER_LOAD_CLASSES = 48
"""Classes of user loads by powers of two; the last has all from 140 TB/s on."""


def user_key(user: str, session: str) -> str:
    """Return the name of a session for coordinator and operators: ``session``, or ``session@user`` with a token."""
    return f"{session}@{user}" if user else session


def parse_user_key(key: str) -> tuple[str, str]:
    """Return user and session: a session has no ``@`` in it."""
    session, _, user = key.partition("@")
    return user, session


@dataclass(frozen=True, slots=True)
class InterestColumns:
    """Interests of a broker: ids, rates in bytes/s, and numbers of users there, in the same order."""

    ids: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    users: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerReport:
    """What a broker says of itself, every ``report_s``."""

    broker: str
    #: What counts as all of its load, in bytes/s; more than 0.
    capacity_bytes_per_s: float
    #: F_j and I_j, in bytes/s.
    load_bytes_per_s: float
    inbound_bytes_per_s: float
    users: int
    #: The highest use of any other resource: CPU, connections, buffered bytes. 0: they are unused, or unknown.
    other_ratio_max: float = 0.0
    #: Whether it takes new users.
    is_admitting: bool = True
    #: Whether it is being emptied.
    is_draining: bool = False
    #: Latitude and longitude in degrees; None: unknown.
    location: tuple[float, float] | None = None
    #: The interests with the highest rates, at most ``INTERESTS_MAX``.
    interests: InterestColumns = InterestColumns()
    #: How many users have an own load u_i in each class: below 1 byte/s, below 2, 4, 8 ... See ``user_load_class``.
    user_loads: tuple[int, ...] = ()
    #: Where users reach it; empty where nobody can be sent to it.
    url: str = ""
    #: Hashes of ``broker.logs``, ``history`` and ``presence``, which all brokers need alike; empty: unknown.
    logs_hash: str = ""
    history_hash: str = ""
    presence_hash: str = ""
    #: The time between two reports of this broker, in seconds; at most ``REPORT_S_MAX``. 0: unknown.
    report_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A user who may move."""

    user: str
    interests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The answer of a broker: some of its users, and all interests of theirs."""

    broker: str
    users: tuple[Candidate, ...]
    interests: InterestColumns


@dataclass(frozen=True, slots=True)
class CandidatesRequest:
    """Coordinator to one broker: offer users who may move. ``CandidatesOffer`` with this number answers.

    ``load``: what has to leave, in bytes/s (infinite: as much as can). Users who came within ``rest_s`` are left out.
    """

    request: int
    load: float
    users_max: int
    rest_s: float


@dataclass(frozen=True, slots=True)
class CandidatesOffer:
    """Broker to coordinator: its users who may move."""

    request: int
    candidates: Candidates


@dataclass(frozen=True, slots=True)
class MovesRequest:
    """Coordinator to one broker: ask these users to move. ``MovesEnded`` follows, in parts."""

    #: Lists of URLs to try, in order.
    targets: tuple[tuple[str, ...], ...]
    #: Users (``user_key``) with the index of their target; at most ``MOVES_MAX``.
    moves: tuple[tuple[str, int], ...]


class MoveEnd(Enum):
    """How the move of a user ended at the broker that the user was to leave."""

    #: The user is served by another broker, and has said so.
    LEFT = "left"
    #: The user is on the move already.
    REFUSED = "refused"
    #: There is no such user, or the connection was lost.
    GONE = "gone"
    #: The user has stayed, for longer than a move may take.
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class MovesEnded:
    """Broker to coordinator: the moves of these users have ended; at most ``MOVES_MAX``."""

    broker: str
    ends: tuple[tuple[str, MoveEnd], ...]


@dataclass(frozen=True, slots=True)
class OpenBrokers:
    """Coordinator to all brokers: where users can go, the least loaded broker first; at most ``URLS_MAX`` URLs."""

    urls: tuple[str, ...]
    #: The key of tickets (``dynamoth.edge.tickets``); empty: there are none.
    ticket_key: bytes = b""


EdgeMessage = BrokerReport | CandidatesRequest | CandidatesOffer | MovesRequest | MovesEnded | OpenBrokers


@dataclass(frozen=True, slots=True)
class Stamp:
    """Names a message: the process that sent it, and its number there, which grows."""

    incarnation: int
    number: int


# Writing.


def _columns_to_wire(columns: InterestColumns) -> list[Any]:
    return [columns.ids, columns.rates, columns.users]


def _report_to_wire(report: BrokerReport) -> list[Any]:
    return [
        *(report.broker, report.url, report.capacity_bytes_per_s, report.load_bytes_per_s, report.inbound_bytes_per_s),
        *(report.users, report.other_ratio_max, report.is_admitting, report.is_draining, report.location),
        *(_columns_to_wire(report.interests), report.user_loads, report.logs_hash, report.history_hash),
        *(report.report_s, report.presence_hash),
    ]


def _candidates_to_wire(candidates: Candidates) -> list[Any]:
    """Return the wire form: users name their interests by index."""
    index = {interest: number for number, interest in enumerate(candidates.interests.ids)}
    users = [[each.user, [index[interest] for interest in each.interests]] for each in candidates.users]
    return [candidates.broker, _columns_to_wire(candidates.interests), users]


_WRITE: dict[type[Any], Callable[[Any], list[Any]]] = {
    BrokerReport: lambda m: [1, *_report_to_wire(m)],
    CandidatesRequest: lambda m: [2, m.request, m.load, m.users_max, m.rest_s],
    CandidatesOffer: lambda m: [3, m.request, *_candidates_to_wire(m.candidates)],
    MovesRequest: lambda m: [4, m.targets, m.moves],
    MovesEnded: lambda m: [5, m.broker, [[user, end.value] for user, end in m.ends]],
    OpenBrokers: lambda m: [6, m.urls, m.ticket_key],
}


def pack_edge(stamp: Stamp, message: EdgeMessage) -> bytes:
    """Serialise a message."""
    code, *rest = _WRITE[type(message)](message)
    return pack([code, stamp.incarnation, stamp.number, *rest])


# Reading: each field is checked, as anyone who reaches a server can publish anything.


_REPORT_DEFAULTS: tuple[Any, ...] = ("", "", 0.0, "")
"""Of the fields that older brokers do not send."""


def _number(value: Any, *, may_be_infinite: bool = False) -> float:
    """Read a number from 0 on."""
    if type(value) not in (int, float) or not value >= 0 or (math.isinf(value) and not may_be_infinite):
        raise MalformedMessage(f"a number from 0 on expected, not {shortened(value)}")
    return float(value)


def _ticket_key(value: Any) -> bytes:
    key = read_bytes(value)
    if len(key) not in (0, KEY_BYTES):
        raise MalformedMessage(f"a key of tickets has {KEY_BYTES} bytes, not {len(key)}")
    return key


def _array(value: Any, length_max: int) -> list[Any]:
    array = read_array(value)
    if len(array) > length_max:
        raise MalformedMessage(f"at most {length_max} elements expected, not {len(array)}")
    return array


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MalformedMessage(f"true or false expected, not {shortened(value)}")
    return value


def _broker(value: Any) -> str:
    return read_text(value, BROKER_MAX)


def _user(value: Any) -> str:
    return read_text(value, USER_MAX)


def _url(value: Any) -> str:
    return read_text(value, URL_MAX)


def _urls(value: Any) -> tuple[str, ...]:
    return tuple(map(_url, _array(value, URLS_MAX)))


def _location(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    x, y = read_array(value)
    if not (isinstance(x, float | int) and isinstance(y, float | int) and math.isfinite(x) and math.isfinite(y)):
        raise MalformedMessage(f"two numbers expected, not {shortened(value)}")
    return float(x), float(y)


def parse_location(text: str) -> tuple[float, float]:
    """Read ``LATITUDE,LONGITUDE`` in degrees. Raises ValueError: the text says what is wrong."""
    words = text.split(",")
    try:
        latitude, longitude = map(float, words)
    except ValueError:
        raise ValueError("two numbers expected, as in 48.2,16.4: latitude and longitude in degrees") from None
    for name, degrees, bound in (("latitude", latitude, 90), ("longitude", longitude, 180)):
        if not -bound <= degrees <= bound:
            raise ValueError(f"a {name} from -{bound} to {bound} degrees expected, not {degrees:g}")
    return latitude, longitude


def _report_s(value: Any) -> float:
    if (report_s := _number(value)) > REPORT_S_MAX:
        raise MalformedMessage(f"a time of at most {REPORT_S_MAX:g} s expected, not {report_s:g}")
    return report_s


def _columns(value: Any, length_max: int) -> InterestColumns:
    ids, rates, users = (_array(each, length_max) for each in read_array(value))
    if not len(ids) == len(rates) == len(users):
        raise MalformedMessage("the columns of interests have different lengths")
    return InterestColumns(
        tuple(read_text(each, ID_CHARACTERS) for each in ids),
        tuple(map(_number, rates)),
        tuple(map(read_natural, users)),
    )


def _report(v: list[Any]) -> BrokerReport:
    # Older brokers send none of these.
    logs_hash, history_hash, report_s, presence_hash = (*v[12:16], *_REPORT_DEFAULTS[len(v[12:16]) :])
    capacity = _number(v[2])
    if not capacity:
        raise MalformedMessage("a capacity of 0")
    return BrokerReport(
        broker=_broker(v[0]),
        url=_url(v[1]),
        capacity_bytes_per_s=capacity,
        load_bytes_per_s=_number(v[3]),
        inbound_bytes_per_s=_number(v[4]),
        users=read_natural(v[5]),
        other_ratio_max=_number(v[6]),
        is_admitting=_flag(v[7]),
        is_draining=_flag(v[8]),
        location=_location(v[9]),
        interests=_columns(v[10], INTERESTS_MAX),
        user_loads=tuple(map(read_natural, _array(v[11], USER_LOAD_CLASSES))),
        logs_hash=read_text(logs_hash, HASH_MAX),
        history_hash=read_text(history_hash, HASH_MAX),
        presence_hash=read_text(presence_hash, HASH_MAX),
        report_s=_report_s(report_s),
    )


def _candidates(v: list[Any]) -> Candidates:
    columns = _columns(v[1], ARRAY_MAX)
    users: list[Candidate] = []
    for user, indices in map(read_array, _array(v[2], USERS_MAX)):
        last = len(columns.ids) - 1
        interests = [columns.ids[read_natural(index, last)] for index in read_array(indices)]
        users.append(Candidate(_user(user), tuple(interests)))
    return Candidates(_broker(v[0]), tuple(users), columns)


def _moves(v: list[Any]) -> MovesRequest:
    targets = tuple(map(_urls, _array(v[0], MOVES_MAX)))
    pairs = map(read_array, _array(v[1], MOVES_MAX))
    return MovesRequest(targets, tuple((_user(user), read_natural(index, len(targets) - 1)) for user, index in pairs))


def _ends(v: list[Any]) -> MovesEnded:
    pairs = map(read_array, _array(v[1], MOVES_MAX))
    return MovesEnded(_broker(v[0]), tuple((_user(user), MoveEnd(end)) for user, end in pairs))


_READ: dict[int, Callable[[list[Any]], EdgeMessage]] = {
    1: _report,
    2: lambda v: CandidatesRequest(
        read_natural(v[0]), _number(v[1], may_be_infinite=True), read_natural(v[2], USERS_MAX), _number(v[3])
    ),
    3: lambda v: CandidatesOffer(read_natural(v[0]), _candidates(v[1:])),
    4: _moves,
    5: _ends,
    6: lambda v: OpenBrokers(_urls(v[0]), _ticket_key(v[1]) if len(v) > 1 else b""),
}


@parser("a message of brokers and coordinator")
def unpack_edge(data: bytes) -> tuple[Stamp, EdgeMessage]:
    """Read a message from anyone.

    Raises:
        MalformedMessage: when it is not one, or of a kind that this software does not know.

    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise MalformedMessage(f"a message has at most {MESSAGE_BYTES_MAX} bytes, this one has {len(data)}")
    code, incarnation, number, *rest = read_array(unpack(data))
    read = _READ.get(code) if type(code) is int else None
    if read is None:
        raise MalformedMessage(f"not a message that this software knows: code {shortened(code)}")
    return Stamp(read_natural(incarnation), read_natural(number)), read(rest)
