"""Notices to the clients at a dispatcher's server, and the answers to their announcements and forward requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.bounded import ENTRY_BYTES, BoundedTable
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import CLIENTS_CHANNEL, inbox, is_user_channel, logical_channel
from dynamoth.plan.plan import Location, Plan, Route
from dynamoth.protocol.control import (
    Announcement,
    ControlMessage,
    ForwardRequest,
    LossNotice,
    Marker,
    RouteNotice,
    RulesChanged,
    pack_control,
    seal_control,
    unpack_control,
)
from dynamoth.protocol.envelope import HEARTBEAT, Envelope, is_enveloped, open_envelope
from dynamoth_dispatcher.events import LOCAL, DispatcherAction
from dynamoth_dispatcher.forwarder import Forwarder
from dynamoth_dispatcher.forwarding_table import is_relayed
from dynamoth_dispatcher.options import DispatcherOptions
from dynamoth_dispatcher.transitions import Transition, Transitions, inherits

TAG_LISTENERS = "listeners"
TAG_SLOT_LISTENERS = "slot-listeners"


def read_control(data: bytes, counters: Counter[str]) -> ControlMessage | None:
    """Return a control message; None, and count it, where it cannot be read."""
    try:
        return unpack_control(data)
    except MalformedMessage:
        counters["malformed_messages"] += 1
        return None


def read_envelope(data: bytes, counters: Counter[str]) -> Envelope | None:
    """Return the envelope of a message; None for a raw message, and, counted, for one that cannot be read."""
    if not is_enveloped(data):
        return None
    try:
        return open_envelope(data)
    except MalformedMessage:
        counters["malformed_messages"] += 1
        return None


class ClientNotices:
    """Makes the notices of one dispatcher, and answers its clients; remembers which publishers have got a notice."""

    def __init__(
        self,
        server: str,
        options: DispatcherOptions,
        transitions: Transitions,
        forwarder: Forwarder,
        counters: Counter[str],
    ) -> None:
        self._server = server
        self._renotify_s = options.renotify_s
        self._transitions = transitions
        self._forwarder = forwarder
        self._counters = counters
        #: (publisher, channel) to (epoch, time) of the latest notice.
        self._sent: BoundedTable[tuple[int, bytes], tuple[int, float]] = BoundedTable(
            options.notified_max, options.names_bytes_max, lambda key, _: len(key[1]) + ENTRY_BYTES
        )
        #: Slots of whose losses the listeners here do not know yet, and those for which a list was asked.
        self._lost_slots: set[bytes] = set()
        self._listed_slots: set[bytes] = set()

    def link_down(self) -> None:
        """Forget what was asked over the connection."""
        self._lost_slots |= self._listed_slots
        self._listed_slots.clear()

    # New routes and changed rules.

    def redirect_publisher(self, channel: bytes, route: Route, publisher: int, now: float) -> list[DispatcherAction]:
        """Send a publisher the route to use, unless that was done just now."""
        key = (publisher, channel)
        epoch, at = self._sent.get(key) or (-1, 0.0)
        if epoch == route.epoch and now - at < self._renotify_s:
            return []
        self._sent.put(key, (route.epoch, now))
        self._counters["redirected_publishers"] += 1
        notice = pack_control(RouteNotice(channel, route))
        return [Send(LOCAL, (b"PUBLISH", inbox(publisher), notice))]

    def redirect_listeners(self, transition: Transition, locations: Iterable[Location]) -> list[DispatcherAction]:
        """Send the listeners at old locations the new route of a channel."""
        notice = seal_control(RouteNotice(transition.channel, transition.entry.route))
        actions: list[DispatcherAction] = [
            Send(LOCAL, (b"PUBLISH", location.physical, notice)) for location in locations
        ]
        self._counters["route_notices"] += len(actions)
        return actions

    def change_of_rules(self, plan: Plan, publisher: int | None = None) -> list[DispatcherAction]:
        """Make one publisher, or all clients here, read the compatibility rules."""
        version = plan.compatibility.version
        channel = CLIENTS_CHANNEL if publisher is None else inbox(publisher)
        return [Send(LOCAL, (b"PUBLISH", channel, pack_control(RulesChanged(version))))]

    # Listeners after a new plan.

    @staticmethod
    def ask_for_listeners() -> list[DispatcherAction]:
        """Ask who listens here, as some clients may be misplaced."""
        return [Send(LOCAL, (b"PUBSUB", b"CHANNELS"), (TAG_LISTENERS,))]

    def on_listeners(self, reply: Any, plan: Plan) -> list[DispatcherAction]:
        """Make subscribers verify their subscriptions where the plan does not send them here."""
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return []
        actions: list[DispatcherAction] = []
        for physical in filter(is_user_channel, reply):
            channel = logical_channel(physical)
            places = [place for route in plan.entry(channel).live_routes for place in route.locations(channel)]
            if Location(self._server, physical) not in places:
                actions.append(Send(LOCAL, (b"PUBLISH", physical, seal_control(LossNotice(channel, None)))))
        return actions

    # Losses.

    def list_slot(self, slot: bytes) -> list[DispatcherAction]:
        """Ask who listens here, as messages of a slot's channels may not have been forwarded to this server."""
        self._lost_slots.add(slot)
        return self.list_slots()

    def list_slots(self) -> list[DispatcherAction]:
        """Ask who listens here, for all slots with losses, unless a reply is outstanding: a list is long."""
        if self._listed_slots or not self._lost_slots:
            return []
        self._listed_slots, self._lost_slots = self._lost_slots, set()
        return [Send(LOCAL, (b"PUBSUB", b"CHANNELS"), (TAG_SLOT_LISTENERS,))]

    def report_losses(self, reply: Any, plan: Plan) -> list[DispatcherAction]:
        """Report to the listeners of slots' channels here that they may have missed something."""
        slots, self._listed_slots = self._listed_slots, set()
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return self.list_slots()
        actions: list[DispatcherAction] = [
            Send(LOCAL, (b"PUBLISH", channel, seal_control(LossNotice(channel, None))))
            for channel in filter(inherits, reply)
            if plan.slot_above(channel) in slots
        ]
        return [*actions, *self.list_slots()]

    # Requests of clients.

    def on_announcement(self, data: bytes, now: float) -> list[DispatcherAction]:
        """Send markers to a subscriber that has joined new locations here, at the servers of old ones."""
        message = read_control(data, self._counters)
        if not isinstance(message, Announcement):
            return []
        actions: list[DispatcherAction] = []
        to = inbox(message.client)
        named = frozenset(message.leaving)
        for physical in dict.fromkeys(message.joined):
            transition = self._transitions.get(logical_channel(physical))
            if transition is None or Location(self._server, physical) not in transition.new_here:
                continue
            if self._transitions.take_loss(transition):  # the list of listeners may come later than the marker
                notice = seal_control(LossNotice(transition.channel, None))
                for server in sorted(transition.old_servers):
                    actions += self._forwarder.forward(Location(server, transition.channel), notice)
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
        the publisher does not request a later one in the meantime.
        """
        request = read_control(data, self._counters)
        if not isinstance(request, ForwardRequest):
            self._counters["unexpected_messages"] += request is not None
            return []
        actions: list[DispatcherAction] = []
        for server, copy in request.copies:
            envelope = read_envelope(copy, self._counters)
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
