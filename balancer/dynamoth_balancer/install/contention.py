"""Watches a balancer that waits for the lease, and ends it where another one is at work.

It reads which servers the stored plans list: whoever wants to lead needs the lease of those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dynamoth.errors import AlreadyRunning, MalformedMessage
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.machine.lease import Lease
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.stored_plan import READ_HEADER, parse_header
from dynamoth_balancer.events import Note
from dynamoth_balancer.install.recovery import Copy, listing_of

NOTED_AFTER_S = 0.5
"""A start that takes no longer than this is not worth a line in the log."""

HEADERS_INTERVAL_S = 5.0
"""How often it is read which servers the plan lists."""

LISTING_S = 1.0
"""More than half of the servers have this time to say which servers the plan has."""

RENEWED_LATE = (
    "it was not renewed in time: this process, or servers, were held up for longer than it lasts; give them the CPU"
    " that they need, or raise lease_s in section [balancer]"
)
"""Why a lease was lost that nobody else holds and no server refuses."""

TAG = "contention"


class Contention:
    """Watches how a balancer waits for its lease.

    Args:
        lease: the lease.
        servers: the servers of the plan by id, as far as known; kept up to date by the owner.
        down: the servers that cannot be reached, and why; kept up to date by the owner.
        patience_s: longer than an unrenewed lease lasts: a balancer that has held it for longer is alive.
        standby: whether to go on waiting while another balancer is at work.

    """

    def __init__(
        self, lease: Lease, servers: Mapping[str, Server], down: Mapping[str, str], patience_s: float, *, standby: bool
    ) -> None:
        self._lease = lease
        self._servers = servers
        self._down = down
        self._patience_s = patience_s
        self._standby = standby
        self._since = math.inf
        #: Whether it waits because it has lost the lease.
        self._has_led = False
        #: The latest reasons in the log why the lease is not held.
        self._noted: dict[str, Any] = {}
        self._read_at = math.inf
        #: The headers that were read since this balancer began to wait; None where there is none.
        self._headers: dict[str, Copy | None] = {}

    def begin(self, now: float, *, has_led: bool = False) -> None:
        """Begin to wait for the lease; ``has_led`` where it was held until now."""
        self._has_led = has_led
        self._since = self._read_at = now
        self._noted = {}
        self._headers = {}

    def read_headers(self, servers: Collection[str], now: float) -> list[Send]:
        """Read, now and then, which servers the stored plans list, at the servers that can be reached."""
        if now < self._read_at or not servers:
            return []
        self._read_at = now + HEADERS_INTERVAL_S
        return [self.read(server) for server in servers]

    def read(self, server: str) -> Send:
        """Read which servers the plan lists that one server stores."""
        return Send(server, READ_HEADER, (TAG,))

    def on_header(self, server: str, reply: Any, run_id: str | None) -> None:
        """Keep the header of a stored plan."""
        try:
            header = None if isinstance(reply, ErrorReply) else parse_header(reply, run_id)
        except MalformedMessage:  # the balancer that leads reports it, and writes it again
            header = None
        self._headers[server] = None if header is None else Copy(server, header.plan, header.believed)

    def link_down(self, server: str) -> None:
        """Forget the header of a server that cannot be reached."""
        self._headers.pop(server, None)

    def listing(self, up: Iterable[str], virtual_nodes: int, now: float) -> Plan | None:
        """Return the header with the servers that the plan has; None while that is not known.

        ``up`` are the connected servers, among them configured ones that the plan may not list. The headers of more
        than half of the listed servers decide. Without so many, perhaps as most have left, the others do after a while.
        """
        known = sum(server in self._headers for server in self._servers)
        is_early = 2 * known <= len(self._servers) and now - self._since < LISTING_S
        if is_early or any(server not in self._headers for server in up):
            return None
        headers = [header for header in self._headers.values() if header is not None]
        return listing_of(list(self._servers.values()), headers, virtual_nodes)

    @property
    def stands_by(self) -> bool:
        """Whether another balancer holds the lease, and this one may wait for it, and could replace it.

        It could not without most of the servers, and perhaps nobody leads then: the other one may keep the lease of a
        few servers.
        """
        reached = len(self._servers.keys() - self._down.keys())
        return self._standby and bool(self._lease.others() and self._headers) and 2 * reached > len(self._servers)

    @property
    def others_at_work(self) -> dict[str, str]:
        """The incarnation of another balancer, by server where it has renewed the lease while this one waited."""
        return self._lease.renewed_by_others(self._since, self._patience_s)

    def look(self, now: float) -> list[Note]:
        """Return what the log should say, if that is new. Raises AlreadyRunning where another balancer is at work."""
        others = self.others_at_work
        if others and not self._standby:
            incarnations = ", ".join(sorted(set(others.values())))
            raise AlreadyRunning(
                f"another balancer (incarnation {incarnations}) is at work: it holds the lease at {', '.join(others)}"
                " and renews it; stop that one first, or start this one with --standby true: CLIENT LIST at one of"
                " these servers shows its address (name=dynamoth-balancer)"
            )
        details = self.details()
        reason = self.reason()
        if now - self._since < NOTED_AFTER_S or not reason or details == self._noted:
            return []
        self._noted = details
        level = "info" if self.stands_by else "warning"
        return [Note(level, "waiting for the lease", {**details, "reason": reason})]

    def reason(self) -> str:
        """Return in words what keeps the lease from us; empty where nothing does, so that the next attempt gets it."""
        reasons: list[str] = []
        if others := self._lease.others():
            text = "another balancer holds it at {}; if that one was killed, the lease expires by itself"
            reasons.append(text.format(", ".join(others)))
        if rivals := self._lease.waits_for_rivals():
            text = "another balancer is connected to {} and may believe that it leads; this one waits until it cannot"
            reasons.append(text.format(", ".join(rivals)))
        reasons += [f"{server} refuses it: {reply}" for server, reply in self._lease.problems().items()]
        if self._down:
            reasons.append(f"{', '.join(self._down)} cannot be reached")
        if not reasons and self._has_led:
            return RENEWED_LATE
        return "; ".join(reasons)

    def details(self) -> dict[str, Any]:
        """Return who holds the lease, and what keeps it from us."""
        return {
            "needed": self._lease.needed,
            "held_by_others": self._lease.others(),
            "refused": self._lease.problems(),
            "unreachable": dict(self._down),
        }
