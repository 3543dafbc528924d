"""Messages of patterns: whose they are, each once, and in the order of their publisher.

Theory of operation
-------------------
A message comes under one *name*, a pattern that the server knows. A name may serve several patterns of the application,
and a pattern has several names; what is found out about a physical channel is kept with the name. Then the number in
the envelope decides, as for a channel that is subscribed to by name: see :class:`Sequences`, of which each (pattern,
channel) has one.

Two things differ. The messages of one publisher may come over several connections, whether its route has changed or
not: so the first one of an unknown publisher waits for its predecessor if that is owed. And everything is seen where it
was published: so copies of raw messages, and heartbeats of unknown publishers, tell nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.timers import Timers
from dynamoth.protocol.envelope import (
    CONTROL,
    HEADER_BYTES,
    HEARTBEAT,
    KNOWN_FLAGS,
    MAGIC,
    QUIET_BITS,
    RAW,
    ROUTE_CHANGED,
    Envelope,
    open_envelope,
    unpack_header,
)
from dynamoth_client.machines.held_bytes import HeldMessages
from dynamoth_client.machines.patterns.subscription import (
    MatchedChannel,
    PatternMessage,
    PatternName,
    PatternSubscription,
)
from dynamoth_client.machines.register import Register
from dynamoth_client.machines.sequences import Gap, Sequences

_UNUSUAL = CONTROL | HEARTBEAT | RAW

_IGNORED = CONTROL | RAW
"""What is for those who listen to channels by name: notices, and copies of raw messages."""

KNOWN_MAX_RATIO = 4
"""How many physical channels per remembered channel are known to a name at most; past it all are looked at again."""

NAMES_BYTES_MAX = 32 * 2**20
"""Bytes of the channels' names that are remembered per pattern, and known to a name; whoever publishes chooses them."""


@dataclass(slots=True)
class DeliverMatched:
    """Action: messages for the application, in order."""

    messages: list[PatternMessage]


@dataclass(slots=True)
class PatternGapDetected:
    """Action: messages of a pattern were, or may have been, lost (G5). None means unknown, or any."""

    pattern: bytes
    channel: bytes | None
    publisher: int | None
    count: int | None
    reason: str


