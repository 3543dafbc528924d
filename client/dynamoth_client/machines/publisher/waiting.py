"""The records of messages that servers have not answered.

Only the methods here change these records (``tests/machines/test_writers.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


class Waiting:
    """A message that a server has not answered yet, or some of several.

    Class-level defaults; set on the instance only when needed, to save memory.
    """

    def __init__(self, token: Hashable, expires_at: float, channel: bytes) -> None:
        """Begin to wait until ``expires_at``."""
        self.token = token
        #: When no server is waited for any more; and when the message is looked at next, which is not later.
        self.expires_at = self.due_at = expires_at
        self.channel = channel

    #: How many clients got it, by the answers so far; None before the first answer.
    receivers: int | None = None
    #: The latest error that a server has answered with.
    refusal: str = ""
    #: Servers that it was sent to in the place of the first.
    also_at: tuple[str, ...] = ()
    #: If it goes to several replicas: the servers that have not answered.
    missing: tuple[str, ...] = ()
    #: Servers that have it and were not asked yet to forward it to these. None of them is missing.
    holders: tuple[str, ...] = ()
    #: How many requests to forward it are unanswered.
    requests: int = 0
    #: The physical channel and the envelope that it was sent with; None where nothing is promised.
    sent: tuple[bytes, bytes] | None = None
    #: The application has the outcome; a reply that still comes is dropped.
    done: bool = False

    def go_to_replicas(self, servers: Sequence[str], sent: tuple[bytes, bytes] | None) -> None:
        """Wait for several replicas; ``sent`` is what a dispatcher may forward to those that do not answer."""
        self.missing, self.sent = tuple(servers), sent

    def go_elsewhere(self, server: str) -> bool:
        """Note that another replica takes the place of one that is away; return whether that is news."""
        if server in self.also_at:
            return False
        self.also_at = (*self.also_at, server)
        return True

    def answer(self, server: str, receivers: int) -> None:
        """Note that a server has the message."""
        self.receivers = (self.receivers or 0) + receivers
        if self.missing:
            self.holders = (*self.holders, server)
            self._miss_no_more(server)

    def refuse(self, server: str, error: str) -> None:
        """Note that a server has answered with an error."""
        self.refusal = error
        self._miss_no_more(server)

    def _miss_no_more(self, server: str) -> None:
        if self.missing:
            self.missing = tuple(id_ for id_ in self.missing if id_ != server)

    def take_holder(self) -> str | None:
        """Return, once, a server that may be asked to forward the message to those that miss it, if there is one."""
        if not self.missing or not self.holders or self.sent is None:
            return None
        holder, *others = self.holders
        self.holders = tuple(others)
        return holder

    def request(self, number: int) -> None:
        """Count requests to forward it: 1 for one more, -1 for one that was answered."""
        self.requests += number

    def wait_until(self, at: float | None = None) -> None:
        """Set when the message is looked at next: at this time, or when it expires."""
        self.due_at = self.expires_at if at is None else min(at, self.expires_at)

    def expire(self, now: float) -> None:
        """Wait no longer."""
        self.expires_at = now

    def end(self) -> None:
        """Note that the application has the outcome."""
        self.done = True

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        assert self.due_at <= self.expires_at or self.done, f"is looked at too late: {vars(self)}"
        assert set(self.missing).isdisjoint(self.holders), f"has the message and misses it: {vars(self)}"
        assert self.requests >= 0, f"more answers than requests: {vars(self)}"


class Unconfirmed(Waiting):
    """A message whose route was in doubt when it was sent: its outcome is known behind that of a ``Check``."""

    #: The stored plan names the place where it was published, or cannot be read.
    confirmed: bool = False
    #: No further answer of a server is waited for: the outcome is known, but for the confirmation.
    answered: bool = False

    def confirm(self) -> bool:
        """Note the confirmation; return whether the outcome is known now."""
        self.confirmed = True
        return self.answered and not self.done

    def wait_for_confirmation(self) -> bool:
        """Note that the outcome is known but for the confirmation; return whether that is missing."""
        if not self.confirmed:
            self.answered = True
            self.wait_until()
        return not self.confirmed

    def check(self) -> None:
        """Assert the invariants that hold between events."""
        Waiting.check(self)
        assert self.done or not (self.answered and self.confirmed), f"has no outcome: {vars(self)}"


@dataclass(slots=True, eq=False)
class Together:
    """Messages, each for one server only, that went out to it together over the present connection.

    Cheaper than one ``Waiting`` for each, which take its place when the connection is lost.
    """

    tokens: list[Hashable]
    expires_at: float
    #: How many the server has answered: the first ones.
    answered: int = 0
    #: The application has all outcomes; replies that still come are dropped.
    done: bool = False

    def answer(self, count: int) -> Sequence[Hashable]:
        """Note the answers to the next ``count`` messages; return their tokens, or none if all had an outcome."""
        begin = self.answered
        self.answered = end = begin + count
        if self.done:
            return ()
        self.done = end == len(self.tokens)
        return self.tokens[begin:end]

    def end(self) -> Sequence[Hashable]:
        """Wait no longer; return the tokens of the messages that were not answered."""
        self.done = True
        return self.tokens[self.answered :]

    def take_first(self, channel: bytes) -> Waiting:
        """Remove the first message that was not answered and return it, to wait by itself."""
        single = Waiting(self.tokens[self.answered], self.expires_at, channel)
        self.answered += 1
        if self.done:
            single.end()
        return single

    def drop_last(self) -> None:
        """Forget the last message: its command was discarded."""
        self.tokens.pop()


@dataclass(slots=True, eq=False)
class HandOver:
    """The token of a request to forward a message to the replicas that have not answered."""

    message: Waiting
