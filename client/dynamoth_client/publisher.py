"""The publisher machine: numbers messages, sends each to the server of its channel, learns better.

Theory of operation
-------------------
A message is numbered and routed at the moment of :class:`Publish`, by the local plan. It then waits in the outbox of
its server's link until that server has answered; a broken connection makes it go out again, with the same number, so
that a copy that had arrived already is dropped by subscribers as a duplicate. There is one link per server, so
messages of one client to one server keep their order.

Under ALL_PUBLISHERS a message goes to every replica, under one number and with one outcome: the application is told
when all replicas have answered, or ``straggler_s`` after the first. For those that cannot be reached then, the
dispatcher of a replica that has the message is asked to forward it, lest it be lost with this client; the application
is told when it has heard. Under ALL_SUBSCRIBERS a message goes to one replica; if that is away for ``failover_s``, what
it has not answered, and all that follows, goes to the next one, as every subscriber listens there too.

The first message on a channel, also after the agent of its server has gone, is followed by a reading of the plan that
is stored there: a route that is wrong, and that no dispatcher may be there to mend, is so found out, and a message that
nobody forwarded is sent again by the right one.

When a dispatcher tells, in this client's inbox, that a channel has moved, the next message goes the new way and says so
(ROUTE_CHANGED): its predecessors may still be on their way through the old server's dispatcher.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth import stored_plan
from dynamoth.control import ForwardRequest, ObservationGap, RouteNotice, pack_control, unpack_control
from dynamoth.envelope import (
    FIRST,
    HEARTBEAT,
    MAGIC,
    QUIET_BITS,
    QUIET_MS_MAX,
    ROUTE_CHANGED,
    open_envelope,
    pack_header,
    rerouted,
    seal,
)
from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.events import (
    CommandPart,
    Connect,
    ErrorReply,
    LinkDown,
    LinkUp,
    Pushed,
    Replied,
    RepliedAll,
    Send,
    SendAll,
    Start,
    Tick,
)
from dynamoth.names import AGENT_CHANNEL, CLIENTS_CHANNEL, FORWARD_CHANNEL, inbox, logical_channel
from dynamoth.outbox import Outbox
from dynamoth.plan import Location, Mode, Route
from dynamoth_client.local_plan import LocalPlan
from dynamoth_client.publication import Check, HandOver, PublishedChannel, PublisherServer, Together, Waiting

LEFT_MAX = 4
"""Servers that a channel has left and that are remembered: what was sent there last may not have been observed."""


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
    straggler_s: float = 0.2
    """How long a message that one replica has answered waits for the answers of the others."""
    failover_s: float = 1.0
    """How long a replica may be away before another one takes its place (ALL_SUBSCRIBERS)."""


@dataclass(slots=True)
class Publish:
    """Event: the application publishes. ``token`` comes back with the outcome."""

    token: Hashable
    channel: bytes
    payload: bytes


@dataclass(slots=True)
class PublishAll:
    """Event: the application publishes messages, each with its ``token``, channel and payload, in this order."""

    messages: Sequence[tuple[Hashable, bytes, bytes]]


@dataclass(slots=True)
class Published:
    """Action: the server has the message, or at least one replica has; it went to so many clients there (G7)."""

    token: Hashable
    receivers: int


@dataclass(slots=True)
class PublishedAll:
    """Action: as so many ``Published``, at least one."""

    tokens: Sequence[Hashable]
    receivers: Sequence[int]


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
        self._channels: dict[bytes, PublishedChannel] = {}
        #: Every forgotten channel ended at or below this number, so that a channel that comes back begins above its
        #: past.
        self._sequence_floor = 0
        self._servers: dict[str, PublisherServer] = {}
        #: Routes to servers that the local plan did not list when it was told of them.
        self._hints: dict[bytes, Route] = {}
        #: With ``envelope=False`` nobody can tell this publisher; it reads the stored plan. Channel to time of reading.
        self._read_at: dict[bytes, float] = {}
        self._swept_at = 0.0

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        match event:
            case PublishAll():
                return self._publish_all(event.messages, now)
            case RepliedAll():
                return self._replied_all(event.link, event.values, now)
            case Publish():
                return self._publish_all(((event.token, event.channel, event.payload),), now)
            case Replied():
                return self._replied(event, now)
            case Pushed():
                return [action for push in event.messages for action in self._pushed(event.link, push, now)]
            case LinkUp():
                return self._link_up(event, now)
            case LinkDown():
                return self._link_down(event, now)
            case Tick():
                return self._tick(now)
            case Start():
                return []
            case _:
                raise AssertionError(f"not an event of a publisher: {event!r}")

    def deadline(self) -> float | None:
        """Return when the oldest unanswered message has waited long enough, or another replica is to take its place."""
        wishes = [server.waiting[0].tell_at for server in self._servers.values() if server.waiting]
        failovers = [
            server.down_since + self.options.failover_s
            for server in self._servers.values()
            if server.waiting and not server.up and not server.avoided
        ]
        return min((*wishes, *failovers), default=None)

    # Publishing.

    def _publish_all(self, messages: Sequence[tuple[Hashable, bytes, bytes]], now: float) -> list[Any]:
        """Publish messages; those about which there is nothing to be decided go out together, server by server."""
        actions: list[Any] = []
        ready: list[PublisherServer] = []
        client_id, find = self.client_id, self._channels.get
        generation = self._plan.generation
        expires_at = now + self.options.publish_timeout_s
        for token, name, payload in messages:
            channel = find(name)
            server = channel.lane if channel is not None and channel.generation == generation else None
            if (
                channel is None
                or server is None
                or not (server.observers or name in server.confirmed)
                or not (server.commands or self._begin_together(server, len(messages), now, ready))
            ):
                for other in ready:
                    actions += self._send_together(other, expires_at)
                ready.clear()
                actions += self._publish(token, name, payload, now)
                generation = self._plan.generation
                continue
            quiet_ms = 0
            if now != channel.used_at:
                quiet_ms = _whole_ms(now - channel.used_at)
                channel.used_at = now
                self._plan.use(name, now)
            channel.sequence = sequence = channel.sequence + 1
            data = pack_header(MAGIC, 0, client_id, sequence << QUIET_BITS | quiet_ms, channel.epoch) + payload
            server.commands.append((b"PUBLISH", channel.physical, data))
            server.tokens.append(token)
        for server in ready:
            actions += self._send_together(server, expires_at)
        return actions

    @staticmethod
    def _begin_together(server: PublisherServer, count: int, now: float, ready: list[PublisherServer]) -> bool:
        """Tell whether ``count`` messages can go to a server with no command beside them; it is ``ready`` then."""
        is_clear = now < server.clear_until and count <= server.outbox.room
        if is_clear:
            ready.append(server)
        return is_clear

    @staticmethod
    def _send_together(server: PublisherServer, expires_at: float) -> Sequence[Send | SendAll]:
        commands, server.commands = server.commands, []
        tokens, server.tokens = server.tokens, []
        if len(commands) == 1:
            waiting = Waiting(tokens[0], expires_at, logical_channel(commands[0][1]))
            server.waiting.append(waiting)
            return server.outbox.put(commands[0], waiting)
        together = Together(tokens, expires_at)
        server.waiting.append(together)
        return (server.outbox.put_all(commands, together),)

    def _publish(self, token: Hashable, name: bytes, payload: bytes, now: float) -> list[Any]:
        """Publish a message about which something is to be decided."""
        channel = self._channels.get(name) or self._add_channel(name, now)
        locations, epoch = channel.locations, channel.epoch
        if channel.generation != self._plan.generation:
            locations, epoch = self._route(name)
        targets, actions = self._targets(locations, now)
        if not targets:
            reason = f"{self.options.unanswered_max} messages wait for server {locations[0].server}"
            return [*actions, PublishFailed(token, f"{reason}: {self._servers[locations[0].server].reason}")]
        flags = 0
        if channel.sequence == channel.floor:
            flags = FIRST
        elif locations != channel.locations:
            self._note_left(channel, locations)
            if now - channel.used_at <= self.options.route_change_window_s:
                flags = ROUTE_CHANGED
        channel.locations, channel.epoch, channel.generation = locations, epoch, self._plan.generation
        channel.sequence += 1
        quiet_ms = _whole_ms(now - channel.used_at)
        channel.used_at = now
        self._plan.use(name, now)
        data = payload
        if self.options.envelope:
            data = seal(self.client_id, channel.sequence, channel.epoch, data, flags, quiet_ms)
        else:
            actions += self._read_route(name, locations, now)
        waiting = Waiting(token, now + self.options.publish_timeout_s, name)
        channel.lane = targets[0][1] if len(locations) == 1 and self.options.envelope else None
        channel.physical = locations[0].physical
        if len(locations) > 1:
            has_room = [location.server for location, _ in targets]
            replicas = [location.server for location in locations]
            waiting.missing = tuple(id_ for id_ in replicas if id_ in has_room or not self._servers[id_].up)
            if self.options.envelope:
                waiting.sent = locations[0].physical, data
        for location, server in targets:
            if server.up and now - server.observers_asked_at >= self.options.observers_interval_s:
                actions.append(self._ask_observers(location.server, now))
            server.waiting.append(waiting)
            actions += server.outbox.put((b"PUBLISH", location.physical, data), waiting)
            doubtful = flags & FIRST or (server.up and not server.observers and name not in server.confirmed)
            if self.options.envelope and doubtful and not server.outbox.full:
                check = Check(name, channel.sequence, payload, location)
                actions += server.outbox.put(stored_plan.read_entry(name), check)
        return actions

    def _targets(
        self, locations: tuple[Location, ...], now: float
    ) -> tuple[list[tuple[Location, PublisherServer]], list[Any]]:
        """Return the locations whose outboxes have room, and the actions that open links to new servers."""
        targets: list[tuple[Location, PublisherServer]] = []
        actions: list[Any] = []
        for location in locations:
            server, connect = self._server(location.server, now)
            actions += connect
            if not server.outbox.full:
                targets.append((location, server))
            elif len(locations) > 1:  # subscribers of this replica may see a gap; those of the others get the message
                self.counters["copies_dropped"] += 1
                server.owes_heartbeats = True
        return targets, actions

    def _route(self, name: bytes) -> tuple[tuple[Location, ...], int]:
        """Return where the local plan now sends messages of a channel, and its epoch."""
        route = self._plan.route(name)
        locations = route.published_at(self.client_id, name)
        if route.assignment.mode is Mode.ALL_SUBSCRIBERS and self._is_avoided(locations[0]):
            replicas = route.locations(name)
            first = replicas.index(locations[0])
            others = (place for place in (*replicas[first:], *replicas[:first]) if not self._is_avoided(place))
            locations = (next(others, locations[0]),)
        return locations, route.epoch

    def _is_avoided(self, location: Location) -> bool:
        server = self._servers.get(location.server)
        return server is not None and server.avoided

    @staticmethod
    def _note_left(channel: PublishedChannel, locations: tuple[Location, ...]) -> None:
        servers = {location.server for location in locations}
        left = [location.server for location in channel.locations if location.server not in servers]
        channel.left = (*channel.left, *left)[-LEFT_MAX:]

    def _add_channel(self, name: bytes, now: float) -> PublishedChannel:
        self._sweep(now)
        locations, epoch = self._route(name)
        floor = self._sequence_floor
        channel = PublishedChannel(floor, floor, locations, epoch, self._plan.generation, now)
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
        for server in self._servers.values():
            server.confirmed.difference_update(idle)

    def _server(self, server_id: str, now: float) -> tuple[PublisherServer, list[Any]]:
        server = self._servers.get(server_id)
        if server is not None:
            return server, []
        server = self._servers[server_id] = PublisherServer(
            Outbox(server_id, self.options.unanswered_max), down_since=now
        )
        return server, [Connect(server_id, self._plan.servers[server_id].url)]

    def _read_route(self, channel: bytes, locations: tuple[Location, ...], now: float) -> list[Any]:
        """Without envelopes no dispatcher can tell this publisher of a move: read the stored plan now and then."""
        if now - self._read_at.get(channel, float("-inf")) < self.options.route_change_window_s:
            return []
        server_id = next((place.server for place in locations if self._servers[place.server].up), None)
        if server_id is None:
            return []
        self._read_at[channel] = now
        return [Send(server_id, stored_plan.read_entry(channel), ("entry", channel))]

    # Links.

    def _link_up(self, event: LinkUp, now: float) -> list[Any]:
        server = self._servers[event.link]
        server.up = True
        server.down_since = float("inf")
        server.run_id = event.run_id
        server.confirmed.clear()
        if server.avoided:
            server.avoided = False
            self._plan.touch()
        owed, server.owes_heartbeats = server.owes_heartbeats, False
        avoided = [id_ for id_, other in self._servers.items() if other.avoided]
        again = [action for id_ in avoided for action in self._fail_over(id_, now)]
        return [
            Send(event.link, (b"SUBSCRIBE", inbox(self.client_id), CLIENTS_CHANNEL)),
            self._ask_observers(event.link, now),
            *server.outbox.link_up(),
            *again,
            *(self._heartbeats(event.link, now) if owed else []),
        ]

    def _link_down(self, event: LinkDown, now: float) -> list[Any]:
        server = self._servers[event.link]
        if server.up:
            server.down_since = now
            server.owes_heartbeats = True
        server.up = False
        server.clear_until = float("-inf")
        server.reason = event.reason
        server.outbox.link_down()
        _take_apart(server)
        server.outbox.discard(lambda token: token is None)  # heartbeats: the reconnection makes new ones
        self._hints.clear()
        return []

    def _fail_over(self, server_id: str, now: float) -> list[Any]:
        """Send what a replica that is away has not answered to another one (ALL_SUBSCRIBERS); the numbers stay."""
        server = self._servers[server_id]
        server.avoided = True
        self._plan.touch()
        actions: list[Any] = []
        for args, token in server.outbox.unanswered():
            if not isinstance(token, Waiting) or token.done:
                continue
            if self._plan.route(token.channel).assignment.mode is not Mode.ALL_SUBSCRIBERS:
                continue
            [location], epoch = self._route(token.channel)
            if location.server == server_id:
                continue
            other, connect = self._server(location.server, now)
            actions += connect
            if other.outbox.full or location.server in token.also_at:
                continue
            token.also_at = (*token.also_at, location.server)
            data = args[2]
            assert isinstance(data, bytes), "the payload of a PUBLISH"
            copy = rerouted(data, epoch) if self.options.envelope else data
            actions += other.outbox.put((b"PUBLISH", location.physical, copy), token)
            other.waiting.append(token)
        self.counters["failovers"] += 1
        return actions

    def _ask_observers(self, server_id: str, now: float) -> Send:
        self._servers[server_id].observers_asked_at = now
        self._servers[server_id].clear_until = now + self.options.observers_interval_s
        return Send(server_id, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), ("observers",))

    def _replied(self, event: Replied, now: float) -> list[Any]:
        server = self._servers[event.link]
        if event.tag is server.outbox:
            return self._replied_all(event.link, (event.value,), now)
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            self._hints.clear()
            return []
        match event.tag:
            case ("observers",):
                observers = int(event.value[1])
                if server.observers and not observers:
                    server.confirmed.clear()
                server.observers = observers
            case ("header",):
                self._header_read(event, server, now)
            case ("doubt", channel):
                return self._doubted(channel, event, server)
            case ("entry", channel):
                return self._entry_read(channel, event.value, server, now)
            case _:
                raise AssertionError(f"not a tag of a publisher: {event.tag!r}")
        return []

    def _replied_all(self, link: str, values: Sequence[Any], now: float) -> list[Any]:
        """Take replies to the oldest commands of an outbox."""
        server = self._servers[link]
        waiting = server.waiting
        actions: list[Any] = []
        tokens = server.outbox.replied_all(len(values))
        index = 0
        while index < len(tokens):
            token = tokens[index]
            if type(token) is Together:
                count = min(len(token.tokens) - token.answered, len(tokens) - index)
                actions += _answered_together(token, values[index : index + count], server.observers)
                index += count
            else:
                actions += self._replied_to(token, link, values[index], now)
                index += 1
        while waiting and waiting[0].done:
            waiting.popleft()
        if server.owes_heartbeats and not len(server.outbox):
            server.owes_heartbeats = False
            actions += self._heartbeats(link, now)
        return actions

    def _replied_to(self, token: Waiting | HandOver | Check | None, link: str, value: Any, now: float) -> list[Any]:
        if type(token) is Waiting:
            return [] if token.done else self._answered(token, link, value, now)
        if isinstance(token, Check):
            return self._checked(token, link, value, now)
        if isinstance(token, HandOver):
            return self._handed_over(token.message, value, now)
        return []

    def _answered(self, waiting: Waiting, link: str, value: Any, now: float) -> list[Any]:
        """Take the answer of one server; tell the application when no other is worth waiting for."""
        if isinstance(value, ErrorReply):
            waiting.refusal = str(value)
        else:
            waiting.receivers = (waiting.receivers or 0) + max(0, value - self._servers[link].observers)
            if waiting.missing:
                waiting.holders = (*waiting.holders, link)
        if waiting.missing:
            waiting.missing = tuple(server_id for server_id in waiting.missing if server_id != link)
            if not all(self._servers[server_id].avoided for server_id in waiting.missing):
                if waiting.receivers is not None:
                    waiting.tell_at = min(waiting.tell_at, now + self.options.straggler_s)
                return []
            if waiting.missing:
                return self._hand_over(waiting, now)
        return self._end(waiting)

    def _hand_over(self, waiting: Waiting, now: float) -> list[Any]:
        """Ask the dispatcher of the next replica that has a message to see to those that have not answered; or end.

        It is to forward the message where this client is not connected. A replica that is connected and slow has the
        message on its way, and twice would make it slower still: its subscribers are only to be told of the number.
        """
        while waiting.missing and waiting.holders and waiting.sent is not None:
            server_id, *others = waiting.holders
            waiting.holders = tuple(others)
            server = self._servers[server_id]
            if not server.up or server.outbox.full:
                continue
            waiting.tell_at = min(now + self.options.straggler_s, waiting.expires_at)
            server.waiting.append(waiting)
            waiting.requests += 1
            request = pack_control(self._request(waiting, *waiting.sent, now))
            return server.outbox.put((b"PUBLISH", FORWARD_CHANNEL, request), HandOver(waiting))
        if waiting.missing and waiting.requests:
            waiting.tell_at = waiting.expires_at
            return []
        return self._end(waiting)

    def _request(self, waiting: Waiting, physical: bytes, data: bytes, now: float) -> ForwardRequest:
        """Return what each replica that has not answered is to be sent by somebody else."""
        envelope = open_envelope(data)
        quiet_ms = _whole_ms(now - waiting.expires_at + self.options.publish_timeout_s)
        heartbeat = seal(self.client_id, envelope.sequence, envelope.epoch, b"", HEARTBEAT, quiet_ms)
        copy = rerouted(data, envelope.epoch)
        servers = waiting.missing
        return ForwardRequest(physical, tuple((id_, heartbeat if self._servers[id_].up else copy) for id_ in servers))

    def _handed_over(self, waiting: Waiting, value: Any, now: float) -> list[Any]:
        """Tell the application, if a dispatcher was there to hear."""
        waiting.requests -= 1
        if waiting.done:
            return []
        if isinstance(value, ErrorReply) or value == 0:
            self.counters["unheard_requests"] += 1
            return self._hand_over(waiting, now)
        self.counters["handed_over"] += 1
        return self._end(waiting)

    def _end(self, waiting: Waiting, reason: str = "") -> list[Any]:
        waiting.done = True
        return [self._outcome(waiting, reason)]

    def _outcome(self, waiting: Waiting, reason: str) -> Published | PublishRefused | PublishFailed:
        """Return what the application is told: that it was published, if any server has it."""
        if waiting.receivers is not None:
            self.counters["copies_refused"] += bool(waiting.refusal)
            return Published(waiting.token, waiting.receivers)
        if waiting.refusal:
            return PublishRefused(waiting.token, waiting.refusal)
        return PublishFailed(waiting.token, reason)

    def _checked(self, check: Check, link: str, value: Any, now: float) -> list[Any]:
        """Compare the route that a message took with the stored plan; send it again if it may reach nobody."""
        if isinstance(value, ErrorReply):
            self.counters["refused_commands"] += 1
            return []
        server = self._servers[link]
        told = self._entry_read(check.channel, value, server, now)
        locations, epoch = self._route(check.channel)
        if server.observers:
            return told
        if check.location in locations:
            server.confirmed.add(check.channel)
            return told
        targets, actions = self._targets(locations, now)
        if not targets:
            self.counters["repeats_dropped"] += 1
        data = seal(self.client_id, check.sequence, epoch, check.payload, ROUTE_CHANGED)
        for location, right in targets:
            actions += right.outbox.put((b"PUBLISH", location.physical, data))
        return actions

    def _header_read(self, event: Replied, server: PublisherServer, now: float) -> None:
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

    def _entry_read(self, channel: bytes, value: Any, server: PublisherServer, now: float) -> list[Any]:
        told, actions = self._stored_route(channel, value, server)
        if told is not None:
            self._plan.learn(channel, told, now)
        return actions

    def _stored_route(self, channel: bytes, value: Any, server: PublisherServer) -> tuple[Route | None, list[Any]]:
        """Return the route that clients are told by a stored plan, None if it cannot be read; and actions."""
        try:
            stored = stored_plan.parse_entry(value, server.run_id)
        except UnknownMode as error:
            return None, list(self._plan.too_old(error))
        except MalformedMessage:
            self.counters["malformed_messages"] += 1
            return None, []
        return None if stored is None else stored.settled_or(self._plan.home(channel)).told, []

    # What dispatchers say.

    def _pushed(self, link: str, push: Any, now: float) -> list[Any]:
        if push[0] != b"message":
            return []
        try:
            message = unpack_control(push[2])
        except UnknownMode as error:
            return list(self._plan.too_old(error))
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
        if not self._contradicts(channel, link, route):
            return []
        return [Send(link, stored_plan.read_entry(channel), ("doubt", channel))]

    def _doubted(self, channel: bytes, event: Replied, server: PublisherServer) -> list[Any]:
        """Give up a route to a server whose own stored plan sends the channel elsewhere."""
        told, actions = self._stored_route(channel, event.value, server)
        if told is not None and self._contradicts(channel, event.link, told) and self._plan.reachable(told):
            self.counters["distrusted_routes"] += 1
            self._plan.distrust(channel, told)
        return actions

    def _contradicts(self, channel: bytes, server_id: str, route: Route) -> bool:
        """Tell whether our route leads to a server, and ``route`` to none of our locations."""
        ours = self._route(channel)[0]
        return any(place.server == server_id for place in ours) and set(ours).isdisjoint(route.locations(channel))

    def _heartbeats(self, server_id: str, now: float) -> list[Any]:
        """Tell the numbers of what was sent to a server where it may not have been observed, by today's route."""
        if not self.options.envelope:
            return []
        actions: list[Any] = []
        for name, channel in self._channels.items():
            used = server_id in channel.left or any(place.server == server_id for place in channel.locations)
            if not used or channel.sequence == channel.floor:
                continue
            locations, epoch = self._route(name)
            targets, connects = self._targets(locations, now)
            actions += connects
            self.counters["heartbeats_dropped"] += len(locations) - len(targets)
            if not targets:
                self._servers[locations[0].server].owes_heartbeats = True
            quiet_ms = _whole_ms(now - channel.used_at)
            data = seal(self.client_id, channel.sequence, epoch, b"", HEARTBEAT, quiet_ms)
            for location, server in targets:
                actions += server.outbox.put((b"PUBLISH", location.physical, data))
        return actions

    # Time.

    def _tick(self, now: float) -> list[Any]:
        actions: list[Any] = []
        for server_id, server in list(self._servers.items()):
            why = "it is connected and does not answer" if server.up else server.reason
            while server.waiting and (server.waiting[0].done or server.waiting[0].tell_at <= now):
                waiting = server.waiting.popleft()
                if waiting.done:
                    continue
                reason = f"server {server_id} did not answer for {self.options.publish_timeout_s:g} s: {why}"
                if isinstance(waiting, Together):
                    waiting.done = True
                    actions += [PublishFailed(token, reason) for token in waiting.tokens[waiting.answered :]]
                elif waiting.expires_at > now:
                    actions += self._hand_over(waiting, now)
                else:
                    actions += self._end(waiting, reason)
            if server.up:
                continue
            if not server.avoided and now - server.down_since >= self.options.failover_s:
                actions += self._fail_over(server_id, now)
            if server.outbox.discard_while(lambda token: _is_useless(token, now)):
                server.owes_heartbeats = True
        return actions