class PatternMessages:
    """What comes for the patterns of one PubSub."""

    def __init__(
        self,
        hold_s_max: float,
        channels_max: int,
        counters: Counter[str],
        register: Register[PatternSubscription, dict[bytes, MatchedChannel]],
        timers: Timers[Any],
    ) -> None:
        """Begin without patterns.

        Args:
            hold_s_max: how long a message waits for an earlier one of its publisher.
            channels_max: channels per pattern that are remembered.
            counters: those of the machine.
            register: that of the machine.
            timers: those of the machine, for what is held.

        """
        self._hold_s_max = hold_s_max
        self._channels_max = channels_max
        self._counters = counters
        self._register = register
        self._timers = timers
        self._held: HeldMessages[MatchedChannel] = HeldMessages(counters)
        #: What servers know to whom it belongs, ending patterns included: the hot path's first look-up.
        self._names: dict[bytes, PatternName] = {}

    # Patterns.

    def add(self, subscription: PatternSubscription) -> None:
        """Take messages for a pattern from now on."""
        for name in subscription.names:
            known = self._names.setdefault(name, PatternName())
            known.users[subscription] = None
            known.forget_known()

    def remove(self, subscription: PatternSubscription) -> None:
        """Take no message for a pattern any more."""
        for name in subscription.names:
            known = self._names[name]
            del known.users[subscription]
            known.forget_known()
            if not known.users:
                del self._names[name]

    def users(self, name: bytes) -> list[PatternSubscription]:
        """Return the patterns that a name serves."""
        known = self._names.get(name)
        return [] if known is None else list(known.users)

    def unshared(self, subscription: PatternSubscription) -> tuple[bytes, ...]:
        """Return the names of a pattern that none needs which goes on."""
        return tuple(
            name
            for name in subscription.names
            if all(user is subscription or user.unsubscribe_acks_pending for user in self._names[name].users)
        )

    # Messages.

    def take(self, push: Sequence[Any], now: float, delivered: list[PatternMessage]) -> list[Any]:
        """Take one ``pmessage``: add it to ``delivered`` if it is expected, else return what to do behind those."""
        name = self._names.get(push[1])
        if name is None:
            return []
        found = name.known.get(push[2])
        if found is None:
            found = self._find(push[1], name, push[2], now)
        if len(found) == 1:
            return self._arrived(found[0], push[3], now, delivered)
        return [action for matched in found for action in self._arrived_alone(matched, push[3], now)]

    def _arrived_alone(self, matched: MatchedChannel, data: bytes, now: float) -> list[Any]:
        delivered: list[PatternMessage] = []
        actions = self._arrived(matched, data, now, delivered)
        return [DeliverMatched(delivered)] if delivered else actions

    def _arrived(self, matched: MatchedChannel, data: bytes, now: float, delivered: list[PatternMessage]) -> list[Any]:
        """Take one message: add it to ``delivered`` where it is the expected one, else return what is to be done."""
        pattern = matched.pattern
        matched.seen_at = now
        if data[:3] != MAGIC or len(data) < HEADER_BYTES or data[3] & ~KNOWN_FLAGS:
            self._counters["malformed_messages"] += data[:3] == MAGIC
            if self._held.size_bytes and matched.sequences.holds:
                return self._outcomes(matched, matched.sequences.arrive_plain(data, now))
            payload = data
        else:
            _, flags, publisher, number, _ = unpack_header(data)
            sequence = number >> QUIET_BITS
            stream = matched.sequences.streams.get(publisher)
            if flags & _UNUSUAL or stream is None or (expected := stream.next) is None:
                return self._unusual(matched, open_envelope(data), now)
            if stream.begun <= sequence < expected:
                return []  # a duplicate: many, under ALL_PUBLISHERS and while the channel moves
            if sequence != expected or stream.held:
                return self._unusual(matched, open_envelope(data), now)
            stream.next = sequence + 1
            payload = data[HEADER_BYTES:]
        message = PatternMessage(pattern.pattern, matched.channel, payload)
        if pattern.confirmed:
            delivered.append(message)
        else:
            pattern.keep(message)
        return []

    def _find(
        self, server_pattern: bytes, name: PatternName, physical: bytes, now: float
    ) -> tuple[MatchedChannel, ...]:
        """Find out to whom messages on a physical channel go that come under one name."""
        found: list[MatchedChannel] = []
        for subscription in list(name.users):
            channel = subscription.channel_of(server_pattern, physical)
            if channel is None:
                continue
            matched = subscription.channels.get(channel)
            if matched is None:
                self._make_room(subscription, len(channel), now)
                matched = MatchedChannel(subscription, channel, Sequences(self._hold_s_max))
                subscription.channels[channel] = matched
                subscription.names_bytes += len(channel)
            found.append(matched)
        too_many = len(name.known) >= KNOWN_MAX_RATIO * self._channels_max
        if too_many or name.known_bytes + len(physical) > NAMES_BYTES_MAX:
            name.forget_known()
        name.known[physical] = tuple(found)
        name.known_bytes += len(physical)
        return name.known[physical]

    def _make_room(self, subscription: PatternSubscription, name_bytes: int, now: float) -> None:
        """Forget idle channels if there is no room for one more with a name of so many bytes."""
        channels = subscription.channels
        if len(channels) < self._channels_max and subscription.names_bytes + name_bytes <= NAMES_BYTES_MAX:
            return
        count_max, bytes_max = self._channels_max * 3 // 4, NAMES_BYTES_MAX * 3 // 4 - name_bytes
        idle = [each for each in channels.values() if not any(s.held for s in each.sequences.streams.values())]
        idle.sort(key=lambda matched: matched.seen_at)
        for matched in idle:
            if len(channels) <= count_max and subscription.names_bytes <= bytes_max:
                break
            del channels[matched.channel]
            subscription.names_bytes -= len(matched.channel)
            self._counters["channels_forgotten"] += 1
        subscription.forgotten_at = now
        for name in subscription.names:
            self._names[name].forget_known()

    def _unusual(self, matched: MatchedChannel, envelope: Envelope, now: float) -> list[Any]:
        """Take a message that is not simply the expected one of a known publisher."""
        flags = envelope.flags
        if flags & _IGNORED:
            return []
        sequences = matched.sequences
        if flags & HEARTBEAT:
            stream = sequences.streams.get(envelope.publisher)
            if stream is None or stream.next is None:
                return []  # what it tells of is seen where it was published, or its loss is told with a connection's
        subscription = matched.pattern
        subscription.is_new = False
        since = max(subscription.confirmed_at, subscription.forgotten_at)
        # The previous message may come over another connection, whether the publisher has changed its route or not.
        outcomes = sequences.arrive(
            envelope.publisher,
            envelope.sequence,
            flags | ROUTE_CHANGED,
            envelope.payload,
            now,
            envelope.previous_at(now),
            since,
        )
        self._watch(matched, envelope.publisher)
        return [*self._outcomes(matched, outcomes), *self._relieve(now)]

    def _relieve(self, now: float) -> list[Any]:
        """Release held messages, as far as too many bytes are held."""
        actions: list[Any] = []
        while (over := self._held.over()) is not None:
            matched, publisher = over
            outcomes = self._held.release(matched, publisher, now)
            if self._register.is_current(matched.pattern.pattern, matched.pattern):
                actions += self._outcomes(matched, outcomes)
        return actions

    def _watch(self, matched: MatchedChannel, publisher: int) -> None:
        """Count the held messages of one stream, and see to it that they expire."""
        self._held.note(matched, publisher)
        if (expiry := matched.sequences.watch(publisher)) is not None:
            self._timers.add(expiry, self._expire, matched, publisher)

    @staticmethod
    def _outcomes(matched: MatchedChannel, outcomes: Sequence[bytes | Gap]) -> list[Any]:
        subscription, channel = matched.pattern, matched.channel
        pattern = subscription.pattern
        actions: list[Any] = []
        for outcome in outcomes:
            if isinstance(outcome, Gap):
                if subscription.confirmed:  # else what is missing was owed to nobody
                    gap = PatternGapDetected(pattern, channel, outcome.publisher, outcome.count, outcome.reason)
                    actions.append(gap)
                continue
            message = PatternMessage(pattern, channel, outcome)
            if not subscription.confirmed:
                subscription.keep(message)
            elif actions and isinstance(actions[-1], DeliverMatched):
                actions[-1].messages.append(message)
            else:
                actions.append(DeliverMatched([message]))
        return actions

    def _expire(self, matched: MatchedChannel, publisher: int, now: float) -> list[Any]:
        """Release what one stream has held for too long."""
        if not self._register.is_current(matched.pattern.pattern, matched.pattern):
            matched.sequences.drop_held(publisher)
            self._held.note(matched, publisher)
            return []
        outcomes = matched.sequences.expire(publisher, now)
        self._watch(matched, publisher)
        return self._outcomes(matched, outcomes)
