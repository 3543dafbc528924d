"""Numbers messages and sends each to the server of its channel.

Theory of operation
-------------------
Nearly all messages need no decision: their route is confirmed, and leads to one server. They get their numbers and go
into its outbox. Every other message is decided by itself (``_decide``), which may open links, begin a check, or change
the format.

There is one path for a single such message (``publish``, :class:`Waiting`) and one for many (``publish_all``,
:class:`Together`). As a batch of one, a message and its answer cost the machine 6.7 us instead of 3.0 us, an eighth of
all that an awaited ``publish`` takes; by themselves, each of 200 messages would cost ten times as much as together.
Both paths have the same effect, which a property test checks (``tests/machines/test_publisher_together.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from dynamoth.plan.plan import Location
from dynamoth.protocol.envelope import (
    FIRST,
    HEARTBEAT,
    QUIET_BITS,
    ROUTE_CHANGED,
    pack_plain_header,
    plain_head,
    rerouted,
    seal,
    whole_ms,
)
from dynamoth_client.machines.publisher.answers import Answers
from dynamoth_client.machines.publisher.channels import PublishedChannel
from dynamoth_client.machines.publisher.checks import Checks
from dynamoth_client.machines.publisher.events import PublisherAction, PublishFailed
from dynamoth_client.machines.publisher.part import Part, Shared
from dynamoth_client.machines.publisher.records import Check, PublisherServer
from dynamoth_client.machines.publisher.routes import PublisherRoutes
from dynamoth_client.machines.publisher.standalone import AloneServer
from dynamoth_client.machines.publisher.waiting import Together, Unconfirmed, Waiting


class Sending(Part):
    """Sends the messages of one publisher."""

    def __init__(
        self, shared: Shared, routes: PublisherRoutes, answers: Answers, checks: Checks, alone: AloneServer
    ) -> None:
        """Begin without messages."""
        super().__init__(shared)
        self._plain_head = plain_head(shared.client_id)
        self._routes = routes
        self._answers = answers
        self._checks = checks
        self._alone = alone

    # Messages.

    def publish(self, token: Hashable, name: bytes, payload: bytes, now: float) -> Sequence[PublisherAction]:
        """Publish one message."""
        channel = self._by_name.get(name)
        server = self._direct_server(channel, name)
        if channel is None or server is None or not server.is_clear_for(1, now):
            return self._decide(token, name, payload, now)
        number = channel.number(1, now)
        self._plan.use(name, now)
        waiting = Waiting(token, now + self._options.publish_timeout_s, name)
        server.waiting.append(waiting)
        data = pack_plain_header(self._plain_head, number, channel.epoch) + payload
        return server.outbox.put((b"PUBLISH", channel.physical, data), waiting)

    def publish_all(self, messages: Sequence[tuple[Hashable, bytes, bytes]], now: float) -> list[PublisherAction]:
        """Publish messages; those that need no decision go out together, server by server."""
        actions: list[PublisherAction] = []
        ready: list[PublisherServer] = []
        tokens, names, payloads = zip(*messages, strict=False)
        end = 0
        for name, run in groupby(names):
            begin, end = end, end + len(list(run))
            channel = self._by_name.get(name)
            server = self._direct_server(channel, name)
            if channel is None or server is None or not (server.commands or server.is_clear_for(len(messages), now)):
                actions += self._send_together(ready, now)
                for token, payload in zip(tokens[begin:end], payloads[begin:end], strict=True):
                    actions += self._decide(token, name, payload, now)
                continue
            if not server.commands:
                ready.append(server)
            self._add_commands(server, channel, payloads[begin:end], now)
            server.tokens += tokens[begin:end]
            self._plan.use(name, now)
        return [*actions, *self._send_together(ready, now)]

    def _direct_server(self, channel: PublishedChannel | None, name: bytes) -> PublisherServer | None:
        """Return the server that messages of a channel go to while they need no decision."""
        if channel is None or channel.generation != self._plan.generation:
            return None
        server = channel.direct_server
        return server if server is not None and (server.observers or name in server.confirmed) else None

    def _add_commands(
        self, server: PublisherServer, channel: PublishedChannel, payloads: Sequence[bytes], now: float
    ) -> None:
        """Number messages of one channel, for ``_send_together``."""
        first = channel.number(len(payloads), now)
        next_one = (first >> QUIET_BITS) + 1
        numbers = [first, *range(next_one << QUIET_BITS, (channel.sequence + 1) << QUIET_BITS, 1 << QUIET_BITS)]
        head, epoch, physical = self._plain_head, channel.epoch, channel.physical
        server.commands += [
            (b"PUBLISH", physical, pack_plain_header(head, number, epoch) + payload)
            for number, payload in zip(numbers, payloads, strict=True)
        ]

    def _send_together(self, ready: list[PublisherServer], now: float) -> list[PublisherAction]:
        """Send all messages that are ready, server by server."""
        actions: list[PublisherAction] = []
        for server in ready:
            together = Together(server.tokens, now + self._options.publish_timeout_s)
            server.waiting.append(together)
            actions += server.outbox.put_all(server.commands, together)
            server.commands, server.tokens = [], []
        ready.clear()
        return actions

    def _decide(self, token: Hashable, name: bytes, payload: bytes, now: float) -> list[PublisherAction]:
        """Publish a message that needs a decision."""
        channel = self._by_name.get(name) or self._add_channel(name, now)
        locations, epoch, plain = channel.locations, channel.epoch, channel.plain
        if channel.generation != self._plan.generation:
            locations, epoch = self._routes.find(name)
            plain = self._routes.is_plain(name)
        targets, actions = self._targets(locations, now)
        if (reason := self._why_not(name, locations, targets)) is not None:
            return [*actions, PublishFailed(token, reason)]
        if plain is not channel.plain:
            channel.change_format(plain=plain)
        is_first = channel.is_new
        check: Check | None = None
        read_at: Sequence[PublisherServer] = ()
        if not plain:
            check, read_at = self._checks.begin(channel, name, locations, [server for _, server in targets], now)
        changed = channel.follow(locations, epoch)
        quiet_ms = whole_ms(now - channel.used_at)
        channel.decide(self._plan.generation, now)
        self._plan.use(name, now)
        data = payload
        if plain:
            actions += self._routes.read_regularly(name, locations, now)
        else:
            flags = FIRST if is_first else ROUTE_CHANGED if changed else 0
            number = channel.number(1, now) >> QUIET_BITS
            data = seal(self._client_id, number, channel.epoch, data, flags, quiet_ms)
        is_direct = len(locations) == 1 and not plain and check is None and self._alone.is_over(now)
        channel.send_directly(targets[0][1] if is_direct else None)
        waiting = (Waiting if check is None else Unconfirmed)(token, now + self._options.publish_timeout_s, name)
        if check is not None:
            check.messages.append((waiting, data))
        if len(locations) > 1:
            self._wait_for_replicas(waiting, locations, targets, None if plain else data)
        for location, server in targets:
            if not server.up:
                server.note_waiting(name)
            actions += server.ask_observers_again(now, self._options.observers_interval_s)
            server.waiting.append(waiting)
            actions += server.outbox.put((b"PUBLISH", location.physical, data), waiting)
            if check is not None and server in read_at:
                actions += self._checks.put(check, location, server)
            actions += self._checks.put_version_check(server)
        if self._alone.is_over(now):
            return actions
        # It travels by itself: it may come before earlier messages of the right route, or where they were lost.
        return [*actions, *self._alone.copy(name, data if plain else rerouted(data, channel.epoch))]

    def _why_not(
        self,
        name: bytes,
        locations: tuple[Location, ...],
        targets: Sequence[tuple[Location, PublisherServer]],
    ) -> str | None:
        """Return why a message cannot be sent to any of its locations, in words; None where it can."""
        server = self._servers[locations[0].server]
        if len(targets) == 1 == len(locations) and server.refused:
            server.note_refused(name)
            return self._answers.why_refused(server.id)
        if targets:
            return None
        too_slow = "it is connected and too slow: publish less at once, or see what keeps it busy"
        reason = f"{self._options.unanswered_max} messages wait for server {server.id}"
        return f"{reason}: {too_slow if server.up else server.reason}"

    def _wait_for_replicas(
        self,
        waiting: Waiting,
        locations: tuple[Location, ...],
        targets: Sequence[tuple[Location, PublisherServer]],
        data: bytes | None,
    ) -> None:
        """Wait for all replicas but those whose outbox is full; ``data`` is the envelope, if there is one."""
        has_room = [location.server for location, _ in targets]
        replicas = [location.server for location in locations]
        awaited = [id_ for id_ in replicas if id_ in has_room or not self._servers[id_].up]
        waiting.go_to_replicas(awaited, None if data is None else (locations[0].physical, data))

    def _targets(
        self, locations: tuple[Location, ...], now: float
    ) -> tuple[list[tuple[Location, PublisherServer]], list[PublisherAction]]:
        """Return the locations whose outboxes have room, and the actions that open links to new servers."""
        targets: list[tuple[Location, PublisherServer]] = []
        actions: list[PublisherAction] = []
        for location in locations:
            server, connect = self._servers.open(location.server, now)
            actions += connect
            if not server.outbox.full:
                targets.append((location, server))
            elif len(locations) > 1:  # subscribers of this replica may see a gap; those of the others get the message
                self._counters["copies_dropped"] += 1
                server.needs_heartbeats = True
        return targets, actions

    def _add_channel(self, name: bytes, now: float) -> PublishedChannel:
        idle = self._channels.sweep(now)
        self._routes.forget(idle)
        for server in self._servers.values():
            server.confirmed.difference_update(idle)
        locations, epoch = self._routes.find(name)
        plain = self._routes.is_plain(name)
        return self._channels.add(name, locations, epoch, self._plan.generation, now, plain=plain)

    # Heartbeats.

    def heartbeats(self, server_id: str, now: float) -> list[PublisherAction]:
        """Publish the latest numbers of the channels whose messages to a server may not have been observed."""
        if not self._options.envelope:
            return []
        used = [name for name, channel in self._by_name.items() if channel.uses(server_id)]
        return [action for name in used for action in self.heartbeat(name, now)]

    def heartbeat(self, name: bytes, now: float) -> list[PublisherAction]:
        """Publish the latest number of a channel by today's route; where the link is down, when it is up."""
        channel = self._by_name.get(name)
        if channel is None or channel.is_new:
            return []
        locations, epoch = self._routes.find(name)
        targets, actions = self._targets(locations, now)
        self._counters["heartbeats_dropped"] += len(locations) - len(targets)
        if not targets:
            self._servers[locations[0].server].needs_heartbeats = True
        quiet_ms = whole_ms(now - channel.used_at)
        data = seal(self._client_id, channel.sequence, epoch, b"", HEARTBEAT, quiet_ms)
        for location, server in targets:
            if server.up:
                actions += server.outbox.put((b"PUBLISH", location.physical, data))
            else:
                server.needs_heartbeats = True
                channel.note_left(location.server)
        return actions
