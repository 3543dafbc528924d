"""Decides everything that a broker does: sessions, shared interests, delivery, migration and drain.

Theory of operation
-------------------
A user's connection is opened by ``Opened``, with its subscriptions; ``Delivery`` brings each of them to where its
interest is. All that a user needs to go on elsewhere is at the user, so a broker hands nothing to another one.

*Moves.* See ``Moves``.

*Slow users.* Nobody waits for a connection. One that is full falls behind, by itself: see ``Delivery``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never, cast

from dynamoth.edge.frames import (
    Ack,
    Connect,
    Connected,
    Error,
    Leave,
    MovedIn,
    Ping,
    Pong,
    Published,
    PublishRequest,
    Refresh,
    Subscribe,
    Unsubscribe,
    Unsubscribed,
    Wanted,
)
from dynamoth.edge.interests import Interest, is_bound
from dynamoth.edge.log import Appended
from dynamoth.edge.publications import LoggedPublication, Position, pack_publication
from dynamoth.globs import compile_glob
from dynamoth.machine.events import LinkDown, LinkUp, Pushed, Replied, RepliedAll, Start, Tick
from dynamoth.machine.timers import Timers
from dynamoth_broker.control import Control
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import (
    FULL,
    GOING_AWAY,
    NORMAL,
    RESTARTING,
    TAKEN_OVER,
    TOKEN_EXPIRED,
    TOO_SLOW,
    BarrierPassed,
    BrokerAction,
    BrokerEvent,
    BrokerOptions,
    ChannelConfirmed,
    ChannelEnded,
    ChannelFailed,
    ChannelGap,
    CloseConnection,
    Closed,
    ConnectionId,
    Drain,
    EndDrain,
    Grant,
    MessagePublished,
    MoveSession,
    Opened,
    Overflowed,
    Publications,
    PublishMessage,
    Received,
    Refreshed,
    ResourcesMeasured,
    Stop,
    SubscribeChannel,
    Transmit,
    UnsubscribeChannel,
    Writable,
)
from dynamoth_broker.interests import InterestTable, Phase, SharedInterest
from dynamoth_broker.logs import Logs
from dynamoth_broker.moves import Moves
from dynamoth_broker.sessions import Session, Stage, Subscription

KEEP_ALIVE_S = 1.0
"""How often a broker looks which users are to be pinged; more often where they are pinged more often."""

RETRY_MS = 1000

TIP_CHECKS_AT_ONCE = 100
TIP_CHECK_PARTS_MAX = 50
"""The logs of more interests are read in portions, so that very many do not hold up deliveries."""


def _may_subscribe(grant: Grant, interest: Interest) -> bool:
    bound = grant.bound.get(interest.name, {}) if interest.kind == "query" else {}
    return grant.may_subscribe(interest.kind, interest.name) and is_bound(interest, bound)


class BrokerMachine:
    """One broker."""

    def __init__(self, options: BrokerOptions, incarnation: int) -> None:
        """Begin without users. ``incarnation`` is random, and new with each start."""
        self._options = options
        self._timers: Timers[BrokerAction] = Timers()
        self._keep_alive_s = min(KEEP_ALIVE_S, options.ping_s / 4)
        #: What happened, by kind, for metrics.
        self.counters: Counter[str] = Counter()
        self._logs = Logs(options.logs, options.log, incarnation, options.log_wait_s, self._timers, self.counters)
        self._delivery = Delivery(options, self._logs, self._timers, self.counters)
        self.interests = InterestTable()
        self.sessions: dict[ConnectionId, Session] = {}
        self.control = Control(self, options, incarnation, self._timers, self.counters)
        #: The connection of each session, the newest one.
        self._by_key: dict[tuple[str, str], Session] = {}
        self._history = [compile_glob(pattern.encode()) for pattern in options.history]
        #: Sessions by when they are pinged next, and by when their answer is due; the earliest first.
        self._pings: deque[tuple[float, Session]] = deque()
        self._pongs: deque[tuple[float, Session]] = deque()
        self.moves = Moves(self, options, self._timers, self.counters, self.control)
        #: Interests whose logs are still to be read in this round of tip checks, and in what portions.
        self._to_check: list[SharedInterest] = []
        self._check_interval_s = options.tip_check_s
        self._checks_at_once = 0
        self._is_stopping = False
        #: The time of the present event.
        self._now = 0.0

    # The contract of machines.

    def handle(self, event: BrokerEvent, now: float) -> list[BrokerAction]:
        """Handle one event; return the actions to execute, in order."""
        self._now = now
        actions = self._handle(event, now)
        while self._delivery.refused or self._delivery.answered:
            actions += self._account()
        return actions

    def deadline(self) -> float | None:
        """Return when the next timer is due."""
        return self._timers.next_at

    def _handle(self, event: BrokerEvent, now: float) -> list[BrokerAction]:
        match event:
            case Publications(messages):
                return self._on_publications(messages, now)
            case Opened():
                return self._on_opened(event, now)
            case Received(connection, frame):
                session = self.sessions.get(connection)
                return [] if session is None or session.is_closed else self._on_frame(session, frame, now)
            case Refreshed(connection, grant):
                return self._on_refreshed(connection, grant, now)
            case Closed(connection):
                return self._on_closed(connection, now)
            case Overflowed(connection):
                return self._on_overflowed(connection, now)
            case Writable(connection):
                return self._on_writable(connection, now)
            case ChannelConfirmed() | ChannelEnded() | ChannelFailed() | ChannelGap() | BarrierPassed():
                return self._on_channel(event, now)
            case MessagePublished(token, reason):
                on_published = cast("Callable[[str | None], list[BrokerAction]]", token)  # that of PublishMessage
                return on_published(reason)
            case MoveSession(connection, to, ticket):
                session = self.sessions.get(connection)
                return [] if session is None else self.moves.move(session, to, now, ticket)
            case Drain(rate):
                return self.moves.drain(rate, now)
            case EndDrain():
                self.moves.end_drain()
                return []
            case ResourcesMeasured(ratio):
                self.control.resource_ratio = ratio
                return []
            case Stop():
                self._is_stopping = True
                return [self.close(session, RESTARTING, "the broker restarts") for session in self.open_sessions()]
            case Start():
                self._timers.add(now + self._options.tip_check_s, self._check_tips)
                self._timers.add(now + self._keep_alive_s, self._keep_alive)
                return [*self._logs.start(), *self.control.start(now)]
            case Tick():
                return self._timers.run_due(now)
            case LinkUp() | LinkDown() | Replied() | Pushed() | RepliedAll():
                return self._on_link(event, now)
            case _:
                assert_never(event)

    def _on_link(self, event: LinkUp | LinkDown | Replied | Pushed | RepliedAll, now: float) -> list[BrokerAction]:
        is_control = self.control.owns(event.link)
        match event:
            case LinkUp() if is_control:
                return self.control.on_up(event.link)
            case LinkDown() if is_control:
                return self.control.on_down(event)
            case Replied() if is_control:
                return self.control.on_reply(event, now)
            case Pushed() if is_control:
                return self.control.on_pushes(event, now)
            case LinkUp():
                return self._logs.on_up(event)
            case LinkDown():
                return self._logs.on_down(event, now)
            case Replied():
                return self._logs.on_reply(event, now)
            case Pushed() | RepliedAll():
                return []  # nothing is subscribed to on links of logs

    def _account(self) -> list[BrokerAction]:
        """Note which subscriptions were answered and refused; say ``moved_in`` to users with the last answer."""
        actions: list[BrokerAction] = []
        refused, self._delivery.refused = self._delivery.refused, []
        answered, self._delivery.answered = self._delivery.answered, []
        for subscription in refused:
            self._end(subscription)
        for subscription in (*answered, *refused):
            if subscription.is_of_connect:
                subscription.is_of_connect = False
                actions += self._count_answer(subscription.session)
        return actions

    @staticmethod
    def _count_answer(session: Session) -> list[BrokerAction]:
        """Count one more answer to a subscription of ``connect``."""
        session.unanswered -= 1
        return [] if session.unanswered or session.is_closed else [Transmit(session.connection, MovedIn())]

    # Sessions.

    @property
    def is_draining(self) -> bool:
        """Whether users are moved away, and none are taken."""
        return self.moves.is_draining

    @property
    def is_admitting(self) -> bool:
        """Whether users who connect are taken."""
        return not self._is_stopping and not self.is_draining and len(self.sessions) < self._options.sessions_max

    def session_of(self, user: str, name: str) -> Session | None:
        """Return the newest connection of a session; None where there is none."""
        return self._by_key.get((user, name))

    @property
    def logs(self) -> Logs:
        """The log servers."""
        return self._logs

    def open_sessions(self) -> list[Session]:
        """Return the sessions that are not closed."""
        return [session for session in self.sessions.values() if not session.is_closed]

    def _on_opened(self, event: Opened, now: float) -> list[BrokerAction]:
        connection, connect = event.connection, event.connect
        session = Session(connection, connect.session, event.grant, connect.generation, now, now)
        self.sessions[connection] = session
        if refusal := self._why_not_admitted(session, connect):
            code, reason, error = refusal
            self.counters[f"refused_{error.code}"] += 1
            return [Transmit(connection, error), self.close(session, code, reason)]
        actions: list[BrokerAction] = []
        earlier = self._by_key.get(session.key)
        self._by_key[session.key] = session
        if earlier is not None and not earlier.is_closed:
            actions.append(self.close(earlier, TAKEN_OVER, "a newer connection of this session is here"))
        options = self._options
        expires_in_s = None if event.grant.expires_at is None else max(0.0, event.grant.expires_at - now)
        alternates = self.moves.alternates(now)  # in another order for each user: who loses this broker tries the first
        connected = Connected(session.name, options.id, alternates, options.ping_s, options.ack_s, expires_in_s)
        actions.append(Transmit(connection, connected))
        self._pings.append((now + options.ping_s, session))
        if event.grant.expires_at is not None:
            self._timers.add(event.grant.expires_at, self._expire, session)
        session.unanswered = len(connect.subs)
        for wanted in connect.subs:
            actions += self._subscribe(session, wanted, now, is_of_connect=True)
        if not connect.subs:
            actions.append(Transmit(connection, MovedIn()))
        return actions

    def _why_not_admitted(self, session: Session, connect: Connect) -> tuple[int, str, Error] | None:
        if self._is_stopping or self.is_draining:
            error = Error("draining", "this broker takes no users now", "elsewhere", RETRY_MS)
            return GOING_AWAY, "draining", error
        if len(self.sessions) > self._options.sessions_max:
            return FULL, "full", Error("full", "this broker has no room for more users", "elsewhere", RETRY_MS)
        earlier = self._by_key.get(session.key)
        if earlier is not None and not earlier.is_closed and earlier.generation > connect.generation:
            return TAKEN_OVER, "taken over", Error("taken_over", "a newer connection of this session is here")
        return None

    def close(self, session: Session, code: int, reason: str) -> BrokerAction:
        """Close a session's connection. Nothing more is delivered."""
        session.is_closed = True
        for subscription in list(session.subscriptions.values()):
            self._end(subscription)
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]
        self.control.on_closed(session, self._now)
        return CloseConnection(session.connection, code, reason)

    def _on_closed(self, connection: ConnectionId, now: float) -> list[BrokerAction]:
        session = self.sessions.pop(connection, None)
        if session is not None and not session.is_closed:
            self.close(session, NORMAL, "")
        return []

    def _expire(self, session: Session, now: float) -> Sequence[BrokerAction]:
        expires_at = session.grant.expires_at
        if session.is_closed or expires_at is None or expires_at > now:
            return []
        error = Error("token_expired", "the token has expired: connect with a new one")
        return [Transmit(session.connection, error), self.close(session, TOKEN_EXPIRED, "the token has expired")]

    def _on_refreshed(self, connection: ConnectionId, grant: Grant, now: float) -> list[BrokerAction]:
        session = self.sessions.get(connection)
        if session is None or session.is_closed:
            return []
        session.heard_at = now
        if grant.user != session.grant.user:
            return [Transmit(connection, Error("token_refused", "the token is another user's"))]
        session.grant = grant
        if not all(_may_subscribe(grant, each.interest.interest) for each in session.subscriptions.values()):
            # Who connects again learns which subscriptions are refused.
            return [self.close(session, GOING_AWAY, "the token does not allow all subscriptions")]
        if grant.expires_at is not None:
            self._timers.add(grant.expires_at, self._expire, session)
        return []

    def _on_frame(self, session: Session, frame: object, now: float) -> list[BrokerAction]:
        session.heard_at = now
        match frame:
            case Ack():
                return []
            case Pong():
                return []
            case Subscribe(wanted):
                return self._subscribe(session, wanted, now)
            case Unsubscribe(s):
                subscription = session.subscriptions.get(s)
                if subscription is not None:
                    self._delivery.refused.append(subscription)
                return [Transmit(session.connection, Unsubscribed(s))]
            case PublishRequest():
                return self._publish(session, frame, now)
            case Leave():
                return self.moves.leave(session, now)
            case Connect() | Refresh():
                raise AssertionError("the runtime makes Opened and Refreshed of these")
            case _:
                raise AssertionError(f"not a frame of a user: {frame!r}")

    # Subscriptions.

    def is_logged(self, interest: Interest) -> bool:
        """Return whether an interest has a log."""
        if interest.kind == "query":
            return True
        return any(pattern.fullmatch(interest.name.encode()) for pattern in self._history)

    def _subscribe(
        self, session: Session, wanted: Wanted, now: float, *, is_of_connect: bool = False
    ) -> list[BrokerAction]:
        interest = wanted.interest
        if error := self._why_not_subscribed(session, wanted):
            refusal: list[BrokerAction] = [Transmit(session.connection, error)]
            return [*refusal, *self._count_answer(session)] if is_of_connect else refusal
        before = session.subscriptions.get(interest.id)
        actions: list[BrokerAction] = []
        if before is not None:
            self._end(before)
            if is_of_connect and before.is_of_connect and before.stage is Stage.WAITING:  # it is there twice
                actions += self._count_answer(session)
            is_of_connect = is_of_connect or before.is_of_connect
        shared = self.interests.by_id.get(interest.id)
        # Nothing is awaited between look-up and entry: two users never join twice. One that is being left is not used
        # again: an answer of its log may still come.
        if shared is None or shared.phase is Phase.LEAVING:
            shared = SharedInterest(interest, is_logged=self.is_logged(interest), joined_at=now)
            self.interests.add(shared)
            actions.append(SubscribeChannel(shared.channel))
        shared.idle_since = None
        subscription = Subscription(session, shared, wanted.ref, wanted.since, is_of_connect)
        session.subscriptions[interest.id] = subscription
        shared.set_stage(subscription, Stage.WAITING)
        return [*actions, *self._delivery.begin(subscription, now)]

    def _why_not_subscribed(self, session: Session, wanted: Wanted) -> Error | None:
        interest, ref = wanted.interest, wanted.ref
        if not _may_subscribe(session.grant, interest):
            return Error("forbidden", f"the token does not allow this {interest.kind}, or its parameters", ref=ref)
        if interest.is_reserved:
            return Error("forbidden", "this name is reserved", ref=ref)
        is_new = interest.id not in session.subscriptions
        if is_new and len(session.subscriptions) >= self._options.subscriptions_per_session_max:
            most = self._options.subscriptions_per_session_max
            return Error("too_many", f"one connection has {most} subscriptions at most", ref=ref)
        if self.is_logged(interest) and not self._logs.is_configured:
            return Error("log_unavailable", "this broker has no log servers: see broker.logs", ref=ref)
        return None

    def _end(self, subscription: Subscription) -> None:
        """End a subscription; its interest lingers if nobody else has it."""
        subscription.is_ended = True
        shared = subscription.interest
        shared.remove(subscription)
        subscriptions = subscription.session.subscriptions
        if subscriptions.get(shared.id) is subscription:
            del subscriptions[shared.id]
        if not shared.users and shared.idle_since is None:
            shared.idle_since = self._now
            self._timers.add(self._now + self._options.linger_s, self._leave_interest, shared)

    def _leave_interest(self, shared: SharedInterest, now: float) -> Sequence[BrokerAction]:
        idle_since = shared.idle_since
        if idle_since is None or now < idle_since + self._options.linger_s or shared.phase is Phase.LEAVING:
            return []
        shared.phase = Phase.LEAVING
        shared.pending.clear()
        self._delivery.recents.forget(shared)
        return [UnsubscribeChannel(shared.channel)]

    # The Dynamoth client.

    def _on_publications(self, messages: Sequence[tuple[bytes, bytes]], now: float) -> list[BrokerAction]:
        by_channel, delivery = self.interests.by_channel, self._delivery
        self.counters["publications"] += len(messages)
        actions: list[BrokerAction] = []
        for channel, payload in messages:
            shared = by_channel.get(channel)
            if shared is not None:
                shared.arrived_bytes += len(payload)
                actions += delivery.on_publication(shared, payload, now)
        return actions

    def _on_channel(
        self, event: ChannelConfirmed | ChannelEnded | ChannelFailed | ChannelGap | BarrierPassed, now: float
    ) -> list[BrokerAction]:
        if isinstance(event, BarrierPassed):
            return self.moves.on_barrier(event.channel)
        shared = self.interests.by_channel.get(event.channel)
        if shared is None:
            return []
        match event:
            case ChannelConfirmed():
                return self._delivery.on_confirmed(shared, now) if shared.phase is Phase.JOINING else []
            case ChannelEnded():
                if shared.phase is Phase.LEAVING:
                    self.interests.remove(shared)
                return []
            case ChannelFailed(_, reason):
                return self._on_failed(shared, reason)
            case ChannelGap(_, count, reason):
                return self._delivery.on_gap(shared, count, reason, now)

    def _on_failed(self, shared: SharedInterest, reason: str) -> list[BrokerAction]:
        """Refuse everybody: Redis does not let this broker subscribe."""
        shared.phase = Phase.LEAVING  # whatever still waits for it ends here
        actions: list[BrokerAction] = []
        for subscription in (*shared.live.values(), *shared.others.values()):
            error = Error(
                "unavailable", f"the broker cannot subscribe to it: {reason}", "later", RETRY_MS, subscription.ref
            )
            session = subscription.session
            was_confirmed = subscription.stage is not Stage.WAITING
            actions.append(Transmit(session.connection, error))
            self._delivery.refused.append(subscription)
            self._end(subscription)
            if was_confirmed:  # the user takes it for good: who connects again learns that it is refused
                actions.append(self.close(session, GOING_AWAY, "a subscription was lost"))
        self.interests.remove(shared)
        self._delivery.recents.forget(shared)
        self.counters["subscriptions_refused_by_redis"] += 1
        return actions

    def _check_tips(self, now: float) -> Sequence[BrokerAction]:
        """Compare a part of the interests with their logs: all of them in ``tip_check_s``, but not at once."""
        if not self._to_check:
            self._to_check = [shared for shared in self.interests if shared.is_logged]
            parts = min(TIP_CHECK_PARTS_MAX, 1 + len(self._to_check) // TIP_CHECKS_AT_ONCE)
            self._check_interval_s = self._options.tip_check_s / parts
            self._checks_at_once = -(-len(self._to_check) // parts)
        self._timers.add(now + self._check_interval_s, self._check_tips)
        actions: list[BrokerAction] = []
        for _ in range(min(self._checks_at_once, len(self._to_check))):
            actions += self._delivery.compare(self._to_check.pop(), now)
        return actions

    # Publishing.

    def _publish(self, session: Session, request: PublishRequest, now: float) -> list[BrokerAction]:
        interest, ref, connection = request.channel, request.ref, session.connection
        if not session.grant.may_publish(interest.name) or interest.is_reserved:
            return [Transmit(connection, Error("forbidden", "the token does not allow to publish here", ref=ref))]
        if not self.is_logged(interest):
            token = partial(self._published, session, ref)
            return [PublishMessage(interest.name.encode(), request.payload, token)]
        if not self._logs.is_configured:
            return [Transmit(connection, Error("log_unavailable", "this broker has no log servers", ref=ref))]
        return self._logs.append(interest.id, request.payload, partial(self._appended, session, request), now)

    def _published(self, session: Session, ref: int, reason: str | None) -> list[BrokerAction]:
        if reason is None:
            return [Transmit(session.connection, Published(ref))]
        error = Error("unknown_outcome", f"it may not have been published: {reason}", "later", RETRY_MS, ref)
        return [Transmit(session.connection, error)]

    def _appended(
        self, session: Session, request: PublishRequest, result: Appended | str, now: float
    ) -> Sequence[BrokerAction]:
        if isinstance(result, str):
            unknown = result == "unknown"
            code = "unknown_outcome" if unknown else "log_unavailable"
            text = "the connection to the log was lost: it may or may not be stored" if unknown else result
            return [Transmit(session.connection, Error(code, text, "later", RETRY_MS, request.ref))]
        publication = LoggedPublication(result.epoch, result.offset, request.payload)
        position = Position(result.epoch, result.offset)
        return [
            PublishMessage(request.channel.log_channel, pack_publication(publication)),
            Transmit(session.connection, Published(request.ref, position)),
        ]

    # Slow users, and those who are gone.

    def _on_overflowed(self, connection: ConnectionId, now: float) -> list[BrokerAction]:
        session = self.sessions.get(connection)
        if session is None or session.is_closed or session.slow_since is not None:
            return []
        self.counters["slow_sessions"] += 1
        session.slow_since = now
        for subscription in session.subscriptions.values():
            self._delivery.pause(subscription)
        return []

    def _on_writable(self, connection: ConnectionId, now: float) -> list[BrokerAction]:
        session = self.sessions.get(connection)
        if session is None or session.is_closed or session.slow_since is None:
            return []
        session.slow_since = None
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
                actions.append(self.close(session, TOO_SLOW, "too slow"))
                continue
            actions.append(Transmit(session.connection, Ping()))
            self._pings.append((now + options.ping_s, session))
            self._pongs.append((now + options.pong_timeout_s, session))
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
        self.counters["sessions_lost"] += 1
        return [self.close(session, GOING_AWAY, "no answer to a ping")]

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self.interests.check()
        self._delivery.recents.check()
        for connection, session in self.sessions.items():
            assert session.connection == connection
            assert not (session.is_closed and session.subscriptions), f"{session.name} is closed and has subscriptions"
        for session in self._by_key.values():
            assert not session.is_closed, f"{session.name} is closed, and the newest"
