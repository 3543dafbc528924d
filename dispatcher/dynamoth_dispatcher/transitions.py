"""What is in transition at one server: when listeners get notices, and which old locations are vacated.

A slot in transition stands for all channels that inherit its entry. Nobody can name them in advance: each becomes a
*member* when a message or an announcement shows it, or the list of the channels that somebody listens to here
(PUBSUB CHANNELS). One such list serves all slots. A slot is vacated when none of its channels is on the list.

A list of very many channels is costly. So there is one when a slot becomes active; then NUMSUB is asked for its
channels on that list, until nobody listens to any of them; then another list proves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import is_own_channel, is_user_channel
from dynamoth.plan.plan import Entry, Location, Phase, Plan
from dynamoth.plan.slots import is_slot, slot_of
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.options import TransitionOptions

TAG_NUMSUB = "numsub"
TAG_LIST = "list"
TAG_MEMBERS = "members"

NAMES_PER_NUMSUB = 500
"""Bound of one NUMSUB: about 0.1 ms of the server, so that messages pass in between."""


def inherits(physical: bytes) -> bool:
    """Return whether a physical channel is an application's, with its own name: that of a replica has an entry."""
    return is_user_channel(physical) and not is_own_channel(physical)


MEMBERS_MAX = 100_000
"""Most remembered members of one slot; a further one may get its first notice more than once."""


@dataclass(slots=True)
class Transition:
    """A channel in transition that has an old or a new location at this server, or a slot.

    ``channel`` is the name in the plan: that of a slot for a slot.
    """

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
    #: Of a slot: the channels that inherit its entry, as far as they have shown up.
    members: dict[bytes, Transition] = field(default_factory=dict[bytes, "Transition"])
    #: Of a slot: those of them that somebody listened to at old locations here, when that was asked last.
    listening: dict[bytes, Transition] = field(default_factory=dict[bytes, "Transition"])
    #: Of a member: how many losses of its slot its listeners elsewhere know of.
    losses: int = 0

    @property
    def is_vacated(self) -> bool:
        """Whether the old locations here were reported as vacated."""
        return self.vacated_at > float("-inf")


