"""What a pattern subscriber remembers of a pattern, of the channels that matched it, and of its links."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from dynamoth.glob import compile_glob, physical_patterns
from dynamoth.names import RESERVED_PREFIX, is_user_channel, logical_channel
from dynamoth_client.machines.sequences import Sequences
from dynamoth_client.machines.subscriber.subscription import EARLY_MAX

NEVER = 2**63
"""A number of a header read that is never reached."""


@dataclass(slots=True)
class PatternMessage:
    """A message for the application."""

    pattern: bytes
    channel: bytes
    payload: bytes


@dataclass(slots=True, eq=False)
class MatchedChannel:
    """A channel that matched a pattern."""

    pattern: PatternSubscription
    channel: bytes
    sequences: Sequences
    #: When a message of it came last.
    seen_at: float = 0.0


@dataclass(slots=True)
class PatternPlace:
    """A pattern at one server."""

    #: Those of the pattern's names whose subscription the server has not acknowledged on the present connection.
    missing: set[bytes]
    #: The first reading of the header that is behind the PSUBSCRIBE on the present connection.
    attempt: int = NEVER
    #: On the present connection the header was read behind the subscription.
    verified: bool = False
    #: The server cannot be reached for so long that the pattern is confirmed without it.
    excused: bool = False
    #: Why messages from here may have been missed, as long as the application has not been told.
    lost: str | None = None
    #: A server that was not known before: nothing was missed there if it has acknowledged all names before this time.
    join_until: float = float("inf")

    def disconnected(self, names: tuple[bytes, ...]) -> None:
        """Forget what was true of the connection that was lost."""
        self.missing.update(names)
        self.attempt = NEVER
        self.verified = False


class PatternSubscription:
    """One pattern of one PubSub."""

    def __init__(self, pattern: bytes, channels: dict[bytes, MatchedChannel]) -> None:
        """Make one that is subscribed to nowhere.

        Args:
            pattern: as the application gave it.
            channels: what is remembered of an earlier subscription to it.

        """
        self.pattern = pattern
        #: What is subscribed to at every server. The last one is for replicated channels.
        self.names = physical_patterns(pattern)
        #: Server to place, for every server that there is a link to; of one that has ended, those it has not left yet.
        self.places: dict[str, PatternPlace] = {}
        #: User's channel to what is known of it.
        self.channels = channels
        #: Sum of the lengths of these names.
        self.names_bytes = sum(map(len, channels))
        #: Whether the application has been told. Never goes back.
        self.confirmed = False
        self.confirmed_at = float("inf")
        #: Confirmations that the application waits for.
        self.confirmations_owed = 1
        #: Channels were forgotten at this time: what was published before it may have been delivered.
        self.forgotten_at = float("-inf")
        #: What came before the confirmation, to be delivered behind it.
        self.early: list[PatternMessage] = []
        #: Whether anything has come since ``begin_anew``.
        self.is_new = False
        #: How often the application is to be told that this has ended. Not 0: it is ending.
        self.unsubscribe_acks_pending = 0
        for matched in channels.values():
            matched.pattern = self

    def begin_anew(self) -> None:
        """Forget what came before the confirmation: something between that and what is to come may be missing."""
        if self.is_new:
            return
        self.is_new = True
        self.early.clear()
        for matched in self.channels.values():
            matched.sequences.resume()

    def keep(self, message: PatternMessage) -> None:
        """Keep a message until the confirmation; of too many the newest."""
        self.is_new = False
        self.early.append(message)
        if len(self.early) > EARLY_MAX:
            del self.early[0]

    def joined(self) -> bool:
        """Tell whether every server is verified or excused, and some server verified."""
        places = self.places.values()
        return all(place.verified or place.excused for place in places) and any(place.verified for place in places)

    def channel_of(self, name: bytes, physical: bytes) -> bytes | None:
        """Return the user's channel that a physical one belongs to; None where the message is not for the pattern.

        That is where it is no application's, where ``name`` matches more than the pattern does, or where the server
        sends the same message for another of the names, too.
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
    #: Physical channel to where its messages go: what was found out so far.
    known: dict[bytes, tuple[MatchedChannel, ...]] = field(default_factory=dict[bytes, tuple[MatchedChannel, ...]])
    #: Sum of the lengths of these names.
    known_bytes: int = 0

    def forget_known(self) -> None:
        """Look at every physical channel again."""
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
    #: When the header was asked for that was read here last.
    read_at: float = float("-inf")
    #: Name to the number of PUNSUBSCRIBEs that the server has not acknowledged. No value is 0.
    unsubscribing: Counter[bytes] = field(default_factory=Counter[bytes])
