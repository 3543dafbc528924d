"""How a balancer that has got the lease reads what its predecessor left: one copy of each version that is stored."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamoth.compatibility import CompatibilityRule
from dynamoth.errors import MalformedMessage
from dynamoth.events import ErrorReply, Send
from dynamoth.plan import Plan, Server
from dynamoth.stored_plan import READ_HEADER, READ_WHOLE, StoredHeader, parse_header, parse_whole
from dynamoth_balancer.actions import Note
from dynamoth_balancer.book import PlanBook
from dynamoth_balancer.recovery import Copy, known_plans, recover

TAG = "takeover"


class _State(enum.Enum):
    """How much is known of a server."""

    DOWN = "down"
    ASKED = "asked"
    KNOWN = "known"
    """Its header was read."""
    READING = "reading"
    """The whole copy is being read."""
    UNREADABLE = "unreadable"


@dataclass(slots=True)
class _Found:
    """What was found at one server, over its present connection."""

    state: _State = _State.DOWN
    run_id: str | None = None
    #: None when the server stores no plan.
    header: StoredHeader | None = None


class Takeover:
    """Reads the headers of all servers, waiting for those that do not answer until a deadline, then the copies.

    Servers that store the same version store the same: only one of them is read as a whole.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        term: int,
        deadline: float,
        virtual_nodes: int,
        own: Plan | None = None,
        rules: tuple[CompatibilityRule, ...] = (),
    ) -> None:
        """Begin; ``link_up`` is to be called for each link that is up.

        ``own`` is the plan of an earlier term of this process: the servers may have lost it since, it has not.
        ``rules`` are the compatibility rules of a new cluster.
        """
        self._own = own
        self._rules = rules
        self._servers = servers
        self._term = term
        self._deadline = deadline
        self._virtual_nodes = virtual_nodes
        self._found = {server.id: _Found() for server in servers}
        #: Copies read so far, by version.
        self._copies: dict[int, Copy] = {}

    def link_up(self, server: str, run_id: str | None) -> list[Send]:
        """Read the header."""
        self._found[server] = _Found(_State.ASKED, run_id)
        return [self._send(server, "header")]

    def link_down(self, server: str) -> None:
        """Forget what was read over this connection; a whole copy that was read counts."""
        self._found[server] = _Found()

    def _send(self, server: str, what: str) -> Send:
        return Send(server, READ_HEADER if what == "header" else READ_WHOLE, (TAG, self._term, what))

    def replied(self, server: str, tag: tuple[str, int, str], value: Any) -> list[Note]:
        """Take the reply to a command of ours."""
        _, term, what = tag
        if term != self._term:
            return []
        found = self._found[server]
        try:
            if isinstance(value, ErrorReply):
                raise MalformedMessage(str(value))
            if what == "header":
                found.header = parse_header(value, found.run_id)
            else:
                self._keep(server, parse_whole(value, None), found)
            found.state = _State.KNOWN
        except MalformedMessage as error:
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
        self._copies[plan.version] = Copy(server, plan, believed)

    def missing(self) -> list[str]:
        """Return the servers of which nothing is known yet."""
        return [name for name, found in self._found.items() if found.state in (_State.DOWN, _State.ASKED)]

    def read(self, now: float) -> list[Send] | None:
        """Go on reading; None when everything is read that can be waited for."""
        if self.missing() and now < self._deadline:
            return []
        if any(found.state is _State.READING for found in self._found.values()):
            return []
        sends: list[Send] = []
        wanted: set[int] = set()
        for server, found in self._found.items():
            header = found.header
            if header is None or header.version in self._copies or header.version in wanted:
                continue
            wanted.add(header.version)
            found.state = _State.READING
            sends.append(self._send(server, "whole"))
        return sends or None

    def finish(self) -> tuple[PlanBook, dict[str, int]]:
        """Return the plan to go on with, and which version was found at each server whose copy can be built upon.

        Raises:
            ConfigError: the copies are of different clusters, or a server that they list is not configured.

        """
        complete = all(found.state is _State.KNOWN for found in self._found.values())
        copies = [self._judge(copy) for copy in self._copies.values()]
        if self._own is not None:
            copies.append(Copy("the balancer itself", self._own, believed=True))
        plan = recover(
            self._servers, copies, is_complete=complete, virtual_nodes=self._virtual_nodes, rules=self._rules
        )
        is_complete = complete and any(copy.believed for copy in copies)
        book = PlanBook(plan, known_plans(copies), is_complete=is_complete)
        fresh = {
            server: found.header.version
            for server, found in self._found.items()
            if found.header is not None and found.header.believed and book.knows(found.header.version)
        }
        return book, {server: version for server, version in fresh.items() if book.change_from(version) is not None}

    def _judge(self, copy: Copy) -> Copy:
        """A version is believed when any server has it from a balancer, and not from its disk."""
        believed = any(
            found.header is not None and found.header.believed and found.header.version == copy.plan.version
            for found in self._found.values()
        )
        return Copy(copy.server, copy.plan, copy.believed or believed)
