"""Delivers the messages of patterns, each once and in the order of its publisher.

Theory of operation
-------------------
A message comes under one *name*, a pattern that the server knows. A name may serve several patterns of the application,
and a pattern has several names. The name remembers which patterns a physical channel matches. Then the number in the
envelope decides, as for a channel that is subscribed to by name: each (pattern, channel) has its :class:`Sequences`.

Two things differ. The messages of one publisher may come over several connections, whether its route has changed or
not: so the first one of an unknown publisher waits for its predecessor if that is due. And every message is seen where
it was published: so copies of raw messages, and heartbeats of unknown publishers, add nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
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
from dynamoth_client.machines.patterns.events import (
    DeliverMatched,
    PatternAction,
    PatternGapDetected,
    PatternMessage,
    PatternOptions,
)
from dynamoth_client.machines.patterns.subscription import MatchedChannel, PatternName, PatternSubscription
from dynamoth_client.machines.register import State
from dynamoth_client.machines.sequences import Gap, Outcome, Sequences

_JOINING = State.JOINING
_UNUSUAL = CONTROL | HEARTBEAT | RAW

_IGNORED = CONTROL | RAW
"""Notices and copies of raw messages are for subscribers by name."""

KNOWN_MAX_RATIO = 4
"""Physical channels per remembered channel that a name knows at most; past it all are looked up again."""

NAMES_BYTES_MAX = 32 * 2**20
"""Bytes of the channels' names that are remembered per pattern, and known to a name; whoever publishes chooses them."""


