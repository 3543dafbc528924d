"""The records of one pattern: the subscription, its places at servers, the channels that matched, and the links.

Only the methods here change these records (``tests/machines/test_writers.py``), but for ``seen_at``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from dynamoth.globs import compile_glob, physical_patterns
from dynamoth.names import RESERVED_PREFIX, is_user_channel, logical_channel
from dynamoth_client.machines.patterns.events import PatternMessage
from dynamoth_client.machines.register import Registered, State
from dynamoth_client.machines.sequences import Sequences
from dynamoth_client.machines.subscriber.subscription import EARLY_MAX

NEVER = 2**63
"""In place of the number of a reading of the header: no reading has this number."""


@dataclass(slots=True, eq=False)
class MatchedChannel:
    """A channel that matched a pattern."""

    pattern: PatternSubscription
    channel: bytes
    sequences: Sequences
    #: When a message of it came last. The hot path sets it.
    seen_at: float = 0.0

    @property
    def is_current(self) -> bool:
        """Whether its pattern is current."""
        return self.pattern.is_current


@dataclass(slots=True, eq=False)
class PatternPlace:
    """A pattern at one server."""

    #: Those of the pattern's names whose subscription the server has not acknowledged on the present connection.
    missing: set[bytes]
    #: The first reading of the header that is behind the PSUBSCRIBE on the present connection.
    attempt: int = NEVER
    #: On the present connection the header was read behind the subscription.
    verified: bool = False
    #: The server was away for ``failover_s``: the pattern is confirmed without it.
    excused: bool = False
    #: Why messages from here may have been missed, until the application gets the gap.
    lost: str | None = None
    #: A server that was not known before: nothing was missed there if it has acknowledged all names before this time.
    join_until: float = float("inf")

    def listen(self, reading: int) -> None:
        """Note the first reading of the header that is behind the PSUBSCRIBE."""
        self.attempt = reading

    def acknowledge(self, name: bytes) -> None:
        """Note that the server has taken the subscription of a name; those of all names end ``join_until``."""
        self.missing.discard(name)
        if self.lost is not None or not self.missing:
            self.join_until = float("inf")

    def verify(self, reading: int) -> None:
        """Note a reading of the header."""
        self.verified = self.verified or (reading >= self.attempt and not self.missing)

    def excuse(self, *, is_away: bool = True) -> None:
        """Do without the server for a confirmation, or not."""
        self.excused = is_away

    def disconnect(self, names: tuple[bytes, ...]) -> None:
        """Forget what was true of the connection that was lost."""
        self.missing.update(names)
        self.attempt = NEVER
        self.verified = False

    def lose(self, reason: str) -> None:
        """Note, unless it is noted for another reason, that messages from here may have been missed."""
        self.lost = self.lost or reason

    def lose_if_late(self, server: str, now: float) -> None:
        """Note that messages may have been missed at a server that was joined too late."""
        if now >= self.join_until:
            self.lose(f"server {server} was not known before")

    def take_lost(self) -> str | None:
        """Return, once, why messages may have been missed."""
        lost, self.lost = self.lost, None
        return lost


@dataclass(eq=False)
class PatternSubscription(Registered):
    """One pattern of one PubSub.

    ========= ==================================== ================================================================
    state     places                               changed by
    ========= ==================================== ================================================================
    JOINING   one for each link                    all verified or excused: ``confirm``
    LISTENING one for each link                    ``begin_to_end``: ENDING
    ENDING    servers that have yet to acknowledge ``leave`` of the last one: ENDED
              PUNSUBSCRIBE
    ENDED     none
    ========= ==================================== ================================================================
    """

    #: As the application gave it.
    pattern: bytes
    #: User's channel to its streams; at first those of an earlier subscription to the pattern.
    channels: dict[bytes, MatchedChannel]
    #: The patterns that servers know. The last one is for replicated channels.
    names: tuple[bytes, ...] = field(init=False)
    #: Server to place.
    places: dict[str, PatternPlace] = field(default_factory=dict[str, PatternPlace])
    #: Sum of the lengths of the channels' names.
    names_bytes: int = field(init=False)
    #: Channels were forgotten at this time: earlier messages may have been delivered.
    forgotten_at: float = float("-inf")
    #: Messages that wait for the confirmation.
    early: list[PatternMessage] = field(default_factory=list[PatternMessage])
    #: Whether no message has come since ``start_over``.
    is_new: bool = False

    def __post_init__(self) -> None:
        """Compute the names, and own the channels."""
        self.names = physical_patterns(self.pattern)
        self.names_bytes = sum(map(len, self.channels))
        for matched in self.channels.values():
            matched.pattern = self

    # Places.

    def join(self, server: str, *, excused: bool, join_until: float = float("inf")) -> None:
        """Add a place at a server, for the present link to it."""
        self.places[server] = PatternPlace(set(self.names), excused=excused, join_until=join_until)

    def leave(self, server: str) -> PatternPlace | None:
        """Remove the place at a server and return it; None where there is none."""
        return self.places.pop(server, None)

    # Messages.

    def start_over(self) -> None:
        """Forget the messages before the confirmation: some between these and those that come may be missing."""
        if self.is_new:
            return
        self.is_new = True
        self.early.clear()
        for matched in self.channels.values():
            matched.sequences.resume()

    def note_message(self) -> None:
        """Note that a message has come."""
        self.is_new = False

    def keep(self, message: PatternMessage) -> None:
        """Keep a message until the confirmation; of too many the newest."""
        self.is_new = False
        self.early.append(message)
        if len(self.early) > EARLY_MAX:
            del self.early[0]

    def take_early(self) -> list[PatternMessage]:
        """Return, once, the messages that came before the confirmation."""
        early, self.early = self.early, []
        return early

    # Channels.

    def add(self, channel: bytes, sequences: Sequences) -> MatchedChannel:
        """Add a channel that matches."""
        matched = self.channels[channel] = MatchedChannel(self, channel, sequences)
        self.names_bytes += len(channel)
        return matched

    def forget(self, channels: Iterable[bytes], now: float) -> None:
        """Forget which messages of some channels were delivered."""
        self.forgotten_at = now
        for channel in channels:
            del self.channels[channel]
            self.names_bytes -= len(channel)

    @property
    def is_joined(self) -> bool:
        """Return whether every server is verified or excused, and at least one is verified."""
        places = self.places.values()
        return all(place.verified or place.excused for place in places) and any(place.verified for place in places)

    def channel_of(self, name: bytes, physical: bytes) -> bytes | None:
        """Return the user's channel that a physical one belongs to; None where the message is not for the pattern.

        The channel may be no application's, ``name`` may match more than the pattern does, and the server may send the
        same message for another of the names.
        """
        if name == self.names[-1]:
            channel = logical_channel(physical)
            if channel.startswith(RESERVED_PREFIX):  # a plain client's: no replica of ours is named so
                return None
            return channel if self._glob.fullmatch(channel) else None
        if physical.startswith(RESERVED_PREFIX) or not is_user_channel(physical):
            return None
        if len(self.names) > 2 and name != next((own for own, glob in self._parts if glob.fullmatch(physical)), None):
            return None
        return physical

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        Registered.check(self)
        assert self.state is State.JOINING or not self.early, f"{self.pattern!r}: messages wait for no confirmation"
        assert self.names_bytes == sum(map(len, self.channels)), f"{self.pattern!r}: {self.names_bytes} bytes of names"
        for server, place in self.places.items():
            assert place.missing <= set(self.names), f"{self.pattern!r} at {server} misses {place.missing}"
            assert not (place.verified and place.missing), (
                f"{self.pattern!r} at {server} is verified too early: {place}"
            )
            assert place.lost is None or self.state is not State.JOINING, f"{self.pattern!r} is not confirmed: {place}"
        for matched in self.channels.values():
            assert matched.pattern is self, f"{matched.channel!r} belongs to a former subscription"
            matched.sequences.check()

    @cached_property
    def _glob(self) -> re.Pattern[bytes]:
        return compile_glob(self.pattern)

    @cached_property
    def _parts(self) -> list[tuple[bytes, re.Pattern[bytes]]]:
        return [(name, compile_glob(name)) for name in self.names[:-1]]


@dataclass(slots=True)
class PatternName:
    """A pattern that servers know: one of the names of some patterns of the application."""

    users: dict[PatternSubscription, None] = field(default_factory=dict[PatternSubscription, None])
    #: Physical channel to the subscriptions that get its messages, for the channels looked up so far.
    known: dict[bytes, tuple[MatchedChannel, ...]] = field(default_factory=dict[bytes, tuple[MatchedChannel, ...]])
    #: Sum of the lengths of these names.
    known_bytes: int = 0

    def add(self, subscription: PatternSubscription) -> None:
        """Serve one more pattern."""
        self.users[subscription] = None
        self.forget_known()

    def remove(self, subscription: PatternSubscription) -> None:
        """Serve a pattern no more."""
        del self.users[subscription]
        self.forget_known()

    def know(self, physical: bytes, found: tuple[MatchedChannel, ...]) -> tuple[MatchedChannel, ...]:
        """Remember what a physical channel matches; return it."""
        self.known[physical] = found
        self.known_bytes += len(physical)
        return found

    def forget_known(self) -> None:
        """Look up every physical channel again."""
        self.known.clear()
        self.known_bytes = 0


@dataclass(slots=True)
class PatternLink:
    """A connection to one server."""

    url: str
    up: bool = False
    #: When the connection was lost, or the first one asked for. Only of use while it is down.
    down_since: float = 0.0
    #: When the connection was made. Only of use while it is up.
    up_since: float = 0.0
    run_id: str | None = None
    #: When the latest header was asked for that was read here.
    read_at: float = float("-inf")
    #: Name to the number of PUNSUBSCRIBEs that the server has not acknowledged. No value is 0.
    unsubscribing: Counter[bytes] = field(default_factory=Counter[bytes])

    def connect(self, run_id: str | None, now: float) -> None:
        """Note that the connection was made."""
        self.up, self.up_since, self.run_id = True, now, run_id

    def disconnect(self, now: float) -> None:
        """Note that the connection was lost."""
        self.up, self.down_since = False, now
        self.unsubscribing.clear()

    def unsubscribe(self, names: tuple[bytes, ...]) -> None:
        """Count a PUNSUBSCRIBE of these names."""
        self.unsubscribing.update(names)

    def note_read(self, asked_at: float) -> None:
        """Note that a header was read that was asked for at this time."""
        self.read_at = asked_at
