"""What a subscriber remembers of a channel, of the places where it listens to it, and of its links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dynamoth.plan.plan import Location, Route
from dynamoth_client.machines.sequences import Sequences

EARLY_MAX = 1000
"""Messages that are kept for an unconfirmed subscription at most. It is confirmed within a round trip, while the plan
can be read."""

EARLY_BYTES_MAX = 4 * 2**20
"""Bytes of these at most, but one message of any size."""

_NOBODY: Mapping[str, int] = MappingProxyType({})
_NOWHERE: dict[Location, Place] = {}
"""What a channel at rest is leaving: nothing is ever put in here."""


@dataclass(slots=True)
class Place:
    """A location where a subscription listens, or is about to."""

    location: Location
    #: Number of the verification whose reply is awaited; 0 when none is.
    attempt: int = 0
    #: The stored plan said, on the present connection, that this is right.
    verified: bool = False
    #: The epoch of which it said so last; -1: of none.
    verified_epoch: int = -1
    #: It cannot be reached for so long that the other replicas do without it (ALL_SUBSCRIBERS).
    excused: bool = False
    #: Why the connection was lost, as long as the application has not been told that it may have missed something.
    lost: str | None = None
    #: The number of the first announcement that followed the SUBSCRIBE on the present connection; 0: none has yet.
    announced: int = 0
    #: Server to the number of the latest announcement there for which its dispatcher's marker has come to here.
    marked: Mapping[str, int] = field(default_factory=lambda: _NOBODY)

    def disconnected(self) -> None:
        """Forget what was true of the connection that was lost."""
        self.attempt = 0
        self.verified = False
        self.verified_epoch = -1
        self.announced = 0
        self.marked = _NOBODY

    def follows(self, target: Place) -> bool:
        """Tell whether everything that ``target``'s server got before we joined there has come round to here."""
        return 0 < target.announced <= self.marked.get(target.location.server, 0)


@dataclass(slots=True)
class Subscription:
    """One channel of one PubSub."""

    channel: bytes
    route: Route
    sequences: Sequences
    targets: dict[Location, Place] = field(default_factory=dict[Location, Place])
    leaving: dict[Location, Place] = field(default_factory=lambda: _NOWHERE)
    #: Whether the application has been told. Never goes back.
    confirmed: bool = False
    confirmed_at: float = float("inf")
    #: It is not confirmed before this, as its channel is in transition; 0: at once.
    confirm_after: float = 0.0
    #: Confirmations that the application waits for.
    confirmations_owed: int = 1
    #: Why the application may have missed something, until it is told: when all is verified again.
    may_have_missed: str | None = None
    #: The epoch of a notice that is to be followed soon; 0 for none.
    noticed_epoch: int = 0
    #: A wish to look again while a place is leaving is pending, after so long; 0: none is.
    look_again_s: float = 0.0
    #: When the present route was taken; see ``distrust_s``.
    followed_since: float = 0.0
    #: How often a replica that was away has been replaced by the next one (ALL_PUBLISHERS).
    turn: int = 0
    #: What came before the confirmation, to be delivered behind it; None: nothing.
    early: list[bytes] | None = None
    #: How often the application is to be told that this has ended. Not 0: it is ending, and follows no route any more.
    unsubscribe_acks_pending: int = 0
    #: It was leaving a place when the application ended it.
    ended_moving: bool = False

    def begin_anew(self) -> None:
        """Forget what came before the confirmation: something between that and what is to come may be missing."""
        self.sequences.resume()
        self.early = None

    def keep(self, payload: bytes) -> None:
        """Keep a message until the confirmation; of too many, or too large ones, the newest."""
        early = self.early = self.early or []
        early.append(payload)
        while len(early) > EARLY_MAX or (len(early) > 1 and sum(map(len, early)) > EARLY_BYTES_MAX):
            del early[0]

    def places(self) -> list[Place]:
        """Return where it listens."""
        return [*self.targets.values(), *self.leaving.values()]

    def place(self, location: Location) -> Place:
        """Return the place at a location where it listens."""
        return self.targets.get(location) or self.leaving[location]

    def verified(self) -> bool:
        """Tell whether every target is, apart from excused replicas."""
        places = self.targets.values()
        return all(place.verified or place.excused for place in places) and any(place.verified for place in places)

    def excused(self) -> list[str]:
        """Return the servers of the excused targets."""
        return [location.server for location, place in self.targets.items() if place.excused]


@dataclass(slots=True)
class SubscriberLink:
    """A connection to one server."""

    up: bool = False
    #: When the connection was lost, or the first one asked for. Only of use while it is down.
    down_since: float = 0.0
    #: The connection was lost, or an attempt to make one has failed, since it was up. Only of use while it is down.
    has_failed: bool = False
    run_id: str | None = None
    #: Whether the subscriber listens to its inbox there.
    hears_inbox: bool = False
    #: Physical channel to subscription, in the order of joining: the hot path's one look-up.
    places: dict[bytes, Subscription] = field(default_factory=dict[bytes, "Subscription"])
    idle_since: float | None = None
    #: Physical channel to the number of UNSUBSCRIBEs that the server has not acknowledged. No value is 0.
    unsubscribing: Counter[bytes] = field(default_factory=Counter[bytes])


def acknowledged(unsubscribing: Counter[bytes], name: bytes) -> bool:
    """Note that a server has done one UNSUBSCRIBE of a name; return whether no other one is on its way."""
    if name in unsubscribing:
        unsubscribing[name] -= 1
        if unsubscribing[name]:
            return False
        del unsubscribing[name]
    return True
