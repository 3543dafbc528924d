"""The part of a broker that speaks with coordinators and operators. Without them, everything else goes on.

Theory of operation
-------------------
There is a link ``control:<id>`` to each server of the configuration: see ``dynamoth_broker.edge_links``.

A report goes out every ``report_s``. Candidates are chosen from the present state when they are asked for. A user who
is to move is asked as for a drain; the coordinator learns how that ended, for several users at once. While a
coordinator says where users can go, that replaces the configured alternates, for ``OPEN_BROKERS_S`` at most.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol
from urllib.parse import urlsplit

from dynamoth.edge.control import (
    MOVES_MAX,
    USER_MAX,
    BrokerReport,
    CandidatesOffer,
    CandidatesRequest,
    EdgeMessage,
    MoveEnd,
    MovesEnded,
    MovesRequest,
    OpenBrokers,
    parse_user_key,
    user_key,
)
from dynamoth.edge.tickets import is_ticket, make_ticket
from dynamoth.machine.events import LinkDown, Pushed, Replied
from dynamoth.machine.timers import Timers
from dynamoth.names import BROKERS_CHANNEL, COORDINATOR_CHANNEL, OPERATOR_EDGE_CHANNEL, broker_channel
from dynamoth_broker.candidates import bounded, choose_candidates
from dynamoth_broker.edge_links import EdgeLinks
from dynamoth_broker.events import BrokerAction, BrokerOptions, ConnectionId
from dynamoth_broker.interests import InterestTable
from dynamoth_broker.logs import Logs
from dynamoth_broker.operators import BrokerRequests
from dynamoth_broker.rates import Rates
from dynamoth_broker.sessions import Session

LINK_PREFIX = "control:"

OPEN_BROKERS_S = 10.0
"""What a coordinator says of other brokers counts for this time: it says it every second or so."""

ENDS_DELAY_S = 0.2
"""Ends of moves within this time make one message."""

SEEN_MAX = 1000
"""Messages of coordinators that are remembered to recognise copies."""

CANDIDATES_LOOKED_AT = 5000
"""A request for candidates looks at this many users at most, others each time: that takes a broker some 60 ms."""

HASH_BYTES = 4


class Movable(Protocol):
    """What this part needs of the broker's moves."""

    def move(self, session: Session, to: tuple[str, ...], now: float) -> list[BrokerAction]:
        """Ask a user to move."""
        ...

    def drain(self, rate: float, now: float) -> list[BrokerAction]:
        """Move everybody away."""
        ...

    def end_drain(self) -> None:
        """Take users again."""
        ...


class Controlled(Protocol):
    """What this part needs of the broker's machine."""

    interests: InterestTable
    logs: Logs
    sessions: dict[ConnectionId, Session]

    @property
    def moves(self) -> Movable:
        """What moves users."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether users are moved away, and none are taken."""
        ...

    @property
    def is_admitting(self) -> bool:
        """Whether it takes users."""
        ...

    def session_of(self, user: str, name: str) -> Session | None:
        """Return the newest connection of a session; None where there is none."""
        ...


