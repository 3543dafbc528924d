"""Claims a term for a balancer that has got the lease; see ``dynamoth.protocol.fence``.

It reads the terms and versions at the servers that answer, claims a term above all of them there, and has it when more
than half of the servers that count have granted it. From then on nothing that an earlier balancer writes takes effect
at these servers, so what is read there afterwards is its last word. Other servers get the term with the first write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dynamoth.machine.events import ErrorReply, Send
from dynamoth.names import TERM_KEY
from dynamoth.plan.plan import TAKEOVER_VERSIONS
from dynamoth.protocol.fence import READ_TERM, claim, parse_term
from dynamoth.protocol.stored_plan import READ_VERSION
from dynamoth_balancer.events import Note
from dynamoth_balancer.install.quorum import is_majority
from dynamoth_balancer.install.recovery import is_used_up

RETRY_S = 0.5
"""A server that refuses the claim is asked again after this time."""


@dataclass(slots=True)
class _Answers:
    """The answers of one server over its present connection."""

    #: Its term; None before the reply.
    term: int | None = None
    #: The version that it stores, 0 for none; None before the reply.
    version: int | None = None
    #: The term that was claimed last, and whether it was granted.
    claimed: int = 0
    is_granted: bool = False
    #: Whether a claim is outstanding.
    is_asked: bool = False
    retry_at: float = -math.inf
    #: Its answer if it is an error.
    problem: str = ""


class Claim:
    """Gets a term. The owner sends what the methods return, and passes replies on."""

    def __init__(self, servers: Iterable[str], floor: int, tag: tuple[str, int]) -> None:
        """Begin; ``servers`` are those that count, ``floor`` is a version that the term must be above.

        ``tag`` is the beginning of the tags.
        """
        self._servers = list(servers)
        self._tag = tag
        #: By server, those that are connected.
        self._answers: dict[str, _Answers] = {}
        #: The highest term or version seen; 0 in a new cluster.
        self.seen = floor
        #: The term that is claimed; 0 before the first attempt.
        self.term = 0
        #: All terms that were claimed here: after a reconnect a server shows them.
        self._claimed: set[int] = set()

    @property
    def is_granted(self) -> bool:
        """Whether more than half of the servers have granted the term."""
        answers = [self._answers[server] for server in self._servers if server in self._answers]
        granted = sum(each.is_granted and each.claimed == self.term for each in answers)
        return is_majority(granted, len(self._servers))

    @property
    def highest_granted(self) -> int:
        """The highest term that a server had granted to somebody else; 0 for none."""
        terms = {each.term or 0 for each in self._answers.values()}
        return max(terms - self._claimed, default=0)

    def problems(self) -> dict[str, str]:
        """Return the answers of the servers that refuse the commands."""
        return {server: each.problem for server, each in self._answers.items() if each.problem}

    def link_up(self, server: str) -> list[Send]:
        """Ask over a new connection."""
        self._answers[server] = _Answers()
        return [
            Send(server, READ_TERM, (*self._tag, "term")),
            Send(server, READ_VERSION, (*self._tag, "version")),
        ]

    def link_down(self, server: str) -> None:
        """Forget what a connection has shown."""
        self._answers.pop(server, None)

    def on_reply(self, server: str, what: str, value: Any) -> list[Note]:
        """Handle the reply to a command of ours."""
        answers = self._answers[server]
        before = answers.problem
        if what == "term":
            answers.term = parse_term(value)
            self._see(answers.term)
        elif what == "version":
            answers.version = _version_in(value)
            self._see(answers.version)
        else:
            answers.is_asked = False
            answers.is_granted = value == 0
            answers.problem = _problem_in(value)
            if isinstance(value, int):
                self._see(value)
        if not answers.problem or answers.problem == before:
            return []
        details = {"server": server, "reply": answers.problem}
        text = "a server refuses the term of this balancer, without which it may not write the plan"
        if isinstance(value, ErrorReply):
            text += ": see `dynamoth acl`"
        return [Note("error", text, details)]

    def _see(self, number: int) -> None:
        if not is_used_up(number):  # an impossible one is forged, or from a damaged plan
            self.seen = max(self.seen, number)

    def look(self, now: float) -> list[Send]:
        """Claim a term, if that is due: when all connected servers, and more than half of all, have answered."""
        if any(None in (each.term, each.version) for each in self._answers.values()):
            return []
        if not is_majority(sum(server in self._answers for server in self._servers), len(self._servers)):
            return []
        if not self.term or self.seen >= self.term:
            self.term = self.seen + TAKEOVER_VERSIONS
            self._claimed.add(self.term)
        sends: list[Send] = []
        for server, each in self._answers.items():
            is_due = each.claimed != self.term or (not each.is_granted and now >= each.retry_at)
            if is_due and not each.is_asked:
                each.claimed, each.is_granted, each.is_asked = self.term, False, True
                each.retry_at = now + RETRY_S
                sends.append(Send(server, claim(self.term), (*self._tag, "claim")))
        return sends


def _problem_in(reply: Any) -> str:
    """Return what is wrong, by the reply to a claim, and more than a higher term can mend."""
    if isinstance(reply, ErrorReply):
        return str(reply)
    if isinstance(reply, int) and is_used_up(reply):
        name = TERM_KEY.decode()
        return f"{name} has the value {reply}, after which there are no more terms; only forgery does this: DEL {name}"
    return ""


def _version_in(reply: Any) -> int:
    """Return the version in the reply of READ_VERSION; 0 where there is none that can be read."""
    values: list[Any] = [*reply] if isinstance(reply, list) else []
    value = values[0] if values else None
    return int(value) if isinstance(value, bytes) and value.isdigit() else 0
