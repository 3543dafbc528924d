"""Decides which route a subscription follows, confirms it where servers agree, and moves it make-before-break.

Theory of operation
-------------------
The locations of the route that a subscription follows are its ``targets``. A target is *verified* when the plan stored
at the same server, read right behind the SUBSCRIBE on the same link, says that the route is right. When every target is
verified for the first time the subscription is confirmed to the application.

A newer route comes from a notice of a dispatcher or from the stored plan; its locations become the targets, and the old
targets are ``leaving``. One is left when the marker that answers the announcement at each target has come to the inbox
at its server (:class:`Marker`). If one has not come after ``marker_s``, the application gets a gap event. A notice is a
hint: a route that the servers contradict for ``distrust_s`` is given up.

After a lost connection every target there is verified again. The application gets a gap event for each confirmed
channel there, as messages may have been missed, when the server has taken the subscription: before any message that
comes after the gap. It gets another one if the place turns out not to be right any more. One of several replicas that
stays away is replaced by another one, or done without.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.plan.plan import Location, Mode, Phase, Route
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import Marker
from dynamoth_client.machines.register import State
from dynamoth_client.machines.standalone import ALONE, LOOK_INTERVAL_S
from dynamoth_client.machines.subscriber.events import Deliver, GapDetected, SubscriberAction
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.part import Part, Shared
from dynamoth_client.machines.subscriber.subscription import Place, Subscription

_SPREAD_STEPS = 1024
_NEVER = float("inf")


class Routing(Part):
    """The routes of one subscriber's subscriptions."""

    def __init__(self, shared: Shared, listening: Listening) -> None:
        """Begin with the routes of the local plan."""
        super().__init__(shared)
        self._listening = listening
        #: Channel to a newer route whose servers the local plan does not list. While there is one, a header is read.
        self._hints: dict[bytes, Route] = {}

    # Following a route.

    def begin(self, subscription: Subscription, now: float) -> list[SubscriberAction]:
        """Join the places of the route of a new subscription."""
        locations = self._choose(subscription, subscription.route)
        return [action for location in locations for action in self._join(subscription, location, now)]

    def _choose(self, subscription: Subscription, route: Route) -> tuple[Location, ...]:
        """Return the locations of ``route`` where this subscriber listens; the same for one epoch, without failures."""
        chosen = route.listened_at(self._client_id, subscription.channel)
        if route.assignment.mode is not Mode.ALL_PUBLISHERS or not subscription.turn:
            return chosen
        replicas = route.locations(subscription.channel)
        return (replicas[(replicas.index(chosen[0]) + subscription.turn) % len(replicas)],)

    def _join(self, subscription: Subscription, location: Location, now: float) -> list[SubscriberAction]:
        actions = self._listening.join(subscription, location, now)
        if not self._listening.is_up(location.server):
            self._fail_over_later(subscription, subscription.targets[location], now)
            self._look_elsewhere_later(subscription, subscription.targets[location], now)
        return actions

    def _follow(self, subscription: Subscription, route: Route, now: float) -> list[SubscriberAction]:
        """Make the locations of ``route`` the targets; its servers are in the local plan."""
        if not subscription.is_verified and not subscription.leaving:
            subscription.miss("the channel moved while this client was away")
        wanted = self._choose(subscription, route)
        unwanted = subscription.follow(route, wanted, now)
        actions: list[SubscriberAction] = []
        for location in wanted:
            place = subscription.targets.get(location)
            if place is None:
                actions += self._join(subscription, location, now)
            elif self._listening.is_up(location.server):
                actions.append(self._listening.verify(subscription, place))
        actions += self._leave_all(subscription, unwanted, now)
        if subscription.leaving and not subscription.look_again_s:
            self._look_again_later(subscription, now)
        if subscription.leaving and self._options.marker_s < _NEVER:
            self._timers.add(now + self._options.marker_s, self._look_for_markers, subscription, route)
        return [*actions, *self._listening.ask_for_markers(subscription)]

    def _leave_all(self, subscription: Subscription, places: Iterable[Place], now: float) -> list[SubscriberAction]:
        return [action for place in places for action in self._listening.leave(subscription, place, now)]

    def _learn(self, subscription: Subscription, link: str, route: Route, now: float) -> list[SubscriberAction]:
        """Follow a newer route, from a notice or a stored plan that was read over ``link``."""
        channel = subscription.channel
        if route.epoch <= subscription.route.epoch:
            return []
        if self._plan.reachable(route):
            self._plan.learn(channel, route, now)
            return self._follow(subscription, route, now)
        is_asked = bool(self._hints)
        self._hints[channel] = route
        return [] if is_asked else [Send(link, stored_plan.READ_HEADER, ("header",))]

    def on_header(self, link: str, reply: Any, now: float) -> list[SubscriberAction]:
        """Handle the header of a stored plan: it lists servers that routes name."""
        hints, self._hints = self._hints, {}
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return []
        try:
            header = stored_plan.parse_header(reply, self._listening.links[link].run_id)
        except MalformedMessage:
            self._counters["malformed_plans"] += 1
            return []
        actions: list[SubscriberAction] = []
        if header is not None and header.believed:
            self._plan.update_header(header.plan)
            actions += self._leave_standalone(now)
        for channel, route in hints.items():
            subscription = self._register.current.get(channel)
            if subscription is None:
                continue
            if self._plan.reachable(route):
                actions += self._learn(subscription, link, route, now)
            else:
                self._counters["distrusted_hints"] += 1
        return actions

    # Verifying.

    def on_verification(
        self, subscription: Subscription, place: Place, reply: Any, now: float
    ) -> list[SubscriberAction]:
        """Judge a target by the channel's entry in the plan stored at its server."""
        location = place.location
        try:
            stored = stored_plan.parse_entry(reply, self._listening.links[location.server].run_id)
        except UnknownMode as error:
            self._timers.add(now + self._options.look_again_s_max, self._verify_again, subscription, place)
            return [*self._plan.too_old(error), *self.report_missed(subscription)]
        except MalformedMessage:
            self._counters["malformed_plans"] += 1
            stored = None
        if self._plan.is_alone and location.server == ALONE and stored_plan.is_absent(reply):
            return self._verified(subscription, place, self._plan.home(subscription.channel), Phase.SETTLED, now)
        if stored is None:
            self._counters["no_plan_at_server"] += 1
            return self.verify_later(subscription, place, now)
        if location.server == ALONE or self._plan.has_other_ring(stored):  # not alone any more, or a new plan
            header = Send(location.server, stored_plan.READ_HEADER, ("header",))
            return [header, *self.verify_later(subscription, place, now)]
        entry = stored.entry(subscription.channel, self._plan.home(subscription.channel))
        route = entry.client_route
        if location in route.locations(subscription.channel) or (
            entry.phase is Phase.PREPARED and entry.route == subscription.route
        ):
            return self._verified(subscription, place, route, entry.phase, now)
        if route.epoch > subscription.route.epoch:
            actions = self._learn(subscription, location.server, route, now)
            if location in subscription.targets:
                actions += self.verify_later(subscription, place, now)
            return actions
        if now - subscription.followed_since >= self._options.distrust_s and self._plan.reachable(route):
            return self._distrust(subscription, route, now)
        return self.verify_later(subscription, place, now)

    def verify_later(self, subscription: Subscription, place: Place, now: float) -> list[SubscriberAction]:
        """Read the plan again soon, as the reply did not decide."""
        if not place.verified and not subscription.leaving:
            subscription.miss(f"server {place.location.server} did not confirm the subscription")
        self._timers.add(now + self._options.verify_retry_s, self._verify_again, subscription, place)
        return []

    def verify_all(self, subscription: Subscription) -> list[SubscriberAction]:
        """Read the plan again at every target: an agent reports a loss, and the plan itself may be lost."""
        up = [place for place in subscription.targets.values() if self._listening.is_up(place.location.server)]
        return [self._listening.verify(subscription, place) for place in up]

    def _verify_again(self, subscription: Subscription, place: Place, _: float) -> list[SubscriberAction]:
        is_target = subscription.targets.get(place.location) is place
        if not is_target or place.attempt or not subscription.is_current:
            return []
        return [self._listening.verify(subscription, place)] if self._listening.is_up(place.location.server) else []

    def _verified(
        self, subscription: Subscription, place: Place, route: Route, phase: Phase, now: float
    ) -> list[SubscriberAction]:
        """Note that a place is right. ``route`` may be newer than the one followed and name the same place."""
        actions: list[SubscriberAction] = []
        if route.epoch > subscription.route.epoch:
            self._plan.learn(subscription.channel, route, now)
            actions += self._follow(subscription, route, now)
        elif route.epoch < subscription.route.epoch and phase is not Phase.PREPARED:
            actions += self._distrust(subscription, route, now)
        subscription.verify(place, route.epoch, phase)
        if not subscription.is_verified:
            return actions
        if any(place.server == ALONE for place in subscription.leaving):  # no marker comes there, whatever the phase
            actions += self._begin_to_leave_alone(subscription)
        elif phase is Phase.SETTLED and subscription.leaving:
            subscription.miss("the move ended while this client was away")
            actions += self._leave_all(subscription, list(subscription.leaving.values()), now)
        if subscription.state is State.JOINING and phase is not Phase.SETTLED and not subscription.confirm_after:
            subscription.confirm_later(now + self._options.join_moving_s)
            self._timers.add(subscription.confirm_after, self._confirm_late, subscription)
        return actions if now < subscription.confirm_after else [*actions, *self._confirm(subscription, now)]

    def _confirm_late(self, subscription: Subscription, now: float) -> list[SubscriberAction]:
        """Confirm a subscription to a channel in transition, unless its servers have been lost meanwhile."""
        is_joining = subscription.state is State.JOINING
        return self._confirm(subscription, now) if is_joining and subscription.is_verified else []

    def _distrust(self, subscription: Subscription, route: Route, now: float) -> list[SubscriberAction]:
        """Follow an older route that servers store: the newer one was forged, or their plan was lost."""
        self._counters["distrusted_routes"] += 1
        self._plan.distrust(subscription.channel, route)
        given_up = list(subscription.targets)
        actions = self._follow(subscription, route, now)
        if all(target.verified_epoch == route.epoch for target in subscription.targets.values()):
            # It has listened at the right places all the time: nothing is to be waited for at the wrong ones.
            wrong = [place for location in given_up if (place := subscription.leaving.get(location)) is not None]
            actions += self._leave_all(subscription, [each for each in wrong if each.verified_epoch < 0], now)
        return actions

    # A server that was alone.

    def look_for_plan(self, now: float) -> list[SubscriberAction]:
        """Look for a plan regularly while a server is alone, and follow it when there is one."""
        if not self._plan.is_alone:
            return self._leave_standalone(now)
        self._timers.add(now + LOOK_INTERVAL_S, self.look_for_plan)
        return [Send(ALONE, stored_plan.READ_HEADER, ("header",))] if self._listening.is_up(ALONE) else []

    def _leave_standalone(self, now: float) -> list[SubscriberAction]:
        """Follow the plan with the subscriptions at the server that was alone."""
        current = [each for each in self._register.current.values() if each.route.assignment.servers == (ALONE,)]
        return [action for each in current for action in self._follow(each, self._plan.route(each.channel), now)]

    def _begin_to_leave_alone(self, subscription: Subscription) -> list[SubscriberAction]:
        """Send PING to the server that was alone: its answer comes behind all messages that are on their way."""
        links = self._listening.links
        if any(links[target.server].run_id != links[ALONE].run_id for target in subscription.targets):
            subscription.miss("a plan has come, and others may have followed it before this client")
        return [Send(ALONE, (b"PING",), ("alone", subscription.channel))] if self._listening.is_up(ALONE) else []

    def on_alone_answer(self, channel: bytes, now: float) -> list[SubscriberAction]:
        """Leave the server that was alone: all messages from there have come."""
        subscription = self._register.current.get(channel)
        if subscription is None:
            return []
        alone = [place for place in subscription.leaving.values() if place.location.server == ALONE]
        return self._leave_all(subscription, alone, now)

    # Confirming.

    def _confirm(self, subscription: Subscription, now: float) -> list[SubscriberAction]:
        """Report to the application that every target is verified, or excused."""
        channel = subscription.channel
        is_first = subscription.state is State.JOINING
        actions = self.report_missed(subscription)
        actions += self._register.confirm(channel, subscription, now)
        if is_first and (away := subscription.excused()):
            reason = f"subscribed without what is published at {', '.join(away)}, which cannot be reached"
            actions.append(GapDetected(channel, None, None, reason))
        if early := subscription.take_early():
            actions.append(Deliver([(channel, payload) for payload in early]))
        return [*actions, *self._leave_marked(subscription, now)]

    def report_missed(self, subscription: Subscription) -> list[SubscriberAction]:
        """Report, once, that the application may have missed something."""
        missed = subscription.take_missed()
        return [] if missed is None else [GapDetected(subscription.channel, None, None, missed)]

    # Notices and markers.

    def on_route_notice(
        self, subscription: Subscription, link: str, route: Route, now: float
    ) -> list[SubscriberAction]:
        """Follow a notice: soon, if the application gets its messages meanwhile.

        An older one may mean that the plan was lost, and that there is a new one: read what the server stores.
        """
        if route.epoch < subscription.route.epoch and not subscription.leaving:
            return self.verify_all(subscription)
        spread_s = self._options.move_spread_s
        if subscription.state is State.JOINING or not spread_s:
            return self._learn(subscription, link, route, now)
        if route.epoch > max(subscription.route.epoch, subscription.noticed_epoch):
            subscription.notice(route.epoch)
            delay_s = spread_s * ((self._client_id ^ route.epoch) % _SPREAD_STEPS) / _SPREAD_STEPS
            self._timers.add(now + delay_s, self._move, subscription, link, route)
        return []

    def _move(self, subscription: Subscription, link: str, route: Route, now: float) -> list[SubscriberAction]:
        subscription.notice(0)  # should the move not begin, the next notice counts
        can_move = subscription.is_current and self._listening.is_up(link)
        return self._learn(subscription, link, route, now) if can_move else []

    def on_marker(self, link: str, marker: Marker, now: float) -> list[SubscriberAction]:
        """Handle a marker from the inbox at a server: it holds for every place there that is leaving."""
        subscription = self._register.current.get(marker.channel)
        if subscription is None or all(target.server != marker.server for target in subscription.targets):
            return []
        for place in subscription.leaving.values():
            if place.location.server == link:
                place.mark(marker.server, marker.number)
        return self._leave_marked(subscription, now)

    def _leave_marked(self, subscription: Subscription, now: float) -> list[SubscriberAction]:
        """Leave the places to which markers of all targets have come."""
        if not subscription.leaving or not subscription.is_verified:
            return []
        targets = subscription.targets.values()
        marked = [p for p in subscription.leaving.values() if all(p.follows(target) for target in targets)]
        return self._leave_all(subscription, marked, now)

    def _look_again_later(self, subscription: Subscription, now: float) -> None:
        after_s = subscription.look_again(self._options.look_again_s, self._options.look_again_s_max)
        self._timers.add(now + after_s, self._look_again, subscription)

    def _look_again(self, subscription: Subscription, now: float) -> list[SubscriberAction]:
        """Ask again while a channel moves: a marker was lost, or none will come, as the move is over."""
        if not subscription.leaving or not subscription.is_current:
            subscription.stop_looking()
            return []
        self._look_again_later(subscription, now)
        targets = list(subscription.targets.values())
        again = [action for place in targets for action in self._verify_again(subscription, place, now)]
        return [*again, *self._listening.ask_for_markers(subscription)]

    def _look_for_markers(self, subscription: Subscription, route: Route, _: float) -> list[SubscriberAction]:
        """Report a gap where the agent of a new place has not answered for long: it may have lost forwarded messages.

        A publisher that begins meanwhile has no earlier message that would show the loss.
        """
        if subscription.route is not route or not subscription.is_current:
            return []
        links = self._listening.links
        heard = [place for place in subscription.leaving.values() if links[place.location.server].hears_inbox]
        silent = {
            target.location.server
            for target in subscription.targets.values()
            if target.verified and not all(place.follows(target) for place in heard)
        }
        if not silent:
            return []
        reason = (
            f"the agent of server {', '.join(sorted(silent))} did not forward messages while the channel moved there"
        )
        return [GapDetected(subscription.channel, None, None, reason)]

    # Lost connections.

    def on_disconnect(
        self, subscription: Subscription, place: Place, reason: str, now: float
    ) -> list[SubscriberAction]:
        """Note that the connection of one of its places was lost."""
        if place.location in subscription.targets:
            self._fail_over_later(subscription, place, now)
            self._look_elsewhere_later(subscription, place, now)
        elif subscription.is_verified:
            gap = GapDetected(subscription.channel, None, None, reason)
            return [gap, *self._listening.leave(subscription, place, now)]
        subscription.lose(place, reason)
        return []

    def on_unreachable(self, subscription: Subscription, location: Location, now: float) -> None:
        """Look for another replica soon: the first attempt to connect to one of its places has failed."""
        if (target := subscription.targets.get(location)) is not None:
            self._fail_over_later(subscription, target, now)

    def forget_hints(self) -> None:
        """Forget routes that need a header: it may have been asked for over a link that was lost."""
        self._hints.clear()

    # Servers that cannot be reached.

    def _look_elsewhere_later(self, subscription: Subscription, place: Place, now: float) -> None:
        """Ask another server soon: all store the plan, and the channel may not be at this one any more.

        At once where the server has been away for long: only those whose connection was lost do that together.
        """
        spread_s = self._options.look_elsewhere_again_s * (self._client_id % _SPREAD_STEPS / _SPREAD_STEPS)
        after_s = self._options.look_elsewhere_s + spread_s
        if after_s < _NEVER:
            down_since = self._listening.links[place.location.server].down_since
            self._timers.add(max(now, down_since + after_s), self._look_elsewhere, subscription, place)

    def _is_away(self, subscription: Subscription, place: Place) -> bool:
        """Return whether the server of a target of a current subscription is still unreachable."""
        is_target = subscription.is_current and subscription.targets.get(place.location) is place
        return is_target and not self._listening.is_up(place.location.server)

    def _look_elsewhere(self, subscription: Subscription, place: Place, now: float) -> list[SubscriberAction]:
        if not self._is_away(subscription, place):
            return []
        other, actions = self._listening.another_than(place.location.server, now)
        if other is None:
            self._timers.add(now + self._options.verify_retry_s, self._look_elsewhere, subscription, place)
            return actions
        self._timers.add(now + self._options.look_elsewhere_again_s, self._look_elsewhere, subscription, place)
        channel = subscription.channel
        return [Send(other, stored_plan.read_entry(channel), ("elsewhere", channel, place.location))]

    def on_entry_elsewhere(
        self, subscription: Subscription, link: str, reply: Any, now: float
    ) -> list[SubscriberAction]:
        """Follow the route that another server stores for a channel whose place cannot be reached, if it is newer."""
        try:
            stored = stored_plan.parse_entry(reply, self._listening.links[link].run_id)
        except UnknownMode as error:
            return [*self._plan.too_old(error)]
        except MalformedMessage:
            self._counters["malformed_plans"] += 1
            stored = None
        if stored is None:
            return []
        route = stored.entry(subscription.channel, self._plan.home(subscription.channel)).client_route
        return self._learn(subscription, link, route, now)

    def _fail_over_later(self, subscription: Subscription, place: Place, now: float) -> None:
        if len(subscription.route.assignment.servers) > 1:
            after_s = self._away_s_max(subscription, place)
            self._timers.add(now + after_s, self._fail_over, subscription, place)

    def _away_s_max(self, subscription: Subscription, place: Place) -> float:
        """Return how long one of several replicas may be away before the subscription goes on without it."""
        has_failed = self._listening.links[place.location.server].has_failed
        is_replaced = subscription.route.assignment.mode is Mode.ALL_PUBLISHERS
        return self._options.replace_s if is_replaced and has_failed else self._options.failover_s

    def _fail_over(self, subscription: Subscription, place: Place, now: float) -> list[SubscriberAction]:
        """A replica is still away: go to another one (ALL_PUBLISHERS), or do without it (ALL_SUBSCRIBERS)."""
        server = place.location.server
        if not self._is_away(subscription, place) or place.excused:
            return []
        if now < self._listening.links[server].down_since + self._away_s_max(subscription, place):
            return []
        self._counters["failovers"] += 1
        if subscription.route.assignment.mode is Mode.ALL_PUBLISHERS:
            subscription.replace(place)
            actions = self._listening.leave(subscription, place, now)
            [location] = self._choose(subscription, subscription.route)
            return [*actions, *self._join(subscription, location, now)]
        place.excuse()
        if not subscription.is_verified:
            return []
        subscription.miss(place.lost or f"server {server} cannot be reached")
        return self._confirm(subscription, now)

    def check(self, subscription: Subscription) -> None:
        """Assert the invariants that hold between events of a current subscription."""
        wanted = self._choose(subscription, subscription.route)
        assert subscription.targets.keys() == set(wanted), f"{[*subscription.targets]} in the place of {wanted}"
