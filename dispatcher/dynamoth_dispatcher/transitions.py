"""The channels in transition at one server: when their listeners get notices, and which old locations are vacated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.plan.plan import Entry, Location, Phase, Plan
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.options import TransitionOptions

TAG_NUMSUB = "numsub"


@dataclass(slots=True)
class Transition:
    """One channel in transition that has an old or a new location at this server."""

    channel: bytes
    entry: Entry
    #: Old locations at this server: their listeners get notices to move.
    old_here: tuple[Location, ...]
    #: New locations at this server: subscribers that join them get markers.
    new_here: tuple[Location, ...]
    #: The servers of old locations: where such a subscriber may still listen.
    old_servers: frozenset[str]
    notice_at: float
    poll_at: float
    #: Whether the first notice was sent: with a publication, or when it was due.
    is_noticed: bool = False
    #: When the old locations here were last reported as vacated.
    vacated_at: float = float("-inf")


class Transitions:
    """The transitions at one server, with the next notice or question of each."""

    def __init__(self, server: str, options: TransitionOptions, counters: Counter[str]) -> None:
        self._server = server
        self._options = options
        self._counters = counters
        self._by_channel: dict[bytes, Transition] = {}
        self._next_tick_at: float | None = None

    def __len__(self) -> int:
        """Return how many channels are in transition here."""
        return len(self._by_channel)

    def all(self) -> list[Transition]:
        """Return all transitions."""
        return list(self._by_channel.values())

    def get(self, channel: bytes) -> Transition | None:
        """Return the transition of ``channel`` if it concerns this server."""
        return self._by_channel.get(channel)

    def clear(self) -> None:
        """Remove all, before a whole plan is loaded."""
        self._by_channel.clear()

    def update(self, channel: bytes, entry: Entry, now: float) -> Transition | None:
        """Replace the entry of ``channel``; return its transition if it is in one here."""
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
        """Return the transitions whose notice is due, and those whose poll is; schedule the next ones."""
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

    def poll(self, transitions: Iterable[Transition]) -> list[Send]:
        """Ask how many listen at the old locations here."""
        asked = [(t.channel, t.entry.route.epoch, location.physical) for t in transitions for location in t.old_here]
        if not asked:
            return []
        return [Send(LOCAL, (b"PUBSUB", b"NUMSUB", *(physical for _, _, physical in asked)), (TAG_NUMSUB, asked))]

    def on_poll(self, asked: list[tuple[bytes, int, bytes]], reply: Any, now: float) -> tuple[tuple[bytes, int], ...]:
        """Return the channels, with their epochs, to report as vacated: nobody listens at their old locations here."""
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return ()
        listened = {channel for (channel, _, _), listeners in zip(asked, reply[1::2], strict=True) if int(listeners)}
        vacated: dict[tuple[bytes, int], None] = {}
        for channel, epoch, _ in asked:
            transition = self._by_channel.get(channel)
            if transition is None or transition.entry.route.epoch != epoch or channel in listened:
                continue
            if now - transition.vacated_at >= self._options.vacated_interval_s:
                transition.vacated_at = now
                vacated[channel, epoch] = None
        return tuple(vacated)

    def check(self, plan: Plan | None) -> None:
        """Assert that these are exactly the transitions of the plan that concern this server."""
        entries: Mapping[bytes, Entry] = {} if plan is None else plan.entries
        for channel, transition in self._by_channel.items():
            assert entries.get(channel) is transition.entry, f"the transition of {channel!r} is not the plan's"
            assert transition.old_here or transition.new_here, f"the transition of {channel!r} is elsewhere"
        for channel, entry in entries.items():
            if entry.phase is not Phase.SETTLED and channel not in self._by_channel:
                servers = {server for route in entry.live_routes for server in route.assignment.servers}
                assert self._server not in servers, f"{channel!r} is in transition here, and not followed"
