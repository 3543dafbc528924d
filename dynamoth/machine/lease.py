"""Decides which of several processes may lead, balancers for example: a lease at the majority of the servers.

Theory of operation
-------------------
The lease is one key at each server that holds the process's incarnation and expires by itself. The balancer that holds
it at more than half of the servers of the plan may change the plan, so there is at most one. Coordinators of brokers
have a lease of their own; this text says "balancer" for both.

Taking it is ``SET NX PX``, followed by ``GET``: the reply of ``GET`` decides. Servers are taken in the order of their
list. Without the majority, a key is kept only while all servers before it are ours or down: so of two
balancers that hold half of the servers each, one lets its half expire. Renewing is ``PEXPIRE``, then ``GET``: the key
that is read is the one that was prolonged, so "ours" means that it was ours then. A server that refuses writes (a full
disk, missing replicas, a server that became a replica) refuses ``PEXPIRE`` and answers ``GET``: then the lease there
ends when the last renewal expires.

A value that no balancer can have written (another type, no number) does not expire. It gets the expiry of a lease, by
PEXPIRE: a DEL could end the lease of another balancer that has just written a correct one; this only prolongs it.

Redis lets keys expire by the clock of its machine. Where that clock is set back, the lease of a balancer that has died
stays for as long. So a lease that is still there when it should have ended, while no other balancer is connected that
could renew it, gets its expiry once more. If its balancer does live, it renews it as before.

The lease counts from when a command was *sent*, shortened by the possible difference of the two clocks.

An absent key proves nothing: FLUSHALL deletes the lease of a balancer that is at work. So a balancer first asks how
many balancers are connected. If there is another one, it takes the key only after the key has been absent for
``FREE_RENEWALS`` renewals, as a balancer at work takes it again at once, and so does one that has renewed it too late.
The other one may be paused, and believe that it has the lease when it goes on: its writes are refused then
(``dynamoth.protocol.fence``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import Send

CLOCK_DRIFT_RATIO = 0.1
"""How much faster than ours a server's clock may run: far more than any does, and a tenth of the lease is cheap."""

FREE_RENEWALS = 2
"""With another balancer connected, a key is free after it has been absent for this many renewals."""

TAG = "lease"


@dataclass(frozen=True, slots=True)
class LeaseNames:
    """What a kind of process has for its lease."""

    #: The key of the lease.
    key: bytes
    #: A channel that exactly the processes of this kind subscribe to: its NUMSUB is their number.
    channel: bytes
    #: What such a process is called in texts for people.
    holder: str


@dataclass(slots=True)
class _Term:
    """The lease at one server."""

    up: bool = False
    #: Until when the lease here is surely ours.
    held_until: float = -math.inf
    #: Whether the last reply said that it is ours (it may have expired since).
    ours: bool = False
    #: Whether another balancer is connected, by the last reply; None before the first.
    has_rival: bool | None = None
    #: Since when no other balancer is connected, by the last reply; infinite while there is one, or while unknown.
    alone_since: float = math.inf
    #: Since when nobody holds the lease here, by the last reply.
    free_since: float = math.inf
    #: The other holder, by the last reply.
    other: bytes | None = None
    #: When the first reply named ``other``, and when the command of the last one was sent.
    other_since: float = -math.inf
    other_until: float = -math.inf
    #: When the outstanding command was sent; None when there is none.
    sent_at: float | None = None
    #: When the next command is due.
    next_at: float = -math.inf
    #: When a value that is no lease got an expiry.
    expires_at: float = -math.inf
    #: The server's answer if it is an error, empty if all is well.
    problem: str = ""


