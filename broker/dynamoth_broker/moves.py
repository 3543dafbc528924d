"""Moves users to other brokers: asks them to, lets them leave without a loss, and drains the whole broker.

The broker asks a user to ``move``, and goes on delivering. The user resumes at the new broker, and says ``leave`` here.
For a live interest a barrier follows: whatever was published before the new broker's subscription is ahead of it. Then
comes ``bye``; the user has everything, and closes the connection. A user who does not move stays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamoth.edge.frames import Bye, Move
from dynamoth.machine.timers import Timers
from dynamoth_broker.delivery import Delivery
from dynamoth_broker.events import NORMAL, BrokerAction, BrokerOptions, RaiseBarrier, Transmit
from dynamoth_broker.sessions import Session, Stage

if TYPE_CHECKING:
    from dynamoth_broker.control import Control
    from dynamoth_broker.users import Users

DRAIN_INTERVAL_S = 0.1
"""While it is drained, a broker asks users to move this often."""


class Moves:
    """The users of one broker who move, or are to move."""

    def __init__(
        self,
        users: Users,
        delivery: Delivery,
        options: BrokerOptions,
        timers: Timers[BrokerAction],
        counters: Counter[str],
        control: Control,
    ) -> None:
        """Begin without moves; all arguments but the options are shared with the owner."""
        self._users = users
        self._delivery = delivery
        self._options = options
        self._timers = timers
        self._counters = counters
        self._control = control
        #: Sessions that wait for the barrier of a channel that was raised, and those for the next one.
        self._barriers: dict[bytes, tuple[list[Session], list[Session]]] = {}
        #: While drained: sessions that have not been asked to move yet, and how many may be asked now.
        self._to_move: deque[Session] | None = None
        self._moves_due = 0.0
        self._drain_per_s = 0.0
        #: How many drains have begun: a timer of an earlier one does nothing.
        self._drains = 0

    def move(self, session: Session, to: tuple[str, ...], now: float) -> list[BrokerAction]:
        """Ask a user to move to the first of these URLs that serves it."""
        if session.is_closed or session.leaving_channels is not None or not to:
            return []
        options = self._options
        session.move_until = now + options.move_timeout_s
        self._counters["moves_asked"] += 1
        within_ms, deadline_ms = round(options.move_spread_s * 1000), round(options.move_timeout_s * 1000)
        move = Move(to, within_ms, deadline_ms, self._control.ticket(session))
        return [Transmit(session.connection, move)]

    def leave(self, session: Session, now: float) -> list[BrokerAction]:
        """Make sure that a user who has moved has everything from before, then say ``bye``."""
        if session.leaving_channels is not None:
            return []
        self._counters["moves_done"] += 1
        self._control.on_left(session, now)
        self._timers.add(now + self._options.grace_s, self._end_of_grace, session)
        live = [each.interest.channel for each in session.subscriptions.values() if not each.interest.is_logged]
        channels = session.leaving_channels = dict.fromkeys(live)
        if not channels:
            return self._bye(session)
        actions: list[BrokerAction] = []
        for channel in channels:
            if channel in self._barriers:  # raised before this user left: only the next one will do
                self._barriers[channel][1].append(session)
            else:
                self._barriers[channel] = ([session], [])
                actions.append(RaiseBarrier(channel))
        return actions

    def on_barrier(self, channel: bytes) -> list[BrokerAction]:
        """Say ``bye`` to users for whom no barrier is left, and raise the next one for those who have left since."""
        passed, following = self._barriers.pop(channel, ([], []))
        actions: list[BrokerAction] = []
        if following:
            self._barriers[channel] = (following, [])
            actions.append(RaiseBarrier(channel))
        for session in passed:
            if session.leaving_channels is None or session.is_closed:
                continue
            session.leaving_channels.pop(channel, None)
            if not session.leaving_channels:
                actions += self._bye(session)
        return actions

    def _bye(self, session: Session) -> list[BrokerAction]:
        """Say ``bye``; before it, what of live interests was dropped for a slow user."""
        subscriptions = session.subscriptions.values()
        logged = [each for each in subscriptions if each.interest.is_logged]
        offsets = {each.interest.id: each.interest.tip if each.stage is Stage.LIVE else each.cursor for each in logged}
        paused = [each for each in subscriptions if each.stage is Stage.CATCHING and not each.interest.is_logged]
        actions: list[BrokerAction] = []
        for each in paused:
            actions += self._delivery.missed(each)
        return [*actions, Transmit(session.connection, Bye(offsets))]

    def _end_of_grace(self, session: Session, now: float) -> Sequence[BrokerAction]:
        return [] if session.is_closed else [self._users.close(session, NORMAL, "moved", now)]

    # Drain.

    def drain(self, rate: float, now: float) -> list[BrokerAction]:
        """Move users away, at most ``rate`` per second (at least 0.1), and take no more."""
        self._drain_per_s = max(rate, 0.1)
        if self._to_move is None:
            self._drains += 1
            self._timers.add(now + DRAIN_INTERVAL_S, self._drain_on, self._drains)
        self._users.is_draining = True
        self._to_move = deque(self._users.open_sessions())
        self._moves_due = 0.0
        return []

    def end_drain(self) -> None:
        """Take users again; those who were not asked to move yet stay."""
        self._users.is_draining = False
        self._to_move = None

    def _drain_on(self, drain: int, now: float) -> Sequence[BrokerAction]:
        """Ask as many users to move as may be asked now; ask again those who have not moved in time."""
        if self._to_move is None or drain != self._drains:
            return []
        self._timers.add(now + DRAIN_INTERVAL_S, self._drain_on, drain)
        if not self._to_move:
            self._to_move = deque(
                each for each in self._users.open_sessions() if each.move_until is None or each.move_until < now
            )
        self._moves_due = min(self._moves_due + self._drain_per_s * DRAIN_INTERVAL_S, max(self._drain_per_s, 1.0))
        actions: list[BrokerAction] = []
        while self._to_move and self._moves_due >= 1:
            session = self._to_move.popleft()
            if not session.is_closed and session.leaving_channels is None:
                self._moves_due -= 1
                actions += self.move(session, self._users.alternates(now), now)
        return actions
