"""Keeps who is present on channels: the list of a broker, and the joins and leaves behind it.

Theory of operation
-------------------
The presence of a channel is a logged interest, so joins and leaves come in order, and none is missing without a gap.
The list of the members is exact at one position of this log. It is asked for once the presence is confirmed, and after
each gap. What came before the list waits for it; of all that, and of what comes later, only what is behind the list's
position counts.

A list is asked for at the serving broker. When another one serves the session before the answer, that one is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamoth.edge.frames import AskMembers, Error, Members
from dynamoth.edge.presence import PresenceEvent, read_event
from dynamoth.edge.publications import Position
from dynamoth.errors import MalformedMessage
from dynamoth.machine.timers import Timers
from dynamoth_user.machine.connections import Connections
from dynamoth_user.machine.events import MemberChanged, MembersListed, SendFrame, UserAction, UserOptions
from dynamoth_user.machine.records import UserSubscription

WAITING_MAX = 10_000
"""Joins and leaves that wait for a list; with more, another list is asked for."""


@dataclass(slots=True, eq=False)
class _Roster:
    """What is known of one channel."""

    subscription: UserSubscription
    #: Where the list is exact; None while one is missing.
    listed: Position | None = None
    #: Joins and leaves that came since the list was asked for, with their positions.
    waiting: list[tuple[Position, PresenceEvent]] = field(default_factory=list[tuple[Position, PresenceEvent]])
    #: The connection that was asked, and the ``ref``; None while none was.
    asked: tuple[int, int] | None = None
    #: Whether the next question waits for a timer.
    is_pausing: bool = False


class Rosters:
    """The channels whose members the application watches."""

    def __init__(self, options: UserOptions, connections: Connections, timers: Timers[UserAction]) -> None:
        """Begin without a channel. The arguments are shared with the machine."""
        self._options = options
        self._connections = connections
        self._timers = timers
        self._rosters: dict[str, _Roster] = {}
        #: Those that miss their list.
        self._unlisted: dict[str, _Roster] = {}

    def add(self, subscription: UserSubscription) -> None:
        """Begin to watch a channel."""
        id_ = subscription.interest.id
        self._rosters[id_] = self._unlisted[id_] = _Roster(subscription)

    def remove(self, interest_id: str) -> None:
        """Forget a channel."""
        self._rosters.pop(interest_id, None)
        self._unlisted.pop(interest_id, None)

    def ask(self) -> list[UserAction]:
        """Ask for the lists that are missing. For the end of each event."""
        if not self._unlisted:
            return []
        serving = self._connections.serving
        if serving is None or not serving.is_up:
            return []
        actions: list[UserAction] = []
        for id_, roster in self._unlisted.items():
            is_asked = roster.asked is not None and roster.asked[0] == serving.number
            if is_asked or roster.is_pausing or id_ not in serving.confirmed:
                continue
            ref = self._connections.new_ref()
            roster.asked = serving.number, ref
            actions.append(SendFrame(serving.number, AskMembers(ref, roster.subscription.interest)))
        return actions

    def on_publication(self, subscription: UserSubscription, position: Position, payload: bytes) -> list[UserAction]:
        """Report a join or leave, once the list before it is known."""
        roster = self._rosters[subscription.interest.id]
        try:
            event = read_event(payload)
        except MalformedMessage:
            return []
        if roster.listed is None:
            roster.waiting.append((position, event))
            if len(roster.waiting) > WAITING_MAX:
                self.on_gap(subscription)
            return []
        return self._report(roster, position, event)

    def _report(self, roster: _Roster, position: Position, event: PresenceEvent) -> list[UserAction]:
        listed = roster.listed
        assert listed is not None, "events wait for the list"
        if position.epoch != listed.epoch or position.offset <= listed.offset:
            return []
        return [MemberChanged(roster.subscription.interest, event.is_join, event.member, event.user)]

    def on_gap(self, subscription: UserSubscription) -> None:
        """Ask for another list, as joins and leaves are missing."""
        roster = self._rosters[subscription.interest.id]
        roster.listed = roster.asked = None
        roster.waiting.clear()
        self._unlisted[subscription.interest.id] = roster

    def on_members(self, frame: Members, now: float) -> list[UserAction]:
        """Begin with a list."""
        roster = self._asked_with(frame.ref)
        if roster is None:
            return []
        received = roster.subscription.received
        if received is None or received.epoch != frame.position.epoch:
            return self._pause(roster, self._options.retry_s, now)  # the log was lost: a gap comes before the next one
        interest = roster.subscription.interest
        del self._unlisted[interest.id]
        roster.listed, roster.asked = frame.position, None
        waiting, roster.waiting = roster.waiting, []
        actions: list[UserAction] = [MembersListed(interest, dict(frame.members), frame.count)]
        for position, event in waiting:
            actions += self._report(roster, position, event)
        return actions

    def on_error(self, error: Error, now: float) -> bool:
        """Ask again later if an error answers a question; tell whether it does."""
        roster = None if error.ref is None else self._asked_with(error.ref)
        if roster is None:
            return False
        self._pause(roster, max(self._options.retry_s, (error.retry_after_ms or 0) / 1000), now)
        return True

    def _asked_with(self, ref: int) -> _Roster | None:
        every = self._unlisted.values()
        return next((each for each in every if each.asked is not None and each.asked[1] == ref), None)

    def _pause(self, roster: _Roster, delay_s: float, now: float) -> list[UserAction]:
        roster.asked = None
        if not roster.is_pausing:
            roster.is_pausing = True
            self._timers.add(now + delay_s * (0.5 + self._connections.random()), self._end_pause, roster)
        return []

    def _end_pause(self, roster: _Roster, now: float) -> list[UserAction]:
        roster.is_pausing = False
        return []
