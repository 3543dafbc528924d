"""Reads the plans that a predecessor left, for a balancer that has got the lease: one copy of each that is stored.

It first claims a term, so that its predecessor can write no more, and reads then.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamoth.errors import ConfigError, MalformedMessage, OtherFormat
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import in_quotes
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.fence import TERM_MAX
from dynamoth.protocol.stored_plan import READ_HEADER, READ_WHOLE, StoredHeader, parse_header, parse_whole
from dynamoth_balancer.events import Note
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.install.claim import Claim
from dynamoth_balancer.install.quorum import is_majority
from dynamoth_balancer.install.recovery import Conflict, Copy, listing_of, recover, same_header

TAG = "takeover"

UNUSABLE = -1
"""Stands for the version of a copy that must be written as a whole."""


class _State(enum.Enum):
    """How much is known of a server."""

    DOWN = "down"
    UP = "up"
    """It is connected, and waits for the term."""
    ASKED = "asked"
    KNOWN = "known"
    """Its header was read."""
    READING = "reading"
    """The whole copy is being read."""
    UNREADABLE = "unreadable"


@dataclass(slots=True)
class _Found:
    """The findings at one server, over its present connection."""

    state: _State = _State.DOWN
    run_id: str | None = None
    #: None when the server stores no plan.
    header: StoredHeader | None = None


class Takeover:
    """Claims a term, reads the headers of all servers, and then the copies.

    It waits for ``wait_s`` after it has the term for servers that do not answer; not where no other balancer has led
    since this one did, as they can have nothing newer then. What they store is its own work then, and is not read
    again: that may take a busy machine longer than a lease lasts, so that it would never come to lead.

    Servers with the same version and header store the same plan: only one of them is read as a whole.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        term: int,
        wait_s: float,
        virtual_nodes: int,
        own: PlanBook | None = None,
        rules: tuple[CompatibilityRule, ...] = (),
        voters: Sequence[str] | None = None,
    ) -> None:
        """Begin; the owner calls ``link_up`` for each link that is up.

        ``own`` is the book of the latest term of this process: the servers may have lost its plan since, it has not.
        ``term`` counts the terms of this process.
        ``rules`` are the compatibility rules of a new cluster.
        ``voters`` are the servers that count; None: all.
        """
        self._own_book = own
        self._own = None if own is None else own.plan
        self._rules = rules
        self._servers = servers
        self._term = term
        self._wait_s = wait_s
        voters = [server.id for server in servers] if voters is None else voters
        self._claim = Claim(voters, -1 if own is None else own.plan.version, (TAG, term))
        #: When the servers that have not answered are given up; None before the term is granted.
        self._deadline: float | None = None
        self._virtual_nodes = virtual_nodes
        self._found = {server.id: _Found() for server in servers}
        #: Copies read so far, one of each header.
        self._copies: list[Copy] = []
        #: Servers with copies that have unreadable entries: copies of the same plan at other servers are read, too.
        self._damaged: set[str] = set()
        #: Servers with compatibility rules that cannot be believed.
        self._without_rules: set[str] = set()
        #: The servers with a plan of an older or newer format, with the reason why it cannot be continued.
        self._other_formats: dict[str, str] = {}
        #: The unreadable entries.
        self._conflicts: list[Conflict] = []

    def link_up(self, server: str, run_id: str | None) -> list[Send]:
        """Begin over a new connection: with the term, or with the header once the term is granted."""
        if self._deadline is None:
            self._found[server] = _Found(_State.UP, run_id)
            return self._claim.link_up(server)
        self._found[server] = _Found(_State.ASKED, run_id)
        return [self._send(server, "header")]

    def link_down(self, server: str) -> None:
        """Forget what this connection has shown; a whole copy that was read counts."""
        self._found[server] = _Found()
        self._claim.link_down(server)

    @property
    def fence_term(self) -> int:
        """The term at the servers; the highest possible before it is granted, as it is above all others then."""
        return TERM_MAX if self._deadline is None and not self._claim.is_granted else self._claim.term

    def refusals(self) -> dict[str, str]:
        """Return the answers of the servers that refuse the term."""
        return self._claim.problems()

    def _send(self, server: str, what: str) -> Send:
        return Send(server, READ_HEADER if what == "header" else READ_WHOLE, (TAG, self._term, what))

    def on_reply(self, server: str, tag: tuple[str, int, str], value: Any) -> list[Note]:
        """Handle the reply to a command of ours."""
        _, term, what = tag
        if term != self._term:
            return []
        if what in ("term", "version", "claim"):
            return self._claim.on_reply(server, what, value)
        found = self._found[server]
        try:
            if isinstance(value, ErrorReply):
                raise MalformedMessage(str(value))
            lost: list[str] = []
            if what == "header":
                found.header = parse_header(value, found.run_id, lost)
                if lost and server not in self._without_rules:
                    self._without_rules.add(server)
                    self._conflicts.append(Conflict(server, f"its compatibility rules are left out: {lost[0]}"))
            else:
                damaged: list[bytes] = []
                self._keep(server, parse_whole(value, None, damaged, lost), found)
                if lost:  # other copies may have the right ones
                    self._damaged.add(server)
                if damaged:
                    self._damaged.add(server)
                    self._conflicts.append(Conflict(server, _damage(damaged)))
            found.state = _State.KNOWN
        except MalformedMessage as error:
            if isinstance(error, OtherFormat):
                self._other_formats[server] = f"the plan stored at {server} cannot be continued: {error}"
            found.state = _State.UNREADABLE
            found.header = None
            details = {"server": server, "reason": str(error)}
            return [Note("error", "the plan stored at a server cannot be read; others are used", details)]
        return []

    def _keep(self, server: str, plan: Plan | None, found: _Found) -> None:
        if plan is None:  # deleted between the two commands
            found.header = None
            return
        believed = found.header is not None and found.header.believed
        found.header = StoredHeader(plan.version, believed, plan)
        self._copies.append(Copy(server, plan, believed))

    def missing(self) -> list[str]:
        """Return the servers that are unknown so far, and may store a newer plan than that of this process."""
        if self._own_is_newest:
            return []
        return [name for name, found in self._found.items() if found.state in (_State.DOWN, _State.UP, _State.ASKED)]

    def read(self, now: float) -> list[Send] | None:
        """Continue; None when everything is read that can be waited for."""
        if self._deadline is None:
            if not self._claim.is_granted:
                return list(self._claim.look(now))
            if self._own_is_newest:
                return None
            self._deadline = now + self._wait_s
            up = [server for server, found in self._found.items() if found.state is _State.UP]
            for server in up:
                self._found[server].state = _State.ASKED
            return [self._send(server, "header") for server in up]
        if self.missing() and now < self._deadline:
            return []
        if any(found.state is _State.READING for found in self._found.values()):
            return []
        sends: list[Send] = []
        known = [copy.plan for copy in self._copies if copy.server not in self._damaged]
        for server, found in self._found.items():
            header = found.header
            if header is None or server in self._damaged or any(_same_copy(header.plan, plan) for plan in known):
                continue
            known.append(header.plan)
            found.state = _State.READING
            sends.append(self._send(server, "whole"))
        return sends or None

    @property
    def _own_is_newest(self) -> bool:
        """Whether no other balancer has led since the plan of this process."""
        own = self._own_book
        is_last = own is not None and self._claim.highest_granted <= own.term
        return own is not None and is_last and own.plan.servers.keys() == self._found.keys()

    def listing(self, now: float) -> Plan | None:
        """Return the header with the servers that the plan has; None while that is not known, and in a new cluster."""
        if self._deadline is None or (self.missing() and now < self._deadline) or self._own_is_newest:
            return None
        headers = [
            Copy(server, found.header.plan, found.header.believed)
            for server, found in self._found.items()
            if found.header is not None
        ]
        return listing_of(self._servers, headers, self._virtual_nodes)

    def finish(self) -> tuple[PlanBook, dict[str, int], list[Conflict]]:
        """Return the plan to continue with, the versions of usable copies by server, and the conflicts.

        Raises:
            ConfigError: the copies are of different clusters, or most are of another format.

        """
        if is_majority(len(self._other_formats), len(self._found)):  # at fewer servers it may be forged
            raise ConfigError(next(iter(self._other_formats.values())))
        if self._own_book is not None and self._own_is_newest:
            self._own_book.begin_term(self._claim.term)
            return self._own_book, {}, []
        complete = all(found.state is _State.KNOWN for found in self._found.values())
        copies = [self._judge(copy) for copy in self._copies]
        if self._own is not None:
            is_outdated = not self._own_is_newest
            copies.append(Copy("the balancer itself", self._own, believed=True, is_outdated=is_outdated))
        plan, usable, conflicts = recover(
            self._servers,
            copies,
            first=self._claim.term,
            is_complete=complete and self._claim.seen <= 0,
            virtual_nodes=self._virtual_nodes,
            rules=self._rules,
        )
        if self._without_rules and not plan.compatibility.version:  # newer than what clients know, for all to agree
            plan = plan.following(Compatibility(plan.version))
        stored = [copy for copy in usable if copy.plan is not self._own]  # another may have led since our own term
        is_complete = complete and not self._damaged and any(copy.believed for copy in stored)
        known = {copy.plan.version: copy.plan for copy in usable if copy.server not in self._damaged}
        book = PlanBook(plan, known, is_complete=is_complete, term=self._claim.term)
        fresh = {
            server: found.header.version
            for server, found in self._found.items()
            if found.header is not None
            and found.header.believed
            and book.knows(found.header.version)
            and same_header(found.header.plan, plan)
        }
        versions = {server: version for server, version in fresh.items() if book.change_from(version) is not None}
        versions.update(dict.fromkeys(self._damaged | self._without_rules, UNUSABLE))
        return book, versions, [*self._conflicts, *conflicts]

    def _judge(self, copy: Copy) -> Copy:
        """Return the copy; it is believed if a balancer, and not a disk, gave it to any server."""
        believed = any(
            found.header is not None and found.header.believed and _same_copy(found.header.plan, copy.plan)
            for found in self._found.values()
        )
        return replace(copy, believed=copy.believed or believed)


def _damage(channels: Sequence[bytes]) -> str:
    names = ", ".join(map(in_quotes, channels[:3]))
    return f"its entries of {len(channels)} channels cannot be read ({names}): they are where other copies say, or home"


def _same_copy(one: Plan, other: Plan) -> bool:
    """Return whether two headers are of the same plan, unless somebody else has written one of them."""
    return one.version == other.version and same_header(one, other)
