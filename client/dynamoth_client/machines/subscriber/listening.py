"""The links of a subscriber: SUBSCRIBE, UNSUBSCRIBE and verifications on them, and announcements to the agents.

Theory of operation
-------------------
There is a link to each server with a place, and to one without for ``link_idle_s`` more. To *join* a place is to send
SUBSCRIBE and, right behind it, the HMGET that verifies it; to *leave* one is to forget it and to send UNSUBSCRIBE. On a
link that is down nothing is sent: when it comes up, every place there is joined.

Behind the commands of each event, the agent of each server gets an :class:`Announcement` of the places that were joined
and left there. Markers answer its number: see ``routing.py``.

Which places these are is decided by :class:`~dynamoth_client.machines.subscriber.routing.Routing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from dynamoth.machine.events import Connect, Disconnect, Send
from dynamoth.names import ANNOUNCE_CHANNEL, inbox
from dynamoth.plan.plan import Location
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import Announcement, pack_control
from dynamoth_client.machines.register import acknowledge
from dynamoth_client.machines.subscriber.events import SubscriberAction
from dynamoth_client.machines.subscriber.part import Part, Shared
from dynamoth_client.machines.subscriber.subscription import Place, Subscription

ASK_PREFIX = "ask:"
"""Before the id of a server: the name of a link that carries questions only."""

ANNOUNCED_MAX = 1000
"""Channels of one announcement at most."""


@dataclass(slots=True, eq=False)
class SubscriberLink:
    """A connection to one server."""

    up: bool = False
    #: When the connection was lost, or the first one asked for. Only of use while it is down.
    down_since: float = 0.0
    #: The connection was lost, or an attempt to make one has failed, since it was up. Only of use while it is down.
    has_failed: bool = False
    run_id: str | None = None
    #: Whether the subscriber listens to its inbox there.
    hears_inbox: bool = False
    #: Physical channel to subscription, in the order of joining: the hot path's one look-up.
    places: dict[bytes, Subscription] = field(default_factory=dict[bytes, Subscription])
    #: Since when there has been no place; None while there is one.
    idle_since: float | None = None
    #: Physical channel to the number of UNSUBSCRIBEs that the server has not acknowledged. No value is 0.
    unsubscribing: Counter[bytes] = field(default_factory=Counter[bytes])


class Listening(Part):
    """The links of one subscriber, and its places there."""

    def __init__(self, shared: Shared) -> None:
        """Begin without links."""
        super().__init__(shared)
        self.inbox = inbox(shared.client_id)
        #: Server to link.
        self.links: dict[str, SubscriberLink] = {}
        #: Server to physical channels joined and left during the present event, for the agent there.
        self.unannounced: dict[str, tuple[dict[bytes, None], list[bytes]]] = {}
        self._attempts = count(1)
        self._announcement_numbers = count(1)

    def is_up(self, server: str) -> bool:
        """Return whether there is a link, and it is up."""
        link = self.links.get(server)
        return link is not None and link.up

    def another_than(self, server: str, now: float) -> tuple[str | None, list[SubscriberAction]]:
        """Return a link to another server that is up; if there is none, None and the action that opens one.

        Such a link has a name of its own: nothing is subscribed to over it, and its state does not say who can be
        reached. Each client begins with another server, as all clients of a dead server do this at the same time.
        """
        for name, link in self.links.items():
            if link.up and name != server:
                return name, []
        others = [name for name in self._plan.servers if name != server and name not in self.links]
        unknown = [name for name in others if ASK_PREFIX + name not in self.links]
        if not unknown:
            return None, []
        chosen = unknown[self._client_id % len(unknown)]
        asking = ASK_PREFIX + chosen
        self.links[asking] = SubscriberLink(down_since=now, idle_since=now)
        self._timers.add(now + self._options.link_idle_s, self._close_idle, asking)
        return None, [Connect(asking, self._plan.servers[chosen].url)]

    # Joining and leaving.

    def join(self, subscription: Subscription, location: Location, now: float) -> list[SubscriberAction]:
        """Make a location a target of a subscription, and listen there when the link is up."""
        place = subscription.join(location)
        link = self.links.get(location.server)
        actions: list[SubscriberAction] = []
        if link is None:
            link = self.links[location.server] = SubscriberLink(down_since=now)
            actions.append(Connect(location.server, self._plan.servers[location.server].url))
        link.places[location.physical] = subscription
        link.idle_since = None
        self._to_announce(location.server)[0][location.physical] = None
        return [*actions, *self._listen(subscription, place)] if link.up else actions

    def _listen(self, subscription: Subscription, place: Place) -> list[SubscriberAction]:
        """Subscribe and read the stored plan, in this order, on one connection."""
        return [self._subscribe(subscription, place.location), self.verify(subscription, place)]

    def _subscribe(self, subscription: Subscription, location: Location) -> Send:
        return Send(location.server, (b"SUBSCRIBE", location.physical), ("subscribe", subscription.channel))

    def verify(self, subscription: Subscription, place: Place) -> Send:
        """Read the plan stored at a target's server; the link is up."""
        place.ask(next(self._attempts))
        command = stored_plan.read_entry(subscription.channel)
        return Send(place.location.server, command, ("verify", subscription.channel, place.location, place.attempt))

    def listen_again(self, subscription: Subscription, server: str) -> list[SubscriberAction]:
        """Subscribe again to the places of a subscription at one server."""
        if not self.is_up(server):
            return []
        targets = [place for place in subscription.targets.values() if place.location.server == server]
        leaving = [location for location in subscription.leaving if location.server == server]
        again = [self._subscribe(subscription, location) for location in leaving]
        return [*again, *(action for place in targets for action in self._listen(subscription, place))]

    def leave(self, subscription: Subscription, place: Place, now: float) -> list[SubscriberAction]:
        """Leave a place at once; messages that are on their way are dropped."""
        self.forget(subscription, place, now)
        return self.unsubscribe(place.location) if self.links[place.location.server].up else []

    def unsubscribe(self, location: Location) -> list[SubscriberAction]:
        """Send UNSUBSCRIBE; the link is up. Messages are delivered until the place is forgotten."""
        self.links[location.server].unsubscribing[location.physical] += 1
        self._to_announce(location.server)[1].append(location.physical)
        return [Send(location.server, (b"UNSUBSCRIBE", location.physical), ("unsubscribe", location.physical))]

    def forget(self, subscription: Subscription, place: Place, now: float) -> None:
        """Leave a place without UNSUBSCRIBE; messages that still come are dropped."""
        location = place.location
        subscription.leave(location)
        link = self.links[location.server]
        del link.places[location.physical]
        if not link.places:
            link.idle_since = now
            self._timers.add(now + self._options.link_idle_s, self._close_idle, location.server)

    # Links.

    def on_link_up(self, server: str, run_id: str | None) -> list[SubscriberAction]:
        """Join every place at a server."""
        link = self.links[server]
        link.up = True
        link.has_failed = False
        link.run_id = run_id
        actions: list[SubscriberAction] = []
        for physical, subscription in link.places.items():
            location = Location(server, physical)
            place = subscription.targets.get(location)
            if place is not None:
                actions += self._listen(subscription, place)
            else:
                actions.append(self._subscribe(subscription, location))
                actions += self.ask_for_markers(subscription)
        self._to_announce(server)[0].update(dict.fromkeys(link.places))
        return actions

    def on_link_down(self, server: str, now: float) -> list[tuple[Subscription, Location]]:
        """Note that a link that was up is down; return who listens there, and where."""
        link = self.links[server]
        link.up = link.hears_inbox = False
        link.down_since = now
        link.has_failed = True
        link.unsubscribing.clear()
        return [(subscription, Location(server, physical)) for physical, subscription in link.places.items()]

    def on_attempt_failed(self, server: str) -> list[tuple[Subscription, Location]]:
        """Note a failed attempt to connect; return, after the first, the waiting subscriptions and their locations."""
        link = self.links[server]
        if link.has_failed:
            return []
        link.has_failed = True
        return [(subscription, Location(server, physical)) for physical, subscription in link.places.items()]

    def on_unsubscribed(self, server: str, physical: bytes) -> Subscription | None:
        """Note that the server has done an UNSUBSCRIBE; return who listened there, unless it is under way again."""
        link = self.links[server]
        return link.places.get(physical) if acknowledge(link.unsubscribing, physical) else None

    def _close_idle(self, server: str, now: float) -> list[SubscriberAction]:
        link = self.links.get(server)
        if link is None or link.idle_since is None or now - link.idle_since < self._options.link_idle_s:
            return []
        del self.links[server]
        return [Disconnect(server)]

    # The agents.

    def ask_for_markers(self, subscription: Subscription) -> list[SubscriberAction]:
        """Announce the targets of a moving channel, and listen to the inbox at the places that it leaves."""
        if not subscription.leaving:
            return []
        actions: list[SubscriberAction] = []
        for server in dict.fromkeys(location.server for location in subscription.leaving):
            link = self.links[server]
            if link.up and not link.hears_inbox:
                link.hears_inbox = True
                actions.append(Send(server, (b"SUBSCRIBE", self.inbox), ("inbox",)))
        for location in subscription.targets:
            self._to_announce(location.server)[0][location.physical] = None
        return actions

    def _to_announce(self, server: str) -> tuple[dict[bytes, None], list[bytes]]:
        return self.unannounced.setdefault(server, ({}, []))

    def announce(self) -> list[SubscriberAction]:
        """Announce to agents what was joined and left during the present event."""
        sends: list[SubscriberAction] = []
        for server, (joined, left) in self.unannounced.items():
            if not self.is_up(server):
                continue
            names = tuple(joined)
            for first in range(0, max(len(names), len(left)), ANNOUNCED_MAX):
                some = slice(first, first + ANNOUNCED_MAX)
                number = next(self._announcement_numbers)
                leaving = self._note_announced(server, names[some], number)
                message = Announcement(self._client_id, number, names[some], tuple(left[some]), leaving)
                sends.append(Send(server, (b"PUBLISH", ANNOUNCE_CHANNEL, pack_control(message))))
        self.unannounced.clear()
        return sends

    def _note_announced(self, server: str, joined: Sequence[bytes], number: int) -> tuple[str, ...]:
        """Note the number where it counts; return the servers of the places that are being left for what was joined."""
        leaving: dict[str, None] = {}
        for physical in joined:
            subscription = self.links[server].places.get(physical)
            if subscription is None or (target := subscription.targets.get(Location(server, physical))) is None:
                continue
            target.announce(number)
            leaving.update((location.server, None) for location in subscription.leaving)
        return tuple(leaving)

    def check(self, subscriptions: Iterable[Subscription]) -> None:
        """Assert the invariants that hold between events; ``subscriptions`` are all that are registered."""
        assert not self.unannounced, f"not announced: {self.unannounced}"
        listed = {Location(id_, name): whose for id_, link in self.links.items() for name, whose in link.places.items()}
        for subscription in subscriptions:
            for place in subscription.places:
                whose = listed.pop(place.location, None)
                assert whose is subscription, f"{place.location} of {subscription.channel!r} is listed for {whose}"
                link = self.links[place.location.server]
                assert link.up or not (place.verified or place.attempt or place.announced), f"link is down: {place}"
                is_left = place.location in subscription.leaving
                assert not (is_left and link.up) or link.hears_inbox, f"no marker can come to {place.location}"
        assert not listed, f"links list places of nobody: {listed}"
        for server, link in self.links.items():
            assert (link.idle_since is None) == bool(link.places), f"link {server} idle since {link.idle_since}"
            assert link.up or not (link.unsubscribing or link.hears_inbox), f"link {server} is down: {link}"
