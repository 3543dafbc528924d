"""The subscriber machine: listens in the right places, moves make-before-break, delivers once and in order.

Theory of operation
-------------------
For each channel there is a :class:`Subscription` with a route that it follows and *places*, the locations where it
listens (``subscription.py``):

* ``targets``: those of the route. A place is *joined* by SUBSCRIBE, and *verified* by an HMGET of the plan stored at
  the same server, sent right behind it on the same link, when the stored plan says that the route is right. When
  every target is verified for the first time the subscription is confirmed to the application.
* ``leaving``: those of older routes. One is left when the marker that answers the announcement at each target has come
  to the inbox at its server (:class:`Marker`).

What comes between SUBSCRIBE and the confirmation is kept and delivered behind it. A subscription has ended when the
servers of all its places have acknowledged UNSUBSCRIBE: what was on its way is delivered before.

A newer route comes from a notice of a dispatcher or from the stored plan; its locations become the targets and the
old targets are leaving. What is delivered goes through the :class:`Sequences` of the channel, so that it does not
matter in how many places a message is seen.

After a lost connection every place at that server is joined and verified again. The application gets a gap event for
each confirmed channel there, as messages may have been missed, when the server has taken the subscription: before any
message that comes after the gap. It gets another one if the place turns out not to be right any more.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from dynamoth import stored_plan
from dynamoth.control import Announcement, LossNotice, Marker, RouteNotice, pack_control, unpack_control
from dynamoth.envelope import (
    CONTROL,
    HEADER_BYTES,
    HEARTBEAT,
    KNOWN_FLAGS,
    MAGIC,
    QUIET_BITS,
    RAW,
    ROUTE_CHANGED,
    Envelope,
    open_envelope,
    unpack_header,
)
from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.events import Connect, Disconnect, ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import ANNOUNCE_CHANNEL, inbox, is_own_channel
from dynamoth.plan import Location, Mode, Phase, Route
from dynamoth_client.local_plan import LocalPlan
from dynamoth_client.sequences import Gap, Sequences
from dynamoth_client.subscription import Place, SubscriberLink, Subscription

_SPREAD_STEPS = 1024

_UNUSUAL = CONTROL | HEARTBEAT | RAW

_NO_HEADER = (b"", 0, 0, 0, 0)

_NO_PERMISSION = ("NOPERM", "NOAUTH")

ANNOUNCED_MAX = 1000
"""Channels of one announcement at most."""


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """What a subscriber may choose."""

    hold_s_max: float = 0.5
    """How long a message waits for an earlier one of its publisher before the gap is reported."""
    verify_retry_s: float = 0.1
    """How soon a place is verified again when the server held no plan, or one that is behind."""
    move_spread_s: float = 0.4
    """A subscriber that is told of a move waits for up to so long, each another time, lest all move at once; 0: not."""
    distrust_s: float = 5.0
    """A route that came from a notice and is not confirmed by its server for so long is given up for the stored
    plan's."""
    failover_s: float = 5.0
    """How long one of several replicas may be away before another one is used, or it is done without. Longer than a
    busy process takes to connect: doing without is told as a gap."""
    look_again_s: float = 0.25
    """How soon, while a place is leaving, the route is verified again and markers are asked for again; then at doubling
    distance."""
    look_again_s_max: float = 2.0
    """The largest such distance."""
    link_idle_s: float = 30.0
    """A link on which nothing is listened to for so long is closed."""
    stream_idle_s: float = 600.0
    """A publisher of which nothing came for so long (up to twice that) is forgotten."""
    ended_max: int = 1000
    """Channels that were unsubscribed and whose numbers are remembered at most, for a new subscription."""


@dataclass(slots=True)
class Subscribe:
    """Event: the application subscribes. Each channel is confirmed once per time that it is named."""

    channels: tuple[bytes, ...]


@dataclass(slots=True)
class Unsubscribe:
    """Event: the application unsubscribes."""

    channels: tuple[bytes, ...]


@dataclass(slots=True)
class SubscriptionConfirmed:
    """Action: from here on G1-G3 hold for the channel."""

    channel: bytes


@dataclass(slots=True)
class SubscriptionEnded:
    """Action: nothing of the channel is delivered any more: the servers have ended it, or were lost."""

    channel: bytes


@dataclass(slots=True)
class SubscriptionFailed:
    """Action: the server refused (an ACL, for example). The subscription is gone."""

    channel: bytes
    reason: str


