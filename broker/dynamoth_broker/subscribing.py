"""Joins and leaves the interests of a broker: users who subscribe, unsubscribe, or lose a subscription."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynamoth.data.datasets import DATASET_PREFIX
from dynamoth.edge.frames import Error, MovedIn, SubscriptionRequest
from dynamoth.edge.interests import Interest, is_bound
from dynamoth.globs import compile_glob
from dynamoth.machine.timers import Timers
from dynamoth.protocol.wire import shortened
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import (
    RETRY_MS,
    BrokerAction,
    BrokerOptions,
    ChannelConfirmed,
    ChannelEnded,
    ChannelFailed,
    ChannelGap,
    Grant,
    SubscribeChannel,
    Transmit,
    UnsubscribeChannel,
)
from dynamoth_broker.interests import InterestTable, Phase, SharedInterest
from dynamoth_broker.positions import Positions
from dynamoth_broker.presence import Presence
from dynamoth_broker.queries import Queries
from dynamoth_broker.sessions import Session, Stage, Subscription
from dynamoth_broker.unlogged import Unlogged

NO_PRESENCE = "the channel has no presence: see broker.presence"


def may_subscribe(grant: Grant, interest: Interest) -> bool:
    """Return whether a user may subscribe to an interest, with its parameters."""
    bound = grant.bound.get(interest.name, {}) if interest.kind == "query" else {}
    return grant.may_subscribe(interest.kind, interest.name) and is_bound(interest, bound)


def _not_allowed(grant: Grant, interest: Interest) -> str:
    """Return why a user may not subscribe to an interest, for which ``may_subscribe`` is false."""
    claim = "queries" if interest.kind == "query" else "channels"
    if not grant.may_subscribe(interest.kind, interest.name):
        return f"the {interest.kind} {shortened(interest.name)} needs a token whose claim {claim!r} allows it"
    bound = grant.bound[interest.name]
    name = next(each for each in bound if not is_bound(interest, {each: bound[each]}))
    if name not in interest.values:
        return f"the token's claim 'params' gives parameter {shortened(name)}, which this subscription does not have"
    return f"the token's claim 'params' gives parameter {shortened(name)} of this query another value"


def reserved(interest: Interest) -> str:
    """Return why nobody may subscribe to or publish on a name that is reserved."""
    name = shortened(interest.name)
    if interest.kind == "channel" and interest.name.startswith(DATASET_PREFIX):
        return f"{name} is where records of a dataset are published: subscribe to a query over the dataset"
    return f"the name {name} is reserved: use another one"


class Subscribing:
    """The interests of one broker, and who has subscribed to them."""

    def __init__(
        self,
        options: BrokerOptions,
        delivery: Delivery,
        positions: Positions,
        presence: Presence,
        queries: Queries | None,
        interests: InterestTable,
        timers: Timers[BrokerAction],
        counters: Counter[str],
    ) -> None:
        """Begin without interests; all arguments are shared with the owner. Without ``queries`` any query is one."""
        self._options = options
        self._delivery = delivery
        self._positions = positions
        self.presence = presence
        self._queries = queries
        self._timers = timers
        self._counters = counters
        #: Sessions that have lost a confirmed subscription since the owner looked last: it closes them.
        self.lost_some: list[Session] = []
        self.interests = interests
        self.unlogged = Unlogged(counters)
        self._history = [compile_glob(pattern.encode()) for pattern in options.history]
        self._conflated = [compile_glob(pattern.encode()) for pattern in options.conflate]

    def is_logged(self, interest: Interest) -> bool:
        """Return whether an interest has a log."""
        if interest.kind != "channel":
            return True
        return any(pattern.fullmatch(interest.name.encode()) for pattern in self._history)

    def _is_conflated(self, interest: Interest) -> bool:
        """Return whether the latest publication is all that a slow user needs."""
        return any(pattern.fullmatch(interest.name.encode()) for pattern in self._conflated)

    # Users.

    def connect(self, session: Session, subs: Sequence[SubscriptionRequest], now: float) -> list[BrokerAction]:
        """Subscribe to all of these; ``moved_in`` follows the last answer."""
        session.unanswered = len(subs)
        actions: list[BrokerAction] = []
        for request in subs:
            actions += self.subscribe(session, request, now, is_of_connect=True)
        return actions if subs else [Transmit(session.connection, MovedIn())]

    def subscribe(
        self, session: Session, request: SubscriptionRequest, now: float, *, is_of_connect: bool = False
    ) -> list[BrokerAction]:
        """Subscribe a user, or refuse it. A second subscription to an interest replaces the first."""
        interest = request.interest
        if error := self._why_not(session, request):
            refusal: list[BrokerAction] = [Transmit(session.connection, error)]
            return [*refusal, *self._count_answer(session)] if is_of_connect else refusal
        before = session.subscriptions.get(interest.id)
        actions: list[BrokerAction] = []
        if before is not None:
            self.end(before, now)
            if is_of_connect and before.is_of_connect and before.stage is Stage.WAITING:  # it is there twice
                actions += self._count_answer(session)
            is_of_connect = is_of_connect or before.is_of_connect
        shared = self.interests.by_id.get(interest.id)
        # Nothing is awaited between look-up and entry: two users never join twice. One that is being left is not used
        # again: an answer of its log may still come.
        if shared is None or shared.phase is Phase.LEAVING:
            shared = SharedInterest(
                interest, is_logged=self.is_logged(interest), is_conflated=self._is_conflated(interest), joined_at=now
            )
            self.interests.add(shared)
            actions += [SubscribeChannel(shared.channel), *self.unlogged.watch(shared)]
        shared.idle_since = None
        subscription = Subscription(
            session, shared, request.ref, request.since, is_of_connect, is_present=request.is_present
        )
        session.subscriptions[interest.id] = subscription
        shared.set_stage(subscription, Stage.WAITING)
        if request.is_stored:
            actions += self._positions.begin(subscription, now)
        if interest.kind == "query" and self._queries is not None:
            return [*actions, *self._queries.begin(subscription, now)]
        return [*actions, *self._delivery.begin(subscription, now)]

    def _why_not(self, session: Session, request: SubscriptionRequest) -> Error | None:
        interest, ref = request.interest, request.ref
        if error := self.refusal(session, interest, ref):
            return error
        if request.is_present and not (interest.kind == "channel" and self.presence.is_listed(interest.name)):
            return Error("forbidden", NO_PRESENCE, ref=ref)
        is_new = interest.id not in session.subscriptions
        if is_new and len(session.subscriptions) >= self._options.subscriptions_per_session_max:
            most = self._options.subscriptions_per_session_max
            return Error("too_many", f"one connection has {most} subscriptions at most", ref=ref)
        return self._why_not_stored(session, request) if request.is_stored else None

    def refusal(self, session: Session, interest: Interest, ref: int) -> Error | None:
        """Return why a user may not have anything of an interest; None where it may."""
        if not may_subscribe(session.grant, interest):
            return Error("forbidden", _not_allowed(session.grant, interest), ref=ref)
        if interest.is_reserved:
            return Error("forbidden", reserved(interest), ref=ref)
        if interest.kind == "presence" and not self.presence.is_listed(interest.name):
            return Error("forbidden", NO_PRESENCE, ref=ref)
        if self.is_logged(interest) and not self._options.logs:
            return Error("log_unavailable", "this broker has no log servers: see broker.logs", ref=ref)
        return None

    def _why_not_stored(self, session: Session, request: SubscriptionRequest) -> Error | None:
        if not self.is_logged(request.interest):
            return Error("not_logged", "a channel without a log has no positions: see broker.history", ref=request.ref)
        if not session.grant.user:
            reason = "positions are stored for users with a token, as a session without one can be anybody's"
            return Error("forbidden", reason, ref=request.ref)
        return None

    def unsubscribe(self, session: Session, s: str) -> None:
        """End a user's subscription, if there is one, once the present event was handled."""
        subscription = session.subscriptions.get(s)
        if subscription is not None:
            subscription.has_unsubscribed = True
            self._delivery.to_end.append(subscription)

    def end(self, subscription: Subscription, now: float) -> None:
        """End a subscription; its interest lingers if nobody else has it."""
        subscription.is_ended = True
        shared = subscription.interest
        shared.remove(subscription)
        self._positions.end(subscription, now)
        subscriptions = subscription.session.subscriptions
        if subscriptions.get(shared.id) is subscription:
            del subscriptions[shared.id]
        if not shared.users and shared.idle_since is None:
            shared.idle_since = now
            self._timers.add(now + self._options.linger_s, self._leave_interest, shared)

    def _leave_interest(self, shared: SharedInterest, now: float) -> Sequence[BrokerAction]:
        idle_since = shared.idle_since
        if idle_since is None or now < idle_since + self._options.linger_s or shared.phase is Phase.LEAVING:
            return []
        shared.phase = Phase.LEAVING
        shared.pending.clear()
        self._delivery.recents.forget(shared)
        return [UnsubscribeChannel(shared.channel), *self.unlogged.end(shared)]

    # Answers.

    def account(self, now: float) -> list[BrokerAction]:
        """End the subscriptions that are to end; send ``moved_in`` to users who have got their last answer."""
        actions: list[BrokerAction] = []
        delivery = self._delivery
        while delivery.to_end or delivery.answered:
            to_end, delivery.to_end = delivery.to_end, []
            answered, delivery.answered = delivery.answered, []
            for subscription in to_end:
                self.end(subscription, now)
                self.presence.on_ended(subscription, now)
            for subscription in answered:
                self.presence.on_confirmed(subscription, now)
            for subscription in (*answered, *to_end):
                if subscription.is_of_connect:
                    subscription.is_of_connect = False
                    actions += self._count_answer(subscription.session)
        return actions

    @staticmethod
    def _count_answer(session: Session) -> list[BrokerAction]:
        """Count one more answer to a subscription of ``connect``."""
        session.unanswered -= 1
        return [] if session.unanswered or session.is_closed else [Transmit(session.connection, MovedIn())]

    # The Dynamoth client.

    def on_channel(
        self, event: ChannelConfirmed | ChannelEnded | ChannelFailed | ChannelGap, now: float
    ) -> list[BrokerAction]:
        """Handle what happened to the subscription to a channel."""
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
                return self._on_failed(shared, reason, now)
            case ChannelGap(_, count, reason):
                return self._delivery.on_gap(shared, count, reason, now)

    def _on_failed(self, shared: SharedInterest, reason: str, now: float) -> list[BrokerAction]:
        """Refuse everybody: Redis does not let this broker subscribe."""
        shared.phase = Phase.LEAVING  # whatever still waits for it ends here
        actions: list[BrokerAction] = []
        for subscription in (*shared.live.values(), *shared.not_live.values()):
            error = Error(
                "unavailable", f"the broker cannot subscribe to it: {reason}", "later", RETRY_MS, subscription.ref
            )
            session = subscription.session
            was_confirmed = subscription.stage is not Stage.WAITING
            actions.append(Transmit(session.connection, error))
            self._delivery.to_end.append(subscription)
            self.end(subscription, now)
            if was_confirmed:  # the user takes it for good: who connects again learns that it is refused
                self.lost_some.append(session)
        actions += self.unlogged.end(shared)
        self.interests.remove(shared)
        self._delivery.recents.forget(shared)
        self._counters["subscriptions_refused_by_redis"] += 1
        return actions
