"""The interests of a broker. Each is subscribed to once, and shared by all its users (BAD, section 2).

Theory of operation
-------------------
The first subscription to an interest makes it JOINING: the broker subscribes to its channel. There is no wait between
the look-up and the entry in the table, so two users never join twice; all wait for the same confirmation. An interest
that nobody has lingers for a while and is left then.

A logged interest is opened after the confirmation: the tip of its log is read. What was appended before that is in the
log, and what was appended later is published later than the confirmation. Publications that come meanwhile are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum, auto

from dynamoth.edge.frames import Data
from dynamoth.edge.interests import Interest
from dynamoth_broker.events import BrokerOptions, ConnectionId
from dynamoth_broker.sessions import Stage, Subscription

FRAME_BYTES = 250
"""About what a frame takes in memory besides its payload."""


class Phase(Enum):
    """Where an interest is.

    =========  ==================================================================
    JOINING    SUBSCRIBE is under way
    CONFIRMED  nothing of its channel is missed; the log's tip is not known yet
    OPEN       publications go to the users
    LEAVING    UNSUBSCRIBE is under way; nobody has it
    =========  ==================================================================
    """

    JOINING = auto()
    CONFIRMED = auto()
    OPEN = auto()
    LEAVING = auto()


class SharedInterest:
    """One interest of the broker, with all of its subscriptions."""

    __slots__ = (
        "_live_list",
        "arrived_bytes",
        "channel",
        "epoch",
        "idle_since",
        "interest",
        "is_conflated",
        "is_logged",
        "is_reading",
        "is_stale",
        "is_waiting_to_read",
        "joined_at",
        "latest",
        "live",
        "not_live",
        "pending",
        "phase",
        "recent",
        "recent_bytes",
        "tip",
    )

    def __init__(
        self, interest: Interest, *, is_logged: bool, is_conflated: bool = False, joined_at: float = 0.0
    ) -> None:
        """Begin without subscriptions."""
        self.interest = interest
        self.is_logged = is_logged
        self.channel = interest.log_channel if is_logged else interest.name.encode()
        self.phase = Phase.JOINING
        self.joined_at = joined_at
        #: Bytes that have come since they were counted last.
        self.arrived_bytes = 0
        #: Whether a user who falls behind gets the latest publication in place of a gap; and that one.
        self.is_conflated = is_conflated and not is_logged
        self.latest: Data | None = None
        #: The epoch of the log, and the last offset that went to the LIVE subscriptions. Without a log, ``tip`` is how
        #: many publications have come.
        self.epoch = 0
        self.tip = 0
        #: Publications that came before an earlier one, by epoch and offset.
        self.pending: dict[tuple[int, int], bytes] = {}
        #: Whether a read of the log for all users is under way.
        self.is_reading = False
        #: Whether something may be missing that this read does not see.
        self.is_stale = False
        #: Whether a timer for the next read is set.
        self.is_waiting_to_read = False
        #: The latest frames, without holes, up to ``tip``.
        self.recent: deque[Data] = deque()
        self.recent_bytes = 0
        #: LIVE subscriptions by connection.
        self.live: dict[ConnectionId, Subscription] = {}
        #: The WAITING and CATCHING ones.
        self.not_live: dict[ConnectionId, Subscription] = {}
        #: Since when nobody has it; None while somebody does.
        self.idle_since: float | None = None
        self._live_list: list[ConnectionId] | None = []

    @property
    def id(self) -> str:
        """The interest id."""
        return self.interest.id

    @property
    def users(self) -> int:
        """How many sessions have subscribed."""
        return len(self.live) + len(self.not_live)

    @property
    def live_connections(self) -> list[ConnectionId]:
        """The connections of the LIVE subscriptions; the list is not changed later."""
        if self._live_list is None:
            self._live_list = list(self.live)
        return self._live_list

    def set_stage(self, subscription: Subscription, stage: Stage) -> None:
        """Move a subscription of this interest to another stage."""
        connection = subscription.session.connection
        subscription.stage = stage
        if stage is Stage.LIVE:
            self.not_live.pop(connection, None)
            if connection not in self.live:
                self.live[connection] = subscription
                self._live_list = None
        else:
            if self.live.pop(connection, None) is not None:
                self._live_list = None
            self.not_live[connection] = subscription

    def remove(self, subscription: Subscription) -> None:
        """Forget a subscription that has ended."""
        connection = subscription.session.connection
        self.not_live.pop(connection, None)
        if self.live.pop(connection, None) is not None:
            self._live_list = None

    def remember(self, frame: Data, options: BrokerOptions) -> int:
        """Keep the frame at the tip; return by how many bytes the kept frames have grown. For ``Recents``."""
        before = self.recent_bytes
        self.recent.append(frame)
        self.recent_bytes += FRAME_BYTES + len(frame.payload)
        while len(self.recent) > options.recent_entries_max or self.recent_bytes > options.recent_bytes_max:
            self.recent_bytes -= FRAME_BYTES + len(self.recent.popleft().payload)
        return self.recent_bytes - before

    def recent_after(self, offset: int) -> list[Data] | None:
        """Return all frames behind an offset up to ``tip``; None where some are not kept."""
        missing = self.tip - offset
        if not 0 <= missing <= len(self.recent):
            return None
        return list(self.recent)[len(self.recent) - missing :]

    def begin_epoch(self, epoch: int, tip: int) -> None:
        """Begin another epoch; frames of the former one are forgotten before."""
        assert not self.recent, f"{self.id} has frames of the former life of its log"
        self.epoch = epoch
        self.tip = tip


class InterestTable:
    """The interests of a broker, by id and by channel."""

    def __init__(self) -> None:
        """Begin empty."""
        self.by_id: dict[str, SharedInterest] = {}
        self.by_channel: dict[bytes, SharedInterest] = {}

    def __iter__(self) -> Iterator[SharedInterest]:
        """Iterate over all interests."""
        return iter(self.by_id.values())

    def __len__(self) -> int:
        """Return the number of interests."""
        return len(self.by_id)

    def add(self, interest: SharedInterest) -> None:
        """Add an interest."""
        self.by_id[interest.id] = interest
        self.by_channel[interest.channel] = interest

    def remove(self, interest: SharedInterest) -> None:
        """Remove an interest that was left."""
        del self.by_id[interest.id]
        del self.by_channel[interest.channel]

    def check(self) -> None:
        """Assert the invariants."""
        for interest in self:
            assert not interest.live.keys() & interest.not_live.keys(), f"{interest.id}: a session is live and not"
            for connection, subscription in (*interest.live.items(), *interest.not_live.items()):
                assert subscription.session.connection == connection
                assert subscription.session.subscriptions[interest.id] is subscription
                assert (subscription.stage is Stage.LIVE) == (connection in interest.live)
            assert interest.phase is Phase.OPEN or not interest.live, f"{interest.id} is not open"
            assert not (interest.phase is Phase.LEAVING and interest.users)
