"""Brings publications to the users of an interest: each once, in the order of the log, without holes.

Theory of operation
-------------------
A logged interest has one cursor, ``tip``, for all LIVE subscriptions: only the publication behind it is sent to them.
A publication that comes too early waits; the missing ones are read from the log. So does a broker that has noticed a
gap of its Dynamoth subscription, and now and then one that has noticed nothing (the publisher may have died between
append and publish).

A subscription that begins somewhere else has a cursor of its own. It reads the log page by page, at the pace of its
connection, and becomes LIVE in the moment in which it has sent what the LIVE ones have. What a page shows beyond the
tip goes to all. So there is no buffer per user, and one rule serves a reconnect, a migration, a crash and a reader who
was too slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from dynamoth.edge.frames import Data, Error, Gap, Subscribed
from dynamoth.edge.log import LogPage
from dynamoth.edge.publications import Position, unpack_publication
from dynamoth.errors import MalformedMessage
from dynamoth.machine.timers import Timers
from dynamoth_broker.events import Broadcast, BrokerAction, BrokerOptions, Noted, Transmit
from dynamoth_broker.interests import FRAME_BYTES, Phase, SharedInterest
from dynamoth_broker.logs import Logs
from dynamoth_broker.recents import Recents
from dynamoth_broker.sessions import Session, Stage, Subscription

RETENTION = "retention"
LOG_LOST = "log_lost"
SLOW = "slow"
NOT_LOGGED = "not_logged"

RETRY_S = 1.0
"""A page that could not be read, or that has not yet what was published, is read again after this time."""

BURST_S = 0.01
"""Time between two bursts of ``burst_bytes`` to one session: the transport says within this time that it is full."""

UNKNOWN = -1
"""Cursor of a subscription to a live interest that has missed an unknown number of publications."""

LOG_UNAVAILABLE = "the server of the log does not answer: try again"


class Delivery:
    """Delivers what comes, and what is in the logs. Its owner ends the subscriptions in ``to_end``."""

    def __init__(
        self, options: BrokerOptions, logs: Logs, timers: Timers[BrokerAction], counters: Counter[str]
    ) -> None:
        """Begin; all arguments are shared with the owner."""
        self._options = options
        self._logs = logs
        self._timers = timers
        self._counters = counters
        self.recents = Recents(options)
        #: Subscriptions that the owner has to end: they were refused, or the user has unsubscribed.
        self.to_end: list[Subscription] = []
        #: Called with an interest whose log was lost, and with it perhaps everything else at its server.
        self.on_log_lost: Callable[[SharedInterest], None] = lambda interest: None
        #: Subscriptions that were answered since the owner looked last.
        self.answered: list[Subscription] = []

    # An interest begins.

    def on_confirmed(self, interest: SharedInterest, now: float) -> list[BrokerAction]:
        """Begin to deliver an interest whose channel is confirmed."""
        if interest.is_logged:
            interest.phase = Phase.CONFIRMED
            return self._open(interest, now)
        interest.phase = Phase.OPEN
        actions: list[BrokerAction] = []
        for subscription in list(interest.not_live.values()):
            actions += self.begin(subscription, now)
        return actions

    def _open(self, interest: SharedInterest, now: float) -> list[BrokerAction]:
        """Read where the log is now."""
        if interest.is_reading:
            return []
        interest.is_reading = True
        return self._logs.read(interest.id, 0, 0, partial(self._opened, interest), now)

    def _opened(self, interest: SharedInterest, page: LogPage | None, now: float) -> Sequence[BrokerAction]:
        interest.is_reading = False
        if interest.phase is not Phase.CONFIRMED:
            return []  # it was left
        waiting = list(interest.not_live.values())
        actions: list[BrokerAction] = []
        if page is None:
            for subscription in waiting:
                actions += self.refuse(subscription)
            return actions
        interest.phase = Phase.OPEN
        self.recents.forget(interest)
        interest.begin_epoch(page.epoch, page.tip)
        for subscription in waiting:
            actions += self.begin(subscription, now)
        return [*actions, *self._deliver_pending(interest, now), *self._read_if_stale(interest, now)]

    # A subscription begins.

    def begin(self, subscription: Subscription, now: float) -> list[BrokerAction]:
        """Bring a subscription to where its interest is, once that is possible."""
        interest = subscription.interest
        if subscription.awaits_position or subscription.awaits_registration:
            return []
        if interest.phase is Phase.CONFIRMED:
            return self._open(interest, now)
        if interest.phase is not Phase.OPEN:
            return []
        if not interest.is_logged:
            actions = self._go_live(subscription, Subscribed(subscription.ref, interest.id))
            if subscription.since is not None:  # it was logged where the user comes from
                self._counters["gaps"] += 1
                self._counters["positions_without_log"] += 1
                actions.append(Transmit(subscription.session.connection, Gap(interest.id, NOT_LOGGED)))
            return actions
        since = subscription.since
        if since is None or since == Position(interest.epoch, interest.tip):
            position = Position(interest.epoch, interest.tip)
            return self._go_live(subscription, Subscribed(subscription.ref, interest.id, position))
        if since.epoch == interest.epoch and interest.recent_after(since.offset) is not None:
            subscription.cursor = since.offset
            self._confirm(subscription, Stage.CATCHING)
            confirmation = Transmit(subscription.session.connection, Subscribed(subscription.ref, interest.id, since))
            return [confirmation, *self._catch_up(subscription, None, now)]
        first_page = partial(self._first_page, subscription)
        return self._logs.read(interest.id, since.offset, self._options.page_entries, first_page, now)

    def _go_live(self, subscription: Subscription, confirmation: Subscribed) -> list[BrokerAction]:
        self._confirm(subscription, Stage.LIVE)
        if subscription.session.slow_since is not None:
            self.pause(subscription)
        return [Transmit(subscription.session.connection, confirmation)]

    def _confirm(self, subscription: Subscription, stage: Stage) -> None:
        subscription.interest.set_stage(subscription, stage)
        self.answered.append(subscription)

    def _first_page(self, subscription: Subscription, page: LogPage | None, now: float) -> Sequence[BrokerAction]:
        """Confirm a subscription, and say what of its past is lost."""
        if subscription.is_ended or subscription.stage is not Stage.WAITING:
            return []
        if page is None:
            return self.refuse(subscription)
        interest, since = subscription.interest, subscription.since
        assert since is not None, "a subscription without a past needs no page"
        actions = self._absorb(interest, page, now)
        known = since.epoch == page.epoch and since.offset <= page.tip
        begins_at = max(since.offset, page.first - 1) if known else page.first - 1
        position = Position(page.epoch, begins_at)
        connection = subscription.session.connection
        subscription.cursor = begins_at
        recovered = known and begins_at == since.offset
        actions.append(Transmit(connection, Subscribed(subscription.ref, interest.id, position, recovered)))
        if not recovered:
            self._counters["gaps"] += 1
            gap = (
                Gap(interest.id, RETENTION, since.offset + 1, begins_at, position)
                if known
                else Gap(interest.id, LOG_LOST, since.offset + 1, None, position)
            )
            actions.append(Transmit(connection, gap))
        self._confirm(subscription, Stage.CATCHING)
        entries = page if begins_at == since.offset else None
        actions += self._catch_up(subscription, entries, now)
        # The user may know of more than this broker has heard of.
        return [*actions, *self.read_behind_tip(interest, now)] if interest.tip < page.tip else actions

    def refuse(self, subscription: Subscription) -> list[BrokerAction]:
        """Refuse a subscription, as the server of its log does not answer."""
        self.to_end.append(subscription)
        error = Error("log_unavailable", LOG_UNAVAILABLE, "later", round(RETRY_S * 1000), subscription.ref)
        return [Transmit(subscription.session.connection, error)]

    # A subscription that is behind.

    def _catch_up(self, subscription: Subscription, page: LogPage | None, now: float) -> list[BrokerAction]:
        """Send what a page has behind the cursor; go live, or read the next page when the connection has room."""
        session, interest = subscription.session, subscription.interest
        if session.slow_since is not None:
            return []  # `go_on` goes on, with another page
        actions: list[BrokerAction] = []
        for offset, payload in () if page is None else page.entries:
            if not self._has_room(session, now):
                break
            if offset == subscription.cursor + 1:
                subscription.cursor = offset
                actions.append(self._send(session, Data(interest.id, payload, offset)))
        if subscription.cursor >= interest.tip:
            interest.set_stage(subscription, Stage.LIVE)
            return actions
        if not self._has_room(session, now):
            self._wait(subscription)
            return actions
        frames = interest.recent_after(subscription.cursor)
        if frames is not None:
            interest.set_stage(subscription, Stage.LIVE)
            return [*actions, *(self._send(session, frame) for frame in frames)]
        if subscription.is_reading:
            return actions
        subscription.is_reading = True
        next_page = partial(self._next_page, subscription, interest.epoch)
        return [
            *actions,
            *self._logs.read(interest.id, subscription.cursor, self._options.page_entries, next_page, now),
        ]

    def _next_page(
        self, subscription: Subscription, epoch: int, page: LogPage | None, now: float
    ) -> Sequence[BrokerAction]:
        interest = subscription.interest
        subscription.is_reading = False
        if subscription.is_ended or subscription.stage is not Stage.CATCHING:
            return []
        if interest.epoch != epoch:  # a new epoch began meanwhile: `_begin_epoch` has moved the cursor
            return self._catch_up(subscription, None, now)
        if page is None:
            self._timers.add(now + RETRY_S, self._retry, subscription)
            return []
        actions = self._absorb(interest, page, now)
        if interest.epoch != epoch or subscription.stage is not Stage.CATCHING:
            return actions
        if page.first > subscription.cursor + 1:  # it was too slow for the log
            actions += self._skip(subscription, page)
        return [*actions, *self._catch_up(subscription, page, now)]

    def _retry(self, subscription: Subscription, now: float) -> Sequence[BrokerAction]:
        if subscription.is_ended or subscription.stage is not Stage.CATCHING:
            return []
        return self._catch_up(subscription, None, now)

    def _send(self, session: Session, frame: Data) -> BrokerAction:
        session.burst_bytes += FRAME_BYTES + len(frame.payload)
        return Transmit(session.connection, frame)

    def _has_room(self, session: Session, now: float) -> bool:
        """Return whether more may be sent to a session in the present burst; begin another one if it is time."""
        if now >= session.burst_at + BURST_S:
            session.burst_at, session.burst_bytes = now, 0
        return session.burst_bytes < self._options.burst_bytes

    def _wait(self, subscription: Subscription) -> None:
        """Go on with a subscription in the next burst: until then it turns out whether the connection is full."""
        session = subscription.session
        if not session.waiting:
            self._timers.add(session.burst_at + BURST_S, self._next_burst, session)
        session.waiting[subscription] = None

    def _next_burst(self, session: Session, now: float) -> Sequence[BrokerAction]:
        waiting, session.waiting = session.waiting, {}
        actions: list[BrokerAction] = []
        for subscription in waiting:
            actions += self._retry(subscription, now)
        return actions

    def _skip(self, subscription: Subscription, page: LogPage) -> list[BrokerAction]:
        """Report what the log has dropped."""
        self._counters["gaps"] += 1
        first, subscription.cursor = subscription.cursor + 1, page.first - 1
        position = Position(page.epoch, subscription.cursor)
        gap = Gap(subscription.interest.id, RETENTION, first, subscription.cursor, position)
        return [Transmit(subscription.session.connection, gap)]

    def pause(self, subscription: Subscription) -> None:
        """Let a subscription fall behind, as its connection is full; ``go_on`` ends that."""
        if subscription.stage is Stage.LIVE:
            interest = subscription.interest
            subscription.cursor = interest.tip
            interest.set_stage(subscription, Stage.CATCHING)

    def go_on(self, subscription: Subscription, now: float) -> list[BrokerAction]:
        """Deliver again what was paused."""
        if subscription.stage is not Stage.CATCHING:
            return []
        if subscription.interest.is_logged:
            return self._catch_up(subscription, None, now)
        missed = self.missed(subscription)
        subscription.interest.set_stage(subscription, Stage.LIVE)
        return missed

    def missed(self, subscription: Subscription) -> list[BrokerAction]:
        """Report what a live interest has dropped for a paused subscription; its latest value where that is enough."""
        interest, connection = subscription.interest, subscription.session.connection
        count = None if subscription.cursor == UNKNOWN else interest.tip - subscription.cursor
        subscription.cursor = interest.tip
        if count == 0:
            return []
        if count is not None and interest.latest is not None:
            self._counters["conflated"] += count - 1
            return [Transmit(connection, interest.latest)]
        self._counters["gaps"] += 1
        return [Transmit(connection, Gap(interest.id, SLOW, count=count))]

    # What comes.

    def on_publication(self, interest: SharedInterest, payload: bytes, now: float) -> list[BrokerAction]:
        """Deliver a message of the interest's channel.

        Of a logged interest, each publication goes to the LIVE subscriptions once and in the order of the log, whatever
        order messages come in and however often. Those that are missing are read from the log; what waits for them is
        kept, up to ``pending_max``. Of a live interest, messages are delivered as they come.
        """
        if not interest.is_logged:
            interest.tip += 1
            if not interest.live and not interest.is_conflated:
                return []
            publisher: int | None = getattr(payload, "publisher", None)
            place = None if publisher is None else (publisher, int(getattr(payload, "number", 0)))
            frame = Data(interest.id, payload, None, place)
            if interest.is_conflated:
                interest.latest = frame
            return [Broadcast(interest.live_connections, frame)] if interest.live else []
        try:
            publication = unpack_publication(payload)
        except MalformedMessage:
            self._counters["malformed"] += 1
            return []
        epoch, offset = publication.epoch, publication.offset
        is_open = interest.phase is Phase.OPEN
        if is_open and epoch == interest.epoch and offset <= interest.tip:
            return []
        if publication.payload is None:  # a notice
            return self.read_behind_tip(interest, now)
        if is_open and epoch == interest.epoch and offset == interest.tip + 1:
            actions = [self._deliver(interest, offset, publication.payload)]
            return actions if not interest.pending else [*actions, *self._deliver_pending(interest, now)]
        if len(interest.pending) < self._options.pending_max:
            interest.pending[epoch, offset] = publication.payload
        else:
            interest.is_stale = True
        return self.read_behind_tip(interest, now) if is_open else []

    def _deliver(self, interest: SharedInterest, offset: int, payload: bytes) -> BrokerAction:
        """Send the next publication to all LIVE subscriptions."""
        frame = Data(interest.id, payload, offset)
        interest.tip = offset
        self.recents.add(interest, frame)
        return Broadcast(interest.live_connections, frame)

    def _deliver_pending(self, interest: SharedInterest, now: float) -> list[BrokerAction]:
        """Deliver the waiting publications whose turn has come; read the log if others still wait."""
        actions = self._take_pending(interest)
        return [*actions, *self.read_behind_tip(interest, now)] if interest.pending else actions

    def _take_pending(self, interest: SharedInterest) -> list[BrokerAction]:
        actions: list[BrokerAction] = []
        pending = interest.pending
        while (payload := pending.pop((interest.epoch, interest.tip + 1), None)) is not None:
            actions.append(self._deliver(interest, interest.tip + 1, payload))
        for key in [key for key in pending if key[0] == interest.epoch and key[1] <= interest.tip]:
            del pending[key]
        return actions

    def read_behind_tip(self, interest: SharedInterest, now: float) -> list[BrokerAction]:
        """Read the log behind the tip, for all users. If a read is under way, another one follows it."""
        if not interest.is_logged:
            return []
        if interest.is_reading or interest.phase is not Phase.OPEN:
            interest.is_stale = True
            return []
        interest.is_reading, interest.is_stale = True, False
        return self._logs.read(
            interest.id, interest.tip, self._options.page_entries, partial(self._behind_tip, interest), now
        )

    def _behind_tip(self, interest: SharedInterest, page: LogPage | None, now: float) -> Sequence[BrokerAction]:
        interest.is_reading = False
        if interest.phase is not Phase.OPEN:
            return []
        if page is None:
            if interest.pending or interest.is_stale:
                self._read_later(interest, now)
            return []
        actions = [*self._absorb(interest, page, now), *self._take_pending(interest)]
        if interest.tip < page.tip:
            return [*actions, *self.read_behind_tip(interest, now)]
        interest.pending = {key: each for key, each in interest.pending.items() if key[0] == interest.epoch}
        if interest.pending:  # published, and not in the log: it was restored, or somebody publishes without appending
            self._read_later(interest, now)
        return [*actions, *self._read_if_stale(interest, now)]

    def _read_later(self, interest: SharedInterest, now: float) -> None:
        if not interest.is_waiting_to_read:
            interest.is_waiting_to_read = True
            self._timers.add(now + RETRY_S, self._read_again, interest)

    def _read_if_stale(self, interest: SharedInterest, now: float) -> list[BrokerAction]:
        return self.read_behind_tip(interest, now) if interest.is_stale else []

    def _read_again(self, interest: SharedInterest, now: float) -> Sequence[BrokerAction]:
        interest.is_waiting_to_read = False
        return self.read_behind_tip(interest, now)

    def _absorb(self, interest: SharedInterest, page: LogPage, now: float) -> list[BrokerAction]:
        """Deliver to all what a page shows beyond the tip."""
        actions: list[BrokerAction] = []
        if page.epoch != interest.epoch:
            actions += self._begin_epoch(interest, page, now)
        for offset, payload in page.entries:
            if offset == interest.tip + 1:
                actions.append(self._deliver(interest, offset, payload))
        if page.first > interest.tip + 1:
            actions += self._jump(interest, page, RETENTION)
        return actions

    def _begin_epoch(self, interest: SharedInterest, page: LogPage, now: float) -> list[BrokerAction]:
        """Begin another epoch: nobody knows what was lost of the former one."""
        self._counters["logs_lost"] += 1
        self.on_log_lost(interest)
        actions: list[BrokerAction] = []
        position = Position(page.epoch, page.first - 1)
        gap = Gap(interest.id, LOG_LOST, interest.tip + 1, None, position)
        behind = [each for each in interest.not_live.values() if each.stage is Stage.CATCHING]
        for subscription in behind:
            connection = subscription.session.connection
            actions.append(Transmit(connection, Gap(interest.id, LOG_LOST, subscription.cursor + 1, None, position)))
            subscription.cursor = position.offset
        if interest.live:
            actions.append(Broadcast(interest.live_connections, gap))
        self._counters["gaps"] += len(interest.live) + len(behind)
        self.recents.forget(interest)
        interest.begin_epoch(page.epoch, position.offset)
        for subscription in behind:
            actions += self._catch_up(subscription, None, now)
        return actions

    def _jump(self, interest: SharedInterest, page: LogPage, reason: str) -> list[BrokerAction]:
        """Go on where the log begins: what is missing was dropped before this broker could read it."""
        first, position = interest.tip + 1, Position(page.epoch, page.first - 1)
        self.recents.forget(interest)
        interest.begin_epoch(page.epoch, position.offset)
        self._counters["gaps"] += len(interest.live)
        if not interest.live:
            return []
        return [Broadcast(interest.live_connections, Gap(interest.id, reason, first, position.offset, position))]

    def on_gap(self, interest: SharedInterest, count: int | None, reason: str, now: float) -> list[BrokerAction]:
        """Handle a gap of the channel: read the log, or report it where there is none."""
        if interest.is_logged:
            return self.read_behind_tip(interest, now)
        self._counters["gaps"] += len(interest.live)
        for subscription in interest.not_live.values():
            subscription.cursor = UNKNOWN
        if not interest.live:
            return []
        noted = Noted("publications of a live channel are missing: its users get a gap", reason, is_warning=True)
        return [noted, Broadcast(interest.live_connections, Gap(interest.id, reason, count=count))]
