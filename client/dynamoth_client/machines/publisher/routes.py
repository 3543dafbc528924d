"""Where a publisher's messages go: by the local plan, and by what dispatchers tell and servers store of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import Replied, Send
from dynamoth.plan.compatibility import Compatibility
from dynamoth.plan.plan import Location, Mode, Route
from dynamoth.protocol import stored_plan
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.publication import PublisherOptions, PublisherServer
from dynamoth_client.machines.standalone import ALONE


class PublisherRoutes:
    """The routes of one publisher's channels."""

    def __init__(
        self,
        client_id: int,
        plan: LocalPlan,
        servers: Mapping[str, PublisherServer],
        options: PublisherOptions,
        counters: Counter[str],
    ) -> None:
        """Share the local plan, the servers and the counters with the publisher."""
        self._client_id = client_id
        self._plan = plan
        self._servers = servers
        self._counters = counters
        self._options = options
        #: Routes to servers that the local plan did not list when it was told of them.
        self._hints: dict[bytes, Route] = {}
        #: Channels of which a server has told that the plan has another ring.
        self._of_other_ring: set[bytes] = set()
        #: When the stored plan was read for a channel because nobody can tell this publisher.
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

    def read_regularly(self, channel: bytes, locations: tuple[Location, ...], now: float) -> list[Any]:
        """Without envelopes no dispatcher can tell this publisher anything: read the stored plan now and then."""
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
        """Tell whether messages on a channel go out without envelopes."""
        return not self._options.envelope or self._plan.plain_route(name) is not None

    def rules_changed(self, link: str, version: int) -> list[Any]:
        """Read the rules that a server stores, as its dispatcher says that they are of this version."""
        return [] if version <= self._plan.rules_version else self.read_rules(link)

    def read_rules(self, link: str) -> list[Any]:
        """Read the rules that a server stores, once at a time."""
        if link in self._rules_asked:
            return []
        self._rules_asked.add(link)
        return [Send(link, stored_plan.READ_RULES, ("rules",))]

    def rules_read(self, event: Replied, server: PublisherServer) -> list[Any]:
        """Take the rules that a server stores."""
        self._rules_asked.discard(event.link)
        try:
            rules = stored_plan.parse_rules(event.value, server.run_id)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        return [] if rules is None else self._follow_rules(event.link, rules)

    def _follow_rules(self, link: str, rules: Compatibility) -> list[Any]:
        if self._plan.follow_rules(rules) or self._hints:
            return []
        return [Send(link, stored_plan.READ_HEADER, ("header",))]

    def forget_asked(self, link: str) -> None:
        """Forget what was asked over a link, and what waits for a header of the plan that may not come."""
        self._rules_asked.discard(link)
        self._hints.clear()
        self._of_other_ring.clear()

    # Routes.

    def told(self, link: str, channel: bytes, route: Route, now: float) -> list[Any]:
        """Take what a dispatcher tells of a channel that is published to."""
        if route.epoch <= self._plan.epoch(channel):
            return self._doubt(link, channel, route)
        return self._take(link, channel, route, now)

    def _take(self, link: str, channel: bytes, route: Route, now: float) -> list[Any]:
        """Follow a newer route: at once, or when the header of the plan has told of its servers."""
        if self._plan.reachable(route):
            self._plan.learn(channel, route, now)
            return []
        is_asked = bool(self._hints)
        self._hints[channel] = route
        return [] if is_asked else [Send(link, stored_plan.READ_HEADER, ("header",))]

    def _doubt(self, link: str, channel: bytes, route: Route) -> list[Any]:
        """A dispatcher says that our newer route is wrong: only if the plan was lost and begun anew. Look there."""
        if not self._contradicts(channel, link, route):
            return []
        return [Send(link, stored_plan.read_entry(channel), ("doubt", channel))]

    def doubted(self, channel: bytes, event: Replied, server: PublisherServer) -> list[Any]:
        """Give up a route to a server whose own stored plan sends the channel elsewhere."""
        told, actions = self._stored_route(channel, event.link, event.value, server)
        if told is not None and self._contradicts(channel, event.link, told) and self._plan.reachable(told):
            self._counters["distrusted_routes"] += 1
            self._plan.distrust(channel, told)
        return actions

    def _contradicts(self, channel: bytes, server_id: str, route: Route) -> bool:
        """Tell whether our route leads to a server, and ``route`` to none of our locations."""
        ours = self.find(channel)[0]
        return any(place.server == server_id for place in ours) and set(ours).isdisjoint(route.locations(channel))

    def header_read(self, event: Replied, server: PublisherServer, now: float) -> None:
        """Take the list of servers, for which a route waited that leads to one that was not known."""
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

    def entry_read(self, channel: bytes, link: str, value: Any, server: PublisherServer, now: float) -> list[Any]:
        """Take what a server stores of a channel, and the compatibility rules that came with it."""
        told, actions = self._stored_route(channel, link, value, server)
        if told is not None and told.epoch > self._plan.epoch(channel):
            actions += self._take(link, channel, told, now)
        return actions

    def note_version(self, version: int, server: PublisherServer) -> None:
        """Note the version of the plan that a server stores; a new one puts the routes of its channels in doubt."""
        server.missing_since = float("inf")
        if server.version not in (None, version):
            self._plan.touch()
        server.version = version

    def waits_for_header(self, channel: bytes) -> bool:
        """Tell whether the header is to tell of the route: its server is not listed yet, or the ring is new."""
        return channel in self._hints or channel in self._of_other_ring

    def _stored_route(
        self, channel: bytes, link: str, value: Any, server: PublisherServer
    ) -> tuple[Route | None, list[Any]]:
        """Return the route that clients are told by a stored plan, None if it cannot be read; and actions."""
        server.has_plan = True
        try:
            stored = stored_plan.parse_entry(value, server.run_id)
        except UnknownMode as error:
            return None, list(self._plan.too_old(error))
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
        return stored.settled_or(self._plan.home(channel)).client_route, actions
