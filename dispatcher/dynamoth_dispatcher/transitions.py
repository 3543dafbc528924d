"""The channels in transition at one server: whom to tell and when, and when an old location is vacated."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.plan.plan import Entry, Location, Phase
from dynamoth.protocol.stored_plan import VERSION_READ_INTERVAL_S


@dataclass(frozen=True, slots=True)
class TransitionOptions:
    """The pace of a transition. Every interval holds per channel; the bounds hold per tick and server."""

    tick_interval_s: float = 0.02
    """How often the transitions are looked at while there are any."""
    trickle_delay_s: float = 0.1
    """Subscribers of a channel on which nothing is published are told so long after the activation."""
    notice_interval_s: float = 0.5
    """How often those who still listen at an old location are told again."""
    settle_after_s: float = VERSION_READ_INTERVAL_S + 0.25
    """No old location counts as vacated for so long after the activation: every publisher has seen that the plan has
    changed then. If this agent dies before, its successor still has the transition, and tells subscribers of a gap.
    The quarter of a second is for messages that are on their way."""
    poll_interval_s: float = 0.05
    """How often NUMSUB is asked for an old location then."""
    vacated_interval_s: float = 0.5
    """How often the balancer is told again of a vacated location until it settles the channel."""
    per_tick_max: int = 500
    """Notices and polls of one tick at most, both together; the others have their turn next."""


@dataclass(slots=True)
class Transition:
    """One channel in transition that has an old or a new location at this server."""

    channel: bytes
    entry: Entry
    #: Old locations at this server: their listeners are told to move.
    old_here: tuple[Location, ...]
    #: New locations at this server: who joins them is sent markers.
    new_here: tuple[Location, ...]
    #: The servers of old locations: where such a subscriber may still listen.
    old_servers: frozenset[str]
    notice_at: float
    poll_at: float
    #: Whether a publication has triggered the first notice, or the trickle has sent it.
    told: bool = False
    vacated_at: float = float("-inf")


class Transitions:
    """The transitions at one server. Pure book-keeping: says what is due and leaves the sending to the dispatcher."""

    def __init__(self, server: str, options: TransitionOptions) -> None:
        """Begin without any."""
        self._server = server
        self._options = options
        self._by_channel: dict[bytes, Transition] = {}
        self._next_tick_at: float | None = None

    def __len__(self) -> int:
        """Return how many channels are in transition here."""
        return len(self._by_channel)

    def all(self) -> list[Transition]:
        """Return them."""
        return list(self._by_channel.values())

    def get(self, channel: bytes) -> Transition | None:
        """Return the transition of ``channel`` if it concerns this server."""
        return self._by_channel.get(channel)

    def clear(self) -> None:
        """Forget all, before a whole plan is loaded."""
        self._by_channel.clear()

    def update(self, channel: bytes, entry: Entry, now: float) -> Transition | None:
        """Take what the plan now says of ``channel``; return its transition if it is in one here."""
        if entry.phase is Phase.SETTLED:
            self._by_channel.pop(channel, None)
            return None
        new = entry.route.locations(channel)
        old = tuple(
            dict.fromkeys(place for route in entry.previous for place in route.locations(channel) if place not in new)
        )
        old_here = tuple(place for place in old if place.server == self._server)
        new_here = tuple(place for place in new if place.server == self._server)
        if not old_here and not new_here:
            self._by_channel.pop(channel, None)
            return None
        options = self._options
        transition = self._by_channel[channel] = Transition(
            channel,
            entry,
            old_here,
            new_here,
            frozenset(place.server for place in old),
            notice_at=now + options.trickle_delay_s,
            poll_at=now + options.settle_after_s,
        )
        if self._next_tick_at is None:
            self._next_tick_at = now
        return transition

    def deadline(self) -> float | None:
        """Return when something may be due."""
        return self._next_tick_at if self._by_channel else None

    def due(self, now: float) -> tuple[list[Transition], list[Transition]]:
        """Return the transitions whose notice and poll are due, and plan the next ones. Bounded per tick."""
        notices: list[Transition] = []
        polls: list[Transition] = []
        if self._next_tick_at is None or now < self._next_tick_at:
            return notices, polls
        options = self._options
        self._next_tick_at = now + options.tick_interval_s if self._by_channel else None
        served: list[bytes] = []
        for transition in self._by_channel.values():
            if transition.entry.phase is not Phase.ACTIVE:
                continue
            before = len(notices) + len(polls)
            if before >= options.per_tick_max:
                break
            if transition.old_here and transition.notice_at <= now:
                transition.notice_at = now + options.notice_interval_s
                notices.append(transition)
            if transition.old_here and transition.poll_at <= now:
                transition.poll_at = now + options.poll_interval_s
                polls.append(transition)
            if len(notices) + len(polls) > before:
                served.append(transition.channel)
        for channel in served:  # to the end, so that every channel has its turn
            self._by_channel[channel] = self._by_channel.pop(channel)
        return notices, polls
