"""What operators have ordered, pause and pinned users, stored at the servers: it outlives all coordinators.

Theory of operation
-------------------
The orders are one key at each server, beside the lease, with a number that grows with each order. Only the coordinator
that has the lease writes them, so there is one writer. It carries an order out at once, and answers the operator when
the majority of the servers has stored it.

A coordinator that gets the lease reads the key at the majority of the servers before it acts, so it finds every order
that an operator got an answer to; of several, the highest number counts. Then it writes where something else is stored,
and looks again every ``CHECK_S``: a server that has lost its keys gets them again. The others read as often, and know
the orders although the servers lose them meanwhile.

A server that refuses the command, or holds something unreadable, does not count as read, or counts as empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.edge.control import USER_MAX
from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import Send
from dynamoth.names import COORDINATOR_ORDERS_KEY
from dynamoth.protocol.wire import pack, parser, read_array, read_natural, read_text, unpack

TAG = "orders"

CHECK_S = 2.0
"""Time between two looks at what is stored."""

PINS_MAX = 1000
"""Bound of the pinned users. All of them are written with each order: at most 2 MB."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What operators have ordered; ``number`` 0: nothing ever."""

    number: int = 0
    is_paused: bool = False
    pinned: frozenset[str] = frozenset()


def pack_orders(orders: Orders) -> bytes:
    """Serialise orders."""
    return pack([orders.number, orders.is_paused, sorted(orders.pinned)])


@parser("the orders of operators")
def unpack_orders(data: bytes) -> Orders:
    """Read orders. Raises MalformedMessage."""
    number, is_paused, pinned, *_ = read_array(unpack(data))
    if not isinstance(is_paused, bool):
        raise MalformedMessage("true or false expected")
    return Orders(read_natural(number), is_paused, frozenset(read_text(user, USER_MAX) for user in read_array(pinned)))


@dataclass(slots=True)
class _Copy:
    """The orders at one server."""

    is_up: bool = False
    #: Whether they were read in this term.
    is_read: bool = False
    #: The number of the orders that are stored there, by the latest reply; -1: unknown, or something else is stored.
    number: int = -1
    #: Why they cannot be read or written; empty while all is well.
    problem: str = ""


class StoredOrders:
    """The orders of operators, as one coordinator knows them. The owner executes the actions."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.present = Orders()
        self._copies = {server: _Copy() for server in servers}
        #: How many terms have begun, and whether the lease is held now.
        self._term = 0
        self._has_lease = False

    @property
    def are_known(self) -> bool:
        """Whether the owner has the lease, and knows all that was ordered before."""
        return self._has_lease and self._is_majority(sum(copy.is_read for copy in self._copies.values()))

    @property
    def problems(self) -> dict[str, str]:
        """The servers that refuse to read or write them, and why."""
        return {server: copy.problem for server, copy in self._copies.items() if copy.is_up and copy.problem}

    @property
    def stored_at(self) -> int:
        """How many servers have stored the present orders."""
        return sum(copy.number == self.present.number for copy in self._copies.values())

    @property
    def is_stored(self) -> bool:
        """Whether the majority of the servers has stored the present orders."""
        return self._is_majority(self.stored_at)

    @property
    def places(self) -> str:
        """At how many servers the present orders are stored, in words."""
        return f"{self.stored_at} of {len(self._copies)} servers"

    def _is_majority(self, count: int) -> bool:
        return 2 * count > len(self._copies)

    # The lease.

    def begin_term(self) -> list[Send]:
        """Read what is stored, as the lease was got."""
        self._term += 1
        self._has_lease = True
        for copy in self._copies.values():
            copy.is_read, copy.number = False, -1
        return self.check()

    def end_term(self) -> None:
        """Write nothing any more, as the lease is lost."""
        self._has_lease = False

    # Servers.

    def on_up(self, server: str) -> list[Send]:
        """Continue at a server."""
        copy = self._copies[server]
        copy.is_up, copy.number, copy.problem = True, -1, ""
        return [self._read(server)]

    def on_down(self, server: str) -> None:
        """Stop at a server. What was read there still counts."""
        self._copies[server].is_up = False

    def check(self) -> list[Send]:
        """Look at what is stored."""
        return [self._read(server) for server, copy in self._copies.items() if copy.is_up]

    def change(self, is_paused: bool, pinned: frozenset[str]) -> list[Send]:
        """Store other orders. They count from now on."""
        assert self.are_known, "only the coordinator that acts changes orders"
        self.present = Orders(self.present.number + 1, is_paused, pinned)
        return [self._write(server) for server, copy in self._copies.items() if copy.is_up]

    def on_reply(self, server: str, what: tuple[str, int], value: Any) -> list[Send]:
        """Handle the reply to a command whose tag is ``(TAG, what)``."""
        copy, (kind, number) = self._copies[server], what
        error = str(value) if isinstance(value, Exception) else ""
        if kind == "written":
            copy.problem, copy.number = error, -1 if error else max(copy.number, number)
            return []
        if error and not error.startswith("WRONGTYPE"):
            copy.problem = error
            return []
        stored, problem = _unpacked(None if error else value)
        was_known = self.are_known
        copy.is_read = copy.is_read or number == self._term
        if not was_known and stored.number >= self.present.number:
            self.present = stored
        copy.number = stored.number if stored == self.present else -1
        if copy.number >= 0 or not self.are_known:  # else a write follows, and its reply says more
            copy.problem = problem or error
        if not self.are_known:
            return []
        return self._mend_at(server) if was_known else [send for each in self._copies for send in self._mend_at(each)]

    def _mend_at(self, server: str) -> list[Send]:
        """Write where other orders are stored, or where nobody knows."""
        copy = self._copies[server]
        is_right = copy.number == self.present.number
        return [] if is_right or not copy.is_up or not self.present.number else [self._write(server)]

    def _read(self, server: str) -> Send:
        return Send(server, (b"GET", COORDINATOR_ORDERS_KEY), (TAG, ("read", self._term)))

    def _write(self, server: str) -> Send:
        data = pack_orders(self.present)
        return Send(server, (b"SET", COORDINATOR_ORDERS_KEY, data), (TAG, ("written", self.present.number)))


def _unpacked(value: Any) -> tuple[Orders, str]:
    """Return what is stored, or none and why it cannot be read."""
    if value is None:
        return Orders(), ""
    try:
        return unpack_orders(value), ""
    except MalformedMessage as error:
        return Orders(), f"{COORDINATOR_ORDERS_KEY.decode()}: {error}"
