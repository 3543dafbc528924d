"""Brokers, logs and Dynamoth clients with one remedy switched off, and the scenario that must fail then.

``mutations_of_users`` has those of the end user's client, ``mutations_of_positions`` those of stored positions.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import dynamoth.edge.log
import dynamoth_broker.logs
from dynamoth.edge.frames import Bye, Gap, PublishRequest, SubscriptionRequest
from dynamoth.edge.log import LogPage, append_command, read_command
from dynamoth.edge.publications import LoggedPublication, pack_publication, unpack_publication
from dynamoth_broker import delivery
from dynamoth_broker.control import Control
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import Broadcast, PublishMessage, SubscribeChannel, Transmit, UnsubscribeChannel
from dynamoth_broker.interests import Phase, SharedInterest
from dynamoth_broker.logs import Logs
from dynamoth_broker.machine import BrokerMachine
from dynamoth_broker.moves import DRAIN_INTERVAL_S, Moves
from dynamoth_broker.sessions import Session, Stage, Subscription
from dynamoth_broker.subscribing import Subscribing
from dynamoth_broker.tips import TipChecks
from dynamoth_broker.users import Users
from dynamoth_client.machines.subscriber.barriers import Barriers
from dynamoth_client.machines.subscriber.events import BarrierPassed
from dynamoth_sim.edge.mutations_of_positions import CHECKS_OF_POSITIONS, unanswered_positions_are_forgotten
from dynamoth_sim.edge.mutations_of_presence import CHECKS_OF_PRESENCE
from dynamoth_sim.edge.mutations_of_users import CHECKS_OF_USERS
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced, returning

# Mutations replace private methods.
# pyright: reportPrivateUsage=false


def _without_gaps(reason: str, *names: str) -> AbstractContextManager[None]:
    """Change methods of ``Delivery`` so that they report no gap for a reason."""

    def changed(name: str) -> Callable[..., list[Any]]:
        method = getattr(Delivery, name)

        def report_nothing(self: Delivery, *arguments: Any) -> list[Any]:
            return [action for action in method(self, *arguments) if not _is_gap(action, reason)]

        return report_nothing

    return replaced(Delivery, **{name: changed(name) for name in names})


def _is_gap(action: Any, reason: str) -> bool:
    is_frame = isinstance(action, (Transmit, Broadcast))
    return is_frame and isinstance(action.frame, Gap) and action.frame.reason == reason


# An interest begins, and ends.


def tips_are_read_early() -> AbstractContextManager[None]:
    """A broker reads the tip of a log before it has confirmed the channel."""
    begin, on_confirmed = Delivery.begin, Delivery.on_confirmed
    early: dict[str, LogPage] = {}

    def keep(interest: SharedInterest, page: LogPage | None, _: float) -> Sequence[Any]:
        if page is not None:
            early[interest.id] = page
        return []

    def begin_early(self: Delivery, subscription: Subscription, now: float) -> list[Any]:
        interest = subscription.interest
        if interest.phase is Phase.JOINING and interest.is_logged:
            return self._logs.read(interest.id, 0, 0, partial(keep, interest), now)
        return begin(self, subscription, now)

    def confirm(self: Delivery, interest: SharedInterest, now: float) -> list[Any]:
        if interest.id not in early:
            return on_confirmed(self, interest, now)
        interest.phase = Phase.CONFIRMED
        return [*self._opened(interest, early.pop(interest.id), now)]

    return replaced(Delivery, begin=begin_early, on_confirmed=confirm)


def nothing_is_kept_while_opening() -> AbstractContextManager[None]:
    """A broker drops what comes before it knows the tip."""
    on_publication = Delivery.on_publication

    def drop(self: Delivery, interest: SharedInterest, payload: bytes, now: float) -> list[Any]:
        return on_publication(self, interest, payload, now) if interest.phase is Phase.OPEN else []

    return replaced(Delivery, on_publication=drop)


def one_user_waits() -> AbstractContextManager[None]:
    """Only the first user who has asked for an interest learns that it is open."""
    begin = Delivery.begin

    def begin_once(self: Delivery, subscription: Subscription, now: float) -> list[Any]:
        interest = subscription.interest
        is_first = interest.phase is not Phase.OPEN or not interest.live
        return begin(self, subscription, now) if is_first else []

    return replaced(Delivery, begin=begin_once)


def interests_are_left_regardless() -> AbstractContextManager[None]:
    """A broker leaves a channel after its time, though somebody has subscribed again."""

    def leave(_: Subscribing, shared: SharedInterest, now: float) -> list[Any]:
        shared.phase = Phase.LEAVING
        return [UnsubscribeChannel(shared.channel)]

    return replaced(Subscribing, _leave_interest=leave)


def interests_are_never_left() -> AbstractContextManager[None]:
    """A broker keeps every channel that somebody has ever subscribed to."""
    return replaced(Subscribing, _leave_interest=no_actions)


def left_interests_are_used_again() -> AbstractContextManager[None]:
    """A broker goes on with what it has of an interest that it is leaving when somebody subscribes."""
    subscribe = Subscribing.subscribe

    def use_again(
        self: Subscribing, session: Session, request: SubscriptionRequest, *arguments: Any, **options: Any
    ) -> list[Any]:
        shared = self.interests.by_id.get(request.interest.id)
        if shared is None or shared.phase is not Phase.LEAVING:
            return subscribe(self, session, request, *arguments, **options)
        shared.phase = Phase.JOINING
        return [SubscribeChannel(shared.channel), *subscribe(self, session, request, *arguments, **options)]

    return replaced(Subscribing, subscribe=use_again)


def refused_interests_linger() -> AbstractContextManager[None]:
    """A broker leaves the channel of an interest that Redis has refused, after its time."""
    on_failed = Subscribing._on_failed

    def linger(self: Subscribing, shared: SharedInterest, reason: str, now: float) -> list[Any]:
        actions = on_failed(self, shared, reason, now)
        shared.phase = Phase.JOINING
        return actions

    return replaced(Subscribing, _on_failed=linger)


# Delivery.


def live_too_early() -> AbstractContextManager[None]:
    """A subscription joins the live ones before it has caught up."""
    first_page = Delivery._first_page

    def go_live(self: Delivery, subscription: Subscription, page: LogPage | None, now: float) -> list[Any]:
        actions = [*first_page(self, subscription, page, now)]
        if subscription.stage is Stage.CATCHING:
            subscription.interest.set_stage(subscription, Stage.LIVE)
        return actions

    return replaced(Delivery, _first_page=go_live)


def slow_users_stay_live() -> AbstractContextManager[None]:
    """A broker goes on sending to a user who does not read."""
    return replaced(Delivery, pause=nothing)


def bursts_have_no_bound() -> AbstractContextManager[None]:
    """A broker sends a user who is behind whatever a page has."""
    return replaced(Delivery, _has_room=returning(True))


def slow_users_join() -> AbstractContextManager[None]:
    """A broker sends all of an interest to a user who subscribes while it does not read."""
    go_live = Delivery._go_live

    def join(self: Delivery, subscription: Subscription, *arguments: Any) -> list[Any]:
        session = subscription.session
        slow_since, session.slow_since = session.slow_since, None
        actions = go_live(self, subscription, *arguments)
        session.slow_since = slow_since
        return actions

    return replaced(Delivery, _go_live=join)


def slow_users_are_forgotten() -> AbstractContextManager[None]:
    """A broker sends nothing more to a user who did not read for a while."""
    return replaced(Delivery, go_on=no_actions)


def slow_users_are_not_warned() -> AbstractContextManager[None]:
    """A broker does not say what a user who did not read has missed of a live interest."""
    return _without_gaps(delivery.SLOW, "go_on")


def holes_are_ignored() -> AbstractContextManager[None]:
    """A broker sends on what comes, though an offset is missing before it."""
    on_publication = Delivery.on_publication

    def send(self: Delivery, interest: SharedInterest, payload: bytes, now: float) -> list[Any]:
        if interest.is_logged and interest.phase is Phase.OPEN:
            publication = unpack_publication(payload)
            assert publication.payload is not None, "nothing gives notices here"
            if publication.epoch == interest.epoch and publication.offset > interest.tip:
                return [self._deliver(interest, publication.offset, publication.payload)]
        return on_publication(self, interest, payload, now)

    return replaced(Delivery, on_publication=send)


def tips_are_not_compared() -> AbstractContextManager[None]:
    """A broker never looks whether a log has more than it has got."""
    return replaced(TipChecks, _check=no_actions)


def gaps_of_channels_are_ignored() -> AbstractContextManager[None]:
    """A broker does not read the log when its Dynamoth client reports a gap."""
    return replaced(Delivery, on_gap=no_actions)


def retention_is_not_reported() -> AbstractContextManager[None]:
    """A broker does not say what a log has dropped."""
    return _without_gaps(delivery.RETENTION, "_first_page", "_skip", "_jump")


def lost_logs_are_not_reported() -> AbstractContextManager[None]:
    """A broker does not tell users who are connected that a log has begun again."""
    return _without_gaps(delivery.LOG_LOST, "_begin_epoch")


def lost_logs_are_not_reported_later() -> AbstractContextManager[None]:
    """A broker does not tell a user who comes back that a log has begun again."""
    return _without_gaps(delivery.LOG_LOST, "_first_page")


# Logs.


def epochs_outlive_servers() -> AbstractContextManager[None]:
    """A log keeps its epoch when its server has restarted with older data."""

    def append(interest_id: str, payload: bytes, _: str, *arguments: Any) -> Any:
        return append_command(interest_id, payload, "", *arguments)

    def read(interest_id: str, _: str, *arguments: Any) -> Any:
        return read_command(interest_id, "", *arguments)

    return replaced(dynamoth_broker.logs, append_command=append, read_command=read)


def _appending(**changed: int) -> AbstractContextManager[None]:
    """Change arguments of every append of a writer that is no broker."""
    signature = inspect.signature(append_command)

    def append(*arguments: Any) -> Any:
        bound = signature.bind(*arguments)
        changed_arguments: dict[str, Any] = {**bound.arguments, **changed}
        return append_command(**changed_arguments)

    return replaced(dynamoth.edge.log, append_command=append)


def refusing_servers_are_not_tried() -> AbstractContextManager[None]:
    """A broker waits until somebody sends something to a log server that refuses commands."""
    return replaced(Logs, _try=no_actions)


def terms_are_ignored() -> AbstractContextManager[None]:
    """A writer does not say which term it has."""
    return _appending(term=0)


def executions_are_not_numbered() -> AbstractContextManager[None]:
    """A writer does not say which execution it appends."""
    return _appending(execution=0)


def published_before_appended() -> AbstractContextManager[None]:
    """A broker publishes with the offset that it expects, and appends then."""
    on_frame = BrokerMachine._on_frame

    def publish_first(self: BrokerMachine, session: Session, frame: object, now: float) -> list[Any]:
        actions = on_frame(self, session, frame, now)
        shared = self.interests.by_id.get(frame.channel.id) if isinstance(frame, PublishRequest) else None
        if not isinstance(frame, PublishRequest) or shared is None or not shared.is_logged:
            return actions
        publication = LoggedPublication(shared.epoch, shared.tip + 1, frame.payload)
        return [PublishMessage(shared.channel, pack_publication(publication)), *actions]

    return replaced(BrokerMachine, _on_frame=publish_first)


# Sessions and moves.


def generations_are_ignored() -> AbstractContextManager[None]:
    """A broker takes the connection that came last for the newest one."""
    why_not_admitted = Users._why_not_admitted

    def admit(self: Users, session: Session, *arguments: Any) -> Any:
        newest = dataclasses.replace(session, generation=2**50)
        return why_not_admitted(self, newest, *arguments)

    return replaced(Users, _why_not_admitted=admit)


def logs_elsewhere_are_not_missed() -> AbstractContextManager[None]:
    """A broker says nothing to who had a log of the channel elsewhere."""
    return _without_gaps(delivery.NOT_LOGGED, "begin")


def tickets_are_ignored() -> AbstractContextManager[None]:
    """A busy broker takes nobody."""
    return replaced(Control, is_ticket=returning(False))


def everybody_is_taken() -> AbstractContextManager[None]:
    """A busy broker takes newcomers as well."""
    return replaced(Control, is_ticket=returning(True))


def pongs_are_not_awaited() -> AbstractContextManager[None]:
    """A broker keeps a connection whose user does not answer."""
    keep_alive = Users._keep_alive

    def ping(self: Users, now: float) -> Sequence[Any]:
        self._pongs.clear()
        return keep_alive(self, now)

    return replaced(Users, _keep_alive=ping)


def nobody_is_pinged() -> AbstractContextManager[None]:
    """A broker sends nothing to users where nothing is published."""
    return replaced(Users, _keep_alive=no_actions)


def bye_at_once() -> AbstractContextManager[None]:
    """A broker says ``bye`` without a barrier."""

    def leave(self: Moves, session: Session, now: float) -> list[Any]:
        session.leaving_channels = {}
        return self._bye(session)

    return replaced(Moves, leave=leave)


def barriers_skip_lost_links() -> AbstractContextManager[None]:
    """A barrier does not wait for a server to which there is no link."""
    ask = Barriers._ask

    def ask_others(self: Barriers, barrier: Any, now: float) -> Sequence[Any]:
        subscription = barrier.subscription
        if not any(self._listening.is_up(place.server) for place in subscription.targets):
            return [BarrierPassed(subscription.channel)]
        return ask(self, barrier, now)

    return replaced(Barriers, _ask=ask_others)


def barriers_pass_at_any_place() -> AbstractContextManager[None]:
    """A barrier does not wait for what was published where the channel is now, and comes by way of the agents."""
    return replaced(Barriers, _end_round=Barriers._pass)


def bye_before_gaps() -> AbstractContextManager[None]:
    """A broker says ``bye`` to a slow user before it says what it has dropped."""

    def bye(self: Moves, session: Session) -> list[Any]:
        return [Transmit(session.connection, Bye({}))]

    return replaced(Moves, _bye=bye)


def users_are_asked_once() -> AbstractContextManager[None]:
    """A broker that is drained does not ask again a user who has not moved."""
    drain_on = Moves._drain_on

    def drain_once(self: Moves, drain: int, now: float) -> Sequence[Any]:
        if self._to_move:
            return drain_on(self, drain, now)
        self._timers.add(now + DRAIN_INTERVAL_S, self._drain_on, drain)
        return []

    return replaced(Moves, _drain_on=drain_once)


EDGE_CHECKS: tuple[Check, ...] = (
    Check("edge-tip-after-confirmation", tips_are_read_early, "expected"),
    Check("edge-published-while-opening", nothing_is_kept_while_opening, "expected"),
    Check("edge-shared", one_user_waits, "expected"),
    Check("edge-lingers", interests_are_left_regardless, "expected"),
    Check("edge-left-after-a-while", interests_are_never_left, "expected"),
    Check("edge-joined-again", left_interests_are_used_again, "expected"),
    Check("edge-refused-by-redis", refused_interests_linger, "expected"),
    Check("edge-subscribes-without-reading", slow_users_join, "expected"),
    Check("edge-catches-up", live_too_early, "expected"),
    Check("edge-reader-stops", slow_users_stay_live, "expected"),
    Check("edge-reader-stops", slow_users_are_forgotten, "expected"),
    Check("edge-reader-stops", slow_users_are_not_warned, "G5"),
    Check("edge-reader-stops-again", bursts_have_no_bound, "expected"),
    Check("edge-hole-on-the-channel", holes_are_ignored, "expected"),
    Check("edge-publisher-dies", tips_are_not_compared, "expected"),
    Check("edge-gap-of-the-channel", gaps_of_channels_are_ignored, "expected"),
    Check("edge-dropped-by-the-log", retention_is_not_reported, "expected"),
    Check("edge-log-flushed", lost_logs_are_not_reported, "G5"),
    Check("edge-log-flushed", lost_logs_are_not_reported_later, "G5"),
    Check("edge-log-refuses", refusing_servers_are_not_tried, "expected"),
    Check("edge-log-refuses", unanswered_positions_are_forgotten, "expected"),
    Check("edge-log-restored", epochs_outlive_servers, "G5"),
    Check("edge-zombie-writer", terms_are_ignored, "expected"),
    Check("edge-zombie-writer", executions_are_not_numbered, "expected"),
    Check("edge-broker-dies-publishing", published_before_appended, "G1"),
    Check("edge-late-connect", generations_are_ignored, "B1"),
    Check("edge-broker-without-the-log", logs_elsewhere_are_not_missed, "expected"),
    Check("edge-busy-broker", tickets_are_ignored, "expected"),
    Check("edge-busy-broker", everybody_is_taken, "expected"),
    Check("edge-silent-connection", pongs_are_not_awaited, "expected"),
    Check("edge-silent-connection", nobody_is_pinged, "expected"),
    Check("edge-old-broker-is-late", bye_at_once, "expected"),
    Check("edge-old-broker-has-no-link", barriers_skip_lost_links, "G5"),
    Check("edge-channel-moves-first", barriers_pass_at_any_place, "expected"),
    Check("edge-slow-user-moves", bye_before_gaps, "G5"),
    Check("edge-drained", users_are_asked_once, "expected"),
    *CHECKS_OF_PRESENCE,
    *CHECKS_OF_USERS,
    *CHECKS_OF_POSITIONS,
)
"""Every mutation of the edge, with the scenario that must fail under it."""
