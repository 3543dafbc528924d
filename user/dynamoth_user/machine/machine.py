"""Decides what an end user's client does: connections, resume, migration, and which publication is delivered when.

Theory of operation
-------------------
The client knows its positions, so any broker can serve it. ``docs/brokers.md`` has the rules. There is one SERVING
connection; one that is lost is replaced after a random time, and the subscriptions go on from what was received.

During a migration (``migration``) there are two connections, and both deliver. Offsets tell copies of logged
interests; ``live`` merges the streams of the others.

The position of a subscription is what the application has handled. ``received`` is ahead of it by what the runtime has
queued.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from dynamoth.edge.frames import (
    Ack,
    BrokerFrame,
    Bye,
    Connect,
    Connected,
    Data,
    Error,
    Gap,
    Members,
    Move,
    MovedIn,
    Ping,
    Pong,
    Published,
    Refresh,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Unsubscribed,
)
from dynamoth.edge.interests import Interest
from dynamoth.edge.publications import Position
from dynamoth.machine.events import Start, Tick
from dynamoth.machine.timers import Timers
from dynamoth_user.machine.connections import Connections
from dynamoth_user.machine.events import (
    AddSubscription,
    Close,
    CloseConnection,
    Complained,
    Confirmed,
    ConnectionClosed,
    ConnectionOpened,
    Deliver,
    DeliverGap,
    Failed,
    ForgetPublication,
    FrameReceived,
    Handled,
    Interrupted,
    NeedToken,
    PublishMessage,
    ReadingPaused,
    Refused,
    RemoveSubscription,
    SendFrame,
    Served,
    TokenReady,
    UserAction,
    UserEvent,
    UserOptions,
)
from dynamoth_user.machine.live import LiveDelivery
from dynamoth_user.machine.migration import NORMAL, OLD_BROKER_LOST, Migration
from dynamoth_user.machine.presence import Rosters
from dynamoth_user.machine.publishing import Publications
from dynamoth_user.machine.records import Connection, Role, UserSubscription

FINAL_CODES = frozenset((1008, 1009, 4001, 4004, 4005))
"""Close codes after which connecting again does not help."""

TOKEN_EXPIRED = 4002

RECONNECTED = "the connection was lost: what was published meanwhile is missing"


class UserMachine:
    """One client: its subscriptions, and the connections over which brokers serve them."""

    def __init__(self, options: UserOptions, incarnation: int) -> None:
        """Begin without a connection. ``incarnation`` is random: it spreads the times of reconnects."""
        self._options = options
        self._timers: Timers[UserAction] = Timers()
        self.counters: Counter[str] = Counter()
        self.subscriptions: dict[str, UserSubscription] = {}
        self._connections = Connections(options, incarnation, self._timers, self.counters, self._on_closed)
        self._live = LiveDelivery(options)
        self._publications = Publications(options, self._connections)
        self._rosters = Rosters(options, self._connections, self._timers)
        self._migration = Migration(
            options,
            self._timers,
            self.counters,
            self._connections,
            self.subscriptions,
            self._live,
            self._publications,
        )
        self._ack_s = 1.0
        self._ack_due = False
        #: How long the last token that a broker has taken had to live: one that cannot be read lives as long, perhaps.
        self._token_s = 0.0
        self._is_closed = False

    def handle(self, event: UserEvent, now: float) -> list[UserAction]:
        """Handle one event; return the actions to execute, in order."""
        if self._is_closed:
            return []
        return [*self._handle(event, now), *self._rosters.ask()]

    def _handle(self, event: UserEvent, now: float) -> list[UserAction]:
        match event:
            case FrameReceived(number, frame):
                connection = self._connections.by_number.get(number)
                return [] if connection is None else self._on_frame(connection, frame, now)
            case Handled(interest, position):
                return self._on_handled(interest, position, now)
            case ConnectionOpened(number):
                return self._on_opened(number)
            case ConnectionClosed(number, code, reason):
                return self._on_closed(number, code, reason, now)
            case TokenReady():
                return self._on_token(event, now)
            case AddSubscription():
                return self._add(event)
            case RemoveSubscription(interest):
                return self._remove(interest, now)
            case PublishMessage():
                return self._publications.publish(event)
            case ForgetPublication(token):
                self._publications.forget(token)
                return self._migration.close_old_if_done()
            case ReadingPaused(number, is_paused):
                return self._connections.set_paused(number, is_paused=is_paused, now=now)
            case Start():
                return self._connections.open_serving(now)
            case Tick():
                return self._timers.run_due(now)
            case Close():
                return [*self._acknowledge(now), *self._close_all(NORMAL, "closed by the application")]
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Return when the next timer is due; None when the client is closed."""
        return None if self._is_closed else self._timers.next_at

    @property
    def connections(self) -> dict[int, Connection]:
        """The connections, by number."""
        return self._connections.by_number

    @property
    def serving(self) -> Connection | None:
        """The connection of the broker that serves the session, or that is being opened to do so."""
        return self._connections.serving

    # Connections.

    def _on_opened(self, number: int) -> list[UserAction]:
        connection = self.connections.get(number)
        if connection is None:
            return []
        connection.is_open = True
        return [NeedToken(number)] if self._options.has_token else self._ask(connection, None)

    def _on_token(self, event: TokenReady, now: float) -> list[UserAction]:
        connection = self.connections.get(event.number)
        if connection is None or not connection.is_open:
            return []
        former_exp, connection.token_exp = connection.token_exp, event.expires_at
        if not connection.is_asked:
            return self._ask(connection, event.token)
        refresh_s = self._options.refresh_s
        if event.expires_at is None or former_exp is None or connection.token_ends_at is None:
            delay_s = max(refresh_s, self._token_s - refresh_s)
        else:  # the broker's clock says when the former one ends: this one does so later by the difference
            connection.token_ends_at += event.expires_at - former_exp
            left_s = connection.token_ends_at - now
            delay_s = max(left_s - refresh_s, left_s / 2, self._options.refresh_s_min)
        self._refresh_later(event.number, delay_s, now)
        return [] if event.token is None else [SendFrame(event.number, Refresh(event.token))]

    def _ask(self, connection: Connection, token: str | None) -> list[UserAction]:
        """Ask a broker to serve every subscription."""
        connection.is_asked = True
        subs = tuple(self._connections.ask_for(connection, each) for each in self.subscriptions.values())
        generation = self._options.generation + connection.number
        connect = Connect(self._options.session, generation, token, connection.ticket, subs)
        return [SendFrame(connection.number, connect)]

    def _on_closed(self, number: int, code: int, reason: str, now: float) -> list[UserAction]:
        connection = self.connections.pop(number, None)
        if connection is None:
            return []
        error_code, message = connection.error
        if error_code and reason == error_code:  # brokers close with the code of the error before
            reason = f"{error_code}: {message}"
        actions = self._publications.fail(number, reason)
        match connection.role:
            case Role.CANDIDATE:
                return [*actions, *self._migration.try_next_target(now)]
            case Role.LEAVING:
                return [*actions, *self._migration.old_is_gone()]
            case Role.SERVING:
                return [*actions, *self._serving_is_gone(connection, code, reason, now)]
            case _:
                assert_never(connection.role)

    def _serving_is_gone(self, connection: Connection, code: int, reason: str, now: float) -> list[UserAction]:
        """Go on with another connection: that of a migration, or a new one."""
        for subscription in self.subscriptions.values():
            if subscription.is_live and subscription.is_confirmed:
                subscription.is_interrupted = True
        candidate = self._connections.of_role(Role.CANDIDATE)
        if candidate is not None:
            return self._migration.promote(candidate)
        if code in FINAL_CODES or (code == TOKEN_EXPIRED and self._options.has_fixed_token):
            return [Failed(code, reason), *self._close_all(code, reason)]
        actions = self._migration.release_all(OLD_BROKER_LOST)  # of a migration before this loss
        return [*actions, Interrupted(reason, self._connections.retry(connection, now), connection.url)]

    def _close_all(self, code: int, reason: str) -> list[UserAction]:
        self._is_closed = True
        closing: list[UserAction] = [CloseConnection(number, code, reason) for number in self.connections]
        self.connections.clear()
        return [*closing, *self._publications.fail_all(reason)]

    # Frames.

    def _on_frame(self, connection: Connection, frame: BrokerFrame, now: float) -> list[UserAction]:
        self._connections.on_frame(connection, now)
        match frame:
            case Data():
                return self._on_data(connection, frame)
            case Gap():
                return self._on_gap(connection, frame)
            case Subscribed():
                return self._on_subscribed(connection, frame, now)
            case Connected():
                return self._on_connected(connection, frame, now)
            case Ping():
                return [SendFrame(connection.number, Pong())]
            case Move():
                return self._migration.on_move(connection, frame, now)
            case MovedIn():
                connection.has_moved_in = True
                return self._migration.complete()
            case Bye():
                return self._migration.on_bye(connection, now)
            case Published(ref, position):
                return [*self._publications.accept(ref, position), *self._migration.close_old_if_done()]
            case Members():
                return self._rosters.on_members(frame, now)
            case Error():
                return self._on_error(connection, frame, now)
            case Unsubscribed():
                return []
            case _:
                assert_never(frame)

    def _on_connected(self, connection: Connection, frame: Connected, now: float) -> list[UserAction]:
        connection.is_up = True
        connection.broker, connection.ping_s = frame.broker, frame.ping_s
        self._connections.on_frame(connection, now)
        self._connections.alternates = frame.alternates
        self._ack_s = frame.ack_s
        if frame.expires_in_s is not None:
            self._token_s = frame.expires_in_s
            connection.token_ends_at = now + frame.expires_in_s
            self._refresh_later(connection.number, frame.expires_in_s - self._options.refresh_s, now)
        if connection.role is not Role.SERVING:
            return []
        return [Served(frame.broker, connection.url, moved=False), *self._publications.send_waiting()]

    def _refresh_later(self, number: int, delay_s: float, now: float) -> None:
        if self._options.has_token and not self._options.has_fixed_token:
            self._timers.add(now + max(0.0, delay_s), self._refresh, number)

    def _refresh(self, number: int, now: float) -> list[UserAction]:
        return [NeedToken(number)] if number in self.connections else []

    def _on_error(self, connection: Connection, error: Error, now: float) -> list[UserAction]:
        """Note an error; one with a ``ref`` answers a subscription or a publication."""
        self.counters[f"error_{error.code}"] += 1
        retry_after_s = (error.retry_after_ms or 0) / 1000
        if error.ref is None:
            connection.retry_after_s = retry_after_s
            connection.error = error.code, error.message
            return [Complained(error.code, error.message, connection.url)] if connection.is_up else []
        if self._rosters.on_error(error, now):
            return []
        ended = self._publications.refuse(error.ref, error)
        if ended is not None:
            return [*ended, *self._migration.close_old_if_done()]
        request = connection.asked.pop(error.ref, None)
        subscription = None if request is None else self.subscriptions.get(request.interest.id)
        if subscription is None:
            return []
        if connection.role is Role.CANDIDATE:  # this broker cannot serve us: stay where we are
            return self._migration.drop_candidate(connection, now)
        if error.retry == "never":
            del self.subscriptions[subscription.interest.id]
            self._rosters.remove(subscription.interest.id)
            return [Refused(subscription.interest, error.code, error.message), *self._migration.complete()]
        due = now + max(retry_after_s, self._options.retry_s * (0.5 + self._connections.random()))
        self._timers.add(due, self._ask_again, connection.number, subscription)
        return []

    def _ask_again(self, number: int, subscription: UserSubscription, now: float) -> list[UserAction]:
        connection = self.connections.get(number)
        interest = subscription.interest
        if connection is None or self.subscriptions.get(interest.id) is not subscription:
            return []
        if interest.id in connection.confirmed:
            return []
        return [SendFrame(number, Subscribe(self._connections.ask_for(connection, subscription)))]

    # Subscriptions.

    def _add(self, event: AddSubscription) -> list[UserAction]:
        interest, since = event.interest, event.since
        if interest.id in self.subscriptions:
            return []
        subscription = self.subscriptions[interest.id] = UserSubscription(
            interest, since, is_stored=event.is_stored, is_present=event.is_present, handled=since
        )
        if interest.kind == "presence":
            self._rosters.add(subscription)
        subscription.awaits_old = self._connections.of_role(Role.CANDIDATE) is not None
        return [
            SendFrame(each.number, Subscribe(self._connections.ask_for(each, subscription)))
            for each in self.connections.values()
            if each.is_asked and each.role is not Role.LEAVING
        ]

    def _remove(self, interest: Interest, now: float) -> list[UserAction]:
        if interest.id not in self.subscriptions:
            return []
        self._rosters.remove(interest.id)
        last_ack = self._acknowledge(now) if self.subscriptions[interest.id].is_stored else []
        del self.subscriptions[interest.id]
        asked = [each for each in self.connections.values() if each.is_asked]
        for connection in asked:
            connection.confirmed.pop(interest.id, None)
            # An answer that is under way is not one to a later subscription to the same interest.
            connection.asked = {
                ref: request for ref, request in connection.asked.items() if request.interest.id != interest.id
            }
        return [
            *last_ack,
            *(SendFrame(each.number, Unsubscribe(interest.id)) for each in asked),
            *self._migration.complete(),
            *self._migration.close_old_if_done(),
        ]

    def _on_subscribed(self, connection: Connection, frame: Subscribed, now: float) -> list[UserAction]:
        request = connection.asked.pop(frame.ref, None)
        subscription = None if request is None else self.subscriptions.get(request.interest.id)
        if request is None or subscription is None or frame.s != subscription.interest.id:
            return []
        position, since = frame.position, request.since
        if position and since and position.epoch == since.epoch and position.offset < since.offset:
            connection.went_back.add(frame.s)
        connection.confirmed[frame.s] = None if position is None else position.epoch
        subscription.is_live = position is None
        if subscription.received is None and frame.recovered:  # else the gap that follows says where it begins
            subscription.received = subscription.handled = subscription.acknowledged = position
            subscription.acknowledged_over = connection.number
        actions: list[UserAction] = []
        if not subscription.is_confirmed:
            subscription.is_confirmed = True
            actions.append(Confirmed(subscription.interest, position))
        elif subscription.is_live and subscription.is_interrupted and since is None:  # else the broker sends a gap
            actions.append(DeliverGap(subscription.interest, RECONNECTED))
        if subscription.is_live:
            subscription.is_interrupted = False
        if subscription.is_stored:  # the former broker may have died before it stored what was acknowledged
            self._acknowledge_later(now)
        return [*actions, *self._migration.complete()]

    def _on_data(self, connection: Connection, frame: Data) -> list[UserAction]:
        subscription = self.subscriptions.get(frame.s)
        if subscription is None or frame.s not in connection.confirmed:
            return []
        if frame.o is None:
            return self._on_live_data(connection, subscription, frame)
        epoch, received = connection.confirmed[frame.s], subscription.received
        if received is None or epoch != received.epoch or frame.o <= received.offset:
            return []  # another epoch, or a copy
        if frame.o == received.offset + 1:
            position = Position(received.epoch, frame.o)
            subscription.received = position
            if subscription.interest.kind == "presence":
                return self._rosters.on_publication(subscription, position, frame.payload)
            return [Deliver(subscription.interest, frame.payload, position)]
        self.counters["offsets_missing"] += 1
        del connection.confirmed[frame.s]  # until the answer
        return [SendFrame(connection.number, Subscribe(self._connections.ask_for(connection, subscription)))]

    def _on_live_data(self, connection: Connection, subscription: UserSubscription, frame: Data) -> list[UserAction]:
        if frame.p is None and connection.role is Role.CANDIDATE:
            return []  # nobody can tell it from the copy that the old broker delivers
        had_held = bool(subscription.held)
        actions = self._live.on_data(subscription, frame, from_new=self._connections.is_new(connection))
        return [*actions, *self._migration.close_old_if_done()] if had_held else actions

    def _on_gap(self, connection: Connection, frame: Gap) -> list[UserAction]:
        subscription = self.subscriptions.get(frame.s)
        if subscription is None or frame.s not in connection.confirmed:
            return []
        interest, position, received = subscription.interest, frame.position, subscription.received
        if position is None:
            return [DeliverGap(interest, frame.reason, count=frame.count)]
        connection.confirmed[frame.s] = position.epoch
        went_back = frame.s in connection.went_back
        connection.went_back.discard(frame.s)
        if received is None:  # the log does not have everything behind the stored position
            subscription.received = position
            return [DeliverGap(interest, frame.reason, frame.first, frame.last, position=position)]
        if position.epoch in subscription.past_epochs:
            return []
        if position.epoch != received.epoch:
            subscription.past_epochs.add(received.epoch)
        elif position.offset <= received.offset and not went_back:
            return []  # the other broker has sent it
        subscription.received = position
        if interest.kind == "presence":
            self._rosters.on_gap(subscription)
        last = position.offset if position.epoch == received.epoch and not went_back else None
        return [DeliverGap(interest, frame.reason, received.offset + 1, last, position=position)]

    # Positions.

    def _on_handled(self, interest: Interest, position: Position, now: float) -> list[UserAction]:
        subscription = self.subscriptions.get(interest.id)
        if subscription is None:
            return []
        subscription.handled = position
        if subscription.is_stored:
            self._acknowledge_later(now)
        return []

    def _acknowledge_later(self, now: float) -> None:
        if not self._ack_due:
            self._ack_due = True
            self._timers.add(now + self._ack_s, self._acknowledge)

    def _acknowledge(self, now: float) -> list[UserAction]:
        """Say what was handled of stored subscriptions, unless the serving broker already has it."""
        self._ack_due = False
        stored = [each for each in self.subscriptions.values() if each.is_stored]
        if stored and self._connections.of_role(Role.CANDIDATE) is not None:
            self._acknowledge_later(now)  # the new broker is told, too
        serving = self.serving
        if serving is None or not serving.is_up:
            return []
        positions: dict[str, Position] = {}
        for subscription in stored:
            id_, handled = subscription.interest.id, subscription.handled
            if handled is None or handled.epoch != serving.confirmed.get(id_):
                continue
            if handled == subscription.acknowledged and serving.number == subscription.acknowledged_over:
                continue
            positions[id_] = handled
            subscription.acknowledged, subscription.acknowledged_over = handled, serving.number
        return [SendFrame(serving.number, Ack(positions))] if positions else []

    def positions(self) -> dict[str, Position]:
        """Return the position of each logged subscription that the application has handled, by interest id."""
        return {id_: each.handled for id_, each in self.subscriptions.items() if each.handled is not None}

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        roles = [each.role for each in self.connections.values()]
        assert len(roles) == len(set(roles)), f"two connections of one role: {roles}"
        assert Role.CANDIDATE not in roles or Role.SERVING in roles, "a candidate without a serving connection"
        for subscription in self.subscriptions.values():
            if subscription.held:
                assert len(self.connections) > 1, f"{subscription.interest.id} holds without a migration"
