"""Decides what an end user's client does: connections, resume, migration, and which publication is delivered when.

Theory of operation
-------------------
The client knows its positions, so any broker can serve it. ``docs/brokers.md`` has the rules. There is one SERVING
connection; one that is lost is replaced after a random time, and the subscriptions go on from what was received.

During a migration there are two connections, and both deliver. Offsets tell copies of logged interests. For a live
interest the old broker's stream is complete, and the new broker's is complete from its confirmation on. So what comes
from the new broker is delivered at once only if it is the next of its publisher; the rest is held until the old broker
says that everything from before has come (``bye``).

The position of a subscription is what the application has handled. ``received`` is ahead of it by what the runtime has
queued.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
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
    Leave,
    Move,
    MovedIn,
    Ping,
    Pong,
    Published,
    PublishRequest,
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
from dynamoth_user.machine.events import (
    AddSubscription,
    Close,
    CloseConnection,
    Confirmed,
    ConnectionClosed,
    ConnectionOpened,
    Deliver,
    DeliverGap,
    Failed,
    FrameReceived,
    Handled,
    Interrupted,
    NeedToken,
    OpenConnection,
    PublishEnded,
    PublishMessage,
    Refused,
    RemoveSubscription,
    SendFrame,
    Served,
    TokenReady,
    UserAction,
    UserEvent,
    UserOptions,
)
from dynamoth_user.machine.records import Connection, HeldPublication, Role, UserSubscription

NORMAL = 1000
LOST = 1006
SILENT = 1001

FINAL_CODES = frozenset((1008, 1009, 4001, 4004, 4005))
"""Close codes after which connecting again does not help."""

RECONNECTED = "the connection was lost: what was published meanwhile is missing"
OLD_BROKER_LOST = "the former broker was lost during the migration"
NUMBERS_MISSING = "a publication of the former broker did not come"


class UserMachine:
    """One client: its subscriptions, and the connections over which brokers serve them."""

    def __init__(self, options: UserOptions, incarnation: int) -> None:
        """Begin without a connection. ``incarnation`` is random: it spreads the times of reconnects."""
        self._options = options
        self._incarnation = incarnation
        self._timers: Timers[UserAction] = Timers()
        self.counters: Counter[str] = Counter()
        self.subscriptions: dict[str, UserSubscription] = {}
        self.connections: dict[int, Connection] = {}
        self._numbers = 0
        self._refs = 0
        self._draws = 0
        #: Failed attempts since a broker served us.
        self._attempts = 0
        self._alternates: tuple[str, ...] = ()
        #: The place of the URL that was tried last, among alternates and URLs; -1: the first one is next.
        self._next_url = -1
        #: Publications without an answer, by ``ref``: the connection and the application's token.
        self._publishing: dict[int, tuple[int, object]] = {}
        #: Publications for a connection that is not up yet.
        self._unsent: list[PublishMessage] = []
        #: The URLs left of a migration, and until when it is to be done.
        self._targets: tuple[str, ...] = ()
        self._move_until = 0.0
        self._ack_s = 1.0
        self._ack_due = False
        self._is_closed = False

    def handle(self, event: UserEvent, now: float) -> list[UserAction]:
        """Handle one event; return the actions to execute, in order."""
        if self._is_closed:
            return []
        match event:
            case FrameReceived(number, frame):
                connection = self.connections.get(number)
                return [] if connection is None else self._on_frame(connection, frame, now)
            case Handled(interest, position):
                return self._on_handled(interest, position, now)
            case ConnectionOpened(number):
                return self._on_opened(number)
            case ConnectionClosed(number, code, reason):
                return self._on_closed(number, code, reason, now)
            case TokenReady(number, token):
                return self._on_token(number, token)
            case AddSubscription(interest, since):
                return self._add(interest, since)
            case RemoveSubscription(interest):
                return self._remove(interest)
            case PublishMessage():
                return self._publish(event)
            case Start():
                return self._connect(now)
            case Tick():
                return self._timers.run_due(now)
            case Close():
                return self._close_all(NORMAL, "closed by the application")
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Return when the next timer is due; None when the client is closed."""
        return None if self._is_closed else self._timers.next_at

    @property
    def serving(self) -> Connection | None:
        """The connection of the broker that serves the session; None while there is none, or it is being opened."""
        return self._of_role(Role.SERVING)

    def _of_role(self, role: Role) -> Connection | None:
        return next((each for each in self.connections.values() if each.role is role), None)

    # Connections.

    def _random(self) -> float:
        """Return a number from 0 to 1."""
        self._draws += 1
        seed = b"%d %d" % (self._incarnation, self._draws)
        return int.from_bytes(blake2b(seed, digest_size=7).digest()) / 2**56

    def _connect(self, now: float) -> list[UserAction]:
        """Open a connection to serve the session, unless there is one."""
        if self._of_role(Role.SERVING) is not None:
            return []
        urls = (*self._alternates, *(url for url in self._options.urls if url not in self._alternates))
        self._next_url = (self._next_url + 1) % len(urls)
        return self._open(urls[self._next_url], Role.SERVING, now)

    def _open(self, url: str, role: Role, now: float, ticket: str | None = None) -> list[UserAction]:
        self._numbers += 1
        number = self._numbers
        deadline = now + self._options.connect_timeout_s
        self.connections[number] = Connection(number, url, role, deadline, ticket=ticket)
        self._timers.add(deadline, self._watch, number)
        return [OpenConnection(number, url)]

    def _watch(self, number: int, now: float) -> list[UserAction]:
        """Give up a connection that is silent."""
        connection = self.connections.get(number)
        if connection is None:
            return []
        if now < connection.deadline:
            self._timers.add(connection.deadline, self._watch, number)
            return []
        self.counters["connections_silent"] += 1
        return [
            CloseConnection(number, SILENT, "the broker is silent"),
            *self._on_closed(number, LOST, "the broker is silent", now),
        ]

    def _on_opened(self, number: int) -> list[UserAction]:
        connection = self.connections.get(number)
        if connection is None:
            return []
        connection.is_open = True
        return [NeedToken(number)] if self._options.has_token else self._ask(connection, None)

    def _on_token(self, number: int, token: str | None) -> list[UserAction]:
        connection = self.connections.get(number)
        if connection is None or not connection.is_open:
            return []
        if not connection.is_asked:
            return self._ask(connection, token)
        return [] if token is None else [SendFrame(number, Refresh(token))]

    def _ask(self, connection: Connection, token: str | None) -> list[UserAction]:
        """Ask a broker to serve every subscription."""
        connection.is_asked = True
        subs = tuple(each.wanted(self._ref(connection, each.interest)) for each in self.subscriptions.values())
        generation = self._options.generation + connection.number
        connect = Connect(self._options.session, generation, token, connection.ticket, subs)
        return [SendFrame(connection.number, connect)]

    def _ref(self, connection: Connection, interest: Interest) -> int:
        self._refs += 1
        connection.asked[self._refs] = interest
        return self._refs

    def _on_closed(self, number: int, code: int, reason: str, now: float) -> list[UserAction]:
        connection = self.connections.pop(number, None)
        if connection is None:
            return []
        actions = self._fail_publications(number, reason)
        match connection.role:
            case Role.CANDIDATE:
                return [*actions, *self._try_next_target(now)]
            case Role.LEAVING:
                return [*actions, *self._old_is_gone(now)]
            case Role.SERVING:
                return [*actions, *self._serving_is_gone(connection, code, reason, now)]
            case _:
                assert_never(connection.role)

    def _serving_is_gone(self, connection: Connection, code: int, reason: str, now: float) -> list[UserAction]:
        """Go on with another connection: that of a migration, or a new one."""
        for subscription in self.subscriptions.values():
            if subscription.is_live and subscription.is_confirmed:
                subscription.is_interrupted = True
        candidate = self._of_role(Role.CANDIDATE)
        if candidate is not None:
            return self._promote(candidate, now)
        if code in FINAL_CODES:
            return [*self._close_all(code, reason), Failed(code, reason)]
        actions = self._release_all(OLD_BROKER_LOST, now)  # of a migration before this loss
        if connection.is_up:
            self._attempts = 0
        bound = min(self._options.backoff_s_max, self._options.backoff_s_min * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 30)
        retry_s = max(bound * self._random(), connection.retry_after_s)
        self._timers.add(now + retry_s, self._connect)
        return [*actions, Interrupted(reason, retry_s)]

    def _close_all(self, code: int, reason: str) -> list[UserAction]:
        self._is_closed = True
        closing: list[UserAction] = [CloseConnection(number, code, reason) for number in self.connections]
        failed = [PublishEnded(token, None, "closed", reason) for _, token in self._publishing.values()]
        unsent = [PublishEnded(each.token, None, "closed", reason) for each in self._unsent]
        self.connections.clear()
        self._publishing.clear()
        self._unsent.clear()
        return [*closing, *failed, *unsent]

    # Frames.

    def _on_frame(self, connection: Connection, frame: BrokerFrame, now: float) -> list[UserAction]:
        if connection.is_up:
            connection.deadline = now + connection.ping_s + self._options.silence_s
        match frame:
            case Data():
                return self._on_data(connection, frame, now)
            case Gap():
                return self._on_gap(connection, frame)
            case Subscribed():
                return self._on_subscribed(connection, frame, now)
            case Connected():
                return self._on_connected(connection, frame, now)
            case Ping():
                return [SendFrame(connection.number, Pong())]
            case Move():
                return self._on_move(connection, frame, now)
            case MovedIn():
                connection.has_moved_in = True
                return self._complete(connection, now)
            case Bye():
                return self._on_bye(connection, now)
            case Published(ref, position):
                _, token = self._publishing.pop(ref, (0, None))
                return [] if token is None else [PublishEnded(token, position), *self._close_old_if_done(now)]
            case Error():
                return self._on_error(connection, frame, now)
            case Unsubscribed():
                return []
            case _:
                assert_never(frame)

    def _on_connected(self, connection: Connection, frame: Connected, now: float) -> list[UserAction]:
        connection.is_up = True
        connection.broker, connection.ping_s = frame.broker, frame.ping_s
        connection.deadline = now + frame.ping_s + self._options.silence_s
        self._alternates = frame.alternates
        self._ack_s = frame.ack_s
        if frame.expires_in_s is not None and self._options.has_token:
            due = now + max(0.0, frame.expires_in_s - self._options.refresh_s)
            self._timers.add(due, self._refresh, connection.number)
        if connection.role is not Role.SERVING:
            return []
        self._attempts = 0
        self._next_url = -1
        return [Served(frame.broker, connection.url, moved=False), *self._publish_unsent()]

    def _refresh(self, number: int, now: float) -> list[UserAction]:
        return [NeedToken(number)] if number in self.connections else []

    def _on_error(self, connection: Connection, error: Error, now: float) -> list[UserAction]:
        """Note an error; one with a ``ref`` answers a subscription or a publication."""
        self.counters[f"error_{error.code}"] += 1
        retry_after_s = (error.retry_after_ms or 0) / 1000
        if error.ref is None:
            connection.retry_after_s = retry_after_s
            return []
        if error.ref in self._publishing:
            _, token = self._publishing.pop(error.ref)
            return [PublishEnded(token, None, error.code, error.message), *self._close_old_if_done(now)]
        interest = connection.asked.pop(error.ref, None)
        subscription = None if interest is None else self.subscriptions.get(interest.id)
        if subscription is None:
            return []
        if connection.role is Role.CANDIDATE:  # this broker cannot serve us: stay where we are
            return self._drop_candidate(connection, now)
        if error.retry == "never":
            del self.subscriptions[subscription.interest.id]
            return [Refused(subscription.interest, error.code, error.message)]
        due = now + max(retry_after_s, self._options.retry_s * (0.5 + self._random()))
        self._timers.add(due, self._ask_again, connection.number, subscription)
        return []

    def _ask_again(self, number: int, subscription: UserSubscription, now: float) -> list[UserAction]:
        connection = self.connections.get(number)
        interest = subscription.interest
        if connection is None or self.subscriptions.get(interest.id) is not subscription:
            return []
        if interest.id in connection.epochs:
            return []
        return [SendFrame(number, Subscribe(subscription.wanted(self._ref(connection, interest))))]

    # Subscriptions.

    def _add(self, interest: Interest, since: Position | None) -> list[UserAction]:
        if interest.id in self.subscriptions:
            return []
        subscription = self.subscriptions[interest.id] = UserSubscription(interest, since, handled=since)
        candidate = self._of_role(Role.CANDIDATE)
        subscription.awaits_old = candidate is not None
        return [
            SendFrame(each.number, Subscribe(subscription.wanted(self._ref(each, interest))))
            for each in self.connections.values()
            if each.is_asked and each.role is not Role.LEAVING
        ]

    def _remove(self, interest: Interest) -> list[UserAction]:
        if self.subscriptions.pop(interest.id, None) is None:
            return []
        asked = [each for each in self.connections.values() if each.is_asked]
        for connection in asked:
            connection.epochs.pop(interest.id, None)
        return [SendFrame(each.number, Unsubscribe(interest.id)) for each in asked]

    def _on_subscribed(self, connection: Connection, frame: Subscribed, now: float) -> list[UserAction]:
        interest = connection.asked.pop(frame.ref, None)
        subscription = None if interest is None else self.subscriptions.get(interest.id)
        if subscription is None or frame.s != subscription.interest.id:
            return []
        position = frame.position
        connection.epochs[frame.s] = None if position is None else position.epoch
        subscription.is_live = position is None
        actions: list[UserAction] = []
        if not subscription.is_confirmed:
            subscription.is_confirmed = True
            if subscription.received is None:
                subscription.received = subscription.handled = position
            actions.append(Confirmed(subscription.interest, position))
        elif subscription.is_live and subscription.is_interrupted:
            actions.append(DeliverGap(subscription.interest, RECONNECTED))
        if subscription.is_live:
            subscription.is_interrupted = False
        return [*actions, *self._complete(connection, now)]

    def _on_data(self, connection: Connection, frame: Data, now: float) -> list[UserAction]:
        subscription = self.subscriptions.get(frame.s)
        if subscription is None or frame.s not in connection.epochs:
            return []
        if frame.o is None:
            return self._on_live(connection, subscription, frame, now)
        epoch, received = connection.epochs[frame.s], subscription.received
        if received is None or epoch != received.epoch or frame.o <= received.offset:
            return []  # another life of the log, or a copy
        if frame.o == received.offset + 1:
            position = Position(received.epoch, frame.o)
            subscription.received = position
            return [Deliver(subscription.interest, frame.payload, position)]
        self.counters["offsets_missing"] += 1
        del connection.epochs[frame.s]  # until the answer
        ref = self._ref(connection, subscription.interest)
        return [SendFrame(connection.number, Subscribe(subscription.wanted(ref)))]

    def _on_gap(self, connection: Connection, frame: Gap) -> list[UserAction]:
        subscription = self.subscriptions.get(frame.s)
        if subscription is None or frame.s not in connection.epochs:
            return []
        interest, position, received = subscription.interest, frame.position, subscription.received
        if position is None:
            return [DeliverGap(interest, frame.reason, count=frame.count)]
        connection.epochs[frame.s] = position.epoch
        if received is None or position.epoch in subscription.past_epochs:
            return []
        if position.epoch != received.epoch:
            subscription.past_epochs.add(received.epoch)
        elif position.offset <= received.offset:
            return []  # the other broker has sent it
        subscription.received = position
        first = received.offset + 1
        last = position.offset if position.epoch == received.epoch else None
        return [DeliverGap(interest, frame.reason, first, last, position=position)]

    # Live interests.

    def _on_live(
        self, connection: Connection, subscription: UserSubscription, frame: Data, now: float
    ) -> list[UserAction]:
        place = frame.p
        if place is not None and self._is_copy(subscription, place):
            return []
        from_new = self._is_new(connection)
        if from_new and (subscription.awaits_old or subscription.held):
            publisher_waits = any(each.place and place and each.place[0] == place[0] for each in subscription.held)
            if publisher_waits or place is None or subscription.numbers.get(place[0]) != place[1] - 1:
                subscription.held.append(HeldPublication(frame.payload, place))
                if len(subscription.held) > self._options.held_max:
                    return self._release(subscription, NUMBERS_MISSING)
                return []
        actions = self._hand_out(subscription, frame.payload, place)
        if subscription.held and not subscription.awaits_old:
            actions += self._release_ready(subscription)
            actions += self._close_old_if_done(now)
        return actions

    def _is_new(self, connection: Connection) -> bool:
        """Whether a connection is the new one of a migration."""
        if connection.role is Role.CANDIDATE:
            return True
        return connection.role is Role.SERVING and self._of_role(Role.LEAVING) is not None

    @staticmethod
    def _is_copy(subscription: UserSubscription, place: tuple[int, int]) -> bool:
        latest = subscription.numbers.get(place[0])
        return latest is not None and place[1] <= latest

    def _hand_out(
        self, subscription: UserSubscription, payload: bytes, place: tuple[int, int] | None
    ) -> list[UserAction]:
        if place is not None:
            numbers = subscription.numbers
            numbers.pop(place[0], None)  # the latest is last
            numbers[place[0]] = place[1]
            if len(numbers) > self._options.publishers_max:
                del numbers[next(iter(numbers))]
        return [Deliver(subscription.interest, payload, None)]

    def _release_ready(self, subscription: UserSubscription) -> list[UserAction]:
        """Deliver the held publications that are the next ones of their publishers; keep the others."""
        actions: list[UserAction] = []
        waiting: list[HeldPublication] = []
        stopped: set[int] = set()
        for each in subscription.held:
            place = each.place
            if place is None:
                actions += self._hand_out(subscription, each.payload, None)
            elif place[0] in stopped:
                waiting.append(each)
            elif not self._is_copy(subscription, place):
                latest = subscription.numbers.get(place[0])
                if latest is not None and place[1] != latest + 1:
                    stopped.add(place[0])
                    waiting.append(each)
                else:
                    actions += self._hand_out(subscription, each.payload, place)
        subscription.held = waiting
        return actions

    def _release(self, subscription: UserSubscription, reason: str) -> list[UserAction]:
        """Deliver everything that is held, with a gap for what did not come."""
        actions = self._release_ready(subscription)
        held, subscription.held = subscription.held, []
        if held:
            actions.append(DeliverGap(subscription.interest, reason))
        for each in held:
            if each.place is None or not self._is_copy(subscription, each.place):
                actions += self._hand_out(subscription, each.payload, each.place)
        return actions

    def _release_all(self, reason: str, now: float) -> list[UserAction]:
        actions: list[UserAction] = []
        for subscription in self.subscriptions.values():
            subscription.awaits_old = False
            actions += self._release(subscription, reason)
        return actions

    # Migration.

    def _on_move(self, connection: Connection, frame: Move, now: float) -> list[UserAction]:
        if connection.role is not Role.SERVING or len(self.connections) > 1 or not frame.to:
            return []
        self._targets = frame.to
        self._move_until = now + frame.deadline_ms / 1000
        self._timers.add(
            now + frame.within_ms / 1000 * self._random(), self._begin_move, connection.number, frame.ticket
        )
        return []

    def _begin_move(self, number: int, ticket: str | None, now: float) -> list[UserAction]:
        serving = self.connections.get(number)
        if serving is None or serving.role is not Role.SERVING or len(self.connections) > 1 or not self._targets:
            return []
        url, *rest = self._targets
        self._targets = tuple(rest)
        for subscription in self.subscriptions.values():
            subscription.awaits_old = True
        actions = self._open(url, Role.CANDIDATE, now, ticket)
        candidate = self.connections[self._numbers]
        candidate.deadline = min(candidate.deadline, self._move_until)
        self._timers.add(self._move_until, self._give_up_move, candidate.number)
        return actions

    def _give_up_move(self, number: int, now: float) -> list[UserAction]:
        candidate = self.connections.get(number)
        if candidate is None or candidate.role is not Role.CANDIDATE:
            return []
        self._targets = ()
        return self._drop_candidate(candidate, now)

    def _drop_candidate(self, candidate: Connection, now: float) -> list[UserAction]:
        """Close the connection to a broker that did not take over, and try the next one."""
        del self.connections[candidate.number]
        self.counters["moves_failed"] += 1
        return [CloseConnection(candidate.number, NORMAL, "the move failed"), *self._try_next_target(now)]

    def _try_next_target(self, now: float) -> list[UserAction]:
        """Go on with a migration whose target has failed; without another target, stay."""
        serving = self._of_role(Role.SERVING)
        if serving is not None and self._targets and now < self._move_until:
            return self._begin_move(serving.number, None, now)
        actions: list[UserAction] = []
        for subscription in self.subscriptions.values():
            subscription.awaits_old = False
            subscription.held.clear()  # the old broker sends all of it
        return actions

    def _complete(self, connection: Connection, now: float) -> list[UserAction]:
        """Leave the old broker when the new one serves every subscription."""
        if connection.role is not Role.CANDIDATE or not connection.has_moved_in:
            return []
        if any(id_ not in connection.epochs for id_ in self.subscriptions):
            return []
        old = self._of_role(Role.SERVING)
        assert old is not None, "a candidate is promoted when the serving connection is lost"
        old.role = Role.LEAVING
        connection.role = Role.SERVING
        self.counters["moves"] += 1
        return [
            SendFrame(old.number, Leave()),
            Served(connection.broker, connection.url, moved=True),
            *self._publish_unsent(),
        ]

    def _promote(self, candidate: Connection, now: float) -> list[UserAction]:
        """Go on with the new broker alone: the old one was lost during the migration."""
        candidate.role = Role.SERVING
        self._targets = ()
        actions: list[UserAction] = []
        for subscription in self.subscriptions.values():
            subscription.awaits_old = False
            if subscription.is_interrupted and subscription.interest.id in candidate.epochs:
                subscription.is_interrupted = False
                actions.append(DeliverGap(subscription.interest, OLD_BROKER_LOST))
            actions += self._release(subscription, OLD_BROKER_LOST)
        if candidate.is_up:
            actions += [Served(candidate.broker, candidate.url, moved=False), *self._publish_unsent()]
        return actions

    def _on_bye(self, connection: Connection, now: float) -> list[UserAction]:
        """Hand out what is held: the old broker has sent everything from before."""
        if connection.role is not Role.LEAVING:
            return []
        connection.has_said_bye = True
        actions: list[UserAction] = []
        for subscription in self.subscriptions.values():
            subscription.awaits_old = False
            actions += self._release_ready(subscription)
        if any(each.held for each in self.subscriptions.values()):
            self._timers.add(now + self._options.hold_s, self._end_hold, connection.number)
            return actions
        return [*actions, *self._close_old_if_done(now)]

    def _end_hold(self, number: int, now: float) -> list[UserAction]:
        if number not in self.connections:
            return []
        return [*self._release_all(NUMBERS_MISSING, now), *self._close_old_if_done(now)]

    def _close_old_if_done(self, now: float) -> list[UserAction]:
        """Close the old connection when it has said ``bye``, nothing is held, and no publication is unanswered."""
        old = self._of_role(Role.LEAVING)
        if old is None or not old.has_said_bye or any(each.held for each in self.subscriptions.values()):
            return []
        if any(number == old.number for number, _ in self._publishing.values()):
            return []
        del self.connections[old.number]
        actions = self._fail_publications(old.number, "the session has moved to another broker")
        return [CloseConnection(old.number, NORMAL, "moved"), *actions]

    def _old_is_gone(self, now: float) -> list[UserAction]:
        """Handle the loss of the old broker before it has said ``bye``: live interests may miss something."""
        waiting = [each for each in self.subscriptions.values() if each.is_live and each.awaits_old]
        return [
            *(DeliverGap(each.interest, OLD_BROKER_LOST) for each in waiting),
            *self._release_all(OLD_BROKER_LOST, now),
        ]

    # Publishing and positions.

    def _publish(self, event: PublishMessage) -> list[UserAction]:
        serving = self.serving
        if serving is None or not serving.is_up:
            self._unsent.append(event)
            return []
        self._refs += 1
        self._publishing[self._refs] = (serving.number, event.token)
        return [SendFrame(serving.number, PublishRequest(self._refs, event.channel, event.payload))]

    def _publish_unsent(self) -> list[UserAction]:
        unsent, self._unsent = self._unsent, []
        return [action for event in unsent for action in self._publish(event)]

    def _fail_publications(self, number: int, reason: str) -> list[UserAction]:
        lost = [ref for ref, (connection, _) in self._publishing.items() if connection == number]
        return [
            PublishEnded(self._publishing.pop(ref)[1], None, "unknown_outcome", f"no answer: {reason}") for ref in lost
        ]

    def _on_handled(self, interest: Interest, position: Position, now: float) -> list[UserAction]:
        subscription = self.subscriptions.get(interest.id)
        if subscription is None:
            return []
        subscription.handled = position
        if not self._ack_due:
            self._ack_due = True
            self._timers.add(now + self._ack_s, self._acknowledge)
        return []

    def _acknowledge(self, now: float) -> list[UserAction]:
        self._ack_due = False
        serving = self.serving
        if serving is None or not serving.is_up:
            return []
        offsets: dict[str, int] = {}
        for id_, subscription in self.subscriptions.items():
            handled = subscription.handled
            if handled in (None, subscription.acknowledged) or handled.epoch != serving.epochs.get(id_):
                continue
            offsets[id_] = handled.offset
            subscription.acknowledged = handled
        return [SendFrame(serving.number, Ack(offsets))] if offsets else []

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
