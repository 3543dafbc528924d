"""Decides where a publisher's messages go: by the local plan, notices of dispatchers, and the stored plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import Replied, Send
from dynamoth.plan.compatibility import Compatibility
from dynamoth.plan.plan import Location, Mode, Route
from dynamoth.protocol import stored_plan
from dynamoth_client.machines.publisher.events import PublisherAction
from dynamoth_client.machines.publisher.part import Part, Shared
from dynamoth_client.machines.publisher.records import PublisherServer
from dynamoth_client.machines.standalone import ALONE


class PublisherRoutes(Part):
    """The routes of one publisher's channels."""

    def __init__(self, shared: Shared) -> None:
        """Begin with the routes of the local plan."""
        super().__init__(shared)
        #: Channel to a newer route whose servers the local plan does not list. While there is one, a header is read.
        self._hints: dict[bytes, Route] = {}
        #: Channels whose stored entry came with another ring.
        self._of_other_ring: set[bytes] = set()
        #: Channel to the time of its latest regular reading: no dispatcher can notify a publisher of plain messages.
        self._read_at: dict[bytes, float] = {}
        #: Servers whose compatibility rules are being read.
        self._rules_asked: set[str] = set()

    def find(self, name: bytes) -> tuple[tuple[Location, ...], int]:
        """Return where the local plan now sends messages of a channel, and its epoch."""
        route = self._plan.plain_route(name) or self._plan.route(name)
        locations = route.published_at(self._client_id, name)
        if route.assignment.mode is Mode.ALL_SUBSCRIBERS and self._is_avoided(locations[0]):
            replicas = route.locations(name)
            first = replicas.index(locations[0])
            others = (place for place in (*replicas[first:], *replicas[:first]) if not self._is_avoided(place))
            locations = (next(others, locations[0]),)
        return locations, route.epoch

    def _is_avoided(self, location: Location) -> bool:
        server = self._servers.get(location.server)
        return server is not None and server.avoided

    def forget(self, channels: Iterable[bytes]) -> None:
        """Forget when the routes of channels were read."""
        for channel in channels:
            self._read_at.pop(channel, None)

    def read_regularly(self, channel: bytes, locations: tuple[Location, ...], now: float) -> list[PublisherAction]:
        """Read the stored plan now and then: without envelopes no dispatcher can notify this publisher."""
        if now - self._read_at.get(channel, float("-inf")) < self._options.route_change_window_s:
            return []
        server_id = next((place.server for place in locations if self._servers[place.server].up), None)
        if server_id is None:
            return []
        self._read_at[channel] = now
        if server_id == ALONE:
            return [Send(server_id, stored_plan.READ_HEADER, ("header",))]
        return [Send(server_id, stored_plan.read_entry(channel), ("entry", channel))]

    # Compatibility rules.

    def is_plain(self, name: bytes) -> bool:
        """Return whether messages on a channel go out without envelopes."""
        return not self._options.envelope or self._plan.plain_route(name) is not None

    def on_rules_changed(self, link: str, version: int) -> list[PublisherAction]:
        """Handle a dispatcher's notice: read the rules of its server if they are newer than the known ones."""
        return [] if version <= self._plan.rules_version else self.read_rules(link)

    def read_rules(self, link: str) -> list[PublisherAction]:
        """Read the rules that a server stores, once at a time."""
        if link in self._rules_asked:
            return []
        self._rules_asked.add(link)
        return [Send(link, stored_plan.READ_RULES, ("rules",))]

    def on_rules(self, event: Replied, server: PublisherServer) -> list[PublisherAction]:
        """Handle the rules that a server stores."""
        self._rules_asked.discard(event.link)
        try:
            rules = stored_plan.parse_rules(event.value, server.run_id)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        return [] if rules is None else self._follow_rules(event.link, rules)

    def _follow_rules(self, link: str, rules: Compatibility) -> list[PublisherAction]:
        if self._plan.follow_rules(rules) or self._hints:
            return []
        return [Send(link, stored_plan.READ_HEADER, ("header",))]

    def forget_asked(self, link: str) -> None:
        """Forget the readings that a lost link will not answer, and the routes that wait for a header."""
        self._rules_asked.discard(link)
        self._hints.clear()
        self._of_other_ring.clear()

    # Routes.

    def on_route_notice(self, link: str, channel: bytes, route: Route, now: float) -> list[PublisherAction]:
        """Handle a dispatcher's notice about a channel that is published to."""
        if route.epoch <= self._plan.epoch(channel):
            return self._doubt(link, channel, route)
        return self._learn(link, channel, route, now)

    def _learn(self, link: str, channel: bytes, route: Route, now: float) -> list[PublisherAction]:
        """Follow a newer route: at once, or when the header of the plan lists its servers."""
        if self._plan.reachable(route):
            self._plan.learn(channel, route, now)
            return []
        is_asked = bool(self._hints)
        self._hints[channel] = route
        return [] if is_asked else [Send(link, stored_plan.READ_HEADER, ("header",))]

    def _doubt(self, link: str, channel: bytes, route: Route) -> list[PublisherAction]:
        """Read the entry at a server whose dispatcher notifies of an older route: the plan may have been lost."""
        if not self._contradicts(channel, link, route):
            return []
        return [Send(link, stored_plan.read_entry(channel), ("doubt", channel))]

    def on_doubt(self, channel: bytes, event: Replied, server: PublisherServer) -> list[PublisherAction]:
        """Give up a route to a server whose own stored plan sends the channel elsewhere."""
        route, actions = self._stored_route(channel, event.link, event.value, server)
        if route is not None and self._contradicts(channel, event.link, route) and self._plan.reachable(route):
            self._counters["distrusted_routes"] += 1
            self._plan.distrust(channel, route)
        return actions

    def _contradicts(self, channel: bytes, server_id: str, route: Route) -> bool:
        """Return whether our route leads to a server, and ``route`` to none of our locations."""
        ours = self.find(channel)[0]
        return any(place.server == server_id for place in ours) and set(ours).isdisjoint(route.locations(channel))

    def on_header(self, event: Replied, server: PublisherServer, now: float) -> None:
        """Handle the header of a stored plan: it lists servers that routes name."""
        try:
            header = stored_plan.parse_header(event.value, server.run_id)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            header = None
        if header is not None and header.believed:
            self._plan.update_header(header.plan)
        for channel, route in self._hints.items():
            if not self._plan.learn(channel, route, now):
                self._counters["distrusted_hints"] += 1
        self._hints.clear()
        self._of_other_ring.clear()

    def on_entry(
        self, channel: bytes, link: str, value: Any, server: PublisherServer, now: float
    ) -> list[PublisherAction]:
        """Handle a channel's stored entry, and the compatibility rules that come with it."""
        route, actions = self._stored_route(channel, link, value, server)
        if route is not None and route.epoch > self._plan.epoch(channel):
            actions += self._learn(link, channel, route, now)
        return actions

    def note_version(self, version: int, server: PublisherServer) -> None:
        """Note the version of the plan that a server stores; a new one puts the routes of its channels in doubt."""
        server.missing_since = float("inf")
        if server.version not in (None, version):
            self._plan.touch()
        server.version = version

    def waits_for_header(self, channel: bytes) -> bool:
        """Return whether the route is unknown until a header comes: its server is not listed, or the ring is new."""
        return channel in self._hints or channel in self._of_other_ring

    def _stored_route(
        self, channel: bytes, link: str, value: Any, server: PublisherServer
    ) -> tuple[Route | None, list[PublisherAction]]:
        """Return the route that a stored plan has for clients, None if it cannot be read; and actions."""
        server.has_plan = True
        try:
            stored = stored_plan.parse_entry(value, server.run_id)
        except UnknownMode as error:
            return None, [*self._plan.too_old(error)]
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return None, []
        if stored is None:
            server.has_plan = False
            return None, []
        self.note_version(stored.version, server)
        actions = self._follow_rules(link, stored.compatibility)
        if self._plan.has_other_ring(stored):
            if not self._of_other_ring:
                actions.append(Send(link, stored_plan.READ_HEADER, ("header",)))
            self._of_other_ring.add(channel)
            return None, actions
        return stored.entry(channel, self._plan.home(channel)).client_route, actions
