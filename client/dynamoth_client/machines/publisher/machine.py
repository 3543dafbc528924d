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
is stored there. If that sends the channel elsewhere the message is sent again by the right route, under its number. See
``checks.py``. A route to a server that cannot be reached is looked up at another one: see ``unreachable.py``.

When a dispatcher tells, in this client's inbox, that a channel has moved, the next message goes the new way and says so
(ROUTE_CHANGED): its predecessors may still be on their way through the old server's dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import (
    Connect,
    Disconnect,
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
from dynamoth.machine.outbox import Outbox
from dynamoth.names import AGENT_CHANNEL, CLIENTS_CHANNEL, inbox
from dynamoth.plan.plan import Location, Mode
from dynamoth.protocol.control import ObservationGap, RouteNotice, RulesChanged, unpack_control
from dynamoth.protocol.envelope import (
    FIRST,
    HEARTBEAT,
    QUIET_BITS,
    ROUTE_CHANGED,
    is_enveloped,
    pack_plain_header,
    plain_head,
    rerouted,
    seal,
    whole_ms,
)
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.publisher.answers import (
    Answers,
    answered_together,
    discard_failed,
    has_failed,
    take_apart,
)
from dynamoth_client.machines.publisher.checks import Checks
from dynamoth_client.machines.publisher.publication import (
    Check,
    CheckAt,
    HandOver,
    Publish,
    PublishAll,
    PublishedChannel,
    PublisherOptions,
    PublisherServer,
    PublishFailed,
    Together,
    Token,
    Unconfirmed,
    VersionCheck,
    Waiting,
)
from dynamoth_client.machines.publisher.routes import PublisherRoutes
from dynamoth_client.machines.publisher.standalone import AloneServer
from dynamoth_client.machines.publisher.unreachable import Elsewhere

