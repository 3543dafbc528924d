"""What clients ask a dispatcher for: markers when they join a new location, and copies at servers they cannot reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from dynamoth.errors import MalformedMessage
from dynamoth.names import inbox, logical_channel
from dynamoth.plan.plan import Location
from dynamoth.protocol.control import Announcement, ForwardRequest, Marker, seal_control, unpack_control
from dynamoth.protocol.envelope import HEARTBEAT, is_enveloped, open_envelope
from dynamoth_dispatcher.events import DispatcherAction
from dynamoth_dispatcher.forwarder import Forwarder
from dynamoth_dispatcher.forwarding_table import is_relayed
from dynamoth_dispatcher.transitions import Transitions


class ClientRequests:
    """Answers announcements and forward requests at one server."""

    def __init__(self, server: str, transitions: Transitions, forwarder: Forwarder, counters: Counter[str]) -> None:
        self._server = server
        self._transitions = transitions
        self._forwarder = forwarder
        self._counters = counters

    def on_announcement(self, data: bytes, now: float) -> list[DispatcherAction]:
        """Send markers to a subscriber that has joined new locations here, at the servers of old ones."""
        try:
            message = unpack_control(data)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        if not isinstance(message, Announcement):
            return []
        actions: list[DispatcherAction] = []
        to = inbox(message.client)
        named = frozenset(message.leaving)
        for physical in dict.fromkeys(message.joined):
            transition = self._transitions.get(logical_channel(physical))
            if transition is None or Location(self._server, physical) not in transition.new_here:
                continue
            marker = seal_control(Marker(transition.channel, self._server, message.number))
            relayed = is_relayed(transition.entry.route)
            for server in sorted(named & transition.old_servers):
                actions += self._forwarder.mark(Location(server, to), marker, now, relayed=relayed)
        return actions

    def on_forward_request(
        self, physical: bytes, data: bytes, servers: Container[str], now: float
    ) -> list[DispatcherAction]:
        """Forward the copies that a publisher cannot send itself.

        Its own copy may still arrive: subscribers recognise the two by their number. A heartbeat waits, and is sent if
        the publisher does not ask for a later one in the meantime.
        """
        try:
            request = unpack_control(data)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        if not isinstance(request, ForwardRequest):
            self._counters["unexpected_messages"] += 1
            return []
        actions: list[DispatcherAction] = []
        for server, copy in request.copies:
            try:
                envelope = open_envelope(copy) if is_enveloped(copy) else None
            except MalformedMessage:
                self._counters["malformed_messages"] += 1
                envelope = None
            if envelope is None or server not in servers or server == self._server:
                self._counters["unexpected_messages"] += 1
                continue
            target = Location(server, physical)
            if envelope.flags & HEARTBEAT:
                actions += self._forwarder.heartbeat_later(target, envelope, now)
            else:
                self._counters["forwarded_messages"] += 1
                actions += self._forwarder.forward(target, copy)
        return actions
