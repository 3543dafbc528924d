"""The copy of the plan at one server: reads, writes and audits it.

Theory of operation
-------------------
One command (or one series of commands, for a whole plan) is under way at a time, and its result is known before the
next one is sent. So a copy is never half written, and an agent learns of a change only after its server has stored it.
Changes that come up meanwhile are sent together.

Nothing is assumed of a server after a lost connection: the version of its copy is read. If we have not written that
version in this term, the copy itself is read, too, because it may hold unknown entries.

A copy is read again every ``verify_interval_s``: the header, the number of fields, and some of the entries, in turn. So
changes by others are found even if they leave the version as it was.

Clients and the agent may have read what others have written. So the agent is asked to read the copy again, and to have
clients in the wrong place verify again: after each such change, and at the beginning of a term, which may rest on a
forged copy. The query is repeated until somebody has received it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import CommandPart, ErrorReply, Send
from dynamoth.names import AGENT_CHANNEL
from dynamoth.plan.plan import Entry, Plan
from dynamoth.protocol.control import PlanQuery, pack_control
from dynamoth.protocol.fence import REFUSAL, fenced
from dynamoth.protocol.stored_plan import (
    ENTRIES_PER_COMMAND,
    READ_HEADER,
    READ_LENGTH,
    READ_VERSION,
    READ_WHOLE,
    StoredHeader,
    header_fields,
    parse_entries,
    parse_header,
    parse_whole,
    read_entries,
    write_whole,
)
from dynamoth.protocol.wire import shortened
from dynamoth_balancer.events import Note
from dynamoth_balancer.install.book import Change, PlanBook
from dynamoth_balancer.install.recovery import Copy, same_header

TAG = "copy"

PROBE_INTERVAL_S = 0.1
"""Time between two checks whether the plan is still stored. FLUSHALL is common in tests, and new clients wait until the
plan is written again: 46 to 82 ms (10 times, 3 servers). The cost is one command of 70 bytes per server each time: with
3 servers the balancer used 0.5% of a processor, and 0.4% without."""


@dataclass(slots=True)
class CopyFound:
    """A server holds a copy that we did not write, and that may hold unknown entries."""

    copy: Copy


CopyAction = Send | Note | CopyFound


class PlanCopy:
    """The copy at one server. :meth:`sync` drives everything, and may be called at any time."""

    def __init__(
        self, server: str, term: int, retry_s: float, verify_interval_s: float, counters: Counter[str]
    ) -> None:
        """Begin with an unknown copy. ``term`` tells our commands from those of earlier terms."""
        self.server = server
        self._counters = counters
        #: The version that is surely stored there; None while unknown. Never above the plan's.
        self.version: int | None = None
        #: Why the server does not keep the copy; empty if it does.
        self.problem = ""
        self._term = term
        self._retry_s = retry_s
        self._verify_interval_s = verify_interval_s
        #: Whether the server is connected.
        self.is_up = False
        self._run_id: str | None = None
        #: The outstanding command; None when there is none.
        self._sent: str | None = None
        #: Grows when an outstanding command is given up: its reply may still come.
        self._attempt = 0
        #: Whether the copy that is being read was written to this very Redis process.
        self._believed = False
        #: The change or the whole plan that is being written.
        self._writing: Change | Plan | None = None
        #: Outstanding replies before a whole plan can replace the old one.
        self._parts_left = 0
        self._retry_at = -math.inf
        self._verify_at = self._probe_at = -math.inf
        #: Whether fields and entries are to be audited, and the plan to compare them with meanwhile.
        self._is_audit_due = False
        self._audited: Plan | None = None
        #: The index of the entry that the next audit begins with.
        self._audit_from = 0
        #: Whether the agent and clients may have read what no balancer has written.
        self._is_doubtful = False
        self._doubt_at = -math.inf

    def link_up(self, run_id: str | None) -> None:
        """Begin a new connection: the copy is unknown."""
        self.is_up = True
        self._run_id = run_id
        self._lose(-math.inf)

    def link_down(self) -> None:
        """Forget the copy, as its server is away."""
        self.is_up = False
        self._lose(-math.inf)

    def _lose(self, retry_at: float) -> None:
        self._attempt += 1
        self.version = None
        self._sent = None
        self._writing = None
        self._retry_at = retry_at

    def trust_version(self, version: int) -> None:
        """Set the version that was just read over this connection."""
        self.version = version

    def doubt(self) -> None:
        """Have the agent read the copy again, once it has the present version."""
        self._is_doubtful = True

    @property
    def is_written_whole(self) -> bool:
        """Whether the whole plan is being written to a server that stores none, or another one."""
        return isinstance(self._writing, Plan)

    @property
    def is_kept(self) -> bool:
        """Whether the server accepts our writes: its copy may be behind, but only for a moment."""
        return self.is_up and self.version is not None and not self.problem

    def sync(self, book: PlanBook, now: float) -> list[CopyAction]:
        """Bring the copy to the present plan, or check that it is still there, when it is time."""
        if not self.is_up or self._sent is not None or now < self._retry_at:
            return []
        if self.version is None:
            return [self._send("header", READ_HEADER)]
        if self.version == book.plan.version:
            if self._is_doubtful and now >= self._doubt_at:
                self._doubt_at = now + self._retry_s
                query = pack_control(PlanQuery(self.version, is_doubtful=True))
                return [self._send("doubt", (b"PUBLISH", AGENT_CHANNEL, query))]
            if now >= self._verify_at:
                return [self._send("header", READ_HEADER)]
            return self._audit(book.plan) if self._is_audit_due else self._probe(now)
        change = book.change_from(self.version)
        if change is None:
            return self._write_whole(book)
        if book.is_used_up:
            return []
        self._writing = change
        return [self._send("change", fenced(book.term, change.command))]

    def _probe(self, now: float) -> list[CopyAction]:
        """Check that the plan is still stored, when it is time."""
        if now < self._probe_at:
            return []
        self._probe_at = now + PROBE_INTERVAL_S
        return [self._send("probe", READ_VERSION)]

    def _on_probe(self, value: Any, book: PlanBook, now: float) -> list[CopyAction]:
        """Read the header where the version is not the one that we have written."""
        if isinstance(value, list) and value[:1] == [b"%d" % (self.version or 0)]:
            return self.sync(book, now)
        return [self._send("header", READ_HEADER)]

    def _send(self, what: str, command: Sequence[CommandPart]) -> Send:
        self._sent = what
        return Send(self.server, command, (TAG, self._term, self._attempt, what))

    def _write_whole(self, book: PlanBook) -> list[CopyAction]:
        """Send all but the last command: the plan replaces the old one only when every part is stored."""
        if book.is_used_up:
            self._lose(-math.inf)
            return []
        plan = self._writing = book.plan
        parts = write_whole(plan, self._run_id)[:-1]
        self._parts_left = len(parts)
        return [self._send("part", fenced(book.term, part)) for part in parts]

    def on_reply(self, tag: tuple[str, int, int, str], value: Any, book: PlanBook, now: float) -> list[CopyAction]:
        """Handle the reply to a command of ours."""
        _, term, attempt, what = tag
        if term != self._term or attempt != self._attempt:
            return []  # of an earlier term, or a further part of a plan that was given up
        assert what == self._sent, f"{self.server} answered {what}, not {self._sent}"
        if what == "doubt":
            self._sent = None
            self._is_doubtful = not isinstance(value, int) or not value
            return self.sync(book, now)
        if isinstance(value, ErrorReply):
            return self._on_refusal(str(value), book, now)
        if what == "part":
            self._parts_left -= 1
            if not self._parts_left:
                assert isinstance(self._writing, Plan)
                end = Plan(self._writing.version, self._writing.servers, self._writing.base)
                return [self._send("place", fenced(book.term, write_whole(end, self._run_id)[-1]))]
            return []
        self._sent = None
        handlers = {
            "probe": self._on_probe,
            "header": self._on_header,
            "whole": self._on_whole,
            "length": self._on_length,
            "entries": self._on_entries,
        }
        return handlers.get(what, self._on_written)(value, book, now)

    def _on_refusal(self, text: str, book: PlanBook, now: float) -> list[CopyAction]:
        """Try again later; further replies to this command are ignored."""
        what = self._sent
        self._lose(now + self._retry_s)
        if text.startswith(REFUSAL):
            book.fenced_at = self.server
            return []
        if text.startswith("WRONGTYPE") and what in ("probe", "header", "whole", "length", "entries"):
            return [self._damaged(text), *self._write_whole(book)]
        first = self.problem != text
        self.problem = text
        details = {"server": self.server, "command": what, "reply": text}
        return [Note("error", "a server refuses to keep the plan: see its reply", details)] if first else []

    # Reading.

    def _on_header(self, value: Any, book: PlanBook, now: float) -> list[CopyAction]:
        try:
            header = parse_header(value, self._run_id)
        except MalformedMessage as error:
            return [self._damaged(str(error)), *self._write_whole(book)]
        notes: list[CopyAction] = []
        if self.version is not None and (header is None or header.version != self.version or not header.believed):
            notes.append(self._changed({"version": self.version, "found": header and header.version}))
        if header is not None and book.knows(header.version) and not notes and not self._header_is_ours(header, book):
            notes.append(self._changed({"version": header.version, "servers_listed": len(header.plan.servers)}))
        self.version = None
        if header is None:
            return [*notes, *self._write_whole(book)]
        if not book.knows(header.version):
            self._believed = header.believed
            return [*notes, self._send("whole", READ_WHOLE)]
        if not header.believed or (header.version != book.plan.version and book.change_from(header.version) is None):
            return [*notes, *self._write_whole(book)]
        if notes:
            self._counters["copies_conflicting"] += 1
            return [*notes, *self._write_whole(book)]
        self._is_audit_due = True
        return self._known(header.version, book, now)

    def _header_is_ours(self, header: StoredHeader, book: PlanBook) -> bool:
        """Return whether servers, ring and rules are right; always True for a version not written in this term."""
        if self.version is None:
            return True
        is_older = header.version != book.plan.version
        return same_header(header.plan, book.plan) and (
            is_older or header.plan.compatibility == book.plan.compatibility
        )

    def _known(self, version: int, book: PlanBook, now: float) -> list[CopyAction]:
        self.version = version
        if version == book.plan.version:
            self.problem = ""
        self._verify_at = now + self._verify_interval_s
        return self.sync(book, now)

    def _on_whole(self, value: Any, book: PlanBook, now: float) -> list[CopyAction]:
        try:
            plan = parse_whole(value, None)
        except MalformedMessage as error:
            return [self._damaged(str(error)), *self._write_whole(book)]
        if plan is None:
            return self._write_whole(book)
        self._retry_at = now + self._retry_s  # if the owner does not take it, it is read again then
        return [CopyFound(Copy(self.server, plan, self._believed))]

    def _damaged(self, reason: str) -> Note:
        self._is_doubtful = True
        details = {"server": self.server, "reason": reason}
        return Note("error", "what a server stores as the plan cannot be read; it is written again", details)

    # Auditing: one reading after the other, so that nothing is written in between.

    def _audit(self, plan: Plan) -> list[CopyAction]:
        self._is_audit_due = False
        self._audited = plan
        return [self._send("length", READ_LENGTH)]

    def _on_length(self, value: Any, book: PlanBook, now: float) -> list[CopyAction]:
        assert self._audited is not None, "only an audit sends this"
        entries = len(self._audited.entries)
        expected = entries + header_fields(self._audited)
        if value != expected:
            return self._repair({"fields": value, "expected": expected}, book)
        if not entries:
            return self.sync(book, now)
        self._audit_from %= entries
        return [self._send("entries", read_entries(self._audited_entries()))]

    def _on_entries(self, value: Any, book: PlanBook, now: float) -> list[CopyAction]:
        expected = self._audited_entries()
        try:
            stored = parse_entries(value)
        except MalformedMessage as error:
            return [self._damaged(str(error)), *self._write_whole(book)]
        if different := [
            channel for channel, entry in zip(expected, stored, strict=True) if entry != expected[channel]
        ]:
            return self._repair({"channels": len(different), "one_of_them": shortened(different[0])}, book)
        self._audit_from += len(expected)
        return self.sync(book, now)

    def _audited_entries(self) -> dict[bytes, Entry]:
        """Return the next part of the audited plan's entries."""
        assert self._audited is not None, "only an audit sends this"
        return dict(islice(self._audited.entries.items(), self._audit_from, self._audit_from + ENTRIES_PER_COMMAND))

    def _repair(self, details: dict[str, Any], book: PlanBook) -> list[CopyAction]:
        """Report a change by somebody else, and overwrite it."""
        self.version = None
        self._counters["copies_conflicting"] += 1
        return [self._changed(details), *self._write_whole(book)]

    def _changed(self, details: dict[str, Any]) -> Note:
        self._is_doubtful = True
        text = "somebody else has changed the stored plan; it is written again: see who may write the key"
        return Note("error", text, {"server": self.server, **details})

    # What another balancer has written.

    def resume(self) -> None:
        """Continue after ``CopyFound``: the book includes the copy now."""
        self._is_doubtful = True
        self._retry_at = -math.inf

    def overwrite(self, book: PlanBook) -> list[CopyAction]:
        """Continue after ``CopyFound`` by overwriting the copy."""
        self._is_doubtful = True
        self._retry_at = -math.inf
        return self._write_whole(book)

    def leave_alone(self, problem: str, now: float) -> None:
        """Leave a copy that contradicts the book. It is read again after ``retry_s``."""
        self.problem = problem
        self._retry_at = now + self._retry_s

    # Writing.

    def _on_written(self, value: Any, book: PlanBook, now: float) -> list[CopyAction]:
        writing, self._writing = self._writing, None
        if isinstance(writing, Plan):
            query = pack_control(PlanQuery(writing.version))
            news: CopyAction = Send(self.server, (b"PUBLISH", AGENT_CHANNEL, query))
            return [news, *self._known(writing.version, book, now)]
        assert writing is not None, f"{self.server} has stored something that was not sent"
        if value != writing.new_fields:
            return self._repair({"new_fields": value, "expected": writing.new_fields}, book)
        news = Send(self.server, (b"PUBLISH", AGENT_CHANNEL, writing.message))
        return [news, *self._known(writing.delta.version, book, now)]