_NEVER = float("inf")


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
        self._plain_head = plain_head(client_id)
        self._plan = local_plan
        self._channels: dict[bytes, PublishedChannel] = {}
        #: Every forgotten channel ended at or below this number, so that a channel that comes back begins above its
        #: past.
        self._sequence_floor = 0
        self._servers: dict[str, PublisherServer] = {}
        self._answers = Answers(client_id, self._servers, self.options, self.counters)
        self._routes = PublisherRoutes(client_id, local_plan, self._servers, self.options, self.counters)
        self._alone = AloneServer(local_plan, self._servers, self.counters)
        self._checks = Checks(
            self._channels,
            self._servers,
            self._routes,
            self._answers,
            self._connect,
            self._alone,
            self.options,
            self.counters,
        )
        self._elsewhere = Elsewhere(
            client_id,
            local_plan,
            self._channels,
            self._servers,
            self._routes,
            self._checks,
            self.options,
            self._connect,
            self._heartbeat,
        )
        self._swept_at = 0.0

    def handle(self, event: Any, now: float) -> list[Any]:
        """Take one event; return the actions to execute, in order."""
        kind = type(event)  # pyright: ignore[reportUnknownVariableType]
        if kind is Publish:
            return self._publish_one(event.token, event.channel, event.payload, now)
        if kind is PublishAll:
            return self._publish_all(event.messages, now)
        if kind is Replied:
            return self._replied(event, now)
        if kind is RepliedAll:
            return self._replied_all(event.link, event.values, now)
        match event:
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
        earliest = self._answers.deadline()
        for server in self._servers.values():
            if server.waiting:
                expires_at = server.waiting[0].expires_at
                if expires_at < earliest:
                    earliest = expires_at
                if server.read_again_at < earliest:
                    earliest = server.read_again_at
                if not server.up and not server.avoided:
                    earliest = min(earliest, server.down_since + self.options.failover_s)
            if server.waiting or not server.up:
                look_at = self._elsewhere.deadline(server)
                if look_at < earliest:
                    earliest = look_at
        return None if earliest == _NEVER else earliest

    # Publishing.

    def _publish_one(self, token: Hashable, name: bytes, payload: bytes, now: float) -> list[Any]:
        """Publish a message by itself; if there is nothing to be decided, as ``_publish_all`` does."""
        channel = self._channels.get(name)
        server = self._lane(channel, name)
        if channel is None or server is None or not server.is_clear_for(1, now):
            return self._publish(token, name, payload, now)
        channel.sequence += 1
        number = channel.sequence << QUIET_BITS | whole_ms(now - channel.used_at)
        channel.used_at = now
        self._plan.use(name, now)
        waiting = Waiting(token, now + self.options.publish_timeout_s, name)
        server.waiting.append(waiting)
        data = pack_plain_header(self._plain_head, number, channel.epoch) + payload
        return server.outbox.put((b"PUBLISH", channel.physical, data), waiting)

    def _publish_all(self, messages: Sequence[tuple[Hashable, bytes, bytes]], now: float) -> list[Any]:
        """Publish messages; those about which there is nothing to be decided go out together, server by server."""
        actions: list[Any] = []
        ready: list[PublisherServer] = []
        expires_at = now + self.options.publish_timeout_s
        tokens, names, payloads = zip(*messages, strict=False)
        end = 0
        for name, run in groupby(names):
            begin, end = end, end + len(list(run))
            channel = self._channels.get(name)
            server = self._lane(channel, name)
            if channel is None or server is None or not (server.commands or server.is_clear_for(len(messages), now)):
                for other in ready:
                    actions += self._send_together(other, expires_at)
                ready.clear()
                for token, payload in zip(tokens[begin:end], payloads[begin:end], strict=True):
                    actions += self._publish(token, name, payload, now)
                continue
            if not server.commands:
                ready.append(server)
            numbers = list(
                range(
                    (channel.sequence + 1) << QUIET_BITS,
                    (channel.sequence + end - begin + 1) << QUIET_BITS,
                    1 << QUIET_BITS,
                )
            )
            numbers[0] |= whole_ms(now - channel.used_at)
            channel.sequence += end - begin
            channel.used_at = now
            self._plan.use(name, now)
            head, epoch, physical = self._plain_head, channel.epoch, channel.physical
            server.commands += [
                (b"PUBLISH", physical, pack_plain_header(head, number, epoch) + payload)
                for number, payload in zip(numbers, payloads[begin:end], strict=True)
            ]
            server.tokens += tokens[begin:end]
        for other in ready:
            actions += self._send_together(other, expires_at)
        return actions

    def _lane(self, channel: PublishedChannel | None, name: bytes) -> PublisherServer | None:
        """Return the server that messages of a channel go to while there is nothing about them to be decided."""
        if channel is None or channel.generation != self._plan.generation:
            return None
        server = channel.direct_server
        return server if server is not None and (server.observers or name in server.confirmed) else None

    @staticmethod
    def _send_together(server: PublisherServer, expires_at: float) -> list[Send | SendAll]:
        commands, server.commands = server.commands, []
        together = Together(server.tokens, expires_at)
        server.tokens = []
        server.waiting.append(together)
        return server.outbox.put_all(commands, together)

    def _publish(self, token: Hashable, name: bytes, payload: bytes, now: float) -> list[Any]:
        """Publish a message about which something is to be decided."""
        channel = self._channels.get(name) or self._add_channel(name, now)
        locations, epoch, plain = channel.locations, channel.epoch, channel.plain
        if channel.generation != self._plan.generation:
            locations, epoch = self._routes.find(name)
            plain = self._routes.is_plain(name)
        targets, actions = self._targets(locations, now)
        if len(targets) == 1 == len(locations) and targets[0][1].refused:
            targets[0][1].note_refused(name)
            return [*actions, PublishFailed(token, self._answers.why_refused(locations[0].server))]
        if not targets:
            server = self._servers[locations[0].server]
            why = "it is connected and too slow: publish less at once, or see what keeps it busy"
            reason = f"{self.options.unanswered_max} messages wait for server {locations[0].server}"
            return [*actions, PublishFailed(token, f"{reason}: {why if server.up else server.reason}")]
        if plain is not channel.plain:
            channel.change_format(plain=plain)
        is_first = channel.sequence == channel.floor
        check: Check | None = None
        read_at: Sequence[PublisherServer] = ()
        if not plain:
            check, read_at = self._checks.begin(channel, name, locations, [server for _, server in targets], now)
        changed = channel.follow(locations, epoch)
        quiet_ms = whole_ms(now - channel.used_at)
        flags = FIRST if is_first else ROUTE_CHANGED if changed else 0
        channel.generation = self._plan.generation
        channel.used_at = now
        self._plan.use(name, now)
        data = payload
        if plain:
            actions += self._routes.read_regularly(name, locations, now)
        else:
            channel.sequence += 1
            data = seal(self.client_id, channel.sequence, channel.epoch, data, flags, quiet_ms)
        waiting = (Waiting if check is None else Unconfirmed)(token, now + self.options.publish_timeout_s, name)
        if check is not None:
            check.messages.append((waiting, data))
        is_clear = len(locations) == 1 and not plain and check is None and self._alone.is_over(now)
        channel.direct_server = targets[0][1] if is_clear else None
        channel.physical = locations[0].physical
        if len(locations) > 1:
            has_room = [location.server for location, _ in targets]
            replicas = [location.server for location in locations]
            waiting.missing = tuple(id_ for id_ in replicas if id_ in has_room or not self._servers[id_].up)
            if not plain:
                waiting.sent = locations[0].physical, data
        for location, server in targets:
            if server.up and now - server.observers_asked_at >= self.options.observers_interval_s:
                actions.append(self._ask_observers(location.server, now))
            server.waiting.append(waiting)
            actions += server.outbox.put((b"PUBLISH", location.physical, data), waiting)
            if check is not None and server in read_at:
                actions += self._checks.put(check, location, server)
            actions += self._checks.put_version_check(server)
        return [*actions, *self._alone.copy(name, data, now)]

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

    def _add_channel(self, name: bytes, now: float) -> PublishedChannel:
        self._sweep(now)
        locations, epoch = self._routes.find(name)
        floor = self._sequence_floor
        plain = self._routes.is_plain(name)
        channel = PublishedChannel(floor, floor, locations, epoch, self._plan.generation, now, plain)
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
        self._routes.forget(idle)
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

    def _connect(self, server_id: str, now: float) -> list[Any]:
        return self._server(server_id, now)[1]

    # Links.

    def _link_up(self, event: LinkUp, now: float) -> list[Any]:
        server = self._servers[event.link]
        server.up = True
        server.refused = False
        discard_failed(server, now)
        server.down_since, server.lost_at = float("inf"), None
        if event.run_id != server.run_id and server.version is not None:
            server.version = None
            self._plan.touch()
        server.run_id = event.run_id
        server.missing_since = float("inf")
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
            *(self._routes.read_rules(event.link) if owed else []),
            *server.outbox.link_up(),
            *again,
            *(self._heartbeats(event.link, now) if owed else []),
        ]

    def _link_down(self, event: LinkDown, now: float) -> list[Any]:
        server = self._servers[event.link]
        if server.up:
            server.down_since = server.lost_at = now
            server.owes_heartbeats = True
        server.up = False
        server.clear_until = float("-inf")
        server.reason = event.reason
        server.outbox.link_down()
        self._checks.read_again(server)
        take_apart(server)
        server.outbox.discard(lambda token: token is None)  # heartbeats: the reconnection makes new ones
        self._routes.forget_asked(event.link)
        server.refused = event.refused
        actions: list[Any] = []
        if event.refused:  # replicas elsewhere may take it
            actions += [] if server.avoided else self._fail_over(event.link, now)
            actions += self._answers.refused(event.link, now)
        discard_failed(server, now)
        return actions

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
            [location], epoch = self._routes.find(token.channel)
            if location.server == server_id:
                continue
            other, connect = self._server(location.server, now)
            actions += connect
            if other.outbox.full or location.server in token.also_at:
                continue
            token.also_at = (*token.also_at, location.server)
            data = args[2]
            assert isinstance(data, bytes), "the payload of a PUBLISH"
            copy = rerouted(data, epoch) if is_enveloped(data) else data
            actions += other.outbox.put((b"PUBLISH", location.physical, copy), token)
            other.waiting.append(token)
        self.counters["failovers"] += 1
        return actions

    def _ask_observers(self, server_id: str, now: float) -> Send:
        self._servers[server_id].observers_asked_at = now
        return Send(server_id, (b"PUBSUB", b"NUMSUB", AGENT_CHANNEL), ("observers",))

    def _replied(self, event: Replied, now: float) -> list[Any]:
        server = self._servers[event.link]
        if event.tag is server.outbox:
            actions = self._replied_to(server.outbox.replied(), event.link, event.value, now)
            return self._tidied(server, actions, now)
        if isinstance(event.value, ErrorReply):
            self.counters["refused_commands"] += 1
            self._routes.forget_asked(event.link)
            return []
        match event.tag:
            case ("observers",):
                observers = int(event.value[1])
                if server.observers and not observers:
                    server.confirmed.clear()
                server.observers = observers
            case ("header",):
                self._routes.header_read(event, server, now)
            case ("rules",):
                return self._routes.rules_read(event, server)
            case ("elsewhere", channel, gone):
                return self._elsewhere.found(channel, gone, event.link, event.value, now)
            case ("doubt", channel):
                return self._routes.doubted(channel, event, server)
            case ("entry", channel):
                return self._routes.entry_read(channel, event.link, event.value, server, now)
            case _:
                raise AssertionError(f"not a tag of a publisher: {event.tag!r}")
        return []

    def _replied_all(self, link: str, values: Sequence[Any], now: float) -> list[Any]:
        """Take replies to the oldest commands of an outbox."""
        server = self._servers[link]
        actions: list[Any] = []
        tokens = server.outbox.replied_all(len(values))
        index = 0
        while index < len(tokens):
            token = tokens[index]
            if type(token) is Together:
                count = min(len(token.tokens) - token.answered, len(tokens) - index)
                actions += answered_together(token, values[index : index + count], server.observers)
                index += count
            else:
                actions += self._replied_to(token, link, values[index], now)
                index += 1
        return self._tidied(server, actions, now)

    def _tidied(self, server: PublisherServer, actions: list[Any], now: float) -> list[Any]:
        """Forget what is done, after replies; return the actions with those that are due now."""
        waiting = server.waiting
        while waiting and waiting[0].done:
            waiting.popleft()
        if server.outbox.held:
            actions = [*actions, *server.outbox.flush()]
        if server.owes_heartbeats and not len(server.outbox):
            server.owes_heartbeats = False
            return [*actions, *self._heartbeats(server.outbox.link, now)]
        return actions

    def _replied_to(self, token: Token, link: str, value: Any, now: float) -> list[Any]:
        if type(token) is Waiting:
            return [] if token.done else self._answers.answered(token, link, value, now)
        if type(token) is Together:
            return answered_together(token, (value,), self._servers[link].observers)
        if isinstance(token, Unconfirmed):
            return [] if token.done else self._answers.answered_in_part(token, link, value, now)
        if isinstance(token, CheckAt):
            return self._checks.replied(token, link, value, now)
        if isinstance(token, VersionCheck):
            return self._checks.version_read(token, link, value, now)
        if isinstance(token, HandOver):
            return self._answers.handed_over(token.message, value, now)
        return []

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
                return self._routes.told(link, channel, route, now) if channel in self._channels else []
            case ObservationGap(server):
                return self._heartbeats(server, now)
            case RulesChanged(version):
                return self._routes.rules_changed(link, version)
            case _:
                self.counters["unexpected_messages"] += 1
                return []

    def _heartbeats(self, server_id: str, now: float) -> list[Any]:
        """Tell the numbers of what was sent to a server where it may not have been observed, by today's route."""
        if not self.options.envelope:
            return []
        used = [name for name, channel in self._channels.items() if channel.uses(server_id)]
        return [action for name in used for action in self._heartbeat(name, now)]

    def _heartbeat(self, name: bytes, now: float) -> list[Any]:
        """Tell the latest number of a channel by today's route; where there is no connection, when there is one."""
        channel = self._channels.get(name)
        if channel is None or channel.sequence == channel.floor:
            return []
        locations, epoch = self._routes.find(name)
        targets, actions = self._targets(locations, now)
        self.counters["heartbeats_dropped"] += len(locations) - len(targets)
        if not targets:
            self._servers[locations[0].server].owes_heartbeats = True
        quiet_ms = whole_ms(now - channel.used_at)
        data = seal(self.client_id, channel.sequence, epoch, b"", HEARTBEAT, quiet_ms)
        for location, server in targets:
            if server.up:
                actions += server.outbox.put((b"PUBLISH", location.physical, data))
            else:
                server.owes_heartbeats = True
                channel.note_left(location.server)
        return actions

    # Time.

    def _tick(self, now: float) -> list[Any]:
        actions = self._answers.due(now)
        for server_id, server in list(self._servers.items()):
            while server.waiting and (server.waiting[0].done or server.waiting[0].expires_at <= now):
                waiting = server.waiting.popleft()
                if not waiting.done:
                    actions += self._answers.late(waiting, server_id, now)
            if not server.up and not server.avoided and now - server.down_since >= self.options.failover_s:
                actions += self._fail_over(server_id, now)
            if self._elsewhere.deadline(server) <= now:
                actions += self._elsewhere.look(server_id, now)
            if has_failed(server.outbox.large_under_way(), now):
                actions += self._reconnect(server_id, now)
            discard_failed(server, now)
            if server.read_again_at <= now:
                actions += self._checks.read_again(server)
        return actions

    def _reconnect(self, server_id: str, now: float) -> list[Any]:
        """Make another connection in the place of one that is busy with what is of no use any more."""
        server = self._plan.servers.get(server_id)
        if server is None:
            return []
        reason = "its connection was busy with a large message that has failed"
        return [
            Disconnect(server_id),
            Connect(server_id, server.url),
            *self._link_down(LinkDown(server_id, reason), now),
        ]