@dataclass(slots=True)
class Deliver:
    """Action: messages for the application, ``(channel, payload)``, in order."""

    messages: list[tuple[bytes, bytes]]


@dataclass(slots=True)
class GapDetected:
    """Action: messages of the channel were, or may have been, lost (G5). None means unknown."""

    channel: bytes
    publisher: int | None
    count: int | None
    reason: str


class SubscriberMachine:
    """Subscribes for one PubSub. See the module's text.

    Promises: G1, G2 and G3 for confirmed subscriptions while connections last, and a gap event where they do not.
    """

    def __init__(self, client_id: int, local_plan: LocalPlan, options: SubscriberOptions | None = None) -> None:
        """Make a subscriber.

        Args:
            client_id: 64-bit number, different for every subscriber; LLAs know it by this.
            local_plan: shared by the machines of the client.
            options: see :class:`SubscriberOptions`.

        """
        self.client_id = client_id
        self.options = options or SubscriberOptions()
        self.counters: Counter[str] = Counter()
        self._plan = local_plan
        self._subscriptions: dict[bytes, Subscription] = {}
        #: Those that the application has ended and that some server has not.
        self._ending: dict[bytes, Subscription] = {}
        #: What was delivered of channels that were unsubscribed, oldest first: nothing of it may come again.
        self._ended: dict[bytes, Sequences] = {}
        self._links: dict[str, SubscriberLink] = {}
        self._inbox = inbox(client_id)
        self._attempts = count(1)
        self._announcement_numbers = count(1)
        #: (time, tie-breaker, what, argument): wishes for a later time. A wish may be out of date when its time comes.
        self._wishes: list[tuple[float, int, str, Any]] = []
        self._wish_numbers = count()
        #: Routes to servers that the local plan did not list when it was told of them.
        self._hints: dict[bytes, Route] = {}
        #: Server to physical channels joined and left during the present event, for the agent there.
        self._announce: dict[str, tuple[dict[bytes, None], list[bytes]]] = {}

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        match event:
            case Pushed():
                actions = self._pushed(event, now)
            case Replied():
                actions = self._replied(event, now)
            case Subscribe():
                actions = [action for channel in event.channels for action in self._subscribe(channel, now)]
            case Unsubscribe():
                actions = [action for channel in event.channels for action in self._unsubscribe(channel, now)]
            case LinkUp():
                actions = self._link_up(event, now)
            case LinkDown():
                actions = self._link_down(event, now)
            case Tick():
                actions = self._tick(now)
            case Start():
                self._wish(now + self.options.stream_idle_s, "forget", None)
                return []
            case _:
                raise AssertionError(f"not an event of a subscriber: {event!r}")
        if self._announce:
            actions += self._announcements()
        return actions

    def deadline(self) -> float | None:
        """Return the time of the earliest wish."""
        return self._wishes[0][0] if self._wishes else None

    # The application.

    def _subscribe(self, channel: bytes, now: float) -> list[Any]:
        if (ending := self._ending.get(channel)) is not None:
            ending.confirmations_owed += 1
            return []
        subscription = self._subscriptions.get(channel)
        if subscription is not None:
            if subscription.confirmed:
                return [SubscriptionConfirmed(channel)]
            subscription.confirmations_owed += 1
            return []
        if is_own_channel(channel):
            return [SubscriptionFailed(channel, "channels under this prefix are Dynamoth's own: choose another name")]
        route = self._plan.route(channel)
        sequences = self._ended.pop(channel, None) or Sequences(self.options.hold_s_max)
        subscription = Subscription(channel, route, sequences, followed_since=now)
        subscription.begin_anew()
        self._subscriptions[channel] = subscription
        self._plan.pin(channel)
        places = self._choose(subscription, route)
        return [action for location in places for action in self._join(subscription, location, now)]

    def _unsubscribe(self, channel: bytes, now: float) -> list[Any]:
        if (ending := self._ending.get(channel)) is not None:
            ending.confirmations_owed = 0
            ending.ends_owed += 1
            return []
        subscription = self._subscriptions.get(channel)
        if subscription is None:
            return [SubscriptionEnded(channel)]
        if not subscription.confirmed:
            return [*self._drop(subscription, now), SubscriptionEnded(channel)]
        self._forget_subscription(subscription, now)
        actions = self._tell_missed(subscription)
        self._ending[channel] = subscription
        subscription.ends_owed = 1
        subscription.ended_moving = bool(subscription.leaving)
        for place in subscription.places():
            if self._links[place.location.server].up:
                actions += self._send_unsubscribe(place.location)
            else:
                self._forget_place(subscription, place, now)
        return [*actions, *self._ended_if_gone(subscription, now)]

    def _drop(self, subscription: Subscription, now: float) -> list[Any]:
        """End a subscription at once, whatever is on its way."""
        self._forget_subscription(subscription, now)
        return [action for place in subscription.places() for action in self._leave(subscription, place, now)]

    def _forget_subscription(self, subscription: Subscription, now: float) -> None:
        channel = subscription.channel
        del self._subscriptions[channel]
        self._ended[channel] = subscription.sequences
        if len(self._ended) > self.options.ended_max:
            del self._ended[next(iter(self._ended))]
        self._plan.unpin(channel, now)

    def _ended_if_gone(self, subscription: Subscription, now: float) -> list[Any]:
        """Tell the application of the end when no place is left; begin anew if it has subscribed again."""
        if subscription.places():
            return []
        channel = subscription.channel
        del self._ending[channel]
        actions: list[Any] = [SubscriptionEnded(channel)] * subscription.ends_owed
        for _ in range(subscription.confirmations_owed):
            actions += self._subscribe(channel, now)
        return actions

    def _choose(self, subscription: Subscription, route: Route) -> tuple[Location, ...]:
        """Return the locations of ``route`` where this subscriber listens; the same for one epoch, without failures."""
        chosen = route.listened_at(self.client_id, subscription.channel)
        if route.assignment.mode is not Mode.ALL_PUBLISHERS or not subscription.turn:
            return chosen
        replicas = route.locations(subscription.channel)
        return (replicas[(replicas.index(chosen[0]) + subscription.turn) % len(replicas)],)

    # Places.

    def _join(self, subscription: Subscription, location: Location, now: float) -> list[Any]:
        place = subscription.targets[location] = Place(location)
        link = self._links.get(location.server)
        actions: list[Any] = []
        if link is None:
            link = self._links[location.server] = SubscriberLink(down_since=now)
            actions.append(Connect(location.server, self._plan.servers[location.server].url))
        link.places[location.physical] = subscription
        link.idle_since = None
        self._announced(location.server)[0][location.physical] = None
        if link.up:
            actions += self._listen(subscription, place)
        else:
            self._wish_failover(subscription, place, now)
        return actions

    def _listen(self, subscription: Subscription, place: Place) -> list[Any]:
        """Subscribe and read the stored plan, in this order, on one connection."""
        return [
            Send(place.location.server, (b"SUBSCRIBE", place.location.physical), ("subscribe", subscription.channel)),
            self._verify(subscription, place),
        ]

    def _verify(self, subscription: Subscription, place: Place) -> Send:
        place.attempt = next(self._attempts)
        command = stored_plan.read_entry(subscription.channel)
        return Send(place.location.server, command, ("verify", subscription.channel, place.location, place.attempt))

    def _leave(self, subscription: Subscription, place: Place, now: float) -> list[Any]:
        self._forget_place(subscription, place, now)
        if not self._links[place.location.server].up:
            return []
        return self._send_unsubscribe(place.location)

    def _send_unsubscribe(self, location: Location) -> list[Any]:
        self._links[location.server].unsubscribing[location.physical] += 1
        self._announced(location.server)[1].append(location.physical)
        return [Send(location.server, (b"UNSUBSCRIBE", location.physical), ("unsubscribe", location.physical))]

    def _unsubscribed(self, link_name: str, physical: bytes, now: float) -> list[Any]:
        """Note that the server has done an UNSUBSCRIBE, or refuses it: nothing more comes to what is ending."""
        link = self._links[link_name]
        if physical in link.unsubscribing:
            link.unsubscribing[physical] -= 1
            if link.unsubscribing[physical]:
                return []
            del link.unsubscribing[physical]
        subscription = link.places.get(physical)
        if subscription is None or not subscription.ends_owed:
            return []
        self._forget_place(subscription, subscription.place(Location(link_name, physical)), now)
        return self._ended_if_gone(subscription, now)

    def _forget_place(self, subscription: Subscription, place: Place, now: float) -> None:
        location = place.location
        subscription.targets.pop(location, None)
        subscription.leaving.pop(location, None)
        link = self._links[location.server]
        del link.places[location.physical]
        if not link.places:
            link.idle_since = now
            self._wish(now + self.options.link_idle_s, "idle", location.server)

    def _follow(self, subscription: Subscription, route: Route, now: float) -> list[Any]:
        """Make the locations of ``route`` the targets; its servers are in the local plan."""
        if not subscription.verified() and not subscription.leaving:
            self._may_have_missed(subscription, "the channel moved while this client was away")
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
            if self._links[location.server].up:
                actions.append(self._verify(subscription, place))
        for location, place in list(subscription.targets.items()):
            if location in wanted:
                continue
            if subscription.confirmed:
                del subscription.targets[location]
                subscription.leaving = {**subscription.leaving, location: place}
                subscription.may_have_missed = subscription.may_have_missed or place.lost
                place.lost = None
            else:
                actions += self._leave(subscription, place, now)
        if subscription.leaving and not subscription.look_again_s:
            subscription.look_again_s = self.options.look_again_s
            self._wish(now + subscription.look_again_s, "look again", subscription)
        return [*actions, *self._ask_for_markers(subscription)]

    def _ask_for_markers(self, subscription: Subscription) -> list[Any]:
        """Announce the targets where it leaves other places, and listen to the inbox there, for the answers."""
        if not subscription.leaving:
            return []
        actions: list[Any] = []
        for server in dict.fromkeys(location.server for location in subscription.leaving):
            link = self._links[server]
            if link.up and not link.hears_inbox:
                link.hears_inbox = True
                actions.append(Send(server, (b"SUBSCRIBE", self._inbox), ("inbox",)))
        for location in subscription.targets:
            self._announced(location.server)[0][location.physical] = None
        return actions

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

    # Replies.

    def _replied(self, event: Replied, now: float) -> list[Any]:
        match event.tag:
            case ("verify", channel, location, attempt):
                subscription = self._subscriptions.get(channel)
                if subscription is None or (place := subscription.targets.get(location)) is None:
                    return []
                if place.attempt != attempt:
                    return []
                place.attempt = 0
                return self._verified(subscription, place, event.value, now)
            case ("subscribe", channel):
                return self._subscribe_refused(channel, event, now)
            case ("unsubscribe", physical):
                self.counters["refused_commands"] += 1
                return self._unsubscribed(event.link, physical, now)
            case ("header",):
                return self._header_read(event, now)
            case ("inbox",):
                self.counters["refused_commands"] += 1
                return []
            case _:
                raise AssertionError(f"not a tag of a subscriber: {event.tag!r}")

    def _subscribe_refused(self, channel: bytes, event: Replied, now: float) -> list[Any]:
        """SUBSCRIBE has no reply but an error: final where permission is missing, for a while where it is busy."""
        if str(event.value).startswith(_NO_PERMISSION):
            return self._refused(channel, str(event.value), now)
        self.counters["refused_commands"] += 1
        self._wish(now + self.options.verify_retry_s, "listen", (channel, event.link))
        return []

    def _refused(self, channel: bytes, reason: str, now: float) -> list[Any]:
        subscription = self._subscriptions.get(channel)
        return [] if subscription is None else [*self._drop(subscription, now), SubscriptionFailed(channel, reason)]

    def _verified(self, subscription: Subscription, place: Place, reply: Any, now: float) -> list[Any]:
        """Judge a place by what the plan stored at its server says."""
        if isinstance(reply, ErrorReply):
            self.counters["refused_commands"] += 1
            if str(reply).startswith(_NO_PERMISSION) and not subscription.confirmed:
                return self._refused(subscription.channel, f"the stored plan cannot be read: {reply}", now)
            return self._retry(place, subscription, now)
        location = place.location
        try:
            stored = stored_plan.parse_entry(reply, self._links[location.server].run_id)
        except UnknownMode as error:
            self._wish(now + self.options.look_again_s_max, "verify", (subscription, place))
            return [*self._plan.too_old(error), *self._tell_missed(subscription)]
        except MalformedMessage:
            self.counters["malformed_plans"] += 1
            stored = None
        if stored is None:
            self.counters["no_plan_at_server"] += 1
            return self._retry(place, subscription, now)
        entry = stored.settled_or(self._plan.home(subscription.channel))
        told = entry.told
        if location in told.locations(subscription.channel) or (
            entry.phase is Phase.PREPARED and entry.route == subscription.route
        ):
            return self._right(subscription, place, told, entry.phase, now)
        if told.epoch > subscription.route.epoch:
            actions = self._learned(subscription, location.server, told, now)
            return (
                actions
                if place.location not in subscription.targets
                else [*actions, *self._retry(place, subscription, now)]
            )
        if now - subscription.followed_since >= self.options.distrust_s and self._plan.reachable(told):
            return self._distrust(subscription, told, now)
        return self._retry(place, subscription, now)

    def _retry(self, place: Place, subscription: Subscription, now: float) -> list[Any]:
        if not place.verified and not subscription.leaving:
            self._may_have_missed(subscription, f"server {place.location.server} did not confirm the subscription")
        self._wish(now + self.options.verify_retry_s, "verify", (subscription, place))
        return []

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
            self._may_have_missed(subscription, f"server {place.location.server} could not be reached")
        if not subscription.verified():
            return actions
        if phase is Phase.SETTLED and subscription.leaving:
            self._may_have_missed(subscription, "the move ended while this client was away")
            for old in list(subscription.leaving.values()):
                actions += self._leave(subscription, old, now)
        return [*actions, *self._ready(subscription, now)]

    def _distrust(self, subscription: Subscription, told: Route, now: float) -> list[Any]:
        """Give up a route for an older one that the servers tell: the newer one was forged, or their plan was lost."""
        self.counters["distrusted_routes"] += 1
        self._plan.distrust(subscription.channel, told)
        given_up = list(subscription.targets)
        actions = self._follow(subscription, told, now)
        if all(target.verified_epoch == told.epoch for target in subscription.targets.values()):
            # It has listened all the while where it should: there is nothing to wait for where it should not.
            for location in given_up:
                place = subscription.leaving.get(location)
                if place is not None and place.verified_epoch < 0:
                    actions += self._leave(subscription, place, now)
        return actions

    @staticmethod
    def _may_have_missed(subscription: Subscription, reason: str) -> None:
        subscription.may_have_missed = subscription.may_have_missed or reason

    @staticmethod
    def _tell_missed(subscription: Subscription) -> list[Any]:
        missed, subscription.may_have_missed = subscription.may_have_missed, None
        for place in subscription.targets.values():
            missed, place.lost = missed or place.lost, None
        if missed is None or not subscription.confirmed:
            return []
        return [GapDetected(subscription.channel, None, None, missed)]

    def _ready(self, subscription: Subscription, now: float) -> list[Any]:
        """Every target is verified, or excused: tell the application."""
        channel = subscription.channel
        actions = self._tell_missed(subscription)
        actions += [SubscriptionConfirmed(channel)] * subscription.confirmations_owed
        subscription.confirmations_owed = 0
        if not subscription.confirmed:
            subscription.confirmed = True
            subscription.confirmed_at = now
            if away := subscription.excused():
                reason = f"subscribed without what is published at {', '.join(away)}, which cannot be reached"
                actions.append(GapDetected(channel, None, None, reason))
        if subscription.early:
            actions.append(Deliver([(channel, payload) for payload in subscription.early]))
            subscription.early = None
        return [*actions, *self._leave_marked(subscription, now)]

    def _header_read(self, event: Replied, now: float) -> list[Any]:
        hints, self._hints = self._hints, {}
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            return []
        try:
            header = stored_plan.parse_header(event.value, self._links[event.link].run_id)
        except MalformedMessage:
            self.counters["malformed_plans"] += 1
            return []
        if header is not None and header.believed:
            self._plan.update_header(header.plan)
        actions: list[Any] = []
        for channel, route in hints.items():
            subscription = self._subscriptions.get(channel)
            if subscription is None:
                continue
            if self._plan.reachable(route):
                actions += self._learned(subscription, event.link, route, now)
            else:
                self.counters["distrusted_hints"] += 1
        return actions

    # Links.

    def _link_up(self, event: LinkUp, now: float) -> list[Any]:
        link = self._links[event.link]
        link.up = True
        link.run_id = event.run_id
        actions: list[Any] = []
        for physical, subscription in link.places.items():
            location = Location(event.link, physical)
            place = subscription.targets.get(location)
            if place is not None:
                actions += self._listen(subscription, place)
            else:
                actions.append(Send(event.link, (b"SUBSCRIBE", physical), ("subscribe", subscription.channel)))
                actions += self._ask_for_markers(subscription)
        self._announced(event.link)[0].update(dict.fromkeys(link.places))
        return actions

    def _link_down(self, event: LinkDown, now: float) -> list[Any]:
        link = self._links[event.link]
        if not link.up:
            return []
        link.up = link.hears_inbox = False
        link.down_since = now
        link.unsubscribing.clear()
        self._hints.clear()
        actions: list[Any] = []
        for physical, subscription in list(link.places.items()):
            location = Location(event.link, physical)
            reason = f"the connection to server {event.link} was lost: {event.reason}"
            if subscription.ends_owed:
                self._forget_place(subscription, subscription.place(location), now)
                actions += self._ended_if_gone(subscription, now)
            elif location in subscription.targets:
                subscription.targets[location].disconnected()
                self._wish_failover(subscription, subscription.targets[location], now)
                if subscription.confirmed:
                    subscription.targets[location].lost = reason
                else:
                    subscription.begin_anew()
            elif subscription.verified():
                actions.append(GapDetected(subscription.channel, None, None, reason))
                actions += self._leave(subscription, subscription.leaving[location], now)
            else:
                subscription.leaving[location].disconnected()
                subscription.may_have_missed = reason
        return actions

    def _wish_failover(self, subscription: Subscription, place: Place, now: float) -> None:
        if len(subscription.route.assignment.servers) > 1:
            self._wish(now + self.options.failover_s, "failover", (subscription, place))

    def _fail_over(self, subscription: Subscription, place: Place, now: float) -> list[Any]:
        """A replica is still away: go to another one (ALL_PUBLISHERS), or do without it (ALL_SUBSCRIBERS)."""
        server = place.location.server
        current = subscription.targets.get(place.location) is place
        if not current or subscription.ends_owed or self._links[server].up or place.excused:
            return []
        if now - self._links[server].down_since < self.options.failover_s:
            return []
        self.counters["failovers"] += 1
        if subscription.route.assignment.mode is Mode.ALL_PUBLISHERS:
            subscription.turn += 1
            subscription.may_have_missed = subscription.may_have_missed or place.lost
            actions = self._leave(subscription, place, now)
            [location] = self._choose(subscription, subscription.route)
            return [*actions, *self._join(subscription, location, now)]
        place.excused = True
        if not subscription.verified():
            return []
        self._may_have_missed(subscription, place.lost or f"server {server} cannot be reached")
        return self._ready(subscription, now)

    # Messages.

    def _pushed(self, event: Pushed, now: float) -> list[Any]:
        actions: list[Any] = []
        delivered: list[tuple[bytes, bytes]] = []
        places = self._links[event.link].places
        for push in event.messages:
            if push[0] != b"message":
                more = []
                if push[0] == b"subscribe":
                    more = self._subscribed(event.link, push[1])
                elif push[0] == b"unsubscribe":
                    more = self._unsubscribed(event.link, push[1], now)
                if more:
                    if delivered:
                        actions.append(Deliver(delivered))
                        delivered = []
                    actions += more
                continue
            subscription = places.get(push[1])
            if subscription is None:
                if push[1] == self._inbox:
                    actions += self._marked(event.link, push[2], now)
                continue
            data: bytes = push[2]
            magic, flags, publisher, number, _ = unpack_header(data) if len(data) >= HEADER_BYTES else _NO_HEADER
            if magic != MAGIC or flags & ~KNOWN_FLAGS:
                if data[:3] == MAGIC:
                    self.counters["malformed_messages"] += 1
                if subscription.confirmed:
                    delivered.append((subscription.channel, data))
                else:
                    subscription.keep(data)
                continue
            if not flags & _UNUSUAL:
                stream = subscription.sequences.streams.get(publisher)
                if stream is not None and (expected := stream.next) is not None:
                    sequence = number >> QUIET_BITS
                    if sequence == expected and not stream.held:
                        stream.next = sequence + 1
                        if subscription.confirmed:
                            delivered.append((subscription.channel, data[HEADER_BYTES:]))
                        else:
                            subscription.keep(data[HEADER_BYTES:])
                        continue
                    if stream.begun_in_doubt_at <= sequence < expected:
                        continue  # a duplicate: many, while the channel moves
            more = self._unusual(subscription, event.link, push[1], open_envelope(data), now)
            if more:
                if delivered:
                    actions.append(Deliver(delivered))
                    delivered = []
                actions += more
        if delivered:
            actions.append(Deliver(delivered))
        return actions

    def _subscribed(self, link: str, physical: bytes) -> list[Any]:
        """A subscription takes effect: what came before on its channel was of an earlier one, or before a gap."""
        subscription = self._links[link].places.get(physical)
        if subscription is None:
            return []
        if not subscription.confirmed:
            subscription.begin_anew()
            return []
        place = subscription.targets.get(Location(link, physical))
        if place is None or place.lost is None or subscription.ends_owed:
            return []
        lost, place.lost = place.lost, None
        return [GapDetected(subscription.channel, None, None, lost)]

    def _unusual(
        self, subscription: Subscription, link: str, physical: bytes, envelope: Envelope, now: float
    ) -> list[Any]:
        """Take a message that is not simply the expected one of a known publisher."""
        if envelope.flags & CONTROL:
            return self._controlled(subscription, Location(link, physical), envelope.payload, now)
        flags = envelope.flags
        moving = subscription.leaving or subscription.ended_moving
        if moving and Location(link, physical) in subscription.targets:
            flags |= ROUTE_CHANGED  # what came here before this subscriber did is on its way to the place it is leaving
        owed = subscription.confirmed_at <= now - envelope.quiet_ms / 1000
        sequences = subscription.sequences
        outcomes = sequences.arrive(envelope.publisher, envelope.sequence, flags, envelope.payload, now, owed)
        self._watch(subscription, envelope.publisher)
        return self._outcomes(subscription, outcomes)

    def _watch(self, subscription: Subscription, publisher: int) -> None:
        if (expiry := subscription.sequences.watch(publisher)) is not None:
            self._wish(expiry, "expire", (subscription, publisher))

    def _outcomes(self, subscription: Subscription, outcomes: Sequence[bytes | Gap]) -> list[Any]:
        channel = subscription.channel
        actions: list[Any] = []
        for outcome in outcomes:
            if not subscription.confirmed:
                if not isinstance(outcome, Gap):  # what is missing was owed to nobody
                    subscription.keep(outcome)
            elif isinstance(outcome, Gap):
                actions.append(GapDetected(channel, outcome.publisher, outcome.count, outcome.reason))
            elif actions and isinstance(actions[-1], Deliver):
                actions[-1].messages.append((channel, outcome))
            else:
                actions.append(Deliver([(channel, outcome)]))
        return actions

    # What dispatchers say.

    def _controlled(self, subscription: Subscription, location: Location, payload: bytes, now: float) -> list[Any]:
        try:
            message = unpack_control(payload)
        except UnknownMode as error:
            return list(self._plan.too_old(error))
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        if subscription.ends_owed:
            return []
        match message:
            case RouteNotice(channel, route) if channel == subscription.channel:
                return self._noticed(subscription, location.server, route, now)
            case LossNotice(channel, lost) if channel == subscription.channel and subscription.confirmed:
                return [GapDetected(channel, None, lost, "a dispatcher could not forward messages")]
            case _:
                self.counters["unexpected_messages"] += 1
                return []

    def _noticed(self, subscription: Subscription, link: str, route: Route, now: float) -> list[Any]:
        """Follow a notice: soon, if the application is being served meanwhile."""
        spread_s = self.options.move_spread_s
        if not subscription.confirmed or not spread_s:
            return self._learned(subscription, link, route, now)
        if route.epoch > max(subscription.route.epoch, subscription.noticed_epoch):
            subscription.noticed_epoch = route.epoch
            delay_s = spread_s * ((self.client_id ^ route.epoch) % _SPREAD_STEPS) / _SPREAD_STEPS
            self._wish(now + delay_s, "move", (subscription, link, route))
        return []

    def _move(self, subscription: Subscription, link: str, route: Route, now: float) -> list[Any]:
        subscription.noticed_epoch = 0  # should the move not begin, the next notice counts
        current = self._subscriptions.get(subscription.channel) is subscription
        connected = link in self._links and self._links[link].up
        return self._learned(subscription, link, route, now) if current and connected else []

    def _marked(self, link: str, data: bytes, now: float) -> list[Any]:
        """Take a marker from the inbox at a server: it holds for every place there that is leaving."""
        try:
            message = unpack_control(open_envelope(data).payload)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        if not isinstance(message, Marker):
            self.counters["unexpected_messages"] += 1
            return []
        subscription = self._subscriptions.get(message.channel)
        if subscription is None or all(target.server != message.server for target in subscription.targets):
            return []
        for place in subscription.leaving.values():
            if place.location.server == link:
                number = max(message.number, place.marked.get(message.server, 0))
                place.marked = {**place.marked, message.server: number}
        return self._leave_marked(subscription, now)

    def _leave_marked(self, subscription: Subscription, now: float) -> list[Any]:
        """Leave the places to which markers of all targets have come."""
        if not subscription.leaving or not subscription.verified():
            return []
        targets = subscription.targets.values()
        marked = [p for p in subscription.leaving.values() if all(p.follows(target) for target in targets)]
        return [action for place in marked for action in self._leave(subscription, place, now)]

    # Time.

    def _wish(self, at: float, what: str, argument: Any) -> None:
        heapq.heappush(self._wishes, (at, next(self._wish_numbers), what, argument))

    def _tick(self, now: float) -> list[Any]:
        actions: list[Any] = []
        while self._wishes and self._wishes[0][0] <= now:
            _, _, what, argument = heapq.heappop(self._wishes)
            match what:
                case "expire":
                    subscription, publisher = argument
                    actions += self._expire(subscription, publisher, now)
                case "move":
                    subscription, link, route = argument
                    actions += self._move(subscription, link, route, now)
                case "failover":
                    subscription, place = argument
                    actions += self._fail_over(subscription, place, now)
                case "listen":
                    actions += self._listen_again(*argument)
                case "verify":
                    actions += self._verify_again(*argument)
                case "look again":
                    actions += self._look_again(argument, now)
                case "idle":
                    actions += self._close_idle(argument, now)
                case _:
                    for each in self._subscriptions.values():
                        each.sequences.forget_idle()
                    self._ended.clear()
                    self._wish(now + self.options.stream_idle_s, "forget", None)
        return actions

    def _expire(self, subscription: Subscription, publisher: int, now: float) -> list[Any]:
        if self._subscriptions.get(subscription.channel) is not subscription:
            return []
        outcomes = subscription.sequences.expire(publisher, now)
        self._watch(subscription, publisher)
        return self._outcomes(subscription, outcomes)

    def _listen_again(self, channel: bytes, server: str) -> list[Any]:
        """Subscribe again at the places of a channel at one server."""
        subscription = self._subscriptions.get(channel)
        if subscription is None or not self._links[server].up:
            return []
        places = [place for place in subscription.targets.values() if place.location.server == server]
        leaving = [location for location in subscription.leaving if location.server == server]
        again = [Send(server, (b"SUBSCRIBE", location.physical), ("subscribe", channel)) for location in leaving]
        return [*again, *(action for place in places for action in self._listen(subscription, place))]

    def _verify_again(self, subscription: Subscription, place: Place) -> list[Any]:
        current = subscription.targets.get(place.location) is place
        if not current or place.attempt or self._subscriptions.get(subscription.channel) is not subscription:
            return []
        return [self._verify(subscription, place)] if self._links[place.location.server].up else []

    def _look_again(self, subscription: Subscription, now: float) -> list[Any]:
        """A place is leaving for long: a marker was lost, or none will come, as the move is over."""
        waited_s, subscription.look_again_s = subscription.look_again_s, 0.0
        if not subscription.leaving or self._subscriptions.get(subscription.channel) is not subscription:
            return []
        subscription.look_again_s = min(2 * waited_s, self.options.look_again_s_max)
        self._wish(now + subscription.look_again_s, "look again", subscription)
        places = list(subscription.targets.values())
        again = [action for place in places for action in self._verify_again(subscription, place)]
        return [*again, *self._ask_for_markers(subscription)]

    def _close_idle(self, server: str, now: float) -> list[Any]:
        link = self._links.get(server)
        if link is None or link.idle_since is None or now - link.idle_since < self.options.link_idle_s:
            return []
        del self._links[server]
        return [Disconnect(server)]

    # The agents.

    def _announced(self, server: str) -> tuple[dict[bytes, None], list[bytes]]:
        return self._announce.setdefault(server, ({}, []))

    def _announcements(self) -> list[Any]:
        sends: list[Any] = []
        for server, (joined, left) in self._announce.items():
            link = self._links.get(server)
            if link is None or not link.up:
                continue
            names = tuple(joined)
            for first in range(0, max(len(names), len(left)), ANNOUNCED_MAX):
                some = slice(first, first + ANNOUNCED_MAX)
                number = next(self._announcement_numbers)
                message = Announcement(self.client_id, number, names[some], tuple(left[some]))
                sends.append(Send(server, (b"PUBLISH", ANNOUNCE_CHANNEL, pack_control(message))))
                self._note_announced(server, names[some], number)
        self._announce.clear()
        return sends

    def _note_announced(self, server: str, joined: Sequence[bytes], number: int) -> None:
        for physical in joined:
            subscription = self._links[server].places.get(physical)
            target = subscription.targets.get(Location(server, physical)) if subscription is not None else None
            if target is not None:
                target.announced = target.announced or number
