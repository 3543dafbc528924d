"""The connections of a broker's users: who is admitted, how long a connection lasts, and who reads too slowly."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamoth.edge.frames import Connect, Connected, Error, Ping
from dynamoth.machine.timers import Timers
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import (
    FULL,
    GOING_AWAY,
    RESTARTING,
    RETRY_MS,
    TAKEN_OVER,
    TOKEN_EXPIRED,
    TOO_SLOW,
    BrokerAction,
    BrokerOptions,
    CloseConnection,
    ConnectionId,
    Grant,
    Transmit,
)
from dynamoth_broker.sessions import Session
from dynamoth_broker.subscribing import Subscribing, may_subscribe

if TYPE_CHECKING:
    from dynamoth_broker.control import Control

KEEP_ALIVE_S = 1.0
"""How often a broker looks which users are to be pinged; more often where they are pinged more often."""


class Users:
    """The users of one broker."""

    def __init__(
        self,
        options: BrokerOptions,
        subscribing: Subscribing,
        delivery: Delivery,
        control: Control,
        timers: Timers[BrokerAction],
        counters: Counter[str],
    ) -> None:
        """Begin without users; all arguments are shared with the owner."""
        self._options = options
        self._subscribing = subscribing
        self._delivery = delivery
        self._control = control
        self._timers = timers
        self._counters = counters
        self._keep_alive_s = min(KEEP_ALIVE_S, options.ping_s / 4)
        self.sessions: dict[ConnectionId, Session] = {}
        #: The connection of each session, the newest one.
        self._by_key: dict[tuple[str, str], Session] = {}
        #: Sessions by when they are pinged next, and by when their answer is due; the earliest first.
        self._pings: deque[tuple[float, Session]] = deque()
        self._pongs: deque[tuple[float, Session]] = deque()
        #: Sessions that are slow, for the longest time first.
        self._slow: dict[Session, None] = {}
        #: Where the next user is sent.
        self._next_alternate = 0
        #: Whether users are moved away, and none are taken.
        self.is_draining = False
        self._is_stopping = False

    def start(self, now: float) -> None:
        """Begin to look after connections."""
        self._timers.add(now + self._keep_alive_s, self._keep_alive)

    @property
    def is_admitting(self) -> bool:
        """Whether users who connect are taken."""
        return not self._is_stopping and not self.is_draining and len(self.sessions) < self._options.sessions_max

    def open_session(self, connection: ConnectionId) -> Session | None:
        """Return the session of a connection; None where it is closed or unknown."""
        session = self.sessions.get(connection)
        return None if session is None or session.is_closed else session

    def open_sessions(self) -> list[Session]:
        """Return the sessions that are not closed."""
        return [session for session in self.sessions.values() if not session.is_closed]

    def session_of(self, user: str, name: str) -> Session | None:
        """Return the newest connection of a session; None where there is none."""
        return self._by_key.get((user, name))

    def alternates(self, now: float) -> tuple[str, ...]:
        """Return the other brokers, beginning with another one each time."""
        urls = self._control.alternates(now)
        if not urls:
            return ()
        self._next_alternate = (self._next_alternate + 1) % len(urls)
        return (*urls[self._next_alternate :], *urls[: self._next_alternate])

    # A connection begins and ends.

    def open(
        self, connection: ConnectionId, connect: Connect, grant: Grant, now: float, address: str
    ) -> list[BrokerAction]:
        """Take a user who has connected, or send it elsewhere."""
        session = Session(connection, connect.session, grant, connect.generation, now, now, address)
        if refusal := self._why_not_admitted(session, connect.ticket):
            code, reason, error = refusal
            self._counters[f"refused_{error.code}"] += 1
            return [Transmit(connection, error), CloseConnection(connection, code, reason)]
        actions: list[BrokerAction] = []
        earlier = self._by_key.get(session.key)
        if earlier is not None:
            actions.append(self.close(earlier, TAKEN_OVER, "a newer connection of this session is here", now))
        self.sessions[connection] = session
        self._by_key[session.key] = session
        options = self._options
        expires_in_s = None if grant.expires_at is None else max(0.0, grant.expires_at - now)
        alternates = self.alternates(now)  # in another order for each user: who loses this broker tries the first
        connected = Connected(session.name, options.id, alternates, options.ping_s, options.ack_s, expires_in_s)
        self._pings.append((now + options.ping_s, session))
        self._watch_expiry(session, now)
        return [*actions, Transmit(connection, connected), *self._subscribing.connect(session, connect.subs, now)]

    def _why_not_admitted(self, session: Session, ticket: str | None) -> tuple[int, str, Error] | None:
        if self._is_stopping or self.is_draining:
            error = Error("draining", "this broker takes no users now", "elsewhere", RETRY_MS)
            return GOING_AWAY, "draining", error
        if not self.is_admitting:
            return FULL, "full", Error("full", "this broker has no room for more users", "elsewhere", RETRY_MS)
        if self._control.traffic_ratio > self._options.ratio_accept and not self._control.is_ticket(session, ticket):
            return FULL, "full", Error("full", "this broker has as much traffic as it takes", "elsewhere", RETRY_MS)
        earlier = self._by_key.get(session.key)
        if earlier is not None and earlier.generation > session.generation:
            return TAKEN_OVER, "taken over", Error("taken_over", "a newer connection of this session is here")
        return None

    def close(self, session: Session, code: int, reason: str, now: float) -> BrokerAction:
        """Close a session's connection. Nothing more is delivered."""
        session.is_closed = True
        self._subscribing.presence.on_closed(session, code, now)
        self._slow.pop(session, None)
        for subscription in list(session.subscriptions.values()):
            self._subscribing.end(subscription, now)
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]
        self._control.on_closed(session, now)
        return CloseConnection(session.connection, code, reason)

    def on_closed(self, connection: ConnectionId, code: int, now: float) -> None:
        """Forget a connection that is gone."""
        session = self.sessions.pop(connection, None)
        if session is not None and not session.is_closed:
            self.close(session, code, "", now)

    def stop(self, now: float) -> list[BrokerAction]:
        """Close every connection, and take no more."""
        self._is_stopping = True
        return [self.close(session, RESTARTING, "the broker restarts", now) for session in self.open_sessions()]

    # Tokens.

    def refresh(self, connection: ConnectionId, grant: Grant, now: float) -> list[BrokerAction]:
        """Replace the rights of a user."""
        session = self.open_session(connection)
        if session is None:
            return []
        session.heard_at = now
        if grant.user != session.grant.user:
            return [Transmit(connection, Error("token_refused", "the token is another user's"))]
        session.grant = grant
        if not all(may_subscribe(grant, each.interest.interest) for each in session.subscriptions.values()):
            # Who connects again learns which subscriptions are refused.
            return [self.close(session, GOING_AWAY, "the token does not allow all subscriptions", now)]
        self._watch_expiry(session, now)
        return []

    def _watch_expiry(self, session: Session, now: float) -> None:
        """Close the connection when its token expires.

        Timers cannot be cancelled and hold the session, so set one only when the token expires before the next ping.
        """
        expires_at = session.grant.expires_at
        if expires_at is not None and expires_at <= now + self._options.ping_s + self._keep_alive_s:
            self._timers.add(expires_at, self._expire, session)

    def _expire(self, session: Session, now: float) -> Sequence[BrokerAction]:
        expires_at = session.grant.expires_at
        if session.is_closed or expires_at is None or expires_at > now:
            return []
        error = Error("token_expired", "the token has expired: connect with a new one")
        return [Transmit(session.connection, error), self.close(session, TOKEN_EXPIRED, "the token has expired", now)]

    # Slow users, and those who are gone.

    def on_overflowed(self, connection: ConnectionId, now: float) -> list[BrokerAction]:
        """Let a user fall behind; if very many are, close the connection of the one who has been for longest."""
        session = self.open_session(connection)
        if session is None or session.slow_since is not None:
            return []
        self._counters["slow_sessions"] += 1
        session.slow_since = now
        self._slow[session] = None
        for subscription in session.subscriptions.values():
            self._delivery.pause(subscription)
        if len(self._slow) <= self._options.slow_sessions_max:
            return []
        return [self._close_slow(next(iter(self._slow)), now)]

    def _close_slow(self, session: Session, now: float) -> BrokerAction:
        self._counters["slow_sessions_closed"] += 1
        return self.close(session, TOO_SLOW, "too slow", now)

    def on_writable(self, connection: ConnectionId, now: float) -> list[BrokerAction]:
        """Let a user catch up."""
        session = self.open_session(connection)
        if session is None or session.slow_since is None:
            return []
        session.slow_since = None
        del self._slow[session]
        actions: list[BrokerAction] = []
        for subscription in list(session.subscriptions.values()):
            actions += self._delivery.go_on(subscription, now)
        return actions

    def _keep_alive(self, now: float) -> Sequence[BrokerAction]:
        """Ping users, and close the connections of those who do not answer, or do not read."""
        self._timers.add(now + self._keep_alive_s, self._keep_alive)
        options = self._options
        actions: list[BrokerAction] = []
        while self._pings and self._pings[0][0] <= now:
            _, session = self._pings.popleft()
            if session.is_closed:
                continue
            if session.slow_since is not None and now - session.slow_since > options.slow_s_max:
                actions.append(self._close_slow(session, now))
                continue
            actions.append(Transmit(session.connection, Ping()))
            self._pings.append((now + options.ping_s, session))
            self._pongs.append((now + options.pong_timeout_s, session))
            self._watch_expiry(session, now)
        while self._pongs and self._pongs[0][0] <= now:
            due, session = self._pongs.popleft()
            if not session.is_closed and session.heard_at < due - options.pong_timeout_s:
                actions += self._close_if_silent(session, now)
        return actions

    def _close_if_silent(self, session: Session, now: float) -> Sequence[BrokerAction]:
        """Close the connection of a user from whom nothing has come for ``ping_s`` and ``pong_timeout_s``."""
        if session.is_closed:
            return []
        silent_at = session.heard_at + self._options.ping_s + self._options.pong_timeout_s
        if now < silent_at:
            self._timers.add(silent_at, self._close_if_silent, session)
            return []
        self._counters["sessions_lost"] += 1
        return [self.close(session, GOING_AWAY, "no answer to a ping", now)]

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        for connection, session in self.sessions.items():
            assert session.connection == connection
            assert not (session.is_closed and session.subscriptions), f"{session.name} is closed and has subscriptions"
        assert all(not each.is_closed and each.slow_since is not None for each in self._slow), "not slow, or closed"
        for session in self._by_key.values():
            assert not session.is_closed, f"{session.name} is closed, and the newest"