class Control:
    """Reports, and does what coordinators and operators ask for."""

    def __init__(
        self,
        broker: Controlled,
        options: BrokerOptions,
        incarnation: int,
        timers: Timers[BrokerAction],
        counters: Counter[str],
    ) -> None:
        """Begin without connections. Timers and counters are those of the broker."""
        self._broker = broker
        self._options = options
        self._timers = timers
        self._counters = counters
        self._links = EdgeLinks(
            {f"{LINK_PREFIX}{id_}": url for id_, url in options.control.items()},
            (broker_channel(options.id), BROKERS_CHANNEL, OPERATOR_EDGE_CHANNEL),
            incarnation,
            timers,
            counters,
            SEEN_MAX,
        )
        self._operators = BrokerRequests(broker, self, options, counters)
        self.rates = Rates(broker.interests, 0.0)
        #: The latest keys of tickets, and the one before.
        self._ticket_keys: deque[bytes] = deque(maxlen=2)
        #: The highest use of any resource but traffic, as the runtime measures it; 0: unknown.
        self.resource_ratio = 0.0
        #: Users whom a coordinator has had asked to move, with their names.
        self._moving: dict[Session, str] = {}
        #: Which sessions were looked at for candidates last.
        self._looked_at = 0
        self._ends: list[tuple[str, MoveEnd]] = []
        #: Where users can go, by the latest word of a coordinator, and until when that counts.
        self._open_brokers: tuple[str, ...] = ()
        self._open_brokers_until = 0.0
        self._logs_hash = _hash(f"{id_}={_address(url)}" for id_, url in options.logs.items())
        self._history_hash = _hash(options.history)
        self._presence_hash = _hash(options.presence)

    # Links.

    def owns(self, link: str) -> bool:
        """Return whether a link is one of this part's."""
        return link in self._links

    @property
    def faults(self) -> dict[str, str]:
        """The servers through which nobody can be reached, and why."""
        return {link.removeprefix(LINK_PREFIX): fault for link, fault in self._links.faults.items()}

    def start(self, now: float) -> list[BrokerAction]:
        """Connect, and begin to report."""
        if not self._links:
            return []
        self.rates = Rates(self._broker.interests, now)
        self._timers.add(now + self._options.report_s, self._report)
        return [*self._links.connect()]

    def on_up(self, link: str) -> list[BrokerAction]:
        """Listen at a server."""
        return [*self._links.on_up(link)]

    def on_down(self, event: LinkDown) -> list[BrokerAction]:
        """Note that a server cannot be reached."""
        return [*self._links.on_down(event.link, event.reason)]

    def on_reply(self, event: Replied, now: float) -> list[BrokerAction]:
        """Note what a server refuses, or allows again."""
        return [*self._links.on_reply(event.link, event.tag[1], event.value, now)]

    def _tell(self, message: EdgeMessage) -> list[BrokerAction]:
        """Send to coordinators."""
        return [*self._links.publish(COORDINATOR_CHANNEL, message)]

    # Reports.

    def _report(self, now: float) -> Sequence[BrokerAction]:
        self._timers.add(now + self._options.report_s, self._report)
        self.rates.measure(now)
        return self._tell(self.report())

    def report(self) -> BrokerReport:
        """Return what the broker says of itself, by the latest measurement."""
        broker, options, rates = self._broker, self._options, self.rates
        return BrokerReport(
            broker=options.id,
            url=options.url,
            capacity_bytes_per_s=float(options.capacity_bytes_per_s),
            load_bytes_per_s=rates.load_bytes_per_s,
            inbound_bytes_per_s=rates.inbound_bytes_per_s,
            users=len(broker.sessions),
            other_ratio_max=max(self.resource_ratio, len(broker.sessions) / options.sessions_max),
            is_admitting=broker.is_admitting and bool(options.url),
            is_draining=broker.is_draining,
            interests=rates.busiest,
            user_loads=rates.user_loads(broker.sessions),
            location=options.location,
            logs_hash=self._logs_hash,
            history_hash=self._history_hash,
            presence_hash=self._presence_hash,
            report_s=options.report_s,
        )

    # Coordinators.

    def on_pushes(self, event: Pushed, now: float) -> list[BrokerAction]:
        """Handle messages of coordinators and operators."""
        actions: list[BrokerAction] = []
        for push in event.messages:
            match push:
                case [b"message", channel, data] if channel == OPERATOR_EDGE_CHANNEL:
                    actions += self._operators.on_request(event.link, data, now)
                case [b"subscribe", *_]:
                    actions += self._links.on_subscribed(event.link)
                case [b"message", _, data]:
                    actions += self._on_coordinator(data, now)
                case _:
                    pass
        return actions

    def _on_coordinator(self, data: bytes, now: float) -> list[BrokerAction]:
        read = self._links.read(data)
        if read is None:
            return []
        match message := read[1]:
            case CandidatesRequest():
                return self._offer(message, now)
            case MovesRequest():
                return self._move_users(message, now)
            case OpenBrokers(urls, ticket_key):
                if ticket_key and ticket_key not in self._ticket_keys:
                    self._ticket_keys.append(ticket_key)
                self._open_brokers = tuple(url for url in urls if url != self._options.url)
                self._open_brokers_until = now + OPEN_BROKERS_S
            case _:
                self._counters["malformed"] += 1
        return []

    @property
    def traffic_ratio(self) -> float:
        """The traffic of this broker, as it was measured last, over its capacity."""
        return self.rates.load_bytes_per_s / self._options.capacity_bytes_per_s

    def ticket(self, session: Session) -> str | None:
        """Return a ticket for a user who is asked to move; None while no coordinator has given a key."""
        return make_ticket(self._ticket_keys[-1], session.grant.user, session.name) if self._ticket_keys else None

    def is_ticket(self, session: Session, ticket: str | None) -> bool:
        """Return whether another broker has asked this user to move, not long ago."""
        return is_ticket(ticket, self._ticket_keys, session.grant.user, session.name)

    def is_coordinated(self, now: float) -> bool:
        """Return whether a coordinator has said lately where users can go."""
        return now < self._open_brokers_until

    def alternates(self, now: float) -> tuple[str, ...]:
        """Return where users can go: what a coordinator says, or what was configured."""
        return self._open_brokers if self._open_brokers and self.is_coordinated(now) else self._options.alternates

    def _offer(self, request: CandidatesRequest, now: float) -> list[BrokerAction]:
        """Offer users who may move."""
        users: list[tuple[str, tuple[str, ...]]] = []
        every = self._broker.sessions
        begin = self._looked_at % len(every) if len(every) > CANDIDATES_LOOKED_AT else 0
        self._looked_at = begin + CANDIDATES_LOOKED_AT
        for session in islice(every.values(), begin, begin + CANDIDATES_LOOKED_AT):
            is_resting = session.opened_at > now - request.rest_s
            if is_resting or session.is_closed or session.leaving_channels is not None or _is_moving(session, now):
                continue
            key = user_key(session.grant.user, session.name)
            if len(key) <= USER_MAX:
                users.append((key, tuple(session.subscriptions)))
        counts = self.rates.counts({id_ for _, ids in users for id_ in ids})
        bounds = request.load, request.users_max
        candidates = choose_candidates(self._options.id, users, self.rates.by_id, counts, bounds)
        return self._tell(CandidatesOffer(request.request, bounded(candidates)))

    def _move_users(self, request: MovesRequest, now: float) -> list[BrokerAction]:
        actions: list[BrokerAction] = []
        for user, target in request.moves:
            session = self._broker.session_of(*parse_user_key(user))
            if session is None:
                actions += self._ended(user, MoveEnd.GONE, now)
            elif session.leaving_channels is not None:
                actions += self._ended(user, MoveEnd.LEFT, now)
            elif _is_moving(session, now) or not request.targets[target]:
                actions += self._ended(user, MoveEnd.REFUSED, now)
            else:
                actions += self._broker.moves.move(session, request.targets[target], now)
                self._moving[session] = user
                assert session.move_until is not None
                self._timers.add(session.move_until, self._on_deadline, session)
        return actions

    def on_left(self, session: Session, now: float) -> None:
        """Note that a user is served elsewhere."""
        self._settle(session, MoveEnd.LEFT, now)

    def on_closed(self, session: Session, now: float) -> None:
        """Note that the connection of a user is gone."""
        self._settle(session, MoveEnd.GONE, now)

    def _on_deadline(self, session: Session, now: float) -> Sequence[BrokerAction]:
        if session in self._moving and _is_moving(session, now):  # it was asked again, by a drain for example
            assert session.move_until is not None
            self._timers.add(session.move_until, self._on_deadline, session)
        else:
            self._settle(session, MoveEnd.DEADLINE, now)
        return []

    def _settle(self, session: Session, end: MoveEnd, now: float) -> None:
        user = self._moving.pop(session, None)
        if user is not None:
            self._ended(user, end, now)

    def _ended(self, user: str, end: MoveEnd, now: float) -> list[BrokerAction]:
        if not self._ends:
            self._timers.add(now + ENDS_DELAY_S, self._tell_ends)
        self._ends.append((user, end))
        return []

    def _tell_ends(self, now: float) -> Sequence[BrokerAction]:
        ends, self._ends = self._ends, []
        actions: list[BrokerAction] = []
        for begin in range(0, len(ends), MOVES_MAX):
            actions += self._tell(MovesEnded(self._options.id, tuple(ends[begin : begin + MOVES_MAX])))
        return actions


def _is_moving(session: Session, now: float) -> bool:
    return session.move_until is not None and session.move_until > now


def _hash(words: Iterable[str]) -> str:
    """Return a short hash of settings, whatever their order."""
    return blake2b("\n".join(sorted(set(words))).encode(), digest_size=HASH_BYTES).hexdigest()


def _address(url: str) -> str:
    """Return host and port of a URL: credentials may differ, and are for nobody else."""
    return urlsplit(url).netloc.rpartition("@")[2].lower()
