"""Mutations: each switches off one remedy in the production code, so that the scenario for it must fail.

A scenario that passes without its remedy checks nothing. A mutation replaces methods, functions or constants while it
is entered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import dynamoth.plan.plan
import dynamoth_balancer.decide.relieve
import dynamoth_balancer.install.book
import dynamoth_balancer.install.recovery
import dynamoth_balancer.install.takeover
import dynamoth_client.machines.patterns.subscription
import dynamoth_client.machines.subscriber.messages
import dynamoth_dispatcher.forwarding_table
import dynamoth_lla.traffic
from dynamoth.machine.outbox import Outbox
from dynamoth.names import is_user_channel, replica_pattern
from dynamoth.plan.plan import Assignment, Entry, Location, Mode, Phase, Plan, Route, missing
from dynamoth.plan.ring import Ring
from dynamoth.protocol.envelope import CONTROL, HEARTBEAT, open_envelope
from dynamoth_balancer.decide.cluster import ChannelFigures
from dynamoth_balancer.decide.drain import Drain
from dynamoth_balancer.decide.model import ClusterModel
from dynamoth_balancer.decide.worth import Worth
from dynamoth_balancer.install.installer import Installer
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.patterns.events import PatternGapDetected, PatternMessage
from dynamoth_client.machines.patterns.machine import PatternMachine
from dynamoth_client.machines.patterns.messages import PatternMessages
from dynamoth_client.machines.patterns.subscription import MatchedChannel
from dynamoth_client.machines.publisher.answers import Answers
from dynamoth_client.machines.publisher.machine import PublisherMachine
from dynamoth_client.machines.publisher.routes import PublisherRoutes
from dynamoth_client.machines.publisher.waiting import Waiting
from dynamoth_client.machines.sequences import Stream
from dynamoth_client.machines.subscriber.routing import Routing
from dynamoth_client.machines.subscriber.subscription import Place, Subscription
from dynamoth_client.runtime.backpressure import Blocking
from dynamoth_client.runtime.queue import Dropped, Message
from dynamoth_dispatcher.client_notices import ClientNotices
from dynamoth_dispatcher.forwarding_table import Forwarding, ForwardingTable
from dynamoth_dispatcher.machine import DispatcherMachine
from dynamoth_dispatcher.transitions import Transitions
from dynamoth_sim.mutations import delivery
from dynamoth_sim.mutations.mutation import Check, no_actions, nothing, replaced, returning, uncorrected
from dynamoth_sim.scenarios.replication import pairs

_Alike = tuple[int, int, int]

_NOWHERE = Forwarding((), (), (), 0, stale=False)
"""A decision of the dispatcher to forward nothing and to notify nobody."""


@contextmanager
def moved_in_transition() -> Generator[None]:
    """A channel is moved although it is in transition, and the route before the last is forgotten."""

    def begin(plan: Plan, assignments: Mapping[bytes, Assignment]) -> Plan:
        epoch = plan.version + 1
        changed = {
            channel: Entry(Route(epoch, assignment), Phase.PREPARED, (plan.entry(channel).route,))
            for channel, assignment in assignments.items()
        }
        return plan.with_entries(changed)

    with replaced(Plan, begin=begin), replaced(Installer, _check=nothing):
        yield


def forwarded_without_end() -> AbstractContextManager[None]:
    """Dispatchers do not see that a message is a forwarded copy."""
    return replaced(dynamoth_dispatcher.forwarding_table, FORWARDED=0)


def never_forwarded_twice() -> AbstractContextManager[None]:
    """Dispatchers forward no forwarded copy, whatever its epoch."""
    decide = ForwardingTable._decide  # pyright: ignore[reportPrivateUsage]

    def once(self: ForwardingTable, here: Location, channel: bytes, entry: Entry, alike: _Alike) -> Forwarding:
        _, _, is_copy = alike
        return _NOWHERE if is_copy else decide(self, here, channel, entry, alike)

    return replaced(ForwardingTable, _decide=once)


def no_trickle() -> AbstractContextManager[None]:
    """Subscribers at an old location get a marker only together with a message."""
    due = Transitions.due

    def no_notices(self: Transitions, now: float) -> Any:
        _, polls = due(self, now)
        return [], polls

    return replaced(Transitions, due=no_notices)


def break_before_make() -> AbstractContextManager[None]:
    """Subscribers leave the old location as soon as they know a new one."""
    follow = Routing._follow  # pyright: ignore[reportPrivateUsage]

    def follow_and_leave(self: Routing, subscription: Any, route: Route, now: float) -> list[Any]:
        actions = follow(self, subscription, route, now)
        for place in list(subscription.leaving.values()):
            actions += self._listening.leave(subscription, place, now)  # pyright: ignore[reportPrivateUsage]
        return actions

    return replaced(Routing, _follow=follow_and_leave)


def no_markers() -> AbstractContextManager[None]:
    """Subscribers leave the old location as soon as they listen at the new one."""

    def leave(self: Routing, subscription: Any, now: float) -> list[Any]:
        if not all(place.verified for place in subscription.targets.values()):
            return []
        places = list(subscription.leaving.values())
        return [action for place in places for action in self._listening.leave(subscription, place, now)]  # pyright: ignore[reportPrivateUsage]

    return replaced(Routing, _leave_marked=leave)


def no_verification() -> AbstractContextManager[None]:
    """Subscribers take a place for right, whatever the plan stored there says."""

    def verify(self: Routing, subscription: Any, place: Any, reply: Any, now: float) -> list[Any]:
        return [*self._verified(subscription, place, subscription.route, Phase.ACTIVE, now)]  # pyright: ignore[reportPrivateUsage]

    return replaced(Routing, on_verification=verify)


def no_acknowledgements() -> AbstractContextManager[None]:
    """The balancer activates without waiting for the acknowledgements of dispatchers."""
    waiting_for = Installer.waiting_for

    def impatient(self: Installer, transition: Any, now: float) -> Iterator[str]:
        return (reason for reason in waiting_for(self, transition, now) if "acknowledge" not in reason)

    return replaced(Installer, waiting_for=impatient)


def no_recovery() -> AbstractContextManager[None]:
    """A new balancer begins with an empty plan, as if nothing were stored."""
    recover = dynamoth_balancer.install.recovery.recover

    def forget(*arguments: Any, **options: Any) -> Any:
        plan, *more = recover(*arguments, **options)
        return (replace(plan, entries={}), *more)

    return replaced(dynamoth_balancer.install.takeover, recover=forget)


@contextmanager
def any_epoch() -> Generator[None]:
    """Clients believe every notice, old or new."""

    def learn(self: LocalPlan, channel: bytes, route: Route, now: float) -> bool:
        self._routes[channel] = route  # pyright: ignore[reportPrivateUsage]
        self._used_at[channel] = now  # pyright: ignore[reportPrivateUsage]
        return True

    def learned(self: Routing, subscription: Any, link: str, route: Route, now: float) -> list[Any]:
        self._plan.learn(subscription.channel, route, now)  # pyright: ignore[reportPrivateUsage]
        return self._follow(subscription, route, now)  # pyright: ignore[reportPrivateUsage]

    def notice(self: PublisherRoutes, link: str, channel: bytes, route: Route, now: float) -> list[Any]:
        self._plan.learn(channel, route, now)  # pyright: ignore[reportPrivateUsage]
        return []

    with (
        replaced(LocalPlan, learn=learn),
        replaced(Routing, _learn=learned),
        replaced(PublisherRoutes, on_route_notice=notice),
    ):
        yield


def ring_over_all_servers() -> AbstractContextManager[None]:
    """Clients compute the ring over all servers that the plan lists."""

    def ring(plan: LocalPlan) -> Ring:
        header = plan._header  # pyright: ignore[reportPrivateUsage]
        return Ring(header.servers, header.virtual_nodes)

    def home(self: LocalPlan, channel: bytes) -> Route:
        return Route(0, Assignment(self._header.home_route(channel).assignment.mode, (ring(self).home(channel),)))  # pyright: ignore[reportPrivateUsage]

    def route(self: LocalPlan, channel: bytes) -> Route:
        return self._routes.get(channel) or home(self, channel)  # pyright: ignore[reportPrivateUsage]

    return replaced(LocalPlan, home=home, route=route)


def settled_is_over() -> AbstractContextManager[None]:
    """A dispatcher does not look any more at a channel that has settled elsewhere."""
    observed = DispatcherMachine._observed  # pyright: ignore[reportPrivateUsage]

    def transitions_only(self: DispatcherMachine, physical: bytes, data: bytes, now: float) -> list[Any]:
        settled = self.plan is not None and self.plan.entry(physical).phase is Phase.SETTLED
        return [] if settled and is_user_channel(physical) else [*observed(self, physical, data, now)]

    return replaced(DispatcherMachine, _observed=transitions_only)


def forwards_are_not_repeated() -> AbstractContextManager[None]:
    """Messages sent over a link are forgotten when the link is lost."""
    link_down = Outbox.link_down

    def forget(self: Outbox) -> None:
        link_down(self)
        if self.link.startswith("to:"):
            self._items.clear()  # pyright: ignore[reportPrivateUsage]

    return replaced(Outbox, link_down=forget)


@contextmanager
def no_duplicate_check() -> Generator[None]:
    """Subscribers deliver a number that was delivered before."""
    arrive = Stream.arrive

    def deliver_again(
        self: Stream, publisher: int, sequence: int, flags: int, payload: bytes, now: float, *rest: Any
    ) -> list[Any]:
        if self.next is not None and sequence < self.next:
            return [payload]
        return arrive(self, publisher, sequence, flags, payload, now, *rest)

    unusual = replaced(
        dynamoth_client.machines.subscriber.messages, _NUMBERED=frozenset[int]()
    )  # every message goes to the stream
    with unusual, replaced(Stream, arrive=deliver_again):
        yield


def no_hold() -> AbstractContextManager[None]:
    """Subscribers deliver a message at once, although an earlier one is missing."""

    def deliver(self: Stream, publisher: int, sequence: int, flags: int, payload: bytes, *rest: Any) -> list[Any]:
        if self.next is not None and sequence < self.next:
            return []
        self.next = sequence + 1
        return [payload]

    return replaced(Stream, arrive=deliver)


def trusting_newcomer() -> AbstractContextManager[None]:
    """A subscriber begins with the first message of an unknown publisher at a place that it has just joined."""
    return replaced(dynamoth_client.machines.subscriber.messages, ROUTE_CHANGED=0)


def copies_count() -> AbstractContextManager[None]:
    """Load analyzers count forwarded copies as publications."""
    published = dynamoth_lla.traffic._PUBLISHED_PREFIXES | dynamoth_lla.traffic._COPY_PREFIXES  # pyright: ignore[reportPrivateUsage]
    return replaced(dynamoth_lla.traffic, _PUBLISHED_PREFIXES=published, _COPY_PREFIXES=frozenset())


def noticed_each_time() -> AbstractContextManager[None]:
    """Dispatchers forget which publishers have got a notice."""
    redirect = ClientNotices.redirect_publisher

    def redirect_again(self: ClientNotices, *arguments: Any) -> list[Any]:
        self._sent.clear()  # pyright: ignore[reportPrivateUsage]
        return [*redirect(self, *arguments)]

    return replaced(ClientNotices, redirect_publisher=redirect_again)


def any_move() -> AbstractContextManager[None]:
    """The balancer takes every move for an improvement."""
    return replaced(dynamoth_balancer.decide.relieve, judge=returning(Worth.WORTH_IT))


def everybody_forwards() -> AbstractContextManager[None]:
    """A dispatcher that is neither at an old nor at a new server forwards to both itself."""
    decide = ForwardingTable._decide  # pyright: ignore[reportPrivateUsage]

    def itself(self: ForwardingTable, here: Location, channel: bytes, entry: Entry, alike: _Alike) -> Forwarding:
        way = decide(self, here, channel, entry, alike)
        publisher, epoch, is_copy = alike
        if is_copy and epoch >= entry.route.epoch:
            return way
        targets = tuple(missing(channel, entry.live_routes, {here}, publisher))
        return Forwarding(targets, (), (), entry.route.epoch, way.stale)

    return replaced(ForwardingTable, _decide=itself)


def one_name_for_all_epochs() -> AbstractContextManager[None]:
    """A replicated channel has the name of the channel at every server, whatever the epoch."""

    def plain(channel: bytes, epoch: int) -> bytes:
        return channel

    return replaced(dynamoth.plan.plan, replica_channel=plain)


def any_replica_will_do() -> AbstractContextManager[None]:
    """A message is forwarded to one server of each route, in whatever mode."""

    def one_each(channel: bytes, routes: Iterable[Route], reached: Set[Location], publisher: int) -> list[Location]:
        return [place for route in routes for place in missing(channel, [route], reached, publisher)[:1]]

    return replaced(dynamoth_dispatcher.forwarding_table, missing=one_each)


def one_forwarder() -> AbstractContextManager[None]:
    """Of the dispatchers of ALL_PUBLISHERS, only that of the first location forwards what was sent to all of them."""
    decide = ForwardingTable._decide  # pyright: ignore[reportPrivateUsage]

    def first_only(self: ForwardingTable, here: Location, channel: bytes, entry: Entry, alike: _Alike) -> Forwarding:
        for route in entry.live_routes:
            if route.assignment.mode is Mode.ALL_PUBLISHERS and here in route.locations(channel)[1:]:
                return _NOWHERE
        return decide(self, here, channel, entry, alike)

    return replaced(ForwardingTable, _decide=first_only)


def added_up() -> AbstractContextManager[None]:
    """The balancer takes what replicas report for the sum of what is true."""
    figures = ClusterModel.figures

    def sum_of(true: ChannelFigures) -> ChannelFigures:
        times = {mode: len(true.assignment.servers) if mode is true.assignment.mode else 1 for mode in Mode}
        return replace(
            true,
            subscribers=true.subscribers * times[Mode.ALL_SUBSCRIBERS],
            publications_per_s=true.publications_per_s * times[Mode.ALL_PUBLISHERS],
        )

    def sums(self: ClusterModel, assignments: Mapping[bytes, Assignment]) -> list[ChannelFigures]:
        return [sum_of(true) for true in figures(self, assignments)]

    return replaced(ClusterModel, figures=sums)


def no_failover() -> AbstractContextManager[None]:
    """Subscribers wait for a replica that is away, however long that takes."""
    return replaced(Routing, _fail_over=no_actions)


def slow_replacement() -> AbstractContextManager[None]:
    """Subscribers of ALL_PUBLISHERS wait for a lost replica as long as for one that they never knew."""

    def patient(self: Routing, subscription: Subscription, place: Place) -> float:
        return self._options.failover_s  # pyright: ignore[reportPrivateUsage]

    return replaced(Routing, _away_s_max=patient)


def blocked_without_end() -> AbstractContextManager[None]:
    """Servers are not read from until a reader has made room."""
    return replaced(Blocking, _read_on=nothing)


def skipped_in_silence() -> AbstractContextManager[None]:
    """A reader gets no gap event for messages that did not fit."""
    put = Blocking.put

    def silent(self: Blocking, messages: Iterable[Message]) -> Counter[Dropped]:
        put(self, messages)
        return Counter()

    return replaced(Blocking, put=silent)


@contextmanager
def publishers_wait() -> Generator[None]:
    """Publishers wait for a replica that is away, however long that takes."""

    def wait(self: PublisherMachine, server_id: str, now: float) -> list[Any]:
        self._servers[server_id].avoided = True  # pyright: ignore[reportPrivateUsage]  # so that it is not asked again
        return []

    with replaced(PublisherMachine, _fail_over=wait), delivery.nobody_is_asked_for_publishers():
        yield


def nothing_handed_over() -> AbstractContextManager[None]:
    """A publisher sends a confirmed message itself to the replicas that were away, when they are back."""

    def end(self: Answers, waiting: Waiting, now: float) -> list[Any]:
        return self.end(waiting)

    return replaced(Answers, hand_over=end)


def every_copy_for_patterns() -> AbstractContextManager[None]:
    """Subscribers to patterns deliver whatever comes, copies included."""

    def deliver(
        self: PatternMessages, matched: MatchedChannel, data: bytes, now: float, delivered: list[PatternMessage]
    ) -> list[Any]:
        envelope = open_envelope(data)
        if not envelope.flags & (CONTROL | HEARTBEAT):
            delivered.append(PatternMessage(matched.pattern.pattern, matched.channel, envelope.payload))
        return []

    return replaced(PatternMessages, _on_matched=deliver)


def no_pattern_for_replicas() -> AbstractContextManager[None]:
    """Subscribers to patterns do not know that replicated channels have other names."""

    def plain(pattern: bytes) -> tuple[bytes, ...]:
        return (pattern, replica_pattern(b""))

    return replaced(dynamoth_client.machines.patterns.subscription, physical_patterns=plain)


def lost_in_silence() -> AbstractContextManager[None]:
    """Subscribers to patterns subscribe again and say nothing."""
    subscribed = PatternMachine._on_subscribed  # pyright: ignore[reportPrivateUsage]

    def silent(self: PatternMachine, link: str, name: bytes, now: float) -> list[Any]:
        subscribed(self, link, name, now)
        return []

    return replaced(PatternMachine, _on_subscribed=silent)


def headers_read_once() -> AbstractContextManager[None]:
    """Subscribers to patterns do not look for servers that come later."""
    return replaced(PatternMachine, _read_again=no_actions)


def absence_without_end() -> AbstractContextManager[None]:
    """Subscribers to patterns wait for a server that is away, however long that takes."""
    return replaced(PatternMachine, _fail_over=no_actions)


def gone_in_silence() -> AbstractContextManager[None]:
    """Subscribers to patterns say what they have missed at a server when it is back, if ever."""
    fail_over = PatternMachine._fail_over  # pyright: ignore[reportPrivateUsage]

    def silent(self: PatternMachine, server: str, now: float) -> list[Any]:
        return [action for action in fail_over(self, server, now) if not isinstance(action, PatternGapDetected)]

    return replaced(PatternMachine, _fail_over=silent)


def empty_when_moves_begin() -> AbstractContextManager[None]:
    """The balancer takes a server for empty when channels have begun to leave it."""

    def follows(entry: Entry, server: str) -> bool:
        return server in entry.route.assignment.servers

    return replaced(dynamoth_balancer.install.book, follows=follows)


def nothing_leaves() -> AbstractContextManager[None]:
    """The balancer moves nothing away from servers that are being drained."""
    return replaced(Drain, propose=no_actions)


def anything_may_come() -> AbstractContextManager[None]:
    """The balancer lets administrators put channels at servers that are being drained."""
    return replaced(Installer, why_not_to=Installer.why_not)


CHECKS: tuple[Check, ...] = (
    Check("01-moved-twice", uncorrected(moved_in_transition), "G1"),
    Check("02-forwarding-loop", forwarded_without_end, "expected"),
    Check("03-different-versions", never_forwarded_twice, "G1"),
    Check("04-quiet-channel", no_trickle, "expected"),
    Check("08-left-too-early", break_before_make, "G1"),
    Check("09-left-before-the-forwarded", no_markers, "G1"),
    Check("10-empty-too-early", no_verification, "G1"),
    Check("11-late-plan", no_acknowledgements, "G1"),
    Check("12-balancer-dies", no_recovery, "expected"),
    Check("13-stale-notice", any_epoch, "expected"),
    Check("14-different-rings", ring_over_all_servers, "expected"),
    Check("15-very-late-publisher", settled_is_over, "G1"),
    Check("16-forward-link-dies", forwards_are_not_repeated, "G1"),
    Check("17-two-copies", no_duplicate_check, "G2"),
    Check("18-overtaken", no_hold, "G1"),
    Check("19-inflated-load", copies_count, "expected"),
    Check("19-inflated-load", noticed_each_time, "expected"),
    Check("20-hot-channel", any_move, "expected"),
    Check("21-unknown-publisher", trusting_newcomer, "G1"),
    Check("22-third-server", everybody_forwards, "G1"),
    Check("05-never-empty", one_name_for_all_epochs, "expected"),
    Check("06-some-server-has-it", any_replica_will_do, "G1"),
    Check("07-all-subscribers-no-flapping", added_up, "expected"),
    Check("07-all-publishers-no-flapping", added_up, "expected"),
    Check("24-every-replica-forwards", one_forwarder, "G1"),
    Check("23-all-subscribers-replica-away", no_failover, "expected"),
    Check("23-all-subscribers-replica-away", publishers_wait, "expected"),
    Check("23-all-publishers-replica-away", no_failover, "expected"),
    Check("26-dies-cut-off", nothing_handed_over, "G1"),
    Check("26-dies-cut-off-unnoticed", nothing_handed_over, "expected"),
    *(Check(name, no_markers, "G1") for name, _, _ in pairs()),
    Check("27-pattern-moved", every_copy_for_patterns, "G2"),
    Check("27-pattern-moved", no_hold, "G1"),
    Check("28-pattern-replicated", no_pattern_for_replicas, "G1"),
    Check("28-pattern-replicated", every_copy_for_patterns, "G2"),
    Check("29-pattern-cut-off", lost_in_silence, "G5"),
    Check("30-pattern-finds-servers", headers_read_once, "G1"),
    Check("32-pattern-server-leaves", absence_without_end, "expected"),
    Check("32-pattern-server-leaves", nothing_leaves, "expected"),
    Check("33-pattern-server-dies", gone_in_silence, "G5"),
    Check("33-pattern-server-dies", absence_without_end, "expected"),
    Check("40-replica-freezes", slow_replacement, "expected"),
    Check("40-replica-dies", slow_replacement, "expected"),
    Check("41-blocked-reader", blocked_without_end, "expected"),
    Check("41-blocked-reader-skips", blocked_without_end, "expected"),
    Check("41-blocked-reader-skips", skipped_in_silence, "G5"),
    Check("31-drained", nothing_leaves, "expected"),
    Check("31-drained", break_before_make, "G1"),
    Check("31-drained", anything_may_come, "expected"),
)
"""Each scenario with the mutations under which it must fail."""
