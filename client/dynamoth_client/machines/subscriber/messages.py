"""What comes to a subscriber: messages, each once and in the order of their publisher, and what dispatchers say.

Theory of operation
-------------------
The link and the physical channel of a push tell whose it is, and the number in its envelope whether it is to be
delivered, held or dropped: see :class:`Sequences`. It does not matter in how many places a message is seen, or by which
road it came. Nearly every message is the expected one of a known publisher: ``take_expected`` knows no other.

What comes before the confirmation is kept and delivered behind it. Among the messages are those of dispatchers to
subscribers, which go to :class:`Routing`; markers come to the inbox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dynamoth.errors import MalformedMessage, UnknownMode
from dynamoth.machine.events import Pushed
from dynamoth.machine.timers import Timers
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
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.register import Register
from dynamoth_client.machines.sequences import Gap, Sequences
from dynamoth_client.machines.subscriber.events import Deliver, GapDetected
from dynamoth_client.machines.subscriber.listening import Listening
from dynamoth_client.machines.subscriber.routing import Routing
from dynamoth_client.machines.subscriber.subscription import Subscription

_NUMBERED = frozenset(head_of(flags) for flags in range(256) if not flags & ~(FORWARDED | FIRST | ROUTE_CHANGED))
"""How messages begin whose number alone says what is to be done with them."""

_NO_HEADER = (0, 0, 0)

Message = tuple[bytes, bytes]
"""Channel and payload, as :class:`Deliver` has them."""


class ChannelMessages:
    """What comes over the links of one subscriber."""

    def __init__(
        self,
        local_plan: LocalPlan,
        counters: Counter[str],
        register: Register[Subscription, Sequences],
        listening: Listening,
        routing: Routing,
        timers: Timers[Any],
        acknowledged: Callable[[str, Sequence[Any], float], list[Any]],
    ) -> None:
        """Begin. All but ``acknowledged`` are the machine's own.

        Args:
            local_plan: notes routes that are not understood.
            counters: of what is malformed.
            register: has the subscriptions.
            listening: has the links.
            routing: gets what dispatchers say of routes.
            timers: for what is held.
            acknowledged: takes, with its link and the time, a push that is no message.

        """
        self._plan = local_plan
        self._counters = counters
        self._register = register
        self._links = listening.links
        self._inbox = listening.inbox
        self._routing = routing
        self._timers = timers
        self._acknowledged = acknowledged
        self._held: HeldMessages[Subscription] = HeldMessages(counters)

    def take(self, event: Pushed, now: float) -> list[Any]:
        """Take what came over one link; return what is to be done, deliveries in their place."""
        link, pushes = event.link, event.messages
        actions: list[Any] = []
        taken = 0
        while True:
            expected: list[Message] = []
            taken = self.take_expected(link, pushes, expected.append, taken)
            if expected:
                actions.append(Deliver(expected))
            if taken == len(pushes):
                return actions
            actions += self._take_unexpected(link, pushes[taken], now)
            taken += 1

    def take_expected(
        self, link: str, pushes: Sequence[Sequence[Any]], deliver: Callable[[Message], object], begin: int = 0
    ) -> int:
        """Take pushes from the one at ``begin`` on, as long as each is a message to be delivered at once, or a copy.

        That is, on a confirmed subscription, the expected one of a known publisher, one that has come before, or a
        plain one: nearly every one is. ``deliver`` is called with each to be delivered. Returns the index of the first
        push that was not taken.
        """
        places = self._links[link].places
        for index in range(begin, len(pushes)):
            push = pushes[index]
            subscription = places.get(push[1]) if push[0] == b"message" else None
            if subscription is None or not subscription.confirmed:
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
                    deliver((subscription.channel, data[HEADER_BYTES:]))
                elif not stream.begun <= sequence < expected:  # a copy: many are, while the channel moves
                    return index
            elif data[:3] == MAGIC or (self._held.size_bytes and subscription.sequences.holds):
                return index
            else:
                deliver((subscription.channel, data))
        return len(pushes)

    def _take_unexpected(self, link: str, push: Sequence[Any], now: float) -> list[Any]:
        """Take a push that ``take_expected`` has left."""
        if push[0] != b"message":
            return self._acknowledged(link, push, now)
        physical: bytes = push[1]
        data: bytes = push[2]
        subscription = self._links[link].places.get(physical)
        if subscription is None:
            return self._marked(link, data, now) if physical == self._inbox else []
        try:
            envelope = open_envelope(data)
        except MalformedMessage:
            if is_enveloped(data):
                self._counters["malformed_messages"] += 1
            return self._outcomes(subscription, subscription.sequences.arrive_plain(data, now))
        return self._unusual(subscription, link, physical, envelope, now)

    def _unusual(
        self, subscription: Subscription, link: str, physical: bytes, envelope: Envelope, now: float
    ) -> list[Any]:
        """Take a message that is not simply the expected one of a known publisher."""
        if envelope.flags & CONTROL:
            return self._controlled(subscription, link, envelope.payload, now)
        flags = envelope.flags
        moving = subscription.leaving or subscription.ended_moving
        if moving and Location(link, physical) in subscription.targets:
            flags |= ROUTE_CHANGED  # what came here before this subscriber did is on its way to the place it is leaving
        outcomes = subscription.sequences.arrive(
            envelope.publisher,
            envelope.sequence,
            flags,
            envelope.payload,
            now,
            envelope.previous_at(now),
            subscription.confirmed_at,
        )
        self._watch(subscription, envelope.publisher)
        return [*self._outcomes(subscription, outcomes), *self._relieve(now)]

    def _relieve(self, now: float) -> list[Any]:
        """Release held messages, as far as too many bytes are held."""
        actions: list[Any] = []
        while (over := self._held.over()) is not None:
            subscription, publisher = over
            outcomes = self._held.release(subscription, publisher, now)
            if self._register.is_current(subscription.channel, subscription):
                actions += self._outcomes(subscription, outcomes)
        return actions

    def _watch(self, subscription: Subscription, publisher: int) -> None:
        """Count the held messages of one stream, and see to it that they expire."""
        self._held.note(subscription, publisher)
        if (expiry := subscription.sequences.watch(publisher)) is not None:
            self._timers.add(expiry, self._expire, subscription, publisher)

    def _expire(self, subscription: Subscription, publisher: int, now: float) -> list[Any]:
        """Release what one stream has held for too long."""
        if not self._register.is_current(subscription.channel, subscription):
            successor = self._register.current.get(subscription.channel)
            if successor is None or successor.sequences is not subscription.sequences:
                subscription.sequences.drop_held(publisher)
            self._held.forget(subscription, publisher)
            return []
        outcomes = subscription.sequences.expire(publisher, now)
        self._watch(subscription, publisher)
        return self._outcomes(subscription, outcomes)

    @staticmethod
    def _outcomes(subscription: Subscription, outcomes: Sequence[bytes | Gap]) -> list[Any]:
        channel = subscription.channel
        actions: list[Any] = []
        for outcome in outcomes:
            if not subscription.confirmed:
                if not isinstance(outcome, Gap):  # what is missing was owed to nobody
                    subscription.keep(outcome)
            elif isinstance(outcome, Gap):
                actions.append(GapDetected(channel, outcome.publisher, outcome.count, outcome.reason))
            elif actions and isinstance(actions[-1], Deliver):
                actions[-1].messages.append((channel, outcome))
            else:
                actions.append(Deliver([(channel, outcome)]))
        return actions

    # What dispatchers say.

    def _controlled(self, subscription: Subscription, link: str, payload: bytes, now: float) -> list[Any]:
        """Take a message to the subscribers of a channel."""
        try:
            message = unpack_control(payload)
        except UnknownMode as error:
            return list(self._plan.too_old(error))
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        if subscription.unsubscribe_acks_pending:
            return []
        match message:
            case RouteNotice(channel, route) if channel == subscription.channel:
                return self._routing.noticed(subscription, link, route, now)
            case LossNotice(channel, lost) if channel == subscription.channel and subscription.confirmed:
                told = GapDetected(channel, None, lost, "the agent of a server could not forward messages")
                return [told] if lost is not None else [told, *self._routing.look_whether_right(subscription)]
            case _:
                self._counters["unexpected_messages"] += 1
                return []

    def _marked(self, link: str, data: bytes, now: float) -> list[Any]:
        """Take a message to the inbox."""
        try:
            message = unpack_control(open_envelope(data).payload)
        except MalformedMessage:
            self._counters["malformed_messages"] += 1
            return []
        if not isinstance(message, Marker):
            self._counters["unexpected_messages"] += 1
            return []
        return self._routing.marked(link, message, now)