class PatternMessages:
    """Handles the messages for the patterns of one PubSub."""

    def __init__(self, options: PatternOptions, counters: Counter[str], timers: Timers[PatternAction]) -> None:
        """Begin without patterns; all arguments are the machine's own."""
        self._hold_s_max = options.hold_s_max
        self._channels_max = options.channels_max
        self._counters = counters
        self._held: HeldMessages[MatchedChannel, PatternAction] = HeldMessages(counters, timers, self._released)
        #: The names of all patterns, also of ending ones: the hot path's first look-up.
        self._names: dict[bytes, PatternName] = {}

    # Patterns.

    def add(self, subscription: PatternSubscription) -> None:
        """Deliver messages of a pattern from now on."""
        for name in subscription.names:
            known = self._names.setdefault(name, PatternName())
            known.add(subscription)

    def remove(self, subscription: PatternSubscription) -> None:
        """Deliver no message of a pattern any more."""
        for name in subscription.names:
            known = self._names[name]
            known.remove(subscription)
            if not known.users:
                del self._names[name]

    def users(self, name: bytes) -> list[PatternSubscription]:
        """Return the patterns that a name serves."""
        known = self._names.get(name)
        return [] if known is None else list(known.users)

    def unshared(self, subscription: PatternSubscription) -> tuple[bytes, ...]:
        """Return the names of a pattern that no other one needs, apart from ending ones."""
        return tuple(
            name
            for name in subscription.names
            if all(user is subscription or user.state is State.ENDING for user in self._names[name].users)
        )

    # Messages.

    def on_message(self, push: Sequence[Any], now: float, expected: list[PatternMessage]) -> list[PatternAction]:
        """Handle one ``pmessage``: add it to ``expected`` if it is, else return the actions behind those."""
        name = self._names.get(push[1])
        if name is None:
            return []
        found = name.known.get(push[2])
        if found is None:
            found = self._find(push[1], name, push[2], now)
        if len(found) == 1:
            return self._on_matched(found[0], push[3], now, expected)
        return [action for matched in found for action in self._on_shared(matched, push[3], now)]

    def _on_shared(self, matched: MatchedChannel, data: bytes, now: float) -> list[PatternAction]:
        """Handle a message that matches several patterns, for one of them."""
        expected: list[PatternMessage] = []
        actions = self._on_matched(matched, data, now, expected)
        return [DeliverMatched(expected)] if expected else actions

    def _on_matched(
        self, matched: MatchedChannel, data: bytes, now: float, expected: list[PatternMessage]
    ) -> list[PatternAction]:
        """Handle one message for one pattern: add it to ``expected`` if it is, else return the actions."""
        pattern = matched.pattern
        matched.seen_at = now
        if data[:3] != MAGIC or len(data) < HEADER_BYTES or data[3] & ~KNOWN_FLAGS:
            self._counters["malformed_messages"] += data[:3] == MAGIC
            if self._held.size_bytes and matched.sequences.holds:
                return self._released(matched, matched.sequences.arrive_plain(data, now))
            payload = data
        else:
            _, flags, publisher, number, _ = unpack_header(data)
            sequence = number >> QUIET_BITS
            stream = matched.sequences.streams.get(publisher)
            if flags & _UNUSUAL or stream is None or (next_number := stream.next) is None:
                return self._on_unexpected(matched, open_envelope(data), now)
            if stream.begun <= sequence < next_number:
                return []  # a duplicate: many, under ALL_PUBLISHERS and while the channel moves
            if sequence != next_number or stream.held:
                return self._on_unexpected(matched, open_envelope(data), now)
            stream.next = sequence + 1
            payload = data[HEADER_BYTES:]
        message = PatternMessage(pattern.pattern, matched.channel, payload)
        if pattern.state is _JOINING:
            pattern.keep(message)
        else:
            expected.append(message)
        return []

    def _find(
        self, server_pattern: bytes, name: PatternName, physical: bytes, now: float
    ) -> tuple[MatchedChannel, ...]:
        """Find out which patterns the messages match that come on a physical channel under one name."""
        found: list[MatchedChannel] = []
        for subscription in list(name.users):
            channel = subscription.channel_of(server_pattern, physical)
            if channel is None:
                continue
            matched = subscription.channels.get(channel)
            if matched is None:
                self._make_room(subscription, len(channel), now)
                matched = subscription.add(channel, Sequences(self._hold_s_max))
            found.append(matched)
        too_many = len(name.known) >= KNOWN_MAX_RATIO * self._channels_max
        if too_many or name.known_bytes + len(physical) > NAMES_BYTES_MAX:
            name.forget_known()
        return name.know(physical, tuple(found))

    def _make_room(self, subscription: PatternSubscription, name_bytes: int, now: float) -> None:
        """Forget idle channels if there is no room for one more with a name of ``name_bytes``."""
        channels = subscription.channels
        if len(channels) < self._channels_max and subscription.names_bytes + name_bytes <= NAMES_BYTES_MAX:
            return
        count_max, bytes_max = self._channels_max * 3 // 4, NAMES_BYTES_MAX * 3 // 4 - name_bytes
        idle = [each for each in channels.values() if not any(s.held for s in each.sequences.streams.values())]
        idle.sort(key=lambda matched: matched.seen_at)
        number, excess_bytes = 0, subscription.names_bytes - bytes_max
        while number < len(idle) and (len(channels) - number > count_max or excess_bytes > 0):
            excess_bytes -= len(idle[number].channel)
            number += 1
        subscription.forget([matched.channel for matched in idle[:number]], now)
        self._counters["channels_forgotten"] += number
        for name in subscription.names:
            self._names[name].forget_known()

    def _on_unexpected(self, matched: MatchedChannel, envelope: Envelope, now: float) -> list[PatternAction]:
        """Handle a message that is not simply the expected one of a known publisher."""
        flags = envelope.flags
        if flags & _IGNORED:
            return []
        sequences = matched.sequences
        if flags & HEARTBEAT:
            stream = sequences.streams.get(envelope.publisher)
            if stream is None or stream.next is None:
                return []  # its message is seen where it was published, or is a part of a connection's gap
        subscription = matched.pattern
        subscription.note_message()
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
        self._held.watch(matched, envelope.publisher)
        return [*self._released(matched, outcomes), *self._held.relieve(now)]

    @staticmethod
    def _released(matched: MatchedChannel, outcomes: Sequence[Outcome]) -> list[PatternAction]:
        """Deliver messages and report gaps; until the confirmation, messages are kept and a gap is none."""
        subscription, channel = matched.pattern, matched.channel
        pattern = subscription.pattern
        actions: list[PatternAction] = []
        for outcome in outcomes:
            if isinstance(outcome, Gap):
                if subscription.state is not _JOINING:
                    gap = PatternGapDetected(pattern, channel, outcome.publisher, outcome.count, outcome.reason)
                    actions.append(gap)
                continue
            message = PatternMessage(pattern, channel, outcome)
            if subscription.state is _JOINING:
                subscription.keep(message)
            elif actions and isinstance(last := actions[-1], DeliverMatched):
                last.messages.append(message)
            else:
                actions.append(DeliverMatched([message]))
        return actions

    def check(self, subscriptions: Collection[PatternSubscription]) -> None:
        """Assert the invariants that hold between events; ``subscriptions`` are all that are registered."""
        self._held.check()
        names = {name for subscription in subscriptions for name in subscription.names}
        assert self._names.keys() == names, f"names {[*self._names]} for patterns {subscriptions}"
        for name, known in self._names.items():
            users = {each for each in subscriptions if name in each.names}
            assert known.users.keys() == users, f"{name!r} serves {[each.pattern for each in known.users]}"
            assert known.known_bytes == sum(map(len, known.known)), f"{name!r} knows {known.known_bytes} bytes"
            known_channels = {id(matched) for found in known.known.values() for matched in found}
            assert known_channels <= {id(m) for each in users for m in each.channels.values()}, f"{name!r}: forgotten"
