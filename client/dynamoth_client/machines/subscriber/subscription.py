"""The records of one subscribed channel: the subscription, and the places where it listens.

Only the methods here change these records (``tests/machines/test_writers.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dynamoth.plan.plan import Location, Phase, Route
from dynamoth_client.machines.register import Registered, State
from dynamoth_client.machines.sequences import Sequences

EARLY_MAX = 1000
"""Messages that wait for the confirmation at most. That takes one round trip while the plan can be read."""

EARLY_BYTES_MAX = 4 * 2**20
"""Most bytes of these messages, except for one message of any size."""

_NO_MARKERS: Mapping[str, int] = MappingProxyType({})
_NOWHERE: dict[Location, Place] = {}
"""The empty table of a channel at rest, which leaves no places; never filled."""


@dataclass(slots=True, eq=False)
class Place:
    """A location where a subscription listens, or is about to."""

    location: Location
    #: Number of the verification whose reply is awaited; 0 when none is.
    attempt: int = 0
    #: The stored plan said, on the present connection, that this is right.
    verified: bool = False
    #: The epoch of the plan that said so last; -1: none.
    verified_epoch: int = -1
    #: How far the change of the channel has come that the latest reply names; None: the reply did not decide.
    phase: Phase | None = None
    #: It was away for too long, and is ignored until it is verified (ALL_SUBSCRIBERS).
    excused: bool = False
    #: Why the connection was lost, until the application gets the gap.
    lost: str | None = None
    #: The number of the first announcement that followed the SUBSCRIBE on the present connection; 0: none has yet.
    announced: int = 0
    #: Server to the number of the latest announcement there that a marker here has answered.
    markers: Mapping[str, int] = field(default_factory=lambda: _NO_MARKERS)

    def ask(self, attempt: int) -> None:
        """Wait for the reply to a verification."""
        self.attempt = attempt

    def answer(self) -> None:
        """Note that the reply to a verification has come."""
        self.attempt = 0
        self.phase = None

    def excuse(self) -> None:
        """Do without it until it is verified."""
        self.excused = True

    def disconnect(self) -> None:
        """Forget what was true of the connection that was lost."""
        self.attempt = 0
        self.verified = False
        self.verified_epoch = -1
        self.announced = 0
        self.markers = _NO_MARKERS

    def announce(self, number: int) -> None:
        """Note the first announcement of this place."""
        self.announced = self.announced or number

    def mark(self, server: str, number: int) -> None:
        """Note a marker: it answers the announcement ``number`` at ``server``."""
        self.markers = {**self.markers, server: max(number, self.markers.get(server, 0))}

    def take_lost(self) -> str | None:
        """Return, once, why the connection was lost."""
        lost, self.lost = self.lost, None
        return lost

    def follows(self, target: Place) -> bool:
        """Return whether everything that ``target``'s server got before we joined it has come to this place."""
        return 0 < target.announced <= self.markers.get(target.location.server, 0)


