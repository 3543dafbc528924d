"""The connections of an end user's client: which broker is tried next, and when a silent one is given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

from dynamoth.edge.frames import Pong, SubscriptionRequest
from dynamoth.machine.timers import Timers
from dynamoth_user.machine.events import CloseConnection, OpenConnection, SendFrame, UserAction, UserOptions
from dynamoth_user.machine.records import Connection, Role, UserSubscription

LOST = 1006
SILENT = 1001

OnClosed = Callable[[int, int, str, float], list[UserAction]]
"""Handles the end of a connection: its number, the close code, the reason, and the time."""


class Connections:
    """Opens connections, and knows what each is for: at most one has each role.

    Args:
        options: of the client.
        incarnation: random; it spreads the times of reconnects.
        timers: of the machine.
        counters: of the machine.
        on_closed: called for a connection that is given up.

    """

    def __init__(
        self,
        options: UserOptions,
        incarnation: int,
        timers: Timers[UserAction],
        counters: Counter[str],
        on_closed: OnClosed,
    ) -> None:
        """Begin without a connection."""
        self._options = options
        self._incarnation = incarnation
        self._timers = timers
        self._counters = counters
        self._on_closed = on_closed
        self.by_number: dict[int, Connection] = {}
        #: Other brokers, as the last one has named them.
        self.alternates: tuple[str, ...] = ()
        self._numbers = 0
        self._refs = 0
        self._draws = 0
        #: Failed attempts since a broker served us.
        self._attempts = 0
        self._next_url = 0
        #: Where the last connection was lost, or failed: another broker is tried before it.
        self._lost_url = ""

    @property
    def serving(self) -> Connection | None:
        """The connection with the role SERVING: open, or being opened."""
        return self.of_role(Role.SERVING)

    @property
    def is_moving(self) -> bool:
        """Whether a migration is going on: there are two connections."""
        return len(self.by_number) > 1

    def of_role(self, role: Role) -> Connection | None:
        """Return the connection that has a role."""
        return next((each for each in self.by_number.values() if each.role is role), None)

    def is_new(self, connection: Connection) -> bool:
        """Whether a connection is the new one of a migration."""
        if connection.role is Role.CANDIDATE:
            return True
        return connection.role is Role.SERVING and self.of_role(Role.LEAVING) is not None

    def random(self) -> float:
        """Return a number from 0 to 1."""
        self._draws += 1
        seed = b"%d %d" % (self._incarnation, self._draws)
        return int.from_bytes(blake2b(seed, digest_size=7).digest()) / 2**56

    def new_ref(self) -> int:
        """Return a number for ``ref`` that no connection has used."""
        self._refs += 1
        return self._refs

    def ask_for(self, connection: Connection, subscription: UserSubscription) -> SubscriptionRequest:
        """Note that a connection is asked for a subscription; return what it is asked."""
        request = subscription.request(self.new_ref())
        connection.asked[request.ref] = request
        return request

    # Opening.

    def open_serving(self, now: float) -> list[UserAction]:
        """Open a connection to serve the session, unless there is one: alternates first, then the given URLs."""
        if self.serving is not None:
            return []
        urls = (*self.alternates, *(url for url in self._options.urls if url not in self.alternates))
        if len(urls) > 1 and urls[self._next_url % len(urls)] == self._lost_url:
            self._next_url += 1
        url = urls[self._next_url % len(urls)]
        self._next_url += 1
        return self.open(url, Role.SERVING, now)

    def open(self, url: str, role: Role, now: float, ticket: str | None = None) -> list[UserAction]:
        """Open a connection."""
        self._numbers += 1
        number = self._numbers
        deadline = now + self._options.connect_timeout_s
        self.by_number[number] = Connection(number, url, role, deadline, ticket=ticket)
        self._timers.add(deadline, self._watch, number)
        return [OpenConnection(number, url)]

    def retry(self, lost: Connection, now: float) -> float:
        """Schedule the next attempt after a connection was lost or failed; return in how many seconds it comes."""
        self._lost_url = lost.url
        if lost.is_up:
            self._attempts = self._next_url = 0
        bound = min(self._options.backoff_s_max, self._options.backoff_s_min * 2.0**self._attempts)
        self._attempts = min(self._attempts + 1, 30)
        retry_s = max(bound * self.random(), lost.retry_after_s)
        self._timers.add(now + retry_s, self.open_serving)
        return retry_s

    # Silence.

    def on_frame(self, connection: Connection, now: float) -> None:
        """Note that a broker is alive."""
        if connection.is_up:
            connection.deadline = now + connection.ping_s + self._options.silence_s

    def set_paused(self, number: int, *, is_paused: bool, now: float) -> list[UserAction]:
        """Note that frames of a connection are not read for now: that is no silence of the broker."""
        connection = self.by_number.get(number)
        if connection is None or connection.is_paused == is_paused:
            return []
        connection.is_paused = is_paused
        self.on_frame(connection, now)
        return self._stay_alive(number, now) if is_paused else []

    def _stay_alive(self, number: int, now: float) -> list[UserAction]:
        """Show the broker that this side is alive, while its pings are not read."""
        connection = self.by_number.get(number)
        if connection is None or not connection.is_paused or not connection.is_up or now < connection.alive_due:
            return []
        connection.alive_due = now + connection.ping_s
        self._timers.add(connection.alive_due, self._stay_alive, number)
        return [SendFrame(number, Pong())]

    def _watch(self, number: int, now: float) -> list[UserAction]:
        """Give up a connection that is silent."""
        connection = self.by_number.get(number)
        if connection is None:
            return []
        if connection.is_paused:
            self.on_frame(connection, now)
        if now < connection.deadline:
            self._timers.add(connection.deadline, self._watch, number)
            return []
        self._counters["connections_silent"] += 1
        return [
            CloseConnection(number, SILENT, "the broker is silent"),
            *self._on_closed(number, LOST, "the broker is silent", now),
        ]