def _answered_together(together: Together, values: Sequence[Any], observers: int) -> list[Any]:
    """Take the answers to the next messages of those that went out together; return what the application is told."""
    begin = together.answered
    together.answered = end = begin + len(values)
    if together.done:
        return []
    together.done = end == len(together.tokens)
    tokens = together.tokens[begin:end]
    if not any(type(value) is ErrorReply for value in values):
        return [PublishedAll(tokens, [value - observers if value > observers else 0 for value in values])]
    return [
        PublishRefused(token, str(value))
        if isinstance(value, ErrorReply)
        else Published(token, max(0, value - observers))
        for token, value in zip(tokens, values, strict=True)
    ]


def _take_apart(server: PublisherServer) -> None:
    """Wait for each message that went out with others by itself, as what becomes of them may be different now."""
    parts: dict[int, list[Waiting]] = {}

    def part(args: Sequence[CommandPart], token: Any) -> Any:
        if type(token) is not Together:
            return token
        physical = args[1]
        assert isinstance(physical, bytes), "the channel of a PUBLISH"
        waiting = Waiting(token.tokens[token.answered], token.tell_at, logical_channel(physical))
        waiting.done = token.done
        token.answered += 1
        parts.setdefault(id(token), []).append(waiting)
        return waiting

    server.outbox.replace_tokens(part)
    server.waiting = deque(
        single
        for waiting in server.waiting
        for single in (parts.get(id(waiting), ()) if type(waiting) is Together else (waiting,))
    )


def _is_useless(token: Waiting | HandOver | Check | None, now: float) -> bool:
    """Tell whether a command that was not sent is not worth sending any more."""
    if isinstance(token, HandOver):
        return token.message.done
    return not isinstance(token, Waiting) or (token.done and token.expires_at <= now)


def _whole_ms(duration_s: float) -> int:
    return min(int(duration_s * 1000), QUIET_MS_MAX)
