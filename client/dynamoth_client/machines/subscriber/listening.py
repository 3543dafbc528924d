"""Where a subscriber listens: its links, SUBSCRIBE and UNSUBSCRIBE on them, and what it announces to the agents.

Theory of operation
-------------------
There is a link to each server with a place, and to one without for ``link_idle_s`` more. To *join* a place is to send
SUBSCRIBE and, right behind it, the HMGET that verifies it; to *leave* one is to forget it and to send UNSUBSCRIBE. On a
link that is down nothing is sent: when it comes up, every place there is joined.

Behind what an event makes the machine send, each server is told which places were joined and left there
(:class:`Announcement`). The numbers of these are what markers answer: see ``moves.py``.

Nothing is decided here about which places these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from dynamoth.machine.events import Connect, Disconnect, Send
from dynamoth.machine.timers import Timers
from dynamoth.names import ANNOUNCE_CHANNEL, inbox
from dynamoth.plan.plan import Location
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import Announcement, pack_control
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.subscriber.subscription import Place, SubscriberLink, Subscription

ASK_PREFIX = "ask:"
"""Before the id of a server: the name of a link over which only questions are asked."""

ANNOUNCED_MAX = 1000
"""Channels of one announcement at most."""


class Listening:
    """The links of one subscriber, and its places there."""

    def __init__(self, client_id: int, local_plan: LocalPlan, timers: Timers[Any], link_idle_s: float) -> None:
        """Begin without links.

        Args:
            client_id: that of the subscriber.
            local_plan: has the URLs of servers.
            timers: those of the machine.
            link_idle_s: a link without a place for so long is closed.

        """
        self._client_id = client_id
        self._plan = local_plan
        self._timers = timers
        self._link_idle_s = link_idle_s
        self.inbox = inbox(client_id)
        #: Server to link.
        self.links: dict[str, SubscriberLink] = {}
        #: Server to physical channels joined and left during the present event, for the agent there.
        self.unannounced: dict[str, tuple[dict[bytes, None], list[bytes]]] = {}
        self._attempts = count(1)
        self._announcement_numbers = count(1)

    def is_up(self, server: str) -> bool:
        """Tell whether there is a link, and it is up."""
        link = self.links.get(server)
        return link is not None and link.up

    def another_than(self, server: str, now: float) -> tuple[str | None, list[Any]]:
        """Return a link to another server that is up; if there is none, None and what opens one to one more server.

        Such a link has a name of its own: nothing is subscribed to over it, and it says nothing of who can be reached.
        """
        for name, link in self.links.items():
            if link.up and name != server:
                return name, []
        asked = (name for name in self._plan.servers if name != server and name not in self.links)
        unknown = next((name for name in asked if ASK_PREFIX + name not in self.links), None)
        if unknown is None:
            return None, []
        asking = ASK_PREFIX + unknown
        self.links[asking] = SubscriberLink(down_since=now, idle_since=now)
        self._timers.add(now + self._link_idle_s, self._close_idle, asking)
        return None, [Connect(asking, self._plan.servers[unknown].url)]

    # Joining and leaving.

    def join(self, subscription: Subscription, location: Location, now: float) -> list[Any]:
        """Make a location a target of a subscription, and listen there when the link is up."""
        place = subscription.targets[location] = Place(location)
        link = self.links.get(location.server)
        actions: list[Any] = []
        if link is None:
            link = self.links[location.server] = SubscriberLink(down_since=now)
            actions.append(Connect(location.server, self._plan.servers[location.server].url))
        link.places[location.physical] = subscription
        link.idle_since = None
        self._to_announce(location.server)[0][location.physical] = None
        return [*actions, *self._listen(subscription, place)] if link.up else actions

    def _listen(self, subscription: Subscription, place: Place) -> list[Any]:
        """Subscribe and read the stored plan, in this order, on one connection."""
        return [self._subscribe(subscription, place.location), self.verify(subscription, place)]

    def _subscribe(self, subscription: Subscription, location: Location) -> Send:
        return Send(location.server, (b"SUBSCRIBE", location.physical), ("subscribe", subscription.channel))

    def verify(self, subscription: Subscription, place: Place) -> Send:
        """Read the plan stored at a target's server; the link is up."""
        place.attempt = next(self._attempts)
        command = stored_plan.read_entry(subscription.channel)
        return Send(place.location.server, command, ("verify", subscription.channel, place.location, place.attempt))

    def listen_again(self, subscription: Subscription, server: str) -> list[Any]:
        """Join again what a subscription has at one server."""
        if not self.is_up(server):
            return []
        targets = [place for place in subscription.targets.values() if place.location.server == server]
        leaving = [location for location in subscription.leaving if location.server == server]
        again = [self._subscribe(subscription, location) for location in leaving]
        return [*again, *(action for place in targets for action in self._listen(subscription, place))]

    def leave(self, subscription: Subscription, place: Place, now: float) -> list[Any]:
        """Listen no more at a place, whatever is on its way."""
        self.forget(subscription, place, now)
        return self.unsubscribe(place.location) if self.links[place.location.server].up else []

    def unsubscribe(self, location: Location) -> list[Any]:
        """Send UNSUBSCRIBE; the link is up. What is on its way is still taken until the place is forgotten."""
        self.links[location.server].unsubscribing[location.physical] += 1
        self._to_announce(location.server)[1].append(location.physical)
        return [Send(location.server, (b"UNSUBSCRIBE", location.physical), ("unsubscribe", location.physical))]

    def forget(self, subscription: Subscription, place: Place, now: float) -> None:
        """Take nothing more that comes to a place."""
        location = place.location
        subscription.targets.pop(location, None)
        subscription.leaving.pop(location, None)
        link = self.links[location.server]
        del link.places[location.physical]
        if not link.places:
            link.idle_since = now
            self._timers.add(now + self._link_idle_s, self._close_idle, location.server)

    # Links.

    def link_up(self, server: str, run_id: str | None) -> list[Any]:
        """Join every place at a server."""
        link = self.links[server]
        link.up = True
        link.has_failed = False
        link.run_id = run_id
        actions: list[Any] = []
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

    def link_down(self, server: str, now: float) -> list[tuple[Subscription, Location]]:
        """Note that a link that was up is down; return what listens there."""
        link = self.links[server]
        link.up = link.hears_inbox = False
        link.down_since = now
        link.has_failed = True
        link.unsubscribing.clear()
        return [(subscription, Location(server, physical)) for physical, subscription in link.places.items()]

    def attempt_failed(self, server: str) -> list[tuple[Subscription, Location]]:
        """Note that a link that is down could not be made; return what waits for it, after the first such attempt."""
        link = self.links[server]
        if link.has_failed:
            return []
        link.has_failed = True
        return [(subscription, Location(server, physical)) for physical, subscription in link.places.items()]

    def _close_idle(self, server: str, now: float) -> list[Any]:
        link = self.links.get(server)
        if link is None or link.idle_since is None or now - link.idle_since < self._link_idle_s:
            return []
        del self.links[server]
        return [Disconnect(server)]

    # The agents.

    def ask_for_markers(self, subscription: Subscription) -> list[Any]:
        """Announce the targets where it leaves other places, and listen to the inbox there, for the answers."""
        if not subscription.leaving:
            return []
        actions: list[Any] = []
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

    def announce(self) -> list[Any]:
        """Tell the agents what was joined and left during the present event."""
        sends: list[Any] = []
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
            target.announced = target.announced or number
            leaving.update((location.server, None) for location in subscription.leaving)
        return tuple(leaving)