@dataclass(slots=True, eq=False)
class Subscription(Registered):
    """One channel of one PubSub.

    Its places are ``targets``, which its route names, and ``leaving``, which a former route named.

    ==================== ============ ================= ==========================================================
    state                targets      leaving           changed by
    ==================== ============ ================= ==========================================================
    JOINING              one or more  none              ``follow``: other targets; all verified: ``confirm``
    LISTENING, at rest   one or more  none              ``follow``: moving; ``begin_to_end``: ENDING
    LISTENING, moving    one or more  one or more       ``leave`` of the last one: at rest; ``begin_to_end``: ENDING
    ENDING               places that have yet to        ``leave`` of the last one: ENDED
                         acknowledge UNSUBSCRIBE
    ENDED                none         none
    ==================== ============ ================= ==========================================================
    """

    channel: bytes
    route: Route
    sequences: Sequences
    #: When the present route was taken; see ``distrust_s``.
    followed_since: float
    targets: dict[Location, Place] = field(default_factory=dict[Location, Place])
    leaving: dict[Location, Place] = field(default_factory=lambda: _NOWHERE)
    #: It is not confirmed before this, as its channel is in transition; 0: at once.
    confirm_after: float = 0.0
    #: Why the application may have missed something. It gets the gap when all targets are verified.
    missed: str | None = None
    #: The epoch of a notice whose route will be followed soon; 0: none.
    noticed_epoch: int = 0
    #: How long the timer runs that looks again at a channel that is moving; 0: there is none.
    look_again_s: float = 0.0
    #: How often the next replica has taken the place of one that was away (ALL_PUBLISHERS).
    turn: int = 0
    #: Messages that wait for the confirmation. None: there is none.
    early: list[bytes] | None = None
    #: It was moving when the application ended it.
    ended_moving: bool = False

    # Questions.

    @property
    def places(self) -> list[Place]:
        """Where it listens."""
        return [*self.targets.values(), *self.leaving.values()]

    def place(self, location: Location) -> Place:
        """Return the place at a location where it listens."""
        return self.targets.get(location) or self.leaving[location]

    @property
    def is_verified(self) -> bool:
        """Whether all targets are verified but those that are excused, and at least one is."""
        places = self.targets.values()
        return all(place.verified or place.excused for place in places) and any(place.verified for place in places)

    @property
    def is_moving(self) -> bool:
        """Whether messages may still come to its targets by way of places that it is leaving."""
        return bool(self.leaving) or self.ended_moving

    def excused(self) -> list[str]:
        """Return the servers of the excused targets."""
        return [location.server for location, place in self.targets.items() if place.excused]

    # Places.

    def join(self, location: Location) -> Place:
        """Make a location a target."""
        place = self.targets[location] = Place(location)
        return place

    def follow(self, route: Route, wanted: tuple[Location, ...], now: float) -> list[Place]:
        """Follow a route: ``wanted`` are to be the targets, and the caller joins those that are not yet.

        Other targets are left from now on. While JOINING, nothing is to be waited for there: they are returned instead.
        """
        self.route, self.followed_since = route, now
        for location in wanted:
            if location in self.leaving:
                self.targets[location] = self.leaving.pop(location)
        unwanted = [place for location, place in self.targets.items() if location not in wanted]
        if self.state is State.JOINING:
            return unwanted
        for place in unwanted:
            del self.targets[place.location]
            self.miss(place.take_lost())
        if unwanted:
            self.leaving = {**self.leaving, **{place.location: place for place in unwanted}}
        return []

    def verify(self, place: Place, epoch: int, phase: Phase) -> None:
        """Note that the plan stored at a place says that it is right: its epoch, and how far that change has come."""
        place.verified, place.verified_epoch, place.phase = True, epoch, phase
        if place.excused:
            place.excused = False
            self.miss(f"server {place.location.server} could not be reached")

    def lose(self, place: Place, reason: str) -> None:
        """Note that the connection of a place was lost."""
        place.disconnect()
        if self.state is State.JOINING:
            self.start_over()
        elif place.location in self.targets:
            place.lost = reason
        else:
            self.missed = reason

    def leave(self, location: Location) -> None:
        """Listen no more at a location."""
        self.targets.pop(location, None)
        self.leaving.pop(location, None)

    def replace(self, place: Place) -> None:
        """Listen at the next replica in the place of one that is away; the caller chooses and joins it."""
        self.turn += 1
        self.miss(place.lost)

    def begin_to_end(self) -> None:
        """Become ENDING."""
        Registered.begin_to_end(self)
        self.ended_moving = bool(self.leaving)

    # Messages before the confirmation, and those that were missed.

    def start_over(self) -> None:
        """Forget the messages before the confirmation: some between these and those that come may be missing."""
        self.sequences.resume()
        self.early = None

    def keep(self, payload: bytes) -> None:
        """Keep a message until the confirmation; of too many, or too large ones, the newest."""
        early = self.early = self.early or []
        early.append(payload)
        while len(early) > EARLY_MAX or (len(early) > 1 and sum(map(len, early)) > EARLY_BYTES_MAX):
            del early[0]

    def take_early(self) -> list[bytes]:
        """Return, once, the messages that came before the confirmation."""
        early, self.early = self.early or [], None
        return early

    def miss(self, reason: str | None) -> None:
        """Note, unless it is noted for another reason, that the application may have missed something."""
        self.missed = self.missed or reason

    def take_missed(self) -> str | None:
        """Return, once, why the application may have missed something. None: it has not, or is not confirmed."""
        missed, self.missed = self.missed, None
        for place in self.targets.values():
            lost = place.take_lost()
            missed = missed or lost
        return None if self.state is State.JOINING else missed

    # Times.

    def confirm_later(self, at: float) -> None:
        """Wait with the confirmation, as the channel is in transition."""
        self.confirm_after = at

    def notice(self, epoch: int) -> None:
        """Note the epoch of a notice whose route will be followed soon; 0: it is now, or never will be."""
        self.noticed_epoch = epoch

    def look_again(self, first_s: float, longest_s: float) -> float:
        """Return how long to wait before the next look at a channel that is moving: at doubling distance."""
        self.look_again_s = min(2 * self.look_again_s or first_s, longest_s)
        return self.look_again_s

    def stop_looking(self) -> None:
        """Note that no timer runs."""
        self.look_again_s = 0.0

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        Registered.check(self)
        name = self.channel
        assert self.targets.keys().isdisjoint(self.leaving), f"{name!r}: a place is both a target and left"
        assert self.places, f"{name!r} is {self.state} and listens nowhere"
        assert self.state is State.JOINING or not self.early, f"{name!r}: messages wait for a confirmation that was"
        assert len(self.early or ()) <= EARLY_MAX, f"{name!r}: too many messages wait for the confirmation"
        if self.is_current:
            assert self.targets, f"{name!r} has no target"
            assert not self.leaving or self.look_again_s, f"{name!r} moves, and nobody looks again"
            assert self.targets.keys() <= set(self.route.locations(name)), f"{name!r} listens where no route leads"
        if self.state is State.JOINING:
            assert not self.leaving, f"{name!r} is not confirmed and leaves {[*self.leaving]}"
        for location, place in (*self.targets.items(), *self.leaving.items()):
            assert place.location == location, f"{name!r}: {place} is listed at {location}"
            assert place.verified == (place.verified_epoch >= 0), f"{name!r}: verified of no epoch: {place}"
            assert place.lost is None or self.state is State.LISTENING, f"{name!r} is {self.state}: {place}"
        self.sequences.check()
