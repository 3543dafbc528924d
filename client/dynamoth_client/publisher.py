"""The publisher machine: numbers messages, sends each to the server of its channel, learns better.

Theory of operation
-------------------
A message is numbered and routed at the moment of :class:`Publish`, by the local plan. It then waits in the outbox of
its server's link until that server has answered; a broken connection makes it go out again, with the same number, so
that a copy that had arrived already is dropped by subscribers as a duplicate. There is one link per server, so
messages of one client to one server keep their order.

The first message on a channel, also after the agent of its server has gone, is followed by a reading of the plan that
is stored there: a route that is wrong, and that no dispatcher may be there to mend, is so found out, and a message that
nobody forwarded is sent again by the right one.

When a dispatcher tells, in this client's inbox, that a channel has moved, the next message goes the new way and says so
(ROUTE_CHANGED): its predecessors may still be on their way through the old server's dispatcher.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from dynamoth import stored_plan
from dynamoth.control import ObservationGap, RouteNotice, unpack_control
from dynamoth.envelope import FIRST, HEARTBEAT, QUIET_MS_MAX, ROUTE_CHANGED, seal
from dynamoth.errors import MalformedMessage
from dynamoth.events import Connect, ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start, Tick
from dynamoth.names import AGENT_CHANNEL, CLIENTS_CHANNEL, inbox
from dynamoth.outbox import Outbox
from dynamoth.plan import Location, Mode, Route
from dynamoth_client.local_plan import LocalPlan


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """What a publisher may choose."""

    envelope: bool = True
    """False sends plain payloads that plain Redis clients can read. No guarantee holds for them."""
    publish_timeout_s: float = 10.0
    """A message that no server has answered for so long fails; it may have been delivered all the same."""
    unanswered_max: int = 100_000
    """Messages per server that wait for its answer at most; one more fails at once."""
    route_change_window_s: float = 5.0
    """A route change is announced to subscribers if the previous message went out at most so long before it. Longer
    than any forwarded copy may take."""
    observers_interval_s: float = 1.0
    """How often a publisher asks a server that it uses how many agents observe it (G7)."""
    channel_idle_s: float = 600.0
    """The numbering of a channel that was not published to for so long is forgotten and begins anew (FIRST)."""
    channels_max: int = 1_000_000
    """Channels whose numbering is kept at most; past it, the oldest are forgotten although they are not idle."""


@dataclass(slots=True)
class Publish:
    """Event: the application publishes. ``token`` comes back with the outcome."""

    token: Hashable
    channel: bytes
    payload: bytes


@dataclass(slots=True)
class Published:
    """Action: the server has the message; it went to so many clients there (G7)."""

    token: Hashable
    receivers: int


@dataclass(slots=True)
class PublishFailed:
    """Action: no server has answered, for ``reason``. The message may or may not be delivered."""

    token: Hashable
    reason: str


@dataclass(slots=True)
class PublishRefused:
    """Action: the server answered with an error (its text). The message is not delivered."""

    token: Hashable
    error: str


@dataclass(slots=True)
class _Channel:
    """What a publisher remembers of a channel that it publishes to."""

    #: The number of the latest message; equal to ``floor`` before the first.
    sequence: int
    floor: int
    #: Where the latest message went, or the first will go.
    location: Location
    epoch: int
    #: Of the local plan, when location and epoch were looked up there.
    generation: int
    used_at: float
    #: The outage (see ``_Server``) in which the stored plan confirmed the location; -1 for none.
    checked_in: int = -1


@dataclass(slots=True)
class _Waiting:
    """A message that a server has not answered yet."""

    token: Hashable
    expires_at: float
    #: The application has been told of the outcome; a reply that still comes is dropped.
    done: bool = False


@dataclass(slots=True)
class _Check:
    """The token of a reading of the stored plan: what was published just before it, and where."""

    channel: bytes
    sequence: int
    payload: bytes
    location: Location
    #: Nobody waits for its outcome.
    done: bool = True


@dataclass(slots=True)
class _Server:
    """What a publisher knows of a server that it publishes to."""

    outbox: Outbox
    #: What the outbox holds of the application's messages, oldest first; those that are done leave from the left.
    waiting: deque[_Waiting] = field(default_factory=deque[_Waiting])
    run_id: str | None = None
    up: bool = False
    connected_before: bool = False
    #: Why the link is down, in words for the application.
    reason: str = "not connected yet"
    #: Agents that observe it: receivers of every message that are no clients.
    observers: int = 0
    #: Grows with each connection, and whenever the agents are gone. A route that is right during an outage stays right
    #: until its end, for no channel is moved away from a server without an agent.
    outage: int = 0
    observers_asked_at: float = float("-inf")


class PublisherMachine:
    """Publishes for one client. See the module's text.

    Promises: G3 for its part (numbers grow by one per channel, in the order of ``Publish`` events), at-least-once
    delivery to the server while the client lives, an outcome for every ``Publish`` within ``publish_timeout_s``.
    """

    def __init__(self, client_id: int, local_plan: LocalPlan, options: PublisherOptions | None = None) -> None:
        """Make a publisher.

        Args:
            client_id: 64-bit number, different for every client, new with each start.
            local_plan: shared by the machines of the client.
            options: see :class:`PublisherOptions`.

        """
        self.client_id = client_id
        self.options = options or PublisherOptions()
        self.counters: Counter[str] = Counter()
        self._plan = local_plan
        self._channels: dict[bytes, _Channel] = {}
        #: Every forgotten channel ended at or below this number, so that a channel that comes back begins above its
        #: past.
        self._sequence_floor = 0
        self._servers: dict[str, _Server] = {}
        #: Routes to servers that the local plan did not list when it was told of them.
        self._hints: dict[bytes, Route] = {}
        #: With ``envelope=False`` nobody can tell this publisher; it reads the stored plan. Channel to time of reading.
        self._read_at: dict[bytes, float] = {}
        self._swept_at = 0.0

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        match event:
            case Publish():
                return self._publish(event, now)
            case Replied():
                return self._replied(event, now)
            case Pushed():
                return [action for push in event.messages for action in self._pushed(event.link, push, now)]
            case LinkUp():
                return self._link_up(event, now)
            case LinkDown():
                server = self._servers[event.link]
                server.up = False
                server.reason = event.reason
                server.outbox.link_down()
                server.outbox.discard(lambda token: token is None)  # heartbeats: the reconnection makes new ones
                self._hints.clear()
                return []
            case Tick():
                return self._tick(now)
            case Start():
                return []
            case _:
                raise AssertionError(f"not an event of a publisher: {event!r}")

    def deadline(self) -> float | None:
        """Return when the oldest unanswered message fails."""
        return min((server.waiting[0].expires_at for server in self._servers.values() if server.waiting), default=None)

    # Publishing.

    def _publish(self, event: Publish, now: float) -> list[Any]:
        channel = self._channels.get(event.channel) or self._add_channel(event.channel, now)
        location, epoch = channel.location, channel.epoch
        if channel.generation != self._plan.generation:
            location, epoch = self._route(event.channel)
        server, actions = self._server(location.server)
        if server.outbox.full:
            reason = f"{self.options.unanswered_max} messages wait for server {location.server}: {server.reason}"
            return [*actions, PublishFailed(event.token, reason)]
        flags = 0
        if channel.sequence == channel.floor:
            flags = FIRST
        elif location != channel.location and now - channel.used_at <= self.options.route_change_window_s:
            flags = ROUTE_CHANGED
        channel.location, channel.epoch, channel.generation = location, epoch, self._plan.generation
        channel.sequence += 1
        quiet_ms = _whole_ms(now - channel.used_at)
        channel.used_at = now
        self._plan.use(event.channel, now)
        data = event.payload
        if self.options.envelope:
            data = seal(self.client_id, channel.sequence, channel.epoch, data, flags, quiet_ms)
        else:
            actions += self._read_route(event.channel, channel.location.server, now)
        if server.up and now - server.observers_asked_at >= self.options.observers_interval_s:
            actions.append(self._ask_observers(channel.location.server, now))
        waiting = _Waiting(event.token, now + self.options.publish_timeout_s)
        server.waiting.append(waiting)
        actions += server.outbox.put((b"PUBLISH", location.physical, data), waiting)
        doubtful = flags & FIRST or (server.up and not server.observers and channel.checked_in != server.outage)
        if self.options.envelope and doubtful and not server.outbox.full:
            check = _Check(event.channel, channel.sequence, event.payload, location)
            actions += server.outbox.put(stored_plan.read_entry(event.channel), check)
        return actions

    def _route(self, name: bytes) -> tuple[Location, int]:
        """Return where the local plan now sends messages of a channel, and its epoch."""
        route = self._plan.route(name)
        return self._choose(route, route.locations(name)), route.epoch

    def _choose(self, route: Route, locations: tuple[Location, ...]) -> Location:
        if route.assignment.mode is Mode.SINGLE:
            return locations[0]
        return locations[(self.client_id ^ route.epoch) % len(locations)]

    def _add_channel(self, name: bytes, now: float) -> _Channel:
        self._sweep(now)
        location, epoch = self._route(name)
        floor = self._sequence_floor
        channel = _Channel(floor, floor, location, epoch, self._plan.generation, now)
        self._channels[name] = channel
        return channel

    def _sweep(self, now: float) -> None:
        """Forget the numbering of idle channels. Called where the table grows."""
        crowded = len(self._channels) >= self.options.channels_max
        if now - self._swept_at < self.options.channel_idle_s / 4 and not crowded:
            return
        self._swept_at = now
        idle = [name for name, c in self._channels.items() if now - c.used_at >= self.options.channel_idle_s]
        if crowded and len(idle) * 4 < self.options.channels_max:
            by_age = sorted(self._channels.items(), key=lambda item: item[1].used_at)
            idle = [name for name, _ in by_age[: self.options.channels_max // 4]]
        for name in idle:
            self._sequence_floor = max(self._sequence_floor, self._channels.pop(name).sequence)
            self._read_at.pop(name, None)

    def _server(self, server_id: str) -> tuple[_Server, list[Any]]:
        server = self._servers.get(server_id)
        if server is not None:
            return server, []
        server = self._servers[server_id] = _Server(Outbox(server_id, self.options.unanswered_max))
        return server, [Connect(server_id, self._plan.servers[server_id].url)]

    def _read_route(self, channel: bytes, server_id: str, now: float) -> list[Any]:
        """Without envelopes no dispatcher can tell this publisher of a move: read the stored plan now and then."""
        if now - self._read_at.get(channel, float("-inf")) < self.options.route_change_window_s:
            return []
        if not self._servers[server_id].up:
            return []
        self._read_at[channel] = now
        return [Send(server_id, stored_plan.read_entry(channel), ("entry", channel))]

    # Links.

    def _link_up(self, event: LinkUp, now: float) -> list[Any]:
        server = self._servers[event.link]
        server.up = True
        server.run_id = event.run_id
        server.outage += 1
        reconnected, server.connected_before = server.connected_before, True
        return [
            Send(event.link, (b"SUBSCRIBE", inbox(self.client_id), CLIENTS_CHANNEL)),
            self._ask_observers(event.link, now),
            *server.outbox.link_up(),
            *(self._heartbeats(event.link, now) if reconnected else []),
        ]

    def _ask_observers(self, server_id: str, now: float) -> Send:
        self._servers[server_id].observers_asked_at = now
        return Send(server_id, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), ("observers",))

    def _replied(self, event: Replied, now: float) -> list[Any]:
        server = self._servers[event.link]
        if event.tag is server.outbox:
            waiting: _Waiting | _Check | None = server.outbox.replied()
            if isinstance(waiting, _Check):
                return self._checked(waiting, event, server, now)
            if waiting is None or waiting.done:
                return []
            waiting.done = True
            while server.waiting and server.waiting[0].done:
                server.waiting.popleft()
            if isinstance(event.value, ErrorReply):
                return [PublishRefused(waiting.token, str(event.value))]
            return [Published(waiting.token, max(0, event.value - server.observers))]
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            self._hints.clear()
            return []
        match event.tag:
            case ("observers",):
                observers = int(event.value[1])
                server.outage += server.observers > 0 and not observers
                server.observers = observers
            case ("header",):
                self._header_read(event, server, now)
            case ("doubt", channel):
                self._doubted(channel, event, server)
            case ("entry", channel):
                self._entry_read(channel, event, server, now)
            case _:
                raise AssertionError(f"not a tag of a publisher: {event.tag!r}")
        return []

    def _checked(self, check: _Check, event: Replied, server: _Server, now: float) -> list[Any]:
        """Compare the route that a message took with the stored plan; send it again if it may reach nobody."""
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            return []
        self._entry_read(check.channel, event, server, now)
        location, epoch = self._route(check.channel)
        if server.observers:
            return []
        if location == check.location:
            if (channel := self._channels.get(check.channel)) is not None:
                channel.checked_in = server.outage
            return []
        right, actions = self._server(location.server)
        if right.outbox.full:
            self.counters["repeats_dropped"] += 1
            return actions
        data = seal(self.client_id, check.sequence, epoch, check.payload, ROUTE_CHANGED)
        return [*actions, *right.outbox.put((b"PUBLISH", location.physical, data))]

    def _header_read(self, event: Replied, server: _Server, now: float) -> None:
        try:
            header = stored_plan.parse_header(event.value, server.run_id)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            header = None
        if header is not None and header.believed:
            self._plan.update_header(header.plan)
        for channel, route in self._hints.items():
            if not self._plan.learn(channel, route, now):
                self.counters["distrusted_hints"] += 1
        self._hints.clear()

    def _entry_read(self, channel: bytes, event: Replied, server: _Server, now: float) -> None:
        try:
            stored = stored_plan.parse_entry(event.value, server.run_id)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return
        if stored is not None:
            self._plan.learn(channel, stored.settled_or(self._plan.home(channel)).told, now)

    # What dispatchers say.

    def _pushed(self, link: str, push: Any, now: float) -> list[Any]:
        if push[0] != b"message":
            return []
        try:
            message = unpack_control(push[2])
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return []
        match message:
            case RouteNotice(channel, route):
                return self._told(link, channel, route, now)
            case ObservationGap(server):
                return self._heartbeats(server, now)
            case _:
                self.counters["unexpected_messages"] += 1
                return []

    def _told(self, link: str, channel: bytes, route: Route, now: float) -> list[Any]:
        if channel not in self._channels:
            return []
        if route.epoch <= self._plan.epoch(channel):
            return self._doubt(link, channel, route)
        if self._plan.reachable(route):
            self._plan.learn(channel, route, now)
            return []
        if self._hints:
            return []
        self._hints[channel] = route
        return [Send(link, stored_plan.READ_HEADER, ("header",))]

    def _doubt(self, link: str, channel: bytes, route: Route) -> list[Any]:
        """A dispatcher says that our newer route is wrong: only if the plan was lost and begun anew. Look there."""
        ours = self._route(channel)[0]
        if ours.server != link or ours in route.locations(channel):
            return []
        return [Send(link, stored_plan.read_entry(channel), ("doubt", channel))]

    def _doubted(self, channel: bytes, event: Replied, server: _Server) -> None:
        """Give up a route to a server whose own stored plan sends the channel elsewhere."""
        try:
            stored = stored_plan.parse_entry(event.value, server.run_id)
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return
        if stored is None:
            return
        told = stored.settled_or(self._plan.home(channel)).told
        ours = self._route(channel)[0]
        if ours.server == event.link and ours not in told.locations(channel) and self._plan.reachable(told):
            self.counters["distrusted_routes"] += 1
            self._plan.distrust(channel, told)

    def _heartbeats(self, server_id: str, now: float) -> list[Any]:
        """Tell the numbers of what was sent to a server where it may not have been observed, by today's route."""
        if not self.options.envelope:
            return []
        actions: list[Any] = []
        for name, channel in self._channels.items():
            if channel.location.server != server_id or channel.sequence == channel.floor:
                continue
            location, epoch = self._route(name)
            server, connect = self._server(location.server)
            if server.outbox.full:
                self.counters["heartbeats_dropped"] += 1
                continue
            quiet_ms = _whole_ms(now - channel.used_at)
            data = seal(self.client_id, channel.sequence, epoch, b"", HEARTBEAT, quiet_ms)
            actions += [*connect, *server.outbox.put((b"PUBLISH", location.physical, data))]
        return actions

    # Time.

    def _tick(self, now: float) -> list[Any]:
        actions: list[Any] = []
        for server_id, server in self._servers.items():
            while server.waiting and server.waiting[0].expires_at <= now:
                waiting = server.waiting.popleft()
                waiting.done = True
                why = "it is connected and does not answer" if server.up else server.reason
                waited = self.options.publish_timeout_s
                actions.append(
                    PublishFailed(waiting.token, f"server {server_id} did not answer for {waited:g} s: {why}")
                )
            if not server.up:
                server.outbox.discard_while(lambda token: token is None or token.done)
        return actions


def _whole_ms(duration_s: float) -> int:
    return min(int(duration_s * 1000), QUIET_MS_MAX)
