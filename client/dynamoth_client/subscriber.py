"""The subscriber machine: listens in the right places, moves make-before-break, delivers once and in order.

Theory of operation
-------------------
For each channel there is a :class:`_Subscription` with a route that it follows and *places*, the locations where it
listens:

* ``targets``: those of the route. A place is *joined* by SUBSCRIBE, and *verified* by an HMGET of the plan stored at
  the same server, sent right behind it on the same link, when the stored plan says that the route is right. When
  every target is verified for the first time the subscription is confirmed to the application.
* ``leaving``: those of older routes. One is left when a marker of every target has come round (see :class:`_Place`).

A newer route comes from a notice of a dispatcher or from the stored plan; its locations become the targets and the
old targets are leaving. What is delivered goes through the :class:`Sequences` of the channel, so that it does not
matter in how many places a message is seen.

After a lost connection every place at that server is joined and verified again, and the application gets a gap event
for each confirmed channel there, as messages may have been missed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from dynamoth.errors import MalformedMessage
from dynamoth.events import Connect, Disconnect, ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import ANNOUNCE_CHANNEL, RESERVED_PREFIX
from dynamoth.plan import Location, Mode, Phase, Route
from dynamoth_client.local_plan import LocalPlan
from dynamoth_client.sequences import Gap, Sequences

_SPREAD_STEPS = 1024

_UNUSUAL = CONTROL | HEARTBEAT | RAW

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
    move_spread_s: float = 0.05
    """A subscriber that is told of a move waits for up to so long, each another time, lest all move at once; 0: not."""
    distrust_s: float = 5.0
    """A route that came from a notice and is not confirmed by its server for so long is given up for the stored
    plan's."""
    reverify_s: float = 2.0
    """How often the route is verified again while a place is leaving."""
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
    """Action: nothing of the channel is delivered any more."""

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


@dataclass(slots=True)
class _Place:
    """A location where a subscription listens, or is about to."""

    location: Location
    #: Number of the verification whose reply is awaited; 0 when none is.
    attempt: int = 0
    #: The stored plan said, on the present connection, that this is right.
    verified: bool = False
    #: The dispatcher's incarnation and the number of its first marker seen here on the present connection.
    first_marker: tuple[int, int] | None = None
    #: Server to incarnation and number of the latest marker of its dispatcher that has come round to here.
    rounds: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def disconnected(self) -> None:
        """Forget what was true of the connection that was lost."""
        self.attempt = 0
        self.verified = False
        self.first_marker = None
        self.rounds.clear()

    def follows(self, target: _Place) -> bool:
        """Tell whether everything that ``target``'s server got before we joined there has come round to here.

        The same marker, or a later one, was seen here as there; in which of the two first does not matter.
        """
        first, latest = target.first_marker, self.rounds.get(target.location.server)
        return first is not None and latest is not None and first[0] == latest[0] and first[1] <= latest[1]


@dataclass(slots=True)
class _Subscription:
    """One channel of one PubSub."""

    channel: bytes
    route: Route
    sequences: Sequences
    targets: dict[Location, _Place] = field(default_factory=dict[Location, _Place])
    leaving: dict[Location, _Place] = field(default_factory=dict[Location, _Place])
    #: Whether the application has been told. Never goes back.
    confirmed: bool = False
    confirmed_at: float = float("inf")
    #: Confirmations that the application waits for.
    confirmations_owed: int = 1
    #: Set while a connection was lost and its places are not verified again: the gap event to come.
    may_have_missed: str | None = None
    #: The epoch of a notice that is to be followed soon; 0 for none.
    noticed_epoch: int = 0
    #: Whether a wish to verify again while a place is leaving is pending.
    reverifying: bool = False
    #: When the present route was taken; see ``distrust_s``.
    followed_since: float = 0.0

    def verified(self) -> bool:
        """Tell whether every target is."""
        return all(place.verified for place in self.targets.values())


