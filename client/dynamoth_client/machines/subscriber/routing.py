"""Which route a subscription follows: it is confirmed where the servers' plan says so, and moved make-before-break.

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

from collections import Counter
from typing import Any, cast

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.machine.timers import Timers
from dynamoth.plan.plan import Location, Mode, Phase, Route
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import Marker
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.register import Register
from dynamoth_client.machines.sequences import Sequences
from dynamoth_client.machines.standalone import ALONE, LOOK_INTERVAL_S
from dynamoth_client.machines.subscriber.events import Deliver, GapDetected, SubscriberOptions
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.subscription import Place, Subscription

_SPREAD_STEPS = 1024
_NEVER = float("inf")


class Routing:
    """The routes of one subscriber's subscriptions."""

    def __init__(
        self,
        client_id: int,
        local_plan: LocalPlan,
        options: SubscriberOptions,
        counters: Counter[str],
        register: Register[Subscription, Sequences],
        listening: Listening,
        timers: Timers[Any],
    ) -> None:
        """Begin without knowledge of routes but the local plan's. All else is the machine's own."""
        self._client_id = client_id
        self._plan = local_plan
        self._options = options
        self._counters = counters
        self._register = register
        self._listening = listening
        self._timers = timers
        #: Routes to servers that the local plan did not list when it was told of them.
        self._hints: dict[bytes, Route] = {}

    # Following a route.

    def begin(self, subscription: Subscription, now: float) -> list[Any]:
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

    def _join(self, subscription: Subscription, location: Location, now: float) -> list[Any]:
        actions = self._listening.join(subscription, location, now)
        if not self._listening.is_up(location.server):
            self._wish_failover(subscription, subscription.targets[location], now)
            self._wish_look_elsewhere(subscription, subscription.targets[location], now)
        return actions

    def _follow(self, subscription: Subscription, route: Route, now: float) -> list[Any]:
        """Make the locations of ``route`` the targets; its servers are in the local plan."""
        if not subscription.verified() and not subscription.leaving:
            _may_have_missed(subscription, "the channel moved while this client was away")
        subscription.route = route
        subscription.followed_since = now
        wanted = self._choose(subscription, route)
        actions: list[Any] = []
        for location in wanted:
            place = subscription.leaving.pop(location, None) or subscription.targets.get(location)
            if place is None:
                actions += self._join(subscription, location, now)
                continue
            subscription.targets[location] = place
            if self._listening.is_up(location.server):
                actions.append(self._listening.verify(subscription, place))
        for location, place in list(subscription.targets.items()):
            if location in wanted:
                continue
            if subscription.confirmed:
                del subscription.targets[location]
                subscription.leaving = {**subscription.leaving, location: place}
                subscription.may_have_missed = subscription.may_have_missed or place.lost
                place.lost = None
            else:
                actions += self._listening.leave(subscription, place, now)
        if subscription.leaving and not subscription.look_again_s:
            subscription.look_again_s = self._options.look_again_s
            self._timers.add(now + subscription.look_again_s, self._look_again, subscription)
        if subscription.leaving and self._options.marker_s < _NEVER:
            self._timers.add(now + self._options.marker_s, self._look_for_markers, subscription, route)
        return [*actions, *self._listening.ask_for_markers(subscription)]

    def _learned(self, subscription: Subscription, link: str, route: Route, now: float) -> list[Any]:
        """Take a newer route, from a notice or a stored plan that was read over ``link``."""
        channel = subscription.channel
        if route.epoch <= subscription.route.epoch:
            return []
        if self._plan.reachable(route):
            self._plan.learn(channel, route, now)
            return self._follow(subscription, route, now)
        asked = bool(self._hints)
        self._hints[channel] = route
        return [] if asked else [Send(link, stored_plan.READ_HEADER, ("header",))]

    def header_read(self, link: str, reply: Any, now: float) -> list[Any]:
        """Take the header of a stored plan: it was read to learn of servers that routes name."""
        hints, self._hints = self._hints, {}
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return []
        try:
            header = stored_plan.parse_header(reply, self._listening.links[link].run_id)
        except MalformedMessage:
            self._counters["malformed_plans"] += 1
            return []
        actions: list[Any] = []
        if header is not None and header.believed:
            self._plan.update_header(header.plan)
            actions += self.follow_plan(now)
        for channel, route in hints.items():
            subscription = self._register.current.get(channel)
            if subscription is None:
                continue
            if self._plan.reachable(route):
                actions += self._learned(subscription, link, route, now)
            else:
                self._counters["distrusted_hints"] += 1
        return actions

    # Verifying.

    def verified(self, subscription: Subscription, place: Place, reply: Any, now: float) -> list[Any]:
        """Judge a target by the plan stored at its server: its entry of the channel was read."""
        location = place.location
        try:
            stored = stored_plan.parse_entry(reply, self._listening.links[location.server].run_id)
        except UnknownMode as error:
            self._timers.add(now + self._options.look_again_s_max, self._verify_again, subscription, place)
            return [*self._plan.too_old(error), *self.tell_missed(subscription)]
        except MalformedMessage:
            self._counters["malformed_plans"] += 1
            stored = None
        if self._plan.is_alone and location.server == ALONE and stored_plan.is_absent(reply):
            return self._right(subscription, place, self._plan.home(subscription.channel), Phase.SETTLED, now)
        if stored is None:
            self._counters["no_plan_at_server"] += 1
            return self.verify_later(subscription, place, now)
        if location.server == ALONE or self._plan.has_other_ring(stored):  # not alone any more, or a new plan
            header = Send(location.server, stored_plan.READ_HEADER, ("header",))
            return [header, *self.verify_later(subscription, place, now)]
        entry = stored.settled_or(self._plan.home(subscription.channel))
        told = entry.client_route
        if location in told.locations(subscription.channel) or (
            entry.phase is Phase.PREPARED and entry.route == subscription.route
        ):
            return self._right(subscription, place, told, entry.phase, now)
        if told.epoch > subscription.route.epoch:
            actions = self._learned(subscription, location.server, told, now)
            if location in subscription.targets:
                actions += self.verify_later(subscription, place, now)
            return actions
        if now - subscription.followed_since >= self._options.distrust_s and self._plan.reachable(told):
            return self._distrust(subscription, told, now)
        return self.verify_later(subscription, place, now)

    def verify_later(self, subscription: Subscription, place: Place, now: float) -> list[Any]:
        """Read the plan again soon: what was read does not tell."""
        if not place.verified and not subscription.leaving:
            _may_have_missed(subscription, f"server {place.location.server} did not confirm the subscription")
        self._timers.add(now + self._options.verify_retry_s, self._verify_again, subscription, place)
        return []

    def look_whether_right(self, subscription: Subscription) -> list[Any]:
        """Read the plan again at every place: an agent has told of a loss, and the plan itself may be lost."""
        up = [place for place in subscription.targets.values() if self._listening.is_up(place.location.server)]
        return [self._listening.verify(subscription, place) for place in up]

    def _verify_again(self, subscription: Subscription, place: Place, _: float) -> list[Any]:
        current = subscription.targets.get(place.location) is place
        if not current or place.attempt or not self._register.is_current(subscription.channel, subscription):
            return []
        return [self._listening.verify(subscription, place)] if self._listening.is_up(place.location.server) else []

    def _right(self, subscription: Subscription, place: Place, told: Route, phase: Phase, now: float) -> list[Any]:
        """The place is right. ``told`` may be newer than the route followed and name the same place."""
        actions: list[Any] = []
        if told.epoch > subscription.route.epoch:
            self._plan.learn(subscription.channel, told, now)
            actions += self._follow(subscription, told, now)
        elif told.epoch < subscription.route.epoch and phase is not Phase.PREPARED:
            actions += self._distrust(subscription, told, now)
        place.verified, place.verified_epoch = True, told.epoch
        if place.excused:
            place.excused = False
            _may_have_missed(subscription, f"server {place.location.server} could not be reached")
        if not subscription.verified():
            return actions
        if phase is Phase.SETTLED and any(place.server == ALONE for place in subscription.leaving):
            actions += self._leave_alone(subscription)
        elif phase is Phase.SETTLED and subscription.leaving:
            _may_have_missed(subscription, "the move ended while this client was away")
            for old in list(subscription.leaving.values()):
                actions += self._listening.leave(subscription, old, now)
        if not subscription.confirmed and phase is not Phase.SETTLED and not subscription.confirm_after:
            subscription.confirm_after = now + self._options.join_moving_s
            self._timers.add(subscription.confirm_after, self._confirm_later, subscription)
        return actions if now < subscription.confirm_after else [*actions, *self._ready(subscription, now)]

    def _confirm_later(self, subscription: Subscription, now: float) -> list[Any]:
        """Confirm a subscription to a channel in transition, unless its servers have been lost meanwhile."""
        current = self._register.is_current(subscription.channel, subscription) and not subscription.confirmed
        return self._ready(subscription, now) if current and subscription.verified() else []

    def _distrust(self, subscription: Subscription, told: Route, now: float) -> list[Any]:
        """Give up a route for an older one that the servers tell: the newer one was forged, or their plan was lost."""
        self._counters["distrusted_routes"] += 1
        self._plan.distrust(subscription.channel, told)
        given_up = list(subscription.targets)
        actions = self._follow(subscription, told, now)
        if all(target.verified_epoch == told.epoch for target in subscription.targets.values()):
            # It has listened all the while where it should: there is nothing to wait for where it should not.
            for location in given_up:
                place = subscription.leaving.get(location)
                if place is not None and place.verified_epoch < 0:
                    actions += self._listening.leave(subscription, place, now)
        return actions

    # A server that was alone.

    def look_for_plan(self, now: float) -> list[Any]:
        """Look regularly, while a server is alone, whether it still is; follow the plan when there is one."""
        if not self._plan.is_alone:
            return self.follow_plan(now)
        self._timers.add(now + LOOK_INTERVAL_S, self.look_for_plan)
        return [Send(ALONE, stored_plan.READ_HEADER, ("header",))] if self._listening.is_up(ALONE) else []

    def follow_plan(self, now: float) -> list[Any]:
        """Let subscriptions follow the plan that is there now, from the server that was alone."""
        current = [each for each in self._register.current.values() if each.route.assignment.servers == (ALONE,)]
        return [action for each in current for action in self._follow(each, self._plan.route(each.channel), now)]

    def _leave_alone(self, subscription: Subscription) -> list[Any]:
        """Begin to leave the server that was alone: when it answers, all has come that was on its way from there."""
        links = self._listening.links
        if any(links[target.server].run_id != links[ALONE].run_id for target in subscription.targets):
            _may_have_missed(subscription, "a plan has come, and others may have followed it before this client")
        return [Send(ALONE, (b"PING",), ("alone", subscription.channel))] if self._listening.is_up(ALONE) else []

    def left_alone(self, channel: bytes, now: float) -> list[Any]:
        """Leave the server that was alone, as everything from there has come."""
        subscription = self._register.current.get(channel)
        alone = [] if subscription is None else [p for p in subscription.leaving.values() if p.location.server == ALONE]
        return [a for place in alone for a in self._listening.leave(cast("Subscription", subscription), place, now)]

    def _ready(self, subscription: Subscription, now: float) -> list[Any]:
        """Every target is verified, or excused: tell the application."""
        channel = subscription.channel
        is_first = not subscription.confirmed
        actions = self.tell_missed(subscription)
        actions += self._register.confirm(channel, subscription, now)
        if is_first and (away := subscription.excused()):
            reason = f"subscribed without what is published at {', '.join(away)}, which cannot be reached"
            actions.append(GapDetected(channel, None, None, reason))
        if subscription.early:
            actions.append(Deliver([(channel, payload) for payload in subscription.early]))
            subscription.early = None
        return [*actions, *self._leave_marked(subscription, now)]

    def tell_missed(self, subscription: Subscription) -> list[Any]:
        """Tell the application what it may have missed, if it was not told yet."""
        missed, subscription.may_have_missed = subscription.may_have_missed, None
        for place in subscription.targets.values():
            missed, place.lost = missed or place.lost, None
        if missed is None or not subscription.confirmed:
            return []
        return [GapDetected(subscription.channel, None, None, missed)]

    # Notices and markers.

    def noticed(self, subscription: Subscription, link: str, route: Route, now: float) -> list[Any]:
        """Follow a notice: soon, if the application is being served meanwhile.

        An older one may mean that the plan was lost, and that there is a new one: read what the server stores.
        """
        if route.epoch < subscription.route.epoch and not subscription.leaving:
            return self.look_whether_right(subscription)
        spread_s = self._options.move_spread_s
        if not subscription.confirmed or not spread_s:
            return self._learned(subscription, link, route, now)
        if route.epoch > max(subscription.route.epoch, subscription.noticed_epoch):
            subscription.noticed_epoch = route.epoch
            delay_s = spread_s * ((self._client_id ^ route.epoch) % _SPREAD_STEPS) / _SPREAD_STEPS
            self._timers.add(now + delay_s, self._move, subscription, link, route)
        return []

    def _move(self, subscription: Subscription, link: str, route: Route, now: float) -> list[Any]:
        subscription.noticed_epoch = 0  # should the move not begin, the next notice counts
        current = self._register.is_current(subscription.channel, subscription)
        return self._learned(subscription, link, route, now) if current and self._listening.is_up(link) else []

    def marked(self, link: str, marker: Marker, now: float) -> list[Any]:
        """Take a marker from the inbox at a server: it holds for every place there that is leaving."""
        subscription = self._register.current.get(marker.channel)
        if subscription is None or all(target.server != marker.server for target in subscription.targets):
            return []
        for place in subscription.leaving.values():
            if place.location.server == link:
                number = max(marker.number, place.marked.get(marker.server, 0))
                place.marked = {**place.marked, marker.server: number}
        return self._leave_marked(subscription, now)

    def _leave_marked(self, subscription: Subscription, now: float) -> list[Any]:
        """Leave the places to which markers of all targets have come."""
        if not subscription.leaving or not subscription.verified():
            return []
        targets = subscription.targets.values()
        marked = [p for p in subscription.leaving.values() if all(p.follows(target) for target in targets)]
        return [action for place in marked for action in self._listening.leave(subscription, place, now)]

    def _look_again(self, subscription: Subscription, now: float) -> list[Any]:
        """A place is leaving for long: a marker was lost, or none will come, as the move is over."""
        waited_s, subscription.look_again_s = subscription.look_again_s, 0.0
        if not subscription.leaving or not self._register.is_current(subscription.channel, subscription):
            return []
        subscription.look_again_s = min(2 * waited_s, self._options.look_again_s_max)
        self._timers.add(now + subscription.look_again_s, self._look_again, subscription)
        targets = list(subscription.targets.values())
        again = [action for place in targets for action in self._verify_again(subscription, place, now)]
        return [*again, *self._listening.ask_for_markers(subscription)]

    def _look_for_markers(self, subscription: Subscription, route: Route, _: float) -> list[Any]:
        """Report a gap where the agent of a new place has not answered for long: what it had to forward may be lost.

        A publisher that begins meanwhile has no earlier message that would show the loss.
        """
        if subscription.route is not route or not self._register.is_current(subscription.channel, subscription):
            return []
        heard = [
            place for place in subscription.leaving.values() if self._listening.links[place.location.server].hears_inbox
        ]
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

    def disconnected(self, subscription: Subscription, location: Location, reason: str, now: float) -> list[Any]:
        """Note that the connection to one of its places was lost."""
        if (target := subscription.targets.get(location)) is not None:
            target.disconnected()
            self._wish_failover(subscription, target, now)
            self._wish_look_elsewhere(subscription, target, now)
            if subscription.confirmed:
                target.lost = reason
            else:
                subscription.begin_anew()
            return []
        leaving = subscription.leaving[location]
        if subscription.verified():
            gap = GapDetected(subscription.channel, None, None, reason)
            return [gap, *self._listening.leave(subscription, leaving, now)]
        leaving.disconnected()
        subscription.may_have_missed = reason
        return []

    def forget_hints(self) -> None:
        """Forget routes that need a header: it may have been asked for over a link that was lost."""
        self._hints.clear()

    def unreachable(self, subscription: Subscription, location: Location, now: float) -> None:
        """Look for another replica soon: the first attempt to connect to one of its places has failed."""
        if (target := subscription.targets.get(location)) is not None:
            self._wish_failover(subscription, target, now)

    # Servers that cannot be reached.

    def _wish_look_elsewhere(self, subscription: Subscription, place: Place, now: float) -> None:
        """Ask another server soon: all store the plan, and the channel may not be at this one any more."""
        after_s = self._options.look_elsewhere_s * (1 + self._client_id % _SPREAD_STEPS / (2 * _SPREAD_STEPS))
        if after_s < _NEVER:
            self._timers.add(now + after_s, self._look_elsewhere, subscription, place)

    def _look_elsewhere(self, subscription: Subscription, place: Place, now: float) -> list[Any]:
        gone = place.location.server
        current = subscription.targets.get(place.location) is place
        if not current or subscription.unsubscribe_acks_pending or self._listening.is_up(gone):
            return []
        other, actions = self._listening.another_than(gone, now)
        if other is None:
            self._timers.add(now + self._options.verify_retry_s, self._look_elsewhere, subscription, place)
            return actions
        self._timers.add(now + self._options.look_elsewhere_again_s, self._look_elsewhere, subscription, place)
        channel = subscription.channel
        return [Send(other, stored_plan.read_entry(channel), ("elsewhere", channel, place.location))]

    def found_elsewhere(self, subscription: Subscription, link: str, reply: Any, now: float) -> list[Any]:
        """Take what another server stores of a channel whose place cannot be reached: follow it if it is newer."""
        try:
            stored = stored_plan.parse_entry(reply, self._listening.links[link].run_id)
        except UnknownMode as error:
            return list(self._plan.too_old(error))
        except MalformedMessage:
            self._counters["malformed_plans"] += 1
            stored = None
        if stored is None:
            return []
        told = stored.settled_or(self._plan.home(subscription.channel)).client_route
        return self._learned(subscription, link, told, now)

    def _wish_failover(self, subscription: Subscription, place: Place, now: float) -> None:
        if len(subscription.route.assignment.servers) > 1:
            after_s = self._away_s_max(subscription, place)
            self._timers.add(now + after_s, self._fail_over, subscription, place)

    def _away_s_max(self, subscription: Subscription, place: Place) -> float:
        """Return how long one of several replicas may be away before the subscription goes on without it."""
        has_failed = self._listening.links[place.location.server].has_failed
        is_replaced = subscription.route.assignment.mode is Mode.ALL_PUBLISHERS
        return self._options.replace_s if is_replaced and has_failed else self._options.failover_s

    def _fail_over(self, subscription: Subscription, place: Place, now: float) -> list[Any]:
        """A replica is still away: go to another one (ALL_PUBLISHERS), or do without it (ALL_SUBSCRIBERS)."""
        server = place.location.server
        current = subscription.targets.get(place.location) is place
        if not current or subscription.unsubscribe_acks_pending or self._listening.is_up(server) or place.excused:
            return []
        if now < self._listening.links[server].down_since + self._away_s_max(subscription, place):
            return []
        self._counters["failovers"] += 1
        if subscription.route.assignment.mode is Mode.ALL_PUBLISHERS:
            subscription.turn += 1
            subscription.may_have_missed = subscription.may_have_missed or place.lost
            actions = self._listening.leave(subscription, place, now)
            [location] = self._choose(subscription, subscription.route)
            return [*actions, *self._join(subscription, location, now)]
        place.excused = True
        if not subscription.verified():
            return []
        _may_have_missed(subscription, place.lost or f"server {server} cannot be reached")
        return self._ready(subscription, now)


def _may_have_missed(subscription: Subscription, reason: str) -> None:
    subscription.may_have_missed = subscription.may_have_missed or reason
