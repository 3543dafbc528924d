"""Delivers a subscriber's messages, each once and in the order of its publisher, and hands on control messages.

Theory of operation
-------------------
The link and the physical channel of a push name its subscription. The number in its envelope says whether it is
delivered, held or dropped: see :class:`Sequences`. It does not matter in how many places a message is seen, or which
way it came. Nearly every message is the expected one of a known publisher: ``take_expected`` handles no other.

Messages before the confirmation are kept and delivered behind it. Control messages of dispatchers come between the
messages of a channel, and go to :class:`Routing`, as do the markers that come to the inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import Pushed
from dynamoth.plan.plan import Location
from dynamoth.protocol.control import LossNotice, Marker, RouteNotice, unpack_control
from dynamoth.protocol.envelope import (
    CONTROL,
    FIRST,
    FORWARDED,
    HEADER_BYTES,
    MAGIC,
    QUIET_BITS,
    ROUTE_CHANGED,
    Envelope,
    head_of,
    is_enveloped,
    open_envelope,
    unpack_numbered,
)
from dynamoth_client.machines.held_bytes import HeldMessages
from dynamoth_client.machines.register import State
from dynamoth_client.machines.sequences import Gap, Outcome
from dynamoth_client.machines.subscriber.events import Deliver, GapDetected, SubscriberAction, numbered
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.part import Part, Shared
from dynamoth_client.machines.subscriber.routing import Routing
from dynamoth_client.machines.subscriber.subscription import Subscription

_NUMBERED = frozenset(head_of(flags) for flags in range(256) if not flags & ~(FORWARDED | FIRST | ROUTE_CHANGED))
"""The first bytes of the messages that ``take_expected`` handles by their numbers alone."""

_NO_HEADER = (0, 0, 0)
_JOINING = State.JOINING

Message = tuple[bytes, bytes]
"""Channel and payload, as :class:`Deliver` has them."""


class ChannelMessages(Part):
    """Handles the pushes of one subscriber's links."""

    def __init__(
        self,
        shared: Shared,
        listening: Listening,
        routing: Routing,
        on_acknowledgement: Callable[[str, Sequence[Any], float], list[SubscriberAction]],
    ) -> None:
        """Begin. ``on_acknowledgement`` handles a push that is no message; gets its link, the push and the time."""
        super().__init__(shared)
        self._links = listening.links
        self._numbers = self._options.numbered
        self._inbox = listening.inbox
        self._routing = routing
        self._on_acknowledgement = on_acknowledgement
        self._held: HeldMessages[Subscription, SubscriberAction] = HeldMessages(
            self._counters, self._timers, self._released, self._has_successor
        )

    def on_pushed(self, event: Pushed, now: float) -> list[SubscriberAction]:
        """Handle the pushes of one link; return the actions, with deliveries in their place."""
        link, pushes = event.link, event.messages
        actions: list[SubscriberAction] = []
        taken = 0
        while True:
            expected: list[Message] = []
            taken = self.take_expected(link, pushes, expected.append, taken)
            if expected:
                actions.append(Deliver(expected))
            if taken == len(pushes):
                return actions
            actions += self._on_unexpected(link, pushes[taken], now)
            taken += 1

    def take_expected(
        self, link: str, pushes: Sequence[Sequence[Any]], deliver: Callable[[Message], object], begin: int = 0
    ) -> int:
        """Deliver expected messages: see :class:`dynamoth.machine.events.DirectDelivery`.

        These are, on a confirmed subscription, the expected message of a known publisher, a copy, and a plain message
        while none waits.
        """
        places = self._links[link].places
        for index in range(begin, len(pushes)):
            push = pushes[index]
            subscription = places.get(push[1]) if push[0] == b"message" else None
            if subscription is None or subscription.state is _JOINING:
                return index
            data: bytes = push[2]
            head, publisher, number = unpack_numbered(data) if len(data) >= HEADER_BYTES else _NO_HEADER
            if head in _NUMBERED:
                stream = subscription.sequences.streams.get(publisher)
                if stream is None or (expected := stream.next) is None:
                    return index
                sequence = number >> QUIET_BITS
                if sequence == expected and not stream.held:
                    stream.next = sequence + 1
                    payload = data[HEADER_BYTES:]
                    deliver(
                        (subscription.channel, numbered(payload, publisher, sequence) if self._numbers else payload)
                    )
                elif not stream.begun <= sequence < expected:  # a copy: many are, while the channel moves
                    return index
            elif data[:3] == MAGIC or (self._held.size_bytes and subscription.sequences.holds):
                return index
            else:
                deliver((subscription.channel, data))
        return len(pushes)

    def _on_unexpected(self, link: str, push: Sequence[Any], now: float) -> list[SubscriberAction]:
        """Handle a push that ``take_expected`` has left."""
        if push[0] != b"message":
            return self._on_acknowledgement(link, push, now)
        physical: bytes = push[1]
        data: bytes = push[2]
        subscription = self._links[link].places.get(physical)
        if subscription is None:
            return self._on_inbox(link, data, now) if physical == self._inbox else []
        try:
            envelope = open_envelope(data)
        except MalformedMessage:
            if is_enveloped(data):
                self._counters["malformed_messages"] += 1
            return self._released(subscription, subscription.sequences.arrive_plain(data, now))
        if envelope.flags & CONTROL:
            return self._on_control(subscription, link, envelope.payload, now)
        return self._on_numbered(subscription, link, physical, envelope, now)

    def _on_numbered(
        self, subscription: Subscription, link: str, physical: bytes, envelope: Envelope, now: float
    ) -> list[SubscriberAction]:
        """Handle a message that is not simply the expected one of a known publisher."""
        flags = envelope.flags
        if subscription.is_moving and Location(link, physical) in subscription.targets:
            flags |= ROUTE_CHANGED  # earlier messages of this place are on their way to the one that is being left
        payload = envelope.payload
        outcomes = subscription.sequences.arrive(
            envelope.publisher,
            envelope.sequence,
            flags,
            numbered(payload, envelope.publisher, envelope.sequence) if self._numbers else payload,
            now,
            envelope.previous_at(now),
            subscription.confirmed_at,
        )
        self._held.watch(subscription, envelope.publisher)
        return [*self._released(subscription, outcomes), *self._held.relieve(now)]

    def _has_successor(self, subscription: Subscription) -> bool:
        """Return whether a subscription that has ended has left its numbers to the next one to its channel."""
        successor = self._register.current.get(subscription.channel)
        return successor is not None and successor.sequences is subscription.sequences

    @staticmethod
    def _released(subscription: Subscription, outcomes: Sequence[Outcome]) -> list[SubscriberAction]:
        """Deliver messages and report gaps; until the confirmation, messages are kept and a gap is none."""
        channel = subscription.channel
        actions: list[SubscriberAction] = []
        for outcome in outcomes:
            if subscription.state is _JOINING:
                if not isinstance(outcome, Gap):
                    subscription.keep(outcome)
            elif isinstance(outcome, Gap):
                actions.append(GapDetected(channel, outcome.publisher, outcome.count, outcome.reason))
            elif actions and isinstance(last := actions[-1], Deliver):
                last.messages.append((channel, outcome))
            else:
                actions.append(Deliver([(channel, outcome)]))
        return actions

    # Control messages of dispatchers.

    def _on_control(self, subscription: Subscription, link: str, payload: bytes, now: float) -> list[SubscriberAction]:
        """Handle a control message for the subscribers of a channel."""
        try:
            message = unpack_control(payload)
        except UnknownMode as error:
            return [*self._plan.too_old(error)]
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        if subscription.state is State.ENDING:
            return []
        match message:
            case RouteNotice(channel, route) if channel == subscription.channel:
                return self._routing.on_route_notice(subscription, link, route, now)
            case LossNotice(channel, lost) if channel == subscription.channel:
                gap = GapDetected(channel, None, lost, "the agent of a server could not forward messages")
                gaps: list[SubscriberAction] = [] if subscription.state is _JOINING else [gap]
                return gaps if lost is not None else [*gaps, *self._routing.verify_all(subscription)]
            case _:
                self._counters["unexpected_messages"] += 1
                return []

    def _on_inbox(self, link: str, data: bytes, now: float) -> list[SubscriberAction]:
        """Handle a message to the inbox: a marker."""
        try:
            message = unpack_control(open_envelope(data).payload)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        if not isinstance(message, Marker):
            self._counters["unexpected_messages"] += 1
            return []
        return self._routing.on_marker(link, message, now)

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        self._held.check()
