"""Finds out whether another balancer has begun a term while this one did not hold the lease.

A process or a machine that is short of CPU renews its lease late, again and again. If each time the term ended, what it
had begun would begin once more, and never be done. So a balancer whose lease has expired is *suspended*: it changes
nothing, and keeps what it has. When it holds the lease again, it reads the terms at the servers. Another balancer that
has led since has begun a newer one at more than half of them, and nobody can while the lease is held: so if more than
half have no newer one, it goes on in its own term.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import ErrorReply, Send
from dynamoth.protocol.fence import READ_TERM, parse_term
from dynamoth.protocol.stored_plan import READ_BELIEVED_VERSION, parse_believed_version

TAG = "resumption"


class Resumption:
    """Reads the terms, once the lease is held again. The owner sends what the methods return, and passes replies on.

    Args:
        number: tells its replies from those of earlier ones.
        term: the term of this balancer.

    """

    def __init__(self, number: int, term: int) -> None:
        self._number = number
        self._term = term
        #: By server.
        self._terms: dict[str, int] = {}
        #: By server, the version that it stores and that counts: what was written earlier has been answered by then.
        self.versions: dict[str, int] = {}

    def read(self, servers: Iterable[str]) -> list[Send]:
        """Read the terms at servers that are connected, and the versions that they store."""
        commands = (("version", READ_BELIEVED_VERSION), ("term", READ_TERM))
        return [Send(server, command, (TAG, self._number, what)) for server in servers for what, command in commands]

    def on_reply(self, server: str, tag: tuple[str, int, str], value: Any, run_id: str | None) -> None:
        """Handle the reply of a server."""
        _, number, what = tag
        if number != self._number:
            return
        if what == "term":
            self._terms[server] = parse_term(value)
            return
        self.versions.pop(server, None)
        with suppress(MalformedMessage):  # the copy is read again, and reported
            if not isinstance(value, ErrorReply) and (version := parse_believed_version(value, run_id)) is not None:
                self.versions[server] = version

    def is_replaced(self, voters: Collection[str]) -> bool | None:
        """Return whether another balancer has begun a term; None before more than half of ``voters`` have answered."""
        if any(term > self._term for term in self._terms.values()):
            return True
        return False if 2 * sum(server in self._terms for server in voters) > len(voters) else None