class Transitions:
    """The transitions at one server, with the next notice or question of each."""

    def __init__(self, server: str, options: TransitionOptions, counters: Counter[str]) -> None:
        self._server = server
        self._options = options
        self._counters = counters
        #: By the names of channels and slots.
        self._by_channel: dict[bytes, Transition] = {}
        #: How often messages of slots in transition were not observed here; at most one number per slot.
        self._losses: dict[bytes, int] = {}
        #: How many of them are slots.
        self._slots = 0
        #: That of the dispatcher, which says which slot a channel inherits from.
        self.plan: Plan | None = None
        self._next_tick_at: float | None = None
        #: Whether the reply of a list is outstanding.
        self._is_listing = False

    def __len__(self) -> int:
        """Return how many channels and slots are in transition here."""
        return len(self._by_channel)

    def all(self) -> list[Transition]:
        """Return all transitions."""
        return list(self._by_channel.values())

    def get(self, channel: bytes) -> Transition | None:
        """Return the transition of ``channel``, its own or that of its slot, if it concerns this server."""
        found = self._by_channel.get(channel)
        if found is not None or not self._slots or self.plan is None:
            return found
        slot = self._by_channel.get(self.plan.slot_above(channel) or b"")
        return None if slot is None else self._member(slot, channel)

    def _member(self, slot: Transition, channel: bytes) -> Transition:
        member = slot.members.get(channel)
        if member is None:
            member = self._transition(channel, slot.entry, slot.notice_at, slot.poll_at)
            assert member is not None, "a member is where its slot is"
            if len(slot.members) < MEMBERS_MAX:
                slot.members[channel] = member
        return member

    def clear(self) -> None:
        """Remove all, before a whole plan is loaded."""
        self._by_channel.clear()
        self._slots = 0

    def link_down(self) -> None:
        """Forget what was asked over the connection."""
        self._is_listing = False

    def update(self, channel: bytes, entry: Entry, now: float) -> Transition | None:
        """Replace the entry of a channel or slot; return its transition if it is in one here."""
        options = self._options
        transition = None
        if entry.phase is not Phase.SETTLED:
            transition = self._transition(channel, entry, now + options.trickle_delay_s, now + options.settle_after_s)
        before = self._by_channel.pop(channel, None)
        if transition is not None:
            self._by_channel[channel] = transition
            if self._next_tick_at is None:
                self._next_tick_at = now
        if is_slot(channel):
            self._slots += (transition is not None) - (before is not None)
            if transition is None:
                self._losses.pop(channel, None)
        return transition

    def _transition(self, channel: bytes, entry: Entry, notice_at: float, poll_at: float) -> Transition | None:
        """Return the transition of a channel or slot; None where it has neither an old nor a new location here."""
        new = entry.route.locations(channel)
        old = tuple(
            dict.fromkeys(place for route in entry.previous for place in route.locations(channel) if place not in new)
        )
        old_here = tuple(place for place in old if place.server == self._server)
        new_here = tuple(place for place in new if place.server == self._server)
        if not old_here and not new_here:
            return None
        old_servers = frozenset(place.server for place in old)
        return Transition(channel, entry, old_here, new_here, old_servers, notice_at, poll_at)

    def note_loss(self, slot: bytes) -> None:
        """Note that messages of a slot's channels may not have been forwarded from here."""
        self._losses[slot] = self._losses.get(slot, 0) + 1

    def take_loss(self, transition: Transition) -> bool:
        """Return whether the listeners of a member must learn of losses before its next marker; once for each loss."""
        if not self._losses or self.plan is None:
            return False
        losses = self._losses.get(self.plan.slot_above(transition.channel) or b"", 0)
        before, transition.losses = transition.losses, losses
        return losses > before

    def deadline(self) -> float | None:
        """Return when something may be due."""
        return self._next_tick_at if self._by_channel else None

    def due(self, now: float) -> tuple[list[Transition], list[Transition]]:
        """Return the transitions whose notice is due, and those whose poll is; schedule the next ones.

        A slot is only among those whose poll is due.
        """
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
            if is_slot(transition.channel):
                needs_list = not transition.listening and not transition.is_vacated
                if transition.old_here and transition.notice_at <= now and not (needs_list and self._is_listing):
                    transition.notice_at = now + options.list_interval_s
                    polls.append(transition)
                continue
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

    def vacated_again(self, transitions: Iterable[Transition], now: float) -> tuple[tuple[bytes, int], ...]:
        """Return the slots among these that are vacated, with their epochs: the report may have been lost."""
        again = [each for each in transitions if is_slot(each.channel) and each.is_vacated]
        for each in again:
            each.vacated_at = now
        return tuple((each.channel, each.entry.route.epoch) for each in again)

    def poll(self, transitions: Iterable[Transition], now: float) -> list[Send]:
        """Ask how many listen at the old locations here; for slots, to which channels somebody listens."""
        actions: list[Send] = []
        asked: list[tuple[bytes, int, bytes]] = []
        members: list[tuple[bytes, int, bytes]] = []
        slots: list[tuple[bytes, int, bool]] = []
        for each in transitions:
            epoch = each.entry.route.epoch
            if is_slot(each.channel) and each.is_vacated:
                continue
            if is_slot(each.channel) and each.listening:
                members += ((each.channel, epoch, member) for member in each.listening)
            elif is_slot(each.channel):
                slots.append((each.channel, epoch, each.poll_at <= now))
            else:
                asked += ((each.channel, epoch, location.physical) for location in each.old_here)
        if asked:
            numsub = (b"PUBSUB", b"NUMSUB", *(physical for _, _, physical in asked))
            actions.append(Send(LOCAL, numsub, (TAG_NUMSUB, asked)))
        for start in range(0, len(members), NAMES_PER_NUMSUB):
            some = members[start : start + NAMES_PER_NUMSUB]
            numsub = (b"PUBSUB", b"NUMSUB", *(physical for _, _, physical in some))
            actions.append(Send(LOCAL, numsub, (TAG_MEMBERS, some)))
        if slots:
            self._is_listing = True
            actions.append(Send(LOCAL, (b"PUBSUB", b"CHANNELS"), (TAG_LIST, slots)))
        return actions

    def on_list(
        self, asked: list[tuple[bytes, int, bool]], reply: Any, now: float
    ) -> tuple[list[Transition], tuple[tuple[bytes, int], ...]]:
        """Return the members with listeners at old locations here, and the slots to report as vacated.

        ``asked`` has the slots with their epochs, and whether they count as vacated if nobody listens.
        """
        self._is_listing = False
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return [], ()
        listened: list[Transition] = []
        left = {
            (name, epoch)
            for name, epoch, may_settle in asked
            if may_settle and (slot := self._by_channel.get(name)) is not None and slot.entry.route.epoch == epoch
        }
        for physical in reply:
            if not self._slots or self.plan is None:
                break
            name = slot_of(physical)  # nearly all are of other slots
            slot = self._by_channel.get(name)
            if slot is None or not slot.old_here or not inherits(physical) or self.plan.slot_above(physical) != name:
                continue
            left.discard((name, slot.entry.route.epoch))
            member = slot.listening[physical] = self._member(slot, physical)
            listened.append(member)
        for name, _, may_settle in asked:
            slot = self._by_channel.get(name)
            if slot is not None and not slot.listening and not may_settle:
                slot.notice_at = max(slot.notice_at, slot.poll_at)
        vacated: list[tuple[bytes, int]] = []
        for name, epoch in sorted(left):
            if now - self._by_channel[name].vacated_at >= self._options.vacated_interval_s:
                self._by_channel[name].vacated_at = now
                vacated.append((name, epoch))
        return [each for each in listened if each.entry.phase is Phase.ACTIVE], tuple(vacated)

    def on_members(self, asked: list[tuple[bytes, int, bytes]], reply: Any) -> list[Transition]:
        """Return the members that somebody still listens to at old locations here; forget the others.

        ``asked`` has the slot of each, and the slot's epoch.
        """
        if isinstance(reply, ErrorReply):
            self._counters["refused_commands"] += 1
            return []
        listened: list[Transition] = []
        for (name, epoch, physical), listeners in zip(asked, reply[1::2], strict=True):
            slot = self._by_channel.get(name)
            member = slot.listening.get(physical) if slot is not None and slot.entry.route.epoch == epoch else None
            if slot is None or member is None:
                continue
            if int(listeners):
                listened.append(member)
            else:
                del slot.listening[physical]
        return [each for each in listened if each.entry.phase is Phase.ACTIVE]

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
        assert self._slots == sum(map(is_slot, self._by_channel)), f"{self._slots} slots are counted"
        for transition in self._by_channel.values():
            for channel, member in transition.members.items():
                assert member.entry is transition.entry, f"{channel!r} has another entry than its slot"