@dataclass(slots=True)
class _Link:
    """A connection to one server."""

    up: bool = False
    run_id: str | None = None
    #: Location to place, of all subscriptions, in the order of joining.
    places: dict[bytes, _Subscription] = field(default_factory=dict[bytes, "_Subscription"])
    idle_since: float | None = None


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
        self._subscriptions: dict[bytes, _Subscription] = {}
        #: What was delivered of channels that were unsubscribed, oldest first: nothing of it may come again.
        self._ended: dict[bytes, Sequences] = {}
        #: Physical channel to subscription: the hot path's one look-up.
        self._by_physical: dict[bytes, _Subscription] = {}
        self._links: dict[str, _Link] = {}
        self._attempts = count(1)
        #: (time, tie-breaker, what, argument): wishes for a later time. A wish may be out of date when its time comes.
        self._wishes: list[tuple[float, int, str, Any]] = []
        self._wish_numbers = count()
        #: Routes to servers that the local plan did not list when it was told of them.
        self._hints: dict[bytes, Route] = {}
        #: Server to channels joined and left during the present event, for the LLA there.
        self._announce: dict[str, tuple[list[bytes], list[bytes]]] = {}

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
        subscription = self._subscriptions.get(channel)
        if subscription is not None:
            if subscription.confirmed:
                return [SubscriptionConfirmed(channel)]
            subscription.confirmations_owed += 1
            return []
        if channel.startswith(RESERVED_PREFIX):
            return [SubscriptionFailed(channel, "channels under this prefix are Dynamoth's own: choose another name")]
        route = self._plan.route(channel)
        sequences = self._ended.pop(channel, None) or Sequences(self.options.hold_s_max)
        sequences.resume()
        subscription = _Subscription(channel, route, sequences, followed_since=now)
        self._subscriptions[channel] = subscription
        self._plan.pin(channel)
        return [
            action for location in self._choose(channel, route) for action in self._join(subscription, location, now)
        ]

    def _unsubscribe(self, channel: bytes, now: float) -> list[Any]:
        subscription = self._subscriptions.pop(channel, None)
        if subscription is None:
            return [SubscriptionEnded(channel)]
        missed = subscription.may_have_missed if subscription.confirmed else None
        actions: list[Any] = [] if missed is None else [GapDetected(channel, None, None, missed)]
        subscription.confirmed = False
        self._ended[channel] = subscription.sequences
        if len(self._ended) > self.options.ended_max:
            del self._ended[next(iter(self._ended))]
        self._plan.unpin(channel, now)
        places = [*subscription.targets.values(), *subscription.leaving.values()]
        actions += [action for place in places for action in self._leave(subscription, place, now)]
        return [*actions, SubscriptionEnded(channel)]

    def _choose(self, channel: bytes, route: Route) -> tuple[Location, ...]:
        """Return the locations of ``route`` where this subscriber listens; the same for one epoch."""
        locations = route.locations(channel)
        if route.assignment.mode is Mode.ALL_PUBLISHERS:
            return (locations[(self.client_id ^ route.epoch) % len(locations)],)
        return locations

    # Places.

    def _join(self, subscription: _Subscription, location: Location, now: float) -> list[Any]:
        place = subscription.targets[location] = _Place(location)
        self._by_physical[location.physical] = subscription
        link = self._links.get(location.server)
        actions: list[Any] = []
        if link is None:
            link = self._links[location.server] = _Link()
            actions.append(Connect(location.server, self._plan.servers[location.server].url))
        link.places[location.physical] = subscription
        link.idle_since = None
        self._announced(location.server)[0].append(subscription.channel)
        if link.up:
            actions += self._listen(subscription, place)
        return actions

    def _listen(self, subscription: _Subscription, place: _Place) -> list[Any]:
        """Subscribe and read the stored plan, in this order, on one connection."""
        return [
            Send(place.location.server, (b"SUBSCRIBE", place.location.physical), ("subscribe", subscription.channel)),
            self._verify(subscription, place),
        ]

    def _verify(self, subscription: _Subscription, place: _Place) -> Send:
        place.attempt = next(self._attempts)
        command = stored_plan.read_entry(subscription.channel)
        return Send(place.location.server, command, ("verify", subscription.channel, place.location, place.attempt))

    def _leave(self, subscription: _Subscription, place: _Place, now: float) -> list[Any]:
        location = place.location
        subscription.targets.pop(location, None)
        subscription.leaving.pop(location, None)
        link = self._links[location.server]
        del link.places[location.physical]
        if not link.places:
            link.idle_since = now
            self._wish(now + self.options.link_idle_s, "idle", location.server)
        if not any(location.physical in other.places for other in self._links.values()):
            del self._by_physical[location.physical]
        self._announced(location.server)[1].append(subscription.channel)
        return [Send(location.server, (b"UNSUBSCRIBE", location.physical))] if link.up else []

    def _follow(self, subscription: _Subscription, route: Route, now: float) -> list[Any]:
        """Make the locations of ``route`` the targets; its servers are in the local plan."""
        subscription.route = route
        subscription.followed_since = now
        wanted = self._choose(subscription.channel, route)
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
                subscription.leaving[location] = place
            else:
                actions += self._leave(subscription, place, now)
        if subscription.leaving and not subscription.reverifying:
            subscription.reverifying = True
            self._wish(now + self.options.reverify_s, "reverify", subscription)
        return actions

    def _learned(self, subscription: _Subscription, link: str, route: Route, now: float) -> list[Any]:
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
            case ("header",):
                return self._header_read(event, now)
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
        if channel not in self._subscriptions:
            return []
        actions = self._unsubscribe(channel, now)
        return [*actions[:-1], SubscriptionFailed(channel, reason)]

    def _verified(self, subscription: _Subscription, place: _Place, reply: Any, now: float) -> list[Any]:
        """Judge a place by what the plan stored at its server says."""
        if isinstance(reply, ErrorReply):
            self.counters["refused_commands"] += 1
            if str(reply).startswith(_NO_PERMISSION) and not subscription.confirmed:
                return self._refused(subscription.channel, f"the stored plan cannot be read: {reply}", now)
            return self._retry(place, subscription, now)
        location = place.location
        try:
            stored = stored_plan.parse_entry(reply, self._links[location.server].run_id)
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
            self.counters["distrusted_routes"] += 1
            self._plan.distrust(subscription.channel, told)
            return self._follow(subscription, told, now)
        return self._retry(place, subscription, now)

    def _retry(self, place: _Place, subscription: _Subscription, now: float) -> list[Any]:
        self._wish(now + self.options.verify_retry_s, "verify", (subscription, place))
        return []

    def _right(self, subscription: _Subscription, place: _Place, told: Route, phase: Phase, now: float) -> list[Any]:
        """The place is right. ``told`` may be newer than the route followed and name the same place."""
        actions: list[Any] = []
        if told.epoch > subscription.route.epoch:
            self._plan.learn(subscription.channel, told, now)
            actions += self._follow(subscription, told, now)
        elif told.epoch < subscription.route.epoch and phase is not Phase.PREPARED:
            self.counters["distrusted_routes"] += 1
            self._plan.distrust(subscription.channel, told)
            actions += self._follow(subscription, told, now)
        place.verified = True
        if not subscription.verified():
            return actions
        channel = subscription.channel
        if phase is Phase.SETTLED and subscription.leaving:
            subscription.may_have_missed = subscription.may_have_missed or "the move ended while this client was away"
            for old in list(subscription.leaving.values()):
                actions += self._leave(subscription, old, now)
        if subscription.confirmed and subscription.may_have_missed is not None:
            actions.append(GapDetected(channel, None, None, subscription.may_have_missed))
        subscription.may_have_missed = None
        if not subscription.confirmed:
            subscription.confirmed = True
            subscription.confirmed_at = now
        actions += [SubscriptionConfirmed(channel)] * subscription.confirmations_owed
        subscription.confirmations_owed = 0
        return [*actions, *self._leave_rounded(subscription, now)]

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
        channels = [subscription.channel for subscription in link.places.values()]
        self._announced(event.link)[0].extend(channels)
        return actions

    def _link_down(self, event: LinkDown, now: float) -> list[Any]:
        link = self._links[event.link]
        if not link.up:
            return []
        link.up = False
        self._hints.clear()
        actions: list[Any] = []
        for physical, subscription in list(link.places.items()):
            location = Location(event.link, physical)
            reason = f"the connection to server {event.link} was lost: {event.reason}"
            if location in subscription.targets:
                subscription.targets[location].disconnected()
                if subscription.confirmed:
                    subscription.may_have_missed = reason
                else:
                    subscription.sequences.resume()
            elif subscription.verified():
                actions.append(GapDetected(subscription.channel, None, None, reason))
                actions += self._leave(subscription, subscription.leaving[location], now)
            else:
                subscription.may_have_missed = reason
        return actions

    # Messages.

    def _pushed(self, event: Pushed, now: float) -> list[Any]:
        actions: list[Any] = []
        delivered: list[tuple[bytes, bytes]] = []
        by_physical = self._by_physical
        for push in event.messages:
            if push[0] != b"message":
                if push[0] == b"subscribe":
                    self._subscribed(push[1])
                continue
            subscription = by_physical.get(push[1])
            if subscription is None:
                continue
            data: bytes = push[2]
            if data[:3] != MAGIC or len(data) < HEADER_BYTES or data[3] & ~KNOWN_FLAGS:
                if data[:3] == MAGIC:
                    self.counters["malformed_messages"] += 1
                if subscription.confirmed:
                    delivered.append((subscription.channel, data))
                continue
            _, flags, publisher, number, _ = unpack_header(data)
            sequence = number >> QUIET_BITS
            stream = subscription.sequences.streams.get(publisher)
            if stream is not None and not flags & _UNUSUAL and (expected := stream.next) is not None:
                if sequence == expected and not stream.held:
                    stream.next = sequence + 1
                    if subscription.confirmed:
                        delivered.append((subscription.channel, data[HEADER_BYTES:]))
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

    def _subscribed(self, physical: bytes) -> None:
        """A subscription takes effect: what came before, on its channel, was of an earlier one."""
        subscription = self._by_physical.get(physical)
        if subscription is not None and not subscription.confirmed:
            subscription.sequences.resume()

    def _unusual(
        self, subscription: _Subscription, link: str, physical: bytes, envelope: Envelope, now: float
    ) -> list[Any]:
        """Take a message that is not simply the expected one of a known publisher."""
        if envelope.flags & CONTROL:
            return self._controlled(subscription, Location(link, physical), envelope.payload, now)
        flags = envelope.flags
        if subscription.leaving and Location(link, physical) in subscription.targets:
            flags |= ROUTE_CHANGED  # what came here before this subscriber did is on its way to the place it is leaving
        owed = subscription.confirmed_at <= now - envelope.quiet_ms / 1000
        sequences = subscription.sequences
        outcomes = sequences.arrive(envelope.publisher, envelope.sequence, flags, envelope.payload, now, owed)
        self._watch(subscription, envelope.publisher)
        return self._outcomes(subscription, outcomes)

    def _watch(self, subscription: _Subscription, publisher: int) -> None:
        if (expiry := subscription.sequences.watch(publisher)) is not None:
            self._wish(expiry, "expire", (subscription, publisher))

    def _outcomes(self, subscription: _Subscription, outcomes: Sequence[bytes | Gap]) -> list[Any]:
        if not subscription.confirmed:
            return []
        channel = subscription.channel
        actions: list[Any] = []
        for outcome in outcomes:
            if isinstance(outcome, Gap):
                actions.append(GapDetected(channel, outcome.publisher, outcome.count, outcome.reason))
            elif actions and isinstance(actions[-1], Deliver):
                actions[-1].messages.append((channel, outcome))
            else:
                actions.append(Deliver([(channel, outcome)]))
        return actions

    # What dispatchers say.

    def _controlled(self, subscription: _Subscription, location: Location, payload: bytes, now: float) -> list[Any]:
        try:
            message = unpack_control(payload)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        match message:
            case RouteNotice(channel, route) if channel == subscription.channel:
                return self._noticed(subscription, location.server, route, now)
            case Marker(channel, server, incarnation, number) if channel == subscription.channel:
                return self._marked(subscription, location, server, incarnation, number, now)
            case LossNotice(channel, lost) if channel == subscription.channel and subscription.confirmed:
                return [GapDetected(channel, None, lost, "a dispatcher could not forward messages")]
            case _:
                self.counters["unexpected_messages"] += 1
                return []

    def _noticed(self, subscription: _Subscription, link: str, route: Route, now: float) -> list[Any]:
        """Follow a notice: soon, if the application is being served meanwhile."""
        spread_s = self.options.move_spread_s
        if not subscription.confirmed or not spread_s:
            return self._learned(subscription, link, route, now)
        if route.epoch > max(subscription.route.epoch, subscription.noticed_epoch):
            subscription.noticed_epoch = route.epoch
            delay_s = spread_s * ((self.client_id ^ route.epoch) % _SPREAD_STEPS) / _SPREAD_STEPS
            self._wish(now + delay_s, "move", (subscription, link, route))
        return []

    def _move(self, subscription: _Subscription, link: str, route: Route, now: float) -> list[Any]:
        subscription.noticed_epoch = 0  # should the move not begin, the next notice counts
        current = self._subscriptions.get(subscription.channel) is subscription
        connected = link in self._links and self._links[link].up
        return self._learned(subscription, link, route, now) if current and connected else []

    def _marked(
        self, subscription: _Subscription, location: Location, server: str, incarnation: int, number: int, now: float
    ) -> list[Any]:
        target = subscription.targets.get(location)
        if target is None:
            if (old := subscription.leaving.get(location)) is not None:
                old.rounds[server] = incarnation, number
        elif server == location.server and (target.first_marker is None or target.first_marker[0] != incarnation):
            target.first_marker = incarnation, number
        return self._leave_rounded(subscription, now)

    def _leave_rounded(self, subscription: _Subscription, now: float) -> list[Any]:
        """Leave the places to which a marker of every target has come round."""
        if not subscription.leaving or not subscription.verified():
            return []
        targets = subscription.targets.values()
        rounded = [p for p in subscription.leaving.values() if all(p.follows(target) for target in targets)]
        return [action for place in rounded for action in self._leave(subscription, place, now)]

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
                case "listen":
                    actions += self._listen_again(*argument)
                case "verify":
                    actions += self._verify_again(*argument)
                case "reverify":
                    actions += self._reverify(argument, now)
                case "idle":
                    actions += self._close_idle(argument, now)
                case _:
                    for each in self._subscriptions.values():
                        each.sequences.forget_idle()
                    self._ended.clear()
                    self._wish(now + self.options.stream_idle_s, "forget", None)
        return actions

    def _expire(self, subscription: _Subscription, publisher: int, now: float) -> list[Any]:
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

    def _verify_again(self, subscription: _Subscription, place: _Place) -> list[Any]:
        current = subscription.targets.get(place.location) is place
        if not current or place.attempt or self._subscriptions.get(subscription.channel) is not subscription:
            return []
        return [self._verify(subscription, place)] if self._links[place.location.server].up else []

    def _reverify(self, subscription: _Subscription, now: float) -> list[Any]:
        """A place is leaving for long: markers may never come, for the move is over or its dispatcher is down."""
        subscription.reverifying = False
        if not subscription.leaving or self._subscriptions.get(subscription.channel) is not subscription:
            return []
        subscription.reverifying = True
        self._wish(now + self.options.reverify_s, "reverify", subscription)
        places = list(subscription.targets.values())
        return [action for place in places for action in self._verify_again(subscription, place)]

    def _close_idle(self, server: str, now: float) -> list[Any]:
        link = self._links.get(server)
        if link is None or link.idle_since is None or now - link.idle_since < self.options.link_idle_s:
            return []
        del self._links[server]
        return [Disconnect(server)]

    # The LLA.

    def _announced(self, server: str) -> tuple[list[bytes], list[bytes]]:
        return self._announce.setdefault(server, ([], []))

    def _announcements(self) -> list[Any]:
        sends: list[Any] = []
        for server, (joined, left) in self._announce.items():
            link = self._links.get(server)
            if link is None or not link.up:
                continue
            for first in range(0, max(len(joined), len(left)), ANNOUNCED_MAX):
                some = slice(first, first + ANNOUNCED_MAX)
                message = Announcement(self.client_id, tuple(joined[some]), tuple(left[some]))
                sends.append(Send(server, (b"PUBLISH", ANNOUNCE_CHANNEL, pack_control(message))))
        self._announce.clear()
        return sends
