"""Looks up where the channels of an unreachable server are now, at other servers, which store the same plan.

Theory of operation
-------------------
A route may lead to a server that is gone: the channel has moved away meanwhile, or its home is down and the plan names
another place. When a server has been unreachable for ``look_elsewhere_s``, the publisher reads the entries of the
channels in question at another server, and again each ``look_again_s`` while messages wait. A channel whose first
message comes after that time is looked up at once. Only a newer epoch is believed. Then every message that the old
server has not answered, or has answered and not confirmed, is sent by the new route with its number, in order. The old
connection forgets it: so nothing goes two ways.

A server that is connected counts as unreachable when it has left a message unanswered for ``silent_s``: a link takes
seconds to find out that its server hangs. Commands that are under way to it stay in the outbox, as their replies may
come. Subscribers drop the second copies.

A channel that this client used there lately is looked up once, although no message waits: its last messages may have
been lost with the server and its agent. A heartbeat brings its number to where the channel is now.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.protocol import stored_plan
from dynamoth.protocol.envelope import is_enveloped, open_envelope
from dynamoth_client.machines.publisher.answers import take_apart
from dynamoth_client.machines.publisher.checks import Checks
from dynamoth_client.machines.publisher.events import PublisherAction
from dynamoth_client.machines.publisher.part import Part, Shared
from dynamoth_client.machines.publisher.records import LOOKED_UP_MAX, Check, CheckAt, PublisherServer, VersionCheck
from dynamoth_client.machines.publisher.routes import PublisherRoutes
from dynamoth_client.machines.publisher.sending import Sending
from dynamoth_client.machines.publisher.waiting import Waiting

NO_LINK_RETRY_S = 0.1
"""How soon it is tried again when no other server is connected yet."""

_NEVER = float("inf")

RECENT_S = 60.0
"""Channels that were used within this time before their server was lost are looked up once, messages or not."""


class Elsewhere(Part):
    """Looks up the channels of unreachable servers, for one publisher."""

    def __init__(self, shared: Shared, routes: PublisherRoutes, checks: Checks, sending: Sending) -> None:
        """Begin without knowing any."""
        super().__init__(shared)
        options = shared.options
        self._after_s = options.look_elsewhere_s * (1 + shared.client_id % 1024 / 2048)
        #: How long before it expires the oldest message of a server that is up is looked up.
        self._before_expiry_s = options.publish_timeout_s - options.silent_s - self._after_s
        self._routes = routes
        self._checks = checks
        self._sending = sending

    def deadline(self, server: PublisherServer) -> float:
        """Return when channels of a server are to be looked up; infinity if nothing is in question."""
        if server.up:
            if not server.waiting:
                return _NEVER
            look_at = server.waiting[0].expires_at - self._before_expiry_s
            return look_at if look_at > server.look_at else server.look_at
        if not (server.waiting or server.lost_at is not None or server.refused_channels):
            return _NEVER
        look_at = server.down_since + self._after_s
        return look_at if server.unasked else max(look_at, server.look_at)

    def look(self, server_id: str, now: float) -> list[PublisherAction]:
        """Read at another server where the channels in question of an unreachable one are."""
        server = self._servers[server_id]
        others = [id_ for id_, candidate in self._servers.items() if candidate.up and id_ != server_id]
        if not others:
            unknown = [id_ for id_ in self._plan.servers if id_ not in self._servers]
            is_trying = len(self._servers) > 1 or unknown
            server.look_at = now + (NO_LINK_RETRY_S if is_trying else self._options.look_again_s)
            server.unasked.clear()
            # Each client begins with another one, as all clients of a dead server do this at the same time.
            return self._servers.open(unknown[self._client_id % len(unknown)], now)[1] if unknown else []
        other = others[server.looks % len(others)]
        server.looks += 1
        names = [*server.unasked]
        if now >= server.look_at:
            server.look_at = now + self._options.look_again_s
            take_apart(server)
            names = self._in_question(server_id, server)
            server.lost_at = None
            server.asked.clear()
        server.unasked.clear()
        server.asked.update(names)
        return [Send(other, stored_plan.read_entry(name), ("elsewhere", name, server_id)) for name in names]

    def _in_question(self, server_id: str, server: PublisherServer) -> list[bytes]:
        names, server.refused_channels = server.refused_channels, {}
        for _, token in server.outbox.unanswered():
            if isinstance(token, CheckAt):
                names[token.check.channel] = None
            elif isinstance(token, VersionCheck):
                names.update((check.channel, None) for check in token.checks if not check.over)
            elif isinstance(token, Waiting) and not token.done:
                names[token.channel] = None
            if len(names) >= LOOKED_UP_MAX:
                return list(names)
        if server.lost_at is not None:
            for name, channel in self._by_name.items():
                if server.lost_at - channel.used_at <= RECENT_S and channel.uses(server_id):
                    names[name] = None
                if len(names) >= LOOKED_UP_MAX:
                    break
        return list(names)

    def on_entry(self, name: bytes, gone: str, link: str, value: Any, now: float) -> list[PublisherAction]:
        """Handle the entry that another server stores: if the channel is elsewhere, send its messages there."""
        if isinstance(value, ErrorReply):
            return []
        actions = self._routes.on_entry(name, link, value, self._servers[link], now)
        server = self._servers[gone]
        locations, _ = self._routes.find(name)
        if any(location.server == gone for location in locations):
            return actions
        messages = self._take_back(name, server)
        if messages:
            return [*actions, *self._checks.send_again(name, messages, now)]
        return actions if server.up else [*actions, *self._sending.heartbeat(name, now)]

    def _take_back(self, name: bytes, server: PublisherServer) -> list[tuple[Waiting, bytes]]:
        """Return the messages of a channel that a server has not answered or not confirmed, and forget them there."""
        checks = self._checks_of(name, server)
        messages = [message for check in checks for message in check.messages]
        known = {id(message) for message, _ in messages}
        for args, token in server.outbox.unanswered():
            if isinstance(token, Waiting) and token.channel == name and not token.done and id(token) not in known:
                data = args[2]
                assert isinstance(data, bytes), "the payload of a PUBLISH"
                messages.append((token, data))
        if all(is_enveloped(data) for _, data in messages):
            messages.sort(key=lambda item: open_envelope(item[1]).sequence)
        gone = {id(message) for message, _ in messages}
        for check in checks:
            check.over = True

        def is_taken(token: Any) -> bool:
            return id(token) in gone or (isinstance(token, CheckAt) and token.check in checks)

        if not server.up:
            server.outbox.discard(is_taken)
        server.waiting = deque(waiting for waiting in server.waiting if id(waiting) not in gone)
        return messages

    def _checks_of(self, name: bytes, server: PublisherServer) -> list[Check]:
        """Return the checks of a channel that are not over: its present one, and those that wait for a server."""
        channel = self._by_name.get(name)
        found = [] if channel is None or channel.check is None else [channel.check]
        for _, token in server.outbox.unanswered():
            if isinstance(token, CheckAt):
                found.append(token.check)
            elif isinstance(token, VersionCheck):
                found += token.checks
        mine = [check for check in found if check.channel == name and not check.over]
        return list({id(check): check for check in mine}.values())
