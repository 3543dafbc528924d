"""Watches a balancer that waits for the lease, and ends it where another one is at work."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from dynamoth.errors import AlreadyRunning, MalformedMessage
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.protocol.stored_plan import READ_HEADER, parse_header
from dynamoth_balancer.events import Note
from dynamoth_balancer.install.lease import Lease
from dynamoth_balancer.install.recovery import some_of

NOTED_AFTER_S = 0.5
"""A start that takes no longer than this is not worth a line in the log."""

HEADERS_INTERVAL_S = 5.0
"""How often the servers of the stored plan are compared with the configured ones."""

TAG = "contention"


class Contention:
    """Watches how a balancer waits for its lease, and whether it could lead with its configuration.

    Args:
        lease: the lease.
        servers: the ids of the configured servers.
        down: the servers that cannot be reached, and why; kept up to date by the owner.
        patience_s: longer than an unrenewed lease lasts: a balancer that has held it for longer is alive.
        standby: whether to go on waiting while another balancer is at work.

    """

    def __init__(
        self, lease: Lease, servers: Collection[str], down: Mapping[str, str], patience_s: float, *, standby: bool
    ) -> None:
        self._lease = lease
        self._servers = servers
        self._down = down
        self._patience_s = patience_s
        self._standby = standby
        self._since = math.inf
        #: The latest reasons in the log why the lease is not held.
        self._noted: dict[str, Any] = {}
        self._read_at = math.inf
        #: Whether a server has answered since this balancer began to wait.
        self._has_compared = False
        #: By server, the servers in its stored plan that are not configured. No value is empty.
        self._unlisted: dict[str, list[str]] = {}

    def begin(self, now: float) -> None:
        """Begin to wait for the lease."""
        self._since = self._read_at = now
        self._noted = {}
        self._has_compared = False
        self._unlisted = {}

    def read_headers(self, servers: Collection[str], now: float) -> list[Send]:
        """Read, now and then, which servers the stored plans list, at the servers that can be reached."""
        if now < self._read_at or not servers:
            return []
        self._read_at = now + HEADERS_INTERVAL_S
        return [Send(server, READ_HEADER, (TAG,)) for server in servers]

    def on_header(self, server: str, reply: Any, run_id: str | None) -> None:
        """Compare the servers of a stored plan with the configured ones."""
        try:
            header = None if isinstance(reply, ErrorReply) else parse_header(reply, run_id)
        except MalformedMessage:  # the balancer that leads reports it, and writes it again
            header = None
        listed = header.plan.servers.keys() if header is not None and header.believed else set[str]()
        self._has_compared = True
        self._unlisted.pop(server, None)
        if unlisted := sorted(listed - set(self._servers)):
            self._unlisted[server] = unlisted

    @property
    def stands_by(self) -> bool:
        """Whether another balancer holds the lease, and this one may wait for it, and could replace it."""
        return self._standby and bool(self._lease.others()) and self._has_compared and not self._unlisted

    def look(self, now: float) -> list[Note]:
        """Return what the log should say, if that is new. Raises AlreadyRunning where another balancer is at work."""
        others = self._lease.renewed_by_others(self._since, self._patience_s)
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
        if self._unlisted:  # one of them will do: the others say the same
            server, unlisted = next(iter(self._unlisted.items()))
            reasons.append(
                f"the plan stored at {server} lists {some_of(unlisted)}, which the configuration of this balancer does"
                " not: it cannot take over if they are used; give all balancers the same list of servers"
            )
        if others := self._lease.others():
            text = "another balancer holds it at {}; if that one was killed, the lease expires by itself"
            reasons.append(text.format(", ".join(others)))
        if rivals := self._lease.waits_for_rivals():
            text = "another balancer is connected to {} and may believe that it leads; this one waits until it cannot"
            reasons.append(text.format(", ".join(rivals)))
        reasons += [f"{server} refuses it: {reply}" for server, reply in self._lease.problems().items()]
        if self._down:
            reasons.append(f"{', '.join(self._down)} cannot be reached")
        return "; ".join(reasons)

    def details(self) -> dict[str, Any]:
        """Return who holds the lease, and what keeps it from us."""
        return {
            "needed": f"{self._lease.majority} of {len(self._servers)} servers",
            "held_by_others": self._lease.others(),
            "refused": self._lease.problems(),
            "unreachable": dict(self._down),
            "not_configured": dict(self._unlisted),
        }