class Lease:
    """Gets and keeps the lease. The owner executes the actions, and checks :meth:`is_held` before each of its own."""

    def __init__(
        self, names: LeaseNames, servers: Sequence[str], incarnation: int, lease_s: float, renew_s: float
    ) -> None:
        """Make a lease for a process. ``incarnation`` is new with each start."""
        self._names = names
        self._value = b"%d" % incarnation
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._terms = {server: _Term() for server in servers}
        #: The servers whose majority decides: those of the plan. One that is being added does not count yet.
        self._voters = list(servers)
        #: Until when the majority is surely ours, at least.
        self._held_until = -math.inf
        self._released = False

    def is_held(self, now: float) -> bool:
        """Return whether the lease is surely held at the majority of the servers."""
        if self._released:
            return False
        if now >= self._held_until:
            self._held_until = self._until(self._voters)
        return now < self._held_until

    @property
    def needed(self) -> str:
        """How many servers must grant the lease, in words."""
        return f"{len(self._voters) // 2 + 1} of {len(self._voters)} servers"

    def _until(self, voters: Collection[str]) -> float:
        until = sorted((self._terms[server].held_until for server in voters), reverse=True)
        return until[len(voters) // 2]

    # The servers.

    def add(self, server: str) -> None:
        """Take the lease at one more server, which does not count yet."""
        self._terms[server] = _Term()

    def would_hold(self, voters: Collection[str], now: float) -> bool:
        """Return whether the lease is surely held at the majority of these servers."""
        return not self._released and now < self._until(voters)

    def holds_at(self, server: str, now: float) -> bool:
        """Return whether the lease is surely held at one server."""
        return now < self._terms[server].held_until

    def why_not(self, server: str) -> str:
        """Return in words why a server does not grant the lease, as far as known."""
        term = self._terms.get(server)
        if term is None or term.other is None:
            return "it has not answered" if term is None or not term.problem else term.problem
        holder = self._names.holder
        return f"another {holder} holds it there, as that server belongs to another cluster, or did a moment ago"

    def vote(self, voters: Sequence[str]) -> None:
        """Count these servers from now on."""
        self._terms = {server: self._terms.get(server) or _Term() for server in (*voters, *self._terms)}
        self._voters = list(voters)
        self._held_until = -math.inf

    def drop(self, server: str) -> list[Send]:
        """Forget a server that does not count; give the lease back there."""
        term = self._terms.pop(server, None)
        if term is None or not term.up or term.held_until == -math.inf:
            return []
        return [Send(server, (b"DEL", self._names.key), (TAG, "released"))]

    def others(self) -> dict[str, str]:
        """Return, per server where another balancer holds the lease, that one's incarnation."""
        return {
            server: term.other.decode(errors="replace")
            for server, term in self._terms.items()
            if term.up and term.other is not None
        }

    def renewed_by_others(self, since: float, for_s: float) -> dict[str, str]:
        """Return those of ``others`` that have surely held the lease for longer than ``for_s`` after ``since``.

        Their replies show it. The age of a reply does not count: this process may have been stopped since, or the
        server may hang.
        """
        return {
            server: incarnation
            for server, incarnation in self.others().items()
            if (term := self._terms[server]).other_until - max(since, term.other_since) > for_s
        }

    def problems(self) -> dict[str, str]:
        """Return the answers of the servers that refuse our commands."""
        return {server: term.problem for server, term in self._terms.items() if term.up and term.problem}

    def waits_for_rivals(self) -> list[str]:
        """Return the servers where the lease is free, or ours, but another balancer may believe that it has it."""
        return [
            server
            for server, term in self._terms.items()
            if term.up and term.has_rival and term.other is None and term.held_until == -math.inf
        ]

    def link_up(self, server: str, now: float) -> list[Send]:
        """Continue at a server."""
        self._terms[server].up = True
        self._terms[server].next_at = now
        return self.tick(now)

    def link_down(self, server: str) -> None:
        """Stop at a server: a granted lease still counts until it expires."""
        term = self._terms[server]
        term.up = False
        term.sent_at = None
        term.other = None
        term.has_rival = None
        term.alone_since = math.inf
        term.free_since = math.inf
        term.problem = ""

    def look_again(self, server: str, now: float) -> list[Send]:
        """Renew the lease at a server where keys were deleted."""
        self._terms[server].next_at = now
        return self.tick(now)

    def doubt(self, now: float) -> None:
        """Stop counting on the lease until the servers have confirmed it again."""
        self._held_until = -math.inf
        for term in self._terms.values():
            term.held_until = -math.inf
            term.next_at = now

    def tick(self, now: float) -> list[Send]:
        """Take and renew the lease at the servers where that is due."""
        sends: list[Send] = []
        if self._released:
            return sends
        leads = self.is_held(now)
        for server, term in self._terms.items():
            if not term.up:
                continue
            if term.sent_at is None and now >= term.next_at:
                sends += self._ask(server, term, now)
            if not leads and not term.ours and not term.problem:
                break
        return sends

    def _ask(self, server: str, term: _Term, now: float) -> list[Send]:
        term.sent_at = now
        term.next_at = now + self._renew_s
        lease_ms = round(self._lease_s * 1000)
        if term.ours:
            return [
                Send(server, (b"PEXPIRE", self._names.key, lease_ms), (TAG, "prolonged")),
                Send(server, (b"GET", self._names.key), (TAG, "renewed")),
            ]
        if self._may_take(term, now):
            return [
                Send(server, (b"SET", self._names.key, self._value, b"NX", b"PX", lease_ms), (TAG, "set")),
                Send(server, (b"GET", self._names.key), (TAG, "taken")),
            ]
        return [
            Send(server, (b"PUBSUB", b"NUMSUB", self._names.channel), (TAG, "balancers")),
            Send(server, (b"GET", self._names.key), (TAG, "looked")),
        ]

    def _may_take(self, term: _Term, now: float) -> bool:
        """Return whether the key is free, by the last reply, or nobody else can have taken it since it was ours."""
        free_s = FREE_RENEWALS * self._renew_s
        is_free = term.has_rival is not None and now - term.free_since >= (free_s if term.has_rival else 0.0)
        return is_free or now < term.held_until + free_s

    def on_reply(self, server: str, what: str, value: Any, now: float) -> list[Send]:
        """Handle the reply to a command whose tag is ``(TAG, what)``."""
        term = self._terms.get(server)
        if term is None:  # it was dropped
            return []
        if what in ("set", "prolonged"):
            term.problem = str(value) if isinstance(value, Exception) else ""
            return []
        if what == "balancers":
            term.has_rival = isinstance(value, Exception) or value[1] > 1  # one is this balancer
            term.alone_since = math.inf if term.has_rival else min(term.alone_since, now)
            return []
        if what == "released" or self._released:
            term.sent_at = None
            return []
        sent_at, term.sent_at = term.sent_at, None
        assert sent_at is not None, f"a reply of {server} to no command"
        if isinstance(value, Exception):
            term.problem = str(value)
        term.ours = value == self._value
        if term.ours and what == "taken":
            term.problem = ""
        other = value if isinstance(value, bytes) and value.isdigit() and not term.ours else None
        if other != term.other:
            term.other, term.other_since = other, now
        term.other_until = sent_at
        if isinstance(value, bytes) and not value.isdigit():
            term.problem = f"the key {self._names.key.decode()} holds no lease: {value[:20]!r}"
        if value is None:
            return self._on_absence(term, what, now)
        term.free_since = math.inf
        if not term.ours:
            term.held_until = self._held_until = -math.inf
            return self._expire(server, term, value, now)
        if what == "taken":
            term.next_at = now  # it may have been ours before, with little time left: only a renewal shows that
        elif not term.problem:
            term.held_until = sent_at + self._lease_s * (1 - CLOCK_DRIFT_RATIO)
        return self.tick(now)

    def _on_absence(self, term: _Term, what: str, now: float) -> list[Send]:
        """Continue where there is no key. A granted lease counts until it would have expired."""
        if what != "looked":
            term.has_rival = None
        term.free_since = min(term.free_since, now)
        if not term.problem and (term.has_rival is None or self._may_take(term, now)):
            term.next_at = now
        return self.tick(now)

    def _expire(self, server: str, term: _Term, value: Any, now: float) -> list[Send]:
        """Set an expiry for a value that is no lease of any balancer, or a lease that should have ended."""
        is_text = isinstance(value, bytes) and not value.isdigit()
        is_other_type = isinstance(value, Exception) and str(value).startswith("WRONGTYPE")
        if not (is_text or is_other_type or self._is_left(term, now)) or now < term.expires_at + self._lease_s:
            return []
        term.expires_at = now + self._lease_s
        return [Send(server, (b"PEXPIRE", self._names.key, round(self._lease_s * 1000)))]

    def _is_left(self, term: _Term, now: float) -> bool:
        """Return whether another balancer has left a lease that does not end."""
        since = max(term.alone_since, term.other_since)
        return term.other is not None and now - since > self._lease_s * (1 + CLOCK_DRIFT_RATIO) + self._renew_s

    def release(self, now: float) -> list[Send]:
        """Give the lease back wherever it is surely ours; no command follows after this."""
        sends = [
            Send(server, (b"DEL", self._names.key), (TAG, "released"))
            for server, term in self._terms.items()
            if term.up and term.held_until > now
        ]
        self._released = True
        for send in sends:
            self._terms[send.link].sent_at = now
        return sends

    @property
    def is_releasing(self) -> bool:
        """Whether a server has not answered yet that its lease is given back."""
        return any(term.up and term.sent_at is not None for term in self._terms.values())
