"""Decides everything that a broker does: sessions, shared interests, delivery, migration and drain.

Theory of operation
-------------------
A user's connection is opened by ``Opened``, with its subscriptions; ``Delivery`` brings each of them to where its
interest is. All that a user needs to go on elsewhere is at the user, so a broker hands nothing to another one.

*Parts.* ``Users`` has the connections and their tokens, ``Subscribing`` the subscriptions and the shared interests, and
``Delivery`` brings publications to them. ``Publishing`` publishes for users, ``Positions`` stores what they
acknowledge, ``Presence`` has the members, and ``Moves`` moves users and drains the broker. ``Logs`` speaks to the log
servers, ``TipChecks`` compares the ends of logs, and ``Control`` speaks to coordinators and operators. With a data
cluster, ``Records`` stores records for users, ``Queries`` registers the interests of standing queries, and both look
definitions up in ``Definitions``. The machine hands each event to the part that it concerns, and returns the actions.

*One event.* ``handle`` works in this order:

1. Handle the event.
2. Account for the subscriptions that were answered meanwhile: the members among them enter, users who have all answers
   get ``moved_in``.
3. Close the connections of users who have lost a confirmed subscription: they connect again.
4. Send the changes of presence, the registrations and the records that have gathered, so that one command has all
   those of an event.
5. Say that the broker has stopped, once it is to stop and all positions are stored.

*Slow users.* Nobody waits for a connection. One that is full falls behind, by itself: see ``Delivery``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never, cast

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.edge.frames import (
    Ack,
    AskMembers,
    Connect,
    Error,
    Leave,
    Pong,
    PublishRequest,
    Refresh,
    Subscribe,
    Unsubscribe,
    Unsubscribed,
)
from dynamoth.edge.interests import Interest
from dynamoth.machine.events import LinkDown, LinkUp, Pushed, Replied, RepliedAll, Start, Tick
from dynamoth.machine.timers import Timers
from dynamoth_broker.control import Control
from dynamoth_broker.definitions import Definitions
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import (
    GOING_AWAY,
    BarrierPassed,
    BrokerAction,
    BrokerEvent,
    BrokerOptions,
    ChannelConfirmed,
    ChannelEnded,
    ChannelFailed,
    ChannelGap,
    Closed,
    Drain,
    EndDrain,
    MessagePublished,
    MoveSession,
    Opened,
    Overflowed,
    Publications,
    Received,
    RecordsAnswered,
    RecordsPosted,
    Refreshed,
    ResourcesMeasured,
    Stop,
    Stopped,
    Transmit,
    Writable,
)
from dynamoth_broker.interests import InterestTable
from dynamoth_broker.logs import LINK_PREFIX, Logs
from dynamoth_broker.moves import Moves
from dynamoth_broker.positions import Positions
from dynamoth_broker.presence import Presence
from dynamoth_broker.publishing import NO_DATASETS, Publishing, not_allowed
from dynamoth_broker.queries import Queries
from dynamoth_broker.records import Outcome, Records
from dynamoth_broker.sessions import Session
from dynamoth_broker.subscribing import Subscribing
from dynamoth_broker.tips import TipChecks
from dynamoth_broker.users import Users


class BrokerMachine:
    """One broker."""

    def __init__(self, options: BrokerOptions, incarnation: int, unix_offset: float = 0.0) -> None:
        """Begin without users.

        Args:
            options: of the broker.
            incarnation: random, and new with each start.
            unix_offset: Unix time less the time that ``handle`` gets, in seconds.

        """
        self._options = options
        self._timers: Timers[BrokerAction] = Timers()
        #: What happened, by kind, for metrics.
        self.counters: Counter[str] = Counter()
        shared = self._timers, self.counters
        self.logs = Logs(options.logs, options.log, incarnation, options.log_wait_s, *shared)
        self._delivery = Delivery(options, self.logs, *shared)
        self.positions = Positions(options, self.logs, self._delivery, *shared)
        self.presence = Presence(options, self.logs, *shared)
        self.interests = InterestTable()
        self.queries: Queries | None = None
        self.records: Records | None = None
        if options.has_data_cluster:
            definitions = Definitions(tuple(options.logs), self.logs, self.counters, options.believed_s)
            self.queries = Queries(options, definitions, self.logs, self._delivery, self.interests, *shared)
            self.records = Records(definitions, self.logs, tuple(options.logs), unix_offset, self.counters)
        self._subscribing = Subscribing(
            options, self._delivery, self.positions, self.presence, self.queries, self.interests, *shared
        )
        self._publishing = Publishing(self.logs, self._subscribing.is_logged, self.records)
        self.control = Control(self, options, incarnation, *shared)
        self.users = Users(options, self._subscribing, self._delivery, self.control, *shared)
        self.sessions = self.users.sessions
        self.moves = Moves(self.users, self._delivery, options, *shared, self.control)
        self._tips = TipChecks(options.tip_check_s, self.interests, self.logs, self._delivery, *shared)
        #: Whether ``Stopped`` is still to follow.
        self._is_stopping = False

    # The contract of machines.

    def handle(self, event: BrokerEvent, now: float) -> list[BrokerAction]:
        """Handle one event; return the actions to execute, in order."""
        actions = self._handle(event, now)
        actions += self._subscribing.account(now)
        if self._subscribing.lost_some:
            actions += self._close_losers(now)
        actions += self.presence.flush(now)
        if self.queries is not None and self.records is not None:
            actions += [*self.queries.flush(now), *self.records.flush(now)]
        if self._is_stopping and self.positions.is_saved:
            self._is_stopping = False
            actions.append(Stopped())
        return actions

    def deadline(self) -> float | None:
        """Return when the next timer is due."""
        return self._timers.next_at

    def _handle(self, event: BrokerEvent, now: float) -> list[BrokerAction]:
        match event:
            case Publications(messages):
                return self._on_publications(messages, now)
            case Opened(connection, connect, grant, address):
                return self.users.open(connection, connect, grant, now, address)
            case Received(connection, frame):
                session = self.users.open_session(connection)
                return [] if session is None else self._on_frame(session, frame, now)
            case Refreshed(connection, grant):
                return self.users.refresh(connection, grant, now)
            case RecordsPosted():
                return self._on_records(event, now)
            case Closed(connection, code):
                self.users.on_closed(connection, code, now)
                return []
            case Overflowed(connection):
                return self.users.on_overflowed(connection, now)
            case Writable(connection):
                return self.users.on_writable(connection, now)
            case ChannelConfirmed() | ChannelEnded() | ChannelFailed() | ChannelGap():
                return self._subscribing.on_channel(event, now)
            case BarrierPassed(channel):
                return self.moves.on_barrier(channel)
            case MessagePublished(token, reason):
                on_published = cast("Callable[[str | None], list[BrokerAction]]", token)  # that of PublishMessage
                return on_published(reason)
            case MoveSession(connection, to):
                session = self.users.open_session(connection)
                return [] if session is None else self.moves.move(session, to, now)
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
                return [*self.users.stop(now), *self.positions.flush(now)]
            case Start():
                self._tips.start(now)
                self.users.start(now)
                return [*self.logs.start(), *self.control.start(now)]
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
                actions, server = self.logs.on_up(event), event.link.removeprefix(LINK_PREFIX)
                if self.logs.is_up(server):
                    self.presence.on_server_up(server, now)
                    if self.queries is not None:
                        actions += self.queries.on_log_up(server, now)
                return actions
            case LinkDown():
                return self.logs.on_down(event, now)
            case Replied():
                return self.logs.on_reply(event, now)
            case Pushed() | RepliedAll():
                return []  # nothing is subscribed to on links of logs

    def _close_losers(self, now: float) -> list[BrokerAction]:
        """Close the connections of users who have lost a subscription."""
        sessions, self._subscribing.lost_some = self._subscribing.lost_some, []
        reason = "a subscription was lost"
        return [self.users.close(session, GOING_AWAY, reason, now) for session in sessions if not session.is_closed]

    # For the part that speaks with coordinators, and for the runtime.

    @property
    def is_draining(self) -> bool:
        """Whether users are moved away, and none are taken."""
        return self.users.is_draining

    @property
    def is_admitting(self) -> bool:
        """Whether users who connect are taken."""
        return self.users.is_admitting

    def session_of(self, user: str, name: str) -> Session | None:
        """Return the newest connection of a session; None where there is none."""
        return self.users.session_of(user, name)

    def is_logged(self, interest: Interest) -> bool:
        """Return whether an interest has a log."""
        return self._subscribing.is_logged(interest)

    # What comes.

    def _on_frame(self, session: Session, frame: object, now: float) -> list[BrokerAction]:
        session.heard_at = now
        match frame:
            case Ack(positions):
                self.positions.acknowledge(session, positions, now)
                return []
            case Pong():
                return []
            case Subscribe(request):
                return self._subscribing.subscribe(session, request, now)
            case Unsubscribe(s):
                self._subscribing.unsubscribe(session, s)
                return [Transmit(session.connection, Unsubscribed(s))]
            case PublishRequest():
                return self._publishing.publish(session, frame, now)
            case AskMembers(ref, interest):
                error = self._subscribing.refusal(session, interest, ref)
                if error is None and interest.id not in session.subscriptions:
                    error = Error("forbidden", "subscribe to the presence before you ask for its members", ref=ref)
                return [Transmit(session.connection, error)] if error else self.presence.ask(session, frame, now)
            case Leave():
                self.presence.on_left(session, now)
                return self.moves.leave(session, now)
            case Connect() | Refresh():
                raise AssertionError("the runtime makes Opened and Refreshed of these")
            case _:
                raise AssertionError(f"not a frame of a user: {frame!r}")

    def _on_publications(self, messages: Sequence[tuple[bytes, bytes]], now: float) -> list[BrokerAction]:
        by_channel, delivery = self.interests.by_channel, self._delivery
        self.counters["publications"] += len(messages)
        actions: list[BrokerAction] = []
        for channel, payload in messages:
            shared = by_channel.get(channel)
            if shared is not None:
                shared.arrived_bytes += len(payload)
                actions += delivery.on_publication(shared, payload, now)
            else:
                actions += self._subscribing.unlogged.on_publication(channel, now)
        return actions

    def _on_records(self, event: RecordsPosted, now: float) -> list[BrokerAction]:
        """Store records that were posted; answer once all are stored or refused."""
        outcomes: list[tuple[str, str]] = [("", "")] * len(event.records)
        left = len(event.records)

        def note(index: int, outcome: Outcome, now: float) -> Sequence[BrokerAction]:
            nonlocal left
            outcomes[index], left = (outcome.code, outcome.reason), left - 1
            return [] if left else [RecordsAnswered(event.request, outcomes)]

        channel = DATASET_PREFIX + event.dataset
        if self.records is None or not event.grant.may_publish(channel):
            refusal = ("unknown_dataset", NO_DATASETS) if self.records is None else ("forbidden", not_allowed(channel))
            return [RecordsAnswered(event.request, [refusal] * len(event.records))]
        actions: list[BrokerAction] = []
        for index, record in enumerate(event.records):
            actions += self.records.store(event.dataset, record, event.grant.user, partial(note, index), now)
        return actions

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self.interests.check()
        self._delivery.recents.check()
        self.users.check()
        self.positions.check()
